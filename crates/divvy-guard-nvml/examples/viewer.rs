//! A test program that makes the calls that it reads from standard input, one per line, and writes each result as a line of numbers to standard output.
//! The first number is NVML's or CUDA's code.
//!
//! `viewer NVML REAL CUDA`: NVML's library, the one behind it, and CUDA's library.

#![allow(unsafe_code, reason = "it calls the C ABI of NVML and CUDA")]
#![allow(clippy::print_stdout, reason = "results")]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::io::{BufRead as _, Write as _};
use std::os::unix::fs::chroot;
use std::ptr::null_mut;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nix::sched::{CloneFlags, unshare};
use nvml_wrapper_sys::bindings::{nvmlMemory_t, nvmlMemory_v2_t};

type ViewerDevice = *mut c_void;

/// Call a function of a library by its name.
macro_rules! call {
    ($library:expr, $name:expr, $($argument:expr => $type:ty),*) => {{
        // SAFETY: the type is that of the header.
        let function = unsafe { $library.get::<unsafe extern "C" fn($($type),*) -> c_int>($name) }.expect("the function");
        // SAFETY: the arguments are valid, or null where the function checks for it.
        i64::from(unsafe { function($($argument),*) })
    }};
}

struct Viewer {
    nvml: Library,
    real: Library,
    cuda: Library,
}

fn load(path: &str) -> Library {
    // SAFETY: neither the shadows nor the simulated libraries do anything unsound at loading.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.expect("a library")
}

fn main() {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let [nvml, real, cuda] = paths.as_slice() else {
        panic!("usage: viewer NVML REAL CUDA")
    };
    let viewer = Viewer {
        nvml: load(nvml),
        real: load(real),
        cuda: load(cuda),
    };
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        let words: Vec<&str> = line.split_whitespace().collect();
        let numbers = viewer.answer(&words);
        let texts: Vec<String> = numbers.iter().map(i64::to_string).collect();
        println!("{}", texts.join(" "));
        std::io::stdout().flush().expect("standard output");
    }
}

impl Viewer {
    fn answer(&self, words: &[&str]) -> Vec<i64> {
        let number = |index: usize| words.get(index).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        match words.first().copied().unwrap_or_default() {
            // Have a context of CUDA on the first GPU.
            "cuda" => {
                let mut context: *mut c_void = null_mut();
                assert_eq!(call!(self.cuda, b"cuInit", 0 => c_uint), 0);
                let code = call!(self.cuda, b"cuDevicePrimaryCtxRetain", &mut context => *mut *mut c_void, 0 => c_int);
                assert_eq!(call!(self.cuda, b"cuCtxSetCurrent", context => *mut c_void), 0);
                vec![code]
            }
            "alloc" => {
                let mut pointer: u64 = 0;
                let code = call!(self.cuda, b"cuMemAlloc_v2", &mut pointer => *mut u64, number(1) => u64);
                vec![code, pointer as i64]
            }
            "free" => vec![call!(self.cuda, b"cuMemFree_v2", number(1) => u64)],
            "info" => {
                let (mut free, mut total): (u64, u64) = (0, 0);
                let code = call!(self.cuda, b"cuMemGetInfo_v2", &mut free => *mut u64, &mut total => *mut u64);
                vec![code, free as i64, total as i64]
            }
            // Take a directory as the root directory, as root or in a user namespace.
            "chroot" => {
                let root = words[1];
                let done = chroot(root).or_else(|_| {
                    unshare(CloneFlags::CLONE_NEWUSER)?;
                    chroot(root)
                });
                vec![i64::from(done.is_err())]
            }
            "init" => vec![call!(self.nvml, b"nvmlInit_v2",)],
            "shutdown" => vec![call!(self.nvml, b"nvmlShutdown",)],
            // Memory of a device: total, free, used.
            "memory" => {
                // Not what anybody would write.
                let mut memory = nvmlMemory_t {
                    total: 7,
                    free: 8,
                    used: 9,
                };
                let device = self.device(words[1]);
                let code = call!(self.nvml, b"nvmlDeviceGetMemoryInfo", device => ViewerDevice, &mut memory => *mut nvmlMemory_t);
                vec![code, memory.total as i64, memory.free as i64, memory.used as i64]
            }
            // With a version: total, free, used, reserved.
            "memory2" => {
                let mut memory = nvmlMemory_v2_t {
                    version: number(2) as c_uint,
                    total: 7,
                    free: 8,
                    used: 9,
                    reserved: 10,
                };
                let device = self.device(words[1]);
                let code =
                    call!(self.nvml, b"nvmlDeviceGetMemoryInfo_v2", device => ViewerDevice, &mut memory => *mut nvmlMemory_v2_t);
                assert_eq!(memory.version, number(2) as c_uint);
                let numbers = [memory.total, memory.free, memory.used, memory.reserved];
                [vec![code], numbers.map(|number| number as i64).to_vec()].concat()
            }
            // A function of a device and a null pointer.
            "null" => {
                let device = self.device(words[2]);
                vec![
                    call!(self.nvml, words[1].as_bytes(), device => ViewerDevice, null_mut() => *mut c_void, null_mut() => *mut c_void),
                ]
            }
            "list" => self.list(
                words[1],
                words[2],
                number(3),
                number(4) as usize,
                words.get(5) == Some(&"null"),
            ),
            // The name of a process, as bytes.
            "name" => {
                let mut name = [0_u8; 4096];
                let code = call!(self.nvml, b"nvmlSystemGetProcessName", number(1) as c_uint => c_uint,
                    name.as_mut_ptr().cast() => *mut c_char, 4096 => c_uint);
                [
                    vec![code],
                    name.iter()
                        .take_while(|byte| **byte != 0)
                        .map(|byte| i64::from(*byte))
                        .collect(),
                ]
                .concat()
            }
            // Where a symbol is, in the library and in the one behind it.
            "symbol" => vec![address(&self.nvml, words[1]), address(&self.real, words[1])],
            other => panic!("{other}: no such call"),
        }
    }

