//! A container with both shadows, without a container: the files are in a temporary directory.

use std::ffi::CString;
use std::fs;
use std::ops::Deref;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

pub(crate) use divvy_shadow_testkit::{CONTEXT, MIB, limits};
use divvy_shadow_testkit::{GPUS, RequestWorker, ShadowContainer, compile, example, hide, library};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// What a process of another pod has of each GPU.
pub(crate) const FOREIGN: u64 = 500 * MIB;
pub(crate) const INSUFFICIENT_SIZE: u64 = 7;

/// The library as it ships.
pub(crate) fn shadow() -> &'static [u8] {
    divvy_shadow_testkit::shadow("divvy-guard-nvml")
}

/// The simulated libraries of the driver: NVML and CUDA.
pub(crate) fn drivers() -> [&'static Path; 2] {
    ["divvy-nvml-sim", "divvy-cuda-sim"].map(library)
}

/// The files of one pod, on a machine with three GPUs.
pub(crate) struct Sandbox {
    container: ShadowContainer,
    memory: u64,
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
        let container = ShadowContainer::new("n");
        let [nvml, cuda] = drivers();
        container.put_guard("divvy-guard-nvml", "libnvidia-ml.so", nvml);
        container.put_guard("divvy-guard", "libcuda.so", cuda);
        let sandbox = Self { container, memory };
        sandbox.describe("575.51.03");
        sandbox
    }

    /// A machine on which the pod has a share of the first GPU.
    pub(crate) fn with_share(memory: u64, share: u64) -> Self {
        let sandbox = Self::new(memory);
        sandbox.give(0, &limits(share));
        sandbox
    }

    /// Have a driver of this version. The third GPU is divided.
    pub(crate) fn describe(&self, driver: &str) {
        let whole = format!("processes = [{{ pid = 1, used_mib = {} }}]\n", FOREIGN / MIB);
        let divided = format!("{whole}mig = [{{ gpu_instance = 1, compute_instance = 0 }}]\n");
        self.describe_machine(driver, self.memory, &[whole.as_str(), whole.as_str(), divided.as_str()]);
    }

    /// Have a driver without these functions.
    pub(crate) fn without(&self, functions: &[&str]) {
        let mut library = fs::read(drivers()[0]).unwrap();
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
        compile(&source, &real, &["-shared", "-fPIC"]);
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
        let mut command = self.command(example("divvy-guard-nvml", "viewer"));
        command
            .args([library, "libnvidia-ml.so.real", "libcuda.so.1"].map(|name| self.path(name)))
            // On a machine with a MIG device, CUDA shows nothing else otherwise.
            .env("CUDA_VISIBLE_DEVICES", "0,1");
        Program(RequestWorker::start(&mut command))
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
pub(crate) struct Program(RequestWorker);

impl Program {
    /// Make a call. The result begins with the code.
    pub(crate) fn call(&mut self, call: &str) -> Vec<u64> {
        self.0.send(call);
        self.0.answer().unwrap_or_else(|| panic!("{call}: the program has ended"))
    }

    pub(crate) fn code(&mut self, call: &str) -> u64 {
        self.call(call)[0]
    }

    pub(crate) fn pid(&self) -> u64 {
        u64::from(self.0.pid())
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
        self.0.kill();
    }
}
