//! The decision about one inbound request: the meaning of a store's outcomes, or of an allow or deny list.

use crate::batch::{Admission, Outcome, Outcomes, ShareLevel};
use crate::{Batch, Concurrency, Key, LimitId, Limits, Op, Span, Time, Verb};

/// The reason of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Every limit had room.
    Ok,
    /// No limit applies.
    Unlimited,
    /// The parole of a block that has ended let the call pass a full limit.
    Parole,
    /// The call came by its reservation.
    Reservation,
    /// The client is on the allow list.
    AllowList,
    /// The client is on the deny list.
    DenyList,
    /// A limit has no room.
    Limit,
    /// A limit has room, but not for this caller, which has broken off calls and has its share.
    Share,
    /// A limit has no room, and the caller has a reservation of it.
    Reserved,
    /// A block is in force.
    Penalty,
}

impl Reason {
    /// The name in answers, metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unlimited => "unlimited",
            Self::Parole => "parole",
            Self::Reservation => "reservation",
            Self::AllowList => "allow_list",
            Self::DenyList => "deny_list",
            Self::Limit => "limit",
            Self::Share => "share",
            Self::Reserved => "reserved",
            Self::Penalty => "penalty",
        }
    }
}

/// The decision about one inbound request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The time of the decision.
    pub now: Time,
    /// True if the call may pass.
    pub allowed: bool,
    /// True if a limit in shadow mode would have refused it. The other fields then describe that refusal.
    pub shadow: bool,
    /// The capacity of the limit that determined the decision.
    pub limit: Option<u64>,
    /// The remaining amount of that limit.
    pub remaining: Option<u64>,
    /// The time until that limit is completely available again.
    pub reset_after: Span,
    /// On refusal, the time to wait. A client that returns after it isn't refused for the same reason, as far as the
    /// capacity is enough for all of them. `None` on admission, and on a refusal that no wait can end.
    pub retry_after: Option<Span>,
    /// True if a block is in force.
    pub blocked: bool,
    /// True if this call has begun a block.
    pub begins_block: bool,
    /// The whole length of the block in force.
    pub backoff: Option<Span>,
    /// The time at which a blocked client may call again.
    pub next_allowed_at: Option<Time>,
    /// On refusal, the limit with the longest wait. On admission, the one with the smallest remaining amount.
    pub bound_by: Option<LimitId>,
    /// On refusal, the key under which that limit counts the call.
    pub key: Key,
    /// On refusal, the [affinity](crate::batch::BatchContext::affinity) of that key, by which a store finds it.
    pub affinity: u64,
    /// On refusal, the strikes of that key. They determine the length of its next block.
    pub strikes: u8,
    /// The reason of the decision.
    pub reason: Reason,
    /// The permit that the call must give back at its end, if a concurrency limit applies to it.
    pub permit: Option<u64>,
    /// The widest level of the shared keys under which the permit was taken.
    pub share_level: ShareLevel,
    /// On refusal, the reservation that the caller has from now on. On admission, the one that it came by.
    pub reservation: Option<GivenReservation>,
    /// True if the call was refused although it presented a reservation, because none of that caller and instant applies
    /// to it.
    pub is_reservation_unknown: bool,
}

/// A caller's reservation ([`ReservationRules`](crate::ReservationRules)), with its proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenReservation {
    /// The instant from which the caller is admitted.
    pub at: Time,
    /// The signature of the gate that gave it; 0 if there is none yet.
    pub signature: u64,
}

impl Decision {
    /// The decision without any limit. `reason` is one of the lists or [`Reason::Unlimited`].
    pub fn without_limit(allowed: bool, reason: Reason, now: Time) -> Self {
        Self {
            now,
            allowed,
            shadow: false,
            limit: None,
            remaining: None,
            reset_after: Span::ZERO,
            retry_after: None,
            blocked: false,
            begins_block: false,
            backoff: None,
            next_allowed_at: None,
            bound_by: None,
            key: Key::default(),
            affinity: 0,
            strikes: 0,
            reason,
            permit: None,
            share_level: ShareLevel::Own,
            reservation: None,
            is_reservation_unknown: false,
        }
    }
}

/// Moves operations to a shared key if the store had no room for their own. `parent` returns the key for a limit and a
/// minimum level. Of several operations with the same key, only one is kept. Returns true if the store must be asked
/// again, at most three times for each operation, because the key that all clients share always fits.
pub fn move_to_shared_keys(
    batch: &mut Batch,
    outcomes: &Outcomes,
    parent: impl Fn(LimitId, ShareLevel) -> (ShareLevel, Key),
) -> bool {
    let mut moved = false;
    for (op, outcome) in batch.ops_mut().iter_mut().zip(outcomes.list()) {
        if outcome.admission == Admission::NoRoom && !op.must_fit {
            (op.share_level, op.key) = parent(op.limit, op.share_level.wider());
            op.must_fit = op.share_level == ShareLevel::All;
            moved = true;
        }
    }
    if moved {
        batch.dedup();
    }
    moved
}

