//! The command line. `cargo xtask compat --help` explains it.

use anyhow::{Context as _, Result, bail, ensure};

use crate::programs::{self, CompatProgram, PROGRAMS};
use crate::roots::{ROOTS, RootFileSystem};
use crate::ways::{WAYS, Way};

/// What to run.
#[derive(Debug, Default)]
pub(crate) struct CompatArguments {
    /// The names of root file systems, ways of loading, and programs; empty: all.
    only: Vec<String>,
    pub(crate) keep: bool,
}

impl CompatArguments {
    pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Result<CompatArguments> {
        let mut parsed = CompatArguments::default();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--keep" => parsed.keep = true,
                "--only" => parsed.only.push(words.next().context("--only needs a name")?),
                other => bail!("{other:?} is unknown; `cargo xtask compat --help` lists what there is"),
            }
        }
        for name in &parsed.only {
            ensure!(
                names().any(|known| known == name),
                "{name:?} is neither a root file system, a way of loading, nor a program; these are: {}",
                names().collect::<Vec<_>>().join(", ")
            );
        }
        Ok(parsed)
    }

    fn chosen<'a>(&self, mut all: impl Iterator<Item = &'a str>) -> bool {
        all.any(|name| self.only.iter().any(|only| only == name))
    }

    /// Whether anything runs in a root file system.
    pub(crate) fn wants_root(&self, root: &RootFileSystem) -> bool {
        self.wants_ways(root) || root.name == programs::ROOT && PROGRAMS.iter().any(|program| self.wants_program(program))
    }

    /// Whether any way of loading is tried in a root file system.
    pub(crate) fn wants_ways(&self, root: &RootFileSystem) -> bool {
        let (of_root, of_way) = (ROOTS.iter().map(|root| root.name), WAYS.iter().map(|way| way.name));
        match (self.chosen(of_root), self.chosen(of_way)) {
            (false, false) => self.only.is_empty(),
            (false, true) => true,
            (true, _) => self.chosen([root.name].into_iter()),
        }
    }

    /// Whether this way of loading is tried there.
    pub(crate) fn wants_way(&self, root: &RootFileSystem, way: &Way) -> bool {
        let any = self.chosen(WAYS.iter().map(|way| way.name));
        self.wants_ways(root) && (!any || self.chosen([way.name].into_iter()))
    }

    pub(crate) fn wants_program(&self, program: &CompatProgram) -> bool {
        self.only.is_empty() || self.chosen([program.name].into_iter())
    }
}

fn names() -> impl Iterator<Item = &'static str> {
    let roots = ROOTS.iter().map(|root| root.name);
    let ways = WAYS.iter().map(|way| way.name);
    roots.chain(ways).chain(PROGRAMS.iter().map(|program| program.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<CompatArguments> {
        CompatArguments::parse(line.split_whitespace().map(str::to_owned))
    }

    /// Return the rows that run: how many pairs of root and way, how many programs, and how many roots are made.
    fn rows(line: &str) -> (usize, usize, usize) {
        let arguments = parse(line).expect("valid");
        let pairs = ROOTS.iter().flat_map(|root| WAYS.iter().map(move |way| (root, way)));
        (
            pairs.filter(|(root, way)| arguments.wants_way(root, way)).count(),
            PROGRAMS.iter().filter(|program| arguments.wants_program(program)).count(),
            ROOTS.iter().filter(|root| arguments.wants_root(root)).count(),
        )
    }

    /// A single name chooses everything that it names.
    #[test]
    fn two_names_choose_what_both_name() {
        let (roots, ways, programs) = (ROOTS.len(), WAYS.len(), PROGRAMS.len());
        assert_eq!(rows(""), (roots * ways, programs, roots));
        assert_eq!(rows("--only debian-12"), (ways, 0, 1));
        assert_eq!(rows("--only debian-12 --only debian-13"), (2 * ways, 0, 2));
        assert_eq!(rows("--only java"), (roots, 0, roots));
        assert_eq!(rows("--only java --only debian-13"), (1, 0, 1));
        assert_eq!(rows("--only torch"), (0, 1, 1));
        assert_eq!(rows("--only torch --only debian-13 --keep"), (ways, 1, 2));
    }

    #[test]
    fn the_help_lists_every_name() {
        let help = include_str!("../../../xtask/src/compat.rs");
        let roots = ROOTS.map(|root| root.name).join("  ");
        let programs = PROGRAMS.map(|program| program.name).join(", ");
        assert!(help.contains(&format!("\n  {roots}\n")), "{roots}");
        assert!(help.contains(&format!(": {programs}\n")), "{programs}");
        for way in &WAYS {
            assert!(help.contains(&format!("\n  {:13} ", way.name)), "{}", way.name);
        }
    }

    #[test]
    fn an_unknown_word_is_refused_with_what_there_is() {
        for (line, expected) in [
            ("--only debian-9", "debian-12"),
            ("--only", "needs a name"),
            ("bogus", "--help"),
        ] {
            let error = parse(line).expect_err("refused").to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
