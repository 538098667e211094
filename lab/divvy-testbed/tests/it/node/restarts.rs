//! Restarts of the kubelet and of the machine, and the kubelet's bugs.

use std::collections::BTreeSet;
use std::sync::Arc;

use divvy_testbed::node::{Bugs, ContainerState};
use serde_json::json;
use tokio::sync::Notify;

use super::plugin::{Call, TestPlugin};
use super::{Bed, container, eventually, plain};

#[tokio::test]
async fn containers_survive_a_restart_of_the_kubelet() {
    for hard in [false, true] {
        let (bed, mut plugin) = Bed::with_plugin(3).await;
        let uid = bed.create("p", json!({"containers": [container("a", 1)]}));
        bed.ready("p").await;
        let before = bed.container(&uid, "a").unwrap();
        let held = bed.node.device_manager().holders;
        plugin.take_calls();
        let directory = bed.node.paths().device_plugins();
        std::fs::write(directory.join("a-file"), "kept").unwrap();
        bed.node.stop_kubelet(hard).await;
        assert!(directory.join("test.sock").exists());
        bed.node.start_kubelet().await.unwrap();
        assert!(!directory.join("test.sock").exists(), "the kubelet removes the sockets");
        assert!(directory.join("a-file").exists() && directory.join("kubelet.sock").exists());
        // The resource is known, but has no device until the plugin is back.
        bed.resource_is(0, 0).await;
        assert_eq!(bed.node.device_manager().holders, held);
        plugin.serve();
        plugin.register().await.unwrap();
        bed.resource_is(3, 3).await;
        let after = bed.container(&uid, "a").unwrap();
        assert_eq!((after.id, after.attempt), (before.id, 0));
        assert_eq!(plugin.take_calls(), [], "no call for a running container");
        // Another pod gets other ids.
        bed.create("q", json!({"containers": [container("a", 2)]}));
        bed.ready("q").await;
    }
}

#[tokio::test]
async fn while_the_runtime_is_away_containers_run_on_and_none_is_started() {
    let (bed, _plugin) = Bed::with_plugin(3).await;
    let uid = bed.create("p", json!({"containers": [container("a", 1)]}));
    bed.ready("p").await;
    bed.node.set_runtime_away(true);
    let other = bed.create("q", json!({"containers": [container("a", 1)]}));
    let message = bed.event("q", "FailedCreatePodSandBox").await;
    assert!(message.contains("containerd.sock: connect: connection refused"), "{message}");
    assert!(bed.container(&other, "a").is_none());
    assert!(bed.container(&uid, "a").unwrap().is_running());
    bed.node.set_runtime_away(false);
    bed.ready("q").await;
}

#[tokio::test]
async fn pre_start_is_skipped_until_the_plugin_is_back() {
    let (bed, mut plugin) = Bed::with_plugin(3).await;
    let mut main = container("a", 1);
    main["args"] = json!(["sleep", "0.1"]);
    let uid = bed.create("p", json!({"containers": [main]}));
    eventually("a run", || bed.container(&uid, "a").is_some()).await;
    bed.node.restart_kubelet(true).await.unwrap();
    plugin.die();
    plugin.take_calls();
    let attempt = bed.container(&uid, "a").unwrap().attempt;
    eventually("another run", || {
        bed.container(&uid, "a").is_some_and(|view| view.attempt > attempt)
    })
    .await;
    let view = bed.container(&uid, "a").unwrap();
    assert_eq!(view.env["FROM_PLUGIN"], "1", "the cached response is used again");
    assert_eq!(plugin.take_calls(), []);
    plugin.serve();
    plugin.register().await.unwrap();
    eventually("PreStartContainer", || {
        plugin.count(|call| matches!(call, Call::PreStart(_))) > 0
    })
    .await;
    assert_eq!(plugin.count(|call| matches!(call, Call::Allocate(_))), 0);
}

