//! The limit on requests to the API server.

use std::collections::VecDeque;

/// The times of the requests within the last second.
#[derive(Debug, Clone)]
pub(crate) struct RecentCalls {
    most: usize,
    times: VecDeque<u64>,
}

impl RecentCalls {
    /// A limit of `most` requests within any second, at least 1.
    pub(crate) fn new(most: usize) -> RecentCalls {
        RecentCalls {
            most: most.max(1),
            times: VecDeque::new(),
        }
    }

    /// Count `calls` requests that are sent now, if the limit allows them. More requests than the limit allow count as the limit.
    pub(crate) fn take(&mut self, now_ms: u64, calls: usize) -> bool {
        let calls = calls.clamp(1, self.most);
        while self.times.front().is_some_and(|sent| now_ms.saturating_sub(*sent) >= 1000) {
            self.times.pop_front();
        }
        let fits = self.times.len() + calls <= self.most;
        if fits {
            self.times.extend(std::iter::repeat_n(now_ms, calls));
        }
        fits
    }

    /// Return when the next request can be sent that cannot be sent now.
    pub(crate) fn next(&self) -> Option<u64> {
        self.times.front().map(|sent| sent.saturating_add(1000))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_second_has_more_calls_than_the_limit() {
        let mut calls = RecentCalls::new(3);
        let sent: Vec<u64> = (0..4000).filter(|now| calls.take(*now, 1)).collect();
        assert_eq!(sent, [0, 1, 2, 1000, 1001, 1002, 2000, 2001, 2002, 3000, 3001, 3002]);
        assert_eq!(calls.next(), Some(4000));
    }

    #[test]
    fn a_call_that_stands_for_many_waits_for_room() {
        let mut calls = RecentCalls::new(3);
        assert!(calls.take(0, 2));
        assert!(!calls.take(500, 2));
        assert!(calls.take(500, 1));
        assert!(calls.take(1000, 2));
        // More than the limit would never be sent.
        assert!(calls.take(3000, 100));
    }
}
