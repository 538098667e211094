//! A machine with a simulated driver, in a directory of its own.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use divvy_hardware::client::{ProbeClient, ProbeSource, ProbeTiming, Spawn, Update};
use divvy_hardware::{Failure, Snapshot};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The deadline for everything that a test waits for, chosen for a slow machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) const PROBE: &str = env!("CARGO_BIN_EXE_divvy-probe");

/// The simulated driver's library.
pub(crate) fn sim_library() -> &'static Path {
    divvy_shadow_testkit::library("divvy-nvml-sim")
}

/// A node with two GPUs that are connected by NVLinks.
pub(crate) const TWO: &str = r#"
v = 1
[[node]]
name = "two"
driver = "550.54.15"
[[node.gpu]]
model = "NVIDIA A100-SXM4-40GB"
uuid = "GPU-00000000-0000-4000-8000-000000000000"
memory_mib = 40960
memory_clock_mhz = 1215
memory_bus_bits = 5120
links = [[1, "nvlink", 12], [1, "single-switch", 0]]
processes = [{ pid = 1, used_mib = 10 }, { pid = 7, used_mib = 500 }]
[[node.gpu]]
model = "Tesla T4"
uuid = "GPU-00000000-0000-4000-8000-000000000001"
memory_mib = 15360
minor = 5
pci = "0000:AF:00.0"
cc = "7.5"
sms = 40
clock_mhz = 1590
numa = 1
temperature = 60
utilization = 90
"#;

pub(crate) const GPU0: &str = "GPU-00000000-0000-4000-8000-000000000000";
pub(crate) const GPU1: &str = "GPU-00000000-0000-4000-8000-000000000001";

pub(crate) struct Machine {
    pub(crate) dir: TempDir,
    /// Environment variables besides the machine description and the control socket.
    pub(crate) extra: Vec<(String, OsString)>,
}

impl Machine {
    pub(crate) fn new(description: &str) -> Machine {
        let dir = tempfile::tempdir().expect("directory");
        std::fs::write(dir.path().join("machine.toml"), description).expect("description");
        Machine { dir, extra: Vec::new() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn env(&self) -> Vec<(String, OsString)> {
        let mut env = vec![
            ("DIVVY_NVML_SIM".to_owned(), self.path("machine.toml").into()),
            ("DIVVY_NVML_SIM_CONTROL".to_owned(), self.path("control").into()),
        ];
        env.extend(self.extra.iter().cloned());
        env
    }

    /// How a client starts a probe on this machine.
    pub(crate) fn spawn(&self, watchdog: Duration) -> Spawn {
        Spawn {
            program: PROBE.into(),
            nvml_library: Some(sim_library().to_owned()),
            driver_root: None,
            sys_root: Some(self.path("root")),
            share_files: None,
            watchdog: Some(watchdog),
            env: self.env(),
            dir: self.path("private"),
            log: None,
        }
    }

    pub(crate) fn client(&self, timing: ProbeTiming) -> ProbeClient {
        ProbeClient::start(ProbeSource::Spawn(self.spawn(Duration::from_secs(5))), timing)
    }

    /// A probe that the test starts, not a client.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(PROBE);
        command.envs(self.env()).arg("--nvml-library").arg(sim_library());
        // The GPUs of the machine that runs the tests do not count.
        command.arg("--sys-root").arg(self.path("root"));
        command.stdin(Stdio::piped());
        command
    }

    /// Start a probe that listens at `socket`, and wait until it does.
    pub(crate) fn listening(&self, socket: &str, arguments: &[&str]) -> Running {
        let mut listen = OsString::from("unix:");
        listen.push(self.path(socket));
        let mut command = self.command();
        command.arg("--listen").arg(listen).args(arguments);
        let running = Running(command.spawn().expect("probe"));
        drop(connect(&self.path(socket)));
        running
    }

    /// Change the machine at run time.
    pub(crate) fn control(&self, request: &Value) -> Value {
        control(&self.path("control"), request)
    }

    /// Like [`Machine::control`], without blocking a client that runs in this process and may have to start a probe first.
    pub(crate) async fn change(&self, request: Value) {
        let path = self.path("control");
        tokio::task::spawn_blocking(move || control(&path, &request))
            .await
            .expect("control");
    }

    pub(crate) fn xid(&self, gpu: u32, xid: u64) {
        let answer = self.control(&json!({"op": "xid", "gpu": gpu, "xid": xid}));
        assert!(
            answer["delivered"].as_u64() > Some(0),
            "no client is registered for events: {answer}"
        );
    }
}

fn control(path: &Path, request: &Value) -> Value {
    let answer = Lines::new(connect(path)).ask(&request.to_string());
    assert_eq!(answer["ok"], true, "{request}: {answer}");
    answer
}

/// A copy of the simulated library whose functions can be hidden.
pub(crate) struct Library {
    pub(crate) path: PathBuf,
    file: File,
    /// Where the names of NVML's functions are in the file.
    pub(crate) names: BTreeMap<String, Vec<u64>>,
}

impl Library {
    pub(crate) fn new(machine: &Machine) -> Library {
        let path = machine.path("libnvidia-ml.so.1");
        std::fs::copy(sim_library(), &path).expect("copied");
        let (mut names, mut at) = (BTreeMap::<String, Vec<u64>>::new(), 0);
        for text in std::fs::read(&path).expect("read").split(|byte| *byte == 0) {
            let is_name = text.starts_with(b"nvml") && text.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
            if is_name {
                let name = String::from_utf8(text.to_vec()).expect("ASCII");
                names.entry(name).or_default().push(at);
            }
            at += text.len() as u64 + 1;
        }
        let file = File::options().write(true).open(&path).expect("opened");
        Library { path, file, names }
    }

