//! `divvy-hook`: a hook that prepares a container in ways that mounts and device nodes cannot. The container runtime runs it before the container
//! starts.
//!
//! A hook runs with the host's privileges, but the image controls the hook's current directory and environment variables
//! (CVE-2025-23266). Therefore:
//!
//! - The program is static, so that no loader reads these variables.
//! - It first executes itself again without any environment variables.
//! - It opens every path of the image through one type ([`root::ImageRoot`]), which keeps the path beneath the image's root.
//! - It runs no program of the image.
//! - It does not use inherited file descriptors, and does not pass them to anything that the image could reach.

#![forbid(unsafe_code)]

mod cache;
mod compat;
mod error;
mod legacy;
mod links;
mod params;
mod profile;
mod root;
mod state;

use std::convert::Infallible;
use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use divvy_oci::hook::arguments::{HELP, HookCall, OnFailure};
use rustix::fs::Mode;
use rustix::process::{DumpableBehavior, set_dumpable_behavior, umask};

use error::{Error, Result, complain};
use root::ImageRoot;

fn main() -> ExitCode {
    if std::env::vars_os().next().is_some() {
        return match again_without_variables() {
            Ok(never) => match never {},
            Err(error) => complain(&error),
        };
    }
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let done = settle().and_then(|()| Ok(HookCall::parse(&words)?)).and_then(run);
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&error),
    }
}

/// Execute this program again without environment variables. A process cannot safely remove its own variables, and the kernel
/// would still show them in `/proc`.
fn again_without_variables() -> Result<Infallible> {
    let error = Command::new("/proc/self/exe")
        .arg0("divvy-hook")
        .args(std::env::args_os().skip(1))
        .env_clear()
        .exec();
    Err(Error::host("execute itself again through", "/proc/self/exe", error))
}

/// Reset what the program inherited: the current directory and the file mode mask. Also prevent other processes from reading its
/// memory.
fn settle() -> Result<()> {
    std::env::set_current_dir("/").map_err(|error| Error::host("change the directory to", "/", error))?;
    umask(Mode::WGRP | Mode::WOTH);
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|error| Error::host("hide the memory of", "divvy-hook", error.into()))
}

fn run(hook: HookCall) -> Result<()> {
    let (done, on_failure) = match hook {
        HookCall::Help => return print(HELP),
        HookCall::Version => return print(&format!("divvy-hook {}\n", env!("CARGO_PKG_VERSION"))),
        HookCall::Unknown(name) => {
            // A newer spec may name a hook that this version lacks. The container starts nevertheless, as with NVIDIA's program.
            let _ = writeln!(std::io::stderr(), "divvy-hook: warning: Unsupported CDI hook: {name}");
            return Ok(());
        }
        HookCall::Legacy { environment, words } => return legacy::run(&environment, &words),
        HookCall::CreateSymlinks { links, on_failure } => {
            let root = ImageRoot::open(&state::read()?.root)?;
            (links.iter().try_for_each(|link| links::create(&root, link)), on_failure)
        }
        HookCall::UpdateLdcache {
            directories,
            host_driver,
            compat,
            on_failure,
        } => {
            let state = state::read()?;
            let root = ImageRoot::open(&state.root)?;
            let (first, held) = match &host_driver {
                Some(driver) => match compat::choose(&root, &state.mounts, compat, driver) {
                    Ok((first, held)) => (Ok(first), held),
                    Err(error) => (Err(error), Ok(())),
                },
                None => (compat::remembered(&root), Ok(())),
            };
            let done = first.and_then(|first| {
                // Without directories this is NVIDIA's enable-cuda-compat. A later update-ldcache must find its decision.
                if host_driver.is_some() && directories.is_empty() {
                    compat::remember(&root, first.as_deref())?;
                }
                cache::update(&root, &state.mounts, &directories, first.as_deref())?;
                held
            });
            (done, on_failure)
        }
        HookCall::DisableDeviceNodeModification { on_failure } => {
            let root = ImageRoot::open(&state::read()?.root)?;
            (params::forbid_nodes(&root), on_failure)
        }
        HookCall::UpdateApplicationProfile { on_failure } => {
            let state = state::read()?;
            let root = ImageRoot::open(&state.root)?;
            (profile::write(&root, &state.devices), on_failure)
        }
    };
    match done {
        // A container may work without the hook's files, but not if it does not start (NVIDIA/nvidia-container-toolkit#2026).
        Err(error @ Error::Image { .. }) if on_failure == OnFailure::Ignore => {
            let _ = writeln!(
                std::io::stderr(),
                "divvy-hook: warning: {error}; the container starts without it"
            );
            Ok(())
        }
        done => done,
    }
}

fn print(text: &str) -> Result<()> {
    let written = std::io::stdout().write_all(text.as_bytes());
    written.map_err(|error| Error::host("write to", "standard output", error))
}
