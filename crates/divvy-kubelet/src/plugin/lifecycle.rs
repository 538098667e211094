//! Keeps a plugin registered: waits for the kubelet, serves, registers, watches, and starts over when a session ends.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tracing::{debug, info, warn};

use super::backoff::Backoff;
use super::directory::{FileIdentity, PluginDirectory};
use super::lock::Lock;
use super::service::Streams;
use super::session::{Session, is_free};
use super::socket::SocketNames;
use super::{Plugin, PluginSettings, PluginStatus};
use crate::Result;
use crate::api::v1beta1::RegisterRequest;
use crate::api::v1beta1::registration_client::RegistrationClient;
use crate::api::{VERSION, connect};

/// How long pending calls may delay a *new* registration. A kubelet that restarted has dropped its calls anyway.
const GRACE_BETWEEN: Duration = Duration::from_millis(300);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves one [`Plugin`] and keeps it registered with the kubelet.
#[derive(Debug)]
pub struct PluginServer<P> {
    plugin: Arc<P>,
    settings: PluginSettings,
    stop: CancellationToken,
    status: watch::Sender<PluginStatus>,
    directory: PluginDirectory,
    names: SocketNames,
    lock: Option<Lock>,
    backoff: Backoff,
    /// The time of the next attempt. A new kubelet socket triggers an attempt immediately.
    next_attempt: Instant,
    last_tried: Option<FileIdentity>,
    last_complaint: Option<String>,
}

impl<P: Plugin> PluginServer<P> {
    /// Run until `stop` is cancelled. Then end all streams immediately, let pending calls continue for [`PluginTiming::grace`], remove the socket,
    /// and return. The caller must be within a Tokio runtime. At most one `ListAndWatch` stream is open at any time, even across processes: a
    /// lock file `<prefix>.lock` in the directory makes a second process wait for the first.
    ///
    /// `status` always holds the current [`PluginStatus`].
    ///
    /// # Errors
    /// Fails only because of settings that can never work ([`Error::PathTooLong`], [`Error::SocketPrefix`]). Every other failure
    /// is logged, appears in the status, and is retried indefinitely.
    ///
    /// [`PluginTiming::grace`]: super::PluginTiming::grace
    /// [`Error::PathTooLong`]: crate::Error::PathTooLong
    /// [`Error::SocketPrefix`]: crate::Error::SocketPrefix
    pub async fn run(
        plugin: Arc<P>,
        settings: PluginSettings,
        stop: CancellationToken,
        status: watch::Sender<PluginStatus>,
    ) -> Result<()> {
        let names = SocketNames::new(&settings)?;
        let timing = settings.timing;
        let server = Self {
            directory: PluginDirectory::new(&settings.device_plugin_dir, settings.kubelet_path(), timing.look_every),
            names,
            lock: None,
            backoff: Backoff::new(timing.retry_first, timing.retry_max),
            next_attempt: Instant::now(),
            last_tried: None,
            last_complaint: None,
            plugin,
            settings,
            stop,
            status,
        };
        if server.settings.registers {
            server.keep_registered().await
        } else {
            server.keep_serving().await
        }
        Ok(())
    }

    /// Serve the socket, without a kubelet.
    async fn keep_serving(mut self) {
        while !self.stop.is_cancelled() {
            match self.serve().await {
                Ok(()) => self.backoff.reset(),
                Err(obstacle) => self.complain(obstacle.to_string()),
            }
            let wait = self.backoff.take();
            tokio::select! {
                () = self.stop.cancelled() => {}
                () = sleep(wait) => {}
            }
        }
    }

    /// Serve until the server must stop, or the socket is gone.
    async fn serve(&mut self) -> Result<(), ServeObstacle> {
        self.take_lock()?;
        let mut session = self.listen()?;
        info!(
            "{} is served as {}, and not registered",
            self.plugin.resource_name(),
            session.endpoint()
        );
        self.last_complaint = None;
        while session.is_serving() && session.is_in_place() && !self.stop.is_cancelled() {
            tokio::select! {
                () = self.stop.cancelled() => {}
                () = session.changed() => self.set_status(|status| status.open_streams = session.streams().open),
                () = self.directory.changed() => {}
            }
        }
        session.close(self.settings.timing.grace).await;
        self.set_status(|status| status.open_streams = 0);
        Ok(())
    }

