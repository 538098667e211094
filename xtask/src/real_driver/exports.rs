//! The functions of the simulated libraries.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use divvy_shadow_testkit::Elf;

use super::packages::PackagedDriver;
use super::{CheckResult, DriverBench};
use crate::ptx::output;

/// Functions of 615 that a test can give to each simulated driver (lab/divvy-nvml-sim/src/abi/limits.rs).
const OF_TESTS: [&str; 2] = ["nvmlDeviceGetMemoryLimits_v1", "nvmlDeviceSetMemoryLimits_v1"];

/// Loads a library, and prints which of the functions in its arguments the loader finds.
const FIND: &str =
    "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); print(*[name for name in sys.argv[2:] if hasattr(library, name)])";

pub(crate) fn check(bench: &DriverBench) -> Result<CheckResult> {
    let mut found = CheckResult::default();
    for driver in &bench.drivers {
        for (prefix, simulated, real) in [
            ("nvml", "libdivvy_nvml_sim.so", &driver.nvml),
            ("cu", "libdivvy_cuda_sim.so", &driver.cuda),
        ] {
            let simulated = bench.built(simulated)?;
            let all = exports(&simulated, prefix)?;
            let real = exports(real, prefix)?;
            let own = loaded(bench, driver, &simulated, &all)?;
            for function in all.iter().filter(|function| !OF_TESTS.contains(&function.as_str())) {
                let what = if real.contains(function) {
                    "is missing in the simulated driver"
                } else {
                    "is in the simulated driver, and not in the real one"
                };
                found.note(
                    format!("{} {function} {what}", driver.branch),
                    real.contains(function) == own.contains(function),
                );
            }
        }
    }
    Ok(found)
}

/// Return the functions that a library's file has, by the beginning of their names.
fn exports(library: &Path, prefix: &str) -> Result<BTreeSet<String>> {
    let bytes = std::fs::read(library).with_context(|| format!("{} could not be read", library.display()))?;
    let names = Elf::of(&bytes).exports().into_iter().filter(|name| name.starts_with(prefix));
    Ok(names.map(str::to_owned).collect())
}

/// Return the functions that the loader finds in a simulated library that stands for a driver.
fn loaded(bench: &DriverBench, driver: &PackagedDriver, library: &Path, all: &BTreeSet<String>) -> Result<BTreeSet<String>> {
    let text = format!(
        "v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"{}\"\n",
        driver.version
    );
    let machine = bench.write("machine.toml", text)?;
    let mut python = Command::new("python3");
    python
        .args(["-c", FIND])
        .arg(library)
        .args(all)
        .env("DIVVY_NVML_SIM", machine);
    Ok(output(&mut python)?.split_whitespace().map(str::to_owned).collect())
}
