//! The connected clients, and the faults that are sent to them.

use std::collections::{BTreeMap, VecDeque};
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::lines::ClientLines;
use crate::Fault;
use crate::protocol::{FaultEvent, Hello, PastFault, event_line};

/// The maximum number of clients: one agent, several `divvy-runtime` processes, and a person.
const MAX_CLIENTS: usize = 16;
/// The number of faults that are kept for clients that were not connected.
const RECENT: usize = 64;

/// The state that all threads of the probe share.
#[derive(Debug)]
pub(super) struct ProbeHub {
    /// Identifies this run of the probe: its PID and start time.
    instance: String,
    inner: Mutex<ProbeHubState>,
}

#[derive(Debug, Default)]
struct ProbeHubState {
    seq: u64,
    recent: VecDeque<(Instant, FaultEvent)>,
    last_client: u64,
    clients: BTreeMap<u64, Arc<ClientLines>>,
}

impl ProbeHub {
    pub(super) fn new() -> ProbeHub {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        ProbeHub {
            instance: format!("{}.{}", process::id(), since.as_micros()),
            inner: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ProbeHubState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Add a client. Return its id, or `None` if there are too many clients.
    pub(super) fn join(&self, lines: Arc<ClientLines>) -> Option<u64> {
        let mut inner = self.lock();
        if inner.clients.len() >= MAX_CLIENTS {
            return None;
        }
        inner.last_client += 1;
        let id = inner.last_client;
        inner.clients.insert(id, lines);
        Some(id)
    }

    /// Remove a client.
    pub(super) fn leave(&self, client: u64) {
        self.lock().clients.remove(&client);
    }

    /// Give a fault its sequence number, and send it to every client. A client that does not read is disconnected, so that it
    /// does not delay the others. When it connects again, it finds the faults that it missed in [`Hello`].
    pub(super) fn publish(&self, fault: Fault) {
        let mut inner = self.lock();
        inner.seq += 1;
        let event = FaultEvent { seq: inner.seq, fault };
        let line = event_line(&event);
        if inner.recent.len() == RECENT {
            inner.recent.pop_front();
        }
        inner.recent.push_back((Instant::now(), event));
        inner.clients.retain(|_, client| {
            let told = client.event(&line);
            if !told {
                client.close();
            }
            told
        });
    }

    /// Return the answer to `hello`.
    pub(super) fn hello(&self) -> Hello {
        let inner = self.lock();
        let recent = inner.recent.iter().map(|(at, event)| PastFault {
            ago_ms: at.elapsed().as_millis().try_into().unwrap_or(u64::MAX),
            event: event.clone(),
        });
        Hello {
            v: 1,
            probe: env!("CARGO_PKG_VERSION").to_owned(),
            instance: self.instance.clone(),
            seq: inner.seq,
            recent: recent.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Read as _};
    use std::os::unix::net::UnixStream;

    use divvy_model::Vendor;

    use super::*;

    fn fault(code: u64) -> Fault {
        Fault {
            vendor: Vendor::Amd,
            uuid: None,
            code,
            fatal: true,
            name: "a fault".to_owned(),
            partition: None,
        }
    }

    /// Return a client's end and the probe's end of a connection.
    fn connection() -> (UnixStream, Arc<ClientLines>) {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        (theirs, Arc::new(ClientLines::new(ours)))
    }

    /// The other clients hear everything.
    #[test]
    fn a_client_that_does_not_read_is_disconnected() {
        let hub = ProbeHub::new();
        let (mut slow_end, slow) = connection();
        // Fill the socket's buffer.
        while slow.event("an event that no one reads\n") {}
        let (fast_end, fast) = connection();
        hub.join(slow).expect("room");
        hub.join(fast).expect("room");
        for code in 0..3 {
            hub.publish(fault(code));
        }
        let mut unread = Vec::new();
        slow_end.read_to_end(&mut unread).expect("it was closed");
        assert!(!String::from_utf8_lossy(&unread).contains("a fault"));
        let heard = BufReader::new(fast_end).lines().take(3);
        assert!(heard.map(|line| line.expect("line")).all(|line| line.contains("a fault")));
        let hello = hub.hello();
        let seqs: Vec<u64> = hello.recent.iter().map(|past| past.event.seq).collect();
        assert_eq!((hello.seq, seqs), (3, vec![1, 2, 3]));
    }

    #[test]
    fn clients_and_remembered_faults_are_bounded() {
        let hub = ProbeHub::new();
        let mut ends = Vec::new();
        for i in 0..=MAX_CLIENTS {
            let (end, lines) = connection();
            assert_eq!(hub.join(lines).is_some(), i < MAX_CLIENTS);
            ends.push(end);
        }
        hub.leave(1);
        let (_end, lines) = connection();
        assert!(hub.join(lines).is_some());
        for code in 0..200 {
            hub.publish(fault(code));
        }
        assert_eq!(hub.hello().recent.len(), RECENT);
    }
}
