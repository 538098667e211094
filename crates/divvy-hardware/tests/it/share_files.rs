//! The file systems for the files of shares. They are mounted in mount namespaces of the tests, which takes root.

use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use divvy_hardware::FailureCode;
use divvy_hardware::client::{ProbeClient, ProbeSource};
use divvy_hardware::protocol::ShareName;
use rustix::fs::{FlockOperation, XattrFlags, flock, fsetxattr};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::support::{GPU0, Lines, Machine, PROBE, Running, TWO, connect, eventually, fast, sim_library};

const POD: &str = "6b8e5a3c-0000-4000-8000-000000000001";
const LIMITS_BYTES: usize = 256;
const USAGE_BYTES: usize = 16_448;
/// What the two files take, whole pages.
const PAGES: u64 = 6;

/// A probe in a mount namespace of its own.
struct Host {
    // Dropped first, and its mounts with it.
    probe: Running,
    machine: Machine,
}

impl Host {
    /// Record a skip and return `None` if this machine does not let the test mount.
    fn start() -> Option<Host> {
        let machine = Machine::new(TWO);
        let shares = machine.path("state/shares");
        let mut command = isolated()?;
        // As an agent starts it: the agent is in the same mount namespace.
        command.args([PROBE, "--exit-with-stdin", "--share-files"]).arg(shares);
        let probe = listen(&machine, command);
        Some(Host { machine, probe })
    }

    /// The directory of a share as the probe sees it.
    fn seen(&self, pod: &str, gpu: &str) -> PathBuf {
        below(self.probe.0.id(), &self.machine.path("state/shares").join(pod).join(gpu))
    }

    fn lines(&self) -> Lines {
        Lines::new(connect(&self.machine.path("s")))
    }

    fn ask(&self, op: &str, pod: &str, gpu: &str) -> Value {
        self.lines().ask(&request(op, pod, gpu))
    }

    fn is_mounted(&self, gpu: &str) -> usize {
        mounts(self.probe.0.id(), gpu)
    }
}

/// Why an emulator cannot run a test here.
const NO_MOUNTS: &str = "the emulator has no mount API (fsopen, move_mount)";

/// Return the command that runs its arguments in a mount namespace of their own.
fn isolated() -> Option<Command> {
    if !divvy_skip::root("mount a file system") || divvy_skip::emulated(NO_MOUNTS) {
        return None;
    }
    let command = || {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private"]);
        command
    };
    if command().arg("true").status().is_ok_and(|status| status.success()) {
        return Some(command());
    }
    divvy_skip::skipped("nothing can be mounted in a mount namespace");
    None
}

fn listen(machine: &Machine, mut command: Command) -> Running {
    command.envs(machine.env()).arg("--nvml-library").arg(sim_library());
    command.arg("--sys-root").arg(machine.path("root")).stdin(Stdio::piped());
    command.arg("--listen").arg(format!("unix:{}", machine.path("s").display()));
    let running = Running(command.spawn().expect("the probe starts"));
    drop(connect(&machine.path("s")));
    running
}

fn request(op: &str, pod: &str, gpu: &str) -> String {
    json!({"v": 1, "id": 1, "op": op, "pod": pod, "gpu": gpu}).to_string()
}

fn done() -> Value {
    json!({"id": 1, "ok": {}})
}

/// Return a path as a process sees it.
fn below(pid: u32, path: &Path) -> PathBuf {
    Path::new(&format!("/proc/{pid}/root")).join(path.strip_prefix("/").expect("absolute"))
}

/// Return how many file systems a process sees at the directory of a GPU.
fn mounts(pid: u32, gpu: &str) -> usize {
    let text = fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("mounts");
    let is_at = |line: &&str| line.split(' ').nth(4).is_some_and(|at| at.ends_with(gpu));
    text.lines().filter(is_at).count()
}

/// Make the files as the agent does, and open the one that the pod writes.
fn files(directory: &Path) -> File {
    fs::write(directory.join("limits"), [1; LIMITS_BYTES]).expect("limits");
    fs::write(directory.join("usage"), [1; USAGE_BYTES]).expect("usage");
    let usage = OpenOptions::new().read(true).write(true).open(directory.join("usage"));
    usage.expect("opened")
}

