//! The whole agent, in this process: an embedded API server, an emulated kubelet and container runtime on real sockets, and a probe with
//! scripted answers.

mod bed;
mod guard;
mod labels;
mod limits;
mod metrics;
mod mig;
mod mps;
mod vendor_shares;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_agent::{AgentConfig, DeviceDelivery, Error, ProbeChoice};
use divvy_cdi::driver_spec::{self, Basis};
use divvy_hardware::protocol::{DriverFiles, DriverQuestion, DriverSpec};
use divvy_host::Files;
use divvy_model::nvidia::xid;
use divvy_model::out_of_service::{out_of_service_key, under_test_key};
use divvy_model::{Allocation, ContainerShare, Enforcement, GpuShare, Health, Inventory, MiB, MigDevice, TestRun, Vendor, names};
use divvy_testbed::api::{
    ApiServer, ApiServerOptions, DeleteOptions, Effect, FaultRule, Listening, Match, PatchKind, ServedResource,
};
use divvy_testbed::builders;
use divvy_testbed::node::{CgroupVersion, ContainerView, NodeDescription, TestbedNode};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpStream, UnixListener};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use self::bed::*;
use crate::exchange::{exchange, serves_both_formats};

const LIMIT: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_pod_starts_on_its_gpu_and_outlives_the_agent() {
    let mut bed = Bed::new(&[16384, 15109]).await;
    bed.memory_is(30, 30).await;
    bed.inventory(|inventory| inventory.total_units() == 30).await;
    bed.ready_is(200, "ok").await;
    bed.create("a", Some(1), 3);
    let a = bed.running("a").await;
    assert_eq!(env(&a, names::ALIYUN_IDX), "1");
    assert_eq!(env(&a, names::ALIYUN_CONTAINER), "3");
    assert_eq!(env(&a, names::ALIYUN_DEV), "14");
    assert_eq!(env(&a, names::VISIBLE_DEVICES), "void");
    assert!(a.devices.contains(&"/dev/nvidia1".to_owned()) && !a.devices.contains(&"/dev/nvidia0".to_owned()));
    let (_, text) = bed.get("/metrics").await.expect("served");
    for line in [
        "divvy_agent_grants 1",
        "divvy_agent_gpus{health=\"ok\"} 2",
        "divvy_gpu_allocated_bytes{uuid=\"GPU-1\"} 3221225472",
        "divvy_agent_pre_start_duration_seconds_count{outcome=\"granted\"} 1",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    serves_both_formats(bed.config.metrics.expect("served"), "divvy_agent_steering_misses_total").await;
    bed.stop_agent().await;
    assert_eq!(bed.sockets(), Vec::<String>::new(), "a stopped agent leaves no socket");
    bed.memory_is(30, 0).await;
    bed.start_agent();
    bed.kubelet_has(30).await;
    bed.create("b", Some(0), 16);
    assert_eq!(env(&bed.running("b").await, names::ALIYUN_IDX), "0");
    assert_eq!(bed.running("a").await.id, a.id, "nothing moved");
    bed.stop_agent().await;
}

/// The resources that a node already offers make it ready.
#[tokio::test]
async fn a_ready_node_offers_more_when_another_driver_comes() {
    let mut bed = Bed::new(&[]).await;
    bed.machine.send_modify(|machine| machine.amd = 2);
    let whole = Vendor::Amd.whole_resource();
    let kubelet_has = async |resource: &str, count: usize| {
        let look = || (bed.node.device_manager().resources.get(resource) == Some(&(count, count))).then_some(());
        bed.eventually(resource, look).await;
    };
    kubelet_has(whole, 2).await;
    bed.ready_is(200, "ok").await;
    assert_eq!(bed.node.device_manager().resources.get(names::GPU_MEM), None);
    bed.machine.send_modify(|machine| machine.gpus = vec![4096]);
    kubelet_has(names::GPU_MEM, 4).await;
    kubelet_has(whole, 2).await;
    bed.ready_is(200, "ok").await;
    bed.stop_agent().await;
}

#[tokio::test]
async fn a_failed_gpu_is_not_offered_and_comes_back() {
    let mut bed = Bed::new(&[4096, 4096]).await;
    bed.memory_is(8, 8).await;
    bed.create("a", Some(0), 1);
    bed.running("a").await;
    bed.machine.send_modify(|machine| machine.xids.push((0, 31)));
    bed.machine.send_modify(|machine| machine.xids.push((0, 79)));
    let failed = bed.inventory(|inventory| inventory.gpus[0].reason.is_some()).await;
    assert_eq!(failed.gpus[0].reason.as_deref(), Some("XID 79"));
    // GPU-1's four ids, and the one that a pod holds.
    bed.memory_is(8, 5).await;
    bed.inventory(|inventory| inventory.gpus[0].reason.is_none()).await;
    bed.memory_is(8, 8).await;
    // An event tells users who read the cluster's events.
    for (reason, kind, part) in [
        ("GpuFailed", "Warning", "failed: XID 79"),
        ("GpuRecovered", "Normal", "offered again"),
    ] {
        let event = bed
            .api
            .until(LIMIT, |api| {
                let events = api.list("events", "default").ok()?;
                events.into_iter().find(|event| event["reason"] == reason)
            })
            .await
            .expect("an event of the node");
        assert_eq!(
            (&event["type"], &event["involvedObject"]["kind"]),
            (&json!(kind), &json!("Node"))
        );
        let text = event["message"].as_str().unwrap_or_default();
        assert!(text.contains("GPU 0 (") && text.contains(part), "{text}");
    }
    bed.stop_agent().await;
}

/// Wait for an event of the node, and return its text.
async fn node_event(bed: &Bed, reason: &str) -> String {
    let found = bed.api.until(LIMIT, |api| {
        let events = api.list("events", "default").ok()?;
        events.into_iter().find(|event| event["reason"] == reason)
    });
    let event = found.await.unwrap_or_else(|| panic!("no event {reason}"));
    assert_eq!(event["involvedObject"]["kind"], "Node");
    event["message"].as_str().unwrap_or_default().to_owned()
}

fn annotate(bed: &Bed, annotations: &Value) {
    let patch = json!({"metadata": {"annotations": annotations}});
    bed.api.patch("nodes", "", "n1", PatchKind::Merge, &patch).expect("patched");
}

fn tested_by(inventory: &Inventory, gpu: usize) -> Option<&str> {
    inventory.gpus[gpu].test.as_ref().map(TestRun::as_str)
}

/// An agent that starts while it cannot read its node does not know which GPUs are out of service.
#[tokio::test]
async fn no_container_starts_on_a_gpu_that_may_be_out_of_service() {
    let mut bed = Bed::new(&[4096]).await;
    bed.memory_is(4, 4).await;
    // It registers without an inventory only if containers run here.
    bed.create("earlier", Some(0), 1);
    bed.running("earlier").await;
    bed.stop_agent().await;
    let out = out_of_service_key("GPU-0");
    annotate(&bed, &json!({ &out: "fan is broken" }));
    let rules = ["get", "list"].map(|verb| {
        let away = Effect::Refuse(503);
        bed.api
            .faults()
            .add(FaultRule::new(Match::any().verb(verb).resource("nodes"), away))
    });
    bed.start_agent();
    bed.kubelet_has(4).await;
    bed.create("a", Some(0), 1);
    let said = async |part: &str| {
        let found = bed.api.until(LIMIT * 3, |api| {
            let events = api.list("events", "default").ok()?;
            let text = |event: &Value| event["message"].as_str().unwrap_or_default().to_owned();
            events.iter().map(text).find(|text| text.contains(part))
        });
        found.await.unwrap_or_else(|| panic!("no event with: {part}"))
    };
    said("the agent has not read this node's annotations").await;
    for rule in rules {
        bed.api.faults().remove(rule);
    }
    said("which has failed (out of service: fan is broken)").await;
    assert!(
        bed.node
            .containers()
            .iter()
            .all(|container| container.pod != "a" || !container.is_running())
    );
    annotate(&bed, &json!({ &out: null }));
    bed.running("a").await;
    bed.stop_agent().await;
}

#[tokio::test]
async fn an_annotation_that_names_no_gpu_of_the_node_is_told_once() {
    let mut bed = Bed::new(&[4096]).await;
    bed.memory_is(4, 4).await;
    annotate(
        &bed,
        &json!({ out_of_service_key("GPU-7"): "fan is broken", out_of_service_key("GPU-0"): "x" }),
    );
    let text = node_event(&bed, "NoSuchGpuOutOfService").await;
    assert!(text.contains("the annotation out-of-service.divvy.dev/GPU-7 names"), "{text}");
    bed.inventory(|inventory| inventory.gpus[0].health == Health::Failed).await;
    // Many snapshots later, it is still one event.
    annotate(&bed, &json!({ out_of_service_key("GPU-0"): null }));
    bed.inventory(|inventory| inventory.gpus[0].health == Health::Ok).await;
    let events = bed.api.list("events", "default").expect("listed");
    let told = events.iter().filter(|event| event["reason"] == "NoSuchGpuOutOfService");
    let told: Vec<&Value> = told.collect();
    assert!(
        matches!(told[..], [one] if one["count"].as_u64().unwrap_or(1) == 1),
        "{told:?}"
    );
    bed.stop_agent().await;
}

#[tokio::test]
async fn an_annotation_takes_a_gpu_out_of_service_until_it_is_removed() {
    let mut bed = Bed::new(&[4096, 4096]).await;
    bed.memory_is(8, 8).await;
    bed.create("a", Some(0), 1);
    let a = bed.running("a").await;
    let (out, test) = (out_of_service_key("GPU-0"), under_test_key("GPU-0"));
    annotate(&bed, &json!({ &out: "fan is broken" }));
    let reason = "out of service: fan is broken";
    let is_out = |inventory: &Inventory| inventory.gpus[0].reason.as_deref() == Some(reason);
    let now = bed.inventory(is_out).await;
    assert_eq!((now.gpus[0].health, now.gpus[1].health), (Health::Failed, Health::Ok));
    bed.memory_is(8, 5).await;
    let text = node_event(&bed, "GpuOutOfService").await;
    assert!(
        text.contains("GPU 0 (") && text.contains("fan is broken") && text.contains(&out),
        "{text}"
    );
    // It survives the agent, which does not call it recovered.
    bed.stop_agent().await;
    bed.memory_is(8, 0).await;
    bed.start_agent();
    bed.memory_is(8, 5).await;
    // While it is tested, the kubelet has its ids.
    annotate(&bed, &json!({ &test: "run" }));
    let now = bed.inventory(|inventory| inventory.gpus[0].health == Health::Testing).await;
    assert!(is_out(&now) && tested_by(&now, 0) == Some("run"), "{now:?}");
    bed.memory_is(8, 8).await;
    // The next agent cannot know since when the test is there. Another run replaces it.
    bed.stop_agent().await;
    bed.start_agent();
    let now = bed.inventory(|inventory| inventory.gpus[0].health == Health::Failed).await;
    assert_eq!(tested_by(&now, 0), None);
    bed.memory_is(8, 5).await;
    annotate(&bed, &json!({ &test: "another" }));
    let now = bed.inventory(|inventory| inventory.gpus[0].health == Health::Testing).await;
    assert_eq!(tested_by(&now, 0), Some("another"));
    // A value that is not an id lets no pod use the GPU.
    annotate(&bed, &json!({ &test: "No id" }));
    bed.inventory(|inventory| inventory.gpus[0].health == Health::Failed).await;
    annotate(&bed, &json!({ &test: null }));
    bed.inventory(|inventory| inventory.gpus[0].health == Health::Failed).await;
    // A fault of the driver counts first, and its end does not bring the GPU back.
    bed.machine.send_modify(|machine| machine.xids.push((0, 79)));
    bed.inventory(|inventory| inventory.gpus[0].reason.as_deref() == Some("XID 79"))
        .await;
    bed.inventory(is_out).await;
    annotate(&bed, &json!({ &out: null }));
    bed.inventory(|inventory| inventory.gpus[0].health == Health::Ok).await;
    bed.memory_is(8, 8).await;
    node_event(&bed, "GpuInService").await;
    let events = bed.api.list("events", "default").expect("listed");
    assert!(events.iter().all(|event| event["reason"] != "GpuRecovered"), "{events:?}");
    assert_eq!(bed.running("a").await.id, a.id, "what runs there is not touched");
    bed.stop_agent().await;
}

/// Install and load this version of the driver, and remove the previous one.
fn install_driver(root: &std::path::Path, before: Option<&str>, version: &str) {
    for (path, text) in [
        ("sys/module/nvidia/version", format!("{version}\n")),
        ("usr/bin/nvidia-smi", "smi".to_owned()),
        ("etc/ld.so.cache", format!("of {version}")),
    ] {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().expect("has one")).expect("made");
        std::fs::write(path, text).expect("written");
    }
    for library in ["libcuda", "libnvidia-ml"] {
        let directory = root.join("usr/lib64");
        std::fs::create_dir_all(&directory).expect("made");
        if let Some(before) = before {
            std::fs::remove_file(directory.join(format!("{library}.so.{before}"))).expect("was there");
        }
        std::fs::write(directory.join(format!("{library}.so.{version}")), "a library").expect("written");
    }
}

