use divvy_agent_core::driver_spec::{
    Attempt, Basis, DriverSpecStep, DriverSpecVerdict, ObservedNode, Own, RootState, SpecFile, decide,
};
use divvy_cdi::generate::nvidia::{Mig, NvidiaGpu};

const OLD: &str = "550.54.15";
const NEW: &str = "560.35.03";

fn gpu(index: u32) -> NvidiaGpu {
    NvidiaGpu {
        index,
        uuid: Some(format!("GPU-{index}")),
        minor: index,
        ..NvidiaGpu::default()
    }
}

fn basis() -> Basis {
    Basis {
        driver: NEW.to_owned(),
        gpus: vec![gpu(0), gpu(1)],
        driver_root: "/".to_owned(),
        root: Some(RootState {
            stamps: vec![("/etc/ld.so.cache".to_owned(), 1, 2)],
            nodes: ["/dev/nvidiactl".to_owned()].into(),
        }),
    }
}

/// Return a spec of both GPUs in `/etc/cdi`.
fn etc(driver: &str) -> SpecFile {
    SpecFile {
        path: "/etc/cdi/nvidia.yaml".to_owned(),
        valid: true,
        driver: Some(driver.to_owned()),
        devices: ["0", "1", "GPU-0", "GPU-1", "all"].map(str::to_owned).into(),
        ..SpecFile::default()
    }
}

/// Return the same spec in the directory of the agent's own spec.
fn beside(driver: &str) -> SpecFile {
    SpecFile {
        path: "/var/run/cdi/nvidia.yaml".to_owned(),
        same_directory: true,
        ..etc(driver)
    }
}

fn own(driver: &str, as_made: bool) -> Option<Own> {
    Some(Own {
        driver: Some(driver.to_owned()),
        as_made,
        missing: Vec::new(),
    })
}

fn last(basis: Basis, failure: Option<&str>) -> Option<Attempt> {
    Some(Attempt {
        basis,
        failure: failure.map(str::to_owned),
    })
}

fn seen(files: Vec<SpecFile>) -> ObservedNode {
    ObservedNode {
        auto: true,
        mig_devices: false,
        searched: "/host/".to_owned(),
        blind: None,
        own_path: "/var/run/cdi/divvy.dev-driver_nvidia.com-gpu.json".to_owned(),
        basis: Some(basis()),
        files,
        own: None,
        last: None,
    }
}

/// Return the step as one word, and what is left to the operator.
fn shown(verdict: DriverSpecVerdict) -> (&'static str, String) {
    let step = match verdict.step {
        DriverSpecStep::Nothing => "nothing",
        DriverSpecStep::Make(_) => "make",
        DriverSpecStep::Remove => "remove",
    };
    (step, verdict.left.map(|trouble| trouble.text).unwrap_or_default())
}

