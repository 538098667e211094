//! What a driver measures and counts of each GPU, for metrics.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::facts::{ERROR_BYTES, MAX_GPUS, MAX_MIG_DEVICES, is_text, is_uuid, make_text};
use crate::{Error, RemappedRows};

/// All of something, in the unit of the ratios in [`Gpm`].
const PARTS: u32 = 1_000_000;
/// The number of bytes that no GPU has, and that no bus transfers in a second.
pub(crate) const TOO_MANY_BYTES: u64 = 1 << 60;

/// The slowest performance state (nvml.h, `nvmlPstates_t`).
const SLOWEST_STATE: u32 = 15;

/// What a driver measures and counts of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuGauges {
    /// The GPU's UUID.
    pub uuid: String,
    /// What the driver returned.
    #[serde(default)]
    pub values: Gauges,
    /// The MIG devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PartGauges>,
    /// What the driver could not read. It is `None` among the values, as is what the GPU or the driver does not have.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub failed: BTreeSet<Measure>,
    /// Why the driver returned nothing, or nothing for some values, for example because the GPU is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A value that nvidia-smi shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measure {
    /// [`Gauges::compute_mode`].
    ComputeMode,
    /// [`Gauges::display_active`].
    Display,
    /// [`Gauges::ecc_enabled`] and [`Gauges::uncorrected_ecc`].
    Ecc,
    /// [`Gauges::fan_percent`].
    Fan,
    /// [`Gauges::memory`].
    Memory,
    /// Whether MIG is enabled.
    Mig,
    /// [`Gauges::performance_state`].
    PerformanceState,
    /// [`Gauges::persistence`].
    Persistence,
    /// [`Gauges::power_milliwatts`].
    Power,
    /// [`Gauges::power_limit_milliwatts`].
    PowerLimit,
    /// [`Gauges::temperature_celsius`].
    Temperature,
    /// [`Gauges::gpu_percent`].
    Utilization,
}

/// The values of one MIG device. A value that the driver does not return is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartGauges {
    /// The UUID of the MIG device.
    pub uuid: String,
    /// The number of the GPU instance. Several MIG devices can be in the same one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// The memory, which is that of the GPU instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<GpuMemory>,
    /// The memory that is mapped into the PCI address space (BAR1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bar1: Option<GpuMemory>,
    /// Errors of the memory that ECC found and could not correct, since the driver was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncorrected_ecc: Option<u64>,
    /// What only GPUs from Hopper on measure. It is about the GPU instance, so a MIG device that shares its GPU instance has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpm: Option<Gpm>,
}

/// Which processes may use a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One thread of one process. Drivers no longer have this mode.
    ExclusiveThread,
    /// No process.
    Prohibited,
    /// One process.
    ExclusiveProcess,
}

/// The values of one GPU. A value that the driver does not return is `None`, and never 0 or another number in its place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gauges {
    /// The memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<GpuMemory>,
    /// Percent of the last sample period in which a kernel was running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_percent: Option<u32>,
    /// Percent of the last sample period in which the memory was read or written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_percent: Option<u32>,
    /// How busy the video encoders are, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoder_percent: Option<u32>,
    /// How busy the video decoders are, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder_percent: Option<u32>,
    /// The power draw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_milliwatts: Option<u64>,
    /// The energy used since the driver was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_millijoules: Option<u64>,
    /// The temperature of the GPU's chip.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_celsius: Option<u32>,
    /// The temperature of the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_temperature_celsius: Option<u32>,
    /// The current clock of the streaming multiprocessors.
    #[serde(default, rename = "smClockMHz", skip_serializing_if = "Option::is_none")]
    pub sm_clock_mhz: Option<u32>,
    /// The current clock of the memory.
    #[serde(default, rename = "memoryClockMHz", skip_serializing_if = "Option::is_none")]
    pub memory_clock_mhz: Option<u32>,
    /// How often data on the PCI bus was sent again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_replays: Option<u64>,
    /// Errors of the memory that ECC corrected, since the driver was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub corrected_ecc: Option<u64>,
    /// Errors of the memory that ECC found and could not correct, since the driver was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncorrected_ecc: Option<u64>,
    /// As `corrected_ecc`, over the GPU's lifetime.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub corrected_ecc_aggregate: Option<u64>,
    /// As `uncorrected_ecc`, over the GPU's lifetime.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncorrected_ecc_aggregate: Option<u64>,
    /// The rows of the memory that were replaced by spare ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remapped_rows: Option<RemappedRows>,
    /// Why the clocks are lower than possible, as bits (nvml.h, `nvmlClocksEventReason…`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clocks_event_reasons: Option<u64>,
    /// The speed of the first fan in percent of its highest. It can be above 100 (nvml.h, `nvmlDeviceGetFanSpeed_v2`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fan_percent: Option<u32>,
    /// The performance state, from 0, which is the fastest, to 15.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub performance_state: Option<u32>,
    /// The limit of the power draw that is enforced: the lowest of all limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_milliwatts: Option<u64>,
    /// Whether a display is initialized on the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_active: Option<bool>,
    /// Whether ECC is switched on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc_enabled: Option<bool>,
    /// Whether the driver stays initialized without clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistence: Option<bool>,
    /// Which processes may use the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<ComputeMode>,
    /// What only GPUs from Hopper on measure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpm: Option<Gpm>,
}

