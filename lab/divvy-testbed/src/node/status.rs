//! A pod's status, built from its containers as the kubelet does.

use std::collections::BTreeMap;

use divvy_model::ContainerKind;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    ContainerState as ApiState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting, ContainerStatus, HostIP,
    PodCondition, PodIP, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::plan::{ContainerPlan, PodPlan};
use super::runtime::{ContainerView, RuntimeContainerState};

/// The reason why a container waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WaitingContainer {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// The values on which the status depends.
#[derive(Debug)]
pub(crate) struct Input<'a> {
    pub(crate) pod: &'a PodPlan,
    /// All runs of all containers, oldest first.
    pub(crate) runs: &'a [ContainerView],
    pub(crate) waiting: &'a BTreeMap<String, WaitingContainer>,
    pub(crate) initialized: bool,
    /// `Some` once all containers have ended for good; true if they succeeded.
    pub(crate) finished: Option<bool>,
    /// The reason and message if the pod was rejected at admission.
    pub(crate) rejected: Option<&'a (String, String)>,
    pub(crate) host_ip: &'a str,
    pub(crate) pod_ip: Option<&'a str>,
    pub(crate) now: Timestamp,
    /// The stored status. Its unchanged times, and the conditions that are not the kubelet's, are kept.
    pub(crate) previous: Option<&'a PodStatus>,
}

fn terminated(run: &ContainerView, code: i32) -> ApiState {
    let reason = match code {
        0 => "Completed",
        255 => "Unknown",
        _ => "Error",
    };
    ApiState {
        terminated: Some(ContainerStateTerminated {
            container_id: Some(format!("containerd://{}", run.id)),
            exit_code: code,
            finished_at: run.finished_at.map(Time),
            message: run.message.clone(),
            reason: Some(reason.to_owned()),
            started_at: Some(Time(run.started_at)),
            ..ContainerStateTerminated::default()
        }),
        ..ApiState::default()
    }
}

fn state(run: &ContainerView) -> ApiState {
    match run.state {
        RuntimeContainerState::Running => ApiState {
            running: Some(ContainerStateRunning {
                started_at: Some(Time(run.started_at)),
            }),
            ..ApiState::default()
        },
        RuntimeContainerState::Exited { code } => terminated(run, code),
    }
}

fn container_status(input: &Input<'_>, container: &ContainerPlan) -> ContainerStatus {
    let mut runs = input.runs.iter().filter(|run| run.container == container.name).rev();
    let latest = runs.next();
    let before = runs.next();
    let running = latest.is_some_and(ContainerView::is_running);
    let ended_well = latest.is_some_and(|run| run.state == RuntimeContainerState::Exited { code: 0 });
    let waiting = input
        .waiting
        .get(&container.name)
        .filter(|_| !running && input.finished.is_none());
    let default = match (input.initialized, container.kind, input.pod.has_init()) {
        (false, ContainerKind::App, _) => "PodInitializing",
        (false, _, true) => "PodInitializing",
        _ => "ContainerCreating",
    };
    let (now, last) = match (latest, waiting) {
        (Some(run), None) => (state(run), before.map(state)),
        (latest, waiting) => {
            let waiting = ContainerStateWaiting {
                reason: Some(waiting.map_or(default, |waiting| waiting.reason).to_owned()),
                message: waiting.map(|waiting| waiting.message.clone()),
            };
            let waiting = ApiState {
                waiting: Some(waiting),
                ..ApiState::default()
            };
            (waiting, latest.map(state))
        }
    };
    ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone(),
        image_id: format!("sha256:{}", container.image),
        container_id: latest.map(|run| format!("containerd://{}", run.id)),
        ready: running || (container.kind == ContainerKind::Init && ended_well),
        started: Some(running),
        restart_count: latest.map_or(0, |run| i32::try_from(run.attempt).unwrap_or(i32::MAX)),
        state: Some(now),
        last_state: last,
        ..ContainerStatus::default()
    }
}

