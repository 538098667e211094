//! The objects of Divvy in a cluster, the plan to remove them, and the text of both.

use std::borrow::Cow;
use std::collections::BTreeSet;

use divvy_host::plain;
use divvy_model::{Gpu, Held, Inventory, MemoryUnit, MiB, Node, Pod, WholeKind, names};
use serde::Serialize;
use serde_json::Value;

/// A kind of object that an installation of Divvy contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstalledKind {
    /// The API group; empty for the core group.
    pub group: &'static str,
    /// The API version.
    pub version: &'static str,
    /// The kind, as in a manifest.
    pub kind: &'static str,
    /// The plural, as in a URL path of the API.
    pub plural: &'static str,
    /// Whether objects of this kind are in a namespace.
    pub namespaced: bool,
}

const fn kind(
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
    namespaced: bool,
) -> InstalledKind {
    InstalledKind {
        group,
        version,
        kind,
        plural,
        namespaced,
    }
}

const RBAC: &str = "rbac.authorization.k8s.io";
const ADMISSION: &str = "admissionregistration.k8s.io";

/// All kinds in the order of their removal: workloads first, because they write to other objects, and permissions after the
/// workloads that need them.
pub const KINDS: [InstalledKind; 17] = [
    kind("apps", "v1", "DaemonSet", "daemonsets", true),
    kind("apps", "v1", "Deployment", "deployments", true),
    kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", true),
    kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", true),
    kind("", "v1", "Service", "services", true),
    kind("", "v1", "Secret", "secrets", true),
    kind("", "v1", "ConfigMap", "configmaps", true),
    kind(
        ADMISSION,
        "v1",
        "ValidatingAdmissionPolicyBinding",
        "validatingadmissionpolicybindings",
        false,
    ),
    kind(
        ADMISSION,
        "v1",
        "ValidatingAdmissionPolicy",
        "validatingadmissionpolicies",
        false,
    ),
    kind("node.k8s.io", "v1", "RuntimeClass", "runtimeclasses", false),
    kind("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", false),
    kind(RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", false),
    kind(RBAC, "v1", "ClusterRole", "clusterroles", false),
    kind(RBAC, "v1", "RoleBinding", "rolebindings", true),
    kind(RBAC, "v1", "Role", "roles", true),
    kind("", "v1", "ServiceAccount", "serviceaccounts", true),
    LEASE,
];

/// The kind of the extender's Lease. The extender creates the Lease without labels, so it is found by its name.
pub const LEASE: InstalledKind = kind("coordination.k8s.io", "v1", "Lease", "leases", true);

/// An installation of Divvy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// The prefix of the objects' names.
    pub name: String,
    /// The namespace of the agents and the extender.
    pub namespace: String,
}

impl Release {
    /// Return the label selector for the objects of the installation.
    pub fn selector(&self) -> String {
        format!("app.kubernetes.io/name=divvy,app.kubernetes.io/instance={}", self.name)
    }

    /// Return the flags that select this installation. The text is empty for the default installation.
    fn flags(&self) -> String {
        let mut flags = String::new();
        if self.namespace != "divvy-system" {
            flags.push_str(&format!(" -n {}", self.namespace));
        }
        if self.name != "divvy" {
            flags.push_str(&format!(" --name {}", self.name));
        }
        flags
    }

    /// Return the name of the extender's Lease.
    pub fn lease(&self) -> String {
        format!("{}-extender", self.name)
    }
}

/// An object to remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RemovedObject {
    /// The kind, such as `DaemonSet`.
    pub kind: &'static str,
    /// The namespace, if the kind has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The object's name.
    pub name: String,
}

impl RemovedObject {
    /// Return the entry of [`KINDS`] for this object.
    pub fn of(&self) -> Option<InstalledKind> {
        KINDS.into_iter().find(|kind| kind.kind == self.kind)
    }
}

impl std::fmt::Display for RemovedObject {
    /// Write the object as kubectl names it: `daemonset/divvy-agent`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.kind.to_lowercase(), self.name)
    }
}

/// What Divvy has left in a Node object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeLeft {
    /// The node's name.
    pub name: String,
    /// The keys of the annotations `divvy.dev/…`.
    pub annotations: Vec<String>,
    /// Divvy's extended resources in the node's status.
    pub resources: Vec<Cow<'static, str>>,
    /// The keys of the labels that only Divvy's agents or `divvy labels` wrote.
    pub labels: Vec<String>,
    /// Whether the node has the label `gpushare=true`.
    pub labelled: bool,
}

impl NodeLeft {
    /// Report whether there is anything to remove from the node. `labels` says whether the label is to be removed as well.
    pub fn has_something(&self, labels: bool) -> bool {
        let kept_by_none = [self.annotations.is_empty(), self.resources.is_empty(), self.labels.is_empty()];
        kept_by_none.contains(&false) || (labels && self.labelled)
    }
}

