use std::fs;
use std::os::unix::fs::symlink;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use divvy_host::{FileKind, PathMetadata};
use divvy_model::machine::MachineIntel;
use divvy_testkit::machine::MachineFiles as Copy;
use tempfile::TempDir;

use super::*;
use crate::Gauges;
use crate::backend::PodOf;
use crate::health::{RecoverySettings, Tracker};

const GIB: u64 = 1 << 30;
/// An Arc B580, and a GPU of two tiles.
const B580: &str = "0000-4d-00-0-0xe20b";
const MAX: &str = "0000-4e-00-0-0x0bd5";

fn gpu(device: &str, memory_mib: u64, tiles: u32) -> MachineIntel {
    MachineIntel {
        device: device.to_owned(),
        memory_mib,
        tiles,
        numa: Some(1),
    }
}

fn machine() -> TempDir {
    let root = tempfile::tempdir().expect("directory");
    divvy_intel_sim::install(root.path(), &[gpu("0xe20b", 12_216, 1), gpu("0x0bd5", 131_072, 2)]).expect("written");
    root
}

fn function(root: &TempDir, address: &str) -> PathBuf {
    root.path().join(divvy_intel_sim::FUNCTIONS).join(address)
}

fn cgroups(root: &TempDir) -> PathBuf {
    root.path().join("sys/fs/cgroup")
}

fn put(path: PathBuf, text: &str) {
    fs::write(path, text).expect("written");
}

fn open(root: &TempDir) -> IntelBackend {
    IntelBackend::open(root.path(), &DriverCalls::new(Duration::from_secs(60))).expect("xe is loaded")
}

fn snapshot(intel: &mut IntelBackend) -> Snapshot {
    let snapshot = intel.snapshot().expect("a snapshot");
    snapshot.validate().expect("the client accepts it");
    snapshot
}

fn look(root: &TempDir) -> Snapshot {
    snapshot(&mut open(root))
}

fn uuids(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect()
}

/// The memory of a GPU is the amount that the kernel gives out.
#[test]
fn each_gpu_has_its_nodes_and_the_kernels_memory() {
    let root = machine();
    let seen = look(&root);
    assert_eq!((seen.driver(Vendor::Intel), seen.unreadable.len()), ("", 0));
    let expected = GpuFacts {
        vendor: Vendor::Intel,
        uuid: B580.to_owned(),
        nodes: divvy_intel_sim::nodes(0).into(),
        pci: "0000:4d:00.0".to_owned(),
        model: "Intel GPU 0xe20b".to_owned(),
        total: MiB(12_216),
        numa: Some(1),
        memory_limit: true,
        ..GpuFacts::default()
    };
    assert_eq!(seen.gpus[0], expected);
    let two_tiles = &seen.gpus[1];
    assert_eq!(
        (two_tiles.uuid.as_str(), two_tiles.index, two_tiles.total),
        (MAX, 1, MiB(131_072))
    );
    assert!(!two_tiles.memory_limit, "a limit for each tile is none for a share");
}

