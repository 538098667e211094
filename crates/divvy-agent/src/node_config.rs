//! The configuration of this node (`--node-configs`): a node label names one of the files of a directory.
//!
//! ```text
//! watch of this node ─► label ─┐
//! directory, every 2 s ────────┴─► divvy_nvidia_config::select ─► settings ─► the agent starts over with them
//! ```
//!
//! What cannot be used changes nothing. The settings in use are kept in the state directory for a start at which the API server does not answer.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_kube::client::{Connection, connect};
use divvy_kube::objects::NodeObject;
use divvy_kube::watch::{self, WatchChange};
use divvy_nvidia_config::{Available, Chosen, Error as Problem, Fallback, Unlabelled, select};
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::args::AgentSettings;
use crate::files::{self, FileError};
use crate::notice::Notice;
use crate::run::{choice, run_in};
use crate::{AgentConfig, Error, config_files};

/// The node label whose value names the file. It is that of NVIDIA's config-manager, so that nodes keep the labels which they have.
const LABEL: &str = "nvidia.com/device-plugin.config";
/// The interval at which the files are read. The kubelet updates the files of a ConfigMap about once a minute.
const LOOK: Duration = Duration::from_secs(2);
/// How long the start waits for the label. Containers that only restart need the agent, and the API server may be away for longer.
const PATIENCE: Duration = Duration::from_secs(3);
/// The file in the state directory with the settings that are in use.
const KEPT: &str = "node-config.toml";

/// Run the agent with the settings of this node's file, and start it over when these change. `base` has the flags, which the file
/// overrides.
///
/// # Errors
/// Those of [`run`](crate::run). If the agent cannot run with the settings of the node, it continues with the previous ones, or with the flags alone.
pub(crate) async fn run(base: AgentSettings, directory: PathBuf, stop: CancellationToken) -> Result<(), Error> {
    let plain = AgentConfig::merged(AgentSettings::default(), base.clone());
    plain.check()?;
    let Connection { client, namespace, .. } = connect(&choice(&plain)).await?;
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut follower = Follower {
        changes: watch::nodes(client.clone(), Some(&format!("metadata.name={}", plain.node_name))).boxed(),
        look,
        label: None,
        notice: Notice::new(client.clone(), "divvy-agent", &plain.node_name),
        chooser: Chooser::new(base, directory, &plain)?,
    };
    let mut config = tokio::select! {
        config = follower.first() => config,
        () = stop.cancelled() => return Ok(()),
    };
    loop {
        let asked = stop.child_token();
        let running = run_in(config, Some((client.clone(), namespace.clone())), asked.clone());
        let mut running = std::pin::pin!(running.fuse());
        let next = tokio::select! {
            ended = &mut running => match ended {
                Ok(()) => return Ok(()),
                Err(error) => match follower.chooser.revert(&error) {
                    Some(previous) => previous,
                    None => return Err(error),
                },
            },
            next = follower.next() => {
                asked.cancel();
                // An error of the earlier settings. If the new ones do not remove it, it comes again.
                if let Err(error) = running.await {
                    warn!("{error}");
                }
                next
            }
        };
        if stop.is_cancelled() {
            return Ok(());
        }
        config = next;
    }
}

/// Remove the kept settings: they must not come back when `--node-configs` is given again later.
///
/// # Errors
/// The file exists and cannot be removed.
pub(crate) fn forget(state: &Path) -> Result<(), FileError> {
    files::remove(state, KEPT)
}

/// Follows the label and the files.
struct Follower {
    changes: BoxStream<'static, WatchChange<NodeObject>>,
    look: Interval,
    /// The label's value, as soon as it is known.
    label: Option<Option<String>>,
    notice: Notice,
    chooser: Chooser,
}

impl Follower {
    /// Return the configuration with which the agent starts.
    async fn first(&mut self) -> AgentConfig {
        let known = async {
            while self.label.is_none() {
                follow(&mut self.changes, &mut self.label).await;
            }
        };
        if tokio::time::timeout(PATIENCE, known).await.is_err() {
            let which = match self.chooser.in_use {
                Some(_) => "with the settings that it used last",
                None => "with the flags alone",
            };
            warn!("the label {LABEL} of this node is not known yet; the agent starts {which}");
        }
        let (found, report) = match &self.label {
            Some(label) => self.chooser.look(label.as_deref()),
            None => (None, None),
        };
        if let Some(report) = report {
            self.notice.config_not_used(&report).await;
        }
        found.unwrap_or_else(|| self.chooser.current())
    }

