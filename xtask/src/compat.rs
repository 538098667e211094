//! `cargo xtask compat`: the guard in the root file systems of distributions, and with third-party programs.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};

use crate::build;
use crate::target_directory::debug_directory;

const HELP: &str = "\
Run programs with the simulated driver alone and with Divvy's guard in its place, and compare what they find

usage: cargo xtask compat [--only NAME]... [--keep]

The GPU has 8 GiB, and the share is 1 GiB. A program that is held sees 1 GiB, and an allocation of 2 GiB is refused; everything else must be the same. A
program that does not use the guard's libraries must not notice them at all.

Root file systems, made by debootstrap, each with all ways of loading:
  ubuntu-18.04  debian-10  ubuntu-20.04  debian-11  ubuntu-22.04  debian-12  ubuntu-24.04  debian-13  musl  alpine

Ways of loading:
  dlopen            dlopen(\"libcuda.so.1\"), as the CUDA runtime library does it
  plain-name        dlopen(\"libcuda.so\")
  proc-address      the functions by cuGetProcAddress and not by dlsym
  deepbind          dlopen with RTLD_DEEPBIND
  dlmopen           a namespace of its own
  linked            linked with -lcuda
  static            a program with a static glibc, which loads the library
  setuid            a program that is setuid, started by another user
  jemalloc          with a preloaded malloc
  ldconfig          after ldconfig in the container
  ctypes            Python
  java              a library for Java, which loads it
  private-copy      a copy of the driver's library, which avoids the guard
  private-copy-both the same with --guard both, which holds it
  no-cuda           a program that does not use CUDA

Third-party programs, in debian-12: pynvml, nvitop, numba, cupy, torch

  --only NAME   run only what has this name. A root file system and a way together: only this way in this root file system
  --keep        keep the working directory, with the compiled programs and the simulated driver, and print its path

Needs root on Debian or Ubuntu, the packages debootstrap, gcc, musl-tools, default-jdk-headless, curl, and python3-pip, and the mirrors of Debian, Ubuntu, and
Python's package index. A root file system whose mirror cannot be reached is skipped, and the output says so. Everything that
is downloaded is in ~/.cache/divvy-compat/ (10 GB).

The exit status is 1 if a row is not as expected.

Examples:
  cargo xtask compat
  cargo xtask compat --only debian-13 --only setuid
  cargo xtask compat --only torch";

pub(crate) fn run(args: &[&str]) -> Result<ExitCode> {
    if args.iter().any(|arg| matches!(*arg, "--help" | "-h")) {
        #[expect(clippy::print_stdout, reason = "requested help is output")]
        {
            println!("{HELP}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    crate::cargo::cargo(&["build", "--quiet", "-p", "divvy-compat", "-p", "divvy-contain"])?;
    build::guard()?;
    let program = debug_directory().join("divvy-compat");
    // Replace this process, so that Ctrl-C and the exit status are the program's own.
    let error = Command::new(&program).args(args).exec();
    Err(error).with_context(|| format!("{} could not be run", program.display()))
}
