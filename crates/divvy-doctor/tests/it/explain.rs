//! Tests of the explanations of error texts in logs.

use divvy_doctor::checks;
use divvy_doctor::explain::{self, Log};

/// Error texts from issues that users have filed, each with the check to which it belongs.
const FILED: &[(&str, &str)] = &[
    ("2024/01/02 03:04:05 No devices found. Waiting indefinitely.", "D01"),
    (
        "nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown",
        "D02",
    ),
    (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "D02",
    ),
    ("Failed to initialize NVML: Driver/library version mismatch", "D05"),
    ("No devices were found", "D06"),
    (
        "could not load NVML library: libnvidia-ml.so.1: cannot open shared object file: No such file or directory",
        "D07",
    ),
    ("CUDA error: no kernel image is available for execution on the device", "D08"),
    ("RuntimeError: CUDA error 999: unknown error", "D09"),
    ("CUDA error: no CUDA-capable device is detected", "D09"),
    ("Failed to initialize NVML: Unknown Error", "D10"),
    ("GPU is lost.  Reboot the system to recover this GPU", "D11"),
    (
        "kernel: NVRM: Xid (PCI:0000:81:00): 79, pid=1234, GPU has fallen off the bus.",
        "D11",
    ),
    ("CUDA error: all CUDA-capable devices are busy or unavailable", "D12"),
    (
        "Warning: MIG mode is in pending enable state for GPU 00000000:81:00.0: In use by another client",
        "D14",
    ),
    ("nvidia.com/gpu.product=NVIDIA-A100-SXM4-40GB-MIG-INVALID", "D14"),
    ("MIG devices on GPU 0 are in use by another client", "D14"),
    (
        "Partitions of different styles on the same node is not supported with single strategy",
        "D16",
    ),
    (
        "exec: \"nvidia-container-runtime\": executable file not found in $PATH: unknown",
        "R03",
    ),
    (
        "bpf_prog_query(BPF_CGROUP_DEVICE) failed: operation not permitted: unknown",
        "R04",
    ),
    (
        "If this is a GPU node, did you set the docker default runtime to `nvidia`?",
        "R07",
    ),
    ("docker: unknown flag: --gpus", "R06"),
    (
        "failed to get sandbox runtime: no runtime for \\\"nvidia\\\" is configured",
        "R09",
    ),
    (
        "If this is a GPU node, did you configure the NVIDIA Container Toolkit?",
        "R10",
    ),
    ("Incompatible strategy detected auto", "R10"),
    ("Detected non-NVML platform: could not load NVML: ERROR", "R10"),
    ("No valid resources detected, creating a null CDI handler", "R10"),
    ("exec: \"nvidia-smi\": executable file not found in $PATH", "R10"),
    ("system not yet initialized", "D11"),
    (
        "invalid plugin config: no corresponding runtime configured in `containerd.runtimes` for `containerd` `default_runtime_name = \"runc\"",
        "R11",
    ),
    (
        "rpc error: code = Unimplemented desc = unknown service runtime.v1.RuntimeService",
        "R11",
    ),
    (
        "expected cgroupsPath to be of format \"slice:prefix:name\" for systemd cgroups, got \"/kubepods\" instead",
        "R13",
    ),
    (
        "Error creating: pods \"x\" is forbidden: pod rejected: RuntimeClass \"nvidia\" not found",
        "R14",
    ),
    (
        "failed to inject CDI devices: unresolvable CDI devices nvidia.com/gpu=all",
        "R15",
    ),
    ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", "K03"),
    (
        "ListAndWatch ended: rpc error: grpc: received message larger than max (5547796 vs. 4194304)",
        "K06",
    ),
    ("0/3 nodes are available: 3 node(s) didn't match node selector.", "K08"),
    ("1 node(s) had untolerated taint {gpu: }", "K09"),
    (
        "no kind \"KubeSchedulerConfiguration\" is registered for version \"kubescheduler.config.k8s.io/v1beta2\" in scheme",
        "K10",
    ),
    (
        "Allocate failed due to rpc error: unknown device id: no-gpu-has-10MiB-to-run",
        "K12",
    ),
    (
        "Pod UnexpectedAdmissionError: Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 1, Available: 0",
        "K16",
    ),
    (
        "error mounting \"/usr/lib/x86_64-linux-gnu/libcuda.so.535.129.03\" to rootfs: no such file or directory",
        "C01",
    ),
    (
        "nvidia: module verification failed: signature and/or required key missing",
        "D02",
    ),
    ("ERROR: The Nouveau kernel driver is currently in use by your system.", "D06"),
    ("CUDA driver version is insufficient for CUDA runtime version", "D04"),
    (
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4",
        "D04",
    ),
];

