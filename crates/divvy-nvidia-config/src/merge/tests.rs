use super::*;
use crate::{NvidiaProgram, flags};

fn load(arguments: &[&str], variables: &[(&str, &str)], file: &str) -> Result<(NvidiaConfig, Vec<String>), Error> {
    of(NvidiaProgram::DevicePlugin, arguments, variables, file)
}

fn of(
    program: NvidiaProgram,
    arguments: &[&str],
    variables: &[(&str, &str)],
    file: &str,
) -> Result<(NvidiaConfig, Vec<String>), Error> {
    let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
    let variables = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let invocation = Invocation::parse(program, "1", &arguments, &variables.collect()).expect("arguments");
    invocation.config(Some(file))
}

fn config(file: &str) -> NvidiaConfig {
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

/// Check that a configuration is refused with this text, after which only advice may follow.
fn assert_refused(arguments: &[&str], file: &str, expected: &str) {
    let error = load(arguments, &[], file).expect_err(expected).to_string();
    let more = error.strip_prefix(expected);
    assert!(more.is_some_and(|more| more.is_empty() || more.starts_with("; ")), "{error}");
}

#[test]
fn what_is_not_allowed_is_refused_with_nvidias_text() {
    let flags = |arguments: &[&str], file: &str, expected: &str| {
        assert_refused(arguments, file, &format!("unable to validate flags: {expected}"));
    };
    let list = "invalid --device-list-strategy option: invalid strategy: foo";
    flags(&["--device-list-strategy=foo"], "", list);
    flags(&["--device-id-strategy=foo"], "", "invalid --device-id-strategy option: foo");
    let policy = "invalid --shared-devices-allocation-policy option: foo";
    flags(&["--shared-devices-allocation-policy=foo"], "", policy);
    let discovery = |name: &str| {
        let expected = format!("invalid --device-discovery-strategy option {name}");
        flags(&[&format!("--device-discovery-strategy={name}")], "", &expected);
    };
    discovery("foo");
    discovery("vfio");
    flags(&["--mig-strategy=foo"], "", "unknown MIG strategy: foo");
    let mps = "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}";
    let mixed = "using --mig-strategy=mixed is not supported with MPS";
    flags(&["--mig-strategy=mixed", "--mps-root=/m"], mps, mixed);
    flags(&[], mps, "using MPS requires --mps-root to be specified");
    let channels = "invalid IMEX channel IDs: invalid IMEX config: channelIDs must be [] or [0]; found";
    flags(&["--imex-channel-ids=2"], "", &format!("{channels} [2]"));
    flags(&[], "imex: {channelIDs: [0, 1]}", &format!("{channels} [0 1]"));
    assert_refused(&[], "version: v2", &format!("{IN_FILE}unknown version: v2"));
    let both = "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}, timeSlicing: {}}";
    for (arguments, file) in [(&["--mps-root=/m"][..], both), (&[], "sharing: {timeSlicing: {}}")] {
        assert_refused(arguments, file, &format!("{IN_FILE}{DECODING}no resources specified"));
    }
    let shared = |entry: &str, expected: &str| {
        let file = format!("sharing: {{timeSlicing: {{resources: [{entry}]}}}}");
        assert_refused(&[], &file, &format!("{IN_FILE}{DECODING}{expected}"));
    };
    shared("{name: gpu, replicas: 1}", "number of replicas must be >= 2");
    let many = "the configuration file asks for 65537 replicas of nvidia.com/gpu; at most 65536 are allowed";
    shared("{name: gpu, replicas: 65537}", many);
    let name = "incorrect format for resource name 'nvidia.com/$x': [a lowercase RFC 1123 subdomain must consist of \
                lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character \
                (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')]";
    shared("{name: nvidia.com/$x, replicas: 2}", name);
    let long = "a".repeat(60);
    let too_long = format!("fully-qualified resource name must be 63 characters or less: nvidia.com/{long}");
    shared(&format!("{{name: {long}, replicas: 2}}"), &too_long);
    let some = "devices set as 'some' but the only valid string input is 'all'";
    shared("{name: gpu, replicas: 2, devices: some}", some);
    let letter = "unsupported type for device in devices list: x, string";
    shared("{name: gpu, replicas: 2, devices: [0, x]}", letter);
}

const IN_FILE: &str =
    "unable to load config: unable to finalize config: unable to parse config file: error parsing config file: ";
const DECODING: &str = "unmarshal error: error unmarshaling JSON: while decoding JSON: ";

#[test]
fn a_files_error_names_its_place_and_remedy() {
    let entry = |entry: &str| format!("sharing: {{timeSlicing: {{resources: [{entry}]}}}}");
    let at = "sharing.timeSlicing.resources[0]";
    for (file, in_json, expected) in [
        // NVIDIA's texts, with the place.
        (entry("{name: gpu}"), true, format!("no replicas specified; add replicas, such as replicas: 4, to {at}")),
        (entry("{Name: gpu, replicas: 2}"), true, format!("no resource name specified; add name: gpu to {at}")),
        (entry("null"), true, format!("no resource name specified; add name: gpu to {at}")),
        ("sharing: {timeSlicing: null}".to_owned(), true, "no resources specified; add resources to sharing.timeSlicing".to_owned()),
        ("sharing: {TIMESLICING: {Resources: [1]}}".to_owned(), true, "no resources specified; add resources to sharing.timeSlicing".to_owned()),
        ("sharing: {mps: {resources: null}}".to_owned(), true, "no resources specified; add resources to sharing.mps".to_owned()),
        ("resources: {gpus: [{pattern: a}]}".to_owned(), true, "resources must have a 'name' field set; add name to resources.gpus[0]".to_owned()),
        ("resources: {mig: [{name: a}]}".to_owned(), true, "resources must have a 'pattern' field set; add pattern to resources.mig[0]".to_owned()),
        ("flags: {plugin: {deviceListStrategy: 5}}".to_owned(), true, "invalid deviceListStrategy: 5; write envvar, or a list such as [envvar, cdi-cri]".to_owned()),
        ("flags: {gfd: {sleepInterval: soon}}".to_owned(), true, "time: invalid duration \"soon\"; write 60s, 1h30m, or infinite as flags.gfd.sleepInterval".to_owned()),
        ("flags: {gfd: {sleepInterval: [1]}}".to_owned(), true, "invalid duration; write 60s, 1h30m, or infinite as flags.gfd.sleepInterval".to_owned()),
        (entry("{name: gpu, replicas: 2, devices: -1}"), true, format!("devices set as '-1' but a count of devices must be > 0; write all, a number, or a list as {at}.devices")),
        (entry("{name: gpu, replicas: 2, devices: 0.0}"), true, format!("devices set as '0.0' but a count of devices must be > 0; write all, a number, or a list as {at}.devices")),
        (entry("{name: gpu, replicas: 2, devices: 1.5}"), true, format!("unrecognized type for devices spec: 1.5; write all, a number, or a list as {at}.devices")),
        (entry("{name: gpu, replicas: 2, devices: true}"), true, format!("unrecognized type for devices spec: true; write all, a number, or a list as {at}.devices")),
        (entry("{name: example.com/gpu, replicas: 2}"), true, "incorrect format for resource name 'nvidia.com/example.com/gpu': ".to_owned()),
        (entry("{name: a/b/c, replicas: 2}"), true, "incorrect format for resource name 'nvidia.com/a/b/c': ".to_owned()),
        // NVIDIA's texts speak of Go's types.
        ("flags: {failOnInitError: perhaps}".to_owned(), false, "unmarshal error: flags.failOnInitError is \"perhaps\"; write true or false".to_owned()),
        ("flags: {failOnInitError: 'true'}".to_owned(), false, "unmarshal error: flags.failOnInitError is \"true\"; write it without quotes".to_owned()),
        ("flags: {nvidiaDriverRoot: 5}".to_owned(), false, "unmarshal error: flags.nvidiaDriverRoot is 5; write a text, in quotes if it looks like a number".to_owned()),
        ("flags: [1]".to_owned(), false, "unmarshal error: flags is [1]; write keys and values below it".to_owned()),
        ("text".to_owned(), false, "unmarshal error: the configuration file is \"text\"; write keys and values below it".to_owned()),
        ("sharing: {timeSlicing: {resources: {name: gpu}}}".to_owned(), false, "unmarshal error: sharing.timeSlicing.resources is {\"name\":\"gpu\"}; write a list: each entry on a line of its own, after \"- \"".to_owned()),
        (entry("{name: gpu, replicas: 2.5}"), false, format!("unmarshal error: {at}.replicas is 2.5; write a whole number, without quotes")),
        (entry("{name: gpu, replicas: '2'}"), false, format!("unmarshal error: {at}.replicas is \"2\"; write a whole number, without quotes")),
        (entry("{name: gpu, replicas: 2, devices: [1.5]}"), false, format!("unmarshal error: {at}.devices[0] is 1.5; write an index (0, \"0:1\") or a UUID (GPU-…, MIG-…)")),
        ("imex: {channelIDs: ['0']}".to_owned(), false, "unmarshal error: imex.channelIDs[0] is \"0\"; write a whole number, without quotes".to_owned()),
        (format!("flags: {{failOnInitError: {}}}", "x".repeat(99)), false, format!("unmarshal error: flags.failOnInitError is \"{}…; write true or false", "x".repeat(59))),
        // The version.
        ("version: 1".to_owned(), false, "unknown version: 1; write version: v1".to_owned()),
        ("version: true".to_owned(), false, "unknown version: true; write version: v1".to_owned()),
    ] {
        let error = load(&["--mps-root=/m"], &[], &file).expect_err(&expected).to_string();
        let prefix = if in_json { DECODING } else { "" };
        assert!(error.starts_with(&format!("{IN_FILE}{prefix}{expected}")), "{file}\n{error}");
    }
}

#[test]
fn a_broken_file_is_refused_in_one_line_without_words_of_rust() {
    for file in [
        "flags: [",
        "version: [v1\n",
        "a:\tb\n\tc: d\n",
        "a: &x [*x]",
        "- \"",
        "a: !!int x",
    ] {
        let error = load(&[], &[], file).expect_err(file).to_string();
        assert!(error.starts_with(IN_FILE), "{error}");
        for word in ["\n", "struct", "enum", "Options", "from_", "variant"] {
            assert!(!error.contains(word), "{file:?}: {error}");
        }
    }
}

#[test]
fn a_file_that_nvidias_programs_read_is_read_as_they_read_it() {
    let slices = "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}";
    for (file, same, warnings) in [
        // Nothing is below a key.
        ("version:\nflags:\n  plugin:\n    # nothing\n  gfd:\n", "", 0),
        ("flags:\nsharing:\nresources:\nimex:\n", "", 0),
        ("resources:\n  gpus:\n  mig:\nimex:\n  channelIDs:\n", "", 0),
        ("sharing:\n  mps:\n", "", 0),
        (
            "flags: {migStrategy: null, plugin: {deviceListStrategy: null}, gfd: {sleepInterval: ~}}",
            "",
            0,
        ),
        (
            "sharing: {timeSlicing: {renameByDefault: null, resources: [{name: gpu, replicas: 2, rename: null, devices: null}]}}",
            slices,
            0,
        ),
        // The case of keys does not matter, except in the entries of lists and in the section around the list.
        (
            "Flags: {MIGSTRATEGY: single, Plugin: {deviceIdStrategy: index}}",
            "flags: {migStrategy: single, plugin: {deviceIDStrategy: index}}",
            0,
        ),
        (
            "sharing: {timeslicing: {RenameByDefault: true, resources: [{name: gpu, replicas: 2, Replicas: 5}]}}",
            slices,
            2,
        ),
        // Numbers, and words for true and false.
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2.0}]}}", slices, 0),
        (
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 0.2e1}]}}",
            slices,
            0,
        ),
        ("flags: {failOnInitError: no}", "flags: {failOnInitError: false}", 0),
        (
            "flags: {failOnInitError: Off, gdsEnabled: y}",
            "flags: {failOnInitError: false, gdsEnabled: true}",
            0,
        ),
        // Keys that occur twice, and several documents.
        (
            "flags: {migStrategy: foo}\nflags: {migStrategy: single}\n",
            "flags: {migStrategy: single}",
            1,
        ),
        ("version: v1\n---\nversion: v2\n", "", 1),
        ("version: v1\n...\nnonsense", "", 1),
        ("# comment\n---\n---\nversion: v2\n", "", 1),
        ("version: v1\n---\n# nothing\n", "", 0),
        (
            "%YAML 1.1\n---\nflags: {migStrategy: single}\n...\n",
            "flags: {migStrategy: single}",
            0,
        ),
        (
            "flags:\n  nvidiaDriverRoot: |-\n    /a\n    --- b\n",
            "flags: {nvidiaDriverRoot: \"/a\\n--- b\"}",
            0,
        ),
        // Which devices are shared.
        (
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: []}]}}",
            slices,
            1,
        ),
        (
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [1.0, null]}]}}",
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: ['1']}]}}",
            0,
        ),
        (
            "flags: {nvidiaDriverRoot: '', plugin: {containerDriverRoot: ''}}",
            "flags: {nvidiaDriverRoot: /, plugin: {containerDriverRoot: /}}",
            0,
        ),
    ] {
        let (read, found) = load(&[], &[], file).expect(file);
        assert_eq!(read, config(same), "{file}");
        assert_eq!(found.len(), warnings, "{file}: {found:?}");
    }
    let long = "a-name-of-fifty-two-characters-aaaaaaaaaaaaaaaaaaaaa";
    let renamed = config(&format!(
        "sharing: {{timeSlicing: {{renameByDefault: true, resources: [{{name: {long}, replicas: 2}}]}}}}"
    ));
    assert_eq!(renamed.sharing.resources[0].rename, Some(format!("nvidia.com/{long}.shared")));
}

