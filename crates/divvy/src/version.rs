//! The versions of this program, the extender, the agents, and Kubernetes.

use std::collections::{BTreeMap, BTreeSet};

use divvy_host::plain;
use serde::Serialize;

use crate::printer::columns;

/// The largest number of names to show on a line.
const NAMES: usize = 3;

/// The version of this program, for the output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClientVersion {
    /// The version, such as `0.1.0`.
    pub version: &'static str,
    /// The git commit from which the program was built, or `unknown`.
    pub commit: &'static str,
}

/// The version of this program.
pub const CLIENT: ClientVersion = ClientVersion {
    version: env!("CARGO_PKG_VERSION"),
    commit: env!("DIVVY_COMMIT"),
};

/// A fact about the cluster, or the reason why it is unknown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Known<T> {
    /// The fact.
    Yes(T),
    /// The fact is unknown.
    No {
        /// The reason why the fact is unknown.
        unknown: String,
    },
}

/// The pods of the extender with the same image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExtenderPods {
    /// The version, if the image's tag is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The image of the pods.
    pub image: String,
    /// The pods, as `namespace/name`.
    pub pods: BTreeSet<String>,
}

/// The agents with the same version.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct AgentsOfVersion {
    /// The version, from the inventory.
    pub version: String,
    /// The nodes whose agents have this version.
    pub nodes: BTreeSet<String>,
    /// The nodes that have an inventory of this version, but whose kubelet offers no units. When an agent stops, its inventory
    /// stays on the node.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub away: BTreeSet<String>,
}

/// The version of an agent, from its node's inventory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// The node's name.
    pub node: String,
    /// The version in the node's inventory.
    pub version: String,
    /// Whether the node's kubelet offers units.
    pub offers: bool,
}

/// The versions in a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ServerVersions {
    /// The version of the API server.
    pub kubernetes: Known<String>,
    /// The versions of the extender's pods, sorted by image.
    pub extender: Known<Vec<ExtenderPods>>,
    /// The versions of the agents, sorted by version.
    pub agents: Known<Vec<AgentsOfVersion>>,
}

/// The output of `divvy version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Versions {
    /// The version of this program.
    pub client: ClientVersion,
    /// The versions in the cluster. `None` with `--client`, or if the cluster cannot be reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<ServerVersions>,
}

/// Group the extender's pods, given as pairs of pod and image, by image.
pub fn extenders(pods: impl IntoIterator<Item = (String, String)>) -> Vec<ExtenderPods> {
    let mut images: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (pod, image) in pods {
        images.entry(image).or_default().insert(pod);
    }
    let one = |(image, pods): (String, BTreeSet<String>)| ExtenderPods {
        version: version_of(&image),
        image,
        pods,
    };
    images.into_iter().map(one).collect()
}

/// Group the agents by version.
pub fn agents(all: impl IntoIterator<Item = Published>) -> Vec<AgentsOfVersion> {
    let mut versions: BTreeMap<String, AgentsOfVersion> = BTreeMap::new();
    for Published { node, version, offers } in all {
        let agents = versions.entry(version).or_default();
        let nodes = if offers { &mut agents.nodes } else { &mut agents.away };
        nodes.insert(node);
    }
    let versions = versions.into_iter();
    versions
        .map(|(version, agents)| AgentsOfVersion { version, ..agents })
        .collect()
}

/// Return the tag of an image without a leading `v`, if the tag is a version, as in `registry.example:5000/divvy:v0.1.0`.
fn version_of(image: &str) -> Option<String> {
    let name = image.split('@').next()?.rsplit('/').next()?;
    let (_, tag) = name.split_once(':')?;
    let version = tag.strip_prefix('v').unwrap_or(tag);
    version.starts_with(|c: char| c.is_ascii_digit()).then(|| version.to_owned())
}

