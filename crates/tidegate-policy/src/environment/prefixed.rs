//! Variables with a custom prefix, for users who configure a program by them. They are merged over every provider,
//! before the variables that name a provider.

use tidegate_core::credential_pool::MAX_CREDENTIALS;

use super::{VariableMerger, parse_as};
use crate::document::{TextRange, TomlNode, TomlTable, TomlValue};
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

impl VariableMerger<'_> {
    /// Merges the variables with a prefix over the providers of the document.
    pub(super) fn apply_prefixed_variables(&mut self, env: &[(String, String)], prefix: &str) {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let begins = prefix.starts_with(|first: char| first.is_ascii_alphabetic());
        if !begins || prefix.len() > MAX_PREFIX || !prefix.bytes().all(fits) {
            let at = self.add_source("--env-prefix", prefix, false);
            let message = format!("{} can't be what names of variables begin with", quoted(prefix));
            return self.report(at, message, "capitals, digits and _, such as PIXIVFE");
        }
        // Later ones win, and the more specific names are last.
        for known in &PREFIXED_SETTINGS {
            let name = format!("{prefix}_{}", known.name);
            let Some((_, value)) = env.iter().find(|(found, _)| *found == name) else { continue };
            let secret = known.path == "credentials";
            let at = self.add_trimmed(&name, value, secret);
            if providers(self.root).next().is_none() {
                self.note(at, "no effect: the policy has no provider");
                continue;
            }
            let outcome = if secret { self.set_credentials(&name, at) } else { self.set_for_all_providers(at, known) };
            if let Err(error) = outcome {
                self.errors.add(|| error);
            }
        }
    }

    fn set_for_all_providers(&mut self, at: TextRange, known: &PrefixedSetting) -> Result<(), Error> {
        let mut node = parse_as(self.texts, at, known.setting().value_type)?;
        if known.path == "retry.max_attempts" {
            node.value = match node.value {
                TomlValue::Integer(Some(retries)) if retries <= MAX_RETRIES => TomlValue::Integer(Some(retries + 1)),
                _ => {
                    let message = format!("{} is no number of retries", quoted(self.texts.text_at(at)));
                    let expected = format!("a whole number from 0 to {MAX_RETRIES}");
                    return Err(Error::new(self.texts, at, message, expected));
                }
            };
        }
        for (_, provider) in providers(self.root) {
            // If a provider has something else than a table here, the reader reports that.
            let (table, key) = match known.path.split_once('.') {
                Some((table, key)) => (provider.table_or_insert(table, at), key),
                None => (Some(provider), known.path),
            };
            if let Some(table) = table {
                table.insert(key, node.at, node.value.clone());
            }
        }
        Ok(())
    }

    /// Gives the tokens of a list to the provider that needs credentials; it is an error if several do, or none.
    fn set_credentials(&mut self, name: &str, at: TextRange) -> Result<(), Error> {
        let presets = preset::load_presets(self.texts);
        let error = |message: String, expected: &str| Err(Error::new(self.texts, at, message, expected));
        let tokens: Vec<&str> = self.texts.text_at(at).split(',').collect();
        if tokens.iter().any(|token| token.trim().is_empty()) || tokens.len() > MAX_CREDENTIALS {
            let message = format!("{name} has an empty item, or more than {MAX_CREDENTIALS}");
            return error(message, "tokens with commas between them");
        }
        let mut wanting: Vec<(&str, &mut TomlTable)> =
            providers(self.root).filter(|(_, table)| wants_credential(table, &presets)).collect();
        if wanting.iter().any(|(_, provider)| provider.get("credentials").is_none()) {
            wanting.retain(|(_, provider)| provider.get("credentials").is_none());
        }
        match wanting.as_mut_slice() {
            [(_, provider)] => {
                let sources = (1..=tokens.len()).map(|index| {
                    let source = if tokens.len() == 1 { format!("env:{name}") } else { format!("env:{name}[{index}]") };
                    TomlNode { at, value: TomlValue::String(source) }
                });
                provider.insert("credentials", at, TomlValue::List(sources.collect()));
                Ok(())
            }
            [] => {
                let message = format!("{name} holds tokens, but no provider takes any");
                error(message, "a provider with `auth`, such as auth = \"bearer\"")
            }
            several => {
                let names: Vec<&str> = several.iter().map(|(name, _)| *name).collect();
                let message = format!("{name} could be for any of {}", names.join(", "));
                error(message, "one provider that takes a token and has none of its own").map_err(|error| {
                    error.help("write `credentials` in the others, such as credentials = [\"env:NAME\"]")
                })
            }
        }
    }
}

fn providers(root: &mut TomlTable) -> impl Iterator<Item = (&str, &mut TomlTable)> {
    let providers = root.table_mut("outbound").and_then(|outbound| outbound.table_mut("provider"));
    let entries = providers.into_iter().flat_map(|table| &mut table.entries);
    entries.filter_map(|entry| Some((entry.key.as_str(), entry.node.as_table_mut()?)))
}

/// True if the provider, or its preset, says where to put a credential.
fn wants_credential(provider: &TomlTable, presets: &TomlTable) -> bool {
    let from_preset = || presets.table(provider.text("preset")?)?.text("auth");
    provider.text("auth").or_else(from_preset).is_some_and(|auth| auth != "none")
}
