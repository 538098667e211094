//! Merges flags, variables, the file, and defaults into one validated configuration.

use std::time::Duration;

use crate::duration::{self, WrongDuration};
use crate::file::{DevicesToShare, Interval, PatternEntry, PluginConfigFile, Replicated, SharedResource, parse};
use crate::value::{
    DeviceIdStrategy, DeviceListStrategy, DevicePlugin, DeviceReference, Discovery, FeatureDiscovery, Imex, NvidiaConfig,
    NvidiaMigStrategy, ReplicatedDevices, ReplicatedResource, ResourcePattern, Resources, SharedDevicesPolicy, Sharing,
    SharingStrategy, SleepInterval,
};
use crate::{Error, Invocation, NvidiaProgram};

const GPU: &str = "nvidia.com/gpu";
const PREFIX: &str = "nvidia.com/";
/// The maximum length of a resource name.
const NAME_LENGTH: usize = 63;
/// The kubelet accepts lists of devices up to 4 MiB, which is about 68,000 device ids of all GPUs together.
const MOST_REPLICAS: i64 = 65_536;

impl Invocation {
    /// Merge the arguments and the environment with the text of the configuration file. Return the configuration, and warnings
    /// for the operator.
    ///
    /// # Errors
    /// Fails if a value is not allowed, or if the file cannot be parsed.
    pub fn config(&self, file: Option<&str>) -> Result<(NvidiaConfig, Vec<String>), Error> {
        let (file, warnings) = parse(file.unwrap_or_default())?;
        config(self, file, warnings)
    }
}

impl Default for NvidiaConfig {
    /// Return what the programs use without flags, variables, and a file.
    fn default() -> NvidiaConfig {
        let none = Invocation::without_flags(NvidiaProgram::FeatureDiscovery);
        let (config, _) = none.config(None).expect("the defaults are allowed");
        config
    }
}

