//! The steps to install the configuration on each distribution. Each text is complete: lines that start with `#` explain, and the
//! user types or pastes the other lines.
//!
//! Sources: kubeadm's `phases/controlplane/manifests.go`; k3s' `pkg/daemons/control/server.go` and k3s#5354; rke2's
//! `pkg/podexecutor/staticpod.go` and its flag `kube-scheduler-extra-mount`; k0s' `pkg/component/controller/scheduler.go`;
//! microk8s' `default-args/kube-scheduler`; kind#4173 (kubeadm v1beta4 from Kubernetes 1.36 on).

use super::Stanza;

/// A distribution of Kubernetes whose scheduler can be configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Distribution {
    /// kubeadm and distributions that use it: the scheduler is a static pod
    Kubeadm,
    /// k3s: the scheduler is part of the k3s process
    K3s,
    /// RKE2: the scheduler is a static pod that rke2-server writes
    Rke2,
    /// k0s: the scheduler is a child process of k0s
    K0s,
    /// MicroK8s: the scheduler is part of kubelite
    Microk8s,
    /// kind: nodes are containers, and the scheduler is configured when the cluster is created
    Kind,
}

impl Distribution {
    /// Return the path of the scheduler's own kubeconfig.
    pub fn kubeconfig(self) -> &'static str {
        match self {
            Distribution::Kubeadm | Distribution::Kind => "/etc/kubernetes/scheduler.conf",
            Distribution::K3s => "/var/lib/rancher/k3s/server/cred/scheduler.kubeconfig",
            Distribution::Rke2 => "/var/lib/rancher/rke2/server/cred/scheduler.kubeconfig",
            Distribution::K0s => "/var/lib/k0s/pki/scheduler.conf",
            Distribution::Microk8s => "/var/snap/microk8s/current/credentials/scheduler.config",
        }
    }

    /// Return the path for the configuration.
    pub fn file(self) -> &'static str {
        match self {
            Distribution::Kubeadm | Distribution::Kind => "/etc/kubernetes/divvy-scheduler.yaml",
            Distribution::K3s => "/etc/rancher/k3s/divvy-scheduler.yaml",
            Distribution::Rke2 => "/etc/rancher/rke2/divvy-scheduler.yaml",
            Distribution::K0s => "/etc/k0s/divvy-scheduler.yaml",
            Distribution::Microk8s => "/var/snap/microk8s/current/args/divvy-scheduler.yaml",
        }
    }

    /// Return the steps. `flags` are those that the printed `divvy scheduler-config` command must repeat.
    pub fn steps(self, kubeconfig: &str, flags: &str, stanza: &Stanza) -> String {
        let url = stanza.url();
        let file = self.file();
        let make = format!("divvy scheduler-config --kubeconfig-path {kubeconfig}{flags}");
        let version = format!("{}/version", url.trim_end_matches(super::PATH));
        let text = match self {
            Distribution::Kubeadm => KUBEADM,
            Distribution::K3s => K3S,
            Distribution::Rke2 => RKE2,
            Distribution::K0s => K0S,
            Distribution::Microk8s => MICROK8S,
            Distribution::Kind => KIND,
        };
        let check = match self {
            Distribution::Microk8s => {
                "microk8s config > /tmp/kubeconfig && divvy scheduler-config --check --kubeconfig /tmp/kubeconfig"
            }
            _ => "divvy scheduler-config --check",
        };
        // `-k` skips the verification of the certificate, which would need files. This command only tests the connection.
        let curl = if stanza.https() { "curl -sk" } else { "curl -s" };
        let curl = match self {
            Distribution::Kind => format!("docker exec kind-control-plane {curl} {version}"),
            _ => format!("{curl} {version}"),
        };
        let tls = if stanza.secret() {
            "# The configuration contains the scheduler's private key: only the scheduler may be able to read it. After a change of the CA, create it again.\n"
        } else if stanza.https() {
            "# The scheduler must also be able to read the files of --tls-…; if it is a pod, mount them next to the configuration.\n"
        } else {
            ""
        };
        format!("{text}\n{LAST}")
            .replace("{make}", &make)
            .replace("{file}", file)
            .replace("{check}", check)
            .replace("{curl}", &curl)
            .replace("{tls}", tls)
    }
}

