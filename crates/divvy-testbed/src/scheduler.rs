//! A scheduler loop that behaves as kube-scheduler 1.36 does where Divvy can see it: one pod at a time from a queue,
//! NodeResourcesFit over node sums first, then the extender over HTTP (research/k8s-seams.md section 2).
//!
//! What is true: the queue's three parts and what moves a pod between them; the order of filters and their messages;
//! assume, bind beside the next cycle, forget on an error; Go field names; only status 200 counts; 5 s for a call; the
//! extender's answer must name nodes that it was asked about; prioritize is skipped when one node is left.
//!
//! Preemption is what DefaultPreemption does with those filters ([`preempt`] says where it is simpler), and asks the extender as that does.
//!
//! What is simpler: scoring is LeastAllocated over cpu and memory; no volumes, affinity between pods, topology
//! spread or gang scheduling; of node affinity only `nodeSelector`; one extender. Every node is looked at
//! (`percentageOfNodesToScore: 100`). Queue order is priority, then creation.

pub mod extender;
pub mod fit;
pub mod preempt;
pub mod queue;
mod run;

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
