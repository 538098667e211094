//! The table. Sources of the texts: research/vendors-ux.md section 6, research/container-toolkit.md section 7.

mod programs;

use super::Explanation;

const fn of(check: &'static str, texts: &'static [&'static str], means: &'static str, fix: &'static str) -> Explanation {
    Explanation {
        check: Some(check),
        ..without_check(texts, means, fix)
    }
}

/// No check can tell the cause.
const fn without_check(texts: &'static [&'static str], means: &'static str, fix: &'static str) -> Explanation {
    Explanation {
        check: None,
        texts,
        means,
        fix,
    }
}

/// What is more special comes first: a line is explained once.
pub const ALL: &[Explanation] = &[
    programs::OUT_OF_MEMORY,
    programs::NO_GPUS,
    programs::WRONG_NUMBER,
    programs::DRIVER_TOO_OLD,
    programs::NO_CODE,
    programs::NO_START,
    programs::UNKNOWN,
    programs::ASSERTION,
    programs::ILLEGAL_ACCESS,
    programs::NO_DRIVER_LIBRARY,
    programs::NO_NVML,
    programs::DEVICES_LOST,
    programs::SAME_CARD,
    programs::NCCL_SYSTEM,
    programs::NCCL_CUDA,
    programs::ENDED_BY_DRIVER,
    of(
        "D05",
        &[
            "Driver/library version mismatch",
            "API mismatch: the client has the version",
            "nvml error: lib rm version mismatch",
            "RmInitAdapter failed*version mismatch",
        ],
        "the driver's libraries were upgraded, often by unattended-upgrades, while the old kernel module stayed loaded: what runs goes on, and no new program can use a GPU of this node",
        "reboot the node; then apt-mark hold 'nvidia-*' 'libnvidia-*' so that it does not happen again",
    ),
    of(
        "D02",
        &[
            "driver not loaded",
            "driver/library not loaded",
            "ERROR_DRIVER_NOT_LOADED",
            "couldnt communicate with the NVIDIA driver",
            "nvidia-container-cli: initialization error: driver error",
            "Unable to load the kernel module nvidia.ko",
            "Unable to load the nvidia-drm kernel module",
            "modprobe: FATAL: Module nvidia not found",
            "Unable to find the kernel source tree",
            "modprobe: ERROR: could not insert nvidia",
        ],
        "the kernel module of the driver is not loaded: it was not installed, not built for this kernel, or refused",
        "modprobe nvidia; dmesg | grep -i nvidia; dkms status shows for which kernels it was built (install linux-headers-$(uname -r))",
    ),
    of(
        "D02",
        &[
            "Key was rejected by service",
            "Required key not available",
            "module verification failed: signature",
        ],
        "Secure Boot refuses a kernel module that is not signed by a key that the machine knows",
        "mokutil --import /var/lib/dkms/mok.pub, reboot and enroll the key; or switch Secure Boot off; or install the distribution's signed module",
    ),
    of(
        "D06",
        &[
            "Nouveau kernel driver is currently in use",
            "No devices were found",
            "nouveau*is already bound",
        ],
        "the driver runs and has no GPU: usually nouveau has it, or the card does not start (power, firmware)",
        "lsmod | grep nouveau; blacklist it, rebuild the initramfs, reboot; dmesg | grep NVRM tells the other causes",
    ),
    of(
        "D04",
        &[
            "unsatisfied condition: cuda>=",
            "nvidia-container-cli: requirement error",
            "forward compatibility was attempted on non supported HW",
        ],
        "the image needs a newer driver than the machine has",
        "upgrade the driver, or take an image of an older CUDA; nvidia-smi shows the newest CUDA of a driver",
    ),
    of(
        "D11",
        &["system not yet initialized", "CUDA_ERROR_SYSTEM_NOT_READY"],
        "the machine has NVSwitches and its fabric manager does not run: CUDA waits for it",
        "systemctl enable --now nvidia-fabricmanager (of the driver's very version); nvidia-smi -q | grep -A2 Fabric shows its state",
    ),
    of(
        "D11",
        &[
            "GPU is lost",
            "has fallen off the bus",
            "NVRM: Xid (",
            "ERROR_GPU_IS_LOST",
            "Unable to determine the device handle for GPU",
        ],
        "a GPU stopped answering (an XID says why): pods on it fail until it is reset",
        "kubectl drain NODE --ignore-daemonsets; nvidia-smi --gpu-reset -i INDEX, or reboot; look the XID up in NVIDIA's list",
    ),
    of(
        "D12",
        &[
            "all CUDA-capable devices are busy or unavailable",
            "CUDA-capable device(s) is/are busy or unavailable",
            "cudaErrorDevicesUnavailable",
        ],
        "usually the GPU is in an exclusive compute mode, and another process has it; otherwise the GPU has had an error",
        "on the node divvy doctor --only D11,D12 tells which; nvidia-smi -c 0 ends an exclusive mode",
    ),
    of(
        "D14",
        &[
            "MIG mode is in pending",
            "MIG-INVALID",
            "MIG devices*in use by another client",
            "In use by another client",
        ],
        "MIG was switched and the GPU not reset since, or somebody uses the GPU that is to be changed",
        "stop what uses the GPU (kubectl drain NODE; systemctl stop dcgm nvidia-persistenced), then nvidia-smi --gpu-reset -i INDEX",
    ),
    of(
        "D16",
        &["Partitions of different styles"],
        "AMD GPUs of one node are partitioned in different ways, and the plugin has one resource for all",
        "partition all alike, or start AMD's plugin with -resource_naming_strategy=mixed",
    ),
    of(
        "D15",
        &[
            "/dev/kfd: no such file or directory",
            "Unable to open /dev/kfd",
            "ROCk module is NOT loaded",
        ],
        "AMD's compute driver is not loaded",
        "modprobe amdgpu; divvy doctor --only D15,D09",
    ),
    of(
        "D01",
        &["No devices found. Waiting indefinitely"],
        "a device plugin runs on a node without a GPU, or cannot see it",
        "divvy doctor on that node; if it has no GPU, take the label away by which the DaemonSet chose it",
    ),
    of(
        "R10",
        &[
            "Incompatible strategy detected",
            "did you configure the NVIDIA Container Toolkit",
            "Detected non-NVML platform",
            "No valid resources detected, creating a null CDI handler",
            "nvidia-smi*executable file not found in $PATH",
        ],
        "NVIDIA's device plugin, or the pod, was started by a runtime that puts no driver into it",
        "runtimeClassName: nvidia in the pod; or divvy configure containerd --set-default --restart; or CDI. divvy doctor --only R09,R10,R15 on the node says what is missing",
    ),
    of(
        "R07",
        &[
            "did you set the docker default runtime to",
            "unknown or invalid runtime name: nvidia",
            "Unknown runtime specified nvidia",
            "unable to configure the Docker daemon with file",
        ],
        "Docker does not know a runtime for GPUs, or was not restarted since it was told",
        "divvy doctor --only R06,R07; divvy configure docker --cdi --restart",
    ),
    of(
        "R07",
        &["could not select device driver*capabilities: [[gpu"],
        "docker run --gpus: dockerd found no program nvidia-container-runtime-hook in its PATH when it started",
        "sudo divvy configure docker --set-default; sudo ln -s /usr/local/bin/divvy-runtime /usr/local/bin/nvidia-container-runtime-hook; sudo systemctl restart docker (or docker run --device nvidia.com/gpu=all, by CDI, from Docker 25 on)",
    ),
    of(
        "R07",
        &["invoking the NVIDIA Container Runtime Hook directly"],
        "docker run --gpus in front of runc, where NVIDIA's config.toml sets a mode in which the GPUs come from a runtime",
        "sudo divvy configure docker --set-default --restart; or docker run --runtime nvidia --gpus all",
    ),
    of(
        "R06",
        &["unknown flag: --gpus"],
        "this Docker is older than 19.03",
        "upgrade Docker",
    ),
    of(
        "R09",
        &[
            "no runtime for nvidia is configured",
            "RuntimeHandler nvidia not supported",
            "failed to find runtime handler nvidia",
        ],
        "a pod asks for the runtime handler nvidia, and the container engine has none of that name: not configured, in the wrong file, or not restarted",
        "divvy doctor --only R08,R09,R16 on the node; divvy configure containerd --restart (or crio, k3s, …)",
    ),
    of(
        "R14",
        &["RuntimeClass nvidia not found", "runtimeclass.node.k8s.io nvidia not found"],
        "a pod asks for a RuntimeClass that the cluster has not",
        "divvy configure --runtime-class | kubectl apply -f -",
    ),
    of(
        "R03",
        &[
            "nvidia-container-runtime: executable file not found",
            "nvidia-container-runtime: not found",
            "nvidia-container-runtime: no such file or directory",
            "nvidia-container-runtime-hook: no such file",
        ],
        "the engine is told to use nvidia-container-runtime, and it is not installed",
        "install nvidia-container-toolkit or divvy-runtime, or take the runtime out of the engine's configuration",
    ),
    of(
        "R03",
        &["ldcache error: open failed: /sbin/ldconfig.real"],
        "the toolkit's config.toml names Ubuntu's ldconfig on another distribution",
        "in /etc/nvidia-container-runtime/config.toml: ldconfig = \"@/sbin/ldconfig\"",
    ),
    of(
        "R04",
        &["bpf_prog_query(BPF_CGROUP_DEVICE) failed"],
        "the toolkit is older than cgroup v2, or runs without the right to change device rules (rootless)",
        "upgrade nvidia-container-toolkit, or give devices by CDI; no-cgroups=true only for rootless engines",
    ),
    of(
        "R11",
        &[
            "no corresponding runtime configured",
            "unknown service runtime.v1.RuntimeService",
            "unknown service runtime.v1alpha2.RuntimeService",
        ],
        "containerd's CRI plugin is not loaded: its default runtime is not defined, it is among disabled_plugins, or its configuration is wrong",
        "divvy doctor --only R11,R12,R08; journalctl -u containerd | grep -i cri says which; then systemctl restart containerd",
    ),
    of(
        "R13",
        &[
            "expected cgroupsPath to be of format slice:prefix:name",
            "cgroup driver: * is different from docker cgroup driver",
        ],
        "kubelet and container runtime use different cgroup drivers",
        "SystemdCgroup = true in the options of runc and of nvidia where the kubelet's cgroupDriver is systemd; then systemctl restart containerd kubelet",
    ),
    of(
        "C01",
        &[
            "libcuda.so*no such file or directory",
            "no such file or directory*libcuda.so",
            "libnvidia-*.so*no such file or directory",
            "/dev/nvidia*no such file or directory",
        ],
        "a CDI spec names files of a driver that was upgraded since, or device nodes that are not there",
        "divvy cdi generate -o /var/run/cdi/nvidia.yaml (divvy doctor --fix --only C01 does so); divvy doctor --only D09",
    ),
    of(
        "C02",
        &[
            "conflicting device",
            "failed to parse CDI Spec",
            "invalid CDI Spec",
            "failed to load CDI Spec",
        ],
        "a CDI spec is refused by the engine, or two have the same device",
        "divvy cdi validate /etc/cdi /var/run/cdi",
    ),
    of(
        "R15",
        &[
            "unresolvable CDI devices",
            "CDI device injection failed",
            "CDI devices requested*not supported",
        ],
        "a container was promised a CDI device that no spec of the node has, or the engine does no CDI",
        "divvy cdi list shows what is there; divvy cdi generate -o /var/run/cdi/nvidia.yaml makes it; divvy doctor --only R15",
    ),
    of(
        "R02",
        &["bridge-nf-call-iptables: no such file or directory", "overlay*no such device"],
        "the kernel modules overlay or br_netfilter are not loaded",
        "modprobe -a overlay br_netfilter; printf 'overlay\\nbr_netfilter\\n' > /etc/modules-load.d/k8s.conf",
    ),
    of(
        "K02",
        &[
            "kubelet.sock: connect",
            "kubelet.sock: no such file",
            "Could not contact Kubelet",
            "Could not register device plugin",
        ],
        "a device plugin does not reach the kubelet: another folder (k0s, --root-dir), or the kubelet does not run",
        "divvy doctor --only K02; give the agent --kubelet-dir",
    ),
    of(
        "K06",
        &["received message larger than max"],
        "a device plugin sends more device ids than the kubelet takes in one message (4 MiB): one id for each MiB is too many",
        "a coarser unit on agents and extender: --memory-unit GiB (or 256MiB)",
    ),
    of(
        "K10",
        &[
            "no kind KubeSchedulerConfiguration is registered for version",
            "unknown flag: --policy-config-file",
            "no kind Policy is registered",
        ],
        "kube-scheduler's configuration is of a version that this Kubernetes has no more",
        "apiVersion: kubescheduler.config.k8s.io/v1 in the file that --config names (divvy scheduler-config --merge FILE prints it whole)",
    ),
    of(
        "K12",
        &[
            "no-gpu-has-*-to-run",
            "unknown device id",
            "gpushare-scheduler/*connection refused",
            "failed to run extender",
            "extender*connection refused",
        ],
        "kube-scheduler does not reach the extender, or nobody chose a GPU for the pod",
        "divvy doctor --cluster --only K12; divvy scheduler-config --check",
    ),
    of(
        "K16",
        &["UnexpectedAdmissionError", "requested number of devices unavailable"],
        "the kubelet refused the pod when it was to start, usually since the device plugin had not registered again after a restart; such a pod stays Failed for good",
        "divvy doctor --cluster --only K16 names these pods and prints the command that deletes them, and no others",
    ),
    of(
        "K09",
        &["had untolerated taint", "had taint*that the pod didnt tolerate"],
        "the nodes with GPUs have a taint that the pod does not tolerate",
        "a toleration in the pod, or in the plugin's DaemonSet; divvy doctor --cluster --only K09",
    ),
    of(
        "K03",
        &[
            "Insufficient nvidia.com/",
            "Insufficient aliyun.com/",
            "Insufficient amd.com/",
            "Insufficient gpu.intel.com/",
        ],
        "usually other pods hold it: no node has as much free as the pod wants; or no node offers so much at all, or the device plugin of the node that does is away",
        "divvy why POD says how much shared memory is free, and where; divvy doctor --cluster --only K03,K05 says where a device plugin is away",
    ),
    of(
        "K08",
        &["didnt match node selector", "didnt match Pods node affinity/selector"],
        "no node has the label that the pod wants; a gpushare extender wants node-role.kubernetes.io/master, which no new cluster has",
        "kubectl get nodes --show-labels; divvy doctor --cluster --only K07,K08",
    ),
    of(
        "K13",
        &[
            "must be equal to*gpu*limit",
            "Limit must be set for non overcommitable resources",
        ],
        "GPUs are asked for in limits; requests may only say the same",
        "write the resource in limits alone, as an integer",
    ),
    of(
        "D09",
        &[
            "no CUDA-capable device is detected",
            "CUDA_ERROR_NO_DEVICE",
            "CUDA error 999",
            "CUDA_ERROR_UNKNOWN",
            "error 999",
        ],
        "the program sees the driver and cannot open a GPU: a device node is missing (nvidia-uvm, most often) or was not given to the container",
        "divvy doctor --only D09,D10 on the node",
    ),
];
