//! Tests of images that try to reach more than their own files. `docs/compatibility/hostile-images.md` describes the numbered
//! rules (`rule_N`). The races in which a directory becomes a link are in `root/tests.rs`.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;
use std::process::Command;

use super::image::{Image, said, static_hook};

const CUDA: &str = "/usr/lib64/libcuda.so.1";
const UPDATE: [&str; 3] = ["update-ldcache", "--folder", "/usr/lib64"];

/// Run a script in a mount namespace, which needs root. If the script cannot mount a file system, record a skip and return `None`.
pub(crate) fn in_namespace(image: &Image, script: &str) -> Option<std::process::Output> {
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c"]).arg(script);
    let output = image.run_by(&mut command);
    if output.status.code() == Some(99) || said(&output).starts_with("unshare") {
        divvy_skip::skipped("nothing can be mounted in a mount namespace: that takes root");
        return None;
    }
    Some(output)
}

/// A flag decides between the warning and the failure.
#[test]
fn case_42_rule_4_an_unwritable_image_warns_or_fails() {
    let image = Image::new(&[CUDA]);
    let hook = env!("CARGO_BIN_EXE_divvy-hook");
    let root = image.at("rootfs");
    let root = root.display();
    // A read-only root, and a full one.
    for (prepare, reason) in [
        (
            format!("mount --bind {root} {root} && mount -o remount,bind,ro {root}"),
            "Read-only file system",
        ),
        (
            format!(
                "mount -t tmpfs -o size=8k tmpfs {root} && mkdir -p {root}/etc {root}/usr/lib64 && cd {root} && printf '\\177ELF\\2\\1\\1\\0\\0\\0\\0\\0\\0\\0\\0\\0\\3\\0\\076\\0\\1' > usr/lib64/libcuda.so.1 && head -c 4096 /dev/zero > full"
            ),
            "No space left",
        ),
    ] {
        for (flag, code) in [("", 0), ("--on-failure fail", 1), ("--on-failure=ignore", 0)] {
            let script =
                format!("{{ {prepare}; }} 2>/dev/null || exit 99; exec {hook} update-ldcache --folder /usr/lib64 {flag}");
            let Some(output) = in_namespace(&image, &script) else {
                return;
            };
            assert!(
                output.status.code() == Some(code) && said(&output).contains(reason),
                "{flag}: {output:?}"
            );
            assert_eq!(said(&output).contains("the container starts without it"), code == 0);
        }
    }
    // A root whose links lead in circles.
    fs::remove_dir_all(image.rootfs("/etc")).expect("removed");
    symlink("etc", image.rootfs("/etc")).expect("linked");
    let output = image.run(&UPDATE);
    assert!(
        output.status.success() && said(&output).contains("Too many levels of symbolic links"),
        "{output:?}"
    );
}

/// A seccomp profile that does not know `openat2` makes it fail with EPERM, and a kernel before 5.6 with ENOSYS. strace injects both errors.
#[test]
fn rule_4_no_volume_over_etc_is_written_without_openat2() {
    if !divvy_skip::program("strace", "strace") {
        return;
    }
    for error in ["EPERM", "ENOSYS"] {
        let image = Image::new(&[CUDA]);
        let hook = env!("CARGO_BIN_EXE_divvy-hook");
        let (etc, root) = (image.rootfs("/etc"), image.at("rootfs"));
        let (etc, root) = (etc.display(), root.display());
        // The hook runs twice and reads the state each time.
        let state = image.at("state");
        fs::write(&state, image.state()).expect("written");
        let state = state.display();
        let run = format!(
            "strace -f -qq -o /dev/null -e inject=openat2:error={error} {hook} update-ldcache --folder /usr/lib64 --on-failure fail <{state}"
        );
        let script = format!(
            "mount -t tmpfs none {etc} || exit 99; {run}; echo $?; ls -A {etc}; umount {etc} && {run}; echo $?; ls -A {root}/etc"
        );
        let Some(output) = in_namespace(&image, &script) else { return };
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "1\n0\nld.so.cache\n",
            "with the mount the write is refused and nothing is left; without it the file is written: {output:?}"
        );
        assert!(said(&output).contains("Invalid cross-device link"), "{output:?}");
    }
}