fn phase(input: &Input<'_>) -> &'static str {
    match input.finished {
        Some(true) => return "Succeeded",
        Some(false) => return "Failed",
        None => {}
    }
    let apps = input
        .pod
        .containers
        .iter()
        .filter(|container| container.kind == ContainerKind::App);
    let all_ran = apps
        .clone()
        .all(|container| input.runs.iter().any(|run| run.container == container.name));
    // A container that has never run keeps the pod Pending; one that ended and will restart does not.
    if input.initialized && all_ran { "Running" } else { "Pending" }
}

/// Build the status to write.
pub(crate) fn build(input: &Input<'_>) -> PodStatus {
    let previous = input.previous;
    let start_time = previous
        .and_then(|status| status.start_time.clone())
        .unwrap_or(Time(input.now));
    let mut conditions: Vec<PodCondition> = previous.and_then(|status| status.conditions.clone()).unwrap_or_default();
    let mut set = |kind: &str, value: bool, reason: Option<&str>| {
        let status = if value { "True" } else { "False" };
        let reason = reason.filter(|_| !value).map(str::to_owned);
        match conditions.iter_mut().find(|condition| condition.type_ == kind) {
            Some(known) => {
                if known.status != status {
                    known.status = status.to_owned();
                    known.last_transition_time = Some(Time(input.now));
                }
                known.reason = reason;
                known.message = None;
            }
            None => conditions.push(PodCondition {
                type_: kind.to_owned(),
                status: status.to_owned(),
                reason,
                last_transition_time: Some(Time(input.now)),
                ..PodCondition::default()
            }),
        }
    };
    if let Some((reason, message)) = input.rejected {
        return PodStatus {
            phase: Some("Failed".to_owned()),
            reason: Some(reason.clone()),
            message: Some(format!("Pod was rejected: {message}")),
            start_time: Some(start_time),
            qos_class: Some(input.pod.qos.to_owned()),
            host_ip: Some(input.host_ip.to_owned()),
            ..PodStatus::default()
        };
    }
    let statuses = |init: bool| -> Vec<ContainerStatus> {
        let of = input
            .pod
            .containers
            .iter()
            .filter(|container| (container.kind != ContainerKind::App) == init);
        of.map(|container| container_status(input, container)).collect()
    };
    let (init, apps) = (statuses(true), statuses(false));
    let sidecars_ready = init.iter().all(|status| {
        let sidecar = input
            .pod
            .container(&status.name)
            .is_some_and(|container| container.kind == ContainerKind::Sidecar);
        !sidecar || status.ready
    });
    let ready = sidecars_ready && apps.iter().all(|status| status.ready);
    let sandbox = !input.runs.is_empty() || input.pod_ip.is_some();
    let not_ready = match input.finished {
        Some(true) => "PodCompleted",
        Some(false) => "PodFailed",
        None => "ContainersNotReady",
    };
    set("PodReadyToStartContainers", sandbox && input.finished.is_none(), None);
    set(
        "Initialized",
        input.initialized || input.finished == Some(true),
        Some("ContainersNotInitialized"),
    );
    set("Ready", ready, Some(not_ready));
    set("ContainersReady", ready, Some(not_ready));
    set("PodScheduled", true, None);
    PodStatus {
        phase: Some(phase(input).to_owned()),
        conditions: Some(conditions),
        container_statuses: Some(apps),
        init_container_statuses: (!init.is_empty()).then_some(init),
        host_ip: Some(input.host_ip.to_owned()),
        host_ips: Some(vec![HostIP {
            ip: input.host_ip.to_owned(),
        }]),
        pod_ip: input.pod_ip.map(str::to_owned),
        pod_ips: input.pod_ip.map(|ip| vec![PodIP { ip: ip.to_owned() }]),
        qos_class: Some(input.pod.qos.to_owned()),
        start_time: Some(start_time),
        ..PodStatus::default()
    }
}
