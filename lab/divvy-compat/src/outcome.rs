//! What a program found out, and how two runs of it compare.
//!
//! A program prints a line for each fact: its name and its value. The name decides how the guard may change it:
//!
//! | name | with the driver alone | with the guard |
//! |---|---|---|
//! | `memory:…` | the memory of the GPU | the share |
//! | `above-share:…` | `0`: success | an error about memory |
//! | another one | any value | the same value |
//!
//! A value that begins with `error` is that of a step that the simulated driver does not allow. Such a value must be the same in both runs.

use std::collections::BTreeMap;
use std::fmt;
use std::process::Output;

/// What the GPU has, in bytes.
pub(crate) const GPU: u64 = 8 << 30;
/// What the pod may use, in bytes.
pub(crate) const SHARE: u64 = 1 << 30;

/// What the guard is expected to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpectedOutcome {
    /// The program sees the share, and gets no more than that.
    Held,
    /// The program does not notice the guard, because it does not use the guard's libraries.
    AsDriver,
}

/// What a program has printed, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProgramOutcome {
    /// The exit status; `None`: a signal.
    code: Option<i32>,
    facts: BTreeMap<String, String>,
    /// The last lines of standard error.
    errors: String,
}

impl ProgramOutcome {
    pub(crate) fn of(output: &Output) -> ProgramOutcome {
        let (said, errors) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        let facts = said.lines().filter_map(|line| line.split_once(' '));
        let errors: Vec<&str> = errors.lines().collect();
        ProgramOutcome {
            code: output.status.code(),
            facts: facts.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            errors: errors[errors.len().saturating_sub(6)..].join("\n"),
        }
    }

    pub(crate) fn fact(&self, name: &str) -> &str {
        self.facts.get(name).map_or("", String::as_str)
    }

    /// The errors of the steps that the simulated driver does not allow, each with the steps that it ended.
    pub(crate) fn stops(&self) -> BTreeMap<&str, Vec<&str>> {
        let mut stops: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, value) in self.facts.iter().filter(|(_, value)| is_error(value)) {
            stops.entry(value).or_default().push(name);
        }
        stops
    }

    pub(crate) fn len(&self) -> usize {
        self.facts.len()
    }
}

impl fmt::Display for ProgramOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => write!(f, "exit status {code}")?,
            None => write!(f, "ended by a signal")?,
        }
        for (name, value) in &self.facts {
            write!(f, "\n{name} {value}")?;
        }
        if !self.errors.is_empty() {
            write!(f, "\n{}", self.errors)?;
        }
        Ok(())
    }
}

const MEMORY: &str = "memory:";
const ABOVE: &str = "above-share:";
/// The value of a step that succeeded.
const SUCCESS: &str = "0";

fn is_error(value: &str) -> bool {
    value.starts_with("error")
}

/// Whether a value says that there is not enough memory: CUDA_ERROR_OUT_OF_MEMORY is 2.
fn says_out_of_memory(value: &str) -> bool {
    let value = value.to_lowercase().replace('_', " ");
    value == "2" || value.contains("out of memory") || value.contains("outofmemory")
}

