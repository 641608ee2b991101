//! The cool-down of a credential: one throttled reply closes its gate for all callers.
//!
//! The n-th closing in a row lasts `min(base · 2^(n−1), cap)`, or longer if the provider asked for longer. The first lasts
//! exactly as long as the provider asked for. Calls sent before it are of an older *generation*: ten that are throttled close the gate once, and no success of them opens it.
//!
//! After a closing, callers are released one at a time, a stagger apart, because all would otherwise come at once.
//! After a success, slots become shorter: each twenty staggers, the rate of release rises by that of the first. This ends
//! with the first unused slot, or after the longest release time. If it is zero, the first success releases all.

use crate::time::MAX_CLOCK_LAG;
use crate::{Backoff, Span, Time};

/// The minimum time for which an open gate is kept: longer than any call is in flight, to recognize late replies.
const MIN_RETENTION: Span = Span::from_secs(3600);

/// The time in which the rate of release rises by one caller per stagger, in staggers.
const STAGGERS_PER_RISE: u64 = 20;

/// The cool-down of a throttled credential. All values are valid: a span of zero disables closings or staggers, and
/// with a cap below the base, every closing lasts as long as the cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cooldown {
    /// The length of the first closing. Default 1 s.
    pub base: Span,
    /// The longest closing, unless the provider asked for longer. Default 60 s.
    pub cap: Span,
    /// The time between two released callers. Default 100 ms.
    pub stagger: Span,
    /// The longest time for which callers are released one at a time after a success. Zero releases all at the first
    /// success. Default 10 s.
    pub max_release_time: Span,
}

impl Default for Cooldown {
    fn default() -> Self {
        let stagger = Span::from_millis(100);
        let max_release_time = stagger.times(Self::RELEASE_STAGGERS);
        Self { base: Span::from_secs(1), cap: Span::from_secs(60), stagger, max_release_time }
    }
}

/// The state of a credential. The default is one that never was throttled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CooldownGate {
    /// The time at which the gate opens or opened. The epoch if it may stay open.
    pub opens_at: Time,
    /// The time of the last event: of the last closing or, if later, of the last admitted call.
    pub last_event_at: Time,
    /// The number of closings. A call stores the number with which it was admitted.
    pub generation: u32,
    /// The number of closings since the last success.
    pub closings_in_row: u8,
}

impl Cooldown {
    /// The usual [`max_release_time`](Self::max_release_time), in staggers.
    pub const RELEASE_STAGGERS: u64 = 100;

    /// The length of the n-th closing, n counted from 1: `min(base · 2^(n−1), cap)`.
    pub fn closing_length(&self, step: u8) -> Span {
        Backoff::exponential(self.base, self.cap).base_wait(u32::from(step))
    }

    /// Updates the gate to `now`: resets it after a long idle time. If the clock has stepped back since a closing, the
    /// closing starts again, so that it lasts its own length and no longer.
    pub fn refresh(&self, gate: &mut CooldownGate, now: Time) {
        if gate.last_event_at > now + MAX_CLOCK_LAG {
            if gate.opens_at > Time::ZERO && !gate.opens_at.is_never() {
                gate.opens_at = now + gate.opens_at.since(gate.last_event_at);
            }
            gate.last_event_at = now;
        }
        if self.idle_at(gate) <= now {
            *gate = CooldownGate::default();
        } else if self.can_stay_open(gate, now) {
            gate.opens_at = Time::ZERO;
        }
    }

    /// The time for which a gate is kept after its last event: one hour, or the cap if that is longer.
    pub fn retention(&self) -> Span {
        self.cap.max(MIN_RETENTION)
    }

    /// True if a success has proven the credential and the waiting callers have been released.
    fn can_stay_open(&self, gate: &CooldownGate, now: Time) -> bool {
        let is_idle = gate.last_event_at + self.stagger.times(2) <= now;
        gate.closings_in_row == 0
            && gate.last_event_at >= gate.opens_at
            && (is_idle || gate.opens_at + self.max_release_time <= now)
    }