#[test]
fn what_is_done_with_the_drivers_spec() {
    let without_root = Basis { root: None, ..basis() };
    let touched = Basis {
        root: Some(RootState::default()),
        ..basis()
    };
    let divided = |capabilities| Basis {
        gpus: vec![NvidiaGpu {
            mig: Some(vec![Mig {
                index: 0,
                uuid: Some("MIG-0".to_owned()),
                gpu_instance: 0,
                compute_instance: 0,
                capabilities,
            }]),
            ..gpu(0)
        }],
        ..basis()
    };
    let mig = divided(Some((3, 4)));
    let with_mig = |basis, devices: &[&str]| ObservedNode {
        mig_devices: true,
        basis: Some(basis),
        ..seen(vec![SpecFile {
            devices: devices.iter().map(|device| (*device).to_owned()).collect(),
            ..etc(NEW)
        }])
    };
    let by_index = SpecFile {
        devices: ["0", "1", "all"].map(str::to_owned).into(),
        ..etc(NEW)
    };
    let gone = SpecFile {
        missing: vec!["/usr/lib64/libcuda.so.560.35.03".to_owned()],
        ..etc(NEW)
    };
    let silent = SpecFile {
        driver: None,
        ..etc(NEW)
    };
    let refused = SpecFile {
        valid: false,
        ..beside(OLD)
    };
    let other_device = SpecFile {
        devices: ["7".to_owned(), "GPU-7".to_owned()].into(),
        ..beside(OLD)
    };
    let off = |own| ObservedNode {
        auto: false,
        own,
        ..seen(vec![etc(OLD)])
    };
    let with = |files: Vec<SpecFile>, own, last| ObservedNode {
        own,
        last,
        ..seen(files)
    };
    let of = |basis, files, own| ObservedNode {
        basis: Some(basis),
        own,
        ..seen(files)
    };
    for (name, seen, step, left) in [
        ("fresh", seen(vec![etc(NEW)]), "nothing", ""),
        (
            "current again: the agent's own spec is removed",
            with(vec![etc(NEW)], own(NEW, true), None),
            "remove",
            "",
        ),
        ("the spec names no driver version", seen(vec![silent]), "nothing", ""),
        ("stale", seen(vec![etc(OLD)]), "make", ""),
        ("none", seen(vec![]), "make", ""),
        ("its files are gone", seen(vec![gone]), "make", ""),
        ("no GPU has its UUID", seen(vec![by_index]), "make", ""),
        ("the first one counts", seen(vec![etc(OLD), etc(NEW)]), "make", ""),
        (
            "made",
            with(vec![etc(OLD)], own(NEW, true), last(basis(), None)),
            "nothing",
            "",
        ),
        (
            "made, then changed by another program",
            with(vec![etc(OLD)], own(NEW, false), last(basis(), None)),
            "make",
            "",
        ),
        (
            "made, then removed by another program",
            with(vec![etc(OLD)], None, last(basis(), None)),
            "make",
            "",
        ),
        (
            "made by an agent before",
            with(vec![etc(OLD)], own(NEW, false), None),
            "make",
            "",
        ),
        (
            "the driver's root changed",
            with(vec![etc(OLD)], own(NEW, true), last(touched.clone(), None)),
            "make",
            "",
        ),
        (
            "it could not be made",
            with(vec![etc(OLD)], None, last(basis(), Some("no libcuda"))),
            "nothing",
            "/etc/cdi/nvidia.yaml was made for driver 550.54.15, but 560.35.03 is loaded: containers with GPUs do not start, or get \
             libraries that the kernel module refuses. The agent could not make a spec: no libcuda. It tries again once this is fixed; to make it by \
             hand: divvy cdi generate -o /etc/cdi/nvidia.yaml",
        ),
        (
            "it could not be made, and something changed",
            with(vec![etc(OLD)], None, last(touched, Some("no libcuda"))),
            "make",
            "",
        ),
        (
            "it could not be made again, and only the agent's old spec exists",
            with(vec![], own(OLD, true), last(basis(), Some("no libcuda"))),
            "nothing",
            "/var/run/cdi/divvy.dev-driver_nvidia.com-gpu.json was made for driver 550.54.15, but 560.35.03 is loaded",
        ),
        (
            "the driver's files were replaced but not the module: the agent's own spec names missing files",
            with(
                vec![],
                Some(Own {
                    missing: vec!["/usr/lib/libcuda.so.560.35.03".to_owned()],
                    ..own(NEW, false).expect("one")
                }),
                last(basis(), Some("load the new module, or reboot")),
            ),
            "nothing",
            "/var/run/cdi/divvy.dev-driver_nvidia.com-gpu.json names /usr/lib/libcuda.so.560.35.03, which does not exist: containers with GPUs do \
             not start. The agent could not make a spec: load the new module, or reboot",
        ),
        (
            "another tool's spec in the same directory",
            seen(vec![beside(OLD)]),
            "nothing",
            "The agent does not write /var/run/cdi/divvy.dev-driver_nvidia.com-gpu.json: /var/run/cdi/nvidia.yaml already has \
             nvidia.com/gpu=0, and container runtimes ignore a device that two files of one directory define. Make \
             /var/run/cdi/nvidia.yaml again (divvy cdi generate -o /var/run/cdi/nvidia.yaml), or remove it (rm /var/run/cdi/nvidia.yaml)",
        ),
        (
            "another tool's spec appeared in the same directory",
            with(vec![beside(OLD)], own(NEW, true), last(basis(), None)),
            "remove",
            "container runtimes ignore a device",
        ),
        (
            "container runtimes refuse the other spec in the directory",
            seen(vec![refused]),
            "make",
            "",
        ),
        (
            "other devices in the same directory",
            seen(vec![other_device, etc(OLD)]),
            "make",
            "",
        ),
        (
            "off",
            off(None),
            "nothing",
            "On the node, run: divvy cdi generate -o /etc/cdi/nvidia.yaml. With --driver-spec auto",
        ),
        ("switched off", off(own(NEW, true)), "remove", "--driver-spec auto"),
        (
            "no root",
            of(without_root.clone(), vec![etc(OLD)], None),
            "nothing",
            "The agent cannot make a spec: divvy-probe finds none of the driver's files at /host/. On the node, run: divvy cdi generate \
             -o /etc/cdi/nvidia.yaml",
        ),
        (
            "an older probe",
            ObservedNode {
                blind: Some("the probe is older".to_owned()),
                ..of(without_root.clone(), vec![etc(OLD)], None)
            },
            "nothing",
            "The agent cannot make a spec: the probe is older. On the node",
        ),
        (
            "no root for a while",
            of(without_root.clone(), vec![etc(OLD)], own(NEW, true)),
            "nothing",
            "",
        ),
        (
            "no root, and no spec at all",
            of(without_root, vec![], None),
            "nothing",
            "no CDI spec of kind nvidia.com/gpu names GPU-0",
        ),
        (
            "MIG: no container gets the whole GPU",
            of(mig.clone(), vec![], None),
            "nothing",
            "",
        ),
        (
            "MIG devices are offered, and no spec names them",
            with_mig(mig.clone(), &["GPU-0", "all"]),
            "make",
            "",
        ),
        (
            "a spec names the MIG device",
            with_mig(mig, &["0:0", "MIG-0", "all"]),
            "nothing",
            "",
        ),
        (
            "no container can use the MIG device",
            with_mig(divided(None), &["all"]),
            "nothing",
            "",
        ),
        (
            "the driver does not answer",
            ObservedNode {
                basis: None,
                ..with(vec![etc(OLD)], own(NEW, true), None)
            },
            "nothing",
            "",
        ),
    ] {
        let (found, text) = shown(decide(&seen));
        assert_eq!(found, step, "{name}");
        assert!(text.contains(left) && text.is_empty() == left.is_empty(), "{name}: {text}");
    }
}

#[test]
fn what_is_to_be_typed_names_the_drivers_root() {
    let container = ObservedNode {
        basis: Some(Basis {
            driver_root: "/run/nvidia/driver".to_owned(),
            ..basis()
        }),
        ..seen(vec![beside(OLD)])
    };
    let (_, text) = shown(decide(&container));
    assert!(
        text.contains("divvy cdi generate --driver-root /run/nvidia/driver -o /var/run/cdi/nvidia.yaml"),
        "{text}"
    );
}
