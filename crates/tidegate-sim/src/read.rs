//! The reader of scenarios: TOML, read as strictly as a policy. The policy's own sections stand beside the scenario's.
//! A function that returns `None` has reported an error.

mod clients;
mod environment;
mod values;

use tidegate_core::{Span, Time};
use tidegate_policy::document::{DocumentReader, TomlDocument, TomlNode, TomlTable};
use tidegate_policy::{Errors, Policy};

use crate::scenario::Scenario;
use crate::setup::{Arrivals, ClientSpec, LoadSpec, RecoveryCheckSpec, Setup, TimeRange};
use crate::simulation::check_load;
use values::{count, optional, reject, value_or};

/// The largest number of cases, and of strategies.
const MAX_SECTIONS: usize = 100;
/// The longest duration of a run, and of `within`.
const MAX_DURATION: Span = Span::from_secs(366 * 86_400);
/// The largest number of repetitions.
const MAX_TRIALS: u64 = 10_000;
/// 2026-01-01T00:00:00Z.
const DEFAULT_START: Time = Time::from_secs(1_767_225_600);

/// The sections of the policy.
const POLICY_SECTIONS: [&str; 2] = ["inbound", "outbound"];
/// The keys that a case may change.
const CASE_KEYS: [&str; 12] = [
    "duration",
    "measure",
    "trials",
    "starts_at",
    "service",
    "network",
    "load",
    "client",
    "store",
    "check",
    "inbound",
    "outbound",
];

impl Scenario {
    /// Reads a scenario; see `docs/simulate.md` for its settings. Errors call the text `name`.
    ///
    /// # Errors
    /// All errors of the text, each with its place and, if there is one, the nearest name that is valid.
    pub fn read(name: &str, body: &[u8]) -> Result<Self, Errors> {
        let document = TomlDocument::parse(name, body)?;
        let mut reader = DocumentReader::new(&document);
        let scenario = scenario(&mut reader, document.root());
        reader.finish()?;
        Ok(scenario.expect("invariant: a reader without a value has reported an error"))
    }
}

fn scenario(reader: &mut DocumentReader<'_>, root: &TomlTable) -> Option<Scenario> {
    let own = ["title", "about", "seed", "strategy", "case"];
    reader.check_names(root, "a scenario", &[&own[..], &CASE_KEYS].concat());
    let title = optional_text(reader, root, "title", "the scenario's title, in quotes");
    let about = optional_text(reader, root, "about", "what it shows, in quotes");
    let seed = value_or(reader, root, "seed", 1, |reader, node, key| reader.integer(node, key, 0..=u64::MAX >> 1));
    let cases = titled_sections(reader, root, "case", &CASE_KEYS);
    let strategies = titled_sections(reader, root, "strategy", &clients::strategy_keys());
    let (cases, strategies) = (cases?, strategies?);
    let pairs = cases.iter().flat_map(|case| strategies.iter().map(move |strategy| (case, strategy)));
    let setups: Vec<Option<Setup>> = pairs.map(|(case, strategy)| setup(reader, root, case, strategy)).collect();
    let setups = setups.into_iter().collect::<Option<_>>();
    Some(Scenario { title: title?, about: about?, seed: seed?, setups: setups? })
}

fn optional_text(reader: &mut DocumentReader<'_>, table: &TomlTable, key: &str, expected: &str) -> Option<String> {
    value_or(reader, table, key, String::new(), |reader, node, key| {
        reader.string(node, key, expected).map(str::to_owned)
    })
}

