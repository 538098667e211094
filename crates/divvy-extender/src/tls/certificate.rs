//! Certificates as values: read from PEM, and checked by the same verifiers that clients and servers use, at a given time.

use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::ServerCertVerifier as _;
use rustls::client::{VerifierBuilderError, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// The maximum size in bytes of PEM data. A certificate and its key have a few kilobytes; a bundle of CAs may be larger.
pub const LARGEST_PEM: usize = 1 << 20;

/// Return the cryptography provider for rustls: ring, as in kube's client.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Why PEM data cannot be used as a certificate, or a certificate is not accepted. The texts are sentences without a subject, such as "is
/// larger than 1 MiB", except for those of [`Pair::serves`], [`Pair::identifies`], [`Pair::server`], and [`Pair::client`].
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The data is too large.
    #[error("is larger than 1 MiB, but no certificate is that large")]
    Large,
    /// The data is not PEM.
    #[error("is not readable PEM ({0})")]
    Pem(pem::Error),
    /// The data is PEM of something else.
    #[error("holds no certificate in PEM (-----BEGIN CERTIFICATE-----)")]
    None,
    /// The certificate's validity period cannot be parsed.
    #[error("holds a certificate whose validity period cannot be read")]
    Validity,
    /// The private key cannot be parsed.
    #[error("has no readable private key ({0})")]
    Key(pem::Error),
    /// The TLS library does not know the kind of the certificate or of its key.
    #[error("has an unusable certificate or key ({0})")]
    Unusable(rustls::Error),
    /// The key belongs to another certificate.
    #[error("has a certificate and a key that do not match")]
    Mismatch,
    /// A certificate in a bundle of CAs is not a CA's.
    #[error("holds a certificate that is not a CA certificate ({0})")]
    NotAuthority(rustls::Error),
    /// The name that clients expect cannot be the name of a server.
    #[error("{0:?} is not a valid server name")]
    ServerName(String),
    /// The CA certificates cannot verify anything.
    #[error("{0}")]
    Verifier(#[from] VerifierBuilderError),
    /// The TLS library does not accept the certificate.
    #[error("{0}")]
    Tls(#[from] rustls::Error),
}

/// The period in which a certificate is valid, in Unix seconds, inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// The first valid second.
    pub not_before_s: i64,
    /// The last valid second.
    pub not_after_s: i64,
}

/// A certificate with its intermediate certificates and its private key.
#[derive(Debug)]
pub struct Pair {
    leaf: CertificateDer<'static>,
    between: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    validity: Validity,
}

impl Pair {
    /// Parse a certificate chain and a private key in PEM, and check that they match.
    pub fn read(certificate: &[u8], key: &[u8]) -> Result<Pair, CertificateError> {
        let mut between = certificates(certificate)?;
        let leaf = between.remove(0);
        let validity = validity(&leaf).ok_or(CertificateError::Validity)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(CertificateError::Key)?;
        let pair = Pair {
            leaf,
            between,
            key,
            validity,
        };
        let known =
            CertifiedKey::from_der(pair.chain(), pair.key.clone_key(), &provider()).map_err(CertificateError::Unusable)?;
        known.keys_match().map_err(|_| CertificateError::Mismatch)?;
        Ok(pair)
    }

    /// Return the certificate's validity period.
    pub fn validity(&self) -> Validity {
        self.validity
    }

    fn chain(&self) -> Vec<CertificateDer<'static>> {
        std::iter::once(&self.leaf).chain(&self.between).cloned().collect()
    }

    /// Check that a client that trusts `roots` and expects `name` accepts the certificate at the given time.
    pub fn serves(&self, roots: &Roots, name: &str, at_s: i64) -> Result<(), CertificateError> {
        let server_name = ServerName::try_from(name.to_owned()).map_err(|_| CertificateError::ServerName(name.to_owned()))?;
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.0.clone(), provider()).build()?;
        verifier.verify_server_cert(&self.leaf, &self.between, &server_name, &[], unix_time(at_s))?;
        Ok(())
    }

    /// Check that a server that trusts `roots` accepts the certificate from a client at the given time.
    pub fn identifies(&self, roots: &Roots, at_s: i64) -> Result<(), CertificateError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.0.clone(), provider()).build()?;
        verifier.verify_client_cert(&self.leaf, &self.between, unix_time(at_s))?;
        Ok(())
    }

    /// Return the configuration of a server with this certificate. It accepts clients whose certificate is signed by one of
    /// `clients`, and clients without any certificate.
    pub fn server(&self, clients: &Roots) -> Result<ServerConfig, CertificateError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(clients.0.clone(), provider())
            // The kubelet's probes and Prometheus have no certificate; `http` decides which pages they may read.
            .allow_unauthenticated()
            .build()?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(self.chain(), self.key.clone_key())?;
        // No HTTP/2: kube-scheduler would keep using a connection to a dead node until its ping fails, 45 s later. It drops an HTTP/1.1
        // connection as soon as a request times out.
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    /// Return the configuration of a client with this certificate. It accepts servers whose certificate is signed by one of
    /// `servers`.
    pub fn client(&self, servers: &Roots) -> Result<ClientConfig, CertificateError> {
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_root_certificates(servers.0.clone())
            .with_client_auth_cert(self.chain(), self.key.clone_key())?;
        config.alpn_protocols.clear();
        Ok(config)
    }
}

/// Trusted CA certificates.
#[derive(Debug, Clone)]
pub struct Roots(Arc<RootCertStore>);

impl Roots {
    /// Parse a PEM bundle.
    pub fn read(pem: &[u8]) -> Result<Roots, CertificateError> {
        let mut store = RootCertStore::empty();
        for certificate in certificates(pem)? {
            store.add(certificate).map_err(CertificateError::NotAuthority)?;
        }
        Ok(Roots(Arc::new(store)))
    }
}

