//! Tests of the program when it is called by the name of NVIDIA's hook, which Docker's `--gpus` needs.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use super::bed::Bed;

const NAMES: [&str; 2] = ["nvidia-container-runtime-hook", "nvidia-container-toolkit"];

/// The configuration that dockerd writes for `--gpus`: its own variable follows the image's.
fn by_docker(device: &str) -> Value {
    json!({
        "process": {"env": ["PATH=/", "NVIDIA_VISIBLE_DEVICES=all", format!("NVIDIA_VISIBLE_DEVICES={device}")]},
        "root": {"path": "rootfs"},
        "hooks": {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["nvidia-container-runtime-hook", "prestart"]}]},
    })
}

/// A test bed whose settings do not say whether the environment of unprivileged containers counts.
fn bed(config: &Value, mode: &str, more: &str) -> Bed {
    let bed = Bed::new(&config.to_string());
    let cli = bed.path("nvidia-container-cli");
    let (called, env) = (bed.path("called"), bed.path("env"));
    let script = format!("#!/bin/sh\nprintf '%s\\n' \"$@\" > {called:?}\n/usr/bin/env > {env:?}\n");
    fs::write(&cli, script).expect("written");
    fs::set_permissions(&cli, fs::Permissions::from_mode(0o755)).expect("its mode");
    let settings = format!(
        "[nvidia-container-runtime]\nmode = {mode:?}\nruntimes = [{:?}]\n[nvidia-container-runtime.modes.cdi]\nspec-dirs = [{:?}]\n\
         [nvidia-container-cli]\nldconfig = \"@/sbin/ldconfig\"\n{more}",
        bed.path("low-level"),
        bed.path("cdi"),
    );
    fs::write(bed.path("config.toml"), settings).expect("written");
    bed
}

/// Call the hook with an engine's environment variables, in a directory other than the bundle's.
fn hook(bed: &Bed, name: &str, words: &[&str], state: &str) -> Output {
    let program = bed.path(name);
    if !program.exists() {
        symlink(env!("CARGO_BIN_EXE_divvy-runtime"), &program).expect("linked");
    }
    let mut child = Command::new(program)
        .args(words)
        .current_dir("/")
        .env_clear()
        .env("NVIDIA_CTK_CONFIG_FILE_PATH", bed.path("config.toml"))
        .env("PATH", bed.path(""))
        .env("OF_DOCKERD", "1")
        .env("LD_LIBRARY_PATH", "/nowhere")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    // The program may end before it reads its input.
    let _ = child.stdin.take().expect("its input").write_all(state.as_bytes());
    child.wait_with_output().expect("it ends")
}

