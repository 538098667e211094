//! The driver of the machine, or the simulated one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use divvy_testbed::real_driver::RealDriver;
use serde_json::Value;
use tokio::time::timeout;

use crate::pack::Pack;
use crate::program::{CheckProgram, of, text_of};

/// How long NVML may take to describe the GPUs.
const PATIENCE: Duration = Duration::from_secs(60);

/// The simulated machine.
const MACHINE: &str = r#"v = 1
[[node]]
name = "n1"
driver = "580.159.03"
[[node.gpu]]
model = "NVIDIA H100 80GB HBM3"
uuid = "GPU-00010203-0405-4607-8809-0a0b0c0d0e0f"
memory_mib = 81559
cc = "9.0"
context_mib = 500
"#;

/// Which driver to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DriverChoice {
    /// The one that programs find.
    Found,
    /// The libraries in a directory.
    Directory(PathBuf),
    Simulated,
}

/// A GPU, as NVML describes it.
#[derive(Debug, Clone)]
pub(crate) struct CheckedGpu {
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) minor: u32,
    pub(crate) total: u64,
    pub(crate) mig: Option<bool>,
}

/// A driver.
#[derive(Debug)]
pub(crate) struct CheckedDriver {
    pub(crate) cuda: PathBuf,
    pub(crate) nvml: PathBuf,
    pub(crate) simulated: bool,
    pub(crate) version: String,
    pub(crate) cuda_version: u64,
    pub(crate) gpus: Vec<CheckedGpu>,
    /// The variables with which a program finds this driver and the GPU.
    pub(crate) environment: Vec<(&'static str, String)>,
}

impl CheckedDriver {
    /// Find the driver, and let NVML describe the machine.
    pub(crate) async fn find(choice: &DriverChoice, pack: &Pack, directory: &Path) -> Result<CheckedDriver> {
        let mut environment = Vec::new();
        let (cuda, nvml) = match choice {
            DriverChoice::Simulated => {
                let (machine, ledger) = (directory.join("machine.toml"), directory.join("ledger"));
                std::fs::write(&machine, MACHINE).context("the simulated machine cannot be described")?;
                std::fs::create_dir(&ledger).context("the simulated driver has no directory")?;
                environment.push(("DIVVY_NVML_SIM", machine.display().to_string()));
                // Third-party programs have kernels that the simulation does not know.
                environment.push(("DIVVY_CUDA_SIM_CODE", "unread".to_owned()));
                environment.push(("DIVVY_NVML_SIM_LEDGER", ledger.display().to_string()));
                (pack.file("libdivvy_cuda_sim.so")?, pack.file("libdivvy_nvml_sim.so")?)
            }
            DriverChoice::Directory(directory) => libraries(Some(&std::path::absolute(directory)?)).await?,
            DriverChoice::Found => libraries(None).await?,
        };
        let mut driver = CheckedDriver {
            cuda,
            nvml,
            simulated: *choice == DriverChoice::Simulated,
            version: String::new(),
            cuda_version: 0,
            gpus: Vec::new(),
            environment,
        };
        let described = timeout(PATIENCE, driver.ask(pack)).await;
        let described =
            described.with_context(|| format!("NVML in {} did not answer in {PATIENCE:?}", driver.nvml.display()))??;
        driver.take(&described)?;
        Ok(driver)
    }

    async fn ask(&self, pack: &Pack) -> Result<Value> {
        let mut program = self.program(pack, &self.cuda)?;
        program.ask(&format!("nvml {}", self.nvml.display())).await?;
        program.ask("nvml-describe").await
    }

    fn take(&mut self, described: &Value) -> Result<()> {
        self.version = text_of(described, "driver")?;
        self.cuda_version = of(described, "cuda")?;
        let gpus = described["gpus"].as_array().context("NVML lists no GPUs")?;
        ensure!(!gpus.is_empty(), "the driver {} has no GPU", self.version);
        for gpu in gpus {
            self.gpus.push(CheckedGpu {
                uuid: text_of(gpu, "uuid")?,
                name: text_of(gpu, "name")?,
                minor: u32::try_from(of(gpu, "minor")?)?,
                total: of(gpu, "total")?,
                mig: gpu["mig"].as_bool(),
            });
        }
        // What is measured is one GPU. One in MIG mode gives a process only a part.
        let usable = self.gpus.iter().position(|gpu| gpu.mig != Some(true));
        let usable = usable.context("all GPUs are in MIG mode; `nvidia-smi -mig 0` ends it, if nothing uses the GPUs")?;
        self.gpus.swap(0, usable);
        if !self.simulated {
            self.environment.push(("CUDA_VISIBLE_DEVICES", self.gpus[0].uuid.clone()));
        }
        Ok(())
    }

    /// Return the GPU on which the checks run.
    pub(crate) fn gpu(&self) -> &CheckedGpu {
        &self.gpus[0]
    }

    /// Start the program with a library.
    pub(crate) fn program(&self, pack: &Pack, library: &Path) -> Result<CheckProgram> {
        let mut command = pack.command("divvy-cuda-program")?;
        command
            .arg(library)
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        CheckProgram::start(command)
    }

    /// Return what is checked, in words.
    pub(crate) fn subject(&self) -> String {
        let kind = if self.simulated { "Simulated driver" } else { "Driver" };
        let (major, minor) = (self.cuda_version / 1000, self.cuda_version % 1000 / 10);
        format!(
            "{kind} {}, CUDA {major}.{minor}, {}, {}",
            self.version,
            self.gpu().name,
            self.gpu().uuid
        )
    }
}

/// Return the paths of the driver's libraries, without links.
async fn libraries(directory: Option<&Path>) -> Result<(PathBuf, PathBuf)> {
    let RealDriver { cuda, nvml } = RealDriver::find(directory).await?;
    Ok((cuda, nvml))
}
