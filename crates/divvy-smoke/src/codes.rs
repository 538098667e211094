//! What the driver's error codes mean to a person: the name, why it matters, and what to do.

use crate::driver::{CallFailure, CudaCode};

/// A finding's three texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepFinding {
    pub found: String,
    pub why: String,
    pub fix: String,
    /// Whether this shows that the GPU itself is at fault.
    pub gpu_at_fault: bool,
}

impl StepFinding {
    pub fn new(found: impl Into<String>, why: impl Into<String>, fix: impl Into<String>) -> StepFinding {
        StepFinding {
            found: found.into(),
            why: why.into(),
            fix: fix.into(),
            gpu_at_fault: false,
        }
    }

    /// A finding that shows that the GPU itself is at fault, and not the installation or the share.
    pub fn of_gpu(found: impl Into<String>, why: impl Into<String>, fix: impl Into<String>) -> StepFinding {
        StepFinding {
            gpu_at_fault: true,
            ..StepFinding::new(found, why, fix)
        }
    }
}

/// What is known of an error code.
struct KnownCode {
    codes: &'static [i32],
    why: &'static str,
    fix: &'static str,
}

const KNOWN: [KnownCode; 15] = [
    KnownCode {
        codes: &[2],
        why: "the GPU or the share has not enough free memory",
        fix: "request more memory for the container, or end what holds it: divvy-probe --once lists the processes on the node",
    },
    KnownCode {
        codes: &[3, 34],
        why: "this library is not the driver's, but a stub for linking that an image contains",
        fix: "remove the stub from the image or from LD_LIBRARY_PATH; the driver's library comes from the node",
    },
    KnownCode {
        codes: &[46],
        why: "the GPU's compute mode allows one process, and another one has it",
        fix: "nvidia-smi -c 0 on the node allows several; divvy doctor checks it as D12",
    },
    KnownCode {
        codes: &[100, 101],
        why: "the driver's library is there, and it finds no GPU that this container may use",
        fix: "look for /dev/nvidia0 and its like in the container, at CUDA_VISIBLE_DEVICES, and for a GPU in MIG mode without instances; divvy doctor checks the device nodes as D09",
    },
    KnownCode {
        codes: &[200, 209, 218, 222],
        why: "the driver does not compile the program's kernels for this GPU",
        fix: "a GPU older than compute capability 3.0 and a driver older than 384 are not supported; otherwise report it with this output",
    },
    KnownCode {
        codes: &[214, 220],
        why: "the hardware reports an error that it could not correct, so results on this GPU are wrong",
        fix: "drain the GPU, reset it, and replace it if this returns; nvidia-smi -q -d ECC shows the counters",
    },
    KnownCode {
        codes: &[221],
        why: "the driver's compiler is missing, so programs that bring PTX along do not run",
        fix: "mount libnvidia-ptxjitcompiler.so.1 into the container: it belongs to the driver capability compute",
    },
    KnownCode {
        codes: &[304],
        why: "the operating system refuses what the driver needs",
        fix: "check that /dev/nvidia-uvm is in the container and that the cgroup allows it; divvy doctor checks the device nodes as D09",
    },
    KnownCode {
        codes: &[700, 702, 715, 716, 719],
        why: "a kernel that runs on other GPUs was ended by this one",
        fix: "look for an XID in the node's kernel log (dmesg | grep NVRM); if another GPU passes, drain this one",
    },
    KnownCode {
        codes: &[802],
        why: "the NVSwitch fabric is not ready, so no program can use CUDA",
        fix: "start nvidia-fabricmanager on the node in the version of the driver",
    },
    KnownCode {
        codes: &[803],
        why: "the driver's libraries and the kernel module have different versions",
        fix: "reboot the node or reload the module after a driver update; divvy doctor checks it as D05",
    },
    KnownCode {
        codes: &[804],
        why: "the image brings CUDA's compatibility libraries along, which this GPU does not support",
        fix: "remove cuda-compat from the image or from LD_LIBRARY_PATH, or update the driver",
    },
    KnownCode {
        codes: &[805, 806, 807, 808, 809, 810],
        why: "the MPS daemon does not serve this process",
        fix: "check that nvidia-cuda-mps-control runs on the node and has fewer clients than its limit",
    },
    KnownCode {
        codes: &[909],
        why: "the driver gave up waiting",
        fix: "look for an XID in the node's kernel log (dmesg | grep NVRM)",
    },
    KnownCode {
        codes: &[999],
        why: "the driver reports no reason",
        fix: "load nvidia-uvm on the node, and look for an XID in its kernel log (dmesg | grep NVRM); after a suspend, reload the module",
    },
];

/// The codes that show that the GPU itself is at fault: errors of the hardware, and the end of a kernel that runs on other GPUs.
const GPU_AT_FAULT: [i32; 7] = [214, 220, 700, 702, 715, 716, 719];

