//! Measures the dearest requests that a client may send: the time from the request to its decision, or to the 400 that it
//! gets; and the decisions of others while clients abandon calls.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use http::header::{COOKIE, HeaderMap, HeaderName, HeaderValue};
use tidegate::Gate;
use tidegate::policy::{Policy, PolicySources, Query};

use crate::options::Options;
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::OURS;

/// The longest part of a request that clients choose.
const BYTES: usize = 8 << 10;

/// The pieces that the dearest requests repeat: found by `fuzz/fuzz_targets/cost.rs` and by hand.
const PATHS: [&str; 11] = [
    "/%253b/a;v/..;/%e2%80%a8%252e",
    "/a%2f..;x//%252e%5c\\",
    "/a%20b",
    "//",
    "%",
    "/..",
    "/%u00e9",
    "%25u00e9",
    "%D0%B0",
    "/%0a/c/..",
    "%%4A./\t&\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f};./\t%%%%%%%&//;%%%%%%%",
];
const QUERIES: [&str; 6] = ["q=x&", "[q]=x;", "%71=x&", "a=b&", "q=%2525&", "q=+++++++&"];
const COOKIES: [&str; 7] = ["c=x; ", "c=        x;", "c=\"\\101\"; ", "c=\"\\\";", "\u{3000};", "a=b,", "c=\u{feff}x;"];

const POLICY: &str = r#"
    [inbound]
    path_quirks = ["windows", "parameters"]
    [inbound.global]
    limit = "1000000000 per 1s"
    [inbound.action.login]
    match = { path = "/login" }
    limit = "1000000000 per 1s"
    [inbound.action.keys]
    match = { path = "/keys" }
    key = ["cookie:c", "query:q", "header:x-tenant"]
    limit = "1000000000 per 1s"
    [inbound.action.rest]
    match = { path = "/*" }
    key = ["client_ip", "path"]
    limit = "1000000000 per 1s"
"#;

/// Measures the rows that the options select.
pub fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    let policy = Policy::load(PolicySources::new().file("bench", POLICY)).expect("a valid policy");
    let gate = Gate::new(&policy);
    let whole = |piece: &str| piece.repeat(BYTES / piece.len());
    // A shorter path may have more readings within the bound.
    let paths =
        [1, 4, 8, 64, 200].into_iter().flat_map(|part| PATHS.map(|piece| piece.repeat(BYTES / part / piece.len())));
    let header = |name: HeaderName, text: String| {
        let value = HeaderValue::from_str(&text).expect("the value of a header");
        ("/keys?q=1".to_owned(), HeaderMap::from_iter([(name, value)]))
    };
    let plain = |path: String| (path, HeaderMap::new());
    let classes: [(&str, Vec<(String, HeaderMap)>); 4] = [
        ("path", paths.map(|path| plain(format!("/{path}"))).collect()),
        ("query", QUERIES.map(|piece| plain(format!("/keys?{}", whole(piece)))).into()),
        ("cookie", COOKIES.map(|piece| header(COOKIE, whole(piece))).into()),
        ("header", vec![header(HeaderName::from_static("x-tenant"), whole("x"))]),
    ];
    for (class, requests) in classes {
        let name = format!("decision/dearest/{class}");
        if options.wants(&name) {
            let mut row = BenchRow::new(name, FigureUnit::Nanoseconds);
            let dearest = || requests.iter().map(|request| nanoseconds(&gate, request)).fold(0.0, f64::max);
            row.push(OURS, (0..options.rounds()).map(|_| dearest()).collect());
            on_row(row);
        }
    }
    measure_kept_permits(options, on_row);
}

const IN_FLIGHT: &str = r#"
    [inbound.action.report]
    limit = "128 in flight"
"#;
/// The number of clients that abandon calls, and the calls of each: together all whose permits may be kept.
const ABANDONING: (u32, usize) = (64, 64);
/// The calls in one round.
const CALLS: u32 = 10_000;

/// Measures the row of calls in flight that others begin and end while permits are kept.
fn measure_kept_permits(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    let name = "decision/kept-permits/T1".to_owned();
    if !options.wants(&name) {
        return;
    }
    let policy = Policy::load(PolicySources::new().file("bench", IN_FLIGHT)).expect("a valid policy");
    let begin = |gate: &Gate, client: u32| {
        let ip = Some(IpAddr::V4(Ipv4Addr::from_bits(0xcb00_7100 + client)));
        let query = Query { action: Some("report"), ip, ..Query::default() };
        let decision = gate.check_now(&query).expect("an action of the policy");
        gate.hold_permit(&query, &decision).expect("an action of the policy").expect("enough permits for all")
    };
    let of_one_call = |gate: &Gate| {
        let began = Instant::now();
        (0..CALLS).for_each(|_| drop(black_box(begin(gate, ABANDONING.0))));
        began.elapsed().as_nanos() as f64 / f64::from(CALLS)
    };
    let rounds = (0..options.rounds()).map(|_| {
        let gate = Gate::new(&policy);
        let without = of_one_call(&gate);
        let abandoned = (0..ABANDONING.0).flat_map(|client| [client; ABANDONING.1]);
        let begun: Vec<_> = abandoned.map(|client| begin(&gate, client)).collect();
        begun.into_iter().for_each(|permit| drop(permit.keep()));
        assert_eq!(gate.kept_permits(), ABANDONING.0 as usize * ABANDONING.1, "all are kept");
        (of_one_call(&gate), without)
    });
    let (with, without) = rounds.unzip();
    let mut row = BenchRow::new(name, FigureUnit::Nanoseconds);
    row.push(OURS, with);
    row.push("nothing kept", without);
    on_row(row);
}

/// The least time of several: whatever else runs on the machine only adds to it.
fn nanoseconds(gate: &Gate, (path, headers): &(String, HeaderMap)) -> f64 {
    let ip = Some([192, 0, 2, 7].into());
    let query = Query { ip, method: Some("GET"), path: Some(path), headers: Some(headers), ..Query::default() };
    let timed = || {
        let began = Instant::now();
        black_box(gate.begin_check(&query).is_ok());
        began.elapsed().as_nanos() as f64
    };
    (0..20).map(|_| timed()).fold(f64::MAX, f64::min)
}