/// Returns the tables within a table. Without any, returns one that is empty and has no name.
fn titled_sections(
    reader: &mut DocumentReader<'_>,
    root: &TomlTable,
    key: &str,
    known: &[&str],
) -> Option<Vec<TitledSection>> {
    let Some(node) = root.node(key) else { return Some(vec![TitledSection::default()]) };
    let expected = format!("sections of their own, [{key}.NAME]");
    let Some(table) = node.as_table() else {
        return reject(reader, node.at, format!("`{key}` is no section"), expected);
    };
    let count = table.entries.len();
    if count == 0 || count > MAX_SECTIONS {
        return reject(reader, node.at, format!("`{key}` has {count} sections"), format!("1 to {MAX_SECTIONS}"));
    }
    let names = [&["title"], known].concat();
    let sections = table.entries.iter().map(|entry| {
        let Some(table) = entry.node.as_table() else {
            return reject(reader, entry.node.at, format!("`{}` is no section", entry.key), &expected);
        };
        reader.check_names(table, &format!("[{key}.{}]", entry.key), &names);
        let title = optional_text(reader, table, "title", "a title, in quotes")?;
        let title = if title.is_empty() { entry.key.clone() } else { title };
        Some(TitledSection { title, table: table.clone() })
    });
    sections.collect()
}

fn setup(
    reader: &mut DocumentReader<'_>,
    root: &TomlTable,
    case: &TitledSection,
    strategy: &TitledSection,
) -> Option<Setup> {
    let root = root.merged_with(&case.table).merged_with(&entries_of(&strategy.table, &clients::OVERRIDE_KEYS));
    let duration = value_or(reader, &root, "duration", Span::from_secs(60), bounded_duration);
    let measured_range =
        optional(reader, &root, "measure", |reader, node, key| measured_range(reader, node, key, duration?));
    let trials = value_or(reader, &root, "trials", 1, count(1..=MAX_TRIALS));
    let starts_at = value_or(reader, &root, "starts_at", DEFAULT_START, timestamp);
    let policy = policy(reader, &root);
    let service = environment::service(reader, &root);
    let network = environment::network(reader, &root);
    let store = environment::store(reader, &root);
    let loads = environment::loads(reader, &root);
    let recovery_check = recovery_check(reader, &root);
    let policy = policy?;
    let client = clients::client(reader, &root, strategy, policy.as_ref());
    let has_gate = root.get("inbound").is_some();
    let gate = value_or(reader, &strategy.table, "gate", has_gate, DocumentReader::boolean);
    let setup = Setup {
        case: case.title.clone(),
        strategy: match (&*strategy.title, client.as_ref()?) {
            ("", ClientSpec::Plain(_)) => "plain".to_owned(),
            ("", ClientSpec::Tidegate { .. }) => "tidegate".to_owned(),
            (title, _) => title.to_owned(),
        },
        starts_at: starts_at?,
        duration: duration?,
        measured_range: measured_range?,
        trials: trials?,
        service: service?,
        network: network?,
        loads: loads?,
        client: client?,
        store: store?,
        policy,
        gate: gate? && has_gate,
        recovery_check: recovery_check?,
    };
    check_retries_take_time(reader, &setup)?;
    check_gate_decides(reader, &root, &setup)?;
    check_paced_loads(reader, &root, &setup)?;
    Some(setup)
}

fn policy(reader: &mut DocumentReader<'_>, root: &TomlTable) -> Option<Option<Policy>> {
    let sections = entries_of(root, &POLICY_SECTIONS);
    if sections.entries.is_empty() { Some(None) } else { reader.policy(&sections).map(Some) }
}

/// Checks that unlimited attempts take time, so that the virtual clock advances.
fn check_retries_take_time(reader: &mut DocumentReader<'_>, setup: &Setup) -> Option<()> {
    let ClientSpec::Plain(plain) = &setup.client else { return Some(()) };
    let takes_time = plain.backoff.is_some_and(|backoff| !backoff.base.is_zero())
        || plain.pacer.is_some()
        || setup.network.delay.can_be_nonzero();
    if plain.attempts.is_none() && !takes_time {
        let message = format!("the tries of `{}` are unlimited and may take no time", setup.strategy);
        reader.report_missing(&message, "a `backoff`, or a `delay` of the network");
        return None;
    }
    Some(())
}