/// The memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuMemory {
    /// All memory.
    pub total: u64,
    /// What processes use. Without `reserved`, it includes what the driver reserves.
    pub used: u64,
    /// What the driver reserves. `None` if it is part of `used`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<u64>,
    /// What is left.
    pub free: u64,
}

/// GPU Performance Monitoring (nvml.h, `nvmlGpmMetricId_t`): means over the time between two questions, which is 1 to 60 s. The ratios are in parts per
/// million.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gpm {
    /// Of the time: a program computed or rendered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphics_active: Option<u32>,
    /// Of the multiprocessors: those that were busy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_active: Option<u32>,
    /// Of the warps that the multiprocessors can have: those that were active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_occupancy: Option<u32>,
    /// Of the time: the multiprocessors did tensor operations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_active: Option<u32>,
    /// Of the memory's bandwidth: what was used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dram_active: Option<u32>,
    /// Of the time: the multiprocessors did FP64 operations other than those of tensors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp64_active: Option<u32>,
    /// As `fp64_active`, for FP32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp32_active: Option<u32>,
    /// As `fp64_active`, for FP16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp16_active: Option<u32>,
    /// What the GPU sent over the PCI bus, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_tx_bytes: Option<u64>,
    /// What the GPU received over the PCI bus, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_rx_bytes: Option<u64>,
}

impl PartGauges {
    /// Return what is measured of both a MIG device and a GPU, as the values of a GPU.
    pub fn as_of_gpu(&self) -> Gauges {
        Gauges {
            memory: self.memory,
            gpm: self.gpm,
            ..Gauges::default()
        }
    }
}

impl Gpm {
    /// Return the part of the time in which a program computed or rendered, in percent, rounded.
    pub fn busy_percent(&self) -> Option<u32> {
        self.graphics_active.map(|parts| (parts + PARTS / 200) / (PARTS / 100))
    }
}

impl GpuMemory {
    fn is_possible(&self) -> bool {
        let parts = [self.used, self.free, self.reserved.unwrap_or(0)];
        self.total < TOO_MANY_BYTES && parts.into_iter().all(|part| part <= self.total)
    }
}

impl Gauges {
    /// Return the part of the time in which the GPU was busy, in percent. NVML has no utilization of a GPU that is divided by MIG; from Hopper on, GPM has.
    pub fn busy_percent(&self) -> Option<u32> {
        self.gpu_percent.or_else(|| self.gpm?.busy_percent())
    }

    /// Leave out the values that no GPU can have. Some drivers return such values, and each costs only itself.
    #[must_use]
    pub(crate) fn possible(self) -> Gauges {
        let percent = |value: Option<u32>| value.filter(|percent| *percent <= 100);
        Gauges {
            memory: self.memory.filter(GpuMemory::is_possible),
            gpu_percent: percent(self.gpu_percent),
            memory_percent: percent(self.memory_percent),
            encoder_percent: percent(self.encoder_percent),
            decoder_percent: percent(self.decoder_percent),
            performance_state: self.performance_state.filter(|state| *state <= SLOWEST_STATE),
            gpm: self.gpm.map(Gpm::possible),
            ..self
        }
    }
}

