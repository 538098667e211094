//! `divvy why`.

mod look;

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;

use divvy_cluster::list::NotMade;
use divvy_cluster::{client, list, sites};
use divvy_why::{Answer, Reported, Snapshot, Wants};

use super::inspect::choice;
use crate::cli::{WhyArgs, WhyOutput};
use crate::why::{Name, Style};
use crate::{printer, why};

/// Of more answers than this only the sentence and the best suggestion are printed.
const IN_FULL: usize = 3;

/// Reads nodes and pods once, and explains the pods that are asked about.
pub async fn run(args: WhyArgs) -> anyhow::Result<()> {
    let connection = client::connect(&choice(&args.cluster)).await?;
    let namespace = args.namespace.clone().unwrap_or(connection.namespace.clone());
    let client = &connection.client;
    let look::Look { snapshot, waiting } = match look::look(client, args.memory_unit).await {
        Err(error) if error.is_forbidden() => {
            let only = (!args.all_namespaces).then_some(namespace.as_str());
            look::of_namespace(client, args.memory_unit, only, error).await?
        }
        look => look?,
    };
    // The program ends when it has answered: to free 50,000 pods one by one takes 0.1 s.
    let snapshot = ManuallyDrop::new(snapshot);
    let mut asked = match (args.names.is_empty(), &args.selector) {
        (true, None) => waiting
            .into_iter()
            .filter(|wants| args.all_namespaces || wants.pod.namespace == namespace)
            .collect(),
        (true, Some(selector)) => selected(client, &namespace, selector).await?,
        (false, _) => named(client, &namespace, &args.names).await?,
    };
    for wants in &mut asked {
        list::look_at_claims(client, wants).await;
    }
    if let Some(wants) = asked.first().filter(|_| args.placement) {
        let placement = why::placement(&snapshot.ledger, &wants.pod, args.policy);
        match args.output {
            Some(WhyOutput::Json) => printer::json(&placement)?,
            Some(WhyOutput::Yaml) => printer::yaml(&placement)?,
            None => printer::print(&why::placement_text(&placement))?,
        }
        return Ok(());
    }
    let mut answers = answers(&snapshot, &asked, args.all_nodes);
    if !snapshot.unseen.is_empty() {
        say_what_may_be_read(client, &mut answers).await;
    }
    let one = matches!(args.names.as_slice(), [Name::Pod { .. }]);
    match args.output {
        Some(WhyOutput::Json) if one => printer::json(&answers.first())?,
        Some(WhyOutput::Yaml) if one => printer::yaml(&answers.first())?,
        Some(WhyOutput::Json) => printer::json(&answers)?,
        Some(WhyOutput::Yaml) => printer::yaml(&answers)?,
        None if answers.is_empty() => nothing_waits(client, &args, &namespace).await?,
        None => printer::print(&page(&answers, args.all_nodes))?,
    }
    Ok(())
}

/// The answers, those of equal pods as one, in the order of the pods.
fn answers(snapshot: &Snapshot, asked: &[Wants], all_nodes: bool) -> Vec<Answer> {
    let mut kinds: Vec<(&Wants, Answer)> = Vec::new();
    // Equal pods have one controller, so that few are compared with each other.
    let mut of_owner: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for wants in asked {
        let known = of_owner.entry((&wants.pod.namespace, &wants.owner)).or_default();
        match known.iter().find(|kind| kinds[**kind].0.is_like(wants)) {
            Some(kind) => kinds[*kind].1.subject.pods.push(divvy_why::PodName {
                namespace: wants.pod.namespace.clone(),
                name: wants.pod.name.clone(),
            }),
            None => {
                known.push(kinds.len());
                kinds.push((wants, divvy_why::answer(snapshot, wants, all_nodes)));
            }
        }
    }
    kinds.into_iter().map(|(_, answer)| answer).collect()
}

