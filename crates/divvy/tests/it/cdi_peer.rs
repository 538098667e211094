//! Compares NVIDIA's `nvidia-ctk cdi` with ours, on the same machine with the same arguments: the meaning of the generated specs,
//! and the handling of existing specs. `DIVVY_NVIDIA_CTK` names the directory of NVIDIA's programs (1.20.0). NVIDIA's program
//! loads the library of the simulated driver.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::anyhow;
use serde_json::Value;

use crate::cluster::programs;

const VERSION: &str = "550.54.15";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const FIRST: &str = "GPU-edfee158-11c1-52b8-0517-92f30e7fac88";
const SECOND: &str = "GPU-edfee158-11c1-52b8-0517-92f30e7fac99";

/// The GPU instance and compute instance of each MIG device of a GPU with MIG enabled.
type Mig = Option<&'static [(u32, u32)]>;

/// Return a machine description. The order of the minor numbers differs from the order of the indices.
fn machine(mig: [Mig; 2]) -> String {
    let gpu = |uuid, minor, pci, mig: Mig| {
        let part = |(gi, ci): &(u32, u32)| format!("{{ gpu_instance = {gi}, compute_instance = {ci} }}");
        let mig = mig.map(|mig| format!("mig = [{}]\n", mig.iter().map(part).collect::<Vec<_>>().join(", ")));
        format!(
            "[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nmemory_mib = 40960\nuuid = {uuid:?}\nminor = {minor}\npci = {pci:?}\n{}",
            mig.unwrap_or_default()
        )
    };
    format!(
        "v = 1\n[[node]]\nname = \"n\"\ndriver = {VERSION:?}\n{}{}",
        gpu(FIRST, 1, "0000:06:00.0", mig[0]),
        gpu(SECOND, 0, "0000:81:00.0", mig[1])
    )
}

struct Bed {
    directory: tempfile::TempDir,
    theirs: PathBuf,
    /// The directory that replaces `/proc/driver`, if the GPUs are divided with MIG.
    proc: Option<PathBuf>,
    _socket: UnixListener,
}

