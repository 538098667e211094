//! The report as text for a person.

use std::borrow::Cow;
use std::fmt::Write as _;

use divvy_host::plain;
use textwrap::{Options, WordSeparator, WordSplitter};

use super::{CheckStatus, DoctorReport, ReportLine, Skipped};
use crate::check::{Needs, count};
use crate::checks;

/// The indentation of the three lines of a finding.
const INDENT: &str = "       ";
/// The indentation of wrapped lines, which start below the texts of `found`, `why`, and `fix`.
const HANGING: &str = "              ";
/// The smallest width of a terminal, in columns, at which lines are wrapped. On a narrower terminal, wrapped text would be harder
/// to read than long lines.
const NARROWEST: usize = 40;
/// The length of the longest wrapped line, in columns. Longer lines are hard to read, even on a wider terminal.
const WIDEST: usize = 120;

/// Options for printing a report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReportStyle {
    /// Whether to print ANSI colors.
    pub coloured: bool,
    /// Whether to also print the checks that do not apply.
    pub verbose: bool,
    /// The width of the terminal in columns. With `None`, each text is printed on one line, which suits programs such as grep.
    pub width: Option<usize>,
}

impl DoctorReport {
    /// Return the report as text without line wrapping.
    pub fn text(&self, coloured: bool) -> String {
        self.print(ReportStyle {
            coloured,
            ..ReportStyle::default()
        })
    }

    /// Return the report as text: the passes and findings under the headings of their groups, then the checks whose facts could
    /// not be read, then the totals.
    pub fn print(&self, style: ReportStyle) -> String {
        let mut text = String::new();
        let mut group = None;
        let in_chain = |line: &&ReportLine| match line.skipped {
            None => true,
            Some(Skipped::DoesNotApply) => style.verbose,
            Some(Skipped::CouldNotLook) => false,
        };
        for line in self.checks.iter().filter(in_chain) {
            if group != Some(line.group) {
                heading(&mut text, line.group.title(), style);
                group = Some(line.group);
            }
            print_line(&mut text, line, style);
        }
        self.print_blind(&mut text, style);
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&self.summary(style));
        text
    }

    /// Print the checks whose facts could not be read. Each reason is printed once, below the checks that it concerns.
    fn print_blind(&self, text: &mut String, style: ReportStyle) {
        let blind: Vec<&ReportLine> = self.checks.iter().filter(|line| line.could_not_look()).collect();
        let mut reasons: Vec<&str> = Vec::new();
        for line in &blind {
            if !reasons.contains(&line.found.as_str()) {
                reasons.push(&line.found);
            }
        }
        if !reasons.is_empty() {
            heading(text, "Could not check", style);
        }
        for reason in reasons {
            for line in blind.iter().filter(|line| line.found == reason) {
                let (colour, off) = colours(line.status, style);
                let _ = writeln!(text, "{colour}{}{off} {} {}", line.status.word(), line.id, line.title);
            }
            print_part(text, "reason", reason, style);
        }
    }

    /// Return the totals, and the number of checks that did not run.
    fn summary(&self, style: ReportStyle) -> String {
        let number = |status: CheckStatus| self.checks.iter().filter(|line| line.status == status).count();
        let skipped = |why: Skipped| self.checks.iter().filter(|line| line.skipped == Some(why)).count();
        let mut parts = vec![format!("{} passed", number(CheckStatus::Pass))];
        for (number, words) in [
            (number(CheckStatus::Fail), "failed"),
            (number(CheckStatus::Warn), "with a warning"),
            (number(CheckStatus::Note), "with a note"),
            (skipped(Skipped::CouldNotLook), "could not be checked"),
        ] {
            if number > 0 {
                parts.push(format!("{number} {words}"));
            }
        }
        let mut text = format!("{}.\n", parts.join(", "));
        let do_not_apply = skipped(Skipped::DoesNotApply);
        if do_not_apply > 0 {
            let verb = if do_not_apply == 1 { "does" } else { "do" };
            let hint = if style.verbose {
                ""
            } else {
                "; --verbose lists them with the reasons"
            };
            let _ = writeln!(text, "{} {verb} not apply here{hint}.", count(do_not_apply, "check"));
        }
        text.push_str(&self.not_asked_for(style));
        text
    }
}

