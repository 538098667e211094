use std::cell::Cell;
use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A progress line on standard error. It is printed only if standard error is a terminal.
pub(super) struct ProgressLine {
    terminal: bool,
    shown: Cell<Option<Instant>>,
}

impl ProgressLine {
    pub(super) fn new() -> ProgressLine {
        ProgressLine {
            terminal: io::stderr().is_terminal(),
            shown: Cell::new(None),
        }
    }

    /// Show a text, but update it at most ten times a second.
    pub(super) fn show(&self, text: impl FnOnce() -> String) {
        let often = self
            .shown
            .get()
            .is_some_and(|shown| shown.elapsed() < Duration::from_millis(100));
        if !self.terminal || often {
            return;
        }
        self.shown.set(Some(Instant::now()));
        // A failure to print the progress must not end the command.
        let _ = write!(io::stderr(), "\r{}\x1b[K", text());
    }

    /// Remove the progress line.
    pub(super) fn clear(&self) {
        if self.shown.get().is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// The number of nodes and pods that have arrived so far.
#[derive(Default)]
pub(super) struct Arrived {
    nodes: AtomicU64,
    pods: AtomicU64,
    quiet: bool,
}

impl Arrived {
    /// Return a count that is never shown, for a terminal that shows something else.
    #[cfg(feature = "top")]
    pub(super) fn quiet() -> Arrived {
        Arrived {
            quiet: true,
            ..Arrived::default()
        }
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.quiet
    }

    pub(super) fn node(&self) {
        self.nodes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn pod(&self) {
        self.pods.fetch_add(1, Ordering::Relaxed);
    }

    /// Wait for the lists, and show the progress if they take longer than half a second.
    pub(super) async fn shown<T>(&self, lists: impl Future<Output = T>) -> T {
        let bar = ProgressLine::new();
        tokio::pin!(lists);
        let mut wait = Duration::from_millis(500);
        loop {
            tokio::select! {
                biased;
                done = &mut lists => {
                    bar.clear();
                    return done;
                }
                () = tokio::time::sleep(wait), if bar.terminal && !self.quiet => bar.show(|| format!("reading the cluster: {self}")),
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
