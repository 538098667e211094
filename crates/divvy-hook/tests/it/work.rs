//! Tests of the hook's work on normal images.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use super::image::{Image, elf, said};

const CUDA: &str = "/usr/lib64/libcuda.so.550.54.15";

#[test]
fn mounted_libraries_are_cached_under_each_name() {
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
        "the image's own libraries are not added"
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

/// The loader of a real libc finds the library, both without a cache and with an existing one.
#[test]
fn a_program_finds_libraries_where_no_loader_searches() {
    const LIBRARY: &str = "/opt/strange/libcuda.so.1";
    if !divvy_skip::program("cc", "gcc") {
        return;
    }
    let possible = Command::new("chroot").args(["/", "true"]).output().expect("it runs");
    if !possible.status.success() {
        return divvy_skip::skipped("no program can be run in a chroot: that takes root");
    }
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
            .arg(image.directory.path().join("rootfs"))
            .arg("/program")
            .output()
            .expect("it runs");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    assert!(built, "the C compiler failed");
    assert!(run().contains("cannot open shared object file"));
    assert!(image.run(&["update-ldcache", "--folder", "/opt/strange"]).status.success());
    assert_eq!(run(), "mounted");
    // The cache of a whole distribution: the loader finds an entry by binary search, so the order of the entries matters.
    image.put("/etc/ld.so.cache", &fs::read("/etc/ld.so.cache").expect("a cache"));
    assert!(run().contains("cannot open shared object file"));
    assert!(image.run(&["update-ldcache", "--folder", "/opt/strange"]).status.success());
    assert_eq!(run(), "mounted");
}

/// The test uses this machine's cache as an example from a real distribution.
#[test]
fn what_the_image_has_stays_in_its_cache_behind_what_is_mounted() {
    let image = Image::new(&["/usr/lib64/libc.so.6"]);
    let Ok(own) = fs::read("/etc/ld.so.cache") else {
        return divvy_skip::skipped("this machine has no /etc/ld.so.cache");
    };
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
fn case_36_a_links_are_made_with_their_directories_and_replaced() {
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

/// A wrong argument or a missing hook name is an error.
#[test]
fn case_36_b_an_unknown_hook_is_only_a_warning() {
    let image = Image::new(&[]);
    let output = image.run(&["noop", "--flag=1"]);
    assert!(
        output.status.success() && said(&output).contains("Unsupported CDI hook: noop"),
        "{output:?}"
    );
    for (words, part) in [
        (&["create-symlinks", "--link", "a"][..], "invalid symlink specification a"),
        (&[], "no hook is named"),
        (
            &["update-ldcache", "--bogus", "a"],
            "update-ldcache does not accept \"--bogus\"",
        ),
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
        output.status.code() == Some(1) && said(&output).contains("must be an absolute path"),
        "{output:?}"
    );
}

/// Build a library as a linker would, optionally with a note that lists the supported drivers.
fn libcuda(drivers: Option<&str>) -> Vec<u8> {
    let Some(drivers) = drivers else { return elf() };
    let text = format!("{{\"Format\":1,\"CUDA Version\":\"13.0\",\"Driver\":{drivers},\"Device\":[]}}");
    let name = b"NVIDIA Corporation\0\0";
    let words = [19_u32, u32::try_from(text.len()).expect("short"), 1];
    let note = [words.map(u32::to_le_bytes).concat(), name.to_vec(), text.into_bytes()].concat();
    let names = b"\0.shstrtab\0.note.cuda.fwd_compatibility\0";
    let (note_at, names_at) = (64, 64 + note.len());
    let table_at = names_at + names.len();
    let section = |name: u32, kind: u32, at: usize, size: usize| {
        let mut bytes = vec![0; 64];
        bytes[..4].copy_from_slice(&name.to_le_bytes());
        bytes[4..8].copy_from_slice(&kind.to_le_bytes());
        bytes[24..32].copy_from_slice(&(at as u64).to_le_bytes());
        bytes[32..40].copy_from_slice(&(size as u64).to_le_bytes());
        bytes
    };
    let mut header = elf();
    header.resize(64, 0);
    header[40..48].copy_from_slice(&(table_at as u64).to_le_bytes());
    for (at, value) in [(58, 64_u8), (60, 3), (62, 1)] {
        header[at] = value;
    }
    let table = [
        vec![0; 64],
        section(1, 3, names_at, names.len()),
        section(11, 7, note_at, note.len()),
    ];
    [header, note, names.to_vec(), table.concat()].concat()
}

#[test]
fn case_43_a_newer_fitting_libcuda_of_the_image_goes_first() {
    let compat = "/usr/local/cuda/compat";
    for (host, own, note, enabled) in [
        ("535.129.03", "550.54.15", None, true),
        ("550.54.15", "535.129.03", None, false),
        ("550.54.15", "550.90.07", None, false),
        ("535.129.03", "580.65.06", Some("[535,550]"), true),
        ("570.1", "580.65.06", Some("[535,550]"), false),
        ("535.129.03", "1.1", Some("[535]"), true),
        ("none", "550.54.15", None, false),
        ("535.129.03", "580.65.06", Some("\"no list\""), true),
    ] {
        for both in [&["update-ldcache", "--folder=/usr/lib64"][..], &["enable-cuda-compat"]] {
            let image = Image::new(&["/usr/lib64/libcuda.so.1"]);
            image.put(&format!("/usr/local/cuda-12/compat/libcuda.so.{own}"), &libcuda(note));
            symlink(
                format!("libcuda.so.{own}"),
                image.rootfs("/usr/local/cuda-12/compat/libcuda.so.1"),
            )
            .expect("linked");
            symlink("/usr/local/cuda-12", image.rootfs("/usr/local/cuda")).expect("linked");
            assert!(image.run(&["update-ldcache", "--folder=/usr/lib64"]).status.success());
            let driver = format!("--host-driver-version={host}");
            let output = image.run(&[both, &[&driver]].concat());
            assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
            let found = image.ldconfig();
            let first = found.iter().find(|(name, _)| name == "libcuda.so.1").expect("there");
            let expected = if enabled { compat } else { "/usr/lib64" };
            assert_eq!(first.1, format!("{expected}/libcuda.so.1"), "{both:?} {host} {own} {note:?}");
            let bytes = fs::read(image.rootfs("/etc/ld.so.cache")).expect("there");
            assert!(image.run(&[both, &[&driver]].concat()).status.success());
            assert_eq!(
                fs::read(image.rootfs("/etc/ld.so.cache")).expect("there"),
                bytes,
                "a second run changes nothing"
            );
        }
    }
    let image = Image::new(&[]);
    for version in ["550.54.15", "560.1"] {
        image.put(&format!("{compat}/libcuda.so.{version}"), &elf());
    }
    let words = ["enable-cuda-compat", "--host-driver-version=535.1"];
    assert!(
        image.run(&words).status.success() && !image.rootfs("/etc/ld.so.cache").exists(),
        "with two libraries the choice is unclear"
    );
    fs::remove_dir_all(image.rootfs(compat)).expect("removed");
    assert!(
        image.run(&words).status.success() && !image.rootfs("/etc/ld.so.cache").exists(),
        "there is none"
    );
}

/// The hook prints no message about the cut-off library either.
#[test]
fn a_cut_off_libcuda_makes_nothing_fail() {
    let whole = libcuda(Some("[535]"));
    for length in (0..whole.len()).step_by(7) {
        let image = Image::new(&[]);
        image.put("/usr/local/cuda/compat/libcuda.so.550.1", &whole[..length]);
        let output = image.run(&["enable-cuda-compat", "--host-driver-version=535.1"]);
        assert!(output.status.success() && output.stderr.is_empty(), "{length}: {output:?}");
    }
}

#[test]
fn case_40_the_application_profile_has_a_bit_per_gpu() {
    const FILE: &str = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf";
    for (nodes, mask) in [
        (
            &["/dev/nvidia0", "/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm"][..],
            Some("0x9"),
        ),
        (&["/dev/nvidia64"], Some("0x10000000000000000")),
        (&["/dev/nvidiactl", "/dev/null", "/dev/nvidia+1", "/dev/nvidia200"], None),
        (&[], None),
    ] {
        let image = Image::new(&[]);
        let devices: Vec<_> = nodes
            .iter()
            .map(|path| serde_json::json!({"path": path, "type": "c"}))
            .collect();
        let config = serde_json::json!({"root": {"path": "rootfs"}, "linux": {"devices": devices}});
        fs::write(image.at("config.json"), config.to_string()).expect("written");
        for _ in 0..2 {
            let output = image.run(&["update-application-profile"]);
            assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
            let expected = mask.map(|mask| {
                format!(
                    "{{\"profiles\":[{{\"name\":\"_container_\",\"settings\":[\"EGLVisibleDGPUDevices\",{mask}]}}],\"rules\":[{{\"pattern\":[],\"profile\":\"_container_\"}}]}}"
                )
            });
            assert_eq!(fs::read_to_string(image.rootfs(FILE)).ok(), expected, "{nodes:?}");
        }
    }
}

#[test]
fn musls_loader_is_told_of_the_directories() {
    let image = Image::new(&[CUDA, "/opt/lib/libnvidia-ml.so.1"]);
    let arch = std::env::consts::ARCH;
    image.put(&format!("/lib/ld-musl-{arch}.so.1"), &elf());
    let list = image.rootfs(&format!("/etc/ld-musl-{arch}.path"));
    let words = [
        "update-ldcache",
        "--folder=/usr/lib64",
        "--folder=/opt/lib",
        "--folder=/nowhere",
    ];
    for _ in 0..2 {
        assert!(image.run(&words).status.success());
        assert_eq!(
            fs::read_to_string(&list).expect("there"),
            "/lib:/usr/local/lib:/usr/lib\n/usr/lib64\n/opt/lib"
        );
    }
    fs::write(&list, "/lib\n/usr/lib64\n").expect("written");
    assert!(image.run(&words).status.success());
    assert_eq!(
        fs::read_to_string(&list).expect("there"),
        "/lib\n/usr/lib64\n/opt/lib",
        "its own order stays"
    );
}

/// NVIDIA's specs mount a library only under its long name, and rely on the link that ldconfig creates.
#[test]
fn a_short_name_finds_a_long_named_library() {
    if !divvy_skip::program("cc", "gcc") {
        return;
    }
    let image = Image::new(&[CUDA]);
    let made = Command::new("cc")
        .args(["-shared", "-fPIC", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(image.rootfs(CUDA))
        .status();
    assert!(made.is_ok_and(|status| status.success()), "the C compiler failed");
    symlink("libcuda.so.1", image.rootfs("/usr/lib64/libcuda.so")).expect("linked");
    for _ in 0..2 {
        let output = image.run(&["update-ldcache", "--folder", "/usr/lib64"]);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        let link = fs::read_link(image.rootfs("/usr/lib64/libcuda.so.1")).expect("a link");
        assert_eq!(link, Path::new("libcuda.so.550.54.15"));
        let names: Vec<String> = image.ldconfig().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["libcuda.so.550.54.15", "libcuda.so.1", "libcuda.so"]);
        assert_eq!(fs::read_dir(image.rootfs("/usr/lib64")).expect("there").count(), 3);
    }
}

/// NVIDIA's specs call two hooks for this, one after the other.
#[test]
fn a_later_cache_keeps_the_images_libcuda_first() {
    let image = Image::new(&[CUDA, "/usr/lib64/libcuda.so.1"]);
    image.put("/usr/local/cuda/compat/libcuda.so.560.1.1", &elf());
    symlink("libcuda.so.560.1.1", image.rootfs("/usr/local/cuda/compat/libcuda.so.1")).expect("linked");
    let first = |driver: &str| {
        for words in [
            &["enable-cuda-compat", "--host-driver-version", driver][..],
            &["update-ldcache", "--folder", "/usr/lib64"],
        ] {
            let output = image.run(words);
            assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        }
        let found = image.ldconfig();
        found
            .into_iter()
            .find(|(name, _)| name == "libcuda.so.1")
            .expect("it is there")
            .1
    };
    assert_eq!(first("550.54.15"), "/usr/local/cuda/compat/libcuda.so.1");
    assert_eq!(first("550.54.15"), "/usr/local/cuda/compat/libcuda.so.1", "again");
    assert_eq!(
        first("570.1.1"),
        "/usr/lib64/libcuda.so.1",
        "the machine has a newer driver now"
    );
}