fn page() -> u64 {
    rustix::param::page_size() as u64
}

fn allocated(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).expect("listed");
    entries
        .map(|entry| entry.expect("entry").metadata().expect("data").blocks() * 512)
        .sum()
}

#[test]
fn what_a_pod_does_to_its_files_takes_no_more_than_their_pages() {
    let Some(host) = Host::start() else { return };
    assert_eq!(host.ask("mountShare", POD, GPU0), done());
    let directory = host.seen(POD, GPU0);
    let usage = files(&directory);
    let full = |result: std::io::Result<()>| {
        let error = result.expect_err("there is room for more").raw_os_error();
        assert_eq!(error, Some(Errno::NOSPC.raw_os_error()));
        assert!(allocated(&directory) <= PAGES * page());
    };
    full(usage.write_all_at(&vec![1; 1 << 20], 0));
    usage.set_len(1 << 40).expect("a sparse file");
    full((0..64).try_for_each(|part| usage.write_all_at(&[1], part << 30)));
    full(rustix::fs::fallocate(&usage, rustix::fs::FallocateFlags::KEEP_SIZE, 0, 1 << 20).map_err(Into::into));
    // The agent's file keeps its page, and `usage` gets its own back.
    assert_eq!(fs::read(directory.join("limits")).expect("limits"), [1; LIMITS_BYTES]);
    usage.set_len(0).expect("cut");
    usage.write_all_at(&[2; USAGE_BYTES], 0).expect("restored");

    // Linux has such attributes here from 6.6 on.
    let attribute = |index: u32| fsetxattr(&usage, format!("user.{index}"), &[1; 512], XattrFlags::empty());
    let refused = (0..64).find_map(|index| attribute(index).err());
    assert!(matches!(refused, Some(Errno::NOSPC | Errno::OPNOTSUPP)), "{refused:?}");
    let files = (0..64).map(|index| File::create(directory.join(format!("file-{index}"))));
    assert!(files.filter_map(Result::ok).count() < 8);

    let disk = host.machine.path("state/shares").join(POD).join(GPU0);
    assert_eq!(
        fs::read_dir(disk).expect("the directory").count(),
        0,
        "nothing is on the disk"
    );
}

#[test]
fn nothing_on_a_shares_file_system_can_be_run_or_open_a_device() {
    let Some(host) = Host::start() else { return };
    assert_eq!(host.ask("mountShare", POD, GPU0), done());
    let text = fs::read_to_string(format!("/proc/{}/mountinfo", host.probe.0.id())).expect("mounts");
    let line = text.lines().find(|line| line.contains(GPU0)).expect("mounted");
    for option in ["nosuid", "nodev", "noexec", "nr_inodes=8", "mode=755"] {
        assert!(line.split([' ', ',']).any(|word| word == option), "{option}: {line}");
    }
    let mode = |path: PathBuf| fs::metadata(path).expect("data").permissions().mode() & 0o7777;
    assert_eq!(mode(host.machine.path("state")), 0o700);
    assert_eq!(mode(host.machine.path("state/shares")), 0o755);
    assert_eq!(mode(host.seen(POD, GPU0)), 0o755);
}

/// Return how many requests wait for the lock of a directory (proc_locks(5)).
fn waiting(directory: &File) -> usize {
    let inode = format!(":{} ", directory.metadata().expect("data").ino());
    let text = fs::read_to_string("/proc/locks").expect("locks");
    text.lines()
        .filter(|line| line.contains("-> FLOCK") && line.contains(&inode))
        .count()
}

