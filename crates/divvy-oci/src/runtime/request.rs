//! The devices that a container requests.
//!
//! A container can request devices by annotation, by mount, or by environment variable. In this order, the first source that
//! requests anything decides, and the others are ignored. The rules are those of NVIDIA's Container Toolkit, without its known
//! defects: `0,0` means `0`; paths of mounts are compared by whole components; and `none` does not need a device with that name.

use std::collections::{BTreeMap, BTreeSet};

use super::settings::{OciRuntimeSettings, RuntimeMode};
use divvy_cdi::QualifiedName;

/// The environment variable that lists the requested devices.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// The directory in which mounts of `/dev/null` request devices.
pub const MOUNTS: &str = "/var/run/nvidia-container-devices";

/// The parts of a container's configuration that determine its devices.
#[derive(Debug, Clone, Default)]
pub struct RequestingContainer {
    /// The entries of `process.env`, in order.
    pub env: Vec<String>,
    /// Source and destination of each mount.
    pub mounts: Vec<(String, String)>,
    /// The annotations of the OCI configuration.
    pub annotations: BTreeMap<String, String>,
    /// Whether `CAP_SYS_ADMIN` is in the bounding set.
    pub privileged: bool,
    /// Whether the user requested the GPUs from the engine, as with Docker's `--gpus`. The engine then appends its own
    /// [`VISIBLE_DEVICES`] to the image's variables. NVIDIA's hook in the configuration proves that the engine did this, because
    /// an image cannot add a hook.
    pub by_engine: bool,
}

impl RequestingContainer {
    /// Return the value of an environment variable. If the variable occurs several times, the last entry counts. Entries without
    /// `=` are ignored.
    pub fn variable(&self, name: &str) -> Option<&str> {
        let mut pairs = self.env.iter().rev().filter_map(|entry| entry.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}

/// The devices that a request names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WantedDevices {
    /// Neither devices nor the driver's files. The container is not changed.
    Nothing,
    /// The driver's files, but no device.
    DriverOnly,
    /// Every device.
    All,
    /// Indices, UUIDs, or CDI names, as written, without duplicates, in order.
    Devices(Vec<String>),
}

/// A container's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRequest {
    /// The requested devices.
    pub wanted: WantedDevices,
    /// Sentences for the log about ignored parts of the request.
    pub ignored: Vec<String>,
}

impl DeviceRequest {
    /// Read the request from a container's configuration.
    pub fn of(container: &RequestingContainer, settings: &OciRuntimeSettings) -> DeviceRequest {
        let mut ignored = Vec::new();
        let annotated = by_annotation(container, &settings.annotation_prefixes);
        if !annotated.is_empty() {
            return DeviceRequest {
                wanted: wanted(annotated),
                ignored,
            };
        }
        if settings.accept_mounts {
            let mounted = by_mount(container, settings.mode, &mut ignored);
            if !mounted.is_empty() {
                return DeviceRequest {
                    wanted: wanted(mounted),
                    ignored,
                };
            }
        }
        let accepted = container.privileged || settings.accept_environment == Some(true);
        // With a request through the engine only VISIBLE_DEVICES counts. An image may set the other variables.
        let by_engine = !accepted
            && container.by_engine
            && settings.accept_environment.is_none()
            && container.variable(VISIBLE_DEVICES).is_some();
        let swarm = if by_engine { &[][..] } else { &settings.swarm_resources[..] };
        let (names, listed) = by_environment(container, swarm);
        let asked = wanted(listed);
        if asked != WantedDevices::Nothing && !accepted && !by_engine {
            ignored.push(format!(
                "Ignoring devices requested by environment variable(s) in unprivileged container: [{}]",
                names.join(" ")
            ));
            return DeviceRequest {
                wanted: WantedDevices::Nothing,
                ignored,
            };
        }
        DeviceRequest { wanted: asked, ignored }
    }
}

/// Interpret a list of names. If `void` occurs anywhere, nothing is requested. Otherwise the first of `all` and `none` decides.
fn wanted(names: Vec<String>) -> WantedDevices {
    let mut seen = BTreeSet::new();
    let names: Vec<String> = names.into_iter().filter(|name| seen.insert(name.clone())).collect();
    if names.is_empty() || seen.contains("void") {
        return WantedDevices::Nothing;
    }
    match names
        .iter()
        .find(|name| *name == "all" || *name == "none")
        .map(String::as_str)
    {
        Some("all") => WantedDevices::All,
        Some(_) => WantedDevices::DriverOnly,
        None => WantedDevices::Devices(names),
    }
}

