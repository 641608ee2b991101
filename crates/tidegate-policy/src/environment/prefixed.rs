//! Variables with a custom prefix, for users who configure a program by them. They are merged over every provider,
//! before the variables that name a provider.

use tidegate_core::credential_pool::MAX_CREDENTIALS;

use super::{add_source, parse_as, trimmed_range};
use crate::document::{SourceTexts, TextRange, TomlTable, TomlValue};
use crate::error::{Error, quoted};
use crate::outbound::preset;
use crate::settings::{PREFIXED_SETTINGS, PrefixedSetting};

/// The longest prefix, in bytes.
const MAX_PREFIX: usize = 64;
/// The most retries of a call.
const MAX_RETRIES: i64 = 99;

/// True if a variable is one of those with this prefix.
pub(super) fn is_prefixed(name: &str, prefix: &str) -> bool {
    let rest = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_'));
    rest.is_some_and(|rest| PREFIXED_SETTINGS.iter().any(|known| known.name == rest))
}

/// Merges the variables with a prefix over the providers of a document.
pub(super) fn apply_prefixed_variables(
    texts: &mut SourceTexts,
    errors: &mut Vec<Error>,
    root: &mut TomlTable,
    env: &[(String, String)],
    prefix: &str,
) {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let begins = prefix.starts_with(|first: char| first.is_ascii_alphabetic());
    if !begins || prefix.len() > MAX_PREFIX || !prefix.bytes().all(fits) {
        let at = add_source(texts, "--env-prefix", prefix, false);
        let message = format!("{} can't be what names of variables begin with", quoted(prefix));
        errors.push(Error::new(texts, at, message, "capitals, digits and _, such as PIXIVFE"));
        return;
    }
    // Later ones win, and the more specific names are last.
    for known in &PREFIXED_SETTINGS {
        let name = format!("{prefix}_{}", known.name);
        let Some((_, value)) = env.iter().find(|(found, _)| *found == name) else { continue };
        let secret = known.path == "credentials";
        let at = add_source(texts, &name, value, secret);
        let at = trimmed_range(texts, at);
        let outcome = if secret {
            set_credentials(texts, root, &name, at)
        } else {
            set_for_all_providers(texts, root, at, known)
        };
        errors.extend(outcome.err());
    }
}

/// Sets one setting of every provider.
fn set_for_all_providers(
    texts: &SourceTexts,
    root: &mut TomlTable,
    at: TextRange,
    known: &PrefixedSetting,
) -> Result<(), Error> {
    let mut node = parse_as(texts, at, known.setting().value_type)?;
    if known.path == "retry.max_attempts" {
        match node.value {
            TomlValue::Integer(Some(retries)) if retries <= MAX_RETRIES => {
                node.value = TomlValue::Integer(Some(retries + 1))
            }
            _ => {
                let message = format!("{} is no number of retries", quoted(texts.text_at(at)));
                return Err(Error::new(texts, at, message, format!("a whole number from 0 to {MAX_RETRIES}")));
            }
        }
    }
    for (_, provider) in providers(root) {
        // If a provider has something else than a table here, the reader reports that.
        match known.path.split_once('.') {
            Some((table, key)) => {
                if let Some(table) = provider.table_or_insert(table, at) {
                    table.insert(key, node.at, node.value.clone());
                }
            }
            None => provider.insert(known.path, node.at, node.value.clone()),
        }
    }
    Ok(())
}

/// Gives the tokens of a list to the provider that needs credentials; it is an error if several do, or none.
fn set_credentials(texts: &mut SourceTexts, root: &mut TomlTable, name: &str, at: TextRange) -> Result<(), Error> {
    let count = texts.text_at(at).split(',').count();
    if texts.text_at(at).split(',').any(|token| token.trim().is_empty()) || count > MAX_CREDENTIALS {
        let message = format!("{name} has an empty item, or more than {MAX_CREDENTIALS}");
        return Err(Error::new(texts, at, message, "tokens with commas between them"));
    }
    let presets = preset::load_presets(texts);
    let mut wanting: Vec<(&str, &mut TomlTable)> =
        providers(root).filter(|(_, table)| wants_credential(table, &presets)).collect();
    if wanting.iter().any(|(_, provider)| provider.get("credentials").is_none()) {
        wanting.retain(|(_, provider)| provider.get("credentials").is_none());
    }
    match wanting.as_mut_slice() {
        [(_, provider)] => {
            let source = |index: usize| {
                let value = if count == 1 { format!("env:{name}") } else { format!("env:{name}[{index}]") };
                crate::document::TomlNode { at, value: TomlValue::String(value) }
            };
            provider.insert("credentials", at, TomlValue::List((1..=count).map(source).collect()));
            Ok(())
        }
        [] => {
            let message = format!("{name} holds tokens, but no provider takes any");
            Err(Error::new(texts, at, message, "a provider with `auth`, such as auth = \"bearer\""))
        }
        several => {
            let names: Vec<&str> = several.iter().map(|(name, _)| *name).collect();
            let message = format!("{name} could be for any of {}", names.join(", "));
            let error = Error::new(texts, at, message, "one provider that takes a token and has none of its own");
            Err(error.help("write `credentials` in the others, such as credentials = [\"env:NAME\"]"))
        }
    }
}

fn providers(root: &mut TomlTable) -> impl Iterator<Item = (&str, &mut TomlTable)> {
    let outbound = root.get_mut("outbound").and_then(|entry| entry.node.as_table_mut());
    let providers = outbound.and_then(|table| table.get_mut("provider")).and_then(|entry| entry.node.as_table_mut());
    let entries = providers.map(|table| table.entries.iter_mut()).into_iter().flatten();
    entries.filter_map(|entry| Some((entry.key.as_str(), entry.node.as_table_mut()?)))
}

/// True if the provider, or its preset, says where to put a credential.
fn wants_credential(provider: &TomlTable, presets: &TomlTable) -> bool {
    let text = |table: &TomlTable, key: &str| match table.node(key).map(|node| &node.value) {
        Some(TomlValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let from_preset = || text(presets.table(&text(provider, "preset")?)?, "auth");
    text(provider, "auth").or_else(from_preset).is_some_and(|auth| auth != "none")
}
