//! Starts a program in its own mount namespace, as if a container runtime had started it from an image. The namespace contains the given mounts and the
//! image: a root file system, or only the program and its C library.
//!
//! The namespace belongs to root, or to a user namespace, which every user may have on most machines. Nothing on the machine changes, and everything
//! is gone when the program ends. Only mounts are separate: PIDs, users, and the network are the machine's.

#![forbid(unsafe_code)]

mod arguments;
mod image;
mod mounts;
mod namespace;

use std::convert::Infallible;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};

use self::arguments::{ContainArguments, ContainerTask};
use self::image::ProgramImage;
use self::mounts::BindMount;

fn main() -> ExitCode {
    let done = match ContainArguments::parse(std::env::args_os().skip(1)) {
        Ok(ContainArguments::Check) => namespace::enter(),
        Ok(ContainArguments::Run(task)) => run(&task).map(|never| match never {}),
        Err(error) => Err(error),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "the final error message")]
            {
                eprintln!("divvy-contain: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Replace this process by the program. Return only if that fails.
fn run(task: &ContainerTask) -> Result<Infallible> {
    match &task.image {
        Some(directory) => run_in(directory, task),
        None => run_alone(task),
    }
}

/// Run a program of an image.
fn run_in(image: &Path, task: &ContainerTask) -> Result<Infallible> {
    namespace::enter()?;
    let root = mounts::copy_on_write(image, &task.root)?;
    let proc = BindMount::same(Path::new("/proc"));
    for mount in [&proc].into_iter().chain(&task.mounts) {
        mount.make(&root)?;
    }
    links(task, &root)?;
    image::update_cache(&root, &task.mounts)?;
    enter(&root)?;
    let error = Command::new(&task.program).args(&task.arguments).exec();
    Err(error).with_context(|| format!("{} could not be started in the container", task.program.display()))
}

/// Run a program of this machine, with its C library and nothing else.
fn run_alone(task: &ContainerTask) -> Result<Infallible> {
    let image = ProgramImage::of(&task.program)?;
    namespace::enter()?;
    let root = &task.root;
    mounts::empty(root)?;
    let of_image = image.files.iter().map(|file| BindMount::same(file));
    let proc = BindMount::same(Path::new("/proc"));
    for mount in of_image.chain([proc]).chain(task.mounts.iter().cloned()) {
        mount.make(root)?;
    }
    links(task, root)?;
    image::find_libraries(root, &image, &task.mounts)?;
    enter(root)?;
    // The loader starts the program: a program names its loader by a path that may be a link, and the container has no links but those of libraries.
    let mut command = Command::new(&image.loader);
    command.arg(&task.program).args(&task.arguments);
    let error = command.exec();
    Err(error).with_context(|| format!("{} could not be started in the container", task.program.display()))
}

fn links(task: &ContainerTask, root: &Path) -> Result<()> {
    for (target, path) in &task.links {
        mounts::link(target, root, path).with_context(|| format!("the link {} could not be made", path.display()))?;
    }
    Ok(())
}

fn enter(root: &Path) -> Result<()> {
    nix::unistd::chroot(root).with_context(|| format!("chroot to {} failed", root.display()))?;
    nix::unistd::chdir("/").context("chdir to the container's / failed")
}
