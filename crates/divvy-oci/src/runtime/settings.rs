//! The settings in NVIDIA's `config.toml` that this runtime uses. Unsupported values are refused with an explanation.
//!
//! A missing setting has the toolkit's default value, with one exception. Unless the file sets
//! `accept-nvidia-visible-devices-envvar-when-unprivileged`, environment variables do not give a GPU to an unprivileged
//! container. Otherwise, an image with `NVIDIA_VISIBLE_DEVICES=all` would get every GPU of a node.
//! [`edit::assumed`](super::edit::assumed) prints the defaults.

use serde::Deserialize;
use thiserror::Error as ThisError;

/// The default path of `config.toml`. `$NVIDIA_CTK_CONFIG_FILE_PATH` and a file in `$XDG_CONFIG_HOME` take precedence.
pub const PATH: &str = "/etc/nvidia-container-runtime/config.toml";

/// An error in a `config.toml`.
#[derive(Debug, ThisError)]
pub enum RuntimeSettingsError {
    /// The text is not TOML, or a value has the wrong type.
    #[error("{0}")]
    Unreadable(#[from] toml::de::Error),
    /// The `mode` is unknown.
    #[error(
        "nvidia-container-runtime.mode is {0:?}; the modes are auto, cdi, jit-cdi, legacy, divvy (and csv, which is not supported)"
    )]
    Mode(String),
    /// `supported-driver-capabilities` contains an unknown name.
    #[error(
        "supported-driver-capabilities has {0:?}; the capabilities are {list}, and all", list = CAPABILITIES.join(",")
    )]
    Capability(String),
    /// The `cuda-compat-mode` is unknown.
    #[error("nvidia-container-runtime.modes.legacy.cuda-compat-mode is {0:?}; the modes are {list}", list = COMPAT_MODES.join(", "))]
    CompatMode(String),
    /// `ldconfig` does not begin with `@`, so a program of the image would run (CVE-2024-0136, CVE-2024-0137).
    #[error(
        "nvidia-container-cli.ldconfig is {0:?}, a program of the image that would run with the host's privileges; use \"@/sbin/ldconfig\", where @ \
         stands for the host"
    )]
    Ldconfig(String),
    /// The `mode` is `csv`, which is not supported.
    #[error(
        "nvidia-container-runtime.mode is \"csv\", which is for Jetson boards and not supported here; set it to \"cdi\" and describe the \
         devices in a CDI spec"
    )]
    Csv,
}

/// The source of a container's devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RuntimeMode {
    /// CDI specs if every device is requested by its CDI name. Otherwise, the same as [`RuntimeMode::JitCdi`].
    #[default]
    Auto,
    /// CDI specs from the spec directories.
    Cdi,
    /// A spec of the devices that the driver reports now, kept only in memory.
    JitCdi,
    /// NVIDIA's program `nvidia-container-cli`.
    Legacy,
    /// The allocation of the container's pod. The container's own request is ignored.
    Divvy,
}

impl RuntimeMode {
    /// Return the mode's name in `config.toml`.
    pub fn as_str(self) -> &'static str {
        match self {
            RuntimeMode::Auto => "auto",
            RuntimeMode::Cdi => "cdi",
            RuntimeMode::JitCdi => "jit-cdi",
            RuntimeMode::Legacy => "legacy",
            RuntimeMode::Divvy => "divvy",
        }
    }
}

/// The least severe level that is written to the runtime's own log file. `RuntimeSettingsError` is the most severe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum LogLevel {
    /// Reasons why a container was not created.
    Error,
    /// Warnings about a container that was created.
    Warning,
    /// Changes that were made.
    #[default]
    Info,
}

