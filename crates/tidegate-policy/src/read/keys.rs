//! The parts by which calls are counted: `key`.

use http::header::HeaderName;

use super::actions::LimitGroup;
use super::{DocumentReader, join_names};
use crate::address::Ipv6Prefix;
use crate::document::{TextRange, TomlNode, TomlTable, TomlValue};
use crate::error::{Error, quoted};
use crate::key::{KeyPart, MAX_PARTS, OnMissing};
use crate::nearest::nearest;
use crate::preset::Preset;
use crate::quantity::Quantity;

/// The longest name of a cookie or a query parameter, in bytes.
const MAX_NAME: usize = 64;

impl DocumentReader<'_> {
    pub(super) fn key(&mut self, node: &TomlNode) -> Option<Vec<KeyPart>> {
        let expected = format!("parts such as [\"client_ip\"]: {}", join_names(&KeyPart::NAMES));
        let words = self.strings(node, "key", &expected)?;
        if words.is_empty() || words.len() > MAX_PARTS {
            self.report(
                node.at,
                format!("`key` has {} parts", words.len()),
                format!("1 to {MAX_PARTS}: {}", join_names(&KeyPart::NAMES)),
            );
            return None;
        }
        let mut parts: Vec<KeyPart> = Vec::new();
        let mut fine = true;
        for (text, item) in words {
            match self.key_part(text, item) {
                Some(part) if parts.contains(&part) => {
                    self.report(
                        item.at,
                        format!("the part {} stands twice in the key", quoted(text)),
                        "each part once",
                    );
                    fine = false;
                }
                Some(part) => parts.push(part),
                None => fine = false,
            }
        }
        fine.then_some(parts)
    }

    /// Reads `missing`: the treatment of requests that lack a part.
    pub(super) fn on_missing(&mut self, table: &TomlTable, default: OnMissing) -> Option<OnMissing> {
        self.read_or_default(table.into(), "missing", default, |reader, node| {
            let words = [
                ("share", OnMissing::Share),
                ("by_ip", OnMissing::ByIp),
                ("refuse", OnMissing::Refuse),
                ("skip", OnMissing::Skip),
            ];
            reader.choice(node, "missing", &words)
        })
    }

    /// Reports a `missing` without effect, because every request has all parts of the keys. `by_ip`, the default, is
    /// allowed.
    pub(super) fn check_missing(&mut self, table: &TomlTable, groups: &[LimitGroup]) -> bool {
        let is_said = |node: &&TomlNode| !matches!(&node.value, TomlValue::String(text) if text == "by_ip");
        let Some(node) = table.node("missing").filter(is_said) else { return true };
        if groups.iter().flat_map(|group| &group.key).any(KeyPart::may_be_missing) {
            return true;
        }
        let error = Error::new(
            self.texts,
            node.at,
            "`missing` stands beside a key whose parts are never missing",
            "a key with a part that requests may lack, such as \"header:NAME\", \"cookie:NAME\" or \"query:NAME\"",
        );
        self.push_error(error.help("leave `missing` out"));
        false
    }

    /// Reads the limit of each IPv6 /48, besides the action's own limits; `None` inside if there is none.
    pub(super) fn ipv6_network(
        &mut self,
        table: &TomlTable,
        preset: Option<Preset>,
    ) -> Option<Option<Vec<(Quantity, TextRange)>>> {
        self.read_or_default(table.into(), "ipv6_network", None, |reader, node| {
            let own = reader
                .value_or_word(node, ("preset", None), |reader| reader.quantities(node, "ipv6_network").map(Some))?;
            if own.is_some() {
                return Some(own);
            }
            let Some(preset) = preset else {
                let message = "`ipv6_network` is `preset`, but the action has no preset";
                reader.report(node.at, message, "a limit in quotes, such as \"50 per 60s\"");
                return None;
            };
            let quantity = preset.network_limit().parse().expect("invariant: presets are tested to parse");
            Some(Some(vec![(quantity, node.at)]))
        })
    }

    fn key_part(&mut self, text: &str, node: &TomlNode) -> Option<KeyPart> {
        if let Some(length) = text.strip_prefix("ipv6/") {
            let part = length.parse().ok().filter(|length| Ipv6Prefix::new(*length).is_some());
            if part.is_none() {
                let lengths = Ipv6Prefix::LENGTHS;
                let expected = format!("a length from {} to {}, such as ipv6/48", lengths.start(), lengths.end());
                self.report(node.at, format!("{} has no valid length behind the slash", quoted(text)), expected);
            }
            return part.map(KeyPart::Ipv6Network);
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
            ("path", "") => Some(KeyPart::Path),
            ("header", name) => HeaderName::from_bytes(name.as_bytes()).ok().map(KeyPart::Header),
            ("cookie", name) if name_fits(name) => Some(KeyPart::Cookie(name.to_owned())),
            ("query", name) if name_fits(name) => Some(KeyPart::QueryParameter(name.to_owned())),
            _ => None,
        };
        if part.is_none() {
            let expected = join_names(&KeyPart::NAMES);
            let known = ["client_ip", "key", "platform", "header", "cookie", "query", "method", "host", "path"];
            let message = match kind {
                "header" | "cookie" | "query" if name.is_empty() => {
                    format!("{} lacks the name of a {kind}", quoted(text))
                }
                "header" | "cookie" | "query" => {
                    format!("{} has no valid name behind the colon", quoted(text))
                }
                _ => format!("unknown key part {}", quoted(text)),
            };
            let error = Error::new(self.texts, node.at, message, expected);
            let meant = match kind {
                "header" | "cookie" | "query" => Some(format!("{kind}:NAME")),
                "ip" | "addr" | "address" | "remote_addr" => Some("client_ip".to_owned()),
                "user" | "user_id" | "account" | "api_key" | "id" => Some("key".to_owned()),
                "ipv6" | "ipv6_network" => Some("ipv6/48".to_owned()),
                "url" | "uri" => Some("path".to_owned()),
                _ => nearest(kind, known).map(|meant| {
                    if matches!(meant, "header" | "cookie" | "query") {
                        format!("{meant}:{}", if name.is_empty() { "NAME" } else { name })
                    } else {
                        meant.to_owned()
                    }
                }),
            };
            self.push_error(error.did_you_mean(meant.as_deref()));
        }
        part
    }
}
