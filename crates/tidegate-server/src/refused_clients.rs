//! The clients that are blocked or were refused lately, in bounded memory.

use std::collections::HashMap;
use std::net::IpAddr;

use foldhash::fast::FixedState;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tidegate::policy::{ActionId, KeyPart, MatchedActions, Plan, Query};
use tidegate::{Decision, Reason, Time};
use tidegate_core::time::UtcText;
use tidegate_core::{Key, LimitId};

/// The number of shards, so that threads rarely wait for each other.
const SHARDS: usize = 16;
/// The maximum number of clients in a shard: 4,096 in all.
const SHARD_CAPACITY: usize = 256;
/// The number of clients of which a new one replaces the least important.
const CANDIDATES: usize = 4;
/// The maximum length of a caller's key, in characters.
const MAX_CALLER_CHARS: usize = 128;
/// The maximum number of clients in one report.
pub(crate) const MAX_REPORTED: usize = 1_000;

/// The clients that were refused, each under the limit that refused it. At the bound, a new client replaces one of a few:
/// rather one that isn't blocked, and of those the one that was refused longest ago.
#[derive(Default)]
pub(crate) struct RefusedClients {
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Default)]
struct Shard {
    clients: Vec<RefusedClient>,
    /// The position of each client.
    positions: HashMap<(LimitId, Key), usize, FixedState>,
    /// The first candidate for the next replacement.
    next_candidate: usize,
}

#[derive(Clone, Debug)]
struct RefusedClient {
    limit: LimitId,
    key: Key,
    action: Option<ActionId>,
    ip: Option<IpAddr>,
    /// The caller's key of the decision API.
    caller: Option<Box<str>>,
    refusals: u64,
    strikes: u8,
    is_blocked: bool,
    is_shadow: bool,
    /// The time from which it may call again. `None` if no wait helps.
    until: Option<Time>,
    first_at: Time,
    last_at: Time,
}

impl RefusedClients {
    /// Notes a refusal, or one that shadow mode admitted.
    pub(crate) fn record(&self, plan: &Plan, actions: MatchedActions, query: &Query<'_>, decision: &Decision) {
        self.update(plan, actions, query, decision, |client| client.refusals += 1);
    }

    /// Notes a block that an operator has imposed.
    pub(crate) fn record_block(&self, plan: &Plan, actions: MatchedActions, query: &Query<'_>, decision: &Decision) {
        self.update(plan, actions, query, decision, |_| {});
    }

    fn update(
        &self,
        plan: &Plan,
        actions: MatchedActions,
        query: &Query<'_>,
        decision: &Decision,
        count: impl FnOnce(&mut RefusedClient),
    ) {
        let Some(limit) = decision.bound_by else { return };
        let mut shard = self.shards[decision.key.lo() as usize % SHARDS].lock();
        let position = match shard.positions.get(&(limit, decision.key)) {
            Some(position) => *position,
            None => shard.insert(RefusedClient::new(plan, limit, actions, query, decision)),
        };
        shard.clients[position].update(decision);
        count(&mut shard.clients[position]);
    }

    /// Notes that the state of these keys was reset.
    pub(crate) fn forget(&self, keys: &[(LimitId, Key)]) {
        for (limit, key) in keys {
            let shard = &mut *self.shards[key.lo() as usize % SHARDS].lock();
            if let Some(position) = shard.positions.get(&(*limit, *key)) {
                let client = &mut shard.clients[*position];
                (client.is_blocked, client.until, client.strikes) = (false, None, 0);
            }
        }
    }

    /// The clients as JSON: those that are blocked now first, then those that were refused most. Only those of this
    /// action, if one is given.
    pub(crate) fn json(&self, plan: &Plan, action: Option<ActionId>, now: Time) -> Value {
        let all = self.shards.iter().flat_map(|shard| shard.lock().clients.clone());
        let mut clients: Vec<RefusedClient> =
            all.filter(|client| action.is_none_or(|action| client.action == Some(action))).collect();
        clients.sort_unstable_by_key(|client| std::cmp::Reverse((client.is_blocked_at(now), client.refusals)));
        let blocked = clients.iter().filter(|client| client.is_blocked_at(now)).count();
        let shown = clients.iter().take(MAX_REPORTED).map(|client| client.json(plan, now));
        json!({ "clients": shown.collect::<Vec<_>>(), "blocked": blocked, "known": clients.len() })
    }
}

impl Shard {
    /// Inserts a client, and returns its position.
    fn insert(&mut self, client: RefusedClient) -> usize {
        let (identity, now) = ((client.limit, client.key), client.last_at);
        let position = if self.clients.len() < SHARD_CAPACITY {
            self.clients.push(client);
            self.clients.len() - 1
        } else {
            // Far apart, because clients that were blocked together are neighbours.
            let distance = SHARD_CAPACITY / CANDIDATES;
            let candidates = (0..CANDIDATES).map(|number| self.next_candidate + number * distance);
            let least = candidates.min_by_key(|at| (self.clients[*at].is_blocked_at(now), self.clients[*at].last_at));
            let least = least.unwrap_or(self.next_candidate);
            self.next_candidate = (self.next_candidate + 1) % distance;
            let replaced = std::mem::replace(&mut self.clients[least], client);
            self.positions.remove(&(replaced.limit, replaced.key));
            least
        };
        self.positions.insert(identity, position);
        position
    }
}