impl LogLevel {
    /// Return the level's name in a log line.
    pub fn as_str(self) -> &'static str {
        match self {
            LogLevel::Error => "error",
            LogLevel::Warning => "warning",
            LogLevel::Info => "info",
        }
    }

    /// Return the level for a name that NVIDIA's runtime accepts. As in that runtime, an unknown name stands for the default.
    fn named(name: &str) -> LogLevel {
        match name.to_ascii_lowercase().as_str() {
            "panic" | "fatal" | "error" => LogLevel::Error,
            "warn" | "warning" => LogLevel::Warning,
            _ => LogLevel::Info,
        }
    }
}

/// The settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OciRuntimeSettings {
    /// `nvidia-container-runtime.mode`: the source of a container's devices.
    pub mode: RuntimeMode,
    /// `nvidia-container-runtime.runtimes`: names or paths of OCI runtimes. The first one that exists is used.
    pub runtimes: Vec<String>,
    /// `nvidia-container-runtime.debug`: the runtime's own log file.
    pub debug: Option<String>,
    /// `nvidia-container-runtime.log-level`: the level of the runtime's own log file.
    pub log_level: LogLevel,
    /// `...modes.cdi.spec-dirs`: the directories of CDI specs, in order of increasing priority.
    pub spec_dirs: Vec<String>,
    /// `...modes.cdi.default-kind`: the CDI kind of devices that are requested by index or UUID.
    pub default_kind: String,
    /// `...modes.cdi.annotation-prefixes`: the key prefixes of annotations that request devices.
    pub annotation_prefixes: Vec<String>,
    /// `accept-nvidia-visible-devices-as-volume-mounts`: whether mounts may request devices.
    pub accept_mounts: bool,
    /// `accept-nvidia-visible-devices-envvar-when-unprivileged`: whether the environment of unprivileged containers counts. If
    /// this is not set, only a request through the engine counts
    /// ([`RequestingContainer::by_engine`](super::request::RequestingContainer::by_engine)), not the image's variables.
    pub accept_environment: Option<bool>,
    /// `swarm-resource`: environment variables that replace `NVIDIA_VISIBLE_DEVICES` in a container that has one of them.
    pub swarm_resources: Vec<String>,
    /// `disable-require`: whether an image's requirements on the driver are ignored.
    pub disable_require: bool,
    /// `supported-driver-capabilities`: the supported capabilities, sorted and without duplicates.
    pub capabilities: Vec<String>,
    /// The table `nvidia-container-cli`.
    pub cli: NvidiaCliSettings,
    /// `features.disable-imex-channel-creation`: whether `nvidia-container-cli` must not create the device nodes of IMEX channels.
    pub no_imex_creation: bool,
    /// `features.ignore-imex-channel-requests`: whether requests for IMEX channels are ignored.
    pub ignore_imex: bool,
    /// `features.no-additional-gids-for-device-nodes`: whether the container's process gets no additional groups for device nodes.
    pub no_additional_groups: bool,
    /// `...modes.legacy.cuda-compat-mode`: one of `ldconfig`, `mount`, `disabled`, and `hook`.
    pub cuda_compat_mode: String,
    /// `features.disable-cuda-compat-lib-hook`: whether to omit the hook of `cuda-compat-mode = "hook"`.
    pub no_compat_hook: bool,
    /// `nvidia-container-runtime-hook.skip-mode-detection`: whether the hook may be called directly in every mode.
    pub skip_mode_detection: bool,
    /// `...modes.jit-cdi.probe`: the program that queries the driver. The default is the `divvy-probe` in this runtime's
    /// directory. NVIDIA's programs do not know this key.
    pub probe: Option<String>,
    /// `...modes.jit-cdi.nvml-library`: the path of the driver's `libnvidia-ml.so.1`. By default, the probe searches in the
    /// driver's root. NVIDIA's programs do not know this key.
    pub nvml_library: Option<String>,
}

