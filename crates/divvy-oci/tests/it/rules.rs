//! Security rules that isolate containers, derived from the CVEs of NVIDIA's toolkit (`docs/compatibility/hostile-images.md`). This file tests the
//! rules that concern pure functions; `divvy-runtime` and `divvy-hook` test the others.

use divvy_cdi::generate::{GenerateOptions, nvidia, proc};
use divvy_cdi::{Edits, Spec};
use divvy_oci::runtime::plan::{DecidedRequest, Decides};
use divvy_oci::runtime::request::RequestingContainer;
use divvy_oci::runtime::settings::{OciRuntimeSettings, RuntimeMode};

use divvy_testkit::machine::kinds;

fn specs(hook: Option<&str>) -> Vec<Spec> {
    [kinds::debian(), kinds::red_hat(), kinds::mig()]
        .iter()
        .map(|machine| {
            let options = GenerateOptions {
                hook: hook.map(str::to_owned),
                ..GenerateOptions::new("nvidia.com")
            };
            nvidia::generate(machine, &proc::gpus(machine), None, &options)
                .expect("a spec")
                .spec
        })
        .collect()
}

fn edits(spec: &Spec) -> Vec<&Edits> {
    spec.all_edits().map(|(_, edits)| edits).collect()
}

/// Our hook states everything, including its environment and its timeout.
#[test]
fn rule_2_a_spec_has_no_hook_or_only_ours() {
    for spec in specs(None) {
        assert!(edits(&spec).iter().all(|edits| edits.hooks.is_empty()));
    }
    for spec in specs(Some("/usr/local/bin/divvy-hook")) {
        assert!(spec.is_valid());
        let hooks: Vec<_> = edits(&spec).iter().flat_map(|edits| &edits.hooks).collect();
        let [hook] = hooks[..] else { panic!("{hooks:?}") };
        assert_eq!(
            (hook.hook_name.as_str(), hook.path.as_str()),
            ("createContainer", "/usr/local/bin/divvy-hook")
        );
        assert!(!hook.env.is_empty() && hook.timeout.is_some(), "{hook:?}");
        assert_eq!(hook.args[..2], ["divvy-hook", "update-ldcache"]);
        assert!(hook.args.contains(&"--folder=/usr/lib64".to_owned()), "{hook:?}");
        let directories: Vec<&str> = hook.args[2..]
            .iter()
            .filter_map(|arg| arg.strip_prefix("--folder="))
            .collect();
        assert_eq!(directories.len(), hook.args.len() - 2);
        assert!(
            directories
                .iter()
                .all(|directory| !directory.contains("vdpau") && !directory.contains("gbm")),
            "{directories:?}"
        );
        for mount in edits(&spec).iter().flat_map(|edits| &edits.mounts) {
            let (directory, name) = mount.container_path.rsplit_once('/').expect("a path");
            if name.starts_with("libcuda.so") {
                assert!(directories.contains(&directory), "{directory} is not searched");
            }
        }
    }
}

/// Such a name is refused before the program looks at anything else.
#[test]
fn rule_6_names_like_paths_or_flags_are_refused() {
    let long = "a".repeat(5000);
    for name in [
        "../../etc/passwd",
        "a/../b",
        "0;id",
        "0 1",
        "a=b=c",
        "\u{202e}",
        "$(id)",
        "nvidia.com/gpu=../x",
        "-x",
        &long,
    ] {
        let container = RequestingContainer {
            env: vec![format!("NVIDIA_VISIBLE_DEVICES={name}")],
            privileged: true,
            ..RequestingContainer::default()
        };
        for mode in [RuntimeMode::Auto, RuntimeMode::Cdi, RuntimeMode::JitCdi] {
            let settings = OciRuntimeSettings {
                mode,
                ..OciRuntimeSettings::default()
            };
            match DecidedRequest::of(&container, &settings) {
                // A long name is valid; its device does not exist.
                Ok(_) if name == long => {}
                Ok(asked) => panic!("{name} in {mode:?}: {asked:?}"),
                Err(error) => assert!(error.to_string().len() < 400, "{error}"),
            }
        }
    }
}

#[test]
fn rule_7_the_environment_of_an_image_gives_it_nothing() {
    let mut container = RequestingContainer {
        env: vec![
            "NVIDIA_VISIBLE_DEVICES=all".to_owned(),
            "NVIDIA_DRIVER_CAPABILITIES=all".to_owned(),
        ],
        ..RequestingContainer::default()
    };
    for mode in [
        RuntimeMode::Auto,
        RuntimeMode::Cdi,
        RuntimeMode::JitCdi,
        RuntimeMode::Legacy,
        RuntimeMode::Divvy,
    ] {
        let settings = OciRuntimeSettings {
            mode,
            ..OciRuntimeSettings::default()
        };
        let asked = DecidedRequest::of(&container, &settings).expect("read");
        assert_eq!(asked.decides, Decides::Nobody, "{mode:?}");
        assert!(!asked.ignored.is_empty(), "the ignored request is reported");
    }
    // The pod's allocation decides, regardless of the image's variables.
    for (key, value) in [
        ("io.kubernetes.cri.sandbox-uid", "u"),
        ("io.kubernetes.cri.container-name", "c"),
    ] {
        container.annotations.insert(key.to_owned(), value.to_owned());
    }
    container.privileged = true;
    let settings = OciRuntimeSettings {
        mode: RuntimeMode::Divvy,
        ..OciRuntimeSettings::default()
    };
    let asked = DecidedRequest::of(&container, &settings).expect("read");
    assert!(matches!(asked.decides, Decides::Allocation { .. }), "{asked:?}");
}

#[test]
fn rule_8_every_mount_is_private_and_read_only_but_sockets() {
    let mut sockets = 0;
    for spec in specs(None) {
        for mount in edits(&spec).iter().flat_map(|edits| &edits.mounts) {
            let has = |option: &str| mount.options.iter().any(|given| given == option);
            assert!(has("rprivate") && has("nosuid") && has("nodev"), "{mount:?}");
            let is_socket = mount.container_path.ends_with("/socket") || mount.container_path == "/tmp/nvidia-mps";
            assert_eq!(has("ro"), !is_socket, "{mount:?}");
            sockets += usize::from(is_socket);
        }
    }
    assert!(sockets > 0, "there are some");
}
