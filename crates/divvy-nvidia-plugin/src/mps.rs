//! The control daemons of CUDA's Multi-Process Service (MPS): which a node needs, how each is started and ended, and what to do
//! when something changes. All functions here are pure; the actions are performed elsewhere.

pub mod share;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use divvy_model::MiB;

use crate::{Error, OfferedResource, PluginMachine};

/// A GPU that an MPS control daemon serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedGpu {
    /// NVML's UUID.
    pub uuid: String,
    /// NVML's index, by which the control daemon names the GPU.
    pub index: u32,
    /// The memory that each client process may allocate. `None` if the GPU's memory is not known.
    pub limit: Option<MiB>,
    /// Whether the GPU can be configured now. If the driver has lost it, or if it is in MIG mode, it cannot.
    pub is_usable: bool,
}

/// The MPS control daemon of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Daemon {
    /// The resource's name, such as `nvidia.com/gpu`.
    pub resource: String,
    /// The directory of the daemon's files. It is below the root of all daemons.
    pub directory: PathBuf,
    /// The GPUs in the order of their indices.
    pub gpus: Vec<SharedGpu>,
    /// The part of a GPU's threads that a client process may use, in percent: 1 to 50, or 100 if the clients have limits of their own.
    pub threads: u32,
    /// The content of the file [`STARTED`].
    pub mark: String,
}

/// A GPU's compute mode (nvidia-smi's option `-c`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpsComputeMode {
    /// Any process may use the GPU.
    Default,
    /// One process may use the GPU: the MPS server.
    ExclusiveProcess,
}

impl MpsComputeMode {
    /// Return nvidia-smi's name of the mode.
    pub fn name(self) -> &'static str {
        match self {
            MpsComputeMode::Default => "DEFAULT",
            MpsComputeMode::ExclusiveProcess => "EXCLUSIVE_PROCESS",
        }
    }
}

/// A value that the control daemon is asked for, after it was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpsLimit {
    /// A part of a GPU's threads in percent.
    Threads(u32),
    /// An amount of memory.
    Memory(MiB),
}

impl std::fmt::Display for MpsLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MpsLimit::Threads(percent) => write!(f, "{percent} % of the threads"),
            MpsLimit::Memory(limit) => write!(f, "{limit}"),
        }
    }
}

impl MpsLimit {
    /// Report whether the control daemon's answer is this limit. The program of the drivers 470 to 555 answers `25.0`, and `512M` or, from 1 GiB on, whole GiB, rounded down:
    /// `10G`. A limit that it does not know, or has refused, has another answer or none: its exit status is always 0.
    pub fn is(self, answer: &str) -> bool {
        let answer = answer.trim();
        match self {
            MpsLimit::Threads(percent) => answer
                .parse::<f64>()
                .is_ok_and(|found| (found - f64::from(percent)).abs() < 0.05),
            MpsLimit::Memory(limit) => match (answer.strip_suffix('G'), answer.strip_suffix('M')) {
                (Some(gib), _) => limit.0 >= 1024 && gib.parse() == Ok(limit.0 >> 10),
                (_, Some(mib)) => mib.parse() == Ok(limit.0),
                _ => false,
            },
        }
    }
}

/// A step of a daemon's start or end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MpsAction {
    /// Set a GPU's compute mode.
    SetComputeMode {
        /// The GPU's UUID.
        gpu: String,
        /// The mode.
        mode: MpsComputeMode,
    },
    /// Create a directory and its missing parents.
    MakeDirectory(PathBuf),
    /// Allow containers to use a directory, on a node with SELinux.
    LabelDirectory(PathBuf),
    /// Remove a directory with its content. It may be missing.
    RemoveDirectory(PathBuf),
    /// Write a file with this content.
    WriteFile(PathBuf, String),
    /// Remove a file. It may be missing.
    RemoveFile(PathBuf),
    /// Start the control daemon.
    Start,
    /// Give the control daemon a command.
    Command(String),
    /// Ask the control daemon for a value, and check it.
    Check {
        /// The command.
        command: String,
        /// The expected value.
        limit: MpsLimit,
    },
    /// End the control daemon, if it runs.
    Quit,
}

