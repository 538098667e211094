//! The facts about a pod that the kubelet and the runtime need, read from its object once.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_model::ContainerKind;
use divvy_model::{quantity_milli, quantity_value};
use k8s_openapi::api::core::v1::{Container, Pod};

/// The restart policy of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Restart {
    Always,
    OnFailure,
    Never,
}

/// The behavior of a container's process, derived from its `command` and `args`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Behaviour {
    pub(crate) ends: PlannedEnd,
    /// Whether only SIGKILL ends the process (`--ignore-term`).
    pub(crate) ignores_term: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum PlannedEnd {
    /// `sleep N`: it ends with status 0 after N seconds.
    After(Duration),
    /// `fail`: it ends with status 1 at once.
    Failing,
    /// `run` or anything else: it does not end on its own.
    Never,
}

impl Behaviour {
    fn of(words: &[String]) -> Behaviour {
        let mut ends = PlannedEnd::Never;
        for (i, word) in words.iter().enumerate() {
            match word.as_str() {
                "sleep" => {
                    let seconds = words.get(i + 1).and_then(|text| text.parse::<f64>().ok());
                    if let Some(after) = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()) {
                        ends = PlannedEnd::After(after);
                        break;
                    }
                }
                "fail" => {
                    ends = PlannedEnd::Failing;
                    break;
                }
                "env" => {
                    ends = PlannedEnd::After(Duration::ZERO);
                    break;
                }
                "run" => break,
                _ => {}
            }
        }
        Behaviour {
            ends,
            ignores_term: words.iter().any(|word| word == "--ignore-term"),
        }
    }
}

/// A container of a pod.
#[derive(Debug, Clone)]
pub(crate) struct ContainerPlan {
    pub(crate) name: String,
    pub(crate) kind: ContainerKind,
    pub(crate) image: String,
    /// The limits in whole units, including those of names without `/`.
    pub(crate) limits: BTreeMap<String, u64>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) behaviour: Behaviour,
}

/// A pod.
#[derive(Debug, Clone)]
pub(crate) struct PodPlan {
    pub(crate) uid: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The init containers in order, then the app containers.
    pub(crate) containers: Vec<ContainerPlan>,
    pub(crate) restart: Restart,
    /// The pod's cgroup: `kubepods[/<qos>]/pod<UID>`.
    pub(crate) cgroup: String,
    pub(crate) qos: &'static str,
    /// The grace period that the kubelet knows, at least 1 s: the one of the deletion, or else the one of the spec. `None` if
    /// neither is set.
    pub(crate) grace: Option<Duration>,
    pub(crate) deleting: bool,
}

fn containers(pod: &Pod) -> impl Iterator<Item = (ContainerKind, &Container)> {
    let spec = pod.spec.as_ref();
    let init = spec.and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let apps = spec.map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let kind = |container: &Container| match container.restart_policy.as_deref() {
        Some("Always") => ContainerKind::Sidecar,
        _ => ContainerKind::Init,
    };
    init.iter()
        .map(move |c| (kind(c), c))
        .chain(apps.iter().map(|c| (ContainerKind::App, c)))
}

/// Return a pod's effective requests by resource: cpu in thousandths, everything else in whole units, and `pods` = 1. divvy-model
/// implements Kubernetes' formula. An invalid quantity, or one that overflows, counts as the largest number: such a pod fits on no node.
pub(crate) fn effective_requests(pod: &Pod) -> BTreeMap<String, u64> {
    let mut names: std::collections::BTreeSet<String> = std::collections::BTreeSet::new();
    let mut asked: Vec<(ContainerKind, BTreeMap<String, u64>)> = Vec::new();
    for (kind, container) in containers(pod) {
        let mut of = BTreeMap::new();
        if let Some(resources) = &container.resources {
            // A request that is absent equals the limit: the API server's default.
            for map in [&resources.limits, &resources.requests].into_iter().flatten() {
                for (name, quantity) in map {
                    of.insert(name.clone(), amount(name, &quantity.0));
                    names.insert(name.clone());
                }
            }
        }
        asked.push((kind, of));
    }
    let mut requests = BTreeMap::from([("pods".to_owned(), 1)]);
    for name in names {
        let containers = asked.iter().map(|(kind, of)| divvy_model::ContainerRequest {
            name: String::new(),
            kind: *kind,
            units: of.get(&name).copied().unwrap_or(0),
            gpu_count: 0,
        });
        let request = divvy_model::PodRequest {
            containers: containers.collect(),
            ..divvy_model::PodRequest::default()
        };
        requests.insert(name, request.effective_units().unwrap_or(u64::MAX));
    }
    requests
}

