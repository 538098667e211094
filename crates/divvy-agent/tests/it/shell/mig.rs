//! MIG devices, whose memory is shared (`--mig-devices`).

use divvy_model::{Health, MemoryUnit, MigParts};

use super::*;

fn device(index: u32, gi: u32) -> MigDevice {
    MigDevice {
        index,
        uuid: format!("MIG-{gi}"),
        gi,
        ci: 0,
        capabilities: Some((gi * 10, gi * 10 + 1)),
        parts: Some(MigParts {
            gi_slices: 1,
            ci_slices: 1,
            memory: 4864,
            multiprocessors: 14,
            ..MigParts::default()
        }),
    }
}

/// Return a node with an undivided GPU of 16 GiB, and one of 40 GiB whose agent offers MIG devices.
async fn bed() -> Bed {
    let mut bed = Bed::new(&[16384, 40960]).await;
    bed.stop_agent().await;
    let directory = bed.config.sys_root.join("dev/nvidia-caps");
    std::fs::create_dir_all(&directory).expect("made");
    for minor in [70, 71, 80, 81] {
        std::fs::write(directory.join(format!("nvidia-cap{minor}")), "").expect("written");
    }
    bed.config.mig_devices = true;
    bed.start_agent();
    bed.memory_is(56, 56).await;
    bed
}

fn divide(bed: &Bed, devices: &[MigDevice]) {
    bed.machine.send_modify(|machine| machine.mig = Some(devices.to_vec()));
}

fn uuids(inventory: &Inventory) -> Vec<&str> {
    inventory.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect()
}

#[tokio::test]
async fn a_gpu_is_divided_and_put_together_again_without_a_restart() {
    let mut bed = bed().await;
    divide(&bed, &[device(0, 7), device(1, 8)]);
    bed.memory_is(24, 24).await;
    let inventory = bed.inventory(|inventory| inventory.total_units() == 24).await;
    assert_eq!(uuids(&inventory), ["GPU-0", "MIG-7", "MIG-8"]);
    let part = &inventory.gpus[2];
    assert_eq!(
        (part.index, part.model.as_str(), part.units),
        (201, "NVIDIA T4 MIG 1g.5gb", 4)
    );
    assert_eq!(part.partition.as_ref().map(|part| part.parent.as_str()), Some("GPU-1"));

    // Another division: one device stays.
    divide(&bed, &[device(1, 8), device(2, 9), device(3, 10)]);
    bed.memory_is(28, 28).await;
    let inventory = bed.inventory(|inventory| inventory.total_units() == 28).await;
    assert_eq!(uuids(&inventory), ["GPU-0", "MIG-8", "MIG-9", "MIG-10"]);

    bed.machine.send_modify(|machine| machine.mig = None);
    bed.memory_is(56, 56).await;
    let inventory = bed.inventory(|inventory| inventory.total_units() == 56).await;
    assert_eq!(uuids(&inventory), ["GPU-0", "GPU-1"]);
    assert!(inventory.gpus.iter().all(|gpu| gpu.health == Health::Ok), "{inventory:?}");
    bed.stop_agent().await;
}

#[tokio::test]
async fn a_container_gets_the_device_nodes_of_its_mig_device_and_no_more_than_the_memory_of_it_is_given() {
    let mut bed = bed().await;
    divide(&bed, &[device(0, 7), device(1, 8)]);
    bed.memory_is(24, 24).await;
    bed.create_on("a", Some("MIG-8".to_owned()), 3);
    let a = bed.running("a").await;
    let nodes = [
        "/dev/nvidia-caps/nvidia-cap80",
        "/dev/nvidia-caps/nvidia-cap81",
        "/dev/nvidia1",
    ];
    let has = |path: &str| a.devices.iter().any(|device| device == path);
    assert!(nodes.iter().all(|path| has(path)), "{:?}", a.devices);
    assert!(
        !has("/dev/nvidia-caps/nvidia-cap70") && !has("/dev/nvidia0"),
        "{:?}",
        a.devices
    );
    assert_eq!(env(&a, names::ALIYUN_DEV), "4");

    // 1 GiB of the 4 GiB is left.
    let uid = bed.create_on("b", Some("MIG-8".to_owned()), 2);
    let refused = |api: &ApiServer| {
        let events = api.list("events", "default").ok()?;
        let text = |event: &Value| event["message"].as_str().unwrap_or_default().to_owned();
        let mut of_pod = events.iter().filter(|event| event["involvedObject"]["uid"] == uid);
        of_pod.find(|event| text(event).contains("201")).map(text)
    };
    assert!(
        bed.api.until(LIMIT, refused).await.is_some(),
        "refused with the name of the GPU"
    );
    bed.stop_agent().await;
}

