//! Where the configuration goes, and who must be told, on each distribution. Each text is complete: lines that begin with `#`
//! explain, the others are typed or pasted.
//!
//! Sources: kubeadm's `phases/controlplane/manifests.go`; k3s' `pkg/daemons/control/server.go` and k3s#5354; rke2's
//! `pkg/podexecutor/staticpod.go` and its flag `kube-scheduler-extra-mount`; k0s' `pkg/component/controller/scheduler.go`;
//! microk8s' `default-args/kube-scheduler`; kind#4173 (kubeadm v1beta4 from Kubernetes 1.36 on).

use super::Stanza;

/// A distribution of Kubernetes whose scheduler can be configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Distribution {
    /// kubeadm, and what is built on it: a static pod
    Kubeadm,
    /// k3s: the scheduler is inside the k3s process
    K3s,
    /// RKE2: a static pod that rke2-server writes
    Rke2,
    /// k0s: a process below k0s
    K0s,
    /// MicroK8s: the scheduler is inside kubelite
    Microk8s,
    /// kind: nodes in containers, told at creation
    Kind,
}

impl Distribution {
    /// The kubeconfig that the scheduler itself uses there.
    pub fn kubeconfig(self) -> &'static str {
        match self {
            Distribution::Kubeadm | Distribution::Kind => "/etc/kubernetes/scheduler.conf",
            Distribution::K3s => "/var/lib/rancher/k3s/server/cred/scheduler.kubeconfig",
            Distribution::Rke2 => "/var/lib/rancher/rke2/server/cred/scheduler.kubeconfig",
            Distribution::K0s => "/var/lib/k0s/pki/scheduler.conf",
            Distribution::Microk8s => "/var/snap/microk8s/current/credentials/scheduler.config",
        }
    }

    /// Where the configuration goes.
    pub fn file(self) -> &'static str {
        match self {
            Distribution::Kubeadm | Distribution::Kind => "/etc/kubernetes/divvy-scheduler.yaml",
            Distribution::K3s => "/etc/rancher/k3s/divvy-scheduler.yaml",
            Distribution::Rke2 => "/etc/rancher/rke2/divvy-scheduler.yaml",
            Distribution::K0s => "/etc/k0s/divvy-scheduler.yaml",
            Distribution::Microk8s => "/var/snap/microk8s/current/args/divvy-scheduler.yaml",
        }
    }

    /// What to do there. `flags`: what must be passed on to `divvy scheduler-config`.
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
        // Without looking at who it is: curl needs files for that, and this is about the way only.
        let curl = if stanza.https() { "curl -sk" } else { "curl -s" };
        let curl = match self {
            Distribution::Kind => format!("docker exec kind-control-plane {curl} {version}"),
            _ => format!("{curl} {version}"),
        };
        let tls = if stanza.secret() {
            "# The configuration holds the scheduler's key: nobody else may read it, and after a new certificate authority it is to be made again.\n"
        } else if stanza.https() {
            "# The files of --tls-… must be there too, readable by the scheduler; where it is a pod, mounted beside the configuration.\n"
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
{tls}# Does it work? From a control plane node the extender must answer 0.1.0:
{curl}
#   No answer at 127.0.0.1? The extender listens on the loopback address of the node that it runs on, so each scheduler on another node needs
#   another: install it with a Service (the chart's default), and take address and certificates from there with --from-cluster. A NodePort is not served at 127.0.0.1 by kube-proxy in nftables or IPVS mode; take a node's address.
#   No answer at a Service's name? A scheduler on the host's network does not ask the cluster's DNS; take the address.
# And the scheduler must ask it:
{check}
";

const KUBEADM: &str = "\
# kubeadm: kube-scheduler is a static pod. On every control plane node, one after the other:

# 1. The configuration. Not into /etc/kubernetes/manifests: the kubelet takes every file there for a pod.
#    If the manifest has a --config already, merge into that file instead: divvy scheduler-config --merge FILE -o FILE
sudo {make} -o {file}

# 2. Tell the scheduler. A copy of the manifest first, elsewhere for the same reason.
sudo cp /etc/kubernetes/manifests/kube-scheduler.yaml /root/kube-scheduler.yaml.before
sudoedit /etc/kubernetes/manifests/kube-scheduler.yaml
#    Add the lines with a + (without the +); the pod sees only files that are mounted:
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

# 3. The kubelet restarts the pod by itself when the manifest changes, within some 20 s. If it does not come back:
kubectl -n kube-system get pods -l component=kube-scheduler
sudo crictl logs $(sudo crictl ps -a --name kube-scheduler -q | head -1)
#    Later changes of the configuration alone restart nothing: move the manifest out of the folder, wait until the pod is gone, move it back.

# 4. So that `kubeadm upgrade` does not undo it: kubectl -n kube-system edit configmap kubeadm-config, and under ClusterConfiguration
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
# k3s: the scheduler is inside k3s, and there is no static pod. On every server node, one after the other:

# 1. The configuration.
sudo {make} -o {file}

# 2. Tell k3s: in /etc/rancher/k3s/config.yaml (make it if it is not there; if it has a kube-scheduler-arg list, add the item to it)
#      kube-scheduler-arg:
#      - config={file}

# 3. Restart. Pods go on running meanwhile.
sudo systemctl restart k3s
sudo journalctl -u k3s --since -2min | grep -i scheduler
";

const RKE2: &str = "\
# RKE2: rke2-server writes the scheduler's static pod, and would undo an edit of it. On every server node, one after the other:

# 1. The configuration.
sudo {make} -o {file}

# 2. Tell RKE2: in /etc/rancher/rke2/config.yaml; the pod sees only files that are mounted
#      kube-scheduler-arg:
#      - config={file}
#      kube-scheduler-extra-mount:
#      - {file}:{file}

# 3. Restart. Pods go on running meanwhile.
sudo systemctl restart rke2-server
sudo tail -20 /var/log/pods/kube-system_kube-scheduler-*/kube-scheduler/*.log
";

const K0S: &str = "\
# k0s: the scheduler is a process below k0s, under the user kube-scheduler. On every controller node, one after the other:

# 1. The configuration, readable by that user.
sudo {make} -o {file}
sudo chmod 644 {file}

# 2. Tell k0s: in /etc/k0s/k0s.yaml (with --enable-dynamic-config: k0s config edit, and no restart is needed)
#      spec:
#        scheduler:
#          extraArgs:
#            config: {file}

# 3. Restart. Pods go on running meanwhile.
sudo systemctl restart k0scontroller
sudo journalctl -u k0scontroller --since -2min | grep kube-scheduler
";

const MICROK8S: &str = "\
# MicroK8s: the scheduler is inside kubelite. On every node that runs the control plane, one after the other:

# 1. The configuration.
sudo {make} -o {file}

# 2. Tell MicroK8s: one line more in its file of arguments.
echo '--config={file}' | sudo tee -a /var/snap/microk8s/current/args/kube-scheduler

# 3. Restart. Pods go on running meanwhile. If kubelite does not come up, take the line out again.
sudo snap restart microk8s.daemon-kubelite
sudo journalctl -u snap.microk8s.daemon-kubelite --since -2min | grep -i -E 'scheduler|error'
";

const KIND: &str = "\
# kind: nodes are containers, and the scheduler is told when the cluster is created. From the machine into the node (extraMounts), from the
# node into the scheduler's pod (extraVolumes).

# 1. The configuration, here on the machine.
{make} -o divvy-scheduler.yaml

# 2. A cluster with it. kind reads the second patch from Kubernetes 1.36 on and the first before; each is for its own version only.
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

# 3. What the scheduler says if the cluster does not come up (create it with --retain then):
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
    fn no_distribution_is_told_to_put_the_file_among_the_static_pods() {
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
