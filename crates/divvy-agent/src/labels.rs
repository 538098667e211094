//! The labels that describe a node's GPUs: what the machine says, and how labels get to the node.

mod describe;
mod feature_file;
mod node;
mod publish;
mod seen;

pub use describe::{DescribedHost, plain_labels};
pub(crate) use feature_file::FeatureFile;
pub use node::NodeLabels;
pub(crate) use publish::publish;
pub(crate) use seen::SeenGpus;
