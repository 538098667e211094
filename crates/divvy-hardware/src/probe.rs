//! The probe: the only process that calls the drivers. It answers requests over a Unix socket.
//!
//! The probe must be small, and it must end when the driver hangs. Therefore it uses plain threads and no async runtime:
//!
//! | thread | task |
//! |---|---|
//! | owner | makes all driver calls, one after the other |
//! | nvml-events | waits for XIDs |
//! | forward, for each vendor | passes on faults to the clients |
//! | two for each client | read requests, write answers and events |
//! | mount, for each request about the files of a share | mounts, and looks for it on the machine |
//! | watchdog | ends the process when a driver call takes too long |
//! | signals | on SIGTERM, SIGINT, and SIGQUIT, removes the socket and exits with status 0 |
//! | main | accepts clients |
//!
//! Exit status: 0 for a requested end, 1 for a failure, 2 for a wrong command line, 70 if a driver call hung.

mod driver_files;
mod drivers;
mod follow;
mod hub;
mod limit;
mod lines;
mod options;
mod owner;
mod peer;
mod pods;
mod server;
mod share_files;

use std::fmt;
use std::io::{Read, Write};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use divvy_model::Vendor;

use crate::amd::AmdBackend;
use crate::backend::{Backend, DriverCalls};
use crate::intel::IntelBackend;
use crate::nvidia::{self, Nvidia, Reception};
use crate::{Error, Failure, Snapshot};

pub use options::{ProbeCommand, ProbeOptions, ProbeUsageError};
pub use peer::peer_uid;

/// The exit status when a driver call hung.
pub const EXIT_HUNG: i32 = 70;

