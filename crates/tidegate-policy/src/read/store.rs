//! `[store]`, and the settings of actions for sharing their limits.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use tidegate_core::{LeaseSpec, OnOutage, Sharing, Span};

use super::actions::RULES;
use super::forms::{Bytes, Custom, DURATION, Maybe, OrWord, SECRET, Whole, Words};
use super::{DocumentReader, Reported, store_url};
use crate::document::{TomlNode, TomlTable};
use crate::error::quoted;
use crate::nearest::nearest;
use crate::secret::{Secret, SecretSource};
use crate::settings::SettingType::Text;
use crate::settings::key::{read_struct, setting_keys};
use crate::store::{ClusterMode, OnFull, StoreConfig, StoreUrl, SyncMode, URL_SCHEMES};

pub(super) const OUTAGES: Words<OnOutage> =
    Words(&[("local", OnOutage::Local), ("allow", OnOutage::Allow), ("deny", OnOutage::Deny)]);
/// The longest prefix, in bytes.
const MAX_PREFIX: usize = 32;
/// The longest name of a node, in bytes.
const MAX_NODE_NAME: usize = 64;
/// The least and the longest time for which a silent node is listed.
const NODE_EXPIRY: RangeInclusive<Span> = Span::from_secs(2)..=Span::from_secs(86_400);
/// The longest time for which a leased slice may be spent. Part of a limit may stay unused for this long.
const MAX_LEASE_AGE: Span = Span::from_secs(60);

setting_keys! {
    STORE: StoreKeys {
        url: StoreUrl = "memory",
            Custom(Text, "`memory`, `file:PATH` or a server's URL", |reader, node, _| reader.store_url(node)),
            "the place of counts: memory, file:PATH, or the URL of a server that nodes share";
        max_bytes: u64 = "64MiB", Bytes(64 << 10, 1 << 44), "the maximum memory for counts";
        on_outage: OnOutage = "local", OUTAGES, "the rule while a shared store is away: local, allow or deny";
        timeout: Duration = "50ms", DURATION, "the time that a decision waits for a shared store";
        prefix: String = "tidegate",
            Custom(Text, "small letters, digits and underscores, at most 32", |reader, node, _| reader.store_prefix(node)),
            "the beginning of all names in a shared store";
        hash_key: Option<SecretSource> = "", Maybe(SECRET),
            "the secret that keys are hashed under, as env:NAME; by default kept in the store";
        nodes: u32 = "1", Whole(1, 4096), "the number of nodes that share the store, until the store reports it";
        node_name: Option<String> = "",
            Maybe(Custom(Text, "letters, digits and . _ : / -, at most 64", |reader, node, _| reader.node_name(node))),
            "the name of this node in the list of nodes; by default its host name and the number of its process";
        node_expiry: Span = "10m",
            Custom(Text, "a duration from 2s to 24h", |reader, node, key| reader.node_expiry(node, key)),
            "the time for which a node that has fallen silent stays in the list of nodes";
        sync: Option<Duration> = "100ms", OrWord("always", DURATION),
            "the longest time from a change to its write to the file, or always";
        on_full: OnFull = "", Words(&[("continue", OnFull::Continue), ("deny", OnFull::Deny)]),
            "the rule while a file can't be written: continue or deny; default deny with sync = always, else continue";
        cluster: ClusterMode = "together",
            Words(&[("together", ClusterMode::Together), ("reserve", ClusterMode::Reserve)]),
            "a decision's keys in a cluster: together on one server, or reserve to charge one after the other";
    }

    /// The keys of a `lease`.
    LEASE: LeaseKeys {
        share: u16 = "0.1", Custom(Text, "a share from 0.001 to 0.5", lease_share),
            "the size of a slice as a share of the limit, up to 0.5";
        max_age: Span = "250ms", Custom(Text, "a duration of at most a minute", lease_age),
            "the time for which a slice may be used";
    }
}

