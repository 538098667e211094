//! The agent's own CDI spec of NVIDIA's driver: gathers the facts for [`driver_spec`](divvy_agent_core::driver_spec) and carries out its verdict.
//!
//! The probe checks the driver's files, because it can see the machine's root directory. The agent cannot: it talks to the API server and
//! therefore runs without that access. This code runs with each reconciliation.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use divvy_cdi::SpecFormat;
use divvy_cdi::driver_spec::NvmlGpu;
use divvy_cdi::stale;
use divvy_hardware::protocol::{DriverFiles, DriverQuestion, DriverSpec as Made};
use divvy_hardware::{Failure, FailureCode};
use divvy_model::Vendor;

use crate::files::FileError;
use crate::store::{DriverSpecs, FileStamp, Store};
use divvy_agent_core::driver_spec::{
    Attempt, Basis, DriverSpecStep, DriverSpecTrouble, DriverSpecVerdict, ObservedNode, Own, SpecFile, decide,
};

/// The vendor whose driver's libraries come from a CDI spec.
pub(crate) const VENDOR: Vendor = Vendor::Nvidia;

/// The maximum number of bytes of paths in one question, which must fit into one line of the probe's protocol.
const MOST_PATHS: usize = 256 * 1024;

/// What the agent has done so far, and what it knows from sources other than the probe's answers.
#[derive(Debug)]
pub(crate) struct DriverSpecKeeper {
    auto: bool,
    mig_devices: bool,
    /// The GPUs and their MIG devices.
    places: Mutex<Vec<NvmlGpu>>,
    state: Mutex<DriverSpecState>,
}

#[derive(Debug, Default)]
struct DriverSpecState {
    last: Option<Attempt>,
    /// The stamp of the agent's own file after the last attempt.
    made: Option<FileStamp>,
    /// The notes from the last time that the agent's own file was made.
    notes: Vec<String>,
    /// The text of the last reported problem, while the problem exists.
    told: Option<String>,
}

/// News to report to the operator.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// A problem that an operator must solve.
    Trouble(DriverSpecTrouble),
    /// The agent made a spec.
    Made(String),
    /// The agent removed its own spec.
    Removed(String),
    /// The last problem is solved.
    Over,
}

/// The result of a check.
#[derive(Debug, Default)]
pub(crate) struct CheckedSpec {
    /// Set if containers get no libraries, or the wrong ones.
    pub(crate) trouble: Option<DriverSpecTrouble>,
    /// News that was not reported before.
    pub(crate) news: Vec<News>,
}

/// The question for the probe, and the specs that it asks about.
#[derive(Debug)]
pub(crate) struct DriverSpecQuestion {
    specs: Arc<DriverSpecs>,
    pub(crate) asked: DriverQuestion,
}

/// A spec that the probe should make.
#[derive(Debug)]
pub(crate) struct SpecOrder {
    seen: ObservedNode,
    trouble: DriverSpecTrouble,
    pub(crate) basis: Basis,
}

impl DriverSpecKeeper {
    /// Create the state for `--driver-spec` and `--mig-strategy`.
    pub(crate) fn new(auto: bool, mig_devices: bool) -> DriverSpecKeeper {
        DriverSpecKeeper {
            auto,
            mig_devices,
            places: Mutex::default(),
            state: Mutex::default(),
        }
    }

    /// Store the GPUs and the MIG devices that the driver's library reports, for the next check. Report whether they changed.
    pub(crate) fn set_places(&self, places: Vec<NvmlGpu>) -> bool {
        let mut known = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let differs = *known != places;
        *known = places;
        differs
    }

    /// Build the question for the probe. `None` if there is no GPU. `driver` is the version that the driver's library reports. Blocks
    /// on files.
    pub(crate) fn question(&self, store: &Store, driver: &str) -> Option<DriverSpecQuestion> {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if places.is_empty() {
            return None;
        }
        let specs = store.driver_specs();
        let paths: BTreeSet<&String> = specs.files.iter().flat_map(|file| stale::host_paths(&file.spec)).collect();
        let mut bytes = 0;
        let paths = paths.into_iter().take_while(|path| {
            bytes += path.len() + 4;
            bytes <= MOST_PATHS
        });
        let asked = DriverQuestion {
            version: driver.to_owned(),
            gpus: places,
            paths: paths.cloned().collect(),
        };
        Some(DriverSpecQuestion { asked, specs })
    }

    /// Decide from the probe's answer, and carry out every verdict that needs no new spec. An `Err` asks the caller to have a
    /// spec made first. Blocks on files.
    pub(crate) fn check(
        &self,
        store: &Store,
        question: DriverSpecQuestion,
        answer: Result<DriverFiles, Failure>,
    ) -> Result<Option<CheckedSpec>, Box<SpecOrder>> {
        let (files, blind) = match answer {
            Ok(files) => (files, None),
            // A probe that does not know this question: agent and probe are not always upgraded at the same time.
            Err(failure) if failure.code == FailureCode::Protocol => {
                let text = "divvy-probe is older than the agent and cannot check the driver's files".to_owned();
                (blind(&question.asked), Some(text))
            }
            // While the probe does not answer, keep what was right a moment ago.
            Err(failure) => {
                tracing::debug!("the state of the driver's files is unknown: {failure}");
                return Ok(None);
            }
        };
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = self.see(store, &state, &question, files, blind);
        drop(state);
        let verdict = decide(&seen);
        match (verdict, seen.basis.clone()) {
            (
                DriverSpecVerdict {
                    step: DriverSpecStep::Make(trouble),
                    ..
                },
                Some(basis),
            ) => Err(Box::new(SpecOrder { seen, trouble, basis })),
            (verdict, _) => Ok(Some(self.done(store, &seen, verdict, CheckedSpec::default()))),
        }
    }

