//! What the checks have in common: the programs, the driver, and the agent, which is started by the first check that needs it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::future::try_join_all;
use serde_json::Value;
use tokio::time::sleep;

use crate::driver::CheckedDriver;
use crate::pack::Pack;
use crate::program::{CheckProgram, of};
use crate::rig::{Rig, SharePod};

/// What a driver may keep for itself after the first context.
pub(crate) const KEPT: u64 = 64 << 20;

/// What the checks need.
#[derive(Debug)]
pub(crate) struct GpuCheckBench {
    pub(crate) pack: Pack,
    pub(crate) driver: CheckedDriver,
    pub(crate) directory: PathBuf,
    /// How long a share of compute time is measured.
    pub(crate) seconds: u64,
    rig: Option<Rig>,
    /// Asks NVML, and has no context.
    watcher: Option<CheckProgram>,
}

/// What NVML says about the memory of the GPU.
#[derive(Debug)]
pub(crate) struct ReportedMemory {
    /// What is used of the whole GPU.
    pub(crate) used: u64,
    /// What each process has, if NVML says it, by NVML's PIDs.
    pub(crate) processes: Vec<(u32, Option<u64>)>,
}

impl GpuCheckBench {
    pub(crate) fn new(pack: Pack, driver: CheckedDriver, directory: PathBuf, seconds: u64) -> GpuCheckBench {
        GpuCheckBench {
            pack,
            driver,
            directory,
            seconds,
            rig: None,
            watcher: None,
        }
    }

    /// Return the agent and its surroundings. They are started at the first call.
    pub(crate) async fn rig(&mut self) -> Result<&mut Rig> {
        if self.rig.is_none() {
            let directory = self.directory.clone();
            let rig = Rig::start(&self.pack, &self.driver, &directory).await;
            self.rig = Some(rig.context("the agent did not start")?);
        }
        self.rig.as_mut().context("the agent does not run")
    }

    /// Create a pod with a share in GiB and percent of compute time.
    pub(crate) async fn pod(&mut self, gib: u64, percent: u32) -> Result<SharePod> {
        self.rig().await?;
        let rig = self.rig.as_mut().context("the agent does not run")?;
        rig.pod(&self.pack, &self.driver, gib, percent).await
    }

    /// Start the agent again, with other flags.
    pub(crate) async fn restart_agent(&mut self, flags: &[&str]) -> Result<()> {
        self.rig().await?;
        let rig = self.rig.as_mut().context("the agent does not run")?;
        rig.restart_agent(&self.pack, flags).await
    }

    /// Start a program without the guard, and make a context.
    pub(crate) async fn without_guard(&self) -> Result<CheckProgram> {
        let mut program = self.driver.program(&self.pack, &self.driver.cuda)?;
        program.ask("start").await?;
        Ok(program)
    }

    /// Start a program in a pod, with the guard, and make a context.
    pub(crate) async fn with_guard(&mut self, pod: &SharePod) -> Result<CheckProgram> {
        self.started(pod, &pod.container.cuda()).await
    }

    /// Start a program in a pod with a library, and make a context. If NVML has another PID for it than this process, the probe learns that one.
    pub(crate) async fn started(&mut self, pod: &SharePod, library: &Path) -> Result<CheckProgram> {
        let before = self.memory().await?;
        let mut program = pod.program(&self.pack, &self.driver, library)?;
        program.ask("start").await?;
        let after = self.memory().await?;
        let own = program.pid();
        if !after.has(own) {
            let mut new = after.processes.iter().filter(|(pid, _)| !before.has(*pid));
            if let (Some((reported, _)), None) = (new.next(), new.next()) {
                pod.adopt(*reported, own)?;
            }
        }
        Ok(program)
    }

    /// Start a program, in a pod with the guard or without it, ask it once, and wait until it is gone and its memory is free.
    pub(crate) async fn once(&mut self, pod: Option<&SharePod>, request: &str) -> Result<Value> {
        let mut program = match pod {
            Some(pod) => self.with_guard(pod).await?,
            None => self.without_guard().await?,
        };
        let answer = program.ask(request).await?;
        program.end().await?;
        Ok(answer)
    }

