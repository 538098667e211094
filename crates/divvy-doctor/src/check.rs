//! What a check is.

use serde::Serialize;

use crate::Facts;

/// How bad it is when a check finds something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know; nothing fails for it.
    Info,
    /// Something will fail, or is slower or less safe than it seems.
    Warning,
    /// Containers get no GPU, or the wrong one.
    Error,
}

/// The links of the chain, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// The GPU, the kernel's module, NVML.
    Driver,
    /// Device nodes.
    Nodes,
    /// The driver's libraries.
    Libraries,
    /// CDI specs.
    Cdi,
    /// The container engine and its configuration.
    Engine,
    /// The kubelet and what is registered with it.
    Kubelet,
    /// Nodes, scheduler, extender.
    Cluster,
    /// Pods.
    Pods,
}

impl Group {
    /// The heading.
    pub fn title(self) -> &'static str {
        match self {
            Group::Driver => "Driver",
            Group::Nodes => "Device nodes",
            Group::Libraries => "Driver libraries",
            Group::Cdi => "CDI specs",
            Group::Engine => "Container engine",
            Group::Kubelet => "Kubelet",
            Group::Cluster => "Cluster",
            Group::Pods => "Pods",
        }
    }
}

/// Where the facts of a check come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// This machine.
    Node,
    /// The API server.
    Cluster,
    /// One of the two is enough.
    Either,
}

/// One check.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    /// `D01`: by this it is asked for and talked about; never given to another check.
    pub id: &'static str,
    /// What holds when it passes.
    pub title: &'static str,
    /// Its place in the chain.
    pub group: Group,
    /// How bad it is at worst.
    pub severity: Severity,
    /// Whom to ask.
    pub needs: Needs,
    /// The check itself.
    pub run: fn(&Facts<'_>) -> Verdict,
}

/// `Ok`: it holds, and this was found.
pub type Verdict = Result<String, Stop>;

/// It does not hold, does not apply, or could not be looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// As bad as the check can be.
    Problem(Finding),
    /// Less bad than that.
    Milder(Severity, Finding),
    /// It does not apply here, or nobody asked for it: the reason.
    Skip(String),
    /// It applies, and could not be looked at: the reason, such as a right that is missing or an answer that did not come.
    Blind(String),
}

/// What is wrong.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Finding {
    /// What is there.
    pub found: String,
    /// Why it matters, with the error text by which users know it.
    pub why: String,
    /// What to type next.
    pub fix: String,
    /// The same, for `--fix`; empty where only a person can decide.
    pub repairs: Vec<Repair>,
}

/// What can be put right without harm and without a decision.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase", tag = "do")]
pub enum Repair {
    /// Make a folder.
    Folder {
        /// Where.
        path: String,
    },
    /// Make a symbolic link.
    Link {
        /// Where.
        path: String,
        /// What it says.
        target: String,
    },
    /// Make a CDI spec again.
    Spec {
        /// Its file.
        path: String,
        /// `nvidia`, `amd`, `intel`
        vendor: String,
        /// Where the driver's files are.
        driver_root: String,
    },
}

/// It does not hold.
pub(crate) fn problem(found: impl Into<String>, why: impl Into<String>, fix: impl Into<String>) -> Verdict {
    Err(Stop::Problem(Finding {
        found: found.into(),
        why: why.into(),
        fix: fix.into(),
        repairs: Vec::new(),
    }))
}

/// It does not hold, and that is no more than this.
pub(crate) fn milder(severity: Severity, found: impl Into<String>, why: impl Into<String>, fix: impl Into<String>) -> Verdict {
    match problem(found, why, fix) {
        Err(Stop::Problem(finding)) => Err(Stop::Milder(severity, finding)),
        other => other,
    }
}

/// The same, and this puts it right.
pub(crate) fn repaired_by(verdict: Verdict, repairs: Vec<Repair>) -> Verdict {
    match verdict {
        Err(Stop::Problem(finding)) => Err(Stop::Problem(Finding { repairs, ..finding })),
        Err(Stop::Milder(severity, finding)) => Err(Stop::Milder(severity, Finding { repairs, ..finding })),
        other => other,
    }
}

/// It does not apply.
pub(crate) fn skip<T>(reason: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Skip(reason.into()))
}

/// It could not be looked at.
pub(crate) fn blind<T>(reason: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Blind(reason.into()))
}

/// `1 node`, `2 nodes`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}
