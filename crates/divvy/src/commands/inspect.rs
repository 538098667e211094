//! `divvy inspect gpushare`: reads nodes and pods, and prints the tables.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use divvy_host::plain;
use divvy_kube::list::LeftOut;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_kube::{client, convert, list};
use divvy_model::Pod;
use futures::stream;

use super::progress::Arrived;
use super::watch;
use crate::cli::output::OutputFormat;
use crate::cli::{AccessArgs, ClusterArgs, InspectArgs, InspectOutput};
use crate::inspect::{sort, table};
use crate::printer;

/// Read nodes and pods, and print the allocations once, or with `--watch` after each change.
pub async fn run(args: InspectArgs) -> anyhow::Result<()> {
    let client = client::connect(&choice(&args.cluster)).await?.client;
    if !args.watch {
        return Ok(printer::print(&render(&client, &args).await?)?);
    }
    let mut shown = String::new();
    watch::again(stream::pending(), async || {
        let text = render(&client, &args).await?;
        if text != shown {
            let people = !shown.is_empty()
                && args
                    .output
                    .as_ref()
                    .is_none_or(|output| matches!(output, OutputFormat::Form(InspectOutput::Wide)));
            let time = if people { watch::time() } else { String::new() };
            printer::print(&format!("{time}{text}"))?;
            shown = text;
        }
        Ok(true)
    })
    .await
}

async fn render(client: &kube::Client, args: &InspectArgs) -> anyhow::Result<String> {
    let mut view = read(client, &args.nodes, Arrived::default()).await?;
    if let Some(by) = &args.sort_by {
        sort::sort(&mut view, by)?;
    }
    let headers = !args.no_headers;
    Ok(match &args.output {
        Some(OutputFormat::Form(InspectOutput::Json)) => printer::json_text(&view)?,
        Some(OutputFormat::Form(InspectOutput::Yaml)) => printer::yaml_text(&view)?,
        Some(OutputFormat::Form(InspectOutput::Name)) => view.nodes.iter().map(|node| format!("node/{}\n", node.name)).collect(),
        Some(OutputFormat::Form(InspectOutput::Wide)) => table::wide(&view, headers),
        Some(OutputFormat::JsonPath(template)) => plain(&template.render(&serde_json::to_value(&view)?)).into_owned(),
        None if args.details => table::details(&view),
        None => table::summary(&view, headers),
    })
}

/// Read the named nodes and their pods, or all nodes and pods if no name is given.
pub(super) async fn read(client: &kube::Client, names: &[String], arrived: Arrived) -> anyhow::Result<divvy_view::View> {
    let pod = |object: PodObject| list::pod_of(object).map(divvy_view::shown);
    let warn = |kind: &str, left_out: &LeftOut| {
        if !arrived.is_quiet() {
            warn_left_out(kind, left_out);
        }
    };
    let reading = Mutex::new(InspectReading::default());
    let lock = || reading.lock().unwrap_or_else(PoisonError::into_inner);
    let mut take = |pod: Option<Pod>| {
        arrived.pod();
        lock().pod(pod);
    };
    for name in names.iter().collect::<BTreeSet<_>>() {
        let selector = format!("spec.nodeName={name}");
        let lists = async {
            tokio::try_join!(
                list::node(client, name),
                list::each_pod(client, Some(&selector), pod, &mut take)
            )
        };
        let (node, no_pods) = arrived.shown(lists).await?;
        lock().view.node(node);
        warn("pod", &no_pods);
    }
    if names.is_empty() {
        let node = |object: NodeObject| convert::node(&object);
        let all = list::each_node(client, node, |node| {
            arrived.node();
            lock().view.node(node);
        });
        let lists = async { tokio::try_join!(all, list::each_pod(client, None, pod, &mut take)) };
        let (no_nodes, no_pods) = arrived.shown(lists).await?;
        warn("node", &no_nodes);
        warn("pod", &no_pods);
    }
    Ok(reading.into_inner().unwrap_or_else(PoisonError::into_inner).finish())
}

/// Nodes and pods that have arrived, in any order.
#[derive(Default)]
struct InspectReading {
    view: divvy_view::Builder,
    /// The pods whose nodes have not arrived.
    early: Vec<Pod>,
}

impl InspectReading {
    fn pod(&mut self, pod: Option<Pod>) {
        if let Some(pod) = pod
            && !self.view.pod(&pod)
        {
            self.early.push(pod);
        }
    }

    fn finish(mut self) -> divvy_view::View {
        for pod in &self.early {
            // A pod whose node has not arrived now is on a node without GPUs, or the node has gone.
            self.view.pod(pod);
        }
        self.view.finish()
    }
}

/// Convert kubectl's connection flags, including `--cluster`.
pub(super) fn choice(args: &ClusterArgs) -> client::ClusterChoice {
    client::ClusterChoice {
        cluster: args.cluster.clone(),
        ..access(&args.access)
    }
}

/// Convert kubectl's connection flags, for a command that does not have kubectl's `--cluster`.
pub(super) fn access(args: &AccessArgs) -> client::ClusterChoice {
    client::ClusterChoice {
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

/// Log which objects could not be read and are therefore missing from the output.
pub(super) fn warn_left_out(kind: &str, left_out: &LeftOut) {
    for (name, why) in &left_out.named {
        tracing::warn!("{kind} {name} is left out: {why}");
    }
    if left_out.more > 0 {
        tracing::warn!("{} more {kind}s cannot be read and are left out", left_out.more);
    }
}

#[cfg(test)]
mod tests {
    use divvy_model::{ContainerKind, ContainerRequest, Node, Phase, PodRequest};

    use super::*;

    #[test]
    fn a_pod_that_arrives_before_its_node_is_shown() {
        let node = |name: &str| Node {
            name: name.to_owned(),
            allocatable_units: 16,
            allocatable_gpus: 1,
            ..Node::default()
        };
        let pod = |name: &str, node: &str| {
            Some(Pod {
                name: name.to_owned(),
                node: Some(node.to_owned()),
                phase: Phase::Running,
                request: PodRequest {
                    containers: vec![ContainerRequest {
                        name: "main".to_owned(),
                        kind: ContainerKind::App,
                        units: 3,
                        gpu_count: 0,
                    }],
                    ..PodRequest::default()
                },
                ..Pod::default()
            })
        };
        let mut reading = InspectReading::default();
        reading.pod(pod("c", "n1"));
        reading.view.node(node("n1"));
        reading.pod(pod("a", "n1"));
        reading.pod(pod("b", "n2"));
        reading.pod(pod("lost", "n3"));
        reading.pod(None);
        reading.view.node(node("n2"));
        let view = reading.finish();
        let names = |at: usize| -> Vec<&str> { view.nodes[at].pending.iter().map(|pod| pod.name.as_str()).collect() };
        assert_eq!((names(0), names(1), view.allocated), (vec!["a", "c"], vec!["b"], 9));
    }
}
