//! A pod worker: it reconciles one pod's containers with the pod object, from admission until both are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use tokio::sync::watch;
use tokio::time::Instant;

use super::devices::DeviceError;
use super::events::RecordedEvent;
use super::lifecycle::{self, Latest, LifecycleStep};
use super::plan::{ContainerPlan, PodPlan};
use super::runtime::{ContainerRow, ContainerView, RuntimeContainerState};
use super::shared::KubeletState;
use super::status::{self, WaitingContainer};
use super::status_writer::{Desired, write_status};
use super::{BackoffRange, NodeEvent};

/// The pod as the kubelet last saw it.
#[derive(Debug, Clone)]
pub(crate) struct PodUpdate {
    pub(crate) pod: Arc<Pod>,
    /// Whether the object is gone from the API server.
    pub(crate) gone: bool,
}

/// The state in which a worker begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Begin {
    /// The pod was admitted.
    Admitted,
    /// The pod was rejected at admission, with this reason and message.
    Rejected(String, String),
    /// The pod's status was already terminal when this kubelet first saw it.
    Terminal,
}

/// The back-off state of one container.
#[derive(Debug, Default)]
struct Retry {
    /// The number of consecutive starts that PreStartContainer or the runtime refused.
    failed_starts: u32,
    /// The number of restarts after the container ended.
    restarts: u32,
    /// The id of the ended container for which `ready` was computed.
    ended_id: Option<String>,
    ready: Option<Instant>,
}

pub(crate) struct Worker {
    shared: Arc<KubeletState>,
    begin: Begin,
    updates: watch::Receiver<PodUpdate>,
    desired: watch::Sender<Desired>,
    waiting: BTreeMap<String, WaitingContainer>,
    retries: BTreeMap<String, Retry>,
    last_status: Option<PodStatus>,
    /// The time at which the end of the pod's containers began.
    ending: Option<Instant>,
    /// The time at which the pod's object was found to be gone.
    gone: Option<Instant>,
    told_to_end: BTreeSet<String>,
    killed: BTreeSet<String>,
    finished: Option<bool>,
}

impl Worker {
    pub(crate) fn new(shared: Arc<KubeletState>, begin: Begin, updates: watch::Receiver<PodUpdate>) -> Worker {
        let last_status = updates.borrow().pod.status.clone();
        Worker {
            shared,
            begin,
            updates,
            desired: watch::Sender::new(Desired::default()),
            waiting: BTreeMap::new(),
            retries: BTreeMap::new(),
            last_status,
            ending: None,
            gone: None,
            told_to_end: BTreeSet::new(),
            killed: BTreeSet::new(),
            finished: None,
        }
    }

