//! The agent in place of NVIDIA's MPS control daemon, with the real probe on a simulated driver, and scripts in place of the driver's
//! programs; and the device plugin next to it, with an emulated kubelet.

mod hostile;

use std::cell::RefCell;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use divvy_agent::Error;
use divvy_agent::nvidia::{ConfigSource, LoadedConfig, MpsSurroundings, Pace, Surroundings, device_plugin, mps_control_daemon};
use divvy_nvidia_config::{Environment, Invocation, NvidiaProgram};
use divvy_nvidia_plugin::mps::Intervals;
pub(crate) use divvy_shadow_testkit::existing as built;
use divvy_testbed::api::{ApiServer, ApiServerOptions, Listening};
use divvy_testbed::node::{NodeDescription, TestbedNode};
use divvy_testbed::simulated_driver::ask;
use divvy_testkit::mps::{CALLS, calls, install};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::json;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The deadline for everything that a test waits for, chosen for a slow machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);
const CONTROL: &str = "nvidia-cuda-mps-control";

pub(crate) fn uuid(index: u32) -> String {
    format!("GPU-{index:08x}-0000-4000-8000-000000000000")
}

/// A node in a directory, with a simulated driver.
pub(crate) struct Bed {
    directory: TempDir,
    pub(crate) surroundings: Surroundings,
}

pub(crate) type Running = (JoinHandle<Result<(), Error>>, CancellationToken);

