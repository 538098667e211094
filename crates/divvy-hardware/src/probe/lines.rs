//! The lines that a client receives: answers, written by its own thread, and events, written by the thread that learned of them.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::net::{SendFlags, send};

/// The number of events that may wait while an answer is being written.
const UNREAD: usize = 64;

/// The writing end of a client's connection.
///
/// An event is written without another thread, because a thread that has to wake up first delays it. A client that reads nothing delays only
/// its own thread: an event is written only if the socket's buffer has room for all of it.
#[derive(Debug)]
pub(super) struct ClientLines {
    stream: UnixStream,
    state: Mutex<ProbeLineState>,
}

#[derive(Debug, Default)]
struct ProbeLineState {
    /// Whether an answer is being written. Its end must not be mixed with an event.
    answering: bool,
    /// The events that arrived meanwhile.
    waiting: Vec<String>,
}

impl ClientLines {
    pub(super) fn new(stream: UnixStream) -> ClientLines {
        ClientLines {
            stream,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ProbeLineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Write an answer, and then the events that arrived meanwhile. It waits until the client reads, up to the stream's time limit. Only the
    /// client's own thread calls it.
    pub(super) fn answer(&self, line: &str) -> io::Result<()> {
        self.lock().answering = true;
        (&self.stream).write_all(line.as_bytes())?;
        loop {
            let events = {
                let mut state = self.lock();
                state.answering = !state.waiting.is_empty();
                std::mem::take(&mut state.waiting)
            };
            if events.is_empty() {
                return Ok(());
            }
            (&self.stream).write_all(events.concat().as_bytes())?;
        }
    }

    /// Write an event without waiting, or leave it to [`ClientLines::answer`]. Return whether there was room for it.
    pub(super) fn event(&self, line: &str) -> bool {
        let mut state = self.lock();
        if state.answering {
            let room = state.waiting.len() < UNREAD;
            if room {
                state.waiting.push(line.to_owned());
            }
            return room;
        }
        let sent = send(&self.stream, line.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        sent.is_ok_and(|sent| sent == line.len())
    }

    /// Disconnect the client. This also wakes its thread.
    pub(super) fn close(&self) {
        // The client may already be gone.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::thread;

    use super::*;

    /// The events arrive while the answer is being written, and a flood of events is refused.
    #[test]
    fn events_follow_an_answer_in_order() {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        let lines = ClientLines::new(ours);
        // This answer does not fit the socket's buffer, so it is being written until the other end reads.
        let answer = format!("{}\n", "a".repeat(4 << 20));
        thread::scope(|scope| {
            let writing = scope.spawn(|| lines.answer(&answer));
            while !lines.lock().answering {
                thread::yield_now();
            }
            for number in 0..UNREAD {
                assert!(lines.event(&format!("{number}\n")), "{number}");
            }
            assert!(!lines.event("too many\n"));
            let mut read = BufReader::new(theirs).lines().map(|line| line.expect("line"));
            assert_eq!(read.next().map(|line| line.len()), Some(4 << 20));
            let events: Vec<String> = read.by_ref().take(UNREAD).collect();
            assert_eq!(events, (0..UNREAD).map(|number| number.to_string()).collect::<Vec<_>>());
            writing.join().expect("joined").expect("written");
            assert!(lines.event("after\n"));
            assert_eq!(read.next().as_deref(), Some("after"));
        });
    }

    #[test]
    fn an_event_never_waits_for_a_client_that_does_not_read() {
        let (ours, _theirs) = UnixStream::pair().expect("pair");
        let lines = ClientLines::new(ours);
        let event = format!("{}\n", "e".repeat(1000));
        let written = (0..100_000).take_while(|_| lines.event(&event)).count();
        assert!((1..100_000).contains(&written), "{written}");
    }
}