/// Error texts of CUDA programs in pods, from issues that users have filed with PyTorch, TensorFlow, vLLM, NCCL, and others. Each
/// has the check to which it belongs, or an empty id if no check can detect the cause.
const OF_PROGRAMS: &[(&str, &str)] = &[
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 GiB of which 12.73 GiB is free.",
        "",
    ),
    (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of which 0 bytes is free.",
        "",
    ),
    (
        "RuntimeError: CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated)",
        "",
    ),
    ("RuntimeError: CUDA error: out of memory", ""),
    ("an error: cudaErrorMemoryAllocation (2)", ""),
    (
        "tensorflow/stream_executor/cuda/cuda_driver.cc:806] failed to allocate 1.95G (2095972352 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "",
    ),
    (
        "ResourceExhaustedError: OOM when allocating tensor with shape[64,3,64,64] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
        "",
    ),
    (
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
        "",
    ),
    (
        "ValueError: Free memory on device (3.20/15.00 GiB) on startup is less than desired GPU memory utilization (0.9, 13.5 GiB).",
        "",
    ),
    (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        "",
    ),
    (
        "bfc_allocator.cc:246] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.20GiB with freed_by_count=0.",
        "",
    ),
    ("enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'", ""),
    ("include/alloc.h:102 NCCL WARN Cuda failure 2 'out of memory'", ""),
    ("include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes", ""),
    (
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. Last error: out of memory",
        "",
    ),
    (
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "D12",
    ),
    ("RuntimeError: No CUDA GPUs are available", "K13"),
    (
        "cudaGetDeviceCount returned 35\n-> CUDA driver version is insufficient for CUDA runtime version",
        "D04",
    ),
    (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "D08",
    ),
    ("RuntimeError: CUDA error: initialization error", "D09"),
    (
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method",
        "D09",
    ),
    ("RuntimeError: CUDA error: unknown error", "D09"),
    (
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start.",
        "D09",
    ),
    ("RuntimeError: CUDA error: device-side assert triggered", ""),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "D11"),
    (
        "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
        "R15",
    ),
    (
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver",
        "R15",
    ),
    (
        "tsl/cuda/cudart_stub.cc:28] Could not find cuda drivers on your machine, GPU will not be used.",
        "R15",
    ),
    (
        "Could not load dynamic library 'libcuda.so.1'; dlerror: libcuda.so.1: cannot open shared object file: No such file or directory",
        "R15",
    ),
    (
        "NVML Shared Library Not Found: libnvidia-ml.so.1: cannot open shared object file: No such file or directory",
        "D07",
    ),
    ("pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found", "D07"),
    ("Failed to initialize NVML: Driver/library version mismatch", "D05"),
    ("Failed to initialize NVML: Unknown Error", "D10"),
    ("RuntimeError: CUDA error: invalid device ordinal", "K13"),
    (
        "RuntimeError: Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1.",
        "K13",
    ),
    (
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3",
        "",
    ),
    (
        "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "",
    ),
    (
        "init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1000",
        "",
    ),
    (
        "misc/shmutils.cc:132 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)",
        "",
    ),
    (
        "kernel: NVRM: Xid (PCI:0000:81:00): 31, pid=1234, name=python, Ch 00000008, MMU Fault: ENGINE GRAPHICS",
        "D11",
    ),
];

#[test]
fn what_programs_say_in_a_pod_is_explained() {
    let mut unknown = Vec::new();
    for (text, check) in OF_PROGRAMS {
        let found = text.lines().find_map(explain::line);
        let found = found.map(|found| found.check.unwrap_or_default());
        if found != Some(*check) {
            unknown.push(format!("{text}: {found:?} and not {check}"));
        }
    }
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
}

/// An explanation names all usual causes, starting with the most likely one.
#[test]
fn an_error_with_two_usual_causes_names_both_and_the_likelier_first() {
    for (text, first, second) in [
        (
            "libcuda.so.1: cannot open shared object file: No such file or directory",
            "no CDI spec",
            "driver was upgraded",
        ),
        (
            "CUDA driver version is insufficient for CUDA runtime version",
            "newer than the driver",
            "no driver at all",
        ),
        ("CUDA out of memory", "its pod asked for", "another pod"),
        (
            "0/3 nodes are available: 3 Insufficient aliyun.com/gpu-mem",
            "other pods hold",
            "no node offers",
        ),
        ("No CUDA GPUs are available", "did not ask for one", "CUDA_VISIBLE_DEVICES"),
    ] {
        let means = explain::line(text).map_or("", |found| found.means);
        let (one, other) = (means.find(first), means.find(second));
        assert!(one.is_some() && one < other, "{text}: {means}");
    }
}

