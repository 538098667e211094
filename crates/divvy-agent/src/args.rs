//! The flags of `divvy agent`, and the file that sets the same.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use divvy_agent_core::Reaction;
use divvy_model::{MemoryUnit, MiB};
use divvy_program::values::duration;
use serde::{Deserialize, Deserializer};

use crate::Error;

/// Run on a GPU node: find its GPUs, advertise them, and give each container its GPU
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  divvy agent --node-name gpu-1 --kubeconfig /etc/kubernetes/kubelet.conf
  divvy agent --node-name gpu-1 --memory-unit 256MiB --reserve-memory 512MiB
  NODE_NAME=gpu-1 divvy agent --probe unix:/run/divvy/probe.sock --metrics 0.0.0.0:9400

Resources advertised to the kubelet:
  aliyun.com/gpu-mem  units of GPU memory (--memory-unit)
  aliyun.com/gpu-count
      the node's number of shared GPUs, for information; requesting it has no
      effect
  nvidia.com/gpu      whole NVIDIA GPUs (--whole-gpus)
  nvidia.com/mig-PROFILE
      MIG devices, such as nvidia.com/mig-1g.5gb (--whole-gpus with
      --mig-strategy mixed)
  amd.com/gpu         whole AMD GPUs
  gpu.intel.com/xe    whole Intel GPUs with dedicated memory (kernel driver xe)

