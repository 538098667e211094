//! Which functions a driver of a version has, and which variants of them are called.

use crate::bed::{Bed, NULL, Num, Out, Process, Text};

const SUCCESS: u64 = 0;
const NOT_FOUND: u64 = 1;
const TOO_NEW: u64 = 2;
const PER_THREAD: u64 = 2;

/// Find a function as a program of a CUDA version does. Return the code, the address, and the status, which drivers before CUDA 12 do not return.
fn find(process: &mut Process, driver: &str, name: &'static str, version: u64, flags: u64) -> (i32, u64, u64) {
    if driver.starts_with("11.") {
        let answer = process.call("cuGetProcAddress", &[Text(name), Out, Num(version), Num(flags)]);
        return (answer.code, answer.words[0], 0);
    }
    let answer = process.call("cuGetProcAddress_v2", &[Text(name), Out, Num(version), Num(flags), Out]);
    (answer.code, answer.words[0], answer.words[1])
}

/// The driver's version, the function, the program's version, the flags, and the symbol or the status.
type Case = (&'static str, &'static str, u64, u64, Result<&'static str, u64>);

/// The driver must have the variant.
#[test]
fn a_program_gets_the_variant_of_its_version() {
    let cases: [Case; 23] = [
        ("12.4", "cuMemAlloc", 3010, 0, Ok("cuMemAlloc")),
        ("12.4", "cuMemAlloc", 3020, 0, Ok("cuMemAlloc_v2")),
        ("12.4", "cuMemAlloc", 12000, 0, Ok("cuMemAlloc_v2")),
        ("12.4", "cuCtxCreate", 11030, 0, Ok("cuCtxCreate_v2")),
        ("12.4", "cuCtxCreate", 11040, 0, Ok("cuCtxCreate_v3")),
        ("12.4", "cuCtxCreate", 12040, 0, Ok("cuCtxCreate_v3")),
        ("12.5", "cuCtxCreate", 12050, 0, Ok("cuCtxCreate_v4")),
        ("13.4", "cuCtxCreate", 11040, 0, Ok("cuCtxCreate_v3")),
        ("11.3", "cuCtxCreate", 11000, 0, Ok("cuCtxCreate_v2")),
        ("12.0", "cuMemAllocAsync", 11010, 0, Err(TOO_NEW)),
        ("11.3", "cuMemAllocAsync", 11020, 0, Ok("cuMemAllocAsync")),
        ("11.3", "cuMemAllocAsync", 11020, PER_THREAD, Ok("cuMemAllocAsync_ptsz")),
        ("12.4", "cuMemAlloc", 12000, PER_THREAD, Ok("cuMemAlloc_v2")),
        ("12.4", "cuMemcpyHtoD", 12000, PER_THREAD, Ok("cuMemcpyHtoD_v2_ptds")),
        ("12.4", "cuGraphInstantiate", 11030, 0, Ok("cuGraphInstantiate_v2")),
        ("12.4", "cuGraphInstantiate", 11040, 0, Ok("cuGraphInstantiateWithFlags")),
        ("12.2", "cuGraphAddNode", 12020, 0, Ok("cuGraphAddNode")),
        ("12.3", "cuGraphAddNode", 12030, 0, Ok("cuGraphAddNode_v2")),
        ("11.7", "cuLaunchKernelEx", 11060, PER_THREAD, Ok("cuLaunchKernelEx_ptsz")),
        ("11.5", "cuLaunchKernelEx", 11050, 0, Err(NOT_FOUND)),
        ("12.4", "cuGreenCtxCreate", 12030, 0, Err(TOO_NEW)),
        ("12.4", "cuMemAlloc_v2", 12000, 0, Err(NOT_FOUND)),
        ("12.4", "", 12000, 0, Err(NOT_FOUND)),
    ];
    let bed = Bed::new();
    for (driver, name, version, flags, expected) in cases {
        let mut process = bed.start_with(&[("DIVVY_CUDA_SIM_VERSION", driver)]);
        let expected = match expected {
            Ok(symbol) => {
                let address = process.ok("symbol", &[Text(symbol)]);
                assert_ne!(address, 0, "{symbol}");
                (0, address, SUCCESS)
            }
            Err(_) if driver.starts_with("11.") => (500, 0, 0),
            Err(status) => (0, 0, status),
        };
        let found = find(&mut process, driver, name, version, flags);
        assert_eq!(found, expected, "{name} of {version} in {driver}");
    }
}

/// The function returns an error for a name that does not exist.
#[test]
fn the_first_cu_get_proc_address_reports_errors() {
    let bed = Bed::new();
    let mut process = bed.start_with(&[("DIVVY_CUDA_SIM_VERSION", "11.4")]);
    let mut code = |name, version| process.code("cuGetProcAddress", &[Text(name), Out, Num(version), Num(0)]);
    assert_eq!(
        (
            code("cuMemAlloc", 11000),
            code("cuGreenCtxCreate", 11000),
            code("cuMemAllocAsync", 11010)
        ),
        (0, 500, 500)
    );
    assert_eq!(code("cuMemAlloc", 11050), 1, "newer than the driver");
    let mut process = bed.start_with(&[("DIVVY_CUDA_SIM_VERSION", "12.0")]);
    assert_eq!(
        process.code("cuGetProcAddress_v2", &[Text("cuMemAlloc"), Out, Num(11000), Num(4), NULL]),
        1,
        "no such flag"
    );
    assert_eq!(
        process.code("cuGetProcAddress_v2", &[Text("cuMemAlloc"), Out, Num(11000), Num(0), NULL]),
        0,
        "no status is asked for"
    );
}

#[test]
fn a_variable_overrides_the_drivers_version() {
    let bed = Bed::new();
    let version = |variables: &[(&str, &str)]| bed.start_with(variables).ok("cuDriverGetVersion", &[Out]);
    assert_eq!(version(&[]), 13040);
    assert_eq!(version(&[("DIVVY_CUDA_SIM_VERSION", "11.0")]), 11000);
    let mut wrong = bed.start_with(&[("DIVVY_CUDA_SIM_VERSION", "new")]);
    assert_eq!(
        (wrong.code("cuDriverGetVersion", &[Out]), wrong.code("cuInit", &[Num(0)])),
        (999, 100)
    );
}

#[test]
fn the_log_says_which_variant_was_called_and_what_it_answered() {
    let bed = Bed::new();
    let log = bed.path("log");
    let mut process = bed.start_with(&[("DIVVY_CUDA_SIM_LOG", log.to_str().expect("UTF-8"))]);
    process.ok("cuInit", &[Num(0)]);
    process.code("cuStreamSynchronize_ptsz", &[Num(0)]);
    process.code("cuStreamSynchronize", &[Num(0)]);
    let pid = process.pid();
    let text = std::fs::read_to_string(log).expect("the log");
    assert_eq!(
        text,
        format!("{pid} cuInit 0\n{pid} cuStreamSynchronize_ptsz 201\n{pid} cuStreamSynchronize 201\n")
    );
}

#[test]
fn a_call_fails_when_a_test_says_so_and_then_does_nothing() {
    let bed = Bed::new();
    let mut process = bed.start_with(&[("DIVVY_CUDA_SIM_FAIL", "cuMemAlloc_v2:2=2,cuMemFree_v2:*=999")]);
    process.ok("cuInit", &[Num(0)]);
    process.enter(0);
    let before = bed.used();
    let mut codes = [0; 3];
    for code in &mut codes {
        *code = process.code("cuMemAlloc_v2", &[Out, Num(1 << 21)]);
    }
    assert_eq!((codes, bed.used() - before), ([0, 2, 0], 2 << 21));
    assert_eq!(process.code("cuMemFree_v2", &[NULL]), 999);
    assert_eq!(process.code("cuMemFree_v2", &[NULL]), 999);
}

#[test]
fn a_library_has_only_its_versions_symbols() {
    let cases = [
        ("cuMemAlloc_v2", 3020),
        ("cuCtxCreate_v2", 3020),
        ("cuMemCreate", 10020),
        ("cuMemAllocAsync", 11020),
        ("cuMemAllocAsync_ptsz", 11020),
        ("cuGetProcAddress", 11030),
        ("cuCtxCreate_v3", 11040),
        ("cuGetProcAddress_v2", 12000),
        ("cuGraphAddNode", 12020),
        ("cuGraphAddNode_v2", 12030),
        ("cuGreenCtxCreate", 12040),
        ("cuCtxCreate_v4", 12050),
        ("cuCtxGetDevice_v2", 13000),
    ];
    let bed = Bed::new();
    for version in ["11.0", "11.4", "12.3", "12.4", "13.4"] {
        let mut process = bed.start_with(&[("DIVVY_CUDA_SIM_VERSION", version)]);
        let driver = process.ok("cuDriverGetVersion", &[Out]);
        for (symbol, since) in cases {
            let address = process.ok("symbol", &[Text(symbol)]);
            assert_eq!(address != 0, since <= driver, "{symbol} in {version}");
        }
        process.ok("cuInit", &[Num(0)]);
        process.enter(0);
        process.ok("cuMemAlloc_v2", &[Out, Num(1)]);
    }
}

#[test]
fn each_error_that_users_meet_has_a_name_and_a_text() {
    let codes = [
        0, 1, 2, 3, 34, 46, 100, 101, 200, 201, 209, 214, 218, 220, 221, 222, 304, 400, 500, 600, 700, 701, 702, 715, 716, 719,
        801, 802, 803, 804, 805, 806, 807, 808, 809, 810, 999,
    ];
    let mut process = Bed::new().start();
    for name in ["cuGetErrorName", "cuGetErrorString"] {
        for code in codes {
            assert_ne!(process.ok(name, &[Num(code), Out]), 0, "{code}");
        }
        assert_eq!(process.call(name, &[Num(77_777), Out]).words, [0]);
    }
}

#[test]
fn a_function_can_be_missing() {
    let bed = Bed::new();
    let missing = "cuEventElapsedTime,cuMemAlloc_v2,cuMemFree,cuInit";
    let mut process = bed.start_with(&[("DIVVY_CUDA_SIM_VERSION", "12.4"), ("DIVVY_CUDA_SIM_MISSING", missing)]);
    let mut is_there = |symbol| process.ok("symbol", &[Text(symbol)]) != 0;
    let found = ["cuEventElapsedTime", "cuMemAlloc_v2", "cuMemFree_v2"].map(&mut is_there);
    assert_eq!(found, [false, false, true]);
    let mut code = |name| process.code("cuGetProcAddress", &[Text(name), Out, Num(12000), Num(0)]);
    assert_eq!(["cuMemFree", "cuInit", "cuMemGetInfo"].map(&mut code), [500, 500, 0]);
}
