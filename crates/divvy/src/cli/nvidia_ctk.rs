//! The flags of NVIDIA's `nvidia-ctk`, for scripts that call it: a program of that name which is this one does the same.

use std::ffi::OsString;

use clap::{Args, Parser, Subcommand};

/// Divvy in place of NVIDIA's nvidia-ctk: runtime configure, cdi generate, cdi list, cdi transform root, config
#[derive(Debug, Parser)]
#[command(name = "nvidia-ctk", version)]
struct NvidiaCtk {
    /// Say more
    #[arg(long, short, global = true, env = "NVIDIA_CTK_DEBUG")]
    debug: bool,
    /// Say errors alone
    #[arg(long, global = true, env = "NVIDIA_CTK_QUIET")]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Container engines
    #[command(subcommand)]
    Runtime(Runtime),
    /// CDI specs
    #[command(subcommand)]
    Cdi(Cdi),
    /// Settings of the runtime: config.toml
    #[command(args_conflicts_with_subcommands = true)]
    Config(Config),
}

#[derive(Debug, Args)]
struct Config {
    #[command(subcommand)]
    command: Option<ConfigCommand>,
    /// The file
    #[arg(long, short, alias = "config")]
    config_file: Option<String>,
    /// Set this: KEY[=VALUE]
    #[arg(long)]
    set: Vec<String>,
    /// Write to the file itself
    #[arg(long, short)]
    in_place: bool,
    /// Write to this file [default: standard output]
    #[arg(long, short)]
    output: Option<String>,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// What is assumed without a file
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
    Root(Root),
}

#[derive(Debug, Args)]
struct Root {
    /// The root that paths are below now
    #[arg(long)]
    from: String,
    /// The root that they are to be below
    #[arg(long)]
    to: String,
    /// host or container
    #[arg(long, default_value = "host", value_parser = ["host", "container"])]
    relative_to: String,
    /// The spec; - is standard input
    #[arg(long, default_value = "-")]
    input: String,
    /// The file; none: standard output
    #[arg(long, default_value = "")]
    output: String,
}

#[derive(Debug, Subcommand)]
enum Runtime {
    /// Tell an engine of the runtime
    Configure(Configure),
}

#[derive(Debug, Subcommand)]
enum Cdi {
    /// Make the spec of this machine's GPUs
    Generate(Box<Generate>),
    /// The devices that there are, by name
    List(List),
    /// Change a spec
    #[command(subcommand)]
    Transform(Transform),
}

#[derive(Debug, Args)]
struct Configure {
    /// docker, containerd or crio
    #[arg(long, default_value = "docker", value_parser = ["docker", "containerd", "crio"])]
    runtime: String,
    /// The engine's file
    #[arg(long)]
    config: Option<String>,
    /// The drop-in; empty: none
    #[arg(long)]
    drop_in_config: Option<String>,
    /// Print the new files
    #[arg(long)]
    dry_run: bool,
    /// The runtime's name
    #[arg(long, default_value = "nvidia")]
    nvidia_runtime_name: String,
    /// The runtime's program [default: nvidia-container-runtime, for containerd and crio in /usr/bin]
    #[arg(long, alias = "runtime-path")]
    nvidia_runtime_path: Option<String>,
    /// Make it the default
    #[arg(long, alias = "set-as-default", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true")]
    nvidia_set_as_default: bool,
    /// Switch the engine's CDI on
    #[arg(long = "cdi.enabled", aliases = ["cdi.enable", "enable-cdi"], num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true")]
    cdi_enabled: bool,
    /// Where the engine's configuration is read
    #[arg(long, value_parser = ["file"])]
    config_source: Option<String>,
    /// Only the runtime's way; hooks are of the past
    #[arg(long, value_parser = ["", "runtime", "config-file"])]
    config_mode: Option<String>,
    /// Has no effect: containerd is asked by its name
    #[arg(long)]
    executable_path: Option<String>,
    /// Has no effect: divvy writes no hooks
    #[arg(long)]
    nvidia_runtime_hook_path: Option<String>,
}

