//! Error texts in logs.

use divvy_doctor::checks;
use divvy_doctor::explain::{self, Log};

/// Texts as users have filed them, and the check that each belongs to: research/vendors-ux.md section 6.
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

#[test]
fn every_text_that_users_have_filed_is_explained_by_its_check() {
    for (text, check) in FILED {
        let found = explain::line(text);
        assert_eq!(found.map(|found| found.check), Some(*check), "{text}");
    }
}

#[test]
fn every_explanation_is_reached_by_its_own_texts_and_names_a_check() {
    for explanation in explain::ALL {
        assert!(checks::by_id(explanation.check).is_some(), "{}", explanation.check);
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
    let mut empty = Log::default();
    empty.read("all is well");
    assert!(empty.text().starts_with("None of the 1 lines"));
}