/// The hook runs in a mount namespace, as a container runtime runs it.
#[test]
fn case_39_driver_libraries_are_told_to_make_no_nodes() {
    const PARAMS: &str = "/proc/driver/nvidia/params";
    let image = Image::new(&[]);
    let before = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\n";
    image.put(PARAMS, before.as_bytes());
    image.put("/proc/driver/nvidia/version", b"NVRM\n");
    let hook = format!(
        "{} disable-device-node-modification --on-failure fail",
        env!("CARGO_BIN_EXE_divvy-hook")
    );
    let file = image.rootfs(PARAMS);
    let directory = file.parent().expect("a directory").display().to_string();
    let file = file.display();
    // Both calls read the state from a file. The second call finds nothing to do.
    let state = image.at("state");
    fs::write(&state, image.state()).expect("written");
    let state = state.display();
    let script = format!(
        "mount -t tmpfs tmpfs /mnt 2>/dev/null || exit 99; {hook} <{state} && {hook} <{state} && cat {file} && ls {directory} && grep -c {directory} /proc/self/mountinfo; \
         echo x 2>/dev/null >{file} || echo refused"
    );
    let Some(output) = in_namespace(&image, &script) else {
        return;
    };
    assert_eq!(
        (String::from_utf8_lossy(&output.stdout).as_ref(), said(&output).as_str()),
        (
            "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 0\nDeviceFileUID: 0\nparams\nversion\n1\nrefused\n",
            ""
        ),
        "{output:?}"
    );
    assert_eq!(
        fs::read_to_string(image.rootfs(PARAMS)).expect("there"),
        before,
        "only the container's view changes"
    );
    for text in [None, Some("ModifyDeviceFiles: 0\n"), Some("Other: 1\n")] {
        fs::remove_file(image.rootfs(PARAMS)).expect("removed");
        fs::write(image.rootfs(PARAMS), text.unwrap_or_default()).expect("written");
        if text.is_none() {
            fs::remove_file(image.rootfs(PARAMS)).expect("removed");
        }
        let script =
            format!("mount -t tmpfs tmpfs /mnt 2>/dev/null || exit 99; {hook} && ! grep {directory} /proc/self/mountinfo");
        let output = in_namespace(&image, &script).expect("as before");
        assert!(
            output.status.success() && output.stderr.is_empty() && output.stdout.is_empty(),
            "{text:?}: {output:?}"
        );
        fs::write(image.rootfs(PARAMS), "").expect("written");
    }
}

#[test]
fn case_41_rule_5_ten_starts_leave_what_one_leaves() {
    let image = Image::new(&[CUDA]);
    let files = || {
        let output = Command::new("find").arg(image.directory.path()).output().expect("it runs");
        String::from_utf8(output.stdout).expect("text")
    };
    let nodes = serde_json::json!({"root": {"path": "rootfs"}, "mounts": [{"destination": CUDA}], "linux": {"devices": [{"path": "/dev/nvidia0"}]}});
    fs::write(image.at("config.json"), nodes.to_string()).expect("written");
    let run = || {
        for words in [
            &UPDATE[..],
            &["update-application-profile"],
            &["enable-cuda-compat", "--host-driver-version=1"],
        ] {
            assert!(image.run(words).status.success());
        }
    };
    run();
    let (once, bytes) = (files(), fs::read(image.rootfs("/etc/ld.so.cache")).expect("there"));
    // The temporary file of a hook that was killed.
    fs::write(image.rootfs("/etc/.ld.so.cache.divvy"), "half a file").expect("written");
    fs::remove_file(image.rootfs("/etc/ld.so.cache")).expect("removed");
    run();
    let time = || {
        let found = fs::metadata(image.rootfs("/etc/ld.so.cache")).expect("there");
        (found.mtime(), found.mtime_nsec())
    };
    let written = time();
    (0..8).for_each(|_| run());
    assert_eq!(time(), written, "a file that is up to date is not written again");
    assert_eq!(
        (files(), fs::read(image.rootfs("/etc/ld.so.cache")).expect("there")),
        (once, bytes)
    );
}

