//! The command line of NVIDIA's `nvidia-ctk`, for scripts that call it. If `divvy` is started under that name, this module translates the
//! arguments to those of the corresponding `divvy` command.

use std::ffi::OsString;

use anyhow::bail;
use clap::error::ErrorKind;
use clap::{ArgAction, Args, CommandFactory as _, Parser, Subcommand};

/// Divvy's replacement for NVIDIA's nvidia-ctk: runtime configure, cdi generate, cdi list, cdi transform root, config, system, hook
#[derive(Debug, Parser)]
#[command(name = "nvidia-ctk", version = VERSION, disable_version_flag = true, args_override_self = true)]
struct NvidiaCtk {
    /// Log at level debug
    #[arg(long, short, global = true, env = "NVIDIA_CTK_DEBUG", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value = "false", value_parser = variable)]
    debug: bool,
    /// Print only errors
    #[arg(long, global = true, env = "NVIDIA_CTK_QUIET", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value = "false", value_parser = variable)]
    quiet: bool,
    /// Accepted for compatibility; has no effect on these commands
    #[arg(long = "config", id = "toolkit_config", env = "NVIDIA_CTK_CONFIG", value_name = "FILE")]
    _config: Option<String>,
    /// Print the version
    #[arg(long, short, action = ArgAction::Version)]
    _version: Option<bool>,
    #[command(subcommand)]
    command: CtkCommand,
}

const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " of divvy, in place of NVIDIA Container Toolkit CLI version 1.20.0"
);

/// Parse a boolean as Go's `strconv.ParseBool` does; an empty text is true.
fn flag(text: &str) -> anyhow::Result<bool> {
    match text {
        "" | "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => bail!("write true or false"),
    }
}

/// Parse a boolean that may come from an environment variable: an empty text is false.
fn variable(text: &str) -> anyhow::Result<bool> {
    Ok(!text.is_empty() && flag(text)?)
}

#[derive(Debug, Subcommand)]
enum CtkCommand {
    /// Configure container engines
    #[command(subcommand)]
    Runtime(RuntimeCommand),
    /// Generate, list, and transform CDI specs
    #[command(subcommand)]
    Cdi(CtkCdiCommand),
    /// Show or change the settings of the runtime (config.toml)
    #[command(args_conflicts_with_subcommands = true, args_override_self = true)]
    Config(CtkConfigArgs),
    /// Create device nodes, and links to them
    #[command(subcommand)]
    System(System),
    /// Run divvy-hook, as CDI specs request when a container starts
    #[command(disable_help_flag = true)]
    Hook(HookWords),
    /// Accepted for compatibility; reports nothing about the machine
    Info(CtkInfoArgs),
}

/// The arguments of `divvy-hook`, which are passed on unchanged.
#[derive(Debug, Args)]
struct HookWords {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    _words: Vec<String>,
}

