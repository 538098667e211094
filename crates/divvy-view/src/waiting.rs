use serde::Serialize;

/// A pod that waits for GPUs, with the answer of `divvy why` in short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitingPod {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// For how many seconds it has waited. `None` if its creation time is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u64>,
    /// Why it waits: a sentence.
    pub why: String,
    /// What would let it start, the best suggestion first: sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub help: Vec<String>,
}

impl WaitingPod {
    /// Return the namespace and the name: `ml/train`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}
