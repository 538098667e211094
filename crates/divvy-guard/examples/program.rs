//! A test program that makes the CUDA calls that it reads from standard input, one per line, and writes each result as a line to standard output.
//!
//! `program LIBCUDA REAL`: the library that it loads, and the one behind it. Results are numbers; the first is the CUDA code. Pointers that the
//! program does not need are null.

#![allow(unsafe_code, reason = "it calls CUDA's C ABI")]
#![allow(clippy::print_stdout, reason = "results")]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::io::Write as _;
use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::ptr::null_mut;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// Call a function of the library by its name; 500, `CUDA_ERROR_NOT_FOUND`, if there is none.
macro_rules! call {
    ($library:expr, $name:tt($($argument:expr => $type:ty),*)) => {{
        // SAFETY: the type is that of cuda.h.
        match unsafe { $library.get::<unsafe extern "C" fn($($type),*) -> c_int>($name) } {
            // SAFETY: the arguments are valid, or wrong on purpose in a way that CUDA answers with an error.
            Ok(function) => u64::from(unsafe { function($($argument),*) }.unsigned_abs()),
            Err(_) => 500,
        }
    }};
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Default)]
struct Prop {
    kind: c_int,
    handle_types: c_int,
    location_type: c_int,
    location_id: c_int,
    meta: u64,
    flags: u64,
}

