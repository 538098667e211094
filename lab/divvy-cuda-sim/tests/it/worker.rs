//! What a process of a test does: it reads calls from standard input, makes them, and writes what they answer.

#![allow(
    unsafe_code,
    reason = "calls the functions of a C library, whose types only the caller of the test knows"
)]

use std::ffi::{CString, c_int};
use std::io::Write;

use libloading::Library;

use crate::bed::{Bed, Num, Out, Text, Words};

/// Every function of the driver and of NVML that the tests call takes up to 11 integers or pointers. The C ABIs of Linux let a caller pass more
/// arguments than a function takes, and integers of 64 bits for shorter ones.
type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> c_int;

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
struct Handle([u64; 8]);

/// An argument, with the memory that it points to.
enum Cell {
    Number(u64),
    /// A place for a result of up to 8 bytes.
    Out(Box<u64>),
    Text(CString),
    /// A buffer, aligned to 8.
    Bytes(Vec<u64>),
}

impl Cell {
    fn parse(text: &str) -> Cell {
        match text.split_at(1) {
            ("o", "") => Cell::Out(Box::new(0)),
            ("s", text) => Cell::Text(CString::new(text).expect("no zero byte")),
            ("x", words) => Cell::Bytes(words.split(',').map(|word| word.parse().expect("a number")).collect()),
            ("#", number) => Cell::Number(number.parse().expect("a number")),
            other => panic!("unknown argument {other:?}"),
        }
    }

    fn argument(&mut self) -> u64 {
        match self {
            Cell::Number(number) => *number,
            Cell::Out(place) => (&raw mut **place).expose_provenance() as u64,
            Cell::Text(text) => text.as_ptr().expose_provenance() as u64,
            Cell::Bytes(words) => words.as_mut_ptr().expose_provenance() as u64,
        }
    }
}

struct Worker {
    cuda: Library,
    nvml: Option<Library>,
}

impl Worker {
    fn call(&self, name: &str, cells: &mut [Cell]) -> c_int {
        let library = if name.starts_with("nvml") {
            self.nvml.as_ref().expect("NVML")
        } else {
            &self.cuda
        };
        let mut arguments = [0; 11];
        for (argument, cell) in arguments.iter_mut().zip(cells) {
            *argument = cell.argument();
        }
        let [a, b, c, d, e, f, g, h, i, j, k] = arguments;
        // SAFETY: the symbol is a function, and the test gives it the arguments that its header asks for; what they point to outlives the call.
        unsafe {
            let function = library.get::<Function>(name.as_bytes()).expect("a symbol");
            function(a, b, c, d, e, f, g, h, i, j, k)
        }
    }

    /// Call cuIpcOpenMemHandle_v2.
    fn open(&self, handle: &[u64]) -> (c_int, u64) {
        let handle = Handle(handle.try_into().expect("64 bytes"));
        let mut address = 0;
        // SAFETY: the type is that of cuda.h, and the place of the result outlives the call.
        let code = unsafe {
            let function = self
                .cuda
                .get::<unsafe extern "C" fn(*mut u64, Handle, u32) -> c_int>(b"cuIpcOpenMemHandle_v2");
            function.expect("a symbol")(&raw mut address, handle, 1)
        };
        (code, address)
    }

    /// Allocate and free without end, and say so after each step.
    fn storm(&self, bytes: u64) {
        let mut held = Vec::new();
        let mut number = bytes;
        loop {
            number = number
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            if number >> 63 == 0 || held.is_empty() {
                let mut cells = [Cell::Out(Box::new(0)), Cell::Number((number >> 33) % bytes + 1)];
                if self.call("cuMemAlloc_v2", &mut cells) == 0
                    && let Cell::Out(address) = &cells[0]
                {
                    held.push(**address);
                }
            } else {
                let address = held.swap_remove((number >> 33) as usize % held.len());
                assert_eq!(self.call("cuMemFree_v2", &mut [Cell::Number(address)]), 0);
            }
            answer("0");
        }
    }

