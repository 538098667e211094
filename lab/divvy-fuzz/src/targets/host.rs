//! Input from machines: files of the kernel, drivers, engines, and the kubelet; answers of programs and of the API server; and what
//! `divvy doctor` and `divvy cdi generate` make of them.

use std::collections::BTreeMap;
use std::sync::{LazyLock, OnceLock};

use divvy_cdi::generate::{self, Extras, GenerateOptions, Generated, Naming, amd, intel, nvidia, proc, wsl};
use divvy_cdi::stale::Stale;
use divvy_cdi::{ProblemSeverity, Spec};
use divvy_doctor::explain::{ExplainedLog, Knowledge};
use divvy_doctor::facts::cluster::{ClusterFacts, ListPage};
use divvy_doctor::facts::programs::{RuntimeOutcome, filter_calls, last_line};
use divvy_doctor::{Asked, CheckStatus, DoctorReport, Facts, checks};
use divvy_engines::{Engine, WantedFiles};
use divvy_hardware::GpuProcesses;
use divvy_host::{FileKind, PathMetadata, Root, Tree};
use divvy_model::{MiB, cgroup};
use divvy_oci::runtime::live;
use serde_json::Value;

use divvy_testkit::amd::{self as recorded, RecordedMachine};
use divvy_testkit::machine::{MachineFiles, kinds};

use super::{FuzzTarget, text};

pub(crate) fn targets() -> Vec<FuzzTarget> {
    let machines = [
        kinds::debian(),
        kinds::operator(),
        kinds::red_hat(),
        kinds::mig(),
        kinds::wsl(),
        kinds::mi300(),
        kinds::intel(),
        busy(),
    ];
    vec![
        FuzzTarget {
            accepted: machines.iter().map(written).collect(),
            refused: vec![written(&kinds::none())],
            ..FuzzTarget::new("a machine's files", machine, &[])
        },
        FuzzTarget {
            accepted: [RecordedMachine::Vega10, RecordedMachine::Mi210]
                .map(|machine| written(&recorded::tree(machine)))
                .into(),
            refused: vec![written(&kinds::none())],
            ..FuzzTarget::new("the files of AMD's driver", amd_files, &[])
        },
        FuzzTarget {
            accepted: vec![written(&arc())],
            refused: vec![written(&kinds::none())],
            ..FuzzTarget::new("the files of Intel's driver", intel_files, &[])
        },
        FuzzTarget::new("what programs say to doctor", answers, &[ANSWERS]),
        FuzzTarget::new("what the API server says to doctor", objects, &[OBJECTS]),
        FuzzTarget::new(
            "metrics, and a program's last words",
            last_words,
            &[
                "divvy_extender_request_duration_seconds_count{verb=\"bind\"} 3\ndivvy_extender_request_duration_seconds_count{verb=\"filter\"} 41\n# EOF\n",
                "containerd: level=warning\n\ncontainerd: failed to load TOML: /etc/containerd/config.toml\n \n",
            ],
        ),
        FuzzTarget::new("a log", log, &[LOG]),
        FuzzTarget::new(
            "mig-minors",
            minors,
            &["config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n"],
        ),
        FuzzTarget::new(
            "a process's cgroups",
            cgroups,
            &[
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a_1b.slice/cri-containerd-01ab.scope\n",
                "12:pids:/kubepods/burstable/podaaaa-1/01ab\n0::/\n",
            ],
        ),
        FuzzTarget::new(
            "who lives in a cgroup",
            cgroup_files,
            &["populated 1\nfrozen 0\n\u{1e}2\n", "frozen 0\npopulated 0\n\u{1e}0\n"],
        ),
        FuzzTarget::new("the GPUs of a container's moment", snapshot, &[SNAPSHOT]),
    ]
}

