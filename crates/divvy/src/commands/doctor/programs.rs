//! What running programs say: each is asked at the same time as the others, and waited for no longer than `--timeout`.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use divvy_container::cdi::generate::{Root, proc, wsl};
use divvy_doctor::facts::Kind;
use divvy_doctor::facts::programs::{Probed, Socket};
use divvy_doctor::{Asked, Facts};
use rustix::fs::OFlags;
use tokio::net::UnixStream;

use super::{cluster, engine};

use crate::cli::doctor::DoctorArgs;

/// The kernel keeps at most a few MiB.
const LARGEST_LOG: usize = 16 * 1024 * 1024;

/// Fills in what programs say.
pub(super) async fn ask(args: &DoctorArgs, facts: &mut Facts<'static>) {
    facts.arch = Some(std::env::consts::ARCH.to_owned());
    let copy = args.root != Path::new("/");
    if copy {
        let reason = format!("{} is a copy of a machine: its programs cannot be asked", args.root.display());
        facts.arch = None;
        facts.probe = Asked::Not(reason.clone());
        facts.kernel_log = log_files(&facts.root);
        facts.containerd = Asked::Not(reason.clone());
        facts.docker = Asked::Not(reason.clone());
        facts.runtime_test = Asked::Not(reason.clone());
        facts.sockets = Asked::Not(reason.clone());
        facts.extender = Asked::Not(reason);
        if args.nvml_library.is_some() {
            facts.probe = probe(args, facts, args.timeout).await;
        }
    }
    let limit = args.timeout;
    if args.node && !copy {
        let (probe, log, containerd, docker, sockets, test) = tokio::join!(
            probe(args, facts, limit),
            within(limit, "/dev/kmsg", kernel_log),
            containerd(facts, limit),
            engine::docker(limit),
            sockets(facts, limit),
            engine::runtime_test(facts, limit),
        );
        facts.probe = probe;
        facts.kernel_log = log;
        facts.containerd = containerd;
        facts.docker = docker;
        facts.sockets = sockets;
        facts.runtime_test = test;
    }
    let mut client = None;
    if args.cluster {
        (facts.cluster, client) = cluster::objects(&args.connection, limit).await;
    }
    if !copy || args.extender.is_some() {
        facts.extender = cluster::extender(args.extender.as_deref(), facts, client, limit).await;
    }
}

/// `containerd config dump`, of the very program that runs, with the file that it was told of: where there are several, another would say something else.
async fn containerd(facts: &Facts<'_>, limit: Duration) -> Asked<String> {
    let Ok(engine) = facts.engine() else {
        return Asked::Absent("no containerd here".to_owned());
    };
    if let (Kind::Containerd, Some(process)) = (engine.kind, facts.process_of(&engine)) {
        let program = PathBuf::from(format!("/proc/{process}/exe"));
        return output_of(&program, &["--config", &engine.file, "config", "dump"], limit).await;
    }
    Asked::Absent("containerd does not run".to_owned())
}

/// Tries to connect to the sockets below the kubelet's folder.
async fn sockets(facts: &Facts<'_>, limit: Duration) -> Asked<Vec<Socket>> {
    let Some(kubelet) = facts.kubelet() else {
        return Asked::Absent("no kubelet here".to_owned());
    };
    let folder = format!("{}/device-plugins", kubelet.dir);
    let mut paths: Vec<String> = facts
        .root
        .names(&folder)
        .iter()
        .filter(|name| name.ends_with(".sock"))
        .map(|name| format!("{folder}/{name}"))
        .collect();
    paths.push(format!("{}/pod-resources/kubelet.sock", kubelet.dir));
    let asked = paths.into_iter().map(|path| async move {
        let answers = match tokio::time::timeout(limit, UnixStream::connect(&path)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(too_long("it", limit)),
        };
        Socket { path, answers }
    });
    Asked::Answer(futures::future::join_all(asked).await)
}

/// A blocking question.
async fn within<T: Send + 'static>(limit: Duration, what: &str, ask: impl FnOnce() -> Asked<T> + Send + 'static) -> Asked<T> {
    match tokio::time::timeout(limit, tokio::task::spawn_blocking(ask)).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => Asked::Failed(format!("{what}: {error}")),
        Err(_) => Asked::Failed(too_long(what, limit)),
    }
}

