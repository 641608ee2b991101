//! TLS of a listener: its certificates by name, and their replacement while the server runs.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hyper_rustls::ConfigBuilderExt as _;
use parking_lot::{Mutex, RwLock};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tidegate_core::{Clock as _, Time};
use tidegate_policy::{CertificateFiles, Policy, TlsConfig, UpstreamAddress, UpstreamTls, read_regular_file};
use tidegate_runtime::clock::SystemClock;
use tidegate_runtime::file_watcher::FileWatcher;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use x509_parser::asn1_rs::ToDer as _;
use x509_parser::extensions::GeneralName;
use x509_parser::objects::{oid_registry, oid2abbrev};
use x509_parser::prelude::{FromDer as _, X509Certificate};
use x509_parser::x509::{AttributeTypeAndValue, X509Name};

use crate::http2;
use crate::stream::{ClientStream, TlsTransport};
use crate::watchdog::ConnectionWatch;

/// The first byte of a TLS connection: the type of a handshake record.
pub(crate) const HANDSHAKE_RECORD: u8 = 0x16;
/// The name of HTTP/1.1 in ALPN.
const HTTP_1: &[u8] = b"http/1.1";

/// The largest file in bytes.
const MAX_FILE: u64 = 1 << 20;
/// The most certificates of a server's chain. Clients refuse long ones.
const MAX_CHAIN: usize = 16;

/// The reason why certificates can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file can't be read, or isn't PEM.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: pem::Error,
    },
    /// A file has no certificate.
    #[error("{}: there is no certificate in it", .0.display())]
    Empty(PathBuf),
    /// A certificate isn't valid at the present time.
    #[error("{}: the certificate is {reason}", path.display())]
    Expired {
        /// The file.
        path: PathBuf,
        /// Its state in words.
        reason: &'static str,
    },
    /// A certificate can't be parsed.
    #[error("{}: the certificate can't be parsed", .0.display())]
    Unparsable(PathBuf),
    /// The name of a server is no name that a certificate can have.
    #[error("{0} is no name of a certificate: set a server_name")]
    ServerName(String),
    /// The system's root certificates can't be read.
    #[error("the system's root certificates can't be read: {0}")]
    SystemRoots(io::Error),
    /// A certificate and its key don't belong together, or can't be used.
    #[error("{}: {error}", path.display())]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// The cause.
        error: String,
    },
}

/// The TLS of a listener.
pub(crate) struct ListenerTls {
    /// The listener's section in the policy.
    pub(crate) listener: &'static str,
    config: TlsConfig,
    has_http2: bool,
    source: Mutex<CertificateSource>,
    present: RwLock<Arc<LoadedTls>>,
    /// Failed reloads, and those that succeeded.
    reloads: [AtomicU64; 2],
}

/// The files of a listener's certificates, and the last attempt to read them.
struct CertificateSource {
    files: FileWatcher,
    /// Present if the last attempt failed.
    error: Option<String>,
}

/// The state of a listener's certificates.
pub(crate) struct CertificateReport {
    pub(crate) listener: &'static str,
    /// Failed reloads, and those that succeeded.
    pub(crate) reloads: [u64; 2],
    /// For each certificate its file and the time at which it expires, in seconds since 1970.
    pub(crate) expiry: Vec<(PathBuf, i64)>,
}

/// Certificates in use.
struct LoadedTls {
    server: Arc<ServerConfig>,
    /// For each certificate its file and the time at which it expires, in seconds since 1970.
    expiry: Vec<(PathBuf, i64)>,
}

impl ListenerTls {
    /// Reads the certificates of a listener.
    ///
    /// # Errors
    /// One of them can't be used now.
    pub(crate) fn load(
        listener: &'static str,
        config: &TlsConfig,
        has_http2: bool,
        now: Time,
    ) -> Result<Arc<Self>, TlsError> {
        let pairs = config.certificates.iter().flat_map(|files| [files.certificate.clone(), files.key.clone()]);
        let files = FileWatcher::new(pairs.chain(config.client_ca.clone()));
        let present = RwLock::new(Arc::new(LoadedTls::load(config, has_http2, now)?));
        let config = config.clone();
        let source = Mutex::new(CertificateSource { files, error: None });
        Ok(Arc::new(Self { listener, config, has_http2, source, present, reloads: Default::default() }))
    }

