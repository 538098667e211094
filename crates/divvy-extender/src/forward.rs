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
    pub(crate) async fn bind(&self, leader: &str, own: &str, body: Bytes) -> Result<Bytes, String> {
        if self.credentials.is_some() != leader.starts_with("https://") {
            return Err("only one of the two replicas uses TLS; start both with the same --tls-… flags".to_owned());
        }
        let request = http::Request::post(format!("{leader}/gpushare-scheduler/bind"))
            .header(http::header::CONTENT_TYPE, "application/json")
            .header(FORWARDED, own)
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        let client = self.client()?;
        let answer = async {
            let response = client.request(request).await.map_err(|error| chain(&error))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await;
            let body = body.map_err(|error| error.to_string())?.to_bytes();
            if !status.is_success() {
                return Err(format!("the leader answered {status}"));
            }
            Ok(body)
        };
        match tokio::time::timeout(ANSWER, answer).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(format!("the leader gave no answer within {ANSWER:?}")),
        }
    }

    /// Return the client, and replace it first if the certificates have changed.
    fn client(&self) -> Result<Https, String> {
        let config = match &self.credentials {
            None => None,
            Some((current, _)) => {
                let config = current.borrow().as_ref().map(|found| found.client.clone());
                Some(config.ok_or("this replica has no certificates yet")?)
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
                let name = ServerName::try_from(name.clone()).map_err(|_| format!("{name:?} is not a valid server name"))?;
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
                        .map_err(|error| error.to_string())?
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
