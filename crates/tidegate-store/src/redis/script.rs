//! The scripts that decide. A script has only the parts that a batch needs, because each function costs time in every
//! call, and most batches have one or two kinds of limit.

use std::sync::OnceLock;

use tidegate_core::reservation::{FORFEIT_HORIZONS, LATENESS, MAX_RECORDS};
use tidegate_core::time::MAX_CLOCK_LAG;
use tidegate_core::{Batch, Limit, LimitKind, Limits, MAX_COST, Op, Time, Verb};

use crate::announcement::stored;

/// The largest integer of the scripts: doubles have gaps above it. No limit is higher.
pub(super) const MAX_EXACT_INTEGER: u64 = 1 << 53;

/// The kinds of limit, by their numbers in the scripts: the name, the functions that evaluate, those that update.
const KINDS: [(&str, &str, &str); 6] = [
    ("WINDOW", include_str!("lua/window.lua"), include_str!("lua/window_update.lua")),
    ("RATE", include_str!("lua/rate.lua"), include_str!("lua/rate_update.lua")),
    ("QUOTA", include_str!("lua/quota.lua"), include_str!("lua/quota_update.lua")),
    ("CONCURRENCY", include_str!("lua/concurrency.lua"), include_str!("lua/concurrency_update.lua")),
    ("COOLDOWN", include_str!("lua/cooldown.lua"), include_str!("lua/cooldown_update.lua")),
    ("PACE", include_str!("lua/pace.lua"), include_str!("lua/pace_update.lua")),
];

/// The verbs, by their numbers in the scripts. The two that ask for a decision come first.
const VERBS: &str = "TAKE, PEEK, REFUND, RELEASE, RENEW, RESET, DEBIT, SETTLE, THROTTLE, SUCCESS, DISABLE, PACE_STEP, \
                     RESTORE_PENALTY, TAKE_BY_TERMS";

/// The index of a kind in [`KINDS`].
pub(super) fn kind_number(kind: &LimitKind) -> u8 {
    kind.id() - 1
}

/// The index of a verb in [`VERBS`].
pub(super) fn verb_number(verb: Verb) -> u8 {
    match verb {
        Verb::Take => 0,
        Verb::Peek => 1,
        Verb::Refund => 2,
        Verb::Release => 3,
        Verb::Renew => 4,
        Verb::Reset => 5,
        Verb::Debit => 6,
        Verb::Settle => 7,
        Verb::Throttle { .. } => 8,
        Verb::Success { .. } => 9,
        Verb::Disable => 10,
        Verb::Pace { .. } => 11,
        Verb::RestorePenalty { .. } => 12,
        Verb::TakeByTerms { .. } => 13,
    }
}

/// The maximum number of operations of a quick script.
const MAX_QUICK_OPS: usize = 4;
/// The bytes of the argument's header, of an operation's flags and of its penalty.
pub(super) const HEADER_BYTES: usize = 33;
const FLAG_BYTES: usize = 8;
const PENALTY_BYTES: usize = 40;
const PENALTY_BIT: u16 = 1 << 6;
const UPDATE_BIT: u16 = 1 << 7;
const RESERVATIONS_BIT: u16 = 1 << 8;
/// The bits of rates, quotas, cool-downs and paces, whose states are one value each.
const ONE_VALUE_KINDS: u16 = 0b11_0110;

/// The script that a batch needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScriptKind {
    /// The general script with these parts: a bit for each kind, one for penalties, one for verbs that update, and one for
    /// reservations.
    General(u16),
    /// A quick script for takes under enforced rates and windows. After a leading 1, each operation has two bits: the
    /// lower is set for a window, the upper for a penalty.
    Quick(u16),
}

