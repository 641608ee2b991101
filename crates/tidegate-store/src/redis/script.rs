//! The script that decides, put together from what a batch needs: each function that it defines costs time in every
//! call, and most batches ask one or two kinds of limit.

use std::sync::OnceLock;

use tidegate_core::time::OVERTAKEN;
use tidegate_core::{Batch, Kind, Limit, Limits, Time, Verb};

/// What the scripts count to: past it, doubles have gaps.
const COUNTED: u64 = 1 << 53;

/// The kinds of limit by their numbers in the scripts, with what judges and charges them, and what else they are told.
const KINDS: [(&str, &str, &str); 5] = [
    ("WINDOW", include_str!("lua/window.lua"), include_str!("lua/window_tell.lua")),
    ("RATE", include_str!("lua/rate.lua"), include_str!("lua/rate_tell.lua")),
    ("QUOTA", include_str!("lua/quota.lua"), include_str!("lua/quota_tell.lua")),
    ("CONCURRENCY", include_str!("lua/concurrency.lua"), include_str!("lua/concurrency_tell.lua")),
    ("COOLDOWN", include_str!("lua/cooldown.lua"), include_str!("lua/cooldown_tell.lua")),
];

/// The verbs by their numbers in the scripts: the two that ask come first.
const VERBS: [&str; 11] =
    ["TAKE", "PEEK", "REFUND", "RELEASE", "RENEW", "RESET", "DEBIT", "SETTLE", "THROTTLE", "SUCCEED", "DISABLE"];

/// A kind's place in [`KINDS`].
pub(super) fn kind_number(kind: &Kind) -> u8 {
    match kind {
        Kind::Window(_) => 0,
        Kind::Rate(_) => 1,
        Kind::Quota(_) => 2,
        Kind::Concurrency(_) => 3,
        Kind::Cooldown(_) => 4,
    }
}

/// A verb's place in [`VERBS`].
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
        Verb::Succeed { .. } => 9,
        Verb::Disable => 10,
    }
}

/// Which parts a batch needs: a bit for each kind, one for penalties and one for verbs that don't ask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Parts(u8);

const PENALTIES: u8 = 1 << 5;
const TELLS: u8 = 1 << 6;
/// One take under a plain rate.
const PLAIN: u8 = 1 << 7;

impl Parts {
    /// What these operations need; `alone` says that no other part of their batch has a say.
    pub(super) fn of(batch: &Batch, limits: &Limits, alone: bool) -> Self {
        let mut parts = 0;
        let mut asked = 0;
        let mut plain = alone;
        for op in batch.ops() {
            let Some(limit) = limits.get(op.limit) else { continue };
            asked += 1;
            parts |= 1 << kind_number(limit.kind());
            if limit.penalty().is_some() {
                parts |= PENALTIES;
            }
            if !matches!(op.verb, Verb::Take | Verb::Peek) {
                parts |= TELLS;
            }
            plain &= is_plain(limit) && op.verb == Verb::Take;
        }
        Self(if plain && asked == 1 { PLAIN } else { parts })
    }

    fn has(self, bit: u8) -> bool {
        self.0 & bit != 0
    }

    fn text(self) -> String {
        let numbered = |names: &mut dyn Iterator<Item = &'static str>| {
            let (names, numbers): (Vec<_>, Vec<_>) = names.zip(0..).map(|(name, n)| (name, n.to_string())).unzip();
            format!("local {} = {}\n", names.join(", "), numbers.join(", "))
        };
        let (never, overtaken) = (Time::NEVER.as_micros(), OVERTAKEN.as_micros());
        let mut text = format!("local NEVER, OVERTAKEN, COUNTED = {never}, {overtaken}, {COUNTED}\n");
        if self.0 == PLAIN {
            text.push_str(include_str!("lua/plain.lua"));
            return text;
        }
        text.push_str(&numbered(&mut KINDS.iter().map(|kind| kind.0)));
        text.push_str(&numbered(&mut VERBS.into_iter()));
        text.push_str(include_str!("lua/head.lua"));
        let penalty = if self.has(PENALTIES) { include_str!("lua/penalty.lua") } else { include_str!("lua/clean.lua") };
        text.push_str(penalty);
        for (_, (_, asks, tells)) in (0..).zip(KINDS).filter(|(number, _)| self.has(1 << number)) {
            text.push_str(asks);
            if self.has(TELLS) {
                text.push_str(tells);
            }
        }
        text.push_str(include_str!("lua/decide.lua"));
        text
    }
}

fn is_plain(limit: &Limit) -> bool {
    matches!(limit.kind(), Kind::Rate(_)) && limit.penalty().is_none() && limit.sharing().lease.is_none()
}

/// A script's text and the hash that servers know it by.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) text: String,
    pub(super) hash: String,
}

/// The scripts that were needed so far: one for each set of parts, 256 at the most.
pub(super) struct Scripts([OnceLock<Script>; 256]);

impl Default for Scripts {
    fn default() -> Self {
        Self([const { OnceLock::new() }; 256])
    }
}

impl Scripts {
    pub(super) fn get(&self, parts: Parts) -> &Script {
        self.0[usize::from(parts.0)].get_or_init(|| {
            let text = parts.text();
            let hash = redis::Script::new(&text).get_hash().to_owned();
            Script { text, hash }
        })
    }
}
