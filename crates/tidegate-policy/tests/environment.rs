//! The environment beats the file, and the file beats the default.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use tidegate_policy::{LogLevel, OnOutage, Policy, PolicySources, Query, settings};

const FILE: &str = r#"
[inbound]
upstream = "http://127.0.0.1:3000"

[inbound.global]
limit = "1000 per 1h"
penalty = { base = "2s", cap = "1h" }

[inbound.action.login]
match = { method = "POST", path = "/login" }
limit = "5 per 60s"
penalty = { base = "2s", cap = "1h" }

[inbound.action.otp-request]
preset = "otp_request"
"#;

/// A provider with every table that has defaults of its own.
const PROVIDER: &str = r#"
[outbound.provider.login]
limit = "5 per 60s"
auth = "bearer"
credentials = "env:KEY"
retry = {}
budget = {}
breaker = {}
adaptive = {}
cooldown = {}
cache = {}
cost = {}
login = { path = "/login", body = '{"key":"{credential}"}' }
throttled_when = { contains = { "/error" = "limit" } }
"#;

fn load(file: Option<&str>, env: &[(&str, &str)]) -> Result<Policy, String> {
    let sources = PolicySources::new().env(env.iter().copied());
    let sources = match file {
        Some(text) => sources.file("tidegate.toml", text),
        None => sources,
    };
    Policy::load(sources).map_err(|errors| errors.to_string())
}

fn words(file: Option<&str>, env: &[(&str, &str)]) -> String {
    load(file, env).unwrap().plan().describe()
}

#[test]
fn variables_without_effect_are_noted() {
    const LIMITED: &str = "[inbound.action.a]\nlimit = \"5 per 1m\"\n";
    const CALLS: &str = "[outbound.provider.x]\nbase_url = \"https://example.com\"\n";
    let no_penalty = "no effect: no limit has a `penalty`, whose blocks it would set";
    for (file, env, expected) in [
        (FILE, [("GLOBAL_RATE_LIMIT", "5"), ("BACKOFF_BASE", "3")], Vec::new()),
        (
            LIMITED,
            [("BACKOFF_BASE", "3"), ("BACKOFF_MAX", "9")],
            vec![
                format!("environment variable BACKOFF_BASE: {no_penalty}"),
                format!("environment variable BACKOFF_MAX: {no_penalty}"),
            ],
        ),
        (LIMITED, [("GLOBAL_RATE_LIMT", "5"), ("BACKOFF_BAS", "3")], vec![
            "environment variable GLOBAL_RATE_LIMT: no effect: no variable has this name; did you mean `GLOBAL_RATE_LIMIT`?"
                .to_owned(),
            "environment variable BACKOFF_BAS: no effect: no variable has this name; did you mean `BACKOFF_BASE`?"
                .to_owned(),
        ]),
        // Kubernetes sets such variables for a Service called `tidegate`.
        (LIMITED, [("TIDEGATE_PORT", "tcp://10.0.0.7:8080"), ("TIDEGATE_SERVICE_PORT_HTTP", "8080")], Vec::new()),
        // The global limit that the variable makes has a penalty.
        (LIMITED, [("GLOBAL_RATE_LIMIT", "5"), ("BACKOFF_MAX", "7200")], Vec::new()),
        (
            CALLS,
            [("GLOBAL_RATE_LIMIT", "5"), ("X_RETRY_MAX", "9")],
            vec![
            "environment variable GLOBAL_RATE_LIMIT: it limits the calls of clients to this gate, and none to other \
             people's APIs"
                .to_owned(),
        ],
        ),
    ] {
        let policy = load(Some(file), &env).unwrap();
        let notes: Vec<_> =
            policy.notes().iter().map(|note| format!("{}: {}", note.location(), note.message())).collect();
        assert_eq!(notes, expected, "{env:?}");
    }
    let sources = PolicySources::new().env([("APP_API_MAX_RETRIES", "5")]).env_prefix("APP").file("t.toml", LIMITED);
    let policy = Policy::load(sources).unwrap();
    assert_eq!(policy.notes()[0].message(), "no effect: the policy has no provider");
}

