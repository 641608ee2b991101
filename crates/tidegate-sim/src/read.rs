//! The reader of scenarios: TOML, read as strictly as a policy. The policy's own sections stand beside the scenario's.

mod clients;
mod environment;
mod values;

use tidegate_core::{Span, Time};
use tidegate_policy::document::{DocumentReader, TomlDocument, TomlEntry, TomlNode, TomlTable, TomlValue};
use tidegate_policy::{Errors, Policy};

use crate::scenario::Scenario;
use crate::setup::{Arrivals, ClientSpec, LoadSpec, RecoveryCheckSpec, Setup, TimeRange};
use crate::simulation::{key_seed, load_action};

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
const CASE_KEYS: [&str; 11] = [
    "duration",
    "measure",
    "trials",
    "starts_at",
    "service",
    "network",
    "load",
    "store",
    "check",
    "inbound",
    "outbound",
];

pub(crate) fn read_scenario(name: &str, body: &[u8]) -> Result<Scenario, Errors> {
    let document = TomlDocument::parse(name, body)?;
    let mut reader = DocumentReader::new(&document);
    let read = ScenarioReader { reader: &mut reader }.scenario(document.root());
    reader.finish()?;
    Ok(read.expect("invariant: what couldn't be read was told to be wrong"))
}

/// Reads a scenario. A method that returns `None` has reported the error.
struct ScenarioReader<'r, 't> {
    reader: &'r mut DocumentReader<'t>,
}

impl ScenarioReader<'_, '_> {
    fn scenario(&mut self, root: &TomlTable) -> Option<Scenario> {
        let own = ["title", "about", "seed", "client", "strategy", "case"];
        let known: Vec<&str> = own.into_iter().chain(CASE_KEYS).collect();
        self.reader.check_names(root, "a scenario", &known);
        let title = self.optional_text(root, "title", "the scenario's title, in quotes");
        let about = self.optional_text(root, "about", "what it shows, in quotes");
        let seed = root.node("seed").map_or(Some(1), |node| self.reader.integer(node, "seed", 0..=u64::MAX >> 1));
        let cases = self.titled_sections(root, "case", &CASE_KEYS);
        let strategies = self.titled_sections(root, "strategy", &clients::STRATEGY_KEYS);
        let (cases, strategies) = (cases?, strategies?);
        let mut setups = Vec::new();
        for case in &cases {
            for strategy in &strategies {
                setups.push(self.setup(root, case, strategy));
            }
        }
        let setups: Option<Vec<Setup>> = setups.into_iter().collect();
        Some(Scenario { title: title?, about: about?, seed: seed?, setups: setups? })
    }

    fn optional_text(&mut self, table: &TomlTable, key: &str, expected: &str) -> Option<String> {
        let Some(node) = table.node(key) else { return Some(String::new()) };
        self.reader.string(node, key, expected).map(str::to_owned)
    }

    /// Returns the tables within a table. Without any, returns one that is empty and has no name.
    fn titled_sections(&mut self, root: &TomlTable, key: &str, known: &[&str]) -> Option<Vec<TitledSection>> {
        let Some(entry) = root.get(key) else { return Some(vec![TitledSection::default()]) };
        let expected = format!("sections of their own, [{key}.NAME]");
        let Some(table) = entry.node.as_table() else {
            self.reader.report(entry.node.at, format!("`{key}` is no section"), expected);
            return None;
        };
        let count = table.entries.len();
        if count == 0 || count > MAX_SECTIONS {
            self.reader.report(entry.node.at, format!("`{key}` has {count} sections"), format!("1 to {MAX_SECTIONS}"));
            return None;
        }
        let mut kinds = Vec::with_capacity(count);
        for entry in &table.entries {
            let Some(table) = entry.node.as_table() else {
                self.reader.report(entry.node.at, format!("`{}` is no section", entry.key), expected);
                return None;
            };
            let called = format!("[{key}.{}]", entry.key);
            let names: Vec<&str> = ["title"].into_iter().chain(known.iter().copied()).collect();
            self.reader.check_names(table, &called, &names);
            let title = self.optional_text(table, "title", "a title, in quotes")?;
            kinds.push(TitledSection {
                title: if title.is_empty() { entry.key.clone() } else { title },
                table: table.clone(),
            });
        }
        Some(kinds)
    }

