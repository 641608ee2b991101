//! What exceeding a limit costs: `penalty` or `ban`.

use tidegate_core::{LimitError, Penalty, PenaltyMode, PenaltySpec, Span};

use super::Reader;
use super::actions::Cost;
use crate::document::{At, Entry, Table, Value};
use crate::error::Error;

impl Reader<'_> {
    /// `penalty` or `ban`.
    pub(super) fn cost(&mut self, table: &Table, path: &str, default: Cost) -> Option<Cost> {
        match (table.get("penalty"), table.get("ban")) {
            (Some(_), Some(ban)) => {
                let error = Error::new(self.texts, ban.key_at, "`penalty` and `ban` stand side by side", "one of them");
                self.push(error.help("a penalty's blocks grow; with a ban every block has the same length"));
                None
            }
            (Some(penalty), None) => self.penalty(penalty, &format!("{path}.penalty")),
            (None, Some(ban)) => {
                if matches!(&ban.node.value, Value::Text(text) if text == "none") {
                    return Some(Cost::Nothing);
                }
                self.span(&ban.node, "ban").map(|length| Cost::Ban(length, ban.node.at))
            }
            (None, None) => Some(default),
        }
    }

    fn penalty(&mut self, entry: &Entry, path: &str) -> Option<Cost> {
        let node = &entry.node;
        let Some(table) = node.as_table() else {
            if matches!(&node.value, Value::Text(text) if text == "none") {
                return Some(Cost::Nothing);
            }
            let found = node.described(self.texts);
            let expected = "a table such as { base = \"2s\", cap = \"1h\" }, or \"none\"";
            let error = Error::new(self.texts, node.at, format!("`penalty` is {found}"), expected);
            self.push(match &node.value {
                Value::Text(text) if crate::units::parse_duration(text).is_ok() => {
                    error.help(format!("for blocks that all have this length, write ban = \"{text}\""))
                }
                _ => error,
            });
            return None;
        };
        self.check_keys(table, path);
        let default = PenaltySpec::default();
        let base = self.or_default(table.into(), "base", default.base, |reader, node| reader.span(node, "base"));
        let factor = self.or_default(table.into(), "factor", default.factor, |reader, node| {
            reader.count(node, "factor", 1..=u64::from(u32::MAX)).and_then(|factor| u32::try_from(factor).ok())
        });
        let cap = self.or_default(table.into(), "cap", default.cap, |reader, node| reader.span(node, "cap"));
        let forgive_after = self.or_default(table.into(), "forgive_after", None, |reader, node| {
            reader.span(node, "forgive_after").map(Some)
        });
        let mode = self.or_default(table.into(), "mode", default.mode, |reader, node| {
            if matches!(&node.value, Value::Text(text) if text == "enforce" || text == "shadow") {
                let error = Error::new(reader.texts, node.at, "this mode is the action's", "`parole` or `strict`");
                reader.push(error.help("write it beside the penalty, not inside: mode = \"shadow\""));
                return None;
            }
            reader.choice(node, "mode", &[("parole", PenaltyMode::Parole), ("strict", PenaltyMode::Strict)])
        });
        let (base, cap) = (base?, cap?);
        if cap < base {
            let (longest, first) = (crate::units::in_words(cap), crate::units::in_words(base));
            let at = table.node("cap").or(table.node("base")).map_or(node.at, |node| node.at);
            let unsaid = match (table.node("base"), table.node("cap")) {
                (None, _) => " (the default base)",
                (_, None) => " (the default cap)",
                _ => "",
            };
            let message = format!("the longest block, {longest}, is shorter than the first, {first}{unsaid}");
            let error = Error::new(self.texts, at, message, "a `cap` no shorter than `base`");
            let variable = table.node("base").filter(|node| node.at != at).map(|node| self.texts.pointer(node.at));
            self.push(match variable {
                Some(pointer) => error.help(format!("the base stands {pointer}")),
                None => error,
            });
            return None;
        }
        let spec = PenaltySpec { base, factor: factor?, cap, forgive_after: forgive_after?, mode: mode? };
        Some(Cost::Growing(spec, node.at))
    }

    /// What a limit costs, once its window is known.
    pub(super) fn settled(&mut self, cost: Cost, window: Span) -> Option<(Option<Penalty>, bool)> {
        let (made, at, is_ban): (Result<Penalty, LimitError>, At, bool) = match cost {
            Cost::Nothing => return Some((None, false)),
            Cost::Growing(spec, at) => (Penalty::new(spec, window), at, false),
            Cost::Ban(length, at) => (Penalty::ban(length, window), at, true),
        };
        match made {
            Ok(penalty) => Some((Some(penalty), is_ban)),
            Err(error) => {
                self.wrong(at, error.to_string(), "a penalty such as { base = \"2s\", cap = \"1h\" }");
                None
            }
        }
    }
}