fn by_annotation(container: &RequestingContainer, prefixes: &[String]) -> Vec<String> {
    let ours = |key: &String| prefixes.iter().any(|prefix| key.starts_with(prefix.as_str()));
    let values = container.annotations.iter().filter(|(key, _)| ours(key));
    values.flat_map(|(_, value)| items(value)).collect()
}

fn by_mount(container: &RequestingContainer, mode: RuntimeMode, ignored: &mut Vec<String>) -> Vec<String> {
    let mut devices = Vec::new();
    for device in mounted(container) {
        match device.split_once('/') {
            None if device != "cdi" && device != "imex" => devices.push(device),
            Some(("cdi", name)) => match cdi_name(name) {
                Some(name) => devices.push(name),
                None => ignored.push(format!(
                    "Ignoring mount \"{MOUNTS}/{device}\": {name:?} is not the name of a CDI device"
                )),
            },
            Some(("imex", _)) if matches!(mode, RuntimeMode::Auto | RuntimeMode::JitCdi | RuntimeMode::Legacy) => {}
            Some(("imex", channel)) => ignored.push(format!(
                "Ignoring mount \"{MOUNTS}/{device}\": the IMEX channel {channel:?} is available in modes \"auto\", \"jit-cdi\" and \"legacy\" only"
            )),
            _ => ignored.push(format!("Ignoring mount \"{MOUNTS}/{device}\": it does not name a GPU")),
        }
    }
    devices
}

/// Return the IMEX channels that mounts request. The list is empty if the settings do not accept mounts.
pub(super) fn imex_by_mount(container: &RequestingContainer, settings: &OciRuntimeSettings) -> Vec<String> {
    let mounted = if settings.accept_mounts {
        mounted(container)
    } else {
        Vec::new()
    };
    let channels = mounted.iter().filter_map(|device| device.strip_prefix("imex/"));
    channels.map(str::to_owned).collect()
}

/// Return the paths below [`MOUNTS`] at which `/dev/null` is mounted, without duplicates.
fn mounted(container: &RequestingContainer) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let all = container.mounts.iter().filter(|(source, _)| clean(source) == "/dev/null");
    all.filter_map(|(_, destination)| {
        let device = clean(destination).strip_prefix(MOUNTS)?.strip_prefix('/')?.to_owned();
        seen.insert(device.clone()).then_some(device)
    })
    .collect()
}

/// Convert `vendor/class/device` or `vendor/class=device` into a CDI name. The result is `None` if that is not a valid name.
fn cdi_name(path: &str) -> Option<String> {
    let name = if path.contains('=') {
        path.to_owned()
    } else {
        let (kind, device) = path.rsplit_once('/')?;
        format!("{kind}={device}")
    };
    name.parse::<QualifiedName>().is_ok().then_some(name)
}

/// Return the names of the environment variables that count, and the devices that they list.
fn by_environment<'a>(container: &RequestingContainer, swarm: &'a [String]) -> (Vec<&'a str>, Vec<String>) {
    let swarm: Vec<&str> = swarm
        .iter()
        .map(String::as_str)
        .filter(|name| container.variable(name).is_some())
        .collect();
    let names = if swarm.is_empty() { vec![VISIBLE_DEVICES] } else { swarm };
    let values = names.iter().filter_map(|name| container.variable(name));
    let mut listed: Vec<String> = values.flat_map(items).collect();
    if names == [VISIBLE_DEVICES] && container.variable(VISIBLE_DEVICES).is_none() && is_legacy_image(container) {
        listed.push("all".to_owned());
    }
    (names, listed)
}

/// Report whether the image is older than `NVIDIA_VISIBLE_DEVICES`. Such images request all GPUs.
pub(super) fn is_legacy_image(container: &RequestingContainer) -> bool {
    let has = |name| container.variable(name).is_some_and(|value| !value.is_empty());
    has("CUDA_VERSION") && !has("NVIDIA_REQUIRE_CUDA")
}

