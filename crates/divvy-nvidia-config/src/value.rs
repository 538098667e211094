use std::time::Duration;

/// The complete configuration, from defaults, file, environment, and flags. It has been validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvidiaConfig {
    /// How MIG devices are offered.
    pub mig_strategy: NvidiaMigStrategy,
    /// Whether the program ends if the driver cannot be initialized. If not, the program waits.
    pub fail_on_init_error: bool,
    /// The root of the driver installation on the host.
    pub driver_root: String,
    /// The directory on the host that contains the driver's `/dev`. The default is the driver root.
    pub dev_root: String,
    /// Whether containers get access to GPUDirect RDMA copy devices.
    pub gdrcopy: bool,
    /// Whether containers get access to GPUDirect Storage.
    pub gds: bool,
    /// Whether containers get access to Mellanox network devices.
    pub mofed: bool,
    /// The platform whose devices the program looks for.
    pub discovery: Discovery,
    /// The directory on the host for the files of MPS; empty if not given.
    pub mps_root: String,
    /// The options that only the device plugin uses.
    pub plugin: DevicePlugin,
    /// The options that only GPU feature discovery uses.
    pub feature_discovery: FeatureDiscovery,
    /// The resource names under which GPUs and MIG devices are offered.
    pub resources: Resources,
    /// How devices are shared by several containers.
    pub sharing: Sharing,
    /// The IMEX channels that containers get.
    pub imex: Imex,
}

/// How MIG devices are offered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NvidiaMigStrategy {
    /// MIG devices are not offered.
    #[default]
    None,
    /// MIG devices are offered as `nvidia.com/gpu`. All MIG devices of a node must have the same profile.
    Single,
    /// Each MIG profile is a resource of its own.
    Mixed,
}

/// The platform whose devices the program looks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Discovery {
    /// The platform is detected.
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
    /// The ways in which a container is told which devices it gets, without duplicates, in the order that was given.
    pub device_list_strategies: Vec<DeviceListStrategy>,
    /// How devices are named in an answer to Allocate.
    pub device_id_strategy: DeviceIdStrategy,
    /// The prefix of the CDI annotation's key.
    pub cdi_annotation_prefix: String,
    /// The path on the host of the program that CDI specs name as a hook.
    pub nvidia_ctk_path: String,
    /// Where the driver's root is mounted in the plugin's container.
    pub container_driver_root: String,
    /// Which replicas the plugin prefers in an allocation.
    pub shared_devices_policy: SharedDevicesPolicy,
    /// The path of the kubelet's socket. If it is empty, the plugin does not register.
    pub kubelet_socket: String,
    /// The value of `DP_DISABLE_HEALTHCHECKS`, as given.
    pub disabled_health_checks: String,
    /// The value of `DP_ENABLE_HEALTHCHECKS`, as given.
    pub enabled_health_checks: String,
    /// The feature flags of the CDI generation, as given.
    pub cdi_feature_flags: Vec<String>,
    /// The names of CDI hooks that specs must not contain. `all` stands for every hook.
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
    /// The field for CDI names in the answer to Allocate.
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
    /// The replicas of the GPUs with the fewest allocated replicas.
    #[default]
    Distributed,
    /// The replicas of the GPUs with the most allocated replicas.
    Packed,
}

/// The options of GPU feature discovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeatureDiscovery {
    /// Whether the labels are written only once.
    pub oneshot: bool,
    /// Whether to omit the label with the time of the start.
    pub no_timestamp: bool,
    /// The time between two updates.
    pub sleep_interval: SleepInterval,
    /// The file for the labels. If it is empty, they go to standard output.
    pub output_file: String,
    /// The file with the name of the machine's type.
    pub machine_type_file: String,
    /// Whether labels are written to a NodeFeature object instead of the file.
    pub use_node_feature_api: bool,
}

/// The time between two updates of the labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SleepInterval {
    /// A fixed time.
    Every(Duration),
    /// The labels are not updated again.
    Infinite,
}

/// The resource names under which GPUs and MIG devices are offered. The names are complete, with a prefix such as `nvidia.com/`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resources {
    /// The patterns for product names of GPUs. The first one that matches decides.
    pub gpus: Vec<ResourcePattern>,
    /// The patterns for profiles of MIG devices. The first one that matches decides.
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
    /// How devices are shared. If the file describes both MPS and time-slicing, this is MPS.
    pub strategy: SharingStrategy,
    /// Whether `.shared` is appended to the names of shared resources.
    pub rename_by_default: bool,
    /// Whether a container may request only one shared device.
    pub fail_requests_greater_than_one: bool,
    /// The shared resources.
    pub resources: Vec<ReplicatedResource>,
}

/// The mechanism by which devices are shared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SharingStrategy {
    /// Devices are not shared.
    #[default]
    None,
    /// Time-slicing: the driver runs the containers in turns.
    TimeSlicing,
    /// CUDA's Multi-Process Service.
    Mps,
}

/// A resource whose devices are shared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicatedResource {
    /// The complete name, such as `nvidia.com/gpu`.
    pub name: String,
    /// The complete name under which the replicas are offered, if it differs from `name`.
    pub rename: Option<String>,
    /// Which devices of the resource are shared.
    pub devices: ReplicatedDevices,
    /// The number of replicas of each device, at least 2.
    pub replicas: u32,
}

/// Which devices of a resource are shared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ReplicatedDevices {
    /// All devices.
    #[default]
    All,
    /// This many devices: the first ones.
    Count(u32),
    /// The listed devices.
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
    /// The numbers of the channels. The list is empty or contains only 0.
    pub channel_ids: Vec<u32>,
    /// Whether the program ends if a channel does not exist.
    pub required: bool,
}
