//! An emulated container runtime: containers are rows with a simulated PID and files in a cgroup tree.
//! Processes of this machine can be added to a container, and are then in its cgroup.
//!
//! The runtime belongs to the node, not to the kubelet, so containers survive a restart of the kubelet. A reboot ends them all with status
//! 255. Variables are merged as CRI and CDI do: the plugin's variables come first, the pod's own override them, and CDI's override both
//! (measured on containerd 2.3.7). Simplification: there are no images, and no variables of images or services.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use divvy_kubelet::api::v1beta1::ContainerAllocateResponse;
use divvy_testkit::dice::Dice;
use jiff::Timestamp;
use tokio::sync::{broadcast, watch};
use tokio_util::sync::CancellationToken;

use super::cgroups::{CgroupTree, Cgroups};
use super::plan::{ContainerPlan, PlannedEnd, PodPlan};
use super::{NodeEvent, NodePaths, cdi};

/// The state of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuntimeContainerState {
    /// The container's process is running.
    Running,
    /// The container's process has ended.
    Exited {
        /// The exit status: 143 for SIGTERM, 137 for SIGKILL, 255 for a reboot.
        code: i32,
    },
}

/// A bind mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountView {
    /// The path on the node.
    pub host: String,
    /// The path in the container.
    pub container: String,
    /// Whether the mount is read-only.
    pub read_only: bool,
}

/// A container as the runtime created it.
#[derive(Debug, Clone)]
pub struct ContainerView {
    /// The UID of the container's pod.
    pub pod_uid: String,
    /// The namespace of the container's pod.
    pub namespace: String,
    /// The name of the container's pod.
    pub pod: String,
    /// The container's name in the pod.
    pub container: String,
    /// The container's id: 64 hexadecimal digits.
    pub id: String,
    /// The simulated PID.
    pub pid: u32,
    /// How many times a container of this name ran in this pod before.
    pub attempt: u32,
    /// The container's state.
    pub state: RuntimeContainerState,
    /// The environment as the container's process sees it.
    pub env: BTreeMap<String, String>,
    /// The paths of device nodes in the container.
    pub devices: Vec<String>,
    /// The container's bind mounts.
    pub mounts: Vec<MountView>,
    /// The annotations that device plugins returned.
    pub annotations: BTreeMap<String, String>,
    /// The CDI names that were resolved when the container was created.
    pub cdi_devices: Vec<String>,
    /// The container's cgroup below the hierarchy's root, `kubepods/…`.
    pub cgroup: String,
    /// The start of the container's process.
    pub started_at: Timestamp,
    /// The end of the container's process, `None` while it is running.
    pub finished_at: Option<Timestamp>,
    /// What the process wrote to the file `terminationMessagePath`.
    pub message: Option<String>,
}

impl ContainerView {
    /// Report whether the container's process is running.
    pub fn is_running(&self) -> bool {
        self.state == RuntimeContainerState::Running
    }
}

#[derive(Debug, Clone)]
pub(crate) struct ContainerRow {
    pub(crate) view: ContainerView,
    pub(crate) sandbox: String,
    /// The PIDs of this machine's processes that belong to the container.
    processes: Vec<u32>,
    ignores_term: bool,
    ended: CancellationToken,
}

#[derive(Debug, Clone)]
struct Sandbox {
    id: String,
    pid: u32,
    cgroup: String,
    namespace: String,
    pod: String,
}

#[derive(Debug)]
struct RuntimeState {
    rows: Vec<ContainerRow>,
    sandboxes: BTreeMap<String, Sandbox>,
    /// The pods' cgroups by pod UID, from the start of the sandbox until the pod is cleaned up.
    pods: BTreeMap<String, String>,
    next_pid: u32,
    seed: Dice,
    cgroups: Cgroups,
    proc_written: BTreeSet<u32>,
    /// Whether the runtime is down, so that the kubelet's calls fail.
    away: bool,
}

