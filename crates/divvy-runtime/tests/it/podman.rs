//! Podman can inject CDI devices itself. These tests compare its containers with those of `divvy-runtime` for the same spec.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use super::bed::Bed;
use super::real::{copy_programs, runtimes};

/// A script that runs podman. All of podman's files are in the test bed, or in a mount namespace that ends with the script. The
/// spec is in the directory that podman 4 reads. The first container has no GPU: it shows whether podman can run a container on
/// this machine at all.
const SCRIPT: &str = r#"
! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified || exit 2
mount -t tmpfs none /run && mount -t tmpfs none /dev/shm && mkdir -p /run/cdi && cp "$BED"/cdi/*.json /run/cdi/ || exit 2
run() {
  runtime=$1; shift
  podman --root "$BED/storage" --runroot "$BED/runroot" --tmpdir "$BED/tmp" --storage-driver vfs --cgroup-manager cgroupfs --events-backend none \
    --runtime "$runtime" run --rm --network none --log-driver none --hostname gpu --security-opt label=disable --security-opt seccomp=unconfined \
    --ulimit nofile=512:512 --ulimit nproc=512:512 "$@" --rootfs "$BED/bundle/rootfs" \
    /bin/sh -c "tr '\0' '\n' < /proc/self/environ; ls -ln --time-style=+ /dev; cat /proc/self/mountinfo"
}
run "$RUNTIME" > "$BED/alone" || exit 3
run "$RUNTIME" --device nvidia.com/gpu=0 > "$BED/engine" && run "$BED/shim" --env NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0 > "$BED/ours"
"#;

/// Return the lines of a file, without the parts that differ between any two containers.
fn lines(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).expect("written");
    let mut lines: Vec<String> = text
        .lines()
        // This variable requests the GPU from divvy-runtime; podman is asked by its flag.
        .filter(|line| !line.starts_with("NVIDIA_VISIBLE_DEVICES="))
        .map(|line| {
            // Each line of mountinfo begins with three numbers that identify the mount.
            let numbered = line.starts_with(|first: char| first.is_ascii_digit());
            let words = line.split(' ').skip(if numbered { 3 } else { 0 });
            let word = |word: &str| {
                let parts = word.split(['/', '-']).map(|part| {
                    let id = part.len() == 64 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
                    if id { "ID" } else { part }
                });
                parts.collect::<Vec<&str>>().join("/")
            };
            words.map(word).collect::<Vec<String>>().join(" ")
        })
        .collect();
    lines.sort();
    lines
}

#[test]
fn podman_and_we_make_the_same_container() {
    if !divvy_skip::program("podman", "podman") || !divvy_skip::root("run a container") {
        return;
    }
    for runtime in &runtimes() {
        if let Some(said) = what_hinders(runtime) {
            divvy_skip::skipped(format_args!(
                "podman runs no container with {} here: {said}",
                runtime.display()
            ));
        }
    }
}

/// Compare the two containers. Return what is said if podman cannot run even a container without a GPU.
fn what_hinders(runtime: &Path) -> Option<String> {
    let bed = Bed::new("{}");
    let root = bed.path("bundle/rootfs");
    copy_programs(&root);
    for directory in ["dev", "proc", "sys", "run"] {
        fs::create_dir_all(root.join(directory)).expect("made");
    }
    bed.settings("cdi", runtime);
    let shim = bed.path("shim");
    // Podman does not pass environment variables to the runtime.
    let text = format!(
        "#!/bin/sh\nNVIDIA_CTK_CONFIG_FILE_PATH={} exec {} \"$@\"\n",
        bed.path("config.toml").display(),
        env!("CARGO_BIN_EXE_divvy-runtime")
    );
    fs::write(&shim, text).expect("written");
    fs::set_permissions(&shim, fs::Permissions::from_mode(0o755)).expect("its mode");
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", SCRIPT])
        .env("BED", bed.directory.path())
        .env("RUNTIME", runtime)
        .output()
        .expect("unshare runs");
    let said = String::from_utf8_lossy(&output.stderr);
    if matches!(output.status.code(), Some(2 | 3)) {
        return Some(said.into_owned());
    }
    assert!(output.status.success(), "{}: {said}", runtime.display());
    let (alone, engine, ours) = (
        lines(&bed.path("alone")),
        lines(&bed.path("engine")),
        lines(&bed.path("ours")),
    );
    assert_eq!(engine, ours, "{}", runtime.display());
    for part in ["nvidia0", " /usr/lib/libcuda.so.1 ro,nosuid,nodev"] {
        assert!(ours.iter().any(|line| line.contains(part)), "{part}: {ours:#?}");
        assert!(!alone.iter().any(|line| line.contains(part)), "{part}: {alone:#?}");
    }
    None
}
