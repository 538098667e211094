//! A run of `divvy smoke` on a cluster, without the cluster.
//!
//! - [`plan`]: which GPUs are tried, with how much memory, and which are not, with the reason
//! - [`Settings::pod`]: the pod that tries a GPU
//! - [`Seen`]: what a pod's object says about the test
//! - [`Run`]: which request to send when. It takes events and the time, and returns actions.
//! - [`Mark`]: the annotations on a node that take a GPU out of service, and put it back
//! - [`Summary`]: the table, the JSON, and the exit status

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
pub use pod::{LOADER, PROGRAM, PROGRAM_NAME, RUN_LABEL, Settings, VOLUME};
pub use run::{Action, Event, Limits, Run, Tried};
pub use seen::Seen;
pub use summary::{Row, Summary};
pub use target::{Ask, Choice, Error, Planned, Target, plan};
pub use verdict::Verdict;
