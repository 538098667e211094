//! The flags and the environment variables. One table lists them all.

use std::collections::BTreeMap;

use clap::{Arg, ArgAction, Command};

use crate::{Environment, Error};

mod config_manager;

/// The NVIDIA program whose flags are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NvidiaProgram {
    /// `nvidia-device-plugin`.
    DevicePlugin,
    /// `gpu-feature-discovery`.
    FeatureDiscovery,
    /// `config-manager`.
    ConfigManager,
    /// `mps-control-daemon`.
    MpsControlDaemon,
}

impl NvidiaProgram {
    /// Return the program that is invoked under this name, which may be a path.
    pub fn named(argv0: &str) -> Option<NvidiaProgram> {
        match argv0.rsplit('/').next() {
            Some("nvidia-device-plugin") => Some(NvidiaProgram::DevicePlugin),
            Some("gpu-feature-discovery") => Some(NvidiaProgram::FeatureDiscovery),
            Some("config-manager") => Some(NvidiaProgram::ConfigManager),
            Some("mps-control-daemon") => Some(NvidiaProgram::MpsControlDaemon),
            _ => None,
        }
    }

    /// Return the program's name.
    pub fn name(self) -> &'static str {
        match self {
            NvidiaProgram::DevicePlugin => "nvidia-device-plugin",
            NvidiaProgram::FeatureDiscovery => "gpu-feature-discovery",
            NvidiaProgram::ConfigManager => "config-manager",
            NvidiaProgram::MpsControlDaemon => "mps-control-daemon",
        }
    }

    fn about(self) -> &'static str {
        match self {
            NvidiaProgram::DevicePlugin => {
                "Offer this node's NVIDIA GPUs to the kubelet. Divvy's replacement of NVIDIA's device plugin."
            }
            NvidiaProgram::FeatureDiscovery => {
                "Describe this node's NVIDIA GPUs in node labels. Divvy's replacement of NVIDIA's GPU feature discovery."
            }
            NvidiaProgram::ConfigManager => {
                "Choose this node's configuration file by a node label. Divvy's replacement of NVIDIA's config-manager."
            }
            NvidiaProgram::MpsControlDaemon => {
                "Run CUDA's Multi-Process Service for the GPUs that this node shares through it. Divvy's replacement of NVIDIA's MPS control daemon."
            }
        }
    }

    /// Return the text after the flags in the help.
    fn more(self) -> String {
        let variables: Vec<String> = of(self)
            .filter(|flag| is_variable_only(flag))
            .map(|flag| format!("  {}: {}", flag.env.join(", "), flag.help))
            .collect();
        match self {
            NvidiaProgram::ConfigManager => config_manager::MORE.to_owned(),
            _ if variables.is_empty() => String::new(),
            _ => format!("Environment variables without a flag:\n{}", variables.join("\n")),
        }
    }
}

/// The kind of a flag's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FlagKind {
    Text,
    Bool,
    /// Several values, separated by commas or given by repeating the flag.
    List,
    /// A number, several numbers, or a duration. A variable that is set to nothing counts as not set.
    Number,
}

/// A flag.
struct Flag {
    name: &'static str,
    aliases: &'static [&'static str],
    /// The environment variables of the flag. The first one that is set counts.
    env: &'static [&'static str],
    kind: FlagKind,
    /// The programs that have the flag.
    programs: &'static [NvidiaProgram],
    help: &'static str,
}

const PLUGIN: &[NvidiaProgram] = &[NvidiaProgram::DevicePlugin];
const DISCOVERY: &[NvidiaProgram] = &[NvidiaProgram::FeatureDiscovery];
const BOTH: &[NvidiaProgram] = &[NvidiaProgram::DevicePlugin, NvidiaProgram::FeatureDiscovery];
const WITH_CLUSTER: &[NvidiaProgram] = &[NvidiaProgram::FeatureDiscovery, NvidiaProgram::ConfigManager];
/// The programs that read a configuration file.
const CONFIGURED: &[NvidiaProgram] = &[
    NvidiaProgram::DevicePlugin,
    NvidiaProgram::FeatureDiscovery,
    NvidiaProgram::MpsControlDaemon,
];
const ALL: &[NvidiaProgram] = &[
    NvidiaProgram::DevicePlugin,
    NvidiaProgram::FeatureDiscovery,
    NvidiaProgram::ConfigManager,
    NvidiaProgram::MpsControlDaemon,
];