fn operators_spec(version: &str) -> String {
    format!(
        "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: GPU-0\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n\
         containerEdits:\n  mounts:\n  - hostPath: /usr/lib64/libcuda.so.{version}\n    containerPath: /operators/libcuda.so.1\n    \
         options: [ro, bind]\n"
    )
}

/// The libcuda files that a container gets mounted.
fn libcudas(spec: &str) -> Vec<String> {
    let spec = divvy_cdi::Spec::parse(spec).expect("a spec");
    let mounts = spec.devices[0]
        .container_edits
        .mounts
        .iter()
        .map(|mount| mount.host_path.clone());
    let mut libraries: Vec<String> = mounts.filter(|path| path.contains("libcuda")).collect();
    libraries.dedup();
    libraries
}

#[tokio::test]
async fn a_driver_upgrade_renews_the_spec_and_the_grants() {
    let mut bed = Bed::with(&[16384], |spec| {
        let root = spec.paths().sys_root;
        install_driver(&root, None, "550.54.15");
        std::fs::create_dir_all(root.join("etc/cdi")).expect("made");
        std::fs::write(root.join("etc/cdi/nvidia.yaml"), operators_spec("550.54.15")).expect("written");
    })
    .await;
    bed.memory_is(16, 16).await;
    let (root, cdi) = (bed.config.sys_root.clone(), bed.config.cdi_dir.clone());
    let own = cdi.join("divvy.dev-driver_nvidia.com-gpu.json");
    let operators = root.join("etc/cdi/nvidia.yaml");
    bed.create("a", Some(0), 1);
    bed.running("a").await;
    let grant = {
        let names = std::fs::read_dir(&cdi).expect("listed");
        let mut paths: Vec<PathBuf> = names.map(|entry| entry.expect("an entry").path()).collect();
        assert_eq!(
            paths.len(),
            1,
            "the agent does not touch a current spec of the operator: {paths:?}"
        );
        paths.remove(0)
    };
    let granted = || libcudas(&std::fs::read_to_string(&grant).expect("the grant's spec"));
    assert_eq!(granted(), ["/usr/lib64/libcuda.so.550.54.15"]);

    install_driver(&root, Some("550.54.15"), "560.35.03");
    // A pod triggers a check immediately.
    bed.create("b", Some(0), 1);
    let new = ["/usr/lib64/libcuda.so.560.35.03"];
    bed.eventually("the grant names the new library", || (granted() == new).then_some(()))
        .await;
    bed.running("b").await;
    let made = std::fs::read_to_string(&own).expect("made");
    assert!(
        made.contains("\"divvy.dev/driver-version\": \"560.35.03\"") && !made.contains("550.54.15"),
        "{made}"
    );
    assert_eq!(
        std::fs::read_to_string(&operators).expect("there"),
        operators_spec("550.54.15")
    );
    let event = bed
        .api
        .until(LIMIT, |api| {
            let events = api.list("events", "default").ok()?;
            events.into_iter().find(|event| event["reason"] == "DriverSpecMade")
        })
        .await
        .expect("an event of the node");
    let text = event["message"].as_str().unwrap_or_default();
    assert!(
        text.contains("/etc/cdi/nvidia.yaml was made for driver 550.54.15, but 560.35.03 is loaded")
            && text.contains("gpu.json was made"),
        "{text}"
    );
    let (_, metrics) = bed.get("/metrics").await.expect("served");
    assert!(metrics.contains("divvy_agent_driver_spec_stale 0"), "{metrics}");

    // Later passes of this agent and of another one write nothing. Each puts the grant's spec back.
    let modified = || std::fs::metadata(&own).expect("there").modified().expect("known");
    let before = modified();
    for restart in [false, true] {
        if restart {
            bed.stop_agent().await;
        }
        std::fs::remove_file(&grant).expect("was there");
        if restart {
            bed.start_agent();
        } else {
            bed.create("c", Some(0), 1);
        }
        bed.eventually("a pass", || grant.exists().then_some(())).await;
        assert_eq!(granted(), new);
        assert_eq!(modified(), before, "restart: {restart}");
    }

    // The operator's spec is usable again.
    bed.kubelet_has(16).await;
    std::fs::write(&operators, operators_spec("560.35.03")).expect("written");
    bed.create("d", Some(0), 1);
    bed.eventually("the agent's own goes", || (!own.exists()).then_some(())).await;
    let text = || std::fs::read_to_string(&grant).expect("the grant's spec");
    bed.eventually("the grant is the operator's", || text().contains("/operators/").then_some(()))
        .await;
    assert_eq!(granted(), new);
    bed.stop_agent().await;
}

