//! S01: the driver and the GPU.

use divvy_smoke_report::TestedGpu;

use super::share::{GivenShare, GuardLimit};
use super::{DoneStep, StepBench, StepProblem};
use crate::codes::{self, StepFinding};
use crate::driver::{CallFailure, CudaCode, Driver};
use crate::sizes::{self, MIB, Sizes};

/// Attributes of a device (cuda.h, `CUdevice_attribute`).
const MULTIPROCESSORS: i32 = 16;
const COMPUTE_MODE: i32 = 20;
const CAPABILITY: [i32; 2] = [75, 76];
/// `CU_COMPUTEMODE_PROHIBITED`.
const PROHIBITED: i32 = 2;

/// Returns what the guard holds the container to, for a UUID.
pub type LimitOf<'l> = dyn Fn(&str) -> Result<Option<GuardLimit>, NoLimits> + 'l;

/// The file with what the guard holds the container to cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path} cannot be read: {why}")]
pub struct NoLimits {
    /// The file.
    pub path: String,
    /// The reason, as the end of the message.
    pub why: String,
}

/// More GPUs than this are not looked at.
pub const MOST_GPUS: usize = 16;

/// What the user and the container say about the GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AskedGpu {
    /// The UUID, its prefix, or the index.
    pub gpu: Option<String>,
    /// The variable `CUDA_VISIBLE_DEVICES`.
    pub visible: Option<String>,
    pub grant: GivenShare,
}

/// A GPU that was opened.
pub(crate) struct Opened<'d> {
    pub bench: StepBench<'d>,
    pub gpu: TestedGpu,
    /// The compute capability.
    pub capability: (i32, i32),
    pub limit: Option<GuardLimit>,
}

/// What the step leaves: the GPU as far as it was described, and whether it can be used.
pub(crate) struct Looked<'d> {
    pub gpu: Option<TestedGpu>,
    pub outcome: Result<(Opened<'d>, DoneStep), StepProblem>,
}

/// Open a GPU.
///
/// `limit` returns what the guard holds the container to, for a UUID. `sizes` replaces the sizes that follow from the memory.
pub(crate) fn run<'d>(
    driver: &'d dyn Driver,
    library: &str,
    asked: &AskedGpu,
    limit: &LimitOf<'_>,
    sizes: Option<Sizes>,
) -> Looked<'d> {
    let mut gpu = None;
    let outcome = open(driver, library, asked, limit, sizes, &mut gpu);
    Looked { gpu, outcome }
}

