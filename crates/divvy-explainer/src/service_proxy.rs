//! How `divvy why` reaches Divvy's explainer (crate `divvy-explainer`), for a user who may not list nodes and pods.
//!
//! ```text
//! divvy why ──► API server (service proxy) ──► explainer
//!     └──────── TLS inside an upgraded connection ───┘
//! ```
//!
//! The client reaches the explainer's Service through the API server's service proxy, which every client with a kubeconfig can use. The
//! proxy removes the `Authorization` header and does not check the certificate of the Service (kube-apiserver
//! `pkg/registry/core/service/proxy.go`, apimachinery `pkg/util/proxy/upgradeaware.go`). Therefore the proxy only carries bytes: the
//! connection is upgraded to [`PROTOCOL`], inside which the client and the explainer use TLS. No one else sees the user's token.

use http::{HeaderValue, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::client::Body;

use divvy_kube::Error;

/// Namespace of the ConfigMap with the explainer's address. Every user may read `kube-public`.
pub const CONFIG_MAP_NAMESPACE: &str = "kube-public";
/// Name of the ConfigMap with the explainer's address.
pub const CONFIG_MAP: &str = "divvy";
/// Key in the ConfigMap whose value is the [`ServiceAddress`].
pub const SERVICE: &str = "service";
/// Key in the ConfigMap whose value is the explainer's self-signed certificate, in PEM.
pub const CERTIFICATE: &str = "tls.crt";
/// The name in the explainer's certificate.
pub const SERVER_NAME: &str = "divvy-explainer";
/// Protocol to which the connection is upgraded: TLS with HTTP/1.1 inside.
pub const PROTOCOL: &str = "divvy-why";
/// Path of the upgrade request. Inside the connection, requests go to this path followed by `/NAMESPACE/POD`.
pub const PATH: &str = "/why";
/// Query string of a request for an answer about all nodes.
pub const ALL_NODES: &str = "allNodes=true";

/// The address of the explainer's Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceAddress {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub service: String,
    /// The name or number of the Service's port.
    pub port: String,
}

impl ServiceAddress {
    /// Parse `NAMESPACE/SERVICE:PORT`. The parts become part of a URL path, so anything that is not a valid name yields `None`.
    pub fn parse(text: &str) -> Option<ServiceAddress> {
        let (namespace, rest) = text.trim().split_once('/')?;
        let (service, port) = rest.split_once(':')?;
        let is_label = |text: &str| {
            let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            (1..=63).contains(&text.len()) && text.bytes().all(legal)
        };
        [namespace, service, port]
            .iter()
            .all(|part| is_label(part))
            .then(|| ServiceAddress {
                namespace: namespace.to_owned(),
                service: service.to_owned(),
                port: port.to_owned(),
            })
    }

    fn proxy(&self) -> String {
        let ServiceAddress {
            namespace,
            service,
            port,
        } = self;
        format!("/api/v1/namespaces/{namespace}/services/{service}:{port}/proxy{PATH}")
    }
}

/// How to reach the explainer and verify its identity.
#[derive(Debug, Clone)]
pub struct ExplainerEndpoint {
    /// The address of the explainer's Service.
    pub address: ServiceAddress,
    /// The explainer's certificate, in PEM.
    pub certificate: String,
}

