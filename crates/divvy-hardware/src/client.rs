//! The agent's side of the probe: connect to a running probe, or start a probe and restart it when needed, and turn its answers into
//! [`Update`]s.
//!
//! All input is untrusted: lines have a maximum length, and values are checked. Invalid input ends the connection with
//! [`Update::Unavailable`], after which the client tries again.

mod child;
mod connection;
mod once;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use divvy_cdi::driver_spec::Basis;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use self::child::ProbeChild;
use self::connection::ProbeConnection;
use crate::protocol::{
    DriverFiles, DriverQuestion, DriverSpec, FaultEvent, FromProbe, Hello, Kill, LimitAnswer, LimitRequest, ProbeOp, RawAnswer,
    ShareName, bounded,
};
use crate::{Failure, FailureCode, GpuGauges, GpuProcesses, GpuSamples, SamplesSince, Snapshot};

pub use self::once::{cuda_snapshot, snapshot};

/// Which probe to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeSource {
    /// A probe that runs independently and listens on this socket.
    Socket(PathBuf),
    /// A child process that the client starts, and restarts when it ends or hangs.
    Spawn(Spawn),
}

/// How to start a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spawn {
    /// The path of the program `divvy-probe`.
    pub program: PathBuf,
    /// The argument of `--nvml-library`.
    pub nvml_library: Option<PathBuf>,
    /// The argument of `--driver-root`.
    pub driver_root: Option<PathBuf>,
    /// The argument of `--sys-root`.
    pub sys_root: Option<PathBuf>,
    /// The argument of `--share-files`.
    pub share_files: Option<PathBuf>,
    /// The argument of `--watchdog`.
    pub watchdog: Option<Duration>,
    /// Environment variables in addition to this process's own.
    pub env: Vec<(String, OsString)>,
    /// A private directory for the socket (`probe.sock`). It is created with mode 0700 if it does not exist. [`snapshot`] does not use it.
    pub dir: PathBuf,
    /// The file for what the probe writes to its standard error. By default, it shares this process's. [`snapshot`] does not use it.
    pub log: Option<PathBuf>,
}

/// Intervals and timeouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeTiming {
    /// The time between two snapshots.
    pub poll: Duration,
    /// The timeout of an answer once this probe has delivered a snapshot. By default the probe's own watchdog acts earlier and knows which
    /// call hangs.
    pub answer: Duration,
    /// The timeout of the first answer. It is longer, because the initialization of a driver starts each GPU.
    pub first_answer: Duration,
    /// The time before the second attempt to connect or to start a probe. It doubles with each attempt up to `longest_backoff`.
    pub backoff: Duration,
    /// The upper bound of the time between attempts.
    pub longest_backoff: Duration,
}

impl Default for ProbeTiming {
    fn default() -> ProbeTiming {
        ProbeTiming {
            poll: Duration::from_secs(5),
            answer: Duration::from_secs(15),
            first_answer: Duration::from_secs(75),
            backoff: Duration::from_millis(100),
            longest_backoff: Duration::from_secs(5),
        }
    }
}

/// News from the probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Update {
    /// All GPUs, read just now.
    Snapshot(Snapshot),
    /// An error of a GPU, or of every GPU of a vendor. A snapshot follows. A fault that occurs while the client connects may be delivered
    /// twice.
    Fault(FaultEvent),
    /// The state of the GPUs is currently unknown for this reason. The client sends this update for every failed attempt.
    Unavailable(Failure),
}

/// A client that connects for the first time ignores faults older than this.
const RECENT: Duration = Duration::from_secs(60);
/// The minimum time between two snapshots while many faults arrive.
const AFTER_FAULT: Duration = Duration::from_millis(200);
/// The number of updates that wait for the reader. A slow reader delays the connection instead of using more memory.
const QUEUE: usize = 64;

/// A running connection to a probe. Dropping it kills the child process and removes its socket.
#[derive(Debug)]
pub struct ProbeClient {
    updates: mpsc::Receiver<Update>,
    handle: ProbeHandle,
    task: JoinHandle<()>,
}

