//! TLS between kube-scheduler and the extender, with certificates on both sides.
//!
//! - [`plan`]: decides which certificates to make or renew
//! - [`make`]: makes keys and certificates
//! - [`certificate`]: reads and checks certificates
//! - [`names`]: decides which clients are accepted
//! - `source`: keeps certificates in a Secret that the extender writes, or reads them from files that another program maintains
//! - `listener`: accepts connections, and answers clients that do not use TLS
//!
//! The certificates may change at any time. Each new connection uses the newest ones; existing connections are not dropped.

pub mod certificate;
pub(crate) mod listener;
pub mod make;
pub mod names;
pub mod plan;
mod source;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use certificate::{CertificateError, Pair, Roots};
pub(crate) use source::keep;

/// The source of the certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertificateSource {
    /// `--tls-secret`: the extender makes and renews the certificates and keeps them in a Secret.
    Secret {
        /// The Secret's namespace.
        namespace: String,
        /// The Secret's name.
        name: String,
        /// The name in the extender's certificate. Clients expect this name at every address.
        server_name: String,
        /// `--tls-lifetime`: the lifetime of the extender's own certificate.
        lifetime: Duration,
    },
    /// `--tls-cert-file`, `--tls-private-key-file`, `--client-ca-file`: files that another program maintains, read again when they change.
    Files {
        /// The extender's certificate, followed by the intermediate certificates.
        certificate: PathBuf,
        /// The private key of the extender's certificate.
        key: PathBuf,
        /// The CA certificates that sign the clients' certificates.
        client_ca: PathBuf,
        /// The name in the extender's certificate, which the replicas expect of each other.
        server_name: String,
    },
}

impl CertificateSource {
    /// Return the name in the extender's certificate.
    pub fn server_name(&self) -> &str {
        match self {
            CertificateSource::Secret { server_name, .. } | CertificateSource::Files { server_name, .. } => server_name,
        }
    }
}

/// Return the default name in the certificate of an extender in this namespace.
pub fn default_server_name(namespace: &str) -> String {
    format!("divvy-extender.{namespace}.svc")
}

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CredentialsError {
    #[error("{name} {error}")]
    Unreadable { name: &'static str, error: CertificateError },
    #[error("{name} cannot be used: {error}")]
    Unusable { name: &'static str, error: CertificateError },
}

/// The TLS configurations made from one set of certificates.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// For incoming connections.
    pub(crate) server: Arc<rustls::ServerConfig>,
    /// For requests to another replica.
    pub(crate) client: Arc<rustls::ClientConfig>,
    /// When the extender's certificate expires, in Unix seconds.
    pub(crate) not_after_s: i64,
}

impl Credentials {
    /// Make the credentials from PEM data. The error names the unusable part: `names` says what the error calls the
    /// certificate and the CA.
    pub(crate) fn new(
        certificate: &[u8],
        key: &[u8],
        ca: &[u8],
        names: [&'static str; 2],
    ) -> Result<Credentials, CredentialsError> {
        let [name, ca_name] = names;
        let roots = Roots::read(ca).map_err(|error| CredentialsError::Unreadable { name: ca_name, error })?;
        let pair = Pair::read(certificate, key).map_err(|error| CredentialsError::Unreadable { name, error })?;
        let unusable = |error| CredentialsError::Unusable { name, error };
        Ok(Credentials {
            server: Arc::new(pair.server(&roots).map_err(unusable)?),
            client: Arc::new(pair.client(&roots).map_err(unusable)?),
            not_after_s: pair.validity().not_after_s,
        })
    }
}

/// The newest credentials; `None` until the first are available.
pub(crate) type Current = tokio::sync::watch::Receiver<Option<Credentials>>;
