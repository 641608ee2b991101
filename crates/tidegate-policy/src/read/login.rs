//! `login`: the exchange of a credential for a token.

use std::time::Duration;

use super::forms::{Custom, DURATION, Maybe};
use super::{DocumentReader, all_or_none};
use crate::document::{TomlNode, TomlTable};
use crate::error::quoted;
use crate::outbound::Login;
use crate::secret::SecretSource;
use crate::settings::SettingType::{TableOrTables, Text};
use crate::settings::key::{read_keys, setting_keys};

pub(super) const CREDENTIAL_PLACEHOLDER: &str = "{credential}";
/// The longest login body, in bytes.
const MAX_BODY: usize = 64 << 10;
/// The most further secrets of a login.
const MAX_SECRETS: usize = 16;

setting_keys! {
    LOGIN: LoginKeys {
        path: String = "", Custom(Text, "a path", |reader, node, _| reader.login_path(node)),
            "its path, relative to the base URL";
        body: String = "", Custom(Text, "a JSON object", |reader, node, _| reader.login_body(node)),
            "its JSON body, with {credential} and {NAME} for secrets";
        secrets: Vec<(String, SecretSource)> = "",
            Custom(TableOrTables, "a table of places by name", |reader, node, _| reader.login_secrets(node)),
            "further secrets by name, each as env:NAME or file:PATH";
        pointer: String = "/token", Custom(Text, "a JSON pointer", login_pointer),
            "the place of the token in the reply: a JSON pointer";
        lifetime: Duration = "1h", DURATION, "the lifetime of a token";
        refresh_before: Option<Duration> = "", Maybe(DURATION),
            "the time before its end at which it is renewed; default a tenth of its lifetime";
    }
}

fn login_pointer(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<String> {
    let text = reader.string(node, key, "a JSON pointer such as \"/data/token\"")?;
    reader.pointer(text, node.at, key)
}

impl DocumentReader<'_> {
    pub(super) fn login(&mut self, provider: &TomlTable) -> Option<Option<Login>> {
        const FORM: &str = "{ path = \"/login\", body = '{\"apikey\":\"{credential}\"}', pointer = \"/token\" }";
        let Some(table) = self.provider_section(provider, "login")? else { return Some(None) };
        let whole = provider.get("login")?;
        let path = self.required(whole, table, &LOGIN.path, FORM);
        let body = self.required(whole, table, &LOGIN.body, FORM);
        let secrets = self.value_or(table, &LOGIN.secrets, Vec::new());
        read_keys!(self, table, LOGIN: pointer, lifetime, refresh_before);
        let (body, secrets, lifetime, refresh_before) = (body?, secrets?, lifetime?, refresh_before?);
        if let (Some(node), Some(before)) = (table.node("refresh_before"), refresh_before)
            && before >= lifetime
        {
            let message = "`refresh_before` is no shorter than `lifetime`, so that every call would log in";
            return self.error(node.at, message, "a shorter duration").none();
        }
        let unused = secrets.iter().find(|(name, _)| !body.contains(&format!("{{{name}}}")));
        if let (Some((name, _)), Some(entry)) = (unused, table.get("secrets")) {
            let message = format!("the login's body has no place for the secret {}", quoted(name));
            return self.error(entry.key_at, message, format!("{{{name}}} in the body")).none();
        }
        if secrets.is_empty() && !body.contains(CREDENTIAL_PLACEHOLDER) {
            let at = table.get("body").map_or(whole.key_at, |entry| entry.key_at);
            let error = self.error(at, "the login's body has no place for the credential", CREDENTIAL_PLACEHOLDER);
            return error.help("such as body = '{\"apikey\":\"{credential}\"}'").none();
        }
        let refresh_before = refresh_before.unwrap_or(lifetime / 10);
        Some(Some(Login { path: path?, body, secrets, pointer: pointer?, lifetime, refresh_before }))
    }

    fn login_path(&mut self, node: &TomlNode) -> Option<String> {
        const EXPECTED: &str = "a path behind the base URL, such as \"/login\"";
        let text = self.string(node, "path", EXPECTED)?;
        let fits = |byte: u8| byte.is_ascii_graphic() && !b"\"#<>\\^`{|}".contains(&byte);
        if text.starts_with('/') && text.bytes().all(fits) {
            return Some(text.to_owned());
        }
        self.wrong_text(node, "path", text, EXPECTED).none()
    }

    fn login_body(&mut self, node: &TomlNode) -> Option<String> {
        const EXPECTED: &str = "a JSON object in single quotes, such as '{\"apikey\":\"{credential}\"}'";
        let text = self.string(node, "body", EXPECTED)?;
        if text.len() > MAX_BODY {
            return self.hidden_error(node.at, "`body` is longer than 64 KiB", "a shorter one").none();
        }
        if serde_json::from_str::<serde_json::Value>(text).is_ok_and(|body| body.is_object()) {
            return Some(text.to_owned());
        }
        self.hidden_error(node.at, "`body` is no JSON object", EXPECTED).none()
    }

    fn login_secrets(&mut self, node: &TomlNode) -> Option<Vec<(String, SecretSource)>> {
        const FORM: &str = "a table of names and places, such as { pin = \"env:PIN\" }";
        let Some(table) = node.as_table() else {
            return self.hidden_error(node.at, "`secrets` is no table", FORM).none();
        };
        if table.entries.len() > MAX_SECRETS {
            let message = format!("`secrets` has {} items", table.entries.len());
            return self.hidden_error(node.at, message, format!("at most {MAX_SECRETS}")).none();
        }
        all_or_none(table.entries.iter().map(|entry| {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
            let name_fits = !entry.key.is_empty() && entry.key.bytes().all(fits) && entry.key != "credential";
            if !name_fits {
                let message = format!("{} can't be the name of a secret", quoted(&entry.key));
                self.report(entry.key_at, message, "letters, digits, _ and -, and not `credential`");
            }
            let source = self.secret_source(&entry.node, &entry.key)?;
            name_fits.then(|| (entry.key.clone(), source))
        }))
    }
}
