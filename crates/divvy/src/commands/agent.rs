//! `divvy agent`: merges the flags and the configuration file, and runs the agent.

use anyhow::Context as _;
use divvy_agent::config::{Config, DeviceListStrategy, DriverSpecMode, FileConfig};

use crate::cli::{AgentArgs, DriverSpec, Strategy};

/// Run the agent until SIGTERM or SIGINT arrives.
pub async fn run(args: AgentArgs) -> anyhow::Result<()> {
    let stopped = super::until_stopped(args.exit_with_stdin)?;
    Ok(divvy_agent::run(configuration(args)?, stopped).await?)
}

/// Merge the configuration in ascending precedence: defaults, the file, then environment variables and flags.
fn configuration(args: AgentArgs) -> anyhow::Result<Config> {
    // The pattern names every field, so that the compiler reports a flag that is not used here.
    let AgentArgs {
        node_name,
        cluster,
        kubelet_dir,
        cdi_dir,
        state_dir,
        sys_root,
        probe,
        nvml_library,
        driver_root,
        driver_spec,
        memory_unit,
        reserve_memory,
        device_list_strategy,
        metrics,
        health_recovery,
        probe_interval,
        config: file,
        exit_with_stdin: _,
    } = args;
    let mut config = Config::new("");
    if let Some(path) = file {
        let settings = FileConfig::read(&path)?;
        settings
            .apply(&mut config)
            .map_err(|(key, text)| anyhow::anyhow!("--config {}: {key}: {text}", path.display()))?;
    }
    fn set<T>(from: Option<T>, to: &mut T) {
        if let Some(value) = from {
            *to = value;
        }
    }
    set(node_name, &mut config.node_name);
    set(kubelet_dir, &mut config.kubelet_dir);
    set(cdi_dir, &mut config.cdi_dir);
    set(sys_root, &mut config.sys_root);
    set(driver_root, &mut config.driver_root);
    set(
        driver_spec.map(|mode| match mode {
            DriverSpec::Auto => DriverSpecMode::Auto,
            DriverSpec::Off => DriverSpecMode::Off,
        }),
        &mut config.driver_spec,
    );
    set(memory_unit, &mut config.memory_unit);
    set(reserve_memory, &mut config.reserve_memory);
    set(health_recovery, &mut config.health_recovery);
    set(probe_interval, &mut config.probe_interval);
    set(state_dir.map(Some), &mut config.state_dir);
    set(nvml_library.map(Some), &mut config.nvml_library);
    set(metrics.map(Some), &mut config.metrics);
    set(cluster.kubeconfig.map(Some), &mut config.kubeconfig);
    set(cluster.context.map(Some), &mut config.context);
    set(
        device_list_strategy.map(|strategy| match strategy {
            Strategy::Auto => DeviceListStrategy::Auto,
            Strategy::Cdi => DeviceListStrategy::Cdi,
            Strategy::Envvar => DeviceListStrategy::Envvar,
        }),
        &mut config.device_list_strategy,
    );
    if let Some(probe) = probe {
        config.probe = Some(probe.parse().map_err(anyhow::Error::msg).context("--probe")?);
    }
    Ok(config)
}