#[test]
fn the_embedded_default_policy_needs_no_file() {
    let policy = load(None, &[]).unwrap();
    assert_eq!(policy.inbound().listen.to_string(), "127.0.0.1:8080");
    assert_eq!(policy.inbound().upstream.as_ref().unwrap().to_string(), "http://127.0.0.1:3000");
    assert_eq!(
        policy.plan().describe(),
        "inbound.global, over all actions\n    \
         global, by client_ip: at most 1010 in any 1 h (1000, and one after each block); over that, blocks of 2 s, 4 s \
         … 1 h; one strike less after each \
         1 h without a refusal\n\
         login: POST /login\n    \
         login, by client_ip: at most 9 in any 60 s (5, and one after each block); over that, blocks of 2 s, 4 s \
         … 1 h; one strike less after each \
         1 h without a refusal\n"
    );
}

#[test]
fn every_kind_of_setting_can_be_overridden() {
    let policy = load(
        Some(FILE),
        &[
            ("TIDEGATE__INBOUND__TIMEOUTS__CONNECT", "2s"),
            ("TIDEGATE__INBOUND__TIMEOUTS__BODY", " \"90s\" "),
            ("TIDEGATE__INBOUND__TRUSTED_PROXIES", "10.0.0.0/8, 192.168.0.0/16"),
            ("TIDEGATE__INBOUND__ALLOW", "[\"10.1.0.0/16\"]"),
            ("TIDEGATE__INBOUND__X_RATELIMIT", "true"),
            ("TIDEGATE__INBOUND__CAPS__HEADERS", "50"),
            ("TIDEGATE__INBOUND__CAPS__BODY", "10MiB"),
            ("TIDEGATE__INBOUND__UPSTREAM", "http://[::1]:4000"),
            ("TIDEGATE__STORE__ON_OUTAGE", "deny"),
            ("TIDEGATE__API__LISTEN", "0.0.0.0:9000"),
            ("TIDEGATE__API__TOKEN", "env:API_TOKEN"),
            ("TIDEGATE__API__DENY_STATUS", "403"),
            ("TIDEGATE__ADMIN__LISTEN", "off"),
            ("TIDEGATE__log__Level", "debug"),
            ("TIDEGATE__INBOUND__ACTION__LOGIN__LIMIT", "10 per 60s, 100 per calendar day"),
            ("TIDEGATE__INBOUND__ACTION__OTP_REQUEST__BAN", "5m"),
            ("TIDEGATE__INBOUND__ACTION__OTP_REQUEST__MATCH", "{ path = \"/otp\" }"),
            ("TIDEGATE__INBOUND__GLOBAL__PENALTY__BASE", "5s"),
            ("TIDEGATE__INBOUND__FORWARDED", ""),
            ("PATH", "/bin"),
            ("TIDEGATER", "not ours"),
        ],
    )
    .unwrap();
    let inbound = policy.inbound();
    assert_eq!((inbound.timeouts.connect.as_secs(), inbound.timeouts.body.as_secs()), (2, 90));
    assert!(inbound.forwarding.trusted.contains("192.168.3.4".parse().unwrap()) && inbound.x_ratelimit);
    assert_eq!((inbound.caps.headers, inbound.caps.body), (50, Some(10 << 20)));
    assert_eq!(inbound.upstream.as_ref().unwrap().authority(), "[::1]:4000");
    assert_eq!(policy.store().on_outage, OnOutage::Deny);
    assert_eq!((policy.api().listen.to_string().as_str(), policy.api().deny_status), ("0.0.0.0:9000", 403));
    assert_eq!((policy.admin().listen.is_off(), policy.log().level), (true, LogLevel::Debug));
    let words = policy.plan().describe();
    for expected in [
        "global, by client_ip: at most 1009 in any 1 h (1000, and one after each block); over that, blocks of 5 s, 10 s … 1 h",
        "login.1, by client_ip: at most 14 in any 60 s (10, and one after each block)",
        "login.2, by client_ip: 100 per calendar day in UTC: up to 200 around midnight",
        "otp-request: any method /otp",
        "at most 3 in any 120 s; over that, blocked for 5 min",
        "never limited: 10.1.0.0/16",
    ] {
        assert!(words.contains(expected), "{expected}\n{words}");
    }
}