The agent keeps running when the kubelet, the API server, or the driver fails. /readyz (with --metrics) names the part that the agent waits for, and the log says why.")]
pub struct Args {
    #[command(flatten)]
    pub settings: AgentSettings,
    /// Read settings from this TOML file; flags and environment variables take precedence
    #[arg(long, env = "DIVVY_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of TOML files with settings for single nodes, which override flags and environment variables. The node label
    /// nvidia.com/device-plugin.config names a node's file; a node without the label gets the file `default`, if there is one. Changes of the label and
    /// of the files take effect without a restart. Settings that cannot be used change nothing, and are reported as an event of the node
    #[arg(long, env = "DIVVY_NODE_CONFIGS", value_name = "DIR")]
    pub node_configs: Option<PathBuf>,
    /// End when standard input is closed, so that the agent does not outlive the program that started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// What the flags and the file of `--config` can set. The file is TOML; its keys are the flags' names without the leading dashes.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct AgentSettings {
    /// The name of this node in the cluster
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    /// The kubeconfig file, or several separated by colons [default: $KUBECONFIG, else ~/.kube/config, else the pod's service account]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig context to use
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
    /// The kubelet's directory, which contains device-plugins/ [default: /var/lib/kubelet]
    #[arg(long, env = "DIVVY_KUBELET_DIR", value_name = "DIR")]
    pub kubelet_dir: Option<PathBuf>,
    /// Directory in which the container runtime looks for CDI specs [default: /var/run/cdi]
    #[arg(long, env = "DIVVY_CDI_DIR", value_name = "DIR")]
    pub cdi_dir: Option<PathBuf>,
    /// Directory for the records of grants; must survive a reboot [default: KUBELET_DIR/plugins/divvy.dev]
    #[arg(long, env = "DIVVY_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Root directory of the node's /sys, /proc, and /dev [default: /]
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR")]
    pub sys_root: Option<PathBuf>,
    /// The divvy-probe to start, or unix:SOCKET of a running one [default: divvy-probe in this program's directory]
    #[arg(long, env = "DIVVY_PROBE", value_name = "PATH|unix:SOCKET")]
    #[serde(default, deserialize_with = "parsed")]
    pub probe: Option<ProbeChoice>,
    /// The driver's libnvidia-ml.so.1, for a probe that the agent starts [default: found by searching]
    #[arg(long, env = "DIVVY_NVML_LIBRARY", value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,
    /// Root directory of the driver's installation, such as / or /run/nvidia/driver (a driver container) [default: /]
    #[arg(long, env = "DIVVY_DRIVER_ROOT", value_name = "DIR")]
    pub driver_root: Option<String>,
    /// What to do if no CDI spec of the loaded driver exists [default: auto]
    #[arg(long, env = "DIVVY_DRIVER_SPEC", value_name = "MODE")]
    pub driver_spec: Option<DriverSpecMode>,
    /// How to hold pods to their share of an NVIDIA GPU where the driver cannot do it itself [default: off]
    #[arg(long, env = "DIVVY_GUARD", value_name = "MODE")]
    pub guard: Option<GuardMode>,
    /// Directory with the libraries for --guard: libdivvy-guard.so, libdivvy-guard-nvml.so, and libdivvy-guard-audit.so (only for --guard both) [default: this
    /// program's directory]
    #[arg(long, env = "DIVVY_GUARD_DIR", value_name = "DIR")]
    pub guard_dir: Option<PathBuf>,
    /// What to do about a program that avoids the guard, changes its files, or uses more than its pod was granted [default: event]
    #[arg(long, env = "DIVVY_ON_ESCAPE", value_name = "ACTION")]
    pub on_escape: Option<OnEscape>,
    /// Limit the compute time of pods (divvy.dev/gpu-cores) through CUDA's Multi-Process Service, which mps-control-daemon runs on this node; see
    /// docs/operate.md
    #[arg(long, env = "DIVVY_MPS", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub mps: Option<bool>,
    /// Size of one unit of aliyun.com/gpu-mem: GiB, MiB, or a size such as 256MiB; must match the extender's [default: GiB]
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT")]
    #[serde(default, deserialize_with = "parsed")]
    pub memory_unit: Option<MemoryUnit>,
    /// Memory of each GPU to keep back, such as 512MiB or 2GiB, for example for a desktop on the same GPU [default: 0]
    #[arg(long, env = "DIVVY_RESERVE_MEMORY", value_name = "AMOUNT")]
    #[serde(default, deserialize_with = "parsed")]
    pub reserve_memory: Option<MiB>,
    /// Also offer each NVIDIA GPU as a whole, as nvidia.com/gpu, in place of NVIDIA's device plugin; a GPU that a pod has as a whole has no
    /// shares, and a GPU with shares is not given out as a whole
    #[arg(long, env = "DIVVY_WHOLE_GPUS", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub whole_gpus: Option<bool>,
    /// Also share the memory of each AMD GPU, as aliyun.com/gpu-mem; a GPU with shares is not given out as a whole. Pods get such shares with the
    /// annotation divvy.dev/gpu-vendor: amd. Partitions of a GPU are not shared
    #[arg(long, env = "DIVVY_AMD_SHARES", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub amd_shares: Option<bool>,
    /// Also share the memory of each Intel GPU, as aliyun.com/gpu-mem; a GPU with shares is not given out as a whole. Pods get such shares with the
    /// annotation divvy.dev/gpu-vendor: intel
    #[arg(long, env = "DIVVY_INTEL_SHARES", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub intel_shares: Option<bool>,
    /// How to offer MIG devices; NVIDIA's device plugin must not offer them on this node [default: none]
    #[arg(long, env = "DIVVY_MIG_STRATEGY", value_name = "STRATEGY")]
    pub mig_strategy: Option<MigStrategyArg>,
    /// Where to write labels that describe the node's NVIDIA GPUs, such as nvidia.com/gpu.product [default: off]
    #[arg(long, env = "DIVVY_LABELS", value_name = "WHERE")]
    pub labels: Option<LabelsMode>,
    /// With --labels node-feature: the agent's pod, with which the NodeFeature object is deleted [default: the object stays]
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pub pod_name: Option<String>,
    /// How to put the GPU into the container [default: auto]
    #[arg(long, env = "DIVVY_DEVICE_LIST_STRATEGY", value_name = "STRATEGY")]
    pub device_list_strategy: Option<DeviceDelivery>,
    /// Serve /metrics, /healthz, and /readyz on this address [default: not served]
    #[arg(long, env = "DIVVY_METRICS", value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,
    /// With --metrics: also serve /metrics/dcgm, with the names of NVIDIA's dcgm-exporter, for dashboards that use them
    #[arg(long, env = "DIVVY_DCGM_METRICS", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub dcgm_metrics: Option<bool>,
    /// With --metrics: serve only the metrics with these exact names, separated by commas, such as
    /// divvy_gpu_info,divvy_container_gpu_memory_used_bytes. docs/reference/metrics.md lists the names; with --dcgm-metrics, those of NVIDIA's dcgm-exporter
    /// are names as well. An unknown name is refused, and similar ones are shown [default: all metrics]
    #[arg(long, env = "DIVVY_METRICS_ALLOW", value_name = "NAME,NAME")]
    pub metrics_allow: Option<String>,
    /// How long a failed GPU must run without a new error before it is advertised again, such as 30s or 5m [default: 30s]
    #[arg(long, env = "DIVVY_HEALTH_RECOVERY", value_name = "TIME", value_parser = duration)]
    #[serde(default, deserialize_with = "seconds")]
    pub health_recovery: Option<Duration>,
    /// Ignore these XIDs of NVIDIA GPUs: numbers separated by commas, such as 79,94, or all. XIDs that applications cause, such as 13, are ignored
    /// anyway [default: none]
    #[arg(long, env = "DP_DISABLE_HEALTHCHECKS", value_name = "XIDS")]
    pub disable_health_checks: Option<String>,
    /// Let a GPU fail because of these XIDs, even if they are ignored otherwise: numbers separated by commas, such as 13, or all [default: none]
    #[arg(long, env = "DP_ENABLE_HEALTHCHECKS", value_name = "XIDS")]
    pub enable_health_checks: Option<String>,
    /// How often to query the driver for the state of the GPUs; the driver's error events arrive immediately [default: 5s]
    #[arg(long, env = "DIVVY_PROBE_INTERVAL", value_name = "TIME", value_parser = duration)]
    #[serde(default, deserialize_with = "seconds")]
    pub probe_interval: Option<Duration>,
}