    fn setup(&mut self, root: &TomlTable, case: &TitledSection, strategy: &TitledSection) -> Option<Setup> {
        let changes =
            strategy.table.entries.iter().filter(|entry| clients::OVERRIDE_KEYS.contains(&entry.key.as_str()));
        let root = root.merged_with(&case.table).merged_with(&TomlTable { entries: changes.cloned().collect() });
        let duration = self.bounded_duration(&root, "duration", Span::from_secs(60));
        let measured = match root.node("measure") {
            Some(node) => duration.and_then(|duration| self.measured_range(node, duration)).map(Some),
            None => Some(None),
        };
        let trials = root.node("trials").map_or(Some(1), |node| self.reader.integer(node, "trials", 1..=MAX_TRIALS));
        let starts_at = root.node("starts_at").map_or(Some(DEFAULT_START), |node| self.timestamp(node));
        let policy = self.policy(&root);
        let (service, network, store) = (self.service(&root), self.network(&root), self.store(&root));
        let loads = self.loads(&root);
        let check = self.recovery_check(&root);
        let policy = policy?;
        let client = self.client(&root, strategy, policy.as_ref());
        let gates = root.get("inbound").is_some();
        let gate = match strategy.table.node("gate") {
            Some(node) => self.reader.boolean(node, "gate"),
            None => Some(gates),
        };
        let setup = Setup {
            case: case.title.clone(),
            strategy: if strategy.title.is_empty() {
                client.as_ref()?.name().to_owned()
            } else {
                strategy.title.clone()
            },
            starts_at: starts_at?,
            duration: duration?,
            measured_range: measured?,
            trials: trials? as u32,
            service: service?,
            network: network?,
            loads: loads?,
            client: client?,
            store: store?,
            policy,
            gate: gate? && gates,
            recovery_check: check?,
        };
        self.check_retries_take_time(&setup)?;
        self.check_gate_decides(&root, &setup)?;
        self.check_paced_loads(&root, &setup)?;
        Some(setup)
    }

    fn policy(&mut self, root: &TomlTable) -> Option<Option<Policy>> {
        let entries = root.entries.iter().filter(|entry| POLICY_SECTIONS.contains(&entry.key.as_str()));
        let policy = TomlTable { entries: entries.cloned().collect() };
        if policy.entries.is_empty() {
            return Some(None);
        }
        self.reader.policy(&policy).map(Some)
    }

    /// Checks that unlimited attempts take time, so that the virtual clock advances.
    fn check_retries_take_time(&mut self, setup: &Setup) -> Option<()> {
        let ClientSpec::Plain(plain) = &setup.client else { return Some(()) };
        let takes_time =
            plain.backoff.is_some_and(|backoff| !backoff.base.is_zero()) || setup.network.delay.can_be_nonzero();
        let takes_time = takes_time || plain.pacer.is_some();
        if plain.attempts.is_none() && !takes_time {
            let message = format!("the tries of `{}` are unlimited and may take no time", setup.strategy);
            self.reader.report_missing(&message, "a `backoff`, or a `delay` of the network");
            return None;
        }
        Some(())
    }

    /// Checks that the gate can decide about all calls.
    fn check_gate_decides(&mut self, root: &TomlTable, setup: &Setup) -> Option<()> {
        let Some(policy) = setup.policy.as_ref().filter(|_| setup.gate) else { return Some(()) };
        let mut result = Some(());
        for load in &setup.loads {
            let Err(error) = load_action(policy.plan(), load, &key_seed()) else { continue };
            if let Some(entry) = load_entry(root, load) {
                let expected = "an action that counts by client_ip or key";
                self.reader.report(
                    entry.key_at,
                    format!("the gate can't decide about `{}`: {error}", load.name),
                    expected,
                );
            }
            result = None;
        }
        result
    }

