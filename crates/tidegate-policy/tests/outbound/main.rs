//! The `[outbound]` section of a policy.
#![expect(clippy::unwrap_used, reason = "a test")]

mod words;

use std::path::Path;
use std::time::Duration;

use tidegate_core::call::{CallRules, LaneRules, MAX_LEAD, Measure, ProviderLimit};
use tidegate_core::pacer::{PacerGrowth, PacerMode};
use tidegate_core::{
    AdaptiveLimitSpec, AdaptiveRateSpec, Balance, BreakerSpec, BudgetSpec, Jitter, Lane, LaneSpec, LanesSpec,
    LimitKind, PacerSpec, Retry, Span,
};
use tidegate_policy::outbound::{Auth, ErrorFormat, OutboundConfig, PaceConfig, ProviderConfig};
use tidegate_policy::{KeySeed, Policy, PolicySources};

fn outbound(text: &str) -> OutboundConfig {
    let policy = Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"));
    policy.outbound().unwrap().clone()
}

fn rules(provider: &ProviderConfig) -> CallRules {
    provider.rules(&KeySeed::new([7; 16]))
}

fn names(outbound: &OutboundConfig, ceilings: &[ProviderLimit]) -> Vec<String> {
    ceilings.iter().map(|ceiling| outbound.limit_info(ceiling.limit).name.clone()).collect()
}

/// The ceilings that a reply settles, because they have counted the call ahead.
#[test]
fn only_exact_windows_are_settled_by_replies() {
    let limits = "[\"4096 per 10s\", \"4097 per 10s\", \"5 per 1s burst 5\", \"9000 per day in UTC\"]";
    let text = format!("[outbound.provider.api]\nbase_url = \"http://localhost\"\nlimit = {limits}\n");
    let outbound = outbound(&text);
    let rules = rules(outbound.find("api").unwrap());
    let settles: Vec<bool> = rules.provider_limits.iter().map(|ceiling| ceiling.settles).collect();
    assert_eq!(settles, [true, false, false, false]);
}

#[test]
fn a_preset_and_credentials_are_enough() {
    let outbound =
        outbound("[outbound.provider.tmdb]\npreset = \"tmdb\"\ncredentials = [\"env:TMDB_A\", \"file:/run/b\"]\n");
    assert_eq!(outbound.listen.to_string(), "127.0.0.1:8081");
    let provider = outbound.find("tmdb").unwrap();
    assert_eq!(provider.base_url.as_ref().unwrap().to_string(), "https://api.themoviedb.org/3");
    assert_eq!((provider.preset.as_deref(), &provider.auth), (Some("tmdb"), &Auth::Bearer));
    assert_eq!(provider.credentials.iter().map(ToString::to_string).collect::<Vec<_>>(), ["env:TMDB_A", "file:/run/b"]);
    assert_eq!(provider.cache.unwrap().ttl, Some(Duration::from_secs(86_400)));
    let rules = rules(provider);
    assert_eq!(names(&outbound, &rules.credential_limits), ["tmdb.credential"]);
    assert_eq!(names(&outbound, &rules.lane_limits[Lane::Background as usize]), ["tmdb.background"]);
    let per_credential = |limit| outbound.limit_info(limit).per_credential;
    assert!(per_credential(rules.credential_limits[0].limit) && per_credential(rules.cooldown));
    assert!(!per_credential(rules.lane_limits[Lane::Background as usize][0].limit));
    assert!(rules.provider_limits.is_empty() && rules.lane_limits[1].is_empty() && rules.lane_limits[2].is_empty());
    assert_eq!(rules.credential_keys.len(), 2);
    assert_eq!(outbound.limit_info(rules.credential_limits[0].limit).description, "at most 40 in any 10 s");
    let LimitKind::Window(window) = outbound.limits().get(rules.credential_limits[0].limit).unwrap().kind() else {
        panic!("no window")
    };
    assert_eq!((window.entries(), window.lead()), (40, MAX_LEAD));
    assert_eq!(
        (rules.lead, rules.jitter, rules.lanes.window),
        (Span::from_millis(500), Span::ZERO, Span::from_secs(10))
    );
    let LimitKind::Cooldown(cooldown) = outbound.limits().get(rules.cooldown).unwrap().kind() else {
        panic!("no cool-down")
    };
    assert_eq!((cooldown.base, cooldown.cap), (Span::from_secs(1), Span::from_secs(32)));
    assert_eq!(cooldown.stagger, Span::from_millis(250), "background's limit is no matter of the credential")
}

#[test]
fn an_adaptive_pace_takes_the_place_of_releases() {
    for (settings, secs) in [
        ("", 10),
        ("pace = \"adaptive\"", 0),
        ("pace = \"adaptive\"\nshared = true", 10),
        ("pace = \"responsive\"", 10),
        ("limit = \"5/s\"", 20),
    ] {
        let text = format!("[outbound.provider.api]\nbase_url = \"https://api.test\"\n{settings}");
        let outbound = outbound(&text);
        let rules = rules(outbound.find("api").unwrap());
        let LimitKind::Cooldown(cooldown) = outbound.limits().get(rules.cooldown).unwrap().kind() else {
            panic!("no cool-down")
        };
        assert_eq!(cooldown.max_release_time, Span::from_secs(secs), "{settings}");
    }
}

