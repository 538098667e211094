//! `divvy explainer`: runs the explainer.

use divvy_explainer::{Config, Settings};

use crate::cli::{ContextArgs, ExplainerArgs};

/// Run the explainer until SIGTERM or SIGINT arrives.
pub async fn run(args: ExplainerArgs) -> anyhow::Result<()> {
    let stopped = super::until_stopped(args.exit_with_stdin)?;
    let ContextArgs { kubeconfig, context } = args.cluster;
    let config = Config {
        kubeconfig,
        context,
        listen: args.listen,
        settings: Settings {
            memory_unit: args.memory_unit,
            configmap: args.configmap,
        },
    };
    Ok(divvy_explainer::run(config, stopped).await?)
}