/// The command that any control daemon answers. Its answer does not matter.
pub const PROBE_COMMAND: &str = "get_default_active_thread_percentage";
/// The command that ends a control daemon.
pub const QUIT_COMMAND: &str = "quit";
/// The name of the file, in the directory of a resource, that says that the daemon serves the resource with its limits.
pub const STARTED: &str = ".started";
/// The name of the file, in the directory of a resource, that lists the GPUs whose compute mode was changed.
pub const EXCLUSIVE: &str = ".exclusive";
/// The name of the file, in the root, that says that all daemons serve.
pub const READY: &str = ".ready";

impl Daemon {
    /// Return the directory for the connections of clients.
    pub fn pipe_directory(&self) -> PathBuf {
        self.directory.join("pipe")
    }

    /// Return the directory of the daemon's log.
    pub fn log_directory(&self) -> PathBuf {
        self.directory.join("log")
    }

    /// Return the daemon's log.
    pub fn log(&self) -> PathBuf {
        self.log_directory().join("control.log")
    }

    /// Return the environment variables of the control daemon, and of the program that gives it commands.
    pub fn environment(&self) -> BTreeMap<&'static str, PathBuf> {
        BTreeMap::from([
            ("CUDA_MPS_PIPE_DIRECTORY", self.pipe_directory()),
            ("CUDA_MPS_LOG_DIRECTORY", self.log_directory()),
        ])
    }

    /// Return the steps that start the daemon, in their order. If one fails, the ones after it must not be done. GPUs that
    /// cannot be configured are left out.
    pub fn start(&self) -> Vec<MpsAction> {
        let usable = || self.gpus.iter().filter(|gpu| gpu.is_usable);
        let touched: String = self.gpus.iter().map(|gpu| format!("{}\n", gpu.uuid)).collect();
        let memory = || usable().filter_map(|gpu| Some((gpu.index, gpu.limit?)));
        let mut actions = vec![
            // What an earlier run has left behind would make the new daemon fail.
            MpsAction::Quit,
            MpsAction::MakeDirectory(self.pipe_directory()),
            MpsAction::LabelDirectory(self.pipe_directory()),
            MpsAction::MakeDirectory(self.log_directory()),
            MpsAction::WriteFile(self.directory.join(EXCLUSIVE), touched),
        ];
        actions.extend(usable().map(|gpu| MpsAction::SetComputeMode {
            gpu: gpu.uuid.clone(),
            mode: MpsComputeMode::ExclusiveProcess,
        }));
        actions.push(MpsAction::Start);
        actions.extend(
            memory()
                .map(|(index, limit)| MpsAction::Command(format!("set_default_device_pinned_mem_limit {index} {}M", limit.0))),
        );
        actions.push(MpsAction::Command(format!(
            "set_default_active_thread_percentage {}",
            self.threads
        )));
        actions.extend(memory().map(|(index, limit)| MpsAction::Check {
            command: format!("get_default_device_pinned_mem_limit {index}"),
            limit: MpsLimit::Memory(limit),
        }));
        actions.push(MpsAction::Check {
            command: PROBE_COMMAND.to_owned(),
            limit: MpsLimit::Threads(self.threads),
        });
        actions.push(MpsAction::WriteFile(self.directory.join(STARTED), self.mark.clone()));
        actions
    }

    /// Return the steps that withdraw the daemon from service while it is still wanted: the GPUs stay closed to other processes.
    pub fn withdraw(&self) -> Vec<MpsAction> {
        vec![MpsAction::RemoveFile(self.directory.join(STARTED)), MpsAction::Quit]
    }

    /// Return the steps that end the daemon, in their order. All must be done, even if some fail.
    pub fn end(&self) -> Vec<MpsAction> {
        let mut actions = self.withdraw();
        // The control program leaves them behind. The directory stays, because containers may have it mounted.
        let files = ["control", "control_lock", "control_privileged"];
        actions.extend(files.map(|name| MpsAction::RemoveFile(self.pipe_directory().join(name))));
        actions.extend(restore(self.gpus.iter().map(|gpu| gpu.uuid.as_str())));
        actions.push(MpsAction::RemoveFile(self.directory.join(EXCLUSIVE)));
        actions.push(MpsAction::RemoveDirectory(self.log_directory()));
        actions
    }

    /// Return a step of [`Daemon::end`], or what replaces it if the GPUs `closed` could not be opened: the list of exclusive GPUs is
    /// not removed, but reduced to these GPUs.
    pub fn unless_closed(&self, action: MpsAction, closed: &[String]) -> MpsAction {
        let list = self.directory.join(EXCLUSIVE);
        match action {
            MpsAction::RemoveFile(path) if path == list && !closed.is_empty() => {
                MpsAction::WriteFile(list, closed.join("\n") + "\n")
            }
            other => other,
        }
    }

    /// Report whether a daemon that was started with this description serves as `wanted`. A GPU that can no longer be configured
    /// needs no restart. A GPU that could not be configured at the start, and can be now, has no limits yet.
    fn serves(&self, wanted: &Daemon) -> bool {
        let is_alike = |(own, other): (&SharedGpu, &SharedGpu)| {
            let own_when_usable = SharedGpu {
                is_usable: other.is_usable,
                ..own.clone()
            };
            own_when_usable == *other && (own.is_usable || !other.is_usable)
        };
        let is_same = (&self.resource, &self.directory, self.threads) == (&wanted.resource, &wanted.directory, wanted.threads);
        is_same && self.gpus.len() == wanted.gpus.len() && self.gpus.iter().zip(&wanted.gpus).all(is_alike)
    }
}

