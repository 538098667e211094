//! A container with the guard, without a container: the files are in a temporary directory.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use divvy_gpu_sim::Ledger;
use divvy_shadow_testkit::{build, replace, shadow, target};
use divvy_share::limits::Limits;
use divvy_share::usage::{self, Seen, Totals};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub(crate) const MIB: u64 = 1 << 20;
/// What a context takes on the simulated GPUs.
pub(crate) const CONTEXT: u64 = 300 * MIB;
/// CUDA's code for a refused allocation.
pub(crate) const OUT_OF_MEMORY: u64 = 2;
pub(crate) const GPUS: [&str; 2] = [
    "GPU-00010203-0405-4607-8809-0a0b0c0d0e0f",
    "GPU-10111213-1415-4617-8819-1a1b1c1d1e1f",
];

/// How long a test waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// The library as it ships.
pub(crate) fn guard() -> &'static [u8] {
    static GUARD: OnceLock<Vec<u8>> = OnceLock::new();
    GUARD.get_or_init(|| shadow("divvy-guard"))
}

/// The simulated driver.
pub(crate) fn driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| {
        build(&["-p", "divvy-cuda-sim"]);
        target().join("debug/libdivvy_cuda_sim.so")
    })
}

/// The program that runs in the container.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        build(&["-p", "divvy-guard", "--example", "program"]);
        target().join("debug/examples/program")
    })
}

/// The files of one pod, on a machine with two GPUs.
pub(crate) struct Sandbox {
    directory: tempfile::TempDir,
    memory: u64,
    version: &'static str,
}

impl Sandbox {
    /// A machine whose GPUs have this much memory; the pod has no share yet.
    pub(crate) fn new(memory: u64) -> Self {
        let root = divvy_share::DIRECTORY;
        // As long as the path that it replaces.
        let directory = tempfile::Builder::new()
            .prefix("g")
            .rand_bytes(root.len() - 6)
            .tempdir_in("/tmp")
            .unwrap();
        let path = directory.path().to_str().unwrap();
        let mut library = guard().to_vec();
        assert_eq!(
            replace(&mut library, root, path),
            1,
            "the library has one constant for the path"
        );
        assert_eq!(
            replace(&mut library, "/run/divvy/guard", path),
            1,
            "the library has one needed library"
        );
        let sandbox = Self {
            directory,
            memory,
            version: "12.9",
        };
        fs::write(sandbox.path("libcuda.so.1"), library).unwrap();
        symlink(driver(), sandbox.path("libcuda.so.real")).unwrap();
        fs::create_dir(sandbox.path("ledger")).unwrap();
        sandbox.describe(GPUS.len());
        sandbox
    }

    /// Describe the machine's GPUs to the simulated driver: only the first ones.
    fn describe(&self, count: usize) {
        let gpus: String = GPUS[..count]
            .iter()
            .map(|uuid| {
                format!(
                    "[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nuuid = \"{uuid}\"\nmemory_mib = {}\ncontext_mib = {}\n",
                    self.memory / MIB,
                    CONTEXT / MIB
                )
            })
            .collect();
        let machine = format!("v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"575.51.03\"\n{gpus}");
        fs::write(self.path("machine.toml"), machine).unwrap();
    }