const LAST: &str = "\
{tls}# Check the connection. On a control plane node, the extender must answer 0.1.0:
{curl}
#   If there is no answer at 127.0.0.1: the extender listens on the loopback address of its own node, so a scheduler on another node needs
#   another address. Install the extender with a Service (the chart's default), and use --from-cluster. In nftables or IPVS mode, kube-proxy does not serve a NodePort at 127.0.0.1; use a node's address.
#   If there is no answer at a Service's name: a scheduler on the host network does not use the cluster's DNS; use the Service's address.
# Check that the scheduler calls the extender:
{check}
";

const KUBEADM: &str = "\
# kubeadm: kube-scheduler is a static pod. On each control plane node, one after the other:

# 1. Create the configuration. Not in /etc/kubernetes/manifests: the kubelet treats every file there as a pod.
#    If the manifest already has --config, add Divvy's entry to that file instead: divvy scheduler-config --merge FILE -o FILE
sudo {make} -o {file}

# 2. Change the scheduler's manifest. First copy it to another directory, for the same reason.
sudo cp /etc/kubernetes/manifests/kube-scheduler.yaml /root/kube-scheduler.yaml.before
sudoedit /etc/kubernetes/manifests/kube-scheduler.yaml
#    Add the lines marked with + (without the +); the pod sees only mounted files:
#      spec:
#        containers:
#        - command:
#          - kube-scheduler
#    +     - --config={file}
#          volumeMounts:
#    +     - mountPath: {file}
#    +       name: divvy-scheduler
#    +       readOnly: true
#        volumes:
#    +   - hostPath:
#    +       path: {file}
#    +       type: File
#    +     name: divvy-scheduler

# 3. The kubelet restarts the pod automatically within about 20 s after the manifest changes. If the pod does not come back:
kubectl -n kube-system get pods -l component=kube-scheduler
sudo crictl logs $(sudo crictl ps -a --name kube-scheduler -q | head -1)
#    A later change of only the configuration restarts nothing: move the manifest out of the directory, wait until the pod is gone, and move it back.

# 4. Keep the change across `kubeadm upgrade`: kubectl -n kube-system edit configmap kubeadm-config, and add under ClusterConfiguration
#      scheduler:
#        extraArgs:                   # kubeadm.k8s.io/v1beta4; in v1beta3:  extraArgs: {config: {file}}
#        - name: config
#          value: {file}
#        extraVolumes:
#        - name: divvy-scheduler
#          hostPath: {file}
#          mountPath: {file}
#          pathType: File
#          readOnly: true
";

const K3S: &str = "\
# k3s: the scheduler is part of k3s, and there is no static pod. On each server node, one after the other:

# 1. Create the configuration.
sudo {make} -o {file}

# 2. Change /etc/rancher/k3s/config.yaml (create it if it does not exist; if it has a kube-scheduler-arg list, add the item to that list)
#      kube-scheduler-arg:
#      - config={file}

# 3. Restart. Pods keep running.
sudo systemctl restart k3s
sudo journalctl -u k3s --since -2min | grep -i scheduler
";

const RKE2: &str = "\
# RKE2: rke2-server writes the scheduler's static pod, and would overwrite any change to it. On each server node, one after the other:

# 1. Create the configuration.
sudo {make} -o {file}

# 2. Change /etc/rancher/rke2/config.yaml; the pod sees only mounted files
#      kube-scheduler-arg:
#      - config={file}
#      kube-scheduler-extra-mount:
#      - {file}:{file}