/// The names of the codes that this program explains, from cuda.h, without `CUDA_ERROR_`.
const NAMES: [(i32, &str); 42] = [
    (1, "INVALID_VALUE"),
    (2, "OUT_OF_MEMORY"),
    (3, "NOT_INITIALIZED"),
    (4, "DEINITIALIZED"),
    (34, "STUB_LIBRARY"),
    (46, "DEVICE_UNAVAILABLE"),
    (100, "NO_DEVICE"),
    (101, "INVALID_DEVICE"),
    (200, "INVALID_IMAGE"),
    (201, "INVALID_CONTEXT"),
    (209, "NO_BINARY_FOR_GPU"),
    (214, "ECC_UNCORRECTABLE"),
    (218, "INVALID_PTX"),
    (220, "NVLINK_UNCORRECTABLE"),
    (221, "JIT_COMPILER_NOT_FOUND"),
    (222, "UNSUPPORTED_PTX_VERSION"),
    (304, "OPERATING_SYSTEM"),
    (400, "INVALID_HANDLE"),
    (500, "NOT_FOUND"),
    (600, "NOT_READY"),
    (700, "ILLEGAL_ADDRESS"),
    (701, "LAUNCH_OUT_OF_RESOURCES"),
    (702, "LAUNCH_TIMEOUT"),
    (709, "CONTEXT_IS_DESTROYED"),
    (715, "ILLEGAL_INSTRUCTION"),
    (716, "MISALIGNED_ADDRESS"),
    (717, "INVALID_ADDRESS_SPACE"),
    (718, "INVALID_PC"),
    (719, "LAUNCH_FAILED"),
    (800, "NOT_PERMITTED"),
    (801, "NOT_SUPPORTED"),
    (802, "SYSTEM_NOT_READY"),
    (803, "SYSTEM_DRIVER_MISMATCH"),
    (804, "COMPAT_NOT_SUPPORTED_ON_DEVICE"),
    (805, "MPS_CONNECTION_FAILED"),
    (806, "MPS_RPC_FAILURE"),
    (807, "MPS_SERVER_NOT_READY"),
    (808, "MPS_MAX_CLIENTS_REACHED"),
    (809, "MPS_MAX_CONNECTIONS_REACHED"),
    (810, "MPS_CLIENT_TERMINATED"),
    (909, "TIMEOUT"),
    (999, "UNKNOWN"),
];

/// Return a code with its name: `2, CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) fn name(code: CudaCode) -> String {
    match NAMES.iter().find(|(number, _)| *number == code.0) {
        Some((number, name)) => format!("{number}, CUDA_ERROR_{name}"),
        None => code.0.to_string(),
    }
}

/// Explain a call that failed.
pub(crate) fn explain(failure: &CallFailure) -> StepFinding {
    let CallFailure { call, code, log } = failure;
    let said = if log.is_empty() {
        String::new()
    } else {
        format!("; the driver said: {log}")
    };
    let known = KNOWN.iter().find(|known| known.codes.contains(&code.0));
    let (why, fix) = known.map_or(
        (
            "a call failed that succeeds on a GPU that works",
            "look for an XID in the node's kernel log (dmesg | grep NVRM), and run divvy doctor --node there",
        ),
        |known| (known.why, known.fix),
    );
    StepFinding {
        gpu_at_fault: GPU_AT_FAULT.contains(&code.0),
        ..StepFinding::new(format!("{call} returned {}{said}", name(*code)), why, fix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_explained_with_its_name() {
        let mut text = String::new();
        for (code, _) in NAMES {
            let finding = explain(&CallFailure::new("cuInit", CudaCode(code)));
            text.push_str(&format!("{}\n  {}\n  {}\n", finding.found, finding.why, finding.fix));
        }
        insta::assert_snapshot!(text);
    }

    #[test]
    fn each_explained_code_has_one_explanation_and_a_name() {
        let codes: Vec<i32> = KNOWN.iter().flat_map(|known| known.codes).copied().collect();
        for (index, code) in codes.iter().enumerate() {
            assert!(!codes[..index].contains(code), "{code} is there twice");

            assert!(NAMES.iter().any(|(number, _)| number == code), "{code} has no name");
        }
        assert!(
            explain(&CallFailure::new("cuInit", CudaCode(12345)))
                .found
                .ends_with("returned 12345")
        );
    }

    #[test]
    fn what_the_compiler_said_is_part_of_the_finding() {
        let failure = CallFailure {
            log: "ptxas fatal: Unexpected".to_owned(),
            ..CallFailure::new("cuModuleLoadDataEx", CudaCode(218))
        };
        assert!(
            explain(&failure)
                .found
                .ends_with("CUDA_ERROR_INVALID_PTX; the driver said: ptxas fatal: Unexpected")
        );
    }
}
