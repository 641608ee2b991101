//! The verdicts on replies as providers send them: `providers/rows.toml` holds the replies, `providers/rules.toml` the rules
//! of providers that need some. A new row is a table of data.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use tidegate_core::retry::is_repeatable;
use tidegate_core::{Class, Key, Remaining, RemainingAmount, Scope, Span, Time};
use tidegate_policy::outbound::OutboundConfig;
use tidegate_policy::verdict::{Classified, RequestFacts, VerdictRules};
use tidegate_policy::{Policy, PolicySources};
use tidegate_testkit::property;
use tidegate_testkit::random::case_count;
use toml::{Table, Value};

const ROWS: &str = include_str!("providers/rows.toml");
const RULES: &str = include_str!("providers/rules.toml");

/// The number of kinds of providers that must be understood without a rule of their own.
const LEAST_BY_DEFAULT: usize = 60;

/// 2026-01-01 00:00:00 UTC.
const NOW: Time = Time::from_secs(1_767_225_600);
const PROVIDER: Key = Key::new(1, 2);
/// The tolerance of waits, which some providers tell in whole seconds and some with a second more.
const TOLERANCE: f64 = 1.0;

struct Row {
    table: Table,
}

impl Row {
    fn text(&self, key: &str) -> &str {
        self.table.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    fn list(&self, key: &str) -> Vec<&Value> {
        self.table.get(key).and_then(Value::as_array).into_iter().flatten().collect()
    }

    fn headers(&self, key: &str) -> HeaderMap {
        let pairs = self.list(key).into_iter().map(|pair| {
            let pair = pair.as_array().unwrap();
            let name = HeaderName::from_bytes(pair[0].as_str().unwrap().as_bytes()).unwrap();
            (name, HeaderValue::from_str(pair[1].as_str().unwrap()).unwrap())
        });
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, value);
        }
        headers
    }

    fn methods(&self) -> Vec<Method> {
        let named: Vec<Method> =
            self.list("methods").iter().map(|name| name.as_str().unwrap().parse().unwrap()).collect();
        if named.is_empty() { vec![Method::GET, Method::POST] } else { named }
    }

    fn classify(&self, rules: &VerdictRules, host: &str, method: &Method) -> Classified {
        let path = if self.text("path").is_empty() { "/" } else { self.text("path") };
        let uri: Uri = path.parse().unwrap();
        let request_headers = self.headers("request_headers");
        let host = if self.text("host").is_empty() { host } else { self.text("host") };
        let request_body = Some(self.text("request_body").as_bytes()).filter(|body| !body.is_empty());
        let request = RequestFacts::new(method, host, uri.path(), &request_headers).with_body(request_body);
        let status = StatusCode::from_u16(self.table["status"].as_integer().unwrap().try_into().unwrap()).unwrap();
        let headers = self.headers("headers");
        let body = self.text("body").as_bytes();
        let limit = rules.body_limit(&request, status, &headers).unwrap_or(0);
        let body = Some(body).filter(|body| !body.is_empty() && body.len() <= limit);
        rules.classify(&request, status, &headers, body, PROVIDER, NOW)
    }

    /// The differences between the row and a verdict.
    fn differences(&self, rules: &VerdictRules, host: &str, only_class_and_wait: bool) -> Vec<String> {
        let mut differences = Vec::new();
        for method in self.methods() {
            let found = self.classify(rules, host, &method);
            let verdict = &found.verdict;
            let mut differ = |what: &str, expected: String, found: String| {
                if expected != found {
                    differences.push(format!("{method} {what}: expected {expected}, found {found}"));
                }
            };
            differ("class", self.text("class").to_owned(), verdict.class.name().to_owned());
            let expected =
                self.table.get("wait").and_then(|wait| wait.as_float().or(wait.as_integer().map(|wait| wait as f64)));
            let wait = verdict.announced_wait().map(|wait| wait.as_secs_f64());
            let is_close = match (expected, wait) {
                (Some(expected), Some(wait)) => (-0.01..=TOLERANCE).contains(&(wait - expected)),
                (expected, wait) => expected == wait,
            };
            if !is_close {
                differ("wait", format!("{expected:?}"), format!("{wait:?}"));
            }
            if only_class_and_wait {
                continue;
            }
            let may_repeat = !verdict.asks_not_to_retry
                && verdict.class.is_retryable()
                && (verdict.was_refused || is_repeatable(method.as_str(), false, true));
            let expected = match self.table.get("repeat") {
                Some(Value::Boolean(repeat)) => *repeat,
                _ => method == Method::GET,
            };
            differ("repeat", expected.to_string(), may_repeat.to_string());
            if let Some(expected) = self.table.get("scope").and_then(Value::as_str) {
                let scope = match verdict.scope {
                    Scope::Call => found.scope_name.clone().unwrap_or_else(|| "call".to_owned()),
                    Scope::Credential => "credential".to_owned(),
                    Scope::Provider => "provider".to_owned(),
                    Scope::Named(_) => found.scope_name.clone().unwrap_or_default(),
                };
                differ("scope", expected.to_owned(), scope);
            }
            if self.table.contains_key("remaining") {
                differ("remaining", self.remaining(), describe(&verdict.remaining));
            }
        }
        differences
    }

    /// The amounts that the row expects to be left: of calls and of cost, the entry with the least left that has a reset.
    fn remaining(&self) -> String {
        let mut texts = Vec::new();
        for kind in ["calls", "cost"] {
            let entries = self.list("remaining").into_iter().map(|entry| entry.as_array().unwrap());
            let number = |value: &Value| value.as_float().or(value.as_integer().map(|number| number as f64)).unwrap();
            let own = entries.filter(|entry| entry[0].as_str() == Some(kind) && number(&entry[3]) > 0.0);
            let least = own.min_by(|left, right| {
                number(&left[1]).total_cmp(&number(&right[1])).then(number(&right[3]).total_cmp(&number(&left[3])))
            });
            texts.extend(least.map(|entry| format!("{kind} {} until {}", number(&entry[1]), number(&entry[3]).ceil())));
        }
        texts.join(", ")
    }
}

