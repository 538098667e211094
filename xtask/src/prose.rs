//! `cargo xtask prose`: comments, texts, and documents use plain words, and refer only to files that exist. The documents name every crate, and names of tests
//! are short.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use regex::Regex;

/// The words to avoid, each with better ones.
const WORDS: &str = ".ci/words";

/// Paths that are not checked: recorded or generated text, and the list of words itself.
const SKIPPED: [&str; 7] = [
    "/tests/data/",
    "/healthy/",
    "Cargo.lock",
    "deploy/divvy.yaml",
    "LICENSE",
    "proptest-regressions",
    WORDS,
];

/// The most characters of a function's name, which is also the name of a test.
const MOST_IN_A_NAME: usize = 60;

/// A word to avoid.
struct ProseRule {
    pattern: Regex,
    advice: String,
}

/// Fail on a word to avoid, or on a reference to a file that does not exist.
pub(crate) fn check() -> Result<()> {
    let rules = rules(&fs::read_to_string(WORDS).with_context(|| format!("{WORDS} cannot be read"))?)?;
    let files = Command::new("git")
        .args(["ls-files"])
        .output()
        .context("git could not be run")?;
    let files = String::from_utf8(files.stdout)?;
    let mut found = String::new();
    for file in files.lines().filter(|file| !SKIPPED.iter().any(|part| file.contains(part))) {
        let kind = Path::new(file).extension().and_then(|kind| kind.to_str()).unwrap_or_default();
        if !matches!(kind, "rs" | "md" | "sh" | "toml" | "yaml" | "tpl" | "txt" | "") {
            continue;
        }
        // A file that is not text, or that was removed and not committed yet, has no prose.
        let Ok(text) = fs::read_to_string(file) else { continue };
        for (number, line) in text.lines().enumerate() {
            let prose = if kind == "rs" { prose_of(line) } else { line.to_owned() };
            let mut complain = |what: String| {
                let _ = writeln!(found, "{file}:{}: {what}", number + 1);
            };
            for rule in &rules {
                if let Some(word) = rule.pattern.find(&prose) {
                    complain(format!("{:?}; better: {}", word.as_str().trim(), rule.advice));
                }
            }
            if let Some(name) = long_name(line).filter(|_| kind == "rs") {
                complain(format!(
                    "{name} has {} characters; a name has at most {MOST_IN_A_NAME}, and a doc comment says the rest",
                    name.len()
                ));
            }
            for path in references(&prose, Path::new(file)) {
                if !path.0 {
                    complain(format!("there is no {}", path.1));
                }
            }
        }
    }
    for directory in ["crates", "lab"] {
        let crates = names(Path::new(directory))?;
        for document in ["ARCHITECTURE.md", "docs/design/layout.md"] {
            let text = fs::read_to_string(document).with_context(|| format!("{document} cannot be read"))?;
            for name in crates.iter().filter(|name| !is_listed(&text, name)) {
                let _ = writeln!(found, "{document}: it does not list {directory}/{name}");
            }
        }
    }
    ensure!(found.is_empty(), "plain words ({WORDS}), references, and lists:\n{found}");
    Ok(())
}

/// Return the names of a directory's directories.
fn names(directory: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(directory).with_context(|| format!("{} cannot be read", directory.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.path().join("Cargo.toml").exists() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Report whether a document's table has a row for a crate, or its listing a line. The listing of what is not shipped leaves out `divvy-`.
fn is_listed(document: &str, name: &str) -> bool {
    document.lines().any(|line| {
        let head = match line.strip_prefix("| ") {
            Some(row) => row.split('|').next().unwrap_or_default(),
            None => line
                .strip_prefix("    ")
                .map_or("", |line| line.split("   ").next().unwrap_or(line)),
        };
        let words = head.split(|c: char| c.is_whitespace() || "`,".contains(c));
        let short = name.strip_prefix("divvy-").unwrap_or(name);
        words.into_iter().any(|word| word == name || word == short)
    })
}

/// Return the name of the function that a line declares, if it is too long.
fn long_name(line: &str) -> Option<&str> {
    let (_, rest) = line
        .split_once("fn ")
        // Neither in a comment nor in a text; `extern "C" fn` is a declaration.
        .filter(|(before, _)| !before.contains('/') && before.matches('"').count().is_multiple_of(2))?;
    let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    (name.len() > MOST_IN_A_NAME).then_some(name)
}

fn rules(text: &str) -> Result<Vec<ProseRule>> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let (pattern, advice) = line
                .split_once('\t')
                .with_context(|| format!("{WORDS}: {line:?} needs a tab between the pattern and the advice"))?;
            Ok(ProseRule {
                pattern: Regex::new(pattern).with_context(|| format!("{WORDS}: {pattern}"))?,
                advice: advice.to_owned(),
            })
        })
        .collect()
}

