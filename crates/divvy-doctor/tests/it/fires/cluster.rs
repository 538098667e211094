//! Cases for the checks of the kubelet, the cluster, the scheduler, and pods.

use divvy_doctor::facts::cluster::{CheckedNode, CheckedPod, CheckedVariable, ClusterFacts, Taint, Toleration};
use divvy_doctor::facts::programs::{ExtenderFacts, ExtenderVersion, RuntimeOutcome, RuntimeTest};
use divvy_doctor::{Asked, Facts};

use super::Change::{By, File, Manifest, Remove, Scheduler};
use super::{Case, answers, files, in_cluster, notes, warns};
use crate::host::{cluster, debian, map, plugin, pod};

/// Return the healthy cluster with a change applied. The objects are reduced with [`CheckedPod::slim`] and [`CheckedNode::slim`], so the cases also
/// show that no finding needs a dropped field.
pub(super) fn changed(change: fn(&mut ClusterFacts)) -> ClusterFacts {
    let mut cluster = cluster();
    change(&mut cluster);
    cluster.pods = cluster.pods.into_iter().map(CheckedPod::slim).collect();
    cluster.nodes = cluster.nodes.into_iter().map(CheckedNode::slim).collect();
    cluster
}

fn alone(facts: &mut Facts<'_>) {
    facts.cluster = Asked::Not("it was not asked".to_owned());
}

/// Make the sockets whose path contains `part` refuse connections.
fn silent(facts: &mut Facts<'_>, part: &str) {
    let Asked::Answer(sockets) = &mut facts.sockets else {
        panic!("sockets were asked");
    };
    for socket in sockets.iter_mut().filter(|socket| socket.path.contains(part)) {
        socket.error = Some("Connection refused (os error 111)".to_owned());
    }
}

fn capacity(cluster: &mut ClusterFacts, resource: &str, capacity: &str, allocatable: &str) {
    let status = &mut cluster.nodes[0].status;
    status.capacity.insert(resource.to_owned(), capacity.to_owned());
    status.allocatable.insert(resource.to_owned(), allocatable.to_owned());
}

fn taint(cluster: &mut ClusterFacts, key: &str) {
    for node in &mut cluster.nodes {
        node.spec.taints = vec![Taint {
            key: key.to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        }];
    }
}