    /// Run until the pod's object and its containers are gone.
    pub(crate) async fn run(mut self) {
        let first = PodPlan::of(&self.updates.borrow().pod);
        let writer = write_status(
            self.shared.client.clone(),
            first.namespace.clone(),
            first.name.clone(),
            first.uid.clone(),
            self.desired.subscribe(),
            self.shared.timings.api_retry,
        );
        self.shared.tasks.spawn(writer);
        let mut changes = self.shared.runtime.changes();
        loop {
            changes.borrow_and_update();
            let update = self.updates.borrow_and_update().clone();
            let plan = PodPlan::of(&update.pod);
            let down = update.gone || plan.deleting || self.begin != Begin::Admitted || self.finished.is_some();
            if !down {
                // The user sees ContainerCreating while plugins are called.
                self.publish(&plan, &update);
            }
            let wake = if down {
                self.bring_down(&plan, &update)
            } else {
                self.bring_up(&plan).await
            };
            if update.gone && self.ended(&plan) {
                self.shared.runtime.forget(&plan.uid);
                return;
            }
            self.publish(&plan, &update);
            let sleep = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.updates.changed() => if changed.is_err() { return },
                _ = changes.changed() => {}
                () = sleep => {}
            }
        }
    }

    fn rows(&self, plan: &PodPlan) -> Vec<ContainerRow> {
        self.shared.runtime.rows(&plan.uid)
    }

    fn latest(&self, plan: &PodPlan) -> Vec<Latest> {
        let sandbox = self.shared.runtime.sandbox(&plan.uid).map(|(id, _)| id);
        let mut latest: BTreeMap<String, Latest> = BTreeMap::new();
        for row in self.rows(plan) {
            let run = Latest {
                container: row.view.container.clone(),
                id: row.view.id,
                state: row.view.state,
                in_this_sandbox: sandbox.as_deref() == Some(row.sandbox.as_str()),
            };
            latest.insert(row.view.container, run);
        }
        latest.into_values().collect()
    }

    /// Start the containers that must start. Return the time of the next check.
    async fn bring_up(&mut self, plan: &PodPlan) -> Option<Instant> {
        if self.shared.runtime.sandbox(&plan.uid).is_none() {
            let ran_before = !self.rows(plan).is_empty();
            // After a reboot, a pod with `restartPolicy: Never` gets no new sandbox: it has failed.
            if !(ran_before && plan.restart == super::plan::Restart::Never)
                && let Err(error) = self.shared.runtime.ensure_sandbox(plan)
            {
                self.note(plan, true, "FailedCreatePodSandBox", &error.to_string());
                return Some(Instant::now() + self.shared.timings.start_retry.delay(0));
            }
        }
        let mut wake: Option<Instant> = None;
        match lifecycle::next(plan, &self.latest(plan)) {
            LifecycleStep::Wait => {}
            LifecycleStep::Finish { succeeded } => {
                self.finished = Some(succeeded);
                return Some(Instant::now());
            }
            LifecycleStep::Stop(names) => {
                let rows = self.rows(plan);
                let running = rows
                    .iter()
                    .filter(|row| row.view.is_running() && names.contains(&row.view.container));
                let ids: Vec<String> = running.map(|row| row.view.id.clone()).collect();
                self.terminate(plan, &ids);
                let since = *self.ending.get_or_insert_with(Instant::now);
                return Some(self.kill_late(plan, since + self.grace(plan)));
            }
            LifecycleStep::Start(names) => {
                for name in names {
                    let Some(container) = plan.container(&name) else {
                        continue;
                    };
                    if let Some(at) = self.not_before(plan, container) {
                        wake = Some(wake.map_or(at, |known| known.min(at)));
                        continue;
                    }
                    let at = self.start(plan, container).await;
                    wake = at.map(|at| wake.map_or(at, |known| known.min(at))).or(wake);
                    // A deletion that arrived in the meantime takes effect before the next start.
                    if self.updates.has_changed().unwrap_or(true) {
                        return Some(Instant::now());
                    }
                }
            }
        }
        wake
    }

    /// Return the time before which a container must not start, or `None` if it may start now.
    fn not_before(&mut self, plan: &PodPlan, container: &ContainerPlan) -> Option<Instant> {
        let rows = self.rows(plan);
        let ended = rows.iter().rev().find(|row| row.view.container == container.name);
        let ended_id = ended.filter(|row| !row.view.is_running()).map(|row| row.view.id.clone());
        let retry = self.retries.entry(container.name.clone()).or_default();
        if let Some(id) = ended_id
            && retry.ended_id.as_ref() != Some(&id)
        {
            // The first restart has no wait; the later ones do.
            let wait = match retry.restarts {
                0 => Duration::ZERO,
                n => self.shared.timings.restart_backoff.delay(n - 1),
            };
            retry.restarts += 1;
            retry.ended_id = Some(id);
            retry.ready = Some(Instant::now() + wait);
            if !wait.is_zero() {
                let (pod, name) = (format!("{}_{}({})", plan.name, plan.namespace, plan.uid), &container.name);
                let message = format!("back-off {wait:?} restarting failed container={name} pod={pod}");
                self.note(
                    plan,
                    true,
                    "BackOff",
                    &format!("Back-off restarting failed container {name} in pod {pod}"),
                );
                let waiting = WaitingContainer {
                    reason: "CrashLoopBackOff",
                    message,
                };
                self.waiting.insert(name.clone(), waiting);
            }
        }
        let ready = self.retries.get(&container.name).and_then(|retry| retry.ready);
        ready.filter(|at| *at > Instant::now())
    }

    /// Start a container: PreStartContainer, create, start. On failure, return the time of the next attempt.
    async fn start(&mut self, plan: &PodPlan, container: &ContainerPlan) -> Option<Instant> {
        if !self.shared.timings.container_start.is_zero() {
            tokio::time::sleep(self.shared.timings.container_start).await;
        }
        let _busy = self.shared.busy.clone().read_owned().await;
        let options = self.shared.manager.run_options(plan, container, &self.shared.runtime).await;
        let update = self.updates.borrow().clone();
        if update.gone || update.pod.metadata.deletion_timestamp.is_some() {
            return Some(Instant::now());
        }
        let options = match options {
            Ok(options) => options,
            Err(error) => {
                if let DeviceError::PreStart(text) = &error {
                    self.shared.tell(NodeEvent::PreStartRefused {
                        pod_uid: plan.uid.clone(),
                        namespace: plan.namespace.clone(),
                        pod: plan.name.clone(),
                        container: container.name.clone(),
                        message: text.clone(),
                    });
                }
                return Some(self.start_failed(plan, container, "CreateContainerConfigError", error.to_string()));
            }
        };
        self.note(
            plan,
            false,
            "Pulled",
            &format!("Container image {:?} already present on machine", container.image),
        );
        match self.shared.runtime.run(plan, container, &options) {
            Ok(_) => {
                self.note(plan, false, "Created", &format!("Container created: {}", container.name));
                self.note(plan, false, "Started", &format!("Container started: {}", container.name));
                self.waiting.remove(&container.name);
                if let Some(retry) = self.retries.get_mut(&container.name) {
                    retry.failed_starts = 0;
                    retry.ready = None;
                }
                None
            }
            Err(error) => Some(self.start_failed(plan, container, "CreateContainerError", error.to_string())),
        }
    }

    fn start_failed(&mut self, plan: &PodPlan, container: &ContainerPlan, reason: &'static str, message: String) -> Instant {
        self.note(plan, true, "Failed", &format!("Error: {message}"));
        self.waiting
            .insert(container.name.clone(), WaitingContainer { reason, message });
        let backoff: BackoffRange = self.shared.timings.start_retry;
        let retry = self.retries.entry(container.name.clone()).or_default();
        let at = Instant::now() + backoff.delay(retry.failed_starts);
        retry.failed_starts = retry.failed_starts.saturating_add(1);
        retry.ready = Some(at);
        at
    }

    fn grace(&self, plan: &PodPlan) -> Duration {
        plan.grace.unwrap_or(self.shared.timings.default_grace)
    }

    /// Return the time at which the containers of a pod without an object receive SIGTERM, if it is still to come. Return `None`
    /// if there is no reason to wait.
    fn not_yet_told(&mut self, plan: &PodPlan, update: &PodUpdate) -> Option<Instant> {
        if !update.gone || self.ending.is_some() || !self.rows(plan).iter().any(|row| row.view.is_running()) {
            return None;
        }
        let now = Instant::now();
        let told = *self.gone.get_or_insert(now) + self.shared.timings.forced_after;
        (now < told).then_some(told)
    }

    /// Return the time of SIGKILL. A forced deletion shortens the remaining grace period of a pod that was already being deleted.
    /// The kubelet kills the containers of every other pod without an object after its own minimum, whatever the pod's grace
    /// period is.
    fn deadline(&mut self, plan: &PodPlan, update: &PodUpdate) -> Instant {
        let now = Instant::now();
        let since = *self.ending.get_or_insert(now);
        let own = since + self.grace(plan);
        if !update.gone {
            return own;
        }
        let gone = *self.gone.get_or_insert(now);
        let forced = gone.max(since) + self.shared.timings.forced_grace;
        // The grace period of a pod that was already being deleted may end earlier.
        if since < gone { forced.min(own) } else { forced }
    }

    /// End the pod: SIGTERM, SIGKILL after the grace period, then remove the sandbox and the pod's cgroup.
    fn bring_down(&mut self, plan: &PodPlan, update: &PodUpdate) -> Option<Instant> {
        if let Some(told) = self.not_yet_told(plan, update) {
            return Some(told);
        }
        let deadline = self.deadline(plan, update);
        let targets = lifecycle::to_terminate(plan, &self.latest(plan));
        self.terminate(plan, &targets);
        let wake = self.kill_late(plan, deadline);
        if self.rows(plan).iter().any(|row| row.view.is_running()) {
            return Some(wake);
        }
        self.shared.runtime.stop_sandbox(&plan.uid);
        self.shared.runtime.remove_cgroup(&plan.uid);
        if self.finished.is_none() && self.begin == Begin::Admitted {
            self.finished = Some(ended_well(plan, &self.rows(plan)));
        }
        // A force-deleted pod was removed from the active pods when its object was removed.
        if !update.gone {
            self.shared.set_inactive(&plan.uid);
        }
        None
    }

    fn terminate(&mut self, plan: &PodPlan, ids: &[String]) {
        for id in ids {
            if !self.told_to_end.insert(id.clone()) {
                continue;
            }
            if let Some(row) = self.rows(plan).iter().find(|row| row.view.id == *id) {
                self.note(plan, false, "Killing", &format!("Stopping container {}", row.view.container));
            }
            self.shared.runtime.terminate(id);
        }
    }

    /// Send SIGKILL to containers that still run after the deadline. Return the time of the next check.
    fn kill_late(&mut self, plan: &PodPlan, deadline: Instant) -> Instant {
        if Instant::now() < deadline {
            return deadline;
        }
        for row in self.rows(plan).iter().filter(|row| row.view.is_running()) {
            if self.killed.insert(row.view.id.clone()) {
                self.shared.runtime.kill(&row.view.id);
            }
        }
        Instant::now() + Duration::from_secs(1)
    }

    fn ended(&self, plan: &PodPlan) -> bool {
        self.shared.runtime.sandbox(&plan.uid).is_none() && !self.rows(plan).iter().any(|row| row.view.is_running())
    }

    fn publish(&mut self, plan: &PodPlan, update: &PodUpdate) {
        if update.gone {
            return;
        }
        let finalize = plan.deleting && self.ended(plan);
        let status = if self.begin == Begin::Terminal {
            None
        } else {
            let runs: Vec<ContainerView> = self.rows(plan).into_iter().map(|row| row.view).collect();
            let sandbox = self.shared.runtime.sandbox(&plan.uid);
            let pod_ip = sandbox.map(|(_, pid)| self.shared.pod_ip(pid));
            let pod_ip = pod_ip.or_else(|| self.last_status.as_ref().and_then(|status| status.pod_ip.clone()));
            let rejected = match &self.begin {
                Begin::Rejected(reason, message) => Some((reason.clone(), message.clone())),
                _ => None,
            };
            let ended = self.ended(plan);
            let status = status::build(&status::Input {
                pod: plan,
                runs: &runs,
                waiting: &self.waiting,
                initialized: lifecycle::initialized(plan, &self.latest(plan)),
                // A terminal phase is never reported while a container is running.
                finished: self.finished.filter(|_| ended),
                rejected: rejected.as_ref(),
                host_ip: &self.shared.address,
                pod_ip: pod_ip.as_deref(),
                now: Timestamp::now(),
                previous: self.last_status.as_ref(),
            });
            self.last_status = Some(status.clone());
            Some(status)
        };
        let desired = Desired { status, finalize };
        self.desired.send_if_modified(|known| {
            let changed = *known != desired;
            *known = desired;
            changed
        });
    }

    fn note(&self, plan: &PodPlan, warning: bool, reason: &str, message: &str) {
        self.shared.recorder.note(RecordedEvent {
            namespace: plan.namespace.clone(),
            pod: plan.name.clone(),
            uid: plan.uid.clone(),
            warning,
            reason: reason.to_owned(),
            message: message.to_owned(),
        });
    }
}

fn ended_well(plan: &PodPlan, rows: &[ContainerRow]) -> bool {
    let apps = plan
        .containers
        .iter()
        .filter(|container| container.kind == divvy_model::ContainerKind::App);
    apps.map(|container| rows.iter().rev().find(|row| row.view.container == container.name))
        .all(|row| row.is_some_and(|row| row.view.state == RuntimeContainerState::Exited { code: 0 }))
}
