//! `divvy-smoke` proves that a GPU computes: it runs kernels through CUDA's driver, and compares every byte of their results.
//!
//! The process that the user starts (`parent`) finds the driver's library (`find`), and starts the program again as a child (`worker`)
//! that can load it. The child makes all calls of the driver, which may hang or crash. Before each call it writes the call's name to a page that
//! the parent reads (`page`), and after each step it reports the result. The parent has the deadline (`supervise`).
//!
//! The steps (`steps`) are functions of a [`driver::Driver`] and of values. What they expect is computed on the host (`expect`).

mod codes;
mod cuda;
pub mod driver;
mod expect;
mod find;
mod given;
mod health;
mod lines;
mod options;
mod page;
mod parent;
pub mod run;
pub mod sizes;
pub mod steps;
pub mod supervise;
mod worker;

pub use codes::StepFinding;

use options::SmokeCommand;
use parent::SmokeMode;

/// The exit status for a wrong command line: nothing could be tried.
const USAGE: i32 = 3;

/// Run the program with this process's arguments, and return the exit status.
pub fn main() -> i32 {
    match SmokeCommand::parse(parent::arguments()) {
        Ok(SmokeCommand::Here(options)) => parent::run(SmokeMode::Here, &options),
        Ok(SmokeCommand::VectorAdd(options)) => parent::run(SmokeMode::Sample, &options),
        Ok(SmokeCommand::Worker(task)) => worker::main(&task),
        Ok(SmokeCommand::Help) => {
            parent::print(options::HELP);
            0
        }
        Ok(SmokeCommand::Version) => {
            parent::print(&format!("divvy-smoke {}\n", divvy_smoke_report::VERSION));
            0
        }
        Err(error) => {
            parent::complain(&error.to_string());
            USAGE
        }
    }
}