# 3. Restart. Pods keep running.
sudo systemctl restart rke2-server
sudo tail -20 /var/log/pods/kube-system_kube-scheduler-*/kube-scheduler/*.log
";

const K0S: &str = "\
# k0s: the scheduler is a child process of k0s, and runs as user kube-scheduler. On each controller node, one after the other:

# 1. Create the configuration, readable by that user.
sudo {make} -o {file}
sudo chmod 644 {file}

# 2. Change /etc/k0s/k0s.yaml (with --enable-dynamic-config: use k0s config edit, and no restart is needed)
#      spec:
#        scheduler:
#          extraArgs:
#            config: {file}

# 3. Restart. Pods keep running.
sudo systemctl restart k0scontroller
sudo journalctl -u k0scontroller --since -2min | grep kube-scheduler
";

const MICROK8S: &str = "\
# MicroK8s: the scheduler is part of kubelite. On each control plane node, one after the other:

# 1. Create the configuration.
sudo {make} -o {file}

# 2. Add a line to the scheduler's arguments file.
echo '--config={file}' | sudo tee -a /var/snap/microk8s/current/args/kube-scheduler

# 3. Restart. Pods keep running. If kubelite does not come up, remove the line again.
sudo snap restart microk8s.daemon-kubelite
sudo journalctl -u snap.microk8s.daemon-kubelite --since -2min | grep -i -E 'scheduler|error'
";

const KIND: &str = "\
# kind: nodes are containers, and the scheduler is configured when the cluster is created. The file is mounted from the machine into the node
# (extraMounts), and from the node into the scheduler's pod (extraVolumes).

# 1. Create the configuration, here on the machine.
{make} -o divvy-scheduler.yaml

# 2. Create a cluster with it. kind uses the second patch for Kubernetes 1.36 and later, and the first patch for older versions.
cat > divvy-kind.yaml <<'END'
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes:
- role: control-plane
  extraMounts:
  - hostPath: ./divvy-scheduler.yaml
    containerPath: {file}
    readOnly: true
- role: worker
kubeadmConfigPatches:
- |
  apiVersion: kubeadm.k8s.io/v1beta3
  kind: ClusterConfiguration
  scheduler:
    extraArgs:
      config: {file}
    extraVolumes:
    - {name: divvy-scheduler, hostPath: {file}, mountPath: {file}, pathType: File, readOnly: true}
- |
  apiVersion: kubeadm.k8s.io/v1beta4
  kind: ClusterConfiguration
  scheduler:
    extraArgs:
    - {name: config, value: {file}}
    extraVolumes:
    - {name: divvy-scheduler, hostPath: {file}, mountPath: {file}, pathType: File, readOnly: true}
END
kind create cluster --config divvy-kind.yaml

# 3. If the cluster does not come up, create it again with --retain, and read the scheduler's log:
docker exec kind-control-plane sh -c 'crictl logs $(crictl ps -a --name kube-scheduler -q | head -1)'
";

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::super::{LOCAL_URL, Tls};
    use super::*;

    fn stanza() -> Stanza {
        Stanza::new(LOCAL_URL, Tls::default()).expect("an address")
    }

    #[test]
    fn every_distribution_gets_lines_that_can_be_typed() {
        for distribution in Distribution::value_variants() {
            let text = distribution.steps(distribution.kubeconfig(), "", &stanza());
            for part in [
                &format!("--kubeconfig-path {} -o ", distribution.kubeconfig()),
                distribution.file(),
                "http://127.0.0.1:32766/version",
                "divvy scheduler-config --check",
            ] {
                assert!(text.contains(part), "{distribution:?} lacks {part}:\n{text}");
            }
            for left in ["{make}", "{file}", "{check}", "{curl}", "{tls}"] {
                assert!(!text.contains(left), "{distribution:?}: {left}");
            }
        }
    }

    #[test]
    fn no_distribution_puts_the_file_among_the_static_pods() {
        for distribution in Distribution::value_variants() {
            assert!(!distribution.file().contains("/manifests/"));
        }
    }

    #[test]
    fn what_kind_is_given_is_yaml_for_both_versions_of_kubeadm() {
        let text = Distribution::Kind.steps(Distribution::Kind.kubeconfig(), "", &stanza());
        let (_, file) = text.split_once("<<'END'\n").expect("a here document");
        let (file, _) = file.split_once("\nEND\n").expect("its end");
        let cluster: serde_json::Value = serde_saphyr::from_str(file).expect("it is YAML");
        let patches = cluster["kubeadmConfigPatches"].as_array().expect("patches");
        let parsed: Vec<serde_json::Value> = patches
            .iter()
            .map(|patch| serde_saphyr::from_str(patch.as_str().expect("text")).expect("it is YAML"))
            .collect();
        assert_eq!(parsed[0]["scheduler"]["extraArgs"]["config"], Distribution::Kind.file());
        assert_eq!(parsed[1]["scheduler"]["extraArgs"][0]["value"], Distribution::Kind.file());
    }

    #[test]
    fn the_steps_for_kubeadm_are_these() {
        let distribution = Distribution::Kubeadm;
        insta::assert_snapshot!(distribution.steps(distribution.kubeconfig(), "", &stanza()));
    }
}
