//! The requests that an action matches: `match`.

use http::Method;

use super::DocumentReader;
use super::forms::Custom;
use crate::document::{TomlNode, TomlTable, TomlValue};
use crate::error::{Note, quoted};
use crate::matcher::{self, Matcher, PathPattern};
use crate::nearest::nearest;
use crate::path::PathQuirks;
use crate::settings::SettingType::Strings;
use crate::settings::key::{SettingKey, setting_keys};

/// The most methods, paths or hosts in one match.
const MAX_MATCH: usize = 64;

setting_keys! {
    /// The keys of a `match`. Its reader parses their items.
    MATCH: MatchKeys {
        method: () = "", Custom(Strings, "a method such as \"POST\", or a list of them", |_, _, _| Some(())),
            "the methods that it matches, in any case, HEAD with GET; default any";
        path: () = "",
            Custom(Strings, "a path such as \"/login\" or \"/api/*\", or a list of them", |_, _, _| Some(())),
            "the paths that it matches, such as /login or /api/*; default any";
        host: () = "", Custom(Strings, "a host such as \"example.org\", or a list of them", |_, _, _| Some(())),
            "the hosts that it matches; default any";
    }
}

impl DocumentReader<'_> {
    pub(super) fn matcher(&mut self, node: &TomlNode, quirks: PathQuirks) -> Option<Matcher> {
        const EXPECTED: &str = "a table such as { method = \"POST\", path = \"/login\" }";
        let Some(table) = node.as_table() else {
            let help = match &node.value {
                TomlValue::String(text) if text.starts_with('/') => format!("did you mean {{ path = \"{text}\" }}?"),
                TomlValue::List(items) if !items.is_empty() && items.iter().all(|item| item.as_table().is_some()) => {
                    "one table may have lists: { path = [\"/a\", \"/b\"] }; for what those can't say, make a second \
                     action"
                        .to_owned()
                }
                TomlValue::List(_) => "did you mean { path = [\"/a\", \"/b\"] }?".to_owned(),
                _ => return self.wrong_type(node, "match", EXPECTED).none(),
            };
            return self.wrong_type(node, "match", EXPECTED).help(help).none();
        };
        self.check_keys(table, "inbound.action.*.match");
        if table.entries.is_empty() {
            let help = "to match every request, write { path = \"/*\" }; to match none, leave `match` out";
            return self.error(node.at, "`match` is empty", EXPECTED).help(help).none();
        }
        let methods = self.match_values(table, &MATCH.method, Self::method);
        let paths = self.match_values(table, &MATCH.path, |reader, text, item| reader.pattern(text, item, quirks));
        let hosts = self.match_values(table, &MATCH.host, |reader, text, item| match matcher::parse_host(text) {
            Ok(host) => Some(host),
            Err(why) => {
                let message = format!("{} can't be a host: {why}", quoted(text));
                reader.error(item.at, message, "a host such as \"example.org\"").none()
            }
        });
        Some(Matcher { methods: methods?, paths: paths?, hosts: hosts? })
    }

    fn match_values<T: PartialEq>(
        &mut self,
        table: &TomlTable,
        key: &SettingKey<()>,
        mut read: impl FnMut(&mut Self, &str, &TomlNode) -> Option<T>,
    ) -> Option<Vec<T>> {
        let (form, key) = (key.form.describe().1, key.name());
        let Some(node) = table.node(key) else {
            return Some(Vec::new());
        };
        let words = self.strings(node, key, &form)?;
        if words.is_empty() || words.len() > MAX_MATCH {
            let message = format!("`{key}` is a list of {}", words.len());
            let expected = format!("1 to {MAX_MATCH} items; leave it out for any {key}");
            return self.error(node.at, message, expected).none();
        }
        let items = words.into_iter().map(|(text, item)| (read(self, text, item), item.at, text)).collect();
        self.distinct(items, |text| format!("{} stands twice in `{key}`", quoted(text)), "each once")
    }

    pub(super) fn method(&mut self, text: &str, node: &TomlNode) -> Option<Method> {
        const KNOWN: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"];
        let upper = text.to_ascii_uppercase();
        let expected = "a method in capitals, such as \"POST\"";
        if upper != text && KNOWN.contains(&upper.as_str()) {
            let message = format!("the method {} isn't in capitals", quoted(text));
            return self.error(node.at, message, expected).did_you_mean(Some(&upper)).none();
        }
        if text == "*" || upper == "ANY" || upper == "ALL" {
            let error = self.error(node.at, format!("{} is no method", quoted(text)), expected);
            return error.help("to match any method, leave `method` out").none();
        }
        if let Some(meant) = nearest(text, KNOWN).filter(|meant| *meant != text) {
            let message = format!("unknown method {}", quoted(text));
            return self.error(node.at, message, expected).did_you_mean(Some(meant)).none();
        }
        let method = Method::from_bytes(text.as_bytes()).ok();
        method.or_else(|| self.error(node.at, format!("{} is no method", quoted(text)), expected).none())
    }

    fn pattern(&mut self, text: &str, node: &TomlNode, quirks: PathQuirks) -> Option<PathPattern> {
        match PathPattern::new(text, quirks) {
            Ok(pattern) => {
                if let Some(head) = text.strip_suffix("/.*") {
                    let message = format!(
                        "\"{text}\" matches names that begin with a dot; for {head}/ and everything below it, write \
                         \"{head}/*\""
                    );
                    self.notes.push(Note::new(self.texts, node.at, &message));
                }
                Some(pattern)
            }
            Err(wrong) => {
                let at = wrong.range.map_or(node.at, |at| self.texts.range_in_string(node, text, at));
                let message = format!("`path` is {}: {}", quoted(text), wrong.message);
                let help = wrong.suggestion.map(|instead| format!("write \"{instead}\""));
                self.error(at, message, wrong.expected).help_if(help).none()
            }
        }
    }
}