/// Return the comment and the texts of a line of Rust, without the names of variables in format strings.
fn prose_of(line: &str) -> String {
    let (mut prose, mut inside, mut escaped) = (String::new(), false, false);
    let mut braces = 0_u32;
    let mut text = String::new();
    for (at, c) in line.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if inside => escaped = true,
            '"' => {
                inside = !inside;
                // A text without a space is a name, not prose.
                if !inside && !text.trim().contains(' ') {
                    text.clear();
                }
                prose.push_str(&std::mem::take(&mut text));
                prose.push(' ');
            }
            '/' if !inside && line[at..].starts_with("//") => {
                prose.push_str(&line[at..]);
                break;
            }
            '{' if inside => braces += 1,
            '}' if inside => braces = braces.saturating_sub(1),
            c if inside && braces == 0 => text.push(c),
            _ => {}
        }
    }
    prose.push_str(&text);
    prose
}

/// Return the files that a line refers to, and whether each exists: paths from the repository's root, and relative links of Markdown.
fn references(prose: &str, file: &Path) -> Vec<(bool, String)> {
    let mut found = Vec::new();
    for part in prose.split(|c: char| c.is_whitespace() || "`()[]<>\"',;|".contains(c)) {
        let path = part.split(['#', ':']).next().unwrap_or_default().trim_end_matches('.');
        let is_ours = [
            "docs/",
            "crates/",
            "lab/",
            "xtask/",
            "e2e/",
            "examples/",
            "deploy/",
            "../shared",
        ]
        .iter()
        .any(|directory| path.starts_with(directory));
        let is_plain = path.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
        if is_ours
            && is_plain
            && (path.ends_with(".md") || path.ends_with(".rs") || path.ends_with(".sh") || path.ends_with(".yaml"))
        {
            let here = file.parent().is_some_and(|directory| directory.join(path).exists());
            let of_crate = file
                .ancestors()
                .any(|directory| directory.join("Cargo.toml").exists() && directory.join(path).exists());
            found.push((here || of_crate || Path::new(path).exists(), path.to_owned()));
        }
    }
    // The names are written in parts so that this check does not find them in this file.
    for unwanted in [concat!("DESIGN", ".md"), concat!("research", "/")] {
        let is_word = |at: usize| !prose[..at].ends_with(|c: char| c.is_alphanumeric() || c == '/');
        if prose.match_indices(unwanted).any(|(at, _)| is_word(at)) {
            found.push((false, unwanted.to_owned()));
        }
    }
    if file.extension().is_some_and(|kind| kind == "md") {
        let links = prose.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        for link in links.filter(|link| !link.is_empty() && !link.contains("://") && !link.starts_with("mailto:")) {
            let target = file.parent().unwrap_or(Path::new("")).join(link);
            found.push((target.exists(), link.to_owned()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_is_comments_and_texts_without_placeholders() {
        for (line, prose) in [
            (r#"let path = f("a {path} b \" c"); // d"#, " a  b  c // d"),
            ("let path = 1;", ""),
            ("/// A path.", "/// A path."),
        ] {
            let squeezed: Vec<&str> = prose_of(line).leak().split_whitespace().collect();
            assert_eq!(squeezed, prose.split_whitespace().collect::<Vec<_>>(), "{line}");
        }
    }

    #[test]
    fn a_crate_is_listed_in_the_first_cell_of_a_row_or_in_a_listing() {
        let document =
            "| `divvy-a`, `divvy-b` | uses `divvy-c` |\n    divvy-d  divvy-e           uses divvy-f\n    g, h   the files\n";
        for (name, is) in [
            ("a", true),
            ("b", true),
            ("c", false),
            ("d", true),
            ("e", true),
            ("f", false),
            ("h", true),
        ] {
            assert_eq!(is_listed(document, &format!("divvy-{name}")), is, "{name}");
        }
    }

    #[test]
    fn a_long_name_of_a_function_is_found_where_it_is_declared() {
        let long = "x".repeat(MOST_IN_A_NAME + 1);
        assert_eq!(long_name(&format!("    async fn {long}<T>() {{")), Some(long.as_str()));
        assert_eq!(long_name(&format!("pub extern \"C\" fn {long}()")), Some(long.as_str()));
        for other in ["    // fn", "let text = \"fn"] {
            assert_eq!(long_name(&format!("{other} {long}()")), None, "{other}");
        }
        assert_eq!(long_name(&format!("fn {}()", &long[1..])), None);
    }

    #[test]
    fn a_word_to_avoid_is_found_with_its_advice() {
        let rules = rules("# comment\n\\bbadly\\b\twell\n").expect("rules");
        assert!(rules[0].pattern.is_match("printed badly") && !rules[0].pattern.is_match("badlydone"));
        assert_eq!(rules[0].advice, "well");
    }

    #[test]
    fn only_references_to_files_that_do_not_exist_are_wrong() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let readme = root.join("../README.md");
        let wrong = |text: &str| references(text, &readme).into_iter().any(|(exists, _)| !exists);
        assert!(!wrong("see `docs/pods.md` and [this](docs/pods.md#several-gpus)"));
        let missing = concat!("docs/", "no-such.md");
        assert!(wrong(&format!("see {missing}")) && wrong(&format!("[that]({missing})")));
        assert!(wrong(concat!("DESIGN", ".md section 8")));
    }
}