    /// Have a machine with one GPU. So does a container with a share of one.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn with_one_gpu(self) -> Self {
        self.describe(1);
        self
    }

    /// A machine on which the pod has a share of the first GPU.
    pub(crate) fn with_share(memory: u64, share: u64) -> Self {
        let sandbox = Self::new(memory);
        sandbox.give(0, &limits(share));
        sandbox
    }

    /// Another pod's files, on the machine of this one.
    pub(crate) fn beside(&self) -> Self {
        let other = Self::new(self.memory);
        fs::remove_dir(other.path("ledger")).unwrap();
        symlink(self.path("ledger"), other.path("ledger")).unwrap();
        other
    }

    /// Have a driver of this version of CUDA, which lacks what came later.
    pub(crate) fn with_driver(mut self, version: &'static str) -> Self {
        self.version = version;
        self
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn file(&self, gpu: usize, name: &str) -> PathBuf {
        self.path(GPUS[gpu]).join(name)
    }

    /// Make the two files of a share.
    pub(crate) fn give(&self, gpu: usize, limits: &Limits) {
        fs::create_dir_all(self.path(GPUS[gpu])).unwrap();
        fs::write(self.file(gpu, "limits"), limits.file()).unwrap();
        fs::write(self.file(gpu, "usage"), usage::file()).unwrap();
    }

    /// Change the limits, as the agent does. Return the generation.
    pub(crate) fn change(&self, limits: &Limits) -> u64 {
        let path = self.file(0, "limits");
        let (generation, _) = Limits::from_bytes(&fs::read(&path).unwrap()).unwrap();
        let (offset, copy) = limits.copy(generation + 1);
        fs::File::options()
            .write(true)
            .open(path)
            .unwrap()
            .write_all_at(&copy, offset)
            .unwrap();
        generation + 1
    }

    /// Put a whole file of usage in the place of the one that is there, or of what took its place.
    pub(crate) fn replace_usage(&self) {
        let path = self.file(0, "usage");
        // It may be missing, or be a directory.
        let _ = fs::remove_dir(&path);
        let _ = fs::remove_file(&path);
        fs::write(path, usage::file()).unwrap();
    }

    pub(crate) fn start(&self) -> Program {
        self.start_with(&[])
    }

    /// A program that has the driver without the guard.
    pub(crate) fn start_without_guard(&self) -> Program {
        self.start_on("libcuda.so.real", &[])
    }

    pub(crate) fn start_with(&self, environment: &[(&str, &str)]) -> Program {
        self.start_on("libcuda.so.1", environment)
    }

    fn start_on(&self, library: &str, environment: &[(&str, &str)]) -> Program {
        let mut command = Command::new(program());
        command
            .arg(self.path(library))
            .arg(self.path("libcuda.so.real"))
            .env("DIVVY_NVML_SIM", self.path("machine.toml"))
            .env("DIVVY_NVML_SIM_LEDGER", self.path("ledger"))
            .env("DIVVY_CUDA_SIM_LOG", self.path("calls"))
            .env("DIVVY_CUDA_SIM_VERSION", self.version)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Program { child, input, output }
    }

    /// A program that has made the primary context of the first GPU.
    pub(crate) fn ready(&self) -> Program {
        let mut program = self.start();
        assert_eq!(program.code("init"), 0);
        assert_eq!(program.code("retain 0"), 0);
        program
    }

    /// The slots that are not zero.
    pub(crate) fn slots(&self) -> Vec<Seen> {
        let file = fs::read(self.file(0, "usage")).unwrap();
        let slots = usage::parse(&file).unwrap().slots();
        slots.filter(|slot| slot.pid != 0).collect()
    }

    /// What the guards of the pod have counted.
    pub(crate) fn totals(&self) -> Totals {
        usage::parse(&fs::read(self.file(0, "usage")).unwrap()).unwrap().totals
    }

    /// What a process is charged with.
    pub(crate) fn charged(&self, program: &Program) -> u64 {
        let pid = u64::from(program.child.id());
        let slot = self.slots().into_iter().find(|slot| slot.pid == pid).unwrap_or_default();
        assert_eq!(slot.pending, 0, "nothing is pending at rest");
        slot.used + slot.contexts * CONTEXT
    }

    /// What the driver has given to all processes.
    pub(crate) fn driver_gave(&self, gpu: usize) -> u64 {
        let mut ledger = Ledger::open(&self.path("ledger"), GPUS[gpu]).unwrap();
        ledger.usage().unwrap().iter().map(|usage| usage.bytes).sum()
    }

    /// What the driver has given to one process, on the first GPU.
    pub(crate) fn driver_gave_to(&self, pid: u32) -> u64 {
        let mut ledger = Ledger::open(&self.path("ledger"), GPUS[0]).unwrap();
        let usage = ledger.usage().unwrap();
        usage.iter().filter(|usage| usage.pid == pid).map(|usage| usage.bytes).sum()
    }

    /// The GPU time that a process has had on the first GPU, or will have for what it has launched.
    pub(crate) fn busy(&self, pid: u32) -> u64 {
        let mut ledger = Ledger::open(&self.path("ledger"), GPUS[0]).unwrap();
        let usage = ledger.usage().unwrap();
        usage.iter().filter(|usage| usage.pid == pid).map(|usage| usage.busy_ns).sum()
    }

    /// The driver's own refusals. On a machine whose GPU is as large as the share, each is an allocation that the guard should have refused.
    pub(crate) fn refusals(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path("calls")).unwrap();
        let refused = log.lines().filter(|line| line.split_whitespace().last() == Some("2"));
        refused.map(str::to_owned).collect()
    }

    /// Wait until the log of the driver's calls has a line that ends like this.
    pub(crate) fn logged(&self, end: &str) {
        let began = Instant::now();
        while !fs::read_to_string(self.path("calls"))
            .unwrap()
            .lines()
            .any(|line| line.ends_with(end))
        {
            assert!(began.elapsed() < PATIENCE, "the driver was not called: {end}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn memory(&self) -> u64 {
        self.memory
    }
}

/// The limits of a pod with this share.
pub(crate) fn limits(share: u64) -> Limits {
    Limits {
        bytes: share,
        context: CONTEXT,
        ..Limits::default()
    }
}

/// A process of the pod.
pub(crate) struct Program {
    pub(crate) child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Start a call.
    pub(crate) fn send(&mut self, call: &str) {
        writeln!(self.input, "{call}").unwrap();
    }

    /// Wait for the result: the code, and two numbers. `None`: the program has ended.
    pub(crate) fn answer(&mut self) -> Option<[u64; 3]> {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let numbers: Vec<u64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
        numbers.try_into().ok()
    }

    pub(crate) fn call(&mut self, call: &str) -> [u64; 3] {
        self.send(call);
        self.answer().expect("the program runs")
    }

    pub(crate) fn code(&mut self, call: &str) -> u64 {
        self.call(call)[0]
    }

    /// Allocate linear memory; returns its address.
    pub(crate) fn alloc(&mut self, bytes: u64) -> u64 {
        let [code, pointer, _] = self.call(&format!("alloc {bytes}"));
        assert_eq!(code, 0, "{bytes} bytes");
        pointer
    }

    /// How many mappings it has of files whose name ends like this.
    pub(crate) fn mapped(&self, end: &str) -> usize {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.child.id())).unwrap();
        maps.lines().filter(|line| line.ends_with(end)).count()
    }

    /// End it in the middle of a call.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The program may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kill a process that another process has started, and wait until it is gone. Its other threads, such as those of an emulator, may end after the first one,
/// and have its files until then.
pub(crate) fn kill_and_wait(pid: u64) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    kill(pid, Signal::SIGKILL).unwrap();
    let has_threads = || fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|threads| threads.count() > 1);
    let runs = || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    while runs() || has_threads() {
        std::thread::yield_now();
    }
}