/// Adds what a user of a namespace may read about a pod, and how to see more.
async fn say_what_may_be_read(client: &kube::Client, answers: &mut [Answer]) {
    let user = list::myself(client).await;
    for answer in answers {
        let Some(pod) = answer.subject.pods.first().cloned() else {
            continue;
        };
        // Who may read pods may often not read events or quotas; the answer is good without them.
        match list::warnings_of(client, &pod.namespace, &pod.name).await {
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
        let user = user.as_deref().unwrap_or("--user=YOU");
        answer.notes.push(format!(
            "With the cluster role divvy-viewer you would see what each node says. An administrator gives it to you: kubectl create \
             clusterrolebinding divvy-viewer-{} --clusterrole=divvy-viewer {user}",
            user.rsplit(['=', ':']).next().unwrap_or_default()
        ));
    }
}

fn page(answers: &[Answer], all_nodes: bool) -> String {
    let style = Style {
        width: printer::terminal_width(),
        all_nodes,
        short: answers.len() > IN_FULL && !all_nodes,
    };
    let texts: Vec<String> = answers.iter().map(|answer| why::text(answer, style)).collect();
    let mut page = texts.join("\n");
    if style.short {
        page.push_str("\nMore about one of them: divvy why POD\n");
    }
    page
}

async fn nothing_waits(client: &kube::Client, args: &WhyArgs, namespace: &str) -> anyhow::Result<()> {
    let only = (!args.all_namespaces).then_some(namespace);
    let refused = not_made(client, only).await;
    let place = match only {
        Some(namespace) => format!("namespace {namespace}"),
        None => "any namespace".to_owned(),
    };
    match refused.is_empty() {
        true => printer::line(&format!("No pod waits for GPU memory in {place}."))?,
        false => printer::line(&format!(
            "No pod waits for GPU memory in {place}, but some could not be made:"
        ))?,
    }
    for refused in refused {
        printer::line(&not_made_text(&refused))?;
    }
    Ok(())
}

/// The pods that were named, each once.
async fn named(client: &kube::Client, namespace: &str, names: &[Name]) -> anyhow::Result<Vec<Wants>> {
    let mut found: Vec<Wants> = Vec::new();
    for name in names {
        let pods = match name {
            Name::Pod { namespace: own, name } => vec![pod(client, own.as_deref().unwrap_or(namespace), name).await?],
            Name::Workload { kind, name } => {
                let selector = list::selector_of(client, kind.api(), namespace, name).await?;
                selected(client, namespace, &selector).await?
            }
        };
        for pod in pods {
            if !found.iter().any(|known| known.pod.uid == pod.pod.uid) {
                found.push(pod);
            }
        }
    }
    Ok(found)
}

async fn selected(client: &kube::Client, namespace: &str, selector: &str) -> anyhow::Result<Vec<Wants>> {
    let objects = list::selected_pods(client, namespace, selector).await?;
    Ok(objects.iter().map(sites::wants).collect::<Result<_, _>>()?)
}

async fn pod(client: &kube::Client, namespace: &str, name: &str) -> anyhow::Result<Wants> {
    match list::pod(client, namespace, name).await {
        Ok(object) => Ok(sites::wants(&object)?),
        Err(error) => {
            // A controller may have been refused it, and who asks most likely has its name in mind.
            let refused = not_made(client, Some(namespace)).await;
            let of_it: Vec<String> = refused
                .iter()
                .filter(|refused| refused.by.contains(name))
                .map(not_made_text)
                .collect();
            match of_it.is_empty() {
                true => Err(error.into()),
                false => anyhow::bail!("{error}. {}", of_it.join(" ")),
            }
        }
    }
}

/// What controllers could not make. Who may read pods may often not read events.
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
        " A quota of the namespace is used up: kubectl describe quota shows it. Delete what is not needed, or ask for a larger quota."
    } else {
        ""
    };
    format!(
        "{} could not make a pod: {}.{hint}",
        refused.by,
        refused.why.trim_end_matches('.')
    )
}
