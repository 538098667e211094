//! Programs that use a GPU in the containers of the embedded cluster.
//!
//! The embedded container runtime starts no processes. Here, a process is started with what a container has: its mounts, its environment, and its cgroup.
//! All of that comes from the container's CDI devices, as the kubelet and the runtime resolved them. The only addition is the simulated driver's state,
//! which stands for the real driver's part in the kernel.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use divvy_gpu_sim::Ledger;
use tokio::process::Command;

use super::Embedded;
use crate::builders::PodBuilder;
use crate::cuda_program::CudaProgram;
use crate::node::ContainerView;
use crate::programs::GpuPrograms;
use crate::scenario::{DRIVER_STATE, RunsGpuPrograms, driver_variables};
use crate::simulated_driver::Libraries;

impl Embedded {
    /// Return the files that the machines have as the driver's libraries, if programs load them.
    pub(super) fn driver_libraries(&self) -> Option<Libraries<'_>> {
        let programs = self.settings.gpu_programs.as_ref()?;
        Some(Libraries {
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
        for device in &container.devices {
            mount(&paths.on_this_machine(device), device, false);
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
        let (_, directory) = self.gpu_programs()?;
        let usage = Ledger::open(&directory, gpu).and_then(|mut ledger| ledger.usage());
        let usage = usage.map_err(io::Error::other)?;
        Ok(usage.into_iter().map(|of| (of.pid, of.bytes)).collect())
    }
}
