//! kube-scheduler, however a distribution starts it.

use divvy_doctor::facts::programs::SchedulerFile;
use divvy_doctor::{Asked, CheckStatus};

use crate::host::{Host, debian, facts, one};

const CONFIGURATION: &str = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n\
    clientConnection: {kubeconfig: /etc/kubernetes/scheduler.conf}\n\
    extenders:\n- {urlPrefix: 'http://127.0.0.1:32766/gpushare-scheduler', managedResources: [{name: aliyun.com/gpu-mem}]}\n";

/// Return a host with these files, and no static pod of kubeadm.
fn with(files: &[(&str, &str)]) -> Host {
    let mut host = debian();
    host.files.remove("/etc/kubernetes/manifests/kube-scheduler.yaml");
    host.files.file("/etc/kubernetes/scheduler.conf", "kind: Config\n");
    for (path, text) in files {
        host.files.file(path, *text);
    }
    host
}

/// Return a static pod with this command, these mounts, and these volumes.
fn pod(command: &str, mounts: &str, volumes: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - {{name: proxy, image: proxy}}\n  - name: kube-scheduler\n    image: registry/kube-scheduler:v1.33.2@sha256:ab\n    \
         command: {command}\n    volumeMounts: {mounts}\n  volumes: {volumes}\n"
    )
}

#[test]
fn every_distributions_scheduler_configuration_is_found() {
    let file = "/etc/kubernetes/divvy.yaml";
    let all = (
        "[{name: k, mountPath: /etc/kubernetes/}]",
        "[{name: k, hostPath: {path: /etc/kubernetes/}}]",
    );
    let manifest = "/etc/kubernetes/manifests/kube-scheduler.yaml";
    let in_two = pod("[kube-scheduler, --config, /etc/kubernetes/divvy.yaml]", all.0, all.1);
    let shell = pod(
        "[/bin/sh, -c, exec kube-scheduler --config=/etc/kubernetes/divvy.yaml --v=2]",
        all.0,
        all.1,
    );
    let nested = pod(
        "[kube-scheduler, --config=/etc/kubernetes/deep/x.yaml]",
        "[{name: d, mountPath: /etc/kubernetes/deep}, {name: k, mountPath: /etc/kubernetes}]",
        "[{name: k, hostPath: {path: /etc/kubernetes}}, {name: d, hostPath: {path: /opt/deep}}]",
    );
    let sub = pod(
        "[kube-scheduler, --config=/a/x.yaml]",
        "[{name: k, mountPath: /a, subPath: deep}, {name: c, mountPath: /etc/kubernetes/scheduler.conf}]",
        "[{name: k, hostPath: {path: /opt}}, {name: c, hostPath: {path: /etc/kubernetes/scheduler.conf}}]",
    );
    let microk8s = "/var/snap/microk8s/current/args/kube-scheduler";
    for (files, found) in [
        (&[(manifest, in_two.as_str()), (file, CONFIGURATION)][..], file),
        (
            &[
                ("/etc/kubernetes/manifests/kube-scheduler.manifest", &shell),
                (file, CONFIGURATION),
            ],
            file,
        ),
        (
            &[
                ("/var/lib/kubelet/config.yaml", "staticPodPath: /opt/pods\n"),
                ("/opt/pods/s.yaml", &in_two),
                (file, CONFIGURATION),
            ],
            file,
        ),
        (
            &[(manifest, &nested), ("/opt/deep/x.yaml", CONFIGURATION)],
            "/opt/deep/x.yaml",
        ),
        (&[(manifest, &sub), ("/opt/deep/x.yaml", CONFIGURATION)], "/opt/deep/x.yaml"),
        (
            &[
                ("/var/lib/rancher/rke2/agent/pod-manifests/kube-scheduler.yaml", &in_two),
                (file, CONFIGURATION),
            ],
            file,
        ),
        (
            &[
                (
                    "/etc/rancher/k3s/config.yaml",
                    "kube-scheduler-arg:\n- config=/etc/kubernetes/divvy.yaml\n",
                ),
                (file, CONFIGURATION),
            ],
            file,
        ),
        (
            &[
                ("/etc/rancher/k3s/config.yaml", "kube-scheduler-arg: [config=/old.yaml]\n"),
                (
                    "/etc/rancher/k3s/config.yaml.d/10.yaml",
                    "kube-scheduler-arg: --config=/etc/kubernetes/divvy.yaml\n",
                ),
                ("/etc/rancher/k3s/config.yaml.d/20.yaml", "kube-scheduler-arg+: [v=2]\n"),
                (file, CONFIGURATION),
            ],
            file,
        ),
        (
            &[
                (
                    "/etc/rancher/rke2/config.yaml",
                    "kube-scheduler-arg: [config=/x/divvy.yaml]\nkube-scheduler-extra-mount: ['/etc/kubernetes:/x', '/etc/kubernetes:/etc/kubernetes']\n",
                ),
                (file, CONFIGURATION),
            ],
            file,
        ),
        (
            &[
                (
                    "/etc/k0s/k0s.yaml",
                    "spec: {scheduler: {extraArgs: {config: /etc/kubernetes/divvy.yaml}}}\n",
                ),
                (file, CONFIGURATION),
            ],
            file,
        ),
        (
            &[
                (microk8s, "--kubeconfig=${SNAP_DATA}/c\n--config=${SNAP_DATA}/args/s.yaml\n"),
                ("/var/snap/microk8s/current/args/s.yaml", CONFIGURATION),
            ],
            "/var/snap/microk8s/current/args/s.yaml",
        ),
        (
            &[
                ("/proc/950/comm", "kube-scheduler\n"),
                (
                    "/proc/950/cmdline",
                    "/usr/bin/kube-scheduler\0--config\0/etc/kubernetes/divvy.yaml\0",
                ),
                (file, CONFIGURATION),
            ],
            file,
        ),
    ] {
        let line = one("K11", &facts(&with(files)));
        assert_eq!(line.status, CheckStatus::Pass, "{files:?}: {line:?}");
        assert!(line.found.starts_with(found), "{files:?}: {line:?}");
    }
}

