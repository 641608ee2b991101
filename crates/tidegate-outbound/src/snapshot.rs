//! State of outbound calls that outlives the process: spent quotas, cool-downs and adaptive limits, in a plain file.
//!
//! A quota can last for days, and the provider defines the length of a cool-down. A process that forgot them would make
//! calls that fail until then, or be banned. A provider's capacity takes some seconds of traffic to find. Windows and rates start empty: they hold too many times that end too soon
//! to be written every second. If the provider still counts calls of them, that costs one throttled reply, which starts
//! a cool-down.

mod file;
mod record;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

pub use file::SnapshotError;
use file::{SnapshotDocument, SnapshotFile};
use record::{LearntLimit, RecordKey, RecordState, SnapshotRecord, retained_records};
use tidegate_core::call::ProviderLimit;
use tidegate_core::{Batch, Clock, Key, Limit, LimitId, LimitKind, MAX_COST, Op, Outcome, Span, Time, Verb};
use tidegate_policy::verdict::DEFAULT_MAX_PAUSE;
use tidegate_runtime::clock::SystemClock;
use tidegate_store::{Memory, Store, StoreResponse};

use super::{Outbound, Provider};

/// The most that the present may lie before the last save without a warning that the clock was set back.
const MAX_CLOCK_STEP_BACK: Span = Span::from_secs(1);

/// A file with the spent quotas, cool-downs and adaptive limits of an [`Outbound`], by the names of provider, limit and credential.
///
/// [`Snapshot::save`] writes it if something has changed. Called once a second, a killed process loses at most the
/// state of its last second. The file holds no secret: it names the source of a credential, such as `env:API_TOKEN`. A
/// new token from the same source continues with the state of the old one.
///
/// # Changes of the clock
/// State that has ended when the process starts isn't restored. If the clock was set back, quotas continue in the
/// period that they had reached before. If it ran ahead and was corrected, quotas continue with their use from before
/// that. In neither case is a quota granted twice. A cool-down that was saved by a clock ahead of the present keeps its
/// remaining time.
pub struct Snapshot<S: Store = Memory, C: Clock = SystemClock> {
    subject: Mutex<Arc<Subject<S, C>>>,
    file: SnapshotFile,
    saved: Mutex<SavedState>,
}

/// The providers whose state is saved.
struct Subject<S, C> {
    outbound: Outbound<S, C>,
    limit_keys: HashMap<RecordKey, (LimitId, Key)>,
    /// In the order of the policy, so that equal state is written in the same way.
    record_order: Vec<RecordKey>,
}

/// The contents of the file.
#[derive(Default)]
struct SavedState {
    /// The records in effect at the last write; `None` before the first one.
    current_records: Option<Vec<SnapshotRecord>>,
    /// All records, including retained ones.
    all_records: Vec<SnapshotRecord>,
    learnt: Vec<LearntLimit>,
}

impl<S: Store, C: Clock + Clone> Snapshot<S, C> {
    /// Reads the file, if it exists, into `outbound`, which mustn't have made calls yet, and writes it again. From then
    /// on, this snapshot owns the file, by a lock on `PATH.lock`. Each write replaces the whole file by a new one with
    /// a random name in the same directory, which only its owner can access. A symbolic link at the path is followed,
    /// and all these files are next to its target.
    ///
    /// # Errors
    /// The file can't be read or written, belongs to another gate, or isn't a snapshot. It is left unchanged.
    pub fn restore(outbound: &Outbound<S, C>, path: impl AsRef<Path>) -> Result<Self, SnapshotError> {
        let (file, document) = SnapshotFile::open(path.as_ref())?;
        let subject = Subject::new(outbound);
        if let Some(document) = &document {
            subject.restore_learnt(&document.learnt);
        }
        let all_records = document.map(|document| subject.restore_records(document)).unwrap_or_default();
        let saved = Mutex::new(SavedState { all_records, ..SavedState::default() });
        let snapshot = Self { subject: Mutex::new(Arc::new(subject)), file, saved };
        snapshot.save()?;
        Ok(snapshot)
    }

    /// Saves the state of these providers from now on, which are the [next](Outbound::next) ones. Restores the records
    /// of providers that are back, unless the store still has their state.
    pub fn follow(&self, outbound: &Outbound<S, C>) {
        let (saved, next) = (self.saved.lock(), Subject::new(outbound));
        let mut subject = self.subject.lock();
        let now = outbound.0.clock.now();
        let is_back = |record: &&SnapshotRecord| {
            let key = &record.whose;
            !subject.limit_keys.contains_key(key) && next.current_record(key, now).is_none()
        };
        let records = saved.all_records.iter().filter(is_back).cloned().collect();
        next.restore_records(SnapshotDocument::new(now, records, Vec::new()));
        *subject = Arc::new(next);
    }

