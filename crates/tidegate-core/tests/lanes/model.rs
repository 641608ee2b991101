//! Agreement with a simple model over random operations.

use super::*;

/// Few, so that calls of the same one meet.
const SCOPES: [u64; 4] = [1, 7, 1 << 63, u64::MAX];

#[derive(Clone, Copy, Debug)]
struct Call {
    ticket: Ticket,
    arrival: u64,
    lane: Lane,
    scope: u64,
    cost: u64,
    deadline: Time,
    keeps_place: bool,
}

impl Call {
    fn place(&self) -> ScopedLane {
        self.lane.with_scope(self.scope)
    }
}

#[derive(Clone, Copy, Debug)]
struct Told {
    refusal: Refusal,
    /// The calls that it holds: those of a lane, if a call without a scope was refused for it.
    holds: RefusalScope,
    call: Call,
    at: Time,
}

/// The same rules on a plain list that is searched completely.
#[derive(Debug)]
struct Naive {
    spec: LanesSpec,
    calls: Vec<Call>,
    told: Vec<Told>,
    in_flight: [u32; 3],
    credit: [u64; 3],
    due_at: [Time; 3],
    paused: [Time; 3],
    asking: Option<Ticket>,
    displaced: Option<Ticket>,
    poked: bool,
    scope_poked: bool,
    /// The time of the last step.
    now: Time,
    /// The latest time of a refusal of a scope since none was held.
    held_at: Time,
}

impl Naive {
    fn new(spec: LanesSpec) -> Self {
        Self {
            spec,
            calls: Vec::new(),
            told: Vec::new(),
            in_flight: [0; 3],
            credit: [0; 3],
            due_at: [Time::ZERO; 3],
            paused: [Time::ZERO; 3],
            asking: None,
            displaced: None,
            poked: false,
            scope_poked: false,
            now: Time::ZERO,
            held_at: Time::ZERO,
        }
    }

    /// Continues at another time. Scopes aren't held any longer once it has come, or if the clock has stepped back.
    fn go_to(&mut self, now: Time) {
        self.now = now;
        if self.held_at > now + MAX_CLOCK_LAG {
            self.open_scopes(|_| true);
        }
        self.open_scopes(|told| told.refusal.until <= now);
    }

    fn open_scopes(&mut self, opens: impl Fn(&Told) -> bool) {
        self.told.retain(|told| told.holds != RefusalScope::Part || !opens(told));
    }

    fn is_held(&self, call: &Call) -> bool {
        self.told.iter().any(|told| told.holds == RefusalScope::Part && told.call.place() == call.place())
    }

    /// The calls of a lane, in the order of arrival.
    fn calls_of(&self, lane: Lane) -> Vec<Call> {
        let mut calls: Vec<Call> = self.calls.iter().filter(|call| call.lane == lane).copied().collect();
        calls.sort_by_key(|call| call.arrival);
        calls
    }

    fn waiting(&self, lane: Lane) -> usize {
        self.calls.iter().filter(|call| call.lane == lane).count()
    }

    fn head(&self, lane: Lane, now: Time) -> Option<Call> {
        self.calls_of(lane).into_iter().find(|&call| !self.held_back(call, RefusalScope::Part, now))
    }

    fn full(&self, lane: Lane) -> bool {
        self.waiting(lane) >= self.spec.lanes[lane as usize].max_waiting as usize
    }

    /// Displaces a call of a full lane, if it can and a new one then finds room: from the held scope that opens last,
    /// if at least half of the calls are held, or else the second of the others.
    fn make_room(&mut self, lane: Lane, deadline: Time) {
        let LaneSpec { max_waiting, displaces, .. } = self.spec.lanes[lane as usize];
        let calls = self.calls_of(lane);
        if calls.len() != max_waiting as usize || !displaces {
            return;
        }
        let (held, open): (Vec<Call>, Vec<Call>) = calls.into_iter().partition(|call| self.is_held(call));
        let scopes = self.told.iter().filter(|told| told.holds == RefusalScope::Part && told.call.lane == lane);
        let last = scopes.map(|told| (told.refusal.until, told.call.scope)).max();
        let of_last = held.iter().find(|call| last.is_some_and(|(_, scope)| scope == call.scope));
        let choices = [of_last.filter(|_| held.len() >= open.len()), open.get(1)];
        let gives_way =
            |call: &&Call| self.asking != Some(call.ticket) && !call.keeps_place && call.deadline <= deadline;
        if let Some(call) = choices.into_iter().flatten().find(gives_way) {
            self.displaced = Some(call.ticket);
            self.leave(call.ticket);
        }
    }

