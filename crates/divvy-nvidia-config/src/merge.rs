//! Merges flags, variables, the file, and defaults into one validated configuration.

use std::time::Duration;

use crate::file::{Devices, File, IndexOrText, Interval, OneOrMany, Pattern, Replicated, Shared, parse};
use crate::value::{
    Config, DeviceIdStrategy, DeviceListStrategy, DevicePlugin, DeviceReference, Discovery, FeatureDiscovery, Imex, MigStrategy,
    ReplicatedDevices, ReplicatedResource, ResourcePattern, Resources, SharedDevicesPolicy, Sharing, SharingStrategy,
    SleepInterval,
};
use crate::{Error, Invocation, Program};

const GPU: &str = "nvidia.com/gpu";
const PREFIX: &str = "nvidia.com/";
/// The maximum length of a resource name.
const NAME_LENGTH: usize = 63;
const MOST_REPLICAS: i64 = 4096;

impl Invocation {
    /// Merge the arguments and the environment with the text of the configuration file. Return the configuration, and warnings
    /// for the operator.
    ///
    /// # Errors
    /// Fails if a value is not allowed, or if the file cannot be parsed.
    pub fn config(&self, file: Option<&str>) -> Result<(Config, Vec<String>), Error> {
        let (file, warnings) = parse(file.unwrap_or_default())?;
        config(self, file, warnings)
    }
}

impl Default for Config {
    /// Return what the programs use without flags, variables, and a file.
    fn default() -> Config {
        let none = Invocation::without_flags(Program::FeatureDiscovery);
        let (config, _) = none.config(None).expect("the defaults are allowed");
        config
    }
}

fn config(given: &Invocation, file: File, mut warnings: Vec<String>) -> Result<(Config, Vec<String>), Error> {
    let flags = &file.flags;
    let text = |flag: &str, file: &Option<String>, default: &str| -> String {
        given.text(flag).or(file.as_deref()).unwrap_or(default).to_owned()
    };
    let boolean = |flag: &str, file: Option<bool>, default: bool| -> Result<bool, Error> {
        Ok(given.boolean(flag)?.or(file).unwrap_or(default))
    };
    // What is wrong in the file is found before the flags are checked.
    let sharing = sharing(file.sharing.time_slicing.as_ref(), file.sharing.mps.as_ref(), &mut warnings)?;
    let driver_root = text("driver-root", &flags.nvidia_driver_root, "/");
    let dev_root = match text("dev-root", &flags.nvidia_dev_root, "") {
        empty if empty.is_empty() => driver_root.clone(),
        given => given,
    };
    let device_list_strategies = device_list_strategies(given, flags.plugin.device_list_strategy.as_ref())?;
    let device_id_strategy = match text("device-id-strategy", &flags.plugin.device_id_strategy, "uuid").as_str() {
        "uuid" => DeviceIdStrategy::Uuid,
        "index" => DeviceIdStrategy::Index,
        other => return Err(Error::flags(format!("invalid --device-id-strategy option: {other}"))),
    };
    let policy = text(
        "shared-devices-allocation-policy",
        &flags.plugin.shared_devices_allocation_policy,
        "distributed",
    );
    let shared_devices_policy = match policy.as_str() {
        "distributed" => SharedDevicesPolicy::Distributed,
        "packed" => SharedDevicesPolicy::Packed,
        other => {
            return Err(Error::flags(format!(
                "invalid --shared-devices-allocation-policy option: {other}"
            )));
        }
    };
    let mig_text = text("mig-strategy", &flags.mig_strategy, "none");
    let mps_root = text("mps-root", &flags.mps_root, "");
    if sharing.strategy == SharingStrategy::Mps && given.program() != Program::FeatureDiscovery {
        if mig_text == "mixed" {
            return Err(Error::flags("using --mig-strategy=mixed is not supported with MPS"));
        }
        // The other programs read the same file, and do not need the root on the host.
        if mps_root.is_empty() && given.program() == Program::DevicePlugin {
            return Err(Error::flags("using MPS requires --mps-root to be specified"));
        }
    }
    let discovery = match (
        text("device-discovery-strategy", &flags.device_discovery_strategy, "auto").as_str(),
        given.program(),
    ) {
        ("auto", _) => Discovery::Auto,
        ("nvml", _) => Discovery::Nvml,
        ("tegra", _) => Discovery::Tegra,
        ("vfio", Program::FeatureDiscovery) => Discovery::Vfio,
        (other, _) => return Err(Error::flags(format!("invalid --device-discovery-strategy option {other}"))),
    };
    let mig_strategy = match mig_text.as_str() {
        "none" => MigStrategy::None,
        "single" => MigStrategy::Single,
        "mixed" => MigStrategy::Mixed,
        other => return Err(Error::flags(format!("unknown MIG strategy: {other}"))),
    };
    let config = Config {
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
            container_driver_root: text("driver-root-ctr-path", &flags.plugin.container_driver_root, "/driver-root"),
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
            sleep_interval: sleep_interval(given, flags.gfd.sleep_interval.as_ref())?,
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
                MigStrategy::Single => patterns(&file.resources.mig, &[("*", GPU)])?,
                // The names follow from the profiles.
                MigStrategy::None | MigStrategy::Mixed => patterns(&file.resources.mig, &[])?,
            },
        },
        sharing,
        imex: imex(given, &file)?,
    };
    Ok((config, warnings))
}