#[derive(Debug, Args)]
struct CtkInfoArgs {
    #[arg(hide = true)]
    rest: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum System {
    /// Create links /dev/char/MAJOR:MINOR to NVIDIA's device nodes
    #[command(args_override_self = true)]
    CreateDevCharSymlinks(CreateLinks),
    /// Create NVIDIA's device nodes
    #[command(args_override_self = true)]
    CreateDeviceNodes(CreateNodes),
    /// Print the libraries in the ld.so.cache of a driver's root, one path a line
    PrintLdcache(PrintCache),
}

#[derive(Debug, Args)]
struct PrintCache {
    /// Root directory of the driver's files
    #[arg(long, env = "DRIVER_ROOT", default_value = "/")]
    driver_root: String,
}

#[derive(Debug, Args)]
struct CreateLinks {
    /// Directory of the links
    #[arg(long, env = "DEV_CHAR_PATH", default_value = "/dev/char")]
    dev_char_path: String,
    /// Accepted for compatibility; has no effect: the nodes are in /dev, and no module is loaded
    #[arg(long)]
    driver_root: Option<String>,
    /// Link all device nodes that the driver may create
    #[arg(long, env = "CREATE_ALL", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", value_parser = variable)]
    create_all: bool,
    /// Refused: load the modules first, with modprobe
    #[arg(long, env = "LOAD_KERNEL_MODULES", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", value_parser = variable)]
    load_kernel_modules: bool,
    /// With --create-all: create the control device nodes first
    #[arg(long, env = "CREATE_DEVICE_NODES", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", value_parser = variable)]
    create_device_nodes: bool,
    /// Print what would be created, and create nothing
    #[arg(long, env = "DRY_RUN", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", value_parser = variable)]
    dry_run: bool,
    /// Accepted for compatibility; has no effect
    #[arg(hide = true)]
    rest: Vec<String>,
}

#[derive(Debug, Args)]
struct CreateNodes {
    /// The directory that contains dev/, if --dev-root is not given [env: ROOT, NVIDIA_DRIVER_ROOT, DRIVER_ROOT] [default: /]
    #[arg(long, alias = "driver-root")]
    root: Option<String>,
    /// The directory that contains dev/ [env: NVIDIA_DEV_ROOT, DEV_ROOT]
    #[arg(long)]
    dev_root: Option<String>,
    /// Create nvidiactl, nvidia-modeset, nvidia-uvm, and nvidia-uvm-tools
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", value_parser = flag)]
    control_devices: bool,
    /// Refused: load the modules first, with modprobe
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", value_parser = flag)]
    load_kernel_modules: bool,
    /// Print what would be created, and create nothing
    #[arg(long, env = "DRY_RUN", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", value_parser = variable)]
    dry_run: bool,
    /// Accepted for compatibility; has no effect
    #[arg(hide = true)]
    rest: Vec<String>,
}

/// The refusal of `--load-kernel-modules`. NVIDIA's tool runs modprobe, and in the driver's root if that is not `/`. That would run a
/// container's program with full privileges, so `divvy` refuses.
const NO_MODULES: &str = "--load-kernel-modules: divvy does not load kernel modules; run modprobe -a nvidia nvidia-uvm nvidia-modeset first, and then this \
                          command without the flag";

impl System {
    /// Translate to the arguments of `divvy`.
    fn words(&self) -> Result<Vec<String>, clap::Error> {
        let refused = || Err(NvidiaCtk::command().error(ErrorKind::ValueValidation, NO_MODULES));
        let mut words = vec!["nvidia-system".to_owned()];
        let mut given = |is: bool, name: &str| words.extend(is.then(|| format!("--{name}")));
        match self {
            System::CreateDevCharSymlinks(args) => {
                // Without --create-all, NVIDIA's tool also creates no nodes and loads no modules.
                if args.create_all && args.load_kernel_modules {
                    return refused();
                }
                given(args.create_all, "all");
                given(args.create_all && args.create_device_nodes, "with-nodes");
                given(args.dry_run, "dry-run");
                words.insert(1, "dev-char-links".to_owned());
                let at = Some(&args.dev_char_path).filter(|path| !path.is_empty());
                words.push(format!("--at={}", at.map_or("/dev/char", String::as_str)));
            }
            System::PrintLdcache(args) => {
                words.extend(["print-ldcache".to_owned(), format!("--driver-root={}", args.driver_root)]);
            }
            System::CreateDeviceNodes(args) => {
                if args.load_kernel_modules {
                    return refused();
                }
                given(args.control_devices, "control");
                given(args.dry_run, "dry-run");
                words.insert(1, "device-nodes".to_owned());
                let variable = |names: &[&str]| names.iter().find_map(|name| std::env::var(name).ok());
                let some = |path: Option<String>| path.filter(|path| !path.is_empty());
                let root = || {
                    some(
                        args.root
                            .clone()
                            .or_else(|| variable(&["ROOT", "NVIDIA_DRIVER_ROOT", "DRIVER_ROOT"])),
                    )
                };
                let dev_root = some(args.dev_root.clone().or_else(|| variable(&["NVIDIA_DEV_ROOT", "DEV_ROOT"])));
                let dev_root = dev_root.or_else(root).unwrap_or_else(|| "/".to_owned());
                words.push(format!("--dev-root={dev_root}"));
            }
        }
        Ok(words)
    }
}

#[derive(Debug, Args)]
struct CtkConfigArgs {
    #[command(subcommand)]
    command: Option<ConfigCommand>,
    /// The configuration file
    #[arg(long, short, alias = "config")]
    config_file: Option<String>,
    /// Change a setting: KEY[=VALUE]
    #[arg(long)]
    set: Vec<String>,
    /// Write to the configuration file itself
    #[arg(long, short, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", value_parser = flag)]
    in_place: bool,
    /// Write to this file [default: standard output]
    #[arg(long, short)]
    output: Option<String>,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Print the default settings
    #[command(aliases = ["create-default", "generate-default"])]
    Default {
        /// Write to this file [default: standard output]
        #[arg(long, short)]
        output: Option<String>,
    },
}

#[derive(Debug, Subcommand)]
enum Transform {
    /// Move paths below another root
    Root(TransformRoot),
}

#[derive(Debug, Args)]
struct TransformRoot {
    /// The current root of the paths
    #[arg(long)]
    from: String,
    /// The new root of the paths
    #[arg(long)]
    to: String,
    /// The side whose paths to move: host or container
    #[arg(long, default_value = "host", value_parser = ["host", "container"])]
    relative_to: String,
    /// The spec; - is standard input
    #[arg(long, default_value = "-")]
    input: String,
    /// Write to this file [default: standard output]
    #[arg(long, default_value = "")]
    output: String,
}

#[derive(Debug, Subcommand)]
enum RuntimeCommand {
    /// Add the runtime to an engine's configuration
    Configure(Box<Configure>),
}

#[derive(Debug, Subcommand)]
enum CtkCdiCommand {
    /// Generate a CDI spec of this machine's GPUs
    Generate(Box<Generate>),
    /// List the names of the CDI devices
    List(CtkListArgs),
    /// Change a spec
    #[command(subcommand)]
    Transform(Transform),
}

#[derive(Debug, Args)]
#[command(args_override_self = true)]
struct Configure {
    /// The engine: docker, containerd, or crio
    #[arg(long, default_value = "docker")]
    runtime: String,
    /// The engine's configuration file
    #[arg(long)]
    config: Option<String>,
    /// The drop-in file; empty means no drop-in
    #[arg(long, default_value = OF_THE_ENGINE)]
    drop_in_config: String,
    /// Print the new files, and write nothing
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", value_parser = flag)]
    dry_run: bool,
    /// The name of the runtime
    #[arg(long, default_value = "nvidia")]
    nvidia_runtime_name: String,
    /// The runtime's program; for containerd and crio the default is in /usr/bin
    #[arg(long, alias = "runtime-path", default_value = RUNTIME)]
    nvidia_runtime_path: String,
    /// Make it the default runtime
    #[arg(long, alias = "set-as-default", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false",
        default_missing_value = "true", value_parser = flag)]
    nvidia_set_as_default: bool,
    /// Enable CDI in the engine
    #[arg(long = "cdi.enabled", aliases = ["cdi.enable", "enable-cdi"], value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_value = "false", default_missing_value = "true", value_parser = flag)]
    cdi_enabled: bool,
    /// Where to read the engine's configuration: file, or command (containerd and crio)
    #[arg(long, default_value = "file")]
    config_source: String,
    /// The engine's program, for --config-source=command
    #[arg(long, default_value = "")]
    executable_path: String,
    /// oci-hook prints an OCI hook for all containers and configures no engine; other values have no effect
    #[arg(long, default_value = "")]
    config_mode: String,
    /// Write the OCI hook to this file
    #[arg(long, default_value = "")]
    oci_hook_path: String,
    /// The program of the OCI hook
    #[arg(long, default_value = "/usr/bin/nvidia-container-runtime-hook")]
    nvidia_runtime_hook_path: String,
    /// Accepted for compatibility; has no effect
    #[arg(hide = true)]
    rest: Vec<String>,
}