fn main() {
    let mut names = std::env::args().skip(1);
    let mut open = || {
        let name = names.next().expect("the names of two libraries");
        // SAFETY: the libraries have no code that runs at loading.
        unsafe { Library::open(Some(&name), RTLD_NOW | RTLD_LOCAL) }.unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    // Threads that are not waited for use it, too.
    let cuda: &'static Library = Box::leak(Box::new(open()));
    let real = open();
    // Do not lock standard input here: some calls read a line themselves.
    let next = || {
        let mut line = String::new();
        let read = std::io::stdin().read_line(&mut line).expect("a line");
        (read > 0).then_some(line)
    };
    while let Some(line) = next() {
        let mut words = line.trim_end().split(' ');
        let name = words.next().expect("a name");
        let words: Vec<&str> = words.collect();
        let number = |index: usize| words.get(index).and_then(|word: &&str| word.parse::<u64>().ok()).unwrap_or(0);
        let result = run(cuda, &real, name, &words, &number);
        let text: Vec<String> = result.iter().map(u64::to_string).collect();
        println!("{}", text.join(" "));
        std::io::stdout().flush().expect("standard output");
    }
}

fn run(cuda: &'static Library, real: &Library, name: &str, words: &[&str], number: &dyn Fn(usize) -> u64) -> Vec<u64> {
    let (first, second) = (number(0), number(1));
    let device = first as c_int;
    let mut out = [0_u64; 2];
    let [one, two] = &mut out;
    let null = null_mut::<u64>;
    let code = match name {
        "init" => call!(cuda, b"cuInit"(0 => c_uint)),
        "retain" => {
            let code = call!(cuda, b"cuDevicePrimaryCtxRetain"(one => *mut u64, device => c_int));
            if code == 0 {
                call!(cuda, b"cuCtxSetCurrent"(*one => u64))
            } else {
                code
            }
        }
        // Past the guard.
        "bare-retain" => {
            let code = call!(real, b"cuDevicePrimaryCtxRetain"(one => *mut u64, device => c_int));
            if code == 0 {
                call!(real, b"cuCtxSetCurrent"(*one => u64))
            } else {
                code
            }
        }
        "release" => call!(cuda, b"cuDevicePrimaryCtxRelease_v2"(device => c_int)),
        "reset" => call!(cuda, b"cuDevicePrimaryCtxReset_v2"(device => c_int)),
        "context" => call!(cuda, b"cuCtxCreate_v2"(one => *mut u64, 0 => c_uint, device => c_int)),
        "destroy" => call!(cuda, b"cuCtxDestroy_v2"(first => u64)),
        "green" => {
            // CUdevResource. 1 is CU_DEV_RESOURCE_TYPE_SM and CU_GREEN_CTX_DEFAULT_STREAM.
            let mut resource = [0_u32; 36];
            let (mut described, mut context) = (0_u64, 0_u64);
            let codes = [
                call!(cuda, b"cuDeviceGetDevResource"(device => c_int, resource.as_mut_ptr() => *mut u32, 1 => c_int)),
                call!(cuda, b"cuDevResourceGenerateDesc"(&mut described => *mut u64, resource.as_mut_ptr() => *mut u32, 1 => c_uint)),
                call!(cuda, b"cuGreenCtxCreate"(one => *mut u64, described => u64, device => c_int, 1 => c_uint)),
            ];
            match codes.into_iter().find(|code| *code != 0) {
                Some(code) => code,
                None => {
                    let code = call!(cuda, b"cuCtxFromGreenCtx"(&mut context => *mut u64, *one => u64));
                    if code == 0 {
                        call!(cuda, b"cuCtxSetCurrent"(context => u64))
                    } else {
                        code
                    }
                }
            }
        }
        "green-destroy" => call!(cuda, b"cuGreenCtxDestroy"(first => u64)),
        "alloc" => call!(cuda, b"cuMemAlloc_v2"(one => *mut u64, first => u64)),
        "alloc-null" => call!(cuda, b"cuMemAlloc_v2"(null() => *mut u64, first => u64)),
        "managed" => call!(cuda, b"cuMemAllocManaged"(one => *mut u64, first => u64, 1 => c_uint)),
        "pitch" => call!(cuda, b"cuMemAllocPitch_v2"(one => *mut u64, two => *mut u64, first => u64, second => u64, 4 => c_uint)),
        "free" => call!(cuda, b"cuMemFree_v2"(first => u64)),
        // In another thread, for which this one does not wait.
        "free-apart" => {
            let mut context = 0;
            call!(cuda, b"cuCtxGetCurrent"(&mut context => *mut u64));
            std::thread::spawn(move || {
                assert_eq!(call!(cuda, b"cuCtxSetCurrent"(context => u64)), 0);
                call!(cuda, b"cuMemFree_v2"(first => u64))
            });
            0
        }
        "info" => call!(cuda, b"cuMemGetInfo_v2"(one => *mut u64, two => *mut u64)),
        "info-free" => call!(cuda, b"cuMemGetInfo_v2"(one => *mut u64, null() => *mut u64)),
        "info-total" => call!(cuda, b"cuMemGetInfo_v2"(null() => *mut u64, two => *mut u64)),
        "total" => call!(cuda, b"cuDeviceTotalMem_v2"(one => *mut u64, device => c_int)),
        "create" | "create-host" => {
            let prop = Prop {
                kind: 1,
                // CU_MEM_LOCATION_TYPE_DEVICE or CU_MEM_LOCATION_TYPE_HOST_NUMA.
                location_type: if name == "create" { 1 } else { 3 },
                location_id: second as c_int,
                ..Prop::default()
            };
            call!(cuda, b"cuMemCreate"(one => *mut u64, first => u64, &prop => *const Prop, 0 => u64))
        }
        // CUmemLocationType, its id, and the size.
        "create-at" => {
            let prop = Prop {
                kind: 1,
                location_type: first as c_int,
                location_id: second as c_int,
                ..Prop::default()
            };
            call!(cuda, b"cuMemCreate"(one => *mut u64, number(2) => u64, &prop => *const Prop, 0 => u64))
        }
        // Descriptors are file descriptors. Those of other processes are found in /proc.
        "export" => call!(cuda, b"cuMemExportToShareableHandle"(one => *mut u64, first => u64, 1 => c_int, 0 => u64)),
        "import-from" => {
            let file = theirs(first, second);
            call!(cuda, b"cuMemImportFromShareableHandle"(one => *mut u64, file.as_raw_fd() as u64 => u64, 1 => c_int))
        }
        "close" => {
            // SAFETY: the driver has given the descriptor to this program.
            drop(unsafe { OwnedFd::from_raw_fd(device) });
            0
        }
        "pool-export" => call!(cuda, b"cuMemPoolExportToShareableHandle"(one => *mut u64, first => u64, 1 => c_int, 0 => u64)),
        "pool-import-from" => {
            let file = theirs(first, second);
            call!(cuda, b"cuMemPoolImportFromShareableHandle"(one => *mut u64, file.as_raw_fd() as u64 => u64, 1 => c_int, 0 => u64))
        }
        // What names memory goes through files.
        "pool-share" | "ipc-share" => {
            let mut handle = [0_u8; 64];
            let to = &mut handle;
            let code = if name == "ipc-share" {
                call!(cuda, b"cuIpcGetMemHandle"(to => *mut [u8; 64], first => u64))
            } else {
                call!(cuda, b"cuMemPoolExportPointer"(to => *mut [u8; 64], first => u64))
            };
            std::fs::write(words[1], handle).expect("a file");
            code
        }
        "pool-open" => {
            let mut handle = named(words[1]);
            call!(cuda, b"cuMemPoolImportPointer"(one => *mut u64, first => u64, &mut handle => *mut ExportedHandle))
        }
        "ipc-open" => call!(cuda, b"cuIpcOpenMemHandle_v2"(one => *mut u64, named(words[0]) => ExportedHandle, 1 => c_uint)),
        "ipc-open-v1" => call!(cuda, b"cuIpcOpenMemHandle"(one => *mut u64, named(words[0]) => ExportedHandle, 1 => c_uint)),
        "ipc-close" => call!(cuda, b"cuIpcCloseMemHandle"(first => u64)),
        "limit" => call!(cuda, b"cuCtxSetLimit"(first as c_int => c_int, second => u64)),
        "reserve" => call!(cuda, b"cuMemAddressReserve"(one => *mut u64, first => u64, 0 => u64, 0 => u64, 0 => u64)),
        "map" => call!(cuda, b"cuMemMap"(first => u64, second => u64, 0 => u64, number(2) => u64, 0 => u64)),
        "unmap" => call!(cuda, b"cuMemUnmap"(first => u64, second => u64)),
        "drop" => call!(cuda, b"cuMemRelease"(first => u64)),
        "again" => call!(cuda, b"cuMemRetainAllocationHandle"(one => *mut u64, first => u64)),
        "async" => call!(cuda, b"cuMemAllocAsync"(one => *mut u64, first => u64, 0 => u64)),
        "async-ptsz" => call!(cuda, b"cuMemAllocAsync_ptsz"(one => *mut u64, first => u64, 0 => u64)),
        "async-from" => call!(cuda, b"cuMemAllocFromPoolAsync"(one => *mut u64, first => u64, second => u64, 0 => u64)),
        "async-free" => call!(cuda, b"cuMemFreeAsync"(first => u64, 0 => u64)),
        "sync" => call!(cuda, b"cuCtxSynchronize"()),
        "sync-stream" => call!(cuda, b"cuStreamSynchronize"(0 => u64)),
        "pool" => {
            let mut prop = [0_u64; 11];
            // CU_MEM_ALLOCATION_TYPE_PINNED on a GPU.
            (prop[0], prop[1]) = (1, 1 | first << 32);
            call!(cuda, b"cuMemPoolCreate"(one => *mut u64, prop.as_ptr() => *const u64))
        }
        // CUmemLocationType and its id.
        "pool-managed" => {
            let mut prop = [0_u64; 11];
            (prop[0], prop[1]) = (2, first | second << 32);
            call!(cuda, b"cuMemPoolCreate"(one => *mut u64, prop.as_ptr() => *const u64))
        }
        "pool-default" => {
            call!(cuda, b"cuMemGetDefaultMemPool"(one => *mut u64, &(first | second << 32) => *const u64, number(2) as c_int => c_int))
        }
        "pool-current" => {
            call!(cuda, b"cuMemGetMemPool"(one => *mut u64, &(first | second << 32) => *const u64, number(2) as c_int => c_int))
        }
        "pool-of" => call!(cuda, b"cuDeviceGetMemPool"(one => *mut u64, device => c_int)),
        "pool-destroy" => call!(cuda, b"cuMemPoolDestroy"(first => u64)),
        "pool-trim" => call!(cuda, b"cuMemPoolTrimTo"(first => u64, second => u64)),
        // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        "pool-keep" => call!(cuda, b"cuMemPoolSetAttribute"(first => u64, 4 => c_int, &second => *const u64)),
        // Elements of four floats.
        "array" => call!(cuda, b"cuArrayCreate_v2"(one => *mut u64, [first, second, 0x20 | 4 << 32].as_ptr() => *const u64)),
        "array3d" => call!(cuda, b"cuArray3DCreate_v2"(one => *mut u64,
            [first, second, number(2), 0x20 | 4 << 32, number(3)].as_ptr() => *const u64)),
        "mipmap" => call!(cuda, b"cuMipmappedArrayCreate"(one => *mut u64,
            [first, second, number(2), 0x20 | 4 << 32, 0].as_ptr() => *const u64, number(3) as c_uint => c_uint)),
        "array-destroy" => call!(cuda, b"cuArrayDestroy"(first => u64)),
        "mipmap-destroy" => call!(cuda, b"cuMipmappedArrayDestroy"(first => u64)),
        "graph" => call!(cuda, b"cuGraphCreate"(one => *mut u64, 0 => c_uint)),
        // A node that allocates; with a third number through the function for nodes of any type.
        "graph-alloc" => {
            let mut node = [0_u64; 32];
            // CU_GRAPH_NODE_TYPE_MEM_ALLOC; then memory of the first GPU, and its size.
            (node[0], node[2], node[3], node[15]) = (10, 1, 1, second);
            match number(2) {
                0 => call!(cuda, b"cuGraphAddMemAllocNode"(one => *mut u64, first => u64, null() => *mut u64, 0 => u64,
                    node[2..].as_mut_ptr() => *mut u64)),
                1 => {
                    call!(cuda, b"cuGraphAddNode"(one => *mut u64, first => u64, null() => *mut u64, 0 => u64, node.as_mut_ptr() => *mut u64))
                }
                3 => {
                    call!(cuda, b"cuGraphAddNode_v3"(one => *mut u64, first => u64, null() => *mut u64, null() => *mut u64, 0 => u64,
                    node.as_mut_ptr() => *mut u64))
                }
                _ => {
                    call!(cuda, b"cuGraphAddNode_v2"(one => *mut u64, first => u64, null() => *mut u64, null() => *mut u64, 0 => u64,
                    node.as_mut_ptr() => *mut u64))
                }
            }
        }
        "graph-make" => call!(cuda, b"cuGraphInstantiateWithFlags"(one => *mut u64, first => u64, 1 => u64)),
        "graph-upload" => call!(cuda, b"cuGraphUpload"(first => u64, 0 => u64)),
        "graph-upload-ptsz" => call!(cuda, b"cuGraphUpload_ptsz"(first => u64, 0 => u64)),
        "async-free-ptsz" => call!(cuda, b"cuMemFreeAsync_ptsz"(first => u64, 0 => u64)),
        "graph-launch" => call!(cuda, b"cuGraphLaunch"(first => u64, 0 => u64)),
        "graph-kernel" => {
            // CUDA_KERNEL_NODE_PARAMS: the function is first.
            call!(cuda, b"cuGraphAddKernelNode_v2"(one => *mut u64, first => u64, null() => *mut u64, 0 => u64, [second; 9].as_ptr() => *const u64))
        }
        "kernel" => {
            let function = CString::new(*words.first().unwrap_or(&"")).expect("a name");
            match call!(cuda, b"cuModuleLoadData"(two => *mut u64, c"".as_ptr() => *const c_char)) {
                0 => call!(cuda, b"cuModuleGetFunction"(one => *mut u64, *two => u64, function.as_ptr() => *const c_char)),
                code => code,
            }
        }
        // Launch a kernel, or a graph, with a function of CUDA.
        "launch" => launch(cuda, words.first().unwrap_or(&"").as_bytes(), second),
        // Launch a kernel in so many threads at the same time, each once.
        "launch-threads" => {
            let mut context = 0;
            call!(cuda, b"cuCtxGetCurrent"(&mut context => *mut u64));
            std::thread::scope(|scope| {
                for _ in 0..second {
                    scope.spawn(|| {
                        assert_eq!(call!(cuda, b"cuCtxSetCurrent"(context => u64)), 0);
                        assert_eq!(launch(cuda, b"cuLaunchKernel", first), 0);
                    });
                }
            });
            0
        }
        // Launch a kernel until the next line arrives, and synchronize after each N launches. The first number is the number of launches.
        "work" => {
            let ended = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::io::stdin().read_line(&mut String::new()).expect("a line");
                    ended.store(true, std::sync::atomic::Ordering::Relaxed);
                });
                while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                    for _ in 0..second {
                        assert_eq!(launch(cuda, b"cuLaunchKernel", first), 0);
                    }
                    *one += second;
                    assert_eq!(call!(cuda, b"cuCtxSynchronize"()), 0);
                }
            });
            0
        }
        "graph-end" => call!(cuda, b"cuGraphExecDestroy"(first => u64)),
        "graph-trim" => call!(cuda, b"cuDeviceGraphMemTrim"(device => c_int)),
        "import" => {
            call!(cuda, b"cuImportExternalMemory"(one => *mut u64, [1, 0, 0, first, 0, 0, 0, 0, 0, 0, 0, 0].as_ptr() => *const u64))
        }
        "import-end" => call!(cuda, b"cuDestroyExternalMemory"(first => u64)),
        "address" => {
            let function = CString::new(*words.first().unwrap_or(&"")).expect("a name");
            let (version, flags) = (second as c_int, number(2));
            let mut status: c_int = -1;
            let code = match number(3) {
                0 => {
                    call!(cuda, b"cuGetProcAddress_v2"(function.as_ptr() => *const c_char, one => *mut u64, version => c_int, flags => u64,
                    &mut status => *mut c_int))
                }
                1 => {
                    call!(cuda, b"cuGetProcAddress_v2"(function.as_ptr() => *const c_char, one => *mut u64, version => c_int, flags => u64,
                    null_mut() => *mut c_int))
                }
                _ => {
                    call!(cuda, b"cuGetProcAddress"(function.as_ptr() => *const c_char, one => *mut u64, version => c_int, flags => u64))
                }
            };
            *two = u64::from(status.unsigned_abs());
            code
        }
        // Where a symbol is, in the library and in the one behind it.
        "symbol" => {
            let symbol = words.first().unwrap_or(&"").as_bytes();
            *one = address(cuda, symbol);
            *two = address(real, symbol);
            0
        }
        "storm" => {
            storm(cuda, StormCalls { pool: false }, first, second, 40 << 20);
            0
        }
        // Threads that allocate and free at random, and free all at their end. Allocations have up to this many bytes; 1: they are from a pool.
        "threads" => {
            let calls = StormCalls { pool: number(2) == 1 };
            std::thread::scope(|scope| {
                for seed in 0..first {
                    scope.spawn(move || {
                        let mut context = 0;
                        assert_eq!(
                            call!(cuda, b"cuDevicePrimaryCtxRetain"(&mut context => *mut u64, 0 => c_int)),
                            0
                        );
                        assert_eq!(call!(cuda, b"cuCtxSetCurrent"(context => u64)), 0);
                        for pointer in storm(cuda, calls, seed, 1000, second) {
                            assert_eq!(calls.free(cuda, pointer), 0);
                        }
                    });
                }
            });
            0
        }
        // Threads that ask for the primary context at the same time, each so many times. The first number is how often they got it.
        "retain-threads" => {
            let got = std::sync::atomic::AtomicU64::new(0);
            std::thread::scope(|scope| {
                for _ in 0..first {
                    scope.spawn(|| {
                        for _ in 0..second {
                            let mut context = 0;
                            if call!(cuda, b"cuDevicePrimaryCtxRetain"(&mut context => *mut u64, 0 => c_int)) == 0 {
                                got.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                            }
                        }
                    });
                }
            });
            *one = got.into_inner();
            0
        }
        // Load a second copy of the library, in a separate linker namespace.
        "namespace" => {
            let path = CString::new(std::env::args().nth(1).expect("a library")).expect("a path");
            // SAFETY: the library has no code that runs at loading.
            let copy = unsafe { nix::libc::dlmopen(nix::libc::LM_ID_NEWLM, path.as_ptr(), nix::libc::RTLD_NOW) };
            assert!(!copy.is_null(), "dlmopen");
            // SAFETY: the handle is one of dlopen, and is not closed elsewhere.
            let copy = std::mem::ManuallyDrop::new(unsafe { Library::from_raw(copy) });
            let mut context = 0;
            assert_eq!(call!(copy, b"cuInit"(0 => c_uint)), 0);
            assert_eq!(
                call!(copy, b"cuDevicePrimaryCtxRetain"(&mut context => *mut u64, 0 => c_int)),
                0
            );
            assert_eq!(call!(copy, b"cuCtxSetCurrent"(context => u64)), 0);
            call!(copy, b"cuMemAlloc_v2"(one => *mut u64, first => u64))
        }
        // Take a lease on a file, and do not give it up when it is broken.
        "lease" => {
            let file = std::fs::File::open(words[0]).expect("a file");
            // SAFETY: to ignore a signal runs no code.
            unsafe { nix::libc::signal(nix::libc::SIGIO, nix::libc::SIG_IGN) };
            // SAFETY: the descriptor is open, and the call touches no memory.
            let result = unsafe { nix::libc::fcntl(file.into_raw_fd(), nix::libc::F_SETLEASE, nix::libc::F_WRLCK) };
            u64::from(result.unsigned_abs())
        }
        // A child that has what its parent had, until it is killed.
        "fork" => fork(|| {
            loop {
                std::thread::park();
            }
        }),
        // A child that uses the GPU: its results, as if they were the parent's.
        "fork-alloc" => {
            let mut pipe = std::io::pipe().expect("a pipe");
            let child = fork(|| {
                let mut pointer = 0;
                let code = call!(cuda, b"cuMemAlloc_v2"(&mut pointer => *mut u64, first => u64));
                pipe.1.write_all(&code.to_ne_bytes()).expect("the pipe");
            });
            let mut code = [0; 8];
            std::io::Read::read_exact(&mut pipe.0, &mut code).expect("the child's result");
            *one = child;
            u64::from_ne_bytes(code)
        }
        other => panic!("{other}: no such call"),
    };
    [vec![code], out.to_vec()].concat()
}