/// How many characters of a line an error shows.
const MOST_SHOWN: usize = 60;

/// Which probe the agent uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeChoice {
    /// A program that the agent starts, and kills if it hangs.
    Start(PathBuf),
    /// The socket of a probe that runs independently.
    Socket(PathBuf),
}

/// A text that names no probe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither the path of a program nor unix:SOCKET, such as unix:/run/divvy/probe.sock")]
pub struct NotAProbe(String);

impl FromStr for ProbeChoice {
    type Err = NotAProbe;

    /// Parse `PATH` or `unix:SOCKET`.
    fn from_str(text: &str) -> Result<Self, NotAProbe> {
        let wrong = || NotAProbe(text.to_owned());
        match text.strip_prefix("unix:") {
            Some("") => Err(wrong()),
            Some(socket) => Ok(ProbeChoice::Socket(socket.into())),
            None if text.is_empty() => Err(wrong()),
            None => Ok(ProbeChoice::Start(text.into())),
        }
    }
}

/// How a container gets its GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceDelivery {
    /// CDI; advertise nothing if the container runtime is known to lack CDI
    #[default]
    Auto,
    /// CDI, even if the container runtime looks too old (containerd 2.0 and later and CRI-O have CDI)
    Cdi,
    /// Environment variables (not supported by this version)
    Envvar,
}

/// What the agent does if no CDI spec of the loaded driver exists.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverSpecMode {
    /// Generate one in the CDI directory if the driver's files are readable, else only report it
    #[default]
    Auto,
    /// Only report it
    Off,
}

/// How pods are held to their share of a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GuardMode {
    /// Not: a program can use more than its pod requested
    #[default]
    Off,
    /// In containers, libraries of Divvy take the place of CUDA's driver library and of NVML. They refuse allocations above the share, and show the
    /// share as the size of the GPU. They have not been tested on a real GPU yet
    Shadow,
    /// As with shadow. In addition, they take the place of copies of these libraries that an image has or a program brings. For this, containers get the
    /// variables LD_AUDIT and GLIBC_TUNABLES. Some programs do not start with them: see docs/operate.md
    Both,
}

/// What the agent does about a program that the guard does not hold to its pod's share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnEscape {
    /// The pod gets an event: GuardAvoided, GuardFileChanged, GpuNotGranted, or GpuMemoryExceeded
    #[default]
    Event,
    /// The pod's programs that use the guard launch nothing as well, until the program has ended or keeps to the share again
    Throttle,
    /// The extender evicts the pod as well, through the API server, which respects PodDisruptionBudgets. The extender needs the right to do so (chart value
    /// agent.onEscape)
    Evict,
    /// The pod's processes on the GPU are killed as well (SIGKILL). If the pod's restartPolicy allows it, the kubelet starts the container again
    Kill,
}

