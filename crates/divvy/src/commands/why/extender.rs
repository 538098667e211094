//! Has the extender look at the cluster for a user who may not: through the API server, with TLS in between, by the user's token.

use std::sync::Arc;
use std::time::Duration;

use divvy_cluster::Error;
use divvy_cluster::client::Connection;
use divvy_cluster::explain::{self, ALL_NODES, Desk, PATH, desk, said};
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

/// To reach it, through the API server.
const REACHED: Duration = Duration::from_secs(10);
/// To answer: it looks for 20 s at most, behind another one.
const ANSWERED: Duration = Duration::from_secs(50);
/// An answer about all of 5,000 nodes has some megabytes.
const LARGEST_ANSWER: usize = 64 << 20;

/// A connection to the extender.
pub(super) struct Extender {
    connection: SendRequest<Empty<Bytes>>,
    host: HeaderValue,
    token: HeaderValue,
}

impl Extender {
    /// Connects. The error is a sentence.
    pub(super) async fn reach(connection: &Connection) -> Result<Extender, String> {
        let token = connection.token().await.map_err(|error| error.to_string())?;
        let token = token.header().ok_or("your token cannot be sent in a header")?;
        let desk = match desk(&connection.client).await {
            Ok(Some(desk)) => desk,
            Ok(None) => {
                return Err(format!(
                    "there is no ConfigMap {}/{}, by which it is found: Divvy is not installed, older, or installed with extender.why=false or \
                     extender.loopback=true",
                    explain::CONFIG_MAP_NAMESPACE,
                    explain::CONFIG_MAP
                ));
            }
            Err(error) => return Err(error.to_string()),
        };
        match tokio::time::timeout(REACHED, connected(&connection.client, &desk)).await {
            Ok(Ok(sender)) => Ok(Extender {
                connection: sender,
                host: HeaderValue::try_from(desk.address.server_name()).map_err(|error| error.to_string())?,
                token,
            }),
            Ok(Err(why)) => Err(why),
            Err(_elapsed) => Err(format!("it could not be reached within {REACHED:?}")),
        }
    }

    /// What it says about a pod. The error is a sentence.
    pub(super) async fn ask(&mut self, pod: &PodName, all_nodes: bool) -> Result<Answer, String> {
        let query = if all_nodes { format!("?{ALL_NODES}") } else { String::new() };
        let request = Request::get(format!("{PATH}/{}/{}{query}", pod.namespace, pod.name))
            .header(header::HOST, self.host.clone())
            .header(header::AUTHORIZATION, self.token.clone())
            .body(Empty::new())
            .map_err(|error| error.to_string())?;
        let answered = async {
            let broken = |error: hyper::Error| format!("the connection through the API server broke: {error}");
            self.connection.ready().await.map_err(broken)?;
            let response = self.connection.send_request(request).await.map_err(broken)?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await;
            let body = body.map_err(|error| format!("its answer broke off: {error}"))?.to_bytes();
            match status {
                StatusCode::OK => serde_json::from_slice(&body)
                    .map_err(|error| format!("its answer cannot be read ({error}); is it of another version? divvy version")),
                status => Err(format!("{} ({status})", said(&body))),
            }
        };
        match tokio::time::timeout(ANSWERED, answered).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(format!("it gave no answer within {ANSWERED:?}")),
        }
    }
}

async fn connected(client: &kube::Client, desk: &Desk) -> Result<SendRequest<Empty<Bytes>>, String> {
    let stream = explain::tunnel(client, &desk.address).await.map_err(in_words)?;
    let name = desk.address.server_name();
    let tls = TlsConnector::from(Arc::new(config(&desk.authority)?));
    let server = ServerName::try_from(name.clone()).map_err(|_| format!("{name:?} is no name of a server"))?;
    let tls = tls.connect(server, stream).await.map_err(|error| {
        format!(
            "what answers there is not {name} by the certificate in the ConfigMap {}/{} ({error}), and was sent no token",
            explain::CONFIG_MAP_NAMESPACE,
            explain::CONFIG_MAP
        )
    })?;
    let (sender, connection) = http1::handshake(TokioIo::new(tls)).await.map_err(|error| error.to_string())?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "the connection to the extender ended");
        }
    });
    Ok(sender)
}

fn config(authority: &str) -> Result<ClientConfig, String> {
    let map = format!(
        "{} of the ConfigMap {}/{}",
        explain::AUTHORITY,
        explain::CONFIG_MAP_NAMESPACE,
        explain::CONFIG_MAP
    );
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
        let certificate = certificate.map_err(|error| format!("{map} is not PEM that can be read ({error})"))?;
        roots
            .add(certificate)
            .map_err(|error| format!("{map} holds a certificate that is no authority's ({error})"))?;
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let builder = builder
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

fn in_words(error: Error) -> String {
    match error.is_forbidden() {
        true => format!("{error}; the chart gives that right to all users (extender.why=true)"),
        false => error.to_string(),
    }
}
