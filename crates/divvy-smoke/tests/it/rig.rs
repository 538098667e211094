//! The program on the simulated driver, which executes its kernels on the processor.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use divvy_shadow_testkit::{built, library};
use divvy_smoke_report::{SmokeReport, StepId, StepStatus};
use tempfile::TempDir;

pub(crate) const UUID: &str = "GPU-00000000-0000-4000-8000-000000000000";

/// A machine with a GPU.
pub(crate) struct Rig {
    directory: TempDir,
    program: PathBuf,
    /// The functions that the driver lacks.
    missing: String,
}

/// The program as it was built.
pub(crate) fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_divvy-smoke"))
}

/// Return the probe.
pub(crate) fn probe() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| built("divvy-hardware").join("divvy-probe"))
}

impl Rig {
    /// A GPU with so many MiB, of which a context takes 4.
    pub(crate) fn new(mib: u64) -> Rig {
        Rig::with(mib, "9.0")
    }

    /// The same in a directory of a certain name.
    pub(crate) fn at(directory: &tempfile::Builder<'_, '_>, mib: u64) -> Rig {
        Rig::made(directory.tempdir_in("/tmp").expect("a directory"), mib, "9.0")
    }

    pub(crate) fn with(mib: u64, capability: &str) -> Rig {
        Rig::made(tempfile::tempdir().expect("a directory"), mib, capability)
    }

    fn made(directory: TempDir, mib: u64, capability: &str) -> Rig {
        let text = format!(
            "v = 1\n[[node]]\nname = \"n\"\ndriver = \"580.159.04\"\n[[node.gpu]]\nmodel = \"NVIDIA H100 80GB HBM3\"\nuuid = \"{UUID}\"\n\
             memory_mib = {mib}\ncontext_mib = 4\ncc = \"{capability}\"\n"
        );
        std::fs::write(directory.path().join("machine.toml"), text).expect("the description");
        for name in ["ledger", "lib"] {
            std::fs::create_dir(directory.path().join(name)).expect("a directory");
        }
        std::os::unix::fs::symlink(library("divvy-cuda-sim"), directory.path().join("lib/libcuda.so.1")).expect("a link");
        Rig {
            directory,
            program: program().to_owned(),
            missing: String::new(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Use a copy of the program, so that other files can lie next to it.
    pub(crate) fn copied(mut self) -> Rig {
        self.program = self.path("divvy-smoke");
        self.install(&std::fs::read(program()).expect("the program"), "divvy-smoke");
        self
    }

    /// Make a program. Another process writes it: this one may be forking another test's program, which would have the file open for writing until it
    /// is executed, and such a file cannot be started.
    pub(crate) fn install(&self, content: &[u8], name: &str) {
        let data = self.path("data");
        std::fs::write(&data, content).expect("written");
        let status = Command::new("install").arg("-m755").args([&data, &self.path(name)]).status();
        assert!(status.expect("install").success());
    }

    /// Use a library that lacks functions.
    pub(crate) fn without(mut self, functions: &[&str]) -> Rig {
        self.missing = functions.join(",");
        self
    }

    /// Put a library of NVML where the probe finds it, without these functions. The GPU's description goes on with `more`.
    pub(crate) fn with_nvml(self, more: &str, missing: &[&str]) -> Rig {
        let machine = self.path("machine.toml");
        let described = std::fs::read_to_string(&machine).expect("the description");
        std::fs::write(machine, format!("{described}{more}\n")).expect("written");
        let mut library = std::fs::read(library("divvy-nvml-sim")).expect("the library");
        for name in missing {
            // The dynamic linker compares names, so it does not find a function with another one.
            let text = format!("\0{name}\0");
            let windows = library.windows(text.len()).enumerate();
            let places: Vec<usize> = windows
                .filter_map(|(at, found)| (found == text.as_bytes()).then_some(at))
                .collect();
            assert!(!places.is_empty(), "{name}");
            places.into_iter().for_each(|at| library[at + 1] = b'x');
        }
        std::fs::write(self.path("lib/libnvidia-ml.so.1"), library).expect("written");
        self
    }

    /// The program with arguments and variables.
    pub(crate) fn command(&self, arguments: &str, variables: &[(&str, &str)]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments.split_whitespace());
        // Nothing of the machine on which the tests run says which GPUs there are.
        command.env_clear();
        command.env("DIVVY_NVML_SIM", self.path("machine.toml"));
        command.env("DIVVY_NVML_SIM_LEDGER", self.path("ledger"));
        command.env("DIVVY_NVML_SIM_CONTROL", self.path("control"));
        command.env("LD_LIBRARY_PATH", self.path("lib"));
        command.env("DIVVY_CUDA_SIM_MISSING", &self.missing);
        command.envs(variables.iter().copied());
        command.stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, arguments: &str, variables: &[(&str, &str)]) -> Ran {
        Ran(self.command(arguments, variables).output().expect("started"))
    }

    pub(crate) fn start(&self, arguments: &str, variables: &[(&str, &str)]) -> Child {
        self.command(arguments, variables)
            .stdout(Stdio::null())
            .spawn()
            .expect("started")
    }

    /// Run the steps, and return the report. The exit status is that of the report.
    pub(crate) fn report(&self, steps: &str, variables: &[(&str, &str)]) -> SmokeReport {
        let ran = self.run(&format!("here -o json --steps {steps}"), variables);
        let report = SmokeReport::read(&ran.out()).unwrap_or_else(|error| panic!("{error}: {ran:?}"));
        assert_eq!(ran.status(), i32::from(report.result.exit_status()), "{ran:?}");
        report
    }
}

/// The ids of the steps with this status.
pub(crate) fn with(report: &SmokeReport, status: StepStatus) -> Vec<StepId> {
    report
        .steps
        .iter()
        .filter(|step| step.status == status)
        .map(|step| step.id)
        .collect()
}

/// What the program printed.
#[derive(Debug)]
pub(crate) struct Ran(Output);

impl Ran {
    pub(crate) fn status(&self) -> i32 {
        self.0.status.code().expect("a status")
    }

    pub(crate) fn out(&self) -> String {
        String::from_utf8(self.0.stdout.clone()).expect("UTF-8")
    }

    pub(crate) fn err(&self) -> String {
        String::from_utf8(self.0.stderr.clone()).expect("UTF-8")
    }
}
