//! Simulated time of the GPU.

use std::time::{Duration, Instant};

use crate::bed::{Bed, Num, Out, Process, Text, Words};

const MS: u64 = 1_000_000;
const NOT_READY: i32 = 600;

/// Load a kernel.
fn kernel(process: &mut Process, name: &'static str) -> u64 {
    let module = process.ok("cuModuleLoadData", &[Out, Words(vec![0])]);
    process.ok("cuModuleGetFunction", &[Out, Num(module), Text(name)])
}

fn launch(process: &mut Process, function: u64) {
    let mut arguments = vec![Num(function)];
    arguments.extend([1, 1, 1, 1, 1, 1, 0, 0, 0, 0].map(Num));
    process.ok("cuLaunchKernel", &arguments);
}

#[test]
fn launches_of_all_processes_run_one_after_the_other() {
    let bed = Bed::new();
    let (mut first, mut second) = (bed.user(), bed.user());
    let start = Instant::now();
    for process in [&mut first, &mut second] {
        let function = kernel(process, "gemm_60000000ns");
        launch(process, function);
    }
    second.ok("cuCtxSynchronize", &[]);
    assert!(start.elapsed() >= Duration::from_millis(120), "behind the other process's");
    let mut busy: Vec<u64> = bed.usage(0).iter().map(|of| of.busy_ns).collect();
    busy.sort_unstable();
    assert_eq!(busy, [60 * MS, 60 * MS]);
}

/// After the library is unloaded, its kernels can no longer be launched.
#[test]
fn a_library_kernel_is_launched_like_a_function() {
    let bed = Bed::new();
    let mut process = bed.user();
    let arguments = [Out, Words(vec![0]), Num(0), Num(0), Num(0), Num(0), Num(0), Num(0)];
    let library = process.ok("cuLibraryLoadData", &arguments);
    let kernel = process.ok("cuLibraryGetKernel", &[Out, Num(library), Text("gemm_7ns")]);
    let module = process.ok("cuLibraryGetModule", &[Out, Num(library)]);
    process.ok("cuModuleGetFunction", &[Out, Num(module), Text("gemm")]);
    let function = process.ok("cuKernelGetFunction", &[Out, Num(kernel)]);
    launch(&mut process, kernel);
    launch(&mut process, function);
    assert_eq!(bed.usage(0)[0].busy_ns, 14);
    assert_eq!(process.ok("cuFuncGetAttribute", &[Out, Num(0), Num(function)]), 1024);
    assert_eq!(process.ok("cuKernelGetAttribute", &[Out, Num(0), Num(kernel), Num(0)]), 1024);
    assert_eq!(process.code("cuFuncGetAttribute", &[Out, Num(99), Num(function)]), 1);
    process.ok("cuLibraryUnload", &[Num(library)]);
    for (name, arguments) in [
        ("cuLibraryUnload", vec![Num(library)]),
        ("cuLibraryGetModule", vec![Out, Num(library)]),
        ("cuLibraryGetKernel", vec![Out, Num(library), Text("gemm")]),
        ("cuModuleGetFunction", vec![Out, Num(module), Text("gemm")]),
    ] {
        assert_eq!(process.code(name, &arguments), 400, "{name}");
    }
}

#[test]
fn an_event_is_ready_when_the_work_before_it_is_done() {
    let bed = Bed::new();
    let mut process = bed.user();
    let event = process.ok("cuEventCreate", &[Out, Num(0)]);
    let function = kernel(&mut process, "endless_3600000000000ns");
    process.ok("cuEventRecord", &[Num(event), Num(0)]);
    process.ok("cuEventSynchronize", &[Num(event)]);
    process.ok("cuEventQuery", &[Num(event)]);
    // A launch does not wait: this kernel takes an hour.
    launch(&mut process, function);
    process.ok("cuEventRecord", &[Num(event), Num(0)]);
    assert_eq!(process.code("cuEventQuery", &[Num(event)]), NOT_READY);
    assert_eq!(process.code("cuStreamQuery", &[Num(0)]), NOT_READY);
}

#[test]
fn each_way_to_launch_takes_the_time_that_the_kernel_says() {
    let bed = Bed::new();
    let mut process = bed.start_with(&[("DIVVY_CUDA_SIM_KERNEL_NS", "7")]);
    process.ok("cuInit", &[Num(0)]);
    process.enter(0);
    let function = kernel(&mut process, "gemm");
    let ones = [1u64; 6];
    let grid = || {
        [vec![function], ones.to_vec(), vec![0; 4]]
            .concat()
            .into_iter()
            .map(Num)
            .collect::<Vec<_>>()
    };
    let config = vec![1 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0, 0, 0, 0];
    let parameters = [vec![function], config[..4].to_vec(), vec![0, 0]].concat();
    let stream = process.ok("cuStreamCreate", &[Out, Num(0)]);
    process.ok("cuStreamBeginCapture_v2", &[Num(stream), Num(0)]);
    let mut captured = grid();
    captured[8] = Num(stream);
    process.ok("cuLaunchKernel", &captured);
    let graph = process.ok("cuStreamEndCapture", &[Num(stream), Out]);
    let executable = process.ok("cuGraphInstantiateWithFlags", &[Out, Num(graph), Num(0)]);
    let cases = [
        ("cuLaunchKernel", grid()),
        ("cuLaunchKernel_ptsz", grid()),
        ("cuLaunchCooperativeKernel", grid()),
        ("cuLaunchKernelEx", vec![Words(config), Num(function), Num(0), Num(0)]),
        (
            "cuLaunchCooperativeKernelMultiDevice",
            vec![Words(parameters), Num(1), Num(0)],
        ),
        ("cuLaunch", vec![Num(function)]),
        ("cuLaunchGrid", vec![Num(function), Num(1), Num(1)]),
        ("cuLaunchGridAsync", vec![Num(function), Num(1), Num(1), Num(0)]),
        ("cuGraphLaunch", vec![Num(executable), Num(0)]),
    ];
    for (number, (name, arguments)) in cases.into_iter().enumerate() {
        process.ok(name, &arguments);
        assert_eq!(bed.usage(0)[0].busy_ns, 7 * (number as u64 + 1), "{name}");
    }
}
