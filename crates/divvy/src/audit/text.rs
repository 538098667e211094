//! The result of an audit, as text and as JSON.

use std::fmt::Write as _;

use divvy_audit::{Finding, Level, Moment, Outcome, Summary, What, span};
use divvy_host::{plain, plain_line};
use serde::Serialize;

use crate::printer::paint;

/// The input of the audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope {
    /// True: the current state of the cluster. False: a recorded history.
    pub live: bool,
    /// Whether reports of containers (`--reports`) were given.
    pub reports: bool,
}

/// The overall result of an audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// No faults, and nothing unclear.
    Sound,
    /// At least one fault.
    Faults,
    /// No fault, but parts of the history could not be checked.
    Unclear,
    /// The input contains no GPU memory and no pod with an allocation.
    #[serde(rename = "nothing-seen")]
    NothingSeen,
}

/// Return the verdict on an outcome. The most severe finding decides.
pub fn verdict(outcome: &Outcome) -> Verdict {
    match outcome.worst() {
        Some(Level::Fault) => Verdict::Faults,
        Some(Level::Doubt) => Verdict::Unclear,
        _ if outcome.is_empty() => Verdict::NothingSeen,
        Some(Level::Note) | None => Verdict::Sound,
    }
}

/// The four questions that an audit answers, one line of text each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Question {
    Overcommitted,
    Allocated,
    Elsewhere,
    Leaked,
}

fn question(what: &What) -> Option<Question> {
    Some(match what {
        What::Overcommitted { .. } | What::OvercommittedByReports { .. } => Question::Overcommitted,
        What::AllocationChanged { .. }
        | What::AllocatedUnbound { .. }
        | What::BoundWithoutAllocation { .. }
        | What::Unreadable { .. }
        | What::NotOnNode { .. }
        | What::NotAsAsked { .. }
        | What::BoundToFailed { .. } => Question::Allocated,
        What::RanElsewhere { .. } | What::RanWithoutAllocation { .. } | What::ToldWrong { .. } | What::NotVoid { .. } => {
            Question::Elsewhere
        }
        What::HeldLong { .. } | What::StuckDeleting { .. } | What::OutlivedPod { .. } => Question::Leaked,
        _ => return None,
    })
}

/// Return one sentence that says why the result of the audit is not clear. `None` if it is clear.
pub fn unclear(outcome: &Outcome, scope: Scope) -> Option<String> {
    let Summary { nodes_seen, pods, .. } = outcome.summary;
    match verdict(outcome) {
        Verdict::Sound | Verdict::Faults => None,
        Verdict::Unclear => Some("the audit is incomplete; the findings above with UNCLEAR say what is missing".to_owned()),
        Verdict::NothingSeen => {
            let nodes = counted(nodes_seen, "node", "nodes");
            let seen = match (scope.live, nodes_seen, pods) {
                (_, 0, 0) => "no node and no pod was seen".to_owned(),
                (true, ..) => format!("{nodes} and {} were seen, none with GPU memory", counted(pods, "pod", "pods")),
                // A recorder omits pods that do not request GPU memory.
                (false, ..) => format!("{nodes} without GPU memory, and no pod that has any"),
            };
            let next = match (scope.live, nodes_seen) {
                (true, 0) => "check which cluster this is with kubectl config current-context",
                (true, _) => "find what is missing with divvy doctor --cluster",
                (false, _) => "record a cluster that shares GPU memory with divvy audit record FILE",
            };
            Some(format!("nothing to audit: {seen}; {next}"))
        }
    }
}

/// Return the whole result as text, which is empty for [`Verdict::NothingSeen`].
pub fn text(outcome: &Outcome, scope: Scope) -> String {
    if verdict(outcome) == Verdict::NothingSeen {
        return String::new();
    }
    let mut text = String::new();
    for finding in &outcome.findings {
        write_finding(&mut text, finding);
    }
    for (id, count) in &outcome.omitted {
        let _ = writeln!(text, "... and {} more of {id}\n", count);
    }
    text.push_str(&lines(outcome, scope));
    plain(&text).into_owned()
}

/// Color the levels of the findings in a text from [`text`].
pub fn coloured(text: &str) -> String {
    let levels = [("FAULT", "1;31"), ("UNCLEAR", "1;33"), ("NOTE", "36")];
    let lines = text.lines().map(|line| {
        let level = levels.iter().find_map(|(word, colour)| {
            let rest = line.strip_prefix(word)?;
            rest.starts_with("  ").then(|| format!("{}{rest}\n", paint(colour, word)))
        });
        level.unwrap_or_else(|| format!("{line}\n"))
    });
    lines.collect()
}

