//! Reads what amdgpu measures of a GPU (docs.kernel.org, "GPU Power/Thermal Controls and Monitoring").

use super::devices::AmdDevice;
use crate::sysfs::{SysfsDirectory, celsius, sensors};
use crate::{Gauges, GpuMemory};

/// Return the values of a device. What the files say is about the whole card, so a partition has none.
pub(super) fn read(device: &AmdDevice<'_>) -> Gauges {
    let Some(card) = device.function.as_ref().filter(|_| !device.divided && !device.lost) else {
        return Gauges::default();
    };
    let sensors = sensors(card);
    let sensor = |file: &str| sensors.as_ref()?.number::<u64>(file);
    Gauges {
        memory: memory(card),
        gpu_percent: card.number("/gpu_busy_percent"),
        memory_percent: card.number("/mem_busy_percent"),
        // In microwatts. GPUs that have no average have the current value.
        power_milliwatts: sensor("/power1_average")
            .or_else(|| sensor("/power1_input"))
            .map(|power| power / 1000),
        temperature_celsius: sensor("/temp1_input").and_then(celsius),
        memory_temperature_celsius: sensor("/temp3_input").and_then(celsius),
        ..Gauges::default()
    }
}

fn memory(card: &SysfsDirectory<'_>) -> Option<GpuMemory> {
    let (total, used): (u64, u64) = (card.number("/mem_info_vram_total")?, card.number("/mem_info_vram_used")?);
    Some(GpuMemory {
        total,
        used,
        reserved: None,
        free: total.checked_sub(used)?,
    })
}
