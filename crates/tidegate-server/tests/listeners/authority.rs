//! An authority whose certificates a gate and its clients use.

use std::path::Path;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;

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
        params.not_after = rcgen::date_time_ymd(last_year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.path(&format!("{file}.key")), key.serialize_pem()).unwrap();
        std::fs::write(self.path(&format!("{file}.pem")), certificate.pem()).unwrap();
    }

    /// A client that trusts the authority, with a certificate if there is one.
    pub(crate) fn client(&self, certificate: Option<&str>) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(Path::new(&self.path("ca.pem"))).unwrap()).unwrap();
        let builder = ClientConfig::builder().with_root_certificates(roots);
        let config = match certificate {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let chain = vec![CertificateDer::from_pem_file(self.path(&format!("{file}.pem"))).unwrap()];
                let key = PrivateKeyDer::from_pem_file(self.path(&format!("{file}.key"))).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        TlsConnector::from(Arc::new(config))
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
