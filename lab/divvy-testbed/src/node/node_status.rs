//! The Node object: registered at the kubelet's start. Its status is written when it has changed, at most once per period.
//!
//! Simplifications: there is no heartbeat, the Lease is not renewed (nothing here marks a silent node NotReady), and there are no images
//! or volumes.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, NodeAddress, NodeCondition, NodeStatus, NodeSystemInfo};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};

use super::shared::KubeletState;
use super::{MAX_PODS, NodeDescription};

/// The values that change while the kubelet runs: capacity and allocatable.
type NodeAmounts = (BTreeMap<String, Quantity>, BTreeMap<String, Quantity>);

fn amounts(shared: &KubeletState, spec: &NodeDescription) -> NodeAmounts {
    let base = [
        ("cpu", spec.cpus.to_string()),
        ("memory", format!("{}Ki", spec.memory_mib * 1024)),
        ("pods", MAX_PODS.to_string()),
    ];
    let mut capacity: BTreeMap<String, Quantity> = base
        .iter()
        .map(|(name, amount)| ((*name).to_owned(), Quantity(amount.clone())))
        .collect();
    let mut allocatable = capacity.clone();
    for (resource, (all, healthy)) in shared.manager.capacity() {
        capacity.insert(resource.clone(), Quantity(all.to_string()));
        allocatable.insert(resource, Quantity(healthy.to_string()));
    }
    (capacity, allocatable)
}

fn conditions(now: Timestamp) -> Vec<NodeCondition> {
    let one = |kind: &str, status: &str, reason: &str, message: &str| NodeCondition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    };
    vec![
        one(
            "MemoryPressure",
            "False",
            "KubeletHasSufficientMemory",
            "kubelet has sufficient memory available",
        ),
        one(
            "DiskPressure",
            "False",
            "KubeletHasNoDiskPressure",
            "kubelet has no disk pressure",
        ),
        one(
            "PIDPressure",
            "False",
            "KubeletHasSufficientPID",
            "kubelet has sufficient PID available",
        ),
        one("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
    ]
}

fn labels(spec: &NodeDescription) -> BTreeMap<String, String> {
    let mut labels = spec.labels.clone();
    for (key, value) in [
        ("kubernetes.io/hostname", spec.name.as_str()),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", "amd64"),
    ] {
        labels.entry(key.to_owned()).or_insert_with(|| value.to_owned());
    }
    labels
}

fn full_status(spec: &NodeDescription, boot_id: &str, (capacity, allocatable): &NodeAmounts) -> NodeStatus {
    let address = |kind: &str, address: &str| NodeAddress {
        type_: kind.to_owned(),
        address: address.to_owned(),
    };
    NodeStatus {
        addresses: Some(vec![address("InternalIP", &spec.address), address("Hostname", &spec.name)]),
        capacity: Some(capacity.clone()),
        allocatable: Some(allocatable.clone()),
        conditions: Some(conditions(Timestamp::now())),
        node_info: Some(NodeSystemInfo {
            architecture: "amd64".to_owned(),
            boot_id: boot_id.to_owned(),
            container_runtime_version: "containerd://2.3.7".to_owned(),
            kernel_version: "6.18.0".to_owned(),
            kubelet_version: "v1.36.3".to_owned(),
            operating_system: "linux".to_owned(),
            os_image: "Divvy testbed".to_owned(),
            ..NodeSystemInfo::default()
        }),
        ..NodeStatus::default()
    }
}

/// Register the node, then keep its status up to date until the kubelet ends.
pub(crate) async fn keep(shared: Arc<KubeletState>, spec: NodeDescription) {
    let api: Api<Node> = Api::all(shared.client.clone());
    let mut changes = shared.manager.changes();
    let boot_id = spec.paths().boot_id();
    let boot_id = std::fs::read_to_string(&boot_id).unwrap_or_default().trim().to_owned();
    // A kubelet that starts writes the complete status once; afterwards it writes only changes.
    let mut written: Option<NodeAmounts> = None;
    loop {
        if written.is_none() {
            match register(&api, &shared, &spec).await {
                Ok(known) => {
                    shared.manager.remember_as_removed(known);
                    lease(&shared.client, &spec.name).await;
                }
                Err(error) => {
                    tracing::warn!(%error, node = spec.name, "could not register the node; it will be retried");
                    tokio::time::sleep(shared.timings.api_retry).await;
                    continue;
                }
            }
        }
        changes.borrow_and_update();
        let now = amounts(&shared, &spec);
        if written.as_ref() != Some(&now) {
            let status = match written {
                None => serde_json::json!(full_status(&spec, &boot_id, &now)),
                Some(_) => serde_json::json!({"capacity": now.0, "allocatable": now.1}),
            };
            let patch = Patch::Merge(serde_json::json!({ "status": status }));
            match api.patch_status(&spec.name, &PatchParams::default(), &patch).await {
                Ok(_) => written = Some(now),
                // The object was deleted, so it is created again.
                Err(kube::Error::Api(status)) if status.code == 404 => written = None,
                Err(error) => tracing::warn!(%error, node = spec.name, "could not write the node status; it will be retried"),
            }
        }
        tokio::time::sleep(shared.timings.status_period).await;
    }
}

/// Create the node's Lease. Nothing depends on it, but `kubectl describe node` reports a failure without one.
async fn lease(client: &kube::Client, node: &str) {
    let api: Api<Lease> = Api::namespaced(client.clone(), "kube-node-lease");
    let lease = serde_json::json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": node},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": MicroTime(Timestamp::now())},
    });
    if let Err(error) = api
        .patch(node, &PatchParams::apply("kubelet").force(), &Patch::Apply(lease))
        .await
    {
        tracing::debug!(%error, node, "could not write the node's Lease");
    }
}

/// Create the object if it does not exist. Return the extended resources that an older object still shows although the checkpoint is
/// missing: they become 0, because the kubelet takes the node for a new one.
async fn register(api: &Api<Node>, shared: &KubeletState, spec: &NodeDescription) -> kube::Result<Vec<String>> {
    if let Some(node) = api.get_opt(&spec.name).await? {
        let labels = serde_json::json!({"metadata": {"labels": labels(spec)}});
        let has = |key: &String, value: &String| node.metadata.labels.as_ref().and_then(|all| all.get(key)) == Some(value);
        if !self::labels(spec).iter().all(|(key, value)| has(key, value)) {
            api.patch(&spec.name, &PatchParams::default(), &Patch::Merge(labels)).await?;
        }
        let shown = node.status.and_then(|status| status.capacity).unwrap_or_default();
        let extended = shown
            .into_keys()
            .filter(|name| name.contains('/') && shared.manager.checkpoint_was_missing);
        return Ok(extended.collect());
    }
    let node = Node {
        metadata: ObjectMeta {
            name: Some(spec.name.clone()),
            labels: Some(labels(spec)),
            ..ObjectMeta::default()
        },
        ..Node::default()
    };
    match api.create(&PostParams::default(), &node).await {
        Ok(_) => Ok(Vec::new()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}
