//! The proxies for Services and pods: they forward requests below `services/NAME/proxy` and `pods/NAME/proxy`, and return the response.
//!
//! As in kube-apiserver (`pkg/registry/core/service/proxy.go`, `pkg/registry/core/pod/rest/subresources.go`, apimachinery `pkg/util/proxy/upgradeaware.go`): the user's `Authorization`
//! header is not forwarded, the certificate of an `https:` endpoint is not verified, and a connection whose upgrade the endpoint accepts
//! carries bytes until one side ends.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::response::Response;
use http::uri::PathAndQuery;
use http::{Method, Request, StatusCode, Uri, header};
use hyper::client::conn::http1;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::error::ApiError;

/// What a proxy reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ProxyTarget {
    Service,
    Pod,
}

/// A kind, a namespace, and a name.
type ProxyKey = (ProxyTarget, String, String);

/// The addresses of Services and pods. A pod has one address, whatever the port is.
#[derive(Debug, Clone, Default)]
pub(crate) struct Endpoints(Arc<Mutex<BTreeMap<ProxyKey, SocketAddr>>>);

impl Endpoints {
    pub(crate) fn set(&self, kind: ProxyTarget, namespace: &str, name: &str, address: SocketAddr) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert((kind, namespace.to_owned(), name.to_owned()), address);
    }

    fn get(&self, kind: ProxyTarget, namespace: &str, name: &str) -> Option<SocketAddr> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&(kind, namespace.to_owned(), name.to_owned())).copied()
    }
}

/// A request to a Service or a pod, parsed from its path.
#[derive(Debug, Clone)]
pub(crate) struct Proxied {
    kind: ProxyTarget,
    pub(crate) namespace: String,
    /// `[SCHEME:]NAME[:PORT]`, the name by which rights refer to the Service or the pod.
    pub(crate) id: String,
    name: String,
    tls: bool,
}

impl Proxied {
    /// Parse a path's segments.
    pub(crate) fn of(segments: &[&str]) -> Option<Proxied> {
        let ["api", "v1", "namespaces", namespace, plural, id, "proxy", ..] = segments else {
            return None;
        };
        let kind = match *plural {
            "services" => ProxyTarget::Service,
            "pods" => ProxyTarget::Pod,
            _ => return None,
        };
        let parts: Vec<&str> = id.split(':').collect();
        let (scheme, name) = match parts.as_slice() {
            [name] | [name, _] => ("http", *name),
            [scheme, name, _] => (*scheme, *name),
            _ => return None,
        };
        Some(Proxied {
            kind,
            namespace: (*namespace).to_owned(),
            id: (*id).to_owned(),
            name: name.to_owned(),
            tls: scheme == "https",
        })
    }

    pub(crate) fn plural(&self) -> &'static str {
        match self.kind {
            ProxyTarget::Service => "services",
            ProxyTarget::Pod => "pods",
        }
    }

    pub(crate) fn verb(method: &Method) -> &'static str {
        match method.as_str() {
            "POST" => "create",
            "PUT" => "update",
            "PATCH" => "patch",
            "DELETE" => "delete",
            _ => "get",
        }
    }

    /// Forward the request and return the response.
    pub(crate) async fn forward(&self, endpoints: &Endpoints, mut request: Request<Body>) -> Result<Response, ApiError> {
        let Some(address) = endpoints.get(self.kind, &self.namespace, &self.name) else {
            let text = match self.kind {
                ProxyTarget::Service => format!("no endpoints available for service {:?}", self.name),
                ProxyTarget::Pod => format!("address not allowed for pod {:?}", self.name),
            };
            return Err(ApiError::new(503, "ServiceUnavailable", text));
        };
        let failed = |text: String| ApiError::new(503, "ServiceUnavailable", format!("error trying to reach service: {text}"));
        request.headers_mut().remove(header::AUTHORIZATION);
        let uri = below(request.uri()).ok_or_else(|| ApiError::bad_request("the path has nothing below /proxy"))?;
        *request.uri_mut() = uri;
        let user = request.extensions_mut().remove::<OnUpgrade>();
        let stream = TcpStream::connect(address).await.map_err(|error| failed(error.to_string()))?;
        let answered = if self.tls {
            let tls = TlsConnector::from(Arc::new(unverified()?));
            let name = ServerName::IpAddress(address.ip().into());
            let stream = tls.connect(name, stream).await.map_err(|error| failed(error.to_string()))?;
            sent(stream, request).await
        } else {
            sent(stream, request).await
        };
        let mut response = answered.map_err(|error| failed(error.to_string()))?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let endpoint = response.extensions_mut().remove::<OnUpgrade>();
            let (Some(user), Some(endpoint)) = (user, endpoint) else {
                return Err(ApiError::new(
                    501,
                    "NotImplemented",
                    "a client in this process cannot upgrade its connection; use the port",
                ));
            };
            tokio::spawn(async move {
                if let Err(error) = carried(user, endpoint).await {
                    tracing::debug!(%error, "an upgraded connection ended");
                }
            });
        }
        Ok(response)
    }
}

/// Return the part of the URI after `/proxy`.
fn below(uri: &Uri) -> Option<Uri> {
    let text = uri.path_and_query().map_or(uri.path(), PathAndQuery::as_str);
    let (_, rest) = text.split_once("/proxy")?;
    let path = if rest.starts_with('/') {
        rest.to_owned()
    } else {
        format!("/{rest}")
    };
    path.parse().ok()
}

async fn sent<S>(stream: S, request: Request<Body>) -> Result<Response, hyper::Error>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a connection to a Service ended");
        }
    });
    Ok(sender.send_request(request).await?.map(Body::new))
}

/// Carry bytes in both directions until either side ends.
async fn carried(user: OnUpgrade, endpoint: OnUpgrade) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let (mut to_user, mut from_user) = (None, None);
    let (user, endpoint) = (user.await?, endpoint.await?);
    let (mut user_read, mut user_write) = tokio::io::split(TokioIo::new(user));
    let (mut endpoint_read, mut endpoint_write) = tokio::io::split(TokioIo::new(endpoint));
    tokio::select! {
        ended = tokio::io::copy(&mut user_read, &mut endpoint_write) => from_user = Some(ended?),
        ended = tokio::io::copy(&mut endpoint_read, &mut user_write) => to_user = Some(ended?),
    }
    tracing::trace!(?from_user, ?to_user, "an upgraded connection ended");
    Ok(())
}

fn unverified() -> Result<rustls::ClientConfig, ApiError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| ApiError::new(500, "InternalError", error.to_string()))?;
    Ok(builder
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody(provider)))
        .with_no_client_auth())
}

/// A verifier that accepts any certificate, as kube-apiserver's proxy does (`InsecureSkipVerify`).
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
