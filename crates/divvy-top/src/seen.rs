//! What the rows of a screen depend on.

use std::collections::BTreeMap;

use divvy_model::usage::Usage;
use divvy_view::{NoUsage, View, WaitingPod};

/// What a screen is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Screen {
    Cluster,
    Pods,
    Node(String),
    /// A pod, by its UID.
    Pod(String),
    /// The pods that wait for GPUs.
    Waiting,
    /// Why one pod waits, by its namespace and name.
    Why(String),
}

/// The order of the rows. Except by name, the largest comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    Name,
    Allocated,
    Used,
    Busy,
    Waste,
    Age,
}

impl Sort {
    pub(crate) fn next(self) -> Sort {
        match self {
            Sort::Name => Sort::Allocated,
            Sort::Allocated => Sort::Used,
            Sort::Used => Sort::Busy,
            Sort::Busy => Sort::Waste,
            Sort::Waste => Sort::Age,
            Sort::Age => Sort::Name,
        }
    }

    pub(crate) fn word(self) -> &'static str {
        match self {
            Sort::Name => "name",
            Sort::Allocated => "alloc",
            Sort::Used => "used",
            Sort::Busy => "busy",
            Sort::Waste => "waste",
            Sort::Age => "age",
        }
    }
}

/// What an agent answered last, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReceivedUsage {
    pub(crate) at: u64,
    pub(crate) usage: Result<Usage, NoUsage>,
}

/// What was read of the cluster, and which part of it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SeenCluster {
    /// `None` until the cluster was read.
    pub(crate) view: Option<View>,
    /// When it was read, in seconds since 1970.
    pub(crate) at: u64,
    /// `None` until the waiting pods were read, which happens only while a screen shows them.
    pub(crate) waiting: Option<Vec<WaitingPod>>,
    /// The width of the terminal, to which sentences are wrapped.
    pub(crate) columns: u16,
    pub(crate) answers: BTreeMap<String, ReceivedUsage>,
    /// The screens from the first one to the current one.
    pub(crate) screens: Vec<Screen>,
    pub(crate) filter: String,
    pub(crate) sort: Sort,
    pub(crate) tree: bool,
}

impl Default for SeenCluster {
    fn default() -> SeenCluster {
        SeenCluster {
            view: None,
            at: 0,
            waiting: None,
            columns: 80,
            answers: BTreeMap::new(),
            screens: vec![Screen::Cluster],
            filter: String::new(),
            sort: Sort::Name,
            tree: false,
        }
    }
}

impl SeenCluster {
    pub(crate) fn screen(&self) -> &Screen {
        self.screens.last().unwrap_or(&Screen::Cluster)
    }

    pub(crate) fn usage(&self, node: &str) -> Option<&Usage> {
        self.answers.get(node)?.usage.as_ref().ok()
    }

    /// Return why a node's usage could not be read.
    pub(crate) fn failure(&self, node: &str) -> Option<&NoUsage> {
        self.answers.get(node)?.usage.as_ref().err()
    }

    /// Return when a node's usage was read.
    pub(crate) fn measured_at(&self, node: &str) -> Option<u64> {
        self.answers.get(node).map(|answer| answer.at)
    }

    /// Return the waiting pod with this namespace and name.
    pub(crate) fn waiting_pod(&self, key: &str) -> Option<&WaitingPod> {
        self.waiting.iter().flatten().find(|pod| pod.full_name() == key)
    }

    pub(crate) fn has(&self, node: &str) -> bool {
        self.view
            .as_ref()
            .is_some_and(|view| view.nodes.binary_search_by(|of| of.name.as_str().cmp(node)).is_ok())
    }
}
