//! What programs find in the library.

use divvy_share::limits::ShareLimits;
use divvy_share::limits::WHOLE;

use crate::binary::{only_launches, replaced};
use crate::sandbox::{CONTEXT, MIB, OUT_OF_MEMORY, Program, Sandbox, limits};

fn found(program: &mut Program, name: &str) -> (u64, u64) {
    let [_, ours, real] = program.call(&format!("symbol {name}"));
    (ours, real)
}

#[test]
fn what_is_not_replaced_is_the_drivers() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.start();
    for name in [
        "cuInit",
        "cuDriverGetVersion",
        "cuCtxGetDevice",
        "cuMemGetAddressRange_v2",
        "cuDeviceGetUuid",
    ] {
        let (ours, real) = found(&mut program, name);
        assert!(ours == real && ours != 0, "{name}");
    }
    for name in ["cuMemAlloc_v2", "cuGetProcAddress_v2", "cuCtxCreate_v4"] {
        let (ours, real) = found(&mut program, name);
        assert!(ours != real && ours != 0 && real != 0, "{name}");
    }
    for name in ["cuNoSuchFunction", "nvmlInit_v2", "divvy_guard_can_panic"] {
        assert_eq!(found(&mut program, name), (0, 0), "{name}");
    }
}

#[test]
fn addresses_are_the_drivers_but_for_the_replaced_functions() {
    for version in ["11.0", "11.4", "12.0", "12.9", "13.4"] {
        addresses(version, 0);
    }
}

#[test]
fn a_compute_limit_replaces_launch_functions_too() {
    for version in ["11.4", "12.9"] {
        addresses(version, WHOLE / 4);
    }
}

/// For each name, version, and way to ask: the driver's answer, with exactly the replaced functions replaced.
fn addresses(version: &'static str, rate: u64) {
    const OTHERS: [&str; 6] = [
        "cuInit",
        "cuDeviceGetUuid",
        "cuDeviceGetUuid_v2",
        "cuEventRecord",
        "cuEventRecord_ptsz",
        "cuDriverGetVersion",
    ];
    let symbols: Vec<&str> = [&replaced()[..], &OTHERS].concat();
    let name = |symbol: &str| {
        symbol
            .trim_end_matches("_ptsz")
            .trim_end_matches(['2', '3', '4'])
            .trim_end_matches("_v")
            .to_owned()
    };
    let mut names: Vec<String> = symbols.iter().map(|symbol| name(symbol)).collect();
    names.push("cuNoSuchFunction".to_owned());
    names.sort_unstable();
    names.dedup();
    let sandbox = Sandbox::new(8192 * MIB).with_driver(version);
    sandbox.give(
        0,
        &ShareLimits {
            rate,
            ..limits(4096 * MIB)
        },
    );
    let mut program = sandbox.start();
    assert_eq!(program.code("init"), 0);
    let mut plain = sandbox.start_without_guard();
    assert_eq!(plain.code("init"), 0);
    let has_second = found(&mut plain, "cuGetProcAddress_v2").0 != 0;
    let (guarded, driver): (Vec<_>, Vec<_>) = symbols
        .iter()
        .map(|symbol| {
            let (ours, real) = found(&mut program, symbol);
            let direct = rate == 0 && only_launches(symbol);
            (if direct { real } else { ours }, found(&mut plain, symbol).0)
        })
        .unzip();
    let symbol_at = |addresses: &[u64], address: u64| {
        addresses
            .iter()
            .position(|known| *known == address && address != 0)
            .map(|index| symbols[index])
    };
    for name in &names {
        for asked in [
            2000, 3020, 4000, 7000, 10020, 11000, 11020, 11030, 11040, 12000, 12020, 12030, 12050, 13000,
        ] {
            for flags in 0..3 {
                for way in 0..3 {
                    let call = format!("address {name} {asked} {flags} {way}");
                    // The guard has the second version of the question also if the driver has only the first.
                    let theirs = if has_second {
                        plain.call(&call)
                    } else {
                        plain.call(&format!("address {name} {asked} {flags} 2"))
                    };
                    let ours = program.call(&call);
                    assert_eq!(ours[0], theirs[0], "{version}: {call}: code");
                    if has_second {
                        assert_eq!(ours[2], theirs[2], "{version}: {call}: status");
                    }
                    assert_eq!(
                        symbol_at(&guarded, ours[1]),
                        symbol_at(&driver, theirs[1]),
                        "{version}: {call}"
                    );
                    assert_eq!(ours[1] == 0, theirs[1] == 0, "{version}: {call}");
                }
            }
        }
    }
}

#[test]
fn errors_are_the_drivers() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.start();
    let mut plain = sandbox.start_without_guard();
    for call in [
        "alloc 1",
        "info",
        "total 0",
        "retain 0",
        "create 2097152 0",
        "free 1",
        "context 0",
        "init",
        "alloc 1",
        "info",
        "total 9",
        "retain 9",
        "retain -1",
    ] {
        assert_eq!(program.code(call), plain.code(call), "{call}");
    }
}

/// A driver of CUDA 11.0 has no pools and no `cuGetProcAddress`.
/// Functions that the driver lacks are not found.
#[test]
fn an_old_drivers_functions_are_held() {
    const NOT_FOUND: u64 = 500;
    let sandbox = Sandbox::with_share(8192 * MIB, 1024 * MIB).with_driver("11.0");
    let mut program = sandbox.ready();
    let memory = program.alloc(100 * MIB);
    assert_eq!(program.code(&format!("alloc {}", 1024 * MIB)), OUT_OF_MEMORY);
    assert_eq!(sandbox.charged(&program), CONTEXT + 100 * MIB);
    assert_eq!(program.code(&format!("free {memory}")), 0);
    for call in [
        "async 1000",
        "address cuMemAlloc 11000 0 0",
        "address cuMemAlloc 11000 0 2",
        "pool 0",
        "pool-destroy 1",
    ] {
        assert_eq!(program.code(call), NOT_FOUND, "{call}");
    }
    // The guard has one set of symbols for all drivers; of the driver's own, `dlsym` finds what is there.
    let (ours, real) = found(&mut program, "cuMemAllocAsync");
    assert!(ours != 0 && real == 0);
    assert_eq!(found(&mut program, "cuMemPoolGetAttribute"), (0, 0));
    assert_eq!(sandbox.charged(&program), CONTEXT);
}