/// An XID that a program caused does not require a reset of the GPU, which would also affect the other pods on it.
#[test]
fn a_program_that_the_driver_ended_is_not_a_lost_gpu() {
    let lost = explain::line("NVRM: Xid (PCI:0000:81:00): 79, pid=1, GPU has fallen off the bus.");
    let ended = explain::line("NVRM: Xid (PCI:0000:81:00): 13, pid=1, Graphics Exception");
    assert!(lost.is_some_and(|found| found.fix.contains("--gpu-reset")));
    assert!(ended.is_some_and(|found| !found.fix.contains("reset")), "{ended:?}");
}

/// Unedited logs of healthy programs, beginning at their start.
const HEALTHY: &[(&str, &str)] = &[
    ("NVIDIA's device plugin", include_str!("healthy/nvidia-device-plugin.log")),
    ("gpu-feature-discovery", include_str!("healthy/gpu-feature-discovery.log")),
    ("dcgm-exporter", include_str!("healthy/dcgm-exporter.log")),
    ("containerd", include_str!("healthy/containerd.log")),
    ("the kubelet", include_str!("healthy/kubelet.log")),
    ("kube-scheduler", include_str!("healthy/kube-scheduler.log")),
    ("gpushare's device plugin", include_str!("healthy/gpushare-device-plugin.log")),
    ("Divvy's agent", include_str!("healthy/divvy-agent.log")),
    ("Divvy's extender", include_str!("healthy/divvy-extender.log")),
    ("the kernel", include_str!("healthy/kernel.log")),
    ("NCCL", include_str!("healthy/nccl.log")),
];

#[test]
fn nothing_is_reported_of_a_healthy_log() {
    for (program, text) in HEALTHY {
        assert!(text.lines().count() > 8, "{program}: the file is too short for a log");
        let mut log = Log::default();
        text.lines().for_each(|line| log.read(line));
        assert!(log.found().is_empty(), "{program}: {}", log.text());
    }
}

#[test]
fn every_text_that_users_have_filed_is_explained_by_its_check() {
    for (text, check) in FILED {
        let found = explain::line(text);
        assert_eq!(found.and_then(|found| found.check), Some(*check), "{text}");
    }
}

#[test]
fn every_explanation_is_reached_by_its_own_texts_and_names_a_check() {
    for explanation in explain::ALL {
        if let Some(check) = explanation.check {
            assert!(checks::by_id(check).is_some(), "{check}");
        }
        for text in explanation.texts {
            let found = explain::line(&text.replace('*', " x "));
            assert_eq!(found, Some(explanation), "{text}");
        }
    }
}

#[test]
fn lines_without_an_error_are_left_alone() {
    for text in [
        "",
        "I0102 Starting GRPC server for 'nvidia.com/gpu'",
        "Registered device plugin for 'nvidia.com/gpu' with Kubelet",
        "Normal  Scheduled  Successfully assigned default/x to gpu-1",
    ] {
        assert_eq!(explain::line(text), None, "{text}");
    }
}

#[test]
fn a_log_is_explained_once_for_each_cause() {
    let mut log = Log::default();
    for line in [
        "starting",
        "Failed to initialize NVML: Driver/library version mismatch",
        "retry: Failed to initialize NVML: Driver/library version mismatch\x1b[0m",
        "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.",
    ] {
        log.read(line);
    }
    insta::assert_snapshot!(log.text());
}

#[test]
fn a_log_without_a_known_text_is_said_to_have_none() {
    for (lines, expected) in [
        (0, "The log is empty. "),
        (1, "The only line does not have a known error text ("),
        (2, "None of the 2 lines has a known error text ("),
    ] {
        let mut log = Log::default();
        (0..lines).for_each(|_| log.read("all is well"));
        assert!(log.text().starts_with(expected), "{}", log.text());
    }
}

/// Naming a check that cannot detect the cause would mislead the reader.
#[test]
fn no_check_is_named_where_none_can_tell_the_cause() {
    let mut log = Log::default();
    log.read("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB.");
    let text = log.text();
    assert!(text.starts_with("line 1\n") && !text.contains("divvy doctor"), "{text}");
    log.read("Failed to initialize NVML: Driver/library version mismatch");
    assert!(
        log.text().ends_with("\n\nOn the node: divvy doctor --only D05\n"),
        "{}",
        log.text()
    );
}