fn open<'d>(
    driver: &'d dyn Driver,
    library: &str,
    asked: &AskedGpu,
    limit: &LimitOf<'_>,
    sizes: Option<Sizes>,
    described: &mut Option<TestedGpu>,
) -> Result<(Opened<'d>, DoneStep), StepProblem> {
    let bad = asked.visible.as_deref().and_then(bad_entry);
    driver.init().map_err(|failure| hinted(failure, bad.as_deref()))?;
    let version = driver.version()?;
    let count = usize::try_from(driver.count()?).unwrap_or(0);
    if count == 0 {
        return Err(hinted(
            CallFailure::new("cuDeviceGetCount", CudaCode::NO_DEVICE),
            bad.as_deref(),
        ));
    }
    let mut devices = Vec::new();
    for index in 0..count.min(MOST_GPUS) {
        let device = driver.device(index as i32)?;
        let uuid = uuid_text(driver.uuid(device)?);
        let name = driver.name(device)?;
        devices.push((device, of_part(uuid, &name), name));
    }
    let uuids: Vec<&str> = devices.iter().map(|(_, uuid, _)| uuid.as_str()).collect();
    let index = select(&uuids, asked.gpu.as_deref())?;
    let (device, uuid, name) = devices.swap_remove(index);
    let capability = (
        driver.attribute(CAPABILITY[0], device)?,
        driver.attribute(CAPABILITY[1], device)?,
    );
    let multiprocessors = u32::try_from(driver.attribute(MULTIPROCESSORS, device)?).unwrap_or(1);
    let mode = driver.attribute(COMPUTE_MODE, device)?;
    let memory = driver.total(device)?;
    let gpu = TestedGpu {
        uuid: uuid.clone(),
        name,
        cc: format!("{}.{}", capability.0, capability.1),
        driver: library.to_owned(),
        cuda: format!("{}.{}", version / 1000, version % 1000 / 10),
        memory,
    };
    *described = Some(gpu.clone());
    granted(&uuid, &asked.grant.uuids)?;
    if capability < (3, 0) {
        return Err(StepProblem::Skip(format!(
            "the GPU has compute capability {}, and the kernels need 3.0",
            gpu.cc
        )));
    }
    if mode == PROHIBITED {
        return Err(StepProblem::finding(
            "the GPU's compute mode is prohibited",
            "no program can use CUDA on this GPU",
            "nvidia-smi -c 0 on the node; divvy doctor checks it as D12",
        ));
    }
    let limit = limit(&uuid).map_err(|found| {
        StepProblem::finding(
            found.to_string(),
            "the guard does not know this container's share either, so programs cannot use the GPU",
            "restart the pod; look at the node's agent if it happens again",
        )
    })?;
    let context = limit
        .map(|limit| limit.context)
        .filter(|bytes| *bytes > 0)
        .unwrap_or_else(|| estimate(capability));
    let too_small = |found: String, context: u64| {
        let is_full = memory >= sizes::LARGEST_CONTEXT + sizes::WANTED;
        let (why, fix) = if is_full {
            (
                "there is no memory left for a program",
                "wait until other processes have ended: divvy-probe --once lists them on the node".to_owned(),
            )
        } else {
            (
                "the share is too small for a context and the 64 MiB that a run is to have",
                format!("request at least {} MiB for the container", sizes::needed_mib(context)),
            )
        };
        StepProblem::finding(found, why, fix)
    };
    let made = driver.retain(device).map_err(|failure| match failure.code {
        CudaCode::OUT_OF_MEMORY => too_small(
            format!(
                "{} returned {}: a context alone takes about {} MiB, and the GPU or the share has {} MiB",
                failure.call,
                codes::name(failure.code),
                context / MIB,
                memory / MIB
            ),
            context,
        ),
        _ => failure.into(),
    })?;
    driver.enter(made)?;
    let (free, total) = driver.memory()?;
    let within = Sizes::within(total, free);
    let sizes = match sizes {
        Some(sizes) => sizes,
        None => within.map_err(|found| too_small(found.to_string(), total.saturating_sub(free)))?,
    };
    let bench = StepBench::new(driver, device, sizes, multiprocessors)?;
    let others = match count {
        1 => String::new(),
        count if count > MOST_GPUS => format!(", GPU {index} of {count}, of which the first {MOST_GPUS} are looked at"),
        count => format!(", GPU {index} of {count}"),
    };
    let found = format!(
        "{library}, CUDA {}{others}, {} of {} MiB free",
        gpu.cuda,
        free / MIB,
        total / MIB
    );
    let warning = bad.map(|bad| {
        StepFinding::new(
            bad,
            "CUDA shows the GPUs before the first wrong entry, and no others",
            "write indices or UUIDs, separated by commas, into CUDA_VISIBLE_DEVICES",
        )
    });
    let opened = Opened {
        bench,
        gpu,
        capability,
        limit,
    };
    Ok((
        opened,
        DoneStep {
            warning,
            ..DoneStep::new(found, 0)
        },
    ))
}

/// Explain a failure, with a wrong entry in `CUDA_VISIBLE_DEVICES` if there is one.
fn hinted(failure: CallFailure, bad: Option<&str>) -> StepProblem {
    match bad {
        Some(bad) => {
            let finding = codes::explain(&failure);
            StepProblem::Finding(StepFinding {
                found: format!("{}; {bad}", finding.found),
                ..finding
            })
        }
        None => StepProblem::Failed(failure),
    }
}

/// Return the UUID of a device of this name as NVML writes it. CUDA's UUID of a MIG device has the same form as a GPU's, and its name says what it is.
fn of_part(uuid: String, name: &str) -> String {
    if name.contains(" MIG ") {
        uuid.replacen("GPU-", "MIG-", 1)
    } else {
        uuid
    }
}

/// Return a GPU's UUID as NVML writes it.
pub fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "GPU-{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

