//! The agent's configuration: one field per flag, and a configuration file with the same names.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use divvy_model::{MemoryUnit, MiB, Vendor};
use divvy_nvidia_plugin::HealthChecks;

use crate::Error;
use crate::args::{AgentSettings, DeviceDelivery, DriverSpecMode, GuardMode, LabelsMode, MigStrategyArg, OnEscape, ProbeChoice};
use crate::metrics::Allow;

/// The agent's configuration, with one field per flag of `divvy agent`.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// `--kubeconfig`. `None` means `KUBECONFIG`, then `~/.kube/config`, then the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// `--context`, the context within the kubeconfig.
    pub context: Option<String>,
    /// `--node-name`: the name of this node's object in the cluster.
    pub node_name: String,
    /// `--kubelet-dir`: the kubelet's root directory.
    pub kubelet_dir: PathBuf,
    /// `--cdi-dir`: the directory in which the container runtime looks for CDI specs.
    pub cdi_dir: PathBuf,
    /// `--state-dir`. `None` means `<kubelet-dir>/plugins/divvy.dev`.
    pub state_dir: Option<PathBuf>,
    /// `--sys-root`: the directory that contains the node's `/sys`, `/proc`, `/dev`, and `/etc/cdi`.
    pub sys_root: PathBuf,
    /// `--probe`. `None` means that the agent starts the `divvy-probe` next to its own executable.
    pub probe: Option<ProbeChoice>,
    /// `--nvml-library`: passed to a probe that the agent starts.
    pub nvml_library: Option<PathBuf>,
    /// `--driver-root`: the driver's root directory, as a path below `sys_root`.
    pub driver_root: String,
    /// `--driver-spec`: what the agent does about CDI specs that do not match the loaded driver.
    pub driver_spec: DriverSpecMode,
    /// `--guard`: how pods are held to their share where the driver cannot do it.
    pub guard: GuardMode,
    /// `--guard-dir`. `None` means the directory of the agent's executable.
    pub guard_dir: Option<PathBuf>,
    /// `--on-escape`: what the agent does about a program that avoids the guard.
    pub on_escape: OnEscape,
    /// `--mps`: pods use NVIDIA GPUs through CUDA's Multi-Process Service.
    pub mps: bool,
    /// `--memory-unit`: the memory of one device of `gpu-mem`.
    pub memory_unit: MemoryUnit,
    /// `--reserve-memory`: the memory of each GPU that the agent does not share.
    pub reserve_memory: MiB,
    /// `--whole-gpus`: shared GPUs are offered as a whole as well.
    pub whole_gpus: bool,
    /// `--amd-shares`, `--intel-shares`: the vendors whose GPUs are shared although they are not by default.
    pub also_shared: BTreeSet<Vendor>,
    /// `--mig-strategy`: how MIG devices are offered.
    pub mig_strategy: MigStrategyArg,
    /// `--labels`: where the labels of the node's NVIDIA GPUs are written.
    pub labels: LabelsMode,
    /// `--pod-name`: the pod that owns the NodeFeature object of `--labels node-feature`.
    pub pod_name: Option<String>,
    /// `--device-list-strategy`: how containers get their GPUs.
    pub device_list_strategy: DeviceDelivery,
    /// `--metrics`: the address that serves `/healthz`, `/readyz`, and `/metrics`. `None` serves nothing.
    pub metrics: Option<SocketAddr>,
    /// `--dcgm-metrics`: whether the same address serves `/metrics/dcgm`.
    pub dcgm_metrics: bool,
    /// `--metrics-allow`: the names of the metrics that are served. [`AgentConfig::allow`] parses them.
    pub metrics_allow: String,
    /// `--health-recovery`: how long a failed GPU must go without a new error before the agent offers it again.
    pub health_recovery: Duration,
    /// `--disable-health-checks`: the XIDs that do not make a GPU fail. [`AgentConfig::health_checks`] parses them.
    pub disable_health_checks: String,
    /// `--enable-health-checks`: the XIDs that make a GPU fail all the same.
    pub enable_health_checks: String,
    /// `--probe-interval`: the interval between two snapshots of the probe. The probe sends errors that the driver reports
    /// immediately.
    pub probe_interval: Duration,
}

