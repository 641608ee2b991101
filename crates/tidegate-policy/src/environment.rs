//! Environment variables. They are merged over the file before any check, so both go through the same checks.

mod prefixed;

use std::fmt;
use std::ops::Range;

use tidegate_core::MAX_LIMIT;

use crate::document::{SourceKind, SourceText, SourceTexts, TextRange, TomlNode, TomlTable, TomlValue, parse_value};
use crate::error::{Error, SECRET_SETTINGS, is_secret_source, quoted};
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
}

/// A section of the policy with members that have names.
#[derive(Clone, Copy)]
struct NamedSection {
    section: &'static str,
    /// The key in the section, which is also the word for a member in messages.
    key: &'static str,
}

const NAMED_SECTIONS: [NamedSection; 2] =
    [NamedSection { section: "inbound", key: "action" }, NamedSection { section: "outbound", key: "provider" }];

impl NamedSection {
    fn members(self, root: &TomlTable) -> Vec<String> {
        let members = root.table(self.section).and_then(|section| section.table(self.key));
        members.map(|members| members.entries.iter().map(|entry| entry.key.clone()).collect()).unwrap_or_default()
    }

    fn path(self, rest: &[String]) -> String {
        format!("{}.{}.*.{}", self.section, self.key, rest.join("."))
    }
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
                Some(table) => holders(table, found),
                None => {}
            }
        }
    }
    let mut sources = Vec::new();
    holders(root, &mut sources);
    let holds = |name: &str| {
        name.rsplit("__").next().is_some_and(|last| SECRET_SETTINGS.contains(&&*last.to_ascii_lowercase()))
    };
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

/// The environment variables that a policy is read with.
#[derive(Clone, Default)]
pub(crate) struct EnvVars {
    pub(crate) variables: Vec<(String, String)>,
    /// The custom prefix of further variables.
    pub(crate) prefix: Option<String>,
}

impl EnvVars {
    fn is_prefixed(&self, name: &str) -> bool {
        self.prefix.as_ref().is_some_and(|prefix| prefixed::is_prefixed(name, prefix))
    }
}

/// Shows only the names, because any value may be a secret.
impl fmt::Debug for EnvVars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.variables.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("EnvVars").field("variables", &names).field("prefix", &self.prefix).finish()
    }
}

/// Merges the variables over the table of the file.
pub(crate) fn apply_variables(texts: &mut SourceTexts, errors: &mut Vec<Error>, root: &mut TomlTable, env: EnvVars) {
    let is_said = |value: &str| !value.trim().is_empty();
    let prefixed: Vec<(String, String)> =
        env.variables.iter().filter(|(name, value)| env.is_prefixed(name) && is_said(value)).cloned().collect();
    let prefix = env.prefix.clone();
    let mut env: Vec<(String, String)> = env.variables;
    env.retain(|(name, value)| is_policy_variable(name) && is_said(value));
    env.sort();
    let mut secrets = secret_variables(root, &env);
    secrets.extend(prefixed.iter().map(|(name, _)| name.clone()));
    apply_plain_variables(texts, errors, root, &env);
    if let Some(prefix) = prefix {
        prefixed::apply_prefixed_variables(texts, errors, root, &prefixed, &prefix);
    }
    let mut seen: Vec<String> = Vec::new();
    for (name, value) in env {
        if let Some(path) = name.strip_prefix(VARIABLE_PREFIX) {
            let path: Vec<String> = path.split("__").map(str::to_ascii_lowercase).collect();
            if seen.contains(&path.join(".")) {
                let at = add_source(texts, &name, &value, true);
                errors.push(Error::new(
                    texts,
                    at,
                    format!("{name} sets the same as a variable before it"),
                    "one of them",
                ));
                continue;
            }
            seen.push(path.join("."));
            if let Err(error) = set_variable(texts, root, &name, &value, &path) {
                errors.push(error);
            }
        } else if has_reserved_prefix(&name) && !secrets.contains(&name) {
            let at = add_source(texts, &name, &value, true);
            errors.push(unknown_variable_error(texts, at, &name, root));
        }
    }
}

fn add_source(texts: &mut SourceTexts, name: &str, value: &str, secret: bool) -> TextRange {
    texts.add(SourceText::new(SourceKind::Variable, name, value, secret))
}

