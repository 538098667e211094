//! The table of error texts. They come from issues that users have filed with the projects of NVIDIA, AMD, Intel, and gpushare,
//! and from the sources of these projects.

mod programs;

use super::Explanation;

const fn of(check: &'static str, texts: &'static [&'static str], means: &'static str, fix: &'static str) -> Explanation {
    Explanation {
        check: Some(check),
        ..without_check(texts, means, fix)
    }
}

/// Build a row for which no check can detect the cause.
const fn without_check(texts: &'static [&'static str], means: &'static str, fix: &'static str) -> Explanation {
    Explanation {
        check: None,
        texts,
        means,
        fix,
    }
}

/// All explanations. More specific texts come first, because the first matching explanation is used.
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
        "the driver libraries were upgraded, often by unattended-upgrades, while the old kernel module stayed loaded: running programs continue, but no new program can use a GPU of this node",
        "reboot the node; then apt-mark hold 'nvidia-*' 'libnvidia-*' to prevent this from happening again",
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
        "the driver's kernel module is not loaded: it is not installed, was not built for this kernel, or was rejected",
        "modprobe nvidia; dmesg | grep -i nvidia shows why it fails; dkms status shows for which kernels the module was built (install linux-headers-$(uname -r))",
    ),
    of(
        "D02",
        &[
            "Key was rejected by service",
            "Required key not available",
            "module verification failed: signature",
        ],
        "Secure Boot rejects the kernel module, because no key that the machine trusts has signed it",
        "mokutil --import /var/lib/dkms/mok.pub, then reboot and enroll the key; or switch Secure Boot off; or install the distribution's signed module",
    ),
    of(
        "D06",
        &[
            "Nouveau kernel driver is currently in use",
            "No devices were found",
            "nouveau*is already bound",
        ],
        "the driver is loaded but has no GPU: usually nouveau drives it, or the card does not start (power, firmware)",
        "lsmod | grep nouveau; if it is loaded, blacklist nouveau, rebuild the initramfs, and reboot; dmesg | grep NVRM shows other causes",
    ),
    of(
        "D04",
        &[
            "unsatisfied condition: cuda>=",
            "nvidia-container-cli: requirement error",
            "forward compatibility was attempted on non supported HW",
        ],
        "the image needs a newer driver than the machine has",
        "upgrade the driver, or use an image with an older CUDA; nvidia-smi shows the newest CUDA that the driver supports",
    ),
    of(
        "D11",
        &["system not yet initialized", "CUDA_ERROR_SYSTEM_NOT_READY"],
        "the machine has NVSwitches, but its fabric manager is not running, and CUDA waits for it",
        "systemctl enable --now nvidia-fabricmanager (exactly the version of the driver); nvidia-smi -q | grep -A2 Fabric shows its state",
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
        "a GPU stopped answering (the XID says why): pods on this GPU fail until it is reset",
        "kubectl drain NODE --ignore-daemonsets; nvidia-smi --gpu-reset -i INDEX, or reboot; look the XID up in NVIDIA's list",
    ),
    of(
        "D12",
        &[
            "all CUDA-capable devices are busy or unavailable",
            "CUDA-capable device(s) is/are busy or unavailable",
            "cudaErrorDevicesUnavailable",
        ],
        "usually the GPU is in an exclusive compute mode and another process uses it; otherwise the GPU had an error",
        "on the node, divvy doctor --only D11,D12 shows which; nvidia-smi -c 0 ends an exclusive mode",
    ),
    of(
        "D14",
        &[
            "MIG mode is in pending",
            "MIG-INVALID",
            "MIG devices*in use by another client",
            "In use by another client",
        ],
        "the MIG mode was changed but the GPU was not reset, or a program uses the GPU that should be changed",
        "stop the programs that use the GPU (kubectl drain NODE; systemctl stop dcgm nvidia-persistenced), then nvidia-smi --gpu-reset -i INDEX",
    ),
    of(
        "D16",
        &["Partitions of different styles"],
        "the AMD GPUs of one node are partitioned in different ways, but the plugin has one resource for all of them",
        "partition all GPUs the same way, or start AMD's plugin with -resource_naming_strategy=mixed",
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
        "a device plugin runs on a node without a GPU, or cannot see the GPU",
        "run divvy doctor on that node; if the node has no GPU, remove the label that the DaemonSet selects",
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
        "NVIDIA's device plugin, or the pod, was started by a runtime that does not put the driver into containers",
        "set runtimeClassName: nvidia in the pod; or divvy configure containerd --set-default --restart; or use CDI. divvy doctor --only R09,R10,R15 on the node shows what is missing",
    ),
    of(
        "R07",
        &[
            "did you set the docker default runtime to",
            "unknown or invalid runtime name: nvidia",
            "Unknown runtime specified nvidia",
            "unable to configure the Docker daemon with file",
        ],
        "Docker has no runtime for GPUs, or was not restarted after it was configured",
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
        "docker run --gpus was used with runc, but NVIDIA's config.toml sets a mode in which a runtime provides the GPUs",
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
        "a pod selects the runtime handler nvidia, but the container engine has none of that name: it is not configured, is in the wrong file, or the engine was not restarted",
        "divvy doctor --only R08,R09,R16 on the node; divvy configure containerd --restart (or crio, k3s, …)",
    ),
    of(
        "R14",
        &["RuntimeClass nvidia not found", "runtimeclass.node.k8s.io nvidia not found"],
        "a pod names a RuntimeClass that does not exist in the cluster",
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
        "the engine is configured to use nvidia-container-runtime, which is not installed",
        "install nvidia-container-toolkit or divvy-runtime, or remove the runtime from the engine's configuration",
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
        "the toolkit does not support cgroup v2, or has no permission to change device rules (rootless)",
        "upgrade nvidia-container-toolkit, or provide devices by CDI; set no-cgroups=true only for rootless engines",
    ),
    of(
        "R11",
        &[
            "no corresponding runtime configured",
            "unknown service runtime.v1.RuntimeService",
            "unknown service runtime.v1alpha2.RuntimeService",
        ],
        "containerd's CRI plugin is not loaded: its default runtime is not defined, the plugin is in disabled_plugins, or its configuration is wrong",
        "divvy doctor --only R11,R12,R08 or journalctl -u containerd | grep -i cri shows which; correct it, then systemctl restart containerd",
    ),
    of(
        "R13",
        &[
            "expected cgroupsPath to be of format slice:prefix:name",
            "cgroup driver: * is different from docker cgroup driver",
        ],
        "the kubelet and the container runtime use different cgroup drivers",
        "if the kubelet's cgroupDriver is systemd, set SystemdCgroup = true in the options of runc and nvidia; then systemctl restart containerd kubelet",
    ),
    of(
        "C01",
        &[
            "libcuda.so*no such file or directory",
            "no such file or directory*libcuda.so",
            "libnvidia-*.so*no such file or directory",
            "/dev/nvidia*no such file or directory",
        ],
        "a CDI spec names files of a driver that was upgraded later, or device nodes that do not exist",
        "divvy cdi generate -o /var/run/cdi/nvidia.yaml (or: divvy doctor --fix --only C01); divvy doctor --only D09 checks the device nodes",
    ),
    of(
        "C02",
        &[
            "conflicting device",
            "failed to parse CDI Spec",
            "invalid CDI Spec",
            "failed to load CDI Spec",
        ],
        "the engine rejects a CDI spec, or two specs define the same device",
        "divvy cdi validate /etc/cdi /var/run/cdi",
    ),
    of(
        "R15",
        &[
            "unresolvable CDI devices",
            "CDI device injection failed",
            "CDI devices requested*not supported",
        ],
        "a container was assigned a CDI device that no spec on the node defines, or CDI is switched off in the engine",
        "divvy cdi list shows the CDI devices of the node; divvy cdi generate -o /var/run/cdi/nvidia.yaml writes a spec; divvy doctor --only R15 checks the engine",
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
        "a device plugin cannot reach the kubelet: the kubelet uses another directory (k0s, --root-dir), or is not running",
        "divvy doctor --only K02 shows which; set --kubelet-dir on the agent",
    ),
    of(
        "K06",
        &["received message larger than max"],
        "a device plugin sends more device ids than fit into one kubelet message (4 MiB): one id per MiB of GPU memory is too many",
        "use a larger unit on all agents and the extender: --memory-unit GiB (or 256MiB)",
    ),
    of(
        "K10",
        &[
            "no kind KubeSchedulerConfiguration is registered for version",
            "unknown flag: --policy-config-file",
            "no kind Policy is registered",
        ],
        "kube-scheduler's configuration has an apiVersion that this Kubernetes release no longer supports",
        "set apiVersion: kubescheduler.config.k8s.io/v1 in the file that --config names (divvy scheduler-config --merge FILE prints the complete file)",
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
        "kube-scheduler cannot reach the extender, or the pod was bound without the extender and has no GPU",
        "divvy doctor --cluster --only K12; divvy scheduler-config --check",
    ),
    of(
        "K16",
        &["UnexpectedAdmissionError", "requested number of devices unavailable"],
        "the kubelet rejected the pod at its start, usually because the device plugin had not registered again after a restart; the pod stays Failed",
        "divvy doctor --cluster --only K16 names these pods and prints the command that deletes only them",
    ),
    of(
        "K09",
        &["had untolerated taint", "had taint*that the pod didnt tolerate"],
        "the nodes with GPUs have a taint that the pod does not tolerate",
        "add a toleration to the pod, or to the plugin's DaemonSet; divvy doctor --cluster --only K09 names the taint",
    ),
    of(
        "K03",
        &[
            "Insufficient nvidia.com/",
            "Insufficient aliyun.com/",
            "Insufficient amd.com/",
            "Insufficient gpu.intel.com/",
        ],
        "usually other pods hold the GPU memory, and no node has as much free as the pod requests; otherwise no node offers that much, or the device plugin of the node that does is not running",
        "divvy why POD shows how much GPU memory is free on each node; divvy doctor --cluster --only K03,K05 shows where a device plugin is not running",
    ),
    of(
        "K08",
        &["didnt match node selector", "didnt match Pods node affinity/selector"],
        "no node has the label that the pod selects; gpushare's extender selects node-role.kubernetes.io/master, which current clusters do not have",
        "kubectl get nodes --show-labels; divvy doctor --cluster --only K07,K08 names the label",
    ),
    of(
        "K13",
        &[
            "must be equal to*gpu*limit",
            "Limit must be set for non overcommitable resources",
        ],
        "GPUs are requested in limits; requests must be equal to limits or absent",
        "write the resource only in limits, as an integer",
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
        "the program finds the driver but cannot open a GPU: a device node is missing (most often nvidia-uvm) or is not in the container",
        "run divvy doctor --only D09,D10 on the node",
    ),
];