/// The spec follows when a GPU is divided in a new way.
#[tokio::test]
async fn the_agents_spec_names_mig_devices_like_the_driver() {
    let divide = |root: &Path, instance: u32| {
        let directory = root.join(format!("proc/driver/nvidia/capabilities/gpu1/mig/gi{instance}/ci0"));
        std::fs::create_dir_all(directory).expect("made");
    };
    let make_nodes = |root: &Path, instance: u32| {
        std::fs::create_dir_all(root.join("dev/nvidia-caps")).expect("made");
        for minor in [instance * 10, instance * 10 + 1] {
            std::fs::write(root.join(format!("dev/nvidia-caps/nvidia-cap{minor}")), "").expect("written");
        }
    };
    let mut bed = Bed::with(&[16384, 40960], |spec| {
        let root = spec.paths().sys_root;
        install_driver(&root, None, "560.35.03");
        divide(&root, 3);
        make_nodes(&root, 3);
        std::fs::create_dir_all(root.join("proc/driver/nvidia-caps")).expect("made");
        let minors = "gpu1/gi3/access 30\ngpu1/gi3/ci0/access 31\ngpu1/gi5/access 50\ngpu1/gi5/ci0/access 51\n";
        std::fs::write(root.join("proc/driver/nvidia-caps/mig-minors"), minors).expect("written");
        std::fs::create_dir_all(root.join("etc/cdi")).expect("made");
        std::fs::write(root.join("etc/cdi/nvidia.yaml"), operators_spec("535.129.03")).expect("written");
    })
    .await;
    let (root, own) = (
        bed.config.sys_root.clone(),
        bed.config.cdi_dir.join("divvy.dev-driver_nvidia.com-gpu.json"),
    );
    let names = || {
        let spec = divvy_cdi::Spec::parse(&std::fs::read_to_string(&own).ok()?).ok()?;
        Some(spec.devices.iter().map(|device| device.name.clone()).collect::<BTreeSet<_>>())
    };
    let part = |index: u32, gi: u32| MigDevice {
        index,
        uuid: format!("MIG-{gi}"),
        gi,
        ci: 0,
        ..MigDevice::default()
    };
    bed.memory_is(56, 56).await;
    bed.machine.send_modify(|machine| machine.mig = Some(vec![part(1, 3)]));
    // A GPU on which nothing can run is not offered.
    bed.memory_is(56, 16).await;
    let divided = bed.inventory(|inventory| inventory.gpus[1].reason.is_some()).await;
    let reason = divided.gpus[1].reason.clone().unwrap_or_default();
    assert!(reason.starts_with("MIG mode is on"), "{reason}");
    let first = ["0", "1:1", "GPU-0", "MIG-3", "all"];
    bed.eventually("the driver's names", || names().filter(|names| names.iter().eq(&first)))
        .await;

    divide(&root, 5);
    bed.machine
        .send_modify(|machine| machine.mig = Some(vec![part(0, 5), part(1, 3)]));
    let told = || {
        let events = bed.api.list("events", "default").ok()?;
        let text = serde_json::to_string(&events).ok()?;
        text.contains(
            "MIG device 1:0 (GPU instance 5, compute instance 0) is left out: there is no /dev/nvidia-caps/nvidia-cap50",
        )
        .then_some(())
    };
    bed.eventually("an event names what is missing", told).await;
    make_nodes(&root, 5);
    // A pod triggers a check.
    bed.create("a", Some(0), 1);
    bed.running("a").await;
    let second = ["0", "1:0", "1:1", "GPU-0", "MIG-3", "MIG-5", "all"];
    bed.eventually("the new part", || names().filter(|names| names.iter().eq(&second)))
        .await;
    bed.machine.send_modify(|machine| machine.mig = None);
    bed.memory_is(56, 56).await;
    bed.stop_agent().await;
}