#[test]
fn requests_at_the_same_time_mount_once() {
    let Some(host) = Host::start() else { return };
    assert_eq!(host.ask("mountShare", POD, "GPU-first"), done());
    let shares = File::open(host.machine.path("state/shares")).expect("the directory");
    let mut clients: Vec<Lines> = (0..8).map(|_| host.lines()).collect();
    flock(&shares, FlockOperation::LockExclusive).expect("locked");
    for client in &mut clients {
        client.send(format!("{}\n", request("mountShare", POD, GPU0)).as_bytes());
    }
    eventually("all are about to mount", || waiting(&shares) == 8);
    assert_eq!(host.is_mounted(GPU0), 0);
    flock(&shares, FlockOperation::Unlock).expect("unlocked");
    for client in &mut clients {
        assert_eq!(client.next(), Some(done()));
    }
    assert_eq!(host.is_mounted(GPU0), 1);
}

#[test]
fn a_link_in_place_of_a_directory_is_not_followed() {
    let Some(host) = Host::start() else { return };
    assert_eq!(host.ask("mountShare", POD, GPU0), done());
    let (shares, elsewhere) = (host.machine.path("state/shares"), host.machine.path("elsewhere"));
    fs::create_dir_all(elsewhere.join("GPU-a")).expect("made");
    symlink(&elsewhere, shares.join("pod-link")).expect("linked");
    fs::create_dir(shares.join("pod-a")).expect("made");
    symlink(elsewhere.join("GPU-a"), shares.join("pod-a/GPU-a")).expect("linked");
    symlink(host.machine.path("missing"), shares.join("pod-a/GPU-b")).expect("linked");
    for (pod, gpu) in [
        ("pod-link", "GPU-a"),
        ("pod-link", "GPU-c"),
        ("pod-a", "GPU-a"),
        ("pod-a", "GPU-b"),
    ] {
        for op in ["mountShare", "unmountShare"] {
            let answer = host.ask(op, pod, gpu);
            assert_eq!(answer["err"]["code"], "unknown", "{op} {pod} {gpu}: {answer}");
        }
    }
    assert_eq!(
        host.is_mounted("GPU-a") + host.is_mounted("GPU-b") + host.is_mounted("GPU-c"),
        0
    );
    assert_eq!(fs::read_dir(elsewhere.join("GPU-a")).expect("listed").count(), 0);
    assert!(!host.machine.path("missing").exists() && !elsewhere.join("GPU-c").exists());
}

#[test]
fn only_names_of_pods_and_gpus_are_accepted() {
    let Some(host) = Host::start() else { return };
    for wrong in ["", ".", "..", "../x", "a/b", "/", "a\0b", "a b", "a\n", &"a".repeat(300)] {
        for (pod, gpu) in [(wrong, GPU0), (POD, wrong)] {
            for op in ["mountShare", "unmountShare"] {
                let answer = host.ask(op, pod, gpu);
                assert_eq!(answer["err"]["code"], "protocol", "{op} {wrong:?}: {answer}");
            }
        }
    }
    assert!(!host.machine.path("state").exists(), "nothing was made");
}

/// Files of the file system are open, and are mounted in another place.
#[test]
fn a_file_system_in_use_elsewhere_is_unmounted() {
    if !divvy_skip::program("nsenter", "util-linux") {
        return;
    }
    let Some(host) = Host::start() else { return };
    assert_eq!(host.ask("unmountShare", POD, GPU0), done(), "there is none");
    assert_eq!(host.ask("mountShare", POD, GPU0), done());
    let usage = files(&host.seen(POD, GPU0));
    let (own, bound) = (
        host.machine.path("state/shares").join(POD).join(GPU0),
        host.machine.path("bound"),
    );
    fs::write(&bound, "").expect("made");
    let mut bind = Command::new("nsenter");
    bind.arg("--mount")
        .args(["-t", &host.probe.0.id().to_string(), "mount", "--bind"]);
    assert!(bind.arg(own.join("usage")).arg(&bound).status().expect("nsenter").success());

    for _ in 0..2 {
        assert_eq!(host.ask("unmountShare", POD, GPU0), done());
        assert_eq!(host.is_mounted(GPU0), 0);
    }
    usage.write_all_at(&[7], 0).expect("written");
    assert_eq!(fs::read(below(host.probe.0.id(), &bound)).expect("read")[..2], [7, 1]);
    assert_eq!(host.ask("mountShare", POD, GPU0), done());
    assert_eq!(fs::read_dir(host.seen(POD, GPU0)).expect("listed").count(), 0, "a new one");
}