const OF_THE_ENGINE: &str = "RUNTIME_SPECIFIC_DEFAULT";
const RUNTIME: &str = "nvidia-container-runtime";

impl Configure {
    /// Translate to the arguments of `divvy`.
    fn words(&self) -> Result<Vec<String>, clap::Error> {
        let refused = |what: String| Err(NvidiaCtk::command().error(ErrorKind::ValueValidation, what));
        let mut words = ["configure", "--as-nvidia-ctk"].map(str::to_owned).to_vec();
        if matches!(self.config_mode.as_str(), "oci-hook" | "hook") {
            let hook = &self.nvidia_runtime_hook_path;
            if !hook.starts_with('/') {
                return refused(format!("the NVIDIA runtime hook path {hook:?} is not an absolute path"));
            }
            words.extend(["docker".to_owned(), format!("--oci-hook={hook}")]);
            if !self.oci_hook_path.is_empty() {
                words.push(format!("--oci-hook-file={}", self.oci_hook_path));
            }
            return Ok(words);
        }
        let drop_in = match self.runtime.as_str() {
            "docker" => None,
            "containerd" => Some("/etc/containerd/conf.d/99-nvidia.toml"),
            "crio" => Some("/etc/crio/crio.conf.d/99-nvidia.toml"),
            other => {
                return refused(format!(
                    "unrecognized runtime '{other}': --runtime is docker, containerd or crio"
                ));
            }
        };
        words.push(self.runtime.clone());
        let path = match self.nvidia_runtime_path.as_str() {
            RUNTIME if drop_in.is_some() => "/usr/bin/nvidia-container-runtime",
            path => path,
        };
        words.push(format!("--runtime-name={}", self.nvidia_runtime_name));
        words.push(format!("--runtime-path={path}"));
        match self.config_source.as_str() {
            "file" => {}
            // Docker has no such command.
            "command" if drop_in.is_none() => {}
            "command" => words.push("--ask-engine".to_owned()),
            other => {
                return refused(format!(
                    "unrecognized Config Source: {other}: --config-source is file or command"
                ));
            }
        }
        if !self.executable_path.is_empty() {
            words.push(format!("--executable-path={}", self.executable_path));
        }
        if let Some(config) = self.config.as_ref().filter(|config| !config.is_empty()) {
            words.push(format!("--config={config}"));
        }
        match self.drop_in_config.as_str() {
            OF_THE_ENGINE => words.extend(drop_in.map(|drop_in| format!("--drop-in={drop_in}"))),
            given if given.is_empty() || given.starts_with('/') => words.push(format!("--drop-in={given}")),
            given => return refused(format!("the drop-in-config path {given:?} is not an absolute path")),
        }
        match (self.nvidia_set_as_default, drop_in) {
            (true, _) => words.push("--set-default=true".to_owned()),
            (false, Some(_)) => words.push("--set-default=false".to_owned()),
            (false, None) => {}
        }
        if self.cdi_enabled {
            words.push("--cdi=true".to_owned());
        }
        if self.dry_run {
            words.push("--dry-run".to_owned());
        }
        Ok(words)
    }
}

