//! Explanations of error texts in logs: the check to which a text belongs, its meaning, and what to type next.

mod knowledge;
mod pattern;

use std::borrow::Cow;
use std::fmt::Write as _;

use serde::Serialize;

pub use knowledge::{General, Knowledge, KnowledgeEntry, KnowledgeError};

use crate::report::wrapped;

/// One cause of what a line says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cause<'a> {
    /// What is known of it.
    #[serde(flatten)]
    pub entry: Cow<'a, KnowledgeEntry>,
    /// The number of nodes that kube-scheduler names for this cause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<u64>,
}

/// A cause, and the place in the log where its text was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explained<'a> {
    /// The cause, as the first matching line names it.
    #[serde(flatten)]
    pub cause: Cause<'a>,
    /// The first matching line, without control characters, and limited to 240 characters.
    pub line: String,
    /// The number of that line, from 1.
    pub number: usize,
    /// The number of matching lines.
    pub count: usize,
}

impl Knowledge {
    /// Return the causes of what a line says: none if the line contains no known error text, several if kube-scheduler names several.
    pub fn line(&self, line: &str) -> Vec<Cause<'_>> {
        match refusals(line) {
            Some(refusals) => self.unscheduled(&refusals),
            None => self
                .find(line)
                .map(|entry| Cause { entry, nodes: None })
                .into_iter()
                .collect(),
        }
    }

    /// Return the causes why kube-scheduler refuses the nodes. The taint of the control plane counts only if
    /// no node has another cause: pods with GPUs are not meant to run on the control plane.
    fn unscheduled(&self, refusals: &[(u64, &str)]) -> Vec<Cause<'_>> {
        let mut causes: Vec<Cause<'_>> = Vec::new();
        for (count, reason) in refusals {
            let Some(entry) = self.find(reason).or_else(|| self.find("unknown reason of kube-scheduler")) else {
                continue;
            };
            match causes.iter_mut().find(|cause| cause.entry == entry) {
                Some(same) => same.nodes = same.nodes.map(|nodes| nodes.saturating_add(*count)),
                None => causes.push(Cause {
                    entry,
                    nodes: Some(*count),
                }),
            }
        }
        if causes.iter().any(|cause| cause.entry.id != CONTROL_PLANE) {
            causes.retain(|cause| cause.entry.id != CONTROL_PLANE);
        }
        causes
    }
}

/// The entry of the control plane's own taint.
const CONTROL_PLANE: &str = "scheduler-control-plane-taint";

/// Return the reasons why a scheduler refuses nodes, each with the number of nodes. `None` if the line does not say this. Lines look like
/// this: `0/3 nodes are available: 1 node(s) had untolerated taint {a: b}, 2 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are …`
/// (Kubernetes, `pkg/scheduler/framework/types.go`, `FitError.Error`).
fn refusals(line: &str) -> Option<Vec<(u64, &str)>> {
    let (_, reasons) = line
        .split_once("nodes are available: ")
        .or_else(|| line.split_once("nodes are unavailable: "))?;
    let reasons = reasons.split(" preemption: ").next()?;
    let mut found: Vec<(u64, &str)> = Vec::new();
    let mut begin = 0;
    // A comma separates two reasons if a number follows. Reasons themselves contain commas, too.
    for (comma, _) in reasons.match_indices(", ").chain([(reasons.len(), "")]) {
        let rest = reasons.get(comma + 2..).unwrap_or_default();
        if (counted(rest).is_some() || comma == reasons.len())
            && let Some(reason) = counted(&reasons[begin..comma])
        {
            found.push(reason);
            begin = comma + 2;
        }
    }
    (!found.is_empty()).then_some(found)
}

/// Split `2 Insufficient nvidia.com/gpu` into the number and the text.
fn counted(text: &str) -> Option<(u64, &str)> {
    let (count, reason) = text.split_once(' ')?;
    Some((count.parse().ok()?, reason))
}

/// The causes found in a log, collected line by line.
#[derive(Debug, Clone)]
pub struct ExplainedLog<'a> {
    knowledge: &'a Knowledge,
    lines: usize,
    found: Vec<Explained<'a>>,
}

/// The indentation of the second and further lines of a wrapped text, which start below the text and not below its name
/// (`text`, `means`, `fix`, or `source`).
const HANGING: &str = "           ";
/// The largest number of characters of a log line to show.
const SHOWN: usize = 240;

impl<'a> ExplainedLog<'a> {
    /// Begin with an empty log.
    pub fn new(knowledge: &'a Knowledge) -> ExplainedLog<'a> {
        ExplainedLog {
            knowledge,
            lines: 0,
            found: Vec::new(),
        }
    }

    /// Process the next line of the log.
    pub fn read(&mut self, text: &str) {
        self.lines += 1;
        for cause in self.knowledge.line(text) {
            match self.found.iter_mut().find(|found| found.cause.entry == cause.entry) {
                Some(found) => found.count += 1,
                None => self.found.push(Explained {
                    cause,
                    line: text.trim().chars().filter(|c| !c.is_control()).take(SHOWN).collect(),
                    number: self.lines,
                    count: 1,
                }),
            }
        }
    }

    /// Return the causes in the order of their first matching lines.
    pub fn found(&self) -> &[Explained<'a>] {
        &self.found
    }

    /// Return the explanations as text without line wrapping.
    pub fn text(&self) -> String {
        self.text_within(None)
    }

    /// Return the explanations as text, wrapped to `width` columns. With `None`, lines are not wrapped.
    pub fn text_within(&self, width: Option<usize>) -> String {
        if self.found.is_empty() {
            let none = match self.lines {
                0 => return "The log is empty. To check the machine itself, run divvy doctor.\n".to_owned(),
                1 => "The only line does not have a".to_owned(),
                lines => format!("None of the {lines} lines has a"),
            };
            let known = self.knowledge.count();
            return format!("{none} known error text ({known} are known). To check the machine itself, run divvy doctor.\n");
        }
        let mut text = String::new();
        for found in &self.found {
            let Cause { entry, nodes } = &found.cause;
            let nodes = match nodes {
                None => String::new(),
                Some(1) => ", 1 node".to_owned(),
                Some(nodes) => format!(", {nodes} nodes"),
            };
            let times = match found.count {
                1 => String::new(),
                n => format!(", and {} more", n - 1),
            };
            let check = entry.check.as_ref().map(|id| format!("{id} ")).unwrap_or_default();
            let _ = writeln!(text, "{check}line {}{nodes}{times}", found.number);
            for (name, value) in [
                ("text", &found.line),
                ("means", &entry.means),
                ("fix", &entry.fix),
                ("source", &entry.source),
            ] {
                let _ = writeln!(text, "{}", wrapped(value, &format!("    {name:<6} "), HANGING, width));
            }
        }
        let mut checks: Vec<&str> = self
            .found
            .iter()
            .filter_map(|found| found.cause.entry.check.as_deref())
            .collect();
        checks.sort_unstable();
        checks.dedup();
        let (cluster, node): (Vec<&str>, Vec<&str>) = checks.iter().partition(|check| check.starts_with('K'));
        if !checks.is_empty() {
            let _ = writeln!(text);
        }
        if !node.is_empty() {
            let _ = writeln!(text, "On the node: divvy doctor --only {}", node.join(","));
        }
        if !cluster.is_empty() {
            let _ = writeln!(
                text,
                "On the cluster: divvy doctor --node --cluster --only {}",
                cluster.join(",")
            );
        }
        text
    }
}
