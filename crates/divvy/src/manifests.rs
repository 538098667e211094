//! Divvy's Helm chart, rendered without Helm.
//!
//! The chart's files are part of the program. [`template`] is a small, strict renderer of the part of Go's templates that the chart uses; what it
//! does not know is refused with file and line. [`values`] reads what the user chose and checks it against the chart's schema.
//! The text is, byte for byte, what `helm template` prints for the same values (`deploy/helm/compare.sh`).
//!
//! - [`chart`]: the embedded files
//! - [`template`]: from text to a tree, and from a tree and values to text
//! - [`values`]: `--set`, `--values`, and the schema
//! - [`yaml`]: values as Go's YAML library writes them

pub mod chart;
pub mod template;
pub mod values;
pub mod yaml;

use serde_json::{Value, json};

pub use chart::Chart;

/// Why there are no manifests.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the chart is not what this renderer understands.
    #[error("{file}:{line}: {text}")]
    Template {
        /// The file's name in the chart.
        file: String,
        /// From 1.
        line: usize,
        /// What is wrong.
        text: String,
    },
    /// What the user chose cannot be read.
    #[error("{origin}: {text}")]
    Values {
        /// The flag or the file.
        origin: String,
        /// What is wrong, and what to write.
        text: String,
    },
    /// What the user chose does not fit the chart's schema. All faults, in the order of the values.
    #[error("these values do not fit the chart:\n{}", .0.join("\n"))]
    Schema(Vec<String>),
    /// The chart itself is broken.
    #[error("the chart is broken: {0}")]
    Chart(String),
}

/// Under which name and where Divvy is installed.
#[derive(Debug, Clone)]
pub struct Release {
    /// Begins the name of every object.
    pub name: String,
    /// The namespace of the objects that have one.
    pub namespace: String,
}

/// What was rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The objects, a YAML document each, in the order in which they can be created.
    pub objects: String,
    /// What is to be done and looked at after the installation.
    pub notes: String,
}

/// Renders a chart. `chosen` lies over the chart's own values, later ones over earlier ones.
///
/// # Errors
/// Of the values first, then of the templates.
pub fn render(chart: &Chart, release: &Release, chosen: &[Value]) -> Result<Rendered, Error> {
    let values = values::complete(chart, chosen)?;
    let context = json!({
        "Values": values,
        "Release": {"Name": release.name, "Namespace": release.namespace},
        "Chart": chart.about(),
    });
    let templates = template::Templates::parse(chart.templates())?;
    let mut documents = Vec::new();
    let mut notes = String::new();
    for (file, _) in chart.templates() {
        let base = file.rsplit('/').next().unwrap_or(file);
        if base.starts_with('_') {
            continue;
        }
        let text = templates.render(file, &context)?;
        if base == "NOTES.txt" {
            notes = text;
            continue;
        }
        for document in split(&text) {
            let kind = kind_of(document).ok_or_else(|| Error::Chart(format!("{file}: an object without a kind")))?;
            documents.push((order(&kind), kind, *file, document.to_owned()));
        }
    }
    documents.sort_by(|a, b| (a.0, unordered(a)).cmp(&(b.0, unordered(b))));
    let mut objects = String::new();
    for (_, _, file, document) in &documents {
        objects.push_str(&format!("---\n# Source: {}/{file}\n{document}\n", chart.name()));
    }
    Ok(Rendered { objects, notes })
}

/// Kinds that Helm has no place for come last, by name.
fn unordered<'a>((place, kind, _, _): &'a (usize, String, &str, String)) -> &'a str {
    if *place == INSTALL_ORDER.len() { kind } else { "" }
}

fn order(kind: &str) -> usize {
    INSTALL_ORDER
        .iter()
        .position(|known| *known == kind)
        .unwrap_or(INSTALL_ORDER.len())
}

/// The order in which Helm installs (helm/pkg/releaseutil/kind_sorter.go, `InstallOrder`), as far as the kinds of a chart like ours go.
const INSTALL_ORDER: [&str; 16] = [
    "PriorityClass",
    "Namespace",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "ServiceAccount",
    "Secret",
    "ConfigMap",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "Service",
    "DaemonSet",
    "Pod",
    "Deployment",
    "Job",
];

/// The documents of a file, without what surrounds them.
fn split(text: &str) -> Vec<&str> {
    let mut documents = Vec::new();
    let mut start = 0;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if line.trim_end() == "---" {
            documents.push(&text[start..at]);
            start = at + line.len();
        }
        at += line.len();
    }
    documents.push(&text[start..]);
    documents.retain(|document| !document.trim().is_empty());
    documents.into_iter().map(str::trim).collect()
}

fn kind_of(document: &str) -> Option<String> {
    document
        .lines()
        .find_map(|line| line.strip_prefix("kind: "))
        .map(|kind| kind.trim().to_owned())
}

#[cfg(test)]
mod admission;
#[cfg(test)]
mod tests;
