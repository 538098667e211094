use std::fs;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use divvy_testkit::amd::{self as recorded, RecordedMachine, function_directory, kfd_node};
use divvy_testkit::machine::MachineFiles as Copy;
use tempfile::TempDir;

use super::*;
use crate::Gauges;
use crate::health::{RecoverySettings, Tracker};

fn write(machine: RecordedMachine) -> TempDir {
    let root = tempfile::tempdir().expect("directory");
    recorded::write(root.path(), machine).expect("written");
    root
}

fn open(root: &TempDir) -> AmdBackend {
    AmdBackend::open(root.path(), &DriverCalls::new(Duration::from_secs(60))).expect("amdgpu is loaded")
}

fn snapshot(amd: &mut AmdBackend) -> Snapshot {
    let snapshot = amd.snapshot().expect("a snapshot");
    snapshot.validate().expect("the client accepts it");
    snapshot
}

fn look(root: &TempDir) -> Snapshot {
    snapshot(&mut open(root))
}

/// The other ends of a GPU's links of one kind, by index.
fn peers(snapshot: &Snapshot, gpu: usize, kind: &str) -> Vec<u32> {
    let links = snapshot.gpus[gpu].links.iter().filter(|link| link.kind.as_str() == kind);
    let found = links.filter_map(|link| snapshot.gpus.iter().find(|gpu| gpu.uuid == link.peer));
    found.map(|gpu| gpu.index).collect()
}

#[test]
fn the_recorded_machines_are_found_completely() {
    for (machine, count, first) in [
        (
            RecordedMachine::Vega10,
            2,
            ("0xc34ec50444dd0a6c", "0000:19:00.0", "AMD 6860", "", 64, 16_368),
        ),
        (
            RecordedMachine::Mi210,
            8,
            (
                "0x93bb3629c01aea1c",
                "0000:03:00.0",
                "AMD Instinct MI210",
                "gfx90a",
                104,
                65_520,
            ),
        ),
        (
            RecordedMachine::Mi308Cpx,
            32,
            (
                "0x084cafeae17e7696",
                "0000:0a:00.0",
                "AMD Instinct MI308X",
                "gfx942",
                20,
                49_152,
            ),
        ),
        (
            RecordedMachine::Mi300xCpx,
            63,
            (
                "0xe3aa140f9a5f9e31",
                "0000:05:00.0",
                "AMD Instinct MI300X OAM",
                "gfx942",
                38,
                24_576,
            ),
        ),
    ] {
        let root = write(machine);
        let seen = look(&root);
        assert_eq!((seen.gpus.len(), seen.unreadable.len()), (count, 0), "{machine:?}");
        assert_eq!(seen.driver(Vendor::Amd), recorded::DRIVER);
        let gpu = &seen.gpus[0];
        assert_eq!(
            (
                gpu.uuid.as_str(),
                gpu.pci.as_str(),
                gpu.model.as_str(),
                gpu.cc.as_str(),
                gpu.sms,
                gpu.total.0
            ),
            first
        );
        for (index, gpu) in seen.gpus.iter().enumerate() {
            assert_eq!((gpu.index as usize, gpu.vendor, gpu.minor), (index, Vendor::Amd, None));
            assert_eq!((&gpu.error, gpu.lost, gpu.nodes.len()), (&None, false, 2), "{gpu:?}");
            let there = |node: &String| root.path().join("dev").join(node).exists();
            assert!(gpu.nodes.iter().all(there), "{gpu:?}");
        }
        let nodes: BTreeSet<&String> = seen.gpus.iter().flat_map(|gpu| &gpu.nodes).collect();
        assert_eq!(nodes.len(), 2 * count, "each GPU has nodes of its own");
    }
}

#[test]
fn gpus_are_in_bus_order_and_partitions_follow_their_gpu() {
    let seen = look(&write(RecordedMachine::Mi210));
    let places: Vec<&str> = seen.gpus.iter().map(|gpu| gpu.pci.as_str()).collect();
    assert_eq!(
        places,
        ["03", "26", "43", "63", "83", "a3", "c3", "e3"].map(|bus| format!("0000:{bus}:00.0"))
    );
    let seen = look(&write(RecordedMachine::Mi308Cpx));
    let names: Vec<(&str, &str)> = seen.gpus.iter().map(|gpu| (gpu.pci.as_str(), gpu.uuid.as_str())).collect();
    let card = "0x084cafeae17e7696";
    assert_eq!(names[0], ("0000:0a:00.0", card));
    for (at, number) in [(1, 0), (2, 1), (3, 2)] {
        assert_eq!(names[at], ("0000:0a:00.0", format!("{card}-xcp-{number}").as_str()));
    }
    assert_eq!(names[4].0, "0000:80:00.0");
    assert_eq!(names[31].0, "0001:c9:00.0");
    assert_eq!(seen.gpus[1].nodes, ["dri/card2", "dri/renderD129"]);
}

