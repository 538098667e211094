//! `divvy why`: reads the cluster, and prints the explanations for pods.

mod cluster;
mod explainer;

use std::collections::BTreeSet;
use std::mem::ManuallyDrop;

use divvy_explainer::{from_objects, related};
use divvy_host::plain;
use divvy_kube::client::{self, Connection};
use divvy_kube::list;
use divvy_kube::list::NotMade;
use divvy_why::{Answer, ClusterSnapshot, Reported, Wants};
use futures::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use serde::Serialize;

use self::cluster::ClusterState;
use self::explainer::Explainer;
use super::inspect::choice;
use super::watch;
use crate::cli::output::OutputFormat;
use crate::cli::{WhyArgs, WhyOutput};
use crate::why::{AnswerStyle, WhyTarget};
use crate::{printer, why};

/// The largest number of answers that are printed in full. If there are more, only the first sentence and the best suggestion of
/// each answer are printed.
const IN_FULL: usize = 3;

/// Read nodes and pods, and explain the chosen pods once, or with `--watch` after each change.
pub async fn run(args: WhyArgs) -> anyhow::Result<()> {
    let connection = client::connect(&choice(&args.cluster)).await?;
    let namespace = args.namespace.clone().unwrap_or_else(|| connection.namespace.clone());
    let client = &connection.client;
    if args.watch {
        return watched(&connection, args, &namespace).await;
    }
    let ClusterState { snapshot, waiting } = read_cluster(client, &args, &namespace).await?;
    // Not dropped: freeing 50,000 pods one by one takes 0.1 s, and the program ends after its answer anyway.
    let snapshot = ManuallyDrop::new(snapshot);
    let mut missing = Vec::new();
    let asked = if args.names.is_empty() {
        unnamed(client, &args, &namespace, waiting).await?
    } else {
        named(client, &namespace, &args.names, &mut missing).await?
    };
    if let Some(wants) = asked.first().filter(|_| args.placement) {
        let placement = why::placement(&snapshot.ledger, &wants.pod, args.policy);
        match &args.output {
            None => printer::print(&why::placement_text(&placement))?,
            Some(output) => printer::print(&formatted(output, &placement, [wants.pod.name.as_str()])?)?,
        }
        return Ok(());
    }
    let answers = answered(&connection, &snapshot, asked, args.all_nodes).await;
    let one = matches!(args.names.as_slice(), [WhyTarget::Pod { .. }]);
    match (&args.output, answers.first()) {
        (_, None) if !missing.is_empty() => {}
        (Some(output), Some(answer)) if one => printer::print(&formatted(output, answer, pods_of([answer]))?)?,
        (Some(output), _) => printer::print(&formatted(output, &answers, pods_of(&answers))?)?,
        (None, None) => printer::text(&nothing_found(client, &args, &namespace).await)?,
        (None, Some(_)) => printer::print(&page(&answers, args.all_nodes))?,
    }
    // The answers for the names that exist have been printed; now report the missing ones.
    match missing.len() {
        0 => Ok(()),
        1 => Err(missing.remove(0)),
        _ => {
            let texts: Vec<String> = missing.iter().map(ToString::to_string).collect();
            anyhow::bail!("{}", texts.join("\nerror: "))
        }
    }
}

