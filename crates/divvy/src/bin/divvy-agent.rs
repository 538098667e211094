//! `divvy agent` as a program of its own, which a node's image runs: an idle agent's memory is mostly its program's pages, and these would be
//! those of all of `divvy`.

use std::process::ExitCode;

use clap::Parser as _;
use divvy::cli::AgentCli;

fn main() -> ExitCode {
    let AgentCli { agent, log } = AgentCli::parse();
    divvy::program::run(log.as_deref(), async { divvy::commands::agent::run(agent).await.map(|()| 0) })
}