    /// The handle of a GPU by its index, of a MIG device of the third GPU (`mig0`), or none (`null`).
    fn device(&self, name: &str) -> ViewerDevice {
        let mut device: ViewerDevice = null_mut();
        let code = if name == "null" {
            0
        } else if let Some(index) = name.strip_prefix("mig") {
            let index: c_uint = index.parse().expect("an index");
            let parent = self.device("2");
            call!(self.nvml, b"nvmlDeviceGetMigDeviceHandleByIndex", parent => ViewerDevice, index => c_uint, &mut device => *mut ViewerDevice)
        } else {
            let index: c_uint = name.parse().expect("an index");
            call!(self.nvml, b"nvmlDeviceGetHandleByIndex_v2", index => c_uint, &mut device => *mut ViewerDevice)
        };
        // Before nvmlInit, NVML returns no handle.
        assert!(code == 0 || code == 1, "{name}: {code}");
        device
    }

    /// List processes, into an array of this many entries of this size: the code, the count, and the array's 32-bit words.
    fn list(&self, function: &str, device: &str, room: u64, size: usize, null: bool) -> Vec<i64> {
        /// What nothing may write to.
        const REST: c_uint = 0xaaaa_aaaa;
        let (device, mut count) = (self.device(device), room as c_uint);
        let words = room as usize * size / 4;
        let mut list = vec![REST; words + 64];
        let pointer = if null { null_mut() } else { list.as_mut_ptr() };
        let code =
            call!(self.nvml, function.as_bytes(), device => ViewerDevice, &mut count => *mut c_uint, pointer => *mut c_uint);
        assert!(list[words..].iter().all(|word| *word == REST), "it wrote behind the array");
        let list = list[..words].iter().map(|word| i64::from(*word));
        [vec![code, i64::from(count)], list.collect()].concat()
    }
}

fn address(library: &Library, symbol: &str) -> i64 {
    let symbol = CString::new(symbol).expect("a name");
    // SAFETY: the symbol is not used.
    unsafe { library.get::<*mut c_void>(symbol.as_bytes_with_nul()) }.map_or(0, |symbol| symbol.into_raw() as i64)
}
