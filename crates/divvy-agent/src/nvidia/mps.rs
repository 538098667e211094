//! The agent in place of NVIDIA's MPS control daemon: the same flags, configuration, files, and commands.
//!
//! ```text
//! divvy-probe ─► facts ─► divvy_nvidia_plugin::{offer, mps::daemons} ─► mps::changes ─► supervisor ─► host, tools: nvidia-smi,
//! configuration file, SIGHUP ──────┘                                        └─► .ready                nvidia-cuda-mps-control
//! ```
//!
//! The device plugin runs in another container, and follows the daemons by their files and their answers (`watch`).

mod host;
mod process;
mod shm;
mod supervisor;
mod tools;
mod watch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use divvy_hardware::client::{ProbeClient, ProbeHandle, ProbeSource, Update};
use divvy_hardware::{Failure, GpuProcess, GpuProcesses};
use divvy_nvidia_config::{Imex, NvidiaConfig};
use divvy_nvidia_plugin::mps::share::{MpsProcess, SharesAbove};
use divvy_nvidia_plugin::mps::{Daemon, EXCLUSIVE, READY, STARTED, changes, daemons, for_shares, left_over};
use divvy_nvidia_plugin::offer;
use futures::future::join_all;
use tokio::task::{JoinError, JoinSet};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use self::host::MpsHost;
pub(super) use self::shm::{mount_pipe, mount_shm};
use self::supervisor::{Serving, supervise};
use self::tools::Tools;
pub(super) use self::tools::{IN_ROOT, run_in_root};
pub(super) use self::watch::{Daemons, served};
use super::facts::DriverFacts;
use super::health::NodeHealth;
use super::reload::LoadError;
use super::{ConfigSource, LoadedConfig, MpsSurroundings, Pace, Surroundings, probe, refusal};
use crate::{Error, files};

impl MpsSurroundings {
    fn host(&self) -> MpsHost {
        MpsHost {
            tools: Tools {
                path: self.path.clone(),
                root: self.driver_root.clone(),
                own: self.own.clone(),
                deadline: self.deadline,
            },
            root: self.system.clone(),
            end_limit: self.end_limit,
        }
    }
}

/// Run the MPS control daemons of the configuration until `stop` is cancelled. A new configuration, other GPUs, and a daemon that
/// dies restart only the daemons that they concern.
///
/// # Errors
/// Fails if the configuration is wrong or does not suit the node, or if the driver cannot be initialized and the configuration
/// says not to wait for it. The daemons have been ended.
pub async fn mps_control_daemon(source: ConfigSource, surroundings: Surroundings, stop: CancellationToken) -> Result<(), Error> {
    let mut reloads = source.watch();
    let mut config = load(&source).map_err(|error| Error::Plugin(error.to_string()))?;
    let mut node = MpsNode::new(&surroundings)?;
    let mut spawn = ProbeSource::Spawn(probe(&config, &surroundings));
    let mut client = ProbeClient::start(spawn.clone(), surroundings.pace.timing());
    let mut counts = tokio::time::interval(surroundings.mps.count);
    counts.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let ended = loop {
        let turn = async {
            tokio::select! {
                update = client.next() => node.update(&config, update).await,
                result = node.changed() => result,
                _ = counts.tick() => {
                    node.count(&client.handle()).await;
                    Ok(())
                }
                () = reloads.changed() => match load(&source) {
                    Ok(next) => {
                        info!("the configuration is read again");
                        config = next;
                        let wanted = ProbeSource::Spawn(probe(&config, &surroundings));
                        if wanted != spawn {
                            client = ProbeClient::start(wanted.clone(), surroundings.pace.timing());
                            spawn = wanted;
                        }
                        node.reconcile(&config).await
                    }
                    Err(error) => {
                        error!("{error}; the daemons continue with the previous configuration");
                        Ok(())
                    }
                },
            }
        };
        // The end waits for nothing: whatever a turn leaves half done, `MpsNode::end` ends.
        let result = tokio::select! {
            () = stop.cancelled() => break Ok(()),
            result = turn => result,
        };
        if result.is_err() {
            break result;
        }
    };
    node.end().await;
    ended
}

fn load(source: &ConfigSource) -> Result<NvidiaConfig, LoadError> {
    let LoadedConfig { config, warnings } = source.load()?;
    warnings.iter().for_each(|warning| warn!("{warning}"));
    // IMEX channels concern the device plugin only.
    Ok(NvidiaConfig {
        imex: Imex::default(),
        ..config
    })
}

