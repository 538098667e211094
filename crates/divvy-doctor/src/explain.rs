//! Error texts in logs: which check each belongs to, what it means, what to type next.

mod texts;

use std::fmt::Write as _;
use std::sync::LazyLock;

use serde::Serialize;

pub use texts::ALL;

use crate::report::wrapped;

/// What an error text means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The check that looks for the cause; `None`: it passes whatever the cause is, or there is none.
    pub check: Option<&'static str>,
    /// Parts of messages, any of them; `*` stands for anything. Case, quotes and backslashes do not count, since loggers differ in them.
    #[serde(skip)]
    pub texts: &'static [&'static str],
    /// What has happened.
    pub means: &'static str,
    /// What to type next.
    pub fix: &'static str,
}

/// An explanation, and where its text was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// What the text means.
    #[serde(flatten)]
    pub explanation: &'static Explanation,
    /// The first line that has it.
    pub line: String,
    /// Its number, from 1.
    pub number: usize,
    /// How many lines have it.
    pub count: usize,
}

/// What a line means, if its text is known; the first in the table where it has several.
pub fn line(line: &str) -> Option<&'static Explanation> {
    // Once, and not for each of a log's lines.
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

/// Collects explanations, line by line.
#[derive(Debug, Clone, Default)]
pub struct Log {
    lines: usize,
    found: Vec<Explained>,
}

/// Behind what the three parts of an explanation are called.
const HANGING: &str = "           ";
/// What is shown of a line.
const SHOWN: usize = 240;

impl Log {
    /// Reads one line.
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

    /// In the order of their first lines.
    pub fn found(&self) -> &[Explained] {
        &self.found
    }

    /// For people, in lines that are not wrapped.
    pub fn text(&self) -> String {
        self.text_within(None)
    }

    /// For people, on a terminal of so many columns.
    pub fn text_within(&self, width: Option<usize>) -> String {
        if self.found.is_empty() {
            let none = match self.lines {
                0 => return "The log is empty. divvy doctor looks at the machine itself.\n".to_owned(),
                1 => "The one line has no".to_owned(),
                lines => format!("None of the {lines} lines has an"),
            };
            let known: usize = ALL.iter().map(|explanation| explanation.texts.len()).sum();
            return format!("{none} error text that is known here ({known} are). divvy doctor looks at the machine itself.\n");
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
