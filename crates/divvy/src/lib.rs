//! The library behind the `divvy` and `divvy-agent` programs: command-line grammar, wiring, and printing.
//!
//! - [`cli`]: the command-line grammar
//! - [`commands`]: one module per command, which turns parsed arguments into actions
//! - [`audit`]: what `divvy audit` prints
//! - [`inspect`], [`why`]: the values that these commands print, and their text
//! - [`jsonpath`]: kubectl's `-o jsonpath=` and `--sort-by`
//! - [`simulate`]: runs of the simulator, with their tables
//! - [`scheduler_config`]: the text of kube-scheduler's configuration for the extender
//! - [`version`]: the versions of Divvy's programs in a cluster
//! - [`uninstall`]: the objects of Divvy in a cluster, and the plan to remove them
//! - [`printer`]: the only writer to standard output

#![forbid(unsafe_code)]

pub mod audit;
pub mod cli;
pub mod commands;
pub mod inspect;
pub mod jsonpath;
pub mod node_sums;
pub mod printer;
pub mod scheduler_config;
pub mod simulate;
pub mod uninstall;
pub mod version;
pub mod why;