impl From<OnEscape> for Reaction {
    fn from(action: OnEscape) -> Reaction {
        match action {
            OnEscape::Event => Reaction::Event,
            OnEscape::Throttle => Reaction::Throttle,
            OnEscape::Evict => Reaction::Evict,
            OnEscape::Kill => Reaction::Kill,
        }
    }
}

/// How the agent offers MIG devices. The names are those of NVIDIA's device plugin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigStrategyArg {
    /// Not: a GPU in MIG mode is not offered
    #[default]
    None,
    /// Like a GPU, with its own memory for shares; with --whole-gpus, as nvidia.com/gpu, if all GPUs of the node are divided alike
    Single,
    /// Like a GPU, with its own memory for shares; with --whole-gpus, as nvidia.com/mig-PROFILE, such as nvidia.com/mig-1g.5gb
    Mixed,
}

impl From<MigStrategyArg> for divvy_agent_core::MigStrategy {
    fn from(strategy: MigStrategyArg) -> Self {
        match strategy {
            MigStrategyArg::None => Self::None,
            MigStrategyArg::Single => Self::Single,
            MigStrategyArg::Mixed => Self::Mixed,
        }
    }
}

/// Where the agent writes the labels that describe the node's NVIDIA GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LabelsMode {
    /// Nowhere
    #[default]
    Off,
    /// To the node
    Node,
    /// To a NodeFeature object, from which Node Feature Discovery takes them
    NodeFeature,
    /// To the feature file /etc/kubernetes/node-feature-discovery/features.d/gfd below --sys-root, from which Node Feature Discovery takes them
    FeatureFile,
}

impl AgentSettings {
    /// Take from `other` what is not set here.
    #[must_use]
    pub fn or(self, other: AgentSettings) -> AgentSettings {
        AgentSettings {
            node_name: self.node_name.or(other.node_name),
            kubeconfig: self.kubeconfig.or(other.kubeconfig),
            context: self.context.or(other.context),
            kubelet_dir: self.kubelet_dir.or(other.kubelet_dir),
            cdi_dir: self.cdi_dir.or(other.cdi_dir),
            state_dir: self.state_dir.or(other.state_dir),
            sys_root: self.sys_root.or(other.sys_root),
            probe: self.probe.or(other.probe),
            nvml_library: self.nvml_library.or(other.nvml_library),
            driver_root: self.driver_root.or(other.driver_root),
            driver_spec: self.driver_spec.or(other.driver_spec),
            guard: self.guard.or(other.guard),
            guard_dir: self.guard_dir.or(other.guard_dir),
            on_escape: self.on_escape.or(other.on_escape),
            mps: self.mps.or(other.mps),
            memory_unit: self.memory_unit.or(other.memory_unit),
            reserve_memory: self.reserve_memory.or(other.reserve_memory),
            whole_gpus: self.whole_gpus.or(other.whole_gpus),
            amd_shares: self.amd_shares.or(other.amd_shares),
            intel_shares: self.intel_shares.or(other.intel_shares),
            mig_strategy: self.mig_strategy.or(other.mig_strategy),
            labels: self.labels.or(other.labels),
            pod_name: self.pod_name.or(other.pod_name),
            device_list_strategy: self.device_list_strategy.or(other.device_list_strategy),
            metrics: self.metrics.or(other.metrics),
            dcgm_metrics: self.dcgm_metrics.or(other.dcgm_metrics),
            metrics_allow: self.metrics_allow.or(other.metrics_allow),
            health_recovery: self.health_recovery.or(other.health_recovery),
            disable_health_checks: self.disable_health_checks.or(other.disable_health_checks),
            enable_health_checks: self.enable_health_checks.or(other.enable_health_checks),
            probe_interval: self.probe_interval.or(other.probe_interval),
        }
    }

