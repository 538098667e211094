//! The report as lines for people. The texts of a finding are laid out as those of `divvy doctor`.

use std::fmt::Write as _;

use divvy_host::plain_line;

use crate::{SmokeReport, SmokeStep, StepStatus, TestedGpu};

impl SmokeStep {
    /// Return the step as text: one line, or four for a finding.
    pub fn text(&self) -> String {
        let (word, id, title) = (self.status.word(), self.id.word(), self.id.title());
        let mut text = format!("{word} {id} {title}");
        match (&self.why, &self.fix) {
            (Some(why), Some(fix)) => {
                text.push('\n');
                for (name, value) in [("found", &self.found), ("why", why), ("fix", fix)] {
                    let _ = writeln!(text, "       {name:<6} {}", plain_line(value.chars()));
                }
            }
            _ => {
                let colon = if self.status == StepStatus::Skip { ":" } else { "" };
                let _ = writeln!(text, "{colon} {}", plain_line(self.found.chars()));
            }
        }
        text
    }
}

impl TestedGpu {
    /// Return the GPU as one line.
    pub fn text(&self) -> String {
        let line = format!(
            "{}, {}, compute capability {}, {} MiB, CUDA {} from {}",
            self.name,
            self.uuid,
            self.cc,
            self.memory >> 20,
            self.cuda,
            self.driver
        );
        plain_line(line.chars()) + "\n"
    }
}

impl SmokeReport {
    /// Return the report as text: the GPU, the steps, and the result.
    pub fn text(&self) -> String {
        let mut text = self.gpu.as_ref().map(TestedGpu::text).unwrap_or_default();
        for step in &self.steps {
            text.push_str(&step.text());
        }
        text.push_str(&self.summary());
        text
    }

    /// Return the last line: the result, and how many steps have which status.
    pub fn summary(&self) -> String {
        let number = |status: StepStatus| self.steps.iter().filter(|step| step.status == status).count();
        let mut parts = vec![format!("{} passed", number(StepStatus::Pass))];
        for (number, words) in [
            (number(StepStatus::Fail) as u64, "failed"),
            (number(StepStatus::Warn) as u64, "with a warning"),
            (number(StepStatus::Skip) as u64, "skipped"),
            (self.cut, "left out"),
        ] {
            if number > 0 {
                parts.push(format!("{number} {words}"));
            }
        }
        format!("Result = {}: {}\n", self.result.word(), parts.join(", "))
    }
}