#[derive(Debug, Args)]
struct Generate {
    /// Write to this file [default: standard output]
    #[arg(long, env = "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", default_value = "")]
    output: String,
    /// Output format: yaml or json
    #[arg(long, env = "NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT", default_value = "yaml")]
    format: String,
    /// How to find GPUs
    #[arg(long, alias = "discovery-mode", env = "NVIDIA_CTK_CDI_GENERATE_MODE", default_value = "auto", value_parser = ["auto", "nvml", "wsl", "management", "gds", "mofed", "gdrcopy", "nvswitch", "imex"])]
    mode: String,
    /// Root directory of the driver's files
    #[arg(long, env = "NVIDIA_CTK_DRIVER_ROOT")]
    driver_root: Option<String>,
    /// The directory that contains dev/
    #[arg(long, env = "NVIDIA_CTK_DEV_ROOT")]
    dev_root: Option<String>,
    /// How to name devices: index, uuid, type-index, or a list of these
    #[arg(long, alias = "device-name-strategies", env = "NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES", value_delimiter = ',', value_parser = ["index", "uuid", "type-index"])]
    device_name_strategy: Vec<String>,
    /// The devices to include: all, none, or a list of indexes or UUIDs
    #[arg(long, aliases = ["device-ids", "device", "devices"], env = "NVIDIA_CTK_CDI_GENERATE_DEVICE_IDS", value_delimiter = ',')]
    device_id: Vec<String>,
    /// Omit the device "all"
    #[arg(long, env = "NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", value_parser = variable)]
    no_all_device: bool,
    /// no-additional-gids-for-device-nodes; other values have no effect
    #[arg(long, alias = "feature-flags", env = "NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS", value_delimiter = ',', value_parser = [NO_GROUPS, "disable-nvsandboxutils", "disable-multiple-csv-devices"])]
    feature_flag: Vec<String>,
    /// The vendor in the device names
    #[arg(
        long,
        alias = "cdi-vendor",
        env = "NVIDIA_CTK_CDI_GENERATE_VENDOR",
        default_value = "nvidia.com"
    )]
    vendor: String,
    /// The class in the device names
    #[arg(long, alias = "cdi-class", env = "NVIDIA_CTK_CDI_GENERATE_CLASS", default_value = "gpu")]
    class: String,
    /// Accepted for compatibility; has no effect: the spec has no hooks
    #[arg(long, alias = "nvidia-ctk-path", env = "NVIDIA_CTK_CDI_HOOK_PATH")]
    nvidia_cdi_hook_path: Option<String>,
    /// Accepted for compatibility; has no effect: no program is run
    #[arg(long)]
    ldconfig_path: Option<String>,
    /// Accepted for compatibility; has no effect: the spec has no hooks
    #[arg(long, alias = "disable-hooks", value_delimiter = ',')]
    disable_hook: Vec<String>,
    /// A directory of the driver's libraries: the driver's root is the directory that contains it, unless --driver-root is given
    #[arg(
        long,
        alias = "library-search-paths",
        env = "NVIDIA_CTK_CDI_GENERATE_LIBRARY_SEARCH_PATHS",
        value_delimiter = ','
    )]
    library_search_path: Vec<String>,
    /// Accepted for compatibility; has no effect: the driver's files are found below --driver-root
    #[arg(
        long,
        alias = "config-search-paths",
        env = "NVIDIA_CTK_CDI_GENERATE_CONFIG_SEARCH_PATHS",
        value_delimiter = ','
    )]
    config_search_path: Vec<String>,
    /// Accepted for compatibility; has no effect: Divvy finds the files of a Jetson itself
    #[arg(long = "csv.file", env = "NVIDIA_CTK_CDI_GENERATE_CSV_FILES", value_delimiter = ',')]
    csv_file: Vec<String>,
    /// Accepted for compatibility; has no effect
    #[arg(
        long = "csv.ignore-pattern",
        env = "NVIDIA_CTK_CDI_GENERATE_CSV_IGNORE_PATTERNS",
        value_delimiter = ','
    )]
    csv_ignore_pattern: Vec<String>,
    /// Accepted for compatibility; has no effect
    #[arg(
        long = "csv.compat-container-root",
        env = "NVIDIA_CTK_CDI_GENERATE_CSV_COMPAT_CONTAINER_ROOT"
    )]
    csv_compat_container_root: Option<String>,
    /// Accepted for compatibility; has no effect: the spec has no hooks
    #[arg(
        long,
        alias = "enable-hooks",
        env = "NVIDIA_CTK_CDI_GENERATE_ENABLED_HOOKS",
        value_delimiter = ','
    )]
    enable_hook: Vec<String>,
}