    async fn keep_registered(mut self) {
        while let Some(kubelet) = self.wait_for_turn().await {
            match self.attempt(kubelet).await {
                Ok(EndOfSession {
                    why: SessionFailure::Stopped,
                    ..
                }) => break,
                Ok(ended) => {
                    if ended.was_settled {
                        self.backoff.reset();
                    }
                    self.complain(ended.why.to_text());
                }
                Err(obstacle) => self.complain(obstacle.to_string()),
            }
            // Wait even if the last stream was good. The kubelet may not have noticed the end of the stream yet. When it does, it
            // disconnects whichever plugin is registered at that time.
            self.next_attempt = Instant::now() + self.backoff.take();
        }
    }

    /// Wait until `kubelet.sock` exists and it is time for an attempt: the socket is a new one, or the wait is over. Return
    /// `None` when the server must stop.
    async fn wait_for_turn(&mut self) -> Option<FileIdentity> {
        loop {
            if self.stop.is_cancelled() {
                return None;
            }
            let there = self.directory.kubelet();
            match there {
                None => self.complain(self.missing_text()),
                Some(kubelet) if self.last_tried != there => {
                    self.backoff.reset();
                    self.last_tried = there;
                    return Some(kubelet);
                }
                Some(kubelet) if Instant::now() >= self.next_attempt => return Some(kubelet),
                Some(_) => {}
            }
            tokio::select! {
                () = self.stop.cancelled() => return None,
                () = self.directory.changed() => {}
                () = sleep_until(self.next_attempt), if there.is_some() => {}
            }
        }
    }

