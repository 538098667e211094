//! Deletion, and the appearance of containers in the cgroup tree.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use divvy_testbed::api::ApiServer;
use divvy_testbed::node::{CgroupVersion, ContainerState};
use serde_json::json;

use super::plugin::Call;
use super::{Bed, LIMIT, container, eventually, plain};

fn populated(bed: &Bed, cgroup: &str) -> Option<bool> {
    let text = std::fs::read_to_string(bed.node.paths().cgroups().join(cgroup).join("cgroup.events")).ok()?;
    Some(text.contains("populated 1"))
}

/// `kubectl describe node` reads the Lease.
#[tokio::test]
async fn a_node_has_a_lease() {
    let bed = Bed::new().await;
    let lease = |api: &ApiServer| api.get("leases.coordination.k8s.io", "kube-node-lease", "n1").ok();
    let lease = bed.api.until(LIMIT, lease).await.expect("a Lease");
    assert_eq!(lease["spec"]["holderIdentity"], "n1");
    assert!(lease["spec"]["renewTime"].is_string(), "{lease}");
}

#[tokio::test]
async fn cgroups_show_what_runs_on_every_level() {
    let bed = Bed::new().await;
    let uid = bed.create(
        "p",
        json!({"restartPolicy": "Never", "containers": [plain("a", &["run"]), plain("b", &["sleep", "0.05"])]}),
    );
    bed.pod_until("p", |pod| {
        pod["status"]["containerStatuses"][1]["state"]["terminated"].is_object()
    })
    .await;
    let pod = format!("kubepods/besteffort/pod{uid}");
    let (a, b) = (bed.container(&uid, "a").unwrap(), bed.container(&uid, "b").unwrap());
    assert_eq!(a.cgroup, format!("{pod}/{}", a.id));
    for (cgroup, expected) in [
        ("kubepods", Some(true)),
        ("kubepods/besteffort", Some(true)),
        ("kubepods/burstable", Some(false)),
        (pod.as_str(), Some(true)),
        (a.cgroup.as_str(), Some(true)),
        (b.cgroup.as_str(), None),
    ] {
        assert_eq!(populated(&bed, cgroup), expected, "{cgroup}");
    }
    let root = bed.node.paths().cgroups();
    let procs = std::fs::read_to_string(root.join(&a.cgroup).join("cgroup.procs")).unwrap();
    assert_eq!(procs, format!("{}\n", a.pid));
    let of_pid = bed.node.paths().sys_root.join(format!("proc/{}/cgroup", a.pid));
    assert_eq!(std::fs::read_to_string(&of_pid).unwrap(), format!("0::/{}\n", a.cgroup));
    // The container's cgroup and the sandbox's cgroup.
    let children = std::fs::read_dir(root.join(&pod))
        .unwrap()
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .count();
    assert_eq!(children, 2);
    bed.delete("p", None);
    bed.gone("p").await;
    assert_eq!(populated(&bed, &pod), None);
    assert_eq!(populated(&bed, "kubepods"), Some(false));
    assert!(!of_pid.exists());
    assert!(!root.parent().unwrap().join("cgroup.new").exists());
}

#[tokio::test]
async fn version_1_counts_pids_per_level() {
    let bed = Bed::with(|spec| spec.cgroup = CgroupVersion::V1).await;
    let uid = bed.create(
        "p",
        json!({"containers": [{"name": "a", "image": "t:1", "args": ["run"], "resources": {"requests": {"cpu": "1"}}}]}),
    );
    bed.ready("p").await;
    let root = bed.node.paths().cgroups();
    let current = |cgroup: &str| std::fs::read_to_string(root.join("pids").join(cgroup).join("pids.current")).ok();
    assert_eq!(current(&format!("kubepods/burstable/pod{uid}")).as_deref(), Some("2\n"));
    assert_eq!(current(&bed.container(&uid, "a").unwrap().cgroup).as_deref(), Some("1\n"));
    assert!(!root.join("cgroup.controllers").exists());
    assert!(root.join("memory/kubepods").is_dir() && root.join("cpu,cpuacct/kubepods").is_dir());
    bed.delete("p", None);
    bed.gone("p").await;
    assert_eq!(current(&format!("kubepods/burstable/pod{uid}")), None);
}

