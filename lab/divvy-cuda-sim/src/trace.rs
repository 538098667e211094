//! What a test sees and decides of each call: the log of calls, and errors that are injected.

use std::collections::BTreeMap;
use std::env;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::codes::Code;

static LOG: OnceLock<Option<File>> = OnceLock::new();
static RULES: OnceLock<Vec<Rule>> = OnceLock::new();
/// How often each name that a rule has was called.
static CALLS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// A call of this name fails; `None` means each call.
#[derive(Debug, PartialEq, Eq)]
struct Rule {
    name: String,
    nth: Option<u64>,
    code: Code,
}

/// Parse a rule such as `cuMemAlloc_v2:3=2`, or `cuMemAlloc_v2:*=2`.
fn parse(text: &str) -> Option<Rule> {
    let (call, code) = text.split_once('=')?;
    let (name, nth) = call.split_once(':')?;
    Some(Rule {
        name: name.to_owned(),
        nth: match nth {
            "*" => None,
            nth => Some(nth.parse().ok()?),
        },
        code: code.parse().ok()?,
    })
}

fn rules() -> Vec<Rule> {
    let Ok(text) = env::var("DIVVY_CUDA_SIM_FAIL") else {
        return Vec::new();
    };
    let rules = text.split(',').filter(|rule| !rule.is_empty());
    rules
        .filter_map(|rule| {
            let parsed = parse(rule);
            if parsed.is_none() {
                complain(&format!("DIVVY_CUDA_SIM_FAIL has {rule:?}; write NAME:NUMBER=CODE"));
            }
            parsed
        })
        .collect()
}

/// Count a call. Return the error with which it must fail, if it must.
pub(crate) fn injected(name: &'static str) -> Option<Code> {
    let mut mine = RULES.get_or_init(rules).iter().filter(|rule| rule.name == name).peekable();
    mine.peek()?;
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = calls.entry(name).or_default();
    *count += 1;
    let nth = *count;
    mine.find(|rule| rule.nth.is_none_or(|wanted| wanted == nth))
        .map(|rule| rule.code)
}

/// Append a line to the log of calls: PID, name, code. One write makes one line, also if several processes write.
pub(crate) fn log(name: &str, code: Code) {
    let open = || {
        let path = env::var_os("DIVVY_CUDA_SIM_LOG")?;
        let opened = OpenOptions::new().append(true).create(true).open(&path);
        opened
            .inspect_err(|error| complain(&format!("the log {}: {error}", path.display())))
            .ok()
    };
    let Some(mut file) = LOG.get_or_init(open).as_ref() else {
        return;
    };
    let line = format!("{} {name} {code}\n", std::process::id());
    if let Err(error) = file.write_all(line.as_bytes()) {
        complain(&format!("the log: {error}"));
    }
}

/// Print a message to standard error. CUDA's errors carry no text, and a mistake in the description must not look like a missing driver.
pub(crate) fn complain(text: &str) {
    // If standard error is closed, there is no other place to report it.
    let _ = writeln!(std::io::stderr().lock(), "divvy-cuda-sim: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_names_a_call_its_number_and_a_code() {
        let rule = |name: &str, nth, code| {
            Some(Rule {
                name: name.to_owned(),
                nth,
                code,
            })
        };
        let cases = [
            ("cuInit:1=999", rule("cuInit", Some(1), 999)),
            ("cuMemFree_v2:*=1", rule("cuMemFree_v2", None, 1)),
            ("cuInit=1", None),
            ("cuInit:x=1", None),
            ("cuInit:1", None),
        ];
        for (text, parsed) in cases {
            assert_eq!(parse(text), parsed, "{text}");
        }
    }
}
