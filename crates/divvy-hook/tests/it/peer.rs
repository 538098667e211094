//! A comparison with NVIDIA's `nvidia-cdi-hook`: on the same image, both must leave the same files. `DIVVY_NVIDIA_CTK` names the
//! directory of NVIDIA's programs (1.20.0).
//!
//! Each program runs in its own mount namespace with an empty `/run`, because NVIDIA's program leaves directories there and
//! requires that the root is a mount.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::image::Image;

const LIBRARY: &str = "/usr/lib/x/libcuda.so.550.54.15";
const OTHER: &str = "/usr/lib/x/libnvidia-ml.so.550.54.15";

/// Return the path of NVIDIA's program. If the comparison is not possible, record a skip and return `None`.
fn theirs() -> Option<PathBuf> {
    let directory = divvy_skip::directory("DIVVY_NVIDIA_CTK", "NVIDIA's programs")?;
    let may = Command::new("unshare")
        .args(["-m", "mount", "-t", "tmpfs", "none", "/run"])
        .output();
    if !may.is_ok_and(|output| output.status.success()) {
        divvy_skip::skipped("no mount namespace can be made: that takes root");
        return None;
    }
    Some(directory.join("nvidia-cdi-hook"))
}

fn library(path: &Path, soname: &str) {
    fs::create_dir_all(path.parent().expect("a directory")).expect("made");
    let made = Command::new("cc")
        .args(["-shared", "-fPIC", "-x", "c", "/dev/null", "-o"])
        .arg(path)
        .arg(format!("-Wl,-soname,{soname}"))
        .status();
    assert!(made.is_ok_and(|status| status.success()), "it needs a C compiler");
}

/// Return what a program in the container finds: the links and files by path, and for each name in the cache, the file that a
/// loader uses.
fn end(image: &Image) -> (BTreeMap<String, String>, BTreeMap<String, String>) {
    let mut paths = BTreeMap::new();
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(image.at("rootfs").join(&directory)).expect("a directory") {
            let entry = entry.expect("an entry");
            let path = directory.join(entry.file_name());
            let kind = entry.file_type().expect("its kind");
            let shown = format!("/{}", path.display());
            if kind.is_symlink() {
                let target = fs::read_link(entry.path()).expect("a link");
                paths.insert(shown, format!("-> {}", target.display()));
            } else if kind.is_dir() {
                directories.push(path);
            } else if !kind.is_file() {
                paths.insert(shown, "a node".to_owned());
            } else if !shown.starts_with("/etc/ld.so") {
                // NVIDIA's program writes its own configuration files for ldconfig there.
                paths.insert(
                    shown,
                    String::from_utf8_lossy(&fs::read(entry.path()).expect("read")).into_owned(),
                );
            }
        }
    }
    let mut cache = BTreeMap::new();
    if image.rootfs("/etc/ld.so.cache").exists() {
        for (name, path) in image.ldconfig() {
            let file = fs::canonicalize(image.rootfs(&path)).expect("it is there");
            // If a name occurs several times, loaders use the first.
            cache
                .entry(name)
                .or_insert_with(|| file.strip_prefix(image.at("rootfs")).expect("inside").display().to_string());
        }
    }
    (paths, cache)
}

type Case = (&'static str, &'static [&'static [&'static str]], fn(&Image));

/// Run the hooks in order. Return whether all of them succeeded, and the files afterwards.
fn run(program: &Path, (_, hooks, prepare): &Case) -> (bool, BTreeMap<String, String>, BTreeMap<String, String>) {
    let image = Image::new(&[LIBRARY, OTHER]);
    library(&image.rootfs(LIBRARY), "libcuda.so.1");
    library(&image.rootfs(OTHER), "libnvidia-ml.so.1");
    prepare(&image);
    let root = image.at("rootfs");
    let went_well = hooks.iter().all(|words| {
        let script =
            "mount --make-rprivate / && mount -t tmpfs none /run && mount --bind \"$0\" \"$0\" && cd \"$0\" && exec \"$@\"";
        let output = image.run_by(
            Command::new("unshare")
                .args(["-m", "sh", "-c", script])
                .arg(&root)
                .arg(program)
                .args(*words),
        );
        output.status.success()
    });
    let (paths, cache) = end(&image);
    (went_well, paths, cache)
}

