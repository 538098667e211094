//! The wait before the next attempt to register.

use std::time::Duration;

/// A wait that doubles after each attempt, from `first` to `max`.
#[derive(Debug, Clone)]
pub(super) struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub(super) fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, next: first }
    }

    /// Return the wait before the next attempt, and double the following one.
    pub(super) fn take(&mut self) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(self.max);
        wait
    }

    pub(super) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest_and_start_again_after_success() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
        let waits: Vec<u128> = (0..11).map(|_| backoff.take().as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]);
        backoff.reset();
        assert_eq!(backoff.take().as_millis(), 100);
    }
}