/// Sends requests to a running probe; cheap to clone.
#[derive(Debug, Clone)]
pub struct ProbeHandle {
    asks: mpsc::Sender<ProbeAsk>,
}

/// An operation, and where to send its answer.
#[derive(Debug)]
struct ProbeAsk(ProbeOp, AnswerSender);

type AnswerSender = oneshot::Sender<Result<RawAnswer, Failure>>;

impl ProbeClient {
    /// Start the client in the background. The caller must be within a tokio runtime.
    pub fn start(probe: ProbeSource, timing: ProbeTiming) -> ProbeClient {
        let (sender, updates) = mpsc::channel(QUEUE);
        let (asks, asked) = mpsc::channel(8);
        let task = tokio::spawn(run(probe, timing, sender, asked));
        ProbeClient {
            updates,
            handle: ProbeHandle { asks },
            task,
        }
    }

    /// Return the next update. `None` only occurs if the runtime ends. Cancel-safe.
    pub async fn next(&mut self) -> Option<Update> {
        self.updates.recv().await
    }

    /// Return a handle for requests in addition to the regular ones.
    pub fn handle(&self) -> ProbeHandle {
        self.handle.clone()
    }
}

impl Drop for ProbeClient {
    fn drop(&mut self) {
        // The task owns the child, which is killed when it is dropped.
        self.task.abort();
    }
}

impl ProbeHandle {
    /// Read the processes on all GPUs now.
    pub async fn processes(&self) -> Result<Vec<GpuProcesses>, Failure> {
        let all: Vec<GpuProcesses> = self.ask(ProbeOp::Processes).await?.read()?;
        GpuProcesses::validate(&all).map_err(protocol)?;
        Ok(all)
    }

    /// Read how busy processes keep these GPUs. The answer has only GPUs that were asked for. An older probe refuses this with
    /// [`FailureCode::Protocol`].
    pub async fn utilization(&self, gpus: Vec<SamplesSince>) -> Result<Vec<GpuSamples>, Failure> {
        let asked: BTreeSet<String> = gpus.iter().map(|of| of.uuid.clone()).collect();
        let mut all: Vec<GpuSamples> = self.ask(ProbeOp::Utilization { gpus }).await?.read()?;
        GpuSamples::validate(&all).map_err(protocol)?;
        all.retain(|of| asked.contains(&of.uuid));
        for of in &mut all {
            of.error = of.error.take().map(bounded);
        }
        Ok(all)
    }

    /// Read what the drivers measure and count of all GPUs now. An older probe refuses this with [`FailureCode::Protocol`].
    pub async fn metrics(&self) -> Result<Vec<GpuGauges>, Failure> {
        let all: Vec<GpuGauges> = self.ask(ProbeOp::Metrics).await?.read()?;
        GpuGauges::validate(&all).map_err(protocol)?;
        Ok(all)
    }

    /// End a process of a pod. Succeeds if the process has ended already. An older probe refuses this with [`FailureCode::Protocol`].
    pub async fn kill(&self, kill: Kill) -> Result<(), Failure> {
        self.ask(ProbeOp::Kill(kill)).await.map(drop)
    }

    /// Check the driver's files on the machine. An older probe refuses this with [`FailureCode::Protocol`].
    pub async fn driver(&self, question: DriverQuestion) -> Result<DriverFiles, Failure> {
        self.ask(ProbeOp::Driver(question)).await?.read()
    }

    /// Make the CDI spec of the driver from the basis that [`ProbeHandle::driver`] found. Fails with [`FailureCode::DriverFiles`] if no
    /// spec can be made.
    pub async fn driver_spec(&self, basis: Basis) -> Result<DriverSpec, Failure> {
        let made: DriverSpec = self.ask(ProbeOp::DriverSpec { basis: Box::new(basis) }).await?.read()?;
        if made.spec.is_valid() {
            Ok(made)
        } else {
            Err(Failure::new(
                FailureCode::Protocol,
                "the probe's CDI spec of the driver is not valid",
            ))
        }
    }

