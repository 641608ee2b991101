//! Environment variables. They are merged over the file before any check, so both go through the same checks.

mod prefixed;

use std::fmt;
use std::ops::{Range, RangeInclusive};

use tidegate_core::MAX_LIMIT;

use crate::document::{SourceKind, SourceText, SourceTexts, TextRange, TomlNode, TomlTable, TomlValue, parse_value};
use crate::error::{Error, ErrorList, Note, SECRET_SETTINGS, WEBHOOK, is_secret_source, quoted};
use crate::nearest::{fold_name, nearest};
use crate::quantity::Quantity;
use crate::settings::{self, PLAIN_VARIABLES, SettingType, VARIABLE_PREFIX};

/// The window of `GLOBAL_RATE_LIMIT` if none is set, in seconds.
const DEFAULT_WINDOW_SECS: u64 = 3600;
/// The longest window or block that a plain variable can set, in seconds: ten years.
const MAX_SECS: u64 = 315_360_000;

/// The prefix of Tidegate's own variables, in any case. A variable with it that sets no setting is an error.
const RESERVED_PREFIX: &str = "TIDEGATE_";
/// Variables with this prefix that the test suite reads; a policy ignores them.
const TEST_VARIABLES: [&str; 4] = ["TIDEGATE_REQUIRE_ALL", "TIDEGATE_FULL", "TIDEGATE_SEED", "TIDEGATE_FUZZ_SECONDS"];

/// True if a policy looks at the variable.
pub(crate) fn is_policy_variable(name: &str) -> bool {
    has_reserved_prefix(name) && !TEST_VARIABLES.contains(&name)
        || PLAIN_VARIABLES.iter().any(|(plain, _, _)| *plain == name)
}

fn has_reserved_prefix(name: &str) -> bool {
    name.get(..RESERVED_PREFIX.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(RESERVED_PREFIX))
        && !is_service_link(name)
}

/// True for the variables that Kubernetes sets in each pod for a Service called `tidegate`, such as `TIDEGATE_PORT`.
fn is_service_link(name: &str) -> bool {
    let rest = name.get(RESERVED_PREFIX.len()..).unwrap_or_default();
    ["SERVICE_HOST", "SERVICE_PORT", "PORT"].iter().any(|link| {
        rest.strip_prefix(link).is_some_and(|rest| rest.is_empty() || rest.starts_with('_') && !rest.starts_with("__"))
    })
}

/// A section of the policy with members that have names.
#[derive(Clone, Copy)]
struct NamedSection {
    /// The section around it, if there is one.
    section: Option<&'static str>,
    /// The key of the members, which is also the word for a member in messages.
    key: &'static str,
}

const NAMED_SECTIONS: [NamedSection; 3] = [
    NamedSection { section: Some("inbound"), key: "action" },
    NamedSection { section: Some("outbound"), key: "provider" },
    NamedSection { section: None, key: "alert" },
];

impl NamedSection {
    /// The words of a setting's path below the names of the members: the member's own name, and the rest.
    fn split_path(self, path: &[String]) -> Option<(&String, &[String])> {
        let path = match (self.section, path) {
            (Some(section), [first, rest @ ..]) => (section == first).then_some(rest)?,
            (_, path) => path,
        };
        let [key, member, rest @ ..] = path else { return None };
        (self.key == key && !rest.is_empty()).then_some((member, rest))
    }

    fn members(self, root: &TomlTable) -> Vec<String> {
        let section = self.section.map_or(Some(root), |section| root.table(section));
        let members = section.and_then(|section| section.table(self.key));
        members.map(|members| members.entries.iter().map(|entry| entry.key.clone()).collect()).unwrap_or_default()
    }

    fn path(self, rest: &[String]) -> String {
        let section = self.section.map_or_else(String::new, |section| format!("{section}."));
        format!("{section}{}.*.{}", self.key, rest.join("."))
    }
}

pub(crate) fn is_secret_key(key: &str) -> bool {
    key == WEBHOOK || SECRET_SETTINGS.contains(&key)
}

