//! Serves the web page on a separate port (`--web-listen`), to users who may list nodes and pods in the whole cluster.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use divvy_kube::caller::Caller;
use divvy_serve::{Door, OpenedConnection, TurnedAway};
use divvy_web::{Gate, Hosts, Impatient, LocalToken, PATIENCE, PageHub, TokenRefusal};
use futures::future::BoxFuture;
use http::{HeaderValue, header};
use sha2::{Digest as _, Sha256};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::Error;
use crate::tls::listener::{ClientIdentity, Peer, TlsDoor};

/// How long the result of a review counts, and how many results are kept.
const COUNTS: Duration = Duration::from_secs(60);
const KEPT: usize = 1024;
/// The maximum number of tokens that are reviewed at the same time, so that strangers cannot load the API server.
const REVIEWS: usize = 8;

/// The flags of the web page.
#[derive(Debug, Clone)]
pub struct Web {
    /// `--web-listen`: the address and port of the page.
    pub listen: SocketAddr,
    /// `--web-host`: names by which browsers reach the page, in addition to the loopback names and the name in the extender's certificate.
    pub hosts: Vec<String>,
}

/// The page's socket, and the names under which it is served.
#[derive(Debug, Clone)]
pub struct WebPage {
    /// The socket.
    pub listener: Arc<std::net::TcpListener>,
    /// As in [`Web`].
    pub hosts: Vec<String>,
}

impl WebPage {
    /// Open the socket.
    ///
    /// # Errors
    /// The address is in use, or does not belong to this machine.
    pub(crate) fn open(web: Web) -> Result<WebPage, Error> {
        let failed = |source| Error::Listen {
            address: web.listen,
            source,
        };
        let listener = divvy_serve::listen(web.listen)
            .and_then(TcpListener::into_std)
            .map_err(failed)?;
        Ok(WebPage {
            listener: Arc::new(listener),
            hosts: web.hosts,
        })
    }
}

/// What the page needs of the extender.
pub(crate) struct WebServer {
    listener: TcpListener,
    client: kube::Client,
    hosts: Hosts,
    door: Option<TlsDoor>,
}

impl WebServer {
    /// `tls` is the extender's door, and the name in its certificate.
    pub(crate) fn new(page: &WebPage, client: kube::Client, tls: Option<(TlsDoor, String)>) -> Result<WebServer, Error> {
        let listener = page.listener.try_clone().and_then(|listener| {
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        });
        let listener = listener.map_err(Error::Serve)?;
        match listener.local_addr() {
            Ok(address) => tracing::info!(%address, tls = tls.is_some(), "the web page is served"),
            Err(error) => tracing::info!(%error, tls = tls.is_some(), "the web page is served"),
        }
        let (door, name) = tls.unzip();
        let loopback = ["localhost", "127.0.0.1", "[::1]"].map(str::to_owned);
        let hosts = Hosts::named(loopback.into_iter().chain(name).chain(page.hosts.iter().cloned()));
        let hosts = if door.is_some() { hosts.over_tls() } else { hosts };
        Ok(WebServer {
            listener,
            client,
            hosts,
            door,
        })
    }

    /// Serve the page until `stop` is cancelled.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let hub = Arc::new(PageHub::new());
        // A random token that no client knows.
        let certified = match LocalToken::random() {
            Ok(token) => Arc::new(token),
            Err(error) => {
                tracing::error!(%error, "the web page is not served: the operating system returned no random bytes");
                return;
            }
        };
        let gate = Arc::new(Reviewed {
            client: self.client.clone(),
            certified: certified.clone(),
            known: Mutex::new(HashMap::new()),
            turns: Semaphore::new(REVIEWS),
        });
        let router = divvy_web::router(hub.clone(), gate, self.hosts);
        let feed = divvy_feed::feed(self.client, hub);
        let served = async {
            match self.door {
                None => divvy_web::serve(self.listener, router, stop.clone()).await,
                Some(door) => {
                    let router = router.layer(from_fn_with_state(certified, let_in));
                    divvy_serve::serve(self.listener, PageDoor(door), router, divvy_web::limits(), stop.clone()).await;
                }
            }
        };
        tokio::select! {
            () = served => {}
            () = feed => tracing::error!("the web page is no longer served: the watches of nodes and pods have ended; restart the extender"),
        }
    }
}

/// Let clients in that have a certificate of the extender's authority with an accepted name: they see what the extender says anyway.
async fn let_in(State(certified): State<Arc<LocalToken>>, mut request: Request, next: Next) -> Response {
    let is_known = request
        .extensions()
        .get::<Peer>()
        .is_some_and(|peer| peer.shown == ClientIdentity::Name);
    if is_known && let Ok(value) = HeaderValue::from_str(&format!("Bearer {}", certified.text())) {
        request.headers_mut().insert(header::AUTHORIZATION, value);
    }
    next.run(request).await
}

