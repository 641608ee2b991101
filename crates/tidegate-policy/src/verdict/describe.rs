//! The description of rules in words, for `tidegate check` and `tidegate classify`.

use std::fmt::Write as _;

use tidegate_core::Class;

use super::{
    AllowanceRule, CallScopeRule, Check, Condition, HeaderPart, NumberSource, PathTemplate, PeriodEnd,
    RequestCondition, Rule, RuleScope, Source, StatusSet, Test, TimeUnit, VerdictRules, WaitRule, WaitSource,
};
use crate::units::describe_duration;

impl VerdictRules {
    /// Describes the provider's own rules, scopes and allowances, a line each.
    pub fn describe(&self) -> Vec<String> {
        let rules = self.rules.iter().map(|rule| format!("{}: {}", rule.name, rule.describe()));
        let scopes = self.scopes.iter().map(CallScopeRule::describe);
        let allowances = self.allowances.iter().map(AllowanceRule::describe);
        let longest = (self.max_pause != super::DEFAULT_MAX_PAUSE)
            .then(|| format!("no reply closes anything for longer than {}", describe_duration(self.max_pause)));
        rules.chain(scopes).chain(allowances).chain(longest).collect()
    }

    /// Describes the rule of this name.
    pub fn describe_rule(&self, name: super::RuleName) -> Option<String> {
        self.rules.iter().chain(super::BUILT_IN.iter()).find(|rule| rule.name == name).map(Rule::describe)
    }
}

impl Rule {
    fn describe(&self) -> String {
        let mut text = join(self.when.iter().map(Condition::describe), ", or ");
        if let Some(class) = self.class {
            let _ = write!(text, " is {}", class_words(class));
        }
        match self.may_repeat {
            Some(true) => {
                text.push_str(if self.class.is_some() { ", not carried out" } else { " was not carried out" })
            }
            Some(false) => text.push_str(if self.class.is_some() { ", not sent again" } else { " isn't sent again" }),
            None => {}
        }
        if !self.wait.sources.is_empty() {
            let _ = write!(text, "; it waits {}", self.wait.describe());
        }
        match &self.scope {
            RuleScope::Call => {}
            RuleScope::Credential => text.push_str("; for the whole credential"),
            RuleScope::Provider => text.push_str("; for all credentials"),
            RuleScope::Named(parts) => {
                let _ = write!(text, "; for the scope {}", join(parts.iter().map(describe_source), "/"));
            }
        }
        if let Some(longest) = self.max_pause {
            let _ = write!(text, "; for at most {}", describe_duration(longest));
        }
        text
    }
}

fn class_words(class: Class) -> &'static str {
    match class {
        Class::Success => "a success",
        Class::Quota => "a spent quota",
        Class::Auth => "a rejected credential",
        class => class.name(),
    }
}

impl Condition {
    fn describe(&self) -> String {
        let mut parts: Vec<String> = Vec::new();
        parts.extend(self.headers.iter().map(|(name, test)| format!("{name} {}", test.describe())));
        parts.extend(self.json.iter().map(|(path, test)| format!("{} {}", place(&path.text), test.describe())));
        parts.extend(self.xml.iter().map(|(path, test)| format!("<{}> {}", path.text, test.describe())));
        parts.extend(self.text.iter().map(|test| format!("its text {}", test.describe())));
        parts.extend(self.request.describe());
        let with = if parts.is_empty() { String::new() } else { format!(" with {}", parts.join(" and ")) };
        format!("{}{with}", self.statuses.describe())
    }
}

fn place(pointer: &str) -> &str {
    if pointer.is_empty() { "its JSON" } else { pointer }
}

impl RequestCondition {
    fn describe(&self) -> Vec<String> {
        let mut parts = Vec::new();
        if !self.methods.is_empty() {
            parts.push(format!("the method {}", join(self.methods.iter().map(ToString::to_string), " or ")));
        }
        if !self.hosts.is_empty() {
            parts.push(format!("the host {}", self.hosts.join(" or ")));
        }
        if !self.paths.is_empty() {
            parts.push(format!("the path {}", join(self.paths.iter().map(PathTemplate::to_string), " or ")));
        }
        parts.extend(self.headers.iter().map(|(name, test)| format!("the request's {name} {}", test.describe())));
        parts.extend(
            self.json.iter().map(|(path, test)| format!("the request's {} {}", place(&path.text), test.describe())),
        );
        parts
    }
}

impl StatusSet {
    fn describe(self) -> String {
        if self == Self::failures() {
            return "a failure".to_owned();
        }
        let mut parts = Vec::new();
        let mut status = 100;
        while status < 600 {
            let is_class = status % 100 == 0 && (status..status + 100).all(|status| self.contains(status));
            if is_class {
                parts.push(format!("{}xx", status / 100));
                status += 100;
                continue;
            }
            if self.contains(status) {
                parts.push(status.to_string());
            }
            status += 1;
        }
        parts.join(", ")
    }
}

