//! The grammar of `divvy cdi`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use divvy_cdi::Version;

/// Describe GPUs to container engines (CDI): make specs, list what is there, check it
#[derive(Debug, Subcommand)]
pub enum CdiCommand {
    Generate(Box<CdiGenerateArgs>),
    List(CdiListArgs),
    Validate(CdiValidateArgs),
    Transform(CdiTransformArgs),
}

/// Make the CDI spec of this machine's GPUs: device nodes, the driver's libraries, programs, firmware and sockets
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy cdi generate                                       look at it
  divvy cdi generate -o /var/run/cdi/nvidia.yaml
      for this boot; /etc/cdi outlives it
  divvy cdi generate --driver-root /run/nvidia/driver -o /var/run/cdi/nvidia.yaml
  divvy cdi generate --vendor amd -o /etc/cdi/amd.json
  divvy cdi generate --cdi-version 0.5.0 -o /etc/cdi/nvidia.yaml
      for podman 4.6 and other old readers
  divvy cdi generate --sys-root ./tree-of-another-machine  from files alone
  divvy cdi generate --mode gds --class gds -o /var/run/cdi/nvidia-gds.yaml
Then:
  podman run --device nvidia.com/gpu=all IMAGE nvidia-smi -L
  docker run --device nvidia.com/gpu=0 IMAGE nvidia-smi -L  Docker 25 and later

Make it again after each change of the driver, of MIG devices or of cards; `divvy cdi list` says when that was forgotten. \
Nothing of the driver is run, and nothing of it but its NVML is loaded, by divvy-probe. The spec has no hooks: libraries are mounted in the folders that \
loaders of Debian's and of Red Hat's kind search. For images with another loader, --hooks minimal adds one, divvy-hook, which writes the libraries into the \
container's ld.so.cache and runs nothing of the image. \
Not described: Tegra, 32-bit libraries.")]
pub struct CdiGenerateArgs {
    /// Whose GPUs
    #[arg(long, value_name = "VENDOR", default_value = "auto")]
    pub vendor: CdiVendor,
    /// Write to this file, whole or not at all; - is standard output. Readers look at *.json and *.yaml
    #[arg(
        short,
        long,
        env = "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH",
        value_name = "FILE",
        default_value = "-"
    )]
    pub output: PathBuf,
    /// The form [default: by the file's ending, else yaml]
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<CdiFormat>,
    /// The root of the driver's files; a driver container's is /run/nvidia/driver. A relative path is below --sys-root where that is given
    #[arg(long, env = "NVIDIA_CTK_DRIVER_ROOT", value_name = "DIR", default_value = "/")]
    pub driver_root: String,
    /// The root of /dev [default: the driver's root if there are device nodes, else /]
    #[arg(long, env = "NVIDIA_CTK_DEV_ROOT", value_name = "DIR")]
    pub dev_root: Option<String>,
    /// The machine's root, with /proc and /sys: another one than / is a copy of another machine's files
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/")]
    pub sys_root: PathBuf,
    /// The vendor in the devices' names [default: nvidia.com, amd.com or intel.com]
    #[arg(long, value_name = "NAME")]
    pub vendor_name: Option<String>,
    /// The class in the devices' names
    #[arg(long, value_name = "NAME", default_value = "gpu")]
    pub class: String,
    /// By what devices are called: index (0, 0:1), uuid (GPU-…), type-index (gpu0, mig0:1), or each by several; both is index and uuid
    #[arg(long, value_name = "STRATEGY", value_delimiter = ',', default_value = "both")]
    pub device_name_strategy: Vec<CdiNaming>,
    /// Only these devices, by index or UUID; none is a device of its own, the driver's files without a GPU [default: all]
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub device: Vec<String>,
    /// Without the device "all"
    #[arg(long)]
    pub no_all_device: bool,
    /// Of what the spec is: auto (GPUs), nvml (NVIDIA's GPUs, not under WSL), wsl; or NVIDIA's management (every node of the driver), gds (GPUDirect
    /// Storage), mofed (RDMA), gdrcopy, nvswitch, imex (channels), each a spec of its own that wants another --class
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub mode: CdiMode,
    /// Nodes that are open to a group alone do not bring the group along; nor does the spec need CDI 0.7.0 then
    #[arg(long)]
    pub no_additional_gids: bool,
    /// Which hooks an NVIDIA spec has
    #[arg(long, value_name = "HOOKS", default_value = "none")]
    pub hooks: CdiHooks,
    /// With --hooks minimal: where divvy-hook is on the machine that starts containers [default: beside this program]
    #[arg(long, value_name = "PATH")]
    pub hook_program: Option<PathBuf>,
    /// The newest version of CDI that the reader understands; what it has not is left out. The spec is written in the oldest version
    /// that it needs
    #[arg(long, value_name = "VERSION", default_value = "1.1.0", value_parser = version)]
    pub cdi_version: Version,
    /// Who tells the NVIDIA GPUs: probe asks the driver (MIG devices get their UUIDs), proc reads /proc/driver/nvidia
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    pub gpus_from: CdiSource,
    /// The divvy-probe to run, or unix:SOCKET of one that runs [default: the divvy-probe beside this program]
    #[arg(long, env = "DIVVY_PROBE", value_name = "PATH|unix:SOCKET")]
    pub probe: Option<String>,
    /// The driver's libnvidia-ml.so.1 [default: searched for below the driver's root]
    #[arg(long, env = "DIVVY_NVML_LIBRARY", value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,
}

