//! In front of the runc and crun of this machine.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use super::bed::Bed;

fn runtimes() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .collect();
    ["runc", "crun"]
        .iter()
        .filter_map(|name| folders.iter().map(|folder| folder.join(name)).find(|path| path.exists()))
        .collect()
}

/// Root's only: namespaces, mounts and device nodes are made.
fn may_run() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let uid = status
        .lines()
        .find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().next());
    uid == Some("0")
}

#[test]
#[expect(clippy::print_stderr, reason = "a test that was skipped says so")]
fn a_container_has_the_devices_mounts_and_variables_that_were_asked_for() {
    let runtimes = runtimes();
    if runtimes.is_empty() || !may_run() {
        eprintln!("SKIPPED: nothing was run in a container: it needs root, and runc or crun (Debian: apt-get install runc crun)");
        return;
    }
    for runtime in runtimes {
        let bed = Bed::new("{}");
        let made = Command::new(&runtime)
            .arg("spec")
            .current_dir(bed.path(""))
            .output()
            .expect("it runs");
        assert!(made.status.success(), "{made:?}");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(bed.path("config.json")).expect("made")).expect("JSON");
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!([
            "/bin/sh",
            "-c",
            "echo $NVIDIA_VISIBLE_DEVICES; ls /dev; cat /opt/libcuda.so.1; echo x > /dev/nvidia0 && echo written; true"
        ]);
        config["process"]["env"] = json!(["PATH=/bin:/usr/bin", "NVIDIA_VISIBLE_DEVICES=0"]);
        // This machine's own programs, to be read only.
        for folder in ["bin", "usr", "lib", "lib64"] {
            let (there, below) = (PathBuf::from("/").join(folder), bed.path("bundle/rootfs").join(folder));
            match fs::read_link(&there) {
                Ok(target) => {
                    fs::create_dir_all(bed.path("bundle/rootfs")).expect("a root");
                    symlink(target, &below).expect("a link");
                }
                Err(_) if there.exists() => {
                    fs::create_dir_all(&below).expect("a folder");
                    let mount = json!({"destination": there, "source": there, "type": "bind", "options": ["rbind", "ro"]});
                    config["mounts"].as_array_mut().expect("mounts").push(mount);
                }
                Err(_) => {}
            }
        }
        fs::write(bed.config(), config.to_string()).expect("written");
        // Below a folder that is mounted from the machine nothing can be made: the library's place is elsewhere.
        let mut spec = super::bed::nvidia();
        spec["containerEdits"]["mounts"][0]["containerPath"] = json!("/opt/libcuda.so.1");
        bed.spec("nvidia.json", &spec);
        bed.settings("cdi", &runtime);
        let name = format!("divvy-test-{}", std::process::id());
        let state = bed.path("state");
        let words = ["--root", state.to_str().expect("text"), "run", &name];
        // crun refuses machines with both versions of cgroups, say, whoever stands in front of it.
        let alone = Command::new(&runtime)
            .args(words)
            .current_dir(bed.path("bundle"))
            .output()
            .expect("it runs");
        if !alone.status.success() {
            eprintln!("SKIPPED: {} runs no container here: {alone:?}", runtime.display());
            continue;
        }
        let output = bed.command(&words).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{}: {output:?}", runtime.display());
        let host = fs::read_to_string("/etc/hostname").expect("a name");
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.first(), Some(&"void"), "{said}");
        assert!(
            lines.contains(&"nvidia0") && lines.contains(&host.trim()) && lines.contains(&"written"),
            "{}: {said}",
            runtime.display()
        );
    }
}
