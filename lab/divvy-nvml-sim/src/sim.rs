//! The simulated driver of this process: its reference count, changes, event sets, and the gate that every call passes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::env;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use divvy_gpu_sim::GpuLedger;
use divvy_gpu_sim::description::{self, DescriptionError};
use divvy_model::machine::MachineHealth;
use nvml_wrapper_sys::bindings as ffi;

use crate::changes::{self, CgroupLimit, EventErrors, LimitMode, MachineChanges, Stamp};
use crate::gauges;
use crate::machine::{NvmlCard, NvmlMachine};
use crate::samples::{self, BusySample, SampleMoment};

/// An `nvmlReturn_t` that is not success.
pub(crate) type NvmlFailure = ffi::nvmlReturn_t;

static SIM: Sim = Sim {
    inner: Mutex::new(NvmlSimState::new()),
    changed: Condvar::new(),
};

/// Return the simulator of this process.
pub(crate) fn sim() -> &'static Sim {
    &SIM
}

#[derive(Debug)]
pub(crate) struct Sim {
    inner: Mutex<NvmlSimState>,
    /// Signaled when an event is queued or a change is made.
    changed: Condvar,
}

#[derive(Debug)]
pub(crate) struct NvmlSimState {
    /// The number of nvmlInit calls that have no matching nvmlShutdown yet.
    references: u32,
    configured: bool,
    machine: Option<Arc<NvmlMachine>>,
    changes: MachineChanges,
    /// The value of `changes.descriptions` for which `machine` was read.
    descriptions: u64,
    /// The file that stores the changes, with the stamp of the version that was read last.
    state: Option<(PathBuf, Option<Stamp>)>,
    sets: BTreeMap<usize, SimEventSet>,
    last_set: usize,
    /// The samples of GPU Performance Monitoring, by number; `None` if nothing was read into a sample yet.
    samples: BTreeMap<usize, Option<SampleSubject>>,
    last_sample: usize,
}

/// What a sample of GPU Performance Monitoring is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SampleSubject {
    pub(crate) gpu: usize,
    /// The GPU instance, if it is about one.
    pub(crate) instance: Option<u32>,
    /// On the monotonic clock.
    pub(crate) at: Duration,
}

#[derive(Debug, Default)]
struct SimEventSet {
    gpus: BTreeSet<usize>,
    queue: VecDeque<XidEvent>,
}

/// A critical XID of one GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct XidEvent {
    pub(crate) gpu: usize,
    pub(crate) xid: u64,
    /// The GPU instance and the compute instance, if only these are affected.
    pub(crate) instances: Option<(u32, u32)>,
}

