use divvy_model::MiB;

/// Why nothing can be offered, or why a request is refused. Where NVIDIA's plugin has an error message, the text is the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// With the MIG strategy `single`, MIG is enabled on only some of the GPUs.
    #[error("all devices on the node must be configured with the same migEnabled value")]
    MigOnSomeGpus,
    /// With the MIG strategy `single`, a GPU has no MIG devices.
    #[error("device {0} has no MIG devices configured")]
    NoMigDevices(u32),
    /// With the MIG strategy `single`, not all MIG devices are alike.
    #[error("more than one MIG device type present on node")]
    SeveralMigTypes,
    /// MPS cannot share MIG devices.
    #[error("sharing using MPS is not supported for MIG devices")]
    MpsWithMig,
    /// The configuration names devices through CDI, and the node is a Tegra.
    #[error(
        "CDI --device-list-strategy options are only supported on NVML-based systems, and this node is a Tegra; \
         use --device-list-strategy=envvar or volume-mounts"
    )]
    CdiOnTegra,
    /// The configuration shares devices through MPS, and the node is a Tegra.
    #[error(
        "this node is a Tegra, and the MPS control daemon needs NVML, which does not manage a Tegra's GPU; \
         share the GPU through sharing.timeSlicing"
    )]
    MpsOnTegra,
    /// The configuration wants more replicas than CUDA's Multi-Process Service allows clients.
    #[error("invalid device maximum allowed replicas exceeded: {replicas} > {most}")]
    TooManyClients {
        /// The number in the configuration.
        replicas: u32,
        /// The limit of the GPU.
        most: u32,
    },
    /// A GPU has less than 1 MiB for each client of CUDA's Multi-Process Service.
    #[error(
        "GPU {index} has {} MiB of memory, and {replicas} replicas cannot have 1 MiB each; reduce the number of replicas in sharing.mps",
        memory.0
    )]
    TooLittleToShare {
        /// The GPU's index.
        index: u32,
        /// The GPU's memory.
        memory: MiB,
        /// The number in the configuration.
        replicas: u32,
    },
    /// A resource's name cannot be the name of a directory, which MPS needs.
    #[error("the resource name {0:?} cannot be the path of a directory for MPS; write a name such as nvidia.com/gpu")]
    NotADirectoryName(String),
    /// An IMEX channel that the configuration requires is missing.
    #[error("error querying IMEX channels: requested IMEX channel channel{0} does not exist")]
    NoImexChannel(u32),
    /// The kubelet asks for a device that does not belong to the resource.
    #[error("invalid allocation request for \"{resource}\": invalid request: unknown device: {device}")]
    NotOffered {
        /// The resource's name.
        resource: String,
        /// The device id.
        device: String,
    },
    /// A container requests more than one shared device, and the configuration forbids it.
    #[error(
        "invalid allocation request for \"{resource}\": invalid request: maximum request size for shared resources is 1; found {found}"
    )]
    TooManyShared {
        /// The resource's name.
        resource: String,
        /// The number of devices.
        found: usize,
    },
}