    fn join(&mut self, lane: Lane, now: Time) {
        if self.waiting(lane) == 0 {
            self.credit[lane as usize] = 0;
            if self.due_at[lane as usize] <= now {
                self.due_at[lane as usize] = now + self.spec.window;
            }
        }
    }

    fn leave(&mut self, ticket: Ticket) -> Option<Call> {
        let place = self.calls.iter().position(|call| call.ticket == ticket)?;
        self.asking = self.asking.filter(|&asking| asking != ticket);
        let call = self.calls.remove(place);
        self.forget_scope(call);
        Some(call)
    }

    /// Forgets the refusal of a scope without a waiting call.
    fn forget_scope(&mut self, left: Call) {
        if !self.calls.iter().any(|call| call.place() == left.place()) {
            self.open_scopes(|told| told.call.place() == left.place());
        }
    }

    fn held_back(&self, call: Call, by: RefusalScope, now: Time) -> bool {
        self.told.iter().any(|told| {
            let applies = match by {
                RefusalScope::Part => told.call.place() == call.place(),
                RefusalScope::Lane => told.call.lane == call.lane && call.cost >= told.call.cost,
                RefusalScope::Provider => told.call.lane >= call.lane && call.cost >= told.call.cost,
            };
            let is_current = told.refusal.until > now && told.at <= self.now + MAX_CLOCK_LAG;
            told.holds == by && applies && is_current
        })
    }

    fn ready(&self, now: Time) -> Vec<Call> {
        let heads = Lane::ALL.into_iter().filter_map(|lane| self.head(lane, now));
        let ready = heads.filter(|&call| {
            let lane = call.lane as usize;
            self.in_flight[lane] < self.spec.lanes[lane].max_in_flight
                && self.paused[lane] <= now
                && !self.held_back(call, RefusalScope::Lane, now)
        });
        ready.collect()
    }

    /// The call that asks at `now`, if nothing happens before.
    fn to_ask(&self, now: Time) -> Option<Ticket> {
        let in_flight: u64 = self.in_flight.iter().map(|&count| u64::from(count)).sum();
        if self.asking.is_some() || in_flight >= u64::from(self.spec.max_in_flight) {
            return None;
        }
        let mut ready = self.ready(now);
        ready.sort_by_key(|call| {
            let lane = call.lane as usize;
            if self.credit[lane] >= call.cost.max(1) * 1_000 {
                (0, Time::ZERO, lane)
            } else if self.due_at[lane] <= now {
                (1, self.due_at[lane], 2 - lane)
            } else {
                (2, Time::ZERO, 2 - lane)
            }
        });
        ready.first().filter(|&&call| !self.held_back(call, RefusalScope::Provider, now)).map(|call| call.ticket)
    }

    /// The call that fails at `now`: the one with the first deadline, if that has passed or the call can't be sent before.
    fn to_expire(&self, now: Time) -> Option<Ticket> {
        let first = self.calls.iter().min_by_key(|call| (call.deadline, call.ticket.index()))?;
        let is_hopeless = self.refused_past(first.deadline, first.place(), first.cost, false, now).is_some();
        (first.deadline <= now || is_hopeless).then_some(first.ticket)
    }

    fn granted(&mut self, ticket: Ticket, now: Time) -> Option<Lane> {
        let call = self.leave(ticket)?;
        self.go_to(now);
        for ready in self.ready(now) {
            self.credit[ready.lane as usize] += call.cost.max(1) * u64::from(self.spec.floor);
        }
        let lane = call.lane as usize;
        self.credit[lane] = self.credit[lane].saturating_sub(call.cost.max(1) * 1_000);
        self.due_at[lane] = now + self.spec.window;
        self.in_flight[lane] += 1;
        Some(call.lane)
    }