impl Sim {
    fn lock(&self) -> MutexGuard<'_, NvmlSimState> {
        // After a panic in one call, which `abi` catches, the values are still consistent.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Block while the driver hangs, then return the lock.
    fn gate(&self) -> MutexGuard<'_, NvmlSimState> {
        let mut inner = self.lock();
        loop {
            inner.refresh();
            let left = inner.changes.hang_until_ms.saturating_sub(now_ms());
            if left == 0 {
                return inner;
            }
            // Another process may end the hang through the state file, so check it regularly.
            let wait = Duration::from_millis(left.min(100));
            inner = self
                .changed
                .wait_timeout(inner, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Handle nvmlInit. In the first call, `listen` opens the control socket at its path. This happens before the call passes the
    /// gate, because a request on the socket can end a hang.
    pub(crate) fn init(&self, listen: impl FnOnce(PathBuf) -> io::Result<()>) -> Result<(), NvmlFailure> {
        self.lock().configure(listen);
        let mut inner = self.gate();
        if inner.changes.init_error != 0 {
            return Err(inner.changes.init_error);
        }
        if inner.references == 0 {
            inner.machine = Some(Arc::new(load_machine(&inner.changes).map_err(|error| {
                complain(&error.to_string());
                ffi::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED
            })?));
        }
        inner.references += 1;
        Ok(())
    }

    /// Handle nvmlShutdown.
    pub(crate) fn shutdown(&self) -> Result<(), NvmlFailure> {
        let mut inner = self.gate();
        if inner.references == 0 {
            return Err(ffi::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
        }
        inner.references -= 1;
        if inner.references == 0 {
            inner.sets.clear();
            inner.samples.clear();
            inner.machine = None;
        }
        Ok(())
    }

    /// Handle any other call.
    pub(crate) fn call<T>(
        &self,
        work: impl FnOnce(&mut NvmlSimState, &NvmlMachine) -> Result<T, NvmlFailure>,
    ) -> Result<T, NvmlFailure> {
        let mut inner = self.gate();
        let machine = inner.machine()?;
        work(&mut inner, &machine)
    }

    /// Handle nvmlEventSetWait: return the next event of the set, or time out.
    pub(crate) fn wait(&self, set: usize, timeout: Duration) -> Result<XidEvent, NvmlFailure> {
        let deadline = Instant::now() + timeout;
        let mut inner = self.gate();
        loop {
            inner.machine()?;
            let error = inner.changes.events.wait;
            let queue = &mut inner.set(set)?.queue;
            if error != 0 {
                return Err(error);
            }
            if let Some(event) = queue.pop_front() {
                return Ok(event);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ffi::nvmlReturn_enum_NVML_ERROR_TIMEOUT);
            }
            drop(self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner));
            inner = self.gate();
        }
    }

    /// Change the state and store it in the state file. If it cannot be stored, the state stays unchanged.
    pub(crate) fn change(
        &self,
        edit: impl FnOnce(&mut MachineChanges, &NvmlMachine) -> Result<(), ChangeRefusal>,
    ) -> Result<(), ChangeRefusal> {
        let mut inner = self.lock();
        inner.refresh();
        let machine = inner.described()?;
        let mut next = inner.changes.clone();
        edit(&mut next, &machine)?;
        gauges::keep_energy(&machine.cards, &inner.changes, &mut next, divvy_gpu_sim::monotonic());
        if let Some((path, stamp)) = &mut inner.state {
            changes::write(path, &next).map_err(|error| ChangeRefusal::State {
                path: path.clone(),
                error,
            })?;
            *stamp = changes::stamp(path);
        }
        inner.changes = next;
        inner.follow_description();
        drop(inner);
        self.changed.notify_all();
        Ok(())
    }

    /// Queue an XID. Return the number of event sets that received it.
    pub(crate) fn xid(&self, event: XidEvent) -> Result<usize, ChangeRefusal> {
        let gpu = event.gpu;
        let mut inner = self.lock();
        let count = inner.described()?.cards.len();
        if gpu >= count {
            return Err(ChangeRefusal::NoGpu { gpu, count });
        }
        let mut delivered = 0;
        for set in inner.sets.values_mut().filter(|set| set.gpus.contains(&gpu)) {
            set.queue.push_back(event);
            delivered += 1;
        }
        drop(inner);
        self.changed.notify_all();
        Ok(delivered)
    }

    /// Return the changes and the machine to which they apply.
    pub(crate) fn state(&self) -> Result<(MachineChanges, Arc<NvmlMachine>), DescriptionError> {
        let mut inner = self.lock();
        inner.refresh();
        Ok((inner.changes.clone(), inner.described()?))
    }

    /// Return how many samples of GPU Performance Monitoring there are, and how many there ever were.
    pub(crate) fn samples(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.samples.len(), inner.last_sample)
    }
}

/// Why a change of the machine, or another request, is not carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChangeRefusal {
    #[error("{0}")]
    Request(serde_json::Error),
    #[error(transparent)]
    Description(#[from] DescriptionError),
    #[error("there is no GPU {gpu}; the number of GPUs is {count}")]
    NoGpu { gpu: usize, count: usize },
    #[error("GPU {gpu} has {total} MiB, less than {used_mib}")]
    Memory { gpu: u32, total: u64, used_mib: u64 },
    #[error("{}: {error}", path.display())]
    State { path: PathBuf, error: io::Error },
}

impl NvmlSimState {
    const fn new() -> NvmlSimState {
        NvmlSimState {
            references: 0,
            configured: false,
            machine: None,
            changes: MachineChanges {
                init_error: 0,
                hang_until_ms: 0,
                descriptions: 0,
                events: EventErrors { create: 0, wait: 0 },
                limit_mode: None,
                gpus: BTreeMap::new(),
            },
            descriptions: 0,
            state: None,
            sets: BTreeMap::new(),
            last_set: 0,
            samples: BTreeMap::new(),
            last_sample: 0,
        }
    }