/// Parse a PEM bundle of at least one certificate.
fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    if pem.len() > LARGEST_PEM {
        return Err(CertificateError::Large);
    }
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(CertificateError::Pem)?;
    if found.is_empty() {
        return Err(CertificateError::None);
    }
    Ok(found)
}

fn unix_time(at_s: i64) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(at_s.max(0).unsigned_abs()))
}

/// Return `Certificate.tbsCertificate.validity` (RFC 5280, 4.1), which rustls checks but does not expose; `None` if it cannot be parsed.
pub fn validity(certificate: &CertificateDer<'_>) -> Option<Validity> {
    const SEQUENCE: u8 = 0x30;
    const INTEGER: u8 = 0x02;
    const VERSION: u8 = 0xa0;
    let (_, outer, _) = element(certificate.as_ref(), SEQUENCE)?;
    let (_, inner, _) = element(outer, SEQUENCE)?;
    let inner = element(inner, VERSION).map_or(inner, |(_, _, rest)| rest);
    let (_, _, rest) = element(inner, INTEGER)?;
    let (_, _, rest) = element(rest, SEQUENCE)?; // the algorithm
    let (_, _, rest) = element(rest, SEQUENCE)?; // the issuer
    let (_, times, _) = element(rest, SEQUENCE)?;
    let (not_before_s, rest) = time(times)?;
    let (not_after_s, _) = time(rest)?;
    Some(Validity {
        not_before_s,
        not_after_s,
    })
}

/// Return the common name in a subject (`RDNSequence` without its tag; RFC 5280, 4.1.2.6) if it is text. webpki only reads alternative names.
pub(super) fn common_name(mut subject: &[u8]) -> Option<String> {
    const SET: u8 = 0x31;
    const SEQUENCE: u8 = 0x30;
    const OBJECT_IDENTIFIER: u8 = 0x06;
    const TEXTS: [u8; 3] = [0x0c, 0x13, 0x16]; // UTF8String, PrintableString, IA5String
    const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
    while let Some((_, mut attributes, rest)) = element(subject, SET) {
        subject = rest;
        while let Some((_, attribute, rest)) = element(attributes, SEQUENCE) {
            attributes = rest;
            let (_, kind, value) = element(attribute, OBJECT_IDENTIFIER)?;
            if kind == COMMON_NAME {
                let (_, text, _) = TEXTS.iter().find_map(|tag| element(value, *tag))?;
                return std::str::from_utf8(text).ok().map(str::to_owned);
            }
        }
    }
    None
}

/// Parse the first DER element if it has this tag. Return its tag, its content, and the bytes after it.
fn element(der: &[u8], tag: u8) -> Option<(u8, &[u8], &[u8])> {
    let (&found, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        let count = usize::from(first & 0x7f);
        if !(1..=4).contains(&count) {
            return None;
        }
        let (bytes, rest) = rest.split_at_checked(count)?;
        (bytes.iter().fold(0usize, |sum, byte| sum << 8 | usize::from(*byte)), rest)
    };
    let (content, rest) = rest.split_at_checked(length)?;
    (found == tag).then_some((found, content, rest))
}

/// Parse a `UTCTime` (YYMMDDhhmmssZ, 1950 to 2049) or a `GeneralizedTime` (YYYYMMDDhhmmssZ). Return Unix seconds, and the bytes
/// after it.
fn time(der: &[u8]) -> Option<(i64, &[u8])> {
    const UTC_TIME: u8 = 0x17;
    const GENERALIZED_TIME: u8 = 0x18;
    let (text, short, rest) = match element(der, UTC_TIME) {
        Some((_, content, rest)) => (content, true, rest),
        None => {
            let (_, content, rest) = element(der, GENERALIZED_TIME)?;
            (content, false, rest)
        }
    };
    let text = std::str::from_utf8(text).ok()?.strip_suffix('Z')?;
    let number = |at: std::ops::Range<usize>| text.get(at)?.parse::<i16>().ok();
    let (year, rest_at) = if short {
        let year = number(0..2)?;
        (if year < 50 { 2000 + year } else { 1900 + year }, 2)
    } else {
        (number(0..4)?, 4)
    };
    let part = |index: usize| i8::try_from(number(rest_at + 2 * index..rest_at + 2 * index + 2)?).ok();
    let civil = jiff::civil::DateTime::new(year, part(0)?, part(1)?, part(2)?, part(3)?, part(4)?, 0).ok()?;
    let zoned = civil.to_zoned(jiff::tz::TimeZone::UTC).ok()?;
    Some((zoned.timestamp().as_second(), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_time_are_read_and_nonsense_is_not() {
        let utc = |text: &str| [&[0x17, text.len() as u8], text.as_bytes()].concat();
        let generalized = |text: &str| [&[0x18, text.len() as u8], text.as_bytes()].concat();
        for (der, expected) in [
            (utc("700101000000Z"), Some(0)),
            (utc("491231235959Z"), Some(2_524_607_999)),
            (generalized("20500101000000Z"), Some(2_524_608_000)),
            (generalized("20261121153600Z"), Some(1_795_275_360)),
            (utc("7001010000Z"), None),
            (utc("701301000000Z"), None),
            (utc("700101000000"), None),
            (generalized(""), None),
            (vec![0x17, 0x85, 1, 1, 1, 1, 1], None),
            (vec![0x17], None),
            (vec![], None),
        ] {
            assert_eq!(time(&der).map(|(at, _)| at), expected, "{der:?}");
        }
    }
}