#[test]
fn lanes_fill_in_unset_provider_settings() {
    let secs = Span::from_secs;
    let lanes = |text: &str| {
        let outbound = outbound(&format!("[outbound.provider.x]\nlimit = \"10/s\"\n{text}"));
        let rules = rules(outbound.find("x").unwrap()).lane_rules;
        rules.map(|LaneRules { timeout, retry }| (timeout, retry.max_attempts))
    };
    assert_eq!(lanes(""), [(secs(60), 6), (secs(10), 3), (secs(10), 3)]);
    assert_eq!(lanes("retry = { max_attempts = 7 }\ntimeout = \"20s\""), [(secs(20), 7); 3]);
    assert_eq!(
        lanes("retry = { max_attempts = 7 }\nbackground = { retries = 0, timeout = \"2m\" }\nuser = { retries = 1 }"),
        [(secs(120), 1), (secs(10), 2), (secs(10), 7)]
    );
    assert_eq!(lanes("sequential = true"), [(secs(10), 3); 3]);
}

/// Every key, with a value other than its default.
const EVERY_KEY: &str = r#"
[outbound]
listen = "0.0.0.0:9081"
unix = { mode = "0600", owner = "root", group = "0" }
proxy_protocol = ["10.0.0.0/8"]
http2 = "never"
tls = { certificates = "a.pem", keys = "a.key", client_ca = "ca.pem", client_certificates = "optional" }
token = "env:GATE_TOKEN"
hosts = ["Gateway.internal"]
connections = 4000
connections_per_client = "off"
cache_bytes = "1GiB"
snapshot = "/var/lib/tidegate/outbound.json"

[outbound.provider.own]
preset = "local"
base_url = "HTTP://LocalHost:9000/v1/"
auth = "header:Authorization Token"
credentials = ["env:KEY_A", "env:KEYS[2]", "file:/run/key"]
balance = "least-recently-used"
limit = ["10/s burst 20", "50 per 10s", "8 in flight"]
credential_limit = "1000 per day in America/Los_Angeles"
cost_limit = "30000 per 60s"
credential_cost_limit = "90000 per 1h"
sequential = false
learn_limits = true
timeout = "20s"
connect_timeout = "2s"
attempt_timeout = "3s"
replay = "1MiB"
lead = "1s"
user_agent = "Own/1.0"
error_format = "openai"
hedge_after = "1s"
pace = { by = "responsive", mode = "classic", growth = "exponential", initial = "1s", max = "1m", up = 2, down = "50%", randomization = 0.1, max_randomization = "5s", successes = 3 }
retry = { max_attempts = 4, max_token_retries = 2, base = "2s", factor = 3, cap = "40s", jitter = "equal", max_retry_after = "1m" }
budget = { ratio = 0.125, min = 1, reserve = 7 }
adaptive = { min = 2, max = 30, initial = 3 }
cooldown = { base = "2s", cap = "16s" }
cache = { ttl = "forever", shared = true, stale = "1h", max_body = "2MiB" }
max_pause = "2d"
throttled_when = { status = [403, 429], contains = { "/error" = "slow down" }, spends_quota = true }
cost = { reserve = 5, request = ["/max_tokens"], bytes_per_unit = 4, reply = ["/usage/in or /in", "/usage/out"] }

[outbound.provider.own.background]
limit = "1/s"
in_flight = 2
timeout = "2m"
max_waiting = 100
retries = 9
hours = "22:00-06:00 in Europe/Berlin"

[outbound.provider.own.user]
limit = "9/s"
in_flight = 5
timeout = "15s"
max_waiting = 200
retries = 1

[outbound.provider.own.webhook]
limit = "10/s"
in_flight = 6
timeout = "5s"
max_waiting = 300
retries = 0

[outbound.provider.own.breaker]
failures = 3
failure_rate = "50%"
window = "30s"
min_calls = 20
slow_after = "2s"
slow_rate = 0.25
open = "1s"
open_factor = 3
open_cap = "1m"
open_jitter = "equal"
probes = 2
probe_lease = "5s"
successes = 3
ramp = [{ share = 0.1, for = "10s" }, { share = "50%", for = "20s" }]

[outbound.provider.own.login]
path = "/login"
body = '{"apikey":"{credential}","pin":"{pin}"}'
secrets = { pin = "env:PIN" }
pointer = "/data/token"
lifetime = "12h"
refresh_before = "1h"

[[outbound.provider.own.rule]]
is = "throttled"
retry = false
wait = ["header retry-after", "30s"]
scope = "credential"
max_pause = "2d"
[[outbound.provider.own.rule.when]]
status = 503
header = { server = "x" }
[[outbound.provider.own.rule.when]]
status = 400
request = { json = { "/a" = "b" } }

