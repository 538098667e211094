//! The arguments of `nvidia-container-cli` in mode `legacy`. They are the same as those that NVIDIA's hook passes (toolkit
//! 1.20.0, recorded with a program that prints its arguments).
//!
//! Most arguments follow from the container's environment and the settings, and are fixed when the container is created. The
//! container's PID and root are known only once its namespaces exist. Therefore a prestart hook (`divvy-hook legacy`) appends
//! them.

use thiserror::Error as ThisError;

use super::request::{RequestingContainer, VISIBLE_DEVICES, WantedDevices, imex_by_mount, is_legacy_image};
use super::require;
use super::settings::OciRuntimeSettings;

/// A reason not to call `nvidia-container-cli`.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum LegacyError {
    /// `NVIDIA_DRIVER_CAPABILITIES` contains unsupported capabilities. The text is the same as NVIDIA's.
    #[error("unsupported capabilities found in '{asked}' (allowed '{allowed}')")]
    Capabilities {
        /// The variable's value, shortened.
        asked: String,
        /// The supported part of the value.
        allowed: String,
    },
    /// An unprivileged container requests to configure or monitor MIG devices. The text is the same as NVIDIA's.
    #[error("cannot set {0} in non privileged container")]
    Unprivileged(&'static str),
    /// The name of a requested device is neither an index nor a UUID nor a PCI address.
    #[error("the container requests a GPU named {0:?} in {VISIBLE_DEVICES}; use an index (0), a UUID (GPU-...), all, or none")]
    Device(String),
    /// `CUDA_VERSION` is not a version.
    #[error(transparent)]
    Require(#[from] require::RequirementError),
    /// `NVIDIA_IMEX_CHANNELS` names a channel that cannot exist.
    #[error("the container requests the IMEX channel {0:?} (NVIDIA_IMEX_CHANNELS); use channel numbers from 0 to 1048575")]
    Imex(String),
}

/// The environment variable that lists the IMEX channels that a container requests.
pub(super) const IMEX: &str = "NVIDIA_IMEX_CHANNELS";
/// The maximum number of IMEX channels of a driver.
const IMEX_CHANNELS: u32 = 1 << 20;

/// Return the arguments after the program's name, except `--pid` and the root.
///
/// # Errors
/// See [`LegacyError`].
pub fn words(
    container: &RequestingContainer,
    wanted: &WantedDevices,
    settings: &OciRuntimeSettings,
    default_ldconfig: &str,
) -> Result<Vec<String>, LegacyError> {
    let cli = &settings.cli;
    let mut words = Vec::new();
    let mut flag = |name: &str, given: bool| words.extend(given.then(|| format!("--{name}")));
    let set = |name: &str, value: Option<&str>| {
        value
            .filter(|value| !value.is_empty())
            .map(|value| format!("--{name}={value}"))
    };
    let root = set("root", cli.root.as_deref());
    flag("load-kmods", cli.loads_kmods());
    flag("no-create-imex-channels", settings.no_imex_creation);
    flag("no-pivot", cli.no_pivot);
    words.splice(0..0, root);
    words.extend(set("debug", cli.debug.as_deref()));
    words.extend(set("ldcache", cli.ldcache.as_deref()));
    words.extend(set("user", cli.user.as_deref()));
    words.push("configure".to_owned());
    // With "hook" a separate hook enables the compatibility libraries: see `compat_hook`.
    let compat = match settings.cuda_compat_mode.as_str() {
        "hook" => "disabled",
        mode => mode,
    };
    words.extend(set("cuda-compat-mode", Some(compat)));
    words.extend(set("ldconfig", Some(cli.ldconfig.as_deref().unwrap_or(default_ldconfig))));
    words.extend(cli.no_cgroups.then(|| "--no-cgroups".to_owned()));
    words.extend(set("device", devices(wanted)?.as_deref()));
    for (variable, name, shown) in [
        ("NVIDIA_MIG_CONFIG_DEVICES", "mig-config", "MIG_CONFIG_DEVICES"),
        ("NVIDIA_MIG_MONITOR_DEVICES", "mig-monitor", "MIG_MONITOR_DEVICES"),
    ] {
        let value = container.variable(variable).filter(|value| !value.is_empty());
        if value.is_some() && !container.privileged {
            return Err(LegacyError::Unprivileged(shown));
        }
        words.extend(set(name, value));
    }
    // The program accepts only numbers, so NVIDIA's hook omits the whole list if it contains `all`.
    let channels = imex(container, settings)?.filter(|list| list.split(',').all(|channel| channel != "all"));
    words.extend(set("imex-channel", channels.as_deref()));
    let capabilities = capabilities(container, settings)?;
    words.extend(capabilities.iter().map(|name| format!("--{name}")));
    // The program evaluates the requirements itself.
    let requirements = require::expressions(container, settings)?;
    words.extend(requirements.iter().map(|text| format!("--require={text}")));
    Ok(words)
}

/// Report whether the container needs the hook `divvy-hook enable-cuda-compat` in addition to `nvidia-container-cli`
/// (`cuda-compat-mode = "hook"`).
pub fn compat_hook(settings: &OciRuntimeSettings) -> bool {
    settings.cuda_compat_mode == "hook" && !settings.no_compat_hook
}

fn devices(wanted: &WantedDevices) -> Result<Option<String>, LegacyError> {
    let names = match wanted {
        WantedDevices::All => return Ok(Some("all".to_owned())),
        WantedDevices::DriverOnly | WantedDevices::Nothing => return Ok(None),
        WantedDevices::Devices(names) => names,
    };
    // Examples: 0, 0:1, GPU-…, MIG-GPU-…/0/0, 00000000:06:00.0
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.:/".contains(c);
    let wrong = |name: &&String| name.len() > 100 || name.starts_with('-') || !name.chars().all(allowed);
    match names.iter().find(wrong) {
        Some(name) => Err(LegacyError::Device(name.chars().take(100).collect())),
        None => Ok(Some(names.join(","))),
    }
}

/// Return the requested IMEX channels as a comma-separated list for `nvidia-container-cli`. The result is `None` if none is
/// requested, or if the settings ignore such requests.
pub(super) fn imex(container: &RequestingContainer, settings: &OciRuntimeSettings) -> Result<Option<String>, LegacyError> {
    let mounted = imex_by_mount(container, settings);
    let list = container.variable(IMEX).unwrap_or_default();
    let names: Vec<&str> = if mounted.is_empty() {
        list.split(',').map(str::trim).filter(|name| !name.is_empty()).collect()
    } else {
        mounted.iter().map(String::as_str).collect()
    };
    if settings.ignore_imex || names.is_empty() {
        return Ok(None);
    }
    let wrong = |name: &&&str| **name != "all" && name.parse::<u32>().ok().is_none_or(|number| number >= IMEX_CHANNELS);
    match names.iter().find(wrong) {
        Some(name) => Err(LegacyError::Imex(name.chars().take(100).collect())),
        None => Ok(Some(names.join(","))),
    }
}

fn capabilities(container: &RequestingContainer, settings: &OciRuntimeSettings) -> Result<Vec<String>, LegacyError> {
    let supported = &settings.capabilities;
    let asked = container.variable("NVIDIA_DRIVER_CAPABILITIES");
    let asked = match asked {
        None if is_legacy_image(container) => return Ok(supported.clone()),
        None => "",
        Some(asked) => asked,
    };
    let mut names: Vec<&str> = asked.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if names.contains(&"all") {
        return Ok(supported.clone());
    }
    let by_default = names.is_empty();
    if by_default {
        names = vec!["compute", "utility"];
    }
    names.sort_unstable();
    names.dedup();
    let (allowed, refused): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| supported.iter().any(|known| known == *name));
    if !refused.is_empty() && !by_default {
        return Err(LegacyError::Capabilities {
            asked: asked.chars().take(200).collect(),
            allowed: allowed.join(","),
        });
    }
    Ok(allowed.into_iter().map(str::to_owned).collect())
}
