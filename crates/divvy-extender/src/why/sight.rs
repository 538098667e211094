//! What the answers are about: the cluster as it was a moment ago.
//!
//! A look lists all nodes and pods, which takes 50,000 pods' time of the API server and of this program. So there is one at a time, it serves all who ask
//! meanwhile, and users, however many, have the cluster listed a sixth of the time at most. It is kept for no longer than that.
//!
//! The extender's one thread answers kube-scheduler. What takes long (a look, an answer, to free a look's memory) is done on another.

use std::sync::Arc;
use std::time::Duration;

use divvy_cluster::look;
use divvy_model::MemoryUnit;
use divvy_why::{Answer, Named, Snapshot, Wants, answer_naming};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::time::Instant;

use super::Refusal;

/// A look serves for at least this long.
const SHORTEST: Duration = Duration::from_secs(2);
/// And for so many times as long as it took.
const REST: u32 = 5;
/// Of an older look the answer says when it was.
const NEW: Duration = Duration::from_secs(3);
/// How long a question waits for others. `divvy why` waits longer.
const TURN: Duration = Duration::from_secs(20);
/// A look that takes longer is given up. At 5,000 nodes it takes 3 s.
const LONGEST: Duration = Duration::from_secs(20);

pub(super) struct Sight {
    client: kube::Client,
    unit: MemoryUnit,
    /// Whoever holds it looks, or answers.
    kept: Arc<Mutex<Option<Kept>>>,
}

#[derive(Debug)]
struct Kept {
    snapshot: Arc<Snapshot>,
    at: Instant,
    until: Instant,
    left_out: Option<String>,
}

impl Sight {
    pub(super) fn new(client: kube::Client, unit: MemoryUnit) -> Sight {
        Sight {
            client,
            unit,
            kept: Arc::default(),
        }
    }

    /// Answers; looks first, if the last look is too old.
    pub(super) async fn answer(self: &Arc<Self>, wants: Wants, all_nodes: bool, named: Named) -> Result<Answer, Refusal> {
        let sight = self.clone();
        // It goes on when the caller goes away: whoever asks and leaves, again and again, must not have the cluster listed without a pause.
        let asked = tokio::spawn(async move { sight.in_turn(wants, all_nodes, named).await });
        asked
            .await
            .unwrap_or_else(|failed| Err(Refusal::unavailable(format!("the answer could not be worked out: {failed}"))))
    }

    async fn in_turn(&self, wants: Wants, all_nodes: bool, named: Named) -> Result<Answer, Refusal> {
        let turn = tokio::time::timeout(TURN, self.kept.clone().lock_owned()).await;
        let mut kept =
            turn.map_err(|_elapsed| Refusal::unavailable("other questions take too long; ask again in some seconds"))?;
        if kept.as_ref().is_none_or(|kept| kept.until <= Instant::now()) {
            // Never two of them in memory.
            forget(&mut kept).await;
            match self.look().await {
                Ok(new) => {
                    self.forget_later(new.until);
                    *kept = Some(new);
                }
                Err((refusal, took)) => {
                    rest(kept, took);
                    return Err(refusal);
                }
            }
        }
        let Some(look) = &*kept else {
            return Err(Refusal::unavailable("there is no look at the cluster"));
        };
        let (snapshot, age, left_out) = (look.snapshot.clone(), look.at.elapsed(), look.left_out.clone());
        let began = Instant::now();
        let answer = tokio::task::spawn_blocking(move || answer_naming(&snapshot, &wants, all_nodes, &named)).await;
        // Half of one core at most.
        rest(kept, began.elapsed());
        let mut answer =
            answer.map_err(|failed| Refusal::unavailable(format!("the answer could not be worked out: {failed}")))?;
        if age >= NEW {
            answer
                .notes
                .push(format!("The extender looked at the cluster {} s ago.", age.as_secs()));
        }
        answer.notes.extend(left_out);
        Ok(answer)
    }

    async fn look(&self) -> Result<Kept, (Refusal, Duration)> {
        let began = Instant::now();
        let (client, unit, runtime) = (self.client.clone(), self.unit, Handle::current());
        let looked = tokio::task::spawn_blocking(move || {
            runtime.block_on(async { tokio::time::timeout(LONGEST, look::look(&client, unit, |_| {})).await })
        });
        let looked = looked.await;
        let took = began.elapsed();
        let seen = match looked {
            Ok(Ok(Ok(seen))) => seen,
            Ok(Ok(Err(error))) => return Err((Refusal::unavailable(error.to_string()), took)),
            Err(failed) => {
                return Err((
                    Refusal::unavailable(format!("the cluster could not be looked at: {failed}")),
                    took,
                ));
            }
            Ok(Err(_elapsed)) => {
                let text = format!("the cluster could not be listed within {LONGEST:?}; ask again in some seconds");
                return Err((Refusal::unavailable(text), took));
            }
        };
        let count =
            |left: &divvy_cluster::list::LeftOut| u64::try_from(left.named.len()).unwrap_or(u64::MAX).saturating_add(left.more);
        let (nodes, pods) = (count(&seen.no_nodes), count(&seen.no_pods));
        let left_out = (nodes + pods > 0).then(|| {
            format!(
                "{nodes} nodes and {pods} pods could not be read and are left out; an administrator's `divvy why` names them."
            )
        });
        tracing::debug!(
            ?took,
            nodes = seen.snapshot.sites().len(),
            "looked at the cluster for users who asked why"
        );
        Ok(Kept {
            snapshot: Arc::new(seen.snapshot),
            at: began,
            until: Instant::now() + SHORTEST.max(took * REST),
            left_out,
        })
    }

    /// Frees the memory when the look is of no more use.
    fn forget_later(&self, until: Instant) {
        let kept = self.kept.clone();
        tokio::spawn(async move {
            tokio::time::sleep_until(until).await;
            let mut kept = kept.lock().await;
            if kept.as_ref().is_some_and(|kept| kept.until <= Instant::now()) {
                forget(&mut kept).await;
            }
        });
    }
}

async fn forget(kept: &mut Option<Kept>) {
    let old = kept.take();
    if let Err(failed) = tokio::task::spawn_blocking(move || drop(old)).await {
        tracing::error!(%failed, "a look at the cluster was not freed");
    }
}

/// The next one waits as long as this one took.
fn rest(turn: OwnedMutexGuard<Option<Kept>>, took: Duration) {
    tokio::spawn(async move {
        tokio::time::sleep(took).await;
        drop(turn);
    });
}
