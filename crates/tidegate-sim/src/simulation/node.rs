//! One client: its arrivals, its state and its clock.

use rand::RngExt;
use rand_distr::Exp1;
use tidegate_core::{Span, Time};

use super::plain_client::PlainClient;
use super::tidegate_client::TidegateClient;
use crate::clock::NodeClock;
use crate::profile::Profile;
use crate::random::{RngStreams, SimRng};
use crate::setup::{Arrivals, LoadSpec, Setup};

#[derive(Debug)]
pub(super) struct SimNode<'s> {
    /// The index of its load in the setup.
    pub(super) load: usize,
    pub(super) clock: NodeClock,
    pub(super) client: ClientState<'s>,
    pub(super) network_rng: SimRng,
    /// The moment at which its timer fires.
    pub(super) timer_fires_at: Time,
    /// True if it makes its next call only after the last has ended.
    pub(super) is_serial: bool,
    arrivals_rng: SimRng,
    /// The number of calls that it has made.
    calls_made: u32,
}

/// The behaviour of a client, with its state.
#[derive(Debug)]
pub(super) enum ClientState<'s> {
    Plain(PlainClient<'s>),
    Tidegate(Box<TidegateClient<'s>>),
}

impl<'s> SimNode<'s> {
    /// Creates a client of a load. It and its state take their random streams in a fixed order.
    pub(super) fn new(
        (index, load): (usize, &LoadSpec),
        starts_at: Time,
        streams: &mut RngStreams,
        new_client: impl FnOnce(SimRng) -> ClientState<'s>,
    ) -> Self {
        let mut arrivals_rng = streams.next_rng();
        let drift = load.drift * arrivals_rng.random::<f64>();
        Self {
            load: index,
            clock: NodeClock::new(starts_at, drift, &load.clock_steps),
            network_rng: streams.next_rng(),
            client: new_client(streams.next_rng()),
            timer_fires_at: Time::NEVER,
            is_serial: matches!(load.arrivals, Arrivals::Serial { .. }),
            arrivals_rng,
            calls_made: 0,
        }
    }

    /// Returns the time of its next call, if that is before `end`.
    pub(super) fn next_call_at(&mut self, setup: &Setup, now: Time, end: Time) -> Option<Time> {
        let (rng, start) = (&mut self.arrivals_rng, setup.starts_at);
        let at = match &setup.loads[self.load].arrivals {
            Arrivals::Poisson(rate) => next_poisson_arrival(rate, start, now, end, rng)?,
            Arrivals::Even(rate) => next_even_arrival(rate, start, now)?,
            Arrivals::Trace { times, each } => start + *times.get((self.calls_made / each) as usize)?,
            Arrivals::Serial { calls, think } => {
                if calls.is_some_and(|calls| self.calls_made >= calls) {
                    return None;
                }
                now + think.sample(rng)
            }
        };
        self.calls_made = self.calls_made.saturating_add(1);
        (at < end).then_some(at)
    }
}

/// Returns the next random arrival by thinning candidates at the largest rate (Lewis and Shedler, 1979).
fn next_poisson_arrival(rate: &Profile, start: Time, now: Time, end: Time, rng: &mut SimRng) -> Option<Time> {
    let max_rate = rate.max();
    let mut at = now;
    while max_rate > 0.0 && at < end {
        let gap = rng.sample::<f64, _>(Exp1) / max_rate * 1e6;
        // At least a microsecond, so that the loop ends.
        at = at + Span::from_micros((gap.round() as u64).max(1));
        if rng.random::<f64>() * max_rate < rate.value_at(at.since(start)) {
            return Some(at);
        }
    }
    None
}

/// Returns the next even arrival: the time at which the rate's integral has grown by one.
fn next_even_arrival(rate: &Profile, start: Time, now: Time) -> Option<Time> {
    let at = start + rate.integral_reaches_at(1.0, now.since(start))?;
    // At least a microsecond, so that time advances.
    Some(at.max(now + Span::from_micros(1)))
}
