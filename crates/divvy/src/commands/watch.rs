//! `--watch`: looks again and again.

use std::pin::pin;
use std::time::{Duration, Instant};

use futures::{FutureExt as _, Stream, StreamExt as _};

use super::say;

/// Whatever changes, we look so seldom.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);
/// And so often, if nothing is said to have changed.
const EVERY: Duration = Duration::from_secs(5);
/// Of the time, a look takes one part in so many at most: on a large cluster it is not free.
const SHARE: u32 = 5;

/// Looks at once, at each change, and every few seconds, until `look` returns false. Later looks that fail are tried again.
///
/// # Errors
/// The first look failed, or what was seen could not be printed.
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
                    say(&format!("note: {words}. It is tried again"))?;
                }
                trouble = words;
            }
        }
        first = false;
        let rest = begun.elapsed().saturating_mul(SHARE);
        tokio::time::sleep(AT_MOST_EVERY.max(rest)).await;
        // What came meanwhile is seen by one look.
        let mut changed = false;
        while let Some(Some(())) = changes.next().now_or_never() {
            changed = true;
        }
        if !changed {
            let _ = tokio::time::timeout(EVERY, changes.next()).await;
        }
    }
}

/// The time, before what is printed anew.
pub(super) fn time() -> String {
    format!("--- {}\n", jiff::Zoned::now().strftime("%H:%M:%S"))
}
