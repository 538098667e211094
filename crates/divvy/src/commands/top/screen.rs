//! The screens of `divvy top`: turns keys, the cluster, and the agents' answers into events, and draws the state after each.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use divvy_top::{KeyPress, ScreenStyle, TopEvent, TopState, draw};
use futures::StreamExt as _;
use ratatui::crossterm::event::{self, Event as Input, KeyCode, KeyEventKind, KeyModifiers};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::machine::{MachineReading, ProbedMachine};
use super::{event as answered, inspect, machine_events, now, smi};
use crate::cli::top::TopArgs;
use crate::commands::progress::Arrived;
use divvy_feed::{Agents, waiting};
use divvy_view::NoUsage;

/// The shortest time between two reads of the cluster.
const CLUSTER: Duration = Duration::from_secs(5);
/// The shortest pause after a read, as a multiple of the time that the read took. Reading a large cluster is expensive for the API server.
const SHARE: u32 = 5;
/// The shortest time between two questions to an agent, which measures once per second.
const SHORTEST: Duration = Duration::from_secs(1);

/// The terminal as it was before is there again when this is dropped.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// What the screens tell those who read.
struct Looking {
    /// The nodes whose usage is shown.
    nodes: watch::Receiver<BTreeSet<String>>,
    /// Whether waiting pods are shown.
    waiting: watch::Receiver<bool>,
    events: mpsc::Sender<TopEvent>,
}

/// Show the screens of a cluster until the user leaves.
pub(super) async fn of_cluster(client: kube::Client, args: &TopArgs, style: ScreenStyle) -> anyhow::Result<()> {
    // A cluster that cannot be read is an error on the terminal that the user knows, not on a screen that vanishes.
    let view = inspect::read(&client, &args.nodes, Arrived::default()).await?;
    let interval = args.interval.max(SHORTEST);
    let names = args.nodes.clone();
    run([TopEvent::Cluster { at: now(), view }], style, |looking| {
        vec![
            tokio::spawn(read_cluster(client.clone(), names, looking.events.clone())),
            tokio::spawn(read_waiting(client.clone(), looking.waiting, looking.events.clone())),
            tokio::spawn(ask_agents(client, interval, looking.nodes, looking.events)),
        ]
    })
    .await
}

/// Show the screens of this machine until the user leaves.
pub(super) async fn of_machine(mut machine: ProbedMachine, args: &TopArgs, style: ScreenStyle) -> anyhow::Result<()> {
    let MachineReading { view, usage, troubles } = machine.read().await.map_err(smi::unread)?;
    let unknown = "only a cluster knows which pods wait: on a machine with a kubeconfig, divvy top shows them".to_owned();
    let first = machine_events(view, usage)
        .chain([TopEvent::Waiting(Vec::new(), Some(unknown)), trouble(troubles)])
        .collect::<Vec<TopEvent>>();
    let interval = args.interval.max(SHORTEST);
    run(first, style, |looking| {
        vec![tokio::spawn(read_machine(machine, interval, looking.events))]
    })
    .await
}

fn trouble(troubles: Vec<String>) -> TopEvent {
    TopEvent::Trouble(Some(troubles.join("; ")).filter(|text| !text.is_empty()))
}

/// Show the screens until the user leaves. `readers` starts those who send the next events.
async fn run(
    first: impl IntoIterator<Item = TopEvent>,
    style: ScreenStyle,
    readers: impl FnOnce(Looking) -> Vec<JoinHandle<()>>,
) -> anyhow::Result<()> {
    let (events, mut coming) = mpsc::channel(64);
    let (wanted, nodes) = watch::channel(BTreeSet::new());
    let (looked_at, waiting) = watch::channel(false);
    let mut state = first.into_iter().fold(TopState::default(), TopState::update);
    // Each of them ends the program, and the terminal is restored before.
    let mut stop = Vec::new();
    for kind in [
        SignalKind::terminate(),
        SignalKind::interrupt(),
        SignalKind::hangup(),
        SignalKind::quit(),
    ] {
        stop.push(signal(kind)?);
    }
    let mut terminal = ratatui::try_init()?;
    let _restore = Restore;
    read_keys(events.clone());
    let readers = readers(Looking { nodes, waiting, events });
    loop {
        let size = terminal.size()?;
        state = state.update(TopEvent::Size(size.width, size.height));
        terminal.draw(|frame| draw(&state, style, frame.area(), frame.buffer_mut()))?;
        tell(&wanted, state.wanted());
        tell(&looked_at, state.wants_waiting());
        let stopped = futures::future::select_all(stop.iter_mut().map(|signal| Box::pin(signal.recv())));
        let event = tokio::select! {
            event = coming.recv() => event,
            _ = stopped => None,
        };
        let Some(event) = event else { break };
        state = state.update(event);
        // Everything that has come is drawn at once.
        while let Ok(event) = coming.try_recv() {
            state = state.update(event);
        }
        if state.is_done() {
            break;
        }
    }
    for reader in readers {
        reader.abort();
    }
    Ok(())
}

