use thiserror::Error;

/// Why it is not known what is used on a node.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NoUsage {
    /// The user may not ask agents.
    #[error("no right to {right}")]
    Forbidden {
        /// The missing right: `get pods/proxy in the namespace divvy-system`.
        right: String,
    },
    /// It is not known where Divvy is installed.
    #[error("the agents' namespace is not known")]
    Unclear {
        /// Why, as a part of a sentence.
        why: String,
    },
    /// Anything else, in a few words.
    #[error("{0}")]
    Other(String),
}

impl NoUsage {
    /// Return a sentence for the user that is about all nodes.
    pub fn notice(&self) -> Option<String> {
        match self {
            NoUsage::Forbidden { right } => Some(format!(
                "USED and BUSY are not known: you lack the right to {right}; ask an administrator for it"
            )),
            NoUsage::Unclear { why } => Some(format!("USED and BUSY are not known: {why}")),
            NoUsage::Other(_) => None,
        }
    }
}