/// Sets the setting that one variable names.
fn set_variable(
    texts: &mut SourceTexts,
    root: &mut TomlTable,
    name: &str,
    value: &str,
    path: &[String],
) -> Result<(), Error> {
    // In `here` the member's own spelling replaces the variable's; in `setting_path` a `*` does.
    let (mut here, mut setting_path) = (path.to_vec(), path.join("."));
    if let [section, key, member, rest @ ..] = path
        && let Some(named) = NAMED_SECTIONS.into_iter().find(|named| named.section == section && named.key == key)
        && !rest.is_empty()
    {
        let members = named.members(root);
        setting_path = named.path(rest);
        match members.iter().find(|known| fold_member_name(known) == fold_member_name(member)) {
            Some(known) => here[2].clone_from(known),
            None => {
                // The value of an unknown name may be anything, even a secret, so it isn't shown.
                let at = add_source(texts, name, value, true);
                let meant = nearest(member, members.iter().map(String::as_str));
                let message = format!("{name} names no {key} of the policy");
                let error = Error::new(texts, at, message, describe_members(key, &members));
                return Err(
                    error.did_you_mean(meant.map(|known| settings::variable_name(&setting_path, known)).as_deref())
                );
            }
        }
    }
    let Some(setting) = settings::find(&setting_path).filter(|setting| setting.variable().is_some()) else {
        let at = add_source(texts, name, value, true);
        return Err(unknown_variable_error(texts, at, name, root));
    };
    let holds_secrets = setting.path().rsplit('.').next().is_some_and(|last| SECRET_SETTINGS.contains(&last));
    let at = add_source(texts, name, value, holds_secrets && !is_secret_source(&in_brackets(value)));
    let value_at = trimmed_range(texts, at);
    let node = parse_as(texts, value_at, setting.value_type)?;
    let (last, sections) = here.split_last().expect("invariant: a setting's path has at least one name");
    let mut table = &mut *root;
    for section in sections {
        if section == "penalty" {
            table.remove("ban");
        }
        table = table.table_or_insert(section, value_at).ok_or_else(|| {
            Error::new(texts, value_at, format!("{name} can't be set: `{section}` is no table in the file"), "a table")
        })?;
    }
    // If two settings exclude each other, the environment's replaces the file's.
    match last.as_str() {
        "ban" => table.remove("penalty"),
        "penalty" => table.remove("ban"),
        // A list says more than one variable can: keys, penalties, several limits.
        "limit" if table.get("limits").is_some() => {
            let message = format!("{name} would take the place of the whole list `limits` in the file");
            let error = Error::new(texts, value_at, message, "no variable here, or one for the whole list");
            return Err(error.help(format!("{name}S sets the whole list")));
        }
        "limits" => table.remove("limit"),
        _ => {}
    }
    table.insert(last, node.at, node.value);
    Ok(())
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

fn unknown_variable_error(texts: &SourceTexts, at: TextRange, name: &str, root: &TomlTable) -> Error {
    // Correct the prefix, whatever its case and its number of underscores.
    let rest = name.get(RESERVED_PREFIX.len()..).unwrap_or_default().trim_start_matches('_');
    let upper = format!("{VARIABLE_PREFIX}{}", rest.to_ascii_uppercase());
    let members = NAMED_SECTIONS.map(|named| (format!("{}.{}.", named.section, named.key), named.members(root)));
    let names: Vec<String> = settings::all()
        .filter_map(|setting| setting.variable().map(|variable| (setting.path(), variable)))
        .flat_map(|(path, variable)| match members.iter().find(|(begin, _)| path.starts_with(begin)) {
            Some((_, members)) => members.iter().take(50).map(|member| settings::variable_name(path, member)).collect(),
            None => vec![variable],
        })
        .collect();
    // A name that differs only in underscores is preferred to any that is merely similar.
    let bare = |name: &str| name.replace('_', "");
    let plain =
        PLAIN_VARIABLES.iter().map(|(plain, _, _)| *plain).find(|plain| bare(plain) == bare(rest).to_ascii_uppercase());
    let same = names.iter().map(String::as_str).find(|known| bare(known) == bare(&upper)).or(plain);
    // Two names in one section differ in their last word, so last words are compared, within the section first.
    let (section, word) = upper.rsplit_once("__").unwrap_or(("", &upper));
    let siblings: Vec<&str> = names
        .iter()
        .filter_map(|name| name.rsplit_once("__").filter(|(inside, _)| *inside == section).map(|(_, word)| word))
        .collect();
    let meant = same.map(str::to_owned);
    let meant = meant.or_else(|| nearest(word, siblings).map(|word| format!("{section}__{word}")));
    let meant = meant.or_else(|| nearest(&upper, names.iter().map(String::as_str)).map(str::to_owned));
    Error::new(texts, at, format!("unknown environment variable {name}"), "the name of a setting")
        .did_you_mean(meant.as_deref())
}

/// The range of a value without the white space around it.
fn trimmed_range(texts: &SourceTexts, at: TextRange) -> TextRange {
    let body = texts.text_at(at);
    let start = body.len() - body.trim_start().len();
    texts.subrange(at, start..start + body.trim().len())
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
            let mut begin = at.start();
            for piece in raw.split(',') {
                let place = trimmed_item_range(piece, begin);
                let item = texts.subrange(at, place);
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

fn trimmed_item_range(piece: &str, begin: usize) -> Range<usize> {
    let start = begin + piece.len() - piece.trim_start().len();
    start..start + piece.trim().len()
}

/// Applies `GLOBAL_RATE_LIMIT`, `GLOBAL_RATE_WINDOW`, `BACKOFF_BASE` and `BACKOFF_MAX`.
fn apply_plain_variables(
    texts: &mut SourceTexts,
    errors: &mut Vec<Error>,
    root: &mut TomlTable,
    env: &[(String, String)],
) {
    let mut number = |name: &str, least: u64, most: u64, what: &str| -> Option<(TextRange, u64)> {
        let (_, value) = env.iter().find(|(found, _)| found == name)?;
        let at = add_source(texts, name, value, false);
        let at = trimmed_range(texts, at);
        let raw = texts.text_at(at);
        match raw.parse::<u64>() {
            Ok(number) if (least..=most).contains(&number) => return Some((at, number)),
            Ok(_) => errors.push(Error::new(
                texts,
                at,
                format!("{name} is {}, which is out of range", quoted(raw)),
                format!("{what}, {least} to {most}"),
            )),
            Err(_) => {
                let message = format!("{name} is {}, which is no whole number", quoted(raw));
                errors.push(Error::new(texts, at, message, format!("{what}, {least} to {most}")));
            }
        }
        None
    };
    let limit = number("GLOBAL_RATE_LIMIT", 0, MAX_LIMIT, "a number of calls");
    let window = number("GLOBAL_RATE_WINDOW", 1, MAX_SECS, "a number of seconds");
    let base = number("BACKOFF_BASE", 1, 86_400, "the base of the power, in seconds");
    let cap = number("BACKOFF_MAX", 1, MAX_SECS, "a number of seconds");
    apply_global_limit(texts, errors, root, limit, window);
    if base.is_some() || cap.is_some() {
        for penalty in growing_penalties(root) {
            if let Some((at, base)) = base {
                penalty.insert("base", at, TomlValue::String(format!("{base}s")));
                penalty.insert("factor", at, TomlValue::Integer(i64::try_from(base).ok()));
            }
            if let Some((at, cap)) = cap {
                penalty.insert("cap", at, TomlValue::String(format!("{cap}s")));
            }
        }
    }
}

fn apply_global_limit(
    texts: &SourceTexts,
    errors: &mut Vec<Error>,
    root: &mut TomlTable,
    limit: Option<(TextRange, u64)>,
    window: Option<(TextRange, u64)>,
) {
    let Some((at, _)) = limit.or(window) else {
        return;
    };
    let written = root.table("inbound").and_then(|inbound| inbound.table("global"));
    let in_file = written.and_then(|global| global.node("limit")).and_then(|node| match &node.value {
        TomlValue::String(text) => match text.parse::<Quantity>() {
            Ok(Quantity::Window { limit, window }) => Some((limit, window)),
            _ => None,
        },
        _ => None,
    });
    let Some(count) = limit.map(|(_, limit)| limit).or(in_file.map(|(limit, _)| limit)) else {
        let message = "GLOBAL_RATE_WINDOW is set, but there is no global limit for it";
        errors.push(Error::new(
            texts,
            at,
            message,
            "GLOBAL_RATE_LIMIT beside it, or a limit such as \"1000 per 1h\" in [inbound.global]",
        ));
        return;
    };
    let length = match (window, in_file) {
        (Some((_, secs)), _) => format!("{secs}s"),
        (None, Some((_, window))) => window.to_string(),
        (None, None) => format!("{DEFAULT_WINDOW_SECS}s"),
    };
    let is_new = written.is_none();
    // If the file has something else there, the reader reports that.
    let Some(global) = root.table_or_insert("inbound", at).and_then(|inbound| inbound.table_or_insert("global", at))
    else {
        return;
    };
    global.insert("limit", at, TomlValue::String(format!("{count} per {length}")));
    if is_new {
        global.insert("penalty", at, TomlValue::Table(TomlTable::default()));
    }
}

/// Every penalty table in the file.
fn growing_penalties(root: &mut TomlTable) -> Vec<&mut TomlTable> {
    fn tables<'t>(table: &'t mut TomlTable, found: &mut Vec<&'t mut TomlTable>) {
        for entry in &mut table.entries {
            match &mut entry.node.value {
                TomlValue::Table(penalty) if entry.key == "penalty" => found.push(penalty),
                TomlValue::List(items) if entry.key == "limits" => {
                    for item in items {
                        if let TomlValue::Table(limit) = &mut item.value {
                            tables(limit, found);
                        }
                    }
                }
                _ => {}
            }
        }
    }
    let mut found = Vec::new();
    let Some(TomlValue::Table(inbound)) = root.get_mut("inbound").map(|entry| &mut entry.node.value) else {
        return found;
    };
    for entry in &mut inbound.entries {
        let TomlValue::Table(table) = &mut entry.node.value else {
            continue;
        };
        match entry.key.as_str() {
            "global" => tables(table, &mut found),
            "action" => {
                for action in &mut table.entries {
                    if let TomlValue::Table(action) = &mut action.node.value {
                        tables(action, &mut found);
                    }
                }
            }
            _ => {}
        }
    }
    found
}