fn config(given: &Invocation, file: PluginConfigFile, mut warnings: Vec<String>) -> Result<(NvidiaConfig, Vec<String>), Error> {
    let flags = &file.flags;
    let text = |flag: &str, file: &Option<String>, default: &str| -> String {
        given.text(flag).or(file.as_deref()).unwrap_or(default).to_owned()
    };
    let root = |flag: &str, file: &Option<String>, default: &str| match text(flag, file, default) {
        empty if empty.is_empty() => "/".to_owned(),
        root => root,
    };
    let boolean = |flag: &str, file: Option<bool>, default: bool| -> Result<bool, Error> {
        Ok(given.boolean(flag)?.or(file).unwrap_or(default))
    };
    check_numbers(given)?;
    // What is wrong in the file is found before the flags are checked.
    let sharing = sharing(file.sharing.time_slicing.as_ref(), file.sharing.mps.as_ref(), &mut warnings)?;
    let driver_root = root("driver-root", &flags.nvidia_driver_root, "/");
    let dev_root = match text("dev-root", &flags.nvidia_dev_root, "") {
        empty if empty.is_empty() => driver_root.clone(),
        given => given,
    };
    let plugin = [NvidiaProgram::DevicePlugin];
    let mut checked = CheckedValues {
        given,
        warnings: &mut warnings,
    };
    let device_list_strategies = device_list_strategies(given, flags.plugin.device_list_strategy.as_deref());
    let device_list_strategies = checked.by(&plugin, device_list_strategies, || vec![DeviceListStrategy::Envvar])?;
    let device_id_strategy = match text("device-id-strategy", &flags.plugin.device_id_strategy, "uuid").as_str() {
        "uuid" => Ok(DeviceIdStrategy::Uuid),
        "index" => Ok(DeviceIdStrategy::Index),
        other => Err(WrongValue::DeviceIdStrategy(other.to_owned())),
    };
    let device_id_strategy = checked.by(&plugin, device_id_strategy, DeviceIdStrategy::default)?;
    let policy = text(
        "shared-devices-allocation-policy",
        &flags.plugin.shared_devices_allocation_policy,
        "distributed",
    );
    let policy = match policy.as_str() {
        "distributed" => Ok(SharedDevicesPolicy::Distributed),
        "packed" => Ok(SharedDevicesPolicy::Packed),
        other => Err(WrongValue::SharedDevicesPolicy(other.to_owned())),
    };
    let shared_devices_policy = checked.by(&plugin, policy, SharedDevicesPolicy::default)?;
    let mig_text = text("mig-strategy", &flags.mig_strategy, "none");
    let mps_root = text("mps-root", &flags.mps_root, "");
    if sharing.strategy == SharingStrategy::Mps && given.program() != NvidiaProgram::FeatureDiscovery {
        if mig_text == "mixed" {
            return Err(Error::flags("using --mig-strategy=mixed is not supported with MPS"));
        }
        // The other programs read the same file, and do not need the root on the host.
        if mps_root.is_empty() && given.program() == NvidiaProgram::DevicePlugin {
            return Err(Error::flags("using MPS requires --mps-root to be specified"));
        }
    }
    let discovery = match (
        text("device-discovery-strategy", &flags.device_discovery_strategy, "auto").as_str(),
        given.program(),
    ) {
        ("auto", _) => Ok(Discovery::Auto),
        ("nvml", _) => Ok(Discovery::Nvml),
        ("tegra", _) => Ok(Discovery::Tegra),
        ("vfio", NvidiaProgram::FeatureDiscovery) => Ok(Discovery::Vfio),
        (other, _) => Err(WrongValue::Discovery(other.to_owned())),
    };
    let discovers = [NvidiaProgram::DevicePlugin, NvidiaProgram::FeatureDiscovery];
    let discovery = checked.by(&discovers, discovery, Discovery::default)?;
    let mig_strategy = match mig_text.as_str() {
        "none" => Ok(NvidiaMigStrategy::None),
        "single" => Ok(NvidiaMigStrategy::Single),
        "mixed" => Ok(NvidiaMigStrategy::Mixed),
        other => Err(WrongValue::MigStrategy(other.to_owned())),
    };
    let mig_strategy = checked.by(&discovers, mig_strategy, NvidiaMigStrategy::default)?;
    let imex = imex(
        &channel_ids(given, &file)?,
        boolean("imex-required", file.imex.required, false)?,
    );
    let imex = checked.by(&plugin, imex, Imex::default)?;
    let sleep_interval = sleep_interval(given, flags.gfd.sleep_interval, &mut warnings)?;
    let config = NvidiaConfig {
        mig_strategy,
        fail_on_init_error: boolean("fail-on-init-error", flags.fail_on_init_error, true)?,
        driver_root,
        dev_root,
        gdrcopy: boolean("gdrcopy-enabled", flags.gdrcopy_enabled, false)?,
        gds: boolean("gds-enabled", flags.gds_enabled, false)?,
        mofed: boolean("mofed-enabled", flags.mofed_enabled, false)?,
        discovery,
        mps_root,
        plugin: DevicePlugin {
            pass_device_specs: boolean("pass-device-specs", flags.plugin.pass_device_specs, false)?,
            device_list_strategies,
            device_id_strategy,
            cdi_annotation_prefix: text("cdi-annotation-prefix", &flags.plugin.cdi_annotation_prefix, "cdi.k8s.io/"),
            nvidia_ctk_path: text("nvidia-cdi-hook-path", &flags.plugin.nvidia_ctk_path, "/usr/bin/nvidia-ctk"),
            container_driver_root: root("driver-root-ctr-path", &flags.plugin.container_driver_root, "/driver-root"),
            shared_devices_policy,
            kubelet_socket: text("kubelet-socket", &None, "/var/lib/kubelet/device-plugins/kubelet.sock"),
            disabled_health_checks: text("disable-healthchecks", &None, ""),
            enabled_health_checks: text("enable-healthchecks", &None, ""),
            cdi_feature_flags: given.list("cdi-feature-flags").unwrap_or_default(),
            cdi_disabled_hooks: given.list("cdi-disable-hooks").unwrap_or_default(),
        },
        feature_discovery: FeatureDiscovery {
            oneshot: boolean("oneshot", flags.gfd.oneshot, false)?,
            no_timestamp: boolean("no-timestamp", flags.gfd.no_timestamp, false)?,
            sleep_interval,
            output_file: text(
                "output-file",
                &flags.gfd.output_file,
                "/etc/kubernetes/node-feature-discovery/features.d/gfd",
            ),
            machine_type_file: text(
                "machine-type-file",
                &flags.gfd.machine_type_file,
                "/sys/class/dmi/id/product_name",
            ),
            use_node_feature_api: boolean("use-node-feature-api", flags.use_node_feature_api, true)?,
        },
        resources: Resources {
            gpus: patterns(&file.resources.gpus, &[("*", GPU)])?,
            mig: match mig_strategy {
                NvidiaMigStrategy::Single => patterns(&file.resources.mig, &[("*", GPU)])?,
                // The names follow from the profiles.
                NvidiaMigStrategy::None | NvidiaMigStrategy::Mixed => patterns(&file.resources.mig, &[])?,
            },
        },
        sharing,
        imex,
    };
    Ok((config, warnings))
}

