//! Generating specs for machines of each kind.

use divvy_cdi::generate::parts::{self, SpecSubject};
use divvy_cdi::generate::{GenerateError, GenerateOptions, Generated, Naming, amd, intel, nvidia, proc, wsl};
use divvy_cdi::stale::{Stale, driver_version};
use divvy_cdi::{CdiVersion, DeviceNode, Registry, Spec, SpecFormat};

use divvy_testkit::machine::{MachineFiles, elf, kinds, ld_so_cache, ld_so_cache_with_flags};

fn nvidia_with(machine: &MachineFiles, options: &GenerateOptions) -> Result<Generated, GenerateError> {
    nvidia::generate(machine, &proc::gpus(machine), None, options)
}

fn of_nvidia(machine: &MachineFiles) -> Generated {
    nvidia_with(machine, &GenerateOptions::new("nvidia.com")).expect("a spec")
}

/// Describe a spec: the devices with their own edits, then the targets of all mounts.
fn outline(generated: &Generated) -> String {
    let spec = &generated.spec;
    let mut text = format!("{} {} made for {:?}\n", spec.kind, spec.cdi_version, driver_version(spec));
    for (name, edits) in std::iter::once(("every container", &spec.container_edits)).chain(
        spec.devices
            .iter()
            .map(|device| (device.name.as_str(), &device.container_edits)),
    ) {
        text.push_str(&format!("{name}\n"));
        for variable in &edits.env {
            text.push_str(&format!("  {variable}\n"));
        }
        for node in &edits.device_nodes {
            let host = node.host_path.as_ref().map_or(String::new(), |path| format!(" <- {path}"));
            text.push_str(&format!("  {}{host}\n", node.path));
        }
        for mount in &edits.mounts {
            if mount.host_path == mount.container_path {
                text.push_str(&format!("  {}\n", mount.container_path))
            } else {
                text.push_str(&format!("  {} <- {}\n", mount.container_path, mount.host_path))
            }
        }
        if !edits.additional_gids.is_empty() {
            text.push_str(&format!("  groups {:?}\n", edits.additional_gids));
        }
    }
    for note in &generated.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    text
}

#[test]
fn a_debian_host_with_two_gpus() {
    insta::assert_snapshot!(outline(&of_nvidia(&kinds::debian())));
}

#[test]
fn debian_alternatives_lead_to_the_branchs_libraries() {
    let generated = of_nvidia(&kinds::debian_alternatives());
    assert_eq!(driver_version(&generated.spec), Some("470.256.02"));
    for (name, file) in [("libcuda.so.1", "libcuda.so"), ("libnvidia-ml.so.1", "libnvidia-ml.so")] {
        let at = format!("/usr/lib/x86_64-linux-gnu/{name}");
        let mounts = &generated.spec.container_edits.mounts;
        let from = mounts
            .iter()
            .find(|mount| mount.container_path == at)
            .map(|mount| mount.host_path.as_str());
        let real = format!("/usr/lib/x86_64-linux-gnu/nvidia/tesla-470/{file}.470.256.02");
        assert_eq!(from, Some(real.as_str()), "{at}");
    }
}

#[test]
fn a_debian_hosts_spec_as_text() {
    insta::assert_snapshot!(of_nvidia(&kinds::debian()).spec.print(SpecFormat::Yaml));
}

#[test]
fn a_driver_container() {
    let machine = kinds::operator();
    let options = GenerateOptions {
        driver_root: "/run/nvidia/driver".to_owned(),
        ..GenerateOptions::new("nvidia.com")
    };
    insta::assert_snapshot!(outline(&nvidia_with(&machine, &options).expect("a spec")));
}

#[test]
fn red_hats_directories() {
    insta::assert_snapshot!(outline(&of_nvidia(&kinds::red_hat())));
}

#[test]
fn mig_devices_stand_for_their_gpu() {
    let generated = of_nvidia(&kinds::mig());
    let devices: String = outline(&generated).split_once("\n0\n").expect("device 0").1.to_owned();
    insta::assert_snapshot!(devices);
}

#[test]
fn wsl_has_one_device() {
    let machine = kinds::wsl();
    assert!(wsl::is_there(&machine) && !wsl::is_there(&kinds::debian()));
    let generated = wsl::generate(&machine, Some("552.22"), &GenerateOptions::new("nvidia.com")).expect("a spec");
    insta::assert_snapshot!(outline(&generated));
}