/// Return the steps that open GPUs to all processes again.
pub fn restore<'u>(gpus: impl Iterator<Item = &'u str>) -> impl Iterator<Item = MpsAction> {
    gpus.map(|gpu| MpsAction::SetComputeMode {
        gpu: gpu.to_owned(),
        mode: MpsComputeMode::Default,
    })
}

/// Return the directory of a resource's daemon.
///
/// # Errors
/// Fails if the name is not a prefix and a name, which Kubernetes accepts: another one might name a directory elsewhere.
pub fn directory(root: &Path, resource: &str) -> Result<PathBuf, Error> {
    let is_plain = |part: &str| {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        part.starts_with(|first: char| first.is_ascii_alphanumeric()) && part.bytes().all(is_allowed)
    };
    match resource.split_once('/') {
        Some((prefix, name)) if is_plain(prefix) && is_plain(name) => Ok(root.join(prefix).join(name)),
        _ => Err(Error::NotADirectoryName(resource.to_owned())),
    }
}

/// Return the daemons that a node needs, in the order of the resources: one for each resource that is shared through MPS and has
/// GPUs. `root` is the directory of all daemons' files.
///
/// # Errors
/// Fails if a GPU has too little memory to be shared, or if a resource's name cannot be the name of a directory.
pub fn daemons(resources: &[OfferedResource], machine: &PluginMachine, root: &Path) -> Result<Vec<Daemon>, Error> {
    let mut daemons = Vec::new();
    for resource in resources.iter().filter(|resource| resource.uses_mps()) {
        let mut gpus = Vec::new();
        let mut most = 1;
        for unit in &resource.units {
            let (Some(gpu), Some(replicas)) = (machine.gpus.get(unit.gpu), unit.replicas) else {
                continue;
            };
            if gpu.unreadable {
                continue;
            }
            let limit = gpu.memory.0 / u64::from(replicas.max(1));
            if limit == 0 && gpu.memory.0 > 0 {
                return Err(Error::TooLittleToShare {
                    index: gpu.index,
                    memory: gpu.memory,
                    replicas,
                });
            }
            most = most.max(replicas);
            gpus.push(SharedGpu {
                uuid: gpu.uuid.clone(),
                index: gpu.index,
                limit: (limit > 0).then_some(MiB(limit)),
                is_usable: !gpu.lost && !gpu.is_divided(),
            });
        }
        if !gpus.is_empty() {
            daemons.push(Daemon {
                resource: resource.name.clone(),
                directory: directory(root, &resource.name)?,
                gpus,
                threads: (100 / most).max(1),
                mark: String::new(),
            });
        }
    }
    Ok(daemons)
}

/// The name by which the daemon of [`for_shares`] is known. No resource has it.
pub const SHARES: &str = "divvy.dev/shares";

