//! The sections about the process itself: inbound, api, admin, log.

use std::net::SocketAddr;
use std::time::Duration;

use ipnet::IpNet;

use super::actions::{ACTION, GLOBAL, MODE};
use super::forms::{
    Bytes, Custom, DURATION, FLAG, HOSTS, LISTENER, Maybe, NETWORKS, OrWord, SECRET, TABLE, Whole, Words,
};
use super::tokens::TOKENS;
use super::{DocumentReader, all_or_none, join_names};
use crate::address::{Ipv6Prefix, Networks};
use crate::document::{TextRange, TomlNode, TomlTable, TomlValue};
use crate::error::quoted;
use crate::forwarding::{Forwarding, ForwardingHeader};
use crate::nearest::nearest;
use crate::outbound::OutboundConfig;
use crate::path::{AmbiguousPaths, PathQuirks};
use crate::secret::SecretSource;
use crate::sections::{
    AccessLogMode, AdminConfig, ApiConfig, HeaderDialect, InboundCaps, InboundConfig, InboundTimeouts, LogConfig,
    LogFormat, LogLevel, NamedToken, ReloadConfig, UpstreamAddress,
};
use crate::settings::SettingType::{Strings, Text};
use crate::settings::key::{Below, SettingKey, read_struct, setting_keys};

/// The most names in `hosts`.
const MAX_HOSTS: usize = 256;
pub(super) const CONNECTIONS: Whole = Whole(1, 1_000_000);

pub(super) const TOKEN: &str = "the place of the bearer token: env:NAME or file:PATH; required beyond loopback";

const QUIRKS: [&str; 5] = ["encoded_slash", "parameters", "case", "caddy", "windows"];
const FORWARDING_HEADERS: [(&str, ForwardingHeader); 2] =
    [("x-forwarded-for", ForwardingHeader::XForwardedFor), ("forwarded", ForwardingHeader::Forwarded)];
const AMBIGUOUS_PATHS: [(&str, AmbiguousPaths); 3] =
    [("union", AmbiguousPaths::Union), ("refuse", AmbiguousPaths::Refuse), ("normalise", AmbiguousPaths::Normalise)];
const HEADER_DIALECTS: [(&str, HeaderDialect); 3] =
    [("draft-10", HeaderDialect::Draft10), ("draft-7", HeaderDialect::Draft7), ("none", HeaderDialect::None)];
const ACCESS_LOG_MODES: [(&str, AccessLogMode); 3] =
    [("off", AccessLogMode::Off), ("refused", AccessLogMode::Refused), ("all", AccessLogMode::All)];