#[tokio::test]
async fn an_xid_fails_the_mig_device_that_it_names_and_one_without_a_name_fails_all_of_the_gpu() {
    let mut bed = bed().await;
    divide(&bed, &[device(0, 7), device(1, 8)]);
    bed.memory_is(24, 24).await;
    let failed = |inventory: &Inventory| -> Vec<String> {
        let failed = inventory.gpus.iter().filter(|gpu| gpu.health == Health::Failed);
        failed.map(|gpu| gpu.uuid.clone()).collect()
    };
    bed.machine.send_modify(|machine| {
        machine.instances = Some((8, 0));
        machine.xids.push((1, 79));
    });
    bed.inventory(|inventory| failed(inventory) == ["MIG-8"]).await;
    bed.inventory(|inventory| failed(inventory).is_empty()).await;
    bed.machine.send_modify(|machine| {
        machine.instances = None;
        machine.xids.push((1, 79));
    });
    bed.inventory(|inventory| failed(inventory) == ["MIG-7", "MIG-8"]).await;
    bed.inventory(|inventory| failed(inventory).is_empty()).await;
    bed.stop_agent().await;
}

#[tokio::test]
async fn a_mig_device_that_is_destroyed_under_a_container_counts_as_lost_until_the_container_ends() {
    let mut bed = bed().await;
    divide(&bed, &[device(0, 7), device(1, 8)]);
    bed.memory_is(24, 24).await;
    bed.create_on("a", Some("MIG-8".to_owned()), 3);
    bed.running("a").await;
    divide(&bed, &[device(0, 7)]);
    let inventory = bed
        .inventory(|inventory| inventory.gpus.iter().any(|gpu| gpu.health == Health::Lost))
        .await;
    assert_eq!(uuids(&inventory), ["GPU-0", "MIG-7", "MIG-8"]);
    // The GPU is put together again: its memory is not given to others as long as the container could use it.
    let is_withheld = |inventory: &Inventory| {
        let gpu = inventory.gpu("GPU-1");
        gpu.is_some_and(|gpu| {
            gpu.reason
                .as_deref()
                .is_some_and(|reason| reason.contains("a container used MIG-8"))
        })
    };
    bed.machine.send_modify(|machine| machine.mig = None);
    bed.inventory(is_withheld).await;
    // The agent is away while the GPU is divided again, and put together again.
    bed.stop_agent().await;
    bed.start_agent();
    bed.inventory(|inventory| !inventory.unschedulable && is_withheld(inventory))
        .await;
    // The inventory can be read although the former device was offered in smaller units.
    bed.stop_agent().await;
    let unit = MemoryUnit::new(4096).expect("a unit");
    bed.config.memory_unit = unit;
    bed.start_agent();
    bed.inventory(|inventory| inventory.unit == unit && is_withheld(inventory))
        .await;
    bed.stop_agent().await;
    bed.config.memory_unit = MemoryUnit::GIB;
    bed.start_agent();
    divide(&bed, &[device(0, 7)]);
    // A restarted agent knows it as well.
    bed.stop_agent().await;
    bed.start_agent();
    bed.inventory(|inventory| !inventory.unschedulable && uuids(inventory) == ["GPU-0", "MIG-7", "MIG-8"])
        .await;
    bed.api
        .delete("pods", "default", "a", &DeleteOptions::default())
        .expect("deleted");
    let healthy = |inventory: &Inventory| inventory.gpus.iter().all(|gpu| gpu.health == Health::Ok);
    bed.inventory(|inventory| uuids(inventory) == ["GPU-0", "MIG-7"] && healthy(inventory))
        .await;
    bed.stop_agent().await;
}
