//! The one loop that drives the calls of a provider.
//!
//! Whoever changes something, a call that arrives, a reply, a timer, takes the lock, lets the machine make its step,
//! and then lets the lanes name calls until they say to sleep. A named call is carried on by whoever holds the lock,
//! not by its own task: so a future that isn't polled for a while holds nobody up behind it.

mod timer;

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use rand::SeedableRng;
use rand::rngs::SmallRng;
use slab::Slab;
use tidegate_core::breaker::BreakerState;
use tidegate_core::call::{Call, Desk, Failure, Remainder, Reply, Rules, Step};
use tidegate_core::retry::Reach;
use tidegate_core::{Batch, Clock, Key, Lane, Outcomes, Ticket, Time, Turn};
use tidegate_policy::outbound;
use tidegate_store::{Answer, Store, StoreError};
use tokio::runtime::Handle;

use super::Urgency;
use crate::random::random_u64;
use timer::{Timer, Timing};

/// What all calls to one provider share.
pub(super) struct Hall<S, C> {
    pub whole: Arc<outbound::OutboundConfig>,
    index: usize,
    pub rules: Rules,
    pub store: Arc<S>,
    pub clock: C,
    floor: Mutex<Floor>,
    timing: Arc<Timing>,
    verdicts: Verdicts,
}

/// What the nodes that share a provider have found of it.
#[derive(Default)]
struct Verdicts {
    /// Whether more than half of them said last that it fails.
    carried: AtomicBool,
    /// The breaker's generation since it was opened for that; 0 before.
    tripped: AtomicU64,
}

struct Floor {
    table: Table,
    /// The calls that wait, or whose verdict waits for them. Bounded by what the lanes let wait and what is in flight.
    parked: Slab<Parked>,
    /// Where a queued call is parked, by its ticket's index.
    places: Vec<Option<usize>>,
    /// When the timer wakes, if one runs.
    wakes_at: Time,
    /// The moment of the last step.
    entered_at: Time,
}

/// What a step of the machine needs besides its call.
struct Table {
    desk: Desk,
    rng: SmallRng,
    /// Where the last call that waits was polled.
    runtime: Option<Handle>,
}

struct Parked {
    call: Call,
    waker: Option<Waker>,
    verdict: Option<Verdict>,
    urgency: Option<Urgency>,
}

/// What became of a call's turn: the credential to send it with, or why it ends.
pub(super) type Verdict = Result<usize, Broken>;

/// Why a call isn't sent.
#[derive(Clone, Debug)]
pub(super) enum Broken {
    Failed(Failure),
    Store(StoreError),
}

impl Floor {
    fn parked_at(&self, ticket: Ticket) -> Option<usize> {
        let place = self.places.get(ticket.index()).copied().flatten()?;
        (self.parked.get(place)?.call.ticket() == Some(ticket)).then_some(place)
    }

    fn park(&mut self, call: Call, ticket: Ticket, urgency: Option<Urgency>) -> usize {
        self.table.runtime = Handle::try_current().ok().or_else(|| self.table.runtime.take());
        let place = self.parked.insert(Parked { call, waker: None, verdict: None, urgency });
        if self.places.len() <= ticket.index() {
            self.places.resize(ticket.index() + 1, None);
        }
        self.places[ticket.index()] = Some(place);
        place
    }

    fn unpark(&mut self, place: usize) -> Option<Parked> {
        let parked = self.parked.try_remove(place)?;
        if let Some(urgency) = &parked.urgency {
            urgency.unparked();
        }
        if self.parked.is_empty() && self.parked.capacity() > KEPT {
            self.parked.shrink_to_fit();
        }
        Some(parked)
    }

    fn conclude(&mut self, place: usize, verdict: Verdict) {
        if let Some(parked) = self.parked.get_mut(place) {
            parked.verdict = Some(verdict);
            if let Some(waker) = parked.waker.take() {
                waker.wake();
            }
        }
    }
}

/// How many places are kept for calls to come when nobody waits.
const KEPT: usize = 1024;

/// The call in whose name the floor was entered, so that what is decided at once never has to be parked.
struct Own<'a> {
    call: &'a mut Call,
    verdict: Option<Verdict>,
}

