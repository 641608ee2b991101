//! The time that clients can cost before a decision, for each byte that they send. Each new record of a door counts as
//! new coverage, so that the search climbs towards the dearest input.
#![no_main]

use std::hint::black_box;
use std::pin::pin;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use http::header::COOKIE;
use http::{HeaderMap, HeaderName, HeaderValue};
use libfuzzer_sys::fuzz_target;
use prost::Message as _;
use rustix::time::{ClockId, clock_gettime};
use tidegate::Gate;
use tidegate_policy::{Forwarding, ForwardingHeader, Networks, Policy, PolicySources, Query};

use self::authz_messages::CheckRequest;
use self::decision_request::DecisionRequest;
use self::frame_parser::FrameParser;
use self::proxy_protocol::read_header;
use self::rls_messages::RateLimitRequest;

#[path = "../../crates/tidegate-server/src/wire/ext_authz/messages.rs"]
#[allow(dead_code, reason = "the server uses the rest")]
mod authz_messages;
#[path = "../../crates/tidegate-server/src/wire/decision_request.rs"]
#[allow(dead_code, reason = "the server uses the rest")]
mod decision_request;
#[path = "../../crates/tidegate-server/src/http2/frame_parser.rs"]
#[allow(dead_code, reason = "the server uses the rest")]
mod frame_parser;
#[path = "../../crates/tidegate-server/src/wire/resp/parser.rs"]
mod parser;
#[path = "../../crates/tidegate-server/src/proxy_protocol.rs"]
#[allow(dead_code, reason = "the server uses the rest")]
mod proxy_protocol;
#[path = "../../crates/tidegate-server/src/wire/rls/messages.rs"]
#[allow(dead_code, reason = "the server uses the rest")]
mod rls_messages;