    /// Writes the file if anything has changed since the last write. Returns true if it was written. Blocks until it is
    /// on the disk, so don't call it in async code.
    ///
    /// # Errors
    /// The file can't be written. The last state that was written is still there.
    pub fn save(&self) -> Result<bool, SnapshotError> {
        let mut saved = self.saved.lock();
        let subject = Arc::clone(&self.subject.lock());
        let now = subject.outbound.0.clock.now();
        let present: Vec<_> = subject.record_order.iter().filter_map(|key| subject.current_record(key, now)).collect();
        let learnt = subject.learnt();
        // Each step of a search isn't worth a write.
        let is_like_saved = learnt.len() == saved.learnt.len()
            && learnt.iter().zip(&saved.learnt).all(|(present, saved)| present.is_like(saved));
        if is_like_saved && saved.current_records.as_ref() == Some(&present) {
            return Ok(false);
        }
        let is_known = |key: &RecordKey| subject.limit_keys.contains_key(key);
        let retained = retained_records(&saved.all_records, &present, is_known, now);
        let document = SnapshotDocument::new(now, [present.as_slice(), &retained].concat(), learnt);
        self.file.write(&document)?;
        let SnapshotDocument { records, learnt, .. } = document;
        *saved = SavedState { current_records: Some(present), all_records: records, learnt };
        Ok(true)
    }
}

impl<S: Store, C: Clock + Clone> Subject<S, C> {
    fn new(outbound: &Outbound<S, C>) -> Self {
        let limits: Vec<_> = outbound.providers().iter().flat_map(persistent_limits).collect();
        Self {
            outbound: outbound.clone(),
            record_order: limits.iter().map(|(record_key, _)| record_key.clone()).collect(),
            limit_keys: limits.into_iter().collect(),
        }
    }

    /// Returns the adaptive limits that are known.
    fn learnt(&self) -> Vec<LearntLimit> {
        let learnt = self.outbound.providers().iter().filter_map(|provider| {
            let learnt = provider.0.inspect(|state, _| state.adaptive_limit.as_ref()?.learnt());
            let (in_flight, round_trip) = learnt?;
            let provider = provider.config().name.clone();
            Some(LearntLimit { provider, in_flight, round_trip: round_trip.as_micros() })
        });
        learnt.collect()
    }

    fn restore_learnt(&self, learnt: &[LearntLimit]) {
        for provider in self.outbound.providers() {
            if let Some(known) = learnt.iter().find(|known| known.provider == provider.config().name) {
                provider.0.resume_adaptive_limit((known.in_flight, Span::from_micros(known.round_trip)));
            }
        }
    }

    /// Returns the record of a limit; `None` if there is nothing to save.
    fn current_record(&self, record_key: &RecordKey, now: Time) -> Option<SnapshotRecord> {
        let (limit, key) = *self.limit_keys.get(record_key)?;
        let outcome = self.apply_op(Op::new(limit, Verb::Peek, key, 1), now)?;
        let state = match self.outbound.config().limits().get(limit)?.kind() {
            LimitKind::Quota(quota) if outcome.used > 0 => {
                let ends = outcome.reset_at;
                let began = quota.period(ends - Span::from_micros(1)).start;
                RecordState::Quota { used: outcome.used, began, ends }
            }
            LimitKind::Cooldown(cooldown) if cooldown.is_closing(outcome.retry_at, now) => {
                RecordState::Cooldown { until: outcome.retry_at }
            }
            _ => return None,
        };
        Some(SnapshotRecord { whose: record_key.clone(), state })
    }