setting_keys! {
    INBOUND: InboundKeys {
        listen: SocketAddr = "127.0.0.1:8080", LISTENER, "the address of the gate";
        upstream: Option<UpstreamAddress> = "",
            Maybe(Custom(Text, "a URL as http://HOST:PORT", |reader, node, key| reader.upstream(node, key))),
            "the server behind the gate, as http://HOST:PORT; without one no proxy runs";
        trusted_proxies: Networks = "",
            Custom(Strings, "a network or an address, or a list of them", |reader, node, _| reader.trusted_proxies(node)),
            "networks with trusted forwarding headers";
        forwarded: ForwardingHeader = "x-forwarded-for", Words(&FORWARDING_HEADERS),
            "the header that trusted proxies write: x-forwarded-for or forwarded (RFC 7239)";
        mode: bool = "enforce", MODE, "enforce, or shadow: limits decide and log, and admit; an action's own mode comes first";
        allow: Vec<(IpNet, TextRange)> = "", NETWORKS, "networks that are never limited";
        deny: Vec<(IpNet, TextRange)> = "", NETWORKS, "networks that are always refused";
        path_quirks: PathQuirks = "encoded_slash",
            Custom(Strings, "a list of words", |reader, node, _| reader.path_quirks(node)),
            "spellings that the upstream treats as the same path: encoded_slash, parameters, case, caddy, windows; [] for none";
        ambiguous_paths: AmbiguousPaths = "union", Words(&AMBIGUOUS_PATHS),
            "paths that servers read differently: union to count every reading, refuse, or normalise to forward one";
        ipv6_prefix: u8 = "64", Whole(*Ipv6Prefix::LENGTHS.start() as u64, *Ipv6Prefix::LENGTHS.end() as u64),
            "the bits of an IPv6 address that identify a client: 32 to 64";
        headers: HeaderDialect = "draft-10", Words(&HEADER_DIALECTS),
            "rate-limit headers on answers: draft-10, draft-7 or none";
        x_ratelimit: bool = "false", FLAG, "true to add X-RateLimit-* headers to answers";
        timeouts: () = "", TABLE, "", Below::Table(&TIMEOUTS);
        caps: () = "", TABLE, "", Below::Table(&CAPS);
        global: () = "", TABLE, "", Below::Table(&GLOBAL);
        action: () = "", TABLE, "", Below::Names(&ACTION);
    }

    TIMEOUTS: TimeoutKeys {
        header: Duration = "10s", DURATION, "the time for the head of a request to arrive";
        body: Duration = "30s", DURATION, "the time between two pieces of a body";
        connect: Duration = "5s", DURATION, "the time for connecting to the upstream";
        response: Duration = "60s", DURATION, "the time until the head of the upstream's answer";
        idle: Duration = "75s", DURATION, "the time for which a connection without a request is kept";
        shutdown: Duration = "30s", DURATION, "the time that a shutdown waits for requests in flight";
    }

    CAPS: CapKeys {
        connections: u32 = "10000", CONNECTIONS, "the maximum number of open connections";
        connections_per_client: Option<usize> = "", OrWord("off", CONNECTIONS),
            "the maximum number of open connections of one client address, or off; default a quarter of connections";
        // 8 KiB is the smallest buffer with which hyper reads heads.
        header_bytes: usize = "64KiB", Bytes(8 << 10, 1 << 20), "the maximum number of bytes in the head of a request";
        headers: usize = "100", Whole(1, 10_000), "the maximum number of header lines in a request";
        body: Option<u64> = "unlimited", Custom(Text, "a number of bytes, or `unlimited`", body_cap),
            "the maximum number of bytes in the body of a request";
        body_rate: Option<u64> = "100B", OrWord("off", Bytes(1, 1 << 30)),
            "the minimum rate of a request's body in bytes per second, or off";
        pool_idle: usize = "128", Whole(0, 100_000), "idle connections kept to the upstream";
    }

    API: ApiKeys {
        listen: Option<SocketAddr> = "127.0.0.1:8082", OrWord("off", LISTENER),
            "the address of the decision API and forward-auth, or off";
        token: Option<SecretSource> = "", Maybe(SECRET), TOKEN;
        hosts: Vec<String> = "", HOSTS,
            "names that a request's Host may have besides loopback's, unless it is forward-auth's or has the token";
        forward_auth: bool = "", FLAG,
            "true to answer forward-auth; default true unless requests can meet a limit on calls in flight";
        deny_status: u16 = "429", Whole(400, 599),
            "the status with which forward-auth refuses; nginx accepts only 401 and 403";
    }

    ADMIN: AdminKeys {
        listen: Option<SocketAddr> = "127.0.0.1:8083", OrWord("off", LISTENER),
            "the address of the dashboard, health, metrics, the state and changes to it, or off";
        token: Option<SecretSource> = "", Maybe(SECRET), TOKEN;
        tokens: Vec<NamedToken> = "", TOKENS,
            "more bearer tokens by name, each as env:NAME, file:PATH or { secret = \"env:NAME\", read_only = true }";
        hosts: Vec<String> = "", HOSTS,
            "names that a request's Host may have besides loopback's, unless it has the token";
        metrics: bool = "true", FLAG, "true to count requests and calls, and to answer /metrics";
        history_bytes: Option<usize> = "16MiB", OrWord("off", Bytes(64 << 10, 1 << 34)),
            "the maximum memory for the requests of the last hour, over which other limits can be tried, or off";
    }

    LOG: LogKeys {
        format: LogFormat = "text", Words(&[("text", LogFormat::Text), ("json", LogFormat::Json)]), "text or json";
        level: LogLevel = "info", Words(&LogLevel::WORDS),
            "the least important level written: error, warn, info, debug or trace";
        access: AccessLogMode = "off", Words(&ACCESS_LOG_MODES),
            "the requests that each get a line: off, refused or all";
        refusals_per_second: u32 = "10", Whole(1, 1_000_000),
            "the maximum lines about refusals per second, unless each gets one by `access`";
    }

    RELOAD: ReloadKeys {
        watch: bool = "false", FLAG, "true to reload the policy when its file changes";
    }
}

