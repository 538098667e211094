//! The parts of the extender that wait: the watches, the requests to the API server, and the periodic sweep. The host feeds the
//! [`ExtenderCore`] and carries out its [`ExtenderAction`]s. It makes no decisions.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use divvy_kube::convert::ReadPod;
use divvy_kube::events::Events;
use divvy_kube::{convert, watch};
use divvy_model::MemoryUnit;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::{CoreTiming, ExtenderCore, PlacementRules};
use crate::metrics::ExtenderMetrics;
use crate::recheck::SecondLook;
use crate::shared::{ExtenderLimits, ExtenderState, Leadership};
use crate::tls::Current;

/// Settings that differ between clusters and between tests.
#[derive(Debug, Clone, Copy)]
pub struct ExtenderSettings {
    /// The cluster's unit.
    pub unit: MemoryUnit,
    /// How nodes and GPUs are chosen.
    pub placement: PlacementRules,
    /// The core's time limits.
    pub timing: CoreTiming,
    /// Timeouts of requests to the API server.
    pub limits: ExtenderLimits,
    /// Whether gpushare's ConfigMaps `unhealthy-gpu-NODE` are read.
    pub unhealthy_gpu_configmaps: bool,
}

impl ExtenderSettings {
    /// Return the defaults for a cluster with this unit.
    pub fn new(unit: MemoryUnit) -> ExtenderSettings {
        ExtenderSettings {
            unit,
            placement: PlacementRules::default(),
            timing: CoreTiming::default(),
            limits: ExtenderLimits {
                post: Duration::from_millis(2_500),
                get: Duration::from_secs(1),
                sweep: Duration::from_secs(5),
            },
            unhealthy_gpu_configmaps: true,
        }
    }
}

/// A running extender: its router and its tasks.
#[derive(Debug)]
pub struct Served {
    /// The router for kube-scheduler's and gpushare's paths.
    pub router: axum::Router,
    shared: Arc<ExtenderState>,
}

impl Served {
    /// Wait for the binds that have begun, for at most `at_most`. Call this after `stop` was cancelled. Return false if the outcome of
    /// some bind is unknown: the API server may have carried it out or may still do so.
    pub async fn finish(&self, at_most: Duration) -> bool {
        self.shared.tasks.close();
        if tokio::time::timeout(at_most, self.shared.tasks.wait()).await.is_err() {
            tracing::warn!("some binds have not finished after {at_most:?}");
            return false;
        }
        !self.shared.core().in_doubt()
    }

    pub(crate) fn shared(&self) -> Arc<ExtenderState> {
        self.shared.clone()
    }

    pub(crate) fn metrics(&self) -> Arc<ExtenderMetrics> {
        self.shared.metrics.clone()
    }

    /// Wait until a watch ends without having been stopped, which is a bug.
    pub(crate) async fn failed(&self) {
        self.shared.ended.cancelled().await;
    }
}

/// Start the watches and return the router. The tasks end when `stop` is cancelled. The client may wrap any `tower` service.
pub fn serve(client: kube::Client, settings: ExtenderSettings, stop: CancellationToken) -> Served {
    serve_with(client, settings, None, None, stop)
}

/// Start as [`serve`] does. With credentials, only clients that connect through [`crate::tls::listener`] and present a
/// certificate are answered. With several replicas, nothing is bound before [`ExtenderState::lead_until`] is called.
pub(crate) fn serve_with(
    client: kube::Client,
    settings: ExtenderSettings,
    credentials: Option<Current>,
    leadership: Option<Leadership>,
    stop: CancellationToken,
) -> Served {
    let mut core = ExtenderCore::choosing(settings.unit, settings.timing, settings.placement);
    if leadership.is_some() {
        core.stand_by();
    }
    let shared = Arc::new(ExtenderState {
        core: Mutex::new(core),
        answers: Mutex::new(BTreeMap::new()),
        metrics: Arc::new(ExtenderMetrics::default()),
        credentials,
        leadership,
        second_look: SecondLook::new(),
        events: Events::new(client.clone(), "divvy-extender", None),
        client: client.clone(),
        limits: settings.limits,
        started: Instant::now(),
        tasks: TaskTracker::new(),
        ended: CancellationToken::new(),
    });
    shared.watch_pods(stop.clone());
    let (_, nodes) = watch::read(client.clone(), ReadPod::from, |object| convert::node(&object));
    shared.watch(nodes, stop.clone(), ExtenderCore::node_change);
    if settings.unhealthy_gpu_configmaps {
        shared.watch(watch::unhealthy_gpus(client), stop.clone(), |core, change, _| {
            core.unhealthy_change(change);
            Vec::new()
        });
    }
    shared.sweep(stop);
    Served {
        router: crate::http::router(shared.clone()),
        shared,
    }
}
