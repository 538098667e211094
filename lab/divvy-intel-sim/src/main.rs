//! `divvy-intel-sim ROOT NODE MACHINES`: write the files of a node's Intel GPUs below a directory, for the scripts of the real cluster.

use std::path::PathBuf;

use anyhow::Context as _;
use divvy_model::machine::Machines;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(root), Some(node), Some(file), None) = (arguments.next(), arguments.next(), arguments.next(), arguments.next())
    else {
        anyhow::bail!("usage: divvy-intel-sim ROOT NODE MACHINES");
    };
    let file = PathBuf::from(file);
    let text = std::fs::read_to_string(&file).with_context(|| format!("{} cannot be read", file.display()))?;
    let machines = Machines::parse(&text).with_context(|| file.display().to_string())?;
    let node = node.to_string_lossy();
    let node = machines
        .node(&node)
        .with_context(|| format!("{} has no node {node}", file.display()))?;
    let root = PathBuf::from(root);
    divvy_intel_sim::describe(&root, &node.intel).with_context(|| format!("the files below {} cannot be written", root.display()))
}
