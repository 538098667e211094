//! Divvy's real programs, as child processes that cannot outlive their parent.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

/// The paths of the built programs.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The path of `divvy`.
    pub divvy: PathBuf,
    /// The path of `divvy-agent`.
    pub agent: PathBuf,
    /// The path of `divvy-probe`.
    pub probe: PathBuf,
    /// The path of `libdivvy_nvml_sim.so`, or of the driver's own NVML.
    pub nvml_sim: PathBuf,
}

impl Programs {
    /// Find the programs in the directory of this `divvy`, where cargo and the release archive put them.
    pub fn beside(divvy: &Path) -> io::Result<Programs> {
        let find = |name: &str| find_beside(divvy, name, "cargo build");
        Ok(Programs {
            divvy: divvy.to_path_buf(),
            agent: find("divvy-agent")?,
            probe: find("divvy-probe")?,
            nvml_sim: find("libdivvy_nvml_sim.so")?,
        })
    }
}

/// Return the path of a file in the directory of this `divvy`. If it is missing, the error says which command builds it.
fn find_beside(divvy: &Path, name: &str, command: &str) -> io::Result<PathBuf> {
    let directory = divvy.parent().unwrap_or(Path::new("."));
    let path = directory.join(name);
    if path.is_file() {
        return Ok(path);
    }
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!(
            "{name} is missing in {}, the directory of this divvy; build everything with `{command}`",
            directory.display()
        ),
    ))
}

/// What a cluster needs whose containers run programs that use a GPU.
#[derive(Debug, Clone)]
pub struct GpuPrograms {
    /// The path of `libdivvy_cuda_sim.so`, or of the driver's own library of CUDA.
    pub cuda_sim: PathBuf,
    /// The directory of the guard's libraries, `libdivvy-guard.so` and `libdivvy-guard-nvml.so`.
    pub guard_dir: PathBuf,
    /// The path of `divvy-contain`, which starts a program with a container's mounts.
    pub contain: PathBuf,
    /// The path of `divvy-cuda-program`, which allocates memory of a GPU.
    pub cuda_program: PathBuf,
    /// Whether the GPUs are those of this machine.
    pub is_real: bool,
}

impl GpuPrograms {
    /// Find the files in the directory of this `divvy`, where `cargo xtask demo --scenario isolation` puts them.
    pub fn beside(divvy: &Path) -> io::Result<GpuPrograms> {
        let find = |name: &str| find_beside(divvy, name, "cargo xtask demo --scenario isolation");
        find("libdivvy-guard-nvml.so")?;
        Ok(GpuPrograms {
            cuda_sim: find("libdivvy_cuda_sim.so")?,
            guard_dir: find("libdivvy-guard.so")?.parent().unwrap_or(Path::new(".")).to_owned(),
            contain: find("divvy-contain")?,
            cuda_program: find("divvy-cuda-program")?,
            is_real: false,
        })
    }

    /// Fail, with what to do about it, if this machine does not let this user start programs with mounts of their own.
    pub async fn check(&self) -> io::Result<()> {
        let output = Command::new(&self.contain).arg("--check").output().await?;
        if output.status.success() {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            String::from_utf8_lossy(&output.stderr).trim_end(),
        ))
    }
}

/// A running program. Dropping it kills it. The program also ends when its standard input is closed (`--exit-with-stdin`), which happens
/// when this process is killed with SIGKILL.
#[derive(Debug)]
pub struct ChildProgram {
    name: String,
    child: Child,
    log: PathBuf,
}

impl ChildProgram {
    /// Start a program. Its output goes to `<logs>/<name>.log`.
    pub fn start(name: &str, program: &Path, args: &[&str], env: &[(&str, &str)], logs: &Path) -> io::Result<ChildProgram> {
        fs::create_dir_all(logs)?;
        let log = logs.join(format!("{name}.log"));
        let out = File::options().create(true).append(true).open(&log)?;
        let mut command = Command::new(program);
        // What a user has set for a real cluster or for another program of Divvy must not affect this one.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("DIVVY_") || ["KUBECONFIG", "NODE_NAME"].contains(&&*text) {
                command.env_remove(&name);
            }
        }
        let child = command
            .args(args)
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(out.try_clone()?)
            .stderr(out)
            // Ctrl-C must reach only the parent, which ends its children in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), format!("could not start {}: {error}", program.display())))?;
        Ok(ChildProgram {
            name: name.to_owned(),
            child,
            log,
        })
    }

    /// Return the program's PID, or `None` if it has ended.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Report whether the program has ended on its own.
    pub fn ended(&mut self) -> io::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Report whether the program has ended, without waiting for it: then it is a zombie (`proc(5)`), or was waited for before.
    pub fn is_gone(&self) -> bool {
        let Some(pid) = self.pid() else { return true };
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(')')
            .is_some_and(|(_, rest)| rest.trim_start().starts_with('Z'))
    }

    /// Return the last lines that the program printed.
    pub fn last_words(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(5)..].join("\n");
        format!("{} printed last:\n{last}", self.name)
    }

    /// Kill the program with SIGKILL.
    pub async fn kill(&mut self) -> io::Result<()> {
        self.child.kill().await
    }

    /// Send SIGTERM, then SIGKILL if the program has not ended after five seconds. Report whether it ended on its own with status 0.
    pub async fn stop(&mut self) -> io::Result<bool> {
        if let Some(pid) = self
            .child
            .id()
            .and_then(|pid| i32::try_from(pid).ok())
            .and_then(Pid::from_raw)
        {
            // The program may have ended in the meantime.
            let _ = kill_process(pid, Signal::TERM);
        }
        match tokio::time::timeout(Duration::from_secs(5), self.child.wait()).await {
            Ok(status) => Ok(status?.success()),
            Err(_) => {
                self.child.kill().await?;
                Ok(false)
            }
        }
    }
}