const fn flag(
    name: &'static str,
    env: &'static [&'static str],
    kind: FlagKind,
    programs: &'static [NvidiaProgram],
    help: &'static str,
) -> Flag {
    Flag {
        name,
        aliases: &[],
        env,
        kind,
        programs,
        help,
    }
}

const fn with_alias(flag: Flag, aliases: &'static [&'static str]) -> Flag {
    Flag { aliases, ..flag }
}

use FlagKind::{Bool, List, Number, Text};

const FLAGS: [Flag; 37] = [
    flag(
        "mig-strategy",
        &["GFD_MIG_STRATEGY", "MIG_STRATEGY"],
        Text,
        CONFIGURED,
        "How MIG devices are offered: none, single (as nvidia.com/gpu), or mixed (one resource for each profile) [default: none]",
    ),
    flag(
        "fail-on-init-error",
        &["GFD_FAIL_ON_INIT_ERROR", "FAIL_ON_INIT_ERROR"],
        Bool,
        BOTH,
        "End if the driver cannot be initialized; if false, wait for it [default: true]",
    ),
    with_alias(
        flag(
            "driver-root",
            &["NVIDIA_DRIVER_ROOT"],
            Text,
            PLUGIN,
            "Root directory of the driver's installation on the host [default: /]",
        ),
        &["nvidia-driver-root"],
    ),
    with_alias(
        flag(
            "dev-root",
            &["NVIDIA_DEV_ROOT"],
            Text,
            PLUGIN,
            "Directory on the host that contains the driver's /dev [default: the driver root]",
        ),
        &["nvidia-dev-root"],
    ),
    flag(
        "pass-device-specs",
        &["PASS_DEVICE_SPECS"],
        Bool,
        PLUGIN,
        "List device nodes in the answer to Allocate [default: false]",
    ),
    flag(
        "device-list-strategy",
        &["DEVICE_LIST_STRATEGY"],
        List,
        PLUGIN,
        "How a container is told its devices: envvar, volume-mounts, cdi-annotations, cdi-cri; several separated by commas [default: envvar]",
    ),
    flag(
        "device-id-strategy",
        &["DEVICE_ID_STRATEGY"],
        Text,
        PLUGIN,
        "How devices are named in the answer to Allocate: uuid or index [default: uuid]",
    ),
    flag(
        "gdrcopy-enabled",
        &["GDRCOPY_ENABLED"],
        Bool,
        PLUGIN,
        "Give containers with GPUs access to GDRCopy [default: false]",
    ),
    flag(
        "gds-enabled",
        &["GDS_ENABLED"],
        Bool,
        PLUGIN,
        "Give containers with GPUs access to GPUDirect Storage [default: false]",
    ),
    flag(
        "mofed-enabled",
        &["MOFED_ENABLED"],
        Bool,
        PLUGIN,
        "Give containers with GPUs access to Mellanox network devices [default: false]",
    ),
    flag(
        "cdi-annotation-prefix",
        &["CDI_ANNOTATION_PREFIX"],
        Text,
        PLUGIN,
        "Prefix of the key of CDI annotations [default: cdi.k8s.io/]",
    ),
    with_alias(
        flag(
            "nvidia-cdi-hook-path",
            &["NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"],
            Text,
            PLUGIN,
            "Accepted and not used: Divvy's CDI specs have no hooks",
        ),
        &["nvidia-ctk-path"],
    ),
    with_alias(
        flag(
            "driver-root-ctr-path",
            &["DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"],
            Text,
            BOTH,
            "Where the driver's root directory is mounted in this container [default: /driver-root]",
        ),
        &["container-driver-root"],
    ),
    flag(
        "mps-root",
        &["MPS_ROOT"],
        Text,
        PLUGIN,
        "Directory on the host for the files of the Multi-Process Service; required by sharing.mps",
    ),
    flag(
        "shared-devices-allocation-policy",
        &["SHARED_DEVICES_ALLOCATION_POLICY"],
        Text,
        PLUGIN,
        "Which replicas to prefer: distributed (those of the least used GPU) or packed [default: distributed]",
    ),
    flag(
        "device-discovery-strategy",
        &["DEVICE_DISCOVERY_STRATEGY"],
        Text,
        BOTH,
        "How devices are found: auto, nvml, or tegra [default: auto]",
    ),
    flag(
        "imex-channel-ids",
        &["IMEX_CHANNEL_IDS"],
        Number,
        PLUGIN,
        "IMEX channels that containers get: none, or 0 [default: none]",
    ),
    flag(
        "imex-required",
        &["IMEX_REQUIRED"],
        Bool,
        PLUGIN,
        "Exit if a requested IMEX channel does not exist [default: false]",
    ),
    flag(
        "kubelet-socket",
        &["KUBELET_SOCKET"],
        Text,
        PLUGIN,
        "The kubelet's socket; if it is empty, the plugin serves and does not register [default: /var/lib/kubelet/device-plugins/kubelet.sock]",
    ),
    flag(
        "config-file",
        &["GFD_CONFIG_FILE", "CONFIG_FILE"],
        Text,
        CONFIGURED,
        "Configuration file of version v1, YAML or JSON. A change of its content takes effect without a restart",
    ),
    flag(
        "cdi-feature-flags",
        &["CDI_FEATURE_FLAGS"],
        List,
        PLUGIN,
        "Accepted and not used: Divvy generates CDI specs on its own",
    ),
    flag(
        "cdi-disable-hooks",
        &["CDI_DISABLE_HOOKS"],
        List,
        PLUGIN,
        "Accepted and not used: Divvy's CDI specs have no hooks",
    ),
    flag(
        "disable-healthchecks",
        &["DP_DISABLE_HEALTHCHECKS"],
        Text,
        PLUGIN,
        "XIDs that leave a GPU healthy, separated by commas, or all (also written xids)",
    ),
    flag(
        "enable-healthchecks",
        &["DP_ENABLE_HEALTHCHECKS"],
        Text,
        PLUGIN,
        "XIDs that make a GPU unhealthy although they are ignored otherwise, separated by commas, or all (also written xids)",
    ),
    flag(
        "oneshot",
        &["GFD_ONESHOT"],
        Bool,
        DISCOVERY,
        "Write the labels once and end [default: false]",
    ),
    flag(
        "no-timestamp",
        &["GFD_NO_TIMESTAMP"],
        Bool,
        DISCOVERY,
        "Leave out the label with the time of the start [default: false]",
    ),
    flag(
        "sleep-interval",
        &["GFD_SLEEP_INTERVAL"],
        Number,
        DISCOVERY,
        "Time between two updates of the labels, such as 60s, or infinite [default: 60s]",
    ),
    with_alias(
        flag(
            "output-file",
            &["GFD_OUTPUT_FILE"],
            Text,
            DISCOVERY,
            "File for the labels; empty for the standard output [default: /etc/kubernetes/node-feature-discovery/features.d/gfd]",
        ),
        &["output"],
    ),
    flag(
        "machine-type-file",
        &["GFD_MACHINE_TYPE_FILE"],
        Text,
        DISCOVERY,
        "File with the machine's type [default: /sys/class/dmi/id/product_name]",
    ),
    flag(
        "use-node-feature-api",
        &["GFD_USE_NODE_FEATURE_API", "USE_NODE_FEATURE_API"],
        Bool,
        DISCOVERY,
        "Write the labels to a NodeFeature object instead of the file [default: true]",
    ),
    flag(
        "kubeconfig",
        &["KUBECONFIG"],
        Text,
        WITH_CLUSTER,
        "The kubeconfig file [default: the pod's service account]",
    ),
    flag(
        "kube-api-qps",
        &["KUBE_API_QPS"],
        Number,
        DISCOVERY,
        "Accepted and not used: the API server is called only when labels change",
    ),
    flag(
        "kube-api-burst",
        &["KUBE_API_BURST"],
        Number,
        DISCOVERY,
        "Accepted and not used: the API server is called only when labels change",
    ),
    flag(
        "namespace",
        &["NAMESPACE"],
        Text,
        DISCOVERY,
        "Namespace of the NodeFeature object [default: default]",
    ),
    flag("node-name", &["NODE_NAME"], Text, WITH_CLUSTER, "Name of this node"),
    flag(
        "pod-name",
        &["POD_NAME"],
        Text,
        DISCOVERY,
        "Name of this pod, the owner of the NodeFeature object",
    ),
    flag(
        "log-level",
        &["DIVVY_LOG"],
        Text,
        ALL,
        "Level of the log on standard error: error, warn, info, debug, or trace",
    ),
];

