//! The agent's life cycle: which tasks it starts, in which order, and how it stops.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use divvy_kube::client::{Choice, Connection, connect};
use divvy_kubelet::checkpoint::Writing;
use divvy_kubelet::plugin::{Device, Plugin as _, PluginServer, Settings as PluginSettings, Status};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, info, warn};

use crate::agent::{After, Agent, Parts};
use crate::args::{DeviceListStrategy, DriverSpecMode, GuardMode, OnEscape};
use crate::driver_spec::DriverSpec;
use crate::guard::{self, Shares};
use crate::observed::{NOT_REGISTERED, follow_registration};
use crate::plugin::AgentPlugin;
use crate::registration::{self, Registration};
use crate::store::{Store, boot_id};
use crate::{Config, Error, cluster, hardware, http, labels, mps};
use divvy_agent_core::{Core, Guard, Ids, ResourceSpec, Settings};

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
/// How long a stop waits until the inventory says that the agent is leaving.
const LEAVE_WRITTEN: Duration = Duration::from_millis(500);
/// How long a stop waits for Bindings that the extender sent before it read the new inventory.
const LEAVE_LAST: Duration = Duration::from_millis(300);
/// The timeout of the list of the node's pods that follows [`LEAVE_LAST`]. The list is needed because the watch may lag behind.
const LEAVE_LOOK: Duration = Duration::from_millis(200);
/// How long a stop waits for bound pods to start. The four timeouts together stay well below the termination grace period of any
/// installation.
const LEAVE_ADMITTED: Duration = Duration::from_millis(800);

/// Run the agent until `stop` is cancelled. After that, no further pod is bound here, and pods that are already bound get their
/// devices (within 1.8 s). Then the sockets are removed and the function returns `Ok`.
///
/// A temporary failure (no driver, no kubelet, no API server) is logged, makes `/readyz` fail, and is retried indefinitely.
///
/// # Errors
/// A failure that lasts until an operator fixes it: in the configuration, in the agent's own files, in the address of
/// `--metrics`, or a memory unit that does not fit the node.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), Error> {
    config.check()?;
    run_in(config, None, stop).await
}

