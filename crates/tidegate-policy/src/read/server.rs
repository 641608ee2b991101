//! The sections that say how the programme runs: inbound, api, admin, log.

use std::net::SocketAddr;

use super::Reader;
use crate::address::{Ipv6Prefix, Networks};
use crate::document::{At, Node, Table, Value};
use crate::error::{Error, quoted};
use crate::forwarding::{ForwardedBy, Forwarding};
use crate::nearest::nearest;
use crate::outbound::Outbound;
use crate::path::{AmbiguousPaths, PathQuirks};
use crate::secret::TokenSource;
use crate::sections::{Admin, Api, Caps, HeaderDialect, Inbound, Log, LogFormat, LogLevel, Timeouts};

/// The most names that a request's `Host` may have.
const MAX_HOSTS: usize = 256;

impl Reader<'_> {
    pub(super) fn inbound(&mut self, root: &Table) -> Option<Inbound> {
        let table = self.section(root, "inbound", "inbound");
        let default = Inbound::default();
        let listen = self.or_default(table, "listen", default.listen, |reader, node| reader.listen(node, "listen"));
        let upstream =
            self.or_default(table, "upstream", None, |reader, node| reader.upstream(node, "upstream").map(Some));
        let trusted = self.or_default(table, "trusted_proxies", Networks::default(), Self::trusted_proxies);
        let header = self.or_default(table, "forwarded", ForwardedBy::default(), |reader, node| {
            let words = [("x-forwarded-for", ForwardedBy::XForwardedFor), ("forwarded", ForwardedBy::Forwarded)];
            reader.choice(node, "forwarded", &words)
        });
        let path_quirks = self.or_default(table, "path_quirks", PathQuirks::default(), Self::path_quirks);
        let ambiguous_paths = self.or_default(table, "ambiguous_paths", default.ambiguous_paths, |reader, node| {
            let words = [
                ("union", AmbiguousPaths::Union),
                ("refuse", AmbiguousPaths::Refuse),
                ("normalise", AmbiguousPaths::Normalise),
            ];
            reader.choice(node, "ambiguous_paths", &words)
        });
        let ipv6_prefix = self.or_default(table, "ipv6_prefix", default.ipv6_prefix, |reader, node| {
            let lengths = Ipv6Prefix::LENGTHS;
            let length = reader.count(node, "ipv6_prefix", (*lengths.start()).into()..=(*lengths.end()).into())?;
            u8::try_from(length).ok()
        });
        let headers = self.or_default(table, "headers", default.headers, |reader, node| {
            let words = [
                ("draft-10", HeaderDialect::Draft10),
                ("draft-7", HeaderDialect::Draft7),
                ("none", HeaderDialect::None),
            ];
            reader.choice(node, "headers", &words)
        });
        let x_ratelimit =
            self.or_default(table, "x_ratelimit", default.x_ratelimit, |reader, node| reader.flag(node, "x_ratelimit"));
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
            self.push(error.help("for the decision API alone, leave `listen` out here; [api] has one of its own"));
        }
        Some(Inbound {
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

    fn trusted_proxies(&mut self, node: &Node) -> Option<Networks> {
        let networks = self.networks(node, "trusted_proxies")?;
        let mut fine = true;
        for (network, at) in &networks {
            if network.prefix_len() == 0 {
                let message = format!(
                    "`trusted_proxies`: {network} trusts everybody, so any client could choose its own address"
                );
                self.wrong(*at, message, "the networks of your own proxies, such as \"10.0.0.0/8\"");
                fine = false;
            }
        }
        fine.then(|| Networks::new(networks.into_iter().map(|(network, _)| network)))
    }

    fn path_quirks(&mut self, node: &Node) -> Option<PathQuirks> {
        const WORDS: [&str; 5] = ["encoded_slash", "parameters", "case", "caddy", "windows"];
        let expected = "`encoded_slash`, `parameters`, `case`, `caddy` or `windows`";
        // A list says all of them: an empty one turns the default off.
        let mut quirks = PathQuirks::NONE;
        let mut fine = true;
        for (text, item) in self.words(node, "path_quirks", expected)? {
            match text {
                "encoded_slash" => quirks.encoded_slash = true,
                "parameters" => quirks.parameters = true,
                "case" => quirks.case = true,
                "caddy" => quirks = PathQuirks { encoded_slash: true, case: true, caddy: true, ..quirks },
                "windows" => quirks = PathQuirks { encoded_slash: true, case: true, windows: true, ..quirks },
                other => {
                    let error = Error::new(self.texts, item.at, format!("unknown quirk {}", quoted(other)), expected);
                    self.push(error.hint(nearest(other, WORDS)));
                    fine = false;
                }
            }
        }
        fine.then_some(quirks)
    }

    fn timeouts(&mut self, inbound: Option<&Table>) -> Option<Timeouts> {
        let table = inbound.and_then(|inbound| self.section(inbound, "timeouts", "inbound.timeouts"));
        let mut timeouts = Timeouts::default();
        let mut fine = true;
        for (key, place) in [
            ("header", &mut timeouts.header),
            ("body", &mut timeouts.body),
            ("connect", &mut timeouts.connect),
            ("response", &mut timeouts.response),
            ("idle", &mut timeouts.idle),
            ("shutdown", &mut timeouts.shutdown),
        ] {
            match self.or_default(table, key, *place, |reader, node| reader.timeout(node, key)) {
                Some(timeout) => *place = timeout,
                None => fine = false,
            }
        }
        fine.then_some(timeouts)
    }

    fn caps(&mut self, inbound: Option<&Table>) -> Option<Caps> {
        let table = inbound.and_then(|inbound| self.section(inbound, "caps", "inbound.caps"));
        let default = Caps::default();
        let connections = self.or_default(table, "connections", default.connections as usize, |reader, node| {
            reader.count(node, "connections", 1..=1_000_000).and_then(|count| usize::try_from(count).ok())
        });
        let per_client = self.per_client(table, connections);
        let mut count = |key: &str, default: usize, least: u64, most: u64| {
            self.or_default(table, key, default, |reader, node| {
                reader.count(node, key, least..=most).and_then(|count| usize::try_from(count).ok())
            })
        };
        let headers = count("headers", default.headers, 1, 10_000);
        let pool_idle = count("pool_idle", default.pool_idle, 0, 100_000);
        let header_bytes = self.or_default(table, "header_bytes", default.header_bytes, |reader, node| {
            // Eight KiB is the least that hyper reads heads with.
            reader.bytes(node, "header_bytes", 8 << 10..=1 << 20).and_then(|bytes| usize::try_from(bytes).ok())
        });
        let body = self.or_default(table, "body", default.body, |reader, node| {
            if matches!(&node.value, Value::Text(text) if text == "unlimited") {
                return Some(None);
            }
            reader.bytes(node, "body", 0..=u64::MAX >> 1).map(Some)
        });
        let body_rate = self.or_default(table, "body_rate", default.body_rate, |reader, node| {
            reader.or_word(node, ("off", None), |reader| reader.bytes(node, "body_rate", 1..=1 << 30).map(Some))
        });
        Some(Caps {
            connections: u32::try_from(connections?).ok()?,
            connections_per_client: per_client?,
            header_bytes: header_bytes?,
            headers: headers?,
            body: body?,
            body_rate: body_rate?,
            pool_idle: pool_idle?,
        })
    }

    /// The number of a listener's connections that one client address may have.
    pub(super) fn per_client(&mut self, table: Option<&Table>, connections: Option<usize>) -> Option<Option<usize>> {
        const KEY: &str = "connections_per_client";
        let default = connections.map(|connections| (connections / 4).max(1));
        self.or_default(table, KEY, default, |reader, node| {
            reader.or_word(node, ("off", None), |reader| {
                reader.count(node, KEY, 1..=1_000_000).and_then(|count| usize::try_from(count).ok()).map(Some)
            })
        })
    }

    pub(super) fn api(&mut self, root: &Table) -> Option<Api> {
        let table = self.section(root, "api", "api");
        let default = Api::default();
        let (listen, token) = self.guarded(table, default.listen, "the decision API");
        let hosts = self.or_default(table, "hosts", Vec::new(), Self::hosts);
        let forward_auth = self
            .or_default(table, "forward_auth", default.forward_auth, |reader, node| reader.flag(node, "forward_auth"));
        let deny_status = self.or_default(table, "deny_status", default.deny_status, |reader, node| {
            reader.count(node, "deny_status", 400..=599).and_then(|status| u16::try_from(status).ok())
        });
        Some(Api {
            listen: listen?,
            token: token?,
            hosts: hosts?,
            forward_auth: forward_auth?,
            deny_status: deny_status?,
        })
    }

    /// Where the policy says that forward-auth is to be answered: by `forward_auth`, or by the status that only
    /// forward-auth has.
    pub(super) fn forward_auth_wanted(&self, root: &Table) -> Option<At> {
        let api = root.table("api")?;
        if api.node("listen").is_some_and(is_off) {
            return None;
        }
        match api.node("forward_auth") {
            Some(Node { at, value: Value::Flag(true) }) => Some(*at),
            Some(_) => None,
            None => api.node("deny_status").map(|node| node.at),
        }
    }

    pub(super) fn admin(&mut self, root: &Table) -> Option<Admin> {
        let table = self.section(root, "admin", "admin");
        let (listen, token) = self.guarded(table, Admin::default().listen, "admin");
        let hosts = self.or_default(table, "hosts", Vec::new(), Self::hosts);
        Some(Admin { listen: listen?, token: token?, hosts: hosts? })
    }

    /// A listener that may be off, and that needs a token beyond loopback.
    pub(super) fn guarded(
        &mut self,
        table: Option<&Table>,
        default: Option<SocketAddr>,
        what: &str,
    ) -> (Option<Option<SocketAddr>>, Option<Option<TokenSource>>) {
        let token = self.or_default(table, "token", None, |reader, node| reader.token(node, "token").map(Some));
        let listen = self.or_default(table, "listen", default, |reader, node| {
            reader.or_word(node, ("off", None), |reader| {
                let listen = reader.listen(node, "listen")?;
                let such = default.map(|usual| format!(" such as \"{usual}\"")).unwrap_or_default();
                if !listen.ip().to_canonical().is_loopback()
                    && token == Some(None)
                    && !table.is_some_and(|table| reader.is_misspelt(table, "admin", "token"))
                {
                    let error = Error::new(
                        reader.texts,
                        node.at,
                        format!("{what} listens beyond loopback ({listen}) without a token, so anybody could use it"),
                        format!("a `token` beside it, or an address on loopback{such}"),
                    );
                    reader
                        .push(error.help("add token = \"env:NAME\", with the token in the environment variable NAME"));
                    return None;
                }
                Some(Some(listen))
            })
        });
        (listen, token)
    }

    /// Names that a request's `Host` may have.
    pub(super) fn hosts(&mut self, node: &Node) -> Option<Vec<String>> {
        const EXPECTED: &str = "a host's name, such as \"gateway.internal\"";
        let words = self.words(node, "hosts", EXPECTED)?;
        if words.len() > MAX_HOSTS {
            self.wrong(node.at, format!("`hosts` has {} items", words.len()), format!("at most {MAX_HOSTS}"));
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
            self.push(match text {
                _ if text.contains('*') => error.help("names have no wildcards: write each"),
                _ if text.contains([':', '/']) => error.help(format!("write the name alone: \"{bare}\"")),
                _ => error,
            });
        }
        fine.then_some(hosts)
    }

    pub(super) fn log(&mut self, root: &Table) -> Option<Log> {
        let table = self.section(root, "log", "log");
        let default = Log::default();
        let format = self.or_default(table, "format", default.format, |reader, node| {
            reader.choice(node, "format", &[("text", LogFormat::Text), ("json", LogFormat::Json)])
        });
        let level = self.or_default(table, "level", default.level, |reader, node| {
            let words = [LogLevel::Error, LogLevel::Warn, LogLevel::Info, LogLevel::Debug, LogLevel::Trace];
            reader.choice(node, "level", &words.map(|level| (level.as_str(), level)))
        });
        let refusals = self.or_default(table, "refusals_per_second", default.refusals_per_second, |reader, node| {
            reader.count(node, "refusals_per_second", 1..=1_000_000).and_then(|count| u32::try_from(count).ok())
        });
        Some(Log { format: format?, level: level?, refusals_per_second: refusals? })
    }

    /// Two listeners can't share an address, and the gate can't be its own upstream.
    pub(super) fn check_listeners(
        &mut self,
        root: &Table,
        inbound: Option<&Inbound>,
        api: Option<&Api>,
        admin: Option<&Admin>,
        outbound: Option<&Option<Outbound>>,
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
                if clash(*address, *taken) {
                    let message = format!("[{name}] and [{other}] would both listen on {address}");
                    self.wrong(at, message, "an address or a port of its own for each");
                }
            }
        }
        if let Some(inbound) = gate
            && let Some(upstream) = &inbound.upstream
            && let Some(at) = place("inbound", "upstream")
            && reaches(upstream.host(), upstream.port(), inbound.listen)
        {
            let message = format!("the upstream {upstream} is the gate's own address");
            self.wrong(at, message, "the address of the server behind the gate");
        }
        let Some(Outbound { listen: Some(listen), providers, .. }) = outbound else { return };
        for provider in providers {
            let Some(url) = &provider.base_url else { continue };
            let port = url.authority.port_u16().unwrap_or(if url.https { 443 } else { 80 });
            let section = root.table("outbound").and_then(|table| table.table("provider"));
            let at = section.and_then(|table| table.table(&provider.name)).and_then(|table| table.node("base_url"));
            if let Some(node) = at
                && reaches(url.authority.host().trim_matches(['[', ']']), port, *listen)
            {
                let message = format!("`base_url` is the address that [outbound] listens on, {listen}");
                self.wrong(node.at, message, "the root of somebody's API: the gateway would call itself");
            }
        }
    }
}

/// True if something is turned off.
fn is_off(node: &Node) -> bool {
    matches!(&node.value, Value::Text(text) if text == "off")
}

/// Whether a host and port are a listener's own, as far as can be told without looking names up.
fn reaches(host: &str, port: u16, listen: SocketAddr) -> bool {
    let host = if host == "localhost" { "127.0.0.1" } else { host };
    host.parse().is_ok_and(|ip| clash(SocketAddr::new(ip, port), listen))
}

/// Whether two listeners can't both have their address. Port 0 is a free one each time.
fn clash(left: SocketAddr, right: SocketAddr) -> bool {
    let (a, b) = (left.ip().to_canonical(), right.ip().to_canonical());
    let same = a == b || a.is_unspecified() || b.is_unspecified();
    left.port() == right.port() && left.port() != 0 && same
}
