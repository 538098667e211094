//! The client of Divvy's explainer, for a user who may not list nodes and pods. The connection goes through the API server's
//! service proxy and is encrypted with TLS from this client to the explainer. The user's own token authenticates the request.

use std::sync::Arc;
use std::time::Duration;

use divvy_explainer::service_proxy::{self, ALL_NODES, Endpoint, PATH, SERVER_NAME, error_text};
use divvy_kube::client::Connection;
use divvy_why::{Answer, PodName};
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;

/// The time limit to connect to the explainer through the API server.
const REACHED: Duration = Duration::from_secs(10);
/// The time limit for an answer. The explainer reads the cluster for at most 20 s, and may first have to finish another request.
const ANSWERED: Duration = Duration::from_secs(50);
/// The largest accepted answer in bytes. The explainer sends no larger answers.
const LARGEST_ANSWER: usize = 32 << 20;

/// The explainer, and a connection to it.
pub(super) struct Explainer<'a> {
    client: &'a kube::Client,
    endpoint: Endpoint,
    token: HeaderValue,
    sender: SendRequest<Empty<Bytes>>,
}

impl<'a> Explainer<'a> {
    /// Find the explainer and connect to it. An error is a sentence for the user.
    pub(super) async fn reach(connection: &'a Connection) -> Result<Explainer<'a>, String> {
        let token = connection.token().await.map_err(|error| error.to_string())?;
        let token = token.header().ok_or("your token cannot be sent in a header")?;
        let client = &connection.client;
        let endpoint = service_proxy::find(client).await.map_err(|error| error.to_string())?.ok_or_else(|| {
            format!(
                "the ConfigMap {}/{} with the explainer's address does not exist, or you may not read it: Divvy is not installed, is an older version, or was \
                 installed with explainer.enabled=false",
                service_proxy::CONFIG_MAP_NAMESPACE,
                service_proxy::CONFIG_MAP
            )
        })?;
        Ok(Explainer {
            sender: connected(client, &endpoint).await?,
            client,
            endpoint,
            token,
        })
    }

    /// Request the explainer's answer about a pod. An error is a sentence for the user.
    pub(super) async fn ask(&mut self, pod: &PodName, all_nodes: bool) -> Result<Answer, String> {
        // The explainer closes connections after a while, and when they are idle.
        if self.sender.ready().await.is_err() {
            self.sender = connected(self.client, &self.endpoint).await?;
        }
        match self.answer(pod, all_nodes).await {
            // The explainer may close the connection in the middle of a request. The request only reads, so it is safe to repeat.
            Err(Failure::Broken(_)) => {
                self.sender = connected(self.client, &self.endpoint).await?;
                self.answer(pod, all_nodes).await.map_err(Failure::into_text)
            }
            answer => answer.map_err(Failure::into_text),
        }
    }

    async fn answer(&mut self, pod: &PodName, all_nodes: bool) -> Result<Answer, Failure> {
        let query = if all_nodes { format!("?{ALL_NODES}") } else { String::new() };
        let request = Request::get(format!("{PATH}/{}/{}{query}", pod.namespace, pod.name))
            .header(header::HOST, SERVER_NAME)
            .header(header::AUTHORIZATION, self.token.clone())
            .body(Empty::new())
            .map_err(|error| Failure::Said(error.to_string()))?;
        let answered = async {
            let broken = |error: String| Failure::Broken(format!("the connection through the API server broke: {error}"));
            let response = self.sender.send_request(request).await;
            let response = response.map_err(|error| broken(error.to_string()))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await;
            let body = body.map_err(|error| broken(error.to_string()))?.to_bytes();
            match status {
                StatusCode::OK => serde_json::from_slice(&body).map_err(|error| {
                    Failure::Said(format!(
                        "its answer cannot be read ({error}); it may be of another version: run divvy version"
                    ))
                }),
                status => Err(Failure::Said(format!("{} ({status})", error_text(&body)))),
            }
        };
        match tokio::time::timeout(ANSWERED, answered).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(Failure::Said(format!("it did not answer within {ANSWERED:?}"))),
        }
    }
}

/// The reason why there is no answer, as a sentence for the user.
enum Failure {
    /// The connection ended.
    Broken(String),
    /// Any other failure, including an error response of the explainer.
    Said(String),
}

impl Failure {
    fn into_text(self) -> String {
        match self {
            Failure::Broken(text) | Failure::Said(text) => text,
        }
    }
}

async fn connected(client: &kube::Client, endpoint: &Endpoint) -> Result<SendRequest<Empty<Bytes>>, String> {
    let connecting = async {
        let stream = service_proxy::tunnel(client, &endpoint.address)
            .await
            .map_err(|error| error.to_string())?;
        let tls = TlsConnector::from(Arc::new(config(&endpoint.certificate)?));
        let server = ServerName::try_from(SERVER_NAME).map_err(|error| error.to_string())?;
        let tls = tls.connect(server, stream).await.map_err(not_it)?;
        let (sender, connection) = http1::handshake(TokioIo::new(tls)).await.map_err(|error| error.to_string())?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "the connection to the explainer ended");
            }
        });
        Ok(sender)
    };
    match tokio::time::timeout(REACHED, connecting).await {
        Ok(connected) => connected,
        Err(_elapsed) => Err(format!("it could not be reached within {REACHED:?}")),
    }
}

/// Return a sentence about a failed TLS handshake. After such a failure, no token has been sent.
fn not_it(error: std::io::Error) -> String {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
    match cause {
        Some(rustls::Error::InvalidCertificate(why)) => format!(
            "the server behind the explainer's Service does not have the certificate from the ConfigMap {}/{} ({why}), so your token was not sent to it",
            service_proxy::CONFIG_MAP_NAMESPACE,
            service_proxy::CONFIG_MAP
        ),
        _ => format!("the connection through the API server broke: {error}"),
    }
}

fn config(certificate: &str) -> Result<ClientConfig, String> {
    let map = format!(
        "{} of the ConfigMap {}/{}",
        service_proxy::CERTIFICATE,
        service_proxy::CONFIG_MAP_NAMESPACE,
        service_proxy::CONFIG_MAP
    );
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes())
        .map_err(|error| format!("{map} is not a certificate in PEM ({error})"))?;
    roots
        .add(certificate)
        .map_err(|error| format!("{map} cannot be used as a certificate ({error})"))?;
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let builder = builder
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}
