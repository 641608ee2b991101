//! `[outbound]`: the gateway to external APIs, and its providers.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use tidegate_core::Limits;

use tidegate_core::Sharing;

use super::DocumentReader;
use super::provider_limits::OutboundLimitCollector;
use crate::document::{TextRange, TomlNode, TomlTable};
use crate::environment::fold_member_name;
use crate::error::{Error, quoted};
use crate::outbound::{OutboundConfig, ProviderConfig};

/// The most providers in a policy.
const MAX_PROVIDERS: usize = 256;
/// The default limit of callers' connections.
const DEFAULT_CONNECTIONS: usize = 1024;
/// The default limit of cached replies, in bytes.
const DEFAULT_CACHE_BYTES: u64 = 64 << 20;

impl DocumentReader<'_> {
    /// Reads `[outbound]`; `None` inside if the policy has no such section.
    pub(super) fn outbound(&mut self, root: &TomlTable, whole: TextRange) -> Option<Option<OutboundConfig>> {
        let Some(entry) = root.get("outbound") else { return Some(None) };
        let table = self.section(root, "outbound", "outbound")?;
        let usual = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8081);
        let (listen, token) = self.listen_and_token(Some(table), Some(usual), "the outbound gateway");
        let hosts = self.read_or_default(Some(table), "hosts", Vec::new(), Self::hosts);
        let connections = self.read_or_default(Some(table), "connections", DEFAULT_CONNECTIONS, |reader, node| {
            reader.integer(node, "connections", 1..=1_000_000).and_then(|count| usize::try_from(count).ok())
        });
        let per_client = self.connections_per_client(Some(table), connections);
        let cache_bytes = self.read_or_default(Some(table), "cache_bytes", DEFAULT_CACHE_BYTES, |reader, node| {
            reader.bytes(node, "cache_bytes", 64 << 10..=1 << 44)
        });
        let snapshot = self.read_or_default(Some(table), "snapshot", None, Self::snapshot);
        let sharing = Sharing { on_outage: self.on_outage, lease: None };
        let mut collected = OutboundLimitCollector { sharing, ..OutboundLimitCollector::default() };
        let providers = self.providers(table, entry.key_at, &mut collected);
        let (providers, OutboundLimitCollector { limits, infos, .. }) = (providers?, collected);
        let limits = match Limits::new(limits) {
            Ok(limits) => Arc::new(limits),
            Err(error) => {
                self.report(whole, error.to_string(), "fewer limits");
                return None;
            }
        };
        Some(Some(OutboundConfig {
            listen: listen?,
            token: token?,
            hosts: hosts?,
            connections: connections?,
            connections_per_client: per_client?,
            cache_bytes: cache_bytes?,
            snapshot: snapshot?,
            providers,
            limits,
            limit_infos: infos,
        }))
    }

    fn snapshot(&mut self, node: &TomlNode) -> Option<Option<PathBuf>> {
        const EXPECTED: &str = "a file's path, such as \"/var/lib/tidegate/outbound.json\", or \"off\"";
        match self.string(node, "snapshot", EXPECTED)? {
            "off" => Some(None),
            path if path.is_empty() || path.ends_with('/') || path.contains(char::is_control) => {
                self.report(node.at, format!("`snapshot`: {} is no file's path", quoted(path)), EXPECTED);
                None
            }
            path => Some(Some(PathBuf::from(path))),
        }
    }

    fn providers(
        &mut self,
        outbound: &TomlTable,
        at: TextRange,
        collected: &mut OutboundLimitCollector,
    ) -> Option<Vec<ProviderConfig>> {
        const FORM: &str = "a section for each API, [outbound.provider.NAME]";
        let Some(entry) = outbound.get("provider") else {
            if !self.has_misspelling_of(outbound, "outbound", "provider") {
                let error = Error::new(self.texts, at, "[outbound] has no provider", FORM);
                self.push_error(error.help("such as [outbound.provider.tmdb] with preset = \"tmdb\" in it"));
            }
            return None;
        };
        let Some(table) = entry.node.as_table() else {
            let found = entry.node.describe(self.texts);
            self.report(entry.key_at, format!("`provider` is {found}"), FORM);
            return None;
        };
        if table.entries.is_empty() || table.entries.len() > MAX_PROVIDERS {
            let message = format!("[outbound] has {} providers", table.entries.len());
            self.report(entry.key_at, message, format!("1 to {MAX_PROVIDERS}"));
            return None;
        }
        let mut providers = Vec::new();
        let mut fine = true;
        for (index, entry) in table.entries.iter().enumerate() {
            let alike = table.entries[..index]
                .iter()
                .find(|other| fold_member_name(&other.key) == fold_member_name(&entry.key));
            if let Some(other) = alike {
                let message = format!(
                    "{} and {} differ only in ways that a variable's name can't show",
                    quoted(&entry.key),
                    quoted(&other.key)
                );
                let expected = "names that differ in more than case and dashes";
                let error = Error::new(self.texts, entry.key_at, message, expected);
                let pointer = self.texts.describe_location(other.key_at);
                self.push_error(error.help(format!("the other stands {pointer}")));
                fine = false;
            }
            match self.provider(entry, collected) {
                Some(provider) => providers.push(provider),
                None => fine = false,
            }
        }
        fine.then_some(providers)
    }
}