/// What is known about the node, and the daemons that run on it.
struct MpsNode {
    mps: MpsSurroundings,
    facts: DriverFacts,
    /// Whether the driver's description of the GPUs has led to a decision.
    is_planned: bool,
    /// Whether the configuration suits the GPUs.
    is_suitable: bool,
    serving: Serving,
    running: BTreeMap<String, RunningDaemon>,
    tasks: JoinSet<String>,
    /// What an ended run of this program has left behind.
    left_over: Vec<Daemon>,
    root: PathBuf,
    said: Vec<String>,
    shares: SharesAbove,
}

/// The supervisor of one daemon.
struct RunningDaemon {
    description: tokio::sync::watch::Sender<Daemon>,
    stop: CancellationToken,
}

impl MpsNode {
    /// Remove the markers of an earlier run: its daemons ended with its container.
    fn new(surroundings: &Surroundings) -> Result<MpsNode, Error> {
        let mps = surroundings.mps.clone();
        files::make_directory(&mps.root, 0o755)?;
        files::remove(&mps.root, READY)?;
        Ok(MpsNode {
            left_over: clear(&mps.root)?,
            facts: DriverFacts::default(),
            is_planned: false,
            is_suitable: true,
            serving: Serving::default(),
            running: BTreeMap::new(),
            tasks: JoinSet::new(),
            root: surroundings.root.clone(),
            said: Vec::new(),
            shares: SharesAbove::default(),
            mps,
        })
    }

    async fn update(&mut self, config: &NvidiaConfig, update: Option<Update>) -> Result<(), Error> {
        match update {
            Some(Update::Snapshot(snapshot)) => {
                self.facts.snapshot(snapshot);
                self.reconcile(config).await
            }
            // A daemon says itself how it copes with an error of a GPU.
            Some(Update::Fault(_)) => Ok(()),
            Some(Update::Unavailable(failure)) => self.unavailable(config, &failure),
            None => Err(Error::Ended {
                part: "the probe's client",
                text: "it stopped sending updates".to_owned(),
            }),
        }
    }

    /// Process a failed attempt to get a snapshot from the driver. Daemons that run are left alone.
    fn unavailable(&mut self, config: &NvidiaConfig, failure: &Failure) -> Result<(), Error> {
        if let Some(text) = refusal(config, failure)
            && self.facts.is_empty()
            && config.fail_on_init_error
            // A node of the same DaemonSet may have no GPU of NVIDIA.
            && !self.mps.for_shares
        {
            return Err(Error::Plugin(format!("error getting daemons: nvml init failed: {text}")));
        }
        self.say(vec![format!("the driver does not answer: {failure}")]);
        Ok(())
    }

    /// Let the daemons run that the configuration wants on these GPUs.
    async fn reconcile(&mut self, config: &NvidiaConfig) -> Result<(), Error> {
        // Before the driver has answered, nothing is known about the GPUs.
        if self.facts.driver.is_empty() && self.facts.is_empty() {
            return Ok(());
        }
        let wanted = self.wanted(config)?;
        let started: Vec<Daemon> = {
            let serving = self.serving.borrow();
            let described = |(name, running): (&String, &RunningDaemon)| match serving.get(name) {
                Some(daemon) => daemon.clone(),
                None => running.description.borrow().clone(),
            };
            self.running.iter().map(described).collect()
        };
        self.end_left_over().await;
        let changes = changes(&started, &wanted);
        if !changes.end.is_empty() {
            self.unready();
        }
        for resource in &changes.end {
            if let Some(running) = self.running.get(resource) {
                running.stop.cancel();
            }
        }
        while changes.end.iter().any(|resource| self.running.contains_key(resource)) {
            self.joined().await?;
        }
        for daemon in changes.keep {
            if let Some(running) = self.running.get(&daemon.resource) {
                running.description.send_replace(daemon);
            }
        }
        for daemon in changes.start {
            self.start(daemon);
        }
        self.is_planned = true;
        self.mark()
    }

    /// End what an ended run of this program has left behind.
    async fn end_left_over(&mut self) {
        let host = self.mps.host();
        join_all(self.left_over.iter().map(async |daemon| {
            info!(
                resource = daemon.resource,
                "an earlier run has left files behind; they are removed"
            );
            host.end(daemon).await;
        }))
        .await;
        self.left_over.clear();
    }