/// `CUipcMemHandle`, `CUmemPoolPtrExportData`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ExportedHandle([u8; 64]);

fn named(path: &str) -> ExportedHandle {
    ExportedHandle(std::fs::read(path).expect("a file").try_into().expect("64 bytes"))
}

/// A descriptor of another process.
fn theirs(pid: u64, descriptor: u64) -> std::fs::File {
    let mut options = std::fs::File::options();
    options
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/fd/{descriptor}"))
        .expect("a descriptor")
}

/// Launch on the default stream.
fn launch(cuda: &Library, symbol: &[u8], what: u64) -> u64 {
    let null = null_mut::<u64>;
    match symbol {
        b"cuLaunchKernel" | b"cuLaunchKernel_ptsz" => {
            call!(cuda, symbol(what => u64, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint,
            1 => c_uint, 1 => c_uint, 0 => c_uint, 0 => u64, null() => *mut u64, null() => *mut u64))
        }
        b"cuLaunchCooperativeKernel" | b"cuLaunchCooperativeKernel_ptsz" => {
            call!(cuda, symbol(what => u64, 1 => c_uint, 1 => c_uint,
            1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint, 0 => c_uint, 0 => u64, null() => *mut u64))
        }
        // CUlaunchConfig: six sizes of 1, and the rest 0.
        b"cuLaunchKernelEx" | b"cuLaunchKernelEx_ptsz" => {
            let ones = 1 | 1 << 32;
            call!(cuda, symbol([ones, ones, ones, 0, 0, 0, 0].as_ptr() => *const u64, what => u64, null() => *mut u64, null() => *mut u64))
        }
        // CUDA_LAUNCH_PARAMS: the function before the sizes.
        b"cuLaunchCooperativeKernelMultiDevice" => {
            let ones = 1 | 1 << 32;
            call!(cuda, symbol([what, ones, ones, ones, 0, 0, 0].as_ptr() => *const u64, 1 => c_uint, 0 => c_uint))
        }
        b"cuLaunch" => call!(cuda, symbol(what => u64)),
        b"cuLaunchGrid" => call!(cuda, symbol(what => u64, 1 => c_int, 1 => c_int)),
        b"cuLaunchGridAsync" => call!(cuda, symbol(what => u64, 1 => c_int, 1 => c_int, 0 => u64)),
        b"cuGraphLaunch" | b"cuGraphLaunch_ptsz" => call!(cuda, symbol(what => u64, 0 => u64)),
        other => panic!("{}: no function that launches", String::from_utf8_lossy(other)),
    }
}