/// A pod that holds GPU memory. It would keep that memory after the removal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HoldingPod {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's node.
    pub node: String,
    /// The memory that the pod holds; `null` if no allocation says how much.
    #[serde(rename = "memMiB")]
    pub memory: Option<MiB>,
}

/// The directories in which the agent keeps files on each node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Directories {
    /// The directory that contains the records, the node's key, and the probe's socket.
    pub state: String,
    /// The directory of CDI specs. Only the files whose names start with `divvy.dev-` belong to Divvy.
    pub cdi: String,
    /// Whether the paths come from the agent's DaemonSet. If not, they are the defaults.
    pub known: bool,
}

impl Default for Directories {
    fn default() -> Directories {
        Directories {
            state: "/var/lib/kubelet/plugins/divvy.dev".to_owned(),
            cdi: "/var/run/cdi".to_owned(),
            known: false,
        }
    }
}

impl Directories {
    /// Read the paths from the volumes `state` and `cdi` of the agent's DaemonSet.
    pub fn of(daemon_set: &Value) -> Option<Directories> {
        let volumes = daemon_set.pointer("/spec/template/spec/volumes")?.as_array()?;
        let path = |name: &str| {
            let volume = volumes.iter().find(|volume| volume["name"] == name)?;
            Some(volume.pointer("/hostPath/path")?.as_str()?.to_owned())
        };
        Some(Directories {
            state: path("state")?,
            cdi: path("cdi")?,
            known: true,
        })
    }

    /// Return the shell command that removes the files; it must run on the node as root.
    pub fn command(&self) -> String {
        let quoted = |path: &str| {
            if path
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte))
            {
                path.to_owned()
            } else {
                format!("'{}'", path.replace('\'', r"'\''"))
            }
        };
        let (state, cdi) = (quoted(&self.state), quoted(self.cdi.trim_end_matches('/')));
        // What the probe mounted for the shares of pods that still run.
        format!("umount -l {state}/shares/*/* 2>/dev/null; rm -rf {state} {cdi}/divvy.dev-*")
    }
}

/// The parts of Divvy that were found in a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstalledParts {
    /// Divvy's objects, in the order of their removal.
    pub objects: Vec<RemovedObject>,
    /// The Helm release that created the objects, if Helm did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub helm: Option<String>,
    /// What Divvy has left in Node objects, sorted by node name.
    pub nodes: Vec<NodeLeft>,
    /// The pods that hold GPU memory.
    pub pods: Vec<HoldingPod>,
    /// The number of pods that wait for GPU memory.
    pub waiting: u64,
    /// The directories of Divvy's files on the nodes.
    pub directories: Directories,
}

impl InstalledParts {
    /// Report whether there is nothing to remove. `labels` says whether the nodes' label is to be removed as well.
    pub fn is_nothing(&self, labels: bool) -> bool {
        self.objects.is_empty() && !self.nodes.iter().any(|node| node.has_something(labels))
    }
}

/// Return what Divvy has left in a Node object. `None` if there is nothing. A resource that a running device plugin serves is
/// considered another plugin's resource, unless the node has an annotation of Divvy.
pub fn node_left(node: &Value) -> Option<NodeLeft> {
    let keys = |path: &str| {
        let map = node.pointer(path).and_then(Value::as_object);
        map.into_iter().flatten().map(|(key, value)| (key.as_str(), value))
    };
    let annotations: Vec<String> = keys("/metadata/annotations")
        .filter(|(key, _)| key.starts_with("divvy.dev/"))
        .map(|(key, _)| key.to_owned())
        .collect();
    let served = keys("/status/allocatable").any(|(key, amount)| key == names::GPU_MEM && amount != "0");
    let ours = !annotations.is_empty() || !served;
    let listed = |resource: &str| {
        ["/status/capacity", "/status/allocatable"]
            .iter()
            .any(|path| keys(path).any(|(key, _)| key == resource))
    };
    // The vendor's own plugin may offer its resource on a node where the agent does not.
    let inventory = node
        .pointer("/metadata/annotations")
        .and_then(|annotations| annotations.get(names::INVENTORY)?.as_str());
    let inventory = inventory.and_then(|text| Inventory::parse(text).ok());
    // An inventory stays on a node that went back to the vendor's plugin, without the shares that Divvy offers along with whole GPUs.
    let beside = |gpu: &&Gpu| !gpu.is_shared() || listed(names::GPU_MEM);
    let whole: BTreeSet<WholeKind> = inventory
        .iter()
        .flat_map(|inventory| &inventory.gpus)
        .filter(beside)
        .filter_map(|gpu| gpu.whole)
        .collect();
    let resources = [names::GPU_MEM, names::GPU_COUNT]
        .into_iter()
        .map(Cow::Borrowed)
        .chain(whole.into_iter().map(WholeKind::resource))
        .filter(|resource| ours && listed(resource));
    let left = NodeLeft {
        name: node.pointer("/metadata/name")?.as_str()?.to_owned(),
        resources: resources.collect(),
        labels: labels_left(node),
        labelled: keys("/metadata/labels").any(|(key, value)| key == "gpushare" && value == "true"),
        annotations,
    };
    (left.labelled || left.has_something(false)).then_some(left)
}