fn state(bed: &Bed) -> String {
    json!({"ociVersion": "1.0.2", "id": "c1", "status": "creating", "pid": 4242, "bundle": bed.path("bundle")}).to_string()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// NVIDIA's program gets none of dockerd's environment variables.
#[test]
fn dockers_request_calls_nvidias_program() {
    for name in NAMES {
        for mode in ["auto", "legacy"] {
            let bed = bed(&by_docker("0"), mode, "environment = [\"A=b\"]\n");
            let output = hook(&bed, name, &["prestart"], &state(&bed));
            assert!(output.status.success() && said(&output).is_empty(), "{output:?}");
            let called = fs::read_to_string(bed.path("called")).expect("called");
            let words: Vec<&str> = called.lines().collect();
            let root = bed.path("bundle/rootfs").display().to_string();
            assert_eq!(
                words,
                [
                    "--load-kmods",
                    "configure",
                    "--cuda-compat-mode=ldconfig",
                    "--ldconfig=@/sbin/ldconfig",
                    "--device=0",
                    "--compute",
                    "--utility",
                    "--pid=4242",
                    &root
                ],
                "{name} {mode}"
            );
            let env = fs::read_to_string(bed.path("env")).expect("called");
            assert!(
                env.contains("A=b\n")
                    && !env.contains("OF_DOCKERD")
                    && !env.contains("LD_LIBRARY_PATH")
                    && !env.contains("NVIDIA_CTK"),
                "{env}"
            );
        }
    }
}

/// The hook is called for each container, but the devices that an image requests do not count.
#[test]
fn a_directorys_hook_gives_an_image_no_gpu() {
    // CRI-O and podman call every hook in a hooks directory for every container.
    for key in ["io.kubernetes.cri-o.Name", "io.container.manager"] {
        let mut config = by_docker("all");
        config["annotations"] = json!({ key: "x" });
        let bed = bed(&config, "auto", "");
        let output = hook(&bed, NAMES[0], &["prestart"], &state(&bed));
        assert!(output.status.success(), "{output:?}");
        assert!(
            said(&output).contains("Ignoring devices requested by environment variable(s)"),
            "{output:?}"
        );
        assert!(!bed.path("called").exists(), "{key}");
    }
}

#[test]
fn what_is_in_the_way_is_said_with_what_to_type() {
    let missing = "[nvidia-container-cli]\npath = \"/nowhere/cli\"\n";
    for (mode, more, words, from, status, parts) in [
        (
            "auto",
            "path = \"/nowhere/cli\"\n",
            "prestart",
            None,
            1,
            vec!["is not at /nowhere/cli", "divvy configure docker --set-default --restart"],
        ),
        (
            "cdi",
            "",
            "prestart",
            None,
            1,
            vec!["docker --gpus flag) is not supported in mode \"cdi\"", "--set-default"],
        ),
        (
            "auto",
            "",
            "-config /nowhere/c prestart",
            None,
            1,
            vec!["/nowhere/c cannot be read"],
        ),
        ("auto", missing, "prestart", None, 1, vec!["config.toml: "]),
        ("auto", "", "prestart", Some("{}"), 1, vec!["names no bundle"]),
        (
            "auto",
            "",
            "prestart",
            Some("no"),
            1,
            vec!["does not follow the runtime specification"],
        ),
        ("auto", "", "prestart", Some("BUNDLE"), 1, vec!["has no PID"]),
        (
            "auto",
            "",
            "bogus",
            None,
            2,
            vec!["unknown command \"bogus\"", "Usage: nvidia-container-runtime-hook"],
        ),
        ("auto", "", "-x", None, 2, vec!["-x", "Usage: "]),
    ] {
        let bed = bed(&by_docker("0"), mode, more);
        let state = match from {
            None => state(&bed),
            Some("BUNDLE") => json!({"bundle": bed.path("bundle")}).to_string(),
            Some(text) => text.to_owned(),
        };
        let words: Vec<&str> = words.split(' ').collect();
        let output = hook(&bed, NAMES[0], &words, &state);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {text}");
        assert!(
            text.starts_with("nvidia-container-runtime-hook: ") && parts.iter().all(|part| text.contains(part)),
            "{words:?}: {text}"
        );
        assert!(!bed.path("called").exists(), "{words:?}");
    }
    let bed = bed(&by_docker("0"), "auto", "");
    for (words, part) in [
        ("poststart", ""),
        ("poststop", ""),
        ("-version", "in place of 1.20.0"),
        ("-help", ""),
    ] {
        let output = hook(&bed, NAMES[0], &[words], "");
        assert!(
            output.status.success() && String::from_utf8_lossy(&output.stdout).contains(part),
            "{output:?}"
        );
    }
}

/// As the default runtime, divvy-runtime removes the hook and adds the GPUs itself. The hook shows that the user requested the GPUs.
#[test]
fn the_runtime_gives_only_gpus_requested_of_docker() {
    let nodes = |config: &Value| {
        let devices = config["linux"]["devices"].as_array().cloned().unwrap_or_default();
        devices
            .iter()
            .map(|node| node["path"].as_str().expect("a path").to_owned())
            .collect::<Vec<_>>()
    };
    let created = |config: &Value, top: &str| {
        let bed = bed(config, "cdi", "");
        let settings = fs::read_to_string(bed.path("config.toml")).expect("there");
        fs::write(bed.path("config.toml"), format!("{top}{settings}")).expect("written");
        bed.create().expect("created")
    };
    let config = by_docker("0");
    let found = created(&config, "");
    assert_eq!(nodes(&found), ["/dev/nvidia0"]);
    assert_eq!(found["hooks"]["prestart"], json!([]));
    assert_eq!(nodes(&created(&by_docker("void"), "")), [""; 0]);
    let refused = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n";
    assert_eq!(
        nodes(&created(&config, refused)),
        [""; 0],
        "an explicit false applies to Docker's request as well"
    );
    let mut without = config.clone();
    without["hooks"]["prestart"][0]["path"] = json!("/usr/bin/other");
    assert_eq!(nodes(&created(&without, "")), [""; 0], "only the image requests it");
    let mut of_a_pod = config.clone();
    of_a_pod["annotations"] = json!({"io.kubernetes.cri.container-type": "container"});
    let found = created(&of_a_pod, "");
    assert_eq!(nodes(&found), [""; 0]);
    assert_eq!(found["hooks"]["prestart"], json!([]), "the hook must not add it either");
}