#[test]
fn an_unmatched_device_has_its_default_name() {
    let pairs = |patterns: Vec<ResourcePattern>| {
        let pairs = patterns.into_iter().map(|one| format!("{}={}", one.pattern, one.name));
        pairs.collect::<Vec<_>>().join(" ")
    };
    let file =
        |all: &str| format!("resources: {{gpus: [{{pattern: '*A100*', name: a}}{all}], mig: [{{pattern: 1g*, name: m}}]}}");
    let read = |strategy: &str, all: &str| {
        let resources = load(&[strategy], &[], &file(all)).expect("a configuration").0.resources;
        (pairs(resources.gpus), pairs(resources.mig))
    };
    let (gpus, mig) = read("--mig-strategy=single", "");
    assert_eq!(
        (gpus.as_str(), mig.as_str()),
        ("*A100*=nvidia.com/a *=nvidia.com/gpu", "1g*=nvidia.com/m *=nvidia.com/gpu")
    );
    let (gpus, mig) = read("--mig-strategy=mixed", ", {pattern: '*', name: b}");
    assert_eq!(
        (gpus.as_str(), mig.as_str()),
        ("*A100*=nvidia.com/a *=nvidia.com/b", "1g*=nvidia.com/m")
    );
}

#[test]
fn each_program_checks_only_what_it_uses() {
    let file = "flags: {migStrategy: a, deviceDiscoveryStrategy: b, plugin: {deviceListStrategy: c, deviceIDStrategy: d}}\nimex: {channelIDs: [2]}";
    let (read, warnings) = of(NvidiaProgram::MpsControlDaemon, &[], &[], file).expect("a configuration");
    assert_eq!((read, warnings.len()), (NvidiaConfig::default(), 5), "{warnings:?}");
    assert_eq!(
        warnings[0],
        "invalid --device-list-strategy option: invalid strategy: c; write envvar, volume-mounts, cdi-annotations, or cdi-cri; mps-control-daemon ignores it"
    );
    let error = |program, file| of(program, &[], &[], file).expect_err("refused").to_string();
    assert!(
        error(NvidiaProgram::DevicePlugin, file).starts_with("unable to validate flags: invalid --device-list-strategy option: ")
    );
    assert!(
        error(NvidiaProgram::FeatureDiscovery, file)
            .starts_with("unable to load config: unable to validate flags: invalid --device-discovery-strategy option b")
    );
    let file = "flags: {plugin: {deviceListStrategy: c, deviceIDStrategy: d}}\nimex: {channelIDs: [2]}";
    assert_eq!(
        of(NvidiaProgram::FeatureDiscovery, &[], &[], file)
            .expect("a configuration")
            .1
            .len(),
        3
    );
}