    /// The time at which the gate admits a caller: `now` if it does, [`Time::NEVER`] if it was closed permanently. If
    /// several callers got the same time, the gate admits one of them and gives the others a later time.
    pub fn free_at(&self, mut gate: CooldownGate, now: Time) -> Time {
        self.refresh(&mut gate, now);
        let free_at = if gate.opens_at == Time::ZERO {
            now
        } else if gate.last_event_at < gate.opens_at {
            gate.opens_at
        } else if gate.closings_in_row == 0 {
            (gate.last_event_at + self.slot_length(&gate)).min(gate.opens_at + self.max_release_time)
        } else {
            gate.last_event_at + self.stagger
        };
        free_at.max(now)
    }

    /// The length of the slot after the last event, once a success has proven the credential. A fixed length would hold
    /// a provider with a high rate back for all of the release.
    fn slot_length(&self, gate: &CooldownGate) -> Span {
        let rise = self.stagger.times(STAGGERS_PER_RISE).as_micros().max(1);
        let rises = gate.last_event_at.since(gate.opens_at).as_micros() / rise;
        Span::from_micros(self.stagger.as_micros() / (rises + 1))
    }

    /// True if a time that [`Cooldown::free_at`] returned at `now` is the end of a closing, which never becomes
    /// earlier. Slots of the release after it may. False for a closing that ends within the length of a slot.
    pub fn is_closing(&self, free_at: Time, now: Time) -> bool {
        free_at > now + MAX_CLOCK_LAG + self.stagger
    }

    /// Admits a caller that is free at `now` according to [`Cooldown::free_at`]. Returns the generation for its reply.
    pub fn charge(&self, gate: &mut CooldownGate, now: Time) -> u32 {
        self.refresh(gate, now);
        if gate.opens_at > Time::ZERO {
            gate.last_event_at = now;
        }
        gate.generation
    }

    /// Closes the gate after a throttled reply to a call of `generation`, at least for the requested wait.
    ///
    /// A call of an older generation was under way when the gate closed, so only a `retry_after` that ends later
    /// counts. A higher generation than the gate's, whose state was deleted since, counts as the present one. No
    /// closing is ever shortened.
    pub fn record_throttle(&self, gate: &mut CooldownGate, generation: u32, retry_after: Option<Span>, now: Time) {
        self.refresh(gate, now);
        let mut wait = retry_after.unwrap_or(Span::ZERO);
        if generation >= gate.generation {
            gate.generation = generation.saturating_add(1);
            gate.closings_in_row = gate.closings_in_row.saturating_add(1);
            // What the provider says is true until it turns out not to be.
            if wait.is_zero() || gate.closings_in_row > 1 {
                wait = wait.max(self.closing_length(gate.closings_in_row));
            }
        }
        close_until(gate, now + wait, now);
    }

    /// Closes the gate for `wait`, or longer if it is closed for longer already. No step of the backoff: the provider keeps
    /// room from then on.
    pub fn close(&self, gate: &mut CooldownGate, wait: Span, now: Time) {
        self.refresh(gate, now);
        close_until(gate, now + wait, now);
    }

    /// Records a success. The next closing then counts as a first one, and an open gate stays open after the waiting
    /// callers have been released. A call of another generation changes nothing.
    pub fn record_success(&self, gate: &mut CooldownGate, generation: u32, now: Time) {
        self.refresh(gate, now);
        if generation == gate.generation {
            gate.closings_in_row = 0;
        }
    }

    /// Closes the gate because the provider rejects the credential (401, 403). [`Time::NEVER`] closes it permanently.
    /// The closing doesn't count towards the next length. A repaired credential starts with a new gate.
    pub fn disable(&self, gate: &mut CooldownGate, until: Time, now: Time) {
        self.refresh(gate, now);
        gate.generation = gate.generation.saturating_add(1);
        close_until(gate, until, now);
    }

    /// The time at which the state of the gate can be deleted: [`Cooldown::retention`] after its last event.
    pub fn idle_at(&self, gate: &CooldownGate) -> Time {
        if *gate == CooldownGate::default() {
            return Time::ZERO;
        }
        gate.opens_at.max(gate.last_event_at) + self.retention()
    }
}

