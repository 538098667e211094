//! Plays a scenario to a program.

mod measure;

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use divvy_kubelet::api::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Empty, PreStartContainerRequest,
    PreferredAllocationRequest,
};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

pub(crate) use self::measure::{ProgramMeasures, measure};
use crate::kubelet::{ComparedDevice, FakeKubelet, KubeletRecord, Registered};
use crate::mps;
use crate::scenario::{ComparedProgram, GPU, PluginScenario, ScenarioMachine, ScenarioStep};

/// What a program did in a scenario.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlayOutcome {
    pub(crate) name: String,
    /// The exit status, if the program ended on its own.
    pub(crate) exit: Option<i32>,
    /// Why the program ended, without the position in its source code.
    pub(crate) error: Option<String>,
    /// The last registration of each resource.
    pub(crate) registrations: Vec<Registered>,
    pub(crate) devices: BTreeMap<String, Vec<ComparedDevice>>,
    /// The result of each step.
    pub(crate) answers: Vec<Value>,
}

/// How long the program may take to register, or to end.
pub(crate) const START: Duration = Duration::from_secs(15);
/// How long to wait for a change of the devices that may not come.
const CHANGE: Duration = Duration::from_millis(1500);
/// How long a plugin may take to notice another configuration or other MIG devices.
const NOTICE: Duration = Duration::from_secs(8);
/// How long a plugin may take to notice that events have not arrived for a minute.
const MINUTE: Duration = Duration::from_secs(75);
/// How long to wait for messages that should not come.
pub(crate) const SETTLE: Duration = Duration::from_millis(300);

/// A running program, in a mount namespace of its own.
pub(crate) struct PlayedProgram {
    pub(crate) child: Child,
    pub(crate) directory: TempDir,
    kubelet: FakeKubelet,
    log: PathBuf,
}

/// Play a scenario. `program` is the device plugin; NVIDIA's GPU feature discovery is next to it. `simulator` is the path of the simulated NVML.
pub(crate) async fn play(program: &Path, simulator: &Path, scenario: &PluginScenario) -> Result<PlayOutcome> {
    if scenario.program == ComparedProgram::FeatureDiscovery {
        return labels(program, simulator, scenario).await;
    }
    let mut running = PlayedProgram::start(program, simulator, scenario)?;
    let exit = running.wait_for(scenario.resources).await?;
    let mut answers = Vec::new();
    if exit.is_none() {
        for step in &scenario.steps {
            answers.push(running.step(step, scenario).await?);
        }
    }
    let seen = running.kubelet.seen().borrow().clone();
    let error = exit.map(|_| running.last_line()).transpose()?;
    running.stop().await?;
    let last: BTreeMap<&String, &Registered> = seen.registrations.iter().map(|one| (&one.resource, one)).collect();
    Ok(PlayOutcome {
        name: scenario.name.to_owned(),
        exit,
        error,
        registrations: last.into_values().cloned().collect(),
        devices: seen.devices,
        answers,
    })
}

/// Let a program print the labels, and return them as the outcome.
async fn labels(program: &Path, simulator: &Path, scenario: &PluginScenario) -> Result<PlayOutcome> {
    let mut running = PlayedProgram::start(&beside(program, scenario), simulator, scenario)?;
    let status = timeout(START, running.child.wait())
        .await
        .context("the program does not end")??;
    let printed = std::fs::read_to_string(running.directory.path().join("out"))?;
    let mut lines: Vec<&str> = printed.lines().collect();
    lines.sort_unstable();
    Ok(PlayOutcome {
        name: scenario.name.to_owned(),
        exit: status.code(),
        error: None,
        registrations: Vec::new(),
        devices: BTreeMap::new(),
        answers: lines.into_iter().map(Value::from).collect(),
    })
}