/// Linux' `PID_MAX_LIMIT`. Simulated PIDs are larger, so that they differ from those of this machine's processes, which can belong to a container, too.
const PID_MAX: u32 = 4 * 1024 * 1024;

/// The error of the kubelet's calls while the runtime is down.
const AWAY: &str = "rpc error: code = Unavailable desc = connection error: desc = \"transport: Error while dialing: dial unix \
                    /run/containerd/containerd.sock: connect: connection refused\"";

/// Why the runtime starts no sandbox or container, in its own words.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RuntimeError {
    #[error("{AWAY}")]
    Away,
    #[error("failed to create the pod's cgroup: {0}")]
    PodCgroup(#[source] std::io::Error),
    #[error("failed to create the container's cgroup: {0}")]
    ContainerCgroup(#[source] std::io::Error),
    #[error("failed to generate container {container:?} spec: {source}")]
    Cdi { container: String, source: cdi::InjectError },
    #[error(
        "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container \
         process: error during container init: error mounting {host:?} to rootfs at {at:?}: no such file or directory"
    )]
    Mount { host: String, at: String },
    #[error("sandbox of pod {0:?} is not running")]
    NoSandbox(String),
}

/// The container runtime. Clones share its state.
#[derive(Debug, Clone)]
pub(crate) struct ContainerRuntime {
    shared: Arc<RuntimeShared>,
}

#[derive(Debug)]
struct RuntimeShared {
    paths: NodePaths,
    state: Mutex<RuntimeState>,
    changed: watch::Sender<u64>,
    events: broadcast::Sender<NodeEvent>,
    stop: CancellationToken,
}

impl Drop for RuntimeShared {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// The device plugins' part of a CRI create request; the rest comes from the pod.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeviceOptions {
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) mounts: Vec<MountView>,
    pub(crate) devices: Vec<String>,
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) cdi_devices: Vec<String>,
}

impl DeviceOptions {
    /// Add a plugin's cached response. If several resources set a key, the first one wins.
    pub(crate) fn merge(&mut self, response: &ContainerAllocateResponse) {
        for (key, value) in &response.envs {
            self.env.entry(key.clone()).or_insert_with(|| value.clone());
        }
        for mount in &response.mounts {
            if self.mounts.iter().all(|known| known.container != mount.container_path) {
                self.mounts.push(MountView {
                    host: mount.host_path.clone(),
                    container: mount.container_path.clone(),
                    read_only: mount.read_only,
                });
            }
        }
        for device in &response.devices {
            if !self.devices.contains(&device.container_path) {
                self.devices.push(device.container_path.clone());
            }
        }
        for (key, value) in &response.annotations {
            self.annotations.entry(key.clone()).or_insert_with(|| value.clone());
        }
        for device in &response.cdi_devices {
            if !self.cdi_devices.contains(&device.name) {
                self.cdi_devices.push(device.name.clone());
            }
        }
    }
}

impl ContainerRuntime {
    pub(crate) fn new(paths: NodePaths, cgroups: Cgroups, seed: Dice, events: broadcast::Sender<NodeEvent>) -> ContainerRuntime {
        let state = RuntimeState {
            rows: Vec::new(),
            sandboxes: BTreeMap::new(),
            pods: BTreeMap::new(),
            next_pid: PID_MAX,
            seed,
            cgroups,
            proc_written: BTreeSet::new(),
            away: false,
        };
        let shared = RuntimeShared {
            paths,
            state: Mutex::new(state),
            changed: watch::Sender::new(0),
            events,
            stop: CancellationToken::new(),
        };
        ContainerRuntime {
            shared: Arc::new(shared),
        }
    }

