//! Error texts of programs that use CUDA in a pod: PyTorch, TensorFlow, JAX, vLLM, NCCL, and clients of NVML. The texts come from
//! issues that users have filed with these projects. The explanations assume a pod that shares its GPU. Such a pod sees the
//! memory of the whole card, and nothing limits how much of it the pod uses.

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
    "the card had too little free memory for the program. A pod that shares a GPU sees the memory of the whole card, and its use is not limited to its share. Either the program \
     uses more than its pod asked for, or another pod (or a process outside Kubernetes) on the same card uses more than its share",
    "kubectl inspect gpushare -d NODE shows which pods share the card and what each requests; kubectl get events -A | grep GpuMemoryExceeded names pods that use more. \
     Then raise aliyun.com/gpu-mem to what the program needs, or limit the program to its share: torch.cuda.set_per_process_memory_fraction(SHARE) in PyTorch, \
     --gpu-memory-utilization SHARE in vLLM, XLA_PYTHON_CLIENT_MEM_FRACTION=SHARE in JAX, TF_FORCE_GPU_ALLOW_GROWTH=true in TensorFlow. SHARE is \
     ALIYUN_COM_GPU_MEM_CONTAINER / ALIYUN_COM_GPU_MEM_DEV, two environment variables of the container",
);

pub(super) const NO_GPUS: Explanation = of(
    "K13",
    &["No CUDA GPUs are available"],
    "the program finds the driver library but no GPU. Usually its container did not ask for one: only containers with aliyun.com/gpu-mem in their own limits get the \
     pod's GPU. Otherwise CUDA_VISIBLE_DEVICES, in the pod or the program, names a GPU that the container does not have: a container that shares one GPU sees it as number 0",
    "kubectl get pod POD -o yaml | grep -e gpu-mem -e CUDA_VISIBLE_DEVICES; give the container limits: {aliyun.com/gpu-mem: N}, and remove CUDA_VISIBLE_DEVICES or set it to 0; \
     kubectl exec POD -- nvidia-smi -L lists the GPUs of the container",
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
     numbered from 0, independent of their numbers on the node: one GPU, or as many as the annotation divvy.dev/gpus says",
    "remove CUDA_VISIBLE_DEVICES from the pod and the image, and use device 0 and one process; for several GPUs give the pod the annotation divvy.dev/gpus: \"2\"",
);

pub(super) const DRIVER_TOO_OLD: Explanation = of(
    "D04",
    &[
        "CUDA driver version is insufficient for CUDA runtime version",
        "cudaErrorInsufficientDriver",
    ],
    "the CUDA version of the image is newer than the driver of the node; or the container got no driver at all, for which CUDA prints the same error. The second cause is common \
     after a fresh installation, when the node has no CDI spec of the driver",
    "kubectl exec POD -- nvidia-smi: if it works, its \"CUDA Version\" is the newest that this driver supports: upgrade the driver, or use an older image. If \
     there is no nvidia-smi, run divvy cdi generate -o /var/run/cdi/nvidia.yaml on the node, and create the pod again",
);

pub(super) const NO_CODE: Explanation = of(
    "D08",
    &[
        "no kernel image is available for execution",
        "cudaErrorNoKernelImageForDevice",
    ],
    "the program contains no code for this GPU model, which is newer or older than the models that the program was built for",
    "use an image (a build of PyTorch, for example) whose CUDA supports the GPU; or send the pod to a supported model with the annotation divvy.dev/gpu-model: \"A100*\"",
);

pub(super) const NO_START: Explanation = of(
    "D09",
    &[
        "CUDA error: initialization error",
        "Cannot re-initialize CUDA in forked subprocess",
        "cudaErrorInitializationError",
    ],
    "CUDA could not start in this process. Usually the program used CUDA and then forked, and the child can no longer use CUDA (multiprocessing, a DataLoader). Otherwise the \
     device node /dev/nvidia-uvm is missing or is not in the container",
    "in Python, call torch.multiprocessing.set_start_method('spawn'); divvy doctor --only D09 on the node checks the device nodes",
);

pub(super) const UNKNOWN: Explanation = of(
    "D09",
    &["CUDA error: unknown error", "CUDA unknown error"],
    "CUDA could not start and does not say why. Usual causes: a device node (usually /dev/nvidia-uvm) is missing or is not in the container; CUDA_VISIBLE_DEVICES was \
     changed after the program had started to use CUDA; the GPU had an error",
    "kubectl exec POD -- nvidia-smi; on the node, divvy doctor --only D09,D11; set CUDA_VISIBLE_DEVICES before the program starts, or not at all",
);

