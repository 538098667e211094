//! The files and the kubelet's cgroup driver of each distribution.

use divvy_engines::{Engine, EngineTarget, Error, RuntimeSettings, WantedFiles, containerd, runtime_class};

use super::editing::{settings, there_and_back};
use crate::{CONTAINERD, Tree, tree};

fn target(engine: Engine, files: &Tree) -> EngineTarget {
    engine.target(files, &WantedFiles::default()).expect("a target")
}

const K3S: &str = "/var/lib/rancher/k3s/agent/etc/containerd";

#[test]
fn k3s_gets_an_imported_drop_in_or_template() {
    let generated = format!("{K3S}/config.toml");
    let base = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n\
                [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]\nSystemdCgroup = true\n";
    let newer = format!("version = 3\nimports = [\"{K3S}/config-v3.toml.d/*.toml\"]\n{base}");
    let files = tree([(&generated, &newer)]);
    let (after, _) = there_and_back(
        &files,
        &target(Engine::K3s, &files),
        &RuntimeSettings {
            set_default: Some(true),
            ..settings()
        },
    );
    assert_eq!(after[&generated], newer, "k3s writes this file itself");
    let read = containerd::read(&after, &generated, containerd::Merge::Keys).expect("read");
    assert_eq!(read.default_runtime.as_deref(), Some("nvidia"));
    assert_eq!(read.runtimes["nvidia"].systemd_cgroup, Some(true));
    for (text, template) in [
        (format!("version = 3\n{base}"), "config-v3.toml.tmpl"),
        ("version = 2\n".to_owned(), "config.toml.tmpl"),
    ] {
        let files = tree([(&generated, &text)]);
        let (after, _) = there_and_back(&files, &target(Engine::K3s, &files), &settings());
        assert!(
            after[&format!("{K3S}/{template}")].starts_with("{{ template \"base\" . }}\n"),
            "{template}"
        );
    }
}

#[test]
fn k0s_gets_a_drop_in_of_the_version_of_its_own_file() {
    for (text, section) in [
        ("version = 3\n", "io.containerd.cri.v1.runtime"),
        ("version = 2\n", "io.containerd.grpc.v1.cri"),
    ] {
        let files = tree([("/etc/k0s/containerd.toml", text)]);
        let (after, _) = there_and_back(&files, &target(Engine::K0s, &files), &settings());
        let drop_in = &after["/etc/k0s/containerd.d/zz-divvy.toml"];
        assert!(
            drop_in.contains(text) && drop_in.contains(section) && !drop_in.contains("runc]"),
            "{drop_in}"
        );
    }
}

#[test]
fn microk8s_template_is_edited_where_it_is() {
    let path = "/var/snap/microk8s/current/args/containerd-template.toml";
    let text = "# Use config version 2\nversion = 2\noom_score = 0\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n    \
                default_runtime_name = \"${RUNTIME}\"\n    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n      \
                runtime_type = \"${RUNTIME_TYPE}\"\n";
    let files = tree([(path, text)]);
    let target = target(Engine::Microk8s, &files);
    let (after, _) = there_and_back(&files, &target, &settings());
    assert!(after[path].starts_with(text), "{}", after[path]);
    assert_eq!(
        divvy_engines::configure(&files, &target, &settings(), None)
            .expect("planned")
            .notes,
        [""; 0]
    );
}

#[test]
fn engines_are_known_by_their_files() {
    let known = |path: &str| -> Vec<Engine> {
        let files = tree([(path, "")]);
        Engine::ALL
            .into_iter()
            .filter(|engine| engine.evidence(&files).is_some())
            .collect()
    };
    for (path, engine) in [
        ("/usr/bin/dockerd", Engine::Docker),
        ("/etc/docker/daemon.json", Engine::Docker),
        (CONTAINERD, Engine::Containerd),
        ("/usr/bin/crio", Engine::Crio),
        ("/var/lib/rancher/k3s/agent/x", Engine::K3s),
        ("/var/lib/rancher/rke2/agent/x", Engine::Rke2),
        ("/etc/k0s/k0s.yaml", Engine::K0s),
        ("/var/snap/microk8s/current/args/kubelet", Engine::Microk8s),
    ] {
        assert_eq!(known(path), [engine], "{path}");
    }
    assert_eq!(known("/etc/passwd"), []);
}

#[test]
fn the_kubelet_s_own_file_says_its_cgroup_driver() {
    let of = |engine: Engine, path: &str, text: &str| engine.kubelet_driver(&tree([(path, text)]));
    let kubelet = "/var/lib/kubelet/config.yaml";
    let config = |line: &str| {
        format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{line}clusterDNS: [10.96.0.10]\n")
    };
    assert_eq!(
        of(Engine::Containerd, kubelet, &config("cgroupDriver: systemd\n")),
        Ok(Some((true, kubelet.to_owned())))
    );
    assert_eq!(
        of(Engine::Crio, kubelet, &config("cgroupDriver: cgroupfs\n")),
        Ok(Some((false, kubelet.to_owned())))
    );
    assert_eq!(of(Engine::Containerd, kubelet, &config("")), Ok(None));
    assert_eq!(of(Engine::Containerd, "/etc/other", ""), Ok(None));
    for text in [config("cgroupDriver: cgroup2\n"), "a: [".to_owned()] {
        assert!(matches!(
            of(Engine::Containerd, kubelet, &text),
            Err(Error::Unreadable { .. })
        ));
    }
    let args = "/var/snap/microk8s/current/args/kubelet";
    assert_eq!(
        of(Engine::Microk8s, args, "--root-dir=x\n--cgroup-driver=systemd\n"),
        Ok(Some((true, args.to_owned())))
    );
}

#[test]
fn a_runtime_class_names_the_handler() {
    insta::assert_snapshot!(runtime_class("nvidia"));
}
