//! The verdicts on replies as providers send them: `providers/rows.toml` holds the replies, `providers/rules.toml` the rules
//! of providers that need some. A new row is a table of data.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use tidegate_core::retry::is_repeatable;
use tidegate_core::{Key, Remaining, RemainingAmount, Scope, Time};
use tidegate_policy::outbound::OutboundConfig;
use tidegate_policy::verdict::{Classified, RequestFacts, VerdictRules};
use tidegate_policy::{Policy, PolicySources};
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

    /// What the row expects to be left: of calls and of cost, the entry with the least left that has a reset.
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
