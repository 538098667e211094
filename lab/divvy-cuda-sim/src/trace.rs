//! What a test sees and decides of each call: the log of calls, and errors that are injected.

use std::collections::BTreeMap;
use std::env;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::codes::CuCode;

static LOG: OnceLock<Option<File>> = OnceLock::new();
static FAIL: OnceLock<Vec<TraceRule<CuCode>>> = OnceLock::new();
static HANG: OnceLock<Vec<TraceRule<()>>> = OnceLock::new();
static WRONG: OnceLock<Vec<TraceRule<(usize, u64)>>> = OnceLock::new();
/// How often each name that a rule has was called, by the variable that has the rule.
static CALLS: Mutex<BTreeMap<(&'static str, String), u64>> = Mutex::new(BTreeMap::new());

/// Something happens at a call or a launch of this name; `None` means each of them.
#[derive(Debug, PartialEq, Eq)]
struct TraceRule<T> {
    name: String,
    nth: Option<u64>,
    what: T,
}

/// Parse a rule such as `cuMemAlloc_v2:3=2`, or `cuMemAlloc_v2:*=2`. What follows the number is parsed by `what`.
fn parse<T>(text: &str, what: impl Fn(&str) -> Option<T>) -> Option<TraceRule<T>> {
    let (name, rest) = text.split_once(':')?;
    let (nth, rest) = rest.split_at(rest.find('=').unwrap_or(rest.len()));
    Some(TraceRule {
        name: name.to_owned(),
        nth: match nth {
            "*" => None,
            nth => Some(nth.parse().ok()?),
        },
        what: what(rest)?,
    })
}

fn code(text: &str) -> Option<CuCode> {
    text.strip_prefix('=')?.parse().ok()
}

fn nothing(text: &str) -> Option<()> {
    text.is_empty().then_some(())
}

/// Parse a parameter and an offset, such as `=0+1234`.
fn place(text: &str) -> Option<(usize, u64)> {
    let (parameter, offset) = text.strip_prefix('=')?.split_once('+')?;
    Some((parameter.parse().ok()?, offset.parse().ok()?))
}

fn rules<T>(variable: &str, form: &str, what: impl Fn(&str) -> Option<T>) -> Vec<TraceRule<T>> {
    let Ok(text) = env::var(variable) else {
        return Vec::new();
    };
    let rules = text.split(',').filter(|rule| !rule.is_empty());
    rules
        .filter_map(|rule| {
            let parsed = parse(rule, &what);
            if parsed.is_none() {
                complain(&format!("{variable} has {rule:?}; write {form}"));
            }
            parsed
        })
        .collect()
}

/// Count a call. Return the rule that is about it, if there is one.
fn hit<'r, T>(variable: &'static str, rules: &'r [TraceRule<T>], name: &str) -> Option<&'r T> {
    let mut mine = rules.iter().filter(|rule| rule.name == name).peekable();
    mine.peek()?;
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = calls.entry((variable, name.to_owned())).or_default();
    *count += 1;
    let nth = *count;
    mine.find(|rule| rule.nth.is_none_or(|wanted| wanted == nth))
        .map(|rule| &rule.what)
}

/// Count a call or a launch. Return the error with which it must fail, if it must.
pub(crate) fn injected(name: &str) -> Option<CuCode> {
    const VARIABLE: &str = "DIVVY_CUDA_SIM_FAIL";
    let rules = FAIL.get_or_init(|| rules(VARIABLE, "NAME:NUMBER=CODE", code));
    hit(VARIABLE, rules, name).copied()
}

/// Count a call or a launch. Report whether it must never end.
pub(crate) fn hangs(name: &str) -> bool {
    const VARIABLE: &str = "DIVVY_CUDA_SIM_HANG";
    let rules = HANG.get_or_init(|| rules(VARIABLE, "NAME:NUMBER", nothing));
    hit(VARIABLE, rules, name).is_some()
}

/// Count a launch or a copy. Return the parameter that points to memory of which a byte must be wrong afterwards, and the offset of the byte.
pub(crate) fn wrong(name: &str) -> Option<(usize, u64)> {
    const VARIABLE: &str = "DIVVY_CUDA_SIM_WRONG";
    let rules = WRONG.get_or_init(|| rules(VARIABLE, "NAME:NUMBER=PARAMETER+OFFSET", place));
    hit(VARIABLE, rules, name).copied()
}

/// Report whether the driver must not have a function or a symbol.
pub(crate) fn is_left_out(name: &str) -> bool {
    env::var("DIVVY_CUDA_SIM_MISSING").is_ok_and(|text| text.split(',').any(|listed| listed == name))
}

/// Append a line to the log of calls: PID, name, code. One write makes one line, also if several processes write.
pub(crate) fn log(name: &str, code: CuCode) {
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
    fn a_rule_names_a_call_its_number_and_what_happens() {
        fn rule<T>(name: &str, nth: Option<u64>, what: T) -> Option<TraceRule<T>> {
            Some(TraceRule {
                name: name.to_owned(),
                nth,
                what,
            })
        }
        let cases = [
            ("cuInit:1=999", rule("cuInit", Some(1), 999)),
            ("cuMemFree_v2:*=1", rule("cuMemFree_v2", None, 1)),
            ("cuInit=1", None),
            ("cuInit:x=1", None),
            ("cuInit:1", None),
        ];
        for (text, parsed) in cases {
            assert_eq!(parse(text, code), parsed, "{text}");
        }
        assert_eq!(parse("fill:2", nothing), rule("fill", Some(2), ()));
        assert_eq!(parse("fill:2=1", nothing), None);
        assert_eq!(parse("fill:3=0+1234", place), rule("fill", Some(3), (0, 1234)));
        assert_eq!(parse("fill:3=+1", place), None);
    }
}