/// The agent cannot make the spec again.
#[tokio::test]
async fn a_stale_spec_is_reported_once_and_counted() {
    let mut bed = Bed::with(&[4096], |spec| {
        let root = spec.paths().sys_root;
        std::fs::create_dir_all(root.join("etc/cdi")).expect("made");
        std::fs::write(root.join("etc/cdi/nvidia.yaml"), operators_spec("535.129.03")).expect("written");
    })
    .await;
    bed.memory_is(4, 4).await;
    let events = |kind: &'static str, reason: &'static str, count: usize| {
        move |api: &ApiServer| {
            let events = api.list("events", "default").ok()?;
            let events: Vec<Value> = events
                .into_iter()
                .filter(|event| event["reason"] == reason && event["involvedObject"]["kind"] == kind)
                .collect();
            (events.len() >= count).then_some(events)
        }
    };
    let of_node = events("Node", "DriverSpecStale", 1);
    bed.api.until(LIMIT, of_node).await.expect("an event of the node");
    // Each pod triggers another check. The library that the operator's spec names does not exist, so none of the pods starts.
    for pod in ["a", "b"] {
        let uid = bed.create(pod, Some(0), 1);
        let record = bed.config.state_dir().join(format!("grants/{uid}_main.json"));
        bed.eventually("a grant", || record.exists().then_some(())).await;
    }
    let of_pods = bed.api.until(LIMIT, events("Pod", "DriverSpecStale", 2)).await;
    assert_eq!(of_pods.expect("an event of each pod").len(), 2);
    let told = bed.inventory(|inventory| inventory.driver_trouble.is_some()).await;
    let found = of_node(&bed.api).expect("still there");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0]["count"].as_u64().unwrap_or(1) == 1, "{found:?}");
    let text = found[0]["message"].as_str().unwrap_or_default();
    // What the driver reports if the kernel's files are not visible.
    assert!(
        text.contains("made for driver 535.129.03, but 550.54.15 is loaded")
            && text.contains("divvy cdi generate -o /etc/cdi/nvidia.yaml"),
        "{text}"
    );
    assert_eq!(told.driver_trouble.as_deref(), Some(text));
    let (_, metrics) = bed.get("/metrics").await.expect("served");
    assert!(metrics.contains("divvy_agent_driver_spec_stale 1"), "{metrics}");
    bed.stop_agent().await;
}