/// Print the answers, and print them again when they change, until the named pods are gone.
async fn watched(connection: &Connection, args: WhyArgs, namespace: &str) -> anyhow::Result<()> {
    let client = &connection.client;
    let mut names = args.names.clone();
    let mut known: Vec<WhyTarget> = Vec::new();
    let mut told: Vec<String> = Vec::new();
    let printed = |answer: &Answer, style: AnswerStyle| match &args.output {
        None => Ok(why::text(answer, style)),
        Some(output) => formatted(output, answer, pods_of([answer])),
    };
    let mut waited: BTreeSet<String> = BTreeSet::new();
    watch::again(changes(client, &args, namespace), async || {
        let ClusterState { snapshot, waiting } = read_cluster(client, &args, namespace).await?;
        let mut asked: Vec<Wants> = Vec::new();
        // `compared` is the text without the pod's age, to detect a change; `texts` is the text to print.
        let (mut compared, mut texts): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
        let (mut left, mut gone) = (Vec::new(), String::new());
        for name in &names {
            match of_name(client, namespace, name).await {
                Ok(pods) => {
                    add(&mut asked, pods);
                    left.push(name.clone());
                }
                Err(error) if known.contains(name) && is_gone(&error) => gone.push_str(&format!("{name} is gone.\n")),
                Err(error) => return Err(error),
            }
        }
        if args.names.is_empty() {
            asked = unnamed(client, &args, namespace, waiting).await?;
            let wait: BTreeSet<String> = asked.iter().map(|wants| wants.pod.key().to_string()).collect();
            let over = waited.difference(&wait);
            let words = match &args.selector {
                Some(_) => "is gone",
                None => "no longer waits",
            };
            gone.extend(over.map(|pod| format!("Pod {pod} {words}.\n")));
            waited = wait;
        }
        let answers = answered(connection, &snapshot, asked, args.all_nodes).await;
        let style = style(answers.len(), args.all_nodes);
        for mut answer in answers {
            texts.push(printed(&answer, style)?);
            // The age grows even if nothing happens.
            answer.age_seconds = None;
            compared.push(printed(&answer, style)?);
        }
        let people = args.output.is_none();
        if people && texts.is_empty() && (args.names.is_empty() || !left.is_empty()) {
            let nothing = nothing_found(client, &args, namespace).await;
            texts.push(nothing.clone());
            compared.push(nothing);
        }
        let pairs = texts.iter().zip(&compared);
        let new: Vec<&str> = pairs
            .filter(|(_, same)| !told.contains(same))
            .map(|(text, _)| text.as_str())
            .collect();
        if people && !told.is_empty() && !(new.is_empty() && gone.is_empty()) {
            printer::print(&watch::time())?;
        }
        if people {
            printer::text(&gone)?;
        }
        printer::print(&new.join(if people { "\n" } else { "" }))?;
        told = compared;
        known = left.clone();
        names = left;
        Ok(args.names.is_empty() || !names.is_empty())
    })
    .await
}

/// Return a stream of changes of the pods in question. A user who may not watch pods gets no changes, and the loop then reads every few seconds.
fn changes(client: &kube::Client, args: &WhyArgs, namespace: &str) -> impl Stream<Item = ()> + use<> {
    let (mut scope, mut config) = (Some(namespace), watcher::Config::default());
    match args.names.as_slice() {
        [WhyTarget::Pod { namespace: own, name }] => {
            scope = own.as_deref().or(scope);
            config = config.fields(&format!("metadata.name={name}"));
        }
        names
            if names
                .iter()
                .any(|name| matches!(name, WhyTarget::Pod { namespace: Some(_), .. })) =>
        {
            scope = None
        }
        _ => {}
    }
    if let Some(selector) = &args.selector {
        config = config.labels(selector);
    }
    let api: Api<PartialObjectMeta<Pod>> = match scope.filter(|_| !args.all_namespaces) {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    watcher::watcher(api, config)
        .default_backoff()
        .filter_map(async |event| matches!(event, Ok(Event::Apply(_) | Event::Delete(_))).then_some(()))
}

async fn read_cluster(client: &kube::Client, args: &WhyArgs, namespace: &str) -> anyhow::Result<ClusterState> {
    match cluster::read(client, args.memory_unit).await {
        Err(error) if error.is_forbidden() => {
            let only = (!args.all_namespaces).then_some(namespace);
            cluster::of_namespace(client, args.memory_unit, only, error).await
        }
        look => Ok(look?),
    }
}

/// Return the pods that `--selector` selects, or, without `--selector`, the waiting pods.
async fn unnamed(client: &kube::Client, args: &WhyArgs, namespace: &str, waiting: Vec<Wants>) -> anyhow::Result<Vec<Wants>> {
    match &args.selector {
        None => Ok(waiting
            .into_iter()
            .filter(|wants| args.all_namespaces || wants.pod.namespace == namespace)
            .collect()),
        Some(selector) => selected(client, namespace, selector).await,
    }
}

async fn answered(connection: &Connection, snapshot: &ClusterSnapshot, mut asked: Vec<Wants>, all_nodes: bool) -> Vec<Answer> {
    let client = &connection.client;
    for wants in &mut asked {
        related::read_claims(client, wants).await;
    }
    let mut answers = divvy_why::answers(snapshot, &asked, all_nodes);
    if !snapshot.unseen.is_empty() {
        ask_the_explainer(connection, &mut answers, all_nodes).await;
        add_readable_facts(client, &mut answers).await;
    }
    answers
}

fn is_gone(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<divvy_kube::Error>()
        .is_some_and(divvy_kube::Error::is_not_found)
}

/// Format a value (an answer, several answers, or a placement) as `-o` requests. `pods` are the names to print for `-o name`.
fn formatted<'a, T: Serialize>(
    output: &OutputFormat<WhyOutput>,
    value: &T,
    pods: impl IntoIterator<Item = &'a str>,
) -> anyhow::Result<String> {
    Ok(match output {
        OutputFormat::Form(WhyOutput::Json) => printer::json_text(value)?,
        OutputFormat::Form(WhyOutput::Yaml) => printer::yaml_text(value)?,
        OutputFormat::Form(WhyOutput::Name) => pods.into_iter().map(|pod| format!("pod/{pod}\n")).collect(),
        OutputFormat::JsonPath(template) => plain(&template.render(&serde_json::to_value(value)?)).into_owned(),
    })
}

