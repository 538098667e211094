//! The probe's socket and its clients.

use std::convert::Infallible;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::Duration;

use rustix::fs::Mode;
use rustix::process::{geteuid, umask};
use serde::Serialize;
use serde_json::{Value, json};
use signal_hook::low_level;

use super::driver_files::DriverLocation;
use super::hub::ProbeHub;
use super::lines::ClientLines;
use super::owner::{self, DriverJob, OwnerQuestion};
use super::share_files::ShareFiles;
use super::{log, peer_uid, spawn};
use crate::protocol::{LineBuffer, ProbeOp, ProbeRequest, answer_line, parse_request};
use crate::{Error, Failure, FailureCode};

/// A client that reads nothing for this long is disconnected.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

/// The socket's file, as long as it belongs to this probe.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode of the socket. A probe that started later may have replaced it with its own.
    id: (u64, u64),
}

impl SocketFile {
    /// Remove the file if it still belongs to this probe.
    pub(super) fn remove(&self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|data| (data.dev(), data.ino()) == self.id)
            && let Err(error) = fs::remove_file(&self.path)
        {
            log(format_args!("cannot remove {}: {error}", self.path.display()));
        }
    }

    /// End the process without exit(3), because a driver's destructors may hang.
    pub(super) fn end(&self, status: i32) -> ! {
        self.remove();
        low_level::exit(status)
    }
}

/// Listen at `path` with mode 0600. A stale socket is replaced. Any other existing file is an error.
pub(super) fn bind(path: &Path) -> Result<(UnixListener, SocketFile), Error> {
    let fail = |what, source| Error::io(what, path, source);
    match fs::symlink_metadata(path) {
        Ok(data) if !data.file_type().is_socket() => {
            return Err(fail("will not replace what is at", io::Error::other("it is not a socket")));
        }
        Ok(_) if UnixStream::connect(path).is_ok() => {
            return Err(fail("cannot listen at", io::Error::other("another probe listens there")));
        }
        Ok(_) => fs::remove_file(path).map_err(|source| fail("cannot remove the old socket", source))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(fail("cannot access", error)),
    }
    // Set the umask first: the file must never exist with another mode, not even for a moment.
    let before = umask(Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(path);
    umask(before);
    let listener = bound.map_err(|source| {
        let hint = match source.kind() {
            io::ErrorKind::NotFound => "cannot listen (does the directory exist?) at",
            io::ErrorKind::InvalidInput => "cannot listen (a socket's path has at most 107 bytes) at",
            _ => "cannot listen at",
        };
        fail(hint, source)
    })?;
    let data = fs::symlink_metadata(path).map_err(|source| fail("cannot access", source))?;
    let file = SocketFile {
        path: path.to_owned(),
        id: (data.dev(), data.ino()),
    };
    Ok((listener, file))
}

/// Who answers requests.
#[derive(Clone)]
pub(super) struct RequestAnswerer {
    pub(super) hub: Arc<ProbeHub>,
    pub(super) jobs: SyncSender<DriverJob>,
    pub(super) driver: Arc<DriverLocation>,
    pub(super) shares: Arc<ShareFiles>,
}

/// Why a client is not served.
#[derive(Debug, thiserror::Error)]
enum Unserved {
    #[error("accept: {0}")]
    Accept(#[source] io::Error),
    #[error("its user id is {0}; only root and the probe's own user may connect")]
    User(u32),
    #[error("there are too many clients")]
    TooMany,
    #[error(transparent)]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Thread(#[from] Error),
}

/// Accept clients indefinitely.
pub(super) fn serve(listener: &UnixListener, answers: &RequestAnswerer) -> Result<Infallible, Error> {
    loop {
        let accepted = listener.accept().map_err(Unserved::Accept);
        if let Err(error) = accepted.and_then(|(stream, _)| welcome(stream, answers)) {
            log(format_args!("a client was not served: {error}"));
            // Pause, so that a lack of file descriptors or threads does not cause a busy loop.
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn welcome(mut stream: UnixStream, answers: &RequestAnswerer) -> Result<(), Unserved> {
    let uid = peer_uid(&stream)?;
    if uid != 0 && uid != geteuid().as_raw() {
        return Err(Unserved::User(uid));
    }
    stream.set_write_timeout(Some(WRITE_LIMIT))?;
    let lines = Arc::new(ClientLines::new(stream.try_clone()?));
    let Some(client) = answers.hub.join(lines.clone()) else {
        let busy = Failure::new(FailureCode::Busy, "the probe has reached its maximum number of clients");
        stream.write_all(answer_line(None, &Err(busy)).as_bytes())?;
        return Err(Unserved::TooMany);
    };
    let own = answers.clone();
    let work = move || {
        serve_client(&stream, &own, &lines);
        own.hub.leave(client);
        lines.close();
    };
    spawn("client", work).inspect_err(|_| answers.hub.leave(client))?;
    Ok(())
}

/// Answer the client's requests one after the other.
fn serve_client(mut stream: &UnixStream, answers: &RequestAnswerer, lines: &ClientLines) {
    let mut buffer = LineBuffer::default();
    let mut bytes = [0; 4096];
    loop {
        let answer = match buffer.next_line() {
            Ok(Some(line)) => answers.answer(&line),
            Ok(None) => {
                match stream.read(&mut bytes) {
                    Ok(read @ 1..) => buffer.push(&bytes[..read]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Ok(0) | Err(_) => return,
                }
                continue;
            }
            Err(error) => {
                // Tell the client why, then disconnect: the start of the next line is unknown.
                let failure = Failure::new(FailureCode::Protocol, error.to_string());
                let _ = lines.answer(&answer_line(None, &Err(failure)));
                return;
            }
        };
        if lines.answer(&answer).is_err() {
            return;
        }
    }
}

impl RequestAnswerer {
    fn answer(&self, line: &str) -> String {
        match parse_request(line) {
            Ok(ProbeRequest { id, op, .. }) => answer_line(Some(id), &self.perform(op)),
            Err((id, failure)) => answer_line(id, &Err(failure)),
        }
    }

    fn perform(&self, op: ProbeOp) -> Result<Value, Failure> {
        let ask = |question| owner::ask(&self.jobs, question);
        match op {
            ProbeOp::Ping => Ok(json!({})),
            ProbeOp::Hello => value(self.hub.hello()),
            ProbeOp::Driver(question) => value(self.driver.answer(&question)),
            ProbeOp::DriverSpec { basis } => self.driver.spec(&basis).and_then(value),
            ProbeOp::Snapshot => ask(OwnerQuestion::Snapshot),
            ProbeOp::Processes => ask(OwnerQuestion::Processes),
            ProbeOp::Utilization { gpus } => ask(OwnerQuestion::Utilization(gpus)),
            ProbeOp::Metrics => ask(OwnerQuestion::Metrics),
            ProbeOp::Limit(limit) => ask(OwnerQuestion::Limit(limit)),
            ProbeOp::Kill(kill) => ask(OwnerQuestion::Kill(kill)),
            ProbeOp::MountShare(share) => self.shares.mount(&share).map(|()| json!({})),
            ProbeOp::UnmountShare(share) => self.shares.unmount(&share).map(|()| json!({})),
        }
    }
}

fn value(answer: impl Serialize) -> Result<Value, Failure> {
    serde_json::to_value(answer).map_err(|error| Failure::new(FailureCode::Unknown, error.to_string()))
}
