//! The contents of containers, and failed starts.

use std::time::Duration;

use divvy_testbed::node::{ContainerState, NodeEvent};
use serde_json::json;
use tonic::Status;

use super::plugin::{Call, TestPlugin, with_cdi, with_files};
use super::{Bed, container, eventually, plain};

const GRANT: &str = "divvy.dev/grant=abc";

fn write_grant(bed: &Bed) {
    let spec = json!({"cdiVersion": "0.6.0", "kind": "divvy.dev/grant", "devices": [{"name": "abc", "containerEdits": {
        "env": ["NVIDIA_VISIBLE_DEVICES=void", "BOTH=cdi"],
        "deviceNodes": [{"path": "/dev/nvidia0"}, {"path": "/dev/nvidiactl"}],
        "mounts": [{"hostPath": "/usr/lib/libcuda.so", "containerPath": "/usr/lib/libcuda.so", "options": ["ro", "nosuid"]}]}}]});
    let path = bed.node.paths().cdi_dir.join("divvy.dev-grant_abc.json");
    let temporary = path.with_extension("new");
    std::fs::write(&temporary, spec.to_string()).unwrap();
    std::fs::rename(&temporary, &path).unwrap();
}

fn write_library(bed: &Bed) {
    let directory = bed.node.paths().sys_root.join("usr/lib");
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("libcuda.so"), "").unwrap();
}

/// CDI accepts any path. The runtime makes the mounts and refuses this one, as runc does.
#[tokio::test]
async fn a_mount_of_a_file_that_the_node_has_not_keeps_the_container_from_starting() {
    let (bed, plugin) = Bed::with_plugin(4).await;
    plugin.respond(|response| with_cdi(response, GRANT));
    write_grant(&bed);
    bed.create("p", json!({"containers": [container("a", 1)]}));
    bed.pod_until("p", |pod| {
        let message = &pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"];
        message
            .as_str()
            .is_some_and(|text| text.contains("error mounting \"/usr/lib/libcuda.so\""))
    })
    .await;
    write_library(&bed);
    bed.ready("p").await;
}

