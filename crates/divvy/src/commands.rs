//! One module per command, which turns parsed arguments into actions.

pub mod audit;
pub mod cdi;
#[cfg(feature = "completions")]
pub mod completions;
pub mod configure;
#[cfg(feature = "demo")]
pub mod demo;
pub mod doctor;
pub mod hook;
pub mod inspect;
pub mod labels;
mod probe;
mod progress;
pub mod runtime_config;
pub mod scheduler_config;
pub mod simulate;
pub mod smi;
pub mod smoke;
pub mod system;
#[cfg(feature = "top")]
pub mod top;
pub mod uninstall;
pub mod version;
mod watch;
pub mod web;
pub mod why;

use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use crate::cli::{Cli, DivvyCommand, InspectCommand};

/// Run the command and return the exit status: 0 on success, 1 if the command ran but reports a problem.
pub async fn run(cli: Cli) -> anyhow::Result<u8> {
    let well = match cli.command {
        DivvyCommand::Doctor(args) => return doctor::run(*args).await,
        DivvyCommand::Smi(args) => return smi::run(*args).await,
        DivvyCommand::Smoke(args) => return smoke::run(*args).await,
        DivvyCommand::CleanUpAfterSmoke => smoke::clean_up().await.map(|()| true),
        DivvyCommand::CopySmokeTo { directory } => smoke::copy_to(&directory).map(|()| true),
        DivvyCommand::Agent(args) => divvy_agent::main(*args).await.map_err(Into::into).map(|()| true),
        DivvyCommand::Extender(args) => divvy_extender::main(*args).await.map_err(Into::into).map(|()| true),
        DivvyCommand::Explainer(args) => divvy_explainer::main(args).await.map_err(Into::into).map(|()| true),
        DivvyCommand::Inspect(InspectCommand::Gpushare(args)) => inspect::run(args).await.map(|()| true),
        #[cfg(feature = "top")]
        DivvyCommand::Top(args) => top::run(*args).await.map(|()| true),
        #[cfg(not(feature = "top"))]
        DivvyCommand::Top(_) => anyhow::bail!(
            "this divvy was built for the node image, without the screens of `divvy top`; use a divvy built with `cargo build --release`"
        ),
        DivvyCommand::Web(args) => web::run(args).await.map(|()| true),
        DivvyCommand::Why(args) => why::run(args).await.map(|()| true),
        DivvyCommand::Version(args) => version::run(args).await.map(|()| true),
        DivvyCommand::Audit(args) => audit::run(*args).await,
        DivvyCommand::SchedulerConfig(args) => scheduler_config::run(*args).await,
        DivvyCommand::Cdi(command) => cdi::run(command).await,
        DivvyCommand::Labels(args) => labels::run(*args).await.map(|()| true),
        DivvyCommand::Configure(args) => configure::run(*args).await.map(|()| true),
        DivvyCommand::RuntimeConfig(args) => runtime_config::run(&args).map(|()| true),
        DivvyCommand::NvidiaSystem(command) => system::run(command).map(|()| true),
        DivvyCommand::Simulate(args) => simulate::run(*args).await.map(|()| true),
        DivvyCommand::Uninstall(args) => uninstall::run(args).await.map(|()| true),
        #[cfg(feature = "completions")]
        DivvyCommand::Completions(args) => completions::run(&args).map(|()| true),
        #[cfg(not(feature = "completions"))]
        DivvyCommand::Completions(_) => anyhow::bail!(
            "this divvy was built for the node image, without shell completions; use a divvy built with `cargo build --release`"
        ),
        #[cfg(feature = "demo")]
        DivvyCommand::Demo(args) => demo::run(args).await,
        #[cfg(not(feature = "demo"))]
        DivvyCommand::Demo(_) => anyhow::bail!(
            "this divvy was built for the node image, without the simulators that the demo needs; use a divvy built with \
             `cargo build --release --workspace`"
        ),
    }?;
    Ok(u8::from(!well))
}

fn say(line: &str) -> std::io::Result<()> {
    writeln!(std::io::stderr().lock(), "{line}")
}

/// Replace a file atomically: write a temporary file in the same directory, sync it, and rename it.
fn write_whole(file: &Path, text: &str, mode: u32) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = file
        .parent()
        .filter(|directory| !directory.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    // The temporary name starts with a dot, because the kubelet and the engines read their directories while we write, and skip such names.
    let mut new = tempfile::Builder::new().prefix(".divvy-").tempfile_in(directory)?;
    new.write_all(text.as_bytes())?;
    new.as_file().set_permissions(std::fs::Permissions::from_mode(mode))?;
    new.as_file().sync_all()?;
    new.persist(file).map_err(|error| error.error)?;
    std::fs::File::open(directory)?.sync_all()
}

/// Read a text file that another program wrote. A file with more than `largest` bytes is an error.
fn read_bounded(file: &Path, largest: u64) -> std::io::Result<String> {
    // Opening a pipe blocks until another process writes to it, perhaps indefinitely. The pipes of a shell's `<(command)` are in /dev or /proc,
    // and always have a writer.
    let is_pipe = std::fs::metadata(file).is_ok_and(|found| found.file_type().is_fifo());
    if is_pipe && !file.starts_with("/dev") && !file.starts_with("/proc") {
        return Err(std::io::Error::other("it is a pipe, not a file"));
    }
    bounded(std::fs::File::open(file)?, largest)
}

/// Read text from an open file with the limit of [`read_bounded`].
fn bounded(from: impl std::io::Read, largest: u64) -> std::io::Result<String> {
    let mut text = Vec::new();
    let length = from.take(largest + 1).read_to_end(&mut text)?;
    if u64::try_from(length).unwrap_or(u64::MAX) > largest {
        return Err(std::io::Error::other(format!("it has more than {largest} bytes")));
    }
    String::from_utf8(text).map_err(|_| std::io::Error::other("it is not UTF-8 text"))
}
