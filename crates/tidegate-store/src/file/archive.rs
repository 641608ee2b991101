//! States that are archived beside a key's own state, for a clock that is set while no process runs.
//!
//! If the clock is a day ahead when a process starts, every state seems to have ended. Once the clock is right again,
//! the process must find the earlier blocks and quotas. So a state that ended while no process ran isn't removed but
//! archived. A quota's period makes room for the next one in the same way. A state that ends while a process runs is
//! removed: that process uses the monotonic clock, which is never set. If a state that was archived still counts by
//! the clock of a later opening, that opening uses it again.

use tidegate_core::batch::{BatchContext, OpContext};
use tidegate_core::penalty::PenaltyRecord;
use tidegate_core::state::Usage;
use tidegate_core::{Key, KeyState, Limit, LimitId, Op, Span, Time, Verb};

/// The time that a state stays past its end.
pub(super) const ARCHIVE_DURATION: Span = Span::from_secs(7 * 86_400);
/// The most rows past their end, about 60 MB. At the bound, the first rows that are checked are removed.
pub(super) const MAX_ARCHIVED_ROWS: u64 = 1 << 20;
/// A state that ended less than this before an opening doesn't displace one that was archived earlier. Between two
/// processes that follow each other so closely, the clock wasn't set by much: the earlier state is the one it lost.
const RESTART_GAP: Span = Span::from_secs(3_600);

/// A key's rows, decoded.
#[derive(Debug, Default)]
pub(super) struct StoredStates {
    pub state: Option<KeyState>,
    pub archived: Option<KeyState>,
}

impl StoredStates {
    /// The same rows, with the state that counts at an opening at `now` as `state`. The flag is true if they changed.
    pub(super) fn reconcile(self, limit: &Limit, now: Time) -> (Self, bool) {
        let is_live = |state: &KeyState| state.idle_at(limit) > now;
        let without_archived = |state| Self { state: Some(state), archived: None };
        match (self.state, self.archived) {
            (Some(state), None) if is_live(&state) => (without_archived(state), false),
            (Some(state), None) => (Self { state: None, archived: Some(state) }, true),
            (None, Some(archived)) if is_live(&archived) => (without_archived(archived), true),
            (None, archived) => (Self { state: None, archived }, false),
            (Some(state), Some(archived)) => match (is_live(&state), is_live(&archived)) {
                (true, false) => (Self { state: Some(state), archived: Some(archived) }, false),
                (false, true) => (Self { state: Some(archived), archived: Some(state) }, true),
                (true, true) => (merge_live_states(state, archived, limit, now), true),
                (false, false) => {
                    let replaces_archived =
                        period_start(&state).is_some() || now.since(state.idle_at(limit)) > RESTART_GAP;
                    (Self { state: None, archived: Some(if replaces_archived { state } else { archived }) }, true)
                }
            },
        }
    }
}

/// Merges two states that both count at `now`, since the clock was set back. Of a quota, the nearer period becomes the
/// state, and the other is archived. Otherwise the stricter state remains. The later block holds in any case.
fn merge_live_states(state: KeyState, archived: KeyState, limit: &Limit, now: Time) -> StoredStates {
    let record = with_later_block(state.penalty_record(), archived.penalty_record(), limit, now);
    let with_record = |state: &KeyState| KeyState::new(state.usage().clone(), record);
    if let (Usage::Quota(own), Usage::Quota(other)) = (state.usage(), archived.usage()) {
        let (own, other) = (*own, *other);
        if other.period == own.period {
            let most_used = if other.used > own.used { archived } else { state };
            return StoredStates { state: Some(with_record(&most_used)), archived: None };
        }
        let is_nearer = other.period.end > now && (own.period.end <= now || other.period.start < own.period.start);
        let (nearer, further) = if is_nearer { (archived, state) } else { (state, archived) };
        return StoredStates { state: Some(with_record(&nearer)), archived: Some(further) };
    }
    let remaining_in = |state: &KeyState| {
        let op = Op::new(LimitId::FIRST, Verb::Peek, Key::default(), 0);
        let bare = KeyState::new(state.usage().clone(), PenaltyRecord::default());
        bare.peek(&OpContext { op: &op, limit, batch: BatchContext::default(), now }).remaining
    };
    let stricter = if remaining_in(&archived) < remaining_in(&state) { &archived } else { &state };
    StoredStates { state: Some(with_record(stricter)), archived: None }
}

fn with_later_block(own: &PenaltyRecord, other: &PenaltyRecord, limit: &Limit, now: Time) -> PenaltyRecord {
    let Some(penalty) = limit.penalty() else { return PenaltyRecord::default() };
    let [own, other] = [own, other].map(|record| {
        let mut record = *record;
        // A block by a clock that was ahead is counted from now.
        penalty.refresh(&mut record, now);
        record
    });
    if other.blocked_until > own.blocked_until { other } else { own }
}

/// The start of the period that a quota's state counts, or `None` for other states.
pub(super) fn period_start(state: &KeyState) -> Option<Time> {
    match state.usage() {
        Usage::Quota(usage) => Some(usage.period.start),
        _ => None,
    }
}