    /// Return the daemons that the configuration wants on these GPUs.
    fn wanted(&mut self, config: &NvidiaConfig) -> Result<Vec<Daemon>, Error> {
        let refused = |error: divvy_nvidia_plugin::Error| {
            let within = match error {
                divvy_nvidia_plugin::Error::TooManyClients { .. } => "invalid MPS configuration: ",
                _ => "",
            };
            Error::Plugin(format!("error getting daemons: {within}{error}"))
        };
        let machine = self
            .facts
            .machine(&NodeHealth::new(config, Pace::default()).0, config, &self.root);
        if self.mps.for_shares {
            let wanted: Vec<Daemon> = for_shares(&machine, &self.mps.root, &self.mps.pod).into_iter().collect();
            self.say(if wanted.is_empty() {
                vec!["no GPU of this node can be used through MPS".to_owned()]
            } else {
                Vec::new()
            });
            return Ok(wanted);
        }
        let offered = offer(config, &machine);
        self.is_suitable = !matches!(offered, Err(divvy_nvidia_plugin::Error::MpsWithMig));
        let (resources, mut said) = match offered {
            Ok(found) => (found.resources, found.warnings),
            Err(divvy_nvidia_plugin::Error::MpsWithMig) => {
                let text = "MPS sharing is not supported for MIG devices; skipping daemon creation".to_owned();
                (Vec::new(), vec![text])
            }
            Err(error) => return Err(refused(error)),
        };
        let wanted = daemons(&resources, &machine, &self.mps.root).map_err(refused)?;
        if wanted.is_empty() {
            said.push("No devices are configured for MPS sharing; Waiting indefinitely.".to_owned());
        }
        self.say(said);
        Ok(wanted)
    }

    fn start(&mut self, daemon: Daemon) {
        let name = daemon.resource.clone();
        let (description, described) = tokio::sync::watch::channel(daemon);
        let stop = CancellationToken::new();
        let supervised = supervise(
            self.mps.host(),
            self.mps.intervals,
            described,
            self.serving.clone(),
            stop.clone(),
        );
        let resource = name.clone();
        self.tasks.spawn(async move {
            supervised.await;
            resource
        });
        self.running.insert(name, RunningDaemon { description, stop });
    }

    /// Wait until the daemons that serve are others, and update the marker that says that all do.
    async fn changed(&mut self) -> Result<(), Error> {
        let mut serving = self.serving.subscribe();
        // A change between the last update of the marker and now must not be missed.
        if self.is_ready() == self.has_marker() {
            tokio::select! {
                // There is always a sender: this node's own.
                _ = serving.changed() => {}
                Some(Err(error)) = self.tasks.join_next() => return Err(broken(&error)),
            }
        }
        self.mark()
    }

    fn is_ready(&self) -> bool {
        let serving = self.serving.borrow();
        self.is_planned && self.is_suitable && self.running.keys().all(|name| serving.contains_key(name))
    }

    fn has_marker(&self) -> bool {
        self.mps.root.join(READY).exists()
    }

    fn mark(&mut self) -> Result<(), Error> {
        match (self.is_ready(), self.has_marker()) {
            (true, false) => {
                files::write_atomic(&self.mps.root, READY, b"", 0o644)?;
                if !self.running.is_empty() {
                    info!("all MPS control daemons serve with their limits");
                }
            }
            (false, true) => self.unready(),
            _ => {}
        }
        Ok(())
    }

    fn unready(&self) {
        if let Err(error) = files::remove(&self.mps.root, READY) {
            warn!("Failed to remove .ready file: {error}");
        }
    }

    /// Wait until a supervisor ends.
    async fn joined(&mut self) -> Result<(), Error> {
        match self.tasks.join_next().await {
            Some(Ok(resource)) => {
                self.running.remove(&resource);
                Ok(())
            }
            Some(Err(error)) => Err(broken(&error)),
            None => Err(Error::Ended {
                part: "the supervision of the MPS control daemons",
                text: "a daemon has no supervisor".to_owned(),
            }),
        }
    }

    /// Warn of containers that use more than their share of a GPU.
    async fn count(&mut self, probe: &ProbeHandle) {
        let daemons: Vec<Daemon> = self.serving.borrow().values().cloned().collect();
        if daemons.is_empty() {
            return;
        }
        let gpus = match probe.processes().await {
            Ok(gpus) => gpus,
            Err(failure) => {
                debug!("what containers use of the shared GPUs is not known: {failure}");
                return;
            }
        };
        for excess in self.shares.count(&daemons, &clients(&gpus)) {
            warn!("{excess}");
        }
    }

    fn say(&mut self, texts: Vec<String>) {
        if self.said != texts {
            texts.iter().for_each(|text| warn!("{text}"));
            self.said = texts;
        }
    }

    /// End all daemons at the same time, and leave the node as it was.
    async fn end(mut self) {
        self.unready();
        info!("Stopping MPS daemons.");
        self.running.values().for_each(|running| running.stop.cancel());
        let mut tasks = std::mem::take(&mut self.tasks);
        let ended = async {
            while let Some(ended) = tasks.join_next().await {
                if let Err(error) = ended {
                    error!("{}", broken(&error));
                }
            }
        };
        tokio::join!(ended, self.end_left_over());
    }
}

