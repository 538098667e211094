//! Decides which certificates to make or renew, from the Secret's data, the time, and the server name. Nothing here makes a key or reads a
//! clock.
//!
//! kube-scheduler reads its certificates only at its start, so the CA and kube-scheduler's certificate have a long lifetime. The extender's
//! own certificate is renewed automatically; clients do not notice, because the same CA signs it.

use std::collections::BTreeMap;

use super::certificate::{CertificateError, Pair, Roots};

/// The keys of the Secret's data.
pub mod keys {
    /// The CA certificate, which clients receive.
    pub const CA: &str = "ca.crt";
    /// The CA's private key.
    pub const CA_KEY: &str = "ca.key";
    /// The extender's own certificate.
    pub const SERVER: &str = "tls.crt";
    /// The private key of the extender's certificate.
    pub const SERVER_KEY: &str = "tls.key";
    /// kube-scheduler's certificate.
    pub const CLIENT: &str = "client.crt";
    /// The private key of kube-scheduler's certificate.
    pub const CLIENT_KEY: &str = "client.key";
}

const DAY_S: i64 = 86_400;

/// The lifetimes of the certificates, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CertificateLifetimes {
    /// The lifetime of the CA and of kube-scheduler's certificate.
    pub authority_s: i64,
    /// The lifetime of the extender's own certificate. It is renewed when a third of this is left.
    pub server_s: i64,
}

impl Default for CertificateLifetimes {
    fn default() -> CertificateLifetimes {
        CertificateLifetimes {
            authority_s: 3_650 * DAY_S,
            server_s: 30 * DAY_S,
        }
    }
}

impl CertificateLifetimes {
    /// Return the remaining lifetime, in seconds, at which the extender's certificate is renewed.
    pub fn renew_server_s(&self) -> i64 {
        self.server_s / 3
    }

    /// Return the remaining lifetime of the CA, in seconds, at which the administrator is warned.
    pub fn warn_s(&self) -> i64 {
        self.authority_s / 10
    }
}

/// The Secret's data, by key.
pub type SecretData = BTreeMap<String, Vec<u8>>;

/// The certificates in the Secret, in the order in which they are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SecretPart {
    /// The CA.
    Authority,
    /// The extender's own certificate, signed by the CA.
    Server,
    /// kube-scheduler's certificate, signed by the CA.
    Client,
}

/// What to make, and what to report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CertificatePlan {
    /// The certificates to make, each with the reason.
    pub make: Vec<(SecretPart, String)>,
    /// A warning for the administrator.
    pub warning: Option<String>,
}

/// Why the Secret's data is not used and not overwritten.
// No `source`: the texts already contain the causes, and an error chain would print them twice.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// Another program made the data.
    #[error(
        "it holds {found}, but not both {} and {}, so the extender did not make it and does not overwrite it. Name an empty Secret with \
         --tls-secret, or mount this one and set --tls-cert-file, --tls-private-key-file and --client-ca-file",
        keys::CA,
        keys::CA_KEY
    )]
    Foreign {
        /// The keys of the data.
        found: String,
    },
    /// The CA is damaged.
    #[error(
        "{ca} {0}. Remove the Secret's data to have all certificates made again (and then give kube-scheduler the new ones), or repair the data",
        ca = keys::CA
    )]
    Damaged(CertificateError),
}

/// Why a certificate is made again although the Secret has one.
#[derive(Debug, thiserror::Error)]
enum Unfit {
    #[error("is missing")]
    Missing,
    #[error(transparent)]
    Unusable(#[from] CertificateError),
    #[error("expires in {0} s")]
    Expires(i64),
}

/// Decide what to make from the Secret's data. `name` is the server name.
///
/// # Errors
/// Fails if the extender did not make the Secret's data, or if the data is damaged. The data is not overwritten, because another
/// program may have made it.
pub fn plan(data: &SecretData, name: &str, now_s: i64, lifetimes: CertificateLifetimes) -> Result<CertificatePlan, PlanError> {
    let get = |key: &str| data.get(key).map(Vec::as_slice).filter(|value| !value.is_empty());
    let all = |why: &str| CertificatePlan {
        make: [SecretPart::Authority, SecretPart::Server, SecretPart::Client]
            .map(|part| (part, why.to_owned()))
            .to_vec(),
        warning: None,
    };
    let (ca, ca_key) = match (get(keys::CA), get(keys::CA_KEY)) {
        (Some(ca), Some(key)) => (ca, key),
        (None, None) if data.values().all(Vec::is_empty) => return Ok(all("there is none yet")),
        _ => {
            return Err(PlanError::Foreign {
                found: data.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
            });
        }
    };
    let authority = Pair::read(ca, ca_key).map_err(PlanError::Damaged)?;
    let roots = Roots::read(ca).map_err(PlanError::Damaged)?;
    let ends_s = authority.validity().not_after_s;
    if ends_s <= now_s {
        return Ok(CertificatePlan {
            warning: Some(
                "the CA had expired, so a new one was made: kube-scheduler cannot reach the extender until it has the new \
                 certificates (divvy scheduler-config) and is restarted"
                    .to_owned(),
            ),
            ..all("the CA certificate has expired")
        });
    }
    let mut plan = CertificatePlan::default();
    let pair = |certificate: &str, key: &str| -> Result<Pair, Unfit> {
        match (get(certificate), get(key)) {
            (Some(certificate), Some(key)) => Ok(Pair::read(certificate, key)?),
            _ => Err(Unfit::Missing),
        }
    };
    let server = pair(keys::SERVER, keys::SERVER_KEY).and_then(|pair| {
        pair.serves(&roots, name, now_s)?;
        // A replica also presents this certificate to another one, as a client.
        pair.identifies(&roots, now_s)?;
        // If the certificate ends with the CA, renewing it would not help.
        let left_s = pair.validity().not_after_s - now_s;
        if left_s < lifetimes.renew_server_s() && pair.validity().not_after_s < ends_s {
            return Err(Unfit::Expires(left_s));
        }
        Ok(())
    });
    if let Err(why) = server {
        plan.make.push((SecretPart::Server, why.to_string()));
    }
    if let Err(why) = pair(keys::CLIENT, keys::CLIENT_KEY).and_then(|pair| Ok(pair.identifies(&roots, now_s)?)) {
        plan.make.push((SecretPart::Client, why.to_string()));
    }
    if ends_s - now_s < lifetimes.warn_s() {
        plan.warning = Some(format!(
            "the CA expires in {} days: empty the Secret at a convenient time, give kube-scheduler the new certificates \
             (divvy scheduler-config) and restart it",
            (ends_s - now_s) / DAY_S
        ));
    }
    Ok(plan)
}

/// Return when the extender's certificate is next renewed, in Unix seconds; `None` if the data contains no readable certificate.
pub fn next_s(data: &SecretData, lifetimes: CertificateLifetimes) -> Option<i64> {
    let pair = Pair::read(data.get(keys::SERVER)?, data.get(keys::SERVER_KEY)?).ok()?;
    Some(pair.validity().not_after_s - lifetimes.renew_server_s())
}