fn describe(remaining: &Remaining) -> String {
    let text = |kind: &str, amount: RemainingAmount| {
        format!("{kind} {} until {}", amount.amount, amount.resets_at.since(NOW).as_secs_ceil())
    };
    let calls = remaining.calls.map(|amount| text("calls", amount));
    calls.into_iter().chain(remaining.cost.map(|amount| text("cost", amount))).collect::<Vec<_>>().join(", ")
}

fn rows() -> Vec<Row> {
    let document: Table = ROWS.parse().unwrap();
    document["row"].as_array().unwrap().iter().map(|row| Row { table: row.as_table().unwrap().clone() }).collect()
}

fn providers() -> OutboundConfig {
    let policy =
        Policy::load(PolicySources::new().file("rules.toml", RULES)).unwrap_or_else(|errors| panic!("{errors}"));
    policy.outbound().unwrap().clone()
}

#[test]
fn replies_are_understood_as_their_providers_mean_them() {
    let (rows, providers, built_in) = (rows(), providers(), VerdictRules::default());
    let mut report = String::new();
    let mut wrong = 0;
    for row in &rows {
        let provider = providers.find(row.text("provider")).ok();
        let rules = provider.map_or(&built_in, |provider| &provider.verdicts);
        let host = provider.and_then(|provider| provider.base_url.as_ref()).map_or("", |url| url.authority().host());
        let differences = row.differences(rules, host, false);
        if !differences.is_empty() {
            wrong += 1;
            let _ = writeln!(report, "{} ({}): {}", row.text("bullet"), row.text("says"), differences.join("; "));
        }
    }
    assert!(report.is_empty(), "{wrong} of {} rows differ\n{report}", rows.len());
}

#[test]
fn presets_understand_the_replies_of_their_providers() {
    const TOKEN: &str = "credentials = \"env:TOKEN\"\n";
    let rows = rows();
    let mut report = String::new();
    for (preset, more) in [
        ("openai", TOKEN),
        ("anthropic", TOKEN),
        ("github", TOKEN),
        ("musicbrainz", "user_agent = \"Tests/1 ( tests@example.com )\"\n"),
    ] {
        let text = format!("[outbound.provider.{preset}]\npreset = \"{preset}\"\n{more}");
        let policy = Policy::load(PolicySources::new().file("preset.toml", text)).unwrap();
        let provider = policy.outbound().unwrap().find(preset).unwrap();
        let host = provider.base_url.as_ref().unwrap().authority().host();
        let own: Vec<&Row> = rows.iter().filter(|row| row.text("provider") == preset).collect();
        assert!(!own.is_empty(), "{preset}");
        for row in own {
            let mut differences = row.differences(&provider.verdicts, host, true);
            // No reply closes anything for more than a day, by default.
            differences.retain(|difference| !difference.ends_with("found Some(86400.0)"));
            if !differences.is_empty() {
                let _ = writeln!(report, "{preset} ({}): {}", row.text("says"), differences.join("; "));
            }
        }
    }
    assert!(report.is_empty(), "{report}");
}

