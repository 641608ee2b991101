//! The sections about the process itself: inbound, api, admin, log.

use std::net::SocketAddr;

use super::DocumentReader;
use crate::address::{Ipv6Prefix, Networks};
use crate::document::{TextRange, TomlNode, TomlTable, TomlValue};
use crate::error::{Error, quoted};
use crate::forwarding::{Forwarding, ForwardingHeader};
use crate::nearest::nearest;
use crate::outbound::OutboundConfig;
use crate::path::{AmbiguousPaths, PathQuirks};
use crate::secret::SecretSource;
use crate::sections::{
    AdminConfig, ApiConfig, HeaderDialect, InboundCaps, InboundConfig, InboundTimeouts, LogConfig, LogFormat, LogLevel,
};

/// The most names in `hosts`.
const MAX_HOSTS: usize = 256;

impl DocumentReader<'_> {
    pub(super) fn inbound(&mut self, root: &TomlTable) -> Option<InboundConfig> {
        let table = self.section(root, "inbound", "inbound");
        let default = InboundConfig::default();
        let listen =
            self.read_or_default(table, "listen", default.listen, |reader, node| reader.listen(node, "listen"));
        let upstream =
            self.read_or_default(table, "upstream", None, |reader, node| reader.upstream(node, "upstream").map(Some));
        let trusted = self.read_or_default(table, "trusted_proxies", Networks::default(), Self::trusted_proxies);
        let header = self.read_or_default(table, "forwarded", ForwardingHeader::default(), |reader, node| {
            let words =
                [("x-forwarded-for", ForwardingHeader::XForwardedFor), ("forwarded", ForwardingHeader::Forwarded)];
            reader.choice(node, "forwarded", &words)
        });
        let path_quirks = self.read_or_default(table, "path_quirks", PathQuirks::default(), Self::path_quirks);
        let ambiguous_paths =
            self.read_or_default(table, "ambiguous_paths", default.ambiguous_paths, |reader, node| {
                let words = [
                    ("union", AmbiguousPaths::Union),
                    ("refuse", AmbiguousPaths::Refuse),
                    ("normalise", AmbiguousPaths::Normalise),
                ];
                reader.choice(node, "ambiguous_paths", &words)
            });
        let ipv6_prefix = self.read_or_default(table, "ipv6_prefix", default.ipv6_prefix, |reader, node| {
            let lengths = Ipv6Prefix::LENGTHS;
            let length = reader.integer(node, "ipv6_prefix", (*lengths.start()).into()..=(*lengths.end()).into())?;
            u8::try_from(length).ok()
        });
        let headers = self.read_or_default(table, "headers", default.headers, |reader, node| {
            let words = [
                ("draft-10", HeaderDialect::Draft10),
                ("draft-7", HeaderDialect::Draft7),
                ("none", HeaderDialect::None),
            ];
            reader.choice(node, "headers", &words)
        });
        let x_ratelimit = self.read_or_default(table, "x_ratelimit", default.x_ratelimit, |reader, node| {
            reader.boolean(node, "x_ratelimit")
        });
        let timeouts = self.timeouts(table);
        let caps = self.caps(table);
        if let Some(table) = table
            && let Some(entry) = table.get("listen")
            && table.get("upstream").is_none()
        {
            let error = Error::new(
                self.texts,
                entry.key_at,
                "[inbound] says where to listen, but not for which server",
                "an `upstream` beside it, such as upstream = \"http://127.0.0.1:3000\"",
            );
            self.push_error(
                error.help("for the decision API alone, leave `listen` out here; [api] has one of its own"),
            );
        }
        Some(InboundConfig {
            listen: listen?,
            upstream: upstream?,
            forwarding: Forwarding { trusted: trusted?, header: header? },
            path_quirks: path_quirks?,
            ambiguous_paths: ambiguous_paths?,
            ipv6_prefix: ipv6_prefix?,
            headers: headers?,
            x_ratelimit: x_ratelimit?,
            timeouts: timeouts?,
            caps: caps?,
        })
    }

    fn trusted_proxies(&mut self, node: &TomlNode) -> Option<Networks> {
        let networks = self.networks(node, "trusted_proxies")?;
        let mut fine = true;
        for (network, at) in &networks {
            if network.prefix_len() == 0 {
                let message = format!(
                    "`trusted_proxies`: {network} trusts everybody, so any client could choose its own address"
                );
                self.report(*at, message, "the networks of your own proxies, such as \"10.0.0.0/8\"");
                fine = false;
            }
        }
        fine.then(|| Networks::new(networks.into_iter().map(|(network, _)| network)))
    }

    fn path_quirks(&mut self, node: &TomlNode) -> Option<PathQuirks> {
        const WORDS: [&str; 5] = ["encoded_slash", "parameters", "case", "caddy", "windows"];
        let expected = "`encoded_slash`, `parameters`, `case`, `caddy` or `windows`";
        // A list replaces the default, so an empty list turns it off.
        let mut quirks = PathQuirks::NONE;
        let mut fine = true;
        for (text, item) in self.strings(node, "path_quirks", expected)? {
            match text {
                "encoded_slash" => quirks.encoded_slash = true,
                "parameters" => quirks.parameters = true,
                "case" => quirks.case = true,
                "caddy" => quirks = PathQuirks { encoded_slash: true, case: true, caddy: true, ..quirks },
                "windows" => quirks = PathQuirks { encoded_slash: true, case: true, windows: true, ..quirks },
                other => {
                    let error = Error::new(self.texts, item.at, format!("unknown quirk {}", quoted(other)), expected);
                    self.push_error(error.did_you_mean(nearest(other, WORDS)));
                    fine = false;
                }
            }
        }
        fine.then_some(quirks)
    }

    fn timeouts(&mut self, inbound: Option<&TomlTable>) -> Option<InboundTimeouts> {
        let table = inbound.and_then(|inbound| self.section(inbound, "timeouts", "inbound.timeouts"));
        let mut timeouts = InboundTimeouts::default();
        let mut fine = true;
        for (key, place) in [
            ("header", &mut timeouts.header),
            ("body", &mut timeouts.body),
            ("connect", &mut timeouts.connect),
            ("response", &mut timeouts.response),
            ("idle", &mut timeouts.idle),
            ("shutdown", &mut timeouts.shutdown),
        ] {
            match self.read_or_default(table, key, *place, |reader, node| reader.timeout(node, key)) {
                Some(timeout) => *place = timeout,
                None => fine = false,
            }
        }
        fine.then_some(timeouts)
    }

    fn caps(&mut self, inbound: Option<&TomlTable>) -> Option<InboundCaps> {
        let table = inbound.and_then(|inbound| self.section(inbound, "caps", "inbound.caps"));
        let default = InboundCaps::default();
        let connections = self.read_or_default(table, "connections", default.connections as usize, |reader, node| {
            reader.integer(node, "connections", 1..=1_000_000).and_then(|count| usize::try_from(count).ok())
        });
        let per_client = self.connections_per_client(table, connections);
        let mut count = |key: &str, default: usize, least: u64, most: u64| {
            self.read_or_default(table, key, default, |reader, node| {
                reader.integer(node, key, least..=most).and_then(|count| usize::try_from(count).ok())
            })
        };
        let headers = count("headers", default.headers, 1, 10_000);
        let pool_idle = count("pool_idle", default.pool_idle, 0, 100_000);
        let header_bytes = self.read_or_default(table, "header_bytes", default.header_bytes, |reader, node| {
            // 8 KiB is the smallest buffer with which hyper reads heads.
            reader.bytes(node, "header_bytes", 8 << 10..=1 << 20).and_then(|bytes| usize::try_from(bytes).ok())
        });
        let body = self.read_or_default(table, "body", default.body, |reader, node| {
            if matches!(&node.value, TomlValue::String(text) if text == "unlimited") {
                return Some(None);
            }
            reader.bytes(node, "body", 0..=u64::MAX >> 1).map(Some)
        });
        let body_rate = self.read_or_default(table, "body_rate", default.body_rate, |reader, node| {
            reader.value_or_word(node, ("off", None), |reader| reader.bytes(node, "body_rate", 1..=1 << 30).map(Some))
        });
        Some(InboundCaps {
            connections: u32::try_from(connections?).ok()?,
            connections_per_client: per_client?,
            header_bytes: header_bytes?,
            headers: headers?,
            body: body?,
            body_rate: body_rate?,
            pool_idle: pool_idle?,
        })
    }

    /// Reads the most connections that one client address may have at a listener. The default is a quarter of all.
    pub(super) fn connections_per_client(
        &mut self,
        table: Option<&TomlTable>,
        connections: Option<usize>,
    ) -> Option<Option<usize>> {
        const KEY: &str = "connections_per_client";
        let default = connections.map(|connections| (connections / 4).max(1));
        self.read_or_default(table, KEY, default, |reader, node| {
            reader.value_or_word(node, ("off", None), |reader| {
                reader.integer(node, KEY, 1..=1_000_000).and_then(|count| usize::try_from(count).ok()).map(Some)
            })
        })
    }

    pub(super) fn api(&mut self, root: &TomlTable) -> Option<ApiConfig> {
        let table = self.section(root, "api", "api");
        let default = ApiConfig::default();
        let (listen, token) = self.listen_and_token(table, default.listen, "the decision API");
        let hosts = self.read_or_default(table, "hosts", Vec::new(), Self::hosts);
        let forward_auth = self.read_or_default(table, "forward_auth", default.forward_auth, |reader, node| {
            reader.boolean(node, "forward_auth")
        });
        let deny_status = self.read_or_default(table, "deny_status", default.deny_status, |reader, node| {
            reader.integer(node, "deny_status", 400..=599).and_then(|status| u16::try_from(status).ok())
        });
        Some(ApiConfig {
            listen: listen?,
            token: token?,
            hosts: hosts?,
            forward_auth: forward_auth?,
            deny_status: deny_status?,
        })
    }

    /// The place where the policy asks for forward-auth: `forward_auth`, or the status that only forward-auth uses.
    /// `None` if it doesn't ask, or if the API is off.
    pub(super) fn forward_auth_range(&self, root: &TomlTable) -> Option<TextRange> {
        let api = root.table("api")?;
        if api.node("listen").is_some_and(is_off) {
            return None;
        }
        match api.node("forward_auth") {
            Some(TomlNode { at, value: TomlValue::Boolean(true) }) => Some(*at),
            Some(_) => None,
            None => api.node("deny_status").map(|node| node.at),
        }
    }

    pub(super) fn admin(&mut self, root: &TomlTable) -> Option<AdminConfig> {
        let table = self.section(root, "admin", "admin");
        let (listen, token) = self.listen_and_token(table, AdminConfig::default().listen, "admin");
        let hosts = self.read_or_default(table, "hosts", Vec::new(), Self::hosts);
        Some(AdminConfig { listen: listen?, token: token?, hosts: hosts? })
    }

    /// Reads a listener, which may be off and needs a token beyond loopback, and its token.
    pub(super) fn listen_and_token(
        &mut self,
        table: Option<&TomlTable>,
        default: Option<SocketAddr>,
        what: &str,
    ) -> (Option<Option<SocketAddr>>, Option<Option<SecretSource>>) {
        let token =
            self.read_or_default(table, "token", None, |reader, node| reader.secret_source(node, "token").map(Some));
        let listen = self.read_or_default(table, "listen", default, |reader, node| {
            reader.value_or_word(node, ("off", None), |reader| {
                let listen = reader.listen(node, "listen")?;
                let such = default.map(|usual| format!(" such as \"{usual}\"")).unwrap_or_default();
                if !listen.ip().to_canonical().is_loopback()
                    && token == Some(None)
                    && !table.is_some_and(|table| reader.has_misspelling_of(table, "admin", "token"))
                {
                    let error = Error::new(
                        reader.texts,
                        node.at,
                        format!("{what} listens beyond loopback ({listen}) without a token, so anybody could use it"),
                        format!("a `token` beside it, or an address on loopback{such}"),
                    );
                    reader.push_error(
                        error.help("add token = \"env:NAME\", with the token in the environment variable NAME"),
                    );
                    return None;
                }
                Some(Some(listen))
            })
        });
        (listen, token)
    }

    /// Reads the names that a request's `Host` may have.
    pub(super) fn hosts(&mut self, node: &TomlNode) -> Option<Vec<String>> {
        const EXPECTED: &str = "a host's name, such as \"gateway.internal\"";
        let words = self.strings(node, "hosts", EXPECTED)?;
        if words.len() > MAX_HOSTS {
            self.report(node.at, format!("`hosts` has {} items", words.len()), format!("at most {MAX_HOSTS}"));
            return None;
        }
        let mut hosts = Vec::new();
        let mut fine = true;
        for (text, item) in words {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
            if !text.is_empty() && text.len() <= 253 && text.bytes().all(fits) {
                hosts.push(text.trim_end_matches('.').to_ascii_lowercase());
                continue;
            }
            fine = false;
            let error =
                Error::new(self.texts, item.at, format!("`hosts`: {} is no host's name", quoted(text)), EXPECTED);
            let bare = text.split_once("://").map_or(text, |(_, rest)| rest);
            let bare = bare.split([':', '/']).next().unwrap_or(bare);
            self.push_error(match text {
                _ if text.contains('*') => error.help("names have no wildcards: write each"),
                _ if text.contains([':', '/']) => error.help(format!("write the name alone: \"{bare}\"")),
                _ => error,
            });
        }
        fine.then_some(hosts)
    }

    pub(super) fn log(&mut self, root: &TomlTable) -> Option<LogConfig> {
        let table = self.section(root, "log", "log");
        let default = LogConfig::default();
        let format = self.read_or_default(table, "format", default.format, |reader, node| {
            reader.choice(node, "format", &[("text", LogFormat::Text), ("json", LogFormat::Json)])
        });
        let level = self.read_or_default(table, "level", default.level, |reader, node| {
            let words = [LogLevel::Error, LogLevel::Warn, LogLevel::Info, LogLevel::Debug, LogLevel::Trace];
            reader.choice(node, "level", &words.map(|level| (level.as_str(), level)))
        });
        let refusals =
            self.read_or_default(table, "refusals_per_second", default.refusals_per_second, |reader, node| {
                reader.integer(node, "refusals_per_second", 1..=1_000_000).and_then(|count| u32::try_from(count).ok())
            });
        Some(LogConfig { format: format?, level: level?, refusals_per_second: refusals? })
    }

    /// Reports listeners that share an address, an upstream that is the gate itself, and a provider that is the
    /// gateway.
    pub(super) fn check_listeners(
        &mut self,
        root: &TomlTable,
        inbound: Option<&InboundConfig>,
        api: Option<&ApiConfig>,
        admin: Option<&AdminConfig>,
        outbound: Option<&Option<OutboundConfig>>,
    ) {
        let outbound = outbound.and_then(Option::as_ref);
        let place =
            |section: &str, key: &str| root.table(section).and_then(|table| table.node(key)).map(|node| node.at);
        let gate = inbound.filter(|inbound| inbound.upstream.is_some());
        let listeners = [
            ("inbound", gate.map(|inbound| inbound.listen)),
            ("api", api.and_then(|api| api.listen)),
            ("admin", admin.and_then(|admin| admin.listen)),
            ("outbound", outbound.and_then(|outbound| outbound.listen)),
        ];
        for (index, (name, address)) in listeners.iter().enumerate() {
            for (other, taken) in &listeners[..index] {
                let (Some(address), Some(taken)) = (address, taken) else {
                    continue;
                };
                let Some(at) = place(name, "listen").or(place(other, "listen")) else {
                    continue;
                };
                if addresses_clash(*address, *taken) {
                    let message = format!("[{name}] and [{other}] would both listen on {address}");
                    self.report(at, message, "an address or a port of its own for each");
                }
            }
        }
        if let Some(inbound) = gate
            && let Some(upstream) = &inbound.upstream
            && let Some(at) = place("inbound", "upstream")
            && is_own_address(upstream.host(), upstream.port(), inbound.listen)
        {
            let message = format!("the upstream {upstream} is the gate's own address");
            self.report(at, message, "the address of the server behind the gate");
        }
        let Some(OutboundConfig { listen: Some(listen), providers, .. }) = outbound else { return };
        for provider in providers {
            let Some(url) = &provider.base_url else { continue };
            let port = url.authority.port_u16().unwrap_or(if url.https { 443 } else { 80 });
            let section = root.table("outbound").and_then(|table| table.table("provider"));
            let at = section.and_then(|table| table.table(&provider.name)).and_then(|table| table.node("base_url"));
            if let Some(node) = at
                && is_own_address(url.authority.host().trim_matches(['[', ']']), port, *listen)
            {
                let message = format!("`base_url` is the address that [outbound] listens on, {listen}");
                self.report(node.at, message, "the root of somebody's API: the gateway would call itself");
            }
        }
    }
}

/// Returns true if the value is `off`.
fn is_off(node: &TomlNode) -> bool {
    matches!(&node.value, TomlValue::String(text) if text == "off")
}

/// Returns true if a host and port are a listener's own address, as far as is known without a DNS lookup.
fn is_own_address(host: &str, port: u16, listen: SocketAddr) -> bool {
    let host = if host == "localhost" { "127.0.0.1" } else { host };
    host.parse().is_ok_and(|ip| addresses_clash(SocketAddr::new(ip, port), listen))
}

/// Returns true if two listeners can't both use their address. Port 0 is a new free port for each.
fn addresses_clash(left: SocketAddr, right: SocketAddr) -> bool {
    let (a, b) = (left.ip().to_canonical(), right.ip().to_canonical());
    let same = a == b || a.is_unspecified() || b.is_unspecified();
    left.port() == right.port() && left.port() != 0 && same
}
