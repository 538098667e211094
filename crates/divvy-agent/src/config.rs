//! The agent's configuration: one field per flag, and a configuration file with the same names.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use divvy_model::{MemoryUnit, MiB};
use serde::Deserialize;

use crate::Error;

/// The agent's configuration, with one field per flag of `divvy agent`.
#[derive(Debug, Clone)]
pub struct Config {
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
    pub probe: Option<Probe>,
    /// `--nvml-library`: passed to a probe that the agent starts.
    pub nvml_library: Option<PathBuf>,
    /// `--driver-root`: the driver's root directory, as a path below `sys_root`.
    pub driver_root: String,
    /// `--driver-spec`: what the agent does about CDI specs that do not match the loaded driver.
    pub driver_spec: DriverSpecMode,
    /// `--memory-unit`: the memory of one device of the memory resource.
    pub memory_unit: MemoryUnit,
    /// `--reserve-memory`: memory in MiB that the agent does not share, on each GPU.
    pub reserve_memory: MiB,
    /// `--device-list-strategy`: how containers get their GPUs.
    pub device_list_strategy: DeviceListStrategy,
    /// `--metrics`: the address that serves `/healthz`, `/readyz`, and `/metrics`. `None` serves nothing.
    pub metrics: Option<SocketAddr>,
    /// `--health-recovery`: how long a failed GPU must go without a new error before the agent offers it again.
    pub health_recovery: Duration,
    /// The interval between two snapshots of the probe. The probe sends errors that the driver reports immediately.
    pub probe_interval: Duration,
}

/// Which probe the agent uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// A program that the agent starts, and kills if it hangs.
    Start(PathBuf),
    /// The socket of a probe that runs independently.
    Socket(PathBuf),
}

impl FromStr for Probe {
    type Err = String;

    /// Parse `PATH` or `unix:SOCKET`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is neither the path of a program nor unix:SOCKET, such as unix:/run/divvy/probe.sock");
        match text.strip_prefix("unix:") {
            Some("") => Err(wrong()),
            Some(socket) => Ok(Probe::Socket(socket.into())),
            None if text.is_empty() => Err(wrong()),
            None => Ok(Probe::Start(text.into())),
        }
    }
}

/// How a container gets its GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceListStrategy {
    /// What the node supports, which is currently CDI only.
    #[default]
    Auto,
    /// CDI devices.
    Cdi,
    /// Environment variables. This version recognizes the name and refuses it with an explanation.
    Envvar,
}

impl FromStr for DeviceListStrategy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(DeviceListStrategy::Auto),
            "cdi" => Ok(DeviceListStrategy::Cdi),
            "envvar" => Ok(DeviceListStrategy::Envvar),
            other => Err(format!("{other:?} is not a strategy; write auto, cdi, or envvar")),
        }
    }
}

/// What the agent does when no CDI spec matches the loaded driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DriverSpecMode {
    /// Make a spec if the probe can see the driver's files, and report the problem otherwise.
    #[default]
    Auto,
    /// Only report the problem.
    Off,
}

impl FromStr for DriverSpecMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(DriverSpecMode::Auto),
            "off" => Ok(DriverSpecMode::Off),
            other => Err(format!("{other:?} is neither auto nor off")),
        }
    }
}

/// Parse a duration in seconds or minutes: `30s`, `5m`.
///
/// # Errors
/// A sentence with an example of a valid duration.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration; write 30s or 5m");
    let (number, factor) = match (text.strip_suffix('s'), text.strip_suffix('m')) {
        (Some(number), _) => (number, 1),
        (_, Some(number)) => (number, 60),
        _ => return Err(wrong()),
    };
    if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    seconds.map(Duration::from_secs).ok_or_else(wrong)
}

impl Config {
    /// Return a configuration with all defaults. Only the node's name has no default.
    pub fn new(node_name: impl Into<String>) -> Config {
        Config {
            kubeconfig: None,
            context: None,
            node_name: node_name.into(),
            kubelet_dir: "/var/lib/kubelet".into(),
            cdi_dir: "/var/run/cdi".into(),
            state_dir: None,
            sys_root: "/".into(),
            probe: None,
            nvml_library: None,
            driver_root: "/".into(),
            driver_spec: DriverSpecMode::Auto,
            memory_unit: MemoryUnit::GIB,
            reserve_memory: MiB::ZERO,
            device_list_strategy: DeviceListStrategy::Auto,
            metrics: None,
            health_recovery: Duration::from_secs(30),
            probe_interval: Duration::from_secs(5),
        }
    }

