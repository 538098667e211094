//! Uncorrectable memory errors, from the driver's RAS counters (Linux, `drivers/gpu/drm/amd/amdgpu/amdgpu_ras.c`).

use std::collections::BTreeMap;

use crate::sysfs::{SysfsDirectory, SysfsProperties};

/// The counters of all GPUs as they were last read: by the GPU's name, then by the counter's.
#[derive(Debug, Default)]
pub(super) struct Counters {
    before: BTreeMap<String, BTreeMap<String, u64>>,
}

impl Counters {
    /// Read a GPU's counters. Return the number of uncorrectable errors so far, if a counter has risen since it was last read.
    ///
    /// The first value of a counter is a baseline, and so is a lower value, because a driver that is loaded again counts from 0.
    /// If a counter cannot be read, its last value is kept, so that the counter has not risen merely because it can be read
    /// again.
    pub(super) fn read(&mut self, gpu: &str, function: &SysfsDirectory<'_>) -> Option<u64> {
        let mut rose = false;
        for name in function.names("/ras") {
            if !name.ends_with("_err_count") {
                continue;
            }
            // Correctable errors (`ce`) are corrected.
            let text = function.text(&format!("/ras/{name}"));
            let Some(count) = text.and_then(|text| SysfsProperties::parse(&text).get::<u64>("ue")) else {
                continue;
            };
            let before = self.before.entry(gpu.to_owned()).or_default().insert(name, count);
            rose |= before.is_some_and(|before| count > before);
        }
        let all = self.before.get(gpu)?.values();
        rose.then(|| all.fold(0, |sum: u64, count| sum.saturating_add(*count)))
    }
}