/// Run the command that the arguments specify (without the program's name), and return the exit status.
pub fn main(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> i32 {
    match ProbeCommand::parse(arguments) {
        Ok(ProbeCommand::Help) => print(options::HELP),
        Ok(ProbeCommand::Version) => print(&format!("divvy-probe {}\n", env!("CARGO_PKG_VERSION"))),
        Ok(ProbeCommand::Once(options)) => once(&options, |calls| {
            drivers::Drivers::new(vendors(&options, calls), drivers::ReopenPace::default(), None).examine()
        }),
        Ok(ProbeCommand::Watch(options)) => {
            let calls = DriverCalls::new(options.watchdog);
            let ended = watch(calls.clone(), options.watchdog, || {})
                .map_err(follow::FollowError::from)
                .and_then(|()| follow::run(vendors(&options, &calls)));
            match ended {
                Ok(()) => 0,
                Err(error) => {
                    log(format_args!("{error}"));
                    1
                }
            }
        }
        Ok(ProbeCommand::Cuda(options)) => once(&options, |calls| {
            nvidia::cuda::snapshot(&nvidia_options(&options), calls).map(Snapshot::printable)
        }),
        Ok(ProbeCommand::Listen(options)) => match listen(&options) {
            Ok(never) => match never {},
            Err(error) => {
                log(format_args!("{error}"));
                1
            }
        },
        Err(error) => {
            log(format_args!("{error}"));
            2
        }
    }
}

fn print(text: &str) -> i32 {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    i32::from(written.is_err())
}

/// Write a line to the probe's log, which is standard error. The line is written as a whole, because an agent that starts a probe writes its own
/// log to the same file. A write failure is ignored, because it cannot be reported anywhere.
fn log(text: fmt::Arguments<'_>) {
    let line = format!("divvy-probe: {text}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Run `--once`: print a snapshot on standard output.
fn once(options: &ProbeOptions, read: impl FnOnce(&DriverCalls) -> Result<Snapshot, Failure>) -> i32 {
    let calls = DriverCalls::new(options.watchdog);
    if let Err(error) = watch(calls.clone(), options.watchdog, || {}) {
        log(format_args!("{error}"));
        return 1;
    }
    match read(&calls).map(|snapshot| serde_json::to_string_pretty(&snapshot)) {
        Ok(Ok(text)) => print(&format!("{text}\n")),
        Ok(Err(error)) => {
            log(format_args!("the snapshot cannot be written as JSON: {error}"));
            1
        }
        Err(failure) => {
            log(format_args!("{failure}"));
            1
        }
    }
}

/// Return how to open the driver of each vendor.
fn vendors(options: &ProbeOptions, calls: &DriverCalls) -> Vec<(Vendor, drivers::Open)> {
    let open = |vendor| -> drivers::Open {
        let calls = calls.clone();
        match vendor {
            Vendor::Nvidia => {
                let (options, reception) = (nvidia_options(options), Reception::default());
                Box::new(move || Ok(Box::new(Nvidia::open(&options, &calls, reception.clone())?) as Box<dyn Backend>))
            }
            Vendor::Amd => {
                let sys_root = options.sys_root.clone();
                Box::new(move || Ok(Box::new(AmdBackend::open(&sys_root, &calls)?) as Box<dyn Backend>))
            }
            Vendor::Intel => {
                let sys_root = options.sys_root.clone();
                Box::new(move || Ok(Box::new(IntelBackend::open(&sys_root, &calls)?) as Box<dyn Backend>))
            }
        }
    };
    Vendor::ALL.map(|vendor| (vendor, open(vendor))).into()
}

fn nvidia_options(options: &ProbeOptions) -> nvidia::NvidiaOptions {
    nvidia::NvidiaOptions {
        library: options.nvml_library.clone(),
        driver_root: options.driver_root.clone(),
        proc_root: options.sys_root.join("proc"),
    }
}

/// Run `--listen`: serve until the process ends.
fn listen(options: &ProbeOptions) -> Result<std::convert::Infallible, Error> {
    let calls = DriverCalls::new(options.watchdog);
    // Install the signal handler first, so that every later end removes the socket.
    let signals = Signals::new([SIGTERM, SIGINT, SIGQUIT])
        .map_err(|source| Error::io("cannot handle signals of", "divvy-probe", source))?;
    let (listener, socket) = server::bind(&options.listen)?;
    let socket = Arc::new(socket);

    spawn("signals", {
        let (mut signals, socket) = (signals, socket.clone());
        move || {
            if signals.forever().next().is_some() {
                socket.end(0);
            }
        }
    })?;
    if options.exit_with_stdin {
        let socket = socket.clone();
        spawn("stdin", move || {
            // The parent never writes here. End of file means that the parent has ended, even by kill -9.
            let mut ignored = [0; 64];
            while matches!(std::io::stdin().lock().read(&mut ignored), Ok(1..)) {}
            socket.end(0);
        })?;
    }
    watch(calls.clone(), options.watchdog, {
        let socket = socket.clone();
        move || socket.remove()
    })?;

    let hub = Arc::new(hub::ProbeHub::new());
    let jobs = owner::start(
        hub.clone(),
        drivers::ReopenPace::default(),
        options.sys_root.clone(),
        vendors(options, &calls),
    )?;
    // The parent of a child chose the socket. For a command that starts a probe, the line would be noise.
    if !options.exit_with_stdin {
        log(format_args!(
            "{} listens at {}",
            env!("CARGO_PKG_VERSION"),
            options.listen.display()
        ));
    }
    let driver = Arc::new(driver_files::DriverLocation {
        sys_root: options.sys_root.clone(),
        nvidia: nvidia_options(options),
    });
    let shares = Arc::new(share_files::ShareFiles {
        directory: options.share_files.clone(),
        machine: (!options.exit_with_stdin).then(|| options.sys_root.clone()),
    });
    let answers = server::RequestAnswerer {
        hub,
        jobs,
        driver,
        shares,
    };
    server::serve(&listener, &answers)
}

/// Start a thread with a small stack. Do not run driver calls on it.
fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let builder = thread::Builder::new().name(name.to_owned()).stack_size(256 * 1024);
    let spawned = builder.spawn(work).map(drop);
    spawned.map_err(|source| Error::io("cannot start the thread", name, source))
}

/// Start the watchdog. A hanging call cannot be cancelled, so the watchdog ends the process, and its parent or supervisor restarts it.
fn watch(calls: DriverCalls, limit: Duration, before_the_end: impl Fn() + Send + 'static) -> Result<(), Error> {
    let pause = (limit / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
    spawn("watchdog", move || {
        loop {
            thread::sleep(pause);
            if let Some((what, lasted)) = calls.overdue(Instant::now()) {
                before_the_end();
                let seconds = lasted.as_secs_f64();
                log(format_args!(
                    "{what} has not returned for {seconds:.1} s; the driver hangs, so this process ends (exit status {EXIT_HUNG})"
                ));
                // Do not use exit(3): it runs the driver library's destructors, which may hang as well.
                low_level::exit(EXIT_HUNG);
            }
        }
    })
}