#[test]
fn what_hooks_leave_behind_is_what_nvidias_leave() {
    let Some(theirs) = theirs() else { return };
    let ours = Path::new(env!("CARGO_BIN_EXE_divvy-hook"));
    let nothing: fn(&Image) = |_| ();
    let with_compat: fn(&Image) = |image| {
        library(&image.rootfs("/usr/local/cuda/compat/libcuda.so.560.1.1"), "libcuda.so.1");
        symlink("libcuda.so.560.1.1", image.rootfs("/usr/local/cuda/compat/libcuda.so.1")).expect("linked");
    };
    let cases: [Case; 16] = [
        (
            "links",
            &[&[
                "create-symlinks",
                "--link",
                "libcuda.so.1::/lib64/libcuda.so",
                "--link",
                "../a.so.1::/usr/lib64/gbm/b.so",
            ]],
            nothing,
        ),
        (
            "a link with another target",
            &[&["create-symlinks", "--link", "other::/a/libcuda.so"]],
            |image| {
                fs::create_dir_all(image.rootfs("/a")).expect("made");
                symlink("x", image.rootfs("/a/libcuda.so")).expect("linked");
            },
        ),
        (
            "a link that exists",
            &[&["create-symlinks", "--link", "x::/a/libcuda.so"]],
            |image| {
                fs::create_dir_all(image.rootfs("/a")).expect("made");
                symlink("x", image.rootfs("/a/libcuda.so")).expect("linked");
            },
        ),
        (
            "over a file",
            &[&["create-symlinks", "--link", "x::/a/libcuda.so"]],
            |image| image.put("/a/libcuda.so", b"file"),
        ),
        ("no link", &[&["create-symlinks", "--link", "a"]], nothing),
        (
            "out of the image",
            &[&["create-symlinks", "--link", "t::/evil/etc/pwn"]],
            |image| {
                symlink("/", image.rootfs("/evil")).expect("linked");
            },
        ),
        (
            "out of it by dots",
            &[&["create-symlinks", "--link", "t::/evil/tmp/pwn"]],
            |image| {
                symlink("../../..", image.rootfs("/evil")).expect("linked");
            },
        ),
        ("up", &[&["create-symlinks", "--link", "t::/../../etc/pwn"]], nothing),
        ("an unknown hook", &[&["of-later", "--x"]], nothing),
        ("an unknown flag", &[&["create-symlinks", "--x"]], nothing),
        (
            "a generated spec's libraries",
            &[
                &["create-symlinks", "--link", "libcuda.so.1::/usr/lib/x/libcuda.so"],
                &["update-ldcache", "--folder", "/usr/lib/x"],
            ],
            nothing,
        ),
        (
            "twice",
            &[
                &["update-ldcache", "--folder", "/usr/lib/x"],
                &["update-ldcache", "--folder", "/usr/lib/x"],
            ],
            nothing,
        ),
        (
            "an image's newer libcuda",
            &[
                &["enable-cuda-compat", "--host-driver-version=550.54.15"],
                &["update-ldcache", "--folder", "/usr/lib/x"],
            ],
            with_compat,
        ),
        (
            "an image's older libcuda",
            &[
                &["enable-cuda-compat", "--host-driver-version=570.1.1"],
                &["update-ldcache", "--folder", "/usr/lib/x"],
            ],
            with_compat,
        ),
        ("GPUs of a display", &[&["update-application-profile"]], |image| {
            for minor in [0, 3] {
                let path = image.rootfs(&format!("/dev/nvidia{minor}"));
                fs::create_dir_all(path.parent().expect("a directory")).expect("made");
                let node = Command::new("mknod")
                    .arg(path)
                    .args(["c", "195", &minor.to_string()])
                    .status();
                assert!(node.is_ok_and(|status| status.success()), "root may");
            }
            let config = fs::read_to_string(image.at("config.json")).expect("there");
            let devices = r#""linux": {"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}, {"path": "/dev/nvidia3", "type": "c", "major": 195, "minor": 3}]}, "#;
            fs::write(image.at("config.json"), config.replacen('{', &format!("{{{devices}"), 1)).expect("written");
        }),
        ("no GPU", &[&["update-application-profile"]], nothing),
    ];
    let mut wrong = Vec::new();
    for case in &cases {
        let (well, paths, cache) = run(&theirs, case);
        let (own_well, own_paths, own_cache) = run(ours, case);
        let is_apart = |path: &&String| paths.get(*path) != own_paths.get(*path);
        let apart: Vec<_> = paths
            .keys()
            .chain(own_paths.keys())
            .filter(is_apart)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        // Divvy's cache also has each library under its full name, so only missing names count.
        let missing: Vec<_> = cache
            .iter()
            .filter(|(name, path)| own_cache.get(*name) != Some(path))
            .collect();
        if well != own_well || !apart.is_empty() || !missing.is_empty() {
            wrong.push(format!(
                "{}: {well} {own_well}; {apart:?}; {missing:?} and {own_cache:?}",
                case.0
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