#[tokio::test]
async fn pods_deleted_while_the_kubelet_was_down_end_at_its_start() {
    let bed = Bed::with(|spec| spec.timings.orphan_grace = std::time::Duration::from_millis(50)).await;
    let plugin = TestPlugin::start(&bed.node, 2).await;
    bed.resource_is(2, 2).await;
    let mut stubborn = container("a", 2);
    stubborn["args"] = json!(["--ignore-term"]);
    let forced = bed.create("forced", json!({"containers": [stubborn]}));
    let graceful = bed.create("graceful", json!({"containers": [plain("a", &["run"])]}));
    bed.ready("forced").await;
    bed.ready("graceful").await;
    bed.node.stop_kubelet(false).await;
    bed.delete("forced", Some(0));
    bed.delete("graceful", Some(1));
    bed.gone("forced").await;
    assert!(bed.container(&forced, "a").unwrap().is_running() && bed.container(&graceful, "a").unwrap().is_running());
    bed.node.start_kubelet().await.unwrap();
    bed.gone("graceful").await;
    eventually("the orphan's end", || bed.container(&forced, "a").is_none()).await;
    drop(plugin);
    let mut plugin = TestPlugin::serving(&bed.node, "new.sock", 2);
    plugin.register().await.unwrap();
    bed.resource_is(2, 2).await;
    bed.create("next", json!({"containers": [container("a", 2)]}));
    bed.ready("next").await;
    plugin.die();
}

#[tokio::test]
async fn after_a_reboot_pods_come_before_their_plugin() {
    let (bed, mut plugin) = Bed::with_plugin(3).await;
    let gpu = bed.create("gpu", json!({"containers": [container("a", 1)]}));
    let other = bed.create("other", json!({"containers": [plain("a", &["run"])]}));
    let once = bed.create(
        "once",
        json!({"restartPolicy": "Never", "containers": [plain("a", &["run"])]}),
    );
    for name in ["gpu", "other", "once"] {
        bed.ready(name).await;
    }
    let paths = bed.node.paths();
    let boot_id = std::fs::read_to_string(paths.boot_id()).unwrap();
    std::fs::write(paths.cdi_dir.join("a.json"), "{}").unwrap();
    bed.node.reboot().await.unwrap();
    plugin.die();
    assert_ne!(std::fs::read_to_string(paths.boot_id()).unwrap(), boot_id);
    assert!(std::fs::read_dir(&paths.cdi_dir).unwrap().next().is_none());
    let pod = bed.phase("gpu", "Failed").await;
    assert_eq!(
        pod["status"]["message"],
        "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices divvy.test/unit, \
         which is unexpected"
    );
    assert!(
        pod["status"]["containerStatuses"].is_null(),
        "the status no longer lists containers that ran before the reboot: {}",
        pod["status"]
    );
    let pod = bed
        .pod_until("other", |pod| pod["status"]["containerStatuses"][0]["restartCount"] == 1)
        .await;
    assert_eq!(pod["status"]["phase"], "Running");
    assert_eq!(
        pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"],
        255
    );
    bed.phase("once", "Failed").await;
    assert!(bed.container(&other, "a").unwrap().is_running());
    assert_eq!(bed.container(&gpu, "a").unwrap().state, ContainerState::Exited { code: 255 });
    for uid in [gpu, once] {
        assert!(!paths.cgroups().join(format!("kubepods/besteffort/pod{uid}")).exists());
    }
}

#[tokio::test]
async fn after_a_reboot_a_plugin_that_is_first_is_not_asked_to_allocate_again() {
    let bed = Bed::with(|spec| spec.timings.pods_after = std::time::Duration::from_millis(200)).await;
    let mut plugin = TestPlugin::start(&bed.node, 3).await;
    bed.resource_is(3, 3).await;
    let uid = bed.create("p", json!({"containers": [container("a", 2)]}));
    bed.ready("p").await;
    let held = bed.node.device_manager().holders;
    plugin.take_calls();
    bed.node.reboot().await.unwrap();
    plugin.die();
    plugin.serve();
    plugin.register().await.unwrap();
    bed.pod_until("p", |pod| {
        let status = &pod["status"]["containerStatuses"][0];
        status["restartCount"] == 1 && status["ready"] == true
    })
    .await;
    let calls = plugin.take_calls();
    assert!(
        matches!(calls.as_slice(), [Call::PreStart(ids)] if ids.len() == 2),
        "{calls:?}"
    );
    assert_eq!(bed.node.device_manager().holders, held);
    assert_eq!(bed.container(&uid, "a").unwrap().env["FROM_PLUGIN"], "1");
}

