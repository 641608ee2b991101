//! The events of one key under one limit, and the status that follows from them.

use tidegate_core::{Concurrency, LimitKind, MAX_COST, Quota, Rate, Span, Time, Window};

use super::ModelStatus;

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HistoryEvent {
    /// A call was admitted, or cost more than it was admitted for. It counts from `at`.
    Taken { at: Time, cost: u64, holder: u64 },
    /// A cost was refunded. The call was counted at `counted_at`, if that is known, and charged at `charged_at`.
    Refunded { at: Time, cost: u64, counted_at: Option<Time>, charged_at: Time },
    /// A call ended that was counted at a future moment.
    Settled { at: Time, cost: u64, counted_at: Time },
    /// A permit was released.
    Released { at: Time, holder: u64 },
    /// A lease was renewed.
    Renewed { at: Time, holder: u64 },
}

/// All events in order.
#[derive(Clone, Debug, Default)]
pub(super) struct History(Vec<HistoryEvent>);

impl History {
    pub(super) fn push(&mut self, event: HistoryEvent) {
        self.0.push(event);
    }

    /// Returns the cost taken in the trailing `span`, without regard to refunds.
    pub(super) fn taken_within(&self, span: Span, now: Time) -> u64 {
        let events = self.0.iter().filter_map(|event| match *event {
            HistoryEvent::Taken { at, cost, .. } if at + span > now => Some(cost),
            _ => None,
        });
        events.sum()
    }

    /// Returns the status for a call if each event of a window counted `late` longer than it must.
    pub(super) fn status(&self, kind: &LimitKind, cost: u64, holder: u64, now: Time, late: Span) -> ModelStatus {
        match kind {
            LimitKind::Window(window) => self.window_status(window, cost, now, window.window() + late),
            LimitKind::Rate(rate) => self.rate_status(rate, cost, now),
            LimitKind::Quota(quota) => self.quota_status(quota, cost, now),
            LimitKind::Concurrency(concurrency) => self.concurrency_status(concurrency, cost, holder, now),
            LimitKind::Cooldown(_) | LimitKind::Pace(_) => unreachable!("invariant: these have lists of their own"),
        }
    }

    /// Returns true if `holder` has a permit.
    pub(super) fn holds(&self, kind: &LimitKind, holder: u64, now: Time) -> bool {
        let LimitKind::Concurrency(concurrency) = kind else { return false };
        self.permits(concurrency, now).iter().any(|permit| permit.holder == holder)
    }

    /// Returns the moment from which a call counts in a window, if it is admitted at `now` with this lead. It is never
    /// before that of an earlier admitted call.
    pub(super) fn counts_from(&self, window: &Window, lead: Span, now: Time) -> Time {
        let newest = self.counted_calls(window, window.window(), now).into_iter().map(|(made, _)| made).max();
        newest.unwrap_or(now).max(now + lead.min(window.lead()))
    }

    /// Returns the calls that count in a window, the oldest first. A call counts for `lifetime` after it was made; one
    /// that was counted ahead, after its end. A refund removes calls. If the window keeps each call, it removes the
    /// call that was counted at its moment, or nothing if that call has left. Otherwise it removes the oldest that
    /// count.
    fn counted_calls(&self, window: &Window, lifetime: Span, now: Time) -> Vec<(Time, u128)> {
        let keeps_each_call = window.is_exact();
        let mut calls: Vec<(Time, u128)> = Vec::new();
        for event in &self.0 {
            match *event {
                HistoryEvent::Taken { at, cost, .. } => calls.push((at, u128::from(cost))),
                HistoryEvent::Settled { at, cost, counted_at } => {
                    let moves = keeps_each_call
                        && counted_at > at
                        && take_from_calls(&mut calls, cost, |made| made == counted_at);
                    calls.extend(moves.then_some((at, u128::from(cost))));
                }
                HistoryEvent::Refunded { at, cost, counted_at, .. } => {
                    let own = |made| Some(made) == counted_at && made + lifetime > at;
                    let gone = counted_at.is_some_and(|made| made + window.window() <= at);
                    if !(gone || keeps_each_call && take_from_calls(&mut calls, cost, own)) {
                        let mut rest = u128::from(cost);
                        calls.sort_by_key(|&(made, _)| made);
                        for (_, count) in calls.iter_mut().filter(|(made, _)| *made + lifetime > at) {
                            let back = rest.min(*count);
                            *count -= back;
                            rest -= back;
                        }
                    }
                }
                _ => {}
            }
        }
        calls.retain(|&(made, count)| made + lifetime > now && count > 0);
        calls.sort_by_key(|&(made, _)| made);
        calls
    }

