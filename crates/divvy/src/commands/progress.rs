use std::cell::Cell;
use std::io::{self, IsTerminal as _, Write as _};
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
