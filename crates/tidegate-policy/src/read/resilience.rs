//! The settings for a provider's failures: `retry`, `budget`, `breaker`, `adaptive`, `cooldown`.

use tidegate_core::breaker::{MAX_PROBES, MAX_RAMP, RampStep, SlowCalls};
use tidegate_core::call::{CallRules, LaneRules};
use tidegate_core::{
    AdaptiveLimit, AdaptiveLimitSpec, Backoff, Breaker, BreakerSpec, BudgetSpec, Growth, Jitter, Lane, Retry, Span,
};

use super::forms::{Custom, Maybe, OrWord, SHARE, SHARE_OR_ZERO, SPAN, Whole, Words};
use super::penalties::describe_order;
use super::provider::{PROVIDER, PROVIDER_PATH};
use super::{DocumentReader, all_or_none};
use crate::document::{TextRange, TomlEntry, TomlNode, TomlTable, TomlValue};
use crate::error::{Note, quoted};
use crate::settings::SettingType::TableOrTables;
use crate::settings::key::{Below, SettingKey, read_keys, read_struct, setting_keys};
use crate::units::{describe_duration, format_percent};

/// The most attempts per call.
pub(super) const MAX_ATTEMPTS: u64 = 100;
/// The most calls, retries or probes that a setting counts.
const COUNT: Whole = Whole(1, 1_000_000);
const FACTOR: Whole = Whole(1, 1000);
/// The first and the longest wait between the attempts of a provider with a preset.
const PRESET_BACKOFF: (Span, Span) = (Span::from_secs(1), Span::from_secs(30));
/// The default share of slow calls that opens a breaker, in thousandths.
const DEFAULT_SLOW_RATE: u16 = 500;

/// The words for no value and for the defaults.
pub(super) const OFF_OR_ON: [(&str, bool); 2] = [("off", false), ("on", true)];
const JITTERS: [(&str, Jitter); 5] = [
    ("none", Jitter::None),
    ("full", Jitter::Full),
    ("equal", Jitter::Equal),
    ("decorrelated", Jitter::Decorrelated),
    ("additive", Jitter::Additive(Span::from_secs(1))),
];
const OPEN_JITTERS: [(&str, Jitter); 3] = [("none", Jitter::None), ("full", Jitter::Full), ("equal", Jitter::Equal)];

const RAMP: Custom<Vec<RampStep>> =
    Custom(TableOrTables, "`off`, `on`, or a list of tables", |reader, node, _| reader.ramp(node));

setting_keys! {
    RETRY: RetryKeys {
        max_attempts: Option<u32> = "", Maybe(Whole(1, MAX_ATTEMPTS)), "attempts per call; the lane's by default";
        max_token_retries: u32 = "5", Whole(0, MAX_ATTEMPTS), "the maximum number of requests that go at once to another credential, in addition to `max_attempts`";
        base: Span = "500ms", SPAN, "the first wait; 1s with a preset";
        factor: u32 = "2", FACTOR, "the factor of each further wait";
        cap: Span = "8s", SPAN, "the longest wait; 30s with a preset";
        jitter: Jitter = "full", Words(&JITTERS),
            "the jitter of waits: none, full, equal, decorrelated or additive";
        max_retry_after: Span = "5m", SPAN, "the longest Retry-After that a call waits for";
    }

    BUDGET: BudgetKeys {
        ratio: u16 = "0.2", SHARE_OR_ZERO, "retries per first attempt";
        min: u32 = "3", Whole(0, 1_000_000), "the number of retries before any is earned; raised to the attempts that the policy sets, unless it is set";
        reserve: u32 = "10", Whole(0, 1_000_000), "the maximum number of earned retries";
    }

    BREAKER: BreakerKeys {
        failures: Option<u32> = "5", OrWord("off", COUNT),
            "opens at this many failures in a row, while other calls are in flight only once they have lasted for two usual calls (1 s before the first good reply, at most 10 s), or off; raised above the attempts that the policy sets, unless it is set";
        failure_rate: Option<u16> = "", Maybe(SHARE), "opens at this share of failures in the window";
        window: Span = "60s", SPAN, "the time for which shares are calculated";
        min_calls: u32 = "10", COUNT, "the minimum number of calls in the window before shares count";
        slow_after: Option<Span> = "", Maybe(SPAN), "a call that takes longer is slow";
        slow_rate: Option<u16> = "", Maybe(SHARE), "opens at this share of slow calls; default 0.5";
        open: Span = "5m", SPAN, "the time for which it stays open";
        open_factor: Option<u32> = "", Maybe(FACTOR), "the factor of each further opening";
        open_cap: Option<Span> = "", Maybe(SPAN), "the longest opening; if neither is set, all are equal";
        open_jitter: Jitter = "none", Words(&OPEN_JITTERS), "the jitter of openings: none, full or equal";
        probes: u32 = "1", Whole(1, MAX_PROBES as u64), "the maximum number of probes at a time";
        probe_lease: Span = "5s", SPAN, "the time after which another probe may be sent beside an unanswered one: this or, if less, the usual time of a call (at least 1 s)";
        successes: u32 = "2", COUNT, "the number of successful probes that closes it";
        ramp: Vec<RampStep> = "off", RAMP, "the share of calls after closing: off, on, or a list of steps", Below::Items(&RAMP_STEP);
    }

    /// The keys of a step of `ramp`.
    RAMP_STEP: RampStepKeys {
        share: u16 = "", SHARE, "the share of calls that passes";
        r#for: Span = "", SPAN, "for how long";
    }

    ADAPTIVE: AdaptiveKeys {
        min: u32 = "4", COUNT, "the minimum number of calls at a time; half of it for a moment while round trips are measured";
        max: u32 = "1000", COUNT, "the maximum number of calls at a time";
        initial: u32 = "20", COUNT, "the first number of calls at a time";
    }

    COOLDOWN: CooldownKeys {
        base: Span = "1s", SPAN,
            "the first cool-down; with a single credential retry.base, if retry's waits aren't the default";
        cap: Span = "32s", SPAN, "the longest cool-down; with a single credential retry.cap, if retry's waits aren't the default";
    }
}