/// A place at which clients' text is read: its name, and the work on a text.
type Door = (&'static str, fn(&str));

const DOORS: [Door; 16] = [
    ("path", |text| check(0, Some(text), None)),
    ("path of a Windows server", |text| check(1, Some(text), None)),
    ("normalised path", |text| drop(black_box(POLICIES[2].0.forwarded_path(text)))),
    ("query string", |text| check(0, Some(&format!("/keys?{text}")), None)),
    ("cookie", |text| check(0, Some("/keys?q=1"), Some((COOKIE, text)))),
    ("header", |text| check(0, Some("/keys?q=1"), Some((HeaderName::from_static("x-tenant"), text)))),
    ("forwarding header", |text| {
        static FORWARDING: LazyLock<Forwarding> = LazyLock::new(|| Forwarding {
            trusted: Networks::new(["127.0.0.0/8".parse().expect("a network"), "::/0".parse().expect("a network")]),
            header: ForwardingHeader::Forwarded,
        });
        let headers = headers((HeaderName::from_static("forwarded"), text));
        black_box(FORWARDING.client_ip([127, 0, 0, 1].into(), &headers));
    }),
    ("Redis protocol", |text| {
        let (mut rest, mut arguments) = (text.as_bytes(), Vec::new());
        while let Ok(Some(request)) = parser::parse(rest, &mut arguments) {
            rest = &rest[request.length.min(rest.len())..];
            if rest.is_empty() {
                break;
            }
        }
    }),
    ("header of joined lines", |text| {
        let headers = headers((HeaderName::from_static("x-tenant"), text));
        decide(0, &Query { headers: Some(&headers), headers_are_joined: true, ..keyed() });
    }),
    ("host", |text| decide(0, &Query { host: Some(text), path: Some("/host"), ..keyed() })),
    ("reservation", |text| decide(0, &Query { reservation: Some(text), path: Some("/reserved"), ..keyed() })),
    ("JSON of the decision API", |text| {
        if let Ok(request) = DecisionRequest::from_json(text.as_bytes()) {
            decide(0, &request.query());
        }
    }),
    ("message of the rate limit service", |text| drop(black_box(RateLimitRequest::decode(text.as_bytes())))),
    ("message of the authorization service", |text| drop(black_box(CheckRequest::decode(text.as_bytes())))),
    ("PROXY header", |text| {
        let mut bytes = text.as_bytes();
        let header = pin!(read_header(&mut bytes));
        let _ = black_box(header.poll(&mut Context::from_waker(Waker::noop())));
    }),
    ("frames of HTTP/2", |text| {
        black_box(FrameParser::new(0).join_data(&mut text.as_bytes().to_vec(), |_| {}));
    }),
];

/// The longest input: that of a request's head in most servers.
const MAX_BYTES: usize = 8 << 10;
/// No input may cost more: a hundred times of what the gate promises, because instrumented code is up to fifty times slower,
/// and machines differ.
const MAX_TIME: Duration = Duration::from_millis(10);
/// The records that are told apart, each a tenth above the one before.
const STEPS: usize = 128;

/// Counters that libFuzzer reads as coverage.
#[unsafe(link_section = "__libfuzzer_extra_counters")]
static RECORDS: [AtomicU8; DOORS.len() * STEPS] = [const { AtomicU8::new(0) }; DOORS.len() * STEPS];

static POLICIES: LazyLock<[(std::sync::Arc<tidegate_policy::Plan>, Gate); 3]> = LazyLock::new(|| {
    let inbound = ["", "path_quirks = [\"windows\", \"parameters\"]", "ambiguous_paths = \"normalise\""];
    inbound.map(|inbound| {
        let text = format!(
            "[inbound]\n{inbound}\n[inbound.global]\nlimit = \"1000000 per 1s\"\n\
             [inbound.action.login]\nmatch = {{ path = \"/login\" }}\nlimit = \"1000000 per 1s\"\n\
             [inbound.action.keys]\nmatch = {{ path = \"/keys\" }}\nlimit = \"1000000 per 1s\"\n\
             key = [\"cookie:c\", \"query:q\", \"header:x-tenant\"]\n\
             [inbound.action.host]\nmatch = {{ path = \"/host\" }}\nlimit = \"1000000 per 1s\"\nkey = \"host\"\n\
             [inbound.action.reserved]\nmatch = {{ path = \"/reserved\" }}\nkey = \"action\"\nlimit = \"1000/s burst 50\"\n\
             reserve = {{ grace = \"1s\" }}\n\
             [inbound.action.rest]\nmatch = {{ path = \"/*\" }}\nkey = [\"client_ip\", \"path\"]\n\
             limit = \"1000000 per 1s\"\n"
        );
        let policy = Policy::load(PolicySources::new().file("fuzz", text)).expect("a valid policy");
        (std::sync::Arc::clone(policy.plan()), Gate::new(&policy))
    })
});

fn headers((name, text): (HeaderName, &str)) -> HeaderMap {
    HeaderValue::from_str(text).into_iter().map(|value| (name.clone(), value)).collect()
}

fn check(policy: usize, path: Option<&str>, header: Option<(HeaderName, &str)>) {
    let headers = header.map(headers).unwrap_or_default();
    decide(policy, &Query { path, headers: Some(&headers), ..keyed() });
}

/// A request to the action with keys.
fn keyed() -> Query<'static> {
    Query { ip: Some([203, 0, 113, 7].into()), path: Some("/keys?q=1"), ..Query::default() }
}

fn decide(policy: usize, query: &Query<'_>) {
    black_box(POLICIES[policy].1.begin_check(query).is_ok());
}

/// The processor's time, which other programs don't add to.
fn timed(work: impl FnOnce()) -> Duration {
    let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
    let began = now();
    work();
    now().saturating_sub(began)
}

fuzz_target!(|text: &str| {
    static DEAREST: [AtomicU32; DOORS.len()] = [const { AtomicU32::new(0) }; DOORS.len()];
    let Some((first, text)) = text.split_at_checked(1) else { return };
    let door = usize::from(first.as_bytes()[0]) % DOORS.len();
    let text = &text[..text.floor_char_boundary(MAX_BYTES)];
    let (name, work) = DOORS[door];
    // The first run may fill caches, and interrupts only add to the others.
    let time = (0..4).map(|_| timed(|| work(text))).min().unwrap_or_default();
    assert!(time < MAX_TIME, "{name}: {time:?} for {} bytes", text.len());
    let nanoseconds = time.as_nanos() as f64;
    for (place, score) in [nanoseconds, nanoseconds * 64.0 / (text.len() + 64) as f64].into_iter().enumerate() {
        let step = (score.max(1.0).ln() / 1.2_f64.ln()) as usize;
        let half = STEPS / 2;
        RECORDS[door * STEPS + place * half + step.min(half - 1)].store(1, Ordering::Relaxed);
    }
    if DEAREST[door].fetch_max(time.as_micros() as u32, Ordering::Relaxed) < time.as_micros() as u32 {
        eprintln!("{name}: {time:?} for {} bytes, {:?}…", text.len(), text.get(..60).unwrap_or(text));
    }
});
