//! Files, sockets, and programs that never answer, never end, or lead elsewhere. Every command that reads a machine reports them
//! and terminates.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::cli::{command, stderr, stdout};
use divvy_testkit::machine::{MachineFiles, kinds};

/// The time limit of a command. On any machine, a command that terminates at all does so much earlier.
const END: Duration = Duration::from_secs(30);
/// The memory limit of a command in KiB. It suffices for the program, its libraries, and the data that the program may have in
/// memory at the same time.
const MEMORY: &str = "2097152";

/// Run a command with limited memory. If the command does not terminate, kill it and fail the test.
fn ends(mut command: Command, what: &str) -> Output {
    let mut bounded = Command::new("timeout");
    bounded.args([
        "-k",
        "1",
        "30",
        "sh",
        "-c",
        &format!("ulimit -v {MEMORY}; exec \"$0\" \"$@\""),
    ]);
    bounded.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => bounded.env(name, value),
            None => bounded.env_remove(name),
        };
    }
    command = bounded;
    let began = Instant::now();
    let output = command.stdin(Stdio::null()).output().expect("it runs");
    let took = began.elapsed();
    assert!(
        !matches!(output.status.code(), None | Some(124 | 134 | 137)) && took < END,
        "{what}: {:?} after {took:?}: {}",
        output.status,
        stderr(&output)
    );
    output
}

fn fifo(path: &Path) {
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o644),
        0,
    )
    .expect("a pipe");
}

/// Make a sparse file that is larger than any program may read. It takes no space on the disk.
fn sparse(path: &Path) {
    fs::File::create(path)
        .and_then(|file| file.set_len(2 << 30))
        .expect("a sparse file");
}

/// Make a machine on which every check has something to read.
fn whole() -> MachineFiles {
    let mut machine = kinds::debian();
    let lib = "/usr/lib/x86_64-linux-gnu";
    machine
        .file("/proc/1/comm", "kubelet\n")
        .file("/proc/1/cmdline", "kubelet\0--config\0/var/lib/kubelet/config.yaml\0")
        .file("/proc/1/stat", "1 (kubelet) S 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 500\n")
        .file("/proc/2/comm", "containerd\n")
        .file("/proc/2/cmdline", "containerd\0")
        .file("/proc/2/stat", "2 (containerd) S 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 500\n")
        .file("/proc/stat", "cpu 1\nbtime 1700000000\n")
        .file("/proc/devices", "Character devices:\n195 nvidia\n510 nvidia-uvm\n\nBlock devices:\n8 sd\n")
        .file("/proc/modules", "overlay 1 0 - Live\nbr_netfilter 1 0 - Live\n")
        .file("/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
        .file("/proc/sys/kernel/osrelease", "6.1.0\n")
        .file("/etc/os-release", "ID=debian\nVERSION_ID=\"12\"\n")
        .file("/etc/modules-load.d/k8s.conf", "overlay\nbr_netfilter\n")
        .file("/var/lib/kubelet/config.yaml", "cgroupDriver: systemd\n")
        .file("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", "{}")
        .file("/var/lib/dpkg/status", "Package: nvidia-container-toolkit\nStatus: install ok installed\nVersion: 1.17.0-1\n")
        .file("/var/log/kern.log", "nothing\n")
        .file("/etc/containerd/config.toml", "version = 2\n")
        .file("/etc/docker/daemon.json", "{}\n")
        .file("/etc/crio/crio.conf", "[crio]\n")
        .file("/etc/crio/crio.conf.d/10.conf", "[crio]\n")
        .file("/etc/nvidia-container-runtime/config.toml", "")
        .file(
            "/etc/cdi/nvidia.json",
            format!(r#"{{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{{"name":"0","containerEdits":{{"mounts":[{{"hostPath":"{lib}/libcuda.so.550.54.15","containerPath":"/x"}}]}}}}]}}"#),
        )
        .file("/etc/kubernetes/manifests/kube-scheduler.yaml", "spec:\n  containers:\n  - command: [kube-scheduler, --config=/etc/kubernetes/s.yaml]\n    image: k:v1.31.0\n    volumeMounts: [{name: s, mountPath: /etc/kubernetes/s.yaml}]\n  volumes: [{name: s, hostPath: {path: /etc/kubernetes/s.yaml}}]\n")
        .file("/etc/kubernetes/s.yaml", "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n")
        .file("/sys/devices/pci0000:00/0000:06:00.0/vendor", "0x10de\n")
        .file("/sys/devices/pci0000:00/0000:06:00.0/class", "0x030200\n");
    machine
}

fn laid_out(machine: &MachineFiles) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    machine.write_below(directory.path()).expect("laid out");
    directory
}

/// Return every regular file below a directory.
fn plain_files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).expect("a directory") {
            let entry = entry.expect("an entry");
            let kind = entry.file_type().expect("its kind");
            match kind.is_dir() {
                true => directories.push(entry.path()),
                false if kind.is_file() => found.push(entry.path()),
                false => {}
            }
        }
    }
    found.sort();
    found
}

