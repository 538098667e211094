//! Nodes and pods in the form in which an API server sends them. Every object is determined by its position, without a clock or
//! random numbers.

use clap::ValueEnum;
use divvy_model::{legacy, names};
use divvy_testkit::dice::Dice;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// The memory of a GPU in units (GiB).
pub const UNITS: u64 = 40;
/// The namespace of all pods.
pub const NAMESPACE: &str = "team-a";
/// The largest number of pods on one GPU.
pub const PODS_PER_GPU: usize = 2;

/// The annotations that the objects have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// No annotations of Divvy: nodes have no inventory, and pods have only the annotations of gpushare
    Gpushare,
    /// Nodes have an inventory, and pods have an allocation in addition to the annotations of gpushare
    Divvy,
}

impl Form {
    /// Return the name of the form on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Form::Gpushare => "gpushare",
            Form::Divvy => "divvy",
        }
    }
}

/// The size and form of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterSize {
    /// The number of nodes.
    pub nodes: usize,
    /// The number of GPUs of each node.
    pub gpus: usize,
    /// The number of bound pods. Each of them requests GPU memory.
    pub pods: usize,
    /// The number of pods that are not bound yet. Their positions follow those of the bound pods.
    pub waiting: usize,
    /// The annotations that the objects have.
    pub form: Form,
}

/// Amounts of GPU memory for requests, in units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asks {
    /// An amount that fits on every node.
    pub everywhere: u64,
    /// An amount that fits on half of the nodes.
    pub half: u64,
    /// An amount that fits on no node.
    pub nowhere: u64,
}

/// Return a number that looks random but is always the same for `n`.
pub fn scattered(n: usize) -> u64 {
    Dice::at(n as u64)
}

fn hex64(n: usize) -> String {
    let (a, b) = (scattered(n), scattered(n.wrapping_add(0x5eed)));
    format!("{a:016x}{b:016x}{:016x}{:016x}", a.rotate_left(17) ^ b, b.rotate_left(29) ^ a)
}