pub(super) fn too_long(what: &str, limit: Duration) -> String {
    format!("{what} did not answer within {} s", limit.as_secs())
}

/// What a program prints on standard output, if it ends well and in time.
pub(super) async fn output_of(program: &Path, arguments: &[&str], limit: Duration) -> Asked<String> {
    let shown = format!("{} {}", program.display(), arguments.join(" "));
    let child = tokio::process::Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    match tokio::time::timeout(limit, child).await {
        Err(_) => Asked::Failed(too_long(&shown, limit)),
        Ok(Err(error)) if error.kind() == ErrorKind::NotFound => Asked::Absent(format!("there is no {}", program.display())),
        // Whoever could not be started has said nothing.
        Ok(Err(error)) => Asked::Absent(format!("{shown} could not be started: {error}")),
        Ok(Ok(output)) if output.status.success() => Asked::Answer(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(Ok(output)) => Asked::Failed(format!("{} ({}, {shown})", last_line(&output.stderr), output.status)),
    }
}

/// What a program said last of why it failed.
pub(super) fn last_line(errors: &[u8]) -> String {
    let text = String::from_utf8_lossy(errors);
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.unwrap_or("without a word").to_owned()
}

async fn probe(args: &DoctorArgs, facts: &Facts<'_>, limit: Duration) -> Asked<Probed> {
    let driver = proc::loaded_driver(facts.tree).is_some() || wsl::is_there(facts.tree);
    if !driver && args.nvml_library.is_none() {
        return Asked::Absent("no NVIDIA driver is loaded".to_owned());
    }
    let program: PathBuf = match &args.probe {
        Some(program) => program.clone(),
        None => match std::env::current_exe() {
            Ok(own) => own.with_file_name("divvy-probe"),
            Err(error) => {
                return Asked::Absent(format!(
                    "the own program cannot be found, to look for divvy-probe beside it (--probe): {error}"
                ));
            }
        },
    };
    let mut arguments = vec!["--once"];
    let library = args.nvml_library.as_ref().map(|library| library.display().to_string());
    match &library {
        Some(library) => arguments.extend(["--nvml-library", library]),
        None if facts.driver_root != "/" => arguments.extend(["--driver-root", &facts.driver_root]),
        None => {}
    }
    match output_of(&program, &arguments, limit).await {
        Asked::Answer(text) => match serde_json::from_str(&text) {
            Ok(probed) => Asked::Answer(probed),
            Err(error) => Asked::Failed(format!("{} printed no snapshot: {error}", program.display())),
        },
        Asked::Absent(reason) => Asked::Absent(format!("{reason}, which asks the driver; --probe says where it is")),
        Asked::Failed(reason) => Asked::Failed(reason),
        Asked::Not(reason) => Asked::Not(reason),
    }
}

/// Where there is a copy of a machine, what its logger wrote down.
fn log_files(root: &Root<'_>) -> Asked<String> {
    let files = ["/var/log/kern.log", "/var/log/dmesg", "/var/log/messages"];
    match files.iter().find_map(|file| root.read(file, LARGEST_LOG)) {
        Some(bytes) => Asked::Answer(String::from_utf8_lossy(&bytes).into_owned()),
        None => Asked::Absent(format!("there is none of {}", files.join(", "))),
    }
}

/// Each read gives one record, `6,1234,56789,-;text`, until there is none.
fn kernel_log() -> Asked<String> {
    let path = "/dev/kmsg";
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path);
    let mut file = match file {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Asked::Absent(format!("there is no {path}")),
        Err(error) => return Asked::Failed(format!("{path}: {error}")),
    };
    let mut log = String::new();
    let mut record = vec![0; 16 * 1024];
    while log.len() < LARGEST_LOG {
        match file.read(&mut record) {
            Ok(0) => break,
            Ok(length) => log.push_str(&String::from_utf8_lossy(&record[..length])),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // Records that were overwritten while we read.
            Err(error) if error.kind() == ErrorKind::BrokenPipe || error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Asked::Failed(format!("{path}: {error}")),
        }
    }
    Asked::Answer(log)
}
