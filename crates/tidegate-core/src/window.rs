//! `window`: a strict trailing window, kept as a log of the times at which calls were admitted.
//!
//! The log is exact up to its number of entries. With a limit above that, entries in the same cell of a grid are merged
//! once the log is full, and count as made at the later of their times. A cell is `window ÷ entries` wide, so a slot
//! may become free that much late, never early. The grid is fixed, so merging again doesn't move an entry further.

mod log;

pub use log::{WindowLog, WindowSlot};

use crate::limit::{LimitError, checked_limit};
use crate::state::LimitStatus;
use crate::time::MAX_CLOCK_LAG;
use crate::{Span, Time};

/// The maximum number of entries that a window keeps exactly. Half as many more still fit in 16 bits.
const MAX_ENTRIES: u32 = 1 << 15;

/// At most `limit` in any trailing `window`. A call made at `t` counts until exactly `t + window`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    limit: u64,
    window: Span,
    entries: u32,
    cell_width: u64,
    lead: Span,
}

impl Window {
    /// Creates a window of at most `limit` in any trailing `window`. It keeps up to `entries` times exactly.
    ///
    /// # Errors
    /// `limit` is above 2^40, `window` is zero, or `entries` is outside 1 to 32,768.
    pub fn new(limit: u64, window: Span, entries: u32) -> Result<Self, LimitError> {
        checked_limit(limit)?;
        if window.is_zero() {
            return Err(LimitError::ZeroPeriod);
        }
        if entries == 0 || entries > MAX_ENTRIES {
            return Err(LimitError::InvalidEntries { found: entries });
        }
        let cell = window.as_micros().div_ceil(u64::from(entries));
        Ok(Self { limit, window, entries, cell_width: cell, lead: Span::ZERO })
    }

    /// Sets the maximum lead of calls that are counted ahead of now ([`Batch::with_lead`](crate::Batch::with_lead)).
    #[must_use]
    pub fn with_lead(mut self, lead: Span) -> Self {
        self.lead = lead;
        self
    }

    /// The maximum time by which calls are counted ahead of now. Default zero.
    pub fn lead(&self) -> Span {
        self.lead
    }

    /// The maximum in any trailing window.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The length of the window.
    pub fn window(&self) -> Span {
        self.window
    }

    /// The number of times that are kept exactly.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// The maximum delay with which a slot becomes free. Zero while the log is exact.
    pub fn max_lateness(&self) -> Span {
        if self.is_exact() { Span::ZERO } else { Span::from_micros(self.cell_width) }
    }

    /// The maximum number of slots of a log: more than the exact entries, so that many calls share the cost of a merge.
    pub fn slot_capacity(&self) -> usize {
        let entries = self.entries as usize;
        if self.is_exact() { entries.max(2) } else { entries + entries / 2 + 2 }
    }

    /// True if the time of every call is kept, however many there are.
    pub fn is_exact(&self) -> bool {
        self.limit <= u64::from(self.entries)
    }

    /// Removes entries that have left the window. Returns the time of the decision: `now`, or later if overtaken.
    pub fn refresh(&self, log: &mut WindowLog, now: Time) -> Time {
        let mut now = now;
        if let Some(newest) = log.newest()
            && newest > now + self.lead
        {
            let overtaken = newest - self.lead;
            if overtaken.since(now) <= MAX_CLOCK_LAG {
                now = overtaken;
            } else {
                log.clamp_to(now + self.lead);
            }
        }
        while let Some(oldest) = log.oldest()
            && now.since(oldest) >= self.window
        {
            log.pop_front();
        }
        // Few enough to be kept individually again.
        log.merged &= log.total() > u64::from(self.entries);
        now
    }

