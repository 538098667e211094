//! What the driver measures of a GPU: values that follow from the description, and those that a test sets in their place.

use std::time::Duration;

use nvml_wrapper_sys::bindings as ffi;

use crate::changes::{Energy, GpuChanges, MachineChanges};
use crate::machine::NvmlCard;

/// Return the current utilization of a GPU in percent.
pub(crate) fn utilization(card: &NvmlCard, changes: Option<&GpuChanges>) -> u32 {
    changes
        .and_then(|changes| changes.utilization)
        .unwrap_or(card.described.utilization)
}

/// Return the power in mW. Without a set value, an A100 draws 43 W when it is idle and 324 W when it is busy, and other GPUs in proportion to their
/// multiprocessors.
pub(crate) fn power(card: &NvmlCard, changes: Option<&GpuChanges>) -> u32 {
    let set = changes.and_then(|changes| changes.gauges.power_milliwatts);
    set.unwrap_or_else(|| {
        let each = utilization(card, changes).saturating_mul(26).saturating_add(400);
        card.described.sms.saturating_mul(each)
    })
}

/// Return the limit of the power in mW: without a set value, what a busy GPU draws.
pub(crate) fn power_limit(card: &NvmlCard, changes: Option<&GpuChanges>) -> u32 {
    let set = changes.and_then(|changes| changes.gauges.power_limit_milliwatts);
    set.unwrap_or_else(|| card.described.sms.saturating_mul(3000))
}

/// Return the performance state. An idle GPU is in the state 8.
pub(crate) fn performance_state(card: &NvmlCard, changes: Option<&GpuChanges>) -> u32 {
    let set = changes.and_then(|changes| changes.gauges.performance_state);
    set.unwrap_or(if utilization(card, changes) > 0 { 0 } else { 8 })
}

/// Return the energy in mJ: the integral of the power since the machine was started, when its driver was loaded.
pub(crate) fn energy(card: &NvmlCard, changes: Option<&GpuChanges>, now: Duration) -> u64 {
    let set = changes.and_then(|changes| changes.gauges.energy_millijoules);
    set.unwrap_or_else(|| {
        let before = changes.map(|changes| changes.energy).unwrap_or_default();
        let elapsed = millis(now).saturating_sub(before.at_ms);
        let since = u64::from(power(card, changes)).saturating_mul(elapsed) / 1000;
        before.millijoules.saturating_add(since)
    })
}

/// Keep the energy that GPUs have used so far, if their power differs from now on.
pub(crate) fn keep_energy(cards: &[NvmlCard], before: &MachineChanges, next: &mut MachineChanges, now: Duration) {
    for (index, card) in (0..).zip(cards) {
        let of = before.gpus.get(&index);
        if power(card, of) != power(card, next.gpus.get(&index)) {
            next.gpus.entry(index).or_default().energy = Energy {
                millijoules: energy(card, of, now),
                at_ms: millis(now),
            };
        }
    }
}

