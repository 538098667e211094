//! A test that no documentation test is left out.
//!
//! `cargo test` starts rustdoc for each library, which reads the whole library even if it has no documentation test. So only libraries with
//! such tests have them switched on: the manifests of the others say `doctest = false`.

use std::fs;
use std::path::Path;

/// The words after a fence that keep rustdoc from reading Rust in it.
const OTHER_LANGUAGES: [&str; 3] = ["json", "sh", "text"];

/// Report whether a file has a code block that rustdoc would compile.
fn has_doc_test(source: &str) -> bool {
    let mut within = false;
    source.lines().any(|line| {
        let line = line.trim_start();
        let Some(text) = line.strip_prefix("//!").or_else(|| line.strip_prefix("///")) else {
            within = false;
            return false;
        };
        let Some(word) = text.trim().strip_prefix("```") else {
            return false;
        };
        within = !within;
        within && !OTHER_LANGUAGES.contains(&word)
    })
}

fn any_doc_test(directory: &Path) -> bool {
    let mut entries = fs::read_dir(directory).expect("a directory of sources").flatten();
    entries.any(|entry| match entry.path() {
        path if path.is_dir() => any_doc_test(&path),
        path => path.extension().is_some_and(|it| it == "rs") && has_doc_test(&fs::read_to_string(&path).expect("a source")),
    })
}

#[test]
fn a_library_with_documentation_tests_has_them_switched_on() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let libraries = ["crates", "lab"].map(|part| fs::read_dir(root.join(part)).expect("a directory of crates"));
    let libraries: Vec<_> = libraries.into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    assert!(libraries.len() > 30, "{libraries:?}");
    for library in libraries.iter().filter(|library| library.join("src/lib.rs").is_file()) {
        let manifest = fs::read_to_string(library.join("Cargo.toml")).expect("a manifest");
        assert!(
            !manifest.contains("doctest = false") || !any_doc_test(&library.join("src")),
            "{} has a documentation test, which does not run: remove `doctest = false` from its manifest, or name the language of the text",
            library.display()
        );
    }
}

#[test]
fn a_block_without_another_language_is_a_test() {
    for (source, expected) in [
        ("//! ```\n//! let a = 1;\n//! ```\n", true),
        ("    /// ```no_run\n    /// main();\n    /// ```\n", true),
        ("/// ```text\n/// a ``` b\n/// ```\n/// more\nfn f() {}\n", false),
        ("/// ```json\n/// {}\n/// ```\n///\n/// ```\n/// f();\n/// ```\n", true),
        ("// ```\n", false),
    ] {
        assert_eq!(has_doc_test(source), expected, "{source}");
    }
}