[[outbound.provider.own.rule]]
when = { status = 200, xml = { "Error/Code" = "SlowDown" }, text = "slow", request = { method = "POST", host = "*.example.com", path = "/x" } }
retry = true

[[outbound.provider.own.scope]]
method = "GET"
path = "/search/{kind}/**"
name = ["path {kind}", "header x-bucket"]

[[outbound.provider.own.allowance]]
of = "cost"
limit = 100
remaining = "header x-left"
used = "header x-used"
reset = "header x-reset epoch"
window = "60s"

[outbound.provider.found]
base_url = "http://localhost:9001"
scope = [{ name = ["request.json /model"] }]
scope_limit = "30 per 60s"
credential_scope_limit = "5/s"
pace = { by = "adaptive", initial = "20ms", slowest = "10s", fastest = "1ms" }
"#;

#[test]
fn every_outbound_key_is_read() {
    for setting in tidegate_policy::settings::all().filter(|setting| setting.path().starts_with("outbound.")) {
        let key = setting.path().rsplit('.').next().unwrap();
        let is_there = EVERY_KEY.contains(&format!("{key} = ")) || EVERY_KEY.contains(&format!(".{key}]"));
        assert!(is_there, "{}", setting.path());
    }
    let outbound = outbound(EVERY_KEY);
    assert_eq!(outbound.listen.to_string(), "0.0.0.0:9081");
    assert_eq!(outbound.token.as_ref().unwrap().to_string(), "env:GATE_TOKEN");
    assert_eq!((outbound.hosts.as_slice(), outbound.cache_bytes), (&["gateway.internal".to_owned()][..], 1 << 30));
    assert_eq!((outbound.connections, outbound.connections_per_client), (4000, None));
    assert_eq!(outbound.snapshot.as_deref(), Some(Path::new("/var/lib/tidegate/outbound.json")));
    let own = outbound.find("own").unwrap();
    let url = own.base_url.as_ref().unwrap();
    assert_eq!((url.to_string().as_str(), url.is_https(), url.path()), ("http://localhost:9000/v1", false, "/v1"));
    assert_eq!(own.auth, Auth::Header { name: http::header::AUTHORIZATION, prefix: "Token ".to_owned() });
    let sources: Vec<String> = own.credentials.iter().map(ToString::to_string).collect();
    assert_eq!(sources, ["env:KEY_A", "env:KEYS[2]", "file:/run/key"]);
    assert_eq!((own.balance, own.replay_bytes), (Balance::LeastRecentlyUsed, 1 << 20));
    let secs = Duration::from_secs;
    assert_eq!((own.connect_timeout, own.attempt_timeout, own.hedge_after), (secs(2), secs(3), Some(secs(1))));
    assert_eq!(own.user_agent.as_ref().unwrap(), "Own/1.0");
    assert_eq!(own.error_format, ErrorFormat::OpenAi);
    let cache = own.cache.unwrap();
    assert_eq!(
        (cache.ttl, cache.shared, cache.stale, cache.max_body),
        (Some(Duration::MAX), true, secs(3600), 2 << 20)
    );
    assert_eq!(
        own.verdicts.describe()[2],
        "rule 3 of the policy: 403, 429 with /error containing \"slow down\" is a spent quota"
    );
    let cost = own.cost.as_ref().unwrap();
    assert_eq!((cost.reserve, cost.bytes_per_unit, &cost.request[..]), (5, 4, &["/max_tokens".to_owned()][..]));
    assert_eq!(cost.reply, [vec!["/usage/in".to_owned(), "/in".to_owned()], vec!["/usage/out".to_owned()]]);
    assert_eq!(own.max_cost(outbound.limits()), 30_000, "the smaller of both");
    let login = own.login.as_ref().unwrap();
    assert_eq!((login.path.as_str(), login.pointer.as_str()), ("/login", "/data/token"));
    assert_eq!((login.lifetime, login.refresh_before), (secs(43_200), secs(3600)));
    assert_eq!((login.secrets[0].0.as_str(), login.secrets[0].1.to_string().as_str()), ("pin", "env:PIN"));
    assert_eq!(own.hours.as_ref().unwrap().to_string(), "22:00-06:00 in Europe/Berlin");
    assert!(!own.sequential);
    let responsive = PacerSpec {
        initial: secs(1),
        max: secs(60),
        growth: PacerGrowth::Exponential { up: 2_000, down: 500 },
        randomization: 100,
        max_randomization: secs(5),
        successes: 3,
        mode: PacerMode::Classic,
    };
    assert_eq!(own.pace, PaceConfig::Responsive(responsive));
    let [initial, slowest, fastest] = [20, 10_000, 1].map(Span::from_millis);
    assert_eq!(
        outbound.find("found").unwrap().pace,
        PaceConfig::Adaptive(AdaptiveRateSpec { initial, slowest, fastest })
    );
    let inflight = own.adaptive_limit.unwrap();
    assert_eq!((inflight.min, inflight.max, inflight.initial), (2, 30, 3));
}

