//! A report that is short enough for a pod's termination message.

use crate::{SmokeOutcome, SmokeReport, SmokeStep};

/// The size of the longest termination message, in bytes. The kubelet cuts a longer one at any byte, so that it is no JSON any more
/// (`MaxContainerTerminationMessageLength` in the kubelet's `pkg/kubelet/container/runtime.go`).
pub const TERMINATION_MESSAGE: usize = 4096;

/// The length to which texts are shortened if even one step is too long, in bytes.
const SHORT: usize = 160;

impl SmokeReport {
    /// Return the report as JSON of at most `limit` bytes. Whole steps are left out: first those that were skipped, then those that
    /// passed, then warnings, then failures, then failures that show that the GPU is at fault, and of the same kind the last first. The
    /// first of the worst steps stays; its texts are shortened if necessary.
    pub fn termination_message(&self, limit: usize) -> String {
        let mut report = self.clone();
        loop {
            let json = report.json();
            if json.len() <= limit {
                return json;
            }
            if report.steps.len() > 1 {
                report.leave_one_out();
            } else if !report.shorten() {
                return report.least();
            }
        }
    }

    fn leave_one_out(&mut self) {
        // `min_by_key` returns the first of equal elements, so that reversed it is the last step.
        let least = self.steps.iter().enumerate().rev();
        let least = least.min_by_key(|(_, step)| (step.outcome(), step.gpu_at_fault));
        if let Some((index, _)) = least {
            self.steps.remove(index);
            self.cut += 1;
        }
    }

    /// Shorten all texts. Return false if they are already short.
    fn shorten(&mut self) -> bool {
        let gpu = self.gpu.iter_mut();
        let gpu = gpu.flat_map(|gpu| [&mut gpu.uuid, &mut gpu.name, &mut gpu.cc, &mut gpu.driver, &mut gpu.cuda]);
        let mut changed = false;
        let texts = self.steps.iter_mut().flat_map(texts_of).chain(gpu);
        for text in texts.chain(self.node.as_mut()).chain(self.pod.as_mut()) {
            if text.len() > SHORT {
                text.truncate(text.floor_char_boundary(SHORT - '…'.len_utf8()));
                text.push('…');
                changed = true;
            }
        }
        changed
    }

    /// Return the shortest report: its result, and the steps without their texts.
    fn least(mut self) -> String {
        for text in self.steps.iter_mut().flat_map(texts_of) {
            "…".clone_into(text);
        }
        let least = SmokeReport {
            node: None,
            pod: None,
            gpu: None,
            ..self
        };
        debug_assert!(SmokeOutcome::of(&least.steps) <= least.result);
        least.json()
    }
}

fn texts_of(step: &mut SmokeStep) -> impl Iterator<Item = &mut String> {
    let SmokeStep { found, why, fix, .. } = step;
    [Some(found), why.as_mut(), fix.as_mut()].into_iter().flatten()
}
