//! The ways in which programs load CUDA's driver library.

use crate::container::ProgramRun;
use crate::driver::LIBRARIES;
use crate::outcome::ExpectedOutcome::{self, AsDriver, Held};
use crate::roots::RootFileSystem;

/// A way of loading.
pub(crate) struct Way {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&RootFileSystem) -> ProgramRun,
    /// What is expected in a root file system with glibc. With another C library neither the driver's library nor the guard can be loaded.
    pub(crate) expected: ExpectedOutcome,
    /// What the program must find with the driver alone.
    pub(crate) needs: &'static [(&'static str, &'static str)],
    pub(crate) needs_glibc: bool,
}

const GPU: &str = "8589934592";
const ALL: &[(&str, &str)] = &[
    ("memory:cuda-total", GPU),
    ("memory:cuda-info", GPU),
    ("memory:nvml-total", GPU),
    ("within-share:256MiB", "0"),
    ("above-share:2GiB", "0"),
];
/// The program must be setuid for the loader, and jemalloc must be loaded.
const SETUID: &[(&str, &str)] = &[
    ("secure", "1"),
    ("memory:cuda-total", GPU),
    ("memory:nvml-total", GPU),
    ("above-share:2GiB", "0"),
];

const JEMALLOC: &[(&str, &str)] = &[
    ("jemalloc", "1"),
    ("memory:cuda-total", GPU),
    ("memory:nvml-total", GPU),
    ("above-share:2GiB", "0"),
];

const fn way(name: &'static str, run: fn(&RootFileSystem) -> ProgramRun) -> Way {
    Way {
        name,
        run,
        expected: Held,
        needs: ALL,
        needs_glibc: false,
    }
}

const fn glibc(name: &'static str, run: fn(&RootFileSystem) -> ProgramRun) -> Way {
    Way {
        needs_glibc: true,
        ..way(name, run)
    }
}

/// All ways.
pub(crate) const WAYS: [Way; 15] = [
    way("dlopen", |root| probe(root, &["dlopen"])),
    way("plain-name", |root| probe(root, &["plain-name"])),
    way("proc-address", |root| probe(root, &["proc-address"])),
    glibc("deepbind", |root| probe(root, &["deepbind"])),
    glibc("dlmopen", |root| probe(root, &["dlmopen"])),
    way("linked", |root| start(root, "/probe/linked", &[])),
    glibc("static", |root| start(root, "/probe/static", &["dlopen"])),
    Way {
        needs: SETUID,
        ..glibc("setuid", |root| probe(root, &["as-nobody", "/probe/setuid"]))
    },
    Way {
        needs: JEMALLOC,
        ..glibc("jemalloc", |root| {
            let mut run = probe(root, &["dlopen"]);
            run.environment.push(("LD_PRELOAD", root.jemalloc));
            run
        })
    },
    // It comes after the start of the container, and knows of nothing that was mounted.
    glibc("ldconfig", |root| {
        start(root, "/bin/sh", &["-c", "ldconfig && exec /probe/probe dlopen"])
    }),
    glibc("ctypes", |root| start(root, "/usr/bin/python3", &["/probe/probe.py"])),
    glibc("java", |root| start(root, "/usr/bin/java", &["-cp", "/probe", "Probe"])),
    // A program with its own copy of the driver's library avoids the guard: the agent reports it.
    Way {
        expected: AsDriver,
        ..glibc("private-copy", private_copy)
    },
    // With --guard both, the guard is in its place.
    glibc("private-copy-both", |root| {
        let mut run = private_copy(root);
        run.with_copies = true;
        run
    }),
    Way {
        expected: AsDriver,
        needs: &[("libraries", "0")],
        ..way("no-cuda", |root| {
            let count = "echo \"libraries $(grep -c -e libcuda -e divvy -e nvidia /proc/self/maps)\"";
            start(root, "/bin/sh", &["-c", count])
        })
    },
];

fn private_copy(root: &RootFileSystem) -> ProgramRun {
    let mut run = probe(root, &["dlopen"]);
    run.copy = Some("/opt/private");
    run.environment.push(("LD_LIBRARY_PATH", "/opt/private"));
    run
}

fn probe(root: &RootFileSystem, arguments: &[&str]) -> ProgramRun {
    start(root, "/probe/probe", arguments)
}

fn start(root: &RootFileSystem, program: &str, arguments: &[&str]) -> ProgramRun {
    let mut run = ProgramRun::new(program, arguments);
    // musl's loader has no cache, in which the container runtime could put the driver's directory. So the image's author must name it.
    if !root.has_glibc() {
        run.environment.push(("LD_LIBRARY_PATH", LIBRARIES));
    }
    run
}
