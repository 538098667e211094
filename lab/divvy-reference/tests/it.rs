//! Tests that the reference in the repository matches what the programs generate, and that other programs can read their metrics.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use divvy_exposition::MetricsFormat;

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

/// Give a program this input, and check that it accepts it.
fn accepts(program: &str, arguments: &[&str], input: &str) {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect(program);
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("read");
    let output = child.wait_with_output().expect("ended");
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{program}: {}\n{said:?}\n{input}", output.status);
}

/// Prometheus's own parser of the text format, and its rules for names.
#[test]
fn promtool_accepts_the_text_format_of_every_program() {
    if !divvy_skip::program("promtool", "prometheus") {
        return;
    }
    for scrape in divvy_reference::metrics::scrapes(MetricsFormat::Text).expect("made") {
        accepts("promtool", &["check", "metrics"], &scrape);
    }
}

/// The parser of the reference implementation of OpenMetrics, which is strict.
#[test]
fn the_reference_parser_of_openmetrics_accepts_every_program() {
    const PARSE: &str = "import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
samples = [sample for family in parse(sys.stdin.read()) for sample in family.samples]
assert len(samples) >= 2, samples";
    let has_it = |python: &&str| {
        let import = Command::new(python).args(["-c", "import prometheus_client"]).output();
        import.is_ok_and(|output| output.status.success())
    };
    // The python3 in the PATH may be another than the distribution's, which has the package.
    let Some(python) = ["python3", "/usr/bin/python3"].into_iter().find(has_it) else {
        return divvy_skip::skipped("python3 has no prometheus_client (Debian: python3-prometheus-client)");
    };
    for scrape in divvy_reference::metrics::scrapes(MetricsFormat::OpenMetrics).expect("made") {
        accepts(python, &["-c", PARSE], &scrape);
    }
}

/// All alerts name metrics that exist.
#[test]
fn the_charts_alerts_fire_when_they_should() {
    let helm = repository().join("deploy/helm");
    let alerts = std::fs::read_to_string(helm.join("divvy/files/alerts.yaml")).expect("there");
    let reference = divvy_reference::metrics::markdown().expect("made");
    let words = alerts.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names: Vec<&str> = words.filter(|word| word.starts_with("divvy_")).collect();
    assert!(names.len() >= 4, "{names:?}");
    for name in names {
        assert!(reference.contains(&format!("`{name}`")), "{name} is not a metric");
    }
    if !divvy_skip::program("promtool", "prometheus") {
        return;
    }
    let mut promtool = Command::new("promtool");
    promtool.current_dir(helm).args(["test", "rules", "alerts.test.yaml"]);
    let output = promtool.output().expect("promtool");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat())
    );
}
