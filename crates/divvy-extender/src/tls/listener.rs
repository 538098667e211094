//! Connections with TLS. Who comes without it is told so in words that end up before a user's eyes: kube-scheduler shows the `Error` of
//! an answer in the pod's events, and throws away whatever else it gets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use super::Current;
use crate::metrics::{Metrics, Refused};

/// For a handshake, and for the rest of a request that is refused.
const PATIENCE: Duration = Duration::from_secs(5);
/// Handshakes under way; who comes beyond that waits.
const HANDSHAKES: usize = 256;
/// `ContentType::handshake` (RFC 8446, 5.1): with that byte every TLS connection begins.
const HANDSHAKE: u8 = 22;

/// Who is at the other end.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    /// Where from.
    pub(crate) address: SocketAddr,
    /// It has shown a certificate that our authority has signed.
    pub(crate) identified: bool,
}

/// Connections whose handshake is done.
#[derive(Debug)]
pub(crate) struct TlsListener {
    ready: mpsc::Receiver<(TlsStream<TcpStream>, Peer)>,
    address: std::io::Result<SocketAddr>,
}

impl TlsListener {
    pub(crate) fn new(
        listener: TcpListener,
        credentials: Current,
        metrics: Arc<Metrics>,
        stop: CancellationToken,
    ) -> TlsListener {
        let (sender, ready) = mpsc::channel(16);
        let address = listener.local_addr();
        tokio::spawn(accept(listener, credentials, metrics, stop, sender));
        TlsListener { ready, address }
    }
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = Peer;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(connection) => connection,
            // Stopped: the server ends by itself.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        match &self.address {
            Ok(address) => Ok(Peer {
                address: *address,
                identified: false,
            }),
            Err(error) => Err(std::io::Error::other(error.to_string())),
        }
    }
}

impl Connected<IncomingStream<'_, TlsListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, TlsListener>) -> Peer {
        stream.remote_addr().clone()
    }
}

async fn accept(
    listener: TcpListener,
    mut credentials: Current,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    sender: mpsc::Sender<(TlsStream<TcpStream>, Peer)>,
) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = async {
                // Before there are certificates nobody can be answered; they wait in the socket's queue.
                let _ = credentials.wait_for(Option::is_some).await;
                let turn = handshakes.clone().acquire_owned().await;
                (listener.accept().await, turn)
            } => accepted,
        };
        let (stream, address, turn) = match accepted {
            (Ok((stream, address)), turn) => (stream, address, turn),
            (Err(error), _) => {
                // Too many open files, most likely.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(server) = credentials.borrow().as_ref().map(|found| found.server.clone()) else {
            continue;
        };
        let (metrics, sender) = (metrics.clone(), sender.clone());
        tokio::spawn(async move {
            let _turn = turn;
            // A courtesy for latency only.
            let _ = stream.set_nodelay(true);
            let shaken = tokio::time::timeout(PATIENCE, shake(stream, address, server, &metrics)).await;
            match shaken {
                Ok(Some(connection)) => {
                    // Nobody waits for it any more: the server is stopping.
                    let _ = sender.send(connection).await;
                }
                Ok(None) => {}
                Err(_elapsed) => tracing::debug!(%address, "no handshake within {PATIENCE:?}"),
            }
        });
    }
}

async fn shake(
    stream: TcpStream,
    address: SocketAddr,
    server: Arc<rustls::ServerConfig>,
    metrics: &Metrics,
) -> Option<(TlsStream<TcpStream>, Peer)> {
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
        Ok(stream) => {
            let identified = stream
                .get_ref()
                .1
                .peer_certificates()
                .is_some_and(|shown: &[CertificateDer<'_>]| !shown.is_empty());
            Some((stream, Peer { address, identified }))
        }
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