#[test]
fn hives_have_xgmi_links_and_partitions_share_boards() {
    let seen = look(&write(RecordedMachine::Mi210));
    for at in 0..8 {
        let hive: Vec<u32> = if at < 4 { (0..4).collect() } else { (4..8).collect() };
        let others: Vec<u32> = hive.into_iter().filter(|peer| *peer as usize != at).collect();
        assert_eq!(peers(&seen, at, "xgmi"), others);
        assert_eq!(peers(&seen, at, "node"), others, "each hive is on a processor");
        assert_eq!(peers(&seen, at, "system").len(), 4);
    }
    for (machine, parts) in [(RecordedMachine::Mi308Cpx, 4), (RecordedMachine::Mi300xCpx, 8)] {
        let seen = look(&write(machine));
        for (at, gpu) in seen.gpus.iter().enumerate() {
            let first = at - at % parts;
            let others: Vec<u32> = (first..(first + parts).min(seen.gpus.len()))
                .filter(|peer| *peer != at)
                .filter_map(|peer| u32::try_from(peer).ok())
                .collect();
            assert_eq!(peers(&seen, at, "same-board"), others, "{machine:?}");
            assert_eq!(gpu.links.len(), others.len(), "no other link of so many GPUs is reported");
        }
    }
    let seen = look(&write(RecordedMachine::Vega10));
    assert!(
        seen.gpus.iter().all(|gpu| gpu.links.is_empty()),
        "nothing is recorded about this pair"
    );
}

/// A whole GPU has the memory of the card.
#[test]
fn a_partition_has_its_share_of_the_memory() {
    let root = write(RecordedMachine::Mi308Cpx);
    let seen = look(&root);
    assert!(
        seen.gpus
            .iter()
            .all(|gpu| gpu.total.0 / 1024 == 47 || gpu.total == MiB(49_152))
    );
    assert!(seen.gpus.iter().all(|gpu| gpu.used == MiB::ZERO));
    // With its partitions gone, the function is the whole card again.
    for render in 129..132 {
        recorded::remove_kfd_node(root.path(), render).expect("removed");
    }
    let seen = look(&root);
    assert_eq!((seen.gpus.len(), seen.gpus[0].total), (29, MiB(4 * 49_152)));
    let root = write(RecordedMachine::Mi210);
    let function = function_directory(root.path(), "0000:03:00.0");
    fs::write(function.join("mem_info_vram_total"), "0\n").expect("written");
    assert_eq!(look(&root).gpus[0].total, MiB(65_520), "KFD says it as well");
}