/// The variables that secrets are read from; they may have any name.
fn secret_variables(root: &TomlTable, env: &[(String, String)]) -> Vec<String> {
    fn texts<'t>(node: &'t TomlNode, found: &mut Vec<&'t str>) {
        match &node.value {
            TomlValue::String(text) => found.push(text),
            TomlValue::List(items) => items.iter().for_each(|item| texts(item, found)),
            TomlValue::Table(table) => table.entries.iter().for_each(|entry| texts(&entry.node, found)),
            _ => {}
        }
    }
    fn holders<'t>(table: &'t TomlTable, found: &mut Vec<&'t str>) {
        for entry in &table.entries {
            match entry.node.as_table() {
                _ if SECRET_SETTINGS.contains(&entry.key.as_str()) => texts(&entry.node, found),
                None if entry.key == WEBHOOK => texts(&entry.node, found),
                Some(table) => holders(table, found),
                None => {}
            }
        }
    }
    let mut sources = Vec::new();
    holders(root, &mut sources);
    let holds = |name: &str| name.rsplit("__").next().is_some_and(|last| is_secret_key(&last.to_ascii_lowercase()));
    let in_env = env.iter().filter(|(name, _)| holds(name)).map(|(_, value)| value);
    // A source may also be inside a table or a list, as in `{ pin = "env:PIN" }`.
    sources.extend(in_env.flat_map(|value| value.split([',', '"', '\'', '[', ']', ' ']).map(str::trim)));
    let names = sources.into_iter().filter_map(|source| source.strip_prefix("env:"));
    names.map(|name| name.split('[').next().unwrap_or(name).to_owned()).collect()
}

/// The name of an action or a provider in the form that a variable's name contains, in lower case.
pub(crate) fn fold_member_name(name: &str) -> String {
    fold_name(name).replace('.', "_")
}

#[derive(Clone, Default)]
pub(crate) struct EnvVars {
    pub(crate) variables: Vec<(String, String)>,
    /// The custom prefix of further variables.
    pub(crate) prefix: Option<String>,
}

/// Shows only the names, because any value may be a secret.
impl fmt::Debug for EnvVars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.variables.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("EnvVars").field("variables", &names).field("prefix", &self.prefix).finish()
    }
}

/// Merges the variables over the table of the file.
pub(crate) fn apply_variables(
    texts: &mut SourceTexts,
    errors: &mut ErrorList,
    notes: &mut Vec<Note>,
    root: &mut TomlTable,
    env: EnvVars,
) {
    let is_set = |value: &str| !value.trim().is_empty();
    let EnvVars { variables: mut env, prefix } = env;
    let is_prefixed = |name: &str| prefix.as_ref().is_some_and(|prefix| prefixed::is_prefixed(name, prefix));
    let prefixed: Vec<(String, String)> =
        env.iter().filter(|(name, value)| is_prefixed(name) && is_set(value)).cloned().collect();
    for (name, value) in env.iter().filter(|(name, value)| is_set(value) && !is_policy_variable(name)) {
        let plain = PLAIN_VARIABLES.iter().map(|(plain, _, _)| *plain);
        let has_begin = ["GLOBAL_RATE_", "BACKOFF_"].iter().any(|begin| name.starts_with(begin));
        if let Some(meant) = nearest(name, plain).filter(|_| has_begin) {
            let at = texts.add(SourceText::new(SourceKind::Variable, name, value, true));
            notes.push(Note::new(texts, at, &format!("no effect: no variable has this name; did you mean `{meant}`?")));
        }
    }
    env.retain(|(name, value)| is_policy_variable(name) && is_set(value));
    env.sort();
    let mut secrets = secret_variables(root, &env);
    secrets.extend(prefixed.iter().map(|(name, _)| name.clone()));
    let mut merger = VariableMerger { texts, errors, notes, root };
    merger.apply_plain_variables(&env);
    if let Some(prefix) = prefix {
        merger.apply_prefixed_variables(&prefixed, &prefix);
    }
    let mut seen: Vec<String> = Vec::new();
    for (name, value) in env {
        if let Some(path) = name.strip_prefix(VARIABLE_PREFIX) {
            let path: Vec<String> = path.split("__").map(str::to_ascii_lowercase).collect();
            if seen.contains(&path.join(".")) {
                let at = merger.add_source(&name, &value, true);
                merger.report(at, format!("{name} sets the same as a variable before it"), "one of them");
                continue;
            }
            seen.push(path.join("."));
            if let Err(error) = merger.set_variable(&name, &value, &path) {
                merger.errors.add(|| error);
            }
        } else if has_reserved_prefix(&name) && !secrets.contains(&name) {
            let error = merger.unknown_variable_error(&name, &value);
            merger.errors.add(|| error);
        }
    }
}

/// Merges variables over the table of a file, and collects the errors in them.
struct VariableMerger<'a> {
    texts: &'a mut SourceTexts,
    errors: &'a mut ErrorList,
    notes: &'a mut Vec<Note>,
    root: &'a mut TomlTable,
}