/// Return the labels that have Divvy's field manager and no other.
fn labels_left(node: &Value) -> Vec<String> {
    let entries = node.pointer("/metadata/managedFields").and_then(Value::as_array);
    let (ours, others): (Vec<&Value>, Vec<&Value>) =
        (entries.into_iter().flatten()).partition(|entry| entry["manager"] == divvy_labels::MANAGER);
    let keys = |entries: Vec<&Value>| -> BTreeSet<String> {
        let owned = entries
            .into_iter()
            .filter_map(|entry| entry.pointer("/fieldsV1/f:metadata/f:labels")?.as_object());
        let fields = owned.flat_map(serde_json::Map::keys);
        fields
            .filter_map(|field| field.strip_prefix("f:"))
            .map(str::to_owned)
            .collect()
    };
    keys(ours).difference(&keys(others)).cloned().collect()
}

fn offers_whole(inventory: &Inventory, kind: WholeKind) -> bool {
    inventory.gpus.iter().any(|gpu| gpu.whole == Some(kind))
}

/// Report whether Divvy serves a pod: the pod requests GPU memory, or whole GPUs that one of these nodes offers through Divvy. If
/// not, another device plugin serves the pod.
pub fn serves<'a>(pod: &Pod, nodes: impl IntoIterator<Item = &'a Node>) -> bool {
    let whole = pod.request.whole.as_deref();
    let offered = |node: &Node, kind| matches!(&node.inventory, Some(Ok(inventory)) if offers_whole(inventory, kind));
    pod.request.wants_memory() || whole.is_some_and(|whole| nodes.into_iter().any(|node| offered(node, whole.kind)))
}

/// Return the pod as a [`HoldingPod`], if it is bound, has not ended, and requests GPU memory or whole GPUs of Divvy.
pub fn holder(pod: &Pod, nodes: &[Node]) -> Option<HoldingPod> {
    let node = pod.node.clone()?;
    if pod.ended() || !serves(pod, nodes.iter().filter(|known| known.name == node)) {
        return None;
    }
    let inventory = nodes
        .iter()
        .find(|known| known.name == node)
        .and_then(|known| known.inventory.as_ref());
    let unit = inventory
        .and_then(|inventory| Some(inventory.as_ref().ok()?.unit))
        .unwrap_or(MemoryUnit::GIB);
    let memory = match &pod.held {
        Held::Allocation(allocation) => Some(allocation.total()),
        Held::Legacy(legacy) => unit.memory(legacy.gpus.values().fold(0, |sum, units| sum.saturating_add(*units))),
        Held::Nothing | Held::Unreadable(_) => None,
    };
    Some(HoldingPod {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        node,
        memory,
    })
}

/// Return the reason why nothing may be removed: either Helm manages the objects, or pods hold GPU memory and `force` is false.
pub fn refusal(found: &InstalledParts, release: &Release, force: bool) -> Option<String> {
    if let Some(helm) = &found.helm {
        return Some(format!(
            "Helm installed Divvy and tracks its objects, so nothing was removed. Remove them with helm uninstall {helm} -n {}, and then run this command \
             again for what Helm leaves on the nodes",
            release.namespace
        ));
    }
    if found.pods.is_empty() || force {
        return None;
    }
    Some(format!(
        "{} {} GPU memory, so nothing was removed: {}. Delete {} first. With --force pods keep running with their GPUs, but their memory is no longer counted, and \
         none of their containers can start again",
        found.pods.len(),
        if found.pods.len() == 1 { "pod holds" } else { "pods hold" },
        holders(&found.pods),
        if found.pods.len() == 1 { "it" } else { "them" },
    ))
}

const SHOWN: usize = 10;

fn some(items: impl ExactSizeIterator<Item = String>) -> String {
    let all = items.len();
    let mut text = items.take(SHOWN).collect::<Vec<_>>().join(", ");
    if all > SHOWN {
        text.push_str(&format!(" and {} more", all - SHOWN));
    }
    text
}

fn holders(pods: &[HoldingPod]) -> String {
    some(pods.iter().map(|pod| {
        let memory = pod.memory.map_or(String::new(), |memory| format!(", {memory}"));
        format!("{}/{} (node {}{memory})", pod.namespace, pod.name, pod.node)
    }))
}

