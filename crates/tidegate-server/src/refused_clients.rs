//! The clients that are blocked or were refused lately, in bounded memory.

use std::collections::{HashMap, HashSet};

use foldhash::fast::FixedState;
use futures_util::{StreamExt as _, stream};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Map, Value};
use tidegate::policy::{ActionId, KeyPart, Plan, Query};
use tidegate::store::Store;
use tidegate::{Decision, Gate, Reason, Time};
use tidegate_core::time::UtcText;
use tidegate_core::{Batch, Clock, Key, Limit, LimitId, Op, Outcomes, Verb};

/// The number of shards, so that threads rarely wait for each other.
const SHARDS: usize = 16;
/// The maximum number of clients in a shard: 4,096 in all.
const SHARD_CAPACITY: usize = 256;
/// The number of clients of which a new one replaces the least important.
const CANDIDATES: usize = 4;
/// The maximum length of a part of a key, in characters.
const MAX_PART_CHARS: usize = 128;
/// The maximum number of clients in one report.
pub(crate) const MAX_REPORTED: usize = 1_000;
/// The number of batches about which the store is asked at once for a report.
const MAX_INSPECTIONS: usize = 16;

/// The clients that were refused, each under the limit that refused it. At the bound, the least important of a new client
/// and a few others is left out: rather one that isn't blocked, then the one whose block ends first, then the one that was
/// refused longest ago.
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
    /// The number of clients that were left out.
    displaced: u64,
}

#[derive(Clone, Debug)]
struct RefusedClient {
    limit: LimitId,
    key: Key,
    /// The affinity of the key, by which the store finds it.
    affinity: u64,
    /// The values of the key's parts. `None` for those that may be secrets.
    parts: Box<[Option<Box<str>>]>,
    refusals: u64,
    /// The refusals that shadow mode admitted.
    shadow_refusals: u64,
    strikes: u8,
    is_blocked: bool,
    is_shadow: bool,
    /// The time from which it may call again. `None` if no wait helps.
    until: Option<Time>,
    first_at: Time,
    last_at: Time,
}

/// The clients that were refused, as a report.
#[derive(Debug, Serialize)]
pub(crate) struct ClientsReport {
    pub(crate) clients: Vec<ClientReport>,
    /// The number of clients that are blocked now.
    pub(crate) blocked: usize,
    /// The number of all kept clients.
    pub(crate) known: usize,
    /// The number of those that only limits in shadow would have refused.
    pub(crate) only_shadow: usize,
    /// The number of clients that were left out.
    pub(crate) displaced: u64,
    /// True if the store couldn't be asked, and blocks are those that this node knows.
    pub(crate) local: bool,
}

/// A client that was refused. Times are in seconds, rounded up, or UTC.
#[derive(Debug, Serialize)]
pub(crate) struct ClientReport {
    /// The action of the limit; `None` for the global limit.
    pub(crate) action: Option<String>,
    pub(crate) limit: String,
    /// The parts of its key, as far as they may be shown.
    pub(crate) client: Map<String, Value>,
    pub(crate) blocked: bool,
    pub(crate) shadow: bool,
    pub(crate) strikes: u8,
    pub(crate) retry_after: Option<u64>,
    pub(crate) until: Option<String>,
    pub(crate) refusals: u64,
    /// The refusals that shadow mode admitted.
    pub(crate) shadow_refusals: u64,
    pub(crate) first: String,
    pub(crate) last: String,
    /// The body of the request that resets it. `None` if its key isn't known.
    pub(crate) reset: Option<Map<String, Value>>,
}

/// The parts of a client's key under a limit. A hash of the whole key stands for values that may be secrets.
pub(crate) fn shown_client(plan: &Plan, limit: LimitId, key: Key, query: &Query<'_>) -> Map<String, Value> {
    client_json(plan, limit, key, &shown_parts(plan, limit, key, query))
}

fn client_json(plan: &Plan, limit: LimitId, key: Key, parts: &[Option<Box<str>>]) -> Map<String, Value> {
    let names = plan.key_parts(limit).iter().map(ToString::to_string);
    let shown = |value: &Option<Box<str>>| value.as_deref().map_or_else(|| key_hash(key), str::to_owned);
    names.zip(parts).map(|(name, value)| (name, shown(value).into())).collect()
}

/// A short hash that stands for a key.
fn key_hash(key: Key) -> String {
    format!("#{:08x}", key.lo() >> 32)
}