#[test]
fn wsl_on_arm_serves_arms_loader() {
    let mut machine = kinds::wsl();
    let mut arm = elf();
    arm[18] = 0xb7;
    machine.file("/usr/lib/wsl/drivers/nv_dispi.inf_amd64_0b6f8f2c/libcuda.so.1.1", arm);
    let generated = wsl::generate(&machine, None, &GenerateOptions::new("nvidia.com")).expect("a spec");
    let mounts = &generated.spec.container_edits.mounts;
    let target = |directory: &str| {
        mounts
            .iter()
            .any(|mount| mount.container_path == format!("{directory}/libcuda.so.1"))
    };
    assert!(target("/usr/lib/aarch64-linux-gnu") && target("/usr/lib64"));
    assert!(!target("/usr/lib/x86_64-linux-gnu"));
}

#[test]
fn mi300_with_partitions() {
    let machine = kinds::mi300();
    assert!(amd::is_there(&machine) && !amd::is_there(&kinds::intel()));
    insta::assert_snapshot!(outline(
        &amd::generate(&machine, &GenerateOptions::new("amd.com")).expect("a spec")
    ));
}

#[test]
fn intel_gpus() {
    let machine = kinds::intel();
    assert!(intel::is_there(&machine) && !intel::is_there(&kinds::mi300()));
    insta::assert_snapshot!(outline(
        &intel::generate(&machine, &GenerateOptions::new("intel.com")).expect("a spec")
    ));
}