impl Bed {
    /// Create a node with GPUs of these models.
    pub(crate) fn new(models: &[&str]) -> Bed {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        for name in ["bin", "mps", "root", "cdi", "sockets"] {
            std::fs::create_dir(at(name)).expect("created");
        }
        install(&at("bin")).expect("the scripts");
        let probe = at("probe");
        let script = format!(
            "#!/bin/sh\nexport DIVVY_NVML_SIM={:?} DIVVY_NVML_SIM_CONTROL={:?}\nexec {:?} --nvml-library {:?} --sys-root {:?} \"$@\"\n",
            at("machine.toml"),
            at("control"),
            built("divvy-hardware", "divvy-probe"),
            built("divvy-nvml-sim", "libdivvy_nvml_sim.so"),
            at("root"),
        );
        std::fs::write(&probe, script).expect("written");
        std::fs::set_permissions(&probe, std::fs::Permissions::from_mode(0o755)).expect("executable");
        let mut path = at("bin").into_os_string();
        path.push(":/usr/bin:/bin");
        let surroundings = Surroundings {
            probe,
            probe_dir: at("private"),
            sockets: at("sockets"),
            cdi_dir: at("cdi"),
            root: at("root"),
            mps: MpsSurroundings {
                root: at("mps"),
                system: at("root"),
                path,
                deadline: Duration::from_secs(10),
                end_limit: Duration::from_secs(25),
                intervals: Intervals {
                    check: 50,
                    ask: 1_000,
                    retry: 200,
                    backoff: 50,
                    grace: 0,
                },
                patience: Duration::from_millis(200),
                count: Duration::from_millis(50),
                for_shares: false,
                pod: String::new(),
                driver_root: at("driver-root"),
                own: built("divvy-agent", "divvy-agent"),
            },
            pace: Pace::default(),
            metrics: None,
            events: None,
        };
        let bed = Bed { directory, surroundings };
        bed.describe(models, "");
        bed
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Write the machine's description. `more` has further values of each GPU.
    pub(crate) fn describe(&self, models: &[&str], more: &str) {
        let mut text = "v = 1\n[[node]]\nname = \"n\"\ndriver = \"550.54.15\"\n".to_owned();
        for (index, model) in (0..).zip(models) {
            let uuid = uuid(index);
            text.push_str(&format!(
                "[[node.gpu]]\nmodel = \"{model}\"\nuuid = \"{uuid}\"\nmemory_mib = 40960\ncc = \"8.0\"\n{more}\n"
            ));
        }
        std::fs::write(self.at("machine.toml"), text).expect("written");
    }

    pub(crate) fn configure(&self, text: &str) {
        let (new, file) = (self.at("config.new"), self.at("config.yaml"));
        std::fs::write(&new, text).expect("written");
        std::fs::rename(new, file).expect("replaced");
    }

    pub(crate) fn source(&self, program: NvidiaProgram, arguments: &[&str]) -> ConfigSource {
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        let invocation = Invocation::parse(program, "1", &arguments, &Environment::new()).expect("arguments");
        ConfigSource::new(Some(self.at("config.yaml")), move |text| {
            let (config, warnings) = invocation.config(text)?;
            Ok(LoadedConfig { config, warnings })
        })
    }

    fn start(&self) -> Running {
        self.start_with(&[])
    }

    fn start_with(&self, arguments: &[&str]) -> Running {
        let stop = CancellationToken::new();
        let source = self.source(NvidiaProgram::MpsControlDaemon, arguments);
        let surroundings = self.surroundings.clone();
        let task = tokio::spawn(mps_control_daemon(source, surroundings, stop.clone()));
        (task, stop)
    }

    /// Let one of the scripts behave in another way.
    fn mode(&self, script: &str, mode: &str) {
        std::fs::write(self.at("bin").join(format!("{script}.mode")), mode).expect("written");
    }

    /// Return the recorded calls, except questions, in short words.
    fn calls(&self) -> Vec<String> {
        let root = self.at("mps").display().to_string();
        let calls = calls(&self.at("bin")).expect("readable");
        calls.iter().map(|line| line.replace(&root, "/mps")).collect()
    }

    fn count(&self, part: &str) -> usize {
        self.calls().iter().filter(|call| call.contains(part)).count()
    }

    fn is_ready(&self) -> bool {
        self.at("mps/.ready").exists()
    }

    fn is_started(&self, resource: &str) -> bool {
        self.at("mps").join(resource).join(".started").exists()
    }

    /// Return the process of a resource's control daemon, if it exists.
    fn process(&self, resource: &str) -> Option<Pid> {
        let file = self.at("mps").join(resource).join(format!("pipe/{CONTROL}.pid"));
        let number = std::fs::read_to_string(file).ok()?.trim().parse().ok()?;
        let pid = Pid::from_raw(number)?;
        test_kill_process(pid).ok().map(|()| pid)
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        // A test that fails leaves scripts behind that run in the background.
        for resource in ["nvidia.com/gpu", "nvidia.com/a100", "nvidia.com/h100", "divvy.dev/shares"] {
            if let Some(pid) = self.process(resource) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// Wait until something holds.
pub(crate) async fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LIMIT, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn ended((task, _): Running) -> Result<(), Error> {
    tokio::time::timeout(LIMIT, task)
        .await
        .expect("ends in time")
        .expect("no panic")
}

pub(crate) async fn stop(running: Running) {
    running.1.cancel();
    ended(running).await.expect("it stops without an error");
}

fn share(resources: &str) -> String {
    format!("version: v1\nsharing: {{mps: {{resources: [{resources}]}}}}\n")
}

fn replicas(count: u32) -> String {
    share(&format!("{{name: nvidia.com/gpu, replicas: {count}}}"))
}

pub(crate) const A100: &str = "NVIDIA A100-SXM4-40GB";
const PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu/pipe";

fn smi(gpu: u32, mode: &str) -> String {
    format!("nvidia-smi -i {} -c {mode}", uuid(gpu))
}

/// The daemon's marker says in which pod it runs.
#[tokio::test]
async fn the_daemon_for_shares_serves_every_gpu_without_limits() {
    let mut bed = Bed::new(&[A100; 2]);
    bed.surroundings.mps.for_shares = true;
    bed.surroundings.mps.pod = "6b8e5a3c-0000-4000-8000-000000000001".to_owned();
    // It has no effect: the file is for NVIDIA's resources.
    bed.configure(&replicas(4));
    let running = bed.start();
    until("ready", || bed.is_ready()).await;
    let pipe = "CUDA_MPS_PIPE_DIRECTORY=/mps/divvy.dev/shares/pipe";
    assert_eq!(
        bed.calls(),
        [
            smi(0, "EXCLUSIVE_PROCESS"),
            smi(1, "EXCLUSIVE_PROCESS"),
            format!("control -d CUDA_MPS_LOG_DIRECTORY=/mps/divvy.dev/shares/log {pipe}"),
            format!("control set_default_active_thread_percentage 100 {pipe}"),
        ]
    );
    let marker = bed.at("mps/divvy.dev/shares/.started");
    let said = std::fs::read_to_string(&marker).expect("a marker");
    assert_eq!(said, bed.surroundings.mps.pod);
    stop(running).await;
    assert!(!marker.exists());
    assert_eq!(bed.count("DEFAULT"), 2);
}

/// The container does not have the driver's programs.
#[tokio::test]
async fn missing_programs_run_in_the_drivers_root_directory() {
    if !divvy_skip::root("change the root directory of a process") {
        return;
    }
    let mut bed = Bed::new(&[A100]);
    bed.surroundings.mps.for_shares = true;
    bed.surroundings.mps.path = bed.at("nothing").into_os_string();
    bed.configure("version: v1\n");
    let root = bed.at("driver-root");
    // A shell, which writes what it was told. It runs only if its libraries are found, so only with this root directory.
    copy_with_libraries("/bin/sh", &root);
    std::fs::create_dir_all(root.join("usr/bin")).expect("created");
    for name in ["nvidia-smi", CONTROL] {
        let path = root.join("usr/bin").join(name);
        let text = "#!/bin/sh\necho \"$0 $* $CUDA_MPS_PIPE_DIRECTORY\" >> /calls\n[ \"$1\" = -d ] || echo 100.0\n";
        std::fs::write(&path, text).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("executable");
    }
    let running = bed.start();
    until("ready", || bed.is_ready()).await;
    let pipe = bed.at("mps/divvy.dev/shares/pipe").display().to_string();
    let calls = std::fs::read_to_string(root.join("calls")).expect("calls");
    let calls: Vec<&str> = calls.lines().take(3).collect();
    assert_eq!(
        calls,
        [
            format!("/usr/bin/nvidia-smi -i {} -c EXCLUSIVE_PROCESS ", uuid(0)),
            format!("/usr/bin/nvidia-cuda-mps-control -d {pipe}"),
            format!("/usr/bin/nvidia-cuda-mps-control  {pipe}"),
        ]
    );
    stop(running).await;
}

/// Copy a program and its libraries to the same paths below another root directory.
fn copy_with_libraries(program: &str, root: &Path) {
    let listed = std::process::Command::new("ldd").arg(program).output().expect("ldd");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let libraries = listed.split_whitespace().filter(|word| word.starts_with('/'));
    for path in libraries.chain([program]) {
        let to = root.join(path.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().expect("a directory")).expect("created");
        std::fs::copy(path, to).expect(path);
    }
}

#[tokio::test]
async fn a_daemon_gets_the_limits_and_the_end_leaves_a_clean_node() {
    let bed = Bed::new(&[A100; 2]);
    bed.configure(&replicas(4));
    let running = bed.start();
    until("ready", || bed.is_ready()).await;
    let mut expected = vec![
        smi(0, "EXCLUSIVE_PROCESS"),
        smi(1, "EXCLUSIVE_PROCESS"),
        format!("control -d CUDA_MPS_LOG_DIRECTORY=/mps/nvidia.com/gpu/log {PIPE}"),
        format!("control set_default_device_pinned_mem_limit 0 10240M {PIPE}"),
        format!("control set_default_device_pinned_mem_limit 1 10240M {PIPE}"),
        format!("control set_default_active_thread_percentage 25 {PIPE}"),
    ];
    assert_eq!(bed.calls(), expected);
    assert!(bed.is_started("nvidia.com/gpu"));
    stop(running).await;
    expected.extend([format!("control quit {PIPE}"), smi(0, "DEFAULT"), smi(1, "DEFAULT")]);
    // The GPUs are opened at the same time.
    let mut calls = bed.calls();
    calls.get_mut(7..).expect("more calls").sort_unstable();
    assert_eq!(calls, expected);
    let left = std::fs::read_dir(bed.at("mps/nvidia.com/gpu")).expect("its directory");
    let left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(left, ["pipe"]);
    let pipe = std::fs::read_dir(bed.at("mps/nvidia.com/gpu/pipe")).expect("a directory");
    assert_eq!(pipe.count(), 0, "what the control program leaves behind");
    assert!(!bed.is_ready() && bed.process("nvidia.com/gpu").is_none());
}

#[tokio::test]
async fn on_a_node_with_selinux_containers_may_use_the_connections() {
    if !divvy_skip::root("set a security label") {
        return;
    }
    let bed = Bed::new(&[A100]);
    bed.configure(&replicas(2));
    std::fs::create_dir_all(bed.at("root/sys/fs/selinux")).expect("created");
    let running = bed.start();
    until("ready", || bed.is_ready()).await;
    let mut label = [0u8; 100];
    let read = rustix::fs::lgetxattr(bed.at("mps/nvidia.com/gpu/pipe"), "security.selinux", &mut label);
    let length = read.expect("a label");
    assert_eq!(&label[..length], b"system_u:object_r:container_file_t:s0");
    stop(running).await;
}

#[tokio::test]
async fn a_dead_daemon_is_withdrawn_and_restarted_with_its_limits() {
    let bed = Bed::new(&[A100]);
    bed.configure(&replicas(2));
    let running = bed.start();
    until("ready", || bed.is_ready()).await;
    let limit = "set_default_device_pinned_mem_limit 0 20480M";
    for _ in 0..2 {
        let before = bed.count(limit);
        let process = bed.process("nvidia.com/gpu").expect("a process");
        // While the restart fails, nothing says that the resource is served.
        bed.mode("control", "fail");
        kill_process(process, Signal::KILL).expect("killed");
        until("withdrawn", || !bed.is_ready() && !bed.is_started("nvidia.com/gpu")).await;
        bed.mode("control", "");
        until("ready again", || bed.is_ready()).await;
        assert!(bed.is_started("nvidia.com/gpu"));
        // On a busy machine, a start may take too long, and is tried again.
        assert!(bed.count(limit) > before);
    }
    assert_eq!(bed.count("while .started is there"), 0);
    assert_eq!(bed.count("DEFAULT"), 0, "the GPU stays closed while its daemon is wanted");
    stop(running).await;
}

#[tokio::test]
async fn a_daemon_whose_limits_are_not_what_was_set_never_serves() {
    // The driver accepts the limits and does not set them, or it does not know them.
    for mode in ["wrong", "old"] {
        let bed = Bed::new(&[A100]);
        bed.configure(&replicas(2));
        bed.mode("control", mode);
        let running = bed.start();
        until("two attempts", || bed.count("control -d") > 1).await;
        assert!(!bed.is_ready() && !bed.is_started("nvidia.com/gpu"), "{mode}");
        bed.mode("control", "");
        until("ready", || bed.is_ready()).await;
        stop(running).await;
    }
}

#[tokio::test]
async fn failed_starts_are_repeated_and_hanging_programs_killed() {
    let mut bed = Bed::new(&[A100]);
    bed.surroundings.mps.deadline = Duration::from_secs(1);
    bed.configure(&replicas(2));
    bed.mode("smi", "hang");
    let running = bed.start();
    let hanging = bed.at("bin/hanging");
    let number = || std::fs::read_to_string(&hanging).ok()?.trim().parse().ok();
    until("the program hangs", || number().is_some()).await;
    let first = number().and_then(Pid::from_raw).expect("a process");
    until("it is killed", || test_kill_process(first).is_err()).await;
    bed.mode("smi", "fail");
    let attempts = bed.count("EXCLUSIVE_PROCESS");
    until("another attempt", || bed.count("EXCLUSIVE_PROCESS") > attempts + 1).await;
    assert_eq!(
        bed.count("control -d"),
        0,
        "without the compute mode, a container could do without its limits"
    );
    // A daemon that does not quit is killed.
    bed.mode("smi", "");
    until("ready", || bed.is_ready()).await;
    bed.mode("control", "hang");
    let process = bed.process("nvidia.com/gpu").expect("a process");
    stop(running).await;
    until("the daemon has ended", || test_kill_process(process).is_err()).await;
    assert_eq!(bed.calls().last(), Some(&smi(0, "DEFAULT")));
}

#[tokio::test]
async fn a_new_configuration_restarts_only_the_daemons_it_concerns() {
    let bed = Bed::new(&[A100, "NVIDIA H100 80GB HBM3"]);
    let configure = |a100: u32, h100: &str| {
        let patterns = "resources: {gpus: [{pattern: '*A100*', name: a100}, {pattern: '*', name: h100}]}\n";
        bed.configure(&format!(
            "{patterns}{}",
            share(&format!("{{name: a100, replicas: {a100}}}{h100}")).replace("version: v1\n", "")
        ));
    };
    configure(2, ", {name: h100, replicas: 5}");
    let running = bed.start();
    until("ready", || bed.is_ready()).await;
    let h100 = bed.process("nvidia.com/h100").expect("a process");
    configure(4, ", {name: h100, replicas: 5}");
    until("the new limit", || {
        bed.count("set_default_device_pinned_mem_limit 0 10240M") == 1
    })
    .await;
    until("ready again", || bed.is_ready()).await;
    assert_eq!(bed.process("nvidia.com/h100"), Some(h100));
    assert_eq!((bed.count("-d "), bed.count("quit")), (3, 1));
    configure(4, "");
    until("GPU 1 has its default mode again", || {
        bed.calls().contains(&smi(1, "DEFAULT"))
    })
    .await;
    until("ready", || bed.is_ready() && !bed.is_started("nvidia.com/h100")).await;
    assert!(bed.is_started("nvidia.com/a100"));
    stop(running).await;
}

#[tokio::test]
async fn leftovers_of_a_killed_run_are_cleared_before_serving() {
    let bed = Bed::new(&[A100]);
    bed.configure(&replicas(2).replace("sharing", "flags: {failOnInitError: false}\nsharing"));
    std::fs::write(bed.at("control.state"), r#"{"initError":9}"#).expect("written");
    let old = bed.at("mps/nvidia.com/old");
    std::fs::create_dir_all(old.join("log")).expect("created");
    for directory in [old.clone(), bed.at("mps/nvidia.com/gpu")] {
        std::fs::create_dir_all(&directory).expect("created");
        std::fs::write(directory.join(".started"), "").expect("written");
    }
    std::fs::write(old.join(".exclusive"), format!("{}\n", uuid(7))).expect("written");
    std::fs::write(bed.at("mps/.ready"), "").expect("written");
    let running = bed.start();
    // The markers do not wait for the driver, which is not loaded yet.
    until("the markers are gone", || {
        !bed.is_ready() && !bed.is_started("nvidia.com/gpu")
    })
    .await;
    assert_eq!(bed.calls(), Vec::<String>::new());
    until("the driver's socket", || bed.at("control").exists()).await;
    ask(&bed.at("control"), &json!({"op": "init", "error": 0}))
        .await
        .expect("loaded");
    until("the other GPU is open again", || bed.calls().contains(&smi(7, "DEFAULT"))).await;
    until("ready", || bed.is_ready()).await;
    assert!(!old.join(".started").exists() && !old.join(".exclusive").exists() && !old.join("log").exists());
    stop(running).await;
}

#[tokio::test]
async fn a_gpu_that_could_not_be_opened_is_opened_by_the_next_run() {
    let bed = Bed::new(&[A100, A100]);
    bed.configure(&replicas(2));
    let running = bed.start();
    until("ready", || bed.is_ready()).await;
    bed.mode("smi", "fail");
    stop(running).await;
    let list = bed.at("mps/nvidia.com/gpu/.exclusive");
    assert_eq!(
        std::fs::read_to_string(&list).expect("kept"),
        format!("{}\n{}\n", uuid(0), uuid(1))
    );
    bed.mode("smi", "");
    // The next run shares nothing.
    bed.configure("version: v1\n");
    let running = bed.start();
    until("the list is gone", || !list.exists()).await;
    let opened = |gpu| bed.calls().iter().filter(|call| **call == smi(gpu, "DEFAULT")).count();
    assert_eq!((opened(0), opened(1)), (2, 2));
    stop(running).await;
}

#[tokio::test]
async fn an_unsuitable_configuration_is_refused_with_nvidias_texts() {
    let bed = Bed::new(&[A100]);
    bed.configure(&replicas(49));
    let error = ended(bed.start()).await.expect_err("too many").to_string();
    assert_eq!(
        error,
        "error starting plugins: error getting daemons: invalid MPS configuration: invalid device maximum allowed replicas exceeded: 49 > 48"
    );
    bed.configure(&replicas(2));
    let error = ended(bed.start_with(&["--mig-strategy=mixed"])).await.expect_err("mixed");
    assert_eq!(
        error.to_string(),
        "error starting plugins: unable to validate flags: using --mig-strategy=mixed is not supported with MPS"
    );
    assert_eq!(bed.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn mig_devices_get_no_daemon() {
    let bed = Bed::new(&[]);
    bed.describe(
        &[A100],
        "mig_capable = true\nmig = [{ gpu_instance = 1, compute_instance = 0, profile = 0, uuid = \"MIG-0\" }]",
    );
    bed.configure(&replicas(2));
    let old = bed.at("mps/nvidia.com/old");
    std::fs::create_dir_all(&old).expect("created");
    std::fs::write(old.join(".exclusive"), format!("{}\n", uuid(7))).expect("written");
    let running = bed.start_with(&["--mig-strategy=single"]);
    // What an earlier run left behind is cleared when it is known which daemons are wanted.
    until("a decision", || bed.calls() == [smi(7, "DEFAULT")]).await;
    assert!(!bed.is_ready());
    stop(running).await;
}

/// The user of the kubeconfig in the bed's directory.
pub(crate) const USER: &str = "plugin";

/// A device plugin on the bed's node, with an emulated kubelet.
pub(crate) struct PluginBed {
    pub(crate) api: ApiServer,
    _listening: Listening,
    _node: TestbedNode,
    sockets: PathBuf,
    pub(crate) running: Running,
}

impl PluginBed {
    pub(crate) async fn new(bed: &Bed, arguments: &[&str]) -> PluginBed {
        let api = ApiServer::new(ApiServerOptions::default());
        let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("listening");
        std::fs::write(bed.at("kubeconfig"), api.kubeconfig_for(listening.addr(), USER)).expect("written");
        let mut spec = NodeDescription::new("n1", bed.at("node"));
        spec.timings.status_period = Duration::from_millis(10);
        let sockets = spec.paths().kubelet_dir.join("device-plugins");
        let node = TestbedNode::start(api.client(), spec).await.expect("a node");
        let surroundings = Surroundings {
            sockets: sockets.clone(),
            probe_dir: bed.at("private-too"),
            ..bed.surroundings.clone()
        };
        let socket = format!("--kubelet-socket={}", sockets.join("kubelet.sock").display());
        let source = bed.source(NvidiaProgram::DevicePlugin, &[arguments, &[&socket]].concat());
        let stop = CancellationToken::new();
        PluginBed {
            running: (tokio::spawn(device_plugin(source, surroundings, stop.clone())), stop),
            api,
            _listening: listening,
            _node: node,
            sockets,
        }
    }

    /// Wait until the node's status has this number of GPUs.
    pub(crate) async fn has(&self, kind: &str, count: Option<&str>) {
        let found = self.api.until(LIMIT, |api| {
            let node = api.get("nodes", "", "n1").ok()?;
            let found = node["status"][kind]["nvidia.com/gpu"].as_str();
            (found == count).then_some(())
        });
        assert!(found.await.is_some(), "{kind} is not {count:?}");
    }
}

#[tokio::test]
async fn the_plugin_serves_only_while_the_daemon_serves() {
    let bed = Bed::new(&[A100; 2]);
    bed.configure(&replicas(2));
    // The marker alone does not count: a control daemon must answer.
    std::fs::create_dir_all(bed.at("mps/nvidia.com/gpu/pipe")).expect("created");
    std::fs::write(bed.at("mps/nvidia.com/gpu/.started"), "").expect("written");
    let plugin = PluginBed::new(&bed, &["--mps-root=/run/nvidia/mps"]).await;
    let calls = bed.at("bin").join(CALLS);
    let questions = || {
        std::fs::read_to_string(&calls)
            .unwrap_or_default()
            .matches("get_default")
            .count()
    };
    until("two questions", || questions() > 1).await;
    assert!(!plugin.sockets.join("nvidia-gpu.sock").exists());
    let daemon = bed.start();
    plugin.has("allocatable", Some("4")).await;
    bed.mode("control", "fail");
    kill_process(bed.process("nvidia.com/gpu").expect("a process"), Signal::KILL).expect("killed");
    plugin.has("allocatable", Some("0")).await;
    plugin.has("capacity", Some("4")).await;
    bed.mode("control", "");
    plugin.has("allocatable", Some("4")).await;
    stop(daemon).await;
    plugin.has("allocatable", Some("0")).await;
    stop(plugin.running).await;
}

#[tokio::test]
async fn a_container_waits_for_a_daemon_that_restarts() {
    let mut bed = Bed::new(&[A100]);
    bed.surroundings.mps.intervals.grace = 600_000;
    bed.configure(&replicas(2));
    let plugin = PluginBed::new(&bed, &["--mps-root=/run/nvidia/mps"]).await;
    let daemon = bed.start();
    plugin.has("allocatable", Some("2")).await;
    bed.mode("control", "fail");
    kill_process(bed.process("nvidia.com/gpu").expect("a process"), Signal::KILL).expect("killed");
    until("withdrawn", || !bed.is_started("nvidia.com/gpu")).await;
    plugin
        .api
        .create(
            "pods",
            json!({
                "metadata": {"name": "p", "namespace": "default"},
                "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
            }),
        )
        .expect("created");
    let waits = plugin.api.until(LIMIT, |api| {
        let pod = api.get("pods", "default", "p").ok()?;
        let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"];
        waiting.as_str().map(str::to_owned)
    });
    let message = waits.await.expect("the container waits");
    assert!(
        message.contains("the MPS control daemon of nvidia.com/gpu does not serve"),
        "{message}"
    );
    plugin.has("allocatable", Some("2")).await;
    bed.mode("control", "");
    let runs = plugin.api.until(LIMIT, |api| {
        let pod = api.get("pods", "default", "p").ok()?;
        (pod["status"]["phase"] == "Running").then_some(())
    });
    assert!(runs.await.is_some(), "{:?}", plugin.api.get("pods", "default", "p"));
    assert!(bed.is_started("nvidia.com/gpu"));
    stop(plugin.running).await;
    stop(daemon).await;
}

#[tokio::test]
async fn without_the_control_program_only_the_marker_counts() {
    let bed = Bed::new(&[A100]);
    bed.configure(&replicas(2));
    std::fs::remove_file(bed.at("bin").join(CONTROL)).expect("removed");
    let plugin = PluginBed::new(&bed, &["--mps-root=/run/nvidia/mps"]).await;
    let directory = bed.at("mps/nvidia.com/gpu");
    std::fs::create_dir_all(&directory).expect("created");
    std::fs::write(directory.join(".started"), "").expect("written");
    plugin.has("allocatable", Some("2")).await;
    std::fs::remove_file(directory.join(".started")).expect("removed");
    plugin.has("allocatable", Some("0")).await;
    stop(plugin.running).await;
}

thread_local! {
    /// Where the log of this thread goes.
    static LOG: RefCell<Option<Log>> = const { RefCell::new(None) };
}

/// A log in memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

/// Records the log of a thread until it is dropped.
pub(crate) struct Recording;

impl Log {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().expect("not poisoned")).into_owned()
    }

    /// Record what this thread logs. A test and everything that it starts run in one thread.
    ///
    /// There is one subscriber for all threads: with one for each, `tracing` takes what a thread without a subscriber logs first for disabled in all threads.
    pub(crate) fn record(&self) -> Recording {
        static SUBSCRIBER: Once = Once::new();
        SUBSCRIBER.call_once(|| {
            tracing_subscriber::fmt().with_writer(|| OfThread).with_ansi(false).init();
        });
        LOG.set(Some(self.clone()));
        Recording
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        LOG.set(None);
    }
}

struct OfThread;

impl std::io::Write for OfThread {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.with_borrow(|log| {
            if let Some(Log(text)) = log {
                text.lock().expect("not poisoned").extend_from_slice(bytes);
            }
        });
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The memory of all processes of a container is added up.
#[tokio::test]
async fn a_container_is_named_if_its_processes_exceed_its_share() {
    let log = Log::default();
    let _guard = log.record();
    let bed = Bed::new(&[A100]);
    for (pid, container) in [(7, "01ab"), (8, "01ab"), (9, "02cd")] {
        let process = bed.at(&format!("root/proc/{pid}"));
        std::fs::create_dir_all(&process).expect("created");
        std::fs::write(
            process.join("cgroup"),
            format!("0::/kubepods/burstable/podaaaa-1/{container}\n"),
        )
        .expect("written");
    }
    bed.configure(&replicas(4));
    let running = bed.start();
    until("ready", || bed.is_ready()).await;
    for (pid, used) in [(9, 10700), (7, 6000), (8, 6000)] {
        let request = json!({"op": "memory", "gpu": 0, "pid": pid, "used_mib": used, "mps": true});
        ask(&bed.at("control"), &request).await.expect("done");
    }
    until("it is named", || log.text().contains("its share")).await;
    let text = log.text();
    let expected =
        "container 01ab of pod aaaa-1 uses 12000 MiB of GPU 0 in 2 processes, but its share (1 nvidia.com/gpu) is 10240 MiB";
    assert!(text.contains(expected) && !text.contains("02cd"), "{text}");
    stop(running).await;
}
