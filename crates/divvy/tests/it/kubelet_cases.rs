//! The calls that a kubelet makes to a device plugin over the life of a node, with the real agent on the emulated kubelet: cases
//! K09, K10, K15, K20, K24, and K26 of docs/compatibility/kubelet.md. The table there names the tests of the other cases.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_kubelet::checkpoint::Checkpoint;
use divvy_model::names;
use divvy_testbed::builders::pod;
use divvy_testbed::node::ContainerView;
use divvy_testbed::scenario::{Cluster as _, GpuFault};
use serde_json::{Value, json};

use crate::bed::Bed;

/// Return the properties of a container that must be the same at every start.
fn hardware(view: &ContainerView) -> (Vec<String>, BTreeMap<String, String>, Vec<String>) {
    (view.devices.clone(), view.env.clone(), view.cdi_devices.clone())
}

/// Wait until a container has been started `attempt` times.
async fn started(bed: &Bed, uid: &str, container: &str, attempt: u32) -> ContainerView {
    bed.until(&format!("start {attempt} of {container}"), async |bed: &Bed| {
        let view = bed.container(uid, container).ok_or("it never ran")?;
        if view.attempt >= attempt {
            Ok(view)
        } else {
            Err(format!("it was started {} times", view.attempt))
        }
    })
    .await
}

fn checkpoint(bed: &Bed) -> Vec<(String, String, String, BTreeSet<String>)> {
    let read = Checkpoint::read(&bed.node("n1").paths().device_plugins()).expect("readable");
    let entries = read.expect("a checkpoint").entries.into_iter();
    let mut entries: Vec<_> = entries.map(|e| (e.pod_uid, e.container, e.resource, e.ids)).collect();
    entries.sort();
    entries
}

#[tokio::test]
async fn k09_a_restarted_container_has_the_same_ids_gpu_and_limits() {
    let bed = Bed::with(&[&[4, 4]], |spec| {
        spec.timings.restart_backoff.first = Duration::from_millis(1);
        spec.timings.restart_backoff.max = Duration::from_millis(1);
    })
    .await;
    bed.create(&pod("other").gpu_mem(2));
    bed.running("other").await;
    let uid = bed.create(&pod("a").gpu_mem(3).args(&["sleep", "0.001"]));
    let first = started(&bed, &uid, "main", 0).await;
    let (ids, grants, specs) = (bed.ids("n1", &uid), bed.grants("n1"), bed.specs("n1"));
    // divvy-agent's own tests repeat this a hundred times.
    let last = started(&bed, &uid, "main", 30).await;
    assert_eq!(hardware(&first), hardware(&last));
    assert_eq!(ids, bed.ids("n1", &uid));
    assert_eq!((grants, specs), (bed.grants("n1"), bed.specs("n1")));
    assert_eq!(bed.refused_starts("a"), [""; 0]);
    bed.end().await;
}

/// Containers also restart before the plugin is back.
#[tokio::test]
async fn k10_after_a_kubelet_restart_containers_need_no_plugin() {
    let mut bed = Bed::new(&[&[4, 4]]).await;
    bed.create(&pod("stays").gpu_mem(2));
    let stays = bed.running("stays").await.remove(0);
    let uid = bed.create(&pod("restarts").gpu_mem(3).args(&["sleep", "1.2"]));
    let first = started(&bed, &uid, "main", 0).await;
    let before = checkpoint(&bed);
    // The container keeps running while the kubelet restarts. A container that does not run would need the plugin immediately (K13).
    bed.cluster.kill_agent("n1").await.expect("killed");
    bed.cluster.restart_kubelet("n1").await.expect("restarted");
    assert!(bed.runs(&uid, "main"), "the kubelet was quicker");
    let second = started(&bed, &uid, "main", 1).await;
    assert_eq!(
        hardware(&first),
        hardware(&second),
        "PreStartContainer is not called; the spec is still there"
    );
    bed.cluster.start_agent("n1").await.expect("started");
    bed.registered("n1").await;
    let attempt = bed.container(&uid, "main").expect("it ran").attempt;
    let later = started(&bed, &uid, "main", attempt + 1).await;
    assert_eq!(hardware(&first), hardware(&later));
    assert_eq!(before, checkpoint(&bed));
    assert_eq!(bed.running("stays").await.remove(0).id, stays.id, "it never noticed");
    bed.end().await;
}

