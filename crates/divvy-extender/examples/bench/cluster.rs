use std::fmt::Write as _;

use serde_json::{Value, json};

const GPUS: usize = 8;
/// Units (GiB) of a GPU.
const UNITS: u64 = 40;

/// A cluster by its numbers; every object follows from its position.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cluster {
    pub(crate) nodes: usize,
    pub(crate) pods: usize,
    /// Pods that are not bound.
    pub(crate) waiting: usize,
}

/// Units to ask for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asks {
    pub(crate) everywhere: u64,
    pub(crate) half: u64,
    pub(crate) nowhere: u64,
}

/// Numbers that look random and are always the same (splitmix64).
fn scattered(n: usize) -> u64 {
    let mut z = (n as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Cluster {
    pub(crate) fn name(i: usize) -> String {
        format!("gpu-node-{i:05}.cluster.example")
    }

    fn uuid(node: usize, gpu: usize) -> String {
        format!(
            "GPU-{node:08x}-{gpu:04x}-4000-8000-{:012x}",
            scattered(node * GPUS + gpu) >> 16
        )
    }

    /// Node, GPU and units of a pod that is bound: two at most on a GPU, of less than half of it each.
    fn place(&self, pod: usize) -> (usize, usize, u64) {
        (pod % self.nodes, pod / self.nodes % GPUS, 4 + scattered(pod) % 16)
    }

    /// What is asked for, by what the nodes have left.
    pub(crate) fn asks(&self) -> Asks {
        let mut free = vec![[UNITS; GPUS]; self.nodes];
        for pod in 0..self.pods {
            let (node, gpu, units) = self.place(pod);
            free[node][gpu] = free[node][gpu].saturating_sub(units);
        }
        let mut largest: Vec<u64> = free.iter().map(|gpus| gpus.iter().copied().max().unwrap_or(0)).collect();
        largest.sort_unstable();
        Asks {
            everywhere: largest.first().copied().unwrap_or(1).min(4),
            half: largest.get(largest.len() / 2).copied().unwrap_or(1),
            nowhere: largest.last().copied().unwrap_or(0) + 1,
        }
    }

    /// The nodes in an order of no meaning, as kube-scheduler sends them.
    pub(crate) fn shuffled_names(&self) -> Vec<String> {
        let mut order: Vec<usize> = (0..self.nodes).collect();
        order.sort_by_key(|i| scattered(*i));
        order.into_iter().map(Cluster::name).collect()
    }

    pub(crate) fn node(&self, i: usize) -> String {
        let gpus: Vec<Value> = (0..GPUS)
            .map(|gpu| {
                json!({"uuid": Cluster::uuid(i, gpu), "kind": "gpu", "parent": null, "index": gpu, "minor": gpu, "pci": format!("0000:{gpu:02x}:00.0"),
                    "model": "NVIDIA A100-SXM4-40GB", "cc": "8.0", "sms": 108, "clockMHz": 1410, "totalMiB": UNITS * 1024, "reserveMiB": 0,
                    "units": UNITS, "heldMiB": 0, "numa": gpu / 4, "health": "ok", "reason": null, "links": []})
            })
            .collect();
        let inventory = json!({"v": 1, "agent": "0.1.0", "driver": "550.54.15", "unitMiB": 1024, "gpus": gpus}).to_string();
        let amounts = json!({"aliyun.com/gpu-mem": (UNITS * GPUS as u64).to_string(), "aliyun.com/gpu-count": GPUS.to_string(),
            "cpu": "128", "memory": "1056270380Ki", "pods": "110", "ephemeral-storage": "1855466092Ki", "hugepages-2Mi": "0"});
        let images: Vec<Value> = (0..30)
            .map(|image| {
                json!({"names": [format!("registry.example/team/image-{image}@sha256:{:064x}", scattered(image)), format!("registry.example/team/image-{image}:v1")],
                    "sizeBytes": 123_456_789})
            })
            .collect();
        let conditions: Vec<Value> = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"]
            .map(|kind| json!({"type": kind, "status": "False", "lastHeartbeatTime": "2026-01-01T00:00:00Z", "reason": "KubeletHasSufficientMemory", "message": "kubelet has sufficient memory available"}))
            .to_vec();
        json!({"apiVersion": "v1", "kind": "Node",
            "metadata": {"name": Cluster::name(i), "uid": format!("node-{i}"), "resourceVersion": "1", "annotations": {"divvy.dev/inventory": inventory},
                "labels": {"kubernetes.io/hostname": Cluster::name(i), "topology.kubernetes.io/zone": "a", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"},
                "managedFields": managed_fields()},
            "spec": {"podCIDR": "10.0.0.0/24"},
            "status": {"capacity": amounts, "allocatable": amounts, "conditions": conditions, "images": images,
                "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": Cluster::name(i)}]}})
        .to_string()
    }

    /// Those that are bound come first.
    pub(crate) fn pod(&self, i: usize) -> String {
        let (node, gpu, units) = self.place(i);
        let mut pod = pod_that_asks(if i < self.pods { units } else { 1 });
        pod["metadata"]["name"] = json!(pod_name(i));
        pod["metadata"]["uid"] = json!(pod_uid(i));
        if i < self.pods {
            let uuid = Cluster::uuid(node, gpu);
            let memory = units * 1024;
            let mut annotations = divvy_model::legacy::bind_annotations(gpu as u32, UNITS, units, 1_700_000_000_000_000_000);
            let ours = json!({"v": 1, "gpus": [{"uuid": uuid, "memMiB": memory, "cores": 0, "whole": false}],
                "containers": {"main": [{"uuid": uuid, "memMiB": memory, "cores": 0}]}});
            annotations.insert("divvy.dev/allocation".to_owned(), ours.to_string());
            pod["metadata"]["annotations"] = json!(annotations);
            pod["spec"]["nodeName"] = json!(Cluster::name(node));
            let conditions = ["Initialized", "Ready", "ContainersReady", "PodScheduled"]
                .map(|kind| json!({"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}));
            pod["status"] = json!({"phase": "Running", "podIP": "10.1.2.3", "startTime": "2026-01-01T00:00:00Z",
                "conditions": conditions,
                "containerStatuses": [{"name": "main", "ready": true, "restartCount": 0, "image": "registry.example/team/trainer:v1",
                    "imageID": format!("registry.example/team/trainer@sha256:{:064x}", 1), "containerID": format!("containerd://{:064x}", scattered(i)),
                    "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}]});
        }
        pod.to_string()
    }

    /// The body of a bind of one of the pods that wait, each to another node.
    pub(crate) fn bind(&self, waiting: usize) -> String {
        let i = self.pods + waiting;
        let node = Cluster::name(scattered(waiting) as usize % self.nodes);
        json!({"PodName": pod_name(i), "PodNamespace": "team-a", "PodUID": pod_uid(i), "Node": node}).to_string()
    }

    /// Where in the list a pod of this name is.
    pub(crate) fn position(name: &str) -> Option<usize> {
        name.rsplit('-').next()?.parse().ok()
    }
}

fn pod_name(i: usize) -> String {
    format!("trainer-7c9d8b6f5d-{i}")
}

fn pod_uid(i: usize) -> String {
    let n = scattered(i);
    format!("{:08x}-{:04x}-4000-8000-{i:012x}", n >> 32, n & 0xffff)
}

/// A pod as a ReplicaSet makes it, in the size that the API server sends.
pub(crate) fn pod_that_asks(units: u64) -> Value {
    let env: Vec<Value> = (0..6)
        .map(|i| json!({"name": format!("SETTING_{i}"), "value": "some/value/of/ordinary/length"}))
        .collect();
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "asking", "generateName": "trainer-7c9d8b6f5d-", "namespace": "team-a", "uid": "asking", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app": "trainer", "pod-template-hash": "7c9d8b6f5d", "team": "a"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "trainer-7c9d8b6f5d", "uid": "11111111-2222-4333-8444-555555555555", "controller": true, "blockOwnerDeletion": true}],
            "managedFields": managed_fields()},
        "spec": {"restartPolicy": "Always", "schedulerName": "default-scheduler", "serviceAccountName": "default", "terminationGracePeriodSeconds": 30,
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}],
            "volumes": [{"name": "kube-api-access", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}],
            "containers": [{"name": "main", "image": "registry.example/team/trainer:v1", "command": ["python", "train.py"], "env": env,
                "resources": {"limits": {"aliyun.com/gpu-mem": units.to_string(), "cpu": "4", "memory": "16Gi"}, "requests": {"aliyun.com/gpu-mem": units.to_string(), "cpu": "2", "memory": "8Gi"}},
                "volumeMounts": [{"name": "kube-api-access", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true}]}]},
        "status": {"phase": "Pending"}})
}

fn managed_fields() -> Value {
    let mut fields = serde_json::Map::new();
    for i in 0..12 {
        let mut key = String::new();
        let _ = write!(key, "f:someFieldOfTheObject{i}");
        fields.insert(key, json!({"f:inner": {}}));
    }
    json!([{"manager": "kube-controller-manager", "operation": "Update", "apiVersion": "v1", "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": fields},
           {"manager": "kubelet", "operation": "Update", "apiVersion": "v1", "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": fields, "subresource": "status"}])
}
