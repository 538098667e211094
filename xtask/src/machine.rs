//! The machines for which programs are built, and what this machine needs for that.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use divvy_shadow_testkit::Elf;

use crate::ptx::output;

/// Parts of glibc to which a driver's library may be linked, although they are empty since glibc 2.34.
const STUBS: [&str; 5] = ["libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libutil.so.1"];

/// A kind of machine.
pub(crate) struct TargetMachine {
    /// The processor, as Rust and GNU name it.
    pub(crate) rust: &'static str,
    /// The processor, as OCI and Debian name it.
    pub(crate) oci: &'static str,
    /// The path of glibc's loader, which is in each program that is linked to glibc.
    loader: &'static str,
}

pub(crate) const ARM64: TargetMachine = TargetMachine {
    rust: "aarch64",
    oci: "arm64",
    loader: "lib/ld-linux-aarch64.so.1",
};

/// The machines that have NVIDIA's driver.
pub(crate) const ALL: [TargetMachine; 2] = [
    TargetMachine {
        rust: "x86_64",
        oci: "amd64",
        loader: "lib64/ld-linux-x86-64.so.2",
    },
    ARM64,
];

impl TargetMachine {
    /// Return the kind of this machine.
    pub(crate) fn own() -> Result<&'static TargetMachine> {
        match ALL.iter().find(|machine| machine.is_own()) {
            Some(machine) => Ok(machine),
            None => bail!(
                "programs are built on x86_64 and aarch64 machines; this machine is {}",
                std::env::consts::ARCH
            ),
        }
    }

    pub(crate) fn is_own(&self) -> bool {
        self.rust == std::env::consts::ARCH
    }

    /// Return the target for one of the C libraries `gnu` and `musl`.
    pub(crate) fn target(&self, libc: &str) -> String {
        format!("{}-unknown-linux-{libc}", self.rust)
    }

    /// Return the compiler of C for glibc, which is also the linker.
    pub(crate) fn compiler(&self) -> String {
        if self.is_own() {
            "cc".to_owned()
        } else {
            format!("{}-linux-gnu-gcc", self.rust)
        }
    }

    /// Have a command of cargo build for this machine.
    pub(crate) fn configure<'c>(&self, cargo: &'c mut Command) -> &'c mut Command {
        // What is compiled for musl needs only the headers, of which the other compiler has its own.
        let of_musl = if self.is_own() {
            "musl-gcc".to_owned()
        } else {
            self.compiler()
        };
        cargo.env(format!("CC_{}", self.target("musl").replace('-', "_")), of_musl);
        if !self.is_own() {
            for libc in ["gnu", "musl"] {
                let target = self.target(libc).replace('-', "_").to_uppercase();
                cargo.env(format!("CARGO_TARGET_{target}_LINKER"), self.compiler());
            }
        }
        cargo
    }

    /// Return the commands that install what this machine lacks; `None` if nothing is missing. `more` are other programs that are needed, with Debian's
    /// package of each.
    pub(crate) fn missing(&self, more: &[(&str, &str)]) -> Option<String> {
        let (compiler, package) = (self.compiler(), format!("gcc-{}-linux-gnu", self.rust.replace('_', "-")));
        let mut packages = Vec::new();
        let mut needs = vec![("musl-gcc", "musl-tools")];
        if !self.is_own() {
            needs = vec![(&compiler, &package)];
        }
        for (program, package) in needs.iter().chain(more) {
            if Command::new(program).arg("--version").output().is_err() {
                packages.push((*package).to_owned());
            }
        }
        if !self.is_own() && self.library("libc.so").is_err() {
            packages.push(format!("libc6-dev-{}-cross", self.oci));
        }
        let targets: Vec<String> = ["gnu", "musl"]
            .map(|libc| self.target(libc))
            .into_iter()
            .filter(|target| !has(target))
            .collect();
        let mut commands = Vec::new();
        if !packages.is_empty() {
            commands.push(format!("apt-get install -y {}", packages.join(" ")));
        }
        if !targets.is_empty() {
            commands.push(format!("rustup target add {}", targets.join(" ")));
        }
        (!commands.is_empty()).then(|| commands.join(" && "))
    }

    /// Return the path of a library of the compiler's glibc.
    pub(crate) fn library(&self, name: &str) -> Result<PathBuf> {
        let path = output(Command::new(self.compiler()).arg(format!("-print-file-name={name}")))?;
        // The compiler prints the name alone if it does not find the file.
        let directory = Path::new(&path).parent().filter(|directory| directory.is_absolute());
        let directory = directory.with_context(|| format!("{} does not find {name}", self.compiler()))?;
        // Not the library's own path: on some systems it is a link to a name that nothing asks for.
        Ok(directory.canonicalize()?.join(name))
    }

    /// Return the files that programs need which are linked to glibc and load a driver's libraries: for each path in their file system, the path on this machine.
    pub(crate) fn libraries(&self, programs: &[&Path]) -> Result<BTreeMap<String, PathBuf>> {
        let mut files = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let mut names: Vec<String> = STUBS.map(str::to_owned).into();
        for program in programs {
            names.extend(needed(program)?);
        }
        while let Some(name) = names.pop() {
            if !seen.insert(name.clone()) {
                continue;
            }
            let path = self.library(&name)?;
            names.extend(needed(&path)?);
            files.insert(self.place(&name, &path), path);
        }
        ensure!(
            files.contains_key(self.loader),
            "nothing needs {}: NVIDIA's container runtime mounts nvidia-smi and nvidia-cuda-mps-control, which need it there",
            self.loader
        );
        Ok(files)
    }

    /// Return the path at which a program finds a library.
    fn place(&self, name: &str, path: &Path) -> String {
        if self.loader.ends_with(name) {
            return self.loader.to_owned();
        }
        if !self.is_own() {
            // Where Debian's loader for that machine searches; the packages for other machines have the same one.
            return format!("lib/{}-linux-gnu/{name}", self.rust);
        }
        // The loader's default directories. On some distributions they are links to directories in /usr; in the image they are real directories.
        let path = path.to_string_lossy();
        path.trim_start_matches("/usr").trim_start_matches('/').to_owned()
    }
}

/// Return the names of the libraries that a program or library is linked to. A static program has none.
pub(crate) fn needed(program: &Path) -> Result<Vec<String>> {
    let bytes = std::fs::read(program).with_context(|| format!("{} could not be read", program.display()))?;
    Ok(Elf::of(&bytes).needed())
}

/// Report whether Rust's libraries for a target are installed.
fn has(target: &str) -> bool {
    let printed = Command::new("rustc")
        .args(["--target", target, "--print", "target-libdir"])
        .output();
    printed.is_ok_and(|output| Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_glibc_program_gets_its_loader_and_libraries() {
        let own = TargetMachine::own().expect("a known machine");
        let program = std::env::current_exe().expect("this program");
        let files = own.libraries(&[&program]).expect("found");
        let has = |name: &str| files.keys().any(|path| path.ends_with(&format!("/{name}")));
        assert!(files.contains_key(own.loader), "{files:?}");
        for name in needed(&program).expect("a program").iter().map(String::as_str).chain(STUBS) {
            assert!(has(name), "{name}: {files:?}");
        }
        for (at, path) in &files {
            assert!(path.exists() && !at.starts_with(['/', '.']), "{at}: {}", path.display());
        }
    }
}