#[test]
fn every_outbound_key_reaches_the_rules() {
    let outbound = outbound(EVERY_KEY);
    let own = outbound.find("own").unwrap();
    let rules = rules(own);
    let secs = Span::from_secs;
    assert_eq!(names(&outbound, &rules.provider_limits), ["own.1", "own.2", "own.cost"]);
    assert_eq!(names(&outbound, &rules.credential_limits), ["own.credential", "own.credential.cost"]);
    let measures: Vec<Measure> = rules.provider_limits.iter().map(|ceiling| ceiling.measure).collect();
    assert_eq!(measures, [Measure::Calls, Measure::Calls, Measure::Cost]);
    for (lane, name) in rules.lane_limits.iter().zip(["own.background", "own.user", "own.webhook"]) {
        assert_eq!(names(&outbound, lane), [name]);
    }
    assert_eq!((rules.lead, rules.can_renew_login, rules.credential_keys.len()), (secs(1), true, 3));
    assert_eq!(rules.jitter, Span::from_micros(1_500), "1.5 % of 100 ms");
    assert_eq!((rules.lanes.max_in_flight, rules.lanes.window), (8, secs(10)));
    let lanes = rules.lanes.lanes.map(|lane| (lane.max_in_flight, lane.max_waiting, lane.displaces));
    assert_eq!(lanes, [(2, 100, false), (5, 200, true), (6, 300, true)]);
    let granted = rules.lane_rules.map(|lane| (lane.timeout, lane.retry.max_attempts));
    assert_eq!(granted, [(secs(120), 10), (secs(15), 2), (secs(5), 1)]);
    let retry = rules.lane_rules[0].retry;
    assert_eq!((retry.max_token_retries, retry.max_retry_after), (2, secs(60)));
    assert_eq!((retry.backoff.base, retry.backoff.cap, retry.backoff.jitter), (secs(2), secs(40), Jitter::Equal));
    assert_eq!(retry.backoff.base_wait(2), secs(6));
    assert_eq!((rules.budget.ratio, rules.budget.min, rules.budget.reserve), (125, 1, 7));
    let LimitKind::Cooldown(cooldown) = outbound.limits().get(rules.cooldown).unwrap().kind() else {
        panic!("no cool-down")
    };
    assert_eq!((cooldown.base, cooldown.cap, cooldown.stagger), (secs(2), secs(16), Span::from_millis(100)));
    let breaker = own.breaker.as_ref().unwrap();
    assert_eq!((breaker.failures, breaker.failure_rate, breaker.window), (Some(3), Some(500), secs(30)));
    let slow = breaker.slow_calls.unwrap();
    assert_eq!((breaker.min_calls, slow.threshold, slow.rate), (20, secs(2), 250));
    let open = [1, 2, 3, 4, 5].map(|n| breaker.open.base_wait(n).as_secs_ceil());
    assert_eq!((open, breaker.open.jitter), ([1, 3, 9, 27, 60], Jitter::Equal));
    assert_eq!((breaker.probes, breaker.probe_lease, breaker.successes), (2, secs(5), 3));
    let ramp: Vec<(u16, Span)> = breaker.ramp.iter().map(|step| (step.share, step.length)).collect();
    assert_eq!(ramp, [(100, secs(10)), (500, secs(20))]);
}

#[test]
fn a_pace_may_be_word_or_table() {
    let linear = PacerGrowth::Linear;
    for (written, pace, words) in [
        ("\"limits\"", PaceConfig::Limits, None),
        ("{ by = \"limits\" }", PaceConfig::Limits, None),
        (
            "\"responsive\"",
            PaceConfig::Responsive(PacerSpec::default()),
            Some(
                "a wait between calls once one is throttled: 500 ms up to 15 min, times 1.5 at a throttled call, times 0.9 after 10 successes",
            ),
        ),
        (
            "{ by = \"responsive\", growth = \"linear\", successes = 1 }",
            PaceConfig::Responsive(PacerSpec { growth: linear, successes: 1, ..PacerSpec::default() }),
            Some(
                "a wait between calls once one is throttled: 500 ms up to 15 min, one more of it at a throttled call, one less after 1 success",
            ),
        ),
        (
            "\"adaptive\"",
            PaceConfig::Adaptive(AdaptiveRateSpec::default()),
            Some(
                "the accepted rate is found by trials: at first a call each 100 ms, at least each 60 s and at most each 1 µs",
            ),
        ),
    ] {
        let outbound =
            outbound(&format!("[outbound.provider.x]\nbase_url = \"https://example.com\"\npace = {written}\n"));
        let provider = outbound.find("x").unwrap();
        assert_eq!(provider.pace, pace);
        assert_eq!(provider.pace.build().is_some(), pace != PaceConfig::Limits);
        assert!(words.is_none_or(|words| outbound.describe().contains(words)), "{}", outbound.describe());
        assert_eq!(outbound.describe().contains("unlimited"), pace == PaceConfig::Limits);
        let cools = "cools down for 1 s, 2 s … 32 s when it is throttled";
        assert_eq!(outbound.describe().contains(cools), pace == PaceConfig::Limits, "a pace takes its place");
    }
}

