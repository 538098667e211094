//! The server on a TCP port, and the service that breaks connections for a fault.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::response::Response;
use http::{HeaderValue, Request, header};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::{Service, ServiceExt};

use super::ApiServer;
use super::http::Dropped;

/// The router as a service that returns an error for a connection that a fault breaks.
#[derive(Debug, Clone)]
pub(crate) struct Breaking {
    router: axum::Router,
    /// The header sent with every request, as a client with this token would send it.
    bearer: Option<HeaderValue>,
}

impl Breaking {
    pub(crate) fn new(api: &ApiServer, bearer: Option<HeaderValue>) -> Breaking {
        Breaking {
            router: api.router(),
            bearer,
        }
    }
}

impl<B> Service<Request<B>> for Breaking
where
    B: axum::body::HttpBody<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<axum::BoxError>,
{
    type Response = Response;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let mut request = request.map(Body::new);
        if let Some(bearer) = &self.bearer {
            request.headers_mut().insert(header::AUTHORIZATION, bearer.clone());
        }
        let router = self.router.clone();
        Box::pin(async move {
            let response = router
                .oneshot(request)
                .await
                .unwrap_or_else(|never: Infallible| match never {});
            if response.extensions().get::<Dropped>().is_some() {
                return Err(io::Error::new(
                    io::ErrorKind::ConnectionReset,
                    "connection reset (a fault on request)",
                ));
            }
            Ok(response)
        })
    }
}

/// A running listener. On drop it ends with all its connections.
#[derive(Debug)]
pub struct Listening {
    addr: SocketAddr,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Listening {
    /// Return the bound address, with the port that the system chose if port 0 was requested.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// End the listener and wait until its port and all its connections are closed.
    pub async fn shutdown(self) {
        self.stop.cancel();
        self.tasks.wait().await;
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub(crate) async fn listen(api: &ApiServer, addr: SocketAddr) -> io::Result<Listening> {
    let listener = TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
    let accepting = accept(api.clone(), listener, stop.clone(), tasks.clone());
    tasks.spawn(accepting);
    tasks.close();
    Ok(Listening { addr, stop, tasks })
}

async fn accept(api: ApiServer, listener: TcpListener, stop: CancellationToken, tasks: TaskTracker) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let (api, stop) = (api.clone(), stop.clone());
                tasks.spawn(async move {
                    tokio::select! {
                        () = stop.cancelled() => {}
                        ended = serve(&api, stream) => {
                            if let Err(why) = ended {
                                tracing::debug!(%peer, %why, "connection ended");
                            }
                        }
                    }
                });
            }
            Err(why) => {
                // No file descriptor is left, or the peer has already gone. The listener itself stays.
                tracing::warn!(%why, "could not accept a connection");
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        }
    }
}

async fn serve(api: &ApiServer, stream: TcpStream) -> Result<(), hyper::Error> {
    // Watch events are small and must not wait for more data.
    if let Err(why) = stream.set_nodelay(true) {
        tracing::debug!(%why, "could not set TCP_NODELAY");
    }
    let service = Breaking::new(api, None);
    let service = hyper::service::service_fn(move |request| service.clone().call(request));
    hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await
}
