//! Explanations of error texts in logs: the check to which a text belongs, its meaning, and what to type next.

mod texts;

use std::fmt::Write as _;
use std::sync::LazyLock;

use serde::Serialize;

pub use texts::ALL;

use crate::report::wrapped;

/// The explanation of a group of error texts with the same cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The id of the check that detects the cause. `None` if no check can detect it.
    pub check: Option<&'static str>,
    /// Substrings of a log line, at least one of which must match. `*` matches any text. Case, quotes, and backslashes are
    /// ignored, because loggers differ in them.
    #[serde(skip)]
    pub texts: &'static [&'static str],
    /// What happened.
    pub means: &'static str,
    /// What to type next.
    pub fix: &'static str,
}

/// An explanation, and the place in the log where its text was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// The explanation of the text.
    #[serde(flatten)]
    pub explanation: &'static Explanation,
    /// The first matching line, without control characters, and limited to 240 characters.
    pub line: String,
    /// The number of that line, from 1.
    pub number: usize,
    /// The number of matching lines.
    pub count: usize,
}

/// Return the explanation of a line, or `None` if the line contains no known error text. If several explanations match, the first
/// one in the table is returned.
pub fn line(line: &str) -> Option<&'static Explanation> {
    // Normalize the texts once, not for each line of a log.
    static PLAIN: LazyLock<Vec<(&Explanation, Vec<String>)>> = LazyLock::new(|| {
        ALL.iter()
            .map(|one| (one, one.texts.iter().map(|text| plain(text)).collect()))
            .collect()
    });
    let line = plain(line);
    let mut known = PLAIN.iter();
    known
        .find(|(_, texts)| texts.iter().any(|text| matches(&line, text)))
        .map(|(explanation, _)| *explanation)
}

/// The explanations found in a log, collected line by line.
#[derive(Debug, Clone, Default)]
pub struct Log {
    lines: usize,
    found: Vec<Explained>,
}

/// The indentation of the second and further lines of a wrapped text, which start below the text and not below its name
/// (`text`, `means`, or `fix`).
const HANGING: &str = "           ";
/// The largest number of characters of a log line to show.
const SHOWN: usize = 240;

impl Log {
    /// Process the next line of the log.
    pub fn read(&mut self, text: &str) {
        self.lines += 1;
        let Some(explanation) = line(text) else { return };
        match self.found.iter_mut().find(|found| found.explanation == explanation) {
            Some(found) => found.count += 1,
            None => self.found.push(Explained {
                explanation,
                line: text.trim().chars().filter(|c| !c.is_control()).take(SHOWN).collect(),
                number: self.lines,
                count: 1,
            }),
        }
    }

    /// Return the explanations in the order of their first matching lines.
    pub fn found(&self) -> &[Explained] {
        &self.found
    }

    /// Return the explanations as text without line wrapping.
    pub fn text(&self) -> String {
        self.text_within(None)
    }

    /// Return the explanations as text, wrapped to `width` columns. With `None`, lines are not wrapped.
    pub fn text_within(&self, width: Option<usize>) -> String {
        if self.found.is_empty() {
            let none = match self.lines {
                0 => return "The log is empty. To check the machine itself, run divvy doctor.\n".to_owned(),
                1 => "The only line does not have a".to_owned(),
                lines => format!("None of the {lines} lines has a"),
            };
            let known: usize = ALL.iter().map(|explanation| explanation.texts.len()).sum();
            return format!("{none} known error text ({known} are known). To check the machine itself, run divvy doctor.\n");
        }
        let mut text = String::new();
        for found in &self.found {
            let times = match found.count {
                1 => String::new(),
                n => format!(", and {} more", n - 1),
            };
            let Explanation { check, means, fix, .. } = found.explanation;
            let check = check.map(|id| format!("{id} ")).unwrap_or_default();
            let _ = writeln!(text, "{check}line {}{times}", found.number);
            for (name, value) in [("text", found.line.as_str()), ("means", means), ("fix", fix)] {
                let _ = writeln!(text, "{}", wrapped(value, &format!("    {name:<6} "), HANGING, width));
            }
        }
        let mut checks: Vec<&str> = self.found.iter().filter_map(|found| found.explanation.check).collect();
        checks.sort_unstable();
        checks.dedup();
        let (cluster, node): (Vec<&str>, Vec<&str>) = checks.iter().partition(|check| check.starts_with('K'));
        if !checks.is_empty() {
            let _ = writeln!(text);
        }
        if !node.is_empty() {
            let _ = writeln!(text, "On the node: divvy doctor --only {}", node.join(","));
        }
        if !cluster.is_empty() {
            let _ = writeln!(
                text,
                "On the cluster: divvy doctor --node --cluster --only {}",
                cluster.join(",")
            );
        }
        text
    }
}

fn plain(text: &str) -> String {
    let mut plain: String = text
        .chars()
        .filter(|c| !matches!(c, '"' | '\'' | '`' | '\\' | '\u{2018}' | '\u{2019}' | '\u{201c}' | '\u{201d}'))
        .collect();
    plain.make_ascii_lowercase();
    plain
}

fn matches(line: &str, text: &str) -> bool {
    let mut rest = line;
    text.split('*').all(|part| match rest.split_once(part) {
        Some((_, after)) => {
            rest = after;
            true
        }
        None => false,
    })
}