impl VariableMerger<'_> {
    fn add_source(&mut self, name: &str, value: &str, secret: bool) -> TextRange {
        self.texts.add(SourceText::new(SourceKind::Variable, name, value, secret))
    }

    /// Adds a source, and returns the range of its value without the white space around it.
    fn add_trimmed(&mut self, name: &str, value: &str, secret: bool) -> TextRange {
        let at = self.add_source(name, value, secret);
        self.texts.subrange(at, trimmed_range(value, 0))
    }

    fn report(&mut self, at: TextRange, message: impl Into<String>, expected: impl Into<String>) {
        self.errors.add(|| Error::new(self.texts, at, message, expected));
    }

    fn note(&mut self, at: TextRange, message: &str) {
        self.notes.push(Note::new(self.texts, at, message));
    }

    fn set_variable(&mut self, name: &str, value: &str, path: &[String]) -> Result<(), Error> {
        // In `here` the member's own spelling replaces the variable's; in `setting_path` a `*` does.
        let (mut here, mut setting_path) = (path.to_vec(), path.join("."));
        let split = |named: NamedSection| Some((named, named.split_path(path)?));
        if let Some((named, (member, rest))) = NAMED_SECTIONS.into_iter().find_map(split) {
            let key = named.key;
            let members = named.members(self.root);
            setting_path = named.path(rest);
            let Some(known) = members.iter().find(|known| fold_member_name(known) == fold_member_name(member)) else {
                // The value of an unknown name may be anything, even a secret, so it isn't shown.
                let at = self.add_source(name, value, true);
                let meant = nearest(member, members.iter().map(String::as_str));
                let meant = meant.map(|known| settings::variable_name(&setting_path, known));
                let message = format!("{name} names no {key} of the policy");
                let error = Error::new(self.texts, at, message, describe_members(key, &members));
                return Err(error.did_you_mean(meant.as_deref()));
            };
            here[path.len() - rest.len() - 1].clone_from(known);
        }
        let Some(setting) = settings::find(&setting_path).filter(|setting| setting.variable().is_some()) else {
            return Err(self.unknown_variable_error(name, value));
        };
        let holds_secrets = setting.path().rsplit('.').next().is_some_and(is_secret_key);
        let at = self.add_trimmed(name, value, holds_secrets && !is_secret_source(&in_brackets(value)));
        let node = parse_as(self.texts, at, setting.value_type)?;
        let (last, sections) = here.split_last().expect("invariant: a setting's path has at least one name");
        let mut table = &mut *self.root;
        for section in sections {
            if section == "penalty" {
                table.remove("ban");
            }
            table = table.table_or_insert(section, at).ok_or_else(|| {
                let message = format!("{name} can't be set: `{section}` is no table in the file");
                Error::new(self.texts, at, message, "a table")
            })?;
        }
        // If two settings exclude each other, the environment's replaces the file's.
        match last.as_str() {
            "ban" => table.remove("penalty"),
            "penalty" => table.remove("ban"),
            // A list says more than one variable can: keys, penalties, several limits.
            "limit" if table.get("limits").is_some() => {
                let message = format!("{name} would take the place of the whole list `limits` in the file");
                let error = Error::new(self.texts, at, message, "no variable here, or one for the whole list");
                return Err(error.help(format!("{name}S sets the whole list")));
            }
            "limits" => table.remove("limit"),
            _ => {}
        }
        table.insert(last, node.at, node.value);
        Ok(())
    }

    /// The error of a variable that sets nothing. Its value may be a secret, so it isn't shown.
    fn unknown_variable_error(&mut self, name: &str, value: &str) -> Error {
        let at = self.add_source(name, value, true);
        // Correct the prefix, whatever its case and its number of underscores.
        let rest = name.get(RESERVED_PREFIX.len()..).unwrap_or_default().trim_start_matches('_').to_ascii_uppercase();
        let upper = format!("{VARIABLE_PREFIX}{rest}");
        let members = NAMED_SECTIONS.map(|named| (named.path(&[]), named.members(self.root)));
        let names: Vec<String> = settings::all()
            .filter_map(|setting| setting.variable().map(|variable| (setting.path(), variable)))
            .flat_map(|(path, variable)| match members.iter().find(|(begin, _)| path.starts_with(begin)) {
                Some((_, members)) => {
                    members.iter().take(50).map(|member| settings::variable_name(path, member)).collect()
                }
                None => vec![variable],
            })
            .collect();
        let mut known = names.iter().map(String::as_str);
        // A name that differs only in underscores is preferred to any that is merely similar.
        let bare = |name: &str| name.replace('_', "");
        let plain = PLAIN_VARIABLES.iter().map(|(plain, _, _)| *plain).find(|plain| bare(plain) == bare(&rest));
        let same = known.clone().find(|known| bare(known) == bare(&upper)).or(plain).map(str::to_owned);
        // Two names in one section differ in their last word, so last words are compared, within the section first.
        let (section, word) = upper.rsplit_once("__").unwrap_or(("", &upper));
        let siblings = known.clone().filter_map(|name| name.rsplit_once("__"));
        let siblings: Vec<&str> = siblings.filter(|(inside, _)| *inside == section).map(|(_, word)| word).collect();
        let sibling = || nearest(word, siblings).map(|word| format!("{section}__{word}"));
        let meant = same.or_else(sibling).or_else(|| nearest(&upper, &mut known).map(str::to_owned));
        let message = format!("unknown environment variable {name}");
        Error::new(self.texts, at, message, "the name of a setting").did_you_mean(meant.as_deref())
    }

    /// Applies `GLOBAL_RATE_LIMIT`, `GLOBAL_RATE_WINDOW`, `BACKOFF_BASE` and `BACKOFF_MAX`.
    fn apply_plain_variables(&mut self, env: &[(String, String)]) {
        let limit = self.plain_number(env, "GLOBAL_RATE_LIMIT", 0..=MAX_LIMIT, "a number of calls");
        let window = self.plain_number(env, "GLOBAL_RATE_WINDOW", 1..=MAX_SECS, "a number of seconds");
        let base = self.plain_number(env, "BACKOFF_BASE", 1..=86_400, "the base of the power, in seconds");
        let cap = self.plain_number(env, "BACKOFF_MAX", 1..=MAX_SECS, "a number of seconds");
        let has_inbound = self.root.get("inbound").is_some()
            || env.iter().any(|(name, _)| name.starts_with(&format!("{VARIABLE_PREFIX}INBOUND__")));
        if let Some((at, _)) = limit.filter(|_| !has_inbound && self.root.get("outbound").is_some()) {
            self.note(at, "it limits the calls of clients to this gate, and none to other people's APIs");
        }
        self.apply_global_limit(limit, window);
        let penalties = growing_penalties(self.root);
        if penalties.is_empty() {
            for (at, _) in [base, cap].into_iter().flatten() {
                self.note(at, "no effect: no limit has a `penalty`, whose blocks it would set");
            }
            return;
        }
        for penalty in penalties {
            if let Some((at, base)) = base {
                penalty.insert("base", at, TomlValue::String(format!("{base}s")));
                penalty.insert("factor", at, TomlValue::Integer(i64::try_from(base).ok()));
            }
            if let Some((at, cap)) = cap {
                penalty.insert("cap", at, TomlValue::String(format!("{cap}s")));
            }
        }
    }

    /// The number in a plain variable, with its place; `None` if the variable isn't set or is wrong.
    fn plain_number(
        &mut self,
        env: &[(String, String)],
        name: &str,
        range: RangeInclusive<u64>,
        what: &str,
    ) -> Option<(TextRange, u64)> {
        let (_, value) = env.iter().find(|(found, _)| found == name)?;
        let at = self.add_trimmed(name, value, false);
        let number = value.trim().parse();
        if let Some(number) = number.as_ref().ok().filter(|number| range.contains(number)) {
            return Some((at, *number));
        }
        let wrong = if number.is_ok() { "out of range" } else { "no whole number" };
        let message = format!("{name} is {}, which is {wrong}", quoted(value.trim()));
        self.report(at, message, format!("{what}, {} to {}", range.start(), range.end()));
        None
    }

    fn apply_global_limit(&mut self, limit: Option<(TextRange, u64)>, window: Option<(TextRange, u64)>) {
        let Some((at, _)) = limit.or(window) else { return };
        let written = self.root.table("inbound").and_then(|inbound| inbound.table("global"));
        let in_file = match written.and_then(|global| global.text("limit")).and_then(|text| text.parse().ok()) {
            Some(Quantity::Window { limit, window }) => Some((limit, window)),
            _ => None,
        };
        let Some(count) = limit.map(|(_, limit)| limit).or(in_file.map(|(limit, _)| limit)) else {
            let expected = "GLOBAL_RATE_LIMIT beside it, or a limit such as \"1000 per 1h\" in [inbound.global]";
            return self.report(at, "GLOBAL_RATE_WINDOW is set, but there is no global limit for it", expected);
        };
        let length = match (window, in_file) {
            (Some((_, secs)), _) => format!("{secs}s"),
            (None, Some((_, window))) => window.to_string(),
            (None, None) => format!("{DEFAULT_WINDOW_SECS}s"),
        };
        let is_new = written.is_none();
        let inbound = self.root.table_or_insert("inbound", at);
        // If the file has something else there, the reader reports that.
        let Some(global) = inbound.and_then(|inbound| inbound.table_or_insert("global", at)) else { return };
        global.insert("limit", at, TomlValue::String(format!("{count} per {length}")));
        if is_new {
            global.insert("penalty", at, TomlValue::Table(TomlTable::default()));
        }
    }
}