/// The extender's door, which ends connections whose client reads nothing.
#[derive(Debug)]
struct PageDoor(TlsDoor);

impl Door for PageDoor {
    type Io = Impatient<TlsStream<TcpStream>>;
    type Peer = Peer;
    const HANDSHAKE: bool = TlsDoor::HANDSHAKE;

    async fn ready(&self) {
        self.0.ready().await;
    }

    async fn open(&self, stream: TcpStream, address: SocketAddr) -> Option<OpenedConnection<Self::Io, Peer>> {
        let opened = self.0.open(stream, address).await?;
        Some(OpenedConnection {
            io: Impatient::new(opened.io, PATIENCE),
            known: opened.known,
            peer: opened.peer,
        })
    }

    fn turned_away(&self, why: TurnedAway, address: SocketAddr) {
        self.0.turned_away(why, address);
    }
}

/// The gate: a token's user must be allowed to list nodes and pods in all namespaces, because the page shows them.
struct Reviewed {
    client: kube::Client,
    certified: Arc<LocalToken>,
    known: Mutex<KnownReviews>,
    turns: Semaphore,
}

/// The results of reviews by the tokens' digests, and the times until which they count.
type KnownReviews = HashMap<[u8; 32], (Instant, Result<(), TokenRefusal>)>;

impl Reviewed {
    async fn review(&self, token: &str) -> Result<(), TokenRefusal> {
        let unavailable = |error: divvy_kube::Error| TokenRefusal::Unavailable { why: error.to_string() };
        let Ok(_turn) = self.turns.try_acquire() else {
            return Err(TokenRefusal::Unavailable {
                why: format!("{REVIEWS} other tokens are being checked; try again in a few seconds"),
            });
        };
        let caller = Caller::of(&self.client, token)
            .await
            .map_err(unavailable)?
            .ok_or(TokenRefusal::Unknown)?;
        for resource in ["nodes", "pods"] {
            let may = caller
                .may(&self.client, "list", resource, "", "")
                .await
                .map_err(unavailable)?;
            if !may {
                return Err(TokenRefusal::Forbidden {
                    right: format!(
                        "list {resource} in the whole cluster, which the cluster role divvy-viewer has ({} lacks it)",
                        caller.name()
                    ),
                });
            }
        }
        Ok(())
    }
}

impl Gate for Reviewed {
    fn check<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<(), TokenRefusal>> {
        Box::pin(async move {
            if self.certified.check(token).await.is_ok() {
                return Ok(());
            }
            let digest: [u8; 32] = Sha256::digest(token.as_bytes()).into();
            let known = |now: Instant| {
                let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                known
                    .get(&digest)
                    .filter(|(until, _)| *until > now)
                    .map(|(_, result)| result.clone())
            };
            if let Some(result) = known(Instant::now()) {
                return result;
            }
            let result = self.review(token).await;
            if !matches!(result, Err(TokenRefusal::Unavailable { .. })) {
                let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                keep(&mut known, digest, result.clone(), Instant::now());
            }
            result
        })
    }

    fn how(&self) -> &str {
        "Get a token of a user who may list nodes and pods in the whole cluster, for example: kubectl create token NAME -n NAMESPACE. Or run `kubectl divvy web`, which needs no token."
    }
}

/// Keep a result. If there are too many, those that no longer count are dropped, and if that is not enough, the oldest one.
fn keep(known: &mut KnownReviews, digest: [u8; 32], result: Result<(), TokenRefusal>, now: Instant) {
    if known.len() >= KEPT && !known.contains_key(&digest) {
        known.retain(|_, (until, _)| *until > now);
        if known.len() >= KEPT {
            let oldest = known.iter().min_by_key(|(_, (until, _))| *until).map(|(digest, _)| *digest);
            oldest.map(|oldest| known.remove(&oldest));
        }
    }
    known.insert(digest, (now + COUNTS, result));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn results_are_bounded_and_the_oldest_goes_first() {
        let mut known = KnownReviews::new();
        let start = Instant::now();
        let digest = |number: usize| {
            let mut digest = [0; 32];
            digest[..8].copy_from_slice(&number.to_le_bytes());
            digest
        };
        for number in 0..KEPT + 10 {
            keep(
                &mut known,
                digest(number),
                Ok(()),
                start + Duration::from_millis(number as u64),
            );
        }
        assert_eq!(known.len(), KEPT);
        assert!(!known.contains_key(&digest(9)) && known.contains_key(&digest(10)));
        keep(&mut known, digest(0), Err(TokenRefusal::Unknown), start + COUNTS * 2);
        assert_eq!(known.len(), 1);
    }
}
