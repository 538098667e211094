//! The agent and the probe, in an embedded cluster of one node, on this machine's driver.
//!
//! The node's `/sys`, `/proc`, and `/dev` are a directory, in which the probe finds the pods of processes. So nothing needs root, and no cgroup is made.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use divvy_model::{Allocation, ContainerShare, GpuShare, MiB, names};
use divvy_share::limits::ShareLimits;
use divvy_testbed::api::{ApiServer, ApiServerOptions, Listening};
use divvy_testbed::builders;
use divvy_testbed::node::{NodeDescription, NodePaths, TestbedNode};
use divvy_testbed::programs::ChildProgram;
use serde_json::Value;
use tokio::time::sleep;

use crate::container::GpuCheckContainer;
use crate::driver::CheckedDriver;
use crate::pack::Pack;
use crate::program::CheckProgram;

const NODE: &str = "n1";
/// How long a step of the agent may take.
const PATIENCE: Duration = Duration::from_secs(20);
const MIB_PER_GIB: u64 = 1024;

/// The agent and what is around it.
#[derive(Debug)]
pub(crate) struct Rig {
    api: ApiServer,
    _listening: Listening,
    node: TestbedNode,
    paths: NodePaths,
    directory: PathBuf,
    agent: ChildProgram,
    _probe: ChildProgram,
    pods: usize,
}

impl Rig {
    /// Start the probe and the agent, and wait until the node offers the GPU.
    pub(crate) async fn start(pack: &Pack, driver: &CheckedDriver, directory: &Path) -> Result<Rig> {
        // A new one each time: after a check that failed, the agent and its state are new.
        let mut builder = tempfile::Builder::new();
        let directory = builder.prefix("rig").rand_bytes(4).tempdir_in(directory)?.keep();
        let api = ApiServer::new(ApiServerOptions::default());
        let listening = api.listen(([127, 0, 0, 1], 0).into()).await?;
        fs::write(directory.join("kubeconfig"), api.kubeconfig_for(listening.addr(), "agent"))?;
        let mut spec = NodeDescription::new(NODE, &directory);
        spec.gpu_minors = driver.gpus.iter().map(|gpu| gpu.minor).collect();
        let paths = spec.paths();
        install_driver(&paths.sys_root, &driver.version)?;
        let node = TestbedNode::start(api.client(), spec).await?;
        let probe = start_probe(pack, driver, &paths, &directory)?;
        let agent = start_agent(pack, &paths, &directory, &[])?;
        let mut rig = Rig {
            api,
            _listening: listening,
            node,
            paths,
            directory,
            agent,
            _probe: probe,
            pods: 0,
        };
        let wait = rig.wait("the node to offer the GPU", |rig| {
            let devices = rig.node.device_manager();
            (devices.resources.get(names::GPU_MEM)?.1 > 0).then_some(())
        });
        wait.await?;
        Ok(rig)
    }

    /// Start the agent again, with other flags.
    pub(crate) async fn restart_agent(&mut self, pack: &Pack, flags: &[&str]) -> Result<()> {
        self.agent.stop().await?;
        self.agent = start_agent(pack, &self.paths, &self.directory, flags)?;
        Ok(())
    }

    /// Create a pod with this share of the GPU, in GiB and percent, and wait until its container has started.
    pub(crate) async fn pod(&mut self, pack: &Pack, driver: &CheckedDriver, gib: u64, percent: u32) -> Result<SharePod> {
        self.pods += 1;
        let name = format!("p{}", self.pods);
        let pod = self.api.create("pods", manifest(&name, &driver.gpu().uuid, gib, percent))?;
        let uid = pod["metadata"]["uid"].as_str().context("a pod has a UID")?.to_owned();
        let share = self.directory.join("state/shares").join(&uid);
        let limits = share.join(&driver.gpu().uuid).join("limits");
        self.wait(&format!("the files of pod {name}"), |_| limits.exists().then_some(()))
            .await?;
        Ok(SharePod {
            container: GpuCheckContainer::new(pack, driver, &share)?,
            name,
            uid,
            limits,
            bytes: gib << 30,
            proc: self.paths.sys_root.join("proc"),
        })
    }

    /// Delete a pod, and wait until the agent has removed its files.
    pub(crate) async fn delete(&mut self, pod: SharePod) -> Result<()> {
        self.api
            .delete("pods", "default", &pod.name, &divvy_testbed::api::DeleteOptions::default())?;
        self.wait(&format!("the end of pod {}", pod.name), |_| {
            (!pod.limits.exists()).then_some(())
        })
        .await
    }

    /// Return the text of a pod's event with this reason.
    pub(crate) fn event(&self, pod: &SharePod, reason: &str) -> Option<String> {
        let events = self.api.list("events", "default").ok()?;
        let of_pod = |event: &&Value| event["reason"] == reason && event["involvedObject"]["name"] == pod.name.as_str();
        let event = events.iter().find(of_pod)?;
        event["message"].as_str().map(str::to_owned)
    }