#[test]
fn many_providers_are_understood_without_a_rule() {
    let (rows, built_in) = (rows(), VerdictRules::default());
    let mut by_kind: BTreeMap<&str, bool> = BTreeMap::new();
    for row in &rows {
        let is_right = row.differences(&built_in, "", true).is_empty();
        *by_kind.entry(row.text("bullet")).or_insert(true) &= is_right;
    }
    let wrong: BTreeSet<&str> = by_kind.iter().filter(|(_, right)| !**right).map(|(kind, _)| *kind).collect();
    let right = by_kind.len() - wrong.len();
    assert_eq!(by_kind.len(), 147);
    assert!(right >= LEAST_BY_DEFAULT, "{right} of {} are right without a rule; not {wrong:?}", by_kind.len());
}

/// Values that break naive readers of times and numbers.
const HOSTILE: [&str; 35] = [
    "0",
    "-1",
    "",
    " ",
    "1e999",
    "NaN",
    "inf",
    "+",
    "+4",
    "4,4",
    "4, soon",
    "\"4\"",
    "4s",
    "99999999",
    "999999999",
    "1000000000",
    "1767225600",
    "1767225599",
    "99999999999",
    "1767225660000",
    "1767225660000000",
    "1767225660000000000",
    "99999999999999999999999999999999999999999999999999",
    "0.0000000001",
    "1.9999999999999999999",
    "9999-12-31T23:59:59Z",
    "Fri, 31 Dec 9999 23:59:59 GMT",
    "Thu, 01 Jan 1970 00:00:00 GMT",
    "2026-01-01T00:00:00Z",
    "00:99:99.9",
    "9999999999999999999999999999999999999999:1:1",
    "999999h",
    "100;w=60",
    "\"a\";r=0;t=99999999999",
    "r0;at=99999999999999",
];
const STATUSES: [u16; 14] = [200, 200, 204, 400, 401, 403, 404, 409, 418, 429, 429, 500, 503, 529];
const BODIES: [&str; 14] = [
    "",
    "{",
    "null",
    "[]",
    "{\"error\":{\"code\":\"insufficient_quota\"}}",
    "{\"retry_after\":1e308}",
    "{\"retry_after\":-5}",
    "{\"retry_after\":99999999999}",
    "{\"parameters\":{\"retry_after\":\"soon\"}}",
    "{\"error\":{\"details\":[{\"retryDelay\":\"999999999999s\"}]}}",
    "<Error><Code>SlowDown</Code></Error>",
    "<!DOCTYPE a [<!ENTITY b \"cccc\">]><a>&b;</a>",
    "error code: 1015",
    "{\"errors\":[{\"extensions\":{\"code\":\"THROTTLED\",\"retry_in_seconds\":1e30}}]}",
];
const KINDS: [&str; 5] = ["application/json", "text/html", "application/xml", "text/plain; charset=utf-8", "image/png"];
/// The longest period of a rule, and the longest pause that a rule here may set.
const LONGEST: Span = Span::from_secs(31 * 86_400);