/// A value that the programs which use it refuse.
#[derive(Debug, thiserror::Error)]
enum WrongValue {
    #[error("invalid --device-id-strategy option: {0}; write uuid or index")]
    DeviceIdStrategy(String),
    #[error("invalid --shared-devices-allocation-policy option: {0}; write distributed or packed")]
    SharedDevicesPolicy(String),
    #[error("invalid --device-discovery-strategy option {0}; write auto, nvml, or tegra")]
    Discovery(String),
    #[error("unknown MIG strategy: {0}; write none, single, or mixed")]
    MigStrategy(String),
    #[error(
        "invalid --device-list-strategy option: invalid strategy: {0}; write envvar, volume-mounts, cdi-annotations, or cdi-cri"
    )]
    DeviceListStrategy(String),
    #[error(
        "invalid IMEX channel IDs: invalid IMEX config: channelIDs must be [] or [0]; found [{}]",
        .0.iter().map(i64::to_string).collect::<Vec<_>>().join(" ")
    )]
    Imex(Vec<i64>),
}

/// Checks values that several programs read from the same file, although only some of them use the value.
struct CheckedValues<'c> {
    given: &'c Invocation,
    warnings: &'c mut Vec<String>,
}

impl CheckedValues<'_> {
    /// Refuse a wrong value if the program is among `users`. The other programs start without it, as NVIDIA's do.
    fn by<T>(
        &mut self,
        users: &[NvidiaProgram],
        value: Result<T, WrongValue>,
        otherwise: impl FnOnce() -> T,
    ) -> Result<T, Error> {
        match (value, self.given.program()) {
            (Ok(value), _) => Ok(value),
            // GPU feature discovery says in addition what it was doing.
            (Err(wrong), NvidiaProgram::FeatureDiscovery) if users.contains(&NvidiaProgram::FeatureDiscovery) => {
                Err(Error::Load(Error::flags(wrong.to_string()).to_string()))
            }
            (Err(wrong), program) if users.contains(&program) => Err(Error::flags(wrong.to_string())),
            (Err(wrong), program) => {
                self.warnings.push(format!("{wrong}; {} ignores it", program.name()));
                Ok(otherwise())
            }
        }
    }
}

/// Refuse values of flags that are not used, but must be numbers.
fn check_numbers(given: &Invocation) -> Result<(), Error> {
    let check = |name: &str, is_number: fn(&str) -> bool| match given.text(name) {
        Some(text) if !is_number(text) => Err(given.wrong(name, text, "parse error; write a number")),
        _ => Ok(()),
    };
    check("kube-api-qps", |text| text.parse::<f64>().is_ok())?;
    check("kube-api-burst", |text| text.parse::<i64>().is_ok())
}