    /// The longest refusal of a call, alone or behind the others that wait, among those that certainly last until its
    /// deadline. Held calls are only in the way of others of their scope.
    fn refused_past(&self, deadline: Time, place: ScopedLane, cost: u64, behind: bool, now: Time) -> Option<Refusal> {
        let ScopedLane { lane, scope } = place;
        let ticket = self.told.first()?.call.ticket;
        let arriving = Call { ticket, arrival: 0, lane, scope, cost, deadline, keeps_place: false };
        let calls = if behind { self.calls_of(lane) } else { Vec::new() };
        let mut longest: Option<Refusal> = None;
        for told in self.told.iter().filter(|told| told.refusal.closed_until > Time::ZERO) {
            let alone = Self { told: vec![*told], now: self.now, ..Self::new(self.spec) };
            let in_the_way = |call: &Call| match told.holds {
                RefusalScope::Part => call.scope == scope,
                RefusalScope::Lane | RefusalScope::Provider => !self.is_held(call),
            };
            let ahead: Vec<Call> = calls.iter().filter(|call| in_the_way(call)).copied().collect();
            let refusal = self.after(&ahead, told.refusal);
            if alone.held_back(arriving, told.holds, now)
                && refusal.closed_until >= deadline
                && longest.is_none_or(|longest| longest.until < refusal.until)
            {
                longest = Some(refusal);
            }
        }
        longest
    }

    /// The refusal with the times of a call that comes after these. When the limit has room, it sends as many of them
    /// as it admits, and then the next ones at its next time. Calls that are past their deadlines by then have left.
    fn after(&self, ahead: &[Call], mut refusal: Refusal) -> Refusal {
        let WaitReason::Limit { calls, every, .. } = refusal.reason else { return refusal };
        let mut room = calls;
        for call in ahead {
            let sent_at = refusal.closed_until.max(self.paused[call.lane as usize]);
            if sent_at >= call.deadline {
                continue;
            }
            room -= 1;
            if room == 0 {
                room = calls;
                (refusal.until, refusal.closed_until) = (refusal.until + every, refusal.closed_until + every);
            }
        }
        refusal
    }

    fn refuse(&mut self, ticket: Ticket, refusal: Refusal, now: Time) {
        if self.asking != Some(ticket) {
            return;
        }
        self.asking = None;
        let call = *self.calls.iter().find(|call| call.ticket == ticket).expect("a call that asks waits");
        let holds = match refusal.scope {
            RefusalScope::Part if call.scope == 0 => RefusalScope::Lane,
            scope => scope,
        };
        if self.poked || self.scope_poked && holds == RefusalScope::Part {
            return;
        }
        // The latest refusal of each kind counts.
        self.told.retain(|told| {
            let is_same = match holds {
                RefusalScope::Part => told.call.place() == call.place(),
                RefusalScope::Lane => told.call.lane == call.lane,
                RefusalScope::Provider => true,
            };
            told.holds != holds || !is_same
        });
        if holds == RefusalScope::Part {
            self.go_to(now);
            let any_held = self.told.iter().any(|told| told.holds == RefusalScope::Part);
            self.held_at = if any_held { self.held_at.max(now) } else { now };
        }
        self.told.push(Told { refusal, holds, call, at: now });
    }

    /// All times at which something could change by time alone.
    fn moments(&self) -> Vec<Time> {
        let told = self.told.iter().map(|told| told.refusal.until);
        let deadlines = self.calls.iter().map(|call| call.deadline);
        told.chain(deadlines).chain(self.due_at).chain(self.paused).collect()
    }
}

struct Pair {
    lanes: Lanes,
    naive: Naive,
    arrivals: u64,
    /// The most calls that have waited at once.
    most: usize,
    /// The latest hundred tickets, live and stale.
    tickets: Vec<Ticket>,
    now: Time,
}

impl Pair {
    fn new(random: &mut RandomSource) -> Self {
        let lane = |random: &mut RandomSource| LaneSpec {
            max_waiting: random.pick(&[1, 3, 6, 20, 100]),
            displaces: random.chance(50),
            max_in_flight: random.pick(&[1, 2, 5, u32::MAX]),
        };
        let spec = LanesSpec {
            lanes: [lane(random), lane(random), lane(random)],
            max_in_flight: random.pick(&[1, 3, 8, u32::MAX]),
            floor: random.pick(&[0, 50, 100, MAX_FLOOR]),
            window: Span::from_millis(random.pick(&[10, 1_000, 60_000, u64::MAX])),
        };
        Self {
            lanes: Lanes::new(spec),
            naive: Naive::new(spec),
            arrivals: 0,
            most: 0,
            tickets: Vec::new(),
            now: test_time(0),
        }
    }

