//! The table that nvidia-smi prints, as a pure function of what was read from a machine's GPUs ([`Smi`]), and a list of the pods of the processes.
//!
//! ```text
//! Smi ── table() ──┬─ gpus.rs       the GPUs, by the driver's version in one of eight editions (edition.rs)
//!                  ├─ mig.rs        the MIG devices, if a GPU has MIG enabled
//!                  ├─ processes.rs  the processes
//!                  └─ pods.rs       which pod each process belongs to; nvidia-smi does not have this list
//! ```
//!
//! For the same values, the text up to the processes has the same bytes as nvidia-smi's. NVIDIA does not document the table: the tests compare it
//! with tables that people published, from the drivers 460 to 610.

#![forbid(unsafe_code)]

mod cell;
mod edition;
mod gpus;
mod mig;
mod pods;
mod processes;
mod value;

pub use value::{
    Ecc, Instances, LOST, MigEngines, ProcessPod, ProcessType, Reading, Smi, SmiComputeMode, SmiGpu, SmiMemory, SmiMigDevice,
    SmiProcess,
};

use edition::Edition;

/// Return the table. Each line ends with a newline.
///
/// Each line of the table has the width of the driver's edition. The lines above the table have any width: the time, and one line for each GPU that the driver
/// cannot open. If the driver cannot open any GPU, only these lines are printed.
pub fn table(smi: &Smi) -> String {
    let edition = Edition::of(&smi.driver);
    let mut out = String::new();
    gpus::without_handle(&mut out, smi, edition);
    if smi.is_without_handles() {
        return out;
    }
    // The time of asctime(3) and seven spaces.
    out.push_str(&format!("{:<31}\n", cell::printable(&smi.time)));
    gpus::draw(&mut out, smi, edition);
    mig::draw(&mut out, smi, edition);
    out.push_str(&edition.gap());
    processes::draw(&mut out, smi, edition);
    pods::draw(&mut out, smi, edition);
    out
}
