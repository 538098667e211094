use divvy_cdi::{FoundSpec, Registry, Spec};
use divvy_model::names::CDI_KIND;
use divvy_oci::runtime::live;
use divvy_oci::runtime::plan::{DecidedRequest, Decides, DevicePlan, DevicePlanError, allocation, edits};
use divvy_oci::runtime::request::RequestingContainer;
use divvy_oci::runtime::settings::{OciRuntimeSettings, RuntimeMode};
use serde_json::{Value, json};

fn file(path: &str, priority: usize, spec: &Value) -> FoundSpec {
    FoundSpec {
        path: path.to_owned(),
        priority,
        spec: Spec::parse(&spec.to_string()),
    }
}

/// A spec whose devices set one variable each, so that a test can see which device an edit comes from.
fn spec(kind: &str, devices: &[&str]) -> Value {
    let devices: Vec<Value> = devices
        .iter()
        .map(|name| json!({"name": name, "containerEdits": {"env": [format!("GOT={name}")]}}))
        .collect();
    json!({"cdiVersion": "0.5.0", "kind": kind, "devices": devices, "containerEdits": {"env": ["DRIVER=1"]}})
}

fn machine() -> Registry {
    Registry::new(vec![
        file("/etc/cdi/nvidia.json", 0, &spec("nvidia.com/gpu", &["0", "1", "all"])),
        file("/etc/cdi/other.json", 0, &spec("example.com/nic", &["x"])),
    ])
}

fn container(env: &[&str], annotations: &[(&str, &str)]) -> RequestingContainer {
    RequestingContainer {
        env: env.iter().map(|entry| (*entry).to_owned()).collect(),
        annotations: annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect(),
        privileged: true,
        ..RequestingContainer::default()
    }
}

fn settings(mode: RuntimeMode) -> OciRuntimeSettings {
    OciRuntimeSettings {
        mode,
        ..OciRuntimeSettings::default()
    }
}

/// The spec of the GPUs that the driver reports now.
fn now() -> Registry {
    let mut spec = spec(live::KIND, &["0", "GPU-a", "1", "all"]);
    spec["containerEdits"]["env"] = json!(["DRIVER=now"]);
    Registry::new(vec![file("the GPUs that the driver reports now", 0, &spec)])
}

/// Return the variables that a container gets.
fn gets(container: &RequestingContainer, mode: RuntimeMode, written: &Registry) -> Result<Vec<String>, DevicePlanError> {
    gets_by(container, &settings(mode), written)
}

fn gets_by(
    container: &RequestingContainer,
    settings: &OciRuntimeSettings,
    written: &Registry,
) -> Result<Vec<String>, DevicePlanError> {
    let asked = DecidedRequest::of(container, settings)?;
    let (plan, registry) = match asked.decides {
        Decides::Nobody => return Ok(Vec::new()),
        Decides::Specs(plan) => (plan, written),
        Decides::Live(plan) => (plan, &now()),
        Decides::Legacy(wanted) => return Ok(vec![format!("CLI={wanted:?}")]),
        Decides::Allocation { uid, container } => (allocation(&uid, &container, written)?, written),
    };
    Ok(edits(&plan, registry)?.env)
}

#[test]
fn a_container_gets_spec_devices_by_peoples_names() {
    let annotated = [("cdi.k8s.io/vendor_x", "nvidia.com/gpu=1")];
    let both = [("cdi.k8s.io/vendor_x", "nvidia.com/gpu=1,0")];
    let (auto, cdi, jit) = (RuntimeMode::Auto, RuntimeMode::Cdi, RuntimeMode::JitCdi);
    for (asked, annotations, mode, expected) in [
        ("0", &[][..], cdi, &["DRIVER=1", "GOT=0"][..]),
        ("0,1", &[], cdi, &["DRIVER=1", "GOT=0", "GOT=1"]),
        ("all", &[], cdi, &["DRIVER=1", "GOT=all"]),
        ("none", &[], cdi, &["DRIVER=1"]),
        ("void", &[], cdi, &[]),
        ("", &[], jit, &[]),
        // A value that is not a CDI name is resolved with a spec that is generated from the driver now.
        ("0", &[], auto, &["DRIVER=now", "GOT=0"]),
        ("GPU-a,1", &[], auto, &["DRIVER=now", "GOT=GPU-a", "GOT=1"]),
        ("all", &[], auto, &["DRIVER=now", "GOT=all"]),
        ("none", &[], auto, &["DRIVER=now"]),
        ("void", &[], auto, &[]),
        ("0", &[], jit, &["DRIVER=now", "GOT=0"]),
        // CDI names are resolved with spec files.
        ("nvidia.com/gpu=0", &[], auto, &["DRIVER=1", "GOT=0"]),
        ("example.com/nic=x", &[], jit, &["DRIVER=1", "GOT=x"]),
        (
            "example.com/nic=x,nvidia.com/gpu=0",
            &[],
            auto,
            &["DRIVER=1", "GOT=x", "DRIVER=1", "GOT=0"],
        ),
        // In mode jit-cdi, spec files do not describe NVIDIA's GPUs.
        ("nvidia.com/gpu=0", &[], jit, &["DRIVER=now", "GOT=0"]),
        ("runtime.nvidia.com/gpu=1,0", &[], auto, &["DRIVER=now", "GOT=1", "GOT=0"]),
        ("0", &annotated, auto, &["DRIVER=1", "GOT=1"]),
        ("0", &annotated, jit, &["DRIVER=now", "GOT=1"]),
        // The annotation has a value that is not a CDI name, so mode auto ignores the annotation.
        ("0", &both, auto, &["DRIVER=now", "GOT=0"]),
        ("0", &both, cdi, &["DRIVER=1", "GOT=1", "GOT=0"]),
        ("0", &annotated, RuntimeMode::Legacy, &["CLI=Devices([\"0\"])"]),
    ] {
        let env = &*format!("NVIDIA_VISIBLE_DEVICES={asked}");
        assert_eq!(
            gets(&container(&[env], annotations), mode, &machine()).expect(env),
            expected,
            "{env} {annotations:?} {mode:?}"
        );
    }
}