/// The settings in the table `[nvidia-container-cli]` that this runtime uses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct NvidiaCliSettings {
    /// The program's log file.
    pub debug: Option<String>,
    /// The program's environment as `NAME=value`. In addition, the program gets only `PATH`.
    pub environment: Vec<String>,
    /// The path of the driver root's `ld.so.cache`.
    pub ldcache: Option<String>,
    /// The path of the host's `ldconfig`, with `@` before it.
    pub ldconfig: Option<String>,
    /// Whether the program loads kernel modules. See [`NvidiaCliSettings::loads_kmods`] for the default.
    pub load_kmods: Option<bool>,
    /// Whether the program leaves device cgroups unchanged.
    pub no_cgroups: bool,
    /// Whether the program uses `chroot` instead of `pivot_root`.
    pub no_pivot: bool,
    /// The program's name or path. The default is `nvidia-container-cli`.
    pub path: Option<String>,
    /// The driver's root directory. Mode `jit-cdi` uses it as well.
    pub root: Option<String>,
    /// The program's user and group, as `user:group`.
    pub user: Option<String>,
}

impl NvidiaCliSettings {
    /// Report whether the program loads kernel modules; true unless the file says otherwise.
    pub fn loads_kmods(&self) -> bool {
        self.load_kmods.unwrap_or(true)
    }
}

/// Return the default of `nvidia-container-cli.ldconfig`. On Ubuntu, `/sbin/ldconfig` is a script that calls
/// `/sbin/ldconfig.real`, so `/sbin/ldconfig.real` is preferred if it exists.
pub fn ldconfig(exists: impl Fn(&str) -> bool) -> &'static str {
    if exists("/sbin/ldconfig.real") {
        "@/sbin/ldconfig.real"
    } else {
        "@/sbin/ldconfig"
    }
}

