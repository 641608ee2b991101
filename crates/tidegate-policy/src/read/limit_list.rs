//! The limits of a plan in the order of their ids.

use std::collections::HashMap;

use tidegate_core::{Limit, LimitId, Limits};

/// Limits, each with its information. A policy that follows another one begins with the limits of that one: a limit of
/// the same name takes its place, so that it keeps its id, and the others stay as retired ones.
pub(super) struct LimitList<I> {
    limits: Vec<Limit>,
    infos: Vec<I>,
    /// The limits of the earlier policy that have no successor yet, by name.
    retired: HashMap<String, LimitId>,
}

impl<I> Default for LimitList<I> {
    fn default() -> Self {
        Self { limits: Vec::new(), infos: Vec::new(), retired: HashMap::new() }
    }
}

impl<I> LimitList<I> {
    /// Returns a list that follows these limits, whose names and information are given in the order of their ids.
    pub(super) fn following(limits: &Limits, infos: impl IntoIterator<Item = (String, I)>) -> Self {
        let (names, infos): (Vec<String>, Vec<I>) = infos.into_iter().unzip();
        let retired = names.into_iter().zip(limits.iter().map(|(id, _)| id)).collect();
        Self { limits: limits.iter().map(|(_, limit)| limit.clone()).collect(), infos, retired }
    }

    /// Adds a limit, and returns its id. `None` if there are too many.
    pub(super) fn add(&mut self, name: &str, limit: Limit, info: I) -> Option<LimitId> {
        if let Some(id) = self.retired.remove(name) {
            self.limits[id.index()] = limit;
            self.infos[id.index()] = info;
            return Some(id);
        }
        let id = LimitId::from_index(self.limits.len())?;
        self.limits.push(limit);
        self.infos.push(info);
        Some(id)
    }

    pub(super) fn limit(&self, id: LimitId) -> &Limit {
        &self.limits[id.index()]
    }

    pub(super) fn info(&self, id: LimitId) -> &I {
        &self.infos[id.index()]
    }

    /// The limits, their information, and the ids of the retired ones in order.
    pub(super) fn into_parts(self) -> (Vec<Limit>, Vec<I>, Vec<LimitId>) {
        let mut retired: Vec<LimitId> = self.retired.into_values().collect();
        retired.sort_unstable();
        (self.limits, self.infos, retired)
    }
}
