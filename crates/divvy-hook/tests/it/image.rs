use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::json;

/// A bundle with a root directory, in a temporary directory.
pub(crate) struct Image {
    pub(crate) directory: tempfile::TempDir,
}

/// The first bytes of a library for x86-64.
pub(crate) fn elf() -> Vec<u8> {
    [
        b"\x7fELF\x02\x01\x01".as_slice(),
        &[0; 9],
        &[3, 0, 0x3e, 0, 1, 0, 0, 0],
        &[0; 40],
    ]
    .concat()
}

impl Image {
    /// Build an image in which these libraries are mounted. The files exist in the root, as when a container runtime calls a
    /// hook.
    pub(crate) fn new(libraries: &[&str]) -> Image {
        let image = Image {
            directory: tempfile::tempdir().expect("a directory"),
        };
        fs::create_dir_all(image.at("rootfs/etc")).expect("made");
        let mounts: Vec<_> = libraries
            .iter()
            .map(|path| json!({"destination": path, "source": "/x"}))
            .collect();
        fs::write(
            image.at("config.json"),
            json!({"root": {"path": "rootfs"}, "mounts": mounts}).to_string(),
        )
        .expect("written");
        for library in libraries {
            image.put(library, &elf());
        }
        image
    }

    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    pub(crate) fn rootfs(&self, path: &str) -> PathBuf {
        self.at("rootfs").join(path.trim_start_matches('/'))
    }

    pub(crate) fn put(&self, path: &str, bytes: &[u8]) {
        let path = self.rootfs(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(path, bytes).expect("written");
    }

    pub(crate) fn state(&self) -> String {
        json!({"ociVersion": "1.2.0", "id": "c", "status": "creating", "pid": 4242, "bundle": self.directory.path()}).to_string()
    }

    pub(crate) fn run(&self, words: &[&str]) -> Output {
        self.run_by(Command::new(env!("CARGO_BIN_EXE_divvy-hook")).args(words))
    }

    /// Run a command in the image's root directory, with the state on standard input and with one environment variable of the
    /// image.
    pub(crate) fn run_by(&self, command: &mut Command) -> Output {
        let mut child = command
            .current_dir(self.at("rootfs"))
            .env("IMAGE", "its own")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it runs");
        // A program that does not read its input may have ended already.
        let _ = child.stdin.take().expect("a pipe").write_all(self.state().as_bytes());
        child.wait_with_output().expect("it ends")
    }

    /// Return the names and paths that glibc's `ldconfig` reads from the cache.
    pub(crate) fn ldconfig(&self) -> Vec<(String, String)> {
        let output = Command::new("/sbin/ldconfig")
            .args(["-p", "-C"])
            .arg(self.rootfs("/etc/ld.so.cache"))
            .output()
            .expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{output:?}");
        let pair = |line: &str| {
            let (name, rest) = line.strip_prefix('\t')?.split_once(" (")?;
            Some((name.to_owned(), rest.split_once("=> ")?.1.to_owned()))
        };
        text.lines().filter_map(pair).collect()
    }
}

pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Build the static program that is released. Tests about loaders are meaningless for a dynamic program. If Rust's libraries for
/// musl are not installed, record a skip and return `None`.
pub(crate) fn static_hook() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_BIN_EXE_divvy-hook"))
        .ancestors()
        .nth(2)
        .expect("target/PROFILE/program");
    let triple = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let libraries = Command::new("rustc")
        .args(["--target", &triple, "--print", "target-libdir"])
        .output()
        .expect("rustc runs");
    if !Path::new(String::from_utf8_lossy(&libraries.stdout).trim()).is_dir() {
        divvy_skip::skipped(format_args!(
            "Rust's libraries for musl are not installed (rustup target add {triple})"
        ));
        return None;
    }
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["build", "--quiet", "-p", "divvy-hook", "--target", &triple, "--target-dir"])
        .arg(target);
    let built = cargo.output().expect("cargo runs");
    assert!(built.status.success(), "{built:?}");
    Some(target.join(triple).join("debug/divvy-hook"))
}
