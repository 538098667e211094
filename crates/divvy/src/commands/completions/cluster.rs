//! Finds the names of objects in the cluster that complete the word being typed. If the cluster does not answer in time, there
//! are no names and no error.

use std::ffi::OsStr;
use std::sync::{OnceLock, mpsc};
use std::time::Duration;

use clap_complete::CompletionCandidate;
use divvy_kube::client::{self, ClusterChoice, Connection};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::Api;
use kube::api::ListParams;

/// The time limit for the query, for which the user waits.
const PATIENCE: Duration = Duration::from_secs(2);
/// The largest number of names to offer; no user reads more.
const MOST: usize = 300;
/// The number of objects to request in one page of a list.
const PAGE: u32 = 500;

/// What the flags before the word select.
#[derive(Default)]
pub(super) struct Selected {
    pub(super) choice: ClusterChoice,
    pub(super) namespace: Option<String>,
}

/// The function that finds out what the flags before the word select. This module cannot parse these flags itself, because the
/// grammar depends on this module for the names.
static SELECTED: OnceLock<Box<dyn Fn() -> Selected + Send + Sync>> = OnceLock::new();

/// Set the function that finds out what the flags before the word select. It is called only if names of objects are needed.
pub(super) fn select_with(selected: impl Fn() -> Selected + Send + Sync + 'static) {
    // A process completes one word; only a test calls this more often.
    let _ = SELECTED.set(Box::new(selected));
}

/// The kind of the objects whose names are offered.
#[derive(Debug, Clone, Copy)]
enum CompletedKind {
    Pod,
    Namespace,
    Node,
}

/// Return the pods that match a word for `divvy why`: `NAME`, `pod/NAME`, or `NAMESPACE/NAME`.
pub fn pods(current: &OsStr) -> Vec<CompletionCandidate> {
    candidates(CompletedKind::Pod, current)
}

/// Return the namespaces whose names start with the word.
pub fn namespaces(current: &OsStr) -> Vec<CompletionCandidate> {
    candidates(CompletedKind::Namespace, current)
}

/// Return the nodes whose names start with the word.
pub fn nodes(current: &OsStr) -> Vec<CompletionCandidate> {
    candidates(CompletedKind::Node, current)
}

fn candidates(kind: CompletedKind, current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else {
        return Vec::new();
    };
    let (before, typed) = match current.rsplit_once('/') {
        Some((before, typed)) => (format!("{before}/"), typed.to_owned()),
        None => (String::new(), current.to_owned()),
    };
    let Selected {
        choice,
        namespace: of_flag,
    } = SELECTED.get().map(|selected| selected()).unwrap_or_default();
    let namespace = match before.trim_end_matches('/') {
        "" | "pod" | "pods" | "po" => of_flag,
        // A namespace, or the kind of a workload. No namespace has the name of a kind, so the latter finds nothing.
        other => Some(other.to_owned()),
    };
    let (sender, found) = mpsc::channel();
    // A credential plugin may hang, and a thread cannot be cancelled. The end of the program ends it.
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

async fn names(kind: CompletedKind, choice: ClusterChoice, namespace: Option<String>, typed: &str) -> Option<Vec<String>> {
    let Connection {
        client,
        namespace: of_context,
        ..
    } = client::connect(&choice).await.ok()?;
    Some(match kind {
        CompletedKind::Pod => begin_with(Api::<Pod>::namespaced(client, &namespace.unwrap_or(of_context)), typed).await,
        CompletedKind::Namespace => begin_with(Api::<Namespace>::all(client), typed).await,
        CompletedKind::Node => begin_with(Api::<Node>::all(client), typed).await,
    })
}

/// Return the names in a list that start with `typed`, at most [`MOST`]. If a page cannot be read, return the names of the pages before it.
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