/// Compare a run with the driver alone and a run with the guard. Return what is not as expected. `needs` are the facts that the program must have found with
/// the driver alone, so that the comparison shows something.
pub(crate) fn judge(
    expected: ExpectedOutcome,
    needs: &[(&str, &str)],
    plain: &ProgramOutcome,
    guarded: &ProgramOutcome,
) -> Vec<String> {
    let mut differences = Vec::new();
    for (name, value) in needs {
        if plain.fact(name) != *value {
            differences.push(format!(
                "with the driver alone, {name} is {:?} and not {value:?}, so this row shows nothing",
                plain.fact(name)
            ));
        }
    }
    if plain.code != guarded.code {
        differences.push("the program ends differently".to_owned());
    }
    let names = plain
        .facts
        .keys()
        .chain(guarded.facts.keys().filter(|name| !plain.facts.contains_key(*name)));
    for name in names {
        let (before, now) = (plain.fact(name), guarded.fact(name));
        let problem = match expected {
            ExpectedOutcome::Held if name.starts_with(MEMORY) && !is_error(before) => {
                (before != GPU.to_string() || now != SHARE.to_string()).then_some("it must be the GPU's memory, then the share")
            }
            ExpectedOutcome::Held if name.starts_with(ABOVE) && before == SUCCESS => {
                (!says_out_of_memory(now)).then_some("the guard must refuse it")
            }
            _ => (before != now).then_some("the guard must not change it"),
        };
        if let Some(problem) = problem {
            differences.push(format!(
                "{name}: {before:?} with the driver alone, {now:?} with the guard; {problem}"
            ));
        }
    }
    differences
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::ExpectedOutcome::{AsDriver, Held};
    use super::*;

    fn outcome(status: i32, text: &str) -> ProgramOutcome {
        ProgramOutcome::of(&Output {
            status: ExitStatus::from_raw(status),
            stdout: text.as_bytes().to_vec(),
            stderr: Vec::new(),
        })
    }

    const PLAIN: &str =
        "memory:a 8589934592\nabove-share:b 0\nname A100 x\nmemory:c error 801 not supported\nabove-share:d error E";
    const NEEDS: [(&str, &str); 1] = [("memory:a", "8589934592")];

    /// The number of differences to the run with the driver.
    fn differences(expected: ExpectedOutcome, status: i32, text: &str) -> usize {
        judge(expected, &NEEDS, &outcome(0, PLAIN), &outcome(status, text)).len()
    }

    /// An allocation above the share is refused.
    #[test]
    fn a_held_program_differs_only_by_its_share() {
        let held = PLAIN
            .replace("8589934592", "1073741824")
            .replace("b 0", "b error CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(differences(Held, 0, &held), 0);
        assert_eq!(differences(Held, 0, &held.replace("error CUDA_ERROR_OUT_OF_MEMORY", "2")), 0);
        let cases = [
            ("1073741824", "8589934592"),
            ("1073741824", "2147483648"),
            ("CUDA_ERROR_OUT_OF_MEMORY", "no driver"),
            ("error CUDA_ERROR_OUT_OF_MEMORY", "0"),
            ("name A100 x", "name A100"),
            ("name A100 x\n", ""),
            ("801", "2"),
            ("error E", "0"),
        ];
        for (from, to) in cases {
            assert!(held.contains(from));
            assert_eq!(differences(Held, 0, &held.replace(from, to)), 1, "{from} -> {to}");
        }
        assert_eq!(differences(Held, 0, &format!("{held}\nmore 1")), 1, "a new fact");
        // The wait status of exit status 1, and of a segmentation fault.
        assert_eq!([256, 11].map(|status| differences(Held, status, &held)), [1, 1]);
    }

    #[test]
    fn a_program_without_the_guard_must_not_differ_at_all() {
        assert_eq!(differences(AsDriver, 0, PLAIN), 0);
        assert_eq!(differences(AsDriver, 0, &PLAIN.replace("8589934592", "1073741824")), 1);
        assert_eq!(differences(AsDriver, 256, PLAIN), 1);
    }

    #[test]
    fn steps_with_the_same_error_are_listed_together() {
        let outcome = outcome(0, "a 1\nb error X\nc error Y\nd error X\n");
        let stops: Vec<_> = outcome.stops().into_iter().collect();
        assert_eq!(stops, [("error X", vec!["b", "d"]), ("error Y", vec!["c"])]);
    }

    /// The program ran with the driver alone, without the guard.
    #[test]
    fn a_program_the_driver_gives_nothing_shows_nothing() {
        let nothing = outcome(0, "not-loaded 1");
        for expected in [Held, AsDriver] {
            assert_eq!(judge(expected, &NEEDS, &nothing, &nothing).len(), 1);
            assert_eq!(judge(expected, &[], &nothing, &nothing).len(), 0);
        }
    }
}
