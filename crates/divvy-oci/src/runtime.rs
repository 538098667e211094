//! What an OCI runtime that stands in front of runc or crun decides: which of its calls create a container, what that container asks for,
//! and what its `config.json` becomes.
//!
//! - [`call`]: the command line as runc and crun read it
//! - [`settings`]: NVIDIA's `config.toml`, read unchanged
//! - [`edit`]: that file as a text, with settings set
//! - [`request`]: which devices a container asks for, by annotation, mount or environment
//! - [`require`]: what an image requires of the driver
//! - [`plan`]: what decides about its devices, and the edits of its configuration
//! - [`extras`]: what it asks for beside GPUs
//! - [`live`]: CDI specs that are made when a container is created
//! - [`legacy`]: what `nvidia-container-cli` is called with
//! - [`bundle`]: a `config.json` that is edited in place: what is not touched stays as it was, to the byte
//!
//! Sources: research of NVIDIA's Container Toolkit 1.20.0 and of the CDI specification 1.1.0; the differences that are meant are named where
//! they are made.

pub mod bundle;
pub mod call;
pub mod edit;
pub mod extras;
pub mod legacy;
pub mod live;
pub mod plan;
pub mod request;
pub mod require;
pub mod settings;
