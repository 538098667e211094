//! Names that other programs depend on: extended resources, annotations, and environment variables.

/// Extended resource: shared GPU memory, counted in units. gpushare uses the same name.
pub const GPU_MEM: &str = "aliyun.com/gpu-mem";
/// Extended resource: the number of a node's GPUs. gpushare uses the same name. A container's request for it has no effect.
pub const GPU_COUNT: &str = "aliyun.com/gpu-count";

/// Extended resource: whole GPUs, which NVIDIA's device plugin advertises.
pub const WHOLE_GPU: &str = "nvidia.com/gpu";
/// Node annotation: the agent's description of the node's GPUs, in JSON.
///
/// [`crate::Inventory`] is its type.
pub const INVENTORY: &str = "divvy.dev/inventory";
/// Pod annotation that Divvy writes: the extender's decision, in JSON. The Binding carries it. Users may not write it.
///
/// [`crate::Allocation`] is its type.
pub const ALLOCATION: &str = "divvy.dev/allocation";

/// Prefix: all of Divvy's annotations begin with it.
pub const PREFIX: &str = "divvy.dev/";
/// Pod annotation that users write: the number of GPUs of one node over which the pod's memory is divided equally, 1 to 16. Example: `"2"`.
pub const GPUS: &str = "divvy.dev/gpus";
/// Pod annotation that users write: patterns of GPU products, separated by commas. The pod accepts only products that match one of them, and
/// none that match a pattern with `!`. Example: `"A100*,H100*"`, `"!T4"`.
pub const GPU_MODEL: &str = "divvy.dev/gpu-model";
/// Pod annotation that users write: the total memory that a GPU must have at least, free or not. Example: `">=40Gi"`.
pub const GPU_MEMORY: &str = "divvy.dev/gpu-memory";
/// Pod annotation that users write: which of the GPUs with enough free memory the pod prefers: `fastest`, `most-memory`, or `least-memory`.
pub const GPU_PREFER: &str = "divvy.dev/gpu-prefer";
/// Pod annotation that users write: the UUIDs of the only GPUs that the pod accepts, separated by commas.
pub const GPU_UUID: &str = "divvy.dev/gpu-uuid";
/// Pod annotation that users write: the largest part of the compute time of each of its GPUs that the pod may use, in percent, 1 to 100.
/// Example: `"30"`.
pub const GPU_CORES: &str = "divvy.dev/gpu-cores";
/// Pod annotation that users write: whether the pod must be held to its share of a GPU: `hard`, `soft`, or `none`.
pub const ISOLATION: &str = "divvy.dev/isolation";
/// Pod annotation that users write: the vendor of the GPUs of which the pod gets shares: `nvidia`, `amd`, or `intel`. Without it, the pod gets shares
/// of NVIDIA's GPUs.
pub const GPU_VENDOR: &str = "divvy.dev/gpu-vendor";
/// Pod annotation that users write: the id of the run whose test of a GPU the pod is, at most 32 lowercase letters and digits. Of the GPUs in
/// `divvy.dev/gpu-uuid`, the pod also accepts those that are out of service while this run tests them. `divvy smoke --report` writes it, and only
/// users who may patch nodes may.
pub const GPU_TEST: &str = "divvy.dev/gpu-test";
/// Divvy's annotations that a user may write on a pod.
pub const POD_KEYS: [&str; 9] = [
    GPU_MODEL, GPU_MEMORY, GPU_PREFER, GPU_UUID, GPUS, GPU_CORES, ISOLATION, GPU_VENDOR, GPU_TEST,
];
/// Node annotation: takes a GPU out of service, whose UUID follows the slash. The value is the reason. Administrators write it, and so does `divvy smoke
/// --report`.
///
/// [`crate::out_of_service`] reads it.
pub const OUT_OF_SERVICE: &str = "out-of-service.divvy.dev/";
/// Node annotation: opens a GPU that is out of service, whose UUID follows the slash, to the pod that tests it. The value is the id of the run, which the
/// pod's `divvy.dev/gpu-test` must equal. It counts for 62 minutes, and not if the agent has started since. `divvy smoke --report` writes it.
pub const UNDER_TEST: &str = "under-test.divvy.dev/";
/// Pod annotation that Divvy writes: marks a test pod of `divvy scheduler-config --check`, which finds out whether the scheduler calls the
/// extender. The extender refuses the pod and repeats the annotation's value in the refusal.
pub const SCHEDULER_CHECK: &str = "divvy.dev/scheduler-check";

/// gpushare's annotation and environment variable: the decimal index of the pod's GPU. A pod with several GPUs has their indices in the
/// variable, separated by commas, and the first one in the annotation.
pub const ALIYUN_IDX: &str = "ALIYUN_COM_GPU_MEM_IDX";
/// gpushare's annotation and environment variable: the units of the pod's first GPU.
pub const ALIYUN_DEV: &str = "ALIYUN_COM_GPU_MEM_DEV";
/// gpushare's annotation and environment variable: as an annotation, the pod's units; as a variable, the container's units.
pub const ALIYUN_POD: &str = "ALIYUN_COM_GPU_MEM_POD";
/// Environment variable: the container's units. gpushare uses the same name.
pub const ALIYUN_CONTAINER: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";
/// gpushare's annotation: `"false"` at bind, and `"true"` after gpushare's device plugin has allocated the GPU.
pub const ALIYUN_ASSIGNED: &str = "ALIYUN_COM_GPU_MEM_ASSIGNED";
/// gpushare's annotation: the time of the bind in nanoseconds since the Unix epoch.
pub const ALIYUN_ASSUME_TIME: &str = "ALIYUN_COM_GPU_MEM_ASSUME_TIME";
/// gpushare's annotation: the units of each container on each GPU, `{"<container>":{"<gpu>":<units>}}`. `kubectl inspect gpushare` reads it
/// (since gpushare 2.0).
pub const GPUSHARE_ALLOCATION: &str = "scheduler.framework.gpushare.allocation";

/// The longest name of a node or pod, in bytes (RFC 1123 subdomain, apimachinery `pkg/util/validation/validation.go`).
pub const MOST_NAME_BYTES: usize = 253;

/// Report whether a text can be the name of an API object: letters, digits, `-`, and `.` (RFC 1123 subdomain), without a leading dot.
/// Such a name is safe as one segment of a path: it cannot be `..`.
pub fn is_name(text: &str) -> bool {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    (1..=MOST_NAME_BYTES).contains(&text.len()) && text.bytes().all(legal) && !text.starts_with('.')
}

/// Environment variable: NVIDIA's runtime takes a container's GPUs from it. Divvy sets it to `void`, so that this runtime does not change the
/// container.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Value of [`VISIBLE_DEVICES`]: NVIDIA's runtime does not change the container (see `docs/compatibility/toolkit.md`).
pub const VISIBLE_NONE: &str = "void";

/// CDI kind: the devices that grants describe.
pub const CDI_KIND: &str = "divvy.dev/grant";
