//! What the simulated NVML says of the processes of the simulated CUDA.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;

use crate::bed::{Bed, CONTEXT, MEMORY, Num, Out, PAGE, Text, Words, nvml};

/// NVML_ERROR_NOT_FOUND.
const NOT_FOUND: i32 = 6;

#[test]
fn nvml_says_of_each_process_what_the_ledger_says() {
    let bed = Bed::new();
    let library = nvml();
    let mut watcher = bed.start_with(&[("WORKER_NVML", library.to_str().expect("UTF-8"))]);
    watcher.ok("nvmlInit_v2", &[]);
    let device = watcher.ok("nvmlDeviceGetHandleByIndex_v2", &[Num(0), Out]);
    let mut processes = [bed.user(), bed.user(), bed.user()];
    processes[2].ok("cuDevicePrimaryCtxRelease_v2", &[Num(0)]);
    for (pages, process) in [3, 5].into_iter().zip(&mut processes) {
        process.ok("cuMemAlloc_v2", &[Out, Num(pages * PAGE)]);
    }
    let mut seen = |pids: [u32; 2]| {
        // The count, and nvmlProcessInfo_v2_t: PID, bytes, two instances.
        let answer = watcher.call(
            "nvmlDeviceGetComputeRunningProcesses_v2",
            &[Num(device), Words(vec![8]), Words(vec![0; 24])],
        );
        assert_eq!(answer.code, 0);
        let list = answer.words[1..].chunks(3).take(answer.words[0] as usize);
        let of = |pid: u32| list.clone().find(|entry| entry[0] as u32 == pid).map(|entry| entry[1]);
        let memory = watcher
            .call("nvmlDeviceGetMemoryInfo", &[Num(device), Words(vec![0; 3])])
            .words;
        (list.len(), pids.map(of), memory)
    };
    let pids = [processes[0].pid(), processes[1].pid()];
    let held = [CONTEXT + 3 * PAGE, CONTEXT + 5 * PAGE];
    let sum: u64 = held.iter().sum();
    assert_eq!(
        seen(pids),
        (2, held.map(Some), vec![MEMORY, MEMORY - sum, sum]),
        "the third process has no context any more"
    );
    processes[0].kill();
    assert_eq!(
        seen(pids),
        (1, [None, Some(held[1])], vec![MEMORY, MEMORY - held[1], held[1]])
    );
}

#[test]
fn nvml_says_how_busy_each_process_keeps_the_gpu() {
    let bed = Bed::new();
    let library = nvml();
    let mut watcher = bed.start_with(&[("WORKER_NVML", library.to_str().expect("UTF-8"))]);
    watcher.ok("nvmlInit_v2", &[]);
    let device = watcher.ok("nvmlDeviceGetHandleByIndex_v2", &[Num(0), Out]);
    // nvmlProcessUtilizationSample_t: PID, microseconds, four percentages of 4 bytes.
    let mut samples = |since: u64| {
        let answer = watcher.call(
            "nvmlDeviceGetProcessUtilization",
            &[Num(device), Words(vec![0; 4 * 8]), Words(vec![8]), Num(since)],
        );
        let count = answer.words[32] as usize;
        let samples = answer
            .words
            .chunks(4)
            .take(count)
            .map(|of| (of[0] as u32, of[1], of[2] as u32));
        match answer.code {
            0 => samples.collect::<Vec<_>>(),
            code => {
                assert_eq!(code, NOT_FOUND);
                Vec::new()
            }
        }
    };
    let mut processes = [bed.user(), bed.user()];
    assert_eq!(samples(0), [], "nothing was launched");
    // It takes an hour, and what the other process launches comes after it.
    for process in &mut processes {
        let module = process.ok("cuModuleLoadData", &[Out, Words(vec![0])]);
        let function = process.ok("cuModuleGetFunction", &[Out, Num(module), Text("x_3600000000000ns")]);
        let mut arguments = vec![Num(function)];
        arguments.extend([1, 1, 1, 1, 1, 1, 0, 0, 0, 0].map(Num));
        process.ok("cuLaunchKernel", &arguments);
    }
    let (at, end) = loop {
        if let [(pid, at, 100)] = samples(0)[..] {
            assert_eq!(pid, processes[0].pid());
            break (at, std::time::SystemTime::now());
        }
    };
    let now = end.duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_micros() as u64;
    assert!(at <= now && at.is_multiple_of(167_000), "{at} at {now}");
    assert!(samples(at).iter().all(|of| of.1 > at), "a sample is returned once");
    processes[0].kill();
    while !samples(0).is_empty() {}
}

#[test]
fn errors_of_the_memory_are_counted_as_a_test_says() {
    let bed = Bed::new();
    let (library, control) = (nvml(), bed.path("control"));
    let variables = [
        ("WORKER_NVML", library.to_str()),
        ("DIVVY_NVML_SIM_CONTROL", control.to_str()),
    ];
    let mut watcher = bed.start_with(&variables.map(|(name, path)| (name, path.expect("UTF-8"))));
    watcher.ok("nvmlInit_v2", &[]);
    let device = watcher.ok("nvmlDeviceGetHandleByIndex_v2", &[Num(0), Out]);
    let mut errors = |kind| watcher.call("nvmlDeviceGetTotalEccErrors", &[Num(device), Num(kind), Num(0), Out]);
    // NVML_ERROR_NOT_SUPPORTED.
    assert_eq!(errors(1).code, 3);
    for uncorrected in [0, 1, 5] {
        let mut stream = UnixStream::connect(&control).expect("the control socket");
        writeln!(stream, r#"{{"op":"ecc","gpu":0,"corrected":7,"uncorrected":{uncorrected}}}"#).expect("written");
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).expect("an answer");
        assert_eq!(answer, "{\"ok\":true}\n");
        assert_eq!((errors(0).words, errors(1).words), (vec![7], vec![uncorrected]));
    }
    assert_eq!(errors(2).code, 2);
}
