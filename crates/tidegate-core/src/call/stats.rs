//! Counts of a provider's calls and attempts.

use crate::{Class, DurationHistogram, Lane};

/// The calls and attempts of one provider since the process started, as far as they were seen by this process.
#[derive(Clone, Debug, Default)]
pub struct ProviderStats {
    /// The calls that have started, by the lanes that they were made for, in the order of [`Lane::ALL`].
    pub calls: [u64; Lane::ALL.len()],
    /// The further requests of calls that were sent: retries and hedges.
    pub retries: u64,
    /// The turns that were taken back, because what the request needed, such as a login, took long.
    pub postponed: u64,
    /// The requests that have ended, in the order of [`Class::ALL`].
    pub attempts: [u64; Class::ALL.len()],
    /// The time from sending a request to the head of its reply.
    pub reply_times: DurationHistogram,
    /// The time for which each request had waited for each of its turns in the queue, by the lanes that the calls were made for, in the
    /// order of [`Lane::ALL`].
    pub waits: [DurationHistogram; Lane::ALL.len()],
}

impl ProviderStats {
    /// The first requests of calls that were sent.
    pub fn first_tries(&self) -> u64 {
        let sent: u64 = self.waits.iter().map(DurationHistogram::count).sum();
        sent.saturating_sub(self.retries + self.postponed)
    }
}
