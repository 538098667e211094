//! Divvy's programs under NVIDIA's names, which run on a node in place of the agent.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use super::{Embedded, not_joined};
use crate::programs::ChildProgram;
use crate::scenario::{Cluster as _, End, PluginSetup};

const DEVICE_PLUGIN: &str = "nvidia-device-plugin";
const MPS_CONTROL_DAEMON: &str = "mps-control-daemon";
/// How long a program may take until it serves.
const PATIENCE: Duration = Duration::from_secs(20);

/// The programs under NVIDIA's names on a node.
#[derive(Debug)]
pub(super) struct NvidiaPrograms {
    with_mps: bool,
    device_plugin: Option<ChildProgram>,
    mps_control_daemon: Option<ChildProgram>,
}

impl Embedded {
    /// Run `nvidia-device-plugin` in place of the agent, or change its configuration.
    pub(super) async fn start_nvidia(&mut self, name: &str, plugin: PluginSetup<'_>) -> io::Result<()> {
        let directory = self.nvidia_directory(name);
        fs::create_dir_all(&directory)?;
        fs::write(directory.join("config.new"), plugin.config)?;
        fs::rename(directory.join("config.new"), directory.join("config.yaml"))?;
        if self.nvidia(name)?.is_some() {
            return Ok(());
        }
        self.stop_agent(name).await?;
        self.lay_out(name, &directory)?;
        *self.nvidia(name)? = Some(NvidiaPrograms {
            with_mps: plugin.with_mps,
            device_plugin: None,
            mps_control_daemon: None,
        });
        self.start_mps(name).await?;
        self.start_plugin(name).await
    }

    /// End the programs under NVIDIA's names.
    pub(super) async fn end_nvidia(&mut self, name: &str) -> io::Result<()> {
        self.stop_plugin(name, End::Stopped).await?;
        self.stop_mps(name, End::Stopped).await?;
        *self.nvidia(name)? = None;
        Ok(())
    }

