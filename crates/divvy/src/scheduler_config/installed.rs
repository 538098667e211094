//! The address and the certificates of an installed extender, read from its Service and its Secret, for kube-scheduler's configuration.

use std::net::IpAddr;

use divvy_extender::tls::certificate::{Pair, Roots};
use divvy_extender::tls::default_server_name;
use divvy_extender::tls::plan::keys;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Secret, Service};

use super::{Inline, PATH, Tls};

/// Why kube-scheduler cannot call an installed extender, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ExtenderServiceError {
    /// The Service is headless.
    #[error(
        "the Service {service} has no address of its own, and kube-scheduler on the host network cannot resolve names of Services; \
         create the Service again with a clusterIP"
    )]
    NoAddress {
        /// The Service, as `namespace/name`.
        service: String,
    },
    /// The Service has no port.
    #[error("the Service {service} has no port")]
    NoPort {
        /// The Service, as `namespace/name`.
        service: String,
    },
    /// The Secret lacks a certificate or a key.
    #[error(
        "the Secret {secret} has no {key}: the extender has not created the certificates yet; see its log with \
         kubectl logs -n {namespace} deployment/{deployment}"
    )]
    Missing {
        /// The Secret, as `namespace/name`.
        secret: String,
        /// The key in the Secret.
        key: String,
        /// The namespace of the extender.
        namespace: String,
        /// The extender's Deployment.
        deployment: String,
    },
    /// The Secret has a certificate or a key that cannot be used.
    #[error("the Secret {secret}: {key} {why}; see the extender's log")]
    Unusable {
        /// The Secret, as `namespace/name`.
        secret: String,
        /// The key in the Secret.
        key: String,
        /// What is wrong, as a part of a sentence.
        why: String,
    },
    /// The extender's certificate is for another name.
    #[error(
        "the extender's certificate in the Secret {secret} is not for the name {server_name}, so kube-scheduler would refuse it ({why}); give \
         the value of the extender's --tls-server-name"
    )]
    OtherName {
        /// The Secret, as `namespace/name`.
        secret: String,
        /// The name that kube-scheduler would look for.
        server_name: String,
        /// The verifier's words.
        why: String,
    },
    /// A Secret has no certificate authority.
    #[error("it has no {}", keys::CA)]
    NoAuthority,
    /// A Secret has a certificate authority that cannot be used.
    #[error("{} {why}", keys::CA)]
    UnusableAuthority {
        /// What is wrong, as a part of a sentence.
        why: String,
    },
}

/// Return the name of the Secret for the extender's Service, as in the chart.
pub fn secret_name(service: &str) -> String {
    format!("{service}-tls")
}

