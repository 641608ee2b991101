//! A policy in which one limit has other terms.

use std::fmt;
use std::sync::Arc;

use tidegate_core::LimitId;

use crate::builder::toml_string;
use crate::document::{SourceKind, SourceTexts, TomlEntry, TomlNode, TomlTable, TomlValue, parse_file};
use crate::error::Errors;
use crate::plan::LimitPlace;
use crate::policy::Policy;
use crate::{read, settings};

/// The keys of a limit's section that aren't its terms.
const FIXED_KEYS: [&str; 10] =
    ["key", "missing", "match", "cost", "name", "limits", "preset", "ipv6_network", "on_outage", "lease"];
const ITEM: &str = "inbound.action.*.limits.#";

/// The sections of a policy that have limits, as they were read. It is never shown.
pub(crate) struct LimitSections {
    texts: SourceTexts,
    root: TomlTable,
}

impl LimitSections {
    pub(crate) fn new(texts: SourceTexts, mut root: TomlTable) -> Self {
        root.entries.retain(|entry| matches!(entry.key.as_str(), "inbound" | "api"));
        Self { texts, root }
    }
}

impl fmt::Debug for LimitSections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LimitSections")
    }
}

/// A policy with other terms of a limit.
#[derive(Clone, Debug)]
pub struct EditedLimit {
    /// The policy. It follows the one that was edited, as after [`Policy::load_next`].
    pub policy: Policy,
    /// The lines to write in the policy file, with the name of their section, in place of those with the same keys. If a
    /// key must go, as `penalty` for a `ban`, it is the whole section, and a comment says so.
    pub toml: String,
}

/// The reason why a limit can't have other terms.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitTermsError {
    /// The terms have errors.
    #[error(transparent)]
    Terms(#[from] Errors),
    /// The terms have a key that isn't a term.
    #[error("`{key}` is no term of a limit; its terms are `limit`, `penalty`, `ban`, `count` and `mode`")]
    FixedKey {
        /// The key.
        key: String,
    },
    /// The policy is a part of another document.
    #[error("the policy has no text of its own")]
    NoText,
}

impl Policy {
    /// Returns this policy with other terms of a limit, in the words of a policy file: `limit`, `penalty`, `ban`, `count`
    /// and `mode`, a line each. Text without `=` is a quantity. Terms that aren't given stay. In a list of limits, one
    /// quantity replaces that of the limit; other terms apply to all of the list.
    ///
    /// ```
    /// use tidegate_policy::{Policy, PolicySources};
    ///
    /// let text = "[inbound.action.login]\nlimit = \"5 per 60s\"\nban = \"10m\"\n";
    /// let policy = Policy::load(PolicySources::new().file("tidegate.toml", text))?;
    /// let (login, _) = policy.plan().limits().iter().next().expect("a limit");
    /// let edited = policy.with_limit_terms(login, "3 per 60s")?;
    /// assert_eq!(edited.policy.plan().limit_info(login).quantity().to_string(), "3 per 60s");
    /// assert_eq!(edited.toml, "[inbound.action.login]\nlimit = \"3 per 60s\"\n");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The terms aren't valid in the place of the limit; all errors are reported.
    pub fn with_limit_terms(&self, limit: LimitId, terms: &str) -> Result<EditedLimit, LimitTermsError> {
        let source = self.source.as_deref().ok_or(LimitTermsError::NoText)?;
        let (mut texts, mut root) = (source.texts.clone(), source.root.clone());
        let terms = parse_file(&mut texts, "terms", as_lines(terms).as_bytes()).map_err(Errors::new)?;
        if let Some(fixed) = terms.entries.iter().find(|entry| FIXED_KEYS.contains(&&*entry.key)) {
            return Err(LimitTermsError::FixedKey { key: fixed.key.clone() });
        }
        let info = self.plan.limit_info(limit);
        let action = info.action().map(|action| self.plan.action(action).name());
        let inbound = root.table_mut("inbound");
        let section = match action {
            Some(name) => inbound.and_then(|inbound| inbound.table_mut("action")?.table_mut(name)),
            None => inbound.and_then(|inbound| inbound.table_mut("global")),
        };
        let section = section.ok_or(LimitTermsError::NoText)?;
        let mut toml = match action {
            Some(name) if name.contains('.') => format!("[inbound.action.{}]\n", toml_string(name)),
            Some(name) => format!("[inbound.action.{name}]\n"),
            None => "[inbound.global]\n".to_owned(),
        };
        let changed = set_terms(section, info.place, &terms);
        let before = source_section(&source.root, action).map_or(&[][..], |section| &section.entries);
        let variable = |entry: &TomlEntry| {
            let text = texts.get(entry.node.at);
            (text.kind == SourceKind::Variable).then_some(text.name.as_str())
        };
        let is_dropped = |entry: &&TomlEntry| section.node(&entry.key).is_none();
        let is_changed = |entry: &TomlEntry| changed.contains(&entry.key);
        let dropped = before.iter().filter(|entry| is_dropped(entry) && variable(entry).is_none());
        let dropped: Vec<String> = dropped.map(|entry| format!("`{}`", entry.key)).collect();
        if !dropped.is_empty() {
            toml.push_str(&format!("# the whole section, without {}\n", dropped.join(", ")));
        }
        for entry in before.iter().filter(|entry| is_dropped(entry) || is_changed(entry)) {
            if let Some(name) = variable(entry) {
                toml.push_str(&format!("# instead of the variable {name}\n"));
            }
        }
        for entry in &section.entries {
            if is_changed(entry) || (!dropped.is_empty() && variable(entry).is_none()) {
                toml.push_str(&format!("{} = {}\n", entry.key, to_toml(&texts, &entry.node)));
            }
        }
        let plan = Arc::new(read::plan(&texts, &root, self)?);
        Ok(EditedLimit { policy: Self { plan, ..self.clone() }, toml })
    }
}

