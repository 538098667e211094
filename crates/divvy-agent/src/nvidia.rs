//! The agent in place of NVIDIA's device plugin, GPU feature discovery, and MPS control daemon: the same flags, configuration, sockets, and answers.
//!
//! ```text
//! divvy-probe ─► health, facts ─► divvy_nvidia_plugin::offer ─► plugin ── kubelet: ListAndWatch, preferred, Allocate
//! configuration file, SIGHUP ─────────────┘                      └─ mps: whether the MPS control daemon serves
//! ```
//!
//! On a Tegra the probe is not needed: the only device is known.
//!
//! Like NVIDIA's plugin, it needs no access to the API server. Where it has one, changes of a GPU's health are events on the node.

mod cdi;
mod config_manager;
mod facts;
mod health;
mod labels;
mod main;
mod mps;
mod node_feature;
mod outlets;
mod plugin;
mod reload;
mod surroundings;
mod tegra;
mod vfio;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use divvy_hardware::client::{ProbeClient, ProbeSource, Spawn, Update};
use divvy_hardware::nvidia::has_library;
use divvy_hardware::{Failure, FailureCode};
use divvy_kubelet::plugin::{PluginServer, PluginSettings, PluginStatus};
use divvy_model::{Health as GpuHealth, Vendor};
use divvy_nvidia_config::{Discovery, NvidiaConfig, NvidiaMigStrategy, SharingStrategy};
use divvy_nvidia_plugin::mps::Service;
use divvy_nvidia_plugin::{Nvml, OfferedResource, Platform, PluginGpu, PluginMachine, check_tegra, offer, platform};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use self::cdi::Specs;
pub use self::config_manager::manage_config;
use self::facts::DriverFacts;
use self::health::NodeHealth;
pub use self::main::main;
pub use self::mps::mps_control_daemon;
pub(crate) use self::node_feature::PublishedFeature;
use self::outlets::{OutletState, Outlets};
use self::plugin::{NvidiaPlugin, ServedData};
use self::reload::Reloads;
pub use self::reload::{ConfigSource, LoadedConfig};
pub use self::surroundings::{MpsSurroundings, OnNode, Pace, Surroundings};
use crate::Error;
use crate::health_change::HealthChange;
use crate::observed::{Observed as _, follow_registration};

/// The parts in `/readyz`, besides the resources that are registered with the kubelet.
const GPUS: &str = "gpus";
const CONFIGURATION: &str = "configuration";
const MPS: &str = "mps";

/// Serve the resources of NVIDIA's device plugin until `stop` is cancelled. A new configuration, or SIGHUP, makes the plugin
/// start over. A configuration that cannot be read or does not suit the node changes nothing.
///
/// # Errors
/// Fails if the first configuration is wrong or does not suit the node, or if the driver cannot be initialized and the configuration
/// says not to wait for it.
pub async fn device_plugin(source: ConfigSource, surroundings: Surroundings, stop: CancellationToken) -> Result<(), Error> {
    let mut reloads = source.watch();
    let mut next = Some(source.load().map_err(|error| Error::Plugin(error.to_string()))?);
    let outlets = Outlets::open(&surroundings, &stop)?;
    while let Some(loaded) = next {
        for warning in &loaded.warnings {
            warn!("{warning}");
        }
        next = serve(&loaded.config, &source, &mut reloads, &surroundings, &outlets, &stop).await?;
    }
    Ok(())
}

/// Serve one configuration until `stop` is cancelled, or until there is another one. Return the other one.
async fn serve(
    config: &NvidiaConfig,
    source: &ConfigSource,
    reloads: &mut Reloads,
    surroundings: &Surroundings,
    outlets: &Outlets,
    stop: &CancellationToken,
) -> Result<Option<LoadedConfig>, Error> {
    let mut node = ServedNode::new(config, surroundings, outlets, stop);
    let mut client = if node.find_tegra(&Nvml::Silent)? {
        None
    } else {
        Some(ProbeClient::start(
            ProbeSource::Spawn(probe(config, surroundings)),
            surroundings.pace.timing(),
        ))
    };
    // A configuration that does not suit the node yet.
    let mut wanted = None;
    let other = loop {
        let next = async {
            match &mut client {
                Some(client) => client.next().await,
                None => std::future::pending().await,
            }
        };
        let update = tokio::select! {
            () = stop.cancelled() => break None,
            update = next => update,
            changed = node.changed() => {
                changed?;
                node.publish()?;
                continue;
            }
            () = reloads.changed() => {
                wanted = node.reload(source);
                if node.suits(wanted.as_ref()) {
                    info!("the configuration is read again; the plugin starts over");
                    break wanted;
                }
                continue;
            }
        };
        let Some(update) = update else {
            return Err(Error::Ended {
                part: "the probe's client",
                text: "it stopped sending updates".to_owned(),
            });
        };
        let answer = match &update {
            Update::Snapshot(snapshot) => tegra::nvml(Ok(snapshot)),
            Update::Unavailable(failure) => tegra::nvml(Err(failure)),
            Update::Fault(_) => Nvml::Silent,
        };
        if node.find_tegra(&answer)? {
            client = None;
            continue;
        }
        let changes = node.update(update)?;
        // Let the device lists leave for the kubelet before anything is logged.
        tokio::task::yield_now().await;
        changes.into_iter().for_each(|change| outlets.tell(change));
        if node.suits(wanted.as_ref()) {
            info!("the new configuration suits the node now; the plugin starts over");
            break wanted;
        }
    };
    node.end().await;
    Ok(other)
}

