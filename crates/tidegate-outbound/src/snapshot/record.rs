//! What a snapshot says of one limit.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use tidegate_core::Time;

/// Whose count it is, by the names that the policy gives, which outlive the process as its keys don't.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RecordKey {
    pub provider: String,
    /// The limit's name.
    pub limit: String,
    /// Where the credential comes from; none where the limit counts all of a provider's calls, or nobody is named.
    pub credential: Option<String>,
}

/// What is remembered of one limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SnapshotRecord {
    pub whose: RecordKey,
    pub state: RecordState,
}

/// Moments are microseconds since the Unix epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "lowercase")]
pub(super) enum RecordState {
    /// What is used of a quota in one period of its calendar.
    Quota {
        used: u64,
        #[serde(with = "micros")]
        began: Time,
        #[serde(with = "micros")]
        ends: Time,
    },
    /// When a credential may be used again.
    Cooldown {
        #[serde(with = "micros")]
        until: Time,
    },
}

impl SnapshotRecord {
    /// From when to when it counts.
    pub(super) fn period(&self) -> (Time, Time) {
        match self.state {
            RecordState::Quota { began, ends, .. } => (began, ends),
            RecordState::Cooldown { until } => (Time::ZERO, until),
        }
    }
}

/// What is kept of earlier records besides those that count at present: for each quota its last period that is over and
/// the next that is to come, since a clock that has been set may be set again, and what an owner had that isn't known
/// any more, until it is over.
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
