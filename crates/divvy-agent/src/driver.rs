//! The agent's own CDI spec of the driver: what [`divvy_agent_core::driver`](divvy_agent_core::driver) decides by, and what it wants done.
//!
//! The driver's files are the probe's to look at: it sees the machine's root in any case, and the agent, which talks to the API server, does not.
//! This runs with each reconciliation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use divvy_cdi::Format;
use divvy_cdi::driver::Place;
use divvy_cdi::stale;
use divvy_hardware::protocol::{DriverFiles, DriverQuestion, DriverSpec as Made};
use divvy_hardware::{Code, Failure};
use divvy_model::{Gpu, Health, MigDevice};

use crate::store::{DriverSpecs, Stamp, Store};
use divvy_agent_core::driver::{Attempt, Basis, Own, Seen, SpecFile, Step, Trouble, Verdict, decide};

/// Most bytes of paths in a question, which has to fit into a line of the protocol.
const MOST_PATHS: usize = 256 * 1024;

/// What was done, and what is known besides the probe's answers.
#[derive(Debug)]
pub(crate) struct DriverSpec {
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
    /// What was said of the own file when it was made last.
    notes: Vec<String>,
    /// What was said last.
    told: Option<String>,
}

/// What somebody should hear.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// Something must be done by somebody.
    Trouble(Trouble),
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
    pub(crate) trouble: Option<Trouble>,
    /// Only what was not said before.
    pub(crate) said: Vec<Said>,
}

/// What is asked of the probe, and what it is about.
#[derive(Debug)]
pub(crate) struct Question {
    specs: Arc<DriverSpecs>,
    pub(crate) asked: DriverQuestion,
}

/// A spec that is to be made.
#[derive(Debug)]
pub(crate) struct Wanted {
    seen: Seen,
    trouble: Trouble,
    pub(crate) basis: Basis,
}

