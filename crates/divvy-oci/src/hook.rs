//! The logic of an OCI hook, without input and output. It parses what the container runtime and the image provide, and computes
//! what to write. The program `divvy-hook` opens the files.
//!
//! - [`arguments`]: the command line
//! - [`compat`]: the drivers that an image's own libcuda supports
//! - [`libraries`]: names of libraries, and the list of directories that musl's loader searches
//! - [`params`]: driver parameters that stop the driver's libraries from creating device nodes
//! - [`profile`]: the GPUs that EGL sees
//! - [`soname`]: the name that programs use for a library
//! - [`state`]: the container's state and configuration

pub mod arguments;
pub mod compat;
pub mod libraries;
pub mod params;
pub mod profile;
pub mod soname;
pub mod state;
