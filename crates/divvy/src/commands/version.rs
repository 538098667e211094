//! `divvy version`: reads the versions of the cluster's components, and prints them.

use divvy_kube::client::{self, Connection};
use divvy_kube::objects::NodeObject;
use divvy_kube::{Error, convert, in_words, list};

use super::inspect::{choice, warn_left_out};
use super::say;
use crate::cli::{VersionArgs, VersionOutput};
use crate::printer;
use crate::version::{CLIENT, Known, Published, ServerVersions, Versions, agents, extenders};

/// Print the versions of this program and of the cluster's components, and warn if they differ.
pub async fn run(args: VersionArgs) -> anyhow::Result<()> {
    let mut versions = Versions {
        client: CLIENT,
        server: None,
    };
    let mut failed = None;
    if !args.client {
        match server(&args).await {
            Ok(server) => versions.server = Some(server),
            // The client's version is printed even if the cluster cannot be reached.
            Err(error) => failed = Some(error),
        }
    }
    match args.output {
        Some(VersionOutput::Json) => printer::json(&versions)?,
        Some(VersionOutput::Yaml) => printer::yaml(&versions)?,
        None => printer::text(&versions.text())?,
    }
    for difference in versions.differences() {
        say(&format!("warning: {difference}"))?;
    }
    failed.map_or(Ok(()), |error| Err(error.into()))
}

async fn server(args: &VersionArgs) -> Result<ServerVersions, Error> {
    let Connection { client, .. } = client::connect(&choice(&args.cluster)).await?;
    let kubernetes = client.apiserver_version().await;
    let kubernetes = match kubernetes {
        Ok(version) => Known::Yes(version.git_version),
        Err(error @ kube::Error::Api(_)) => Known::No {
            unknown: in_words(&error),
        },
        Err(error) => return Err(Error::api("the API server's version could not be read", error)),
    };
    let mut published = Vec::new();
    let version = |object: NodeObject| {
        let node = convert::node(&object);
        match node.inventory {
            Some(Ok(inventory)) => Some(Published {
                offers: node.allocatable_units > 0,
                node: node.name,
                version: inventory.agent,
            }),
            _ => None,
        }
    };
    let (pods, nodes) = tokio::join!(
        list::extender_pods(&client),
        list::each_node(&client, version, |found| published.extend(found)),
    );
    Ok(ServerVersions {
        kubernetes,
        extender: known(pods.map(extenders)),
        agents: known(nodes.map(|left_out| {
            warn_left_out("node", &left_out);
            agents(published)
        })),
    })
}

fn known<T>(read: Result<T, Error>) -> Known<T> {
    match read {
        Ok(value) => Known::Yes(value),
        Err(error) => Known::No {
            unknown: error.to_string(),
        },
    }
}
