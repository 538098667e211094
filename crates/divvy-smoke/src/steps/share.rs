//! S07: the share of the memory.

use serde::{Deserialize, Serialize};

use super::{DoneStep, StepBench, StepOutcome, StepProblem};
use crate::driver::{CallFailure, CudaCode, Driver, GpuAddress};
use crate::sizes::MIB;

/// What is allocated beyond the limit.
const BEYOND: u64 = 64 * MIB;

/// The share that this container was given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenShare {
    /// The UUIDs of the GPUs, if they are known.
    pub uuids: Vec<String>,
    /// The container's units, and those of its GPU.
    pub units: Option<(u64, u64)>,
}

/// What the guard holds this container's processes to on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuardLimit {
    /// The share in bytes.
    pub bytes: u64,
    /// What a context takes, in bytes; 0 if it is not known.
    pub context: u64,
}

impl GivenShare {
    /// Report whether other containers may use the GPU, too.
    pub fn is_shared(&self, limit: Option<GuardLimit>) -> bool {
        limit.is_some() || self.units.is_some_and(|(own, all)| own < all)
    }
}

/// Compare the memory that the driver shows with the share, and return what the share is.
fn compare(total: u64, grant: &GivenShare, limit: Option<GuardLimit>) -> Result<String, StepProblem> {
    match (limit, grant.units) {
        (Some(limit), _) if total == limit.bytes => Ok(format!("the driver shows the share, {} MiB", total / MIB)),
        (Some(limit), _) => Err(StepProblem::finding(
            format!(
                "the driver shows {} MiB, and the share is {} MiB",
                total / MIB,
                limit.bytes / MIB
            ),
            "programs plan with memory that they do not have, or leave some unused",
            "restart the pod; look at the node's agent if it happens again",
        )),
        (None, Some((own, all))) if own < all => Err(StepProblem::Skip(format!(
            "the share is {own} of {all} units, and nothing limits this container to it: the guard is not in it"
        ))),
        (None, Some(_)) => Ok(format!("the whole GPU, {} MiB", total / MIB)),
        (None, None) => Err(StepProblem::Skip("this container has no share of Divvy".to_owned())),
    }
}

/// Compare the share with what the driver shows; with `isolation`, allocate up to the limit, and more.
pub(crate) fn run(bench: &StepBench<'_>, grant: &GivenShare, limit: Option<GuardLimit>, isolation: bool) -> StepOutcome {
    let (_, total) = bench.driver.memory()?;
    let compared = compare(total, grant, limit);
    if !isolation {
        return Ok(DoneStep::new(compared?, 0));
    }
    let share = enforced(compared, grant)?;
    let held = hold(bench.driver)?;
    for address in &held.addresses {
        bench.driver.free(*address)?;
    }
    refused(held.refused)?;
    check_sum(held.bytes, total)?;
    let text = format!(
        "{share}; {} MiB could be allocated, and {} MiB more were refused",
        held.bytes / MIB,
        BEYOND / MIB
    );
    Ok(DoneStep::new(text, 0))
}

/// Refuse to fill a GPU that others share and that has no limit. A container without a share has the whole GPU.
pub(super) fn enforced(compared: Result<String, StepProblem>, grant: &GivenShare) -> Result<String, StepProblem> {
    match compared {
        Err(StepProblem::Skip(reason)) if grant.units.is_some() => Err(StepProblem::finding(
            reason,
            "a container can take the memory of others",
            "run the agent with --guard (docs/pods.md)",
        )),
        Err(StepProblem::Skip(_)) => Ok("the whole GPU".to_owned()),
        other => other,
    }
}

/// The same for a step that has not compared the share itself.
pub(super) fn enforceable(total: u64, grant: &GivenShare, limit: Option<GuardLimit>) -> Result<String, StepProblem> {
    enforced(compare(total, grant, limit), grant)
}

