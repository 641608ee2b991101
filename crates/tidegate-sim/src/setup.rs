//! What one run is made of: a world, its load, and how its clients behave.

use tidegate_core::{Backoff, BudgetSpec, Lane, PacerSpec, Span, Time};
use tidegate_policy::{Policy, Quantity};

use crate::delay::Delay;
use crate::profile::Profile;

/// The most clients of one load.
pub const MAX_CLIENTS: u64 = 100_000;
/// The most loads.
pub const MAX_LOADS: usize = 16;

/// One case of a scenario under one strategy.
#[derive(Clone, Debug)]
pub struct Setup {
    /// What the case is called; empty if there is but one.
    pub case: String,
    /// What the strategy is called.
    pub strategy: String,
    /// The calendar's moment at which it begins.
    pub starts_at: Time,
    /// When it ends at the latest.
    pub duration: Span,
    /// Over which stretch goodput is taken; all of it if `None`.
    pub measured_range: Option<TimeRange>,
    /// How often it is repeated, each time with other random numbers.
    pub trials: u32,
    /// What is called.
    pub service: ServiceSpec,
    /// What lies between.
    pub network: NetworkSpec,
    /// Who calls.
    pub loads: Vec<LoadSpec>,
    /// How they go about it.
    pub client: ClientSpec,
    /// Where the machine's state lives.
    pub store: StoreSpec,
    /// By what the production machines run.
    pub policy: Option<Policy>,
    /// Whether the policy's inbound limits stand before the service.
    pub gate: bool,
    /// When its goodput has recovered.
    pub recovery_check: RecoveryCheckSpec,
}

impl Setup {
    /// When the world first changes, and when it has changed for the last time; `None` if it never does.
    pub fn disturbance_range(&self) -> Option<(Span, Span)> {
        let loads = self.loads.iter().filter_map(|load| match &load.arrivals {
            Arrivals::Poisson(rate) | Arrivals::Even(rate) => Some(rate),
            Arrivals::Trace { .. } | Arrivals::Serial { .. } => None,
        });
        let profiles = loads.chain([&self.service.failures, &self.service.spacing, &self.network.loss]);
        let profiles = profiles.filter_map(|profile| Some((profile.first_change_at()?, profile.last_change_at())));
        let stretches = self.service.outages.iter().chain(&self.network.partitions).chain(&self.store.outages);
        let changes = profiles.chain(stretches.map(|stretch| (stretch.from, stretch.until)));
        changes.reduce(|(from, until), (other, end)| (from.min(other), until.max(end)))
    }
}

/// A stretch of time, counted from the run's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeRange {
    /// Its first moment.
    pub from: Span,
    /// The moment after its last.
    pub until: Span,
}

impl TimeRange {
    pub(crate) fn any_contains(stretches: &[Self], time: Span) -> bool {
        stretches.iter().any(|stretch| (stretch.from..stretch.until).contains(&time))
    }
}

/// What is called.
#[derive(Clone, Debug)]
pub struct ServiceSpec {
    /// How long it takes for a request.
    pub latency: Delay,
    /// How much longer for each request that it has in hand, the new one included.
    pub latency_per_request: Span,
    /// How many requests it works on at a time; `None` for all that come.
    pub workers: Option<u32>,
    /// How many wait for a worker; more are refused as a server error. Default 1000.
    pub queue: u32,
    /// What it limits all clients to together, exactly.
    pub limits: Vec<Quantity>,
    /// How many seconds after the request before it, taken or not, a request must come; others are refused as for a limit.
    pub spacing: Profile,
    /// What it says of when to come back in a reply that refuses for a limit.
    pub retry_after: RetryAfterMode,
    /// Which share of requests fails, from 0 to 1.
    pub failures: Profile,
    /// When nobody takes its connections.
    pub outages: Vec<TimeRange>,
    /// Whether it stops working on a request whose client has gone away. Default false.
    pub notices_timeouts: bool,
    /// Whether each call reads a row and writes it back, which fails where another has written it since.
    pub versioned: bool,
}

