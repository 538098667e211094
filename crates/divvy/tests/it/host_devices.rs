//! The tests that look at this machine's `/dev`, with the device nodes of NVIDIA's driver if this machine has none, and without them if it has some. NVIDIA's
//! libraries create them when root loads them, so a machine may also have them without a driver.

use std::path::Path;
use std::process::Command;

/// The tests that failed on one of these machines.
const TESTS: [&str; 2] = [
    "configure::pods::a_containerd_pod_gets_its_gpu_in_every_way",
    "demo::the_guard_is_shown_on_the_gpus_of_this_machine",
];

/// Run a command with its own `/dev`: a copy of the machine's, in which NVIDIA's device nodes are exactly those of the list. Arguments: the directory in which
/// it is made, the list of name and minor number, and the command.
const WITH_DEV: &str = r#"set -e
mount -t tmpfs -o mode=755 dev "$1"
for entry in /dev/*; do
  case $entry in /dev/nvidia*) continue ;; esac
  if [ -d "$entry" ] && [ ! -L "$entry" ]; then mkdir "$1/${entry#/dev/}"; mount --rbind "$entry" "$1/${entry#/dev/}"; else cp -a "$entry" "$1/"; fi
done
mount --move "$1" /dev
for node in $2; do mknod -m 666 "/dev/${node%:*}" c 195 "${node#*:}"; done
shift 2
exec "$@""#;

#[test]
fn tests_of_this_machine_pass_with_and_without_nvidias_nodes() {
    if !divvy_skip::root("have another /dev") {
        return;
    }
    let nodes = if Path::new("/dev/nvidiactl").exists() {
        ""
    } else {
        "nvidiactl:255 nvidia0:0 nvidia-modeset:254"
    };
    let directory = tempfile::tempdir().expect("a directory");
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", WITH_DEV, "sh"])
        .arg(directory.path())
        .arg(nodes)
        .arg(std::env::current_exe().expect("this program"))
        .arg("--exact")
        .args(TESTS)
        .output()
        .expect("unshare");
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    if error.contains("unshare failed") {
        divvy_skip::skipped(format_args!("no mount namespace can be made here: {error}"));
        return;
    }
    let passed = text.contains(&format!("{} passed", TESTS.len()));
    assert!(output.status.success() && passed, "with the nodes {nodes:?}: {text}{error}");
}
