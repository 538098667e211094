//! The agent's own CDI spec of the driver: the files that [`decide::driver`](crate::decide::driver) decides by, and what it wants done.
//!
//! This runs with each reconciliation. The driver's folders are walked only when something changed that a spec depends on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use divvy_container::cdi::generate::nvidia::Mig;
use divvy_container::cdi::generate::{Generated, Options, Root, nvidia, proc};
use divvy_container::cdi::stale::{self, Stale};
use divvy_container::cdi::{Format, NVIDIA_KIND};
use divvy_hardware::Files;
use divvy_model::{Gpu, Health, MigDevice};

use crate::decide::SHARED_DEVICES;
use crate::decide::driver::{Attempt, Basis, Own, RootState, Seen, SpecFile, Step, Verdict, decide};
use crate::store::{DriverSpecs, Stamp, Store};

/// What `ldconfig` writes when a driver is installed.
const CACHE: &str = "/etc/ld.so.cache";
/// Where the driver's libraries usually are. A root that has none of these, and no cache, is none.
const FOLDERS: [&str; 6] = [
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib",
];

/// Where the driver is looked for, and what was done.
#[derive(Debug)]
pub(crate) struct DriverSpec {
    sys_root: PathBuf,
    driver_root: String,
    auto: bool,
    /// The parts of GPUs whose MIG is on, by the GPU's UUID.
    mig: Mutex<BTreeMap<String, Vec<MigDevice>>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: Option<Attempt>,
    /// The own file as the last attempt left it.
    made: Option<Stamp>,
    /// Which files of which specs were missing, when this was looked at.
    missing: Option<(RootState, Arc<DriverSpecs>, Vec<Vec<String>>)>,
    /// What was said of the own file when it was made last.
    notes: Vec<String>,
    /// What was said last.
    told: Option<String>,
}

/// What somebody should hear.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// Something must be done by somebody; as an event, too, if a spec is there and wrong.
    Trouble {
        /// A spec is there and wrong.
        stale: bool,
        /// In words.
        text: String,
    },
    /// A spec was made.
    Made(String),
    /// The agent's own was removed.
    Removed(String),
    /// Nothing must be done any more.
    Over,
}

/// What a look found.
#[derive(Debug, Default)]
pub(crate) struct Looked {
    /// Containers get no libraries, or wrong ones.
    pub(crate) stale: bool,
    /// Only what was not said before.
    pub(crate) said: Vec<Said>,
}

impl DriverSpec {
    pub(crate) fn new(sys_root: PathBuf, driver_root: String, auto: bool) -> DriverSpec {
        DriverSpec {
            sys_root,
            driver_root,
            auto,
            mig: Mutex::default(),
            state: Mutex::default(),
        }
    }

    /// Takes what the driver's library says of GPUs whose MIG is on, for the next look; whether it is another than before.
    pub(crate) fn set_mig(&self, mig: BTreeMap<String, Vec<MigDevice>>) -> bool {
        let mut known = self.mig.lock().unwrap_or_else(PoisonError::into_inner);
        let differs = *known != mig;
        *known = mig;
        differs
    }

