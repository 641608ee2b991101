//! The actions that apply to one call.

use std::fmt;

use http::header::{COOKIE, HeaderName, HeaderValue};
use tidegate_core::batch::BatchContext;
use tidegate_core::{Batch, MAX_OPS, Op, Time, Verb};

use crate::key::{KeyError, KeyOptions, KeyPart, KeySeed, UncountableError};
use crate::path::NormalisedPath;
use crate::plan::{ActionId, Plan};
use crate::query::Query;
use crate::readings::{self, WorkBudget};

/// The most actions that apply to one call.
pub const MAX_ACTIONS: usize = MAX_OPS;

const NO_ACTION: u16 = u16::MAX;
/// In the second place, with no action in the first: the path can't be decided about.
const AMBIGUOUS_PATH: u16 = u16::MAX - 1;
const TOO_MANY_READINGS: u16 = u16::MAX - 2;

/// The actions that apply to a call: none, one, or several if its path has several readings. All of them are
/// charged, or none. An [`ActionId`] and an `Option` of one convert into it, and so does the error of a path that can't be
/// decided about: such a call has no action, and no batch of operations.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatchedActions([u16; MAX_ACTIONS]);

/// A path whose actions can't be determined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// Its readings match different actions, and `inbound.ambiguous_paths` is `refuse`.
    #[error(
        "servers may read the path in ways that match different actions, which the policy refuses; send its plain form"
    )]
    Ambiguous,
    /// It has more readings, or they match more actions or keys, than one decision holds.
    #[error("servers may read the path in more ways than one decision can be about; send its plain form")]
    TooMany,
}

impl MatchedActions {
    /// No action: only `inbound.global` applies to the call.
    pub const NONE: Self = Self([NO_ACTION; MAX_ACTIONS]);

    /// The action of the path's normal form, if there is one, otherwise the first that another reading matches.
    #[inline]
    pub fn first(self) -> Option<ActionId> {
        (self.0[0] != NO_ACTION).then_some(ActionId(self.0[0]))
    }

    /// All of them, beginning with [`first`](Self::first).
    pub fn iter(self) -> impl Iterator<Item = ActionId> {
        self.0.into_iter().filter(|action| *action < TOO_MANY_READINGS).map(ActionId)
    }

    /// The error of a path that can't be decided about.
    #[inline]
    pub fn path_error(self) -> Option<PathError> {
        match self.0[1] {
            AMBIGUOUS_PATH => Some(PathError::Ambiguous),
            TOO_MANY_READINGS => Some(PathError::TooMany),
            _ => None,
        }
    }

    /// True if there is more than one.
    #[inline]
    pub fn has_multiple(self) -> bool {
        self.0[1] != NO_ACTION
    }

    /// True if this action is one of them.
    pub fn contains(self, action: ActionId) -> bool {
        self.0.contains(&action.0)
    }

    /// Adds an action, unless it is there already.
    ///
    /// # Errors
    /// There are [`MAX_ACTIONS`] others.
    pub fn insert(&mut self, action: ActionId) -> Result<(), PathError> {
        if !self.contains(action) {
            *self.0.iter_mut().find(|place| **place == NO_ACTION).ok_or(PathError::TooMany)? = action.0;
        }
        Ok(())
    }
}

impl From<ActionId> for MatchedActions {
    #[inline]
    fn from(action: ActionId) -> Self {
        let mut places = [NO_ACTION; MAX_ACTIONS];
        places[0] = action.0;
        Self(places)
    }
}

impl From<Option<ActionId>> for MatchedActions {
    #[inline]
    fn from(action: Option<ActionId>) -> Self {
        action.map_or(Self::NONE, Self::from)
    }
}

impl From<PathError> for MatchedActions {
    fn from(error: PathError) -> Self {
        let mut places = [NO_ACTION; MAX_ACTIONS];
        places[1] = match error {
            PathError::Ambiguous => AMBIGUOUS_PATH,
            PathError::TooMany => TOO_MANY_READINGS,
        };
        Self(places)
    }
}

impl fmt::Debug for MatchedActions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// The bytes of a call whose keys take longer to read than a look-up of its block.
const LONG_KEYS: usize = 1 << 10;
/// The most bytes of a call that are read for its keys: half of a head at its cap would take half a millisecond.
pub(crate) const MAX_KEY_BYTES: usize = 16 << 10;

impl Plan {
    /// The names of these actions on one line, such as `login+static`; `None` if there is no action.
    pub fn action_names(&self, actions: MatchedActions) -> Option<String> {
        let names: Vec<&str> = actions.iter().map(|id| self.action(id).name()).collect();
        (!names.is_empty()).then(|| names.join("+"))
    }

    /// True if a limit counts by path, and this path isn't in its plain form: then [`fill`](Self::fill) reads it in every way.
    #[inline]
    pub fn needs_path_readings(&self, query: &Query<'_>) -> bool {
        self.counts_by_path && query.path.is_some_and(|path| !NormalisedPath::is_plain(path, self.path_quirks))
    }

