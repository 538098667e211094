//! What happened, in words; only when somebody wants to read it.

/// Lines of a run.
#[derive(Debug, Default)]
pub struct Story {
    lines: Option<Vec<String>>,
}

impl Story {
    /// Told or not.
    pub fn new(told: bool) -> Story {
        Story {
            lines: told.then(Vec::new),
        }
    }

    /// A line.
    pub fn tell(&mut self, line: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            lines.push(line());
        }
    }

    /// All lines so far.
    pub fn lines(&self) -> &[String] {
        self.lines.as_deref().unwrap_or_default()
    }
}

/// Ends the run with a sentence unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(crate) use ensure;
