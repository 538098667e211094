//! What is to be made or renewed, as a function of what is there, the time, and the name. Nothing here makes a key or reads a clock.
//!
//! kube-scheduler reads its certificates at its start only, so the authority and the scheduler's certificate live long; what the
//! extender shows is renewed by itself, and no client notices, as it comes from the same authority.

use std::collections::BTreeMap;

use super::certificate::{Pair, Roots};

/// The keys of the Secret.
pub mod keys {
    /// The authority's certificate: what clients are given.
    pub const CA: &str = "ca.crt";
    /// Its key.
    pub const CA_KEY: &str = "ca.key";
    /// The extender's own certificate.
    pub const SERVER: &str = "tls.crt";
    /// Its key.
    pub const SERVER_KEY: &str = "tls.key";
    /// kube-scheduler's certificate.
    pub const CLIENT: &str = "client.crt";
    /// Its key.
    pub const CLIENT_KEY: &str = "client.key";
}

const DAY_S: i64 = 86_400;

/// How long certificates are valid, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetimes {
    /// The authority, and with it the scheduler's certificate.
    pub authority_s: i64,
    /// The extender's own certificate. It is renewed when a third of that is left.
    pub server_s: i64,
}

impl Default for Lifetimes {
    fn default() -> Lifetimes {
        Lifetimes {
            authority_s: 3_650 * DAY_S,
            server_s: 30 * DAY_S,
        }
    }
}

impl Lifetimes {
    /// What is left of the extender's certificate when it is renewed.
    pub fn renew_server_s(&self) -> i64 {
        self.server_s / 3
    }

    /// What is left of the authority when it is time to tell the administrator.
    pub fn warn_s(&self) -> i64 {
        self.authority_s / 10
    }
}

/// What the Secret holds, by key.
pub type Data = BTreeMap<String, Vec<u8>>;

/// What the Secret is to have, in the order in which it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The certificate authority.
    Authority,
    /// The extender's own certificate, signed by it.
    Server,
    /// kube-scheduler's certificate, signed by it.
    Client,
}

/// What is to be done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Make these, and why.
    pub make: Vec<(Part, String)>,
    /// For the administrator.
    pub warning: Option<String>,
}

/// Looks at the Secret. The error says that it is not one of ours, so that nothing of somebody else's is overwritten.
pub fn plan(data: &Data, name: &str, now_s: i64, lifetimes: Lifetimes) -> Result<Plan, String> {
    let get = |key: &str| data.get(key).map(Vec::as_slice).filter(|value| !value.is_empty());
    let all = |why: &str| Plan {
        make: [Part::Authority, Part::Server, Part::Client]
            .map(|part| (part, why.to_owned()))
            .to_vec(),
        warning: None,
    };
    let (ca, ca_key) = match (get(keys::CA), get(keys::CA_KEY)) {
        (Some(ca), Some(key)) => (ca, key),
        (None, None) if data.values().all(Vec::is_empty) => return Ok(all("there is none yet")),
        _ => {
            return Err(format!(
                "it holds {}, but not both {} and {}, so the extender did not make it and does not overwrite it. Give --tls-secret one that \
                 is empty, or mount this one and give --tls-cert-file, --tls-private-key-file and --client-ca-file",
                data.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
                keys::CA,
                keys::CA_KEY
            ));
        }
    };
    let mend = "Remove its data to have all made anew (kube-scheduler must then be told the new certificates), or put right what is there";
    let authority = Pair::read(ca, ca_key).map_err(|why| format!("{} {why}. {mend}", keys::CA))?;
    let roots = Roots::read(ca).map_err(|why| format!("{} {why}. {mend}", keys::CA))?;
    let ends_s = authority.validity().not_after_s;
    if ends_s <= now_s {
        return Ok(Plan {
            warning: Some(
                "the certificate authority had ended and was made anew: kube-scheduler reaches the extender only when it is given the new \
                 certificates (divvy scheduler-config) and restarted"
                    .to_owned(),
            ),
            ..all("the authority's certificate has ended")
        });
    }
    let mut plan = Plan::default();
    let pair = |certificate: &str, key: &str| -> Result<Pair, String> {
        match (get(certificate), get(key)) {
            (Some(certificate), Some(key)) => Pair::read(certificate, key),
            _ => Err("is not there".to_owned()),
        }
    };
    let server = pair(keys::SERVER, keys::SERVER_KEY).and_then(|pair| {
        pair.serves(&roots, name, now_s)?;
        // It is also what one replica shows to another.
        pair.identifies(&roots, now_s)?;
        // The authority's own end bounds it: renewing would not help.
        let left_s = pair.validity().not_after_s - now_s;
        if left_s < lifetimes.renew_server_s() && pair.validity().not_after_s < ends_s {
            return Err(format!("ends in {left_s} s"));
        }
        Ok(())
    });
    if let Err(why) = server {
        plan.make.push((Part::Server, why));
    }
    if let Err(why) = pair(keys::CLIENT, keys::CLIENT_KEY).and_then(|pair| pair.identifies(&roots, now_s)) {
        plan.make.push((Part::Client, why));
    }
    if ends_s - now_s < lifetimes.warn_s() {
        plan.warning = Some(format!(
            "the certificate authority ends in {} days: empty the Secret at a time that suits you, give kube-scheduler the new certificates \
             (divvy scheduler-config) and restart it",
            (ends_s - now_s) / DAY_S
        ));
    }
    Ok(plan)
}

/// Until when there is nothing to be renewed, in Unix seconds.
pub fn next_s(data: &Data, lifetimes: Lifetimes) -> Option<i64> {
    let pair = Pair::read(data.get(keys::SERVER)?, data.get(keys::SERVER_KEY)?).ok()?;
    Some(pair.validity().not_after_s - lifetimes.renew_server_s())
}
