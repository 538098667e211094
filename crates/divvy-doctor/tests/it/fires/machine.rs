//! Cases for the checks of the driver, device nodes, libraries, and CDI specs.

use divvy_doctor::facts::programs::{ProbedGpu, UnreadableGpu};
use divvy_doctor::{Asked, Facts};

use super::Change::{By, File, Remove};
use super::{Case, answers, files, notes, warns};
use crate::host::{Host, amd, debian, intel, none, probed};

fn gpu(facts: &mut Facts<'_>, change: impl FnOnce(&mut ProbedGpu)) {
    let mut probed = probed();
    change(&mut probed.gpus[1]);
    facts.probe = Asked::Answer(probed);
}

fn without_gpus(host: &mut Host) {
    *host = none();
}

pub(super) const CASES: &[Case] = &[
    files("D01", debian, By(without_gpus), "1 PCI device found, but no GPU"),
    files("D02", debian, By(unload), "the kernel module nvidia is not loaded"),
    files("D02", amd, Remove("/sys/module/amdgpu"), "amdgpu is not loaded"),
    files("D02", intel, Remove("/sys/module/i915"), "neither kernel module i915 nor xe"),
    files("D03", debian, By(|host| driver(host, "375.66")), "driver 375.66 is loaded"),
    files("D04", debian, By(|host| driver(host, "410.129")), "driver 410.129 is loaded"),
    files(
        "D05",
        debian,
        By(|host| driver(host, "560.35.03")),
        "kernel module 560.35.03, libraries 550.54.15",
    ),
    answers(
        "D05",
        |facts| {
            facts.probe = Asked::Failed("initializing NVML failed: Driver/library version mismatch".to_owned());
        },
        "NVML reports",
    ),
    files(
        "D06",
        debian,
        By(|host| {
            host.pci("0000:81:00.0", "0x10de", "0x030200", "nouveau");
        }),
        "nouveau drives 0000:81:00.0",
    ),
    files(
        "D07",
        debian,
        By(|host| {
            for name in ["libnvidia-ml.so.1", "libnvidia-ml.so.550.54.15"] {
                host.files.remove(&format!("/usr/lib/x86_64-linux-gnu/{name}"));
            }
        }),
        "but there is no libnvidia-ml.so",
    ),
    files(
        "D07",
        debian,
        Remove("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"),
        "has no libnvidia-ml.so.1 next to it",
    ),
    answers(
        "D07",
        |facts| {
            facts.probe = Asked::Failed("library_not_found: libnvidia-ml.so.1: invalid ELF header".to_owned());
        },
        "cannot be loaded",
    ),
    answers(
        "D08",
        |facts| gpu(facts, |gpu| gpu.cc = "2.1".to_owned()),
        "GPU 1 (NVIDIA A100-SXM4-40GB) has 2.1",
    ),
    files("D09", debian, Remove("/dev/nvidia1"), "there is no /dev/nvidia1"),
    files(
        "D09",
        debian,
        By(|host| {
            host.number("/dev/nvidia-uvm", 510, 0);
        }),
        "/dev/nvidia-uvm is 510:0, but the driver uses 511:0",
    ),
    files("D09", amd, Remove("/dev/dri/renderD128"), "there is no /dev/dri/renderD128"),
    warns(files(
        "D10",
        debian,
        By(|host| {
            host.files.remove("/dev/char/195:1").remove("/var/run/cdi/nvidia.yaml");
        }),
        "/dev/char/195:1 → ../nvidia1",
    )),
    notes(files(
        "D10",
        debian,
        By(|host| {
            host.files.link("/dev/char/511:0", "../null");
        }),
        "/dev/char/511:0 → ../nvidia-uvm",
    )),
    answers("D11", |facts| gpu(facts, |gpu| gpu.lost = true), "GPU is lost"),
    answers(
        "D11",
        |facts| {
            let mut probed = probed();
            probed.unreadable.push(UnreadableGpu {
                index: 2,
                error: "unknown error".to_owned(),
            });
            facts.probe = Asked::Answer(probed);
        },
        "GPU 2: unknown error",
    ),
    answers(
        "D11",
        |facts| facts.probe = Asked::Failed("divvy-probe did not answer within 3 s".to_owned()),
        "did not answer",
    ),
    warns(answers(
        "D11",
        |facts| {
            facts.kernel_log = Asked::Answer(
        "4,1,2,-;NVRM: Xid (PCI:0000:06:00): 13, pid=7, Graphics Exception\n4,2,3,-;NVRM: Xid (PCI:0000:81:00): 79, pid=1, GPU has fallen off the bus.\n".to_owned()
    )
        },
        "XID 79 on 0000:81:00",
    )),
    warns(answers(
        "D12",
        |facts| gpu(facts, |gpu| gpu.compute_mode = Some("exclusive-process".to_owned())),
        "GPU 1: exclusive-process",
    )),
    notes(Case {
        files: Remove("/run/nvidia-persistenced/socket"),
        ..answers(
            "D13",
            |facts| gpu(facts, |gpu| gpu.persistence = Some(false)),
            "nvidia-persistenced is not running",
        )
    }),
    warns(answers(
        "D14",
        |facts| gpu(facts, |gpu| gpu.mig = Some((false, true))),
        "GPU 1: off now, on after a reset",
    )),
    files(
        "D15",
        amd,
        Remove("/sys/module/amdgpu/drivers"),
        "there is no /sys/module/amdgpu/drivers",
    ),
    files(
        "D16",
        amd,
        File("/sys/devices/pci0000:00/0000:22:00.0/current_compute_partition", "CPX\n"),
        "0000:22:00.0 is cpx_nps1",
    ),
    files(
        "D17",
        intel,
        By(|host| {
            host.pci("0000:00:02.0", "0x8086", "0x030000", "vfio-pci")
                .pci("0000:4d:00.0", "0x8086", "0x038000", "vfio-pci");
        }),
        "0000:4d:00.0 has the driver vfio-pci",
    ),
    warns(files(
        "D17",
        intel,
        Remove("/dev/dri/renderD129"),
        "0000:4d:00.0 has no /dev/dri/renderD*",
    )),
    files(
        "C01",
        debian,
        By(|host| driver(host, "560.35.03")),
        "/var/run/cdi/nvidia.yaml: it was made for driver 550.54.15, and 560.35.03 is loaded",
    ),
    files(
        "C02",
        debian,
        File(
            "/etc/cdi/broken.yaml",
            "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ndevices: []\n",
        ),
        "/etc/cdi/broken.yaml is invalid",
    ),
    files(
        "C02",
        debian,
        File(
            "/var/run/cdi/other.yaml",
            "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ndevices: [{name: '0', containerEdits: {env: [A=1]}}]\n",
        ),
        "/var/run/cdi/nvidia.yaml and /var/run/cdi/other.yaml both define nvidia.com/gpu=0",
    ),
];

/// Remove the files of a loaded NVIDIA kernel module.
fn unload(host: &mut Host) {
    for path in [
        "/sys/module/nvidia",
        "/sys/module/nvidia/version",
        "/proc/driver/nvidia/version",
    ] {
        host.files.remove(path);
    }
}

fn driver(host: &mut Host, version: &str) {
    host.files.file("/sys/module/nvidia/version", format!("{version}\n"));
}
