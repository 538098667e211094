//! The CDI spec of whole GPUs, from which grants take the driver's libraries. This module decides whether the spec matches the
//! loaded driver, and whether the agent makes its own.
//!
//! After a driver upgrade, a spec names files that are gone, and no container with a GPU starts until the spec is made again. The agent
//! writes its own spec to the CDI directory (`/var/run/cdi` by default), which takes precedence over `/etc/cdi`. It never changes a spec that
//! an operator or another tool wrote; it only hides that spec while it is unusable. Once that spec is current again, the agent removes its own.

use std::collections::BTreeSet;

use divvy_cdi::NVIDIA_KIND;
pub use divvy_cdi::driver_spec::{Basis, RootState};

/// A spec of [`NVIDIA_KIND`] that is not the agent's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecFile {
    /// The file's path on the machine.
    pub path: String,
    /// Whether the file lies in the directory in which the agent would write its own spec.
    pub same_directory: bool,
    /// Whether container runtimes accept the file.
    pub valid: bool,
    /// The driver version that the spec was made for, if the spec says so.
    pub driver: Option<String>,
    /// Names of the spec's devices.
    pub devices: BTreeSet<String>,
    /// Files and device nodes that the spec names and that do not exist.
    pub missing: Vec<String>,
}

/// The agent's own spec file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Own {
    /// The driver version that the spec was made for.
    pub driver: Option<String>,
    /// Whether the file is unchanged since the last attempt wrote it.
    pub as_made: bool,
    /// Files and device nodes that the spec names and that do not exist.
    pub missing: Vec<String>,
}

/// The last attempt to make a spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The driver and GPUs that the spec was to describe.
    pub basis: Basis,
    /// Why no spec was made; `None` if one was made.
    pub failure: Option<String>,
}

/// The state of the node for one decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedNode {
    /// Whether the operator chose `--driver-spec auto`.
    pub auto: bool,
    /// Whether containers get MIG devices from this agent (`--mig-strategy`).
    pub mig_devices: bool,
    /// The directory in which the probe looked for the driver's files.
    pub searched: String,
    /// Why the probe cannot check the driver's files, if it cannot.
    pub blind: Option<String>,
    /// The path of the agent's own file, whether or not the file exists.
    pub own_path: String,
    /// The loaded driver and its GPUs, or `None` if either is unknown.
    pub basis: Option<Basis>,
    /// The specs that others wrote, in the order in which grants look for a GPU.
    pub files: Vec<SpecFile>,
    /// The agent's own spec, if it exists.
    pub own: Option<Own>,
    /// The last attempt of this process to make a spec.
    pub last: Option<Attempt>,
}

/// What the agent does with its own file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriverSpecStep {
    /// Leave the file as it is, whether or not it exists.
    Nothing,
    /// Make the file for this reason.
    Make(DriverSpecTrouble),
    /// Remove the file.
    Remove,
}

/// A problem with the specs that affects containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverSpecTrouble {
    /// True if a spec exists and is wrong, false if no spec names the GPU.
    pub stale: bool,
    /// The message, including the command that helps.
    pub text: String,
}

/// The agent's next step, and the problem that remains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverSpecVerdict {
    /// What the agent does with its own file.
    pub step: DriverSpecStep,
    /// The problem that an operator must solve.
    pub left: Option<DriverSpecTrouble>,
}

/// Decide what happens to the agent's own file, and what to report.
pub fn decide(seen: &ObservedNode) -> DriverSpecVerdict {
    let verdict = |step, left| DriverSpecVerdict { step, left };
    let own_goes = || match seen.own {
        Some(_) => DriverSpecStep::Remove,
        None => DriverSpecStep::Nothing,
    };
    // While the driver does not answer, keep what was right a moment ago.
    let Some(basis) = seen.basis.as_ref().filter(|basis| !basis.gpus.is_empty()) else {
        return verdict(DriverSpecStep::Nothing, None);
    };
    let Some((trouble, at)) = trouble(seen, basis) else {
        return verdict(own_goes(), None);
    };
    let generate = generate(seen, at);
    if !seen.auto {
        let rest = format!("On the node, run: {generate}. With --driver-spec auto the agent does this automatically");
        return verdict(own_goes(), Some(trouble.and(&rest)));
    }
    if let Some((path, device)) = conflict(&seen.files, basis) {
        let rest = format!(
            "The agent does not write {}: {path} already has {NVIDIA_KIND}={device}, and container runtimes ignore a device that two files of one \
             directory define. Make {path} again ({}), or remove it (rm {path})",
            seen.own_path,
            self::generate(seen, Some(path)),
        );
        return verdict(own_goes(), Some(trouble.and(&rest)));
    }
    // An own spec that cannot be made again stays. With a wrong spec, a container does not start, and its error says why. Without
    // a spec, the container would start without the libraries.
    let left = |rest: &str| {
        let trouble = match &seen.own {
            None => trouble.clone(),
            Some(own) if own.driver.as_ref() != Some(&basis.driver) => {
                DriverSpecTrouble::of_another(&seen.own_path, own.driver.as_deref().unwrap_or("(unknown)"), basis)
            }
            Some(own) => DriverSpecTrouble::of_missing(&seen.own_path, own.missing.first()?),
        };
        Some(trouble.and(rest))
    };
    if basis.root.is_none() {
        // While a driver container is being replaced, its root directory is gone for a while.
        let why = match &seen.blind {
            Some(text) => text.clone(),
            None => format!("divvy-probe finds none of the driver's files at {}", seen.searched),
        };
        return verdict(
            DriverSpecStep::Nothing,
            left(&format!("The agent cannot make a spec: {why}. On the node, run: {generate}")),
        );
    }
    match &seen.last {
        Some(Attempt {
            basis: before,
            failure: None,
        }) if before == basis && seen.own.as_ref().is_some_and(|own| own.as_made) => verdict(DriverSpecStep::Nothing, None),
        Some(Attempt {
            basis: before,
            failure: Some(error),
        }) if before == basis => {
            let rest = format!(
                "The agent could not make a spec: {error}. It tries again once this is fixed; to make it by hand: {generate}"
            );
            verdict(DriverSpecStep::Nothing, left(&rest))
        }
        _ => verdict(DriverSpecStep::Make(trouble), None),
    }
}

