//! The intended differences between Divvy and NVIDIA's device plugin.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};

use crate::play::PlayOutcome;

/// The scenarios with intended differences.
#[derive(Debug)]
pub(crate) struct Intended {
    reasons: BTreeMap<String, String>,
    /// What Divvy does in these scenarios. Without this record, the reason for a difference would
    /// also excuse a new fault.
    outcomes: Vec<PlayOutcome>,
}

impl Intended {
    pub(crate) fn read() -> Result<Intended> {
        Ok(Intended {
            reasons: toml::from_str(include_str!("../intended.toml")).context("intended.toml")?,
            outcomes: serde_json::from_str(include_str!("../data/divvy.json")).context("data/divvy.json")?,
        })
    }

    /// Return the names of the scenarios.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.reasons.keys().map(String::as_str)
    }

    /// Return the reason for a difference in a scenario.
    pub(crate) fn reason(&self, scenario: &str) -> Option<&str> {
        self.reasons.get(scenario).map(String::as_str)
    }

    /// Return how Divvy's outcome of a scenario with an intended difference differs from the recorded outcome of Divvy.
    pub(crate) fn surprises(&self, ours: &PlayOutcome) -> Vec<String> {
        match self.outcomes.iter().find(|outcome| outcome.name == ours.name) {
            Some(recorded) => differences(ours, recorded),
            None => vec!["data/divvy.json does not contain it; `divvy-compare record --intended` writes that file".to_owned()],
        }
    }
}

/// Return the differences between two outcomes.
pub(crate) fn differences(ours: &PlayOutcome, theirs: &PlayOutcome) -> Vec<String> {
    let mut differences = Vec::new();
    let mut differ = |what: &str, ours: String, theirs: String| {
        if ours != theirs {
            differences.push(format!("{what}: ours {ours}\n  {what}: theirs {theirs}"));
        }
    };
    differ("exit", format!("{:?}", ours.exit), format!("{:?}", theirs.exit));
    // Where NVIDIA's program says why it ends, ours says the same, and may add what to do.
    let says_the_same = match (&ours.error, &theirs.error) {
        (Some(our), Some(their)) => our.contains(&without_path(their)),
        (our, their) => our == their,
    };
    if !says_the_same {
        differ("error", format!("{:?}", ours.error), format!("{:?}", theirs.error));
    }
    differ(
        "registrations",
        format!("{:?}", ours.registrations),
        format!("{:?}", theirs.registrations),
    );
    differ("devices", format!("{:?}", ours.devices), format!("{:?}", theirs.devices));
    let pairs = ours.answers.iter().zip(&theirs.answers).enumerate();
    for (at, (our, their)) in pairs {
        differ(&format!("step {}", at + 1), our.to_string(), their.to_string());
    }
    differ("steps", ours.answers.len().to_string(), theirs.answers.len().to_string());
    differences
}

/// The parts of NVIDIA's errors that name the functions that passed the error on, and not the cause.
const PASSED: [&str; 8] = [
    "error building device map",
    "error building device map from config.resources",
    "error building MIG device map",
    "invalid MIG configuration",
    "at least one device with migEnabled=true was not configured correctly",
    "error visiting devices",
    "error visiting device",
    "error visiting MIG device",
];

/// Return an error without the functions that passed it on.
fn without_path(error: &str) -> String {
    let parts = error.split(": ").filter(|part| !PASSED.contains(part));
    parts.collect::<Vec<_>>().join(": ")
}
