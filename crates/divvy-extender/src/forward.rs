//! Forwarding of binds: a replica that does not lead sends a bind to the leader, using the certificates that all replicas share.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use crate::tls::Current;

/// The header that marks a forwarded bind. Such a bind is not forwarded again.
pub(crate) const FORWARDED: &str = "divvy-forwarded-by";
/// Timeout of the leader's answer. The leader answers within 4.5 s, and kube-scheduler waits for 5 s.
const ANSWER: Duration = Duration::from_millis(4_800);
/// The maximum size in bytes of the leader's answer, which is one sentence.
const LARGEST_ANSWER: usize = 64 << 10;

type Https = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// Why a bind could not be forwarded to the leader.
// No `source`: the texts already contain the causes, and an error chain would print them twice.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForwardError {
    #[error("only one of the two replicas uses TLS; start both with the same --tls-… flags")]
    OnlyOneUsesTls,
    #[error("this replica has no certificates yet")]
    NoCertificates,
    #[error("{0:?} is not a valid server name")]
    ServerName(String),
    #[error("{0}")]
    Tls(rustls::Error),
    #[error("{0}")]
    Request(http::Error),
    #[error("{}", chain(.0))]
    Send(hyper_util::client::legacy::Error),
    #[error("{0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
    #[error("the leader answered {0}")]
    Status(http::StatusCode),
    #[error("the leader gave no answer within {ANSWER:?}")]
    Late,
}

/// The HTTP client for the leader.
#[derive(Debug)]
pub(crate) struct Forward {
    /// With TLS: the certificates, and the name in the leader's certificate.
    credentials: Option<(Current, String)>,
    /// The client, and the TLS configuration with which it was made.
    client: Mutex<Option<(Option<Arc<ClientConfig>>, Https)>>,
}

impl Forward {
    pub(crate) fn new(credentials: Option<(Current, String)>) -> Forward {
        Forward {
            credentials,
            client: Mutex::new(None),
        }
    }

    /// Send a bind to the leader and return the body of its answer, which the caller returns unchanged. `leader` is the leader's URL,
    /// `https://ADDRESS:PORT`; `own` is this replica's identity.
    pub(crate) async fn bind(&self, leader: &str, own: &str, body: Bytes) -> Result<Bytes, ForwardError> {
        if self.credentials.is_some() != leader.starts_with("https://") {
            return Err(ForwardError::OnlyOneUsesTls);
        }
        let request = http::Request::post(format!("{leader}/gpushare-scheduler/bind"))
            .header(http::header::CONTENT_TYPE, "application/json")
            .header(FORWARDED, own)
            .body(Full::new(body))
            .map_err(ForwardError::Request)?;
        let client = self.client()?;
        let answer = async {
            let response = client.request(request).await.map_err(ForwardError::Send)?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await;
            let body = body.map_err(ForwardError::Body)?.to_bytes();
            if !status.is_success() {
                return Err(ForwardError::Status(status));
            }
            Ok(body)
        };
        match tokio::time::timeout(ANSWER, answer).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(ForwardError::Late),
        }
    }

    /// Return the client, and replace it first if the certificates have changed.
    fn client(&self) -> Result<Https, ForwardError> {
        let config = match &self.credentials {
            None => None,
            Some((current, _)) => {
                let config = current.borrow().as_ref().map(|found| found.client.clone());
                Some(config.ok_or(ForwardError::NoCertificates)?)
            }
        };
        let mut made = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((with, client)) = &*made
            && with.as_ref().map(Arc::as_ptr) == config.as_ref().map(Arc::as_ptr)
        {
            return Ok(client.clone());
        }
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_connect_timeout(Some(Duration::from_secs(1)));
        http.set_nodelay(true);
        let connector = match (&config, &self.credentials) {
            (Some(config), Some((_, name))) => {
                let name = ServerName::try_from(name.clone()).map_err(|_| ForwardError::ServerName(name.clone()))?;
                HttpsConnectorBuilder::new()
                    .with_tls_config((**config).clone())
                    .https_only()
                    .with_server_name_resolver(FixedServerNameResolver::new(name))
                    .enable_http1()
                    .wrap_connector(http)
            }
            _ => HttpsConnectorBuilder::new()
                .with_tls_config(
                    ClientConfig::builder_with_provider(crate::tls::certificate::provider())
                        .with_safe_default_protocol_versions()
                        .map_err(ForwardError::Tls)?
                        .with_root_certificates(rustls::RootCertStore::empty())
                        .with_no_client_auth(),
                )
                .https_or_http()
                .enable_http1()
                .wrap_connector(http),
        };
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(Duration::from_secs(20))
            .pool_timer(hyper_util::rt::TokioTimer::new())
            .build(connector);
        *made = Some((config, client.clone()));
        Ok(client)
    }
}

/// Format an error with its causes, because "client error (Connect)" on its own does not help.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut below = error.source();
    while let Some(error) = below {
        text = format!("{text}: {error}");
        below = error.source();
    }
    text
}
