//! `divvy smi` with a simulated driver.

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use serde_json::{Value, json};

use crate::cli::{divvy, stderr, stdout};
use crate::cluster::programs;

const MACHINE: &str = "v = 1\n[[node]]\nname = \"n\"\ndriver = \"470.82.01\"\n\
    [[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nmemory_mib = 40960\nuuid = \"GPU-a\"\nutilization = 37\nhealth = { ecc_errors = [0, 2] }\n\
    [[node.gpu]]\nmodel = \"Tesla T4\"\nmemory_mib = 15360\nuuid = \"GPU-b\"\ncc = \"7.5\"\nsms = 40\n";

pub(crate) const UID: &str = "0b1f6d3e-5a4c-4f52-9d4e-1c2b3a495867";
pub(crate) const OTHER_UID: &str = "5c2e8f10-1111-4222-8333-944444444444";

/// A machine without a cluster.
pub(crate) struct Machine {
    directory: tempfile::TempDir,
    library: String,
}

impl Machine {
    /// A machine on which these changes were made to the description.
    pub(crate) fn new(changes: &Value) -> Machine {
        let directory = tempfile::tempdir().expect("a directory");
        let library = programs().nvml_sim.display().to_string();
        let machine = Machine { directory, library };
        fs::write(machine.path("machine.toml"), MACHINE).expect("written");
        fs::write(machine.path("control.state"), changes.to_string()).expect("written");
        machine
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A process with its program and its cgroup.
    pub(crate) fn process(&self, pid: u32, program: &[u8], cgroup: &str) {
        let directory = self.path(&format!("root/proc/{pid}"));
        fs::create_dir_all(&directory).expect("created");
        fs::write(directory.join("cmdline"), program).expect("written");
        fs::write(directory.join("cgroup"), format!("0::{cgroup}\n")).expect("written");
    }

    /// A record of the agent, in a file of this name.
    pub(crate) fn record(&self, uid: &str, container: &str, file: &str) {
        let directory = self.path("state/grants");
        fs::create_dir_all(&directory).expect("created");
        let record = json!({
            "v": 1, "namespace": "research", "name": "trainer-0", "uid": uid, "container": container, "cdi": null, "unitMiB": 1024,
            "gpus": [], "containerGpus": [], "bootId": "b",
        });
        fs::write(directory.join(file), record.to_string()).expect("written");
    }

    /// Divide the first GPU into two MIG devices.
    pub(crate) fn divide(&self) {
        let parts = "mig = [{ gpu_instance = 2, compute_instance = 0, profile = 1 }, { gpu_instance = 7, compute_instance = 0, profile = 0 }]\n";
        let description = fs::read_to_string(self.path("machine.toml")).expect("read");
        let description = description.replacen("health =", &format!("{parts}health ="), 1);
        fs::write(self.path("machine.toml"), description).expect("written");
    }

    fn smi(&self, args: &[&str]) -> Output {
        self.divvy("smi", args)
    }

    /// Run a command that asks this machine's probe.
    pub(crate) fn divvy(&self, command: &str, args: &[&str]) -> Output {
        let [root, state, description, control] =
            ["root", "state", "machine.toml", "control"].map(|name| self.path(name).display().to_string());
        let own = [
            command,
            "--nvml-library",
            &self.library,
            "--sys-root",
            &root,
            "--state-dir",
            &state,
        ];
        let env = [("DIVVY_NVML_SIM", description.as_str()), ("DIVVY_NVML_SIM_CONTROL", &control)];
        divvy(&[&own, args].concat(), &env)
    }
}

pub(crate) fn cgroup_of(uid: &str) -> String {
    format!("/kubepods/burstable/pod{uid}/{}", "a".repeat(64))
}

/// The table without the time.
fn table(output: &Output) -> String {
    let text = stdout(output);
    let (_, table) = text.split_once('\n').expect("the time");
    table.to_owned()
}

#[test]
fn the_table_has_the_gpus_and_the_processes_with_their_pods() {
    let machine = Machine::new(&json!({"gpus": {
        "0": {"processes": {"7": 9000, "9": 31}, "graphics": {"9": true}, "gauges": {"compute_mode": 3, "fan_percent": 30}},
        "1": {"processes": {"8": 2048}},
    }}));
    machine.process(7, b"/opt/conda/envs/research/bin/python3\0train.py\0", &cgroup_of(UID));
    machine.process(8, b"py\x1b[31m\n|\0", &cgroup_of(OTHER_UID));
    machine.process(9, b"/usr/lib/xorg/Xorg\0", "/user.slice");
    machine.record(UID, "main", &format!("{UID}_main.json"));
    machine.record(UID, "side", &format!("{UID}_side.json"));
    machine.record(OTHER_UID, "main", "of-another-pod.json");
    let output = machine.smi(&[]);
    assert!(output.status.success(), "{}", stderr(&output));
    let expected = "\
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 470.82.01    Driver Version: 470.82.01    CUDA Version: 11.4     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|                               |                      |               MIG M. |
|===============================+======================+======================|
|   0  NVIDIA A100-SXM...  On   | 00000000:80:00.0 Off |                    2 |
| 30%   35C    P0   147W / 324W |   9031MiB / 40960MiB |     37%   E. Process |
|                               |                      |                  N/A |
+-------------------------------+----------------------+----------------------+
|   1  Tesla T4            On   | 00000000:81:00.0 Off |                  N/A |
| N/A   35C    P8    16W / 120W |   2048MiB / 15360MiB |      0%      Default |
|                               |                      |                  N/A |
+-------------------------------+----------------------+----------------------+
                                                                               
+-----------------------------------------------------------------------------+
| Processes:                                                                  |
|  GPU   GI   CI        PID   Type   Process name                  GPU Memory |
|        ID   ID                                                   Usage      |
|=============================================================================|
|    0   N/A  N/A         7      C   ...envs/research/bin/python3     9000MiB |
|    0   N/A  N/A         9    C+G   /usr/lib/xorg/Xorg                 31MiB |
|    1   N/A  N/A         8      C   py?[31m?|                        2048MiB |
+-----------------------------------------------------------------------------+
                                                                               
+-----------------------------------------------------------------------------+
| Pods:                                                                       |
|  GPU   GI   CI        PID   Namespace/Pod/Container                         |
|        ID   ID                                                              |
|=============================================================================|
|    0   N/A  N/A         7   research/trainer-0/main,side                    |
|    1   N/A  N/A         8   UID 5c2e8f10-1111-4222-8333-944444444444        |
+-----------------------------------------------------------------------------+
";
    assert_eq!(table(&output), expected);
    let record = format!("of-another-pod.json is ignored: it is the record {OTHER_UID}_main.json\n");
    assert!(stderr(&output).contains(&record), "{}", stderr(&output));

    let value: Value = serde_json::from_str(&stdout(&machine.smi(&["-o", "json"]))).expect("JSON");
    let process = json!({
        "gpu": 0, "instances": null, "pid": 7, "kind": "C", "name": "/opt/conda/envs/research/bin/python3", "usedMiB": 9000,
        "pod": {"uid": UID, "namespace": "research", "name": "trainer-0", "containers": ["main", "side"]},
    });
    assert_eq!(value["processes"][0], process);
    assert_eq!(
        (&value["gpus"][1]["fan"], &value["gpus"][0]["fan"]),
        (&Value::Null, &json!(30))
    );
}

/// The other GPU still has its rows in the table.
#[test]
fn a_lost_gpu_has_a_line_above_the_table() {
    let machine = Machine::new(&json!({"gpus": {"0": {"lost": true}}}));
    let output = machine.smi(&[]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    let line = "Unable to determine the device handle for GPU 0: GPU is lost.  Reboot the system to recover this GPU\n";
    let rows = "\
|===============================+======================+======================|
|   1  Tesla T4            On   | 00000000:81:00.0 Off |                  N/A |
";
    assert!(text.starts_with(line) && text.contains(rows), "{text}");
    let value: Value = serde_json::from_str(&stdout(&machine.smi(&["-o", "json"]))).expect("JSON");
    let error = value["gpus"][0]["error"].as_str().unwrap_or_default();
    assert!(error.contains("fell off the bus"), "{value}");

    let machine = Machine::new(&json!({"gpus": {"0": {"lost": true}, "1": {"lost": true}}}));
    let output = machine.smi(&[]);
    let both = [line, &line.replace("GPU 0:", "GPU 1:"), "\n\n"].concat();
    assert_eq!((stdout(&output), output.status.code()), (both, Some(15)));
}

#[test]
fn the_table_shows_a_mig_devices_memory_and_its_processes() {
    let machine = Machine::new(&json!({"gpus": {
        "0": {"processes": {"7": 1000, "8": 30}, "mig_of": {"7": 0, "8": 1}},
    }}));
    machine.divide();
    let output = machine.smi(&[]);
    assert!(output.status.success(), "{}", stderr(&output));
    insta::assert_snapshot!(table(&output));
}

/// The program says what to type.
#[test]
fn without_the_agents_records_pods_are_shown_by_uid() {
    let machine = Machine::new(&json!({"gpus": {"1": {"processes": {"8": 2048}}}}));
    machine.process(8, b"python3\0", &cgroup_of(UID));
    let output = machine.smi(&[]);
    assert!(stdout(&output).contains(&format!("UID {UID}")), "{}", stdout(&output));
    let text = stderr(&output);
    for part in ["so pods are shown by UID", "No such file or directory", "--state-dir"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn the_probe_of_the_agent_is_asked_if_it_runs() {
    let machine = Machine::new(&json!({}));
    // A file in place of the socket: the command does not start another probe.
    fs::create_dir_all(machine.path("state/probe")).expect("created");
    fs::write(machine.path("state/probe/probe.sock"), "").expect("written");
    let output = machine.smi(&[]);
    let text = stderr(&output);
    assert!(
        output.status.code() == Some(1) && text.contains("state/probe/probe.sock"),
        "{text}"
    );
}

#[test]
fn what_is_missing_is_told_with_what_to_type() {
    let machine = Machine::new(&json!({}));
    for (args, parts) in [
        (
            ["--probe", "/nowhere/divvy-probe"],
            [
                "cannot start /nowhere/divvy-probe",
                "give the path of divvy-probe with --probe",
            ],
        ),
        (
            ["--nvml-library", "/nowhere/libnvidia-ml.so.1"],
            ["which names /nowhere/", "type divvy doctor to find the cause"],
        ),
        // A program that ends, and says why.
        (
            ["--probe", "/bin/ls"],
            [
                "the probe ended (exit status: 2): Try ",
                "give the path of divvy-probe with --probe",
            ],
        ),
    ] {
        // A flag may be given once.
        let state = machine.path("state").display().to_string();
        let output = divvy(&[&["smi", "--state-dir", &state], &args[..]].concat(), &[]);
        let text = stderr(&output);
        assert_eq!((output.status.code(), stdout(&output)), (Some(1), String::new()));
        for part in [&["the GPUs could not be read"], &parts[..]].concat() {
            assert_eq!(text.matches(part).count(), 1, "{args:?}: {text}");
        }
        assert_eq!(text.lines().count(), 1, "{args:?}: {text}");
    }
}
