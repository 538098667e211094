//! The embedded cluster: a simulated API server, scheduler, and nodes in this process, with Divvy's real programs as child processes.

mod gpu_programs;
mod plugin;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_model::machine::{MachineNode, Machines};
use divvy_model::{MemoryUnit, Vendor, names};
use rustix::net::{AddressFamily, SocketType, sockopt};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::Instant;

use self::plugin::NvidiaPrograms;
use crate::api::{ApiServer, ApiServerOptions, Clock, Listening};
use crate::controllers::Controllers;
use crate::node::{NodeDescription, TestbedNode};
use crate::programs::{ChildProgram, GpuPrograms, Programs};
use crate::root::ClusterRoot;
use crate::scenario::{
    Cluster, ClusterProgram, End, Living, NodeConfigs, PluginSetup, SelfReport, TestbedMachine, WholeOffer, Witness,
    mounts_of_drivers, write_node_configs,
};
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::simulated_driver;

/// The settings of a cluster.
#[derive(Debug, Clone)]
pub struct EmbeddedSettings {
    /// The description of the machines that can join.
    pub machines: String,
    /// The paths of the real programs.
    pub programs: Programs,
    /// The directory in which the cluster's directory is created.
    pub base: PathBuf,
    /// The seed of everything that a real cluster leaves to chance.
    pub seed: u64,
    /// Additional flags for every agent, for example `--health-recovery 1s`.
    pub agent_flags: Vec<String>,
    /// Whether the machines have the driver's libraries.
    pub drivers: bool,
    /// What containers need to run programs that use a GPU. With it, the machines have the simulated driver's libraries in place of empty files, and the
    /// agents have the guard (`--guard shadow`).
    pub gpu_programs: Option<GpuPrograms>,
    /// Whether to keep every commit for [`ApiServer::history`], which then grows as long as the cluster is up.
    pub audit: bool,
    /// The API server's clock.
    pub clock: Clock,
}

impl EmbeddedSettings {
    /// Return settings for a cluster of these machines with these programs. GPUs that recover are offered again after about three seconds.
    pub fn new(machines: impl Into<String>, programs: Programs) -> EmbeddedSettings {
        let agent_flags = ["--health-recovery", "1s", "--probe-interval", "1s"]
            .map(str::to_owned)
            .to_vec();
        EmbeddedSettings {
            machines: machines.into(),
            programs,
            base: std::env::temp_dir(),
            seed: 1,
            agent_flags,
            drivers: false,
            gpu_programs: None,
            audit: true,
            clock: Clock::system(),
        }
    }
}

/// The directory in which the simulated driver records which process has how much memory.
const LEDGER: &str = "ledger";
/// The directory with the settings of single nodes.
const NODE_CONFIGS: &str = "node-configs";

/// A running cluster.
pub struct Embedded {
    settings: EmbeddedSettings,
    machines: Machines,
    unit: MemoryUnit,
    /// What the agents also offer as a whole.
    whole: WholeOffer,
    /// Whether pods of the agents use GPUs through MPS.
    mps: bool,
    /// Whether the agents have settings of single nodes, in the directory [`NODE_CONFIGS`].
    has_node_configs: bool,
    api: ApiServer,
    listening: Listening,
    client: kube::Client,
    extender_address: SocketAddr,
    // Reserves the port while no extender listens on it.
    _extender_port: OwnedFd,
    scheduler: Option<Scheduler>,
    controllers: Controllers,
    extender: ChildProgram,
    nodes: BTreeMap<String, EmbeddedNode>,
    // Declared last, so that the directory is removed after everything in it has ended.
    root: ClusterRoot,
}

impl std::fmt::Debug for Embedded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Embedded").field("root", &self.root).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct EmbeddedNode {
    node: TestbedNode,
    agent: Option<ChildProgram>,
    /// Where the agent serves its metrics, and the socket that keeps the port.
    metrics: (OwnedFd, SocketAddr),
    /// The programs under NVIDIA's names, if they run in place of the agent.
    nvidia: Option<NvidiaPrograms>,
    /// `mps-control-daemon` for the agent's pods.
    mps: Option<ChildProgram>,
}

