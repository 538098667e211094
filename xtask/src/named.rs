//! A test that the evidence named in the security documents exists.

use std::fs;
use std::path::Path;

/// Return the texts between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn every_test_and_check_that_the_threat_model_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let text = read("docs/threat-model.md");
    let tests: Vec<(&str, &str)> = quoted(&text)
        .filter_map(|name| name.split_once(".rs::"))
        .filter(|(file, _)| file.contains('/'))
        .collect();
    assert!(tests.len() > 5, "{tests:?}");
    for (file, test) in tests {
        let source = read(&format!("{file}.rs"));
        assert!(source.contains(&format!("fn {test}(")), "{file}.rs has no test {test}");
    }
    let script = read("e2e/install.sh");
    let checks: Vec<&str> = text
        .split("`e2e/install.sh` (`")
        .skip(1)
        .filter_map(|rest| rest.split('`').next())
        .collect();
    assert!(!checks.is_empty());
    for check in checks {
        assert!(script.contains(&format!("\n{check}() {{")), "e2e/install.sh has no {check}");
    }
    let policies = read("deploy/helm/divvy/templates/policies.yaml");
    for policy in quoted(&text).filter(|name| name.starts_with('-') && !name.starts_with("--") && !name.contains(' ')) {
        let name = format!("  name: {{{{ .Release.Name }}}}{policy}\n");
        assert!(policies.contains(&name), "the chart has no policy {policy}");
    }
}
