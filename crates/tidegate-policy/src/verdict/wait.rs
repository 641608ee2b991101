//! The wait of a rule: where a reply tells it, or how long it is by convention.

use http::HeaderName;
use tidegate_core::{Calendar as _, Span, Time};

use super::body::{Document, JsonPath};
use super::condition::Pattern;
use super::source::{Exchange, Source, first_group};
use super::times::{ReplyClock, TimeUnit, span};
use crate::calendar::{CivilCalendar, PeriodUnit, zone_or_utc};

/// The end of a period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeriodEnd {
    /// Of a calendar period in a zone, UTC by default.
    Calendar(PeriodUnit, Option<String>),
    /// Of periods of this length since the Unix epoch.
    Aligned(Span),
}

/// A source of a wait.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum WaitSource {
    /// A value, or the first group of a pattern in it, and a time to add.
    Value {
        source: Source,
        pattern: Option<Pattern>,
        unit: TimeUnit,
        extra: Span,
    },
    /// The first group of a pattern in the body's text.
    Text {
        pattern: Pattern,
        unit: TimeUnit,
        extra: Span,
    },
    Fixed(Span),
    Period(PeriodEnd),
    /// The missing amount at a rate: `(missing - left) / per_second`.
    Missing {
        missing: JsonPath,
        left: JsonPath,
        per_second: JsonPath,
    },
}

/// The wait of a rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct WaitRule {
    pub(crate) sources: Vec<WaitSource>,
    /// True for the latest of all sources, false for the first that gives one.
    pub(crate) is_latest: bool,
}

/// A wait and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundWait {
    pub(crate) wait: Span,
    /// The header that tells it, if a header does.
    pub(crate) header: Option<HeaderName>,
}

impl WaitRule {
    pub(crate) fn needs_body(&self) -> bool {
        self.sources.iter().any(WaitSource::needs_body)
    }

    pub(crate) fn find(&self, exchange: &Exchange<'_>, clock: ReplyClock) -> Option<FoundWait> {
        let mut found = self.sources.iter().filter_map(|source| {
            let wait = source.find(exchange, clock)?;
            let header = match source {
                WaitSource::Value { source: Source::Header(name, _), .. } => Some(name.clone()),
                _ => None,
            };
            Some(FoundWait { wait, header })
        });
        if self.is_latest { found.max_by_key(|found| found.wait) } else { found.next() }
    }
}

impl WaitSource {
    pub(crate) fn needs_body(&self) -> bool {
        match self {
            Self::Value { source, .. } => source.needs_body(),
            Self::Text { .. } | Self::Missing { .. } => true,
            Self::Fixed(_) | Self::Period(_) => false,
        }
    }

    fn find(&self, exchange: &Exchange<'_>, clock: ReplyClock) -> Option<Span> {
        let body = exchange.reply.and_then(|reply| reply.body.as_ref());
        match self {
            Self::Value { source, pattern, unit, extra } => {
                let texts = source.texts(exchange);
                let told = texts.iter().filter_map(|text| match pattern {
                    None => Some(text.as_ref()),
                    Some(pattern) => first_group(pattern, text),
                });
                told.filter_map(|text| clock.read(text, *unit)).max().and_then(|wait| later(wait, *extra))
            }
            Self::Text { pattern, unit, extra } => {
                later(clock.read(first_group(pattern, body?.text())?, *unit)?, *extra)
            }
            Self::Fixed(wait) => Some(*wait),
            Self::Period(end) => Some(end.until(clock.now)),
            Self::Missing { missing, left, per_second } => {
                let json = body.and_then(Document::json)?;
                let number = |path: &JsonPath| path.find(json).into_iter().find_map(serde_json::Value::as_f64);
                let (missing, left, per_second) = (number(missing)?, number(left)?, number(per_second)?);
                let seconds = (missing - left) / per_second;
                (per_second > 0.0 && seconds > 0.0).then(|| span((seconds * 1e6).ceil() as u128, 1))
            }
        }
    }
}

/// A wait, zero if its moment is over, with the time to add. `None` if the sum is zero.
fn later(wait: Span, extra: Span) -> Option<Span> {
    Some(wait + extra).filter(|wait| !wait.is_zero())
}

impl PeriodEnd {
    fn until(&self, now: Time) -> Span {
        match self {
            Self::Calendar(unit, zone) => {
                CivilCalendar::new(*unit, zone_or_utc(zone.as_deref())).period(now).end.since(now)
            }
            Self::Aligned(length) => {
                let length = length.as_micros().max(1);
                Span::from_micros(length - now.as_micros() % length)
            }
        }
    }
}
