//! An image's own libcuda in a container with Divvy's guard.

use std::fs;
use std::os::unix::fs::symlink;

use super::hostile::in_namespace;
use super::image::{Image, elf, said};

const GUARD: &str = "/run/divvy/guard/libcuda.so.1";
const REAL: &str = "/run/divvy/guard/libcuda.so.real";
const DRIVER: &str = "/usr/lib64/libcuda.so.1";
const COMPAT: &str = "/usr/local/cuda/compat";
/// What a file is, behind the bytes that make it a library.
const KINDS: [(&str, &str); 3] = [(GUARD, "guard"), (REAL, "driver"), (DRIVER, "guard")];

/// An image that contains a libcuda: the file, a link to it, and a copy. If the pod is guarded, the container also has the guard's mounts.
fn image(guarded: bool) -> Image {
    let image = if guarded {
        Image::new(&[GUARD, REAL, DRIVER])
    } else {
        Image::new(&[DRIVER])
    };
    let put = |path: &str, kind: &str| image.put(path, &[&elf(), kind.as_bytes()].concat());
    for (path, kind) in KINDS {
        put(path, kind);
    }
    put("/usr/local/cuda-13/compat/libcuda.so.560.1.1", "compat");
    put("/usr/local/cuda-13/compat/libcuda.so", "compat");
    symlink("libcuda.so.560.1.1", image.rootfs("/usr/local/cuda-13/compat/libcuda.so.1")).expect("linked");
    symlink("cuda-13", image.rootfs("/usr/local/cuda")).expect("linked");
    fs::write(image.at("state"), image.state()).expect("written");
    image
}

/// Run hooks in a container's mount namespace, after a command that prepares it. Return the exit status of the last hook, what the hooks said, and what each
/// file then is: the guard's real library, and the libcuda of the image under its three names.
fn run(image: &Image, prepare: &str, hooks: &[&str]) -> Option<(Option<i32>, String, Vec<String>)> {
    let (program, state, root) = (env!("CARGO_BIN_EXE_divvy-hook"), image.at("state"), image.at("rootfs"));
    let mut script = format!("cd {} && {{ {prepare}; }} || exit 99; ", root.display());
    for words in hooks {
        script += &format!("{program} {words} <{}; code=$?; ", state.display());
    }
    let compat = COMPAT.replace("/cuda/", "/cuda-13/");
    script += &format!(
        "for file in {REAL} {compat}/libcuda.so.560.1.1 {compat}/libcuda.so.1 {compat}/libcuda.so; do tail -c +65 .$file; echo; done; exit $code"
    );
    let output = in_namespace(image, &script)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some((output.status.code(), said(&output), text.lines().map(str::to_owned).collect()))
}

/// Where the loader finds libcuda.
fn found(image: &Image) -> String {
    let found = image.ldconfig().into_iter().find(|(name, _)| name == "libcuda.so.1");
    found.map(|(_, path)| path).unwrap_or_default()
}

/// The library behind the guard is the image's libcuda, not the driver's.
#[test]
fn the_guard_covers_an_images_preferred_libcuda() {
    let preferred = ["compat", "guard", "guard", "guard"];
    let left = ["driver", "compat", "compat", "compat"];
    let update = "update-ldcache --folder=/usr/lib64 --host-driver-version=535.1";
    let enable = "enable-cuda-compat --host-driver-version=535.1";
    let (newer, enable_newer) = (update.replace("535.1", "570.1"), enable.replace("535.1", "570.1"));
    let only_update = "update-ldcache --folder=/usr/lib64";
    for (guarded, hooks, expected, path) in [
        (true, vec![update], preferred, COMPAT),
        // A second time, and in two steps.
        (true, vec![update, update], preferred, COMPAT),
        (true, vec![enable, only_update], preferred, COMPAT),
        // The host's driver is newer than the image's libcuda.
        (true, vec![newer.as_str()], left, "/usr/lib64"),
        (true, vec![enable_newer.as_str(), only_update], left, "/usr/lib64"),
        (true, vec![only_update], left, "/usr/lib64"),
        // Without the guard, the files stay as they are.
        (false, vec![update], left, COMPAT),
    ] {
        let image = image(guarded);
        let Some((code, said, files)) = run(&image, "true", &hooks) else {
            return;
        };
        assert_eq!((code, said.as_str()), (Some(0), ""), "{hooks:?}");
        assert_eq!(files, expected, "{guarded} {hooks:?}");
        assert_eq!(found(&image), format!("{path}/libcuda.so.1"), "{guarded} {hooks:?}");
    }
}

#[test]
fn a_libcuda_that_the_guard_cannot_cover_is_not_preferred() {
    let update = "update-ldcache --folder=/usr/lib64 --host-driver-version=535.1";
    for (prepare, reason) in [
        // A volume, which other containers may have as well.
        (
            "cp -a usr/local/cuda-13 own && mount -t tmpfs tmpfs usr/local/cuda-13 && cp -a own/compat usr/local/cuda-13",
            "it is not a file of the image itself",
        ),
        // The image leads the container runtime to another place.
        ("mv run/divvy else && ln -s ../else run/divvy", "it is not mounted there"),
    ] {
        for (flag, expected) in [("", 0), (" --on-failure fail", 1)] {
            let image = image(true);
            let Some((code, said, files)) = run(&image, prepare, &[&format!("{update}{flag}")]) else {
                return;
            };
            assert_eq!(code, Some(expected), "{said}");
            assert!(said.contains("mount Divvy's guard over") && said.contains(reason), "{said}");
            assert_eq!(files.last().map(String::as_str), Some("compat"), "{files:?}");
            assert_eq!(found(&image), DRIVER, "{prepare}");
        }
    }
}
