//! A connection that ends when its reader takes nothing.

use std::future::Future as _;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A stream on which a write fails after it had to wait for too long. A stream of events never ends, so no limit on the time of a whole answer drops a client
/// that does not read it.
#[derive(Debug)]
pub struct Impatient<Io> {
    io: Io,
    patience: Duration,
    waits: Option<Pin<Box<Sleep>>>,
}

impl<Io> Impatient<Io> {
    /// Wait for at most this time in each write.
    pub fn new(io: Io, patience: Duration) -> Impatient<Io> {
        Impatient {
            io,
            patience,
            waits: None,
        }
    }

    /// Limit how long `result` may be pending.
    fn limited<T>(&mut self, result: Poll<Result<T>>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        if result.is_ready() {
            self.waits = None;
            return result;
        }
        let patience = self.patience;
        let waits = self.waits.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(waits.as_mut().poll(cx));
        Poll::Ready(Err(Error::new(
            ErrorKind::TimedOut,
            "the client reads nothing of what it is sent",
        )))
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Impatient<Io> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for Impatient<Io> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.limited(result, cx)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write_vectored(cx, slices);
        self.limited(result, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let result = Pin::new(&mut self.io).poll_flush(cx);
        self.limited(result, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let result = Pin::new(&mut self.io).poll_shutdown(cx);
        self.limited(result, cx)
    }
}
