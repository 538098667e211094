//! The pods that wait for GPUs, each with its reason, as `divvy top` and the web page show them.

use std::sync::{Mutex, PoisonError};

use divvy_explainer::read_cluster::{ArrivedObject, ClusterReading, read_cluster};
use divvy_explainer::related;
use divvy_kube::list;
use divvy_model::MemoryUnit;
use divvy_view::WaitingPod;
use divvy_why::{Answer, Suggestion, Wants};
use futures::{StreamExt as _, stream};

/// The largest number of pods that are explained.
const MOST: usize = 1000;
/// For how many pods the volume claims are read at the same time.
const AT_ONCE: usize = 8;

/// Read the whole cluster and explain the pods that wait for GPUs at `now` (seconds since 1970), the one that has waited longest first. The text says what is
/// not known, and why: a missing right, an API server that does not answer, or more than 1,000 pods.
pub async fn waiting(client: &kube::Client, now: u64) -> (Vec<WaitingPod>, Option<String>) {
    let found = Mutex::new(Vec::new());
    let reading = read_cluster(client, MemoryUnit::default(), |arrival| {
        if let ArrivedObject::Pod(Some(wants)) = arrival {
            found.lock().unwrap_or_else(PoisonError::into_inner).push(*wants);
        }
    });
    let reading = match reading.await {
        Ok(reading) => reading,
        Err(error) => return (Vec::new(), Some(not_known(client, &error).await)),
    };
    let mut asked = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    // The sort is stable, so pods of the same age stay in the order of namespaces and names. A pod without a creation time comes last.
    asked.sort_by_key(|wants| wants.pod.created_s.map_or(u32::MAX, u32::from));
    let notice = notice(&reading, asked.len());
    asked.truncate(MOST);
    let read_claims = async |wants: &mut Wants| related::read_claims(client, wants).await;
    stream::iter(asked.iter_mut()).for_each_concurrent(AT_ONCE, read_claims).await;
    // The answers of a large cluster take seconds, in which keys and other pages are served.
    let explained = tokio::task::spawn_blocking(move || explained(&reading, &asked, now)).await;
    match explained {
        Ok(waiting) => (waiting, notice),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The program ends.
            Err(_cancelled) => (Vec::new(), notice),
        },
    }
}

async fn not_known(client: &kube::Client, error: &divvy_kube::Error) -> String {
    let refused = if error.is_forbidden() {
        list::refused(client).await.unwrap_or_default()
    } else {
        Vec::new()
    };
    if refused.is_empty() {
        format!("it is not known which pods wait: {error}")
    } else {
        format!(
            "it is not known which pods wait: you lack the right to list {} in the whole cluster; ask an administrator for the cluster role divvy-viewer",
            refused.join(" and ")
        )
    }
}

/// Return what is missing among the answers.
fn notice(reading: &ClusterReading, pods: usize) -> Option<String> {
    let mut texts = Vec::new();
    if pods > MOST {
        texts.push(format!(
            "{} more pods wait than the {MOST} shown here, which have waited longest",
            pods - MOST
        ));
    }
    for (kind, left_out) in [("node", &reading.no_nodes), ("pod", &reading.no_pods)] {
        if let Some((name, why)) = left_out.named.first() {
            let others = match left_out.named.len() as u64 - 1 + left_out.more {
                0 => String::new(),
                others => format!(" (and {others} others)"),
            };
            texts.push(format!("{kind} {name}{others} cannot be read and is left out: {why}"));
        }
    }
    (!texts.is_empty()).then(|| texts.join("; "))
}

/// Explain the pods. Equal pods of one controller are explained once, and each of them gets the explanation.
fn explained(reading: &ClusterReading, asked: &[Wants], now: u64) -> Vec<WaitingPod> {
    let answers = divvy_why::answers(&reading.snapshot, asked, false);
    let by_pod: std::collections::HashMap<(&str, &str), &Answer> = answers
        .iter()
        .flat_map(|answer| {
            answer
                .subject
                .pods
                .iter()
                .map(move |pod| ((pod.namespace.as_str(), pod.name.as_str()), answer))
        })
        .collect();
    let one = |wants: &Wants| {
        let answer = by_pod.get(&(wants.pod.namespace.as_str(), wants.pod.name.as_str()))?;
        Some(WaitingPod {
            namespace: wants.pod.namespace.clone(),
            name: wants.pod.name.clone(),
            seconds: wants
                .pod
                .created_s
                .map(|created| now.saturating_sub(u64::from(created.get()))),
            why: sentence(answer),
            help: answer.suggestions.iter().map(in_words).collect(),
        })
    };
    asked.iter().filter_map(one).collect()
}

/// Return an answer's message, which follows a pod's name (`waits: it asks for …`), as a sentence of its own. Where the message refers to what
/// kube-scheduler reports, the report follows.
fn sentence(answer: &Answer) -> String {
    let mut reported = answer.reported.iter();
    let report = reported.find(|reported| reported.by == "kube-scheduler");
    let message = match (answer.message.strip_suffix(" (below)."), report) {
        (Some(message), Some(report)) => format!("{message}: {}", report.message),
        (Some(message), None) => format!("{message}."),
        (None, _) => answer.message.clone(),
    };
    let rest = message.strip_prefix("waits: ").unwrap_or(&message);
    let mut letters = rest.chars();
    let first = letters.next().into_iter().flat_map(char::to_uppercase);
    first.chain(letters).collect()
}

/// Return a suggestion with its command.
fn in_words(suggestion: &Suggestion) -> String {
    match suggestion.command.as_slice() {
        [] => suggestion.message.clone(),
        command => format!("{} {}", suggestion.message, command.join(" ")),
    }
}
