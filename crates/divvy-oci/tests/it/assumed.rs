//! Compares the default settings that the runtime prints with the defaults that it really uses.

use std::collections::BTreeMap;

use divvy_oci::runtime::edit::{assumed, set};
use divvy_oci::runtime::plan::{DecidedRequest, by_hook};
use divvy_oci::runtime::request::{DeviceRequest, MOUNTS, RequestingContainer, WantedDevices};
use divvy_oci::runtime::settings::{OciRuntimeSettings, RuntimeMode, ldconfig};
use divvy_oci::runtime::{extras, legacy, require};

const LDCONFIG: &str = "@/sbin/ldconfig";

/// Containers with each way to request GPUs: privileged and unprivileged, with the request from the image or from the engine.
fn containers() -> Vec<RequestingContainer> {
    let environments: [&[&str]; 8] = [
        &[],
        &["NVIDIA_VISIBLE_DEVICES=all"],
        &["NVIDIA_VISIBLE_DEVICES=0,1"],
        &["NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"],
        &["CUDA_VERSION=9.0.116"],
        &[
            "NVIDIA_VISIBLE_DEVICES=0",
            "NVIDIA_REQUIRE_CUDA=cuda>=12.4",
            "NVIDIA_DRIVER_CAPABILITIES=all",
        ],
        &[
            "NVIDIA_VISIBLE_DEVICES=0",
            "NVIDIA_IMEX_CHANNELS=3",
            "NVIDIA_DRIVER_CAPABILITIES=video",
        ],
        &["DOCKER_RESOURCE_GPU=3"],
    ];
    let mut all = Vec::new();
    for env in environments {
        for privileged in [false, true] {
            for by_engine in [false, true] {
                for (mount, annotation) in [
                    (false, None),
                    (true, None),
                    (false, Some("cdi.k8s.io/a")),
                    (false, Some("x.com/a")),
                ] {
                    all.push(RequestingContainer {
                        env: env.iter().map(|entry| (*entry).to_owned()).collect(),
                        mounts: mount
                            .then(|| ("/dev/null".to_owned(), format!("{MOUNTS}/1")))
                            .into_iter()
                            .collect(),
                        annotations: annotation
                            .map(|key| (key.to_owned(), "nvidia.com/gpu=2".to_owned()))
                            .into_iter()
                            .collect(),
                        privileged,
                        by_engine,
                    });
                }
            }
        }
    }
    all
}

/// Describe everything that the runtime and its hook decide with these settings.
fn decided(settings: &OciRuntimeSettings) -> String {
    let mut said = Vec::new();
    // Also use mode legacy, because some settings have an effect only in that mode.
    for mode in [settings.mode, RuntimeMode::Legacy] {
        let settings = &OciRuntimeSettings {
            mode,
            ..settings.clone()
        };
        for container in containers() {
            let asked = DecidedRequest::of(&container, settings).map_err(|error| error.to_string());
            let hook = by_hook(&container, settings).map_err(|error| error.to_string());
            let wanted = DeviceRequest::of(&container, settings).wanted;
            let words = legacy::words(&container, &wanted, settings, LDCONFIG).map_err(|error| error.to_string());
            let required = require::expressions(&container, settings).map_err(|error| error.to_string());
            let extras = extras::extras(&container, settings).map_err(|error| error.to_string());
            said.push(format!("{asked:?} {hook:?} {words:?} {required:?} {extras:?}"));
        }
    }
    // Settings that the programs use without another decision.
    said.push(format!(
        "{:?}",
        (
            &settings.runtimes,
            &settings.debug,
            settings.log_level,
            &settings.spec_dirs,
            &settings.cli.environment,
            &settings.cli.path,
            &settings.cli.root,
            legacy::compat_hook(settings),
        )
    ));
    said.join("\n")
}