impl PartGauges {
    fn possible(self) -> PartGauges {
        PartGauges {
            memory: self.memory.filter(GpuMemory::is_possible),
            bar1: self.bar1.filter(GpuMemory::is_possible),
            gpm: self.gpm.map(Gpm::possible),
            ..self
        }
    }
}

impl Gpm {
    fn possible(self) -> Gpm {
        let ratio = |value: Option<u32>| value.filter(|parts| *parts <= PARTS);
        let rate = |value: Option<u64>| value.filter(|bytes| *bytes < TOO_MANY_BYTES);
        Gpm {
            graphics_active: ratio(self.graphics_active),
            sm_active: ratio(self.sm_active),
            sm_occupancy: ratio(self.sm_occupancy),
            tensor_active: ratio(self.tensor_active),
            dram_active: ratio(self.dram_active),
            fp64_active: ratio(self.fp64_active),
            fp32_active: ratio(self.fp32_active),
            fp16_active: ratio(self.fp16_active),
            pcie_tx_bytes: rate(self.pcie_tx_bytes),
            pcie_rx_bytes: rate(self.pcie_rx_bytes),
        }
    }
}

impl GpuGauges {
    /// Make the values and the text acceptable to [`GpuGauges::validate`]. What a driver says of one GPU must not cost the reader all GPUs.
    #[must_use]
    pub(crate) fn possible(mut self) -> GpuGauges {
        self.values = self.values.possible();
        for part in &mut self.parts {
            *part = std::mem::take(part).possible();
        }
        if let Some(error) = &mut self.error {
            make_text(error, ERROR_BYTES);
        }
        self
    }

