//! The loop behind `--watch`: it reads the cluster's state again and again.

use std::pin::pin;
use std::time::{Duration, Instant};

use futures::{FutureExt as _, Stream, StreamExt as _};

use super::say;

/// The shortest pause between two reads, however often the cluster changes.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);
/// The longest additional pause after [`AT_MOST_EVERY`], if no change is reported.
const EVERY: Duration = Duration::from_secs(5);
/// The shortest pause after a read, as a multiple of the time that the read took. Reading a large cluster is expensive for the
/// API server.
const SHARE: u32 = 5;

/// Call `look` immediately, after each change, and every few seconds, until it returns false. If a later call fails, print a note
/// and try again.
///
/// # Errors
/// Fails if the first call fails, or if the output cannot be printed.
pub(super) async fn again(
    changes: impl Stream<Item = ()>,
    mut look: impl AsyncFnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let mut changes = pin!(changes);
    let (mut first, mut trouble) = (true, String::new());
    loop {
        let begun = Instant::now();
        match look().await {
            Ok(true) => trouble.clear(),
            Ok(false) => return Ok(()),
            Err(error) if first || error.is::<std::io::Error>() => return Err(error),
            Err(error) => {
                let words = error.to_string();
                if words != trouble {
                    say(&format!("note: {words}. Trying again"))?;
                }
                trouble = words;
            }
        }
        first = false;
        let rest = begun.elapsed().saturating_mul(SHARE);
        tokio::time::sleep(AT_MOST_EVERY.max(rest)).await;
        // One read covers all changes that arrived during the pause.
        let mut changed = false;
        while let Some(Some(())) = changes.next().now_or_never() {
            changed = true;
        }
        if !changed {
            let _ = tokio::time::timeout(EVERY, changes.next()).await;
        }
    }
}

/// Return the line with the current time that is printed before each repetition of the output.
pub(super) fn time() -> String {
    format!("--- {}\n", jiff::Zoned::now().strftime("%H:%M:%S"))
}
