//! Every check of Divvy that needs a real GPU, in one command: `cargo xtask gpu`.
//!
//! The program runs without cargo, from a directory with Divvy's built programs (`cargo xtask gpu pack`), on a machine that has an NVIDIA driver and no
//! Kubernetes. The programs under test are those that ship: the agent, the probe, and the guard's libraries. The cluster around them is the testbed's.
//! What a check measures with the guard, it measures without it, too.
//!
//! The guard is not mounted into containers here, because a machine may not allow mount namespaces. In a copy of each library, the paths of its files are
//! replaced by others of the same length, as in the guard's own tests. A program finds the copy by its path or by LD_LIBRARY_PATH. Only the last check, the
//! demo, has containers.
//!
//! With `--simulated`, the driver is the simulated one.

#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod checks;
mod container;
mod driver;
mod findings;
mod pack;
mod program;
mod report;
mod rig;

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result};

use self::arguments::{GpuCheckArguments, USAGE};
use self::bench::GpuCheckBench;
use self::driver::CheckedDriver;
use self::findings::FindingStatus;
use self::pack::Pack;
use self::report::GpuCheckReport;

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime
        .context("the program cannot wait for others")
        .and_then(|runtime| runtime.block_on(run()));
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "the final error message")]
            {
                eprintln!("divvy-gpu-check: {error:#}");
            }
            ExitCode::from(2)
        }
    }
}

/// Run the checks. Report whether none of them failed.
async fn run() -> Result<bool> {
    let began = Instant::now();
    let Some(arguments) = GpuCheckArguments::parse(std::env::args().skip(1))? else {
        writeln!(std::io::stdout(), "{USAGE}")?;
        return Ok(true);
    };
    let own = std::env::current_exe().context("this program's own path is not known")?;
    let pack = Pack::beside(&own).await?;
    // A short path, because sockets in it may have at most 107 bytes.
    let directory = tempfile::Builder::new()
        .prefix("dg")
        .tempdir()
        .context("no temporary directory")?;
    let driver = CheckedDriver::find(&arguments.driver, &pack, directory.path()).await?;
    let mut report = GpuCheckReport::create(&arguments.report, &driver)?;
    let mut bench = GpuCheckBench::new(pack, driver, directory.path().to_owned(), arguments.seconds);
    for check in &arguments.checks {
        let left = arguments.time.saturating_sub(began.elapsed());
        let about = report.begin(*check)?;
        writeln!(std::io::stdout(), "{about}")?;
        let (findings, took) = check.run_within(left, &mut bench).await;
        writeln!(std::io::stdout(), "{}", report.end(*check, findings, took)?)?;
    }
    bench.end().await;
    report.complete()?;
    writeln!(std::io::stdout(), "{}", report.summary())?;
    Ok(report.statuses().all(|status| status != FindingStatus::Fail))
}
