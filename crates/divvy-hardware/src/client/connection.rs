//! One connection to the probe: sends requests and reads lines.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};

use crate::probe::peer_uid;
use crate::protocol::{LineBuffer, ProbeOp, ProbeRequest, request_line};
use crate::{Failure, FailureCode};

/// The time between two attempts to reach a starting probe. A probe starts within a few milliseconds.
const RETRY: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct ProbeConnection {
    stream: UnixStream,
    lines: LineBuffer,
}

impl ProbeConnection {
    /// Connect to the socket. For the time `patience`, keep trying if no process listens yet.
    pub(super) async fn open(socket: &Path, patience: Duration) -> Result<ProbeConnection, Failure> {
        let deadline = Instant::now() + patience;
        let unreachable = |error: io::Error| {
            let text = format!("the probe cannot be reached at {}: {error}", socket.display());
            Failure::new(FailureCode::ProbeUnreachable, text)
        };
        let stream = loop {
            match UnixStream::connect(socket).await {
                Ok(stream) => break stream,
                Err(error) if starting(&error) && Instant::now() < deadline => sleep(RETRY).await,
                Err(error) => return Err(unreachable(error)),
            }
        };
        let uid = peer_uid(&stream).map_err(unreachable)?;
        if uid != 0 && uid != rustix::process::geteuid().as_raw() {
            let text = format!(
                "user {uid} listens at {}, but only root and this agent's user are trusted",
                socket.display()
            );
            return Err(Failure::new(FailureCode::NoPermission, text));
        }
        Ok(ProbeConnection {
            stream,
            lines: LineBuffer::default(),
        })
    }

    /// Send a request.
    pub(super) async fn ask(&mut self, id: u64, op: ProbeOp, limit: Duration) -> Result<(), Failure> {
        let line = request_line(&ProbeRequest { v: 1, id, op });
        match timeout(limit, self.stream.write_all(line.as_bytes())).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(closed(&error.to_string())),
            Err(_) => Err(Failure::new(FailureCode::Timeout, "the probe does not accept requests")),
        }
    }

    /// Return the next line. Cancel-safe: bytes that were read stay in the buffer.
    pub(super) async fn next_line(&mut self) -> Result<String, Failure> {
        let mut bytes = [0; 8192];
        loop {
            if let Some(line) = self.lines.next_line().map_err(super::protocol)? {
                return Ok(line);
            }
            match self.stream.read(&mut bytes).await {
                Ok(0) if self.lines.is_partial() => return Err(closed("it ended in the middle of a line")),
                Ok(0) => return Err(closed("it was closed")),
                Ok(read) => self.lines.push(&bytes[..read]),
                Err(error) => return Err(closed(&error.to_string())),
            }
        }
    }
}

fn closed(text: &str) -> Failure {
    Failure::new(
        FailureCode::ProbeUnreachable,
        format!("the connection to the probe broke: {text}"),
    )
}

fn starting(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}
