//! The checks.

mod compute;
mod demo;
mod escapes;
mod facts;
mod inventory;
mod kinds;
mod memory;
mod nvml;
mod overhead;
mod programs;
mod sizes;
mod smoke;

use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::time::timeout;

use crate::bench::GpuCheckBench;
use crate::findings::{FindingStatus, GpuCheckFindings};

/// Declares the checks in the order in which they run: what others build on is first, and what takes long is last. Each has a module, whose name is
/// the check's, and may take this many seconds.
macro_rules! checks {
    ($($check:ident($module:ident, $seconds:literal): $about:literal;)*) => {
        /// A check.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Check {
            $($check,)*
        }

        impl Check {
            /// All checks, in the order in which they run.
            pub(crate) const ALL: [Check; [$(Check::$check),*].len()] = [$(Check::$check),*];

            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Check::$check => stringify!($module),)*
                }
            }

            pub(crate) fn about(self) -> &'static str {
                match self {
                    $(Check::$check => $about,)*
                }
            }

            /// How long the check may take.
            fn limit(self) -> Duration {
                Duration::from_secs(match self {
                    $(Check::$check => $seconds,)*
                })
            }

            async fn run(self, bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
                match self {
                    $(Check::$check => $module::run(bench, findings).await,)*
                }
            }
        }
    };
}

checks! {
    Facts(facts, 30): "What this machine has";
    Inventory(inventory, 30): "The probe finds the GPUs that nvidia-smi finds";
    Nvml(nvml, 60): "Which NVML calls an unprivileged user may make, and what the samples of utilization are";
    Memory(memory, 90): "Processes that fill their pod's share together do not get more than the share";
    Sizes(sizes, 60): "The guard charges what the driver takes, for allocations from 1 B to 64 MiB";
    Kinds(kinds, 60): "The guard holds every way to allocate memory to the share";
    Smoke(smoke, 60): "divvy-smoke computes on the GPU and in a share of it, and says what is wrong where it cannot";
    Compute(compute, 240): "Pods get their shares of compute time";
    Overhead(overhead, 60): "What the guard adds to allocations, launches, and the start of a process";
    Programs(programs, 180): "Programs do the same with the guard as without it, and see the share";
    Escapes(escapes, 60): "A program that avoids the guard is found, and ended if the agent is to do that";
    Demo(demo, 90): "The demo's scenario isolation holds with containers on this GPU";
}

impl Check {
    /// Run the check, for at most this time. Everything that it started has ended when this returns.
    pub(crate) async fn run_within(self, left: Duration, bench: &mut GpuCheckBench) -> (GpuCheckFindings, Duration) {
        let began = Instant::now();
        let mut findings = GpuCheckFindings::default();
        if left.is_zero() {
            findings.skip("there was no time left (--time)");
            return (findings, Duration::ZERO);
        }
        let limit = self.limit().min(left);
        match timeout(limit, self.run(bench, &mut findings)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => findings.expect(false, || format!("{error:#}")),
            Err(_) => findings.expect(false, || format!("it did not end in {} s, and was stopped", limit.as_secs())),
        }
        if findings.status() == FindingStatus::Fail {
            bench.discard();
        }
        (findings, began.elapsed())
    }
}
