//! `divvy inspect gpushare`.

use divvy_cluster::list::LeftOut;
use divvy_cluster::objects::PodObject;
use divvy_cluster::{client, convert, list};

use super::progress::Arrived;
use crate::cli::{ClusterArgs, InspectArgs, InspectOutput};
use crate::inspect::{table, view};
use crate::printer;

/// Reads nodes and pods once and prints who has what.
pub async fn run(args: InspectArgs) -> anyhow::Result<()> {
    let connection = client::connect(&choice(&args.cluster)).await?;
    let client = &connection.client;
    let (arrived, mut pods, mut unreadable) = (Arrived::default(), Vec::new(), LeftOut::default());
    let take = |object: PodObject| {
        arrived.pod();
        match convert::pod(&object) {
            Ok(pod) => pods.extend(view::shown(pod)),
            Err(error) => unreadable.add(list::name(&object), error.to_string()),
        }
    };
    let mut nodes = Vec::new();
    match &args.node {
        Some(name) => {
            let selector = format!("spec.nodeName={name}");
            let lists = async { tokio::try_join!(list::node(client, name), list::each_pod(client, Some(&selector), take)) };
            let (node, no_pods) = arrived.shown(lists).await?;
            say_left_out("pod", &no_pods);
            nodes.push(node);
        }
        None => {
            let all = list::each_node(client, |object| {
                arrived.node();
                nodes.push(convert::node(&object));
            });
            let lists = async { tokio::try_join!(all, list::each_pod(client, None, take)) };
            let (no_nodes, no_pods) = arrived.shown(lists).await?;
            say_left_out("node", &no_nodes);
            say_left_out("pod", &no_pods);
        }
    }
    say_left_out("pod", &unreadable);
    let view = view::view(&nodes, &pods);
    drop((nodes, pods));
    match args.output {
        Some(InspectOutput::Json) => printer::json(&view)?,
        Some(InspectOutput::Yaml) => printer::yaml(&view)?,
        Some(InspectOutput::Wide) => printer::print(&table::wide(&view))?,
        None if args.details => printer::print(&table::details(&view))?,
        None => printer::print(&table::summary(&view))?,
    }
    Ok(())
}

/// The cluster that the flags name.
pub(super) fn choice(args: &ClusterArgs) -> client::Choice {
    client::Choice {
        kubeconfig: args.kubeconfig.clone(),
        context: args.context.clone(),
    }
}

/// Names the objects that could not be read.
pub(super) fn say_left_out(kind: &str, left_out: &LeftOut) {
    for (name, why) in &left_out.named {
        tracing::warn!("{kind} {name} is left out: {why}");
    }
    if left_out.more > 0 {
        tracing::warn!("{} more {kind}s cannot be read and are left out", left_out.more);
    }
}
