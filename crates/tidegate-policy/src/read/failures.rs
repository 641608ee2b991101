//! What a provider's failures lead to: `retry`, `budget`, `breaker`, `adaptive`, `cooldown`.

use tidegate_core::breaker::{MAX_PROBES, MAX_RAMP, RampStep, SlowCalls};
use tidegate_core::{Backoff, Breaker, BreakerSpec, BudgetSpec, Growth, Inflight, InflightSpec, Jitter, Retry, Span};

use super::{Reader, Said};
use crate::document::{Entry, Node, Table, Value};
use crate::error::{Error, quoted};
use crate::units::in_words;

/// The most attempts a call.
pub(super) const MAX_ATTEMPTS: u64 = 100;
/// The first and the longest wait between the attempts of a provider that is made from a preset.
const PRESET_WAITS: (Span, Span) = (Span::from_secs(1), Span::from_secs(30));
/// The first and the longest cool-down of one credential of several.
const COOLDOWN: (Span, Span) = (Span::from_secs(1), Span::from_secs(32));
/// The share of slow calls that opens a breaker, unless said, in thousandths.
const SLOW_RATE: u16 = 500;

/// The choice between nothing and the defaults.
const OFF_OR_ON: [(&str, bool); 2] = [("off", false), ("on", true)];

/// When a provider's calls are tried again.
pub(super) struct RetryRead {
    /// If the provider says it; the lane decides otherwise.
    pub(super) max_attempts: Option<u32>,
    pub(super) retry: Retry,
}

/// Where a value has to be.
pub(super) struct RequiredIn<'e> {
    pub(super) whole: &'e Entry,
    pub(super) path: &'static str,
    pub(super) form: &'static str,
}