/// The node, the pod, and the inventory report the missing driver until it is installed.
#[tokio::test]
async fn node_pod_and_inventory_report_a_missing_driver() {
    let mut bed = Bed::new(&[4096]).await;
    bed.memory_is(4, 4).await;
    let first = |kind: &'static str| {
        move |api: &ApiServer| {
            let events = api.list("events", "default").ok()?;
            let mut events = events.into_iter();
            events.find(|event| event["reason"] == "NoDriverLibraries" && event["involvedObject"]["kind"] == kind)
        }
    };
    let of_node = bed.api.until(LIMIT, first("Node")).await.expect("an event of the node");
    bed.create("a", Some(0), 1);
    bed.running("a").await;
    let of_pod = bed.api.until(LIMIT, first("Pod")).await.expect("an event of the pod");
    let told = bed.inventory(|inventory| inventory.driver_trouble.is_some()).await;
    for text in [
        of_node["message"].as_str(),
        of_pod["message"].as_str(),
        told.driver_trouble.as_deref(),
    ] {
        let text = text.unwrap_or_default();
        assert!(
            text.contains("no CDI spec of kind nvidia.com/gpu names GPU-0")
                && text.contains("divvy cdi generate -o /etc/cdi/nvidia.yaml"),
            "{text}"
        );
    }
    install_driver(&bed.config.sys_root, None, "550.54.15");
    // A pod triggers a check.
    bed.create("b", Some(0), 1);
    bed.running("b").await;
    bed.inventory(|inventory| inventory.driver_trouble.is_none()).await;
    bed.stop_agent().await;
}