#[test]
fn short_variable_names_set_common_limits() {
    let all =
        [("GLOBAL_RATE_LIMIT", "50"), ("GLOBAL_RATE_WINDOW", "120"), ("BACKOFF_BASE", "3"), ("BACKOFF_MAX", "100")];
    let found = words(None, &all);
    assert!(
        found.contains("global, by client_ip: at most 53 in any 120 s (50, and one after each block); over that, blocks of 3 s, 9 s … 100 s"),
        "{found}"
    );
    assert!(
        found.contains("login, by client_ip: at most 8 in any 60 s (5, and one after each block); over that, blocks of 3 s, 9 s … 100 s"),
        "{found}"
    );

    // The environment beats the file for every growing penalty; bans stay.
    let found = words(Some(FILE), &all[2..]);
    assert!(
        found.contains(
            "at most 1038 in any 1 h (1000, and one after each block); over that, blocks of 3 s, 9 s … 100 s"
        ),
        "{found}"
    );
    assert!(
        found.contains("at most 8 in any 60 s (5, and one after each block); over that, blocks of 3 s, 9 s … 100 s"),
        "{found}"
    );
    assert!(found.contains("at most 3 in any 120 s; over that, blocked for 15 min"), "{found}");

    // Each variable also works alone.
    assert!(words(Some(FILE), &all[..1]).contains("in any 1 h (50, and one after each block)"));
    assert!(words(Some(FILE), &all[1..2]).contains("in any 120 s (1000, and one after each block)"));

    // A file without a global limit gets one, with a penalty.
    let bare = "[inbound.action.x]\nlimit = \"1 per 1s\"\n";
    assert!(words(Some(bare), &[]).contains("inbound.global: no limit"));
    assert!(
        words(Some(bare), &all[..1])
            .contains("at most 60 in any 1 h (50, and one after each block); over that, blocks of 2 s, 4 s … 1 h")
    );
    assert!(
        words(Some(bare), &all)
            .contains("at most 53 in any 120 s (50, and one after each block); over that, blocks of 3 s, 9 s")
    );

    // The longer names win.
    let both = [("GLOBAL_RATE_LIMIT", "50"), ("TIDEGATE__INBOUND__GLOBAL__LIMIT", "7 per 1s")];
    assert!(words(None, &both).contains("at most 7 in any 1 s"));
    let both = [("BACKOFF_BASE", "3"), ("TIDEGATE__INBOUND__ACTION__LOGIN__PENALTY__BASE", "4s")];
    assert!(
        words(Some(FILE), &both)
            .contains("at most 8 in any 60 s (5, and one after each block); over that, blocks of 4 s, 12 s … 1 h")
    );
}

