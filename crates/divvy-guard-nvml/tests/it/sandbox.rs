//! A container with both shadows, without a container: the files are in a temporary directory.

use std::ffi::CString;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use divvy_shadow_testkit::{build, hide, replace, target};
use divvy_share::limits::Limits;
use divvy_share::usage;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

pub(crate) const MIB: u64 = 1 << 20;
/// What a context takes on the simulated GPUs.
pub(crate) const CONTEXT: u64 = 300 * MIB;
/// What a process of another pod has of each GPU.
pub(crate) const FOREIGN: u64 = 500 * MIB;
pub(crate) const INSUFFICIENT_SIZE: u64 = 7;

/// The third GPU is divided.
pub(crate) const GPUS: [&str; 3] = [
    "GPU-00010203-0405-4607-8809-0a0b0c0d0e0f",
    "GPU-10111213-1415-4617-8819-1a1b1c1d1e1f",
    "GPU-20212223-2425-4627-8829-2a2b2c2d2e2f",
];

/// The library as it ships.
pub(crate) fn shadow() -> &'static [u8] {
    static SHADOW: OnceLock<Vec<u8>> = OnceLock::new();
    SHADOW.get_or_init(|| divvy_shadow_testkit::shadow("divvy-guard-nvml"))
}

fn guard() -> &'static [u8] {
    static GUARD: OnceLock<Vec<u8>> = OnceLock::new();
    GUARD.get_or_init(|| divvy_shadow_testkit::shadow("divvy-guard"))
}

/// The simulated libraries of the driver: NVML and CUDA.
pub(crate) fn drivers() -> &'static [PathBuf; 2] {
    static DRIVERS: OnceLock<[PathBuf; 2]> = OnceLock::new();
    DRIVERS.get_or_init(|| {
        ["divvy-nvml-sim", "divvy-cuda-sim"].map(|package| {
            build(&["-p", package]);
            target().join(format!("debug/lib{}.so", package.replace('-', "_")))
        })
    })
}

/// The program that runs in the container.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        build(&["-p", "divvy-guard-nvml", "--example", "viewer"]);
        target().join("debug/examples/viewer")
    })
}

/// Compile a C program.
pub(crate) fn compile(source: &str, arguments: &[&str], to: &Path) {
    let mut compiler = Command::new("cc")
        .args(["-x", "c", "-", "-x", "none"])
        .args(arguments)
        .arg("-o")
        .arg(to)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    assert!(compiler.wait().unwrap().success());
}

/// The files of one pod, on a machine with three GPUs.
pub(crate) struct Sandbox {
    directory: tempfile::TempDir,
    memory: u64,
}

impl Sandbox {
    /// A machine whose GPUs have this much memory; the pod has no share yet.
    pub(crate) fn new(memory: u64) -> Self {
        let root = divvy_share::DIRECTORY;
        // As long as the paths that it replaces.
        let directory = tempfile::Builder::new()
            .prefix("n")
            .rand_bytes(root.len() - 6)
            .tempdir_in("/tmp")
            .unwrap();
        let sandbox = Self { directory, memory };
        let root = sandbox.path("").to_str().unwrap().trim_end_matches('/').to_owned();
        let libraries = [shadow(), guard()];
        for ((library, driver), name) in libraries.iter().zip(drivers()).zip(["libnvidia-ml.so", "libcuda.so"]) {
            let mut library = library.to_vec();
            for path in [divvy_share::DIRECTORY, "/run/divvy/guard"] {
                assert_eq!(replace(&mut library, path, &root), 1, "{name}: {path}");
            }
            fs::write(sandbox.path(&format!("{name}.1")), library).unwrap();
            symlink(driver, sandbox.path(&format!("{name}.real"))).unwrap();
        }
        fs::create_dir(sandbox.path("ledger")).unwrap();
        sandbox.describe("575.51.03");
        sandbox
    }

    /// A machine on which the pod has a share of the first GPU.
    pub(crate) fn with_share(memory: u64, share: u64) -> Self {
        let sandbox = Self::new(memory);
        sandbox.give(0, &limits(share));
        sandbox
    }

    /// Have a driver of this version.
    pub(crate) fn describe(&self, driver: &str) {
        let gpus: String = GPUS
            .iter()
            .zip(["", "", "mig = [{ gpu_instance = 1, compute_instance = 0 }]\n"])
            .map(|(uuid, mig)| {
                format!(
                    "[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nuuid = \"{uuid}\"\nmemory_mib = {}\ncontext_mib = {}\n\
                     processes = [{{ pid = 1, used_mib = {} }}]\n{mig}",
                    self.memory / MIB,
                    CONTEXT / MIB,
                    FOREIGN / MIB
                )
            })
            .collect();
        let machine = format!("v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"{driver}\"\n{gpus}");
        fs::write(self.path("machine.toml"), machine).unwrap();
    }

    /// Have a driver without these functions.
    pub(crate) fn without(&self, functions: &[&str]) {
        let mut library = fs::read(&drivers()[0]).unwrap();
        hide(&mut library, functions);
        let real = self.path("libnvidia-ml.so.real");
        fs::remove_file(&real).unwrap();
        fs::write(real, library).unwrap();
    }