impl DriverSpec {
    pub(crate) fn new(auto: bool) -> DriverSpec {
        DriverSpec {
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

    /// What the probe is to look at. `driver` is what the driver's library says of its version. Blocks on files.
    pub(crate) fn question(&self, store: &Store, driver: &str, gpus: &[Gpu]) -> Question {
        let specs = store.driver_specs();
        let mig = self.mig.lock().unwrap_or_else(PoisonError::into_inner);
        let there = gpus.iter().filter(|gpu| gpu.health != Health::Lost);
        let places = there.map(|gpu| Place {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            minor: gpu.minor,
            pci: gpu.pci.clone(),
            mig: mig.get(&gpu.uuid).cloned(),
        });
        let paths: BTreeSet<&String> = specs.files.iter().flat_map(|file| stale::host_paths(&file.spec)).collect();
        let mut bytes = 0;
        let paths = paths.into_iter().take_while(|path| {
            bytes += path.len() + 4;
            bytes <= MOST_PATHS
        });
        Question {
            asked: DriverQuestion {
                version: driver.to_owned(),
                gpus: places.collect(),
                paths: paths.cloned().collect(),
            },
            specs,
        }
    }

    /// Decides by the probe's answer, and does what needs no spec. `Err` is a spec that is to be made first. Blocks on files.
    pub(crate) fn look(
        &self,
        store: &Store,
        question: Question,
        answer: Result<DriverFiles, Failure>,
    ) -> Result<Option<Looked>, Box<Wanted>> {
        let (files, blind) = match answer {
            Ok(files) => (files, None),
            // A probe that knows no such question: agents and probes are not replaced in the same moment.
            Err(failure) if failure.code == Code::Protocol => {
                let text = "divvy-probe is older than the agent and does not look at the driver's files yet".to_owned();
                (blind(&question.asked), Some(text))
            }
            // What was right a moment ago is not wrong because the probe does not answer now.
            Err(failure) => {
                tracing::debug!("the driver's files are not known: {failure}");
                return Ok(None);
            }
        };
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = self.see(store, &state, &question, files, blind);
        drop(state);
        let verdict = decide(&seen);
        match (verdict, seen.basis.clone()) {
            (
                Verdict {
                    step: Step::Make(trouble),
                    ..
                },
                Some(basis),
            ) => Err(Box::new(Wanted { seen, trouble, basis })),
            (verdict, _) => Ok(Some(self.done(store, &seen, verdict, Looked::default()))),
        }
    }

    /// The probe made the spec, or could not. Blocks on files.
    pub(crate) fn made(&self, store: &Store, wanted: Wanted, made: Result<Made, Failure>) -> Option<Looked> {
        let Wanted {
            mut seen,
            trouble,
            basis,
        } = wanted;
        let mut looked = Looked::default();
        let outcome = match made {
            Ok(made) => self.write(store, made),
            Err(failure) if failure.code == Code::DriverFiles => Err(failure.text),
            Err(failure) => {
                tracing::debug!("the CDI spec of the driver could not be made: {failure}");
                return None;
            }
        };
        let outcome = outcome.map(|said| {
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
        });
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.last = Some(Attempt { basis, outcome });
        seen.last.clone_from(&state.last);
        drop(state);
        let verdict = decide(&seen);
        Some(self.done(store, &seen, verdict, looked))
    }

    fn done(&self, store: &Store, seen: &Seen, verdict: Verdict, mut looked: Looked) -> Looked {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if verdict.step == Step::Remove {
            match store.remove_driver_spec() {
                Ok(()) => {
                    state.last = None;
                    let text = format!("{} is not needed, and was removed", seen.own_path);
                    looked.said.push(Said::Removed(text));
                }
                Err(error) => {
                    let text = format!("{} is not needed: {error}", seen.own_path);
                    say(&mut state, &mut looked, Trouble { stale: false, text });
                    return looked;
                }
            }
        }
        match verdict.left {
            Some(trouble) => say(&mut state, &mut looked, trouble),
            None if state.told.take().is_some() && looked.said.is_empty() => looked.said.push(Said::Over),
            None => {}
        }
        looked
    }

    fn see(&self, store: &Store, state: &State, question: &Question, found: DriverFiles, blind: Option<String>) -> Seen {
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
            same_folder: file.in_cdi_dir,
            valid: file.spec.is_valid(),
            driver: stale::driver_version(&file.spec).map(str::to_owned),
            devices: file.spec.devices.iter().map(|device| device.name.clone()).collect(),
            missing: missing(&file.spec),
        });
        Seen {
            auto: self.auto,
            looked_at: found.looked_at,
            blind,
            own_path: store.own_driver_spec().display().to_string(),
            files: files.collect(),
            basis: found.basis,
            own,
            last: state.last.clone(),
        }
    }

    /// Writes it, if it is another one than is there. Then, or if its notes are others than were said, there is something to say: notes, or nothing
    /// more.
    fn write(&self, store: &Store, made: Made) -> Result<Option<String>, String> {
        let written = store
            .write_driver_spec(&made.spec.print(Format::Json))
            .map_err(|error| error.to_string())?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = written.written || made.notes != state.notes;
        let text = match made.notes.is_empty() {
            true => String::new(),
            false => format!("; {}", made.notes.join("; ")),
        };
        state.notes = made.notes;
        state.made = written.stamp;
        Ok(is_news.then_some(text))
    }
}

/// What is known without the probe.
fn blind(asked: &DriverQuestion) -> DriverFiles {
    let gpus = asked.gpus.iter().map(|gpu| divvy_cdi::generate::nvidia::Gpu {
        index: gpu.index,
        uuid: Some(gpu.uuid.clone()),
        minor: gpu.minor,
        pci: gpu.pci.clone(),
        mig: gpu.mig.as_ref().map(|_| Vec::new()),
    });
    DriverFiles {
        basis: stale::is_version(&asked.version).then(|| Basis {
            driver: asked.version.clone(),
            gpus: gpus.collect(),
            driver_root: "/".to_owned(),
            root: None,
        }),
        ..DriverFiles::default()
    }
}

/// Says it, unless it was the last thing that was said.
fn say(state: &mut State, looked: &mut Looked, trouble: Trouble) {
    if state.told.as_ref() != Some(&trouble.text) {
        state.told = Some(trouble.text.clone());
        looked.said.push(Said::Trouble(trouble.clone()));
    }
    looked.trouble = Some(trouble);
}