/// Whatever a reply says, it closes nothing for longer than the longest pause, and what a valid header asks for is waited
/// for.
#[test]
fn hostile_replies_close_nothing_for_longer_than_the_longest_pause() {
    let (providers, built_in) = (providers(), VerdictRules::default());
    let all: Vec<(&VerdictRules, Span)> = providers
        .providers()
        .iter()
        .map(|provider| (&provider.verdicts, LONGEST))
        .chain([(&built_in, Span::from_secs(86_400))])
        .collect();
    let mut names: Vec<HeaderName> = Vec::new();
    for row in rows() {
        names.extend(row.headers("headers").keys().cloned());
    }
    names.push(http::header::DATE);
    names.sort_by(|left, right| left.as_str().cmp(right.as_str()));
    names.dedup();
    property::check(case_count(20_000, 1_000_000), 32, |mut random| {
        let (rules, longest) = random.pick(&all);
        let status = StatusCode::from_u16(random.pick(&STATUSES)).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static(random.pick(&KINDS)));
        for _ in 0..random.below(6) {
            let name = &names[random.below(names.len() as u64) as usize];
            headers.append(name, HeaderValue::from_static(random.pick(&HOSTILE)));
        }
        let valid = random.chance(30).then(|| 1 + random.below(500));
        if let Some(valid) = valid {
            headers.insert(http::header::RETRY_AFTER, HeaderValue::from(valid));
        }
        let method = if random.chance(50) { Method::GET } else { Method::POST };
        let none = HeaderMap::new();
        let request = RequestFacts::new(&method, "api.test", random.pick(&["/", "/graphql", "/search/code"]), &none);
        let body =
            Some(random.pick(&BODIES).as_bytes()).filter(|_| rules.body_limit(&request, status, &headers).is_some());
        let found = rules.classify(&request, status, &headers, body, PROVIDER, NOW);
        let verdict = &found.verdict;
        let wait = verdict.announced_wait().unwrap_or_default();
        let resets =
            [verdict.remaining.calls, verdict.remaining.cost].into_iter().flatten().map(|amount| amount.resets_at);
        let latest = resets.chain(verdict.spent_until).max().unwrap_or(NOW);
        if wait > longest || latest > NOW + longest {
            return Err(format!("{wait} until {latest:?}: {status} {headers:?} {body:?}"));
        }
        let is_plain = std::ptr::eq(rules, &raw const built_in) && found.rule.is_none();
        let has_finer = headers.keys().any(|name| name.as_str().contains("-ms") || name == "x-amz-retry-after");
        if let Some(valid) = valid.filter(|_| is_plain && !has_finer && verdict.class.is_retryable())
            && wait < Span::from_secs(valid)
        {
            return Err(format!("{wait} instead of {valid} s: {status} {headers:?}"));
        }
        Ok(())
    });
}

#[test]
fn the_longest_pause_cuts_resets_too_and_a_rule_may_raise_it() {
    const DAYS: u64 = 86_400;
    let settings = "[outbound.provider.api]\nbase_url = \"https://api.test\"\nlimit = \"unlimited\"\n\
        rule = [{ when = { status = 403 }, is = \"quota\", max_pause = \"7d\" }]\n";
    let policy = Policy::load(PolicySources::new().file("rules.toml", settings)).unwrap();
    let rules = &policy.outbound().unwrap().find("api").unwrap().verdicts;
    let mut headers = HeaderMap::new();
    headers.insert("x-ratelimit-remaining", HeaderValue::from_static("0"));
    headers.insert("x-ratelimit-reset", HeaderValue::from(NOW.as_secs_ceil() + 3 * DAYS - 1));
    let none = HeaderMap::new();
    let request = RequestFacts::new(&Method::GET, "api.test", "/", &none);
    for (status, days, cut) in [(403, 3, None), (429, 1, Some(Span::from_secs(3 * DAYS)))] {
        let found = rules.classify(&request, StatusCode::from_u16(status).unwrap(), &headers, None, PROVIDER, NOW);
        let Remaining { calls, .. } = found.verdict.remaining;
        let until = calls.map(|calls| calls.resets_at);
        assert_eq!((found.verdict.wait, found.cut_wait), (Some(Span::from_secs(days * DAYS)), cut), "{status}");
        assert_eq!(until, Some(NOW + Span::from_secs(days * DAYS)), "{status}");
        assert_eq!(found.wait_header, Some(HeaderName::from_static("x-ratelimit-reset")), "{status}");
    }
}

#[test]
fn the_limits_of_nginx_are_no_block_of_an_edge() {
    let nginx = "<html>\r\n<head><title>429 Too Many Requests</title></head>\r\n<body>\r\n\
        <center><h1>429 Too Many Requests</h1></center>\r\n<hr><center>nginx/1.22.1</center>\r\n</body>\r\n</html>\r\n";
    let (rules, none) = (VerdictRules::default(), HeaderMap::new());
    let request = RequestFacts::new(&Method::GET, "api.test", "/", &none);
    let headers = HeaderMap::from_iter([(http::header::CONTENT_TYPE, HeaderValue::from_static("text/html"))]);
    let status = StatusCode::TOO_MANY_REQUESTS;
    assert!(rules.body_limit(&request, status, &headers).is_some_and(|limit| nginx.len() <= limit));
    for (page, scope, wait) in [(nginx, Scope::Call, None), ("<html>", Scope::Provider, Some(Span::from_secs(60)))] {
        let verdict = rules.classify(&request, status, &headers, Some(page.as_bytes()), PROVIDER, NOW).verdict;
        assert_eq!((verdict.class, verdict.scope, verdict.wait), (Class::Throttled, scope, wait), "{page}");
    }
}