impl DocumentReader<'_> {
    pub(crate) fn store(&mut self, root: &TomlTable) -> Option<StoreConfig> {
        let table = self.section(Some(root), "store", "store");
        let sync = self.value(table, &STORE.sync).map(|within| within.map_or(SyncMode::Always, SyncMode::Within));
        let default = if sync == Some(SyncMode::Always) { OnFull::Deny } else { OnFull::Continue };
        let on_full = self.value_or(table, &STORE.on_full, default);
        read_struct!(self, table, STORE => StoreConfig {
            url, max_bytes, on_outage, timeout, prefix, hash_key, nodes, node_name, node_expiry,
            cluster; sync: sync?, on_full: on_full?
        })
    }

    fn store_url(&mut self, node: &TomlNode) -> Option<StoreUrl> {
        let text = self.string(node, "url", &expected_url())?;
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
                let expected = "\"file:PATH\", such as \"file:/var/lib/tidegate/state\"";
                return self.error(node.at, "`url` names no file", expected).none();
            }
            return Some(StoreUrl::File(PathBuf::from(path)));
        }
        match URL_SCHEMES.iter().find(|(known, _)| *known == scheme) {
            Some((_, engine)) if rest.len() > "://".len() && rest.starts_with("://") => {
                match store_url::find_fault(scheme, &rest["://".len()..]) {
                    None => Some(StoreUrl::Server(*engine, Secret::new(text))),
                    // A password may be anywhere in a wrong URL.
                    Some((message, expected)) => self.hidden_error(node.at, message, expected).none(),
                }
            }
            Some(_) => {
                let message = format!("`url` begins with {scheme}, but names no server");
                self.url_error(node, text, message, format!("a URL such as \"{scheme}://127.0.0.1\"")).none()
            }
            None => {
                // The text after the scheme may be a secret, so the error doesn't show it.
                let known = URL_SCHEMES.map(|(scheme, _)| scheme).into_iter().chain(["memory", "file"]);
                let message = format!("unknown store {}", quoted(scheme));
                self.url_error(node, text, message, expected_url()).did_you_mean(nearest(scheme, known)).none()
            }
        }
    }

    /// Reports a wrong URL, and hides one that may have a password in an unusual place.
    fn url_error(&mut self, node: &TomlNode, text: &str, message: String, expected: String) -> Reported<'_> {
        match text.contains('@') && !text.contains("://") {
            true => self.hidden_error(node.at, message, expected),
            false => self.error(node.at, message, expected),
        }
    }

    fn store_prefix(&mut self, node: &TomlNode) -> Option<String> {
        let expected = "small letters, digits and underscores, such as \"tidegate\", at most 32";
        let text = self.string(node, "prefix", expected)?;
        let fits = text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
        if !fits || text.is_empty() || text.len() > MAX_PREFIX || text.starts_with(|first: char| first.is_ascii_digit())
        {
            return self.wrong_text(node, "prefix", text, expected).none();
        }
        Some(text.to_owned())
    }

    fn node_name(&mut self, node: &TomlNode) -> Option<String> {
        let expected = "letters, digits and . _ : / -, such as \"web-1\", at most 64";
        let text = self.string(node, "node_name", expected)?;
        let fits = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._:/-".contains(&byte));
        if !fits || text.is_empty() || text.len() > MAX_NODE_NAME {
            return self.wrong_text(node, "node_name", text, expected).none();
        }
        Some(text.to_owned())
    }

    fn node_expiry(&mut self, node: &TomlNode, key: &str) -> Option<Span> {
        let span = self.duration(node, key)?;
        if !NODE_EXPIRY.contains(&span) {
            return self.error(node.at, format!("`{key}` is out of range"), "a duration from \"2s\" to \"24h\"").none();
        }
        Some(span)
    }

    /// Reads the sharing of an action's limits, or of the global ones: `on_outage` and `lease`.
    pub(super) fn sharing(&mut self, table: &TomlTable, path: &str) -> Option<Sharing> {
        let on_outage = self.value_or(table, &RULES.on_outage, self.on_outage);
        let lease = match table.node("lease") {
            Some(node) => self.lease(node, path).map(Some),
            None => Some(None),
        };
        Some(Sharing { on_outage: on_outage?, lease: lease? })
    }

    fn lease(&mut self, node: &TomlNode, path: &str) -> Option<LeaseSpec> {
        let Some(table) = node.as_table() else {
            return self.wrong_type(node, "lease", "a table, such as { share = 0.1, max_age = \"250ms\" }").none();
        };
        self.check_keys(table, &format!("{path}.lease"));
        let (share, max_age) = (self.value(table, &LEASE.share), self.value(table, &LEASE.max_age));
        Some(LeaseSpec { permille: share?, max_age: max_age? })
    }
}

