/// The scenarios' machines: the tutorial's laptop, a mixed node, a node without GPUs. Sizes are those that NVML reports for these cards.
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

[[node]]
name = "mixed"
address = "192.168.8.101"
[[node.gpu]]
model = "NVIDIA A100-SXM4-40GB"
memory_mib = 40960
links = [[1, "nvlink", 12]]
numa = 0
[[node.gpu]]
model = "NVIDIA A100-SXM4-40GB"
memory_mib = 40960
links = [[0, "nvlink", 12]]
numa = 0
[[node.gpu]]
model = "Tesla T4"
memory_mib = 15360
cc = "7.5"
sms = 40
clock_mhz = 1590
numa = 1

[[node]]
name = "cpu-only"
address = "192.168.8.102"
"#;

#[cfg(test)]
mod tests {
    #[test]
    fn the_built_in_machines_are_a_valid_description() {
        let machines = divvy_model::machine::Machines::parse(super::BUILT_IN).expect("valid");
        let gpus: Vec<_> = machines
            .nodes
            .iter()
            .map(|node| (node.name.as_str(), node.gpus.len()))
            .collect();
        assert_eq!(gpus, [("archlinux", 1), ("mixed", 3), ("cpu-only", 0)]);
    }
}
