//! The command-line grammar of `divvy cdi`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use divvy_cdi::CdiVersion;

/// Describe GPUs to container engines (CDI): generate specs, list devices, validate specs
#[derive(Debug, Subcommand)]
pub enum CdiCommand {
    Generate(Box<CdiGenerateArgs>),
    List(CdiListArgs),
    Validate(CdiValidateArgs),
    Transform(CdiTransformArgs),
}

/// Generate a CDI spec of this machine's GPUs: device nodes, and the driver's libraries, programs, firmware, and sockets
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy cdi generate                                       print it
  divvy cdi generate -o /var/run/cdi/nvidia.yaml
      until the next boot; files in /etc/cdi survive a reboot
  divvy cdi generate --driver-root /run/nvidia/driver -o /var/run/cdi/nvidia.yaml
  divvy cdi generate --vendor amd -o /etc/cdi/amd.json
  divvy cdi generate --cdi-version 0.5.0 -o /etc/cdi/nvidia.yaml
      for Podman 4.6 and other old readers
  divvy cdi generate --sys-root ./copied-machine  from another machine's files
  divvy cdi generate --mode gds --class gds -o /var/run/cdi/nvidia-gds.yaml
Then:
  podman run --device nvidia.com/gpu=all IMAGE nvidia-smi -L
  docker run --device nvidia.com/gpu=0 IMAGE nvidia-smi -L  Docker 25 and later

Generate the spec again after each change of the driver, the MIG devices, or the GPUs; `divvy cdi list` shows a spec that is out of date. \
The command runs no program of the driver, and loads only NVML (in divvy-probe). The spec has no hooks: it mounts the libraries in the directories that \
the loaders of Debian and Red Hat search. For images with another loader, --hooks minimal adds one hook, divvy-hook. That hook writes the libraries into the \
container's ld.so.cache, and runs no program of the image. \
Tegra and 32-bit libraries are not supported.")]
pub struct CdiGenerateArgs {
    /// The vendor of the GPUs
    #[arg(long, value_name = "VENDOR", default_value = "auto")]
    pub vendor: CdiVendor,
    /// Write to this file, completely or not at all; - is standard output. Engines read only *.json and *.yaml
    #[arg(
        short,
        long,
        env = "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH",
        value_name = "FILE",
        default_value = "-"
    )]
    pub output: PathBuf,
    /// Format of the spec [default: by the file's extension, else yaml]
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<CdiFormat>,
    /// Root directory of the driver's files, such as /run/nvidia/driver for a driver container. A relative path is below --sys-root if given
    #[arg(long, env = "NVIDIA_CTK_DRIVER_ROOT", value_name = "DIR", default_value = "/")]
    pub driver_root: String,
    /// The directory that contains dev/ [default: the driver's root if it has device nodes, else /]
    #[arg(long, env = "NVIDIA_CTK_DEV_ROOT", value_name = "DIR")]
    pub dev_root: Option<String>,
    /// Root directory of the machine, with /proc and /sys; any other directory than / is a copy of another machine's files
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/")]
    pub sys_root: PathBuf,
    /// The vendor in the device names [default: nvidia.com, amd.com, or intel.com]
    #[arg(long, value_name = "NAME")]
    pub vendor_name: Option<String>,
    /// The class in the device names
    #[arg(long, value_name = "NAME", default_value = "gpu")]
    pub class: String,
    /// How to name devices: index (0, 0:1), uuid (GPU-…), type-index (gpu0, mig0:1), both (index and uuid), or a list of these
    #[arg(long, value_name = "STRATEGY", value_delimiter = ',', default_value = "both")]
    pub device_name_strategy: Vec<CdiNaming>,
    /// Include only these devices, by index or UUID; the value "none" adds a device that has the driver's files but no GPU [default: all]
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub device: Vec<String>,
    /// Omit the device "all"
    #[arg(long)]
    pub no_all_device: bool,
    /// What the spec describes: auto (GPUs), nvml (NVIDIA's GPUs, not under WSL), or wsl; or, in a separate spec with another --class, NVIDIA's
    /// management (every device node of the driver), gds (GPUDirect Storage), mofed (RDMA), gdrcopy, nvswitch, or imex (channels)
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub mode: CdiMode,
    /// Do not add the groups of group-restricted device nodes to the container's user; the spec then does not need CDI 0.7.0
    #[arg(long)]
    pub no_additional_gids: bool,
    /// The hooks of an NVIDIA spec
    #[arg(long, value_name = "HOOKS", default_value = "none")]
    pub hooks: CdiHooks,
    /// With --hooks minimal: path of divvy-hook on the machine that starts the containers [default: in this program's directory]
    #[arg(long, value_name = "PATH")]
    pub hook_program: Option<PathBuf>,
    /// The newest CDI version that the engine understands; newer features are omitted. The spec declares the oldest version
    /// that it needs
    #[arg(long, value_name = "VERSION", default_value = "1.1.0", value_parser = version)]
    pub cdi_version: CdiVersion,
    /// How to find NVIDIA GPUs: probe queries the driver (and finds the UUIDs of MIG devices), proc reads /proc/driver/nvidia
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    pub gpus_from: CdiSource,
    /// The divvy-probe to run, or unix:SOCKET of a running one [default: divvy-probe in this program's directory]
    #[arg(long, env = "DIVVY_PROBE", value_name = "PATH|unix:SOCKET")]
    pub probe: Option<String>,
    /// The driver's libnvidia-ml.so.1 [default: found by searching below the driver's root]
    #[arg(long, env = "DIVVY_NVML_LIBRARY", value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,
    /// A flag of nvidia-ctk that was given and has no effect
    #[arg(long, hide = true)]
    pub without_effect: Vec<String>,
}