    /// Returns true if a window that keeps each call exceeded its limit within the last two of its lengths, and
    /// something was refunded. An overfull log merges its oldest calls, so that a refund may be of a call that has left
    /// the window. A slot then comes free later than it might, but not after the youngest of the merged calls leaves.
    pub(super) fn may_free_late(&self, window: &Window, now: Time) -> bool {
        let overfull = |(index, event): (usize, &HistoryEvent)| {
            let HistoryEvent::Taken { at, .. } = *event else { return false };
            let until_then = Self(self.0[..=index].to_vec());
            let counting = || until_then.counted_calls(window, window.window(), at).into_iter().map(|(_, count)| count);
            at + window.window() + window.window() > now && counting().sum::<u128>() > u128::from(window.limit())
        };
        window.is_exact()
            && self.0.iter().any(|event| matches!(event, HistoryEvent::Refunded { .. }))
            && self.0.iter().enumerate().any(overfull)
    }

    fn window_status(&self, window: &Window, cost: u64, now: Time, life: Span) -> ModelStatus {
        let calls = self.counted_calls(window, life, now);
        let limit = u128::from(window.limit());
        let used_at = |moment: Time| -> u128 {
            calls.iter().filter(|(made, _)| *made + life > moment).map(|(_, count)| count).sum()
        };
        let room_at = |moment: Time| u128::from(cost) <= limit.saturating_sub(used_at(moment));
        let frees = calls.iter().map(|&(made, _)| made + life);
        let retry_at = if u128::from(cost) > limit {
            Time::NEVER
        } else {
            std::iter::once(now).chain(frees.clone()).find(|&moment| room_at(moment)).unwrap_or(Time::NEVER)
        };
        ModelStatus {
            fits: retry_at == now,
            used: used_at(now) as u64,
            remaining: limit.saturating_sub(used_at(now)) as u64,
            retry_at,
            reset_at: frees.max().unwrap_or(now),
        }
    }

    /// Computes the virtual-scheduling form of GCRA in units of 1/1024 µs, to which the spacing is rounded up. The
    /// overdraft of paroles counts up to one more burst.
    fn rate_status(&self, rate: &Rate, cost: u64, now: Time) -> ModelStatus {
        let units = |time: Time| u128::from(time.as_micros()) * 1024;
        let micros = |units: u128| Time::from_micros(units.div_ceil(1024) as u64);
        let spacing = (u128::from(rate.per().as_micros()) * 1024).div_ceil(u128::from(rate.count()));
        let burst = spacing * u128::from(rate.burst());
        let mut arrival = 0;
        for event in &self.0 {
            match *event {
                HistoryEvent::Taken { at, cost, .. } => {
                    arrival = arrival.max(units(at));
                    arrival = (arrival + spacing * u128::from(cost)).min(arrival.max(units(at) + 2 * burst));
                }
                HistoryEvent::Refunded { at, cost, .. } => {
                    arrival = arrival.saturating_sub(spacing * u128::from(cost)).max(units(at));
                }
                _ => {}
            }
        }
        let arrival = arrival.max(units(now));
        let need = spacing * u128::from(cost);
        let free = (units(now) + burst).saturating_sub(arrival);
        let fits = cost <= rate.burst() && need <= free;
        let retry_at = if cost > rate.burst() {
            Time::NEVER
        } else if fits {
            now
        } else {
            micros(arrival + need - burst)
        };
        let remaining = (free / spacing) as u64;
        ModelStatus { fits, used: rate.burst() - remaining, remaining, retry_at, reset_at: micros(arrival) }
    }