#[test]
fn a_machine_without_gpus_gets_no_spec_and_is_told_what_to_do() {
    let machine = kinds::none();
    let options = GenerateOptions::new("v.com");
    let mut without_gpus = kinds::debian();
    for address in ["0000:06:00.0", "0000:81:00.0"] {
        without_gpus.remove(&format!("/proc/driver/nvidia/gpus/{address}/information"));
    }
    let elsewhere = GenerateOptions {
        driver_root: "/nowhere".to_owned(),
        ..options.clone()
    };
    for (result, part) in [
        (
            nvidia_with(&machine, &options),
            "no libcuda.so.VERSION and no libnvidia-ml.so.VERSION below /",
        ),
        (
            nvidia_with(&machine, &elsewhere),
            "there is no directory /nowhere on this machine; --driver-root specifies where",
        ),
        (
            nvidia_with(kinds::debian().remove("/dev/nvidiactl"), &options),
            "there is no /dev/nvidiactl: the kernel module",
        ),
        (nvidia_with(&without_gpus, &options), "the driver reports no GPU"),
        (
            nvidia_with(kinds::red_hat().remove("/dev/nvidia0"), &options),
            "none of 1 GPUs can be given to a container: GPU 0 is left out: there is no /dev/nvidia0",
        ),
        (
            amd::generate(&machine, &options),
            "there is no /dev/kfd: the kernel module amdgpu",
        ),
        (intel::generate(&machine, &options), "no Intel display controller"),
        (wsl::generate(&machine, None, &options), "there is no /dev/dxg"),
    ] {
        let error = result.expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
}

/// On the machine of NVIDIA's own tests, a spec has everything that NVIDIA's generator writes: the same device nodes and variables, and the same
/// files at the same paths. NVIDIA's five hooks are missing; mounts under additional names do the work of the first one.
#[test]
fn case_33_a_nvidias_mounts_are_there_without_its_hooks() {
    let lib = "/lib/x86_64-linux-gnu";
    let mut machine = MachineFiles::default();
    machine
        .node("/dev/nvidia0")
        .node("/dev/nvidiactl")
        .file(&format!("{lib}/libcuda.so.999.88.77"), elf())
        .file(&format!("{lib}/vdpau/libvdpau_nvidia.so.999.88.77"), elf());
    let gpu = nvidia::NvidiaGpu {
        pci: "0000:06:00.0".to_owned(),
        ..nvidia::NvidiaGpu::default()
    };
    let options = GenerateOptions {
        class: "device".to_owned(),
        naming: vec![Naming::Index],
        ..GenerateOptions::new("example.com")
    };
    let spec = nvidia::generate(&machine, &[gpu], None, &options).expect("a spec").spec;
    assert_eq!(spec.kind, "example.com/device");
    let devices: Vec<(&str, Vec<&str>)> = spec
        .devices
        .iter()
        .map(|device| {
            let nodes = device.container_edits.device_nodes.iter().map(|node| node.path.as_str());
            (device.name.as_str(), nodes.collect())
        })
        .collect();
    assert_eq!(devices, [("0", vec!["/dev/nvidia0"]), ("all", vec!["/dev/nvidia0"])]);
    let common = &spec.container_edits;
    assert!(
        common.env.contains(&"NVIDIA_VISIBLE_DEVICES=void".to_owned()),
        "{:?}",
        common.env
    );
    let directories = common
        .env
        .iter()
        .find_map(|entry| entry.strip_prefix("NVIDIA_CTK_LIBCUDA_DIR="));
    assert!(
        directories.is_some_and(|list| list.split(':').any(|directory| directory == lib)),
        "{directories:?}"
    );
    let nodes: Vec<&str> = common.device_nodes.iter().map(|node| node.path.as_str()).collect();
    assert_eq!((nodes, common.hooks.len()), (vec!["/dev/nvidiactl"], 0));
    for library in ["libcuda.so.999.88.77", "vdpau/libvdpau_nvidia.so.999.88.77"] {
        let path = format!("{lib}/{library}");
        let mount = common
            .mounts
            .iter()
            .find(|mount| mount.container_path == path)
            .expect("mounted");
        assert_eq!(mount.host_path, path);
        assert_eq!(mount.options, ["ro", "nosuid", "nodev", "rbind", "rprivate"]);
    }
    let link = common
        .mounts
        .iter()
        .find(|mount| mount.container_path == format!("{lib}/libcuda.so"));
    assert!(
        link.is_some_and(|link| link.host_path.ends_with("libcuda.so.999.88.77")),
        "{link:?}"
    );
    assert_eq!(Spec::parse(&spec.print(SpecFormat::Json)).expect("own text"), spec);
}

#[test]
fn case_33_b_every_spec_is_valid_the_same_twice_and_resolves() {
    let machines = [kinds::debian(), kinds::red_hat(), kinds::mig()];
    for machine in &machines {
        let spec = of_nvidia(machine).spec;
        assert_eq!(spec.problems(), []);
        assert_eq!(spec.print(SpecFormat::Yaml), of_nvidia(machine).spec.print(SpecFormat::Yaml));
        let found = divvy_cdi::FoundSpec {
            path: "/var/run/cdi/nvidia.yaml".to_owned(),
            priority: 1,
            spec: Ok(Spec::parse(&spec.print(SpecFormat::Yaml)).expect("own text")),
        };
        let registry = Registry::new(vec![found]);
        registry
            .edits(&["nvidia.com/gpu=0", "nvidia.com/gpu=all"])
            .expect("both are there");
    }
}

#[test]
fn devices_are_named_as_was_asked_for() {
    let names = |naming: &[Naming]| {
        let options = GenerateOptions {
            naming: naming.to_vec(),
            ..GenerateOptions::new("example.com")
        };
        let spec = nvidia_with(&kinds::mig(), &options).expect("a spec").spec;
        spec.devices.into_iter().map(|device| device.name).collect::<Vec<_>>()
    };
    let uuid = "GPU-00000000-11c1-52b8-0517-92f30e7fac88";
    assert_eq!(names(&[Naming::Index]), ["0", "1:0", "1:1", "all"]);
    assert_eq!(names(&[Naming::Index, Naming::Uuid]), ["0", uuid, "1:0", "1:1", "all"]);
    assert_eq!(
        names(&[Naming::Uuid]),
        [uuid, "1:0", "1:1", "all"],
        "MIG devices have a UUID only where NVML says it"
    );
    assert_eq!(names(&[Naming::TypeIndex]), ["gpu0", "mig1:0", "mig1:1", "all"]);
    assert_eq!(
        names(&[Naming::Uuid, Naming::TypeIndex]),
        [uuid, "gpu0", "mig1:0", "mig1:1", "all"]
    );
    assert_eq!(
        names(&[Naming::Index, Naming::Uuid, Naming::Index]),
        ["0", uuid, "1:0", "1:1", "all"],
        "what is named twice is one device"
    );
}

#[test]
fn a_spec_has_the_devices_that_were_asked_for_and_no_others() {
    let made = |only: &[&str], all| {
        let options = GenerateOptions {
            only: only.iter().map(|id| (*id).to_owned()).collect(),
            naming: vec![Naming::Index],
            all,
            ..GenerateOptions::new("nvidia.com")
        };
        nvidia_with(&kinds::mig(), &options).map(|made| made.spec)
    };
    let names = |only: &[&str], all| -> Vec<String> {
        let spec = made(only, all).expect("a spec");
        spec.devices.into_iter().map(|device| device.name).collect()
    };
    let uuid = "GPU-00000000-11c1-52b8-0517-92f30e7fac88";
    assert_eq!(names(&[], false), ["0", "1:0", "1:1"]);
    assert_eq!(names(&["all"], true), ["0", "1:0", "1:1", "all"]);
    assert_eq!(names(&["1:1", "0"], true), ["0", "1:1", "all"]);
    assert_eq!(names(&[uuid], false), ["0"]);
    let none = made(&["none"], true).expect("a spec");
    assert_eq!(none.devices.len(), 1);
    assert_eq!(
        (
            none.devices[0].name.as_str(),
            &none.devices[0].container_edits.env[..],
            none.devices[0].container_edits.device_nodes.len()
        ),
        ("none", &["NVCT_EMPTY_DEVICE=".to_owned()][..], 0)
    );
    let error = made(&["0", "7"], true).expect_err("no such GPU").to_string();
    assert!(error.contains("no device \"7\"") && error.contains("0, 1:0, 1:1"), "{error}");
}

#[test]
fn what_is_beside_gpus_has_specs_of_its_own() {
    let mut machine = kinds::debian();
    for node in [
        "nvidia-fs",
        "nvidia-fs0",
        "infiniband/uverbs0",
        "infiniband/rdma_cm",
        "infiniband/umad0",
        "gdrdrv",
        "nvidia-nvswitch0",
        "nvidia-nvswitchctl",
        "nvidia-nvlink",
        "nvidia-caps/nvidia-cap1",
        "nvidia-caps-imex-channels/channel0",
        "nvidia-caps-imex-channels/channel3",
    ] {
        machine.node(&format!("/dev/{node}"));
    }
    let made = |machine: &MachineFiles, part, only: &[&str]| {
        let options = GenerateOptions {
            only: only.iter().map(|id| (*id).to_owned()).collect(),
            ..GenerateOptions::new("nvidia.com")
        };
        parts::generate(machine, part, &options)
    };
    let outline = |part, only: &[&str]| -> String {
        let spec = made(&machine, part, only).expect("a spec").spec;
        let device = |device: &divvy_cdi::CdiSpecDevice| {
            let nodes = device.container_edits.device_nodes.iter().map(|node| node.path.as_str());
            format!("{}: {}", device.name, nodes.collect::<Vec<_>>().join(" "))
        };
        let devices: Vec<String> = spec.devices.iter().map(device).collect();
        format!(
            "{} | {} | {}",
            devices.join(", "),
            spec.container_edits.env.len(),
            spec.container_edits.mounts.len() > 20
        )
    };
    let channels = "/dev/nvidia-caps-imex-channels/channel";
    for (part, expected) in [
        (
            SpecSubject::Storage,
            "all: /dev/nvidia-fs /dev/nvidia-fs0 | 1 | false".to_owned(),
        ),
        (
            SpecSubject::Rdma,
            "all: /dev/infiniband/rdma_cm /dev/infiniband/uverbs0 | 1 | false".to_owned(),
        ),
        (SpecSubject::Gdrcopy, "all: /dev/gdrdrv | 1 | false".to_owned()),
        (
            SpecSubject::Nvswitch,
            "all: /dev/nvidia-nvswitch0 /dev/nvidia-nvswitchctl | 1 | false".to_owned(),
        ),
        (
            SpecSubject::Imex,
            format!("0: {channels}0, 3: {channels}3, all: {channels}0 {channels}3 | 1 | false"),
        ),
        (
            SpecSubject::Management,
            format!(
                "all: /dev/nvidia-caps-imex-channels/channel0 {channels}3 /dev/nvidia-caps/nvidia-cap1 /dev/nvidia-modeset \
                 /dev/nvidia-uvm /dev/nvidia-uvm-tools /dev/nvidia0 /dev/nvidia1 /dev/nvidiactl | 2 | true"
            ),
        ),
    ] {
        assert_eq!(outline(part, &[]), expected, "{part:?}");
    }
    assert_eq!(
        outline(SpecSubject::Imex, &["3"]),
        format!("3: {channels}3, all: {channels}3 | 1 | false")
    );
    assert_eq!(
        outline(SpecSubject::Gdrcopy, &["0"]),
        "all: /dev/gdrdrv | 1 | false",
        "no number of a GPU"
    );
    for part in [
        SpecSubject::Storage,
        SpecSubject::Rdma,
        SpecSubject::Gdrcopy,
        SpecSubject::Nvswitch,
        SpecSubject::Imex,
    ] {
        let error = made(&kinds::debian(), part, &[]).expect_err("nothing of it").to_string();
        assert!(error.contains("there is no device node of"), "{error}");
    }
}

/// If the node belonged to root's group, a process that is not root but in the node's original group could not open it.
#[test]
fn a_node_that_is_open_to_a_group_is_so_in_the_container_too() {
    let mut machine = kinds::debian();
    machine.node_of_group("/dev/nvidia1", 44);
    let with = |change: fn(&mut GenerateOptions)| {
        let mut options = GenerateOptions::new("nvidia.com");
        change(&mut options);
        let spec = nvidia_with(&machine, &options).expect("a spec").spec;
        let of_it = spec
            .devices
            .into_iter()
            .filter(|device| device.name != "all")
            .find_map(|device| {
                let edits = device.container_edits;
                let node = edits.device_nodes.iter().find(|node| node.path == "/dev/nvidia1")?;
                Some((node.file_mode, node.gid, edits.additional_gids.clone()))
            });
        of_it.expect("a GPU's node")
    };
    assert_eq!(with(|_| ()), (Some(0o660), Some(44), vec![44]));
    assert_eq!(with(|options| options.groups = false), (Some(0o660), Some(44), vec![]));
    let old = with(|options| options.newest = CdiVersion::V0_6_0);
    assert_eq!(
        old,
        (Some(0o660), None, vec![]),
        "engines give it to the process's own group then"
    );
}

#[test]
fn an_old_reader_gets_what_it_understands_or_a_sentence() {
    let mut machine = kinds::debian();
    machine.node_of_group("/dev/nvidiactl", 44);
    let with = |newest, naming: &[Naming]| {
        nvidia_with(
            &machine,
            &GenerateOptions {
                newest,
                naming: naming.to_vec(),
                ..GenerateOptions::new("nvidia.com")
            },
        )
    };
    let newest = with(CdiVersion::V1_1_0, &[Naming::Index, Naming::Uuid]).expect("a spec");
    assert_eq!(
        (
            newest.spec.cdi_version.as_str(),
            &newest.spec.container_edits.additional_gids[..]
        ),
        ("0.7.0", &[44][..])
    );
    let old = with(CdiVersion::V0_5_0, &[Naming::Index, Naming::Uuid]).expect("a spec");
    assert_eq!(old.spec.cdi_version, "0.5.0");
    assert!(
        old.notes.iter().any(|note| note.contains("no additional groups")),
        "{:?}",
        old.notes
    );
    assert!(
        old.notes.iter().any(|note| note.contains("no annotations")),
        "{:?}",
        old.notes
    );
    assert_eq!(driver_version(&old.spec), Some("550.54.15"), "its files still tell");
    let oldest = with(CdiVersion::V0_3_0, &[Naming::Uuid]).expect("names that begin with a letter");
    assert_eq!(oldest.spec.cdi_version, "0.3.0");
    let error = with(CdiVersion::V0_3_0, &[Naming::Index])
        .expect_err("a name that begins with a digit")
        .to_string();
    assert!(
        error.contains("devices[0].name") && error.contains("allow at least 0.5.0"),
        "{error}"
    );
}

#[test]
fn wrong_vendors_and_classes_are_refused() {
    for (vendor, class) in [("1nvidia", "gpu"), ("nvidia.com", "g/pu"), ("", "gpu")] {
        let options = GenerateOptions {
            class: class.to_owned(),
            ..GenerateOptions::new(vendor)
        };
        assert!(
            matches!(nvidia_with(&kinds::debian(), &options), Err(GenerateError::Name(_))),
            "{vendor}/{class}"
        );
    }
}

/// 32-bit libraries are left out.
#[test]
fn only_the_cache_finds_libraries_elsewhere() {
    let mut machine = MachineFiles::default();
    machine
        .driver("", "/var/lib/nvidia/lib64", "550.54.15")
        .file("/opt/lib32/libcuda.so.550.54.15", elf())
        .gpus("550.54.15", &["0000:06:00.0"])
        .nvidia_nodes("", 1);
    assert!(
        nvidia_with(&machine, &GenerateOptions::new("nvidia.com")).is_err(),
        "without a cache this directory is not searched"
    );
    machine.file(
        "/etc/ld.so.cache",
        ld_so_cache_with_flags(&[
            ("libcuda.so.1", "/opt/lib32/libcuda.so.1", 0x0003),
            ("libcuda.so.1", "/var/lib/nvidia/lib64/libcuda.so.1", 0x0303),
        ]),
    );
    let mounts = of_nvidia(&machine).spec.container_edits.mounts;
    let cuda: Vec<&str> = mounts
        .iter()
        .filter(|mount| mount.host_path == "/var/lib/nvidia/lib64/libcuda.so.550.54.15")
        .map(|mount| mount.container_path.as_str())
        .collect();
    assert_eq!(
        cuda,
        [
            "/usr/lib/x86_64-linux-gnu/libcuda.so",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            "/usr/lib64/libcuda.so",
            "/usr/lib64/libcuda.so.1",
            "/var/lib/nvidia/lib64/libcuda.so",
            "/var/lib/nvidia/lib64/libcuda.so.1",
            "/var/lib/nvidia/lib64/libcuda.so.550.54.15",
        ]
    );
    assert!(mounts.iter().all(|mount| !mount.host_path.contains("lib32")));
}

#[test]
fn a_driver_that_was_upgraded_under_a_loaded_module_is_told() {
    let mut machine = kinds::red_hat();
    machine.file("/sys/module/nvidia/version", "550.54.15\n");
    let notes = of_nvidia(&machine).notes;
    assert!(
        notes[0].contains("the kernel has loaded driver 550.54.15, but the libraries are of 560.35.03"),
        "{notes:?}"
    );
    machine.driver("", "/usr/lib64", "550.54.15");
    let both = of_nvidia(&machine);
    assert_eq!(both.notes, [""; 0], "of two versions the loaded one is taken");
    assert_eq!(driver_version(&both.spec), Some("550.54.15"));
}

#[test]
fn a_broken_cache_is_told_and_the_directories_are_searched() {
    let mut machine = kinds::debian();
    let mut cache = ld_so_cache(&[("libcuda.so.1", "/x")]);
    cache.truncate(50);
    machine.file("/etc/ld.so.cache", cache);
    let generated = of_nvidia(&machine);
    assert_eq!(
        generated.notes,
        ["/etc/ld.so.cache is not used: it is truncated: its header announces more entries than it has"]
    );
}

#[test]
fn links_of_a_driver_container_never_lead_out_of_its_root() {
    let mut machine = kinds::operator();
    machine
        .file("/etc/shadow", "secret")
        .link("/run/nvidia/driver/usr/bin/nvidia-debugdump", "../../../../../../etc/shadow")
        .link("/run/nvidia/driver/usr/bin/nvidia-xconfig", "/etc/shadow")
        .link("/run/nvidia/driver/usr/bin/nvidia-imex", "nvidia-imex")
        .link(
            "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            "/../../../../etc/shadow",
        );
    let options = GenerateOptions {
        driver_root: "/run/nvidia/driver".to_owned(),
        ..GenerateOptions::new("nvidia.com")
    };
    let spec = nvidia_with(&machine, &options).expect("a spec").spec;
    for mount in &spec.container_edits.mounts {
        assert!(
            mount.host_path.starts_with("/run/nvidia/driver/") && !mount.host_path.contains("shadow"),
            "{mount:?}"
        );
    }
    let cuda = "/usr/lib/x86_64-linux-gnu/libcuda.so.1";
    let mount = spec
        .container_edits
        .mounts
        .iter()
        .find(|mount| mount.container_path == cuda)
        .expect("mounted all the same");
    assert_eq!(
        mount.host_path,
        "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.535.129.03"
    );
}

#[test]
fn a_mig_device_without_its_capabilities_is_left_out_and_named() {
    let mut machine = kinds::mig();
    machine.remove("/dev/nvidia-caps/nvidia-cap22");
    let generated = of_nvidia(&machine);
    assert!(generated.spec.devices.iter().all(|device| device.name != "1:1"));
    assert!(
        generated.notes[0].contains(
            "MIG device 1:1 (GPU instance 2, compute instance 0) is left out: there is no /dev/nvidia-caps/nvidia-cap22"
        ),
        "{:?}",
        generated.notes
    );
}

#[test]
fn a_device_number_unlike_the_kernels_is_stale() {
    let mut machine = kinds::debian();
    machine.file(
        "/proc/devices",
        "Character devices:\n195 nvidia\n226 drm\n234 nvidia-caps\n235 nvidia-nvswitch\n236 nvidia-caps-imex-channels\n511 nvidia-uvm\n\nBlock devices:\n510 nvidia-uvm\n",
    );
    for (path, major, is) in [
        ("/dev/nvidia-uvm", Some(511), None),
        ("/dev/nvidia-uvm", None, None),
        ("/dev/nvidia-uvm", Some(0), None),
        ("/dev/nvidia-uvm", Some(510), Some(511)),
        ("/dev/nvidia-uvm-tools", Some(510), Some(511)),
        ("/run/nvidia/driver/dev/nvidia-uvm", Some(510), Some(511)),
        ("/dev/nvidia-caps/nvidia-cap2", Some(235), Some(234)),
        ("/dev/nvidia-nvswitch0", Some(234), Some(235)),
        ("/dev/nvidia-caps-imex-channels/channel0", Some(234), Some(236)),
        ("/dev/nvidia0", Some(195), None),
        ("/dev/nvidiactl", Some(196), Some(195)),
        ("/dev/dri/renderD128", Some(226), None),
        ("/dev/other", Some(7), None),
    ] {
        machine.node(path);
        let mut spec = of_nvidia(&kinds::debian()).spec;
        let node = DeviceNode {
            path: path.to_owned(),
            major,
            ..DeviceNode::default()
        };
        spec.container_edits.device_nodes = vec![node];
        let said = Stale::check(&spec, &machine).numbers.into_values().next();
        let expected: Option<String> = is.map(|is: i64| {
            format!(
                "has major number {} in the spec, and the kernel's is {is}",
                major.unwrap_or_default()
            )
        });
        assert_eq!(said, expected, "{path} {major:?}");
    }
}

#[test]
fn a_spec_is_stale_when_the_driver_changed_or_its_files_went() {
    let mut machine = kinds::debian();
    let spec = of_nvidia(&machine).spec;
    assert!(!Stale::check(&spec, &machine).is_stale());
    assert!(
        !Stale::check(&spec, machine.clone().remove("/sys/module/nvidia/version")).is_stale(),
        "no driver is loaded: nothing is compared"
    );
    machine.file("/sys/module/nvidia/version", "560.35.03\n");
    machine
        .remove("/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15")
        .remove("/dev/nvidia1");
    assert_eq!(
        Stale::check(&spec, &machine).sentences(),
        [
            "it was made for driver 550.54.15, and 560.35.03 is loaded",
            "/dev/nvidia1 and 1 more do not exist, so containers do not start",
        ]
    );
    let mut amd_machine = kinds::mi300();
    let spec = amd::generate(&amd_machine, &GenerateOptions::new("amd.com"))
        .expect("a spec")
        .spec;
    assert!(!Stale::check(&spec, &amd_machine).is_stale());
    amd_machine.file("/sys/module/amdgpu/version", "6.10.5\n");
    assert_eq!(
        Stale::check(&spec, &amd_machine).driver,
        Some(("6.8.5".to_owned(), "6.10.5".to_owned()))
    );
}