fn millis(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

/// Return the memory's temperature in °C. Only the data center GPUs with HBM have the sensor.
pub(crate) fn memory_celsius(card: &NvmlCard, changes: Option<&GpuChanges>, gpu_celsius: u32) -> Option<u32> {
    let set = changes.and_then(|changes| changes.gauges.memory_celsius);
    set.or_else(|| matches!(card.cc, (7 | 8, 0) | (9 | 10, _)).then(|| gpu_celsius.saturating_add(8)))
}

/// Return the current clock of the multiprocessors in MHz. An idle GPU lowers it.
pub(crate) fn sm_clock(card: &NvmlCard, changes: Option<&GpuChanges>) -> u32 {
    let set = changes.and_then(|changes| changes.gauges.sm_clock_mhz);
    set.unwrap_or_else(|| match utilization(card, changes) {
        0 => card.described.clock_mhz.min(210),
        _ => card.described.clock_mhz,
    })
}

/// Return a value of GPU Performance Monitoring in percent or MiB/s; `None` if the simulated GPU does not have the metric. Without a set value, a GPU instance
/// is as busy as its GPU.
pub(crate) fn gpm(card: &NvmlCard, changes: Option<&GpuChanges>, instance: Option<u32>, metric: u32) -> Option<f64> {
    let gauges = changes.map(|changes| &changes.gauges);
    let set = match instance {
        None => gauges.map(|gauges| &gauges.gpm),
        Some(instance) => gauges.and_then(|gauges| gauges.instance_gpm.get(&instance.to_string())),
    };
    if let Some(set) = set.and_then(|set| set.get(&metric.to_string())) {
        return Some(set.unwrap_or(f64::NAN));
    }
    let factor = match metric {
        ffi::nvmlGpmMetricId_t_NVML_GPM_METRIC_GRAPHICS_UTIL => 1.0,
        ffi::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_UTIL => 0.9,
        ffi::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_OCCUPANCY => 0.5,
        ffi::nvmlGpmMetricId_t_NVML_GPM_METRIC_ANY_TENSOR_UTIL => 0.6,
        ffi::nvmlGpmMetricId_t_NVML_GPM_METRIC_DRAM_BW_UTIL => 0.4,
        ffi::nvmlGpmMetricId_t_NVML_GPM_METRIC_FP64_UTIL => 0.0,
        ffi::nvmlGpmMetricId_t_NVML_GPM_METRIC_FP32_UTIL => 0.25,
        ffi::nvmlGpmMetricId_t_NVML_GPM_METRIC_FP16_UTIL => 0.125,
        ffi::nvmlGpmMetricId_t_NVML_GPM_METRIC_PCIE_TX_PER_SEC => 8.0,
        ffi::nvmlGpmMetricId_t_NVML_GPM_METRIC_PCIE_RX_PER_SEC => 16.0,
        _ => return None,
    };
    Some(f64::from(utilization(card, changes)) * factor)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::changes::GaugeChanges;
    use crate::machine::NvmlMachine;

    fn machine() -> NvmlMachine {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("m.toml");
        let gpu = "[[node.gpu]]\nmodel = \"m\"\nmemory_mib = 1\nsms = 100\n";
        std::fs::write(&path, format!("v = 1\n[[node]]\nname = \"n\"\n{gpu}{gpu}")).expect("file");
        NvmlMachine::load(&path, None, &MachineChanges::default()).expect("a machine")
    }

    #[test]
    fn energy_is_the_integral_of_a_power_that_changes() {
        let machine = machine();
        let energies = |changes: &MachineChanges, seconds: u64| {
            let of = |index: u32| {
                let card = &machine.cards[index as usize];
                energy(card, changes.gpus.get(&index), Duration::from_secs(seconds))
            };
            [of(0), of(1)]
        };
        // An idle GPU with 100 multiprocessors draws 40 W, a busy one 300 W.
        let idle = MachineChanges::default();
        assert_eq!(energies(&idle, 10), [400_000; 2]);
        let mut busy = idle.clone();
        busy.gpus.entry(1).or_default().utilization = Some(100);
        keep_energy(&machine.cards, &idle, &mut busy, Duration::from_secs(10));
        assert_eq!(energies(&busy, 10), [400_000; 2], "nothing is lost or counted twice");
        assert_eq!(energies(&busy, 12), [480_000, 1_000_000]);
        let mut hot = busy.clone();
        hot.gpus.entry(1).or_default().temperature = Some(90);
        keep_energy(&machine.cards, &busy, &mut hot, Duration::from_secs(11));
        assert_eq!(energies(&hot, 12), energies(&busy, 12), "the power is the same");
        let mut set = hot.clone();
        set.gpus.entry(1).or_default().gauges.power_milliwatts = Some(500_000);
        keep_energy(&machine.cards, &hot, &mut set, Duration::from_secs(12));
        assert_eq!(energies(&set, 13), [520_000, 1_500_000]);
    }

    #[test]
    fn what_a_test_sets_replaces_what_is_simulated() {
        let machine = machine();
        let card = &machine.cards[0];
        let mut changes = GpuChanges {
            utilization: Some(50),
            ..GpuChanges::default()
        };
        let metrics = |changes: &GpuChanges| [1, 5, 4].map(|metric| gpm(card, Some(changes), None, metric));
        assert_eq!(metrics(&changes), [Some(50.0), Some(30.0), None]);
        assert_eq!((sm_clock(card, None), sm_clock(card, Some(&changes))), (210, 1410));
        assert_eq!(memory_celsius(card, Some(&changes), 35), Some(43));
        changes.gauges = GaugeChanges {
            sm_clock_mhz: Some(7),
            memory_celsius: Some(8),
            gpm: BTreeMap::from([("1".to_owned(), Some(2.5)), ("5".to_owned(), None)]),
            ..GaugeChanges::default()
        };
        let [graphics, tensor, integer] = metrics(&changes);
        assert_eq!((graphics, tensor.map(f64::is_nan), integer), (Some(2.5), Some(true), None));
        assert_eq!(
            (sm_clock(card, Some(&changes)), memory_celsius(card, Some(&changes), 35)),
            (7, Some(8))
        );
    }
}
