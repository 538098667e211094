//! The connection to a cluster, and the conversion of Kubernetes objects to and from `divvy-model`.
//!
//! - [`client`]: chooses the cluster, from flags and kubeconfig files
//! - [`caller`]: who a user is, and what the user may do
//! - [`objects`]: slim forms of pods and nodes, with only the fields that Divvy reads
//! - [`convert`]: converts slim objects to values of `divvy-model`
//! - [`list`]: lists objects once, for the command line
//! - [`watch`]: lists objects and then follows their changes, indefinitely
//! - [`slim`]: parses the objects of lists and watches into the slim forms
//! - [`events`]: publishes the events that users see in `kubectl describe`
//!
//! No other shipped crate reads Kubernetes objects, except that `divvy-why` evaluates selectors and tolerations in Kubernetes' own types.

#![forbid(unsafe_code)]

pub mod caller;
pub mod client;
pub mod convert;
mod error;
pub mod events;
mod in_words;
pub mod list;
pub mod objects;
#[cfg(test)]
mod script;
pub mod slim;
mod unanswered;
pub mod watch;

pub use error::Error;
pub use in_words::in_words;
