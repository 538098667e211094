//! Reads the GPUs from `/proc/driver/nvidia`, where NVIDIA's kernel module describes them. This works without NVML.

use std::collections::BTreeMap;

use divvy_model::MigDevice;

use super::Tree;
use super::nvidia_gpu::{Mig, NvidiaGpu};
use divvy_host::Root;

const GPUS: &str = "/proc/driver/nvidia/gpus";
const CAPABILITIES: &str = "/proc/driver/nvidia/capabilities";
const MIG_MINORS: &str = "/proc/driver/nvidia-caps/mig-minors";

/// Return the GPUs in the order of their PCI addresses, which is NVML's default order.
pub fn gpus(tree: &dyn Tree) -> Vec<NvidiaGpu> {
    let Some(root) = Root::open(tree, "/") else {
        return Vec::new();
    };
    let mut gpus: Vec<NvidiaGpu> = root
        .names(GPUS)
        .iter()
        .filter_map(|address| {
            let text = root.text(&format!("{GPUS}/{address}/information"))?;
            information(&text, address)
        })
        .collect();
    gpus.sort_by(|a, b| a.pci.cmp(&b.pci));
    for (gpu, index) in gpus.iter_mut().zip(0..) {
        gpu.index = index;
        gpu.mig = mig_of(tree, gpu.minor, None);
    }
    gpus
}

/// Parse an `information` file, which has `Key: value` lines.
fn information(text: &str, address: &str) -> Option<NvidiaGpu> {
    let fields: BTreeMap<&str, &str> = text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(key, value)| (key.trim(), value.trim()))
        .collect();
    // Until a program uses the driver, the UUID consists of question marks.
    let uuid = fields.get("GPU UUID").filter(|uuid| !uuid.contains('?'));
    Some(NvidiaGpu {
        index: 0,
        uuid: uuid.map(|uuid| (*uuid).to_owned()),
        minor: fields.get("Device Minor")?.parse().ok()?,
        pci: fields.get("Bus Location").map_or(address, |at| *at).to_owned(),
        mig: None,
    })
}

/// Return a GPU's MIG devices, ordered by index, or `None` if MIG is disabled. Only NVML knows their UUIDs and real indices. `told` is NVML's list
/// if NVML was queried and MIG is enabled.
pub fn mig_of(tree: &dyn Tree, minor: u32, told: Option<&[MigDevice]>) -> Option<Vec<Mig>> {
    let found = in_proc(tree, minor, told.unwrap_or_default());
    (told.is_some() || !found.is_empty()).then_some(found)
}

fn in_proc(tree: &dyn Tree, minor: u32, told: &[MigDevice]) -> Vec<Mig> {
    let Some(root) = Root::open(tree, "/") else {
        return Vec::new();
    };
    let directory = format!("{CAPABILITIES}/gpu{minor}/mig");
    let mut found = Vec::new();
    for (gpu_instance, name) in numbered(&root.names(&directory), "gi") {
        for (compute_instance, _) in numbered(&root.names(&format!("{directory}/{name}")), "ci") {
            found.push((gpu_instance, compute_instance));
        }
    }
    if found.is_empty() {
        return Vec::new();
    }
    found.sort_unstable();
    let minors = root.text(MIG_MINORS).unwrap_or_default();
    let minors = mig_minors(&minors);
    let capability = |path: String| minors.get(format!("gpu{minor}/{path}/access").as_str()).copied();
    let devices = found.into_iter().zip(0..).filter_map(|((gi, ci), position)| {
        let known = told.iter().find(|told| (told.gi, told.ci) == (gi, ci));
        // Skip a MIG device that is missing from NVML's list: an index made up for it could be the index of another device.
        if known.is_none() && !told.is_empty() {
            return None;
        }
        Some(Mig {
            index: known.map_or(position, |known| known.index),
            uuid: known.map(|known| known.uuid.clone()),
            gpu_instance: gi,
            compute_instance: ci,
            capabilities: capability(format!("gi{gi}")).zip(capability(format!("gi{gi}/ci{ci}"))),
        })
    });
    let mut devices: Vec<Mig> = devices.collect();
    devices.sort_by_key(|mig| mig.index);
    devices
}

fn numbered<'n>(names: &'n [String], prefix: &str) -> Vec<(u32, &'n str)> {
    let number = |name: &'n String| Some((name.strip_prefix(prefix)?.parse().ok()?, name.as_str()));
    names.iter().filter_map(number).collect()
}

/// Parse `mig-minors`, which has one line for each capability, such as `gpu0/gi0/ci0/access 4`. Return the minor number for each path. Lines of
/// another form are skipped.
pub fn mig_minors(text: &str) -> BTreeMap<&str, u32> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (path, minor) = (words.next()?, words.next()?.parse().ok()?);
            words.next().is_none().then_some((path, minor))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_34_only_capability_minors_are_read() {
        let found = mig_minors(
            "config 1\nmonitor 2\ninvalidLine\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\nx y z 5\ngpu1/gi0/access -1\n 7",
        );
        let expected = [
            ("config", 1),
            ("monitor", 2),
            ("gpu0/gi0/access", 3),
            ("gpu0/gi0/ci0/access", 4),
        ];
        assert_eq!(found, BTreeMap::from(expected));
    }

    #[test]
    fn a_gpu_that_was_never_used_has_no_uuid() {
        let text = "Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 408\nGPU UUID: \t GPU-????????-????-????-????-????????????\nBus Location: \t 0000:06:00.0\nDevice Minor: \t 3\n";
        let gpu = information(text, "x").expect("a GPU");
        assert_eq!((gpu.uuid, gpu.minor, gpu.pci.as_str()), (None, 3, "0000:06:00.0"));
        assert!(
            information("Model: x\n", "x").is_none(),
            "without a minor number it has no device node"
        );
    }
}
