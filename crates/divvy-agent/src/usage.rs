//! What the node's GPUs and the containers on them use, as metrics show it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use divvy_agent_core::{Accounts, Owner};
use divvy_hardware::{GpuGauges, GpuProcesses};
use divvy_kube::objects::PodObject;
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use crate::agent::Agent;
use crate::busy;
use crate::metrics::Measured;

/// The time between two measurements if nobody reads the metrics.
const PERIOD: Duration = Duration::from_secs(5);
/// Whoever asks within this time gets the values of the measurement before.
const FRESH: Duration = Duration::from_secs(1);
/// Values that are older are not shown.
const OLDEST: Duration = Duration::from_secs(5);
/// How long to wait for the driver.
const PATIENCE: Duration = Duration::from_secs(2);

/// The names of a pod's containers, by the container runtime's IDs.
type Names = BTreeMap<String, String>;

/// What is known about the use of GPUs.
#[derive(Debug)]
pub(crate) struct Usage {
    accounts: Mutex<Accounts>,
    /// Of the pods that have several containers, by UID. A single container needs no name to be told apart.
    names: Mutex<BTreeMap<String, Names>>,
    gauges: Mutex<Option<(Instant, Vec<GpuGauges>)>>,
    /// When the driver was asked last for what metrics show.
    asked: tokio::sync::Mutex<Option<Instant>>,
    began: Instant,
}

impl Default for Usage {
    fn default() -> Usage {
        Usage {
            accounts: Mutex::default(),
            names: Mutex::default(),
            gauges: Mutex::default(),
            asked: tokio::sync::Mutex::default(),
            began: Instant::now(),
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Usage {
    /// Take the names of a pod's containers.
    pub(crate) fn name(&self, pod: &PodObject) {
        let (Some(uid), Some(status)) = (&pod.metadata.uid, &pod.status) else {
            return;
        };
        let statuses = || status.init_container_statuses.iter().chain(&status.container_statuses);
        if statuses().count() < 2 {
            return;
        }
        let named = statuses().filter_map(|status| {
            let (_, id) = status.container_id.as_deref()?.split_once("://")?;
            Some((id.to_owned(), status.name.clone()))
        });
        lock(&self.names).insert(uid.clone(), named.collect());
    }

    /// Forget all pods except those for which `is_there` is true.
    pub(crate) fn keep_names(&self, is_there: impl Fn(&str) -> bool) {
        lock(&self.names).retain(|uid, _| is_there(uid));
    }

    /// Return the container of a process, from the names that are known.
    fn owner(names: &BTreeMap<String, Names>, (pod, container): &busy::Owner) -> Owner {
        let id = container.as_deref();
        Owner {
            pod: pod.clone(),
            container: id.and_then(|id| names.get(pod)?.get(id).cloned()),
        }
    }

    /// Add the nanoseconds for which containers kept a GPU busy until now, in seconds since 1970. `passed` is the time in nanoseconds that these are about.
    pub(crate) fn busy(&self, uuid: &str, busy: &BTreeMap<busy::Owner, u64>, passed: Option<u64>, now: u64) {
        let names = lock(&self.names);
        let mut sums: BTreeMap<Owner, u64> = BTreeMap::new();
        for (owner, ns) in busy {
            *sums.entry(Usage::owner(&names, owner)).or_default() += ns;
        }
        lock(&self.accounts).busy(uuid, &sums, passed, now);
    }

    /// Take note that the driver does not say how busy containers keep a GPU.
    pub(crate) fn busy_is_unknown(&self, uuid: &str) {
        lock(&self.accounts).busy_is_unknown(uuid);
    }

    /// Set the memory that processes have.
    fn memory(&self, gpus: &[GpuProcesses]) {
        let names = lock(&self.names);
        let mut accounts = lock(&self.accounts);
        for gpu in gpus {
            if gpu.error.is_some() {
                accounts.memory_is_unknown(&gpu.uuid);
                continue;
            }
            let of_pods = gpu.processes.iter().filter_map(|process| {
                let owner = (process.pod.clone()?, process.container.clone());
                Some((Usage::owner(&names, &owner), process.used.0.saturating_mul(1 << 20)))
            });
            accounts.memory(&gpu.uuid, of_pods);
        }
    }

    /// Return what metrics show: what containers use, and what the driver measured of the GPUs, unless that is too long ago.
    pub(crate) fn measured(&self) -> Measured {
        let gpus = match &*lock(&self.gauges) {
            Some((at, gauges)) if at.elapsed() <= OLDEST => gauges.clone(),
            _ => Vec::new(),
        };
        Measured {
            gpus,
            containers: lock(&self.accounts).read(),
        }
    }
}

impl Agent {
    /// Measure what containers use, while there are any, so that short use is seen between two readers of the metrics.
    pub(crate) async fn keep_accounts(self: &Arc<Self>) {
        loop {
            sleep(PERIOD).await;
            self.account().await;
        }
    }

    /// Measure, unless somebody has done so just now.
    pub(crate) async fn measure_for_metrics(&self) {
        let mut asked = self.usage().asked.lock().await;
        if asked.is_some_and(|asked| asked.elapsed() < FRESH) {
            return;
        }
        *asked = Some(Instant::now());
        self.account().await;
        let Some(probe) = self.probe() else { return };
        match timeout(PATIENCE, probe.metrics()).await {
            Ok(Ok(gauges)) => *lock(&self.usage().gauges) = Some((Instant::now(), gauges)),
            // `hardware` reports that the driver does not work.
            Ok(Err(failure)) => debug!("the agent does not know what the driver measures: {failure}"),
            Err(_) => debug!(
                "the agent does not know what the driver measures: no answer in {} s",
                PATIENCE.as_secs()
            ),
        }
    }

    /// Bring the accounts up to date.
    async fn account(&self) {
        let take_grants = || {
            let now = u64::try_from(self.usage().began.elapsed().as_millis()).unwrap_or(u64::MAX);
            let core = self.core();
            let mut accounts = lock(&self.usage().accounts);
            accounts.grants(now, core.records());
            !accounts.is_empty()
        };
        if !take_grants() {
            return;
        }
        match self.processes().await {
            Some(processes) => self.usage().memory(&processes),
            None => {
                let mut accounts = lock(&self.usage().accounts);
                for uuid in self.granted_gpus() {
                    accounts.memory_is_unknown(&uuid);
                }
            }
        }
    }
}
