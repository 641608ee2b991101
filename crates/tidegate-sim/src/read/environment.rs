//! The reader of service, network, store and loads.

use tidegate_core::{Lane, Span};
use tidegate_policy::Quantity;
use tidegate_policy::document::{TomlNode, TomlTable, TomlValue};

use super::ScenarioReader;
use super::values::{self, ProfileUnit};
use crate::delay::Delay;
use crate::limiter::MAX_WINDOW_REQUESTS;
use crate::profile::Profile;
use crate::setup::{
    Arrivals, ClockStep, LoadSpec, MAX_CLIENTS, MAX_LOADS, NetworkSpec, RetryAfterMode, ServiceSpec, StoreSpec,
};

const SERVICE_KEYS: [&str; 11] = [
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
const LOAD_KEYS: [&str; 11] =
    ["clients", "rate", "arrivals", "trace", "each", "calls", "think", "lane", "action", "drift", "clock_steps"];
/// The largest number of times in a trace.
const MAX_TRACE_TIMES: usize = 10_000;
/// The largest number of calls at one time of a trace.
const MAX_CALLS_PER_TRACE_TIME: u64 = 100_000;

impl ScenarioReader<'_, '_> {
    pub(super) fn service(&mut self, root: &TomlTable) -> Option<ServiceSpec> {
        let table = self.section(root, "service", &SERVICE_KEYS)?.unwrap_or_default();
        let reader = &mut *self.reader;
        let latency = table.node("latency").map_or(Some(Delay::NONE), |node| values::delay(reader, node, "latency"));
        let per_request = table.node("latency_per_request");
        let per_request = per_request.map_or(Some(Span::ZERO), |node| reader.duration(node, "latency_per_request"));
        let workers = table
            .node("workers")
            .map_or(Some(None), |node| reader.integer(node, "workers", 1..=1_000_000).map(|count| Some(count as u32)));
        let queue = table
            .node("queue")
            .map_or(Some(1000), |node| reader.integer(node, "queue", 0..=1_000_000).map(|count| count as u32));
        let limits = table.node("limit").map_or(Some(Vec::new()), |node| {
            let limits = reader.quantities(node, "limit")?;
            let mut good = true;
            for (quantity, at) in &limits {
                let (message, expected) = match quantity {
                    Quantity::InFlight { .. } => {
                        ("a service's `limit` counts no calls in flight", "`workers` and `queue`")
                    }
                    Quantity::Window { limit, .. } if *limit > MAX_WINDOW_REQUESTS => (
                        "a service's window holds at most 1048576 calls",
                        "a smaller one, or a rate such as \"500/s burst 100\"",
                    ),
                    _ => continue,
                };
                reader.report(*at, message, expected);
                good = false;
            }
            good.then(|| limits.into_iter().map(|(quantity, _)| quantity).collect())
        });
        let spacing = table
            .node("spacing")
            .map_or(Some(Profile::constant(0.0)), |node| values::profile(reader, node, "spacing", ProfileUnit::Time));
        let retry_after = table.node("retry_after").map_or(Some(RetryAfterMode::Accurate), |node| match &node.value {
            TomlValue::String(text) if text == "true" => Some(RetryAfterMode::Accurate),
            TomlValue::String(text) if text == "none" => Some(RetryAfterMode::None),
            TomlValue::String(text) if text.starts_with(|first: char| first.is_ascii_digit()) => {
                values::duration(reader, node, "retry_after").map(RetryAfterMode::Fixed)
            }
            _ => {
                let expected = "\"true\", \"none\", or a duration that it always says, such as \"1s\"";
                reader.report(node.at, "`retry_after` is something else", expected);
                None
            }
        });
        let failures = table
            .node("failures")
            .map_or(Some(Profile::constant(0.0)), |node| values::profile(reader, node, "failures", ProfileUnit::Share));
        let outages =
            table.node("outages").map_or(Some(Vec::new()), |node| values::time_ranges(reader, node, "outages"));
        let mut flag = |key: &str| table.node(key).map_or(Some(false), |node| reader.boolean(node, key));
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

    pub(super) fn network(&mut self, root: &TomlTable) -> Option<NetworkSpec> {
        let table = self.section(root, "network", &["delay", "loss", "partitions"])?.unwrap_or_default();
        let reader = &mut *self.reader;
        let delay = table.node("delay").map_or(Some(Delay::NONE), |node| values::delay(reader, node, "delay"));
        let loss = table
            .node("loss")
            .map_or(Some(Profile::constant(0.0)), |node| values::profile(reader, node, "loss", ProfileUnit::Share));
        let partitions =
            table.node("partitions").map_or(Some(Vec::new()), |node| values::time_ranges(reader, node, "partitions"));
        Some(NetworkSpec { delay: delay?, loss: loss?, partitions: partitions? })
    }

    pub(super) fn store(&mut self, root: &TomlTable) -> Option<StoreSpec> {
        let table = self.section(root, "store", &["shared", "latency", "outages"])?.unwrap_or_default();
        let reader = &mut *self.reader;
        let shared = table.node("shared").map_or(Some(false), |node| reader.boolean(node, "shared"));
        let latency = table.node("latency").map_or(Some(None), |node| values::delay(reader, node, "latency").map(Some));
        let outages =
            table.node("outages").map_or(Some(Vec::new()), |node| values::time_ranges(reader, node, "outages"));
        let store = StoreSpec { shared: shared?, latency: latency?, outages: outages? };
        if let Some(entry) = table.entries.iter().find(|entry| entry.key != "shared").filter(|_| !store.shared) {
            let message = format!("`{}` is of a store that no two clients share", entry.key);
            self.reader.report(entry.key_at, message, "`shared = true` beside it");
            return None;
        }
        Some(store)
    }

    pub(super) fn loads(&mut self, root: &TomlTable) -> Option<Vec<LoadSpec>> {
        const EXPECTED: &str = "sections of their own, such as [load.all] with rate = \"40/s\"";
        let Some(entry) = root.get("load") else {
            self.reader.report_missing("nobody calls", EXPECTED);
            return None;
        };
        let tables = entry.node.as_table().filter(|table| (1..=MAX_LOADS).contains(&table.entries.len()));
        let Some(tables) = tables.filter(|table| table.entries.iter().all(|entry| entry.node.as_table().is_some()))
        else {
            self.reader.report(entry.node.at, "`load` isn't one load or more", format!("1 to {MAX_LOADS} {EXPECTED}"));
            return None;
        };
        let loads: Vec<Option<LoadSpec>> =
            tables.entries.iter().map(|entry| self.load(&entry.key, entry.node.as_table()?, &entry.node)).collect();
        loads.into_iter().collect()
    }

    fn load(&mut self, name: &str, table: &TomlTable, place: &TomlNode) -> Option<LoadSpec> {
        let reader = &mut *self.reader;
        reader.check_names(table, &format!("[load.{name}]"), &LOAD_KEYS);
        let clients = table
            .node("clients")
            .map_or(Some(1), |node| reader.integer(node, "clients", 1..=MAX_CLIENTS).map(|count| count as u32));
        const LANES: [(&str, Lane); 3] =
            [("background", Lane::Background), ("user", Lane::User), ("webhook", Lane::Webhook)];
        let lane = table.node("lane").map_or(Some(Lane::User), |node| reader.choice(node, "lane", &LANES));
        let action = table.node("action").map_or(Some(None), |node| {
            reader.string(node, "action", "an action's name, in quotes").map(|text| Some(text.to_owned()))
        });
        let drift = table.node("drift").map_or(Some(0.0), |node| reader.number(node, "drift", -0.5..=0.5));
        let steps = table.node("clock_steps").map_or(Some(Vec::new()), |node| self.clock_steps(node));
        let arrivals = self.arrivals(table, place);
        Some(LoadSpec {
            name: name.to_owned(),
            clients: clients?,
            arrivals: arrivals?,
            lane: lane?,
            action: action?,
            drift: drift?,
            clock_steps: steps?,
        })
    }

    fn arrivals(&mut self, table: &TomlTable, place: &TomlNode) -> Option<Arrivals> {
        const EXPECTED: &str = "`rate` for calls that come whatever happens, `trace` for calls at given times, or `calls` \
                                or `think` for one after the other";
        let reader = &mut *self.reader;
        let serial = table.get("calls").is_some() || table.get("think").is_some();
        match (table.node("rate"), table.node("trace"), serial) {
            (Some(node), None, false) => {
                const KINDS: [(&str, bool); 2] = [("poisson", true), ("even", false)];
                let random = table.node("arrivals").map_or(Some(true), |node| reader.choice(node, "arrivals", &KINDS));
                let rate = values::profile(reader, node, "rate", ProfileUnit::PerSecond);
                let (random, rate) = (random?, rate?);
                Some(if random { Arrivals::Poisson(rate) } else { Arrivals::Even(rate) })
            }
            (None, Some(node), false) => {
                let words = reader.strings(node, "trace", "a list of times, such as [\"0s\", \"1.5s\"]")?;
                let times: Vec<Option<Span>> =
                    words.into_iter().map(|(_, item)| values::duration(reader, item, "trace")).collect();
                let times: Vec<Span> = times.into_iter().collect::<Option<_>>()?;
                let each = table.node("each").map_or(Some(1), |node| {
                    reader.integer(node, "each", 1..=MAX_CALLS_PER_TRACE_TIME).map(|count| count as u32)
                });
                if times.len() > MAX_TRACE_TIMES || !times.is_sorted() {
                    reader.report(
                        node.at,
                        "`trace` isn't in order",
                        format!("up to {MAX_TRACE_TIMES} times, each after the last"),
                    );
                    return None;
                }
                Some(Arrivals::Trace { times, each: each? })
            }
            (None, None, true) => {
                let calls = table.node("calls").map_or(Some(None), |node| {
                    reader.integer(node, "calls", 1..=1_000_000_000).map(|count| Some(count as u32))
                });
                let think = table.node("think").map_or(Some(Delay::NONE), |node| values::delay(reader, node, "think"));
                let (calls, think) = (calls?, think?);
                if calls.is_none() && !think.can_be_nonzero() {
                    reader.report(place.at, "its clients never pause and never end", "`think` of more than nothing");
                    return None;
                }
                Some(Arrivals::Serial { calls, think })
            }
            _ => {
                reader.report(place.at, "its calls are described not at all, or more than once", EXPECTED);
                None
            }
        }
    }

    fn clock_steps(&mut self, node: &TomlNode) -> Option<Vec<ClockStep>> {
        const EXPECTED: &str = "steps such as \"at 10s back 30s\" or \"at 1m ahead 5s\"";
        let words = self.reader.strings(node, "clock_steps", EXPECTED)?;
        let read = |text: &str| {
            let (at, by) = text
                .strip_prefix("at ")?
                .split_once(" back ")
                .map(|found| (found, true))
                .or_else(|| text.strip_prefix("at ")?.split_once(" ahead ").map(|found| (found, false)))
                .map(|((at, by), back)| (at, (by, back)))?;
            let parse = |text: &str| tidegate_policy::parse_duration(text).ok();
            Some(ClockStep { at: parse(at)?, amount: parse(by.0)?, is_backward: by.1 })
        };
        let mut steps = Vec::with_capacity(words.len());
        for (text, item) in words.into_iter().take(100) {
            let Some(step) = read(text) else {
                self.reader.report(item.at, format!("`clock_steps`: `{text}` is no step"), EXPECTED);
                return None;
            };
            steps.push(step);
        }
        Some(steps)
    }
}
