//! S09: two processes within one share.

use serde::{Deserialize, Serialize};

use super::share::{GivenShare, GuardLimit, check_sum, enforceable, refused};
use super::{DoneStep, StepBench, StepOutcome, StepProblem};
use crate::driver::CudaCode;
use crate::sizes::MIB;

/// What the second process holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldMemory {
    pub bytes: u64,
    /// The code of the allocation beyond the limit.
    pub refused: Option<i32>,
}

/// A second process.
pub trait SecondProcess {
    /// Let it allocate up to the limit, and return what it holds. It goes on holding it.
    fn hold(&mut self) -> Result<HeldMemory, StepProblem>;
    /// Let it end.
    fn end(&mut self) -> Result<(), StepProblem>;
}

/// Hold a quarter of what is free, and let the second process take the rest.
pub(crate) fn run(
    bench: &StepBench<'_>,
    grant: &GivenShare,
    limit: Option<GuardLimit>,
    second: &mut dyn SecondProcess,
) -> StepOutcome {
    let driver = bench.driver;
    let (free, total) = driver.memory()?;
    enforceable(total, grant, limit)?;
    let own = (free / 4) / MIB * MIB;
    let address = driver.allocate(own.max(MIB))?;
    let held = second.hold()?;
    let (left, _) = driver.memory()?;
    refused(held.refused.map(CudaCode))?;
    let sum = own.max(MIB).saturating_add(held.bytes);
    check_sum(sum, total)?;
    let counted = free.saturating_sub(own).saturating_sub(held.bytes);
    if left > counted {
        return Err(StepProblem::finding(
            format!(
                "two processes hold {} and {} MiB, and the driver shows {} MiB as free, not less than {}",
                own / MIB,
                held.bytes / MIB,
                left / MIB,
                counted.div_ceil(MIB)
            ),
            "a process does not see what other processes of its container hold",
            "look at the agent's log on the node, and restart the pod",
        ));
    }
    second.end()?;
    driver.free(address)?;
    let text = format!(
        "two processes held {} and {} MiB of {} MiB at once, and more was refused",
        own / MIB,
        held.bytes / MIB,
        total / MIB
    );
    Ok(DoneStep::new(text, 0))
}