/// The valid names in `NVIDIA_DRIVER_CAPABILITIES`, sorted.
const CAPABILITIES: [&str; 7] = ["compat32", "compute", "display", "graphics", "ngx", "utility", "video"];
const COMPAT_MODES: [&str; 4] = ["ldconfig", "mount", "disabled", "hook"];

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", default)]
struct RuntimeConfigFile {
    accept_nvidia_visible_devices_as_volume_mounts: Option<bool>,
    accept_nvidia_visible_devices_envvar_when_unprivileged: Option<bool>,
    swarm_resource: Option<String>,
    disable_require: bool,
    supported_driver_capabilities: Option<String>,
    features: Features,
    nvidia_container_cli: NvidiaCliSettings,
    nvidia_container_runtime: RuntimeSection,
    nvidia_container_runtime_hook: OfHook,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", default)]
struct OfHook {
    skip_mode_detection: bool,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", default)]
struct Features {
    allow_ldconfig_from_container: bool,
    disable_cuda_compat_lib_hook: bool,
    disable_imex_channel_creation: bool,
    ignore_imex_channel_requests: bool,
    no_additional_gids_for_device_nodes: bool,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", default)]
struct RuntimeSection {
    debug: Option<String>,
    log_level: Option<String>,
    mode: Option<String>,
    runtimes: Option<Vec<String>>,
    modes: Modes,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", default)]
struct Modes {
    cdi: CdiSettings,
    jit_cdi: JitCdi,
    legacy: Legacy,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", default)]
struct JitCdi {
    probe: Option<String>,
    nvml_library: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", default)]
struct Legacy {
    cuda_compat_mode: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", default)]
struct CdiSettings {
    annotation_prefixes: Option<Vec<String>>,
    default_kind: Option<String>,
    spec_dirs: Option<Vec<String>>,
}

impl Default for OciRuntimeSettings {
    fn default() -> OciRuntimeSettings {
        OciRuntimeSettings::parse("").expect("an empty file is a file")
    }
}

impl OciRuntimeSettings {
    /// Parse the text of a `config.toml`. Unknown keys are ignored, because they belong to NVIDIA's own programs.
    ///
    /// # Errors
    /// See [`RuntimeSettingsError`]: invalid TOML, or a value that is unknown or unsupported.
    pub fn parse(text: &str) -> Result<OciRuntimeSettings, RuntimeSettingsError> {
        let file: RuntimeConfigFile = toml::from_str(text)?;
        let runtime = file.nvidia_container_runtime;
        let (cdi, jit) = (runtime.modes.cdi, runtime.modes.jit_cdi);
        let list = |given: Option<Vec<String>>, default: &[&str]| {
            given.unwrap_or_else(|| default.iter().map(|part| (*part).to_owned()).collect())
        };
        let mode = match runtime.mode.as_deref() {
            None | Some("" | "auto") => RuntimeMode::Auto,
            Some("cdi") => RuntimeMode::Cdi,
            Some("jit-cdi") => RuntimeMode::JitCdi,
            Some("legacy") => RuntimeMode::Legacy,
            Some("divvy") => RuntimeMode::Divvy,
            Some("csv") => return Err(RuntimeSettingsError::Csv),
            Some(other) => return Err(RuntimeSettingsError::Mode(other.to_owned())),
        };
        let compat = runtime.modes.legacy.cuda_compat_mode.unwrap_or_else(|| "ldconfig".to_owned());
        if !COMPAT_MODES.contains(&compat.as_str()) {
            return Err(RuntimeSettingsError::CompatMode(compat));
        }
        let ldconfig = file.nvidia_container_cli.ldconfig.as_deref().unwrap_or("@");
        if !ldconfig.starts_with('@') && !ldconfig.is_empty() && !file.features.allow_ldconfig_from_container {
            return Err(RuntimeSettingsError::Ldconfig(ldconfig.to_owned()));
        }
        let swarm = file.swarm_resource.unwrap_or_default();
        let swarm = swarm.split(',').map(str::trim).filter(|name| !name.is_empty());
        Ok(OciRuntimeSettings {
            mode,
            runtimes: list(runtime.runtimes, &["runc", "crun"]),
            debug: runtime.debug.filter(|path| !path.is_empty()),
            log_level: LogLevel::named(runtime.log_level.as_deref().unwrap_or_default()),
            spec_dirs: list(cdi.spec_dirs, &["/etc/cdi", "/var/run/cdi"]),
            default_kind: cdi.default_kind.unwrap_or_else(|| divvy_cdi::NVIDIA_KIND.to_owned()),
            annotation_prefixes: list(cdi.annotation_prefixes, &["cdi.k8s.io/"]),
            accept_mounts: file.accept_nvidia_visible_devices_as_volume_mounts.unwrap_or(false),
            accept_environment: file.accept_nvidia_visible_devices_envvar_when_unprivileged,
            swarm_resources: swarm.map(str::to_owned).collect(),
            disable_require: file.disable_require,
            capabilities: capabilities(file.supported_driver_capabilities.as_deref())?,
            cli: file.nvidia_container_cli,
            no_imex_creation: file.features.disable_imex_channel_creation,
            ignore_imex: file.features.ignore_imex_channel_requests,
            no_additional_groups: file.features.no_additional_gids_for_device_nodes,
            cuda_compat_mode: compat,
            no_compat_hook: file.features.disable_cuda_compat_lib_hook,
            skip_mode_detection: file.nvidia_container_runtime_hook.skip_mode_detection,
            probe: jit.probe,
            nvml_library: jit.nvml_library,
        })
    }
}

fn capabilities(list: Option<&str>) -> Result<Vec<String>, RuntimeSettingsError> {
    let all = || CAPABILITIES.map(str::to_owned).to_vec();
    let Some(list) = list else { return Ok(all()) };
    let mut named = Vec::new();
    for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        match CAPABILITIES.contains(&name) {
            _ if name == "all" => return Ok(all()),
            true => named.push(name.to_owned()),
            false => return Err(RuntimeSettingsError::Capability(name.to_owned())),
        }
    }
    named.sort_unstable();
    named.dedup();
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::super::edit::assumed;
    use super::*;

