//! Damaged files: they must not end a program, and the library then returns the driver's own answers.

use std::fs;
use std::os::unix::fs::symlink;

use divvy_share::usage;

use crate::sandbox::{FOREIGN, MIB, Sandbox, Slot};

const GPU: u64 = 8192 * MIB;
const SHARE: u64 = 1024 * MIB;

const CALLS: [&str; 8] = [
    "memory 0",
    "memory2 0 33554472",
    "list nvmlDeviceGetComputeRunningProcesses 0 9 16",
    "list nvmlDeviceGetComputeRunningProcesses_v2 0 9 24",
    "list nvmlDeviceGetComputeRunningProcesses_v3 0 9 24",
    "list nvmlDeviceGetComputeRunningProcesses_v3 0 0 24 null",
    "list nvmlDeviceGetGraphicsRunningProcesses_v3 0 9 24",
    "list nvmlDeviceGetMPSComputeRunningProcesses_v3 0 9 24",
];

/// Whether each answer is the driver's.
fn are_the_drivers(sandbox: &Sandbox, calls: &[&str]) -> bool {
    let (mut program, mut plain) = (sandbox.watcher(), sandbox.plain());
    calls.iter().all(|call| program.call(call) == plain.call(call))
}

type Break = fn(&Sandbox);

#[test]
fn without_limits_that_can_be_read_the_answers_are_the_drivers() {
    let cases: [(&str, Break); 7] = [
        ("no directory of the GPU", |sandbox| {
            fs::remove_dir_all(sandbox.file(0, "")).unwrap()
        }),
        ("no limits", |sandbox| fs::remove_file(sandbox.file(0, "limits")).unwrap()),
        ("a later version", |sandbox| {
            let mut file = fs::read(sandbox.file(0, "limits")).unwrap();
            file[8] = 2;
            fs::write(sandbox.file(0, "limits"), file).unwrap();
        }),
        ("another file", |sandbox| {
            fs::write(sandbox.file(0, "limits"), [0xff; 256]).unwrap()
        }),
        ("truncated", |sandbox| fs::write(sandbox.file(0, "limits"), [0; 128]).unwrap()),
        ("a link", |sandbox| {
            fs::rename(sandbox.file(0, "limits"), sandbox.path("elsewhere")).unwrap();
            symlink(sandbox.path("elsewhere"), sandbox.file(0, "limits")).unwrap();
        }),
        ("neither copy whole", |sandbox| {
            let mut file = fs::read(sandbox.file(0, "limits")).unwrap();
            (file[24], file[152]) = (0xff, 0xff);
            fs::write(sandbox.file(0, "limits"), file).unwrap();
        }),
    ];
    for (name, break_it) in cases {
        let sandbox = Sandbox::with_share(GPU, SHARE);
        let _owner = sandbox.occupy(0, Slot::of(7, MIB));
        assert!(!are_the_drivers(&sandbox, &CALLS[..1]), "{name}: before");
        break_it(&sandbox);
        assert!(are_the_drivers(&sandbox, &CALLS), "{name}");
    }
}

#[test]
fn a_gpu_of_which_the_pod_has_no_share_is_the_drivers() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let others = CALLS.map(|call| call.replacen(" 0 ", " 1 ", 1).replacen("memory 0", "memory 1", 1));
    assert!(are_the_drivers(&sandbox, &others.each_ref().map(String::as_str)));
    assert_eq!(sandbox.watcher().call("memory 1"), [0, GPU, GPU - FOREIGN, FOREIGN]);
}

/// The limits are root's and still known: the total is the share. CUDA shows the same.
#[test]
fn broken_usage_leaves_share_and_driver_processes() {
    let cases: [(&str, Break); 7] = [
        ("truncated", |sandbox| {
            fs::write(sandbox.file(0, "usage"), &usage::file()[..4096]).unwrap()
        }),
        ("empty", |sandbox| fs::write(sandbox.file(0, "usage"), []).unwrap()),
        ("too long", |sandbox| {
            fs::write(sandbox.file(0, "usage"), [&usage::file()[..], &[0]].concat()).unwrap()
        }),
        ("all ones", |sandbox| {
            fs::write(sandbox.file(0, "usage"), [0xff; usage::SIZE]).unwrap()
        }),
        ("removed", |sandbox| fs::remove_file(sandbox.file(0, "usage")).unwrap()),
        ("a link to a good file", |sandbox| {
            fs::rename(sandbox.file(0, "usage"), sandbox.path("elsewhere")).unwrap();
            symlink(sandbox.path("elsewhere"), sandbox.file(0, "usage")).unwrap();
        }),
        ("a directory", |sandbox| {
            fs::remove_file(sandbox.file(0, "usage")).unwrap();
            fs::create_dir(sandbox.file(0, "usage")).unwrap();
        }),
    ];
    for (name, break_it) in cases {
        let sandbox = Sandbox::with_share(GPU, SHARE);
        let _owner = sandbox.occupy(0, Slot::of(7, MIB));
        break_it(&sandbox);
        assert_eq!(sandbox.watcher().call("memory 0"), [0, SHARE, SHARE, 0], "{name}");
        assert!(are_the_drivers(&sandbox, &CALLS[2..]), "{name}");
    }
}

#[test]
fn a_pipe_in_place_of_a_file_does_not_stop_the_program() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    for file in ["usage", "limits"] {
        let path = sandbox.file(0, file);
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(sandbox.watcher().call("memory 0")[0], 0, "{file}");
    }
}
