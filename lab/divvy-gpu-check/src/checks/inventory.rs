//! The probe's inventory, next to that of `nvidia-smi`.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::process::Command;

use crate::bench::GpuCheckBench;
use crate::findings::GpuCheckFindings;
use crate::program::{of, text_of};

/// A GPU: its name, and its memory in MiB.
type Gpus = BTreeMap<String, (String, u64)>;

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let mut command = bench.pack.command("divvy-probe")?;
    command.arg("--once").arg("--nvml-library").arg(&bench.driver.nvml);
    let environment = bench
        .driver
        .environment
        .iter()
        .filter(|(name, _)| *name != "CUDA_VISIBLE_DEVICES");
    command.envs(environment.map(|(name, value)| (name, value)));
    let output = command.kill_on_drop(true).output().await?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "divvy-probe --once failed: {}", errors.trim());
    let probe: Value = serde_json::from_slice(&output.stdout).context("divvy-probe --once printed no JSON")?;
    let found = of_probe(&probe)?;
    findings.raw.insert("probe".to_owned(), probe);

    let query = ["--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"];
    let (expected, whose) = if bench.driver.simulated {
        (Err("there is none for a simulated driver".to_owned()), "")
    } else {
        match Command::new("nvidia-smi").args(query).kill_on_drop(true).output().await {
            Ok(output) if output.status.success() => (Ok(of_smi(&String::from_utf8_lossy(&output.stdout))?), "nvidia-smi"),
            Ok(output) => (Err(String::from_utf8_lossy(&output.stdout).trim().to_owned()), ""),
            Err(error) => (Err(error.to_string()), ""),
        }
    };
    let (expected, whose) = match expected {
        Ok(gpus) => (gpus, whose),
        Err(reason) => {
            findings.skip(format!("nvidia-smi ({reason}): the probe is compared with NVML"));
            let gpus = bench.driver.gpus.iter();
            (
                gpus.map(|gpu| (gpu.uuid.clone(), (gpu.name.clone(), gpu.total >> 20)))
                    .collect(),
                "NVML",
            )
        }
    };
    for (uuid, (name, memory)) in &found {
        findings.value(uuid, format!("{name}, {memory} MiB"));
    }
    findings.expect(found == expected, || {
        format!("{whose} finds {expected:?}, and the probe {found:?}")
    });
    Ok(())
}

fn of_probe(probe: &Value) -> Result<Gpus> {
    let gpus = probe["gpus"].as_array().context("divvy-probe --once printed no GPUs")?;
    gpus.iter()
        .map(|gpu| Ok((text_of(gpu, "uuid")?, (text_of(gpu, "model")?, of(gpu, "totalMiB")?))))
        .collect()
}

fn of_smi(text: &str) -> Result<Gpus> {
    let gpu = |line: &str| {
        let fields: Vec<&str> = line.split(", ").collect();
        match fields[..] {
            [uuid, name, memory] => Some((uuid.to_owned(), (name.to_owned(), memory.trim().parse().ok()?))),
            _ => None,
        }
    };
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| gpu(line).with_context(|| format!("nvidia-smi printed {line:?}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_nvidia_smi_are_read_and_others_are_refused() {
        let gpus = of_smi("GPU-1, NVIDIA H100 80GB HBM3, 81559\nGPU-2, Tesla T4, 15360\n").expect("valid");
        assert_eq!(gpus["GPU-1"], ("NVIDIA H100 80GB HBM3".to_owned(), 81559));
        assert_eq!(gpus.len(), 2);
        for text in ["No devices were found", "GPU-1, x, [N/A]"] {
            assert!(of_smi(text).is_err(), "{text}");
        }
    }
}
