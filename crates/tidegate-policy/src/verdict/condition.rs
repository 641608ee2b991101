//! The conditions of a rule.

use std::borrow::Cow;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, Method};
use regex::Regex;
use serde_json::Value;

use super::body::{Document, JsonPath, XmlPath, scalar_text};
use super::route::PathTemplate;
use super::{Reply, RequestFacts};
use crate::matcher::glob_matches;

/// A set of status codes from 100 to 599.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StatusSet([u64; 8]);

impl StatusSet {
    pub(crate) fn insert_range(&mut self, range: std::ops::RangeInclusive<u16>) {
        for bit in range.filter_map(|status| status.checked_sub(100)).filter(|bit| *bit < 512) {
            self.0[usize::from(bit / 64)] |= 1 << (bit % 64);
        }
    }

    /// All statuses that are no success.
    pub(crate) fn failures() -> Self {
        let mut set = Self::default();
        set.insert_range(400..=599);
        set
    }

    #[inline]
    pub(crate) fn contains(&self, status: u16) -> bool {
        let bit = usize::from(status.wrapping_sub(100));
        self.0.get(bit / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }

    pub(crate) fn union(self, other: Self) -> Self {
        Self(std::array::from_fn(|place| self.0[place] | other.0[place]))
    }
}

/// A regular expression with its text.
#[derive(Clone, Debug)]
pub(crate) struct Pattern(pub(crate) Regex);

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

/// A check of a value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Check {
    /// It is one of these.
    Equals(Vec<String>),
    /// It contains one of these, in any case. They are in lower case.
    Contains(Vec<String>),
    Matches(Pattern),
    Present(bool),
    Empty(bool),
    Below(f64),
    Above(f64),
}

/// The checks that a value must all pass.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Test(pub(crate) Vec<Check>);

/// A value to be tested.
enum Tested<'v> {
    /// A text, perhaps in any case.
    Text(&'v str, bool),
    Json(&'v Value),
}

impl Tested<'_> {
    fn passes(&self, check: &Check) -> bool {
        let (text, ignores_case) = match self {
            Self::Text(text, ignores_case) => (Some(Cow::Borrowed(*text)), *ignores_case),
            Self::Json(value) => (scalar_text(value), false),
        };
        let with_text = |check: &dyn Fn(&str) -> bool| text.as_deref().is_some_and(check);
        match check {
            Check::Equals(values) => with_text(&|text| values.iter().any(|value| equals(text, value, ignores_case))),
            Check::Contains(parts) => with_text(&|text| {
                let text = text.to_lowercase();
                parts.iter().any(|part| text.contains(part))
            }),
            Check::Matches(pattern) => with_text(&|text| pattern.0.is_match(text)),
            Check::Present(expected) => *expected,
            Check::Empty(expected) => self.is_empty() == *expected,
            Check::Below(bound) => with_text(&|text| number(text).is_some_and(|number| number < *bound)),
            Check::Above(bound) => with_text(&|text| number(text).is_some_and(|number| number > *bound)),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Text(text, _) => text.trim().is_empty(),
            Self::Json(Value::Null) => true,
            Self::Json(Value::String(text)) => text.is_empty(),
            Self::Json(Value::Array(items)) => items.is_empty(),
            Self::Json(Value::Object(members)) => members.is_empty(),
            Self::Json(Value::Bool(_) | Value::Number(_)) => false,
        }
    }
}

/// True if a text says the same as a value: `429`, `429.0` and `"429"` do.
fn equals(text: &str, value: &str, ignores_case: bool) -> bool {
    text == value
        || ignores_case && text.eq_ignore_ascii_case(value)
        || number(text).is_some_and(|found| number(value) == Some(found))
}

/// The number in a text; `None` for none, and for what only Rust takes for one.
pub(crate) fn number(text: &str) -> Option<f64> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    text.parse().ok().filter(|number: &f64| is_number && number.is_finite())
}

