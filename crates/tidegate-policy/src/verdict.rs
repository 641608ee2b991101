//! The verdict on a reply of a provider, by the rules of the policy, those of the preset, and the built-in ones.
//!
//! This is the only place that looks at a status, a header or a body to decide what a reply means. All that follows from
//! it (retries, breaker, cool-downs, learning, reports) follows from the [`Verdict`].

mod body;
mod condition;
mod describe;
mod hints;
mod route;
mod source;
mod times;
mod wait;

use std::cell::LazyCell;
use std::fmt;
use std::sync::LazyLock;

use http::{HeaderMap, HeaderName, Method, StatusCode};
use tidegate_core::call::{CallScope, Measure};
use tidegate_core::{Class, Key, Remaining, Scope, Span, Time, Verdict};

pub(crate) use body::{JsonPath, POINTER_SEPARATOR, XmlPath};
pub(crate) use condition::{Check, Condition, Pattern, RequestCondition, StatusSet, Test};
pub use hints::Hints;
pub(crate) use route::PathTemplate;
pub use route::comparable_path;
pub(crate) use source::{HeaderPart, Source};
pub(crate) use times::TimeUnit;
pub(crate) use wait::{PeriodEnd, WaitRule, WaitSource};

use body::Document;
use hints::reply_clock;
use route::ScopeHasher;
use source::Exchange;
use times::ReplyClock;
pub use times::parse_wait;
use wait::FoundWait;

/// The longest time for which one reply closes anything, if neither the provider nor a rule sets another.
pub const DEFAULT_MAX_PAUSE: Span = Span::from_secs(86_400);
/// The longest such time that a policy can set.
pub const LONGEST_MAX_PAUSE: Span = Span::from_secs(31 * 86_400);

/// The longest body of a reply that is read for a rule, in bytes.
pub const MAX_READ_BODY: usize = 64 << 10;
/// The longest body of a success that is read for a rule, in bytes, unless the rule names a path.
pub const MAX_READ_SUCCESS: usize = 8 << 10;

/// The status of gRPC. It is in the head of a reply without messages ("Trailers-Only").
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// The part of a request that rules can ask for.
pub struct RequestFacts<'r> {
    pub(crate) method: &'r Method,
    pub(crate) host: &'r str,
    pub(crate) path: &'r str,
    pub(crate) headers: &'r HeaderMap,
    pub(crate) body: Option<Document<'r>>,
}

impl<'r> RequestFacts<'r> {
    /// The facts of a request to this host. The path is the caller's, below the provider's base URL, as
    /// [`comparable_path`] returns it.
    #[inline]
    pub fn new(method: &'r Method, host: &'r str, path: &'r str, headers: &'r HeaderMap) -> Self {
        Self { method, host, path, headers, body: None }
    }

    /// Adds the request's body.
    #[must_use]
    #[inline]
    pub fn with_body(mut self, body: Option<&'r [u8]>) -> Self {
        self.body = body.map(Document::new);
        self
    }
}

impl fmt::Debug for RequestFacts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestFacts").field("method", &self.method).field("path", &self.path).finish_non_exhaustive()
    }
}

/// A reply, perhaps with its body.
pub(crate) struct Reply<'r> {
    pub(crate) headers: &'r HeaderMap,
    pub(crate) body: Option<Document<'r>>,
}

/// The origin of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleOrigin {
    /// The provider's own section.
    Policy,
    /// Its preset.
    Preset,
    /// The rules that apply to every provider.
    BuiltIn,
}

/// A rule that has decided: the n-th of its origin, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleName {
    /// The origin.
    pub origin: RuleOrigin,
    /// The number, from 1.
    pub number: usize,
}

impl fmt::Display for RuleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origin = match self.origin {
            RuleOrigin::Policy => "the policy",
            RuleOrigin::Preset => "the preset",
            RuleOrigin::BuiltIn => "those built in",
        };
        write!(f, "rule {} of {origin}", self.number)
    }
}

/// The scope of a rule.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RuleScope {
    Call,
    Credential,
    Provider,
    /// A scope with this name.
    Named(Vec<Source>),
}