    fn any_ticket(&self, random: &mut RandomSource) -> Option<Ticket> {
        (!self.tickets.is_empty()).then(|| self.tickets[random.below(self.tickets.len() as u64) as usize])
    }

    fn step(&mut self, random: &mut RandomSource) -> Result<(), String> {
        let now = self.now;
        let lane = random.pick(&Lane::ALL);
        match random.below(26) {
            0..=6 => self.enqueue(lane, random)?,
            7..=10 => self.answer(random)?,
            11..=12 => {
                let Some(ticket) = self.any_ticket(random) else { return Ok(()) };
                same("cancel", self.lanes.cancel(ticket), self.naive.leave(ticket).is_some())?;
            }
            13 => {
                let Some(ticket) = self.any_ticket(random) else { return Ok(()) };
                self.raise(ticket, lane)?;
            }
            14 if random.chance(50) => {
                let Some(ticket) = self.any_ticket(random) else { return Ok(()) };
                self.lanes.join(ticket);
                let call = self.naive.calls.iter_mut().find(|call| call.ticket == ticket);
                call.into_iter().for_each(|call| call.keeps_place = true);
            }
            14 => {
                self.lanes.clear_refusals();
                self.naive.told.retain(|told| told.holds == RefusalScope::Part);
                self.naive.poked = true;
            }
            20 if random.chance(10) => {
                self.lanes.clear_all_refusals();
                self.naive.told.clear();
                self.naive.poked = true;
            }
            20 => {
                let scope = random.pick(&SCOPES);
                self.lanes.clear_scope_refusals(scope);
                self.naive.open_scopes(|told| told.call.scope == scope);
                let asks = |call: &Call| self.naive.asking == Some(call.ticket) && call.scope == scope;
                self.naive.scope_poked |= self.naive.calls.iter().any(asks);
            }
            21 if random.chance(30) => {
                // A small step is only an overtaken reading of the clock.
                self.now = now - Span::from_millis(random.pick(&[1, 100, 101, 400, 90_000]));
            }
            15 => {
                let until = now + Span::from_micros(random.below(300_000));
                self.lanes.pause(lane, until);
                self.naive.paused[lane as usize] = until;
            }
            16 => {
                let most = random.pick(&[0, 1, 2, 10, u32::MAX]);
                self.lanes.set_max_in_flight(most);
                self.naive.spec.max_in_flight = most;
            }
            17 | 22..=25 => {
                self.lanes.record_end(lane);
                self.naive.in_flight[lane as usize] = self.naive.in_flight[lane as usize].saturating_sub(1);
            }
            _ => self.now = now + Span::from_micros(random.below(200_000)),
        }
        self.naive.go_to(self.now);
        self.settle(random)
    }

    fn enqueue(&mut self, lane: Lane, random: &mut RandomSource) -> Result<(), String> {
        let cost = random.pick(&[1, 1, 1, 0, 2, 10, 1_000, MAX_COST, u64::MAX]);
        let deadline =
            if random.chance(40) { self.now + Span::from_micros(random.below(900_000)) } else { Time::NEVER };
        if random.chance(70) {
            self.lanes.make_room(lane, deadline);
            self.naive.make_room(lane, deadline);
        }
        let place = lane.with_scope(if random.chance(70) { random.pick(&SCOPES) } else { 0 });
        let full = self.naive.full(lane);
        let left = |arrival: &u64| self.naive.calls.iter().all(|call| call.arrival != *arrival);
        let again =
            Some(random.below(self.arrivals.max(1))).filter(|arrival| *arrival < self.arrivals && left(arrival));
        let again = again.filter(|_| random.chance(20));
        let entered = match again {
            None if place.scope == 0 => self.lanes.enqueue(lane, cost, deadline, self.now),
            None => self.lanes.enqueue(place, cost, deadline, self.now),
            Some(arrival) => Ok(self.lanes.enqueue_again(arrival, place, cost, deadline, self.now)),
        };
        match entered {
            Ok(_) if full && again.is_none() => return Err(format!("{lane:?} took one too many")),
            Err(_) if !full => return Err(format!("{lane:?} has room")),
            Err(_) => {}
            Ok(ticket) => {
                let slot_taken = self.naive.calls.iter().any(|call| call.ticket.index() == ticket.index());
                if slot_taken || self.tickets.contains(&ticket) {
                    return Err(format!("{ticket:?} was given twice"));
                }
                self.naive.join(lane, self.now);
                let (arrival, cost) = (again.unwrap_or(self.arrivals), cost.min(MAX_COST));
                same("arrival", self.lanes.arrival(ticket), Some(arrival))?;
                let keeps_place = again.is_some();
                let scope = place.scope;
                self.naive.calls.push(Call { ticket, arrival, lane, scope, cost, deadline, keeps_place });
                self.arrivals += u64::from(again.is_none());
                self.most = self.most.max(self.naive.calls.len());
                self.tickets.push(ticket);
                if self.tickets.len() > 200 {
                    self.tickets.drain(..100);
                }
            }
        }
        Ok(())
    }

