//! The agent's life cycle: which tasks it starts, in which order, and how it stops.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use divvy_kube::client::{ClusterChoice, Connection, connect};
use divvy_kubelet::checkpoint::Writing;
use divvy_kubelet::plugin::{Plugin as _, PluginDevice, PluginServer, PluginSettings, PluginStatus};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, info, warn};

use crate::agent::{Agent, AgentParts};
use crate::args::{DeviceDelivery, DriverSpecMode, GuardMode, OnEscape};
use crate::driver_spec::DriverSpecKeeper;
use crate::grants::{AfterReconcile, Grants};
use crate::guard::{self, Shares};
use crate::measuring::Measuring;
use crate::metering::Metering;
use crate::observed::{NOT_REGISTERED, follow_registration};
use crate::own_node::OwnNode;
use crate::pages::PageSources;
use crate::pending_event::PendingEvent;
use crate::plugin::AgentPlugin;
use crate::probe_access::ProbeAccess;
use crate::publishing::Publishing;
use crate::registration::{self, Registration};
use crate::reports::Reports;
use crate::shared_core::SharedCore;
use crate::store::{Store, boot_id};
use crate::{AgentConfig, Error, cluster, hardware, http, labels, mps};
use divvy_agent_core::{AgentCore, CoreSettings, Guard, Ids, ResourceSpec};

/// The part in `/readyz` for the registration of `gpu-mem`. Before the agent knows which resources it offers, it stands for
/// all registrations.
const KUBELET: &str = "kubelet";
/// The time between two reconciliations.
const RECONCILE: Duration = Duration::from_secs(10);
/// The time between two reconciliations while a change is expected.
const RECONCILE_SOON: Duration = Duration::from_secs(1);
/// The time between two measurements of what guarded pods use in addition to their allocations.
const MEASURE: Duration = Duration::from_secs(1);
/// How long to wait after a notification, so that one reconciliation handles several notifications.
const SETTLE: Duration = Duration::from_millis(50);
/// How long the start waits for the node's previous inventory.
const BEFORE: Duration = Duration::from_secs(2);
/// How long a node with grants waits for its inventory to be written before it registers anyway. Containers that only restart
/// need the plugin, and the API server may be unreachable for longer.
const INVENTORY_PATIENCE: Duration = Duration::from_secs(3);
const EVENTS: usize = 256;
/// The parts in `/readyz` that are not ready when the agent starts, and why.
const NOT_READY: [(&str, &str); 4] = [
    ("gpus", "the probe has not delivered a snapshot yet"),
    ("inventory", "not written yet"),
    ("pods", "not listed yet"),
    (KUBELET, NOT_REGISTERED),
];
/// How long a stop waits until the inventory says that the agent is leaving.
const LEAVE_WRITTEN: Duration = Duration::from_millis(500);
/// How long a stop waits for Bindings that the extender sent before it read the new inventory.
const LEAVE_LAST: Duration = Duration::from_millis(300);
/// The timeout of the list of the node's pods that follows [`LEAVE_LAST`]. The list is needed because the watch may lag behind.
const LEAVE_LOOK: Duration = Duration::from_millis(200);
/// How long a stop waits for bound pods to start. The four timeouts together stay well below the termination grace period of any
/// installation.
const LEAVE_ADMITTED: Duration = Duration::from_millis(800);

/// A part of the agent that runs until the agent stops.
type AgentTask = BoxFuture<'static, Result<(), Error>>;

/// Run the agent until `stop` is cancelled. After that, no further pod is bound here, and pods that are already bound get their
/// devices (within 1.8 s). Then the sockets are removed and the function returns `Ok`.
///
/// A temporary failure (no driver, no kubelet, no API server) is logged, makes `/readyz` fail, and is retried indefinitely.
///
/// # Errors
/// A failure that lasts until an operator fixes it: in the configuration, in the agent's own files, in the address of
/// `--metrics`, or a memory unit that does not fit the node.
pub async fn run(config: AgentConfig, stop: CancellationToken) -> Result<(), Error> {
    config.check()?;
    run_in(config, None, stop).await
}

/// Return which cluster the agent belongs to.
pub(crate) fn choice(config: &AgentConfig) -> ClusterChoice {
    ClusterChoice {
        kubeconfig: config.kubeconfig.clone(),
        context: config.context.clone(),
        ..ClusterChoice::default()
    }
}

