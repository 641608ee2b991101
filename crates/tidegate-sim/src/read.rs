//! A scenario's words: TOML, read as strictly as a policy, with the policy's own sections beside the scenario's.

mod clients;
mod forms;
mod places;

use tidegate_core::{Span, Time};
use tidegate_policy::document::{Document, Entry, Node, Reader, Table, Value};
use tidegate_policy::{Errors, Policy};

use crate::scenario::Scenario;
use crate::setup::{Arrivals, CheckSpec, ClientSpec, Load, Setup, Stretch};
use crate::world::{action_of, key_seed};

/// The most cases, and the most strategies.
const MAX_KINDS: usize = 100;
/// The longest run.
const MAX_DURATION: Span = Span::from_secs(366 * 86_400);
/// The most repetitions.
const MAX_TRIALS: u64 = 10_000;
/// 2026-01-01T00:00:00Z.
const NEW_YEAR: Time = Time::from_secs(1_767_225_600);

/// The sections that are the policy's.
const POLICY: [&str; 2] = ["inbound", "outbound"];
/// What a case may change.
const WORLD: [&str; 11] = [
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

pub(crate) fn scenario(name: &str, body: &[u8]) -> Result<Scenario, Errors> {
    let document = Document::parse(name, body)?;
    let mut reader = Reader::new(&document);
    let read = Words { reader: &mut reader }.scenario(document.root());
    reader.finish()?;
    Ok(read.expect("invariant: what couldn't be read was told to be wrong"))
}

/// Reads a scenario. What returns `None` has told why.
struct Words<'r, 't> {
    reader: &'r mut Reader<'t>,
}

impl Words<'_, '_> {
    fn scenario(&mut self, root: &Table) -> Option<Scenario> {
        let own = ["title", "about", "seed", "client", "strategy", "case"];
        let known: Vec<&str> = own.into_iter().chain(WORLD).collect();
        self.reader.names(root, "a scenario", &known);
        let title = self.words_of(root, "title", "the scenario's title, in quotes");
        let about = self.words_of(root, "about", "what it shows, in quotes");
        let seed = root.node("seed").map_or(Some(1), |node| self.reader.count(node, "seed", 0..=u64::MAX >> 1));
        let cases = self.kinds(root, "case", &WORLD);
        let strategies = self.kinds(root, "strategy", &clients::STRATEGY);
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

    fn words_of(&mut self, table: &Table, key: &str, expected: &str) -> Option<String> {
        let Some(node) = table.node(key) else { return Some(String::new()) };
        self.reader.text(node, key, expected).map(str::to_owned)
    }

    /// The tables of a table of tables; one that is empty and has no name if there are none.
    fn kinds(&mut self, root: &Table, key: &str, known: &[&str]) -> Option<Vec<Kind>> {
        let Some(entry) = root.get(key) else { return Some(vec![Kind::default()]) };
        let expected = format!("sections of their own, [{key}.NAME]");
        let Some(table) = entry.node.as_table() else {
            self.reader.wrong(entry.node.at, format!("`{key}` is no section"), expected);
            return None;
        };
        let count = table.entries.len();
        if count == 0 || count > MAX_KINDS {
            self.reader.wrong(entry.node.at, format!("`{key}` has {count} sections"), format!("1 to {MAX_KINDS}"));
            return None;
        }
        let mut kinds = Vec::with_capacity(count);
        for entry in &table.entries {
            let Some(table) = entry.node.as_table() else {
                self.reader.wrong(entry.node.at, format!("`{}` is no section", entry.key), expected);
                return None;
            };
            let called = format!("[{key}.{}]", entry.key);
            let names: Vec<&str> = ["title"].into_iter().chain(known.iter().copied()).collect();
            self.reader.names(table, &called, &names);
            let title = self.words_of(table, "title", "a title, in quotes")?;
            kinds.push(Kind { title: if title.is_empty() { entry.key.clone() } else { title }, table: table.clone() });
        }
        Some(kinds)
    }

    fn setup(&mut self, root: &Table, case: &Kind, strategy: &Kind) -> Option<Setup> {
        let changes = strategy.table.entries.iter().filter(|entry| clients::CHANGES.contains(&entry.key.as_str()));
        let root = root.under(&case.table).under(&Table { entries: changes.cloned().collect() });
        let duration = self.long(&root, "duration", Span::from_secs(60));
        let measured = match root.node("measure") {
            Some(node) => duration.and_then(|duration| self.measure(node, duration)).map(Some),
            None => Some(None),
        };
        let trials = root.node("trials").map_or(Some(1), |node| self.reader.count(node, "trials", 1..=MAX_TRIALS));
        let starts_at = root.node("starts_at").map_or(Some(NEW_YEAR), |node| self.moment(node));
        let policy = self.policy(&root);
        let (service, network, store) = (self.service(&root), self.network(&root), self.store(&root));
        let loads = self.loads(&root);
        let check = self.check(&root);
        let policy = policy?;
        let client = self.client(&root, strategy, policy.as_ref());
        let gates = root.get("inbound").is_some();
        let gate = match strategy.table.node("gate") {
            Some(node) => self.reader.flag(node, "gate"),
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
            measured: measured?,
            trials: trials? as u32,
            service: service?,
            network: network?,
            loads: loads?,
            client: client?,
            store: store?,
            policy,
            gate: gate? && gates,
            check: check?,
        };
        self.ends(&setup)?;
        self.decidable(&root, &setup)?;
        self.paceable(&root, &setup)?;
        Some(setup)
    }

    fn policy(&mut self, root: &Table) -> Option<Option<Policy>> {
        let entries = root.entries.iter().filter(|entry| POLICY.contains(&entry.key.as_str()));
        let policy = Table { entries: entries.cloned().collect() };
        if policy.entries.is_empty() {
            return Some(None);
        }
        self.reader.policy(&policy).map(Some)
    }

    /// Whether tries without end take time, so that a run doesn't stand still.
    fn ends(&mut self, setup: &Setup) -> Option<()> {
        let ClientSpec::Plain(plain) = &setup.client else { return Some(()) };
        let takes_time =
            plain.backoff.is_some_and(|backoff| !backoff.base.is_zero()) || setup.network.delay.takes_time();
        let takes_time = takes_time || plain.pacer.is_some();
        if plain.attempts.is_none() && !takes_time {
            let message = format!("the tries of `{}` are unlimited and may take no time", setup.strategy);
            self.reader.missing(&message, "a `backoff`, or a `delay` of the network");
            return None;
        }
        Some(())
    }

    /// Whether the gate could decide about all calls.
    fn decidable(&mut self, root: &Table, setup: &Setup) -> Option<()> {
        let Some(policy) = setup.policy.as_ref().filter(|_| setup.gate) else { return Some(()) };
        let mut good = Some(());
        for load in &setup.loads {
            let Err(error) = action_of(policy.plan(), load, &key_seed()) else { continue };
            if let Some(entry) = place_of(root, load) {
                let expected = "an action that counts by client_ip or key";
                self.reader.wrong(
                    entry.key_at,
                    format!("the gate can't decide about `{}`: {error}", load.name),
                    expected,
                );
            }
            good = None;
        }
        good
    }

    /// Whether each client's calls wait for its pace one after the other.
    fn paceable(&mut self, root: &Table, setup: &Setup) -> Option<()> {
        let paced = matches!(&setup.client, ClientSpec::Plain(plain) if plain.pacer.is_some());
        let open = setup.loads.iter().find(|load| !matches!(load.arrivals, Arrivals::Serial { .. }));
        let Some(open) = open.filter(|_| paced) else { return Some(()) };
        if let Some(entry) = place_of(root, open) {
            let message = format!("`{}` keeps a `pace` and calls whatever becomes of earlier calls", open.name);
            self.reader.wrong(entry.key_at, message, "`calls` or `think`, one call after the other");
        }
        None
    }

    fn long(&mut self, table: &Table, key: &str, default: Span) -> Option<Span> {
        let Some(node) = table.node(key) else { return Some(default) };
        let span = self.reader.span(node, key)?;
        if span > MAX_DURATION {
            self.reader.wrong(node.at, format!("`{key}` is longer than a year"), "a shorter duration");
            return None;
        }
        Some(span)
    }

    /// One stretch within the run.
    fn measure(&mut self, node: &Node, duration: Span) -> Option<Stretch> {
        const EXPECTED: &str = "the stretch of the run that goodput is taken over, such as \"20s to 60s\"";
        match *forms::stretches(self.reader, node, "measure")? {
            [stretch] if stretch.until <= duration => Some(stretch),
            [stretch] => {
                let message = format!("`measure` goes to {}, and the run to {duration}", stretch.until);
                self.reader.wrong(node.at, message, EXPECTED);
                None
            }
            _ => {
                self.reader.wrong(node.at, "`measure` is not one stretch of time", EXPECTED);
                None
            }
        }
    }

    fn moment(&mut self, node: &Node) -> Option<Time> {
        const EXPECTED: &str = "a moment such as \"2026-11-21T20:00:00Z\"";
        let text = self.reader.text(node, "starts_at", EXPECTED)?;
        let moment =
            text.parse::<jiff::Timestamp>().ok().and_then(|moment| u64::try_from(moment.as_microsecond()).ok());
        if moment.is_none() {
            self.reader.wrong(node.at, format!("`starts_at` is `{text}`"), EXPECTED);
        }
        moment.map(Time::from_micros)
    }

    fn check(&mut self, root: &Table) -> Option<CheckSpec> {
        let default = CheckSpec { within: Span::from_secs(10), share: 0.9 };
        let Some(table) = self.section(root, "check", &["within", "share"])? else { return Some(default) };
        let within = self.long(&table, "within", default.within);
        let share = table.node("share").map_or(Some(default.share), |node| {
            self.reader.share(node, "share", 1).map(|share| f64::from(share) / 1000.0)
        });
        Some(CheckSpec { within: within?, share: share? })
    }

    /// A section, if it is there.
    fn section(&mut self, table: &Table, key: &str, known: &[&str]) -> Option<Option<Table>> {
        let Some(entry) = table.get(key) else { return Some(None) };
        let Value::Table(section) = &entry.node.value else {
            self.reader.wrong(entry.node.at, format!("`{key}` is no section"), format!("a section, [{key}]"));
            return None;
        };
        self.reader.names(section, &format!("[{key}]"), known);
        Some(Some(section.clone()))
    }
}

/// Where a load stands.
fn place_of<'t>(root: &'t Table, load: &Load) -> Option<&'t Entry> {
    root.node("load").and_then(Node::as_table).and_then(|loads| loads.get(&load.name))
}

/// A case or a strategy.
#[derive(Default)]
struct Kind {
    title: String,
    table: Table,
}
