//! `config-manager`: switches this node's configuration to the file that a node label names.
//!
//! ```text
//! watch of this node ─► label ─┐
//! source directory ────────────┴─► divvy_nvidia_config::select ─► symbolic link ─► signal to the processes that read it
//! ```

mod files;
mod processes;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_kube::client::{ClusterChoice, connect};
use divvy_kube::objects::NodeObject;
use divvy_kube::watch::{self, WatchChange};
use divvy_nvidia_config::{Available, Chosen, ConfigManager, Error as Problem, Selection, select};
use futures::StreamExt as _;
use rustix::process::{Pid, Signal};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::files::{Destination, SwitchError};
use crate::notice::Notice;
use crate::{Error, config_files};

/// The interval at which the files are checked and an unsent signal is tried again.
const LOOK: Duration = Duration::from_secs(2);

/// Keep the configuration of this node as its label says, until `stop` is cancelled; with `oneshot`, only once. An API server that does not
/// answer is asked again indefinitely, and every failure is logged.
///
/// # Errors
/// Fails if a setting is wrong, and with `oneshot` also if the node gets no configuration.
pub async fn manage_config(options: ConfigManager, stop: CancellationToken) -> Result<(), Error> {
    let choice = ClusterChoice {
        kubeconfig: options.kubeconfig.clone().map(PathBuf::from),
        ..ClusterChoice::default()
    };
    let (node, key, oneshot) = (options.node.clone(), options.label.clone(), options.oneshot);
    let mut manager = Manager::new(options)?;
    let client = connect(&choice).await?.client;
    let mut notice = Notice::new(client.clone(), "config-manager", &node);
    let changes = watch::nodes(client, Some(&format!("metadata.name={node}")));
    tokio::pin!(changes);
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The label's value, as soon as it is known.
    let mut label: Option<Option<String>> = None;
    info!("Waiting for change to '{key}' label");
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            change = changes.next() => {
                let change = change.ok_or_else(|| Error::Ended { part: "the watch of the node", text: "its stream ended".to_owned() })?;
                let Some(value) = value(change, &node, &key) else { continue };
                if label.as_ref() != Some(&value) {
                    let shown = divvy_host::plain_line(value.iter().flat_map(|value| value.chars()));
                    info!("Label change detected: {key}={shown}");
                    label = Some(value);
                }
            }
            _ = look.tick() => {}
        }
        let Some(label) = &label else { continue };
        let switched = manager.switch(label.as_deref());
        if let Ok(Some(news)) = &switched {
            notice.config_not_used(news).await;
        }
        if oneshot {
            manager.keep().unwrap_or_else(|error| warn!("{error}"));
            return manager.ended(switched);
        }
        manager.send();
        let kept = manager.keep();
        manager.say(switched.err().or(kept.err()).map(|error| error.to_string()));
    }
}

/// Return the label's value after a change; `None` if the change says nothing about it. A node that does not exist has no label.
fn value(change: WatchChange<NodeObject>, node: &str, key: &str) -> Option<Option<String>> {
    let of = |object: NodeObject| object.metadata.labels?.remove(key);
    match change {
        WatchChange::Apply(object) => Some(of(object)),
        WatchChange::Reset(objects) => {
            if objects.is_empty() {
                warn!("the cluster has no node {node}, so no label applies; check --node-name (NODE_NAME)");
            }
            Some(objects.into_iter().next().and_then(of))
        }
        WatchChange::Delete(_) => Some(None),
        WatchChange::Interrupted(_) | WatchChange::Resumed => None,
    }
}

/// The configuration of this node.
struct Manager {
    options: ConfigManager,
    directory: PathBuf,
    destination: Destination,
    signal: Option<(Signal, String)>,
    /// The content that is in use, if it was read. At the start, it is the one that an earlier run has signalled.
    content: Option<Vec<u8>>,
    /// Whether this run has found a configuration to use.
    is_used: bool,
    /// Whether the content that is in use is kept for the next run.
    is_kept: bool,
    /// Processes that did not handle the signal when it was to be sent.
    unready: HashSet<Pid>,
    /// Whether the configuration has changed since the last signal.
    is_unsent: bool,
    /// The reported reasons why the configuration is not the one that was asked for.
    reported: Vec<Problem>,
    /// The last messages about files and about the signal. The same messages are not logged again.
    said: Option<String>,
    said_of_signal: Option<String>,
}

