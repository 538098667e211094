//! The command-line grammar of `divvy runtime-config`.

use std::path::PathBuf;

use clap::Args;

/// Show or change the settings of divvy-runtime (config.toml, in NVIDIA's format)
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy runtime-config  the current file, or the defaults if there is none
  divvy runtime-config --default
      the defaults; lines that start with # are examples
  sudo divvy runtime-config --in-place --set nvidia-container-runtime.mode=cdi
  divvy runtime-config --set nvidia-container-runtime.runtimes=crun:runc --set disable-require
  sudo divvy runtime-config -i --set nvidia-container-runtime.debug=/var/log/divvy-runtime.log

Without --in-place and --output the command prints the new text and writes nothing. It keeps every other setting and all comments. An unknown setting, or a \
value that divvy-runtime would refuse, is an error, and nothing is written. docs/runtime.md describes the settings.")]
pub struct RuntimeConfigArgs {
    /// The configuration file; if it does not exist, the command starts from the defaults
    #[arg(short, long, alias = "config", env = "NVIDIA_CTK_CONFIG_FILE_PATH", value_name = "FILE", default_value = divvy_oci::runtime::settings::PATH)]
    pub config_file: PathBuf,
    /// Change a setting: a list is split at colons and commas, a boolean needs no value (may be repeated)
    #[arg(long, value_name = "KEY[=VALUE]")]
    pub set: Vec<String>,
    /// Write to the configuration file itself
    #[arg(short, long, conflicts_with = "output")]
    pub in_place: bool,
    /// Write to this file
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Use the defaults instead of the configuration file
    #[arg(long, conflicts_with = "in_place")]
    pub default: bool,
}
