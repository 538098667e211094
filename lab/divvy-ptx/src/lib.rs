//! Runs PTX on the processor: the text of a kernel is read, checked, and executed on simulated memory, so that a wrong kernel fails in a test without a
//! GPU. The reference is NVIDIA's "PTX ISA"; its chapters are named where a rule comes from.
//!
//! What this crate does not know is an error with its line, and never skipped. The blocks of a grid run one after the other. The threads of a block run
//! one after the other up to a barrier, then all of them up to the next one. [`ThreadOrder`] turns the order around: a kernel without a barrier that it needs
//! gives another result in at least one order.
//!
//! # Simplifications
//!
//! - Registers and shared memory that were not written contain a pattern. On a GPU they contain anything.
//! - A variable must have a type that agrees with that of the instruction, as ptxas demands. Only loads and stores may use wider registers.
//! - `%globaltimer` advances by a microsecond with each read by a thread, and else stands still. `%clock` and `%clock64` count instructions.
//! - There are no generic addresses (PTX ISA, "Generic Addressing"): an instruction that uses memory names the state space.
//! - Rounding is to the nearest even number; subnormal numbers are kept.

mod decode;
mod instruction;
mod mma;
mod ops;
mod parse;
mod run;
mod statement;
mod token;
mod types;
mod version;

use std::collections::BTreeMap;

pub use instruction::{Kernel, Parameter};
pub use run::{DeviceMemory, KernelFault, KernelLaunch, KernelOutcome, ThreadOrder};
pub use version::{ModuleRefusal, PtxVersion};

/// A text that is not PTX, or has something that this crate does not know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}: {text}")]
pub struct Error {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong.
    pub why: String,
    /// The line itself.
    pub text: String,
}

/// What a module has under the name of an entry.
#[derive(Debug, Clone)]
pub enum EntryCode {
    /// A kernel that can be run.
    Kernel(std::sync::Arc<Kernel>),
    /// A kernel whose body was not read, because the reader of the module wanted only its name.
    Unread,
}

/// A module.
#[derive(Debug, Clone)]
pub struct Module {
    /// The version of PTX in which it is written.
    pub version: PtxVersion,
    /// The least compute capability that it needs: 86 for 8.6.
    pub target: u32,
    /// The kernels by name.
    pub entries: BTreeMap<String, EntryCode>,
}

impl Module {
    /// Read a module. The bodies of the entries for which `unread` returns true are not read.
    pub fn parse(text: &str, unread: impl Fn(&str) -> bool) -> Result<Module, Error> {
        parse::module(text, &unread)
    }

    /// Return the kernel with this name, if the module has one whose body was read.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        match self.entries.get(name)? {
            EntryCode::Kernel(kernel) => Some(kernel),
            EntryCode::Unread => None,
        }
    }
}
