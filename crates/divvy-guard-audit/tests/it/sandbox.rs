//! The files of a container that has the guard, and a copy of the driver's library in its image. They are in a temporary directory; no container is started.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use divvy_shadow_testkit::{build, replace, shadow, target};
use divvy_share::limits::Limits;
use divvy_share::usage;

const MIB: u64 = 1 << 20;
const GPU: &str = "GPU-00010203-0405-4607-8809-0a0b0c0d0e0f";
/// What a test program asks for: less than the GPU has, and more than the pod's share of it.
const SHARE: u64 = 1024 * MIB;
const MACHINE: &str = "v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"575.51.03\"\n[[node.gpu]]\n\
                       model = \"NVIDIA A100-SXM4-40GB\"\nuuid = \"GPU-00010203-0405-4607-8809-0a0b0c0d0e0f\"\nmemory_mib = 8192\n";

/// The name with which the copy is a file; other names are links to it.
pub(crate) const COPY: &str = "copy/libcuda.so.580.65.06";

/// What a program has that asks for more than the share: CUDA's code (2: out of memory), and the files of these names that it has loaded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Got {
    pub(crate) code: i32,
    pub(crate) libraries: Vec<String>,
}

/// A program that is refused what exceeds the share, and that has this file behind the guard.
pub(crate) fn held(real: &str) -> Got {
    let libraries = BTreeSet::from(["libcuda.so.1".to_owned(), real.to_owned()]);
    Got {
        code: 2,
        libraries: libraries.into_iter().collect(),
    }
}

/// A program that gets what it asks for, from this file.
pub(crate) fn free(real: &str) -> Got {
    Got {
        code: 0,
        libraries: vec![real.to_owned()],
    }
}

/// The library as it ships.
pub(crate) fn audit() -> &'static [u8] {
    static AUDIT: OnceLock<Vec<u8>> = OnceLock::new();
    AUDIT.get_or_init(|| shadow("divvy-guard-audit"))
}

fn guard() -> &'static [u8] {
    static GUARD: OnceLock<Vec<u8>> = OnceLock::new();
    GUARD.get_or_init(|| shadow("divvy-guard"))
}

/// The simulated driver.
fn driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| {
        build(&["-p", "divvy-cuda-sim"]);
        target().join("debug/libdivvy_cuda_sim.so")
    })
}

/// Loads a library in a way (the first argument), and then asks for 2 GiB of the first GPU. Ends with CUDA's code, and prints the files that it has mapped.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#ifdef LINKED
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *), cuMemAlloc_v2(unsigned long *, unsigned long);
#define FIND(name) name
#else
#define FIND(name) ((int (*)()) dlsym(library, #name))
#endif
static int ask(void *library) {
    void *context;
    unsigned long pointer;
    if (FIND(cuInit)(0) || FIND(cuDevicePrimaryCtxRetain)(&context, 0) || FIND(cuCtxSetCurrent)(context)) return 100;
    return FIND(cuMemAlloc_v2)(&pointer, 2048ul << 20);
}
#ifdef PLUGIN
int plugin(void) { return ask(NULL); }
#else
int main(int count, char **words) {
    void *library = NULL;
    for (int word = 1; word + 1 < count; word += 2) {
        const char *how = words[word], *name = words[word + 1];
        library = !strcmp(how, "namespace") ? dlmopen(LM_ID_NEWLM, name, RTLD_NOW)
            : dlopen(name, RTLD_NOW | (!strcmp(how, "deepbind") ? RTLD_DEEPBIND : 0) | (!strcmp(how, "global") ? RTLD_GLOBAL : 0));
        if (!library) {
            fprintf(stderr, "%s\n", dlerror());
            return 101;
        }
    }
    int (*plugin)(void) = library ? (int (*)(void)) dlsym(library, "plugin") : NULL;
    int code = plugin ? plugin() : ask(library);
    char line[4096];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) fputs(line, stdout);
    return code;
}
#endif
"#;