impl Generate {
    /// Return the driver's root: the given one, or the directory that contains a searched library directory, such as `/var/lib/nvidia` for
    /// `/var/lib/nvidia/lib64`.
    fn root(&self) -> Option<String> {
        let of_library = |path: &String| {
            let (root, name) = path.trim_end_matches('/').rsplit_once('/')?;
            let is_own = name.starts_with("lib") && !matches!(root, "" | "/usr" | "/usr/local");
            is_own.then(|| root.to_owned())
        };
        let given = self.driver_root.clone().filter(|root| root != "/");
        given
            .or_else(|| self.library_search_path.iter().find_map(of_library))
            .or_else(|| self.driver_root.clone())
    }

    /// Return the given flags that have no effect.
    fn without_effect(&self) -> Vec<&'static str> {
        [
            ("--config-search-path", self.config_search_path.is_empty()),
            ("--csv.file", self.csv_file.is_empty()),
            ("--csv.ignore-pattern", self.csv_ignore_pattern.is_empty()),
            ("--csv.compat-container-root", self.csv_compat_container_root.is_none()),
            ("--enable-hook", self.enable_hook.is_empty()),
        ]
        .into_iter()
        .filter_map(|(flag, is_absent)| (!is_absent).then_some(flag))
        .collect()
    }
}

