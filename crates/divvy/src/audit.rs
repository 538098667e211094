//! The result of `divvy audit`, as text and as JSON.

use std::fmt::Write as _;

use divvy_audit::{AuditOutcome, Finding, FindingKind, FindingLevel, Moment, Summary};
use divvy_host::{plain, plain_line};
use serde::Serialize;

use crate::printer::paint;

/// The overall result of an audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AuditVerdict {
    /// No faults, and nothing unclear.
    Sound,
    /// At least one fault.
    Faults,
    /// No fault, but something could not be checked.
    Unclear,
    /// The cluster has no GPU memory and no pod with an allocation.
    #[serde(rename = "nothing-seen")]
    NothingSeen,
}

/// Return the verdict on an outcome. The most severe finding decides.
pub fn verdict(outcome: &AuditOutcome) -> AuditVerdict {
    match outcome.worst() {
        Some(FindingLevel::Fault) => AuditVerdict::Faults,
        Some(FindingLevel::Doubt) => AuditVerdict::Unclear,
        _ if outcome.is_empty() => AuditVerdict::NothingSeen,
        Some(FindingLevel::Note) | None => AuditVerdict::Sound,
    }
}

/// The questions that an audit answers, one line of text each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AuditQuestion {
    Overcommitted,
    Allocated,
    Leaked,
}

fn question(what: &FindingKind) -> Option<AuditQuestion> {
    Some(match what {
        FindingKind::Overcommitted { .. } => AuditQuestion::Overcommitted,
        FindingKind::AllocatedUnbound { .. }
        | FindingKind::BoundWithoutAllocation { .. }
        | FindingKind::Unreadable { .. }
        | FindingKind::NotOnNode { .. }
        | FindingKind::NotAsAsked { .. } => AuditQuestion::Allocated,
        FindingKind::HeldLong { .. } | FindingKind::StuckDeleting { .. } => AuditQuestion::Leaked,
        _ => return None,
    })
}

/// Return one sentence that says why the result of the audit is not clear. `None` if it is clear.
pub fn unclear(outcome: &AuditOutcome) -> Option<String> {
    let Summary { nodes_seen, pods, .. } = outcome.summary;
    match verdict(outcome) {
        AuditVerdict::Sound | AuditVerdict::Faults => None,
        AuditVerdict::Unclear => Some("the audit is incomplete; the findings above with UNCLEAR say what is missing".to_owned()),
        AuditVerdict::NothingSeen => {
            let (nodes, pods_seen) = (counted(nodes_seen, "node", "nodes"), counted(pods, "pod", "pods"));
            let seen = match (nodes_seen, pods) {
                (0, 0) => "no node and no pod was seen".to_owned(),
                _ => format!("{nodes} and {pods_seen} were seen, none with GPU memory"),
            };
            let next = match nodes_seen {
                0 => "check which cluster this is with kubectl config current-context",
                _ => "find what is missing with divvy doctor --cluster",
            };
            Some(format!("nothing to audit: {seen}; {next}"))
        }
    }
}

/// Return the whole result as text, which is empty for [`AuditVerdict::NothingSeen`].
pub fn text(outcome: &AuditOutcome) -> String {
    if verdict(outcome) == AuditVerdict::NothingSeen {
        return String::new();
    }
    let mut text = String::new();
    for finding in &outcome.findings {
        write_finding(&mut text, finding);
    }
    for (id, count) in &outcome.omitted {
        let _ = writeln!(text, "... and {} more of {id}\n", count);
    }
    text.push_str(&lines(outcome));
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
        FindingLevel::Fault => "FAULT",
        FindingLevel::Doubt => "UNCLEAR",
        FindingLevel::Note => "NOTE",
    };
    let _ = write!(text, "{level}  {}", finding.what.id());
    let from = moment(finding.at);
    let _ = match from.as_str() {
        "" => writeln!(text),
        from => writeln!(text, "  {from}"),
    };
    // Names from the cluster must not be able to add lines.
    let _ = writeln!(text, "  {}", plain_line(finding.what.to_string().chars()));
    if let Some((matters, next)) = finding.what.advice() {
        let _ = writeln!(text, "  Why it matters: {matters}.\n  Next: {next}");
    }
    text.push('\n');
}

fn timestamp(at_ms: i64) -> Option<jiff::Timestamp> {
    jiff::Timestamp::from_millisecond(at_ms).ok()
}

/// Format a moment, such as `2026-01-02 03:04:05.678Z, revision 71`.
fn moment(at: Moment) -> String {
    let time = at.at_ms.and_then(timestamp);
    let time = time.map(|time| time.strftime("%Y-%m-%d %H:%M:%S%.3fZ").to_string());
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

fn lines(outcome: &AuditOutcome) -> String {
    let summary = &outcome.summary;
    let count = |asked: AuditQuestion| {
        outcome
            .findings
            .iter()
            .filter(|finding| question(&finding.what) == Some(asked))
            .count() as u64
    };
    let findings = |number: u64| format!("{} above", counted(number, "finding", "findings"));
    let mut text = String::new();
    let seen = format!(
        "{} on {}, {} of {} allocated",
        counted(summary.allocations, "allocation", "allocations"),
        counted(summary.gpus, "GPU", "GPUs"),
        summary.most,
        summary.capacity
    );
    let _ = match count(AuditQuestion::Overcommitted) {
        0 => writeln!(text, "No GPU is overcommitted: {seen}."),
        number => writeln!(text, "GPUs were overcommitted: {} ({seen}).", findings(number)),
    };
    let _ = match count(AuditQuestion::Allocated) {
        0 => writeln!(text, "Every pod's allocation matches its request, on a GPU of its node."),
        number => writeln!(text, "Some allocations are wrong: {}.", findings(number)),
    };
    text.push_str("Where containers ran was not checked: the API server does not know which GPUs they use.\n");
    let held_now = outcome
        .findings
        .iter()
        .filter(|finding| matches!(finding.what, FindingKind::HeldNow { .. }))
        .count() as u64;
    let _ = match (count(AuditQuestion::Leaked), held_now) {
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
    text
}

/// The whole result, for `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditAnswer {
    verdict: AuditVerdict,
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
    pods: Vec<AuditedPod>,
}

#[derive(Debug, Serialize)]
struct AuditedPod {
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
pub fn answer(outcome: &AuditOutcome) -> AuditAnswer {
    let summary = &outcome.summary;
    let findings = outcome.findings.iter().map(|finding| {
        let card = finding.what.card();
        let (why_it_matters, next) = finding.what.advice().unwrap_or_default();
        FindingView {
            id: finding.what.id(),
            level: match finding.what.level() {
                FindingLevel::Fault => "fault",
                FindingLevel::Doubt => "unclear",
                FindingLevel::Note => "note",
            },
            from: moment_view(finding.at),
            until: finding.until.map(moment_view),
            what: finding.what.to_string(),
            why_it_matters,
            next,
            node: card.map(|card| card.node.clone()),
            gpu_index: card.map(|card| card.index),
            gpu_uuid: card.and_then(|card| card.uuid.clone()),
            pods: finding
                .what
                .pods()
                .into_iter()
                .map(|(pod, uid)| AuditedPod {
                    namespace: pod.namespace.clone(),
                    name: pod.name.clone(),
                    uid: uid.to_owned(),
                })
                .collect(),
        }
    });
    AuditAnswer {
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