    /// Looks, decides, and does it. `driver` is what the driver's library says of its version.
    pub(crate) fn look(&self, store: &Store, driver: &str, gpus: &[Gpu]) -> Looked {
        let tree = Files::below(&self.sys_root);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut looked = Looked::default();
        let mut seen = self.see(store, &tree, &mut state, driver, gpus);
        let mut verdict = decide(&seen);
        if let (Step::Make(trouble), Some(basis)) = (&verdict.step, seen.basis.clone()) {
            let outcome = self.make(store, &tree, &basis, &mut state.notes);
            let outcome = match outcome {
                Ok((stamp, said)) => {
                    state.made = stamp;
                    if let Some(notes) = said {
                        let made = format!(
                            "{} was made for driver {}{notes}. Until now: {}",
                            seen.own_path, basis.driver, trouble.text
                        );
                        looked.said.push(Said::Made(made));
                    }
                    seen.own = Some(Own {
                        driver: Some(basis.driver.clone()),
                        as_made: true,
                        missing: Vec::new(),
                    });
                    Ok(())
                }
                Err(text) => Err(text),
            };
            state.last = Some(Attempt { basis, outcome });
            seen.last.clone_from(&state.last);
            verdict = decide(&seen);
        }
        if verdict.step == Step::Remove {
            match store.remove_driver_spec() {
                Ok(()) => {
                    state.last = None;
                    let text = format!("{} is not needed, and was removed", seen.own_path);
                    looked.said.push(Said::Removed(text));
                }
                Err(error) => {
                    let text = format!("{} is not needed: {error}", seen.own_path);
                    say(&mut state, &mut looked, false, &text);
                    return looked;
                }
            }
        }
        looked.stale = verdict.left.is_some();
        match verdict {
            Verdict { left: Some(trouble), .. } => say(&mut state, &mut looked, trouble.stale, &trouble.text),
            Verdict { left: None, .. } if state.told.take().is_some() && looked.said.is_empty() => looked.said.push(Said::Over),
            Verdict { left: None, .. } => {}
        }
        looked
    }

    fn see(&self, store: &Store, tree: &Files, state: &mut State, driver: &str, gpus: &[Gpu]) -> Seen {
        let loaded = proc::loaded_driver(tree).or_else(|| stale::is_version(driver).then(|| driver.to_owned()));
        let mig = self.mig.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let parts = |gpu: &Gpu| mig.get(&gpu.uuid).map(Vec::as_slice);
        let there = gpus.iter().filter(|gpu| gpu.health != Health::Lost);
        let gpus: Vec<nvidia::Gpu> = there
            .map(|gpu| nvidia::Gpu {
                index: gpu.index,
                uuid: Some(gpu.uuid.clone()),
                minor: gpu.minor,
                pci: gpu.pci.clone(),
                mig: proc::mig_of(tree, gpu.minor, parts(gpu)),
            })
            .collect();
        let basis = loaded.map(|driver| Basis {
            root: self.root_state(tree, &gpus),
            gpus,
            driver,
        });
        let specs = store.driver_specs();
        let missing = match basis.as_ref().and_then(|basis| basis.root.as_ref()) {
            Some(root) => self.missing(tree, state, root, &specs),
            None => vec![Vec::new(); specs.files.len()],
        };
        let (own, files): (Vec<_>, Vec<_>) = specs.files.iter().zip(missing).partition(|(file, _)| file.own);
        let own = own.into_iter().next().map(|(file, missing)| Own {
            driver: stale::driver_version(&file.spec).map(str::to_owned),
            as_made: state.made.as_ref() == Some(&file.stamp),
            missing,
        });
        let files = files.into_iter();
        let files = files.map(|(file, missing)| SpecFile {
            path: file.shown.clone(),
            same_folder: file.in_cdi_dir,
            valid: file.spec.is_valid(),
            driver: stale::driver_version(&file.spec).map(str::to_owned),
            devices: file.spec.devices.iter().map(|device| device.name.clone()).collect(),
            missing,
        });
        Seen {
            auto: self.auto,
            driver_root: self.driver_root.clone(),
            looked_at: self
                .sys_root
                .join(self.driver_root.trim_start_matches('/'))
                .display()
                .to_string(),
            own_path: store.own_driver_spec().display().to_string(),
            files: files.collect(),
            basis,
            own,
            last: state.last.clone(),
        }
    }