const ANSWERS: &str = r#"{"probe":{"drivers":{"nvidia":{"version":"550.54.15"}},"gpus":[{"uuid":"GPU-0","index":0,"model":"A100","cc":"8.0","lost":false,"error":null,"computeMode":"default","persistence":true,"mig":[true,false]}],"unreadable":[{"index":1,"error":"lost"}]},"containerd":"version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia]\nruntime_type = \"io.containerd.runc.v2\"\n","kernel":"6,1,2,-;NVRM: Xid (PCI:0000:06:00): 79, pid=1\n","docker":["24.0.7","nvidia","runc"]}"#;
const OBJECTS: &str = r#"{"nodes":{"items":[{"metadata":{"name":"n","labels":{"gpu":"true"}},"spec":{"taints":[{"key":"nvidia.com/gpu","effect":"NoSchedule"}]},"status":{"capacity":{"aliyun.com/gpu-mem":"16","nvidia.com/gpu":"0"},"allocatable":{"aliyun.com/gpu-mem":"16"},"nodeInfo":{"kubeletVersion":"v1.31.2+k3s1"}}}]},"pods":{"metadata":{"continue":"x"},"items":[{"metadata":{"name":"p","namespace":"d","labels":null,"annotations":{"a":"b"}},"spec":{"nodeName":"n","runtimeClassName":"nvidia","containers":[{"name":"c","image":"nvidia/cuda:12","env":[{"name":"NVIDIA_VISIBLE_DEVICES","value":"all"}],"resources":{"limits":{"aliyun.com/gpu-mem":"3"}},"ports":[{"containerPort":80}]}],"tolerations":[{"key":"a","operator":"Exists"}],"nodeSelector":{"a":"b"}},"status":{"phase":"Failed","reason":"UnexpectedAdmissionError"}}]},"sets":{"items":[{"metadata":{"name":"divvy-agent","labels":{"app.kubernetes.io/name":"divvy"}},"spec":{"template":{"spec":{"nodeSelector":{"gpu":"true"},"containers":[{"image":"x/k8s-device-plugin:1"}]}}},"status":{"desiredNumberScheduled":1}}]},"classes":{"items":[{"metadata":{"name":"nvidia"},"handler":"nvidia"}]}}"#;
const LOG: &str = "a\nFailed to initialize NVML: Driver/library version mismatch\nFailed to initialize NVML: Driver/library version mismatch\ncould not select device driver \"\" with capabilities: [[gpu]]\n";
const SNAPSHOT: &str = r#"{"v":2,"drivers":{"nvidia":{"version":"550.54.15","cuda":"12.4"}},"gpus":[{"uuid":"GPU-0","index":0,"minor":0,"pci":"0000:06:00.0","cc":"8.0"},{"uuid":"GPU-1","index":1,"minor":1,"lost":true}],"unreadable":[{"index":2,"error":"x"}]}"#;

/// Return a machine with an Intel GPU of the driver xe, and a process that uses it.
fn arc() -> MachineFiles {
    let function = "/sys/devices/pci0000:00/0000:4d:00.0";
    let mut machine = MachineFiles::default();
    machine
        .link(
            "/sys/module/xe/drivers/pci:xe/0000:4d:00.0",
            "../../../../devices/pci0000:00/0000:4d:00.0",
        )
        .file(&format!("{function}/vendor"), "0x8086\n")
        .file(&format!("{function}/device"), "0xe20b\n")
        .file(&format!("{function}/numa_node"), "0\n")
        .file(&format!("{function}/sriov_numvfs"), "0\n")
        .file(&format!("{function}/drm/card1/dev"), "226:1\n")
        .file(&format!("{function}/drm/renderD128/dev"), "226:128\n")
        .file(&format!("{function}/tile0/physical_vram_size_bytes"), "12884901888\n")
        .file("/sys/fs/cgroup/dmem.capacity", "drm/0000:4d:00.0/vram0 12809404416\n")
        .file("/sys/fs/cgroup/dmem.current", "drm/0000:4d:00.0/vram0 1073741824\n")
        .link("/proc/7/fd/3", "/dev/dri/renderD128")
        .file(
            "/proc/7/fdinfo/3",
            "drm-driver:\txe\ndrm-client-id:\t5\ndrm-pdev:\t0000:4d:00.0\ndrm-total-vram0:\t3 MiB\n",
        );
    machine
}

