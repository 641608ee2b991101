//! Trials of other terms over the requests of the last hour.

use std::collections::HashSet;
use std::fmt::Write as _;

use serde_json::{Value, json};
use tidegate::{Clock as _, Span};
use tidegate_policy::{Policy, PolicySources};
use tidegate_replay::{FieldNames, LogReplay};

use crate::changes::change;
use crate::common::{
    Peer, Running, get, header, json as answer_json, nobody, once, policy, post, start, status, try_start,
};

const FILE: &str = r#"
    [inbound]
    allow = ["203.0.113.1"]
    deny = ["203.0.113.2"]
    [inbound.global]
    limit = "60 per 10m"
    [inbound.action.login]
    match = { method = "POST", path = "/login" }
    limit = ["5 per 60s", "20 per 30m"]
    penalty = { base = "2s", cap = "10m" }
    [inbound.action.search]
    limits = [
        { name = "each", limit = "3 per 20s burst 6" },
        { name = "account", key = ["key"], limit = "9 per 1h", ban = "1m", count = "all" },
    ]
    cost = 2
    mode = "shadow"
    [inbound.action.page]
    limit = "40 per 1d"
"#;
/// Terms of a limit, and the same as an edit of the file.
const TRIALS: [(&str, &str, &str, &str, &str); 8] = [
    ("login", "login.1", "2 per 60s", "\"5 per 60s\"", "\"2 per 60s\""),
    ("login", "2", "40 per 30m", "\"20 per 30m\"", "\"40 per 30m\""),
    ("login", "1", "penalty = \"none\"", "penalty = { base = \"2s\", cap = \"10m\" }", ""),
    ("login", "1", "mode = \"shadow\"", "cap = \"10m\" }", "cap = \"10m\" }\nmode = \"shadow\""),
    ("search", "each", "mode = \"enforce\"", "mode = \"shadow\"", ""),
    (
        "search",
        "account",
        "limit = \"4 per 1h\"\ncount = \"admitted\"",
        "\"9 per 1h\", ban = \"1m\", count = \"all\"",
        "\"4 per 1h\", ban = \"1m\"",
    ),
    ("page", "", "10/s burst 12", "40 per 1d", "10/s burst 12"),
    (
        "global",
        "",
        "limit = \"30 per 10m\"\nban = \"3m\"",
        "limit = \"60 per 10m\"",
        "limit = \"30 per 10m\"\nban = \"3m\"",
    ),
];

/// A generator of numbers for requests (Marsaglia's xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// Makes requests for most of an hour, and returns them as a log.
async fn make_requests(gate: &Running, count: usize) -> String {
    let (mut api, mut log, mut numbers) = (Peer::connect(gate.api).await, String::new(), Numbers(7));
    for _ in 0..count {
        // Few clients call often.
        let client = numbers.below(30).min(numbers.below(30)) + 1;
        let ip = if client % 5 == 0 { format!("2001:db8:0:{client}::7") } else { format!("203.0.113.{client}") };
        let key = format!("account{}", client / 3);
        let mut request = match numbers.below(3) {
            0 => json!({ "method": "POST", "path": "/login" }),
            1 => json!({ "action": "search" }),
            _ => json!({ "action": "page" }),
        };
        let mut line = request.clone();
        line["user"] = key.as_str().into();
        (request["key"], request["ip"], line["ip"]) = (key.into(), ip.as_str().into(), ip.as_str().into());
        if line.get("method").is_none() {
            (line["method"], line["path"]) = ("GET".into(), "/".into());
        }
        let now = gate.clock.now().as_micros();
        line["ts"] = format!("{}.{:06}", now / 1_000_000, now % 1_000_000).into();
        writeln!(log, "{line}").unwrap();
        let answer = api.ask(post("/v1/check", &request.to_string())).await;
        assert!([200, 429].contains(&status(&answer)), "{answer}");
        gate.clock.advance(Span::from_micros(numbers.below(2_000_000)));
    }
    log
}