#[test]
fn errors_name_the_wrong_variable() {
    for (name, value, expected) in [
        (
            "GLOBAL_RATE_LIMIT",
            "many",
            "error: GLOBAL_RATE_LIMIT is `many`, which is no whole number\n--> environment variable GLOBAL_RATE_LIMIT\n |\n | GLOBAL_RATE_LIMIT=many\n |                   ^^^^ expected a number of calls, 0 to 1099511627776\n\n1 error",
        ),
        (
            "GLOBAL_RATE_WINDOW",
            "0",
            "error: GLOBAL_RATE_WINDOW is `0`, which is out of range\n--> environment variable GLOBAL_RATE_WINDOW\n |\n | GLOBAL_RATE_WINDOW=0\n |                    ^ expected a number of seconds, 1 to 315360000\n\n1 error",
        ),
        ("GLOBAL_RATE_LIMIT", "NaN", "which is no whole number"),
        ("GLOBAL_RATE_LIMIT", "9223372036854775807", "which is out of range"),
        ("GLOBAL_RATE_LIMIT", "99999999999999999999999999", "which is no whole number"),
        ("BACKOFF_BASE", "2.5", "BACKOFF_BASE is `2.5`, which is no whole number"),
        ("BACKOFF_MAX", "1h", "BACKOFF_MAX is `1h`, which is no whole number"),
        ("BACKOFF_MAX", "1", "the longest block, 1 s, is shorter than the first, 2 s"),
        (
            "TIDEGATE__INBOUND__TIMEOUTS__CONNECT",
            "2 sceonds",
            " | TIDEGATE__INBOUND__TIMEOUTS__CONNECT=2 sceonds\n |                                        ^^^^^^^ expected a duration",
        ),
        ("TIDEGATE__INBOUND__TIMEOUTS__CONECT", "2s", "did you mean `TIDEGATE__INBOUND__TIMEOUTS__CONNECT`?"),
        ("TIDEGATE__INBUND__LISTEN", "127.0.0.1:1", "did you mean `TIDEGATE__INBOUND__LISTEN`?"),
        (
            "TIDEGATE__INBOUND__ACTION__LOGN__LIMIT",
            "5 per 60s",
            "did you mean `TIDEGATE__INBOUND__ACTION__LOGIN__LIMIT`?",
        ),
        (
            "TIDEGATE__INBOUND__ACTION__LOGIN__LIMT",
            "5 per 60s",
            "did you mean `TIDEGATE__INBOUND__ACTION__LOGIN__LIMIT`?",
        ),
        ("TIDEGATE__INBOUND__ACTION__SEARCH__LIMIT", "5 per 60s", "expected one of login, otp-request"),
        ("TIDEGATE__OUTBOUND__LISTEN", "127.0.0.1:8081", "[outbound] has no provider"),
        ("TIDEGATE__OUTBOUND__PROVIDER__TMDB__LIMIT", "10/s", "names no provider of the policy"),
        ("TIDEGATE__", "x", "unknown environment variable TIDEGATE__"),
        ("TIDEGATE__INBOUND", "x", "unknown environment variable TIDEGATE__INBOUND"),
        ("TIDEGATE__INBOUND__X_RATELIMIT", "yes", "`x_ratelimit` is the string `yes`"),
        ("TIDEGATE__INBOUND__CAPS__HEADERS", "-1", "`headers` is the string `-1`"),
        ("TIDEGATE__INBOUND__ALLOW", "[\"10.0.0.0/8\"", "unclosed"),
        ("TIDEGATE__INBOUND__ALLOW", "10.0.0.0/8, 10.1.2.3/16", "did you mean the network `10.1.0.0/16`"),
        ("TIDEGATE__INBOUND__ACTION__LOGIN__PENALTY", "2s", "penalty"),
        (
            "TIDEGATE__INBOUND__ACTION__LOGIN__LIMIT",
            "10 per 60s, 100 pr day",
            "100 pr day\n |                                                         ^^ expected",
        ),
    ] {
        let told = load(Some(FILE), &[(name, value)]).expect_err(name);
        assert!(told.contains(name) && told.contains(expected), "{name}={value}\n{told}");
    }
    let bare = "[inbound.action.x]\nlimit = \"1 per 1s\"\n";
    let told = load(Some(bare), &[("GLOBAL_RATE_WINDOW", "60")]).unwrap_err();
    assert!(told.contains("GLOBAL_RATE_WINDOW is set, but there is no global limit for it"), "{told}");
}

#[test]
fn errors_hide_secrets_in_variables() {
    for (name, value) in [
        ("TIDEGATE__API__TOKEN", "hunter2"),
        ("TIDEGATE__API__TOKN", "hunter2"),
        ("TIDEGATE__ADMIN__TOKEN", "[\"hunter2\"]"),
        ("TIDEGATE__ADMIN__TOKEN", "\"hunter2\\"),
        ("TIDEGATE__INBOUND__ACTION__NOBODY__LIMIT", "hunter2"),
        ("TIDEGATE__STORE__URL", "reddis://:hunter2@127.0.0.1/0"),
        ("TIDEGATE__INBOUND__UPSTREAM", "http://user:hunter2@127.0.0.1:3000"),
        ("TIDEGATE__OUTBOUND__PROVIDER__X__CREDENTIALS", "hunter2"),
        ("TIDEGATE__ALERT__OPS__WEBHOOK", "ftp://hooks.example.com/hunter2"),
    ] {
        let told = load(Some(FILE), &[(name, value)]).expect_err(name);
        assert!(told.contains(name) && !told.contains("hunter2"), "{told}");
    }
}

