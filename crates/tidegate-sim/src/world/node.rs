//! One client: when it calls, what it remembers, and by which clock.

use rand::RngExt;
use rand_distr::Exp1;
use tidegate_core::{Span, Time};

use super::gate;
use super::machine::Hall;
use super::plain::Plain;
use crate::clock::NodeClock;
use crate::profile::Profile;
use crate::random::{Stream, Streams};
use crate::setup::{Arrivals, Load, Setup};

#[derive(Debug)]
pub(super) struct Node<'s> {
    /// Its load's place in the setup.
    pub(super) load: usize,
    /// What the inbound policy knows it by.
    pub(super) name: String,
    pub(super) clock: NodeClock,
    pub(super) ways: Ways<'s>,
    pub(super) network_rng: Stream,
    /// When its machine's timer rings.
    pub(super) rings_at: Time,
    serial: bool,
    arrivals_rng: Stream,
    /// How many calls it has made.
    made: u32,
}

/// How it goes about its calls.
#[derive(Debug)]
pub(super) enum Ways<'s> {
    None,
    Plain(Plain<'s>),
    Machine(Box<Hall<'s>>),
}

impl Node<'_> {
    pub(super) fn new(index: usize, load: &Load, number: u32, began: Time, streams: &mut Streams) -> Self {
        let mut arrivals_rng = streams.next();
        let drift = load.drift * arrivals_rng.random::<f64>();
        Self {
            load: index,
            name: gate::name_of(load, number),
            clock: NodeClock::new(began, drift, &load.steps),
            ways: Ways::None,
            network_rng: streams.next(),
            rings_at: Time::NEVER,
            serial: matches!(load.arrivals, Arrivals::Serial { .. }),
            arrivals_rng,
            made: 0,
        }
    }

    /// Whether it calls again only when its last call has ended.
    pub(super) fn is_serial(&self) -> bool {
        self.serial
    }

    /// When it makes its next call, before `end`.
    pub(super) fn next_call(&mut self, setup: &Setup, now: Time, end: Time) -> Option<Time> {
        let rng = &mut self.arrivals_rng;
        let began = setup.starts_at;
        let at = match &setup.loads[self.load].arrivals {
            Arrivals::Poisson(rate) => poisson(rate, began, now, end, rng)?,
            Arrivals::Even(rate) => evenly(rate, began, now)?,
            Arrivals::Trace { times, each } => began + *times.get((self.made / each) as usize)?,
            Arrivals::Serial { calls, think } => {
                if calls.is_some_and(|calls| self.made >= calls) {
                    return None;
                }
                now + think.sample(rng)
            }
        };
        self.made = self.made.saturating_add(1);
        (at < end).then_some(at)
    }
}

/// The next of random arrivals, thinned out where the rate is below its largest (Lewis and Shedler, 1979).
fn poisson(rate: &Profile, began: Time, now: Time, end: Time, rng: &mut Stream) -> Option<Time> {
    let most = rate.max();
    let mut at = now;
    while most > 0.0 && at < end {
        let gap = rng.sample::<f64, _>(Exp1) / most * 1e6;
        // At least a microsecond, so that it comes to an end.
        at = at + Span::from_micros((gap.round() as u64).max(1));
        if rng.random::<f64>() * most < rate.at(at.since(began)) {
            return Some(at);
        }
    }
    None
}

/// The next of even arrivals: each comes when the rate has come to one more.
fn evenly(rate: &Profile, began: Time, now: Time) -> Option<Time> {
    let at = began + rate.comes_to(1.0, now.since(began))?;
    // At least a microsecond, so that it comes to an end.
    Some(at.max(now + Span::from_micros(1)))
}