/// The commands that read a machine, each with its flag for the root.
const READERS: [&[&str]; 6] = [
    &["doctor", "--timeout", "2s", "--root"],
    &["cdi", "generate", "--sys-root"],
    &["cdi", "list", "--sys-root"],
    &["configure", "containerd", "--dry-run", "--root"],
    &["configure", "docker", "--dry-run", "--root"],
    &["configure", "crio", "--dry-run", "--root"],
];

fn all_look_at(root: &Path, what: &str) {
    let shown = root.display().to_string();
    for words in READERS {
        let output = ends(command(&[words, &[&shown]].concat(), &[]), &format!("{words:?}, {what}"));
        assert!(
            !stdout(&output).contains("panicked") && !stderr(&output).contains("panicked"),
            "{}",
            stderr(&output)
        );
        assert!(!stdout(&output).contains("did not end within"), "{what}: {}", stdout(&output));
    }
}

/// Each file that a command reads is replaced with a pipe or an endless file.
#[test]
fn pipes_and_endless_files_delay_no_command() {
    for (what, put) in [("pipes", fifo as fn(&Path)), ("endless files", sparse)] {
        let directory = laid_out(&whole());
        for file in plain_files(directory.path()) {
            fs::remove_file(&file).expect("removed");
            put(&file);
        }
        all_look_at(directory.path(), &format!("all files are {what}"));
    }
}

#[test]
fn one_pipe_or_endless_file_among_what_is_read_holds_nobody_up() {
    let directory = laid_out(&whole());
    let root = directory.path().display().to_string();
    for file in plain_files(directory.path()) {
        // Only the names and the first bytes of the driver's libraries are read.
        if file.display().to_string().contains("/usr/") {
            continue;
        }
        let kept = fs::read(&file).expect("read");
        for put in [fifo as fn(&Path), sparse] {
            fs::remove_file(&file).expect("removed");
            put(&file);
            let what = file.display().to_string();
            let output = ends(command(&["doctor", "--timeout", "5s", "--root", &root], &[]), &what);
            assert!(!stdout(&output).contains("did not end within"), "{what}: {}", stdout(&output));
        }
        fs::remove_file(&file).expect("removed");
        fs::write(&file, kept).expect("written");
    }
}

#[test]
fn links_that_go_round_hold_nobody_up() {
    let mut machine = whole();
    machine
        .link("/usr/lib/x86_64-linux-gnu/round", ".")
        .link("/usr/lib/x86_64-linux-gnu/libcuda.so.9", "libcuda.so.8")
        .link("/usr/lib/x86_64-linux-gnu/libcuda.so.8", "libcuda.so.9")
        .link("/usr/bin/nvidia-persistenced", "nvidia-persistenced")
        .link("/etc/cdi/round.json", "round.json")
        .link("/etc/cdi/directory", "..")
        .link("/var/run/cdi", "/var/run/cdi")
        .link("/sys/bus/pci/devices/0000:07:00.0", "..")
        .link("/proc/driver/nvidia/gpus/round", "..")
        .link("/proc/3", "..");
    let directory = laid_out(&machine);
    all_look_at(directory.path(), "links go round");
}