/// A GPU without any memory is left out.
#[test]
fn memory_comes_from_dmem_or_else_the_tiles() {
    /// The lines of `dmem.capacity` and of `dmem.current`, what the tiles' files say, and the GPU: its memory in MiB, what is used of it, and
    /// whether it can be limited.
    type Case = (&'static str, &'static str, &'static [&'static str], Option<(u64, u64, bool)>);
    let cases: [Case; 17] = [
        (
            "drm/0000:4d:00.0/vram0 8589934592\n",
            "",
            &["9000000000\n"],
            Some((8192, 0, true)),
        ),
        (
            "drm/0000:4d:00.0/vram0 8589934592\n",
            "drm/0000:4d:00.0/vram0 3145728\n",
            &[],
            Some((8192, 3, true)),
        ),
        (
            "  drm/0000:4d:00.0/vram0 \t 8589934592 \r\n",
            "drm/0000:4d:00.0/vram0\t 1048577\n",
            &[],
            Some((8192, 1, true)),
        ),
        (
            "drm/0000:4d:00.0/vram0 8589934592\ndrm/0000:4d:00.0/vram1 8589934592\n",
            "drm/0000:4d:00.0/vram0 1048576\ndrm/0000:4d:00.0/vram1 1048576\n",
            &[],
            Some((16384, 2, false)),
        ),
        // What is used of one tile only says nothing about the GPU.
        (
            "drm/0000:4d:00.0/vram0 8589934592\ndrm/0000:4d:00.0/vram1 8589934592\n",
            "drm/0000:4d:00.0/vram0 1048576\n",
            &[],
            Some((16384, 0, false)),
        ),
        (
            "drm/0000:4d:00.0/vram0 8589934592\ndrm/0000:4d:00.0/vram0 8589934592\n",
            "",
            &[],
            Some((8192, 0, true)),
        ),
        // Other regions.
        (
            "drm/0000:4e:00.0/vram0 8589934592\n",
            "",
            &["1073741824\n"],
            Some((1024, 0, false)),
        ),
        (
            "drm/0000:4d:00.0/vram 8589934592\n",
            "",
            &["1073741824\n"],
            Some((1024, 0, false)),
        ),
        (
            "drm/0000:4d:00.0/stolen 8589934592\ndrm/0000:4d:00.0/vram01 1\n",
            "",
            &[],
            None,
        ),
        ("nvidia/0000:4d:00.0/vidmem 8589934592\n", "", &[], None),
        // No controller.
        ("", "", &["8589934592\n", "8589934592\n"], Some((16384, 0, false))),
        ("", "", &["0\n"], None),
        ("", "", &[], None),
        // Numbers that are none.
        ("drm/0000:4d:00.0/vram0 max\n", "", &["1073741824\n"], Some((1024, 0, true))),
        ("drm/0000:4d:00.0/vram0 MAX\n", "", &[], Some((0, 0, true))),
        (
            "drm/0000:4d:00.0/vram0 18446744073709551615\ndrm/0000:4d:00.0/vram1 18446744073709551615\n",
            "",
            &["1073741824"],
            Some((0, 0, false)),
        ),
        ("", "", &["1073741824\n", "-1\n"], Some((0, 0, false))),
    ];
    for (capacity, current, tiles, expected) in cases {
        let root = tempfile::tempdir().expect("directory");
        divvy_intel_sim::describe(root.path(), &[gpu("0xe20b", 1, 0)]).expect("written");
        for (tile, text) in tiles.iter().enumerate() {
            let directory = function(&root, "0000:4d:00.0").join(format!("tile{tile}"));
            fs::create_dir_all(&directory).expect("made");
            put(directory.join("physical_vram_size_bytes"), text);
        }
        fs::create_dir_all(cgroups(&root)).expect("made");
        put(cgroups(&root).join("dmem.capacity"), capacity);
        put(cgroups(&root).join("dmem.current"), current);
        let seen = look(&root);
        let found = seen.gpus.first().map(|gpu| (gpu.total.0, gpu.used.0, gpu.memory_limit));
        assert_eq!(
            (found, seen.unreadable.len()),
            (expected, 0),
            "{capacity:?} {current:?} {tiles:?}"
        );
        let has_error = seen.gpus.first().is_some_and(|gpu| gpu.error.is_some());
        assert_eq!(
            has_error,
            expected.is_some_and(|(total, ..)| total == 0),
            "{capacity:?} {tiles:?}"
        );
    }
}

/// GPUs that are left out have no number.
#[test]
fn gpus_are_numbered_in_bus_order() {
    let root = tempfile::tempdir().expect("directory");
    let gpus: Vec<MachineIntel> = (0..5).map(|_| gpu("0x56c0", 1024, 1)).collect();
    divvy_intel_sim::describe(root.path(), &gpus).expect("written");
    let name = |from: &str, to: &str| fs::rename(function(&root, from), function(&root, to)).expect("renamed");
    name("0000:4d:00.0", "10000:01:00.0");
    name("0000:4e:00.0", "2000:0a:00.0");
    name("0000:4f:00.0", "0000:00:02.0");
    fs::remove_dir_all(function(&root, "0000:00:02.0").join("tile0")).expect("removed");
    // What is not an address, or not a GPU of Intel, is none.
    name("0000:51:00.0", "0000:51:00.0.1");
    for file in ["bind", "module", "new_id"] {
        put(root.path().join(divvy_intel_sim::FUNCTIONS).join(file), "");
    }
    let seen = look(&root);
    assert_eq!(
        uuids(&seen),
        ["0000-50-00-0-0x56c0", "2000-0a-00-0-0x56c0", "10000-01-00-0-0x56c0"]
    );
    assert_eq!(seen.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), [0, 1, 2]);
    put(function(&root, "2000:0a:00.0").join("vendor"), "0x1002\n");
    assert_eq!(uuids(&look(&root)), ["0000-50-00-0-0x56c0", "10000-01-00-0-0x56c0"]);
}