    /// Applies the records of a document to the store, and returns them.
    fn restore_records(&self, document: SnapshotDocument) -> Vec<SnapshotRecord> {
        let SnapshotDocument { saved_at, records, .. } = document;
        let now = self.outbound.0.clock.now();
        if saved_at > now + MAX_CLOCK_STEP_BACK {
            tracing::warn!(
                behind_secs = saved_at.since(now).as_secs_ceil(),
                "the clock is behind the one that saved outbound state: quotas continue in the period that was saved"
            );
        }
        let mut earliest_records: HashMap<&RecordKey, &SnapshotRecord> = HashMap::new();
        for record in records.iter().filter(|record| self.is_effective(record, saved_at, now)) {
            let earliest = earliest_records.entry(&record.whose).or_insert(record);
            *earliest = std::cmp::min_by_key(*earliest, record, |record| record.period().0);
        }
        let mut restore_ops: Vec<(Time, Op)> = Vec::new();
        for (whose, record) in earliest_records {
            let Some(&(limit, key)) = self.limit_keys.get(whose) else { continue };
            let provider = self.outbound.config().find(&whose.provider);
            // A spent calendar quota closes until its period ends.
            let limits = self.outbound.config().limits();
            let max_pause = provider.map_or(DEFAULT_MAX_PAUSE, |provider| {
                let quota_end = provider.next_quota_end(limits, now).map_or(now, |(_, end)| end);
                provider.verdicts.longest_pause().max(quota_end.since(now))
            });
            match record.state {
                // Debited in its own period, which the clock may not have reached again.
                RecordState::Quota { used, began, .. } => {
                    restore_ops.push((began.max(now), Op::new(limit, Verb::Debit, key, used)));
                }
                RecordState::Cooldown { until } => {
                    // No more than a reply could ask for.
                    let time_left = until.since(now.max(saved_at)).min(max_pause);
                    let time_left = if until.is_never() { Span::ZERO } else { time_left };
                    let cost = time_left.as_micros().min(MAX_COST);
                    if cost > 0 || until.is_never() {
                        restore_ops.push((now, Op::new(limit, Verb::Disable, key, cost)));
                    }
                }
            }
        }
        // An operation makes the store forget state that has ended by its time. So the latest comes first.
        restore_ops.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        for (at, op) in restore_ops {
            self.apply_op(op, at);
        }
        records
    }

    /// Returns true if a record is in effect at `now`. One that has ended isn't. One that begins later is only in
    /// effect if the clock was set back to before it.
    fn is_effective(&self, record: &SnapshotRecord, saved_at: Time, now: Time) -> bool {
        let (began, ends) = record.period();
        let limit = self.limit_keys.get(&record.whose).map(|(limit, _)| *limit);
        let kind = limit.and_then(|limit| self.outbound.config().limits().get(limit)).map(Limit::kind);
        match (&record.state, kind) {
            (RecordState::Quota { .. }, Some(LimitKind::Quota(quota))) => {
                let is_next = || quota.period(now).end == began;
                ends > now && (began <= now || is_next() || saved_at > now)
            }
            (RecordState::Cooldown { .. }, Some(LimitKind::Cooldown(_))) => ends > now,
            _ => false,
        }
    }

    fn apply_op(&self, mut op: Op, now: Time) -> Option<Outcome> {
        op.must_fit = true;
        let batch = Batch::with_op(0, op);
        match self.outbound.0.local_store.apply(&batch, now) {
            StoreResponse::Ready(outcomes) => outcomes.list().first().copied(),
            // A remote store keeps its state itself.
            StoreResponse::Pending(_) => None,
        }
    }
}

/// Returns a provider's quotas and cool-downs, each with its limit and key.
fn persistent_limits<S: Store, C: Clock>(
    provider: &Provider<S, C>,
) -> impl Iterator<Item = (RecordKey, (LimitId, Key))> {
    let (outbound_config, config, rules) = (&provider.0.outbound_config, provider.config(), &provider.0.rules);
    let credential = |index: usize| config.credentials.get(index).map(ToString::to_string);
    let has_key = |limit: &&ProviderLimit| !limit.by_scope;
    let provider_limits = rules.provider_limits.iter().chain(rules.lane_limits.iter().flatten()).filter(has_key).map(
        move |provider_limit| {
            // A per-credential limit of a single credential counts all calls, but still belongs to that credential.
            let credential_name =
                if outbound_config.limit_info(provider_limit.limit).per_credential { credential(0) } else { None };
            (provider_limit.limit, rules.key, credential_name)
        },
    );
    let credential_limits = rules.credential_keys.iter().enumerate().flat_map(move |(index, key)| {
        let own = rules.credential_limits.iter().filter(has_key);
        let limits = own.map(|provider_limit| provider_limit.limit).chain([rules.cooldown]);
        limits.map(move |limit| (limit, *key, credential(index)))
    });
    provider_limits.chain(credential_limits).filter_map(move |(limit, key, credential)| {
        let kind = outbound_config.limits().get(limit)?.kind();
        let name = outbound_config.limit_info(limit).name.clone();
        let record_key = RecordKey { provider: config.name.clone(), limit: name, credential };
        matches!(kind, LimitKind::Quota(_) | LimitKind::Cooldown(_)).then_some((record_key, (limit, key)))
    })
}

impl<S: Store, C: Clock> fmt::Debug for Snapshot<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("outbound", &self.subject.lock().outbound).finish_non_exhaustive()
    }
}