/// An error concerns only the GPU with the missing or wrong fact.
#[test]
fn missing_or_wrong_facts_are_errors_or_defaults() {
    type Change = fn(&Path, &Path);
    /// A check of the GPU's facts, or a part of the error.
    type Expected = Result<fn(&GpuFacts) -> bool, &'static str>;
    let edit = |path: &Path, from: &str, to: &str| {
        let text = fs::read_to_string(path).expect("read");
        assert!(text.contains(from), "{text}");
        fs::write(path, text.replace(from, to)).expect("written");
    };
    // Each case changes GPU 0; it gets the function's directory and the node's.
    let cases: [(&str, Change, Expected); 13] = [
        (
            "no product name",
            |function, _| fs::remove_file(function.join("product_name")).expect("removed"),
            Ok(|gpu| gpu.model == "AMD gfx90a 740f"),
        ),
        (
            "a long product name",
            |function, _| fs::write(function.join("product_name"), format!("\u{1b}[2J{}", "ü".repeat(200))).expect("written"),
            Ok(|gpu| gpu.model.len() <= 96 && gpu.model.starts_with("[2Jü")),
        ),
        (
            "NUMA node -1",
            |function, _| fs::write(function.join("numa_node"), "-1\n").expect("written"),
            Ok(|gpu| gpu.numa.is_none()),
        ),
        (
            "no NUMA node",
            |function, _| fs::remove_file(function.join("numa_node")).expect("removed"),
            Ok(|gpu| gpu.numa.is_none()),
        ),
        (
            "no SIMDs per unit",
            |_, node| {
                fs::write(
                    node.join("properties"),
                    "drm_render_minor 130\nsimd_count 4\nsimd_per_cu 0\nunique_id 5\n",
                )
                .expect("written")
            },
            Ok(|gpu| gpu.sms == 0 && gpu.uuid == "0x0000000000000005"),
        ),
        (
            "no unique id",
            |_, node| fs::write(node.join("properties"), "drm_render_minor 130\n").expect("written"),
            Ok(|gpu| gpu.uuid == "pci-0000-03-00-0"),
        ),
        (
            "no size of the memory",
            |function, node| {
                fs::remove_file(function.join("mem_info_vram_total")).expect("removed");
                fs::remove_dir_all(node.join("mem_banks")).expect("removed");
            },
            Err("memory: neither"),
        ),
        (
            "an absurd size of the memory",
            |function, _| fs::write(function.join("mem_info_vram_total"), "18446744073709551615\n").expect("written"),
            Err("memory: neither"),
        ),
        (
            "less than 1 MiB of memory",
            |function, node| {
                fs::write(function.join("mem_info_vram_total"), "1048575\n").expect("written");
                fs::remove_dir_all(node.join("mem_banks")).expect("removed");
            },
            Err("memory: neither"),
        ),
        (
            "no used memory",
            |function, _| fs::remove_file(function.join("mem_info_vram_used")).expect("removed"),
            Err("mem_info_vram_used"),
        ),
        (
            "a file of 1 MiB",
            |function, _| fs::write(function.join("mem_info_vram_used"), " ".repeat(1 << 20)).expect("written"),
            Err("mem_info_vram_used"),
        ),
        (
            "a link out of the root",
            |function, _| {
                fs::remove_file(function.join("mem_info_vram_used")).expect("removed");
                std::os::unix::fs::symlink("/../../proc/self/loginuid", function.join("mem_info_vram_used")).expect("linked");
            },
            Err("mem_info_vram_used"),
        ),
        (
            "no card node",
            |function, _| fs::remove_dir_all(function.join("drm/card3")).expect("removed"),
            Err("no card node"),
        ),
    ];
    for (name, change, expected) in cases {
        let root = write(RecordedMachine::Mi210);
        let before = look(&root);
        let node = kfd_node(root.path(), 130).expect("a node");
        change(&function_directory(root.path(), "0000:03:00.0"), &node);
        let seen = look(&root);
        let gpu = &seen.gpus[0];
        match expected {
            Ok(holds) => assert!(holds(gpu) && gpu.error.is_none(), "{name}: {gpu:?}"),
            Err(part) => assert!(
                gpu.error.as_ref().is_some_and(|error| error.contains(part)),
                "{name}: {gpu:?}"
            ),
        }
        assert!(!gpu.lost, "{name}");
        let rest = |snapshot: &Snapshot| {
            snapshot.gpus[1..]
                .iter()
                .map(|gpu| (gpu.uuid.clone(), gpu.total, gpu.model.clone()))
                .collect::<Vec<_>>()
        };
        assert_eq!(rest(&seen), rest(&before), "{name}");
    }
    // Two nodes with one render minor: it is not known which of them is right.
    let root = write(RecordedMachine::Mi210);
    let node = kfd_node(root.path(), 131).expect("a node");
    edit(&node.join("properties"), "drm_render_minor 131", "drm_render_minor 130");
    let seen = look(&root);
    assert_eq!((seen.gpus.len(), seen.unreadable.len()), (6, 2));
    assert!(seen.unreadable[0].error.contains("renderD130 twice"), "{:?}", seen.unreadable);
}

#[test]
fn gpus_without_an_id_of_their_own_are_named_by_their_place() {
    let root = write(RecordedMachine::Vega10);
    let names = |root: &TempDir| look(root).gpus.into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>();
    let by_place = ["pci-0000-19-00-0", "pci-0000-19-00-1"];
    for id in ["0", "7"] {
        for (render, old) in [(128, "14073402507705256556"), (129, "14073402507705256557")] {
            let file = kfd_node(root.path(), render).expect("a node").join("properties");
            let text = fs::read_to_string(&file).expect("read");
            let text = text.replace(old, id).replace("unique_id 0\n", &format!("unique_id {id}\n"));
            fs::write(&file, text).expect("written");
        }
        assert_eq!(names(&root), by_place, "both have the id {id}");
    }
    // Partitions without an id differ by their numbers.
    let root = write(RecordedMachine::Mi308Cpx);
    for render in 128..132 {
        let file = kfd_node(root.path(), render).expect("a node").join("properties");
        let text = fs::read_to_string(&file).expect("read").replace("598046273873802902", "0");
        fs::write(&file, text).expect("written");
    }
    assert_eq!(
        names(&root)[..4],
        ["", "-xcp-0", "-xcp-1", "-xcp-2"].map(|part| format!("pci-0000-0a-00-0{part}"))
    );
}

#[test]
fn partitions_are_found_under_both_of_the_kernels_names() {
    let root = write(RecordedMachine::Mi308Cpx);
    let before = look(&root);
    let platform = root.path().join("sys/devices/platform");
    for number in 0..56 {
        let [old, new] = ["amdgpu_xcp_", "amdgpu_xcp."].map(|prefix| platform.join(format!("{prefix}{number}")));
        fs::rename(old, new).expect("renamed");
    }
    assert_eq!(look(&root), before);
}

