//! The next step of a pod worker, as a function of the pod and its containers (`computePodActions` in the kubelet).

use divvy_model::ContainerKind;

use super::plan::{PodPlan, Restart};
use super::runtime::RuntimeContainerState;

/// The latest run of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Latest {
    pub(crate) container: String,
    pub(crate) id: String,
    pub(crate) state: RuntimeContainerState,
    /// Whether the run belongs to the current sandbox; otherwise it is from before a reboot.
    pub(crate) in_this_sandbox: bool,
}

/// The next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LifecycleStep {
    /// Start these containers, each when its back-off has elapsed.
    Start(Vec<String>),
    /// Stop these containers: the pod has finished, but its sidecars are still running.
    Stop(Vec<String>),
    /// Do nothing until something changes.
    Wait,
    /// All containers have ended for good.
    Finish {
        /// Whether every app container ended with status 0.
        succeeded: bool,
    },
}

/// Report whether all init containers have done their part: the ordinary ones succeeded, and the sidecars are running.
pub(crate) fn initialized(pod: &PodPlan, latest: &[Latest]) -> bool {
    let of = |name: &str| latest.iter().find(|run| run.container == name);
    // Once an app container has started, the init containers no longer matter.
    let begun = |kind: ContainerKind| {
        pod.containers
            .iter()
            .any(|container| container.kind == kind && of(&container.name).is_some_and(|run| run.in_this_sandbox))
    };
    begun(ContainerKind::App)
        || pod
            .containers
            .iter()
            .filter(|container| container.kind != ContainerKind::App)
            .all(|container| {
                let Some(run) = of(&container.name).filter(|run| run.in_this_sandbox) else {
                    return false;
                };
                match container.kind {
                    ContainerKind::Init => run.state == RuntimeContainerState::Exited { code: 0 },
                    _ => run.state == RuntimeContainerState::Running,
                }
            })
}

/// Return the next step while the pod is meant to run.
pub(crate) fn next(pod: &PodPlan, latest: &[Latest]) -> LifecycleStep {
    let of = |name: &str| latest.iter().find(|run| run.container == name);
    let mut start = Vec::new();
    let initialized = initialized(pod, latest);
    let mut init_failed = false;
    for container in pod.containers.iter().filter(|container| container.kind != ContainerKind::App) {
        let run = of(&container.name).filter(|run| run.in_this_sandbox).map(|run| run.state);
        match (container.kind, run) {
            (ContainerKind::Init, _) if initialized => continue,
            (ContainerKind::Init, Some(RuntimeContainerState::Exited { code: 0 })) => continue,
            (ContainerKind::Init, Some(RuntimeContainerState::Exited { .. })) if pod.restart == Restart::Never => {
                init_failed = true
            }
            (_, None | Some(RuntimeContainerState::Exited { .. })) => start.push(container.name.clone()),
            (ContainerKind::Init, Some(RuntimeContainerState::Running)) => {}
            (_, Some(RuntimeContainerState::Running)) => continue,
        }
        // The next init container starts only when this one is done. Once the pod runs, every sidecar is kept running.
        if !initialized {
            break;
        }
    }
    let mut done = 0;
    let mut succeeded = true;
    let apps = || pod.containers.iter().filter(|container| container.kind == ContainerKind::App);
    for container in apps() {
        match of(&container.name).map(|run| run.state) {
            None if initialized => start.push(container.name.clone()),
            None | Some(RuntimeContainerState::Running) => {}
            Some(RuntimeContainerState::Exited { code }) => {
                let again = match pod.restart {
                    Restart::Always => true,
                    Restart::OnFailure => code != 0,
                    Restart::Never => false,
                };
                if !again {
                    done += 1;
                    succeeded &= code == 0;
                } else if initialized {
                    start.push(container.name.clone());
                }
            }
        }
    }
    if init_failed || done == apps().count() {
        let running = latest.iter().filter(|run| run.state == RuntimeContainerState::Running);
        let running: Vec<String> = running.map(|run| run.container.clone()).collect();
        return if running.is_empty() {
            LifecycleStep::Finish {
                succeeded: succeeded && !init_failed,
            }
        } else {
            LifecycleStep::Stop(running)
        };
    }
    if start.is_empty() {
        LifecycleStep::Wait
    } else {
        LifecycleStep::Start(start)
    }
}

/// Return the containers that get SIGTERM now while the pod ends: app containers and ordinary init containers at once, then the sidecars
/// in reverse order, after the others have ended.
pub(crate) fn to_terminate(pod: &PodPlan, latest: &[Latest]) -> Vec<String> {
    let running = |kinds: &[ContainerKind]| -> Vec<String> {
        let of_kind = pod.containers.iter().filter(|container| kinds.contains(&container.kind));
        let ids = of_kind.filter_map(|container| {
            let run = latest.iter().find(|run| run.container == container.name)?;
            (run.state == RuntimeContainerState::Running).then(|| run.id.clone())
        });
        ids.collect()
    };
    let first = running(&[ContainerKind::App, ContainerKind::Init]);
    if first.is_empty() {
        return running(&[ContainerKind::Sidecar]).pop().into_iter().collect();
    }
    first
}