#[test]
fn what_cannot_be_had_is_refused_with_what_there_is() {
    let with_none = Registry::new(vec![file("/etc/cdi/n.json", 0, &spec("nvidia.com/gpu", &["none"]))]);
    assert_eq!(
        gets(
            &container(&["NVIDIA_VISIBLE_DEVICES=none"], &[]),
            RuntimeMode::Cdi,
            &with_none
        )
        .expect("it exists"),
        ["DRIVER=1", "GOT=none"],
        "a device with that name is used if it exists"
    );
    let twice = Registry::new(vec![
        file("/etc/cdi/a.json", 0, &spec("nvidia.com/gpu", &["0"])),
        file("/etc/cdi/b.json", 0, &spec("nvidia.com/gpu", &["0"])),
    ]);
    for (env, mode, registry, parts) in [
        (
            "7",
            RuntimeMode::Cdi,
            machine(),
            &[
                "unresolvable CDI devices nvidia.com/gpu=7;",
                "have example.com/nic=x, nvidia.com/gpu=0",
            ][..],
        ),
        (
            "7,nvidia.com/gpu=8",
            RuntimeMode::Cdi,
            machine(),
            &["nvidia.com/gpu=7, nvidia.com/gpu=8"],
        ),
        (
            "0",
            RuntimeMode::Cdi,
            Registry::default(),
            &["gpu=0; no CDI spec on this machine", "divvy cdi generate"],
        ),
        (
            "none",
            RuntimeMode::Cdi,
            Registry::default(),
            &["gpu=none", "divvy cdi generate"],
        ),
        (
            "0",
            RuntimeMode::Cdi,
            twice,
            &["described by both /etc/cdi/a.json and /etc/cdi/b.json"],
        ),
        (
            "../../etc",
            RuntimeMode::Auto,
            machine(),
            &["\"../../etc\"; use an index (0)"],
        ),
        (
            "7",
            RuntimeMode::Auto,
            machine(),
            &[
                "unresolvable CDI devices runtime.nvidia.com/gpu=7; this machine's GPUs are runtime.nvidia.com/gpu=0, ",
                "=all",
            ],
        ),
        (
            "0,nvidia.com/gpu=1",
            RuntimeMode::Auto,
            machine(),
            &[
                "vendor 'runtime.nvidia.com' is not supported when requesting other CDI devices: the container requests 0,nvidia.com/gpu=1",
            ],
        ),
    ] {
        let found = gets(&container(&[&format!("NVIDIA_VISIBLE_DEVICES={env}")], &[]), mode, &registry);
        let found = found.expect_err(env).to_string();
        assert!(parts.iter().all(|part| found.contains(part)), "{found}");
    }
    assert_eq!(
        gets(&container(&["A=1"], &[]), RuntimeMode::Legacy, &machine()).expect("a container that requests nothing starts"),
        [""; 0]
    );
}

/// A spec that is generated from NVIDIA's driver contains no devices of another vendor.
#[test]
fn a_default_kind_of_another_vendor_is_in_files_only() {
    let settings = OciRuntimeSettings {
        default_kind: "example.com/nic".to_owned(),
        ..settings(RuntimeMode::Auto)
    };
    let found = gets_by(&container(&["NVIDIA_VISIBLE_DEVICES=x"], &[]), &settings, &machine());
    assert_eq!(found.expect("in a file"), ["DRIVER=1", "GOT=x"]);
}