    /// Wait for another configuration. Cancel-safe, except that a report may be lost.
    async fn next(&mut self) -> AgentConfig {
        loop {
            tokio::select! {
                () = follow(&mut self.changes, &mut self.label) => {}
                _ = self.look.tick() => {}
            }
            let Some(label) = &self.label else { continue };
            let (found, report) = self.chooser.look(label.as_deref());
            if let Some(report) = report {
                self.notice.config_not_used(&report).await;
            }
            if let Some(config) = found {
                return config;
            }
        }
    }
}

/// Wait for a change of the node, and note the label's value. A watch that ended would tell nothing more; the files are still followed.
async fn follow(changes: &mut BoxStream<'static, WatchChange<NodeObject>>, known: &mut Option<Option<String>>) {
    match changes.next().await {
        Some(change) => *known = label(change).or(known.take()),
        None => std::future::pending().await,
    }
}

/// Return the label's value after a change; `None` if the change does not tell it. Without its object, a node keeps what it has.
fn label(change: WatchChange<NodeObject>) -> Option<Option<String>> {
    let object = match change {
        WatchChange::Apply(object) => object,
        WatchChange::Reset(objects) => objects.into_iter().next()?,
        WatchChange::Delete(_) | WatchChange::Interrupted(_) | WatchChange::Resumed => return None,
    };
    Some(object.metadata.labels.and_then(|mut labels| labels.remove(LABEL)))
}

/// Chooses the settings of the node.
struct Chooser {
    base: AgentSettings,
    directory: PathBuf,
    node: String,
    state: PathBuf,
    /// The text of the settings in use, which is empty for the flags alone. `None` before the first choice.
    in_use: Option<String>,
    /// The text of the settings before those in use.
    previous: Option<String>,
    /// A text with which the agent cannot run, and why.
    refused: Option<(String, String)>,
    /// The last report. The same is not reported again.
    reported: Option<String>,
}

impl Chooser {
    fn new(base: AgentSettings, directory: PathBuf, plain: &AgentConfig) -> Result<Chooser, Error> {
        let state = plain.state_dir();
        let kept = files::read(&state.join(KEPT), config_files::BYTES)?;
        let in_use = kept.filter(|text| {
            let parsed = parse(KEPT, text, &base);
            parsed
                .inspect_err(|error| warn!("the kept settings are not used: {error}"))
                .is_ok()
        });
        Ok(Chooser {
            base,
            directory,
            node: plain.node_name.clone(),
            state,
            in_use,
            previous: None,
            refused: None,
            reported: None,
        })
    }

    /// Return the configuration in use.
    fn current(&self) -> AgentConfig {
        let text = self.in_use.as_deref().unwrap_or_default();
        parse(KEPT, text, &self.base).unwrap_or_else(|_| AgentConfig::merged(AgentSettings::default(), self.base.clone()))
    }

    /// Look at the files. Return the configuration if it is another one, and what to report.
    fn look(&mut self, label: Option<&str>) -> (Option<AgentConfig>, Option<String>) {
        let (found, report) = match config_files::available(&self.directory) {
            Ok(available) => self.choose(label, &available, |name| read(&self.directory.join(name))),
            Err(error) => {
                let report = format!(
                    "the directory {} of --node-configs cannot be read: {error}; {}",
                    self.directory.display(),
                    self.consequence(None)
                );
                (None, Some(report))
            }
        };
        let news = (report != self.reported).then_some(report.clone()).flatten();
        self.reported = report;
        let config = found.map(|FoundConfig { name, text, config }| {
            info!("the settings of this node now come from {name}");
            self.use_text(text);
            config
        });
        (config, news)
    }

    fn use_text(&mut self, text: String) {
        let kept = files::make_directory(&self.state, 0o700)
            .and_then(|()| files::write_atomic(&self.state, KEPT, text.as_bytes(), 0o600));
        if let Err(error) = kept {
            warn!("{error}, so a start without the API server would use other settings");
        }
        self.previous = self.in_use.replace(text);
    }

