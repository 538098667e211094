//! Starts a program in its own mount namespace. The namespace contains only the program, its C library, and the given mounts, as if a container runtime had
//! started an image that contains nothing else.
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

use self::arguments::{Arguments, Task};
use self::image::Image;
use self::mounts::Mount;

fn main() -> ExitCode {
    let done = match Arguments::parse(std::env::args_os().skip(1)) {
        Ok(Arguments::Check) => namespace::enter(),
        Ok(Arguments::Run(task)) => run(&task).map(|never| match never {}),
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
fn run(task: &Task) -> Result<Infallible> {
    let image = Image::of(&task.program)?;
    namespace::enter()?;
    let root = &task.root;
    mounts::empty(root)?;
    let of_image = image.files.iter().map(|file| Mount::same(file));
    let proc = Mount::same(Path::new("/proc"));
    for mount in of_image.chain([proc]).chain(task.mounts.iter().cloned()) {
        mount.make(root)?;
    }
    image::find_libraries(root, &image, &task.mounts)?;
    nix::unistd::chroot(root).with_context(|| format!("chroot to {} failed", root.display()))?;
    nix::unistd::chdir("/").context("chdir to the container's / failed")?;
    // The loader starts the program: a program names its loader by a path that may be a link, and the container has no links but those of libraries.
    let mut command = Command::new(&image.loader);
    command.arg(&task.program).args(&task.arguments);
    let error = command.exec();
    Err(error).with_context(|| format!("{} could not be started in the container", task.program.display()))
}
