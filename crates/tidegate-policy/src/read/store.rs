//! `[store]`, and the settings of actions for sharing their limits.

use std::path::PathBuf;

use tidegate_core::{CountMode, LeaseSpec, OnOutage, Sharing};

use super::DocumentReader;
use super::actions::{LimitGroup, ParsedPenalty};
use crate::document::{TomlNode, TomlTable};
use crate::error::{Error, quoted};
use crate::nearest::nearest;
use crate::quantity::Quantity;
use crate::secret::Secret;
use crate::store::{ClusterMode, OnFull, StoreConfig, StoreUrl, SyncMode, URL_SCHEMES};

const EXPECTED_URL: &str = "\"memory\", \"file:PATH\", or a URL that begins with redis://, rediss://, redis-sentinel://, \
                    redis-cluster://, mysql://, postgres:// or mongodb://";
const ON_OUTAGE_WORDS: [(&str, OnOutage); 3] =
    [("local", OnOutage::Local), ("allow", OnOutage::Allow), ("deny", OnOutage::Deny)];
/// The longest prefix, in bytes.
const MAX_PREFIX: usize = 32;

impl DocumentReader<'_> {
    pub(super) fn store(&mut self, root: &TomlTable) -> Option<StoreConfig> {
        let table = self.section(root, "store", "store");
        let default = StoreConfig::default();
        let url = self.read_or_default(table, "url", default.url, Self::store_url);
        let max_bytes = self.read_or_default(table, "max_bytes", default.max_bytes, |reader, node| {
            reader.bytes(node, "max_bytes", 64 << 10..=1 << 44)
        });
        let on_outage = self.read_or_default(table, "on_outage", default.on_outage, |reader, node| {
            reader.choice(node, "on_outage", &ON_OUTAGE_WORDS)
        });
        let timeout =
            self.read_or_default(table, "timeout", default.timeout, |reader, node| reader.timeout(node, "timeout"));
        let prefix = self.read_or_default(table, "prefix", default.prefix, Self::store_prefix);
        let hash_key = self
            .read_or_default(table, "hash_key", None, |reader, node| reader.secret_source(node, "hash_key").map(Some));
        let nodes = self.read_or_default(table, "nodes", default.nodes, |reader, node| {
            reader.integer(node, "nodes", 1..=4096).and_then(|nodes| u32::try_from(nodes).ok())
        });
        let sync = self.read_or_default(table, "sync", default.sync, |reader, node| {
            reader.value_or_word(node, ("always", SyncMode::Always), |reader| {
                reader.timeout(node, "sync").map(SyncMode::Within)
            })
        });
        let unsaid = match sync {
            Some(SyncMode::Always) => OnFull::Deny,
            _ => default.on_full,
        };
        let on_full = self.read_or_default(table, "on_full", unsaid, |reader, node| {
            reader.choice(node, "on_full", &[("continue", OnFull::Continue), ("deny", OnFull::Deny)])
        });
        let cluster = self.read_or_default(table, "cluster", default.cluster, |reader, node| {
            reader.choice(node, "cluster", &[("together", ClusterMode::Together), ("reserve", ClusterMode::Reserve)])
        });
        Some(StoreConfig {
            url: url?,
            max_bytes: max_bytes?,
            on_outage: on_outage?,
            timeout: timeout?,
            prefix: prefix?,
            hash_key: hash_key?,
            nodes: nodes?,
            sync: sync?,
            on_full: on_full?,
            cluster: cluster?,
        })
    }

    fn store_url(&mut self, node: &TomlNode) -> Option<StoreUrl> {
        let text = self.string(node, "url", EXPECTED_URL)?;
        if text == "memory" {
            return Some(StoreUrl::Memory);
        }
        let scheme = text.split(':').next().unwrap_or(text);
        let rest = &text[scheme.len()..];
        if scheme == "file" {
            // Both `file:PATH` and `file:///PATH` are valid. Similar forms are accepted.
            let path = rest.trim_start_matches(':');
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                self.report(node.at, "`url` names no file", "\"file:PATH\", such as \"file:/var/lib/tidegate/state\"");
                return None;
            }
            return Some(StoreUrl::File(PathBuf::from(path)));
        }
        match URL_SCHEMES.iter().find(|(known, _)| *known == scheme) {
            Some((_, engine)) if rest.len() > "://".len() && rest.starts_with("://") => {
                Some(StoreUrl::Server(*engine, Secret::new(text)))
            }
            Some(_) => {
                let message = format!("`url` begins with {scheme}, but names no server");
                self.report(node.at, message, format!("a URL such as \"{scheme}://127.0.0.1\""));
                None
            }
            None => {
                // The text after the scheme may be a secret, so the error doesn't show it.
                let known = URL_SCHEMES.map(|(scheme, _)| scheme).into_iter().chain(["memory", "file"]);
                let error = Error::new(self.texts, node.at, format!("unknown store {}", quoted(scheme)), EXPECTED_URL);
                self.push_error(error.did_you_mean(nearest(scheme, known)));
                None
            }
        }
    }

    fn store_prefix(&mut self, node: &TomlNode) -> Option<String> {
        let expected = "small letters, digits and underscores, such as \"tidegate\", at most 32";
        let text = self.string(node, "prefix", expected)?;
        let fits = text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
        if !fits || text.is_empty() || text.len() > MAX_PREFIX || text.starts_with(|first: char| first.is_ascii_digit())
        {
            self.report(node.at, format!("`prefix` is {}", quoted(text)), expected);
            return None;
        }
        Some(text.to_owned())
    }

    /// Reads the sharing of an action's limits, or of the global ones: `on_outage` and `lease`.
    pub(super) fn sharing(&mut self, table: &TomlTable, path: &str) -> Option<Sharing> {
        let on_outage = self.read_or_default(table.into(), "on_outage", self.on_outage, |reader, node| {
            reader.choice(node, "on_outage", &ON_OUTAGE_WORDS)
        });
        let lease = self.read_or_default(table.into(), "lease", None, |reader, node| {
            let Some(table) = node.as_table() else {
                let found = node.describe(reader.texts);
                reader.report(
                    node.at,
                    format!("`lease` is {found}"),
                    "a table, such as { share = 0.1, max_age = \"250ms\" }",
                );
                return None;
            };
            reader.check_keys(table, &format!("{path}.lease"));
            let share = reader.read_or_default(table.into(), "share", 100, |reader, node| {
                let permille = reader.share(node, "share", 1)?;
                if permille > 500 {
                    reader.report(node.at, "`share` is more than a half", "a share from 0.001 to 0.5");
                    return None;
                }
                Some(permille)
            });
            let max_age = reader.read_or_default(table.into(), "max_age", DEFAULT_LEASE_AGE, |reader, node| {
                let span = reader.duration(node, "max_age")?;
                if span > MAX_LEASE_AGE {
                    reader.report(node.at, "`max_age` is longer than a minute", "a duration of at most \"1m\"");
                    return None;
                }
                Some(span)
            });
            Some(Some(LeaseSpec { permille: share?, max_age: max_age? }))
        });
        Some(Sharing { on_outage: on_outage?, lease: lease? })
    }

    /// Reports a `lease` on limits that can't be leased. Returns true if there is no such error.
    pub(super) fn check_lease(&mut self, table: &TomlTable, groups: &[LimitGroup]) -> bool {
        let Some(node) = table.node("lease") else { return true };
        let in_flight = |group: &LimitGroup| {
            group.quantities.iter().any(|(quantity, _)| matches!(quantity, Quantity::InFlight { .. }))
        };
        let why = if groups.iter().any(|group| !matches!(group.penalty, ParsedPenalty::None)) {
            "a limit with a penalty can't be leased: a slice that is refused would be a strike"
        } else if groups.iter().any(in_flight) {
            "a limit on calls in flight can't be leased: its permits are given back one by one"
        } else if groups.iter().any(|group| group.count == CountMode::All) {
            "a limit that counts refused calls can't be leased: those that a node refuses by itself aren't counted"
        } else {
            return true;
        };
        self.report(
            node.at,
            why,
            "a `lease` for limits without penalties, bans, calls in flight and `count = \"all\"`",
        );
        false
    }
}

/// The default of the time for which a leased slice may be spent.
const DEFAULT_LEASE_AGE: tidegate_core::Span = tidegate_core::Span::from_millis(250);
/// The longest such time. Part of a limit may stay unused for this long.
const MAX_LEASE_AGE: tidegate_core::Span = tidegate_core::Span::from_secs(60);