impl Embedded {
    /// Start the API server, the extender, and the scheduler. Nodes [`join`](Cluster::join) later.
    pub async fn start(settings: EmbeddedSettings) -> io::Result<Embedded> {
        let machines = Machines::parse(&settings.machines)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?;
        let root = ClusterRoot::create(&settings.base)?;
        std::fs::write(root.path().join("machines.toml"), &settings.machines)?;
        if settings.gpu_programs.is_some() {
            std::fs::create_dir(root.path().join(LEDGER))?;
        }
        let api = ApiServer::new(ApiServerOptions {
            seed: Some(settings.seed),
            token: Some(token()?),
            audit: settings.audit,
            clock: settings.clock.clone(),
            ..ApiServerOptions::default()
        });
        let listening = api.listen(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
        write_private(&root.path().join("kubeconfig"), &api.kubeconfig(listening.addr()))?;
        let (extender_port, extender_address) = reserve_port()?;
        let extender_kubeconfig = root.path().join("kubeconfig-extender");
        write_private(&extender_kubeconfig, &api.kubeconfig_for(listening.addr(), "extender"))?;
        let extender = start_extender(
            &settings,
            root.path(),
            &extender_kubeconfig,
            extender_address,
            MemoryUnit::GIB,
        )?;
        let client = api.client();
        let scheduler = Some(start_scheduler(&settings, client.clone(), extender_address));
        let controllers = Controllers::start(client.clone());
        let mut cluster = Embedded {
            settings,
            machines,
            unit: MemoryUnit::GIB,
            whole: WholeOffer::Nothing,
            mps: false,
            has_node_configs: false,
            api,
            listening,
            client,
            extender_address,
            _extender_port: extender_port,
            scheduler,
            controllers,
            extender,
            nodes: BTreeMap::new(),
            root,
        };
        cluster.extender_ready().await?;
        Ok(cluster)
    }

    /// Return the path of the kubeconfig file.
    pub fn kubeconfig(&self) -> PathBuf {
        self.root.path().join("kubeconfig")
    }

    /// Return the API server's address, `http://127.0.0.1:…`.
    pub fn api_url(&self) -> String {
        format!("http://{}", self.listening.addr())
    }

    /// Return the extender's address, `http://127.0.0.1:…/gpushare-scheduler`.
    pub fn extender_url(&self) -> String {
        format!("http://{}/gpushare-scheduler", self.extender_address)
    }

    /// Return the API server itself, for its faults and its history.
    pub fn api(&self) -> &ApiServer {
        &self.api
    }

    /// Return the machines that can join.
    pub fn machines(&self) -> &Machines {
        &self.machines
    }

    /// Return a node that has joined, or an error if it has not.
    pub fn node(&self, name: &str) -> io::Result<&TestbedNode> {
        self.nodes.get(name).map(|node| &node.node).ok_or_else(|| not_joined(name))
    }

    /// Do the same as [`Cluster::join`] with a changed node: `tune` may set another order of admission, kubelet bugs, or other timings.
    pub async fn join_as(&mut self, name: &str, tune: impl FnOnce(&mut NodeDescription)) -> io::Result<()> {
        let machine = self.machines.node(name).cloned();
        let machine =
            machine.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("there is no machine named {name:?}")))?;
        let position = self.machines.nodes.iter().position(|node| node.name == name).unwrap_or(0);
        let made_up = || format!("10.0.{}.{}", position / 250, position % 250 + 1);
        let mut spec = NodeDescription {
            address: machine.address.clone().unwrap_or_else(made_up),
            cpus: machine.cpus,
            memory_mib: machine.memory_mib,
            gpu_minors: (0..machine.gpus.len()).map(|index| machine.gpu_minor(index)).collect(),
            seed: self.settings.seed.wrapping_add(position as u64),
            ..NodeDescription::new(name, self.directory(name))
        };
        tune(&mut spec);
        let node = TestbedNode::start(self.client.clone(), spec)
            .await
            .map_err(io::Error::other)?;
        if self.settings.drivers && !machine.gpus.is_empty() {
            simulated_driver::install(&node.paths().sys_root, &machine.driver, self.driver_libraries())?;
        }
        divvy_amd_sim::install(&node.paths().sys_root, &machine.amd)?;
        divvy_intel_sim::install(&node.paths().sys_root, &machine.intel)?;
        self.nodes.insert(
            name.to_owned(),
            EmbeddedNode {
                node,
                agent: None,
                metrics: reserve_port()?,
                nvidia: None,
                mps: None,
            },
        );
        if machine.has_gpus() {
            self.start_agent(name).await
        } else {
            Ok(())
        }
    }

    /// Return where the agents serve their metrics, by node.
    pub fn metrics(&self) -> impl Iterator<Item = (&str, SocketAddr)> {
        let with_agent = self.nodes.iter().filter(|(_, node)| node.agent.is_some());
        with_agent.map(|(name, node)| (name.as_str(), node.metrics.1))
    }

    /// Kill a node's agent with SIGKILL.
    pub async fn kill_agent(&mut self, node: &str) -> io::Result<()> {
        let found = self.nodes.get_mut(node).ok_or_else(|| not_joined(node))?;
        match found.agent.take() {
            Some(mut agent) => agent.kill().await,
            None => Ok(()),
        }
    }

    /// Start a node's agent again.
    pub async fn start_agent(&mut self, name: &str) -> io::Result<()> {
        let directory = self.directory(name);
        let logs = self.root.path().join("logs");
        let kubeconfig = self.kubeconfig_of(&format!("agent-{name}"))?;
        let guard = self.guard_flags();
        let ledger = self.ledger().map(|directory| directory.display().to_string());
        let found = self.nodes.get_mut(name).ok_or_else(|| not_joined(name))?;
        let paths = found.node.paths();
        let text = |path: &Path| path.display().to_string();
        let (machines, control) = (
            text(&self.root.path().join("machines.toml")),
            text(&directory.join("nvml.sock")),
        );
        let node_configs = if self.has_node_configs {
            vec![format!("--node-configs={}", text(&self.root.path().join(NODE_CONFIGS)))]
        } else {
            Vec::new()
        };
        let ledger = ledger.as_deref().map(|directory| ("DIVVY_NVML_SIM_LEDGER", directory));
        let program = ChildProgram::start(
            &format!("agent-{name}"),
            &self.settings.programs.agent,
            &[
                &[
                    "--exit-with-stdin",
                    "--node-name",
                    name,
                    "--kubeconfig",
                    &text(&kubeconfig),
                    "--kubelet-dir",
                    &text(&paths.kubelet_dir),
                    "--cdi-dir",
                    &text(&paths.cdi_dir),
                    "--state-dir",
                    &text(&directory.join("state")),
                    "--sys-root",
                    &text(&paths.sys_root),
                    "--memory-unit",
                    &self.unit.to_string(),
                    &format!("--whole-gpus={}", self.whole.is_offered()),
                    &format!("--mig-strategy={}", self.whole.mig_strategy()),
                    &format!("--mps={}", self.mps),
                    "--probe",
                    &text(&self.settings.programs.probe),
                    "--nvml-library",
                    &text(&self.settings.programs.nvml_sim),
                    "--metrics",
                    &found.metrics.1.to_string(),
                    "--dcgm-metrics",
                ][..],
                &node_configs
                    .iter()
                    .chain(&guard)
                    .chain(&self.settings.agent_flags)
                    .map(String::as_str)
                    .collect::<Vec<_>>(),
            ]
            .concat(),
            &[
                ("DIVVY_NVML_SIM", machines.as_str()),
                ("DIVVY_NVML_SIM_NODE", name),
                ("DIVVY_NVML_SIM_CONTROL", control.as_str()),
            ]
            .into_iter()
            .chain(ledger)
            .collect::<Vec<_>>(),
            &logs,
        )?;
        found.agent = Some(program);
        Ok(())
    }

    /// Stop a node's kubelet and start it again.
    pub async fn restart_kubelet(&mut self, node: &str) -> io::Result<()> {
        self.node(node)?.restart_kubelet(false).await.map_err(io::Error::other)
    }

    /// Kill the extender with SIGKILL, and start a new one.
    pub async fn restart_extender(&mut self) -> io::Result<()> {
        self.kill_extender().await?;
        self.start_extender().await
    }

    /// Wait until a node's kubelet offers all units of the node's agent.
    async fn registered(&self, name: &str) -> io::Result<()> {
        let machine = self.machines.node(name);
        let units: u64 = machine.map_or(0, |machine| {
            machine.gpus.iter().map(|gpu| gpu.memory_mib / self.unit.mib()).sum()
        });
        let amd = machine.map_or(0, |machine| machine.amd.len() as u64);
        let intel = machine.map_or(0, |machine| machine.intel.len() as u64);
        let nvidia = machine.map_or(0, |machine| machine.gpus.len() as u64 * u64::from(self.whole.is_offered()));
        let wanted = [
            (names::GPU_MEM, units),
            (Vendor::Nvidia.whole_resource(), nvidia),
            (Vendor::Amd.whole_resource(), amd),
            (Vendor::Intel.whole_resource(), intel),
        ];
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let resources = self.node(name)?.device_manager().resources;
            let offered = |resource: &str| resources.get(resource).map_or(0, |(_, healthy)| *healthy as u64);
            match wanted.iter().find(|(resource, amount)| offered(resource) != *amount) {
                None => return Ok(()),
                Some((resource, amount)) if Instant::now() > until => {
                    let log = self.agent_log(name);
                    return Err(io::Error::other(format!(
                        "node {name} must offer {amount} of {resource}, but it offers {}. {log}",
                        offered(resource)
                    )));
                }
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }

    /// Replace the agents by new ones, node by node.
    async fn roll_agents(&mut self) -> io::Result<()> {
        let nodes: Vec<String> = self
            .nodes
            .keys()
            .filter(|name| self.has_gpus(name) && !self.runs_nvidia(name))
            .cloned()
            .collect();
        for node in nodes {
            self.stop_agent(&node).await?;
            self.start_agent(&node).await?;
            self.registered(&node).await?;
        }
        Ok(())
    }

    /// Send SIGTERM to a node's agent. Report whether it ended on its own with status 0.
    pub async fn stop_agent(&mut self, name: &str) -> io::Result<bool> {
        match self.nodes.get_mut(name).ok_or_else(|| not_joined(name))?.agent.take() {
            Some(mut agent) => agent.stop().await,
            None => Ok(true),
        }
    }

    /// Return the PID of a node's agent, or `None` if the agent is not running.
    pub fn agent_pid(&self, name: &str) -> Option<u32> {
        self.nodes.get(name)?.agent.as_ref()?.pid()
    }

    /// Return the last lines that a node's agent printed.
    pub fn agent_log(&self, name: &str) -> String {
        self.nodes
            .get(name)
            .and_then(|node| node.agent.as_ref())
            .map(ChildProgram::last_words)
            .unwrap_or_default()
    }

    /// Kill the extender with SIGKILL.
    pub async fn kill_extender(&mut self) -> io::Result<()> {
        self.extender.kill().await
    }

    /// Start the extender again and wait until it is ready.
    pub async fn start_extender(&mut self) -> io::Result<()> {
        let kubeconfig = self.kubeconfig_of("extender")?;
        self.extender = start_extender(
            &self.settings,
            self.root.path(),
            &kubeconfig,
            self.extender_address,
            self.unit,
        )?;
        self.extender_ready().await
    }

    /// Send one request to the extender, and return the response's status and body.
    pub async fn ask_extender(&self, method: &str, path: &str, body: &str) -> io::Result<(u16, String)> {
        http(self.extender_address, method, path, body).await
    }

    /// Send a request to the control socket of a node's simulated NVML library.
    pub async fn driver(&self, node: &str, request: serde_json::Value) -> io::Result<()> {
        simulated_driver::ask(&self.nvml(node), &request).await
    }

    /// Write a kubeconfig for a separate user, by which faults can tell clients apart ([`crate::api::Match::client`]).
    fn kubeconfig_of(&self, user: &str) -> io::Result<PathBuf> {
        let path = self.root.path().join(format!("kubeconfig-{user}"));
        if !path.exists() {
            write_private(&path, &self.api.kubeconfig_for(self.listening.addr(), user))?;
        }
        Ok(path)
    }

    /// Return the PIDs of the child processes: the extender and the agents.
    pub fn pids(&self) -> Vec<u32> {
        let agents = self.nodes.values().filter_map(|node| node.agent.as_ref());
        std::iter::once(&self.extender)
            .chain(agents)
            .filter_map(ChildProgram::pid)
            .collect()
    }

    /// End everything in order and remove the directory.
    pub async fn shutdown(mut self) {
        for name in self.nodes.keys().cloned().collect::<Vec<_>>() {
            if let Err(error) = self.end_nvidia(&name).await {
                tracing::warn!(%error, "a program under NVIDIA's name did not stop");
            }
        }
        for node in self.nodes.values_mut() {
            if let Some(agent) = &mut node.agent
                && let Err(error) = agent.stop().await
            {
                tracing::warn!(%error, "an agent did not stop");
            }
        }
        if let Err(error) = self.extender.stop().await {
            tracing::warn!(%error, "the extender did not stop");
        }
        if let Some(scheduler) = self.scheduler.take() {
            scheduler.shutdown().await;
        }
        self.controllers.shutdown().await;
        for node in std::mem::take(&mut self.nodes).into_values() {
            node.node.shutdown().await;
        }
    }

    fn directory(&self, node: &str) -> PathBuf {
        self.root.path().join(node)
    }

    async fn extender_ready(&mut self) -> io::Result<()> {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            match http(self.extender_address, "GET", "/readyz", "").await {
                Ok((200, _)) => return Ok(()),
                _ if self.extender.ended()? => {
                    return Err(io::Error::other(format!(
                        "the extender has ended. {}",
                        self.extender.last_words()
                    )));
                }
                Ok((_, answer)) if Instant::now() > until => {
                    return Err(io::Error::other(format!(
                        "the extender is not ready: {answer}. {}",
                        self.extender.last_words()
                    )));
                }
                Err(error) if Instant::now() > until => {
                    return Err(io::Error::other(format!(
                        "the extender does not answer: {error}. {}",
                        self.extender.last_words()
                    )));
                }
                Ok(_) | Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }
}

impl Cluster for Embedded {
    fn client(&self) -> kube::Client {
        self.client.clone()
    }

    fn node_of(&self, machine: TestbedMachine) -> Option<String> {
        self.machines.node(machine.name()).map(|node| node.name.clone())
    }

    async fn join(&mut self, name: &str) -> io::Result<()> {
        if self.nodes.contains_key(name) {
            return Ok(());
        }
        self.join_as(name, |_| {}).await
    }

    fn agent_runs(&self, name: &str) -> io::Result<()> {
        let agent = self.nodes.get(name).and_then(|node| node.agent.as_ref());
        match agent.filter(|agent| agent.is_gone()) {
            Some(agent) => Err(io::Error::other(format!(
                "the agent of node {name} has ended. {}",
                agent.last_words()
            ))),
            None => Ok(()),
        }
    }

    fn has_gpus(&self, node: &str) -> bool {
        self.machines.node(node).is_some_and(MachineNode::has_gpus)
    }

    async fn report(&self, pod_uid: &str, container: &str) -> io::Result<Option<SelfReport>> {
        let containers = self.nodes.values().flat_map(|node| node.node.containers());
        let newest = containers
            .filter(|view| view.pod_uid == pod_uid && view.container == container)
            .max_by_key(|view| (view.attempt, view.started_at));
        Ok(newest.map(|mut view| {
            // In a container they have no order.
            view.devices.sort();
            SelfReport {
                running: view.is_running(),
                id: view.id,
                env: view.env,
                devices: view.devices,
                mounts: mounts_of_drivers(view.mounts.into_iter().map(|mount| mount.container)),
            }
        }))
    }

    fn place(&self, node: &str, path: &str, content: Option<&[u8]>) -> io::Result<()> {
        simulated_driver::place(&self.node(node)?.paths().sys_root, path, content)
    }

    fn agents_path(&self, node: &str, path: &str) -> String {
        let root = self.node(node).map(|node| node.paths().sys_root.clone()).unwrap_or_default();
        root.join(path.trim_start_matches('/')).display().to_string()
    }

    fn has_cgroups_v2(&self) -> bool {
        true
    }

    async fn agents_address(&self, node: &str) -> io::Result<SocketAddr> {
        let found = self.metrics().find(|(name, _)| *name == node);
        found.map(|(_, address)| address).ok_or_else(|| not_joined(node))
    }

    fn nvml(&self, node: &str) -> PathBuf {
        self.directory(node).join("nvml.sock")
    }

    async fn divide(&mut self, node: &str, gpus: &[u32], profiles: Option<&[u32]>) -> io::Result<()> {
        let root = self.node(node)?.paths().sys_root;
        let files = simulated_driver::mig_files(gpus, profiles.map_or(0, <[u32]>::len));
        let (driver, caps) = (root.join("proc/driver"), root.join("dev/nvidia-caps"));
        for directory in &files.directories {
            std::fs::create_dir_all(driver.join("nvidia/capabilities").join(directory))?;
        }
        std::fs::create_dir_all(driver.join("nvidia-caps"))?;
        std::fs::write(driver.join("nvidia-caps/mig-minors"), &files.minors)?;
        std::fs::create_dir_all(&caps)?;
        for minor in &files.nodes {
            std::fs::write(caps.join(format!("nvidia-cap{minor}")), "")?;
        }
        for gpu in gpus {
            simulated_driver::divide(&self.nvml(node), *gpu, profiles).await?;
        }
        Ok(())
    }

    async fn run_plugin(&mut self, node: &str, plugin: Option<PluginSetup<'_>>) -> io::Result<()> {
        match plugin {
            Some(plugin) => self.start_nvidia(node, plugin).await,
            None if !self.runs_nvidia(node) => Ok(()),
            None => {
                self.end_nvidia(node).await?;
                self.start_agent(node).await?;
                self.registered(node).await
            }
        }
    }

    fn has_plugin(&self) -> bool {
        true
    }

    fn mps_calls(&self, node: &str) -> io::Result<Vec<String>> {
        divvy_testkit::mps::calls(&self.nvidia_directory(node).join("bin"))
    }

    fn agents_are_pods(&self) -> bool {
        false
    }

    async fn stop(&mut self, part: ClusterProgram<'_>, end: End) -> io::Result<()> {
        let hard = end == End::Killed;
        match part {
            ClusterProgram::ApiServer => self.api.faults().set_down(true),
            ClusterProgram::Scheduler => {
                if let Some(scheduler) = self.scheduler.take() {
                    scheduler.shutdown().await;
                }
            }
            ClusterProgram::Extender if hard => self.kill_extender().await?,
            ClusterProgram::Extender => {
                self.extender.stop().await?;
            }
            ClusterProgram::Agent(node) if hard => self.kill_agent(node).await?,
            ClusterProgram::Agent(node) => {
                self.stop_agent(node).await?;
            }
            ClusterProgram::Plugin(node) => self.stop_plugin(node, end).await?,
            ClusterProgram::MpsControlDaemon(node) => self.stop_mps(node, end).await?,
            ClusterProgram::Kubelet(node) => self.node(node)?.stop_kubelet(hard).await,
            ClusterProgram::Runtime(node) => self.node(node)?.set_runtime_away(true),
        }
        Ok(())
    }

    async fn start(&mut self, part: ClusterProgram<'_>) -> io::Result<()> {
        match part {
            ClusterProgram::ApiServer => self.api.faults().set_down(false),
            ClusterProgram::Scheduler if self.scheduler.is_none() => {
                let scheduler = start_scheduler(&self.settings, self.client.clone(), self.extender_address);
                self.scheduler = Some(scheduler);
            }
            ClusterProgram::Extender if self.extender.ended()? => self.start_extender().await?,
            ClusterProgram::Agent(node) if self.agent_pid(node).is_none() => self.start_agent(node).await?,
            ClusterProgram::Scheduler | ClusterProgram::Extender | ClusterProgram::Agent(_) => {}
            ClusterProgram::Plugin(node) => self.start_plugin(node).await?,
            ClusterProgram::MpsControlDaemon(node) => self.start_mps(node).await?,
            ClusterProgram::Kubelet(node) => self.node(node)?.start_kubelet().await.map_err(io::Error::other)?,
            ClusterProgram::Runtime(node) => self.node(node)?.set_runtime_away(false),
        }
        Ok(())
    }

    async fn power_off(&mut self, node: &str) -> io::Result<()> {
        self.kill_agent(node).await?;
        let node = self.node(node)?;
        node.set_runtime_away(true);
        node.power_off().await.map_err(io::Error::other)
    }

    async fn roll(&mut self) -> io::Result<()> {
        self.roll_agents().await?;
        self.extender.stop().await?;
        self.start_extender().await
    }

    async fn change_unit(&mut self, unit: MemoryUnit) -> io::Result<()> {
        self.unit = unit;
        // The opposite order of `roll`: an installation may be updated in either order.
        self.extender.stop().await?;
        self.start_extender().await?;
        self.roll_agents().await
    }

    async fn offer_whole(&mut self, whole: WholeOffer) -> io::Result<()> {
        self.whole = whole;
        self.roll_agents().await
    }

    async fn use_mps(&mut self, mps: bool) -> io::Result<()> {
        self.mps = mps;
        let nodes: Vec<String> = self.nodes.keys().filter(|name| self.has_gpus(name)).cloned().collect();
        for node in &nodes {
            self.serve_mps(node, mps).await?;
        }
        self.roll_agents().await
    }

    async fn configure_nodes(&mut self, configs: &NodeConfigs) -> io::Result<()> {
        write_node_configs(&self.root.path().join(NODE_CONFIGS), configs)?;
        if self.has_node_configs == configs.is_empty() {
            self.has_node_configs = !configs.is_empty();
            self.roll_agents().await?;
        }
        Ok(())
    }

    fn extender_url(&self) -> Option<String> {
        Some(Embedded::extender_url(self))
    }

    fn witness(&self) -> Witness {
        let runtimes: Vec<_> = self
            .nodes
            .iter()
            .map(|(name, node)| (name.clone(), node.node.running()))
            .collect();
        Box::new(move || {
            let living = runtimes.iter().flat_map(|(node, running)| {
                running().into_iter().map(|view| Living {
                    node: node.clone(),
                    pod_uid: view.pod_uid,
                    container: view.container,
                    id: view.id,
                    devices: view.devices,
                    env: view.env,
                })
            });
            Ok(living.collect())
        })
    }

    fn grants(&self, node: &str) -> io::Result<Vec<String>> {
        let paths = self.node(node)?.paths();
        let mut found = simulated_driver::names(&self.directory(node).join("state/grants"))?;
        found.extend(simulated_driver::grant_specs(&paths.cdi_dir)?);
        Ok(found)
    }

    fn divvy(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.settings.programs.divvy);
        command
            .args(args)
            .env("KUBECONFIG", self.kubeconfig())
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true);
        command
    }
}