/// Refuse a configuration that a Tegra does not support.
fn check_platform(config: &NvidiaConfig) -> Result<(), Error> {
    check_tegra(config).map_err(|error| Error::Plugin(format!("unable to validate flags: {error}")))
}

/// Return the error about a configuration that does not suit the node, in NVIDIA's words.
fn unsuitable(error: divvy_nvidia_plugin::Error) -> Error {
    let within = match error {
        divvy_nvidia_plugin::Error::NoImexChannel(_) => "",
        _ => "unable to create plugins: failed to construct resource managers: ",
    };
    Error::Plugin(format!("error getting plugins: {within}{error}"))
}

/// Return what to say about a driver that refuses, in NVIDIA's words, and what to do. The result is `None` for any other failure.
fn refusal(config: &NvidiaConfig, failure: &Failure) -> Option<String> {
    match failure.code {
        FailureCode::DriverNotLoaded => {
            Some("Driver Not Loaded. Load the kernel module (modprobe nvidia), or install the driver".to_owned())
        }
        FailureCode::LibraryNotFound => Some(format!(
            "ERROR_LIBRARY_NOT_FOUND. Mount the driver's root at {}, or name the path with --driver-root-ctr-path",
            config.plugin.container_driver_root
        )),
        code if code.is_refusal() => Some(failure.text.clone()),
        _ => None,
    }
}

/// Return how to start the probe. It looks for the driver's library first where the driver's root is mounted in the container.
fn probe(config: &NvidiaConfig, surroundings: &Surroundings) -> Spawn {
    let mounted = PathBuf::from(&config.plugin.container_driver_root);
    Spawn {
        program: surroundings.probe.clone(),
        nvml_library: None,
        driver_root: has_library(&mounted).then_some(mounted),
        sys_root: (surroundings.root != Path::new("/")).then(|| surroundings.root.clone()),
        env: Vec::new(),
        share_files: None,
        watchdog: None,
        dir: surroundings.probe_dir.clone(),
        log: None,
    }
}

/// What is known about the node, and what is served for it.
struct ServedNode<'c> {
    config: &'c NvidiaConfig,
    surroundings: &'c Surroundings,
    outlets: &'c Outlets,
    started: Instant,
    facts: DriverFacts,
    has_tegra_files: bool,
    platform: Platform,
    health: NodeHealth,
    specs: Specs,
    served: Arc<ServedData>,
    running: BTreeMap<String, RunningServer>,
    servers: JoinSet<divvy_kubelet::Result<()>>,
    stop: CancellationToken,
    /// The MPS control daemons, if devices are shared through MPS.
    daemons: Option<mps::Daemons>,
    /// The messages about the offer that were logged last. The same messages are not logged again.
    said: Vec<String>,
    /// Whether the driver's silence was reported.
    silence_told: bool,
}

/// The server of one resource.
struct RunningServer {
    devices: watch::Sender<Arc<Vec<divvy_kubelet::plugin::PluginDevice>>>,
    stop: CancellationToken,
}