    /// Read a file.
    ///
    /// # Errors
    /// It does not exist, cannot be read, or is not understood; with its path.
    pub fn read(path: &Path) -> Result<AgentSettings, Error> {
        let origin = format!("--config {}", path.display());
        match std::fs::read_to_string(path) {
            Ok(text) => AgentSettings::parse(&origin, &text),
            Err(error) => Err(Error::Config {
                origin,
                text: format!("cannot be read: {error}"),
            }),
        }
    }

    /// Parse a file's text. `origin` names the file in errors.
    ///
    /// # Errors
    /// The line of what is not understood.
    pub fn parse(origin: &str, text: &str) -> Result<AgentSettings, Error> {
        toml::from_str(text).map_err(|error| {
            // The error does not always name the key.
            let place = error.span().and_then(|span| {
                let number = text.get(..span.start)?.matches('\n').count();
                let line: String = text.lines().nth(number)?.chars().take(MOST_SHOWN).collect();
                Some(format!("line {} ({}): ", number + 1, line.trim()))
            });
            Error::Config {
                origin: origin.to_owned(),
                text: format!("{}{}", place.unwrap_or_default(), error.message()),
            }
        })
    }
}

/// Deserialize text as the flag parses it.
fn parsed<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: Display>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    duration(&String::deserialize(deserializer)?)
        .map(Some)
        .map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AgentConfig;

    #[test]
    fn a_file_says_what_the_flags_say() {
        let text = "node-name = \"n1\"\nmemory-unit = \"256MiB\"\nreserve-memory = \"512MiB\"\nprobe = \"unix:/run/p.sock\"\n\
                    metrics = \"127.0.0.1:9400\"\nhealth-recovery = \"2m\"\ndriver-root = \"/run/nvidia/driver\"\ndriver-spec = \"off\"\n\
                    labels = \"node-feature\"\n";
        let file = AgentSettings::parse("f", text).expect("readable");
        let config = AgentConfig::merged(AgentSettings::default(), file.clone());
        assert_eq!(config.node_name, "n1");
        assert_eq!(config.memory_unit.mib(), 256);
        assert_eq!(config.reserve_memory, MiB(512));
        assert_eq!(config.probe, Some(ProbeChoice::Socket("/run/p.sock".into())));
        assert_eq!(config.health_recovery, Duration::from_secs(120));
        assert_eq!(
            (config.driver_root.as_str(), config.driver_spec, config.labels),
            ("/run/nvidia/driver", DriverSpecMode::Off, LabelsMode::NodeFeature)
        );
        assert_eq!(config.state_dir(), Path::new("/var/lib/kubelet/plugins/divvy.dev"));
        let flags = AgentSettings {
            memory_unit: Some(MemoryUnit::GIB),
            ..AgentSettings::default()
        };
        let config = AgentConfig::merged(flags, file);
        assert_eq!(
            (config.memory_unit, config.node_name.as_str()),
            (MemoryUnit::GIB, "n1"),
            "flags win"
        );
    }

    #[test]
    fn unknown_keys_and_wrong_values_are_refused_with_their_place() {
        for (text, expected) in [
            ("nodename = \"n\"", "unknown field `nodename`"),
            ("memory-unit = \"GB\"", "memory unit: \"GB\" is not a unit"),
            (
                "reserve-memory = \"-1\"",
                "amount of memory: \"-1\" is not an amount of memory",
            ),
            ("device-list-strategy = \"x\"", "expected one of `auto`, `cdi`, `envvar`"),
            ("driver-spec = \"on\"", "expected `auto` or `off`"),
            (
                "labels = \"nodes\"",
                "expected one of `off`, `node`, `node-feature`, `feature-file`",
            ),
            ("health-recovery = \"1h\"", "write 30s or 5m"),
            ("probe = \"unix:\"", "unix:SOCKET"),
            ("metrics = \"here\"", "metrics"),
            ("= 1", "line 1"),
        ] {
            let error = AgentSettings::parse("--config f.toml", text).expect_err(text).to_string();
            assert!(error.starts_with("--config f.toml: ") && error.contains(expected), "{error}");
        }
        let error = AgentSettings::read(Path::new("/nonexistent.toml"))
            .expect_err("no file")
            .to_string();
        assert!(error.contains("/nonexistent.toml") && error.contains("os error 2"), "{error}");
    }
}
