//! A driver that limits the memory of cgroups.

use super::*;

async fn bed() -> Bed {
    let bed = Bed::new(&[16384, 16384]).await;
    bed.machine.send_modify(|machine| machine.has_limits = true);
    bed.inventory(|inventory| inventory.gpus.iter().all(|gpu| gpu.enforcement == Some(Enforcement::CGROUP)))
        .await;
    bed.kubelet_has(32).await;
    bed
}

/// The driver gets the limit again after a reboot.
#[tokio::test]
async fn the_driver_has_a_pods_limit_before_its_container_starts() {
    let mut bed = bed().await;
    bed.machine.send_modify(|machine| machine.holds_limits = true);
    let uid = bed.create("a", Some(1), 3);
    let asked = |count: usize| {
        let limits = bed.pod_limits();
        (limits.len() == count).then_some(limits)
    };
    let limits = bed.eventually("a limit", || asked(1)).await;
    assert!(bed.node.containers().is_empty(), "it waits for the limit");
    assert!(bed.container_limits().is_empty(), "the pod's limit is the first");
    assert_eq!(limits[0]["uuid"], "GPU-1");
    assert_eq!(limits[0]["hardMiB"], 3072);
    let cgroup = limits[0]["cgroup"].as_str().expect("a path");
    let directory = bed.config.sys_root.join("sys/fs/cgroup").join(cgroup);
    assert!(cgroup.ends_with(&uid) && directory.is_dir(), "{cgroup}");
    bed.machine.send_modify(|machine| machine.holds_limits = false);
    bed.running("a").await;
    let (_, text) = bed.get("/metrics").await.expect("served");
    assert!(text.contains("divvy_agent_memory_limits_total{outcome=\"set\"} 1"), "{text}");

    bed.node.reboot().await.expect("rebooted");
    bed.eventually("another limit", || asked(2)).await;
    bed.running("a").await;
    bed.stop_agent().await;
}

/// Wait until the driver has been asked for the limit of this container's cgroup more than `before` times, and return the last request.
async fn limited(bed: &Bed, container: &ContainerView, before: usize) -> Value {
    let look = || {
        let mut limits = bed.container_limits();
        limits.retain(|limit| limit["cgroup"] == *container.cgroup);
        (limits.len() > before).then(|| limits.pop())?
    };
    bed.eventually("a limit of the container", look).await
}