    /// Reads the certificates again if a file has changed, or if that failed the last time: its cause may be another one
    /// than a file's content. Connections that are open stay. On an error the present certificates stay. `None` if
    /// there is nothing new to tell.
    pub(crate) fn reload_if_changed(&self, now: Time) -> Option<Result<(), TlsError>> {
        let mut source = self.source.lock();
        let has_changed = !source.files.changes().is_empty();
        if !has_changed && source.error.is_none() {
            return None;
        }
        let loaded =
            LoadedTls::load(&self.config, self.has_http2, now).map(|loaded| *self.present.write() = Arc::new(loaded));
        let error = loaded.as_ref().err().map(ToString::to_string);
        if !has_changed && error == source.error {
            return None;
        }
        source.error = error;
        self.reloads[usize::from(loaded.is_ok())].fetch_add(1, Ordering::Relaxed);
        Some(loaded)
    }

    pub(crate) fn report(&self) -> CertificateReport {
        CertificateReport {
            listener: self.listener,
            reloads: self.reloads.each_ref().map(|count| count.load(Ordering::Relaxed)),
            expiry: self.present.read().expiry.clone(),
        }
    }

    /// Does the handshake. Its bytes count as those of an unfinished head.
    pub(crate) async fn accept(
        &self,
        stream: ClientStream,
        watch: Arc<ConnectionWatch>,
    ) -> io::Result<TlsStream<TlsTransport>> {
        let server = Arc::clone(&self.present.read().server);
        let mut stream = TlsAcceptor::from(server).accept(TlsTransport::new(stream, watch)).await?;
        stream.get_mut().0.stop_counting();
        Ok(stream)
    }
}

impl LoadedTls {
    fn load(config: &TlsConfig, has_http2: bool, now: Time) -> Result<Self, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let seconds = i64::try_from(now.as_micros() / 1_000_000).unwrap_or(i64::MAX);
        let mut keys = Vec::new();
        let mut expiry = Vec::new();
        for files in &config.certificates {
            let (key, expires) = certified_key(files, &provider, seconds)?;
            keys.push(Arc::new(key));
            expiry.push((files.certificate.clone(), expires));
        }
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("invariant: the provider has suites for TLS 1.2 and 1.3");
        let builder = match &config.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let unusable = |error: String| TlsError::Unusable { path: path.clone(), error };
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(read_roots(path)?), provider);
                let verifier = if config.client_optional { verifier.allow_unauthenticated() } else { verifier };
                builder.with_client_cert_verifier(verifier.build().map_err(|error| unusable(error.to_string()))?)
            }
        };
        let mut server = builder.with_cert_resolver(Arc::new(CertificateSet::new(keys)));
        let http2 = has_http2.then_some(http2::ALPN_NAME);
        server.alpn_protocols = http2.into_iter().chain([HTTP_1]).map(<[u8]>::to_vec).collect();
        // Without tickets, sessions are only resumed while they are among the last 256.
        if let Ok(ticketer) = ring::Ticketer::new() {
            server.ticketer = ticketer;
        }
        Ok(Self { server: Arc::new(server), expiry })
    }
}

/// The certificates of a listener. The first one is for clients that name no host, or another one.
#[derive(Debug)]
struct CertificateSet {
    keys: Vec<Arc<CertifiedKey>>,
    /// The numbers of the certificates with each name, a wildcard with its `*`, so that no handshake parses certificates.
    by_name: HashMap<String, Vec<usize>>,
}

impl CertificateSet {
    fn new(keys: Vec<Arc<CertifiedKey>>) -> Self {
        let mut by_name = HashMap::<_, Vec<usize>>::new();
        for (number, key) in keys.iter().enumerate() {
            for name in key.end_entity_cert().map(dns_names).unwrap_or_default() {
                by_name.entry(name).or_default().push(number);
            }
        }
        Self { keys, by_name }
    }

