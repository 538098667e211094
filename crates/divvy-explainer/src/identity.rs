//! The certificate by which clients identify the explainer.
//!
//! It is made at the start and used as long as the process lives. No key has to be stored, because there is only one replica, and clients read the
//! certificate from the ConfigMap before each connection.

use std::sync::Arc;

use crate::Error;
use crate::service_proxy::SERVER_NAME;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// A self-signed certificate, and the TLS configuration of a server with its key.
pub(crate) struct ServerIdentity {
    /// The certificate, in PEM.
    pub(crate) certificate: String,
    pub(crate) server: Arc<ServerConfig>,
}

impl ServerIdentity {
    /// Generate a key, and make a certificate for [`SERVER_NAME`].
    pub(crate) fn new() -> Result<ServerIdentity, Error> {
        let mut params = CertificateParams::new([SERVER_NAME.to_owned()]).map_err(Error::Certificate)?;
        params.distinguished_name.push(DnType::CommonName, SERVER_NAME);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().map_err(Error::Certificate)?;
        let certificate = params.self_signed(&key).map_err(Error::Certificate)?;
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| {
                builder
                    .with_no_client_auth()
                    .with_single_cert(vec![certificate.der().clone()], der)
            })
            .map_err(Error::Identity)?;
        Ok(ServerIdentity {
            certificate: certificate.pem(),
            server: Arc::new(server),
        })
    }
}
