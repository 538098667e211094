//! `divvy extender` as a separate program, for development: it builds without the command line.

use std::process::ExitCode;

use clap::Parser as _;

/// Run alongside kube-scheduler: choose the node and the GPU of each pod
#[derive(Debug, clap::Parser)]
#[command(name = "divvy-extender", version)]
struct Cli {
    #[command(flatten)]
    args: divvy_extender::Args,
    /// Level of the log on standard error: error, warn, info, debug, or trace; or a level per module, such as divvy_extender=debug
    #[arg(long, env = "DIVVY_LOG", value_name = "FILTER")]
    log: Option<String>,
}

fn main() -> ExitCode {
    let Cli { args, log } = Cli::parse();
    divvy_program::run(log.as_deref(), async {
        divvy_extender::main(args).await.map(|()| 0).map_err(Into::into)
    })
}