impl<'c> ServedNode<'c> {
    fn new(
        config: &'c NvidiaConfig,
        surroundings: &'c Surroundings,
        outlets: &'c Outlets,
        stop: &CancellationToken,
    ) -> ServedNode<'c> {
        outlets.shown.ready.set(GPUS, "the probe has not delivered a snapshot yet");
        let (health, unknown) = NodeHealth::new(config, surroundings.pace);
        for word in unknown {
            warn!("DP_DISABLE_HEALTHCHECKS or DP_ENABLE_HEALTHCHECKS contains {word:?}, which is neither an XID nor \"all\"");
        }
        ServedNode {
            config,
            surroundings,
            outlets,
            started: Instant::now(),
            facts: DriverFacts::default(),
            has_tegra_files: tegra::has_files(config, surroundings),
            platform: Platform::Nvml,
            health,
            specs: Specs::default(),
            served: Arc::new(ServedData::new(config.clone())),
            running: BTreeMap::new(),
            servers: JoinSet::new(),
            stop: stop.child_token(),
            daemons: (config.sharing.strategy == SharingStrategy::Mps).then(|| mps::Daemons::follow(surroundings.mps.clone())),
            said: Vec::new(),
            silence_told: false,
        }
    }

    /// Offer a Tegra's GPU if the node is a Tegra by what NVML has answered. Return whether it is one.
    ///
    /// # Errors
    /// The node is a Tegra, and the configuration does not suit it.
    fn find_tegra(&mut self, answer: &Nvml<'_>) -> Result<bool, Error> {
        self.platform = platform(self.config.discovery, self.has_tegra_files, answer);
        if self.platform == Platform::Nvml {
            return Ok(false);
        }
        info!("the node is a Tegra, so the plugin offers its integrated GPU");
        check_platform(self.config)?;
        self.outlets.shown.ready.clear(GPUS);
        self.publish()?;
        Ok(true)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Read the configuration again. Say why it is not used if it cannot be read, or does not suit what is known about the node.
    fn reload(&self, source: &ConfigSource) -> Option<LoadedConfig> {
        let loaded = source
            .load()
            .inspect_err(|error| error!("{error}; the plugin continues with the previous configuration"))
            .ok()?;
        if let Err(error) = self.check(&loaded.config) {
            error!("{error}; the plugin continues with the previous configuration until the new one suits the node");
        }
        Some(loaded)
    }

    /// Report whether there is a new configuration, and whether it suits the node.
    fn suits(&self, wanted: Option<&LoadedConfig>) -> bool {
        wanted.is_some_and(|loaded| self.check(&loaded.config).is_ok())
    }

    /// Refuse a configuration that does not suit the node. Before the driver has answered, every configuration is accepted.
    fn check(&self, config: &NvidiaConfig) -> Result<(), Error> {
        let mut machine = self.facts.machine(&self.health, config, &self.surroundings.root);
        // A plugin that starts over cannot read a lost GPU.
        for gpu in machine.gpus.iter_mut().filter(|gpu| gpu.lost) {
            *gpu = divvy_nvidia_plugin::PluginMachine::unreadable(gpu.index);
        }
        let machine = match (config.discovery, self.platform) {
            (Discovery::Tegra, _) | (Discovery::Auto, Platform::Tegra) => {
                check_platform(config)?;
                machine.into_tegra()
            }
            _ if self.facts.is_empty() => return Ok(()),
            _ => machine,
        };
        let found = offer(config, &machine);
        found.map(drop).map_err(unsuitable)
    }

    /// Process news from the probe, and return what to tell about it.
    fn update(&mut self, update: Update) -> Result<Vec<HealthChange>, Error> {
        let now = self.now();
        match update {
            Update::Snapshot(snapshot) => {
                self.outlets.shown.ready.clear(GPUS);
                self.outlets.shown.counts().probe(true);
                let changed = self.health.snapshot(now, &snapshot);
                self.facts.snapshot(snapshot);
                self.publish()?;
                let answer = std::mem::take(&mut self.silence_told).then(HealthChange::answer);
                Ok(answer.into_iter().chain(self.changes(&changed)).collect())
            }
            Update::Fault(event) => {
                let fault = event.fault;
                if fault.vendor == Vendor::Nvidia {
                    self.outlets.shown.counts().fault(&fault);
                }
                let changed = self.health.fault(now, &fault, self.facts.mig_device(&fault));
                if changed.is_empty() {
                    let gpu = fault.uuid.as_deref().unwrap_or("all");
                    info!(gpu, "{} needs no action", fault.name);
                    return Ok(Vec::new());
                }
                self.publish()?;
                Ok(self.changes(&changed).collect())
            }
            Update::Unavailable(failure) => self.unavailable(now, &failure),
        }
    }

    /// Return which GPUs and MIG devices failed or recovered.
    fn changes(&self, changed: &[String]) -> impl Iterator<Item = HealthChange> {
        changed
            .iter()
            .filter_map(|uuid| self.facts.change(uuid, self.health.verdict(uuid)?))
    }

    /// Show the health of the devices, and what is offered.
    fn show(&self, machine: &PluginMachine) {
        let mut gpus = BTreeMap::new();
        let is_divided = |gpu: &PluginGpu| gpu.is_divided() && self.config.mig_strategy != NvidiaMigStrategy::None;
        for gpu in &machine.gpus {
            let of_gpu = match (gpu.lost || gpu.unreadable, gpu.healthy) {
                (true, _) => GpuHealth::Lost,
                (false, true) => GpuHealth::Ok,
                (false, false) => GpuHealth::Failed,
            };
            if !is_divided(gpu) {
                gpus.insert(gpu.uuid.clone(), of_gpu);
                continue;
            }
            for device in &gpu.mig_devices {
                let health = match of_gpu {
                    GpuHealth::Ok if gpu.failed_mig_devices.contains(&device.uuid) => GpuHealth::Failed,
                    health => health,
                };
                gpus.insert(device.uuid.clone(), health);
            }
        }
        let offered = self.running.iter().map(|(name, running)| {
            let devices = running.devices.borrow();
            let healthy = devices.iter().filter(|device| device.healthy).count() as u64;
            (name.clone(), [healthy, devices.len() as u64 - healthy])
        });
        let offered = offered.collect();
        self.outlets.shown.set(OutletState { gpus, offered });
    }

    /// Compute the offer again, and update the served resources and devices.
    fn publish(&mut self) -> Result<(), Error> {
        let mut machine = self.facts.machine(&self.health, self.config, &self.surroundings.root);
        if self.platform == Platform::Tegra {
            machine = machine.into_tegra();
        }
        machine.cdi_classes = self.specs.update(self.config, self.surroundings, &self.facts);
        self.update_servers(&machine)?;
        self.show(&machine);
        Ok(())
    }

    fn update_servers(&mut self, machine: &PluginMachine) -> Result<(), Error> {
        let outlets = self.outlets;
        let ready = &outlets.shown.ready;
        let found = match offer(self.config, machine) {
            Ok(found) => {
                ready.clear(CONFIGURATION);
                found
            }
            // Nothing is served yet: the configuration does not suit this node.
            Err(error) if self.running.is_empty() => return Err(unsuitable(error)),
            Err(error) => {
                ready.set(CONFIGURATION, error.to_string());
                self.say(vec![format!("{error}; until this is corrected, no device is healthy")]);
                for running in self.running.values() {
                    running.devices.send_modify(|devices| {
                        *devices = Arc::new(devices.iter().cloned().map(unhealthy).collect());
                    });
                }
                return Ok(());
            }
        };
        let mut warnings = found.warnings;
        if found.resources.is_empty() {
            warnings.push("No devices found. Waiting for some to appear.".to_owned());
        }
        let services = self.services(&found.resources);
        let texts = services.iter().filter_map(|(name, service)| match service {
            Service::Serves => None,
            Service::Restarts { reason, .. } => Some(format!(
                "{name}: the MPS control daemon restarts, and containers wait for it: {reason}"
            )),
            Service::Absent(reason) => Some(format!("{name} is not served: error checking MPS daemon health: {reason}")),
        });
        let texts: Vec<String> = texts.collect();
        match texts.first() {
            Some(text) => ready.set(MPS, text.clone()),
            None => ready.clear(MPS),
        }
        warnings.extend(texts);
        self.say(warnings);
        let mut lists: BTreeMap<String, _> = found
            .resources
            .iter()
            .map(|resource| (resource.name().to_owned(), plugin::devices(resource)))
            .collect();
        let absent = services.iter().filter(|(_, service)| matches!(service, Service::Absent(_)));
        for (name, _) in absent {
            // A container would have no limits, or would not start. A resource that is registered already stays registered.
            if let Some(devices) = lists.remove(name)
                && self.running.contains_key(name)
            {
                lists.insert(name.clone(), devices.into_iter().map(unhealthy).collect());
            }
        }
        let sockets: BTreeMap<String, String> = found
            .resources
            .iter()
            .map(|resource| (resource.name().to_owned(), resource.socket()))
            .collect();
        self.served.replace(machine.clone(), found.resources);
        self.running.retain(|name, running| {
            if lists.contains_key(name) {
                return true;
            }
            if running.devices.borrow().is_empty() {
                running.stop.cancel();
                return false;
            }
            // When a plugin ends, the kubelet keeps counting its devices for minutes. So the plugin first sends an empty list,
            // and ends with the next snapshot.
            info!("{name} is no longer offered");
            running.devices.send_replace(Arc::default());
            true
        });
        for (name, devices) in lists {
            match self.running.get(&name) {
                Some(running) => {
                    running.devices.send_if_modified(|sent| {
                        let changed = **sent != devices;
                        if changed {
                            *sent = Arc::new(devices);
                        }
                        changed
                    });
                }
                None => self.start(name.clone(), sockets.get(&name).map_or("", String::as_str), devices),
            }
        }
        Ok(())
    }

    /// Return the resources that are shared through MPS, with what is known about their control daemons.
    fn services(&mut self, resources: &[OfferedResource]) -> BTreeMap<String, Service> {
        let Some(daemons) = &mut self.daemons else {
            return BTreeMap::new();
        };
        let shared = resources
            .iter()
            .filter(|resource| resource.uses_mps())
            .map(OfferedResource::name);
        let shared: BTreeSet<String> = shared.map(str::to_owned).collect();
        daemons.want(shared.clone());
        let services = shared.into_iter().map(|name| {
            let service = daemons.service(&name);
            (name, service)
        });
        services.collect()
    }

    fn start(&mut self, name: String, socket: &str, devices: Vec<divvy_kubelet::plugin::PluginDevice>) {
        let devices = watch::Sender::new(Arc::new(devices));
        let stop = self.stop.child_token();
        let plugin = NvidiaPlugin {
            name: name.clone(),
            devices: devices.clone(),
            served: self.served.clone(),
            mps: self.surroundings.mps.clone(),
        };
        let kubelet = Path::new(&self.config.plugin.kubelet_socket);
        let settings = PluginSettings {
            is_socket_fixed: true,
            kubelet_socket: Some(kubelet.to_owned()).filter(|path| !path.as_os_str().is_empty()),
            registers: !kubelet.as_os_str().is_empty(),
            ..PluginSettings::new(&self.surroundings.sockets, socket.trim_end_matches(".sock"))
        };
        let status = watch::Sender::new(PluginStatus::default());
        let registers = settings.registers;
        let (observed, resource, followed) = (self.outlets.shown.clone(), name.clone(), status.subscribe());
        let follow = async move {
            if registers {
                let part = Cow::Owned(resource.clone());
                follow_registration(observed, Cow::Owned(resource), part, followed).await;
            }
        };
        let server = PluginServer::run(Arc::new(plugin), settings, stop.clone(), status);
        // The last registration is shown before another server of the resource can start.
        self.servers.spawn(async { tokio::join!(server, follow).0 });
        self.running.insert(name, RunningServer { devices, stop });
    }

    /// Process a failed attempt to get a snapshot from the driver.
    fn unavailable(&mut self, now: u64, failure: &Failure) -> Result<Vec<HealthChange>, Error> {
        let is_withdrawn = self.health.unavailable(now);
        self.outlets.shown.counts().probe(false);
        self.outlets.shown.ready.set(GPUS, failure.to_string());
        if let Some(text) = refusal(self.config, failure)
            && self.facts.is_empty()
            && self.config.fail_on_init_error
        {
            return Err(Error::Plugin(format!(
                "error getting plugins: unable to create plugins: failed to construct resource managers: nvml init failed: {text}"
            )));
        }
        let mut changes = Vec::new();
        if is_withdrawn && !self.facts.is_empty() {
            self.publish()?;
            self.silence_told = true;
            changes.push(HealthChange::silence());
        }
        self.say(vec![format!("the driver does not answer: {failure}")]);
        Ok(changes)
    }

    fn say(&mut self, texts: Vec<String>) {
        if self.said != texts {
            for text in &texts {
                warn!("{text}");
            }
            self.said = texts;
        }
    }

    /// Wait until an MPS control daemon answers, or no longer does. Cancel-safe.
    ///
    /// # Errors
    /// A server has ended because of an error.
    async fn changed(&mut self) -> Result<(), Error> {
        let daemons = async {
            match &mut self.daemons {
                Some(daemons) => daemons.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = daemons => Ok(()),
            error = failed(&mut self.servers) => Err(error),
        }
    }

    /// End the servers, and wait until they have removed their sockets.
    async fn end(mut self) {
        self.stop.cancel();
        while self.servers.join_next().await.is_some() {}
    }
}

/// Wait until a server ends because of an error, and return the error.
async fn failed(servers: &mut JoinSet<divvy_kubelet::Result<()>>) -> Error {
    loop {
        match servers.join_next().await {
            Some(Ok(Ok(()))) => {}
            Some(Ok(Err(error))) => return error.into(),
            Some(Err(error)) => {
                return Error::Ended {
                    part: "a plugin server",
                    text: error.to_string(),
                };
            }
            None => std::future::pending().await,
        }
    }
}

fn unhealthy(device: divvy_kubelet::plugin::PluginDevice) -> divvy_kubelet::plugin::PluginDevice {
    divvy_kubelet::plugin::PluginDevice {
        healthy: false,
        ..device
    }
}
