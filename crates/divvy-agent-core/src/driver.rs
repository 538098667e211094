//! The CDI spec of whole GPUs, from which grants take the driver's libraries: whether it is of the driver that is loaded, and whether the
//! agent makes one of its own.
//!
//! After an upgrade of the driver a spec names files that are gone, and no container with a GPU starts until somebody makes it again. The
//! agent's own lies in the directory that goes before `/etc/cdi`, so what an operator or another tool wrote is never touched, only hidden
//! while it is of no use; when it is fresh again, the agent's goes.

use std::collections::BTreeSet;

use divvy_cdi::NVIDIA_KIND;
pub use divvy_cdi::driver::{Basis, RootState};

/// A spec of [`NVIDIA_KIND`] that is not the agent's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecFile {
    /// As it is called on the machine.
    pub path: String,
    /// It lies where the agent's own would.
    pub same_folder: bool,
    /// Engines take it.
    pub valid: bool,
    /// The driver that it was made for, if it says.
    pub driver: Option<String>,
    /// Names of its devices.
    pub devices: BTreeSet<String>,
    /// Files and device nodes that it names and that are not there.
    pub missing: Vec<String>,
}

/// The agent's own file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Own {
    /// The driver that it was made for.
    pub driver: Option<String>,
    /// Nobody changed it since the last attempt, which made it.
    pub as_made: bool,
    /// Files and device nodes that it names and that are not there.
    pub missing: Vec<String>,
}

/// The last time that a spec was made, or could not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// From what.
    pub basis: Basis,
    /// Why there is none, in words.
    pub outcome: Result<(), String>,
}

/// What was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// `--driver-spec auto`.
    pub auto: bool,
    /// Where the probe looked for the driver's files.
    pub looked_at: String,
    /// Why the probe cannot look, where it cannot.
    pub blind: Option<String>,
    /// Where the agent's own file lies, or would.
    pub own_path: String,
    /// `None`: driver or GPUs are not known.
    pub basis: Option<Basis>,
    /// The files of others, in the order in which grants look for a GPU.
    pub files: Vec<SpecFile>,
    /// The agent's own, if it is there.
    pub own: Option<Own>,
    /// By this process.
    pub last: Option<Attempt>,
}

/// What to do with the agent's own file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Leave it as it is, or away.
    Nothing,
    /// Make it, for this reason.
    Make(Trouble),
    /// Remove it.
    Remove,
}

/// What containers suffer from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// A spec is there and wrong. Otherwise there is none.
    pub stale: bool,
    /// In words, with what to type.
    pub text: String,
}

/// What to do, and what is left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// With the agent's own file.
    pub step: Step,
    /// What somebody else must do.
    pub left: Option<Trouble>,
}

/// Decides.
pub fn decide(seen: &Seen) -> Verdict {
    let verdict = |step, left| Verdict { step, left };
    let own_goes = || match seen.own {
        Some(_) => Step::Remove,
        None => Step::Nothing,
    };
    // What was right a moment ago is not wrong because the driver does not answer now.
    let Some(basis) = seen.basis.as_ref().filter(|basis| !basis.gpus.is_empty()) else {
        return verdict(Step::Nothing, None);
    };
    let Some((trouble, at)) = trouble(&seen.files, basis) else {
        return verdict(own_goes(), None);
    };
    let generate = generate(seen, at);
    if !seen.auto {
        let rest = format!("On the node: {generate}. With --driver-spec auto the agent does so by itself");
        return verdict(own_goes(), Some(trouble.and(&rest)));
    }
    if let Some((path, device)) = conflict(&seen.files, basis) {
        let rest = format!(
            "The agent does not write {}: {path} has {NVIDIA_KIND}={device} already, and engines give out no device that two files of a \
             directory have. Make {path} again ({}), or remove it (rm {path})",
            seen.own_path,
            self::generate(seen, Some(path)),
        );
        return verdict(own_goes(), Some(trouble.and(&rest)));
    }
    // An own file that cannot be made again stays: with a wrong one a container does not start and says why, with none it starts without libraries.
    let left = |rest: &str| {
        let trouble = match &seen.own {
            None => trouble.clone(),
            Some(own) if own.driver.as_ref() != Some(&basis.driver) => {
                Trouble::of_another(&seen.own_path, own.driver.as_deref().unwrap_or("none that it names"), basis)
            }
            Some(own) => Trouble::of_missing(&seen.own_path, own.missing.first()?),
        };
        Some(trouble.and(rest))
    };
    if basis.root.is_none() {
        // A driver's container that is replaced takes its root with it for a while.
        let why = match &seen.blind {
            Some(text) => text.clone(),
            None => format!("divvy-probe sees none of the driver's files at {}", seen.looked_at),
        };
        return verdict(
            Step::Nothing,
            left(&format!("The agent cannot make one: {why}. On the node: {generate}")),
        );
    }
    match &seen.last {
        Some(Attempt {
            basis: before,
            outcome: Ok(()),
        }) if before == basis && seen.own.as_ref().is_some_and(|own| own.as_made) => verdict(Step::Nothing, None),
        Some(Attempt {
            basis: before,
            outcome: Err(error),
        }) if before == basis => {
            let rest = format!(
                "The agent could not make one: {error}. As soon as that is put right it tries again; by hand: {generate}"
            );
            verdict(Step::Nothing, left(&rest))
        }
        _ => verdict(Step::Make(trouble), None),
    }
}

