//! Where the device plugin shows the health of its GPUs, besides the kubelet and the log: `/metrics`, `/readyz`, and events on the node.
//! NVIDIA's plugin has neither, so nothing listens and nothing is sent unless the pod is set up for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use divvy_kube::client::{ClusterChoice, connect};
use divvy_kube::events::EventNote;
use divvy_model::Health;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use super::{OnNode, Surroundings};
use crate::health_change::HealthChange;
use crate::metrics::{PluginCounts, PluginMetrics};
use crate::notice::Notice;
use crate::observed::Observed;
use crate::readiness::Readiness;
use crate::{Error, http};

/// The number of events that may wait for the API server. Further ones are only in the log.
const EVENTS: usize = 64;

/// What the plugin shows now.
#[derive(Debug, Default)]
pub(super) struct ShownPlugin {
    pub(super) ready: Readiness,
    metrics: PluginMetrics,
    state: Mutex<OutletState>,
}

/// The health of the devices, and the resources that are offered.
#[derive(Debug, Default)]
pub(super) struct OutletState {
    /// The GPUs and MIG devices by UUID.
    pub(super) gpus: BTreeMap<String, Health>,
    /// For each resource the number of devices that are healthy, and of those that are not.
    pub(super) offered: BTreeMap<String, [u64; 2]>,
}

impl ShownPlugin {
    pub(super) fn set(&self, state: OutletState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }
}

impl Observed for ShownPlugin {
    fn ready(&self) -> &Readiness {
        &self.ready
    }

    fn counts(&self) -> &PluginCounts {
        self.metrics.counts()
    }

    fn metrics(&self, format: divvy_exposition::MetricsFormat) -> String {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.metrics.text(&state.gpus, &state.offered, format)
    }
}

/// The plugin's outlets. They stay open while a new configuration makes the plugin start over, and close when this is dropped.
pub(super) struct Outlets {
    pub(super) shown: Arc<ShownPlugin>,
    events: Option<mpsc::Sender<HealthChange>>,
    _tasks: Vec<AbortOnDropHandle<()>>,
}

impl Outlets {
    /// Open the outlets for which the pod is set up.
    ///
    /// # Errors
    /// The address for the metrics cannot be used.
    pub(super) fn open(surroundings: &Surroundings, stop: &CancellationToken) -> Result<Outlets, Error> {
        let shown = Arc::new(ShownPlugin::default());
        let mut tasks = Vec::new();
        if let Some(address) = surroundings.metrics {
            let listener = http::listen(address, "DIVVY_METRICS=ADDRESS:PORT")?;
            tasks.push(tokio::spawn(http::serve(listener, shown.clone(), stop.clone())));
        }
        let events = surroundings.events.clone().map(|on| {
            let (events, queue) = mpsc::channel(EVENTS);
            tasks.push(tokio::spawn(post(on, queue)));
            events
        });
        Ok(Outlets {
            shown,
            events,
            _tasks: tasks.into_iter().map(AbortOnDropHandle::new).collect(),
        })
    }

    /// Log a change of a GPU's health, and post it as an event. This does not wait for the API server.
    pub(super) fn tell(&self, change: HealthChange) {
        change.log();
        if let Some(events) = &self.events
            && events.try_send(change).is_err()
        {
            debug!("this change is only in the log: no event can be posted, or too many are waiting");
        }
    }
}

/// Post the events one after the other.
async fn post(on: OnNode, mut queue: mpsc::Receiver<HealthChange>) {
    let choice = ClusterChoice {
        kubeconfig: on.kubeconfig,
        ..ClusterChoice::default()
    };
    let mut notice = match connect(&choice).await {
        Ok(connection) => Notice::new(connection.client, "nvidia-device-plugin", &on.node),
        Err(error) => {
            warn!("changes of a GPU's health are only in this log and not events on the node: {error}");
            return;
        }
    };
    while let Some(HealthChange { warning, reason, text }) = queue.recv().await {
        notice
            .post(EventNote {
                warning,
                reason: reason.to_owned(),
                action: "Reconciling".to_owned(),
                text,
            })
            .await;
    }
}