/// Return the processes that run in containers.
fn clients(gpus: &[GpuProcesses]) -> Vec<MpsProcess> {
    let client = |gpu: &str, process: &GpuProcess| {
        Some(MpsProcess {
            gpu: gpu.to_owned(),
            pod: process.pod.clone()?,
            container: process.container.clone()?,
            used: process.used,
        })
    };
    let processes = gpus
        .iter()
        .flat_map(|gpu| gpu.processes.iter().map(|process| (gpu.uuid.as_str(), process)));
    processes.filter_map(|(gpu, process)| client(gpu, process)).collect()
}

fn broken(error: &JoinError) -> Error {
    Error::Ended {
        part: "the supervision of an MPS control daemon",
        text: error.to_string(),
    }
}

/// Remove the markers that say that a daemon serves. Return the daemons to which they belonged.
fn clear(root: &Path) -> Result<Vec<Daemon>, Error> {
    let mut found = Vec::new();
    for prefix in directories(root)? {
        for name in directories(&root.join(&prefix))? {
            let directory = root.join(&prefix).join(&name);
            let (has_marker, gpus) = (directory.join(STARTED).exists(), directory.join(EXCLUSIVE));
            files::remove(&directory, STARTED)?;
            let text = files::read(&gpus, files::LIMIT)?;
            if has_marker || text.is_some() {
                found.push(left_over(&format!("{prefix}/{name}"), directory, &text.unwrap_or_default()));
            }
        }
    }
    Ok(found)
}

/// Return the names of a directory's directories. Links are left out.
fn directories(path: &Path) -> Result<Vec<String>, Error> {
    let is_directory = |name: &String| std::fs::symlink_metadata(path.join(name)).is_ok_and(|data| data.is_dir());
    Ok(files::names(path)?.into_iter().filter(is_directory).collect())
}

#[cfg(test)]
mod tests {
    use divvy_hardware::{FailureCode, GpuFacts, SNAPSHOT_VERSION, Snapshot};
    use divvy_model::{MiB, MigDevice};
    use divvy_nvidia_config::{Environment, Invocation, NvidiaProgram};

    use super::*;

    fn config(arguments: &[&str], text: &str) -> NvidiaConfig {
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        let invocation =
            Invocation::parse(NvidiaProgram::MpsControlDaemon, "1", &arguments, &Environment::new()).expect("arguments");
        invocation.config(Some(text)).expect("a configuration").0
    }

    fn surroundings(directory: &Path) -> Surroundings {
        let at = |name: &str| directory.join(name);
        Surroundings {
            probe: at("probe"),
            probe_dir: at("private"),
            sockets: at("sockets"),
            cdi_dir: at("cdi"),
            root: at("root"),
            mps: MpsSurroundings {
                root: at("mps"),
                ..MpsSurroundings::below(Path::new("/"))
            },
            pace: Pace::default(),
            metrics: None,
            events: None,
        }
    }

    #[tokio::test]
    async fn without_a_driver_only_the_daemon_for_shares_waits() {
        for for_shares in [true, false] {
            let directory = tempfile::tempdir().expect("a directory");
            let mut surroundings = surroundings(directory.path());
            surroundings.mps.for_shares = for_shares;
            let mut node = MpsNode::new(&surroundings).expect("a node");
            let failure = Failure::new(FailureCode::LibraryNotFound, "no library");
            let result = node.unavailable(&config(&[], ""), &failure);
            assert_eq!(result.is_ok(), for_shares, "{result:?}");
        }
    }

    /// A node on which nothing is shared is ready.
    #[tokio::test]
    async fn a_node_that_should_share_and_cannot_is_unready() {
        let shared = "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}";
        for (config, expected) in [(config(&[], ""), true), (config(&["--mig-strategy=single"], shared), false)] {
            let directory = tempfile::tempdir().expect("a directory");
            let surroundings = surroundings(directory.path());
            let mut node = MpsNode::new(&surroundings).expect("a node");
            let gpu = GpuFacts {
                uuid: "GPU-0".to_owned(),
                total: MiB(40960),
                mig: Some((true, true)),
                mig_devices: vec![MigDevice {
                    uuid: "MIG-0".to_owned(),
                    ..MigDevice::default()
                }],
                ..GpuFacts::default()
            };
            let snapshot = Snapshot {
                v: SNAPSHOT_VERSION,
                drivers: BTreeMap::new(),
                gpus: vec![gpu],
                unreadable: Vec::new(),
            };
            node.update(&config, Some(Update::Snapshot(snapshot)))
                .await
                .expect("a decision");
            let marker = surroundings.mps.root.join(READY);
            assert_eq!((marker.exists(), node.running.len()), (expected, 0));
            node.end().await;
            assert!(!marker.exists());
        }
    }
}
