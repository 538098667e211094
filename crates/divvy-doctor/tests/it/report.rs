//! The report.

use divvy_doctor::{Asked, Report, checks};

use crate::host::{debian, facts};

#[test]
fn the_exit_status_is_that_of_the_worst_finding() {
    let host = debian();
    let mut facts = facts(&host);
    let status = |facts: &divvy_doctor::Facts<'_>| Report::of(facts, checks::ALL).exit_status();
    assert_eq!(status(&facts), 0);
    facts.kernel_log = Asked::Answer("NVRM: Xid (PCI:0000:81:00): 79, GPU has fallen off the bus.".to_owned());
    assert_eq!(status(&facts), 1);
    facts.probe = Asked::Failed("it hangs".to_owned());
    assert_eq!(status(&facts), 2);
}

#[test]
fn a_finding_has_its_three_lines_and_colour_only_where_it_is_wanted() {
    let host = debian();
    let mut facts = facts(&host);
    facts.probe = Asked::Failed("it hangs".to_owned());
    let only: Vec<_> = checks::ALL
        .iter()
        .filter(|check| ["D02", "D11"].contains(&check.id))
        .copied()
        .collect();
    let report = Report::of(&facts, &only);
    insta::assert_snapshot!(report.text(false));
    let coloured = report.text(true);
    assert!(coloured.contains("\x1b[1;31mFAIL\x1b[0m D11") && coloured.contains("\x1b[32mPASS\x1b[0m D02"));
}