fn pods_of<'a>(answers: impl IntoIterator<Item = &'a Answer>) -> impl Iterator<Item = &'a str> {
    let pods = answers.into_iter().flat_map(|answer| &answer.subject.pods);
    pods.map(|pod| pod.name.as_str())
}

/// Replace the answers by the explainer's answers, which consider the whole cluster. If the explainer gives no answer, add two
/// notes: the reason, and the role that would let the user see more.
async fn ask_the_explainer(connection: &Connection, answers: &mut [Answer], all_nodes: bool) {
    let mut explainer = if answers.is_empty() {
        return;
    } else {
        Explainer::reach(connection).await
    };
    let mut user = None;
    for answer in answers {
        let asked = match (&mut explainer, answer.subject.pods.first()) {
            (Ok(explainer), Some(pod)) => explainer.ask(pod, all_nodes).await,
            (Ok(_), None) => continue,
            (Err(error), _) => Err(anyhow::anyhow!("{error}")),
        };
        match asked {
            Ok(full) => {
                let pods = std::mem::take(&mut answer.subject.pods);
                *answer = full;
                answer.subject.pods = pods;
            }
            Err(error) => {
                if user.is_none() {
                    user = Some(
                        list::myself(&connection.client)
                            .await
                            .unwrap_or_else(|| "--user=YOU".to_owned()),
                    );
                }
                let user = user.as_deref().unwrap_or_default();
                answer.notes.push(format!(
                    "Divvy's explainer, which sees the whole cluster, could not be reached: {}.",
                    error.to_string().trim_end_matches('.')
                ));
                answer.notes.push(format!(
                    "With the cluster role divvy-viewer (RELEASE-viewer, if Divvy was installed under another name) you would see the reason for each node. An \
                     administrator can grant it: kubectl create clusterrolebinding divvy-viewer-{} --clusterrole=divvy-viewer {user}",
                    user.rsplit(['=', ':']).next().unwrap_or_default()
                ));
            }
        }
    }
}

/// Add the warnings about the pods and the quotas of their namespaces, as far as the user may read them.
async fn add_readable_facts(client: &kube::Client, answers: &mut [Answer]) {
    for answer in answers {
        let Some(pod) = answer.subject.pods.first().cloned() else {
            continue;
        };
        // Users who may read pods often may not read events or quotas. The answer is useful without them.
        match related::warnings_of(client, &pod.namespace, &pod.name).await {
            Ok(warnings) => {
                let known = |warning: &Reported| answer.reported.iter().any(|known| known.message == warning.message);
                let new: Vec<Reported> = warnings.into_iter().filter(|warning| !known(warning)).collect();
                answer.reported.extend(new);
            }
            Err(error) => tracing::debug!("{error}"),
        }
        match list::quotas(client, &pod.namespace).await {
            Ok(quotas) => answer.notes.extend(quotas.into_iter().map(|quota| format!("{quota}."))),
            Err(error) => tracing::debug!("{error}"),
        }
    }
}

fn style(answers: usize, all_nodes: bool) -> AnswerStyle {
    AnswerStyle {
        width: printer::terminal_width(),
        all_nodes,
        short: answers > IN_FULL && !all_nodes,
        coloured: printer::coloured(),
    }
}

fn page(answers: &[Answer], all_nodes: bool) -> String {
    let style = style(answers.len(), all_nodes);
    let texts: Vec<String> = answers.iter().map(|answer| why::text(answer, style)).collect();
    let mut page = texts.join("\n");
    if style.short {
        page.push_str("\nFor more about one pod: divvy why POD\n");
    }
    page
}

