//! An authority whose certificates a gate and its clients use.

use std::path::Path;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// An authority, and a directory with its certificates.
pub(crate) struct Authority {
    pub(crate) issuer: CertifiedIssuer<'static, KeyPair>,
    directory: tempfile::TempDir,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "test authority");
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, directory }
    }

    pub(crate) fn path(&self, file: &str) -> String {
        self.directory.path().join(file).display().to_string()
    }

    /// Writes `FILE.pem` and `FILE.key`: a certificate for this name, which is also its subject's.
    pub(crate) fn issue(&self, file: &str, name: &str, last_year: i32) {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        // The clock of a test may begin in 1970.
        params.not_before = rcgen::date_time_ymd(1970, 1, 1);
        params.not_after = rcgen::date_time_ymd(last_year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.path(&format!("{file}.key")), key.serialize_pem()).unwrap();
        std::fs::write(self.path(&format!("{file}.pem")), certificate.pem()).unwrap();
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(Path::new(&self.path("ca.pem"))).unwrap()).unwrap();
        roots
    }

    fn pair(&self, file: &str) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let chain = vec![CertificateDer::from_pem_file(self.path(&format!("{file}.pem"))).unwrap()];
        (chain, PrivateKeyDer::from_pem_file(self.path(&format!("{file}.key"))).unwrap())
    }

    /// A server with this certificate, whose clients need one of the authority. It speaks these protocols.
    pub(crate) fn server(&self, certificate: &str, protocols: &[&[u8]]) -> TlsAcceptor {
        let clients = WebPkiClientVerifier::builder(Arc::new(self.roots())).build().unwrap();
        let (chain, key) = self.pair(certificate);
        let config = ServerConfig::builder().with_client_cert_verifier(clients).with_single_cert(chain, key);
        let mut config = config.unwrap();
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }

    /// A client that trusts the authority, with a certificate if there is one.
    pub(crate) fn client(&self, certificate: Option<&str>) -> TlsConnector {
        let builder = ClientConfig::builder().with_root_certificates(self.roots());
        let config = match certificate {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let (chain, key) = self.pair(file);
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        TlsConnector::from(Arc::new(config))
    }

    /// A client that trusts the authority and speaks these protocols.
    pub(crate) fn client_of(&self, protocols: &[&[u8]]) -> TlsConnector {
        let mut config = ClientConfig::builder().with_root_certificates(self.roots()).with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        TlsConnector::from(Arc::new(config))
    }

    /// Issues the certificates `app` of an upstream and `gate` of a gate before it. Returns the gate's settings for this
    /// upstream.
    pub(crate) fn issue_upstream(&self) -> String {
        self.issue("app", "app.test", 2099);
        self.issue("gate", "gate", 2099);
        let [ca, certificate, key] = ["ca.pem", "gate.pem", "gate.key"].map(|file| self.path(file));
        format!(
            "upstream_tls = {{ ca = {ca:?}, server_name = \"app.test\", certificate = {certificate:?}, key = {key:?} }}\n"
        )
    }

    /// The settings of a listener with these certificates.
    pub(crate) fn settings(&self, files: &[&str], rest: &str) -> String {
        let list = |end: &str| {
            let paths: Vec<String> =
                files.iter().map(|file| format!("{:?}", self.path(&format!("{file}.{end}")))).collect();
            format!("[{}]", paths.join(", "))
        };
        format!("tls = {{ certificates = {}, keys = {}{rest} }}\n", list("pem"), list("key"))
    }
}
