//! The grammar of `divvy runtime-config`.

use std::path::PathBuf;

use clap::Args;

/// Show or change the settings of divvy-runtime (NVIDIA's config.toml)
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy runtime-config  the file as it is, or what is assumed without one
  divvy runtime-config --default
      what is assumed without a file; lines with # are examples
  sudo divvy runtime-config --in-place --set nvidia-container-runtime.mode=cdi
  divvy runtime-config --set nvidia-container-runtime.runtimes=crun:runc --set disable-require
  sudo divvy runtime-config -i --set nvidia-container-runtime.debug=/var/log/divvy-runtime.log

Without --in-place and --output the new text is printed and nothing is written. What is not set stays as it is, comments too. A setting that does not exist, and a \
value that divvy-runtime would refuse, are errors, and nothing is written. docs/runtime.md says what the settings do.")]
pub struct RuntimeConfigArgs {
    /// The file; if it is not there, what is assumed without one is changed
    #[arg(short, long, alias = "config", env = "NVIDIA_CTK_CONFIG_FILE_PATH", value_name = "FILE", default_value = divvy_oci::runtime::settings::PATH)]
    pub config_file: PathBuf,
    /// Set this; lists are split at : and at commas, what is true or false needs no value. May be given several times
    #[arg(long, value_name = "KEY[=VALUE]")]
    pub set: Vec<String>,
    /// Write to the file itself
    #[arg(short, long, conflicts_with = "output")]
    pub in_place: bool,
    /// Write to this file
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// What is assumed without a file, in place of the file
    #[arg(long, conflicts_with = "in_place")]
    pub default: bool,
}