fn shown_parts(plan: &Plan, limit: LimitId, key: Key, query: &Query<'_>) -> Box<[Option<Box<str>>]> {
    let shown = |part: &KeyPart| -> Option<Box<str>> {
        let text = match part {
            KeyPart::ClientIp | KeyPart::Ipv6Network(_) => return query.ip.map(|ip| plan.client_name(part, ip).into()),
            KeyPart::Key => query.key,
            KeyPart::Platform => query.platform,
            KeyPart::Method => query.method,
            KeyPart::Host => query.host,
            KeyPart::ClientCertificate => query.client_certificate,
            KeyPart::Path => query.path.map(|path| path.split('?').next().unwrap_or(path)),
            KeyPart::Action => Some("all calls"),
            KeyPart::Header(_) | KeyPart::Cookie(_) | KeyPart::QueryParameter(_) => None,
        };
        // The hash tells long values apart that begin alike.
        text.map(|text| match text.char_indices().nth(MAX_PART_CHARS) {
            Some((end, _)) => format!("{}…{}", &text[..end], key_hash(key)).into(),
            None => text.into(),
        })
    };
    plan.key_parts(limit).iter().map(shown).collect()
}

impl RefusedClients {
    /// Notes a refusal, or one that shadow mode admitted. Returns true if the client is known to be blocked in shadow, and
    /// this is the first refusal since the block is enforced.
    pub(crate) fn record(&self, plan: &Plan, query: &Query<'_>, decision: &Decision) -> bool {
        self.update(plan, query, decision, 1)
    }

    /// Notes a block that an operator has imposed.
    pub(crate) fn record_block(&self, plan: &Plan, query: &Query<'_>, decision: &Decision) {
        self.update(plan, query, decision, 0);
    }

