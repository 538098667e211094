//! The client of Divvy's explainer, for a user who may not list nodes and pods. The connection goes through the API server's
//! service proxy and is encrypted with TLS from this client to the explainer. The user's own token authenticates the request.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use divvy_explainer::service_proxy::{self, ALL_NODES, ExplainerEndpoint, PATH, SERVER_NAME, error_text};
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
    endpoint: ExplainerEndpoint,
    token: HeaderValue,
    sender: SendRequest<Empty<Bytes>>,
}

impl<'a> Explainer<'a> {
    /// Find the explainer and connect to it.
    pub(super) async fn reach(connection: &'a Connection) -> anyhow::Result<Explainer<'a>> {
        let token = connection.token().await?;
        let token = token.header().context("your token cannot be sent in a header")?;
        let client = &connection.client;
        let endpoint = service_proxy::find(client).await?.with_context(|| {
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

    /// Request the explainer's answer about a pod.
    pub(super) async fn ask(&mut self, pod: &PodName, all_nodes: bool) -> anyhow::Result<Answer> {
        // The explainer closes connections after a while, and when they are idle.
        if self.sender.ready().await.is_err() {
            self.sender = connected(self.client, &self.endpoint).await?;
        }
        match self.answer(pod, all_nodes).await {
            // The explainer may close the connection in the middle of a request. The request only reads, so it is safe to repeat.
            Err(error) if error.is::<BrokenConnection>() => {
                self.sender = connected(self.client, &self.endpoint).await?;
                self.answer(pod, all_nodes).await
            }
            answer => answer,
        }
    }

    async fn answer(&mut self, pod: &PodName, all_nodes: bool) -> anyhow::Result<Answer> {
        let query = if all_nodes { format!("?{ALL_NODES}") } else { String::new() };
        let request = Request::get(format!("{PATH}/{}/{}{query}", pod.namespace, pod.name))
            .header(header::HOST, SERVER_NAME)
            .header(header::AUTHORIZATION, self.token.clone())
            .body(Empty::new())?;
        let answered = async {
            let response = self.sender.send_request(request).await;
            let response = response.map_err(|error| BrokenConnection(error.to_string()))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await;
            let body = body.map_err(|error| BrokenConnection(error.to_string()))?.to_bytes();
            ensure!(status == StatusCode::OK, "{} ({status})", error_text(&body));
            serde_json::from_slice(&body)
                .map_err(|error| anyhow!("its answer cannot be read ({error}); it may be of another version: run divvy version"))
        };
        match tokio::time::timeout(ANSWERED, answered).await {
            Ok(answer) => answer,
            Err(_elapsed) => bail!("it did not answer within {ANSWERED:?}"),
        }
    }
}

/// The connection ended.
#[derive(Debug, thiserror::Error)]
#[error("the connection through the API server broke: {0}")]
struct BrokenConnection(String);

async fn connected(client: &kube::Client, endpoint: &ExplainerEndpoint) -> anyhow::Result<SendRequest<Empty<Bytes>>> {
    let connecting = async {
        let stream = service_proxy::tunnel(client, &endpoint.address).await?;
        let tls = TlsConnector::from(Arc::new(config(&endpoint.certificate)?));
        let server = ServerName::try_from(SERVER_NAME)?;
        let tls = tls.connect(server, stream).await.map_err(not_it)?;
        let (sender, connection) = http1::handshake(TokioIo::new(tls)).await?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "the connection to the explainer ended");
            }
        });
        Ok(sender)
    };
    match tokio::time::timeout(REACHED, connecting).await {
        Ok(connected) => connected,
        Err(_elapsed) => bail!("it could not be reached within {REACHED:?}"),
    }
}

/// Explain a failed TLS handshake. After such a failure, no token has been sent.
fn not_it(error: std::io::Error) -> anyhow::Error {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
    match cause {
        Some(rustls::Error::InvalidCertificate(why)) => anyhow!(
            "the server behind the explainer's Service does not have the certificate from the ConfigMap {}/{} ({why}), so your token was not sent to it",
            service_proxy::CONFIG_MAP_NAMESPACE,
            service_proxy::CONFIG_MAP
        ),
        _ => BrokenConnection(error.to_string()).into(),
    }
}

fn config(certificate: &str) -> anyhow::Result<ClientConfig> {
    let map = format!(
        "{} of the ConfigMap {}/{}",
        service_proxy::CERTIFICATE,
        service_proxy::CONFIG_MAP_NAMESPACE,
        service_proxy::CONFIG_MAP
    );
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes())
        .map_err(|error| anyhow!("{map} is not a certificate in PEM ({error})"))?;
    roots
        .add(certificate)
        .map_err(|error| anyhow!("{map} cannot be used as a certificate ({error})"))?;
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}
