//! The invariants (ARCHITECTURE.md, "Invariants"), each tested in a readable scenario. For random histories, see
//! [`crate::chaos`]. Every test ends with [`Bed::end`], which deletes all pods, waits until nothing is left of them, and audits
//! every commit of the API server and every container that ran.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use divvy_model::{Health, cdi_device_name, names};
use divvy_testbed::api::{Effect, FaultRule, Match, PatchKind};
use divvy_testbed::builders::pod;
use divvy_testbed::node::{ContainerView, NodeDescription};
use divvy_testbed::scenario::{Cluster as _, GpuFault};
use serde_json::{Value, json};

use crate::bed::{Bed, stubborn};

/// Return the paths of GPUs among the devices of a container.
fn gpus(view: &ContainerView) -> Vec<&str> {
    let is_gpu = |path: &&str| {
        path.strip_prefix("/dev/nvidia")
            .is_some_and(|rest| rest.parse::<u32>().is_ok())
    };
    view.devices.iter().map(String::as_str).filter(is_gpu).collect()
}

/// Send concurrent bind requests, as several schedulers do, or one scheduler that repeats a slow request.
async fn bind_all(bed: &Bed, pods: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let binds = pods
        .iter()
        .map(async |(name, uid)| (name.clone(), bed.bind(name, uid, "n1").await));
    futures::future::join_all(binds).await.into_iter().collect()
}

#[tokio::test]
async fn invariant_1_what_is_allocated_on_a_gpu_never_exceeds_it() {
    let mut bed = Bed::new(&[&[8, 4]]).await;
    // Three pods fit: two on the larger GPU, one on the smaller. Twelve pods are bound at once, each twice, and some answers are lost.
    let pods: BTreeMap<String, String> = (0..12)
        .map(|i| format!("p{i}"))
        .map(|name| (name.clone(), bed.create_by_hand(&pod(&name).gpu_mem(3))))
        .collect();
    let bindings = Match::any().verb("create").resource("pods/binding");
    let lost = bed.api().faults().add(FaultRule::new(bindings, Effect::LoseAnswer).times(2));
    let (first, second) = futures::future::join(bind_all(&bed, &pods), bind_all(&bed, &pods)).await;
    assert_eq!(bed.api().faults().remove(lost), 2);
    let bound = |bed: &Bed| -> BTreeSet<String> { pods.keys().filter(|name| bed.is_bound(name)).cloned().collect() };
    let three = bound(&bed);
    assert_eq!(three.len(), 3, "{first:#?}");
    for (name, error) in first.iter().chain(&second) {
        assert_eq!(error.is_empty(), three.contains(name), "{name}: {error:?}");
        assert!(
            error.is_empty() || error.contains("Insufficient") || error.contains("no GPU"),
            "{name}: {error:?}"
        );
    }
    // A restarted extender reads everything from the annotations.
    bed.cluster.restart_extender().await.expect("restarted");
    let again = bind_all(&bed, &pods).await;
    assert_eq!(bound(&bed), three);
    assert!(
        again.iter().all(|(name, error)| error.is_empty() == three.contains(name)),
        "{again:#?}"
    );
    assert_eq!(bed.inspect("n1").await["usedGPU"], 9);
    for name in &three {
        bed.running(name).await;
    }
    bed.end().await;
}