fn items(list: &str) -> impl Iterator<Item = String> {
    let parts = list.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(str::to_owned)
}

/// Remove `.`, `..`, and repeated slashes from a path, as Go's `filepath.Clean` does.
fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    let joined = parts.join("/");
    if path.starts_with('/') { format!("/{joined}") } else { joined }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(entries: &[&str]) -> RequestingContainer {
        RequestingContainer {
            env: entries.iter().map(|entry| (*entry).to_owned()).collect(),
            privileged: true,
            ..RequestingContainer::default()
        }
    }

    fn devices(names: &[&str]) -> WantedDevices {
        WantedDevices::Devices(names.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn case_21_a_the_variable_means_what_it_means_everywhere() {
        let uuid = "GPU-0a1b2c3d-0000-1111-2222-333344445555";
        for (entries, expected) in [
            (vec![], WantedDevices::Nothing),
            (vec!["CUDA_VERSION=9.0.116"], WantedDevices::All),
            (
                vec!["CUDA_VERSION=9.0.116", "NVIDIA_REQUIRE_CUDA=cuda>=9.0"],
                WantedDevices::Nothing,
            ),
            (vec!["CUDA_VERSION=", "NVIDIA_REQUIRE_CUDA="], WantedDevices::Nothing),
            (
                vec!["CUDA_VERSION=9.0.116", "NVIDIA_VISIBLE_DEVICES="],
                WantedDevices::Nothing,
            ),
            (vec!["NVIDIA_VISIBLE_DEVICES="], WantedDevices::Nothing),
            (vec!["NVIDIA_VISIBLE_DEVICES=,"], WantedDevices::Nothing),
            (vec!["NVIDIA_VISIBLE_DEVICES= "], WantedDevices::Nothing),
            (vec!["NVIDIA_VISIBLE_DEVICES=void"], WantedDevices::Nothing),
            (vec!["NVIDIA_VISIBLE_DEVICES=0,void"], WantedDevices::Nothing),
            (vec!["NVIDIA_VISIBLE_DEVICES=none"], WantedDevices::DriverOnly),
            (vec!["NVIDIA_VISIBLE_DEVICES=none,all"], WantedDevices::DriverOnly),
            (vec!["NVIDIA_VISIBLE_DEVICES=all"], WantedDevices::All),
            (vec!["NVIDIA_VISIBLE_DEVICES=0,all"], WantedDevices::All),
            (vec!["NVIDIA_VISIBLE_DEVICES=all,none"], WantedDevices::All),
            (vec!["NVIDIA_VISIBLE_DEVICES=0"], devices(&["0"])),
            (vec!["NVIDIA_VISIBLE_DEVICES=0,1"], devices(&["0", "1"])),
            (vec!["NVIDIA_VISIBLE_DEVICES= 0 ,"], devices(&["0"])),
            (vec!["NVIDIA_VISIBLE_DEVICES=0,0"], devices(&["0"])),
            (vec!["NVIDIA_VISIBLE_DEVICES=0:1"], devices(&["0:1"])),
            (
                vec!["NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"],
                devices(&["nvidia.com/gpu=0"]),
            ),
            (vec!["NVIDIA_VISIBLE_DEVICES=ALL"], devices(&["ALL"])),
            (vec!["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=1"], devices(&["1"])),
            (vec!["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES"], devices(&["0"])),
            (vec![&format!("NVIDIA_VISIBLE_DEVICES={uuid}")], devices(&[uuid])),
        ] {
            let request = DeviceRequest::of(&env(&entries), &OciRuntimeSettings::default());
            assert_eq!(request.wanted, expected, "{entries:?}");
            assert!(request.ignored.is_empty(), "{entries:?}: {:?}", request.ignored);
        }
    }

    /// Mounts go before the environment.
    #[test]
    fn case_22_a_annotations_precede_mounts_and_environment() {
        let mut container = env(&["NVIDIA_VISIBLE_DEVICES=all"]);
        container.annotations = [("cdi.k8s.io/a".to_owned(), "nvidia.com/gpu=1".to_owned())].into();
        container.mounts = vec![("/dev/null".to_owned(), format!("{MOUNTS}/0"))];
        let mut settings = OciRuntimeSettings {
            accept_mounts: true,
            ..OciRuntimeSettings::default()
        };
        assert_eq!(
            DeviceRequest::of(&container, &settings).wanted,
            devices(&["nvidia.com/gpu=1"])
        );
        container.annotations.clear();
        assert_eq!(DeviceRequest::of(&container, &settings).wanted, devices(&["0"]));
        settings.accept_mounts = false;
        assert_eq!(DeviceRequest::of(&container, &settings).wanted, WantedDevices::All);
        container.privileged = false;
        let request = DeviceRequest::of(&container, &settings);
        assert_eq!(request.wanted, WantedDevices::Nothing);
        let said = "Ignoring devices requested by environment variable(s) in unprivileged container: [NVIDIA_VISIBLE_DEVICES]";
        assert_eq!(request.ignored, [said]);
        settings.accept_environment = Some(true);
        assert_eq!(DeviceRequest::of(&container, &settings).wanted, WantedDevices::All);
    }

    #[test]
    fn case_22_b_and_23_a_whole_path_components_name_devices() {
        let settings = OciRuntimeSettings {
            accept_mounts: true,
            ..OciRuntimeSettings::default()
        };
        for (source, below, expected) in [
            ("/dev/null", "/0", Some("0")),
            ("/dev/./null", "//1/", Some("1")),
            ("/dev/null", "/cdi/nvidia.com/gpu/1", Some("nvidia.com/gpu=1")),
            ("/dev/null", "/cdi/nvidia.com/gpu=1", Some("nvidia.com/gpu=1")),
            ("/dev/null", "/cdi/foo", None),
            ("/dev/null", "/imex/3", None),
            ("/dev/null", "X/0", None),
            ("/dev/null", "/../0", None),
            ("/dev/null", "", None),
            ("/dev/zero", "/0", None),
        ] {
            let container = RequestingContainer {
                mounts: vec![(source.to_owned(), format!("{MOUNTS}{below}"))],
                ..RequestingContainer::default()
            };
            let expected = expected.map_or(WantedDevices::Nothing, |name| devices(&[name]));
            assert_eq!(DeviceRequest::of(&container, &settings).wanted, expected, "{source} {below}");
        }
    }

    #[test]
    fn requests_to_the_engine_count_without_privileges() {
        let asked = |entries: &[&str], settings: &OciRuntimeSettings| {
            let container = RequestingContainer {
                privileged: false,
                by_engine: true,
                ..env(entries)
            };
            DeviceRequest::of(&container, settings).wanted
        };
        let by_default = OciRuntimeSettings::default();
        // Docker appends its own entry to the image's.
        let both = ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=0"];
        assert_eq!(asked(&both, &by_default), devices(&["0"]));
        assert_eq!(asked(&["NVIDIA_VISIBLE_DEVICES=void"], &by_default), WantedDevices::Nothing);
        assert_eq!(
            asked(&["CUDA_VERSION=9.0"], &by_default),
            WantedDevices::Nothing,
            "the image sets this variable"
        );
        let refused = OciRuntimeSettings {
            accept_environment: Some(false),
            ..OciRuntimeSettings::default()
        };
        assert_eq!(
            asked(&both, &refused),
            WantedDevices::Nothing,
            "an explicit false applies to Docker's request as well"
        );
        let swarm = OciRuntimeSettings {
            swarm_resources: vec!["OF_IMAGE".to_owned()],
            ..OciRuntimeSettings::default()
        };
        assert_eq!(asked(&["OF_IMAGE=all", "NVIDIA_VISIBLE_DEVICES=0"], &swarm), devices(&["0"]));
    }

    #[test]
    fn a_swarm_resource_replaces_the_variable() {
        let settings = OciRuntimeSettings {
            swarm_resources: vec!["DOCKER_RESOURCE_GPU".to_owned()],
            ..OciRuntimeSettings::default()
        };
        let both = env(&["NVIDIA_VISIBLE_DEVICES=all", "DOCKER_RESOURCE_GPU=3"]);
        assert_eq!(DeviceRequest::of(&both, &settings).wanted, devices(&["3"]));
        let one = env(&["NVIDIA_VISIBLE_DEVICES=all"]);
        assert_eq!(DeviceRequest::of(&one, &settings).wanted, WantedDevices::All);
    }
}