/// CVE-2025-23266: the image controls the environment variables and the current directory.
#[test]
fn rule_9_no_variable_of_the_image_opens_its_files() {
    if !divvy_skip::program("strace", "strace") {
        return;
    }
    let Some(hook) = static_hook() else { return };
    let image = Image::new(&[CUDA]);
    for name in ["evil.so", "gconv-modules", "ld.so.preload", "RUST_LOG", "passwd"] {
        image.put(name, b"evil");
    }
    let (log, evil) = (image.at("strace"), "/proc/self/cwd/evil.so");
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-s", "4096", "-o"]).arg(&log);
    command.arg("-E").arg(format!("LD_PRELOAD={evil}"));
    for name in [
        "LD_AUDIT",
        "LD_LIBRARY_PATH",
        "GCONV_PATH",
        "RUST_BACKTRACE",
        "RUST_LOG",
        "MALLOC_CONF",
        "LOCPATH",
        "PATH",
        "HOME",
        "TMPDIR",
    ] {
        command.arg("-E").arg(format!("{name}={evil}"));
    }
    let output = image.run_by(command.args(["-e", "trace=%file,%process"]).arg(&hook).args(UPDATE));
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert_eq!(image.ldconfig().len(), 1, "it did its work");
    let log = fs::read_to_string(&log).expect("a log");
    let calls = log
        .lines()
        .filter_map(|line| line.split_once(' ').map(|(_, call)| call.trim_start()));
    let own = [
        format!("open(\"{}\"", image.at("config.json").display()),
        format!("openat(AT_FDCWD, \"{}\", O_RDONLY|O_PATH", image.at("rootfs").display()),
        format!("open(\"{}\"", image.at("rootfs").display()),
        format!("openat(AT_FDCWD, \"{}\"", image.at("config.json").display()),
        format!("execve(\"{}\"", hook.display()),
        "execve(\"/proc/self/exe\", [\"divvy-hook\", ".to_owned(),
        "chdir(\"/\")".to_owned(),
        // The Rust runtime opens it if one of the first three file descriptors is closed.
        "open(\"/dev/null\"".to_owned(),
    ];
    let mut beneath = 0;
    for call in calls {
        let in_root = call.starts_with("openat2(") && call.contains("RESOLVE_NO_MAGICLINKS") && call.contains("RESOLVE_IN_ROOT");
        // A call relative to a descriptor that was opened that way, with a single component.
        let component = |call: &str| {
            let name = call.split('"').nth(1).unwrap_or("/");
            !call.contains("AT_FDCWD") && !name.contains('/') && name != ".."
        };
        let by_descriptor = [
            "openat(",
            "unlinkat(",
            "renameat(",
            "renameat2(",
            "newfstatat(",
            "statx(",
            "readlinkat(",
            "fchmodat(",
        ]
        .iter()
        .any(|name| call.starts_with(name))
            && component(call);
        let ends = ["exit", "+++", "wait", "arch_prctl", "rt_sig", "clone", "kill", "tkill"]
            .iter()
            .any(|name| call.starts_with(name));
        assert!(
            in_root || by_descriptor || ends || own.iter().any(|known| call.starts_with(known)),
            "{call}"
        );
        beneath += usize::from(in_root);
    }
    assert!(beneath >= 4, "the log contains the calls in the root: {log}");
    assert!(!log.contains("evil.so\", O_") && !log.contains("evil.so\", {"), "{log}");
    let second = log
        .lines()
        .find(|line| line.contains("/proc/self/exe"))
        .expect("it executes itself again");
    assert!(second.contains("/* 0 vars */"), "without a variable: {second}");
}

/// A constructor in the image's library creates a file when a loader loads the library.
#[test]
fn case_38_rule_9_no_library_of_the_image_is_preloaded() {
    let Some(hook) = static_hook() else { return };
    if !divvy_skip::program("cc", "gcc") {
        return;
    }
    let image = Image::new(&[CUDA]);
    let source = image.at("evil.c");
    let mark = image.at("mark");
    let text =
        format!("#include <fcntl.h>\n__attribute__((constructor)) static void f(void) {{ open({mark:?}, O_CREAT, 0600); }}\n");
    fs::write(&source, text).expect("written");
    let library = image.rootfs("evil.so");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .output()
        .expect("it runs");
    assert!(built.status.success(), "{built:?}");
    let preloaded = |program: &Path, words: &[&str]| {
        let mut command = Command::new(program);
        command.args(words).env("LD_PRELOAD", "/proc/self/cwd/evil.so");
        assert!(image.run_by(&mut command).status.success());
        mark.exists()
    };
    assert!(!preloaded(&hook, &UPDATE));
    assert!(
        preloaded(Path::new("/bin/true"), &[]),
        "the check works: a program with a loader creates the file"
    );
}

#[test]
fn rule_10_it_has_no_interpreter() {
    let Some(hook) = static_hook() else { return };
    if !divvy_skip::program("readelf", "binutils") {
        return;
    }
    let has_loader = |path: &Path| {
        let output = Command::new("readelf")
            .args(["-l", "-W"])
            .arg(path)
            .output()
            .expect("it runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).contains("INTERP")
    };
    assert!(
        has_loader(Path::new("/bin/true")),
        "the check works: a program with a loader is detected"
    );
    assert!(!has_loader(&hook));
}
