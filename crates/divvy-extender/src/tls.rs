//! TLS between kube-scheduler and the extender, with certificates on both sides.
//!
//! - [`plan`]: what to make or renew, decided from values
//! - [`make`]: keys and certificates
//! - [`certificate`]: reading and checking them
//! - [`names`]: which clients are let in
//! - `source`: where they are kept: a Secret that the extender writes, or files of somebody else
//! - `listener`: connections, and what is said to those that come without TLS
//!
//! What is in use can change at any time: each new connection takes what is newest, and none is dropped for it.

pub mod certificate;
pub(crate) mod listener;
pub mod make;
pub mod names;
pub mod plan;
mod source;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use certificate::{Pair, Roots};
pub(crate) use source::keep;

/// Where the certificates come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// `--tls-secret`: made and renewed by the extender, kept in a Secret.
    Secret {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// The name in the extender's certificate: what clients ask for, whatever the address.
        server_name: String,
        /// `--tls-lifetime`: of the extender's own certificate.
        lifetime: Duration,
    },
    /// `--tls-cert-file`, `--tls-private-key-file`, `--client-ca-file`: somebody else's, read again when they change.
    Files {
        /// The extender's certificate, then those between it and the authority.
        certificate: PathBuf,
        /// Its key.
        key: PathBuf,
        /// Who signs the certificates of clients.
        client_ca: PathBuf,
        /// The name in the extender's certificate: what one replica asks the other for.
        server_name: String,
    },
}

impl Source {
    /// The name in the extender's certificate.
    pub fn server_name(&self) -> &str {
        match self {
            Source::Secret { server_name, .. } | Source::Files { server_name, .. } => server_name,
        }
    }
}

/// The name in the certificate of an extender that is installed in this namespace.
pub fn default_server_name(namespace: &str) -> String {
    format!("divvy-extender.{namespace}.svc")
}

/// What connections are made with.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// For those that come.
    pub(crate) server: Arc<rustls::ServerConfig>,
    /// For calls to another replica.
    pub(crate) client: Arc<rustls::ClientConfig>,
    /// When the extender's certificate ends, in Unix seconds.
    pub(crate) not_after_s: i64,
}

impl Credentials {
    /// From PEM. The error names the part that is of no use.
    pub(crate) fn new(certificate: &[u8], key: &[u8], ca: &[u8], names: [&str; 2]) -> Result<Credentials, String> {
        let [certificate_name, ca_name] = names;
        let roots = Roots::read(ca).map_err(|why| format!("{ca_name} {why}"))?;
        let pair = Pair::read(certificate, key).map_err(|why| format!("{certificate_name} {why}"))?;
        Ok(Credentials {
            server: Arc::new(
                pair.server(&roots)
                    .map_err(|why| format!("{certificate_name} is of no use: {why}"))?,
            ),
            client: Arc::new(
                pair.client(&roots)
                    .map_err(|why| format!("{certificate_name} is of no use: {why}"))?,
            ),
            not_after_s: pair.validity().not_after_s,
        })
    }
}

/// The newest credentials; none yet before the first.
pub(crate) type Current = tokio::sync::watch::Receiver<Option<Credentials>>;
