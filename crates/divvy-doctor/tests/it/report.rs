//! Tests of the report and its exit status.

use divvy_doctor::facts::cluster::{CheckedPod, CheckedResources, ClusterFacts, ContainerFacts, Texts};
use divvy_doctor::facts::programs::{ExtenderFacts, ExtenderVersion};
use divvy_doctor::{Asked, CheckStatus, DoctorReport, ReportLine, ReportStyle, checks};

use crate::host::{cluster, debian, facts, none};

#[test]
fn the_exit_status_is_that_of_the_worst_finding() {
    let host = debian();
    let mut facts = facts(&host);
    let status = |facts: &divvy_doctor::Facts<'_>| DoctorReport::of(facts, checks::ALL).exit_status();
    assert_eq!(status(&facts), 0);
    facts.kernel_log = Asked::Answer("NVRM: Xid (PCI:0000:81:00): 79, GPU has fallen off the bus.".to_owned());
    assert_eq!(status(&facts), 1);
    facts.probe = Asked::Failed("it hangs".to_owned());
    assert_eq!(status(&facts), 2);
}

#[test]
fn a_finding_has_three_lines_and_optional_colour() {
    let host = debian();
    let mut facts = facts(&host);
    facts.probe = Asked::Failed("it hangs".to_owned());
    let only: Vec<_> = checks::ALL
        .iter()
        .filter(|check| ["D02", "D11"].contains(&check.id))
        .copied()
        .collect();
    let report = DoctorReport::of(&facts, &only);
    insta::assert_snapshot!(report.text(false));
    let coloured = report.text(true);
    assert!(coloured.contains("\x1b[1;31mFAIL\x1b[0m D11") && coloured.contains("\x1b[32mPASS\x1b[0m D02"));
}

/// Files, programs, and API objects may contain any text, and the reader of the report is often root.
/// Text from other programs does not look like a line of the report.
#[test]
fn foreign_text_moves_no_cursor_and_forges_nothing() {
    let mut host = debian();
    let version = "550.54.15\u{1b}[2J\u{202e}\r\n\nPASS D05 all is well";
    host.files.file(
        "/etc/cdi/x.json",
        format!("{{\"cdiVersion\":{version:?}}}")
            .replace("\\u{1b}", "\\u001b")
            .replace("\\u{202e}", "\\u202e"),
    );
    let mut facts = facts(&host);
    facts.probe = Asked::Failed("it\u{1b}]0;title\u{7} hangs\nPASS D11 every GPU answers".to_owned());
    facts.kernel_log = Asked::Failed("a\nFAIL D99 forged".to_owned());
    let text = DoctorReport::of(&facts, checks::ALL).text(false);
    let is_order = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
    assert!(!text.chars().any(is_order), "{text:?}");
    assert!(
        text.contains("it\\u{1b}]0;title\\u{7} hangs\n              PASS D11 every GPU answers\n"),
        "{text}"
    );
    assert!(
        !text.contains("\nFAIL D99") && !text.contains("\nPASS D05 all is well"),
        "{text}"
    );
}

/// `/proc/stat` of a copied machine may contain any number.
#[test]
fn a_boot_at_the_end_of_time_is_none() {
    let stat = "700 (containerd) S 1 1 1 0 -1 4194560 1 1 0 0 1 1 0 0 20 0 20 0 500 1 1\n";
    for (boot, started) in [(1_700_000_000, Some(1_700_000_005)), (i64::MAX, None)] {
        let mut host = debian();
        host.files
            .file("/proc/stat", format!("cpu 1\nbtime {boot}\n"))
            .file("/proc/700/stat", stat);
        assert_eq!(facts(&host).started(700), started, "{boot}");
    }
}

/// With only `--cluster`, the files of the machine on which the command runs say nothing about the cluster.
#[test]
fn this_machine_does_not_replace_an_unreadable_cluster() {
    let host = debian();
    let mut facts = facts(&host);
    facts.node = false;
    facts.cluster = Asked::Failed("nodes is forbidden".to_owned());
    facts.extender = Asked::Absent("the extender was not queried".to_owned());
    let report = DoctorReport::of(&facts, checks::ALL);
    assert!(report.checks.len() > 10);
    for line in &report.checks {
        let said = line.could_not_look() && line.found.contains("nodes is forbidden");
        assert!(said || (line.id == "K12" && line.status == CheckStatus::Skip), "{line:?}");
    }
    assert_eq!(report.exit_status(), 2, "it is unknown whether all is well");
}

