//! Compares NVIDIA's `nvidia-ctk system`, `hook`, and `info` (`DIVVY_NVIDIA_CTK`, 1.20.0) with ours, by the resulting files on
//! the same machine with the same arguments.
//!
//! The machine is a mount namespace with its own `/dev`, `/proc/devices`, `/proc/driver`, and PCI devices. It disappears when the
//! command ends.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::json;

use crate::configure::built;

/// The machine before the command: `/proc/devices`, and other files.
#[derive(Clone, Copy)]
struct Machine {
    devices: &'static str,
    mig_minors: &'static str,
    /// The class and vendor of each PCI device.
    pci: &'static [(&'static str, &'static str)],
    /// Shell commands that prepare the machine.
    before: &'static str,
}

const MAJORS: &str = "Character devices:\n  1 mem\n195 nvidia\n510 nvidia-uvm\n511 nvidia-caps\n\nBlock devices:\n  8 sd\n";
const MIG: &str = "config 1\nmonitor 2\nbad line here\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu0/gi1/access 5\ngpu0/gi1/ci0/access 6\ngpu7/gi0/access 70\n";
const NODES: &str = "mkdir /dev/nvidia-caps; mknod /dev/nvidia0 c 195 0; mknod /dev/nvidia3 c 195 3; mknod /dev/nvidiactl c 195 255; mknod /dev/nvidia-uvm c 510 0; \
                     mknod /dev/nvidia-fs0 c 512 0; mknod /dev/nvidia-nvlink c 513 0; mknod /dev/nvidia-nvswitchctl c 514 255; \
                     mknod /dev/nvidia-caps/nvidia-cap1 c 511 1; touch /dev/nvidia-file; mkdir /dev/nvidia-caps-imex-channels; ln -s nvidia0 /dev/nvidia-link; ";
const USUAL: Machine = Machine {
    devices: MAJORS,
    mig_minors: MIG,
    pci: &[
        ("0x030200", "0x10de"),
        ("0x030000", "0x10de"),
        ("0x068000", "0x10de"),
        ("0x030000", "0x8086"),
    ],
    before: NODES,
};

struct Bed {
    directory: tempfile::TempDir,
    theirs: PathBuf,
}

