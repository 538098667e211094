//! Shares of other vendors' GPUs, with the real probe on the files of simulated GPUs.

use super::*;
use crate::mps::built;
use divvy_model::machine::{MachineAmd, MachineIntel};

/// A machine with two GPUs of a vendor, of which the kernel can limit the first one's memory.
struct Case {
    vendor: Vendor,
    /// The units of each GPU.
    units: u64,
    /// Write the files of the GPUs below this directory.
    install: fn(&Path),
    /// The first GPU's region in the kernel's files.
    region: String,
    /// What containers with a share of one of the two GPUs have.
    devices: [&'static [&'static str]; 2],
}

fn cases() -> [Case; 2] {
    [
        Case {
            vendor: Vendor::Amd,
            units: 63,
            install: amd,
            region: divvy_amd_sim::region(0),
            devices: [
                &["/dev/kfd", "/dev/dri/card1", "/dev/dri/renderD128"],
                &["/dev/kfd", "/dev/dri/card2", "/dev/dri/renderD129"],
            ],
        },
        Case {
            vendor: Vendor::Intel,
            units: 48,
            install: intel,
            region: divvy_intel_sim::region(0, 0),
            devices: [
                &["/dev/dri/card33", "/dev/dri/renderD160"],
                &["/dev/dri/card34", "/dev/dri/renderD161"],
            ],
        },
    ]
}

/// The kernel knows only the first GPU's memory.
fn amd(root: &Path) {
    let gpu = MachineAmd {
        model: "AMD Instinct MI210".to_owned(),
        memory_mib: 65_520,
        hive: 0,
        numa: None,
    };
    divvy_amd_sim::install(root, &[gpu.clone(), gpu]).expect("installed");
    let capacity = format!("{} 68702699520\n", divvy_amd_sim::region(0));
    std::fs::write(root.join("sys/fs/cgroup/dmem.capacity"), capacity).expect("written");
}

/// The second GPU's memory is in two tiles.
fn intel(root: &Path) {
    let gpu = |tiles| MachineIntel {
        device: "0x0bda".to_owned(),
        memory_mib: 49_152,
        tiles,
        numa: None,
    };
    divvy_intel_sim::install(root, &[gpu(1), gpu(2)]).expect("installed");
}

async fn bed(case: &Case) -> Bed {
    let mut bed = Bed::new(&[]).await;
    bed.stop_agent().await;
    let root = bed.config.sys_root.clone();
    (case.install)(&root);
    bed.config.probe = Some(ProbeChoice::Start(built("divvy-hardware", "divvy-probe")));
    bed.config.driver_root = root.display().to_string();
    bed.config.nvml_library = Some(root.join("absent.so"));
    bed.config.also_shared = [case.vendor].into();
    bed.start_agent();
    bed
}

/// The kernel's file holds the limit; a share that requires a limit waits where the kernel has none.
#[tokio::test]
async fn another_vendors_share_starts_with_the_kernels_limit() {
    for case in cases() {
        starts_with_its_limit(&case).await;
    }
}

async fn starts_with_its_limit(case: &Case) {
    let vendor = case.vendor;
    let mut bed = bed(case).await;
    let inventory = bed.inventory(|inventory| inventory.total_units() == 2 * case.units).await;
    let [first, second] = inventory.gpus.as_slice() else {
        panic!("{inventory:?}")
    };
    let whole = Some(vendor.into());
    assert_eq!((first.whole, first.enforcement), (whole, Some(Enforcement::CGROUP)));
    assert_eq!((second.whole, second.enforcement), (whole, None));
    bed.kubelet_has(2 * case.units as usize).await;
    let hard = [(names::GPU_VENDOR, vendor.name()), (names::ISOLATION, "hard")];
    bed.create_annotated("a", Some(first.uuid.clone()), 3, &hard);
    let a = bed.running("a").await;
    assert_eq!(a.devices, case.devices[0]);
    assert_eq!(
        (env(&a, names::ALIYUN_IDX), env(&a, names::ALIYUN_CONTAINER)),
        ("0".to_owned(), "3".to_owned())
    );
    let cgroups = bed.config.sys_root.join("sys/fs/cgroup");
    let container = cgroups.join(&*a.cgroup);
    let max = |directory: &Path| {
        let text = std::fs::read_to_string(directory.join("dmem.max")).expect("read");
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{} ", case.region)));
        line.expect("the region's line").to_owned()
    };
    assert_eq!(max(container.parent().expect("a pod")), "3221225472");
    assert_eq!(max(&container), "max", "the limit of the pod holds for it");

    bed.create_annotated("b", Some(second.uuid.clone()), 3, &hard);
    let waits = bed.api.until(LIMIT, |api| {
        let pod = api.get("pods", "default", "b").ok()?;
        let message = pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"].as_str()?;
        Some(message.to_owned())
    });
    let message = waits.await.expect("the container waits");
    let expected = format!(
        "wants divvy.dev/isolation: hard, but nothing enforces shares of GPU {}",
        second.uuid
    );
    assert!(message.contains(&expected), "{message}");
    bed.create_annotated("c", Some(second.uuid.clone()), 3, &hard[..1]);
    let c = bed.running("c").await;
    assert_eq!(c.devices, case.devices[1]);
    bed.stop_agent().await;
}
