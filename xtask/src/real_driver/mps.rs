//! `mps-control-daemon` with NVIDIA's control program, which needs no GPU: only its servers do.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::{CheckResult, DriverBench, place};
use crate::debian::{find, unpack};
use crate::ptx::say;

const CONTROL: &str = "nvidia-cuda-mps-control";
/// How long something may take.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn check(bench: &DriverBench) -> Result<CheckResult> {
    let mut found = CheckResult::default();
    let old = unpack(&bench.packages, "mps470", "bullseye", &["nvidia-cuda-mps"])?;
    let mut programs = vec![("470", old)];
    programs.extend(bench.drivers.iter().map(|driver| (driver.branch, driver.root.clone())));
    // They mostly wait.
    let all = std::thread::scope(|scope| {
        let started: Vec<_> = programs
            .iter()
            .filter_map(|(branch, root)| Some((*branch, find(root, &|name| name == CONTROL)?)))
            .map(|(branch, control)| scope.spawn(move || one(bench, branch, &control)))
            .collect();
        let ended = started
            .into_iter()
            .map(|check| check.join().unwrap_or_else(|_| bail!("a check panicked")));
        ended.collect::<Result<Vec<CheckResult>>>()
    })?;
    for of_branch in all {
        found.total += of_branch.total;
        found.wrong.extend(of_branch.wrong);
    }
    Ok(found)
}

fn one(bench: &DriverBench, branch: &str, control: &Path) -> Result<CheckResult> {
    let mut found = CheckResult::default();
    let node = RealMpsNode::new(bench, branch, control)?;
    match branch {
        "470" => before_limits_of_memory(&node, &mut found),
        _ => with_limits(&node, branch, &mut found),
    }?;
    Ok(found)
}

/// A driver before 495 refuses limits of memory, with status 0.
fn before_limits_of_memory(node: &RealMpsNode, found: &mut CheckResult) -> Result<()> {
    let daemon = node.start()?;
    found.note(
        "470: the log says that the limits need another driver",
        until(|| node.log().contains("a driver from 495 on")),
    );
    found.note("470: nothing is served without its limits", !node.is_ready());
    stop(daemon)?;
    found.note("470: the end leaves no daemon", until(|| node.daemons().is_empty()));
    Ok(())
}

fn with_limits(node: &RealMpsNode, branch: &str, found: &mut CheckResult) -> Result<()> {
    let mut note = |what: &str, is_right: bool| found.note(format!("{branch}: {what}"), is_right);
    let daemon = node.start()?;
    let is_ready = until(|| node.is_ready());
    note("it serves", is_ready);
    if !is_ready {
        return stop(daemon);
    }
    let limits = || {
        let ask = |what: &str| node.ask(what).unwrap_or_default();
        let memory = [0, 1].map(|gpu| ask(&format!("get_default_device_pinned_mem_limit {gpu}")));
        (ask("get_default_active_thread_percentage"), memory)
    };
    let expected = ("25.0".to_owned(), ["10G".to_owned(), "3G".to_owned()]);
    note("its limits are set", limits() == expected);
    // The daemon answers before it writes, and two of its threads write. A question that only this program asks marks the end of its questions.
    let mark = "get_server_list";
    node.ask(mark)?;
    let log = || std::fs::read_to_string(&node.control_log).unwrap_or_default();
    let is_complete = || {
        let log = log();
        let count = |what: &str| log.lines().filter(|line| line.ends_with(what)).count();
        log.contains(mark) && count("Accepting connection...") == count("NEW UI") && count("NEW UI") == count("UI closed")
    };
    note("its log has each connection until its end", until(is_complete));
    // Three checks of the supervision.
    let before = log();
    std::thread::sleep(Duration::from_secs(10));
    let after = log();
    note("the daemon's log does not grow", after == before);
    if after != before {
        say(&format!("{branch}: the log was\n{before}\nand is now\n{after}"));
    }
    let first = node.daemons();
    kill("-KILL", &first);
    let is_another = || node.is_ready() && node.daemons().iter().any(|pid| !first.contains(pid));
    note("a daemon that was killed is started again", until(is_another));
    note("with its limits", until(|| limits() == expected));
    kill("-KILL", &[daemon.id()]);
    stop(daemon)?;
    std::fs::remove_file(node.directory.join("node/mps/.ready")).context("the mark could not be removed")?;
    let daemon = node.start()?;
    note(
        "a program that was killed is followed by another one",
        until(|| node.is_ready()),
    );
    note("which has one daemon", until(|| node.daemons().len() == 1));
    note("with the same limits", limits() == expected);
    stop(daemon)?;
    note("the end leaves no daemon", until(|| node.daemons().is_empty()));
    let left = std::fs::read_dir(node.pipe()).map_or(1, Iterator::count);
    note("and no file in the directory of connections", left == 0);
    Ok(())
}

