//! The ways in which programs find a copy of the driver's library.

use std::fs;

use divvy_shadow_testkit::compile;

use crate::sandbox::{COPY, Got, Sandbox, free, held};

/// How it is loaded, from where, and with which directories in `LD_LIBRARY_PATH`. `DIR` is the directory of the container.
type Way<'a> = (&'a [&'a str], &'a str);

fn load(sandbox: &Sandbox, (words, directories): Way<'_>) -> Got {
    let mut command = sandbox.command(sandbox.path("program"));
    let here = |text: &str| text.replace("DIR/", &sandbox.text(""));
    command.args(words.iter().map(|word| here(word)));
    if !directories.is_empty() {
        command.env("LD_LIBRARY_PATH", here(directories));
    }
    sandbox.got(&mut command)
}

#[test]
fn a_copy_that_a_program_loads_is_behind_the_guard() {
    let sandbox = Sandbox::new();
    sandbox.program("program", &[]);
    let ways: [Way<'_>; 9] = [
        (&["open", "DIR/copy/libcuda.so.1"], ""),
        (&["open", "DIR/copy/libcuda.so"], ""),
        (&["open", "DIR/copy/libcuda.so.580.65.06"], ""),
        (&["open", "./copy/libcuda.so.1"], ""),
        (&["global", "DIR/copy/libcuda.so.1"], ""),
        (&["deepbind", "DIR/copy/libcuda.so.1"], ""),
        (&["open", "libcuda.so.1"], "DIR/copy"),
        (&["open", "libcuda.so"], "DIR/copy"),
        (&["namespace", "libcuda.so.1"], "DIR/copy"),
    ];
    for way in ways {
        assert_eq!(load(&sandbox, way), held(COPY), "{way:?}");
    }
    // Without the library, the program has the copy.
    let mut command = sandbox.command(sandbox.path("program"));
    command.arg("open").arg(sandbox.path(COPY)).env_remove("LD_AUDIT");
    assert_eq!(sandbox.got(&mut command), free(COPY));
}

/// The loader does not ask about an absolute path for a new namespace: a limit, which the documentation names.
#[test]
fn dlmopen_of_an_absolute_path_is_not_seen() {
    let sandbox = Sandbox::new();
    sandbox.program("program", &[]);
    assert_eq!(load(&sandbox, (&["namespace", "DIR/copy/libcuda.so.1"], "")), free(COPY));
}

#[test]
fn a_guard_over_the_drivers_library_reaches_it() {
    let sandbox = Sandbox::new();
    sandbox.program("program", &[]);
    let ways: [Way<'_>; 4] = [
        (&["open", "libcuda.so.1"], "DIR/:DIR/copy"),
        (&["open", "DIR/libcuda.so.1"], "DIR/copy"),
        // One library of the two is in the process, the first one.
        (&["open", "libcuda.so.1", "open", "DIR/copy/libcuda.so.1"], "DIR/"),
        (&["namespace", "libcuda.so.1"], "DIR/"),
    ];
    for way in ways {
        assert_eq!(load(&sandbox, way), held("node/libcuda.so.575.51.03"), "{way:?}");
    }
    let both: Way<'_> = (&["open", "DIR/copy/libcuda.so.1", "open", "libcuda.so.1"], "DIR/");
    assert_eq!(load(&sandbox, both), held(COPY));
    // In another namespace, the copy is not behind it any more.
    let both: Way<'_> = (&["open", "DIR/copy/libcuda.so.1", "namespace", "libcuda.so.1"], "DIR/");
    let got = load(&sandbox, both);
    assert_eq!(
        (got.code, got.libraries),
        (
            2,
            [COPY, "libcuda.so.1", "node/libcuda.so.575.51.03"]
                .map(str::to_owned)
                .to_vec()
        )
    );
}

#[test]
fn a_linked_copy_is_behind_the_guard() {
    let sandbox = Sandbox::new();
    let linked = ["-DLINKED", "DIR/copy/libcuda.so.1"];
    for path in [
        "-Wl,-rpath,DIR/copy,--disable-new-dtags",
        "-Wl,-rpath,DIR/copy,--enable-new-dtags",
    ] {
        sandbox.program("linked", &[&linked[..], &[path]].concat());
        assert_eq!(
            sandbox.got(&mut sandbox.command(sandbox.path("linked"))),
            held(COPY),
            "{path}"
        );
        sandbox.program("plugin.so", &[&linked[..], &["-DPLUGIN", "-shared", "-fPIC", path]].concat());
        sandbox.program("program", &[]);
        assert_eq!(load(&sandbox, (&["open", "DIR/plugin.so"], "")), held(COPY), "{path}");
    }
    sandbox.program("linked", &linked);
    let mut command = sandbox.command(sandbox.path("linked"));
    command.env("LD_LIBRARY_PATH", sandbox.path("copy"));
    assert_eq!(sandbox.got(&mut command), held(COPY));
}