/// Send a value if it is another one than before.
fn tell<T: PartialEq>(to: &watch::Sender<T>, now: T) {
    to.send_if_modified(|before| {
        let is_other = *before != now;
        *before = now;
        is_other
    });
}

/// Read keys on a thread of their own, which ends with the program: reading blocks.
fn read_keys(events: mpsc::Sender<TopEvent>) {
    std::thread::spawn(move || {
        while let Ok(input) = event::read() {
            let event = match input {
                Input::Key(key) if key.kind == KeyEventKind::Press => self::key(key.code, key.modifiers).map(TopEvent::Key),
                Input::Resize(columns, rows) => Some(TopEvent::Size(columns, rows)),
                _ => None,
            };
            if event.is_some_and(|event| events.blocking_send(event).is_err()) {
                return;
            }
        }
        // No more keys come, so the program ends. If it has ended, the channel is closed.
        drop(events.blocking_send(TopEvent::Key(KeyPress::Interrupt)));
    });
}

fn key(code: KeyCode, modifiers: KeyModifiers) -> Option<KeyPress> {
    Some(match code {
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => KeyPress::Interrupt,
        KeyCode::Char(_) if modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) => return None,
        KeyCode::Char(character) => KeyPress::Char(character),
        KeyCode::Enter => KeyPress::Enter,
        KeyCode::Esc => KeyPress::Esc,
        KeyCode::Backspace => KeyPress::Backspace,
        KeyCode::Up => KeyPress::Up,
        KeyCode::Down => KeyPress::Down,
        KeyCode::PageUp => KeyPress::PageUp,
        KeyCode::PageDown => KeyPress::PageDown,
        KeyCode::Home => KeyPress::Home,
        KeyCode::End => KeyPress::End,
        _ => return None,
    })
}

async fn read_cluster(client: kube::Client, nodes: Vec<String>, events: mpsc::Sender<TopEvent>) {
    let mut pause = CLUSTER;
    let mut is_away = false;
    loop {
        tokio::time::sleep(pause).await;
        let begun = Instant::now();
        let sent = match inspect::read(&client, &nodes, Arrived::quiet()).await {
            Ok(view) => {
                if std::mem::take(&mut is_away) && events.send(TopEvent::Trouble(None)).await.is_err() {
                    return;
                }
                events.send(TopEvent::Cluster { at: now(), view }).await
            }
            Err(error) => {
                is_away = true;
                let notice = format!("the cluster cannot be read, and this is what it was before: {error:#}");
                events.send(TopEvent::Trouble(Some(notice))).await
            }
        };
        if sent.is_err() {
            return;
        }
        pause = CLUSTER.max(begun.elapsed().saturating_mul(SHARE));
    }
}

async fn read_machine(mut machine: ProbedMachine, interval: Duration, events: mpsc::Sender<TopEvent>) {
    loop {
        tokio::time::sleep(interval).await;
        let next: Vec<TopEvent> = match machine.read().await {
            Ok(MachineReading { view, usage, troubles }) => machine_events(view, usage).chain([trouble(troubles)]).collect(),
            Err(failure) => {
                let notice = format!("the GPUs cannot be read, and this is what they were before: {}", failure.text);
                vec![TopEvent::Trouble(Some(notice))]
            }
        };
        for event in next {
            if events.send(event).await.is_err() {
                return;
            }
        }
    }
}

/// Read the waiting pods while the screen shows them.
async fn read_waiting(client: kube::Client, mut looking: watch::Receiver<bool>, events: mpsc::Sender<TopEvent>) {
    while looking.wait_for(|is_looking| *is_looking).await.is_ok() {
        let begun = Instant::now();
        let (pods, unknown) = waiting(&client, now()).await;
        if events.send(TopEvent::Waiting(pods, unknown)).await.is_err() {
            return;
        }
        tokio::time::sleep(CLUSTER.max(begun.elapsed().saturating_mul(SHARE))).await;
    }
}

/// Ask the agents of the nodes on the screen, and again after each interval, and when other nodes come onto the screen.
async fn ask_agents(
    client: kube::Client,
    interval: Duration,
    mut wanted: watch::Receiver<BTreeSet<String>>,
    events: mpsc::Sender<TopEvent>,
) {
    let agents = Agents::new(client);
    loop {
        let nodes = wanted.borrow_and_update().iter().cloned().collect();
        let mut answers = std::pin::pin!(agents.ask(nodes));
        while let Some((node, answer)) = answers.next().await {
            let notice = answer.as_ref().err().and_then(NoUsage::notice);
            let is_forbidden = notice.is_some();
            let event = match notice {
                Some(notice) => Some(TopEvent::Refused(notice)),
                None => answered(node, now(), answer),
            };
            if let Some(event) = event
                && events.send(event).await.is_err()
            {
                return;
            }
            if is_forbidden {
                // The right does not come while the screen is open, or the user starts again.
                return;
            }
        }
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            changed = wanted.changed() => if changed.is_err() { return },
        }
    }
}
