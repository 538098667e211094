//! Programs that must not notice the library.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::process::{Command, Output};

use divvy_shadow_testkit::compile;

use crate::sandbox::{COPY, Sandbox, free, said};

/// Run a command with the library and without.
fn both(sandbox: &Sandbox, program: &str, arguments: &[&str]) -> [Output; 2] {
    let with = sandbox.command(program).args(arguments).output();
    let without = sandbox.command(program).args(arguments).env_remove("LD_AUDIT").output();
    [with, without].map(Result::unwrap)
}

/// The program finds its functions in the same libraries as without the guard.
#[test]
fn a_program_without_cuda_has_no_guard() {
    let sandbox = Sandbox::new();
    compile(
        "#include <stdio.h>\nint main(void) { FILE *maps = fopen(\"/proc/self/maps\", \"r\"); for (int c; (c = getc(maps)) != EOF;) putchar(c); }",
        &sandbox.path("maps"),
        &[],
    );
    let [with, without] = both(&sandbox, &sandbox.text("maps"), &[]);
    assert_eq!(said(&with), "");
    let libraries = |output: &Output| {
        let text = String::from_utf8(output.stdout.clone()).unwrap();
        let mut paths: Vec<String> = text
            .lines()
            .filter_map(|line| Some(line[line.find('/')?..].to_owned()))
            .collect();
        paths.dedup();
        paths
    };
    let mut expected = libraries(&without);
    let (mut libraries, audit) = (libraries(&with), sandbox.text("libdivvy-guard-audit.so"));
    assert!(libraries.contains(&audit), "{libraries:?}");
    libraries.retain(|path| *path != audit);
    libraries.sort();
    expected.sort();
    assert_eq!(libraries, expected);
    // What is in the program's own namespace, and the first definition of each function.
    compile(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <link.h>\n#include <stdio.h>
        static int show(struct dl_phdr_info *info, size_t size, void *data) { puts(info->dlpi_name); return 0; }
        int main(void) {
            const char *names[] = { \"dlopen\", \"dlsym\", \"malloc\", \"cuInit\", \"la_objsearch\" };
            dl_iterate_phdr(show, NULL);
            for (int i = 0; i < 5; i++) {
                Dl_info info = { 0 };
                void *found = dlsym(RTLD_DEFAULT, names[i]);
                printf(\"%s %s\\n\", names[i], found && dladdr(found, &info) ? info.dli_fname : \"\");
            }
        }",
        &sandbox.path("names"),
        &[],
    );
    let [with, without] = both(&sandbox, &sandbox.text("names"), &[]);
    assert_eq!((said(&with), with.stdout), (said(&without), without.stdout));
}

#[test]
fn a_program_without_glibcs_loader_is_unaffected() {
    const SOURCE: &str = "#include <stdio.h>\nint main(void) { puts(\"runs\"); return 3; }";
    let sandbox = Sandbox::new();
    compile(SOURCE, &sandbox.path("static"), &["-static"]);
    let mut programs = vec!["static"];
    if divvy_skip::program("musl-gcc", "musl-tools") {
        let mut compiler = Command::new("musl-gcc");
        fs::write(sandbox.path("source.c"), SOURCE).unwrap();
        compiler.arg("-o").arg(sandbox.path("musl")).arg(sandbox.path("source.c"));
        assert!(compiler.status().unwrap().success());
        programs.push("musl");
    }
    for program in programs {
        for output in both(&sandbox, &sandbox.text(program), &[]) {
            assert_eq!(
                (output.status.code(), output.stdout.as_slice()),
                (Some(3), &b"runs\n"[..]),
                "{program}"
            );
            assert_eq!(said(&output), "", "{program}");
        }
    }
}

/// The loader ignores `LD_AUDIT` in programs that have rights of their own.
#[test]
fn a_setuid_program_is_as_without_the_library() {
    const NOBODY: u32 = 65534;
    let sandbox = Sandbox::new();
    sandbox.program("program", &[]);
    let program = sandbox.path("program");
    if chown(&program, Some(NOBODY), None).is_err() {
        return divvy_skip::skipped("a program cannot be given to another user: that takes root");
    }
    fs::set_permissions(sandbox.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(sandbox.path("ledger"), fs::Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    let mut command = sandbox.command(&program);
    command.arg("open").arg(sandbox.path(COPY));
    assert_eq!(sandbox.got(&mut command), free(COPY));
}