fn device_list_strategies(given: &Invocation, file: Option<&[String]>) -> Result<Vec<DeviceListStrategy>, WrongValue> {
    let of_flag = given.list("device-list-strategy");
    let words = of_flag.as_deref().or(file).unwrap_or_default();
    let mut strategies = Vec::new();
    for word in words {
        let strategy = match word.as_str() {
            "envvar" => DeviceListStrategy::Envvar,
            "volume-mounts" => DeviceListStrategy::VolumeMounts,
            "cdi-annotations" => DeviceListStrategy::CdiAnnotations,
            "cdi-cri" => DeviceListStrategy::CdiCri,
            other => return Err(WrongValue::DeviceListStrategy(other.to_owned())),
        };
        if !strategies.contains(&strategy) {
            strategies.push(strategy);
        }
    }
    if strategies.is_empty() {
        strategies.push(DeviceListStrategy::Envvar);
    }
    Ok(strategies)
}

fn sleep_interval(given: &Invocation, file: Option<Interval>, warnings: &mut Vec<String>) -> Result<SleepInterval, Error> {
    const FLAG: &str = "sleep-interval";
    let interval = match (given.text(FLAG), file) {
        (Some("infinite"), _) => Interval::Infinite,
        (Some(text), _) => {
            let wrong = |error: WrongDuration| given.wrong(FLAG, text, &format!("{error}; write 60s, 1h30m, or infinite"));
            Interval::Nanoseconds(duration::parse(text).map_err(wrong)?)
        }
        (None, Some(interval)) => interval,
        (None, None) => return Ok(SleepInterval::Every(Duration::from_secs(60))),
    };
    match interval {
        Interval::Infinite => Ok(SleepInterval::Infinite),
        Interval::Nanoseconds(time @ 1..) => Ok(SleepInterval::Every(Duration::from_nanos(time.unsigned_abs()))),
        // NVIDIA's program does not sleep at all then, and uses a whole core.
        Interval::Nanoseconds(_) => {
            warnings.push("the sleep interval is not above 0; the labels are updated every second".to_owned());
            Ok(SleepInterval::Every(Duration::from_secs(1)))
        }
    }
}

/// Return the patterns of the file and then `default`, which names what no pattern of the file matches. So NVIDIA's plugin completes the
/// patterns (AddDefaultResourcesToConfig in internal/rm).
fn patterns(file: &[PatternEntry], default: &[(&str, &str)]) -> Result<Vec<ResourcePattern>, Error> {
    let given = file.iter().map(|entry| (entry.pattern.as_str(), entry.name.as_str()));
    let has_all = file.iter().any(|entry| entry.pattern == "*");
    let default = default.iter().copied().filter(|_| !has_all);
    let named = |(pattern, name): (&str, &str)| {
        Ok(ResourcePattern {
            pattern: pattern.to_owned(),
            name: resource_name(name)?,
        })
    };
    given.chain(default).map(named).collect()
}

/// Return the complete name of a resource, or an error if Kubernetes does not accept the name.
fn resource_name(text: &str) -> Result<String, Error> {
    let own = text.strip_prefix(PREFIX).unwrap_or(text);
    let name = format!("{PREFIX}{own}");
    if name.len() > NAME_LENGTH {
        return Err(Error::decoding(format!(
            "fully-qualified resource name must be {NAME_LENGTH} characters or less: {name}; choose a shorter one"
        )));
    }
    if is_subdomain(own) {
        return Ok(name);
    }
    Err(Error::decoding(format!(
        "incorrect format for resource name '{name}': [a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' \
         or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
         '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')]"
    )))
}

fn is_subdomain(text: &str) -> bool {
    let is_label = |label: &str| {
        let alphanumeric = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        let bytes = label.as_bytes();
        alphanumeric(bytes.first().copied())
            && alphanumeric(bytes.last().copied())
            && bytes.iter().all(|byte| alphanumeric(Some(*byte)) || *byte == b'-')
    };
    text.split('.').all(is_label)
}