/// As many tools, it replaces `dlopen`. It has as many thread-local variables at fixed places as jemalloc 5.3, which is why the container has
/// [`divvy_share::TUNABLES`].
#[test]
fn a_program_with_a_preloaded_library_has_both() {
    const PRELOADED: &str = "
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <unistd.h>
        __thread char variables[2632] __attribute__((tls_model(\"initial-exec\")));
        void *dlopen(const char *name, int flags) {
            variables[0] = write(1, \"replaced\\n\", 9);
            return ((void *(*)(const char *, int)) dlsym(RTLD_NEXT, \"dlopen\"))(name, flags);
        }";
    let sandbox = Sandbox::new();
    sandbox.program("program", &[]);
    let preloaded = sandbox.path("preloaded.so");
    compile(PRELOADED, &preloaded, &["-shared", "-fPIC"]);
    let mut command = sandbox.command(sandbox.path("program"));
    command.arg("open").arg(sandbox.path(COPY)).env("LD_PRELOAD", &preloaded);
    assert!(command.output().unwrap().stdout.starts_with(b"replaced\n"));
    assert_eq!(sandbox.got(&mut command), held(COPY));
}

/// Threads with the smallest stack that the C library allows.
#[test]
fn a_thread_with_a_small_stack_starts() {
    const PROGRAM: &str = "
        #include <limits.h>
        #include <pthread.h>
        static void *run(void *value) { return value; }
        int main(void) {
            pthread_attr_t attributes;
            pthread_t thread;
            return pthread_attr_init(&attributes) || pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN)
                || pthread_create(&thread, &attributes, run, 0) || pthread_join(thread, 0);
        }";
    let sandbox = Sandbox::new();
    compile(PROGRAM, &sandbox.path("threads"), &["-pthread"]);
    let status = sandbox.command(sandbox.path("threads")).status();
    assert!(status.unwrap().success());
}

#[test]
fn python_has_the_guard_in_front_of_a_copy() {
    if !divvy_skip::program("python3", "python3") || divvy_skip::emulated("python3 is a program for this machine's own processor")
    {
        return;
    }
    const PROGRAM: &str = "
import ctypes, sys
library, context, pointer = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p(), ctypes.c_uint64()
assert library.cuInit(0) == library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == library.cuCtxSetCurrent(context) == 0
code = library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(2048 << 20))
print(open('/proc/self/maps').read())
sys.exit(code)";
    let sandbox = Sandbox::new();
    let mut command = sandbox.command("python3");
    command.args(["-c", PROGRAM]).arg(sandbox.path("copy/libcuda.so.1"));
    assert_eq!(sandbox.got(&mut command), held(COPY));
}

/// The loader continues its search where it finds a library for another machine; it must not stop because the guard was there.
#[test]
fn a_file_that_the_loader_passes_over_is_passed_over() {
    let sandbox = Sandbox::new();
    sandbox.program("program", &[]);
    fs::create_dir(sandbox.path("other")).unwrap();
    for (name, at, byte) in [("32 bits", 4, 1), ("another machine", 18, 40)] {
        let mut library = fs::read(sandbox.path(COPY)).unwrap();
        library[at] = byte;
        fs::write(sandbox.path("other/libcuda.so.1"), library).unwrap();
        assert_eq!(
            load(&sandbox, (&["open", "libcuda.so.1"], "DIR/other:DIR/copy")),
            held(COPY),
            "{name}"
        );
    }
}

/// NVML's stand-ins here are two libraries with one function; `divvy-guard-nvml` has its own tests.
#[test]
fn a_copy_of_nvml_is_behind_its_shadow_and_cudas_is_its_own() {
    let sandbox = Sandbox::new();
    let library = |source: &str, name: &str, arguments: &[&str]| {
        let all = [&["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"][..], arguments].concat();
        compile(source, &sandbox.path(name), &all);
    };
    library("int real(void) { return 1; }", "libnvidia-ml.so.real", &[]);
    library("int real(void) { return 7; }", "copy/libnvidia-ml.so.1", &[]);
    compile(
        "",
        &sandbox.path("stub.so"),
        &["-shared", &format!("-Wl,-soname,{}", sandbox.text("libnvidia-ml.so.real"))],
    );
    let stub = sandbox.text("stub.so");
    library(
        "int shadow(void) { return 10; }",
        "libnvidia-ml.so.1",
        &["-Wl,--no-as-needed", &stub],
    );
    let program = "#define _GNU_SOURCE\n#include <dlfcn.h>\nint main(int count, char **words) {
            void *cuda = count > 1 ? dlopen(words[1], RTLD_NOW) : RTLD_DEFAULT, *nvml = count > 1 ? dlopen(words[2], RTLD_NOW) : RTLD_DEFAULT;
            if (!dlsym(cuda, \"cuInit\") || !dlsym(nvml, \"real\")) return 100;
            return ((int (*)()) dlsym(nvml, \"shadow\"))() + ((int (*)()) dlsym(nvml, \"real\"))();
        }";
    compile(program, &sandbox.path("two"), &[]);
    for (cuda, nvml, expected) in [
        ("copy/libcuda.so.1", "copy/libnvidia-ml.so.1", 17),
        ("libcuda.so.1", "copy/libnvidia-ml.so.1", 17),
        ("copy/libcuda.so.1", "libnvidia-ml.so.1", 11),
    ] {
        let mut command = sandbox.command(sandbox.path("two"));
        let status = command.arg(sandbox.path(cuda)).arg(sandbox.path(nvml)).status();
        assert_eq!(status.unwrap().code(), Some(expected), "{cuda} {nvml}");
    }
    // The loader finds both before it looks for what the first one needs.
    let copies = ["copy/libcuda.so.1", "copy/libnvidia-ml.so.1"].map(|name| sandbox.text(name));
    compile(
        program,
        &sandbox.path("linked"),
        &["-Wl,--no-as-needed", &copies[0], &copies[1]],
    );
    let mut command = sandbox.command(sandbox.path("linked"));
    let status = command.env("LD_LIBRARY_PATH", sandbox.path("copy")).status();
    assert_eq!(status.unwrap().code(), Some(17));
}

#[test]
fn without_the_guard_a_program_has_the_copy() {
    let sandbox = Sandbox::new();
    sandbox.program("program", &[]);
    fs::remove_file(sandbox.path("libcuda.so.1")).unwrap();
    assert_eq!(load(&sandbox, (&["open", "DIR/copy/libcuda.so.1"], "")), free(COPY));
}