/// The settings that have only an environment variable and no flag: the health checks.
const VARIABLES_ONLY: [&str; 2] = ["disable-healthchecks", "enable-healthchecks"];
/// The subcommand of `mps-control-daemon`.
const MOUNT_SHM: &str = "mount-shm";

/// A program's arguments and environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invocation {
    program: NvidiaProgram,
    is_mount_shm: bool,
    /// The values from flags and variables, by the flag's name.
    given: BTreeMap<&'static str, Given>,
    /// The first argument that is not a flag.
    ignored: Option<String>,
}

/// The values of a flag.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Given {
    values: Vec<String>,
    /// The environment variable that has the value, if it does not come from an argument.
    variable: Option<&'static str>,
}

/// A reason to end the program at once. The text is its help, its version, or what is wrong with its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EarlyExit {
    /// The text to print.
    pub text: String,
    /// Whether the arguments are wrong. If so, the text belongs on standard error, and the program fails.
    pub is_error: bool,
}

impl Invocation {
    /// Parse arguments (without the program's name) as Go's flag package does: a flag has one or two dashes, and what follows the first
    /// argument without a dash is not read.
    ///
    /// # Errors
    /// Fails if the arguments ask for help or for the version, or if they are wrong.
    pub fn parse(
        program: NvidiaProgram,
        version: &'static str,
        arguments: &[String],
        environment: &Environment,
    ) -> Result<Invocation, EarlyExit> {
        let says = |text: String| EarlyExit { text, is_error: false };
        let wrong = |text: String| EarlyExit {
            text: format!("error: {text}; {} --help lists the flags\n", program.name()),
            is_error: true,
        };
        let help = || says(command(program, version).render_help().to_string());
        let mut given: BTreeMap<&'static str, Given> = BTreeMap::new();
        let mut words = arguments.iter();
        let first = loop {
            let Some(word) = words.next() else { break None };
            if word == "--" {
                break words.next();
            }
            let Some(flag) = word.strip_prefix('-').filter(|flag| !flag.is_empty()) else {
                break Some(word);
            };
            let flag = flag.strip_prefix('-').unwrap_or(flag);
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (flag, None),
            };
            match name {
                "help" | "h" => return Err(help()),
                "version" | "v" => return Err(says(command(program, version).render_version())),
                _ => {}
            }
            let flag = of(program).find(|flag| flag.is_named(name) && !is_variable_only(flag));
            let flag = flag.ok_or_else(|| wrong(format!("flag provided but not defined: -{name}")))?;
            let value = match (value, flag.kind) {
                (Some(value), _) => value,
                (None, Bool) => "true",
                (None, _) => words
                    .next()
                    .ok_or_else(|| wrong(format!("flag needs an argument: -{name}")))?,
            };
            given.entry(flag.name).or_default().values.push(value.to_owned());
        };
        let is_mount_shm = program == NvidiaProgram::MpsControlDaemon && first.is_some_and(|word| word == MOUNT_SHM);
        if first.is_some_and(|word| word == "help" || word == "h") {
            return Err(help());
        }
        for flag in of(program) {
            if let Some(found) = flag.from(program, environment) {
                given.entry(flag.name).or_insert(found);
            }
        }
        Ok(Invocation {
            program,
            is_mount_shm,
            given,
            ignored: first.filter(|_| !is_mount_shm).cloned(),
        })
    }

    /// Report whether the program is only to mount the shared memory of MPS, and to end then.
    pub fn is_mount_shm(&self) -> bool {
        self.is_mount_shm
    }

    /// Return a warning if the arguments contain a word that is not a flag.
    pub fn warning(&self) -> Option<String> {
        self.ignored.as_ref().map(|word| {
            format!(
                "the argument {word:?} is not a flag; it is ignored, as are all arguments after it. Write a value as --flag=value"
            )
        })
    }

    pub(crate) fn without_flags(program: NvidiaProgram) -> Invocation {
        Invocation {
            program,
            is_mount_shm: false,
            given: BTreeMap::new(),
            ignored: None,
        }
    }

    pub(crate) fn program(&self) -> NvidiaProgram {
        self.program
    }

    /// Return the path of the configuration file, if there is one.
    pub fn config_file(&self) -> Option<&str> {
        self.filled("config-file")
    }

    /// Return the value of a flag that takes one value. The value may be empty.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.given.get(name)?.values.last().map(String::as_str)
    }

    /// Return the value of a flag for which an empty value means none.
    pub fn filled(&self, name: &str) -> Option<&str> {
        self.text(name).filter(|text| !text.is_empty())
    }

    /// Return the values of a flag that takes several values. A value may be empty.
    pub(crate) fn list(&self, name: &str) -> Option<Vec<String>> {
        let values = self.given.get(name)?.values.iter();
        Some(
            values
                .flat_map(|value| value.split(','))
                .map(|part| part.trim().to_owned())
                .collect(),
        )
    }

    pub(crate) fn boolean(&self, name: &str) -> Result<Option<bool>, Error> {
        let Some(text) = self.text(name) else { return Ok(None) };
        // Go's strconv.ParseBool.
        match text {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(Some(true)),
            "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(Some(false)),
            // As with NVIDIA's programs, a variable that is set to nothing means false.
            "" if self.variable(name).is_some() => Ok(Some(false)),
            _ => Err(Error::Value(match self.variable(name) {
                Some(variable) => format!(
                    "could not parse {text:?} as bool value from environment variable {variable:?} for flag {name}; write true or false"
                ),
                None => format!("invalid boolean value {text:?} for -{name}: parse error; write true or false"),
            })),
        }
    }

    /// Return the error for a value of a flag or its variable.
    pub(crate) fn wrong(&self, name: &str, value: &str, reason: &str) -> Error {
        Error::Value(match self.variable(name) {
            Some(variable) => {
                format!("could not parse {value:?} from environment variable {variable:?} as value for flag {name}: {reason}")
            }
            None => format!("invalid value {value:?} for flag -{name}: {reason}"),
        })
    }

    fn variable(&self, name: &str) -> Option<&'static str> {
        self.given.get(name)?.variable
    }
}

