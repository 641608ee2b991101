//! The reader of service, network, store and loads.

use tidegate_core::{Lane, Span};
use tidegate_policy::document::{DocumentReader, TomlNode, TomlTable, TomlValue};
use tidegate_policy::{Quantity, parse_duration};

use super::section;
use super::values::{self, choice, count, optional, profile, reject, value_or};
use crate::delay::Delay;
use crate::limiter::MAX_WINDOW_REQUESTS;
use crate::profile::Profile;
use crate::setup::{
    Arrivals, ClockStep, LoadSpec, MAX_CLIENTS, MAX_LOADS, NetworkSpec, Pauses, RetryAfterMode, ServiceSpec, StoreSpec,
};

const SERVICE_KEYS: [&str; 12] = [
    "latency",
    "latency_per_request",
    "workers",
    "queue",
    "limit",
    "spacing",
    "retry_after",
    "failures",
    "outages",
    "pauses",
    "notices_timeouts",
    "versioned",
];
const LOAD_KEYS: [&str; 11] =
    ["clients", "rate", "arrivals", "trace", "each", "calls", "think", "lane", "action", "drift", "clock_steps"];
/// The largest number of times in a trace.
const MAX_TRACE_TIMES: usize = 10_000;
/// The largest number of calls at one time of a trace.
const MAX_CALLS_PER_TRACE_TIME: u64 = 100_000;
/// The largest number of steps of a load's clocks. Further ones have no effect.
const MAX_CLOCK_STEPS: usize = 100;

pub(super) fn service(reader: &mut DocumentReader<'_>, root: &TomlTable) -> Option<ServiceSpec> {
    let table = section(reader, root, "service", &SERVICE_KEYS)?.unwrap_or_default();
    let latency = value_or(reader, &table, "latency", Delay::NONE, values::delay);
    let per_request = value_or(reader, &table, "latency_per_request", Span::ZERO, DocumentReader::duration);
    let workers = optional(reader, &table, "workers", workers);
    let queue = value_or(reader, &table, "queue", 1000, count(0..=1_000_000));
    let limits = value_or(reader, &table, "limit", Vec::new(), service_limits);
    let spacing = value_or(reader, &table, "spacing", Profile::constant(0.0), profile(values::TIME));
    let retry_after = value_or(reader, &table, "retry_after", RetryAfterMode::Accurate, retry_after);
    let failures = value_or(reader, &table, "failures", Profile::constant(0.0), profile(values::SHARE));
    let outages = value_or(reader, &table, "outages", Vec::new(), values::time_ranges);
    let pauses = optional(reader, &table, "pauses", pauses);
    let notices_timeouts = value_or(reader, &table, "notices_timeouts", false, DocumentReader::boolean);
    let versioned = value_or(reader, &table, "versioned", false, DocumentReader::boolean);
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
        pauses: pauses?,
        notices_timeouts: notices_timeouts?,
        versioned: versioned?,
    })
}