/// Links of a copied machine point into that machine, not to files of this machine.
#[test]
fn nothing_outside_of_a_copied_machine_is_read() {
    if !divvy_skip::program("strace", "strace") {
        return;
    }
    let outside = tempfile::tempdir().expect("a directory");
    let secret = outside.path().join("secret-of-the-host");
    fs::create_dir_all(&secret).expect("made");
    fs::write(secret.join("nvidia.json"), "{}").expect("written");
    let up = "../../../../../../../../../..";
    for (absolute, what) in [(true, "absolute"), (false, "relative")] {
        let directory = laid_out(&whole());
        let target = if absolute {
            secret.clone()
        } else {
            PathBuf::from(format!("{up}{}", secret.display()))
        };
        // Replace each file by a link to a file outside, and then each directory.
        for file in plain_files(directory.path()) {
            fs::remove_file(&file).expect("removed");
            symlink(target.join("nvidia.json"), &file).expect("linked");
        }
        no_reader_opens(directory.path(), &secret, &format!("files are {what} links"));
        let directory = laid_out(&whole());
        for path in [
            "etc/cdi",
            "etc/containerd",
            "etc/crio",
            "proc/driver/nvidia/gpus",
            "var/lib/kubelet",
            "usr/lib/x86_64-linux-gnu",
            "sys/bus/pci/devices",
        ] {
            fs::remove_dir_all(directory.path().join(path)).expect("removed");
            symlink(&target, directory.path().join(path)).expect("linked");
        }
        fs::create_dir_all(directory.path().join("var/run")).expect("made");
        symlink(&target, directory.path().join("var/run/cdi")).expect("linked");
        no_reader_opens(directory.path(), &secret, &format!("directories are {what} links"));
    }
    // A spec with mounts whose paths lead up out of the machine.
    let mut machine = whole();
    let path = format!("{up}{}/nvidia.json", secret.display());
    machine.file(
        "/etc/cdi/up.json",
        format!(r#"{{"cdiVersion":"0.5.0","kind":"a.com/b","devices":[{{"name":"0","containerEdits":{{"mounts":[{{"hostPath":"/{path}","containerPath":"/x"}}]}}}}]}}"#),
    );
    let directory = laid_out(&machine);
    no_reader_opens(directory.path(), &secret, "a spec's paths lead up");
}

fn no_reader_opens(root: &Path, secret: &Path, what: &str) {
    let shown = root.display().to_string();
    for words in READERS {
        let log = root.with_extension("strace");
        let mut traced = Command::new("strace");
        traced
            .args(["-f", "-qq", "-y", "-s", "4096", "-e", "trace=%file", "-o"])
            .arg(&log);
        traced.arg(env!("CARGO_BIN_EXE_divvy")).args(words).arg(&shown);
        let output = ends(traced, &format!("{words:?}, {what}"));
        let text = fs::read_to_string(&log).expect("a log");
        fs::remove_file(&log).expect("removed");
        assert!(text.contains(&shown), "{words:?}, {what}: {text}{}", stderr(&output));
        // The link's text may be read, but not its target on this machine.
        let secret = secret.display().to_string();
        let opened: Vec<&str> = text
            .lines()
            .filter(|line| line.contains(&secret) && !line.contains("readlink"))
            .collect();
        assert!(opened.is_empty(), "{words:?}, {what}: {opened:#?}");
    }
}

/// The other specs are listed.
#[test]
fn a_pipe_or_device_among_specs_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let specs = directory.path().join("cdi");
    fs::create_dir(&specs).expect("made");
    fifo(&specs.join("pipe.json"));
    symlink("/dev/zero", specs.join("zero.yaml")).expect("linked");
    sparse(&specs.join("large.json"));
    drop(UnixListener::bind(specs.join("socket.json")).expect("bound"));
    fs::write(
        specs.join("good.json"),
        r#"{"cdiVersion":"0.5.0","kind":"a.com/b","devices":[{"name":"0","containerEdits":{"env":["A=b"]}}]}"#,
    )
    .expect("written");
    let shown = specs.display().to_string();
    let listed = ends(command(&["cdi", "list", "--spec-dir", &shown, "-o", "name"], &[]), "cdi list");
    assert_eq!(stdout(&listed), "a.com/b=0\n", "{}", stderr(&listed));
    let judged = ends(command(&["cdi", "validate", &shown], &[]), "cdi validate");
    assert_eq!(judged.status.code(), Some(1));
    for name in ["pipe.json", "zero.yaml", "socket.json"] {
        for said in [stderr(&listed), stdout(&judged)] {
            let line = said.lines().find(|line| line.contains(name)).unwrap_or_default();
            assert!(line.contains("it is a device, a socket or a pipe"), "{name}: {said}");
        }
    }
    assert!(stdout(&judged).contains("large.json: error") && stdout(&judged).contains("more than 4194304 bytes"));
}