    /// Checks that clients with a pace make one call after the other.
    fn check_paced_loads(&mut self, root: &TomlTable, setup: &Setup) -> Option<()> {
        let paced = matches!(&setup.client, ClientSpec::Plain(plain) if plain.pacer.is_some());
        let open = setup.loads.iter().find(|load| !matches!(load.arrivals, Arrivals::Serial { .. }));
        let Some(open) = open.filter(|_| paced) else { return Some(()) };
        if let Some(entry) = load_entry(root, open) {
            let message = format!("`{}` keeps a `pace` and calls whatever becomes of earlier calls", open.name);
            self.reader.report(entry.key_at, message, "`calls` or `think`, one call after the other");
        }
        None
    }

    fn bounded_duration(&mut self, table: &TomlTable, key: &str, default: Span) -> Option<Span> {
        let Some(node) = table.node(key) else { return Some(default) };
        let span = self.reader.duration(node, key)?;
        if span > MAX_DURATION {
            self.reader.report(node.at, format!("`{key}` is longer than a year"), "a shorter duration");
            return None;
        }
        Some(span)
    }

    /// Reads one time range within the run.
    fn measured_range(&mut self, node: &TomlNode, duration: Span) -> Option<TimeRange> {
        const EXPECTED: &str = "the stretch of the run that goodput is taken over, such as \"20s to 60s\"";
        match *values::time_ranges(self.reader, node, "measure")? {
            [stretch] if stretch.until <= duration => Some(stretch),
            [stretch] => {
                let message = format!("`measure` goes to {}, and the run to {duration}", stretch.until);
                self.reader.report(node.at, message, EXPECTED);
                None
            }
            _ => {
                self.reader.report(node.at, "`measure` is not one stretch of time", EXPECTED);
                None
            }
        }
    }

    fn timestamp(&mut self, node: &TomlNode) -> Option<Time> {
        const EXPECTED: &str = "a moment such as \"2026-11-21T20:00:00Z\"";
        let text = self.reader.string(node, "starts_at", EXPECTED)?;
        let moment =
            text.parse::<jiff::Timestamp>().ok().and_then(|moment| u64::try_from(moment.as_microsecond()).ok());
        if moment.is_none() {
            self.reader.report(node.at, format!("`starts_at` is `{text}`"), EXPECTED);
        }
        moment.map(Time::from_micros)
    }

    fn recovery_check(&mut self, root: &TomlTable) -> Option<RecoveryCheckSpec> {
        let default = RecoveryCheckSpec { within: Span::from_secs(10), share: 0.9 };
        let Some(table) = self.section(root, "check", &["within", "share"])? else { return Some(default) };
        let within = self.bounded_duration(&table, "within", default.within);
        let share = table.node("share").map_or(Some(default.share), |node| {
            self.reader.share(node, "share", 1).map(|share| f64::from(share) / 1000.0)
        });
        Some(RecoveryCheckSpec { within: within?, share: share? })
    }

    /// Reads a section; `Some(None)` if it is missing.
    fn section(&mut self, table: &TomlTable, key: &str, known: &[&str]) -> Option<Option<TomlTable>> {
        let Some(entry) = table.get(key) else { return Some(None) };
        let TomlValue::Table(section) = &entry.node.value else {
            self.reader.report(entry.node.at, format!("`{key}` is no section"), format!("a section, [{key}]"));
            return None;
        };
        self.reader.check_names(section, &format!("[{key}]"), known);
        Some(Some(section.clone()))
    }
}

/// Returns the place of a load in the document.
fn load_entry<'t>(root: &'t TomlTable, load: &LoadSpec) -> Option<&'t TomlEntry> {
    root.node("load").and_then(TomlNode::as_table).and_then(|loads| loads.get(&load.name))
}

/// A case or a strategy.
#[derive(Default)]
struct TitledSection {
    title: String,
    table: TomlTable,
}
