//! `divvy inspect gpushare`.

use divvy_cluster::list::LeftOut;
use divvy_cluster::objects::{NodeObject, PodObject};
use divvy_cluster::{client, convert, list};
use divvy_model::Pod;

use super::progress::Arrived;
use crate::cli::{AccessArgs, ClusterArgs, InspectArgs, InspectOutput};
use crate::inspect::{table, view};
use crate::printer;

/// Reads nodes and pods once and prints who has what.
pub async fn run(args: InspectArgs) -> anyhow::Result<()> {
    let connection = client::connect(&choice(&args.cluster)).await?;
    let client = &connection.client;
    let (arrived, mut pods) = (Arrived::default(), Vec::new());
    let pod = |object: PodObject| list::pod_of(object).map(view::shown);
    let take = |pod: Option<Pod>| {
        arrived.pod();
        pods.extend(pod);
    };
    let mut nodes = Vec::new();
    match &args.node {
        Some(name) => {
            let selector = format!("spec.nodeName={name}");
            let lists = async { tokio::try_join!(list::node(client, name), list::each_pod(client, Some(&selector), pod, take)) };
            let (node, no_pods) = arrived.shown(lists).await?;
            say_left_out("pod", &no_pods);
            nodes.push(node);
        }
        None => {
            let node = |object: NodeObject| convert::node(&object);
            let all = list::each_node(client, node, |node| {
                arrived.node();
                nodes.push(node);
            });
            let lists = async { tokio::try_join!(all, list::each_pod(client, None, pod, take)) };
            let (no_nodes, no_pods) = arrived.shown(lists).await?;
            say_left_out("node", &no_nodes);
            say_left_out("pod", &no_pods);
        }
    }
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
        cluster: args.cluster.clone(),
        ..access(&args.access)
    }
}

/// The same, without a `--cluster` of kubectl's.
pub(super) fn access(args: &AccessArgs) -> client::Choice {
    client::Choice {
        kubeconfig: args.context.kubeconfig.clone(),
        context: args.context.context.clone(),
        cluster: None,
        user: args.user.clone(),
        server: args.server.clone(),
        token: args.token.clone(),
        impersonate: args.impersonate.clone(),
        impersonate_groups: args.impersonate_groups.clone(),
        request_timeout: args.request_timeout,
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