    fn update(&self, plan: &Plan, query: &Query<'_>, decision: &Decision, refusals: u64) -> bool {
        let Some(limit) = decision.bound_by else { return false };
        let mut shard = self.shards[decision.key.lo() as usize % SHARDS].lock();
        match shard.positions.get(&(limit, decision.key)).copied() {
            Some(position) => shard.clients[position].update(decision, refusals),
            None => {
                let mut client = RefusedClient::new(plan, limit, query, decision);
                client.update(decision, refusals);
                shard.insert(client);
                false
            }
        }
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

    /// Leaves out the clients of limits whose keys or penalties differ in the next plan: what is known of them isn't true
    /// any more.
    pub(crate) fn follow(&self, present: &Plan, next: &Plan) {
        let penalty = |plan: &Plan, limit| plan.limits().get(limit).and_then(|limit| limit.penalty().copied());
        let is_same = |limit: LimitId| {
            present.key_parts(limit) == next.key_parts(limit) && penalty(present, limit) == penalty(next, limit)
        };
        let changed: HashSet<LimitId> = present.limits().iter().map(|(id, _)| id).filter(|id| !is_same(*id)).collect();
        if !changed.is_empty() {
            self.shards.iter().for_each(|shard| shard.lock().retain(|client| !changed.contains(&client.limit)));
        }
    }

    /// At most `most` clients: those that are blocked now first, then those that were refused most. Only those of this
    /// action, if one is given. The store's word is taken for which of them are still blocked: another node that shares
    /// it may have reset some.
    pub(crate) async fn report<S: Store, C: Clock>(
        &self,
        gate: &Gate<S, C>,
        action: Option<ActionId>,
        most: usize,
    ) -> ClientsReport {
        let now = gate.clock().now();
        let (listed, _) = self.list(gate.plan(), action, now);
        let blocked = listed.iter().take(most).filter(|client| client.is_blocked_at(now));
        let is_asked = self.ask_store(gate, batches_of(blocked)).await;
        self.local_report(gate.plan(), action, most, !is_asked, gate.clock().now())
    }

    /// Updates the clients of these peeks by what the store knows. Returns false if it couldn't be asked about all.
    async fn ask_store<S: Store, C: Clock>(&self, gate: &Gate<S, C>, peeks: Vec<Batch>) -> bool {
        let now = gate.clock().now();
        let asking = peeks.into_iter().map(|peek| async move {
            let answer = gate.store().inspect(&peek, now).await;
            (peek, answer)
        });
        let mut answers = stream::iter(asking).buffer_unordered(MAX_INSPECTIONS);
        let mut is_complete = true;
        while let Some((peek, answer)) = answers.next().await {
            match answer {
                Ok(outcomes) => self.take_over(&peek, &outcomes, now),
                Err(_) => is_complete = false,
            }
        }
        is_complete
    }

    /// Takes over the penalties in the outcomes of a peek that was sent at this time, except for clients that have been
    /// refused since.
    fn take_over(&self, peek: &Batch, outcomes: &Outcomes, sent_at: Time) {
        for (op, outcome) in peek.ops().iter().zip(outcomes.list()) {
            let shard = &mut *self.shards[op.key.lo() as usize % SHARDS].lock();
            let Some(position) = shard.positions.get(&(op.limit, op.key)) else { continue };
            let client = &mut shard.clients[*position];
            if client.last_at <= outcomes.now() {
                client.is_blocked = outcome.block_until > outcomes.now();
                client.strikes = outcome.strikes;
                let is_waiting = outcome.admission.refuses() && !outcome.retry_at.is_never();
                client.until = is_waiting.then(|| sent_at + outcome.retry_at.since(outcomes.now()));
            }
        }
    }

    fn local_report(
        &self,
        plan: &Plan,
        action: Option<ActionId>,
        most: usize,
        local: bool,
        now: Time,
    ) -> ClientsReport {
        let (clients, displaced) = self.list(plan, action, now);
        let blocked = clients.iter().filter(|client| client.is_blocked_at(now)).count();
        let shown = clients.iter().take(most).map(|client| client.report(plan, now)).collect();
        let only_shadow = clients.iter().filter(|client| client.is_only_shadow()).count();
        ClientsReport { clients: shown, blocked, known: clients.len(), only_shadow, displaced, local }
    }

    /// The kept clients in the order of a report, and the number of those that were left out.
    fn list(&self, plan: &Plan, action: Option<ActionId>, now: Time) -> (Vec<RefusedClient>, u64) {
        let (mut clients, mut displaced) = (Vec::new(), 0);
        for shard in &self.shards {
            let shard = shard.lock();
            displaced += shard.displaced;
            clients.extend(shard.clients.iter().cloned());
        }
        // A reload may have recorded a client under a limit that this plan doesn't have yet.
        let is_active = |limit: LimitId| limit.index() < plan.limits().len() && !plan.is_retired(limit);
        clients.retain_mut(|client| {
            // A reload may have changed the mode since the last refusal.
            client.is_shadow = is_shadow(plan, client.limit);
            is_active(client.limit) && (action.is_none() || plan.limit_info(client.limit).action() == action)
        });
        clients.sort_unstable_by_key(|client| {
            let refusals = (client.refusals, client.shadow_refusals);
            std::cmp::Reverse((client.is_blocked_at(now), refusals, client.importance(now)))
        });
        (clients, displaced)
    }

    /// The number of clients that each limit blocks now.
    pub(crate) fn blocked_by_limit(&self, plan: &Plan, now: Time) -> HashMap<LimitId, usize> {
        let mut blocked = HashMap::new();
        for client in self.list(plan, None, now).0.iter().filter(|client| client.is_blocked_at(now)) {
            *blocked.entry(client.limit).or_default() += 1;
        }
        blocked
    }
}

fn is_shadow(plan: &Plan, limit: LimitId) -> bool {
    plan.limits().get(limit).is_some_and(Limit::is_shadow)
}

/// The peeks that ask a store about these clients, as few as possible.
fn batches_of<'c>(clients: impl Iterator<Item = &'c RefusedClient>) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    for client in clients {
        let op = Op::new(client.limit, Verb::Peek, client.key, 1);
        let last = batches.last_mut().filter(|last| last.context().affinity == client.affinity);
        if last.is_none_or(|last| last.push(op).is_err()) {
            let mut batch = Batch::new(0).with_ops([op]);
            batch.set_affinity(client.affinity);
            batches.push(batch);
        }
    }
    batches
}

impl Shard {
    fn retain(&mut self, is_kept: impl Fn(&RefusedClient) -> bool) {
        self.clients.retain(is_kept);
        let identities = self.clients.iter().map(|client| (client.limit, client.key));
        self.positions = identities.zip(0..).collect();
        self.next_candidate = 0;
    }

    /// Inserts a client, unless there is no room and it is the least important one.
    fn insert(&mut self, client: RefusedClient) {
        let (identity, now) = ((client.limit, client.key), client.last_at);
        let position = if self.clients.len() < SHARD_CAPACITY {
            self.clients.push(client);
            self.clients.len() - 1
        } else {
            self.displaced += 1;
            // Far apart, because clients that were blocked together are neighbours.
            let distance = SHARD_CAPACITY / CANDIDATES;
            let candidates = (0..CANDIDATES).map(|number| self.next_candidate + number * distance);
            let least = candidates.min_by_key(|at| self.clients[*at].importance(now)).unwrap_or(self.next_candidate);
            self.next_candidate = (self.next_candidate + 1) % distance;
            if client.importance(now) < self.clients[least].importance(now) {
                return;
            }
            let replaced = std::mem::replace(&mut self.clients[least], client);
            self.positions.remove(&(replaced.limit, replaced.key));
            least
        };
        self.positions.insert(identity, position);
    }
}

