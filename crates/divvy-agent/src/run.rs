//! The agent's life: what is started, in which order, and how it ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use divvy_kube::client::{Choice, connect};
use divvy_kubelet::checkpoint::Writing;
use divvy_kubelet::plugin::{Plugin as _, PluginServer, Settings as PluginSettings, Status};
use divvy_model::names;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::agent::{After, Agent, Parts};
use crate::config::{DeviceListStrategy, DriverSpecMode};
use crate::driver::DriverSpec;
use crate::plugin::AgentPlugin;
use crate::registered::{self, Registration};
use crate::store::{Store, boot_id};
use crate::{Config, Error, cluster, hardware, http};
use divvy_agent_core::{Core, Resource, Settings};

/// Between two reconciliations.
const RECONCILE: Duration = Duration::from_secs(10);
/// The same while something is expected to change.
const RECONCILE_SOON: Duration = Duration::from_secs(1);
/// Events of one moment are looked at together.
const SETTLE: Duration = Duration::from_millis(50);
/// How long the start waits to hear what the inventory said before.
const BEFORE: Duration = Duration::from_secs(2);
/// How long a node with grants waits for its inventory to be written before it registers without: containers that only
/// restart need the plugin, and the API server may be away for longer.
const INVENTORY_PATIENCE: Duration = Duration::from_secs(3);
const EVENTS: usize = 256;
/// How long the end waits until the inventory says that the agent leaves.
const LEAVE_WRITTEN: Duration = Duration::from_millis(500);
/// What the extender had sent before it read that is carried out within this time.
const LEAVE_LAST: Duration = Duration::from_millis(300);
/// For one look at the node's pods after that: the watch may be behind.
const LEAVE_LOOK: Duration = Duration::from_millis(200);
/// How long the end waits for pods that are on their way to their start. Together with the others well below the grace period of any
/// installation.
const LEAVE_ADMITTED: Duration = Duration::from_millis(800);

/// Runs the agent until `stop` is cancelled. Then nothing more is bound here, pods that are on their way get their devices (1.8 s at most),
/// the sockets are removed, and it returns `Ok`.
///
/// What may pass (no driver, no kubelet, no API server) is logged, makes `/readyz` fail, and is tried again for ever.
///
/// # Errors
/// What will not pass by itself: the configuration, the agent's own files, the address of `--metrics`, a memory unit that does
/// not fit the node.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), Error> {
    config.check()?;
    let store = Store::open(&config.state_dir(), &config.cdi_dir, &config.sys_root)?;
    let settings = Settings {
        unit: config.memory_unit,
        reserve: config.reserve_memory,
        node_key: store.node_key()?,
        memory_resource: names::GPU_MEM.to_owned(),
        count_resource: names::GPU_COUNT.to_owned(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: boot_id(&config.sys_root),
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
        Some(address) => Some(http::listen(address)?),
        None => None,
    };
    let choice = Choice {
        kubeconfig: config.kubeconfig.clone(),
        context: config.context.clone(),
        ..Choice::default()
    };
    let client = connect(&choice).await?.client;
    let (events, queue) = mpsc::channel(EVENTS);
    let agent = Arc::new(Agent::new(Parts {
        core,
        store,
        driver_spec: DriverSpec::new(config.driver_spec == DriverSpecMode::Auto),
        sys_root: config.sys_root.clone(),
        device_plugin_dir: config.device_plugin_dir(),
        client: client.clone(),
        node_name: config.node_name.clone(),
        cdi_declared: config.device_list_strategy == DeviceListStrategy::Cdi,
        events,
    }));
    agent.ready.set("gpus", "the probe has not given a snapshot yet");
    agent.ready.set("inventory", "not written yet");
    agent.ready.set("pods", "not listed yet");
    agent.ready.set("kubelet", "not registered yet");

    let asked = stop;
    let stop = CancellationToken::new();
    let written = watch::Sender::new(Arc::<str>::from(""));
    let (leaving, told) = (agent.clone(), written.subscribe());
    let mut tasks: JoinSet<Result<(), Error>> = JoinSet::new();
    if let Some(listener) = listener {
        tasks.spawn(http::serve(listener, agent.clone(), stop.clone()));
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
        let (agent, config) = (agent.clone(), config.clone());
        async move {
            let (asked, node) = (agent.clone(), config.node_name.clone());
            let before = async move { cluster::inventory_before(&asked, &node, BEFORE).await };
            hardware::follow(agent, config, before).await
        }
    }));
    // Not dropped at the stop: the servers take their leave of the kubelet.
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
                    outcome = Err(Error::Ended { part: "the agent", text: "nothing is left to do".to_owned() });
                    break;
                }
            }
        }
    }
    stop.cancel();
    // The plugin servers remove their sockets, the probe's client kills its child.
    while tasks.join_next().await.is_some() {}
    info!("divvy agent ends");
    outcome
}

