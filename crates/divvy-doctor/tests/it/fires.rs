//! For each check: cases in which it passes, and cases in which it reports a finding.

mod cluster;
mod engine;
mod machine;

use std::collections::BTreeSet;

use divvy_doctor::facts::cluster::ClusterFacts;
use divvy_doctor::{Asked, CheckStatus, Facts, Severity, checks};

use crate::host::{Host, debian, facts, none, one};

/// A change to a machine.
enum Change {
    /// This file has this content.
    File(&'static str, &'static str),
    /// This file does not exist.
    Remove(&'static str),
    /// In containerd's configuration, the first text is replaced by the second.
    Containerd(&'static str, &'static str),
    /// The same in kube-scheduler's configuration.
    Scheduler(&'static str, &'static str),
    /// The same in kube-scheduler's manifest.
    Manifest(&'static str, &'static str),
    By(fn(&mut Host)),
}

impl Change {
    fn apply(&self, host: &mut Host) {
        match *self {
            Change::File(path, text) => {
                host.files.file(path, text);
            }
            Change::Remove(path) => {
                host.files.remove(path);
            }
            Change::Containerd(from, to) => {
                host.containerd(from, to);
            }
            Change::Scheduler(from, to) => {
                host.scheduler(from, to);
            }
            Change::Manifest(from, to) => {
                host.manifest(from, to);
            }
            Change::By(change) => change(host),
        }
    }
}

/// A case: a check, a machine on which the check passes, and changes that make the check report a finding.
struct Case {
    id: &'static str,
    base: fn() -> Host,
    files: Change,
    answers: fn(&mut Facts<'_>),
    /// A change to the healthy cluster, which the facts contain if there is one.
    cluster: Option<fn(&mut ClusterFacts)>,
    /// A substring of the finding's text after the changes.
    found: &'static str,
    status: CheckStatus,
}

const fn files(id: &'static str, base: fn() -> Host, files: Change, found: &'static str) -> Case {
    Case {
        id,
        base,
        files,
        answers: |_| {},
        cluster: None,
        found,
        status: CheckStatus::Fail,
    }
}

const fn answers(id: &'static str, answers: fn(&mut Facts<'_>), found: &'static str) -> Case {
    Case {
        answers,
        ..files(id, debian, Change::By(|_| {}), found)
    }
}

const fn in_cluster(id: &'static str, cluster: fn(&mut ClusterFacts), found: &'static str) -> Case {
    Case {
        cluster: Some(cluster),
        ..files(id, debian, Change::By(|_| {}), found)
    }
}

const fn warns(case: Case) -> Case {
    Case {
        status: CheckStatus::Warn,
        ..case
    }
}

const fn notes(case: Case) -> Case {
    Case {
        status: CheckStatus::Note,
        ..case
    }
}

/// Return all cases.
fn cases() -> impl Iterator<Item = &'static Case> {
    [machine::CASES, engine::CASES, cluster::CASES].into_iter().flatten()
}

#[test]
fn every_check_passes_or_fires_as_it_should() {
    let mut shown = BTreeSet::new();
    let mut fixes = BTreeSet::new();
    for case in cases() {
        let host = (case.base)();
        let well = one(case.id, &facts(&host));
        assert_eq!(well.status, CheckStatus::Pass, "{}: {}", case.id, well.found);
        let mut broken = host.clone();
        case.files.apply(&mut broken);
        let mut facts = facts(&broken);
        (case.answers)(&mut facts);
        if let Some(change) = case.cluster {
            facts.cluster = Asked::Answer(cluster::changed(change));
        }
        let line = one(case.id, &facts);
        assert_eq!(line.status, case.status, "{}: {}", case.id, line.found);
        assert!(
            line.found.contains(case.found),
            "{}: {:?} has no {:?}",
            case.id,
            line.found,
            case.found
        );
        let (why, fix) = (line.why.unwrap_or_default(), line.fix.unwrap_or_default());
        assert!(why.len() > 20 && fix.len() > 5, "{}: {why:?} {fix:?}", case.id);
        shown.insert(case.id);
        fixes.insert(format!("{} {fix}", case.id));
    }
    // The tests of divvy try each command in these texts.
    insta::assert_snapshot!("fixes", Vec::from_iter(fixes).join("\n"));
    let all: BTreeSet<&str> = checks::ALL.iter().map(|check| check.id).collect();
    assert_eq!(shown, all, "every check has a case in which it fails");
    assert_eq!(all.len(), checks::ALL.len(), "an id names one check");
}

#[test]
fn the_worst_that_a_check_says_is_its_severity() {
    for check in checks::ALL {
        let worst = cases().filter(|case| case.id == check.id).map(|case| case.status).max();
        let expected = match check.severity {
            Severity::Error => CheckStatus::Fail,
            Severity::Warning => CheckStatus::Warn,
            Severity::Info => CheckStatus::Note,
        };
        assert_eq!(worst, Some(expected), "{}", check.id);
    }
}

#[test]
fn what_could_not_be_read_is_no_finding() {
    let mut host = debian();
    host.unreadable("/sys/module/nvidia/version");
    let line = one("D02", &facts(&host));
    assert_eq!(
        line.status,
        CheckStatus::Pass,
        "the directory of the module is enough: {}",
        line.found
    );
    let mut host = none();
    host.unreadable("/sys/bus/pci/devices");
    let line = one("D01", &facts(&host));
    assert!(line.could_not_look(), "{line:?}");
    assert_eq!(
        line.found,
        "/sys/bus/pci/devices: Permission denied (os error 13); run it as root"
    );
}

/// A check that passes in spite of a file that could not be read names that file.
#[test]
fn what_passes_names_what_could_not_be_read() {
    let mut host = debian();
    host.unreadable("/etc/docker/daemon.json");
    let line = one("C02", &facts(&host));
    assert_eq!(line.status, CheckStatus::Pass);
    assert!(
        line.found
            .ends_with("; could not be read: /etc/docker/daemon.json: Permission denied (os error 13)"),
        "{line:?}"
    );
}
