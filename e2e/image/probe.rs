//! The only program in the test images. It is the pause container, the test workload, and a few file tools, and needs no libc at run time.
//!
//! `probe pause` waits for a signal. `probe run [--ignore-term] [PATH...]` prints its environment, mounts, `/dev`, and the paths, and then waits,
//! so that `kubectl logs` shows what the container got. With `--ignore-term` only SIGKILL ends it. `env`, `ls`, `cat`, `stat`, `write`,
//! `sleep`, `exit`, and `burn` are for `kubectl exec`.
//! build.sh builds it with `rustc -C target-feature=+crt-static`; it needs no crates.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::process::exit;
use std::time::{Duration, Instant};

unsafe extern "C" {
    fn signal(number: i32, handler: extern "C" fn(i32)) -> usize;
    fn pause() -> i32;
    fn _exit(code: i32) -> !;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
}

const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;
const SIGCHLD: i32 = 17;
const WNOHANG: i32 = 1;
const IGNORE_TERM: &str = "--ignore-term";

/// Handle SIGTERM: PID 1 of a container ignores it without a handler, and then every pod deletion takes the whole grace period.
extern "C" fn stop(_: i32) {
    // SAFETY: _exit is async-signal-safe.
    unsafe { _exit(0) }
}

extern "C" fn ignore(_: i32) {}

extern "C" fn reap(_: i32) {
    // SAFETY: waitpid is async-signal-safe and accepts a null status.
    while unsafe { waitpid(-1, std::ptr::null_mut(), WNOHANG) } > 0 {}
}

fn wait_for_signal() -> ! {
    loop {
        // SAFETY: pause has no arguments and only returns after a signal handler ran.
        unsafe { pause() };
    }
}

fn number(argument: Option<&String>, default: u64) -> u64 {
    argument.and_then(|a| a.parse().ok()).unwrap_or(default)
}

fn main() -> io::Result<()> {
    // SAFETY: the handlers only make async-signal-safe calls.
    unsafe {
        signal(SIGINT, stop);
        signal(SIGTERM, stop);
    }
    let args: Vec<String> = std::env::args().collect();
    let mut out = io::stdout();
    match args.get(1).map_or("pause", String::as_str) {
        "pause" => {
            // SAFETY: as above.
            unsafe { signal(SIGCHLD, reap) };
            wait_for_signal()
        }
        "run" => {
            if args.iter().any(|argument| argument == IGNORE_TERM) {
                // SAFETY: the handler does nothing.
                unsafe { signal(SIGTERM, ignore) };
            }
            print_environment(&mut out)?;
            print_mounts(&mut out)?;
            show(&mut out, "/dev")?;
            for path in args[2..].iter().filter(|argument| *argument != IGNORE_TERM) {
                show(&mut out, path)?;
            }
            // The last line shows a reader that the log is complete.
            writeln!(out, "probe: running")?;
            out.flush()?;
            wait_for_signal()
        }
        "env" => print_environment(&mut out)?,
        "ls" | "stat" => {
            for path in &args[2..] {
                show(&mut out, path)?;
            }
        }
        "cat" => {
            for path in &args[2..] {
                out.write_all(&fs::read(path)?)?;
            }
        }
        "write" => fs::write(&args[2], args[3..].join(" "))?,
        "sleep" => std::thread::sleep(Duration::from_secs(number(args.get(2), 1))),
        "exit" => exit(number(args.get(2), 0) as i32),
        "burn" => {
            let end = Instant::now() + Duration::from_secs(number(args.get(2), 1));
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        }
        other => {
            eprintln!("probe: unknown command {other:?}; known: pause run env ls stat cat write sleep exit burn");
            exit(64);
        }
    }
    Ok(())
}

fn print_environment(out: &mut impl Write) -> io::Result<()> {
    let mut variables: Vec<_> = std::env::vars().collect();
    variables.sort();
    for (key, value) in variables {
        writeln!(out, "{key}={value}")?;
    }
    Ok(())
}

/// Print `mount PATH` for each mount point.
fn print_mounts(out: &mut impl Write) -> io::Result<()> {
    for line in fs::read_to_string("/proc/self/mounts")?.lines() {
        writeln!(out, "mount {}", line.split(' ').nth(1).unwrap_or_default())?;
    }
    Ok(())
}

/// Return the device numbers as `major:minor`, as `stat` prints them.
fn numbers(meta: &fs::Metadata) -> String {
    format!("{}:{}", (meta.rdev() >> 8) & 0xfff, meta.rdev() & 0xff)
}

/// Print one line per path with its kind, mode, and device numbers. The entries of a directory follow, with the numbers of devices.
fn show(out: &mut impl Write, path: &str) -> io::Result<()> {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) => return writeln!(out, "{path}: {error}"),
    };
    let kind = meta.file_type();
    let name = if kind.is_dir() {
        "dir"
    } else if kind.is_char_device() {
        "char"
    } else if kind.is_block_device() {
        "block"
    } else if kind.is_symlink() {
        "link"
    } else if kind.is_socket() {
        "socket"
    } else {
        "file"
    };
    writeln!(out, "{path}: {name} mode={:o} rdev={} size={}", meta.mode() & 0o7777, numbers(&meta), meta.len())?;
    if kind.is_dir() {
        let mut entries: Vec<_> = fs::read_dir(path)?.filter_map(|e| e.ok()).collect();
        entries.sort_by_key(|entry| entry.file_name());
        for entry in entries {
            let device = entry.metadata().ok().filter(|meta| meta.file_type().is_char_device());
            let numbers = device.map(|meta| format!(" {}", numbers(&meta))).unwrap_or_default();
            writeln!(out, "  {}{numbers}", entry.file_name().to_string_lossy())?;
        }
    }
    Ok(())
}
