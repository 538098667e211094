use std::cell::Cell;
use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How far something is, in one line on a terminal, and nowhere else.
pub(super) struct Bar {
    terminal: bool,
    shown: Cell<Option<Instant>>,
}

impl Bar {
    pub(super) fn new() -> Bar {
        Bar {
            terminal: io::stderr().is_terminal(),
            shown: Cell::new(None),
        }
    }

    /// Shows a text, if the last one has stood for a moment.
    pub(super) fn show(&self, text: impl FnOnce() -> String) {
        let often = self
            .shown
            .get()
            .is_some_and(|shown| shown.elapsed() < Duration::from_millis(100));
        if !self.terminal || often {
            return;
        }
        self.shown.set(Some(Instant::now()));
        // A terminal that takes no text is no reason to stop.
        let _ = write!(io::stderr(), "\r{}\x1b[K", text());
    }

    /// Takes it away.
    pub(super) fn clear(&self) {
        if self.shown.get().is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// How many objects of which kind have arrived.
#[derive(Default)]
pub(super) struct Arrived {
    nodes: AtomicU64,
    pods: AtomicU64,
}

impl Arrived {
    pub(super) fn node(&self) {
        self.nodes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn pod(&self) {
        self.pods.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits for lists, and shows how far they are on a terminal if they take longer than a moment.
    pub(super) async fn shown<T>(&self, lists: impl Future<Output = T>) -> T {
        let bar = Bar::new();
        tokio::pin!(lists);
        let mut wait = Duration::from_millis(500);
        loop {
            tokio::select! {
                biased;
                done = &mut lists => {
                    bar.clear();
                    return done;
                }
                () = tokio::time::sleep(wait), if bar.terminal => bar.show(|| format!("reading the cluster: {self}")),
            }
            wait = Duration::from_millis(100);
        }
    }
}

impl fmt::Display for Arrived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (nodes, pods) = (self.nodes.load(Ordering::Relaxed), self.pods.load(Ordering::Relaxed));
        write!(f, "{nodes} nodes, {pods} pods")
    }
}