/// Return which cluster the agent belongs to.
pub(crate) fn choice(config: &Config) -> Choice {
    Choice {
        kubeconfig: config.kubeconfig.clone(),
        context: config.context.clone(),
        ..Choice::default()
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
    config: Config,
    connected: Option<(kube::Client, String)>,
    stop: CancellationToken,
) -> Result<(), Error> {
    let store = Store::open(&config.state_dir(), &config.cdi_dir, &config.sys_root)?;
    allow_open_files();
    let guard = match config.guard {
        GuardMode::Off => None,
        mode @ (GuardMode::Shadow | GuardMode::Both) => {
            let guard = guard::install(&config.state_dir(), &config.guard_dir()?, mode).map_err(|error| Error::Config {
                origin: "--guard".to_owned(),
                text: format!("{error}. Name the directory of the guard's libraries with --guard-dir, or use --guard off"),
            })?;
            let reaction = config.on_escape.into();
            Some(Guard { reaction, ..guard })
        }
    };
    let settings = Settings {
        unit: config.memory_unit,
        reserve: config.reserve_memory,
        whole: config.whole_gpus,
        also_shared: config.also_shared.clone(),
        mig: config.mig_strategy.into(),
        node_key: store.node_key()?,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: boot_id(&config.sys_root),
        guard,
        mps: config.mps.then(mps::files),
    };
    let mut core = Core::new(settings);
    let records = store.load_records()?;
    info!(
        node = config.node_name,
        grants = records.len(),
        "divvy agent {} starts",
        env!("CARGO_PKG_VERSION")
    );
    let has_grants = !records.is_empty();
    core.load_records(records);
    let listener = match config.metrics {
        Some(address) => Some(http::listen(address, "--metrics ADDRESS:PORT")?),
        None => None,
    };
    let (client, namespace) = match connected {
        Some(connected) => connected,
        None => {
            let Connection { client, namespace, .. } = connect(&choice(&config)).await?;
            (client, namespace)
        }
    };
    let (events, queue) = mpsc::channel(EVENTS);
    let agent = Arc::new(Agent::new(Parts {
        core,
        store,
        shares: Shares::open(&guard::shares(&config.state_dir()), config.on_escape == OnEscape::Throttle).await?,
        driver_spec: DriverSpec::new(config.driver_spec == DriverSpecMode::Auto, config.offers_mig()),
        sys_root: config.sys_root.clone(),
        device_plugin_dir: config.device_plugin_dir(),
        client: client.clone(),
        node_name: config.node_name.clone(),
        dcgm_metrics: config.dcgm_metrics,
        allow: config.allow()?,
        cdi_declared: config.device_list_strategy == DeviceListStrategy::Cdi,
        events,
    }));
    agent.ready.set("gpus", "the probe has not delivered a snapshot yet");
    agent.ready.set("inventory", "not written yet");
    agent.ready.set("pods", "not listed yet");
    agent.ready.set(KUBELET, NOT_REGISTERED);

    let asked = stop;
    let stop = CancellationToken::new();
    let written = watch::Sender::new(Arc::<str>::from(""));
    let (leaving, told) = (agent.clone(), written.subscribe());
    let mut tasks: JoinSet<Result<(), Error>> = JoinSet::new();
    if let Some(listener) = listener {
        let (observed, stop) = (agent.clone(), stop.clone());
        tasks.spawn(async move {
            http::serve(listener, observed, stop).await;
            Ok(())
        });
    }
    tasks.spawn(until(&stop, cluster::follow_pods(agent.clone())));
    tasks.spawn(until(
        &stop,
        cluster::publish_events(client.clone(), config.node_name.clone(), queue),
    ));
    tasks.spawn(until(
        &stop,
        cluster::publish_inventory(agent.clone(), config.node_name.clone(), written.clone()),
    ));
    tasks.spawn(until(&stop, {
        let agent = agent.clone();
        async move {
            agent.keep_measuring(MEASURE).await;
            Ok(())
        }
    }));
    tasks.spawn(until(&stop, {
        let agent = agent.clone();
        async move {
            agent.keep_metering().await;
            Ok(())
        }
    }));
    tasks.spawn(until(&stop, {
        let agent = agent.clone();
        async move {
            agent.keep_accounts().await;
            Ok(())
        }
    }));
    tasks.spawn(until(&stop, {
        let agent = agent.clone();
        async move {
            agent.keep_limiting_containers().await;
            Ok(())
        }
    }));
    tasks.spawn(until(&stop, labels::publish(agent.clone(), config.clone(), namespace)));
    tasks.spawn(until(&stop, {
        let (agent, config) = (agent.clone(), config.clone());
        async move {
            let (asked, node) = (agent.clone(), config.node_name.clone());
            let before = async move { cluster::inventory_before(&asked, &node, BEFORE).await };
            hardware::follow(agent, config, before).await
        }
    }));
    // The server task is not dropped on a stop: the plugin servers still close their kubelet connections.
    tasks.spawn(serve(agent, config, written, has_grants, stop.clone()));

    let mut outcome = Ok(());
    loop {
        tokio::select! {
            () = asked.cancelled() => {
                leave(&leaving, told).await;
                break;
            }
            ended = tasks.join_next() => match ended {
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => {
                    outcome = Err(error);
                    break;
                }
                Some(Err(error)) => {
                    outcome = Err(Error::Ended { part: "a task of the agent", text: error.to_string() });
                    break;
                }
                None => {
                    outcome = Err(Error::Ended { part: "the agent", text: "no task is left".to_owned() });
                    break;
                }
            }
        }
    }
    stop.cancel();
    // The plugin servers remove their sockets, and the probe's client kills its child process.
    while tasks.join_next().await.is_some() {}
    info!("divvy agent ends");
    outcome
}

/// Announce the stop to the extender, then wait for the pods that it has already bound here. The kubelet permanently rejects a pod that is
/// bound here once the plugin is gone. Every wait has a timeout.
async fn leave(agent: &Agent, mut written: watch::Receiver<Arc<str>>) {
    if written.borrow().is_empty() {
        return;
    }
    agent.core().leave();
    agent.publish();
    let wanted = agent.inventory.borrow().clone();
    let known = tokio::time::timeout(LEAVE_WRITTEN, written.wait_for(|text| *text == wanted));
    match known.await {
        Ok(Ok(_)) => {}
        Ok(Err(_)) | Err(_) => {
            warn!("the inventory could not be changed in time: the kubelet may reject a pod that is bound to this node now");
            return;
        }
    }
    tokio::time::sleep(LEAVE_LAST).await;
    let client = agent.client();
    match tokio::time::timeout(LEAVE_LOOK, divvy_kube::list::pods(&client, Some(agent.selector()))).await {
        Ok(Ok(found)) => {
            for pod in found.pods {
                let actions = agent.core().apply_pod(pod);
                agent.post_events(actions);
            }
        }
        Ok(Err(error)) => warn!(%error, "cannot list this node's pods; waiting only for the pods that the watch reported"),
        Err(_) => warn!("this node's pods were not listed in time; waiting only for the pods that the watch reported"),
    }
    let began = Instant::now();
    while began.elapsed() < LEAVE_ADMITTED {
        if agent.core().on_their_way() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let left = agent.core().on_their_way();
    warn!("{left} pods that are bound to this node have not started; the kubelet may reject those that it has not admitted yet");
}

/// Run `future` until the agent stops. Dropping the future ends everything that it owns.
fn until<F: Future<Output = Result<(), Error>> + Send + 'static>(
    stop: &CancellationToken,
    future: F,
) -> impl Future<Output = Result<(), Error>> + Send + use<F> {
    let stop = stop.clone();
    async move {
        tokio::select! {
            outcome = future => outcome,
            () = stop.cancelled() => Ok(()),
        }
    }
}

/// Wait until the GPUs are known and published. Then reconcile, register, and keep reconciling.
async fn serve(
    agent: Arc<Agent>,
    config: Config,
    written: watch::Sender<Arc<str>>,
    has_grants: bool,
    stop: CancellationToken,
) -> Result<(), Error> {
    tokio::select! {
        prepared = prepare(&agent, written, has_grants) => prepared?,
        () = stop.cancelled() => return Ok(()),
    }
    let mut offered = agent.offered.subscribe();
    let mut servers = Servers::new(agent.clone(), config.device_plugin_dir(), stop);
    loop {
        let specs = offered.borrow_and_update().clone();
        servers.offer(&specs);
        tokio::select! {
            ended = servers.wait() => return ended,
            // The sender lives as long as the agent.
            _ = offered.changed() => info!("this node now offers other resources"),
            () = keep_reconciling(&agent) => {}
        }
    }
}

/// The device plugins that serve the resources which this node offers.
struct Servers {
    agent: Arc<Agent>,
    directory: PathBuf,
    stop: CancellationToken,
    tasks: JoinSet<divvy_kubelet::Result<()>>,
    running: Vec<Server>,
    before: registration::Before,
    /// Follows whether the kubelet knows the devices of all running plugins.
    follower: Option<AbortOnDropHandle<()>>,
}

/// A device plugin that runs.
struct Server {
    spec: ResourceSpec,
    devices: watch::Receiver<Arc<Vec<Device>>>,
    status: watch::Receiver<Status>,
}

impl Servers {
    fn new(agent: Arc<Agent>, directory: PathBuf, stop: CancellationToken) -> Servers {
        Servers {
            agent,
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
            self.agent.ready.clear(KUBELET);
        }
        if self.running.iter().any(|server| !server.status.borrow().is_ready()) {
            *registration::lock(&self.before) = Writing::of(&self.directory);
            self.agent.core().set_registered(false);
            self.agent.publish();
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
            self.agent.clone(),
            self.directory.clone(),
            self.before.clone(),
            registrations.collect(),
        );
        self.follower = Some(AbortOnDropHandle::new(tokio::spawn(following)));
    }

    fn start(&mut self, spec: ResourceSpec) -> Server {
        self.agent.ready.set(part(spec), format!("{}: {NOT_REGISTERED}", spec.name()));
        let plugin = AgentPlugin::new(self.agent.clone(), spec);
        let status = watch::Sender::new(Status::default());
        let server = Server {
            spec,
            devices: plugin.devices(),
            status: status.subscribe(),
        };
        tokio::spawn(follow_registration(
            self.agent.clone(),
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
async fn prepare(agent: &Arc<Agent>, written: watch::Sender<Arc<str>>, has_grants: bool) -> Result<(), Error> {
    let mut inventory = agent.inventory.subscribe();
    // The senders live as long as the agent, so this error does not occur in practice.
    let closed = |_| Error::Ended {
        part: "the inventory",
        text: "its writer ended".to_owned(),
    };
    inventory.wait_for(|text| !text.is_empty()).await.map_err(closed)?;
    // Restore lost records before the first call can arrive. Without its record, a running container's memory could be granted to
    // another pod.
    agent.reconcile(true).await;
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
    let mut without_cdi = agent.without_cdi.subscribe();
    without_cdi.wait_for(|without| !without).await.map_err(closed)?;
    Ok(())
}

async fn keep_reconciling(agent: &Arc<Agent>) {
    let mut pause = RECONCILE;
    let mut asked = Instant::now();
    loop {
        tokio::select! {
            () = agent.look.notified() => tokio::time::sleep(SETTLE).await,
            () = tokio::time::sleep(pause) => {}
        }
        // However often notifications arrive, the driver lists its processes only at the regular pace.
        let ask_driver = asked.elapsed() >= RECONCILE;
        if ask_driver {
            asked = Instant::now();
        }
        pause = match agent.reconcile(ask_driver).await {
            After::AtRest => RECONCILE,
            After::MemoryHeld => RECONCILE_SOON,
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
