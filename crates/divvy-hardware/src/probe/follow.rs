//! `--watch`: the state of the GPUs before and after something, and the errors in between.

use std::io::Read as _;
use std::sync::Arc;
use std::time::Duration;

use divvy_model::Vendor;
use serde::Serialize;

use super::drivers::{Drivers, Open, Publish, ReopenPace};
use super::{log, print};
use crate::{Fault, Snapshot};

/// A line of the output.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
enum OutputLine<'l> {
    Snapshot(&'l Snapshot),
    Fault(&'l Fault),
}

/// Why `--watch` ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum FollowError {
    #[error(transparent)]
    Probe(#[from] crate::Error),
    #[error("a line cannot be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("standard output cannot be written")]
    Output,
}

/// Print the state of the GPUs, then each fault until standard input closes, and then the state again.
pub(super) fn run(vendors: Vec<(Vendor, Open)>) -> Result<(), FollowError> {
    let publish: Publish = Arc::new(|fault| {
        if let Err(error) = say(&OutputLine::Fault(&fault)) {
            log(format_args!("{error}"));
        }
    });
    let pace = ReopenPace {
        // A driver that is opened again may not know any more that a GPU was lost.
        reopen_for_lost: Duration::MAX,
        ..ReopenPace::default()
    };
    let mut drivers = Drivers::new(vendors, pace, Some(publish));
    let result = before_and_after(&mut drivers);
    // The thread that waits for events ends only after its wait, up to a second later. The process ends now.
    std::mem::forget(drivers);
    result
}

fn before_and_after(drivers: &mut Drivers) -> Result<(), FollowError> {
    let mut state = || {
        let snapshot = drivers.examine().map_err(crate::Error::from)?;
        say(&OutputLine::Snapshot(&snapshot))
    };
    state()?;
    // Nothing is expected here. The end of file says that the program which started this has ended, even by kill -9.
    let mut ignored = [0; 64];
    while matches!(std::io::stdin().lock().read(&mut ignored), Ok(1..)) {}
    state()
}

fn say(line: &OutputLine<'_>) -> Result<(), FollowError> {
    let text = serde_json::to_string(line)?;
    match print(&format!("{text}\n")) {
        0 => Ok(()),
        _ => Err(FollowError::Output),
    }
}
