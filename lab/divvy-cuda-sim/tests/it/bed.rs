//! A simulated machine, and processes that use it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use divvy_gpu_sim::{GpuLedger, ProcessUsage};
pub(crate) use divvy_shadow_testkit::MIB;
use divvy_shadow_testkit::{RequestWorker, ShadowContainer, library};

/// A page of the driver.
pub(crate) const PAGE: u64 = 2 * MIB;
/// The memory of each GPU of a bed, and of a context on it.
pub(crate) const MEMORY: u64 = 256 * MIB;
pub(crate) const CONTEXT: u64 = 16 * MIB;
const UUIDS: [&str; 2] = [
    "GPU-00000000-0000-4000-8000-000000000000",
    "GPU-00000000-0000-4000-8000-000000000001",
];

/// A machine with two GPUs.
pub(crate) struct Bed {
    container: ShadowContainer,
}

impl Bed {
    pub(crate) fn new() -> Bed {
        let container = ShadowContainer::new("c");
        let mut text = "v = 1\n[[node]]\nname = \"n\"\ndriver = \"615.71.09\"\n".to_owned();
        for uuid in UUIDS {
            let (memory, context) = (MEMORY / MIB, CONTEXT / MIB);
            writeln!(
                text,
                "[[node.gpu]]\nmodel = \"GPU\"\nuuid = \"{uuid}\"\nmemory_mib = {memory}\ncontext_mib = {context}"
            )
            .expect("text");
        }
        std::fs::write(container.path("machine.toml"), text).expect("the description");
        Bed { container }
    }

    /// A machine whose GPUs have this compute capability, and more lines of their description.
    pub(crate) fn described(cc: &str, more: &str) -> Bed {
        let bed = Bed::new();
        let path = bed.path("machine.toml");
        let text = std::fs::read_to_string(&path).expect("the description");
        let text = text.replace("context_mib", &format!("cc = \"{cc}\"\n{more}\ncontext_mib"));
        std::fs::write(&path, text).expect("the description");
        bed
    }

    /// A machine with the GPUs of this description.
    pub(crate) fn of(gpus: &str) -> Bed {
        let bed = Bed::new();
        let text = format!("v = 1\n[[node]]\nname = \"n\"\ndriver = \"615.71.09\"\n{gpus}");
        std::fs::write(bed.path("machine.toml"), text).expect("the description");
        bed
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.container.path(name)
    }

    /// What the ledger of a GPU says of each process that holds memory.
    pub(crate) fn usage(&self, gpu: usize) -> Vec<ProcessUsage> {
        let mut ledger = GpuLedger::open(&self.path("ledger"), UUIDS[gpu]).expect("the ledger");
        let usage = ledger.usage().expect("what it says");
        usage.into_iter().filter(|of| of.bytes > 0).collect()
    }

    /// What all processes hold of the first GPU.
    pub(crate) fn used(&self) -> u64 {
        self.usage(0).iter().map(|of| of.bytes).sum()
    }

    /// Start a process with more variables.
    pub(crate) fn start_with(&self, variables: &[(&str, &str)]) -> Process {
        let program = std::env::current_exe().expect("this program");
        let mut command = self.container.command(program);
        command.args(["--exact", "worker::a_process_makes_the_calls_of_a_test", "--nocapture"]);
        command.env("WORKER_CUDA", cuda());
        command.env_remove("CUDA_VISIBLE_DEVICES");
        command.envs(variables.iter().copied());
        let mut process = Process(RequestWorker::start(&mut command));
        assert_eq!(process.answer(), "ready");
        process
    }

    /// Start a process that has called cuInit.
    pub(crate) fn start(&self) -> Process {
        let mut process = self.start_with(&[]);
        process.ok("cuInit", &[Num(0)]);
        process
    }

    /// Start a process that uses the first GPU's primary context.
    pub(crate) fn user(&self) -> Process {
        self.user_with(&[])
    }

    /// The same with more variables.
    pub(crate) fn user_with(&self, variables: &[(&str, &str)]) -> Process {
        let mut process = self.start_with(variables);
        process.ok("cuInit", &[Num(0)]);
        process.enter(0);
        process
    }
}

/// Return the path of the library that is tested. Cargo does not build a package's dynamic library for the package's tests, and one that was built earlier may
/// be out of date.
pub(crate) fn cuda() -> &'static Path {
    library("divvy-cuda-sim")
}

/// Return the path of the simulated NVML.
pub(crate) fn nvml() -> &'static Path {
    library("divvy-nvml-sim")
}

/// An argument of a call.
#[derive(Debug, Clone)]
pub(crate) enum Arg {
    Num(u64),
    /// A place for a result; it is part of the answer.
    Out,
    Text(&'static str),
    /// A buffer of words, which are part of the answer.
    Words(Vec<u64>),
}
pub(crate) use Arg::{Num, Out, Text, Words};

pub(crate) const NULL: Arg = Num(0);

/// The code of a call, and what it wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) code: i32,
    pub(crate) words: Vec<u64>,
}

/// A process that uses CUDA. It is killed when the value is dropped.
pub(crate) struct Process(RequestWorker);

impl Process {
    pub(crate) fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Read the next answer.
    pub(crate) fn answer(&mut self) -> String {
        loop {
            let line = self.0.line().expect("the process has ended");
            if let Some(answer) = line.strip_prefix("= ") {
                return answer.trim_end().to_owned();
            }
        }
    }

    /// Ask for something, and do not wait for the answer.
    pub(crate) fn ask(&mut self, name: &str, arguments: &[Arg]) {
        let mut line = name.to_owned();
        for argument in arguments {
            match argument {
                Num(number) => write!(line, " #{number}"),
                Out => write!(line, " o"),
                Text(text) => write!(line, " s{text}"),
                Words(words) => write!(line, " x{}", words.iter().map(u64::to_string).collect::<Vec<_>>().join(",")),
            }
            .expect("text");
        }
        self.0.send(&line);
    }

    /// Call a function.
    pub(crate) fn call(&mut self, name: &str, arguments: &[Arg]) -> Answer {
        self.ask(name, arguments);
        self.answered()
    }

    /// Read the answer of a call.
    pub(crate) fn answered(&mut self) -> Answer {
        let text = self.answer();
        let mut words = text.split(' ');
        Answer {
            code: words.next().and_then(|code| code.parse().ok()).expect("a code"),
            words: words.map(|word| word.parse().expect("a number")).collect(),
        }
    }

    /// Call a function that must succeed. Return what it wrote first, or 0.
    pub(crate) fn ok(&mut self, name: &str, arguments: &[Arg]) -> u64 {
        let answer = self.call(name, arguments);
        assert_eq!(answer.code, 0, "{name}{arguments:?}");
        answer.words.first().copied().unwrap_or(0)
    }

    /// Call a function, and return only its code.
    pub(crate) fn code(&mut self, name: &str, arguments: &[Arg]) -> i32 {
        self.call(name, arguments).code
    }

    /// Make a GPU's primary context current.
    pub(crate) fn enter(&mut self, gpu: u64) {
        let context = self.ok("cuDevicePrimaryCtxRetain", &[Out, Num(gpu)]);
        self.ok("cuCtxSetCurrent", &[Num(context)]);
    }

    /// Close the input of the process, whose children share it, and wait until no process writes its output any more.
    pub(crate) fn close(self) {
        self.0.close();
    }

    /// Kill the process with SIGKILL, and wait until it is gone.
    pub(crate) fn kill(&mut self) {
        self.0.kill();
    }
}
