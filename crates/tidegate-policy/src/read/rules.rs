//! The rules for a provider's replies: `rule`, `scope`, `allowance`, `throttled_when` and `max_pause`.

use http::{HeaderName, Method};
use regex::RegexBuilder;
use tidegate_core::call::Measure;
use tidegate_core::{Class, Span};

use super::forms::{Custom, FLAG, Maybe, SPAN, TABLE, Words, names};
use super::provider::{PROVIDER, PROVIDER_PATH};
use super::replies::THROTTLED;
use super::{DocumentReader, all_or_none, join_names};
use crate::calendar::{PeriodUnit, find_zone};
use crate::document::{SourceTexts, TextRange, TomlNode, TomlTable, TomlValue, parse_file};
use crate::error::quoted;
use crate::nearest::{nearest, similar};
use crate::settings::SettingType::{Integer, Strings, TableOrTables, Text};
use crate::settings::key::{Below, setting_keys};
use crate::units::parse_duration;
use crate::verdict::{
    AllowanceRule, CallScopeRule, Check, Condition, HeaderPart, JsonPath, LONGEST_MAX_PAUSE, NumberSource,
    PathTemplate, Pattern, PeriodEnd, RequestCondition, Rule, RuleName, RuleOrigin, RuleScope, Source, StatusSet, Test,
    TimeUnit, VerdictRules, WaitRule, WaitSource, XmlPath,
};

/// The most rules of a provider and of its preset, each.
const MAX_RULES: usize = 64;
/// The most scopes or allowances of a provider.
const MAX_PARTS: usize = 32;
/// The most items of a list in a rule.
const MAX_ITEMS: usize = 64;
/// The largest compiled form of a regular expression, in bytes.
const MAX_REGEX: usize = 256 << 10;

/// The built-in rules, as a policy would write them.
const BUILT_IN: &str = include_str!("../verdict/defaults.toml");

const SOURCE_FORMS: &str = "\"header NAME\", \"json POINTER\", \"request.header NAME\", \"request.json POINTER\", \"path {name}\", \
                            \"route\", \"method\" or \"host\"";
const WHEN_FORM: &str = "a table such as { status = 403, json = { \"/error\" = \"rate_limited\" } }";
const WAIT_FORMS: &str = "\"30s\", \"header NAME UNIT\", \"json POINTER UNIT\", \"next day in ZONE\" or a table";

setting_keys! {
    RULE: RuleKeys {
        when: () = "", TABLE, "the conditions, which must all hold", Below::Table(&WHEN);
        r#is: Option<Class> = "", Maybe(Words(&CLASSES)),
            "the class of such replies; without it, the rule only adds to what another decides";
        retry: Option<bool> = "", Maybe(FLAG),
            "false if the same request must not be sent again with the same credential, true if it was not carried out";
        wait: WaitRule = "",
            Custom(TableOrTables, "a source of a wait, or a list of them", |reader, node, _| reader.wait_rule(node)),
            "the wait; of a list, the first that the reply tells; default as the usual headers tell";
        scope: RuleScope = "call",
            Custom(Strings, "`call`, `credential`, `provider`, or a list of parts of a name", |reader, node, _| reader.rule_scope(node)),
            "the part of the provider that waits";
        max_pause: Option<Span> = "",
            Maybe(Custom(Text, "a duration of at most 31 days", |reader, node, key| reader.max_pause(node, key))),
            "the longest wait that such a reply may ask for";
    }

    WHEN: WhenKeys {
        status: StatusSet = "4xx,5xx",
            Custom(Strings, "a status such as 429, a class such as 5xx, or a list", |reader, node, _| reader.status_set(node)),
            "the status that they have";
        header: () = "", TABLE, "the headers that they have, each with a test";
        json: () = "", TABLE, "JSON pointers into the body, each with a test; `*` is any element or member";
        text: Option<Test> = "",
            Maybe(Custom(TableOrTables, "a text, or a test", |reader, node, key| reader.text_test(node, key))),
            "a text that the body contains, or a test";
        xml: () = "", TABLE, "elements of an XML body, each with a test";
        request: () = "", TABLE, "the request", Below::Table(&REQUEST);
    }

    REQUEST: RequestKeys {
        method: Vec<Method> = "", Custom(Strings, "a method, or a list", |reader, node, _| reader.methods(node)),
            "its method";
        host: Vec<String> = "", Custom(Strings, "a host, or a list", |reader, node, _| reader.request_hosts(node)),
            "the host that it is sent to";
        path: Vec<PathTemplate> = "",
            Custom(Strings, "a path such as /search/**, or a list", |reader, node, _| reader.path_templates(node)),
            "its path below the base URL, with * or {name} for a segment and ** for any number of them";
        header: () = "", TABLE, "its headers, each with a test";
        json: () = "", TABLE, "JSON pointers into its body, each with a test";
    }

    SCOPE: ScopeKeys {
        method: Vec<Method> = "", Custom(Strings, "a method, or a list", |reader, node, _| reader.methods(node)),
            "the method of its calls";
        path: Vec<PathTemplate> = "",
            Custom(Strings, "a path such as /search/**, or a list", |reader, node, _| reader.path_templates(node)),
            "the path of its calls below the base URL";
        name: Vec<Source> = "",
            Custom(Strings, "the parts of its name", |reader, node, key| reader.sources(node, key)),
            "the parts of its name, from the request or the headers of replies";
    }

    ALLOWANCE: AllowanceKeys {
        of: Measure = "calls", Words(&MEASURES), "what it counts: calls or cost";
        limit: Option<NumberSource> = "",
            Maybe(Custom(Integer, "a number or its source", |reader, node, key| reader.number_source(node, key))),
            "the whole amount";
        remaining: Option<NumberSource> = "",
            Maybe(Custom(Integer, "a number or its source", |reader, node, key| reader.number_source(node, key))),
            "the amount that is left";
        used: Option<NumberSource> = "",
            Maybe(Custom(Integer, "a number or its source", |reader, node, key| reader.number_source(node, key))),
            "the amount that is used, if `remaining` isn't told";
        reset: Option<WaitSource> = "",
            Maybe(Custom(Text, "a source of a wait", |reader, node, key| reader.wait_source(node, key))),
            "the time until the whole amount is left again";
        window: Option<Span> = "", Maybe(SPAN), "the length of the window, if `reset` isn't told";
    }
}