/// Return the daemon for the pods of `divvy agent --mps`. It serves all GPUs of the node, and sets no limits. Each
/// container says in its environment which part of a GPU's threads it may use. `pod` is the UID of the pod that runs the daemon, by which the agent knows the
/// server's processes. `None` if no GPU can be served.
pub fn for_shares(machine: &PluginMachine, root: &Path, pod: &str) -> Option<Daemon> {
    let gpus = machine.gpus.iter().filter(|gpu| !gpu.unreadable && !gpu.is_divided());
    let gpus: Vec<SharedGpu> = gpus
        .map(|gpu| SharedGpu {
            uuid: gpu.uuid.clone(),
            index: gpu.index,
            limit: None,
            is_usable: !gpu.lost,
        })
        .collect();
    (!gpus.is_empty()).then(|| Daemon {
        resource: SHARES.to_owned(),
        directory: root.join(SHARES),
        gpus,
        threads: 100,
        mark: pod.to_owned(),
    })
}

/// Return the daemon that an ended run of the program has left behind in this directory. `text` is the content of its file
/// [`EXCLUSIVE`]; lines that are no UUIDs are left out. [`changes`] always ends such a daemon.
pub fn left_over(resource: &str, directory: PathBuf, text: &str) -> Daemon {
    let is_uuid = |line: &&str| {
        line.strip_prefix("GPU-")
            .is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-'))
    };
    let gpu = |uuid: &str| SharedGpu {
        uuid: uuid.to_owned(),
        index: 0,
        limit: None,
        is_usable: true,
    };
    Daemon {
        resource: resource.to_owned(),
        directory,
        gpus: text.lines().filter(is_uuid).map(gpu).collect(),
        threads: 0,
        mark: String::new(),
    }
}

/// What to do about the daemons of a node after something has changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DaemonChanges {
    /// The resources whose daemons must end. This comes first, because a GPU may move from one daemon to another.
    pub end: Vec<String>,
    /// The daemons to start.
    pub start: Vec<Daemon>,
    /// Daemons that keep running. They must be described like this when they are started again.
    pub keep: Vec<Daemon>,
}

/// Return what to do so that the wanted daemons run. `started` has the daemons as they were started. A daemon whose clients would
/// not notice a difference keeps running, because its end would end its clients.
pub fn changes(started: &[Daemon], wanted: &[Daemon]) -> DaemonChanges {
    let mut changes = DaemonChanges::default();
    for daemon in wanted {
        match started.iter().find(|known| known.resource == daemon.resource) {
            Some(known) if known.serves(daemon) => changes.keep.push(daemon.clone()),
            _ => changes.start.push(daemon.clone()),
        }
    }
    let kept: BTreeSet<&str> = changes.keep.iter().map(|daemon| daemon.resource.as_str()).collect();
    let ending = started.iter().filter(|known| !kept.contains(known.resource.as_str()));
    changes.end = ending.map(|known| known.resource.clone()).collect();
    changes
}

/// What was found out about a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonReport {
    /// It was started, and its limits are set.
    Started,
    /// It could not be started.
    NotStarted,
    /// It runs, or answers.
    Lives,
    /// It does not answer.
    Silent {
        /// Whether its process exists.
        is_running: bool,
    },
}

/// What to do next about a daemon. Times are in ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonStep {
    /// Look after this time whether its process runs.
    Look(u64),
    /// Ask it after this time for an answer.
    Ask(u64),
    /// Withdraw it from service at once, and start it after this time.
    Start(u64),
}

/// The intervals of the supervision in ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intervals {
    /// The time between two checks.
    pub check: u64,
    /// The time between two questions to a daemon. For each question it writes five lines into a log that it never shortens.
    pub ask: u64,
    /// The time after a failed start.
    pub retry: u64,
    /// The time before the first restart. It doubles with each restart up to `retry`.
    pub backoff: u64,
    /// How long the devices of a resource stay healthy while its daemon restarts.
    pub grace: u64,
}

impl Default for Intervals {
    fn default() -> Intervals {
        Intervals {
            check: 3_000,
            ask: 600_000,
            // As NVIDIA's program.
            retry: 30_000,
            backoff: 1_000,
            grace: 30_000,
        }
    }
}