#[tokio::test]
async fn the_plugin_directory_can_be_replaced() {
    let (bed, mut plugin) = Bed::with_plugin(2).await;
    let uid = bed.create("p", json!({"containers": [container("a", 1)]}));
    bed.ready("p").await;
    bed.node.replace_device_plugin_dir().await.unwrap();
    assert!(!bed.node.paths().device_plugins().join("test.sock").exists());
    plugin.serve();
    plugin.register().await.unwrap();
    bed.resource_is(2, 2).await;
    assert!(bed.container(&uid, "a").unwrap().is_running());
    assert_eq!(bed.node.device_manager().holders.len(), 1);
}

/// B1: if a pod has just ended, a list of the pod resources during Allocate makes the kubelet allocate ids twice.
#[tokio::test]
async fn ids_are_handed_out_twice_only_with_the_bug() {
    for bug in [false, true] {
        let (bed, plugin) = Bed::with_plugin(5).await;
        bed.node.set_bugs(Bugs {
            double_hand_out: bug,
            ..Bugs::default()
        });
        let wish = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
        plugin.change(|state| state.preferred = vec![wish(&["u0"]), wish(&["u1", "u2"]), wish(&["u1", "u2"])]);
        let mut short = container("a", 1);
        short["args"] = json!(["sleep", "0.4"]);
        bed.create("ends", json!({"restartPolicy": "Never", "containers": [short]}));
        bed.ready("ends").await;
        let hold = Arc::new(Notify::new());
        plugin.change(|state| state.hold_allocate = Some(hold.clone()));
        let one = bed.create("one", json!({"containers": [container("a", 2)]}));
        eventually("Allocate", || plugin.count(|call| matches!(call, Call::Allocate(_))) == 2).await;
        // The kubelet's main loop is blocked, but its pod workers are not.
        bed.phase("ends", "Succeeded").await;
        bed.node.list_pod_resources();
        plugin.change(|state| state.hold_allocate = None);
        hold.notify_one();
        bed.ready("one").await;
        let two = bed.create("two", json!({"containers": [container("a", 2)]}));
        bed.ready("two").await;
        let holders = bed.node.device_manager().holders;
        let of = |uid: &str| -> BTreeSet<String> {
            let mine = holders.iter().filter(|(holder, _)| holder.pod == uid);
            mine.flat_map(|(_, ids)| ids.iter().cloned()).collect()
        };
        assert_eq!(!of(&one).is_disjoint(&of(&two)), bug);
    }
}

/// B2: the end of the old plugin's stream disconnects the new plugin.
#[tokio::test]
async fn an_old_stream_disconnects_the_new_plugin_only_with_the_bug() {
    for bug in [false, true] {
        let (bed, mut old) = Bed::with_plugin(3).await;
        bed.node.set_bugs(Bugs {
            old_stream_disconnects_new: bug,
            ..Bugs::default()
        });
        let new = TestPlugin::serving(&bed.node, "new.sock", 5);
        new.register().await.unwrap();
        bed.resource_is(5, 5).await;
        old.die();
        if bug {
            bed.resource_is(5, 0).await;
        } else {
            bed.create("p", json!({"containers": [container("a", 1)]}));
            bed.ready("p").await;
            bed.resource_is(5, 5).await;
            assert_eq!(new.count(|call| matches!(call, Call::Allocate(_))), 1);
        }
    }
}

/// B3: a running pod is killed because its ended init container finds no devices.
#[tokio::test]
async fn an_ended_init_container_kills_its_pod_at_a_restart_only_with_the_bug() {
    for bug in [false, true] {
        let (bed, mut plugin) = Bed::with_plugin(3).await;
        bed.node.set_bugs(Bugs {
            ended_init_container_kills: bug,
            ..Bugs::default()
        });
        let mut init = container("i", 1);
        init["args"] = json!(["sleep", "0"]);
        let uid = bed.create("p", json!({"initContainers": [init], "containers": [container("a", 1)]}));
        bed.ready("p").await;
        bed.node.restart_kubelet(true).await.unwrap();
        plugin.die();
        if bug {
            let pod = bed.phase("p", "Failed").await;
            assert_eq!(pod["status"]["reason"], "UnexpectedAdmissionError");
            eventually("the container's end", || !bed.container(&uid, "a").unwrap().is_running()).await;
        } else {
            bed.create("q", json!({"containers": [plain("a", &["run"])]}));
            bed.ready("q").await;
            assert!(bed.container(&uid, "a").unwrap().is_running());
            bed.phase("p", "Running").await;
        }
    }
}
