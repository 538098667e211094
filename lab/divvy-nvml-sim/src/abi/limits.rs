//! Symbols for the limits of a cgroup's GPU memory, which drivers have from R615 on (nvml.h of CUDA 13.4; NVIDIA's document "MPS v3 Memory
//! Partitioning").

use std::ffi::c_char;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use divvy_gpu_sim::branch;
use nvml_wrapper_sys::bindings as ffi;

use super::{INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, answer, get_text, mig};
use crate::changes::{CgroupLimit, LimitMode};
use crate::machine::{NvmlCard, Pci};
use crate::sim::{NvmlFailure, NvmlSimState, sim};

const MIB: u64 = 1 << 20;
/// The value that means "no limit".
const MAX: u64 = u64::MAX;
/// The kernel's file with the limits of a cgroup.
const DMEM_MAX: &str = "dmem.max";

/// The argument of nvmlDeviceSetMemoryLimits_v1 (`nvmlSetMemoryLimits_v1_t`).
#[repr(C)]
struct SetLimitsArgument {
    /// The full path of the cgroup's directory.
    name_space: *const c_char,
    soft: u64,
    hard: u64,
}

/// The argument of nvmlDeviceGetMemoryLimits_v1 (`nvmlGetMemoryLimits_v1_t`).
#[repr(C)]
struct GetMemoryLimits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

/// The first branch whose library has these functions.
const FIRST_BRANCH: u32 = 615;

/// Run a call about the limits of a GPU. MIG devices and GPUs in MIG mode have none. The control socket can give them to an older driver, so its library has these
/// functions, which answer until then as if they were not there.
fn call<T>(
    device: ffi::nvmlDevice_t,
    work: impl FnOnce(&NvmlSimState, &NvmlCard, usize, LimitMode) -> Result<T, NvmlFailure>,
) -> Result<T, NvmlFailure> {
    let branch = super::machine_call(|machine| Ok(branch(&machine.driver)))?;
    mig::call_with_part(device, |inner, card, index, part| {
        let mode = inner
            .limit_mode()
            .or((branch >= Some(FIRST_BRANCH)).then_some(LimitMode::Misc));
        let mode = mode.ok_or(ffi::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND)?;
        if mode == LimitMode::Off || part.is_some() || !card.mig.is_empty() {
            Err(NOT_SUPPORTED)
        } else {
            work(inner, card, index, mode)
        }
    })
}

fn set(device: ffi::nvmlDevice_t, cgroup: &str, soft: u64, hard: u64) -> Result<(), NvmlFailure> {
    let path = Path::new(cgroup);
    let (index, kernel) = call(device, |inner, card, index, mode| {
        inner.limit_can_be_set(index)?;
        let file = (mode == LimitMode::Dmem).then(|| (path.join(DMEM_MAX), region(card.pci)));
        let has_files = file.as_ref().is_none_or(|(file, _)| file.exists());
        if path.is_absolute() && path.is_dir() && has_files {
            Ok((index, file))
        } else {
            Err(NOT_FOUND)
        }
    })?;
    if soft > hard {
        return Err(INVALID_ARGUMENT);
    }
    if let Some((file, region)) = kernel {
        write_kernel(&file, &region, hard).map_err(|_| NOT_FOUND)?;
    }
    let limit = CgroupLimit { soft, hard };
    let index = u32::try_from(index).map_err(|_| ffi::nvmlReturn_enum_NVML_ERROR_UNKNOWN)?;
    let changed = sim().change(|changes, _| {
        let gpu = changes.gpus.entry(index).or_default();
        gpu.limits.retain(|cgroup, _| Path::new(cgroup).is_dir());
        gpu.limits.insert(cgroup.to_owned(), limit);
        Ok(())
    });
    changed.map_err(|_| ffi::nvmlReturn_enum_NVML_ERROR_UNKNOWN)
}

/// Return the name that the kernel's controller has for the memory of a GPU.
fn region(pci: Pci) -> String {
    format!("nvidia/{:08x}:{:02x}:{:02x}.0/vidmem", pci.domain, pci.bus, pci.device)
}

/// Write the limit of a region into a file of the kernel's controller, which has a line for each region.
fn write_kernel(file: &Path, region: &str, hard: u64) -> std::io::Result<()> {
    let value = if hard == MAX { "max".to_owned() } else { hard.to_string() };
    let mut lines: Vec<String> = fs::read_to_string(file)?.lines().map(str::to_owned).collect();
    lines.retain(|line| line.split_once(' ').is_some_and(|(of, _)| of != region));
    lines.push(format!("{region} {value}\n"));
    fs::write(file, lines.join("\n"))
}

