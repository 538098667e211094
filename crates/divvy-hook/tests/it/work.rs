//! Its work, on images that are as they should be.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use super::image::{Image, elf, said};

const CUDA: &str = "/usr/lib64/libcuda.so.550.54.15";

#[test]
fn libraries_that_are_mounted_are_in_the_cache_under_each_of_their_names() {
    let image = Image::new(&[
        CUDA,
        "/usr/lib64/libcuda.so.1",
        "/usr/lib64/libnvidia-ml.so.1",
        "/opt/else/libx.so.1",
        "/usr/lib64/notes.txt",
    ]);
    symlink("libcuda.so.1", image.rootfs("/usr/lib64/libcuda.so")).expect("linked");
    image.put("/usr/lib64/libofimage.so.1", &elf());
    image.put("/usr/lib64/libnvidia-ml.so.broken", b"no library");
    let output = image.run(&["update-ldcache", "--folder", "/usr/lib64"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let found = image.ldconfig();
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        ["libnvidia-ml.so.1", "libcuda.so.550.54.15", "libcuda.so.1", "libcuda.so"],
        "what is the image's was in its cache before, or is not to be"
    );
    assert!(
        found.iter().all(|(name, path)| *path == format!("/usr/lib64/{name}")),
        "{found:?}"
    );
    let mode = fs::metadata(image.rootfs("/etc/ld.so.cache"))
        .expect("there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o644);
}

/// The loader of a real libc, in an image that has a cache of its own, and in one that has none.
#[test]
#[expect(clippy::print_stderr, reason = "a test that was skipped says so")]
fn a_program_in_the_container_finds_the_library_where_no_loader_searches() {
    const LIBRARY: &str = "/opt/strange/libcuda.so.1";
    let image = Image::new(&[LIBRARY]);
    let compiled = |text: &str, to: &Path, words: &[&str]| {
        let source = image.at("source.c");
        fs::write(&source, text).expect("written");
        let output = Command::new("cc").arg("-o").arg(to).arg(&source).args(words).output();
        output.is_ok_and(|output| output.status.success())
    };
    let program = "#include <dlfcn.h>\n#include <stdio.h>\nint main(void) { void *l = dlopen(\"libcuda.so.1\", RTLD_NOW);\
                   if (!l) { puts(dlerror()); return 1; } puts(((const char *(*)(void))dlsym(l, \"name\"))()); return 0; }";
    let built = compiled(
        "const char *name(void) { return \"mounted\"; }",
        &image.rootfs(LIBRARY),
        &["-shared", "-fPIC"],
    ) && compiled(program, &image.rootfs("/program"), &["-ldl"]);
    let linked = Command::new("ldd").arg(image.rootfs("/program")).output().expect("it runs");
    for library in String::from_utf8_lossy(&linked.stdout)
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
    {
        image.put(library, b"");
        fs::copy(library, image.rootfs(library)).expect("copied");
    }
    let run = || {
        let output = Command::new("chroot")
            .arg(image.folder.path().join("rootfs"))
            .arg("/program")
            .output()
            .expect("it runs");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    if !built || !run().contains("cannot open shared object file") {
        eprintln!("SKIPPED: it needs a C compiler, and root for chroot");
        return;
    }
    assert!(image.run(&["update-ldcache", "--folder", "/opt/strange"]).status.success());
    assert_eq!(run(), "mounted");
    // Among a whole distribution's libraries the loader halves the list to find it.
    image.put("/etc/ld.so.cache", &fs::read("/etc/ld.so.cache").expect("a cache"));
    assert!(run().contains("cannot open shared object file"));
    assert!(image.run(&["update-ldcache", "--folder", "/opt/strange"]).status.success());
    assert_eq!(run(), "mounted");
}

/// The cache of a real distribution: this machine's.
#[test]
fn what_the_image_has_stays_in_its_cache_behind_what_is_mounted() {
    let image = Image::new(&["/usr/lib64/libc.so.6"]);
    let Ok(own) = fs::read("/etc/ld.so.cache") else { return };
    image.put("/etc/ld.so.cache", &own);
    let before = image.ldconfig();
    let output = image.run(&["update-ldcache", "--folder=/usr/lib64/"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let after = image.ldconfig();
    let first = after.iter().position(|(name, _)| name == "libc.so.6").expect("there");
    assert_eq!(after[first].1, "/usr/lib64/libc.so.6");
    let mut left = after.clone();
    left.remove(first);
    assert_eq!(left, before);
}

#[test]
fn a_cache_that_is_none_is_replaced() {
    let image = Image::new(&[CUDA]);
    image.put("/etc/ld.so.cache", b"no cache");
    assert!(image.run(&["update-ldcache", "--folder", "/usr/lib64"]).status.success());
    assert_eq!(image.ldconfig().len(), 1);
}

#[test]
fn without_a_library_nothing_is_written() {
    let image = Image::new(&["/usr/lib64/notes.txt"]);
    assert!(
        image
            .run(&["update-ldcache", "--folder", "/usr/lib64", "--folder", "/nowhere"])
            .status
            .success()
    );
    assert!(!image.rootfs("/etc/ld.so.cache").exists());
}

#[test]
fn case_36_a_links_are_made_with_their_folders_and_replaced() {
    let image = Image::new(&[]);
    let links = [
        "create-symlinks",
        "--link",
        "libcuda.so.1::/lib64/libcuda.so",
        "--link",
        "../libnvidia-allocator.so.1::/usr/lib64/gbm/nvidia-drm_gbm.so",
    ];
    for _ in 0..2 {
        let output = image.run(&links);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        let target = |path: &str| fs::read_link(image.rootfs(path)).expect("a link");
        assert_eq!(target("/lib64/libcuda.so"), Path::new("libcuda.so.1"));
        assert_eq!(
            target("/usr/lib64/gbm/nvidia-drm_gbm.so"),
            Path::new("../libnvidia-allocator.so.1")
        );
    }
    let mode = fs::metadata(image.rootfs("/usr/lib64/gbm"))
        .expect("there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o755);
    assert!(
        image
            .run(&["create-symlinks", "--link", "other::/lib64/libcuda.so"])
            .status
            .success()
    );
    assert_eq!(
        fs::read_link(image.rootfs("/lib64/libcuda.so")).expect("a link"),
        Path::new("other")
    );
}

#[test]
fn case_36_b_what_it_does_not_know_is_a_warning_and_what_is_wrong_an_error() {
    let image = Image::new(&[]);
    let output = image.run(&["enable-cuda-compat", "--host-driver-version=1"]);
    assert!(
        output.status.success() && said(&output).contains("Unsupported CDI hook: enable-cuda-compat"),
        "{output:?}"
    );
    for (words, part) in [
        (&["create-symlinks", "--link", "a"][..], "invalid symlink specification a"),
        (&[], "which hook"),
        (&["update-ldcache", "--bogus", "a"], "update-ldcache knows no \"--bogus\""),
    ] {
        let output = image.run(words);
        assert!(output.status.code() == Some(1) && said(&output).contains(part), "{output:?}");
    }
    fs::write(image.at("config.json"), "{}").expect("written");
    let output = image.run(&["update-ldcache", "--folder", "/a"]);
    assert!(said(&output).contains("missing field `root`"), "{output:?}");
    fs::remove_file(image.at("config.json")).expect("removed");
    let output = image.run(&["update-ldcache", "--folder", "/a"]);
    assert!(
        said(&output).contains("could not read") && said(&output).contains("config.json"),
        "{output:?}"
    );
}

#[test]
fn legacy_becomes_nvidias_program_with_process_and_root() {
    let image = Image::new(&[]);
    let cli = image.at("nvidia-container-cli");
    fs::write(&cli, "#!/bin/sh\nprintf '%s\\n' \"$@\"\n/usr/bin/env\nexit 3\n").expect("written");
    fs::set_permissions(&cli, fs::Permissions::from_mode(0o755)).expect("its mode");
    let cli = cli.to_str().expect("text");
    let output = image.run(&["legacy", "--env=A=b c", "--", cli, "--load-kmods", "configure", "--device=0"]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let root = image.at("rootfs");
    let words: Vec<&str> = text.lines().take(5).collect();
    assert_eq!(
        words,
        [
            "--load-kmods",
            "configure",
            "--device=0",
            "--pid=4242",
            root.to_str().expect("text")
        ]
    );
    assert!(text.lines().any(|line| line == "A=b c") && !text.contains("IMAGE="), "{text}");
    let output = image.run(&["legacy", "--", "nvidia-container-cli", "configure"]);
    assert!(
        output.status.code() == Some(1) && said(&output).contains("by its whole path"),
        "{output:?}"
    );
}
