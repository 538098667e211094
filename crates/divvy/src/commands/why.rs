//! `divvy why`.

use std::mem::ManuallyDrop;

use divvy_cluster::list::NotMade;
use divvy_cluster::objects::{NodeObject, PodObject};
use divvy_cluster::{client, convert, list};
use divvy_model::{Pod, PodKey};
use divvy_placement::{Ledger, kept};

use super::inspect::{choice, say_left_out};
use super::progress::Arrived;
use crate::cli::{WhyArgs, WhyOutput};
use crate::{printer, why};

/// Reads nodes and pods once, builds the extender's own ledger from them, and explains.
pub async fn run(args: WhyArgs) -> anyhow::Result<()> {
    let connection = client::connect(&choice(&args.cluster)).await?;
    let client = &connection.client;
    let arrived = Arrived::default();
    let (mut labels, mut nodes, mut pods) = (Vec::new(), Vec::new(), Vec::new());
    let node = |object: NodeObject| (convert::node(&object), object.metadata.labels.unwrap_or_default());
    let all_nodes = list::each_node(client, node, |(node, its_labels)| {
        arrived.node();
        nodes.push(node);
        labels.push(its_labels);
    });
    // As the ledger keeps it: the rest is several times as much.
    let pod = |object| list::pod_of(object).map(kept);
    let all_pods = list::each_pod(client, None, pod, |pod| {
        arrived.pod();
        pods.push(pod);
    });
    let (no_nodes, no_pods) = arrived.shown(async { tokio::try_join!(all_nodes, all_pods) }).await?;
    say_left_out("node", &no_nodes);
    say_left_out("pod", &no_pods);
    // The cluster's unit is what the agents publish; the flag is for clusters where none does.
    let published = nodes.iter().find_map(|node| match &node.inventory {
        Some(Ok(inventory)) => Some(inventory.unit),
        _ => None,
    });
    let namespace = args.namespace.clone().unwrap_or(connection.namespace.clone());
    let waiting = pods
        .iter()
        .filter(|pod: &&Pod| pod.node.is_none() && !pod.ended() && pod.request.wants_memory());
    let waiting: Vec<PodKey> = waiting
        .filter(|pod| args.all_namespaces || pod.namespace == namespace)
        .map(Pod::key)
        .collect();
    let sites = why::sites(labels, &nodes, &pods);
    let mut ledger = Ledger::new(published.unwrap_or(args.memory_unit));
    ledger.replace_nodes(&nodes);
    drop(nodes);
    ledger.replace_pods(pods);
    // The program ends when it has answered: to free 50,000 pods one by one takes 0.1 s of its 1.3.
    let mut ledger = ManuallyDrop::new(ledger);
    match list::unhealthy_gpus(&connection.client).await {
        Ok(named) => ledger.replace_unhealthy(named.into_iter().map(|named| (named.node, named.gpus))),
        // Who may read pods may often not read kube-system; few clusters have these ConfigMaps.
        Err(error) => tracing::debug!("{error}"),
    }

    let mut asked: Vec<PodObject> = Vec::new();
    if let Some(name) = &args.pod {
        match list::pod(&connection.client, &namespace, name).await {
            Ok(object) => asked.push(object),
            Err(error) => {
                // A controller may have been refused it, and who asks most likely has its name in mind.
                let refused = not_made(&connection.client, Some(&namespace)).await;
                let of_it: Vec<String> = refused
                    .iter()
                    .filter(|refused| refused.by.contains(name.as_str()))
                    .map(not_made_text)
                    .collect();
                if of_it.is_empty() {
                    return Err(error.into());
                }
                anyhow::bail!("{error}. {}", of_it.join(" "));
            }
        }
    } else {
        for pod in &waiting {
            match list::pod(&connection.client, &pod.namespace, &pod.name).await {
                Ok(object) => asked.push(object),
                // It has gone since it was listed, most likely.
                Err(error) => tracing::warn!("{error}"),
            }
        }
    }
    if let Some(object) = asked.first().filter(|_| args.placement) {
        let placement = why::placement(&ledger, &convert::pod(object)?, args.policy);
        match args.output {
            Some(WhyOutput::Json) => printer::json(&placement)?,
            Some(WhyOutput::Yaml) => printer::yaml(&placement)?,
            None => printer::print(&why::placement_text(&placement))?,
        }
        return Ok(());
    }
    let mut answers = Vec::new();
    for object in &asked {
        answers.push(why::answer(&ledger, &convert::pod(object)?, object, &sites));
    }
    match args.output {
        Some(WhyOutput::Json) if args.pod.is_some() => printer::json(&answers.first())?,
        Some(WhyOutput::Yaml) if args.pod.is_some() => printer::yaml(&answers.first())?,
        Some(WhyOutput::Json) => printer::json(&answers)?,
        Some(WhyOutput::Yaml) => printer::yaml(&answers)?,
        None if answers.is_empty() => {
            let place = if args.all_namespaces {
                "any namespace".to_owned()
            } else {
                format!("namespace {namespace}")
            };
            printer::line(&format!("No pod waits for GPU memory in {place}."))?;
            let only = (!args.all_namespaces).then_some(namespace.as_str());
            for refused in not_made(&connection.client, only).await {
                printer::line(&not_made_text(&refused))?;
            }
        }
        None => printer::print(&answers.iter().map(why::text).collect::<Vec<_>>().join("\n"))?,
    }
    Ok(())
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
        " A quota of the namespace is used up: kubectl describe quota shows it; delete what is not needed, or have it raised."
    } else {
        ""
    };
    format!(
        "{} could not make a pod: {}.{hint}",
        refused.by,
        refused.why.trim_end_matches('.')
    )
}
