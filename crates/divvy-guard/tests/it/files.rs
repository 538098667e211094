//! Files that are not as the agent made them: no program may end by them, and none may get more than the share by what programs of its pod can change.

use std::fs;
use std::os::unix::fs::symlink;

use divvy_share::usage;

use crate::sandbox::{CONTEXT, MIB, OUT_OF_MEMORY, Sandbox, limits};

const SHARE: u64 = 1024 * MIB;

/// Whether a program gets more than the share, and whether the driver's total is shown.
fn passes(sandbox: &Sandbox) -> (bool, bool) {
    let mut program = sandbox.ready();
    let gets = program.code(&format!("alloc {}", 2 * SHARE)) == 0;
    (gets, program.call("total 0")[1] == sandbox.memory())
}

/// A file of usage of a version of the layout.
fn with_version(version: u8) -> [u8; usage::SIZE] {
    let mut file = usage::file();
    file[8] = version;
    file
}

/// The limits are readable, so only a program in the pod can have done this. Nothing is remembered: as soon as the file is whole, programs get memory, and are
/// charged.
#[test]
fn usage_that_somebody_broke_refuses_memory_until_it_is_whole() {
    type Break = fn(&Sandbox);
    let cases: [(&str, Break); 8] = [
        ("truncated", |sandbox| {
            fs::write(sandbox.file(0, "usage"), &usage::file()[..4096]).unwrap()
        }),
        ("empty", |sandbox| fs::write(sandbox.file(0, "usage"), []).unwrap()),
        ("all ones", |sandbox| {
            fs::write(sandbox.file(0, "usage"), [0xff; usage::SIZE]).unwrap()
        }),
        ("a later version", |sandbox| {
            fs::write(sandbox.file(0, "usage"), with_version(9)).unwrap()
        }),
        ("no version", |sandbox| {
            fs::write(sandbox.file(0, "usage"), with_version(0)).unwrap()
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
        let sandbox = Sandbox::with_share(8192 * MIB, SHARE);
        break_it(&sandbox);
        let mut program = sandbox.start();
        assert_eq!((program.code("init"), program.code("retain 0")), (0, OUT_OF_MEMORY), "{name}");
        let mapped = program.mapped("/usage");
        assert_eq!(
            (program.code("retain 0"), program.mapped("/usage")),
            (OUT_OF_MEMORY, mapped),
            "{name}"
        );
        // The limits are known all the same.
        assert_eq!(program.call("total 0")[1], SHARE, "{name}");
        sandbox.replace_usage();
        assert_eq!(program.code("retain 0"), 0, "{name}");
        assert_eq!(program.code(&format!("alloc {SHARE}")), OUT_OF_MEMORY, "{name}");
        assert_eq!(sandbox.charged(&program), CONTEXT, "{name}");
    }
}

/// UID 0 of a container may take a lease on either file, also on the one that it can only read. Each attempt to open the file breaks it.
#[test]
fn a_lease_on_a_file_of_the_share_frees_no_program() {
    for file in ["usage", "limits"] {
        let sandbox = Sandbox::with_share(8192 * MIB, SHARE);
        let mut holder = sandbox.start();
        assert_eq!(holder.code(&format!("lease {}", sandbox.file(0, file).display())), 0);
        let mut program = sandbox.start();
        assert_eq!((program.code("init"), program.code("retain 0")), (0, OUT_OF_MEMORY), "{file}");
        holder.kill();
        assert_eq!(program.code("retain 0"), 0, "{file}");
        assert_eq!(program.code(&format!("alloc {SHARE}")), OUT_OF_MEMORY, "{file}");
    }
}

/// Another process of the pod has written the numbers.
#[test]
fn impossible_numbers_only_shrink_the_share() {
    let sandbox = Sandbox::with_share(8192 * MIB, SHARE);
    let mut first = sandbox.ready();
    // Somebody in the pod writes into the slot of a living process.
    let mut file = fs::read(sandbox.file(0, "usage")).unwrap();
    file[64..80].fill(0xff);
    let path = sandbox.file(0, "usage");
    std::os::unix::fs::FileExt::write_all_at(&fs::File::options().write(true).open(path).unwrap(), &file, 0).unwrap();
    let mut second = sandbox.start();
    assert_eq!((second.code("init"), second.code("retain 0")), (0, OUT_OF_MEMORY));
    assert_eq!(first.code("alloc 1048576"), OUT_OF_MEMORY);
    assert_eq!(first.call("info"), [0, 0, SHARE]);
}

#[test]
fn limits_that_cannot_be_read_let_everything_pass() {
    type Break = fn(&Sandbox);
    let cases: [(&str, Break); 3] = [
        ("a later version", |sandbox| {
            let mut file = fs::read(sandbox.file(0, "limits")).unwrap();
            file[8] = 2;
            fs::write(sandbox.file(0, "limits"), file).unwrap();
        }),
        ("another file", |sandbox| {
            fs::write(sandbox.file(0, "limits"), [0xff; 256]).unwrap()
        }),
        ("no shares on this machine", |sandbox| {
            let library = fs::read(sandbox.path("libcuda.so.1")).unwrap();
            let root = sandbox.path("").to_str().unwrap().trim_end_matches('/').to_owned();
            // The needed library is still found; the shares are not.
            let mut changed = library.clone();
            let end = changed.windows(root.len()).rposition(|part| part == root.as_bytes()).unwrap();
            let first = changed.windows(root.len()).position(|part| part == root.as_bytes()).unwrap();
            for start in [first, end] {
                if &library[start + root.len()..start + root.len() + 9] != b"/libcuda." {
                    changed[start + root.len() - 1] ^= 1;
                }
            }
            fs::write(sandbox.path("libcuda.so.1"), changed).unwrap();
        }),
    ];
    for (name, break_it) in cases {
        let sandbox = Sandbox::with_share(8192 * MIB, SHARE);
        break_it(&sandbox);
        assert_eq!(passes(&sandbox), (true, true), "{name}");
        assert_eq!(sandbox.slots(), [], "{name}: the agent sees a process without a slot");
    }
}

#[test]
fn an_upgrade_of_the_agent_lets_running_programs_pass() {
    let sandbox = Sandbox::with_share(8192 * MIB, SHARE);
    let mut program = sandbox.ready();
    let memory = program.alloc(100 * MIB);
    assert_eq!(program.code(&format!("alloc {SHARE}")), OUT_OF_MEMORY);
    let file = fs::File::options().write(true).open(sandbox.file(0, "limits")).unwrap();
    for version in [8, 136] {
        std::os::unix::fs::FileExt::write_all_at(&file, &[9], version).unwrap();
    }
    program.alloc(2 * SHARE);
    assert_eq!(program.code(&format!("free {memory}")), 0);
    assert_eq!(sandbox.charged(&program), CONTEXT);
}

/// The words of a copy may arrive in any order: here what shows that it is complete arrives first.
#[test]
fn limits_apply_at_once_when_they_are_complete() {
    let sandbox = Sandbox::with_share(8192 * MIB, SHARE);
    let mut program = sandbox.ready();
    assert_eq!(program.call("info"), [0, SHARE - CONTEXT, SHARE]);
    for (generation, share) in [(2, 2 * SHARE), (3, SHARE / 2), (4, 3 * SHARE)] {
        let before = program.call("info");
        let file = fs::File::options().write(true).open(sandbox.file(0, "limits")).unwrap();
        let (offset, copy) = limits(share).copy(generation);
        let write = |range: std::ops::Range<usize>| {
            std::os::unix::fs::FileExt::write_all_at(&file, &copy[range.clone()], offset + range.start as u64).unwrap();
        };
        write(120..128);
        assert_eq!(program.call("info"), before);
        write(0..120);
        assert_eq!(program.call("info"), [0, share - CONTEXT, share]);
    }
}

#[test]
fn half_written_limits_leave_those_before() {
    let sandbox = Sandbox::with_share(8192 * MIB, SHARE);
    let mut program = sandbox.ready();
    let file = fs::File::options().write(true).open(sandbox.file(0, "limits")).unwrap();
    // Neither copy is whole.
    for bytes in [24, 152] {
        std::os::unix::fs::FileExt::write_all_at(&file, &[0xff; 8], bytes).unwrap();
    }
    assert_eq!(program.call("info"), [0, SHARE - CONTEXT, SHARE]);
    assert_eq!(program.code(&format!("alloc {SHARE}")), OUT_OF_MEMORY);
}