fn address(library: &Library, symbol: &[u8]) -> u64 {
    // SAFETY: the symbol is not used.
    unsafe { library.get::<*mut c_void>(symbol) }.map_or(0, |symbol| symbol.into_raw() as u64)
}

/// Run a function in a forked process, which then ends. Returns its id.
fn fork(child: impl FnOnce()) -> u64 {
    // SAFETY: this program has one thread.
    match unsafe { nix::unistd::fork() }.expect("a child") {
        nix::unistd::ForkResult::Parent { child } => u64::from(child.as_raw().unsigned_abs()),
        nix::unistd::ForkResult::Child => {
            child();
            // SAFETY: ends the process at once, without the parent's destructors.
            unsafe { nix::libc::_exit(0) }
        }
    }
}

/// How a storm allocates and frees.
#[derive(Clone, Copy)]
struct StormCalls {
    pool: bool,
}

impl StormCalls {
    fn allocate(self, cuda: &Library, pointer: &mut u64, bytes: u64) -> u64 {
        if self.pool {
            call!(cuda, b"cuMemAllocAsync"(pointer => *mut u64, bytes => u64, 0 => u64))
        } else {
            call!(cuda, b"cuMemAlloc_v2"(pointer => *mut u64, bytes => u64))
        }
    }

    fn free(self, cuda: &Library, pointer: u64) -> u64 {
        if self.pool {
            call!(cuda, b"cuMemFreeAsync"(pointer => u64, 0 => u64))
        } else {
            call!(cuda, b"cuMemFree_v2"(pointer => u64))
        }
    }
}

/// Allocate and free at random. Returns what is left.
fn storm(cuda: &Library, calls: StormCalls, seed: u64, steps: u64, largest: u64) -> Vec<u64> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut mine = Vec::new();
    for _ in 0..steps {
        if random() % 3 == 0 && !mine.is_empty() {
            let pointer = mine.swap_remove(random() as usize % mine.len());
            assert_eq!(calls.free(cuda, pointer), 0);
            continue;
        }
        let mut pointer = 0;
        let bytes = 1 + random() % largest;
        match calls.allocate(cuda, &mut pointer, bytes) {
            0 => mine.push(pointer),
            code => assert_eq!(code, 2),
        }
    }
    mine
}
