//! Reads what xe measures of a GPU (Linux, `Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon`).

use super::devices::IntelDevice;
use crate::sysfs::{celsius, sensors};
use crate::{Gauges, GpuMemory};

/// Return the values of a device.
pub(super) fn read(device: &IntelDevice<'_>) -> Gauges {
    if device.lost {
        return Gauges::default();
    }
    let sensors = sensors(&device.function);
    let sensor = |file: &str| sensors.as_ref()?.number::<u64>(file);
    Gauges {
        memory: memory(device),
        // In microwatts. Most GPUs have only the energy, in microjoules.
        power_milliwatts: sensor("/power1_input").map(|power| power / 1000),
        energy_millijoules: sensor("/energy1_input").map(|energy| energy / 1000),
        // 1 is the card, which has no sensor, 2 the chip, 3 the memory.
        temperature_celsius: sensor("/temp2_input").and_then(celsius),
        memory_temperature_celsius: sensor("/temp3_input").and_then(celsius),
        ..Gauges::default()
    }
}

fn memory(device: &IntelDevice<'_>) -> Option<GpuMemory> {
    let (total, used) = (device.vram.total?, device.vram.used?);
    Some(GpuMemory {
        total,
        used,
        reserved: None,
        free: total.checked_sub(used)?,
    })
}