/// Return the extender's URL and its certificates, which must be valid at `now_s` (Unix time in seconds). `server_name` is the
/// name in the extender's certificate, if it differs from the Service's name.
pub fn installed(
    service: &Service,
    secret: Option<&Secret>,
    server_name: Option<&str>,
    now_s: i64,
) -> Result<(String, Tls), ExtenderServiceError> {
    let namespace = service.metadata.namespace.as_deref().unwrap_or_default();
    let name = service.metadata.name.as_deref().unwrap_or_default();
    let spec = service.spec.as_ref();
    let shown = || format!("{namespace}/{name}");
    let address: IpAddr = spec
        .and_then(|spec| spec.cluster_ip.as_deref())
        .and_then(|ip| ip.parse().ok())
        .ok_or_else(|| ExtenderServiceError::NoAddress { service: shown() })?;
    let port = spec
        .and_then(|spec| spec.ports.as_ref()?.first())
        .map(|port| port.port)
        .ok_or_else(|| ExtenderServiceError::NoPort { service: shown() })?;
    let host = match address {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    let Some(secret) = secret else {
        return Ok((format!("http://{host}:{port}{PATH}"), Tls::default()));
    };
    let secret_name = format!("{namespace}/{}", secret.metadata.name.as_deref().unwrap_or_default());
    let part = |key: &str| -> Result<&ByteString, ExtenderServiceError> {
        let data = secret.data.as_ref().and_then(|data| data.get(key));
        data.filter(|value| !value.0.is_empty())
            .ok_or_else(|| ExtenderServiceError::Missing {
                secret: secret_name.clone(),
                key: key.to_owned(),
                namespace: namespace.to_owned(),
                deployment: name.to_owned(),
            })
    };
    let (ca, cert, key) = (part(keys::CA)?, part(keys::CLIENT)?, part(keys::CLIENT_KEY)?);
    let unusable = |key: &str, why: String| ExtenderServiceError::Unusable {
        secret: secret_name.clone(),
        key: key.to_owned(),
        why,
    };
    let roots = Roots::read(&ca.0).map_err(|why| unusable(keys::CA, why.to_string()))?;
    let client = Pair::read(&cert.0, &key.0).map_err(|why| unusable(keys::CLIENT, why.to_string()))?;
    client
        .identifies(&roots, now_s)
        .map_err(|why| unusable(keys::CLIENT, format!("cannot be used: {why}")))?;
    let server_name = server_name.map_or_else(|| default_server_name_of(name, namespace), str::to_owned);
    let server = Pair::read(&part(keys::SERVER)?.0, &part(keys::SERVER_KEY)?.0);
    let server = server.map_err(|why| unusable(keys::SERVER, why.to_string()))?;
    server
        .serves(&roots, &server_name, now_s)
        .map_err(|why| ExtenderServiceError::OtherName {
            secret: secret_name.clone(),
            server_name: server_name.clone(),
            why: why.to_string(),
        })?;
    let tls = Tls {
        inline: Some(Inline {
            ca: base64(ca),
            cert: base64(cert),
            key: base64(key),
        }),
        server_name: Some(server_name),
        ..Tls::default()
    };
    Ok((format!("https://{host}:{port}{PATH}"), tls))
}

/// Return `ca.crt` of a Secret in base64, after checking that it is a valid CA.
pub fn authority(secret: &Secret) -> Result<String, ExtenderServiceError> {
    let ca = secret.data.as_ref().and_then(|data| data.get(keys::CA));
    let ca = ca.filter(|ca| !ca.0.is_empty()).ok_or(ExtenderServiceError::NoAuthority)?;
    Roots::read(&ca.0).map_err(|why| ExtenderServiceError::UnusableAuthority { why: why.to_string() })?;
    Ok(base64(ca))
}

/// Encode bytes in base64, the encoding that Secrets use, and that kube-scheduler and the API server expect.
fn base64(bytes: &ByteString) -> String {
    let value = serde_json::to_value(bytes).ok();
    let text = value.as_ref().and_then(serde_json::Value::as_str);
    text.expect("bytes are a text in JSON").to_owned()
}

/// Return the name that the certificate of an extender has by default, given the name and namespace of the extender's Service.
fn default_server_name_of(service: &str, namespace: &str) -> String {
    match service {
        "divvy-extender" => default_server_name(namespace),
        other => format!("{other}.{namespace}.svc"),
    }
}

#[cfg(test)]
mod tests {
    use divvy_extender::tls::make::carry_out;
    use divvy_extender::tls::plan::{CertificateLifetimes, SecretData, plan};
    use serde_json::json;

    use super::*;

    const NOW: i64 = 1_800_000_000;
    const NAME: &str = "divvy-extender.divvy-system.svc";

    fn service(ip: &str) -> Service {
        serde_json::from_value(json!({
            "metadata": {"name": "divvy-extender", "namespace": "divvy-system"},
            "spec": {"clusterIP": ip, "ports": [{"port": 32766}]}
        }))
        .expect("a Service")
    }

    fn secret(name: &str) -> Secret {
        let lifetimes = CertificateLifetimes::default();
        let due = plan(&SecretData::new(), name, NOW, lifetimes).expect("ours");
        let data = carry_out(&due, &SecretData::new(), name, NOW, lifetimes).expect("made");
        Secret {
            metadata: serde_json::from_value(json!({"name": "divvy-extender-tls"})).expect("metadata"),
            data: Some(data.into_iter().map(|(key, value)| (key, ByteString(value))).collect()),
            ..Secret::default()
        }
    }

    #[test]
    fn what_is_installed_is_reached_by_address_and_known_by_name() {
        let secret = secret(NAME);
        let (url, tls) = installed(&service("10.96.0.7"), Some(&secret), None, NOW).expect("all is there");
        assert_eq!(url, "https://10.96.0.7:32766/gpushare-scheduler");
        assert_eq!(tls.server_name.as_deref(), Some(NAME));
        let inline = tls.inline.expect("certificates");
        let stored = serde_json::to_value(&secret).expect("JSON");
        assert_eq!(
            [&inline.ca, &inline.cert, &inline.key].map(|part| json!(part)),
            ["ca.crt", "client.crt", "client.key"].map(|key| stored["data"][key].clone()),
            "the scheduler's certificate, and not the extender's"
        );
        let (url, tls) = installed(&service("fd00::7"), None, None, NOW).expect("plain");
        assert_eq!(
            (url.as_str(), tls),
            ("http://[fd00::7]:32766/gpushare-scheduler", Tls::default())
        );
    }

    #[test]
    fn what_cannot_work_is_said() {
        let check = |service: &Service, secret: &Secret, name: Option<&str>, now_s: i64, part: &str| {
            let why = installed(service, Some(secret), name, now_s).expect_err(part).to_string();
            assert!(why.contains(part), "{part}: {why}");
        };
        let good = secret(NAME);
        let fresh = service("10.96.0.7");
        check(&service("None"), &good, None, NOW, "no address of its own");
        check(&fresh, &Secret::default(), None, NOW, "has not created the certificates yet");
        check(
            &fresh,
            &secret("another.name"),
            None,
            NOW,
            "give the value of the extender's --tls-server-name",
        );
        check(&fresh, &good, Some("another.name"), NOW, "not for the name another.name");
        check(&fresh, &good, None, NOW + 4_000 * 86_400, "cannot be used");
        let mut mixed = good.clone();
        if let (Some(data), Some(other)) = (&mut mixed.data, secret(NAME).data) {
            data.insert("ca.crt".to_owned(), other["ca.crt"].clone());
        }
        check(&fresh, &mixed, None, NOW, "client.crt cannot be used");
    }
}