    /// Refuse answers that a driver cannot have produced.
    ///
    /// # Errors
    /// Says what is wrong with the answer.
    pub fn validate(all: &[GpuGauges]) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::Protocol(format!("measurements were refused: {text}")));
        if all.len() > MAX_GPUS {
            return refuse(format!("they are of more than {MAX_GPUS} GPUs"));
        }
        for (index, gpu) in all.iter().enumerate() {
            if !is_uuid(&gpu.uuid) || all[..index].iter().any(|other| other.uuid == gpu.uuid) {
                return refuse(format!("the UUID of GPU {index} is malformed or appears twice"));
            }
            if gpu.error.as_ref().is_some_and(|text| !is_text(text, ERROR_BYTES)) {
                return refuse(format!("the error of GPU {} is not printable text", gpu.uuid));
            }
            let parts = &gpu.parts;
            let is_twice = |at: usize| parts[..at].iter().any(|other| other.uuid == parts[at].uuid);
            if parts.len() > MAX_MIG_DEVICES || (0..parts.len()).any(|at| !is_uuid(&parts[at].uuid) || is_twice(at)) {
                return refuse(format!("GPU {} has malformed MIG devices", gpu.uuid));
            }
            if gpu.values != gpu.values.possible() || parts.iter().any(|part| *part != part.clone().possible()) {
                return refuse(format!("GPU {} has a value that no GPU can have", gpu.uuid));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str, values: Gauges) -> GpuGauges {
        GpuGauges {
            uuid: uuid.to_owned(),
            values,
            parts: Vec::new(),
            failed: Default::default(),
            error: None,
        }
    }

    fn plain(uuid: &str) -> GpuGauges {
        gpu(uuid, Gauges::default())
    }

    const MEMORY: GpuMemory = GpuMemory {
        total: 16 << 30,
        used: 4 << 30,
        reserved: Some(1 << 30),
        free: 11 << 30,
    };

    fn full() -> Gauges {
        Gauges {
            memory: Some(MEMORY),
            gpu_percent: Some(100),
            memory_percent: Some(0),
            encoder_percent: Some(1),
            decoder_percent: Some(2),
            power_milliwatts: Some(u64::MAX),
            energy_millijoules: Some(u64::MAX),
            temperature_celsius: Some(35),
            memory_temperature_celsius: Some(40),
            sm_clock_mhz: Some(1980),
            memory_clock_mhz: Some(2619),
            pcie_replays: Some(3),
            corrected_ecc: Some(7),
            uncorrected_ecc: Some(0),
            corrected_ecc_aggregate: Some(9),
            uncorrected_ecc_aggregate: Some(1),
            remapped_rows: Some(RemappedRows::default()),
            clocks_event_reasons: Some(4),
            fan_percent: Some(104),
            performance_state: Some(15),
            power_limit_milliwatts: Some(250_000),
            display_active: Some(false),
            ecc_enabled: Some(true),
            persistence: Some(true),
            compute_mode: Some(ComputeMode::ExclusiveProcess),
            gpm: Some(Gpm {
                graphics_active: Some(PARTS),
                sm_active: Some(0),
                sm_occupancy: Some(1),
                tensor_active: Some(2),
                dram_active: Some(3),
                fp64_active: Some(4),
                fp32_active: Some(5),
                fp16_active: Some(6),
                pcie_tx_bytes: Some(1 << 40),
                pcie_rx_bytes: Some(0),
            }),
        }
    }

    /// Values that no GPU can have, with the field that each is in.
    fn impossible() -> Vec<(&'static str, Gauges)> {
        let memory = |change: fn(&mut GpuMemory)| {
            let mut memory = MEMORY;
            change(&mut memory);
            Some(memory)
        };
        let mut all = Vec::new();
        for of in [
            memory(|of| of.total = 1 << 60),
            memory(|of| of.used = of.total + 1),
            memory(|of| of.free = u64::MAX),
            memory(|of| of.reserved = Some(u64::MAX)),
        ] {
            all.push(("memory", Gauges { memory: of, ..full() }));
        }
        type Field<T, V> = fn(&mut T) -> &mut Option<V>;
        let percents: [(&str, Field<Gauges, u32>); 4] = [
            ("gpuPercent", |of| &mut of.gpu_percent),
            ("memoryPercent", |of| &mut of.memory_percent),
            ("encoderPercent", |of| &mut of.encoder_percent),
            ("decoderPercent", |of| &mut of.decoder_percent),
        ];
        for (name, field) in percents {
            let mut gauges = full();
            *field(&mut gauges) = Some(101);
            all.push((name, gauges));
        }
        all.push((
            "performanceState",
            Gauges {
                performance_state: Some(32),
                ..full()
            },
        ));
        let gpm = full().gpm.expect("set");
        let ratios: [Field<Gpm, u32>; 8] = [
            |of| &mut of.graphics_active,
            |of| &mut of.sm_active,
            |of| &mut of.sm_occupancy,
            |of| &mut of.tensor_active,
            |of| &mut of.dram_active,
            |of| &mut of.fp64_active,
            |of| &mut of.fp32_active,
            |of| &mut of.fp16_active,
        ];
        for field in ratios {
            let mut gpm = gpm;
            *field(&mut gpm) = Some(PARTS + 1);
            all.push((
                "gpm",
                Gauges {
                    gpm: Some(gpm),
                    ..full()
                },
            ));
        }
        let rates: [Field<Gpm, u64>; 2] = [|of| &mut of.pcie_tx_bytes, |of| &mut of.pcie_rx_bytes];
        for field in rates {
            let mut gpm = gpm;
            *field(&mut gpm) = Some(TOO_MANY_BYTES);
            all.push((
                "gpm",
                Gauges {
                    gpm: Some(gpm),
                    ..full()
                },
            ));
        }
        all
    }

    #[test]
    fn measurements_that_no_driver_takes_are_refused() {
        GpuGauges::validate(&[gpu("GPU-a", full()), plain("GPU-b")]).expect("ordinary");
        let with_error = |error: &str| GpuGauges {
            error: Some(error.to_owned()),
            ..plain("GPU-a")
        };
        GpuGauges::validate(&[with_error("GPU is lost")]).expect("a lost GPU");
        let part = |uuid: &str, memory| PartGauges {
            uuid: uuid.to_owned(),
            memory: Some(memory),
            ..PartGauges::default()
        };
        let divided = |parts: Vec<PartGauges>| vec![GpuGauges { parts, ..plain("GPU-a") }];
        GpuGauges::validate(&divided(vec![part("MIG-a", MEMORY), part("MIG-b", MEMORY)])).expect("a divided GPU");
        let too_full = GpuMemory {
            used: MEMORY.total + 1,
            ..MEMORY
        };
        let too_busy = PartGauges {
            gpm: Some(Gpm {
                sm_active: Some(PARTS + 1),
                ..Gpm::default()
            }),
            ..part("MIG-a", MEMORY)
        };
        let mut cases = vec![
            ("a MIG device that is busier than all of the time", divided(vec![too_busy])),
            (
                "the same MIG device twice",
                divided(vec![part("MIG-a", MEMORY), part("MIG-a", MEMORY)]),
            ),
            ("a path for a MIG device", divided(vec![part("../x", MEMORY)])),
            (
                "a MIG device that uses more than it has",
                divided(vec![part("MIG-a", too_full)]),
            ),
            (
                "too many MIG devices",
                divided((0..65).map(|i| part(&format!("MIG-{i}"), MEMORY)).collect()),
            ),
            ("the same GPU twice", vec![plain("GPU-a"), plain("GPU-a")]),
            ("a path for a GPU", vec![plain("../x")]),
            ("no UUID", vec![plain("")]),
            ("an error of two lines", vec![with_error("a\nb")]),
            ("a long error", vec![with_error(&"a".repeat(ERROR_BYTES + 1))]),
            ("too many GPUs", (0..300).map(|i| plain(&format!("GPU-{i}"))).collect()),
        ];
        cases.extend(
            impossible()
                .into_iter()
                .map(|(name, values)| (name, vec![gpu("GPU-a", values)])),
        );
        for (name, all) in cases {
            let error = GpuGauges::validate(&all).expect_err(name).to_string();
            assert!(error.contains("measurements were refused"), "{name}: {error}");
        }
    }

    #[test]
    fn an_impossible_value_costs_only_itself() {
        assert_eq!(full().possible(), full());
        let json = |gauges: Gauges| serde_json::to_value(gauges).expect("JSON");
        for (name, values) in impossible() {
            let made = gpu("GPU-a", values).possible();
            GpuGauges::validate(std::slice::from_ref(&made)).expect(name);
            let (mut kept, mut before) = (json(made.values), json(full()));
            let left = |value: &serde_json::Value| value[name].as_object().map(serde_json::Map::len);
            match name {
                "gpm" => assert_eq!(left(&kept), left(&before).map(|all| all - 1), "{kept}"),
                _ => assert_eq!(kept.get(name), None),
            }
            for value in [&mut kept, &mut before] {
                value.as_object_mut().expect("an object").remove(name);
            }
            assert_eq!(kept, before, "{name}");
        }
        let long = GpuGauges {
            error: Some("\0".repeat(2000)),
            ..plain("GPU-a")
        };
        assert_eq!(long.possible().error, Some("?".repeat(ERROR_BYTES)));
    }

    /// GPM says how busy a GPU is only without the driver's utilization.
    #[test]
    fn gpm_stands_in_only_for_missing_utilization() {
        let gpm = |parts| Gpm {
            graphics_active: parts,
            ..Gpm::default()
        };
        for (percent, parts, expected) in [
            (Some(0), Some(PARTS), Some(0)),
            (None, Some(0), Some(0)),
            (None, Some(4_999), Some(0)),
            (None, Some(5_000), Some(1)),
            (None, Some(PARTS), Some(100)),
            (None, None, None),
        ] {
            let gauges = Gauges {
                gpu_percent: percent,
                gpm: Some(gpm(parts)),
                ..Gauges::default()
            };
            assert_eq!(gauges.busy_percent(), expected, "{percent:?} {parts:?}");
        }
        assert_eq!(Gauges::default().busy_percent(), None);
    }

    #[test]
    fn a_value_that_the_driver_does_not_return_is_absent() {
        let json = |of: &GpuGauges| serde_json::to_value(of).expect("JSON");
        assert_eq!(json(&plain("GPU-a")), serde_json::json!({"uuid": "GPU-a", "values": {}}));
        for gpu in [plain("GPU-a"), gpu("GPU-b", full())] {
            assert_eq!(serde_json::from_value::<GpuGauges>(json(&gpu)).expect("read"), gpu);
        }
    }
}