/// Return the limit on the cgroup of this process, if that very cgroup has one, and the memory that the cgroup's processes use, in bytes.
pub(super) fn own(inner: &NvmlSimState, card: &NvmlCard, index: usize) -> Result<Option<(u64, u64)>, NvmlFailure> {
    if !card.mig.is_empty() || matches!(inner.limit_mode(), Some(LimitMode::Off | LimitMode::Forgotten)) {
        return Ok(None);
    }
    let (Some(cgroup), limits) = (own_cgroup(), inner.limits(index)) else {
        return Ok(None);
    };
    let limit = cgroup
        .to_str()
        .and_then(|path| limits.get(path))
        .filter(|limit| limit.hard != MAX);
    limit
        .map(|limit| Ok((limit.hard, used(inner, card, index, cgroup)?)))
        .transpose()
}

/// Return the directory of the cgroup in which this process started.
fn own_cgroup() -> Option<&'static Path> {
    static OWN: OnceLock<Option<PathBuf>> = OnceLock::new();
    let find = || match std::env::var_os("DIVVY_NVML_SIM_CGROUP") {
        Some(path) => Some(path.into()),
        None => cgroup_of(std::process::id()),
    };
    OWN.get_or_init(find).as_deref()
}

/// Return the limit of the nearest cgroup that has one, and the memory that the cgroup's processes use, in bytes.
fn get(device: ffi::nvmlDevice_t, cgroup: &str) -> Result<(CgroupLimit, u64), NvmlFailure> {
    call(device, |inner, card, index, mode| {
        let path = Path::new(cgroup);
        if !path.is_absolute() || !path.is_dir() {
            return Err(NOT_FOUND);
        }
        let above = || path.ancestors().filter_map(Path::to_str);
        let limits = inner.limits(index);
        let limit = match mode {
            // The driver's own list. A cgroup that was never set cannot be told from a driver without this function.
            LimitMode::Misc | LimitMode::Off => above().find_map(|path| limits.get(path).copied()).ok_or(NOT_SUPPORTED)?,
            LimitMode::Forgotten => &CgroupLimit { soft: 0, hard: MAX },
            // The kernel's files.
            LimitMode::Dmem => {
                let has_files = |path: &&str| Path::new(path).join(DMEM_MAX).exists();
                let nearest = above().find(has_files).ok_or(NOT_FOUND)?;
                limits.get(nearest).copied().unwrap_or(&CgroupLimit { soft: 0, hard: MAX })
            }
        };
        Ok((*limit, used(inner, card, index, path)?))
    })
}

/// Return the memory that the processes of a cgroup use, in bytes.
fn used(inner: &NvmlSimState, card: &NvmlCard, index: usize, cgroup: &Path) -> Result<u64, NvmlFailure> {
    let processes = inner.processes(card, index, None)?.into_iter();
    Ok(processes
        .filter(|(pid, _)| is_in(*pid, cgroup))
        .fold(0_u64, |sum, (_, used)| sum.saturating_add(used.saturating_mul(MIB))))
}

/// Report whether a process is in a cgroup or below it.
fn is_in(pid: u32, cgroup: &Path) -> bool {
    let own = if pid == std::process::id() {
        own_cgroup().map(Path::to_owned)
    } else {
        cgroup_of(pid)
    };
    own.is_some_and(|own| own.starts_with(cgroup))
}

/// Return the directory of a process's cgroup of version 2.
fn cgroup_of(pid: u32) -> Option<PathBuf> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let own = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new("/sys/fs/cgroup").join(own))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceSetMemoryLimits_v1(
    device: ffi::nvmlDevice_t,
    limits: *const SetLimitsArgument,
) -> ffi::nvmlReturn_t {
    answer(|| {
        // SAFETY: null, or the caller's value.
        let limits = unsafe { limits.as_ref() }.ok_or(INVALID_ARGUMENT)?;
        // SAFETY: the caller's string.
        let cgroup = unsafe { get_text(limits.name_space) }?;
        set(device, cgroup, limits.soft, limits.hard)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryLimits_v1(device: ffi::nvmlDevice_t, limits: *mut GetMemoryLimits) -> ffi::nvmlReturn_t {
    answer(|| {
        // SAFETY: null, or the caller's value, which nothing else uses meanwhile.
        let limits = unsafe { limits.as_mut() }.ok_or(INVALID_ARGUMENT)?;
        // SAFETY: the caller's string.
        let cgroup = unsafe { get_text(limits.name_space) }?;
        let (limit, used) = get(device, cgroup)?;
        (limits.soft, limits.hard, limits.used) = (limit.soft, limit.hard, used);
        Ok(())
    })
}
