//! The results of the measurements, and whether these are within the budgets.

use std::io::Write as _;

use divvy_bench::cluster::Form;
use serde::Serialize;

/// The budget of a measurement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct CostBudget {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seconds: Option<f64>,
    #[serde(rename = "MiB", skip_serializing_if = "Option::is_none")]
    pub(crate) mib: Option<f64>,
}

/// A measurement.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct BenchRow {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seconds: Option<f64>,
    #[serde(rename = "MiB", skip_serializing_if = "Option::is_none")]
    pub(crate) mib: Option<f64>,
    pub(crate) budget: CostBudget,
    /// The names of the budgets that were exceeded.
    pub(crate) over: Vec<&'static str>,
    /// The reason why there is no result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<String>,
    /// A note for the reader.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) note: String,
}

impl BenchRow {
    pub(crate) fn new(name: impl Into<String>, seconds: Option<f64>, mib: Option<f64>, budget: CostBudget) -> BenchRow {
        let beyond = |value: Option<f64>, most: Option<f64>| matches!((value, most), (Some(value), Some(most)) if value > most);
        let mut over = Vec::new();
        if beyond(seconds, budget.seconds) {
            over.push("time");
        }
        if beyond(mib, budget.mib) {
            over.push("memory");
        }
        BenchRow {
            name: name.into(),
            seconds,
            mib,
            budget,
            over,
            failed: None,
            note: String::new(),
        }
    }

    pub(crate) fn failed(name: impl Into<String>, why: String) -> BenchRow {
        BenchRow {
            name: name.into(),
            failed: Some(why),
            ..BenchRow::default()
        }
    }

    pub(crate) fn with_note(self, note: String) -> BenchRow {
        BenchRow { note, ..self }
    }

    fn verdict(&self) -> String {
        match (&self.failed, self.over.is_empty()) {
            (Some(_), _) => "FAILED".to_owned(),
            (None, false) => format!("OVER ({})", self.over.join(", ")),
            (None, true) if self.budget == CostBudget::default() => String::new(),
            (None, true) => "ok".to_owned(),
        }
    }
}

/// All measurements of one form of the cluster.
#[derive(Debug, Serialize)]
pub(crate) struct FormReport {
    pub(crate) form: Form,
    #[serde(rename = "nodesBytes")]
    pub(crate) nodes_bytes: u64,
    #[serde(rename = "podsBytes")]
    pub(crate) pods_bytes: u64,
    pub(crate) rows: Vec<BenchRow>,
}

/// The complete report.
#[derive(Debug, Serialize)]
pub(crate) struct BenchReport {
    nodes: u32,
    gpus: u32,
    pods: u32,
    pub(crate) forms: Vec<FormReport>,
}

impl BenchReport {
    pub(crate) fn new(nodes: u32, gpus: u32, pods: u32) -> BenchReport {
        BenchReport {
            nodes,
            gpus,
            pods,
            forms: Vec::new(),
        }
    }

    pub(crate) fn is_good(&self) -> bool {
        let mut rows = self.forms.iter().flat_map(|part| &part.rows);
        rows.all(|row| row.failed.is_none() && row.over.is_empty())
    }

    pub(crate) fn table(&self) -> anyhow::Result<String> {
        let mut table = tabwriter::TabWriter::new(Vec::new()).padding(3);
        let BenchReport { nodes, gpus, pods, .. } = self;
        for part in &self.forms {
            let megabytes = (part.nodes_bytes + part.pods_bytes) as f64 / 1e6;
            writeln!(
                table,
                "{nodes} nodes with {gpus} GPUs, {pods} pods, form {}: two lists of {megabytes:.0} MB",
                part.form.name()
            )?;
            writeln!(table, "\nNAME\tTIME\tMEMORY\tBUDGET\t\tNOTE")?;
            for row in &part.rows {
                let budget: Vec<String> = [row.budget.seconds.map(time), row.budget.mib.map(memory)]
                    .into_iter()
                    .flatten()
                    .collect();
                let note = row.failed.as_ref().unwrap_or(&row.note);
                writeln!(
                    table,
                    "{}\t{}\t{}\t{}\t{}\t{note}",
                    row.name,
                    row.seconds.map(time).unwrap_or_default(),
                    row.mib.map(memory).unwrap_or_default(),
                    budget.join(", "),
                    row.verdict()
                )?;
            }
            writeln!(table)?;
        }
        table.flush()?;
        let text = String::from_utf8(table.into_inner().map_err(|error| anyhow::anyhow!("{error}"))?)?;
        Ok(text.lines().map(|line| format!("{}\n", line.trim_end())).collect())
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        ..0.1 => format!("{:.2} ms", seconds * 1_000.0),
        _ => format!("{seconds:.2} s"),
    }
}

fn memory(mib: f64) -> String {
    format!("{mib:.0} MiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: CostBudget = CostBudget {
        seconds: Some(3.0),
        mib: Some(150.0),
    };

    fn report(rows: Vec<BenchRow>) -> BenchReport {
        let mut report = BenchReport::new(10, 8, 100);
        report.forms.push(FormReport {
            form: Form::Gpushare,
            nodes_bytes: 80_000,
            pods_bytes: 390_000,
            rows,
        });
        report
    }

    #[test]
    fn what_is_over_its_budget_or_failed_is_not_good_and_says_so() {
        let cases = [
            (BenchRow::new("a", Some(3.0), Some(150.0), BUDGET), true, "ok"),
            (BenchRow::new("a", Some(3.01), Some(1.0), BUDGET), false, "OVER (time)"),
            (BenchRow::new("a", Some(1.0), Some(150.5), BUDGET), false, "OVER (memory)"),
            (
                BenchRow::new("a", Some(4.0), Some(151.0), BUDGET),
                false,
                "OVER (time, memory)",
            ),
            (BenchRow::new("a", Some(1e9), Some(1e9), CostBudget::default()), true, ""),
            (BenchRow::failed("a", "exit status: 2".to_owned()), false, "FAILED"),
        ];
        for (row, good, verdict) in cases {
            assert_eq!(row.verdict(), verdict, "{row:?}");
            assert_eq!(report(vec![row.clone()]).is_good(), good, "{row:?}");
        }
    }

    #[test]
    fn the_table_has_a_line_for_each_measurement() {
        let rows = vec![
            BenchRow::new("curl", Some(0.42), Some(12.3), CostBudget::default()).with_note("the yardstick".to_owned()),
            BenchRow::new("inspect", Some(2.5), Some(1201.0), BUDGET),
            BenchRow::new("extender filter", Some(0.0021), None, CostBudget::default()),
            BenchRow::failed("doctor", "exit status: 2: no answer".to_owned()),
        ];
        let text = report(rows).table().expect("a table");
        insta::assert_snapshot!(text, @r"
        10 nodes with 8 GPUs, 100 pods, form gpushare: two lists of 0 MB

        NAME              TIME      MEMORY     BUDGET                            NOTE
        curl              0.42 s    12 MiB                                       the yardstick
        inspect           2.50 s    1201 MiB   3.00 s, 150 MiB   OVER (memory)
        extender filter   2.10 ms
        doctor                                                   FAILED          exit status: 2: no answer
        ");
    }
}
