//! Where Divvy differs from NVIDIA's plugin by intent.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::play::Outcome;

/// The reasons, by scenario.
#[derive(Debug)]
pub(crate) struct Intended(BTreeMap<String, String>);

impl Intended {
    pub(crate) fn read() -> Result<Intended> {
        Ok(Intended(toml::from_str(include_str!("../intended.toml"))?))
    }

    pub(crate) fn reason(&self, scenario: &str) -> Option<&str> {
        self.0.get(scenario).map(String::as_str)
    }

    /// Return the differences.
    #[expect(clippy::unused_self, reason = "the comparison belongs to the list")]
    pub(crate) fn compare(&self, ours: &Outcome, theirs: &Outcome) -> Vec<String> {
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
}

/// What NVIDIA's errors say about the functions that they passed through, and not about the cause.
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

/// Return an error without the functions that it passed through.
fn without_path(error: &str) -> String {
    let parts = error.split(": ").filter(|part| !PASSED.contains(part));
    parts.collect::<Vec<_>>().join(": ")
}