/// A rule: the verdict on the replies that meet its conditions.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rule {
    pub(crate) name: RuleName,
    /// One of these must hold.
    pub(crate) when: Vec<Condition>,
    /// `None` if another rule decides, and this one only adds to the verdict.
    pub(crate) class: Option<Class>,
    /// False if the request isn't sent again, true if it was not carried out. `None` as the class says.
    pub(crate) may_repeat: Option<bool>,
    /// Without sources, the usual headers tell the wait.
    pub(crate) wait: WaitRule,
    pub(crate) scope: RuleScope,
    pub(crate) max_pause: Option<Span>,
}

/// A scope by the request and its reply.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CallScopeRule {
    /// Any if empty.
    pub(crate) methods: Vec<Method>,
    /// Any if empty.
    pub(crate) paths: Vec<PathTemplate>,
    pub(crate) name: Vec<Source>,
}

/// The part of the name of a rule's scope that a request tells.
#[derive(PartialEq)]
struct ToldScope {
    name: String,
    /// True if it is the name, and calls with it belong to the scope.
    is_whole: bool,
}

/// A number, or the place of one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum NumberSource {
    Fixed(u64),
    Source(Source),
}

impl NumberSource {
    fn find(&self, exchange: &Exchange<'_>) -> Option<u128> {
        match self {
            Self::Fixed(number) => Some(u128::from(*number)),
            // A negative number, such as the -1 of some providers, means that it is unknown.
            Self::Source(source) => {
                source.number(exchange).filter(|number| *number >= 0.0).map(|number| number as u128)
            }
        }
    }

    fn needs_body(&self) -> bool {
        matches!(self, Self::Source(source) if source.needs_body())
    }
}

/// An allowance that replies report.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AllowanceRule {
    pub(crate) measure: Measure,
    pub(crate) limit: Option<NumberSource>,
    pub(crate) remaining: Option<NumberSource>,
    pub(crate) used: Option<NumberSource>,
    pub(crate) reset: Option<WaitSource>,
    /// The length of the window, if no reset is told.
    pub(crate) window: Option<Span>,
}

/// The rules by which the replies of one provider are understood.
#[derive(Clone, Debug, PartialEq)]
pub struct VerdictRules {
    /// Those of the policy before those of the preset.
    pub(crate) rules: Vec<Rule>,
    pub(crate) scopes: Vec<CallScopeRule>,
    pub(crate) allowances: Vec<AllowanceRule>,
    pub(crate) max_pause: Span,
    /// The statuses that a rule asks for, also a built-in one.
    statuses: StatusSet,
    /// The methods for which rules ask for successes. `None` if they do for all.
    success_methods: Option<Vec<Method>>,
}

/// A reply that was understood.
#[derive(Clone, Debug)]
pub struct Classified {
    /// The verdict.
    pub verdict: Verdict,
    /// The rule that has decided the class; `None` if the status and the usual headers have.
    pub rule: Option<RuleName>,
    /// The name of the verdict's scope, if it has one.
    pub scope_name: Option<String>,
    /// The header that tells the wait, if a header does.
    pub wait_header: Option<HeaderName>,
    /// The wait that the reply asks for, if it is longer than the longest pause.
    pub cut_wait: Option<Span>,
}

/// The rules that apply to every provider.
static BUILT_IN: LazyLock<Vec<Rule>> = LazyLock::new(crate::read::built_in_rules);

impl Default for VerdictRules {
    /// The built-in rules alone.
    fn default() -> Self {
        Self::new(Vec::new(), Vec::new(), Vec::new(), DEFAULT_MAX_PAUSE)
    }
}

impl VerdictRules {
    pub(crate) fn new(
        rules: Vec<Rule>,
        scopes: Vec<CallScopeRule>,
        allowances: Vec<AllowanceRule>,
        max_pause: Span,
    ) -> Self {
        let all = rules.iter().chain(BUILT_IN.iter());
        let conditions = all.flat_map(|rule| &rule.when);
        let statuses = conditions.clone().fold(StatusSet::default(), |set, when| set.union(when.statuses));
        let of_success = conditions.filter(|when| (200..300).any(|status| when.statuses.contains(status)));
        let methods = of_success.map(|when| Some(when.request.methods.clone()).filter(|methods| !methods.is_empty()));
        let success_methods = methods.collect::<Option<Vec<_>>>().map(|methods| methods.concat());
        Self { rules, scopes, allowances, max_pause, statuses, success_methods }
    }