/// Return a machine on which every check has something to read.
fn busy() -> MachineFiles {
    let mut machine = kinds::debian();
    machine
        .file("/proc/1/comm", "kubelet\n")
        .file("/proc/1/cmdline", "kubelet\0--config\0/var/lib/kubelet/config.yaml\0--root-dir=/var/lib/kubelet\0")
        .file("/proc/2/comm", "containerd\n")
        .file("/proc/2/cmdline", "containerd\0--config=/etc/containerd/config.toml\0")
        .file("/proc/2/stat", "2 (containerd) S 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 500 1\n")
        .file("/proc/stat", "cpu 1\nbtime 1700000000\n")
        .file("/proc/devices", "Character devices:\n195 nvidia\n510 nvidia-uvm\n\nBlock devices:\n8 sd\n")
        .file("/proc/modules", "overlay 1 0 - Live\nnouveau 1 0 - Live\n")
        .file("/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
        .file("/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n")
        .file("/proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access", "")
        .file("/proc/driver/nvidia-caps/mig-minors", "gpu0/gi1/access 3\ngpu0/gi1/ci0/access 4\n")
        .file("/etc/os-release", "ID=debian\nID_LIKE=\"a b\"\nVERSION_ID=\"12\"\n")
        .file("/var/lib/kubelet/config.yaml", "cgroupDriver: systemd\ncontainerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n")
        .file("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", super::node::CHECKPOINT)
        .node("/var/lib/kubelet/device-plugins/divvy-gpu-mem-1.sock")
        .file("/var/lib/dpkg/status", "Package: nvidia-container-toolkit\nStatus: install ok installed\nVersion: 1.17.0-1\n\nPackage: b\n")
        .file("/etc/containerd/config.toml", super::node::CONTAINERD)
        .file("/etc/docker/daemon.json", super::node::DAEMON)
        .file("/etc/crio/crio.conf", super::node::CRIO)
        .file("/etc/nvidia-container-runtime/config.toml", super::node::TOML)
        .file("/etc/cdi/nvidia.json", super::node::SPEC)
        .file("/var/run/cdi/nvidia.yaml", super::node::YAML)
        .file("/etc/kubernetes/manifests/kube-scheduler.yaml", "spec:\n  containers:\n  - command: [kube-scheduler, --config=/etc/kubernetes/s.yaml]\n    image: k:v1.31.0\n    volumeMounts: [{name: s, mountPath: /etc/kubernetes/s.yaml}]\n  volumes: [{name: s, hostPath: {path: /etc/kubernetes/s.yaml, type: FileOrCreate}}]\n")
        .file("/etc/kubernetes/s.yaml", "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nextenders:\n- urlPrefix: http://127.0.0.1:32766/gpushare-scheduler\n  ignorable: true\n  managedResources: [{name: aliyun.com/gpu-mem}]\n")
        .file("/sys/devices/pci0000:00/0000:06:00.0/vendor", "0x10de\n")
        .file("/sys/devices/pci0000:00/0000:06:00.0/class", "0x030200\n");
    machine
}

/// The separator between entries, and between an entry's path and its content. It does not occur in text files.
const ENTRY: u8 = 0x1e;
const CONTENT: u8 = 0x1f;

/// Return a machine as bytes.
fn written(machine: &MachineFiles) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut directories = vec![String::new()];
    while let Some(directory) = directories.pop() {
        for name in machine.names(if directory.is_empty() { "/" } else { &directory }) {
            let path = format!("{directory}/{name}");
            let (word, content) = match machine.stat(&path).expect("it is there").kind {
                FileKind::Directory => {
                    directories.push(path);
                    continue;
                }
                FileKind::File => ('f', machine.read(&path, usize::MAX).expect("read")),
                FileKind::Link(target) => ('l', target.into_bytes()),
                FileKind::Special => ('s', Vec::new()),
            };
            if !bytes.is_empty() {
                bytes.push(ENTRY);
            }
            bytes.extend(format!("{word}{path}").bytes());
            bytes.push(CONTENT);
            bytes.extend(content);
        }
    }
    bytes
}

/// A machine read from the bytes of [`written`]. It checks that its readers keep their promise: every path is absolute and passes
/// through no link.
#[derive(Debug, Default)]
struct Told {
    entries: BTreeMap<String, (FileKind, Vec<u8>)>,
}

impl Told {
    fn read(bytes: &[u8]) -> Option<Told> {
        let mut told = Told::default();
        for entry in bytes.split(|byte| *byte == ENTRY) {
            let at = entry.iter().position(|byte| *byte == CONTENT)?;
            let path = text(&entry[..at])?;
            let (kind, content) = match (path.get(..1)?, &entry[at + 1..]) {
                ("f", content) => (FileKind::File, content.to_vec()),
                ("l", content) => (FileKind::Link(text(content)?.to_owned()), Vec::new()),
                ("s", _) => (FileKind::Special, Vec::new()),
                _ => return None,
            };
            told.put(&path[1..], kind, content)?;
        }
        Some(told)
    }

