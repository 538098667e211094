//! A simulated machine with device numbers, file times, and files that cannot be read.

use std::collections::BTreeMap;

use divvy_cdi::SpecFormat;
use divvy_cdi::generate::{GenerateOptions, nvidia, proc};
use divvy_doctor::Facts;
use divvy_doctor::facts::cluster::{
    CheckedMeta, CheckedNode, CheckedNodeInfo, CheckedNodeStatus, CheckedPod, CheckedPodSpec, CheckedPodStatus, ClusterFacts,
    ContainerFacts, DaemonSet, RuntimeClass, Texts,
};
use divvy_doctor::facts::programs::{
    Docker, ExtenderFacts, ExtenderVersion, Probed, ProbedGpu, RuntimeOutcome, RuntimeTest, Socket,
};
use divvy_doctor::{Asked, ReportLine, checks};
use divvy_host::{PathMetadata, Tree};

use divvy_testkit::machine::{MachineFiles, kinds};

/// The files of a machine, with device numbers, modification times, and unreadable files.
#[derive(Debug, Default, Clone)]
pub(crate) struct Host {
    pub(crate) files: MachineFiles,
    numbers: BTreeMap<String, (u32, u32)>,
    times: BTreeMap<String, i64>,
    unreadable: Vec<String>,
}

impl Host {
    pub(crate) fn of(files: MachineFiles) -> Host {
        Host {
            files,
            ..Host::default()
        }
    }

    pub(crate) fn number(&mut self, path: &str, major: u32, minor: u32) -> &mut Host {
        self.numbers.insert(path.to_owned(), (major, minor));
        self
    }

    pub(crate) fn written(&mut self, path: &str, seconds: i64) -> &mut Host {
        self.times.insert(path.to_owned(), seconds);
        self
    }

    /// Make a file unreadable, as it would be for a user without permission.
    pub(crate) fn unreadable(&mut self, path: &str) -> &mut Host {
        self.unreadable.push(path.to_owned());
        self
    }

    /// Add a kubelet that uses containerd 2 with NVIDIA's runtime, as kubeadm and NVIDIA's toolkit set them up.
    fn kubernetes(&mut self) -> &mut Host {
        self.files
            .file("/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n")
            .file("/proc/sys/kernel/arch", "x86_64\n")
            .file("/proc/modules", "br_netfilter 36864 0 - Live 0x0\noverlay 163840 9 - Live 0x0\n")
            .file("/etc/modules-load.d/k8s.conf", "overlay\nbr_netfilter\n")
            .file("/usr/bin/nvidia-container-runtime", "\x7fELF")
            .file(
                "/var/lib/dpkg/status",
                "Package: libc6\nStatus: install ok installed\nVersion: 2.36-9\n\nPackage: nvidia-container-toolkit\nStatus: install ok installed\nVersion: 1.17.8-1\n",
            )
            .file("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
            .file(
                "/var/lib/kubelet/config.yaml",
                "kind: KubeletConfiguration\ncgroupDriver: systemd\ncontainerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n",
            )
            .file("/etc/containerd/config.toml", CONTAINERD)
            .file("/proc/stat", "cpu  1 2 3\nbtime 1700000000\n")
            .file("/proc/700/comm", "containerd\n")
            .file("/proc/700/cmdline", "/usr/bin/containerd\0")
            .file(
                "/proc/700/stat",
                "700 (containerd) S 1 700 700 0 -1 1 2 3 4 5 6 7 8 9 20 0 12 0 1000 5 6\n",
            )
            .node("/var/lib/kubelet/device-plugins/kubelet.sock")
            .node("/var/lib/kubelet/device-plugins/divvy-gpu-mem-a1b2c3.sock")
            .node("/var/lib/kubelet/pod-resources/kubelet.sock")
            .file(
                "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
                r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"aliyun.com/gpu-mem":["GPU-0::m0","GPU-0::m1"]}},"Checksum":1}"#,
            );
        self.control_plane();
        self.written("/etc/containerd/config.toml", 1_700_000_005)
    }

    /// Replace a part of containerd's configuration.
    pub(crate) fn containerd(&mut self, from: &str, to: &str) -> &mut Host {
        assert!(CONTAINERD.contains(from), "{from}");
        self.files.file("/etc/containerd/config.toml", CONTAINERD.replace(from, to));
        self
    }

    pub(crate) fn pci(&mut self, address: &str, vendor: &str, class: &str, driver: &str) -> &mut Host {
        let directory = format!("/sys/devices/pci0000:00/{address}");
        self.files
            .file(&format!("{directory}/vendor"), format!("{vendor}\n"))
            .file(&format!("{directory}/class"), format!("{class}\n"))
            .link(&format!("{directory}/driver"), &format!("../../../bus/pci/drivers/{driver}"))
            .link(
                &format!("/sys/bus/pci/devices/{address}"),
                &format!("../../../devices/pci0000:00/{address}"),
            );
        self
    }
}