/// Reason of the event for a node, or a pod, whose containers get none of the driver's libraries.
pub const NO_LIBRARIES: &str = "NoDriverLibraries";

impl DriverSpecTrouble {
    /// Return the reason of the node's event.
    pub fn reason(&self) -> &'static str {
        if self.stale { "DriverSpecStale" } else { NO_LIBRARIES }
    }

    /// Return the problem that no spec names the GPU.
    pub(super) fn of_none(uuid: &str) -> DriverSpecTrouble {
        DriverSpecTrouble {
            stale: false,
            text: format!(
                "no CDI spec of kind {NVIDIA_KIND} names {uuid}: containers get its device nodes but none of the driver's libraries \
                 (libcuda.so.1)"
            ),
        }
    }

    fn of_another(path: &str, made_for: &str, basis: &Basis) -> DriverSpecTrouble {
        DriverSpecTrouble {
            stale: true,
            text: format!(
                "{path} was made for driver {made_for}, but {} is loaded: containers with GPUs do not start, or get libraries that the \
                 kernel module refuses",
                basis.driver
            ),
        }
    }

    fn of_missing(path: &str, missing: &str) -> DriverSpecTrouble {
        DriverSpecTrouble {
            stale: true,
            text: format!("{path} names {missing}, which does not exist: containers with GPUs do not start"),
        }
    }

    pub(super) fn and(&self, rest: &str) -> DriverSpecTrouble {
        DriverSpecTrouble {
            stale: self.stale,
            text: format!("{}. {rest}", self.text),
        }
    }
}

/// Return the problem of the first device whose containers would get no libraries or the wrong ones, and the file that causes it.
fn trouble<'s>(seen: &'s ObservedNode, basis: &Basis) -> Option<(DriverSpecTrouble, Option<&'s str>)> {
    // Containers do not get a GPU as a whole while it is divided by MIG.
    let gpus = basis.gpus.iter().filter(|gpu| gpu.mig.is_none()).map(|gpu| &gpu.uuid);
    let mig_devices = basis.gpus.iter().filter(|_| seen.mig_devices).flat_map(|gpu| &gpu.mig);
    // A spec leaves out a MIG device without capabilities, which is not offered either.
    let mig_devices = mig_devices.flatten().filter(|device| device.capabilities.is_some());
    let mig_devices = mig_devices.map(|device| &device.uuid);
    for uuid in gpus.chain(mig_devices).filter_map(Option::as_deref) {
        let Some(file) = seen.files.iter().find(|file| file.devices.contains(uuid)) else {
            return Some((DriverSpecTrouble::of_none(uuid), None));
        };
        let path = &file.path;
        let trouble = match (&file.driver, file.missing.first()) {
            (Some(made_for), _) if *made_for != basis.driver => DriverSpecTrouble::of_another(path, made_for, basis),
            (_, Some(missing)) => DriverSpecTrouble::of_missing(path, missing),
            _ => continue,
        };
        return Some((trouble, Some(path)));
    }
    None
}

/// Return another file in the agent's directory, and one of its devices, if the agent's own spec would define the same device.
fn conflict<'s>(files: &'s [SpecFile], basis: &Basis) -> Option<(&'s str, &'s str)> {
    let ours = |name: &str| {
        name == "all"
            || basis.gpus.iter().any(|gpu| {
                let index = name.split_once(':').map_or(name, |(index, _)| index);
                gpu.uuid.as_deref() == Some(name) || index == gpu.index.to_string()
            })
    };
    files
        .iter()
        .filter(|file| file.same_directory && file.valid)
        .find_map(|file| {
            let device = file.devices.iter().find(|name| ours(name))?;
            Some((file.path.as_str(), device.as_str()))
        })
}

/// Return the command that makes the spec.
fn generate(seen: &ObservedNode, at: Option<&str>) -> String {
    let root = match seen.basis.as_ref().map(|basis| basis.driver_root.as_str()) {
        None | Some("/") => String::new(),
        Some(root) => format!(" --driver-root {root}"),
    };
    format!("divvy cdi generate{root} -o {}", at.unwrap_or("/etc/cdi/nvidia.yaml"))
}
