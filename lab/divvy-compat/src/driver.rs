//! The simulated driver of a node, and the guard.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use divvy_cdi::shadow::{CUDA, NVML, Shadow, ShadowLibrary};
use divvy_cdi::{CdiMount, Edits};
use divvy_share::limits::ShareLimits;
use divvy_share::{AUDIT, DIRECTORY, GUARD_CUDA, GUARD_NVML, LIMITS, REAL_CUDA, REAL_NVML, TUNABLES, USAGE, usage};

use crate::command::run;
use crate::outcome::{GPU, SHARE};
use crate::probes::for_root;
use crate::progress::progress;

const CONTEXT_MIB: u64 = 300;
const UUID: &str = "GPU-00010203-0405-4607-8809-0a0b0c0d0e0f";
/// A driver with CUDA 13.0.
const VERSION: &str = "580.95.05";
/// Where the container has the driver's libraries, as on a node with Debian.
pub(crate) const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// The files of the driver and of the guard.
#[derive(Debug)]
pub(crate) struct CompatDriver {
    /// The programs that `cargo xtask compat` has built are there.
    built: PathBuf,
    pub(crate) directory: PathBuf,
}

impl CompatDriver {
    /// Build the simulated driver for the C library of a root file system, or for this machine's: the real one needs only very old functions of it.
    pub(crate) fn build(root: Option<&Path>, work: &Path) -> Result<CompatDriver> {
        let program = std::env::current_exe().context("the path of this program is unknown")?;
        let built = program.parent().unwrap_or(Path::new(".")).to_owned();
        let target = built.parent().unwrap_or(&built).join("compat");
        progress("building the simulated driver for the oldest C library");
        for (package, soname) in [("divvy-cuda-sim", "libcuda.so.1"), ("divvy-nvml-sim", "libnvidia-ml.so.1")] {
            let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
            cargo
                .args(["rustc", "--quiet", "--lib", "-p", package, "--target-dir"])
                .arg(&target);
            cargo.args(["--", "-Cstrip=debuginfo", &format!("-Clink-arg=-Wl,-soname,{soname}")]);
            cargo.args(root.into_iter().flat_map(for_root).map(|flag| format!("-Clink-arg={flag}")));
            // The real driver's libraries need these, too, also where another library has what they had (glibc 2.34).
            let needed = "-Wl,--push-state,--no-as-needed,-lm,-ldl,-lpthread,-lrt,--pop-state";
            cargo.arg(format!("-Clink-arg={needed}"));
            run(&mut cargo)?;
            let file = target.join("debug").join(format!("lib{}.so", package.replace('-', "_")));
            let to = work.join(soname);
            fs::copy(&file, &to).with_context(|| format!("{} could not be copied", file.display()))?;
        }
        let description = format!(
            "v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"{VERSION}\"\n[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\n\
             uuid = \"{UUID}\"\nmemory_mib = {}\ncontext_mib = {CONTEXT_MIB}\n",
            GPU >> 20
        );
        fs::write(work.join("machine.toml"), description).context("the machine's description could not be written")?;
        for library in ["libdivvy-guard.so", "libdivvy-guard-nvml.so", "divvy-contain"] {
            let file = built.join(library);
            ensure!(file.exists(), "{} is missing; type: cargo xtask compat", file.display());
        }
        Ok(CompatDriver {
            built,
            directory: work.to_owned(),
        })
    }

    /// The program that makes containers.
    pub(crate) fn contain(&self) -> PathBuf {
        self.built.join("divvy-contain")
    }

    /// What the spec of the node's driver gives to each container.
    pub(crate) fn edits(&self) -> Edits {
        let mount = |file: &str, name: &str| CdiMount {
            host_path: self.directory.join(file).display().to_string(),
            container_path: format!("{LIBRARIES}/{name}.{VERSION}"),
            options: ["ro", "nosuid", "nodev", "bind"].map(str::to_owned).to_vec(),
            ..CdiMount::default()
        };
        Edits {
            mounts: vec![mount("libcuda.so.1", CUDA), mount("libnvidia-ml.so.1", NVML)],
            ..Edits::default()
        }
    }

    /// Put the guard into a container, with a new account of the share. `with_copies`: also in the place of copies of the driver's libraries.
    pub(crate) fn shadow(&self, edits: &mut Edits, account: &Path, with_copies: bool) -> Result<()> {
        let limits = ShareLimits {
            bytes: SHARE,
            context: CONTEXT_MIB << 20,
            ..ShareLimits::default()
        };
        let (limits_file, usage_file) = (account.join(LIMITS), account.join(USAGE));
        fs::write(&limits_file, limits.file())
            .and_then(|()| fs::write(&usage_file, usage::file()))
            .and_then(|()| fs::set_permissions(&usage_file, fs::Permissions::from_mode(0o666)))
            .context("the account of the share could not be written")?;
        let file = |name: &str| self.built.join(name).display().to_string();
        let at = |name: &str| format!("{DIRECTORY}/{UUID}/{name}");
        edits.shadow(&Shadow {
            libraries: vec![
                ShadowLibrary {
                    name: CUDA,
                    file: file("libdivvy-guard.so"),
                    real: REAL_CUDA,
                    at: GUARD_CUDA,
                },
                ShadowLibrary {
                    name: NVML,
                    file: file("libdivvy-guard-nvml.so"),
                    real: REAL_NVML,
                    at: GUARD_NVML,
                },
            ],
            read_only: vec![(limits_file.display().to_string(), at(LIMITS))],
            writable: vec![(usage_file.display().to_string(), at(USAGE))],
            loaded: if with_copies {
                vec![(file("libdivvy-guard-audit.so"), AUDIT.to_owned())]
            } else {
                Vec::new()
            },
            env: if with_copies {
                vec![("LD_AUDIT", AUDIT), ("GLIBC_TUNABLES", TUNABLES)]
            } else {
                Vec::new()
            },
        });
        Ok(())
    }

    /// The links that a container gets to the driver's libraries, with their targets.
    pub(crate) fn links() -> [(String, String); 4] {
        let link = |target: String, name: String| (target, format!("{LIBRARIES}/{name}"));
        [
            link(format!("{CUDA}.{VERSION}"), format!("{CUDA}.1")),
            link(format!("{CUDA}.1"), CUDA.to_owned()),
            link(format!("{NVML}.{VERSION}"), format!("{NVML}.1")),
            link(format!("{NVML}.1"), NVML.to_owned()),
        ]
    }
}