    /// Start `nvidia-device-plugin` unless it is running, and wait until the kubelet offers its devices.
    pub(super) async fn start_plugin(&mut self, name: &str) -> io::Result<()> {
        let Some(NvidiaPrograms { device_plugin: None, .. }) = self.nvidia(name)? else {
            return Ok(());
        };
        let socket = self.node(name)?.paths().kubelet_socket();
        let flags = [
            "--device-list-strategy=cdi-cri".to_owned(),
            "--mps-root=/run/nvidia/mps".to_owned(),
            format!("--kubelet-socket={}", socket.display()),
        ];
        // Faults reach the driver through this socket.
        let control = self.nvml(name).display().to_string();
        let program = self.program(name, DEVICE_PLUGIN, &flags, &[("DIVVY_NVML_SIM_CONTROL", &control)])?;
        self.programs_of(name)?.device_plugin = Some(program);
        let until = Instant::now() + PATIENCE;
        while !self.offers_nvidia(name)? {
            let program = self.programs_of(name)?.device_plugin.as_mut();
            serves_soon(program, until)?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Start `mps-control-daemon` unless it is running or not wanted, and wait until its daemons serve.
    pub(super) async fn start_mps(&mut self, name: &str) -> io::Result<()> {
        let marker = self.node(name)?.paths().sys_root.join("mps/.ready");
        let Some(NvidiaPrograms {
            with_mps: true,
            mps_control_daemon: None,
            ..
        }) = self.nvidia(name)?
        else {
            return Ok(());
        };
        // A program that was killed has left it behind. The new one removes it as well, but perhaps later than it is looked for.
        match fs::remove_file(&marker) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let program = self.program(name, MPS_CONTROL_DAEMON, &[], &[])?;
        self.programs_of(name)?.mps_control_daemon = Some(program);
        let until = Instant::now() + PATIENCE;
        while !marker.exists() {
            serves_soon(self.programs_of(name)?.mps_control_daemon.as_mut(), until)?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// End `nvidia-device-plugin`, and wait until the kubelet has noticed it.
    pub(super) async fn stop_plugin(&mut self, name: &str, end: End) -> io::Result<()> {
        let nvidia = self.nvidia(name)?.as_mut();
        let Some(program) = nvidia.and_then(|nvidia| nvidia.device_plugin.take()) else {
            return Ok(());
        };
        finish(program, end).await?;
        let until = Instant::now() + PATIENCE;
        while self.offers_nvidia(name)? {
            if Instant::now() > until {
                return Err(io::Error::other(format!(
                    "the kubelet of {name} still offers devices of nvidia-device-plugin"
                )));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Start or end `mps-control-daemon` for the agent's pods, and wait until it serves.
    pub(super) async fn serve_mps(&mut self, name: &str, on: bool) -> io::Result<()> {
        if !on {
            let node = self.nodes.get_mut(name).ok_or_else(|| not_joined(name))?;
            return match node.mps.take() {
                Some(program) => finish(program, End::Stopped).await,
                None => Ok(()),
            };
        }
        let directory = self.nvidia_directory(name);
        fs::create_dir_all(&directory)?;
        fs::write(directory.join("config.yaml"), "version: v1\n")?;
        self.lay_out(name, &directory)?;
        let root = self.node(name)?.paths().sys_root.join("run/nvidia/mps");
        // What `mount-shm` mounts.
        fs::create_dir_all(root.join("shm"))?;
        let program = self.program(name, MPS_CONTROL_DAEMON, &[], &[("DIVVY_MPS_SHARES", "true")])?;
        let node = self.nodes.get_mut(name).ok_or_else(|| not_joined(name))?;
        let program = node.mps.insert(program);
        let until = Instant::now() + PATIENCE;
        while !root.join(".ready").exists() {
            serves_soon(Some(&mut *program), until)?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// End `mps-control-daemon`.
    pub(super) async fn stop_mps(&mut self, name: &str, end: End) -> io::Result<()> {
        let nvidia = self.nvidia(name)?.as_mut();
        match nvidia.and_then(|nvidia| nvidia.mps_control_daemon.take()) {
            Some(program) => finish(program, end).await,
            None => Ok(()),
        }
    }

    /// Report whether `nvidia-device-plugin` takes the place of the agent on a node.
    pub(super) fn runs_nvidia(&self, name: &str) -> bool {
        self.nodes.get(name).is_some_and(|node| node.nvidia.is_some())
    }

    /// Return the directory of the programs' own files on a node.
    pub(super) fn nvidia_directory(&self, name: &str) -> PathBuf {
        self.directory(name).join("nvidia")
    }

    fn nvidia(&mut self, name: &str) -> io::Result<&mut Option<NvidiaPrograms>> {
        let node = self.nodes.get_mut(name).ok_or_else(|| not_joined(name))?;
        Ok(&mut node.nvidia)
    }

    fn programs_of(&mut self, name: &str) -> io::Result<&mut NvidiaPrograms> {
        let missing = || {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("node {name} does not run nvidia-device-plugin"),
            )
        };
        self.nvidia(name)?.as_mut().ok_or_else(missing)
    }

    /// Report whether the kubelet has healthy devices of one of NVIDIA's resources.
    fn offers_nvidia(&self, name: &str) -> io::Result<bool> {
        let resources = self.node(name)?.device_manager().resources;
        let mut nvidias = resources.iter().filter(|(resource, _)| resource.starts_with("nvidia.com/"));
        Ok(nvidias.any(|(_, (_, healthy))| *healthy > 0))
    }

    /// Lay out what the programs find by its name: themselves, the driver's library and programs, and the kubelet's directories below the
    /// node's root.
    fn lay_out(&self, name: &str, directory: &Path) -> io::Result<()> {
        if directory.join("bin").exists() {
            return Ok(());
        }
        for part in ["bin", "lib", "tmp"] {
            fs::create_dir(directory.join(part))?;
        }
        for program in [DEVICE_PLUGIN, MPS_CONTROL_DAEMON] {
            symlink(&self.settings.programs.agent, directory.join("bin").join(program))?;
        }
        divvy_testkit::mps::install(&directory.join("bin"))?;
        symlink(&self.settings.programs.nvml_sim, directory.join("lib/libnvidia-ml.so.1"))?;
        let paths = self.node(name)?.paths();
        for (known, real) in [("var/lib/kubelet", &paths.kubelet_dir), ("var/run/cdi", &paths.cdi_dir)] {
            let known = paths.sys_root.join(known);
            fs::create_dir_all(known.parent().unwrap_or(&known))?;
            symlink(real, known)?;
        }
        Ok(())
    }

    fn program(&self, node: &str, program: &str, flags: &[String], more: &[(&str, &str)]) -> io::Result<ChildProgram> {
        let directory = self.nvidia_directory(node);
        let text = |path: &Path| path.display().to_string();
        let before = |path: PathBuf, variable: &str| match std::env::var(variable) {
            Ok(others) => format!("{}:{others}", path.display()),
            Err(_) => text(&path),
        };
        let config = format!("--config-file={}", directory.join("config.yaml").display());
        let mut args = vec![config.as_str()];
        args.extend(flags.iter().map(String::as_str));
        let (libraries, programs) = (
            before(directory.join("lib"), "LD_LIBRARY_PATH"),
            before(directory.join("bin"), "PATH"),
        );
        let (root, machines, temporary) = (
            text(&self.node(node)?.paths().sys_root),
            text(&self.root.path().join("machines.toml")),
            text(&directory.join("tmp")),
        );
        let mut env = vec![
            ("DIVVY_NODE_ROOT", root.as_str()),
            ("DIVVY_NVML_SIM", &machines),
            ("DIVVY_NVML_SIM_NODE", node),
            ("DIVVY_PROBE_INTERVAL", "1s"),
            ("DIVVY_HEALTH_RECOVERY", "1s"),
            ("LD_LIBRARY_PATH", &libraries),
            ("PATH", &programs),
            ("TMPDIR", &temporary),
        ];
        env.extend(more);
        let path = directory.join("bin").join(program);
        ChildProgram::start(
            &format!("{program}-{node}"),
            &path,
            &args,
            &env,
            &self.root.path().join("logs"),
        )
    }
}

async fn finish(mut program: ChildProgram, end: End) -> io::Result<()> {
    match end {
        End::Killed => program.kill().await,
        End::Stopped => program.stop().await.map(drop),
    }
}

/// Fail if a program that should serve has ended, or if the time is up.
fn serves_soon(program: Option<&mut ChildProgram>, until: Instant) -> io::Result<()> {
    let Some(program) = program else { return Ok(()) };
    match program.ended()? {
        true => Err(io::Error::other(format!("it has ended. {}", program.last_words()))),
        false if Instant::now() > until => Err(io::Error::other(format!("it does not serve. {}", program.last_words()))),
        false => Ok(()),
    }
}