impl RefusedClient {
    fn new(plan: &Plan, limit: LimitId, query: &Query<'_>, decision: &Decision) -> Self {
        Self {
            limit,
            key: decision.key,
            affinity: decision.affinity,
            parts: shown_parts(plan, limit, decision.key, query),
            refusals: 0,
            shadow_refusals: 0,
            strikes: 0,
            is_blocked: false,
            is_shadow: false,
            until: None,
            first_at: decision.now,
            last_at: decision.now,
        }
    }

    /// Takes over a decision. Returns true if it is the first to enforce a block that has begun in shadow.
    fn update(&mut self, decision: &Decision, refusals: u64) -> bool {
        *if decision.shadow { &mut self.shadow_refusals } else { &mut self.refusals } += refusals;
        self.strikes = decision.strikes;
        // Another limit of the call may block it, and then has the shorter wait.
        let (was_in_shadow, is_blocked) = (self.is_blocked && self.is_shadow, decision.reason == Reason::Penalty);
        self.is_blocked = is_blocked;
        self.is_shadow = decision.shadow;
        self.until = decision.retry_after.map(|wait| decision.now + wait);
        self.last_at = decision.now;
        was_in_shadow && is_blocked && !decision.shadow
    }

    fn is_only_shadow(&self) -> bool {
        self.refusals == 0 && self.shadow_refusals > 0
    }

    /// The end of its block, if it is blocked, and the time of its last refusal.
    fn importance(&self, now: Time) -> (Option<Time>, Time) {
        (self.is_blocked_at(now).then(|| self.until.unwrap_or(Time::NEVER)), self.last_at)
    }

    fn is_blocked_at(&self, now: Time) -> bool {
        self.is_blocked && !self.is_shadow && self.until.is_none_or(|until| until > now)
    }

    fn report(&self, plan: &Plan, now: Time) -> ClientReport {
        let passed = |at: Time| UtcText::rounded_down(at).to_string();
        ClientReport {
            action: plan.limit_info(self.limit).action().map(|action| plan.action(action).name().to_owned()),
            limit: plan.limit_info(self.limit).name().to_owned(),
            client: client_json(plan, self.limit, self.key, &self.parts),
            blocked: self.is_blocked_at(now),
            shadow: self.is_shadow,
            strikes: self.strikes,
            retry_after: self.until.map(|until| until.since(now).as_secs_ceil()),
            until: self.until.map(|until| UtcText::from(until).to_string()),
            refusals: self.refusals,
            shadow_refusals: self.shadow_refusals,
            first: passed(self.first_at),
            last: passed(self.last_at),
            reset: self.reset_request(plan),
        }
    }

    /// The body of the request that resets this client. `None` if a part of its key isn't kept whole.
    fn reset_request(&self, plan: &Plan) -> Option<Map<String, Value>> {
        let action = plan.limit_info(self.limit).action().map_or("global", |action| plan.action(action).name());
        let mut request = Map::from_iter([("action".to_owned(), Value::from(action))]);
        let mut longest_prefix = 0;
        for (part, value) in plan.key_parts(self.limit).iter().zip(&self.parts) {
            let field = match part {
                KeyPart::ClientIp | KeyPart::Ipv6Network(_) => "ip",
                KeyPart::Key => "key",
                KeyPart::Platform => "platform",
                KeyPart::Method => "method",
                KeyPart::Host => "host",
                KeyPart::Path => "path",
                // The action is named anyway.
                KeyPart::Action => continue,
                KeyPart::Header(_) | KeyPart::Cookie(_) | KeyPart::QueryParameter(_) | KeyPart::ClientCertificate => {
                    return None;
                }
            };
            let value = value.as_deref().filter(|value| value.chars().count() <= MAX_PART_CHARS)?;
            let mut value = value;
            if field == "ip" {
                // Any address of a network names it, and the networks around it.
                let (address, prefix) = value.split_once('/').unwrap_or((value, "128"));
                let prefix = prefix.parse::<u8>().ok()?;
                if prefix < longest_prefix {
                    continue;
                }
                (value, longest_prefix) = (address, prefix);
            }
            request.insert(field.to_owned(), value.into());
        }
        Some(request)
    }
}

#[cfg(test)]
mod tests;