/// The GPU keeps its name while it is lost.
#[test]
fn a_gpu_gone_from_kfd_is_lost_and_comes_back() {
    let root = write(RecordedMachine::Mi210);
    let mut amd = open(&root);
    let before = snapshot(&mut amd);
    let node = kfd_node(root.path(), 130).expect("a node");
    let hidden = root.path().join("hidden");
    fs::rename(&node, &hidden).expect("moved");
    let seen = snapshot(&mut amd);
    let gpu = &seen.gpus[0];
    assert_eq!(
        (gpu.lost, &gpu.uuid, gpu.total),
        (true, &before.gpus[0].uuid, before.gpus[0].total)
    );
    assert!(
        gpu.error
            .as_ref()
            .is_some_and(|error| error.contains("KFD does not list renderD130")),
        "{gpu:?}"
    );
    assert!(seen.gpus[1..].iter().all(|gpu| !gpu.lost && gpu.error.is_none()));
    // A probe that never saw the GPU cannot know its name.
    let other = look(&root);
    assert_eq!((other.gpus.len(), other.unreadable[0].index), (7, 0));
    assert_eq!(other.gpus[0].index, 1);
    fs::rename(&hidden, &node).expect("moved");
    assert_eq!(snapshot(&mut amd), before);
}

#[test]
fn without_the_compute_driver_each_gpu_says_so() {
    let root = write(RecordedMachine::Vega10);
    fs::remove_file(root.path().join("sys/class/kfd/kfd")).expect("removed");
    let seen = look(&root);
    assert_eq!((seen.gpus.len(), seen.unreadable.len()), (0, 2));
    assert!(
        seen.unreadable.iter().all(|gpu| gpu.error.contains("install amdgpu-dkms")),
        "{seen:?}"
    );
}

#[test]
fn a_gpu_that_disappears_is_lost_for_the_tracker() {
    let root = write(RecordedMachine::Vega10);
    let mut amd = open(&root);
    let mut tracker = Tracker::new(RecoverySettings::default());
    assert!(tracker.snapshot(0, &snapshot(&mut amd)).is_empty());
    fs::remove_file(root.path().join("sys/bus/pci/drivers/amdgpu/0000:19:00.0")).expect("removed");
    let seen = snapshot(&mut amd);
    assert_eq!(seen.gpus.len(), 1);
    let lost = tracker.snapshot(1, &seen);
    assert_eq!(lost, ["0xc34ec50444dd0a6c"]);
}

#[test]
fn without_the_module_the_error_says_how_to_load_it() {
    let empty = tempfile::tempdir().expect("directory");
    let calls = DriverCalls::new(Duration::from_secs(60));
    let failure = AmdBackend::open(empty.path(), &calls).expect_err("no module");
    assert_eq!(failure.code, FailureCode::DriverNotLoaded);
    assert!(failure.text.contains("modprobe amdgpu"), "{failure}");
    let root = write(RecordedMachine::Vega10);
    let mut amd = open(&root);
    fs::remove_dir_all(root.path().join("sys/module/amdgpu")).expect("unloaded");
    assert_eq!(amd.snapshot().expect_err("no module").code, FailureCode::DriverNotLoaded);
    assert_eq!(amd.processes().expect_err("no module").code, FailureCode::DriverNotLoaded);
}

fn listen(amd: &mut AmdBackend) -> Receiver<DriverEvent> {
    let (sender, receiver) = channel();
    amd.events(EventSink::new(move |event| sender.send(event).expect("the test listens")));
    receiver
}

#[test]
fn a_gpu_fails_only_when_its_uncorrectable_errors_increase() {
    let root = write(RecordedMachine::Vega10);
    let mut amd = open(&root);
    let events = listen(&mut amd);
    let address = "0000:19:00.0";
    let ras = function_directory(root.path(), address).join("ras/umc_err_count");
    let set = |count| recorded::set_memory_errors(root.path(), address, count).expect("written");
    set(5);
    // The value, and the faults that it causes.
    for (count, faults) in [
        (Some(5), 0),
        (Some(5), 0),
        (Some(6), 1),
        (None, 0),
        (Some(6), 0),
        (Some(0), 0),
        (Some(1), 1),
        (Some(1), 0),
    ] {
        match count {
            Some(count) => set(count),
            None => fs::remove_file(&ras).expect("removed"),
        }
        snapshot(&mut amd);
        let heard: Vec<DriverEvent> = events.try_iter().collect();
        assert_eq!(heard.len(), faults, "{count:?}: {heard:?}");
        for event in heard {
            let DriverEvent::Fault(fault) = event else {
                panic!("{event:?}")
            };
            assert_eq!((fault.uuid.as_deref(), Some(fault.code)), (Some("0xc34ec50444dd0a6c"), count));
            assert!(fault.fatal && is_fault_name(&fault.name) && fault.vendor == Vendor::Amd);
        }
    }
    fs::write(&ras, "ue: 1\nce: 99999\n").expect("written");
    snapshot(&mut amd);
    assert_eq!(events.try_iter().count(), 0, "errors that are corrected");
    // All partitions of a GPU are on its memory.
    let root = write(RecordedMachine::Mi308Cpx);
    let mut amd = open(&root);
    let events = listen(&mut amd);
    let seen = snapshot(&mut amd);
    recorded::set_memory_errors(root.path(), "0000:0a:00.0", 1).expect("written");
    snapshot(&mut amd);
    let hit: Vec<Option<String>> = events
        .try_iter()
        .filter_map(|event| match event {
            DriverEvent::Fault(fault) => Some(fault.uuid),
            DriverEvent::Degraded(_) => None,
        })
        .collect();
    let expected: Vec<Option<String>> = seen.gpus[..4].iter().map(|gpu| Some(gpu.uuid.clone())).collect();
    assert_eq!(hit, expected);
}

