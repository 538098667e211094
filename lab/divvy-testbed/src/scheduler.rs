//! A scheduler loop that behaves as kube-scheduler 1.36 does wherever Divvy can observe it: it takes one pod at a time from a queue, and
//! applies the filters of the default profile first, then calls the extender over HTTP (`pkg/scheduler/extender.go`).
//!
//! What matches kube-scheduler: the three parts of the queue and what moves a pod between them; the implemented filters, their order and
//! their messages ([`filters`]; one file per plugin); assuming a pod, binding it concurrently with the next cycle, and forgetting it on an
//! error; Go field names; only status 200 counts as success; a 5 s limit per call; the extender's response may contain only nodes from the
//! request; prioritize is skipped if only one node is left.
//!
//! The filters are NodeUnschedulable, TaintToleration, NodeAffinity, NodePorts, NodeResourcesFit, PodTopologySpread, and InterPodAffinity,
//! with the default feature gates. [`feasible`] applies them to a pod without a cluster, as a function of objects. A pod with scheduling
//! gates waits until the last gate is removed. Preemption follows DefaultPreemption for resources ([`preempt`] lists the
//! simplifications) and calls the extender in the same way. A pod with `preemptionPolicy: Never` evicts no pod.
//!
//! Simplifications:
//!
//! - Scoring is LeastAllocated over cpu and memory. Preferred affinity, `ScheduleAnyway`, and `PreferNoSchedule` have no effect.
//!   A term of node affinity with `matchFields` matches no node.
//! - There are no volumes, resource claims, or gang scheduling. NodeName is not applied, because a pod with a node is not scheduled. There is
//!   one profile and one extender.
//! - There is no node controller. A node whose condition Ready is not True counts as tainted with `node.kubernetes.io/not-ready:NoSchedule`,
//!   and a cordoned node as tainted with `node.kubernetes.io/unschedulable:NoSchedule`.
//! - `matchLabelKeys` and `mismatchLabelKeys` are evaluated with the labels that their pod has when a pod is tried. A real API server writes
//!   them into the selectors when their pod is created.
//! - Constraints that a real API server refuses are not refused. An invalid selector between pods matches no pod; kube-scheduler fails a pod
//!   with such a selector.
//! - A change wakes more pods than queueing hints would. A changed node and a pod that leaves its node wake all pods. The following wake the
//!   pods that PodTopologySpread or InterPodAffinity refused somewhere: a pod that is placed, that changes its labels, or that is being
//!   deleted; and a namespace that changes its labels (which wakes no pod in kube-scheduler).
//! - A nominated pod reserves nothing, and the message of a refusal does not report the result of preemption.
//! - Every node is considered (`percentageOfNodesToScore: 100`). The queue is ordered by priority, then by creation.

#[cfg(test)]
mod cases;
pub mod extender;
pub mod filters;
pub mod fit;
pub mod node_affinity;
pub mod node_ports;
pub mod pod_affinity;
pub mod preempt;
pub mod queue;
mod run;
pub mod selector;
pub mod spread;
pub mod taints;
pub mod terms;
pub mod view;

pub use filters::feasible;

use std::time::Duration;

use kube::Client;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::node::BackoffRange;

/// The scheduler's configuration.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// The `spec.schedulerName` of the pods that the scheduler places.
    pub name: String,
    /// The extender's `urlPrefix`. With `None`, only the filters and the sums of requests on each node decide where a pod is
    /// placed.
    pub extender_url: Option<String>,
    /// The prioritize verb, sent with POST. With `None`, it is not called.
    pub prioritize_verb: Option<String>,
    /// The preempt verb, sent with POST. With `None`, only the filters and the sums of requests decide which pods are evicted.
    pub preempt_verb: Option<String>,
    /// The resources whose pods go to the extender. If empty, every pod does.
    pub managed_resources: Vec<String>,
    /// The time limit of each call to the extender.
    pub http_timeout: Duration,
    /// The weight of the extender's scores, which are 0 to 10.
    pub weight: i64,
    /// The seed of the choice between nodes with equal scores.
    pub seed: u64,
    /// The minimum wait of a pod that did not fit (kube-scheduler: 1 s to 10 s; here shorter).
    pub backoff: BackoffRange,
    /// The time after which a pod that did not fit is retried without any event.
    pub flush_unschedulable: Duration,
    /// The wait before a failed watch is retried, which doubles until the watch works (kube-scheduler: 0.8 s to 30 s, so that a pod may wait
    /// half a minute after the API server is back; here a tenth of that).
    pub api_retry: BackoffRange,
}

impl Default for SchedulerConfig {
    fn default() -> SchedulerConfig {
        SchedulerConfig {
            name: "default-scheduler".to_owned(),
            extender_url: None,
            prioritize_verb: None,
            preempt_verb: None,
            managed_resources: [divvy_model::names::GPU_MEM, divvy_model::names::GPU_COUNT]
                .into_iter()
                .chain(divvy_model::Vendor::ALL.map(divvy_model::Vendor::whole_resource))
                .chain(["nvidia.com/mig-3g.20gb"])
                .map(str::to_owned)
                .collect(),
            http_timeout: Duration::from_secs(5),
            weight: 1,
            seed: 0,
            backoff: BackoffRange {
                first: Duration::from_millis(100),
                max: Duration::from_secs(1),
            },
            flush_unschedulable: Duration::from_secs(300),
            api_retry: BackoffRange {
                first: Duration::from_millis(80),
                max: Duration::from_secs(3),
            },
        }
    }
}

/// A running scheduler. It ends on drop.
#[derive(Debug)]
pub struct Scheduler {
    token: CancellationToken,
    tracker: TaskTracker,
}

impl Scheduler {
    /// Start a scheduler.
    pub fn start(client: Client, config: SchedulerConfig) -> Scheduler {
        let (token, tracker) = (CancellationToken::new(), TaskTracker::new());
        let (own, tasks) = (token.clone(), tracker.clone());
        tracker.spawn(async move {
            let run = run::run(client, config, own.clone(), tasks);
            let _ = own.run_until_cancelled(run).await;
        });
        Scheduler { token, tracker }
    }

    /// Stop the scheduler and wait until it has ended. A bind in progress is cut off, as by the end of a process.
    pub async fn shutdown(self) {
        self.token.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.token.cancel();
    }
}
