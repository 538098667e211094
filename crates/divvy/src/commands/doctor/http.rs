//! A single HTTP GET request.

use std::time::Duration;

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::output::too_long;

/// The largest accepted body in bytes; `/metrics` of an extender with thousands of nodes is smaller.
pub(super) const LARGEST: usize = 8 * 1024 * 1024;

/// Send a GET request, and return the body of a successful response.
pub(super) async fn get<S>(
    connect: impl Future<Output = std::io::Result<S>>,
    host: &str,
    path: &str,
    limit: Duration,
) -> anyhow::Result<String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let asked = async {
        let stream = connect.await?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
        let (mut sender, connection) = handshake.await?;
        let driven = tokio::spawn(connection);
        let request = http::Request::get(path)
            .header(http::header::HOST, host)
            .body(Empty::<Bytes>::new())?;
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LARGEST).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!(error))?;
        driven.abort();
        let text = String::from_utf8_lossy(&body.to_bytes()).into_owned();
        let first = text.lines().next().unwrap_or_default();
        anyhow::ensure!(status.is_success(), "{status}: {first}");
        Ok(text)
    };
    match tokio::time::timeout(limit, asked).await {
        Ok(answer) => answer,
        Err(_) => anyhow::bail!(too_long("it", limit)),
    }
}