#[tokio::test]
async fn invariant_2_a_container_starts_on_its_pods_gpu_or_says_why() {
    // After a restart of the kubelet, plugins register before it admits pods.
    let plugins_first = |spec: &mut NodeDescription| spec.timings.pods_after = Duration::from_millis(400);
    let mut bed = Bed::with(&[&[6, 8, 4]], plugins_first).await;
    bed.expect("bound-without-allocation");
    // Each container of each kind of pod sees only the GPU of its pod, whatever device ids the kubelet picked.
    let kinds = [
        pod("two").gpu_mem(3).container("other", 2),
        pod("init").gpu_mem(2).init("prepare", 4),
        pod("sidecar").gpu_mem(1).sidecar("side", 2).init("prepare", 2),
    ];
    for (kind, name) in kinds.iter().zip(["two", "init", "sidecar"]) {
        let uid = bed.create(kind);
        bed.running(name).await;
        let device = format!("/dev/nvidia{}", bed.gpu_of(name));
        let ran: Vec<ContainerView> = bed
            .node("n1")
            .containers()
            .into_iter()
            .filter(|view| view.pod_uid == uid)
            .collect();
        assert!(ran.len() >= 2, "{ran:?}");
        for view in &ran {
            assert_eq!(gpus(view), [device.as_str()], "{}/{}", view.pod, view.container);
        }
    }
    // A pod that was bound without the extender has no GPU.
    let past = bed.create(&pod("past").gpu_mem(1).on_node("n1"));
    bed.start_refused("past", "was bound to this node without an allocation")
        .await;
    bed.event("past", "NoAllocation", "schedulerName").await;
    // The pod is bound, and its GPU fails before the pod starts.
    let late = bed.create_by_hand(&pod("late").gpu_mem(4));
    let unsaid = bed.kubelet_stops_unsaid("n1", true).await;
    assert_eq!(bed.bind_known("late", &late, "n1").await, "");
    bed.api().faults().remove(unsaid);
    let index = bed.gpu_of("late");
    let gpu = u32::try_from(index).expect("few");
    bed.cluster
        .fault("n1", gpu, GpuFault::Dies { xid: 79 })
        .await
        .expect("the driver");
    bed.until("the GPU to have failed", async |bed: &Bed| {
        match bed.inventory("n1").gpus[index].health {
            Health::Ok => Err("it is well".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
    bed.node("n1").start_kubelet().await.expect("started");
    let text = bed.start_refused("late", "is allocated on GPU").await;
    assert!(
        text.contains("XID 79") && text.contains("starts automatically when the GPU recovers"),
        "{text}"
    );
    assert_eq!((bed.ever_ran(&past), bed.ever_ran(&late)), (0, 0), "neither has ever run");
    bed.cluster.fault("n1", gpu, GpuFault::Recovers).await.expect("the driver");
    let views = bed.running("late").await;
    assert_eq!(gpus(&views[0]), [format!("/dev/nvidia{index}").as_str()]);
    bed.end().await;
}

#[tokio::test]
async fn invariant_3_every_allocation_ends_however_its_pod_does() {
    let mut bed = Bed::new(&[&[4]]).await;
    let whole = || pod("p").gpu_mem(4);
    // Each pod needs the whole GPU and reuses the name of the previous pod, so a leak would stop the next pod.
    for way in [
        "deleted",
        "deleted by force",
        "ended well",
        "failed",
        "evicted",
        "deleted before it started",
        "replaced at once",
    ] {
        match way {
            "ended well" => {
                bed.create(&whole().args(&["sleep", "0.05"]).once());
                bed.phase("p", "Succeeded").await;
            }
            "failed" => {
                bed.create(&whole().args(&["fail"]).once());
                bed.phase("p", "Failed").await;
            }
            "deleted before it started" => {
                let unsaid = bed.kubelet_stops_unsaid("n1", true).await;
                bed.create(&whole());
                bed.bound("p").await;
                bed.api().faults().remove(unsaid);
                bed.delete("p");
                bed.node("n1").start_kubelet().await.expect("started");
                bed.gone("p").await;
                bed.registered("n1").await;
            }
            _ => {
                bed.create(&whole());
                bed.running("p").await;
            }
        }
        match way {
            "deleted" => bed.delete("p"),
            "deleted by force" => bed.force_delete("p"),
            "evicted" => {
                // The eviction API and a node's taints have the same effect: another client deletes the pod, with a reason.
                let condition = json!([{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]);
                let patch = json!({"status": {"conditions": condition}});
                bed.api()
                    .patch("pods/status", "default", "p", PatchKind::Merge, &patch)
                    .expect("patched");
                bed.delete("p");
            }
            // Pods that have ended hold no memory, although their objects still exist.
            "ended well" | "failed" => {
                bed.create(&pod("next").gpu_mem(4));
                bed.running("next").await;
                bed.delete("next");
                bed.gone("next").await;
                bed.delete("p");
            }
            "replaced at once" => {
                let old = bed.pod("p")["metadata"]["uid"].as_str().expect("a UID").to_owned();
                bed.force_delete("p");
                let new = bed.create(&whole());
                assert_ne!(old, new);
                bed.running("p").await;
                bed.delete("p");
            }
            _ => {}
        }
        bed.gone("p").await;
        bed.until(&format!("all to be free again ({way})"), async |bed: &Bed| {
            let (used, held, grants) = (
                bed.inspect("n1").await["usedGPU"].clone(),
                bed.held_mib("n1"),
                bed.grants("n1"),
            );
            if used == 0 && held == 0 && grants.is_empty() {
                Ok(())
            } else {
                Err(format!("{used} units used, {held} MiB held, grants {grants:?}"))
            }
        })
        .await;
    }
    bed.restart_agent("n1").await;
    // A kubelet permanently refuses the pods that it receives while the plugin is not registered.
    bed.registered("n1").await;
    bed.create(&whole());
    bed.running("p").await;
    bed.end().await;
}

#[tokio::test]
async fn invariant_4_memory_is_held_until_the_last_container_ends() {
    // One unit is free on each GPU, so the node's sum, which is all that kube-scheduler sees, always has room for the new pod.
    let mut bed = Bed::with(&[&[4, 4]], |spec| spec.timings.forced_grace = Duration::from_secs(4)).await;
    bed.create(&pod("neighbor").gpu_mem(3));
    bed.running("neighbor").await;
    for way in [
        "deleted",
        "deleted by force, then restarts",
        "deleted by force, and its agent says late what is held",
        "deleted by force, and a new extender does not know its container",
    ] {
        let old = bed.create(&stubborn("old", 2, 2).container("quick", 1));
        bed.running("old").await;
        let new = bed.create(&pod("new").gpu_mem(2));
        bed.unschedulable("new", "Insufficient GPU Memory in one device").await;
        match way {
            "deleted" => {
                bed.delete("old");
                // `divvy why` gives the same reason.
                bed.create(&pod("newer").gpu_mem(2));
                bed.unschedulable("newer", "Insufficient GPU Memory in one device").await;
                bed.delete("newer");
                bed.gone("newer").await;
            }
            "deleted by force, then restarts" => {
                bed.force_delete("old");
                // The object and its allocation are gone. A new extender can know the hold only from the grant's record.
                bed.restart_agent("n1").await;
                bed.cluster.restart_extender().await.expect("restarted");
            }
            "deleted by force, and its agent says late what is held" => {
                let unsaid = bed.agent_says_nothing("n1");
                bed.force_delete("old");
                // The extender has seen the pod run, and waits for the agent's report.
                bed.event(
                    "new",
                    "FailedScheduling",
                    "for pod default/old (deleted, container was running)",
                )
                .await;
                assert!(bed.runs(&old, "main") && !bed.is_bound("new"));
                bed.api().faults().remove(unsaid);
            }
            _ => {
                // A new extender cannot know of the container: it allocates the memory, and the agent's arbiter refuses the start.
                let unsaid = bed.agent_says_nothing("n1");
                bed.force_delete("old");
                bed.cluster.restart_extender().await.expect("restarted");
                bed.bound("new").await;
                bed.start_refused("new", "memory is still held by default/old").await;
                bed.api().faults().remove(unsaid);
            }
        }
        // After a forced deletion, a new extender may at first not know the container; then the new pod must not start.
        let known = way == "deleted" || way.contains("says late");
        bed.ends_before(&old, |bed| bed.runs(&new, "main") || (known && bed.is_bound("new")))
            .await;
        bed.running("new").await;
        bed.delete("new");
        bed.gone("new").await;
    }
    bed.end().await;
}

/// The other GPUs continue, and the failed GPU comes back automatically.
#[tokio::test]
async fn invariant_5_a_failed_gpu_is_not_offered_until_it_recovers() {
    let sizes = [4, 4, 6];
    let mut bed = Bed::new(&[&sizes]).await;
    bed.create(&pod("steady").gpu_mem(2));
    let before = bed.running("steady").await;
    let failed = bed.gpu_of("steady");
    let (began, gpu) = (Instant::now(), u32::try_from(failed).expect("few"));
    bed.cluster
        .fault("n1", gpu, GpuFault::Dies { xid: 79 })
        .await
        .expect("the driver");
    bed.until("the GPU to be offered no more", async |bed: &Bed| {
        match &bed.inventory("n1").gpus[failed] {
            gpu if gpu.health == Health::Ok => Err(format!("{:?}", gpu.health)),
            gpu => {
                assert_eq!(gpu.reason.as_deref(), Some("XID 79"));
                Ok(())
            }
        }
    })
    .await;
    assert!(began.elapsed() < Duration::from_secs(3), "that took {:?}", began.elapsed());
    // The neighbors' memory is fully allocated.
    let others: BTreeSet<usize> = (0..3).filter(|index| *index != failed).collect();
    let largest = others.iter().map(|index| sizes[*index]).max().expect("two");
    let mut used = BTreeSet::new();
    for (name, units) in [("large", largest), ("small", 3), ("last", 1)] {
        bed.create(&pod(name).gpu_mem(units));
        bed.running(name).await;
        used.insert(bed.gpu_of(name));
    }
    assert_eq!(used, others);
    bed.create(&pod("patient").gpu_mem(1));
    bed.unschedulable("patient", "Insufficient").await;
    let after = bed.running("steady").await;
    assert_eq!(
        (&before[0].id, before[0].attempt),
        (&after[0].id, 0),
        "who runs there is left alone"
    );
    bed.cluster.fault("n1", gpu, GpuFault::Recovers).await.expect("the driver");
    bed.running("patient").await;
    assert_eq!(bed.gpu_of("patient"), failed);
    // An error that a program caused does not mean that the GPU is faulty.
    let neighbour = others.first().expect("two");
    bed.cluster
        .driver("n1", json!({"op": "xid", "gpu": neighbour, "xid": 31}))
        .await
        .expect("the driver");
    bed.stays("the GPU is well", Duration::from_millis(300), |bed| {
        bed.inventory("n1").gpus.iter().all(|gpu| gpu.health == Health::Ok)
    })
    .await;
    bed.end().await;
}

#[tokio::test]
async fn invariant_6_every_process_can_be_killed_at_any_instruction() {
    let slow = |spec: &mut NodeDescription| spec.timings.container_start = Duration::from_millis(60);
    let mut bed = Bed::with(&[&[8, 8]], slow).await;
    // A binding takes 120 ms, and then the container's start 60 ms. The kills below hit before, during, and after each.
    let bindings = Match::any().verb("create").resource("pods/binding");
    bed.api()
        .faults()
        .add(FaultRule::new(bindings, Effect::Latency(Duration::from_millis(120))));
    let mut rejected = 0;
    for (i, after_ms) in [0, 30, 90, 130, 160, 190, 230].into_iter().enumerate() {
        let name = format!("p{i}");
        bed.create(&pod(&name).gpu_mem(2));
        tokio::time::sleep(Duration::from_millis(after_ms)).await;
        bed.cluster.kill_extender().await.expect("killed");
        bed.cluster.kill_agent("n1").await.expect("killed");
        if i % 2 == 1 {
            bed.node("n1").restart_kubelet(true).await.expect("restarted");
        }
        bed.cluster.start_agent("n1").await.expect("started");
        bed.cluster.start_extender().await.expect("started");
        bed.registered("n1").await;
        let what = format!("{name} to run or to be rejected");
        let settled = bed.until(&what, async |bed: &Bed| {
            let pod = bed.pod(&name);
            match pod["status"]["phase"].as_str() {
                Some("Running") => Ok(true),
                // The kubelet admitted the pod while no plugin was registered, and does not try again.
                Some("Failed") if pod["status"]["reason"] == "UnexpectedAdmissionError" => Ok(false),
                _ => Err(pod["status"].to_string()),
            }
        });
        if !settled.await {
            rejected += 1;
            bed.delete(&name);
            bed.gone(&name).await;
            bed.create(&pod(&name).gpu_mem(2));
        }
        bed.running(&name).await;
    }
    assert!(
        rejected <= 4,
        "{rejected} of 7 were rejected: too few came through to say anything"
    );
    // Every pod is where it was, and counts once: exactly the remaining memory is free.
    assert_eq!(bed.inspect("n1").await["usedGPU"], 14);
    bed.create(&pod("last").gpu_mem(2));
    bed.running("last").await;
    let too_many = bed.create(&pod("too-many").gpu_mem(1));
    bed.unschedulable("too-many", "Insufficient").await;
    // An extender that has not listed the pods yet treats no memory as free.
    let lists = Match::any().verb("list").resource("pods").client("extender");
    let slowly = bed.api().faults().add(FaultRule::new(lists, Effect::Hang));
    bed.cluster.kill_extender().await.expect("killed");
    let ready = tokio::time::timeout(Duration::from_millis(200), bed.cluster.start_extender()).await;
    assert!(ready.is_err(), "it cannot be ready: {ready:?}");
    bed.until("the extender to listen", async |bed: &Bed| {
        let asked = bed.cluster.ask_extender("GET", "/healthz", "").await;
        asked.map(drop).map_err(|error| error.to_string())
    })
    .await;
    let error = bed.bind("too-many", &too_many, "n1").await;
    assert!(error.contains("the extender is starting"), "{error:?}");
    bed.api().faults().remove(slowly);
    bed.unschedulable("too-many", "Insufficient").await;
    bed.end().await;
}

/// Return the devices that NVIDIA's runtime, as a node's default runtime, would add for a container with this environment variable.
fn nvidia_runtime_adds(view: &ContainerView, machine: &[String]) -> Vec<String> {
    match view.env.get(names::VISIBLE_DEVICES).map(String::as_str) {
        None | Some("" | "void" | "none") => Vec::new(),
        Some("all") => machine.to_vec(),
        Some(list) => list.split(',').map(str::to_owned).collect(),
    }
}

#[tokio::test]
async fn invariant_7_an_environment_variable_gets_a_pod_no_other_gpu() {
    let bed = Bed::new(&[&[4, 4]]).await;
    let machine: Vec<String> = (0..2).map(|index| bed.cluster.machines().nodes[0].gpu_uuid(index)).collect();
    bed.create(&pod("victim").gpu_mem(4));
    let victim = bed.running("victim").await.remove(0);
    let theirs = bed.gpu_of("victim");
    let own = format!("/dev/nvidia{}", 1 - theirs);
    let grant = victim.cdi_devices[0].clone();
    for (i, value) in ["all", &theirs.to_string(), &machine[theirs], &grant, "void"]
        .into_iter()
        .enumerate()
    {
        let name = format!("greedy-{i}");
        let greedy = pod(&name)
            .gpu_mem(1)
            .env(names::VISIBLE_DEVICES, value)
            .env(names::ALIYUN_IDX, &theirs.to_string())
            .env(names::ALIYUN_POD, "4")
            .env(names::ALIYUN_CONTAINER, "4")
            .env(names::ALIYUN_DEV, "99");
        bed.create(&greedy);
        let view = bed.running(&name).await.remove(0);
        assert_eq!(gpus(&view), [own.as_str()], "{value}");
        assert_eq!(nvidia_runtime_adds(&view, &machine), [""; 0], "{value}");
        let variables = [
            names::ALIYUN_IDX,
            names::ALIYUN_POD,
            names::ALIYUN_CONTAINER,
            names::ALIYUN_DEV,
        ]
        .map(|key| &view.env[key]);
        assert_eq!(variables, [&(1 - theirs).to_string(), "1", "1", "4"], "{value}");
        bed.delete(&name);
        bed.gone(&name).await;
    }
    // The name of a grant cannot be forged: the same device ids without the node's key give another name.
    let ids = &bed.ids("n1", &victim.pod_uid)["main"];
    let key = std::fs::read_to_string(bed.node("n1").paths().root.join("state/node.key")).expect("the key");
    let derived = |key: &[u8]| {
        format!(
            "{}={}",
            names::CDI_KIND,
            cdi_device_name(key, names::GPU_MEM, ids.iter().map(String::as_str))
        )
    };
    let key: Vec<u8> = (0..32)
        .map(|i| u8::from_str_radix(&key[2 * i..2 * i + 2], 16).expect("hex"))
        .collect();
    assert_eq!(derived(&key), grant);
    for guess in [&b""[..], b"n1", victim.pod_uid.as_bytes(), &[0; 32]] {
        assert_ne!(derived(guess), grant);
    }
    bed.end().await;
}

/// Divvy cannot prevent all misuse (such as a privileged pod, or a program that uses more memory than requested), but reports it
/// in an event of the pod.
/// A process on a GPU that its pod was not granted has an event, too.
#[tokio::test]
async fn a_process_beyond_its_grant_has_an_event() {
    let mut bed = Bed::new(&[&[8, 8]]).await;
    let greedy = bed.create(&pod("greedy").gpu_mem(2));
    let stray = bed.create(&pod("stray").gpu_mem(2));
    let plain = bed.create_object(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plain", "namespace": "default"},
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "x"}]},
    }));
    let granted = |bed: &Bed, name: &str| u32::try_from(bed.gpu_of(name)).expect("small");
    let mut uses = Vec::new();
    for (name, uid) in [("greedy", &greedy), ("stray", &stray), ("plain", &plain)] {
        bed.phase(name, "Running").await;
        let pid = bed.container(uid, "main").expect("it runs").pid;
        let (gpu, used_mib) = match name {
            "greedy" => (granted(&bed, name), 3000),
            "stray" => (1 - granted(&bed, name), 100),
            _ => (0, 100),
        };
        uses.push(json!({"op": "memory", "gpu": gpu, "pid": pid, "used_mib": used_mib}));
    }
    for request in uses {
        bed.cluster
            .driver("n1", request)
            .await
            .expect("the simulated driver takes it");
    }
    bed.event(
        "greedy",
        "GpuMemoryExceeded",
        "use 3000 MiB of GPU 0, but 2048 MiB were granted",
    )
    .await;
    bed.event("stray", "GpuNotGranted", "without a grant from Divvy").await;
    bed.event("plain", "GpuNotGranted", "uses 100 MiB of it").await;
    // A restarted agent lists the pods before it serves.
    bed.restart_agent("n1").await;
    bed.registered("n1").await;
    bed.end().await;
}