/// Return how devices are shared. If the file describes both MPS and time-slicing, MPS is used.
fn sharing(time_slicing: Option<&Replicated>, mps: Option<&Replicated>, warnings: &mut Vec<String>) -> Result<Sharing, Error> {
    if time_slicing.is_some() && mps.is_some() {
        warnings.push("the configuration file has sharing.mps and sharing.timeSlicing; the latter has no effect".to_owned());
    }
    let time_slicing = time_slicing
        .map(|section| shared(SharingStrategy::TimeSlicing, section))
        .transpose()?;
    let mps = mps.map(|section| shared(SharingStrategy::Mps, section)).transpose()?;
    Ok(mps.or(time_slicing).unwrap_or_default())
}

fn shared(strategy: SharingStrategy, section: &Replicated) -> Result<Sharing, Error> {
    let fails_by_default = strategy == SharingStrategy::Mps;
    let shared = section
        .resources
        .iter()
        .map(|entry| replicated(entry, section.rename_by_default));
    Ok(Sharing {
        strategy,
        rename_by_default: section.rename_by_default,
        fail_requests_greater_than_one: section.fail_requests_greater_than_one.unwrap_or(fails_by_default),
        resources: shared.collect::<Result<_, Error>>()?,
    })
}

fn replicated(entry: &SharedResource, rename_by_default: bool) -> Result<ReplicatedResource, Error> {
    let name = resource_name(&entry.name)?;
    let replicas = match entry.replicas {
        ..2 => return Err(Error::decoding("number of replicas must be >= 2")),
        more if more > MOST_REPLICAS => {
            return Err(Error::decoding(format!(
                "the configuration file asks for {more} replicas of {name}; at most {MOST_REPLICAS} are allowed"
            )));
        }
        some => u32::try_from(some).map_err(|_| Error::decoding("number of replicas must be >= 2"))?,
    };
    let rename = match &entry.rename {
        Some(rename) => Some(resource_name(rename)?),
        // NVIDIA's programs do not check the length of this name. Kubernetes allows 63 characters after the slash.
        None if rename_by_default => Some(format!("{name}.shared")),
        None => None,
    };
    Ok(ReplicatedResource {
        name,
        rename,
        devices: devices(&entry.devices)?,
        replicas,
    })
}

fn devices(given: &DevicesToShare) -> Result<ReplicatedDevices, Error> {
    let one = |text: &String| {
        reference(text).ok_or_else(|| {
            Error::decoding(format!(
                "unsupported type for device in devices list: {text}, string; write an index (0, \"0:1\") or a UUID (GPU-…, MIG-…)"
            ))
        })
    };
    match given {
        DevicesToShare::All => Ok(ReplicatedDevices::All),
        DevicesToShare::Count(count) => Ok(ReplicatedDevices::Count(*count)),
        DevicesToShare::List(list) => list.iter().map(one).collect::<Result<_, _>>().map(ReplicatedDevices::List),
    }
}

fn reference(text: &str) -> Option<DeviceReference> {
    if text.starts_with("GPU-") || text.starts_with("MIG-") {
        return Some(DeviceReference::Uuid(text.to_owned()));
    }
    match text.split_once(':') {
        Some((gpu, mig)) => Some(DeviceReference::Mig(gpu.parse().ok()?, mig.parse().ok()?)),
        None => Some(DeviceReference::Gpu(text.parse().ok()?)),
    }
}

fn channel_ids(given: &Invocation, file: &PluginConfigFile) -> Result<Vec<i64>, Error> {
    const FLAG: &str = "imex-channel-ids";
    let Some(words) = given.list(FLAG) else {
        return Ok(file.imex.channel_ids.clone().unwrap_or_default());
    };
    let number = |word: &String| {
        word.parse()
            .map_err(|_| given.wrong(FLAG, word, "it is not a number; write 0"))
    };
    words.iter().map(number).collect()
}

fn imex(ids: &[i64], required: bool) -> Result<Imex, WrongValue> {
    let channel_ids = match ids {
        [] => Vec::new(),
        [0] => vec![0],
        _ => return Err(WrongValue::Imex(ids.to_vec())),
    };
    Ok(Imex { channel_ids, required })
}

#[cfg(test)]
mod tests;
