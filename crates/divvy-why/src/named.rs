use serde::{Deserialize, Serialize};

/// Which pods an answer may name, besides the pod that it is about.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NamedPods {
    /// All pods.
    #[default]
    All,
    /// The pods of this namespace.
    Of(String),
    /// No other pod.
    None,
}

impl NamedPods {
    /// Report whether pods of a namespace may be named.
    pub(crate) fn shows(&self, namespace: &str) -> bool {
        match self {
            NamedPods::All => true,
            NamedPods::Of(own) => own == namespace,
            NamedPods::None => false,
        }
    }

    /// Return the text that replaces a hidden name.
    pub(crate) fn stranger(&self) -> &'static str {
        match self {
            NamedPods::All | NamedPods::Of(_) => "a pod of another namespace",
            NamedPods::None => "another pod",
        }
    }
}