#[test]
fn files_that_lie_on_the_disk_are_not_hidden() {
    let Some(host) = Host::start() else { return };
    let directory = host.machine.path("state/shares").join(POD).join(GPU0);
    fs::create_dir_all(&directory).expect("made");
    drop(files(&directory));
    let answer = host.ask("mountShare", POD, GPU0);
    assert_eq!(answer["err"]["code"], "not_supported", "{answer}");
    assert_eq!(host.is_mounted(GPU0), 0);
    assert_eq!(host.ask("unmountShare", POD, GPU0), done());
}

/// Mount namespaces that stand for a machine's and its agent's. The machine's state directory is a shared mount, and the agent began before there were shares.
struct Node {
    first: Running,
    agent: Running,
    machine: Machine,
}

impl Node {
    fn start() -> Option<Node> {
        if !divvy_skip::program("nsenter", "util-linux") {
            return None;
        }
        let mut first = isolated()?;
        let machine = Machine::new(TWO);
        let state = machine.path("state");
        fs::create_dir(&state).expect("made");
        let script = r#"mount --bind "$1" "$1" && mount --make-shared "$1" && echo in && read -r end"#;
        first.args(["sh", "-c", script, "sh"]).arg(&state);
        let first = inside(first);
        let mut agent = entering(&first);
        agent.args([
            "unshare",
            "--mount",
            "--propagation",
            "slave",
            "sh",
            "-c",
            "echo in; read -r end",
        ]);
        let agent = inside(agent);
        Some(Node { first, agent, machine })
    }

