//! The files of a container that has the guard, and a copy of the driver's library in its image. They are in a temporary directory; no container is started.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};

use divvy_shadow_testkit::{MIB, ShadowContainer, compile, library, shadow};
use divvy_share::limits::ShareLimits;

/// What a test program asks for: less than the GPU has, and more than the pod's share of it.
const SHARE: u64 = 1024 * MIB;

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
    shadow("divvy-guard-audit")
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

/// The files of a container. The driver's library of the node is behind the guard, and `copy` has another one.
pub(crate) struct Sandbox {
    container: ShadowContainer,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        let container = ShadowContainer::new("a");
        let node = container.path("node/libcuda.so.575.51.03");
        container.put_guard("divvy-guard", "libcuda.so", &node);
        container.install(audit(), "libdivvy-guard-audit.so", &["/run/divvy/guard"], 4);
        let sandbox = Self { container };
        for file in [node, sandbox.path(COPY)] {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::copy(library("divvy-cuda-sim"), file).unwrap();
        }
        for link in ["copy/libcuda.so.1", "copy/libcuda.so"] {
            symlink(sandbox.path(COPY), sandbox.path(link)).unwrap();
        }
        sandbox.container.describe_machine("575.51.03", 8192 * MIB, &[""]);
        let limits = ShareLimits {
            bytes: SHARE,
            ..ShareLimits::default()
        };
        sandbox.container.give(0, &limits);
        sandbox
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.container.path(name)
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
        let mut command = self.container.command(program);
        command
            .current_dir(self.path(""))
            .env_remove("LD_LIBRARY_PATH")
            .env("LD_AUDIT", self.path("libdivvy-guard-audit.so"))
            .env("GLIBC_TUNABLES", divvy_share::TUNABLES);
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