/// Let this process have as many files open as it may. It holds two for each share with the guard, and some systems allow 1,024 at first.
fn allow_open_files() {
    let limits = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: limits.maximum,
        ..limits
    };
    if let Err(error) = setrlimit(Resource::Nofile, most) {
        debug!(%error, ?limits, "the agent keeps its limit of open files");
    }
}

/// Do what [`run`] does in a cluster to which there is a connection: its client, and the agent's namespace.
pub(crate) async fn run_in(
    config: AgentConfig,
    connected: Option<(kube::Client, String)>,
    stop: CancellationToken,
) -> Result<(), Error> {
    let store = Store::open(&config.state_dir(), &config.cdi_dir, &config.sys_root)?;
    allow_open_files();
    let core = known(&config, &store)?;
    let has_grants = core.records().next().is_some();
    let listener = config.metrics.map(|address| http::listen(address, "--metrics ADDRESS:PORT"));
    let listener = listener.transpose()?;
    let (client, namespace) = match connected {
        Some(connected) => connected,
        None => {
            let Connection { client, namespace, .. } = connect(&choice(&config)).await?;
            (client, namespace)
        }
    };
    let (events, queue) = mpsc::channel(EVENTS);
    let core = Arc::new(SharedCore::new(core));
    let probe = Arc::new(ProbeAccess::new(config.mps.then(|| config.sys_root.clone())));
    let agent = Agent::new(AgentParts {
        core: core.clone(),
        probe: probe.clone(),
        reports: Reports::new(events, config.allow()?),
        store,
        shares: Shares::open(&guard::shares(&config.state_dir()), config.on_escape == OnEscape::Throttle).await?,
        driver_spec: DriverSpecKeeper::new(config.driver_spec == DriverSpecMode::Auto, config.offers_mig()),
        client,
        node_name: config.node_name.clone(),
        sys_root: config.sys_root.clone(),
        device_plugin_dir: config.device_plugin_dir(),
        cdi_declared: config.device_list_strategy == DeviceDelivery::Cdi,
    });
    for (part, reason) in NOT_READY {
        agent.reports.ready.set(part, reason);
    }
    let pages = Arc::new(PageSources {
        core: core.clone(),
        reports: agent.reports.clone(),
        limiting: agent.limiting.clone(),
        accounting: agent.accounting.clone(),
        dcgm_names_of: config.dcgm_metrics.then(|| config.node_name.clone()),
    });
    let written = watch::Sender::new(Arc::<str>::from(""));
    let told = written.subscribe();
    let stopped = CancellationToken::new();
    let mut tasks = JoinSet::new();
    for task in dropped_on_stop(&agent, &core, &probe, &config, namespace, queue, &written) {
        tasks.spawn(until(stopped.clone(), task));
    }
    // These are not dropped on a stop: the plugin servers still close their kubelet connections.
    if let Some(listener) = listener {
        tasks.spawn(forever(http::serve(listener, pages.clone(), stopped.clone())));
    }
    let plugins = Servers::new(&agent, pages, config.device_plugin_dir(), stopped.clone());
    tasks.spawn(serve(plugins, agent.node.clone(), written, has_grants));

    let outcome = tokio::select! {
        () = stop.cancelled() => {
            leave(&agent, told).await;
            Ok(())
        }
        error = failure(&mut tasks) => Err(error),
    };
    stopped.cancel();
    // The plugin servers remove their sockets, and the probe's client kills its child process.
    while tasks.join_next().await.is_some() {}
    info!("divvy agent ends");
    outcome
}

