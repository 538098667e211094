//! Programs that use a GPU in the containers of the embedded cluster.
//!
//! The embedded container runtime starts no processes. Here, a process is started with what a container has: its mounts, its environment, and its cgroup.
//! All of that comes from the container's CDI devices, as the kubelet and the runtime resolved them. The only addition is the simulated driver's state,
//! which stands for the real driver's part in the kernel.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use divvy_gpu_sim::GpuLedger;
use serde_json::Value;
use tokio::process::Command;

use super::Embedded;
use crate::builders::PodBuilder;
use crate::cuda_program::CudaProgram;
use crate::node::ContainerView;
use crate::programs::GpuPrograms;
use crate::scenario::{DRIVER_STATE, RunsGpuPrograms, driver_variables};
use crate::simulated_driver::InstalledLibraries;

/// The devices of a real driver that every container has in addition to its GPUs.
const OF_EACH_CONTAINER: [&str; 3] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];
/// The parts of the C library to which a real driver's library is linked, and where distributions have them.
const PARTS: [&str; 4] = ["libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"];
const DIRECTORIES: [&str; 4] = ["/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64"];
/// How much a real driver's numbers may differ from the guard's, in MiB: two of CUDA's pages.
const ROUNDING_MIB: u64 = 4;

impl Embedded {
    /// Return the files that the machines have as the driver's libraries, if programs load them.
    pub(super) fn driver_libraries(&self) -> Option<InstalledLibraries<'_>> {
        let programs = self.settings.gpu_programs.as_ref()?;
        Some(InstalledLibraries {
            cuda: &programs.cuda_sim,
            nvml: &self.settings.programs.nvml_sim,
        })
    }

    /// Return the agents' flags for the guard. Where nodes have settings of their own, these say whether there is a guard.
    pub(super) fn guard_flags(&self) -> Vec<String> {
        let programs = self.settings.gpu_programs.iter().filter(|_| !self.has_node_configs);
        let flags = programs.flat_map(|programs| {
            let directory = programs.guard_dir.display();
            ["--guard=shadow".to_owned(), format!("--guard-dir={directory}")]
        });
        flags.collect()
    }

    /// Return the directory in which the simulated driver records which process has how much memory, if processes use it.
    pub(super) fn ledger(&self) -> Option<PathBuf> {
        let programs = self.settings.gpu_programs.as_ref();
        programs.map(|_| self.root.path().join(super::LEDGER))
    }

    fn gpu_programs(&self) -> io::Result<(&GpuPrograms, PathBuf)> {
        let programs = self.settings.gpu_programs.as_ref().zip(self.ledger());
        programs.ok_or_else(|| io::Error::other("this cluster's containers run no programs"))
    }

    /// Return a running container and the name of its node.
    fn running(&self, pod_uid: &str, container: &str) -> io::Result<(&str, ContainerView)> {
        let views = self
            .nodes
            .iter()
            .flat_map(|(name, node)| node.node.containers().into_iter().map(move |view| (name.as_str(), view)));
        let mut running = views.filter(|(_, view)| view.pod_uid == pod_uid && view.container == container && view.is_running());
        running.next().ok_or_else(|| {
            let text = format!("container {container} of pod {pod_uid} does not run");
            io::Error::new(io::ErrorKind::NotFound, text)
        })
    }

    /// Return the command that starts a program with what a container has.
    fn command_in(&self, node: &str, container: &ContainerView, program: &Path, arguments: &[&str]) -> io::Result<Command> {
        let (programs, ledger) = self.gpu_programs()?;
        let paths = self.node(node)?.paths();
        let root = paths.root.join("containers").join(&container.id);
        std::fs::create_dir_all(&root)?;
        let mut command = Command::new(&programs.contain);
        let mut mount = |host: &Path, at: &str, read_only: bool| {
            let flag = if read_only { "--read-only" } else { "--mount" };
            command.args([OsStr::new(flag), host.as_os_str(), OsStr::new(at)]);
        };
        if programs.is_real {
            let own = container.devices.iter().map(String::as_str);
            for device in own.chain(OF_EACH_CONTAINER).filter(|path| Path::new(path).exists()) {
                mount(Path::new(device), device, false);
            }
            // The driver's library looks for processors and devices there, and is linked to the parts of the C library.
            mount(Path::new("/sys"), "/sys", true);
            for path in parts_of_c_library() {
                mount(&path, &path.display().to_string(), true);
            }
        } else {
            for device in &container.devices {
                mount(&paths.on_this_machine(device), device, false);
            }
        }
        for of in &container.mounts {
            mount(&paths.on_this_machine(&of.host), &of.container, of.read_only);
        }
        mount(
            &self.root.path().join("machines.toml"),
            &format!("{DRIVER_STATE}/machines.toml"),
            true,
        );
        mount(&ledger, &format!("{DRIVER_STATE}/ledger"), false);
        command
            .arg(root)
            .arg(program)
            .args(arguments)
            .env_clear()
            .envs(&container.env)
            .envs(driver_variables(node));
        Ok(command)
    }
}

