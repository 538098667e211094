//! What the simulated NVML says of the processes of the simulated CUDA.

use crate::bed::{Bed, CONTEXT, MEMORY, Num, Out, PAGE, Words, nvml};

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