fn write_finding(text: &mut String, finding: &Finding) {
    let level = match finding.what.level() {
        Level::Fault => "FAULT",
        Level::Doubt => "UNCLEAR",
        Level::Note => "NOTE",
    };
    let _ = write!(text, "{level}  {}", finding.what.id());
    let from = moment(finding.at, false);
    let until = finding.until.map(|until| moment(until, same_day(finding.at, until)));
    let _ = match (from.as_str(), until) {
        ("", _) => writeln!(text),
        (from, Some(until)) if until != from => writeln!(text, "  {from} until {until}"),
        (from, _) => writeln!(text, "  {from}"),
    };
    // Names from the cluster must not be able to add lines.
    let _ = writeln!(text, "  {}", plain_line(finding.what.to_string().chars()));
    let _ = writeln!(text, "  Why it matters: {}.", finding.what.matters());
    let _ = writeln!(text, "  Next: {}\n", finding.what.next());
}

/// Return a finding in one line.
pub fn line(finding: &Finding) -> String {
    let at = moment(
        Moment {
            revision: None,
            ..finding.at
        },
        false,
    );
    let what = plain_line(finding.what.to_string().chars());
    if at.is_empty() { what } else { format!("{at}: {what}") }
}

fn timestamp(at_ms: i64) -> Option<jiff::Timestamp> {
    jiff::Timestamp::from_millisecond(at_ms).ok()
}

fn same_day(a: Moment, b: Moment) -> bool {
    let day = |moment: Moment| moment.at_ms.map(|ms| ms.div_euclid(86_400_000));
    day(a) == day(b)
}

