//! The divvy program: grammar, wiring, printing.
//!
//! - [`cli`]: the grammar
//! - [`commands`]: one module per command, from parsed arguments to actions
//! - [`audit`]: what a history of the cluster shows, in words, and where it is read from
//! - [`inspect`], [`why`]: what the tables show, as values, and their text
//! - [`jsonpath`]: kubectl's `-o jsonpath=` and `--sort-by`
//! - [`simulate`]: runs of the simulator, their tables and their report
//! - [`scheduler_config`]: what kube-scheduler must be told, as text
//! - [`manifests`]: the Helm chart, rendered without Helm
//! - [`version`]: which version of Divvy is where
//! - [`uninstall`]: what of Divvy is in a cluster, and what is to be removed
//! - [`program`]: from parsed arguments to an exit status, for `divvy` and for `divvy-agent`
//! - [`printer`]: the only writer to standard output

#![forbid(unsafe_code)]

pub mod audit;
pub mod cli;
pub mod commands;
pub mod inspect;
pub mod jsonpath;
pub mod manifests;
pub mod printer;
pub mod program;
pub mod scheduler_config;
pub mod simulate;
pub mod sums;
pub mod uninstall;
pub mod version;
pub mod why;
