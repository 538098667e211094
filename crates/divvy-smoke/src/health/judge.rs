//! What follows from the states of a GPU before and after a run, and from the errors in between.

use divvy_smoke_report::TestedGpu;
use serde::Deserialize;

use crate::codes::StepFinding;
use crate::steps::{DoneStep, StepOutcome, StepProblem};

/// The clocks event reasons with which the hardware, or its temperature, slows a GPU down (nvml.h, `nvmlClocksThrottleReasonHwSlowdown` and so on). The
/// other reasons are settings, a limit on the power, and that the GPU is idle.
const SLOWED: [(u64, &str); 4] = [
    (0x8, "hardware slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "hardware power brake"),
    (0x20, "software thermal slowdown"),
];

/// The XID which says that a row or a page of the memory will be replaced at a reset, and thus that this did not fail. A failure is XID 64
/// (<https://docs.nvidia.com/deploy/xid-errors/>).
const WILL_BE_REPLACED: u64 = 63;

/// A line that `divvy-probe --watch` prints.
#[derive(Deserialize)]
pub(super) struct ProbeLine {
    #[serde(default)]
    snapshot: Option<JudgedSnapshot>,
    #[serde(default)]
    fault: Option<ReportedFault>,
}

/// The parts of a snapshot that say something about health. Their names are those of the probe.
#[derive(Deserialize)]
pub(super) struct JudgedSnapshot {
    gpus: Vec<JudgedFacts>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct JudgedFacts {
    uuid: String,
    #[serde(default)]
    temperature: Option<u32>,
    #[serde(default)]
    lost: bool,
    #[serde(default)]
    error: Option<String>,
    #[serde(default)]
    mig_devices: Vec<JudgedMig>,
    #[serde(default)]
    no_events: Option<JudgedNoEvents>,
    #[serde(default)]
    uncorrected_ecc_errors: Option<u64>,
    #[serde(default)]
    remapped_rows: Option<JudgedRows>,
    #[serde(default)]
    retired_pages_pending: Option<bool>,
    #[serde(default)]
    clocks_event_reasons: Option<u64>,
}

#[derive(Deserialize)]
struct JudgedMig {
    uuid: String,
    gi: u32,
    ci: u32,
}

#[derive(Deserialize)]
struct JudgedNoEvents {
    error: String,
}

#[derive(Deserialize)]
struct JudgedRows {
    correctable: u32,
    uncorrectable: u32,
    pending: bool,
    failure: bool,
}

/// An error that the driver reported during the run.
#[derive(Deserialize)]
pub(super) struct ReportedFault {
    vendor: String,
    /// The GPU. `None` if the driver names none, and then it may be any.
    uuid: Option<String>,
    code: u64,
    fatal: bool,
    name: String,
    /// The GPU instance and the compute instance.
    #[serde(default)]
    partition: Option<(u32, u32)>,
}

/// What the probe has printed.
#[derive(Default)]
pub(super) struct Heard {
    pub(super) before: Option<JudgedSnapshot>,
    after: Option<JudgedSnapshot>,
    faults: Vec<ReportedFault>,
}

impl JudgedSnapshot {
    fn of(&self, gpu: &TestedGpu) -> Option<&JudgedFacts> {
        let is_it = |facts: &&JudgedFacts| facts.uuid == gpu.uuid || facts.mig_devices.iter().any(|mig| mig.uuid == gpu.uuid);
        self.gpus.iter().find(is_it)
    }
}

impl Heard {
    pub(super) fn take(&mut self, line: ProbeLine) {
        self.faults.extend(line.fault);
        let state = if self.before.is_none() {
            &mut self.before
        } else {
            &mut self.after
        };
        if line.snapshot.is_some() {
            *state = line.snapshot;
        }
    }

    /// Judge the GPU on which the steps ran.
    pub(super) fn judge(&self, gpu: &TestedGpu) -> StepOutcome {
        let before = self.before.as_ref().and_then(|snapshot| snapshot.of(gpu));
        let before = before.ok_or_else(|| StepProblem::Skip(format!("divvy-probe does not list {}", gpu.uuid)))?;
        let after = self.after.as_ref().map(|snapshot| snapshot.of(gpu));
        // Without a state after the run, what was there before it still counts.
        let now = after.flatten().unwrap_or(before);
        let is_gone = matches!(after, Some(None));
        let faults: Vec<&ReportedFault> = self.faults.iter().filter(|fault| fault.concerns(before, gpu)).collect();
        let failures = vec![
            loss(before, now, is_gone),
            fatal(&faults, &now.uuid),
            new_errors(before, now),
            failed_row(now),
        ];
        if let Some(finding) = together(failures) {
            return Err(StepProblem::Finding(StepFinding {
                gpu_at_fault: true,
                ..finding
            }));
        }
        let warning = together(vec![
            replaced_later(&faults, &now.uuid),
            of_programs(&faults),
            old_errors(now),
            pending(now),
            slowed(now),
        ]);
        let answers = match warning {
            None => "the driver answers, and reported no error during the run",
            Some(_) => "the driver answers",
        };
        Ok(DoneStep {
            warning,
            ..DoneStep::new(format!("{answers}{}{}", now.numbers(), now.silence()), 0)
        })
    }
}

impl ReportedFault {
    /// Report whether this concerns a GPU, which `facts` describes. It may be a MIG device.
    fn concerns(&self, facts: &JudgedFacts, gpu: &TestedGpu) -> bool {
        let own = facts.mig_devices.iter().find(|mig| mig.uuid == gpu.uuid);
        let is_elsewhere = |own: &JudgedMig| {
            self.partition.is_some_and(|partition| {
                partition != (own.gi, own.ci) && facts.mig_devices.iter().any(|mig| partition == (mig.gi, mig.ci))
            })
        };
        self.vendor == "nvidia" && self.uuid.as_ref().is_none_or(|uuid| *uuid == facts.uuid) && !own.is_some_and(is_elsewhere)
    }
}

impl JudgedFacts {
    /// Return the part of the sentence that says why XIDs could not be received; empty if they could. This is not a warning, because a container may lack
    /// the permission. On the node, the agent judges it.
    fn silence(&self) -> String {
        let of = |no_events: &JudgedNoEvents| format!("; XIDs could not be received: {}", no_events.error);
        self.no_events.as_ref().map(of).unwrap_or_default()
    }

    /// Return the values as a part of a sentence.
    fn numbers(&self) -> String {
        let mut text = String::new();
        let mut add = |number: u64, what: &str| {
            text.push_str(", ");
            text.push_str(&number.to_string());
            text.push_str(what);
        };
        if let Some(errors) = self.uncorrected_ecc_errors {
            add(errors, plural(errors, [" uncorrected ECC error", " uncorrected ECC errors"]));
        }
        if let Some(rows) = self.remapped_rows.as_ref().map(JudgedRows::number) {
            add(rows, plural(rows, [" remapped row", " remapped rows"]));
        }
        if let Some(degrees) = self.temperature {
            add(degrees.into(), " °C");
        }
        if self
            .clocks_event_reasons
            .is_some_and(|reasons| SLOWED.iter().all(|(bit, _)| reasons & bit == 0))
        {
            text.push_str(", no slowdown by the hardware");
        }
        text
    }
}

impl JudgedRows {
    /// Return how many rows were replaced.
    fn number(&self) -> u64 {
        u64::from(self.correctable) + u64::from(self.uncorrectable)
    }
}

fn plural(number: u64, [one, several]: [&'static str; 2]) -> &'static str {
    if number == 1 { one } else { several }
}

/// Return one finding for several. It has the reason and the advice of the first.
fn together(findings: Vec<Option<StepFinding>>) -> Option<StepFinding> {
    let mut all: Option<StepFinding> = None;
    for finding in findings.into_iter().flatten() {
        match &mut all {
            Some(all) => {
                all.found.push_str("; ");
                all.found.push_str(&finding.found);
            }
            None => all = Some(finding),
        }
    }
    all
}

fn loss(before: &JudgedFacts, now: &JudgedFacts, is_gone: bool) -> Option<StepFinding> {
    let found = match &now.error {
        _ if is_gone => "the driver no longer lists the GPU".to_owned(),
        _ if before.lost => "the driver reports the GPU as lost".to_owned(),
        _ if now.lost => "the GPU was lost during the run".to_owned(),
        Some(error) => format!("the driver cannot describe the GPU: {error}"),
        None => return None,
    };
    Some(StepFinding::new(
        found,
        "the GPU may fail at any time, even if all results were right so far",
        "drain the GPU; look for an XID in the node's kernel log (dmesg | grep NVRM)",
    ))
}

/// Return the names of the faults that this selects, each once.
fn names(faults: &[&ReportedFault], is_selected: fn(&ReportedFault) -> bool) -> Option<String> {
    let mut names: Vec<&str> = Vec::new();
    for fault in faults.iter().filter(|fault| is_selected(fault)) {
        if !names.contains(&fault.name.as_str()) {
            names.push(&fault.name);
        }
    }
    (!names.is_empty()).then(|| names.join(", "))
}

fn fatal(faults: &[&ReportedFault], uuid: &str) -> Option<StepFinding> {
    let names = names(faults, |fault| fault.fatal && fault.code != WILL_BE_REPLACED)?;
    Some(StepFinding::new(
        format!("the driver reported {names} during the run"),
        "the GPU or its connection has an error that ends programs",
        format!(
            "drain the GPU; dmesg | grep NVRM on the node has the details, and https://docs.nvidia.com/deploy/xid-errors/ the meaning; reset the GPU (nvidia-smi --gpu-reset -i {uuid})"
        ),
    ))
}

fn new_errors(before: &JudgedFacts, now: &JudgedFacts) -> Option<StepFinding> {
    let (before, after) = before.uncorrected_ecc_errors.zip(now.uncorrected_ecc_errors)?;
    (after > before).then(|| {
        StepFinding::new(
            format!("the number of uncorrected ECC errors rose from {before} to {after} during the run"),
            "data in the GPU's memory was lost, and programs that read it are ended",
            format!(
                "drain the GPU, then reset it (nvidia-smi --gpu-reset -i {uuid}); nvidia-smi -q -d ECC,ROW_REMAPPER -i {uuid} has the counters, and a GPU on which they rise again is to be replaced",
                uuid = now.uuid
            ),
        )
    })
}

fn failed_row(now: &JudgedFacts) -> Option<StepFinding> {
    let rows = now.remapped_rows.as_ref().filter(|rows| rows.failure)?;
    Some(StepFinding::new(
        format!(
            "a row of the GPU's memory could not be replaced by a spare one, after {} that could",
            rows.number()
        ),
        "the GPU has no spare rows left for a part of its memory, so errors there return",
        format!(
            "drain the GPU and replace it; nvidia-smi -q -d ROW_REMAPPER -i {} has the counters",
            now.uuid
        ),
    ))
}

/// The reason and the advice for memory that a reset repairs.
fn needs_reset(found: String, uuid: &str) -> StepFinding {
    StepFinding::new(
        found,
        "memory that had errors is replaced only when the GPU is reset",
        format!("when no program uses the GPU, reset it (nvidia-smi --gpu-reset -i {uuid}), or reboot the node"),
    )
}

fn replaced_later(faults: &[&ReportedFault], uuid: &str) -> Option<StepFinding> {
    let names = names(faults, |fault| fault.code == WILL_BE_REPLACED)?;
    Some(needs_reset(format!("the driver reported {names} during the run"), uuid))
}

fn of_programs(faults: &[&ReportedFault]) -> Option<StepFinding> {
    let names = names(faults, |fault| !fault.fatal && fault.code != WILL_BE_REPLACED)?;
    Some(StepFinding::new(
        format!("the driver reported {names} during the run"),
        "a program on this GPU made an error and was ended; on a shared GPU it may be that of another container",
        "dmesg | grep NVRM on the node names the process",
    ))
}

fn old_errors(now: &JudgedFacts) -> Option<StepFinding> {
    let errors = now.uncorrected_ecc_errors.filter(|errors| *errors > 0)?;
    Some(StepFinding::new(
        format!(
            "the GPU has had {errors} uncorrected ECC {} since the driver was loaded",
            plural(errors, ["error", "errors"])
        ),
        "the memory had errors that ended programs, and they may return",
        format!(
            "nvidia-smi -q -d ECC -i {} says where they were; drain the GPU and reset it if the number rises",
            now.uuid
        ),
    ))
}

fn pending(now: &JudgedFacts) -> Option<StepFinding> {
    let what = match (&now.remapped_rows, now.retired_pages_pending) {
        (Some(rows), _) if rows.pending => "rows",
        (_, Some(true)) => "pages",
        _ => return None,
    };
    Some(needs_reset(
        format!("{what} of the GPU's memory are to be replaced at the next reset"),
        &now.uuid,
    ))
}

fn slowed(now: &JudgedFacts) -> Option<StepFinding> {
    let reasons = now.clocks_event_reasons?;
    let names: Vec<&str> = SLOWED
        .iter()
        .filter_map(|(bit, name)| (reasons & bit != 0).then_some(*name))
        .collect();
    (!names.is_empty()).then(|| {
        StepFinding::new(
            format!("the GPU is slowed down: {}", names.join(", ")),
            "programs run slower than on other GPUs of the model",
            format!(
                "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {} has the reasons; check the cooling and the power supply of the node",
                now.uuid
            ),
        )
    })
}

#[cfg(test)]
mod tests {
    use divvy_smoke_report::{SmokeStep, StepId};

    use super::*;

    const HEALTHY: &str = r#""uncorrectedEccErrors":0,"remappedRows":{"correctable":0,"uncorrectable":0,"pending":false,"failure":false},"clocksEventReasons":1,"temperature":40"#;

    fn line(text: &str) -> ProbeLine {
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn snapshot(facts: &str) -> ProbeLine {
        line(&format!(
            r#"{{"snapshot":{{"v":2,"gpus":[{{"uuid":"GPU-0"}},{{"uuid":"GPU-1",{facts}}}]}}}}"#
        ))
    }

    /// The step for a GPU with these facts, these later ones, and faults in between.
    fn judged(before: &str, after: Option<&str>, faults: &[&str], uuid: &str) -> SmokeStep {
        let mut heard = Heard::default();
        heard.take(snapshot(before));
        for fault in faults {
            heard.take(line(&format!(r#"{{"fault":{{"vendor":"nvidia",{fault}}}}}"#)));
        }
        if let Some(after) = after {
            heard.take(snapshot(after));
        }
        let gpu = TestedGpu {
            uuid: uuid.to_owned(),
            ..TestedGpu::default()
        };
        crate::run::result(StepId::S08, heard.judge(&gpu))
    }

    /// The status and what was found. A failure shows that the GPU is at fault, and nothing else does.
    fn text(step: &SmokeStep) -> String {
        assert_eq!(
            step.gpu_at_fault,
            step.status == divvy_smoke_report::StepStatus::Fail,
            "{step:?}"
        );
        format!("{} {}", step.status.word(), step.found)
    }

    #[test]
    fn the_states_before_and_after_the_run_are_judged() {
        let rows = |pending: bool, failure: bool| {
            format!(r#""remappedRows":{{"correctable":1,"uncorrectable":2,"pending":{pending},"failure":{failure}}}"#)
        };
        let (waiting, failed) = (rows(true, false), rows(false, true));
        let (waiting, failed) = (waiting.as_str(), failed.as_str());
        let ecc = |number: u64| format!(r#""uncorrectedEccErrors":{number}"#);
        let (none, one, three) = (ecc(0), ecc(1), ecc(3));
        let (none, one, three) = (none.as_str(), one.as_str(), three.as_str());
        for (before, after, expected) in [
            (
                HEALTHY,
                HEALTHY,
                "PASS the driver answers, and reported no error during the run, 0 uncorrected ECC errors, 0 remapped rows, 40 °C, no slowdown by the hardware",
            ),
            (
                r#""temperature":40"#,
                r#""temperature":41"#,
                "PASS the driver answers, and reported no error during the run, 41 °C",
            ),
            (
                none,
                three,
                "FAIL the number of uncorrected ECC errors rose from 0 to 3 during the run",
            ),
            (
                one,
                three,
                "FAIL the number of uncorrected ECC errors rose from 1 to 3 during the run",
            ),
            (
                three,
                three,
                "WARN the GPU has had 3 uncorrected ECC errors since the driver was loaded; the driver answers, 3 uncorrected ECC errors",
            ),
            // The driver was loaded again.
            (
                three,
                none,
                "PASS the driver answers, and reported no error during the run, 0 uncorrected ECC errors",
            ),
            // A driver that does not count.
            (
                r#""temperature":40"#,
                one,
                "WARN the GPU has had 1 uncorrected ECC error since the driver was loaded; the driver answers, 1 uncorrected ECC error",
            ),
            (
                HEALTHY,
                failed,
                "FAIL a row of the GPU's memory could not be replaced by a spare one, after 3 that could",
            ),
            (
                waiting,
                waiting,
                "WARN rows of the GPU's memory are to be replaced at the next reset; the driver answers, 3 remapped rows",
            ),
            (
                r#""retiredPagesPending":true"#,
                r#""retiredPagesPending":true"#,
                "WARN pages of the GPU's memory are to be replaced at the next reset; the driver answers",
            ),
            (
                r#""retiredPagesPending":false"#,
                r#""retiredPagesPending":false"#,
                "PASS the driver answers, and reported no error during the run",
            ),
            (HEALTHY, r#""lost":true,"error":"x""#, "FAIL the GPU was lost during the run"),
            (r#""lost":true"#, r#""lost":true"#, "FAIL the driver reports the GPU as lost"),
            (HEALTHY, r#""error":"x""#, "FAIL the driver cannot describe the GPU: x"),
            (
                HEALTHY,
                r#""noEvents":{"error":"y","ms":1}"#,
                "PASS the driver answers, and reported no error during the run; XIDs could not be received: y",
            ),
        ] {
            let step = judged(before, Some(after), &[], "GPU-1");
            assert_eq!(text(&step), expected, "{step:?}");
        }
    }

    #[test]
    fn only_the_hardwares_reasons_to_slow_a_gpu_down_are_a_warning() {
        for (reasons, names) in [
            (0, None),
            (0x1 | 0x2 | 0x4 | 0x10 | 0x100, None),
            (0x8, Some("hardware slowdown")),
            (0x20, Some("software thermal slowdown")),
            (0x40 | 0x8 | 0x4, Some("hardware slowdown, hardware thermal slowdown")),
            (0x80, Some("hardware power brake")),
            (1_u64 << 40, None),
        ] {
            let step = judged(HEALTHY, Some(&format!(r#""clocksEventReasons":{reasons}"#)), &[], "GPU-1");
            let expected = match names {
                None => "PASS the driver answers, and reported no error during the run, no slowdown by the hardware".to_owned(),
                Some(names) => format!("WARN the GPU is slowed down: {names}; the driver answers"),
            };
            assert_eq!(text(&step), expected, "{reasons:#x}");
        }
    }

    #[test]
    fn an_error_of_the_hardware_fails_and_one_of_a_program_warns() {
        let fault = |code: u64, fatal: bool| {
            format!(r#""uuid":"GPU-1","code":{code},"fatal":{fatal},"name":"XID {code}","partition":null"#)
        };
        for code in [48, 64, 74, 79, 94, 95, 119] {
            let step = judged(HEALTHY, Some(HEALTHY), &[&fault(code, true), &fault(code, true)], "GPU-1");
            assert_eq!(text(&step), format!("FAIL the driver reported XID {code} during the run"));
            let without_end = judged(HEALTHY, None, &[&fault(code, true)], "GPU-1");
            assert_eq!(text(&without_end), text(&step));
        }
        for (code, is_fatal) in [(63, true), (13, false), (31, false), (43, false)] {
            let step = judged(HEALTHY, Some(HEALTHY), &[&fault(code, is_fatal)], "GPU-1");
            assert!(
                text(&step).starts_with(&format!(
                    "WARN the driver reported XID {code} during the run; the driver answers, "
                )),
                "{step:?}"
            );
        }
        let step = judged(
            HEALTHY,
            Some(r#""lost":true"#),
            &[&fault(31, false), &fault(79, true)],
            "GPU-1",
        );
        assert_eq!(
            text(&step),
            "FAIL the GPU was lost during the run; the driver reported XID 79 during the run"
        );
    }

    #[test]
    fn an_error_counts_only_for_its_own_gpu_and_its_own_mig_device() {
        let divided = r#""migDevices":[{"index":0,"uuid":"MIG-1","gi":1,"ci":0},{"index":1,"uuid":"MIG-2","gi":2,"ci":0}]"#;
        for (facts, uuid, fault, counts) in [
            (HEALTHY, "GPU-1", r#""uuid":"GPU-1","#, true),
            (HEALTHY, "GPU-1", r#""uuid":null,"#, true),
            (HEALTHY, "GPU-1", r#""uuid":"GPU-0","#, false),
            (divided, "MIG-1", r#""uuid":"GPU-1","partition":[1,0],"#, true),
            (divided, "MIG-1", r#""uuid":"GPU-1","partition":[2,0],"#, false),
            (divided, "MIG-1", r#""uuid":"GPU-1","partition":[9,0],"#, true),
            (divided, "MIG-1", r#""uuid":"GPU-1","#, true),
        ] {
            let step = judged(
                facts,
                Some(facts),
                &[&format!(r#"{fault}"code":79,"fatal":true,"name":"XID 79""#)],
                uuid,
            );
            assert_eq!(step.gpu_at_fault, counts, "{uuid} {fault} {step:?}");
        }
    }

    /// A GPU that was never listed is skipped.
    #[test]
    fn a_gpu_that_is_listed_no_longer_fails() {
        let step = judged(HEALTHY, Some(HEALTHY), &[], "GPU-2");
        assert_eq!(text(&step), "SKIP divvy-probe does not list GPU-2");
        let mut heard = Heard::default();
        heard.take(snapshot(HEALTHY));
        heard.take(line(r#"{"snapshot":{"gpus":[]}}"#));
        let gpu = TestedGpu {
            uuid: "GPU-1".to_owned(),
            ..TestedGpu::default()
        };
        let step = crate::run::result(StepId::S08, heard.judge(&gpu));
        assert_eq!(text(&step), "FAIL the driver no longer lists the GPU");
    }

    #[test]
    fn each_finding_has_a_reason_and_the_command_to_type_next() {
        let xid = |code: u64, fatal: bool| format!(r#""uuid":"GPU-1","code":{code},"fatal":{fatal},"name":"XID {code}""#);
        let mut texts = String::new();
        for (after, fault) in [
            (r#""lost":true"#, None),
            (r#""uncorrectedEccErrors":7"#, None),
            (
                r#""remappedRows":{"correctable":0,"uncorrectable":0,"pending":true,"failure":true}"#,
                None,
            ),
            (HEALTHY, Some(xid(79, true))),
            (HEALTHY, Some(xid(63, true))),
            (HEALTHY, Some(xid(31, false))),
            (r#""clocksEventReasons":72"#, None),
        ] {
            let faults: Vec<&str> = fault.iter().map(String::as_str).collect();
            texts += &judged(HEALTHY, Some(after), &faults, "GPU-1").text();
        }
        texts += &judged(
            r#""uncorrectedEccErrors":7"#,
            Some(r#""uncorrectedEccErrors":7"#),
            &[],
            "GPU-1",
        )
        .text();
        insta::assert_snapshot!(texts);
    }
}