    fn lock(&self) -> MutexGuard<'_, RuntimeState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Subscribe to a counter that changes whenever a container starts or ends.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changed.subscribe()
    }

    /// Return a pod's containers, oldest first, including those that ended.
    pub(crate) fn rows(&self, pod_uid: &str) -> Vec<ContainerRow> {
        self.lock()
            .rows
            .iter()
            .filter(|row| row.view.pod_uid == pod_uid)
            .cloned()
            .collect()
    }

    /// Return every container.
    pub(crate) fn all(&self) -> Vec<ContainerView> {
        self.lock().rows.iter().map(|row| row.view.clone()).collect()
    }

    /// Return the UID, namespace, and name of every pod that the runtime knows.
    pub(crate) fn pods(&self) -> Vec<(String, String, String)> {
        let state = self.lock();
        let of_sandboxes = state
            .sandboxes
            .iter()
            .map(|(uid, s)| (uid.clone(), s.namespace.clone(), s.pod.clone()));
        let of_rows = state.rows.iter().map(|row| {
            let view = &row.view;
            (view.pod_uid.clone(), view.namespace.clone(), view.pod.clone())
        });
        let all: BTreeSet<_> = of_sandboxes.chain(of_rows).collect();
        all.into_iter().collect()
    }

    /// Return the id and PID of a pod's sandbox, if it has one.
    pub(crate) fn sandbox(&self, pod_uid: &str) -> Option<(String, u32)> {
        self.lock()
            .sandboxes
            .get(pod_uid)
            .map(|sandbox| (sandbox.id.clone(), sandbox.pid))
    }

    /// Start the pod's sandbox unless it is running.
    pub(crate) fn ensure_sandbox(&self, pod: &PodPlan) -> Result<(), RuntimeError> {
        let mut state = self.lock();
        if state.away {
            return Err(RuntimeError::Away);
        }
        if state.sandboxes.contains_key(&pod.uid) {
            return Ok(());
        }
        let id = state.seed.hex(64);
        let sandbox = Sandbox {
            pid: state.pid(),
            cgroup: format!("{}/{id}", pod.cgroup),
            id,
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
        };
        state.pods.insert(pod.uid.clone(), pod.cgroup.clone());
        state.sandboxes.insert(pod.uid.clone(), sandbox);
        self.project(&mut state).map_err(RuntimeError::PodCgroup)
    }

    /// Create and start a container. On failure, nothing is left behind.
    pub(crate) fn run(
        &self,
        pod: &PodPlan,
        container: &ContainerPlan,
        options: &DeviceOptions,
    ) -> Result<ContainerView, RuntimeError> {
        let id = self.lock().seed.hex(64);
        let (specs, root) = (&self.shared.paths.cdi_dir, &self.shared.paths.sys_root);
        let resolved = cdi::resolve(specs, root, &options.cdi_devices).map_err(|source| RuntimeError::Cdi {
            container: id.clone(),
            source,
        })?;
        let mut env = options.env.clone();
        env.extend(container.env.iter().cloned());
        env.extend(resolved.env);
        let mut devices = options.devices.clone();
        for path in resolved.devices {
            devices.retain(|known| *known != path);
            devices.push(path);
        }
        let mut mounts = options.mounts.clone();
        for (host, at, read_only) in resolved.mounts {
            // runc finds this out; CDI accepts any path.
            if !self.shared.paths.on_this_machine(&host).exists() {
                return Err(RuntimeError::Mount { host, at });
            }
            mounts.retain(|known| known.container != at);
            mounts.push(MountView {
                host,
                container: at,
                read_only,
            });
        }
        let mut state = self.lock();
        if state.away {
            return Err(RuntimeError::Away);
        }
        let Some(sandbox) = state.sandboxes.get(&pod.uid).map(|sandbox| sandbox.id.clone()) else {
            return Err(RuntimeError::NoSandbox(pod.uid.clone()));
        };
        let same = |row: &&ContainerRow| row.view.pod_uid == pod.uid && row.view.container == container.name;
        let attempt = state
            .rows
            .iter()
            .filter(same)
            .map(|row| row.view.attempt + 1)
            .max()
            .unwrap_or(0);
        let ended = self.shared.stop.child_token();
        let view = ContainerView {
            pod_uid: pod.uid.clone(),
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            container: container.name.clone(),
            pid: state.pid(),
            attempt,
            state: RuntimeContainerState::Running,
            env,
            devices,
            mounts,
            annotations: options.annotations.clone(),
            cdi_devices: options.cdi_devices.clone(),
            cgroup: format!("{}/{id}", pod.cgroup),
            started_at: Timestamp::now(),
            finished_at: None,
            message: None,
            id,
        };
        let row = ContainerRow {
            view: view.clone(),
            sandbox,
            processes: Vec::new(),
            ignores_term: container.behaviour.ignores_term,
            ended: ended.clone(),
        };
        state.rows.push(row);
        // Two ended containers are kept per name: the last one, and the one that `lastState` shows.
        let (uid, name) = (&pod.uid, &container.name);
        state
            .rows
            .retain(|row| row.view.pod_uid != *uid || row.view.container != *name || row.view.attempt + 2 >= attempt);
        if let Err(error) = self.project(&mut state) {
            state.rows.retain(|row| row.view.id != view.id);
            return Err(RuntimeError::ContainerCgroup(error));
        }
        drop(state);
        // There may be no receiver.
        let _ = self.shared.events.send(NodeEvent::ContainerStarted(view.clone()));
        let end = match container.behaviour.ends {
            PlannedEnd::After(after) => Some((after, 0)),
            PlannedEnd::Failing => Some((std::time::Duration::ZERO, 1)),
            PlannedEnd::Never => None,
        };
        if let Some((after, code)) = end {
            tokio::spawn(end_later(Arc::downgrade(&self.shared), view.id.clone(), ended, after, code));
        }
        self.announce();
        Ok(view)
    }

    /// Add a process of this machine to a running container.
    pub(crate) fn attach(&self, id: &str, pid: u32) -> std::io::Result<()> {
        let mut state = self.lock();
        let row = state.rows.iter_mut().find(|row| row.view.id == id && row.view.is_running());
        let row = row.ok_or_else(|| std::io::Error::new(std::io::ErrorKind::NotFound, format!("container {id} does not run")))?;
        row.processes.push(pid);
        self.project(&mut state)?;
        // It has the PID by which the process knows itself.
        let proc = self.shared.paths.sys_root.join("proc").join(pid.to_string());
        std::fs::copy(format!("/proc/{pid}/status"), proc.join("status")).map(drop)
    }

    /// Set whether the runtime is down. While it is down, no container starts; running containers keep running.
    pub(crate) fn set_away(&self, away: bool) {
        self.lock().away = away;
    }

    /// Let a running container end with this status and this termination message. Report whether it was running.
    pub(crate) fn end(&self, id: &str, code: i32, message: Option<String>) -> bool {
        let mut state = self.lock();
        let row = state.rows.iter_mut().find(|row| row.view.id == id && row.view.is_running());
        let is_running = row.is_some();
        if let Some(row) = row {
            row.view.message = message;
        }
        drop(state);
        self.exit(id, code);
        is_running
    }

    /// Send SIGTERM to a container.
    pub(crate) fn terminate(&self, id: &str) {
        let ignored = self.lock().rows.iter().any(|row| row.view.id == id && row.ignores_term);
        if !ignored {
            self.exit(id, 143);
        }
    }

    /// Send SIGKILL to a container.
    pub(crate) fn kill(&self, id: &str) {
        self.exit(id, 137);
    }

    fn exit(&self, id: &str, code: i32) {
        let mut state = self.lock();
        let mut rows = state.rows.iter_mut();
        let Some(row) = rows.find(|row| row.view.id == id && row.view.is_running()) else {
            return;
        };
        row.view.state = RuntimeContainerState::Exited { code };
        row.view.finished_at = Some(Timestamp::now());
        row.ended.cancel();
        let view = row.view.clone();
        self.project_or_log(&mut state);
        drop(state);
        let _ = self.shared.events.send(NodeEvent::ContainerEnded(view));
        self.announce();
    }

    /// Stop the pod's sandbox. Its containers must have ended.
    pub(crate) fn stop_sandbox(&self, pod_uid: &str) {
        let mut state = self.lock();
        if state.sandboxes.remove(pod_uid).is_some() {
            self.project_or_log(&mut state);
            drop(state);
            self.announce();
        }
    }

    /// Remove the pod's own cgroup. Its containers and its sandbox must have ended.
    pub(crate) fn remove_cgroup(&self, pod_uid: &str) {
        let mut state = self.lock();
        if state.pods.remove(pod_uid).is_some() {
            self.project_or_log(&mut state);
        }
    }

    /// Forget the containers of a pod that is gone.
    pub(crate) fn forget(&self, pod_uid: &str) {
        self.lock()
            .rows
            .retain(|row| row.view.pod_uid != pod_uid || row.view.is_running());
    }

    /// Remove all processes and cgroups. Containers that were running become ended ones with status 255.
    pub(crate) fn reboot(&self) {
        let mut state = self.lock();
        let mut ended = Vec::new();
        for row in state.rows.iter_mut().filter(|row| row.view.is_running()) {
            row.view.state = RuntimeContainerState::Exited { code: 255 };
            row.view.finished_at = Some(Timestamp::now());
            row.ended.cancel();
            ended.push(row.view.clone());
        }
        state.sandboxes.clear();
        state.pods.clear();
        self.project_or_log(&mut state);
        drop(state);
        for view in ended {
            let _ = self.shared.events.send(NodeEvent::ContainerEnded(view));
        }
        self.announce();
    }

    fn announce(&self) {
        self.shared.changed.send_modify(|generation| *generation += 1);
    }

    fn project_or_log(&self, state: &mut RuntimeState) {
        if let Err(error) = self.project(state) {
            tracing::error!(%error, "could not write the cgroup files");
        }
    }

    fn project(&self, state: &mut RuntimeState) -> std::io::Result<()> {
        let mut tree = CgroupTree::new();
        for sandbox in state.sandboxes.values() {
            tree.insert(sandbox.cgroup.clone(), vec![sandbox.pid]);
        }
        for row in state.rows.iter().filter(|row| row.view.is_running()) {
            let pids = std::iter::once(row.view.pid).chain(row.processes.iter().copied());
            tree.insert(row.view.cgroup.clone(), pids.collect());
        }
        let pods = state.pods.values().cloned().collect();
        state.cgroups.project(&tree, &pods)?;
        let proc = self.shared.paths.sys_root.join("proc");
        let running: BTreeMap<u32, String> = tree
            .into_iter()
            .flat_map(|(path, pids)| pids.into_iter().map(move |pid| (pid, path.clone())))
            .collect();
        for (pid, path) in &running {
            if state.proc_written.insert(*pid) {
                let directory: PathBuf = proc.join(pid.to_string());
                std::fs::create_dir_all(&directory)?;
                std::fs::write(directory.join("cgroup"), format!("0::/{path}\n"))?;
            }
        }
        let gone: Vec<u32> = state
            .proc_written
            .iter()
            .filter(|pid| !running.contains_key(pid))
            .copied()
            .collect();
        for pid in gone {
            std::fs::remove_dir_all(proc.join(pid.to_string()))?;
            state.proc_written.remove(&pid);
        }
        Ok(())
    }
}

impl RuntimeState {
    fn pid(&mut self) -> u32 {
        self.next_pid += 1;
        self.next_pid
    }
}

async fn end_later(shared: Weak<RuntimeShared>, id: String, ended: CancellationToken, after: std::time::Duration, code: i32) {
    let slept = ended.run_until_cancelled(tokio::time::sleep(after)).await;
    if let Some(shared) = slept.and_then(|()| shared.upgrade()) {
        ContainerRuntime { shared }.exit(&id, code);
    }
}
