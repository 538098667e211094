//! The program `divvy-smoke`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(u8::try_from(divvy_smoke::main()).unwrap_or(3))
}
