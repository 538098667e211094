//! The kubelet's device plugin API v1beta1 from the plugin's side, its checkpoint and podresources.
//!
//! Stands alone: knows nothing of GPUs, nor of anything else that a device may be.
//!
//! * [`plugin`]: a [`Plugin`](plugin::Plugin) says what an extended resource does; a
//!   [`PluginServer`](plugin::PluginServer) keeps it registered, whatever the kubelet does.
//! * [`checkpoint`]: which container holds which device, from the kubelet's own file, by pod UID.
//! * [`podresources`]: the same from the kubelet's socket, by pod name.
//! * [`api`]: the generated messages, clients and servers below all of them.

pub mod api;
pub mod checkpoint;
mod error;
pub mod plugin;
pub mod podresources;

pub use error::Error;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