/// The kubelet permanently rejects a pod that arrives while it has no devices. A successful registration does not mean that it has them.
#[tokio::test]
async fn a_node_is_unschedulable_while_its_kubelet_lacks_devices() {
    let mut bed = Bed::with(&[4096], |spec| spec.timings.dial = Duration::from_millis(200)).await;
    for round in 0..3 {
        bed.inventory(|inventory| !inventory.unschedulable).await;
        let view = bed.node.device_manager();
        assert_eq!(view.resources.get(names::GPU_MEM), Some(&(4, 4)), "round {round}");
        match round {
            0 => {
                bed.node.stop_kubelet(true).await;
                bed.inventory(|inventory| inventory.unschedulable).await;
                bed.node.start_kubelet().await.expect("started");
            }
            _ => {
                bed.stop_agent().await;
                bed.inventory(|inventory| inventory.unschedulable).await;
                bed.start_agent();
            }
        }
    }
    bed.stop_agent().await;
}

/// The kubelet permanently rejects a pod that arrives while no plugin is registered.
/// The agent first says that it is stopping.
#[tokio::test]
async fn a_stopping_agent_serves_pods_on_their_way() {
    let mut bed = Bed::new(&[4096]).await;
    bed.memory_is(4, 4).await;
    // The pod's start is delayed, and the agent does not hear of the pod, as if it was bound at the very last moment.
    let hang = FaultRule::new(Match::any().resource("pods"), Effect::Latency(Duration::from_millis(150)));
    bed.create("p", Some(0), 1);
    let rule = bed.api.faults().add(hang);
    bed.stop_agent().await;
    bed.api.faults().remove(rule);
    bed.running("p").await;
    bed.inventory(|inventory| inventory.unschedulable).await;
    bed.start_agent();
    bed.inventory(|inventory| !inventory.unschedulable).await;
    bed.memory_is(4, 4).await;
    bed.stop_agent().await;
}

