//! A scheduler loop that behaves as kube-scheduler 1.36 does where Divvy can see it: one pod at a time from a queue, the filters of the
//! default profile first, then the extender over HTTP (research/k8s-seams.md section 2).
//!
//! What is true: the queue's three parts and what moves a pod between them; the filters that are there, their order and their messages
//! ([`filters`]; one file for each plugin); assume, bind beside the next cycle, forget on an error; Go field names; only status 200 counts; 5 s
//! for a call; the extender's answer must name nodes that it was asked about; prioritize is skipped when one node is left.
//!
//! The filters are NodeUnschedulable, TaintToleration, NodeAffinity, NodePorts, NodeResourcesFit, PodTopologySpread and InterPodAffinity, with the
//! feature gates as they are by default. [`feasible`] asks them about a pod without a cluster, as a function of objects. A pod with scheduling
//! gates waits until the last is gone. Preemption is what DefaultPreemption does with these filters ([`preempt`] says where it is simpler), and
//! asks the extender as that does; a pod with `preemptionPolicy: Never` evicts nobody.
//!
//! What is simpler:
//!
//! - Scoring is LeastAllocated over cpu and memory: preferred affinity, `ScheduleAnyway` and `PreferNoSchedule` move nothing.
//! - No volumes, resource claims or gang scheduling; NodeName is not asked, since a pod with a node is not scheduled; one profile, one extender.
//! - There is no node controller: a node whose condition Ready is not True is one with the taint `node.kubernetes.io/not-ready:NoSchedule`, and a
//!   cordoned one has `node.kubernetes.io/unschedulable:NoSchedule`.
//! - `matchLabelKeys` and `mismatchLabelKeys` are read with the labels that their pod has when a pod is tried. A real API server writes them into
//!   the selectors when their pod is created.
//! - Constraints that a real API server refuses are not refused. A selector between pods that cannot be read matches no pod; kube-scheduler fails
//!   a pod with such a selector.
//! - A change wakes more pods than queueing hints would: a node that changes and a pod that leaves wake all; a pod that is placed, or whose labels
//!   change, or that is being deleted, and a namespace that changes its labels (which wakes nobody in kube-scheduler), wake those that
//!   PodTopologySpread or InterPodAffinity refused somewhere.
//! - A nominated pod keeps nothing from others, and the message of a refusal does not go on to say what preemption found.
//! - Every node is looked at (`percentageOfNodesToScore: 100`). Queue order is priority, then creation.

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
pub mod view;

pub use filters::feasible;

use std::time::Duration;

use kube::Client;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::node::Backoff;

/// How the scheduler is set up.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// `spec.schedulerName` of the pods that it looks after.
    pub name: String,
    /// The extender's `urlPrefix`; none: every pod is placed by node sums alone.
    pub extender_url: Option<String>,
    /// The verb that is POSTed for prioritize; none: not asked.
    pub prioritize_verb: Option<String>,
    /// The verb that is POSTed for preempt; none: victims go as the sums say.
    pub preempt_verb: Option<String>,
    /// Pods that ask for one of these go to the extender; with none every pod does.
    pub managed_resources: Vec<String>,
    /// For each call to the extender.
    pub http_timeout: Duration,
    /// Weight of the extender's scores, which are 0 to 10.
    pub weight: i64,
    /// Where the choice between equal nodes comes from.
    pub seed: u64,
    /// How long a pod that did not fit waits at least (kube-scheduler: 1 s to 10 s; here shorter).
    pub backoff: Backoff,
    /// After this a pod that did not fit is tried again without any event.
    pub flush_unschedulable: Duration,
    /// Before a failed watch is tried again, longer each time until it works (kube-scheduler: 0.8 s to 30 s, so that a pod may wait for half
    /// a minute after the API server is back; here a tenth).
    pub api_retry: Backoff,
}

impl Default for SchedulerConfig {
    fn default() -> SchedulerConfig {
        SchedulerConfig {
            name: "default-scheduler".to_owned(),
            extender_url: None,
            prioritize_verb: None,
            preempt_verb: None,
            managed_resources: vec![
                divvy_model::names::GPU_MEM.to_owned(),
                divvy_model::names::GPU_COUNT.to_owned(),
            ],
            http_timeout: Duration::from_secs(5),
            weight: 1,
            seed: 0,
            backoff: Backoff {
                first: Duration::from_millis(100),
                max: Duration::from_secs(1),
            },
            flush_unschedulable: Duration::from_secs(300),
            api_retry: Backoff {
                first: Duration::from_millis(80),
                max: Duration::from_secs(3),
            },
        }
    }
}

/// A running scheduler. Ends when it is dropped.
#[derive(Debug)]
pub struct Scheduler {
    token: CancellationToken,
    tracker: TaskTracker,
}

impl Scheduler {
    /// Starts it.
    pub fn start(client: Client, config: SchedulerConfig) -> Scheduler {
        let (token, tracker) = (CancellationToken::new(), TaskTracker::new());
        let (own, tasks) = (token.clone(), tracker.clone());
        tracker.spawn(async move {
            let run = run::run(client, config, own.clone(), tasks);
            let _ = own.run_until_cancelled(run).await;
        });
        Scheduler { token, tracker }
    }

    /// Ends it and waits until it has. A bind that is under way is cut off, as by the end of a process.
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