/// Bug B3 (kubernetes#124345): a restarted kubelet believes that the ended init container "needs" devices that no plugin offers
/// yet, and kills the running pod. The pod's phase becomes Failed immediately, but its container still runs for a while.
/// The pod holds its memory until its container has ended.
#[tokio::test]
async fn k10_a_pod_killed_by_a_restarted_kubelet_holds_its_memory() {
    let bed = Bed::with(&[&[4]], |spec| spec.bugs.ended_init_container_kills = true).await;
    let stubborn = pod("killed")
        .init("i", 2)
        .gpu_mem(3)
        .args(&["run", "--ignore-term"])
        .grace_seconds(1);
    let killed = bed.create(&stubborn);
    bed.running("killed").await;
    // Make sure that the kubelet is first.
    bed.freeze("n1", true);
    bed.node("n1").restart_kubelet(true).await.expect("restarted");
    let failed = bed.phase("killed", "Failed").await;
    assert_eq!(failed["status"]["reason"], "UnexpectedAdmissionError");
    bed.freeze("n1", false);
    let newcomer = bed.create(&pod("newcomer").gpu_mem(4));
    bed.ends_before(&killed, |bed| bed.runs(&newcomer, "main")).await;
    bed.running("newcomer").await;
    bed.end().await;
}

/// The pod is deleted while the kubelet is down.
#[tokio::test]
async fn k15_a_deleted_pod_is_forgotten_after_its_container() {
    let bed = Bed::with(&[&[4]], |spec| spec.timings.orphan_grace = Duration::from_millis(600)).await;
    let uid = bed.create(&pod("a").gpu_mem(3).args(&["run", "--ignore-term"]));
    bed.running("a").await;
    bed.node("n1").stop_kubelet(false).await;
    bed.force_delete("a");
    bed.held("n1", 3072).await;
    assert!(bed.runs(&uid, "main") && bed.has_grant("n1", &uid));
    bed.node("n1").start_kubelet().await.expect("started");
    bed.until("its grant to be gone", async |bed: &Bed| {
        match (bed.runs(&uid, "main"), bed.has_grant("n1", &uid)) {
            (true, false) => panic!("forgotten while it ran"),
            (_, true) => Err("it is there".to_owned()),
            (false, false) => Ok(()),
        }
    })
    .await;
    bed.offered("n1").await;
    bed.create(&pod("b").gpu_mem(4));
    bed.running("b").await;
    bed.end().await;
}

#[tokio::test]
async fn k20_allocate_answers_with_an_unguessable_spec_of_one_device() {
    let bed = Bed::new(&[&[4, 4]]).await;
    let uid = bed.create(&pod("a").gpu_mem(3));
    let view = bed.running("a").await.remove(0);
    let [qualified] = view.cdi_devices.as_slice() else {
        panic!("one CDI device: {:?}", view.cdi_devices);
    };
    let name = qualified.strip_prefix("divvy.dev/grant=").expect("our kind");
    assert!(
        name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit()),
        "{name}"
    );
    let guess = divvy_model::cdi_device_name(b"", names::GPU_MEM, bed.ids("n1", &uid)["main"].iter().map(String::as_str));
    assert_ne!(name, guess, "the ids alone do not give it");
    let file = format!("divvy.dev-grant_{name}.json");
    assert_eq!(bed.specs("n1"), BTreeSet::from([file.clone()]));
    let text = std::fs::read_to_string(bed.node("n1").paths().cdi_dir.join(file)).expect("readable");
    let spec: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        (spec["cdiVersion"].clone(), spec["kind"].clone()),
        (json!("0.6.0"), json!("divvy.dev/grant"))
    );
    let devices = spec["devices"].as_array().expect("devices");
    assert_eq!(devices.len(), 1);
    assert_eq!(devices[0]["name"], name);
    let nodes = devices[0]["containerEdits"]["deviceNodes"].as_array().expect("device nodes");
    let paths: BTreeSet<&str> = nodes.iter().filter_map(|node| node["path"].as_str()).collect();
    let expected = ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];
    assert_eq!(paths, BTreeSet::from(expected));
    bed.end().await;
}