impl RefusedClient {
    fn new(plan: &Plan, limit: LimitId, actions: MatchedActions, query: &Query<'_>, decision: &Decision) -> Self {
        let parts = plan.key_parts(limit);
        let has_ip = parts.iter().any(|part| matches!(part, KeyPart::ClientIp | KeyPart::Ipv6Network(_)));
        let caller = query.key.filter(|_| parts.contains(&KeyPart::Key));
        Self {
            limit,
            key: decision.key,
            action: plan.limit_info(limit).action().or(actions.first()),
            ip: query.ip.filter(|_| has_ip),
            caller: caller.map(|caller| caller.chars().take(MAX_CALLER_CHARS).collect()),
            refusals: 0,
            strikes: 0,
            is_blocked: false,
            is_shadow: false,
            until: None,
            first_at: decision.now,
            last_at: decision.now,
        }
    }

    fn update(&mut self, decision: &Decision) {
        self.strikes = decision.strikes;
        // Another limit of the call may block it, and then has the shorter wait.
        self.is_blocked = decision.reason == Reason::Penalty;
        self.is_shadow = decision.shadow;
        self.until = decision.retry_after.map(|wait| decision.now + wait);
        self.last_at = decision.now;
    }

    fn is_blocked_at(&self, now: Time) -> bool {
        self.is_blocked && !self.is_shadow && self.until.is_none_or(|until| until > now)
    }

    fn json(&self, plan: &Plan, now: Time) -> Value {
        let mut client = Map::new();
        for part in plan.key_parts(self.limit) {
            let value = match part {
                KeyPart::ClientIp | KeyPart::Ipv6Network(_) => self.ip.map(|ip| ip.to_string()),
                KeyPart::Key => self.caller.as_deref().map(str::to_owned),
                // These may be secrets, so that only the hash of the whole key is shown.
                _ => None,
            };
            let hash = || format!("#{:08x}", self.key.lo() >> 32);
            client.insert(part.to_string(), value.unwrap_or_else(hash).into());
        }
        let time = |at: Time| UtcText::from(at).to_string();
        json!({
            "action": self.action.map(|action| plan.action(action).name()),
            "limit": plan.limit_info(self.limit).name(),
            "client": client,
            "blocked": self.is_blocked_at(now),
            "shadow": self.is_shadow,
            "strikes": self.strikes,
            "retry_after": self.until.map(|until| until.since(now).as_secs_ceil()),
            "until": self.until.map(time),
            "refusals": self.refusals,
            "first": time(self.first_at),
            "last": time(self.last_at),
        })
    }
}

#[cfg(test)]
mod tests {
    use tidegate::Span;
    use tidegate::policy::{Policy, PolicySources};

    use super::*;

    const LIMIT: &str = "[inbound.action.a]\nlimit = \"5/s\"\n";

    fn refusal(client: u64, at: u64, blocked: bool) -> Decision {
        Decision {
            bound_by: Some(LimitId::FIRST),
            key: Key::new(0, client),
            reason: if blocked { Reason::Penalty } else { Reason::Limit },
            strikes: if blocked { 1 } else { 0 },
            retry_after: Some(Span::from_secs(1000)),
            ..Decision::without_limit(false, Reason::Limit, Time::from_secs(at))
        }
    }

    fn recorded(refusals: impl IntoIterator<Item = Decision>) -> Value {
        let policy = Policy::load(PolicySources::new().file("test.toml", LIMIT)).expect("a policy");
        let clients = RefusedClients::default();
        for decision in refusals {
            clients.record(policy.plan(), MatchedActions::NONE, &Query::default(), &decision);
        }
        clients.json(policy.plan(), None, Time::from_secs(100))
    }

    #[test]
    fn blocked_clients_come_first_then_the_most_refused() {
        let report =
            recorded([(1, false), (2, false), (3, true), (2, false)].map(|(key, blocked)| refusal(key, 10, blocked)));
        let refusals: Vec<_> = report["clients"].as_array().expect("a list").iter().map(|it| &it["refusals"]).collect();
        assert_eq!(refusals, [1, 2, 1]);
        assert_eq!((&report["blocked"], &report["known"]), (&json!(1), &json!(3)));
        assert_eq!(report["clients"][0]["strikes"], 1);
    }

    #[test]
    fn a_flood_replaces_clients_that_are_not_blocked() {
        let blocked = (0..256).map(|client| refusal(client, 10, true));
        let flood = (1000..101_000).map(|client| refusal(client, 20, false));
        let report = recorded(blocked.chain(flood));
        assert_eq!((&report["blocked"], &report["known"]), (&json!(256), &json!(SHARDS * SHARD_CAPACITY)));
        assert_eq!(report["clients"].as_array().map(Vec::len), Some(MAX_REPORTED));
    }
}
