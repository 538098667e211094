//! What is the same for the drivers whose GPUs are read from the kernel's files: amdgpu and xe.

use std::collections::BTreeMap;
use std::path::Path;

use divvy_host::Tree;
use divvy_model::{MiB, Vendor};

use crate::backend::DriverCalls;
use crate::sysfs::{SysfsDirectory, bounded, printable};
use crate::{
    DriverVersions, Failure, FailureCode, Gauges, GpuFacts, GpuGauges, GpuProcess, SNAPSHOT_VERSION, Snapshot, UnreadableDevice,
};

/// A kernel module: its name, and its directory, which exists only while it is loaded.
pub(crate) struct Module {
    pub(crate) name: &'static str,
    pub(crate) path: &'static str,
}

impl Module {
    /// Return the module's files. They are gone as soon as the module is unloaded.
    pub(crate) fn open<'t>(
        &self,
        tree: &'t dyn Tree,
        sys_root: &Path,
        calls: &DriverCalls,
    ) -> Result<SysfsDirectory<'t>, Failure> {
        let Module { name, path } = self;
        let _call = calls.enter(format!("looking for {name}"));
        SysfsDirectory::open(tree, path).ok_or_else(|| {
            let path = sys_root.join(path.trim_start_matches('/'));
            let text = format!(
                "the kernel module {name} is not loaded (there is no {}); load it (modprobe {name}), and the probe continues automatically",
                path.display()
            );
            Failure::new(FailureCode::DriverNotLoaded, text)
        })
    }
}

/// A device, and what was read about it.
#[derive(Debug)]
pub(crate) struct Found<D> {
    pub(crate) device: D,
    pub(crate) facts: Result<GpuFacts, UnreadableDevice>,
}

/// Return the devices that are GPUs.
pub(crate) fn gpus<D>(found: &[Found<D>]) -> impl Iterator<Item = (&D, &GpuFacts)> {
    found
        .iter()
        .filter_map(|found| Some((&found.device, found.facts.as_ref().ok()?)))
}

/// Remember the facts of each device that could be read, by the device's name.
pub(crate) fn remember<D>(memory: &mut BTreeMap<String, GpuFacts>, found: &[Found<D>], name: impl Fn(&D) -> &String) {
    for (device, facts) in gpus(found).filter(|(_, facts)| facts.error.is_none()) {
        memory.insert(name(device).clone(), facts.clone());
    }
}

/// Put a snapshot together. Linux's own modules have no version file.
pub(crate) fn assemble<D>(vendor: Vendor, module: &SysfsDirectory<'_>, found: Vec<Found<D>>) -> Snapshot {
    let driver = DriverVersions {
        version: module.text("/version").map(|text| printable(&text)).unwrap_or_default(),
        cuda: String::new(),
    };
    let mut snapshot = Snapshot {
        v: SNAPSHOT_VERSION,
        drivers: BTreeMap::from([(vendor, driver)]),
        gpus: Vec::new(),
        unreadable: Vec::new(),
    };
    for Found { facts, .. } in found {
        match facts {
            Ok(facts) => snapshot.gpus.push(facts),
            Err(unreadable) => snapshot.unreadable.push(unreadable),
        }
    }
    snapshot
}

/// Return what is measured of each GPU, where `read` returns the values of a device.
pub(crate) fn measured<D>(
    calls: &DriverCalls,
    found: &[Found<D>],
    name: impl Fn(&D) -> &String,
    read: impl Fn(&D) -> Gauges,
) -> Vec<GpuGauges> {
    let measured = gpus(found).map(|(device, facts)| {
        let _call = calls.enter(format!("measuring GPU {}", name(device)));
        GpuGauges {
            uuid: facts.uuid.clone(),
            values: read(device),
            parts: Vec::new(),
            failed: Default::default(),
            error: facts.error.clone().filter(|_| facts.lost),
        }
    });
    measured.collect()
}

/// Return processes by PID, with the bytes that they use.
pub(crate) fn processes<'a>(used: impl IntoIterator<Item = (&'a u32, &'a u64)>) -> Vec<GpuProcess> {
    let processes = used.into_iter().map(|(pid, bytes)| GpuProcess {
        pid: *pid,
        used: bounded(*bytes).unwrap_or(MiB::ZERO),
        pod: None,
        container: None,
        own_pid: None,
        kind: None,
        program: None,
    });
    processes.collect()
}