impl Manager {
    fn new(options: ConfigManager) -> Result<Manager, Error> {
        let absolute = |path: &str| {
            std::path::absolute(path).map_err(|error| Error::ConfigManager(format!("{path} is not a usable path: {error}")))
        };
        let signal = options.signal.as_ref().map(|to| {
            let signal = Signal::from_named_raw(to.number).ok_or_else(|| {
                Error::ConfigManager(format!(
                    "--signal (SIGNAL) is {}, which is not the number of a signal; write 1 for SIGHUP",
                    to.number
                ))
            })?;
            Ok::<_, Error>((signal, to.process.clone()))
        });
        let destination = Destination::new(absolute(&options.destination)?);
        Ok(Manager {
            directory: absolute(&options.directory)?,
            content: destination.told(),
            destination,
            signal: signal.transpose()?,
            options,
            is_used: false,
            is_kept: false,
            unready: HashSet::new(),
            is_unsent: false,
            reported: Vec::new(),
            said: None,
            said_of_signal: None,
        })
    }

    /// Switch to the configuration that the label asks for. Return a text to report if it is not used for a new reason.
    ///
    /// # Errors
    /// Fails if a file or directory cannot be used. Then the previous configuration stays.
    fn switch(&mut self, label: Option<&str>) -> Result<Option<String>, SwitchError> {
        let available = files::available(&self.directory)?;
        let linked = self.destination.target()?;
        let in_use = linked.as_ref().filter(|_| self.destination.is_usable());
        let selection = select(label, &available, &self.options.unlabelled, in_use.is_some());
        let target = match &selection.chosen {
            Some(Chosen::File(name)) => Some(self.directory.join(name)),
            Some(Chosen::Empty) => Some(PathBuf::from("/dev/null")),
            None => in_use.cloned(),
        };
        if let Some(target) = target {
            let content = self.destination.content(&target)?;
            let is_new = linked.as_ref() != Some(&target);
            if is_new {
                info!("Updating to config: {}", target.display());
                self.destination.link_to(&target)?;
                info!("Successfully updated to config: {}", target.display());
            }
            let is_edited = self.content.as_ref().is_some_and(|known| *known != content);
            if is_edited && !is_new {
                info!("The content of the config has changed: {}", target.display());
            }
            self.is_unsent |= is_new || is_edited;
            self.is_kept &= self.content.as_ref() == Some(&content);
            self.content = Some(content);
            self.is_used = true;
        }
        if self.reported == selection.problems {
            return Ok(None);
        }
        let text = (!selection.problems.is_empty()).then(|| {
            let in_use = in_use.and_then(|path| path.file_name()).map(|name| name.to_string_lossy());
            explain(&selection, in_use.as_deref(), &available, &self.options)
        });
        self.reported = selection.problems;
        Ok(text)
    }

    /// Return the outcome of the only switch.
    fn ended(&self, switched: Result<Option<String>, SwitchError>) -> Result<(), Error> {
        switched.map_err(|error| Error::ConfigManager(error.to_string()))?;
        if self.is_used {
            Ok(())
        } else {
            Err(Error::ConfigManager(problems(&self.reported)))
        }
    }

    /// Keep the content for the next run if the programs that read it know it: they have got the signal, or they start later.
    fn keep(&mut self) -> Result<(), SwitchError> {
        let is_known = self.options.oneshot || self.signal.is_some() && !self.is_unsent;
        if let Some(content) = self.content.as_ref().filter(|_| is_known && self.is_used && !self.is_kept) {
            self.destination.keep_told(content)?;
            self.is_kept = true;
        }
        Ok(())
    }

