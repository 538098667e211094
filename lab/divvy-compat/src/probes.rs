//! The programs that ask the driver, compiled for a root file system.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::command::run;
use crate::roots::RootFileSystem;

/// The directory of the sources.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("probes")
}

/// Return the flags with which this machine's compiler uses the C library of a root file system. Without the second and the third one, it first finds
/// the files in its own directory.
pub(crate) fn for_root(image: &Path) -> [String; 3] {
    let libraries = image.join("usr/lib/x86_64-linux-gnu");
    [
        format!("--sysroot={}", image.display()),
        format!("-B{}/", libraries.display()),
        format!("-L{}", libraries.display()),
    ]
}

/// Compile the programs for a root file system into a directory.
pub(crate) fn compile(root: &RootFileSystem, image: &Path, into: &Path) -> Result<PathBuf> {
    fs::create_dir_all(into).with_context(|| format!("{} could not be made", into.display()))?;
    let cc = |flags: &[&str], source: &str, output: &str| {
        let mut command = Command::new(if root.has_glibc() { "gcc" } else { "musl-gcc" });
        if root.has_glibc() {
            command.args(for_root(image));
        }
        command.args(["-O1", "-w"]).arg(sources().join(source));
        command
            .arg("-o")
            .arg(into.join(output))
            .arg("-L")
            .arg(into)
            .args(flags)
            .arg("-ldl");
        run(&mut command).context("a probe could not be compiled")
    };
    for (name, flag) in [("libcuda", "-DCUDA"), ("libnvidia-ml", "-DNVML")] {
        let soname = format!("-Wl,-soname,{name}.so.1");
        cc(&["-shared", "-fPIC", flag, &soname], "stub.c", &format!("{name}.so"))?;
    }
    cc(&[], "probe.c", "probe")?;
    cc(&["-DLINKED", "-lcuda", "-lnvidia-ml"], "probe.c", "linked")?;
    if !root.has_glibc() {
        return Ok(into.to_owned());
    }
    cc(&["-DSTATIC", "-static"], "probe.c", "static")?;
    cc(&["-DJNI", "-shared", "-fPIC"], "probe.c", "libprobe.so")?;
    let setuid = into.join("setuid");
    fs::copy(into.join("linked"), &setuid)
        .and_then(|_| fs::set_permissions(&setuid, fs::Permissions::from_mode(0o4755)))
        .context("the probe could not be made setuid")?;
    fs::copy(sources().join("probe.py"), into.join("probe.py")).context("probe.py could not be copied")?;
    // The oldest Java among the roots is 10.
    let mut javac = Command::new("javac");
    javac
        .args(["--release", "8", "-d"])
        .arg(into)
        .arg(sources().join("Probe.java"));
    run(&mut javac).context("the probe for Java could not be compiled")?;
    Ok(into.to_owned())
}