/// Return a time `n` seconds after the start of 2026.
fn time(n: usize) -> String {
    let (day, second) = (n / 86_400 % 28 + 1, n % 86_400);
    format!(
        "2026-01-{day:02}T{:02}:{:02}:{:02}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

fn address(node: usize) -> String {
    format!("10.{}.{}.{}", 64 + node / 65_536 % 64, node / 256 % 256, node % 256)
}

impl ClusterSize {
    /// Return the name of a node.
    pub fn name(i: usize) -> String {
        format!("gpu-node-{i:05}.cluster.example")
    }

    fn uuid(node: usize, gpu: usize) -> String {
        format!("GPU-{node:08x}-{gpu:04x}-4000-8000-{:012x}", scattered(node * 64 + gpu) >> 16)
    }

    /// Return the node, GPU, and units of a bound pod. Each pod takes less than half of a GPU.
    fn place(&self, pod: usize) -> (usize, usize, u64) {
        let node = pod % self.nodes.max(1);
        (node, pod / self.nodes.max(1) % self.gpus.max(1), 4 + scattered(pod) % 16)
    }

    /// Return the positions of the pods that are bound to a node.
    pub fn pods_of(&self, node: usize) -> impl Iterator<Item = usize> {
        (node..self.pods).step_by(self.nodes.max(1))
    }

    /// Return amounts for requests, which are derived from the free memory of the nodes.
    pub fn asks(&self) -> Asks {
        let mut free = vec![vec![UNITS; self.gpus]; self.nodes];
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

    /// Return the names of the nodes in an arbitrary order, because kube-scheduler sends them in an arbitrary order.
    pub fn shuffled_names(&self) -> Vec<String> {
        let mut order: Vec<usize> = (0..self.nodes).collect();
        order.sort_by_key(|i| scattered(*i));
        order.into_iter().map(ClusterSize::name).collect()
    }

    /// Return the position of the node with this name.
    pub fn node_position(&self, name: &str) -> Option<usize> {
        let number = name.strip_prefix("gpu-node-")?.split('.').next()?;
        number
            .parse()
            .ok()
            .filter(|i| *i < self.nodes && ClusterSize::name(*i) == name)
    }

    /// Return the position of the pod with this name.
    pub fn pod_position(&self, name: &str) -> Option<usize> {
        let number = name.rsplit('-').next()?.parse().ok()?;
        (number < self.pods + self.waiting && pod_name(number) == name).then_some(number)
    }

    /// Return a node as an item of a list, without `apiVersion` and `kind`.
    pub fn node(&self, i: usize) -> Value {
        let units = UNITS * self.gpus as u64;
        let amounts = |cpu: &str, memory: &str| {
            json!({"aliyun.com/gpu-count": self.gpus.to_string(), "aliyun.com/gpu-mem": units.to_string(), "cpu": cpu,
                "ephemeral-storage": "1855466092Ki", "hugepages-1Gi": "0", "hugepages-2Mi": "0", "memory": memory, "pods": "110"})
        };
        let images: Vec<Value> = (0..25)
            .map(|image| {
                let name = format!("registry.example/team/image-{image}");
                json!({"names": [format!("{name}@sha256:{}", hex64(image)), format!("{name}:v1.{image}.0")], "sizeBytes": 123_456_789 + image})
            })
            .collect();
        let conditions: Vec<Value> = [
            (
                "MemoryPressure",
                "False",
                "KubeletHasSufficientMemory",
                "kubelet has sufficient memory available",
            ),
            (
                "DiskPressure",
                "False",
                "KubeletHasNoDiskPressure",
                "kubelet has no disk pressure",
            ),
            (
                "PIDPressure",
                "False",
                "KubeletHasSufficientPID",
                "kubelet has sufficient PID available",
            ),
            ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
        ]
        .iter()
        .map(|(kind, status, reason, message)| {
            json!({"lastHeartbeatTime": time(80_000), "lastTransitionTime": time(i), "message": message, "reason": reason,
                "status": status, "type": kind})
        })
        .collect();
        let mut annotations = Map::from_iter([
            (
                "csi.volume.kubernetes.io/nodeid".to_owned(),
                json!(format!(r#"{{"csi.example":"{}"}}"#, ClusterSize::name(i))),
            ),
            ("node.alpha.kubernetes.io/ttl".to_owned(), json!("30")),
            (
                "volumes.kubernetes.io/controller-managed-attach-detach".to_owned(),
                json!("true"),
            ),
        ]);
        if self.form == Form::Divvy {
            annotations.insert(names::INVENTORY.to_owned(), json!(self.inventory(i)));
        }
        let labels = json!({"beta.kubernetes.io/arch": "amd64", "beta.kubernetes.io/os": "linux", "gpushare": "true", "kubernetes.io/arch": "amd64",
            "kubernetes.io/hostname": ClusterSize::name(i), "kubernetes.io/os": "linux", "node.kubernetes.io/instance-type": "gpu.8xlarge",
            "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "topology.kubernetes.io/region": "region-1",
            "topology.kubernetes.io/zone": format!("region-1{}", ["a", "b", "c"][i % 3])});
        let system = format!("{:032x}", u128::from(scattered(i)));
        json!({
            "metadata": {"name": ClusterSize::name(i), "uid": format!("{:08x}-0000-4000-8000-{i:012x}", scattered(i) >> 32),
                "resourceVersion": "1000000", "creationTimestamp": time(i), "labels": labels, "annotations": annotations,
                "managedFields": [
                    managed("kubelet", "Update", "", fields(&["f:metadata", "f:annotations", "f:volumes.kubernetes.io/controller-managed-attach-detach"])),
                    managed("kube-controller-manager", "Update", "", fields(&["f:spec", "f:podCIDR", "f:podCIDRs", "v:\"10.244.0.0/24\""])),
                    managed("kubelet", "Update", "status", fields(&["f:status", "f:allocatable", "f:capacity", "f:aliyun.com/gpu-count",
                        "f:aliyun.com/gpu-mem", "f:conditions", "k:{\"type\":\"Ready\"}", "f:lastHeartbeatTime", "f:images", "f:nodeInfo"]))]},
            "spec": {"podCIDR": "10.244.0.0/24", "podCIDRs": ["10.244.0.0/24"], "providerID": format!("example:///region-1/{system}")},
            "status": {"capacity": amounts("128", "1056270380Ki"), "allocatable": amounts("127600m", "1055118380Ki"), "conditions": conditions,
                "addresses": [{"type": "InternalIP", "address": address(i)}, {"type": "Hostname", "address": ClusterSize::name(i)}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
                "nodeInfo": {"machineID": system, "systemUUID": system, "bootID": system, "kernelVersion": "6.8.0-45-generic", "osImage": "Ubuntu 24.04.1 LTS",
                    "containerRuntimeVersion": "containerd://2.1.4", "kubeletVersion": "v1.33.2", "kubeProxyVersion": "", "operatingSystem": "linux",
                    "architecture": "amd64"},
                "images": images}})
    }

    fn inventory(&self, i: usize) -> String {
        let gpus: Vec<Value> = (0..self.gpus)
            .map(|gpu| {
                json!({"uuid": ClusterSize::uuid(i, gpu), "kind": "gpu", "parent": null, "index": gpu, "minor": gpu, "pci": format!("0000:{gpu:02x}:00.0"),
                    "model": "NVIDIA A100-SXM4-40GB", "cc": "8.0", "sms": 108, "clockMHz": 1410, "totalMiB": UNITS * 1024, "reserveMiB": 0,
                    "units": UNITS, "heldMiB": 0, "numa": gpu / 4, "health": "ok", "reason": null, "links": []})
            })
            .collect();
        json!({"v": 1, "agent": "0.1.0", "driver": "550.54.15", "unitMiB": 1024, "gpus": gpus}).to_string()
    }

    /// Return a pod as an item of a list, without `apiVersion` and `kind`. The bound pods come first.
    pub fn pod(&self, i: usize) -> Value {
        let (node, gpu, units) = self.place(i);
        if i >= self.pods {
            return pod_that_asks(&pod_name(i), &pod_uid(i), i, 1);
        }
        let mut pod = pod_that_asks(&pod_name(i), &pod_uid(i), i, units);
        let mut annotations = legacy::bind_annotations(gpu as u32, UNITS, units, 1_767_225_600_000_000_000 + i as u64);
        if self.form == Form::Divvy {
            let (uuid, memory) = (ClusterSize::uuid(node, gpu), units * 1024);
            let ours = json!({"v": 1, "gpus": [{"uuid": uuid, "memMiB": memory, "cores": 0, "whole": false}],
                "containers": {"main": [{"uuid": uuid, "memMiB": memory, "cores": 0}]}});
            annotations.insert(names::ALLOCATION.to_owned(), ours.to_string());
        } else {
            // The value that gpushare's plugin leaves.
            annotations.insert(names::ALIYUN_ASSIGNED.to_owned(), "true".to_owned());
        }
        pod["metadata"]["annotations"] = json!(annotations);
        pod["spec"]["nodeName"] = json!(ClusterSize::name(node));
        let conditions = [
            "PodReadyToStartContainers",
            "Initialized",
            "Ready",
            "ContainersReady",
            "PodScheduled",
        ]
        .map(|kind| json!({"type": kind, "status": "True", "lastProbeTime": null, "lastTransitionTime": time(i)}));
        let (host, ip) = (
            address(node),
            format!("10.{}.{}.{}", 128 + i / 65_536 % 64, i / 256 % 256, i % 256),
        );
        pod["status"] = json!({"phase": "Running", "conditions": conditions, "hostIP": host, "hostIPs": [{"ip": host}], "podIP": ip,
            "podIPs": [{"ip": ip}], "startTime": time(i), "qosClass": "Burstable",
            "containerStatuses": [{"name": "main", "state": {"running": {"startedAt": time(i)}}, "lastState": {}, "ready": true, "restartCount": 0,
                "image": "registry.example/team/trainer:v1", "imageID": format!("registry.example/team/trainer@sha256:{}", hex64(1)),
                "containerID": format!("containerd://{}", hex64(i)), "started": true}]});
        pod
    }

    /// Return the body of a bind request for one of the waiting pods.
    pub fn bind(&self, waiting: usize) -> String {
        let i = self.pods + waiting;
        let node = ClusterSize::name(scattered(waiting) as usize % self.nodes.max(1));
        json!({"PodName": pod_name(i), "PodNamespace": NAMESPACE, "PodUID": pod_uid(i), "Node": node}).to_string()
    }
}

/// Return the name of the pod at this position.
pub fn pod_name(i: usize) -> String {
    format!("trainer-7c9d8b6f5d-{i}")
}

fn pod_uid(i: usize) -> String {
    let n = scattered(i);
    format!("{:08x}-{:04x}-4000-8000-{i:012x}", n >> 32, n & 0xffff)
}

/// Return a new pod in the form in which kube-scheduler sends it to an extender.
pub fn asking(units: u64) -> Value {
    with_kind("Pod", pod_that_asks("asking", "asking", 0, units))
}

/// Return an object with `apiVersion` and `kind`, as it appears outside of lists.
pub fn with_kind(kind: &str, mut object: Value) -> Value {
    object["kind"] = json!(kind);
    object["apiVersion"] = json!("v1");
    object
}

/// Return a pod as a ReplicaSet creates it.
fn pod_that_asks(name: &str, uid: &str, i: usize, units: u64) -> Value {
    let env: Vec<Value> = [
        ("MASTER_ADDR", "trainer-master.team-a.svc.cluster.local"),
        ("NCCL_DEBUG", "INFO"),
    ]
    .iter()
    .map(|(name, value)| json!({"name": name, "value": value}))
    .collect();
    let amounts = |cpu: &str, memory: &str| json!({"aliyun.com/gpu-mem": units.to_string(), "cpu": cpu, "memory": memory});
    let toleration = |key: &str| json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300});
    json!({
        "metadata": {"name": name, "generateName": "trainer-7c9d8b6f5d-", "namespace": NAMESPACE, "uid": uid, "resourceVersion": "1000000",
            "creationTimestamp": time(i), "labels": {"app.kubernetes.io/name": "trainer", "pod-template-hash": "7c9d8b6f5d", "team": "a"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "trainer-7c9d8b6f5d",
                "uid": "11111111-2222-4333-8444-555555555555", "controller": true, "blockOwnerDeletion": true}],
            "managedFields": [
                managed("kube-controller-manager", "Update", "", fields(&["f:metadata", "f:generateName", "f:labels", "f:ownerReferences", "f:spec",
                    "f:containers", "k:{\"name\":\"main\"}", "f:resources"])),
                managed("kubelet", "Update", "status", fields(&["f:status", "f:conditions", "f:containerStatuses", "f:phase", "f:podIPs"]))]},
        "spec": {
            "volumes": [
                {"name": "kube-api-access-x7k2p", "projected": {"defaultMode": 420, "sources": [
                    {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}}]}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
            "containers": [{"name": "main", "image": "registry.example/team/trainer:v1", "command": ["python", "-m", "trainer", "--config=/etc/trainer.yaml"],
                "env": env, "resources": {"limits": amounts("4", "16Gi"), "requests": amounts("2", "8Gi")},
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"},
                    {"name": "kube-api-access-x7k2p", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true}],
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File", "imagePullPolicy": "IfNotPresent"}],
            "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst", "serviceAccountName": "default",
            "serviceAccount": "default", "securityContext": {}, "schedulerName": "default-scheduler",
            "tolerations": [toleration("node.kubernetes.io/not-ready"), toleration("node.kubernetes.io/unreachable")],
            "priority": 0, "enableServiceLinks": true, "preemptionPolicy": "PreemptLowerPriority"},
        "status": {"phase": "Pending", "qosClass": "Burstable"}})
}

fn managed(manager: &str, operation: &str, subresource: &str, fields: Value) -> Value {
    let mut entry = json!({"manager": manager, "operation": operation, "apiVersion": "v1", "time": time(0), "fieldsType": "FieldsV1", "fieldsV1": fields});
    if !subresource.is_empty() {
        entry["subresource"] = json!(subresource);
    }
    entry
}

/// Return the nested entries of `fieldsV1` for this path.
fn fields(path: &[&str]) -> Value {
    path.iter()
        .rev()
        .fold(json!({}), |inner, name| json!({".": {}, *name: inner}))
}