    /// Start a probe in a container: the directory of shares is a volume, and the machine's root is mounted at a path.
    fn probe(&self, volume: Volume) -> Running {
        let (machine, state) = (&self.machine, self.machine.path("state"));
        let (shares, seen) = (
            state.join("shares"),
            machine.path("root").join(state.strip_prefix("/").expect("absolute")),
        );
        for directory in [&shares, &seen] {
            fs::create_dir_all(directory).expect("made");
        }
        let script = match volume {
            Volume::Bidirectional => r#"mount --bind "$1" "$2" && mount --make-slave "$2""#,
            Volume::HostToContainer => r#"mount --make-slave "$1" && mount --bind "$1" "$2""#,
            Volume::None => r#"mount --make-private "$1" && mount --bind "$1" "$2" && umount "$1""#,
        };
        let mut probe = entering(&self.first);
        probe.args(["unshare", "--mount", "--propagation", "unchanged", "sh", "-c"]);
        probe
            .arg(format!(r#"{script} && shift 2 && exec "$@""#))
            .arg("sh")
            .arg(&state)
            .arg(&seen);
        probe.args([PROBE, "--share-files"]).arg(shares);
        listen(machine, probe)
    }

    fn ask(&self, op: &str) -> Value {
        Lines::new(connect(&self.machine.path("s"))).ask(&request(op, POD, GPU0))
    }

    /// Return how many file systems the machine and the agent see at the directory of the GPU.
    fn mounts(&self) -> (usize, usize) {
        (mounts(self.first.0.id(), GPU0), mounts(self.agent.0.id(), GPU0))
    }
}

#[derive(Debug, Clone, Copy)]
enum Volume {
    Bidirectional,
    HostToContainer,
    None,
}

/// Return the command that runs its arguments in the mount namespace of a process.
fn entering(process: &Running) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--mount", "--target", &process.0.id().to_string()]);
    command
}

/// Start a process, and wait until it says that it is in its mount namespace.
fn inside(mut command: Command) -> Running {
    let mut process = Running(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started"));
    let mut said = [0; 3];
    let out = process.0.stdout.as_mut().expect("piped");
    out.read_exact(&mut said).expect("it is in the namespace");
    process
}

/// The probe runs in a container.
#[test]
fn a_probes_mount_reaches_the_machine_and_the_agents_container() {
    let Some(node) = Node::start() else { return };
    let probe = node.probe(Volume::Bidirectional);
    assert_eq!(node.ask("mountShare"), done());
    assert_eq!(node.mounts(), (1, 1));
    let directory = node.machine.path("state/shares").join(POD).join(GPU0);
    drop(files(&below(node.agent.0.id(), &directory)));
    for process in [&node.first, &probe] {
        assert!(below(process.0.id(), &directory).join("usage").exists());
    }
    assert_eq!(node.ask("mountShare"), done());
    assert_eq!(node.mounts(), (1, 1));
    assert_eq!(node.ask("unmountShare"), done());
    assert_eq!(node.mounts(), (0, 0));
    assert_eq!(fs::read_dir(directory).expect("listed").count(), 0, "nothing was on the disk");
}

#[test]
fn a_probe_finds_what_an_earlier_one_has_mounted() {
    let Some(node) = Node::start() else { return };
    let first = node.probe(Volume::Bidirectional);
    assert_eq!(node.ask("mountShare"), done());
    drop(first);
    assert_eq!(node.mounts(), (1, 1));
    let _second = node.probe(Volume::Bidirectional);
    assert_eq!(node.ask("mountShare"), done());
    assert_eq!(node.mounts(), (1, 1));
    assert_eq!(node.ask("unmountShare"), done());
    assert_eq!(node.mounts(), (0, 0));
}

#[test]
fn a_probe_mounts_nothing_that_only_its_own_container_sees() {
    for volume in [Volume::HostToContainer, Volume::None] {
        let Some(node) = Node::start() else { return };
        let probe = node.probe(volume);
        let answer = node.ask("mountShare");
        assert_eq!(answer["err"]["code"], "not_supported", "{volume:?}: {answer}");
        assert!(
            answer["err"]["text"]
                .as_str()
                .is_some_and(|text| text.contains("Bidirectional")),
            "{answer}"
        );
        assert_eq!((node.mounts(), mounts(probe.0.id(), GPU0)), ((0, 0), 0), "{volume:?}");
        assert_eq!(node.ask("unmountShare"), done());
    }
}

#[test]
fn a_probe_that_may_not_mount_says_so() {
    if !divvy_skip::root("drop capabilities") || !divvy_skip::program("setpriv", "util-linux") || divvy_skip::emulated(NO_MOUNTS)
    {
        return;
    }
    let machine = Machine::new(TWO);
    let mut command = Command::new("setpriv");
    command
        .args(["--bounding-set", "-sys_admin", PROBE, "--share-files"])
        .arg(machine.path("state/shares"));
    let _probe = listen(&machine, command);
    let answer = Lines::new(connect(&machine.path("s"))).ask(&request("mountShare", POD, GPU0));
    assert_eq!(answer["err"]["code"], "no_permission", "{answer}");
    assert!(
        answer["err"]["text"]
            .as_str()
            .is_some_and(|text| text.contains("Operation not permitted")),
        "{answer}"
    );
}

#[tokio::test]
async fn a_client_hears_that_the_files_lie_on_the_disk() {
    let machine = Machine::new(TWO);
    let client = machine.client(fast());
    let share = || ShareName {
        pod: POD.to_owned(),
        gpu: GPU0.to_owned(),
    };
    for result in [
        client.handle().mount_share(share()).await,
        client.handle().unmount_share(share()).await,
    ] {
        let failure = result.expect_err("no option");
        assert_eq!(failure.code, FailureCode::NotSupported);
        assert!(failure.text.contains("--share-files"), "{failure}");
    }

    let Some(host) = Host::start() else { return };
    let client = ProbeClient::start(ProbeSource::Socket(host.machine.path("s")), fast());
    client.handle().mount_share(share()).await.expect("mounted");
    assert_eq!(host.is_mounted(GPU0), 1);
    client.handle().unmount_share(share()).await.expect("unmounted");
    assert_eq!(host.is_mounted(GPU0), 0);
}