impl Versions {
    /// Return the text for people, with a line for each component.
    pub fn text(&self) -> String {
        let mut rows = format!("Client:\t{} (commit {})\n", self.client.version, self.client.commit);
        if let Some(server) = &self.server {
            let mut row = |title: &str, text: String| rows.push_str(&format!("{title}:\t{text}\n"));
            row("Kubernetes", text_of(&server.kubernetes, Clone::clone));
            row("Extender", text_of(&server.extender, |all| extenders_text(all)));
            row("Agents", text_of(&server.agents, |all| agents_text(all)));
        }
        plain(&columns(&rows)).into_owned()
    }

    /// Return a warning for each component whose version differs from that of this program.
    pub fn differences(&self) -> Vec<String> {
        let Some(ServerVersions { extender, agents, .. }) = &self.server else {
            return Vec::new();
        };
        let other = |version: &str| version != self.client.version;
        let mut parts = Vec::new();
        if let Known::Yes(all) = extender {
            let versions = all
                .iter()
                .filter_map(|one| one.version.as_ref().filter(|version| other(version)));
            parts.extend(versions.map(|version| format!("the extender is {version}")));
        }
        if let Known::Yes(all) = agents {
            let others = all.iter().filter(|one| other(&one.version) && !one.nodes.is_empty());
            parts.extend(others.map(|one| format!("the agent of {} is {}", names(&one.nodes), one.version)));
        }
        let say = |part| {
            format!(
                "{part}, and this program is {}: its results may be wrong; use a program of the installed version, or upgrade the cluster",
                self.client.version
            )
        };
        parts.into_iter().map(say).map(|text| plain(&text).into_owned()).collect()
    }
}

fn text_of<T>(known: &Known<T>, words: impl Fn(&T) -> String) -> String {
    match known {
        Known::Yes(value) => words(value),
        Known::No { unknown } => format!("unknown: {unknown}"),
    }
}

fn extenders_text(all: &[ExtenderPods]) -> String {
    let one = |one: &ExtenderPods| {
        let version = one.version.as_deref().unwrap_or("version unknown");
        let s = if one.pods.len() == 1 { "" } else { "s" };
        format!("{version} (pod{s} {}, image {})", names(&one.pods), one.image)
    };
    match all {
        [] => "no pod of the cluster is Divvy's extender".to_owned(),
        all => all.iter().map(one).collect::<Vec<_>>().join("; "),
    }
}

fn agents_text(all: &[AgentsOfVersion]) -> String {
    let run = |one: &AgentsOfVersion| match one.nodes.len() {
        0 => None,
        1 => Some(format!("{} on node {}", one.version, names(&one.nodes))),
        count => Some(format!("{} on {count} nodes ({})", one.version, names(&one.nodes))),
    };
    let away = |one: &AgentsOfVersion| match one.away.len() {
        0 => None,
        1 => Some(format!(
            "node {} has an inventory of {} and offers no GPU memory (is the agent away?)",
            names(&one.away),
            one.version
        )),
        count => Some(format!(
            "{count} nodes ({}) have an inventory of {} and offer no GPU memory (are the agents away?)",
            names(&one.away),
            one.version
        )),
    };
    let parts: Vec<String> = all.iter().filter_map(run).chain(all.iter().filter_map(away)).collect();
    if parts.is_empty() {
        "no node has published its GPUs".to_owned()
    } else {
        parts.join("; ")
    }
}