    fn root_state(&self, tree: &Files, gpus: &[nvidia::Gpu]) -> Option<RootState> {
        let (root, machine) = (Root::open(tree, &self.driver_root)?, Root::open(tree, "/")?);
        let stamp = |path: &str| {
            let (real, _) = root.resolve(path)?;
            let (real, _) = machine.resolve(&root.host(&real))?;
            let metadata = std::fs::symlink_metadata(self.sys_root.join(real.trim_start_matches('/'))).ok()?;
            let modified = metadata.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
            let modified = i128::try_from(modified.as_nanos()).ok()?;
            Some((path.to_owned(), modified, metadata.len()))
        };
        let stamps: Vec<_> = match stamp(CACHE) {
            Some(cache) => vec![cache],
            None => FOLDERS.iter().filter_map(|folder| stamp(folder)).collect(),
        };
        let own = gpus.iter().map(|gpu| format!("/dev/nvidia{}", gpu.minor));
        // The driver divides a GPU before anybody makes these.
        let parts = gpus
            .iter()
            .flat_map(|gpu| gpu.mig.iter().flatten())
            .filter_map(Mig::nodes)
            .flatten();
        let shared = SHARED_DEVICES.iter().map(|path| (*path).to_owned());
        let names: Vec<String> = own.chain(parts).chain(shared).chain(["/dev/nvidiactl".to_owned()]).collect();
        let there = |root: &Root<'_>, path: &String| root.resolve(path).is_some().then(|| root.host(path));
        let nodes: BTreeSet<String> = names
            .iter()
            .flat_map(|path| [there(&root, path), there(&machine, path)])
            .flatten()
            .collect();
        (!stamps.is_empty()).then_some(RootState { stamps, nodes })
    }

    /// For each spec what it names and is not there. What is outside the driver's root the agent may not see.
    fn missing(&self, tree: &Files, state: &mut State, root: &RootState, specs: &Arc<DriverSpecs>) -> Vec<Vec<String>> {
        if let Some((before, known, missing)) = &state.missing
            && before == root
            && Arc::ptr_eq(known, specs)
        {
            return missing.clone();
        }
        let prefix = format!("{}/", self.driver_root.trim_end_matches('/'));
        let missing = specs.files.iter().map(|file| {
            let mut missing = Stale::check(&file.spec, tree).missing;
            missing.retain(|path| path.starts_with(&prefix));
            missing
        });
        let missing: Vec<Vec<String>> = missing.collect();
        state.missing = Some((root.clone(), specs.clone(), missing.clone()));
        missing
    }

    /// Makes the spec and writes it, if it is another one than is there. Then, or if its notes are others than `said`, there is something to say:
    /// notes, or nothing more.
    fn make(
        &self,
        store: &Store,
        tree: &Files,
        basis: &Basis,
        said: &mut Vec<String>,
    ) -> Result<(Option<Stamp>, Option<String>), String> {
        let (vendor, class) = NVIDIA_KIND.split_once('/').unwrap_or((NVIDIA_KIND, "gpu"));
        let options = Options {
            class: class.to_owned(),
            driver_root: self.driver_root.clone(),
            ..Options::new(vendor)
        };
        let Generated { spec, notes } =
            nvidia::generate(tree, &basis.gpus, Some(&basis.driver), &options).map_err(|error| error.to_string())?;
        let notes: Vec<String> = notes.into_iter().chain(tree.troubles()).collect();
        let found = stale::driver_version(&spec);
        if found != Some(&basis.driver) {
            // Before the reboot, or the reload of the module, for which this waits.
            return Err(format!(
                "driver {} is loaded, and the libraries at {} are of {}: load the new module, or reboot",
                basis.driver,
                self.driver_root,
                found.unwrap_or("no version that they say")
            ));
        }
        let written = store
            .write_driver_spec(&spec.print(Format::Json))
            .map_err(|error| error.to_string())?;
        let is_news = written.written || notes != *said;
        let text = match notes.is_empty() {
            true => String::new(),
            false => format!("; {}", notes.join("; ")),
        };
        *said = notes;
        Ok((written.stamp, is_news.then_some(text)))
    }
}

/// Says it, unless it was the last thing that was said.
fn say(state: &mut State, looked: &mut Looked, stale: bool, text: &str) {
    if state.told.as_deref() != Some(text) {
        state.told = Some(text.to_owned());
        looked.said.push(Said::Trouble {
            stale,
            text: text.to_owned(),
        });
    }
}