fn device_list_strategies(given: &Invocation, file: Option<&OneOrMany>) -> Result<Vec<DeviceListStrategy>, Error> {
    let of_file = || match file? {
        OneOrMany::One(text) => Some(text.split(',').map(|part| part.trim().to_owned()).collect()),
        OneOrMany::Many(list) => Some(list.clone()),
    };
    let words: Vec<String> = given.list("device-list-strategy").or_else(of_file).unwrap_or_default();
    let mut strategies = Vec::new();
    for word in &words {
        let strategy = match word.as_str() {
            "envvar" => DeviceListStrategy::Envvar,
            "volume-mounts" => DeviceListStrategy::VolumeMounts,
            "cdi-annotations" => DeviceListStrategy::CdiAnnotations,
            "cdi-cri" => DeviceListStrategy::CdiCri,
            other => {
                return Err(Error::flags(format!(
                    "invalid --device-list-strategy option: invalid strategy: {other}"
                )));
            }
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

fn sleep_interval(given: &Invocation, file: Option<&Interval>) -> Result<SleepInterval, Error> {
    let parse = |text: &str| match text {
        "infinite" => Ok(SleepInterval::Infinite),
        _ => humantime::parse_duration(text).map(SleepInterval::Every).map_err(|error| {
            Error::load(format!(
                "--sleep-interval is {text:?}: {error}; write a duration such as 60s, or infinite"
            ))
        }),
    };
    match (given.text("sleep-interval"), file) {
        (Some(text), _) => parse(text),
        (None, Some(Interval::Text(text))) => parse(text),
        (None, Some(Interval::Nanoseconds(number))) => Ok(SleepInterval::Every(Duration::from_nanos(*number))),
        (None, None) => Ok(SleepInterval::Every(Duration::from_secs(60))),
    }
}

fn patterns(file: &[Pattern], default: &[(&str, &str)]) -> Result<Vec<ResourcePattern>, Error> {
    let given = file.iter().map(|entry| (entry.pattern.as_str(), entry.name.as_str()));
    let default = default.iter().copied().filter(|_| file.is_empty());
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
    let name = match text.contains('/') {
        true => text.to_owned(),
        false => format!("{PREFIX}{text}"),
    };
    if name.len() > NAME_LENGTH {
        return Err(Error::decoding(format!(
            "fully-qualified resource name must be {NAME_LENGTH} characters or less: {name}"
        )));
    }
    let (prefix, own) = name.split_once('/').unwrap_or_default();
    if [prefix, own].into_iter().all(is_subdomain) {
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
    if section.resources.is_empty() {
        return Err(Error::decoding("no resources specified"));
    }
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

fn replicated(entry: &Shared, rename_by_default: bool) -> Result<ReplicatedResource, Error> {
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
        None if rename_by_default => Some(resource_name(&format!("{name}.shared"))?),
        None => None,
    };
    Ok(ReplicatedResource {
        name,
        rename,
        devices: devices(entry.devices.as_ref())?,
        replicas,
    })
}

fn devices(given: Option<&Devices>) -> Result<ReplicatedDevices, Error> {
    let wrong = |found: &str| {
        Error::decoding(format!(
            "devices is {found}; write all, a number above 0, or a list of indices (0, \"0:1\") and UUIDs (GPU-…, MIG-…)"
        ))
    };
    match given {
        None => Ok(ReplicatedDevices::All),
        Some(Devices::Word(word)) if word == "all" => Ok(ReplicatedDevices::All),
        Some(Devices::Word(word)) => Err(Error::decoding(format!(
            "devices set as '{word}' but the only valid string input is 'all'"
        ))),
        Some(Devices::Count(count)) => match u32::try_from(*count) {
            Ok(count) if count > 0 => Ok(ReplicatedDevices::Count(count)),
            _ => Err(wrong(&count.to_string())),
        },
        Some(Devices::List(list)) => {
            let one = |entry: &IndexOrText| match entry {
                IndexOrText::Index(index) => Ok(DeviceReference::Gpu(*index)),
                IndexOrText::Text(text) => reference(text)
                    .ok_or_else(|| Error::decoding(format!("unsupported type for device in devices list: {text}, string"))),
            };
            let list: Vec<DeviceReference> = list.iter().map(one).collect::<Result<_, Error>>()?;
            if list.is_empty() {
                return Err(wrong("an empty list"));
            }
            Ok(ReplicatedDevices::List(list))
        }
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

fn imex(given: &Invocation, file: &File) -> Result<Imex, Error> {
    let ids: Vec<i64> = match given.list("imex-channel-ids") {
        Some(words) => {
            let number = |word: &String| {
                word.parse()
                    .map_err(|_| Error::load(format!("--imex-channel-ids has {word:?}, which is not a number")))
            };
            words.iter().map(number).collect::<Result<_, Error>>()?
        }
        None => file.imex.channel_ids.clone().unwrap_or_default(),
    };
    let channel_ids = match ids[..] {
        [] => Vec::new(),
        [0] => vec![0],
        _ => {
            let found: Vec<String> = ids.iter().map(i64::to_string).collect();
            return Err(Error::flags(format!(
                "invalid IMEX channel IDs: invalid IMEX config: channelIDs must be [] or [0]; found [{}]",
                found.join(" ")
            )));
        }
    };
    Ok(Imex {
        channel_ids,
        required: given.boolean("imex-required")?.or(file.imex.required).unwrap_or(false),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Program, flags};

    fn load(arguments: &[&str], variables: &[(&str, &str)], file: &str) -> Result<(Config, Vec<String>), Error> {
        of(Program::DevicePlugin, arguments, variables, file)
    }

    fn of(program: Program, arguments: &[&str], variables: &[(&str, &str)], file: &str) -> Result<(Config, Vec<String>), Error> {
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        let variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let invocation = Invocation::parse(program, "1", &arguments, &variables.collect()).expect("arguments");
        invocation.config(Some(file))
    }

    fn config(file: &str) -> Config {
        load(&[], &[], file).expect("a configuration").0
    }

    #[test]
    fn the_defaults_are_nvidias() {
        insta::assert_debug_snapshot!(config(""));
        for empty in [
            "",
            " \n",
            "{}",
            "version: v1",
            "# nothing\n",
            "flags: {}\nresources: {}\nsharing: {}",
        ] {
            assert_eq!(config(empty), config(""), "{empty:?}");
        }
    }

    #[test]
    fn what_is_not_allowed_is_refused_with_nvidias_text() {
        let long = "a".repeat(60);
        let sharing = |entry: &str| format!("sharing: {{timeSlicing: {{resources: [{entry}]}}}}");
        for (arguments, file, expected) in [
            (
                &["--device-list-strategy=foo"][..],
                String::new(),
                "unable to validate flags: invalid --device-list-strategy option: invalid strategy: foo",
            ),
            (
                &["--device-id-strategy=foo"],
                String::new(),
                "unable to validate flags: invalid --device-id-strategy option: foo",
            ),
            (
                &["--shared-devices-allocation-policy=foo"],
                String::new(),
                "unable to validate flags: invalid --shared-devices-allocation-policy option: foo",
            ),
            (
                &["--device-discovery-strategy=foo"],
                String::new(),
                "unable to validate flags: invalid --device-discovery-strategy option foo",
            ),
            (
                &["--mig-strategy=foo"],
                String::new(),
                "unable to validate flags: unknown MIG strategy: foo",
            ),
            (
                &["--mig-strategy=mixed", "--mps-root=/m"],
                "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}".to_owned(),
                "unable to validate flags: using --mig-strategy=mixed is not supported with MPS",
            ),
            (
                &[],
                "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}".to_owned(),
                "unable to validate flags: using MPS requires --mps-root to be specified",
            ),
            (
                &["--imex-channel-ids=2"],
                String::new(),
                "unable to validate flags: invalid IMEX channel IDs: invalid IMEX config: channelIDs must be [] or [0]; found [2]",
            ),
            (
                &[],
                "imex: {channelIDs: [0, 1]}".to_owned(),
                "unable to validate flags: invalid IMEX channel IDs: invalid IMEX config: channelIDs must be [] or [0]; found [0 1]",
            ),
            (
                &[],
                "version: v2".to_owned(),
                "unable to load config: unable to finalize config: unable to parse config file: error parsing config file: unknown version: v2",
            ),
            (
                &[],
                "sharing: {timeSlicing: {}}".to_owned(),
                "unable to load config: unable to finalize config: unable to parse config file: error parsing config file: unmarshal error: error unmarshaling JSON: while decoding JSON: no resources specified",
            ),
            (
                &[],
                sharing("{name: gpu, replicas: 1}"),
                "unable to load config: unable to finalize config: unable to parse config file: error parsing config file: unmarshal error: error unmarshaling JSON: while decoding JSON: number of replicas must be >= 2",
            ),
            (
                &[],
                sharing("{name: gpu, replicas: 5000}"),
                "unable to load config: unable to finalize config: unable to parse config file: error parsing config file: unmarshal error: error unmarshaling JSON: while decoding JSON: the configuration file asks for 5000 replicas of nvidia.com/gpu; at most 4096 are allowed",
            ),
            (
                &[],
                sharing("{name: nvidia.com/$x, replicas: 2}"),
                "unable to load config: unable to finalize config: unable to parse config file: error parsing config file: unmarshal error: error unmarshaling JSON: while decoding JSON: incorrect format for resource name 'nvidia.com/$x': [a lowercase RFC 1123 subdomain must consist of \
                 lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character \
                 (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')]",
            ),
            (
                &[],
                sharing(&format!("{{name: {long}, replicas: 2}}")),
                &format!(
                    "unable to load config: unable to finalize config: unable to parse config file: error parsing config file: unmarshal error: error unmarshaling JSON: while decoding JSON: fully-qualified resource name must be 63 characters or less: nvidia.com/{long}"
                ),
            ),
            (
                &[],
                sharing("{name: gpu, replicas: 2, devices: some}"),
                "unable to load config: unable to finalize config: unable to parse config file: error parsing config file: unmarshal error: error unmarshaling JSON: while decoding JSON: devices set as 'some' but the only valid string input is 'all'",
            ),
            (
                &[],
                sharing("{name: gpu, replicas: 2, devices: [0, x]}"),
                "unable to load config: unable to finalize config: unable to parse config file: error parsing config file: unmarshal error: error unmarshaling JSON: while decoding JSON: unsupported type for device in devices list: x, string",
            ),
            (
                &[],
                sharing("{name: gpu, replicas: 2, devices: 0}"),
                "unable to load config: unable to finalize config: unable to parse config file: error parsing config file: unmarshal error: error unmarshaling JSON: while decoding JSON: devices is 0; write all, a number above 0, or a list of indices (0, \"0:1\") and UUIDs (GPU-…, MIG-…)",
            ),
            (
                &["--mps-root=/m"],
                "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}, timeSlicing: {}}".to_owned(),
                "unable to load config: unable to finalize config: unable to parse config file: error parsing config file: unmarshal error: error unmarshaling JSON: while decoding JSON: no resources specified",
            ),
            (
                &["--device-discovery-strategy=vfio"],
                String::new(),
                "unable to validate flags: invalid --device-discovery-strategy option vfio",
            ),
        ] {
            let error = load(arguments, &[], &file).expect_err(expected);
            assert_eq!(error.to_string(), expected);
        }
        let error = load(&[], &[], "flags: [").expect_err("broken").to_string();
        assert!(
            error.starts_with("unable to load config: unable to finalize config: unable to parse config file: error parsing config file: unmarshal error: "),
            "{error}"
        );
    }

    #[test]
    fn unknown_keys_are_named_and_have_no_effect() {
        let (read, warnings) = load(
            &[],
            &[],
            "version: v1\nflags:\n  migStrategy: single\n  plugin: {passDeviceSpec: true}\nsharing:\n  timeSlicing:\n    resources:\n    - \
             {name: gpu, replicas: 2, replica: 3}\nextra: 1\n",
        )
        .expect("a configuration");
        assert_eq!(read.mig_strategy, MigStrategy::Single);
        assert!(!read.plugin.pass_device_specs);
        let named: Vec<&str> = warnings.iter().filter_map(|text| text.split(' ').nth(6)).collect();
        assert_eq!(
            named,
            [
                "flags.plugin.passDeviceSpec,",
                "sharing.timeSlicing.resources.0.replica,",
                "extra,"
            ]
        );
    }

    #[test]
    fn a_file_in_json_or_yaml_says_the_same() {
        let yaml = "version: v1\nflags:\n  migStrategy: mixed\n  failOnInitError: false\n  nvidiaDriverRoot: /run/nvidia/driver\n  \
                    gdsEnabled: true\n  plugin:\n    deviceListStrategy: [envvar, cdi-cri]\n    deviceIDStrategy: index\n  gfd:\n    \
                    sleepInterval: 1m30s\nresources:\n  gpus:\n  - {pattern: '*A100*', name: a100}\n  - {pattern: '*', name: \
                    example.com/gpu}\nsharing:\n  timeSlicing:\n    renameByDefault: true\n    resources:\n    - {name: a100, replicas: 4, \
                    devices: [0, '1', '0:2', GPU-1]}\n    - {name: nvidia.com/mig-1g.5gb, replicas: 2, rename: small, devices: 3}\nimex: \
                    {channelIDs: [0], required: true}\n";
        let value: serde_json::Value = serde_saphyr::from_str(yaml).expect("YAML");
        assert_eq!(config(yaml), config(&value.to_string()));
        insta::assert_debug_snapshot!(config(yaml));
    }

    #[test]
    fn a_duration_in_the_file_is_text_or_nanoseconds() {
        for (text, expected) in [
            ("60s", SleepInterval::Every(Duration::from_secs(60))),
            ("500ms", SleepInterval::Every(Duration::from_millis(500))),
            ("2h45m", SleepInterval::Every(Duration::from_secs(9900))),
            ("1000000000", SleepInterval::Every(Duration::from_secs(1))),
            ("infinite", SleepInterval::Infinite),
        ] {
            let read = config(&format!("flags: {{gfd: {{sleepInterval: {text}}}}}"));
            assert_eq!(read.feature_discovery.sleep_interval, expected, "{text}");
        }
        assert!(load(&[], &[], "flags: {gfd: {sleepInterval: soon}}").is_err());
    }

    #[test]
    fn mps_wins_and_forbids_more_than_one_device_unless_it_is_told_otherwise() {
        let both =
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}, mps: {resources: [{name: gpu, replicas: 3}]}}";
        let (read, warnings) = load(&["--mps-root=/m"], &[], both).expect("a configuration");
        assert_eq!(
            (read.sharing.strategy, read.sharing.resources[0].replicas),
            (SharingStrategy::Mps, 3)
        );
        assert!(read.sharing.fail_requests_greater_than_one);
        assert_eq!(
            warnings,
            ["the configuration file has sharing.mps and sharing.timeSlicing; the latter has no effect"]
        );
        let told = "sharing: {mps: {failRequestsGreaterThanOne: false, resources: [{name: gpu, replicas: 3}]}}";
        let read = load(&["--mps-root=/m"], &[], told).expect("a configuration").0;
        assert!(!read.sharing.fail_requests_greater_than_one);
        let slices = config("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 3}]}}").sharing;
        assert!(!slices.fail_requests_greater_than_one);
    }

    #[test]
    fn the_mps_control_daemon_does_not_need_the_root_on_the_host_and_refuses_mig_mixed() {
        let file = "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}";
        let read = |arguments| of(Program::MpsControlDaemon, arguments, &[], file).map(|(config, _)| config.sharing.strategy);
        assert_eq!(read(&[]), Ok(SharingStrategy::Mps));
        assert_eq!(
            read(&["--mig-strategy=mixed"]),
            Err(Error::flags("using --mig-strategy=mixed is not supported with MPS"))
        );
    }

    #[test]
    fn feature_discovery_does_not_need_the_root_of_mps() {
        let file = "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}";
        let read = of(Program::FeatureDiscovery, &["--device-discovery-strategy=vfio"], &[], file)
            .expect("a configuration")
            .0;
        assert_eq!(
            (read.sharing.strategy, read.discovery),
            (SharingStrategy::Mps, Discovery::Vfio)
        );
    }

    /// For each flag: its name, its variable, its key in the file, and three values.
    const EVERYWHERE: [(&str, &str, &str, [&str; 3]); 21] = [
        (
            "mig-strategy",
            "MIG_STRATEGY",
            "flags.migStrategy",
            ["single", "mixed", "none"],
        ),
        (
            "fail-on-init-error",
            "FAIL_ON_INIT_ERROR",
            "flags.failOnInitError",
            ["false", "true", "false"],
        ),
        (
            "driver-root",
            "NVIDIA_DRIVER_ROOT",
            "flags.nvidiaDriverRoot",
            ["/a", "/b", "/c"],
        ),
        ("dev-root", "NVIDIA_DEV_ROOT", "flags.nvidiaDevRoot", ["/a", "/b", "/c"]),
        (
            "pass-device-specs",
            "PASS_DEVICE_SPECS",
            "flags.plugin.passDeviceSpecs",
            ["true", "false", "true"],
        ),
        (
            "device-list-strategy",
            "DEVICE_LIST_STRATEGY",
            "flags.plugin.deviceListStrategy",
            ["cdi-cri", "volume-mounts", "cdi-annotations"],
        ),
        (
            "device-id-strategy",
            "DEVICE_ID_STRATEGY",
            "flags.plugin.deviceIDStrategy",
            ["index", "uuid", "index"],
        ),
        (
            "gdrcopy-enabled",
            "GDRCOPY_ENABLED",
            "flags.gdrcopyEnabled",
            ["true", "false", "true"],
        ),
        ("gds-enabled", "GDS_ENABLED", "flags.gdsEnabled", ["true", "false", "true"]),
        (
            "mofed-enabled",
            "MOFED_ENABLED",
            "flags.mofedEnabled",
            ["true", "false", "true"],
        ),
        (
            "cdi-annotation-prefix",
            "CDI_ANNOTATION_PREFIX",
            "flags.plugin.cdiAnnotationPrefix",
            ["a/", "b/", "c/"],
        ),
        (
            "nvidia-cdi-hook-path",
            "NVIDIA_CTK_PATH",
            "flags.plugin.nvidiaCTKPath",
            ["/a", "/b", "/c"],
        ),
        (
            "driver-root-ctr-path",
            "DRIVER_ROOT_CTR_PATH",
            "flags.plugin.containerDriverRoot",
            ["/a", "/b", "/c"],
        ),
        ("mps-root", "MPS_ROOT", "flags.mpsRoot", ["/a", "/b", "/c"]),
        (
            "shared-devices-allocation-policy",
            "SHARED_DEVICES_ALLOCATION_POLICY",
            "flags.plugin.sharedDevicesAllocationPolicy",
            ["packed", "distributed", "packed"],
        ),
        (
            "device-discovery-strategy",
            "DEVICE_DISCOVERY_STRATEGY",
            "flags.deviceDiscoveryStrategy",
            ["nvml", "tegra", "auto"],
        ),
        ("imex-channel-ids", "IMEX_CHANNEL_IDS", "imex.channelIDs", ["0", "", "0"]),
        ("imex-required", "IMEX_REQUIRED", "imex.required", ["true", "false", "true"]),
        ("cdi-feature-flags", "CDI_FEATURE_FLAGS", "", ["a", "b", "c"]),
        ("cdi-disable-hooks", "CDI_DISABLE_HOOKS", "", ["a", "b", "c"]),
        ("kubelet-socket", "KUBELET_SOCKET", "", ["/a", "/b", "/c"]),
    ];

    /// Return a file that sets one key to a value.
    fn file_with(key: &str, value: &str) -> String {
        let value = if key == "imex.channelIDs" {
            format!("[{value}]")
        } else {
            value.to_owned()
        };
        let mut text = String::new();
        for (depth, part) in key.split('.').enumerate() {
            text.push_str(&format!("\n{}{part}:", "  ".repeat(depth)));
        }
        format!("{text} {value}\n")
    }

    #[test]
    fn a_flag_wins_over_its_variable_that_over_the_file_and_the_file_over_the_default() {
        let mut untested: Vec<&str> = flags::names(Program::DevicePlugin);
        untested.retain(|name| !["config-file", "log-level"].contains(name));
        for (flag, variable, key, [in_file, in_variable, in_flag]) in EVERYWHERE {
            untested.retain(|name| *name != flag);
            let argument = format!("--{flag}={in_flag}");
            let told = load(&[&argument], &[], "").expect("a configuration").0;
            let file = if key.is_empty() {
                String::new()
            } else {
                file_with(key, in_file)
            };
            let all = load(&[&argument], &[(variable, in_variable)], &file).expect("a configuration");
            assert_eq!(all, (told, Vec::new()), "{flag}");
            if !in_variable.is_empty() {
                let by_variable = load(&[], &[(variable, in_variable)], "").expect("a configuration").0;
                assert_eq!(
                    load(&[], &[(variable, in_variable)], &file).expect("a configuration").0,
                    by_variable,
                    "{variable}"
                );
            }
            if !key.is_empty() {
                let by_flag = load(&[&format!("--{flag}={in_file}")], &[], "").expect("a configuration").0;
                assert_eq!(config(&file), by_flag, "{key}");
                assert_ne!(config(&file), config(""), "{key} has no effect");
            }
        }
        assert_eq!(untested, [""; 0]);
    }

    #[test]
    fn feature_discovery_has_its_own_variables_and_keys() {
        let file =
            "flags: {useNodeFeatureAPI: false, gfd: {oneshot: true, noTimestamp: true, outputFile: /f, machineTypeFile: /m}}";
        let read = of(Program::FeatureDiscovery, &[], &[("GFD_OUTPUT_FILE", "")], file)
            .expect("a configuration")
            .0;
        let expected = FeatureDiscovery {
            oneshot: true,
            no_timestamp: true,
            sleep_interval: SleepInterval::Every(Duration::from_secs(60)),
            output_file: String::new(),
            machine_type_file: "/m".to_owned(),
            use_node_feature_api: false,
        };
        assert_eq!(read.feature_discovery, expected);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,200}") {
            let _ = load(&[], &[], &text);
        }
    }
}