    fn raise(&mut self, ticket: Ticket, lane: Lane) -> Result<(), String> {
        let find = |naive: &Naive| naive.calls.iter().position(|call| call.ticket == ticket && call.lane < lane);
        if let Some(place) = find(&self.naive) {
            self.naive.make_room(lane, self.naive.calls[place].deadline);
        }
        let expected = match find(&self.naive) {
            None => Ok(false),
            Some(_) if self.naive.full(lane) => Err(QueueFullError { lane }),
            Some(place) => {
                self.naive.join(lane, self.now);
                let before = self.naive.calls[place];
                self.naive.calls[place].lane = lane;
                self.naive.forget_scope(before);
                self.naive.poked |= self.naive.asking == Some(ticket);
                Ok(true)
            }
        };
        same("raise", self.lanes.raise(ticket, lane, self.now), expected)
    }

    /// Answers the asking call, or another one.
    fn answer(&mut self, random: &mut RandomSource) -> Result<(), String> {
        let asking = self.naive.asking.filter(|_| !random.chance(10));
        let Some(ticket) = asking.or_else(|| self.any_ticket(random)) else { return Ok(()) };
        if random.chance(30) {
            // The answer takes its time.
            self.now = self.now + Span::from_micros(random.below(20_000));
            self.naive.now = self.now;
        }
        // Only the asking call is ever granted. An answer that comes too late has a stale ticket.
        let stale = !self.naive.calls.iter().any(|call| call.ticket == ticket);
        if random.chance(45) && (asking.is_some() || stale) {
            return same("granted", self.lanes.grant(ticket, self.now), self.naive.granted(ticket, self.now));
        }
        let longest = random.pick(&[30_000, 400_000, 9_000_000]);
        let until = self.now + Span::from_micros(random.below(longest));
        let is_of_scope = self.naive.calls.iter().any(|call| call.ticket == ticket && call.scope != 0);
        let scope = match random.below(if is_of_scope { 9 } else { 3 }) {
            0 => RefusalScope::Provider,
            1 => RefusalScope::Lane,
            _ => RefusalScope::Part,
        };
        // Limits of a lane and of all lanes differ, so that the test can tell them apart.
        let limit = limit_id(if scope == RefusalScope::Lane { 1 + self.naive.calls.len() % 3 } else { 0 });
        let calls = 1 + random.below(3);
        let spaced = WaitReason::Limit { limit, calls, every: Span::from_micros(random.below(90_000)) };
        let reason = random.pick(&[WaitReason::Credentials, WaitReason::Quota(limit), spaced]);
        let early = until - Span::from_micros(random.below(9_000));
        let closed_until = random.pick(&[Time::ZERO, until, early]);
        let refusal = Refusal { until, closed_until, reason, scope };
        self.lanes.refuse(ticket, refusal, self.now);
        self.naive.refuse(ticket, refusal, self.now);
        Ok(())
    }

