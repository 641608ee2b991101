//! The world: service, network, store and loads.

use tidegate_core::{Lane, Span};
use tidegate_policy::Quantity;
use tidegate_policy::document::{Node, Table, Value};

use super::Words;
use super::forms::{self, Unit};
use crate::delay::Delay;
use crate::limiter::MAX_WINDOW;
use crate::profile::Profile;
use crate::setup::{
    Arrivals, ClockStep, Load, MAX_CLIENTS, MAX_LOADS, NetworkSpec, RetryAfter, ServiceSpec, StoreSpec,
};

const SERVICE: [&str; 11] = [
    "latency",
    "latency_per_request",
    "workers",
    "queue",
    "limit",
    "spacing",
    "retry_after",
    "failures",
    "outages",
    "notices_timeouts",
    "versioned",
];
const LOAD: [&str; 11] =
    ["clients", "rate", "arrivals", "trace", "each", "calls", "think", "lane", "action", "drift", "clock_steps"];
/// The most calls of a trace.
const MAX_TRACE: usize = 10_000;
/// The most calls at one time of a trace.
const MAX_EACH: u64 = 100_000;

impl Words<'_, '_> {
    pub(super) fn service(&mut self, root: &Table) -> Option<ServiceSpec> {
        let table = self.section(root, "service", &SERVICE)?.unwrap_or_default();
        let reader = &mut *self.reader;
        let latency = table.node("latency").map_or(Some(Delay::NONE), |node| forms::delay(reader, node, "latency"));
        let per_request = table.node("latency_per_request");
        let per_request = per_request.map_or(Some(Span::ZERO), |node| reader.span(node, "latency_per_request"));
        let workers = table
            .node("workers")
            .map_or(Some(None), |node| reader.count(node, "workers", 1..=1_000_000).map(|count| Some(count as u32)));
        let queue = table
            .node("queue")
            .map_or(Some(1000), |node| reader.count(node, "queue", 0..=1_000_000).map(|count| count as u32));
        let limits = table.node("limit").map_or(Some(Vec::new()), |node| {
            let limits = reader.quantities(node, "limit")?;
            let mut good = true;
            for (quantity, at) in &limits {
                let (message, expected) = match quantity {
                    Quantity::InFlight { .. } => {
                        ("a service's `limit` counts no calls in flight", "`workers` and `queue`")
                    }
                    Quantity::Window { limit, .. } if *limit > MAX_WINDOW => (
                        "a service's window holds at most 1048576 calls",
                        "a smaller one, or a rate such as \"500/s burst 100\"",
                    ),
                    _ => continue,
                };
                reader.wrong(*at, message, expected);
                good = false;
            }
            good.then(|| limits.into_iter().map(|(quantity, _)| quantity).collect())
        });
        let spacing = table
            .node("spacing")
            .map_or(Some(Profile::always(0.0)), |node| forms::profile(reader, node, "spacing", Unit::Time));
        let retry_after = table.node("retry_after").map_or(Some(RetryAfter::True), |node| match &node.value {
            Value::Text(text) if text == "true" => Some(RetryAfter::True),
            Value::Text(text) if text == "none" => Some(RetryAfter::None),
            Value::Text(text) if text.starts_with(|first: char| first.is_ascii_digit()) => {
                forms::duration(reader, node, "retry_after").map(RetryAfter::Always)
            }
            _ => {
                let expected = "\"true\", \"none\", or a duration that it always says, such as \"1s\"";
                reader.wrong(node.at, "`retry_after` is something else", expected);
                None
            }
        });
        let failures = table
            .node("failures")
            .map_or(Some(Profile::always(0.0)), |node| forms::profile(reader, node, "failures", Unit::Share));
        let outages = table.node("outages").map_or(Some(Vec::new()), |node| forms::stretches(reader, node, "outages"));
        let mut flag = |key: &str| table.node(key).map_or(Some(false), |node| reader.flag(node, key));
        let (notices_timeouts, versioned) = (flag("notices_timeouts"), flag("versioned"));
        Some(ServiceSpec {
            latency: latency?,
            latency_per_request: per_request?,
            workers: workers?,
            queue: queue?,
            limits: limits?,
            spacing: spacing?,
            retry_after: retry_after?,
            failures: failures?,
            outages: outages?,
            notices_timeouts: notices_timeouts?,
            versioned: versioned?,
        })
    }