/// Return a text that lists everything that would be removed (with `removed`: everything that was removed), and the steps that
/// remain for the user.
pub fn text(found: &InstalledParts, release: &Release, labels: bool, removed: bool) -> String {
    let mut text = String::new();
    if found.is_nothing(labels) {
        text.push_str(&format!(
            "Nothing of Divvy is left in this cluster: there are no objects of {} in namespace {} (choose others with --name and --namespace), and no traces in the Node objects. \
             Files on the nodes were not checked.\n",
            release.name, release.namespace
        ));
    } else {
        text.push_str(&if removed {
            "Removed:\n".to_owned()
        } else {
            format!(
                "This would be removed; nothing has been changed. Remove it with divvy uninstall --yes{}\n",
                release.flags()
            )
        });
        if !found.objects.is_empty() {
            text.push_str(&format!("  {} objects:\n", found.objects.len()));
            for kind in KINDS {
                let names = found.objects.iter().filter(|object| object.kind == kind.kind);
                let names: Vec<&str> = names.map(|object| object.name.as_str()).collect();
                if !names.is_empty() {
                    text.push_str(&format!("    {}: {}\n", kind.kind, names.join(", ")));
                }
            }
        }
        let nodes = |of: &dyn Fn(&NodeLeft) -> bool| {
            let nodes: Vec<String> = found
                .nodes
                .iter()
                .filter(|node| of(node))
                .map(|node| node.name.clone())
                .collect();
            (nodes.len(), some(nodes.into_iter()))
        };
        for (what, (count, names)) in [
            ("annotations divvy.dev/…", nodes(&|node| !node.annotations.is_empty())),
            (
                "aliyun.com/gpu-mem and gpu-count in the status",
                nodes(&|node| !node.resources.is_empty()),
            ),
            ("labels about NVIDIA GPUs", nodes(&|node| !node.labels.is_empty())),
            ("the label gpushare=true", nodes(&|node| labels && node.labelled)),
        ] {
            if count > 0 {
                let s = if count == 1 { "" } else { "s" };
                text.push_str(&format!("  {what} of {count} node{s}: {names}\n"));
            }
        }
    }
    if let Some(helm) = found.helm.as_ref().filter(|_| !removed) {
        text.push_str(&format!(
            "\nHelm installed Divvy. First run helm uninstall {helm} -n {}, and then divvy uninstall --yes{} for what Helm leaves.\n",
            release.namespace,
            release.flags()
        ));
    }
    if !found.pods.is_empty() {
        let one = found.pods.len() == 1;
        text.push_str(&format!(
            "\n{} GPU memory: {}.\n{}",
            if one { "1 pod holds".to_owned() } else { format!("{} pods hold", found.pods.len()) },
            holders(&found.pods),
            if one {
                "It keeps running with its GPU, but its memory is no longer counted, and its containers cannot start again."
            } else {
                "They keep running with their GPUs, but their memory is no longer counted, and their containers cannot start again."
            }
        ));
        text.push_str(match (removed, one) {
            (true, _) => "\n",
            (false, true) => " Delete it first, or add --force.\n",
            (false, false) => " Delete them first, or add --force.\n",
        });
    }
    if found.waiting > 0 {
        let wait = match found.waiting {
            1 => "1 pod waits".to_owned(),
            count => format!("{count} pods wait"),
        };
        text.push_str(&format!(
            "\n{wait} for GPU memory, and will wait until a device plugin offers {} again.\n",
            names::GPU_MEM
        ));
    }
    if found.is_nothing(labels) {
        return plain(&text).into_owned();
    }
    text.push_str("\nYou must still remove:\n");
    text.push_str(
        "  kube-scheduler's entry: on every control plane node, delete the entry whose urlPrefix ends in /gpushare-scheduler from `extenders:` in the file that\n\
         \x20   --config names, and restart kube-scheduler. Until then it schedules no pod that requests aliyun.com/gpu-mem. A second scheduler: kubectl delete -f its file.\n",
    );
    text.push_str(&format!(
        "  files, on each node that had an agent, as root{}:\n    {}\n    and, if `divvy configure` was used: divvy configure --detect --undo --restart\n",
        if found.directories.known { "" } else { " (the default directories; the agent's DaemonSet is gone)" },
        found.directories.command(),
    ));
    let labelled: Vec<&str> = found
        .nodes
        .iter()
        .filter(|node| node.labelled)
        .map(|node| node.name.as_str())
        .collect();
    if !labels && !labelled.is_empty() {
        text.push_str(
            "  the label gpushare=true of nodes, if nothing else uses it: kubectl label nodes -l gpushare=true gpushare-\n",
        );
    }
    text.push_str(&format!(
        "  the namespace, if it contains nothing else: kubectl delete namespace {}\n",
        release.namespace
    ));
    plain(&text).into_owned()
}

#[cfg(test)]
mod tests;
