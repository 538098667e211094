//! Names that other programs depend on: resources, annotations, variables.

/// Extended resource of shared GPU memory, in units (gpushare).
pub const GPU_MEM: &str = "aliyun.com/gpu-mem";
/// Extended resource that counts a node's GPUs (gpushare). Asking for it has no effect.
pub const GPU_COUNT: &str = "aliyun.com/gpu-count";

/// Extended resource of whole GPUs, which NVIDIA's device plugin offers.
pub const WHOLE_GPU: &str = "nvidia.com/gpu";
/// Node annotation: what the agent found ([`crate::Inventory`]).
pub const INVENTORY: &str = "divvy.dev/inventory";
/// Pod annotation, carried by the Binding: what the extender decided ([`crate::Allocation`]).
pub const ALLOCATION: &str = "divvy.dev/allocation";

/// What all annotations of ours begin with.
pub const PREFIX: &str = "divvy.dev/";
/// Pod annotation: over how many GPUs its memory is spread evenly.
pub const GPUS: &str = "divvy.dev/gpus";
/// Pod annotation: products of GPUs that it takes or does not take.
pub const GPU_MODEL: &str = "divvy.dev/gpu-model";
/// Pod annotation: how much memory a GPU must have in all.
pub const GPU_MEMORY: &str = "divvy.dev/gpu-memory";
/// Pod annotation: which of the GPUs that fit come first.
pub const GPU_PREFER: &str = "divvy.dev/gpu-prefer";
/// Pod annotation: GPUs by name.
pub const GPU_UUID: &str = "divvy.dev/gpu-uuid";
/// Pod annotation: share of compute. Reserved.
pub const GPU_CORES: &str = "divvy.dev/gpu-cores";
/// What of ours a user may write on a pod.
pub const POD_KEYS: [&str; 5] = [GPU_MODEL, GPU_MEMORY, GPU_PREFER, GPU_UUID, GPUS];
/// Annotation of a pod that only asks whether the scheduler calls the extender (`divvy scheduler-config --check`). Its value is a word
/// that comes back in the refusal.
pub const SCHEDULER_CHECK: &str = "divvy.dev/scheduler-check";

/// gpushare: decimal index of the pod's GPU. Annotation and container variable.
pub const ALIYUN_IDX: &str = "ALIYUN_COM_GPU_MEM_IDX";
/// gpushare: units of one GPU. Annotation and container variable.
pub const ALIYUN_DEV: &str = "ALIYUN_COM_GPU_MEM_DEV";
/// gpushare: annotation: the pod's units; container variable: the container's units.
pub const ALIYUN_POD: &str = "ALIYUN_COM_GPU_MEM_POD";
/// gpushare: container variable, the container's units.
pub const ALIYUN_CONTAINER: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";
/// gpushare: annotation `"false"` at bind, `"true"` once the old plugin allocated.
pub const ALIYUN_ASSIGNED: &str = "ALIYUN_COM_GPU_MEM_ASSIGNED";
/// gpushare: annotation, Unix time of the bind in nanoseconds.
pub const ALIYUN_ASSUME_TIME: &str = "ALIYUN_COM_GPU_MEM_ASSUME_TIME";
/// gpushare 2.0: annotation `{"<container>":{"<gpu>":<units>}}`; `kubectl inspect gpushare` reads it.
pub const GPUSHARE_ALLOCATION: &str = "scheduler.framework.gpushare.allocation";

/// The longest name of a node or pod, in bytes (RFC 1123 subdomain, apimachinery `validation.go`).
pub const MOST_NAME_BYTES: usize = 253;

/// Whether a text can be the name of an object, and so a part of a path: letters, digits, `-` and `.` (RFC 1123 subdomain), not `..`.
pub fn is_name(text: &str) -> bool {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    (1..=MOST_NAME_BYTES).contains(&text.len()) && text.bytes().all(legal) && !text.starts_with('.')
}

/// Variable by which NVIDIA's runtime chooses GPUs; a grant sets it to [`VISIBLE_NONE`].
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// `void`: NVIDIA's runtime leaves the container alone (research/container-toolkit.md).
pub const VISIBLE_NONE: &str = "void";

/// CDI kind of a grant (DESIGN.md section 15).
pub const CDI_KIND: &str = "divvy.dev/grant";