impl Tree for Host {
    fn names(&self, directory: &str) -> Vec<String> {
        self.files.names(directory)
    }

    fn stat(&self, path: &str) -> Option<PathMetadata> {
        self.files.stat(path)
    }

    fn read(&self, path: &str, limit: usize) -> Option<Vec<u8>> {
        if self.unreadable.iter().any(|other| other == path) {
            None
        } else {
            self.files.read(path, limit)
        }
    }

    fn device(&self, path: &str) -> Option<(u32, u32)> {
        self.numbers.get(path).copied()
    }

    fn modified(&self, path: &str) -> Option<i64> {
        self.times.get(path).copied()
    }

    fn troubles(&self) -> Vec<String> {
        let denied = |path: &String| format!("{path}: Permission denied (os error 13)");
        self.unreadable.iter().map(denied).collect()
    }
}

const CONTAINERD: &str = r#"version = 3
disabled_plugins = []

[plugins."io.containerd.cri.v1.runtime"]
enable_cdi = true

[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = true

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
SystemdCgroup = true
"#;

/// Return the host of [`debian`] with Docker instead of Kubernetes.
pub(crate) fn docker() -> Host {
    let mut host = debian();
    for path in [
        "/etc/containerd/config.toml",
        "/var/lib/kubelet/config.yaml",
        "/proc/700/comm",
    ] {
        host.files.remove(path);
    }
    host.files.file(
        "/etc/docker/daemon.json",
        r#"{"runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime", "runtimeArgs": []}}}"#,
    );
    host
}

/// Return a healthy Debian host with driver 550 and two GPUs.
pub(crate) fn debian() -> Host {
    let mut host = Host::of(kinds::debian());
    host.files
        .file("/etc/os-release", "PRETTY_NAME=\"Debian 12\"\nID=debian\n")
        .file("/sys/module/nvidia/version", "550.54.15\n")
        .file(
            "/proc/devices",
            "Character devices:\n  1 mem\n195 nvidia\n511 nvidia-uvm\n\nBlock devices:\n195 nothing\n",
        )
        .link("/dev/char/195:255", "../nvidiactl")
        .link("/dev/char/195:0", "../nvidia0")
        .link("/dev/char/195:1", "../nvidia1")
        .link("/dev/char/511:0", "../nvidia-uvm");
    host.number("/dev/nvidiactl", 195, 255)
        .number("/dev/nvidia0", 195, 0)
        .number("/dev/nvidia1", 195, 1)
        .number("/dev/nvidia-uvm", 511, 0)
        .pci("0000:06:00.0", "0x10de", "0x030200", "nvidia")
        .pci("0000:81:00.0", "0x10de", "0x030200", "nvidia")
        .pci("0000:01:00.0", "0x8086", "0x020000", "ixgbe");
    host.kubernetes();
    let spec = nvidia::generate(
        &host.files,
        &proc::gpus(&host.files),
        None,
        &GenerateOptions::new("nvidia.com"),
    );
    let spec = spec.expect("a spec").spec.print(SpecFormat::Yaml);
    host.files.file("/var/run/cdi/nvidia.yaml", spec);
    host
}

/// Return a host with two MI300X GPUs.
pub(crate) fn amd() -> Host {
    let mut host = Host::of(kinds::mi300());
    host.files.file("/sys/module/amdgpu/drivers/pci:amdgpu/bind", "");
    for address in ["0000:0c:00.0", "0000:22:00.0"] {
        host.pci(address, "0x1002", "0x120000", "amdgpu");
        let directory = format!("/sys/devices/pci0000:00/{address}");
        host.files
            .file(&format!("{directory}/current_compute_partition"), "SPX\n")
            .file(&format!("{directory}/current_memory_partition"), "NPS1\n");
    }
    host
}

/// Return a host with two Intel GPUs.
pub(crate) fn intel() -> Host {
    let mut host = Host::of(kinds::intel());
    host.pci("0000:00:02.0", "0x8086", "0x030000", "i915")
        .pci("0000:4d:00.0", "0x8086", "0x038000", "i915");
    host.files.file("/sys/module/i915/srcversion", "1\n");
    host
}

/// Return a host with a network card, but without a GPU.
pub(crate) fn none() -> Host {
    let mut host = Host::of(kinds::none());
    host.pci("0000:01:00.0", "0x8086", "0x020000", "ixgbe");
    host
}

/// Return what the driver reports on the host of [`debian`].
pub(crate) fn probed() -> Probed {
    let gpu = |index: u32| ProbedGpu {
        uuid: format!("GPU-{index:08x}-11c1-52b8-0517-92f30e7fac88"),
        index,
        model: "NVIDIA A100-SXM4-40GB".to_owned(),
        cc: "8.0".to_owned(),
        compute_mode: Some("default".to_owned()),
        persistence: Some(true),
        mig: Some((false, false)),
        ..ProbedGpu::default()
    };
    Probed {
        driver: "550.54.15".to_owned(),
        gpus: vec![gpu(0), gpu(1)],
        unreadable: Vec::new(),
    }
}

/// Return facts from the host's files, with healthy answers of all programs and of the cluster.
pub(crate) fn facts(host: &Host) -> Facts<'_> {
    let mut facts = Facts::of(host).expect("a machine");
    facts.probe = Asked::Answer(probed());
    facts.kernel_log = Asked::Answer(String::new());
    if host.stat("/etc/docker/daemon.json").is_some() {
        facts.docker = Asked::Answer(Docker {
            version: "27.3.1".to_owned(),
            default_runtime: "runc".to_owned(),
            runtimes: vec!["runc".to_owned(), "nvidia".to_owned()],
        });
    }
    let answers = |path: &str| Socket {
        path: format!("/var/lib/kubelet/{path}"),
        error: None,
    };
    facts.sockets = Asked::Answer(vec![
        answers("device-plugins/kubelet.sock"),
        answers("device-plugins/divvy-gpu-mem-a1b2c3.sock"),
        answers("pod-resources/kubelet.sock"),
    ]);
    facts.runtime_test = Asked::Answer(RuntimeTest {
        program: "/usr/local/bin/divvy-runtime".to_owned(),
        outcome: RuntimeOutcome::Devices(vec!["/dev/nvidia0".to_owned(), "/dev/nvidiactl".to_owned()]),
    });
    facts.extender = Asked::Answer(ExtenderFacts {
        url: "http://127.0.0.1:32766".to_owned(),
        version: ExtenderVersion::Known("0.1.0".to_owned()),
        filter_calls: Some(7),
        left_out: Vec::new(),
    });
    facts.cluster = Asked::Answer(cluster());
    facts
}