#[tokio::test]
async fn invariant_8_the_same_history_gives_the_same_decisions() {
    /// Return all decisions in order, and the exact text of the extender's last answer.
    async fn history() -> (Vec<String>, String) {
        let mut bed = Bed::new(&[&[8, 8, 8, 8], &[16, 16, 16]]).await;
        let mut log = Vec::new();
        // Nearly every choice is a tie.
        for (i, units) in [9, 5, 5, 9, 5, 5, 9, 2, 3, 1, 9].into_iter().enumerate() {
            let name = format!("p{i}");
            let uid = bed.create_by_hand(&pod(&name).gpu_mem(units));
            // kube-scheduler chooses the node, and the extender the GPU.
            let node = if i % 3 == 0 { "n2" } else { "n1" };
            let error = bed.bind(&name, &uid, node).await;
            let gpus: Vec<(usize, u64)> = bed
                .allocation(&name)
                .into_iter()
                .flat_map(|allocation| allocation.gpus)
                .map(|share| (bed.gpu_of(&name), share.memory.0))
                .collect();
            log.push(format!("{name} on {node}: {gpus:?} {error}"));
        }
        let question = json!({
            "Pod": {"metadata": {"name": "q", "namespace": "default", "uid": "q"},
                    "spec": {"containers": [{"name": "main", "resources": {"limits": {names::GPU_MEM: "17"}}}]}},
            "NodeNames": ["n2", "n1"]})
        .to_string();
        let mut answers = BTreeSet::new();
        for round in 0..3 {
            if round == 2 {
                bed.cluster.restart_extender().await.expect("restarted");
            }
            for _ in 0..10 {
                let asked = bed.cluster.ask_extender("POST", "/gpushare-scheduler/filter", &question);
                answers.insert(asked.await.expect("an answer").1);
            }
        }
        assert_eq!(answers.len(), 1, "one question, one answer: {answers:#?}");
        let answer: Value = serde_json::from_str(answers.first().expect("one")).expect("JSON");
        assert_eq!(answer["Error"], "", "{answer}");
        let pods = bed.api().list("pods", "").expect("a list");
        log.extend(
            pods.iter()
                .map(|pod| pod["metadata"]["annotations"][names::ALLOCATION].to_string()),
        );
        bed.end().await;
        (log, answer.to_string())
    }
    let (one, other) = futures::future::join(history(), history()).await;
    assert_eq!(one, other);
    assert!(
        one.0
            .iter()
            .any(|line| line.contains("Insufficient") || line.contains("no GPU")),
        "some did not fit: {one:#?}"
    );
}