fn grant(name: &str, uid: &str, container: &str) -> Value {
    let record = json!({
        "v": 1, "namespace": "default", "name": "p", "uid": uid, "container": container, "cdi": name, "unitMiB": 1024,
        "gpus": [], "containerGpus": [], "bootId": "b",
    });
    let edits = json!({"env": [format!("GRANT={container}")]});
    let device = json!({"name": name, "annotations": {"divvy.dev/grant-record": record.to_string()}, "containerEdits": edits});
    json!({"cdiVersion": "0.6.0", "kind": CDI_KIND, "devices": [device]})
}

/// On a node whose container engine does not support CDI, a container gets only its allocation. The image's own request does not
/// count.
#[test]
fn in_mode_divvy_only_the_allocation_decides() {
    let (one, two) = ("0123456789abcdef0123456789abcdef", "1123456789abcdef0123456789abcdef");
    let mut files = vec![
        file("/etc/cdi/nvidia.json", 0, &spec("nvidia.com/gpu", &["0", "all"])),
        file("/var/run/cdi/one.json", 1, &grant(one, "uid-1", "main")),
        file("/var/run/cdi/two.json", 1, &grant(two, "uid-1", "side")),
    ];
    let registry = Registry::new(files.clone());
    let in_pod = |uid: &str, name: &str| {
        container(
            &["NVIDIA_VISIBLE_DEVICES=all"],
            &[
                ("io.kubernetes.cri.sandbox-uid", uid),
                ("io.kubernetes.cri.container-name", name),
                ("cdi.k8s.io/x", "nvidia.com/gpu=0"),
            ],
        )
    };
    for (container, expected) in [
        (in_pod("uid-1", "main"), &["GRANT=main"][..]),
        (in_pod("uid-1", "side"), &["GRANT=side"]),
        (in_pod("uid-1", "init"), &[]),
        (in_pod("uid-2", "main"), &[]),
        (container(&["NVIDIA_VISIBLE_DEVICES=all"], &[]), &[]),
        (
            container(
                &[],
                &[("io.kubernetes.pod.uid", "uid-1"), ("io.kubernetes.container.name", "main")],
            ),
            &["GRANT=main"],
        ),
    ] {
        assert_eq!(
            gets(&container, RuntimeMode::Divvy, &registry).expect("a plan"),
            expected,
            "{container:?}"
        );
    }
    let asked = DecidedRequest::of(&in_pod("uid-1", "main"), &settings(RuntimeMode::Divvy)).expect("read");
    assert!(
        asked
            .ignored
            .iter()
            .any(|text| text.contains("it gets what its pod was allocated")),
        "{:?}",
        asked.ignored
    );
    assert_eq!(
        asked.decides,
        Decides::Allocation {
            uid: "uid-1".to_owned(),
            container: "main".to_owned()
        }
    );
    assert_eq!(
        allocation("uid-1", "main", &registry).expect("a plan"),
        DevicePlan::Inject {
            devices: vec![format!("{CDI_KIND}={one}")],
            driver_of: None
        }
    );
    files.push(file(
        "/var/run/cdi/three.json",
        1,
        &grant("2123456789abcdef0123456789abcdef", "uid-1", "main"),
    ));
    let error = gets(&in_pod("uid-1", "main"), RuntimeMode::Divvy, &Registry::new(files))
        .expect_err("two grants")
        .to_string();
    assert!(error.contains("describe 2 grants for container main of pod uid-1"), "{error}");
}

/// NVIDIA's runtime asks the driver for devices of this kind in each of its modes. No spec file has this kind.
#[test]
fn the_drivers_kind_is_live_in_mode_cdi() {
    let live = container(&["NVIDIA_VISIBLE_DEVICES=runtime.nvidia.com/gpu=0"], &[]);
    assert_eq!(
        gets(&live, RuntimeMode::Cdi, &machine()).expect("a GPU"),
        ["DRIVER=now", "GOT=0"]
    );
    let both = container(&["NVIDIA_VISIBLE_DEVICES=runtime.nvidia.com/gpu=0,nvidia.com/gpu=0"], &[]);
    let error = gets(&both, RuntimeMode::Cdi, &machine()).expect_err("two kinds").to_string();
    assert!(
        error.contains("is not supported when requesting other CDI devices"),
        "{error}"
    );
    let settings = OciRuntimeSettings {
        mode: RuntimeMode::Cdi,
        default_kind: live::KIND.to_owned(),
        ..OciRuntimeSettings::default()
    };
    let index = container(&["NVIDIA_VISIBLE_DEVICES=1"], &[]);
    assert_eq!(
        gets_by(&index, &settings, &machine()).expect("a GPU"),
        ["DRIVER=now", "GOT=1"]
    );
}