/// Compile C.
pub(crate) fn compile(source: &str, to: &Path, arguments: &[&str]) {
    let mut compiler = Command::new("cc");
    compiler
        .args(["-w", "-x", "c", "-", "-x", "none", "-o"])
        .arg(to)
        .args(arguments);
    let mut compiler = compiler.stdin(Stdio::piped()).spawn().unwrap();
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    assert!(compiler.wait().unwrap().success(), "{arguments:?}");
}

/// The files of a container. The driver's library of the node is behind the guard, and `copy` has another one.
pub(crate) struct Sandbox {
    directory: tempfile::TempDir,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        let root = divvy_share::DIRECTORY;
        // As long as the path that it replaces.
        let directory = tempfile::Builder::new()
            .prefix("a")
            .rand_bytes(root.len() - 6)
            .tempdir_in("/tmp")
            .unwrap();
        let sandbox = Self { directory };
        let path = sandbox.text("");
        let path = path.trim_end_matches('/');
        for (library, name, texts, count) in [
            (guard(), "libcuda.so.1", &[root, "/run/divvy/guard"][..], 1),
            (audit(), "libdivvy-guard-audit.so", &["/run/divvy/guard"][..], 4),
        ] {
            let mut bytes = library.to_vec();
            for text in texts {
                assert_eq!(replace(&mut bytes, text, path), count, "{name}: {text}");
            }
            fs::write(sandbox.path(name), bytes).unwrap();
        }
        for file in ["node/libcuda.so.575.51.03", COPY] {
            fs::create_dir_all(sandbox.path(file).parent().unwrap()).unwrap();
            fs::copy(driver(), sandbox.path(file)).unwrap();
        }
        symlink(sandbox.path("node/libcuda.so.575.51.03"), sandbox.path("libcuda.so.real")).unwrap();
        for link in ["copy/libcuda.so.1", "copy/libcuda.so"] {
            symlink(sandbox.path(COPY), sandbox.path(link)).unwrap();
        }
        fs::create_dir(sandbox.path("ledger")).unwrap();
        fs::write(sandbox.path("machine.toml"), MACHINE).unwrap();
        fs::create_dir(sandbox.path(GPU)).unwrap();
        let limits = Limits {
            bytes: SHARE,
            ..Limits::default()
        };
        fs::write(sandbox.path(GPU).join("limits"), limits.file()).unwrap();
        fs::write(sandbox.path(GPU).join("usage"), usage::file()).unwrap();
        sandbox
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Compile the test program. Arguments can contain `DIR`, the directory of this container.
    pub(crate) fn program(&self, name: &str, arguments: &[&str]) {
        let arguments: Vec<String> = arguments
            .iter()
            .map(|argument| argument.replace("DIR", &self.text("")))
            .collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        compile(PROGRAM, &self.path(name), &arguments);
    }

    /// A command with the variables that a container has.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(self.path(""))
            .env_remove("LD_LIBRARY_PATH")
            .env("LD_AUDIT", self.path("libdivvy-guard-audit.so"))
            .env("GLIBC_TUNABLES", divvy_share::TUNABLES)
            .env("DIVVY_NVML_SIM", self.path("machine.toml"))
            .env("DIVVY_NVML_SIM_LEDGER", self.path("ledger"));
        command
    }

    /// Run a command that prints what it has mapped.
    pub(crate) fn got(&self, command: &mut Command) -> Got {
        let output = command.output().unwrap();
        assert_eq!(said(&output), "", "{command:?}");
        let directory = self.text("");
        let maps = String::from_utf8(output.stdout).unwrap();
        let paths = maps.lines().filter_map(|line| line.split_once(&directory));
        let libraries: BTreeSet<String> = paths
            .map(|(_, path)| path.to_owned())
            .filter(|path| path.contains("libcuda"))
            .collect();
        Got {
            code: output.status.code().unwrap(),
            libraries: libraries.into_iter().collect(),
        }
    }
}

/// What a command has said on standard error.
pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