    /// Start several programs in a pod.
    pub(crate) async fn several(&mut self, pod: &SharePod, count: usize) -> Result<Vec<CheckProgram>> {
        let mut programs = Vec::new();
        for _ in 0..count {
            programs.push(self.with_guard(pod).await?);
        }
        Ok(programs)
    }

    /// Send the same request to several programs at the same time.
    pub(crate) async fn all(programs: &mut [CheckProgram], request: &str) -> Result<Vec<Value>> {
        try_join_all(programs.iter_mut().map(|program| program.ask(request))).await
    }

    /// Start a program that asks NVML.
    pub(crate) async fn nvml(&self) -> Result<CheckProgram> {
        let mut program = self.driver.program(&self.pack, &self.driver.cuda)?;
        program.ask(&format!("nvml {}", self.driver.nvml.display())).await?;
        Ok(program)
    }

    /// Ask NVML about the memory.
    pub(crate) async fn memory(&mut self) -> Result<ReportedMemory> {
        if self.watcher.is_none() {
            self.watcher = Some(self.nvml().await?);
        }
        let watcher = self.watcher.as_mut().context("NVML is not loaded")?;
        let answer = watcher.ask(&format!("nvml-state {}", self.driver.gpu().uuid)).await?;
        let listed = answer["processes"].as_array().context("NVML lists no processes")?;
        let process = |of: &Value| Some((u32::try_from(of["pid"].as_u64()?).ok()?, of["bytes"].as_u64()));
        Ok(ReportedMemory {
            used: of(&answer, "used")?,
            processes: listed.iter().filter_map(process).collect(),
        })
    }

    /// Wait until the driver has taken back the memory of programs that have ended: until no more is used than before, apart from what it keeps for itself.
    pub(crate) async fn settle(&mut self, before: u64) -> Result<()> {
        const LIMIT: Duration = Duration::from_secs(10);
        let began = std::time::Instant::now();
        loop {
            let used = self.memory().await?.used;
            if used <= before + KEPT {
                return Ok(());
            }
            if began.elapsed() > LIMIT {
                bail!(
                    "{} MiB are used {LIMIT:?} after the programs have ended; before they began: {} MiB",
                    used >> 20,
                    before >> 20
                );
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Return a directory with links to the driver's own libraries, under the names by which programs load them.
    pub(crate) fn driver_links(&self) -> Result<PathBuf> {
        let directory = self.directory.join("driver");
        if directory.is_dir() {
            return Ok(directory);
        }
        std::fs::create_dir(&directory)?;
        for (library, name) in [(&self.driver.cuda, "libcuda.so"), (&self.driver.nvml, "libnvidia-ml.so")] {
            for link in [name.to_owned(), format!("{name}.1")] {
                std::os::unix::fs::symlink(library, directory.join(link))?;
            }
        }
        Ok(directory)
    }

    /// Return a share of memory in GiB that is large enough for many contexts.
    pub(crate) fn large_share(&self) -> u64 {
        (self.driver.gpu().total >> 30) * 2 / 5
    }

    /// End the agent, with what a check that failed has left. The next check that needs one starts another.
    pub(crate) fn discard(&mut self) {
        self.rig = None;
        self.watcher = None;
    }

    /// End the agent.
    pub(crate) async fn end(&mut self) {
        self.discard();
        // So that the programs, which were killed, are gone.
        tokio::task::yield_now().await;
    }
}

impl ReportedMemory {
    pub(crate) fn has(&self, pid: u32) -> bool {
        self.processes.iter().any(|(of, _)| *of == pid)
    }

    pub(crate) fn of(&self, pid: u32) -> Option<u64> {
        self.processes.iter().find(|(of, _)| *of == pid).and_then(|(_, bytes)| *bytes)
    }
}