fn workers(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Profile> {
    match node.value {
        TomlValue::Integer(_) => {
            count(1..=values::MAX_WORKERS)(reader, node, key).map(|count| Profile::constant(f64::from(count)))
        }
        _ => profile(values::WORKERS)(reader, node, key),
    }
}

fn pauses(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Pauses> {
    const EXPECTED: &str = "{ every = \"5s\", for = \"300ms\" }";
    let table = node.as_table();
    if table.is_some_and(|table| !reader.check_names(table, &format!("`{key}`"), &["every", "for"])) {
        return None;
    }
    let (Some(every), Some(length)) =
        (table.and_then(|table| table.node("every")), table.and_then(|table| table.node("for")))
    else {
        return reject(reader, node.at, format!("`{key}` needs a period and a length"), EXPECTED);
    };
    let (period, paused) = (reader.duration(every, "every")?, reader.duration(length, "for")?);
    if paused >= period {
        return reject(reader, length.at, format!("`{key}` leave no time for work"), "a time shorter than `every`");
    }
    Some(Pauses { period, length: paused })
}

fn service_limits(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Vec<Quantity>> {
    let limits = reader.quantities(node, key)?;
    let mut valid = Some(());
    for (quantity, at) in &limits {
        let (message, expected) = match quantity {
            Quantity::InFlight { .. } => ("a service's `limit` counts no calls in flight", "`workers` and `queue`"),
            Quantity::Window { limit, .. } if *limit > MAX_WINDOW_REQUESTS => (
                "a service's window holds at most 1048576 calls",
                "a smaller one, or a rate such as \"500/s burst 100\"",
            ),
            _ => continue,
        };
        valid = reject(reader, *at, message, expected);
    }
    valid.map(|()| limits.into_iter().map(|(quantity, _)| quantity).collect())
}

fn retry_after(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<RetryAfterMode> {
    match &node.value {
        TomlValue::String(text) if text == "true" => Some(RetryAfterMode::Accurate),
        TomlValue::String(text) if text == "none" => Some(RetryAfterMode::None),
        TomlValue::String(text) if text.starts_with(|first: char| first.is_ascii_digit()) => {
            values::duration(reader, node, key).map(RetryAfterMode::Fixed)
        }
        _ => {
            let expected = "\"true\", \"none\", or a duration that it always says, such as \"1s\"";
            reject(reader, node.at, "`retry_after` is something else", expected)
        }
    }
}

pub(super) fn network(reader: &mut DocumentReader<'_>, root: &TomlTable) -> Option<NetworkSpec> {
    let table = section(reader, root, "network", &["delay", "loss", "partitions"])?.unwrap_or_default();
    let delay = value_or(reader, &table, "delay", Delay::NONE, values::delay);
    let loss = value_or(reader, &table, "loss", Profile::constant(0.0), profile(values::SHARE));
    let partitions = value_or(reader, &table, "partitions", Vec::new(), values::time_ranges);
    Some(NetworkSpec { delay: delay?, loss: loss?, partitions: partitions? })
}

pub(super) fn store(reader: &mut DocumentReader<'_>, root: &TomlTable) -> Option<StoreSpec> {
    let table = section(reader, root, "store", &["shared", "latency", "outages"])?.unwrap_or_default();
    let shared = value_or(reader, &table, "shared", false, DocumentReader::boolean);
    let latency = optional(reader, &table, "latency", values::delay);
    let outages = value_or(reader, &table, "outages", Vec::new(), values::time_ranges);
    let store = StoreSpec { shared: shared?, latency: latency?, outages: outages? };
    if let Some(entry) = table.entries.iter().find(|entry| entry.key != "shared" && !store.shared) {
        let message = format!("`{}` is of a store that no two clients share", entry.key);
        return reject(reader, entry.key_at, message, "`shared = true` beside it");
    }
    Some(store)
}

pub(super) fn loads(reader: &mut DocumentReader<'_>, root: &TomlTable) -> Option<Vec<LoadSpec>> {
    const EXPECTED: &str = "sections of their own, such as [load.all] with rate = \"40/s\"";
    let Some(node) = root.node("load") else {
        reader.report_missing("the scenario has no load", EXPECTED);
        return None;
    };
    let entries = node.as_table().map_or(&[][..], |table| &table.entries);
    if !(1..=MAX_LOADS).contains(&entries.len()) || entries.iter().any(|entry| entry.node.as_table().is_none()) {
        return reject(reader, node.at, "`load` isn't one load or more", format!("1 to {MAX_LOADS} {EXPECTED}"));
    }
    let loads: Vec<Option<LoadSpec>> = entries.iter().map(|entry| load(reader, &entry.key, &entry.node)).collect();
    loads.into_iter().collect()
}

fn load(reader: &mut DocumentReader<'_>, name: &str, node: &TomlNode) -> Option<LoadSpec> {
    let table = node.as_table()?;
    reader.check_names(table, &format!("[load.{name}]"), &LOAD_KEYS);
    let clients = value_or(reader, table, "clients", 1, count(1..=MAX_CLIENTS));
    let lane = value_or(reader, table, "lane", Lane::User, choice(&Lane::ALL.map(|lane| (lane.name(), lane))));
    let action = optional(reader, table, "action", |reader, node, key| {
        reader.string(node, key, "an action's name, in quotes").map(str::to_owned)
    });
    let drift = value_or(reader, table, "drift", 0.0, |reader, node, key| reader.number(node, key, -0.5..=0.5));
    let clock_steps = value_or(reader, table, "clock_steps", Vec::new(), clock_steps);
    let arrivals = arrivals(reader, table, node);
    Some(LoadSpec {
        name: name.to_owned(),
        clients: clients?,
        arrivals: arrivals?,
        lane: lane?,
        action: action?,
        drift: drift?,
        clock_steps: clock_steps?,
    })
}

fn arrivals(reader: &mut DocumentReader<'_>, table: &TomlTable, load: &TomlNode) -> Option<Arrivals> {
    type ArrivalsOfRate = fn(Profile) -> Arrivals;
    const KINDS: [(&str, ArrivalsOfRate); 2] = [("poisson", Arrivals::Poisson), ("even", Arrivals::Even)];
    const EXPECTED: &str = "`rate` for calls that come whatever happens, `trace` for calls at given times, or `calls` \
                            or `think` for one after the other";
    let serial = table.get("calls").is_some() || table.get("think").is_some();
    match (table.node("rate"), table.node("trace"), serial) {
        (Some(node), None, false) => {
            let kind = value_or(reader, table, "arrivals", KINDS[0].1, choice(&KINDS));
            let rate = profile(values::PER_SECOND)(reader, node, "rate");
            Some(kind?(rate?))
        }
        (None, Some(node), false) => {
            let texts = reader.strings(node, "trace", "a list of times, such as [\"0s\", \"1.5s\"]")?;
            let times: Vec<Option<Span>> =
                texts.into_iter().map(|(_, item)| values::duration(reader, item, "trace")).collect();
            let times: Vec<Span> = times.into_iter().collect::<Option<_>>()?;
            let each = value_or(reader, table, "each", 1, count(1..=MAX_CALLS_PER_TRACE_TIME));
            if times.len() > MAX_TRACE_TIMES || !times.is_sorted() {
                let expected = format!("up to {MAX_TRACE_TIMES} times, each after the last");
                return reject(reader, node.at, "`trace` isn't in order", expected);
            }
            Some(Arrivals::Trace { times, each: each? })
        }
        (None, None, true) => {
            let calls = optional(reader, table, "calls", count(1..=1_000_000_000));
            let think = value_or(reader, table, "think", Delay::NONE, values::delay);
            let (calls, think) = (calls?, think?);
            if calls.is_none() && !think.can_be_nonzero() {
                let message = "its clients never pause and never end";
                return reject(reader, load.at, message, "`think` of more than nothing");
            }
            Some(Arrivals::Serial { calls, think })
        }
        _ => reject(reader, load.at, "its calls are described not at all, or more than once", EXPECTED),
    }
}

fn clock_steps(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Vec<ClockStep>> {
    const EXPECTED: &str = "steps such as \"at 10s back 30s\" or \"at 1m ahead 5s\"";
    let parse = |text: &str| {
        let text = text.strip_prefix("at ")?;
        let is_backward = text.contains(" back ");
        let (at, amount) = text.split_once(if is_backward { " back " } else { " ahead " })?;
        Some(ClockStep { at: parse_duration(at).ok()?, amount: parse_duration(amount).ok()?, is_backward })
    };
    let texts = reader.strings(node, key, EXPECTED)?;
    let steps = texts.into_iter().take(MAX_CLOCK_STEPS).map(|(text, item)| {
        parse(text).or_else(|| reject(reader, item.at, format!("`{key}`: `{text}` is no step"), EXPECTED))
    });
    steps.collect()
}