impl AgentConfig {
    /// Return a configuration with all defaults. Only the node's name has no default.
    pub fn new(node_name: impl Into<String>) -> AgentConfig {
        let flags = AgentSettings {
            node_name: Some(node_name.into()),
            ..AgentSettings::default()
        };
        AgentConfig::merged(flags, AgentSettings::default())
    }

    /// Merge the flags and environment variables with the file of `--config`. Flags and environment variables take precedence.
    /// Defaults fill what neither sets.
    pub fn merged(flags: AgentSettings, file: AgentSettings) -> AgentConfig {
        let set = flags.or(file);
        AgentConfig {
            kubeconfig: set.kubeconfig,
            context: set.context,
            node_name: set.node_name.unwrap_or_default(),
            kubelet_dir: set.kubelet_dir.unwrap_or_else(|| "/var/lib/kubelet".into()),
            cdi_dir: set.cdi_dir.unwrap_or_else(|| "/var/run/cdi".into()),
            state_dir: set.state_dir,
            sys_root: set.sys_root.unwrap_or_else(|| "/".into()),
            probe: set.probe,
            nvml_library: set.nvml_library,
            driver_root: set.driver_root.unwrap_or_else(|| "/".to_owned()),
            driver_spec: set.driver_spec.unwrap_or_default(),
            guard: set.guard.unwrap_or_default(),
            guard_dir: set.guard_dir,
            on_escape: set.on_escape.unwrap_or_default(),
            mps: set.mps.unwrap_or(false),
            memory_unit: set.memory_unit.unwrap_or(MemoryUnit::GIB),
            reserve_memory: set.reserve_memory.unwrap_or(MiB::ZERO),
            whole_gpus: set.whole_gpus.unwrap_or(false),
            also_shared: also_shared([(Vendor::Amd, set.amd_shares), (Vendor::Intel, set.intel_shares)]),
            mig_strategy: set.mig_strategy.unwrap_or_default(),
            labels: set.labels.unwrap_or_default(),
            pod_name: set.pod_name,
            device_list_strategy: set.device_list_strategy.unwrap_or_default(),
            metrics: set.metrics,
            dcgm_metrics: set.dcgm_metrics.unwrap_or(false),
            metrics_allow: set.metrics_allow.unwrap_or_default(),
            health_recovery: set.health_recovery.unwrap_or(Duration::from_secs(30)),
            disable_health_checks: set.disable_health_checks.unwrap_or_default(),
            enable_health_checks: set.enable_health_checks.unwrap_or_default(),
            probe_interval: set.probe_interval.unwrap_or(Duration::from_secs(5)),
        }
    }

    /// Return which XIDs make a GPU fail.
    ///
    /// # Errors
    /// A flag contains a word that is no XID. The error says what to write instead.
    pub fn health_checks(&self) -> Result<HealthChecks, Error> {
        let (checks, unknown) = HealthChecks::parse(&self.disable_health_checks, &self.enable_health_checks);
        match unknown.first() {
            Some(word) => Err(Error::Config {
                origin: "--disable-health-checks or --enable-health-checks".to_owned(),
                text: format!("{word:?} is no XID; write numbers separated by commas, such as 79,94, or all"),
            }),
            None => Ok(checks),
        }
    }

    /// Return which metrics are served.
    ///
    /// # Errors
    /// The flag contains a name that no metric has. The error shows similar ones.
    pub fn allow(&self) -> Result<Allow, Error> {
        Allow::parse(&self.metrics_allow).map_err(|error| Error::Config {
            origin: "--metrics-allow".to_owned(),
            text: error.to_string(),
        })
    }

    /// Report whether MIG devices are offered.
    pub fn offers_mig(&self) -> bool {
        self.mig_strategy != MigStrategyArg::None
    }

    /// Return the directory for the agent's own files.
    pub fn state_dir(&self) -> PathBuf {
        self.state_dir
            .clone()
            .unwrap_or_else(|| self.kubelet_dir.join("plugins/divvy.dev"))
    }