    /// Limit how much memory of a GPU the processes of a pod or of a container can allocate. An older probe refuses this with [`FailureCode::Protocol`].
    pub async fn limit(&self, limit: LimitRequest) -> Result<LimitAnswer, Failure> {
        self.ask(ProbeOp::Limit(limit)).await?.read()
    }

    /// Mount a file system of their own for the files of a share. Succeeds if there is one already. [`FailureCode::NotSupported`] says that the files lie on the
    /// disk; an older probe refuses this with [`FailureCode::Protocol`].
    pub async fn mount_share(&self, share: ShareName) -> Result<(), Failure> {
        self.ask(ProbeOp::MountShare(share)).await.map(drop)
    }

    /// Unmount the file system of a share. Succeeds if there is none. The same errors as for [`ProbeHandle::mount_share`].
    pub async fn unmount_share(&self, share: ShareName) -> Result<(), Failure> {
        self.ask(ProbeOp::UnmountShare(share)).await.map(drop)
    }

    async fn ask(&self, op: ProbeOp) -> Result<RawAnswer, Failure> {
        let gone = |_| Failure::new(FailureCode::ProbeUnreachable, "the probe is not connected");
        let (sender, receiver) = oneshot::channel();
        self.asks.try_send(ProbeAsk(op, sender)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Failure::new(FailureCode::Busy, "too many requests are waiting for the probe"),
            mpsc::error::TrySendError::Closed(_) => Failure::new(FailureCode::ProbeUnreachable, "the probe's client has ended"),
        })?;
        receiver.await.map_err(gone)?
    }
}

/// The state that outlives one connection.
struct ClientState {
    timing: ProbeTiming,
    updates: mpsc::Sender<Update>,
    asked: mpsc::Receiver<ProbeAsk>,
    /// The run of the probe, and the sequence number of the last fault that was passed on.
    last_fault: Option<(String, u64)>,
}

/// The reader of the updates is gone, so the client ends.
struct Gone;

async fn run(probe: ProbeSource, timing: ProbeTiming, updates: mpsc::Sender<Update>, asked: mpsc::Receiver<ProbeAsk>) {
    let mut client = ClientState {
        timing,
        updates,
        asked,
        last_fault: None,
    };
    let mut backoff = timing.backoff;
    loop {
        let session = client.session(&probe).await;
        let EndedSession { failure, useful } = session;
        let Some(failure) = failure else { return };
        tracing::warn!(code = %failure.code, "{}", failure.text);
        if client.updates.send(Update::Unavailable(failure)).await.is_err() {
            return;
        }
        // Restart a probe that worked immediately. Delay the restart of a probe that never works.
        backoff = if useful {
            timing.backoff
        } else {
            (backoff * 2).min(timing.longest_backoff)
        };
        if client.refuse_until(Instant::now() + backoff).await.is_err() {
            return;
        }
    }
}

/// How a session ended. `failure` is `None` if the reader is gone; `useful` says that at least one snapshot arrived.
struct EndedSession {
    failure: Option<Failure>,
    useful: bool,
}

/// A request without an answer so far.
struct Pending {
    kind: ExchangeKind,
    since: Instant,
}

enum ExchangeKind {
    Hello,
    Snapshot,
    Asked(AnswerSender),
}

impl ClientState {
    /// Refuse requests while there is no connection.
    async fn refuse_until(&mut self, until: Instant) -> Result<(), Gone> {
        loop {
            tokio::select! {
                () = sleep_until(until) => return Ok(()),
                () = self.updates.closed() => return Err(Gone),
                ask = self.asked.recv() => match ask {
                    Some(ProbeAsk(_, sender)) => {
                        let failure = Failure::new(FailureCode::ProbeUnreachable, "the probe is not connected");
                        // The caller may have stopped waiting.
                        let _ = sender.send(Err(failure));
                    }
                    // All handles are gone, but updates continue.
                    None => sleep(until.saturating_duration_since(Instant::now())).await,
                },
            }
        }
    }