/// Combines a store's outcomes of a batch of takes (or peeks) into a decision.
pub fn decide(batch: &Batch, limits: &Limits, outcomes: &Outcomes) -> Decision {
    let now = outcomes.now();
    let mut decision = Decision::without_limit(true, Reason::Unlimited, now);
    let mut refusal: Option<(&Op, &Outcome)> = None;
    let mut shadow_refusal: Option<(&Op, &Outcome)> = None;
    let mut least_remaining: Option<((bool, u64), _)> = None;
    let mut paroled = false;
    for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
        let Some(limit) = limits.get(op.limit) else { continue };
        let candidate = (op, outcome);
        if outcome.admission.refuses() {
            let worst = if limit.is_shadow() { &mut shadow_refusal } else { &mut refusal };
            if worst.is_none_or(|(_, other)| outcome.retry_at > other.retry_at) {
                *worst = Some(candidate);
            }
        } else {
            paroled |= outcome.admission == Admission::Parole;
            if op.verb == Verb::Take && limit.kind().has_permits() {
                decision.permit = Some(batch.holder());
                decision.share_level = decision.share_level.max(op.share_level);
            }
            // A shadow limit is reported only if no enforced one applies.
            let rank = (limit.is_shadow(), outcome.remaining);
            if least_remaining.is_none_or(|(other, _)| rank < other) {
                least_remaining = Some((rank, candidate));
            }
        }
    }
    decision.allowed = refusal.is_none();
    decision.shadow = decision.allowed && shadow_refusal.is_some();
    if !decision.allowed {
        decision.permit = None;
    }
    if let Some((op, outcome)) = refusal.or(shadow_refusal) {
        set_limit_fields(&mut decision, op, outcome);
        (decision.key, decision.affinity) = (op.key, batch.context().affinity);
        decision.strikes = outcome.strikes;
        let blocks = batch.ops().iter().zip(outcomes.list()).filter(|(op, outcome)| {
            let enforced = limits.get(op.limit).is_some_and(|limit| !limit.is_shadow());
            enforced != decision.shadow && outcome.admission.refuses() && outcome.block_until > now
        });
        // A call that finds a block is answered `Blocked`; one that causes it is refused by the limit.
        decision.begins_block = blocks.clone().any(|(_, outcome)| outcome.admission == Admission::Refused);
        decision.backoff = blocks.map(|(_, outcome)| outcome.block).max();
        decision.blocked = decision.backoff.is_some();
        decision.retry_after = (!outcome.retry_at.is_never()).then(|| outcome.retry_at.since(now));
        if decision.blocked {
            decision.next_allowed_at = decision.retry_after.map(|wait| now + wait);
        }
        let has_room_for_others = outcome.used < outcome.limit;
        let is_in_flight = limits.get(op.limit).is_some_and(|limit| limit.kind().has_permits());
        decision.reason = match outcome.block_until > now {
            true => Reason::Penalty,
            false if is_in_flight && has_room_for_others && Concurrency::is_refused_cost(op.cost) => Reason::Share,
            false => Reason::Limit,
        };
    } else if let Some((_, (op, outcome))) = least_remaining {
        set_limit_fields(&mut decision, op, outcome);
        decision.reason = if paroled { Reason::Parole } else { Reason::Ok };
    }
    if batch.context().caller != 0 {
        let (at, is_unknown) = find_reservation(batch, outcomes, refusal.map(|(_, outcome)| outcome));
        decision.reservation = at.map(|at| GivenReservation { at, signature: 0 });
        decision.is_reservation_unknown = is_unknown;
        if let (Some(at), Some(_)) = (at, refusal) {
            // Full capacity comes after the instant.
            decision.reset_after = decision.reset_after.max(at.since(now));
        }
        decision.reason = match decision.reason {
            Reason::Ok if at.is_some() => Reason::Reservation,
            Reason::Limit if at.is_some() && refusal.is_some() => Reason::Reserved,
            other => other,
        };
    }
    decision
}

/// Returns the instant of the reservation by which a call was admitted, or which a refusal gave to its caller; and true if
/// the reservation that a refused caller presented is unknown.
// It isn't given the decision, which would otherwise be built in memory and copied to its place.
#[cold]
fn find_reservation(batch: &Batch, outcomes: &Outcomes, refusal: Option<&Outcome>) -> (Option<Time>, bool) {
    let is_used = |outcome: &&Outcome| !outcome.admission.refuses() && outcome.reserved_at > Time::ZERO;
    let outcome = refusal.or_else(|| outcomes.list().iter().find(is_used));
    let at = outcome.map(|outcome| outcome.reserved_at).filter(|at| *at > Time::ZERO);
    let presented = batch.context().reservation;
    let is_unknown = refusal.is_some()
        && presented > Time::ZERO
        && !outcomes.list().iter().any(|outcome| outcome.reserved_at == presented);
    (at, is_unknown)
}

fn set_limit_fields(decision: &mut Decision, op: &Op, outcome: &Outcome) {
    decision.bound_by = Some(op.limit);
    decision.limit = Some(outcome.limit);
    decision.remaining = Some(outcome.remaining);
    decision.reset_after = outcome.reset_at.since(decision.now);
}