pub(super) const CASES: &[Case] = &[
    answers(
        "K18",
        |facts| {
            facts.runtime_test = Asked::Answer(RuntimeTest {
                program: "/usr/local/bin/divvy-runtime".to_owned(),
                outcome: RuntimeOutcome::Failed("unresolvable CDI devices nvidia.com/gpu=all".to_owned()),
            })
        },
        "/usr/local/bin/divvy-runtime fails: unresolvable CDI devices",
    ),
    answers(
        "K18",
        |facts| {
            facts.runtime_test = Asked::Answer(RuntimeTest {
                program: "/usr/local/bin/divvy-runtime".to_owned(),
                outcome: RuntimeOutcome::Devices(vec!["/dev/null".to_owned()]),
            })
        },
        "gives a container that requests all GPUs \"/dev/null\"",
    ),
    answers(
        "K18",
        |facts| facts.runtime_test = Asked::Failed("divvy-runtime did not answer within 3 s".to_owned()),
        "did not answer",
    ),
    files(
        "K02",
        debian,
        Remove("/var/lib/kubelet/device-plugins/kubelet.sock"),
        "there is no /var/lib/kubelet/device-plugins/kubelet.sock",
    ),
    answers(
        "K02",
        |facts| silent(facts, "device-plugins/kubelet.sock"),
        "no process listens: Connection refused",
    ),
    Case {
        answers: alone,
        ..files(
            "K03",
            debian,
            File(
                "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
                r#"{"Data":{"RegisteredDevices":{"aliyun.com/gpu-mem":[]}},"Checksum":1}"#,
            ),
            "no device plugin for GPUs is registered",
        )
    },
    answers(
        "K03",
        |facts| {
            alone(facts);
            silent(facts, "gpu-mem");
        },
        "the kubelet knows aliyun.com/gpu-mem (2 ids), but no device plugin listens at",
    ),
    in_cluster(
        "K03",
        |cluster| {
            cluster.nodes.truncate(1);
            cluster.nodes[0].status.capacity = map(&[("aliyun.com/gpu-mem", "0")]);
        },
        "gpu-1 has aliyun.com/gpu-mem: 0",
    ),
    warns(in_cluster(
        "K03",
        |cluster| capacity(cluster, "aliyun.com/gpu-mem", "80", "40"),
        "gpu-1 aliyun.com/gpu-mem: 40 of 80 healthy",
    )),
    in_cluster(
        "K06",
        |cluster| capacity(cluster, "aliyun.com/gpu-mem", "81920", "81920"),
        "aliyun.com/gpu-mem of gpu-1 has 81920 device ids",
    ),
    warns(in_cluster(
        "K19",
        |cluster| {
            let text = r#"{"v":1,"agent":"","driver":"","unitMiB":1024,"driverTrouble":"no CDI spec","gpus":[]}"#;
            cluster.nodes[1]
                .metadata
                .annotations
                .insert("divvy.dev/inventory", text.to_owned());
        },
        "node gpu-2: no CDI spec",
    )),
    notes(files(
        "K17",
        debian,
        Remove("/var/lib/kubelet/pod-resources/kubelet.sock"),
        "there is no /var/lib/kubelet/pod-resources/kubelet.sock",
    )),
    notes(answers("K17", |facts| silent(facts, "pod-resources"), "Connection refused")),
    warns(in_cluster(
        "K01",
        |cluster| cluster.nodes[1].status.node_info.kubelet_version = "v1.25.9".to_owned(),
        "gpu-2 (v1.25.9)",
    )),
    notes(in_cluster(
        "K01",
        |cluster| cluster.nodes[1].status.node_info.kubelet_version = "v1.28.15+k3s1".to_owned(),
        "gpu-2 (v1.28.15+k3s1)",
    )),
    in_cluster(
        "K04",
        |cluster| {
            capacity(cluster, "nvidia.com/gpu", "2", "2");
            cluster.daemon_sets.push(plugin(
                "nvidia-device-plugin-daemonset",
                "nvcr.io/nvidia/k8s-device-plugin:v0.17.1",
            ));
        },
        "node gpu-1 offers aliyun.com/gpu-mem and nvidia.com/gpu; DaemonSet divvy-system/nvidia-device-plugin-daemonset",
    ),
    warns(in_cluster(
        "K04",
        |cluster| {
            cluster
                .daemon_sets
                .push(plugin("hami-device-plugin", "docker.io/projecthami/hami:v2.5"));
        },
        "DaemonSet divvy-system/hami-device-plugin runs in addition to Divvy's",
    )),
    Case {
        answers: alone,
        ..files(
            "K04",
            debian,
            By(|host| {
                host.files.node("/var/lib/kubelet/device-plugins/nvidia-gpu.sock");
            }),
            "divvy-gpu-mem-a1b2c3.sock and nvidia-gpu.sock",
        )
    },
    warns(in_cluster(
        "K05",
        |cluster| capacity(cluster, "nvidia.com/gpu", "0", "0"),
        "gpu-1 has nvidia.com/gpu: 0",
    )),
    in_cluster(
        "K07",
        |cluster| {
            for node in &mut cluster.nodes {
                node.metadata.labels = map(&[("kubernetes.io/os", "linux")]);
            }
        },
        "DaemonSet divvy-system/divvy-agent selects nodes with divvy.dev/gpu=true, but there is none",
    ),
    in_cluster(
        "K08",
        |cluster| {
            let mut extender = pod("gpushare-schd-extender-5f", "gpushare:1");
            extender.spec.node_name = None;
            extender.spec.node_selector = map(&[("node-role.kubernetes.io/master", "")]);
            extender.status.phase = "Pending".to_owned();
            cluster.pods.push(extender);
        },
        "pod gpushare-schd-extender-5f selects a node with node-role.kubernetes.io/master=",
    ),
    in_cluster(
        "K09",
        |cluster| taint(cluster, "nvidia.com/gpu"),
        "node gpu-1 has the taint nvidia.com/gpu:NoSchedule, but DaemonSet divvy-system/divvy-agent",
    ),
    in_cluster(
        "K09",
        |cluster| {
            taint(cluster, "team");
            cluster.daemon_sets[0].spec.template.spec.tolerations = vec![Toleration {
                operator: "Exists".to_owned(),
                ..Toleration::default()
            }];
            cluster.pods[1].spec.node_name = None;
            cluster.pods[1].status.phase = "Pending".to_owned();
        },
        "pod ml/train requests a GPU but does not tolerate the taint of any node that has one: gpu-1 (team:NoSchedule), gpu-2 (team:NoSchedule)",
    ),
    files(
        "K10",
        debian,
        Scheduler("config.k8s.io/v1", "config.k8s.io/v1beta2"),
        "kubescheduler.config.k8s.io/v1beta2, which Kubernetes 1.28 removed; kube-scheduler here is v1.33.2",
    ),
    files(
        "K10",
        debian,
        Manifest("--leader-elect=true", "--policy-config-file=/x"),
        "--policy-config-file, which Kubernetes 1.23 removed",
    ),
    files(
        "K10",
        debian,
        Manifest(":v1.33.2", ":v1.22.1"),
        "which needs Kubernetes 1.25; kube-scheduler here is v1.22.1",
    ),
    warns(files(
        "K10",
        debian,
        By(|host| {
            host.scheduler("config.k8s.io/v1", "config.k8s.io/v1beta3")
                .manifest(":v1.33.2", ":v1.26.1");
        }),
        "which Kubernetes 1.29 removes",
    )),
    files(
        "K11",
        debian,
        File("/etc/divvy-scheduler/config.yaml", "\n"),
        "/etc/divvy-scheduler/config.yaml is empty",
    ),
    files(
        "K11",
        debian,
        Remove("/etc/divvy-scheduler/config.yaml"),
        "there is no /etc/divvy-scheduler/config.yaml",
    ),
    files(
        "K11",
        debian,
        Manifest("mountPath: /etc/kubernetes/scheduler", "mountPath: /somewhere"),
        "no volume of the pod contains --config=",
    ),
    files(
        "K11",
        debian,
        Manifest("--config=/etc/kubernetes/scheduler/config.yaml, ", ""),
        "without --config",
    ),
    files(
        "K12",
        debian,
        Scheduler("name: aliyun.com/gpu-mem", "name: example.com/other"),
        "only for example.com/other (managedResources)",
    ),
    files(
        "K12",
        debian,
        Scheduler("ignorable: false", "ignorable: true"),
        "is ignorable",
    ),
    files(
        "K12",
        debian,
        File("/etc/divvy-scheduler/config.yaml", "kind: KubeSchedulerConfiguration\n"),
        "has no extender for aliyun.com/gpu-mem",
    ),
    answers(
        "K12",
        |facts| {
            facts.extender = Asked::Answer(ExtenderFacts {
                url: "http://127.0.0.1:32766".to_owned(),
                version: ExtenderVersion::Unknown("Connection refused (os error 111)".to_owned()),
                filter_calls: None,
                left_out: Vec::new(),
            })
        },
        "http://127.0.0.1:32766 does not answer: Connection refused",
    ),
    warns(answers(
        "K12",
        |facts| {
            facts.extender = Asked::Answer(ExtenderFacts {
                url: "http://127.0.0.1:32766".to_owned(),
                version: ExtenderVersion::Known("0.1.0".to_owned()),
                filter_calls: Some(0),
                left_out: Vec::new(),
            })
        },
        "has never called its filter, although 1 pod requests a GPU and has no allocation",
    )),
    warns(in_cluster(
        "K13",
        |cluster| {
            cluster.pods[2].spec.containers[0].resources.limits = map(&[("aliyun.com/gpu-count", "2")]);
        },
        "ml/web requests only aliyun.com/gpu-count",
    )),
    warns(in_cluster(
        "K13",
        |cluster| {
            cluster.pods[2].spec.containers[0].resources.requests = map(&[("nvidia.com/gpu", "1")]);
        },
        "ml/web has the request nvidia.com/gpu: 1, which differs from the limit",
    )),
    warns(in_cluster(
        "K14",
        |cluster| {
            cluster.pods[1].spec.containers[0].env = vec![CheckedVariable {
                name: "NVIDIA_VISIBLE_DEVICES".to_owned(),
                value: Some("all".to_owned()),
                ..CheckedVariable::default()
            }];
        },
        "ml/train (all)",
    )),
    warns(in_cluster(
        "K15",
        |cluster| cluster.pods.push(pod("sneaky", "docker.io/nvidia/cuda:12.4.0-base")),
        "ml/sneaky",
    )),
    warns(in_cluster(
        "K16",
        |cluster| {
            cluster.pods[1].status.phase = "Failed".to_owned();
            cluster.pods[1].status.reason = "UnexpectedAdmissionError".to_owned();
        },
        "ml/train",
    )),
];