fn of(program: NvidiaProgram) -> impl Iterator<Item = &'static Flag> {
    let flags = FLAGS.iter().chain(&config_manager::FLAGS);
    flags.filter(move |flag| flag.programs.contains(&program))
}

fn is_variable_only(flag: &Flag) -> bool {
    VARIABLES_ONLY.contains(&flag.name)
}

impl Flag {
    /// Return the names of the flag's variables. Variables that begin with `GFD_` are only for GPU feature discovery.
    fn variables(&self, program: NvidiaProgram) -> impl Iterator<Item = &'static str> {
        let is_for = move |name: &&str| program == NvidiaProgram::FeatureDiscovery || !name.starts_with("GFD_");
        self.env.iter().copied().filter(is_for)
    }

    fn is_named(&self, name: &str) -> bool {
        self.name == name || self.aliases.contains(&name) || self.short().is_some_and(|short| name == short.to_string())
    }

    fn short(&self) -> Option<char> {
        (self.name == "output-file").then_some('o')
    }

    /// Return the value of the first variable that is set. It may be set to nothing.
    fn from(&self, program: NvidiaProgram, environment: &Environment) -> Option<Given> {
        let mut set = self
            .variables(program)
            .filter_map(|name| Some((name, environment.get(name)?)));
        let (name, value) = set.next()?;
        (self.kind != Number || !value.is_empty()).then(|| Given {
            values: vec![value.clone()],
            variable: Some(name),
        })
    }

    fn argument(&self, program: NvidiaProgram) -> Arg {
        let variables: Vec<&str> = self.variables(program).collect();
        let argument = Arg::new(self.name)
            .long(self.name)
            .visible_aliases(self.aliases)
            .help(format!("{} [env: {}]", self.help, variables.join(", ")));
        let argument = match self.short() {
            Some(short) => argument.short(short),
            None => argument,
        };
        match (self.kind, self.name) {
            (Bool, _) => argument.value_name("BOOL").num_args(0..=1).require_equals(true),
            (List, _) | (_, "imex-channel-ids") => argument.value_name("VALUE,…"),
            (Text | Number, _) => argument.value_name("VALUE"),
        }
    }
}