/// Return a quantity of a resource as a number: cpu in thousandths, anything else in whole units, rounded up.
pub(crate) fn amount(resource: &str, quantity: &str) -> u64 {
    let parsed = if resource == "cpu" {
        quantity_milli(quantity)
    } else {
        quantity_value(quantity)
    };
    parsed.unwrap_or_else(|_| {
        tracing::warn!(resource, quantity, "invalid quantity");
        u64::MAX
    })
}

impl PodPlan {
    pub(crate) fn of(pod: &Pod) -> PodPlan {
        let meta = &pod.metadata;
        let uid = meta.uid.clone().unwrap_or_default();
        let spec = pod.spec.as_ref();
        let restart = match spec.and_then(|spec| spec.restart_policy.as_deref()) {
            Some("OnFailure") => Restart::OnFailure,
            Some("Never") => Restart::Never,
            _ => Restart::Always,
        };
        // The API server has computed the class.
        let (qos, parent) = match pod.status.as_ref().and_then(|status| status.qos_class.as_deref()) {
            Some("Guaranteed") => ("Guaranteed", "kubepods"),
            Some("Burstable") => ("Burstable", "kubepods/burstable"),
            _ => ("BestEffort", "kubepods/besteffort"),
        };
        let of_spec = spec.and_then(|spec| spec.termination_grace_period_seconds);
        // A forced deletion sets 0, which the kubelet treats as "not set" (`calculateEffectiveGracePeriod`).
        let of_deletion = meta.deletion_grace_period_seconds.filter(|seconds| *seconds != 0);
        let seconds = of_deletion.or(of_spec).map(|seconds| seconds.max(1));
        PodPlan {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            containers: containers(pod).map(|(kind, container)| plan(pod, kind, container)).collect(),
            restart,
            cgroup: format!("{parent}/pod{uid}"),
            qos,
            grace: seconds.map(|seconds| Duration::from_secs(u64::try_from(seconds).unwrap_or(0))),
            deleting: meta.deletion_timestamp.is_some(),
            uid,
        }
    }

    pub(crate) fn container(&self, name: &str) -> Option<&ContainerPlan> {
        self.containers.iter().find(|container| container.name == name)
    }

    pub(crate) fn has_init(&self) -> bool {
        self.containers.iter().any(|container| container.kind != ContainerKind::App)
    }
}

fn plan(pod: &Pod, kind: ContainerKind, container: &Container) -> ContainerPlan {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    let words: Vec<String> = [&container.command, &container.args]
        .into_iter()
        .flatten()
        .flatten()
        .cloned()
        .collect();
    let env = container.env.iter().flatten().filter_map(|variable| {
        let field = || {
            let source = variable.value_from.as_ref()?;
            field(pod, &source.field_ref.as_ref()?.field_path)
        };
        Some((variable.name.clone(), variable.value.clone().or_else(field)?))
    });
    ContainerPlan {
        name: container.name.clone(),
        kind,
        image: container.image.clone().unwrap_or_default(),
        limits: limits
            .into_iter()
            .flatten()
            .map(|(name, quantity)| (name.clone(), amount(name, &quantity.0)))
            .collect(),
        env: env.collect(),
        behaviour: Behaviour::of(&words),
    }
}

/// Return a field of the downward API; only those that pods commonly use are supported.
fn field(pod: &Pod, path: &str) -> Option<String> {
    let spec = pod.spec.as_ref();
    match path {
        "metadata.name" => pod.metadata.name.clone(),
        "metadata.namespace" => pod.metadata.namespace.clone(),
        "metadata.uid" => pod.metadata.uid.clone(),
        "spec.nodeName" => spec.and_then(|spec| spec.node_name.clone()),
        "spec.serviceAccountName" => spec.and_then(|spec| spec.service_account_name.clone()),
        "status.hostIP" => pod.status.as_ref().and_then(|status| status.host_ip.clone()),
        _ => None,
    }
}