impl Bed {
    /// Make the machine. If that is not possible, record a skip and return `None`.
    fn new() -> Option<Bed> {
        let programs_of_nvidia = divvy_skip::directory("DIVVY_NVIDIA_CTK", "NVIDIA's programs")?;
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().join("driver");
        let write = |path: &str, bytes: &[u8]| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, bytes).expect("written");
        };
        for stem in [
            "libcuda",
            "libnvidia-ptxjitcompiler",
            "libnvidia-cfg",
            "libcudadebugger",
            "libnvidia-opticalflow",
            "libGLX_nvidia",
            "libnvidia-allocator",
            "libnvidia-nvvm",
            "libnvidia-opencl",
            "libnvidia-vulkan-producer",
            "vdpau/libvdpau_nvidia",
        ] {
            write(&format!("{LIBRARIES}/{stem}.so.{VERSION}"), stem.as_bytes());
        }
        let simulated = fs::read(&programs().nvml_sim).expect("the simulated driver");
        write(&format!("{LIBRARIES}/libnvidia-ml.so.{VERSION}"), &simulated);
        for own in [
            "libnvidia-egl-gbm.so.1.1.1",
            "libnvidia-egl-wayland.so.1.1.13",
            "libnvidia-nvvm70.so.4",
        ] {
            write(&format!("{LIBRARIES}/{own}"), b"its own version");
        }
        for program in [
            "nvidia-smi",
            "nvidia-debugdump",
            "nvidia-persistenced",
            "nvidia-cuda-mps-control",
            "nvidia-imex",
        ] {
            write(&format!("usr/bin/{program}"), b"#!/bin/sh\n");
            let mode = fs::Permissions::from_mode(0o755);
            fs::set_permissions(root.join("usr/bin").join(program), mode).expect("its mode");
        }
        for file in [
            "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
            "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
            "usr/share/nvidia/nvoptix.bin",
            "usr/share/X11/xorg.conf.d/10-nvidia.conf",
            "etc/OpenCL/vendors/nvidia.icd",
            "etc/vulkan/icd.d/nvidia_icd.json",
            "etc/cufile.json",
            &format!("lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"),
            &format!("lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin"),
            "usr/lib/xorg/modules/drivers/nvidia_drv.so",
            &format!("usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}"),
        ] {
            write(file, b"{}");
        }
        for (link, target) in [
            ("libnvidia-ml.so.1", "libnvidia-ml.so."),
            ("libcuda.so.1", "libcuda.so."),
            ("libnvidia-opencl.so.1", "libnvidia-opencl.so."),
            ("libGLX_nvidia.so.0", "libGLX_nvidia.so."),
            ("libnvidia-allocator.so.1", "libnvidia-allocator.so."),
            ("vdpau/libvdpau_nvidia.so.1", "libvdpau_nvidia.so."),
        ] {
            symlink(format!("{target}{VERSION}"), root.join(LIBRARIES).join(link)).expect("linked");
        }
        symlink("libcuda.so.1", root.join(LIBRARIES).join("libcuda.so")).expect("linked");
        fs::create_dir_all(root.join(LIBRARIES).join("gbm")).expect("made");
        symlink(
            "../libnvidia-allocator.so.1",
            root.join(LIBRARIES).join("gbm/nvidia-drm_gbm.so"),
        )
        .expect("linked");
        fs::create_dir_all(root.join("run/nvidia-persistenced")).expect("made");
        let socket = UnixListener::bind(root.join("run/nvidia-persistenced/socket")).expect("a socket");
        for (node, major, minor) in [
            ("nvidia0", 195, 0),
            ("nvidia1", 195, 1),
            ("nvidiactl", 195, 255),
            ("nvidia-modeset", 195, 254),
            ("nvidia-uvm", 510, 0),
            ("nvidia-uvm-tools", 510, 1),
            ("nvidia-caps/nvidia-cap1", 511, 1),
            ("nvidia-caps/nvidia-cap2", 511, 2),
            ("nvidia-fs", 512, 9),
            ("nvidia-fs0", 512, 0),
            ("infiniband/uverbs0", 231, 192),
            ("infiniband/umad0", 231, 0),
            ("infiniband/rdma_cm", 10, 55),
            ("gdrdrv", 513, 0),
            ("nvidia-nvswitchctl", 514, 255),
            ("nvidia-nvswitch0", 514, 0),
            ("nvidia-nvlink", 515, 0),
            ("nvidia-caps-imex-channels/channel0", 516, 0),
            ("nvidia-caps-imex-channels/channel3", 516, 3),
        ] {
            let path = root.join("dev").join(node);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            let mode = if node == "nvidia1" { "660" } else { "666" };
            let (major, minor) = (i32::to_string(&major), i32::to_string(&minor));
            let made = Command::new("mknod")
                .args(["-m", mode])
                .arg(&path)
                .args(["c", &major, &minor])
                .status();
            if !made.is_ok_and(|status| status.success())
                || !fs::metadata(&path).is_ok_and(|node| node.file_type().is_char_device())
            {
                divvy_skip::skipped("no device node can be made: that takes root");
                return None;
            }
        }
        chown(root.join("dev/nvidia1"), None, Some(44)).expect("its group");
        fs::write(directory.path().join("machine.toml"), machine([None, None])).expect("written");
        symlink(env!("CARGO_BIN_EXE_divvy"), directory.path().join("nvidia-ctk")).expect("linked");
        Some(Bed {
            directory,
            theirs: programs_of_nvidia.join("nvidia-ctk"),
            proc: None,
            _socket: socket,
        })
    }

    fn at(&self, path: &str) -> String {
        self.directory.path().join(path).display().to_string()
    }

    fn run(&self, program: &Path, words: &[&str], input: &str) -> Output {
        let mut command = Command::new(program);
        if let Some(proc) = &self.proc {
            command = Command::new("unshare");
            command
                .args(["--mount", "--propagation", "private", "sh", "-c"])
                .arg("mount --bind \"$0\" /proc/driver && exec \"$@\"")
                .arg(proc)
                .arg(program);
        }
        let mut child = command
            .args(words)
            .env_remove("DIVVY_SYS_ROOT")
            .env("DIVVY_NVML_SIM", self.at("machine.toml"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut stdin = child.stdin.take().expect("its input");
        // A program that reads no input may have closed the pipe.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        child.wait_with_output().expect("it ends")
    }

    /// Return the output or the error of NVIDIA's program and of ours, in this order.
    fn both(&self, words: &[&str], input: &str) -> [anyhow::Result<String>; 2] {
        [self.theirs.clone(), self.directory.path().join("nvidia-ctk")].map(|program| {
            let output = self.run(&program, words, input);
            let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
            if output.status.success() {
                Ok(text(&output.stdout))
            } else {
                Err(anyhow!(text(&output.stderr)))
            }
        })
    }
}

fn array(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Describe each thing that `edits` adds to a container.
fn edits(edits: &Value, directories_of_libcuda: bool) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for entry in array(&edits["env"]) {
        let entry = text(&entry);
        // Ours also mounts into the directory of the other distributions.
        let (first, _) = entry
            .split_once(':')
            .filter(|_| directories_of_libcuda)
            .unwrap_or((&entry, ""));
        all.insert(format!("variable {first}"));
    }
    for node in array(&edits["deviceNodes"]) {
        let path = text(&node["path"]);
        let host = node["hostPath"].as_str().map_or_else(|| path.clone(), str::to_owned);
        all.insert(format!("node {path} of {host}, group {}", node["gid"]));
        // Ours states the mode if it is not 0666, and leaves the device numbers to the engine.
        if node["gid"] != Value::Null {
            all.insert(format!("node {path} of mode {}", node["fileMode"]));
        }
        assert!(
            matches!(node["permissions"].as_str(), None | Some("rwm")),
            "what is not said is rwm: {node}"
        );
    }
    for mount in array(&edits["mounts"]) {
        let mut options: Vec<String> = array(&mount["options"]).iter().map(text).collect();
        options.sort();
        let (host, at) = (text(&mount["hostPath"]), text(&mount["containerPath"]));
        all.insert(format!("mount {host} at {at}: {}", options.join(" ")));
    }
    all.extend(array(&edits["additionalGids"]).iter().map(|gid| format!("group {gid}")));
    all
}

type Spec = (String, BTreeMap<String, BTreeSet<String>>);

fn meaning(spec: &Value) -> Spec {
    let devices = array(&spec["devices"]);
    let mut all: BTreeMap<String, BTreeSet<String>> = devices
        .iter()
        .map(|device| (text(&device["name"]), edits(&device["containerEdits"], false)))
        .collect();
    all.insert("(all of them)".to_owned(), edits(&spec["containerEdits"], true));
    (text(&spec["kind"]), all)
}

/// Return what only NVIDIA's spec has, and what only ours has. Additional mounts of ours (names of libraries) are ignored.
fn differences(theirs: &str, ours: &str) -> Vec<String> {
    let read = |text: &str| -> Value { serde_json::from_str(text).expect("JSON") };
    let (theirs, ours) = (read(theirs), read(ours));
    let ((kind, a), (own_kind, b)) = (meaning(&theirs), meaning(&ours));
    let mut found = Vec::new();
    if kind != own_kind {
        found.push(format!("kind {kind} and {own_kind}"));
    }
    let none = BTreeSet::new();
    for device in a.keys().chain(b.keys()).collect::<BTreeSet<_>>() {
        if !a.contains_key(device) || !b.contains_key(device) {
            found.push(format!("device {device} is in one only"));
        }
        let (a, b) = (a.get(device).unwrap_or(&none), b.get(device).unwrap_or(&none));
        found.extend(a.difference(b).map(|one| format!("{device}: ours has not: {one}")));
        let more = b.difference(a).filter(|one| !one.starts_with("mount "));
        found.extend(more.map(|one| format!("{device}: ours alone has: {one}")));
    }
    // NVIDIA's hooks create links; ours are mounts instead.
    assert!(array(&ours["containerEdits"]["hooks"]).is_empty(), "ours has no hooks");
    let mounted: BTreeSet<String> = array(&ours["containerEdits"]["mounts"])
        .iter()
        .map(|mount| text(&mount["containerPath"]))
        .collect();
    for hook in array(&theirs["containerEdits"]["hooks"]) {
        for word in array(&hook["args"]) {
            if let Some((_, link)) = text(&word).split_once("::")
                && !mounted.contains(link)
            {
                found.push(format!("ours has nothing at {link}"));
            }
        }
    }
    found
}

#[test]
fn what_is_generated_means_what_nvidias_means() {
    let Some(bed) = Bed::new() else { return };
    let root = bed.at("driver");
    let (nowhere, other_devices) = (bed.at("nowhere"), bed.at("other"));
    fs::create_dir_all(&other_devices).expect("made");
    let only_first = ["--device-id", FIRST, "--device-name-strategy", "index"];
    let dev = ["--dev-root", &root];
    let empty = ["--dev-root", &other_devices];
    let rows: &[(&[&str], Option<&str>)] = &[
        (&[], None),
        (&["--device-name-strategy", "index"], None),
        (&["--device-name-strategy", "uuid"], None),
        (&["--device-name-strategy", "type-index"], None),
        (
            &["--device-name-strategy", "uuid", "--device-name-strategy", "type-index"],
            None,
        ),
        (&["--device-name-strategy", "index,uuid,type-index"], None),
        (&["--device-name-strategy", "bogus"], None),
        (&["--vendor", "example.com", "--class", "device"], None),
        (&["--cdi-vendor", "example.com", "--cdi-class", "a.b"], None),
        (&["--vendor", "-x"], None),
        (&["--class", "1x"], None),
        (&["--no-all-device"], None),
        (&["--device-id", "0"], None),
        (&["--device-ids", "0,1"], None),
        (&["--device", "1", "--device", "0"], None),
        (&["--device-id", FIRST], None),
        (&only_first, None),
        (&["--device-id", "none"], None),
        (&["--device-id", "none,0"], None),
        (&["--device-id", "all"], None),
        (&["--device-id", "7"], None),
        (&["--device-id", "0", "--no-all-device"], None),
        (&["--mode", "nvml"], None),
        (&["--discovery-mode", "management"], None),
        (&["--mode", "management", "--device-name-strategy", "uuid"], None),
        (&["--mode", "mofed"], None),
        (&["--mode", "gdrcopy", "--device-id", "0"], None),
        (&["--mode", "nvswitch"], None),
        (&["--mode", "imex"], None),
        (&["--mode", "imex", "--device-id", "3", "--no-all-device"], None),
        (&["--mode", "wsl"], None),
        (&["--mode", "csv"], None),
        (&["--mode", "bogus"], None),
        (&dev, None),
        (&empty, None),
        (&["--driver-root", &nowhere], None),
        (&["--feature-flag", "no-additional-gids-for-device-nodes"], None),
        (&["--feature-flag", "disable-nvsandboxutils"], None),
        (&["--disable-hook", "all"], None),
        (
            &[
                "--ldconfig-path",
                "/sbin/ldconfig",
                "--nvidia-cdi-hook-path",
                "/usr/bin/nvidia-cdi-hook",
            ],
            None,
        ),
        (&["--mode", "gds"], None),
        (&["--enable-hook", "chmod"], None),
        (&["--config-search-path", "/etc"], None),
    ];
    generated(&bed, rows);
}

/// The arguments of a run of `cdi generate`. If the two programs are to differ, also the reason for the difference.
type Row<'r> = (&'r [&'r str], Option<&'r str>);

fn generated(bed: &Bed, rows: &[Row<'_>]) {
    let root = bed.at("driver");
    let mut wrong = Vec::new();
    for (words, why) in rows {
        let mut all = vec!["--quiet", "cdi", "generate", "--format", "json", "--driver-root", &root];
        if words.first() == Some(&"--driver-root") {
            all.truncate(5);
        }
        all.extend(*words);
        let found = match bed.both(&all, "") {
            [Ok(theirs), Ok(ours)] => differences(&theirs, &ours),
            [Err(_), Err(_)] => Vec::new(),
            [Err(said), Ok(_)] => vec![format!("theirs alone refuses: {said}")],
            [Ok(_), Err(said)] => vec![format!("ours alone refuses: {said}")],
        };
        match why {
            None if !found.is_empty() => wrong.push(format!("{words:?}: {found:#?}")),
            Some(why) if found.is_empty() => wrong.push(format!("{words:?}: not apart any more: {why}")),
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Divide the GPUs with MIG: write the NVML data, the kernel module's list of capabilities, and the device nodes of the
/// capabilities. The programs see the files of the kernel module in a separate mount namespace.
fn divide(bed: &mut Bed, mig: [Mig; 2]) {
    fs::write(bed.at("machine.toml"), machine(mig)).expect("written");
    let proc = PathBuf::from(bed.at("proc"));
    let write = |path: &str, text: &str| {
        let path = proc.join(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(path, text).expect("written");
    };
    let mut minors = String::from("config 1\nmonitor 2\n");
    let mut next = 3..;
    // The minor numbers of the GPUs, as in the machine description.
    for (gpu, mig) in [(1, mig[0]), (0, mig[1])] {
        let mig = mig.unwrap_or_default();
        let instances: BTreeSet<u32> = mig.iter().map(|(gi, _)| *gi).collect();
        let paths = instances.iter().map(|gi| format!("gi{gi}"));
        for path in paths.chain(mig.iter().map(|(gi, ci)| format!("gi{gi}/ci{ci}"))) {
            let minor: u32 = next.next().expect("there are many");
            write(
                &format!("nvidia/capabilities/gpu{gpu}/mig/{path}/access"),
                &format!("DeviceFileMinor: {minor}\nDeviceFileMode: 256\nDeviceFileModify: 1\n"),
            );
            minors.push_str(&format!("gpu{gpu}/{path}/access {minor}\n"));
            let node = bed.at(&format!("driver/dev/nvidia-caps/nvidia-cap{minor}"));
            let made = Command::new("mknod")
                .args(["-m", "444", &node, "c", "511", &minor.to_string()])
                .status();
            assert!(made.is_ok_and(|status| status.success()), "root made others");
        }
    }
    write("nvidia-caps/mig-minors", &minors);
    bed.proc = Some(proc);
}

/// Return the UUID of a MIG device, given the index of its GPU and the index of the device.
fn mig_uuid(bed: &Bed, gpu: usize, mig: usize) -> String {
    let text = fs::read_to_string(bed.at("machine.toml")).expect("written");
    let machines = divvy_model::machine::Machines::parse(&text).expect("a machine");
    machines.node("n").expect("its name").mig_uuid(gpu, mig)
}

const TWICE: &str =
    "a strategy that is named twice counts once; NVIDIA's writes each device twice, and then refuses its own spec";

const WHOLE: &str = "a GPU that is divided is no device: its node alone, as in NVIDIA's spec, lets nothing compute; the error names its MIG devices";

#[test]
fn of_gpus_that_are_divided_is_generated_what_nvidias_generates() {
    let machines: [[Mig; 2]; 4] = [
        // One of two devices, named in two ways.
        [Some(&[(1, 0), (2, 0), (7, 0)]), None],
        [None, Some(&[(9, 0)])],
        // Compute instances within one GPU instance, not in numerical order.
        [Some(&[(2, 0), (1, 1), (1, 0)]), Some(&[(0, 0), (0, 1), (0, 2)])],
        [Some(&[(3, 0), (3, 1)]), Some(&[(3, 0)])],
    ];
    for gpus in machines {
        let Some(mut bed) = Bed::new() else { return };
        divide(&mut bed, gpus);
        let mig = gpus.map(Option::unwrap_or_default);
        let divided = usize::from(gpus[0].is_none());
        let uuid = mig_uuid(&bed, divided, 0);
        let of_gpu = [FIRST, SECOND][divided];
        let (zero, whole) = (format!("{divided}:0"), divided.to_string());
        let (last, beyond) = (
            format!("{divided}:{}", mig[divided].len() - 1),
            format!("{divided}:{}", mig[divided].len()),
        );
        let other = (1 - divided).to_string();
        let by_place = format!("MIG-{of_gpu}/{}/{}", mig[divided][0].0, mig[divided][0].1);
        let both = format!("{zero},{other}");
        let mut rows: Vec<Row<'_>> = vec![
            (&[], None),
            (&["--device-name-strategy", "index"], None),
            (&["--device-name-strategy", "uuid"], None),
            (&["--device-name-strategy", "type-index"], None),
            (&["--device-name-strategy", "index,uuid,type-index"], None),
            (&["--device-name-strategy", "uuid,uuid"], Some(TWICE)),
            (&["--device-name-strategy", "index,uuid,index"], Some(TWICE)),
            (&["--no-all-device"], None),
            (&["--mode", "nvml"], None),
            (&["--mode", "management"], None),
            (&["--vendor", "example.com", "--class", "mig"], None),
        ];
        let (mut is_device, mut whole) = (vec![&zero[..], &last, &uuid, &by_place, &beyond], vec![&whole[..], of_gpu]);
        match mig[1 - divided] {
            [] => is_device.extend([&both[..], &other]),
            _ => whole.extend([&both[..], &other]),
        }
        let ids: Vec<[&str; 2]> = is_device.into_iter().map(|id| ["--device-id", id]).collect();
        rows.extend(ids.iter().map(|words| (&words[..], None)));
        let whole: Vec<[&str; 2]> = whole.into_iter().map(|id| ["--device-id", id]).collect();
        rows.extend(whole.iter().map(|words| (&words[..], Some(WHOLE))));
        let strategy = ["--device-id", &uuid, "--device-name-strategy", "uuid"];
        rows.push((&strategy, None));
        generated(&bed, &rows);
        let root = bed.at("driver");
        for words in &whole {
            let [_, ours] = bed.both(&[&["cdi", "generate", "--driver-root", &root], &words[..]].concat(), "");
            let said = ours.expect_err("it is no device").to_string();
            assert!(said.contains("there is no device") && said.contains(&zero), "{said}");
        }
    }
}

/// CUDA does not treat such a GPU as a device.
/// The GPU is not a device to NVIDIA's program either.
#[test]
fn an_undivided_gpu_with_mig_on_is_no_device() {
    let Some(mut bed) = Bed::new() else { return };
    for gpus in [[Some(&[][..]), None], [None, Some(&[])], [Some(&[]), Some(&[(1, 0)])]] {
        divide(&mut bed, gpus);
        let rows: [Row<'_>; 4] = [
            (&[], None),
            (&["--device-name-strategy", "index,uuid,type-index"], None),
            (&["--no-all-device"], None),
            (&["--mode", "management"], None),
        ];
        generated(&bed, &rows);
        let root = bed.at("driver");
        let [_, ours] = bed.both(&["cdi", "generate", "--driver-root", &root], "");
        let names = ours.expect("there is another");
        let index = usize::from(gpus[0].is_none());
        assert!(!names.contains([FIRST, SECOND][index]), "{names}");
    }
}

/// Return a spec with one device. `more` contains extra lines for after the device's name and after the list of devices.
fn document(version: &str, kind: &str, device: &str, more: &str) -> String {
    format!("cdiVersion: {version:?}\nkind: {kind}\ndevices:\n- name: {device:?}\n{more}")
}

/// The files in the spec directories, each with its name and text.
type Files<'f> = Vec<(&'f str, String)>;

#[test]
fn existing_specs_have_the_devices_that_nvidias_program_finds() {
    let Some(bed) = Bed::new() else { return };
    let env = "  containerEdits:\n    env: [A=1]\n";
    let plain = |kind: &str, device: &str| document("0.5.0", kind, device, env);
    let version = |version: &str, more: &str| document(version, "a.com/gpu", "x", &format!("{env}{more}"));
    let edits = |version: &str, edits: &str| document(version, "a.com/gpu", "x", &format!("  containerEdits:\n{edits}"));
    let conflict: &[(&str, String)] = &[("0/a.yaml", plain("a.com/gpu", "x")), ("0/b.yaml", plain("a.com/gpu", "x"))];
    let hidden: &[(&str, String)] = &[("0/a.yaml", plain("a.com/gpu", "x")), ("1/b.yaml", plain("a.com/gpu", "x"))];
    let mut rows: Vec<(Files, Option<&str>)> = vec![(conflict.to_vec(), None), (hidden.to_vec(), None)];
    for text in [
        plain("a.com/gpu", "x"),
        plain("a.com/gpu", "0"),
        plain("a.com/gpu", "0:1"),
        plain("a.com/gpu", "a b"),
        plain("a.com/gpu", ""),
        plain("a.com/gpu", "-x"),
        plain("a.com/gpu", "x-"),
        plain("1.com/gpu", "x"),
        plain("a.com", "x"),
        plain("a.com/g.pu", "x"),
        document("0.6.0", "a.com/g.pu", "x", env),
        document("0.3.0", "a.com/gpu", "0", env),
        "{}".to_owned(),
        "[]".to_owned(),
        "x: [".to_owned(),
        String::new(),
        "cdiVersion: \"0.5.0\"\nkind: a.com/gpu\ndevices: []\n".to_owned(),
        plain("a.com/gpu", "x").replace("devices:", "unknown: 1\ndevices:"),
        plain("a.com/gpu", "x").replace("    env", "    unknown: 1\n    env"),
        format!("{}- name: x\n{env}", plain("a.com/gpu", "x")),
        document("0.5.0", "a.com/gpu", "x", "  containerEdits: {}\n"),
        document("0.5.0", "a.com/gpu", "x", ""),
        edits("0.5.0", "    env: [\"=x\"]\n"),
        edits("0.5.0", "    env: [A]\n"),
        edits("0.5.0", "    env: [\"A=\"]\n"),
        edits("0.5.0", "    deviceNodes: [{path: \"\"}]\n"),
        edits("0.5.0", "    deviceNodes: [{path: /dev/x, type: c}]\n"),
        edits("0.5.0", "    deviceNodes: [{path: /dev/x, type: u}]\n"),
        edits("0.5.0", "    deviceNodes: [{path: /dev/x, type: x}]\n"),
        edits("0.5.0", "    deviceNodes: [{path: /dev/x, permissions: rwx}]\n"),
        edits("0.5.0", "    deviceNodes: [{path: /dev/x, permissions: rr}]\n"),
        edits("0.5.0", "    deviceNodes: [{path: /dev/x, fileMode: 438, uid: 1, gid: 2}]\n"),
        edits("0.4.0", "    deviceNodes: [{path: /dev/x, hostPath: /dev/y}]\n"),
        edits("0.3.0", "    mounts: [{hostPath: /a, containerPath: /b, type: bind}]\n"),
        edits("0.4.0", "    mounts: [{hostPath: /a, containerPath: /b, type: bind}]\n"),
        edits("0.5.0", "    mounts: [{hostPath: \"\", containerPath: /b}]\n"),
        edits("0.5.0", "    mounts: [{hostPath: /a, containerPath: \"\"}]\n"),
        edits("0.5.0", "    hooks: [{hookName: createContainer, path: /bin/x}]\n"),
        edits("0.5.0", "    hooks: [{hookName: createcontainer, path: /bin/x}]\n"),
        edits("0.5.0", "    hooks: [{hookName: prestart, path: \"\"}]\n"),
        edits(
            "0.5.0",
            "    hooks: [{hookName: poststop, path: /x, timeout: 3, env: [\"A\"]}]\n",
        ),
        edits("0.6.0", "    additionalGids: [44]\n"),
        edits("0.7.0", "    additionalGids: [44]\n"),
        edits("0.7.0", "    additionalGids: [0]\n"),
        edits("0.7.0", "    intelRdt: {closID: x}\n"),
        edits("0.7.0", "    intelRdt: {closID: \"..\"}\n"),
        edits("0.7.0", "    intelRdt: {closID: a/b}\n"),
        edits("0.6.0", "    intelRdt: {closID: x}\n"),
        edits("1.0.0", "    intelRdt: {closID: x, enableMonitoring: true}\n"),
        edits("1.1.0", "    intelRdt: {closID: x, enableMonitoring: true, schemata: [a]}\n"),
        edits("1.0.0", "    netDevices: [{hostInterfaceName: eth0, name: a}]\n"),
        edits("1.1.0", "    netDevices: [{hostInterfaceName: eth0, name: a}]\n"),
        edits("1.1.0", "    netDevices: [{hostInterfaceName: \"\", name: a}]\n"),
        edits("1.1.0", "    netDevices: [{hostInterfaceName: eth0, name: \"\"}]\n"),
        edits(
            "1.1.0",
            "    netDevices: [{hostInterfaceName: eth0, name: a}, {hostInterfaceName: eth0, name: b}]\n",
        ),
        edits(
            "1.1.0",
            "    netDevices: [{hostInterfaceName: eth0, name: a}, {hostInterfaceName: eth1, name: a}]\n",
        ),
        version("0.6.0", "  annotations: {a: b}\n"),
        version("0.5.0", "  annotations: {a: b}\n"),
        version("0.6.0", "annotations: {\"-\": b}\n"),
        version("0.5.0", "annotations: {a: b}\n"),
    ] {
        rows.push((vec![("0/a.yaml", text)], None));
    }
    rows.push((
        vec![(
            "0/a.yaml",
            edits("0.5.0", "    deviceNodes: [{path: /dev/x, permissions: none}]\n"),
        )],
        Some("the reference library knows it from 1.1.1 on, and NVIDIA's program is built with 1.1.0"),
    ));
    for number in [
        "0.1.0", "0.2.0", "0.3.0", "0.8.0", "v0.5.0", "1.0.0", "1.1.0", "1.2.0", "0.5", "", "x",
    ] {
        rows.push((vec![("0/a.yaml", version(number, ""))], None));
    }
    for name in ["0/a.yml", "0/a.json", "0/a.txt", "0/.yaml", "0/sub/a.yaml"] {
        rows.push((vec![(name, plain("a.com/gpu", "x"))], None));
    }
    let mut wrong = Vec::new();
    for (files, why) in &rows {
        let directory = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, text).expect("written");
        }
        let dirs = ["0", "1"].map(|name| directory.path().join(name).display().to_string());
        let [theirs, ours] = bed.both(
            &["--quiet", "cdi", "list", "--spec-dir", &dirs[0], "--spec-dir", &dirs[1]],
            "",
        );
        let names = |said: anyhow::Result<String>| {
            let said = said.unwrap_or_else(|error| panic!("{files:?}: {error}"));
            said.lines().map(str::to_owned).collect::<BTreeSet<_>>()
        };
        let (theirs, ours) = (names(theirs), names(ours));
        if (theirs == ours) != why.is_none() {
            wrong.push(format!("{files:#?}: theirs {theirs:?}, ours {ours:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_spec_is_moved_as_by_nvidias_program() {
    let Some(bed) = Bed::new() else { return };
    let spec = "cdiVersion: \"0.5.0\"\nkind: a.com/gpu\ndevices:\n- name: x\n  containerEdits:\n    deviceNodes:\n    - {path: /driver/dev/x, hostPath: /driver/dev/y}\n    \
                - {path: /dev/z}\ncontainerEdits:\n  env: [\"A=/driver/x\"]\n  mounts:\n  - {hostPath: /driver/lib/a.so, containerPath: /lib/a.so}\n  \
                - {hostPath: /other/lib/a.so, containerPath: /driver/lib/b.so}\n  - {hostPath: /driver, containerPath: /driver}\n  hooks:\n  \
                - {hookName: createContainer, path: /driver/bin/hook, args: [hook, --folder, /driver/lib, --link, \"/driver/a::/driver/b\", --link, \"x::/driver/b\"]}\n  - {hookName: startContainer, path: /driver/bin/hook}\n";
    let mut wrong = Vec::new();
    let one_path = spec.replace("- {path: /dev/z}", "- {path: /driver/dev/w}");
    let rows: [(&str, &[&str], Option<&str>); 10] = [
        (spec, &["--from", "/driver", "--to", "/"], None),
        (&one_path, &["--from", "/driver", "--to", "/host/driver"], None),
        (spec, &["--from", "/nowhere", "--to", "/x"], None),
        (spec, &["--from", "/driver", "--to", "/x", "--relative-to", "host"], None),
        (spec, &["--from", "/driver", "--to", "/x", "--relative-to", "container"], None),
        (spec, &["--from", "/", "--to", "/x"], None),
        (spec, &["--from", "/driver", "--to", "/x", "--relative-to", "bogus"], None),
        (
            &one_path,
            &["--from", "/driver", "--to", "/x", "--relative-to", "container"],
            Some(
                "a node that is at one path on both sides stays where it is on the machine; NVIDIA's looks for it at the new path there, too",
            ),
        ),
        (
            spec,
            &["--from", "/driver/", "--to", "/"],
            Some("a slash at the end says nothing; NVIDIA's leaves /driver itself where it is then"),
        ),
        (
            spec,
            &["--from", "/driv", "--to", "/x"],
            Some("by whole components; NVIDIA's makes /x/er of /driver"),
        ),
    ];
    for (spec, words, why) in rows {
        let [theirs, ours] = bed.both(&[&["--quiet", "cdi", "transform", "root"], words].concat(), spec);
        let same = match (&theirs, &ours) {
            (Ok(theirs), Ok(ours)) => {
                // The meaning is the same: a host path that equals the container path may be omitted.
                let read = |text: &str| {
                    divvy_cdi::Spec::parse(text)
                        .map(|spec| plain_paths(&spec))
                        .map_err(|error| error.to_string())
                };
                read(theirs) == read(ours)
            }
            (Err(_), Err(_)) => true,
            _ => false,
        };
        if same != why.is_none() {
            wrong.push(format!("{words:?}:\n{theirs:#?}\n{ours:#?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Return every path of a spec, and what the spec uses it for.
fn plain_paths(spec: &divvy_cdi::Spec) -> Vec<String> {
    let mut all = Vec::new();
    let devices = spec.devices.iter().map(|device| &device.container_edits);
    for edits in devices.chain([&spec.container_edits]) {
        for node in &edits.device_nodes {
            let host = node.host_path.as_deref().unwrap_or(&node.path);
            all.push(format!("node {} of {host}", node.path));
        }
        all.extend(
            edits
                .mounts
                .iter()
                .map(|mount| format!("mount {} at {}", mount.host_path, mount.container_path)),
        );
        all.extend(
            edits
                .hooks
                .iter()
                .map(|hook| format!("{} {} {:?}", hook.hook_name, hook.path, hook.args)),
        );
        all.extend(edits.env.clone());
    }
    all.sort();
    all
}