/// Format a moment, such as `2026-01-02 03:04:05.678Z, revision 71`. With `short`, omit the date.
fn moment(at: Moment, short: bool) -> String {
    let format = if short { "%H:%M:%S%.3fZ" } else { "%Y-%m-%d %H:%M:%S%.3fZ" };
    let time = at.at_ms.and_then(timestamp).map(|time| time.strftime(format).to_string());
    let revision = at.revision.map(|revision| format!("revision {revision}"));
    [time, revision].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Format a number with separators between thousands: `1,912`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn counted(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", grouped(number), if number == 1 { one } else { many })
}

fn lines(outcome: &Outcome, scope: Scope) -> String {
    let summary = &outcome.summary;
    let count = |asked: Question| {
        outcome
            .findings
            .iter()
            .filter(|finding| question(&finding.what) == Some(asked))
            .count() as u64
    };
    let findings = |number: u64| format!("{} above", counted(number, "finding", "findings"));
    let mut text = String::new();
    let on = format!(
        "{} on {}",
        counted(summary.allocations, "allocation", "allocations"),
        counted(summary.gpus, "GPU", "GPUs")
    );
    let seen = match (
        scope.live,
        summary.first.and_then(|at| at.at_ms),
        summary.last.and_then(|at| at.at_ms),
    ) {
        (true, ..) => format!("{on}, {} of {} allocated", summary.most, summary.capacity),
        (false, Some(first), Some(last)) => {
            let changes = counted(summary.changes, "change", "changes");
            format!("{on} over {}, {changes}", span(last.saturating_sub(first)))
        }
        (false, ..) => format!("{on}, {}", counted(summary.changes, "change", "changes")),
    };
    let _ = match (count(Question::Overcommitted), scope.live) {
        (0, true) => writeln!(text, "No GPU is overcommitted: {seen}."),
        (0, false) => writeln!(text, "No GPU was ever overcommitted: {seen}."),
        (number, _) => writeln!(text, "GPUs were overcommitted: {} ({seen}).", findings(number)),
    };
    let _ = match (count(Question::Allocated), scope.live) {
        (0, true) => writeln!(text, "Every pod's allocation matches its request, on a GPU of its node."),
        (0, false) => writeln!(
            text,
            "Every pod's allocation matched its request, on a GPU of its node, and did not change after the binding."
        ),
        (number, _) => writeln!(text, "Some allocations are wrong: {}.", findings(number)),
    };
    let _ = match (count(Question::Elsewhere), scope.reports) {
        (0, false) => writeln!(
            text,
            "Where containers ran was not checked: this needs the containers' reports (--reports FILE)."
        ),
        (0, true) => writeln!(
            text,
            "No pod ran on another GPU than allocated: {} reported, each with its own GPU, the right amount of memory, and NVIDIA_VISIBLE_DEVICES=void.",
            counted(summary.containers, "container", "containers")
        ),
        (number, _) => writeln!(
            text,
            "Containers ran on another GPU, or with wrong variables: {}.",
            findings(number)
        ),
    };
    let held_now = outcome
        .findings
        .iter()
        .filter(|finding| matches!(finding.what, What::HeldNow { .. }))
        .count() as u64;
    let _ = match (count(Question::Leaked), held_now) {
        (0, 0) => writeln!(
            text,
            "Nothing leaked: no memory is held for a pod that is gone, and no deletion is late."
        ),
        (0, held) => writeln!(
            text,
            "No leak found yet: {} memory for pods that are gone, for a short or unknown time.",
            counted(held, "GPU holds", "GPUs hold")
        ),
        (number, _) => writeln!(text, "Something leaked: {}.", findings(number)),
    };
    let gaps: Vec<&Finding> = outcome
        .findings
        .iter()
        .filter(|finding| matches!(finding.what, What::Gap { .. }))
        .collect();
    if let Some(first) = gaps.first() {
        let lasted = gaps
            .iter()
            .filter_map(|gap| gap.until?.at_ms?.checked_sub(gap.at.at_ms?))
            .sum();
        let _ = writeln!(
            text,
            "The history has {}, {} in total; the first is at {}.",
            counted(gaps.len() as u64, "gap", "gaps"),
            span(lasted),
            moment(first.at, false)
        );
    }
    text
}

/// The whole result, for `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    verdict: Verdict,
    findings: Vec<FindingView>,
    /// The number of omitted findings of each id.
    omitted: std::collections::BTreeMap<&'static str, u64>,
    summary: SummaryView,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FindingView {
    id: &'static str,
    level: &'static str,
    from: MomentView,
    until: Option<MomentView>,
    what: String,
    why_it_matters: &'static str,
    next: String,
    node: Option<String>,
    gpu_index: Option<u32>,
    gpu_uuid: Option<String>,
    pods: Vec<PodView>,
}

#[derive(Debug, Serialize)]
struct PodView {
    namespace: String,
    name: String,
    uid: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MomentView {
    resource_version: Option<u64>,
    time: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SummaryView {
    from: Option<MomentView>,
    until: Option<MomentView>,
    changes: u64,
    pods: u64,
    allocations: u64,
    nodes_seen: u64,
    nodes: u64,
    gpus: u64,
    containers: u64,
    #[serde(rename = "mostMiB")]
    most: u64,
    #[serde(rename = "capacityMiB")]
    capacity: u64,
}

fn moment_view(at: Moment) -> MomentView {
    MomentView {
        resource_version: at.revision,
        time: at.at_ms.and_then(timestamp).map(|time| time.to_string()),
    }
}

/// Convert an outcome to the output of `-o json`.
pub fn answer(outcome: &Outcome) -> Answer {
    let summary = &outcome.summary;
    let findings = outcome.findings.iter().map(|finding| {
        let card = finding.what.card();
        FindingView {
            id: finding.what.id(),
            level: match finding.what.level() {
                Level::Fault => "fault",
                Level::Doubt => "unclear",
                Level::Note => "note",
            },
            from: moment_view(finding.at),
            until: finding.until.map(moment_view),
            what: finding.what.to_string(),
            why_it_matters: finding.what.matters(),
            next: finding.what.next(),
            node: card.map(|card| card.node.clone()),
            gpu_index: card.map(|card| card.index),
            gpu_uuid: card.and_then(|card| card.uuid.clone()),
            pods: finding
                .what
                .pods()
                .into_iter()
                .map(|(pod, uid)| PodView {
                    namespace: pod.namespace.clone(),
                    name: pod.name.clone(),
                    uid: uid.to_owned(),
                })
                .collect(),
        }
    });
    Answer {
        verdict: verdict(outcome),
        findings: findings.collect(),
        omitted: outcome.omitted.clone(),
        summary: SummaryView {
            from: summary.first.map(moment_view),
            until: summary.last.map(moment_view),
            changes: summary.changes,
            pods: summary.pods,
            allocations: summary.allocations,
            nodes_seen: summary.nodes_seen,
            nodes: summary.nodes,
            gpus: summary.gpus,
            containers: summary.containers,
            most: summary.most.0,
            capacity: summary.capacity.0,
        },
    }
}
