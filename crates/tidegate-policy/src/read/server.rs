//! The sections about the process itself: inbound, api, admin, log.

use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

use super::actions::{ACTION, GLOBAL, MODE};
use super::forms::{Bytes, Custom, DURATION, FLAG, HOSTS, Maybe, NETWORKS, OrWord, SECRET, TABLE, Whole, Words};
use super::listen::{LISTENER, LISTENER_OR_OFF, LISTENING, PATH};
use super::tokens::TOKENS;
use super::values::NETWORK;
use super::{DocumentReader, all_or_none, join_names};
use crate::address::{Ipv6Prefix, Networks};
use crate::document::{TextRange, TomlNode, TomlTable, TomlValue};
use crate::error::quoted;
use crate::forwarding::{Forwarding, ForwardingHeader};
use crate::listen::{CertificateFiles, Http2Mode, ListenAddress, UNIX_PEER};
use crate::nearest::nearest;
use crate::path::{AmbiguousPaths, PathQuirks};
use crate::secret::SecretSource;
use crate::sections::{
    AccessLogMode, AdminConfig, ApiConfig, CompatibleServer, HeaderDialect, InboundCaps, InboundConfig,
    InboundTimeouts, LogConfig, LogFormat, LogLevel, NamedToken, OnDisconnect, ReloadConfig, RespConfig,
    UpstreamAddress, UpstreamTls,
};
use crate::settings::SettingType::{Strings, Text};
use crate::settings::key::{Below, SettingKey, read_keys, read_struct, setting_keys};

/// The most names in `hosts`.
const MAX_HOSTS: usize = 256;
pub(super) const CONNECTIONS: Whole = Whole(1, 1_000_000);

pub(super) const PER_CLIENT: &str = "the maximum number of open connections of one client address, or off";
pub(super) const TOKEN: &str =
    "the place of the bearer token: env:NAME or file:PATH; required beyond loopback, unless clients need a certificate";

/// Networks whose word about a client's address is taken.
pub(super) const TRUSTED_NETWORKS: Custom<Vec<IpNet>> = Custom(
    Strings,
    "a network or an address, or `unix` for the peers of unix sockets, or a list of them",
    |reader, node, key| reader.trusted_networks(node, key),
);

const QUIRKS: [&str; 5] = ["encoded_slash", "parameters", "case", "caddy", "windows"];
const COMPATIBLE: [CompatibleServer; 2] = [CompatibleServer::Limitador, CompatibleServer::Throttlecrab];
const FORWARDING_HEADERS: [(&str, ForwardingHeader); 2] =
    [("x-forwarded-for", ForwardingHeader::XForwardedFor), ("forwarded", ForwardingHeader::Forwarded)];
const AMBIGUOUS_PATHS: [(&str, AmbiguousPaths); 3] =
    [("union", AmbiguousPaths::Union), ("refuse", AmbiguousPaths::Refuse), ("normalise", AmbiguousPaths::Normalise)];
const ON_DISCONNECT: [(&str, OnDisconnect); 2] = [("close", OnDisconnect::Close), ("finish", OnDisconnect::Finish)];
const HEADER_DIALECTS: [(&str, HeaderDialect); 3] =
    [("draft-10", HeaderDialect::Draft10), ("draft-7", HeaderDialect::Draft7), ("none", HeaderDialect::None)];
const ACCESS_LOG_MODES: [(&str, AccessLogMode); 3] =
    [("off", AccessLogMode::Off), ("refused", AccessLogMode::Refused), ("all", AccessLogMode::All)];