#[test]
fn a_minimal_provider_has_the_defaults() {
    let outbound = outbound("[outbound.provider.x]\nbase_url = \"https://example.com\"\n");
    let provider = outbound.find("x").unwrap();
    let rules = rules(provider);
    assert_eq!((outbound.cache_bytes, outbound.hosts.len(), outbound.token.is_none()), (64 << 20, 0, true));
    assert_eq!((outbound.connections, outbound.connections_per_client), (1024, Some(256)));
    assert_eq!(provider.breaker, Some(BreakerSpec::default()));
    assert_eq!(provider.adaptive_limit, Some(AdaptiveLimitSpec::default()));
    assert_eq!(provider.pace, PaceConfig::Limits);
    assert_eq!((&provider.auth, provider.credentials.len(), provider.cache.is_none()), (&Auth::None, 0, true));
    assert_eq!(rules.lane_rules[Lane::User as usize].retry, Retry::default());
    let displacing = LaneSpec { displaces: true, ..LaneSpec::default() };
    let lanes = [LaneSpec::default(), displacing, displacing];
    assert_eq!(rules.lanes, LanesSpec { lanes, ..LanesSpec::default() });
    assert_eq!(rules.budget, BudgetSpec::default());
    assert_eq!((rules.provider_limits.len(), rules.credential_keys.len()), (0, 1));
    assert_eq!(outbound.limit_info(rules.cooldown).name, "x.cooldown");
    assert!(outbound.find("nobody").unwrap_err().nearest.is_none());
}

#[test]
fn off_and_unlimited_disable_settings() {
    let outbound = outbound(
        "[outbound]\nlisten = \"off\"\nsnapshot = \"off\"\n[outbound.provider.x]\nlimit = \"unlimited\"\nbreaker = \"off\"\nadaptive = \"off\"\n\
         [outbound.provider.y]\npreset = \"tmdb\"\nauth = \"none\"\ncache = \"off\"\ncredential_limit = \"unlimited\"\n\
         background = { limit = \"unlimited\" }\nbreaker = { failures = \"off\", failure_rate = 0.5 }\n",
    );
    assert_eq!((outbound.listen.is_off(), &outbound.snapshot), (true, &None));
    let x = outbound.find("x").unwrap();
    assert!(x.breaker.is_none() && x.adaptive_limit.is_none() && x.base_url.is_none());
    let y = outbound.find("y").unwrap();
    assert!(y.cache.is_none() && y.credentials.is_empty());
    assert_eq!(y.breaker.as_ref().unwrap().failures, None);
    assert!(rules(y).provider_limits.is_empty() && rules(y).lane_limits.iter().all(|lane| lane.is_empty()));
}

/// The budget's minimum, the breaker's failures and the notes of a provider with these settings.
fn room_for_attempts(settings: &str) -> (u32, Option<u32>, Vec<String>) {
    let text = format!("[outbound.provider.x]\nbase_url = \"https://example.com\"\n{settings}\n");
    let policy = Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"));
    let provider = policy.outbound().unwrap().find("x").unwrap();
    let notes = policy.notes().iter().map(|note| note.message().to_owned()).collect();
    (rules(provider).budget.min, provider.breaker.as_ref().and_then(|breaker| breaker.failures), notes)
}

#[test]
fn attempts_that_are_set_get_room() {
    for (settings, room) in [
        ("", (3, Some(5))),
        ("retry = { base = \"1s\" }", (3, Some(5))),
        ("retry = { max_attempts = 2 }", (3, Some(5))),
        ("retry = { max_attempts = 6 }\nuser = { timeout = \"1m\" }\nwebhook = { timeout = \"1m\" }", (6, Some(7))),
        ("background = { retries = 8 }", (9, Some(10))),
        ("retry = { max_attempts = 4 }\nbackground = { retries = 6 }", (7, Some(8))),
        ("retry = { max_attempts = 5 }\nbreaker = { failures = \"off\", failure_rate = 0.5 }", (5, None)),
        ("retry = { max_attempts = 5 }\nbreaker = \"off\"", (5, None)),
        ("retry = { max_attempts = 5 }\nbudget = \"off\"", (u32::MAX, Some(6))),
        ("retry = { max_attempts = 5 }\nbudget = { ratio = 0.5 }", (5, Some(6))),
        ("retry = { max_attempts = 5 }\nbudget = { min = 4 }\nbreaker = { failures = 5 }", (4, Some(5))),
    ] {
        let (min, failures, notes) = room_for_attempts(settings);
        assert_eq!(((min, failures), notes), (room, Vec::new()), "{settings}");
    }
}

