//! `divvy inspect gpushare`.

use divvy_cluster::{client, list};

use crate::cli::{ClusterArgs, InspectArgs, InspectOutput};
use crate::inspect::{table, view};
use crate::printer;

/// Reads nodes and pods once and prints who has what.
pub async fn run(args: InspectArgs) -> anyhow::Result<()> {
    let connection = client::connect(&choice(&args.cluster)).await?;
    let (nodes, pods) = match &args.node {
        Some(name) => {
            let selector = format!("spec.nodeName={name}");
            let (node, pods) = tokio::try_join!(
                list::node(&connection.client, name),
                list::pods(&connection.client, Some(&selector))
            )?;
            (vec![node], pods)
        }
        None => tokio::try_join!(list::nodes(&connection.client), list::pods(&connection.client, None))?,
    };
    for (pod, error) in &pods.unreadable {
        tracing::warn!("pod {pod} is left out: {error}");
    }
    let view = view::view(&nodes, &pods.pods);
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