    /// Wait until there is something.
    pub(crate) async fn wait<T>(&mut self, what: &str, mut look: impl FnMut(&Rig) -> Option<T>) -> Result<T> {
        let began = Instant::now();
        loop {
            if let Some(found) = look(self) {
                return Ok(found);
            }
            if self.agent.ended()? || began.elapsed() > PATIENCE {
                bail!("waited {:.1?} for {what}; {}", began.elapsed(), self.agent.last_words());
            }
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// A pod with a share of the GPU.
#[derive(Debug)]
pub(crate) struct SharePod {
    pub(crate) container: GpuCheckContainer,
    pub(crate) bytes: u64,
    name: String,
    uid: String,
    limits: PathBuf,
    /// The node's `/proc`.
    proc: PathBuf,
}

impl SharePod {
    /// Return what the agent has written for the guard.
    pub(crate) fn limits(&self) -> Result<ShareLimits> {
        let bytes = fs::read(&self.limits)?;
        let read = ShareLimits::from_bytes(&bytes);
        read.map(|(_, limits)| limits)
            .map_err(|error| anyhow::anyhow!("{}: {error}", self.limits.display()))
    }

    /// Let the probe find this pod as the pod of a process. `reported` is the process's PID as NVML has it.
    pub(crate) fn adopt(&self, reported: u32, own: u32) -> Result<()> {
        let directory = self.proc.join(reported.to_string());
        fs::create_dir_all(&directory)?;
        let cgroup = format!("0::/kubepods/burstable/pod{}/0123abcd\n", self.uid);
        fs::write(directory.join("cgroup"), cgroup)?;
        fs::write(directory.join("status"), format!("NSpid:\t{reported}\t{own}\n"))?;
        Ok(())
    }

    /// Start the program in the pod, with the guard or with another library.
    pub(crate) fn program(&self, pack: &Pack, driver: &CheckedDriver, library: &Path) -> Result<CheckProgram> {
        let program = driver.program(pack, library)?;
        self.adopt(program.pid(), program.pid())?;
        Ok(program)
    }
}

fn manifest(name: &str, uuid: &str, gib: u64, cores: u32) -> Value {
    let (uuid, memory) = (uuid.to_owned(), MiB(gib * MIB_PER_GIB));
    let allocation = Allocation {
        v: 1,
        gpus: vec![GpuShare {
            uuid: uuid.clone(),
            memory,
            cores,
            whole: false,
            enforcement: None,
        }],
        containers: [("main".to_owned(), vec![ContainerShare { uuid, memory, cores }])].into(),
    };
    let mut pod = builders::pod(name).gpu_mem(gib).grace_seconds(1).build();
    pod["spec"]["nodeName"] = NODE.into();
    pod["metadata"]["annotations"][names::ALLOCATION] = allocation.to_json().into();
    pod["metadata"]["annotations"][names::ISOLATION] = "soft".into();
    pod
}

/// Write the files from which the agent makes its CDI spec. No container mounts them.
fn install_driver(root: &Path, version: &str) -> Result<()> {
    for (path, text) in [
        ("sys/module/nvidia/version".to_owned(), format!("{version}\n")),
        ("usr/bin/nvidia-smi".to_owned(), "smi".to_owned()),
        ("etc/ld.so.cache".to_owned(), String::new()),
        (format!("usr/lib64/libcuda.so.{version}"), "a library".to_owned()),
        (format!("usr/lib64/libnvidia-ml.so.{version}"), "a library".to_owned()),
    ] {
        let path = root.join(path);
        fs::create_dir_all(path.parent().context("a file has a directory")?)?;
        fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    Ok(())
}

fn socket(directory: &Path) -> String {
    format!("unix:{}", directory.join("probe.sock").display())
}

fn start_probe(pack: &Pack, driver: &CheckedDriver, paths: &NodePaths, directory: &Path) -> Result<ChildProgram> {
    let words: Vec<String> = pack
        .words("divvy-probe")?
        .iter()
        .map(|word| word.display().to_string())
        .collect();
    let (program, rest) = words.split_first().context("a command has words")?;
    let (socket, nvml, root) = (
        socket(directory),
        driver.nvml.display().to_string(),
        paths.sys_root.display().to_string(),
    );
    let mut arguments: Vec<&str> = rest.iter().map(String::as_str).collect();
    arguments.extend([
        "--exit-with-stdin",
        "--listen",
        &socket,
        "--nvml-library",
        &nvml,
        "--sys-root",
        &root,
    ]);
    let environment: Vec<(&str, &str)> = driver
        .environment
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    Ok(ChildProgram::start(
        "probe",
        Path::new(program),
        &arguments,
        &environment,
        &directory.join("logs"),
    )?)
}

fn start_agent(pack: &Pack, paths: &NodePaths, directory: &Path, flags: &[&str]) -> Result<ChildProgram> {
    let text = |path: &Path| path.display().to_string();
    let (kubeconfig, state, socket) = (
        text(&directory.join("kubeconfig")),
        text(&directory.join("state")),
        socket(directory),
    );
    let (kubelet, cdi, root, guard) = (
        text(&paths.kubelet_dir),
        text(&paths.cdi_dir),
        text(&paths.sys_root),
        text(&pack.directory),
    );
    let arguments = [
        &[
            "--exit-with-stdin",
            "--node-name",
            NODE,
            "--kubeconfig",
            &kubeconfig,
            "--kubelet-dir",
            &kubelet,
            "--cdi-dir",
            &cdi,
            "--state-dir",
            &state,
            "--sys-root",
            &root,
            "--probe",
            &socket,
            "--guard=shadow",
            "--guard-dir",
            &guard,
            "--probe-interval",
            "1s",
        ][..],
        flags,
    ]
    .concat();
    Ok(ChildProgram::start(
        "agent",
        &pack.file("divvy-agent")?,
        &arguments,
        &[],
        &directory.join("logs"),
    )?)
}