    /// Return the directory for the agent's own files.
    pub fn state_dir(&self) -> PathBuf {
        self.state_dir
            .clone()
            .unwrap_or_else(|| self.kubelet_dir.join("plugins/divvy.dev"))
    }

    /// Return the kubelet's directory for device plugins.
    pub fn device_plugin_dir(&self) -> PathBuf {
        self.kubelet_dir.join("device-plugins")
    }

    /// Refuse settings that cannot work, before anything is started.
    ///
    /// # Errors
    /// The flag, and what to write instead.
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
        if self.device_list_strategy == DeviceListStrategy::Envvar {
            return wrong(
                "--device-list-strategy envvar",
                "this version supports only CDI; environment variables will come with the compatibility mode for gpushare. Use \
                 auto or cdi, with a container runtime that has CDI enabled (containerd 2.0 and later enable it by default)",
            );
        }
        Ok(())
    }
}

/// `--config FILE`: TOML whose keys are the flags' names without the leading dashes. Flags and environment variables take precedence.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct FileConfig {
    /// Same as `--kubeconfig`.
    pub kubeconfig: Option<PathBuf>,
    /// Same as `--context`.
    pub context: Option<String>,
    /// Same as `--node-name`.
    pub node_name: Option<String>,
    /// Same as `--kubelet-dir`.
    pub kubelet_dir: Option<PathBuf>,
    /// Same as `--cdi-dir`.
    pub cdi_dir: Option<PathBuf>,
    /// Same as `--state-dir`.
    pub state_dir: Option<PathBuf>,
    /// Same as `--sys-root`.
    pub sys_root: Option<PathBuf>,
    /// Same as `--probe`.
    pub probe: Option<String>,
    /// Same as `--nvml-library`.
    pub nvml_library: Option<PathBuf>,
    /// Same as `--driver-root`.
    pub driver_root: Option<String>,
    /// Same as `--driver-spec`.
    pub driver_spec: Option<String>,
    /// Same as `--memory-unit`.
    pub memory_unit: Option<String>,
    /// Same as `--reserve-memory`.
    pub reserve_memory: Option<String>,
    /// Same as `--device-list-strategy`.
    pub device_list_strategy: Option<String>,
    /// Same as `--metrics`.
    pub metrics: Option<SocketAddr>,
    /// Same as `--health-recovery`.
    pub health_recovery: Option<String>,
}

