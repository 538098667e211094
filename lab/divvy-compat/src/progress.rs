//! What is being done, on standard error.

use std::io::Write as _;

/// Print what is being done.
pub(crate) fn progress(text: &str) {
    // If standard error is closed, it cannot be said.
    let _ = writeln!(std::io::stderr(), "{text}");
}