    /// True if reading the keys of a call may take longer than asking for a block of its address.
    #[inline]
    pub fn has_long_keys(&self, action: Option<ActionId>, query: &Query<'_>) -> bool {
        self.needs_path_readings(query)
            || self.op_template(action).reads_texts && self.key_bytes(action, query) > LONG_KEYS
    }

    /// Checks that the texts of a call's keys aren't too long to read.
    #[inline]
    pub(crate) fn check_key_bytes(&self, action: Option<ActionId>, query: &Query<'_>) -> Result<(), UncountableError> {
        let are_long = self.op_template(action).reads_texts && self.key_bytes(action, query) > MAX_KEY_BYTES;
        if are_long { Err(UncountableError::TooLong) } else { Ok(()) }
    }

    /// Adds the operations under those limits of a call that count by its address alone.
    #[cold]
    pub fn fill_address_ops(
        &self,
        batch: &mut Batch,
        action: Option<ActionId>,
        query: &Query<'_>,
        seed: &KeySeed,
        verb: Verb,
    ) {
        for step in &self.op_template(action).steps {
            if let [KeyPart::ClientIp | KeyPart::Ipv6Network(_)] = self.key_parts(step.limit)
                && let Some(key) = self.key_template(step.limit).key(query, self.key_options(None), seed)
            {
                // There are no more steps than places.
                let _ = batch.push(Op::new(step.limit, verb, key, 1));
            }
        }
    }

    /// Adds the operations of several actions, or under several paths: each once, and the global ones at the largest
    /// cost.
    #[cold]
    pub(crate) fn fill_actions(
        &self,
        batch: &mut Batch,
        actions: MatchedActions,
        query: &Query<'_>,
        seed: &KeySeed,
        verb: Verb,
    ) -> Result<(), KeyError> {
        if let Some(error) = actions.path_error() {
            return Err(error.into());
        }
        let path = query.path.filter(|_| self.needs_path_readings(query));
        let mut path_keys = None;
        let mut budget = WorkBudget::KEYS;
        let unnamed = actions.first().is_none().then_some(None);
        for action in unnamed.into_iter().chain(actions.iter().map(Some)) {
            let mut steps = self.op_template(action).steps.iter();
            let path = path.filter(|_| steps.any(|step| self.key_parts(step.limit).contains(&KeyPart::Path)));
            let mut add = |path: Option<&[u8]>| {
                budget.spend(self.key_bytes(action, query))?;
                self.add_action_ops(batch, action, query, self.key_options(path), seed, verb)
            };
            let Some(path) = path else {
                add(None)?;
                continue;
            };
            let keys = match &path_keys {
                Some(keys) => keys,
                None => path_keys.insert(readings::path_keys(path, self.path_quirks)?),
            };
            keys.iter().try_for_each(|key| add(Some(key)))?;
        }
        Ok(())
    }

    /// The bytes of a call that clients choose, and from which the keys of this action are made.
    fn key_bytes(&self, action: Option<ActionId>, query: &Query<'_>) -> usize {
        let path = query.path.map_or(0, str::len);
        let header = |name: &HeaderName| -> usize {
            query.headers.map_or(0, |headers| headers.get_all(name).iter().map(HeaderValue::len).sum())
        };
        let part = |part: &KeyPart| match part {
            KeyPart::Header(name) => header(name),
            KeyPart::Cookie(_) => header(&COOKIE),
            KeyPart::QueryParameter(_) | KeyPart::Path => path,
            _ => 0,
        };
        self.op_template(action).steps.iter().flat_map(|step| self.key_parts(step.limit)).map(part).sum()
    }

    /// Adds the operations of one action that aren't there yet.
    fn add_action_ops(
        &self,
        batch: &mut Batch,
        action: Option<ActionId>,
        query: &Query<'_>,
        rules: KeyOptions<'_>,
        seed: &KeySeed,
        verb: Verb,
    ) -> Result<(), KeyError> {
        let mut own = Batch::new(batch.holder());
        self.fill_action(&mut own, action, query, rules, seed, verb)?;
        let BatchContext { affinity, caller, .. } = own.context();
        if batch.context().caller == 0 {
            batch.set_caller(caller, Time::ZERO);
        }
        if batch.ops().is_empty() {
            batch.set_affinity(affinity);
        }
        let is_apart = affinity != batch.context().affinity;
        for &op in own.ops() {
            match batch.ops_mut().iter_mut().find(|known| known.limit == op.limit && known.key == op.key) {
                Some(known) => known.cost = known.cost.max(op.cost),
                // Their affinities differ, so a cluster keeps them on different servers.
                None if is_apart => self.is_shadow(op.limit).then_some(()).ok_or(PathError::TooMany)?,
                None => batch.push(op).or_else(|_| self.replace_shadow_op(batch, op).ok_or(PathError::TooMany))?,
            }
        }
        Ok(())
    }

    /// Makes room in a full batch by replacing a shadow operation. Shadow limits only observe, and may miss an
    /// operation. `None` if there is no room.
    #[cold]
    pub(crate) fn replace_shadow_op(&self, batch: &mut Batch, op: Op) -> Option<()> {
        if !self.is_shadow(op.limit) {
            *batch.ops_mut().iter_mut().find(|known| self.is_shadow(known.limit))? = op;
        }
        Some(())
    }
}