    /// Have a driver that knows the first GPU, and has these functions, written in C.
    pub(crate) fn driver_with(&self, functions: &str) {
        let real = self.path("libnvidia-ml.so.real");
        fs::remove_file(&real).unwrap();
        let source = format!(
            "#include <string.h>
            int nvmlInit_v2(void) {{ return 0; }}
            int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {{ *device = (void *)1; return 0; }}
            int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {{ strcpy(text, \"{}\"); return 0; }}
            {functions}",
            GPUS[0]
        );
        compile(&source, &["-shared", "-fPIC"], &real);
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

    /// Change the limits, as the agent does.
    pub(crate) fn change(&self, limits: &Limits) {
        let path = self.file(0, "limits");
        let (generation, _) = Limits::from_bytes(&fs::read(&path).unwrap()).unwrap();
        let (offset, copy) = limits.copy(generation + 1);
        let file = fs::File::options().write(true).open(path).unwrap();
        file.write_all_at(&copy, offset).unwrap();
    }

    /// Be a process of the pod: own a slot of the first GPU with this content.
    pub(crate) fn occupy(&self, index: u64, slot: Slot) -> Owner {
        let file = fs::File::options()
            .read(true)
            .write(true)
            .open(self.file(0, "usage"))
            .unwrap();
        let words = [slot.used, slot.pending, slot.pid, 0, 0, 0, 0, slot.root];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        file.write_all_at(&bytes, 64 + 64 * index).unwrap();
        let mut bound = [0; 8];
        file.read_exact_at(&mut bound, 24).unwrap();
        let bound = u64::from_ne_bytes(bound).max(index + 1);
        file.write_all_at(&bound.to_ne_bytes(), 24).unwrap();
        let owner = Owner { file, index };
        owner.lock(libc::F_WRLCK);
        owner
    }

    pub(crate) fn start(&self) -> Program {
        self.start_on("libnvidia-ml.so.1")
    }

    /// A program that has NVML without the shadow.
    pub(crate) fn plain(&self) -> Program {
        let mut program = self.start_on("libnvidia-ml.so.real");
        assert_eq!(program.code("init"), 0);
        program
    }

    fn start_on(&self, library: &str) -> Program {
        let mut command = Command::new(program());
        command
            .args([library, "libnvidia-ml.so.real", "libcuda.so.1"].map(|name| self.path(name)))
            .env("DIVVY_NVML_SIM", self.path("machine.toml"))
            .env("DIVVY_NVML_SIM_LEDGER", self.path("ledger"))
            // On a machine with a MIG device, CUDA shows nothing else otherwise.
            .env("CUDA_VISIBLE_DEVICES", "0,1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Program { child, input, output }
    }

    /// A program that has initialized NVML.
    pub(crate) fn watcher(&self) -> Program {
        let mut program = self.start();
        assert_eq!(program.code("init"), 0);
        program
    }

    /// A program that has made the primary context of the first GPU, and has allocated memory.
    pub(crate) fn user(&self, bytes: u64) -> Program {
        let mut program = self.watcher();
        assert_eq!(program.code("cuda"), 0);
        assert_eq!(program.code(&format!("alloc {bytes}")), 0);
        program
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

/// What a process has written into its slot.
#[derive(Clone, Copy)]
pub(crate) struct Slot {
    pub(crate) used: u64,
    pub(crate) pending: u64,
    pub(crate) pid: u64,
    pub(crate) root: u64,
}

impl Slot {
    /// That of a process in the tests' own container.
    pub(crate) fn of(pid: u64, used: u64) -> Self {
        Self {
            used,
            pending: 0,
            pid,
            root: root(),
        }
    }
}

/// The number of the tests' own root directory.
pub(crate) fn root() -> u64 {
    root_at("/")
}

/// The number of the directory at a path.
pub(crate) fn root_at(path: &str) -> u64 {
    divvy_shadow::sys::directory(&CString::new(path).unwrap())
}

/// The owner of a slot, as long as it lives.
pub(crate) struct Owner {
    file: fs::File,
    index: u64,
}

impl Owner {
    fn lock(&self, kind: i32) {
        let lock = libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: self.index.cast_signed(),
            l_len: 1,
            l_pid: 0,
        };
        fcntl(&self.file, FcntlArg::F_OFD_SETLK(&lock)).unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // A child that another test is just starting has the description open as well, so closing it is not enough.
        self.lock(libc::F_UNLCK);
    }
}

/// A process of the pod.
pub(crate) struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Make a call. The result begins with the code.
    pub(crate) fn call(&mut self, call: &str) -> Vec<u64> {
        writeln!(self.input, "{call}").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "{call}: the program has ended");
        line.split_whitespace()
            .map(|word| word.parse::<i64>().unwrap().cast_unsigned())
            .collect()
    }

    pub(crate) fn code(&mut self, call: &str) -> u64 {
        self.call(call)[0]
    }

    pub(crate) fn pid(&self) -> u64 {
        u64::from(self.child.id())
    }

    /// The processes that a function lists, with what they have, in an array of entries of this size.
    pub(crate) fn list(&mut self, function: &str, device: &str, size: usize) -> Vec<(u64, u64)> {
        let answer = self.call(&format!("list {function} {device} 300 {size}"));
        assert_eq!(answer[0], 0, "{function}");
        let entries = answer[2..].chunks(size / 4).take(answer[1] as usize);
        let entry = |words: &[u64]| {
            // Instances: none. Protected memory: 0.
            let rest = [u64::from(u32::MAX), u64::from(u32::MAX), 0, 0];
            assert_eq!(words[4..], rest[..words.len() - 4], "{function}");
            (words[0], words[2] | words[3] << 32)
        };
        let mut processes: Vec<_> = entries.map(entry).collect();
        processes.sort_unstable();
        processes
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