    pub(super) fn network(&mut self, root: &Table) -> Option<NetworkSpec> {
        let table = self.section(root, "network", &["delay", "loss", "partitions"])?.unwrap_or_default();
        let reader = &mut *self.reader;
        let delay = table.node("delay").map_or(Some(Delay::NONE), |node| forms::delay(reader, node, "delay"));
        let loss = table
            .node("loss")
            .map_or(Some(Profile::always(0.0)), |node| forms::profile(reader, node, "loss", Unit::Share));
        let partitions =
            table.node("partitions").map_or(Some(Vec::new()), |node| forms::stretches(reader, node, "partitions"));
        Some(NetworkSpec { delay: delay?, loss: loss?, partitions: partitions? })
    }

    pub(super) fn store(&mut self, root: &Table) -> Option<StoreSpec> {
        let table = self.section(root, "store", &["shared", "latency", "outages"])?.unwrap_or_default();
        let reader = &mut *self.reader;
        let shared = table.node("shared").map_or(Some(false), |node| reader.flag(node, "shared"));
        let latency = table.node("latency").map_or(Some(None), |node| forms::delay(reader, node, "latency").map(Some));
        let outages = table.node("outages").map_or(Some(Vec::new()), |node| forms::stretches(reader, node, "outages"));
        let store = StoreSpec { shared: shared?, latency: latency?, outages: outages? };
        if let Some(entry) = table.entries.iter().find(|entry| entry.key != "shared").filter(|_| !store.shared) {
            let message = format!("`{}` is of a store that no two clients share", entry.key);
            self.reader.wrong(entry.key_at, message, "`shared = true` beside it");
            return None;
        }
        Some(store)
    }

    pub(super) fn loads(&mut self, root: &Table) -> Option<Vec<Load>> {
        const EXPECTED: &str = "sections of their own, such as [load.all] with rate = \"40/s\"";
        let Some(entry) = root.get("load") else {
            self.reader.missing("nobody calls", EXPECTED);
            return None;
        };
        let tables = entry.node.as_table().filter(|table| (1..=MAX_LOADS).contains(&table.entries.len()));
        let Some(tables) = tables.filter(|table| table.entries.iter().all(|entry| entry.node.as_table().is_some()))
        else {
            self.reader.wrong(entry.node.at, "`load` isn't one load or more", format!("1 to {MAX_LOADS} {EXPECTED}"));
            return None;
        };
        let loads: Vec<Option<Load>> =
            tables.entries.iter().map(|entry| self.load(&entry.key, entry.node.as_table()?, &entry.node)).collect();
        loads.into_iter().collect()
    }

    fn load(&mut self, name: &str, table: &Table, place: &Node) -> Option<Load> {
        let reader = &mut *self.reader;
        reader.names(table, &format!("[load.{name}]"), &LOAD);
        let clients = table
            .node("clients")
            .map_or(Some(1), |node| reader.count(node, "clients", 1..=MAX_CLIENTS).map(|count| count as u32));
        const LANES: [(&str, Lane); 3] =
            [("background", Lane::Background), ("user", Lane::User), ("webhook", Lane::Webhook)];
        let lane = table.node("lane").map_or(Some(Lane::User), |node| reader.choice(node, "lane", &LANES));
        let action = table.node("action").map_or(Some(None), |node| {
            reader.text(node, "action", "an action's name, in quotes").map(|text| Some(text.to_owned()))
        });
        let drift = table.node("drift").map_or(Some(0.0), |node| reader.number(node, "drift", -0.5..=0.5));
        let steps = table.node("clock_steps").map_or(Some(Vec::new()), |node| self.clock_steps(node));
        let arrivals = self.arrivals(table, place);
        Some(Load {
            name: name.to_owned(),
            clients: clients?,
            arrivals: arrivals?,
            lane: lane?,
            action: action?,
            drift: drift?,
            steps: steps?,
        })
    }