    fn put(&mut self, path: &str, kind: FileKind, content: Vec<u8>) -> Option<()> {
        let path = path.strip_prefix('/')?;
        let mut directory = String::new();
        let parts: Vec<&str> = path.split('/').collect();
        // As in the kernel: names have a maximum length, and a whole path has PATH_MAX.
        if path.len() > 4096 {
            return None;
        }
        if parts
            .iter()
            .any(|part| part.is_empty() || *part == "." || *part == ".." || part.contains('\0'))
        {
            return None;
        }
        for part in &parts[..parts.len() - 1] {
            directory = format!("{directory}/{part}");
            let there = self
                .entries
                .entry(directory.clone())
                .or_insert((FileKind::Directory, Vec::new()));
            if there.0 != FileKind::Directory {
                return None;
            }
        }
        let last = self.entries.insert(format!("/{path}"), (kind, content));
        last.is_none_or(|(kind, _)| kind != FileKind::Directory).then_some(())
    }

    fn at(&self, path: &str) -> Option<&(FileKind, Vec<u8>)> {
        let relative = path.trim_start_matches('/');
        assert!(
            path.is_empty() || path == "/" || path == format!("/{relative}"),
            "{path:?} is not an absolute path"
        );
        let mut above = String::new();
        for part in relative.split('/').filter(|_| !relative.is_empty()) {
            assert!(!part.is_empty() && part != "." && part != "..", "{path:?} leads elsewhere");
            let directory = self.entries.get(&above);
            assert!(
                !matches!(directory, Some((FileKind::Link(_), _))),
                "{path:?} passes through the link {above:?}"
            );
            above = format!("{above}/{part}");
        }
        self.entries.get(&format!("/{relative}"))
    }
}

impl Tree for Told {
    fn names(&self, directory: &str) -> Vec<String> {
        self.at(directory);
        let prefix = format!("{}/", directory.trim_end_matches('/'));
        let below = self
            .entries
            .range(prefix.clone()..)
            .map_while(|(path, _)| path.strip_prefix(&prefix));
        below.filter(|name| !name.contains('/')).map(str::to_owned).collect()
    }

    fn stat(&self, path: &str) -> Option<PathMetadata> {
        let kind = match self.at(path) {
            Some((kind, _)) => kind.clone(),
            None if path.trim_start_matches('/').is_empty() => FileKind::Directory,
            None => return None,
        };
        Some(PathMetadata {
            kind,
            mode: 0o644,
            gid: 0,
        })
    }

    fn read(&self, path: &str, limit: usize) -> Option<Vec<u8>> {
        match self.at(path)? {
            (FileKind::File, content) => Some(content[..content.len().min(limit)].to_vec()),
            _ => None,
        }
    }

    fn modified(&self, path: &str) -> Option<i64> {
        self.at(path)?;
        Some(1_700_000_000)
    }
}

/// Rules: every finding is complete, and nothing from the machine moves the reader's cursor.
fn judged(facts: &Facts<'_>) {
    let report = DoctorReport::of(facts, checks::ALL);
    for line in &report.checks {
        let finding = !matches!(line.status, CheckStatus::Pass | CheckStatus::Skip);
        let said = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        assert!(
            !finding || (said(&line.why) && said(&line.fix) && !line.found.is_empty()),
            "{line:?}"
        );
    }
    let text = report.text(false);
    assert!(plain(&text), "{text:?}");
    assert!(report.exit_status() <= 2);
}

/// Report whether a text contains nothing that a terminal treats as a command.
fn plain(text: &str) -> bool {
    text.chars().all(|c| c == '\n' || !c.is_control())
}

/// Rule: for any content of the files, the agent accepts the probe's snapshot of them, and a GPU without memory has an error.
fn amd_files(bytes: &[u8]) -> bool {
    let Some(snapshot) = Told::read(bytes).and_then(|told| divvy_hardware::amd::snapshot(&told)) else {
        return false;
    };
    snapshot.validate().expect("a snapshot that clients accept");
    assert!(
        snapshot.gpus.iter().all(|gpu| gpu.total > MiB::ZERO || gpu.error.is_some()),
        "{snapshot:?}"
    );
    !snapshot.gpus.is_empty()
}