#[test]
fn processes_are_those_that_use_memory_of_the_gpu() {
    let root = write(RecordedMachine::Vega10);
    let mut amd = open(&root);
    for (pid, node, bytes) in [
        (70, 1, 500 << 20),
        (7, 1, 10 << 20),
        (7, 2, 0),
        (8, 2, u64::MAX),
        (9, 55, 1 << 20),
    ] {
        recorded::set_process(root.path(), pid, recorded::gpu_id(node), bytes).expect("written");
    }
    let directory = root.path().join("sys/devices/virtual/kfd/kfd/proc/7");
    fs::write(directory.join("vram_x"), "1\n").expect("written");
    fs::write(directory.join("sdma_40001"), "1\n").expect("written");
    let all = amd.processes().expect("processes");
    GpuProcesses::validate(&all).expect("the client accepts them");
    let found: Vec<(&str, Vec<(u32, u64)>)> = all
        .iter()
        .map(|gpu| {
            (
                gpu.uuid.as_str(),
                gpu.processes.iter().map(|process| (process.pid, process.used.0)).collect(),
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            ("0xc34ec50444dd0a6c", vec![(7, 10), (70, 500)]),
            ("0xc34ec50444dd0a6d", vec![(8, 0)]),
        ]
    );
    assert!(all.iter().all(|gpu| gpu.error.is_none()));
    fs::remove_dir_all(root.path().join("sys/devices/virtual/kfd/kfd/proc")).expect("removed");
    assert!(
        amd.processes()
            .expect("no processes")
            .iter()
            .all(|gpu| gpu.processes.is_empty())
    );
}

/// Read a copy of a machine's files, and return the result for each device, with its name.
fn read_copy(tree: &Copy) -> Vec<(String, Result<GpuFacts, UnreadableDevice>)> {
    let calls = DriverCalls::new(Duration::from_secs(60));
    let mut found = find(tree, &calls, &mut RememberedDevices::default());
    Links::default().connect(tree, &calls, &mut found);
    found.into_iter().map(|found| (found.device.name, found.facts)).collect()
}

/// The links of a GPU with the device names of the other ends.
fn named(gpu: &GpuFacts, all: &[(String, Result<GpuFacts, UnreadableDevice>)]) -> BTreeSet<(String, String)> {
    let name = |uuid: &str| {
        let of = all
            .iter()
            .find(|(_, facts)| facts.as_ref().is_ok_and(|facts| facts.uuid == uuid));
        of.expect("a link to a GPU that is there").0.clone()
    };
    let links = gpu.links.iter();
    links.map(|link| (name(&link.peer), link.kind.as_str().to_owned())).collect()
}

/// The file is cut off or missing.
#[test]
fn a_damaged_file_gives_no_gpu_a_foreign_value() {
    for (machine, every) in [(RecordedMachine::Vega10, 1), (RecordedMachine::Mi210, 199)] {
        let whole = recorded::tree(machine);
        let before = read_copy(&whole);
        let files: Vec<(String, Vec<u8>)> = files(&whole);
        for (path, bytes) in files {
            let cuts = (0..bytes.len()).step_by(every).map(Some).chain([None]);
            for cut in cuts {
                let mut damaged = whole.clone();
                match cut {
                    Some(cut) => damaged.file(&path, &bytes[..cut]),
                    None => damaged.remove(&path),
                };
                let after = read_copy(&damaged);
                assert_eq!(after.len(), before.len(), "{path} {cut:?}");
                for ((name, was), (same, now)) in before.iter().zip(&after) {
                    let (Ok(was), Ok(now)) = (was, now) else {
                        assert!(was.is_ok(), "{path} {cut:?}");
                        continue;
                    };
                    assert_eq!(name, same);
                    let place = format!("pci-{}", was.pci.replace([':', '.'], "-"));
                    let own = [
                        (now.uuid == was.uuid || now.uuid == place, "UUID"),
                        (now.pci == was.pci, "address"),
                        (now.index == was.index, "index"),
                        (now.nodes == was.nodes, "nodes"),
                        (now.cc == was.cc || now.cc.is_empty(), "architecture"),
                        (now.sms == was.sms || now.sms == 0, "units"),
                        (
                            now.total == was.total || (now.total == MiB::ZERO && now.error.is_some()),
                            "memory",
                        ),
                        (now.used == was.used || now.error.is_some(), "used memory"),
                        (now.numa == was.numa || now.numa.is_none(), "NUMA node"),
                        (was.model.starts_with(&now.model) || now.model.starts_with("AMD"), "model"),
                    ];
                    for (holds, what) in own {
                        assert!(holds, "{path} {cut:?}: the {what} of {name}: {now:?}");
                    }
                    let (had, has) = (named(was, &before), named(now, &after));
                    assert!(has.is_subset(&had), "{path} {cut:?}: {name} {has:?} {had:?}");
                }
            }
        }
    }
}

/// The regular files of a copy, with their bytes.
fn files(tree: &Copy) -> Vec<(String, Vec<u8>)> {
    fn add(tree: &Copy, directory: &str, found: &mut Vec<(String, Vec<u8>)>) {
        for name in tree.names(directory) {
            let path = format!("{}/{name}", directory.trim_end_matches('/'));
            match tree.stat(&path).map(|entry| entry.kind) {
                Some(divvy_host::FileKind::Directory) => add(tree, &path, found),
                Some(divvy_host::FileKind::File) if path.starts_with("/sys") => {
                    let bytes = tree.read(&path, 1 << 20).expect("read");
                    found.push((path, bytes));
                }
                _ => {}
            }
        }
    }
    let mut found = Vec::new();
    add(tree, "/", &mut found);
    found
}

#[test]
fn what_amdgpu_measures_is_read_and_a_partition_has_none_of_it() {
    let root = write(RecordedMachine::Mi210);
    let mut amd = open(&root);
    let measured = |amd: &mut AmdBackend| amd.gauges().expect("an answer");
    let function = function_directory(root.path(), "0000:03:00.0");
    // An old kernel module has only the memory.
    let before = measured(&mut amd);
    assert_eq!((before.len(), before[0].uuid.as_str()), (8, "0x93bb3629c01aea1c"));
    let memory = before[0].values.memory.expect("memory");
    assert_eq!(
        (memory.total >> 20, memory.used + memory.free, memory.reserved),
        (65_520, memory.total, None)
    );
    let only_memory = Gauges {
        memory: Some(memory),
        ..Gauges::default()
    };
    assert_eq!(before[0].values, only_memory);
    let sensors = function.join("hwmon/hwmon7");
    fs::create_dir_all(&sensors).expect("made");
    for (file, text) in [
        ("../../gpu_busy_percent", "37\n"),
        ("../../mem_busy_percent", "12\n"),
        ("power1_average", "41234567\n"),
        ("power1_input", "99000000\n"),
        ("temp1_input", "45999\n"),
        ("temp3_input", "52000\n"),
    ] {
        fs::write(sensors.join(file), text).expect("written");
    }
    let expected = Gauges {
        gpu_percent: Some(37),
        memory_percent: Some(12),
        power_milliwatts: Some(41_234),
        temperature_celsius: Some(45),
        memory_temperature_celsius: Some(52),
        ..only_memory
    };
    let found = measured(&mut amd);
    assert_eq!((found[0].values, &found[1..]), (expected, &before[1..]));
    // Other GPUs have the current power only. A number that is cut off is none.
    fs::remove_file(sensors.join("power1_average")).expect("removed");
    fs::write(sensors.join("temp1_input"), "45").expect("written");
    fs::write(sensors.join("temp3_input"), "-1\n").expect("written");
    fs::write(function.join("mem_info_vram_used"), "18446744073709551615\n").expect("written");
    let found = measured(&mut amd).swap_remove(0).values;
    let expected = Gauges {
        memory: None,
        power_milliwatts: Some(99_000),
        temperature_celsius: None,
        memory_temperature_celsius: None,
        ..expected
    };
    assert_eq!(found, expected);

    let root = write(RecordedMachine::Mi308Cpx);
    let parts = measured(&mut open(&root));
    assert_eq!(parts.len(), 32);
    assert!(
        parts
            .iter()
            .all(|part| part.values == Gauges::default() && part.error.is_none()),
        "{parts:?}"
    );
}

#[test]
fn a_lost_amd_gpu_has_an_error_and_the_others_have_values() {
    let root = write(RecordedMachine::Mi210);
    let mut amd = open(&root);
    snapshot(&mut amd);
    let node = kfd_node(root.path(), 130).expect("a node");
    fs::remove_dir_all(node).expect("removed");
    let found = amd.gauges().expect("an answer");
    GpuGauges::validate(&found).expect("the client accepts it");
    let is_lost = |gpu: &GpuGauges| (gpu.error.is_some(), gpu.values == Gauges::default());
    assert_eq!(is_lost(&found[0]), (true, true), "{:?}", found[0]);
    assert!(found[1..].iter().all(|gpu| is_lost(gpu) == (false, false)), "{found:?}");
}

const GIB: u64 = 1 << 30;

/// Make the cgroup of a pod, with the kernel's files as they are before a limit is set.
fn pod_cgroup(root: &TempDir, regions: &[&str]) -> Cgroup {
    let cgroups = root.path().join("sys/fs/cgroup");
    let directory = cgroups.join("kubepods/pod6b8e5a3c-0000-4000-8000-000000000001");
    fs::create_dir_all(&directory).expect("created");
    let lines = |value: &str| regions.iter().map(|region| format!("{region} {value}\n")).collect::<String>();
    fs::write(cgroups.join("dmem.capacity"), lines("68702699520")).expect("written");
    fs::write(directory.join("dmem.max"), lines("max")).expect("written");
    fs::write(directory.join("dmem.current"), lines("1073741824")).expect("written");
    Cgroup { directory, pod: None }
}

#[test]
fn a_limit_is_set_where_the_kernel_has_a_region_for_the_gpu() {
    let other = "nvidia/00000000:02:00.0/vidmem";
    for (regions, expected) in [
        (&["drm/0000:03:00.0/vram", "drm/0000:26:00.0/vram"][..], true),
        (&[other, "drm/0000:03:00.0/vram"], true),
        (&["drm/0000:26:00.0/vram"], false),
        (&["drm/0000:03:00.0/vram0"], false),
        (&["drm/10000:03:00.0/vram"], false),
        (&[], false),
    ] {
        let root = write(RecordedMachine::Mi210);
        let cgroup = pod_cgroup(&root, regions);
        let mut amd = open(&root);
        let gpu = snapshot(&mut amd).gpus.remove(0);
        assert_eq!(
            (gpu.pci.as_str(), gpu.memory_limit),
            ("0000:03:00.0", expected),
            "{regions:?}"
        );
        let limited = amd.limit(&gpu.uuid, &cgroup, MiB(3072));
        let text = fs::read_to_string(cgroup.directory.join("dmem.max")).expect("read");
        match limited {
            Ok(limited) => {
                assert!(
                    expected && !limited.left_out && limited.used == MiB(1024),
                    "{regions:?}: {limited:?}"
                );
                assert_eq!(text, format!("drm/0000:03:00.0/vram {}\n", 3 * GIB), "{regions:?}");
            }
            Err(failure) => {
                assert!(
                    !expected && failure.code == FailureCode::NotSupported,
                    "{regions:?}: {failure}"
                );
                assert!(failure.text.contains("dmem.capacity does not list it"), "{failure}");
                assert!(!text.contains(&GIB.to_string()), "{text}");
            }
        }
    }
}

#[test]
fn a_machine_may_have_pci_domains_of_more_than_four_digits() {
    let root = tempfile::tempdir().expect("directory");
    let gpu = divvy_model::machine::MachineAmd {
        model: "AMD Instinct MI210".to_owned(),
        memory_mib: 65_520,
        hive: 0,
        numa: None,
    };
    divvy_amd_sim::install(root.path(), &[gpu]).expect("written");
    let functions = root.path().join("sys/module/amdgpu/drivers/pci:amdgpu");
    fs::rename(functions.join("0000:19:00.0"), functions.join("10000:19:00.0")).expect("renamed");
    let cgroup = pod_cgroup(&root, &["drm/10000:19:00.0/vram"]);
    let mut amd = open(&root);
    let gpu = snapshot(&mut amd).gpus.remove(0);
    assert_eq!((gpu.pci.as_str(), gpu.memory_limit), ("10000:19:00.0", true));
    amd.limit(&gpu.uuid, &cgroup, MiB(1024)).expect("limited");
    let text = fs::read_to_string(cgroup.directory.join("dmem.max")).expect("read");
    assert_eq!(text, format!("drm/10000:19:00.0/vram {GIB}\n"));
}

/// The kernel refuses the limit or does not have it afterwards; the error repeats the kernel's words.
#[test]
fn a_limit_that_the_kernel_does_not_take_fails() {
    let region = "drm/0000:03:00.0/vram";
    let of = |file: &dyn Fn(&Path)| {
        let root = write(RecordedMachine::Mi210);
        let cgroup = pod_cgroup(&root, &[region]);
        let path = cgroup.directory.join("dmem.max");
        fs::remove_file(&path).expect("removed");
        file(&path);
        let mut amd = open(&root);
        let uuid = snapshot(&mut amd).gpus.remove(0).uuid;
        let failure = amd.limit(&uuid, &cgroup, MiB(1024)).expect_err("no limit");
        assert!(failure.text.contains(&uuid) && failure.text.contains("dmem.max"), "{failure}");
        (failure.text, path.exists())
    };
    let (text, exists) = of(&|_| {});
    assert!(text.contains("No such file") && !exists, "the file is the kernel's: {text}");
    // Each write to this device fails, as each write of an unknown region does in the kernel.
    let (text, _) = of(&|path| std::os::unix::fs::symlink("/dev/full", path).expect("linked"));
    assert!(text.contains("No space left on device"), "{text}");
    for (found, expected) in [
        (format!("{region} {GIB}\n"), Ok(())),
        (format!("nvidia/x/vidmem max\n{region}\t{GIB}\n"), Ok(())),
        (format!("{region}  {GIB} \n"), Ok(())),
        (format!("{region} max\n"), Err("max")),
        (format!("{region} {}\n", 2 * GIB), Err("2147483648")),
        (format!("{region}0 {GIB}\n"), Err("does not list it")),
        (String::new(), Err("does not list it")),
    ] {
        match (dmem::check(&found, &super::region("0000:03:00.0"), GIB), expected) {
            (Ok(()), Ok(())) => {}
            (Err(why), Err(expected)) => assert!(why.to_string().contains(expected), "{found:?}: {why}"),
            (read, expected) => panic!("{found:?}: {read:?} and not {expected:?}"),
        }
    }
}

#[test]
fn containers_have_the_pods_limit_and_partitions_none() {
    let root = write(RecordedMachine::Mi210);
    let pod = pod_cgroup(&root, &["drm/0000:03:00.0/vram"]);
    let directory = pod.directory.join("0f".repeat(32));
    fs::create_dir_all(&directory).expect("created");
    let mut amd = open(&root);
    let uuid = snapshot(&mut amd).gpus.remove(0).uuid;
    let of = Some(crate::backend::PodOf {
        directory: pod.directory,
        alone: true,
    });
    let container = Cgroup { directory, pod: of };
    let limited = amd.limit(&uuid, &container, MiB(1024)).expect("left out");
    assert!(limited.left_out && !container.directory.join("dmem.max").exists());

    let root = write(RecordedMachine::Mi308Cpx);
    let pod = pod_cgroup(&root, &["drm/0000:0a:00.0/vram"]);
    let mut amd = open(&root);
    let gpu = snapshot(&mut amd).gpus.remove(0);
    assert_eq!((gpu.pci.as_str(), gpu.memory_limit), ("0000:0a:00.0", false));
    let failure = amd.limit(&gpu.uuid, &pod, MiB(1024)).expect_err("no limit");
    assert!(failure.text.contains("it is a partition of a GPU"), "{failure}");
    let failure = amd.limit("0x1", &pod, MiB(1024)).expect_err("no limit");
    assert_eq!(failure.code, FailureCode::GpuLost);
}

/// The controller's files on this machine, if its kernel has the controller.
#[test]
fn the_kernels_own_files_are_read() {
    let path = "/sys/fs/cgroup/dmem.capacity";
    let Ok(text) = fs::read_to_string(path) else {
        divvy_skip::skipped("the kernel has no controller of device memory (dmem)");
        return;
    };
    for line in text.lines() {
        let (region, bytes) = line.split_once(' ').expect("a region and a number");
        bytes.parse::<u64>().expect(line);
        if let Some(pci) = region.strip_prefix("drm/").and_then(|rest| rest.strip_suffix("/vram")) {
            assert!(dmem::can_limit(&Files::below(Path::new("/")), &super::region(pci)), "{line}");
        }
    }
    assert!(!dmem::can_limit(
        &Files::below(Path::new("/")),
        &super::region("ffff:00:00.0")
    ));
}

#[test]
fn the_processes_of_a_pod_do_not_hide_those_of_other_pods() {
    let mut tree = Copy::default();
    let put = |tree: &mut Copy, pod: u32, pid: u32| {
        tree.file(
            &format!("/proc/{pid}/cgroup"),
            format!(
                "0::/kubepods/burstable/pod6b8e5a3c-0000-4000-8000-{pod:012}/{}\n",
                "0f".repeat(32)
            ),
        )
        .file(&format!("{PROCESSES}/{pid}/vram_7"), "1024\n");
    };
    let honest = [90_001, 90_002, 90_003];
    for (pod, pid) in (1..).zip(honest) {
        put(&mut tree, pod, pid);
    }
    for pid in 100..200 {
        put(&mut tree, 99, pid);
    }
    let of_gpu = &used(&tree, 64)[&7];
    assert!(honest.iter().all(|pid| of_gpu.contains_key(pid)));
    assert_eq!(of_gpu.len(), 64);
}
