//! An emulated container runtime: containers are rows with a simulated process number and files in a cgroup tree.
//!
//! It is owned by the node, not by the kubelet, so containers survive a restart of the kubelet; a reboot ends them all
//! with status 255. Merging of variables is the CRI's and CDI's: the plugin's variables first, the pod's own over them,
//! CDI's over all (measured on containerd 2.3.7). Simplification: no image, no variables of images or services.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use divvy_kubelet::api::v1beta1::ContainerAllocateResponse;
use jiff::Timestamp;
use tokio::sync::{broadcast, watch};
use tokio_util::sync::CancellationToken;

use super::cgroups::{Cgroups, Tree};
use super::plan::{ContainerPlan, Ends, PodPlan};
use super::seed::Seed;
use super::{NodeEvent, NodePaths, cdi};

/// Where a container is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerState {
    /// Its process runs.
    Running,
    /// Its process ended.
    Exited {
        /// Exit status; 143 for SIGTERM, 137 for SIGKILL, 255 for a reboot.
        code: i32,
    },
}

/// A bind mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountView {
    /// Path on the node.
    pub host: String,
    /// Path in the container.
    pub container: String,
    /// Whether it is read-only.
    pub read_only: bool,
}

/// A container as the runtime made it.
#[derive(Debug, Clone)]
pub struct ContainerView {
    /// UID of its pod.
    pub pod_uid: String,
    /// Namespace of its pod.
    pub namespace: String,
    /// Name of its pod.
    pub pod: String,
    /// Its name in the pod.
    pub container: String,
    /// 64 hexadecimal digits.
    pub id: String,
    /// Simulated process number.
    pub pid: u32,
    /// How often a container of this name ran in this pod before.
    pub attempt: u32,
    /// Where it is in its life.
    pub state: ContainerState,
    /// Its environment as the process sees it.
    pub env: BTreeMap<String, String>,
    /// Paths of device nodes in the container.
    pub devices: Vec<String>,
    /// Mounts.
    pub mounts: Vec<MountView>,
    /// Annotations that device plugins gave.
    pub annotations: BTreeMap<String, String>,
    /// CDI names that were resolved at its creation.
    pub cdi_devices: Vec<String>,
    /// Its cgroup below the hierarchy's root, `kubepods/…`.
    pub cgroup: String,
    /// Start of its process.
    pub started_at: Timestamp,
    /// End of its process.
    pub finished_at: Option<Timestamp>,
}

impl ContainerView {
    /// Whether its process runs.
    pub fn is_running(&self) -> bool {
        self.state == ContainerState::Running
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) view: ContainerView,
    pub(crate) sandbox: String,
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
struct State {
    rows: Vec<Row>,
    sandboxes: BTreeMap<String, Sandbox>,
    /// Pod cgroups by pod UID, from the sandbox's start until the pod is cleaned up.
    pods: BTreeMap<String, String>,
    next_pid: u32,
    seed: Seed,
    cgroups: Cgroups,
    proc_written: BTreeSet<u32>,
    /// It does not answer the kubelet.
    away: bool,
}

/// What the kubelet's calls end with while the runtime does not run.
const AWAY: &str = "rpc error: code = Unavailable desc = connection error: desc = \"transport: Error while dialing: dial unix \
                    /run/containerd/containerd.sock: connect: connection refused\"";

/// The runtime. Clones are the same runtime.
#[derive(Debug, Clone)]
pub(crate) struct Runtime {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    paths: NodePaths,
    state: Mutex<State>,
    changed: watch::Sender<u64>,
    events: broadcast::Sender<NodeEvent>,
    stop: CancellationToken,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// What the CRI is told to create, besides the pod's own part.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeviceOptions {
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) mounts: Vec<MountView>,
    pub(crate) devices: Vec<String>,
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) cdi_devices: Vec<String>,
}