    /// Choose the settings for a label. Return them if they are not in use yet, and what to report.
    fn choose(
        &self,
        label: Option<&str>,
        available: &Available,
        read: impl Fn(&str) -> io::Result<String>,
    ) -> (Option<FoundConfig>, Option<String>) {
        let unlabelled = Unlabelled {
            default: None,
            fallbacks: vec![Fallback::Named, Fallback::Empty],
        };
        let selection = select(label, available, &unlabelled, self.in_use.is_some());
        let mut choose = "Choose";
        let mut problems: Vec<String> = selection.problems.iter().map(|problem| self.words(problem)).collect();
        let found = match &selection.chosen {
            Some(Chosen::File(name)) => self.found(name, &read).unwrap_or_else(|problem| {
                choose = "Correct the file, or choose";
                problems.push(problem.to_string());
                None
            }),
            Some(Chosen::Empty) => self.flags_alone(),
            None => None,
        };
        // Before the first choice, the node gets what it would get without the label.
        let chosen = found.as_ref().map(|found| found.name.as_str());
        let report = (!problems.is_empty()).then(|| {
            let advice = config_files::advice(choose, available, &self.directory, &self.node, LABEL);
            let text = format!("{}; {}. {advice}", problems.join("; "), self.consequence(chosen));
            // A label's value comes from outside.
            divvy_host::plain_line(text.chars())
        });
        (found, report)
    }

    /// Return the settings of a file, unless they are in use.
    fn found(&self, name: &str, read: impl Fn(&str) -> io::Result<String>) -> Result<Option<FoundConfig>, Unusable> {
        let path = self.directory.join(name).display().to_string();
        let text = match read(name) {
            Ok(text) => text,
            Err(source) => return Err(Unusable::Read { path, source }),
        };
        if self.in_use.as_ref() == Some(&text) {
            return Ok(None);
        }
        if let Some((_, why)) = self.refused.as_ref().filter(|(refused, _)| *refused == text) {
            let why = why.clone();
            return Err(Unusable::Refused { path, why });
        }
        let config = parse(&path, &text, &self.base)?;
        Ok(Some(FoundConfig {
            name: path,
            text,
            config,
        }))
    }

    fn flags_alone(&self) -> Option<FoundConfig> {
        let found = || FoundConfig {
            name: "the flags alone".to_owned(),
            text: String::new(),
            config: AgentConfig::merged(AgentSettings::default(), self.base.clone()),
        };
        (self.in_use.as_deref() != Some("")).then(found)
    }

    fn words(&self, problem: &Problem) -> String {
        let directory = self.directory.display();
        match problem {
            Problem::NoFiles => format!("{directory} (--node-configs) has no files"),
            Problem::NoSuchConfig(name) => {
                format!("the label {LABEL} names {name:?}, which is not in {directory} (--node-configs)")
            }
            other => other.to_string(),
        }
    }

    fn consequence(&self, chosen: Option<&str>) -> String {
        match (chosen, &self.in_use) {
            (Some(name), _) => format!("the agent uses {name}, as without the label"),
            (None, Some(_)) => "the agent continues with the settings that it has".to_owned(),
            (None, None) => "the agent uses the flags alone".to_owned(),
        }
    }

    /// Go back to the settings before those with which the agent has failed, and last to the flags alone. Return `None` if other settings are
    /// no remedy.
    fn revert(&mut self, error: &Error) -> Option<AgentConfig> {
        if !matches!(error, Error::Config { .. } | Error::TooManyIds(_) | Error::Listen { .. }) {
            return None;
        }
        let failed = self.in_use.take().unwrap_or_default();
        let previous = self.previous.take().unwrap_or_default();
        if failed == previous {
            return None;
        }
        self.refused = Some((failed, error.to_string()));
        self.use_text(previous);
        Some(self.current())
    }
}

/// Why a file does not give the node its settings.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("{path} cannot be used: {source}")]
    Read { path: String, source: io::Error },
    #[error("the agent cannot run with {path}: {why}")]
    Refused { path: String, why: String },
    #[error(transparent)]
    Wrong(#[from] Error),
}

/// Settings that are to be used.
struct FoundConfig {
    /// The file, in words.
    name: String,
    text: String,
    config: AgentConfig,
}

