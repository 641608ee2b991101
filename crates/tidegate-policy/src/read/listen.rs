//! The addresses of listeners: `listen`, and the settings beside it.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use ipnet::IpNet;

use super::forms::{Custom, Maybe, TABLE, Words};
use super::server::TRUSTED_NETWORKS;
use super::{DocumentReader, all_or_none};
use crate::document::{TomlNode, TomlTable, TomlValue};
use crate::error::quoted;
use crate::listen::{CertificateFiles, Http2Mode, ListenAddress, ListenConfig, TlsConfig, UnixSocketConfig};
use crate::outbound::OutboundConfig;
use crate::secret::SecretSource;
use crate::sections::InboundConfig;
use crate::settings::SettingType::{Strings, Text};
use crate::settings::key::{Below, SettingKey, read_keys, read_struct, setting_keys};

/// The most addresses of one listener.
const MAX_ADDRESSES: usize = 16;
/// The most certificates of one listener.
const MAX_CERTIFICATES: usize = 64;
/// The scheme of a unix socket's path.
pub(super) const UNIX_SCHEME: &str = "unix:";

type Addresses = Vec<ListenAddress>;

const HTTP2_MODES: [(&str, Http2Mode); 3] =
    [("never", Http2Mode::Never), ("tls", Http2Mode::Tls), ("always", Http2Mode::Always)];

pub(super) const LISTENER: Custom<Addresses> = Custom(
    Strings,
    "an address and a port, such as 127.0.0.1:8080, or unix:PATH, or a list of them",
    |reader, node, key| reader.addresses(node, key),
);
pub(super) const LISTENER_OR_OFF: Custom<Addresses> = Custom(
    Strings,
    "an address and a port, such as 127.0.0.1:8080, or unix:PATH, or a list of them, or `off`",
    |reader, node, key| {
        // A variable's value is a list.
        if matches!(node.items(), [item] if item.is_word("off")) {
            return Some(Vec::new());
        }
        reader.with_help("or the word \"off\"".to_owned(), |reader| reader.addresses(node, key))
    },
);
pub(super) const PATH: Custom<PathBuf> = Custom(Text, "a file's path", |reader, node, key| reader.file_path(node, key));
const PATHS: Custom<Vec<PathBuf>> = Custom(Strings, "a file's path, or a list of them", |reader, node, key| {
    all_or_none(node.items().iter().take(MAX_CERTIFICATES + 1).map(|item| reader.file_path(item, key)))
});
const ACCOUNT: Maybe<Custom<String>> =
    Maybe(Custom(Text, "a name or a number", |reader, node, key| reader.account(node, key)));

setting_keys! {
    /// The keys beside `listen` in the section of each listener.
    LISTENING: ListeningKeys {
        unix: () = "", TABLE, "", Below::Table(&UNIX);
        tls: () = "", TABLE, "", Below::Table(&TLS);
        http2: Http2Mode = "tls", Words(&HTTP2_MODES),
            "the connections that may use HTTP/2: never, tls (those with TLS), or always (also without TLS, if the client begins with it)";
        proxy_protocol: Vec<IpNet> = "", TRUSTED_NETWORKS,
            "the load balancers whose connections begin with a header of the PROXY protocol; `unix` for the peers of unix sockets";
    }

    TLS: TlsKeys {
        certificates: Vec<PathBuf> = "", PATHS,
            "the files of certificates, each with its chain, as PEM; clients choose by name, and the first is the default";
        keys: Vec<PathBuf> = "", PATHS, "the files of the certificates' private keys, in the same order";
        client_ca: Option<PathBuf> = "", Maybe(PATH),
            "the file of the certificates that sign those of clients; without it no client is asked for one";
        client_certificates: bool = "required", Words(&[("required", false), ("optional", true)]),
            "required or optional: if clients need a certificate, with client_ca";
    }

    UNIX: UnixKeys {
        mode: u32 = "0660", Custom(Text, "permission bits in octal, such as 0660", |reader, node, key| reader.mode(node, key)),
            "the permissions of the listener's unix sockets; a client needs the right to write";
        owner: Option<String> = "", ACCOUNT, "the owner of the listener's unix sockets; default the user of the process";
        group: Option<String> = "", ACCOUNT, "the group of the listener's unix sockets; default the group of the process";
    }
}

