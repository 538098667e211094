//! The emulated node, with a device plugin of these tests on its sockets.

mod admission;
mod containers;
mod lifecycle;
mod plugin;
mod restarts;

use std::time::{Duration, Instant};

use divvy_testbed::api::{ApiServer, DeleteOptions, Options};
use divvy_testbed::node::{ContainerView, Node, NodeSpec};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::scheduler;
use plugin::TestPlugin;

pub(crate) const LIMIT: Duration = Duration::from_secs(5);
pub(crate) const RESOURCE: &str = "divvy.test/unit";

/// An API server and one node, `n1`.
pub(crate) struct Bed {
    pub(crate) api: ApiServer,
    pub(crate) node: Node,
    // Declared last, so that the directory is removed after the node has ended.
    _directory: TempDir,
}

impl Bed {
    pub(crate) async fn new() -> Bed {
        Bed::with(|_| {}).await
    }

    pub(crate) async fn with(change: impl FnOnce(&mut NodeSpec)) -> Bed {
        let options = Options {
            seed: Some(1),
            ..Options::default()
        };
        let api = ApiServer::new(options);
        let directory = tempfile::tempdir().unwrap();
        let mut spec = NodeSpec::new("n1", directory.path());
        spec.gpu_minors = vec![0, 1];
        spec.timings.pods_after = Duration::ZERO;
        spec.timings.status_period = Duration::from_millis(5);
        spec.timings.start_retry.first = Duration::from_millis(50);
        spec.timings.restart_backoff.first = Duration::from_millis(50);
        change(&mut spec);
        let node = Node::start(api.client(), spec).await.unwrap();
        Bed {
            api,
            node,
            _directory: directory,
        }
    }

    /// Start a node with a plugin of `count` ids `u0`, `u1`, …, and wait until all are in the node's status.
    pub(crate) async fn with_plugin(count: usize) -> (Bed, TestPlugin) {
        let bed = Bed::new().await;
        let plugin = TestPlugin::start(&bed.node, count).await;
        bed.resource_is(count, count).await;
        (bed, plugin)
    }

    /// Wait until the node's status has this capacity and allocatable of the test resource.
    pub(crate) async fn resource_is(&self, capacity: usize, allocatable: usize) {
        let (capacity, allocatable) = (capacity.to_string(), allocatable.to_string());
        let found = self
            .api
            .until(LIMIT, |api| {
                let node = api.get("nodes", "", "n1").ok()?;
                let status = &node["status"];
                (status["capacity"][RESOURCE] == *capacity && status["allocatable"][RESOURCE] == *allocatable).then_some(())
            })
            .await;
        let node = self.api.get("nodes", "", "n1").unwrap();
        assert!(found.is_some(), "{capacity} {allocatable} expected: {}", node["status"]);
    }

    /// Create a pod that is already bound. Return its UID.
    pub(crate) fn create(&self, name: &str, spec: Value) -> String {
        let mut pod = json!({"metadata": {"name": name}, "spec": spec});
        pod["spec"]["nodeName"] = json!("n1");
        let pod = self.api.create("pods", pod).unwrap();
        pod["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    pub(crate) fn delete(&self, name: &str, grace_period_s: Option<i64>) {
        let options = DeleteOptions {
            grace_period_s,
            ..DeleteOptions::default()
        };
        self.api.delete("pods", "default", name, &options).unwrap();
    }

    /// Wait until `look` accepts the pod's object.
    pub(crate) async fn pod_until(&self, name: &str, look: impl Fn(&Value) -> bool) -> Value {
        scheduler::pod_until(&self.api, name, look).await
    }

    pub(crate) async fn phase(&self, name: &str, phase: &str) -> Value {
        self.pod_until(name, |pod| pod["status"]["phase"] == *phase).await
    }

    /// Wait until all of the pod's app containers are ready.
    pub(crate) async fn ready(&self, name: &str) -> Value {
        self.pod_until(name, |pod| {
            let statuses = pod["status"]["containerStatuses"].as_array();
            statuses.is_some_and(|all| !all.is_empty() && all.iter().all(|status| status["ready"] == true))
        })
        .await
    }

    pub(crate) async fn gone(&self, name: &str) {
        let gone = self.api.until(LIMIT, |api| api.get("pods", "default", name).err()).await;
        assert!(gone.is_some(), "pod {name} is still there");
    }

    /// Wait for an event with this reason about the pod. Return its message.
    pub(crate) async fn event(&self, pod: &str, reason: &str) -> String {
        scheduler::event(&self.api, pod, reason).await
    }

    /// Return the newest run of a container.
    pub(crate) fn container(&self, pod_uid: &str, name: &str) -> Option<ContainerView> {
        let mut views = self.node.containers();
        views.retain(|view| view.pod_uid == pod_uid && view.container == name);
        views.pop()
    }
}

/// Wait for a condition that no API object shows.
pub(crate) async fn eventually(what: &str, mut look: impl FnMut() -> bool) {
    let began = Instant::now();
    while !look() {
        assert!(began.elapsed() < LIMIT, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Return a container that asks for `units` of the test resource.
pub(crate) fn container(name: &str, units: usize) -> Value {
    let units = units.to_string();
    json!({"name": name, "image": "t:1", "args": ["run"], "resources": {"limits": {RESOURCE: units}}})
}

/// Return a container without devices.
pub(crate) fn plain(name: &str, args: &[&str]) -> Value {
    json!({"name": name, "image": "t:1", "args": args})
}