#[test]
fn notes_name_settings_of_rules_without_effect() {
    let rule = |is: &str| format!("rule = [{{ when = {{ status = 400 }}, is = \"{is}\", wait = \"5s\" }}]");
    let allowance = "allowance = [{ remaining = \"header x-left\" }]";
    let no_wait = "no effect: nothing waits after a reply of this class";
    let no_learning = "without `learn_limits = true`, only a report that nothing is left has an effect";
    for (settings, expected) in [
        (rule("permanent"), &[no_wait][..]),
        (rule("auth"), &[no_wait]),
        (rule("unavailable"), &[]),
        (allowance.to_owned(), &[no_learning]),
        (format!("learn_limits = true\n{allowance}"), &[]),
    ] {
        let (_, _, notes) = room_for_attempts(&settings);
        assert_eq!(notes, expected, "{settings}");
    }
}

#[test]
fn notes_name_what_ends_a_call_early() {
    let (min, failures, notes) = room_for_attempts(
        "retry = { max_attempts = 8, base = \"2s\" }\nbudget = { min = 2 }\nbreaker = { failures = 3 }",
    );
    assert_eq!((min, failures), (2, Some(3)));
    assert_eq!(
        notes,
        [
            "`retry.max_attempts` allows a call 8 attempts, but `budget.min` allows all calls together 2 retries and \
             `budget.ratio` 20 % of first attempts more",
            "`retry.max_attempts` allows a call 8 attempts, but the breaker opens at 3 failures in a row \
             (`breaker.failures`)",
            "`retry.max_attempts` allows a call 8 attempts, but the waits between them may add up to 46 s, and a user call \
             has 10 s (`timeout`)",
        ]
    );
    let (_, _, notes) =
        room_for_attempts("retry = { max_attempts = 5 }\nbreaker = { failure_rate = 0.5, min_calls = 3 }");
    let bound = "the breaker opens at 50 % failures of 3 calls (`breaker.failure_rate`)";
    assert_eq!(notes, [format!("`retry.max_attempts` allows a call 5 attempts, but {bound}")]);
    let (_, _, notes) = room_for_attempts("background = { retries = 20 }\ntimeout = \"1m\"");
    assert_eq!(
        notes,
        [
            "`background.retries` allows a call 21 attempts, but the waits between them may add up to 2 min 15 s 500 ms, and a \
          background call has 60 s (`timeout`)"
        ]
    );
    let sequential = "sequential = true\nretry = { max_attempts = 30 }\ntimeout = \"5s\"";
    assert_eq!(room_for_attempts(sequential).2.len(), 1);
}

#[test]
fn a_budget_may_be_off() {
    let outbound = outbound("[outbound.provider.x]\nbase_url = \"https://example.com\"\nbudget = \"off\"\n");
    assert_eq!(rules(outbound.find("x").unwrap()).budget, BudgetSpec::UNLIMITED);
    assert!(
        outbound.describe().contains("or Retry-After up to 5 min; no budget for retries\n"),
        "{}",
        outbound.describe()
    );
}

#[test]
fn a_section_overrides_its_preset_key_by_key() {
    let outbound = outbound(
        "[outbound.provider.x]\npreset = \"tvdb\"\ncredentials = \"env:KEY\"\nbackground = { in_flight = 1 }\n\
         retry = { cap = \"5s\" }\n[outbound.provider.x.login]\nbody = '{\"k\":\"{credential}\",\"pin\":\"{pin}\"}'\n\
         secrets = { pin = \"env:PIN\" }\n",
    );
    let x = outbound.find("x").unwrap();
    let rules = rules(x);
    assert_eq!(names(&outbound, &rules.lane_limits[0]), ["x.background"]);
    assert_eq!(rules.lanes.lanes[0].max_in_flight, 1);
    let backoff = rules.lane_rules[0].retry.backoff;
    assert_eq!((backoff.base, backoff.cap), (Span::from_secs(1), Span::from_secs(5)));
    let login = x.login.as_ref().unwrap();
    assert_eq!((login.pointer.as_str(), login.refresh_before), ("/data/token", Duration::from_secs(7200)));
}

#[test]
fn providers_and_credentials_have_distinct_keys() {
    let outbound = outbound(
        "[outbound.provider.a]\npreset = \"tmdb\"\ncredentials = [\"env:A\", \"env:B\"]\n\
         [outbound.provider.b]\npreset = \"tmdb\"\ncredentials = [\"env:A\", \"env:B\"]\n",
    );
    let mut keys: Vec<_> = outbound
        .providers()
        .iter()
        .map(rules)
        .flat_map(|rules| rules.credential_keys.iter().copied().chain([rules.key]).collect::<Vec<_>>())
        .collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 6);
}

