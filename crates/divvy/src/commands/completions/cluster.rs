//! Names in the cluster, for the word that is being typed. Whoever cannot be asked in time is not missed.

use std::ffi::OsStr;
use std::sync::mpsc;
use std::time::Duration;

use clap::Parser as _;
use clap_complete::CompletionCandidate;
use divvy_kube::client::{self, Choice, Connection};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::Api;
use kube::api::ListParams;

use super::BEFORE;
use crate::cli::{Cli, Command, InspectCommand, arguments};
use crate::commands::inspect::{access, choice};

/// Who types waits for it.
const PATIENCE: Duration = Duration::from_secs(2);
/// Nobody reads more.
const MOST: usize = 300;
/// Of the API server's lists.
const PAGE: u32 = 500;

/// A kind of which names are wanted.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Pod,
    Namespace,
    Node,
}

/// Pods, as `divvy why` takes them: `NAME`, `pod/NAME`, `NAMESPACE/NAME`.
pub fn pods(current: &OsStr) -> Vec<CompletionCandidate> {
    candidates(Kind::Pod, current)
}

/// Namespaces.
pub fn namespaces(current: &OsStr) -> Vec<CompletionCandidate> {
    candidates(Kind::Namespace, current)
}

/// Nodes.
pub fn nodes(current: &OsStr) -> Vec<CompletionCandidate> {
    candidates(Kind::Node, current)
}

fn candidates(kind: Kind, current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else {
        return Vec::new();
    };
    let (before, typed) = match current.rsplit_once('/') {
        Some((before, typed)) => (format!("{before}/"), typed.to_owned()),
        None => (String::new(), current.to_owned()),
    };
    let (choice, of_flag) = typed_before();
    let namespace = match before.trim_end_matches('/') {
        "" | "pod" | "pods" | "po" => of_flag,
        // A namespace, or the kind of a workload; there is no namespace of that name then.
        other => Some(other.to_owned()),
    };
    let (sender, found) = mpsc::channel();
    // A program that gives credentials may hang, and a thread cannot be ended: it ends with the program.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        let names = runtime.block_on(names(kind, choice, namespace, &typed))?;
        sender.send(names).ok()
    });
    let names = found.recv_timeout(PATIENCE).unwrap_or_default();
    names
        .into_iter()
        .map(|name| CompletionCandidate::new(format!("{before}{name}")))
        .collect()
}

/// The cluster and the namespace of the flags that stand before the word. The last of them may lack its value, which is what is being typed.
fn typed_before() -> (Choice, Option<String>) {
    let words = BEFORE.get().map(Vec::as_slice).unwrap_or_default();
    let parsed = (0..2).find_map(|less| {
        let words = words.get(..words.len().checked_sub(less)?)?;
        Cli::try_parse_from(arguments(words.iter().cloned()).ok()?).ok()
    });
    match parsed.map(|cli| cli.command) {
        Some(Command::Why(args)) => (choice(&args.cluster), args.namespace),
        Some(Command::SchedulerConfig(args)) => (choice(&args.cluster), args.namespace),
        Some(Command::Inspect(InspectCommand::Gpushare(args))) => (choice(&args.cluster), None),
        Some(Command::Simulate(args)) => (access(&args.access), None),
        _ => (Choice::default(), None),
    }
}

async fn names(kind: Kind, choice: Choice, namespace: Option<String>, typed: &str) -> Option<Vec<String>> {
    let Connection {
        client,
        namespace: of_context,
        ..
    } = client::connect(&choice).await.ok()?;
    Some(match kind {
        Kind::Pod => begin_with(Api::<Pod>::namespaced(client, &namespace.unwrap_or(of_context)), typed).await,
        Kind::Namespace => begin_with(Api::<Namespace>::all(client), typed).await,
        Kind::Node => begin_with(Api::<Node>::all(client), typed).await,
    })
}

/// The names in a list that begin so, as far as it can be had.
async fn begin_with<K>(api: Api<K>, typed: &str) -> Vec<String>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let (mut found, mut params) = (Vec::new(), ListParams::default().limit(PAGE));
    while let Ok(page) = api.list_metadata(&params).await {
        let names = page.items.into_iter().filter_map(|item| item.metadata.name);
        found.extend(names.filter(|name| name.starts_with(typed)));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) if found.len() < MOST => params = params.continue_token(&token),
            _ => break,
        }
    }
    found.truncate(MOST);
    found
}
