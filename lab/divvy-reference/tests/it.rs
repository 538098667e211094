//! The reference in the repository is what the grammar says.

use std::path::Path;

#[test]
fn the_command_line_reference_is_current() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/cli.md");
    let text = std::fs::read_to_string(file).expect("docs/reference/cli.md");
    assert!(
        text == divvy_reference::markdown(),
        "docs/reference/cli.md is not what the grammar says; type: cargo xtask reference"
    );
}

#[test]
fn each_command_has_a_man_page_with_its_examples() {
    let directory = std::env::temp_dir().join(format!("divvy-reference-{}", std::process::id()));
    divvy_reference::man_pages(&directory).expect("written");
    let page = std::fs::read_to_string(directory.join("divvy-why.1")).expect("a page for divvy why");
    std::fs::remove_dir_all(&directory).expect("removed");
    assert!(page.contains("all\\-namespaces") && page.contains("Examples"), "{page}");
}
