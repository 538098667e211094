//! Queries to running programs. All queries run concurrently, and each takes no longer than `--timeout`.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_cdi::generate::wsl;
use divvy_doctor::facts::programs::{Probed, SchedulerFile, Socket};
use divvy_doctor::facts::{EngineKind, Extending};
use divvy_doctor::{Asked, Facts};
use divvy_engines::{NoText, TextFiles};
use divvy_host::Root;
use divvy_model::names::GPU_MEM;
use divvy_oci::runtime::settings;
use rustix::fs::OFlags;
use tokio::net::UnixStream;

use super::output::{output_of, too_long};
use super::{cluster, engine};

use crate::cli::doctor::DoctorArgs;
use crate::scheduler_config::distribution::Distribution;
use crate::scheduler_config::merge::{ExtenderAddressSource, WantedSettings, merge};
use crate::scheduler_config::{self, Stanza, Tls};

/// The largest kernel log in bytes; the kernel keeps at most a few MiB.
const LARGEST_LOG: usize = 16 * 1024 * 1024;

/// The programs to query, as found in the machine's files. These files are read before the queries start: all queries share one
/// thread, and reading a file can block it.
#[derive(Debug)]
pub(super) struct Places {
    /// Whether an NVIDIA driver is loaded.
    driver: bool,
    /// The PID and the configuration file of the containerd that runs pods, or the reason why there is none.
    containerd: Result<(u32, String), &'static str>,
    /// The paths of the sockets below the kubelet's directory. `None` without a kubelet.
    sockets: Option<Vec<String>>,
    /// The path of `divvy-runtime`, if it is installed.
    runtime: Option<String>,
    /// The text of the runtime's settings file, or the reason why it cannot be read. `None` if the file does not exist.
    settings: Result<Option<String>, NoText>,
    /// The URL of the extender from kube-scheduler's configuration.
    extender: Option<String>,
    /// What `divvy scheduler-config` finds in that configuration.
    scheduler_file: Asked<SchedulerFile>,
    /// The kernel log from the log files, if the machine is a copy.
    log: Asked<String>,
}

impl Places {
    pub(super) fn of(facts: &Facts<'_>) -> Places {
        let containerd = match facts.engine() {
            Err(_) => Err("no containerd here"),
            Ok(engine) if engine.kind != EngineKind::Containerd => Err("containerd does not run"),
            Ok(engine) => facts
                .process_of(&engine)
                .map(|process| (process, engine.file.clone()))
                .ok_or("containerd does not run"),
        };
        let mut urls = facts.extenders().into_iter().map(|extender| extender.url);
        Places {
            driver: divvy_cdi::driver_version::loaded_driver(facts.tree).is_some() || wsl::is_there(facts.tree),
            containerd,
            sockets: facts.kubelet().map(|kubelet| socket_paths(facts, &kubelet.dir)),
            runtime: facts.program(&["divvy-runtime"]),
            settings: TextFiles::text(&facts.root, settings::PATH),
            extender: urls.find(|url| url.contains("gpushare")),
            scheduler_file: scheduler_file(facts),
            log: log_files(&facts.root),
        }
    }
}

/// Apply the rules of `divvy scheduler-config --merge` to kube-scheduler's configuration on this machine, if it is of version v1 (K10) and calls an
/// extender for GPUs (K12).
fn scheduler_file(facts: &Facts<'_>) -> Asked<SchedulerFile> {
    let Some((text, path)) = facts.scheduler_file() else {
        return Asked::Absent("the machine has no configuration of kube-scheduler".to_owned());
    };
    let calls = |extender: &Extending| extender.url.contains("gpushare") || extender.resources.iter().any(|name| name == GPU_MEM);
    if !text.contains(scheduler_config::API_VERSION) || !facts.extenders().iter().any(calls) {
        return Asked::Absent(format!("{path} has no extender for {GPU_MEM}, or is of an old version"));
    }
    let stanza = match Stanza::new(scheduler_config::LOCAL_URL, Tls::default()) {
        Ok(stanza) => stanza,
        Err(error) => return Asked::Failed(error.to_string()),
    };
    let wanted = WantedSettings {
        stanza,
        address: ExtenderAddressSource::Default,
        kubeconfig: None,
        default_kubeconfig: Distribution::Kubeadm.kubeconfig().to_owned(),
        profile: None,
    };
    Asked::Answer(match merge(&text, &path, &wanted) {
        Ok(merged) => SchedulerFile {
            stops: merged.stops,
            misplaces: merged.misplaces,
        },
        Err(error) => SchedulerFile {
            stops: vec![error.found()],
            misplaces: Vec::new(),
        },
    })
}

fn socket_paths(facts: &Facts<'_>, kubelet: &str) -> Vec<String> {
    let directory = format!("{kubelet}/device-plugins");
    let mut paths: Vec<String> = facts
        .root
        .names(&directory)
        .iter()
        .filter(|name| name.ends_with(".sock"))
        .map(|name| format!("{directory}/{name}"))
        .collect();
    paths.push(format!("{kubelet}/pod-resources/kubelet.sock"));
    paths
}

