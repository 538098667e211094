//! Kubernetes objects to and from the model.
//!
//! - [`client`]: which cluster, from flags and kubeconfig files
//! - [`objects`]: the slim forms in which pods and nodes are read: only the fields that Divvy looks at
//! - [`convert`]: slim objects to values of `divvy-model`
//! - [`sites`]: slim objects to values of `divvy-why`
//! - [`list`]: one look at the cluster
//! - [`look`]: the same for `divvy why`: the cluster as a `Snapshot`
//! - [`watch`]: a list and its changes, for ever
//! - [`index`]: pods and nodes to the ledger; no I/O
//! - [`history`]: what was watched, as text, and back; no I/O
//! - [`dump`]: one look at the cluster, as kubectl wrote it down; no I/O
//! - [`explain`]: how users who may not look have the extender look
//! - [`events`]: what users see in `kubectl describe`
//!
//! No other crate that is shipped reads a Kubernetes object; `divvy-why` evaluates selectors and tolerations in Kubernetes' own types.

#![forbid(unsafe_code)]

pub mod client;
pub mod convert;
pub mod dump;
mod error;
pub mod events;
pub mod explain;
pub mod history;
pub mod index;
pub mod list;
pub mod look;
pub mod objects;
#[cfg(test)]
mod script;
pub mod sites;
pub mod watch;

pub use error::{Error, in_words};
