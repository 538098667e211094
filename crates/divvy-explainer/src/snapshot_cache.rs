//! The state of the cluster from which questions are answered, at most some seconds old.
//!
//! On a large cluster, reading all nodes and pods takes the API server and the explainer some seconds. Therefore only one read is
//! under way at a time, and its result serves all questions for a while. Reading takes at most a sixth of the time, however many
//! users call. The result is freed some seconds later.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::read_cluster;
use divvy_kube::list::LeftOut;
use divvy_model::MemoryUnit;
use divvy_why::{ClusterSnapshot, NamedPods, Wants, answer_naming};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, OwnedMutexGuard, OwnedSemaphorePermit};
use tokio::time::Instant;

use crate::metrics::ExplainerMetrics;
use crate::refusal::AnswerRefusal;

/// The shortest time for which a snapshot is used.
const SHORTEST: Duration = Duration::from_secs(2);
/// The minimum time for which a snapshot is used, as a multiple of the time that reading it took.
const REST: u32 = 5;
/// The answer states the snapshot's age if it is greater than this.
const NEW: Duration = Duration::from_secs(3);
/// How long a question waits for its turn. `divvy why` waits longer.
const TURN: Duration = Duration::from_secs(20);
/// Timeout for reading the cluster. With 5,000 nodes and 50,000 pods it takes 3 s.
const LONGEST: Duration = Duration::from_secs(20);
/// The maximum size of an answer in bytes. An answer about all of 5,000 nodes has 10 MiB.
const LARGEST_ANSWER: usize = 32 << 20;

/// A question: why a pod waits.
pub(crate) struct WhyQuestion {
    pub(crate) wants: Wants,
    pub(crate) all_nodes: bool,
    /// The pods whose names the user may see.
    pub(crate) named: NamedPods,
}

pub(crate) struct SnapshotCache {
    client: kube::Client,
    unit: MemoryUnit,
    metrics: Arc<ExplainerMetrics>,
    /// The snapshot. The lock is held while the cluster is read, and while an answer is computed.
    kept: Arc<Mutex<KeptSnapshot>>,
}

/// The snapshot, or the reason why the cluster could not be read. Either is used until `until`.
#[derive(Debug)]
struct KeptSnapshot {
    read: Result<ReadSnapshot, NotRead>,
    until: Instant,
}

