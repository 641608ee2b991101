//! What calls are counted by: `key`.

use http::header::HeaderName;

use super::{Reader, listed};
use crate::document::Node;
use crate::error::{Error, quoted};
use crate::key::{KeyPart, MAX_PARTS};
use crate::nearest::nearest;

/// The longest name of a cookie or a query parameter.
const MAX_NAME: usize = 64;

impl Reader<'_> {
    pub(super) fn key(&mut self, node: &Node) -> Option<Vec<KeyPart>> {
        let expected = format!("parts such as [\"client_ip\"]: {}", listed(&KeyPart::WORDS));
        let words = self.words(node, "key", &expected)?;
        if words.is_empty() || words.len() > MAX_PARTS {
            self.wrong(
                node.at,
                format!("`key` has {} parts", words.len()),
                format!("1 to {MAX_PARTS}: {}", listed(&KeyPart::WORDS)),
            );
            return None;
        }
        let mut parts: Vec<KeyPart> = Vec::new();
        let mut fine = true;
        for (text, item) in words {
            match self.part(text, item) {
                Some(part) if parts.contains(&part) => {
                    self.wrong(item.at, format!("the part {} stands twice in the key", quoted(text)), "each part once");
                    fine = false;
                }
                Some(part) => parts.push(part),
                None => fine = false,
            }
        }
        fine.then_some(parts)
    }

    fn part(&mut self, text: &str, node: &Node) -> Option<KeyPart> {
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
            let expected = listed(&KeyPart::WORDS);
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
                "url" | "uri" => Some("path".to_owned()),
                _ => nearest(kind, known).map(|meant| {
                    if matches!(meant, "header" | "cookie" | "query") {
                        format!("{meant}:{}", if name.is_empty() { "NAME" } else { name })
                    } else {
                        meant.to_owned()
                    }
                }),
            };
            self.push(error.hint(meant.as_deref()));
        }
        part
    }
}