pub(super) const ASSERTION: Explanation = without_check(
    &["device-side assert triggered", "cudaErrorAssert"],
    "the program's own code on the GPU found a wrong value, usually an index out of range, such as a label that is not below the number of classes. Neither the GPU nor the \
     other pods on it are the cause",
    "run the program with CUDA_LAUNCH_BLOCKING=1 so that the traceback names the line; the same step on the CPU prints a clearer message",
);

pub(super) const ILLEGAL_ACCESS: Explanation = of(
    "D11",
    &[
        "an illegal memory access was encountered",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "cudaErrorIllegalAddress",
    ],
    "the program's own code on the GPU accessed memory outside its allocations: a bug in the program or in a library that it uses. The other pods on the GPU have their own address \
     spaces: they are neither the cause nor affected. In rare cases the card's memory is defective",
    "run the program with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, which names the kernel; divvy doctor --only D11 on the node shows whether the GPU itself has errors",
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
    "the container has no driver libraries. Usually the node has no CDI spec of the driver, for example after a fresh installation: containers then get the GPU's device \
     nodes but no libcuda. Or the driver was upgraded, and the spec names files of the old driver. Or this container does not request aliyun.com/gpu-mem itself",
    "on the node, divvy doctor --only R15,C01 distinguishes the first two causes; divvy cdi generate -o /var/run/cdi/nvidia.yaml fixes both; then create the pod again",
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
    "the program cannot find NVML, a library of the driver. In a pod: usually the node has no CDI spec of the driver, or the container's runtime does not provide the driver. On \
     the node itself: the driver libraries are not installed",
    "on the node, divvy doctor --only D07,R09,R10,R15 shows which; divvy cdi generate -o /var/run/cdi/nvidia.yaml writes the spec; if a container provides the driver, \
     set the agent's driverRoot to /run/nvidia/driver",
);

pub(super) const DEVICES_LOST: Explanation = of(
    "D10",
    &["Failed to initialize NVML: Unknown Error"],
    "a running container has lost its GPU: systemd reloaded its units (systemctl daemon-reload, or an upgrade of any package that has a unit) and removed the devices \
     that it did not know. This affects containers that got their GPU by means other than CDI",
    "delete the pod; its replacement gets the GPU. To prevent this from happening again, provide GPUs by CDI, or run divvy doctor --fix --only D10 on the node",
);

pub(super) const SAME_CARD: Explanation = without_check(
    &["Duplicate GPU detected"],
    "two ranks of one job have the same card, which NCCL rejects. Pods that share GPUs can get the same GPU",
    "run the ranks in one pod with the annotation divvy.dev/gpus: \"2\", which gives the pod that many different GPUs of one node; or request more than half of a card's memory in each rank's pod",
);

pub(super) const NCCL_SYSTEM: Explanation = without_check(
    &[
        "unhandled system error",
        "ncclSystemError",
        "NCCL WARN Error while creating shared memory segment",
        "NCCL WARN Call to posix_fallocate failed",
    ],
    "a system call failed inside NCCL. In a pod, usually /dev/shm is too small (64 MiB by default), or the ranks cannot reach each other over \
     the network",
    "run the program with NCCL_DEBUG=WARN: the line before the error names the call. For /dev/shm: volumes: [{name: shm, emptyDir: {medium: Memory}}], mounted at /dev/shm; for the \
     network: NCCL_SOCKET_IFNAME=eth0",
);

pub(super) const NCCL_CUDA: Explanation = without_check(
    &["unhandled cuda error", "ncclUnhandledCudaError"],
    "a CUDA call failed inside NCCL: usually the card had no memory left (other pods may have taken it), two ranks use one card, or the image's CUDA is newer than the driver",
    "run the program with NCCL_DEBUG=WARN: the line before the error has CUDA's message; divvy doctor --explain knows the common ones",
);

pub(super) const ENDED_BY_DRIVER: Explanation = of(
    "D11",
    // The XIDs that divvy_model::nvidia::xid_is_fatal does not count as fatal.
    &[
        "NVRM: Xid (*): 13,",
        "NVRM: Xid (*): 31,",
        "NVRM: Xid (*): 43,",
        "NVRM: Xid (*): 45,",
        "NVRM: Xid (*): 68,",
        "NVRM: Xid (*): 109,",
    ],
    "a program on the GPU caused an error, and the driver ended its work there. The GPU itself is healthy and continues to serve the other pods",
    "the line names the process (pid=, name=): read the log of its pod; divvy doctor --only D11 on the node shows whether the GPU itself has errors",
);
