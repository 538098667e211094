//! The kubelet's device plugin API v1beta1 from the plugin's side, its checkpoint and podresources.
//!
//! Stands alone: knows nothing of GPUs.

pub mod api;