/// A value with the brackets that a list may lack.
fn in_brackets(value: &str) -> String {
    let value = value.trim();
    if value.starts_with('[') { value.to_owned() } else { format!("[{value}]") }
}

fn describe_members(what: &str, members: &[String]) -> String {
    let names: Vec<&str> = members.iter().take(8).map(String::as_str).collect();
    match names.as_slice() {
        [] => format!("a policy with {what}s; variables change {what}s and never add one"),
        names if names.len() < members.len() => format!("one of {} …", names.join(", ")),
        names => format!("one of {}", names.join(", ")),
    }
}

/// The range of a text without the white space around it; the text begins at `begin`.
fn trimmed_range(text: &str, begin: usize) -> Range<usize> {
    let start = begin + text.len() - text.trim_start().len();
    start..start + text.trim().len()
}

/// Parses a variable's value in the form of its setting. A value that doesn't fit stays text; the reader refuses it.
pub(crate) fn parse_as(texts: &SourceTexts, at: TextRange, form: SettingType) -> Result<TomlNode, Error> {
    let raw = texts.text_at(at);
    let first = raw.chars().next();
    let text = |at: TextRange| TomlNode { at, value: TomlValue::String(texts.text_at(at).to_owned()) };
    match form {
        SettingType::Text if matches!(first, Some('"' | '\'')) => parse_value(texts, at),
        SettingType::Text => Ok(text(at)),
        SettingType::Strings | SettingType::Integer if first == Some('[') => parse_value(texts, at),
        SettingType::Strings => {
            let mut items = Vec::new();
            let mut begin = at.start;
            for piece in raw.split(',') {
                let item = texts.subrange(at, trimmed_range(piece, begin));
                if matches!(texts.text_at(item).chars().next(), Some('"' | '\'')) {
                    items.push(parse_value(texts, item)?);
                } else if !texts.text_at(item).is_empty() {
                    items.push(text(item));
                }
                begin += piece.len() + 1;
            }
            Ok(TomlNode { at, value: TomlValue::List(items) })
        }
        SettingType::Flag => Ok(match raw {
            "true" => TomlNode { at, value: TomlValue::Boolean(true) },
            "false" => TomlNode { at, value: TomlValue::Boolean(false) },
            _ => text(at),
        }),
        SettingType::Integer => {
            let is_number = raw.starts_with(|digit: char| digit.is_ascii_digit())
                && raw.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
            if is_number {
                let digits: String = raw.chars().filter(char::is_ascii_digit).collect();
                Ok(TomlNode { at, value: TomlValue::Integer(digits.parse().ok()) })
            } else {
                Ok(text(at))
            }
        }
        SettingType::TableOrTables if matches!(first, Some('{' | '[')) => parse_value(texts, at),
        SettingType::TableOrTables => Ok(text(at)),
    }
}

fn growing_penalties(root: &mut TomlTable) -> Vec<&mut TomlTable> {
    fn collect<'t>(table: &'t mut TomlTable, found: &mut Vec<&'t mut TomlTable>) {
        for entry in &mut table.entries {
            match &mut entry.node.value {
                TomlValue::Table(penalty) if entry.key == "penalty" => found.push(penalty),
                TomlValue::List(items) if entry.key == "limits" => {
                    items.iter_mut().filter_map(TomlNode::as_table_mut).for_each(|limit| collect(limit, found));
                }
                _ => {}
            }
        }
    }
    let mut found = Vec::new();
    for entry in root.table_mut("inbound").into_iter().flat_map(|inbound| &mut inbound.entries) {
        match (entry.key.as_str(), entry.node.as_table_mut()) {
            ("global", Some(global)) => collect(global, &mut found),
            ("action", Some(actions)) => {
                let actions = actions.entries.iter_mut().filter_map(|action| action.node.as_table_mut());
                actions.for_each(|action| collect(action, &mut found));
            }
            _ => {}
        }
    }
    found
}