    /// The status for a call of `cost` at `now`, in a log that was refreshed for `now`.
    pub fn status(&self, log: &WindowLog, cost: u64, now: Time) -> LimitStatus {
        let used = log.total();
        let retry_at = if cost > self.limit {
            Time::NEVER
        } else if cost <= self.limit.saturating_sub(used) {
            now
        } else {
            let mut missing = used.saturating_add(cost) - self.limit;
            let last_needed = log.iter().find(|slot| {
                missing = missing.saturating_sub(slot.count);
                missing == 0
            });
            last_needed.map_or(now, |slot| slot.at + self.window)
        };
        let reset_at = log.newest().map_or(now, |newest| newest + self.window);
        LimitStatus { limit: self.limit, used, remaining: self.limit.saturating_sub(used), retry_at, reset_at }
    }

    /// Records a call at `now`, or at the newest entry's time if it was overtaken. The log must be refreshed for `now`.
    pub fn charge(&self, log: &mut WindowLog, cost: u64, now: Time) {
        if cost == 0 {
            return;
        }
        let now = log.newest().map_or(now, |newest| newest.max(now));
        let merges = log
            .newest()
            .is_some_and(|newest| newest == now || (log.merged && self.cell_of(newest) == self.cell_of(now)));
        if merges {
            log.add_to_newest(WindowSlot { at: now, count: cost });
            return;
        }
        if log.len() >= self.slot_capacity() {
            if self.is_exact() {
                self.make_room(log);
            } else {
                self.merge_cells(log);
            }
        }
        log.push_back(WindowSlot { at: now, count: cost }, self.slot_capacity());
    }

    /// Makes room for another slot in an exact log, which is full only if paroles or debits have exceeded the limit.
    /// All excess calls must expire before a slot is free, so merging the oldest delays nothing without a refund.
    fn make_room(&self, log: &mut WindowLog) {
        while log.len() >= self.slot_capacity() {
            log.merge_oldest();
        }
    }

    /// Moves a charge from `from`, ahead of now, to `now` in a log that was refreshed for `now`. With merged entries,
    /// it can't be identified and stays at `from`: later, never early.
    pub fn move_to_now(&self, log: &mut WindowLog, cost: u64, from: Time, now: Time) {
        if cost > 0 && from > now && self.is_exact() && log.subtract_at(from, cost) {
            self.make_room(log);
            log.insert_at(WindowSlot { at: now, count: cost }, self.slot_capacity());
        }
    }

    /// Gives `cost` back in a log that was refreshed for `now`. A charge at `from` that can be identified is removed;
    /// one that has left the window changes nothing. Otherwise, or if `from` is unknown ([`Time::ZERO`]), the oldest
    /// entries are removed, so that no slot becomes free too early.
    pub fn refund(&self, log: &mut WindowLog, cost: u64, from: Time, now: Time) {
        if self.refund_exactly(log, cost, from, now) {
            return;
        }
        let mut rest = cost;
        while rest > 0 {
            let Some(oldest) = log.front() else { return };
            if oldest.count > rest {
                log.set(0, WindowSlot { count: oldest.count - rest, ..oldest });
                return;
            }
            rest -= oldest.count;
            log.pop_front();
        }
    }

    /// Gives back the cost of a call that was counted `from` this time on, if the window tells it from others. Returns true if
    /// it does, or no longer counts the call.
    pub fn refund_exactly(&self, log: &mut WindowLog, cost: u64, from: Time, now: Time) -> bool {
        from > Time::ZERO && (now.since(from) >= self.window || self.is_exact() && log.subtract_at(from, cost))
    }

    /// Merges entries in the same cell of the grid. Until few calls are left, new entries are then merged immediately:
    /// a key in constant use needs one slot per cell and usually changes only one.
    fn merge_cells(&self, log: &mut WindowLog) {
        let mut kept = 0;
        for index in 1..log.len() {
            let (slot, into) = (log.get(index), log.get(kept));
            if self.cell_of(into.at) == self.cell_of(slot.at) {
                log.set(kept, WindowSlot { at: slot.at, count: into.count.saturating_add(slot.count) });
            } else {
                kept += 1;
                log.set(kept, slot);
            }
        }
        log.truncate(kept + 1);
        log.merged = true;
        log.shrink_to_fit();
    }

    fn cell_of(&self, at: Time) -> u64 {
        at.as_micros() / self.cell_width
    }