impl Bed {
    /// Make the machine. If that is not possible, record a skip and return `None`.
    fn new() -> Option<Bed> {
        let theirs = divvy_skip::directory("DIVVY_NVIDIA_CTK", "NVIDIA's programs")?;
        let may = Command::new("unshare")
            .args(["-m", "mount", "-t", "tmpfs", "none", "/dev"])
            .output();
        if !may.is_ok_and(|output| output.status.success()) {
            divvy_skip::skipped("no mount namespace can be made: that takes root");
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        symlink(env!("CARGO_BIN_EXE_divvy"), directory.path().join("nvidia-ctk")).expect("linked");
        Some(Bed {
            directory,
            theirs: theirs.join("nvidia-ctk"),
        })
    }

    /// Return the exit status, and the content of `/dev` after the command, for NVIDIA's program and for ours, in this order.
    fn both(&self, machine: Machine, words: &str) -> [(Option<i32>, String); 2] {
        let at = |name: &str| self.directory.path().join(name);
        let _ = fs::remove_dir_all(at("machine"));
        let write = |path: &str, text: &str| {
            let path = at("machine").join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, text).expect("written");
        };
        write("devices", machine.devices);
        write("proc/nvidia/version", "");
        if !machine.mig_minors.is_empty() {
            write("proc/nvidia-caps/mig-minors", machine.mig_minors);
        }
        fs::create_dir_all(at("machine/pci")).expect("made");
        for (index, (class, vendor)) in machine.pci.iter().enumerate() {
            for (name, text) in [
                ("class", *class),
                ("vendor", *vendor),
                ("device", "0x20b0"),
                ("numa_node", "0"),
                ("config", ""),
                ("resource", "0x0 0x0 0x0"),
            ] {
                write(&format!("pci/0000:0{index}:00.0/{name}"), &format!("{text}\n"));
            }
        }
        // The list of /dev is part of the output, after a separator line.
        let script = format!(
            "mount -t tmpfs none /dev && mount --bind \"$MACHINE/devices\" /proc/devices && mount --bind \"$MACHINE/proc\" /proc/driver \
             && mount --bind \"$MACHINE/pci\" /sys/bus/pci/devices || exit 99\n umask 027\n {}\n \"$@\" >&2; status=$?; \
             cd /dev; find . -type l -printf '%p -> %l\\n' -o -type c -exec stat -c '%n %t:%T %a' '{{}}' ';' -o -printf '%p %y\\n' | sort; exit $status",
            machine.before
        );
        [self.theirs.clone(), at("nvidia-ctk")].map(|program| {
            let output = Command::new("unshare")
                .args(["--mount", "--propagation", "private", "sh", "-c", &script, "sh"])
                .arg(program)
                .args(words.split(' ').filter(|word| !word.is_empty()))
                .env("MACHINE", at("machine"))
                .env_remove("DIVVY_SYS_ROOT")
                .output()
                .expect("it runs");
            assert_ne!(output.status.code(), Some(99), "{output:?}");
            (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
        })
    }
}

#[test]
fn nodes_and_links_are_made_as_by_nvidias_program() {
    let Some(bed) = Bed::new() else { return };
    let links = "system create-dev-char-symlinks";
    let nodes = "system create-device-nodes";
    let mut rows: Vec<(Machine, String, Option<&str>)> = Vec::new();
    let mut same = |machine: Machine, words: String| rows.push((machine, words, None));
    for flags in [
        "",
        "--dry-run",
        "--dry-run=false",
        "-dry-run",
        "--dev-char-path /dev/x/y",
        "--dev-char-path=",
        "--driver-root /nowhere",
        "--create-all",
        "--create-all --dry-run",
        "--create-all --create-device-nodes",
        "--create-all --create-device-nodes --dry-run",
        "--create-device-nodes",
        "--load-kernel-modules",
        "--watch",
        "--dev-root /x",
        "word",
    ] {
        same(USUAL, format!("{links} {flags}"));
    }
    let without = Machine { before: "", ..USUAL };
    for machine in [
        without,
        Machine {
            devices: "Character devices:\n  1 mem\n",
            ..USUAL
        },
        Machine {
            devices: "195 nvidia-frontend\n510 nvidia-uvm\n511 nvidia-caps\n",
            ..USUAL
        },
        Machine {
            devices: "195 nvidia\n510 nvidia-uvm\n",
            ..USUAL
        },
        Machine {
            devices: "195 nvidia\n510 nvidia-uvm\n",
            mig_minors: "",
            ..USUAL
        },
        Machine { pci: &[], ..USUAL },
        Machine {
            pci: &[("0x030200", "0x10de"); 8],
            ..USUAL
        },
        Machine {
            before: "mkdir -p /dev/char; ln -s /dev/nvidia0 /dev/char/195:0; ln -s elsewhere /dev/char/195:255; mknod /dev/nvidia0 c 195 0; mknod /dev/nvidiactl c 195 255",
            ..USUAL
        },
        Machine {
            before: "touch /dev/char; mknod /dev/nvidia0 c 195 0",
            ..USUAL
        },
    ] {
        for words in [
            links.to_owned(),
            format!("{links} --create-all"),
            format!("{nodes} --control-devices"),
        ] {
            same(machine, words);
        }
    }
    for flags in [
        "",
        "--dry-run",
        "--control-devices --dry-run",
        "--control-devices=false",
        "--control-devices --dev-root /dev/other",
        "--control-devices --root /dev/other",
        "--control-devices --driver-root=/dev/other --dev-root /dev/there",
        "--control-devices --dev-root /nowhere",
        "--bogus",
    ] {
        same(
            Machine {
                before: "mkdir -p /dev/other/dev /dev/there/dev",
                ..USUAL
            },
            format!("{nodes} {flags}"),
        );
    }
    for words in [
        "system bogus",
        "system",
        "info",
        "info bogus",
        "hook",
        "hook bogus",
        "--quiet hook bogus",
        "--config /x hook",
    ] {
        same(without, words.to_owned());
    }
    same(
        Machine {
            pci: &[("0x030200", "0x10de"), ("0x030200", "0x10de")],
            before: "ln -s ../0000:00:00.0 \"$MACHINE/pci/0000:01:00.0/physfn\"",
            ..USUAL
        },
        format!("{links} --create-all"),
    );
    same(
        Machine {
            devices: "195 nvidia\n",
            ..USUAL
        },
        format!("{links} --create-all"),
    );
    let mut apart = |machine, words: String, why| rows.push((machine, words, Some(why)));
    let modules = "divvy runs no modprobe, least of all one of a driver's container; what is to be typed is said";
    apart(
        USUAL,
        format!("{links} --create-all --load-kernel-modules --dry-run"),
        modules,
    );
    apart(USUAL, format!("{nodes} --load-kernel-modules --dry-run"), modules);
    apart(
        USUAL,
        "system print-ldcache".to_owned(),
        "another version of nvidia-ctk has this command",
    );
    let half = Machine {
        devices: "195 nvidia\n",
        ..USUAL
    };
    apart(
        half,
        format!("{nodes} --control-devices"),
        "all of the nodes are made or none",
    );
    let out = Machine {
        before: "mkdir -p /dev/other /dev/outside; ln -s /dev/outside /dev/other/dev",
        ..USUAL
    };
    let beneath = "nodes are made beneath the given root, wherever a link in it leads";
    apart(out, format!("{nodes} --control-devices --dev-root /dev/other"), beneath);
    let far = Machine {
        mig_minors: "config 1\nmonitor 2\ngpu0/gi5/access 3\ngpu0/gi5/ci2/access 4\n",
        ..USUAL
    };
    apart(
        far,
        format!("{links} --create-all"),
        "NVIDIA's ends at the first number that is not there, and misses what comes after it",
    );
    let mut wrong = Vec::new();
    for (machine, words, why) in rows {
        let [theirs, ours] = bed.both(machine, &words);
        if (theirs == ours) != why.is_none() {
            wrong.push(format!("{words} ({}):\n{theirs:?}\n{ours:?}", machine.before));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // The rows' preconditions hold.
    let [_, (status, there)] = bed.both(USUAL, links);
    assert_eq!(status, Some(0));
    for line in ["./char/195:0 -> /dev/nvidia0", "./char/511:1 -> /dev/nvidia-caps/nvidia-cap1"] {
        assert!(there.lines().any(|there| there == line), "{line}: {there}");
    }
}

/// A hook is called in a directory of the image, and with the image's environment variables.
#[test]
fn an_old_toolkits_hook_that_calls_nvidia_ctk_is_done() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let program = at("nvidia-ctk");
    let divvy = Path::new(env!("CARGO_BIN_EXE_divvy"));
    symlink(divvy, &program).expect("linked");
    built("divvy-hook", "divvy-hook");
    fs::create_dir_all(at("rootfs/usr/lib64")).expect("made");
    fs::write(
        at("config.json"),
        json!({"ociVersion": "1.0.2", "root": {"path": "rootfs"}}).to_string(),
    )
    .expect("written");
    let call = |program: &Path, words: &[&str]| {
        let mut child = Command::new(program)
            .args(words)
            .current_dir(at("rootfs"))
            .env_clear()
            .envs([("NVIDIA_CTK_DEBUG", "nonsense"), ("DIVVY_LOG", "nonsense=="), ("PATH", "")])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it runs");
        let state = json!({"ociVersion": "1.0.2", "id": "c", "pid": 1, "bundle": directory.path()}).to_string();
        // The program may end before it reads its input.
        let _ = child.stdin.take().expect("its input").write_all(state.as_bytes());
        let output = child.wait_with_output().expect("it ends");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let link = ["create-symlinks", "--link", "libcuda.so.1::/usr/lib64/libcuda.so"];
    let done = call(&program, &[&["hook"], &link[..]].concat());
    assert_eq!(done, (Some(0), String::new()));
    assert_eq!(
        fs::read_link(at("rootfs/usr/lib64/libcuda.so")).expect("made"),
        Path::new("libcuda.so.1")
    );
    let done = call(&program, &["--debug", "hook", "create-symlinks", "--link", "a::/usr/lib64/b"]);
    assert_eq!((done.0, at("rootfs/usr/lib64/b").is_symlink()), (Some(0), true), "{}", done.1);
    let (status, said) = call(&program, &["hook", "create-symlinks", "--link", "bad"]);
    assert_eq!(status, Some(1));
    assert!(said.contains("divvy-hook: invalid symlink specification bad"), "{said}");
    // A copy in another directory, without other programs next to it.
    let alone = at("alone");
    fs::create_dir(&alone).expect("made");
    fs::copy(divvy, alone.join("nvidia-ctk")).expect("copied");
    let (status, said) = call(
        &alone.join("nvidia-ctk"),
        &["hook", "update-ldcache", "--folder", "/usr/lib64"],
    );
    assert_eq!(status, Some(1));
    assert!(
        said.contains(&format!("{} cannot be run; without it", alone.join("divvy-hook").display())),
        "{said}"
    );
}