#[test]
fn virtual_functions_count_instead_of_their_physical_function() {
    let root = tempfile::tempdir().expect("directory");
    let gpus: Vec<MachineIntel> = (0..3).map(|_| gpu("0x56c0", 1024, 1)).collect();
    divvy_intel_sim::describe(root.path(), &gpus).expect("written");
    fs::rename(function(&root, "0000:4e:00.0"), function(&root, "0000:4d:00.1")).expect("renamed");
    fs::rename(function(&root, "0000:4f:00.0"), function(&root, "0000:4d:00.2")).expect("renamed");
    // Virtual functions have no such file.
    for address in ["0000:4d:00.1", "0000:4d:00.2"] {
        fs::remove_file(function(&root, address).join("sriov_numvfs")).expect("removed");
    }
    let all = ["0000-4d-00-0-0x56c0", "0000-4d-00-1-0x56c0", "0000-4d-00-2-0x56c0"];
    assert_eq!(uuids(&look(&root)), all);
    put(function(&root, "0000:4d:00.0").join("sriov_numvfs"), "2\n");
    assert_eq!(uuids(&look(&root)), all[1..]);
}

/// An error concerns only the GPU with the missing or wrong fact.
#[test]
fn missing_or_wrong_facts_are_errors_or_defaults() {
    type Change = fn(&Path);
    /// A check of the GPU's facts, a part of its error, or a part of the reason why it is unreadable.
    enum Expected {
        Fine(fn(&GpuFacts) -> bool),
        Fails(&'static str),
        Unreadable(&'static str),
    }
    use Expected::{Fails, Fine, Unreadable};
    let cases: [(&str, Change, Expected); 11] = [
        (
            "NUMA node -1",
            |at| put(at.join("numa_node"), "-1\n"),
            Fine(|gpu| gpu.numa.is_none()),
        ),
        (
            "no NUMA node",
            |at| fs::remove_file(at.join("numa_node")).expect("removed"),
            Fine(|gpu| gpu.numa.is_none()),
        ),
        (
            "a high device id",
            |at| put(at.join("device"), "0xFFFF\n"),
            Fine(|gpu| gpu.uuid == "0000-4d-00-0-0xffff"),
        ),
        (
            "a short device id",
            |at| put(at.join("device"), "0x2\n"),
            Fine(|gpu| gpu.model == "Intel GPU 0x0002"),
        ),
        (
            "no device id",
            |at| fs::remove_file(at.join("device")).expect("removed"),
            Unreadable("its PCI device id"),
        ),
        (
            "a device id that is none",
            |at| put(at.join("device"), "0x../../etc\n"),
            Unreadable("its PCI device id"),
        ),
        (
            "a long device id",
            |at| put(at.join("device"), "0x10000\n"),
            Unreadable("its PCI device id"),
        ),
        (
            "no card node",
            |at| fs::remove_dir_all(at.join("drm/card33")).expect("removed"),
            Fails("no card node"),
        ),
        (
            "a card that is no number",
            |at| fs::rename(at.join("drm/card33"), at.join("drm/card4294967296")).expect("renamed"),
            Fails("no card node"),
        ),
        (
            "a high card",
            |at| fs::rename(at.join("drm/card33"), at.join("drm/card4097")).expect("renamed"),
            Fine(|gpu| gpu.nodes == ["dri/card4097", "dri/renderD160"]),
        ),
        (
            "no nodes",
            |at| fs::remove_dir_all(at.join("drm")).expect("removed"),
            Unreadable("no render node"),
        ),
    ];
    for (name, change, expected) in cases {
        let root = machine();
        put(function(&root, "0000:4d:00.0").join("drm/controlD64"), "");
        let before = look(&root);
        change(&function(&root, "0000:4d:00.0"));
        let seen = look(&root);
        let error = |gpu: &GpuFacts| gpu.error.clone().unwrap_or_default();
        match expected {
            Fine(holds) => assert!(holds(&seen.gpus[0]) && seen.gpus[0].error.is_none(), "{name}: {seen:?}"),
            Fails(part) => assert!(error(&seen.gpus[0]).contains(part) && !seen.gpus[0].lost, "{name}: {seen:?}"),
            Unreadable(part) => assert!(
                seen.unreadable[0].error.contains(part) && seen.unreadable[0].index == 0,
                "{name}: {seen:?}"
            ),
        }
        assert_eq!(seen.gpus.last(), before.gpus.last(), "{name}");
    }
    // Two devices with one render minor: it is not known which of them has the node.
    let root = machine();
    let drm = function(&root, "0000:4e:00.0").join("drm");
    fs::rename(drm.join("renderD161"), drm.join("renderD160")).expect("renamed");
    let seen = look(&root);
    assert_eq!((seen.gpus.len(), seen.unreadable.len()), (0, 2));
    assert!(
        seen.unreadable[0].error.contains("also claims /dev/dri/renderD160"),
        "{seen:?}"
    );
}

#[test]
fn a_known_unreadable_gpu_keeps_its_name_and_memory() {
    let root = machine();
    let mut intel = open(&root);
    let before = snapshot(&mut intel);
    let at = function(&root, "0000:4d:00.0");
    let hidden = root.path().join("hidden");
    /// The file that is hidden, whether the GPU is lost then, and a part of its error.
    const CASES: [(&str, bool, &str); 3] = [
        ("drm", true, "no render node"),
        ("device", false, ""),
        ("tile0", false, "memory: neither"),
    ];
    // The region has gone, as it does when a driver is unbound.
    let capacity = cgroups(&root).join("dmem.capacity");
    let regions = fs::read_to_string(&capacity).expect("read");
    for (name, lost, part) in CASES {
        fs::rename(at.join(name), &hidden).expect("moved");
        put(capacity.clone(), if name == "tile0" { "" } else { &regions });
        let seen = snapshot(&mut intel);
        let gpu = &seen.gpus[0];
        assert_eq!(
            (gpu.uuid.as_str(), gpu.total, gpu.lost),
            (B580, before.gpus[0].total, lost),
            "{name}"
        );
        let error = gpu.error.clone().unwrap_or_default();
        assert!(error.contains(part) && error.is_empty() == part.is_empty(), "{name}: {error}");
        fs::rename(&hidden, at.join(name)).expect("moved");
        put(capacity.clone(), &regions);
        assert_eq!(snapshot(&mut intel), before, "{name}");
    }
    // Another GPU in the same place is not the GPU that was there.
    put(at.join("device"), "0x56c0\n");
    fs::rename(at.join("drm"), &hidden).expect("moved");
    assert_eq!(snapshot(&mut intel).unreadable.len(), 1);
}

#[test]
fn a_gpu_that_disappears_is_lost_for_the_tracker() {
    let root = machine();
    let mut intel = open(&root);
    let mut tracker = Tracker::new(RecoverySettings::default());
    assert!(tracker.snapshot(0, &snapshot(&mut intel)).is_empty());
    fs::remove_dir_all(function(&root, "0000:4d:00.0")).expect("unbound");
    let seen = snapshot(&mut intel);
    assert_eq!(uuids(&seen), [MAX]);
    assert_eq!(tracker.snapshot(1, &seen), [B580]);
}

#[test]
fn without_the_module_the_error_says_how_to_load_it() {
    let empty = tempfile::tempdir().expect("directory");
    let failure = IntelBackend::open(empty.path(), &DriverCalls::new(Duration::from_secs(60))).expect_err("no module");
    assert_eq!(failure.code, FailureCode::DriverNotLoaded);
    assert!(failure.text.contains("modprobe xe"), "{failure}");
    let root = machine();
    let mut intel = open(&root);
    fs::remove_dir_all(root.path().join("sys/module/xe")).expect("unloaded");
    assert_eq!(intel.snapshot().expect_err("no module").code, FailureCode::DriverNotLoaded);
    assert_eq!(intel.processes().expect_err("no module").code, FailureCode::DriverNotLoaded);
}

/// The files of a machine as a value.
fn copy(root: &Path) -> Copy {
    fn add(tree: &Files, path: &str, to: &mut Copy) {
        for name in tree.names(path) {
            let path = format!("{}/{name}", path.trim_end_matches('/'));
            match tree.stat(&path).map(|entry| entry.kind) {
                Some(FileKind::Directory) => add(tree, &path, to),
                Some(FileKind::File) => drop(to.file(&path, tree.read(&path, 1 << 20).expect("read"))),
                Some(FileKind::Link(target)) => drop(to.link(&path, &target)),
                _ => {}
            }
        }
    }
    let mut to = Copy::default();
    add(&Files::below(root), "/", &mut to);
    to
}

/// The file is cut off or missing.
#[test]
fn a_damaged_file_gives_no_gpu_a_foreign_value() {
    let root = machine();
    let whole = copy(root.path());
    let before = super::snapshot(&whole).expect("a snapshot");
    let files = [
        "vendor",
        "device",
        "numa_node",
        "sriov_numvfs",
        "tile0/physical_vram_size_bytes",
        "drm/renderD160/dev",
    ];
    let mut paths: Vec<String> = files
        .map(|file| format!("/{}/0000:4d:00.0/{file}", divvy_intel_sim::FUNCTIONS))
        .into();
    paths.extend([
        "/sys/fs/cgroup/dmem.capacity".to_owned(),
        "/sys/fs/cgroup/dmem.current".to_owned(),
    ]);
    for path in paths {
        let bytes = whole.read(&path, 1 << 20).expect(&path);
        for cut in (0..bytes.len()).map(Some).chain([None]) {
            // The kernel does not say how many lines there are.
            if path.ends_with("capacity") && cut.is_some_and(|cut| bytes[..cut].ends_with(b"\n")) {
                continue;
            }
            let mut damaged = whole.clone();
            match cut {
                Some(cut) => damaged.file(&path, &bytes[..cut]),
                None => damaged.remove(&path),
            };
            let after = super::snapshot(&damaged).expect("a snapshot");
            for gpu in &after.gpus {
                let was = before
                    .gpus
                    .iter()
                    .find(|was| was.uuid == gpu.uuid)
                    .expect("a GPU that is there");
                let place = format!("{path} {cut:?}: {gpu:?}");
                assert_eq!(
                    (&gpu.nodes, &gpu.pci, &gpu.model),
                    (&was.nodes, &was.pci, &was.model),
                    "{place}"
                );
                assert!(gpu.numa == was.numa || gpu.numa.is_none(), "{place}");
                // Without the region, the memory is that of the tiles.
                let tiles = MiB(was.total.0 + if was.uuid == MAX { 128 } else { 64 });
                assert!(gpu.total == was.total || gpu.total == tiles || gpu.error.is_some(), "{place}");
            }
            assert!(after.gpus.iter().any(|gpu| gpu.uuid == MAX), "{path} {cut:?}");
        }
    }
}

#[test]
fn links_that_loop_or_lead_out_of_the_machine_are_not_followed() {
    let root = machine();
    let before = look(&root);
    let at = function(&root, "0000:4d:00.0");
    for target in ["numa_node", "/../../etc/hostname", "../numa_node"] {
        fs::remove_file(at.join("numa_node")).expect("removed");
        symlink(target, at.join("numa_node")).expect("linked");
        symlink(".", root.path().join(divvy_intel_sim::FUNCTIONS).join("0000:50:00.0")).ok();
        let seen = look(&root);
        assert_eq!((uuids(&seen), seen.gpus[0].numa), (uuids(&before), None), "{target}");
    }
    // As in a real machine, the entries are links to the functions.
    let moved = root.path().join("sys/devices/pci0000:00/0000:4d:00.0");
    fs::remove_file(at.join("numa_node")).expect("removed");
    put(at.join("numa_node"), "1\n");
    fs::create_dir_all(moved.parent().expect("a parent")).expect("made");
    fs::rename(&at, &moved).expect("moved");
    symlink("../../../../devices/pci0000:00/0000:4d:00.0", &at).expect("linked");
    assert_eq!(look(&root), before);
}

/// Make the cgroup of a pod, with the kernel's files as they are before a limit is set.
fn pod_cgroup(root: &TempDir, regions: &[String]) -> Cgroup {
    let directory = cgroups(root).join("kubepods/pod6b8e5a3c-0000-4000-8000-000000000001");
    fs::create_dir_all(&directory).expect("created");
    let lines = |value: &str| regions.iter().map(|region| format!("{region} {value}\n")).collect::<String>();
    put(directory.join("dmem.max"), &lines("max"));
    put(directory.join("dmem.current"), &lines("1073741824"));
    Cgroup { directory, pod: None }
}

/// For any other GPU, the limit is refused with the reason.
#[test]
fn only_a_gpu_with_one_region_is_limited() {
    let root = machine();
    let region = divvy_intel_sim::region(0, 0);
    let cgroup = pod_cgroup(&root, std::slice::from_ref(&region));
    let max = cgroup.directory.join("dmem.max");
    let mut intel = open(&root);
    let limited = intel.limit(B580, &cgroup, MiB(3072)).expect("limited");
    assert_eq!((limited.left_out, limited.used), (false, MiB(1024)));
    let text = fs::read_to_string(&max).expect("read");
    assert_eq!(text, format!("{region} {}\n", 3 * GIB));
    let refused = |intel: &mut IntelBackend, uuid: &str| intel.limit(uuid, &cgroup, MiB(1)).expect_err("no limit");
    let failure = refused(&mut intel, MAX);
    assert!(
        failure.code == FailureCode::NotSupported && failure.text.contains("the kernel limits each of its 2 tiles separately"),
        "{failure}"
    );
    assert_eq!(refused(&mut intel, "0000-4d-00-0-0x56c0").code, FailureCode::GpuLost);
    // Each write to this device fails, as each write of an unknown region does in the kernel.
    fs::remove_file(&max).expect("removed");
    symlink("/dev/full", &max).expect("linked");
    let failure = refused(&mut intel, B580);
    assert!(
        failure.text.contains("No space left on device") && failure.text.contains(B580),
        "{failure}"
    );
    fs::remove_file(cgroups(&root).join("dmem.capacity")).expect("removed");
    let failure = refused(&mut intel, B580);
    assert!(
        failure
            .text
            .contains("dmem.capacity does not list it; the region drm/0000:4d:00.0/vram0 needs Linux"),
        "{failure}"
    );
    assert!(!snapshot(&mut intel).gpus[0].memory_limit);
}

#[test]
fn a_container_has_the_limit_of_its_pod() {
    let root = machine();
    let pod = pod_cgroup(&root, &[divvy_intel_sim::region(0, 0)]);
    let directory = pod.directory.join("0f".repeat(32));
    fs::create_dir_all(&directory).expect("created");
    let of = PodOf {
        directory: pod.directory,
        alone: true,
    };
    let container = Cgroup {
        directory,
        pod: Some(of),
    };
    let limited = open(&root).limit(B580, &container, MiB(1024)).expect("left out");
    assert!(limited.left_out && !container.directory.join("dmem.max").exists());
}

fn listen(intel: &mut IntelBackend) -> Receiver<DriverEvent> {
    let (sender, receiver) = channel();
    intel.events(EventSink::new(move |event| sender.send(event).expect("the test listens")));
    receiver
}

/// The processes of each GPU with what they use in MiB, as the client accepts them.
fn processes(intel: &mut IntelBackend) -> Vec<(String, Vec<(u32, u64)>)> {
    let all = intel.processes().expect("processes");
    GpuProcesses::validate(&all).expect("the client accepts them");
    assert!(all.iter().all(|gpu| gpu.error.is_none()), "{all:?}");
    let used = |gpu: GpuProcesses| {
        let processes = gpu.processes.iter().map(|process| (process.pid, process.used.0));
        (gpu.uuid, processes.collect())
    };
    all.into_iter().map(used).collect()
}

#[test]
fn processes_with_gpu_memory_count_each_client_once() {
    let root = machine();
    let client = |pid, fd, gpu, client, mib: u64| {
        divvy_intel_sim::set_client(root.path(), pid, fd, gpu, client, mib << 10).expect("written");
    };
    client(70, 3, 0, 1, 500);
    // A second file of the same client, and a second client.
    client(70, 4, 0, 1, 500);
    client(70, 5, 0, 2, 20);
    // A process has inherited the client. Another GPU has a client with the same number.
    client(1070, 3, 0, 1, 500);
    client(9, 3, 1, 1, 7);
    // A client without memory, such as that of a program that lists GPUs.
    client(8, 3, 1, 5, 0);
    let processes = processes(&mut open(&root));
    assert_eq!(
        processes,
        [(B580.to_owned(), vec![(70, 520)]), (MAX.to_owned(), vec![(9, 7)])]
    );
}

#[test]
fn a_clients_text_is_read_in_any_units_and_keys() {
    let text = |lines: &str| format!("pos:\t0\ndrm-driver:\txe\ndrm-client-id:\t7\ndrm-pdev:\t0000:4d:00.0\n{lines}");
    // The text, and what the process uses in MiB if it is listed.
    for (text, expected) in [
        (text("drm-total-vram0:\t3 MiB\n"), Some(3)),
        (text("drm-total-vram0:\t3072 KiB\n"), Some(3)),
        (text("drm-total-vram0:\t3145728\n"), Some(3)),
        (text("drm-total-vram0:  3145728  \r\n"), Some(3)),
        (
            text("drm-total-vram0:\t1 MiB\ndrm-total-vram1:\t2 MiB\ndrm-total-gtt:\t9 MiB\n"),
            Some(3),
        ),
        (text("drm-total-vram0:\t3 MiB\ndrm-resident-vram0:\t1 MiB\n"), Some(3)),
        (text("drm-resident-vram0:\t1 MiB\n"), Some(1)),
        (text("drm-total-vram0:\t0\ndrm-resident-vram0:\t1 MiB\n"), None),
        (
            text("drm-shared-vram0:\t3 MiB\ndrm-total-system:\t3 MiB\ndrm-total-vram:\t3 MiB\n"),
            None,
        ),
        (text(""), None),
        // It has memory, and it is not known how much.
        (text("drm-total-vram0:\t3 GiB\n"), Some(0)),
        (text("drm-total-vram0:\t-3 MiB\n"), Some(0)),
        (text("drm-total-vram0:\t18446744073709551615 KiB\n"), Some(0)),
        (text("drm-total-vram0:\t18446744073709551615\ndrm-total-vram1:\t1\n"), Some(0)),
        // Lines that were cut off.
        (text("drm-total-vram0:\t3 MiB"), None),
        (text("drm-total-vram0\n"), None),
        // Other devices, and no client.
        (text("drm-total-vram0:\t3 MiB\n").replace("\txe", "\ti915"), None),
        (text("drm-total-vram0:\t3 MiB\n").replace("4d:00", "4c:00"), None),
        (text("drm-total-vram0:\t3 MiB\n").replace("\t7", "\t-7"), None),
        ("drm-total-vram0:\t3 MiB\n".to_owned(), None),
        (text("drm-total-vram0:\t3 MiB\n") + &" ".repeat(1 << 20), None),
        (String::new(), None),
    ] {
        let root = machine();
        divvy_intel_sim::set_open_file(root.path(), 7, 3, "/dev/dri/renderD160", &text).expect("written");
        let listed = processes(&mut open(&root)).swap_remove(0).1;
        let expected: Vec<(u32, u64)> = expected.map(|mib| (7, mib)).into_iter().collect();
        assert_eq!(listed, expected, "{:.200}", text);
    }
}

/// Processes may end while their files are read.
#[test]
fn of_open_files_only_gpu_nodes_are_read() {
    let root = machine();
    let text = "drm-driver:\txe\ndrm-client-id:\t7\ndrm-pdev:\t0000:4d:00.0\ndrm-total-vram0:\t3 MiB\n";
    let file = |pid, fd, target: &str| divvy_intel_sim::set_open_file(root.path(), pid, fd, target, text).expect("written");
    for (fd, target) in [
        "/dev/null",
        "socket:[4711]",
        "anon_inode:[eventfd]",
        "/tmp/dev/dri/renderD160",
        "/dev/dri",
    ]
    .iter()
    .enumerate()
    {
        file(7, u32::try_from(fd).expect("few"), target);
    }
    let proc = root.path().join("proc");
    // The process has ended since its number, or the name of its file, was read.
    fs::create_dir_all(proc.join("8")).expect("made");
    file(9, 3, "/dev/dri/renderD160");
    fs::remove_file(proc.join("9/fdinfo/3")).expect("removed");
    for name in ["self", "07", "4294967296", "net"] {
        fs::create_dir_all(proc.join(name)).expect("made");
        symlink("/dev/dri/renderD160", proc.join(name).join("fd")).expect("linked");
    }
    // The node's name has gone, and the process has it open all the same.
    file(10, 3, "/dev/dri/renderD160 (deleted)");
    let mut intel = open(&root);
    let events = listen(&mut intel);
    assert_eq!(processes(&mut intel)[0].1, [(10, 3)]);
    assert_eq!(events.try_iter().count(), 0, "nothing of this is a failure");
}

#[test]
fn many_open_files_hide_no_other_process() {
    let mut tree = copy(machine().path());
    let open = |tree: &mut Copy, pid: u32, fd: u32, client: u32| {
        tree.link(&format!("/proc/{pid}/fd/{fd}"), "/dev/dri/renderD160").file(
            &format!("/proc/{pid}/fdinfo/{fd}"),
            format!("drm-driver:\txe\ndrm-client-id:\t{client}\ndrm-pdev:\t0000:4d:00.0\ndrm-total-vram0:\t1 MiB\n"),
        );
    };
    for fd in 0..300 {
        open(&mut tree, 7, fd, fd);
    }
    open(&mut tree, 8, 3, 1000);
    let used = super::processes::used(&tree);
    let by_pid = &used.by_gpu["0000:4d:00.0"];
    assert_eq!(
        by_pid.iter().map(|(pid, bytes)| (*pid, bytes >> 20)).collect::<Vec<_>>(),
        [(7, 256), (8, 1)]
    );
    assert!(!used.is_cut_off);
    for pid in 10..50 {
        for fd in 0..256 {
            open(&mut tree, pid, fd, 2000 + pid * 256 + fd);
        }
    }
    let used = super::processes::used(&tree);
    let all: u64 = used.by_gpu["0000:4d:00.0"].values().sum();
    assert!(used.is_cut_off && all >> 20 == 8192, "{all}");
}

#[test]
fn what_a_pod_has_open_does_not_hide_what_other_pods_use() {
    let mut tree = copy(machine().path());
    let put = |tree: &mut Copy, pod: u32, pid: u32, fds: std::ops::Range<u32>, is_node: bool| {
        tree.file(
            &format!("/proc/{pid}/cgroup"),
            format!(
                "0::/kubepods/burstable/pod6b8e5a3c-0000-4000-8000-{pod:012}/{}\n",
                "0f".repeat(32)
            ),
        );
        for fd in fds {
            let target = if is_node { "/dev/dri/renderD160" } else { "/dev/null" };
            tree.link(&format!("/proc/{pid}/fd/{fd}"), target);
            if is_node {
                let id = u64::from(pid) << 32 | u64::from(fd);
                tree.file(
                    &format!("/proc/{pid}/fdinfo/{fd}"),
                    format!("drm-driver:\txe\ndrm-client-id:\t{id}\ndrm-pdev:\t0000:4d:00.0\ndrm-total-vram0:\t1 MiB\n"),
                );
            }
        }
    };
    let of = |tree: &Copy| {
        let used = super::processes::used_within(tree, 1 << 15, 1 << 10);
        let honest: BTreeMap<u32, u64> = used.by_gpu["0000:4d:00.0"]
            .range(900..)
            .map(|(pid, bytes)| (*pid, *bytes))
            .collect();
        (honest, used.is_cut_off)
    };
    for pod in 1..20 {
        put(&mut tree, pod, 900 + pod, 0..40, true);
    }
    // One has more open files than are looked at in a turn.
    put(&mut tree, 20, 950, 0..1500, false);
    put(&mut tree, 20, 950, 1500..1501, true);
    let (expected, is_cut_off) = of(&tree);
    assert!(expected.len() == 20 && !is_cut_off, "{expected:?}");
    // More files, and more clients, than are looked at in all. The PIDs are lower.
    let mut files = tree.clone();
    for pid in 10..15 {
        put(&mut files, 99, pid, 0..8192, false);
    }
    assert_eq!(of(&files), (expected.clone(), true));
    for pid in 10..15 {
        put(&mut tree, 99, pid, 0..256, true);
    }
    assert_eq!(of(&tree), (expected, true));
}

#[test]
fn without_a_gpu_or_without_proc_no_process_is_listed() {
    let root = machine();
    let mut intel = open(&root);
    let all = intel.processes().expect("an answer");
    assert!(
        all.len() == 2
            && all
                .iter()
                .all(|gpu| gpu.error.as_ref().is_some_and(|text| text.contains("no /proc")))
    );
    divvy_intel_sim::set_client(root.path(), 7, 3, 0, 1, 1024).expect("written");
    fs::remove_dir_all(function(&root, "0000:4e:00.0")).expect("removed");
    snapshot(&mut intel);
    // The driver has not started the GPU again: what the processes had is not there.
    fs::remove_dir_all(function(&root, "0000:4d:00.0").join("drm")).expect("removed");
    let all = intel.processes().expect("an answer");
    assert!(
        all.len() == 1 && all[0].error.as_ref().is_some_and(|text| text.contains("no render node")),
        "{all:?}"
    );
    fs::remove_dir_all(function(&root, "0000:4d:00.0")).expect("removed");
    assert_eq!(super::processes(&WithoutProc(copy(root.path()))), []);
}

/// A machine whose processes must not be looked at.
#[derive(Debug)]
struct WithoutProc(Copy);

impl Tree for WithoutProc {
    fn names(&self, directory: &str) -> Vec<String> {
        assert!(!directory.starts_with("/proc"), "{directory}");
        self.0.names(directory)
    }

    fn stat(&self, path: &str) -> Option<PathMetadata> {
        assert!(!path.starts_with("/proc"), "{path}");
        self.0.stat(path)
    }

    fn read(&self, path: &str, limit: usize) -> Option<Vec<u8>> {
        self.0.read(path, limit)
    }
}

#[test]
fn what_xe_measures_is_read_and_a_lost_gpu_has_none_of_it() {
    let root = machine();
    let mut intel = open(&root);
    snapshot(&mut intel);
    put(cgroups(&root).join("dmem.current"), "drm/0000:4d:00.0/vram0 1073741824\n");
    let measured = intel.gauges().expect("an answer");
    GpuGauges::validate(&measured).expect("the client accepts it");
    let total = 12_216 << 20;
    let expected = Gauges {
        memory: Some(crate::GpuMemory {
            total,
            used: GIB,
            reserved: None,
            free: total - GIB,
        }),
        energy_millijoules: Some(1_234_567),
        temperature_celsius: Some(41),
        memory_temperature_celsius: Some(48),
        ..Gauges::default()
    };
    assert_eq!((measured[0].uuid.as_str(), measured[0].values), (B580, expected));
    assert_eq!(measured[1].values.memory, None, "what is used is not known");
    let sensors = function(&root, "0000:4d:00.0").join("hwmon/hwmon3");
    put(sensors.join("power1_input"), "41234567\n");
    put(sensors.join("temp2_input"), "-1\n");
    put(sensors.join("temp3_input"), "48");
    fs::remove_file(sensors.join("energy1_input")).expect("removed");
    put(
        cgroups(&root).join("dmem.current"),
        "drm/0000:4d:00.0/vram0 18446744073709551615\n",
    );
    let measured = intel.gauges().expect("an answer").swap_remove(0).values;
    let expected = Gauges {
        power_milliwatts: Some(41_234),
        ..Gauges::default()
    };
    assert_eq!(measured, expected);
    fs::remove_dir_all(function(&root, "0000:4d:00.0").join("drm")).expect("removed");
    let lost = intel.gauges().expect("an answer").swap_remove(0);
    assert!(lost.error.is_some() && lost.values == Gauges::default(), "{lost:?}");
}
