//! Access to the objects of the cluster that a check needs, and lists of their names for the report.

use crate::check::{CheckStop, blind, skip};
use crate::facts::cluster::{CheckedPod, ClusterFacts};
use crate::facts::{Asked, Facts};

pub(super) fn objects<'f>(facts: &'f Facts<'_>) -> Result<&'f ClusterFacts, CheckStop> {
    match &facts.cluster {
        Asked::Answer(cluster) => Ok(cluster),
        Asked::Failed(reason) | Asked::Blocked(reason) => blind(reason.clone()),
        Asked::Absent(reason) | Asked::Not(reason) => skip(reason.clone()),
    }
}

/// Return the cluster if all of these lists could be read.
pub(super) fn listed<'f>(facts: &'f Facts<'_>, plurals: &[&str]) -> Result<&'f ClusterFacts, CheckStop> {
    let cluster = objects(facts)?;
    cluster.listed(plurals)?;
    Ok(cluster)
}

/// Return the cluster if all of these lists could be read. Return `None` if a list could not be read, but this machine's files
/// can answer instead.
pub(super) fn listed_or_this_machine<'f>(facts: &'f Facts<'_>, plurals: &[&str]) -> Result<Option<&'f ClusterFacts>, CheckStop> {
    match listed(facts, plurals) {
        Ok(cluster) => Ok(Some(cluster)),
        Err(_) if facts.node => Ok(None),
        Err(stop) => Err(stop),
    }
}

/// Return at most the first five names, and how many more there are.
pub(super) fn some<S: AsRef<str>>(names: &[S]) -> String {
    let shown: Vec<&str> = names.iter().take(5).map(AsRef::as_ref).collect();
    match names.len() {
        0..=5 => shown.join(", "),
        n => format!("{} and {} more", shown.join(", "), n - 5),
    }
}

/// Return at most the first five lines, and a line that says how many more there are.
pub(super) fn some_lines(lines: &[&str]) -> String {
    let mut shown: Vec<String> = lines.iter().take(5).map(|line| (*line).to_owned()).collect();
    if lines.len() > shown.len() {
        shown.push(format!("and {} more", lines.len() - shown.len()));
    }
    shown.join("\n")
}

pub(super) fn full_name(pod: &CheckedPod) -> String {
    format!("{}/{}", pod.metadata.namespace, pod.metadata.name)
}

pub(super) fn lives(pod: &&CheckedPod) -> bool {
    !["Succeeded", "Failed"].contains(&pod.status.phase.as_str())
}
