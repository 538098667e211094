//! The guard over the real libcuda.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use divvy_shadow_testkit::Elf;

use super::container::{BenchContainer, LIBRARIES};
use super::packages::PackagedDriver;
use super::{CheckResult, DriverBench, differ};
use crate::debian::{find, unpack};
use crate::ptx::{output, pip_install};

/// The program that asks.
const ASK: &str = "xtask/src/real_driver/ask.c";

/// CUDA's runtime libraries: Debian's package of CUDA 11, and NVIDIA's packages for Python.
const RUNTIMES: [(&str, &str); 2] = [("nvidia-cuda-runtime-cu12", "12.9.79"), ("nvidia-cuda-runtime", "13.2.75")];

pub(crate) fn check(bench: &DriverBench) -> Result<CheckResult> {
    let ask = bench.work.join("ask");
    output(Command::new("cc").args(["-O1", "-w", "-o"]).arg(&ask).arg(ASK).arg("-ldl"))?;
    let mut names = BTreeSet::new();
    for driver in &bench.drivers {
        let bytes = std::fs::read(&driver.cuda).with_context(|| format!("{} could not be read", driver.cuda.display()))?;
        let functions = Elf::of(&bytes).exports().into_iter().filter(|name| name.starts_with("cu"));
        names.extend(functions.map(|name| format!("{name}\n")));
    }
    let names = bench.write("names", names.into_iter().collect::<String>())?;
    let names = names.display().to_string();
    let runtimes = runtimes(&bench.packages)?;
    let mut found = CheckResult::default();
    for driver in &bench.drivers {
        let (plain, guarded) = (alone(bench, driver), behind_the_guard(bench, driver)?);
        for phase in [&["functions", &names][..], &["functions", &names, "init"]] {
            let [theirs, ours] = [plain.text(&ask, phase)?, guarded.text(&ask, phase)?];
            let name = format!(
                "{} {}",
                driver.branch,
                if phase.len() > 2 {
                    "functions after cuInit"
                } else {
                    "functions"
                }
            );
            let known = functions(&theirs);
            let replaced = behind(&ours, &known);
            let (theirs, mut ours) = (answers(&theirs, &known), answers(&ours, &replaced));
            // The guard has each function that it replaces, also where the driver lacks it (intended.txt).
            ours.retain(|question, _| {
                theirs
                    .get(question)
                    .is_some_and(|answer| !question.starts_with("dlsym") || answer != "null")
            });
            let theirs: BTreeMap<_, _> = theirs
                .into_iter()
                .filter(|(question, _)| ours.contains_key(question))
                .collect();
            found.note(&name, theirs == ours);
            if theirs != ours {
                differ(bench, &name, [&theirs, &ours].map(lines).each_ref().map(String::as_str))?;
            }
        }
        let calls: [&str; 1] = ["calls"];
        let mut questions = vec![("calls".to_owned(), calls.to_vec())];
        questions.extend(
            runtimes
                .iter()
                .map(|(name, file)| (name.clone(), vec!["runtime", file.as_str()])),
        );
        for (what, arguments) in questions {
            let [theirs, ours] = [&plain, &guarded].map(|container| container.text(&ask, &arguments));
            let (name, theirs, ours) = (format!("{} {what}", driver.branch), theirs?, ours?);
            found.note(&name, theirs == ours);
            if theirs != ours {
                differ(bench, &name, [&theirs, &ours])?;
            }
        }
    }
    Ok(found)
}

/// Download the runtime libraries.
fn runtimes(packages: &Path) -> Result<Vec<(String, String)>> {
    let mut roots = vec![(
        "libcudart 11".to_owned(),
        unpack(packages, "cudart11", "bookworm", &["libcudart11.0"])?,
    )];
    for (package, version) in RUNTIMES {
        let at = packages.join(format!("{package}-{version}"));
        if !at.exists() {
            pip_install(&format!("{package}=={version}"), &at)?;
        }
        roots.push((format!("libcudart {}", version.split('.').next().unwrap_or(version)), at));
    }
    let file = |root: &Path| find(root, &|name| name.starts_with("libcudart.so."));
    let found = roots.into_iter().map(|(name, root)| {
        let file = file(&root).with_context(|| format!("{} has no libcudart", root.display()))?;
        Ok((name, file.display().to_string()))
    });
    found.collect()
}

fn alone<'b>(bench: &'b DriverBench, driver: &PackagedDriver) -> BenchContainer<'b> {
    BenchContainer::new(bench).mount(&driver.cuda, format!("{LIBRARIES}/libcuda.so.1"))
}

fn behind_the_guard<'b>(bench: &'b DriverBench, driver: &PackagedDriver) -> Result<BenchContainer<'b>> {
    let guard: PathBuf = bench.built("libdivvy-guard.so")?;
    Ok(BenchContainer::new(bench)
        .mount(&guard, format!("{LIBRARIES}/libcuda.so.1"))
        .mount(&driver.cuda, "/run/divvy/guard/libcuda.so.real"))
}

/// Return the names of the functions at each place where `dlsym` finds one.
fn functions(text: &str) -> BTreeMap<String, String> {
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    for (name, place) in searched(text).filter(|(_, place)| *place != "null") {
        let names = names.entry(place.to_owned()).or_default();
        names.push_str(if names.is_empty() { "" } else { "=" });
        names.push_str(name);
    }
    names
}

/// Return the same for a run behind the guard: the names of what the guard replaces, and those of the library, which has another name there. `known` are those without the
/// guard.
fn behind(text: &str, known: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let real = known
        .iter()
        .map(|(place, names)| (place.replace("libcuda.so.1", "libcuda.so.real"), names.clone()));
    let mut names: BTreeMap<String, String> = real.collect();
    for (name, place) in searched(text).filter(|(_, place)| place.starts_with("libcuda.so.1")) {
        if let Some(group) = known.values().find(|group| group.split('=').any(|one| one == name)) {
            names.insert(place.to_owned(), group.clone());
        }
    }
    names
}

/// Return the names for which a run called `dlsym`, and what it found.
fn searched(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| line.strip_prefix("dlsym ")?.split_once(" = "))
}

/// Return each question with its answer, in which the names of functions stand for their places.
fn answers<'t>(text: &'t str, names: &BTreeMap<String, String>) -> BTreeMap<&'t str, String> {
    let word = |word: &'t str| names.get(word).map_or(word, String::as_str);
    let answers = text.lines().filter_map(|line| line.split_once(" = "));
    answers
        .map(|(question, answer)| (question, answer.split(' ').map(word).collect::<Vec<_>>().join(" ")))
        .collect()
}

fn lines(answers: &BTreeMap<&str, String>) -> String {
    answers
        .iter()
        .map(|(question, answer)| format!("{question} = {answer}\n"))
        .collect()
}
