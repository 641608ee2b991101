//! The requests that an action matches: `match`.

use http::Method;

use super::DocumentReader;
use crate::document::{TomlNode, TomlTable, TomlValue};
use crate::error::{Error, quoted};
use crate::matcher::{self, Matcher, PathPattern};
use crate::nearest::nearest;
use crate::path::PathQuirks;

/// The most methods, paths or hosts in one match.
const MAX_MATCH: usize = 64;

impl DocumentReader<'_> {
    pub(super) fn matcher(&mut self, node: &TomlNode, quirks: PathQuirks) -> Option<Matcher> {
        const EXPECTED: &str = "a table such as { method = \"POST\", path = \"/login\" }";
        let Some(table) = node.as_table() else {
            let found = node.describe(self.texts);
            let error = Error::new(self.texts, node.at, format!("`match` is {found}"), EXPECTED);
            self.push_error(match &node.value {
                TomlValue::String(text) if text.starts_with('/') => {
                    error.help(format!("did you mean {{ path = \"{text}\" }}?"))
                }
                TomlValue::List(items) if !items.is_empty() && items.iter().all(|item| item.as_table().is_some()) => error.help(
                    "one table may have lists: { path = [\"/a\", \"/b\"] }; for what those can't say, make a second action",
                ),
                TomlValue::List(_) => error.help("did you mean { path = [\"/a\", \"/b\"] }?"),
                _ => error,
            });
            return None;
        };
        self.check_keys(table, "inbound.action.*.match");
        if table.entries.is_empty() {
            let error = Error::new(self.texts, node.at, "`match` is empty", EXPECTED);
            self.push_error(
                error.help("to match every request, write { path = \"/*\" }; to match none, leave `match` out"),
            );
            return None;
        }
        let methods = self.match_values(table, "method", "a method such as \"POST\", or a list of them", Self::method);
        let paths = self.match_values(
            table,
            "path",
            "a path such as \"/login\" or \"/api/*\", or a list of them",
            |reader, text, item| reader.pattern(text, item, quirks),
        );
        let hosts = self.match_values(
            table,
            "host",
            "a host such as \"example.org\", or a list of them",
            |reader, text, item| {
                let host = matcher::parse_host(text);
                if let Err(why) = host {
                    reader.report(
                        item.at,
                        format!("{} can't be a host: {why}", quoted(text)),
                        "a host such as \"example.org\"",
                    );
                }
                host.ok()
            },
        );
        Some(Matcher { methods: methods?, paths: paths?, hosts: hosts? })
    }

    fn match_values<T: PartialEq>(
        &mut self,
        table: &TomlTable,
        key: &str,
        expected: &str,
        mut read: impl FnMut(&mut Self, &str, &TomlNode) -> Option<T>,
    ) -> Option<Vec<T>> {
        let Some(node) = table.node(key) else {
            return Some(Vec::new());
        };
        let words = self.strings(node, key, expected)?;
        if words.is_empty() || words.len() > MAX_MATCH {
            self.report(
                node.at,
                format!("`{key}` is a list of {}", words.len()),
                format!("1 to {MAX_MATCH} items; leave it out for any {key}"),
            );
            return None;
        }
        let mut list = Vec::new();
        let mut fine = true;
        for (text, item) in words {
            match read(self, text, item) {
                Some(read) if list.contains(&read) => {
                    self.report(item.at, format!("{} stands twice in `{key}`", quoted(text)), "each once");
                    fine = false;
                }
                Some(read) => list.push(read),
                None => fine = false,
            }
        }
        fine.then_some(list)
    }

    fn method(&mut self, text: &str, node: &TomlNode) -> Option<Method> {
        const KNOWN: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"];
        let upper = text.to_ascii_uppercase();
        let expected = "a method in capitals, such as \"POST\"";
        if upper != text && KNOWN.contains(&upper.as_str()) {
            let error =
                Error::new(self.texts, node.at, format!("the method {} isn't in capitals", quoted(text)), expected);
            self.push_error(error.did_you_mean(Some(&upper)));
            return None;
        }
        if text == "*" || upper == "ANY" || upper == "ALL" {
            let error = Error::new(self.texts, node.at, format!("{} is no method", quoted(text)), expected);
            self.push_error(error.help("to match any method, leave `method` out"));
            return None;
        }
        if let Some(meant) = nearest(text, KNOWN).filter(|meant| *meant != text) {
            let error = Error::new(self.texts, node.at, format!("unknown method {}", quoted(text)), expected);
            self.push_error(error.did_you_mean(Some(meant)));
            return None;
        }
        let method = Method::from_bytes(text.as_bytes()).ok();
        if method.is_none() {
            self.report(node.at, format!("{} is no method", quoted(text)), expected);
        }
        method
    }

    fn pattern(&mut self, text: &str, node: &TomlNode, quirks: PathQuirks) -> Option<PathPattern> {
        match PathPattern::new(text, quirks) {
            Ok(pattern) => Some(pattern),
            Err(wrong) => {
                let at = wrong.range.map_or(node.at, |at| self.texts.range_in_string(node, text, at));
                let error = Error::new(
                    self.texts,
                    at,
                    format!("`path` is {}: {}", quoted(text), wrong.message),
                    wrong.expected,
                );
                self.push_error(match wrong.suggestion {
                    Some(instead) => error.help(format!("write \"{instead}\"")),
                    None => error,
                });
                None
            }
        }
    }
}