impl Reader<'_> {
    pub(super) fn retry(&mut self, provider: &Table, has_preset: bool) -> Option<RetryRead> {
        let table = self.inner(provider, "retry")?;
        let default = Retry::default();
        let (base, cap) = match default.backoff {
            _ if has_preset => PRESET_WAITS,
            Backoff { base, cap, .. } => (base, cap),
        };
        let max_attempts = self.or_default(table, "max_attempts", None, |reader, node| {
            reader.small(node, "max_attempts", 1, MAX_ATTEMPTS).map(Some)
        });
        let max_token_retries =
            self.or_default(table, "max_token_retries", default.max_token_retries, |reader, node| {
                reader.small(node, "max_token_retries", 0, MAX_ATTEMPTS)
            });
        let factor = self.or_default(table, "factor", 2, |reader, node| reader.small(node, "factor", 1, 1000));
        let waits = self.first_and_longest(table, provider.node("retry"), (base, cap), "wait");
        let jitter = self.or_default(table, "jitter", Jitter::Full, |reader, node| {
            let words = [
                ("none", Jitter::None),
                ("full", Jitter::Full),
                ("equal", Jitter::Equal),
                ("decorrelated", Jitter::Decorrelated),
                ("additive", Jitter::Additive(Span::from_secs(1))),
            ];
            reader.choice(node, "jitter", &words)
        });
        let max_retry_after = self.or_default(table, "max_retry_after", default.max_retry_after, |reader, node| {
            reader.span(node, "max_retry_after")
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
        Some(RetryRead { max_attempts, retry })
    }

    pub(super) fn budget(&mut self, provider: &Table) -> Option<BudgetSpec> {
        let table = self.inner(provider, "budget")?;
        let default = BudgetSpec::default();
        let ratio = self.or_default(table, "ratio", default.ratio, |reader, node| reader.share(node, "ratio", 0));
        let min = self.or_default(table, "min", default.min, |reader, node| reader.small(node, "min", 0, 1_000_000));
        let reserve = self
            .or_default(table, "reserve", default.reserve, |reader, node| reader.small(node, "reserve", 0, 1_000_000));
        Some(BudgetSpec { ratio: ratio?, min: min?, reserve: reserve? })
    }

    /// The first and the longest cool-down. Without a second credential, a throttled call waits for the cool-down as it
    /// waits before a retry, so these waits are the default, unless they are themselves left at theirs.
    pub(super) fn cooldown(
        &mut self,
        provider: &Table,
        credentials: usize,
        retry: Option<&RetryRead>,
    ) -> Option<(Span, Span)> {
        let table = self.inner(provider, "cooldown")?;
        let waits = |retry: &Retry| (retry.backoff.base, retry.backoff.cap);
        let of_retries = retry.map(|read| waits(&read.retry)).filter(|own| *own != waits(&Retry::default()));
        let default = of_retries.filter(|_| credentials <= 1).unwrap_or(COOLDOWN);
        self.first_and_longest(table, provider.node("cooldown"), default, "cool-down")
    }

    /// `None` inside for `off`.
    pub(super) fn adaptive(&mut self, provider: &Table) -> Option<Option<InflightSpec>> {
        let default = InflightSpec::default();
        let table = match self.table_or(provider, "adaptive", "outbound.provider.*.adaptive", &OFF_OR_ON)? {
            Said::Word(false) => return Some(None),
            Said::Nothing | Said::Word(true) => return Some(Some(default)),
            Said::Table(table) => Some(table),
        };
        let mut count = |key: &str, default: u32| {
            self.or_default(table, key, default, |reader, node| reader.small(node, key, 1, 1_000_000))
        };
        let (min, max, initial) =
            (count("min", default.min), count("max", default.max), count("initial", default.initial));
        let spec = InflightSpec { min: min?, max: max?, initial: initial? };
        match Inflight::new(spec) {
            Ok(_) => Some(Some(spec)),
            Err(error) => {
                let InflightSpec { min, max, initial } = spec;
                let message = format!("`adaptive`: {error}, but they are {min}, {initial} and {max}");
                let at = provider.get("adaptive")?.key_at;
                self.wrong(at, message, "`min` no larger than `initial`, and `initial` no larger than `max`");
                None
            }
        }
    }

    /// `None` inside for `off`.
    pub(super) fn breaker(&mut self, provider: &Table) -> Option<Option<BreakerSpec>> {
        let default = BreakerSpec::default();
        let table = match self.table_or(provider, "breaker", "outbound.provider.*.breaker", &OFF_OR_ON)? {
            Said::Word(false) => return Some(None),
            Said::Nothing | Said::Word(true) => return Some(Some(default)),
            Said::Table(table) => table,
        };
        let at = provider.get("breaker")?.key_at;
        let failures = self.or_default(Some(table), "failures", default.failures, |reader, node| {
            reader.or_word(node, ("off", None), |reader| reader.small(node, "failures", 1, 1_000_000).map(Some))
        });
        let failure_rate = self.if_said(table, "failure_rate", |reader, node| reader.share(node, "failure_rate", 1));
        let slow_after = self.if_said(table, "slow_after", |reader, node| reader.span(node, "slow_after"));
        let slow_rate = self.if_said(table, "slow_rate", |reader, node| reader.share(node, "slow_rate", 1));
        let window = self.or_default(Some(table), "window", default.window, |reader, node| reader.span(node, "window"));
        let mut count = |key: &str, default: u32, most: u64| {
            self.or_default(Some(table), key, default, |reader, node| reader.small(node, key, 1, most))
        };
        let min_calls = count("min_calls", default.min_calls, 1_000_000);
        let probes = count("probes", default.probes, MAX_PROBES as u64);
        let successes = count("successes", default.successes, 1_000_000);
        let probe_lease = self.or_default(Some(table), "probe_lease", default.probe_lease, |reader, node| {
            reader.span(node, "probe_lease")
        });
        let open = self.open(table, default.open);
        let ramp = self.or_default(Some(table), "ramp", Vec::new(), Self::ramp);
        let (slow_after, slow_rate) = (slow_after?, slow_rate?);
        if let (None, Some(node)) = (slow_after, table.node("slow_rate")) {
            let message = "`slow_rate` says how many slow calls are too many, but nothing says what is slow";
            self.wrong(node.at, message, "`slow_after` beside it, such as slow_after = \"2s\"");
            return None;
        }
        let spec = BreakerSpec {
            failures: failures?,
            failure_rate: failure_rate?,
            slow_calls: slow_after.map(|threshold| SlowCalls { threshold, rate: slow_rate.unwrap_or(SLOW_RATE) }),
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
            self.push(told.help("for no breaker at all, write breaker = \"off\""));
            return None;
        }
        Some(Some(spec))
    }

    /// How long a breaker stays open: always alike, unless a factor or a cap says that it grows.
    fn open(&mut self, breaker: &Table, default: Backoff) -> Option<Backoff> {
        const CAP: Span = Span::from_secs(3600);
        let base = self.or_default(Some(breaker), "open", default.base, |reader, node| reader.span(node, "open"));
        let factor = self.if_said(breaker, "open_factor", |reader, node| reader.small(node, "open_factor", 1, 1000));
        let cap = self.if_said(breaker, "open_cap", |reader, node| reader.span(node, "open_cap"));
        let jitter = self.or_default(Some(breaker), "open_jitter", default.jitter, |reader, node| {
            let words = [("none", Jitter::None), ("full", Jitter::Full), ("equal", Jitter::Equal)];
            reader.choice(node, "open_jitter", &words)
        });
        let (base, factor, cap, jitter) = (base?, factor?, cap?, jitter?);
        if let (Some(node), Some(cap)) = (breaker.node("open_cap"), cap)
            && cap < base
        {
            let message =
                format!("the longest opening, {}, is shorter than the first, {}", in_words(cap), in_words(base));
            self.wrong(node.at, message, "an `open_cap` no shorter than `open`");
            return None;
        }
        if factor.is_none() && cap.is_none() {
            return Some(Backoff { base, cap: base, jitter, ..default });
        }
        let growth = Growth::Exponential { factor: factor.unwrap_or(2) };
        Some(Backoff { growth, base, cap: cap.unwrap_or(CAP.max(base)), jitter })
    }

    fn ramp(&mut self, node: &Node) -> Option<Vec<RampStep>> {
        const FORM: &str = "\"off\", \"on\", or steps such as [{ share = 0.1, for = \"30s\" }]";
        let items = match &node.value {
            Value::List(items) => items,
            Value::Text(_) => {
                let on = self.choice(node, "ramp", &OFF_OR_ON)?;
                return Some(if on { Breaker::RAMP.to_vec() } else { Vec::new() });
            }
            _ => {
                let found = node.described(self.texts);
                self.wrong(node.at, format!("`ramp` is {found}"), FORM);
                return None;
            }
        };
        if items.is_empty() || items.len() > MAX_RAMP {
            self.wrong(node.at, format!("`ramp` has {} steps", items.len()), format!("1 to {MAX_RAMP} steps"));
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
                    let found = item.described(self.texts);
                    self.wrong(item.at, format!("a step of `ramp` is {found} without `share` and `for`"), FORM);
                    return None;
                };
                let (share, length) = (self.share(share, "share", 1), self.span(length, "for"));
                Some(RampStep { share: share?, length: length? })
            })
            .collect();
        steps.into_iter().collect()
    }

    /// The table under a provider's key; `None` inside if there is none.
    pub(super) fn inner<'n>(&mut self, provider: &'n Table, key: &str) -> Option<Option<&'n Table>> {
        if provider.get(key).is_none() {
            return Some(None);
        }
        self.section(provider, key, &format!("outbound.provider.*.{key}")).map(Some)
    }

    /// A value that has to be there.
    pub(super) fn required_in<'n>(&mut self, table: &'n Table, key: &str, home: &RequiredIn<'_>) -> Option<&'n Node> {
        let node = table.node(key);
        if node.is_none() && !self.is_misspelt(table, home.path, key) {
            let message = format!("{} has no `{key}`", quoted(&home.whole.key));
            self.wrong(home.whole.key_at, message, home.form);
        }
        node
    }

    /// A whole number of 32 bits.
    pub(super) fn small(&mut self, node: &Node, key: &str, least: u64, most: u64) -> Option<u32> {
        self.count(node, key, least..=most).and_then(|count| u32::try_from(count).ok())
    }

    /// `base` and `cap` of a table.
    fn first_and_longest(
        &mut self,
        table: Option<&Table>,
        whole: Option<&Node>,
        default: (Span, Span),
        what: &str,
    ) -> Option<(Span, Span)> {
        let base = self.or_default(table, "base", default.0, |reader, node| reader.span(node, "base"));
        let cap = self.or_default(table, "cap", default.1, |reader, node| reader.span(node, "cap"));
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
            let (longest, first) = (in_words(cap), in_words(base));
            let message = format!("the longest {what}, {longest}, is shorter than the first, {first}{unsaid}");
            self.wrong(node.at, message, "a `cap` no shorter than `base`");
            return None;
        }
        Some((base, cap))
    }
}
