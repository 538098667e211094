//! The table, the JSON, and the exit status.

use std::fmt::Write as _;
use std::io::Write as _;

use divvy_host::{plain, plain_line};
use divvy_smoke_report::{SmokeOutcome, SmokeReport, StepId, StepStatus};
use serde::Serialize;

use crate::{GpuVerdict, Tried};

/// The number of GPUs about which the text says more than the table.
const DETAILS: usize = 20;

/// The result of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuResult {
    /// The node's name.
    pub node: String,
    /// The GPU's index; absent if the node's GPUs are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// The GPU's UUID.
    pub uuid: String,
    /// The GPU's product.
    pub model: String,
    /// `PASS`, `WARN`, `FAIL`, `SKIP` (nothing to try), or `ERROR` (could not be tried).
    pub result: &'static str,
    /// If the program reported nothing: why the GPU was not tried, or what is known to be wrong with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why it matters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What to do next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
    /// What `divvy why` says about a pod that waited, or the manifest of a pod that was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explanation: Option<String>,
    /// What the program in the pod reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<SmokeReport>,
    /// With `--report`: whether the GPU is now out of service (`out`), or in service again (`in`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<&'static str>,
    /// Why the annotation of the node could not be written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_error: Option<String>,
    /// From the pod's creation to its result, in milliseconds.
    pub ms: u64,
    /// What an earlier run found, because of which the GPU was out of service.
    #[serde(skip)]
    failed_before: Option<String>,
}

/// The results of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SmokeSummary {
    /// The GPUs, ordered by node and index.
    pub gpus: Vec<GpuResult>,
    /// The worst result.
    pub result: &'static str,
}

impl GpuResult {
    fn new(tried: Tried<'_>) -> GpuResult {
        let Tried {
            target,
            verdict,
            time,
            marked,
        } = tried;
        let mut row = GpuResult {
            node: target.node.clone(),
            index: target.index,
            uuid: target.uuid.clone(),
            model: target.model.clone(),
            result: verdict.word(),
            reason: None,
            why: None,
            fix: None,
            explanation: None,
            report: None,
            service: marked
                .filter(|(_, error)| error.is_none())
                .and_then(|(mark, _)| mark.service()),
            service_error: marked.and_then(|(_, error)| error.map(str::to_owned)),
            failed_before: target.failed_before.clone(),
            ms: u64::try_from(time.as_millis()).unwrap_or(u64::MAX),
        };
        match verdict.clone() {
            GpuVerdict::Tested(report) => row.report = Some(*report),
            GpuVerdict::Broken { found, why, fix } => (row.reason, row.why, row.fix) = (Some(found), Some(why), Some(fix)),
            GpuVerdict::Skipped(reason) => row.reason = Some(reason),
            GpuVerdict::Untried { reason, explanation } => (row.reason, row.explanation) = (Some(reason), explanation),
        }
        row
    }

    /// Return the status of a step, as in the table.
    fn step(&self, id: StepId) -> &'static str {
        self.report
            .as_ref()
            .and_then(|report| report.step(id))
            .map_or("-", |step| step.status.word())
    }

    fn name(&self) -> String {
        match self.index {
            Some(index) => format!("{} GPU {index} ({})", self.node, self.uuid),
            None => self.node.clone(),
        }
    }

    /// Return what became of the GPU with `--report`.
    fn service(&self) -> Option<String> {
        if let Some(error) = &self.service_error {
            return Some(format!(
                "The annotation of the node could not be written: {error}. You need the right to patch nodes: kubectl auth can-i patch nodes"
            ));
        }
        Some(match (self.service?, self.result, &self.failed_before) {
            ("in", ..) => "The GPU is in service again.".to_owned(),
            (_, "PASS" | "WARN", Some(before)) => {
                format!(
                    "The GPU stays out of service, because S02, S03, S04, and the step that failed before must pass; found before: {before}"
                )
            }
            (_, "FAIL", _) => "The GPU is out of service: Divvy gives it to no pod until it passes with --report.".to_owned(),
            _ => "The GPU stays out of service.".to_owned(),
        })
    }

    /// Return what the table does not say.
    fn details(&self) -> Option<String> {
        let service = self.service();
        if self.result == "PASS" && service.is_none() {
            return None;
        }
        let mut text = format!("{} {}", self.result, plain_line(self.name().chars()));
        if let Some(reason) = &self.reason {
            let _ = write!(text, ": {}", plain_line(reason.chars()));
        }
        text.push('\n');
        for (name, value) in [("why", &self.why), ("fix", &self.fix)] {
            if let Some(value) = value {
                let _ = writeln!(text, "  {name:<6} {}", plain_line(value.chars()));
            }
        }
        let steps = self.report.iter().flat_map(|report| &report.steps);
        let none_ran = self.result == "ERROR";
        for step in steps.filter(|step| step.status > StepStatus::Skip || (none_ran && step.status == StepStatus::Skip)) {
            for line in step.text().lines() {
                let _ = writeln!(text, "  {line}");
            }
        }
        if let Some(service) = service {
            let _ = writeln!(text, "  {}", plain_line(service.chars()));
        }
        for line in self.explanation.iter().flat_map(|explanation| explanation.lines()) {
            let _ = writeln!(text, "  {}", plain(line));
        }
        Some(text)
    }
}