    /// Connect, starting a probe if necessary, and communicate until something fails.
    async fn session(&mut self, probe: &ProbeSource) -> EndedSession {
        let mut child = match probe {
            ProbeSource::Socket(_) => None,
            ProbeSource::Spawn(spawn) => match ProbeChild::start(spawn).await {
                Ok(child) => Some(child),
                Err(error) => {
                    let failure = Failure::new(FailureCode::ProbeUnreachable, error.to_string());
                    return EndedSession {
                        failure: Some(failure),
                        useful: false,
                    };
                }
            },
        };
        let socket = match (probe, &child) {
            (ProbeSource::Socket(path), _) => path.clone(),
            (ProbeSource::Spawn(_), Some(child)) => child.socket().to_owned(),
            (ProbeSource::Spawn(spawn), None) => spawn.dir.clone(),
        };
        let mut useful = false;
        let talk = async {
            // A child process needs a moment before it listens.
            let patience = if child_is_starting(probe) {
                self.timing.answer
            } else {
                Duration::ZERO
            };
            let connection = ProbeConnection::open(&socket, patience).await?;
            self.talk(connection, &mut useful).await
        };
        let failure = match &mut child {
            None => talk.await.err(),
            Some(child) => {
                // Take the first event. If the child ended, that explains a broken connection better than the connection's own error.
                let failure = tokio::select! {
                    biased;
                    failure = child.ended() => Some(failure),
                    result = talk => result.err(),
                };
                match failure {
                    Some(failure) if failure.code == FailureCode::ProbeUnreachable => Some(child.explain(failure).await),
                    other => other,
                }
            }
        };
        if let Some(child) = child {
            child.kill().await;
        }
        EndedSession { failure, useful }
    }

    /// Send requests and pass on the answers. Return `Ok` if the reader is gone.
    async fn talk(&mut self, mut connection: ProbeConnection, useful: &mut bool) -> Result<(), Failure> {
        let mut pending: BTreeMap<u64, Pending> = BTreeMap::new();
        let mut last_id = 0;
        let mut next_poll = Instant::now();
        let mut last_poll = None;
        let mut patient_until = Some(Instant::now() + self.timing.answer);
        let limit = self.timing.answer;
        ask(
            &mut connection,
            &mut pending,
            &mut last_id,
            ProbeOp::Hello,
            ExchangeKind::Hello,
            limit,
        )
        .await?;
        loop {
            let snapshot_asked = pending.values().any(|pending| matches!(pending.kind, ExchangeKind::Snapshot));
            let limit = if *useful {
                self.timing.answer
            } else {
                self.timing.first_answer.max(self.timing.answer)
            };
            let deadline = pending.values().map(|pending| pending.since + limit).min();
            tokio::select! {
                () = self.updates.closed() => return Ok(()),
                () = until(deadline) => {
                    let text = format!("the probe has not answered for {:.1} s; the driver may hang", limit.as_secs_f64());
                    return Err(Failure::new(FailureCode::Timeout, text));
                }
                // Tell the reader early that a driver takes a long time to initialize.
                () = until(patient_until.filter(|_| !*useful)) => {
                    patient_until = None;
                    let text = "the driver has not answered yet; it is still being initialized, or it hangs";
                    let update = Update::Unavailable(Failure::new(FailureCode::Timeout, text));
                    if self.deliver(update, &mut pending).await.is_err() {
                        return Ok(());
                    }
                }
                line = connection.next_line() => {
                    match crate::protocol::parse_from_probe(&line?).map_err(protocol)? {
                        FromProbe::OtherEvent => {}
                        FromProbe::Fault(event) => {
                            if self.pass_on(event, &mut pending).await.is_err() {
                                return Ok(());
                            }
                            next_poll = soon(last_poll);
                        }
                        // Every request has an id. Without one, the probe refuses the whole connection.
                        FromProbe::Answer { id: None, result: Err(failure) } => return Err(failure),
                        FromProbe::Answer { id: None, .. } => {}
                        FromProbe::Answer { id: Some(id), result } => match pending.remove(&id).map(|pending| pending.kind) {
                            // Ignore an answer without a request.
                            None => {}
                            Some(ExchangeKind::Hello) => {
                                let hello: Hello = result?.read()?;
                                for past in &hello.recent {
                                    past.event.fault.validate().map_err(protocol)?;
                                }
                                if self.catch_up(hello, &mut pending).await.is_err() {
                                    return Ok(());
                                }
                            }
                            Some(ExchangeKind::Snapshot) => {
                                let update = match result {
                                    Ok(answer) => {
                                        let snapshot: Snapshot = answer.read()?;
                                        snapshot.validate().map_err(protocol)?;
                                        *useful = true;
                                        Update::Snapshot(snapshot)
                                    }
                                    // The probe works but the driver does not. The next request may succeed.
                                    Err(failure) => {
                                        patient_until = None;
                                        Update::Unavailable(failure)
                                    }
                                };
                                if self.deliver(update, &mut pending).await.is_err() {
                                    return Ok(());
                                }
                            }
                            Some(ExchangeKind::Asked(sender)) => {
                                // The caller may have stopped waiting.
                                let _ = sender.send(result);
                            }
                        },
                    }
                }
                () = sleep_until(next_poll), if !snapshot_asked => {
                    ask(&mut connection, &mut pending, &mut last_id, ProbeOp::Snapshot, ExchangeKind::Snapshot, limit).await?;
                    last_poll = Some(Instant::now());
                    next_poll = Instant::now() + self.timing.poll;
                }
                Some(ProbeAsk(op, sender)) = self.asked.recv() => {
                    ask(&mut connection, &mut pending, &mut last_id, op, ExchangeKind::Asked(sender), limit).await?;
                }
            }
        }
    }

