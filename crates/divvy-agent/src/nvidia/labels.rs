//! The agent in place of NVIDIA's GPU feature discovery: the same flags, configuration, and labels.

use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use divvy_hardware::Failure;
use divvy_hardware::client::{ProbeSource, cuda_snapshot, snapshot};
use divvy_labels::{LabeledMachine, Labels, file, labels};
use divvy_nvidia_config::{Discovery, NvidiaConfig, SleepInterval};
use divvy_nvidia_plugin::{Nvml, Platform, platform};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::node_feature::{ClusterOptions, PublishedFeature};
use super::{ConfigSource, LoadedConfig, Surroundings, probe, refusal, tegra, vfio};
use crate::Error;
use crate::labels::{DescribedHost, FeatureFile};

/// The timeout for the driver's description of all GPUs. It is long, because the driver's initialization wakes up each GPU.
const ANSWER: Duration = Duration::from_secs(75);

/// The longest pause after labels could not be written.
const RETRY: Duration = Duration::from_secs(60);

/// The driver's version in the labels of a Tegra and of GPUs that are passed through, which have none (NVIDIA's GPU feature discovery,
/// internal/resource/cuda-lib.go and sysfs-lib.go).
const NO_DRIVER: &str = "unknown.unknown.unknown";

/// Keep the node's labels up to date until `stop` is cancelled, or write them once.
///
/// # Errors
/// Fails if the configuration is wrong, or if the driver does not answer and the configuration says not to wait for it.
pub(super) async fn label(
    source: ConfigSource,
    cluster: ClusterOptions,
    surroundings: Surroundings,
    stop: CancellationToken,
) -> Result<(), Error> {
    let mut reloads = source.watch();
    let mut loaded = load(&source)?;
    let mut output = DiscoveryOutput::new(&loaded.config, &cluster).await?;
    let started = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    loop {
        let config = &loaded.config;
        let host = DescribedHost::read(&surroundings.root, Path::new(&config.feature_discovery.machine_type_file));
        let machine = match describe(config, &surroundings, &host, started).await {
            Ok(machine) => machine,
            Err(error) if config.fail_on_init_error => return Err(Error::Labels(error.to_string())),
            Err(error) => {
                warn!("{error}; the labels say that there is no GPU");
                host.without_gpus(started)
            }
        };
        let found = labels(&machine, config).map_err(|error| Error::Labels(error.to_string()))?;
        let written = output.write(&found).await;
        if config.feature_discovery.oneshot {
            return written;
        }
        let is_written = match (written, &output) {
            (Ok(()), _) => true,
            // The API server may be away for a while. A file that cannot be written needs an operator.
            (Err(error), DiscoveryOutput::NodeFeature(_)) => {
                error!("{error}; trying again");
                false
            }
            (Err(error), _) => return Err(error),
        };
        let next = async {
            match pause(config.feature_discovery.sleep_interval, is_written) {
                Some(time) => tokio::time::sleep(time).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // The labels stay: they are still true, and another agent is probably about to start.
            () = stop.cancelled() => return Ok(()),
            () = next => {}
            () = reloads.changed() => match load(&source) {
                Ok(next) => {
                    loaded = next;
                    output = DiscoveryOutput::new(&loaded.config, &cluster).await?;
                    info!("the configuration has been read again");
                }
                Err(error) => error!("{error}; the previous configuration stays in force"),
            }
        }
    }
}

/// Return how long to wait before the labels are made again; `None` means forever. Labels that could not be written are tried again soon.
fn pause(interval: SleepInterval, is_written: bool) -> Option<Duration> {
    match (interval, is_written) {
        (SleepInterval::Every(time), true) => Some(time),
        (SleepInterval::Every(time), false) => Some(time.min(RETRY)),
        (SleepInterval::Infinite, true) => None,
        (SleepInterval::Infinite, false) => Some(RETRY),
    }
}

fn load(source: &ConfigSource) -> Result<LoadedConfig, Error> {
    let loaded = source.load().map_err(|error| Error::Labels(error.to_string()))?;
    loaded.warnings.iter().for_each(|warning| warn!("{warning}"));
    Ok(loaded)
}

/// Why the driver does not describe the machine.
#[derive(Debug, thiserror::Error)]
enum NotDescribed {
    #[error("failed to initialize NVML: {0}")]
    Nvml(String),
    #[error("this node is a Tegra, and CUDA does not describe its GPU: {0}")]
    Cuda(Failure),
}

/// Describe the machine with facts from the driver and the kernel.
async fn describe(
    config: &NvidiaConfig,
    surroundings: &Surroundings,
    host: &DescribedHost,
    timestamp: u64,
) -> Result<LabeledMachine, NotDescribed> {
    if config.discovery == Discovery::Vfio {
        let mounted = Path::new(&config.plugin.container_driver_root);
        return Ok(LabeledMachine {
            driver: NO_DRIVER.to_owned(),
            gpus: vfio::gpus(&surroundings.root, &[mounted, &surroundings.root]),
            ..host.without_gpus(timestamp)
        });
    }
    let spawn = probe(config, surroundings);
    let has_tegra_files = tegra::has_files(config, surroundings);
    let is_tegra = |answer: &Nvml<'_>| platform(config.discovery, has_tegra_files, answer) == Platform::Tegra;
    if !is_tegra(&Nvml::Silent) {
        let found = snapshot(&ProbeSource::Spawn(spawn.clone()), ANSWER).await;
        if !is_tegra(&tegra::nvml(found.as_ref())) {
            let found =
                found.map_err(|failure| NotDescribed::Nvml(refusal(config, &failure).unwrap_or_else(|| failure.to_string())))?;
            return Ok(host.machine(found, timestamp));
        }
    }
    let found = cuda_snapshot(&spawn, ANSWER).await;
    let found = found.map_err(NotDescribed::Cuda)?;
    Ok(LabeledMachine {
        driver: NO_DRIVER.to_owned(),
        ..host.machine(found, timestamp)
    })
}

/// Where the labels are written.
enum DiscoveryOutput {
    Stdout,
    File(FeatureFile),
    NodeFeature(Box<PublishedFeature>),
}

impl DiscoveryOutput {
    async fn new(config: &NvidiaConfig, cluster: &ClusterOptions) -> Result<DiscoveryOutput, Error> {
        let discovery = &config.feature_discovery;
        // NVIDIA's static manifests do not set the node's name, which a NodeFeature object needs.
        let has_name = !cluster.node.is_empty();
        if discovery.use_node_feature_api && !has_name && !discovery.output_file.is_empty() {
            warn!(
                "a NodeFeature object needs the node's name, and NODE_NAME is not set; so the labels go to the file {}",
                discovery.output_file
            );
        }
        Ok(
            match (discovery.use_node_feature_api && has_name, discovery.output_file.as_str()) {
                (true, _) => DiscoveryOutput::NodeFeature(Box::new(PublishedFeature::connect(cluster).await?)),
                (false, "") => DiscoveryOutput::Stdout,
                (false, path) => DiscoveryOutput::File(
                    FeatureFile::at(Path::new(path))
                        .ok_or_else(|| Error::Labels(format!("--output-file {path} is not the path of a file")))?,
                ),
            },
        )
    }

    /// Write the labels, unless they are there.
    async fn write(&mut self, found: &Labels) -> Result<(), Error> {
        found.warnings.iter().for_each(|warning| warn!("{warning}"));
        match self {
            DiscoveryOutput::Stdout => {
                let mut stdout = std::io::stdout().lock();
                let written = stdout.write_all(file(found).as_bytes()).and_then(|()| stdout.flush());
                written.map_err(|error| Error::Labels(format!("cannot write to the standard output: {error}")))
            }
            DiscoveryOutput::File(feature) => {
                if feature.write(found)? {
                    info!("wrote {} labels to {}", found.labels.len(), feature.path().display());
                }
                Ok(())
            }
            DiscoveryOutput::NodeFeature(published) => published.write(found).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The retry does not depend on the interval at which the labels are updated.
    #[test]
    fn unwritten_labels_are_tried_again_within_a_minute() {
        let (short, long) = (Duration::from_secs(5), Duration::from_secs(3600));
        for (interval, after_success, after_failure) in [
            (SleepInterval::Every(short), Some(short), Some(short)),
            (SleepInterval::Every(long), Some(long), Some(RETRY)),
            (SleepInterval::Infinite, None, Some(RETRY)),
        ] {
            assert_eq!(pause(interval, true), after_success);
            assert_eq!(pause(interval, false), after_failure);
        }
        assert_eq!(RETRY, Duration::from_secs(60));
    }
}