/// The kinds of checks that may not have run. For each kind: whether it needs the cluster (if not, it needs the machine), its
/// name, and the advice to run it.
const ELSEWHERE: [(bool, &str, &str); 2] = [
    (true, "cluster check", "add --cluster"),
    (false, "machine check", "add --node on the machine"),
];

impl DoctorReport {
    fn not_asked_for(&self, style: ReportStyle) -> String {
        let looks_at_cluster = |id: &str| checks::by_id(id).is_some_and(|check| check.needs == Needs::Cluster);
        let mut text = String::new();
        for (cluster, noun, flag) in ELSEWHERE {
            let ids: Vec<&str> = self
                .not_run
                .iter()
                .copied()
                .filter(|id| looks_at_cluster(id) == cluster)
                .collect();
            if ids.is_empty() {
                continue;
            }
            let which = if style.verbose {
                format!(": {}", ids.join(" "))
            } else {
                String::new()
            };
            let _ = writeln!(text, "Not run: {} ({flag}){which}.", count(ids.len(), noun));
        }
        text
    }
}

fn heading(text: &mut String, title: &str, style: ReportStyle) {
    let (bold, off) = if style.coloured { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
    let gap = if text.is_empty() { "" } else { "\n" };
    let _ = writeln!(text, "{gap}{bold}{title}{off}");
}

fn colours(status: CheckStatus, style: ReportStyle) -> (&'static str, &'static str) {
    if style.coloured {
        (status.colour(), "\x1b[0m")
    } else {
        ("", "")
    }
}

fn print_line(text: &mut String, line: &ReportLine, style: ReportStyle) {
    let (colour, off) = colours(line.status, style);
    let (word, id, title) = (line.status.word(), line.id, line.title);
    if let (Some(why), Some(fix)) = (&line.why, &line.fix) {
        let _ = writeln!(text, "{colour}{word}{off} {id} {title}");
        for (name, value) in [("found", &line.found), ("why", why), ("fix", fix)] {
            print_part(text, name, value, style);
        }
        return;
    }
    // Wrap the text without the colored word: escape sequences have no width.
    let value = wrapped(&shown(&line.found), &format!("{word} {id} {title}: "), HANGING, style.width);
    let rest = value.strip_prefix(word).unwrap_or(&value);
    let _ = match line.status {
        CheckStatus::Skip => writeln!(text, "{colour}{word}{rest}{off}"),
        _ => writeln!(text, "{colour}{word}{off}{rest}"),
    };
}

/// Print one part of a finding: `       found  …`.
fn print_part(text: &mut String, name: &str, value: &str, style: ReportStyle) {
    let _ = writeln!(
        text,
        "{}",
        wrapped(&shown(value), &format!("{INDENT}{name:<6} "), HANGING, style.width)
    );
}

/// Escape text that comes from files, programs, and API objects, so that it cannot move the cursor or look like a line of the report.
fn shown(text: &str) -> Cow<'_, str> {
    plain(text)
}

/// Wrap a text. The first line starts with `first`, and further lines start with `hanging`. Words are never broken, because they
/// may be parts of a command.
pub(crate) fn wrapped(text: &str, first: &str, hanging: &str, width: Option<usize>) -> String {
    let mut lines: Vec<String> = Vec::new();
    for line in text.split('\n') {
        let start = if lines.is_empty() { first } else { hanging };
        match width.filter(|width| *width >= NARROWEST) {
            None => lines.push(format!("{start}{line}")),
            Some(width) => {
                let options = Options::new(width.min(WIDEST))
                    .initial_indent(start)
                    .subsequent_indent(hanging)
                    .word_separator(WordSeparator::AsciiSpace)
                    .word_splitter(WordSplitter::NoHyphenation)
                    .break_words(false);
                lines.extend(textwrap::wrap(line, options).into_iter().map(|line| line.into_owned()));
            }
        }
    }
    lines.join("\n")
}