    #[test]
    fn the_file_that_says_what_is_assumed_is_read_as_no_file() {
        let found = OciRuntimeSettings::parse(&assumed(ldconfig(|_| false))).expect("read");
        // The file spells out two values that are otherwise determined on the machine.
        let expected = OciRuntimeSettings {
            cli: NvidiaCliSettings {
                ldconfig: Some("@/sbin/ldconfig".to_owned()),
                load_kmods: Some(true),
                ..NvidiaCliSettings::default()
            },
            ..OciRuntimeSettings::default()
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn what_is_set_is_taken() {
        let text = "accept-nvidia-visible-devices-as-volume-mounts = true\ndisable-require = true\n\
                    supported-driver-capabilities = \"video, compute,video\"\naccept-nvidia-visible-devices-envvar-when-unprivileged = true\nswarm-resource = \"A, B\"\n\
                    [nvidia-container-runtime]\nmode = \"divvy\"\nruntimes = [\"/opt/crun\"]\ndebug = \"/var/log/x\"\nlog-level = \"warn\"\n\
                    [nvidia-container-runtime.modes.cdi]\nannotation-prefixes = []\ndefault-kind = \"a.com/b\"\nspec-dirs = [\"/c\"]\n\
                    [nvidia-container-runtime.modes.jit-cdi]\nprobe = \"/p\"\nnvml-library = \"/l\"\n\
                    [nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = \"disabled\"\n\
                    [features]\ndisable-imex-channel-creation = true\nignore-imex-channel-requests = true\nno-additional-gids-for-device-nodes = true\n\
                    disable-cuda-compat-lib-hook = true\n\
                    [nvidia-container-cli]\nroot = \"/run/nvidia/driver\"\nload-kmods = false\nno-cgroups = true\n\
                    [nvidia-container-runtime-hook]\nskip-mode-detection = true\n";
        let found = OciRuntimeSettings::parse(text).expect("read");
        let expected = OciRuntimeSettings {
            mode: RuntimeMode::Divvy,
            runtimes: vec!["/opt/crun".to_owned()],
            debug: Some("/var/log/x".to_owned()),
            log_level: LogLevel::Warning,
            spec_dirs: vec!["/c".to_owned()],
            default_kind: "a.com/b".to_owned(),
            annotation_prefixes: vec![],
            accept_mounts: true,
            accept_environment: Some(true),
            swarm_resources: vec!["A".to_owned(), "B".to_owned()],
            disable_require: true,
            capabilities: vec!["compute".to_owned(), "video".to_owned()],
            cli: NvidiaCliSettings {
                root: Some("/run/nvidia/driver".to_owned()),
                load_kmods: Some(false),
                no_cgroups: true,
                ..NvidiaCliSettings::default()
            },
            no_imex_creation: true,
            ignore_imex: true,
            no_additional_groups: true,
            cuda_compat_mode: "disabled".to_owned(),
            no_compat_hook: true,
            skip_mode_detection: true,
            probe: Some("/p".to_owned()),
            nvml_library: Some("/l".to_owned()),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn what_cannot_be_done_is_refused_in_words() {
        for (text, part) in [
            ("[nvidia-container-runtime]\nmode = \"csv\"", "Jetson"),
            (
                "[nvidia-container-runtime]\nmode = \"cid\"",
                "\"cid\"; the modes are auto, cdi",
            ),
            ("[nvidia-container-runtime]\nruntimes = \"runc\"", "invalid type"),
            (
                "supported-driver-capabilities = \"foo\"",
                "has \"foo\"; the capabilities are compat32",
            ),
            (
                "[nvidia-container-cli]\nldconfig = \"/sbin/ldconfig\"",
                "a program of the image",
            ),
            (
                "[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = \"x\"",
                "\"x\"; the modes are ldconfig",
            ),
            ("mode = [", "line 1"),
        ] {
            let error = OciRuntimeSettings::parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
