//! Runs the programs that have NVIDIA's names.

use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

use divvy_nvidia_config::{EarlyExit, Environment, Invocation, NvidiaProgram};
use tracing::warn;

use super::labels::label;
use super::node_feature::ClusterOptions;
use super::surroundings::other_root;
use super::{ConfigSource, LoadedConfig, Surroundings, device_plugin, manage_config, mps, mps_control_daemon};
use crate::Error;

/// Run in place of one of NVIDIA's programs, with this process's arguments and environment.
#[expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the help, or what is wrong with the arguments"
)]
pub fn main(program: NvidiaProgram) -> ExitCode {
    let arguments: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    if let [first, rest @ ..] = arguments.as_slice()
        && first == mps::IN_ROOT
    {
        return mps::run_in_root(rest);
    }
    let variables = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let environment: Environment = variables.collect();
    let invocation = match Invocation::parse(program, env!("CARGO_PKG_VERSION"), &arguments, &environment) {
        Ok(invocation) => invocation,
        Err(EarlyExit { text, is_error: true }) => {
            eprint!("{text}");
            return ExitCode::FAILURE;
        }
        Err(EarlyExit { text, is_error: false }) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
    };
    let level = invocation.filled("log-level").map(str::to_owned);
    divvy_program::run(level.as_deref(), async move {
        run(program, invocation).await.map(|()| 0).map_err(Into::into)
    })
}

async fn run(program: NvidiaProgram, invocation: Invocation) -> Result<(), Error> {
    if let Some(text) = invocation.warning() {
        warn!("{text}");
    }
    if invocation.is_mount_shm() {
        let mps = super::MpsSurroundings::of_pod(Path::new("/"), super::surroundings::variable)?;
        mps::mount_shm(&mps.shm(), Path::new("/proc"))?;
        return if mps.for_shares {
            mps::mount_pipe(&crate::mps::pipe(Path::new("/")), Path::new("/proc"))
        } else {
            Ok(())
        };
    }
    let stop = divvy_program::until_stopped(other_root().is_some()).map_err(|error| Error::Ended {
        part: "the wait for signals",
        text: error.to_string(),
    })?;
    match program {
        NvidiaProgram::ConfigManager => {
            let options = invocation.config_manager();
            manage_config(options.map_err(|error| Error::ConfigManager(error.to_string()))?, stop).await
        }
        NvidiaProgram::DevicePlugin => {
            with_driver(invocation, |source, surroundings| device_plugin(source, surroundings, stop)).await
        }
        NvidiaProgram::FeatureDiscovery => {
            let cluster = ClusterOptions {
                kubeconfig: invocation.filled("kubeconfig").map(Into::into),
                node: invocation.text("node-name").unwrap_or_default().to_owned(),
                namespace: invocation.filled("namespace").unwrap_or("default").to_owned(),
                pod: invocation.filled("pod-name").map(str::to_owned),
            };
            with_driver(invocation, |source, surroundings| label(source, cluster, surroundings, stop)).await
        }
        NvidiaProgram::MpsControlDaemon => {
            with_driver(invocation, |source, surroundings| {
                mps_control_daemon(source, surroundings, stop)
            })
            .await
        }
    }
}

/// Run a program that reads a configuration and asks the driver, and remove the directory of its probe.
async fn with_driver<F>(invocation: Invocation, work: impl FnOnce(ConfigSource, Surroundings) -> F) -> Result<(), Error>
where
    F: Future<Output = Result<(), Error>>,
{
    let file = invocation.config_file().map(Into::into);
    let source = ConfigSource::new(file, move |text| {
        let (config, warnings) = invocation.config(text)?;
        Ok(LoadedConfig { config, warnings })
    });
    let surroundings = Surroundings::of_pod()?;
    let probe_dir = surroundings.probe_dir.clone();
    let ended = work(source, surroundings).await;
    match std::fs::remove_dir_all(&probe_dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => warn!("{} is left over: {error}", probe_dir.display()),
        _ => {}
    }
    ended
}