/// Takes leave of the scheduler, then of the pods that it has sent: a pod that is bound here after the plugin is gone is refused by the
/// kubelet for good. Whatever does not come in time is not waited for.
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
            warn!(
                "the inventory could not be changed in time: a pod that is bound to this node now may be refused by its kubelet"
            );
            return;
        }
    }
    tokio::time::sleep(LEAVE_LAST).await;
    let client = agent.client();
    match tokio::time::timeout(LEAVE_LOOK, divvy_kube::list::pods(&client, Some(agent.selector()))).await {
        Ok(Ok(found)) => {
            for pod in found.pods {
                let actions = agent.core().apply_pod(pod);
                agent.say(actions);
            }
        }
        Ok(Err(error)) => warn!(%error, "this node's pods could not be listed; only those that the watch told of are waited for"),
        Err(_) => warn!("this node's pods were not listed in time; only those that the watch told of are waited for"),
    }
    let began = Instant::now();
    while began.elapsed() < LEAVE_ADMITTED {
        if agent.core().on_their_way() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let left = agent.core().on_their_way();
    warn!("{left} pods that are bound to this node have not begun; those that the kubelet has not admitted yet it may refuse");
}

/// `future`, or nothing once the agent stops. Dropping it ends what it owns.
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

/// Once the GPUs are known and published: reconciles, registers, and goes on reconciling.
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
    let mut servers = JoinSet::new();
    let (mut plugins, mut registrations) = (Vec::new(), Vec::new());
    for (resource, prefix) in [(Resource::Memory, "divvy-gpu-mem"), (Resource::Count, "divvy-gpu-count")] {
        let name = agent.core().resource_name(resource).to_owned();
        let plugin = AgentPlugin {
            agent: agent.clone(),
            resource,
            name: name.clone(),
        };
        let settings = PluginSettings::new(config.device_plugin_dir(), prefix);
        let status = watch::Sender::new(Status::default());
        tokio::spawn(follow_status(agent.clone(), resource, name, status.subscribe()));
        registrations.push(Registration {
            devices: plugin.devices(),
            name: plugin.name.clone(),
            status: status.subscribe(),
        });
        plugins.push((plugin, settings, status));
    }
    let before = Writing::of(&config.device_plugin_dir());
    tokio::spawn(registered::follow(
        agent.clone(),
        config.device_plugin_dir(),
        before,
        registrations,
    ));
    for (plugin, settings, status) in plugins {
        servers.spawn(PluginServer::run(Arc::new(plugin), settings, stop.clone(), status));
    }
    loop {
        tokio::select! {
            ended = servers.join_next() => match ended {
                Some(Ok(Err(error))) => return Err(error.into()),
                Some(Err(error)) => return Err(Error::Ended { part: "a plugin server", text: error.to_string() }),
                // Stopped: the other one ends as well.
                Some(Ok(Ok(()))) => {}
                None => return Ok(()),
            },
            () = keep_reconciling(&agent) => {}
        }
    }
}

/// Waits until registering makes sense.
async fn prepare(agent: &Arc<Agent>, written: watch::Sender<Arc<str>>, has_grants: bool) -> Result<(), Error> {
    let mut inventory = agent.inventory.subscribe();
    // The senders live as long as the agent.
    let closed = |_| Error::Ended {
        part: "the inventory",
        text: "nobody writes it any more".to_owned(),
    };
    inventory.wait_for(|text| !text.is_empty()).await.map_err(closed)?;
    // Grants are complete before the first call can come: what a lost record does not book, another pod could get.
    agent.reconcile(true).await;
    let mut written = written.subscribe();
    let first_written = written.wait_for(|text| !text.is_empty());
    if has_grants {
        if tokio::time::timeout(INVENTORY_PATIENCE, first_written).await.is_err() {
            warn!("the inventory cannot be written; registering all the same, for the containers that are here already");
        }
    } else {
        first_written.await.map_err(closed)?;
    }
    // The node's object was read before the inventory was made. What containers would not get is not offered.
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
        // However often something happens, the driver is asked for its processes at the regular pace.
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

/// A resource's registration, for readiness and metrics; ends with its server.
async fn follow_status(agent: Arc<Agent>, resource: Resource, name: String, mut status: watch::Receiver<Status>) {
    let part = match resource {
        Resource::Memory => "kubelet",
        Resource::Count => "kubelet (gpu-count)",
    };
    loop {
        let now = status.borrow_and_update().clone();
        agent.metrics.registration(&name, &now);
        match now.is_ready() {
            true => agent.ready.clear(part),
            false => {
                let text = now.last_error.as_deref().unwrap_or("not registered yet");
                agent.ready.set(part, format!("{name}: {text}"));
            }
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}