impl<S, C> Hall<S, C> {
    pub(super) fn plan(&self) -> &outbound::ProviderConfig {
        &self.whole.providers()[self.index]
    }
}

impl<S: Store, C: Clock> Hall<S, C> {
    pub(super) fn new(
        whole: Arc<outbound::OutboundConfig>,
        index: usize,
        rules: Rules,
        desk: Desk,
        store: Arc<S>,
        clock: C,
    ) -> Self {
        let table = Table { desk, rng: SmallRng::seed_from_u64(random_u64()), runtime: None };
        let floor =
            Floor { table, parked: Slab::new(), places: Vec::new(), wakes_at: Time::NEVER, entered_at: Time::ZERO };
        Self {
            whole,
            index,
            rules,
            store,
            clock,
            floor: Mutex::new(floor),
            timing: Arc::default(),
            verdicts: Verdicts::default(),
        }
    }

    fn enter(&self) -> MutexGuard<'_, Floor> {
        // A panic can only have come from a waker, when the machine had made its step.
        self.floor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters to change something, at this moment.
    fn enter_now(&self) -> (MutexGuard<'_, Floor>, Time) {
        let floor = self.enter();
        self.enter_at(floor, self.clock.now())
    }

    fn enter_at<'a>(&self, mut floor: MutexGuard<'a, Floor>, now: Time) -> (MutexGuard<'a, Floor>, Time) {
        floor.entered_at = now;
        if let Some(hours) = &self.plan().hours {
            floor.table.desk.lanes.pause(Lane::Background, hours.next_within(now));
        }
        (floor, now)
    }

    /// Lets a call that isn't parked make its step, tells the store what it asks for, and lets those go whose turn it is now.
    fn step<T>(self: &Arc<Self>, step: impl FnOnce(&mut Table, Time) -> T) -> (T, Time) {
        let (mut floor, now) = self.enter_now();
        let floor = &mut *floor;
        let done = step(&mut floor.table, now);
        self.tell(&floor.table.desk, now);
        self.pump(floor, None, now);
        (done, now)
    }

    /// Looks at the desk.
    pub(super) fn look<T>(&self, look: impl FnOnce(&Desk, Time) -> T) -> T {
        let floor = self.enter();
        look(&floor.table.desk, self.clock.now())
    }

    /// Tells the other nodes whether this one has found that the provider fails, and opens its breaker when more than
    /// half of them have. One node's bad way to the provider so stops nobody else.
    pub(super) async fn confer(self: &Arc<Self>) {
        let (topic, found) = self.look(|desk, now| {
            let open = matches!(desk.breaker.state(now), BreakerState::Open | BreakerState::HalfOpen);
            let found = open && desk.breaker.generation() != self.verdicts.tripped.load(Ordering::Relaxed);
            (Key::new(self.rules.key.hi(), !self.rules.key.lo()), found)
        });
        let Some(votes) = self.store.vote(topic, found, self.clock.now()) else { return };
        let Some(votes) = votes.await else { return };
        // Once for each verdict: who has seen since that the provider works again isn't stopped by what others still say.
        if votes.carry() && !self.verdicts.carried.swap(true, Ordering::Relaxed) {
            self.step(|Table { desk, rng, .. }, now| {
                if desk.breaker.trip(now, rng) {
                    self.verdicts.tripped.store(desk.breaker.generation(), Ordering::Relaxed);
                }
            });
        } else if !votes.carry() {
            self.verdicts.carried.store(false, Ordering::Relaxed);
        }
    }

    /// Lets a held call enter the queue, and decides about it at once where that is possible; else it is parked. `began_at`
    /// is when the caller looked at the clock, if that was just now: it still is where nobody has to be waited for.
    pub(super) fn start(
        self: &Arc<Self>,
        place: &mut Place,
        urgency: Option<&Urgency>,
        began_at: Option<Time>,
    ) -> Entered {
        // And where nothing has happened since, or windows would count the call at another moment than it believes.
        let free =
            began_at.and_then(|at| Some((self.floor.try_lock().ok().filter(|floor| floor.entered_at <= at)?, at)));
        let (mut floor, now) = match free {
            Some((floor, at)) => self.enter_at(floor, at),
            None => self.enter_now(),
        };
        let floor = &mut *floor;
        let call = place.call();
        if let Some(urgency) = urgency {
            call.raise(urgency.lane(), &mut floor.table.desk, now);
        }
        let desk = &mut floor.table.desk;
        let step = call.start(desk, now);
        self.tell(desk, now);
        if let Step::Finish(Err(failure)) = step {
            return Entered::Decided(Err(Broken::Failed(failure)), now);
        }
        let mut own = Own { call, verdict: None };
        self.pump(floor, Some(&mut own), now);
        if let Some(verdict) = own.verdict {
            return Entered::Decided(verdict, now);
        }
        if call.passed_over(&mut floor.table.desk) {
            return Entered::Decided(Err(Broken::Failed(Failure::DeadlineExceeded)), now);
        }
        let ticket = call.ticket().expect("invariant: a call that has entered and isn't decided about is in the queue");
        let parked = floor.park(place.take(), ticket, urgency.cloned());
        *place = Place::Parked(parked);
        if let Some(urgency) = urgency {
            urgency.parked(parked);
        }
        Entered::Parked(parked)
    }

    /// The call of a second request beside this call's; `None` if the retry budget is spent.
    pub(super) fn hedge(&self, call: &Call) -> Option<Call> {
        self.look(|desk, _| call.hedge(desk))
    }

    /// Learns how a request failed beside which another is still under way.
    pub(super) fn beaten(self: &Arc<Self>, call: &mut Call, reply: &Reply) {
        self.step(|Table { desk, rng, .. }, now| call.beaten(&self.rules, desk, reply, now, rng));
    }

    /// Waits for the verdict about a parked call.
    pub(super) async fn verdict(self: &Arc<Self>, place: usize) -> (Call, Verdict, Time) {
        let mut timer_gone = pin!(self.timing.gone.notified());
        poll_fn(|context| {
            // Before the look at whether a timer runs, so that the end of one can't be missed in between.
            while timer_gone.as_mut().poll(context).is_ready() {
                timer_gone.set(self.timing.gone.notified());
            }
            let floor = &mut *self.enter();
            let parked = floor.parked.get_mut(place).expect("invariant: a call stays parked until its future takes it");
            match parked.verdict.take() {
                Some(verdict) => {
                    let parked = floor.unpark(place).expect("invariant: it was there a moment ago");
                    Poll::Ready((parked.call, verdict, self.clock.now()))
                }
                None => {
                    match &mut parked.waker {
                        Some(waker) => waker.clone_from(context.waker()),
                        waker => *waker = Some(context.waker().clone()),
                    }
                    if !self.timing.runs.load(Ordering::Acquire) && Handle::try_current().is_ok() {
                        self.wake_at(floor, floor.wakes_at);
                    }
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Learns how an attempt ended.
    pub(super) fn replied(self: &Arc<Self>, call: &mut Call, reply: &Reply) -> (After, Time) {
        let (step, now) = self.step(|Table { desk, rng, .. }, now| call.replied(&self.rules, desk, reply, now, rng));
        let after = match step {
            Step::Sleep(at) => After::Again(at),
            Step::Renew { .. } => After::Renew,
            Step::Finish(Err(failure)) => After::Failed(failure),
            Step::Finish(Ok(())) | Step::Queue | Step::Ask | Step::Send { .. } => After::Done,
        };
        (after, now)
    }

    /// The reply's body has ended; it cost this much, if that is known now.
    pub(super) fn ended(self: &Arc<Self>, remainder: &mut Remainder, cost: Option<u64>) {
        let (mut floor, now) = self.enter_now();
        let floor = &mut *floor;
        let desk = &mut floor.table.desk;
        remainder.ended(desk);
        if let Some(cost) = cost {
            remainder.cost_was(&self.rules, desk, cost);
            self.tell(desk, now);
            desk.lanes.poke();
        }
        self.pump(floor, None, now);
    }

    /// A credential's login has failed.
    pub(super) fn not_renewed(self: &Arc<Self>, call: &mut Call, credential: usize) {
        self.step(|Table { desk, .. }, now| call.not_renewed(&self.rules, desk, credential, now));
    }

    /// Nobody waits any more for a call that isn't parked.
    pub(super) fn abandoned(self: &Arc<Self>, call: &mut Call) {
        self.step(|Table { desk, rng, .. }, now| call.abandoned(&self.rules, desk, Reach::Unknown, now, rng));
    }

    /// Nobody waits any more for a call that is parked.
    pub(super) fn forsaken(self: &Arc<Self>, place: usize) {
        let (mut floor, now) = self.enter_now();
        let floor = &mut *floor;
        let Some(mut parked) = floor.unpark(place) else { return };
        let Table { desk, rng, .. } = &mut floor.table;
        // Even if it has been granted its turn, nothing was sent.
        parked.call.abandoned(&self.rules, desk, Reach::Unsent, now, rng);
        self.tell(desk, now);
        self.pump(floor, None, now);
    }

    /// Moves a parked call up.
    pub(super) fn raise(self: &Arc<Self>, urgency: &Urgency) {
        let (mut floor, now) = self.enter_now();
        let floor = &mut *floor;
        let Some(place) = urgency.place() else { return };
        let Some(parked) = floor.parked.get_mut(place) else { return };
        parked.call.raise(urgency.lane(), &mut floor.table.desk, now);
        self.pump(floor, None, now);
    }

    fn tell(&self, desk: &Desk, now: Time) {
        if let Some(batch) = desk.orders.tell() {
            self.store.tell(batch, now);
        }
    }

    /// Lets the lanes name calls until they say to sleep, carries on each that they name, and sets the timer.
    fn pump(self: &Arc<Self>, floor: &mut Floor, own: Option<&mut Own<'_>>, now: Time) {
        let at = self.name(floor, own, now);
        self.wake_at(floor, at);
    }

    /// Carries on whom the lanes name; returns until when they say to sleep.
    fn name(self: &Arc<Self>, floor: &mut Floor, mut own: Option<&mut Own<'_>>, now: Time) -> Time {
        loop {
            let (ticket, expired) = match floor.table.desk.lanes.poll(now) {
                Turn::Sleep(at) => return at,
                Turn::Ask(ticket) => (ticket, false),
                Turn::Expired(ticket) => (ticket, true),
            };
            if let Some(own) = own.as_mut().filter(|own| own.call.ticket() == Some(ticket)) {
                own.verdict = self.carry_on(own.call, ticket, expired, &mut floor.table, now);
            } else if let Some(place) = floor.parked_at(ticket) {
                let call = &mut floor.parked[place].call;
                if let Some(verdict) = self.carry_on(call, ticket, expired, &mut floor.table, now) {
                    floor.conclude(place, verdict);
                }
            } else {
                floor.table.desk.lanes.cancel(ticket);
            }
        }
    }

    /// A named call's turn, or its end; `None` if it waits on.
    #[inline]
    fn carry_on(
        self: &Arc<Self>,
        call: &mut Call,
        ticket: Ticket,
        expired: bool,
        table: &mut Table,
        now: Time,
    ) -> Option<Verdict> {
        let Table { desk, rng, .. } = table;
        let step = match expired {
            true => call.expired(desk),
            false => call.turn(&self.rules, desk, now, rng),
        };
        self.follow(step, call, ticket, table, now)
    }

    /// Follows a step to a verdict, asking the store as often as its answers lead to further questions; `None` if the call
    /// waits on, or an answer has to be waited for.
    fn follow(
        self: &Arc<Self>,
        mut step: Step,
        call: &mut Call,
        ticket: Ticket,
        table: &mut Table,
        now: Time,
    ) -> Option<Verdict> {
        loop {
            self.tell(&table.desk, now);
            match step {
                Step::Ask => {}
                Step::Send { credential } => return Some(Ok(credential)),
                Step::Finish(Err(failure)) => return Some(Err(Broken::Failed(failure))),
                Step::Queue | Step::Renew { .. } | Step::Sleep(_) | Step::Finish(Ok(())) => return None,
            }
            match self.store.apply(table.desk.orders.ask(), now) {
                // Not moved out: answers are large.
                Answer::Ready(ref outcomes) => step = self.decided(call, outcomes, table, now),
                Answer::Later(answer) => {
                    let Some(runtime) = Handle::try_current().ok().or_else(|| table.runtime.clone()) else {
                        call.undecided(&mut table.desk);
                        return Some(Err(Broken::Store(StoreError::Failed(
                            "there is no runtime to wait in".to_owned(),
                        ))));
                    };
                    let (hall, batch) = (Arc::clone(self), table.desk.orders.ask().clone());
                    runtime.spawn(async move { hall.answered(ticket, &batch, answer.await) });
                    return None;
                }
            }
        }
    }

    fn decided(&self, call: &mut Call, outcomes: &Outcomes, table: &mut Table, now: Time) -> Step {
        let Table { desk, rng, .. } = table;
        call.decided(&self.rules, self.store.limits(), desk, outcomes, now, rng)
    }

    /// A store has answered that had to be waited for.
    fn answered(self: &Arc<Self>, ticket: Ticket, batch: &Batch, answer: Result<Outcomes, StoreError>) {
        let (mut floor, now) = self.enter_now();
        let floor = &mut *floor;
        match (floor.parked_at(ticket), answer) {
            (Some(place), Ok(outcomes)) => {
                let Floor { table, parked, .. } = floor;
                let call = &mut parked[place].call;
                let step = self.decided(call, &outcomes, table, now);
                let verdict = self.follow(step, call, ticket, table, now);
                if let Some(verdict) = verdict {
                    floor.conclude(place, verdict);
                }
            }
            (Some(place), Err(error)) => {
                floor.parked[place].call.undecided(&mut floor.table.desk);
                floor.conclude(place, Err(Broken::Store(error)));
            }
            (None, Ok(outcomes)) => {
                if let Some(refund) = Call::unwanted(&self.rules, batch, &outcomes) {
                    self.store.tell(&refund, now);
                }
                floor.table.desk.lanes.poke();
            }
            (None, Err(_)) => {}
        }
        self.pump(floor, None, now);
    }

    /// Sees to it that somebody enters at this moment at the latest.
    fn wake_at(self: &Arc<Self>, floor: &mut Floor, at: Time) {
        let runs = self.timing.runs.load(Ordering::Acquire);
        if at.is_never() || runs && floor.wakes_at <= at {
            return;
        }
        floor.wakes_at = at;
        if runs {
            self.timing.earlier.notify_one();
        } else if let Some(runtime) = Handle::try_current().ok().or_else(|| floor.table.runtime.clone()) {
            self.timing.runs.store(true, Ordering::Release);
            // Dropped at once if the runtime is shutting down, which this lock must not be in the way of.
            runtime.spawn(Timer::new(self).run());
        }
    }
}

impl<S, C> Drop for Hall<S, C> {
    fn drop(&mut self) {
        self.timing.earlier.notify_one();
    }
}

/// Where a call under way is.
pub(super) enum Place {
    /// With its own task.
    Held(Call),
    /// On the floor, where it waits.
    Parked(usize),
    /// Nowhere: it is over.
    Gone,
}

impl Place {
    pub(super) fn call(&mut self) -> &mut Call {
        match self {
            Self::Held(call) => call,
            Self::Parked(_) | Self::Gone => {
                unreachable!("a call is held until it is parked, and from its turn to its end")
            }
        }
    }

    pub(super) fn take(&mut self) -> Call {
        match std::mem::replace(self, Self::Gone) {
            Self::Held(call) => call,
            Self::Parked(_) | Self::Gone => {
                unreachable!("a call is held until it is parked, and from its turn to its end")
            }
        }
    }
}

/// What became of a call that wanted to enter.
pub(super) enum Entered {
    /// It goes at once, or is over.
    Decided(Verdict, Time),
    /// It waits here.
    Parked(usize),
}

/// What comes after a reply.
pub(super) enum After {
    /// Nothing: it is the call's.
    Done,
    /// Nothing: there is no other attempt, for this reason.
    Failed(Failure),
    /// Another attempt, from this moment on.
    Again(Time),
    /// Another attempt, once the credential is logged in anew.
    Renew,
}
