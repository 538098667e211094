//! What programs find in the library.

use divvy_shadow_testkit::Elf;

use crate::binary::REPLACED;
use crate::sandbox::{MIB, Program, Sandbox, Slot, drivers};

const FUNCTION_NOT_FOUND: u64 = 13;

fn found(program: &mut Program, name: &str) -> [u64; 2] {
    let addresses = program.call(&format!("symbol {name}"));
    [addresses[0], addresses[1]]
}

#[test]
fn what_is_not_replaced_is_the_drivers() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.start();
    let driver = std::fs::read(drivers()[0]).unwrap();
    let names = Elf::of(&driver).exports();
    assert!(names.len() > 50, "{names:?}");
    for name in names {
        let [ours, real] = found(&mut program, name);
        // The simulated driver has the functions of the described one.
        if real == 0 {
            continue;
        }
        assert!(ours != 0, "{name}");
        assert_eq!(ours != real, REPLACED.contains(&name), "{name}");
    }
    for name in ["nvmlNoSuchFunction", "cuMemAlloc_v2", "divvy_guard_can_panic"] {
        assert_eq!(found(&mut program, name), [0, 0], "{name}");
    }
}

/// A driver before 510 has no `…_v3` of the processes and no second version of the memory, and one before 455 also lacks others.
#[test]
fn what_the_driver_lacks_is_missing_or_not_found() {
    const LACKS: [&str; 6] = [
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetMigMode",
    ];
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    sandbox.without(&LACKS);
    let mut program = sandbox.watcher();
    for name in LACKS {
        // The library has one set of symbols for all drivers.
        let [ours, real] = found(&mut program, name);
        assert_eq!((ours != 0, real), (REPLACED.contains(&name), 0), "{name}");
        if ours != 0 {
            assert_eq!(program.code(&format!("null {name} 0")), FUNCTION_NOT_FOUND, "{name}");
        }
    }
    // What it has is answered from the share.
    assert_eq!(program.call("memory 0")[..2], [0, 4096 * MIB]);
    assert_eq!(program.list("nvmlDeviceGetComputeRunningProcesses_v2", "0", 24), []);
}

/// Without the UUID of a GPU, nothing is known of its share.
#[test]
fn a_driver_that_does_not_tell_the_uuid_answers_itself() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    sandbox.without(&["nvmlDeviceGetUUID"]);
    assert_eq!(sandbox.watcher().call("memory 0"), sandbox.plain().call("memory 0"));
}

#[test]
fn what_the_driver_refuses_is_refused_with_its_code() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let _owner = sandbox.occupy(0, Slot::of(7, MIB));
    let functions = (20..)
        .zip(REPLACED)
        .map(|(code, name)| format!("int {name}(void) {{ return {code}; }}\n"));
    sandbox.driver_with(&functions.collect::<String>());
    let mut program = sandbox.watcher();
    for (code, name) in (20..).zip(REPLACED).filter(|(_, name)| name.contains("Running")) {
        for (room, array) in [(0, "null"), (5, "")] {
            let answer = program.call(&format!("list {name} 0 {room} 16 {array}"));
            assert_eq!(answer[..2], [code, room], "{name}: nothing is written");
        }
    }
    assert_eq!(program.call("memory 0"), [29, 7, 8, 9], "nothing is written");
    assert_eq!(program.call("memory2 0 33554472"), [30, 7, 8, 9, 10], "nothing is written");
}
