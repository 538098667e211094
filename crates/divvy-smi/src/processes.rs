//! The processes.

use crate::cell::{double_rule, keep_end, line, row};
use crate::edition::Edition;
use crate::value::{Instances, ProcessType, Smi, SmiProcess};

pub(crate) fn draw(out: &mut String, smi: &Smi, edition: Edition) {
    let inner = edition.inner();
    line(out, &[inner]);
    row(out, &[(inner, " Processes:".to_owned())]);
    for head in heads(edition) {
        row(out, &[(inner, head.to_owned())]);
    }
    double_rule(out, &[inner]);
    for process in &smi.processes {
        row(out, &[(inner, text(process, edition))]);
    }
    if smi.processes.is_empty() {
        row(out, &[(inner, "  No running processes found".to_owned())]);
    }
    line(out, &[inner]);
}

fn heads(edition: Edition) -> [&'static str; 2] {
    match edition {
        Edition::R450 => [
            "  GPU   GI   CI        PID   Type   Process name                  GPU Memory ",
            "        ID   ID                                                   Usage      ",
        ],
        Edition::R530 | Edition::R535 => [
            "  GPU   GI   CI        PID   Type   Process name                            GPU Memory ",
            "        ID   ID                                                             Usage      ",
        ],
        Edition::R550 | Edition::R560 => [
            "  GPU   GI   CI        PID   Type   Process name                              GPU Memory ",
            "        ID   ID                                                               Usage      ",
        ],
        Edition::R570 | Edition::R580 | Edition::R610 => [
            "  GPU   GI   CI              PID   Type   Process name                        GPU Memory ",
            "        ID   ID                                                               Usage      ",
        ],
    }
}

/// Return the columns GPU, GI, CI, and PID, which the list of pods has as well.
pub(crate) fn place(process: &SmiProcess, edition: Edition) -> String {
    let (gi, ci) = match process.instances {
        Some(Instances { gi, ci }) => (format!("{gi:>2} "), format!("{ci:>2} ")),
        None => ("N/A".to_owned(), "N/A".to_owned()),
    };
    let wide = if edition < Edition::R570 { 10 } else { 16 };
    format!("{:>5}   {gi}  {ci}{:>wide$}", process.gpu, process.pid)
}

fn text(process: &SmiProcess, edition: Edition) -> String {
    let kind = match process.kind {
        ProcessType::Compute => "C",
        ProcessType::Graphics => "G",
        ProcessType::Both => "C+G",
        ProcessType::Mps => "M+C",
    };
    let (name, wide) = match edition {
        Edition::R450 => (28, 12),
        Edition::R530 | Edition::R535 => (38, 12),
        Edition::R550 | Edition::R560 => (38, 14),
        Edition::R570 | Edition::R580 | Edition::R610 => (32, 14),
    };
    let memory = match process.memory {
        Some(mib) => format!("{mib}MiB"),
        None => "N/A     ".to_owned(),
    };
    let program = keep_end(&process.name, name);
    format!("{}{kind:>7}   {program:<name$}{memory:>wide$}", place(process, edition))
}
