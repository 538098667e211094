//! Makes keys and certificates. This is the only module of `tls` that draws random numbers. The caller passes the time and the lifetimes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose};

use super::plan::{CertificateLifetimes, CertificatePlan, SecretData, SecretPart, keys};

/// How far a certificate's start is backdated, in seconds. The clocks of the cluster's machines differ, and a new certificate must be valid at
/// once on a machine whose clock is behind.
const BACKDATED_S: i64 = 3_600;

/// Make the certificates of a plan, and return the Secret's new data.
pub fn carry_out(
    plan: &CertificatePlan,
    data: &SecretData,
    name: &str,
    now_s: i64,
    lifetimes: CertificateLifetimes,
) -> Result<SecretData, rcgen::Error> {
    let mut data = data.clone();
    for (part, _) in &plan.make {
        match part {
            SecretPart::Authority => {
                let key = KeyPair::generate()?;
                let mut params = authority();
                valid(&mut params, now_s, now_s.saturating_add(lifetimes.authority_s));
                let certificate = params.self_signed(&key)?;
                put(&mut data, keys::CA, certificate.pem());
                put(&mut data, keys::CA_KEY, key.serialize_pem());
            }
            SecretPart::Server => {
                let mut params = CertificateParams::new([name.to_owned(), "localhost".to_owned(), "127.0.0.1".to_owned()])?;
                params.distinguished_name.push(DnType::CommonName, "divvy-extender");
                // A replica also presents this certificate to the leader, as a client.
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
                let pair = sign(params, &data, now_s, lifetimes.server_s)?;
                put(&mut data, keys::SERVER, pair.0);
                put(&mut data, keys::SERVER_KEY, pair.1);
            }
            SecretPart::Client => {
                let mut params = CertificateParams::default();
                params.distinguished_name.push(DnType::CommonName, "kube-scheduler");
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
                let pair = sign(params, &data, now_s, lifetimes.authority_s)?;
                put(&mut data, keys::CLIENT, pair.0);
                put(&mut data, keys::CLIENT_KEY, pair.1);
            }
        }
    }
    Ok(data)
}

fn put(data: &mut SecretData, key: &str, pem: String) {
    data.insert(key.to_owned(), pem.into_bytes());
}

/// Return the CA's parameters. They are always the same, so that the issuer name in signed certificates equals the CA's own name.
fn authority() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "Divvy extender CA");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn sign(mut params: CertificateParams, data: &SecretData, now_s: i64, lifetime_s: i64) -> Result<(String, String), rcgen::Error> {
    let pem = |key: &str| String::from_utf8_lossy(data.get(key).map_or(&[][..], Vec::as_slice)).into_owned();
    let ca_key = KeyPair::from_pem(&pem(keys::CA_KEY))?;
    let issuer = Issuer::new(authority(), ca_key);
    let ends_s = super::certificate::Pair::read(pem(keys::CA).as_bytes(), pem(keys::CA_KEY).as_bytes())
        .map_or(i64::MAX, |pair| pair.validity().not_after_s);
    valid(&mut params, now_s, now_s.saturating_add(lifetime_s).min(ends_s));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

fn valid(params: &mut CertificateParams, now_s: i64, until_s: i64) {
    params.not_before = at(now_s - BACKDATED_S).into();
    params.not_after = at(until_s).into();
}

fn at(unix_s: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(unix_s.max(0).unsigned_abs())
}