    /// Read the environment variables, once per process.
    fn configure(&mut self, listen: impl FnOnce(PathBuf) -> io::Result<()>) {
        if std::mem::replace(&mut self.configured, true) {
            return;
        }
        self.changes.init_error = env_number("DIVVY_NVML_SIM_INIT_ERROR").try_into().unwrap_or(u32::MAX);
        let hang = env_number("DIVVY_NVML_SIM_HANG");
        if hang > 0 {
            self.changes.hang_until_ms = now_ms().saturating_add(hang.saturating_mul(1000));
        }
        let Some(path) = env::var_os("DIVVY_NVML_SIM_CONTROL").map(PathBuf::from) else {
            return;
        };
        self.state = Some((changes::state_file(&path), None));
        self.refresh();
        if let Err(error) = listen(path) {
            complain(&format!("the control socket cannot be opened: {error}"));
        }
    }

    /// Read the state file again if another process has replaced it.
    fn refresh(&mut self) {
        let Some((path, known)) = &mut self.state else { return };
        let stamp = changes::stamp(path);
        if stamp.is_none() || stamp == *known {
            return;
        }
        *known = stamp;
        match changes::read(path) {
            Ok(changes) => self.changes = changes,
            Err(error) => complain(&format!("{}: {error}", path.display())),
        }
        self.follow_description();
    }

    /// Read the machine description again if it has been replaced.
    fn follow_description(&mut self) {
        if self.descriptions == self.changes.descriptions {
            return;
        }
        self.descriptions = self.changes.descriptions;
        if self.machine.is_some() {
            match load_machine(&self.changes) {
                Ok(machine) => self.machine = Some(Arc::new(machine)),
                Err(error) => complain(&error.to_string()),
            }
        }
    }

    fn machine(&self) -> Result<Arc<NvmlMachine>, NvmlFailure> {
        self.machine.clone().ok_or(ffi::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED)
    }

    /// Return the machine even if NVML is not initialized.
    fn described(&self) -> Result<Arc<NvmlMachine>, DescriptionError> {
        match &self.machine {
            Some(machine) => Ok(machine.clone()),
            None => load_machine(&self.changes).map(Arc::new),
        }
    }

