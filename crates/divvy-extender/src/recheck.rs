//! A second evaluation before filter refuses a pod on all nodes.
//!
//! kube-scheduler tries a waiting pod again as soon as its watch shows that memory was freed. The extender has a watch of its
//! own, which may show the same event a few milliseconds later:
//!
//! ```text
//!                 memory is freed
//! kube-scheduler:   ├─► sees the event ─► calls filter
//! extender:         └──────────────────────► evaluates (refusal) ─► sees the event ─► evaluates again (fits)
//! ```
//!
//! Without the second evaluation, the extender would refuse the pod because of outdated state, and kube-scheduler would not try it
//! again until the cluster's next event, or for five minutes. So before such a refusal, filter evaluates the pod again after each
//! change, for up to 50 ms.
//!
//! kube-scheduler schedules one pod at a time, so it waits as well. An allowance limits this to a tenth of its time in
//! the long run. A cluster that is busy enough to use up the allowance has its next event soon.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::core::{FilterAnswer, FilterError};

/// How far the extender's watch may lag behind that of kube-scheduler.
const MOMENT: Duration = Duration::from_millis(50);
/// The largest allowance. It may be spent at once, and is enough for 20 times [`MOMENT`].
const ALLOWANCE: Duration = Duration::from_secs(1);
/// The allowance regrows by the elapsed time divided by this number.
const REFILL: u32 = 10;

/// The signal that something changed, and the remaining allowance for waiting.
#[derive(Debug)]
pub(crate) struct SecondLook {
    changed: Notify,
    allowance: Mutex<Allowance>,
}

#[derive(Debug)]
struct Allowance {
    left: Duration,
    at: Instant,
}

impl Allowance {
    /// Spend one moment of the allowance. Return false if less than a moment is left.
    fn spend(&mut self, now: Instant) -> bool {
        let earned = now.saturating_duration_since(self.at) / REFILL;
        self.left = self.left.saturating_add(earned).min(ALLOWANCE);
        self.at = now;
        let rest = self.left.checked_sub(MOMENT);
        self.left = rest.unwrap_or(self.left);
        rest.is_some()
    }
}

impl SecondLook {
    pub(crate) fn new() -> SecondLook {
        SecondLook {
            changed: Notify::new(),
            allowance: Mutex::new(Allowance {
                left: ALLOWANCE,
                at: Instant::now(),
            }),
        }
    }

    /// Signal that the core has taken in a change of the cluster.
    pub(crate) fn changed(&self) {
        self.changed.notify_waiters();
    }

    /// Return the answer of `ask`. If it refuses the pod on all nodes, call `ask` again after each change of the cluster, until
    /// the answer changes or [`MOMENT`] has passed, and return the last answer.
    pub(crate) async fn at(&self, ask: impl Fn() -> Result<FilterAnswer, FilterError>) -> Result<FilterAnswer, FilterError> {
        let refuses = |answer: &Result<FilterAnswer, _>| matches!(answer, Ok(answer) if answer.passed.is_empty() && !answer.failed.is_empty());
        let answer = ask();
        if !refuses(&answer) {
            return answer;
        }
        let now = Instant::now();
        if !self.allowance.lock().unwrap_or_else(PoisonError::into_inner).spend(now) {
            return answer;
        }
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Enable the notification before the evaluation, so that no change is missed.
            changed.as_mut().enable();
            let answer = ask();
            if !refuses(&answer) || tokio::time::timeout_at(now + MOMENT, changed).await.is_err() {
                return answer;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn refusal() -> Result<FilterAnswer, FilterError> {
        let mut answer = FilterAnswer::default();
        answer.failed.push((0, divvy_placement::NodeRefusal::NoGpuFits));
        Ok(answer)
    }

    fn fits() -> Result<FilterAnswer, FilterError> {
        let mut answer = FilterAnswer::default();
        answer.passed.push(0);
        Ok(answer)
    }

    #[tokio::test]
    async fn what_is_freed_a_moment_later_is_not_refused() {
        let (look, freed) = (SecondLook::new(), Cell::new(false));
        let asked = look.at(|| if freed.get() { fits() } else { refusal() });
        let frees = async {
            for free in [false, true] {
                tokio::task::yield_now().await;
                freed.set(free);
                look.changed();
            }
        };
        let (answer, ()) = tokio::join!(asked, frees);
        assert_eq!(answer, fits());
    }

    #[tokio::test]
    async fn only_a_refusal_everywhere_waits_and_it_waits_a_moment() {
        let look = SecondLook::new();
        let partly = || {
            let failed = refusal().unwrap_or_default().failed;
            fits().map(|answer| FilterAnswer { failed, ..answer })
        };
        let asked_about_nothing = || Ok(FilterAnswer::default());
        let error = || {
            Err(FilterError::OutOfDate {
                node: "n1".to_owned(),
                refusal: "it is full".to_owned(),
                what: "pods",
                why: "the connection was refused".to_owned(),
            })
        };
        let at_once: [fn() -> Result<FilterAnswer, FilterError>; 4] = [fits, partly, asked_about_nothing, error];
        for answer in at_once {
            let count = Cell::new(0);
            let ask = || {
                count.set(count.get() + 1);
                answer()
            };
            assert_eq!(look.at(ask).await, answer());
            assert_eq!(count.get(), 1);
        }
        let began = Instant::now();
        assert_eq!(look.at(refusal).await, refusal());
        assert!(began.elapsed() >= MOMENT);
    }

    /// Waiting pods take at most a tenth of the scheduler's time.
    #[test]
    fn many_waiting_pods_cost_little_scheduler_time() {
        let began = Instant::now();
        let mut allowance = Allowance {
            left: ALLOWANCE,
            at: began,
        };
        let (mut now, mut waited) = (began, Duration::ZERO);
        while now < began + Duration::from_secs(100) {
            if allowance.spend(now) {
                waited += MOMENT;
                now += MOMENT;
            }
            now += Duration::from_millis(1);
        }
        let most = ALLOWANCE + (now - began) / REFILL;
        assert!(waited <= most && waited + 2 * MOMENT >= most, "{waited:?} of {most:?}");
        // After a night without spending, the allowance is no larger than at the start.
        now += Duration::from_secs(36_000);
        let moments = std::iter::repeat_with(|| allowance.spend(now))
            .take_while(|spent| *spent)
            .count();
        assert_eq!(moments, 20);
    }
}