    fn arrivals(&mut self, table: &Table, place: &Node) -> Option<Arrivals> {
        const EXPECTED: &str = "`rate` for calls that come whatever happens, `trace` for calls at given times, or `calls` \
                                or `think` for one after the other";
        let reader = &mut *self.reader;
        let serial = table.get("calls").is_some() || table.get("think").is_some();
        match (table.node("rate"), table.node("trace"), serial) {
            (Some(node), None, false) => {
                const KINDS: [(&str, bool); 2] = [("poisson", true), ("even", false)];
                let random = table.node("arrivals").map_or(Some(true), |node| reader.choice(node, "arrivals", &KINDS));
                let rate = forms::profile(reader, node, "rate", Unit::PerSecond);
                let (random, rate) = (random?, rate?);
                Some(if random { Arrivals::Poisson(rate) } else { Arrivals::Even(rate) })
            }
            (None, Some(node), false) => {
                let words = reader.words(node, "trace", "a list of times, such as [\"0s\", \"1.5s\"]")?;
                let times: Vec<Option<Span>> =
                    words.into_iter().map(|(_, item)| forms::duration(reader, item, "trace")).collect();
                let times: Vec<Span> = times.into_iter().collect::<Option<_>>()?;
                let each = table
                    .node("each")
                    .map_or(Some(1), |node| reader.count(node, "each", 1..=MAX_EACH).map(|count| count as u32));
                if times.len() > MAX_TRACE || !times.is_sorted() {
                    reader.wrong(
                        node.at,
                        "`trace` isn't in order",
                        format!("up to {MAX_TRACE} times, each after the last"),
                    );
                    return None;
                }
                Some(Arrivals::Trace { times, each: each? })
            }
            (None, None, true) => {
                let calls = table.node("calls").map_or(Some(None), |node| {
                    reader.count(node, "calls", 1..=1_000_000_000).map(|count| Some(count as u32))
                });
                let think = table.node("think").map_or(Some(Delay::NONE), |node| forms::delay(reader, node, "think"));
                let (calls, think) = (calls?, think?);
                if calls.is_none() && !think.takes_time() {
                    reader.wrong(place.at, "its clients never pause and never end", "`think` of more than nothing");
                    return None;
                }
                Some(Arrivals::Serial { calls, think })
            }
            _ => {
                reader.wrong(place.at, "when its clients call isn't said once", EXPECTED);
                None
            }
        }
    }

    fn clock_steps(&mut self, node: &Node) -> Option<Vec<ClockStep>> {
        const EXPECTED: &str = "steps such as \"at 10s back 30s\" or \"at 1m ahead 5s\"";
        let words = self.reader.words(node, "clock_steps", EXPECTED)?;
        let read = |text: &str| {
            let (at, by) = text
                .strip_prefix("at ")?
                .split_once(" back ")
                .map(|found| (found, true))
                .or_else(|| text.strip_prefix("at ")?.split_once(" ahead ").map(|found| (found, false)))
                .map(|((at, by), back)| (at, (by, back)))?;
            let parse = |text: &str| tidegate_policy::parse_duration(text).ok();
            Some(ClockStep { at: parse(at)?, by: parse(by.0)?, back: by.1 })
        };
        let mut steps = Vec::with_capacity(words.len());
        for (text, item) in words.into_iter().take(100) {
            let Some(step) = read(text) else {
                self.reader.wrong(item.at, format!("`clock_steps`: `{text}` is no step"), EXPECTED);
                return None;
            };
            steps.push(step);
        }
        Some(steps)
    }
}