    /// Return the GPU with this index; an error if it does not exist or is lost.
    pub(crate) fn present<'m>(&self, machine: &'m NvmlMachine, index: usize) -> Result<&'m NvmlCard, NvmlFailure> {
        let card = machine
            .cards
            .get(index)
            .ok_or(ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)?;
        if self.gpu(index).is_some_and(|changes| changes.lost) {
            Err(ffi::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST)
        } else {
            Ok(card)
        }
    }

    /// Return the changes to the GPU with this index.
    pub(crate) fn gpu(&self, index: usize) -> Option<&changes::GpuChanges> {
        self.changes.gpus.get(&u32::try_from(index).ok()?)
    }

    /// Return the error of a function that measures, if it has one.
    pub(crate) fn is_readable(&self, index: usize, function: &str) -> Result<(), NvmlFailure> {
        let error = self.gpu(index).and_then(|changes| changes.gauges.errors.get(function));
        error.map_or(Ok(()), |error| Err(*error))
    }

    /// Return the error of nvmlDeviceGetMigMode, if it has one.
    pub(crate) fn mig_mode_is_readable(&self, index: usize) -> Result<(), NvmlFailure> {
        match self.gpu(index).map_or(0, |changes| changes.mig_mode_error) {
            0 => Ok(()),
            error => Err(error),
        }
    }

    /// Return the error of this version of nvmlDeviceGetMemoryInfo, if it has one.
    pub(crate) fn memory_is_readable(&self, index: usize, version: u32) -> Result<(), NvmlFailure> {
        let error = self.gpu(index).and_then(|changes| changes.memory_errors.get(&version));
        error.map_or(Ok(()), |error| Err(*error))
    }

    /// Return what the driver reserves of the memory, in MiB.
    pub(crate) fn reserved(&self, index: usize) -> u64 {
        self.gpu(index).map_or(0, |changes| changes.gauges.reserved_mib)
    }

    /// Return the memory of the processes on the GPU in MiB, by PID; with `mig` only those on the MIG device at this position. The processes of the
    /// ledger count, too.
    pub(crate) fn processes(&self, card: &NvmlCard, index: usize, mig: Option<usize>) -> Result<BTreeMap<u32, u64>, NvmlFailure> {
        let mut processes: BTreeMap<u32, u64> = card.described.processes.iter().map(|p| (p.pid, p.used_mib)).collect();
        if let Some(changes) = self.gpu(index) {
            processes.extend(&changes.processes);
            processes.retain(|pid, used| *used > 0 || !changes.processes.contains_key(pid));
            let uses = |pid: &u32, mig: usize| changes.mig_of.get(pid).is_some_and(|used| *used as usize == mig);
            processes.retain(|pid, _| mig.is_none_or(|mig| uses(pid, mig)));
        }
        if let (Some(directory), None) = (divvy_gpu_sim::directory(), mig) {
            let usage = GpuLedger::open(&directory, &card.uuid).and_then(|mut ledger| ledger.usage());
            let usage = usage.map_err(|error| {
                complain(&error.to_string());
                ffi::nvmlReturn_enum_NVML_ERROR_UNKNOWN
            })?;
            for of in usage.iter().filter(|of| of.bytes > 0) {
                *processes.entry(of.pid).or_default() += of.bytes >> 20;
            }
        }
        Ok(processes)
    }

    /// Return where the driver keeps the limits of cgroups.
    pub(crate) fn limit_mode(&self) -> Option<LimitMode> {
        self.changes.limit_mode
    }

    /// Return the limits of cgroups on a GPU, by the cgroup's path. The end of a cgroup ends its limit.
    pub(crate) fn limits(&self, index: usize) -> BTreeMap<&str, &CgroupLimit> {
        let limits = self.gpu(index).into_iter().flat_map(|changes| &changes.limits);
        let existing = limits.filter(|(path, _)| Path::new(path).is_dir());
        existing.map(|(path, limit)| (path.as_str(), limit)).collect()
    }

    /// Return the error of nvmlDeviceSetMemoryLimits_v1, if it has one.
    pub(crate) fn limit_can_be_set(&self, index: usize) -> Result<(), NvmlFailure> {
        match self.gpu(index).map_or(0, |changes| changes.limit_error) {
            0 => Ok(()),
            error => Err(error),
        }
    }

    /// Return the latest samples of the processes' utilization that are newer than a time in microseconds since 1970.
    pub(crate) fn samples(&self, card: &NvmlCard, index: usize, since: u64) -> Result<Vec<BusySample>, NvmlFailure> {
        match self.gpu(index).map_or(0, |changes| changes.utilization_error) {
            0 => {}
            error => return Err(error),
        }
        let constant = card.described.processes.iter().map(|of| (of.pid, of.utilization)).collect();
        let work = match divvy_gpu_sim::directory() {
            Some(directory) => GpuLedger::open(&directory, &card.uuid).and_then(|mut ledger| ledger.work()),
            None => Ok(Vec::new()),
        };
        let work = work.map_err(|error| {
            complain(&error.to_string());
            ffi::nvmlReturn_enum_NVML_ERROR_UNKNOWN
        })?;
        Ok(samples::latest(
            &constant,
            &work,
            card.described.sample_ms,
            &SampleMoment::read(),
            since,
        ))
    }

    /// Report whether a process on the GPU is a client of MPS.
    pub(crate) fn is_mps_client(&self, index: usize, pid: u32) -> bool {
        self.gpu(index).is_some_and(|changes| changes.mps.contains(&pid))
    }

    /// Return whether a process that renders computes as well; `None` for a process that does not render.
    pub(crate) fn renders(&self, index: usize, pid: u32) -> Option<bool> {
        self.gpu(index).and_then(|changes| changes.graphics.get(&pid).copied())
    }

    /// Return the temperature in °C.
    pub(crate) fn temperature(&self, card: &NvmlCard, index: usize) -> u32 {
        self.gpu(index)
            .and_then(|changes| changes.temperature)
            .unwrap_or(card.described.temperature)
    }

    /// Return what the driver counts and reports about the GPU's health.
    pub(crate) fn health(&self, card: &NvmlCard, index: usize) -> MachineHealth {
        self.gpu(index)
            .and_then(|changes| changes.health)
            .unwrap_or(card.described.health)
    }

    /// Return the utilization in percent.
    pub(crate) fn utilization(&self, card: &NvmlCard, index: usize) -> u32 {
        gauges::utilization(card, self.gpu(index))
    }

    /// Create a sample of GPU Performance Monitoring and return its number.
    pub(crate) fn create_sample(&mut self) -> usize {
        self.last_sample += 1;
        self.samples.insert(self.last_sample, None);
        self.last_sample
    }

    /// Remove a sample.
    pub(crate) fn free_sample(&mut self, sample: usize) -> Result<(), NvmlFailure> {
        let known = self.samples.remove(&sample);
        known.map(drop).ok_or(ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)
    }

    /// Read into a sample.
    pub(crate) fn fill_sample(&mut self, sample: usize, measured: SampleSubject) -> Result<(), NvmlFailure> {
        let to = self.samples.get_mut(&sample);
        *to.ok_or(ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)? = Some(measured);
        Ok(())
    }

    /// Return what was read into a sample.
    pub(crate) fn sample(&self, sample: usize) -> Result<SampleSubject, NvmlFailure> {
        let measured = self.samples.get(&sample).copied().flatten();
        measured.ok_or(ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)
    }

    /// Create an empty event set and return its number.
    pub(crate) fn create_set(&mut self) -> Result<usize, NvmlFailure> {
        if self.changes.events.create != 0 {
            return Err(self.changes.events.create);
        }
        self.last_set += 1;
        self.sets.insert(self.last_set, SimEventSet::default());
        Ok(self.last_set)
    }

    /// Remove an event set.
    pub(crate) fn free_set(&mut self, set: usize) -> Result<(), NvmlFailure> {
        let known = self.sets.remove(&set).is_some();
        if known {
            Ok(())
        } else {
            Err(ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)
        }
    }

    /// Register a GPU with an event set.
    pub(crate) fn register(&mut self, set: usize, gpu: usize) -> Result<(), NvmlFailure> {
        let error = self.gpu(gpu).map_or(0, |changes| changes.register);
        let set = self.set(set)?;
        if error != 0 {
            return Err(error);
        }
        set.gpus.insert(gpu);
        Ok(())
    }

    fn set(&mut self, set: usize) -> Result<&mut SimEventSet, NvmlFailure> {
        self.sets
            .get_mut(&set)
            .ok_or(ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)
    }
}