#[test]
fn too_many_limits_per_call_are_rejected() {
    let with = |lane: &str| {
        let text = format!(
            "[outbound.provider.x]\nauth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\n\
             limit = [\"1/s\", \"9 per 10s\"]\ncredential_limit = [\"1/s\", \"9 per 10s\"]\n\
             user = {{ limit = {lane} }}\n"
        );
        Policy::load(PolicySources::new().file("test.toml", text)).map(|_| ()).map_err(|errors| errors.to_string())
    };
    assert_eq!(with("[\"1/s\", \"2/s\", \"3/s\"]"), Ok(()));
    let told = with("[\"1/s\", \"2/s\", \"3/s\", \"4/s\"]").unwrap_err();
    assert!(told.contains("a call to `x` meets 8 limits") && told.contains("at most 7"), "{told}");
}

/// With one credential, a full limit is the provider's and not that of one credential of many.
#[test]
fn a_single_credentials_limit_becomes_the_providers() {
    let outbound = outbound("[outbound.provider.x]\npreset = \"omdb-free\"\ncredentials = \"env:A\"\n");
    let rules = rules(outbound.find("x").unwrap());
    assert!(rules.credential_limits.is_empty());
    assert_eq!(names(&outbound, &rules.provider_limits), ["x.credential"]);
}

#[test]
fn in_flight_limits_apply_per_provider_and_credential() {
    let bounds = |settings: &str| {
        let text = format!("[outbound.provider.x]\nbase_url = \"https://api.test\"\nauth = \"bearer\"\n{settings}");
        let rules = rules(outbound(&text).find("x").unwrap());
        // The store doesn't count these limits.
        assert!(rules.provider_limits.is_empty() && rules.credential_limits.is_empty());
        (rules.lanes.max_in_flight, rules.max_in_flight_per_credential)
    };
    let (one, two) = ("credentials = \"env:A\"\n", "credentials = [\"env:A\", \"env:B\"]\n");
    for (settings, all_and_each) in [
        (format!("{two}limit = \"8 in flight\""), (8, u32::MAX)),
        (format!("{two}credential_limit = \"5 in flight\""), (u32::MAX, 5)),
        (format!("{two}limit = \"8 in flight\"\ncredential_limit = [\"5 in flight\", \"3 in flight\"]"), (8, 3)),
        // With one credential, the limit applies to the provider, because no other credential could take over.
        (format!("{one}credential_limit = \"5 in flight\""), (5, u32::MAX)),
        (format!("{one}limit = \"4 in flight\"\ncredential_limit = \"5 in flight\""), (4, u32::MAX)),
        (format!("{one}credential_limit = \"5 in flight\"\nsequential = true"), (1, u32::MAX)),
    ] {
        assert_eq!(bounds(&settings), all_and_each, "{settings}");
    }
}

/// An only credential cools down for the same times as retries wait. One of several leaves its calls to the others.
#[test]
fn cool_downs_derive_from_retry_settings() {
    let own = "[outbound.provider.x]\nbase_url = \"https://example.com\"\n";
    let preset = "[outbound.provider.x]\npreset = \"tmdb\"\n";
    let one = "auth = \"bearer\"\ncredentials = \"env:A\"\n";
    let two = "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\n";
    let said = "retry = { base = \"2s\", cap = \"30s\" }\n";
    for (text, (base, cap)) in [
        (own.to_owned(), (1_000, 32_000)),
        (format!("{own}retry = {{ max_attempts = 7 }}\n"), (1_000, 32_000)),
        (format!("{own}{said}"), (2_000, 30_000)),
        (format!("{own}{one}{said}"), (2_000, 30_000)),
        (format!("{own}{two}{said}"), (1_000, 32_000)),
        (format!("{own}retry = {{ cap = \"30s\" }}\n"), (500, 30_000)),
        (format!("{own}{said}cooldown = {{ base = \"3s\" }}\n"), (3_000, 30_000)),
        (format!("{own}{said}cooldown = {{ base = \"1s\", cap = \"8s\" }}\n"), (1_000, 8_000)),
        (format!("{preset}{one}"), (1_000, 30_000)),
        (format!("{preset}{two}"), (1_000, 32_000)),
    ] {
        let outbound = outbound(&text);
        let rules = rules(outbound.find("x").unwrap());
        let LimitKind::Cooldown(cooldown) = outbound.limits().get(rules.cooldown).unwrap().kind() else {
            panic!("no cool-down")
        };
        assert_eq!((cooldown.base, cooldown.cap), (Span::from_millis(base), Span::from_millis(cap)), "{text}");
    }
}

#[test]
fn status_lists_may_come_from_the_environment() {
    let file = "[outbound.provider.x]\nlimit = \"1/s\"\nthrottled_when = { contains = { \"/e\" = \"slow\" } }\n";
    for (value, expected) in [("403", "403 with"), ("[200, 401]", "200, 401 with"), ("5xx", "5xx with")] {
        let variable = "TIDEGATE__OUTBOUND__PROVIDER__X__THROTTLED_WHEN__STATUS";
        let policy = Policy::load(PolicySources::new().file("test.toml", file).env([(variable, value)]));
        let outbound = policy.unwrap_or_else(|errors| panic!("{errors}")).outbound().unwrap().clone();
        let rule = &outbound.find("x").unwrap().verdicts.describe()[0];
        assert!(rule.contains(expected), "{rule}");
    }
}