/// Return the index of the GPU that the user wants.
pub fn select(uuids: &[&str], wanted: Option<&str>) -> Result<usize, StepProblem> {
    let there_are = || {
        uuids
            .iter()
            .enumerate()
            .map(|(index, uuid)| format!("{index} ({uuid})"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let Some(wanted) = wanted else { return Ok(0) };
    if let Ok(index) = wanted.parse::<usize>() {
        return if index < uuids.len() {
            Ok(index)
        } else {
            Err(StepProblem::Skip(format!(
                "there is no GPU {index}; the GPUs here: {}",
                there_are()
            )))
        };
    }
    // A MIG device's UUID from CUDA has the same digits.
    let digits = |text: &str| text.to_ascii_lowercase().replacen("mig-", "gpu-", 1);
    let prefix = digits(wanted);
    let matching: Vec<usize> = (0..uuids.len())
        .filter(|index| digits(uuids[*index]).starts_with(&prefix))
        .collect();
    match matching.as_slice() {
        [index] => Ok(*index),
        [] if prefix.len() == 40 => Err(StepProblem::finding(
            format!("the GPU {wanted} is not here; the GPUs here: {}", there_are()),
            "the container has another GPU than it was to get",
            "restart the pod; look at the node's agent if it happens again",
        )),
        [] => Err(StepProblem::Skip(format!(
            "no GPU's UUID begins with {wanted}; the GPUs here: {}",
            there_are()
        ))),
        several => Err(StepProblem::Skip(format!(
            "{} GPUs have a UUID that begins with {wanted}; write more of it: {}",
            several.len(),
            there_are()
        ))),
    }
}

/// Require that the GPU is one of those that the container was given.
fn granted(uuid: &str, uuids: &[String]) -> Result<(), StepProblem> {
    let digits = |text: &str| text.get(4..).unwrap_or_default().to_ascii_lowercase();
    if uuids.is_empty() || uuids.iter().any(|granted| digits(granted) == digits(uuid)) {
        Ok(())
    } else {
        Err(StepProblem::finding(
            format!("the GPU is {uuid}, and the container was given {}", uuids.join(", ")),
            "the container has another GPU than it was to get",
            "restart the pod; look at the node's agent if it happens again",
        ))
    }
}

/// Return what is wrong with the first wrong entry of `CUDA_VISIBLE_DEVICES`.
fn bad_entry(text: &str) -> Option<String> {
    let is_index = |entry: &str| entry.parse::<u32>().is_ok();
    let is_uuid = |entry: &str| entry.starts_with("GPU-") || entry.starts_with("MIG-");
    if text.trim().is_empty() {
        return Some("CUDA_VISIBLE_DEVICES is empty, which hides every GPU".to_owned());
    }
    let bad = text
        .split(',')
        .map(str::trim)
        .find(|entry| !is_index(entry) && !is_uuid(entry))?;
    let bad: String = bad.chars().take(60).collect();
    Some(format!(
        "CUDA_VISIBLE_DEVICES has the entry {bad:?}, which is neither an index nor a UUID"
    ))
}

/// Return about how much memory a context takes on a GPU of this capability.
fn estimate(capability: (i32, i32)) -> u64 {
    let mib = match capability {
        (9.., _) => 550,
        (8, _) => 450,
        _ => 300,
    };
    mib * MIB
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUIDS: [&str; 3] = [
        "GPU-8f0a1111-0000-4000-8000-000000000000",
        "GPU-8f0a2222-0000-4000-8000-000000000001",
        "GPU-00000000-0000-4000-8000-000000000002",
    ];

    #[test]
    fn a_gpu_is_selected_by_index_uuid_or_prefix() {
        for (wanted, index) in [
            (None, 0),
            (Some("2"), 2),
            (Some("GPU-8f0a2"), 1),
            (Some("gpu-8F0A1"), 0),
            (Some(UUIDS[2]), 2),
            (Some("MIG-0000"), 2),
        ] {
            assert_eq!(select(&UUIDS, wanted), Ok(index), "{wanted:?}");
        }
        for (wanted, part) in [
            ("3", "SKIP there is no GPU 3; the GPUs here: 0 (GPU-8f0a1111"),
            (
                "GPU-8f",
                "SKIP 2 GPUs have a UUID that begins with GPU-8f; write more of it: 0 (GPU-8f0a1111",
            ),
            ("GPU-9", "SKIP no GPU's UUID begins with GPU-9; the GPUs here"),
            (
                "GPU-99999999-0000-4000-8000-000000000000",
                "FAIL the GPU GPU-99999999-0000-4000-8000-000000000000 is not here",
            ),
            ("-1", "SKIP no GPU's UUID begins with -1"),
            ("99999999999999999999999", "SKIP no GPU's UUID"),
        ] {
            let text = match select(&UUIDS, Some(wanted)) {
                Err(StepProblem::Skip(reason)) => format!("SKIP {reason}"),
                Err(StepProblem::Finding(finding)) => format!("FAIL {}", finding.found),
                other => panic!("{wanted}: {other:?}"),
            };
            assert!(text.starts_with(part), "{text}");
        }
    }

    #[test]
    fn a_wrong_entry_of_the_visible_devices_is_named() {
        for text in [
            "0",
            "0,1",
            "GPU-8f0a",
            "MIG-1, 2",
            "-1x,0",
            "0,,1",
            "",
            " ",
            "all",
            "NoDevFiles",
        ] {
            let expected = !matches!(text, "0" | "0,1" | "GPU-8f0a" | "MIG-1, 2");
            assert_eq!(bad_entry(text).is_some(), expected, "{text:?}: {:?}", bad_entry(text));
        }
        assert_eq!(
            bad_entry("0,gpu0").as_deref(),
            Some("CUDA_VISIBLE_DEVICES has the entry \"gpu0\", which is neither an index nor a UUID")
        );
    }

    #[test]
    fn a_uuid_is_written_as_nvml_writes_it() {
        let bytes = [0x8f, 0x0a, 0x11, 0x11, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(uuid_text(bytes), UUIDS[0]);
        assert!(
            granted(UUIDS[0], &[UUIDS[0].replace("GPU", "MIG")]).is_ok() && granted(UUIDS[0], &[UUIDS[1].to_owned()]).is_err()
        );
    }
}