    fn say(&mut self, text: Option<String>) {
        if let Some(text) = text.as_ref().filter(|_| text != self.said) {
            warn!("{text}; it is tried again every {} s", LOOK.as_secs());
        }
        self.said = text;
    }

    /// Send the signal if the configuration has changed since the last one. If no process got it, it stays to be sent.
    fn send(&mut self) {
        let Some((signal, process)) = self.signal.as_ref().filter(|_| self.is_unsent) else {
            return;
        };
        let trouble = match processes::signal(process, *signal, &mut self.unready) {
            Ok(pids) => {
                let pids: Vec<i32> = pids.into_iter().map(Pid::as_raw_pid).collect();
                info!("Successfully sent signal {} to '{process}': {pids:?}", signal.as_raw());
                self.is_unsent = false;
                None
            }
            Err(error) => Some(error.to_string()),
        };
        if let Some(text) = trouble.as_ref().filter(|_| trouble != self.said_of_signal) {
            warn!("{text}");
        }
        self.said_of_signal = trouble;
    }
}

fn problems(problems: &[Problem]) -> String {
    let texts: Vec<String> = problems.iter().map(Problem::to_string).collect();
    // A label's value comes from outside.
    divvy_host::plain_line(texts.join("; ").chars())
}

/// Say why the configuration that was asked for is not used, what is used, and what to do.
fn explain(selection: &Selection, in_use: Option<&str>, available: &Available, options: &ConfigManager) -> String {
    let consequence = match (&selection.chosen, in_use) {
        (Some(Chosen::File(name)), _) => format!("no configuration is in use, so the node gets {name}, as without a label"),
        (Some(Chosen::Empty), _) => "no configuration is in use, so the node gets an empty one, as without a label".to_owned(),
        (None, Some(name)) => format!("the previous configuration stays in use: {name}"),
        (None, None) => "the node has no configuration".to_owned(),
    };
    let advice = config_files::advice(
        "Choose",
        available,
        Path::new(&options.directory),
        &options.node,
        &options.label,
    );
    format!("{}; {consequence}. {advice}", problems(&selection.problems))
}

#[cfg(test)]
mod tests {
    use divvy_nvidia_config::Unlabelled;

    use super::*;

    #[test]
    fn a_report_says_what_was_found_what_is_used_and_what_to_type() {
        let options = ConfigManager {
            oneshot: false,
            kubeconfig: None,
            node: "n1".to_owned(),
            label: "l".to_owned(),
            directory: "/configs".to_owned(),
            destination: "/config.yaml".to_owned(),
            unlabelled: Unlabelled::default(),
            signal: None,
        };
        let selection = |chosen, problem| Selection {
            chosen,
            problems: vec![problem],
        };
        let wrong = || Problem::NoSuchConfig("wr\u{1b}ong".to_owned());
        let many: Vec<String> = (0..12).map(|i| format!("c{i:02}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        for (selection, in_use, names, expected) in [
            (
                selection(None, wrong()),
                Some("a"),
                &["a", "b"][..],
                "specified config wr\\u{1b}ong does not exist; the previous configuration stays in use: a. \
                 Choose one of a, b: kubectl label node n1 l=NAME --overwrite",
            ),
            (
                selection(Some(Chosen::File("a".to_owned())), wrong()),
                None,
                &many,
                "specified config wr\\u{1b}ong does not exist; no configuration is in use, so the node gets a, as without a label. \
                 Choose one of c00, c01, c02, c03, c04, c05, c06, c07, c08, c09 and 2 more: kubectl label node n1 l=NAME --overwrite",
            ),
            (
                selection(None, Problem::NoFiles),
                None,
                &[],
                "no configuration files available; the node has no configuration. Put configuration files into /configs",
            ),
        ] {
            let available = Available::of(names.iter().map(|name| ((*name).to_owned(), true)));
            assert_eq!(explain(&selection, in_use, &available, &options), expected);
        }
    }
}