/// What was allocated up to the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeldAllocations {
    pub addresses: Vec<GpuAddress>,
    pub bytes: u64,
    /// What the allocation beyond the limit returned.
    pub refused: Option<CudaCode>,
}

/// Allocate until less than 64 MiB are free, and then 64 MiB more.
///
/// What the driver calls free must be there: a refusal before the limit is an error.
pub(crate) fn hold(driver: &dyn Driver) -> Result<HeldAllocations, CallFailure> {
    let (mut addresses, mut bytes) = (Vec::new(), 0_u64);
    let mut free = driver.memory()?.0;
    for chunk in [1024 * MIB, 256 * MIB, BEYOND, 16 * MIB] {
        // A chunk of 16 MiB may not be whole any more, because of what the driver needs for itself.
        while free >= (chunk + 16 * MIB).max(BEYOND) {
            addresses.push(driver.allocate(chunk)?);
            bytes = bytes.saturating_add(chunk);
            let left = driver.memory()?.0;
            // A driver whose free memory does not become less would never refuse anything.
            if left >= free {
                break;
            }
            free = left;
        }
    }
    let refused = match driver.allocate(BEYOND) {
        Ok(address) => {
            addresses.push(address);
            bytes = bytes.saturating_add(BEYOND);
            None
        }
        Err(failure) => Some(failure.code),
    };
    Ok(HeldAllocations {
        addresses,
        bytes,
        refused,
    })
}

/// Require that more than the limit was refused because of the limit.
pub(super) fn refused(code: Option<CudaCode>) -> Result<(), StepProblem> {
    match code {
        Some(CudaCode::OUT_OF_MEMORY) => Ok(()),
        Some(code) => Err(StepProblem::Failed(CallFailure::new("cuMemAlloc_v2", code))),
        None => Err(StepProblem::finding(
            format!("{} MiB were allocated beyond the limit", BEYOND / MIB),
            "a container can take the memory of others",
            "look at the agent's log on the node, and restart the pod",
        )),
    }
}

/// Require that what is held is within the share.
pub(super) fn check_sum(held: u64, total: u64) -> Result<(), StepProblem> {
    if held <= total {
        Ok(())
    } else {
        Err(StepProblem::finding(
            format!(
                "{} MiB were allocated, and the driver shows {} MiB in all",
                held / MIB,
                total / MIB
            ),
            "a container can take the memory of others",
            "look at the agent's log on the node, and restart the pod",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_compared_with_what_the_driver_shows() {
        let units = |units| GivenShare {
            units,
            ..GivenShare::default()
        };
        let limit = |mib| {
            Some(GuardLimit {
                bytes: mib * MIB,
                context: 0,
            })
        };
        let table = [
            (
                units(Some((2, 80))),
                limit(2048),
                "PASS the driver shows the share, 2048 MiB",
                false,
            ),
            (
                units(Some((2, 80))),
                limit(4096),
                "FAIL the driver shows 2048 MiB, and the share is 4096 MiB",
                false,
            ),
            (
                units(Some((2, 80))),
                None,
                "SKIP the share is 2 of 80 units, and nothing limits this container to it: the guard is not in it",
                true,
            ),
            (units(Some((80, 80))), None, "PASS the whole GPU, 2048 MiB", false),
            (units(None), None, "SKIP this container has no share of Divvy", false),
        ];
        for (grant, limit, expected, is_open) in table {
            let compared = compare(2048 * MIB, &grant, limit);
            let text = match &compared {
                Ok(text) => format!("PASS {text}"),
                Err(StepProblem::Skip(text)) => format!("SKIP {text}"),
                Err(StepProblem::Finding(finding)) => format!("FAIL {}", finding.found),
                Err(StepProblem::Failed(failure)) => panic!("{failure:?}"),
            };
            assert_eq!(text, expected);
            // A shared GPU without a limit is not filled.
            assert_eq!(
                matches!(enforced(compared, &grant), Err(StepProblem::Finding(finding)) if finding.fix.contains("--guard")),
                is_open
            );
        }
    }
}
