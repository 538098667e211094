//! A test that the reference in the repository matches what the programs generate.

use std::path::{Path, PathBuf};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_reference_is_current() {
    for (file, expected) in divvy_reference::documents().expect("made") {
        let text = std::fs::read_to_string(repository().join(file)).expect(file);
        assert!(
            text == expected,
            "{file} is not what the programs say; type: cargo xtask reference"
        );
    }
}

#[test]
fn each_metric_that_a_daemon_registers_is_in_the_reference() {
    let reference = divvy_reference::metrics::markdown().expect("made");
    let mut found = 0;
    for daemon in ["divvy-agent", "divvy-extender", "divvy-explainer"] {
        let file = repository().join("crates").join(daemon).join("src/metrics.rs");
        let source = std::fs::read_to_string(file).expect(daemon);
        for name in source
            .split('"')
            .filter(|text| text.starts_with("divvy_") && !text.contains(' '))
        {
            found += 1;
            let (gauge, counter) = (format!("`{name}`"), format!("`{name}_total`"));
            assert!(
                reference.contains(&gauge) || reference.contains(&counter),
                "{name} has no sample in the generator"
            );
        }
    }
    assert!(found > 25, "{found} metrics");
}

#[test]
fn each_command_has_a_man_page_with_its_examples() {
    let directory = std::env::temp_dir().join(format!("divvy-reference-{}", std::process::id()));
    divvy_reference::cli::man_pages(&directory).expect("written");
    let page = std::fs::read_to_string(directory.join("divvy-why.1")).expect("a page for divvy why");
    std::fs::remove_dir_all(&directory).expect("removed");
    assert!(page.contains("all\\-namespaces") && page.contains("Examples"), "{page}");
}