/// A pipe that the shell provides is read.
#[test]
fn a_pipe_that_is_named_for_a_file_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let pipe = directory.path().join("config.toml");
    fifo(&pipe);
    let shown = pipe.display().to_string();
    for words in [
        &["runtime-config", "--config-file", &shown][..],
        &["cdi", "validate", &shown],
        &["cdi", "transform", "--from", "/a", "--to", "/b", "-i", &shown],
        &["configure", "docker", "--dry-run", "--config", &shown],
        &["configure", "containerd", "--dry-run", "--config", &shown],
    ] {
        let output = ends(command(words, &[]), &format!("{words:?}"));
        let said = format!("{}{}", stdout(&output), stderr(&output));
        assert!(
            !output.status.success() && said.contains(&shown) && said.contains("a pipe"),
            "{words:?}: {said}"
        );
    }
    assert!(
        fs::symlink_metadata(&pipe).is_ok_and(|found| found.file_type().is_fifo()),
        "and is left as it is"
    );
    let shell = Command::new("bash")
        .args([
            "-c",
            "exec \"$0\" runtime-config --config-file <(echo 'disable-require = true')",
        ])
        .arg(env!("CARGO_BIN_EXE_divvy"))
        .output()
        .expect("it runs");
    assert_eq!(stdout(&shell), "disable-require = true\n", "{}", stderr(&shell));
}

/// The spec is not cut off.
#[test]
fn a_spec_too_long_for_standard_input_is_refused() {
    let mut text = "cdiVersion: 0.5.0\nkind: a.com/b\ndevices:\n- name: \"0\"\n  containerEdits: {env: [A=b]}\n".to_owned();
    // A truncated spec may still be a valid spec.
    while text.len() <= 4 * 1024 * 1024 {
        text.push_str("# a comment\n");
    }
    text.push_str("- name: \"1\"\n  containerEdits: {env: [A=b]}\n");
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("long.yaml");
    fs::write(&file, text).expect("written");
    for words in [
        &["cdi", "validate", "-"][..],
        &["cdi", "transform", "--from", "/a", "--to", "/b"],
    ] {
        let mut asked = command(words, &[]);
        let output = asked.stdin(fs::File::open(&file).expect("opened")).output().expect("it runs");
        let said = format!("{}{}", stdout(&output), stderr(&output));
        assert!(
            !output.status.success() && said.contains("more than 4194304 bytes"),
            "{words:?}: {said}"
        );
    }
}

