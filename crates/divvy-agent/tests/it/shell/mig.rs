//! MIG devices, each of which is offered like a GPU (`--mig-strategy`).

use divvy_model::{Gpu, Health, MemoryUnit, MigParts};

use std::collections::BTreeSet;

use divvy_agent::MigStrategyArg;

use super::*;

pub(super) fn device(index: u32, gi: u32) -> MigDevice {
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

/// Return a node with an undivided GPU of 16 GiB, and one of 40 GiB whose agent shares MIG devices.
async fn bed() -> Bed {
    let mut bed = Bed::new(&[16384, 40960]).await;
    bed.stop_agent().await;
    make_capabilities(&bed);
    bed.config.mig_strategy = MigStrategyArg::Mixed;
    bed.start_agent();
    bed.memory_is(56, 56).await;
    bed
}

/// Start the agent again, so that it offers GPUs and MIG devices as a whole as well.
async fn restart_with(bed: &mut Bed, strategy: MigStrategyArg) {
    bed.stop_agent().await;
    make_capabilities(bed);
    (bed.config.mig_strategy, bed.config.whole_gpus) = (strategy, true);
    bed.start_agent();
}

/// Make the device nodes that give access to MIG devices.
pub(super) fn make_capabilities(bed: &Bed) {
    let directory = bed.config.sys_root.join("dev/nvidia-caps");
    std::fs::create_dir_all(&directory).expect("made");
    for minor in [70, 71, 80, 81, 90, 91] {
        std::fs::write(directory.join(format!("nvidia-cap{minor}")), "").expect("written");
    }
}

pub(super) fn divide(bed: &Bed, devices: &[MigDevice]) {
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

/// Pods get no more memory than the MIG device has.
#[tokio::test]
async fn a_container_gets_the_device_nodes_of_its_mig_device() {
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
async fn mig_devices_stay_out_of_service_with_their_gpu() {
    let mut bed = bed().await;
    let (out, test) = (out_of_service_key("GPU-1"), under_test_key("GPU-1"));
    annotate(&bed, &json!({ &out: "fan is broken" }));
    bed.memory_is(56, 16).await;
    divide(&bed, &[device(0, 7), device(1, 8)]);
    let reason = "out of service: GPU GPU-1, of which it is a part: fan is broken";
    let are_out = |inventory: &Inventory| {
        let [_, parts @ ..] = &inventory.gpus[..] else { return false };
        let is_out = |gpu: &Gpu| gpu.health == Health::Failed && gpu.reason.as_deref() == Some(reason);
        parts.len() == 2 && parts.iter().all(is_out)
    };
    bed.inventory(are_out).await;
    bed.memory_is(24, 16).await;
    // A test of one part would not show that the GPU works.
    annotate(
        &bed,
        &json!({ test: "run", under_test_key("MIG-7"): "run", out_of_service_key("MIG-8"): "x" }),
    );
    annotate(&bed, &json!({ out_of_service_key("GPU-0"): "x" }));
    let now = bed.inventory(|inventory| inventory.gpus[0].health == Health::Failed).await;
    assert!(are_out(&now), "{now:?}");
    // One of them is out of service itself.
    annotate(&bed, &json!({ &out: null, out_of_service_key("GPU-0"): null }));
    let healths = |inventory: &Inventory| inventory.gpus.iter().map(|gpu| gpu.health).collect::<Vec<_>>();
    bed.inventory(|inventory| healths(inventory) == [Health::Ok, Health::Ok, Health::Failed])
        .await;
    // A GPU that is divided already goes out of service as well.
    annotate(&bed, &json!({ &out: "fan is broken" }));
    bed.inventory(are_out).await;
    let events = bed.api.list("events", "default").expect("listed");
    assert!(
        events.iter().all(|event| event["reason"] != "NoSuchGpuOutOfService"),
        "{events:?}"
    );
    bed.stop_agent().await;
}

/// An XID that names no MIG device fails all of the GPU.
#[tokio::test]
async fn an_xid_fails_its_mig_device_or_the_gpu() {
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
async fn a_destroyed_mig_device_is_lost_until_its_container_ends() {
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

/// Wait until the node offers this much of a resource, and all of it is healthy.
async fn offers(bed: &Bed, resource: &str, expected: u64) {
    let is = |node: &Value, kind: &str| {
        node["status"][kind][resource].as_str().and_then(|amount| amount.parse().ok()) == Some(expected)
    };
    let look = |api: &ApiServer| {
        let node = api.get("nodes", "", "n1").ok()?;
        (is(&node, "capacity") && is(&node, "allocatable")).then_some(())
    };
    let found = bed.api.until(LIMIT, look).await;
    let node = bed.api.get("nodes", "", "n1").expect("there");
    assert!(found.is_some(), "{expected} of {resource} expected: {}", node["status"]);
}

/// Create a pod that kube-scheduler bound without the extender, and that requests one device of this resource.
fn create_whole(bed: &Bed, name: &str, resource: &str) {
    let mut pod = builders::pod(name).limit(resource, "1").build();
    pod["spec"]["nodeName"] = "n1".into();
    bed.api.create("pods", pod).expect("created");
}

const SMALL: &str = "nvidia.com/mig-1g.5gb";

#[tokio::test]
async fn new_mig_devices_are_offered_whole_without_new_registrations() {
    let mut bed = Bed::new(&[16384, 40960]).await;
    restart_with(&mut bed, MigStrategyArg::Mixed).await;
    offers(&bed, "nvidia.com/gpu", 2).await;
    let sockets = |bed: &Bed| -> BTreeSet<String> {
        let all = bed.sockets().into_iter();
        all.filter(|name| !name.contains("mig")).collect()
    };
    let before = sockets(&bed);
    assert_eq!(before.len(), 3, "{before:?}");
    divide(&bed, &[device(0, 7), device(1, 8)]);
    offers(&bed, SMALL, 2).await;
    offers(&bed, "nvidia.com/gpu", 1).await;

    create_whole(&bed, "whole", SMALL);
    let whole = bed.running("whole").await;
    let inventory = bed
        .inventory(|inventory| inventory.gpus.iter().any(|gpu| gpu.held > MiB::ZERO))
        .await;
    let part = inventory.gpus.iter().find(|gpu| gpu.held > MiB::ZERO).expect("held");
    assert_eq!(
        (part.held, part.whole.map(|kind| kind.resource().into_owned())),
        (MiB(4096), Some(SMALL.to_owned()))
    );
    let expected: Vec<String> = part.nodes.iter().map(|node| format!("/dev/{node}")).collect();
    let mut has: Vec<&String> = whole.devices.iter().filter(|path| expected.contains(path)).collect();
    has.sort();
    assert_eq!(has.len(), 3, "{:?}", whole.devices);
    create_whole(&bed, "other", SMALL);
    bed.running("other").await;
    bed.api
        .delete("pods", "default", "whole", &DeleteOptions::default())
        .expect("deleted");
    bed.api
        .delete("pods", "default", "other", &DeleteOptions::default())
        .expect("deleted");
    bed.inventory(|inventory| inventory.gpus.iter().all(|gpu| gpu.held == MiB::ZERO))
        .await;

    bed.machine.send_modify(|machine| machine.mig = None);
    offers(&bed, "nvidia.com/gpu", 2).await;
    offers(&bed, SMALL, 0).await;
    assert_eq!(sockets(&bed), before, "a new plugin would have a new socket");
    bed.stop_agent().await;
}

#[tokio::test]
async fn mig_profiles_without_a_resource_are_shared_and_reported() {
    let mut bed = Bed::new(&[40960]).await;
    let mut odd = device(1, 8);
    // The driver reports no slices.
    odd.parts = odd.parts.map(|parts| MigParts {
        gi_slices: 0,
        ci_slices: 0,
        ..parts
    });
    divide(&bed, &[device(0, 7), odd]);
    restart_with(&mut bed, MigStrategyArg::Mixed).await;
    offers(&bed, SMALL, 1).await;
    bed.memory_is(8, 8).await;
    let is_posted = |api: &ApiServer| {
        let events = api.list("events", "default").ok()?;
        events.into_iter().find(|event| event["reason"] == "MIGProfileUnknown")
    };
    let event = bed.api.until(LIMIT, is_posted).await.expect("an event");
    let text = event["message"].as_str().unwrap_or_default();
    assert!(
        text.starts_with("MIG devices of the profile 0g.5gb have no resource"),
        "{text}"
    );
    bed.stop_agent().await;
}

/// All GPUs must be divided alike.
#[tokio::test]
async fn strategy_single_offers_mig_devices_as_gpus() {
    let mut bed = Bed::new(&[40960]).await;
    divide(&bed, &[device(0, 7), device(1, 8)]);
    restart_with(&mut bed, MigStrategyArg::Single).await;
    offers(&bed, "nvidia.com/gpu", 2).await;
    create_whole(&bed, "whole", "nvidia.com/gpu");
    bed.running("whole").await;

    let mut large = device(2, 9);
    large.parts = large.parts.map(|parts| MigParts {
        gi_slices: 2,
        ci_slices: 2,
        memory: 9856,
        ..parts
    });
    divide(&bed, &[device(0, 7), device(1, 8), large]);
    // The device that the container has stays.
    offers(&bed, "nvidia.com/gpu", 1).await;
    let is_posted = |api: &ApiServer| {
        let events = api.list("events", "default").ok()?;
        events.into_iter().find(|event| event["reason"] == "GPUsNotDividedAlike")
    };
    let event = bed.api.until(LIMIT, is_posted).await.expect("an event");
    assert_eq!(
        event["message"],
        "GPU 100 is a MIG device 1g.5gb, but GPU 102 is a MIG device 2g.10gb: with --mig-strategy single, GPUs are offered as a whole only if all \
         GPUs of the node are divided alike. Their memory is still shared. Divide all GPUs alike, or use --mig-strategy mixed"
    );
    divide(&bed, &[device(0, 7), device(1, 8), device(2, 9)]);
    offers(&bed, "nvidia.com/gpu", 3).await;
    bed.stop_agent().await;
}