#[test]
fn a_preset_can_be_made_sequential() {
    let outbound = outbound("[outbound.provider.x]\npreset = \"tmdb\"\nauth = \"none\"\nsequential = true\n");
    let rules = rules(outbound.find("x").unwrap());
    assert_eq!(rules.lanes.max_in_flight, 1);
    assert!(rules.lane_limits.iter().all(|lane| lane.is_empty()));
    assert!(rules.lanes.lanes.iter().all(|lane| !lane.displaces), "first come, first served");
}

#[test]
fn the_environment_overrides_section_and_preset() {
    let file = "[outbound.provider.my-api]\npreset = \"tmdb\"\ncredentials = \"env:A\"\nretry = { cap = \"9s\" }\n";
    let sources = PolicySources::new().file("test.toml", file).env([
        ("TIDEGATE__OUTBOUND__LISTEN", "127.0.0.1:9999"),
        ("TIDEGATE__OUTBOUND__PROVIDER__MY_API__CREDENTIALS", "env:TIDEGATE_A, env:B"),
        ("TIDEGATE__OUTBOUND__PROVIDER__MY_API__LIMIT", "10/s, 9 in flight"),
        ("TIDEGATE__OUTBOUND__PROVIDER__MY_API__BACKGROUND__LIMIT", "3 per 10s"),
        ("TIDEGATE__OUTBOUND__PROVIDER__MY_API__RETRY__BASE", "2s"),
        ("TIDEGATE__OUTBOUND__PROVIDER__MY_API__BUDGET__RATIO", "30%"),
        ("TIDEGATE__OUTBOUND__PROVIDER__MY_API__BREAKER", "off"),
        ("TIDEGATE__OUTBOUND__PROVIDER__MY_API__CACHE", "{ ttl = \"1h\" }"),
        ("TIDEGATE_A", "hunter2"),
    ]);
    let policy = Policy::load(sources).unwrap_or_else(|errors| panic!("{errors}"));
    let outbound = policy.outbound().unwrap();
    assert_eq!(outbound.listen.to_string(), "127.0.0.1:9999");
    let provider = outbound.find("my-api").unwrap();
    assert_eq!(provider.credentials.iter().map(ToString::to_string).collect::<Vec<_>>(), ["env:TIDEGATE_A", "env:B"]);
    assert!(provider.breaker.is_none());
    assert_eq!(provider.cache.unwrap().ttl, Some(Duration::from_secs(3600)));
    let rules = rules(provider);
    assert_eq!((rules.lanes.max_in_flight, rules.budget.ratio), (9, 300));
    assert_eq!(outbound.limit_info(rules.lane_limits[0][0].limit).description, "at most 3 in any 10 s");
    let backoff = rules.lane_rules[0].retry.backoff;
    assert_eq!((backoff.base, backoff.cap), (Span::from_secs(2), Span::from_secs(9)));
}

#[test]
fn errors_hide_secrets_in_variables_and_files() {
    let provider = "[outbound.provider.x]\npreset = \"tvdb\"\n";
    for (key, value) in [
        ("CREDENTIALS", "hunter2"),
        ("CREDENTIALS", "env:A, hunter2"),
        ("CREDENTIALS", "[\"env:A\", \"hunter2\"]"),
        ("LOGIN__SECRETS", "{ pin = \"hunter2\" }"),
        ("BASE_URL", "https://me:hunter2@example.com"),
        ("BASE_URL", "https://example.com/?k=hunter2"),
    ] {
        let variable = format!("TIDEGATE__OUTBOUND__PROVIDER__X__{key}");
        let sources = PolicySources::new().file("test.toml", provider).env([(variable.as_str(), value)]);
        let told = Policy::load(sources).unwrap_err().to_string();
        assert!(told.contains(&variable) && !told.contains("hunter2"), "{told}");
    }
    // The secret also stays hidden if the file is no TOML, or if another part of the line is wrong.
    for rest in [
        "credentials = [\n  \"hunter2,\n]\n",
        "credentials = [\n  \"env:A\",\n  \"hunter2\"\n  \"hunter3\"\n]\n",
        "credentials = [\"hunter2\"\n",
        "credentials = \"hunter2\", limit = \"x\"\n",
        "login = { secrets = { pin = \"hunter2\" }, pointer = 3 }\n",
        "[outbound.provider.x.login.secrets]\npin = \"hunter2\n",
        "[outbound.provider.x.login]\nbody = '{\"apikey\":\"hunter2\"}'\npath = 3\n",
        "[outbound.provider.x.login]\nbody = '{\"apikey\":\"hunter2\"\n",
    ] {
        let text = format!("{provider}{rest}");
        let told = Policy::load(PolicySources::new().file("test.toml", text)).unwrap_err().to_string();
        assert!(!told.contains("hunter"), "{told}");
    }
}
