use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use serde_json::{Value, json};

use super::bed::{Bed, Refusal, asking};

#[test]
fn case_17_b_whatever_is_not_a_creation_is_handed_on_as_it_came() {
    let bed = Bed::new("this is no configuration");
    for words in [
        &["delete", "create"][..],
        &["state", "create"],
        &["exec", "create", "sh"],
        &["--root", "create", "start", "--bundle", "/nowhere"],
        &["kill", "c1", "KILL"],
    ] {
        let output = bed.run(words);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(said, format!("{}\nA=1\n", words.join("\n")));
        assert_eq!((output.status.code(), output.stderr.len()), (Some(7), 0), "{words:?}");
    }
    assert_eq!(bed.text(), "this is no configuration");
}

#[test]
fn case_18_a_a_container_without_gpus_stays_byte_identical() {
    for config in [
        asking("void"),
        asking(""),
        asking(","),
        "{ \"newField\" : 1.0e0,\n \"process\": {\"env\": [\"FOO\"]} }".to_owned(),
        "{}".to_owned(),
    ] {
        let bed = Bed::new(&config);
        let before = fs::metadata(bed.config()).expect("there");
        let output = bed.run(&["--root", "/r", "create", "--bundle", ".", "c1"]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(
            (output.status.code(), said.as_str()),
            (Some(7), "--root\n/r\ncreate\n--bundle\n.\nc1\nA=1\n"),
            "arguments and environment are passed on"
        );
        let after = fs::metadata(bed.config()).expect("there");
        assert_eq!(bed.text(), config);
        assert_eq!(
            (before.ino(), before.mtime_nsec()),
            (after.ino(), after.mtime_nsec()),
            "{config}"
        );
    }
}

/// The container's configuration file keeps its mode and owner.
#[test]
fn case_21_b_a_container_gets_its_requested_gpu() {
    for device in ["0", "0,0", " 0 ,", "all", "nvidia.com/gpu=0"] {
        let bed = Bed::new(&asking(device));
        let config = bed.create().expect("created");
        assert_eq!(config["process"]["env"], json!(["PATH=/", "NVIDIA_VISIBLE_DEVICES=void"]));
        assert_eq!(config["linux"]["devices"][0]["path"], "/dev/nvidia0");
        assert_eq!(
            config["linux"]["resources"]["devices"][0],
            json!({"allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm"})
        );
        assert_eq!(config["mounts"][0]["destination"], "/usr/lib/libcuda.so.1");
        assert_eq!(config["newField"], 1);
        let mode = fs::metadata(bed.config()).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        let left = fs::read_dir(bed.path("bundle")).expect("there").count();
        assert_eq!(left, 1, "no temporary file is left");
    }
    let bed = Bed::new(&asking("none"));
    let config = bed.create().expect("created");
    assert_eq!(
        (&config["linux"], &config["process"]["env"][1]),
        (&Value::Null, &json!("NVIDIA_VISIBLE_DEVICES=void"))
    );
}

/// The current directory is the bundle.
#[test]
fn run_creates_a_container_too() {
    let bed = Bed::new(&asking("0"));
    let output = bed.run(&["run", "c1"]);
    assert_eq!(output.status.code(), Some(7));
    assert!(bed.text().contains("/dev/nvidia0"));
}

/// containerd reads the log and copies the last error into the pod's events.
#[test]
fn case_19_an_obstacle_is_told_and_logged() {
    let bed = Bed::new(&asking("7"));
    let (before, log) = (bed.text(), bed.path("log.json"));
    let output = bed.run(&["--log", log.to_str().expect("text"), "--log-format", "json", "create", "c1"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains("unresolvable CDI devices nvidia.com/gpu=7; this machine's CDI specs have nvidia.com/gpu=0"),
        "{said}"
    );
    let line: Value = serde_json::from_str(&fs::read_to_string(&log).expect("a log")).expect("JSON");
    assert_eq!(
        (line["level"].as_str(), line["msg"].as_str()),
        (Some("error"), Some(said.trim_end()))
    );
    let keys: Vec<&String> = line.as_object().expect("an object").keys().collect();
    assert_eq!(keys, ["level", "msg", "time"], "case 27: the keys of runc's own lines");
    assert!(
        line["time"]
            .as_str()
            .is_some_and(|time| time.len() == 20 && time.ends_with('Z')),
        "{line}"
    );
    assert_eq!(bed.text(), before);

    let output = bed.run(&["--log", bed.path("log.txt").to_str().expect("text"), "create", "c1"]);
    assert_eq!(output.status.code(), Some(1));
    let line = fs::read_to_string(bed.path("log.txt")).expect("a log");
    assert!(
        line.starts_with("time=\"") && line.contains("level=error msg=\"divvy-runtime: could not apply"),
        "{line}"
    );
}

/// The container starts despite the warning.
#[test]
fn case_22_c_an_ignored_request_is_a_logged_warning() {
    let bed = Bed::new(&asking("all"));
    let low_level = bed.path("low-level");
    let specs = bed.path("cdi");
    let text = format!(
        "[nvidia-container-runtime]\nmode = \"cdi\"\nruntimes = [{low_level:?}]\n[nvidia-container-runtime.modes.cdi]\nspec-dirs = [{specs:?}]\n"
    );
    fs::write(bed.path("config.toml"), text).expect("written");
    let log = bed.path("log.json");
    let output = bed.run(&["--log", log.to_str().expect("text"), "--log-format=json", "create", "c1"]);
    assert_eq!(output.status.code(), Some(7));
    let line = fs::read_to_string(&log).expect("a log");
    assert!(
        line.contains("warning") && line.contains("in unprivileged container: [NVIDIA_VISIBLE_DEVICES]"),
        "{line}"
    );
    assert_eq!(bed.text(), asking("all"), "an image cannot give itself a GPU");
}

/// The runtime or the bundle is missing, or the settings are bad.
#[test]
fn a_failed_start_says_what_to_do() {
    let bed = Bed::new(&asking("0"));
    let there = format!("[nvidia-container-runtime]\nruntimes = [{:?}]\n", bed.path("low-level"));
    let check = |settings: &str, words: &[&str], parts: &[&str]| {
        fs::write(bed.path("config.toml"), settings).expect("written");
        let output = bed.run(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.code() == Some(1) && parts.iter().all(|part| said.contains(part)),
            "{words:?}: {said}"
        );
    };
    check(
        "[nvidia-container-runtime]\nruntimes = [\"/nowhere/runc\"]",
        &["state", "c"],
        &["no runtime binary found from candidate list: [/nowhere/runc]", "install one"],
    );
    check(
        &format!("{there}mode = \"csv\""),
        &["state", "c"],
        &["config.toml: ", "Jetson"],
    );
    check("mode = ", &["state", "c"], &["config.toml: "]);
    check(&there, &["create", "--bundle"], &["bundle option requires an argument"]);
    check(
        &there,
        &["create", "--bundle", "/nowhere", "c"],
        &["/nowhere/config.json cannot be read: No such file"],
    );
}

/// A missing directory has no specs.
#[test]
fn an_unreadable_spec_directory_is_an_error() {
    let bed = Bed::new(&asking("0"));
    fs::remove_dir_all(bed.path("cdi")).expect("removed");
    let Refusal(missing) = bed.create().expect_err("no GPU");
    assert!(missing.contains("unresolvable CDI devices"), "{missing}");
    fs::write(bed.path("cdi"), "a file").expect("written");
    let Refusal(unread) = bed.create().expect_err("no GPU");
    assert!(unread.contains("cdi cannot be read: Not a directory"), "{unread}");
}

#[test]
fn it_does_not_take_itself_for_the_real_runtime() {
    let bed = Bed::new("{}");
    let own = std::path::Path::new(env!("CARGO_BIN_EXE_divvy-runtime"));
    bed.settings("auto", own);
    let output = bed.run(&["state", "c"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("no runtime binary found"), "{said}");
}

#[test]
fn case_27_a_the_version_is_ours_and_then_the_real_runtimes() {
    let bed = Bed::new("{}");
    let output = bed.run(&["--version"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(7));
    let expected = format!(
        "Divvy Container Runtime version {}\nspec: 1.3.0\n\n--version\nA=1\n",
        env!("CARGO_PKG_VERSION")
    );
    assert_eq!(said, expected);
}

/// NVIDIA's runtime checks requirements only in mode `legacy`.
#[test]
fn case_44_d_mode_cdi_starts_no_unrunnable_image() {
    let config = |more: &[&str]| {
        let env: Vec<&str> = ["NVIDIA_VISIBLE_DEVICES=0"].iter().chain(more).copied().collect();
        json!({"process": {"env": env}}).to_string()
    };
    let mut spec = super::bed::nvidia();
    spec["cdiVersion"] = json!("0.6.0");
    spec["annotations"] = json!({"divvy.dev/driver-version": "535.129.03"});
    for (env, says) in [
        (&["NVIDIA_REQUIRE_CUDA=cuda>=12.2"][..], None),
        (
            &["NVIDIA_REQUIRE_CUDA=cuda>=12.4"],
            Some(
                "requirement error: unsatisfied condition: cuda>=12.4, please update your driver to a newer version, or use an earlier cuda container; this machine has driver 535.129.03, CUDA 12.2",
            ),
        ),
        (&["NVIDIA_REQUIRE_CUDA=cuda>=12.4", "NVIDIA_DISABLE_REQUIRE=true"], None),
        (&["NVIDIA_REQUIRE_CUDA=cuda>=12.4 brand=tesla,driver>=535,driver<536"], None),
        (&["NVIDIA_REQUIRE_X=foo>1"], Some("invalid expression: \"foo>1\"")),
        (&["CUDA_VERSION=13.0.1"], Some("unsatisfied condition: cuda>=13.0")),
        (&["CUDA_VERSION=cu124"], None),
    ] {
        let bed = Bed::new(&config(env));
        bed.spec("nvidia.json", &spec);
        let created = bed.create();
        match says {
            None => assert!(created.is_ok(), "{env:?}: {created:?}"),
            Some(part) => {
                let Refusal(error) = created.expect_err(part);
                assert!(error.contains(part), "{env:?}: {error}");
                assert_eq!(bed.text(), config(env), "its file stays unchanged");
            }
        }
    }
}

/// A log that cannot be written does not stop the container.
#[test]
fn case_27_b_its_own_log_tells_what_was_done() {
    let bed = Bed::new(&asking("0"));
    let low_level = bed.path("low-level");
    let own = bed.path("log/runtime.log");
    let with = |text: &str| bed.settings_and("cdi", &low_level, text);
    let settings = |path: &std::path::Path, level: &str| {
        let text = fs::read_to_string(bed.path("config.toml")).expect("there");
        let more = format!("[nvidia-container-runtime]\ndebug = {path:?}\nlog-level = {level:?}\n");
        fs::write(bed.path("config.toml"), text.replace("[nvidia-container-runtime]\n", &more)).expect("written");
    };
    let log = || fs::read_to_string(&own).unwrap_or_default();
    with("");
    settings(&own, "info");
    assert_eq!(bed.run(&["--version"]).status.code(), Some(7));
    assert_eq!(bed.run(&["state", "c1"]).status.code(), Some(7));
    assert!(!own.exists(), "nothing was done");
    bed.create().expect("created");
    assert!(
        log().contains("level=info") && log().contains("config.json: added 1 device nodes, 1 mounts, 1 variables and 0 hooks"),
        "{}",
        log()
    );
    fs::write(bed.config(), asking("7")).expect("written");
    bed.create().expect_err("no such device");
    assert_eq!(log().lines().count(), 2);
    assert!(
        log()
            .lines()
            .nth(1)
            .is_some_and(|line| line.contains("level=error msg=\"divvy-runtime: could not apply")),
        "{}",
        log()
    );

    with("");
    settings(&own, "error");
    fs::write(bed.config(), asking("0")).expect("written");
    bed.create().expect("created");
    assert_eq!(log().lines().count(), 2, "changes are logged at a lower level");

    with("");
    settings(std::path::Path::new("/proc/nowhere/x.log"), "info");
    fs::write(bed.config(), asking("0")).expect("written");
    let engine = bed.path("log.json");
    let output = bed.run(&[
        "--log",
        engine.to_str().expect("text"),
        "--log-format",
        "json",
        "create",
        "c1",
    ]);
    assert_eq!(output.status.code(), Some(7), "the container starts anyway");
    let said = fs::read_to_string(engine).expect("the engine's log");
    assert!(
        said.contains("\"level\":\"warning\"") && said.contains("/proc/nowhere/x.log cannot be written"),
        "{said}"
    );
}

/// If the hook stayed, it would give the container what is refused here.
#[test]
fn case_25_b_a_container_without_gpus_loses_nvidias_hook() {
    let hooks = json!({"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}, {"path": "/bin/other"}]});
    for (mode, device, left) in [
        ("cdi", "void", 1),
        ("auto", "", 1),
        ("jit-cdi", "void", 1),
        ("divvy", "all", 1),
        ("legacy", "void", 2),
    ] {
        let mut config: Value = serde_json::from_str(&asking(device)).expect("JSON");
        config["hooks"] = hooks.clone();
        let bed = Bed::new(&config.to_string());
        bed.settings(mode, &bed.path("low-level"));
        let found = bed.create().unwrap_or_else(|refusal| panic!("{mode}: {refusal:?}"));
        let prestart = found["hooks"]["prestart"].as_array().expect("hooks");
        assert_eq!(prestart.len(), left, "{mode}: only in mode legacy the hook stays");
        assert_eq!(prestart[left - 1]["path"], "/bin/other");
        assert_eq!(found["process"], config["process"], "{mode}");
    }
}
