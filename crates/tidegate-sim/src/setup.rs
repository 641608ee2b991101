//! The parts of one run: a world, its load, and the behaviour of its clients.

use tidegate_core::{Backoff, BudgetSpec, Lane, PacerSpec, Span, Time};
use tidegate_policy::{Policy, Quantity};

use crate::delay::Delay;
use crate::limiter::ServiceLimiter;
use crate::profile::Profile;

/// The largest number of clients of one load.
pub const MAX_CLIENTS: u64 = 100_000;
/// The largest number of loads.
pub const MAX_LOADS: usize = 16;

/// One case of a scenario under one strategy.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The name of the case; empty if there is only one.
    pub case: String,
    /// The name of the strategy.
    pub strategy: String,
    /// The calendar time of the run's start.
    pub starts_at: Time,
    /// The longest duration of the run. It ends earlier if all clients are done.
    pub duration: Span,
    /// The time range of the goodput; the whole run if `None`.
    pub measured_range: Option<TimeRange>,
    /// The number of repetitions, each with other random numbers.
    pub trials: u32,
    /// The service that clients call.
    pub service: ServiceSpec,
    /// The network between clients and service.
    pub network: NetworkSpec,
    /// The groups of clients that call.
    pub loads: Vec<LoadSpec>,
    /// The behaviour of the clients.
    pub client: ClientSpec,
    /// The store of the state of `tidegate` clients.
    pub store: StoreSpec,
    /// The policy of `tidegate` clients and of the gate.
    pub policy: Option<Policy>,
    /// True if the policy's inbound limits apply before the service.
    pub gate: bool,
    /// The condition under which goodput counts as recovered.
    pub recovery_check: RecoveryCheckSpec,
}

impl Setup {
    /// Returns the times of the first and the last change of the world; `None` if it never changes.
    pub fn disturbance_range(&self) -> Option<(Span, Span)> {
        let loads = self.loads.iter().filter_map(|load| match &load.arrivals {
            Arrivals::Poisson(rate) | Arrivals::Even(rate) => Some(rate),
            Arrivals::Trace { .. } | Arrivals::Serial { .. } => None,
        });
        let profiles = loads.chain([&self.service.failures, &self.service.spacing, &self.network.loss]);
        let profiles = profiles.chain(&self.service.workers);
        let profiles = profiles.filter_map(|profile| Some((profile.first_change_at()?, profile.last_change_at())));
        let ranges = self.service.outages.iter().chain(&self.network.partitions).chain(&self.store.outages);
        let changes = profiles.chain(ranges.map(|range| (range.from, range.until)));
        changes.reduce(|(from, until), (other, end)| (from.min(other), until.max(end)))
    }
}

/// A range of time, counted from the run's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeRange {
    /// The first moment of the range.
    pub from: Span,
    /// The end of the range, which is not part of it.
    pub until: Span,
}

impl TimeRange {
    pub(crate) fn contains(self, time: Span) -> bool {
        (self.from..self.until).contains(&time)
    }

    pub(crate) fn any_contains(ranges: &[Self], time: Span) -> bool {
        ranges.iter().any(|range| range.contains(time))
    }
}

/// The service that clients call.
#[derive(Clone, Debug)]
pub struct ServiceSpec {
    /// The time that it works on a request.
    pub latency: Delay,
    /// The extra time for each request that it works on or has queued, the new one included.
    pub latency_per_request: Span,
    /// The number of requests that it works on at a time; unbounded if `None`. If it falls, requests in progress are
    /// finished.
    pub workers: Option<Profile>,
    /// The largest number of requests that wait for a worker. Further ones get a server error. Default 1000.
    pub queue: u32,
    /// The limits of all clients together, counted exactly.
    pub limits: Vec<Quantity>,
    /// The least time in seconds between a request and the one before it, accepted or not. A request that comes earlier
    /// is refused as for a limit.
    pub spacing: Profile,
    /// The `Retry-After` of replies that refuse a request for a limit.
    pub retry_after: RetryAfterMode,
    /// The share of requests that get a server error, from 0 to 1.
    pub failures: Profile,
    /// The times in which it refuses connections.
    pub outages: Vec<TimeRange>,
    /// The times in which no worker makes progress, such as those of a garbage collector.
    pub pauses: Option<Pauses>,
    /// True if it stops the work on a request when its client has timed out. Default false.
    pub notices_timeouts: bool,
    /// True if each call reads a row and writes it back. The write fails if another call has written the row since.
    pub versioned: bool,
}

