//! Modules: what a program loads, and what the driver's compiler says of it.

use std::sync::Arc;

use divvy_ptx::{EntryCode as Found, Kernel, Module};

use crate::codes::{CuCode, INVALID_PTX, NOT_FOUND};

/// A module that is loaded.
#[derive(Debug, Clone)]
pub(crate) enum LoadedModule {
    /// PTX, which is executed.
    Ptx(Arc<Module>),
    /// Other code, which is not read: it has each function, and a launch only takes time.
    Unread,
}

/// A function of a module.
#[derive(Debug, Clone)]
pub(crate) struct ModuleFunction {
    pub(crate) name: Arc<str>,
    /// How long a launch takes, in nanoseconds, in addition to what the code does.
    pub(crate) length: u64,
    /// The code, if it is executed.
    pub(crate) kernel: Option<Arc<Kernel>>,
}

/// Whether code is executed at all (`DIVVY_CUDA_SIM_CODE`).
fn is_read() -> bool {
    std::env::var_os("DIVVY_CUDA_SIM_CODE").is_none_or(|value| value != "unread")
}

/// Compile PTX as a driver of this CUDA version does for a GPU of this compute capability. An error has the text of the compiler's log.
pub(crate) fn compile(text: &str, cuda: i32, gpu: u32) -> Result<LoadedModule, (CuCode, String)> {
    if !is_read() {
        return Ok(LoadedModule::Unread);
    }
    // A kernel whose name says how long it takes is not executed.
    let module = Module::parse(text, |name| named_length(name).is_some()).map_err(|error| {
        (
            INVALID_PTX,
            format!(
                "ptxas application ptx input, line {}; fatal : {}: {}",
                error.line, error.why, error.text
            ),
        )
    })?;
    match module.check(cuda, gpu) {
        Ok(()) => Ok(LoadedModule::Ptx(Arc::new(module))),
        Err(refusal) => Err((refusal.code(), format!("ptxas fatal : {refusal}"))),
    }
}

impl LoadedModule {
    /// Find a function.
    pub(crate) fn function(&self, name: &str) -> Result<ModuleFunction, CuCode> {
        let kernel = match self {
            LoadedModule::Unread => None,
            LoadedModule::Ptx(module) => match module.entries.get(name).ok_or(NOT_FOUND)? {
                Found::Kernel(kernel) => Some(Arc::clone(kernel)),
                Found::Unread => None,
            },
        };
        Ok(ModuleFunction {
            name: name.into(),
            length: length_of(name),
            kernel,
        })
    }
}

/// Return how long a launch of a kernel takes by its name: `anything_2000ns` takes 2000 ns. Such a kernel is not executed.
fn named_length(name: &str) -> Option<u64> {
    let (_, digits) = name.strip_suffix("ns")?.rsplit_once('_')?;
    digits.parse().ok()
}

/// Return how long a launch of a kernel of this name takes: what the name says, or DIVVY_CUDA_SIM_KERNEL_NS, or nothing.
fn length_of(name: &str) -> u64 {
    let usual = || std::env::var("DIVVY_CUDA_SIM_KERNEL_NS").ok()?.parse().ok();
    named_length(name).or_else(usual).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_kernel_can_say_how_long_it_takes() {
        for (name, length) in [("gemm_2000ns", 2000), ("_Z4busy_7ns", 7), ("ns", 0), ("x_ns", 0), ("gemm", 0)] {
            assert_eq!(length_of(name), length, "{name}");
        }
    }
}
