//! What the guard does for one request of a program, counted one instruction at a time (ptrace(2)). The numbers do not depend on how busy the machine is.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs;
use std::ops::Range;

use nix::libc;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::binary::replaced;
use crate::sandbox::{Program, Sandbox, driver, guard};

/// What the guard did.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Steps {
    /// Its instructions.
    pub(crate) instructions: u64,
    /// Those of them that lock a line of the cache: each takes as long as 20 others.
    pub(crate) locked: u64,
    /// Its system calls, by number.
    pub(crate) system_calls: BTreeMap<i64, u64>,
    /// Calls of the driver.
    pub(crate) driver_calls: u64,
    /// Calls of other libraries: `dlsym`, and the clock.
    pub(crate) other_calls: u64,
}

/// The addresses at which a process can run the code of a file, and where they begin in the file.
struct Code {
    addresses: Range<u64>,
    offset: u64,
}

impl Code {
    fn of(pid: Pid, file: &str) -> Code {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let mut lines = maps.lines();
        let line = lines.find(|line| line.contains(" r-xp ") && line.ends_with(file)).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let (start, end) = words[0].split_once('-').unwrap();
        Code {
            addresses: hex(start)..hex(end),
            offset: hex(words[2]),
        }
    }

    fn has(&self, address: u64) -> bool {
        self.addresses.contains(&address)
    }
}

/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// The prefix of an instruction that locks. `xchg` with memory locks without it; it may have a prefix for large registers.
const LOCK: u8 = 0xf0;
const XCHG: u8 = 0x87;
/// The instruction that stops a traced process.
const STOP: u8 = 0xcc;

/// A process of which the guard's part can be counted.
pub(crate) struct Counter {
    pid: Pid,
    guard: Code,
    driver: Code,
    /// The addresses of the guard's functions, and what is there.
    entries: Vec<(u64, i64)>,
}

impl Counter {
    pub(crate) fn of(program: &mut Program, sandbox: &Sandbox) -> Counter {
        let addresses: Vec<u64> = replaced()
            .iter()
            .map(|name| program.call(&format!("symbol {name}"))[1])
            .collect();
        let pid = Pid::from_raw(program.pid().cast_signed());
        Counter {
            pid,
            guard: Code::of(pid, sandbox.path("libcuda.so.1").to_str().unwrap()),
            driver: Code::of(pid, driver().to_str().unwrap()),
            entries: addresses.into_iter().map(|address| (address, 0)).collect(),
        }
    }

    /// Send a request, and count what the guard does until the answer is there. Nothing else may send one meanwhile.
    pub(crate) fn count(&mut self, program: &mut Program, request: &str) -> (Steps, [u64; 3]) {
        ptrace::seize(self.pid, ptrace::Options::PTRACE_O_TRACESYSGOOD).unwrap();
        ptrace::interrupt(self.pid).unwrap();
        self.wait();
        for (address, word) in &mut self.entries {
            *word = ptrace::read(self.pid, *address as *mut c_void).unwrap();
        }
        program.send(request);
        let mut steps = Steps::default();
        self.stop_at_entries(true);
        while self.run_to_stop() {
            self.stop_at_entries(false);
            self.step_through_guard(&mut steps);
            self.stop_at_entries(true);
        }
        self.stop_at_entries(false);
        ptrace::detach(self.pid, None).unwrap();
        (steps, program.answer().expect("the program runs"))
    }

    fn wait(&self) -> WaitStatus {
        waitpid(self.pid, None).unwrap()
    }

    fn write(&self, address: u64, word: i64) {
        ptrace::write(self.pid, address as *mut c_void, word).unwrap();
    }

    fn stop_at_entries(&self, stop: bool) {
        for (address, word) in &self.entries {
            self.write(*address, if stop { with_stop(*word) } else { *word });
        }
    }

    /// Run until the process stops at the guard's code: true. Or until it writes its answer.
    fn run_to_stop(&self) -> bool {
        loop {
            ptrace::syscall(self.pid, None).unwrap();
            let status = self.wait();
            let mut registers = ptrace::getregs(self.pid).unwrap();
            match status {
                WaitStatus::Stopped(_, Signal::SIGTRAP) => {
                    registers.rip -= 1;
                    ptrace::setregs(self.pid, registers).unwrap();
                    return true;
                }
                WaitStatus::PtraceSyscall(_) => {
                    if (registers.orig_rax, registers.rdi) == (libc::SYS_write.cast_unsigned(), 1) {
                        return false;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Count until the guard returns to the program, or calls the driver's function in its own place.
    fn step_through_guard(&self, steps: &mut Steps) {
        let text = guard();
        loop {
            let registers = ptrace::getregs(self.pid).unwrap();
            if self.guard.has(registers.rip) {
                let at = usize::try_from(registers.rip - self.guard.addresses.start + self.guard.offset).unwrap();
                steps.instructions += 1;
                if text[at..].starts_with(&SYSCALL) {
                    *steps.system_calls.entry(registers.rax.cast_signed()).or_default() += 1;
                } else if matches!(text[at..], [LOCK, ..] | [XCHG, ..] | [0x40..=0x4f, XCHG, ..]) {
                    steps.locked += 1;
                }
                ptrace::step(self.pid, None).unwrap();
                assert_eq!(self.wait(), WaitStatus::Stopped(self.pid, Signal::SIGTRAP));
                continue;
            }
            let calls_driver = self.driver.has(registers.rip);
            steps.driver_calls += u64::from(calls_driver);
            let back = ptrace::read(self.pid, registers.rsp as *mut c_void).unwrap().cast_unsigned();
            if !self.guard.has(back) {
                return;
            }
            steps.other_calls += u64::from(!calls_driver);
            let word = ptrace::read(self.pid, back as *mut c_void).unwrap();
            self.write(back, with_stop(word));
            assert!(self.run_to_stop(), "an answer in the middle of a call");
            self.write(back, word);
        }
    }
}

fn with_stop(word: i64) -> i64 {
    let mut bytes = word.to_le_bytes();
    bytes[0] = STOP;
    i64::from_le_bytes(bytes)
}