fn start_scheduler(settings: &EmbeddedSettings, client: kube::Client, extender: SocketAddr) -> Scheduler {
    let config = SchedulerConfig {
        extender_url: Some(format!("http://{extender}/gpushare-scheduler")),
        prioritize_verb: Some("prioritize".to_owned()),
        preempt_verb: Some("preempt".to_owned()),
        weight: divvy_model::scores::WEIGHT,
        seed: settings.seed,
        ..SchedulerConfig::default()
    };
    Scheduler::start(client, config)
}

fn start_extender(
    settings: &EmbeddedSettings,
    root: &Path,
    kubeconfig: &Path,
    address: SocketAddr,
    unit: MemoryUnit,
) -> io::Result<ChildProgram> {
    let kubeconfig = kubeconfig.display().to_string();
    ChildProgram::start(
        "extender",
        &settings.programs.divvy,
        &[
            "extender",
            "--exit-with-stdin",
            "--kubeconfig",
            &kubeconfig,
            "--listen",
            &address.to_string(),
            "--memory-unit",
            &unit.to_string(),
        ],
        &[],
        &root.join("logs"),
    )
}

fn not_joined(name: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("node {name} has not joined"))
}

/// Reserve a port of the loopback address. The returned socket is bound but never listens, so no other program can get the port while it
/// lives. A program that sets SO_REUSEADDR, as servers do, can still listen on the port, even after a restart.
fn reserve_port() -> io::Result<(OwnedFd, SocketAddr)> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let address = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
    Ok((socket, address))
}

/// Return a bearer token that other users of the machine cannot guess.
fn token() -> io::Result<String> {
    let mut bytes = [0u8; 16];
    io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn write_private(path: &Path, text: &str) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(path)?;
    io::Write::write_all(&mut file, text.as_bytes())
}

/// Send one HTTP/1.1 request on a new connection, and return the response's status and body.
async fn http(address: SocketAddr, method: &str, path: &str, body: &str) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address).await?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("not an HTTP response: {answer:?}")))?;
    let body = answer
        .split_once("\r\n\r\n")
        .map(|(_, body)| body.to_owned())
        .unwrap_or_default();
    Ok((status, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_is_for_our_server_and_nobody_elses() {
        let (_socket, address) = reserve_port().expect("a port");
        for _ in 0..2 {
            let listener = std::net::TcpListener::bind(address).expect("std sets SO_REUSEADDR, as tokio does");
            drop(listener);
        }
        let mut taken = Vec::new();
        for _ in 0..300 {
            let (socket, other) = reserve_port().expect("a port");
            assert_ne!(other, address);
            taken.push(socket);
        }
    }
}
