//! The record of one limit in a snapshot.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use tidegate_core::Time;

/// The owner of a count, by the names in the policy. They outlive the process, unlike its keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RecordKey {
    pub provider: String,
    /// The limit's name.
    pub limit: String,
    /// The source of the credential; `None` if the limit counts all calls of a provider, or no credential is named.
    pub credential: Option<String>,
}

/// The saved state of one limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SnapshotRecord {
    pub whose: RecordKey,
    pub state: RecordState,
}

/// The adaptive limit of a provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LearntLimit {
    pub provider: String,
    pub in_flight: u32,
    /// The round trip without load, in microseconds.
    pub round_trip: u64,
}

impl LearntLimit {
    /// True if the other limit, of the same provider, differs by at most an eighth: by the steps in which it is searched.
    /// The round trips may differ by a half.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.provider == other.provider
            && self.in_flight.abs_diff(other.in_flight) <= self.in_flight / 8
            && self.round_trip.abs_diff(other.round_trip) <= self.round_trip / 2
    }
}

/// Times are microseconds since the Unix epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "lowercase")]
pub(super) enum RecordState {
    /// The use of a quota in one period of its calendar.
    Quota {
        used: u64,
        #[serde(with = "micros")]
        began: Time,
        #[serde(with = "micros")]
        ends: Time,
    },
    /// The time until which a credential may not be used.
    Cooldown {
        #[serde(with = "micros")]
        until: Time,
    },
}

impl SnapshotRecord {
    /// The time from which the record counts, and the time when it ends.
    pub(super) fn period(&self) -> (Time, Time) {
        match self.state {
            RecordState::Quota { began, ends, .. } => (began, ends),
            RecordState::Cooldown { until } => (Time::ZERO, until),
        }
    }
}

/// Returns the earlier records that are kept besides those in effect. For each quota these are its last period that is
/// over and the next one to come, because a clock that was set may be set again. Records of unknown limits are kept
/// until they end.
pub(super) fn retained_records(
    earlier: &[SnapshotRecord],
    present: &[SnapshotRecord],
    is_known: impl Fn(&RecordKey) -> bool,
    now: Time,
) -> Vec<SnapshotRecord> {
    let current_periods: HashSet<_> = present.iter().map(|record| (&record.whose, record.period().0)).collect();
    let mut retained: Vec<&SnapshotRecord> = earlier
        .iter()
        .filter(|record| {
            let (began, ends) = record.period();
            let counts = !current_periods.contains(&(&record.whose, began));
            match record.state {
                RecordState::Quota { .. } if is_known(&record.whose) => counts && (ends <= now || began > now),
                RecordState::Cooldown { .. } if is_known(&record.whose) => false,
                _ => ends > now,
            }
        })
        .collect();
    retained.sort_by_key(|record| {
        let (began, ends) = record.period();
        began.since(now).max(now.since(ends))
    });
    let mut seen_keys = HashSet::new();
    retained.retain(|record| seen_keys.insert((&record.whose, record.period().0 > now)));
    retained.into_iter().cloned().collect()
}

pub(super) mod micros {
    use serde::{Deserialize, Deserializer, Serializer};
    use tidegate_core::Time;

    pub(crate) fn serialize<S: Serializer>(time: &Time, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(time.as_micros())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Time, D::Error> {
        u64::deserialize(deserializer).map(Time::from_micros)
    }
}