    /// Give a function another name, or its own again. The dynamic linker compares names, so it does not find a renamed one.
    pub(crate) fn hide(&self, name: &str, is_hidden: bool) {
        let first = if is_hidden { b"x" } else { b"n" };
        for at in &self.names[name] {
            self.file.write_all_at(first, *at).expect("written");
        }
    }
}

/// Start a probe with another library that listens at `s`.
pub(crate) fn listen(machine: &Machine, library: &Path) -> Running {
    let mut command = Command::new(PROBE);
    command.envs(machine.env()).arg("--nvml-library").arg(library);
    command.arg("--sys-root").arg(machine.path("root"));
    command.stdin(Stdio::piped());
    command.arg("--listen").arg(format!("unix:{}", machine.path("s").display()));
    Running(command.spawn().expect("the probe starts"))
}

/// A process that does not outlive the test.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    /// Wait for the process to end. Return the exit status, or the negative signal number.
    pub(crate) fn ended(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        let started = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().expect("wait") {
                return status.code().unwrap_or_else(|| -status.signal().unwrap_or_default());
            }
            assert!(started.elapsed() < DEADLINE, "the process does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Connect to a socket on which a process is about to listen.
pub(crate) fn connect(path: &Path) -> UnixStream {
    let started = Instant::now();
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => {
                stream.set_read_timeout(Some(DEADLINE)).expect("timeout");
                return stream;
            }
            Err(error) => assert!(started.elapsed() < DEADLINE, "{}: {error}", path.display()),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A hand-written client.
pub(crate) struct Lines {
    reader: BufReader<UnixStream>,
}

impl Lines {
    pub(crate) fn new(stream: UnixStream) -> Lines {
        Lines {
            reader: BufReader::new(stream),
        }
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.reader.get_mut().write_all(bytes).expect("write");
    }

    /// Return the next line, or `None` at the end.
    pub(crate) fn next(&mut self) -> Option<Value> {
        let mut line = String::new();
        let read = self.reader.read_line(&mut line).expect("read");
        (read > 0).then(|| serde_json::from_str(&line).expect("JSON"))
    }

    pub(crate) fn ask(&mut self, line: &str) -> Value {
        self.send(format!("{line}\n").as_bytes());
        self.next().expect("an answer")
    }
}

/// A timing with a short poll interval and short waits.
pub(crate) fn fast() -> ProbeTiming {
    ProbeTiming {
        poll: Duration::from_millis(50),
        answer: Duration::from_secs(5),
        first_answer: Duration::from_secs(10),
        backoff: Duration::from_millis(10),
        longest_backoff: Duration::from_millis(100),
    }
}

/// Return the first update that `wanted` accepts.
pub(crate) async fn wait_for<T>(client: &mut ProbeClient, what: &str, mut wanted: impl FnMut(Update) -> Option<T>) -> T {
    let waiting = async {
        loop {
            let update = client.next().await.expect("the client runs");
            if let Some(found) = wanted(update) {
                return found;
            }
        }
    };
    tokio::time::timeout(DEADLINE, waiting)
        .await
        .unwrap_or_else(|_| panic!("no {what} within {DEADLINE:?}"))
}

pub(crate) async fn snapshot(client: &mut ProbeClient, what: &str, wanted: impl Fn(&Snapshot) -> bool) -> Snapshot {
    let found = |update| match update {
        Update::Snapshot(snapshot) if wanted(&snapshot) => Some(snapshot),
        _ => None,
    };
    wait_for(client, what, found).await
}

pub(crate) async fn unavailable(client: &mut ProbeClient) -> Failure {
    let found = |update| match update {
        Update::Unavailable(failure) => Some(failure),
        _ => None,
    };
    wait_for(client, "failure", found).await
}

/// Poll until a condition holds. This is for conditions that cause no notification.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < DEADLINE, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// PIDs of the processes that have this text in their command line.
pub(crate) fn processes_with(text: &str) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").expect("/proc").filter_map(|entry| {
        let entry = entry.ok()?;
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        String::from_utf8_lossy(&line).contains(text).then_some(pid)
    });
    all.collect()
}

pub(crate) fn kill(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().expect("pid")).expect("pid");
    rustix::process::kill_process(pid, signal).expect("kill");
}