/// Return what the agent knows at its start: its settings, and the records of the agent before.
fn known(config: &AgentConfig, store: &Store) -> Result<AgentCore, Error> {
    let mut core = AgentCore::new(CoreSettings {
        unit: config.memory_unit,
        reserve: config.reserve_memory,
        whole: config.whole_gpus,
        also_shared: config.also_shared.clone(),
        mig: config.mig_strategy.into(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: boot_id(&config.sys_root),
        guard: guard_files(config)?,
        node_key: store.node_key()?,
        mps: config.mps.then(mps::files),
    });
    let records = store.load_records()?;
    info!(
        node = config.node_name,
        grants = records.len(),
        "divvy agent {} starts",
        env!("CARGO_PKG_VERSION")
    );
    core.load_records(records);
    Ok(core)
}

/// Install the guard's libraries, if containers get the guard.
fn guard_files(config: &AgentConfig) -> Result<Option<Guard>, Error> {
    if config.guard == GuardMode::Off {
        return Ok(None);
    }
    let guard = guard::install(&config.state_dir(), &config.guard_dir()?, config.guard).map_err(|error| Error::Config {
        origin: "--guard".to_owned(),
        text: format!("{error}. Name the directory of the guard's libraries with --guard-dir, or use --guard off"),
    })?;
    let reaction = config.on_escape.into();
    Ok(Some(Guard { reaction, ..guard }))
}

/// Return the tasks that are dropped when the agent stops. That ends everything that they own.
fn dropped_on_stop(
    agent: &Agent,
    core: &Arc<SharedCore>,
    probe: &Arc<ProbeAccess>,
    config: &AgentConfig,
    namespace: String,
    queue: mpsc::Receiver<PendingEvent>,
    written: &watch::Sender<Arc<str>>,
) -> Vec<AgentTask> {
    let Agent {
        reports,
        pods,
        node,
        publishing,
        limiting,
        accounting,
        grants,
    } = agent;
    let (client, name) = (pods.client(), config.node_name.clone());
    let measuring = Measuring {
        core: core.clone(),
        probe: probe.clone(),
        limiting: limiting.clone(),
        accounting: accounting.clone(),
        grants: grants.clone(),
    };
    let metering = Metering::new(core.clone(), probe.clone(), limiting.clone(), accounting.clone());
    let outlets = hardware::NewsOutlets {
        core: core.clone(),
        probe: probe.clone(),
        reports: reports.clone(),
        node: node.clone(),
        publishing: publishing.clone(),
        grants: grants.clone(),
        sys_root: config.sys_root.clone(),
    };
    let before = {
        let (client, node, name) = (client.clone(), node.clone(), name.clone());
        async move { cluster::inventory_before(&client, &node, &name, BEFORE).await }
    };
    let (limits, accounts) = (limiting.clone(), accounting.clone());
    vec![
        cluster::follow_pods(pods.clone(), accounting.clone(), publishing.clone(), grants.clone()).boxed(),
        cluster::publish_events(client.clone(), name.clone(), queue).boxed(),
        cluster::publish_inventory(
            client.clone(),
            node.clone(),
            publishing.clone(),
            reports.clone(),
            name,
            written.clone(),
        )
        .boxed(),
        forever(measuring.run(MEASURE)).boxed(),
        forever(metering.run()).boxed(),
        forever(async move { accounts.keep().await }).boxed(),
        forever(async move { limits.keep_limiting_containers().await }).boxed(),
        labels::publish(
            client,
            node.clone(),
            publishing.clone(),
            reports.clone(),
            config.clone(),
            namespace,
        )
        .boxed(),
        hardware::follow(outlets, config.clone(), before).boxed(),
    ]
}

/// Wait until a task fails, or none is left.
async fn failure(tasks: &mut JoinSet<Result<(), Error>>) -> Error {
    while let Some(ended) = tasks.join_next().await {
        match ended {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error,
            Err(error) => {
                return Error::Ended {
                    part: "a task of the agent",
                    text: error.to_string(),
                };
            }
        }
    }
    Error::Ended {
        part: "the agent",
        text: "no task is left".to_owned(),
    }
}

/// Announce the stop to the extender, then wait for the pods that it has already bound here. The kubelet permanently rejects a pod that is
/// bound here once the plugin is gone. Every wait has a timeout.
async fn leave(agent: &Agent, mut written: watch::Receiver<Arc<str>>) {
    if written.borrow().is_empty() {
        return;
    }
    agent.publishing.leave();
    let wanted = agent.publishing.inventory.borrow().clone();
    let known = tokio::time::timeout(LEAVE_WRITTEN, written.wait_for(|text| *text == wanted));
    match known.await {
        Ok(Ok(_)) => {}
        Ok(Err(_)) | Err(_) => {
            warn!("the inventory could not be changed in time: the kubelet may reject a pod that is bound to this node now");
            return;
        }
    }
    tokio::time::sleep(LEAVE_LAST).await;
    let client = agent.pods.client();
    match tokio::time::timeout(LEAVE_LOOK, divvy_kube::list::pods(&client, Some(agent.pods.selector()))).await {
        Ok(Ok(found)) => found.pods.into_iter().for_each(|pod| agent.pods.apply(pod)),
        Ok(Err(error)) => warn!(%error, "cannot list this node's pods; waiting only for the pods that the watch reported"),
        Err(_) => warn!("this node's pods were not listed in time; waiting only for the pods that the watch reported"),
    }
    let began = Instant::now();
    while began.elapsed() < LEAVE_ADMITTED {
        if agent.pods.on_their_way() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let left = agent.pods.on_their_way();
    warn!("{left} pods that are bound to this node have not started; the kubelet may reject those that it has not admitted yet");
}

/// Run a task until the agent stops.
async fn until(stopped: CancellationToken, task: AgentTask) -> Result<(), Error> {
    tokio::select! {
        outcome = task => outcome,
        () = stopped.cancelled() => Ok(()),
    }
}

/// Return a task that does not fail.
async fn forever(task: impl Future<Output = ()>) -> Result<(), Error> {
    task.await;
    Ok(())
}

/// Wait until the GPUs are known and published. Then reconcile, register, and keep reconciling.
async fn serve(
    mut servers: Servers,
    node: Arc<OwnNode>,
    written: watch::Sender<Arc<str>>,
    has_grants: bool,
) -> Result<(), Error> {
    let (publishing, grants) = (servers.publishing.clone(), servers.grants.clone());
    let stop = servers.stop.clone();
    tokio::select! {
        prepared = prepare(&publishing, &grants, &node, written, has_grants) => prepared?,
        () = stop.cancelled() => return Ok(()),
    }
    let mut offered = publishing.offered.subscribe();
    loop {
        let specs = offered.borrow_and_update().clone();
        servers.offer(&specs);
        tokio::select! {
            ended = servers.wait() => return ended,
            // The sender lives as long as the agent.
            _ = offered.changed() => info!("this node now offers other resources"),
            () = keep_reconciling(&grants) => {}
        }
    }
}

/// The device plugins that serve the resources which this node offers.
struct Servers {
    grants: Arc<Grants>,
    publishing: Arc<Publishing>,
    reports: Arc<Reports>,
    pages: Arc<PageSources>,
    directory: PathBuf,
    stop: CancellationToken,
    tasks: JoinSet<divvy_kubelet::Result<()>>,
    running: Vec<RunningPlugin>,
    before: registration::Before,
    /// Follows whether the kubelet knows the devices of all running plugins.
    follower: Option<AbortOnDropHandle<()>>,
}

/// A device plugin that runs.
struct RunningPlugin {
    spec: ResourceSpec,
    devices: watch::Receiver<Arc<Vec<PluginDevice>>>,
    status: watch::Receiver<PluginStatus>,
}

impl Servers {
    fn new(agent: &Agent, pages: Arc<PageSources>, directory: PathBuf, stop: CancellationToken) -> Servers {
        Servers {
            grants: agent.grants.clone(),
            publishing: agent.publishing.clone(),
            reports: agent.reports.clone(),
            pages,
            directory,
            stop,
            tasks: JoinSet::new(),
            running: Vec::new(),
            before: registration::Before::default(),
            follower: None,
        }
    }

    /// Start a plugin for each of these resources that has none. All other plugins keep running, even if the node no longer offers their
    /// resource; they then report no devices. A plugin that ended would be worse: the kubelet lists its capacity for some minutes, and
    /// permanently rejects the pods that are bound to the node in that time.
    fn offer(&mut self, specs: &[ResourceSpec]) {
        if specs.iter().all(|spec| part(*spec) != KUBELET) {
            self.reports.ready.clear(KUBELET);
        }
        if self.running.iter().any(|server| !server.status.borrow().is_ready()) {
            *registration::lock(&self.before) = Writing::of(&self.directory);
            self.publishing.set_registered(false);
        }
        for spec in specs {
            if self.running.iter().all(|server| server.spec != *spec) {
                // The kubelet writes its checkpoint again when it gets the devices of a new plugin.
                *registration::lock(&self.before) = Writing::of(&self.directory);
                let server = self.start(*spec);
                self.running.push(server);
            }
        }
        let registrations = self.running.iter().map(|server| Registration {
            devices: server.devices.clone(),
            name: server.spec.name().into_owned(),
            status: server.status.clone(),
        });
        let following = registration::follow(
            self.publishing.clone(),
            self.directory.clone(),
            self.before.clone(),
            registrations.collect(),
        );
        self.follower = Some(AbortOnDropHandle::new(tokio::spawn(following)));
    }

    fn start(&mut self, spec: ResourceSpec) -> RunningPlugin {
        self.reports
            .ready
            .set(part(spec), format!("{}: {NOT_REGISTERED}", spec.name()));
        let plugin = AgentPlugin::new(self.grants.clone(), self.publishing.clone(), spec);
        let status = watch::Sender::new(PluginStatus::default());
        let server = RunningPlugin {
            spec,
            devices: plugin.devices(),
            status: status.subscribe(),
        };
        tokio::spawn(follow_registration(
            self.pages.clone(),
            spec.name(),
            part(spec),
            status.subscribe(),
        ));
        let settings = PluginSettings::new(self.directory.clone(), spec.socket());
        self.tasks
            .spawn(PluginServer::run(Arc::new(plugin), settings, self.stop.clone(), status));
        server
    }

    /// Wait until the agent stops and the sockets are removed.
    async fn wait(&mut self) -> Result<(), Error> {
        loop {
            match self.tasks.join_next().await {
                Some(Ok(Err(error))) => return Err(error.into()),
                Some(Err(error)) => {
                    return Err(Error::Ended {
                        part: "a plugin server",
                        text: error.to_string(),
                    });
                }
                // The agent is stopping: the other servers end as well.
                Some(Ok(Ok(()))) => {}
                None => {
                    self.stop.cancelled().await;
                    return Ok(());
                }
            }
        }
    }
}

/// Wait until the agent can register with the kubelet.
async fn prepare(
    publishing: &Publishing,
    grants: &Arc<Grants>,
    node: &OwnNode,
    written: watch::Sender<Arc<str>>,
    has_grants: bool,
) -> Result<(), Error> {
    let mut inventory = publishing.inventory.subscribe();
    // The senders live as long as the agent, so this error does not occur in practice.
    let closed = |_| Error::Ended {
        part: "the inventory",
        text: "its writer ended".to_owned(),
    };
    inventory.wait_for(|text| !text.is_empty()).await.map_err(closed)?;
    // Restore lost records before the first call can arrive. Without its record, a running container's memory could be granted to
    // another pod.
    grants.reconcile(true).await;
    let mut written = written.subscribe();
    let first_written = written.wait_for(|text| !text.is_empty());
    if has_grants {
        if tokio::time::timeout(INVENTORY_PATIENCE, first_written).await.is_err() {
            warn!("the inventory cannot be written; registering anyway, for the containers that already run here");
        }
    } else {
        first_written.await.map_err(closed)?;
    }
    // The node's object was read before the inventory was made. Without CDI, containers would not get their GPUs, so offer nothing.
    let mut without_cdi = node.without_cdi.subscribe();
    without_cdi.wait_for(|without| !without).await.map_err(closed)?;
    Ok(())
}

async fn keep_reconciling(grants: &Arc<Grants>) {
    let mut pause = RECONCILE;
    let mut asked = Instant::now();
    loop {
        tokio::select! {
            () = grants.wait_for_look() => tokio::time::sleep(SETTLE).await,
            () = tokio::time::sleep(pause) => {}
        }
        // However often notifications arrive, the driver lists its processes only at the regular pace.
        let ask_driver = asked.elapsed() >= RECONCILE;
        if ask_driver {
            asked = Instant::now();
        }
        pause = match grants.reconcile(ask_driver).await {
            AfterReconcile::AtRest => RECONCILE,
            AfterReconcile::MemoryHeld => RECONCILE_SOON,
        };
    }
}

/// Return the name of the part in `/readyz` for a resource's registration.
fn part(spec: ResourceSpec) -> Cow<'static, str> {
    match spec.ids {
        Ids::Units => Cow::Borrowed(KUBELET),
        Ids::Count => Cow::Borrowed("kubelet (gpu-count)"),
        Ids::Whole(_) => spec.name(),
    }
}