/// A node with two GPUs, and the files of its program.
struct RealMpsNode {
    directory: PathBuf,
    control_log: PathBuf,
    control: PathBuf,
}

impl RealMpsNode {
    fn new(bench: &DriverBench, branch: &str, control: &Path) -> Result<RealMpsNode> {
        let directory = bench.work.join(format!("mps{branch}"));
        let at = |name: &str| directory.join(name);
        for name in ["bin", "node/var/lib/kubelet/device-plugins"] {
            std::fs::create_dir_all(at(name)).with_context(|| format!("{} could not be created", at(name).display()))?;
        }
        let machine = "v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"535.261.03\"\n\
                       [[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nmemory_mib = 40960\n[[node.gpu]]\nmodel = \"Tesla T4\"\nmemory_mib = 15360\n";
        let config = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n";
        place(&bench.built("libdivvy_nvml_sim.so")?, &at("driver/libnvidia-ml.so.1"))?;
        // It only sets compute modes.
        let smi = "#!/bin/sh\nexit 0\n";
        for (name, text) in [("machine.toml", machine), ("config.yaml", config), ("bin/nvidia-smi", smi)] {
            std::fs::write(at(name), text).with_context(|| format!("{} could not be written", at(name).display()))?;
            std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o755))?;
        }
        symlink(control, at("bin").join(CONTROL)).context("the control program could not be linked")?;
        symlink(bench.built("divvy-agent")?, at("bin/mps-control-daemon")).context("the agent could not be linked")?;
        Ok(RealMpsNode {
            control_log: at("node/mps/nvidia.com/gpu/log/control.log"),
            control: control.to_owned(),
            directory,
        })
    }

    fn start(&self) -> Result<Child> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.directory.join("log"))
            .context("the log could not be opened")?;
        let bin = self.directory.join("bin");
        let mut program = Command::new(bin.join("mps-control-daemon"));
        program.arg("--config-file").arg(self.directory.join("config.yaml"));
        // As NVIDIA's container runtime does it, the loader finds the driver.
        program.env("LD_LIBRARY_PATH", self.directory.join("driver"));
        program.env("PATH", format!("{}:/usr/bin:/bin", bin.display()));
        program.env("DIVVY_NVML_SIM", self.directory.join("machine.toml"));
        program
            .env("DIVVY_NODE_ROOT", self.directory.join("node"))
            .env("NODE_NAME", "n");
        // The end of its standard input ends it.
        program.stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log);
        program.spawn().context("mps-control-daemon could not be started")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }

    fn is_ready(&self) -> bool {
        self.directory.join("node/mps/.ready").exists()
    }

    fn pipe(&self) -> PathBuf {
        self.directory.join("node/mps/nvidia.com/gpu/pipe")
    }

    /// Give the control daemon a command, and return its answer.
    fn ask(&self, command: &str) -> Result<String> {
        let mut control = Command::new(&self.control);
        control
            .env("CUDA_MPS_PIPE_DIRECTORY", self.pipe())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut control = control.spawn().context("the control program could not be started")?;
        control
            .stdin
            .take()
            .context("it has a standard input")?
            .write_all(command.as_bytes())?;
        Ok(String::from_utf8_lossy(&control.wait_with_output()?.stdout).trim().to_owned())
    }

    /// The processes of this node's control daemon.
    fn daemons(&self) -> Vec<u32> {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
        let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let text = |pid: &u32, name: &str| {
            let bytes = std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let pipe = self.pipe().display().to_string();
        numbers
            .filter(|pid| text(pid, "cmdline").contains(CONTROL) && text(pid, "environ").contains(&pipe))
            .collect()
    }
}

/// Wait until something holds. Report whether it does.
fn until(holds: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !holds() {
        if start.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    true
}

fn kill(signal: &str, processes: &[u32]) {
    // A process that has ended meanwhile needs no signal.
    let _ = Command::new("kill")
        .arg(signal)
        .args(processes.iter().map(u32::to_string))
        .output();
}

/// End a program, and wait for its end.
fn stop(mut program: Child) -> Result<()> {
    kill("-TERM", &[program.id()]);
    program.wait().map(drop).context("mps-control-daemon did not end")
}