impl Test {
    fn holds<'v>(&self, mut found: impl Iterator<Item = Tested<'v>>) -> bool {
        if self.0.contains(&Check::Present(false)) {
            return found.next().is_none();
        }
        found.any(|value| self.0.iter().all(|check| value.passes(check)))
    }

    fn holds_for_headers(&self, headers: &HeaderMap, name: &HeaderName) -> bool {
        let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        self.holds(values.map(|value| Tested::Text(value.trim(), true)))
    }

    fn holds_for_json(&self, document: Option<&Value>, path: &JsonPath) -> bool {
        let found = document.map(|root| path.find(root)).unwrap_or_default();
        self.holds(found.into_iter().map(Tested::Json))
    }
}

/// The conditions on a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RequestCondition {
    /// Any if empty.
    pub(crate) methods: Vec<Method>,
    /// Hosts, perhaps with `*.` for any subdomain. Any if empty.
    pub(crate) hosts: Vec<String>,
    /// Any if empty.
    pub(crate) paths: Vec<PathTemplate>,
    pub(crate) headers: Vec<(HeaderName, Test)>,
    pub(crate) json: Vec<(JsonPath, Test)>,
}

impl RequestCondition {
    /// True if all hold.
    pub(crate) fn holds(&self, request: &RequestFacts<'_>) -> bool {
        let json = || request.body.as_ref().and_then(Document::json);
        (self.methods.is_empty() || self.methods.contains(request.method))
            && (self.hosts.is_empty()
                || self.hosts.iter().any(|host| glob_matches(host.as_bytes(), request.host.as_bytes())))
            && (self.paths.is_empty() || self.paths.iter().any(|path| path.captures(request.path).is_some()))
            && self.headers.iter().all(|(name, test)| test.holds_for_headers(request.headers, name))
            && self.json.iter().all(|(path, test)| test.holds_for_json(json(), path))
    }
}

/// The conditions of a rule: all must hold.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Condition {
    pub(crate) statuses: StatusSet,
    pub(crate) headers: Vec<(HeaderName, Test)>,
    pub(crate) json: Vec<(JsonPath, Test)>,
    pub(crate) xml: Vec<(XmlPath, Test)>,
    pub(crate) text: Option<Test>,
    pub(crate) request: RequestCondition,
}

impl Condition {
    /// True if the conditions on everything but the body hold.
    pub(crate) fn holds_for_head(&self, request: &RequestFacts<'_>, status: u16, headers: &HeaderMap) -> bool {
        self.statuses.contains(status)
            && self.headers.iter().all(|(name, test)| test.holds_for_headers(headers, name))
            && self.request.holds(request)
    }

    /// The segments of the request's path that it captures.
    pub(crate) fn captures<'c, 'p>(&'c self, request: &RequestFacts<'p>) -> Vec<(&'c str, &'p str)> {
        self.request.paths.iter().find_map(|path| path.captures(request.path)).unwrap_or_default()
    }

    /// True if there is a condition on the body.
    pub(crate) fn needs_body(&self) -> bool {
        !self.json.is_empty() || !self.xml.is_empty() || self.text.is_some()
    }

    /// True if the type of a reply's body is the one that the conditions are for.
    pub(crate) fn expects_type(&self, headers: &HeaderMap) -> bool {
        let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let kind = kind.to_ascii_lowercase();
        (self.json.is_empty() || kind.contains("json"))
            && (self.xml.is_empty() || kind.contains("xml"))
            && (self.text.is_none() || kind.starts_with("text/"))
    }

    /// True if the conditions on the body hold. Without a body, none does.
    pub(crate) fn holds_for_body(&self, reply: &Reply<'_>) -> bool {
        if !self.needs_body() {
            return true;
        }
        let Some(body) = &reply.body else { return false };
        self.json.iter().all(|(path, test)| test.holds_for_json(body.json(), path))
            && self.text.as_ref().is_none_or(|test| test.holds([Tested::Text(body.text(), false)].into_iter()))
            && self.xml.iter().all(|(path, test)| {
                let found = body.xml(path);
                test.holds(found.iter().map(|text| Tested::Text(text, false)))
            })
    }
}