/// Checks that the gate can decide about all calls.
fn check_gate_decides(reader: &mut DocumentReader<'_>, root: &TomlTable, setup: &Setup) -> Option<()> {
    let Some(policy) = setup.policy.as_ref().filter(|_| setup.gate) else { return Some(()) };
    let mut result = Some(());
    for load in &setup.loads {
        let Err(error) = check_load(policy.plan(), load) else { continue };
        let message = format!("the gate can't decide about `{}`: {error}", load.name);
        result = reject_load(reader, root, load, message, "an action that counts by client_ip or key");
    }
    result
}

/// Checks that clients with a pace make one call after the other.
fn check_paced_loads(reader: &mut DocumentReader<'_>, root: &TomlTable, setup: &Setup) -> Option<()> {
    let is_paced = matches!(&setup.client, ClientSpec::Plain(plain) if plain.pacer.is_some());
    let open = setup.loads.iter().find(|load| is_paced && !matches!(load.arrivals, Arrivals::Serial { .. }));
    let Some(open) = open else { return Some(()) };
    let message = format!("`{}` keeps a `pace` and calls whatever becomes of earlier calls", open.name);
    reject_load(reader, root, open, message, "`calls` or `think`, one call after the other")
}

/// Reports an error at the name of a load.
fn reject_load(
    reader: &mut DocumentReader<'_>,
    root: &TomlTable,
    load: &LoadSpec,
    message: String,
    expected: &str,
) -> Option<()> {
    let entry = root.node("load").and_then(TomlNode::as_table).and_then(|loads| loads.get(&load.name))?;
    reject(reader, entry.key_at, message, expected)
}

fn bounded_duration(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Span> {
    let span = reader.duration(node, key)?;
    if span > MAX_DURATION {
        return reject(reader, node.at, format!("`{key}` is longer than a year"), "a shorter duration");
    }
    Some(span)
}

/// Reads one time range within the run.
fn measured_range(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str, duration: Span) -> Option<TimeRange> {
    const EXPECTED: &str = "the span of time for which goodput is measured, such as \"20s to 60s\"";
    match *values::time_ranges(reader, node, key)? {
        [range] if range.until <= duration => Some(range),
        [range] => {
            let message = format!("`measure` goes to {}, and the run to {duration}", range.until);
            reject(reader, node.at, message, EXPECTED)
        }
        _ => reject(reader, node.at, "`measure` is not one stretch of time", EXPECTED),
    }
}

fn timestamp(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Time> {
    const EXPECTED: &str = "a moment such as \"2026-11-21T20:00:00Z\"";
    let text = reader.string(node, key, EXPECTED)?;
    let micros = text.parse().ok().and_then(|time: jiff::Timestamp| u64::try_from(time.as_microsecond()).ok());
    let time = micros.map(Time::from_micros);
    time.or_else(|| reject(reader, node.at, format!("`starts_at` is `{text}`"), EXPECTED))
}

fn recovery_check(reader: &mut DocumentReader<'_>, root: &TomlTable) -> Option<RecoveryCheckSpec> {
    let table = section(reader, root, "check", &["within", "share"])?.unwrap_or_default();
    let within = value_or(reader, &table, "within", Span::from_secs(10), bounded_duration);
    let share = value_or(reader, &table, "share", 900, |reader, node, key| reader.share(node, key, 1));
    Some(RecoveryCheckSpec { within: within?, share: f64::from(share?) / 1000.0 })
}

/// Reads a section; `Some(None)` if it is missing.
fn section(reader: &mut DocumentReader<'_>, table: &TomlTable, key: &str, known: &[&str]) -> Option<Option<TomlTable>> {
    optional(reader, table, key, |reader, node, key| {
        let Some(section) = node.as_table() else {
            return reject(reader, node.at, format!("`{key}` is no section"), format!("a section, [{key}]"));
        };
        reader.check_names(section, &format!("[{key}]"), known);
        Some(section.clone())
    })
}

/// Returns the entries with these keys.
fn entries_of(table: &TomlTable, keys: &[&str]) -> TomlTable {
    let entries = table.entries.iter().filter(|entry| keys.contains(&entry.key.as_str()));
    TomlTable { entries: entries.cloned().collect() }
}

/// A case or a strategy.
#[derive(Default)]
struct TitledSection {
    title: String,
    table: TomlTable,
}
