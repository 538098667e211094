//! Tests of `divvy-runtime` with this machine's runc and crun.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

use super::bed::{Bed, built};

/// Return the paths of runc and crun. Record a skip for each one that is not installed.
pub(crate) fn runtimes() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories: Vec<PathBuf> = std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .collect();
    ["runc", "crun"]
        .iter()
        .filter_map(|name| {
            let found = directories
                .iter()
                .map(|directory| directory.join(name))
                .find(|path| path.exists());
            if found.is_none() {
                divvy_skip::skipped(format_args!("{name} is not in the PATH (Debian: {name})"));
            }
            found
        })
        .collect()
}

/// Build a minimal image: a shell and a few programs of this machine, with the libraries that they are linked with.
pub(crate) fn copy_programs(root: &Path) {
    let programs = ["/bin/sh", "/bin/ls", "/bin/cat", "/bin/grep", "/usr/bin/tr"];
    let linked = Command::new("ldd").args(programs).output().expect("it runs");
    let linked = String::from_utf8_lossy(&linked.stdout).into_owned();
    let libraries = linked
        .split_whitespace()
        .filter(|word| word.starts_with('/') && !word.ends_with(':'));
    for path in programs.into_iter().chain(libraries) {
        let to = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(to.parent().expect("a directory")).expect("made");
        fs::copy(path, to).expect("copied");
    }
    fs::create_dir_all(root.join("etc")).expect("made");
}

/// Run a command with only one version of cgroups. If both versions are mounted, crun refuses to run ("cgroups in hybrid mode not
/// supported"). In that case, version 2 is unmounted in a mount namespace that ends with the command.
fn run(command: &Command) -> Output {
    let script = "! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified || exit; exec \"$0\" \"$@\"";
    let mut inside = Command::new("unshare");
    inside
        .args(["--mount", "--propagation", "private", "sh", "-c", script])
        .arg(command.get_program())
        .args(command.get_args())
        .envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    if let Some(directory) = command.get_current_dir() {
        inside.current_dir(directory);
    }
    inside.output().expect("unshare runs")
}

/// Run a script in a container with each real runtime that can run a container on this machine, and check the lines that it prints.
fn in_containers(script: &str, asked: &str, prepare: impl Fn(&Bed, &Path), check: impl Fn(&Bed, &[&str])) {
    if !divvy_skip::root("run a container") {
        return;
    }
    for runtime in runtimes() {
        let bed = Bed::new("{}");
        let made = Command::new(&runtime)
            .arg("spec")
            .current_dir(bed.path(""))
            .output()
            .expect("it runs");
        assert!(made.status.success(), "{made:?}");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(bed.path("config.json")).expect("made")).expect("JSON");
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!(["/bin/sh", "-c", script]);
        config["process"]["env"] = json!(["PATH=/bin:/usr/bin", format!("NVIDIA_VISIBLE_DEVICES={asked}")]);
        // Otherwise nothing can be mounted into the root, and hooks cannot write into it.
        config["root"]["readonly"] = json!(false);
        copy_programs(&bed.path("bundle/rootfs"));
        fs::write(bed.config(), config.to_string()).expect("written");
        prepare(&bed, &runtime);
        let name = format!("divvy-test-{}", bed.directory.path().file_name().expect("a name").display());
        let state = bed.path("state");
        let words = ["--root", state.to_str().expect("text"), "run", &name];
        // A container may fail here for other reasons, for example if root's capabilities are limited.
        let alone = run(Command::new(&runtime).args(words).current_dir(bed.path("bundle")));
        if !alone.status.success() {
            divvy_skip::skipped(format_args!("{} runs no container here: {alone:?}", runtime.display()));
            continue;
        }
        let output = run(&bed.command(&words));
        assert!(output.status.success(), "{}: {output:?}", runtime.display());
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        check(&bed, &said.lines().collect::<Vec<_>>());
    }
}

#[test]
fn a_container_has_all_that_was_asked_for() {
    in_containers(
        "echo $NVIDIA_VISIBLE_DEVICES; ls /dev; cat /opt/libcuda.so.1; echo x > /dev/nvidia0 && echo written; true",
        "0",
        |bed, runtime| {
            let mut spec = super::bed::nvidia();
            spec["containerEdits"]["mounts"][0]["containerPath"] = json!("/opt/libcuda.so.1");
            bed.spec("nvidia.json", &spec);
            bed.settings("cdi", runtime);
        },
        |_, said| {
            let host = fs::read_to_string("/etc/hostname").expect("a name");
            assert_eq!(said.first(), Some(&"void"), "{said:?}");
            for part in ["nvidia0", host.trim(), "written"] {
                assert!(said.contains(&part), "{part}: {said:?}");
            }
        },
    );
}