/// The agent's watch lags behind, and the kubelet is about to call it for a pod that was bound at the last moment.
#[tokio::test]
async fn a_stopping_agent_asks_for_pods_its_watch_missed() {
    let mut bed = Bed::with(&[4096], |spec| spec.timings.allocate = Duration::from_millis(600)).await;
    bed.memory_is(4, 4).await;
    bed.stop_agent().await;
    let deaf = Match::any().client("agent").verb("watch").resource("pods");
    let deaf = bed.api.faults().add(FaultRule::new(deaf, Effect::Latency(LIMIT)));
    bed.start_agent();
    bed.inventory(|inventory| !inventory.unschedulable).await;
    bed.memory_is(4, 4).await;
    bed.eventually("its watch, which hangs", || (bed.api.faults().fired(deaf) > 0).then_some(()))
        .await;
    bed.create("p", Some(0), 1);
    bed.stop_agent().await;
    bed.running("p").await;
}

/// Otherwise the kubelet's ids name another GPU, and a plugin that comes after the agent gives the pod's GPU to another pod.
#[tokio::test]
async fn a_pod_the_watch_missed_gets_ids_of_its_gpu() {
    let mut bed = Bed::new(&[4096, 4096]).await;
    bed.memory_is(8, 8).await;
    bed.stop_agent().await;
    let deaf = Match::any().client("agent").verb("watch").resource("pods");
    let deaf = bed.api.faults().add(FaultRule::new(deaf, Effect::Latency(LIMIT)));
    bed.start_agent();
    bed.kubelet_has(8).await;
    bed.eventually("its watch, which hangs", || (bed.api.faults().fired(deaf) > 0).then_some(()))
        .await;
    for (name, gpu) in [("first", 1), ("second", 0), ("third", 1)] {
        bed.create(name, Some(gpu), 1);
        bed.running(name).await;
    }
    let (_, text) = bed.get("/metrics").await.expect("served");
    assert!(text.contains("divvy_agent_steering_misses_total 0"), "{text}");
    bed.stop_agent().await;
}

/// With a role without `list` (kube-rs lists before it watches), the inventory is written, but the agent would not notice its removal.
/// The agent says why it is not ready.
#[tokio::test]
async fn an_agent_that_may_not_watch_its_node_is_unready() {
    let mut bed = Bed::new(&[4096]).await;
    bed.stop_agent().await;
    let forbidden = Effect::Refuse(403);
    let rule = FaultRule::new(Match::any().verb("list").resource("nodes"), forbidden);
    let rule = bed.api.faults().add(rule);
    bed.start_agent();
    bed.ready_is(503, "not ready: node;").await;
    bed.memory_is(4, 4).await;
    bed.api.faults().remove(rule);
    bed.ready_is(200, "ok").await;
    bed.stop_agent().await;
}