#[tokio::test]
async fn a_graceful_deletion_waits_for_the_containers() {
    let (bed, plugin) = Bed::with_plugin(2).await;
    let mut stubborn = container("a", 2);
    stubborn["args"] = json!(["run", "--ignore-term"]);
    let uid = bed.create("p", json!({"containers": [stubborn, plain("b", &["run"])]}));
    bed.ready("p").await;
    let began = Instant::now();
    bed.delete("p", Some(1));
    eventually("the end of b", || !bed.container(&uid, "b").unwrap().is_running()).await;
    assert!(bed.container(&uid, "a").unwrap().is_running());
    assert_eq!(bed.container(&uid, "b").unwrap().state, ContainerState::Exited { code: 143 });
    let pod = bed.api.get("pods", "default", "p").unwrap();
    assert!(pod["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(pod["status"]["phase"], "Running", "not terminal while a container runs");
    // The container's ids are not allocated again before it has ended.
    bed.create("next", json!({"containers": [container("a", 2)]}));
    bed.phase("next", "Failed").await;
    bed.gone("p").await;
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    let last = bed
        .api
        .history()
        .into_iter()
        .rev()
        .find(|event| event.object["metadata"]["name"] == "p")
        .unwrap();
    assert_eq!(last.object["status"]["phase"], "Failed");
    assert_eq!(
        last.object["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"],
        137
    );
    assert!(bed.container(&uid, "a").is_none(), "the container is forgotten with the pod");
    bed.create("after", json!({"containers": [container("a", 2)]}));
    bed.ready("after").await;
    assert_eq!(plugin.count(|call| matches!(call, Call::Allocate(_))), 2);
}

#[tokio::test]
async fn a_force_deleted_pod_is_gone_while_its_container_lives() {
    let (bed, _plugin) = Bed::with_plugin(2).await;
    let mut stubborn = container("a", 2);
    stubborn["args"] = json!(["--ignore-term"]);
    let uid = bed.create("p", json!({"containers": [stubborn], "terminationGracePeriodSeconds": 1}));
    bed.ready("p").await;
    bed.delete("p", Some(0));
    bed.gone("p").await;
    let pod = format!("kubepods/besteffort/pod{uid}");
    assert!(bed.container(&uid, "a").unwrap().is_running());
    // The kubelet considers the container's ids free: the next pod gets them while the process is still running.
    let next = bed.create("p", json!({"containers": [container("a", 2)]}));
    bed.ready("p").await;
    assert_ne!(next, uid);
    assert!(bed.container(&uid, "a").unwrap().is_running());
    assert_eq!(populated(&bed, &pod), Some(true));
    let holders: BTreeSet<String> = bed
        .node
        .device_manager()
        .holders
        .into_keys()
        .map(|holder| holder.pod)
        .collect();
    assert_eq!(holders, BTreeSet::from([next.clone()]));
    eventually("the end of the old container", || bed.container(&uid, "a").is_none()).await;
    assert_eq!(populated(&bed, &pod), None);
    assert!(bed.container(&next, "a").unwrap().is_running());
    assert!(bed.api.get("pods", "default", "p").is_ok());
}

#[tokio::test]
async fn a_force_deleted_pods_containers_get_the_kubelets_own_grace_period_whatever_the_pod_says() {
    let forced = Duration::from_millis(400);
    let bed = Bed::with(|spec| spec.timings.forced_grace = forced).await;
    let stubborn = plain("a", &["run", "--ignore-term"]);
    let mut uids = Vec::new();
    for (name, grace_s) in [("none", 0), ("short", 1), ("long", 600), ("leaving", 600)] {
        let spec = json!({"containers": [stubborn, plain("b", &["run"])], "terminationGracePeriodSeconds": grace_s});
        uids.push((name, bed.create(name, spec)));
        bed.ready(name).await;
    }
    // The same holds while a graceful deletion is in progress.
    bed.delete("leaving", None);
    let leaving = uids[3].1.clone();
    eventually("the end of b", || !bed.container(&leaving, "b").unwrap().is_running()).await;
    let began = Instant::now();
    for (name, _) in &uids {
        bed.delete(name, Some(0));
    }
    let runs = |uid: &str| bed.container(uid, "a").is_some_and(|view| view.is_running());
    while began.elapsed() < forced / 2 {
        for (name, uid) in &uids {
            assert!(runs(uid), "{name}: SIGTERM comes first, after {:?}", began.elapsed());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for (name, uid) in &uids {
        eventually("the end of a", || !runs(uid)).await;
        assert!(began.elapsed() >= forced, "{name}: {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn a_deletion_ends_the_retries_of_a_start() {
    let (bed, plugin) = Bed::with_plugin(2).await;
    plugin.change(|state| state.pre_start_errors = vec![tonic::Status::unavailable("never"); 1000]);
    let uid = bed.create("p", json!({"containers": [container("a", 1)]}));
    bed.event("p", "Failed").await;
    bed.delete("p", None);
    bed.gone("p").await;
    assert!(bed.container(&uid, "a").is_none());
    bed.create("q", json!({"containers": [plain("a", &["run"])]}));
    bed.ready("q").await;
}

#[tokio::test]
async fn status_writes_that_fail_are_written_later() {
    use divvy_testbed::api::{Effect, Match, Rule};
    let bed = Bed::new().await;
    let refuse = Effect::Refuse(500);
    let rule = Rule::new(Match::any().resource("pods*"), refuse).times(3);
    bed.api.faults().add(rule);
    bed.create(
        "p",
        json!({"restartPolicy": "Never", "containers": [plain("a", &["sleep", "0.01"])]}),
    );
    bed.phase("p", "Succeeded").await;
}

#[tokio::test]
async fn what_ended_leaves_nothing() {
    let bed = Bed::new().await;
    bed.create("p", json!({"containers": [plain("a", &["run"])]}));
    bed.ready("p").await;
    let socket = bed.node.paths().kubelet_socket();
    let metrics = tokio::runtime::Handle::current().metrics();
    let Bed { api, node, _directory } = bed;
    node.shutdown().await;
    assert!(tokio::net::UnixStream::connect(&socket).await.is_err());
    let root = _directory.path().to_owned();
    drop((api, _directory));
    assert!(!root.exists());
    eventually("the end of all tasks", || metrics.num_alive_tasks() == 0).await;
}
