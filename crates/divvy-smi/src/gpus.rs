//! The table's head, and the GPUs.

use crate::cell::{double_rule, keep_start, line, printable, row, rule};
use crate::edition::{Edition, branch};
use crate::value::{Ecc, Reading, Smi, SmiComputeMode, SmiGpu, SmiMemory};

/// Add a line for each GPU of which the driver gives no handle. The forms up to 555 are those of nvidia-smi. People published those of 560
/// (<https://github.com/meta-llama/llama-models/issues/200>), and with the index from 570 and 610. Two empty lines follow if the driver gives no handle at all, as nvidia-smi prints them.
pub(crate) fn without_handle(out: &mut String, smi: &Smi, edition: Edition) {
    for gpu in &smi.gpus {
        let Some(why) = &gpu.no_handle else { continue };
        let (index, bus) = (gpu.index, printable(gpu.bus.strip_prefix("0000").unwrap_or(&gpu.bus)));
        let is_old = branch(&smi.driver).is_some_and(|branch| branch < 525);
        let name = match (edition, bus.as_str()) {
            (_, "") if is_old => format!("GPU {index}"),
            (_, bus) if is_old => format!("GPU {bus}"),
            (_, "") => format!("GPU{index}"),
            (edition, bus) if edition < Edition::R570 => format!("GPU{bus}"),
            (_, bus) => format!("GPU{index}: {bus}"),
        };
        out.push_str(&format!(
            "Unable to determine the device handle for {name}: {}\n",
            printable(why)
        ));
    }
    if smi.is_without_handles() {
        out.push_str("\n\n");
    }
}

pub(crate) fn draw(out: &mut String, smi: &Smi, edition: Edition) {
    let cells = edition.gpu_cells();
    line(out, &[edition.inner()]);
    row(out, &[(edition.inner(), versions(smi, edition))]);
    let first = if edition >= Edition::R580 { '+' } else { '|' };
    rule(out, &cells, [first, '+', '+'], '-');
    for heads in heads(edition) {
        let [a, b, c] = cells;
        row(
            out,
            &[(a, heads[0].to_owned()), (b, heads[1].to_owned()), (c, heads[2].to_owned())],
        );
    }
    double_rule(out, &cells);
    for gpu in smi.gpus.iter().filter(|gpu| gpu.no_handle.is_none()) {
        for [a, b, c] in rows(gpu, edition) {
            row(out, &[(cells[0], a), (cells[1], b), (cells[2], c)]);
        }
        line(out, &cells);
    }
}

fn versions(smi: &Smi, edition: Edition) -> String {
    let (first, second) = match edition {
        Edition::R450 => (13, 13),
        Edition::R530 | Edition::R535 => (23, 13),
        Edition::R610 => (23, 14),
        _ => (23, 15),
    };
    let (of_driver, of_cuda) = match edition {
        Edition::R610 => ("KMD Version", "CUDA UMD Version"),
        _ => ("Driver Version", "CUDA Version"),
    };
    let cuda = smi.cuda.as_deref().unwrap_or("N/A");
    let driver = &smi.driver;
    format!(" NVIDIA-SMI {driver:<first$.first$}{of_driver}: {driver:<second$.second$}{of_cuda}: {cuda}")
}