impl ScriptKind {
    /// The script for these operations. `is_whole_batch` is false if other parts of the batch can refuse the call.
    pub(super) fn for_batch(batch: &Batch, limits: &Limits, is_whole_batch: bool) -> Self {
        let (mut general, mut quick, mut is_quick) = (0, 1_u16, is_whole_batch && batch.ops().len() <= MAX_QUICK_OPS);
        for (index, op) in batch.ops().iter().enumerate() {
            let Some(limit) = limits.get(op.limit) else { continue };
            general |= 1 << kind_number(limit.kind());
            if limit.penalty().is_some() {
                general |= PENALTY_BIT;
            }
            if limit.reservations().is_some() {
                general |= RESERVATIONS_BIT;
            }
            if !matches!(op.verb, Verb::Take | Verb::Peek) {
                general |= UPDATE_BIT;
            }
            let is_different = |before: &Op| (before.limit, before.key) != (op.limit, op.key);
            is_quick &= op.verb == Verb::Take && can_be_quick(limit) && batch.ops()[..index].iter().all(is_different);
            if is_quick {
                let is_window = u16::from(matches!(limit.kind(), LimitKind::Window(_)));
                quick = quick << 2 | u16::from(limit.penalty().is_some()) << 1 | is_window;
            }
        }
        if is_quick { Self::Quick(quick) } else { Self::General(general) }
    }

    fn script_text(self) -> String {
        let mut text = constants_text();
        match self {
            Self::General(parts) => push_general_text(parts, &mut text),
            Self::Quick(code) => {
                let quick = QuickScriptText::new(code);
                let QuickScriptText { unpack_text, body, response_text, general_parts, .. } = quick;
                text.push_str(&format!("{QUICK_LOCALS}local bytes, key_offset, server_time = ARGV[1], 0\n"));
                text.push_str(&format!("repeat\n{unpack_text}{body}return {response_text}\nuntil true\n"));
                push_general_text(general_parts, &mut text);
            }
        }
        text
    }
}

/// The quick script for many batches with equal operations. The first argument belongs to the first batch. The others,
/// if there are any, are the times of the rest. The keys of the batches follow each other. It returns a response for
/// each batch, up to the first with an error. An empty response means that nothing was done and the batch must be sent
/// alone.
fn batched_script_text(code: u16) -> String {
    let QuickScriptText { op_count, unpack_text, body, response_text, .. } = QuickScriptText::new(code);
    let constants = constants_text();
    format!(
        "{constants}{QUICK_LOCALS}local responses = {{}}\npcall(function()\n\
         local bytes, server_time = ARGV[1], nil\n{unpack_text}for index = 1, #KEYS / {op_count} do\n\
         local key_offset, response = (index - 1) * {op_count}, ''\nbytes = ARGV[index] or bytes\n\
         repeat\n{body}response = {response_text}\nuntil true\nresponses[index] = response\n\
         end\nend)\nreturn responses\n"
    )
}

fn constants_text() -> String {
    let (never, clock_lag) = (Time::NEVER.as_micros(), MAX_CLOCK_LAG.as_micros());
    format!(
        "local NEVER, MAX_CLOCK_LAG = {never}, {clock_lag}\n\
         local MAX_EXACT_INTEGER, MAX_COST = {MAX_EXACT_INTEGER}, {MAX_COST}\n"
    )
}

const QUICK_LOCALS: &str = "local unpack, pack, call = struct.unpack, struct.pack, redis.call\n\
                            local floor, ceil = math.floor, math.ceil\n";

fn can_be_quick(limit: &Limit) -> bool {
    let is_quick_kind = match limit.kind() {
        LimitKind::Window(_) => true,
        // A leased rate may be charged ahead of time.
        LimitKind::Rate(_) => limit.sharing().lease.is_none(),
        LimitKind::Quota(_) | LimitKind::Concurrency(_) | LimitKind::Cooldown(_) | LimitKind::Pace(_) => false,
    };
    is_quick_kind && !limit.is_shadow() && !limit.counts_refused() && limit.reservations().is_none()
}

