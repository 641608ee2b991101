//! `login`: the exchange of a credential for a token.

use tidegate_core::Span;

use super::DocumentReader;
use super::resilience::RequiredKey;
use crate::document::{TomlNode, TomlTable};
use crate::error::{Error, quoted};
use crate::outbound::Login;
use crate::secret::SecretSource;

/// The placeholder of the credential in a login's body.
pub(super) const CREDENTIAL_PLACEHOLDER: &str = "{credential}";
/// The longest login body, in bytes.
const MAX_BODY: usize = 64 << 10;
/// The most further secrets of a login.
const MAX_SECRETS: usize = 16;

impl DocumentReader<'_> {
    pub(super) fn login(&mut self, provider: &TomlTable) -> Option<Option<Login>> {
        const FORM: &str = "{ path = \"/login\", body = '{\"apikey\":\"{credential}\"}', pointer = \"/token\" }";
        let Some(table) = self.provider_section(provider, "login")? else { return Some(None) };
        let whole = provider.get("login")?;
        let required = RequiredKey { table: whole, path: "outbound.provider.*.login", form: FORM };
        let path = self.required_node(table, "path", &required).and_then(|node| self.login_path(node));
        let body = self.required_node(table, "body", &required).and_then(|node| self.login_body(node));
        let secrets = self.read_or_default(Some(table), "secrets", Vec::new(), Self::login_secrets);
        let pointer = self.read_or_default(Some(table), "pointer", "/token".to_owned(), |reader, node| {
            let text = reader.string(node, "pointer", "a JSON pointer such as \"/data/token\"")?;
            reader.pointer(text, node.at, "pointer")
        });
        let lifetime = self.read_or_default(Some(table), "lifetime", Span::from_secs(3600), |reader, node| {
            reader.timeout(node, "lifetime").map(Span::from_duration)
        });
        let refresh_before = self.read_optional(table, "refresh_before", |reader, node| {
            reader.timeout(node, "refresh_before").map(Span::from_duration)
        });
        let (body, secrets, lifetime, refresh_before) = (body?, secrets?, lifetime?, refresh_before?);
        if let (Some(node), Some(before)) = (table.node("refresh_before"), refresh_before)
            && before >= lifetime
        {
            let message = "`refresh_before` is no shorter than `lifetime`, so that every call would log in";
            self.report(node.at, message, "a shorter duration");
            return None;
        }
        let unused = secrets.iter().find(|(name, _)| !body.contains(&format!("{{{name}}}")));
        if let (Some((name, _)), Some(entry)) = (unused, table.get("secrets")) {
            let message = format!("the login's body has no place for the secret {}", quoted(name));
            self.report(entry.key_at, message, format!("{{{name}}} in the body"));
            return None;
        }
        if secrets.is_empty() && !body.contains(CREDENTIAL_PLACEHOLDER) {
            let at = table.get("body").map_or(whole.key_at, |entry| entry.key_at);
            let error =
                Error::new(self.texts, at, "the login's body has no place for the credential", CREDENTIAL_PLACEHOLDER);
            self.push_error(error.help("such as body = '{\"apikey\":\"{credential}\"}'"));
            return None;
        }
        Some(Some(Login {
            path: path?,
            body,
            secrets,
            pointer: pointer?,
            lifetime: lifetime.as_duration(),
            refresh_before: refresh_before.map_or(lifetime.as_duration() / 10, Span::as_duration),
        }))
    }

    fn login_path(&mut self, node: &TomlNode) -> Option<String> {
        const EXPECTED: &str = "a path behind the base URL, such as \"/login\"";
        let text = self.string(node, "path", EXPECTED)?;
        let fits = |byte: u8| byte.is_ascii_graphic() && !b"\"#<>\\^`{|}".contains(&byte);
        if text.starts_with('/') && text.bytes().all(fits) {
            return Some(text.to_owned());
        }
        self.report(node.at, format!("`path` is {}", quoted(text)), EXPECTED);
        None
    }

    fn login_body(&mut self, node: &TomlNode) -> Option<String> {
        const EXPECTED: &str = "a JSON object in single quotes, such as '{\"apikey\":\"{credential}\"}'";
        let text = self.string(node, "body", EXPECTED)?;
        if text.len() > MAX_BODY {
            self.push_error(Error::hiding_secret(self.texts, node.at, "`body` is longer than 64 KiB", "a shorter one"));
            return None;
        }
        if serde_json::from_str::<serde_json::Value>(text).is_ok_and(|body| body.is_object()) {
            return Some(text.to_owned());
        }
        self.push_error(Error::hiding_secret(self.texts, node.at, "`body` is no JSON object", EXPECTED));
        None
    }

    fn login_secrets(&mut self, node: &TomlNode) -> Option<Vec<(String, SecretSource)>> {
        const FORM: &str = "a table of names and places, such as { pin = \"env:PIN\" }";
        let Some(table) = node.as_table() else {
            self.push_error(Error::hiding_secret(self.texts, node.at, "`secrets` is no table", FORM));
            return None;
        };
        if table.entries.len() > MAX_SECRETS {
            let message = format!("`secrets` has {} items", table.entries.len());
            self.push_error(Error::hiding_secret(self.texts, node.at, message, format!("at most {MAX_SECRETS}")));
            return None;
        }
        let mut secrets = Vec::new();
        let mut fine = true;
        for entry in &table.entries {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
            if entry.key.is_empty() || !entry.key.bytes().all(fits) || entry.key == "credential" {
                let message = format!("{} can't be the name of a secret", quoted(&entry.key));
                let expected = "letters, digits, _ and -, and not `credential`";
                self.report(entry.key_at, message, expected);
                fine = false;
            }
            match self.secret_source(&entry.node, &entry.key) {
                Some(source) => secrets.push((entry.key.clone(), source)),
                None => fine = false,
            }
        }
        fine.then_some(secrets)
    }
}