impl FileConfig {
    /// Read and parse the file.
    ///
    /// # Errors
    /// The file cannot be read or parsed. The error names its path.
    pub fn read(path: &Path) -> Result<FileConfig, Error> {
        let origin = || format!("--config {}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| Error::Config {
            origin: origin(),
            text: format!("cannot be read: {error}"),
        })?;
        FileConfig::parse(&origin(), &text)
    }

    /// Parse the file's text and check its values. `origin` names the file in error messages.
    ///
    /// # Errors
    /// The line and key that cannot be parsed.
    pub fn parse(origin: &str, text: &str) -> Result<FileConfig, Error> {
        let wrong = |text: String| Error::Config {
            origin: origin.to_owned(),
            text,
        };
        let file: FileConfig = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
        file.apply(&mut Config::new(""))
            .map_err(|(key, text)| wrong(format!("{key}: {text}")))?;
        Ok(file)
    }

    /// Apply the file's values to a configuration of defaults. The caller applies environment variables and flags afterwards.
    ///
    /// # Errors
    /// The key, and what is wrong with its value.
    pub fn apply(&self, config: &mut Config) -> Result<(), (&'static str, String)> {
        fn set<T: Clone>(from: &Option<T>, to: &mut T) {
            if let Some(value) = from {
                to.clone_from(value);
            }
        }
        fn read<T, E: ToString>(
            key: &'static str,
            from: &Option<String>,
            to: &mut T,
            parse: impl Fn(&str) -> Result<T, E>,
        ) -> Result<(), (&'static str, String)> {
            if let Some(text) = from {
                *to = parse(text).map_err(|error| (key, error.to_string()))?;
            }
            Ok(())
        }
        set(&self.node_name, &mut config.node_name);
        set(&self.kubelet_dir, &mut config.kubelet_dir);
        set(&self.cdi_dir, &mut config.cdi_dir);
        set(&self.sys_root, &mut config.sys_root);
        set(&self.driver_root, &mut config.driver_root);
        for (from, to) in [
            (&self.kubeconfig, &mut config.kubeconfig),
            (&self.state_dir, &mut config.state_dir),
            (&self.nvml_library, &mut config.nvml_library),
        ] {
            if from.is_some() {
                to.clone_from(from);
            }
        }
        if self.context.is_some() {
            config.context.clone_from(&self.context);
        }
        if self.metrics.is_some() {
            config.metrics = self.metrics;
        }
        read("probe", &self.probe, &mut config.probe, |text| text.parse().map(Some))?;
        read("driver-spec", &self.driver_spec, &mut config.driver_spec, str::parse)?;
        read("memory-unit", &self.memory_unit, &mut config.memory_unit, str::parse)?;
        read("reserve-memory", &self.reserve_memory, &mut config.reserve_memory, str::parse)?;
        read(
            "device-list-strategy",
            &self.device_list_strategy,
            &mut config.device_list_strategy,
            str::parse,
        )?;
        read(
            "health-recovery",
            &self.health_recovery,
            &mut config.health_recovery,
            parse_duration,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_the_flags_say() {
        let text = "node-name = \"n1\"\nmemory-unit = \"256MiB\"\nreserve-memory = \"512MiB\"\nprobe = \"unix:/run/p.sock\"\n\
                    metrics = \"127.0.0.1:9400\"\nhealth-recovery = \"2m\"\ndriver-root = \"/run/nvidia/driver\"\ndriver-spec = \"off\"\n";
        let mut config = Config::new("");
        FileConfig::parse("f", text)
            .expect("readable")
            .apply(&mut config)
            .expect("usable");
        assert_eq!(config.node_name, "n1");
        assert_eq!(config.memory_unit.mib(), 256);
        assert_eq!(config.reserve_memory, MiB(512));
        assert_eq!(config.probe, Some(Probe::Socket("/run/p.sock".into())));
        assert_eq!(config.health_recovery, Duration::from_secs(120));
        assert_eq!(
            (config.driver_root.as_str(), config.driver_spec),
            ("/run/nvidia/driver", DriverSpecMode::Off)
        );
        assert_eq!(config.state_dir(), Path::new("/var/lib/kubelet/plugins/divvy.dev"));
    }

    #[test]
    fn an_unknown_key_and_a_wrong_value_are_refused_with_their_place() {
        for (text, expected) in [
            ("nodename = \"n\"", "unknown field `nodename`"),
            ("memory-unit = \"GB\"", "memory-unit: memory unit: \"GB\" is not a unit"),
            (
                "reserve-memory = \"-1\"",
                "reserve-memory: amount of memory: \"-1\" is not one",
            ),
            ("device-list-strategy = \"x\"", "write auto, cdi, or envvar"),
            ("driver-spec = \"on\"", "driver-spec: \"on\" is neither auto nor off"),
            ("health-recovery = \"1h\"", "write 30s or 5m"),
            ("probe = \"unix:\"", "unix:SOCKET"),
            ("metrics = \"here\"", "metrics"),
            ("= 1", "line 1"),
        ] {
            let error = FileConfig::parse("--config f.toml", text).expect_err(text).to_string();
            assert!(error.starts_with("--config f.toml: ") && error.contains(expected), "{error}");
        }
        let error = FileConfig::read(Path::new("/nonexistent.toml"))
            .expect_err("no file")
            .to_string();
        assert!(error.contains("/nonexistent.toml") && error.contains("os error 2"), "{error}");
    }

    #[test]
    fn what_cannot_work_is_refused_with_a_sentence() {
        let mut config = Config::new("n1");
        assert!(config.check().is_ok());
        config.device_list_strategy = DeviceListStrategy::Envvar;
        let text = config.check().expect_err("not in this version").to_string();
        assert!(text.contains("CDI") && text.contains("auto or cdi"), "{text}");
        assert!(Config::new("").check().is_err());
        let mut config = Config::new("n1");
        config.driver_root = "run/nvidia/driver".to_owned();
        let text = config.check().expect_err("relative").to_string();
        assert!(
            text.contains("--driver-root") && text.contains("/run/nvidia/driver"),
            "{text}"
        );
    }
}
