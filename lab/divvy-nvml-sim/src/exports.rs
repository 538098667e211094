//! Which functions the library of a driver's branch has.

use std::env;

use divvy_gpu_sim::{branch, exports};
use divvy_model::machine::Machines;

use crate::sim::complain;

/// The functions that some drivers lack, by the first branch that has them. `cargo xtask real-driver` compares them with NVIDIA's libraries of 340 to 555. From
/// 560 on they are from nvml.h (NVIDIA's packages nvidia-nvml-dev for Python), and those of 510 from the list of changes in its documentation.
const SINCE: [(u32, &[&str]); 10] = [
    (
        390,
        &[
            "nvmlDeviceGetCudaComputeCapability",
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetGraphicsRunningProcesses",
            "nvmlDeviceGetMPSComputeRunningProcesses",
            "nvmlDeviceGetNvLinkRemotePciInfo_v2",
            "nvmlDeviceGetNvLinkState",
            "nvmlDeviceGetPciInfo_v3",
            "nvmlDeviceGetPcieReplayCounter",
            "nvmlDeviceGetPcieThroughput",
            "nvmlDeviceGetProcessUtilization",
            "nvmlDeviceGetTopologyCommonAncestor",
            "nvmlDeviceGetTotalEnergyConsumption",
            "nvmlInitWithFlags",
            "nvmlSystemGetCudaDriverVersion",
        ],
    ),
    (418, &["nvmlDeviceGetFanSpeed_v2", "nvmlSystemGetCudaDriverVersion_v2"]),
    (
        450,
        &[
            "nvmlComputeInstanceGetInfo_v2",
            "nvmlDeviceGetArchitecture",
            "nvmlDeviceGetAttributes",
            "nvmlDeviceGetAttributes_v2",
            "nvmlDeviceGetComputeInstanceId",
            "nvmlDeviceGetComputeRunningProcesses_v2",
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
            "nvmlDeviceGetGpuInstanceById",
            "nvmlDeviceGetGpuInstanceId",
            "nvmlDeviceGetGpuInstanceProfileInfo",
            "nvmlDeviceGetGraphicsRunningProcesses_v2",
            "nvmlDeviceGetMaxMigDeviceCount",
            "nvmlDeviceGetMemoryAffinity",
            "nvmlDeviceGetMigDeviceHandleByIndex",
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetRemappedRows",
            "nvmlDeviceIsMigDeviceHandle",
            "nvmlEventSetWait_v2",
            "nvmlGpuInstanceGetComputeInstanceById",
            "nvmlGpuInstanceGetComputeInstanceProfileInfo",
            "nvmlGpuInstanceGetInfo",
        ],
    ),
    (470, &["nvmlDeviceGetMPSComputeRunningProcesses_v2"]),
    (
        510,
        &[
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
            "nvmlDeviceGetMemoryBusWidth",
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetNumGpuCores",
        ],
    ),
    (
        525,
        &[
            "nvmlDeviceGetGpuFabricInfo",
            "nvmlGpmMetricsGet",
            "nvmlGpmMigSampleGet",
            "nvmlGpmQueryDeviceSupport",
            "nvmlGpmSampleAlloc",
            "nvmlGpmSampleFree",
            "nvmlGpmSampleGet",
        ],
    ),
    (535, &["nvmlDeviceGetCurrentClocksEventReasons"]),
    (550, &["nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetNumaNodeId"]),
    (555, &["nvmlDeviceGetDriverModel_v2"]),
    (580, &["nvmlDeviceGetAddressingMode"]),
];

/// Report whether a function is one that the library of a branch lacks.
fn is_missing(function: &str, branch: u32) -> bool {
    let newer = SINCE.iter().filter(|(first, _)| *first > branch);
    newer.flat_map(|(_, functions)| *functions).any(|newer| *newer == function)
}

/// The branch of a Tegra's driver, whose description has no version: that of Jetson Linux 36.
const TEGRA: u32 = 540;

/// Remove the functions that the described driver lacks.
extern "C" fn at_load() {
    // nvmlInit says what is wrong with the description.
    let Some(text) = env::var_os("DIVVY_NVML_SIM").and_then(|path| std::fs::read_to_string(path).ok()) else {
        return;
    };
    let Ok(machines) = Machines::parse(&text) else { return };
    let node = match env::var("DIVVY_NVML_SIM_NODE") {
        Ok(name) => machines.node(&name),
        Err(_) => machines.nodes.first(),
    };
    let Some(node) = node else { return };
    let branch = branch(&node.driver).unwrap_or(TEGRA);
    if let Err(error) = exports::remove(at_load as *const (), |function| is_missing(function, branch)) {
        complain(&format!(
            "functions that the driver {branch} lacks could not be removed: {error}"
        ));
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;
