//! The configuration of [Envoy's ratelimit service](https://github.com/envoyproxy/ratelimit), and the same limits as a
//! policy.
//!
//! The files are read as that service reads them: it refuses the same ones, and with the same rules. Errors have their
//! place and the nearest valid name, and [notes](RatelimitConfig::notes) tell what the service would silently ignore.
//!
//! A file that is a list has limits in the format of [limitador](https://github.com/Kuadrant/limitador), each with conditions
//! ([`ConditionalLimit`]). They need the feature `limitador`.
//!
//! ```
//! use tidegate_policy::ratelimit_yaml::{Amount, RatelimitConfig, Unit};
//!
//! let yaml = b"{domain: edge, descriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 60}}]}";
//! let config = RatelimitConfig::read([("edge.yaml", yaml)], false)?;
//! let limit = config.domains()[0].descriptors[0].limit.as_ref();
//! assert_eq!(limit.map(|limit| limit.amount), Some(Amount::PerUnit { requests: 60, unit: Unit::Minute }));
//! assert!(config.to_policy().contains(r#"limit = "60 per minute""#));
//! # Ok::<(), tidegate_policy::Errors>(())
//! ```

mod check;
mod expressions;
mod files;
mod limitador;
mod lookup;
mod names;
mod read;
mod scalar;
mod to_policy;
mod yaml;

use std::fmt;

#[cfg(feature = "limitador")]
pub use self::expressions::is_evaluating;
pub use self::files::{UnreadableFileError, list_files, read_files};
pub use self::limitador::ConditionalLimit;
pub use self::lookup::{DescriptorLimit, FoundLimit, LimitTable};
use crate::calendar::PeriodUnit;
use crate::error::{Errors, Note};

/// The most descriptors in all files together.
pub const MAX_DESCRIPTORS: usize = 20_000;
/// The most notes that are kept. Further ones are dropped.
const MAX_NOTES: usize = 50;

/// A checked configuration: the limits of all domains.
#[derive(Clone, Debug)]
pub struct RatelimitConfig {
    domains: Vec<Domain>,
    conditional: Vec<ConditionalLimit>,
    notes: Vec<Note>,
}

/// A domain: a namespace of descriptors, which each request names.
#[derive(Clone, Debug, PartialEq)]
pub struct Domain {
    /// The name.
    pub name: String,
    /// The descriptors at the first level.
    pub descriptors: Vec<Descriptor>,
}

/// One level of a descriptor: an entry that requests may have, its limit, and the entries that may follow it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Descriptor {
    /// The key of the entry.
    pub key: String,
    /// The value of the entry; `None` matches every value without a descriptor of its own. Each `*` stands for any text.
    pub value: Option<String>,
    /// The limit of requests that end with this entry.
    pub limit: Option<RateLimit>,
    /// True to count and never refuse: `shadow_mode`.
    pub shadow_mode: bool,
    /// True to refuse a request only if all its limits of this kind refuse it: `quota_mode`.
    pub quota_mode: bool,
    /// True to name the request's values in metrics: `detailed_metric`.
    pub detailed_metric: bool,
    /// True to name this entry's value in metrics: `value_to_metric`.
    pub value_to_metric: bool,
    /// True if all values that match a `*` share one count: `share_threshold`.
    pub share_threshold: bool,
    /// The data that answers carry: `metadata`.
    pub metadata: serde_json::Map<String, serde_json::Value>,
    /// The descriptors at the next level.
    pub descriptors: Vec<Self>,
}

/// The limit of a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// The name, for `replaces`.
    pub name: Option<String>,
    /// The names of limits that don't apply to a request that meets this one.
    pub replaces: Vec<String>,
    /// The number of requests.
    pub amount: Amount,
}

/// The number of requests that a limit admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// All requests.
    Unlimited,
    /// A number of requests in each unit of time.
    PerUnit {
        /// The number.
        requests: u32,
        /// The unit.
        unit: Unit,
    },
    /// A number of hits in each window of so many seconds.
    PerSeconds {
        /// The number, 0 to 2^40.
        hits: u64,
        /// The length of the window in seconds, 1 to 2^31.
        seconds: u64,
    },
}

/// A unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A second.
    Second,
    /// A minute.
    Minute,
    /// An hour.
    Hour,
    /// A day of 24 hours.
    Day,
    /// A week: seven days.
    Week,
    /// A month: 30 days.
    Month,
    /// A year: 365 days.
    Year,
}

impl RatelimitConfig {
    /// Reads the text of all files, each with the name that errors call it. Two files may have one domain only if
    /// `merge_domains` is true.
    ///
    /// # Errors
    /// All errors of the files, each with its place and, if there is one, the nearest name that is valid.
    pub fn read<N: AsRef<str>, B: AsRef<[u8]>>(
        files: impl IntoIterator<Item = (N, B)>,
        merge_domains: bool,
    ) -> Result<Self, Errors> {
        let mut reader = read::Reader::new(merge_domains);
        for (name, body) in files {
            reader.file(name.as_ref(), body.as_ref());
        }
        reader.finish()
    }

    /// The domains, in the order of the files.
    pub fn domains(&self) -> &[Domain] {
        &self.domains
    }

    /// The limits of files in [limitador](https://github.com/Kuadrant/limitador)'s format, which are lists.
    pub fn conditional_limits(&self) -> &[ConditionalLimit] {
        &self.conditional
    }

    /// Remarks on settings that have no effect.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }
}

impl Descriptor {
    /// The key, or `KEY_VALUE`: the name of the descriptor among those of its level, and in metrics.
    pub fn composite_key(&self) -> String {
        match &self.value {
            Some(value) => format!("{}_{value}", self.key),
            None => self.key.clone(),
        }
    }

    /// True if a `*` stands for any text.
    pub fn is_wildcard(&self) -> bool {
        self.key.contains('*') || self.value.as_ref().is_some_and(|value| value.contains('*'))
    }
}

impl Unit {
    /// All units, the shortest first.
    pub const ALL: [Self; 7] = [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// The length in seconds.
    pub fn seconds(self) -> u64 {
        match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3600,
            Self::Day => 86_400,
            Self::Week => 7 * 86_400,
            Self::Month => 30 * 86_400,
            Self::Year => 365 * 86_400,
        }
    }

    /// The name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// The unit of this name, in any case.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.name().eq_ignore_ascii_case(name))
    }
}

impl From<Unit> for PeriodUnit {
    fn from(unit: Unit) -> Self {
        match unit {
            Unit::Second => Self::Second,
            Unit::Minute => Self::Minute,
            Unit::Hour => Self::Hour,
            Unit::Day => Self::Day,
            Unit::Week => Self::Week,
            Unit::Month => Self::Month,
            Unit::Year => Self::Year,
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