#[tokio::test]
async fn known_pods_start_and_restart_while_the_api_server_is_away() {
    let mut bed = Bed::new(&[4096]).await;
    bed.memory_is(4, 4).await;
    bed.create("a", Some(0), 1);
    let a = bed.running("a").await;
    // From now on, the agent's own access to the API server fails.
    let nowhere = bed.api.kubeconfig(free_port());
    std::fs::write(bed.config.kubeconfig.as_ref().expect("set"), nowhere).expect("written");
    bed.stop_agent().await;
    bed.start_agent();
    bed.ready_is(503, "inventory").await;
    bed.ready_is(503, "pods").await;
    // The agent registers without an inventory, for the container that already runs here.
    bed.eventually("both sockets", || (bed.sockets().len() == 2).then_some(()))
        .await;
    assert_eq!(bed.running("a").await.id, a.id);
    bed.stop_agent().await;
}

#[tokio::test]
async fn without_a_probe_the_agent_waits_and_says_so() {
    let mut bed = Bed::new(&[4096]).await;
    bed.memory_is(4, 4).await;
    bed.stop_agent().await;
    bed.config.probe = Some(ProbeChoice::Socket(bed.config.sys_root.join("absent.sock")));
    bed.start_agent();
    bed.ready_is(503, "gpus").await;
    let (_, text) = bed.get("/readyz").await.expect("served");
    assert!(
        !text.contains('/') && !text.contains("absent.sock"),
        "paths of the node are in the log only: {text}"
    );
    let (code, _) = bed.get("/healthz").await.expect("served");
    assert_eq!(code, 200);
    assert!(!bed.agent.as_ref().expect("running").0.is_finished(), "it keeps trying");
    bed.stop_agent().await;
}

#[tokio::test]
async fn half_requests_and_large_headers_block_no_kubelet_probe() {
    let mut bed = Bed::new(&[4096]).await;
    bed.ready_is(200, "ok").await;
    let address = bed.config.metrics.expect("served");
    let large = format!("GET /metrics HTTP/1.1\r\nhost: a\r\nx: {}", "x".repeat(384 << 10));
    let mut held = Vec::new();
    for at in 0..60 {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket
            .bind(([127, 0, 0, 2 + at % 3], 0).into())
            .expect("an address of the loopback");
        let mut stream = socket.connect(address).await.expect("a connection");
        let text = [large.as_str(), "GET /metrics HTTP/1.1\r\n", ""][usize::from(at) / 3 % 3];
        // The agent may have closed the connection before everything is sent.
        let _ = stream.write_all(text.as_bytes()).await;
        held.push((stream, text.len()));
        if at % 20 == 19 {
            assert_eq!(bed.get("/healthz").await, Some((200, "ok\n".to_owned())));
        }
    }
    for (mut stream, sent) in held {
        let mut answer = Vec::new();
        let ended = tokio::time::timeout(Duration::from_secs(60), stream.read_to_end(&mut answer)).await;
        assert!(ended.is_ok(), "the agent waits for the rest of {sent} bytes");
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
    }
    // No handler here reads a body.
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    let head = b"GET /metrics HTTP/1.1\r\nhost: a\r\ncontent-length: 4000000\r\n\r\n";
    stream.write_all(head).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    bed.stop_agent().await;
}

#[tokio::test]
async fn what_cannot_work_ends_the_agent_with_a_sentence() {
    let directory = tempfile::tempdir().expect("temp dir");
    let config = AgentConfig {
        kubeconfig: Some(directory.path().join("absent")),
        kubelet_dir: directory.path().join("kubelet"),
        cdi_dir: directory.path().join("cdi"),
        sys_root: directory.path().to_owned(),
        ..AgentConfig::new("n1")
    };
    let run = |config: AgentConfig| async {
        let outcome = divvy_agent::run(config, CancellationToken::new()).await;
        outcome.expect_err("cannot work").to_string()
    };
    assert!(run(config.clone()).await.contains("absent"));
    let envvar = AgentConfig {
        device_list_strategy: DeviceDelivery::Envvar,
        ..config.clone()
    };
    assert!(run(envvar).await.contains("CDI"));
    std::fs::write(directory.path().join("file"), "").expect("written");
    let in_the_way = AgentConfig {
        state_dir: Some(directory.path().join("file")),
        ..config
    };
    let text = run(in_the_way).await;
    assert!(text.contains("/file") && text.contains("os error"), "{text}");
}
