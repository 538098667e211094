//! Shares of AMD GPUs, with the real probe on the files of simulated GPUs.

use super::*;
use crate::mps::built;
use divvy_model::machine::MachineAmd;

/// A machine with two AMD GPUs, of which the kernel can limit the first one's memory.
async fn bed() -> Bed {
    let mut bed = Bed::new(&[]).await;
    bed.stop_agent().await;
    let gpu = MachineAmd {
        model: "AMD Instinct MI210".to_owned(),
        memory_mib: 65_520,
        hive: 0,
        numa: None,
    };
    let root = bed.config.sys_root.clone();
    divvy_amd_sim::install(&root, &[gpu.clone(), gpu]).expect("installed");
    let capacity = format!("{} 68702699520\n", divvy_amd_sim::region(0));
    std::fs::write(root.join("sys/fs/cgroup/dmem.capacity"), capacity).expect("written");
    bed.config.probe = Some(Probe::Start(built("divvy-hardware", "divvy-probe")));
    bed.config.driver_root = root.display().to_string();
    bed.config.nvml_library = Some(root.join("absent.so"));
    bed.config.amd_shares = true;
    bed.start_agent();
    bed
}

#[tokio::test]
async fn a_share_of_an_amd_gpu_starts_with_its_limit_in_the_kernels_file_and_waits_where_it_wants_one_and_there_is_none() {
    let mut bed = bed().await;
    let inventory = bed.inventory(|inventory| inventory.total_units() == 126).await;
    let [first, second] = inventory.gpus.as_slice() else {
        panic!("{inventory:?}")
    };
    let whole = Some(Vendor::Amd.into());
    assert_eq!((first.whole, first.enforcement), (whole, Some(Enforcement::CGROUP)));
    assert_eq!((second.whole, second.enforcement), (whole, None));
    bed.kubelet_has(126).await;
    let hard = [(names::GPU_VENDOR, "amd"), (names::ISOLATION, "hard")];
    bed.create_annotated("a", Some(first.uuid.clone()), 3, &hard);
    let a = bed.running("a").await;
    assert_eq!(a.devices, ["/dev/kfd", "/dev/dri/card1", "/dev/dri/renderD128"]);
    assert_eq!(
        (env(&a, names::ALIYUN_IDX), env(&a, names::ALIYUN_CONTAINER)),
        ("0".to_owned(), "3".to_owned())
    );
    let cgroups = bed.config.sys_root.join("sys/fs/cgroup");
    let container = cgroups.join(&*a.cgroup);
    let max = |directory: &Path| std::fs::read_to_string(directory.join("dmem.max")).expect("read");
    let region = divvy_amd_sim::region(0);
    assert_eq!(max(container.parent().expect("a pod")), format!("{region} 3221225472\n"));
    assert_eq!(
        max(&container),
        format!("{region} max\n"),
        "the limit of the pod holds for it"
    );

    bed.create_annotated("b", Some(second.uuid.clone()), 3, &hard);
    let waits = bed.api.until(LIMIT, |api| {
        let pod = api.get("pods", "default", "b").ok()?;
        let message = pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"].as_str()?;
        Some(message.to_owned())
    });
    let message = waits.await.expect("the container waits");
    assert!(
        message.contains("wants divvy.dev/isolation: hard, but nothing enforces shares of GPU 0x"),
        "{message}"
    );
    bed.create_annotated("c", Some(second.uuid.clone()), 3, &[(names::GPU_VENDOR, "amd")]);
    let c = bed.running("c").await;
    assert_eq!(c.devices, ["/dev/kfd", "/dev/dri/card2", "/dev/dri/renderD129"]);
    bed.stop_agent().await;
}
