//! Connections with TLS. Who comes without it is told so in words that end up before a user's eyes: kube-scheduler shows the `Error` of
//! an answer in the pod's events, and throws away whatever else it gets.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use divvy_serve::{Door, Opened, TurnedAway};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::Current;
use super::names::Names;
use crate::metrics::{Metrics, Refused};

/// `ContentType::handshake` (RFC 8446, 5.1): with that byte every TLS connection begins.
const HANDSHAKE: u8 = 22;
/// Between two lines in the log about certificates with a wrong name: anybody whom the authority has given a certificate can cause them.
const BETWEEN_LINES: Duration = Duration::from_secs(60);

/// Who is at the other end.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    /// Where from.
    pub(crate) address: SocketAddr,
    /// What it has shown.
    pub(crate) shown: Shown,
}

/// What a client has shown to say who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Shown {
    /// A certificate of our authority, with a name of those that are let in.
    Name,
    /// No certificate.
    Nothing,
    /// A certificate of our authority with other names; a sentence about them.
    OtherNames(Arc<str>),
}

/// The door of an extender that speaks TLS.
#[derive(Debug)]
pub(crate) struct TlsDoor {
    credentials: Current,
    names: Names,
    metrics: Arc<Metrics>,
    said: Mutex<Option<Instant>>,
}

impl TlsDoor {
    pub(crate) fn new(credentials: Current, names: Names, metrics: Arc<Metrics>) -> TlsDoor {
        TlsDoor {
            credentials,
            names,
            metrics,
            said: Mutex::new(None),
        }
    }

    fn who(&self, certificates: Option<&[CertificateDer<'_>]>, address: SocketAddr) -> Shown {
        let Some(certificate) = certificates.and_then(<[_]>::first) else {
            return Shown::Nothing;
        };
        let Err(why) = self.names.check(certificate) else {
            return Shown::Name;
        };
        self.metrics.refused(Refused::OtherName);
        let now = Instant::now();
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.is_none_or(|said| now.duration_since(said) >= BETWEEN_LINES) {
            *said = Some(now);
            tracing::warn!(%address, "a client is treated as one without a certificate: {why} (said once a minute; /metrics counts)");
        }
        Shown::OtherNames(why.into())
    }
}

impl Door for TlsDoor {
    type Io = TlsStream<TcpStream>;
    type Peer = Peer;
    const HANDSHAKE: bool = true;

    async fn ready(&self) {
        // Before there are certificates nobody can be answered. The sender lives as long as the extender.
        let _ = self.credentials.clone().wait_for(Option::is_some).await;
    }

    async fn open(&self, stream: TcpStream, address: SocketAddr) -> Option<Opened<Self::Io, Peer>> {
        let server = self.credentials.borrow().as_ref().map(|found| found.server.clone())?;
        let io = shake(stream, address, server, &self.metrics).await?;
        let shown = self.who(io.get_ref().1.peer_certificates(), address);
        Some(Opened {
            io,
            known: shown == Shown::Name,
            peer: Peer { address, shown },
        })
    }

    fn turned_away(&self, why: TurnedAway, address: SocketAddr) {
        let (kind, text) = match why {
            TurnedAway::TooMany => (
                Refused::TooMany,
                "all connections that its class of clients may have were taken",
            ),
            TurnedAway::TooSlow => (Refused::TooSlow, "it did not send, or did not read, in time"),
        };
        if self.metrics.refused(kind) {
            tracing::warn!(%address, "a client's connection was closed: {text} (said once; /metrics counts)");
        }
    }
}

async fn shake(
    stream: TcpStream,
    address: SocketAddr,
    server: Arc<rustls::ServerConfig>,
    metrics: &Metrics,
) -> Option<TlsStream<TcpStream>> {
    let mut first = [0; 64];
    let found = stream.peek(&mut first).await.ok()?;
    let first = first.get(..found).filter(|first| !first.is_empty())?;
    if first[0] != HANDSHAKE {
        if metrics.refused(Refused::PlainHttp) {
            tracing::warn!(
                %address,
                "a client speaks plain HTTP to this port, which takes TLS only; if it is kube-scheduler, its configuration needs https:// and \
                 tlsConfig, and `divvy scheduler-config` prints it (said once; /metrics counts)"
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
                    Refused::ForeignCertificate,
                    "its certificate is not of this extender's authority, or has ended; give kube-scheduler the certificates that \
                     `divvy scheduler-config` prints, and restart it",
                ),
                Some(rustls::Error::AlertReceived(_)) => (
                    Refused::UntrustedByClient,
                    "it does not accept this extender's certificate; give kube-scheduler the authority and the serverName that \
                     `divvy scheduler-config` prints, and restart it; if it is the API server, for a webhook, apply what that prints again",
                ),
                _ => (
                    Refused::Handshake,
                    "if it is kube-scheduler, `divvy scheduler-config` prints its configuration",
                ),
            };
            if metrics.refused(kind) {
                tracing::warn!(%address, %error, "a client got no connection: {hint} (said once; /metrics counts)");
            }
            None
        }
    }
}

fn rustls_error(error: &std::io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// In the form of kube-scheduler's answers when it is that who asks.
fn plain_answer(first: &[u8]) -> String {
    const TEXT: &str = "this port takes TLS only, and was spoken to in plain HTTP; write https:// and tlsConfig into kube-scheduler's configuration: \
                        divvy scheduler-config prints it";
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
    // Whatever goes wrong here, nobody can be told.
    let _ = stream.write_all(plain_answer(first).as_bytes()).await;
    let _ = stream.shutdown().await;
    // A request that is not read to its end makes the system throw the answer away.
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