impl RunsGpuPrograms for Embedded {
    fn provide_cuda(&self, _: &str, _: bool) -> io::Result<()> {
        // The nodes have them from the start.
        self.gpu_programs().map(drop)
    }

    fn for_programs(&self, pod: PodBuilder, _: &str) -> PodBuilder {
        pod
    }

    fn guard_libraries(&self) -> io::Result<PathBuf> {
        Ok(self.gpu_programs()?.0.guard_dir.clone())
    }

    async fn start_cuda_program(&self, pod_uid: &str, container: &str, library: &str) -> io::Result<CudaProgram> {
        let (programs, _) = self.gpu_programs()?;
        let (node, view) = self.running(pod_uid, container)?;
        let program = CudaProgram::start(self.command_in(node, &view, &programs.cuda_program, &[library])?)?;
        self.node(node)?.attach(&view.id, program.pid())?;
        Ok(program)
    }

    fn held(&self, gpu: &str) -> io::Result<BTreeMap<u32, u64>> {
        let (programs, directory) = self.gpu_programs()?;
        if programs.is_real {
            let mut command = std::process::Command::new(&programs.cuda_program);
            command.arg(&programs.cuda_sim);
            // A test has the simulated driver in the place of a real one.
            command.env("DIVVY_NVML_SIM", self.root.path().join("machines.toml"));
            command.env("DIVVY_NVML_SIM_LEDGER", directory);
            return held_by_nvml(command, &self.settings.programs.nvml_sim, gpu);
        }
        let usage = GpuLedger::open(&directory, gpu).and_then(|mut ledger| ledger.usage());
        let usage = usage.map_err(io::Error::other)?;
        Ok(usage.into_iter().map(|of| (of.pid, of.bytes)).collect())
    }

    fn gpu_machine(&self) -> io::Result<(String, u64)> {
        let machine = self.machines.nodes.first();
        let machine = machine.ok_or_else(|| io::Error::other("this cluster has no machine"))?;
        Ok((
            machine.name.clone(),
            machine.gpus.iter().map(|gpu| gpu.memory_mib / 1024).sum(),
        ))
    }

    fn rounding_mib(&self) -> u64 {
        match &self.settings.gpu_programs {
            Some(programs) if programs.is_real => ROUNDING_MIB,
            _ => 0,
        }
    }

    fn has_seccomp(&self) -> bool {
        false
    }
}

/// Ask the driver, which this program cannot do itself: it may be linked statically.
fn held_by_nvml(mut program: std::process::Command, nvml: &Path, gpu: &str) -> io::Result<BTreeMap<u32, u64>> {
    let mut child = program
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut input) = child.stdin.take() {
        // Its end is the end of the program. If the program has ended before, it says why.
        let _ = writeln!(input, "nvml {}\nnvml-state {gpu}", nvml.display());
    }
    let output = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let Some(line) = text.lines().nth(1) else {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(format!(
            "NVML does not list processes: {}",
            errors.trim_end()
        )));
    };
    let state: Value = serde_json::from_str(line)?;
    let processes = state["processes"].as_array().into_iter().flatten();
    let listed = processes.filter_map(|of| Some((u32::try_from(of["pid"].as_u64()?).ok()?, of["bytes"].as_u64()?)));
    Ok(listed.collect())
}

fn parts_of_c_library() -> impl Iterator<Item = PathBuf> {
    PARTS.iter().filter_map(|part| {
        let paths = DIRECTORIES.iter().map(|directory| Path::new(directory).join(part));
        paths.into_iter().find(|path| path.exists())
    })
}
