//! A program in a container that this program makes. Where this machine allows no namespace, the tests are skipped.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const CONTAIN: &str = env!("CARGO_BIN_EXE_divvy-contain");

/// Report whether this machine allows namespaces.
fn allowed() -> bool {
    let output = Command::new(CONTAIN).arg("--check").output().expect("it runs");
    if !output.status.success() {
        divvy_skip::skipped(String::from_utf8_lossy(&output.stderr));
    }
    output.status.success()
}

/// Run the test `inside` of this program in a container, and return what it found.
fn found_inside(directory: &Path, mounts: &[&str]) -> Vec<String> {
    let root = directory.join("root");
    fs::create_dir_all(&root).expect("made");
    let output = Command::new(CONTAIN)
        .args(mounts)
        .arg(&root)
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", "inside", "--nocapture"])
        .env("INSIDE", "1")
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(
        fs::read_dir(&root).expect("there").count(),
        0,
        "the machine has the container's mounts"
    );
    let lines = text.lines().filter_map(|line| line.strip_prefix("= "));
    lines.map(str::to_owned).collect()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// What the container's program does. Without the variable it is not in a container.
#[test]
fn inside() {
    if std::env::var_os("INSIDE").is_none() {
        assert!(Path::new("/etc/passwd").exists(), "the machine has what the container lacks");
        return;
    }
    #[expect(clippy::print_stdout, reason = "the answer")]
    let say = |what: &str, of: String| println!("\n= {what}: {of}");
    let names = |directory: &str| {
        let entries = fs::read_dir(directory).map(|entries| entries.flatten().map(|entry| entry.file_name()));
        let mut names: Vec<String> = entries
            .into_iter()
            .flatten()
            .map(|name| name.to_string_lossy().into_owned())
            .collect();
        names.sort();
        names.join(" ")
    };
    say("/etc", names("/etc"));
    say("/data", names("/data"));
    for path in ["/data/writable", "/data/fixed"] {
        let before = fs::read_to_string(path).unwrap_or_default();
        let written = fs::write(path, "changed").map_err(|error| error.kind());
        say(path, format!("{before} {written:?}"));
    }
    say(
        "link",
        fs::read_link("/opt/libgcc_s.so.1").unwrap_or_default().display().to_string(),
    );
}

/// The program has nothing else of the machine, and the machine keeps no trace of the program.
#[test]
fn a_program_sees_only_its_mounts() {
    if !allowed() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let files: Vec<PathBuf> = ["writable", "fixed"].map(|name| directory.path().join(name)).to_vec();
    for file in &files {
        fs::write(file, "original").expect("written");
    }
    let mounts = [
        "--mount",
        text(&files[0]),
        "/data/writable",
        "--read-only",
        text(&files[1]),
        "/data/fixed",
    ];
    let found = found_inside(directory.path(), &mounts);
    let expected = [
        "/etc: ld.so.cache ld.so.conf",
        "/data: fixed writable",
        "/data/writable: original Ok(())",
        "/data/fixed: original Err(ReadOnlyFilesystem)",
        "link: ",
    ];
    assert_eq!(found, expected);
    let now: Vec<String> = files.iter().map(|file| fs::read_to_string(file).expect("there")).collect();
    assert_eq!(now, ["changed", "original"]);
}

/// A device without a driver cannot be opened, and neither can a socket.
#[test]
fn what_cannot_be_opened_is_mounted_even_twice() {
    if !allowed() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("bound");
    let mount = ["--mount", text(&socket), "/data/socket"];
    let found = found_inside(directory.path(), &[mount, mount].concat());
    assert!(found.contains(&"/data: socket".to_owned()), "{found:?}");
}

#[test]
fn a_library_gets_the_link_by_which_programs_load_it() {
    if !allowed() {
        return;
    }
    let maps = fs::read_to_string("/proc/self/maps").expect("there");
    let mut files = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let library = files.find(|path| path.contains("/libgcc_s")).expect("this program needs it");
    let directory = tempfile::tempdir().expect("a directory");
    // The link is made from what the file says of itself, and not from its name on the machine.
    let file = directory.path().join("a");
    symlink(library, &file).expect("linked");
    let found = found_inside(directory.path(), &["--read-only", text(&file), "/opt/libgcc_s.so.1.2.3"]);
    assert!(found.contains(&"link: libgcc_s.so.1.2.3".to_owned()), "{found:?}");
}

/// The image has a shell and its libraries from this machine. The program writes to its files, and makes a mount's library known to the loader.
/// Files that the program writes are not in the image.
#[test]
fn a_program_has_the_files_of_its_image() {
    if !allowed() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let [image, root] = ["image", "root"].map(|name| directory.path().join(name));
    fs::create_dir(&root).expect("made");
    let output = Command::new("ldd").arg("/bin/sh").output().expect("it runs");
    let libraries = String::from_utf8_lossy(&output.stdout).into_owned();
    let libraries = libraries.split_whitespace().filter(|word| word.starts_with('/'));
    let maps = fs::read_to_string("/proc/self/maps").expect("there");
    let library = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let library = library
        .into_iter()
        .find(|path| path.contains("/libgcc_s"))
        .expect("this program needs it");
    for file in libraries.chain(["/bin/sh"]) {
        let to = image.join(&file[1..]);
        fs::create_dir_all(to.parent().expect("a directory")).expect("made");
        fs::copy(file, to).expect("copied");
    }
    let cache = image.join("etc/ld.so.cache");
    fs::create_dir_all(image.join("etc")).expect("made");
    // As distributions have it.
    fs::write(image.join("etc/ld.so.conf"), "include /etc/ld.so.conf.d/*.conf\n").expect("written");
    let script =
        "echo changed > /file; for path in /file /link /etc/ld.so.cache /opt/libgcc_s.so.1; do test -s $path && echo $path; done";
    let run = |has_cache: bool| {
        if has_cache {
            // NVIDIA's hook looks only whether there is one.
            fs::write(&cache, "").expect("written")
        } else {
            assert!(!cache.exists())
        }
        let output = Command::new(CONTAIN)
            .args(["--image", text(&image), "--read-only", library, "/opt/libgcc_s.so.1.2.3"])
            .args(["--link", "/file", "/link", text(&root), "/bin/sh", "-c", script])
            .output()
            .expect("it runs");
        assert!(!image.join("file").exists() && !image.join("link").exists() && !image.join("opt").exists());
        format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    };
    // Another loader than glibc's has no cache, and nothing is made for it.
    assert_eq!(run(false), "/file\n/link\n");
    assert_eq!(run(true), "/file\n/link\n/etc/ld.so.cache\n/opt/libgcc_s.so.1\n");
    assert_eq!(fs::read(&cache).expect("there"), b"");
}

#[test]
fn a_mount_or_a_program_that_does_not_exist_is_named() {
    if !allowed() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let root = text(directory.path());
    let cases = [
        (
            vec!["--mount", "/nowhere/a", "/b", root, CONTAIN],
            "/nowhere/a could not be mounted at /b",
        ),
        (vec![root, "/nowhere/program"], "/nowhere/program is not a program"),
        (
            vec!["/nowhere/root", CONTAIN],
            "a tmpfs could not be mounted at /nowhere/root",
        ),
    ];
    for (arguments, expected) in cases {
        let output = Command::new(CONTAIN).args(&arguments).output().expect("it runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && errors.contains(expected),
            "{arguments:?}: {errors}"
        );
    }
}
