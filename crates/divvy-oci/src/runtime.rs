//! The decisions of an OCI runtime that wraps runc or crun: which of its calls create a container, what that container requests,
//! and how the container's `config.json` changes.
//!
//! - [`call`]: the command line, parsed as runc and crun parse it
//! - [`devices`]: the change to a container's configuration
//! - [`settings`]: the settings in NVIDIA's `config.toml`
//! - [`edit`]: changes to the text of that file
//! - [`request`]: the devices that a container requests by annotation, mount, or environment variable
//! - [`require`]: the driver that an image requires
//! - [`plan`]: the source of a container's devices, and the edits of the container's configuration
//! - [`extras`]: what a container requests besides GPUs
//! - [`live`]: CDI specs that are generated when a container is created
//! - [`legacy`]: the arguments of `nvidia-container-cli`
//! - [`bundle`]: a `config.json` that is edited in place: everything that is not edited stays the same, byte for byte
//!
//! The behavior follows NVIDIA's Container Toolkit 1.20.0 (<https://github.com/NVIDIA/nvidia-container-toolkit>) and the CDI
//! specification 1.1.0 (<https://github.com/cncf-tags/container-device-interface>). Where the code differs from them on purpose,
//! a comment says so.

pub mod bundle;
pub mod call;
pub mod devices;
pub mod edit;
pub mod extras;
pub mod legacy;
pub mod live;
pub mod plan;
pub mod request;
pub mod require;
pub mod settings;