    /// The numbers of the certificates that are valid for a name.
    fn valid_for(&self, name: &str) -> impl Iterator<Item = usize> {
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        let wildcard = name.split_once('.').map(|(_, parent)| format!("*.{parent}"));
        [Some(name), wildcard].into_iter().flatten().filter_map(|name| self.by_name.get(&name)).flatten().copied()
    }
}

impl ResolvesServerCert for CertificateSet {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let fits = |number: &usize| self.keys[*number].key.choose_scheme(hello.signature_schemes()).is_some();
        let named = hello.server_name().and_then(|name| self.valid_for(name).filter(fits).min());
        let number = named.or_else(|| (0..self.keys.len()).find(fits))?;
        Some(Arc::clone(&self.keys[number]))
    }
}

/// The names of hosts for which a certificate is valid, in small letters. As webpki requires, only a whole first label is
/// a wildcard, and at least two follow it.
fn dns_names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, parsed)) = X509Certificate::from_der(certificate) else { return Vec::new() };
    let Ok(Some(alternative)) = parsed.subject_alternative_name() else { return Vec::new() };
    let names = alternative.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(name.to_ascii_lowercase()),
        _ => None,
    });
    names.filter(|name| !name.starts_with("*.") || name.matches('.').count() > 1).collect()
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bytes = read_pem(path)?;
    let chain = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| TlsError::File { path: path.to_owned(), error })?;
    if chain.is_empty() { Err(TlsError::Empty(path.to_owned())) } else { Ok(chain) }
}

/// The settings of a policy whose certificates and keys can't be used now, each with the reason.
pub fn certificate_faults(policy: &Policy) -> Vec<(String, TlsError)> {
    let inbound = policy.inbound();
    let listeners = [
        ("inbound", Some(&inbound.listen)),
        ("api", Some(&policy.api().listen)),
        ("rls", policy.rls().map(|rls| &rls.listen)),
        ("resp", policy.resp().map(|resp| &resp.listen)),
        ("admin", Some(&policy.admin().listen)),
        ("outbound", policy.outbound().map(|outbound| &outbound.listen)),
    ];
    let now = SystemClock::new().now();
    let of_listeners = listeners.into_iter().filter_map(|(section, listen)| {
        let config = listen?.tls.as_ref()?;
        Some((format!("{section}.tls"), LoadedTls::load(config, false, now).err()?))
    });
    let has_upstream = inbound.upstream.as_ref().is_some_and(UpstreamAddress::is_https);
    let upstream = has_upstream.then(|| client_config(&inbound.upstream_tls, false).err()).flatten();
    of_listeners.chain(upstream.map(|fault| ("inbound.upstream_tls".to_owned(), fault))).collect()
}

/// Returns a client of HTTP/1.1 servers whose certificates are signed by one of this PEM file, by default one of the system.
///
/// # Errors
/// The file can't be used, or the system has no root certificates.
pub fn tls_connector(ca: Option<&Path>) -> Result<TlsConnector, TlsError> {
    let mut settings = UpstreamTls::default();
    settings.ca = ca.map(Path::to_owned);
    Ok(TlsConnector::from(client_config(&settings, false)?))
}

/// The TLS settings of the client of an upstream, which takes HTTP/2 or HTTP/1.1.
///
/// # Errors
/// A file can't be used, or the system has no root certificates.
pub(crate) fn client_config(settings: &UpstreamTls, has_http2: bool) -> Result<Arc<ClientConfig>, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("invariant: the provider has suites for TLS 1.2 and 1.3");
    let builder = match &settings.ca {
        Some(path) => builder.with_root_certificates(read_roots(path)?),
        None => builder.with_native_roots().map_err(TlsError::SystemRoots)?,
    };
    let mut config = match &settings.certificate {
        None => builder.with_no_client_auth(),
        Some(files) => {
            let unusable =
                |error: rustls::Error| TlsError::Unusable { path: files.certificate.clone(), error: error.to_string() };
            let (chain, key) = (read_certificates(&files.certificate)?, read_key(&files.key)?);
            builder.with_client_auth_cert(chain, key).map_err(unusable)?
        }
    };
    config.alpn_protocols = vec![if has_http2 { http2::ALPN_NAME } else { HTTP_1 }.to_vec()];
    Ok(Arc::new(config))
}