setting_keys! {
    INBOUND: InboundKeys {
        listen: Vec<ListenAddress> = "127.0.0.1:8080", LISTENER, "the addresses of the gate", Below::Beside(&LISTENING);
        upstream: Option<UpstreamAddress> = "",
            Maybe(Custom(Text, "a URL as http://HOST:PORT or https://HOST:PORT, or unix:PATH", |reader, node, key| reader.upstream(node, key))),
            "the server behind the gate, as http://HOST:PORT, https://HOST:PORT or unix:PATH; without one no proxy runs";
        upstream_tls: () = "", TABLE, "", Below::Table(&UPSTREAM_TLS);
        upstream_http2: bool = "false", FLAG, "true to speak HTTP/2 to the upstream, as gRPC needs; upgrades then don't pass";
        trusted_proxies: Vec<IpNet> = "", TRUSTED_NETWORKS,
            "networks with trusted forwarding headers; `unix` for the peers of unix sockets";
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
        on_disconnect: OnDisconnect = "close", Words(&ON_DISCONNECT),
            "calls in flight whose client goes away: close the connection to the upstream, and keep the permit while it may still work, or finish the call";
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

    UPSTREAM_TLS: UpstreamTlsKeys {
        ca: Option<PathBuf> = "", Maybe(PATH),
            "the file of the certificates that sign that of an https upstream; default the system's";
        server_name: Option<String> = "", Maybe(Custom(Text, "a host's name", |reader, node, key| reader.server_name(node, key))),
            "the name in the certificate of an https upstream; default the host of its URL";
        certificate: Option<PathBuf> = "", Maybe(PATH), "the file of the certificate that the gate shows to an https upstream";
        key: Option<PathBuf> = "", Maybe(PATH), "the file of that certificate's private key";
    }

    TIMEOUTS: TimeoutKeys {
        header: Duration = "10s", DURATION, "the time for the head of a request to arrive, from its first byte; for the first one from the start of the connection, or the end of the handshake";
        body: Duration = "30s", DURATION, "the time between two pieces of a body, of a request or a reply";
        connect: Duration = "5s", DURATION, "the time for connecting to the upstream";
        response: Duration = "60s", DURATION, "the time until the head of the upstream's answer";
        idle: Duration = "75s", DURATION, "the time for which a connection is kept between two requests";
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
        listen: Vec<ListenAddress> = "127.0.0.1:8082", LISTENER_OR_OFF,
            "the addresses of the decision API and forward-auth, or off", Below::Beside(&LISTENING);
        token: Option<SecretSource> = "", Maybe(SECRET), TOKEN;
        hosts: Vec<String> = "", HOSTS,
            "names that a request's Host may have besides loopback's, unless it is forward-auth's or has the token";
        connections_per_client: Option<usize> = "512", OrWord("off", CONNECTIONS),
            PER_CLIENT;
        forward_auth: bool = "", FLAG,
            "true to answer forward-auth; default true unless requests can meet a limit on calls in flight";
        deny_status: u16 = "429", Whole(400, 599),
            "the status with which forward-auth refuses; nginx accepts only 401 and 403";
        compat: Vec<CompatibleServer> = "",
            Custom(Strings, "a list of words", |reader, node, key| reader.compatible_servers(node, key)),
            "other servers whose paths are answered, too: limitador, throttlecrab";
    }

    RESP: RespKeys {
        listen: Vec<ListenAddress> = "127.0.0.1:8085", LISTENER_OR_OFF,
            "the addresses of the Redis protocol, or off; without [resp] it is off", Below::Beside(&LISTENING);
        token: Option<SecretSource> = "", Maybe(SECRET), "the place of the password for AUTH: env:NAME or file:PATH; required beyond loopback, unless clients need a certificate";
        connections_per_client: Option<usize> = "8192", OrWord("off", CONNECTIONS),
            PER_CLIENT;
    }

    ADMIN: AdminKeys {
        listen: Vec<ListenAddress> = "127.0.0.1:8083", LISTENER_OR_OFF,
            "the addresses of the dashboard, health, metrics, the state and changes to it, or off",
            Below::Beside(&LISTENING);
        token: Option<SecretSource> = "", Maybe(SECRET), TOKEN;
        tokens: Vec<NamedToken> = "", TOKENS,
            "more bearer tokens by name, each as env:NAME, file:PATH or { secret = \"env:NAME\", read_only = true }";
        hosts: Vec<String> = "", HOSTS,
            "names that a request's Host may have besides loopback's, unless it has the token";
        connections_per_client: Option<usize> = "32", OrWord("off", CONNECTIONS),
            PER_CLIENT;
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
        watch: bool = "false", FLAG, "true to reload the policy when its file changes; a changed file alone doesn't turn it off";
    }
}

impl DocumentReader<'_> {
    pub(crate) fn inbound(&mut self, root: &TomlTable) -> Option<InboundConfig> {
        let table = self.section(Some(root), "inbound", "inbound");
        let (trusted, header) = (self.value(table, &INBOUND.trusted_proxies), self.value(table, &INBOUND.forwarded));
        let timeouts = self.timeouts(table);
        let caps = self.caps(table);
        let upstream_tls = self.upstream_tls(table);
        let listen = self.listen(table, "inbound", &INBOUND.listen);
        if let Some(entry) = table.filter(|table| table.get("upstream").is_none()).and_then(|table| table.get("listen"))
        {
            let expected = "an `upstream` beside it, such as upstream = \"http://127.0.0.1:3000\"";
            self.error(entry.key_at, "[inbound] says where to listen, but not for which server", expected)
                .help("for the decision API alone, leave `listen` out here; [api] has one of its own");
        }
        let config = read_struct!(self, table, INBOUND => InboundConfig {
            upstream, upstream_http2, path_quirks, ambiguous_paths, on_disconnect, ipv6_prefix, headers, x_ratelimit;
            listen: listen?, upstream_tls: upstream_tls?, forwarding: Forwarding { trusted: Networks::new(trusted?), header: header? }, timeouts: timeouts?, caps: caps?
        })?;
        let is_https = config.upstream.as_ref().is_some_and(UpstreamAddress::is_https);
        if let Some(entry) = table.and_then(|table| table.get("upstream_tls")).filter(|_| !is_https) {
            let expected = "an upstream with TLS, such as upstream = \"https://app.internal:8443\"";
            self.error(entry.key_at, "`upstream_tls` is for an upstream with TLS", expected);
        }
        Some(config)
    }

    fn upstream_tls(&mut self, inbound: Option<&TomlTable>) -> Option<UpstreamTls> {
        let Some(table) = self.section(inbound, "upstream_tls", "inbound.upstream_tls") else {
            return Some(UpstreamTls::default());
        };
        read_keys!(self, table, UPSTREAM_TLS: ca, server_name, certificate, key);
        let (ca, server_name, certificate, key) = (ca?, server_name?, certificate?, key?);
        if certificate.is_some() != key.is_some() {
            let at = table.node("certificate").or(table.node("key"))?.at;
            let message = "`certificate` and `key` stand together";
            return self.error(at, message, "the files of the gate's certificate and of its key").none();
        }
        let certificate = certificate.zip(key).map(|(certificate, key)| CertificateFiles { certificate, key });
        Some(UpstreamTls { ca, server_name, certificate })
    }

    fn server_name(&mut self, node: &TomlNode, key: &str) -> Option<String> {
        const EXPECTED: &str = "a host's name, such as \"app.internal\"";
        let text = self.string(node, key, EXPECTED)?;
        match crate::host::is_host(text.as_bytes()) && !text.contains(':') {
            true => Some(text.to_ascii_lowercase()),
            false => self.wrong_text(node, key, text, EXPECTED).none(),
        }
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

    /// Reads networks whose word about a client's address is taken. `unix` stands for the peers of unix sockets.
    fn trusted_networks(&mut self, node: &TomlNode, key: &str) -> Option<Vec<IpNet>> {
        const EXPECTED: &str = "the networks of your own proxies, such as \"10.0.0.0/8\"";
        let networks = self.strings(node, key, NETWORK)?.into_iter().map(|(text, item)| {
            if text == "unix" {
                return Some(IpNet::from(UNIX_PEER));
            }
            let (network, at) = self.network(text, item, key)?;
            let message = if network.prefix_len() == 0 {
                format!("`{key}`: {network} trusts everybody, so any client could choose its own address")
            } else if network.contains(&UNIX_PEER) {
                format!("`{key}`: {network} has {UNIX_PEER} in it, which stands for the peers of unix sockets")
            } else {
                return Some(network);
            };
            self.error(at, message, EXPECTED).help("write \"unix\" to trust the peers of unix sockets").none()
        });
        all_or_none(networks)
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
        let (listen, token) = self.listen_and_token(table, ("api", "the decision API"), &API.listen, &API.token, false);
        let forward_auth = self.value_or(table, &API.forward_auth, true);
        read_struct!(self, table, API => ApiConfig {
            hosts, connections_per_client, deny_status, compat; listen: listen?, token: token?, forward_auth: forward_auth?
        })
    }

    fn compatible_servers(&mut self, node: &TomlNode, key: &str) -> Option<Vec<CompatibleServer>> {
        let names = COMPATIBLE.map(CompatibleServer::name);
        let expected = join_names(&names);
        let words = self.strings(node, key, &expected)?.into_iter().map(|(text, item)| {
            COMPATIBLE.into_iter().find(|server| server.name() == text).or_else(|| {
                let error = self.error(item.at, format!("unknown server {}", quoted(text)), &expected);
                error.did_you_mean(nearest(text, names)).none()
            })
        });
        all_or_none(words)
    }

    /// Reads `[resp]`; `None` inside if there is none.
    pub(super) fn resp(&mut self, root: &TomlTable) -> Option<Option<RespConfig>> {
        let Some(table) = self.section(Some(root), "resp", "resp") else { return Some(None) };
        let named = ("resp", "the Redis protocol");
        let (listen, token) = self.listen_and_token(Some(table), named, &RESP.listen, &RESP.token, false);
        let mut listen = listen?;
        if let Some(node) = table.node("http2").filter(|_| listen.http2 == Http2Mode::Always) {
            return self.error(node.at, "the Redis protocol isn't HTTP", "no `http2`").none();
        }
        listen.http2 = Http2Mode::Never;
        let connections_per_client = self.value(table, &RESP.connections_per_client)?;
        Some(Some(RespConfig { listen, token: token?, connections_per_client }))
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
        let (listen, token) = self.listen_and_token(table, ("admin", "admin"), &ADMIN.listen, &ADMIN.token, has_token);
        read_struct!(self, table, ADMIN => AdminConfig {
            hosts, connections_per_client, metrics, history_bytes; listen: listen?, token: token?, tokens: tokens?
        })
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
}

fn body_cap(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Option<u64>> {
    if node.is_word("unlimited") { Some(None) } else { reader.bytes(node, key, 0..=u64::MAX >> 1).map(Some) }
}
