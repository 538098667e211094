//! Third-party programs, from Python's package index.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::command::run;
use crate::outcome::ExpectedOutcome::{self, AsDriver, Held};
use crate::progress::progress;

/// The root file system in which they run. It has Python 3.11.
pub(crate) const ROOT: &str = "debian-12";

/// A program, or a library with a script that uses it.
pub(crate) struct CompatProgram {
    pub(crate) name: &'static str,
    pub(crate) script: &'static str,
    /// The file that lists its packages, with the hashes of the versions that were tested.
    packages: &'static str,
    pub(crate) expected: ExpectedOutcome,
    /// What it must find with the driver alone.
    pub(crate) needs: &'static [(&'static str, &'static str)],
}

const GPU: &str = "8589934592";

/// All programs.
pub(crate) const PROGRAMS: [CompatProgram; 5] = [
    CompatProgram {
        name: "pynvml",
        script: "with_pynvml.py",
        packages: "nvml",
        expected: Held,
        needs: &[("memory:v1", GPU), ("memory:v2", GPU), ("own-process", "583008256")],
    },
    CompatProgram {
        name: "nvitop",
        script: "with_nvitop.py",
        packages: "nvml",
        expected: Held,
        needs: &[("memory:total", GPU), ("memory:screen", GPU), ("own-process", "583008256")],
    },
    CompatProgram {
        name: "numba",
        script: "with_numba.py",
        packages: "cuda12",
        expected: Held,
        needs: &[
            ("memory:total", GPU),
            ("above-share:allocate", "0"),
            ("kernel", "0"),
            ("processor", "90"),
        ],
    },
    CompatProgram {
        name: "cupy",
        script: "with_cupy.py",
        packages: "cuda12",
        // Its CUDA runtime library does not start on the simulated driver, so it cannot show the share.
        expected: AsDriver,
        needs: &[("driver", "13000"), ("processor", "45")],
    },
    CompatProgram {
        name: "torch",
        script: "with_torch.py",
        packages: "torch",
        // The same. Only what it asks NVML has an answer, and that is not about memory.
        expected: AsDriver,
        needs: &[
            ("processor", "30.0"),
            ("gradient", "6.0"),
            ("count-by-nvml", "1"),
            ("available-by-nvml", "True"),
        ],
    },
];

/// The directory of the scripts.
pub(crate) fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs")
}

impl CompatProgram {
    /// Install its packages, if an earlier run has not done it. Return their directory.
    pub(crate) fn install(&self, cache: &Path) -> Result<PathBuf> {
        let list = scripts().join(format!("{}.txt", self.packages));
        let wanted = fs::read_to_string(&list).with_context(|| format!("{} cannot be read", list.display()))?;
        let directory = cache.join("packages").join(self.packages);
        let record = cache.join("packages").join(format!("{}.made", self.packages));
        if fs::read_to_string(&record).is_ok_and(|made| made == wanted) {
            return Ok(directory);
        }
        progress(&format!(
            "{}: downloading the packages of {} (once)",
            self.name,
            list.display()
        ));
        if directory.exists() {
            fs::remove_dir_all(&directory).with_context(|| format!("{} could not be removed", directory.display()))?;
        }
        let mut pip = Command::new("python3");
        pip.args("-m pip install --quiet --no-cache-dir --no-deps --require-hashes --only-binary=:all: --no-compile --python-version 3.11".split(' '));
        pip.args("--implementation cp --abi cp311 --abi abi3 --abi none --platform manylinux2014_x86_64".split(' '));
        // pip does not know that a later C library has all of an earlier one. Debian 12 has 2.36.
        for minor in 5..=36 {
            pip.args(["--platform", &format!("manylinux_2_{minor}_x86_64")]);
        }
        pip.arg("--target").arg(&directory).arg("-r").arg(&list);
        run(&mut pip)?;
        fs::write(&record, wanted).with_context(|| format!("{} could not be written", record.display()))?;
        Ok(directory)
    }
}
