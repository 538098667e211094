//! The processes that programs see.

use proptest::prelude::*;

use crate::sandbox::{CONTEXT, INSUFFICIENT_SIZE, MIB, Program, Sandbox, Slot, root, root_at};

const GPU: u64 = 8192 * MIB;
const SHARE: u64 = 4096 * MIB;
/// The functions, with the size of an entry.
const LISTS: [(&str, usize); 3] = [("", 16), ("_v2", 24), ("_v3", 24)];
const COMPUTE: &str = "nvmlDeviceGetComputeRunningProcesses";
const INVALID_ARGUMENT: u64 = 2;

fn compute(program: &mut Program) -> Vec<(u64, u64)> {
    program.list(&format!("{COMPUTE}_v3"), "0", 24)
}

#[test]
fn the_processes_of_the_container_are_listed_and_no_others() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let mut watcher = sandbox.watcher();
    let users = [sandbox.user(96 * MIB), sandbox.user(200 * MIB)];
    let mut expected = vec![(users[0].pid(), CONTEXT + 96 * MIB), (users[1].pid(), CONTEXT + 200 * MIB)];
    expected.sort_unstable();
    for (suffix, size) in LISTS {
        assert_eq!(watcher.list(&format!("{COMPUTE}{suffix}"), "0", size), expected, "{suffix}");
        for other in ["Graphics", "MPSCompute"] {
            assert_eq!(
                watcher.list(&format!("nvmlDeviceGet{other}RunningProcesses{suffix}"), "0", size),
                []
            );
        }
    }
    // The driver lists the process of the other pod, too.
    assert_eq!(sandbox.plain().list(&format!("{COMPUTE}_v3"), "0", 24).len(), 3);
}

#[test]
fn a_process_that_has_ended_is_not_listed() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let mut watcher = sandbox.watcher();
    let (first, second) = (sandbox.user(MIB), sandbox.user(MIB));
    assert_eq!(compute(&mut watcher).len(), 2);
    first.kill();
    assert_eq!(compute(&mut watcher), [(second.pid(), CONTEXT + 2 * MIB)]);
}

/// `shareProcessNamespace`: the PIDs of the other container are PIDs here.
#[test]
fn processes_in_the_same_pid_namespace_are_listed() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let mut user = sandbox.user(98 * MIB);
    let mut other = sandbox.start();
    assert_eq!(other.code(&format!("chroot {}", sandbox.path("ledger").display())), 0);
    let slot = Slot {
        root: root_at(&format!("/proc/{}/root/", other.pid())),
        ..Slot::of(other.pid(), 50 * MIB)
    };
    assert!(slot.root != root() && slot.root != 0);
    let _other = sandbox.occupy(1, slot);
    // A process of a third container, which has the same PID there.
    let _third = sandbox.occupy(
        2,
        Slot {
            root: slot.root + 1,
            ..Slot::of(other.pid(), 30 * MIB)
        },
    );
    assert_eq!(
        compute(&mut user),
        [(user.pid(), CONTEXT + 98 * MIB), (other.pid(), 50 * MIB)]
    );
}

/// The memory of processes in other containers still counts as used.
#[test]
fn other_containers_processes_are_not_listed() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let mut user = sandbox.user(98 * MIB);
    // The same process id in another container.
    let _other = sandbox.occupy(
        1,
        Slot {
            root: root() + 1,
            ..Slot::of(user.pid(), 50 * MIB)
        },
    );
    // One that has not said yet where it is.
    let _starting = sandbox.occupy(
        2,
        Slot {
            root: 0,
            ..Slot::of(7, 30 * MIB)
        },
    );
    let own = (user.pid(), CONTEXT + 98 * MIB);
    assert_eq!(compute(&mut user), [own]);
    assert_eq!(user.call("memory 0")[3], own.1 + 80 * MIB);
}

#[test]
fn a_process_that_has_no_memory_yet_is_not_listed() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let mut watcher = sandbox.watcher();
    let slot = Slot {
        pending: 10 * MIB,
        ..Slot::of(7, 0)
    };
    let _owners = [sandbox.occupy(0, slot), sandbox.occupy(1, Slot::of(8, MIB))];
    assert_eq!(compute(&mut watcher), [(8, MIB)]);
}

#[test]
fn a_process_with_two_slots_is_listed_once() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let mut watcher = sandbox.watcher();
    let _owners = [(7, 10), (8, 20), (7, 30)].map(|(pid, used)| sandbox.occupy(used / 10, Slot::of(pid, used * MIB)));
    assert_eq!(compute(&mut watcher), [(7, 40 * MIB), (8, 20 * MIB)]);
}

#[test]
fn the_array_and_its_count_are_used_as_nvidia_says() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let mut program = sandbox.watcher();
    let _owners = [1, 2].map(|index| sandbox.occupy(index, Slot::of(index, MIB)));
    let untouched = u64::from(0xaaaa_aaaa_u32);
    for (suffix, size) in LISTS {
        let call = format!("list {COMPUTE}{suffix} 0");
        // Ask for the count.
        assert_eq!(program.call(&format!("{call} 0 {size} null")), [INSUFFICIENT_SIZE, 2]);
        assert_eq!(program.call(&format!("{call} 0 {size}")), [INSUFFICIENT_SIZE, 2]);
        let small = program.call(&format!("{call} 1 {size}"));
        assert_eq!(small[..2], [INSUFFICIENT_SIZE, 2]);
        assert!(
            small[2..].iter().all(|word| *word == untouched),
            "{suffix}: nothing is written"
        );
        assert_eq!(program.code(&format!("{call} 2 {size} null")), INVALID_ARGUMENT);
        let exact = program.call(&format!("{call} 2 {size}"));
        assert_eq!((&exact[..3], exact[2 + size / 4]), (&[0, 2, 1][..], 2), "{suffix}");
        let more = program.call(&format!("{call} 3 {size}"));
        assert_eq!(more[..2], [0, 2]);
        assert!(more[2 + size / 2..].iter().all(|word| *word == untouched), "{suffix}");
        // Without processes, the answer is a success at once.
        let none = format!("list nvmlDeviceGetGraphicsRunningProcesses{suffix} 0 0 {size} null");
        assert_eq!(program.call(&none), [0, 0]);
    }
}