impl ServiceSpec {
    /// Returns the number of workers at a time from the run's start; `None` if it is unbounded.
    pub(crate) fn workers_at(&self, time: Span) -> Option<u32> {
        self.workers.as_ref().map(|workers| workers.value_at(time).round() as u32)
    }

    /// Returns the state of its limits at the run's start.
    pub(crate) fn limiters(&self, started_at: Time) -> Vec<ServiceLimiter> {
        self.limits.iter().filter_map(|limit| ServiceLimiter::new(limit, started_at)).collect()
    }
}

/// Pauses at regular times. Each ends a period, so that the first period begins with work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pauses {
    /// The length of a period.
    pub period: Span,
    /// The length of the pause, less than the period.
    pub length: Span,
}

impl Pauses {
    /// Returns the end of a work that begins at `start`, both from the run's start.
    pub(crate) fn end_of_work(&self, start: Span, work: Span) -> Span {
        let (period, length) = (self.period.as_micros(), self.length.as_micros());
        let busy = period - length;
        let start = start.as_micros();
        // The time outside of pauses, until the start and until the end.
        let done = (start / period) * busy + (start % period).min(busy);
        let done = done.saturating_add(work.as_micros());
        Span::from_micros((done / busy).saturating_mul(period).saturating_add(done % busy))
    }
}

/// The `Retry-After` of a service's replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryAfterMode {
    /// No `Retry-After`.
    None,
    /// The true time until the request is allowed, in whole seconds, rounded up.
    Accurate,
    /// Always this time, true or not.
    Fixed(Span),
}

/// The network between clients and service.
#[derive(Clone, Debug)]
pub struct NetworkSpec {
    /// The delay of one message, in either direction.
    pub delay: Delay,
    /// The share of messages that are lost, from 0 to 1. It applies to requests and replies alike.
    pub loss: Profile,
    /// The times in which every message is lost.
    pub partitions: Vec<TimeRange>,
}

/// A group of clients that call alike. Each is a process with its own budget, queue and breaker.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    /// The name of the load. The inbound policy's `key` of a call is `NAME-N`, with the client's number N from 0 on.
    pub name: String,
    /// The number of clients, up to [`MAX_CLIENTS`].
    pub clients: u32,
    /// The times at which each client calls.
    pub arrivals: Arrivals,
    /// The priority of its calls.
    pub lane: Lane,
    /// The inbound action of its calls. If `None`, the policy's `default`, or no action if the policy has no `default`.
    pub action: Option<String>,
    /// The largest clock drift of its clients: the share by which their clocks run faster than time, from -0.5 to 0.5.
    /// Each client draws its own drift between 0 and this. Default 0.
    pub drift: f64,
    /// The steps by which its clients' clocks are set.
    pub clock_steps: Vec<ClockStep>,
}

/// A change that sets a clock forward or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockStep {
    /// The time of the change, from the run's start.
    pub at: Span,
    /// The size of the change.
    pub amount: Span,
    /// True if the clock is set back.
    pub is_backward: bool,
}

