/// A machine that the scenarios are written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TestbedMachine {
    /// The tutorial's machine: one GPU with 16 GiB.
    Laptop,
    /// Two A100 GPUs with 40 GiB each and a T4 with 15 GiB.
    Mixed,
    /// Four AMD Instinct MI210 with 64 GB each: GPUs 0 and 2 are in one hive, and GPUs 1 and 3 in another. Two Intel GPUs with 48 GiB each.
    Instinct,
    /// A machine without a GPU.
    CpuOnly,
}

impl TestbedMachine {
    /// Return the name of this machine's node in [`BUILT_IN`].
    pub(crate) fn name(self) -> &'static str {
        match self {
            TestbedMachine::Laptop => "archlinux",
            TestbedMachine::Mixed => "mixed",
            TestbedMachine::Instinct => "instinct",
            TestbedMachine::CpuOnly => "cpu-only",
        }
    }

    /// Return the machine's shared GPU memory in units of 1 GiB.
    pub fn units(self) -> u64 {
        match self {
            TestbedMachine::Laptop => 16,
            TestbedMachine::Mixed => 95,
            TestbedMachine::Instinct | TestbedMachine::CpuOnly => 0,
        }
    }
}

/// The scenarios' machines: the tutorial's laptop, a node with mixed GPUs, a node with GPUs of AMD and Intel, and a node without GPUs. The memory sizes
/// are those that the drivers report for these GPUs.
pub const BUILT_IN: &str = r#"v = 1

[[node]]
name = "archlinux"
address = "192.168.8.100"
[[node.gpu]]
model = "NVIDIA GeForce RTX 3080 Ti Laptop GPU"
memory_mib = 16384
cc = "8.6"
sms = 58
clock_mhz = 2100
memory_clock_mhz = 8001
memory_bus_bits = 256

[[node]]
name = "mixed"
address = "192.168.8.101"
[[node.gpu]]
model = "NVIDIA A100-SXM4-40GB"
memory_mib = 40960
memory_clock_mhz = 1215
memory_bus_bits = 5120
links = [[1, "nvlink", 12]]
numa = 0
[[node.gpu]]
model = "NVIDIA A100-SXM4-40GB"
memory_mib = 40960
memory_clock_mhz = 1215
memory_bus_bits = 5120
links = [[0, "nvlink", 12]]
numa = 0
[[node.gpu]]
model = "Tesla T4"
memory_mib = 15360
cc = "7.5"
sms = 40
clock_mhz = 1590
memory_clock_mhz = 5001
memory_bus_bits = 256
numa = 1

[[node]]
name = "instinct"
address = "192.168.8.103"
[[node.amd]]
model = "AMD Instinct MI210"
memory_mib = 65520
hive = 1
numa = 0
[[node.amd]]
model = "AMD Instinct MI210"
memory_mib = 65520
hive = 2
numa = 0
[[node.amd]]
model = "AMD Instinct MI210"
memory_mib = 65520
hive = 1
numa = 1
[[node.amd]]
model = "AMD Instinct MI210"
memory_mib = 65520
hive = 2
numa = 1
[[node.intel]]
device = "0x0bda"
memory_mib = 49152
numa = 0
[[node.intel]]
device = "0x0bda"
memory_mib = 49152
numa = 1

[[node]]
name = "cpu-only"
address = "192.168.8.102"
"#;

#[cfg(test)]
mod tests {
    use super::TestbedMachine;

    #[test]
    fn the_built_in_machines_are_a_valid_description() {
        let machines = divvy_model::machine::Machines::parse(super::BUILT_IN).expect("valid");
        let gpus: Vec<_> = machines
            .nodes
            .iter()
            .map(|node| (node.name.as_str(), node.gpus.len(), node.amd.len(), node.intel.len()))
            .collect();
        assert_eq!(
            gpus,
            [
                ("archlinux", 1, 0, 0),
                ("mixed", 3, 0, 0),
                ("instinct", 0, 4, 2),
                ("cpu-only", 0, 0, 0)
            ]
        );
        for machine in [
            TestbedMachine::Laptop,
            TestbedMachine::Mixed,
            TestbedMachine::Instinct,
            TestbedMachine::CpuOnly,
        ] {
            let node = machines.node(machine.name()).expect("described");
            assert_eq!(
                node.gpus.iter().map(|gpu| gpu.memory_mib / 1024).sum::<u64>(),
                machine.units()
            );
        }
    }
}
