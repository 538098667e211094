//! The MIG devices.

use crate::cell::{double_rule, line, row};
use crate::edition::Edition;
use crate::gpus::word;
use crate::value::{MigEngines, Reading, Smi, SmiMemory, SmiMigDevice};

/// Add the MIG devices, if MIG is enabled on a GPU.
pub(crate) fn draw(out: &mut String, smi: &Smi, edition: Edition) {
    if smi.gpus.iter().all(|gpu| gpu.mig != Reading::Value(true)) {
        return;
    }
    let (cells, inner) = (edition.mig_cells(), edition.inner());
    out.push('\n');
    line(out, &[inner]);
    row(out, &[(inner, " MIG devices:".to_owned())]);
    line(out, &cells);
    for heads in heads(edition) {
        let texts = cells.into_iter().zip(heads.map(str::to_owned));
        row(out, &texts.collect::<Vec<_>>());
    }
    double_rule(out, &cells);
    let mut is_empty = true;
    for gpu in &smi.gpus {
        for device in &gpu.mig_devices {
            is_empty = false;
            for texts in rows(gpu.index, device, edition) {
                row(out, &cells.into_iter().zip(texts).collect::<Vec<_>>());
            }
            line(out, &cells);
        }
    }
    if is_empty {
        row(out, &[(inner, "  No MIG devices found".to_owned())]);
        line(out, &[inner]);
    }
}

fn heads(edition: Edition) -> [[&'static str; 4]; 3] {
    let memory = match edition {
        Edition::R450 => ["         Memory-Usage ", "           BAR1-Usage "],
        Edition::R530 | Edition::R535 => ["                   Memory-Usage ", "                     BAR1-Usage "],
        Edition::R580 | Edition::R610 => ["              Shared Memory-Usage ", "                Shared BAR1-Usage "],
        _ => ["                     Memory-Usage ", "                       BAR1-Usage "],
    };
    let engines = match edition {
        Edition::R450 => ["         Shared        ", " CE  ENC  DEC  OFA  JPG"],
        Edition::R530 | Edition::R535 | Edition::R550 => ["      Shared           ", " CE ENC DEC OFA JPG    "],
        _ => ["        Shared         ", " CE ENC  DEC  OFA  JPG "],
    };
    [
        [" GPU  GI  CI  MIG ", memory[0], "        Vol", engines[0]],
        ["      ID  ID  Dev ", memory[1], " SM     Unc", engines[1]],
        ["", "", "        ECC", ""],
    ]
}

fn rows(gpu: u32, device: &SmiMigDevice, edition: Edition) -> [[String; 4]; 2] {
    let SmiMigDevice { index, gi, ci, .. } = device;
    let sms = word(&device.multiprocessors, u32::to_string);
    let errors = word(&device.uncorrected_ecc, u64::to_string);
    let engines = match &device.engines {
        Reading::Value(of) => {
            let MigEngines {
                copy,
                encoders,
                decoders,
                ofa,
                jpeg,
            } = of;
            format!("{copy:>3}{encoders:>4}{decoders:>5}{ofa:>5}{jpeg:>5}")
        }
        none => format!(" {}", word(none, |_| String::new())),
    };
    let wide = if edition == Edition::R450 { 10 } else { 19 };
    let wide_bar1 = match edition {
        Edition::R550 | Edition::R560 | Edition::R570 => 21,
        _ => wide,
    };
    [
        [
            format!("{gpu:>3} {gi:>4} {ci:>3} {index:>3}"),
            memory(&device.memory, wide),
            format!(" {sms:<3}{errors:>6}"),
            engines,
        ],
        [String::new(), memory(&device.bar1, wide_bar1), String::new(), String::new()],
    ]
}

fn memory(memory: &Reading<SmiMemory>, wide: usize) -> String {
    match memory {
        Reading::Value(SmiMemory { used, total }) => format!("{:>wide$} / {:>8}", format!("{used}MiB"), format!("{total}MiB")),
        none => format!("{:>wide$}", word(none, |_| String::new()), wide = wide + 11),
    }
}
