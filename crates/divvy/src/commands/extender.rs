//! `divvy extender`.

use divvy_extender::Config;

use crate::cli::{ClusterArgs, ExtenderArgs};

/// Runs the extender until it is told to stop.
pub async fn run(args: ExtenderArgs) -> anyhow::Result<()> {
    let stopped = super::until_stopped(args.exit_with_stdin)?;
    let ClusterArgs { kubeconfig, context } = args.cluster;
    let config = Config {
        kubeconfig,
        context,
        listen: args.listen,
        memory_unit: args.memory_unit,
    };
    Ok(divvy_extender::run(config, stopped).await?)
}