/// What a service says of when to come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryAfterMode {
    /// Nothing.
    None,
    /// The truth, in whole seconds, rounded up.
    Accurate,
    /// Always this, true or not.
    Fixed(Span),
}

/// What lies between clients and service.
#[derive(Clone, Debug)]
pub struct NetworkSpec {
    /// How long each way takes.
    pub delay: Delay,
    /// Which share of messages is lost, from 0 to 1, requests and replies alike.
    pub loss: Profile,
    /// When every message is lost.
    pub partitions: Vec<TimeRange>,
}

/// Clients that call alike. Each is a process of its own, with its own budget, queue and breaker.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    /// What it is called; the inbound policy's `key` of its calls is this and the client's number.
    pub name: String,
    /// How many clients.
    pub clients: u32,
    /// When each calls.
    pub arrivals: Arrivals,
    /// How urgent its calls are.
    pub lane: Lane,
    /// The inbound action of its calls; the policy's `default` if `None`, or none if it has no such.
    pub action: Option<String>,
    /// How much faster its clients' clocks run than time itself, as a share; each client has a part of it between nothing
    /// and all.
    pub drift: f64,
    /// When its clients' clocks are set.
    pub clock_steps: Vec<ClockStep>,
}

/// A clock that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockStep {
    /// When.
    pub at: Span,
    /// By how much.
    pub amount: Span,
    /// Whether it is set back.
    pub is_backward: bool,
}

/// When a client calls.
#[derive(Clone, Debug)]
pub enum Arrivals {
    /// At random, so many a second, whatever became of earlier calls.
    Poisson(Profile),
    /// Evenly, so many a second, whatever became of earlier calls.
    Even(Profile),
    /// At these times.
    Trace {
        /// When, in order.
        times: Vec<Span>,
        /// How many calls at each.
        each: u32,
    },
    /// One call after the other.
    Serial {
        /// How many; `None` for as many as there is time for.
        calls: Option<u32>,
        /// How long it pauses before each, the first included.
        think: Delay,
    },
}

/// How clients go about their calls.
#[derive(Clone, Debug)]
pub enum ClientSpec {
    /// A plain client.
    Plain(PlainClientSpec),
    /// The production machine, by the rules of this provider of the policy.
    Tidegate {
        /// Its place in the policy.
        provider: usize,
    },
}

impl ClientSpec {
    /// As a strategy's `client` says it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Plain(_) => "plain",
            Self::Tidegate { .. } => "tidegate",
        }
    }
}

/// A client that tries again without knowing more than its own replies.
#[derive(Clone, Debug)]
pub struct PlainClientSpec {
    /// The tries a call, the first included; `None` until it succeeds.
    pub attempts: Option<u32>,
    /// How long it waits between them.
    pub backoff: Option<Backoff>,
    /// What it waits for before each try instead, told of how each has ended; one pacer a client, whose clients call one
    /// call after the other.
    pub pacer: Option<PacerSpec>,
    /// What bounds its retries, one budget a client.
    pub budget: Option<BudgetSpec>,
    /// How many calls a client has in flight; further ones fail at once.
    pub in_flight: Option<u32>,
    /// How long it waits for a reply.
    pub timeout: Option<Span>,
    /// Whether it waits at least as long as a reply says.
    pub honours_retry_after: bool,
}

/// Where the machine's state lives.
#[derive(Clone, Debug, Default)]
pub struct StoreSpec {
    /// Whether all clients share one; each has its own by default.
    pub shared: bool,
    /// How long the way to a shared store takes, one way.
    pub latency: Option<Delay>,
    /// When a shared store can't be reached.
    pub outages: Vec<TimeRange>,
}

/// When goodput counts as recovered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecoveryCheckSpec {
    /// How long after the last disturbance. Default 10 s.
    pub within: Span,
    /// Which share of what succeeded before must succeed again. Default 0.9.
    pub share: f64,
}