/// Return the program's grammar, from which the help is made.
fn command(program: NvidiaProgram, version: &'static str) -> Command {
    let mount = Command::new(MOUNT_SHM).about("Mount the memory that the processes of MPS share at /mps/shm, and end");
    Command::new(program.name())
        .subcommands((program == NvidiaProgram::MpsControlDaemon).then_some(mount))
        .disable_help_subcommand(true)
        .disable_version_flag(true)
        .about(program.about())
        .version(version)
        .after_help(program.more())
        .args(
            of(program)
                .filter(|flag| !is_variable_only(flag))
                .map(|flag| flag.argument(program)),
        )
        .arg(
            Arg::new("version")
                .short('v')
                .long("version")
                .help("Print version")
                .action(ArgAction::Version),
        )
}

/// Return the names of all flags of a program, without settings that have only a variable.
#[cfg(test)]
pub(crate) fn names(program: NvidiaProgram) -> Vec<&'static str> {
    of(program)
        .filter(|flag| !is_variable_only(flag))
        .map(|flag| flag.name)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(program: NvidiaProgram, arguments: &[&str], environment: &[(&str, &str)]) -> Result<Invocation, EarlyExit> {
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        let environment = environment
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Invocation::parse(program, "1.2.3", &arguments, &environment.collect())
    }

    #[test]
    fn the_name_of_the_program_selects_its_flags() {
        for (name, program) in [
            ("/usr/bin/nvidia-device-plugin", Some(NvidiaProgram::DevicePlugin)),
            ("nvidia-device-plugin", Some(NvidiaProgram::DevicePlugin)),
            ("/usr/bin/gpu-feature-discovery", Some(NvidiaProgram::FeatureDiscovery)),
            ("config-manager", Some(NvidiaProgram::ConfigManager)),
            ("divvy-agent", None),
            ("", None),
        ] {
            assert_eq!(NvidiaProgram::named(name), program, "{name}");
        }
    }

    #[test]
    fn flags_are_written_as_go_programs_accept_them() {
        for arguments in [
            &["--mig-strategy=mixed", "--pass-device-specs"][..],
            &["--mig-strategy", "mixed", "--pass-device-specs=true"],
            &["-mig-strategy=mixed", "-pass-device-specs=T"],
            &["-mig-strategy", "mixed", "--pass-device-specs=1"],
            &[
                "--mig-strategy=none",
                "--mig-strategy=mixed",
                "--pass-device-specs=false",
                "--pass-device-specs",
            ],
        ] {
            let parsed = parse(NvidiaProgram::DevicePlugin, arguments, &[]).expect("arguments");
            assert_eq!(parsed.text("mig-strategy"), Some("mixed"), "{arguments:?}");
            assert_eq!(parsed.boolean("pass-device-specs"), Ok(Some(true)), "{arguments:?}");
        }
        let lists = parse(
            NvidiaProgram::DevicePlugin,
            &[
                "--device-list-strategy=envvar,cdi-cri",
                "--device-list-strategy",
                "volume-mounts",
            ],
            &[],
        );
        assert_eq!(
            lists.expect("arguments").list("device-list-strategy"),
            Some(vec!["envvar".to_owned(), "cdi-cri".to_owned(), "volume-mounts".to_owned()])
        );
        let output = parse(NvidiaProgram::FeatureDiscovery, &["-o", "", "--oneshot"], &[]).expect("arguments");
        assert_eq!(output.text("output-file"), Some(""));
    }

    #[test]
    fn the_first_variable_that_is_set_counts_and_a_flag_wins() {
        let environment = [("MIG_STRATEGY", "single"), ("KUBELET_SOCKET", ""), ("IMEX_CHANNEL_IDS", "")];
        let parsed = parse(NvidiaProgram::DevicePlugin, &[], &environment).expect("no arguments");
        assert_eq!(parsed.text("mig-strategy"), Some("single"));
        assert_eq!((parsed.text("mps-root"), parsed.text("kubelet-socket")), (None, Some("")));
        assert_eq!(parsed.list("imex-channel-ids"), None);
        let parsed = parse(NvidiaProgram::DevicePlugin, &["--mig-strategy=mixed"], &environment).expect("arguments");
        assert_eq!(parsed.text("mig-strategy"), Some("mixed"));
        let both = [("GFD_MIG_STRATEGY", "none"), ("MIG_STRATEGY", "single")];
        let parsed = parse(NvidiaProgram::FeatureDiscovery, &[], &both).expect("no arguments");
        assert_eq!(parsed.text("mig-strategy"), Some("none"));
        let parsed = parse(NvidiaProgram::DevicePlugin, &[], &both).expect("no arguments");
        assert_eq!(parsed.text("mig-strategy"), Some("single"));
        // As with NVIDIA's programs, a variable that is set to nothing has a value.
        let empty = [
            ("GFD_MIG_STRATEGY", ""),
            ("MIG_STRATEGY", "single"),
            ("GFD_ONESHOT", ""),
            ("FAIL_ON_INIT_ERROR", ""),
            ("CONFIG_FILE", ""),
        ];
        let parsed = parse(NvidiaProgram::FeatureDiscovery, &[], &empty).expect("no arguments");
        assert_eq!((parsed.text("mig-strategy"), parsed.config_file()), (Some(""), None));
        assert_eq!(parsed.boolean("fail-on-init-error"), Ok(Some(false)));
    }

    /// A warning says that these arguments are ignored.
    #[test]
    fn arguments_after_one_without_a_dash_are_ignored() {
        for (arguments, is_set, ignored) in [
            (&["--pass-device-specs", "false"][..], true, Some("false")),
            (&["extra", "--pass-device-specs"], false, Some("extra")),
            (&["--pass-device-specs", "--", "--nonsense"], true, Some("--nonsense")),
            (&["--pass-device-specs", "--"], true, None),
            (&["-"], false, Some("-")),
            (&["--mps-root", "--pass-device-specs"], false, None),
        ] {
            let parsed = parse(NvidiaProgram::DevicePlugin, arguments, &[]).expect("arguments");
            let set = parsed.boolean("pass-device-specs").map(Option::unwrap_or_default);
            assert_eq!((set, parsed.ignored.as_deref()), (Ok(is_set), ignored), "{arguments:?}");
            assert_eq!(parsed.warning().is_some(), ignored.is_some(), "{arguments:?}");
        }
    }

    #[test]
    fn wrong_arguments_are_errors_and_help_is_not() {
        for (arguments, is_error, part) in [
            (
                &["--nonsense"][..],
                true,
                "error: flag provided but not defined: -nonsense; nvidia-device-plugin --help lists the flags",
            ),
            (&["-x=1"], true, "flag provided but not defined: -x"),
            (
                &["---mig-strategy=none"],
                true,
                "flag provided but not defined: --mig-strategy",
            ),
            (&["--mig-strategy"], true, "flag needs an argument: -mig-strategy"),
            (&["--oneshot"], true, "flag provided but not defined: -oneshot"),
            (
                &["--disable-healthchecks=all"],
                true,
                "flag provided but not defined: -disable-healthchecks",
            ),
            (&["--help"], false, "NVIDIA_DRIVER_ROOT"),
            (&["-help"], false, "DP_DISABLE_HEALTHCHECKS"),
            (&["--mig-strategy=none", "-h"], false, "NVIDIA_DRIVER_ROOT"),
            (&["help"], false, "NVIDIA_DRIVER_ROOT"),
            (&["h", "extra"], false, "NVIDIA_DRIVER_ROOT"),
            (&["--version"], false, "nvidia-device-plugin 1.2.3"),
            (&["-v"], false, "nvidia-device-plugin 1.2.3"),
        ] {
            let stop = parse(NvidiaProgram::DevicePlugin, arguments, &[]).expect_err("stop");
            assert!(
                stop.is_error == is_error && stop.text.contains(part),
                "{arguments:?}: {stop:?}"
            );
        }
        for (arguments, variables, expected) in [
            (
                &[][..],
                &[("GDS_ENABLED", "maybe")][..],
                "could not parse \"maybe\" as bool value from environment variable \"GDS_ENABLED\" for flag gds-enabled; write true or false",
            ),
            (
                &["--gds-enabled=maybe"],
                &[],
                "invalid boolean value \"maybe\" for -gds-enabled: parse error; write true or false",
            ),
            (
                &["--gds-enabled="],
                &[("GDS_ENABLED", "")],
                "invalid boolean value \"\" for -gds-enabled: parse error; write true or false",
            ),
        ] {
            let parsed = parse(NvidiaProgram::DevicePlugin, arguments, variables).expect("arguments");
            let error = parsed.boolean("gds-enabled").expect_err("no boolean").to_string();
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn help_names_every_flag_its_default_and_its_variable() {
        insta::assert_snapshot!(command(NvidiaProgram::DevicePlugin, "1.2.3").term_width(130).render_help());
        insta::assert_snapshot!(
            command(NvidiaProgram::FeatureDiscovery, "1.2.3")
                .term_width(130)
                .render_help()
        );
        insta::assert_snapshot!(command(NvidiaProgram::ConfigManager, "1.2.3").term_width(130).render_help());
        insta::assert_snapshot!(
            command(NvidiaProgram::MpsControlDaemon, "1.2.3")
                .term_width(130)
                .render_help()
        );
    }

    #[test]
    fn only_the_mps_control_daemon_has_mount_shm() {
        let parsed = |program, arguments| parse(program, arguments, &[]).map(|parsed| parsed.is_mount_shm());
        assert_eq!(parsed(NvidiaProgram::MpsControlDaemon, &["mount-shm"]), Ok(true));
        assert_eq!(parsed(NvidiaProgram::MpsControlDaemon, &["--mig-strategy=none"]), Ok(false));
        for (program, arguments) in [
            (NvidiaProgram::DevicePlugin, &["mount-shm"][..]),
            (NvidiaProgram::MpsControlDaemon, &["mount"]),
        ] {
            assert_eq!(parsed(program, arguments), Ok(false), "{program:?} {arguments:?}");
        }
        let unknown = parsed(NvidiaProgram::MpsControlDaemon, &["--mps-root=/x"]);
        assert!(unknown.is_err_and(|stop| stop.is_error));
    }
}
