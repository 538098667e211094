//! `divvy top`: shows what pods have of GPUs, and what they use.

mod machine;
mod screen;

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use divvy_feed::{Agents, waiting};
use divvy_kube::client;
use divvy_model::usage::Usage;
use divvy_top::{KeyPress, ScreenStyle, TopEvent, TopState, lines};
use divvy_view::{NoUsage, View, WaitingPod};
use futures::StreamExt as _;
use serde::Serialize;

use super::inspect::{self, choice};
use super::progress::Arrived;
use super::{probe, say, smi};
use crate::cli::top::{TopArgs, TopOutput};
use crate::printer;
use machine::{MachineReading, ProbedMachine};

/// The columns of the table if the output is not a terminal.
const COLUMNS: u16 = 120;

/// Where the values come from.
enum TopSource {
    Cluster(kube::Client),
    Machine(Box<ProbedMachine>),
}

/// Show the screens until the user leaves, or print everything once.
pub async fn run(args: TopArgs) -> anyhow::Result<()> {
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    let is_once = args.once || args.output.is_some() || is_dumb || !std::io::stdout().is_terminal();
    match (source(&args).await?, is_once) {
        (TopSource::Cluster(client), true) => once(&client, &args).await,
        (TopSource::Cluster(client), false) => screen::of_cluster(client, &args, style(&args)).await,
        (TopSource::Machine(machine), true) => machine_once(*machine, &args).await,
        (TopSource::Machine(machine), false) => screen::of_machine(*machine, &args, style(&args)).await,
    }
}

/// Choose the cluster, or without a kubeconfig this machine.
async fn source(args: &TopArgs) -> anyhow::Result<TopSource> {
    if args.local || args.machine.probe.is_some() {
        return Ok(TopSource::Machine(Box::new(ProbedMachine::find(&args.machine).await?)));
    }
    match client::connect(&choice(&args.cluster)).await {
        Ok(connection) => Ok(TopSource::Cluster(connection.client)),
        Err(error @ divvy_kube::Error::NoCluster) if args.nodes.is_empty() => match ProbedMachine::find(&args.machine).await {
            Ok(machine) => Ok(TopSource::Machine(Box::new(machine))),
            Err(local) => anyhow::bail!(
                "{error}. Without a cluster, divvy top shows the GPUs of the node on which it runs as root, but {local:#}"
            ),
        },
        Err(error) => Err(error.into()),
    }
}

fn style(args: &TopArgs) -> ScreenStyle {
    ScreenStyle {
        ascii: args.ascii || is_ascii(|name| std::env::var(name).ok()),
        color: printer::coloured(),
    }
}

/// Report whether the locale has ASCII only. The first of these variables that is set counts (POSIX, XBD 8.2).
fn is_ascii(variable: impl Fn(&str) -> Option<String>) -> bool {
    let set = ["LC_ALL", "LC_CTYPE", "LANG"]
        .into_iter()
        .filter_map(variable)
        .find(|value| !value.is_empty());
    set.is_some_and(|locale| matches!(locale.as_str(), "C" | "POSIX"))
}

/// The output of `-o json`.
#[derive(Serialize)]
struct Json<'a> {
    #[serde(flatten)]
    view: &'a View,
    /// What the agents said, by node.
    usage: BTreeMap<&'a str, &'a Usage>,
    /// The pods that wait for GPUs. Absent if nodes were named: these pods are on none.
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting: Option<&'a [WaitingPod]>,
    /// What is not known of them, and why.
    #[serde(rename = "waitingNotice", skip_serializing_if = "Option::is_none")]
    unknown: Option<&'a str>,
    /// Why nothing is known of the other nodes.
    #[serde(rename = "usageErrors", skip_serializing_if = "BTreeMap::is_empty")]
    errors: BTreeMap<&'a str, String>,
}