const CLASSES: [(&str, Class); 8] = [
    ("success", Class::Success),
    ("throttled", Class::Throttled),
    ("quota", Class::Quota),
    ("unavailable", Class::Unavailable),
    ("transient", Class::Transient),
    ("permanent", Class::Permanent),
    ("auth", Class::Auth),
    ("unknown", Class::Unknown),
];

const MEASURES: [(&str, Measure); 2] = [("calls", Measure::Calls), ("cost", Measure::Cost)];

/// Reads the built-in rules.
pub(crate) fn built_in_rules() -> Vec<Rule> {
    const CHECKED: &str = "invariant: the built-in rules are tested to be valid";
    let mut texts = SourceTexts::default();
    let Ok(root) = parse_file(&mut texts, "the built-in rules", BUILT_IN.as_bytes()) else { unreachable!("{CHECKED}") };
    let at = texts.last_range();
    let mut reader = DocumentReader::with_texts(&texts, at);
    let node = root.node("rule").expect(CHECKED);
    let rules = reader.rules_of(node, RuleOrigin::BuiltIn);
    reader.finish().expect(CHECKED);
    rules.expect(CHECKED)
}

impl DocumentReader<'_> {
    /// Reads the rules for a provider's replies. `preset_rules` are those of its preset.
    pub(super) fn verdict_rules(
        &mut self,
        provider: &TomlTable,
        preset_rules: Option<&TomlNode>,
    ) -> Option<VerdictRules> {
        let own = provider.node("rule").map_or(Some(Vec::new()), |node| self.rules_of(node, RuleOrigin::Policy));
        let short = self.throttled_when(provider);
        let preset = preset_rules.map_or(Some(Vec::new()), |node| self.rules_of(node, RuleOrigin::Preset));
        let scopes = self.items_of(provider, "scope", |reader, table| reader.call_scope(table));
        let allowances = self.items_of(provider, "allowance", |reader, table| reader.allowance(table));
        let max_pause = self.value(provider, &PROVIDER.max_pause);
        let learns = provider.node("learn_limits").is_some_and(|node| matches!(node.value, TomlValue::Boolean(true)));
        if let Some(node) = provider.node("allowance").filter(|_| !learns) {
            self.note(node.at, "without `learn_limits = true`, only a report that nothing is left has an effect");
        }
        let mut rules = own?;
        for mut rule in short? {
            rule.name.number = rules.len() + 1;
            rules.push(rule);
        }
        rules.extend(preset?);
        Some(VerdictRules::new(rules, scopes?, allowances?, max_pause?))
    }

    fn rules_of(&mut self, node: &TomlNode, origin: RuleOrigin) -> Option<Vec<Rule>> {
        self.check_length(node.at, "rule", node.items().len(), MAX_RULES, " rules")?;
        all_or_none(node.items().iter().enumerate().map(|(index, item)| {
            let table = self.item_table(item, "rule")?;
            let name = RuleName { origin, number: index + 1 };
            let is = self.value(table, &RULE.r#is);
            let when = self.conditions(table, item);
            let retry = self.value(table, &RULE.retry);
            let wait = self.value_or(table, &RULE.wait, WaitRule::default());
            let scope = self.value(table, &RULE.scope);
            let max_pause = self.value(table, &RULE.max_pause);
            let rule = Rule {
                name,
                when: when?,
                class: is?,
                may_repeat: retry?,
                wait: wait?,
                scope: scope?,
                max_pause: max_pause?,
            };
            if matches!(rule.class, Some(Class::Permanent | Class::Auth))
                && let Some(wait) = table.node("wait")
            {
                self.note(wait.at, "no effect: nothing waits after a reply of this class");
            }
            if rule.class.is_none() && rule.adds_nothing() {
                let message = "a rule has neither `is` nor `retry`, `wait` or `scope`, and so no effect";
                return self.error(item.at, message, "the class of such replies, such as is = \"throttled\"").none();
            }
            self.check_captures(&rule, item)?;
            Some(rule)
        }))
    }

    /// Reads the tables under a provider's key: one table, or a list of them.
    fn items_of<T>(
        &mut self,
        provider: &TomlTable,
        key: &str,
        mut read: impl FnMut(&mut Self, &TomlTable) -> Option<T>,
    ) -> Option<Vec<T>> {
        let Some(node) = provider.node(key) else { return Some(Vec::new()) };
        self.check_length(node.at, key, node.items().len(), MAX_PARTS, "")?;
        all_or_none(node.items().iter().map(|item| {
            let table = self.item_table(item, key)?;
            read(self, table)
        }))
    }

    /// Returns the table of an item, checked for unknown keys.
    fn item_table<'n>(&mut self, item: &'n TomlNode, key: &str) -> Option<&'n TomlTable> {
        let Some(table) = item.as_table() else {
            return self
                .wrong_type(item, key, format!("a table, or a list of tables, [[{}]]", provider_key(key)))
                .none();
        };
        self.check_keys(table, &format!("{PROVIDER_PATH}.{key}.#"));
        Some(table)
    }

    /// Reads the conditions of a rule: one table, or a list of which one must hold.
    fn conditions(&mut self, rule: &TomlTable, item: &TomlNode) -> Option<Vec<Condition>> {
        let Some(node) = rule.node("when") else {
            return self.error(item.at, "a rule has no `when`: it would apply to every reply", WHEN_FORM).none();
        };
        self.check_length(node.at, "when", node.items().len(), MAX_ITEMS, " conditions")?;
        all_or_none(node.items().iter().map(|item| self.condition(item)))
    }

    fn condition(&mut self, node: &TomlNode) -> Option<Condition> {
        const FORM: &str = WHEN_FORM;
        let Some(table) = node.as_table() else { return self.wrong_type(node, "when", FORM).none() };
        self.check_keys(table, &format!("{PROVIDER_PATH}.rule.#.when"));
        let statuses = self.value(table, &WHEN.status);
        let headers = self.header_tests(table);
        let json = self.json_tests(table);
        let text = self.value(table, &WHEN.text);
        let xml = self.tests(table, "xml", |reader, text, node| {
            let path = XmlPath::new(text);
            let form = "an element's name, such as \"Error/Code\", or an attribute, such as \"error@code\"";
            path.or_else(|| reader.error(node.at, format!("{} is no place in XML", quoted(text)), form).none())
        });
        let request = self.request_condition(table);
        Some(Condition {
            statuses: statuses?,
            headers: headers?,
            json: json?,
            xml: xml?,
            text: text?,
            request: request?,
        })
    }

    fn request_condition(&mut self, when: &TomlTable) -> Option<RequestCondition> {
        const FORM: &str = "a table such as { method = \"POST\", path = \"/graphql\" }";
        let Some(node) = when.node("request") else { return Some(RequestCondition::default()) };
        let Some(table) = node.as_table() else { return self.wrong_type(node, "request", FORM).none() };
        self.check_keys(table, &format!("{PROVIDER_PATH}.rule.#.when.request"));
        let methods = self.value_or(table, &REQUEST.method, Vec::new());
        let hosts = self.value_or(table, &REQUEST.host, Vec::new());
        let paths = self.value_or(table, &REQUEST.path, Vec::new());
        let (headers, json) = (self.header_tests(table), self.json_tests(table));
        Some(RequestCondition { methods: methods?, hosts: hosts?, paths: paths?, headers: headers?, json: json? })
    }

    fn header_tests(&mut self, table: &TomlTable) -> Option<Vec<(HeaderName, Test)>> {
        self.tests(table, "header", |reader, text, node| reader.rule_header(text, node))
    }

    fn json_tests(&mut self, table: &TomlTable) -> Option<Vec<(JsonPath, Test)>> {
        self.tests(table, "json", |reader, text, node| reader.json_path(text, node.at, "json"))
    }

    /// Reads a table of tests by their places.
    fn tests<T>(
        &mut self,
        table: &TomlTable,
        key: &str,
        mut place: impl FnMut(&mut Self, &str, &TomlNode) -> Option<T>,
    ) -> Option<Vec<(T, Test)>> {
        let Some(node) = table.node(key) else { return Some(Vec::new()) };
        let Some(table) = node.as_table() else {
            return self.wrong_type(node, key, format!("a table, {{ PLACE = TEST }}, under `{key}`")).none();
        };
        self.check_length(node.at, key, table.entries.len(), MAX_ITEMS, "")?;
        all_or_none(table.entries.iter().map(|entry| {
            let place = place(self, &entry.key, &TomlNode { at: entry.key_at, value: TomlValue::Boolean(true) });
            let test = self.test(&entry.node, &entry.key);
            Some((place?, test?))
        }))
    }

    /// Reads a test: values, one of which the place has, or a table of checks.
    fn test(&mut self, node: &TomlNode, key: &str) -> Option<Test> {
        match node.as_table() {
            None => self.scalars(node, key).map(|values| Test(vec![Check::Equals(values)])),
            Some(table) => self.checks(table, node, key),
        }
    }

    /// Reads a test of a text: texts, one of which it contains, or a table of checks.
    fn text_test(&mut self, node: &TomlNode, key: &str) -> Option<Test> {
        match node.as_table() {
            None => self.folded_texts(node, key).map(|parts| Test(vec![Check::Contains(parts)])),
            Some(table) => self.checks(table, node, key),
        }
    }

    fn checks(&mut self, table: &TomlTable, node: &TomlNode, key: &str) -> Option<Test> {
        const KNOWN: [&str; 7] = ["equals", "contains", "matches", "present", "empty", "below", "above"];
        if !self.check_names(table, &format!("the test of {}", quoted(key)), &KNOWN) {
            return None;
        }
        self.check_length(node.at, key, table.entries.len(), KNOWN.len(), " checks")?;
        let checks = all_or_none(table.entries.iter().map(|entry| {
            let (name, node) = (entry.key.as_str(), &entry.node);
            Some(match name {
                "equals" => Check::Equals(self.scalars(node, name)?),
                "contains" => Check::Contains(self.folded_texts(node, name)?),
                "matches" => Check::Matches(self.regex(node, name)?),
                "present" => Check::Present(self.boolean(node, name)?),
                "empty" => Check::Empty(self.boolean(node, name)?),
                "below" => Check::Below(self.any_number(node, name)?),
                _ => Check::Above(self.any_number(node, name)?),
            })
        }))?;
        if checks.contains(&Check::Present(false)) && checks.len() > 1 {
            let message = format!("the test of {} has other checks beside `present = false`", quoted(key));
            return self.error(node.at, message, "`present = false` alone").none();
        }
        Some(Test(checks))
    }

    /// Reads one value or several: texts, numbers or booleans.
    fn scalars(&mut self, node: &TomlNode, key: &str) -> Option<Vec<String>> {
        const FORM: &str = "a text, a number, true or false, or a list of them";
        self.check_length(node.at, key, node.items().len(), MAX_ITEMS, "")?;
        all_or_none(node.items().iter().map(|item| match &item.value {
            TomlValue::String(text) => Some(text.clone()),
            TomlValue::Integer(Some(number)) => Some(number.to_string()),
            TomlValue::Float => Some(self.texts.text_at(item.at).replace('_', "")),
            TomlValue::Boolean(flag) => Some(flag.to_string()),
            _ => self.wrong_type(item, key, FORM).none(),
        }))
    }

    fn folded_texts(&mut self, node: &TomlNode, key: &str) -> Option<Vec<String>> {
        const FORM: &str = "a text that the place contains";
        self.check_length(node.at, key, node.items().len(), MAX_ITEMS, "")?;
        all_or_none(node.items().iter().map(|item| {
            let text = self.string(item, key, FORM)?;
            if text.is_empty() {
                return self.error(item.at, "every text contains nothing", FORM).none();
            }
            Some(text.to_lowercase())
        }))
    }

    fn regex(&mut self, node: &TomlNode, key: &str) -> Option<Pattern> {
        const FORM: &str = "a regular expression such as \"(?i)try again in ([0-9.]+)s\"";
        let text = self.string(node, key, FORM)?;
        match RegexBuilder::new(text).size_limit(MAX_REGEX).build() {
            Ok(regex) => Some(Pattern(regex)),
            Err(regex::Error::CompiledTooBig(_)) => self
                .error(node.at, format!("`{key}` is too large when compiled"), "a smaller regular expression")
                .none(),
            Err(error) => {
                let reason = error.to_string();
                let reason = reason.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
                self.error(node.at, format!("`{key}` is no regular expression: {reason}"), FORM).none()
            }
        }
    }

    /// Reads a regular expression with a group, which holds a time.
    fn regex_with_group(&mut self, node: &TomlNode, key: &str) -> Option<Pattern> {
        let pattern = self.regex(node, key)?;
        if pattern.0.captures_len() < 2 {
            let expected = "parentheses around the time, such as \"again in ([0-9.]+)s\"";
            return self.error(node.at, format!("`{key}` has no group"), expected).none();
        }
        Some(pattern)
    }

    fn any_number(&mut self, node: &TomlNode, key: &str) -> Option<f64> {
        let text = match &node.value {
            TomlValue::Integer(_) | TomlValue::Float => self.texts.text_at(node.at).replace('_', ""),
            _ => return self.wrong_type(node, key, "a number").none(),
        };
        let number = text.parse().ok().filter(|number: &f64| number.is_finite());
        number.or_else(|| self.wrong_text(node, key, &text, "a number").none())
    }

    pub(super) fn status_set(&mut self, node: &TomlNode) -> Option<StatusSet> {
        const FORM: &str = "a status from 100 to 599, or a class such as \"5xx\"";
        self.check_length(node.at, "status", node.items().len(), MAX_ITEMS, "")?;
        let ranges = all_or_none(node.items().iter().map(|item| match &item.value {
            TomlValue::Integer(Some(number)) => {
                let status = u16::try_from(*number).ok().filter(|status| (100..=599).contains(status));
                let range = status.map(|status| status..=status);
                range.or_else(|| self.error(item.at, format!("`status` is {number}"), FORM).none())
            }
            TomlValue::String(text) => {
                let class = text.strip_suffix("xx").and_then(|digit| digit.parse().ok());
                let class =
                    class.filter(|class: &u16| (1..=5).contains(class)).map(|class| class * 100..=class * 100 + 99);
                let status = || text.parse().ok().filter(|status: &u16| (100..=599).contains(status));
                let range = class.or_else(|| status().map(|status| status..=status));
                range.or_else(|| self.wrong_text(item, "status", text, FORM).none())
            }
            _ => self.wrong_type(item, "status", FORM).none(),
        }))?;
        let mut set = StatusSet::default();
        ranges.into_iter().for_each(|range| set.insert_range(range));
        Some(set)
    }

    fn methods(&mut self, node: &TomlNode) -> Option<Vec<Method>> {
        let words = self.strings(node, "method", "a method in capitals, such as \"POST\"")?;
        all_or_none(words.into_iter().map(|(text, item)| self.method(text, item)))
    }

    fn request_hosts(&mut self, node: &TomlNode) -> Option<Vec<String>> {
        const FORM: &str = "a host such as \"api.example.com\", or any subdomain, \"*.example.com\"";
        let words = self.strings(node, "host", FORM)?;
        all_or_none(words.into_iter().map(|(text, item)| {
            let bare = text.strip_prefix("*.").unwrap_or(text);
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
            let is_host = !bare.is_empty() && bare.bytes().all(fits);
            if is_host { Some(text.to_ascii_lowercase()) } else { self.wrong_text(item, "host", text, FORM).none() }
        }))
    }

    fn path_templates(&mut self, node: &TomlNode) -> Option<Vec<PathTemplate>> {
        self.check_length(node.at, "path", node.items().len(), MAX_ITEMS, "")?;
        all_or_none(node.items().iter().map(|item| self.path_template(item)))
    }

    fn path_template(&mut self, node: &TomlNode) -> Option<PathTemplate> {
        const FORM: &str = "a path such as \"/search/**\" or \"/channels/{channel}/messages\"";
        let text = self.string(node, "path", FORM)?;
        PathTemplate::new(text)
            .map_err(|reason| self.error(node.at, format!("`path` is {}: {reason}", quoted(text)), FORM).none::<()>())
            .ok()
    }

    fn rule_header(&mut self, text: &str, node: &TomlNode) -> Option<HeaderName> {
        let name = HeaderName::from_bytes(text.as_bytes()).ok();
        let form = "a header's name, such as \"x-ratelimit-remaining\"";
        name.or_else(|| self.error(node.at, format!("{} is no header's name", quoted(text)), form).none())
    }

    pub(super) fn json_path(&mut self, text: &str, at: TextRange, key: &str) -> Option<JsonPath> {
        match JsonPath::new(text) {
            Ok(path) => Some(path),
            Err(wrong) => self.no_pointer(wrong, at, key).none(),
        }
    }

    pub(super) fn max_pause(&mut self, node: &TomlNode, key: &str) -> Option<Span> {
        let span = self.duration(node, key)?;
        if span > LONGEST_MAX_PAUSE {
            return self.error(node.at, format!("`{key}` is longer than 31 days"), "a shorter duration").none();
        }
        Some(span)
    }

    fn rule_scope(&mut self, node: &TomlNode) -> Option<RuleScope> {
        match node.items() {
            [only] if only.is_word("call") => Some(RuleScope::Call),
            [only] if only.is_word("credential") => Some(RuleScope::Credential),
            [only] if only.is_word("provider") => Some(RuleScope::Provider),
            [only] => {
                let text = self.string(only, "scope", SOURCE_FORMS)?;
                if let Some(meant) = similar(text, ["call", "credential", "provider"]) {
                    return self.wrong_text(only, "scope", text, SOURCE_FORMS).did_you_mean(Some(meant)).none();
                }
                self.sources(node, "scope").map(RuleScope::Named)
            }
            _ => self.sources(node, "scope").map(RuleScope::Named),
        }
    }

    /// Reads the parts of a scope's name.
    fn sources(&mut self, node: &TomlNode, key: &str) -> Option<Vec<Source>> {
        let words = self.strings(node, key, SOURCE_FORMS)?;
        self.check_length(node.at, key, words.len(), MAX_ITEMS, "")?;
        all_or_none(words.into_iter().map(|(text, item)| match self.source(text, item, key)? {
            Some(source) => Some(source),
            // Most texts of several words are sources with a misspelt first word.
            None if text.is_empty() || text.contains(char::is_whitespace) => {
                self.wrong_text(item, key, text, SOURCE_FORMS).none()
            }
            None => Some(Source::Text(text.to_owned())),
        }))
    }

    /// Reads a source; `None` inside for another text.
    fn source(&mut self, text: &str, node: &TomlNode, key: &str) -> Option<Option<Source>> {
        let words: Vec<&str> = text.split_whitespace().collect();
        Some(Some(match words.as_slice() {
            ["header", name] => Source::Header(self.rule_header(name, node)?, HeaderPart::Whole),
            ["header", name, "part", number] => {
                let number = number.parse().ok().filter(|number| (1..=MAX_ITEMS).contains(number));
                let Some(number) = number else { return self.wrong_text(node, key, text, "a part from 1").none() };
                Source::Header(self.rule_header(name, node)?, HeaderPart::Part(number))
            }
            ["header", name, "key", key] => {
                Source::Header(self.rule_header(name, node)?, HeaderPart::Key((*key).to_owned()))
            }
            ["header", name, "json", path] => {
                Source::Header(self.rule_header(name, node)?, HeaderPart::Json(self.json_path(path, node.at, "json")?))
            }
            ["json", path] => Source::Json(self.json_path(path, node.at, "json")?),
            ["request.header", name] => Source::RequestHeader(self.rule_header(name, node)?),
            ["request.json", path] => Source::RequestJson(self.json_path(path, node.at, "json")?),
            ["path", name] => match name.strip_prefix('{').and_then(|name| name.strip_suffix('}')) {
                Some(name) => Source::Path(name.to_owned()),
                None => return self.wrong_text(node, key, text, "\"path {name}\"").none(),
            },
            ["method"] => Source::Method,
            ["host"] => Source::Host,
            ["route"] => Source::Route,
            ["header" | "json" | "request.header" | "request.json" | "path", ..] => {
                return self.wrong_text(node, key, text, SOURCE_FORMS).none();
            }
            _ => return Some(None),
        }))
    }

    fn number_source(&mut self, node: &TomlNode, key: &str) -> Option<NumberSource> {
        match &node.value {
            TomlValue::Integer(_) => self.integer(node, key, 0..=u64::MAX >> 1).map(NumberSource::Fixed),
            _ => {
                let text = self.string(node, key, SOURCE_FORMS)?;
                match self.source(text, node, key)? {
                    Some(source) => Some(NumberSource::Source(source)),
                    None => self.wrong_text(node, key, text, format!("a number, or its source: {SOURCE_FORMS}")).none(),
                }
            }
        }
    }

    fn wait_rule(&mut self, node: &TomlNode) -> Option<WaitRule> {
        if let Some(latest) = node.as_table().and_then(|table| table.node("latest")) {
            let sources = all_or_none(latest.items().iter().map(|item| self.wait_source(item, "wait")))?;
            return Some(WaitRule { sources, is_latest: true });
        }
        self.check_length(node.at, "wait", node.items().len(), MAX_ITEMS, "")?;
        let sources = all_or_none(node.items().iter().map(|item| self.wait_source(item, "wait")))?;
        Some(WaitRule { sources, is_latest: false })
    }

    fn wait_source(&mut self, node: &TomlNode, key: &str) -> Option<WaitSource> {
        if let Some(table) = node.as_table() {
            return self.wait_table(table, node);
        }
        let text = self.string(node, key, WAIT_FORMS)?;
        if let Some(period) = text.strip_prefix("next ") {
            return self.period(period.trim(), node).map(WaitSource::Period);
        }
        let mut words: Vec<&str> = text.split_whitespace().collect();
        if !matches!(words.first(), Some(&("header" | "json"))) {
            let fixed = parse_duration(text).ok().filter(|span| !span.is_zero()).map(WaitSource::Fixed);
            return fixed.or_else(|| self.wrong_text(node, key, text, WAIT_FORMS).none());
        }
        let extra = words.last().and_then(|word| word.strip_prefix('+')).and_then(|span| parse_duration(span).ok());
        if extra.is_some() {
            words.pop();
        }
        let unit = words.last().and_then(|word| unit_of(word)).filter(|_| words.len() > 2);
        if unit.is_some() {
            words.pop();
        }
        // A word behind the place that is neither a unit nor a part of the source.
        if words.len() == 3 {
            let names = names(&TimeUnit::NAMES);
            let message = format!("`{key}`: unknown unit {}", quoted(words[2]));
            let meant = nearest(words[2], names.iter().copied());
            return self.error(node.at, message, join_names(&names)).did_you_mean(meant).none();
        }
        match self.source(&words.join(" "), node, key)? {
            Some(source) => Some(WaitSource::Value {
                source,
                pattern: None,
                unit: unit.unwrap_or_default(),
                extra: extra.unwrap_or_default(),
            }),
            None => self.wrong_text(node, key, text, WAIT_FORMS).none(),
        }
    }

    /// Reads a wait that a table describes: a time in a text, or an amount that comes back at a rate.
    fn wait_table(&mut self, table: &TomlTable, node: &TomlNode) -> Option<WaitSource> {
        const KNOWN: [&str; 9] = ["text", "header", "json", "matches", "unit", "plus", "missing", "left", "per_second"];
        if !self.check_names(table, "a wait", &KNOWN) {
            return None;
        }
        let path = |reader: &mut Self, key: &str| match table.node(key) {
            None => Some(None),
            Some(node) => {
                let text = reader.string(node, key, "a JSON pointer, such as \"/cost/missing\"")?;
                let text = text.strip_prefix("json ").unwrap_or(text);
                reader.json_path(text.trim(), node.at, "json").map(Some)
            }
        };
        if table.node("missing").is_some() {
            let (missing, left, per_second) = (path(self, "missing"), path(self, "left"), path(self, "per_second"));
            let (Some(missing), Some(left), Some(per_second)) = (missing?, left?, per_second?) else {
                return self.error(node.at, "a wait with `missing` has no `left` or `per_second`", "all three").none();
            };
            return Some(WaitSource::Missing { missing, left, per_second });
        }
        let unit = match table.node("unit") {
            None => Some(TimeUnit::Any),
            Some(node) => self.choice(node, "unit", &TimeUnit::NAMES),
        };
        let extra = table.node("plus").map_or(Some(Span::ZERO), |node| self.duration(node, "plus"));
        if let Some(text) = table.node("text") {
            let pattern = self.regex_with_group(text, "text");
            return Some(WaitSource::Text { pattern: pattern?, unit: unit?, extra: extra? });
        }
        let pattern = match table.node("matches") {
            None => Some(None),
            Some(node) => self.regex_with_group(node, "matches").map(Some),
        };
        let source = match (table.node("header"), path(self, "json")?) {
            (Some(node), None) => {
                let text = self.string(node, "header", "a header's name")?;
                let name = self.rule_header(text, node)?;
                Some(Source::Header(name, HeaderPart::Whole))
            }
            (None, Some(path)) => Some(Source::Json(path)),
            _ => self.error(node.at, "a wait has no source", "one of `text`, `header` and `json`").none(),
        };
        Some(WaitSource::Value { source: source?, pattern: pattern?, unit: unit?, extra: extra? })
    }

    /// Reads the period of a wait until its end: `day in America/Los_Angeles`, `month`, `15m`.
    fn period(&mut self, text: &str, node: &TomlNode) -> Option<PeriodEnd> {
        const FORM: &str = "\"next day in America/Los_Angeles\", \"next month\", \"next hour\" or \"next 15m\"";
        let (period, zone) = text.split_once(" in ").map_or((text, None), |(period, zone)| (period, Some(zone.trim())));
        let unit = PeriodUnit::ALL.into_iter().find(|unit| unit.as_str() == period.trim());
        let Some(unit) = unit else {
            let span = parse_duration(text).ok().filter(|span| !span.is_zero() && zone.is_none());
            return span.map(PeriodEnd::Aligned).or_else(|| self.wrong_text(node, "wait", text, FORM).none());
        };
        let zone = match zone.map(find_zone) {
            None => None,
            Some(Ok((_, name))) => Some(name),
            Some(Err(nearest)) => {
                let message = format!("unknown time zone {}", quoted(zone.unwrap_or_default()));
                return self.error(node.at, message, FORM).did_you_mean(nearest.as_deref()).none();
            }
        };
        Some(PeriodEnd::Calendar(unit, zone))
    }

    fn call_scope(&mut self, table: &TomlTable) -> Option<CallScopeRule> {
        let methods = self.value_or(table, &SCOPE.method, Vec::new());
        let paths = self.value_or(table, &SCOPE.path, Vec::new());
        let Some(node) = table.node("name") else {
            self.report_missing("a scope has no `name`", SOURCE_FORMS);
            return None;
        };
        let name = self.parse(node, &SCOPE.name);
        let (methods, paths, name) = (methods?, paths?, name?);
        let captures: Vec<&str> = paths.iter().flat_map(PathTemplate::names).collect();
        self.check_path_sources(&name, &captures, node)?;
        if name.iter().any(Source::needs_body) {
            let message = "a scope's name has a part from the body of replies, which isn't read for each reply";
            return self.error(node.at, message, "parts from the request and from headers").none();
        }
        Some(CallScopeRule { methods, paths, name })
    }

    /// Checks that each segment that a rule asks for is captured by its paths.
    fn check_captures(&mut self, rule: &Rule, item: &TomlNode) -> Option<()> {
        let RuleScope::Named(parts) = &rule.scope else { return Some(()) };
        let paths = rule.when.iter().flat_map(|when| &when.request.paths);
        let captures: Vec<&str> = paths.flat_map(PathTemplate::names).collect();
        let node = item.as_table().and_then(|table| table.node("scope")).unwrap_or(item);
        self.check_path_sources(parts, &captures, node)
    }

    fn check_path_sources(&mut self, parts: &[Source], captures: &[&str], node: &TomlNode) -> Option<()> {
        let missing = parts.iter().find_map(|part| match part {
            Source::Path(name) if !captures.contains(&name.as_str()) => Some(name),
            _ => None,
        });
        match missing {
            None => Some(()),
            Some(name) => {
                let message = format!("no path has the segment {{{name}}}");
                self.error(node.at, message, "a `path` with it, such as \"/channels/{channel}/**\"").none()
            }
        }
    }

    fn allowance(&mut self, table: &TomlTable) -> Option<AllowanceRule> {
        let measure = self.value(table, &ALLOWANCE.of);
        let limit = self.value(table, &ALLOWANCE.limit);
        let remaining = self.value(table, &ALLOWANCE.remaining);
        let used = self.value(table, &ALLOWANCE.used);
        let reset = self.value(table, &ALLOWANCE.reset);
        let window = self.value(table, &ALLOWANCE.window);
        let rule = AllowanceRule {
            measure: measure?,
            limit: limit?,
            remaining: remaining?,
            used: used?,
            reset: reset?,
            window: window?,
        };
        if rule.remaining.is_none() && (rule.used.is_none() || rule.limit.is_none()) {
            let at = table.entries.first().map_or(self.full_range, |entry| entry.key_at);
            let message = "an allowance tells neither `remaining` nor `used` with `limit`";
            return self.error(at, message, "the place of the amount that is left").none();
        }
        Some(rule)
    }

    /// Reads `throttled_when`, the short form of rules on JSON: one table, or a list of them.
    fn throttled_when(&mut self, provider: &TomlTable) -> Option<Vec<Rule>> {
        const FORM: &str = "{ status = 200, contains = { \"/Error\" = \"limit reached\" } }";
        let Some(entry) = provider.get("throttled_when") else { return Some(Vec::new()) };
        self.check_length(entry.node.at, "throttled_when", entry.node.items().len(), MAX_PARTS, "")?;
        all_or_none(entry.node.items().iter().map(|item| {
            let Some(table) = item.as_table() else {
                return self.wrong_type(item, "throttled_when", format!("a table, {FORM}, or a list of them")).none();
            };
            self.check_keys(table, &format!("{PROVIDER_PATH}.throttled_when"));
            let statuses = self.value(table, &THROTTLED.status);
            let contains = self.required(entry, table, &THROTTLED.contains, FORM);
            let spends_quota = self.value(table, &THROTTLED.spends_quota);
            let contains = contains?.into_iter();
            let json =
                contains.map(|(pointer, text)| (pointer, Test(vec![Check::Contains(vec![text.to_lowercase()])])));
            Some(Rule {
                name: RuleName { origin: RuleOrigin::Policy, number: 1 },
                when: vec![Condition {
                    statuses: statuses?,
                    headers: Vec::new(),
                    json: json.collect(),
                    xml: Vec::new(),
                    text: None,
                    request: RequestCondition::default(),
                }],
                class: Some(if spends_quota? { Class::Quota } else { Class::Throttled }),
                may_repeat: None,
                wait: WaitRule::default(),
                scope: RuleScope::Call,
                max_pause: None,
            })
        }))
    }
}

fn unit_of(word: &str) -> Option<TimeUnit> {
    TimeUnit::NAMES.iter().find(|(name, _)| *name == word).map(|(_, unit)| *unit)
}

fn provider_key(key: &str) -> String {
    format!("outbound.provider.NAME.{key}")
}