    /// Allocate and free again and again. Whenever there is memory, no more than `left` may be left. Return how often there was.
    fn contend(&self, bytes: u64, rounds: u64, left: u64) -> u64 {
        let mut granted = 0;
        for _ in 0..rounds {
            let mut cells = [Cell::Out(Box::new(0)), Cell::Number(bytes)];
            if self.call("cuMemAlloc_v2", &mut cells) != 0 {
                continue;
            }
            granted += 1;
            let mut info = [Cell::Out(Box::new(0)), Cell::Number(0)];
            assert_eq!(self.call("cuMemGetInfo_v2", &mut info), 0);
            let (Cell::Out(address), Cell::Out(free)) = (&cells[0], &info[0]) else {
                unreachable!("as they were made")
            };
            assert_eq!(**free, left, "another process has memory, too");
            assert_eq!(self.call("cuMemFree_v2", &mut [Cell::Number(**address)]), 0);
        }
        granted
    }

    /// Fork. The child answers with what cuInit and cuMemAlloc say in it, and stays until standard input ends.
    fn fork(&self) {
        // SAFETY: this process has one more thread, the one that waits for the test; the child uses nothing that it could have locked.
        match unsafe { nix::unistd::fork() }.expect("fork") {
            nix::unistd::ForkResult::Parent { .. } => {}
            nix::unistd::ForkResult::Child => {
                let init = self.call("cuInit", &mut [Cell::Number(0)]);
                let allocate = self.call("cuMemAlloc_v2", &mut [Cell::Out(Box::new(0)), Cell::Number(1)]);
                answer(&format!("{} {init} {allocate}", std::process::id()));
                // This thread has locked standard input, so it is opened again.
                let mut input = std::fs::File::open("/proc/self/fd/0").expect("standard input");
                std::io::copy(&mut input, &mut std::io::sink()).expect("the end");
                nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).expect("the end");
            }
        }
    }
}

fn answer(text: &str) {
    let mut out = std::io::stdout().lock();
    // The test harness has begun a line of its own.
    writeln!(out, "\n= {text}")
        .and_then(|()| out.flush())
        .expect("the test reads");
}

/// Other tests start this program again with this test and a variable. Without the variable it checks what they rely on.
/// The process returns what the calls wrote.
#[test]
fn a_process_makes_the_calls_of_a_test() {
    let Some(cuda) = std::env::var_os("WORKER_CUDA") else {
        let mut process = Bed::new().start();
        let number = process.call("cuDeviceGetCount", &[Out]);
        let name = process.call("cuDeviceGetName", &[Words(vec![u64::MAX; 2]), Num(16), Num(0)]);
        let place = process.call("cuDeviceGetByPCIBusId", &[Out, Text("0000:81:00.0")]);
        let [number, name, place] = [number, name, place].map(|answer| (answer.code, answer.words));
        let text = u64::from_le_bytes(*b"GPU\0\xff\xff\xff\xff");
        assert_eq!((number, name, place), ((0, vec![2]), (0, vec![text, u64::MAX]), (0, vec![1])));
        return;
    };
    // SAFETY: the simulated libraries have no initializers.
    let open = |path| unsafe { Library::new(path) }.expect("a library");
    let worker = Worker {
        cuda: open(cuda),
        nvml: std::env::var_os("WORKER_NVML").map(open),
    };
    answer("ready");
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let mut words = line.split(' ');
        let name = words.next().expect("a name");
        let mut cells: Vec<Cell> = words.map(Cell::parse).collect();
        match (name, cells.first()) {
            ("contend", _) => {
                let numbers: Vec<u64> = cells.iter_mut().map(Cell::argument).collect();
                answer(&format!("0 {}", worker.contend(numbers[0], numbers[1], numbers[2])));
            }
            ("storm", Some(Cell::Number(bytes))) => worker.storm(*bytes),
            ("fork", _) => worker.fork(),
            ("open", Some(Cell::Bytes(handle))) => {
                let (code, address) = worker.open(handle);
                answer(&format!("{code} {address}"));
            }
            ("symbol", Some(Cell::Text(name))) => {
                // SAFETY: the address is only told.
                let found = unsafe { worker.cuda.get::<*const ()>(name.as_bytes()) };
                answer(&format!("0 {}", found.map_or(0, |symbol| symbol.addr())));
            }
            _ => {
                let code = worker.call(name, &mut cells);
                let mut text = code.to_string();
                for cell in cells {
                    match cell {
                        Cell::Out(value) => text.push_str(&format!(" {value}")),
                        Cell::Bytes(words) => {
                            let words: Vec<String> = words.iter().map(u64::to_string).collect();
                            text.push_str(&format!(" {}", words.join(" ")));
                        }
                        Cell::Number(_) | Cell::Text(_) => {}
                    }
                }
                answer(&text);
            }
        }
    }
}
