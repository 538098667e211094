//! What is printed: progress on standard error, and the result on standard output.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;

use anyhow::Result;

use crate::outcome::{Expected, Outcome};
use crate::programs::Program;

/// Print what is being done.
pub(crate) fn progress(text: &str) {
    // If standard error is closed, nobody reads it.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The result of one row.
#[derive(Debug, Clone)]
pub(crate) enum Cell {
    /// As expected.
    Good(Expected),
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
            Cell::Good(Expected::Held) => "held",
            Cell::Good(Expected::AsDriver) => "same",
            Cell::Differs { .. } => "DIFFERS",
            Cell::None => "-",
        })
    }
}

/// All results.
#[derive(Debug, Default)]
pub(crate) struct Report {
    skipped: Vec<(&'static str, String)>,
    roots: Vec<&'static str>,
    ways: Vec<&'static str>,
    cells: BTreeMap<(&'static str, &'static str), Cell>,
    programs: Vec<(&'static str, String, Cell)>,
}

impl Report {
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

    pub(crate) fn program(&mut self, program: &Program, outcome: &Outcome, cell: Cell) {
        let mut text = format!("{} {}: {} facts", program.name, outcome.fact("version"), outcome.len());
        for (name, error) in outcome.stops() {
            let short: String = error.chars().take(150).collect();
            text.push_str(&format!("\n      {name}: {short}"));
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

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.roots.is_empty() {
            write!(f, "{:13}", "")?;
            for root in &self.roots {
                write!(f, " {root:>12}")?;
            }
            writeln!(f)?;
            for way in &self.ways {
                write!(f, "{way:13}")?;
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
                "         (steps at which the simulated driver stops a program are listed below it; they are the same with the guard)\n"
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
