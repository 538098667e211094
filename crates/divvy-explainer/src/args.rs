//! The flags of `divvy explainer`.

use std::net::SocketAddr;

use divvy_model::MemoryUnit;
use divvy_program::ContextArgs;
use divvy_program::values::namespaced;

use crate::{ExplainerConfig, ExplainerSettings};

/// Run in the cluster: answer `divvy why` for users who may not list nodes and pods
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  divvy explainer --listen 0.0.0.0:32767
  divvy explainer --listen 0.0.0.0:32767 --configmap kube-public/divvy

`divvy why` requires permission to list nodes and pods. For a user without that permission it calls this program, through the API server's service proxy. The program lists \
nodes and pods with its own permissions, and answers a user who may get the pod in question (TokenReview and SubjectAccessReview). It names no pod that the user may not list.

`divvy why` finds this program through the ConfigMap (--configmap). The key `service` of the ConfigMap is NAMESPACE/SERVICE:PORT of this program. The program adds `tls.crt`, the certificate by which `divvy why` \
recognizes it. The program creates that certificate when it starts, so run one replica. The Helm chart contains all the objects; explainer.enabled=false omits them.")]
pub struct Args {
    #[command(flatten)]
    pub cluster: ContextArgs,
    /// The address and port to listen on
    #[arg(long, env = "DIVVY_LISTEN", value_name = "ADDR:PORT", default_value = "127.0.0.1:32767")]
    pub listen: SocketAddr,
    /// Size of one unit of aliyun.com/gpu-mem, for clusters whose agents do not publish it
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT", default_value = "GiB")]
    pub memory_unit: MemoryUnit,
    /// The ConfigMap through which `divvy why` finds this program
    #[arg(long, env = "DIVVY_EXPLAINER_CONFIGMAP", value_name = "NAMESPACE/NAME", default_value = "kube-public/divvy", value_parser = namespaced)]
    pub configmap: (String, String),
    /// End when standard input is closed, so that the explainer does not outlive the program that started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

impl From<Args> for ExplainerConfig {
    fn from(args: Args) -> ExplainerConfig {
        ExplainerConfig {
            kubeconfig: args.cluster.kubeconfig,
            context: args.cluster.context,
            listen: args.listen,
            settings: ExplainerSettings {
                memory_unit: args.memory_unit,
                configmap: args.configmap,
            },
        }
    }
}