/// Rule: for any content of the files, the agent accepts the probe's snapshot of them and the list of processes, and a GPU without memory has an error.
fn intel_files(bytes: &[u8]) -> bool {
    let Some(told) = Told::read(bytes) else { return false };
    let Some(snapshot) = divvy_hardware::intel::snapshot(&told) else {
        return false;
    };
    snapshot.validate().expect("a snapshot that clients accept");
    assert!(
        snapshot.gpus.iter().all(|gpu| gpu.total > MiB::ZERO || gpu.error.is_some()),
        "{snapshot:?}"
    );
    let processes = divvy_hardware::intel::processes(&told);
    GpuProcesses::validate(&processes).expect("a list that clients accept");
    assert_eq!(processes.len(), snapshot.gpus.len());
    !snapshot.gpus.is_empty()
}

/// Rule: a machine results in specs that engines accept and that name existing files.
fn machine(bytes: &[u8]) -> bool {
    let Some(told) = Told::read(bytes) else { return false };
    let Some(facts) = Facts::of(&told) else { return false };
    judged(&facts);
    let mut generates = false;
    let _ = (facts.processes("kubelet"), facts.kubelet(), facts.extenders(), facts.engine());
    for (naming, driver_root) in [
        (vec![Naming::Index], "/"),
        (vec![Naming::Index, Naming::Uuid, Naming::TypeIndex], "/"),
        (vec![Naming::Index], "/run/nvidia/driver"),
    ] {
        let options = GenerateOptions {
            naming,
            driver_root: driver_root.to_owned(),
            extras: Extras {
                storage: true,
                rdma: true,
                gdrcopy: true,
                nvswitch: true,
                imex: generate::Channels::All,
            },
            ..GenerateOptions::new("nvidia.com")
        };
        let made = [
            nvidia::generate(&told, &proc::gpus(&told), None, &options),
            amd::generate(&told, &options),
            intel::generate(&told, &options),
            wsl::generate(&told, Some("550.54.15"), &options),
        ];
        for generated in made {
            match generated {
                Ok(Generated { spec, .. }) => {
                    fits(&spec, &told);
                    generates = true;
                }
                Err(error) => assert!(plain(&error.to_string()), "{error:?}"),
            }
        }
    }
    let root = Root::open(&told, "/").expect("a root");
    for engine in Engine::ALL {
        let _ = engine.evidence(&root);
        if let Err(error) = engine
            .target(&root, &WantedFiles::default())
            .and_then(|target| target.read(&root))
        {
            assert!(error.to_string().contains('/'), "the error names the file: {error}");
        }
        if let Err(error) = engine.kubelet_driver(&root) {
            assert!(error.to_string().contains('/'), "the error names the file: {error}");
        }
    }
    generates
}

fn fits(spec: &Spec, tree: &dyn Tree) {
    let problems = spec.problems();
    let errors: Vec<_> = problems
        .iter()
        .filter(|problem| problem.severity == ProblemSeverity::Error)
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
    let stale = Stale::check(spec, tree);
    assert!(stale.missing.is_empty(), "{:?}", stale.missing);
    let printed = spec.print(divvy_cdi::SpecFormat::Yaml);
    assert_eq!(Spec::parse(&printed).as_ref().ok(), Some(spec), "{printed}");
}

/// The input is one object with the answers of programs.
fn answers(bytes: &[u8]) -> bool {
    let Ok(said) = serde_json::from_slice::<Value>(bytes) else {
        return false;
    };
    static MACHINE: OnceLock<Told> = OnceLock::new();
    let machine = MACHINE.get_or_init(|| Told::read(&written(&busy())).expect("a machine"));
    let mut facts = Facts::of(machine).expect("a machine");
    let Ok(probed) = serde_json::from_value(said["probe"].clone()) else {
        return false;
    };
    facts.probe = Asked::Answer(probed);
    facts.arch = Some("x86_64".to_owned());
    let word = |key: &str| said[key].as_str().unwrap_or_default().to_owned();
    facts.containerd = Asked::Answer(word("containerd"));
    facts.kernel_log = Asked::Answer(word("kernel"));
    let words: Vec<String> = serde_json::from_value(said["docker"].clone()).unwrap_or_default();
    facts.docker = Asked::Answer(divvy_doctor::facts::programs::Docker {
        version: words.first().cloned().unwrap_or_default(),
        default_runtime: words.get(1).cloned().unwrap_or_default(),
        runtimes: words,
    });
    facts.runtime_test = Asked::Answer(divvy_doctor::facts::programs::RuntimeTest {
        program: word("program"),
        outcome: RuntimeOutcome::Failed(word("kernel")),
    });
    judged(&facts);
    true
}

