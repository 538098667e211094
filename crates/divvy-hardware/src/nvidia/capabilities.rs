//! The device nodes that give access to MIG devices. NVML does not report them; the kernel module lists them in `/proc`.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use divvy_cdi::generate::proc::mig_minors;

use crate::GpuFacts;

/// The maximum size of the list, more than the kernel module ever writes.
const BYTES: u64 = 1 << 20;

/// Add the minor numbers of the device nodes to the MIG devices that the kernel module lists.
pub(super) fn add(proc_root: &Path, gpus: &mut [GpuFacts]) {
    if gpus.iter().all(|gpu| gpu.mig_devices.is_empty()) {
        return;
    }
    let mut text = String::new();
    let read =
        File::open(proc_root.join("driver/nvidia-caps/mig-minors")).and_then(|file| file.take(BYTES).read_to_string(&mut text));
    if read.is_err() {
        // A MIG device without capabilities is reported as one that no container can use.
        text.clear();
    }
    let minors = mig_minors(&text);
    for gpu in gpus {
        // The list counts GPUs by minor number, as in `/dev/nvidia<minor>`.
        let minor = gpu.minor.unwrap_or(gpu.index);
        for device in &mut gpu.mig_devices {
            let (gi, ci) = (device.gi, device.ci);
            let of = |name: String| minors.get(name.as_str()).copied();
            device.capabilities = of(format!("gpu{minor}/gi{gi}/access")).zip(of(format!("gpu{minor}/gi{gi}/ci{ci}/access")));
        }
    }
}
