//! A limit that a descriptor states itself. It is a rate: its whole number at once, and as many in each unit of time.

use tidegate_core::{CallerRate, CallerRateDecision};

use super::messages::{Code, CurrentLimit, Descriptor, DescriptorStatus, Override, Seconds, Unit};

/// A descriptor's own limit, and its hits.
pub(super) struct InlineLimit {
    limit: Override,
    pub(super) rate: CallerRate,
    /// The name of its count: the domain and the entries.
    pub(super) name: Vec<u8>,
    /// The hits; negative to give them back.
    pub(super) quantity: i64,
}

impl InlineLimit {
    /// Reads the limit of a descriptor that has one.
    pub(super) fn new(domain: &str, descriptor: &Descriptor, limit: &Override, hits: u64) -> Result<Self, String> {
        let seconds = match limit.unit() {
            Unit::Unknown => return Err("the limit has no unit".to_owned()),
            Unit::Second => 1,
            Unit::Minute => 60,
            Unit::Hour => 3_600,
            Unit::Day => 86_400,
            Unit::Week => 7 * 86_400,
            Unit::Month => 30 * 86_400,
            Unit::Year => 365 * 86_400,
        };
        let requests = u64::from(limit.requests_per_unit);
        // A limit of 0 refuses each hit. Its rate has no effect then. The fastest rate is one in each nanosecond.
        let count = requests.clamp(1, 1_000_000_000 * seconds);
        let rate = CallerRate::new(requests, count, seconds).map_err(|error| error.to_string())?;
        let hits = i64::try_from(hits).unwrap_or(i64::MAX);
        Ok(Self {
            limit: limit.clone(),
            rate,
            name: name(domain, descriptor, limit.unit()),
            quantity: if descriptor.is_negative_hits { -hits } else { hits },
        })
    }

    pub(super) fn status(&self, decided: &CallerRateDecision) -> DescriptorStatus {
        let code = if decided.is_limited { Code::OverLimit } else { Code::Ok };
        let reset = if decided.is_limited { decided.retry_after_secs() } else { decided.reset_after_secs() };
        DescriptorStatus {
            code: code.into(),
            current_limit: Some(CurrentLimit {
                requests_per_unit: self.limit.requests_per_unit,
                unit: self.limit.unit,
                name: String::new(),
            }),
            limit_remaining: u32::try_from(decided.remaining).unwrap_or(u32::MAX),
            duration_until_reset: u32::try_from(reset).ok().map(|reset| Seconds { seconds: reset.into() }),
        }
    }
}

/// A name that no other domain, unit and entries have: each text has its length before it. With another unit, a debt would be
/// another time. No client of the Redis protocol
/// chooses such a name by chance.
fn name(domain: &str, descriptor: &Descriptor, unit: Unit) -> Vec<u8> {
    let entries = descriptor.entries.iter().flat_map(|entry| [entry.key.as_bytes(), &entry.value]);
    let texts = std::iter::once(domain.as_bytes()).chain(entries);
    let mut name = [&b"rls"[..], &(unit as i32).to_le_bytes()].concat();
    for text in texts {
        name.extend_from_slice(&text.len().to_le_bytes());
        name.extend_from_slice(text);
    }
    name
}