    /// False if no rule asks for replies of this status to such a request, as for most successes.
    fn asks_for(&self, request: &RequestFacts<'_>, status: u16) -> bool {
        let has_method = || self.success_methods.as_ref().is_none_or(|methods| methods.contains(request.method));
        self.statuses.contains(status) && (!(200..300).contains(&status) || has_method())
    }

    /// True if rules of the policy or the preset read the bodies of replies.
    pub fn reads_bodies(&self) -> bool {
        self.rules.iter().any(|rule| rule.when.iter().any(Condition::needs_body) || rule.reads_body())
            || self.allowances.iter().any(AllowanceRule::needs_body)
    }

    /// True if the scope of a call is in the JSON of its request.
    pub fn reads_request_bodies(&self) -> bool {
        let in_scopes = self.scopes.iter().flat_map(|scope| &scope.name).any(Source::needs_request_body);
        let conditions = self.rules.iter().flat_map(|rule| &rule.when);
        let of_rules = |rule: &Rule| match &rule.scope {
            RuleScope::Named(parts) => parts.iter().any(Source::needs_request_body),
            RuleScope::Call | RuleScope::Credential | RuleScope::Provider => false,
        };
        in_scopes || self.rules.iter().any(of_rules) || conditions.into_iter().any(|when| !when.request.json.is_empty())
    }

    /// The longest time for which a reply closes anything, by any rule.
    pub fn longest_pause(&self) -> Span {
        self.rules.iter().filter_map(|rule| rule.max_pause).fold(self.max_pause, Span::max)
    }

    /// The route and the scope of a call, as far as its request tells. `provider` is the key of the provider, which keeps
    /// callers from choosing names that collide.
    pub fn call_scope(&self, request: &RequestFacts<'_>, provider: Key) -> CallScope {
        let mut route = ScopeHasher::new(provider);
        route.add_route(request.method.as_str(), request.path);
        if self.rules.is_empty() && self.scopes.is_empty() {
            return CallScope { route: route.finish(), ..CallScope::default() };
        }
        // Names of scopes, as far as the request tells them, distinguish routes.
        let told_by_rules = self.rule_scopes(request);
        told_by_rules.iter().for_each(|told| route.add(&told.name));
        if let Some((rule, captures)) = self.scope_rule(request) {
            let exchange = Exchange { request, reply: None, captures: &captures };
            if rule.name.iter().any(Source::is_in_reply) {
                let own = rule.name.iter().filter(|source| !source.is_in_reply());
                own.filter_map(|source| source.name(&exchange)).for_each(|name| route.add(&name));
                return CallScope { route: route.finish(), is_learnt: true, ..CallScope::default() };
            }
            if let Some(name) = scope_name(&rule.name, &exchange) {
                return CallScope { route: route.finish(), key: scope_key(&name, provider), ..CallScope::default() };
            }
        }
        let route = route.finish();
        match told_by_rules.split_first() {
            None => CallScope { route, ..CallScope::default() },
            Some((first, others)) if first.is_whole && others.iter().all(|other| other == first) => {
                CallScope { route, key: scope_key(&first.name, provider), closes_only: true, ..CallScope::default() }
            }
            Some(_) => CallScope { route, is_learnt: true, closes_only: true, ..CallScope::default() },
        }
    }

    /// The scopes that rules may find in the reply to a request.
    fn rule_scopes(&self, request: &RequestFacts<'_>) -> Vec<ToldScope> {
        let told_scope = |parts: &[Source], when: &Condition| {
            let exchange = Exchange { request, reply: None, captures: &when.captures(request) };
            let own = parts.iter().filter(|part| !part.is_in_reply()).map(|part| part.name(&exchange));
            let name = own.collect::<Option<Vec<_>>>()?.join("/");
            // A fixed name says nothing about the requests that belong to it, unless the rule asks for some.
            let tells_requests = || parts.iter().any(|part| !matches!(part, Source::Text(_)));
            let is_whole = !parts.iter().any(Source::is_in_reply)
                && (when.request != RequestCondition::default() || tells_requests());
            Some(ToldScope { name, is_whole })
        };
        let told_by = |rule: &Rule| match &rule.scope {
            RuleScope::Named(parts) => {
                let fitting = rule.when.iter().filter(|when| when.request.holds(request));
                fitting.filter_map(|when| told_scope(parts, when)).collect()
            }
            RuleScope::Call | RuleScope::Credential | RuleScope::Provider => Vec::new(),
        };
        self.rules.iter().flat_map(told_by).collect()
    }

