//! A run of `divvy smoke` on a cluster, without the cluster.
//!
//! - [`plan`]: which GPUs are tried, with how much memory, and which are not, with the reason
//! - [`TestPodSettings::pod`]: the pod that tries a GPU
//! - [`TestPodState`]: what a pod's object says about the test
//! - [`SmokeRun`]: which request to send when. It takes events and the time, and returns actions.
//! - [`Mark`]: the annotations on a node that take a GPU out of service, and put it back
//! - [`SmokeSummary`]: the table, the JSON, and the exit status

#![forbid(unsafe_code)]

mod calls;
mod mark;
mod pod;
mod run;
mod seen;
mod summary;
mod target;
mod verdict;

pub use mark::Mark;
pub use pod::{LOADER, PROGRAM, PROGRAM_NAME, RUN_LABEL, TestPodSettings, VOLUME};
pub use run::{RunEvent, RunLimits, SmokeAction, SmokeRun, Tried};
pub use seen::TestPodState;
pub use summary::{GpuResult, SmokeSummary};
pub use target::{Planned, TargetChoice, TargetError, TestAsk, TestTarget, plan};
pub use verdict::GpuVerdict;