impl DocumentReader<'_> {
    /// Reads the addresses of a listener, and the settings beside them.
    pub(super) fn listen(
        &mut self,
        table: Option<&TomlTable>,
        section: &str,
        key: &SettingKey<Addresses>,
    ) -> Option<ListenConfig> {
        let addresses = self.value(table, key);
        let unix = self.section(table, "unix", &format!("{section}.unix"));
        let unix = read_struct!(self, unix, UNIX => UnixSocketConfig { mode, owner, group });
        let proxy_protocol = self.value(table, &LISTENING.proxy_protocol);
        let http2 = self.value(table, &LISTENING.http2);
        let tls = self.section(table, "tls", &format!("{section}.tls")).map(|table| self.tls(table));
        let (addresses, unix, tls) = (addresses?, unix?, tls.unwrap_or(Some(None))?);
        Some(ListenConfig { addresses, unix, proxy_protocol: proxy_protocol?, tls, http2: http2? })
    }

    /// Reads the TLS of a listener; `None` inside if it has no certificates.
    fn tls(&mut self, table: &TomlTable) -> Option<Option<TlsConfig>> {
        read_keys!(self, table, TLS: certificates, keys, client_ca, client_certificates);
        let (certificates, keys, client_ca, client_optional) = (certificates?, keys?, client_ca?, client_certificates?);
        if certificates.len() != keys.len() || certificates.is_empty() && client_ca.is_some() {
            let at = table.node("keys").or(table.node("certificates")).or(table.node("client_ca"))?.at;
            let message = format!("there are {} certificates and {} keys", certificates.len(), keys.len());
            let example = "certificates = [\"gate.pem\"] and keys = [\"gate.key\"]";
            return self.error(at, message, "a key for each certificate").help(format!("such as {example}")).none();
        }
        if certificates.len() > MAX_CERTIFICATES {
            let node = table.node("certificates")?;
            return self.too_many(node, "certificates", node.items().len(), MAX_CERTIFICATES);
        }
        let files = |(certificate, key)| CertificateFiles { certificate, key };
        let certificates: Vec<_> = certificates.into_iter().zip(keys).map(files).collect();
        Some((!certificates.is_empty()).then_some(TlsConfig { certificates, client_ca, client_optional }))
    }

    fn file_path(&mut self, node: &TomlNode, key: &str) -> Option<PathBuf> {
        const EXPECTED: &str = "a file's path, such as \"/etc/tidegate/gate.pem\"";
        let path = self.string(node, key, EXPECTED)?;
        if path.is_empty() || path.ends_with('/') || path.contains(char::is_control) {
            return self.error(node.at, format!("`{key}`: {} is no file's path", quoted(path)), EXPECTED).none();
        }
        Some(PathBuf::from(path))
    }

    /// Reads a listener that may be off and needs a token beyond loopback, and its token. `has_token` if the section has
    /// another one.
    pub(super) fn listen_and_token(
        &mut self,
        table: Option<&TomlTable>,
        (section, what): (&str, &str),
        listen_key: &SettingKey<Addresses>,
        token_key: &SettingKey<Option<SecretSource>>,
        has_token: bool,
    ) -> (Option<ListenConfig>, Option<Option<SecretSource>>) {
        let token = self.value(table, token_key);
        let listen = self.listen(table, section, listen_key);
        if let (Some(listen), Some(table)) = (&listen, table)
            && let Some(node) = table.node("listen")
            && let Some(address) = listen.addresses.iter().find(|address| address.is_beyond_loopback())
            && token == Some(None)
            && !has_token
            && !listen.requires_client_certificate()
            && !self.has_misspelling_of(table, "admin", "token")
        {
            let message = format!(
                "{what} listens beyond loopback ({address}) without a token, so every host that reaches it could use it"
            );
            let expected = format!("a `token` beside it, or an address on loopback such as \"{}\"", listen_key.default);
            self.error(node.at, message, expected)
                .help("add token = \"env:NAME\", with the token in the environment variable NAME")
                .help("or require certificates of clients: tls.client_ca beside it")
                .help("or the word \"off\"");
            return (None, token);
        }
        if let Some(listen) = &listen
            && let Some(node) = table.and_then(|table| table.node("proxy_protocol"))
            && !listen.proxy_protocol.is_empty()
            && !listen.is_off()
            && token == Some(None)
            && !has_token
            && !listen.requires_client_certificate()
        {
            let message = format!(
                "without `{section}.token`, only clients on this machine are served there, and those of others that a header of \
                 the PROXY protocol tells are refused"
            );
            self.note(node.at, &message);
        }
        (listen, token)
    }

    fn addresses(&mut self, node: &TomlNode, key: &str) -> Option<Addresses> {
        self.check_length(node.at, key, node.items().len(), MAX_ADDRESSES, " addresses")?;
        all_or_none(node.items().iter().map(|item| self.address(item, key)))
    }

    fn address(&mut self, node: &TomlNode, key: &str) -> Option<ListenAddress> {
        const EXPECTED: &str =
            "an address and a port in quotes, such as \"127.0.0.1:8080\" or \"[::1]:8080\", or \"unix:PATH\"";
        let as_port = |text: &str| text.parse::<u16>().ok().map(|port| format!("127.0.0.1:{port}"));
        if let TomlValue::Integer(Some(number)) = node.value {
            let error = self.error(node.at, format!("`{key}` is only the number {number}"), EXPECTED);
            return error.did_you_mean(as_port(&number.to_string()).as_deref()).none();
        }
        let text = self.string(node, key, EXPECTED)?;
        if let Ok(address) = text.parse() {
            return Some(ListenAddress::Tcp(address));
        }
        if let Some(path) = text.strip_prefix(UNIX_SCHEME) {
            return self.unix_path(node, key, path).map(ListenAddress::Unix);
        }
        let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
        let error = self.wrong_text(node, key, text, EXPECTED);
        let error = match (host, port) {
            (_, "") if as_port(text).is_some() => error.did_you_mean(as_port(text).as_deref()),
            (_, "") if text.parse::<IpAddr>().is_ok() => error.help("the port is missing"),
            (_, "") if text.starts_with('/') => error.did_you_mean(Some(&format!("{UNIX_SCHEME}{text}"))),
            ("", port) if as_port(port).is_some() => error.help(format!(
                "write \"127.0.0.1:{port}\" to be reached from this machine, or \"0.0.0.0:{port}\" from everywhere"
            )),
            ("localhost", port) if as_port(port).is_some() => error.did_you_mean(as_port(port).as_deref()),
            (host, port) if host.parse::<IpAddr>().is_ok() && port.bytes().all(|digit| digit.is_ascii_digit()) => {
                error.help("a port is at most 65535")
            }
            (host, _) if host.parse::<std::net::Ipv6Addr>().is_ok() => error.help("an IPv6 address stands in brackets"),
            ("http" | "https", _) => error.help("an address has no scheme"),
            _ => error.help("names aren't looked up here; write the address itself"),
        };
        error.none()
    }

    /// Checks the path of a unix socket.
    pub(super) fn unix_path(&mut self, node: &TomlNode, key: &str, path: &str) -> Option<PathBuf> {
        const EXPECTED: &str = "the absolute path of a socket, such as \"unix:/run/tidegate/gate.sock\"";
        let help = if !path.starts_with('/') {
            "the path begins with a slash"
        } else if path.ends_with('/') || path.contains(char::is_control) {
            "the path names a file"
        } else if std::os::unix::net::SocketAddr::from_pathname(path).is_err() {
            "the path of a socket has at most about 100 bytes"
        } else {
            return Some(PathBuf::from(path));
        };
        self.error(node.at, format!("`{key}`: {} is no socket's path", quoted(path)), EXPECTED).help(help).none()
    }

    fn mode(&mut self, node: &TomlNode, key: &str) -> Option<u32> {
        const EXPECTED: &str = "permission bits in octal and in quotes, such as \"0660\"";
        let text = self.string(node, key, EXPECTED)?;
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777 && text.len() >= 3);
        mode.or_else(|| self.wrong_text(node, key, text, EXPECTED).none())
    }

    /// Reads the name or number of a user or a group.
    fn account(&mut self, node: &TomlNode, key: &str) -> Option<String> {
        const EXPECTED: &str = "a name or a number in quotes, such as \"www-data\"";
        let text = self.string(node, key, EXPECTED)?;
        let fits = |byte: u8| byte.is_ascii_graphic() && !b":,/".contains(&byte);
        if text.is_empty() || text.len() > 64 || !text.bytes().all(fits) {
            return self.wrong_text(node, key, text, EXPECTED).none();
        }
        Some(text.to_owned())
    }

    /// Reports listeners that share an address, an upstream that is the gate itself, and a provider that is the
    /// gateway.
    pub(super) fn check_listeners(
        &mut self,
        root: &TomlTable,
        inbound: Option<&InboundConfig>,
        internal: [(&str, Option<&ListenConfig>); 4],
        outbound: Option<&Option<OutboundConfig>>,
    ) {
        let outbound = outbound.and_then(Option::as_ref);
        let place =
            |section: &str, key: &str| root.table(section).and_then(|table| table.node(key)).map(|node| node.at);
        let gate = inbound.filter(|inbound| inbound.upstream.is_some());
        let first = [("inbound", gate.map(|inbound| &inbound.listen))];
        let last = [("outbound", outbound.map(|outbound| &outbound.listen))];
        let listeners = first.into_iter().chain(internal).chain(last);
        let addresses: Vec<(&str, &ListenAddress)> = listeners
            .flat_map(|(name, listen)| {
                listen.into_iter().flat_map(|listen| &listen.addresses).map(move |it| (name, it))
            })
            .collect();
        for (index, (name, address)) in addresses.iter().enumerate() {
            for (other, taken) in &addresses[..index] {
                let clash = match (address, taken) {
                    // One listener can take a port of IPv4 and of IPv6.
                    (ListenAddress::Tcp(a), ListenAddress::Tcp(b)) => {
                        addresses_clash(*a, *b) && (name != other || a.is_ipv4() == b.is_ipv4())
                    }
                    (a, b) => a == b,
                };
                if clash && let Some(at) = place(name, "listen").or(place(other, "listen")) {
                    let message = match name == other {
                        true => format!("[{name}] would listen on {address} twice"),
                        false => format!("[{name}] and [{other}] would both listen on {address}"),
                    };
                    self.report(at, message, "an address or a port of its own for each");
                }
            }
        }
        if let Some(inbound) = gate
            && let Some(upstream) = &inbound.upstream
            && let Some(at) = place("inbound", "upstream")
            && inbound.listen.addresses.iter().any(|listen| match (listen, upstream.unix_path()) {
                (ListenAddress::Tcp(listen), None) => is_own_address(upstream.host(), upstream.port(), *listen),
                (ListenAddress::Unix(listen), path) => Some(listen.as_path()) == path,
                (ListenAddress::Tcp(_), Some(_)) => false,
            })
        {
            let message = format!("the upstream {upstream} is the gate's own address");
            self.report(at, message, "the address of the server behind the gate");
        }
        let Some(OutboundConfig { listen, providers, .. }) = outbound else { return };
        let sections = root.table("outbound").and_then(|table| table.table("provider"));
        for provider in providers {
            let section = sections.and_then(|sections| sections.table(&provider.name));
            if let (Some(url), Some(node)) = (&provider.base_url, section.and_then(|table| table.node("base_url")))
                && let port = url.authority.port_u16().unwrap_or(if url.https { 443 } else { 80 })
                && let Some(listen) = listen.addresses.iter().find(|listen| match (listen, url.unix_path()) {
                    (ListenAddress::Tcp(listen), None) => is_own_address(url.bare_host(), port, *listen),
                    (ListenAddress::Unix(listen), path) => Some(listen.as_path()) == path,
                    (ListenAddress::Tcp(_), Some(_)) => false,
                })
            {
                let message = format!("`base_url` is the address that [outbound] listens on, {listen}");
                self.report(node.at, message, "the root of another API: the gateway would call itself");
            }
        }
    }
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
