//! The settings for a provider's failures: `retry`, `budget`, `breaker`, `adaptive`, `cooldown`.

use tidegate_core::breaker::{MAX_PROBES, MAX_RAMP, RampStep, SlowCalls};
use tidegate_core::{
    AdaptiveLimit, AdaptiveLimitSpec, Backoff, Breaker, BreakerSpec, BudgetSpec, Growth, Jitter, Retry, Span,
};

use super::{DocumentReader, TableOrWord};
use crate::document::{TomlEntry, TomlNode, TomlTable, TomlValue};
use crate::error::{Error, quoted};
use crate::units::describe_duration;

/// The most attempts per call.
pub(super) const MAX_ATTEMPTS: u64 = 100;
/// The first and the longest wait between the attempts of a provider with a preset.
const PRESET_BACKOFF: (Span, Span) = (Span::from_secs(1), Span::from_secs(30));
/// The default of the first and the longest cool-down.
const DEFAULT_COOLDOWN: (Span, Span) = (Span::from_secs(1), Span::from_secs(32));
/// The default share of slow calls that opens a breaker, in thousandths.
const DEFAULT_SLOW_RATE: u16 = 500;

/// The words for no value and for the defaults.
const OFF_OR_ON: [(&str, bool); 2] = [("off", false), ("on", true)];

/// A provider's settings for retries.
pub(super) struct ParsedRetry {
    /// The provider's own value; `None` leaves it to the lane.
    pub(super) max_attempts: Option<u32>,
    pub(super) retry: Retry,
}

/// The table that must hold a key.
pub(super) struct RequiredKey<'e> {
    pub(super) table: &'e TomlEntry,
    pub(super) path: &'static str,
    pub(super) form: &'static str,
}

