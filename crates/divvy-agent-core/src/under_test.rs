//! Which of the node's GPUs that are out of service a run of `divvy smoke` may use now.
//!
//! A run that was killed may leave its annotation on the node, and the GPU must not stay open to its id. The annotation has no time in it, because the
//! clocks of the machine that wrote it and of the node may differ by any amount. The agent measures by its own monotonic clock: an id counts for
//! [`TEST_LASTS`] from the moment at which this agent saw it appear. An id that the agent finds when it reads the node for the first time does not count: it
//! cannot know since when it is there. If the agent restarts during a test, the test fails, the GPU stays out of service, and the next run tests it.

use std::collections::BTreeMap;

use divvy_model::TestRun;
use divvy_model::limits::TEST_LASTS;
use divvy_model::out_of_service::{GpusOutOfService, name};

/// The tests that this agent has seen.
#[derive(Debug, Clone, Default)]
pub struct Tests {
    /// By the rest of the annotation's name. `None` until the node was read.
    seen: Option<BTreeMap<String, SeenRun>>,
}

#[derive(Debug, Clone)]
struct SeenRun {
    run: TestRun,
    /// When the test is over, in milliseconds of the caller's clock; 0 if it was there before the agent.
    end_ms: u64,
}

impl Tests {
    /// Take in the annotations of the node, at this time of a monotonic clock.
    pub fn look(&mut self, now_ms: u64, node: &GpusOutOfService) {
        if !node.is_read() {
            return;
        }
        let lasts_ms = u64::try_from(TEST_LASTS.as_millis()).unwrap_or(u64::MAX);
        let end_ms = |name: &str, run: &TestRun| match &self.seen {
            None => 0,
            Some(before) => match before.get(name) {
                Some(seen) if seen.run == *run => seen.end_ms,
                _ => now_ms.saturating_add(lasts_ms),
            },
        };
        let seen = node.tests().iter().map(|(name, run)| {
            let seen = SeenRun {
                run: run.clone(),
                end_ms: end_ms(name, run),
            };
            (name.clone(), seen)
        });
        self.seen = Some(seen.collect());
    }

    /// Return the run that tests the GPU with this UUID now.
    pub fn of(&self, uuid: &str, now_ms: u64) -> Option<&TestRun> {
        let seen = self.seen.as_ref()?.get(&name(uuid))?;
        (now_ms < seen.end_ms).then_some(&seen.run)
    }
}