/// The counts of an action by a replay of the log.
fn replay(text: &str, log: &str, action: &str) -> Value {
    let policy = Policy::load(PolicySources::new().file("test.toml", text)).unwrap();
    let (mut replay, mut refusals) = (LogReplay::new("policy", &policy, FieldNames::default()), Vec::new());
    replay.read("log", log.as_bytes(), Some(&mut refusals)).unwrap();
    let findings = replay.findings();
    let [found] = findings.policies.as_slice() else { panic!("one policy") };
    let is_of_action = |name: Option<&str>| action == "global" || name == Some(action);
    let counts = found
        .actions
        .iter()
        .find(|found| found.name.as_deref() == Some(action))
        .map_or(found.total, |found| found.counts);
    let ips: Vec<Value> = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["ip"].clone()).collect();
    let refusals = String::from_utf8(refusals).unwrap();
    let refused_ips = refusals
        .lines()
        .map(|line| line.split('\t').collect::<Vec<_>>())
        .filter(|fields| fields[6] == "enforce" && is_of_action(Some(fields[2])));
    let refused: HashSet<&Value> = refused_ips.map(|fields| &ips[fields[1].parse::<usize>().unwrap() - 1]).collect();
    json!({ "requests": counts.requests, "refused": counts.refused, "refused_in_shadow": counts.refused_in_shadow,
        "refused_clients": refused.len() })
}

fn numbers_of(report: &Value, terms: &str) -> Value {
    let terms = &report[terms];
    json!({ "requests": report["requests"], "refused": terms["refused"], "refused_in_shadow": terms["refused_in_shadow"],
        "refused_clients": terms["refused_clients"] })
}

async fn try_terms(gate: &Running, action: &str, limit: &str, terms: &str) -> String {
    let body = json!({ "action": action, "limit": limit, "terms": terms });
    once(gate.admin, change("/v1/try", "", &body.to_string())).await
}

#[tokio::test]
async fn a_trial_equals_a_replay() {
    let gate = start(nobody(), FILE).await;
    let log = make_requests(&gate, 3000).await;
    for (action, limit, terms, from, to) in TRIALS {
        let answer = try_terms(&gate, action, limit, terms).await;
        assert_eq!(status(&answer), 200, "{answer}");
        let report = answer_json(&answer);
        assert!(FILE.contains(from), "{from}");
        let edited = FILE.replace(from, to);
        assert_eq!(numbers_of(&report, "current"), replay(FILE, &log, action), "{action} now");
        assert_eq!(numbers_of(&report, "edited"), replay(&edited, &log, action), "{action}: {terms}");
        assert_ne!(report["current"], report["edited"], "{action}: {terms}");
        assert_eq!((&report["remembered"], &report["share"]), (&3000.into(), &1.0.into()), "{report}");
        let sum = |field: &str| {
            report["series"].as_array().unwrap().iter().map(|interval| interval[field].as_u64().unwrap()).sum::<u64>()
        };
        assert_eq!(sum("requests"), report["requests"], "{report}");
        assert_eq!(sum("edited_refused"), report["edited"]["refused"], "{report}");
    }
}

