use std::fs;

use super::*;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All skips are counted.
#[test]
fn each_skip_is_printed_once_with_its_reason() {
    let skips = Skips::parse("b::two\tno root\na::one\tno strace\nb::two\tno root\n\nc\n");
    insta::assert_snapshot!(skips, @r"
    skipped  a::one: no strace
    skipped  b::two: no root
    skipped  c: no reason was given
    3 skipped
    ");
    assert_eq!(Skips::parse("").to_string(), "nothing was skipped");
}

#[test]
fn only_what_is_listed_may_be_skipped() {
    let allowed =
        AllowedSkips::parse("# why\n\na::one\tit takes a GPU\na::module::\tits data is elsewhere\na step\tno network\n")
            .expect("valid");
    for (name, listed) in [
        ("a::one", true),
        ("a::module::any", true),
        ("a step", true),
        ("a::one_more", false),
        ("b::a::one", false),
        ("a::module", false),
        ("a step more", false),
    ] {
        assert_eq!(allowed.lists(name), listed, "{name}");
        let skips = Skips::parse(&format!("{name}\treason\n"));
        assert_eq!(skips.not_in(&allowed).is_empty(), listed, "{name}");
    }
}

#[test]
fn a_list_without_reasons_is_refused() {
    for text in ["a::one\n", "a::one\t \n", "\treason\n"] {
        let error = AllowedSkips::parse(text).expect_err("refused").to_string();
        assert!(error.contains("gives no reason"), "{error}");
    }
}

/// Return the Rust files below these directories of each crate, with their text.
fn sources(kinds: &[&str]) -> Vec<(PathBuf, String)> {
    let mut directories: Vec<PathBuf> = Vec::new();
    for package in fs::read_dir(root().join("crates")).expect("a directory") {
        let package = package.expect("an entry").path();
        directories.extend(
            kinds
                .iter()
                .map(|kind| package.join(kind))
                .filter(|directory| directory.is_dir()),
        );
    }
    let mut found = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("text");
                found.push((path, text));
            }
        }
    }
    found
}

/// Find code that leaves a test early without a recorded skip, and return the replacement to use. Before `divvy-skip` existed,
/// all skipped tests used such code.
fn uncounted(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let lines: Vec<&str> = text.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        let mut complain = |what: &str| found.push(format!("{}: {what}", number + 1));
        let prints = ["print!(", "println!("].iter().any(|print| line.contains(print));
        // The text may be on the next line.
        let said = [*line, lines.get(number + 1).copied().unwrap_or_default()]
            .concat()
            .to_lowercase();
        if prints && said.contains("skip") {
            complain("a skip that is only printed; call divvy_skip::skipped");
        }
        if line.trim_start().starts_with("#[ignore") {
            complain("an ignored test; call divvy_skip::skipped where it cannot run");
        }
        let variable = ["NVIDIA_CTK", "CDI_SCHEMA", "OPENB", "TOOLKIT"].map(|name| format!("(\"DIVVY_{name}\""));
        if line.contains("env::var") && variable.iter().any(|variable| line.contains(variable)) {
            complain("a directory that may be missing; call the check of divvy_skip that takes the variable");
        }
        if line.contains("is_root()") {
            complain("a test that only root can run; call divvy_skip::root");
        }
    }
    found
}

#[test]
fn the_ways_to_skip_that_nobody_would_count_are_recognised() {
    for text in [
        "eprintln!(\"SKIPPED: it needs strace\");",
        "println!(\n    \"skipped: no directory\"",
        "#[ignore = \"slow\"]\nfn test() {}",
        "let Some(path) = std::env::var_os(\"DIVVY_OPENB\") else { return };",
        "if !rustix::process::geteuid().is_root() {",
    ] {
        assert_eq!(uncounted(text).len(), 1, "{text}");
    }
    assert!(uncounted("divvy_skip::skipped(\"it needs strace\");\nprintln!(\"done\");\n").is_empty());
}

#[test]
fn no_test_is_skipped_in_a_way_that_is_not_counted() {
    let sources = sources(&["tests", "benches", "src"]);
    assert!(sources.len() > 300, "only {} files were checked", sources.len());
    let wrong: Vec<String> = sources
        .iter()
        .flat_map(|(path, text)| {
            uncounted(text)
                .into_iter()
                .map(move |what| format!("{}:{what}", path.display()))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A listed test or step that no longer exists must be removed from the list.
#[test]
fn everything_that_may_be_skipped_exists() {
    let text = fs::read_to_string(root().join(ALLOWED)).expect("there");
    let AllowedSkips(names) = AllowedSkips::parse(&text).expect("valid");
    assert!(!names.is_empty());
    let sources = sources(&["tests", "src"]);
    let script = fs::read_to_string(root().join(".ci/run")).expect("there");
    let scenes = fs::read_to_string(root().join("lab/divvy-testbed/src/scenario/suite.rs")).expect("there");
    for name in names {
        // The same test on an emulated processor.
        let name = name.strip_prefix("arm64::").unwrap_or(&name);
        let there = match name.rsplit_once("::") {
            Some((module, "")) => sources.iter().any(|(path, _)| {
                let path = path.display().to_string();
                path.contains(&format!("crates/{}/tests/it/", module.split("::").next().unwrap_or_default()))
                    && path.ends_with(&format!("/{}.rs", module.rsplit("::").next().unwrap_or_default()))
            }),
            Some((_, test)) => sources.iter().any(|(_, text)| text.contains(&format!("fn {test}("))),
            None => match name.strip_prefix("real Kubernetes: scene ") {
                Some(scene) => scenes.contains(&format!("\"{scene}\",")),
                None => script.contains(&format!("skip \"{name}\"")),
            },
        };
        assert!(there, "{name} is listed in {ALLOWED}, but there is no such test or step");
    }
}