    /// Polls until the lanes sleep, and sometimes sleeps.
    fn settle(&mut self, random: &mut RandomSource) -> Result<(), String> {
        let sleep_until = loop {
            let step = self.lanes.poll(self.now);
            if matches!(step, QueueStep::AskStore(_) | QueueStep::Sleep(_)) && !self.naive.calls.is_empty() {
                let latest = self.now + self.naive.spec.window;
                self.naive.due_at = self.naive.due_at.map(|due_at| due_at.min(latest));
            }
            match step {
                QueueStep::Displaced(ticket) => {
                    same("displaced", Some(ticket), self.naive.displaced.take())?;
                    same("cancelled once displaced", self.lanes.cancel(ticket), false)?;
                }
                QueueStep::Expired(ticket) => {
                    same("expired", Some(ticket), self.naive.to_expire(self.now))?;
                    self.naive.leave(ticket).ok_or("expired a call that doesn't wait")?;
                }
                QueueStep::AskStore(ticket) => {
                    same("to expire", None, self.naive.to_expire(self.now))?;
                    same("ask", Some(ticket), self.naive.to_ask(self.now))?;
                    (self.naive.asking, self.naive.poked, self.naive.scope_poked) = (Some(ticket), false, false);
                }
                QueueStep::Sleep(until) => break until,
            }
        };
        same("still to be displaced", self.naive.displaced, None)?;
        let acts = |moment: Time| self.naive.to_expire(moment).is_some() || self.naive.to_ask(moment).is_some();
        if acts(self.now) {
            return Err(format!("sleeps until {sleep_until:?}, but there is something to do: {:?}", self.naive));
        }
        let moments = self.naive.moments();
        if let Some(missed) = moments.iter().find(|&&moment| self.now < moment && moment < sleep_until && acts(moment))
        {
            return Err(format!("sleeps until {sleep_until:?} past {missed:?}: {:?}", self.naive));
        }
        if !(sleep_until.is_never() || sleep_until > self.now && moments.contains(&sleep_until)) {
            return Err(format!("wakes at {sleep_until:?} for nothing: {:?}", self.naive));
        }
        for lane in Lane::ALL {
            let (scope, deadline) = (random.pick(&SCOPES), self.now + Span::from_micros(random.below(600_000)));
            for cost in [0, 1, 2, 999, u64::MAX] {
                let place = lane.with_scope(if cost == 2 { 0 } else { scope });
                let first = self.lanes.refused_past(deadline, place, cost, self.now);
                let behind = self.lanes.refused_behind(deadline, place, cost, self.now);
                for (found, is_behind) in [(first, false), (behind, true)] {
                    let expected = self.naive.refused_past(deadline, place, cost, is_behind, self.now);
                    same("refused until", found.map(|told| told.until), expected.map(|told| told.until))?;
                    same("refusal", self.naive.told.len() > 1 || found == expected, true)?;
                }
            }
            same("waiting", self.lanes.waiting(lane), self.naive.waiting(lane))?;
            same("in flight", self.lanes.in_flight(lane), self.naive.in_flight[lane as usize])?;
        }
        if random.chance(10) && !sleep_until.is_never() {
            self.now = sleep_until;
        }
        Ok(())
    }

    /// Removes all calls, and checks that all room is free again.
    fn clear_out(mut self) -> Result<(), String> {
        let room: u32 = self.naive.spec.lanes.iter().map(|lane| lane.max_waiting).sum();
        for call in std::mem::take(&mut self.naive.calls) {
            same("cancel", self.lanes.cancel(call.ticket), true)?;
        }
        let mut indexes = HashSet::new();
        for lane in Lane::ALL {
            while let Ok(ticket) = self.lanes.enqueue(lane, 1, Time::NEVER, self.now) {
                indexes.insert(ticket.index());
            }
        }
        same("slots", indexes.len(), room as usize)?;
        same("none above their number", indexes.iter().all(|&index| index <= self.most.max(room as usize)), true)
    }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{what}: {found:?}, expected {expected:?}")) }
}

#[test]
fn random_operations_agree_with_the_model() {
    property::check(case_count(300, 2_000), 4_000, |mut random| {
        let mut pair = Pair::new(&mut random);
        while !random.is_exhausted() {
            pair.step(&mut random)?;
        }
        pair.clear_out()
    });
}

#[test]
fn a_long_run_leaks_nothing() {
    let seed = random::run_seed();
    let mut random = RandomSource::from_seed(seed);
    let mut pair = Pair::new(&mut random);
    for step in 0..case_count(30_000, 300_000) {
        if let Err(mismatch) = pair.step(&mut random) {
            panic!("{mismatch} at step {step}\n  repeat with TIDEGATE_SEED={seed}");
        }
    }
    pair.clear_out().expect("room for everybody");
}
