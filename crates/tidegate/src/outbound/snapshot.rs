//! State of outbound calls that outlives the process: spent quotas and cool-downs, in a plain file.
//!
//! A quota lasts for days and a cool-down for as long as the provider says, so that a process which had forgotten them
//! would call in vain until then, or be banned. Windows and rates start anew: their moments are too many and too soon
//! over to be written every second, and what a provider still counts of them costs one throttled reply, which closes
//! the gate.

mod file;
mod record;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

pub use file::SnapshotError;
use file::{Document, Place};
use record::{Record, Remembered, Whose, besides};
use tidegate_core::{Batch, Key, LimitId, LimitKind, MAX_COST, Op, Outcome, Span, Time, Verb};
use tidegate_store::{Answer, Memory, Store};

use super::{Outbound, Provider};
use crate::{Clock, SystemClock};

/// How far the present may lie before the moment of the last save before it is told that the clock was set back.
const TOLD_BEYOND: Span = Span::from_secs(1);

/// A file that spent quotas and cool-downs of an [`Outbound`] are kept in, by the names of provider, limit and
/// credential.
///
/// [`Snapshot::save`] writes it if something has changed; called once a second, a process that is killed loses what its
/// last second spent. The file holds no secret: of a credential it says where it comes from, such as `env:API_TOKEN`. A
/// new token in the same place goes on where the old one was.
///
/// # Clocks that are set
/// What is over when the process starts isn't taken up again. A clock that was set back finds the period that it had
/// reached before, and goes on in it; one that ran ahead and was set right again finds what it had used before that.
/// Neither is granted twice. A cool-down that was saved by a clock ahead of the present lasts as long as it had left.
pub struct Snapshot<S: Store = Memory, C: Clock = SystemClock> {
    outbound: Outbound<S, C>,
    known: HashMap<Whose, (LimitId, Key)>,
    /// In the order of the policy, so that what doesn't change is written alike.
    order: Vec<Whose>,
    place: Place,
    written: Mutex<Written>,
}

/// What the file says.
struct Written {
    /// What counted when it was written last; `None` before the first time.
    present: Option<Vec<Record>>,
    /// All of it.
    whole: Vec<Record>,
}

impl<S: Store, C: Clock + Clone> Snapshot<S, C> {
    /// Reads the file, if it is there, into `outbound`, which mustn't have made calls yet, and writes it anew. From here
    /// on it belongs to this snapshot alone: `PATH.lock` beside it says so. It is replaced whole, by a file of a random name
    /// beside it, which is its owner's alone. A symbolic link at the path is followed, and all of this is beside its target.
    ///
    /// # Errors
    /// The file can't be read or written, belongs to another gate, or isn't a snapshot; it is left as it is.
    pub fn restore(outbound: &Outbound<S, C>, path: impl AsRef<Path>) -> Result<Self, SnapshotError> {
        let (place, document) = Place::open(path.as_ref())?;
        let limits: Vec<_> = outbound.providers().iter().flat_map(kept_of).collect();
        let order = limits.iter().map(|(whose, _)| whose.clone()).collect();
        let written = Mutex::new(Written { present: None, whole: Vec::new() });
        let snapshot = Self { outbound: outbound.clone(), known: limits.into_iter().collect(), order, place, written };
        if let Some(document) = document {
            snapshot.take_up(document);
        }
        snapshot.save()?;
        Ok(snapshot)
    }