/// Closes the gate until a time, if that is later than both `now` and the present end.
fn close_until(gate: &mut CooldownGate, until: Time, now: Time) {
    if until > gate.opens_at.max(now) {
        gate.opens_at = until;
        gate.last_event_at = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const COOLDOWN: Cooldown = Cooldown {
        base: Span::from_secs(1),
        cap: Span::from_secs(8),
        stagger: Span::from_millis(200),
        max_release_time: Span::from_secs(20),
    };
    const YEAR: Span = Span::from_secs(365 * 86_400);

    fn at(millis: u64) -> Time {
        Time::from_secs(1_700_000_000) + Span::from_millis(millis)
    }

    fn throttled(now: Time) -> CooldownGate {
        let mut gate = CooldownGate::default();
        let generation = COOLDOWN.charge(&mut gate, now);
        COOLDOWN.record_throttle(&mut gate, generation, None, now);
        gate
    }

    #[test]
    fn cool_downs_double_up_to_the_cap() {
        let (mut gate, mut now, mut waits) = (CooldownGate::default(), at(0), Vec::new());
        for _ in 0..5 {
            let generation = COOLDOWN.charge(&mut gate, now);
            COOLDOWN.record_throttle(&mut gate, generation, None, now);
            let free_at = COOLDOWN.free_at(gate, now);
            waits.push(free_at.since(now).as_micros() / 1_000_000);
            now = free_at;
        }
        assert_eq!(waits, [1, 2, 4, 8, 8]);
        let generation = COOLDOWN.charge(&mut gate, now);
        COOLDOWN.record_success(&mut gate, generation, now);
        let generation = COOLDOWN.charge(&mut gate, now);
        COOLDOWN.record_throttle(&mut gate, generation, None, now);
        assert_eq!(COOLDOWN.free_at(gate, now), now + Span::from_secs(1), "a success starts over");
    }

    #[test]
    fn steps_never_overflow() {
        let mut gate = CooldownGate { generation: u32::MAX - 3, ..CooldownGate::default() };
        let mut now = at(0);
        for _ in 0..1_000 {
            let generation = COOLDOWN.charge(&mut gate, now);
            COOLDOWN.record_throttle(&mut gate, generation, None, now);
            assert!(gate.opens_at > now, "closed by every throttled reply of its own generation");
            now = COOLDOWN.free_at(gate, now);
        }
        assert_eq!(COOLDOWN.closing_length(u8::MAX), Span::from_secs(8));
        let widest = Cooldown { base: Span::MAX, cap: Span::MAX, stagger: Span::MAX, max_release_time: Span::MAX };
        let last = Time::NEVER - Span::from_micros(1);
        widest.record_throttle(&mut gate, u32::MAX, Some(Span::MAX), last);
        assert_eq!((widest.free_at(gate, last), widest.idle_at(&gate)), (Time::NEVER, Time::NEVER));
    }

    #[test]
    fn a_cool_down_ends_at_its_exact_time() {
        let gate = throttled(at(0));
        assert_eq!(COOLDOWN.free_at(gate, at(0)), at(1_000));
        assert_eq!(COOLDOWN.free_at(gate, at(900)), at(1_000));
        assert_eq!(COOLDOWN.free_at(gate, at(1_000) - Span::from_micros(1)), at(1_000));
        assert_eq!(COOLDOWN.free_at(gate, at(1_000)), at(1_000));
        assert_eq!(COOLDOWN.free_at(gate, at(1_500)), at(1_500));
    }

    #[test]
    fn a_good_credential_keeps_the_default_state() {
        let mut gate = CooldownGate::default();
        for _ in 0..3 {
            assert_eq!(COOLDOWN.free_at(gate, at(0)), at(0));
            let generation = COOLDOWN.charge(&mut gate, at(0));
            COOLDOWN.record_success(&mut gate, generation, at(0));
        }
        assert_eq!(gate, CooldownGate::default());
    }

    #[test]
    fn a_zero_base_cools_down_only_as_requested() {
        let cooldown = Cooldown { base: Span::ZERO, ..COOLDOWN };
        let mut gate = CooldownGate::default();
        cooldown.record_throttle(&mut gate, 0, None, at(0));
        cooldown.record_throttle(&mut gate, 1, Some(Span::ZERO), at(0));
        assert_eq!((cooldown.free_at(gate, at(0)), gate.generation), (at(0), 2));
        cooldown.record_throttle(&mut gate, 2, Some(Span::from_secs(1)), at(0));
        assert_eq!(cooldown.free_at(gate, at(0)), at(1_000));
    }

    #[test]
    fn thirty_workers_are_released_one_stagger_apart() {
        let mut gate = CooldownGate::default();
        let generation = COOLDOWN.charge(&mut gate, at(0));
        COOLDOWN.record_throttle(&mut gate, generation, Some(Span::from_secs(600)), at(0));
        let mut waiting: Vec<Time> = (0..30).map(|worker| COOLDOWN.free_at(gate, at(worker * 1_000))).collect();
        let mut released = Vec::new();
        while let Some(now) = waiting.pop() {
            // A caller comes back exactly at the returned time, and asks again if another one was faster.
            let free_at = COOLDOWN.free_at(gate, now);
            if free_at == now {
                COOLDOWN.charge(&mut gate, now);
                released.push(now);
            } else {
                waiting.push(free_at);
                waiting.sort_unstable_by(|a, b| b.cmp(a));
            }
        }
        let expected: Vec<Time> = (0..30).map(|slot| at(600_000 + slot * 200)).collect();
        assert_eq!(released, expected);
        // After a success, waiting callers are still released one at a time, until a slot is unused or the maximum time
        // is over.
        COOLDOWN.record_success(&mut gate, 1, at(605_820));
        assert_eq!(COOLDOWN.free_at(gate, at(605_820)), at(605_900));
        let mut unwanted = gate;
        for _ in 0..3 {
            assert_eq!(COOLDOWN.free_at(unwanted, at(606_200)), at(606_200));
            COOLDOWN.charge(&mut unwanted, at(606_200));
        }
        let (mut now, mut count) = (at(605_900), 0);
        while now < at(620_000) {
            COOLDOWN.charge(&mut gate, now);
            (now, count) = (COOLDOWN.free_at(gate, now), count + 1);
        }
        // Two in each stagger at first, and five at last: 21 + 60 + 80 + 100.
        assert!((258..=264).contains(&count), "{count}");
        for _ in 0..3 {
            assert_eq!(COOLDOWN.free_at(gate, at(620_000)), at(620_000));
            COOLDOWN.charge(&mut gate, at(620_000));
        }
        // Without a success, the release has no maximum time.
        let mut gate = CooldownGate::default();
        COOLDOWN.record_throttle(&mut gate, 0, None, at(0));
        for slot in 5..500 {
            assert_eq!(COOLDOWN.free_at(gate, at(slot * 200)), at(slot * 200));
            COOLDOWN.charge(&mut gate, at(slot * 200));
            assert_eq!(COOLDOWN.free_at(gate, at(slot * 200)), at((slot + 1) * 200));
        }
    }

    #[test]
    fn after_success_slots_become_shorter() {
        for (since, slot) in [(0, 200_000), (3_999, 200_000), (4_000, 100_000), (8_000, 66_666), (16_000, 40_000)] {
            let last_event_at = at(since);
            let gate = CooldownGate { opens_at: at(0), last_event_at, generation: 1, closings_in_row: 0 };
            assert_eq!(COOLDOWN.free_at(gate, last_event_at), last_event_at + Span::from_micros(slot), "{since} ms");
            let unproven = CooldownGate { closings_in_row: 1, ..gate };
            assert_eq!(COOLDOWN.free_at(unproven, last_event_at), last_event_at + COOLDOWN.stagger, "{since} ms");
        }
    }

    #[test]
    fn after_success_slots_end_with_the_release() {
        let (until, end) = (at(1_000), at(21_000));
        for since in [0, 20, 34] {
            let gate = CooldownGate {
                opens_at: until,
                last_event_at: until + Span::from_millis(19_965 + since),
                generation: 1,
                closings_in_row: 0,
            };
            assert_eq!(COOLDOWN.free_at(gate, gate.last_event_at), end, "{since} ms after the last slot");
            assert_eq!(COOLDOWN.free_at(gate, end - Span::from_micros(1)), end);
            assert_eq!(COOLDOWN.free_at(gate, end), end);
            let unproven = CooldownGate { closings_in_row: 1, ..gate };
            assert_eq!(COOLDOWN.free_at(unproven, end), gate.last_event_at + COOLDOWN.stagger, "no success yet");
        }
    }

    #[test]
    fn concurrent_throttles_count_as_one_step() {
        let mut gate = CooldownGate::default();
        let leases: Vec<u32> = (0..10).map(|_| COOLDOWN.charge(&mut gate, at(0))).collect();
        for (late, lease) in leases.into_iter().enumerate() {
            COOLDOWN.record_throttle(&mut gate, lease, Some(Span::from_millis(500)), at(late as u64 * 10));
        }
        assert_eq!((gate.closings_in_row, gate.generation), (1, 1));
        assert_eq!(COOLDOWN.free_at(gate, at(100)), at(590), "the latest that was asked for");
    }

    #[test]
    fn older_generations_can_only_lengthen_cool_downs() {
        let mut gate = CooldownGate::default();
        let old = COOLDOWN.charge(&mut gate, at(0));
        COOLDOWN.record_throttle(&mut gate, old, None, at(0));
        COOLDOWN.record_success(&mut gate, old, at(10));
        assert_eq!((gate.closings_in_row, COOLDOWN.free_at(gate, at(10))), (1, at(1_000)), "sent before the closing");
        COOLDOWN.record_throttle(&mut gate, old, Some(Span::from_millis(100)), at(20));
        assert_eq!(COOLDOWN.free_at(gate, at(20)), at(1_000), "never shortened");
        COOLDOWN.record_throttle(&mut gate, old, Some(Span::from_secs(5)), at(20));
        assert_eq!((gate.closings_in_row, gate.generation, COOLDOWN.free_at(gate, at(20))), (1, 1, at(5_020)));
        // The success of the present generation resets the count. A late reply closes the gate again without counting,
        // and no success opens it early. Callers released after that are still staggered.
        let generation = COOLDOWN.charge(&mut gate, at(5_020));
        COOLDOWN.record_throttle(&mut gate, old, Some(Span::from_secs(3)), at(6_000));
        COOLDOWN.record_success(&mut gate, generation, at(6_100));
        assert_eq!((gate.closings_in_row, COOLDOWN.free_at(gate, at(6_100))), (0, at(9_000)));
        COOLDOWN.charge(&mut gate, at(9_000));
        assert_eq!(COOLDOWN.free_at(gate, at(9_000)), at(9_200));
        COOLDOWN.record_success(&mut gate, old, at(9_000));
        assert_eq!(COOLDOWN.free_at(gate, at(9_000)), at(9_200), "an old success proves nothing");
        COOLDOWN.record_success(&mut gate, generation, at(9_100));
        COOLDOWN.record_throttle(&mut gate, old, None, at(9_200));
        assert_eq!((gate.closings_in_row, COOLDOWN.free_at(gate, at(9_200))), (0, at(9_200)), "still known to be old");
    }

    #[test]
    fn a_requested_wait_may_exceed_the_cap() {
        let mut gate = CooldownGate::default();
        COOLDOWN.record_throttle(&mut gate, 0, Some(Span::from_secs(60)), at(0));
        assert_eq!(COOLDOWN.free_at(gate, at(0)), at(60_000));
        let mut gate = CooldownGate::default();
        COOLDOWN.record_throttle(&mut gate, 0, Some(Span::from_millis(1)), at(0));
        assert_eq!(COOLDOWN.free_at(gate, at(0)), at(1), "the first is as long as it was asked for");
        COOLDOWN.record_throttle(&mut gate, 1, Some(Span::from_millis(1)), at(1));
        assert_eq!(COOLDOWN.free_at(gate, at(1)), at(2_001), "it wasn't true");
    }

    #[test]
    fn a_permanently_disabled_credential_stays_disabled() {
        let mut gate = throttled(at(0));
        let generation = gate.generation;
        COOLDOWN.disable(&mut gate, Time::NEVER, at(10));
        COOLDOWN.record_throttle(&mut gate, generation, Some(Span::from_secs(5)), at(20));
        COOLDOWN.record_success(&mut gate, generation, at(30));
        for now in [at(0) - YEAR, at(40), at(0) + YEAR.times(50)] {
            COOLDOWN.refresh(&mut gate, now);
            assert_eq!(COOLDOWN.free_at(gate, now), Time::NEVER, "{now:?}");
        }
    }

    #[test]
    fn a_temporary_disable_adds_no_step() {
        let mut gate = CooldownGate::default();
        let old = COOLDOWN.charge(&mut gate, at(0));
        COOLDOWN.disable(&mut gate, at(3_000), at(0));
        COOLDOWN.record_throttle(&mut gate, old, None, at(0));
        assert_eq!((COOLDOWN.free_at(gate, at(0)), gate.closings_in_row), (at(3_000), 0));
        COOLDOWN.charge(&mut gate, at(3_000));
        COOLDOWN.record_success(&mut gate, old, at(3_000));
        assert_eq!(COOLDOWN.free_at(gate, at(3_000)), at(3_200), "an old success proves nothing");
        // A closing by a clock that was a year ahead doesn't hide it.
        let mut gate = throttled(at(0) + YEAR);
        COOLDOWN.disable(&mut gate, at(10_000), at(0));
        assert_eq!(COOLDOWN.free_at(gate, at(0)), at(10_000));
    }

    #[test]
    fn a_cool_down_is_forgotten_only_after_idling() {
        let mut gate = throttled(at(0));
        let lease = COOLDOWN.charge(&mut gate, at(1_000));
        let idle_at = COOLDOWN.idle_at(&gate);
        assert_eq!(idle_at, at(1_000) + MIN_RETENTION);
        let mut young = gate;
        COOLDOWN.record_throttle(&mut young, lease, None, idle_at - Span::from_micros(1));
        assert_eq!((young.closings_in_row, young.generation), (2, 2));
        // A store may delete the entry now. A reply to a call admitted before still closes the gate.
        for gate in [gate, CooldownGate::default()] {
            let mut closed = gate;
            COOLDOWN.record_throttle(&mut closed, lease, None, idle_at);
            assert_eq!((closed.closings_in_row, closed.generation), (1, 2));
            assert_eq!(COOLDOWN.free_at(closed, idle_at), idle_at + Span::from_secs(1));
            let mut used = gate;
            assert_eq!((COOLDOWN.charge(&mut used, idle_at), used), (0, CooldownGate::default()));
            // Its success proves nothing for a gate that was closed since.
            COOLDOWN.record_throttle(&mut used, 0, None, idle_at);
            COOLDOWN.record_success(&mut used, 7, idle_at);
            assert_eq!(used.closings_in_row, 1);
        }
        let slow = Cooldown { cap: Span::from_secs(7_200), ..COOLDOWN };
        assert_eq!(slow.idle_at(&gate), at(1_000) + slow.cap);
        assert_eq!(COOLDOWN.idle_at(&CooldownGate::default()), Time::ZERO);
    }

    #[test]
    fn clock_steps_back_keep_the_cool_downs_length() {
        for ahead in [Span::from_millis(101), Span::from_secs(10), YEAR] {
            let mut gate = CooldownGate::default();
            COOLDOWN.record_throttle(&mut gate, 0, Some(Span::from_secs(600)), at(0) + ahead);
            assert_eq!(COOLDOWN.free_at(gate, at(0)), at(600_000), "its own length from the present, {ahead} ahead");
            COOLDOWN.refresh(&mut gate, at(0));
            assert_eq!(COOLDOWN.free_at(gate, at(599_999)), at(600_000));
            assert_eq!(COOLDOWN.free_at(gate, at(600_000)), at(600_000));

            let released = CooldownGate { last_event_at: at(1_000) + ahead, ..throttled(at(0)) };
            assert_eq!(COOLDOWN.free_at(released, at(1_000)), at(1_200), "one stagger, {ahead} ahead");
            let mut proven = released;
            COOLDOWN.record_success(&mut proven, 1, at(500));
            assert_eq!(COOLDOWN.free_at(proven, at(900)), at(900), "a success counts, {ahead} ahead");
            assert_eq!((proven.closings_in_row, COOLDOWN.free_at(proven, at(500))), (0, at(700)), "{ahead} ahead");
            let proven = CooldownGate { opens_at: Time::ZERO, ..released };
            assert_eq!(COOLDOWN.free_at(proven, at(500)), at(500), "and stays one, {ahead} ahead");
        }
        // The call was overtaken between reading the clock and reaching the gate: the closing doesn't change.
        let gate = throttled(at(50));
        assert_eq!(COOLDOWN.free_at(gate, at(0)), at(1_050));
    }
}
