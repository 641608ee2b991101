//! The parts by which calls are counted: `key`.

use http::header::HeaderName;

use super::actions::ACTION;
use super::forms::{Custom, Quantities};
use super::{DocumentReader, join_names};
use crate::address::Ipv6Prefix;
use crate::document::{TomlNode, TomlTable};
use crate::error::quoted;
use crate::key::{KeyPart, MAX_PARTS, OnMissing};
use crate::nearest::nearest;
use crate::preset::Preset;
use crate::settings::SettingType::Strings;

/// The longest name of a cookie or a query parameter, in bytes.
const MAX_NAME: usize = 64;

/// The words of `missing`: the treatment of requests that lack a part.
pub(super) const MISSING_WORDS: [(&str, OnMissing); 4] =
    [("share", OnMissing::Share), ("by_ip", OnMissing::ByIp), ("refuse", OnMissing::Refuse), ("skip", OnMissing::Skip)];
pub(super) const KEY: Custom<Vec<KeyPart>> =
    Custom(Strings, "a part of requests, or a list of parts", |reader, node, key| reader.key(node, key));

impl DocumentReader<'_> {
    fn key(&mut self, node: &TomlNode, key: &str) -> Option<Vec<KeyPart>> {
        let expected = format!("parts such as [\"client_ip\"]: {}", join_names(&KeyPart::NAMES));
        let words = self.strings(node, "key", &expected)?;
        if words.is_empty() || words.len() > MAX_PARTS {
            let expected = format!("1 to {MAX_PARTS}: {}", join_names(&KeyPart::NAMES));
            return self.error(node.at, format!("`{key}` has {} parts", words.len()), expected).none();
        }
        let parts = words.into_iter().map(|(text, item)| (self.key_part(text, item), item.at, text));
        let parts = parts.collect();
        self.distinct(parts, |text| format!("the part {} stands twice in the key", quoted(text)), "each part once")
    }

    /// Reads the limit of each IPv6 /48, besides the action's own limits; `None` inside if there is none.
    pub(super) fn ipv6_network(&mut self, table: &TomlTable, preset: Option<Preset>) -> Option<Option<Quantities>> {
        let Some(node) = table.node("ipv6_network") else { return Some(None) };
        let own = self.parse(node, &ACTION.ipv6_network)?;
        if own.is_some() {
            return Some(own);
        }
        let Some(preset) = preset else {
            let message = "`ipv6_network` is `preset`, but the action has no preset";
            return self.error(node.at, message, "a limit in quotes, such as \"50 per 60s\"").none();
        };
        let quantity = preset.network_limit().parse().expect("invariant: presets are tested to parse");
        Some(Some(vec![(quantity, node.at)]))
    }

    fn key_part(&mut self, text: &str, node: &TomlNode) -> Option<KeyPart> {
        if let Some(length) = text.strip_prefix("ipv6/") {
            if let Some(length) = length.parse().ok().filter(|length| Ipv6Prefix::new(*length).is_some()) {
                return Some(KeyPart::Ipv6Network(length));
            }
            let lengths = Ipv6Prefix::LENGTHS;
            let expected = format!("a length from {} to {}, such as ipv6/48", lengths.start(), lengths.end());
            let message = format!("{} has no valid length behind the slash", quoted(text));
            return self.error(node.at, message, expected).none();
        }
        let name_fits = |name: &str| {
            !name.is_empty()
                && name.len() <= MAX_NAME
                && name.bytes().all(|byte| byte.is_ascii_graphic() && !b"=;,&\"".contains(&byte))
        };
        let (kind, name) = text.split_once(':').unwrap_or((text, ""));
        let part = match (kind, name) {
            ("client_ip", "") => Some(KeyPart::ClientIp),
            ("key", "") => Some(KeyPart::Key),
            ("platform", "") => Some(KeyPart::Platform),
            ("method", "") => Some(KeyPart::Method),
            ("host", "") => Some(KeyPart::Host),
            ("action", "") => Some(KeyPart::Action),
            ("client_cert", "") => Some(KeyPart::ClientCertificate),
            ("path", "") => Some(KeyPart::Path),
            ("header", name) => HeaderName::from_bytes(name.as_bytes()).ok().map(KeyPart::Header),
            ("cookie", name) if name_fits(name) => Some(KeyPart::Cookie(name.to_owned())),
            ("query", name) if name_fits(name) => Some(KeyPart::QueryParameter(name.to_owned())),
            _ => None,
        };
        part.or_else(|| self.unknown_key_part(text, node, kind, name))
    }

    fn unknown_key_part(&mut self, text: &str, node: &TomlNode, kind: &str, name: &str) -> Option<KeyPart> {
        let known =
            ["client_ip", "key", "platform", "header", "cookie", "query", "method", "host", "client_cert", "path"];
        let has_name = |kind: &str| matches!(kind, "header" | "cookie" | "query");
        let message = match kind {
            kind if has_name(kind) && name.is_empty() => format!("{} lacks the name of a {kind}", quoted(text)),
            kind if has_name(kind) => format!("{} has no valid name behind the colon", quoted(text)),
            _ => format!("unknown key part {}", quoted(text)),
        };
        let meant = match kind {
            kind if has_name(kind) => Some(format!("{kind}:NAME")),
            "ip" | "addr" | "address" | "remote_addr" => Some("client_ip".to_owned()),
            "user" | "user_id" | "account" | "api_key" | "id" => Some("key".to_owned()),
            "ipv6" | "ipv6_network" => Some("ipv6/48".to_owned()),
            "url" | "uri" => Some("path".to_owned()),
            _ => nearest(kind, known).map(|meant| match has_name(meant) {
                true => format!("{meant}:{}", if name.is_empty() { "NAME" } else { name }),
                false => meant.to_owned(),
            }),
        };
        self.error(node.at, message, join_names(&KeyPart::NAMES)).did_you_mean(meant.as_deref()).none()
    }
}