    fn quota_status(&self, quota: &Quota, cost: u64, now: Time) -> ModelStatus {
        let period = quota.period(now);
        let mut used = 0_u128;
        for event in &self.0 {
            match *event {
                HistoryEvent::Taken { at, cost, .. } if at >= period.start => used += u128::from(cost),
                HistoryEvent::Refunded { at, cost, charged_at, .. } if at.min(charged_at) >= period.start => {
                    used = used.saturating_sub(u128::from(cost));
                }
                _ => {}
            }
        }
        let remaining = u128::from(quota.limit()).saturating_sub(used);
        let fits = u128::from(cost) <= remaining;
        let retry_at = if cost > quota.limit() {
            Time::NEVER
        } else if fits {
            now
        } else {
            period.end
        };
        let reset_at = if used == 0 { now } else { period.end };
        ModelStatus { fits, used: used as u64, remaining: remaining as u64, retry_at, reset_at }
    }

    fn permits(&self, concurrency: &Concurrency, now: Time) -> Vec<ModelPermit> {
        let mut permits: Vec<ModelPermit> = Vec::new();
        for event in &self.0 {
            let (HistoryEvent::Taken { at, .. }
            | HistoryEvent::Refunded { at, .. }
            | HistoryEvent::Settled { at, .. }
            | HistoryEvent::Released { at, .. }
            | HistoryEvent::Renewed { at, .. }) = *event;
            permits.retain(|permit| permit.expires > at);
            match *event {
                HistoryEvent::Taken { at, cost, holder } => {
                    let expires = at + concurrency.lease();
                    match permits.iter_mut().find(|permit| permit.holder == holder) {
                        Some(permit) => permit.expires = expires,
                        None => permits.push(ModelPermit { holder, count: u128::from(cost), expires }),
                    }
                }
                HistoryEvent::Renewed { at, holder } => {
                    for permit in permits.iter_mut().filter(|permit| permit.holder == holder) {
                        permit.expires = at + concurrency.lease();
                    }
                }
                HistoryEvent::Released { holder, .. } => permits.retain(|permit| permit.holder != holder),
                HistoryEvent::Refunded { .. } | HistoryEvent::Settled { .. } => {}
            }
            permits.retain(|permit| permit.count > 0);
        }
        permits.retain(|permit| permit.expires > now);
        permits
    }

    fn concurrency_status(&self, concurrency: &Concurrency, cost: u64, holder: u64, now: Time) -> ModelStatus {
        let permits = self.permits(concurrency, now);
        let limit = u128::from(concurrency.limit());
        let used_at = |moment: Time| -> u128 {
            permits.iter().filter(|permit| permit.expires > moment).map(|permit| permit.count).sum()
        };
        let mut moments: Vec<Time> = permits.iter().map(|permit| permit.expires).chain([now]).collect();
        moments.sort_unstable();
        let room = moments.into_iter().find(|&moment| used_at(moment) + u128::from(cost) <= limit);
        let is_refused = Concurrency::is_refused_cost(cost);
        let retry_at = match permits.iter().any(|permit| permit.holder == holder) {
            true => now,
            false if is_refused => now + Span::from_micros(cost - MAX_COST),
            false => room.unwrap_or(Time::NEVER),
        };
        ModelStatus {
            fits: retry_at == now,
            used: used_at(now) as u64,
            remaining: if is_refused { 0 } else { limit.saturating_sub(used_at(now)) as u64 },
            retry_at,
            reset_at: permits.iter().map(|permit| permit.expires).max().unwrap_or(now),
        }
    }
}

/// Removes a cost from the calls with times that satisfy `own`. Returns false and changes nothing if they have less.
fn take_from_calls(calls: &mut [(Time, u128)], cost: u64, own: impl Fn(Time) -> bool) -> bool {
    let mut rest = u128::from(cost);
    let mut left = calls.to_vec();
    for (_, count) in left.iter_mut().filter(|(made, _)| own(*made)) {
        let taken = rest.min(*count);
        *count -= taken;
        rest -= taken;
    }
    let held = rest == 0;
    if held {
        calls.copy_from_slice(&left);
    }
    held
}

#[derive(Clone, Copy, Debug)]
struct ModelPermit {
    holder: u64,
    count: u128,
    expires: Time,
}
