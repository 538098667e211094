//! Cases for the checks of the operating system, the container engine, and the toolkit.

use divvy_doctor::facts::cluster::{ClusterFacts, RuntimeClass};
use divvy_doctor::facts::programs::Docker;
use divvy_doctor::{Asked, Facts};
use divvy_host::Tree as _;

use super::Change::{By, Containerd, File, Remove};
use super::{Case, answers, files, notes, warns};
use crate::host::{Host, debian, docker, named};

pub(super) const CASES: &[Case] = &[
    files("R01", debian, File("/proc/sys/kernel/arch", "riscv64\n"), "riscv64"),
    files(
        "R01",
        debian,
        File("/proc/sys/kernel/osrelease", "3.10.0-1160.el7.x86_64\n"),
        "3.10.0",
    ),
    warns(files(
        "R02",
        debian,
        File("/proc/modules", "overlay 1\n"),
        "not loaded: br_netfilter",
    )),
    warns(files(
        "R02",
        debian,
        File("/etc/modules-load.d/k8s.conf", "overlay\nbr_netfilte\n"),
        "\"br_netfilte\"",
    )),
    notes(files(
        "R02",
        debian,
        Remove("/etc/modules-load.d/k8s.conf"),
        "no file in /etc/modules-load.d names it",
    )),
    files(
        "R03",
        debian,
        By(|host| {
            host.files
                .remove("/var/run/cdi/nvidia.yaml")
                .remove("/usr/bin/nvidia-container-runtime");
        }),
        "there is no CDI spec, no divvy-runtime",
    ),
    files(
        "R03",
        debian,
        By(|host| {
            toolkit(host, "1.6.0-1");
            host.files.remove("/var/run/cdi/nvidia.yaml");
        }),
        "nvidia-container-toolkit 1.6.0-1",
    ),
    warns(files(
        "R04",
        debian,
        By(|host| toolkit(host, "1.7.2-1")),
        "cgroup v2 and nvidia-container-toolkit 1.7.2-1",
    )),
    notes(files(
        "R05",
        debian,
        By(|host| {
            host.files
                .file(
                    "/var/lib/kubelet/config.yaml",
                    "containerRuntimeEndpoint: unix:///run/k3s/containerd/containerd.sock\n",
                )
                .file("/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "version = 3\n");
        }),
        "/etc/containerd/config.toml exists but is not used",
    )),
    Case {
        base: docker,
        ..answers("R06", |facts| engine_version(facts, "1.11.2"), "Docker 1.11.2")
    },
    warns(Case {
        base: docker,
        ..answers("R06", |facts| engine_version(facts, "18.09.1"), "Docker 18.09.1")
    }),
    files(
        "R07",
        docker,
        File("/etc/docker/daemon.json", "{\n  // GPUs\n}"),
        "JSON has no comments",
    ),
    files(
        "R07",
        docker,
        Remove("/usr/bin/nvidia-container-runtime"),
        "but that file does not exist",
    ),
    files(
        "R07",
        docker,
        File("/etc/docker/daemon.json", "{}"),
        "no runtime for GPUs, and Docker is not set up for CDI",
    ),
    files(
        "R07",
        docker,
        File(
            "/etc/docker/daemon.json",
            r#"{"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}}}"#,
        ),
        "dockerd was not restarted: the default runtime in the file is nvidia, but dockerd uses runc",
    ),
    files(
        "R07",
        docker,
        File(
            "/var/lib/kubelet/config.yaml",
            "containerRuntimeEndpoint: unix:///var/run/cri-dockerd.sock\n",
        ),
        "the kubelet runs pods on Docker, whose default runtime is runc",
    ),
    files(
        "R08",
        debian,
        By(|host| {
            host.containerd("version = 3", "version = 2");
            containerd_package(host, "1.7.27-1");
        }),
        "the section plugins.\"io.containerd.cri.v1.runtime\", which containerd 1.7 does not use",
    ),
    files("R08", debian, Containerd("version = 3", "version = "), "is not valid TOML"),
    files(
        "R09",
        debian,
        Remove("/usr/bin/nvidia-container-runtime"),
        "the runtime nvidia is /usr/bin/nvidia-container-runtime, but there is no such program",
    ),
    files(
        "R08",
        debian,
        By(|host| {
            host.containerd("version = 3", "version = 3\nimports = [\"conf.d/*.toml\"]");
            host.files.file("/etc/containerd/conf.d/99-nvidia.toml", "version = 4\n");
            containerd_package(host, "2.3.2-1");
        }),
        "99-nvidia.toml has version 4, and containerd 2.3.0 to 2.3.4 accepts no imported file with a higher version",
    ),
    files(
        "R09",
        debian,
        Containerd("BinaryName = \"/usr/bin/nvidia-container-runtime\"", ""),
        "names no program",
    ),
    files(
        "R09",
        debian,
        By(|host| {
            host.containerd("enable_cdi = true", "enable_cdi = false");
            without_runtime(host);
        }),
        "has no runtime for GPUs and does not use CDI",
    ),
    warns(Case {
        answers: |facts| facts.cluster = Asked::Not("it was not asked".to_owned()),
        ..files(
            "R10",
            debian,
            Containerd("enable_cdi = true", "enable_cdi = false"),
            "nvidia is not the default runtime; whether pods select it",
        )
    }),
    Case {
        answers: |facts| facts.cluster = Asked::Answer(ClusterFacts::default()),
        ..files(
            "R10",
            debian,
            Containerd("enable_cdi = true", "enable_cdi = false"),
            "no RuntimeClass has the handler nvidia",
        )
    },
    files(
        "R11",
        debian,
        Containerd("default_runtime_name = \"runc\"", "default_runtime_name = \"crun\""),
        "the default runtime \"crun\" is not",
    ),
    answers(
        "R11",
        |facts| {
            let dump = "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.nvidia]\n";
            facts.containerd = Asked::Answer(dump.to_owned());
        },
        "the default runtime \"runc\" is not among the defined runtimes \"nvidia\"",
    ),
    files(
        "R12",
        debian,
        Containerd("disabled_plugins = []", "disabled_plugins = [\"cri\"]"),
        "config.toml has \"cri\" in disabled_plugins",
    ),
    files(
        "R13",
        debian,
        Containerd("container-runtime\"\nSystemdCgroup = true", "container-runtime\""),
        "nvidia uses cgroupfs; the kubelet's cgroup driver is systemd",
    ),
    answers(
        "R14",
        |facts| {
            let class = RuntimeClass {
                metadata: named("nvidia-legacy"),
                handler: "nvidia-legacy".to_owned(),
            };
            facts.cluster = Asked::Answer(ClusterFacts {
                runtime_classes: vec![class],
                ..ClusterFacts::default()
            });
        },
        "RuntimeClass nvidia-legacy has the handler \"nvidia-legacy\", but containerd on this node has nvidia, runc",
    ),
    notes(files(
        "R15",
        debian,
        Containerd("enable_cdi = true", "enable_cdi = false"),
        "CDI is switched off in containerd",
    )),
    notes(files(
        "R15",
        debian,
        Remove("/var/run/cdi/nvidia.yaml"),
        "no spec describes the NVIDIA GPUs",
    )),
    notes(files(
        "R15",
        debian,
        By(|host| {
            host.files.remove("/var/run/cdi/nvidia.yaml").remove("/var/run/cdi");
        }),
        "neither /etc/cdi nor /var/run/cdi exists",
    )),
    warns(files(
        "R16",
        debian,
        By(|host| {
            host.written("/etc/containerd/config.toml", 1_700_000_011);
        }),
        "was written after containerd was started",
    )),
    warns(files(
        "R16",
        debian,
        By(|host| {
            // Docker's own containerd, which started later, is a different process.
            host.files
                .file("/proc/800/comm", "containerd\n")
                .file(
                    "/proc/800/cmdline",
                    "containerd\0--config\0/var/run/docker/containerd/containerd.toml\0",
                )
                .file(
                    "/proc/800/stat",
                    "800 (containerd) S 1 700 700 0 -1 1 2 3 4 5 6 7 8 9 20 0 12 0 9000 5 6\n",
                );
            host.written("/etc/containerd/config.toml", 1_700_000_011);
        }),
        "/etc/containerd/config.toml was written after containerd was started",
    )),
];

fn containerd_package(host: &mut Host, version: &str) {
    let package = format!("Package: containerd.io\nStatus: install ok installed\nVersion: {version}\n");
    host.files.file("/var/lib/dpkg/status", package);
}

fn toolkit(host: &mut Host, version: &str) {
    let package = format!("Package: nvidia-container-toolkit\nStatus: install ok installed\nVersion: {version}\n");
    host.files.file("/var/lib/dpkg/status", package);
}

fn engine_version(facts: &mut Facts<'_>, version: &str) {
    facts.docker = Asked::Answer(Docker {
        version: version.to_owned(),
        ..Docker::default()
    });
}

/// Remove the table of the GPU runtime, and everything after it, from the configuration.
fn without_runtime(host: &mut Host) {
    let path = "/etc/containerd/config.toml";
    let text = String::from_utf8(host.read(path, usize::MAX).expect("a file")).expect("text");
    let (before, _) = text
        .split_once("[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.nvidia]")
        .expect("a table");
    host.files.file(path, before);
}