/// The terms as lines of TOML.
fn as_lines(terms: &str) -> String {
    let terms = terms.trim();
    match terms.chars().next() {
        _ if terms.contains('=') => terms.to_owned(),
        Some('"' | '\'' | '[') => format!("limit = {terms}"),
        _ => format!("limit = {}", toml_string(terms)),
    }
}

fn source_section<'r>(root: &'r TomlTable, action: Option<&str>) -> Option<&'r TomlTable> {
    let inbound = root.table("inbound")?;
    match action {
        Some(name) => inbound.table("action")?.table(name),
        None => inbound.table("global"),
    }
}

/// Sets terms of the limit at this place, and returns the keys of the section that have changed.
fn set_terms(section: &mut TomlTable, place: LimitPlace, terms: &TomlTable) -> Vec<String> {
    let items = section.node("limits").map(|limits| limits.items().len());
    let is_ipv6 = place.group >= items.unwrap_or(1);
    let item_keys = settings::table_keys(ITEM);
    let section_keys = settings::table_keys("inbound.action.*");
    let mut changed: Vec<String> = Vec::new();
    for entry in &terms.entries {
        let mut entry = entry.clone();
        if is_ipv6 && entry.key == "limit" {
            "ipv6_network".clone_into(&mut entry.key);
        }
        let key = entry.key.as_str();
        let is_in_item = items.is_some() && !is_ipv6 && (item_keys.contains(&key) || !section_keys.contains(&key));
        let changed_key = if is_in_item { "limits" } else { key };
        if !changed.iter().any(|known| known == changed_key) {
            changed.push(changed_key.to_owned());
        }
        match is_in_item.then(|| item_mut(section, place.group)).flatten() {
            Some(item) => set_term(item, place.quantity, entry),
            None => set_term(section, place.quantity, entry),
        }
    }
    changed
}

fn item_mut(section: &mut TomlTable, index: usize) -> Option<&mut TomlTable> {
    match &mut section.get_mut("limits")?.node.value {
        TomlValue::List(items) => items.get_mut(index)?.as_table_mut(),
        _ => None,
    }
}

/// Sets a term. A single quantity takes the place of the limit's own in a list.
fn set_term(table: &mut TomlTable, quantity: usize, entry: TomlEntry) {
    match entry.key.as_str() {
        "ban" => table.remove("penalty"),
        "penalty" => table.remove("ban"),
        _ => {}
    }
    let is_list = matches!(entry.node.value, TomlValue::List(_));
    if matches!(entry.key.as_str(), "limit" | "ipv6_network")
        && !is_list
        && let Some(TomlValue::List(list)) = table.get_mut(&entry.key).map(|known| &mut known.node.value)
        && list.len() > 1
        && let Some(own) = list.get_mut(quantity)
    {
        *own = entry.node;
        return;
    }
    table.merge(&TomlTable { entries: vec![entry] }, 0);
}

