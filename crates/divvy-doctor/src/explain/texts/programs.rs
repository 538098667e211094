//! What programs that use CUDA say in a pod: PyTorch, TensorFlow, JAX, vLLM, NCCL, NVML's clients. Texts are those that users have filed with these
//! projects. What is said holds for a pod that shares its GPU: it sees the memory of the whole card, and nothing limits what it takes.

use super::super::Explanation;
use super::{of, without_check};

pub(super) const OUT_OF_MEMORY: Explanation = without_check(
    &[
        "CUDA out of memory",
        "OutOfMemoryError: CUDA",
        "CUDA error: out of memory",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "cudaErrorMemoryAllocation",
        "cudaMalloc failed: out of memory",
        "OOM when allocating tensor",
        "Allocator (GPU_*ran out of memory trying to allocate",
        "Cuda failure*out of memory",
        "NCCL WARN Failed to CUDA calloc",
        "ncclSystemError*out of memory",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate",
        "is less than desired GPU memory utilization",
        "No available memory for the cache blocks",
    ],
    "the card had too little free memory for the program. A pod that shares a GPU sees the memory of the whole card, and nothing keeps it to its share. So either the program \
     takes more than its pod asked for, or another pod (or a process outside Kubernetes) on the same card takes more than its share",
    "kubectl inspect gpushare -d NODE shows which pods share the card and what each asked for; kubectl get events -A | grep GpuMemoryExceeded names pods that use more. \
     Then raise aliyun.com/gpu-mem to what the program needs, or keep the program to its share: torch.cuda.set_per_process_memory_fraction(SHARE) in PyTorch, \
     --gpu-memory-utilization SHARE in vLLM, XLA_PYTHON_CLIENT_MEM_FRACTION=SHARE in JAX, TF_FORCE_GPU_ALLOW_GROWTH=true in TensorFlow. SHARE is \
     ALIYUN_COM_GPU_MEM_CONTAINER / ALIYUN_COM_GPU_MEM_DEV, two variables of the container",
);

pub(super) const NO_GPUS: Explanation = of(
    "K13",
    &["No CUDA GPUs are available"],
    "the program has the driver's library and sees no GPU. Usually its container did not ask for one: only containers with aliyun.com/gpu-mem in their own limits get the \
     pod's GPU. Otherwise CUDA_VISIBLE_DEVICES, in the pod or the program, names a GPU that the container does not have: a container that shares one GPU sees it as number 0",
    "kubectl get pod POD -o yaml | grep -e gpu-mem -e CUDA_VISIBLE_DEVICES; give the container limits: {aliyun.com/gpu-mem: N}, and remove CUDA_VISIBLE_DEVICES or set it to 0; \
     kubectl exec POD -- nvidia-smi -L lists what the container has",
);

pub(super) const WRONG_NUMBER: Explanation = of(
    "K13",
    &[
        "invalid device ordinal",
        "cudaErrorInvalidDevice",
        "CUDA_ERROR_INVALID_DEVICE",
        "AssertionError: Invalid device id",
        "deserialize object on CUDA device",
    ],
    "the program, a launcher (--nproc_per_node) or CUDA_VISIBLE_DEVICES names a GPU that the container does not have. A container sees only the GPUs of its pod, \
     numbered from 0, whatever their numbers on the node are: one, or as many as the annotation divvy.dev/gpus says",
    "remove CUDA_VISIBLE_DEVICES from the pod and the image, and use device 0 and one process; for several GPUs give the pod the annotation divvy.dev/gpus: \"2\"",
);

pub(super) const DRIVER_TOO_OLD: Explanation = of(
    "D04",
    &[
        "CUDA driver version is insufficient for CUDA runtime version",
        "cudaErrorInsufficientDriver",
    ],
    "the CUDA of the image is newer than the driver of the node; or the container got no driver at all, of which CUDA says the same. The latter is usual after a fresh \
     installation, when the node has no CDI spec of the driver",
    "kubectl exec POD -- nvidia-smi: if it works, the \"CUDA Version\" that it prints is the newest that this driver can do: upgrade the driver, or take an older image. If \
     there is no nvidia-smi, type on the node: divvy cdi generate -o /var/run/cdi/nvidia.yaml, and create the pod again",
);

pub(super) const NO_CODE: Explanation = of(
    "D08",
    &[
        "no kernel image is available for execution",
        "cudaErrorNoKernelImageForDevice",
    ],
    "the program has no code for this model of GPU, which is newer or older than the models that it was built for",
    "take an image (a build of PyTorch, for example) whose CUDA knows the GPU; or send the pod to a model that it knows: annotation divvy.dev/gpu-model: \"A100*\"",
);

pub(super) const NO_START: Explanation = of(
    "D09",
    &[
        "CUDA error: initialization error",
        "Cannot re-initialize CUDA in forked subprocess",
        "cudaErrorInitializationError",
    ],
    "CUDA could not start in this process. Usually the program used CUDA and then forked, and the child cannot use CUDA any more (multiprocessing, a DataLoader). Otherwise the \
     device node /dev/nvidia-uvm is missing or was not given to the container",
    "in Python torch.multiprocessing.set_start_method('spawn'); divvy doctor --only D09 on the node looks at the device nodes",
);

pub(super) const UNKNOWN: Explanation = of(
    "D09",
    &["CUDA error: unknown error", "CUDA unknown error"],
    "CUDA could not start, and does not say why. Usual reasons: a device node (usually /dev/nvidia-uvm) is missing or was not given to the container; CUDA_VISIBLE_DEVICES was \
     changed after the program had started to use CUDA; the GPU has had an error since",
    "kubectl exec POD -- nvidia-smi; on the node divvy doctor --only D09,D11; set CUDA_VISIBLE_DEVICES before the program starts, or not at all",
);

