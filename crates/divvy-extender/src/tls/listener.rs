//! TLS connections. A client that uses plain HTTP gets an answer in the form of kube-scheduler's protocol: kube-scheduler shows the `Error`
//! of an answer in the pod's events and discards anything else.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use divvy_serve::{Door, OpenedConnection, TurnedAway};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::Current;
use super::names::ClientNames;
use crate::metrics::{ClientRefusal, ExtenderMetrics};

/// The first byte of every TLS connection: `ContentType::handshake` (RFC 8446, 5.1).
const HANDSHAKE: u8 = 22;
/// Pause between two log lines about certificates with a wrong name. Any program with a certificate of the CA can cause such lines.
const BETWEEN_LINES: Duration = Duration::from_secs(60);

/// The client of a connection.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    /// The client's address.
    pub(crate) address: SocketAddr,
    /// How the client has identified itself.
    pub(crate) shown: ClientIdentity,
}

/// How a client has identified itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ClientIdentity {
    /// With a certificate of the right CA and an accepted name.
    Name,
    /// Without a certificate.
    Nothing,
    /// With a certificate of the right CA but without an accepted name; the text says which names it has.
    OtherNames(Arc<str>),
}

/// The [`Door`] of an extender that uses TLS.
#[derive(Debug)]
pub(crate) struct TlsDoor {
    credentials: Current,
    names: ClientNames,
    metrics: Arc<ExtenderMetrics>,
    said: Mutex<Option<Instant>>,
}

impl TlsDoor {
    pub(crate) fn new(credentials: Current, names: ClientNames, metrics: Arc<ExtenderMetrics>) -> TlsDoor {
        TlsDoor {
            credentials,
            names,
            metrics,
            said: Mutex::new(None),
        }
    }

    fn who(&self, certificates: Option<&[CertificateDer<'_>]>, address: SocketAddr) -> ClientIdentity {
        let Some(certificate) = certificates.and_then(<[_]>::first) else {
            return ClientIdentity::Nothing;
        };
        let Err(why) = self.names.check(certificate) else {
            return ClientIdentity::Name;
        };
        self.metrics.refused(ClientRefusal::OtherName);
        let now = Instant::now();
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.is_none_or(|said| now.duration_since(said) >= BETWEEN_LINES) {
            *said = Some(now);
            tracing::warn!(%address, "a client is treated like one without a certificate: {why} (logged at most once a minute; /metrics counts all)");
        }
        ClientIdentity::OtherNames(why.to_string().into())
    }
}

impl Door for TlsDoor {
    type Io = TlsStream<TcpStream>;
    type Peer = Peer;
    const HANDSHAKE: bool = true;

    async fn ready(&self) {
        // No client can be answered before there are certificates. The sender lives as long as the extender.
        let _ = self.credentials.clone().wait_for(Option::is_some).await;
    }

    async fn open(&self, stream: TcpStream, address: SocketAddr) -> Option<OpenedConnection<Self::Io, Peer>> {
        let server = self.credentials.borrow().as_ref().map(|found| found.server.clone())?;
        let io = shake(stream, address, server, &self.metrics).await?;
        let shown = self.who(io.get_ref().1.peer_certificates(), address);
        Some(OpenedConnection {
            io,
            known: shown == ClientIdentity::Name,
            peer: Peer { address, shown },
        })
    }

    fn turned_away(&self, why: TurnedAway, address: SocketAddr) {
        let (kind, text) = match why {
            TurnedAway::TooMany => (ClientRefusal::TooMany, "all connections for its class of clients were in use"),
            TurnedAway::TooSlow => (ClientRefusal::TooSlow, "the client did not send or read in time"),
        };
        if self.metrics.refused(kind) {
            tracing::warn!(%address, "a client's connection was closed: {text} (logged once; /metrics counts all)");
        }
    }
}

async fn shake(
    stream: TcpStream,
    address: SocketAddr,
    server: Arc<rustls::ServerConfig>,
    metrics: &ExtenderMetrics,
) -> Option<TlsStream<TcpStream>> {
    let mut first = [0; 64];
    let found = stream.peek(&mut first).await.ok()?;
    let first = first.get(..found).filter(|first| !first.is_empty())?;
    if first[0] != HANDSHAKE {
        if metrics.refused(ClientRefusal::PlainHttp) {
            tracing::warn!(
                %address,
                "a client uses plain HTTP on this port, which takes TLS only; if the client is kube-scheduler, write https:// and tlsConfig into its \
                 configuration, as `divvy scheduler-config` prints it (logged once; /metrics counts all)"
            );
        }
        refuse_plain(stream, first).await;
        return None;
    }
    match TlsAcceptor::from(server).accept(stream).await {
        Ok(stream) => Some(stream),
        Err(error) => {
            let (kind, hint) = match rustls_error(&error) {
                Some(rustls::Error::InvalidCertificate(_)) => (
                    ClientRefusal::ForeignCertificate,
                    "its certificate is not from this extender's CA, or has expired; give kube-scheduler the certificates that \
                     `divvy scheduler-config` prints, and restart it",
                ),
                Some(rustls::Error::AlertReceived(_)) => (
                    ClientRefusal::UntrustedByClient,
                    "it does not accept this extender's certificate; if it is kube-scheduler, give it the CA and the serverName that \
                     `divvy scheduler-config` prints, and restart it; if it is the API server calling the webhook, apply the output again",
                ),
                _ => (
                    ClientRefusal::Handshake,
                    "if it is kube-scheduler, `divvy scheduler-config` prints the right configuration",
                ),
            };
            if metrics.refused(kind) {
                tracing::warn!(%address, %error, "the TLS handshake with a client failed: {hint} (logged once; /metrics counts all)");
            }
            None
        }
    }
}

fn rustls_error(error: &std::io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Return the HTTP answer to a request in plain HTTP: for kube-scheduler's paths, in the form of kube-scheduler's protocol.
fn plain_answer(first: &[u8]) -> String {
    const TEXT: &str = "this port takes TLS only, but the request came in plain HTTP; write https:// and tlsConfig into kube-scheduler's \
                        configuration: divvy scheduler-config prints it";
    let line = String::from_utf8_lossy(first);
    let (status, body) = if line.starts_with("POST /gpushare-scheduler/") {
        ("200 OK", serde_json::json!({ "Error": TEXT }))
    } else {
        ("400 Bad Request", serde_json::json!({ "error": TEXT }))
    };
    let body = body.to_string();
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
}

async fn refuse_plain(mut stream: TcpStream, first: &[u8]) {
    // Errors are ignored: the client cannot be reached in any other way.
    let _ = stream.write_all(plain_answer(first).as_bytes()).await;
    let _ = stream.shutdown().await;
    // Read the request to its end. Otherwise the operating system resets the connection, and the client never sees the answer.
    let mut rest = vec![0; 16 << 10];
    while matches!(stream.read(&mut rest).await, Ok(read) if read > 0) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kube_scheduler_is_told_in_the_form_that_it_shows_to_users() {
        let answer = plain_answer(b"POST /gpushare-scheduler/filter HTTP/1.1\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains(r#"{"Error":"this port takes TLS only"#), "{answer}");
        let other = plain_answer(b"GET /metrics HTTP/1.1\r\n");
        assert!(other.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{other}");
    }
}