/// Why there is no snapshot.
#[derive(Debug, thiserror::Error)]
enum NotRead {
    #[error("the cluster was not read yet")]
    NotYet,
    #[error(transparent)]
    Unreadable(#[from] divvy_kube::Error),
    #[error("the cluster could not be listed within {LONGEST:?}; try again in a few seconds")]
    Late,
    #[error("the cluster could not be read: {0}")]
    Panicked(#[from] tokio::task::JoinError),
}

#[derive(Debug)]
struct ReadSnapshot {
    snapshot: Arc<ClusterSnapshot>,
    at: Instant,
    left_out: Option<String>,
}

impl SnapshotCache {
    pub(crate) fn new(client: kube::Client, unit: MemoryUnit, metrics: Arc<ExplainerMetrics>) -> SnapshotCache {
        SnapshotCache {
            client,
            unit,
            metrics,
            kept: Arc::new(Mutex::new(KeptSnapshot {
                read: Err(NotRead::NotYet),
                until: Instant::now(),
            })),
        }
    }

    /// Return the answer as JSON. Read the cluster first if the snapshot is too old. `turn` is returned with the answer, and the
    /// caller keeps it until the answer is sent.
    ///
    /// The work goes on, and keeps its turn, even if the caller disconnects. Otherwise a user who repeatedly asks and disconnects could make the
    /// explainer read the cluster without pause, or work on more questions than have a turn.
    pub(crate) async fn answer(
        self: &Arc<Self>,
        question: WhyQuestion,
        turn: OwnedSemaphorePermit,
    ) -> Result<(Vec<u8>, OwnedSemaphorePermit), AnswerRefusal> {
        let cache = self.clone();
        let asked = tokio::spawn(async move { cache.in_turn(question).await.map(|body| (body, turn)) });
        asked.await.unwrap_or_else(|failed| Err(not_worked_out(failed)))
    }

    async fn in_turn(&self, question: WhyQuestion) -> Result<Vec<u8>, AnswerRefusal> {
        let turn = tokio::time::timeout(TURN, self.kept.clone().lock_owned()).await;
        let mut kept =
            turn.map_err(|_elapsed| AnswerRefusal::unavailable("other questions take too long; try again in a few seconds"))?;
        if kept.until <= Instant::now() {
            // Free the old snapshot first, so that there are never two in memory.
            forget(&mut kept).await;
            *kept = self.read().await;
            self.forget_later(kept.until);
        }
        let read = match &kept.read {
            Ok(read) => read,
            Err(why) => return Err(AnswerRefusal::unavailable(why.to_string())),
        };
        let (snapshot, age, left_out) = (read.snapshot.clone(), read.at.elapsed(), read.left_out.clone());
        let began = Instant::now();
        let answered = tokio::task::spawn_blocking(move || {
            let mut answer = answer_naming(&snapshot, &question.wants, question.all_nodes, &question.named);
            answer.age_seconds = (age >= NEW).then_some(age.as_secs());
            answer.notes.extend(left_out);
            let mut body = Bounded(Vec::new());
            serde_json::to_writer(&mut body, &answer).map(|()| body.0)
        });
        let answered = answered.await;
        rest(kept, began.elapsed());
        answered.map_err(not_worked_out)?.map_err(|error| {
            if error.is_io() {
                AnswerRefusal::unavailable(format!(
                    "the answer has more than {} MiB; run divvy why without --all-nodes",
                    LARGEST_ANSWER >> 20
                ))
            } else {
                not_worked_out(error)
            }
        })
    }

    /// Read the cluster on another thread, so that this thread can answer probes in the meantime.
    async fn read(&self) -> KeptSnapshot {
        let began = Instant::now();
        self.metrics.cluster_read();
        let (client, unit, runtime) = (self.client.clone(), self.unit, Handle::current());
        let looked = tokio::task::spawn_blocking(move || {
            runtime.block_on(async { tokio::time::timeout(LONGEST, read_cluster::read_without_waiting(&client, unit)).await })
        });
        let read = match looked.await {
            Ok(Ok(Ok(seen))) => Ok(ReadSnapshot {
                left_out: left_out(&seen.no_nodes, &seen.no_pods),
                snapshot: Arc::new(seen.snapshot),
                at: began,
            }),
            Ok(Ok(Err(error))) => Err(error.into()),
            Ok(Err(_elapsed)) => Err(NotRead::Late),
            Err(failed) => Err(failed.into()),
        };
        let took = began.elapsed();
        tracing::debug!(?took, well = read.is_ok(), "the cluster was read");
        KeptSnapshot {
            read,
            until: Instant::now() + SHORTEST.max(took * REST),
        }
    }

    /// Free the snapshot when it is too old.
    fn forget_later(&self, until: Instant) {
        let kept = self.kept.clone();
        tokio::spawn(async move {
            tokio::time::sleep_until(until).await;
            let mut kept = kept.lock().await;
            if kept.until <= Instant::now() {
                forget(&mut kept).await;
            }
        });
    }
}

/// Free the snapshot on another thread: freeing 50,000 pods takes a tenth of a second.
async fn forget(kept: &mut KeptSnapshot) {
    let old = std::mem::replace(&mut kept.read, Err(NotRead::NotYet));
    if let Err(failed) = tokio::task::spawn_blocking(move || drop(old)).await {
        tracing::error!(%failed, "the snapshot of the cluster could not be freed");
    }
}

/// Make the next question wait as long as this one took, so that answers use at most half of a core.
fn rest(turn: OwnedMutexGuard<KeptSnapshot>, took: Duration) {
    tokio::spawn(async move {
        tokio::time::sleep(took).await;
        drop(turn);
    });
}

fn left_out(nodes: &LeftOut, pods: &LeftOut) -> Option<String> {
    let count = |left: &LeftOut| left.named.len() as u64 + left.more;
    let (nodes, pods) = (count(nodes), count(pods));
    (nodes + pods > 0).then(|| {
        format!("{nodes} nodes and {pods} pods could not be read and are left out; an administrator's `divvy why` names them.")
    })
}

fn not_worked_out(error: impl std::fmt::Display) -> AnswerRefusal {
    AnswerRefusal::unavailable(format!("the answer could not be computed: {error}"))
}

/// A buffer of at most [`LARGEST_ANSWER`] bytes.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LARGEST_ANSWER {
            return Err(io::Error::other("too large"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