/// Return the path of NVIDIA's program for a scenario, next to NVIDIA's device plugin. Divvy's is one program for all.
pub(crate) fn beside(program: &Path, scenario: &PluginScenario) -> PathBuf {
    let beside = program.with_file_name(scenario.program.name());
    if beside.exists() { beside } else { program.to_owned() }
}

/// The script that replaces the directories that a device plugin knows by name, and then runs the program under the name of
/// NVIDIA's program. A scene with MPS runs in its own root directory, because it needs a directory `/mps`, which must not appear on the machine.
const SCRIPT: &str = r#"set -e
mount -t tmpfs tmpfs /var/lib && mkdir -p /var/lib/kubelet/device-plugins && mount --bind "$SCENE/kubelet" /var/lib/kubelet/device-plugins
mount -t tmpfs tmpfs /run && mkdir -p /run/cdi && mount --bind "$SCENE/cdi" /run/cdi
mount -t tmpfs tmpfs /proc/driver && mkdir /proc/driver/nvidia-caps && cp "$SCENE/mig-minors" /proc/driver/nvidia-caps/
[ -e /var/run/cdi ] || { echo "/var/run does not lead to /run on this machine" >&2; exit 1; }
[ -d "$SCENE/mps" ] || exec -a "$NAME" "$PROGRAM" "$@"
root=$SCENE/root
mkdir "$root" && mount -t tmpfs tmpfs "$root"
for entry in /*; do
    if [ "$entry" = /mps ]; then continue
    elif [ -L "$entry" ]; then cp -P "$entry" "$root$entry"
    elif [ -d "$entry" ]; then mkdir "$root$entry" && mount --rbind "$entry" "$root$entry"; fi
done
mkdir "$root/mps" && mount --bind "$SCENE/mps" "$root/mps"
exec chroot "$root" bash -c 'exec -a "$NAME" "$PROGRAM" "$@"' bash "$@""#;

impl PlayedProgram {
    pub(crate) fn start(program: &Path, simulator: &Path, scenario: &PluginScenario) -> Result<PlayedProgram> {
        let directory = tempfile::Builder::new().prefix("compare").tempdir()?;
        let at = |name: &str| directory.path().join(name);
        for name in ["kubelet", "cdi", "lib"] {
            std::fs::create_dir(at(name))?;
        }
        let simulator = std::path::absolute(simulator)?;
        if !scenario.machine.is_old_tegra {
            symlink(&simulator, at("lib/libnvidia-ml.so.1"))?;
        }
        symlink(&simulator, at("lib/libcuda.so.1"))?;
        std::fs::write(at("machine.toml"), scenario.machine.text())?;
        std::fs::write(at("mig-minors"), scenario.machine.mig_minors())?;
        std::fs::write(at("type"), "DGX-A100-fake-model\n")?;
        let mut args = scenario.args.clone();
        if scenario.program == ComparedProgram::FeatureDiscovery {
            args.push(format!("--machine-type-file={}", at("type").display()));
        }
        if let Some(config) = scenario.config {
            std::fs::write(at("config.yaml"), config)?;
            args.push(format!("--config-file={}", at("config.yaml").display()));
        }
        if scenario.machine.has_files {
            driver_files(&at("driver"), &simulator, &scenario.machine)?;
            args.push(format!("--driver-root-ctr-path={}", at("driver").display()));
        }
        if scenario.machine.is_old_tegra {
            std::fs::create_dir_all(at("driver/etc"))?;
            std::fs::write(at("driver/etc/nv_tegra_release"), "# R35 (release), REVISION: 4.1\n")?;
            args.push(format!("--driver-root-ctr-path={}", at("driver").display()));
        }
        let log = at("log");
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "bash", "-c", SCRIPT, "bash"])
            .args(&args)
            .env("SCENE", directory.path())
            .env("NAME", scenario.program.name())
            .env("PROGRAM", std::path::absolute(program)?)
            .env("LD_LIBRARY_PATH", at("lib"))
            .env("DIVVY_NVML_SIM", at("machine.toml"))
            .env("DIVVY_NVML_SIM_CONTROL", at("control"))
            .envs(scenario.env.iter().copied())
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(at("out"))?)
            .stderr(std::fs::File::create(&log)?)
            .process_group(0)
            .kill_on_drop(true);
        if let Some(state) = scenario.machine.state {
            std::fs::write(at("control.state"), state)?;
        }
        if scenario.uses_mps() {
            command.env("PATH", mps::prepare(directory.path())?);
        }
        if scenario.machine.has_control_daemon {
            mps::start_control(directory.path())?;
        }
        let kubelet = FakeKubelet::start(&at("kubelet"))?;
        let child = command
            .spawn()
            .context("unshare could not be run; it is part of util-linux, and needs root")?;
        Ok(PlayedProgram {
            child,
            directory,
            kubelet,
            log,
        })
    }

    /// Wait until this number of resources is registered and listed, or the program ends. Return its exit status.
    async fn wait_for(&mut self, resources: usize) -> Result<Option<i32>> {
        let mut seen = self.kubelet.seen();
        let all = seen.wait_for(|seen| resources > 0 && seen.devices.len() >= resources);
        tokio::select! {
            status = self.child.wait() => return Ok(Some(status?.code().unwrap_or(-1))),
            found = timeout(START, all) => {
                if found.is_err() && resources > 0 {
                    let log = std::fs::read_to_string(&self.log)?;
                    bail!("fewer than {resources} resources are registered after {START:?}\n{log}");
                }
            }
        }
        tokio::select! {
            status = self.child.wait() => Ok(Some(status?.code().unwrap_or(-1))),
            () = sleep(SETTLE) => Ok(None),
        }
    }

    async fn step(&mut self, step: &ScenarioStep, scenario: &PluginScenario) -> Result<Value> {
        match step {
            ScenarioStep::Options => {
                let options = self
                    .kubelet
                    .plugin(GPU)
                    .await?
                    .get_device_plugin_options(Empty {})
                    .await?
                    .into_inner();
                Ok(json!([
                    options.pre_start_required,
                    options.get_preferred_allocation_available
                ]))
            }
            ScenarioStep::PreStart => {
                let request = PreStartContainerRequest {
                    devices_ids: vec![crate::scenario::gpu(0)],
                };
                let answer = self.kubelet.plugin(GPU).await?.pre_start_container(request).await;
                Ok(answer.map_or_else(refused, |_| json!({})))
            }
            ScenarioStep::Allocate(resource, containers) => self.allocate(resource, containers).await,
            ScenarioStep::Preferred { available, must, size } => self.preferred(available, must, *size).await,
            ScenarioStep::Xid(gpu, xid) => {
                let seen = self.kubelet.seen();
                self.control(&json!({"op": "xid", "gpu": gpu, "xid": xid})).await?;
                Ok(unhealthy(seen).await)
            }
            ScenarioStep::XidOfMig(gpu, xid, instances) => {
                let seen = self.kubelet.seen();
                let request = json!({"op": "xid", "gpu": gpu, "xid": xid, "instances": instances});
                self.control(&request).await?;
                Ok(unhealthy(seen).await)
            }
            ScenarioStep::Driver(request) => {
                self.control(&serde_json::from_str(request)?).await?;
                // NVIDIA's plugin sends a list for each GPU. Divvy's probe tries again after a second.
                sleep(2 * CHANGE).await;
                Ok(unhealthy_in(&self.kubelet.seen().borrow().devices))
            }
            ScenarioStep::Notice(request) => {
                let before = self.kubelet.seen().borrow().clone();
                self.control(&serde_json::from_str(request)?).await?;
                Ok(self.after_a_change(&before).await)
            }
            ScenarioStep::Wait => {
                let before = self.kubelet.seen().borrow().clone();
                let mut seen = self.kubelet.seen();
                let _ = timeout(MINUTE, seen.wait_for(|seen| seen.devices != before.devices)).await;
                sleep(SETTLE).await;
                Ok(unhealthy_in(&self.kubelet.seen().borrow().devices))
            }
            ScenarioStep::Plug(model) => {
                let before = self.kubelet.seen().borrow().clone();
                let mut machine = scenario.machine.clone();
                machine.models.push((machine.gpus, model));
                machine.gpus += 1;
                std::fs::write(self.directory.path().join("machine.toml"), machine.text())?;
                self.control(&json!({"op": "describe"})).await?;
                Ok(self.after_a_change(&before).await)
            }
            ScenarioStep::Quit => {
                self.signal(rustix::process::Signal::QUIT)?;
                let status = timeout(START, self.child.wait())
                    .await
                    .context("the program does not end")??;
                let left = std::fs::read_dir(self.directory.path().join("kubelet"))?;
                let left: Result<Vec<_>, _> = left.map(|entry| Ok::<_, std::io::Error>(entry?.file_name())).collect();
                let mut left: Vec<String> = left?.into_iter().map(|name| name.to_string_lossy().into_owned()).collect();
                left.sort_unstable();
                Ok(json!({"exit": status.code(), "left": left}))
            }
            ScenarioStep::Reconnect => {
                let devices = self.kubelet.watch_again(GPU).await?;
                Ok(unhealthy_in(&BTreeMap::from([(GPU.to_owned(), devices)])))
            }
            ScenarioStep::RestartKubelet => {
                let before = self.kubelet.seen().borrow().registrations.len();
                self.kubelet.restart()?;
                self.registered_again(before).await
            }
            ScenarioStep::Hangup => {
                let before = self.kubelet.seen().borrow().registrations.len();
                self.hangup()?;
                self.registered_again(before).await
            }
            ScenarioStep::Rewrite(text) => {
                let before = self.kubelet.seen().borrow().clone();
                std::fs::write(self.directory.path().join("config.yaml"), text)?;
                Ok(self.after_a_change(&before).await)
            }
            ScenarioStep::Divide(mig) => {
                let before = self.kubelet.seen().borrow().clone();
                let machine = ScenarioMachine {
                    mig,
                    ..scenario.machine.clone()
                };
                std::fs::write(self.directory.path().join("machine.toml"), machine.text())?;
                self.control(&json!({"op": "describe"})).await?;
                Ok(self.after_a_change(&before).await)
            }
            ScenarioStep::ControlDaemon(runs) => {
                let before = self.kubelet.seen().borrow().clone();
                if *runs {
                    mps::start_control(self.directory.path())?
                } else {
                    mps::end_control(self.directory.path())?
                }
                Ok(self.after_a_change(&before).await)
            }
            ScenarioStep::Configure(text) => {
                let before = self.kubelet.seen().borrow().registrations.len();
                std::fs::write(self.directory.path().join("config.yaml"), text)?;
                self.hangup()?;
                let again = self.registered_again(before).await?;
                anyhow::ensure!(scenario.config.is_some(), "the scenario has no configuration file");
                Ok(again)
            }
        }
    }

    async fn allocate(&self, resource: &str, containers: &[Vec<String>]) -> Result<Value> {
        let container_requests = containers.iter().map(|ids| ContainerAllocateRequest {
            devices_ids: ids.clone(),
        });
        let request = AllocateRequest {
            container_requests: container_requests.collect(),
        };
        let Ok(mut plugin) = self.kubelet.plugin(resource).await else {
            return Ok(json!("the plugin cannot be reached"));
        };
        let answer = match plugin.allocate(request).await {
            Ok(answer) => answer.into_inner(),
            Err(status) => return Ok(refused(status)),
        };
        let containers = answer.container_responses.into_iter().map(|container| {
            let mut devices: Vec<Value> = container
                .devices
                .into_iter()
                .map(|node| json!([node.container_path, node.host_path, node.permissions]))
                .collect();
            devices.sort_by_key(Value::to_string);
            let mounts = container.mounts.into_iter();
            let mounts: Vec<Value> = mounts
                .map(|mount| json!([mount.container_path, mount.host_path, mount.read_only]))
                .collect();
            let mut envs = container.envs;
            for (name, value) in &mut envs {
                // By index, the order is random in NVIDIA's plugin.
                let by_index = value.split(',').all(|index| index.bytes().all(|byte| byte.is_ascii_digit() || byte == b':'));
                if name == "NVIDIA_VISIBLE_DEVICES" && by_index {
                    let mut sorted: Vec<&str> = value.split(',').collect();
                    sorted.sort_unstable();
                    *value = sorted.join(",");
                }
            }
            json!({
                "envs": envs,
                "mounts": mounts,
                "devices": devices,
                "annotations": container.annotations.into_iter().map(|(key, value)| (without_uuid(&key), value)).collect::<BTreeMap<_, _>>(),
                "cdi": container.cdi_devices.into_iter().map(|device| device.name).collect::<Vec<_>>(),
            })
        });
        Ok(containers.collect())
    }

    async fn preferred(&self, available: &[String], must: &[String], size: i32) -> Result<Value> {
        let request = PreferredAllocationRequest {
            container_requests: vec![ContainerPreferredAllocationRequest {
                available_device_ids: available.to_vec(),
                must_include_device_ids: must.to_vec(),
                allocation_size: size,
            }],
        };
        let answer = self.kubelet.plugin(GPU).await?.get_preferred_allocation(request).await;
        Ok(match answer {
            Err(status) => refused(status),
            Ok(answer) => {
                let containers = answer.into_inner().container_responses.into_iter();
                let sorted = containers.map(|mut container| {
                    container.device_ids.sort();
                    // Which replica of a GPU is chosen does not matter, and is random in NVIDIA's plugin.
                    container
                        .device_ids
                        .iter()
                        .map(|id| id.split("::").next().unwrap_or(id).to_owned())
                        .collect::<Vec<_>>()
                });
                json!(sorted.collect::<Vec<_>>())
            }
        })
    }

    /// Wait until the devices change, and return the healthy devices of each resource.
    async fn after_a_change(&self, before: &KubeletRecord) -> Value {
        let mut seen = self.kubelet.seen();
        let _ = timeout(NOTICE, seen.wait_for(|seen| seen.devices != before.devices)).await;
        sleep(SETTLE).await;
        let seen = self.kubelet.seen().borrow().clone();
        let healthy = seen.devices.into_iter().map(|(resource, devices)| {
            let healthy = devices.into_iter().filter(|device| device.1);
            (resource, healthy.map(|device| device.0).collect::<Vec<_>>())
        });
        json!(healthy.filter(|(_, healthy)| !healthy.is_empty()).collect::<BTreeMap<_, _>>())
    }

    /// Wait for the next registration, and return the devices that follow it.
    async fn registered_again(&self, before: usize) -> Result<Value> {
        let mut seen = self.kubelet.seen();
        let lists = seen.borrow().lists;
        let found = timeout(
            START,
            seen.wait_for(|seen| seen.registrations.len() > before && seen.lists > lists),
        );
        if found.await.is_err() {
            return Ok(json!("does not register again"));
        }
        sleep(SETTLE).await;
        Ok(json!(self.kubelet.seen().borrow().devices))
    }

    fn hangup(&self) -> Result<()> {
        self.signal(rustix::process::Signal::HUP)
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) -> Result<()> {
        let pid = self.child.id().context("the program has ended")?;
        let pid = rustix::process::Pid::from_raw(i32::try_from(pid)?).context("a process ID")?;
        // The program replaced the shell, which had replaced unshare.
        Ok(rustix::process::kill_process(pid, signal)?)
    }

    /// Send a request to the simulated driver.
    async fn control(&self, request: &Value) -> Result<()> {
        let path = self.directory.path().join("control");
        let stream = UnixStream::connect(&path)
            .await
            .with_context(|| format!("cannot connect to {}", path.display()))?;
        let (read, mut write) = stream.into_split();
        write.write_all(format!("{request}\n").as_bytes()).await?;
        let answer = BufReader::new(read).lines().next_line().await?.unwrap_or_default();
        anyhow::ensure!(
            answer.contains("\"ok\":true"),
            "the simulated driver refused {request}: {answer}"
        );
        Ok(())
    }

    /// Return the last line of the log that says why the program ended.
    pub(crate) fn last_line(&self) -> Result<String> {
        let log = std::fs::read_to_string(&self.log)?;
        let mut lines = log.lines().filter_map(|line| line.split_once("error starting plugins: "));
        Ok(lines
            .next_back()
            .map_or_else(|| without_klog(log.lines().last().unwrap_or_default()), |(_, text)| text)
            .to_owned())
    }

    pub(crate) async fn stop(mut self) -> Result<()> {
        if self.child.id().is_some() {
            self.signal(rustix::process::Signal::TERM)?;
            if timeout(Duration::from_secs(5), self.child.wait()).await.is_err() {
                self.child.kill().await?;
            }
        }
        mps::end_left_over(self.directory.path())
    }
}

/// Lay out the driver's root as it is mounted in a pod.
fn driver_files(root: &Path, simulator: &Path, machine: &ScenarioMachine) -> Result<()> {
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    std::fs::create_dir_all(&libraries)?;
    symlink(std::path::absolute(simulator)?, libraries.join("libnvidia-ml.so.1"))?;
    for library in ["libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"] {
        std::fs::write(libraries.join(format!("{library}.so.{}", machine.driver())), "")?;
    }
    let channels = root.join("dev/nvidia-caps-imex-channels");
    std::fs::create_dir_all(&channels)?;
    let gpus = (0..machine.gpus).map(|gpu| (format!("dev/nvidia{gpu}"), 195, gpu));
    let control = [
        ("dev/nvidiactl", 195, 255),
        ("dev/nvidia-uvm", 511, 0),
        ("dev/nvidia-uvm-tools", 511, 1),
    ];
    let control = control
        .into_iter()
        .map(|(path, major, minor)| (path.to_owned(), major, minor));
    let channel = machine
        .has_channel
        .then(|| ("dev/nvidia-caps-imex-channels/channel0".to_owned(), 505, 0));
    for (path, major, minor) in gpus.chain(control).chain(channel) {
        let mode = Mode::from_raw_mode(0o666);
        mknodat(CWD, root.join(&path), FileType::CharacterDevice, mode, makedev(major, minor))
            .with_context(|| format!("the device node {path} cannot be made"))?;
    }
    Ok(())
}

/// Wait for a change of the devices, and return the unhealthy devices.
async fn unhealthy(mut seen: watch::Receiver<KubeletRecord>) -> Value {
    seen.mark_unchanged();
    let _ = timeout(CHANGE, seen.changed()).await;
    unhealthy_in(&seen.borrow().devices)
}

fn unhealthy_in(devices: &BTreeMap<String, Vec<ComparedDevice>>) -> Value {
    let all = devices.values().flatten();
    json!(all.filter(|device| !device.1).map(|device| &device.0).collect::<Vec<_>>())
}

fn refused(status: tonic::Status) -> Value {
    json!({"error": [format!("{:?}", status.code()), status.message()]})
}

/// Return a line of a log without what klog writes before the text: `E1125 19:36:31.160199    3444 main.go:185] `.
fn without_klog(line: &str) -> &str {
    match line.split_once("] ") {
        Some((head, text)) if head.contains(".go:") => text,
        _ => line,
    }
}

/// Replace the random part of the key of a CDI annotation.
fn without_uuid(key: &str) -> String {
    match key.rsplit_once('_') {
        Some((head, uuid)) if uuid.len() == 36 => format!("{head}_UUID"),
        _ => key.to_owned(),
    }
}