fn parse(text: &str) -> OciRuntimeSettings {
    OciRuntimeSettings::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Return each line that is a setting or an example: the name of its table, the line, and whether it is an example.
fn lines(text: &str) -> Vec<(String, String, bool)> {
    let (mut table, mut found) = (String::new(), Vec::new());
    for line in text.lines() {
        let example = line.starts_with('#') && !line.starts_with("# ");
        if let Some(name) = line.strip_prefix('[') {
            table = name.trim_end_matches(']').to_owned();
        } else if !line.is_empty() && !line.starts_with("# ") {
            found.push((table.clone(), line.to_owned(), example));
        }
    }
    found
}

/// Settings that only NVIDIA's own programs read.
const NOT_READ: [&str; 3] = [
    "nvidia-container-runtime.modes.csv.mount-spec-path",
    "nvidia-container-runtime-hook.path",
    "nvidia-ctk.path",
];

/// A value other than the default for each key.
fn otherwise() -> BTreeMap<&'static str, &'static str> {
    BTreeMap::from([
        ("accept-nvidia-visible-devices-as-volume-mounts", "true"),
        ("accept-nvidia-visible-devices-envvar-when-unprivileged", "true"),
        ("disable-require", "true"),
        ("supported-driver-capabilities", "compute"),
        ("swarm-resource", "DOCKER_RESOURCE_GPU"),
        ("nvidia-container-cli.debug", "/x"),
        ("nvidia-container-cli.environment", "A=1"),
        ("nvidia-container-cli.ldcache", "/x"),
        ("nvidia-container-cli.ldconfig", "@/x"),
        ("nvidia-container-cli.load-kmods", "false"),
        ("nvidia-container-cli.no-cgroups", "true"),
        ("nvidia-container-cli.path", "/x"),
        ("nvidia-container-cli.root", "/x"),
        ("nvidia-container-cli.user", "x"),
        ("nvidia-container-runtime.debug", "/x"),
        ("nvidia-container-runtime.log-level", "error"),
        ("nvidia-container-runtime.mode", "cdi"),
        ("nvidia-container-runtime.runtimes", "youki"),
        ("nvidia-container-runtime.modes.cdi.annotation-prefixes", "x.com/"),
        ("nvidia-container-runtime.modes.cdi.default-kind", "x.com/gpu"),
        ("nvidia-container-runtime.modes.cdi.spec-dirs", "/x"),
        ("nvidia-container-runtime.modes.legacy.cuda-compat-mode", "hook"),
        ("nvidia-container-runtime-hook.skip-mode-detection", "true"),
    ])
}

fn path(table: &str, line: &str) -> String {
    let key = line.trim_start_matches('#').split(" = ").next().unwrap_or_default();
    match table {
        "" => key.to_owned(),
        table => format!("{table}.{key}"),
    }
}

/// Return the text with one line of a table replaced.
fn exchanged(text: &str, table: &str, line: &str, by: &str) -> String {
    let mut current = "";
    let lines = text.lines().map(|found| {
        if let Some(name) = found.strip_prefix('[') {
            current = name.trim_end_matches(']');
        }
        if current == table && found == line { by } else { found }
    });
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn no_assumed_line_changes_a_decision() {
    let text = assumed(LDCONFIG);
    let without_a_file = decided(&OciRuntimeSettings::default());
    assert_eq!(decided(&parse(&text)), without_a_file, "the whole file");
    let others = otherwise();
    let mut seen = 0;
    for (table, line, example) in lines(&text) {
        let path = path(&table, &line);
        if !example {
            let without = exchanged(&text, &table, &line, "");
            assert!(without.len() < text.len(), "{line}");
            assert_eq!(decided(&parse(&without)), without_a_file, "{path}: without {line}");
            let alone = format!("[{table}]\n{line}\n");
            let alone = if table.is_empty() { line.clone() } else { alone };
            assert_eq!(decided(&parse(&alone)), without_a_file, "{path}: {line} alone");
        }
        if NOT_READ.contains(&path.as_str()) {
            continue;
        }
        // Another value must change a decision; otherwise this test would prove nothing about the line.
        let other = others
            .get(path.as_str())
            .unwrap_or_else(|| panic!("{path} is new: what else could it be?"));
        let changed = set(&text, &[format!("{path}={other}")]).expect("set");
        assert_ne!(decided(&parse(&changed)), without_a_file, "{path} = {other}");
        seen += 1;
    }
    assert_eq!(seen, others.len());
}

#[test]
fn no_example_gives_a_container_more_than_before() {
    let text = assumed(LDCONFIG);
    let gets = |settings: &OciRuntimeSettings, container: &RequestingContainer| DeviceRequest::of(container, settings).wanted;
    let before = OciRuntimeSettings::default();
    for (table, line, _) in lines(&text).into_iter().filter(|(.., example)| *example) {
        let taken = exchanged(&text, &table, &line, line.trim_start_matches('#'));
        let after = parse(&taken);
        for container in containers().iter().filter(|container| !container.privileged) {
            let (had, has) = (gets(&before, container), gets(&after, container));
            assert!(has == had || has == WantedDevices::Nothing, "{line}: {container:?}: {has:?}");
        }
        // The examples of the settings that decide who gets GPUs have exactly the values that are the default for an image's requests.
        if line.starts_with("#accept-") || line.starts_with("#no-cgroups") {
            let of_an_image = containers().into_iter().filter(|container| !container.by_engine);
            for container in of_an_image {
                assert_eq!(gets(&after, &container), gets(&before, &container), "{line}: {container:?}");
            }
        }
    }
}

/// `--in-place` writes the printed defaults with the new value.
#[test]
fn a_new_file_opens_nothing_but_what_was_asked_for() {
    let text = assumed(LDCONFIG);
    for (path, other) in otherwise() {
        let file = set(&text, &[format!("{path}={other}")]).expect("set");
        let alone = set("", &[format!("{path}={other}")]).expect("set");
        assert_eq!(decided(&parse(&file)), decided(&parse(&alone)), "{path}");
    }
    let file = set(&text, &["nvidia-container-runtime.mode=cdi".to_owned()]).expect("set");
    let opens = |line: &&str| line.trim_start_matches('#').starts_with("accept-") && line.contains("true");
    assert_eq!(file.lines().find(opens), None);
}

#[test]
fn the_programs_behind_debians_script_are_named() {
    assert_eq!(ldconfig(|_| false), "@/sbin/ldconfig");
    assert_eq!(ldconfig(|path| path == "/sbin/ldconfig.real"), "@/sbin/ldconfig.real");
    assert!(assumed("@/sbin/ldconfig.real").contains("\nldconfig = \"@/sbin/ldconfig.real\"\n"));
}

#[test]
fn the_text_is_this() {
    insta::assert_snapshot!(assumed(LDCONFIG));
}