#[test]
fn an_empty_variable_is_refused_for_a_choice() {
    for (variable, expected) in [
        ("MIG_STRATEGY", "unable to validate flags: unknown MIG strategy: ; "),
        (
            "DEVICE_LIST_STRATEGY",
            "unable to validate flags: invalid --device-list-strategy option: invalid strategy: ; ",
        ),
        (
            "DEVICE_ID_STRATEGY",
            "unable to validate flags: invalid --device-id-strategy option: ; ",
        ),
        (
            "DEVICE_DISCOVERY_STRATEGY",
            "unable to validate flags: invalid --device-discovery-strategy option ; ",
        ),
    ] {
        let error = load(&[], &[(variable, "")], "").expect_err(variable).to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let others = [
        "NVIDIA_DRIVER_ROOT",
        "CONTAINER_DRIVER_ROOT",
        "MPS_ROOT",
        "PASS_DEVICE_SPECS",
        "IMEX_CHANNEL_IDS",
        "CONFIG_FILE",
    ];
    let others = others.map(|name| (name, ""));
    let read = load(&[], &others, "").expect("a configuration").0;
    assert_eq!(
        (
            read.driver_root.as_str(),
            read.plugin.container_driver_root.as_str(),
            read.imex
        ),
        ("/", "/", Imex::default())
    );
}

#[test]
fn a_number_or_duration_flag_refuses_other_text() {
    for (flag, variable, value, expected) in [
        ("--kube-api-qps=x", "KUBE_API_QPS", "x", "parse error; write a number"),
        ("--kube-api-burst=1.5", "KUBE_API_BURST", "1.5", "parse error; write a number"),
        (
            "--sleep-interval=1day",
            "GFD_SLEEP_INTERVAL",
            "1day",
            "time: unknown unit \"day\" in duration \"1day\"; write 60s, 1h30m, or infinite",
        ),
    ] {
        let name = flag.trim_start_matches("--").split('=').next().unwrap_or_default();
        let error = |arguments: &[&str], variables: &[(&str, &str)]| {
            of(NvidiaProgram::FeatureDiscovery, arguments, variables, "")
                .expect_err(flag)
                .to_string()
        };
        assert_eq!(
            error(&[flag], &[]),
            format!("invalid value {value:?} for flag -{name}: {expected}")
        );
        let by_variable =
            format!("could not parse {value:?} from environment variable {variable:?} as value for flag {name}: {expected}");
        assert_eq!(error(&[], &[(variable, value)]), by_variable);
    }
    let fine = of(
        NvidiaProgram::FeatureDiscovery,
        &["--kube-api-qps=1.5"],
        &[("KUBE_API_BURST", "")],
        "",
    );
    assert_eq!(fine, Ok((NvidiaConfig::default(), Vec::new())));
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
    assert_eq!(read.mig_strategy, NvidiaMigStrategy::Single);
    assert!(!read.plugin.pass_device_specs);
    assert_eq!(
        warnings,
        [
            "flags.plugin.passDeviceSpec",
            "sharing.timeSlicing.resources[0].replica",
            "extra"
        ]
        .map(|key| format!("unknown key {key} in the configuration file; it is ignored"))
    );
}

#[test]
fn a_file_in_json_or_yaml_says_the_same() {
    let yaml = "version: v1\nflags:\n  migStrategy: mixed\n  failOnInitError: false\n  nvidiaDriverRoot: /run/nvidia/driver\n  \
                gdsEnabled: true\n  plugin:\n    deviceListStrategy: [envvar, cdi-cri]\n    deviceIDStrategy: index\n  gfd:\n    \
                sleepInterval: 1m30s\nresources:\n  gpus:\n  - {pattern: '*A100*', name: a100}\n  - {pattern: '*', name: \
                nvidia.com/other}\nsharing:\n  timeSlicing:\n    renameByDefault: true\n    resources:\n    - {name: a100, replicas: 4, \
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
        ("1.5", SleepInterval::Every(Duration::from_nanos(1))),
        (".5s", SleepInterval::Every(Duration::from_millis(500))),
        ("-5s", SleepInterval::Every(Duration::from_secs(1))),
        ("-5", SleepInterval::Every(Duration::from_secs(1))),
        ("0", SleepInterval::Every(Duration::from_secs(1))),
        ("infinite", SleepInterval::Infinite),
    ] {
        let read = config(&format!("flags: {{gfd: {{sleepInterval: {text}}}}}"));
        assert_eq!(read.feature_discovery.sleep_interval, expected, "{text}");
    }
    assert!(load(&[], &[], "flags: {gfd: {sleepInterval: soon}}").is_err());
}