/// After Allocate, the kubelet checks whether the pod's other requests, such as CPU, fit on the node. If they do not, it refuses the pod but
/// does not undo the allocation.
#[tokio::test]
async fn k24_a_pod_refused_after_allocate_holds_nothing() {
    let bed = Bed::new(&[&[4]]).await;
    let uid = bed.create_by_hand(&pod("greedy").gpu_mem(4).limit("cpu", "400"));
    bed.until("the pod to be bound", async |bed: &Bed| {
        match bed.bind("greedy", &uid, "n1").await.as_str() {
            "" => Ok(()),
            error => Err(error.to_owned()),
        }
    })
    .await;
    let failed = bed.phase("greedy", "Failed").await;
    assert_eq!(failed["status"]["reason"], "OutOfcpu", "{failed:#}");
    bed.create(&pod("next").gpu_mem(4));
    bed.running("next").await;
    assert_eq!(bed.ever_ran(&uid), 0);
    assert!(!bed.has_grant("n1", &uid));
    bed.end().await;
}

/// No id belongs to two resources.
#[tokio::test]
async fn k26_health_covers_the_right_number_of_ids() {
    let mut bed = Bed::new(&[&[4, 8]]).await;
    bed.create(&pod("a").gpu_mem(8));
    let view = bed.running("a").await.remove(0);
    let resources: Vec<(String, Vec<String>)> = {
        let path = bed.node("n1").paths().checkpoint();
        let text = std::fs::read_to_string(path).expect("readable");
        let file: Value = serde_json::from_str(&text).expect("JSON");
        serde_json::from_value::<BTreeMap<String, Vec<String>>>(file["Data"]["RegisteredDevices"].clone())
            .expect("ids by resource")
            .into_iter()
            .collect()
    };
    let names: Vec<&str> = resources.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, [names::GPU_COUNT, names::GPU_MEM]);
    let all: Vec<&String> = resources.iter().flat_map(|(_, ids)| ids).collect();
    assert_eq!(all.len(), 2 + 12);
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
    let healthy = async |bed: &Bed, expected: usize| {
        bed.until(&format!("{expected} healthy ids"), async |bed: &Bed| {
            match bed.node("n1").device_manager().resources.get(names::GPU_MEM) {
                Some((12, healthy)) if *healthy == expected => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    };
    // When the free GPU fails, its device ids disappear. When it recovers, they are back.
    bed.cluster.fault("n1", 0, GpuFault::Dies { xid: 79 }).await.expect("told");
    healthy(&bed, 8).await;
    bed.cluster.fault("n1", 0, GpuFault::Recovers).await.expect("told");
    healthy(&bed, 12).await;
    // When the full GPU fails, the pod's device ids stay, so that the node's sum stays correct.
    bed.cluster.fault("n1", 1, GpuFault::Dies { xid: 79 }).await.expect("told");
    bed.until("the inventory to say so", async |bed: &Bed| {
        match bed.inventory("n1").gpus[1].health {
            divvy_model::Health::Failed | divvy_model::Health::Lost => Ok(()),
            health => Err(format!("{health:?}")),
        }
    })
    .await;
    healthy(&bed, 12).await;
    bed.create(&pod("b").gpu_mem(4));
    bed.running("b").await;
    assert_eq!(bed.gpu_of("b"), 0);
    assert_eq!(bed.running("a").await.remove(0).id, view.id, "who ran runs on");
    bed.cluster.fault("n1", 1, GpuFault::Recovers).await.expect("told");
    bed.end().await;
}
