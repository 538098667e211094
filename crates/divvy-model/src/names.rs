//! Names that other programs depend on: extended resources, annotations, and environment variables.

/// Extended resource for shared GPU memory, counted in units. gpushare uses the same name.
pub const GPU_MEM: &str = "aliyun.com/gpu-mem";
/// Extended resource that counts a node's GPUs. gpushare uses the same name. A container's request for it has no effect.
pub const GPU_COUNT: &str = "aliyun.com/gpu-count";

/// Extended resource for whole GPUs, which NVIDIA's device plugin advertises.
pub const WHOLE_GPU: &str = "nvidia.com/gpu";
/// Node annotation: the agent's description of the node's GPUs ([`crate::Inventory`]).
pub const INVENTORY: &str = "divvy.dev/inventory";
/// Pod annotation: the extender's decision ([`crate::Allocation`]), which the Binding writes.
pub const ALLOCATION: &str = "divvy.dev/allocation";

/// Prefix of all of Divvy's annotations.
pub const PREFIX: &str = "divvy.dev/";
/// Pod annotation: the number of GPUs over which the pod's memory is spread evenly.
pub const GPUS: &str = "divvy.dev/gpus";
/// Pod annotation: patterns of GPU products that the pod accepts or rejects.
pub const GPU_MODEL: &str = "divvy.dev/gpu-model";
/// Pod annotation: the least total memory that a GPU must have.
pub const GPU_MEMORY: &str = "divvy.dev/gpu-memory";
/// Pod annotation: the preference among the GPUs that fit.
pub const GPU_PREFER: &str = "divvy.dev/gpu-prefer";
/// Pod annotation: UUIDs of the only GPUs that the pod accepts.
pub const GPU_UUID: &str = "divvy.dev/gpu-uuid";
/// Pod annotation, reserved: the share of compute. This version refuses pods that have it.
pub const GPU_CORES: &str = "divvy.dev/gpu-cores";
/// Divvy's annotations that a user may write on a pod.
pub const POD_KEYS: [&str; 5] = [GPU_MODEL, GPU_MEMORY, GPU_PREFER, GPU_UUID, GPUS];
/// Pod annotation: marks a test pod of `divvy scheduler-config --check`, which finds out whether the scheduler calls the extender.
/// The extender refuses the pod and repeats the annotation's value in the refusal.
pub const SCHEDULER_CHECK: &str = "divvy.dev/scheduler-check";

/// gpushare: decimal index of the pod's GPU. Pod annotation and environment variable.
pub const ALIYUN_IDX: &str = "ALIYUN_COM_GPU_MEM_IDX";
/// gpushare: units of the pod's GPU. Pod annotation and environment variable.
pub const ALIYUN_DEV: &str = "ALIYUN_COM_GPU_MEM_DEV";
/// gpushare: as a pod annotation, the pod's units; as an environment variable, the container's units.
pub const ALIYUN_POD: &str = "ALIYUN_COM_GPU_MEM_POD";
/// gpushare: environment variable, the container's units.
pub const ALIYUN_CONTAINER: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";
/// gpushare: pod annotation, `"false"` at bind and `"true"` after gpushare's device plugin has allocated the GPU.
pub const ALIYUN_ASSIGNED: &str = "ALIYUN_COM_GPU_MEM_ASSIGNED";
/// gpushare: pod annotation, the time of the bind in nanoseconds since the Unix epoch.
pub const ALIYUN_ASSUME_TIME: &str = "ALIYUN_COM_GPU_MEM_ASSUME_TIME";
/// gpushare 2.0: pod annotation `{"<container>":{"<gpu>":<units>}}`, which `kubectl inspect gpushare` reads.
pub const GPUSHARE_ALLOCATION: &str = "scheduler.framework.gpushare.allocation";

/// The longest name of a node or pod, in bytes (RFC 1123 subdomain, apimachinery `pkg/util/validation/validation.go`).
pub const MOST_NAME_BYTES: usize = 253;

/// Report whether a text can be the name of an API object: letters, digits, `-`, and `.` (RFC 1123 subdomain), without a leading dot.
/// Such a name is safe as one segment of a path: it cannot be `..`.
pub fn is_name(text: &str) -> bool {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    (1..=MOST_NAME_BYTES).contains(&text.len()) && text.bytes().all(legal) && !text.starts_with('.')
}

/// Environment variable from which NVIDIA's runtime takes a container's GPUs. A grant sets it to [`VISIBLE_NONE`].
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Value of [`VISIBLE_DEVICES`] with which NVIDIA's runtime does not change the container (see `docs/compatibility/toolkit.md`).
pub const VISIBLE_NONE: &str = "void";

/// CDI kind of the device that a grant describes.
pub const CDI_KIND: &str = "divvy.dev/grant";