#[test]
fn a_relative_path_starts_in_the_directory_of_kube_scheduler() {
    let mut host = with(&[
        ("/proc/950/comm", "kube-scheduler\n"),
        ("/proc/950/cmdline", "kube-scheduler\0--config=divvy.yaml\0"),
        ("/srv/cluster/divvy.yaml", CONFIGURATION),
    ]);
    // Without the link, the file is not known: no statement about its extenders.
    let unknown = facts(&host);
    assert_eq!(one("K11", &unknown).status, CheckStatus::Skip);
    let line = one("K12", &unknown);
    assert!(line.found.ends_with("configuration cannot be read (K11)"), "{line:?}");
    host.files.link("/proc/950/cwd", "/srv/cluster");
    let line = one("K11", &facts(&host));
    assert_eq!(line.status, CheckStatus::Pass, "{line:?}");
    assert!(line.found.starts_with("/srv/cluster/divvy.yaml"), "{line:?}");
}

#[test]
fn a_kubeconfig_that_kube_scheduler_cannot_read_is_named() {
    let k3s = ("/etc/rancher/k3s/config.yaml", "kube-scheduler-arg: [config=/etc/s.yaml]\n");
    let mut host = with(&[k3s, ("/etc/s.yaml", CONFIGURATION)]);
    host.files.remove("/etc/kubernetes/scheduler.conf");
    let line = one("K11", &facts(&host));
    assert_eq!(line.status, CheckStatus::Fail, "{line:?}");
    assert!(line.found.ends_with("there is no /etc/kubernetes/scheduler.conf"), "{line:?}");
    let fix = line.fix.unwrap_or_default();
    assert!(fix.contains("--for k3s") && fix.ends_with("systemctl restart k3s"), "{fix}");
    let unmounted = pod(
        "[kube-scheduler, --config=/x/divvy.yaml]",
        "[{name: k, mountPath: /x}]",
        "[{name: k, hostPath: {path: /etc/divvy}}]",
    );
    let manifest = "/etc/kubernetes/manifests/kube-scheduler.yaml";
    let line = one(
        "K11",
        &facts(&with(&[(manifest, &unmounted), ("/etc/divvy/divvy.yaml", CONFIGURATION)])),
    );
    assert!(line.found.ends_with("no volume of the pod contains that file"), "{line:?}");
}

#[test]
fn what_scheduler_config_refuses_stops_kube_scheduler() {
    let host = debian();
    let mut facts = facts(&host);
    facts.scheduler_file = Asked::Answer(SchedulerFile {
        stops: vec!["extenders[1] has a bindVerb".to_owned()],
        misplaces: vec!["added: percentageOfNodesToScore".to_owned()],
    });
    let line = one("K10", &facts);
    assert_eq!(line.status, CheckStatus::Fail);
    assert_eq!(line.found, "/etc/divvy-scheduler/config.yaml: extenders[1] has a bindVerb");
    assert_eq!(one("K12", &facts).status, CheckStatus::Warn);
    // The field may be one of a newer kube-scheduler.
    let unknown = SchedulerFile {
        stops: vec!["warning: newField: not a field".to_owned()],
        misplaces: Vec::new(),
    };
    facts.scheduler_file = Asked::Answer(unknown.clone());
    assert_eq!(one("K10", &facts).status, CheckStatus::Fail);
    let mut newer = debian();
    newer.manifest("v1.33.2", "v1.38.0");
    let mut facts = crate::host::facts(&newer);
    facts.scheduler_file = Asked::Answer(unknown);
    assert_eq!(one("K10", &facts).status, CheckStatus::Pass);
}