impl DeviceOptions {
    /// Adds a plugin's cached answer. Over several resources the first writer of a key wins.
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

impl Runtime {
    pub(crate) fn new(paths: NodePaths, cgroups: Cgroups, seed: Seed, events: broadcast::Sender<NodeEvent>) -> Runtime {
        let state = State {
            rows: Vec::new(),
            sandboxes: BTreeMap::new(),
            pods: BTreeMap::new(),
            next_pid: 1000,
            seed,
            cgroups,
            proc_written: BTreeSet::new(),
            away: false,
        };
        let shared = Shared {
            paths,
            state: Mutex::new(state),
            changed: watch::Sender::new(0),
            events,
            stop: CancellationToken::new(),
        };
        Runtime {
            shared: Arc::new(shared),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes whenever a container starts or ends.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changed.subscribe()
    }

    /// A pod's containers, oldest first, those that ended among them.
    pub(crate) fn rows(&self, pod_uid: &str) -> Vec<Row> {
        self.lock()
            .rows
            .iter()
            .filter(|row| row.view.pod_uid == pod_uid)
            .cloned()
            .collect()
    }

    /// Every container.
    pub(crate) fn all(&self) -> Vec<ContainerView> {
        self.lock().rows.iter().map(|row| row.view.clone()).collect()
    }

    /// Pods that the runtime knows: UID, namespace, name.
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

    /// Id and process number of a pod's sandbox, if it has one.
    pub(crate) fn sandbox(&self, pod_uid: &str) -> Option<(String, u32)> {
        self.lock()
            .sandboxes
            .get(pod_uid)
            .map(|sandbox| (sandbox.id.clone(), sandbox.pid))
    }

    /// Starts the pod's sandbox unless it runs.
    pub(crate) fn ensure_sandbox(&self, pod: &PodPlan) -> Result<(), String> {
        let mut state = self.lock();
        if state.away {
            return Err(AWAY.to_owned());
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
        self.project(&mut state)
            .map_err(|error| format!("failed to create the pod's cgroup: {error}"))
    }

    /// Creates and starts a container. An error is the runtime's text, with nothing left behind.
    pub(crate) fn run(&self, pod: &PodPlan, container: &ContainerPlan, options: &DeviceOptions) -> Result<ContainerView, String> {
        let id = self.lock().seed.hex(64);
        let resolved = cdi::resolve(&self.shared.paths.cdi_dir, &self.shared.paths.sys_root, &options.cdi_devices)
            .map_err(|error| format!("failed to generate container {id:?} spec: {error}"))?;
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
            // As runc finds out; CDI takes any path.
            if !self.shared.paths.sys_root.join(host.trim_start_matches('/')).exists() {
                return Err(format!(
                    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start \
                     container process: error during container init: error mounting {host:?} to rootfs at {at:?}: no such file or directory"
                ));
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
            return Err(AWAY.to_owned());
        }
        let Some(sandbox) = state.sandboxes.get(&pod.uid).map(|sandbox| sandbox.id.clone()) else {
            return Err(format!("sandbox of pod {:?} is not running", pod.uid));
        };
        let same = |row: &&Row| row.view.pod_uid == pod.uid && row.view.container == container.name;
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
            state: ContainerState::Running,
            env,
            devices,
            mounts,
            annotations: options.annotations.clone(),
            cdi_devices: options.cdi_devices.clone(),
            cgroup: format!("{}/{id}", pod.cgroup),
            started_at: Timestamp::now(),
            finished_at: None,
            id,
        };
        let row = Row {
            view: view.clone(),
            sandbox,
            ignores_term: container.behaviour.ignores_term,
            ended: ended.clone(),
        };
        state.rows.push(row);
        // Two ended ones per container are kept: the last, and the one that `lastState` shows.
        let (uid, name) = (&pod.uid, &container.name);
        state
            .rows
            .retain(|row| row.view.pod_uid != *uid || row.view.container != *name || row.view.attempt + 2 >= attempt);
        if let Err(error) = self.project(&mut state) {
            state.rows.retain(|row| row.view.id != view.id);
            return Err(format!("failed to create the container's cgroup: {error}"));
        }
        drop(state);
        // Nobody may listen.
        let _ = self.shared.events.send(NodeEvent::ContainerStarted(view.clone()));
        let end = match container.behaviour.ends {
            Ends::After(after) => Some((after, 0)),
            Ends::Failing => Some((std::time::Duration::ZERO, 1)),
            Ends::Never => None,
        };
        if let Some((after, code)) = end {
            tokio::spawn(end_later(Arc::downgrade(&self.shared), view.id.clone(), ended, after, code));
        }
        self.announce();
        Ok(view)
    }

    /// While it is away nothing is started; containers run on.
    pub(crate) fn set_away(&self, away: bool) {
        self.lock().away = away;
    }

    /// SIGTERM.
    pub(crate) fn terminate(&self, id: &str) {
        let ignored = self.lock().rows.iter().any(|row| row.view.id == id && row.ignores_term);
        if !ignored {
            self.exit(id, 143);
        }
    }

    /// SIGKILL.
    pub(crate) fn kill(&self, id: &str) {
        self.exit(id, 137);
    }

    fn exit(&self, id: &str, code: i32) {
        let mut state = self.lock();
        let mut rows = state.rows.iter_mut();
        let Some(row) = rows.find(|row| row.view.id == id && row.view.is_running()) else {
            return;
        };
        row.view.state = ContainerState::Exited { code };
        row.view.finished_at = Some(Timestamp::now());
        row.ended.cancel();
        let view = row.view.clone();
        self.project_or_log(&mut state);
        drop(state);
        let _ = self.shared.events.send(NodeEvent::ContainerEnded(view));
        self.announce();
    }

    /// Ends the pod's sandbox; its containers must have ended.
    pub(crate) fn stop_sandbox(&self, pod_uid: &str) {
        let mut state = self.lock();
        if state.sandboxes.remove(pod_uid).is_some() {
            self.project_or_log(&mut state);
            drop(state);
            self.announce();
        }
    }

    /// Removes the pod's own cgroup; its containers and sandbox must have ended.
    pub(crate) fn remove_cgroup(&self, pod_uid: &str) {
        let mut state = self.lock();
        if state.pods.remove(pod_uid).is_some() {
            self.project_or_log(&mut state);
        }
    }

    /// Forgets the containers of a pod that is gone.
    pub(crate) fn forget(&self, pod_uid: &str) {
        self.lock()
            .rows
            .retain(|row| row.view.pod_uid != pod_uid || row.view.is_running());
    }

    /// All processes and cgroups are gone. What ran shows as ended with status 255.
    pub(crate) fn reboot(&self) {
        let mut state = self.lock();
        let mut ended = Vec::new();
        for row in state.rows.iter_mut().filter(|row| row.view.is_running()) {
            row.view.state = ContainerState::Exited { code: 255 };
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

    fn project_or_log(&self, state: &mut State) {
        if let Err(error) = self.project(state) {
            tracing::error!(%error, "cgroup files could not be written");
        }
    }

    fn project(&self, state: &mut State) -> std::io::Result<()> {
        let mut tree = Tree::new();
        for sandbox in state.sandboxes.values() {
            tree.insert(sandbox.cgroup.clone(), vec![sandbox.pid]);
        }
        for row in state.rows.iter().filter(|row| row.view.is_running()) {
            tree.insert(row.view.cgroup.clone(), vec![row.view.pid]);
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

impl State {
    fn pid(&mut self) -> u32 {
        self.next_pid += 1;
        self.next_pid
    }
}

async fn end_later(shared: Weak<Shared>, id: String, ended: CancellationToken, after: std::time::Duration, code: i32) {
    let slept = ended.run_until_cancelled(tokio::time::sleep(after)).await;
    if let Some(shared) = slept.and_then(|()| shared.upgrade()) {
        Runtime { shared }.exit(&id, code);
    }
}