/// The times at which a client calls.
#[derive(Clone, Debug)]
pub enum Arrivals {
    /// At random, at this rate of calls per second, independent of the end of earlier calls.
    Poisson(Profile),
    /// Evenly spaced, at this rate of calls per second, independent of the end of earlier calls.
    Even(Profile),
    /// At the given times.
    Trace {
        /// The times in ascending order, from the run's start.
        times: Vec<Span>,
        /// The number of calls at each time.
        each: u32,
    },
    /// One call after the other.
    Serial {
        /// The number of calls; `None` for calls until the run ends.
        calls: Option<u32>,
        /// The pause before each call, the first included.
        think: Delay,
    },
}

/// The behaviour of clients.
#[derive(Clone, Debug)]
pub enum ClientSpec {
    /// A plain client, without Tidegate.
    Plain(PlainClientSpec),
    /// A client that runs the production code, by the rules of this provider of the policy.
    Tidegate {
        /// The provider's index in the policy.
        provider: usize,
    },
}

/// A client that retries by its own replies alone.
#[derive(Clone, Debug)]
pub struct PlainClientSpec {
    /// The largest number of attempts of a call, the first included; `None` for attempts until one succeeds.
    pub attempts: Option<u32>,
    /// The back-off between attempts.
    pub backoff: Option<Backoff>,
    /// The pacer that sets the wait before each attempt instead of a back-off. It learns the result of each attempt.
    /// Each client has one pacer and makes one call after the other.
    pub pacer: Option<PacerSpec>,
    /// The retry budget. Each client has its own.
    pub budget: Option<BudgetSpec>,
    /// The largest number of attempts that a client has in flight. Further ones fail at once.
    pub in_flight: Option<u32>,
    /// The controller of its attempts. A call that may not be sent waits, also for another attempt, for at most half of
    /// the time until its deadline.
    pub control: Option<ControllerKind>,
    /// The largest number of calls that wait for the controller. Further ones fail. Default 1000.
    pub queue: u32,
    /// The timeout of an attempt; `None` if it waits without end.
    pub timeout: Option<Span>,
    /// The time for a call, after which it has failed; `None` if it has no end.
    pub deadline: Option<Span>,
    /// True if it waits at least for the `Retry-After` of a reply.
    pub honours_retry_after: bool,
}

/// The controller of a plain client's attempts, with its published default values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerKind {
    /// Additive increase and multiplicative decrease of the attempts in flight, as in Netflix's concurrency-limits.
    Aimd,
    /// A rate along CUBIC's curve, as in the AWS SDKs' retry mode `adaptive`.
    Cubic,
    /// The gradient controller of Envoy's adaptive concurrency filter.
    Envoy,
    /// The adaptive limiter of failsafe-go.
    Failsafe,
    /// `Gradient2` of Netflix's concurrency-limits.
    Gradient2,
    /// The best possible: it knows the service's workers and limits, and all clients' attempts.
    Oracle,
    /// `Vegas` of Netflix's concurrency-limits.
    Vegas,
}

impl ControllerKind {
    /// All kinds with their names in scenarios.
    pub const ALL: [(&str, Self); 7] = [
        ("aimd", Self::Aimd),
        ("cubic", Self::Cubic),
        ("envoy", Self::Envoy),
        ("failsafe", Self::Failsafe),
        ("gradient2", Self::Gradient2),
        ("oracle", Self::Oracle),
        ("vegas", Self::Vegas),
    ];
}

/// The store of the state of `tidegate` clients.
#[derive(Clone, Debug, Default)]
pub struct StoreSpec {
    /// True if all clients share one store. By default each has its own.
    pub shared: bool,
    /// The delay of one message to or from a shared store.
    pub latency: Option<Delay>,
    /// The times in which a shared store can't be reached.
    pub outages: Vec<TimeRange>,
}

/// The condition under which goodput counts as recovered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecoveryCheckSpec {
    /// The time after the last disturbance from which calls must succeed again. Default 10 s.
    pub within: Span,
    /// The least ratio of the share of calls that succeed after the disturbance to the share before it. Default 0.9.
    pub share: f64,
}