    /// The time at which the log is empty.
    pub fn idle_at(&self, log: &WindowLog) -> Time {
        log.newest().map_or(Time::ZERO, |newest| newest + self.window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn at(secs: u64) -> Time {
        Time::from_secs(1_000_000 + secs)
    }

    fn take(window: &Window, log: &mut WindowLog, cost: u64, now: Time) -> LimitStatus {
        let now = window.refresh(log, now);
        let status = window.status(log, cost, now);
        if status.retry_at == now {
            window.charge(log, cost, now);
        }
        status
    }

    #[test]
    fn a_window_admits_five_in_any_minute() {
        let window = Window::new(5, Span::from_secs(60), 64).unwrap();
        let mut log = WindowLog::default();
        for second in [0, 10, 20, 30, 40] {
            assert_eq!(take(&window, &mut log, 1, at(second)).retry_at, at(second));
        }
        assert_eq!(take(&window, &mut log, 1, at(50)).retry_at, at(60));
        assert_eq!(take(&window, &mut log, 2, at(50)).retry_at, at(70));
        assert_eq!(take(&window, &mut log, 6, at(50)).retry_at, Time::NEVER);
        assert_eq!(take(&window, &mut log, 1, at(60)).retry_at, at(60));
        assert_eq!(take(&window, &mut log, 1, at(60)).retry_at, at(70));
    }

    #[test]
    fn merged_entries_expire_at_most_one_cell_late() {
        let window = Window::new(1000, Span::from_secs(64), 64).unwrap();
        let mut log = WindowLog::default();
        for step in 0..1000 {
            let now = at(0) + Span::from_millis(step * 60);
            assert_eq!(take(&window, &mut log, 1, now).retry_at, now, "step {step}");
        }
        assert_eq!(log.total(), 1000);
        assert!(log.len() <= 98, "{}", log.len());
        let retry = take(&window, &mut log, 1, at(60)).retry_at;
        assert!(retry >= at(64) && retry <= at(65), "{retry:?}");
    }

    #[test]
    fn five_calls_need_no_heap_memory() {
        let window = Window::new(5, Span::from_secs(60), 64).unwrap();
        let mut log = WindowLog::default();
        for second in 0..200 {
            take(&window, &mut log, 1, at(second * 7));
            assert_eq!(log.heap_bytes(), 0);
        }
        assert!(size_of::<WindowLog>() <= 56, "{}", size_of::<WindowLog>());
        assert!(size_of::<crate::KeyState>() <= 80, "{}", size_of::<crate::KeyState>());
    }

    #[test]
    fn refunds_remove_the_oldest_calls_first() {
        let window = Window::new(5, Span::from_secs(60), 64).unwrap();
        let mut log = WindowLog::default();
        take(&window, &mut log, 3, at(0));
        take(&window, &mut log, 2, at(30));
        window.refund(&mut log, 4, Time::ZERO, at(30));
        assert_eq!(log.iter().collect::<Vec<_>>(), [WindowSlot { at: at(30), count: 1 }]);
        window.refund(&mut log, u64::MAX, Time::ZERO, at(30));
        assert_eq!((log.total(), log.len()), (0, 0));
    }

    #[test]
    fn clock_steps_back_block_at_most_one_window() {
        let window = Window::new(2, Span::from_secs(60), 64).unwrap();
        let mut log = WindowLog::default();
        take(&window, &mut log, 2, at(31_536_000));
        assert_eq!(take(&window, &mut log, 1, at(0)).retry_at, at(60));
        assert_eq!(take(&window, &mut log, 1, at(60)).retry_at, at(60));
    }

    #[test]
    fn an_overtaken_call_uses_the_newest_entrys_time() {
        let window = Window::new(2, Span::from_secs(60), 64).unwrap();
        let mut log = WindowLog::default();
        take(&window, &mut log, 1, at(1));
        let status = take(&window, &mut log, 1, at(1) - Span::from_millis(1));
        assert_eq!((status.remaining, log.len()), (1, 1));
        assert_eq!(log.iter().next().unwrap().at, at(1));
    }
}