    /// The longest body of the reply that some rule asks for. `None` if no rule does, or the reply is a stream or encoded.
    pub fn body_limit(&self, request: &RequestFacts<'_>, status: StatusCode, headers: &HeaderMap) -> Option<usize> {
        let status = status.as_u16();
        let for_allowance = self.allowances.iter().any(AllowanceRule::needs_body);
        if !for_allowance && !self.asks_for(request, status) || !is_readable(headers) {
            return None;
        }
        let mut limit = for_allowance.then_some(MAX_READ_SUCCESS);
        for rule in self.rules.iter().chain(BUILT_IN.iter()) {
            let mut has_decided = false;
            for when in rule.when.iter().filter(|when| when.holds_for_head(request, status, headers)) {
                let needs_body = when.needs_body() || rule.reads_body();
                // Where no rule of the provider asks for it, a body is read only if its type is the one that is searched.
                if needs_body && (rule.name.origin != RuleOrigin::BuiltIn || when.expects_type(headers)) {
                    let is_success = (100..400).contains(&status);
                    let names_path = !when.request.paths.is_empty();
                    let own = if is_success && !names_path { MAX_READ_SUCCESS } else { MAX_READ_BODY };
                    limit = limit.max(Some(own));
                }
                has_decided |= !when.needs_body() && rule.class.is_some();
            }
            if has_decided {
                break;
            }
        }
        limit
    }

    /// The verdict on a reply that arrived at `now`, with its body if it was read.
    pub fn classify(
        &self,
        request: &RequestFacts<'_>,
        status: StatusCode,
        headers: &HeaderMap,
        body: Option<&[u8]>,
        provider: Key,
        now: Time,
    ) -> Classified {
        let reply = Reply { headers, body: body.map(Document::new) };
        let is_declared = |name: &HeaderName| self.allowances.iter().any(|rule| rule.names_header(name));
        let mut hints = Hints::read_except(headers, is_declared, now);
        // Most replies need none.
        let clock = LazyCell::new(|| reply_clock(headers, now));
        if !self.allowances.is_empty() {
            let exchange = Exchange { request, reply: Some(&reply), captures: &[] };
            self.allowances.iter().for_each(|rule| rule.read(&exchange, *clock, &mut hints));
        }
        let mut classified = Classified::from_head(status, &hints, headers, now);
        let mut max_pause = None;
        let mut is_scoped = false;
        for (rule, when) in self.matching_rules(request, status, &reply) {
            let exchange = Exchange { request, reply: Some(&reply), captures: &when.captures(request) };
            if let Some(class) = rule.class {
                classified.decide(class, rule.name, &hints, now);
            }
            if let Some(found) = rule.wait.find(&exchange, *clock) {
                classified.set_wait(found);
            }
            max_pause = rule.max_pause.or(max_pause);
            rule.apply_to(&mut classified.verdict);
            is_scoped |= rule.scope != RuleScope::Call;
            classified.set_scope(&rule.scope, &exchange, provider);
        }
        // What is usual in bodies, if neither a rule nor a header tells a wait.
        let verdict = &mut classified.verdict;
        let may_tell = verdict.class.is_refusal() || matches!(verdict.class, Class::Unavailable | Class::Transient);
        if verdict.announced_wait().is_none() && may_tell && reply.body.is_some() {
            let exchange = Exchange { request, reply: Some(&reply), captures: &[] };
            if let Some(found) = USUAL_WAITS.find(&exchange, *clock) {
                verdict.wait = Some(found.wait);
                if verdict.class == Class::Transient {
                    verdict.class = Class::Unavailable;
                }
            }
        }
        if !is_scoped {
            self.name_scope(request, &reply, &mut classified, provider);
        }
        classified.limit_times(max_pause.unwrap_or(self.max_pause), now);
        classified
    }