async fn once(client: &kube::Client, args: &TopArgs) -> anyhow::Result<()> {
    let view = inspect::read(client, &args.nodes, Arrived::default()).await?;
    let agents = Agents::new(client.clone());
    let names: Vec<String> = view.nodes.iter().map(|node| node.name.clone()).collect();
    let answers: Vec<(String, Result<Usage, NoUsage>)> = agents.ask(names).collect().await;
    if let Some(notice) = answers.iter().find_map(|(_, answer)| answer.as_ref().err()?.notice()) {
        say(&format!("note: {notice}"))?;
    }
    let waiting = if args.nodes.is_empty() {
        Some(waiting(client, now()).await)
    } else {
        None
    };
    if let Some((_, Some(unknown))) = &waiting {
        say(&format!("note: {unknown}"))?;
    }
    match args.output {
        Some(TopOutput::Json) => {
            let usage = answers
                .iter()
                .filter_map(|(node, answer)| Some((node.as_str(), answer.as_ref().ok()?)));
            let errors = answers
                .iter()
                .filter_map(|(node, answer)| Some((node.as_str(), answer.as_ref().err()?.to_string())));
            printer::json(&Json {
                view: &view,
                usage: usage.collect(),
                waiting: waiting.as_ref().map(|(pods, _)| pods.as_slice()),
                unknown: waiting.as_ref().and_then(|(_, unknown)| unknown.as_deref()),
                errors: errors.collect(),
            })
        }
        None => {
            let at = now();
            let events = answers.into_iter().filter_map(|(node, answer)| event(node, at, answer));
            let waiting = waiting.map(|(pods, unknown)| TopEvent::Waiting(pods, unknown));
            print(
                args,
                [TopEvent::Cluster { at, view }].into_iter().chain(events).chain(waiting),
            )
        }
    }
}

async fn machine_once(mut machine: ProbedMachine, args: &TopArgs) -> anyhow::Result<()> {
    let read = tokio::time::timeout(probe::PATIENCE, machine.read()).await;
    let MachineReading { view, usage, troubles } = read
        .context("the driver does not answer; type divvy doctor to find the cause")?
        .map_err(smi::unread)?;
    for trouble in troubles {
        say(&format!("note: {trouble}"))?;
    }
    match args.output {
        Some(TopOutput::Json) => printer::json(&Json {
            usage: view.nodes.iter().map(|node| (node.name.as_str(), &usage)).collect(),
            view: &view,
            waiting: None,
            unknown: None,
            errors: BTreeMap::new(),
        }),
        None => print(args, machine_events(view, usage)),
    }
}

/// Return the events of a machine that was read now.
fn machine_events(view: View, usage: Usage) -> impl Iterator<Item = TopEvent> {
    let at = now();
    let node = view.nodes.first().map(|node| node.name.clone());
    let usage = node.map(|node| TopEvent::Usage {
        node,
        at,
        answer: Ok(usage),
    });
    [TopEvent::Cluster { at, view }].into_iter().chain(usage)
}

/// Print the table of what these events tell.
fn print(args: &TopArgs, events: impl Iterator<Item = TopEvent>) -> anyhow::Result<()> {
    let state = TopState::default().update(TopEvent::Key(KeyPress::Char('t')));
    let state = events.fold(state, TopState::update);
    let columns = rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| size.ws_col);
    let columns = columns.filter(|columns| *columns > 0).unwrap_or(COLUMNS);
    let text: String = lines(&state, style(args), columns)
        .into_iter()
        .map(|line| line + "\n")
        .collect();
    Ok(printer::print(&text)?)
}

/// Return the event for an agent's answer. A missing permission does not concern a single node: a notice reports it once.
fn event(node: String, at: u64, answer: Result<Usage, NoUsage>) -> Option<TopEvent> {
    let is_about_all = answer.as_ref().is_err_and(|error| error.notice().is_some());
    (!is_about_all).then_some(TopEvent::Usage { node, at, answer })
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_locales_c_and_posix_have_ascii_only() {
        for (set, expected) in [
            (&[][..], false),
            (&[("LANG", "C")], true),
            (&[("LANG", "POSIX")], true),
            (&[("LANG", "C.UTF-8")], false),
            (&[("LANG", "en_US.UTF-8")], false),
            (&[("LC_ALL", "C"), ("LANG", "en_US.UTF-8")], true),
            (&[("LC_ALL", ""), ("LANG", "C")], true),
            (&[("LC_CTYPE", "en_US.UTF-8"), ("LANG", "C")], false),
        ] {
            let of = |name: &str| set.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_owned());
            assert_eq!(is_ascii(of), expected, "{set:?}");
        }
    }
}