/// A value as TOML on one line.
fn to_toml(texts: &SourceTexts, node: &TomlNode) -> String {
    match &node.value {
        TomlValue::String(text) => toml_string(text),
        TomlValue::List(items) => {
            let items: Vec<String> = items.iter().map(|item| to_toml(texts, item)).collect();
            format!("[{}]", items.join(", "))
        }
        TomlValue::Table(table) => {
            let entry = |entry: &TomlEntry| format!("{} = {}", entry.key, to_toml(texts, &entry.node));
            let entries: Vec<String> = table.entries.iter().map(entry).collect();
            format!("{{ {} }}", entries.join(", "))
        }
        _ => texts.text_at(node.at).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicySources;

    const TEXT: &str = r#"
        [inbound.global]
        limit = "100 per 1m"
        [inbound.action.login]
        limit = ["5 per 60s", "20 per 1h"]
        penalty = { base = "2m", cap = "1h" }
        [inbound.action.search]
        limits = [{ name = "each", limit = "9 per 1s" }, { name = "all", key = ["host"], limit = "90 per 1s", ban = "1m" }]
        ipv6_network = "900 per 1s"
        [inbound.action.api]
        preset = "api_call"
    "#;

    const VARIABLES: [(&str, &str); 2] =
        [("TIDEGATE__INBOUND__GLOBAL__LIMIT", "200 per 1m"), ("TIDEGATE__INBOUND__ACTION__API__BAN", "7m")];

    fn description(policy: &Policy, limit: &str) -> String {
        let infos = policy.plan().active_limits().map(|(id, _)| policy.plan().limit_info(id));
        infos.filter(|info| info.name() == limit).map(|info| info.description().to_owned()).collect()
    }

    fn edit(limit: &str, terms: &str) -> Result<(String, String), LimitTermsError> {
        let policy = Policy::load(PolicySources::new().file("test.toml", TEXT).env(VARIABLES)).expect("a policy");
        let mut limits = policy.plan().active_limits();
        let (id, _) = limits.find(|(id, _)| policy.plan().limit_info(*id).name() == limit).expect("a limit");
        let edited = policy.with_limit_terms(id, terms)?;
        assert!(policy.plan().counts_same_requests(edited.policy.plan()));
        Ok((description(&edited.policy, limit), edited.toml))
    }

    /// The policy file after its user has written the lines.
    fn write_lines(toml: &str) -> String {
        let (header, lines) = toml.split_once('\n').expect("a section");
        let key = |line: &str| line.split_once('=').map(|(key, _)| key.trim().to_owned());
        let keys: Vec<String> = lines.lines().filter_map(key).collect();
        let is_whole = lines.starts_with("# the whole section");
        let (mut text, mut is_here) = (String::new(), false);
        for line in TEXT.lines().map(str::trim) {
            is_here = if line.starts_with('[') { line == header } else { is_here };
            if line == header {
                text.push_str(toml);
            } else if !is_here || !(is_whole || key(line).is_some_and(|key| keys.contains(&key))) {
                text.push_str(&format!("{line}\n"));
            }
        }
        text
    }

    #[test]
    fn terms_that_are_not_given_stay() {
        let text =
            "[inbound]\nmode = \"shadow\"\n[inbound.global]\nlimit = \"9/s\"\n[inbound.action.a]\nlimit = \"5/s\"\n";
        let policy = Policy::load(PolicySources::new().file("test.toml", text)).expect("a policy");
        for (id, limit) in policy.plan().active_limits() {
            let edited = policy.with_limit_terms(id, "7/s").expect("an edited policy");
            let other = edited.policy.plan().limits().get(id).expect("the limit");
            assert_eq!((other.is_shadow(), other.penalty()), (true, limit.penalty()));
        }
    }

    #[test]
    fn each_limit_takes_terms_in_its_place() {
        for (limit, terms, description, toml) in [
            (
                "login.2",
                "10 per 1h",
                "1 h (10, and one after each block); over that, blocks of 120 s, 4 min … 1 h;",
                "[inbound.action.login]\nlimit = [\"5 per 60s\", \"10 per 1h\"]\n",
            ),
            (
                "login.1",
                "ban = \"5m\"\nmode = \"shadow\"",
                "over that, blocked for 5 min",
                "[inbound.action.login]\n# the whole section, without `penalty`\n\
                 limit = [\"5 per 60s\", \"20 per 1h\"]\nban = \"5m\"\nmode = \"shadow\"\n",
            ),
            (
                "search.all",
                "limit = \"50 per 1s\"",
                "at most 50 in any 1 s; over that, blocked for 60 s",
                "[inbound.action.search]\nlimits = [{ name = \"each\", limit = \"9 per 1s\" }, \
                 { name = \"all\", key = [\"host\"], limit = \"50 per 1s\", ban = \"1m\" }]\n",
            ),
            (
                "search.ipv6",
                "500 per 1s",
                "at most 500 in any 1 s",
                "[inbound.action.search]\nipv6_network = \"500 per 1s\"\n",
            ),
            (
                "global",
                "\"300 per 1m\"",
                "at most 300 in any 60 s",
                "[inbound.global]\n# instead of the variable TIDEGATE__INBOUND__GLOBAL__LIMIT\nlimit = \"300 per 1m\"\n",
            ),
        ] {
            let (found_description, found_toml) = edit(limit, terms).unwrap_or_else(|error| panic!("{limit}: {error}"));
            assert!(found_description.contains(description), "{limit}: {found_description}");
            assert_eq!(found_toml, toml, "{limit}");
        }
        assert!(edit("api", "7 per 60s").is_ok());
    }

    #[test]
    fn written_lines_make_the_tried_policy() {
        for (limit, terms) in [
            ("login.2", "10 per 1h"),
            ("login.1", "ban = \"5m\""),
            ("login.1", "ban = \"5m\"\nmode = \"shadow\""),
            ("search.all", "limit = \"50 per 1s\""),
            ("search.all", "penalty = { base = \"1m\" }"),
            ("search.ipv6", "500 per 1s"),
            ("global", "limit = \"300 per 1m\"\npenalty = { base = \"5s\" }"),
            ("api", "penalty = { base = \"5s\", cap = \"1m\" }"),
        ] {
            let (tried, toml) = edit(limit, terms).unwrap_or_else(|error| panic!("{limit}: {error}"));
            let text = write_lines(&toml);
            let variables = VARIABLES.into_iter().filter(|(name, _)| !toml.contains(name));
            let written = Policy::load(PolicySources::new().file("test.toml", &text).env(variables));
            let written = written.unwrap_or_else(|errors| panic!("{terms}: {errors}\n{text}"));
            assert_eq!(description(&written, limit), tried, "{text}");
        }
    }

    #[test]
    fn wrong_terms_are_the_readers_errors() {
        let error = |terms| edit("login.1", terms).expect_err("an error").to_string();
        assert!(error("limt = \"5 per 60s\"").contains("did you mean `limit`?"), "{}", error("limt = \"5 per 60s\""));
        assert!(error("5 par 60s").contains("terms:1"), "{}", error("5 par 60s"));
        assert_eq!(
            error("key = [\"key\"]"),
            "`key` is no term of a limit; its terms are `limit`, `penalty`, `ban`, `count` and `mode`"
        );
    }

    #[test]
    fn a_plan_with_another_key_counts_otherwise() {
        let read = |text: &str| PolicySources::new().file("test.toml", text);
        let policy = Policy::load(read(TEXT)).expect("a policy");
        for (from, to, is_same) in [
            ("9 per 1s", "8 per 1s", true),
            ("key = [\"host\"]", "key = [\"method\"]", false),
            ("ipv6_network = \"900 per 1s\"", "", true),
            ("preset = \"api_call\"", "preset = \"api_call\"\ncost = 2", false),
            ("[inbound.action.api]", "[inbound.action.other]", false),
            ("[inbound.global]", "[inbound]\nallow = [\"10.0.0.0/8\"]\n[inbound.global]", false),
        ] {
            let next = policy.load_next(read(&TEXT.replace(from, to))).unwrap_or_else(|errors| panic!("{errors}"));
            assert_eq!(policy.plan().counts_same_requests(next.plan()), is_same, "{to}");
        }
    }
}