fn read(path: &Path) -> io::Result<String> {
    let content = config_files::read(path)?;
    String::from_utf8(content).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// Parse the settings of a node, which override `base`.
fn parse(origin: &str, text: &str, base: &AgentSettings) -> Result<AgentConfig, Error> {
    let settings = AgentSettings::parse(origin, text)?;
    let wrong = |text: String| Error::Config {
        origin: origin.to_owned(),
        text,
    };
    for (key, is_set) in [
        ("node-name", settings.node_name.is_some()),
        ("kubeconfig", settings.kubeconfig.is_some()),
        ("context", settings.context.is_some()),
        ("state-dir", settings.state_dir.is_some()),
    ] {
        if is_set {
            return Err(wrong(format!(
                "{key} cannot be set here, because the agent needs it before it finds this file; use the flag --{key}"
            )));
        }
    }
    if settings.mps.is_some() {
        return Err(wrong(
            "mps cannot be set here, because the MPS control daemon must run on the same nodes; use the flag --mps, or the chart's value agent.mps, which does \
             both"
                .to_owned(),
        ));
    }
    let config = AgentConfig::merged(settings, base.clone());
    config.check().map_err(|error| wrong(error.to_string()))?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use divvy_model::MemoryUnit;

    use super::*;

    /// The agent's flags set a unit, and this directory has the files.
    fn chooser(state: &Path, in_use: Option<&str>) -> Chooser {
        let base = AgentSettings {
            node_name: Some("n1".to_owned()),
            memory_unit: Some(MemoryUnit::GIB),
            ..AgentSettings::default()
        };
        Chooser {
            base,
            directory: "/configs".into(),
            node: "n1".to_owned(),
            state: state.to_owned(),
            in_use: in_use.map(str::to_owned),
            previous: None,
            refused: None,
            reported: None,
        }
    }

    const WHOLE: &str = "whole-gpus = true\n";
    const UNIT: &str = "memory-unit = \"MiB\"\n";

    fn read(name: &str) -> io::Result<String> {
        match name {
            "whole" => Ok(WHOLE.to_owned()),
            "default" => Ok(UNIT.to_owned()),
            "broken" => Ok("\nwhole-gpus = 1\n".to_owned()),
            "node" => Ok("node-name = \"n2\"\n".to_owned()),
            "mps" => Ok("mps = true\n".to_owned()),
            "mistaken" => Ok("disable-health-checks = \"none\"\n".to_owned()),
            _ => Err(io::Error::other("it is larger than 1 MiB")),
        }
    }

    #[test]
    fn an_unusable_label_is_reported_and_changes_nothing() {
        const ADVICE: &str = "one of broken, large, mistaken, mps, node, whole: kubectl label node n1 nvidia.com/device-plugin.config=NAME --overwrite";
        const CORRECT: &str = "Correct the file, or choose ";
        const KEEPS: &str = "the agent continues with the settings that it has. ";
        let broken = "/configs/broken: line 2 (whole-gpus = 1): invalid type: integer `1`, expected a boolean; ";
        let cases = [
            (Some("whole"), None, Some(WHOLE), String::new()),
            (Some("whole"), Some(WHOLE), None, String::new()),
            (None, Some(WHOLE), Some(""), String::new()),
            (None, Some(""), None, String::new()),
            (Some("broken"), Some(WHOLE), None, format!("{broken}{KEEPS}{CORRECT}{ADVICE}")),
            (
                Some("broken"),
                None,
                None,
                format!("{broken}the agent uses the flags alone. {CORRECT}{ADVICE}"),
            ),
            (
                Some("no\u{1b}ne"),
                Some(WHOLE),
                None,
                format!(
                    "the label nvidia.com/device-plugin.config names \"no\\u{{1b}}ne\", which is not in /configs (--node-configs); {KEEPS}Choose {ADVICE}"
                ),
            ),
            (
                Some("none"),
                None,
                Some(""),
                format!(
                    "the label nvidia.com/device-plugin.config names \"none\", which is not in /configs (--node-configs); the agent uses the \
                     flags alone, as without the label. Choose {ADVICE}"
                ),
            ),
            (
                Some("node"),
                Some(""),
                None,
                format!(
                    "/configs/node: node-name cannot be set here, because the agent needs it before it finds this file; use the flag --node-name; {KEEPS}{CORRECT}{ADVICE}"
                ),
            ),
            (
                Some("mps"),
                Some(""),
                None,
                format!(
                    "/configs/mps: mps cannot be set here, because the MPS control daemon must run on the same nodes; use the flag --mps, or the chart's value \
                     agent.mps, which does both; {KEEPS}{CORRECT}{ADVICE}"
                ),
            ),
            (
                Some("mistaken"),
                Some(""),
                None,
                format!(
                    "/configs/mistaken: --disable-health-checks or --enable-health-checks: \"none\" is no XID; write numbers separated by commas, such as 79,94, or all; \
                     {KEEPS}{CORRECT}{ADVICE}"
                ),
            ),
            (
                Some("large"),
                Some(""),
                None,
                format!("/configs/large cannot be used: it is larger than 1 MiB; {KEEPS}{CORRECT}{ADVICE}"),
            ),
        ];
        let names = ["whole", "broken", "node", "mistaken", "mps", "large"];
        let available = Available::of(names.map(|name| (name.to_owned(), true)));
        for (label, in_use, text, report) in cases {
            let (found, said) = chooser(Path::new("/nowhere"), in_use).choose(label, &available, read);
            assert_eq!(
                (found.as_ref().map(|found| found.text.as_str()), said.unwrap_or_default()),
                (text, report),
                "{label:?} {in_use:?}"
            );
        }
        let (found, said) = chooser(Path::new("/nowhere"), Some("")).choose(Some("whole"), &Available::default(), read);
        assert!(found.is_none());
        assert_eq!(
            said.as_deref(),
            Some(
                "/configs (--node-configs) has no files; the agent continues with the settings that it has. Put configuration files into /configs"
            )
        );
    }

    /// The file named default is for nodes without the label.
    #[test]
    fn a_nodes_file_overrides_the_flags() {
        let available = Available::of(["whole", "default"].map(|name| (name.to_owned(), true)));
        let chooser = chooser(Path::new("/nowhere"), None);
        for (label, unit, whole) in [
            (None, 1, false),
            (Some("default"), 1, false),
            (Some("whole"), 1024, true),
            (Some("other"), 1, false),
        ] {
            let (found, _) = chooser.choose(label, &available, read);
            let config = found.expect("chosen").config;
            assert_eq!(
                (config.memory_unit.mib(), config.whole_gpus, config.node_name.as_str()),
                (unit, whole, "n1"),
                "{label:?}"
            );
        }
    }

    #[test]
    fn without_the_api_server_an_agent_uses_its_last_settings() {
        let state = tempfile::tempdir().expect("a directory");
        let base = AgentSettings {
            node_name: Some("n1".to_owned()),
            state_dir: Some(state.path().join("agent")),
            ..AgentSettings::default()
        };
        let plain = AgentConfig::merged(AgentSettings::default(), base.clone());
        let start = || Chooser::new(base.clone(), "/configs".into(), &plain).expect("readable");
        let mut first = start();
        assert_eq!((first.in_use.clone(), first.current().whole_gpus), (None, false));
        first.use_text(WHOLE.to_owned());
        assert!(start().current().whole_gpus);
        first.use_text("whole-gpus = 1".to_owned());
        assert_eq!(
            start().in_use,
            None,
            "an older agent may not understand what a newer one has kept"
        );
        forget(&plain.state_dir()).expect("removed");
        forget(&plain.state_dir()).expect("nothing is left to remove");
        assert_eq!(start().in_use, None);
    }

    #[test]
    fn settings_that_fail_are_left_until_they_change() {
        let state = tempfile::tempdir().expect("a directory");
        let mut chooser = chooser(state.path(), Some(""));
        let kept = || std::fs::read_to_string(state.path().join(KEPT)).expect("kept");
        chooser.use_text(UNIT.to_owned());
        chooser.use_text(WHOLE.to_owned());
        assert_eq!((chooser.current().whole_gpus, kept().as_str()), (true, WHOLE));
        let listen = || Error::Listen {
            address: ([0, 0, 0, 0], 1).into(),
            option: "--metrics",
            source: io::Error::from_raw_os_error(13),
        };
        let reverted = chooser.revert(&listen()).expect("there are earlier settings");
        assert_eq!((reverted.memory_unit.mib(), kept().as_str()), (1, UNIT));
        let reverted = chooser.revert(&listen()).expect("there are the flags");
        assert_eq!((reverted.memory_unit.mib(), kept().as_str()), (1024, ""));
        assert!(chooser.revert(&listen()).is_none(), "nothing is left to go back to");

        let mut chooser = self::chooser(state.path(), Some(WHOLE));
        chooser.revert(&listen()).expect("there are the flags");
        let available = Available::of(["whole".to_owned()].map(|name| (name, true)));
        let (found, report) = chooser.choose(Some("whole"), &available, read);
        let report = report.expect("a report");
        assert!(
            found.is_none() && report.starts_with("the agent cannot run with /configs/whole: cannot listen on 0.0.0.0:1"),
            "{report}"
        );
        let (found, report) = chooser.choose(Some("whole"), &available, |_| Ok(UNIT.to_owned()));
        assert!(found.is_some() && report.is_none());
    }
}