/// Run one check.
pub(crate) fn one(id: &str, facts: &Facts<'_>) -> ReportLine {
    ReportLine::of(checks::by_id(id).expect("a check"), facts)
}

/// Return a healthy cluster.
pub(crate) fn cluster() -> ClusterFacts {
    let node = |name: &str| CheckedNode {
        metadata: CheckedMeta {
            labels: map(&[("divvy.dev/gpu", "true"), ("kubernetes.io/os", "linux")]),
            ..named(name)
        },
        status: CheckedNodeStatus {
            capacity: map(&[("cpu", "8"), ("aliyun.com/gpu-mem", "80"), ("aliyun.com/gpu-count", "2")]),
            allocatable: map(&[("cpu", "8"), ("aliyun.com/gpu-mem", "80"), ("aliyun.com/gpu-count", "2")]),
            node_info: CheckedNodeInfo {
                kubelet_version: "v1.33.2".to_owned(),
                container_runtime_version: "containerd://2.1.3".to_owned(),
            },
        },
        ..CheckedNode::default()
    };
    let mut agent = plugin("divvy-agent", "ghcr.io/divvy-dev/divvy:0.1.0");
    agent.metadata.labels = map(&[("app.kubernetes.io/name", "divvy")]);
    let mut extender = pod("divvy-extender-7d9", "ghcr.io/divvy-dev/divvy:0.1.0");
    extender.metadata.namespace = "divvy-system".to_owned();
    let mut train = pod("train", "nvcr.io/nvidia/pytorch:24.05-py3");
    train.spec.containers[0].resources.limits = map(&[("aliyun.com/gpu-mem", "8")]);
    let mut nodes = vec![node("gpu-1"), node("gpu-2")];
    let inventory = r#"{"v":1,"agent":"0.1.0","driver":"550.54.15","unitMiB":1024,"gpus":[]}"#;
    nodes[0]
        .metadata
        .annotations
        .insert("divvy.dev/inventory", inventory.to_owned());
    ClusterFacts {
        nodes,
        pods: vec![extender, train, pod("web", "nginx")],
        daemon_sets: vec![agent],
        runtime_classes: vec![RuntimeClass {
            metadata: named("nvidia"),
            handler: "nvidia".to_owned(),
        }],
        refused: BTreeMap::new(),
    }
}

