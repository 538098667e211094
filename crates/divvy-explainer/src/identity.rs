//! The certificate by which clients know this program. It is made at the start and lives as long as the process: there is one replica, and clients read
//! the certificate from the ConfigMap before each connection, so that no key has to be stored.

use std::sync::Arc;

use crate::reach::SERVER_NAME;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// A certificate that is its own authority, and its key.
pub(crate) struct Identity {
    /// PEM.
    pub(crate) certificate: String,
    pub(crate) server: Arc<ServerConfig>,
}

impl Identity {
    /// Draws a key, and makes a certificate for [`SERVER_NAME`].
    pub(crate) fn new() -> Result<Identity, String> {
        let in_words = |error: rcgen::Error| error.to_string();
        let mut params = CertificateParams::new([SERVER_NAME.to_owned()]).map_err(in_words)?;
        params.distinguished_name.push(DnType::CommonName, SERVER_NAME);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().map_err(in_words)?;
        let certificate = params.self_signed(&key).map_err(in_words)?;
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| {
                builder
                    .with_no_client_auth()
                    .with_single_cert(vec![certificate.der().clone()], der)
            })
            .map_err(|error| error.to_string())?;
        Ok(Identity {
            certificate: certificate.pem(),
            server: Arc::new(server),
        })
    }
}