/// There is no spec file. The test creates the driver, its files, and its device nodes.
#[test]
fn in_mode_auto_a_container_has_the_gpus_of_this_moment() {
    in_containers(
        "echo $NVIDIA_VISIBLE_DEVICES; ls /dev; cat /usr/lib/x86_64-linux-gnu/libcuda.so.1 /usr/lib64/libcuda.so; ls -l /dev/nvidia1; true",
        "GPU-a",
        |bed, runtime| {
            super::live::driver(bed).expect("root makes device nodes");
            super::live::settings(bed, "auto", runtime);
        },
        |_, said| {
            assert_eq!(said.first(), Some(&"void"), "{said:?}");
            assert_eq!(
                said.iter().filter(|line| **line == "this is libcuda.so.550.54.15").count(),
                2,
                "{said:?}"
            );
            assert!(said.contains(&"nvidia1") && said.contains(&"nvidiactl"), "{said:?}");
            assert!(
                said.iter().any(|line| line.starts_with('c') && line.contains(" 1, 8 ")),
                "the device numbers match: {said:?}"
            );
            assert!(!said.contains(&"nvidia0"), "the other GPU is not in the container: {said:?}");
        },
    );
}

/// The real runtime calls the hook of a CDI spec.
#[test]
fn a_specs_hook_puts_libraries_into_the_cache() {
    in_containers(
        "cat /etc/ld.so.cache | tr '\\0' '\\n' | grep -a /opt/strange; cat /etc/divvy-link; true",
        "0",
        |bed, runtime| {
            let hook = built("divvy-hook", "divvy-hook");
            let mut spec = super::bed::nvidia();
            let library = fs::canonicalize("/lib64/ld-linux-x86-64.so.2").unwrap_or_else(|_| "/bin/true".into());
            let common = &mut spec["containerEdits"];
            common["mounts"][0] =
                json!({"hostPath": library, "containerPath": "/opt/strange/libcuda.so.1", "options": ["ro", "bind"]});
            let hooks: Vec<Value> = [
                vec!["divvy-hook", "update-ldcache", "--folder=/opt/strange"],
                vec!["divvy-hook", "create-symlinks", "--link=/proc/self/comm::/etc/divvy-link"],
            ]
            .iter()
            .map(|args| json!({"hookName": "createContainer", "path": hook, "args": args, "env": ["PATH=/bin"], "timeout": 10}))
            .collect();
            common["hooks"] = json!(hooks);
            bed.spec("nvidia.json", &spec);
            bed.settings("cdi", runtime);
        },
        |bed, said| {
            assert!(said.contains(&"/opt/strange/libcuda.so.1"), "{said:?}");
            assert!(said.contains(&"cat"), "the link means something in the container: {said:?}");
            let cache = bed.path("bundle/rootfs/etc/ld.so.cache");
            let printed = Command::new("/sbin/ldconfig")
                .args(["-p", "-C"])
                .arg(&cache)
                .output()
                .expect("it runs");
            let text = String::from_utf8_lossy(&printed.stdout).into_owned();
            assert!(
                text.contains("libcuda.so.1 (libc6,x86-64) => /opt/strange/libcuda.so.1"),
                "{text}"
            );
        },
    );
}

/// A stand-in for NVIDIA's program is called with the PID and the root of the starting container.
#[test]
fn in_mode_legacy_the_runtime_calls_nvidias_program() {
    in_containers(
        "true",
        "0,1",
        |bed, runtime| {
            built("divvy-hook", "divvy-hook");
            let (cli, log) = (bed.path("nvidia-container-cli"), bed.path("called"));
            let script = format!(
                "#!/bin/sh\nfor word in \"$@\"; do echo \"$word\"; done > {log:?}\nfor word in \"$@\"; do case $word in --pid=*) test -d /proc/${{word#--pid=}} && echo alive >> {log:?};; esac; done\n"
            );
            fs::write(&cli, script).expect("written");
            fs::set_permissions(&cli, fs::Permissions::from_mode(0o755)).expect("its mode");
            bed.settings_and(
                "legacy",
                runtime,
                &format!("[nvidia-container-cli]\npath = {cli:?}\nldconfig = \"@/sbin/ldconfig\"\n"),
            );
        },
        |bed, _| {
            let called = fs::read_to_string(bed.path("called")).expect("it was called");
            let words: Vec<&str> = called.lines().collect();
            let fixed =
                "--load-kmods configure --cuda-compat-mode=ldconfig --ldconfig=@/sbin/ldconfig --device=0,1 --compute --utility";
            assert_eq!(words[..7].join(" "), fixed);
            assert!(words[7].starts_with("--pid=") && words[7] != "--pid=0", "{called}");
            assert_eq!(words[8..], [bed.path("bundle/rootfs").to_str().expect("text"), "alive"]);
        },
    );
}