fn read_roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for root in read_certificates(path)? {
        let unusable = |error: rustls::Error| TlsError::Unusable { path: path.to_owned(), error: error.to_string() };
        roots.add(root).map_err(unusable)?;
    }
    Ok(roots)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(&read_pem(path)?).map_err(|error| TlsError::File { path: path.to_owned(), error })
}

fn read_pem(path: &Path) -> Result<Vec<u8>, TlsError> {
    let file_error = |error| TlsError::File { path: path.to_owned(), error: pem::Error::Io(error) };
    read_regular_file(path, MAX_FILE).map_err(file_error)
}

/// Reads a certificate with its chain and key. Returns also the time at which it expires.
fn certified_key(
    files: &CertificateFiles,
    provider: &CryptoProvider,
    now: i64,
) -> Result<(CertifiedKey, i64), TlsError> {
    let path = || files.certificate.clone();
    let chain = read_certificates(&files.certificate)?;
    if chain.len() > MAX_CHAIN {
        let error = format!("it has {} certificates, and a chain at most {MAX_CHAIN}", chain.len());
        return Err(TlsError::Unusable { path: path(), error });
    }
    let key = read_key(&files.key)?;
    let (starts, expires) = validity(&chain[0]).ok_or_else(|| TlsError::Unparsable(path()))?;
    let reason = if now < starts { "not valid yet" } else { "expired" };
    if !(starts..=expires).contains(&now) {
        return Err(TlsError::Expired { path: path(), reason });
    }
    let certified = CertifiedKey::from_der(chain, key, provider);
    let certified = certified.map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => {
            TlsError::Unusable { path: path(), error: format!("{} isn't its key", files.key.display()) }
        }
        error => TlsError::Unusable { path: path(), error: error.to_string() },
    })?;
    Ok((certified, expires))
}

/// The first and the last second at which a certificate is valid.
fn validity(certificate: &CertificateDer<'_>) -> Option<(i64, i64)> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let validity = parsed.validity();
    Some((validity.not_before.timestamp(), validity.not_after.timestamp()))
}

/// The subject of the client's certificate as RFC 4514 writes it, such as `CN=alice,O=Example`. `None` if the client has
/// no certificate, or the subject is empty.
pub(crate) fn client_subject(stream: &TlsStream<TlsTransport>) -> Option<String> {
    let certificate = stream.get_ref().1.peer_certificates()?.first()?;
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some(name_text(parsed.subject())).filter(|subject| !subject.is_empty())
}

/// A name as RFC 4514 writes it, so that different names have different texts.
fn name_text(name: &X509Name<'_>) -> String {
    let parts = name.iter_rdn().collect::<Vec<_>>().into_iter().rev();
    parts.map(|part| part.iter().map(attribute_text).collect::<Vec<_>>().join("+")).collect::<Vec<_>>().join(",")
}

fn attribute_text(attribute: &AttributeTypeAndValue<'_>) -> String {
    let (kind, value) = (attribute.attr_type(), attribute.attr_value());
    let name = oid2abbrev(kind, oid_registry()).ok();
    let mut text = name.map_or_else(|| kind.to_id_string(), str::to_owned) + "=";
    match attribute.as_str() {
        Ok(value) if name.is_some() => push_escaped(&mut text, value),
        _ => {
            let der = value.to_der_vec().unwrap_or_else(|_| value.data.to_vec());
            text.push('#');
            text.extend(der.iter().map(|byte| format!("{byte:02x}")));
        }
    }
    text
}