/// Query the programs, and add their answers to the facts.
pub(super) async fn ask(args: &DoctorArgs, facts: &mut Facts<'static>, places: Places) {
    facts.arch = Some(std::env::consts::ARCH.to_owned());
    facts.scheduler_file = places.scheduler_file.clone();
    let copy = args.root != Path::new("/");
    if copy {
        let reason = format!(
            "{} is a copy of a machine: its programs cannot be queried",
            args.root.display()
        );
        facts.arch = None;
        facts.probe = Asked::Not(reason.clone());
        facts.kernel_log = places.log.clone();
        facts.containerd = Asked::Not(reason.clone());
        facts.docker = Asked::Not(reason.clone());
        facts.runtime_test = Asked::Not(reason.clone());
        facts.sockets = Asked::Not(reason.clone());
        facts.extender = Asked::Not(reason);
        if args.nvml_library.is_some() {
            facts.probe = probe(args, facts, &places, args.timeout).await;
        }
    }
    let limit = args.timeout;
    if args.node && !copy {
        let (probe, log, containerd, docker, sockets, test) = tokio::join!(
            probe(args, facts, &places, limit),
            within(limit, "/dev/kmsg", kernel_log),
            containerd(&places, limit),
            engine::docker(limit),
            sockets(&places, limit),
            engine::runtime_test(&places.runtime, &places.settings, limit),
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
        let known = args.extender.clone().or(places.extender);
        facts.extender = cluster::extender(args, known, facts, client).await;
    }
}

/// Run `containerd config dump` with the executable and the configuration file of the containerd that is running, because the
/// machine may have several containerds with different configurations.
async fn containerd(places: &Places, limit: Duration) -> Asked<String> {
    match &places.containerd {
        Ok((process, file)) => {
            let program = PathBuf::from(format!("/proc/{process}/exe"));
            output_of(&program, &["--config", file, "config", "dump"], limit).await
        }
        Err(reason) => Asked::Absent((*reason).to_owned()),
    }
}

/// Try to connect to the sockets below the kubelet's directory.
async fn sockets(places: &Places, limit: Duration) -> Asked<Vec<Socket>> {
    let Some(paths) = places.sockets.clone() else {
        return Asked::Absent("no kubelet here".to_owned());
    };
    let asked = paths.into_iter().map(|path| async move {
        let error = match tokio::time::timeout(limit, UnixStream::connect(&path)).await {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(too_long("it", limit)),
        };
        Socket { path, error }
    });
    Asked::Answer(futures::future::join_all(asked).await)
}

/// Run a blocking query in a thread, with a time limit.
async fn within<T: Send + 'static>(limit: Duration, what: &str, ask: impl FnOnce() -> Asked<T> + Send + 'static) -> Asked<T> {
    match tokio::time::timeout(limit, tokio::task::spawn_blocking(ask)).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => Asked::Failed(format!("{what}: {error}")),
        Err(_) => Asked::Failed(too_long(what, limit)),
    }
}

async fn probe(args: &DoctorArgs, facts: &Facts<'_>, places: &Places, limit: Duration) -> Asked<Probed> {
    if !places.driver && args.nvml_library.is_none() {
        return Asked::Absent("no NVIDIA driver is loaded (D02)".to_owned());
    }
    let program: PathBuf = match &args.probe {
        Some(program) => program.clone(),
        None => match std::env::current_exe() {
            Ok(own) => own.with_file_name("divvy-probe"),
            Err(error) => {
                return Asked::Blocked(format!(
                    "this program's own path is unknown, so divvy-probe cannot be found next to it (give its path with --probe): {error}"
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
            Err(error) => Asked::Failed(format!("{} did not print a valid snapshot: {error}", program.display())),
        },
        Asked::Absent(reason) | Asked::Blocked(reason) => {
            Asked::Blocked(format!("{reason}, which queries the driver; give its path with --probe"))
        }
        Asked::Failed(reason) => Asked::Failed(reason),
        Asked::Not(reason) => Asked::Not(reason),
    }
}

/// Read the kernel log from the log files of a copied machine.
fn log_files(root: &Root<'_>) -> Asked<String> {
    let files = ["/var/log/kern.log", "/var/log/dmesg", "/var/log/messages"];
    match files.iter().find_map(|file| root.read(file, LARGEST_LOG)) {
        Some(bytes) => Asked::Answer(String::from_utf8_lossy(&bytes).into_owned()),
        None => Asked::Absent(format!("there is none of {}", files.join(", "))),
    }
}

/// Read the kernel log from `/dev/kmsg`. Each read returns one record, such as `6,1234,56789,-;text`, until there are no more
/// records.
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
            // EPIPE: records were overwritten while we read; the next read continues with the oldest record.
            Err(error) if error.kind() == ErrorKind::BrokenPipe || error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Asked::Failed(format!("{path}: {error}")),
        }
    }
    Asked::Answer(log)
}