pub(super) struct ParsedRetry {
    /// The provider's own value; `None` leaves it to the lane.
    pub(super) max_attempts: Option<u32>,
    pub(super) retry: Retry,
}

/// The number of attempts that the policy sets for a lane, and the setting.
struct AskedAttempts {
    lane: Lane,
    rules: LaneRules,
    setting: String,
    at: TextRange,
}

impl DocumentReader<'_> {
    pub(super) fn retry(&mut self, provider: &TomlTable, has_preset: bool) -> Option<ParsedRetry> {
        let table = self.provider_section(provider, "retry")?;
        read_keys!(self, table, RETRY: max_attempts, max_token_retries, factor, jitter, max_retry_after);
        let defaults = has_preset.then_some(PRESET_BACKOFF);
        let waits = self.base_and_cap(table, provider.node("retry"), (&RETRY.base, &RETRY.cap), defaults, "wait");
        let ((base, cap), max_attempts) = (waits?, max_attempts?);
        let retry = Retry {
            max_attempts: max_attempts.unwrap_or(Retry::default().max_attempts),
            max_token_retries: max_token_retries?,
            backoff: Backoff { growth: Growth::Exponential { factor: factor? }, base, cap, jitter: jitter? },
            max_retry_after: max_retry_after?,
        };
        Some(ParsedRetry { max_attempts, retry })
    }

    pub(super) fn budget(&mut self, provider: &TomlTable) -> Option<BudgetSpec> {
        let Some(table) = self.table_unless_off(provider, &PROVIDER.budget, true)? else {
            return Some(BudgetSpec::UNLIMITED);
        };
        read_struct!(self, table, BUDGET => BudgetSpec { ratio, min, reserve })
    }

    /// Lets a call make the attempts that the policy asks for: raises the budget's minimum and the breaker's failures to
    /// at least their number, unless they are written. Notes what still keeps a call from making them.
    pub(super) fn make_room_for_attempts(
        &mut self,
        provider: &TomlTable,
        rules: &mut CallRules,
        breaker: Option<&mut BreakerSpec>,
    ) {
        let written = |section: &str, key: &str| provider.table(section).and_then(|table| table.node(key));
        let of_all = written("retry", "max_attempts").map(|node| ("retry.max_attempts".to_owned(), node));
        let asked = Lane::ALL.into_iter().filter_map(|lane| {
            let own = written(lane.name(), "retries").map(|node| (format!("{}.retries", lane.name()), node));
            let (setting, node) = own.or_else(|| of_all.clone())?;
            Some(AskedAttempts { lane, rules: rules.lane_rules[lane as usize], setting, at: node.at })
        });
        let asked: Vec<_> = asked.collect();
        let Some(most) = asked.iter().max_by_key(|asked| asked.rules.retry.max_attempts) else { return };
        let attempts = most.rules.retry.max_attempts;
        let mut note = |asked: &AskedAttempts, bound: String| {
            let (setting, attempts) = (&asked.setting, asked.rules.retry.max_attempts);
            let message = format!("`{setting}` allows a call {attempts} attempts, but {bound}");
            self.notes.push(Note::new(self.texts, asked.at, &message));
        };
        let budget = &mut rules.budget;
        if written("budget", "min").is_none() {
            budget.min = budget.min.max(attempts);
        } else if budget.min + 1 < attempts {
            let (min, share) = (budget.min, format_percent(budget.ratio));
            let bound = "`budget.min` allows all calls together";
            note(most, format!("{bound} {min} retries and `budget.ratio` {share} of first attempts more"));
        }
        if let Some(breaker) = breaker {
            match &mut breaker.failures {
                // A single call doesn't open it.
                Some(failures) if written("breaker", "failures").is_none() => *failures = (*failures).max(attempts + 1),
                Some(failures) if *failures < attempts => {
                    note(most, format!("the breaker opens at {failures} failures in a row (`breaker.failures`)"));
                }
                _ => {}
            }
            if let (Some(rate), calls) = (breaker.failure_rate, breaker.min_calls)
                && calls < attempts
            {
                let rate = format_percent(rate);
                note(most, format!("the breaker opens at {rate} failures of {calls} calls (`breaker.failure_rate`)"));
            }
        }
        let waits = |rules: &LaneRules| rules.retry.backoff.total_waits(rules.retry.max_attempts.saturating_sub(1));
        if let Some(late) = asked.iter().find(|asked| waits(&asked.rules) >= asked.rules.timeout) {
            let (sum, timeout) = (describe_duration(waits(&late.rules)), describe_duration(late.rules.timeout));
            let lane = late.lane.name();
            note(
                late,
                format!("the waits between them may add up to {sum}, and a {lane} call has {timeout} (`timeout`)"),
            );
        }
    }

    /// Reads the first and the longest cool-down. Without a second credential, a throttled call waits for the cool-down
    /// as it waits before a retry. The waits before retries are then the default, unless they are the default waits of
    /// retries.
    pub(super) fn cooldown(
        &mut self,
        provider: &TomlTable,
        credentials: usize,
        retry: Option<&ParsedRetry>,
    ) -> Option<(Span, Span)> {
        let table = self.provider_section(provider, "cooldown")?;
        let waits = |retry: &Retry| (retry.backoff.base, retry.backoff.cap);
        let of_retries = retry.map(|read| waits(&read.retry)).filter(|own| *own != waits(&Retry::default()));
        let defaults = of_retries.filter(|_| credentials <= 1);
        let keys = (&COOLDOWN.base, &COOLDOWN.cap);
        self.base_and_cap(table, provider.node("cooldown"), keys, defaults, "cool-down")
    }

    /// Reads `adaptive`; `None` inside for `off`.
    pub(super) fn adaptive_limit(&mut self, provider: &TomlTable) -> Option<Option<AdaptiveLimitSpec>> {
        let Some(table) = self.table_unless_off(provider, &PROVIDER.adaptive, true)? else { return Some(None) };
        let spec = read_struct!(self, table, ADAPTIVE => AdaptiveLimitSpec { min, max, initial })?;
        let Err(error) = AdaptiveLimit::new(spec) else { return Some(Some(spec)) };
        let AdaptiveLimitSpec { min, max, initial } = spec;
        let message = format!("`adaptive`: {error}, but they are {min}, {initial} and {max}");
        let expected = "`min` no larger than `initial`, and `initial` no larger than `max`";
        self.error(provider.get("adaptive")?.key_at, message, expected).none()
    }

    /// Reads `breaker`; `None` inside for `off`.
    pub(super) fn breaker(&mut self, provider: &TomlTable) -> Option<Option<BreakerSpec>> {
        let Some(table) = self.table_unless_off(provider, &PROVIDER.breaker, true)? else { return Some(None) };
        let (slow_calls, open) = (self.slow_calls(table), self.open_backoff(table));
        let spec = read_struct!(self, table, BREAKER => BreakerSpec {
            failures, failure_rate, window, min_calls, probes, probe_lease, successes, ramp;
            slow_calls: slow_calls?, open: open?
        })?;
        let Err(error) = Breaker::new(spec.clone()) else { return Some(Some(spec)) };
        self.error(provider.get("breaker")?.key_at, format!("`breaker`: {error}"), "a reason to open it")
            .help("for no breaker at all, write breaker = \"off\"")
            .none()
    }

    fn slow_calls(&mut self, breaker: Option<&TomlTable>) -> Option<Option<SlowCalls>> {
        read_keys!(self, breaker, BREAKER: slow_after, slow_rate);
        let (slow_after, slow_rate) = (slow_after?, slow_rate?);
        if let (None, Some(node)) = (slow_after, breaker.and_then(|table| table.node("slow_rate"))) {
            let message = "`slow_rate` says how many slow calls are too many, but nothing says what is slow";
            return self.error(node.at, message, "`slow_after` beside it, such as slow_after = \"2s\"").none();
        }
        let rate = slow_rate.unwrap_or(DEFAULT_SLOW_RATE);
        Some(slow_after.map(|threshold| SlowCalls { threshold, rate }))
    }

    /// Reads the time for which a breaker stays open: constant, unless a factor or a cap makes it grow.
    fn open_backoff(&mut self, breaker: Option<&TomlTable>) -> Option<Backoff> {
        const CAP: Span = Span::from_secs(3600);
        read_keys!(self, breaker, BREAKER: open, open_factor, open_cap, open_jitter);
        let (base, factor, cap, jitter) = (open?, open_factor?, open_cap?, open_jitter?);
        if let Some(cap) = cap.filter(|cap| *cap < base) {
            let at = breaker.and_then(|breaker| breaker.node("open_cap"))?.at;
            let (longest, first) = (describe_duration(cap), describe_duration(base));
            let message = format!("the longest opening, {longest}, is shorter than the first, {first}");
            return self.error(at, message, "an `open_cap` no shorter than `open`").none();
        }
        if factor.is_none() && cap.is_none() {
            return Some(Backoff { base, cap: base, jitter, ..BreakerSpec::default().open });
        }
        let growth = Growth::Exponential { factor: factor.unwrap_or(2) };
        Some(Backoff { growth, base, cap: cap.unwrap_or(CAP.max(base)), jitter })
    }

    fn ramp(&mut self, node: &TomlNode) -> Option<Vec<RampStep>> {
        const FORM: &str = "\"off\", \"on\", or steps such as [{ share = 0.1, for = \"30s\" }]";
        let items = match &node.value {
            TomlValue::List(items) => items,
            TomlValue::String(_) => {
                let on = self.choice(node, "ramp", &OFF_OR_ON)?;
                return Some(if on { Breaker::DEFAULT_RAMP.to_vec() } else { Vec::new() });
            }
            _ => return self.wrong_type(node, "ramp", FORM).none(),
        };
        if items.is_empty() || items.len() > MAX_RAMP {
            let message = format!("`ramp` has {} steps", items.len());
            return self.error(node.at, message, format!("1 to {MAX_RAMP} steps")).none();
        }
        all_or_none(items.iter().map(|item| {
            let table = item.as_table();
            if let Some(table) = table {
                self.check_keys(table, &format!("{PROVIDER_PATH}.breaker.ramp.#"));
            }
            let Some((share, length)) = table.and_then(|table| Some((table.node("share")?, table.node("for")?))) else {
                let message = format!("a step of `ramp` is {} without `share` and `for`", item.describe(self.texts));
                return self.error(item.at, message, FORM).none();
            };
            let (share, length) = (self.parse(share, &RAMP_STEP.share), self.parse(length, &RAMP_STEP.r#for));
            Some(RampStep { share: share?, length: length? })
        }))
    }

    /// Returns the table under a provider's key; `None` inside if there is none.
    pub(super) fn provider_section<'n>(&mut self, provider: &'n TomlTable, key: &str) -> Option<Option<&'n TomlTable>> {
        if provider.get(key).is_none() {
            return Some(None);
        }
        self.section(Some(provider), key, &format!("{PROVIDER_PATH}.{key}")).map(Some)
    }

    /// Reads a value that the table under a provider's key must have.
    pub(super) fn required<T: Clone>(
        &mut self,
        entry: &TomlEntry,
        table: &TomlTable,
        key: &SettingKey<T>,
        form: &str,
    ) -> Option<T> {
        if let Some(node) = table.node(key.name()) {
            return self.parse(node, key);
        }
        if !self.has_misspelling_of(table, &format!("{PROVIDER_PATH}.{}", entry.key), key.name()) {
            self.report(entry.key_at, format!("{} has no `{}`", quoted(&entry.key), key.name()), form);
        }
        None
    }

    /// Reads `base` and `cap` of a table. The `defaults` replace the keys' own.
    fn base_and_cap(
        &mut self,
        table: Option<&TomlTable>,
        whole: Option<&TomlNode>,
        (base, cap): (&SettingKey<Span>, &SettingKey<Span>),
        defaults: Option<(Span, Span)>,
        what: &str,
    ) -> Option<(Span, Span)> {
        let defaults = defaults.unwrap_or_else(|| (base.default_value(), cap.default_value()));
        let (base, cap) = (self.value_or(table, base, defaults.0), self.value_or(table, cap, defaults.1));
        let (base, cap) = (base?, cap?);
        let written = |key: &str| table.and_then(|table| table.node(key));
        let (written_base, written_cap) = (written("base"), written("cap"));
        if let Some(node) = written_cap.or(written_base).or(whole).filter(|_| cap < base) {
            let message = describe_order(what, base, cap, written_base, written_cap);
            return self.error(node.at, message, "a `cap` no shorter than `base`").none();
        }
        Some((base, cap))
    }
}