    /// The rules that apply to a reply, each with the condition that holds: first the one that decides, then those that
    /// only add something, the first of them last.
    fn matching_rules<'v>(
        &'v self,
        request: &RequestFacts<'_>,
        status: StatusCode,
        reply: &Reply<'_>,
    ) -> Vec<(&'v Rule, &'v Condition)> {
        let status = status.as_u16();
        if !self.asks_for(request, status) {
            return Vec::new();
        }
        let mut matching = Vec::new();
        for rule in self.rules.iter().chain(BUILT_IN.iter()) {
            let holds =
                |when: &&Condition| when.holds_for_head(request, status, reply.headers) && when.holds_for_body(reply);
            let Some(when) = rule.when.iter().find(holds) else { continue };
            matching.push((rule, when));
            if rule.class.is_some() {
                break;
            }
        }
        matching.reverse();
        matching
    }

    fn scope_rule<'s, 'r>(
        &'s self,
        request: &RequestFacts<'r>,
    ) -> Option<(&'s CallScopeRule, Vec<(&'s str, &'r str)>)> {
        self.scopes.iter().find_map(|rule| {
            if !rule.methods.is_empty() && !rule.methods.contains(request.method) {
                return None;
            }
            let found = rule.paths.iter().find_map(|path| path.captures(request.path));
            let captures = if rule.paths.is_empty() { Vec::new() } else { found? };
            Some((rule, captures))
        })
    }

    /// Names the scope of a verdict by the provider's scopes.
    fn name_scope(&self, request: &RequestFacts<'_>, reply: &Reply<'_>, classified: &mut Classified, provider: Key) {
        let Some((rule, captures)) = self.scope_rule(request) else { return };
        let exchange = Exchange { request, reply: Some(reply), captures: &captures };
        let name = scope_name(&rule.name, &exchange);
        if let Some(name) = name.as_ref().filter(|_| rule.name.iter().any(Source::is_in_reply)) {
            classified.verdict.scope = Scope::Named(scope_key(name, provider));
        }
        classified.scope_name = name;
    }
}

/// The usual places of waits in bodies.
static USUAL_WAITS: LazyLock<WaitRule> = LazyLock::new(|| {
    let value = |pointer: &str, unit| WaitSource::Value {
        source: Source::Json(JsonPath::new(pointer).expect("invariant: a pointer")),
        pattern: None,
        unit,
        extra: Span::ZERO,
    };
    let sources = vec![
        value("/retry_after", TimeUnit::Any),
        value("/*/retry_after", TimeUnit::Any),
        // The stream of a Google API begins with an array.
        value("/error/details/*/retryDelay or /*/error/details/*/retryDelay", TimeUnit::Duration),
    ];
    WaitRule { sources, is_latest: false }
});

impl Rule {
    /// True if it changes nothing but the class.
    pub(crate) fn adds_nothing(&self) -> bool {
        self.may_repeat.is_none() && self.wait.sources.is_empty() && self.scope == RuleScope::Call
    }

    /// True if the wait or the scope is in the body.
    fn reads_body(&self) -> bool {
        self.wait.needs_body() || matches!(&self.scope, RuleScope::Named(parts) if parts.iter().any(Source::needs_body))
    }

    fn apply_to(&self, verdict: &mut Verdict) {
        match self.may_repeat {
            Some(true) => verdict.was_refused = true,
            Some(false) => verdict.asks_not_to_retry = true,
            None => {}
        }
    }
}

/// The wait that the usual headers tell for a class.
fn usual_wait(class: Class, hints: &Hints, now: Time) -> Option<FoundWait> {
    let told = match class {
        Class::Throttled | Class::Quota => hints.wait(now),
        Class::Unavailable | Class::Transient | Class::Unknown => hints.retry_after,
        Class::Success | Class::Permanent | Class::Auth | Class::Cancelled => None,
    };
    let header = if hints.retry_after.is_some() { &hints.retry_after_header } else { &hints.reset_header };
    told.map(|wait| FoundWait { wait, header: header.clone() })
}