    fn missing_text(&self) -> String {
        let (directory, socket) = (self.directory.path(), self.directory.kubelet_path());
        match socket.metadata() {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                format!(
                    "cannot access the kubelet's socket {}: {error}; trying again",
                    socket.display()
                )
            }
            _ if directory.is_dir() => format!(
                "the kubelet's socket {} does not exist: the kubelet is not running or uses another directory; waiting for it",
                socket.display()
            ),
            _ => format!(
                "the kubelet's directory {} does not exist: check that it is mounted, and that a kubelet has run here; waiting for it",
                directory.display()
            ),
        }
    }

    /// Make one attempt, from taking the lock to the end of the last stream. The result is an error if the attempt fails before
    /// anything was served.
    async fn attempt(&mut self, kubelet: FileIdentity) -> Result<EndOfSession, ServeObstacle> {
        self.take_lock()?;
        let kubelet_path = self.directory.kubelet_path().to_owned();
        let connected = tokio::select! {
            () = self.stop.cancelled() => return Ok(EndOfSession::stopped()),
            connected = connect(&kubelet_path, CONNECT_TIMEOUT) => connected,
        };
        let channel = connected.map_err(|error| ServeObstacle::NotListening {
            path: kubelet_path,
            error,
        })?;
        let mut session = self.listen()?;
        let ended = self.hold(&mut session, channel, kubelet).await;
        let grace = if matches!(ended.why, SessionFailure::Stopped) {
            self.settings.timing.grace
        } else {
            GRACE_BETWEEN
        };
        self.set_status(|status| status.registered = false);
        session.close(grace.min(self.settings.timing.grace)).await;
        self.set_status(|status| status.open_streams = 0);
        Ok(ended)
    }

    fn listen(&mut self) -> Result<Session, ServeObstacle> {
        let socket = self.new_socket();
        Session::listen(Arc::clone(&self.plugin), socket.clone()).map_err(|error| ServeObstacle::Listen { socket, error })
    }

    fn take_lock(&mut self) -> Result<(), ServeObstacle> {
        if self.lock.as_ref().is_some_and(Lock::is_in_place) {
            return Ok(());
        }
        self.lock = None;
        let path = self.directory.path().join(format!("{}.lock", self.settings.socket_prefix));
        match Lock::try_acquire(&path) {
            Ok(Some(lock)) => self.lock = Some(lock),
            Ok(None) => {
                // Do not increase the wait: the other process also runs this code, and it drains within two seconds.
                self.backoff.reset();
                let resource = self.plugin.resource_name().to_owned();
                return Err(ServeObstacle::Locked { resource, path });
            }
            Err(error) => return Err(ServeObstacle::Lock { path, error }),
        }
        match self.names.remove_stale(self.directory.path()) {
            Ok(removed) => removed
                .iter()
                .for_each(|path| info!("removed the stale socket {}", path.display())),
            Err(error) => warn!(%error, "cannot check for stale sockets in {}", self.directory.path().display()),
        }
        Ok(())
    }

    fn new_socket(&mut self) -> PathBuf {
        loop {
            let now = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_millis());
            let path = self.directory.path().join(self.names.next(u64::try_from(now).unwrap_or(0)));
            if self.settings.is_socket_fixed {
                // The lock says that no other process serves here. If the file cannot be removed, listening fails and says so.
                let _ = std::fs::remove_file(&path);
                return path;
            }
            if is_free(&path) {
                return path;
            }
        }
    }

    /// Register, and return when this session has become useless.
    async fn hold(&mut self, session: &mut Session, channel: Channel, kubelet: FileIdentity) -> EndOfSession {
        let started = Instant::now();
        let timing = self.settings.timing;
        let request = RegisterRequest {
            version: VERSION.to_owned(),
            endpoint: session.endpoint(),
            resource_name: self.plugin.resource_name().to_owned(),
            options: Some(self.plugin.options().into()),
        };
        let mut client = RegistrationClient::new(channel);
        let register = timeout(timing.register_timeout, client.register(request));
        tokio::pin!(register);
        let mut registered_at: Option<Instant> = None;
        let mut stream_since: Option<Instant> = None;
        let why = loop {
            let streams = session.streams();
            if streams.opened > 0 && stream_since.is_none() {
                stream_since = Some(Instant::now());
            }
            self.set_status(|status| {
                status.open_streams = streams.open;
                if streams.open > 0 {
                    status.last_error = None;
                }
            });
            let facts = SessionFacts {
                kubelet_then: kubelet,
                kubelet_now: self.directory.kubelet(),
                serving: session.is_serving() && session.is_in_place(),
                streams,
                registered_for: registered_at.map(|at| at.elapsed()),
            };
            if let Some(why) = verdict(&facts, timing.first_stream) {
                break why;
            }
            let first_stream_by = registered_at
                .filter(|_| streams.opened == 0)
                .map(|at| at + timing.first_stream);
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break SessionFailure::Stopped,
                answer = &mut register, if registered_at.is_none() => match answer {
                    Ok(Ok(_)) => {
                        registered_at = Some(Instant::now());
                        self.registered(session, started.elapsed());
                    }
                    Ok(Err(status)) => break SessionFailure::Refused(status.message().to_owned()),
                    Err(_) => break SessionFailure::NoAnswer(timing.register_timeout),
                },
                () = session.changed(), if session.is_serving() => {}
                () = self.directory.changed() => {}
                () = sleep_until(first_stream_by.unwrap_or(started)), if first_stream_by.is_some() => {}
            }
        };
        let was_settled = stream_since.is_some_and(|since| since.elapsed() >= timing.settled);
        EndOfSession { why, was_settled }
    }

    fn registered(&mut self, session: &Session, took: Duration) {
        info!(
            "registered {} with the kubelet as {} ({} ms)",
            self.plugin.resource_name(),
            session.endpoint(),
            took.as_millis()
        );
        self.last_complaint = None;
        self.set_status(|status| {
            status.registered = true;
            status.registrations += 1;
        });
    }

    /// Report an obstacle. If the same obstacle occurs repeatedly, it is logged as a warning only once.
    fn complain(&mut self, text: String) {
        if self.last_complaint.as_ref() == Some(&text) {
            debug!("{}: {text}", self.plugin.resource_name());
            return;
        }
        warn!("{}: {text}", self.plugin.resource_name());
        self.set_status(|status| status.last_error = Some(text.clone()));
        self.last_complaint = Some(text);
    }

    fn set_status(&self, change: impl FnOnce(&mut PluginStatus)) {
        self.status.send_if_modified(|status| {
            let before = status.clone();
            change(status);
            if status.registered != before.registered {
                status.since = std::time::Instant::now();
            }
            *status != before
        });
    }
}