    /// Return the directory of the guard's libraries.
    ///
    /// # Errors
    /// The path of this program is unknown.
    pub(crate) fn guard_dir(&self) -> Result<PathBuf, Error> {
        if let Some(directory) = &self.guard_dir {
            return Ok(directory.clone());
        }
        let mut directory = std::env::current_exe().map_err(|error| Error::Config {
            origin: "--guard-dir".to_owned(),
            text: format!("the path of this program is unknown ({error}); name the directory of the guard's libraries"),
        })?;
        directory.pop();
        Ok(directory)
    }

    /// Return the kubelet's directory for device plugins.
    pub fn device_plugin_dir(&self) -> PathBuf {
        self.kubelet_dir.join("device-plugins")
    }

    /// Refuse settings that cannot work, before anything is started.
    ///
    /// # Errors
    /// The error names the flag and says what to write instead.
    pub fn check(&self) -> Result<(), Error> {
        let wrong = |origin: &str, text: &str| {
            Err(Error::Config {
                origin: origin.to_owned(),
                text: text.to_owned(),
            })
        };
        if self.node_name.is_empty() {
            return wrong(
                "--node-name",
                "the name is empty; write the node's name as `kubectl get nodes` shows it (in a pod: NODE_NAME from spec.nodeName)",
            );
        }
        if !self.driver_root.starts_with('/') {
            return wrong(
                "--driver-root",
                &format!(
                    "{:?} is not an absolute path; write / or, for a driver container, /run/nvidia/driver",
                    self.driver_root
                ),
            );
        }
        if self.device_list_strategy == DeviceDelivery::Envvar {
            return wrong(
                "--device-list-strategy envvar",
                "this version supports only CDI; environment variables will come with the compatibility mode for gpushare. Use \
                 auto or cdi, with a container runtime that has CDI enabled (containerd 2.0 and later enable it by default)",
            );
        }
        self.allow()?;
        self.health_checks().map(drop)
    }
}

/// Return the vendors whose flag is set.
fn also_shared(flags: [(Vendor, Option<bool>); 2]) -> BTreeSet<Vendor> {
    let set = flags.into_iter().filter(|(_, flag)| *flag == Some(true));
    set.map(|(vendor, _)| vendor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gpus_of_a_vendor_are_shared_as_its_own_flag_says() {
        let flags = [None, Some(false), Some(true)];
        for (amd, intel) in flags.into_iter().flat_map(|amd| flags.map(|intel| (amd, intel))) {
            let set = AgentSettings {
                amd_shares: amd,
                intel_shares: intel,
                ..AgentSettings::default()
            };
            let shared = AgentConfig::merged(AgentSettings::default(), set).also_shared;
            let is_shared = |vendor: Vendor| shared.contains(&vendor);
            assert_eq!(
                (is_shared(Vendor::Amd), is_shared(Vendor::Intel)),
                (amd == Some(true), intel == Some(true))
            );
            assert!(!is_shared(Vendor::Nvidia));
        }
    }

    #[test]
    fn what_cannot_work_is_refused_with_a_sentence() {
        let mut config = AgentConfig::new("n1");
        assert!(config.check().is_ok());
        config.device_list_strategy = DeviceDelivery::Envvar;
        let text = config.check().expect_err("not in this version").to_string();
        assert!(text.contains("CDI") && text.contains("auto or cdi"), "{text}");
        assert!(AgentConfig::new("").check().is_err());
        let mut config = AgentConfig::new("n1");
        config.disable_health_checks = "79,none".to_owned();
        let text = config.check().expect_err("no XID").to_string();
        assert!(
            text.contains("--disable-health-checks") && text.contains("\"none\""),
            "{text}"
        );
        let mut config = AgentConfig::new("n1");
        config.metrics_allow = "divvy_gpu_info,divvy_gpu_inf".to_owned();
        let text = config.check().expect_err("no metric").to_string();
        assert!(text.contains("--metrics-allow") && text.contains("divvy_gpu_info"), "{text}");
        let mut config = AgentConfig::new("n1");
        config.driver_root = "run/nvidia/driver".to_owned();
        let text = config.check().expect_err("relative").to_string();
        assert!(
            text.contains("--driver-root") && text.contains("/run/nvidia/driver"),
            "{text}"
        );
    }
}
