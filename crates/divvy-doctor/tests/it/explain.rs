//! Tests of the explanations of error texts in logs.

use std::sync::LazyLock;

use divvy_doctor::checks;
use divvy_doctor::explain::{ExplainedLog, Knowledge};

static KNOWLEDGE: LazyLock<Knowledge> = LazyLock::new(|| Knowledge::load().expect("the files of knowledge/ are valid"));

/// Return the ids of the entries that explain a line, each with the number of nodes, for example `scheduler-taint 2`.
fn ids(line: &str) -> Vec<String> {
    let causes = KNOWLEDGE.line(line);
    let one = causes.iter().map(|cause| match cause.nodes {
        Some(nodes) => format!("{} {nodes}", cause.entry.id),
        None => cause.entry.id.clone(),
    });
    one.collect()
}

#[test]
fn every_example_gets_its_own_entry_and_no_other_one() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for entry in KNOWLEDGE.entries() {
        for example in &entry.examples {
            count += 1;
            let causes = KNOWLEDGE.line(example);
            let found: Vec<&str> = causes.iter().map(|cause| cause.entry.id.as_str()).collect();
            if found != [entry.id.as_str()] {
                wrong.push(format!("{}: {found:?}: {example}", entry.id));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(count > 400, "{count}");
}

#[test]
fn every_pattern_reaches_its_own_complete_entry() {
    let mut wrong = Vec::new();
    for (index, entry) in KNOWLEDGE.entries().iter().enumerate() {
        let mut complain = |what: &str| wrong.push(format!("{}: {what}", entry.id));
        if KNOWLEDGE.entries()[..index].iter().any(|other| other.id == entry.id) {
            complain("its id is there twice");
        }
        if entry.check.as_deref().is_some_and(|check| checks::by_id(check).is_none()) {
            complain("divvy doctor has no check with this id");
        }
        if [&entry.program, &entry.means, &entry.fix, &entry.source]
            .iter()
            .any(|text| text.is_empty())
            || entry.examples.is_empty()
        {
            complain("a text or the examples are missing");
        }
        for text in &entry.texts {
            if text.split(['*', '.']).all(|literal| literal.len() < 5) {
                complain(&format!("{text:?} is too short"));
            }
            let line = text.replace("...", " x ").replace("<n>", "7").replace('*', "x");
            let causes = KNOWLEDGE.line(&line);
            if causes.iter().all(|cause| cause.entry.id != entry.id) {
                let found: Vec<&str> = causes.iter().map(|cause| cause.entry.id.as_str()).collect();
                complain(&format!("{text:?} is explained as {found:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_line_of_the_scheduler_has_each_cause_with_its_nodes() {
    for (line, expected) in [
        (
            "0/2 nodes are available: 1 Insufficient nvidia.com/gpucores, 1 Insufficient nvidia.com/gpumem, 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }. preemption: 0/2 nodes are available: 1 No preemption victims found for incoming pod, 1 Preemption is not helpful for scheduling..",
            &["scheduler-insufficient-gpu 2"][..],
        ),
        (
            "0/7 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 Insufficient nvidia.com/gpu, 4 node(s) didn't match Pod's node affinity/selector. preemption: 0/7 nodes are available: 5 Preemption is not helpful for scheduling, 2 No preemption victims found for incoming pod.",
            &["scheduler-insufficient-gpu 2", "scheduler-node-affinity 4"],
        ),
        (
            "0/4 nodes are available: 1 node(s) had taint {node-role.kubernetes.io/master: }, that the pod didn't tolerate, 3 node(s) had volume node affinity conflict.",
            &["scheduler-volume 3"],
        ),
        (
            "0/1 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }.",
            &["scheduler-control-plane-taint 1"],
        ),
        (
            "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint {nvidia.com/gpu: true}.",
            &["scheduler-insufficient-other 1", "scheduler-taint 2"],
        ),
        (
            "0/3 nodes are available: 3 something of a plugin, with a comma.",
            &["scheduler-other-reason 3"],
        ),
        (
            "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            &["scheduler-volume"],
        ),
    ] {
        assert_eq!(ids(line), expected, "{line}");
    }
}

/// An XID that a program caused does not require a reset of the GPU, which would also affect the other pods on it.
#[test]
fn an_xid_is_explained_by_its_number_and_the_words_of_its_line() {
    for (line, expected, means) in [
        (
            "NVRM: Xid (PCI:0000:81:00): 79, pid=1, GPU has fallen off the bus.",
            "xid-reboot-node",
            "XID 79 (GPU has",
        ),
        (
            "NVRM: Xid (PCI:0000:81:00): 13, pid=1, Graphics Exception",
            "xid-restart-program",
            "XID 13 (graphics",
        ),
        (
            "NVRM: Xid (PCI:0000:00:08): 94, Contained: SM (0x1). RST: No, D-RST: No",
            "xid-restart-program",
            "XID 94 (contained",
        ),
        (
            "NVRM: Xid (PCI:0000:01:00): 144, SAW_MVB Nonfatal XC0 i0 Link 0 (0x1)",
            "xid-ignore",
            "XID 144 (NVLink",
        ),
        (
            "NVRM: Xid (PCI:0000:01:00): 145, RLW_RSP Fatal XC0 i0 Link 0 (0x1)",
            "xid-reset-gpu",
            "XID 145 (NVLink",
        ),
        ("NVRM: Xid (PCI:0000:01:00): 999, something", "xid-support", "XID 999 (not in"),
    ] {
        assert_eq!(ids(line), [expected], "{line}");
        let causes = KNOWLEDGE.line(line);
        assert!(causes[0].entry.means.starts_with(means), "{causes:?}");
    }
    let causes = KNOWLEDGE.line("NVRM: Xid (PCI:0000:dc:00): 45, pid=1, name=python3, Ch 00000001 caused by previous Xid 149");
    assert!(causes[0].entry.means.ends_with("XID 149 caused it"), "{causes:?}");
    for harmless in [
        "NVRM: Xid (PCI:0000:81:00): 31, pid=1, MMU Fault",
        "NVRM: Xid (PCI:0000:81:00): 63, pid=1, Row Remapper",
    ] {
        let causes = KNOWLEDGE.line(harmless);
        assert!(!causes[0].entry.fix.contains("--gpu-reset"), "{causes:?}");
    }
}

#[test]
fn the_number_of_a_cuda_error_counts_in_every_form() {
    for (code, text) in [
        (
            700,
            "Exception: Error synchronizing on event: CUDA error (700) at event.cc:12",
        ),
        (201, "ERROR: Invalid context (CUDA error #201, x.cpp:3)"),
        (804, "Cuda driver error 804 in call at file x.cpp"),
        (46, "CUDA error(46)"),
    ] {
        assert_eq!(ids(text), ids(&format!("CUDA error {code}")), "{text}");
    }
}

#[test]
fn no_line_of_nvidia_container_cli_is_unknown() {
    for name in ["nvidia-container-cli", "nvidia-container-cli.real"] {
        for family in [
            "initialization",
            "detection",
            "device",
            "mount",
            "container",
            "ldcache",
            "permission",
            "requirement",
            "other",
        ] {
            let line = format!(
                "error running hook: exit status 1, stdout: , stderr: {name}: {family} error: a reason that is new: unknown"
            );
            let found = ids(&line);
            assert!(found.len() == 1 && found[0].starts_with("toolkit-"), "{line}: {found:?}");
        }
    }
}

#[test]
fn a_directory_is_not_an_error() {
    for (line, other) in [
        (
            "nvidia-container-cli: mount error: file creation failed: /data/docker/overlay2/0123456789abcdef/merged/run/nvidia-persistenced/socket: no such device or address: unknown.",
            "kernel-overlay",
        ),
        (
            "nvidia-container-cli: device error: unknown device id: GPU-11111111-2222-3333-4444-555555555555",
            "scheduler-extender",
        ),
        (
            "nvidia-container-cli.real: initialization error: load library failed: libnvidia-container-go.so.1: cannot open shared object file: no such file or directory: unknown",
            "cdi-stale",
        ),
    ] {
        let found = ids(line);
        assert!(found.len() == 1 && found[0] != other, "{line}: {found:?}");
    }
}

/// An explanation names all usual causes, starting with the most likely one.
#[test]
fn the_likelier_of_two_usual_causes_comes_first() {
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
        (
            "Failed to initialize NVML: Unknown Error",
            "In a container",
            "on the node itself",
        ),
        (
            "invalid CDI Spec: invalid device, empty device edits",
            "it ignores the spec",
            "was not written",
        ),
    ] {
        let causes = KNOWLEDGE.line(text);
        let means = causes.first().map_or("", |cause| cause.entry.means.as_str());
        let (one, other) = (means.find(first), means.find(second));
        assert!(one.is_some() && one < other, "{text}: {means}");
    }
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
        let mut log = ExplainedLog::new(&KNOWLEDGE);
        text.lines().for_each(|line| log.read(line));
        assert!(log.found().is_empty(), "{program}: {}", log.text());
    }
}

#[test]
fn lines_without_an_error_are_left_alone() {
    for text in [
        "",
        "I0102 Starting GRPC server for 'nvidia.com/gpu'",
        "Registered device plugin for 'nvidia.com/gpu' with Kubelet",
        "Normal  Scheduled  Successfully assigned default/x to gpu-1",
        "dhclient[812]: DHCPDISCOVER on eth0 to 255.255.255.255 port 67 xid=0x79a1",
        "the xid 79 of a transaction in a database: none",
    ] {
        assert_eq!(ids(text), [""; 0], "{text}");
    }
}

#[test]
fn a_log_is_explained_once_for_each_cause() {
    let mut log = ExplainedLog::new(&KNOWLEDGE);
    for line in [
        "starting",
        "Failed to initialize NVML: Driver/library version mismatch",
        "retry: Failed to initialize NVML: Driver/library version mismatch\x1b[0m",
        "0/4 nodes are available: 1 Insufficient aliyun.com/gpu-mem, 3 node(s) had untolerated taint {gpu: }.",
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
        let mut log = ExplainedLog::new(&KNOWLEDGE);
        (0..lines).for_each(|_| log.read("all is well"));
        assert!(log.text().starts_with(expected), "{}", log.text());
    }
}

/// Naming a check that cannot detect the cause would mislead the reader.
#[test]
fn no_check_is_named_where_none_can_tell_the_cause() {
    let mut log = ExplainedLog::new(&KNOWLEDGE);
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