/// Why nothing is served. The server tries again.
// No `source`: the texts already contain the causes, and an error chain would print them twice.
#[derive(Debug, thiserror::Error)]
enum ServeObstacle {
    #[error("the kubelet does not listen on {}: {}; trying again", path.display(), innermost(error))]
    NotListening { path: PathBuf, error: tonic::transport::Error },
    #[error("cannot listen on {}: {error}; trying again", socket.display())]
    Listen { socket: PathBuf, error: io::Error },
    #[error("another process still serves {resource} here (it holds {}); waiting for that process to end", path.display())]
    Locked { resource: String, path: PathBuf },
    #[error("cannot lock {}: {error}; trying again", path.display())]
    Lock { path: PathBuf, error: io::Error },
}

/// The end of a session.
#[derive(Debug)]
struct EndOfSession {
    why: SessionFailure,
    /// Whether the kubelet's stream was open for at least `PluginTiming::settled`. If so, the wait before the next attempt is reset.
    was_settled: bool,
}

impl EndOfSession {
    fn stopped() -> Self {
        Self {
            why: SessionFailure::Stopped,
            was_settled: false,
        }
    }
}

/// Why a session has become useless.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SessionFailure {
    Stopped,
    KubeletReplaced,
    SocketLost,
    StreamEnded,
    NeverListened(Duration),
    Refused(String),
    NoAnswer(Duration),
}

impl SessionFailure {
    fn to_text(&self) -> String {
        match self {
            Self::Stopped => "stopped".to_owned(),
            Self::KubeletReplaced => "the kubelet has recreated its socket; registering again".to_owned(),
            Self::SocketLost => {
                "the plugin's socket was removed, as a kubelet does when it starts; listening and registering again".to_owned()
            }
            Self::StreamEnded => "the kubelet no longer watches the plugin's devices; registering again".to_owned(),
            Self::NeverListened(after) => {
                format!(
                    "the kubelet accepted the registration but did not request the devices within {after:?}; registering again"
                )
            }
            Self::Refused(text) => format!("the kubelet refused the registration: {text}; trying again"),
            Self::NoAnswer(after) => format!("the kubelet did not answer the registration within {after:?}; trying again"),
        }
    }
}

/// The state of a session at one moment.
#[derive(Debug, Clone, Copy)]
struct SessionFacts {
    /// The identity of the `kubelet.sock` with which the session began.
    kubelet_then: FileIdentity,
    kubelet_now: Option<FileIdentity>,
    /// Whether the plugin's server is running, with its socket in the directory.
    serving: bool,
    streams: Streams,
    /// The time since the kubelet accepted the registration.
    registered_for: Option<Duration>,
}

/// Return why the session has become useless, or `None` if it has not. A missing `kubelet.sock` is not a reason: as long as the
/// stream is open, the kubelet is running, and the end of the stream will be noticed.
fn verdict(facts: &SessionFacts, first_stream: Duration) -> Option<SessionFailure> {
    if facts.kubelet_now.is_some_and(|now| now != facts.kubelet_then) {
        return Some(SessionFailure::KubeletReplaced);
    }
    if !facts.serving {
        return Some(SessionFailure::SocketLost);
    }
    if facts.streams.opened > 0 {
        return (facts.streams.open == 0).then_some(SessionFailure::StreamEnded);
    }
    facts
        .registered_for
        .filter(|since| *since >= first_stream)
        .map(|_| SessionFailure::NeverListened(first_stream))
}

/// Return the text of the last error in the chain, which is the one that users understand ("Connection refused", not "transport
/// error").
fn innermost(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