fn expected_url() -> String {
    let schemes = URL_SCHEMES.map(|(scheme, _)| format!("{scheme}://")).join(", ");
    format!("\"memory\", \"file:PATH\", or a URL that begins with one of {schemes}")
}

fn lease_share(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<u16> {
    let permille = reader.share(node, key, 1)?;
    if permille > 500 {
        return reader.error(node.at, "`share` is more than a half", "a share from 0.001 to 0.5").none();
    }
    Some(permille)
}

fn lease_age(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Span> {
    let span = reader.duration(node, key)?;
    if span > MAX_LEASE_AGE {
        return reader.error(node.at, "`max_age` is longer than a minute", "a duration of at most \"1m\"").none();
    }
    Some(span)
}

#[cfg(test)]
mod tests {
    use crate::{Policy, PolicySources};

    #[test]
    fn urls_that_no_store_can_use_are_errors() {
        for (url, message) in [
            ("redis://h:99999", "port"),
            ("redis://h:0", "port"),
            ("redis://h:", "port"),
            ("redis://:hunter2", "host"),
            ("redis://h:9?hunter2@db", "parameters"),
            ("mongodb://hunter2:hunter2@", "host"),
            ("redis://:hunter2@a,b", "several servers"),
            ("redis://:hunter2@h:6379/notanumber", "database"),
            ("redis:///user:hunter2@h:6379 x", "port"),
            ("redis://:hunter2@", "host"),
            ("rediss://:hunter2@h?db=3", "parameters"),
            ("redis-cluster://a:1,b:x", "port"),
            ("redis-sentinel://:hunter2@h", "service"),
            ("redis-sentinel://h/", "service"),
            ("redis-sentinel://h/main/x", "database"),
            ("postgres://h:xx/db", "port"),
            ("postgres://user:hunter2@a b/db", "host"),
            ("mysql://user:hunter2@[::g]/db", "host"),
            ("mongodb://user:hunter2@a,b:x/db", "port"),
        ] {
            let text = format!("[store]\nurl = \"{url}\"\n");
            let errors = Policy::load(PolicySources::new().file("t", text)).expect_err(url);
            let error = errors.iter().next().expect("an error");
            assert!(error.message().contains(message), "{url}: {error}");
            assert_eq!((errors.count(), error.location().to_string()), (1, "t:2:7".to_owned()), "{url}");
            assert!(!errors.to_string().contains("hunter2"), "{errors}");
        }
    }

    #[test]
    fn usual_store_urls_are_valid() {
        for url in [
            "redis://localhost",
            "redis://:pa/ss@h:6379/3/",
            "rediss://[::1]:7000",
            "redis-cluster://a:1,b,c:3",
            "redis-sentinel://u:p%40ss@a,b:5/main/2",
            "mysql://root@db_1/tidegate?ssl-mode=REQUIRED",
            "postgres:///db?host=/run/postgresql",
            "mongodb://a:1,b:2/db?replicaSet=main",
            "mongodb://%2Frun%2Fmongo.sock/db",
        ] {
            let text = format!("[store]\nurl = \"{url}\"\n");
            Policy::load(PolicySources::new().file("t", text)).unwrap_or_else(|errors| panic!("{errors}"));
        }
    }
}
