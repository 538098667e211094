//! The screens of `divvy top`: turns keys, the cluster, and the agents' answers into events, and draws the state after each.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use divvy_top::{Event, Key, State, Style, draw};
use futures::StreamExt as _;
use ratatui::crossterm::event::{self, Event as Input, KeyCode, KeyEventKind, KeyModifiers};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use super::{event as answered, inspect, now};
use crate::cli::top::TopArgs;
use crate::commands::progress::Arrived;
use divvy_feed::{Agents, Failure, waiting};

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

/// Show the screens until the user leaves.
pub(super) async fn run(client: kube::Client, args: &TopArgs, style: Style) -> anyhow::Result<()> {
    // A cluster that cannot be read is an error on the terminal that the user knows, not on a screen that vanishes.
    let first = inspect::read(&client, &args.nodes, Arrived::default()).await?;
    let (events, mut coming) = mpsc::channel(64);
    let (wanted, asked) = watch::channel(BTreeSet::new());
    let mut state = State::default().update(Event::Cluster { at: now(), view: first });
    let mut stop = [signal(SignalKind::terminate())?, signal(SignalKind::hangup())?];
    let mut terminal = ratatui::try_init()?;
    let _restore = Restore;
    read_keys(events.clone());
    let cluster = tokio::spawn(read_cluster(client.clone(), args.nodes.clone(), events.clone()));
    let (looked_at, looking) = watch::channel(false);
    let waiting = tokio::spawn(read_waiting(client.clone(), looking, events.clone()));
    let agents = tokio::spawn(ask_agents(client, args.interval.max(SHORTEST), asked, events));
    loop {
        let size = terminal.size()?;
        state = state.update(Event::Size(size.width, size.height));
        terminal.draw(|frame| draw(&state, style, frame.area(), frame.buffer_mut()))?;
        tell(&wanted, state.wanted());
        tell(&looked_at, state.wants_waiting());
        let [terminated, hung_up] = &mut stop;
        let event = tokio::select! {
            event = coming.recv() => event,
            _ = terminated.recv() => None,
            _ = hung_up.recv() => None,
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
    for task in [cluster, waiting, agents] {
        task.abort();
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
fn read_keys(events: mpsc::Sender<Event>) {
    std::thread::spawn(move || {
        while let Ok(input) = event::read() {
            let event = match input {
                Input::Key(key) if key.kind == KeyEventKind::Press => self::key(key.code, key.modifiers).map(Event::Key),
                Input::Resize(columns, rows) => Some(Event::Size(columns, rows)),
                _ => None,
            };
            if event.is_some_and(|event| events.blocking_send(event).is_err()) {
                return;
            }
        }
        // No more keys come, so the program ends. If it has ended, the channel is closed.
        drop(events.blocking_send(Event::Key(Key::Interrupt)));
    });
}

fn key(code: KeyCode, modifiers: KeyModifiers) -> Option<Key> {
    Some(match code {
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Key::Interrupt,
        KeyCode::Char(_) if modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) => return None,
        KeyCode::Char(character) => Key::Char(character),
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Esc,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        _ => return None,
    })
}

async fn read_cluster(client: kube::Client, nodes: Vec<String>, events: mpsc::Sender<Event>) {
    let mut pause = CLUSTER;
    let mut is_away = false;
    loop {
        tokio::time::sleep(pause).await;
        let begun = Instant::now();
        let sent = match inspect::read(&client, &nodes, Arrived::quiet()).await {
            Ok(view) => {
                if std::mem::take(&mut is_away) && events.send(Event::Trouble(None)).await.is_err() {
                    return;
                }
                events.send(Event::Cluster { at: now(), view }).await
            }
            Err(error) => {
                is_away = true;
                let notice = format!("the cluster cannot be read, and this is what it was before: {error:#}");
                events.send(Event::Trouble(Some(notice))).await
            }
        };
        if sent.is_err() {
            return;
        }
        pause = CLUSTER.max(begun.elapsed().saturating_mul(SHARE));
    }
}

/// Read the waiting pods while the screen shows them.
async fn read_waiting(client: kube::Client, mut looking: watch::Receiver<bool>, events: mpsc::Sender<Event>) {
    while looking.wait_for(|is_looking| *is_looking).await.is_ok() {
        let begun = Instant::now();
        let (pods, unknown) = waiting(&client, now()).await;
        if events.send(Event::Waiting(pods, unknown)).await.is_err() {
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
    events: mpsc::Sender<Event>,
) {
    let agents = Agents::new(client);
    loop {
        let nodes = wanted.borrow_and_update().iter().cloned().collect();
        let mut answers = std::pin::pin!(agents.ask(nodes));
        while let Some((node, answer)) = answers.next().await {
            let notice = answer.as_ref().err().and_then(Failure::notice);
            let is_forbidden = notice.is_some();
            let event = match notice {
                Some(notice) => Some(Event::Refused(notice)),
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
