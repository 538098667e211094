//! `cargo xtask size`: the lines of Rust of each crate.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// The most lines of Rust that this repository may have (CONTRIBUTING.md).
const CEILING: usize = 300_000;

/// The lines of a crate: what its programs are made of, and tests, benches, and examples.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Lines {
    code: usize,
    tests: usize,
}

impl Lines {
    fn sum(self) -> usize {
        self.code + self.tests
    }
}

/// Return the table of the files that git knows.
pub(crate) fn table() -> Result<String> {
    let output = Command::new("git")
        .args(["ls-files", "*.rs"])
        .output()
        .context("git could not be run")?;
    ensure!(output.status.success(), "git ls-files failed; run this in the repository");
    let mut crates: BTreeMap<String, Lines> = BTreeMap::new();
    for file in String::from_utf8(output.stdout)?.lines() {
        // A file that was removed and not committed yet has no lines.
        let Ok(text) = std::fs::read_to_string(file) else { continue };
        let lines = crates.entry(crate_of(file)).or_default();
        let (code, tests) = divided(file, &text);
        lines.code += code;
        lines.tests += tests;
    }
    Ok(shown(crates))
}

/// Return the directory of the crate of a file.
fn crate_of(file: &str) -> String {
    let mut parts = file.split('/');
    match (parts.next(), parts.next()) {
        (Some(group @ ("crates" | "lab")), Some(name)) => format!("{group}/{name}"),
        (Some(first), _) => first.to_owned(),
        (None, _) => String::new(),
    }
}

/// Return how many lines of a file are code, and how many are tests: all lines of a test file, or those from the file's module `tests` on, which is last.
fn divided(file: &str, text: &str) -> (usize, usize) {
    let all = text.lines().count();
    let is_test = ["/tests/", "/benches/", "/examples/", "/tests.rs"]
        .iter()
        .any(|part| file.contains(part));
    let first = text
        .lines()
        .position(|line| line == "mod tests {")
        .map(|at| at.saturating_sub(1));
    match (is_test, first) {
        (true, _) => (0, all),
        (false, Some(first)) => (first, all - first),
        (false, None) => (all, 0),
    }
}

fn shown(crates: BTreeMap<String, Lines>) -> String {
    let mut rows: Vec<(String, Lines)> = crates.into_iter().collect();
    rows.sort_by_key(|(_, lines)| std::cmp::Reverse(lines.sum()));
    let sum = |of: fn(&Lines) -> usize| rows.iter().map(|(_, lines)| of(lines)).sum();
    let total = Lines {
        code: sum(|lines| lines.code),
        tests: sum(|lines| lines.tests),
    };
    let mut text = format!("{:>8} {:>8} {:>8}\n", "code", "tests", "lines");
    let all = format!("all (at most {CEILING})");
    for (name, lines) in rows.iter().chain([&(all, total)]) {
        let _ = writeln!(text, "{:>8} {:>8} {:>8}  {name}", lines.code, lines.tests, lines.sum());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_code_or_tests() {
        let with_tests = "#[cfg(test)]\nmod named;\nfn a() {}\n#[cfg(test)]\nmod tests {\n}\n";
        for (file, text, lines) in [
            ("crates/divvy-x/src/a.rs", "fn a() {}\n", (1, 0)),
            ("crates/divvy-x/src/a.rs", with_tests, (3, 3)),
            ("crates/divvy-x/tests/it/a.rs", with_tests, (0, 6)),
            ("crates/divvy-x/src/a/tests.rs", "\n", (0, 1)),
        ] {
            assert_eq!(divided(file, text), lines, "{file}");
        }
        assert_eq!(
            (crate_of("lab/divvy-y/src/a.rs"), crate_of("xtask/src/main.rs")),
            ("lab/divvy-y".to_owned(), "xtask".to_owned())
        );
    }
}