#[derive(Debug, Args)]
struct Generate {
    /// The file; none: standard output
    #[arg(long, env = "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", default_value = "")]
    output: String,
    /// yaml or json
    #[arg(long, env = "NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT", default_value = "yaml")]
    format: String,
    /// How GPUs are found
    #[arg(long, alias = "discovery-mode", env = "NVIDIA_CTK_CDI_GENERATE_MODE", default_value = "auto", value_parser = ["auto", "nvml", "wsl", "management", "gds", "mofed", "gdrcopy", "nvswitch", "imex"])]
    mode: String,
    /// The root of the driver's files
    #[arg(long, env = "NVIDIA_CTK_DRIVER_ROOT")]
    driver_root: Option<String>,
    /// The root of /dev
    #[arg(long, env = "NVIDIA_CTK_DEV_ROOT")]
    dev_root: Option<String>,
    /// index, uuid, type-index; several if given so
    #[arg(long, alias = "device-name-strategies", env = "NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES", value_delimiter = ',', value_parser = ["index", "uuid", "type-index"])]
    device_name_strategy: Vec<String>,
    /// all, none, or these, by index or UUID
    #[arg(long, aliases = ["device-ids", "device", "devices"], env = "NVIDIA_CTK_CDI_GENERATE_DEVICE_IDS", value_delimiter = ',')]
    device_id: Vec<String>,
    /// Without the device "all"
    #[arg(long, env = "NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true")]
    no_all_device: bool,
    /// no-additional-gids-for-device-nodes; the others have no effect
    #[arg(long, alias = "feature-flags", env = "NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS", value_delimiter = ',', value_parser = [NO_GROUPS, "disable-nvsandboxutils", "disable-multiple-csv-devices"])]
    feature_flag: Vec<String>,
    /// The vendor in the devices' names
    #[arg(
        long,
        alias = "cdi-vendor",
        env = "NVIDIA_CTK_CDI_GENERATE_VENDOR",
        default_value = "nvidia.com"
    )]
    vendor: String,
    /// The class in the devices' names
    #[arg(long, alias = "cdi-class", env = "NVIDIA_CTK_CDI_GENERATE_CLASS", default_value = "gpu")]
    class: String,
    /// Has no effect: the spec has no hooks
    #[arg(long, alias = "nvidia-ctk-path", env = "NVIDIA_CTK_CDI_HOOK_PATH")]
    nvidia_cdi_hook_path: Option<String>,
    /// Has no effect: nothing is run
    #[arg(long)]
    ldconfig_path: Option<String>,
    /// Has no effect: the spec has no hooks
    #[arg(long, alias = "disable-hooks", value_delimiter = ',')]
    disable_hook: Vec<String>,
}

/// Groups of device nodes are left out.
const NO_GROUPS: &str = "no-additional-gids-for-device-nodes";

#[derive(Debug, Args)]
struct List {
    /// Where specs are
    #[arg(long, env = "NVIDIA_CTK_CDI_SPEC_DIRS", value_delimiter = ',')]
    spec_dir: Vec<String>,
}

/// What was typed, in `divvy`'s words.
///
/// # Errors
/// Help was asked for, or this is none of nvidia-ctk's commands that divvy has.
pub(super) fn translate(given: &[OsString]) -> Result<Vec<OsString>, clap::Error> {
    let parsed = NvidiaCtk::try_parse_from(given)?;
    let mut words: Vec<String> = vec!["divvy".to_owned()];
    match (parsed.debug, parsed.quiet) {
        (_, true) => words.extend(["--log".to_owned(), "error".to_owned()]),
        (true, _) => words.extend(["--log".to_owned(), "debug".to_owned()]),
        _ => {}
    }
    let flag = |words: &mut Vec<String>, name: &str, value: &str| words.push(format!("--{name}={value}"));
    match parsed.command {
        Command::Runtime(Runtime::Configure(args)) => {
            words.extend(["configure", &args.runtime, "--as-nvidia-ctk"].map(str::to_owned));
            let (path, drop_in) = match args.runtime.as_str() {
                "docker" => ("nvidia-container-runtime", None),
                "containerd" => (
                    "/usr/bin/nvidia-container-runtime",
                    Some("/etc/containerd/conf.d/99-nvidia.toml"),
                ),
                _ => (
                    "/usr/bin/nvidia-container-runtime",
                    Some("/etc/crio/crio.conf.d/99-nvidia.toml"),
                ),
            };
            flag(&mut words, "runtime-name", &args.nvidia_runtime_name);
            flag(
                &mut words,
                "runtime-path",
                args.nvidia_runtime_path.as_deref().unwrap_or(path),
            );
            if let Some(config) = &args.config {
                flag(&mut words, "config", config);
            }
            if let Some(drop_in) = args.drop_in_config.as_deref().or(drop_in) {
                flag(&mut words, "drop-in", drop_in);
            }
            match (args.nvidia_set_as_default, drop_in) {
                (true, _) => flag(&mut words, "set-default", "true"),
                (false, Some(_)) => flag(&mut words, "set-default", "false"),
                (false, None) => {}
            }
            if args.cdi_enabled {
                flag(&mut words, "cdi", "true");
            }
            if args.dry_run {
                words.push("--dry-run".to_owned());
            }
        }
        Command::Cdi(Cdi::Generate(args)) => {
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
            for (name, value) in [("driver-root", &args.driver_root), ("dev-root", &args.dev_root)] {
                if let Some(value) = value {
                    flag(&mut words, name, value);
                }
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
        Command::Cdi(Cdi::List(args)) => {
            words.extend(["cdi", "list", "-o", "name"].map(str::to_owned));
            for folder in &args.spec_dir {
                flag(&mut words, "spec-dir", folder);
            }
        }
        Command::Cdi(Cdi::Transform(Transform::Root(args))) => {
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
        Command::Config(args) => {
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
            for (name, value) in [("config-file", args.config_file), ("output", output)] {
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