/// Read the explainer's address and certificate. `None` means that there is no explainer that the user may call.
///
/// # Errors
/// Fails if the ConfigMap cannot be read, or does not have the expected keys.
pub async fn find(client: &kube::Client) -> Result<Option<ExplainerEndpoint>, Error> {
    let what = format!("the ConfigMap {CONFIG_MAP_NAMESPACE}/{CONFIG_MAP}");
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), CONFIG_MAP_NAMESPACE);
    let found = api
        .get_opt(CONFIG_MAP)
        .await
        .map_err(|source| Error::api(format!("{what} could not be read"), source));
    let found = match found {
        // The chart installs the ConfigMap and the right to read it together, so without the right there is no explainer.
        Err(error) if error.is_forbidden() => None,
        found => found?,
    };
    let Some(mut data) = found.map(|map| map.data.unwrap_or_default()) else {
        return Ok(None);
    };
    let service = data.remove(SERVICE).unwrap_or_default();
    let address = ServiceAddress::parse(&service).ok_or_else(|| Error::Explainer {
        text: format!("{what} does not name a Service (data.{SERVICE} is {service:?}, not NAMESPACE/SERVICE:PORT)"),
    })?;
    let certificate = data.remove(CERTIFICATE).ok_or_else(|| Error::Explainer {
        text: format!(
            "{what} has no {CERTIFICATE}, which the explainer writes at its start and once a minute; see the explainer's log"
        ),
    })?;
    Ok(Some(ExplainerEndpoint { address, certificate }))
}

/// Open a connection to the explainer through the API server. The caller must use TLS on the connection.
///
/// # Errors
/// Fails if the API server or the explainer refuses the connection.
pub async fn tunnel(client: &kube::Client, address: &ServiceAddress) -> Result<TokioIo<hyper::upgrade::Upgraded>, Error> {
    const MOST: usize = 64 << 10;
    let failed = |text: String| Error::Explainer {
        text: format!("no connection could be made through the API server: {text}"),
    };
    let request = Request::get(address.proxy())
        .header(header::CONNECTION, HeaderValue::from_static("Upgrade"))
        .header(header::UPGRADE, HeaderValue::from_static(PROTOCOL))
        .body(Body::empty())
        .map_err(|error| failed(error.to_string()))?;
    let response = client
        .send(request)
        .await
        .map_err(|source| Error::api("no connection could be made through the API server", source))?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let upgraded = hyper::upgrade::on(response)
            .await
            .map_err(|error| failed(error.to_string()))?;
        return Ok(TokioIo::new(upgraded));
    }
    let status = response.status();
    let body = http_body_util::BodyExt::collect(http_body_util::Limited::new(response.into_body(), MOST));
    let text = match body.await {
        Ok(body) => error_text(&body.to_bytes()),
        Err(error) => error.to_string(),
    };
    let hint = match status {
        StatusCode::FORBIDDEN => "; the chart grants this right to all users (explainer.enabled=true)",
        _ => "",
    };
    Err(failed(format!("{text} ({status}){hint}")))
}

/// Return the message of an error answer, which is a Status of the API server or the explainer's `{"error": …}`. If the body is
/// neither, return its first 200 characters.
pub fn error_text(body: &[u8]) -> String {
    let parsed: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let words = parsed
        .as_ref()
        .and_then(|body| body["error"].as_str().or(body["message"].as_str()));
    match words {
        Some(words) => words.to_owned(),
        None => String::from_utf8_lossy(body).trim().chars().take(200).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_made_of_names() {
        let address = ServiceAddress::parse("divvy/divvy-explainer:why").expect("an address");
        assert_eq!(
            address.proxy(),
            "/api/v1/namespaces/divvy/services/divvy-explainer:why/proxy/why"
        );
        for odd in [
            "", "a/b", "a:b", "a/../b:c", "a/b:c/d", "a/b:c?d", "A/b:c", "a/b/c:d", "a/:c", "a/b:%2f",
        ] {
            assert_eq!(ServiceAddress::parse(odd), None, "{odd}");
        }
    }

    #[test]
    fn an_answer_that_is_no_answer_is_quoted_in_short() {
        for (body, words) in [
            (r#"{"error": "busy"}"#, "busy"),
            (
                r#"{"kind": "Status", "message": "services \"x\" is forbidden"}"#,
                "services \"x\" is forbidden",
            ),
            ("no endpoints", "no endpoints"),
        ] {
            assert_eq!(error_text(body.as_bytes()), words);
        }
        assert_eq!(error_text(&[b'x'; 5_000]).len(), 200);
    }
}
