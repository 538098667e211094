//! The connected clients, and the faults that are sent to them.

use std::collections::{BTreeMap, VecDeque};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process;
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::Fault;
use crate::protocol::{FaultEvent, Hello, PastFault, event_line};

/// The maximum number of clients: one agent, several `divvy-runtime` processes, and a person.
const MAX_CLIENTS: usize = 16;
/// The number of faults that are kept for clients that were not connected.
const RECENT: usize = 64;

/// The state that all threads of the probe share.
#[derive(Debug)]
pub(super) struct Hub {
    /// Identifies this run of the probe: its PID and start time.
    instance: String,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    seq: u64,
    recent: VecDeque<(Instant, FaultEvent)>,
    last_client: u64,
    clients: BTreeMap<u64, Client>,
}

#[derive(Debug)]
struct Client {
    lines: SyncSender<String>,
    stream: UnixStream,
}

impl Hub {
    pub(super) fn new() -> Hub {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Hub {
            instance: format!("{}.{}", process::id(), since.as_micros()),
            inner: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Add a client. Return its id, or `None` if there are too many clients.
    pub(super) fn join(&self, stream: UnixStream, lines: SyncSender<String>) -> Option<u64> {
        let mut inner = self.lock();
        if inner.clients.len() >= MAX_CLIENTS {
            return None;
        }
        inner.last_client += 1;
        let id = inner.last_client;
        inner.clients.insert(id, Client { lines, stream });
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
            let told = client.lines.try_send(line.clone()).is_ok();
            if !told {
                // This wakes the client's two threads. An error is ignored, because the socket may already be closed.
                let _ = client.stream.shutdown(Shutdown::Both);
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
    use std::io::Read;
    use std::sync::mpsc::sync_channel;

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

    #[test]
    fn a_client_that_does_not_read_is_disconnected_and_the_others_hear_everything() {
        let hub = Hub::new();
        let mut held = Vec::new();
        let mut join = |room| {
            let (ours, theirs) = UnixStream::pair().expect("pair");
            // Hold a copy like the client's reading thread, so that dropping the hub's copy does not close the socket.
            held.push(ours.try_clone().expect("clone"));
            let (sender, receiver) = sync_channel(room);
            (hub.join(ours, sender).expect("room"), receiver, theirs)
        };
        let (_, slow, mut slow_end) = join(1);
        let (_, fast, _fast_end) = join(100);
        for code in 0..3 {
            hub.publish(fault(code));
        }
        assert_eq!(slow.try_iter().count(), 1);
        slow_end
            .set_read_timeout(Some(std::time::Duration::from_secs(5)))
            .expect("timeout");
        assert_eq!(slow_end.read(&mut [0; 8]).expect("closed"), 0);
        assert_eq!(fast.try_iter().count(), 3);
        let hello = hub.hello();
        let seqs: Vec<u64> = hello.recent.iter().map(|past| past.event.seq).collect();
        assert_eq!((hello.seq, seqs), (3, vec![1, 2, 3]));
    }

    #[test]
    fn clients_and_remembered_faults_are_bounded() {
        let hub = Hub::new();
        let mut ends = Vec::new();
        for i in 0..=MAX_CLIENTS {
            let (ours, theirs) = UnixStream::pair().expect("pair");
            let (sender, receiver) = sync_channel(1);
            assert_eq!(hub.join(ours, sender).is_some(), i < MAX_CLIENTS);
            ends.push((theirs, receiver));
        }
        hub.leave(1);
        let (ours, _theirs) = UnixStream::pair().expect("pair");
        assert!(hub.join(ours, sync_channel(1).0).is_some());
        for code in 0..200 {
            hub.publish(fault(code));
        }
        assert_eq!(hub.hello().recent.len(), RECENT);
    }
}
