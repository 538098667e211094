//! A row of a screen.

use divvy_view::amounts::Amounts;

/// What a row is about. It stays the same when the cluster is read again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Of {
    Node,
    /// The GPU's position among those of the node.
    Gpu(usize),
    /// A pod, by its UID, and the GPU's position.
    Pod(String, usize),
    /// A container of a pod, and the GPU's position.
    Container(String, usize),
    /// A pod on the node that has no GPU yet, or whose GPU the kubelet chose: namespace and name.
    Elsewhere(String),
    /// A pod that waits for GPUs: namespace and name.
    Waiting(String),
    /// A line of a text, by its number.
    Line(usize),
}

/// A row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TopRow {
    pub(crate) node: String,
    pub(crate) of: Of,
    pub(crate) indent: usize,
    pub(crate) name: String,
    /// `None` for a row about something that is on no GPU.
    pub(crate) amounts: Option<Amounts>,
    pub(crate) text: String,
    /// For how many seconds the pod, or the oldest pod of a node or a GPU, has existed.
    pub(crate) age: Option<u64>,
    /// Whether something is wrong.
    pub(crate) alarm: bool,
}

/// Return a time as its largest unit.
pub(crate) fn time(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86400),
    }
}