impl SmokeSummary {
    /// Sum up the results of a run.
    pub fn new<'a>(results: impl IntoIterator<Item = Tried<'a>>) -> SmokeSummary {
        let mut gpus: Vec<GpuResult> = results.into_iter().map(GpuResult::new).collect();
        gpus.sort_by(|a, b| (&a.node, a.index).cmp(&(&b.node, b.index)));
        let mut worst = ["FAIL", "ERROR", "WARN", "PASS"].into_iter();
        let worst = worst.find(|word| gpus.iter().any(|row| row.result == *word));
        let result = worst.unwrap_or(SmokeOutcome::Skip.word());
        SmokeSummary { gpus, result }
    }

    /// Return the exit status: 0 passed, 1 a warning, 2 failed, 3 a GPU could not be tried, an annotation could not be written, or there was nothing to try.
    pub fn exit_status(&self) -> u8 {
        let is_unmarked = self.gpus.iter().any(|row| row.service_error.is_some());
        match self.result {
            "PASS" | "WARN" if is_unmarked => SmokeOutcome::Skip.exit_status(),
            "PASS" => SmokeOutcome::Pass.exit_status(),
            "WARN" => SmokeOutcome::Warn.exit_status(),
            "FAIL" => SmokeOutcome::Fail.exit_status(),
            _ => SmokeOutcome::Skip.exit_status(),
        }
    }

    /// Return the table, what was found, and one line with the numbers.
    pub fn text(&self) -> String {
        let mut cells = "NODE\tGPU\tMODEL\tRESULT".to_owned();
        for id in StepId::ALL {
            let _ = write!(cells, "\t{}", id.word());
        }
        cells.push_str("\tTIME\n");
        for row in &self.gpus {
            let index = row.index.map_or_else(|| "-".to_owned(), |index| index.to_string());
            let model = if row.model.is_empty() { "-" } else { &row.model };
            let _ = write!(cells, "{}\t{index}\t{}\t{}", row.node, plain_line(model.chars()), row.result);
            for id in StepId::ALL {
                let _ = write!(cells, "\t{}", row.step(id));
            }
            let time = if row.report.is_some() {
                format!("{:.1}s", row.ms as f64 / 1000.0)
            } else {
                "-".to_owned()
            };
            let _ = writeln!(cells, "\t{time}");
        }
        let mut text = columns(&cells);
        let mut details = self.gpus.iter().filter_map(GpuResult::details);
        for details in details.by_ref().take(DETAILS) {
            let _ = write!(text, "\n{details}");
        }
        let more = details.count();
        if more > 0 {
            let _ = writeln!(text, "\nand {more} more; -o json shows all");
        }
        let _ = write!(text, "\n{}", self.last_line());
        text
    }

    fn last_line(&self) -> String {
        let words = [
            ("PASS", "passed"),
            ("WARN", "with a warning"),
            ("FAIL", "failed"),
            ("SKIP", "skipped"),
            ("ERROR", "not tried"),
        ];
        let numbers = words.iter().filter_map(|(word, text)| {
            let number = self.gpus.iter().filter(|row| row.result == *word).count();
            (number > 0).then(|| format!("{number} {text}"))
        });
        format!("Result = {}: {}\n", self.result, numbers.collect::<Vec<_>>().join(", "))
    }
}

/// Align tab-separated cells in columns, as kubectl does.
fn columns(cells: &str) -> String {
    let mut writer = tabwriter::TabWriter::new(Vec::new()).minwidth(0).padding(2);
    let written = writer.write_all(cells.as_bytes()).and_then(|()| writer.flush());
    let bytes = written.ok().and_then(|()| writer.into_inner().ok());
    bytes
        .and_then(|bytes| String::from_utf8(bytes).ok())
        .unwrap_or_else(|| cells.to_owned())
}
