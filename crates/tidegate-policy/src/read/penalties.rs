//! The penalties for exceeding a limit: `penalty` or `ban`.

use tidegate_core::{LimitError, Penalty, PenaltyMode, PenaltySpec, Span};

use super::DocumentReader;
use super::actions::ParsedPenalty;
use super::forms::{Custom, Maybe, SPAN, Whole};
use crate::document::{TextRange, TomlEntry, TomlNode, TomlTable};
use crate::error::Note;
use crate::quantity::Quantity;
use crate::settings::SettingType::Text;
use crate::settings::key::{read_keys, setting_keys};
use crate::units::{describe_duration, parse_duration};

setting_keys! {
    /// The keys of a `penalty`.
    PENALTY: PenaltyKeys {
        base: Span = "2s", SPAN, "the first block";
        factor: u32 = "2", Whole(1, u32::MAX as u64), "the factor of each further block";
        cap: Span = "1h", SPAN, "the longest block";
        forgive_after: Option<Span> = "", Maybe(SPAN),
            "the time from the end of a block, without a refusal, that removes one strike; default the longer of cap \
             and window";
        mode: PenaltyMode = "parole", Custom(Text, "`parole` or `strict`", penalty_mode),
            "parole: one call passes after each block of a window or a rate, however full that is; strict: the wait is the \
             longer of block and window";
    }
}

pub(super) const BAN: Custom<Option<Span>> = Custom(Text, "a duration, or `none`", |reader, node, key| {
    if node.is_word("none") { Some(None) } else { reader.duration(node, key).map(Some) }
});

fn penalty_mode(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<PenaltyMode> {
    const WORDS: [(&str, PenaltyMode); 2] = [("parole", PenaltyMode::Parole), ("strict", PenaltyMode::Strict)];
    if node.is_word("enforce") || node.is_word("shadow") {
        let error = reader.error(node.at, "this mode is the action's", "`parole` or `strict`");
        return error.help("write it beside the penalty, not inside: mode = \"shadow\"").none();
    }
    reader.choice(node, key, &WORDS)
}

impl DocumentReader<'_> {
    pub(super) fn penalty_or_ban(
        &mut self,
        table: &TomlTable,
        path: &str,
        default: ParsedPenalty,
    ) -> Option<ParsedPenalty> {
        match (table.get("penalty"), table.get("ban")) {
            (Some(_), Some(ban)) => {
                let error = self.error(ban.key_at, "`penalty` and `ban` stand side by side", "one of them");
                error.help("a penalty's blocks grow; with a ban every block has the same length").none()
            }
            (Some(penalty), None) => self.penalty(penalty, &format!("{path}.penalty")),
            (None, Some(ban)) => {
                let length = (BAN.2)(self, &ban.node, "ban")?;
                Some(length.map_or(ParsedPenalty::None, |length| ParsedPenalty::Ban(length, ban.node.at)))
            }
            (None, None) => Some(default),
        }
    }

    fn penalty(&mut self, entry: &TomlEntry, path: &str) -> Option<ParsedPenalty> {
        let node = &entry.node;
        let Some(table) = node.as_table() else {
            if node.is_word("none") {
                return Some(ParsedPenalty::None);
            }
            let length = node.as_str().filter(|text| parse_duration(text).is_ok());
            let help = length.map(|text| format!("for blocks that all have this length, write ban = \"{text}\""));
            let expected = "a table such as { base = \"2s\", cap = \"1h\" }, or \"none\"";
            return self.wrong_type(node, "penalty", expected).help_if(help).none();
        };
        self.check_keys(table, path);
        read_keys!(self, table, PENALTY: base, factor, cap, forgive_after, mode);
        let (base, cap) = (base?, cap?);
        if cap < base {
            let (written_base, written_cap) = (table.node("base"), table.node("cap"));
            let at = written_cap.or(written_base).map_or(node.at, |node| node.at);
            let message = describe_order("block", base, cap, written_base, written_cap);
            let pointer = written_base.filter(|node| node.at != at).map(|node| self.texts.describe_location(node.at));
            let help = pointer.map(|pointer| format!("the base stands {pointer}"));
            return self.error(at, message, "a `cap` no shorter than `base`").help_if(help).none();
        }
        let spec = PenaltySpec { base, factor: factor?, cap, forgive_after: forgive_after?, mode: mode? };
        Some(ParsedPenalty::Growing(spec, node.at))
    }

    /// Builds the penalty of a limit. The flag is true for a ban.
    pub(super) fn build_penalty(
        &mut self,
        parsed: ParsedPenalty,
        quantity: &Quantity,
    ) -> Option<(Option<Penalty>, bool)> {
        let window = quantity.forget_time();
        let (made, at, is_ban): (Result<Penalty, LimitError>, TextRange, bool) = match parsed {
            ParsedPenalty::None => return Some((None, false)),
            ParsedPenalty::Growing(spec, at) => (Penalty::new(spec, window), at, false),
            ParsedPenalty::Ban(length, at) => (Penalty::ban(length, window), at, true),
        };
        match made {
            Ok(penalty) => {
                let has_parole = matches!(quantity, Quantity::Window { .. } | Quantity::Rate { .. })
                    && penalty.mode() == PenaltyMode::Parole;
                let longest = penalty.block_length(penalty.max_strikes());
                if has_parole && longest < window {
                    let (longest, window) = (describe_duration(longest), describe_duration(window));
                    let remedy = match (is_ban, penalty.factor()) {
                        (true, _) => "a longer ban",
                        (false, 1) => "a longer `base`, or mode = \"strict\",",
                        _ => "a longer `cap`, or mode = \"strict\",",
                    };
                    let message = format!(
                        "blocks of at most {longest} are shorter than the limit's {window}, and one call passes after each \
                         of them even if the limit is still full; {remedy} prevents that"
                    );
                    self.notes.push(Note::new(self.texts, at, &message));
                }
                Some((Some(penalty), is_ban))
            }
            Err(error) => self.error(at, error.to_string(), "a penalty such as { base = \"2s\", cap = \"1h\" }").none(),
        }
    }
}

/// The message that a cap is below its base. It tells which of the two is the default.
pub(super) fn describe_order(
    of: &str,
    base: Span,
    cap: Span,
    written_base: Option<&TomlNode>,
    written_cap: Option<&TomlNode>,
) -> String {
    let which_is_default = match (written_base, written_cap) {
        (None, _) => " (the default base)",
        (_, None) => " (the default cap)",
        _ => "",
    };
    let (longest, first) = (describe_duration(cap), describe_duration(base));
    format!("the longest {of}, {longest}, is shorter than the first, {first}{which_is_default}")
}