    /// Writes the file if anything has changed since it was written; whether it was. Returns when it is on the disk: not
    /// to be called where others wait.
    ///
    /// # Errors
    /// It can't be written. The last state that could is still there.
    pub fn save(&self) -> Result<bool, SnapshotError> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.outbound.0.clock.now();
        let present: Vec<_> = self.order.iter().filter_map(|whose| self.look(whose, now)).collect();
        if written.present.as_ref() == Some(&present) {
            return Ok(false);
        }
        let mut whole = present.clone();
        whole.extend(besides(&written.whole, &present, |whose| self.known.contains_key(whose), now));
        let document = Document::new(now, whole);
        self.place.write(&document)?;
        *written = Written { present: Some(present), whole: document.records };
        Ok(true)
    }

    /// What is to be kept of a limit.
    fn look(&self, whose: &Whose, now: Time) -> Option<Record> {
        let (limit, key) = *self.known.get(whose)?;
        let outcome = self.ask(Op::new(limit, Verb::Peek, key, 1), now)?;
        let state = match self.outbound.plan().limits().get(limit)?.kind() {
            LimitKind::Quota(quota) if outcome.used > 0 => {
                let ends = outcome.reset_at;
                let began = quota.period(ends - Span::from_micros(1)).start;
                Remembered::Quota { used: outcome.used, began, ends }
            }
            LimitKind::Cooldown(cooldown) if cooldown.is_closing(outcome.retry_at, now) => {
                Remembered::Cooldown { until: outcome.retry_at }
            }
            _ => return None,
        };
        Some(Record { whose: whose.clone(), state })
    }

    /// Gives the store what a document says.
    fn take_up(&self, document: Document) {
        let Document { saved_at, records, .. } = document;
        let now = self.outbound.0.clock.now();
        if saved_at > now + TOLD_BEYOND {
            tracing::warn!(
                behind_secs = saved_at.since(now).as_secs_ceil(),
                "the clock is behind the one that saved outbound state: quotas go on in the period that it had reached"
            );
        }
        let mut nearest: HashMap<&Whose, &Record> = HashMap::new();
        for record in records.iter().filter(|record| self.counts(record, saved_at, now)) {
            let (began, _) = record.period();
            let chosen = nearest.entry(&record.whose).or_insert(record);
            if began < chosen.period().0 {
                *chosen = record;
            }
        }
        let mut debts: Vec<(Time, Op)> = Vec::new();
        for (whose, record) in nearest {
            let Some(&(limit, key)) = self.known.get(whose) else { continue };
            match record.state {
                // In the period that it was used in, which the clock may have yet to reach again.
                Remembered::Quota { used, began, .. } => {
                    debts.push((began.max(now), Op::new(limit, Verb::Debit, key, used)));
                }
                Remembered::Cooldown { until } => {
                    let left = if until.is_never() { Span::ZERO } else { until.since(now.max(saved_at)) };
                    let cost = left.as_micros().min(MAX_COST);
                    if cost > 0 || until.is_never() {
                        debts.push((now, Op::new(limit, Verb::Disable, key, cost)));
                    }
                }
            }
        }
        // A store forgets what is over at the moment that it is told: so the last comes first.
        debts.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        for (at, op) in debts {
            self.ask(op, at);
        }
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.whole = records;
    }

    /// Whether a record has a say at `now`: what is over hasn't, and what is to come only where the clock was set back
    /// to before it.
    fn counts(&self, record: &Record, saved_at: Time, now: Time) -> bool {
        let (began, ends) = record.period();
        let limit = self.known.get(&record.whose).and_then(|(limit, _)| self.outbound.plan().limits().get(*limit));
        match (&record.state, limit.map(tidegate_core::Limit::kind)) {
            (Remembered::Quota { .. }, Some(LimitKind::Quota(quota))) => {
                let is_next = || quota.period(now).end == began;
                ends > now && (began <= now || is_next() || saved_at > now)
            }
            (Remembered::Cooldown { .. }, Some(LimitKind::Cooldown(_))) => ends > now,
            _ => false,
        }
    }

    fn ask(&self, mut op: Op, now: Time) -> Option<Outcome> {
        op.must_fit = true;
        let batch = Batch::with_op(0, op);
        match self.outbound.0.store.apply(&batch, now) {
            Answer::Ready(outcomes) => outcomes.list().first().copied(),
            // What is kept elsewhere outlives this process there.
            Answer::Later(_) => None,
        }
    }
}

/// A provider's quotas and cool-downs, each with what it counts by.
fn kept_of<S: Store, C: Clock>(provider: &Provider<S, C>) -> impl Iterator<Item = (Whose, (LimitId, Key))> {
    let (whole, plan, rules) = (&provider.0.whole, provider.plan(), &provider.0.rules);
    let credential = |index: usize| plan.credentials.get(index).map(ToString::to_string);
    let of_all = rules.ceilings.iter().chain(rules.lane_ceilings.iter().flatten()).map(move |ceiling| {
        // A limit of a credential that is alone is counted for all calls, and is still that credential's.
        let whose = if whole.limit_info(ceiling.limit).per_credential { credential(0) } else { None };
        (ceiling.limit, rules.key, whose)
    });
    let of_credentials = rules.credential_keys.iter().enumerate().flat_map(move |(index, key)| {
        let limits = rules.credential_ceilings.iter().map(|ceiling| ceiling.limit).chain([rules.cooldown]);
        limits.map(move |limit| (limit, *key, credential(index)))
    });
    of_all.chain(of_credentials).filter_map(move |(limit, key, credential)| {
        let kind = whole.limits().get(limit)?.kind();
        let name = whole.limit_info(limit).name.clone();
        let whose = Whose { provider: plan.name.clone(), limit: name, credential };
        matches!(kind, LimitKind::Quota(_) | LimitKind::Cooldown(_)).then_some((whose, (limit, key)))
    })
}

impl<S: Store, C: Clock> fmt::Debug for Snapshot<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("outbound", &self.outbound).finish_non_exhaustive()
    }
}