fn version(text: &str) -> Result<Version, String> {
    Version::parse(text).ok_or_else(|| format!("there are {}", Version::ALL.map(Version::as_str).join(", ")))
}

/// Vendors of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiVendor {
    /// The first of nvidia, amd, intel that is there
    Auto,
    /// NVIDIA, under WSL too
    Nvidia,
    /// AMD (/dev/kfd and render nodes)
    Amd,
    /// Intel (render nodes)
    Intel,
}

/// Forms of a spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiFormat {
    /// JSON
    Json,
    /// YAML
    Yaml,
}

/// Names of devices.
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

/// What a spec is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiMode {
    /// GPUs
    Auto,
    /// GPUs, by the driver's NVML
    Nvml,
    /// The GPUs of Windows
    Wsl,
    /// Every device node of the driver
    Management,
    /// GPUDirect Storage
    Gds,
    /// RDMA by Mellanox' driver
    Mofed,
    /// GDRCopy
    Gdrcopy,
    /// NVSwitches
    Nvswitch,
    /// IMEX channels
    Imex,
}

/// Hooks of a spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiHooks {
    /// None: mounts do it all
    None,
    /// One, divvy-hook: for images whose loader searches other folders
    Minimal,
}

/// Who knows the GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiSource {
    /// The probe on this machine, files for a copy of another
    Auto,
    /// divvy-probe
    Probe,
    /// /proc/driver/nvidia
    Proc,
}

/// List the CDI devices of this machine: from which file each comes, and whether containers get it
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy cdi list
  divvy cdi list -o name                 one a line, those that containers get
  divvy cdi list -o json | jq '.devices[] | select(.state != \"ok\")'
  divvy cdi list --spec-dir /etc/cdi --spec-dir /run/my-cdi

STATE is ok, conflict (two files of one directory have the device: engines then give out neither), hidden (a directory of higher \
priority has it, too), or stale (the file was made for another driver than is loaded, or names files that are gone). \
Files that engines refuse, and files in which they do not look, are told on standard error.

Exit status: 0; with --strict 1 if any device is not ok (hidden is), or any file is refused.")]
pub struct CdiListArgs {
    /// Where specs are, lowest priority first
    #[arg(long, env = "NVIDIA_CTK_CDI_SPEC_DIRS", value_name = "DIR", value_delimiter = ',', default_values = ["/etc/cdi", "/var/run/cdi"])]
    pub spec_dir: Vec<String>,
    /// The machine's root
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/")]
    pub sys_root: PathBuf,
    /// The form
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: CdiListOutput,
    /// Fail if something is wrong
    #[arg(long)]
    pub strict: bool,
}

/// Forms of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiListOutput {
    /// Columns
    Table,
    /// JSON
    Json,
    /// Names alone
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

error: engines refuse the file, so none of its devices can be had; or two of the files of a directory have the same device.
warning: the standard asks for something else, though engines let it pass; or the file is stale.

Exit status: 0 sound, or warnings alone; 1 errors, or with --strict warnings.")]
pub struct CdiValidateArgs {
    /// Files, or directories of them; - is standard input
    #[arg(value_name = "FILE|DIR", required = true)]
    pub files: Vec<PathBuf>,
    /// The machine's root, for what is stale
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/")]
    pub sys_root: PathBuf,
    /// The form
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: CdiValidateOutput,
    /// Fail on warnings too
    #[arg(long)]
    pub strict: bool,
}

/// Forms of findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiValidateOutput {
    /// A line for each finding
    Text,
    /// JSON
    Json,
}

/// Move the paths of a CDI spec below another root: for a spec that was made in a driver's container, or is for one
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy cdi transform --from /run/nvidia/driver --to / --input nvidia.yaml
  divvy cdi transform --from /host --to / -i in.yaml -o /var/run/cdi/nvidia.yaml
  divvy cdi transform --relative-to container --from /usr/local/nvidia --to /opt/nvidia < in.json

Of the machine (host) are the sources of mounts, device nodes and the programs of hooks; of the container, where mounts and device nodes are put, and programs that run \
there (startContainer), and arguments of hooks that run in its namespaces. What is moved begins with the root by whole components: /driver is not the root of \
/driver-x/lib.")]
pub struct CdiTransformArgs {
    /// The root that paths are below now
    #[arg(long, value_name = "DIR")]
    pub from: String,
    /// The root that they are to be below
    #[arg(long, value_name = "DIR")]
    pub to: String,
    /// Whose paths are meant
    #[arg(long, value_name = "SIDE", default_value = "host")]
    pub relative_to: CdiSide,
    /// The spec; - is standard input
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub input: PathBuf,
    /// Write to this file, whole or not at all; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,
}

/// Sides of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CdiSide {
    /// The machine
    Host,
    /// The container
    Container,
}