/// An alert whose settings all have an effect.
const ALERT: &str = "[alert.login]\non = [\"flood\", \"quota\", \"retries\", \"shadow\"]\nlog = false\n\
                     webhook = \"env:HOOK\"\ntelegram = { token = \"env:BOT\", chat = \"1\" }\n";

/// Every name in the settings must be read.
#[test]
fn every_setting_is_read() {
    let file = format!("{FILE}{PROVIDER}{ALERT}");
    for setting in settings::all() {
        let Some(variable) = setting.variable() else {
            continue;
        };
        let variable = variable.replace("__NAME", "__LOGIN");
        // Some settings accept almost any text, but none accepts this one.
        let told = load(Some(&file), &[(&variable, "\u{1} [ /x")]).expect_err(&variable);
        assert!(told.contains(&format!("environment variable {variable}\n")), "{variable}\n{told}");
        assert!(!told.contains("unknown environment variable") && !told.contains("names no "), "{told}");
    }
}

/// The defaults in the settings must be the real defaults.
#[test]
fn every_documented_default_is_the_default() {
    let file = "[inbound.action.login]\nlimit = \"5 per 60s\"\npenalty = {}\n\
                [inbound.global]\nlimit = \"1000 per 1h\"\npenalty = {}\n\
                [inbound]\nupstream = \"http://127.0.0.1:3000\"\n";
    let file = &format!("{file}[rls]\n[resp]\n{PROVIDER}{ALERT}");
    // A limit with a penalty can't be leased.
    let leased = &file.replace("penalty = {}", "lease = {}");
    // A limit of one client has no places to give.
    let reserving = &file.replacen("penalty = {}", "key = \"action\"\nreserve = {}", 1);
    let usual = |file: &str| format!("{:?}", load(Some(file), &[]).unwrap());
    let (usual_file, usual_leased, usual_reserving) = (usual(file), usual(leased), usual(reserving));
    for setting in settings::all() {
        let Some(variable) = setting.variable().filter(|_| !setting.default().is_empty()) else {
            continue;
        };
        // A word in place of a table is the same as the table, but it would need another file here.
        if ["auth", "cache"].iter().any(|key| setting.path() == format!("outbound.provider.*.{key}")) {
            continue;
        }
        let variable = variable.replace("__NAME", "__LOGIN");
        let (file, usual) = match setting.path() {
            path if path.contains(".lease.") => (leased, &usual_leased),
            path if path.contains(".reserve.") => (reserving, &usual_reserving),
            _ => (file, &usual_file),
        };
        let found = format!("{:?}", load(Some(file), &[(&variable, setting.default())]).unwrap());
        assert_eq!(&found, usual, "{variable}={}", setting.default());
    }
    let plain =
        [("GLOBAL_RATE_LIMIT", "1000"), ("GLOBAL_RATE_WINDOW", "3600"), ("BACKOFF_BASE", "2"), ("BACKOFF_MAX", "3600")];
    assert_eq!(words(None, &plain), words(None, &[]));
    let example = settings::env_example();
    for (name, default) in plain {
        assert!(example.contains(&format!("#{name}={default}\n")), "{name}");
    }
}

#[test]
fn a_variable_can_change_an_actions_paths() {
    let policy = load(Some(FILE), &[("TIDEGATE__INBOUND__ACTION__LOGIN__MATCH__PATH", "/signin,/sign-in")]).unwrap();
    let matches = |path| {
        policy
            .plan()
            .matching_actions(&Query { method: Some("POST"), path: Some(path), ..Query::default() })
            .unwrap()
            .first()
            .is_some()
    };
    assert!(matches("/signin") && matches("/sign-in") && !matches("/login"));
}

