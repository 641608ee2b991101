//! `admin.tokens`: bearer tokens with names and rights.

use super::forms::Custom;
use super::{DocumentReader, all_or_none};
use crate::document::{TomlEntry, TomlNode};
use crate::error::quoted;
use crate::sections::NamedToken;
use crate::settings::SettingType::TableOrTables;

/// The most named tokens of a listener.
const MAX_TOKENS: usize = 64;
/// The longest name of a token, in characters.
const MAX_NAME: usize = 64;
/// The name of the token that a section's `token` holds.
const UNNAMED: &str = "token";

pub(super) const TOKENS: Custom<Vec<NamedToken>> =
    Custom(TableOrTables, "a table of secrets by name", |reader, node, _| reader.tokens(node));

impl DocumentReader<'_> {
    fn tokens(&mut self, node: &TomlNode) -> Option<Vec<NamedToken>> {
        const FORM: &str = "a table of names and places, such as { ops = \"env:OPS_TOKEN\" }";
        let Some(table) = node.as_table() else {
            return self.hidden_error(node.at, "`tokens` is no table", FORM).none();
        };
        if table.entries.len() > MAX_TOKENS {
            let message = format!("`tokens` has {} items", table.entries.len());
            return self.hidden_error(node.at, message, format!("at most {MAX_TOKENS}")).none();
        }
        let tokens = all_or_none(table.entries.iter().map(|entry| self.named_token(entry)))?;
        for (index, (token, entry)) in tokens.iter().zip(&table.entries).enumerate() {
            if let Some(same) = tokens[..index].iter().find(|other| other.source == token.source) {
                let [name, other] = [&token.name, &same.name].map(|name| quoted(name));
                let message =
                    format!("the tokens {other} and {name} have the same place, so the log could not tell them apart");
                return self.error(entry.key_at, message, "a token of its own for each name").none();
            }
        }
        Some(tokens)
    }

    /// Reads `name = "env:NAME"` or `name = { secret = "env:NAME", read_only = true }`.
    fn named_token(&mut self, entry: &TomlEntry) -> Option<NamedToken> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        let name = &entry.key;
        let name_fits =
            (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(fits) && !name.eq_ignore_ascii_case(UNNAMED);
        if !name_fits {
            let message = format!("{} can't be the name of a token", quoted(name));
            let expected =
                format!("at most {MAX_NAME} letters, digits, _, - and ., and not `{UNNAMED}`, which names admin.token");
            self.report(entry.key_at, message, expected);
        }
        let (source, read_only) = match entry.node.as_table() {
            None => (self.secret_source(&entry.node, name), Some(false)),
            Some(table) => {
                self.check_names(table, &format!("the token {}", quoted(name)), &["secret", "read_only"]);
                let read_only = table.node("read_only").map(|node| self.boolean(node, "read_only"));
                let source = match table.node("secret") {
                    Some(node) => self.secret_source(node, "secret"),
                    None => {
                        let message = format!("the token {} has no `secret`", quoted(name));
                        self.error(entry.key_at, message, "secret = \"env:NAME\" or \"file:PATH\"").none()
                    }
                };
                (source, read_only.unwrap_or(Some(false)))
            }
        };
        let token = NamedToken { name: name.clone(), source: source?, read_only: read_only? };
        name_fits.then_some(token)
    }
}
