//! What a check found: its severity, its text, and the repairs that it proposes.

use serde::Serialize;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The finding is good to know, but nothing fails because of it.
    Info,
    /// Something will fail, or is slower or less safe than it looks.
    Warning,
    /// Containers get no GPU, or a wrong one.
    Error,
}

/// The links of the chain from the driver to the pods, in the order of the chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckGroup {
    /// The GPU, the kernel module, NVML.
    Driver,
    /// Device nodes.
    Nodes,
    /// The driver's libraries.
    Libraries,
    /// CDI specs.
    Cdi,
    /// The container engine and its configuration.
    Engine,
    /// The kubelet and the device plugins that are registered with it.
    Kubelet,
    /// Nodes, scheduler, extender.
    Cluster,
    /// Pods.
    Pods,
}

impl CheckGroup {
    /// Return the heading of this group in the report.
    pub fn title(self) -> &'static str {
        match self {
            CheckGroup::Driver => "Driver",
            CheckGroup::Nodes => "Device nodes",
            CheckGroup::Libraries => "Driver libraries",
            CheckGroup::Cdi => "CDI specs",
            CheckGroup::Engine => "Container engine",
            CheckGroup::Kubelet => "Kubelet",
            CheckGroup::Cluster => "Cluster",
            CheckGroup::Pods => "Pods",
        }
    }
}

/// The source of the facts of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// This machine's files and programs.
    Node,
    /// The API server.
    Cluster,
    /// Either this machine or the API server; one of the two is enough.
    Either,
}

/// The result of a check. With `Ok`, the check passes, and the text says what was found.
pub type CheckVerdict = Result<String, CheckStop>;

/// The reason why a check does not pass: there is a finding, it does not apply, or its facts could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckStop {
    /// A finding with the severity of the check.
    Problem(CheckFinding),
    /// A finding with a lower severity than that of the check.
    Milder(Severity, CheckFinding),
    /// The check does not apply here, or the user did not request it. The text is the reason.
    Skip(String),
    /// The check applies, but its facts could not be read. The text is the reason, for example a missing permission, or a program
    /// that did not answer.
    Blind(String),
}

/// A description of a problem, in the three parts that the report prints.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckFinding {
    /// What was found.
    pub found: String,
    /// Why it matters, with the error message that users see.
    pub why: String,
    /// What to type next.
    pub fix: String,
    /// The repairs that `--fix` makes. The list is empty if a person has to decide.
    pub repairs: Vec<Repair>,
}

/// A repair that is safe to make without asking the user.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase", tag = "do")]
pub enum Repair {
    /// Create a directory.
    Directory {
        /// The path of the directory.
        path: String,
    },
    /// Create a symbolic link.
    Link {
        /// The path of the link.
        path: String,
        /// The target that the link contains.
        target: String,
    },
    /// Generate a CDI spec again, replacing the existing file.
    Spec {
        /// The path of the spec file.
        path: String,
        /// The vendor: `nvidia`, `amd`, or `intel`.
        vendor: String,
        /// The root directory of the driver's files.
        driver_root: String,
    },
}

/// Return a finding with the severity of the check.
pub(crate) fn problem<T>(found: impl Into<String>, why: impl Into<String>, fix: impl Into<String>) -> Result<T, CheckStop> {
    Err(CheckStop::Problem(CheckFinding {
        found: found.into(),
        why: why.into(),
        fix: fix.into(),
        repairs: Vec::new(),
    }))
}

/// Return a finding with this severity, which is lower than that of the check.
pub(crate) fn milder(
    severity: Severity,
    found: impl Into<String>,
    why: impl Into<String>,
    fix: impl Into<String>,
) -> CheckVerdict {
    match problem(found, why, fix) {
        Err(CheckStop::Problem(finding)) => Err(CheckStop::Milder(severity, finding)),
        other => other,
    }
}

/// Add the repairs to a finding. A verdict without a finding is returned unchanged.
pub(crate) fn repaired_by(verdict: CheckVerdict, repairs: Vec<Repair>) -> CheckVerdict {
    match verdict {
        Err(CheckStop::Problem(finding)) => Err(CheckStop::Problem(CheckFinding { repairs, ..finding })),
        Err(CheckStop::Milder(severity, finding)) => Err(CheckStop::Milder(severity, CheckFinding { repairs, ..finding })),
        other => other,
    }
}

/// Return [`CheckStop::Skip`]: the check does not apply.
pub(crate) fn skip<T>(reason: impl Into<String>) -> Result<T, CheckStop> {
    Err(CheckStop::Skip(reason.into()))
}

/// Return [`CheckStop::Blind`]: the facts could not be read.
pub(crate) fn blind<T>(reason: impl Into<String>) -> Result<T, CheckStop> {
    Err(CheckStop::Blind(reason.into()))
}

/// Return a number with its noun in the right form: `1 node`, `2 nodes`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}