fn push_general_text(parts: u16, text: &mut String) {
    for names in [&*KINDS.map(|(name, ..)| name).join(", "), VERBS] {
        let numbers: Vec<_> = (0..names.split(", ").count()).map(|number| number.to_string()).collect();
        text.push_str(&format!("local {names} = {}\n", numbers.join(", ")));
    }
    text.push_str(include_str!("lua/head.lua"));
    let (has_penalties, has_updates) = (parts & PENALTY_BIT != 0, parts & UPDATE_BIT != 0);
    text.push_str(if has_penalties { include_str!("lua/penalty.lua") } else { include_str!("lua/no_penalty.lua") });
    if has_penalties && has_updates {
        text.push_str(include_str!("lua/penalty_update.lua"));
    }
    if parts & ONE_VALUE_KINDS != 0 {
        text.push_str(include_str!("lua/value.lua"));
    }
    for (_, (_, evaluate_text, update_text)) in (0..).zip(KINDS).filter(|(number, _)| parts & 1 << number != 0) {
        text.push_str(evaluate_text);
        text.push_str(if has_updates { update_text } else { "" });
    }
    if parts & RESERVATIONS_BIT != 0 {
        let lateness = LATENESS.as_micros();
        text.push_str(&format!(
            "local FORFEIT_HORIZONS, LATENESS, MAX_RECORDS = {FORFEIT_HORIZONS}, {lateness}, {MAX_RECORDS}\n"
        ));
        text.push_str(include_str!("lua/reservations.lua"));
    }
    text.push_str(include_str!("lua/decide.lua"));
}

/// The values that a quick script unpacks and returns for an operation. `$` is the operation's number.
struct QuickOpTemplate {
    text: &'static str,
    variables: &'static str,
    formats: &'static str,
    /// The bytes of an operation besides its flags, cost and penalty.
    encoded_bytes: usize,
    response_values: &'static str,
    response_formats: &'static str,
}

const QUICK_RATE: QuickOpTemplate = QuickOpTemplate {
    text: include_str!("lua/quick/rate.lua"),
    // Burst and spacing are for paroles; the lead is for leases.
    variables: "cost_time$, cost_rest$, refill$, refill_rest$",
    formats: "dddd",
    encoded_bytes: 64,
    response_values: ", tat$, tat_rest$",
    response_formats: "dd",
};

const QUICK_WINDOW: QuickOpTemplate = QuickOpTemplate {
    text: include_str!("lua/quick/window.lua"),
    variables: "limit$, window$, entries$, max_slots$, cell_length$, lead$, batch_lead$",
    formats: "ddddddd",
    encoded_bytes: 56,
    response_values: ", total$, newest$, free_from$, free_count$",
    response_formats: "dddd",
};

/// The text of a quick script for one batch, with its argument in `bytes` and its keys after `key_offset` others.
struct QuickScriptText {
    op_count: u32,
    /// The unpacking of the operations after the header.
    unpack_text: String,
    /// The decision. At a `break`, the general script with `general_parts` takes over.
    body: String,
    general_parts: u16,
    response_text: String,
}