impl DocumentReader<'_> {
    pub(super) fn retry(&mut self, provider: &TomlTable, has_preset: bool) -> Option<ParsedRetry> {
        let table = self.provider_section(provider, "retry")?;
        let default = Retry::default();
        let (base, cap) = match default.backoff {
            _ if has_preset => PRESET_BACKOFF,
            Backoff { base, cap, .. } => (base, cap),
        };
        let max_attempts = self.read_or_default(table, "max_attempts", None, |reader, node| {
            reader.integer_u32(node, "max_attempts", 1, MAX_ATTEMPTS).map(Some)
        });
        let max_token_retries =
            self.read_or_default(table, "max_token_retries", default.max_token_retries, |reader, node| {
                reader.integer_u32(node, "max_token_retries", 0, MAX_ATTEMPTS)
            });
        let factor =
            self.read_or_default(table, "factor", 2, |reader, node| reader.integer_u32(node, "factor", 1, 1000));
        let waits = self.base_and_cap(table, provider.node("retry"), (base, cap), "wait");
        let jitter = self.read_or_default(table, "jitter", Jitter::Full, |reader, node| {
            let words = [
                ("none", Jitter::None),
                ("full", Jitter::Full),
                ("equal", Jitter::Equal),
                ("decorrelated", Jitter::Decorrelated),
                ("additive", Jitter::Additive(Span::from_secs(1))),
            ];
            reader.choice(node, "jitter", &words)
        });
        let max_retry_after =
            self.read_or_default(table, "max_retry_after", default.max_retry_after, |reader, node| {
                reader.duration(node, "max_retry_after")
            });
        let (base, cap) = waits?;
        let growth = Growth::Exponential { factor: factor? };
        let max_attempts = max_attempts?;
        let retry = Retry {
            max_attempts: max_attempts.unwrap_or(default.max_attempts),
            max_token_retries: max_token_retries?,
            backoff: Backoff { growth, base, cap, jitter: jitter? },
            max_retry_after: max_retry_after?,
        };
        Some(ParsedRetry { max_attempts, retry })
    }

    pub(super) fn budget(&mut self, provider: &TomlTable) -> Option<BudgetSpec> {
        let table = self.provider_section(provider, "budget")?;
        let default = BudgetSpec::default();
        let ratio = self.read_or_default(table, "ratio", default.ratio, |reader, node| reader.share(node, "ratio", 0));
        let min = self
            .read_or_default(table, "min", default.min, |reader, node| reader.integer_u32(node, "min", 0, 1_000_000));
        let reserve = self.read_or_default(table, "reserve", default.reserve, |reader, node| {
            reader.integer_u32(node, "reserve", 0, 1_000_000)
        });
        Some(BudgetSpec { ratio: ratio?, min: min?, reserve: reserve? })
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
        let default = of_retries.filter(|_| credentials <= 1).unwrap_or(DEFAULT_COOLDOWN);
        self.base_and_cap(table, provider.node("cooldown"), default, "cool-down")
    }

    /// Reads `adaptive`; `None` inside for `off`.
    pub(super) fn adaptive_limit(&mut self, provider: &TomlTable) -> Option<Option<AdaptiveLimitSpec>> {
        let default = AdaptiveLimitSpec::default();
        let table = match self.table_or_word(provider, "adaptive", "outbound.provider.*.adaptive", &OFF_OR_ON)? {
            TableOrWord::Word(false) => return Some(None),
            TableOrWord::Absent | TableOrWord::Word(true) => return Some(Some(default)),
            TableOrWord::Table(table) => Some(table),
        };
        let mut count = |key: &str, default: u32| {
            self.read_or_default(table, key, default, |reader, node| reader.integer_u32(node, key, 1, 1_000_000))
        };
        let (min, max, initial) =
            (count("min", default.min), count("max", default.max), count("initial", default.initial));
        let spec = AdaptiveLimitSpec { min: min?, max: max?, initial: initial? };
        match AdaptiveLimit::new(spec) {
            Ok(_) => Some(Some(spec)),
            Err(error) => {
                let AdaptiveLimitSpec { min, max, initial } = spec;
                let message = format!("`adaptive`: {error}, but they are {min}, {initial} and {max}");
                let at = provider.get("adaptive")?.key_at;
                self.report(at, message, "`min` no larger than `initial`, and `initial` no larger than `max`");
                None
            }
        }
    }

    /// Reads `breaker`; `None` inside for `off`.
    pub(super) fn breaker(&mut self, provider: &TomlTable) -> Option<Option<BreakerSpec>> {
        let default = BreakerSpec::default();
        let table = match self.table_or_word(provider, "breaker", "outbound.provider.*.breaker", &OFF_OR_ON)? {
            TableOrWord::Word(false) => return Some(None),
            TableOrWord::Absent | TableOrWord::Word(true) => return Some(Some(default)),
            TableOrWord::Table(table) => table,
        };
        let at = provider.get("breaker")?.key_at;
        let failures = self.read_or_default(Some(table), "failures", default.failures, |reader, node| {
            reader.value_or_word(node, ("off", None), |reader| {
                reader.integer_u32(node, "failures", 1, 1_000_000).map(Some)
            })
        });
        let failure_rate =
            self.read_optional(table, "failure_rate", |reader, node| reader.share(node, "failure_rate", 1));
        let slow_after = self.read_optional(table, "slow_after", |reader, node| reader.duration(node, "slow_after"));
        let slow_rate = self.read_optional(table, "slow_rate", |reader, node| reader.share(node, "slow_rate", 1));
        let window =
            self.read_or_default(Some(table), "window", default.window, |reader, node| reader.duration(node, "window"));
        let mut count = |key: &str, default: u32, most: u64| {
            self.read_or_default(Some(table), key, default, |reader, node| reader.integer_u32(node, key, 1, most))
        };
        let min_calls = count("min_calls", default.min_calls, 1_000_000);
        let probes = count("probes", default.probes, MAX_PROBES as u64);
        let successes = count("successes", default.successes, 1_000_000);
        let probe_lease = self.read_or_default(Some(table), "probe_lease", default.probe_lease, |reader, node| {
            reader.duration(node, "probe_lease")
        });
        let open = self.open_backoff(table, default.open);
        let ramp = self.read_or_default(Some(table), "ramp", Vec::new(), Self::ramp);
        let (slow_after, slow_rate) = (slow_after?, slow_rate?);
        if let (None, Some(node)) = (slow_after, table.node("slow_rate")) {
            let message = "`slow_rate` says how many slow calls are too many, but nothing says what is slow";
            self.report(node.at, message, "`slow_after` beside it, such as slow_after = \"2s\"");
            return None;
        }
        let spec = BreakerSpec {
            failures: failures?,
            failure_rate: failure_rate?,
            slow_calls: slow_after
                .map(|threshold| SlowCalls { threshold, rate: slow_rate.unwrap_or(DEFAULT_SLOW_RATE) }),
            window: window?,
            min_calls: min_calls?,
            open: open?,
            probes: probes?,
            probe_lease: probe_lease?,
            successes: successes?,
            ramp: ramp?,
        };
        if let Err(error) = Breaker::new(spec.clone()) {
            let told = Error::new(self.texts, at, format!("`breaker`: {error}"), "a reason to open it");
            self.push_error(told.help("for no breaker at all, write breaker = \"off\""));
            return None;
        }
        Some(Some(spec))
    }

    /// Reads the time for which a breaker stays open: constant, unless a factor or a cap makes it grow.
    fn open_backoff(&mut self, breaker: &TomlTable, default: Backoff) -> Option<Backoff> {
        const CAP: Span = Span::from_secs(3600);
        let base =
            self.read_or_default(Some(breaker), "open", default.base, |reader, node| reader.duration(node, "open"));
        let factor =
            self.read_optional(breaker, "open_factor", |reader, node| reader.integer_u32(node, "open_factor", 1, 1000));
        let cap = self.read_optional(breaker, "open_cap", |reader, node| reader.duration(node, "open_cap"));
        let jitter = self.read_or_default(Some(breaker), "open_jitter", default.jitter, |reader, node| {
            let words = [("none", Jitter::None), ("full", Jitter::Full), ("equal", Jitter::Equal)];
            reader.choice(node, "open_jitter", &words)
        });
        let (base, factor, cap, jitter) = (base?, factor?, cap?, jitter?);
        if let (Some(node), Some(cap)) = (breaker.node("open_cap"), cap)
            && cap < base
        {
            let message = format!(
                "the longest opening, {}, is shorter than the first, {}",
                describe_duration(cap),
                describe_duration(base)
            );
            self.report(node.at, message, "an `open_cap` no shorter than `open`");
            return None;
        }
        if factor.is_none() && cap.is_none() {
            return Some(Backoff { base, cap: base, jitter, ..default });
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
            _ => {
                let found = node.describe(self.texts);
                self.report(node.at, format!("`ramp` is {found}"), FORM);
                return None;
            }
        };
        if items.is_empty() || items.len() > MAX_RAMP {
            self.report(node.at, format!("`ramp` has {} steps", items.len()), format!("1 to {MAX_RAMP} steps"));
            return None;
        }
        let steps: Vec<Option<RampStep>> = items
            .iter()
            .map(|item| {
                let table = item.as_table();
                if let Some(table) = table {
                    self.check_keys(table, "outbound.provider.*.breaker.ramp.#");
                }
                let Some((share, length)) = table.and_then(|table| Some((table.node("share")?, table.node("for")?)))
                else {
                    let found = item.describe(self.texts);
                    self.report(item.at, format!("a step of `ramp` is {found} without `share` and `for`"), FORM);
                    return None;
                };
                let (share, length) = (self.share(share, "share", 1), self.duration(length, "for"));
                Some(RampStep { share: share?, length: length? })
            })
            .collect();
        steps.into_iter().collect()
    }

    /// Returns the table under a provider's key; `None` inside if there is none.
    pub(super) fn provider_section<'n>(&mut self, provider: &'n TomlTable, key: &str) -> Option<Option<&'n TomlTable>> {
        if provider.get(key).is_none() {
            return Some(None);
        }
        self.section(provider, key, &format!("outbound.provider.*.{key}")).map(Some)
    }

    /// Returns a value that must be present.
    pub(super) fn required_node<'n>(
        &mut self,
        table: &'n TomlTable,
        key: &str,
        home: &RequiredKey<'_>,
    ) -> Option<&'n TomlNode> {
        let node = table.node(key);
        if node.is_none() && !self.has_misspelling_of(table, home.path, key) {
            let message = format!("{} has no `{key}`", quoted(&home.table.key));
            self.report(home.table.key_at, message, home.form);
        }
        node
    }

    /// Reads a whole number of 32 bits.
    pub(super) fn integer_u32(&mut self, node: &TomlNode, key: &str, least: u64, most: u64) -> Option<u32> {
        self.integer(node, key, least..=most).and_then(|count| u32::try_from(count).ok())
    }

    /// Reads `base` and `cap` of a table.
    fn base_and_cap(
        &mut self,
        table: Option<&TomlTable>,
        whole: Option<&TomlNode>,
        default: (Span, Span),
        what: &str,
    ) -> Option<(Span, Span)> {
        let base = self.read_or_default(table, "base", default.0, |reader, node| reader.duration(node, "base"));
        let cap = self.read_or_default(table, "cap", default.1, |reader, node| reader.duration(node, "cap"));
        let (base, cap) = (base?, cap?);
        let said = |key: &str| table.and_then(|table| table.node(key));
        if let Some(node) = said("cap").or(said("base")).or(whole)
            && cap < base
        {
            let unsaid = match (said("base"), said("cap")) {
                (None, _) => " (the default base)",
                (_, None) => " (the default cap)",
                _ => "",
            };
            let (longest, first) = (describe_duration(cap), describe_duration(base));
            let message = format!("the longest {what}, {longest}, is shorter than the first, {first}{unsaid}");
            self.report(node.at, message, "a `cap` no shorter than `base`");
            return None;
        }
        Some((base, cap))
    }
}