impl Classified {
    /// The verdict by the status and the usual headers alone, for a reply that arrived at `now`.
    ///
    /// A 403 that says that nothing is left, or when to come back, is throttled. A failure that says when to come back is
    /// unavailable until then, and so are 413, 423 and 477. For a 200 with another `grpc-status`, the class follows the HTTP
    /// status that `google.rpc.Code` gives for it: 14 is 503, 8 is 429.
    pub fn of_head(status: StatusCode, headers: &HeaderMap, now: Time) -> Self {
        let hints = Hints::read(headers, now);
        let mut classified = Self::from_head(status, &hints, headers, now);
        classified.limit_times(DEFAULT_MAX_PAUSE, now);
        classified
    }

    fn from_head(status: StatusCode, hints: &Hints, headers: &HeaderMap, now: Time) -> Self {
        let status = effective_status(status, headers);
        let has_wait = hints.retry_after.is_some();
        let class = match (status.as_u16(), Class::from_status(status.as_u16())) {
            (403, _) if has_wait || hints.exhausted => Class::Throttled,
            (413 | 423 | 477, _) | (_, Class::Transient) if has_wait => Class::Unavailable,
            (_, Class::Permanent) if hints.asks_to_retry => Class::Transient,
            (_, class) => class,
        };
        let found = usual_wait(class, hints, now);
        let (wait, wait_header) = found.map_or((None, None), |found| (Some(found.wait), found.header));
        let verdict = Verdict {
            wait,
            asks_not_to_retry: hints.asks_not_to_retry,
            rejects_credential: status == StatusCode::UNAUTHORIZED,
            has_reservation: class == Class::Throttled && hints.reserved_in.is_some(),
            ..hints.verdict(class)
        };
        Self { verdict, rule: None, scope_name: None, wait_header, cut_wait: None }
    }

    /// Takes the class of a rule, and the wait that the usual headers tell for it.
    fn decide(&mut self, class: Class, rule: RuleName, hints: &Hints, now: Time) {
        let found = usual_wait(class, hints, now);
        let (wait, wait_header) = found.map_or((None, None), |found| (Some(found.wait), found.header));
        self.verdict = Verdict {
            wait,
            asks_not_to_retry: hints.asks_not_to_retry,
            rejects_credential: class == Class::Auth,
            has_reservation: class == Class::Throttled && hints.reserved_in.is_some(),
            ..hints.verdict(class)
        };
        (self.rule, self.wait_header) = (Some(rule), wait_header);
    }

    /// Takes the wait of a rule. A reservation is for another instant.
    fn set_wait(&mut self, found: FoundWait) {
        (self.verdict.wait, self.wait_header) = (Some(found.wait), found.header);
        self.verdict.has_reservation = false;
    }

    fn set_scope(&mut self, scope: &RuleScope, exchange: &Exchange<'_>, provider: Key) {
        self.verdict.scope = match scope {
            RuleScope::Call => return,
            RuleScope::Credential => Scope::Credential,
            RuleScope::Provider => Scope::Provider,
            RuleScope::Named(parts) => match scope_name(parts, exchange) {
                None => Scope::Call,
                Some(name) => {
                    let key = scope_key(&name, provider);
                    self.scope_name = Some(name);
                    Scope::Named(key)
                }
            },
        };
    }

    /// Cuts the wait and the resets to the longest pause.
    fn limit_times(&mut self, max_pause: Span, now: Time) {
        let Remaining { calls, cost } = &mut self.verdict.remaining;
        let resets = [calls, cost].into_iter().flatten().map(|amount| &mut amount.resets_at);
        resets.chain(&mut self.verdict.spent_until).for_each(|at| *at = (now + max_pause).min(*at));
        let asked = self.verdict.wait.filter(|wait| *wait > max_pause);
        if asked.is_some() {
            (self.cut_wait, self.verdict.wait, self.verdict.is_cut) = (asked, Some(max_pause), true);
        }
    }
}

impl AllowanceRule {
    fn needs_body(&self) -> bool {
        let mut numbers = [&self.limit, &self.remaining, &self.used].into_iter().flatten();
        numbers.any(NumberSource::needs_body) || self.reset.as_ref().is_some_and(WaitSource::needs_body)
    }

