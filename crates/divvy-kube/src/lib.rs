//! Kubernetes objects to and from the model.
//!
//! - [`client`]: which cluster, from flags and kubeconfig files
//! - [`objects`]: the slim forms in which pods and nodes are read: only the fields that Divvy looks at
//! - [`convert`]: slim objects to values of `divvy-model`
//! - [`list`]: one look at the cluster
//! - [`watch`]: a list and its changes, for ever
//! - [`slim`]: how lists and watches parse objects into those slim forms
//! - [`events`]: what users see in `kubectl describe`
//!
//! No other crate that is shipped reads a Kubernetes object; `divvy-why` evaluates selectors and tolerations in Kubernetes' own types.

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
