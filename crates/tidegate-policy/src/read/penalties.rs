//! The penalties for exceeding a limit: `penalty` or `ban`.

use tidegate_core::{LimitError, Penalty, PenaltyMode, PenaltySpec, Span};

use super::DocumentReader;
use super::actions::ParsedPenalty;
use crate::document::{TextRange, TomlEntry, TomlTable, TomlValue};
use crate::error::Error;

impl DocumentReader<'_> {
    /// Reads `penalty` or `ban`.
    pub(super) fn penalty_or_ban(
        &mut self,
        table: &TomlTable,
        path: &str,
        default: ParsedPenalty,
    ) -> Option<ParsedPenalty> {
        match (table.get("penalty"), table.get("ban")) {
            (Some(_), Some(ban)) => {
                let error = Error::new(self.texts, ban.key_at, "`penalty` and `ban` stand side by side", "one of them");
                self.push_error(error.help("a penalty's blocks grow; with a ban every block has the same length"));
                None
            }
            (Some(penalty), None) => self.penalty(penalty, &format!("{path}.penalty")),
            (None, Some(ban)) => {
                if matches!(&ban.node.value, TomlValue::String(text) if text == "none") {
                    return Some(ParsedPenalty::None);
                }
                self.duration(&ban.node, "ban").map(|length| ParsedPenalty::Ban(length, ban.node.at))
            }
            (None, None) => Some(default),
        }
    }

    fn penalty(&mut self, entry: &TomlEntry, path: &str) -> Option<ParsedPenalty> {
        let node = &entry.node;
        let Some(table) = node.as_table() else {
            if matches!(&node.value, TomlValue::String(text) if text == "none") {
                return Some(ParsedPenalty::None);
            }
            let found = node.describe(self.texts);
            let expected = "a table such as { base = \"2s\", cap = \"1h\" }, or \"none\"";
            let error = Error::new(self.texts, node.at, format!("`penalty` is {found}"), expected);
            self.push_error(match &node.value {
                TomlValue::String(text) if crate::units::parse_duration(text).is_ok() => {
                    error.help(format!("for blocks that all have this length, write ban = \"{text}\""))
                }
                _ => error,
            });
            return None;
        };
        self.check_keys(table, path);
        let default = PenaltySpec::default();
        let base =
            self.read_or_default(table.into(), "base", default.base, |reader, node| reader.duration(node, "base"));
        let factor = self.read_or_default(table.into(), "factor", default.factor, |reader, node| {
            reader.integer(node, "factor", 1..=u64::from(u32::MAX)).and_then(|factor| u32::try_from(factor).ok())
        });
        let cap = self.read_or_default(table.into(), "cap", default.cap, |reader, node| reader.duration(node, "cap"));
        let forgive_after = self.read_or_default(table.into(), "forgive_after", None, |reader, node| {
            reader.duration(node, "forgive_after").map(Some)
        });
        let mode = self.read_or_default(table.into(), "mode", default.mode, |reader, node| {
            if matches!(&node.value, TomlValue::String(text) if text == "enforce" || text == "shadow") {
                let error = Error::new(reader.texts, node.at, "this mode is the action's", "`parole` or `strict`");
                reader.push_error(error.help("write it beside the penalty, not inside: mode = \"shadow\""));
                return None;
            }
            reader.choice(node, "mode", &[("parole", PenaltyMode::Parole), ("strict", PenaltyMode::Strict)])
        });
        let (base, cap) = (base?, cap?);
        if cap < base {
            let (longest, first) = (crate::units::describe_duration(cap), crate::units::describe_duration(base));
            let at = table.node("cap").or(table.node("base")).map_or(node.at, |node| node.at);
            let unsaid = match (table.node("base"), table.node("cap")) {
                (None, _) => " (the default base)",
                (_, None) => " (the default cap)",
                _ => "",
            };
            let message = format!("the longest block, {longest}, is shorter than the first, {first}{unsaid}");
            let error = Error::new(self.texts, at, message, "a `cap` no shorter than `base`");
            let variable =
                table.node("base").filter(|node| node.at != at).map(|node| self.texts.describe_location(node.at));
            self.push_error(match variable {
                Some(pointer) => error.help(format!("the base stands {pointer}")),
                None => error,
            });
            return None;
        }
        let spec = PenaltySpec { base, factor: factor?, cap, forgive_after: forgive_after?, mode: mode? };
        Some(ParsedPenalty::Growing(spec, node.at))
    }

    /// Builds the penalty of a limit from its window. The flag is true for a ban.
    pub(super) fn build_penalty(&mut self, cost: ParsedPenalty, window: Span) -> Option<(Option<Penalty>, bool)> {
        let (made, at, is_ban): (Result<Penalty, LimitError>, TextRange, bool) = match cost {
            ParsedPenalty::None => return Some((None, false)),
            ParsedPenalty::Growing(spec, at) => (Penalty::new(spec, window), at, false),
            ParsedPenalty::Ban(length, at) => (Penalty::ban(length, window), at, true),
        };
        match made {
            Ok(penalty) => Some((Some(penalty), is_ban)),
            Err(error) => {
                self.report(at, error.to_string(), "a penalty such as { base = \"2s\", cap = \"1h\" }");
                None
            }
        }
    }
}