#[test]
fn unknown_variables_with_our_prefix_are_errors() {
    for (name, meant) in [
        ("TIDEGATE_INBOUND__LISTEN", Some("TIDEGATE__INBOUND__LISTEN")),
        ("TIDEGATE_INBOUND_LISTEN", Some("TIDEGATE__INBOUND__LISTEN")),
        ("TIDEGATE___INBOUND__LISTEN", Some("TIDEGATE__INBOUND__LISTEN")),
        ("tidegate__inbound__listen", Some("TIDEGATE__INBOUND__LISTEN")),
        ("Tidegate_Inbound_Timeouts_Header", Some("TIDEGATE__INBOUND__TIMEOUTS__HEADER")),
        ("tidegate_inbound_lisen", Some("TIDEGATE__INBOUND__LISTEN")),
        ("TIDEGATE_INBOUND_ACTION_OTP_REQUEST_LIMIT", Some("TIDEGATE__INBOUND__ACTION__OTP_REQUEST__LIMIT")),
        ("TIDEGATE_GLOBAL_RATE_LIMIT", Some("GLOBAL_RATE_LIMIT")),
        ("TIDEGATE_é", None),
        ("TIDEGATE_", None),
        ("tidegate_seed", None),
    ] {
        let told = load(Some(FILE), &[(name, "hunter2")]).map(|_| ()).unwrap_err();
        assert!(told.contains(&format!("unknown environment variable {name}")), "{told}");
        assert!(!told.contains("hunter2"), "{told}");
        if let Some(meant) = meant {
            assert!(told.contains(&format!("did you mean `{meant}`?")), "{told}");
        }
    }
}

#[test]
fn test_suite_and_token_variables_are_accepted() {
    for name in
        ["TIDEGATE_REQUIRE_ALL", "TIDEGATE_FULL", "TIDEGATE_SEED", "TIDEGATE_FUZZ_SECONDS", "TIDEGATE_", "tidegates"]
    {
        let value = if name == "TIDEGATE_" { "" } else { "1" };
        assert!(load(Some(FILE), &[(name, value)]).is_ok(), "{name}");
    }
    let with_webhook = format!("{FILE}\n[alert.ops]\non = \"blocked\"\nwebhook = \"env:TIDEGATE_HOOK\"\n");
    assert!(load(Some(&with_webhook), &[("TIDEGATE_HOOK", "https://hooks.example.com")]).is_ok());
    let with_token = format!("{FILE}\n[api]\ntoken = \"env:TIDEGATE_TOKEN\"\n");
    assert!(load(Some(&with_token), &[("TIDEGATE_TOKEN", "hunter2")]).is_ok());
    let variables = [("TIDEGATE__ADMIN__TOKEN", "env:TIDEGATE_TOKEN"), ("TIDEGATE_TOKEN", "hunter2")];
    assert!(load(Some(FILE), &variables).is_ok());
    assert!(load(Some(FILE), &variables[1..]).is_err());
}

#[test]
fn client_caps_default_from_the_connection_cap() {
    let caps = |env: &[(&str, &str)]| {
        let env = env.iter().map(|(name, value)| (format!("TIDEGATE__INBOUND__CAPS__{name}"), (*value).to_owned()));
        Policy::load(PolicySources::new().env(env)).unwrap_or_else(|errors| panic!("{errors}")).inbound().caps
    };
    let of = |caps: tidegate_policy::InboundCaps| (caps.connections_per_client, caps.body_rate);
    assert_eq!(of(caps(&[])), (Some(2500), Some(100)));
    assert_eq!(caps(&[("CONNECTIONS", "100")]).connections_per_client, Some(25));
    assert_eq!(caps(&[("CONNECTIONS", "2")]).connections_per_client, Some(1));
    assert_eq!(of(caps(&[("CONNECTIONS_PER_CLIENT", "7"), ("BODY_RATE", "1KiB")])), (Some(7), Some(1024)));
    assert_eq!(of(caps(&[("CONNECTIONS_PER_CLIENT", "off"), ("BODY_RATE", "off")])), (None, None));
}

#[test]
fn a_variable_never_replaces_a_detailed_list() {
    let set = |limits: &str| {
        let file = format!("[inbound]\nupstream = \"http://127.0.0.1:3000\"\n[inbound.action.login]\n{limits}\n");
        load(Some(&file), &[("TIDEGATE__INBOUND__ACTION__LOGIN__LIMIT", "10 per 60s")])
            .map(|policy| policy.plan().describe())
    };
    assert!(set(r#"limit = ["5 per 60s", "50 per 1h"]"#).unwrap().contains("10 in any 60 s"));
    let told = set(r#"limits = [{ limit = "5 per 60s", key = "header:x-user" }]"#).unwrap_err();
    assert!(told.contains("the whole list `limits`") && told.contains("LOGIN__LIMITS sets"), "{told}");
}