    /// Continue after the probe has made the spec or has failed to make it. Blocks on files.
    pub(crate) fn made(&self, store: &Store, wanted: SpecOrder, made: Result<Made, Failure>) -> Option<CheckedSpec> {
        let SpecOrder {
            mut seen,
            trouble,
            basis,
        } = wanted;
        let mut checked = CheckedSpec::default();
        let written = match made {
            Ok(made) => self.write(store, made).map_err(|error| error.to_string()),
            Err(failure) if failure.code == FailureCode::DriverFiles => Err(failure.text),
            Err(failure) => {
                tracing::debug!("the CDI spec of the driver could not be made: {failure}");
                return None;
            }
        };
        let failure = match written {
            Ok(said) => {
                if let Some(notes) = said {
                    let made = format!(
                        "{} was made for driver {}{notes}. Reason: {}",
                        seen.own_path, basis.driver, trouble.text
                    );
                    checked.news.push(News::Made(made));
                }
                seen.own = Some(Own {
                    driver: Some(basis.driver.clone()),
                    as_made: true,
                    missing: Vec::new(),
                });
                None
            }
            Err(text) => Some(text),
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.last = Some(Attempt { basis, failure });
        seen.last.clone_from(&state.last);
        drop(state);
        let verdict = decide(&seen);
        Some(self.done(store, &seen, verdict, checked))
    }

    fn done(&self, store: &Store, seen: &ObservedNode, verdict: DriverSpecVerdict, mut checked: CheckedSpec) -> CheckedSpec {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if verdict.step == DriverSpecStep::Remove {
            match store.remove_driver_spec() {
                Ok(()) => {
                    state.last = None;
                    let text = format!("{} is no longer needed and was removed", seen.own_path);
                    checked.news.push(News::Removed(text));
                }
                Err(error) => {
                    let text = format!("{} is no longer needed, but could not be removed: {error}", seen.own_path);
                    report(&mut state, &mut checked, DriverSpecTrouble { stale: false, text });
                    return checked;
                }
            }
        }
        match verdict.left {
            Some(trouble) => report(&mut state, &mut checked, trouble),
            None if state.told.take().is_some() && checked.news.is_empty() => checked.news.push(News::Over),
            None => {}
        }
        checked
    }

    fn see(
        &self,
        store: &Store,
        state: &DriverSpecState,
        question: &DriverSpecQuestion,
        found: DriverFiles,
        blind: Option<String>,
    ) -> ObservedNode {
        let gone: BTreeSet<&String> = found.missing.iter().collect();
        let missing = |spec| {
            let paths = stale::host_paths(spec).into_iter();
            paths.filter(|path| gone.contains(path)).cloned().collect::<Vec<_>>()
        };
        let (own, files): (Vec<_>, Vec<_>) = question.specs.files.iter().partition(|file| file.own);
        let own = own.into_iter().next().map(|file| Own {
            driver: stale::driver_version(&file.spec).map(str::to_owned),
            as_made: state.made.as_ref() == Some(&file.stamp),
            missing: missing(&file.spec),
        });
        let files = files.into_iter().map(|file| SpecFile {
            path: file.shown.clone(),
            same_directory: file.in_cdi_dir,
            valid: file.spec.is_valid(),
            driver: stale::driver_version(&file.spec).map(str::to_owned),
            devices: file.spec.devices.iter().map(|device| device.name.clone()).collect(),
            missing: missing(&file.spec),
        });
        ObservedNode {
            auto: self.auto,
            mig_devices: self.mig_devices,
            searched: found.looked_at,
            blind,
            own_path: store.own_driver_spec().display().to_string(),
            files: files.collect(),
            basis: found.basis,
            own,
            last: state.last.clone(),
        }
    }

    /// Write the spec if the file has a different text. If the file or the spec's notes changed, return the text to report: the
    /// notes, or an empty string.
    fn write(&self, store: &Store, made: Made) -> Result<Option<String>, FileError> {
        let written = store.write_driver_spec(&made.spec.print(SpecFormat::Json))?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = written.written || made.notes != state.notes;
        let text = if made.notes.is_empty() {
            String::new()
        } else {
            format!("; {}", made.notes.join("; "))
        };
        state.notes = made.notes;
        state.made = written.stamp;
        Ok(is_news.then_some(text))
    }
}

/// Return what the agent knows without the probe.
fn blind(asked: &DriverQuestion) -> DriverFiles {
    let gpus = asked.gpus.iter().map(|gpu| divvy_cdi::generate::nvidia::NvidiaGpu {
        index: gpu.index,
        uuid: Some(gpu.uuid.clone()),
        minor: gpu.minor,
        pci: gpu.pci.clone(),
        mig: gpu.mig.as_ref().map(|_| Vec::new()),
    });
    DriverFiles {
        basis: divvy_cdi::driver_version::is_version(&asked.version).then(|| Basis {
            driver: asked.version.clone(),
            gpus: gpus.collect(),
            driver_root: "/".to_owned(),
            root: None,
        }),
        ..DriverFiles::default()
    }
}

/// Report a problem, unless it is the same as the last one reported.
fn report(state: &mut DriverSpecState, checked: &mut CheckedSpec, trouble: DriverSpecTrouble) {
    if state.told.as_ref() != Some(&trouble.text) {
        state.told = Some(trouble.text.clone());
        checked.news.push(News::Trouble(trouble.clone()));
    }
    checked.trouble = Some(trouble);
}
