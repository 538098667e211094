//! `divvy why`.

use divvy_cluster::list::NotMade;
use divvy_cluster::objects::PodObject;
use divvy_cluster::{client, convert, list};
use divvy_model::Node;
use divvy_placement::Ledger;

use super::inspect::choice;
use crate::cli::{WhyArgs, WhyOutput};
use crate::{printer, why};

/// Reads nodes and pods once, builds the extender's own ledger from them, and explains.
pub async fn run(args: WhyArgs) -> anyhow::Result<()> {
    let connection = client::connect(&choice(&args.cluster)).await?;
    let (objects, pods) = tokio::try_join!(list::node_objects(&connection.client), list::pods(&connection.client, None))?;
    let nodes: Vec<Node> = objects.iter().map(convert::node).collect();
    for (pod, error) in &pods.unreadable {
        tracing::warn!("pod {pod} is left out: {error}");
    }
    // The cluster's unit is what the agents publish; the flag is for clusters where none does.
    let published = nodes.iter().find_map(|node| match &node.inventory {
        Some(Ok(inventory)) => Some(inventory.unit),
        _ => None,
    });
    let mut ledger = Ledger::new(published.unwrap_or(args.memory_unit));
    ledger.replace_nodes(&nodes);
    ledger.replace_pods(pods.pods.iter().cloned());
    match list::unhealthy_gpus(&connection.client).await {
        Ok(named) => ledger.replace_unhealthy(named.into_iter().map(|named| (named.node, named.gpus))),
        // Who may read pods may often not read kube-system; few clusters have these ConfigMaps.
        Err(error) => tracing::debug!("{error}"),
    }

    let sites = why::sites(&objects, &nodes, &pods.pods);

    let namespace = args.namespace.clone().unwrap_or(connection.namespace);
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
        let wanted = pods.pods.iter().filter(|pod| {
            pod.node.is_none()
                && !pod.ended()
                && pod.request.wants_memory()
                && (args.all_namespaces || pod.namespace == namespace)
        });
        for pod in wanted {
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
