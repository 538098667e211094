//! Connections of gRPC clients in Go.
//!
//! grpc-go sends the path of a Unix socket as `:authority`, percent-encoded. The h2 crate refuses such a value, whereas a server
//! in Go accepts it. Therefore [`GoClient`] replaces the value by a valid one of the same length while the connection is read.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

/// HPACK: a literal field with the name `:authority` (index 1 of the static table).
const AUTHORITY: u8 = 0x41;
/// HPACK: the value is Huffman-coded. The other bits are its length.
const HUFFMAN: u8 = 0x80;
/// `%2` and the beginning of `F`, Huffman-coded.
const SLASH: [u8; 2] = [0x54, 0x58];

/// A connection whose `:authority` is replaced.
#[derive(Debug)]
pub(crate) struct GoClient(pub(crate) UnixStream);

fn replace(bytes: &mut [u8]) {
    let found = bytes
        .windows(4)
        .position(|window| window[0] == AUTHORITY && window[1] & HUFFMAN != 0 && window[2..] == SLASH);
    let Some(at) = found else { return };
    let length = usize::from(bytes[at + 1] & !HUFFMAN);
    if let Some(value) = bytes.get_mut(at + 2..at + 2 + length) {
        value.fill(b'a');
        bytes[at + 1] &= !HUFFMAN;
    }
}

impl AsyncRead for GoClient {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.0).poll_read(context, buffer);
        replace(&mut buffer.filled_mut()[before..]);
        read
    }
}

impl AsyncWrite for GoClient {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

impl Connected for GoClient {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}