/// The feature flag that omits the groups of device nodes from the spec.
const NO_GROUPS: &str = "no-additional-gids-for-device-nodes";

#[derive(Debug, Args)]
struct CtkListArgs {
    /// Directories of specs
    #[arg(long, env = "NVIDIA_CTK_CDI_SPEC_DIRS", value_delimiter = ',')]
    spec_dir: Vec<String>,
}

/// Report whether the program was started as `nvidia-ctk`.
pub(super) fn is_meant(program: &OsString) -> bool {
    std::path::Path::new(program)
        .file_name()
        .is_some_and(|name| name == "nvidia-ctk")
}

/// Return the arguments after `hook`, if that is the command. Only the global flags may precede `hook`.
pub(super) fn hook(given: &[OsString]) -> Option<Vec<OsString>> {
    let mut words = given.iter().skip(1);
    while let Some(word) = words.next() {
        match word.to_str()?.trim_start_matches('-') {
            "hook" if word == "hook" => return Some(words.cloned().collect()),
            "config" if word != "config" => {
                words.next();
            }
            flag => {
                let name = flag.split_once('=').map_or(flag, |(name, _)| name);
                if !word.to_str()?.starts_with('-') || !["debug", "d", "quiet", "config"].contains(&name) {
                    return None;
                }
            }
        }
    }
    None
}

/// Return the path of the settings file that NVIDIA's programs would read.
fn settings_file() -> String {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let of_user = || {
        Some(format!(
            "{}/nvidia-container-runtime/config.toml",
            variable("XDG_CONFIG_HOME")?
        ))
    };
    variable("NVIDIA_CTK_CONFIG_FILE_PATH")
        .or_else(of_user)
        .unwrap_or_else(|| divvy_oci::runtime::settings::PATH.to_owned())
}

/// Replace `-flag` by `--flag` in all arguments before `--`, as Go's flag parser treats them alike.
fn dashes(given: &[OsString]) -> Vec<OsString> {
    let mut flags = true;
    given
        .iter()
        .map(|word| {
            flags &= word != "--";
            match word.to_str() {
                Some(text) if flags && text.len() > 2 && text.starts_with('-') && !text.starts_with("--") => {
                    format!("-{text}").into()
                }
                _ => word.clone(),
            }
        })
        .collect()
}