#[tokio::test]
async fn requests_are_remembered_once_by_each_listener() {
    let upstream = crate::common::Echo::start(crate::common::HELLO).await;
    let file = "[inbound.action.all]\nmatch = { path = \"/*\" }\nlimit = \"2 per 60s\"\n";
    let gate = start(upstream.address, file).await;
    once(gate.inbound, get("/a")).await;
    once(gate.api, post("/v1/check", r#"{"ip":"203.0.113.7","path":"/b"}"#)).await;
    once(gate.api, post("/v1/status", r#"{"ip":"203.0.113.7","path":"/b"}"#)).await;
    let forwarded = "x-forwarded-for: 203.0.113.8\r\nx-forwarded-method: GET\r\nx-forwarded-uri: /c\r\n";
    once(gate.api, format!("GET /v1/auth HTTP/1.1\r\nhost: gate.test\r\n{forwarded}\r\n")).await;
    let report = answer_json(&try_terms(&gate, "all", "all", "1 per 60s").await);
    assert_eq!((&report["remembered"], &report["edited"]["refused"]), (&3.into(), &1.into()), "{report}");
}

#[tokio::test]
async fn one_trial_runs_at_a_time() {
    let gate = start(nobody(), FILE).await;
    make_requests(&gate, 500).await;
    let tried = futures_util::future::join_all((0..6).map(|_| try_terms(&gate, "page", "", "9 per 60s"))).await;
    let count = |wanted: u16| tried.iter().filter(|answer| status(answer) == wanted).count();
    assert!(count(200) >= 1 && count(503) >= 1 && count(200) + count(503) == 6, "{tried:?}");
    let busy = tried.iter().find(|answer| status(answer) == 503).unwrap();
    assert_eq!(header(busy, "retry-after"), Some("1"));
    assert_eq!(status(&try_terms(&gate, "page", "", "9 per 60s").await), 200);
}

#[tokio::test]
async fn a_sample_of_clients_is_told() {
    let file = "[admin]\nhistory_bytes = \"64KiB\"\n[inbound.action.all]\nkey = [\"key\"]\nlimit = \"2 per 60s\"\n";
    let gate = start(nobody(), file).await;
    let mut api = Peer::connect(gate.api).await;
    for client in 0..3000 {
        let ip = format!("203.0.{}.{}", client % 1000 / 250, client % 250);
        let question = json!({ "action": "all", "key": "one", "ip": ip });
        api.ask(post("/v1/check", &question.to_string())).await;
        gate.clock.advance(Span::from_micros(1300));
    }
    let report = answer_json(&try_terms(&gate, "all", "", "5 per 60s").await);
    let (share, clients) = (report["share"].as_f64().unwrap(), report["clients"].as_f64().unwrap());
    assert!((0.1..=0.5).contains(&share) && (600.0 * share..1400.0 * share).contains(&clients), "{report}");
    assert_eq!(report["requests"].as_f64().unwrap(), clients * 3.0, "{report}");
    assert_eq!(report["sampled_limits"], json!(["all"]));
    assert_eq!(report["notes"].as_array().unwrap().len(), 3, "{report}");
}

#[tokio::test]
async fn wrong_trials_name_their_field() {
    let file = format!("{FILE}[inbound.action.slow]\nlimit = \"3 in flight\"\n");
    let gate = start(nobody(), &file).await;
    for (action, limit, terms, field, message) in [
        ("", "", "1 per 60s", "action", "`action` is missing"),
        ("logn", "", "1 per 60s", "action", "did you mean `login`?"),
        ("login", "", "1 per 60s", "limit", "login.1, login.2"),
        ("page", "", "", "terms", "terms:1:"),
        ("page", "", "1 par 60s", "terms", "terms:1:"),
        ("page", "", "key = [\"key\"]", "terms", "`key` can't be tried"),
        ("login", "1", "limit = [\"1 per 60s\"]", "terms", "change the names of limits"),
        ("page", "", &"a = 1\n".repeat(800), "terms", "at most 4000"),
        ("slow", "", "5 in flight", "terms", "calls in flight can't be tried"),
    ] {
        let answer = try_terms(&gate, action, limit, terms).await;
        let found = answer_json(&answer);
        assert_eq!((status(&answer), &found["field"]), (400, &field.into()), "{answer}");
        assert!(found["message"].as_str().unwrap().contains(message), "{message}: {found}");
    }
    let answer = once(gate.admin, change("/v1/try", "", r#"{"actoin":"login"}"#)).await;
    assert!(status(&answer) == 400 && answer.contains("did you mean `action`?"), "{answer}");
    assert_eq!(status(&once(gate.admin, get("/v1/try")).await), 405);
}

#[tokio::test]
async fn trials_need_a_history_and_full_rights() {
    let off = "[admin]\nhistory_bytes = \"off\"\n[inbound.action.page]\nlimit = \"1 per 60s\"\n";
    let answer = try_terms(&start(nobody(), off).await, "page", "", "2 per 60s").await;
    assert!(status(&answer) == 404 && answer.contains("admin.history_bytes is off"), "{answer}");
    let file = format!("{FILE}[admin]\ntokens = {{ dash = {{ secret = \"env:DASH\", read_only = true }} }}\n");
    let gate = try_start(&policy(nobody(), &file), |_| Some("dash-s3cret".to_owned())).unwrap();
    let token = "authorization: Bearer dash-s3cret\r\n";
    let answer = once(gate.admin, change("/v1/try", token, r#"{"action":"page","terms":"1 per 60s"}"#)).await;
    assert!(status(&answer) == 403 && answer.contains("only for reading"), "{answer}");
}

#[tokio::test]
async fn a_trial_follows_reloads() {
    let gate = start(nobody(), FILE).await;
    make_requests(&gate, 60).await;
    let reload = async |text: &str| {
        text.clone_into(&mut gate.file.lock().unwrap());
        gate.reload.reload().await.unwrap();
        answer_json(&try_terms(&gate, "page", "", "1 per 60s").await)
    };
    let before = answer_json(&try_terms(&gate, "page", "", "1 per 60s").await);
    let after = reload(&FILE.replace("40 per 1d", "3 per 1d")).await;
    assert_eq!((&after["remembered"], &after["edited"]), (&60.into(), &before["edited"]));
    assert_ne!(after["current"], before["current"]);
    let other = reload(&FILE.replace("cost = 2", "cost = 3")).await;
    assert_eq!(other["remembered"], 0, "{other}");
    once(gate.api, post("/v1/check", r#"{"action":"page","ip":"203.0.113.7"}"#)).await;
    assert_eq!(answer_json(&try_terms(&gate, "page", "", "1 per 60s").await)["remembered"], 1);
}
