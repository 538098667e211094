//! What an OCI hook reads in a container's image and of its runtime, and what it makes of it: as values, for the program that opens the files.
//!
//! - [`arguments`]: the command line
//! - [`compat`]: for which drivers an image's own libcuda is made
//! - [`libraries`]: names of libraries, and the list of folders of musl's loader
//! - [`params`]: the driver's parameters, with which its libraries make no device nodes
//! - [`profile`]: which GPUs EGL sees
//! - [`soname`]: the name by which programs ask for a library
//! - [`state`]: the container's state, and its configuration

pub mod arguments;
pub mod compat;
pub mod libraries;
pub mod params;
pub mod profile;
pub mod soname;
pub mod state;
