//! The plugin's side of the kubelet's device plugin API v1beta1, and a reader of the kubelet's checkpoint.
//!
//! This crate does not depend on the rest of Divvy. It knows nothing about GPUs or about any other meaning of a device.
//!
//! * [`plugin`]: a [`Plugin`](plugin::Plugin) implements an extended resource; a [`PluginServer`](plugin::PluginServer) keeps it
//!   registered, even when the kubelet restarts or fails.
//! * [`checkpoint`]: which container (by pod UID) holds which device, from the kubelet's own file.
//! * [`api`]: the generated messages, clients, and servers that the other modules use.
//! * [`AnyAuthority`]: a connection on which clients may send any authority.

pub mod api;
mod authority;
pub mod checkpoint;
mod error;
pub mod plugin;

pub use authority::AnyAuthority;
pub use error::Error;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
