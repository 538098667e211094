//! The story of a history in words. It is recorded only if a reader wants it.

/// The lines of a story.
#[derive(Debug, Default)]
pub struct Story {
    lines: Option<Vec<String>>,
}

impl Story {
    /// Create a story that records lines only if `told`.
    pub fn new(told: bool) -> Story {
        Story {
            lines: told.then(Vec::new),
        }
    }

    /// Record a line.
    pub fn tell(&mut self, line: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            lines.push(line());
        }
    }

    /// Return all lines so far.
    pub fn lines(&self) -> &[String] {
        self.lines.as_deref().unwrap_or_default()
    }
}

/// Return an error with this text unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::Violation(format!($($text)+)));
        }
    };
}
pub(crate) use ensure;
