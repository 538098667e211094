//! What the node's GPUs and the containers on them use, as metrics show it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use divvy_agent_core::{AccountOwner, Accounts};
use divvy_hardware::{GpuGauges, GpuProcesses};
use divvy_kube::objects::PodObject;
use divvy_model::GrantRecord;
use tokio::time::Instant;

use crate::busy;
use crate::metrics::{self, MeasuredMetrics};

/// Values that are older are not shown.
const OLDEST: Duration = Duration::from_secs(5);

/// The names of a pod's containers, by the container runtime's IDs.
type ContainerNames = BTreeMap<String, String>;

/// What is known about the use of GPUs.
#[derive(Debug)]
pub(crate) struct KnownUsage {
    accounts: Mutex<Accounts>,
    /// Of the pods that have several containers, by UID. A single container needs no name to be told apart.
    names: Mutex<BTreeMap<String, ContainerNames>>,
    gauges: Mutex<Option<(Instant, Vec<GpuGauges>)>>,
    began: Instant,
    /// The last sample that `/v1/usage` has shown.
    shown: Mutex<divvy_model::usage::Usage>,
    /// Tells this agent's samples from those of an agent before, whose numbers began at 1 as well.
    origin: u128,
}

impl Default for KnownUsage {
    fn default() -> KnownUsage {
        KnownUsage {
            accounts: Mutex::default(),
            names: Mutex::default(),
            gauges: Mutex::default(),
            began: Instant::now(),
            shown: Mutex::default(),
            origin: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_nanos()),
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl KnownUsage {
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
    fn owner(names: &BTreeMap<String, ContainerNames>, (pod, container): &busy::BusyOwner) -> AccountOwner {
        let id = container.as_deref();
        AccountOwner {
            pod: pod.clone(),
            container: id.and_then(|id| names.get(pod)?.get(id).cloned()),
        }
    }

    /// Add the nanoseconds for which containers kept a GPU busy until now, in seconds since 1970. `passed` is the time in nanoseconds that these are about.
    pub(crate) fn busy(&self, uuid: &str, busy: &BTreeMap<busy::BusyOwner, u64>, passed: Option<u64>, now: u64) {
        let names = lock(&self.names);
        let mut sums: BTreeMap<AccountOwner, u64> = BTreeMap::new();
        for (owner, ns) in busy {
            *sums.entry(KnownUsage::owner(&names, owner)).or_default() += ns;
        }
        lock(&self.accounts).busy(uuid, &sums, passed, now);
    }

    /// Take note that the driver does not say how busy containers keep a GPU.
    pub(crate) fn busy_is_unknown(&self, uuid: &str) {
        lock(&self.accounts).busy_is_unknown(uuid);
    }

    /// Take note of the grants at this moment. Return whether there are any.
    pub(crate) fn grants<'r>(&self, records: impl Iterator<Item = &'r GrantRecord>) -> bool {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut accounts = lock(&self.accounts);
        accounts.grants(now, records);
        !accounts.is_empty()
    }

    /// Take note that the driver does not say what the processes on a GPU have.
    pub(crate) fn memory_is_unknown(&self, uuid: &str) {
        lock(&self.accounts).memory_is_unknown(uuid);
    }

    /// Set what the driver has just measured of the GPUs.
    pub(crate) fn set_gauges(&self, gauges: Vec<GpuGauges>) {
        *lock(&self.gauges) = Some((Instant::now(), gauges));
    }

    /// Set the memory that processes have.
    pub(crate) fn memory(&self, gpus: &[GpuProcesses]) {
        let names = lock(&self.names);
        let mut accounts = lock(&self.accounts);
        for gpu in gpus {
            if gpu.error.is_some() {
                accounts.memory_is_unknown(&gpu.uuid);
                continue;
            }
            let of_pods = gpu.processes.iter().filter_map(|process| {
                let owner = (process.pod.clone()?, process.container.clone());
                Some((KnownUsage::owner(&names, &owner), process.used.0.saturating_mul(1 << 20)))
            });
            accounts.memory(&gpu.uuid, of_pods);
        }
    }

    /// Return what metrics show: what containers use, and what the driver measured of the GPUs, unless that is too long ago.
    pub(crate) fn measured(&self) -> MeasuredMetrics {
        MeasuredMetrics {
            gpus: self.gauges(),
            containers: lock(&self.accounts).read(),
            ..MeasuredMetrics::default()
        }
    }

    /// Return the same without the containers that have ended. The metrics show those once more, and a reader of something else must not take that away.
    pub(crate) fn measured_now(&self) -> MeasuredMetrics {
        MeasuredMetrics {
            gpus: self.gauges(),
            containers: lock(&self.accounts).open(),
            ..MeasuredMetrics::default()
        }
    }

    fn gauges(&self) -> Vec<GpuGauges> {
        match &*lock(&self.gauges) {
            Some((at, gauges)) if at.elapsed() <= OLDEST => gauges.clone(),
            _ => Vec::new(),
        }
    }

    /// Return a sample of these values, and its entity tag. Its number grows when a value has changed.
    pub(crate) fn sample(&self, measured: &MeasuredMetrics) -> (divvy_model::usage::Usage, String) {
        let mut shown = lock(&self.shown);
        let sample = shown.sample;
        let now = divvy_model::usage::Usage {
            sample,
            ..metrics::usage(measured)
        };
        if now != *shown {
            *shown = now;
            shown.sample = sample.saturating_add(1);
        }
        (shown.clone(), format!("\"{:x}-{}\"", self.origin, shown.sample))
    }
}

#[cfg(test)]
mod tests {
    use divvy_hardware::Gauges;

    use super::*;

    #[test]
    fn the_same_values_are_the_same_sample_and_others_are_another() {
        let usage = KnownUsage::default();
        let with = |percent| MeasuredMetrics {
            gpus: vec![GpuGauges {
                uuid: "GPU-0".to_owned(),
                values: Gauges {
                    gpu_percent: Some(percent),
                    ..Gauges::default()
                },
                parts: Vec::new(),
                failed: Default::default(),
                error: None,
            }],
            ..MeasuredMetrics::default()
        };
        let (first, tag) = usage.sample(&with(1));
        assert_eq!(usage.sample(&with(1)), (first.clone(), tag.clone()));
        let (second, other) = usage.sample(&with(2));
        assert_eq!((first.sample, second.sample), (1, 2));
        assert_ne!(tag, other);
        let (third, again) = usage.sample(&with(1));
        assert_eq!(third.sample, 3, "the numbers grow");
        assert_ne!(tag, again);
        assert_ne!(KnownUsage::default().sample(&with(1)).1, tag, "another start of the agent");
    }
}
