//! The phases of a connection and their timeouts.

use std::time::Duration;

use tidegate_policy::InboundTimeouts;

/// The phase of a connection's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ConnectionPhase {
    /// Between requests.
    Idle = 0,
    /// A head has begun to arrive (or the connection is new).
    Head = 1,
    /// The gate decides. The store has its own deadlines.
    Deciding = 2,
    /// The client is sending a body.
    Upload = 3,
    /// The upstream has the whole request and hasn't answered.
    AwaitResponse = 4,
    /// The response's body is being sent to the client.
    Download = 5,
    /// The connection has been upgraded.
    Tunnel = 6,
    /// The last response is sent. The rest of the request is read and discarded, so that a reset doesn't lose the
    /// response.
    Linger = 7,
    /// The requests of an HTTP/2 connection are streams, each with a phase of its own.
    Streams = 8,
}

/// The bits of [`ConnectionWatch::phase_and_reason`] that hold the phase.
pub(super) const PHASE_MASK: u8 = 15;

/// The reason why a connection must end its phase. It is a bit beside the phase, so that both change together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum EndReason {
    /// The phase's timeout is over.
    Timeout = 16,
    /// Unfinished heads take too many bytes in total.
    HeadBytes = 32,
    /// A new connection takes its place.
    Displaced = 64,
}

impl ConnectionPhase {
    pub(super) const ALL: [Self; 9] = [
        Self::Idle,
        Self::Head,
        Self::Deciding,
        Self::Upload,
        Self::AwaitResponse,
        Self::Download,
        Self::Tunnel,
        Self::Linger,
        Self::Streams,
    ];

    pub(super) fn from_u8(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Idle)
    }
}

/// The time that the rest of a request may keep arriving after its response.
pub(super) const LINGER_TIMEOUT: Duration = Duration::from_secs(2);

/// The period after which a body's rate is judged each time. Only time spent waiting for the client counts.
pub(super) const BODY_RATE_PERIOD: Duration = Duration::from_secs(10);
/// The maximum bytes of unfinished heads over all connections of a listener. Beyond it the oldest head is ended.
pub(super) const MAX_HEAD_BYTES: usize = 32 << 20;
/// The maximum bytes of a head's first piece that don't count as unfinished, so that a usual head is never counted.
pub(super) const UNCOUNTED_HEAD_BYTES: usize = 8 << 10;

/// The time that a phase may go without progress. `None` if there is no such limit.
pub(super) fn phase_timeout(timeouts: &InboundTimeouts, phase: ConnectionPhase) -> Option<Duration> {
    match phase {
        ConnectionPhase::Idle | ConnectionPhase::Tunnel => Some(timeouts.idle),
        ConnectionPhase::Head => Some(timeouts.header),
        ConnectionPhase::Deciding | ConnectionPhase::Streams => None,
        ConnectionPhase::Upload | ConnectionPhase::Download => Some(timeouts.body),
        ConnectionPhase::AwaitResponse => Some(timeouts.response),
        ConnectionPhase::Linger => Some(LINGER_TIMEOUT),
    }
}

/// The length of a tick.
pub(super) fn tick_of(timeouts: &InboundTimeouts) -> Duration {
    let shortest = ConnectionPhase::ALL.into_iter().filter_map(|phase| phase_timeout(timeouts, phase)).min();
    (shortest.unwrap_or(LINGER_TIMEOUT) / 8).clamp(Duration::from_millis(5), Duration::from_secs(1))
}

/// The number of ticks after which a timeout is over.
pub(super) fn ticks(timeout: Duration, tick: Duration) -> u32 {
    // One more, because the first tick may come right after the phase began.
    let whole = timeout.as_nanos().div_ceil(tick.as_nanos().max(1));
    u32::try_from(whole).unwrap_or(u32::MAX).saturating_add(1)
}
