//! `divvy agent` as a separate program, for a node's image. An idle agent's memory consists mostly of the pages of its program,
//! and the complete `divvy` has more of them.
//!
//! It replaces one of NVIDIA's programs if it is started under that program's name.

use std::process::ExitCode;

use clap::Parser as _;

/// Run on a GPU node: find its GPUs, advertise them, and give each container its GPU (`divvy agent` as a separate program)
#[derive(Debug, clap::Parser)]
#[command(name = "divvy-agent", version)]
struct Cli {
    /// The arguments of `divvy agent`.
    #[command(flatten)]
    agent: divvy_agent::Args,
    /// Level of the log on standard error: error, warn, info, debug, or trace; or a level per module, such as divvy_agent=debug
    #[arg(long, env = "DIVVY_LOG", value_name = "FILTER")]
    log: Option<String>,
}

fn main() -> ExitCode {
    let name = std::env::args().next().unwrap_or_default();
    if let Some(program) = divvy_nvidia_config::NvidiaProgram::named(&name) {
        return divvy_agent::nvidia::main(program);
    }
    let Cli { agent, log } = Cli::parse();
    divvy_program::run(log.as_deref(), async {
        divvy_agent::main(agent).await.map(|()| 0).map_err(Into::into)
    })
}
