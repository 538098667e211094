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

use crate::bench::Bench;
use crate::findings::{Findings, Status};

/// A check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    Facts,
    Inventory,
    Nvml,
    Memory,
    Sizes,
    Kinds,
    Smoke,
    Compute,
    Overhead,
    Programs,
    Escapes,
    Demo,
}

impl Check {
    /// All checks, in the order in which they run: what others build on is first, and what takes long is last.
    pub(crate) const ALL: [Check; 12] = [
        Check::Facts,
        Check::Inventory,
        Check::Nvml,
        Check::Memory,
        Check::Sizes,
        Check::Kinds,
        Check::Smoke,
        Check::Compute,
        Check::Overhead,
        Check::Programs,
        Check::Escapes,
        Check::Demo,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Check::Facts => "facts",
            Check::Inventory => "inventory",
            Check::Nvml => "nvml",
            Check::Memory => "memory",
            Check::Sizes => "sizes",
            Check::Kinds => "kinds",
            Check::Smoke => "smoke",
            Check::Compute => "compute",
            Check::Overhead => "overhead",
            Check::Programs => "programs",
            Check::Escapes => "escapes",
            Check::Demo => "demo",
        }
    }

    pub(crate) fn about(self) -> &'static str {
        match self {
            Check::Facts => "What this machine has",
            Check::Inventory => "The probe finds the GPUs that nvidia-smi finds",
            Check::Nvml => "Which NVML calls an unprivileged user may make, and what the samples of utilization are",
            Check::Memory => "Processes that fill their pod's share together do not get more than the share",
            Check::Sizes => "The guard charges what the driver takes, for allocations from 1 B to 64 MiB",
            Check::Kinds => "The guard holds every way to allocate memory to the share",
            Check::Smoke => "divvy-smoke computes on the GPU and in a share of it, and says what is wrong where it cannot",
            Check::Compute => "Pods get their shares of compute time",
            Check::Overhead => "What the guard adds to allocations, launches, and the start of a process",
            Check::Programs => "Programs do the same with the guard as without it, and see the share",
            Check::Escapes => "A program that avoids the guard is found, and ended if the agent is to do that",
            Check::Demo => "The demo's scenario isolation holds with containers on this GPU",
        }
    }

    /// How long the check may take.
    fn limit(self) -> Duration {
        Duration::from_secs(match self {
            Check::Facts | Check::Inventory => 30,
            Check::Nvml | Check::Sizes | Check::Kinds | Check::Smoke | Check::Overhead | Check::Escapes => 60,
            Check::Memory | Check::Demo => 90,
            Check::Programs => 180,
            Check::Compute => 240,
        })
    }

    /// Run the check, for at most this time. Everything that it started has ended when this returns.
    pub(crate) async fn run_within(self, left: Duration, bench: &mut Bench) -> (Findings, Duration) {
        let began = Instant::now();
        let mut findings = Findings::default();
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
        if findings.status() == Status::Fail {
            bench.discard();
        }
        (findings, began.elapsed())
    }

    async fn run(self, bench: &mut Bench, findings: &mut Findings) -> Result<()> {
        match self {
            Check::Facts => facts::run(bench, findings).await,
            Check::Inventory => inventory::run(bench, findings).await,
            Check::Nvml => nvml::run(bench, findings).await,
            Check::Memory => memory::run(bench, findings).await,
            Check::Sizes => sizes::run(bench, findings).await,
            Check::Kinds => kinds::run(bench, findings).await,
            Check::Smoke => smoke::run(bench, findings).await,
            Check::Compute => compute::run(bench, findings).await,
            Check::Overhead => overhead::run(bench, findings).await,
            Check::Programs => programs::run(bench, findings).await,
            Check::Escapes => escapes::run(bench, findings).await,
            Check::Demo => demo::run(bench, findings).await,
        }
    }
}