fn heads(edition: Edition) -> [[&'static str; 3]; 3] {
    match edition {
        Edition::R450 => [
            [
                " GPU  Name        Persistence-M",
                " Bus-Id        Disp.A ",
                " Volatile Uncorr. ECC ",
            ],
            [
                " Fan  Temp  Perf  Pwr:Usage/Cap",
                "         Memory-Usage ",
                " GPU-Util  Compute M. ",
            ],
            ["", "", "               MIG M. "],
        ],
        Edition::R530 => [
            [
                " GPU  Name                  Persistence-M",
                " Bus-Id        Disp.A ",
                " Volatile Uncorr. ECC ",
            ],
            [
                " Fan  Temp  Perf            Pwr:Usage/Cap",
                "         Memory-Usage ",
                " GPU-Util  Compute M. ",
            ],
            ["", "", "               MIG M. "],
        ],
        Edition::R535 => [
            [
                " GPU  Name                 Persistence-M ",
                " Bus-Id        Disp.A ",
                " Volatile Uncorr. ECC ",
            ],
            [
                " Fan  Temp   Perf          Pwr:Usage/Cap ",
                "         Memory-Usage ",
                " GPU-Util  Compute M. ",
            ],
            ["", "", "               MIG M. "],
        ],
        _ => [
            [
                " GPU  Name                 Persistence-M ",
                " Bus-Id          Disp.A ",
                " Volatile Uncorr. ECC ",
            ],
            [
                " Fan  Temp   Perf          Pwr:Usage/Cap ",
                "           Memory-Usage ",
                " GPU-Util  Compute M. ",
            ],
            ["", "", "               MIG M. "],
        ],
    }
}

fn rows(gpu: &SmiGpu, edition: Edition) -> [[String; 3]; 3] {
    let index = gpu.index;
    let name = word(&gpu.name, Clone::clone);
    // A word stands one column further left than a state.
    let persistence = match &gpu.persistence {
        Reading::Value(on) => format!(" {}", switch(*on)),
        none => word(none, |_| String::new()),
    };
    let name_and_persistence = match edition {
        Edition::R450 => format!("{index:>4}  {:<19}{persistence}", format!("{} ", keep_start(&name, 18))),
        Edition::R530 => format!("{index:>4}  {:<31}{persistence}", keep_start(&name, 28)),
        _ => format!("{index:>4}  {:<30}{persistence}", keep_start(&name, 27)),
    };
    let margin = if edition < Edition::R550 { " " } else { "   " };
    let display = word(&gpu.display, |on| switch(*on));
    let bus = format!("{margin}{:<16.16}{display:>4}", gpu.bus);
    let ecc = word(&gpu.ecc, |ecc| match ecc {
        Ecc::Off => "Off".to_owned(),
        Ecc::On => "On".to_owned(),
        Ecc::Uncorrected(errors) => errors.to_string(),
    });
    let fan = word(&gpu.fan, |percent| format!("{percent}%"));
    let temperature = word(&gpu.temperature, |celsius| format!("{celsius}C"));
    // A word stands one column further left than a state.
    let performance = match &gpu.performance {
        Reading::Value(state) => format!("{:>6}", format!("P{state}")),
        none => format!("{:>5} ", word(none, |_| String::new())),
    };
    let utilization = word(&gpu.utilization, |percent| format!("{percent}%"));
    // `E. Process` and `Prohibited` are in tables that people published, such as those of a Tesla K80 and a GRID P40. No driver that prints this table has the
    // mode of one thread, so `E. Thread` is in none of them.
    let mode = word(&gpu.compute_mode, |mode| {
        let text = match mode {
            SmiComputeMode::Default => "Default",
            SmiComputeMode::ExclusiveThread => "E. Thread",
            SmiComputeMode::Prohibited => "Prohibited",
            SmiComputeMode::ExclusiveProcess => "E. Process",
        };
        text.to_owned()
    });
    let mig = word(&gpu.mig, |on| if *on { "Enabled" } else { "Disabled" }.to_owned());
    [
        [name_and_persistence, bus, format!("{ecc:>21}")],
        [
            format!("{fan:>4}{temperature:>6}{performance}{}", power(gpu, edition)),
            memory(&gpu.memory, edition),
            format!("{utilization:>8}{mode:>13}"),
        ],
        [String::new(), String::new(), format!("{mig:>21}")],
    ]
}

fn power(gpu: &SmiGpu, edition: Edition) -> String {
    // From the branch 550 on, there is room for a larger limit.
    let wide = if edition < Edition::R550 { 4 } else { 5 };
    // nvidia-smi shows 1 W at least.
    let usage = word(&gpu.power, |watts| keep_start(&format!("{}W", (*watts).max(1)), 4));
    let limit = word(&gpu.power_limit, |watts| keep_start(&format!("{watts}W"), wide));
    // A word stands one column further left than a number: in the limit from 550 on, in the usage after 555.
    let padded = |of: &Reading<u32>, text: String| {
        if matches!(of, Reading::Value(_)) {
            text
        } else {
            format!("{text} ")
        }
    };
    match edition {
        Edition::R450 => format!("{usage:>7} / {limit:>4}"),
        Edition::R530 => format!("{usage:>18} / {limit:>4}"),
        Edition::R535 => format!("{usage:>17} / {limit:>4}"),
        Edition::R550 => format!("{usage:>16} / {:>5}", padded(&gpu.power_limit, limit)),
        _ => format!("{:>16} / {:>5}", padded(&gpu.power, usage), padded(&gpu.power_limit, limit)),
    }
}

fn memory(memory: &Reading<SmiMemory>, edition: Edition) -> String {
    match memory {
        Reading::Value(SmiMemory { used, total }) => {
            let wide = if edition < Edition::R550 { 8 } else { 9 };
            let [used, total] = [used, total].map(|mib| keep_start(&format!("{mib}MiB"), wide));
            if edition < Edition::R550 {
                format!("{used:>10} / {total:>8}")
            } else {
                format!("{used:>11} / {total:>9}")
            }
        }
        // A GPU that uses the machine's main memory, such as the GB10.
        Reading::Absent if edition >= Edition::R580 => " Not Supported".to_owned(),
        Reading::Absent => format!("{:>21}", "N/A"),
        Reading::Failed => " Unknown Error".to_owned(),
    }
}

/// Return the text of a value, or the word in its place.
pub(crate) fn word<T>(reading: &Reading<T>, text: impl FnOnce(&T) -> String) -> String {
    match reading {
        Reading::Value(value) => text(value),
        Reading::Absent => "N/A".to_owned(),
        Reading::Failed => "ERR!".to_owned(),
    }
}

fn switch(on: bool) -> String {
    if on { "On" } else { "Off" }.to_owned()
}