/// The event of a node, and of a pod, without the driver's libraries.
pub const NO_LIBRARIES: &str = "NoDriverLibraries";

impl Trouble {
    /// The reason of the node's event.
    pub fn reason(&self) -> &'static str {
        match self.stale {
            true => "DriverSpecStale",
            false => NO_LIBRARIES,
        }
    }

    /// No spec names a GPU.
    pub(super) fn of_none(uuid: &str) -> Trouble {
        Trouble {
            stale: false,
            text: format!(
                "no CDI spec of kind {NVIDIA_KIND} names {uuid}: containers get its device files, and none of the driver's libraries \
                 (libcuda.so.1)"
            ),
        }
    }

    fn of_another(path: &str, made_for: &str, basis: &Basis) -> Trouble {
        Trouble {
            stale: true,
            text: format!(
                "{path} was made for driver {made_for}, and {} is loaded: containers with GPUs do not start, or get libraries that the \
                 kernel's module refuses",
                basis.driver
            ),
        }
    }

    fn of_missing(path: &str, missing: &str) -> Trouble {
        Trouble {
            stale: true,
            text: format!("{path} names {missing}, which is not there: containers with GPUs do not start"),
        }
    }

    pub(super) fn and(&self, rest: &str) -> Trouble {
        Trouble {
            stale: self.stale,
            text: format!("{}. {rest}", self.text),
        }
    }
}

/// The first GPU whose containers would get no libraries, or wrong ones; and the file that is to blame.
fn trouble<'s>(files: &'s [SpecFile], basis: &Basis) -> Option<(Trouble, Option<&'s str>)> {
    // A GPU that is divided by MIG is not given to containers as a whole.
    for uuid in basis
        .gpus
        .iter()
        .filter(|gpu| gpu.mig.is_none())
        .filter_map(|gpu| gpu.uuid.as_deref())
    {
        let Some(file) = files.iter().find(|file| file.devices.contains(uuid)) else {
            return Some((Trouble::of_none(uuid), None));
        };
        let path = &file.path;
        let trouble = match (&file.driver, file.missing.first()) {
            (Some(made_for), _) if *made_for != basis.driver => Trouble::of_another(path, made_for, basis),
            (_, Some(missing)) => Trouble::of_missing(path, missing),
            _ => continue,
        };
        return Some((trouble, Some(path)));
    }
    None
}

/// A file beside the agent's own that has one of the devices that this would have.
fn conflict<'s>(files: &'s [SpecFile], basis: &Basis) -> Option<(&'s str, &'s str)> {
    let ours = |name: &str| {
        name == "all"
            || basis.gpus.iter().any(|gpu| {
                let index = name.split_once(':').map_or(name, |(index, _)| index);
                gpu.uuid.as_deref() == Some(name) || index == gpu.index.to_string()
            })
    };
    files.iter().filter(|file| file.same_folder && file.valid).find_map(|file| {
        let device = file.devices.iter().find(|name| ours(name))?;
        Some((file.path.as_str(), device.as_str()))
    })
}

/// What an operator would type.
fn generate(seen: &Seen, at: Option<&str>) -> String {
    let root = match seen.basis.as_ref().map(|basis| basis.driver_root.as_str()) {
        None | Some("/") => String::new(),
        Some(root) => format!(" --driver-root {root}"),
    };
    format!("divvy cdi generate{root} -o {}", at.unwrap_or("/etc/cdi/nvidia.yaml"))
}