#[test]
fn errors_are_the_drivers() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let _owner = sandbox.occupy(0, Slot::of(7, MIB));
    let mut program = sandbox.start();
    let mut plain = sandbox.plain();
    assert_eq!(plain.code("shutdown"), 0);
    let mut calls = Vec::new();
    for which in ["Compute", "Graphics", "MPSCompute"] {
        for (suffix, size) in LISTS {
            let function = format!("nvmlDeviceGet{which}RunningProcesses{suffix}");
            calls.extend(["0", "null"].map(|device| (format!("null {function} {device}"), true)));
            calls.push((format!("list {function} null 3 {size}"), true));
            // After nvmlInit, this one is answered from the slots.
            calls.push((format!("list {function} 0 9 {size}"), false));
        }
    }
    for phase in ["init", "shutdown", "init"] {
        for (call, always) in &calls {
            let (ours, theirs) = (program.call(call), plain.call(call));
            assert_eq!(ours[0], theirs[0], "{phase}: {call}");
            assert!(!always || ours[0] != 0, "{call}");
        }
        assert_eq!((program.code(phase), plain.code(phase)), (0, 0));
    }
}

/// Drivers from 535.43 to 535.86 have a larger structure in `…_v3`.
#[test]
fn the_entries_have_the_size_that_the_driver_gives_them() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let _owners = [1, 2].map(|index| sandbox.occupy(index, Slot::of(index, index * MIB)));
    let expected = [(1, MIB), (2, 2 * MIB)];
    for (driver, third) in [("535.54.03", 32), ("535.104.05", 24), ("580.159.03", 24)] {
        sandbox.describe(driver);
        let mut program = sandbox.watcher();
        for (suffix, size) in [("", 16), ("_v2", 24), ("_v3", third)] {
            assert_eq!(
                program.list(&format!("{COMPUTE}{suffix}"), "0", size),
                expected,
                "{driver} {suffix}"
            );
        }
    }
}

#[test]
fn a_listed_process_has_the_name_that_the_driver_reads() {
    if divvy_skip::emulated("the name of a process is the emulator's") {
        return;
    }
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let user = sandbox.user(MIB);
    let mut watcher = sandbox.watcher();
    let listed = compute(&mut watcher)[0].0;
    assert_eq!(listed, user.pid());
    let name = watcher.call(&format!("name {listed}"));
    let text: Vec<u8> = name[1..].iter().map(|byte| *byte as u8).collect();
    assert_eq!(name[0], 0);
    assert!(String::from_utf8(text).unwrap().ends_with("/examples/viewer"));
}

#[test]
fn a_part_of_a_gpu_is_the_drivers() {
    let sandbox = Sandbox::new(GPU);
    sandbox.give(2, &crate::sandbox::limits(SHARE));
    let (mut program, mut plain) = (sandbox.watcher(), sandbox.plain());
    assert_eq!(program.call("memory 2")[1], SHARE, "the whole has a share");
    for call in [
        "memory mig0",
        "memory2 mig0 33554472",
        "list nvmlDeviceGetComputeRunningProcesses_v3 mig0 9 24",
        "list nvmlDeviceGetComputeRunningProcesses mig0 9 16",
    ] {
        let (mut with, mut without) = (program.call(call), plain.call(call));
        if call.starts_with("list") {
            // The padding after the PID of the only process can be anything.
            (with[3], without[3]) = (0, 0);
        }
        assert_eq!(with, without, "{call}");
    }
}

/// A word as a hostile process may write it.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0..5_u64,
        Just(u64::MAX),
        Just(root()),
        (0..64_u32).prop_map(|bit| 1 << bit)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 100, ..ProptestConfig::default() })]

    #[test]
    fn whatever_processes_write_the_answers_are_well_formed(
        slots in prop::collection::vec((0..256_u64, word(), word(), word(), word()), 0..40), bound in word(),
    ) {
        let sandbox = Sandbox::with_share(GPU, SHARE);
        let mut owners = std::collections::BTreeMap::new();
        for (index, used, pending, pid, root) in slots {
            owners.entry(index).or_insert_with(|| sandbox.occupy(index, Slot { used, pending, pid, root }));
        }
        let file = std::fs::File::options().write(true).open(sandbox.file(0, "usage")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &bound.to_ne_bytes(), 24).unwrap();
        let mut program = sandbox.watcher();
        let memory = program.call("memory 0");
        prop_assert_eq!((memory[0], memory[1], memory[2] + memory[3]), (0, SHARE, SHARE));
        let listed = compute(&mut program);
        prop_assert!(listed.len() <= owners.len());
        prop_assert!(listed.iter().all(|(pid, used)| *pid != 0 && *used != 0));
        prop_assert!(listed.windows(2).all(|pair| pair[0].0 != pair[1].0), "each once: {:?}", listed);
    }
}