pub(super) const ASSERTION: Explanation = without_check(
    &["device-side assert triggered", "cudaErrorAssert"],
    "the program's own code on the GPU found a wrong value, usually an index out of range, such as a label that is not below the number of classes. Neither the GPU nor the \
     other pods on it are the reason",
    "run it with CUDA_LAUNCH_BLOCKING=1, and the traceback names the line; the same step on the CPU gives a clearer message",
);

pub(super) const ILLEGAL_ACCESS: Explanation = of(
    "D11",
    &[
        "an illegal memory access was encountered",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "cudaErrorIllegalAddress",
    ],
    "the program's own code on the GPU touched memory that is not its own: a fault in the program or in a library that it uses. The other pods on the GPU have address spaces \
     of their own: they are not the reason, and not harmed. Seldom the card's memory is defective",
    "run it with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, which names the kernel; divvy doctor --only D11 on the node says whether the GPU itself has errors",
);

pub(super) const NO_DRIVER_LIBRARY: Explanation = of(
    "R15",
    &[
        "libcuda.so.1: cannot open shared object file",
        "libcuda.so: cannot open shared object file",
        "libcuda.so cannot found",
        "Found no NVIDIA driver on your system",
        "Could not find cuda drivers on your machine",
    ],
    "the container has none of the driver's libraries. Usually the node has no CDI spec of the driver, as after a fresh installation: containers then get the GPU's device \
     nodes and no libcuda. Or the driver was upgraded, and the spec names files of the old one. Or this container does not ask for aliyun.com/gpu-mem itself",
    "on the node divvy doctor --only R15,C01 tells the first two apart; divvy cdi generate -o /var/run/cdi/nvidia.yaml cures both; then create the pod again",
);

pub(super) const NO_NVML: Explanation = of(
    "D07",
    &[
        "could not load NVML library",
        "NVML Shared Library Not Found",
        "NVMLError_LibraryNotFound",
        "libnvidia-ml.so.1: cannot open shared object file",
        "libnvidia-ml.so: cannot open shared object file",
        "nvidia-container-cli: initialization error: load library failed",
        "ERROR_LIBRARY_NOT_FOUND",
    ],
    "NVML, a library of the driver, is not where the program looks. In a pod: usually the node has no CDI spec of the driver, or the container's runtime gives it no driver. On \
     the node itself: the driver's libraries are not installed",
    "on the node divvy doctor --only D07,R09,R10,R15 says which; divvy cdi generate -o /var/run/cdi/nvidia.yaml makes the spec; where the driver is in a container of its own, \
     give the agent driverRoot /run/nvidia/driver",
);

pub(super) const DEVICES_LOST: Explanation = of(
    "D10",
    &["Failed to initialize NVML: Unknown Error"],
    "a running container has lost its GPU: systemd loaded its units again (systemctl daemon-reload, or an upgrade of any package that has a unit) and took away the devices \
     that it did not know of. This concerns containers that got their GPU by other means than CDI",
    "delete the pod, and a new one has the GPU. So that it does not happen again: give GPUs by CDI; or on the node divvy doctor --fix --only D10",
);

pub(super) const SAME_CARD: Explanation = without_check(
    &["Duplicate GPU detected"],
    "two ranks of one job have the same card, which NCCL refuses. Pods that share GPUs may well be given the same one",
    "run the ranks in one pod with the annotation divvy.dev/gpus: \"2\", which gives it that many different GPUs of one node; or let each rank's pod ask for more than half of a card's memory",
);

pub(super) const NCCL_SYSTEM: Explanation = without_check(
    &[
        "unhandled system error",
        "ncclSystemError",
        "NCCL WARN Error while creating shared memory segment",
        "NCCL WARN Call to posix_fallocate failed",
    ],
    "a call to the operating system failed inside NCCL. In a pod usually /dev/shm is too small (64 MiB, unless the pod says otherwise), or the ranks do not reach each other over \
     the network",
    "run it with NCCL_DEBUG=WARN: the line before the error names the call. For /dev/shm: volumes: [{name: shm, emptyDir: {medium: Memory}}], mounted at /dev/shm; for the network: \
     NCCL_SOCKET_IFNAME=eth0",
);

pub(super) const NCCL_CUDA: Explanation = without_check(
    &["unhandled cuda error", "ncclUnhandledCudaError"],
    "a call of CUDA failed inside NCCL: usually the card had no memory left for it (other pods may have taken it), two ranks use one card, or the image's CUDA is newer than the driver",
    "run it with NCCL_DEBUG=WARN: the line before the error has CUDA's own words; divvy doctor --explain knows the usual ones",
);

pub(super) const ENDED_BY_DRIVER: Explanation = of(
    "D11",
    // As divvy_model::xid_is_fatal has them.
    &[
        "NVRM: Xid (*): 13,",
        "NVRM: Xid (*): 31,",
        "NVRM: Xid (*): 43,",
        "NVRM: Xid (*): 45,",
        "NVRM: Xid (*): 68,",
        "NVRM: Xid (*): 109,",
    ],
    "a program on the GPU made an error, and the driver ended its work there. The GPU itself is well, and goes on to serve the other pods",
    "the line has the process (pid=, name=): look into the log of its pod; divvy doctor --only D11 on the node says whether the GPU has errors of its own",
);