impl Test {
    fn describe(&self) -> String {
        join(self.0.iter().map(Check::describe), " and ")
    }
}

impl Check {
    fn describe(&self) -> String {
        let quoted = |texts: &[String]| join(texts.iter().map(|text| format!("{text:?}")), " or ");
        match self {
            Self::Equals(values) => quoted(values),
            Self::Contains(parts) => format!("containing {}", quoted(parts)),
            Self::Matches(pattern) => format!("matching {:?}", pattern.0.as_str()),
            Self::Present(true) => "present".to_owned(),
            Self::Present(false) => "absent".to_owned(),
            Self::Empty(true) => "empty".to_owned(),
            Self::Empty(false) => "not empty".to_owned(),
            Self::Below(bound) => format!("below {bound}"),
            Self::Above(bound) => format!("above {bound}"),
        }
    }
}

impl WaitRule {
    fn describe(&self) -> String {
        let sources =
            join(self.sources.iter().map(WaitSource::describe), if self.is_latest { ", " } else { ", else " });
        if self.is_latest { format!("the longest of {sources}") } else { sources }
    }
}

impl WaitSource {
    fn describe(&self) -> String {
        let with = |unit: &TimeUnit, extra: &tidegate_core::Span| {
            let name = TimeUnit::NAMES.iter().find(|(_, own)| own == unit).map(|(name, _)| *name);
            let unit = name.map(|name| format!(" {name}")).unwrap_or_default();
            let extra = if extra.is_zero() { String::new() } else { format!(" +{}", describe_duration(*extra)) };
            format!("{unit}{extra}")
        };
        match self {
            Self::Value { source, pattern, unit, extra } => {
                let pattern =
                    pattern.as_ref().map(|pattern| format!(" by {:?}", pattern.0.as_str())).unwrap_or_default();
                format!("{}{pattern}{}", describe_source(source), with(unit, extra))
            }
            Self::Text { pattern, unit, extra } => format!("its text by {:?}{}", pattern.0.as_str(), with(unit, extra)),
            Self::Fixed(wait) => describe_duration(*wait),
            Self::Period(PeriodEnd::Aligned(length)) => format!("until the next {}", describe_duration(*length)),
            Self::Period(PeriodEnd::Calendar(unit, zone)) => {
                format!("until the next {} in {}", unit.as_str(), zone.as_deref().unwrap_or("UTC"))
            }
            Self::Missing { missing, left, per_second } => {
                format!("({} - {}) / {}", missing.text, left.text, per_second.text)
            }
        }
    }
}

impl CallScopeRule {
    fn describe(&self) -> String {
        let methods = join(self.methods.iter().map(ToString::to_string), " or ");
        let paths = join(self.paths.iter().map(PathTemplate::to_string), " or ");
        let calls = [methods, paths].into_iter().filter(|part| !part.is_empty());
        let calls = join(calls, " ");
        let calls = if calls.is_empty() { "all calls".to_owned() } else { calls };
        format!("the scope of {calls}: {}", join(self.name.iter().map(describe_source), "/"))
    }
}

impl AllowanceRule {
    fn describe(&self) -> String {
        let number = |source: &NumberSource| match source {
            NumberSource::Fixed(number) => number.to_string(),
            NumberSource::Source(source) => describe_source(source),
        };
        let mut parts = Vec::new();
        parts.extend(self.remaining.iter().map(|source| format!("left {}", number(source))));
        parts.extend(self.used.iter().map(|source| format!("used {}", number(source))));
        parts.extend(self.limit.iter().map(|source| format!("of {}", number(source))));
        parts.extend(self.reset.iter().map(|source| format!("until {}", source.describe())));
        parts.extend(self.window.iter().map(|window| format!("in {}", describe_duration(*window))));
        let what = if self.measure == tidegate_core::call::Measure::Calls { "calls" } else { "cost" };
        format!("replies report {what}: {}", parts.join(", "))
    }
}

fn describe_source(source: &Source) -> String {
    match source {
        Source::Header(name, part) => match part {
            HeaderPart::Whole => name.to_string(),
            HeaderPart::Part(number) => format!("part {number} of {name}"),
            HeaderPart::Key(key) => format!("{key} in {name}"),
            HeaderPart::Json(path) => format!("{} in {name}", path.text),
        },
        Source::Json(path) => place(&path.text).to_owned(),
        Source::RequestHeader(name) => format!("the request's {name}"),
        Source::RequestJson(path) => format!("the request's {}", place(&path.text)),
        Source::Path(name) => format!("{{{name}}}"),
        Source::Method => "the method".to_owned(),
        Source::Host => "the host".to_owned(),
        Source::Route => "the route".to_owned(),
        Source::Text(text) => text.clone(),
    }
}

fn join(parts: impl Iterator<Item = String>, separator: &str) -> String {
    parts.collect::<Vec<_>>().join(separator)
}