/// Wait until the metrics have this line, and return them.
async fn counted(bed: &Bed, line: &str) -> String {
    let deadline = tokio::time::Instant::now() + LIMIT;
    loop {
        let (_, text) = bed.get("/metrics").await.expect("served");
        if text.contains(line) {
            return text;
        }
        assert!(tokio::time::Instant::now() < deadline, "{line} expected: {text}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A container may start later, or run while the agent restarts.
#[tokio::test]
async fn each_container_gets_its_pods_limit_whenever_it_starts() {
    let mut bed = bed().await;
    bed.create_with("free", Some(0), 3, &[(names::ISOLATION, "none")]);
    bed.running("free").await;
    let uid = bed.create("a", Some(1), 3);
    let container = bed.running("a").await;
    let limit = limited(&bed, &container, 0).await;
    assert_eq!(
        (&limit["uuid"], &limit["hardMiB"], &limit["alone"]),
        (&json!("GPU-1"), &json!(3072), &json!(true))
    );
    // The pod's sandbox has one as well.
    counted(&bed, "divvy_agent_container_limits_total{outcome=\"set\"} 2").await;

    bed.stop_agent().await;
    bed.start_agent();
    limited(&bed, &container, 1).await;

    bed.kubelet_has(32).await;
    bed.node.reboot().await.expect("rebooted");
    let later = bed.running("a").await;
    assert_ne!(later.cgroup, container.cgroup);
    // The simulated cgroups may have the inodes of those before the reboot, unlike real ones. A look at all pods finds them.
    let other = bed.create("b", Some(1), 2);
    limited(&bed, &later, 0).await;
    for limit in bed.container_limits() {
        let cgroup = limit["cgroup"].as_str().expect("a path");
        assert!(
            cgroup.contains(&uid) || cgroup.contains(&other),
            "{cgroup} is not of a limited pod"
        );
    }
    bed.stop_agent().await;
}

/// The limit of the container's pod is set nevertheless.
#[tokio::test]
async fn a_container_with_a_refused_limit_starts_and_is_counted() {
    let mut bed = bed().await;
    bed.machine
        .send_modify(|machine| machine.refuses_container_limits = Some("no permission".to_owned()));
    bed.create_with("a", Some(0), 3, &[(names::ISOLATION, "hard")]);
    let container = bed.running("a").await;
    limited(&bed, &container, 1).await;
    let text = counted(&bed, "divvy_agent_container_limits_total{outcome=\"failed\"} 2").await;
    assert!(text.contains("divvy_agent_memory_limits_total{outcome=\"set\"} 1"), "{text}");
    let events = bed.api.list("events", "default").expect("listed");
    assert!(events.iter().all(|event| event["reason"] != "NotLimited"), "{events:?}");
    bed.machine.send_modify(|machine| machine.refuses_container_limits = None);
    bed.stop_agent().await;
    bed.start_agent();
    let tried = bed.container_limits().len();
    bed.eventually("the limit", || (bed.container_limits().len() > tried).then_some(()))
        .await;
    bed.stop_agent().await;
}

/// The event says why the driver does not limit it.
#[tokio::test]
async fn a_pod_that_is_not_limited_starts_with_an_event() {
    let mut bed = bed().await;
    let refusal = "the driver does not limit the memory of GPU GPU-0: no permission";
    bed.machine
        .send_modify(|machine| machine.refuses_limits = Some(refusal.to_owned()));
    bed.create("a", Some(0), 3);
    bed.running("a").await;
    let event = bed.api.until(LIMIT, |api| {
        let events = api.list("events", "default").ok()?;
        events.into_iter().find(|event| event["reason"] == "NotLimited")
    });
    let event = event.await.expect("an event");
    assert_eq!(event["involvedObject"]["name"], "a");
    let text = event["message"].as_str().expect("a text");
    assert!(
        text.contains("may use more than its share") && text.ends_with(refusal),
        "{text}"
    );
    let (_, text) = bed.get("/metrics").await.expect("served");
    assert!(
        text.contains("divvy_agent_memory_limits_total{outcome=\"failed\"} 1"),
        "{text}"
    );
    bed.stop_agent().await;
}

#[tokio::test]
async fn a_pod_that_requires_its_limit_waits_until_the_driver_sets_it() {
    let mut bed = bed().await;
    bed.machine
        .send_modify(|machine| machine.refuses_limits = Some("no permission".to_owned()));
    bed.create_with("a", Some(0), 3, &[(names::ISOLATION, "hard")]);
    let waits = bed.api.until(LIMIT, |api| {
        let pod = api.get("pods", "default", "a").ok()?;
        let message = pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"].as_str()?;
        Some(message.to_owned())
    });
    let message = waits.await.expect("the container waits");
    assert!(
        message.contains("the pod wants its share of the GPU to be enforced (divvy.dev/isolation)")
            && message.contains("no permission"),
        "{message}"
    );
    bed.machine.send_modify(|machine| machine.refuses_limits = None);
    bed.running("a").await;
    bed.stop_agent().await;
}

#[tokio::test]
async fn nothing_enforces_shares_on_a_node_with_cgroups_of_version_1() {
    let mut bed = Bed::with(&[16384], |spec| spec.cgroup = CgroupVersion::V1).await;
    bed.machine.send_modify(|machine| {
        machine.has_limits = true;
        machine.gpus.push(16384);
    });
    let inventory = bed.inventory(|inventory| inventory.gpus.len() == 2).await;
    assert!(inventory.gpus.iter().all(|gpu| gpu.enforcement.is_none()), "{inventory:?}");
    bed.stop_agent().await;
}