/// MPS forbids requests for more than one device unless the configuration allows them.
#[test]
fn mps_wins_over_time_slicing() {
    let both = "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}, mps: {resources: [{name: gpu, replicas: 3}]}}";
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

/// The MPS control daemon does not need the host's root directory.
#[test]
fn the_mps_control_daemon_refuses_mig_mixed() {
    let file = "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}";
    let read = |arguments| of(NvidiaProgram::MpsControlDaemon, arguments, &[], file).map(|(config, _)| config.sharing.strategy);
    assert_eq!(read(&[]), Ok(SharingStrategy::Mps));
    assert_eq!(
        read(&["--mig-strategy=mixed"]),
        Err(Error::flags("using --mig-strategy=mixed is not supported with MPS"))
    );
}

#[test]
fn feature_discovery_does_not_need_the_root_of_mps() {
    let file = "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}";
    let read = of(
        NvidiaProgram::FeatureDiscovery,
        &["--device-discovery-strategy=vfio"],
        &[],
        file,
    )
    .expect("a configuration")
    .0;
    assert_eq!(
        (read.sharing.strategy, read.discovery),
        (SharingStrategy::Mps, Discovery::Vfio)
    );
}

const PATHS: [&str; 3] = ["/a", "/b", "/c"];
const SWITCH: [&str; 3] = ["true", "false", "true"];

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
    ("driver-root", "NVIDIA_DRIVER_ROOT", "flags.nvidiaDriverRoot", PATHS),
    ("dev-root", "NVIDIA_DEV_ROOT", "flags.nvidiaDevRoot", PATHS),
    (
        "pass-device-specs",
        "PASS_DEVICE_SPECS",
        "flags.plugin.passDeviceSpecs",
        SWITCH,
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
    ("gdrcopy-enabled", "GDRCOPY_ENABLED", "flags.gdrcopyEnabled", SWITCH),
    ("gds-enabled", "GDS_ENABLED", "flags.gdsEnabled", SWITCH),
    ("mofed-enabled", "MOFED_ENABLED", "flags.mofedEnabled", SWITCH),
    (
        "cdi-annotation-prefix",
        "CDI_ANNOTATION_PREFIX",
        "flags.plugin.cdiAnnotationPrefix",
        ["a/", "b/", "c/"],
    ),
    ("nvidia-cdi-hook-path", "NVIDIA_CTK_PATH", "flags.plugin.nvidiaCTKPath", PATHS),
    (
        "driver-root-ctr-path",
        "DRIVER_ROOT_CTR_PATH",
        "flags.plugin.containerDriverRoot",
        PATHS,
    ),
    ("mps-root", "MPS_ROOT", "flags.mpsRoot", PATHS),
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
    ("imex-required", "IMEX_REQUIRED", "imex.required", SWITCH),
    ("cdi-feature-flags", "CDI_FEATURE_FLAGS", "", ["a", "b", "c"]),
    ("cdi-disable-hooks", "CDI_DISABLE_HOOKS", "", ["a", "b", "c"]),
    ("kubelet-socket", "KUBELET_SOCKET", "", PATHS),
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
fn flag_variable_file_and_default_win_in_order() {
    let mut untested: Vec<&str> = flags::names(NvidiaProgram::DevicePlugin);
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
    let file = "flags: {useNodeFeatureAPI: false, gfd: {oneshot: true, noTimestamp: true, outputFile: /f, machineTypeFile: /m}}";
    let read = of(NvidiaProgram::FeatureDiscovery, &[], &[("GFD_OUTPUT_FILE", "")], file)
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
