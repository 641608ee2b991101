//! The record of a node, as JSON in its announcement.

use rustix::system::uname;
use serde::{Deserialize, Serialize};
use tidegate::Span;
use tidegate_policy::printable;

/// The maximum number of characters of a shown name or version. Another program may have written it.
const MAX_CHARS: usize = 64;
/// The maximum number of bytes of a host name in a default name.
const MAX_HOST_BYTES: usize = 48;
/// The longest believed interval, in milliseconds: a record with a longer one would never count as silent.
const MAX_INTERVAL_MILLIS: u64 = 60_000;
/// The highest believed rate of decisions. No machine decides faster.
const MAX_DECISIONS_PER_SECOND: f64 = 1e9;
/// The longest shown time: a hundred years, in seconds.
const MAX_SECONDS: u64 = 100 * 366 * 86_400;

/// The description of a node by itself. A node of another version may leave out fields, or add some.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct NodeRecord {
    pub(super) name: String,
    pub(super) version: String,
    /// The seconds since its start.
    pub(super) uptime: u64,
    /// The milliseconds between two announcements.
    pub(super) interval_ms: u64,
    /// `None` without `admin.metrics`, and in the first record.
    pub(super) decisions_per_second: Option<f64>,
    /// True while the node decides without the store, or without a part of it.
    pub(super) is_link_down: bool,
    /// The seconds since the link went down or up, or since the start.
    pub(super) link_seconds: u64,
}

impl NodeRecord {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("invariant: texts and numbers are JSON")
    }

    /// Reads the record of another node. What can't be read has the value of an empty record.
    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let mut record: Self = serde_json::from_slice(bytes).unwrap_or_default();
        for text in [&mut record.name, &mut record.version] {
            *text = printable(text).chars().take(MAX_CHARS).collect();
        }
        let is_believed = |rate: &f64| (0.0..=MAX_DECISIONS_PER_SECOND).contains(rate);
        record.decisions_per_second = record.decisions_per_second.filter(is_believed);
        record.uptime = record.uptime.min(MAX_SECONDS);
        record.link_seconds = record.link_seconds.min(MAX_SECONDS);
        record
    }

    pub(super) fn interval(&self) -> Span {
        Span::from_millis(self.interval_ms.min(MAX_INTERVAL_MILLIS))
    }
}

/// `HOST/PROCESS`: the host's name and the number of this process.
pub(super) fn default_name() -> String {
    name_of(&uname().nodename().to_string_lossy(), std::process::id())
}

fn name_of(host: &str, process: u32) -> String {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || ".-_".contains(letter);
    let host: String =
        host.chars().take(MAX_HOST_BYTES).map(|letter| if allowed(letter) { letter } else { '-' }).collect();
    format!("{}/{process}", if host.is_empty() { "localhost" } else { &host })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_names_are_short_and_plain() {
        assert_eq!(name_of("web-1.example", 7), "web-1.example/7");
        assert_eq!(name_of("", 7), "localhost/7");
        assert_eq!(name_of("a\u{202e}<b>", 7), "a--b-/7");
        assert!(name_of(&"x".repeat(300), u32::MAX).len() <= 64);
    }

    #[test]
    fn records_of_other_programs_are_bounded() {
        let record = NodeRecord { name: "a".into(), decisions_per_second: Some(1.5), ..NodeRecord::default() };
        assert_eq!(NodeRecord::from_bytes(&record.to_bytes()), record);
        assert_eq!(NodeRecord::from_bytes(b"\0not json"), NodeRecord::default());
        let foreign = format!(
            "{{\"name\":\"\\u001b[31m{}\",\"decisions_per_second\":-1,\"interval_ms\":{},\"later\":[]}}",
            "n".repeat(500),
            u64::MAX
        );
        let record = NodeRecord::from_bytes(foreign.as_bytes());
        assert_eq!((record.name.chars().count(), record.decisions_per_second), (64, None));
        assert!(record.name.starts_with("\u{fffd}[31mn"), "{}", record.name);
        assert_eq!(record.interval(), Span::from_secs(60));
        for rate in ["1e300", "1e12", "-0.1"] {
            let text = format!(
                "{{\"version\":\"{}\",\"decisions_per_second\":{rate},\"uptime\":{1},\"link_seconds\":{1}}}",
                "1\u{202e}".repeat(200),
                u64::MAX
            );
            let record = NodeRecord::from_bytes(text.as_bytes());
            assert_eq!(
                (record.decisions_per_second, record.uptime, record.link_seconds),
                (None, MAX_SECONDS, MAX_SECONDS)
            );
            assert_eq!(record.version, "1\u{fffd}".repeat(32));
        }
    }
}