impl QuickScriptText {
    fn new(code: u16) -> Self {
        let op_count = code.ilog2() / 2;
        let mut general_parts = 0;
        let (mut unpack_text, mut writes) = (String::new(), String::new());
        let mut body = include_str!("lua/quick/head.lua").to_owned();
        let (mut response_values, mut formats) = (String::new(), "<d".to_owned());
        // Lua counts from 1. Only the time and the margin of the header are needed, and the last flag.
        let mut position = 1 + HEADER_BYTES;
        for number in 1..=op_count {
            let bits = code >> (2 * (op_count - number));
            let (is_window, has_penalty) = (bits & 1 != 0, bits & 2 != 0);
            let template = if is_window { QUICK_WINDOW } else { QUICK_RATE };
            general_parts |= if is_window { 1 } else { 2 };
            let numbered = |text: &str| text.replace('$', &number.to_string());
            let (variables, format, last_flag_position) = (template.variables, template.formats, position + FLAG_BYTES);
            unpack_text.push_str(&numbered(&format!(
                "local has_penalty$ = {has_penalty}\n\
                 local exceeds_capacity$, cost$, {variables} = unpack('<Bd{format}', bytes, {last_flag_position})\n"
            )));
            body.push_str(&numbered(template.text));
            writes.push_str(&numbered(include_str!("lua/quick/write.lua")));
            response_values.push_str(&numbered(template.response_values));
            formats.push_str(template.response_formats);
            position += 1 + FLAG_BYTES + 8 + template.encoded_bytes;
            if has_penalty {
                general_parts |= PENALTY_BIT;
                position += PENALTY_BYTES;
                response_values.push_str(", 0, 0, 0");
                formats.push_str("ddB");
            }
        }
        body.push_str(include_str!("lua/quick/tail.lua"));
        body.push_str(&format!("if not is_refused then\n{writes}end\n"));
        let response_text = format!("pack('{formats}', now{response_values})");
        Self { op_count, unpack_text, body, general_parts, response_text }
    }
}

/// The text of a script, and the hash by which servers know it.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) text: String,
    pub(super) hash: String,
}

impl Script {
    fn new(text: String) -> Self {
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }
}

/// The scripts that were needed so far, by their kind.
pub(super) struct ScriptCache {
    general: [OnceLock<Script>; 1 << 9],
    quick: [OnceLock<Script>; 2 << (2 * MAX_QUICK_OPS)],
    batched: [OnceLock<Script>; 2 << (2 * MAX_QUICK_OPS)],
    announce: OnceLock<Script>,
}

impl Default for ScriptCache {
    fn default() -> Self {
        Self {
            general: [const { OnceLock::new() }; _],
            quick: [const { OnceLock::new() }; _],
            batched: [const { OnceLock::new() }; _],
            announce: OnceLock::new(),
        }
    }
}

impl ScriptCache {
    pub(super) fn get(&self, kind: ScriptKind) -> &Script {
        let cell = match kind {
            ScriptKind::General(parts) => &self.general[usize::from(parts)],
            ScriptKind::Quick(code) => &self.quick[usize::from(code)],
        };
        cell.get_or_init(|| Script::new(kind.script_text()))
    }

    /// Returns the script for many batches that each need [`ScriptKind::Quick`] with this code.
    pub(super) fn batched(&self, code: u16) -> &Script {
        self.batched[usize::from(code)].get_or_init(|| Script::new(batched_script_text(code)))
    }

    /// Returns the script that keeps a node's announcement.
    pub(super) fn announce(&self) -> &Script {
        self.announce.get_or_init(|| {
            let bounds = format!("local MAX_READ, MAX_BYTES = {}, {}\n", stored::MAX_READ, stored::MAX_BYTES);
            Script::new(bounds + include_str!("lua/announce.lua"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_testkit::servers::RedisServer;

    #[test]
    fn redis_accepts_every_script() {
        let Some(server) = RedisServer::start() else { return };
        let scripts = ScriptCache::default();
        let codes = (1..=MAX_QUICK_OPS as u32).flat_map(|count| 1_u16 << (2 * count)..2 << (2 * count));
        let mut texts = 0;
        // Not every number is a code: the leading 1 is at an even position.
        for code in codes.filter(|code| code.ilog2() % 2 == 0) {
            for script in [scripts.get(ScriptKind::Quick(code)), scripts.batched(code)] {
                assert_eq!(server.command(&["SCRIPT", "LOAD", &script.text]), script.hash, "{code:b}");
                texts += 1;
            }
        }
        assert_eq!(texts, 2 * 340);
        for parts in 0..1 << 9 {
            let script = scripts.get(ScriptKind::General(parts));
            assert_eq!(server.command(&["SCRIPT", "LOAD", &script.text]), script.hash, "{parts:b}");
        }
    }
}