impl DocumentReader<'_> {
    pub(crate) fn inbound(&mut self, root: &TomlTable) -> Option<InboundConfig> {
        let table = self.section(Some(root), "inbound", "inbound");
        let (trusted, header) = (self.value(table, &INBOUND.trusted_proxies), self.value(table, &INBOUND.forwarded));
        let timeouts = self.timeouts(table);
        let caps = self.caps(table);
        if let Some(entry) = table.filter(|table| table.get("upstream").is_none()).and_then(|table| table.get("listen"))
        {
            let expected = "an `upstream` beside it, such as upstream = \"http://127.0.0.1:3000\"";
            self.error(entry.key_at, "[inbound] says where to listen, but not for which server", expected)
                .help("for the decision API alone, leave `listen` out here; [api] has one of its own");
        }
        read_struct!(self, table, INBOUND => InboundConfig {
            listen, upstream, path_quirks, ambiguous_paths, ipv6_prefix, headers, x_ratelimit;
            forwarding: Forwarding { trusted: trusted?, header: header? }, timeouts: timeouts?, caps: caps?
        })
    }

    fn timeouts(&mut self, inbound: Option<&TomlTable>) -> Option<InboundTimeouts> {
        let table = self.section(inbound, "timeouts", "inbound.timeouts");
        read_struct!(self, table, TIMEOUTS => InboundTimeouts { header, body, connect, response, idle, shutdown })
    }

    fn caps(&mut self, inbound: Option<&TomlTable>) -> Option<InboundCaps> {
        let table = self.section(inbound, "caps", "inbound.caps");
        let connections = self.value(table, &CAPS.connections);
        let per_client = self.connections_per_client(table, &CAPS.connections_per_client, connections);
        read_struct!(self, table, CAPS => InboundCaps {
            header_bytes, headers, body, body_rate, pool_idle;
            connections: connections?, connections_per_client: per_client?
        })
    }

    /// Reads the most connections that one client address may have at a listener. The default is a quarter of all.
    pub(super) fn connections_per_client(
        &mut self,
        table: Option<&TomlTable>,
        key: &SettingKey<Option<usize>>,
        connections: Option<u32>,
    ) -> Option<Option<usize>> {
        let quarter = connections.map(|connections| (connections as usize / 4).max(1));
        self.value_or(table, key, quarter)
    }

    fn trusted_proxies(&mut self, node: &TomlNode) -> Option<Networks> {
        let networks = self.networks(node, "trusted_proxies")?.into_iter().map(|(network, at)| {
            if network.prefix_len() > 0 {
                return Some(network);
            }
            let message =
                format!("`trusted_proxies`: {network} trusts everybody, so any client could choose its own address");
            self.error(at, message, "the networks of your own proxies, such as \"10.0.0.0/8\"").none()
        });
        all_or_none(networks).map(Networks::new)
    }

    fn path_quirks(&mut self, node: &TomlNode) -> Option<PathQuirks> {
        let expected = join_names(&QUIRKS);
        // A list replaces the default, so an empty list turns it off.
        let mut quirks = PathQuirks::NONE;
        let words = self.strings(node, "path_quirks", &expected)?.into_iter().map(|(text, item)| {
            match text {
                "encoded_slash" => quirks.encoded_slash = true,
                "parameters" => quirks.parameters = true,
                "case" => quirks.case = true,
                "caddy" => quirks = PathQuirks { encoded_slash: true, case: true, caddy: true, ..quirks },
                "windows" => quirks = PathQuirks { encoded_slash: true, case: true, windows: true, ..quirks },
                other => {
                    let error = self.error(item.at, format!("unknown quirk {}", quoted(other)), &expected);
                    return error.did_you_mean(nearest(other, QUIRKS)).none();
                }
            }
            Some(())
        });
        all_or_none(words).map(|_| quirks)
    }

    pub(crate) fn api(&mut self, root: &TomlTable) -> Option<ApiConfig> {
        let table = self.section(Some(root), "api", "api");
        let (listen, token) = self.listen_and_token(table, &API.listen, &API.token, false, "the decision API");
        let forward_auth = self.value_or(table, &API.forward_auth, true);
        read_struct!(self, table, API => ApiConfig {
            hosts, deny_status; listen: listen?, token: token?, forward_auth: forward_auth?
        })
    }

    /// The place where the policy asks for forward-auth: `forward_auth`, or the status that only forward-auth uses.
    /// `None` if it doesn't ask, or if the API is off.
    pub(super) fn forward_auth_range(&self, root: &TomlTable) -> Option<TextRange> {
        let api = root.table("api")?;
        if api.node("listen").is_some_and(|node| node.is_word("off")) {
            return None;
        }
        match api.node("forward_auth") {
            Some(TomlNode { at, value: TomlValue::Boolean(true) }) => Some(*at),
            Some(_) => None,
            None => api.node("deny_status").map(|node| node.at),
        }
    }

    pub(crate) fn admin(&mut self, root: &TomlTable) -> Option<AdminConfig> {
        let table = self.section(Some(root), "admin", "admin");
        let tokens = self.value_or(table, &ADMIN.tokens, Vec::new());
        // Tokens with an error are reported themselves.
        let has_token = tokens.as_ref().is_none_or(|tokens| !tokens.is_empty());
        let (listen, token) = self.listen_and_token(table, &ADMIN.listen, &ADMIN.token, has_token, "admin");
        read_struct!(self, table, ADMIN => AdminConfig {
            hosts, metrics, history_bytes; listen: listen?, token: token?, tokens: tokens?
        })
    }

    /// Reads a listener, which may be off and needs a token beyond loopback, and its token. `has_token` if the section
    /// has another one.
    pub(super) fn listen_and_token(
        &mut self,
        table: Option<&TomlTable>,
        listen_key: &SettingKey<Option<SocketAddr>>,
        token_key: &SettingKey<Option<SecretSource>>,
        has_token: bool,
        what: &str,
    ) -> (Option<Option<SocketAddr>>, Option<Option<SecretSource>>) {
        let token = self.value(table, token_key);
        let listen = self.value(table, listen_key);
        if let (Some(Some(address)), Some(table)) = (listen, table)
            && let Some(node) = table.node("listen")
            && !address.ip().to_canonical().is_loopback()
            && token == Some(None)
            && !has_token
            && !self.has_misspelling_of(table, "admin", "token")
        {
            let message = format!(
                "{what} listens beyond loopback ({address}) without a token, so every host that reaches it could use it"
            );
            let expected = format!("a `token` beside it, or an address on loopback such as \"{}\"", listen_key.default);
            self.error(node.at, message, expected)
                .help("add token = \"env:NAME\", with the token in the environment variable NAME")
                .help("or the word \"off\"");
            return (None, token);
        }
        (listen, token)
    }

    /// Reads the names that a request's `Host` may have.
    pub(super) fn hosts(&mut self, node: &TomlNode) -> Option<Vec<String>> {
        const EXPECTED: &str = "a host's name, such as \"gateway.internal\"";
        let words = self.strings(node, "hosts", EXPECTED)?;
        if words.len() > MAX_HOSTS {
            return self.too_many(node, "hosts", words.len(), MAX_HOSTS);
        }
        all_or_none(words.into_iter().map(|(text, item)| {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
            if !text.is_empty() && text.len() <= 253 && text.bytes().all(fits) {
                return Some(text.trim_end_matches('.').to_ascii_lowercase());
            }
            let bare = text.split_once("://").map_or(text, |(_, rest)| rest);
            let bare = bare.split([':', '/']).next().unwrap_or(bare);
            let help = match text {
                _ if text.contains('*') => Some("names have no wildcards: write each".to_owned()),
                _ if text.contains([':', '/']) => Some(format!("write the name alone: \"{bare}\"")),
                _ => None,
            };
            self.error(item.at, format!("`hosts`: {} is no host's name", quoted(text)), EXPECTED).help_if(help).none()
        }))
    }

    pub(crate) fn reload(&mut self, root: &TomlTable) -> Option<ReloadConfig> {
        let table = self.section(Some(root), "reload", "reload");
        read_struct!(self, table, RELOAD => ReloadConfig { watch })
    }

    pub(crate) fn log(&mut self, root: &TomlTable) -> Option<LogConfig> {
        let table = self.section(Some(root), "log", "log");
        read_struct!(self, table, LOG => LogConfig { format, level, access, refusals_per_second })
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
                if let (Some(address), Some(taken)) = (address, taken)
                    && let Some(at) = place(name, "listen").or(place(other, "listen"))
                    && addresses_clash(*address, *taken)
                {
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
        let sections = root.table("outbound").and_then(|table| table.table("provider"));
        for provider in providers {
            let section = sections.and_then(|sections| sections.table(&provider.name));
            if let (Some(url), Some(node)) = (&provider.base_url, section.and_then(|table| table.node("base_url")))
                && let port = url.authority.port_u16().unwrap_or(if url.https { 443 } else { 80 })
                && is_own_address(url.bare_host(), port, *listen)
            {
                let message = format!("`base_url` is the address that [outbound] listens on, {listen}");
                self.report(node.at, message, "the root of another API: the gateway would call itself");
            }
        }
    }
}

fn body_cap(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Option<u64>> {
    if node.is_word("unlimited") { Some(None) } else { reader.bytes(node, key, 0..=u64::MAX >> 1).map(Some) }
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