fn names(all: &BTreeSet<String>) -> String {
    let shown: Vec<&str> = all.iter().take(NAMES).map(String::as_str).collect();
    match all.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
        all.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    fn published(all: &[(&str, &str, bool)]) -> Vec<Published> {
        let one = |(node, version, offers): &(&str, &str, bool)| Published {
            node: (*node).to_owned(),
            version: (*version).to_owned(),
            offers: *offers,
        };
        all.iter().map(one).collect()
    }

    #[test]
    fn an_inventory_left_behind_is_not_taken_for_an_agent() {
        let say = |all: &[(&str, &str, bool)]| agents_text(&agents(published(all)));
        assert_eq!(
            say(&[("n1", "0.1.0", true), ("n2", "0.1.0", true), ("n3", "0.1.0", false)]),
            "0.1.0 on 2 nodes (n1, n2); node n3 has an inventory of 0.1.0 and offers no GPU memory (is the agent away?)"
        );
        assert_eq!(
            say(&[("n1", "0.1.0", false), ("n2", "0.1.0", false)]),
            "2 nodes (n1, n2) have an inventory of 0.1.0 and offer no GPU memory (are the agents away?)"
        );
        assert_eq!(say(&[]), "no node has published its GPUs");
        let left = Versions {
            client: CLIENT,
            server: Some(ServerVersions {
                kubernetes: Known::Yes("v1.36.3".to_owned()),
                extender: Known::Yes(Vec::new()),
                agents: Known::Yes(agents(published(&[("n1", "0.0.1", false)]))),
            }),
        };
        assert_eq!(left.differences(), Vec::<String>::new());
        assert_eq!(
            serde_json::to_value(&left).expect("JSON")["server"]["agents"],
            serde_json::json!([{"version": "0.0.1", "nodes": [], "away": ["n1"]}])
        );
    }

    #[test]
    fn the_version_of_an_image_is_its_tag_if_that_is_one() {
        for (image, expected) in [
            ("ghcr.io/divvy-dev/divvy:0.1.0", Some("0.1.0")),
            ("registry.example:5000/divvy:v0.2.0-rc.1@sha256:00", Some("0.2.0-rc.1")),
            ("registry.example:5000/divvy", None),
            ("divvy:latest", None),
            ("divvy@sha256:00", None),
            ("", None),
        ] {
            assert_eq!(version_of(image).as_deref(), expected, "{image}");
        }
    }

    #[test]
    fn another_version_is_said_and_an_unknown_one_is_not() {
        let versions = Versions {
            client: ClientVersion {
                version: "0.2.0",
                commit: "4c0fa46",
            },
            server: Some(ServerVersions {
                kubernetes: Known::Yes("v1.36.3".to_owned()),
                extender: Known::Yes(extenders(pairs(&[
                    ("d/extender-1", "r/divvy:0.1.0"),
                    ("d/extender-2", "r/divvy:0.1.0"),
                    ("d/extender-3", "r/divvy:mine"),
                ]))),
                agents: Known::Yes(agents(published(&[
                    ("n1", "0.2.0", true),
                    ("n2", "0.1.0", true),
                    ("n3", "0.1.0", true),
                    ("n4", "0.1.0", true),
                    ("n5", "0.1.0", true),
                    ("n6", "\u{1b}[2J", true),
                ]))),
            }),
        };
        insta::assert_snapshot!(versions.text(), @r"
        Client:      0.2.0 (commit 4c0fa46)
        Kubernetes:  v1.36.3
        Extender:    0.1.0 (pods d/extender-1, d/extender-2, image r/divvy:0.1.0); version unknown (pod d/extender-3, image r/divvy:mine)
        Agents:      \u{1b}[2J on node n6; 0.1.0 on 4 nodes (n2, n3, n4 and 1 more); 0.2.0 on node n1
        ");
        insta::assert_snapshot!(versions.differences().join("\n"), @r"
        the extender is 0.1.0, and this program is 0.2.0: its results may be wrong; use a program of the installed version, or upgrade the cluster
        the agent of n6 is \u{1b}[2J, and this program is 0.2.0: its results may be wrong; use a program of the installed version, or upgrade the cluster
        the agent of n2, n3, n4 and 1 more is 0.1.0, and this program is 0.2.0: its results may be wrong; use a program of the installed version, or upgrade the cluster
        ");
        let unseen = Versions {
            server: Some(ServerVersions {
                kubernetes: Known::Yes("v1.36.3".to_owned()),
                extender: Known::No {
                    unknown: "pods is forbidden".to_owned(),
                },
                agents: Known::Yes(Vec::new()),
            }),
            ..versions
        };
        insta::assert_snapshot!(unseen.text(), @r"
        Client:      0.2.0 (commit 4c0fa46)
        Kubernetes:  v1.36.3
        Extender:    unknown: pods is forbidden
        Agents:      no node has published its GPUs
        ");
        assert!(unseen.differences().is_empty());
    }
}
