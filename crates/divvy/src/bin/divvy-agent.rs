//! `divvy agent` as a separate program, which the node image runs. Most of an idle agent's memory is the pages of its program, and the
//! program `divvy` is much larger.

use std::process::ExitCode;

use clap::Parser as _;
use divvy::cli::AgentCli;

fn main() -> ExitCode {
    let AgentCli { agent, log } = AgentCli::parse();
    divvy::program::run(log.as_deref(), async { divvy::commands::agent::run(agent).await.map(|()| 0) })
}
