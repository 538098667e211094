//! A container with the guard, without a container: the files are in a temporary directory.

use std::fs;
use std::ops::Deref;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use divvy_gpu_sim::GpuLedger;
pub(crate) use divvy_shadow_testkit::{CONTEXT, GPUS, MIB, limits};
use divvy_shadow_testkit::{RequestWorker, ShadowContainer, example, library, shadow};
use divvy_share::usage::{self, SlotUsage, UsageTotals};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// CUDA's code for a refused allocation.
pub(crate) const OUT_OF_MEMORY: u64 = 2;

/// The driver's version.
const VERSION: &str = "575.51.03";

/// How long a test waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// The library as it ships.
pub(crate) fn guard() -> &'static [u8] {
    shadow("divvy-guard")
}

/// The simulated driver.
pub(crate) fn driver() -> &'static Path {
    library("divvy-cuda-sim")
}

/// The files of one pod, on a machine with two GPUs.
pub(crate) struct Sandbox {
    container: ShadowContainer,
    memory: u64,
    version: &'static str,
}

impl Deref for Sandbox {
    type Target = ShadowContainer;

    fn deref(&self) -> &ShadowContainer {
        &self.container
    }
}

impl Sandbox {
    /// A machine whose GPUs have this much memory; the pod has no share yet.
    pub(crate) fn new(memory: u64) -> Self {
        let container = ShadowContainer::new("g");
        container.put_guard("divvy-guard", "libcuda.so", driver());
        container.describe_machine(VERSION, memory, &["", ""]);
        Self {
            container,
            memory,
            version: "12.9",
        }
    }

    /// Have a machine with one GPU. So does a container with a share of one.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn with_one_gpu(self) -> Self {
        self.describe_machine(VERSION, self.memory, &[""]);
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
        let mut command = self.command(example("divvy-guard", "program"));
        command
            .arg(self.path(library))
            .arg(self.path("libcuda.so.real"))
            .env("DIVVY_CUDA_SIM_LOG", self.path("calls"))
            .env("DIVVY_CUDA_SIM_VERSION", self.version)
            .envs(environment.iter().copied());
        Program(RequestWorker::start(&mut command))
    }

    /// A program that has made the primary context of the first GPU.
    pub(crate) fn ready(&self) -> Program {
        let mut program = self.start();
        assert_eq!(program.code("init"), 0);
        assert_eq!(program.code("retain 0"), 0);
        program
    }

    /// The slots that are not zero.
    pub(crate) fn slots(&self) -> Vec<SlotUsage> {
        let file = fs::read(self.file(0, "usage")).unwrap();
        let slots = usage::parse(&file).unwrap().slots();
        slots.filter(|slot| slot.pid != 0).collect()
    }

    /// What the guards of the pod have counted.
    pub(crate) fn totals(&self) -> UsageTotals {
        usage::parse(&fs::read(self.file(0, "usage")).unwrap()).unwrap().totals
    }

    /// What a process is charged with.
    pub(crate) fn charged(&self, program: &Program) -> u64 {
        let pid = u64::from(program.pid());
        let slot = self.slots().into_iter().find(|slot| slot.pid == pid).unwrap_or_default();
        assert_eq!(slot.pending, 0, "nothing is pending at rest");
        slot.used + slot.contexts * CONTEXT
    }

    /// What the driver has given to all processes.
    pub(crate) fn driver_gave(&self, gpu: usize) -> u64 {
        let mut ledger = GpuLedger::open(&self.path("ledger"), GPUS[gpu]).unwrap();
        ledger.usage().unwrap().iter().map(|usage| usage.bytes).sum()
    }

    /// What the driver has given to one process, on the first GPU.
    pub(crate) fn driver_gave_to(&self, pid: u32) -> u64 {
        let mut ledger = GpuLedger::open(&self.path("ledger"), GPUS[0]).unwrap();
        let usage = ledger.usage().unwrap();
        usage.iter().filter(|usage| usage.pid == pid).map(|usage| usage.bytes).sum()
    }

    /// The GPU time that a process has had on the first GPU, or will have for what it has launched.
    pub(crate) fn busy(&self, pid: u32) -> u64 {
        let mut ledger = GpuLedger::open(&self.path("ledger"), GPUS[0]).unwrap();
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

/// A process of the pod.
pub(crate) struct Program(RequestWorker);

impl Program {
    pub(crate) fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Start a call.
    pub(crate) fn send(&mut self, call: &str) {
        self.0.send(call);
    }

    /// Wait for the result: the code, and two numbers. `None`: the program has ended.
    pub(crate) fn answer(&mut self) -> Option<[u64; 3]> {
        self.0.answer()?.try_into().ok()
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
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap();
        maps.lines().filter(|line| line.ends_with(end)).count()
    }

    /// End it in the middle of a call.
    pub(crate) fn kill(mut self) {
        self.0.kill();
    }
}

/// Make a call that succeeds; returns its first number.
pub(crate) fn ok(program: &mut Program, call: &str) -> u64 {
    let [code, value, _] = program.call(call);
    assert_eq!(code, 0, "{call}");
    value
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