fn version(text: &str) -> anyhow::Result<CdiVersion> {
    CdiVersion::parse(text).with_context(|| format!("the versions are {}", CdiVersion::ALL.map(CdiVersion::as_str).join(", ")))
}

/// The vendors of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiVendor {
    /// The first of nvidia, amd, intel that is present
    Auto,
    /// NVIDIA, including WSL
    Nvidia,
    /// AMD (/dev/kfd and render nodes)
    Amd,
    /// Intel (render nodes)
    Intel,
}

/// The file formats of a spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiFormat {
    /// JSON
    Json,
    /// YAML
    Yaml,
}

/// The strategies to name devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiNaming {
    /// 0, 1, 1:0
    Index,
    /// GPU-…, MIG-…
    Uuid,
    /// gpu0, mig1:0
    TypeIndex,
    /// Index and uuid
    Both,
}

/// What a spec describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiMode {
    /// GPUs
    Auto,
    /// GPUs, found with the driver's NVML
    Nvml,
    /// The GPUs of Windows, under WSL
    Wsl,
    /// Every device node of the driver
    Management,
    /// GPUDirect Storage
    Gds,
    /// RDMA, with Mellanox's driver
    Mofed,
    /// GDRCopy
    Gdrcopy,
    /// NVSwitches
    Nvswitch,
    /// IMEX channels
    Imex,
}

/// The hooks of a spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiHooks {
    /// No hooks: mounts are enough
    None,
    /// One hook, divvy-hook, for images whose loader searches other directories
    Minimal,
}

/// The source for the list of NVIDIA GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiSource {
    /// The probe on this machine, files for a copy of another machine
    Auto,
    /// divvy-probe
    Probe,
    /// /proc/driver/nvidia
    Proc,
}

/// List the CDI devices of this machine, the file of each device, and whether containers can use it
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy cdi list
  divvy cdi list -o name                 only usable devices, one per line
  divvy cdi list -o json | jq '.devices[] | select(.state != \"ok\")'
  divvy cdi list --spec-dir /etc/cdi --spec-dir /run/my-cdi

STATE is ok, conflict (two files of one directory define the device, and engines then use neither), hidden (a directory with higher \
priority also defines it), or stale (the file was generated for another driver than the loaded one, or names files that do not exist). \
On standard error, the command lists files that engines refuse or do not read.

Exit status: 0; with --strict 1 if a device is in conflict or stale, or if engines refuse a file.")]
pub struct CdiListArgs {
    /// Directories of specs, in ascending priority
    #[arg(long, env = "NVIDIA_CTK_CDI_SPEC_DIRS", value_name = "DIR", value_delimiter = ',', default_values = ["/etc/cdi", "/var/run/cdi"])]
    pub spec_dir: Vec<String>,
    /// Root directory of the machine
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/")]
    pub sys_root: PathBuf,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: CdiListOutput,
    /// Exit with status 1 if engines refuse a file, or a device is in conflict or stale
    #[arg(long)]
    pub strict: bool,
}

/// Output formats of `divvy cdi list`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiListOutput {
    /// A table
    Table,
    /// JSON
    Json,
    /// Only the names
    Name,
}

/// Check CDI specs against the standard, against each other, and against this machine
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy cdi validate /etc/cdi /var/run/cdi
  divvy cdi validate nvidia.yaml -o json
  divvy cdi generate | divvy cdi validate -
  divvy cdi validate --sys-root ./tree ./tree/etc/cdi
      against another machine's files

error: engines refuse the file, so none of its devices are available; or two files of a directory define the same device.
warning: the file violates the standard but engines accept it; or the file is stale.

Exit status: 0 no findings, or only warnings; 1 errors, or with --strict warnings.")]
pub struct CdiValidateArgs {
    /// Spec files, or directories of spec files; - is standard input
    #[arg(value_name = "FILE|DIR", required = true)]
    pub files: Vec<PathBuf>,
    /// Root directory of the machine whose driver and files the specs must match; a spec that does not match is stale
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/")]
    pub sys_root: PathBuf,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: CdiValidateOutput,
    /// Also fail on warnings
    #[arg(long)]
    pub strict: bool,
}

/// Output formats of `divvy cdi validate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiValidateOutput {
    /// One line for each finding
    Text,
    /// JSON
    Json,
}

/// Move the paths of a CDI spec below another root, for a spec that was generated in, or is meant for, a driver container
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy cdi transform --from /run/nvidia/driver --to / --input nvidia.yaml
  divvy cdi transform --from /host --to / -i in.yaml -o /var/run/cdi/nvidia.yaml
  divvy cdi transform --relative-to container --from /usr/local/nvidia --to /opt/nvidia < in.json

Paths of the host are the sources of mounts, the device nodes, and the programs of hooks. Paths of the container are the destinations of mounts and device nodes, programs that run \
there (startContainer), and the arguments of hooks that run in its namespaces. A path moves only if whole path components match the root: /driver is not the root of \
/driver-x/lib.")]
pub struct CdiTransformArgs {
    /// The current root of the paths
    #[arg(long, value_name = "DIR")]
    pub from: String,
    /// The new root of the paths
    #[arg(long, value_name = "DIR")]
    pub to: String,
    /// The side whose paths to move
    #[arg(long, value_name = "SIDE", default_value = "host")]
    pub relative_to: CdiSide,
    /// The spec; - is standard input
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub input: PathBuf,
    /// Write to this file, completely or not at all; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,
}

/// The two sides of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiSide {
    /// The machine
    Host,
    /// The container
    Container,
}
