//! The result, on standard output.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;

use anyhow::Result;

use crate::outcome::{ExpectedOutcome, ProgramOutcome};
use crate::programs::CompatProgram;
use crate::progress::progress;

/// Return the beginning and the end of a long error, which often says the reason at its end.
fn short(error: &str) -> String {
    const BEGIN: usize = 60;
    const END: usize = 80;
    let length = error.chars().count();
    if length <= BEGIN + END {
        return error.to_owned();
    }
    let begin: String = error.chars().take(BEGIN).collect();
    let end: String = error.chars().skip(length - END).collect();
    format!("{begin} … {end}")
}

/// The result of one row.
#[derive(Debug, Clone)]
pub(crate) enum Cell {
    /// As expected.
    Good(ExpectedOutcome),
    Differs {
        differences: Vec<String>,
        plain: String,
        guarded: String,
    },
    /// There is nothing to test.
    None,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Cell::Good(ExpectedOutcome::Held) => "held",
            Cell::Good(ExpectedOutcome::AsDriver) => "same",
            Cell::Differs { .. } => "DIFFERS",
            Cell::None => "-",
        })
    }
}

/// All results.
#[derive(Debug, Default)]
pub(crate) struct CompatReport {
    skipped: Vec<(&'static str, String)>,
    roots: Vec<&'static str>,
    ways: Vec<&'static str>,
    cells: BTreeMap<(&'static str, &'static str), Cell>,
    programs: Vec<(&'static str, String, Cell)>,
}

impl CompatReport {
    pub(crate) fn skip_root(&mut self, root: &'static str, reason: String) {
        progress(&format!("{root}: skipped: {reason}"));
        self.skipped.push((root, reason));
    }

    pub(crate) fn way(&mut self, root: &'static str, way: &'static str, cell: Cell) {
        if !self.roots.contains(&root) {
            self.roots.push(root);
        }
        if !self.ways.contains(&way) {
            self.ways.push(way);
        }
        self.cells.insert((root, way), cell);
    }

    pub(crate) fn program(&mut self, program: &CompatProgram, outcome: &ProgramOutcome, cell: Cell) {
        let version = outcome.fact("version");
        let mut text = format!("{} {version}: {} facts", program.name, outcome.len());
        for (error, steps) in outcome.stops() {
            text.push_str(&format!("\n           stops {}: {}", steps.join(", "), short(error)));
        }
        self.programs.push((program.name, text, cell));
    }

    fn all(&self) -> impl Iterator<Item = (String, &Cell)> {
        let ways = self.roots.iter().flat_map(move |root| {
            let cell = move |way: &&'static str| self.cells.get(&(*root, *way)).map(|cell| (format!("{root}, {way}"), cell));
            self.ways.iter().filter_map(cell)
        });
        ways.chain(self.programs.iter().map(|(name, _, cell)| ((*name).to_owned(), cell)))
    }

    pub(crate) fn is_good(&self) -> bool {
        !self.all().any(|(_, cell)| matches!(cell, Cell::Differs { .. }))
    }

    /// Print everything to standard output.
    pub(crate) fn print(&self) -> Result<()> {
        write!(std::io::stdout(), "{self}")?;
        Ok(())
    }
}

impl fmt::Display for CompatReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.roots.is_empty() {
            let width = self.ways.iter().map(|way| way.len()).max().unwrap_or(0);
            write!(f, "{:width$}", "")?;
            for root in &self.roots {
                write!(f, " {root:>12}")?;
            }
            writeln!(f)?;
            for way in &self.ways {
                write!(f, "{way:width$}")?;
                for root in &self.roots {
                    write!(f, " {:>12}", self.cells.get(&(*root, *way)).unwrap_or(&Cell::None))?;
                }
                writeln!(f)?;
            }
            writeln!(
                f,
                "held: the program sees its share, and gets no more; same: as with the driver alone; -: not possible there\n"
            )?;
        }
        for (_, text, cell) in &self.programs {
            writeln!(f, "{cell:8} {text}")?;
        }
        if !self.programs.is_empty() {
            writeln!(
                f,
                "stops: what the simulated driver does not allow; it is the same with the guard\n"
            )?;
        }
        for (name, reason) in &self.skipped {
            writeln!(f, "skipped: {name}: {reason}")?;
        }
        for (name, cell) in self.all() {
            if let Cell::Differs {
                differences,
                plain,
                guarded,
            } = cell
            {
                writeln!(f, "\n{name} differs:\n  {}", differences.join("\n  "))?;
                for (libraries, said) in [("with the driver alone", plain), ("with the guard", guarded)] {
                    writeln!(f, "  {libraries}: {}", said.replace('\n', "\n    "))?;
                }
            }
        }
        let count = |wanted: fn(&Cell) -> bool| self.all().filter(|(_, cell)| wanted(cell)).count();
        writeln!(
            f,
            "{} rows are as expected, {} differ; {} root file systems were skipped",
            count(|cell| matches!(cell, Cell::Good(_))),
            count(|cell| matches!(cell, Cell::Differs { .. })),
            self.skipped.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_differs_is_explained_and_makes_the_result_bad() {
        let mut report = CompatReport::default();
        report.way("debian-12", "dlopen", Cell::Good(ExpectedOutcome::Held));
        report.way("musl", "dlopen", Cell::Good(ExpectedOutcome::AsDriver));
        report.way("musl", "setuid", Cell::None);
        report.skip_root("alpine", "it is not reachable".to_owned());
        assert!(report.is_good());
        report.way(
            "debian-12",
            "setuid",
            Cell::Differs {
                differences: vec!["the program ends differently".to_owned()],
                plain: "exit status 0\nsecure 1".to_owned(),
                guarded: "ended by a signal".to_owned(),
            },
        );
        assert!(!report.is_good());
        insta::assert_snapshot!(report, @"
                  debian-12         musl
        dlopen         held         same
        setuid      DIFFERS            -
        held: the program sees its share, and gets no more; same: as with the driver alone; -: not possible there

        skipped: alpine: it is not reachable

        debian-12, setuid differs:
          the program ends differently
          with the driver alone: exit status 0
            secure 1
          with the guard: ended by a signal
        2 rows are as expected, 1 differ; 1 root file systems were skipped
        ");
    }

    #[test]
    fn a_long_error_keeps_its_beginning_and_its_end() {
        let long = format!("error begin{}the reason", " x".repeat(200));
        let short = short(&long);
        assert!(short.starts_with("error begin") && short.ends_with("the reason"), "{short}");
        assert!(short.chars().count() < 150);
        assert_eq!(super::short("error x"), "error x");
    }
}