/// A reason that several checks share is printed once.
#[test]
fn each_reason_for_not_looking_is_listed_once() {
    let host = debian();
    let mut facts = facts(&host);
    facts.node = false;
    let mut cluster = cluster();
    for (plural, words) in [("nodes", "nodes is forbidden: X"), ("pods", "pods is forbidden: Y")] {
        cluster.refused.insert(plural.to_owned(), words.to_owned());
    }
    facts.cluster = Asked::Answer(cluster);
    let report = DoctorReport::of(&facts, checks::ALL);
    assert_eq!(report.exit_status(), 2);
    insta::assert_snapshot!(report.text(false));
}

/// A program that reads the JSON report can tell the two kinds of SKIP apart.
/// One kind is a check that does not apply; the other is a check that could not look.
#[test]
fn json_tells_the_two_kinds_of_skip_apart() {
    let host = none();
    let mut facts = facts(&host);
    facts.cluster = Asked::Failed("no answer".to_owned());
    let report = serde_json::to_value(DoctorReport::of(&facts, checks::ALL)).expect("JSON");
    let of = |id: &str| {
        let lines = report["checks"].as_array().expect("lines");
        let line = lines.iter().find(|line| line["id"] == id).expect(id);
        (line["status"].clone(), line["skipped"].clone())
    };
    assert_eq!(of("D02"), ("SKIP".into(), "doesNotApply".into()));
    assert_eq!(of("K16"), ("SKIP".into(), "couldNotLook".into()));
    assert_eq!(of("D01"), ("FAIL".into(), serde_json::Value::Null));
}

#[test]
fn long_findings_keep_their_indentation_on_a_terminal() {
    let host = debian();
    let mut facts = facts(&host);
    facts.probe = Asked::Failed(
        "a driver that says much of what it does not do, and /a/path/that/is/longer/than/a/line/of/this/terminal/has/columns"
            .to_owned(),
    );
    let checks: Vec<_> = checks::ALL
        .iter()
        .filter(|check| ["D11", "D08", "C01"].contains(&check.id))
        .copied()
        .collect();
    let style = ReportStyle {
        width: Some(72),
        coloured: false,
        verbose: true,
    };
    let text = DoctorReport::of(&facts, &checks).print(style);
    for line in text.lines() {
        assert!(
            line.chars().count() <= 72 || line.trim_start().starts_with("/a/path"),
            "{line:?}"
        );
    }
    insta::assert_snapshot!(text);
    let coloured = DoctorReport::of(&facts, &checks).print(ReportStyle { coloured: true, ..style });
    assert_eq!(text.lines().count(), coloured.lines().count(), "color codes have no width");
}

/// The extender counts calls since its own start. Pods with an allocation prove that it was called before that.
#[test]
fn placed_pods_prove_calls_of_a_fresh_extender() {
    let host = debian();
    for (placed, status) in [(true, CheckStatus::Pass), (false, CheckStatus::Warn)] {
        let mut facts = facts(&host);
        let mut pod = CheckedPod::default();
        let container = ContainerFacts {
            resources: CheckedResources {
                limits: Texts::from_iter([("aliyun.com/gpu-mem", "3")]),
                ..CheckedResources::default()
            },
            ..ContainerFacts::default()
        };
        pod.spec.containers.push(container);
        if placed {
            pod.metadata.annotations.insert("divvy.dev/allocation", "{}");
        }
        facts.cluster = Asked::Answer(ClusterFacts {
            pods: vec![pod],
            ..ClusterFacts::default()
        });
        facts.extender = Asked::Answer(ExtenderFacts {
            url: "http://x".to_owned(),
            version: ExtenderVersion::Known("0.1.0".to_owned()),
            filter_calls: Some(0),
            left_out: Vec::new(),
        });
        let check = checks::by_id("K12").expect("a check");
        let line = ReportLine::of(check, &facts);
        assert_eq!(line.status, status, "{line:?}");
    }
}
