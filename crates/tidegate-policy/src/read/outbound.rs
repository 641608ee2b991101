//! `[outbound]`: the gateway to external APIs, and its providers.

use std::path::PathBuf;

use tidegate_core::Sharing;

use super::forms::{Bytes, Custom, HOSTS, Maybe, OrWord, SECRET, TABLE};
use super::limit_list::LimitList;
use super::listen::{LISTENER_OR_OFF, LISTENING};
use super::provider::PROVIDER;
use super::provider_limits::OutboundLimits;
use super::server::{CONNECTIONS, TOKEN};
use super::{DocumentReader, all_or_none};
use crate::document::{TextRange, TomlNode, TomlTable};
use crate::environment::fold_member_name;
use crate::error::quoted;
use crate::listen::ListenAddress;
use crate::outbound::{OutboundConfig, ProviderConfig};
use crate::policy::Policy;
use crate::secret::SecretSource;
use crate::settings::SettingType::Text;
use crate::settings::key::{Below, read_keys, setting_keys};

/// The most providers in a policy.
const MAX_PROVIDERS: usize = 256;

setting_keys! {
    OUTBOUND: OutboundKeys {
        listen: Vec<ListenAddress> = "127.0.0.1:8081", LISTENER_OR_OFF,
            "the addresses of the gateway to other people's APIs, or off", Below::Beside(&LISTENING);
        token: Option<SecretSource> = "", Maybe(SECRET), TOKEN;
        hosts: Vec<String> = "", HOSTS, "names that a request's Host may have besides loopback's";
        connections: u32 = "1024", CONNECTIONS, "the maximum number of open connections of callers";
        connections_per_client: Option<usize> = "", OrWord("off", CONNECTIONS),
            "the maximum number of open connections of one caller's address, or off; default a quarter of connections";
        cache_bytes: u64 = "64MiB", Bytes(64 << 10, 1 << 44), "the maximum memory for the cached replies of all providers";
        snapshot: Option<PathBuf> = "off",
            Custom(Text, "a file's path, or `off`", |reader, node, _| reader.snapshot(node)),
            "the file that keeps used quotas and cool-downs over a restart, or off";
        provider: () = "", TABLE, "", Below::Names(&PROVIDER);
    }
}

impl DocumentReader<'_> {
    /// Reads `[outbound]`; `None` inside if the policy has no such section.
    pub(super) fn outbound(&mut self, root: &TomlTable) -> Option<Option<OutboundConfig>> {
        let Some(entry) = root.get("outbound") else { return Some(None) };
        let table = self.section(Some(root), "outbound", "outbound")?;
        let named = ("outbound", "the outbound gateway");
        let (listen, token) = self.listen_and_token(Some(table), named, &OUTBOUND.listen, &OUTBOUND.token, false);
        let connections = self.value(table, &OUTBOUND.connections);
        let per_client = self.connections_per_client(Some(table), &OUTBOUND.connections_per_client, connections);
        read_keys!(self, table, OUTBOUND: hosts, cache_bytes, snapshot);
        let sharing = Sharing { on_outage: self.on_outage, lease: None };
        let limits = self.predecessor.and_then(Policy::outbound).map(|earlier| {
            let infos = earlier.limit_infos.iter().map(|info| (info.name.clone(), info.clone()));
            LimitList::following(&earlier.limits, infos)
        });
        let mut collected = OutboundLimits { limits: limits.unwrap_or_default(), sharing };
        let providers = self.providers(table, entry.key_at, &mut collected);
        let (providers, (limits, infos, _)) = (providers?, collected.limits.into_parts());
        let limits = self.numbered_limits(limits)?;
        Some(Some(OutboundConfig {
            listen: listen?,
            token: token?,
            hosts: hosts?,
            connections: connections? as usize,
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
                self.error(node.at, format!("`snapshot`: {} is no file's path", quoted(path)), EXPECTED).none()
            }
            path => Some(Some(PathBuf::from(path))),
        }
    }

    fn providers(
        &mut self,
        outbound: &TomlTable,
        at: TextRange,
        collected: &mut OutboundLimits,
    ) -> Option<Vec<ProviderConfig>> {
        const FORM: &str = "a section for each API, [outbound.provider.NAME]";
        let Some(entry) = outbound.get("provider") else {
            if self.has_misspelling_of(outbound, "outbound", "provider") {
                return None;
            }
            let help = "such as [outbound.provider.tmdb] with preset = \"tmdb\" in it";
            return self.error(at, "[outbound] has no provider", FORM).help(help).none();
        };
        let Some(table) = entry.node.as_table() else {
            let message = format!("`provider` is {}", entry.node.describe(self.texts));
            return self.error(entry.key_at, message, FORM).none();
        };
        if table.entries.is_empty() || table.entries.len() > MAX_PROVIDERS {
            let message = format!("[outbound] has {} providers", table.entries.len());
            return self.error(entry.key_at, message, format!("1 to {MAX_PROVIDERS}")).none();
        }
        all_or_none(table.entries.iter().enumerate().map(|(index, entry)| {
            let folded = fold_member_name(&entry.key);
            let alike = table.entries[..index].iter().find(|other| fold_member_name(&other.key) == folded);
            if let Some(other) = alike {
                self.report_alike((&entry.key, entry.key_at), (&other.key, other.key_at));
            }
            self.provider(entry, collected).filter(|_| alike.is_none())
        }))
    }
}
