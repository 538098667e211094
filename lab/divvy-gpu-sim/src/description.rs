//! The machine description, which the environment names.

use std::env;
use std::path::{Path, PathBuf};

use divvy_model::machine::{MachineNode, Machines};

/// Why there is no machine to simulate.
// No `source`: the texts already contain the causes, and nothing prints a chain.
#[derive(Debug, thiserror::Error)]
pub enum DescriptionError {
    /// The environment names no description.
    #[error("DIVVY_NVML_SIM is not set; set it to the path of the machine description")]
    NotNamed,
    /// The file cannot be read.
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: std::io::Error },
    /// The file is no machine description.
    #[error("{}: {error}", path.display())]
    Malformed { path: PathBuf, error: divvy_model::Error },
    /// The description does not have the node that was asked for.
    #[error("{}: no node is named {name}", path.display())]
    UnknownNode { path: PathBuf, name: String },
    /// The description has no node.
    #[error("{}: no node is described", path.display())]
    NoNode { path: PathBuf },
    /// The node has a GPU that cannot exist.
    #[error("GPU {index} of {node}: {what}")]
    Gpu { node: String, index: usize, what: BadGpu },
    /// The environment names a version of CUDA that cannot exist.
    #[error("DIVVY_CUDA_SIM_VERSION is {0:?}; write it like \"12.4\"")]
    CudaVersion(String),
}

/// What is wrong with a described GPU.
#[derive(Debug, thiserror::Error)]
pub enum BadGpu {
    /// Its address cannot be parsed.
    #[error("{0:?} is not a PCI bus id such as \"0000:81:00.0\"")]
    Pci(String),
    /// Its compute capability cannot be parsed.
    #[error("cc {0:?} is not a compute capability like \"8.0\"")]
    ComputeCapability(String),
    /// Its fabric's cluster cannot be parsed.
    #[error("cluster {0:?} is not a UUID")]
    Cluster(String),
    /// One of its MIG devices has no profile.
    #[error("the MIG device {0} has no known profile")]
    MigProfile(usize),
}

/// Return the path of the description.
pub fn path() -> Result<PathBuf, DescriptionError> {
    env::var_os("DIVVY_NVML_SIM")
        .map(PathBuf::from)
        .ok_or(DescriptionError::NotNamed)
}

/// Return the name of this process's node; `None` means the first node.
pub fn node_name() -> Option<String> {
    env::var("DIVVY_NVML_SIM_NODE").ok()
}

/// Read a description, and return the node with this name, or the first.
pub fn read(path: &Path, node: Option<&str>) -> Result<MachineNode, DescriptionError> {
    let of = || path.to_owned();
    let text = std::fs::read_to_string(path).map_err(|error| DescriptionError::File { path: of(), error })?;
    let machines = Machines::parse(&text).map_err(|error| DescriptionError::Malformed { path: of(), error })?;
    let found = match node {
        Some(name) => machines.node(name),
        None => machines.nodes.first(),
    };
    found.cloned().ok_or_else(|| match node {
        Some(name) => DescriptionError::UnknownNode {
            path: of(),
            name: name.to_owned(),
        },
        None => DescriptionError::NoNode { path: of() },
    })
}
