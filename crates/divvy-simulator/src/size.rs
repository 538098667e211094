use std::collections::BTreeMap;
use std::fmt;

use divvy_policy::{Demand, DemandShare};

/// The size of a pod, as in reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Size {
    /// Only CPU and main memory.
    NoGpu,
    /// A part of one GPU.
    Part,
    /// This number of whole GPUs.
    Whole(u8),
}

impl Size {
    /// Return the size of a pod with this request, on GPUs of size 1000.
    pub fn of(demand: &Demand) -> Size {
        match demand.gpus {
            0 => Size::NoGpu,
            1 if demand.share.of(1000) < 1000 && demand.share != DemandShare::WHOLE => Size::Part,
            gpus => Size::Whole(gpus),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Size::NoGpu => f.write_str("no GPU"),
            Size::Part => f.write_str("part of a GPU"),
            Size::Whole(1) => f.write_str("1 GPU"),
            Size::Whole(gpus) => write!(f, "{gpus} GPUs"),
        }
    }
}

/// How many pods arrived, and how many of them fitted nowhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FitTally {
    /// The number of pods that arrived.
    pub asked: u64,
    /// The number of these pods that fitted nowhere.
    pub failed: u64,
}

impl FitTally {
    /// Return the pods that fitted nowhere, in percent of those that arrived.
    pub fn failed_percent(&self) -> f64 {
        100.0 * self.failed as f64 / self.asked.max(1) as f64
    }
}

/// Add one pod to the counts by size.
pub(crate) fn count(by_size: &mut BTreeMap<Size, FitTally>, demand: &Demand, placed: bool) {
    let tally = by_size.entry(Size::of(demand)).or_default();
    tally.asked += 1;
    tally.failed += u64::from(!placed);
}