/// Return the text for a command line that matches no pod.
async fn nothing_found(client: &kube::Client, args: &WhyArgs, namespace: &str) -> String {
    if let Some(selector) = &args.selector {
        return format!("No pod in namespace {namespace} has the labels {selector}.\n");
    }
    if args.names.is_empty() {
        return nothing_waits(client, args, namespace).await;
    }
    let names: Vec<String> = args.names.iter().map(ToString::to_string).collect();
    let mut text = format!("There are no pods of {} in namespace {namespace}.\n", names.join(", "));
    for refused in not_made(client, Some(namespace)).await {
        let of_it = |name: &WhyTarget| matches!(name, WhyTarget::Workload { name, .. } if refused.by.contains(name.as_str()));
        if args.names.iter().any(of_it) {
            text.push_str(&format!("{}\n", not_made_text(&refused)));
        }
    }
    text
}

async fn nothing_waits(client: &kube::Client, args: &WhyArgs, namespace: &str) -> String {
    let only = (!args.all_namespaces).then_some(namespace);
    let refused = not_made(client, only).await;
    let place = match only {
        Some(namespace) => format!("namespace {namespace}"),
        None => "any namespace".to_owned(),
    };
    let mut text = if refused.is_empty() {
        format!("No pod waits for GPU memory in {place}.\n")
    } else {
        format!("No pod waits for GPU memory in {place}, but some pods could not be created:\n")
    };
    for refused in refused {
        text.push_str(&format!("{}\n", not_made_text(&refused)));
    }
    text
}

/// Return the named pods without duplicates. For each name that does not exist, an error is added to `missing`.
async fn named(
    client: &kube::Client,
    namespace: &str,
    names: &[WhyTarget],
    missing: &mut Vec<anyhow::Error>,
) -> anyhow::Result<Vec<Wants>> {
    let mut found: Vec<Wants> = Vec::new();
    for name in names {
        match of_name(client, namespace, name).await {
            Ok(pods) => add(&mut found, pods),
            Err(error) if is_gone(&error) => missing.push(error),
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

fn add(to: &mut Vec<Wants>, pods: Vec<Wants>) {
    for pod in pods {
        if !to.iter().any(|known| known.pod.uid == pod.pod.uid) {
            to.push(pod);
        }
    }
}

async fn of_name(client: &kube::Client, namespace: &str, name: &WhyTarget) -> anyhow::Result<Vec<Wants>> {
    Ok(match name {
        WhyTarget::Pod { namespace: own, name } => vec![pod(client, own.as_deref().unwrap_or(namespace), name).await?],
        WhyTarget::Workload { kind, name } => {
            let selector = list::selector_of(client, kind.api(), namespace, name).await?;
            selected(client, namespace, &selector).await?
        }
    })
}

async fn selected(client: &kube::Client, namespace: &str, selector: &str) -> anyhow::Result<Vec<Wants>> {
    let objects = list::selected_pods(client, namespace, selector).await?;
    Ok(objects.iter().map(from_objects::wants).collect::<Result<_, _>>()?)
}

async fn pod(client: &kube::Client, namespace: &str, name: &str) -> anyhow::Result<Wants> {
    match list::pod(client, namespace, name).await {
        Ok(object) => Ok(from_objects::wants(&object)?),
        Err(error) => {
            // The API server may have refused the pod to its controller, and the user may mean that controller.
            let refused = not_made(client, Some(namespace)).await;
            let of_it: Vec<String> = refused
                .iter()
                .filter(|refused| refused.by.contains(name))
                .map(not_made_text)
                .collect();
            if of_it.is_empty() {
                Err(error.into())
            } else {
                let words = format!("{error}. {}", of_it.join(" "));
                Err(anyhow::Error::new(error).context(words))
            }
        }
    }
}

/// Return the pods that controllers failed to create, according to their events. The list is empty if the user may not read
/// events.
async fn not_made(client: &kube::Client, namespace: Option<&str>) -> Vec<NotMade> {
    match list::not_made(client, namespace).await {
        Ok(found) => found,
        Err(error) => {
            tracing::debug!("{error}");
            Vec::new()
        }
    }
}

fn not_made_text(refused: &NotMade) -> String {
    let hint = if refused.why.contains("exceeded quota") {
        " A quota of the namespace is used up: kubectl describe quota shows it. Delete unneeded objects, or request a larger quota."
    } else {
        ""
    };
    format!(
        "{} could not create a pod: {}.{hint}",
        refused.by,
        refused.why.trim_end_matches('.')
    )
}
