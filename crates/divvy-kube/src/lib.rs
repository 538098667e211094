//! The connection to a cluster, and the conversion of Kubernetes objects to and from `divvy-model`.
//!
//! - [`client`]: chooses the cluster, from flags and kubeconfig files
//! - [`objects`]: slim forms of pods and nodes, with only the fields that Divvy reads
//! - [`convert`]: converts slim objects to values of `divvy-model`
//! - [`sites`]: converts slim objects to values of `divvy-why`
//! - [`list`]: lists objects once, for the command line
//! - [`look`]: lists the whole cluster once into a `Snapshot`, for `divvy why`
//! - [`watch`]: lists objects and then follows their changes, indefinitely
//! - [`index`]: applies changes of pods and nodes to the ledger; no I/O
//! - [`history`]: writes watch events as text, and reads them back; no I/O
//! - [`dump`]: reads the cluster from the output of `kubectl get`; no I/O
//! - [`explain`]: reaches the explainer, which answers `divvy why` for users who may not list pods and nodes
//! - [`events`]: publishes the events that users see in `kubectl describe`
//!
//! No other shipped crate reads Kubernetes objects, except that `divvy-why` evaluates selectors and tolerations in Kubernetes' own types.

#![forbid(unsafe_code)]

pub mod client;
pub mod convert;
mod error;
pub mod events;
pub mod list;
pub mod objects;
#[cfg(test)]
mod script;
pub mod slim;
pub mod watch;

pub use error::{Error, in_words};