/// Return the time in milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis().try_into().unwrap_or(u64::MAX)
}

fn env_number(name: &str) -> u64 {
    let Some(text) = env::var_os(name) else { return 0 };
    text.to_str().and_then(|text| text.trim().parse().ok()).unwrap_or_else(|| {
        complain(&format!("{name} is {text:?}, which is not a number; using 0"));
        0
    })
}

fn load_machine(changes: &MachineChanges) -> Result<NvmlMachine, DescriptionError> {
    NvmlMachine::load(&description::path()?, description::node_name().as_deref(), changes)
}

/// Print a message to standard error. NVML's errors carry no text, and a mistake in the description must not look like a missing driver.
pub(crate) fn complain(text: &str) {
    // If standard error is closed, there is no other place to report it.
    let _ = writeln!(std::io::stderr().lock(), "divvy-nvml-sim: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_that_was_not_taken_or_was_freed_is_refused() {
        const REFUSED: NvmlFailure = ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
        let measured = SampleSubject {
            instance: None,
            gpu: 1,
            at: Duration::from_secs(7),
        };
        let mut inner = NvmlSimState::new();
        let (first, second) = (inner.create_sample(), inner.create_sample());
        assert_eq!(inner.sample(first), Err(REFUSED));
        assert_eq!(inner.fill_sample(first, measured), Ok(()));
        assert_eq!((inner.sample(first), inner.sample(second)), (Ok(measured), Err(REFUSED)));
        assert_eq!((inner.free_sample(first), inner.free_sample(first)), (Ok(()), Err(REFUSED)));
        assert_eq!(inner.sample(first), Err(REFUSED));
        assert_eq!(inner.fill_sample(first, measured), Err(REFUSED));
        assert_ne!(inner.create_sample(), first, "a handle is not used again");
    }
}