/// The input is one object with the pages of the API server.
fn objects(bytes: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct All {
        nodes: ListPage<divvy_doctor::facts::cluster::CheckedNode>,
        pods: ListPage<divvy_doctor::facts::cluster::CheckedPod>,
        #[serde(default)]
        sets: ListPage<divvy_doctor::facts::cluster::DaemonSet>,
        #[serde(default)]
        classes: ListPage<divvy_doctor::facts::cluster::RuntimeClass>,
    }
    let Ok(all) = serde_json::from_slice::<All>(bytes) else {
        return false;
    };
    let machine = Told::read(&written(&kinds::none())).expect("a machine");
    let mut facts = Facts::of(&machine).expect("a machine");
    facts.node = false;
    facts.cluster = Asked::Answer(ClusterFacts {
        nodes: all.nodes.items,
        pods: all.pods.items,
        daemon_sets: all.sets.items,
        runtime_classes: all.classes.items,
        refused: BTreeMap::new(),
    });
    judged(&facts);
    true
}

fn log(bytes: &[u8]) -> bool {
    static KNOWLEDGE: LazyLock<Knowledge> = LazyLock::new(|| Knowledge::load().expect("the files are valid"));
    let mut log = ExplainedLog::new(&KNOWLEDGE);
    for line in bytes.split(|byte| *byte == b'\n') {
        log.read(&String::from_utf8_lossy(line));
    }
    assert!(plain(&log.text()), "{:?}", log.text());
    let lines = bytes.split(|byte| *byte == b'\n').count();
    assert!(log.found().iter().all(|found| found.number <= lines && found.count <= lines));
    !log.found().is_empty()
}

/// The input is a count and one line.
fn last_words(bytes: &[u8]) -> bool {
    let line = last_line(bytes);
    assert!(!line.is_empty() && !line.contains('\n'), "{line:?}");
    text(bytes).is_some_and(|text| {
        let calls = filter_calls(text);
        assert!(calls == 0 || text.contains(&calls.to_string()), "{calls}");
        calls > 0 || text.contains(&line)
    })
}

/// Rule: each line has the same meaning, whatever the other lines contain.
fn minors(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let all = proc::mig_minors(text);
    for (name, minor) in &all {
        let said = text.lines().any(|line| proc::mig_minors(line).get(name) == Some(minor));
        assert!(said, "{name} {minor}");
    }
    !all.is_empty()
}

fn cgroups(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let owner = cgroup::owner_of_process(text);
    let is_name = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    if let Some(owner) = &owner {
        assert!(
            is_name(&owner.pod) && owner.container.as_deref().is_none_or(is_name),
            "{owner:?}"
        );
    }
    owner.is_some()
}

/// The input is `cgroup.events` and `pids.current`. Rule: a file without the information yields none.
fn cgroup_files(bytes: &[u8]) -> bool {
    let Some((events, current)) = text(bytes).and_then(|text| text.split_once('\u{1e}')) else {
        return false;
    };
    let (populated, counted) = (cgroup::is_populated(events), cgroup::has_processes(current));
    assert!(populated.is_none() || events.contains(if populated == Some(true) { '1' } else { '0' }));
    let number = current.contains(|c: char| c.is_ascii_digit());
    assert!(
        counted != Some(true) || number && current.contains(|c: char| ('1'..='9').contains(&c)),
        "{current:?}"
    );
    assert!(
        counted != Some(false) || number && !current.contains(|c: char| ('1'..='9').contains(&c)),
        "{current:?}"
    );
    populated.is_some() && counted.is_some()
}

/// Rule: the current answer of the probe results in specs that engines accept.
fn snapshot(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let machine = kinds::debian();
    match live::registry(&machine, text, "/", Extras::default()) {
        Ok(live) => {
            let specs: Vec<&Spec> = live
                .registry
                .files()
                .iter()
                .filter_map(|file| file.spec.as_ref().ok())
                .collect();
            specs.iter().for_each(|spec| fits(spec, &machine));
            assert!(live.notes.iter().all(|note| plain(note)), "{:?}", live.notes);
            !specs.is_empty()
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}