/// The number of good checks in a row after which a daemon counts as reliable again.
const RELIABLE: u32 = 20;

/// The supervision of one daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Supervision {
    intervals: Intervals,
    restarts: u32,
    checks: u32,
    /// The time since the last question.
    unasked: u64,
    is_silent: bool,
}

impl Supervision {
    /// Create the supervision of a daemon that is about to be started.
    pub fn new(intervals: Intervals) -> Supervision {
        Supervision {
            intervals,
            restarts: 0,
            checks: 0,
            unasked: 0,
            is_silent: false,
        }
    }

    /// Return what to do after a report. A daemon whose process exists is started again only if it is silent twice in a row: a
    /// restart ends its clients, and a node under load may just be slow.
    pub fn next(&mut self, report: DaemonReport) -> DaemonStep {
        let was_silent = std::mem::replace(&mut self.is_silent, matches!(report, DaemonReport::Silent { .. }));
        match report {
            DaemonReport::NotStarted => DaemonStep::Start(self.intervals.retry),
            DaemonReport::Started => DaemonStep::Look(self.intervals.check),
            DaemonReport::Lives => {
                self.checks = self.checks.saturating_add(1);
                if self.checks >= RELIABLE {
                    self.restarts = 0;
                }
                self.unasked = self.unasked.saturating_add(self.intervals.check);
                if self.unasked < self.intervals.ask {
                    return DaemonStep::Look(self.intervals.check);
                }
                self.unasked = 0;
                DaemonStep::Ask(self.intervals.check)
            }
            DaemonReport::Silent { is_running: true } if !was_silent => DaemonStep::Ask(self.intervals.check),
            DaemonReport::Silent { .. } => {
                let factor = 1u64.checked_shl(self.restarts).unwrap_or(u64::MAX);
                let pause = self.intervals.backoff.saturating_mul(factor).min(self.intervals.retry);
                *self = Supervision {
                    restarts: self.restarts.saturating_add(1),
                    ..Supervision::new(self.intervals)
                };
                DaemonStep::Start(pause)
            }
        }
    }
}

/// What the device plugin knows about the daemon of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Service {
    /// It serves the resource with its limits.
    Serves,
    /// It served, and is expected back. The devices stay healthy, because the kubelet rejects a pod for good if it is bound to the
    /// node at this moment. Containers wait until the daemon serves again.
    Restarts {
        /// When it was first found missing, in ms.
        since: u64,
        /// What is missing.
        reason: String,
    },
    /// It does not serve. The devices are unhealthy, or not registered yet.
    Absent(String),
}

impl Service {
    /// Return what is known after a check at `now` (in ms), by what was known before and what the check found to be missing.
    pub fn after(before: Option<&Service>, missing: Option<String>, now: u64, intervals: Intervals) -> Service {
        let Some(reason) = missing else {
            return Service::Serves;
        };
        let since = match before {
            Some(Service::Serves) => now,
            Some(Service::Restarts { since, .. }) => *since,
            _ => return Service::Absent(reason),
        };
        if now.saturating_sub(since) < intervals.grace {
            Service::Restarts { since, reason }
        } else {
            Service::Absent(reason)
        }
    }
}

/// The maximum number of lines of a daemon's log that are passed on at a time, and of characters of a line.
const LINES: usize = 40;
const CHARACTERS: usize = 400;

/// Return the lines of a daemon's log that are passed on, and the number of the others. What it writes about each question is left out, except what it did not
/// accept.
pub fn excerpt(text: &str) -> (Vec<String>, usize) {
    /// `[2026-11-30 03:46:37.035 Control 21122] Cmd:get_default_active_thread_percentage`
    fn is_about_a_question(line: &str) -> bool {
        let said = line.rsplit_once("] ").map_or(line, |(_, said)| said);
        matches!(said, "Accepting connection..." | "NEW UI" | "UI closed")
            || said.starts_with("Cmd:get_")
            || said.parse::<f64>().is_ok()
    }
    let mut lines = text
        .lines()
        .filter(|line| !line.trim().is_empty() && !is_about_a_question(line));
    let first = lines.by_ref().take(LINES);
    let first = first.map(|line| line.chars().take(CHARACTERS).collect()).collect();
    (first, lines.count())
}
