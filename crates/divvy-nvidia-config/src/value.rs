use std::time::Duration;

/// The complete configuration, from defaults, file, environment, and flags. It has been validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// How MIG devices are offered.
    pub mig_strategy: MigStrategy,
    /// Whether a failure to initialize the driver ends the program. If not, it waits.
    pub fail_on_init_error: bool,
    /// Root of the driver installation on the host.
    pub driver_root: String,
    /// Directory on the host that contains the driver's `/dev`; the driver root unless given.
    pub dev_root: String,
    /// Whether containers get access to GPUDirect RDMA copy devices.
    pub gdrcopy: bool,
    /// Whether containers get access to GPUDirect Storage.
    pub gds: bool,
    /// Whether containers get access to Mellanox network devices.
    pub mofed: bool,
    /// The platform whose devices are looked for.
    pub discovery: Discovery,
    /// Directory on the host for the files of MPS; empty if not given.
    pub mps_root: String,
    /// What the device plugin alone uses.
    pub plugin: DevicePlugin,
    /// What GPU feature discovery alone uses.
    pub feature_discovery: FeatureDiscovery,
    /// Which GPUs and MIG devices are offered under which name.
    pub resources: Resources,
    /// How devices are shared by several containers.
    pub sharing: Sharing,
    /// The IMEX channels that containers get.
    pub imex: Imex,
}

/// How MIG devices are offered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MigStrategy {
    /// Not at all.
    #[default]
    None,
    /// As `nvidia.com/gpu`; all of a node's MIG devices have the same profile.
    Single,
    /// One resource for each MIG profile.
    Mixed,
}

/// The platform whose devices are looked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Discovery {
    /// The one that is found.
    #[default]
    Auto,
    /// A driver with NVML.
    Nvml,
    /// Tegra.
    Tegra,
    /// GPUs that are passed through to virtual machines; only for GPU feature discovery.
    Vfio,
}

/// The options of the device plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePlugin {
    /// Whether an answer to Allocate lists device nodes.
    pub pass_device_specs: bool,
    /// How a container is told which devices it gets; without duplicates, in the order that was given.
    pub device_list_strategies: Vec<DeviceListStrategy>,
    /// How devices are named in an answer to Allocate.
    pub device_id_strategy: DeviceIdStrategy,
    /// Prefix of the CDI annotation's key.
    pub cdi_annotation_prefix: String,
    /// Path on the host of the program that CDI specs call as a hook.
    pub nvidia_ctk_path: String,
    /// Where the driver's root is mounted in the plugin's container.
    pub container_driver_root: String,
    /// Which replicas the plugin prefers.
    pub shared_devices_policy: SharedDevicesPolicy,
    /// The kubelet's socket; empty to serve without registration.
    pub kubelet_socket: String,
    /// `DP_DISABLE_HEALTHCHECKS`, as given.
    pub disabled_health_checks: String,
    /// `DP_ENABLE_HEALTHCHECKS`, as given.
    pub enabled_health_checks: String,
    /// Names of features of CDI generation that are switched on or off, as given.
    pub cdi_feature_flags: Vec<String>,
    /// Names of CDI hooks that specs do not contain; `all` for every hook.
    pub cdi_disabled_hooks: Vec<String>,
}

/// How a container is told which devices it gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceListStrategy {
    /// The environment variable `NVIDIA_VISIBLE_DEVICES`.
    Envvar,
    /// Mounts below `/var/run/nvidia-container-devices`.
    VolumeMounts,
    /// An annotation with CDI names.
    CdiAnnotations,
    /// The CDI names in the answer's own field.
    CdiCri,
}

/// How devices are named in an answer to Allocate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceIdStrategy {
    /// By UUID.
    #[default]
    Uuid,
    /// By index: `2`, or `1:0` for a MIG device.
    Index,
}

/// Which replicas the plugin prefers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SharedDevicesPolicy {
    /// Those of the GPUs with the fewest allocated replicas.
    #[default]
    Distributed,
    /// Those of the GPUs with the most allocated replicas.
    Packed,
}

/// The options of GPU feature discovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeatureDiscovery {
    /// Whether the labels are written once.
    pub oneshot: bool,
    /// Whether the label with the time of the start is left out.
    pub no_timestamp: bool,
    /// The time between two updates.
    pub sleep_interval: SleepInterval,
    /// The file for the labels; empty for the standard output.
    pub output_file: String,
    /// The file with the name of the machine's type.
    pub machine_type_file: String,
    /// Whether labels are written to a NodeFeature object instead of the file.
    pub use_node_feature_api: bool,
}

/// The time between two updates of the labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SleepInterval {
    /// This time.
    Every(Duration),
    /// No update after the first one.
    Infinite,
}

/// Which GPUs and MIG devices are offered under which name. The names are complete, with a prefix such as `nvidia.com/`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resources {
    /// The first pattern that matches a GPU's product name decides.
    pub gpus: Vec<ResourcePattern>,
    /// The first pattern that matches a MIG device's profile decides.
    pub mig: Vec<ResourcePattern>,
}

/// A name for all devices that match a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourcePattern {
    /// The pattern; `*` stands for any text.
    pub pattern: String,
    /// The resource's name, such as `nvidia.com/gpu`.
    pub name: String,
}

/// How devices are shared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sharing {
    /// The way; MPS if the file describes both.
    pub strategy: SharingStrategy,
    /// Whether `.shared` is appended to the names of shared resources.
    pub rename_by_default: bool,
    /// Whether a container may request one shared device only.
    pub fail_requests_greater_than_one: bool,
    /// The shared resources.
    pub resources: Vec<ReplicatedResource>,
}

/// The way in which devices are shared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SharingStrategy {
    /// They are not.
    #[default]
    None,
    /// The driver runs the containers in turns.
    TimeSlicing,
    /// Through CUDA's Multi-Process Service.
    Mps,
}

/// A shared resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicatedResource {
    /// The complete name, such as `nvidia.com/gpu`.
    pub name: String,
    /// The complete name under which the replicas are offered, if it is another one.
    pub rename: Option<String>,
    /// Which devices of the resource are shared.
    pub devices: ReplicatedDevices,
    /// The number of replicas of each device; at least 2.
    pub replicas: u32,
}

/// Which devices of a resource are shared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ReplicatedDevices {
    /// All of them.
    #[default]
    All,
    /// The first ones, this many.
    Count(u32),
    /// These.
    List(Vec<DeviceReference>),
}

/// A device, as a configuration names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceReference {
    /// A GPU's index.
    Gpu(u32),
    /// A GPU's index and the index of one of its MIG devices.
    Mig(u32, u32),
    /// A UUID: `GPU-…`, `MIG-…`, or `MIG-GPU-…/gi/ci`.
    Uuid(String),
}

/// The IMEX channels that containers get.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Imex {
    /// The channels' numbers: none, or 0.
    pub channel_ids: Vec<u32>,
    /// Whether the program ends if a channel does not exist.
    pub required: bool,
}