    fn read(&self, exchange: &Exchange<'_>, clock: ReplyClock, hints: &mut Hints) {
        let find = |source: &Option<NumberSource>| source.as_ref().and_then(|source| source.find(exchange));
        let limit = find(&self.limit);
        let used = || Some(limit?.saturating_sub(find(&self.used)?));
        let left = find(&self.remaining).or_else(used);
        // More than there is, is no report.
        let left = left.filter(|left| limit.is_none_or(|limit| limit == 0 || *left <= limit));
        let reset = self.reset.as_ref().and_then(|source| {
            let rule = WaitRule { sources: vec![source.clone()], is_latest: false };
            rule.find(exchange, clock)
        });
        if left.is_some() || reset.is_some() {
            hints.add_allowance(self.measure, left, limit, reset.map(|found| found.wait), self.window, clock.now);
        }
    }

    /// True if it is read from this header, whose usual meaning is then another one.
    fn names_header(&self, name: &HeaderName) -> bool {
        let reset = match &self.reset {
            Some(WaitSource::Value { source, .. }) => Some(source),
            _ => None,
        };
        let numbers = [&self.limit, &self.remaining, &self.used].into_iter().flatten();
        let sources = numbers.filter_map(|number| match number {
            NumberSource::Source(source) => Some(source),
            NumberSource::Fixed(_) => None,
        });
        sources.chain(reset).any(|source| matches!(source, Source::Header(own, _) if own == name))
    }
}

/// The name of a scope; `None` if a part of it is missing.
fn scope_name(parts: &[Source], exchange: &Exchange<'_>) -> Option<String> {
    let names: Option<Vec<String>> = parts.iter().map(|part| part.name(exchange)).collect();
    names.map(|names| names.join("/")).filter(|name| !name.is_empty())
}

fn scope_key(name: &str, provider: Key) -> u64 {
    let mut hasher = ScopeHasher::new(provider);
    hasher.add(name);
    hasher.finish()
}

/// True if a body of this kind may be read for a rule: JSON, XML or text, neither encoded nor a stream.
fn is_readable(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value: &http::HeaderValue| value.to_str().ok());
    let is_plain = text(http::header::CONTENT_ENCODING).is_none_or(|coding| coding.eq_ignore_ascii_case("identity"));
    let kind = text(http::header::CONTENT_TYPE).map(|kind| kind.split(';').next().unwrap_or(kind).trim());
    let kind = kind.map(str::to_ascii_lowercase);
    let is_document = kind.as_deref().is_none_or(|kind| {
        let is_stream = kind == "text/event-stream" || kind.contains("json-seq") || kind.contains("jsonl");
        let is_known = kind.starts_with("text/") || ["json", "xml", "javascript"].iter().any(|end| kind.ends_with(end));
        // AWS names its protocols: application/x-amz-json-1.1.
        (is_known || kind.contains("json-")) && !is_stream && !kind.contains("ndjson")
    });
    is_plain && is_document
}

/// The effective status of a reply: the HTTP status, or for a 200 the one that corresponds to `grpc-status`. An unknown
/// gRPC status counts as UNKNOWN.
fn effective_status(status: StatusCode, headers: &HeaderMap) -> StatusCode {
    let Some(grpc) = headers.get(&GRPC_STATUS).filter(|_| status == StatusCode::OK) else { return status };
    match grpc.as_bytes() {
        b"0" => StatusCode::OK,
        // CANCELLED has no status in RFC 9110. If the provider cancelled the call itself, it would cancel a retry too.
        b"1" | b"3" | b"9" | b"11" => StatusCode::BAD_REQUEST,
        b"4" => StatusCode::GATEWAY_TIMEOUT,
        b"5" => StatusCode::NOT_FOUND,
        b"6" | b"10" => StatusCode::CONFLICT,
        b"7" => StatusCode::FORBIDDEN,
        b"8" => StatusCode::TOO_MANY_REQUESTS,
        b"12" => StatusCode::NOT_IMPLEMENTED,
        b"14" => StatusCode::SERVICE_UNAVAILABLE,
        b"16" => StatusCode::UNAUTHORIZED,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
