//! Tests of bundles with a hostile root. The runtime must not open anything in that root.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use super::bed::{Bed, asking, built};
use super::live;

/// CVE-2024-0132 and similar vulnerabilities are based on a path of the image.
/// No other program is run.
#[test]
fn rule_1_nothing_in_the_containers_root_is_opened() {
    if !divvy_skip::program("strace", "strace") {
        return;
    }
    built("divvy-hook", "divvy-hook");
    for (mode, device) in [
        ("cdi", "0"),
        ("auto", "0"),
        ("legacy", "0"),
        ("cdi", "void"),
        ("divvy", "all"),
    ] {
        let mut config: serde_json::Value = serde_json::from_str(&asking(device)).expect("JSON");
        config["root"] = serde_json::json!({"path": "rootfs"});
        let bed = Bed::new(&config.to_string());
        // Bait in the image: a driver, a configuration, and a link to the host.
        for path in ["etc/nvidia-container-runtime", "usr/lib64", "etc/cdi"] {
            fs::create_dir_all(bed.path("bundle/rootfs").join(path)).expect("made");
        }
        symlink("/", bed.path("bundle/rootfs/host")).expect("linked");
        if mode == "auto" {
            if live::driver(&bed).is_none() {
                continue;
            }
            live::settings(&bed, mode, &bed.path("low-level"));
        } else {
            let cli = bed.path("low-level");
            bed.settings_and(mode, &cli, &format!("[nvidia-container-cli]\npath = {cli:?}\n"));
        }
        let log = bed.path("strace");
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-s", "4096", "-e", "trace=%file", "-o"]).arg(&log);
        command
            .arg(env!("CARGO_BIN_EXE_divvy-runtime"))
            .args(["create", "--bundle"])
            .arg(bed.path("bundle"))
            .arg("c1");
        command.env("NVIDIA_CTK_CONFIG_FILE_PATH", bed.path("config.toml"));
        let output = command.output().expect("it runs");
        assert_eq!(output.status.code(), Some(7), "{mode} {device}: {output:?}");
        let log = fs::read_to_string(&log).expect("a log");
        assert!(!log.contains("rootfs"), "{mode} {device}: {log}");
        // Only the calls before the real runtime takes over.
        let own = log.lines().take_while(|line| !line.contains("/low-level\", ["));
        let run: Vec<&str> = own
            .filter_map(|line| line.split_once("execve(\"")?.1.split('"').next())
            .collect();
        assert!(!run.is_empty(), "the log contains at least the program itself: {log}");
        let allowed = |path: &str| {
            let name = path.rsplit('/').next().unwrap_or_default();
            let of_the_probe = ["probe", "sh", "env", "divvy-probe"].contains(&name) && mode == "auto";
            name == "divvy-runtime" || of_the_probe
        };
        assert!(run.iter().all(|path| allowed(path)), "{mode}: {run:?}");
    }
}

/// Opening a named pipe waits for a writer, so no container would start any more.
#[test]
fn a_pipe_in_place_of_what_is_read_holds_no_container_up() {
    let pipe = |path: &std::path::Path| {
        let mode = rustix::fs::Mode::from_raw_mode(0o644);
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).expect("a pipe");
    };
    let create = |bed: &Bed| {
        let mut bounded = Command::new("timeout");
        bounded.args(["30", env!("CARGO_BIN_EXE_divvy-runtime"), "create", "--bundle"]);
        bounded.arg(bed.path("bundle")).arg("c1");
        bounded.env("NVIDIA_CTK_CONFIG_FILE_PATH", bed.path("config.toml"));
        bounded.output().expect("it runs")
    };
    // A pipe among the specs makes only its own devices unavailable; the devices of other specs work.
    let bed = Bed::new(&asking("0"));
    pipe(&bed.path("cdi/other.json"));
    let output = create(&bed);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    for (file, needed) in [("config.toml", "settings"), ("bundle/config.json", "configuration")] {
        let bed = Bed::new(&asking("0"));
        fs::remove_file(bed.path(file)).expect("removed");
        pipe(&bed.path(file));
        let output = create(&bed);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !matches!(output.status.code(), None | Some(0 | 7 | 124)) && said.contains(file) && said.contains("it is a pipe"),
            "{needed}: {output:?}"
        );
    }
}