    /// Pass on the faults that occurred while there was no connection.
    async fn catch_up(&mut self, hello: Hello, pending: &mut BTreeMap<u64, Pending>) -> Result<(), Gone> {
        let before = match &self.last_fault {
            Some((instance, seq)) if *instance == hello.instance => Some(*seq),
            _ => None,
        };
        self.last_fault = Some((hello.instance, before.unwrap_or(0)));
        for past in hello.recent {
            if before.is_some() || u128::from(past.ago_ms) <= RECENT.as_millis() {
                self.pass_on(past.event, pending).await?;
            }
        }
        Ok(())
    }

    async fn pass_on(&mut self, event: FaultEvent, pending: &mut BTreeMap<u64, Pending>) -> Result<(), Gone> {
        if let Some((_, last)) = &mut self.last_fault {
            // The same fault may arrive in `hello` and as an event.
            if event.seq <= *last {
                return Ok(());
            }
            *last = event.seq;
        }
        self.deliver(Update::Fault(event), pending).await
    }

    /// Deliver an update to the reader. While the reader is slow, the client reads no answers; this delay does not count as
    /// waiting for the probe.
    async fn deliver(&mut self, update: Update, pending: &mut BTreeMap<u64, Pending>) -> Result<(), Gone> {
        let before = Instant::now();
        self.updates.send(update).await.map_err(|_| Gone)?;
        let lag = before.elapsed();
        for question in pending.values_mut() {
            question.since += lag;
        }
        Ok(())
    }
}

fn child_is_starting(probe: &ProbeSource) -> bool {
    matches!(probe, ProbeSource::Spawn(_))
}

fn protocol(error: crate::Error) -> Failure {
    Failure::new(FailureCode::Protocol, error.to_string())
}

/// Return when the next snapshot may be taken: now, or [`AFTER_FAULT`] after the last one if that is later.
fn soon(last: Option<Instant>) -> Instant {
    let now = Instant::now();
    last.map_or(now, |last| now.max(last + AFTER_FAULT))
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn ask(
    connection: &mut ProbeConnection,
    pending: &mut BTreeMap<u64, Pending>,
    last_id: &mut u64,
    op: ProbeOp,
    kind: ExchangeKind,
    limit: Duration,
) -> Result<(), Failure> {
    *last_id += 1;
    connection.ask(*last_id, op, limit).await?;
    let since = Instant::now();
    pending.insert(*last_id, Pending { kind, since });
    Ok(())
}