#[test]
fn a_log_without_an_end_of_line_is_read_in_little_memory() {
    let directory = tempfile::tempdir().expect("a directory");
    let log = directory.path().join("log");
    sparse(&log);
    let shown = log.display().to_string();
    let output = ends(command(&["doctor", "--explain", &shown], &[]), "doctor --explain");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(
        stdout(&output).starts_with("The only line does not have a known error text"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn an_extender_that_accepts_and_never_answers_is_a_finding() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let output = ends(
        command(&["doctor", "--only", "K12", "--timeout", "1s", "--extender", &url], &[]),
        "doctor --extender",
    );
    assert!(
        stdout(&output).contains("does not answer: it did not answer within 1 s"),
        "{}{}",
        stdout(&output),
        stderr(&output)
    );
}

/// A kubeconfig can be a pipe, and its credentials can come from a program.
/// The cluster does not answer in time.
#[test]
fn a_hanging_cluster_is_said_with_every_check() {
    let directory = tempfile::tempdir().expect("a directory");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let server = format!("http://{}", listener.local_addr().expect("an address"));
    let kubeconfig = |name: &str, user: &str| {
        let path = directory.path().join(name);
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: c, cluster: {{server: \"{server}\"}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\nusers: [{{name: u, user: {user}}}]\n"
        );
        fs::write(&path, text).expect("written");
        path
    };
    let silent = kubeconfig("silent", "{}");
    let hanging = kubeconfig(
        "hanging",
        "{exec: {apiVersion: client.authentication.k8s.io/v1, command: sleep, args: [\"60\"], interactiveMode: Never}}",
    );
    let pipe = directory.path().join("pipe");
    fifo(&pipe);
    for path in [silent, hanging, pipe] {
        let shown = path.display().to_string();
        let words = [
            "doctor",
            "--cluster",
            "--only",
            "K01,K16",
            "--timeout",
            "1s",
            "--kubeconfig",
            &shown,
        ];
        let output = ends(command(&words, &[]), &shown);
        let text = stdout(&output);
        assert!(
            text.contains("SKIP K01") && text.contains("within 1 s"),
            "{shown}: {text}{}",
            stderr(&output)
        );
    }
}

/// `divvy doctor` ends in each of three cases: the settings file is a pipe, the runtime prints without end, or Docker's socket
/// never answers. The test runs on the machine itself, with a private `/etc`.
#[test]
fn doctor_on_the_machine_itself_waits_for_nobody() {
    let directory = tempfile::tempdir().expect("a directory");
    for name in ["upper/nvidia-container-runtime", "work", "bin"] {
        fs::create_dir_all(directory.path().join(name)).expect("made");
    }
    fifo(&directory.path().join("upper/nvidia-container-runtime/config.toml"));
    let program = directory.path().join("bin/divvy");
    if fs::hard_link(env!("CARGO_BIN_EXE_divvy"), &program).is_err() {
        fs::copy(env!("CARGO_BIN_EXE_divvy"), &program).expect("copied");
    }
    let runtime = directory.path().join("bin/divvy-runtime");
    fs::write(&runtime, "#!/bin/sh\nexec cat /dev/zero\n").expect("written");
    fs::set_permissions(&runtime, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("executable");
    let within = |script: &str, only: &str| {
        let mut asked = Command::new("unshare");
        asked
            .args(["-m", "sh", "-ec", script, "sh"])
            .arg(directory.path())
            .arg(&program)
            .arg(only);
        asked
    };
    let overlay = "mount -t overlay -o lowerdir=/etc,upperdir=\"$1/upper\",workdir=\"$1/work\" none /etc";
    let possible = within(&format!("{overlay}; test -p /etc/nvidia-container-runtime/config.toml"), "").output();
    if !possible.is_ok_and(|output| output.status.success()) {
        return divvy_skip::skipped("no overlay can be mounted over /etc: that takes root, in a mount namespace");
    }
    // A driver is loaded, as far as files say.
    let doctor = "mount -t tmpfs none /sys/module; mkdir /sys/module/nvidia; echo 550.54.15 > /sys/module/nvidia/version; \
                  exec \"$2\" doctor --timeout 2s --only \"$3\"";
    let output = ends(
        within(&format!("{overlay}; {doctor}"), "K18"),
        "a pipe in place of config.toml",
    );
    let text = stdout(&output);
    assert!(
        text.contains("K18") && text.contains("config.toml") && text.contains("a pipe"),
        "{text}{}",
        stderr(&output)
    );
    // Without --only, the runtime is tried as well, and it prints without end.
    let output = ends(within(doctor, "K18"), "a runtime that prints without end");
    let text = stdout(&output);
    assert!(
        text.contains("K18") && text.contains("printed more than"),
        "{text}{}",
        stderr(&output)
    );
    // Docker's socket accepts, and says nothing.
    fs::create_dir(directory.path().join("run")).expect("made");
    let socket = UnixListener::bind(directory.path().join("run/docker.sock")).expect("bound");
    let hidden = "mount --bind \"$1/run\" /run";
    let output = ends(within(&format!("{hidden}; {doctor}"), "R06,R07"), "Docker's socket");
    let text = stdout(&output);
    assert!(text.contains("R06"), "{text}{}", stderr(&output));
    drop(socket);
}