/// Translate a command line of `nvidia-ctk` to one of `divvy`.
///
/// # Errors
/// The arguments request help, or `divvy` does not implement the command.
pub(super) fn translate(given: &[OsString]) -> Result<Vec<OsString>, clap::Error> {
    let given = dashes(given);
    let help = |given: &[OsString]| NvidiaCtk::try_parse_from([given, &["--help".into()]].concat());
    let parsed = match NvidiaCtk::try_parse_from(&given) {
        // A command that needs a subcommand prints the list of its subcommands.
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => help(&given)?,
        parsed => parsed?,
    };
    let mut words: Vec<String> = vec!["divvy".to_owned()];
    match (parsed.debug, parsed.quiet) {
        (_, true) => words.extend(["--log".to_owned(), "error".to_owned()]),
        (true, _) => words.extend(["--log".to_owned(), "debug".to_owned()]),
        _ => {}
    }
    let flag = |words: &mut Vec<String>, name: &str, value: &str| words.push(format!("--{name}={value}"));
    match parsed.command {
        CtkCommand::System(system) => words.extend(system.words()?),
        // A valid call of `nvidia-ctk hook` was already handled by [`hook`].
        CtkCommand::Hook(_) => {
            let what = "only --debug, --quiet, and --config may precede hook: nvidia-ctk hook update-ldcache --folder DIR";
            return Err(NvidiaCtk::command().error(ErrorKind::ValueValidation, what));
        }
        CtkCommand::Info(args) => match args.rest.first() {
            Some(word) if !matches!(word.as_str(), "help" | "h") => {
                return Err(NvidiaCtk::command().error(ErrorKind::InvalidSubcommand, format!("info has no command {word:?}")));
            }
            _ => {
                help(&["nvidia-ctk".into(), "info".into()])?;
            }
        },
        CtkCommand::Runtime(RuntimeCommand::Configure(args)) => {
            if matches!(args.rest.first().map(String::as_str), Some("help" | "h")) {
                help(&given)?;
            }
            words.extend(args.words()?);
            if parsed.quiet {
                words.push("--quiet".to_owned());
            }
        }
        CtkCommand::Cdi(CtkCdiCommand::Generate(args)) => {
            words.extend(
                [
                    "cdi",
                    "generate",
                    "--vendor",
                    if args.mode == "auto" { "auto" } else { "nvidia" },
                ]
                .map(str::to_owned),
            );
            flag(&mut words, "output", if args.output.is_empty() { "-" } else { &args.output });
            flag(&mut words, "format", &args.format);
            for (name, value) in [("driver-root", &args.root()), ("dev-root", &args.dev_root)] {
                if let Some(value) = value {
                    flag(&mut words, name, value);
                }
            }
            for name in args.without_effect() {
                flag(&mut words, "without-effect", name);
            }
            flag(&mut words, "mode", &args.mode);
            for strategy in &args.device_name_strategy {
                flag(&mut words, "device-name-strategy", strategy);
            }
            for id in &args.device_id {
                flag(&mut words, "device", id);
            }
            words.extend(args.no_all_device.then(|| "--no-all-device".to_owned()));
            let no_groups = args.feature_flag.iter().any(|name| name == NO_GROUPS);
            words.extend(no_groups.then(|| "--no-additional-gids".to_owned()));
            flag(&mut words, "vendor-name", &args.vendor);
            flag(&mut words, "class", &args.class);
        }
        CtkCommand::Cdi(CtkCdiCommand::List(args)) => {
            words.extend(["cdi", "list", "-o", "name"].map(str::to_owned));
            for directory in &args.spec_dir {
                flag(&mut words, "spec-dir", directory);
            }
        }
        CtkCommand::Cdi(CtkCdiCommand::Transform(Transform::Root(args))) => {
            words.extend(["cdi", "transform"].map(str::to_owned));
            let output = if args.output.is_empty() { "-" } else { &args.output };
            for (name, value) in [
                ("from", args.from.as_str()),
                ("to", &args.to),
                ("relative-to", &args.relative_to),
                ("input", &args.input),
                ("output", output),
            ] {
                flag(&mut words, name, value);
            }
        }
        CtkCommand::Config(args) => {
            words.push("runtime-config".to_owned());
            let output = match args.command {
                Some(ConfigCommand::Default { output }) => {
                    words.push("--default".to_owned());
                    output
                }
                None => args.output,
            };
            for option in &args.set {
                flag(&mut words, "set", option);
            }
            // --in-place takes precedence over --output.
            let output = output.filter(|_| !args.in_place);
            let file = args.config_file.filter(|file| !file.is_empty()).unwrap_or_else(settings_file);
            for (name, value) in [("config-file", Some(file)), ("output", output)] {
                if let Some(value) = value.filter(|value| !value.is_empty()) {
                    flag(&mut words, name, &value);
                }
            }
            if args.in_place {
                words.push("--in-place".to_owned());
            }
        }
    }
    Ok(words.into_iter().map(OsString::from).collect())
}