#[tokio::test]
async fn cdi_wins_over_the_pod_and_the_pod_over_the_plugin() {
    let (bed, plugin) = Bed::with_plugin(4).await;
    plugin.respond(|response| {
        with_files(response);
        with_cdi(response, GRANT);
        response.envs.insert("FROM_POD".to_owned(), "plugin".to_owned());
    });
    write_grant(&bed);
    write_library(&bed);
    let mut main = container("a", 1);
    main["env"] = json!([
        {"name": "FROM_POD", "value": "pod"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "ME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]);
    let uid = bed.create("p", json!({"containers": [main]}));
    bed.ready("p").await;
    let view = bed.container(&uid, "a").unwrap();
    for (name, value) in [
        ("FROM_PLUGIN", "1"),
        ("FROM_POD", "pod"),
        ("NVIDIA_VISIBLE_DEVICES", "void"),
        ("BOTH", "cdi"),
        ("ME", "p"),
    ] {
        assert_eq!(view.env.get(name).map(String::as_str), Some(value), "{name}");
    }
    assert_eq!(view.devices, ["/dev/nvidia0", "/dev/nvidiactl"]);
    let mounts: Vec<(&str, bool)> = view
        .mounts
        .iter()
        .map(|mount| (mount.container.as_str(), mount.read_only))
        .collect();
    assert_eq!(mounts, [("/limits", true), ("/usr/lib/libcuda.so", true)]);
    assert_eq!(view.cdi_devices, [GRANT]);
}

#[tokio::test]
async fn an_unresolvable_cdi_name_is_tried_again_until_its_file_is_there() {
    let (bed, plugin) = Bed::with_plugin(4).await;
    plugin.respond(|response| with_cdi(response, GRANT));
    std::fs::write(bed.node.paths().cdi_dir.join("broken.json"), "{").unwrap();
    let uid = bed.create("p", json!({"containers": [container("a", 1)]}));
    let pod = bed
        .pod_until("p", |pod| {
            pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "CreateContainerError"
        })
        .await;
    let message = pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"]
        .as_str()
        .unwrap();
    let text = "failed to inject CDI devices: unresolvable CDI devices divvy.dev/grant=abc";
    assert!(message.ends_with(text), "{message}");
    assert!(bed.event("p", "Failed").await.ends_with(text));
    assert_eq!(pod["status"]["phase"], "Pending");
    assert!(bed.container(&uid, "a").is_none());
    write_library(&bed);
    write_grant(&bed);
    bed.ready("p").await;
    // Each attempt began with PreStartContainer; Allocate was called once.
    let calls = plugin.take_calls();
    assert!(calls.iter().filter(|call| matches!(call, Call::PreStart(_))).count() >= 2);
    assert_eq!(calls.iter().filter(|call| matches!(call, Call::Allocate(_))).count(), 1);
}

#[tokio::test]
async fn a_refused_pre_start_is_tried_again_and_shown_to_the_user() {
    let (bed, plugin) = Bed::with_plugin(4).await;
    let mut events = bed.node.events();
    plugin.change(|state| {
        state.pre_start_errors = vec![
            Status::failed_precondition("GPU-1 is still held by default/old"),
            Status::unavailable("wait"),
        ];
    });
    bed.create("p", json!({"containers": [container("a", 1)]}));
    let text = "device plugin PreStartContainer rpc failed with err: rpc error: code = FailedPrecondition desc = GPU-1 is still held by default/old";
    let pod = bed
        .pod_until("p", |pod| {
            pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "CreateContainerConfigError"
        })
        .await;
    assert_eq!(pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"], text);
    assert_eq!(bed.event("p", "Failed").await, format!("Error: {text}"));
    let pod = bed.ready("p").await;
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    let Ok(NodeEvent::PreStartRefused { message, .. }) = events.recv().await else {
        panic!()
    };
    assert!(message.ends_with("desc = GPU-1 is still held by default/old"), "{message}");
    assert_eq!(plugin.count(|call| matches!(call, Call::PreStart(_))), 3);
}

#[tokio::test]
async fn a_pre_start_that_takes_too_long_has_failed() {
    let bed = Bed::with(|spec| spec.timings.pre_start = Duration::from_millis(50)).await;
    let plugin = TestPlugin::start(&bed.node, 1).await;
    bed.resource_is(1, 1).await;
    plugin.change(|state| state.hang_pre_start = true);
    bed.create("p", json!({"containers": [container("a", 1)]}));
    assert_eq!(
        bed.event("p", "Failed").await,
        "Error: device plugin PreStartContainer rpc failed with err: rpc error: code = DeadlineExceeded desc = context deadline exceeded"
    );
    plugin.change(|state| state.hang_pre_start = false);
    bed.ready("p").await;
}

#[tokio::test]
async fn pre_start_comes_before_each_start_and_not_when_the_plugin_does_not_want_it() {
    let (bed, plugin) = Bed::with_plugin(4).await;
    let mut main = container("a", 1);
    main["args"] = json!(["sleep", "0.01"]);
    let uid = bed.create("p", json!({"containers": [main]}));
    eventually("the third run", || {
        bed.container(&uid, "a").is_some_and(|view| view.attempt >= 2)
    })
    .await;
    let calls = plugin.take_calls();
    let pre_starts: Vec<&Call> = calls.iter().filter(|call| matches!(call, Call::PreStart(_))).collect();
    assert!(
        pre_starts.len() >= 3 && pre_starts.windows(2).all(|pair| pair[0] == pair[1]),
        "{calls:?}"
    );
    assert_eq!(calls.iter().filter(|call| matches!(call, Call::Allocate(_))).count(), 1);

    let (bed, plugin) = Bed::with_plugin(0).await;
    plugin.change(|state| {
        state.no_pre_start = true;
        state.no_preferred = true;
    });
    plugin.set_devices(super::plugin::healthy(super::plugin::ids(2)));
    plugin.register().await.unwrap();
    bed.resource_is(2, 2).await;
    bed.create("p", json!({"containers": [container("a", 1)]}));
    bed.ready("p").await;
    let calls = plugin.take_calls();
    assert!(matches!(calls.as_slice(), [Call::Allocate(_)]), "{calls:?}");
}

#[tokio::test]
async fn pods_end_as_their_restart_policy_says() {
    let bed = Bed::new().await;
    bed.create(
        "ok",
        json!({"restartPolicy": "Never", "containers": [plain("a", &["sleep", "0.02"])]}),
    );
    bed.create(
        "bad",
        json!({"restartPolicy": "Never", "containers": [plain("a", &["fail"]), plain("b", &["sleep", "0"])]}),
    );
    bed.create(
        "init",
        json!({"restartPolicy": "Never", "initContainers": [plain("i", &["fail"])], "containers": [plain("a", &["run"])]}),
    );
    let crash = bed.create("crash", json!({"containers": [plain("a", &["fail"])]}));
    let pod = bed.phase("ok", "Succeeded").await;
    let status = &pod["status"]["containerStatuses"][0];
    assert_eq!(status["state"]["terminated"]["exitCode"], 0);
    assert!(status["containerID"].as_str().unwrap().starts_with("containerd://"));
    let pod = bed.phase("bad", "Failed").await;
    assert_eq!(pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"], 1);
    assert!(
        bed.container(&bed.create("x", json!({"containers": [plain("a", &["run"])]})), "a")
            .is_none()
    );
    bed.phase("init", "Failed").await;
    let pod = bed
        .pod_until("crash", |pod| {
            let status = &pod["status"]["containerStatuses"][0];
            status["state"]["waiting"]["reason"] == "CrashLoopBackOff" && status["restartCount"].as_u64() >= Some(1)
        })
        .await;
    assert_eq!(
        pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["reason"],
        "Error"
    );
    assert_eq!(pod["status"]["phase"], "Running");
    bed.event("crash", "BackOff").await;
    eventually("another run", || {
        bed.container(&crash, "a").is_some_and(|view| view.attempt >= 2)
    })
    .await;
    assert!(matches!(
        bed.container(&crash, "a").unwrap().state,
        ContainerState::Exited { code: 1 } | ContainerState::Running
    ));
}

#[tokio::test]
async fn sidecars_run_beside_and_end_after_the_others() {
    let bed = Bed::with(|spec| spec.timings.container_start = Duration::from_millis(5)).await;
    let mut sidecar = plain("s", &["run"]);
    sidecar["restartPolicy"] = json!("Always");
    let uid = bed.create(
        "p",
        json!({"restartPolicy": "Never", "initContainers": [plain("i", &["sleep", "0.02"]), sidecar],
            "containers": [plain("a", &["sleep", "0.05"])]}),
    );
    let pod = bed.phase("p", "Succeeded").await;
    assert_eq!(
        pod["status"]["initContainerStatuses"][1]["state"]["terminated"]["exitCode"],
        143
    );
    let at = |name: &str| {
        let view = bed.container(&uid, name).unwrap();
        (view.started_at, view.finished_at.unwrap())
    };
    let (i, s, a) = (at("i"), at("s"), at("a"));
    assert!(i.1 <= s.0 && s.0 <= a.0, "in order");
    assert!(a.1 <= s.1, "the sidecar ends last");
    for reason in ["Pulled", "Created", "Started", "Killing"] {
        bed.event("p", reason).await;
    }
}

#[tokio::test]
async fn a_process_of_this_machine_is_in_its_containers_cgroup_until_the_container_ends() {
    let (bed, _plugin) = Bed::with_plugin(4).await;
    let uid = bed.create("p", json!({"containers": [container("a", 1)]}));
    bed.ready("p").await;
    let view = bed.container(&uid, "a").unwrap();
    let own = std::process::id();
    assert!(view.pid > own, "PIDs of simulated processes are none of this machine");
    bed.node.attach(&view.id, own).unwrap();
    let paths = bed.node.paths();
    let procs = std::fs::read_to_string(paths.sys_root.join("sys/fs/cgroup").join(&view.cgroup).join("cgroup.procs"));
    assert_eq!(procs.unwrap(), format!("{}\n{own}\n", view.pid));
    let of_process = paths.sys_root.join(format!("proc/{own}/cgroup"));
    assert_eq!(
        std::fs::read_to_string(&of_process).unwrap(),
        format!("0::/{}\n", view.cgroup)
    );
    let status = std::fs::read_to_string(of_process.with_file_name("status")).unwrap();
    assert!(status.contains(&format!("\nPid:\t{own}\n")), "{status}");
    bed.delete("p", Some(1));
    eventually("its cgroup is gone", || !of_process.exists()).await;
    let error = bed.node.attach(&view.id, own).expect_err("the container has ended");
    assert!(error.to_string().contains("does not run"), "{error}");
}