/// Appends an attribute's value with the escapes of RFC 4514 §2.4.
fn push_escaped(text: &mut String, value: &str) {
    for (index, char) in value.char_indices() {
        match char {
            '"' | '+' | ',' | ';' | '<' | '>' | '\\' => text.extend(['\\', char]),
            ' ' if index == 0 || index == value.len() - 1 => text.push_str("\\ "),
            '#' if index == 0 => text.push_str("\\#"),
            _ if char.is_ascii_control() => text.push_str(&format!("\\{:02x}", u32::from(char))),
            _ => text.push(char),
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, DnValue, KeyPair, SanType};

    use rustls::client::verify_server_name;
    use rustls::pki_types::ServerName;
    use rustls::server::ParsedCertificate;

    use super::*;

    /// The index finds the certificates that webpki, and so a client, finds valid.
    #[test]
    fn certificates_are_found_by_their_names() {
        let names = [
            &["a.test"][..],
            &["*.b.test", "B.test"],
            &["www.b.test", "a.test"],
            &["*.test", "*.c.d.test"],
            &["*x.e.test", "f.*.test"],
            &["127.0.0.1", "xn--bcher-kva.test"],
            &[],
        ];
        let provider = ring::default_provider();
        let keys: Vec<_> = names
            .iter()
            .map(|names| {
                let mut params = CertificateParams::new([]).unwrap();
                params.subject_alt_names = names
                    .iter()
                    .map(|name| match name.parse() {
                        Ok(ip) => SanType::IpAddress(ip),
                        Err(_) => SanType::DnsName((*name).try_into().unwrap()),
                    })
                    .collect();
                let key = KeyPair::generate().unwrap();
                let chain = vec![params.self_signed(&key).unwrap().der().clone()];
                let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
                Arc::new(CertifiedKey::from_der(chain, key, &provider).unwrap())
            })
            .collect();
        let set = CertificateSet::new(keys);
        let mut matches = 0;
        for name in [
            "a.test",
            "A.TEST",
            "a.test.",
            "b.test",
            "www.b.test",
            "WWW.b.TEST",
            "x.b.test",
            "x.y.b.test",
            "c.test",
            "c.d.test",
            "x.c.d.test",
            "test",
            "x.e.test",
            "yx.e.test",
            "f.g.test",
            "xn--bcher-kva.test",
            "localhost",
        ] {
            let wanted = ServerName::try_from(name).unwrap();
            let is_valid = |key: &Arc<CertifiedKey>| {
                verify_server_name(&ParsedCertificate::try_from(&key.cert[0]).unwrap(), &wanted).is_ok()
            };
            let expected: Vec<_> = (0..set.keys.len()).filter(|number| is_valid(&set.keys[*number])).collect();
            let mut found: Vec<_> = set.valid_for(name).collect();
            found.sort_unstable();
            assert_eq!(found, expected, "{name}");
            matches += found.len();
        }
        assert_eq!(matches, 14);
    }

    #[test]
    fn subjects_are_written_without_ambiguity() {
        let text = |attributes: &[(DnType, DnValue)]| {
            let mut params = CertificateParams::default();
            params.distinguished_name = DistinguishedName::new();
            for (kind, value) in attributes {
                params.distinguished_name.push(kind.clone(), value.clone());
            }
            let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
            name_text(X509Certificate::from_der(certificate.der()).unwrap().1.subject())
        };
        let utf8 = |text: &str| DnValue::Utf8String(text.to_owned());
        let organization = (DnType::OrganizationName, utf8("Example"));
        let common = |value: DnValue| (DnType::CommonName, value);
        assert_eq!(text(&[]), "");
        assert_eq!(text(&[organization.clone(), common(utf8("alice"))]), "CN=alice,O=Example");
        assert_eq!(text(&[common(utf8("alice,O=Example"))]), "CN=alice\\,O=Example");
        assert_eq!(text(&[common(utf8(" #a+b\\\n\u{e9} "))]), "CN=\\ #a\\+b\\\\\\0a\u{e9}\\ ");
        assert_eq!(text(&[common(utf8("#0c"))]), "CN=\\#0c");
        assert_eq!(text(&[common(DnValue::BmpString("a".try_into().unwrap()))]), "CN=#1e020061");
        assert_eq!(text(&[(DnType::CustomDnType(vec![1, 3, 9, 9, 9]), utf8("x"))]), "1.3.9.9.9=#0c0178");
    }
}