/// Return a running pod on node gpu-1.
pub(crate) fn pod(name: &str, image: &str) -> CheckedPod {
    CheckedPod {
        metadata: CheckedMeta {
            namespace: "ml".to_owned(),
            ..named(name)
        },
        spec: CheckedPodSpec {
            node_name: Some("gpu-1".to_owned()),
            containers: vec![ContainerFacts {
                name: "main".to_owned(),
                image: image.to_owned(),
                ..ContainerFacts::default()
            }],
            ..CheckedPodSpec::default()
        },
        status: CheckedPodStatus {
            phase: "Running".to_owned(),
            ..CheckedPodStatus::default()
        },
    }
}

/// Return a DaemonSet that runs on the nodes with GPUs.
pub(crate) fn plugin(name: &str, image: &str) -> DaemonSet {
    let mut set = DaemonSet {
        metadata: CheckedMeta {
            namespace: "divvy-system".to_owned(),
            ..named(name)
        },
        ..DaemonSet::default()
    };
    set.spec.template.spec.node_selector = map(&[("divvy.dev/gpu", "true")]);
    set.spec.template.spec.containers = pod("", image).spec.containers;
    set.status.desired_number_scheduled = 2;
    set
}

pub(crate) fn named(name: &str) -> CheckedMeta {
    CheckedMeta {
        name: name.to_owned(),
        ..CheckedMeta::default()
    }
}

pub(crate) fn map(entries: &[(&str, &str)]) -> Texts {
    entries.iter().copied().collect()
}

const MANIFEST: &str = r#"apiVersion: v1
kind: Pod
metadata: {name: kube-scheduler, namespace: kube-system}
spec:
  containers:
  - name: kube-scheduler
    image: registry.k8s.io/kube-scheduler:v1.33.2
    command: [kube-scheduler, --config=/etc/kubernetes/scheduler/config.yaml, --leader-elect=true]
    volumeMounts: [{name: config, mountPath: /etc/kubernetes/scheduler}]
  volumes:
  - {name: config, hostPath: {path: /etc/divvy-scheduler, type: DirectoryOrCreate}}
"#;

const SCHEDULER: &str = r#"apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
extenders:
- urlPrefix: http://127.0.0.1:32766/gpushare-scheduler
  ignorable: false
  managedResources: [{name: aliyun.com/gpu-mem, ignoredByScheduler: false}]
"#;

impl Host {
    fn control_plane(&mut self) -> &mut Host {
        self.files
            .file("/etc/kubernetes/manifests/kube-scheduler.yaml", MANIFEST)
            .file("/etc/divvy-scheduler/config.yaml", SCHEDULER);
        self
    }

    /// Replace a part of kube-scheduler's static pod.
    pub(crate) fn manifest(&mut self, from: &str, to: &str) -> &mut Host {
        assert!(MANIFEST.contains(from), "{from}");
        self.files
            .file("/etc/kubernetes/manifests/kube-scheduler.yaml", MANIFEST.replace(from, to));
        self
    }

    /// Replace a part of kube-scheduler's configuration.
    pub(crate) fn scheduler(&mut self, from: &str, to: &str) -> &mut Host {
        assert!(SCHEDULER.contains(from), "{from}");
        self.files
            .file("/etc/divvy-scheduler/config.yaml", SCHEDULER.replace(from, to));
        self
    }
}
