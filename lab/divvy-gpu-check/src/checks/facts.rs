//! What the machine has: on what all other results depend.

use anyhow::Result;
use tokio::process::Command;

use crate::bench::GpuCheckBench;
use crate::findings::GpuCheckFindings;

/// Prints the versions of the packages that the check `programs` uses.
const PACKAGES: &str = "
import importlib.metadata as m
for name in ['torch', 'cupy', 'cupy-cuda12x', 'cupy-cuda13x', 'jax', 'triton', 'numba', 'nvidia-ml-py', 'tensorflow', 'vllm']:
    try: print(name, m.version(name), end='; ')
    except m.PackageNotFoundError: pass
";

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    findings.value("driver", bench.driver.subject());
    for gpu in &bench.driver.gpus {
        let mig = match gpu.mig {
            Some(true) => "MIG is on",
            Some(false) => "MIG is off",
            None => "no MIG",
        };
        let text = format!("{}, {} MiB, /dev/nvidia{}, {mig}", gpu.name, gpu.total >> 20, gpu.minor);
        findings.value(&gpu.uuid, text);
    }
    findings.value("CUDA's library", bench.driver.cuda.display());
    findings.value("NVML", bench.driver.nvml.display());
    let memory = bench.memory().await?;
    findings.value(
        "GPU memory in use before the checks",
        format!("{} MiB, {} processes", memory.used >> 20, memory.processes.len()),
    );
    findings.value("uid", rustix::process::getuid().as_raw());
    findings.value("C library of the programs", bench.pack.c_library());
    for (what, program, arguments) in [
        ("kernel", "uname", &["-r"][..]),
        ("distribution", "sh", &["-c", ". /etc/os-release && echo $PRETTY_NAME"]),
        ("CPU cores", "nproc", &[]),
        ("C library of the machine", "sh", &["-c", "ldd --version 2>&1 | head -n 1"]),
        ("python3", "python3", &["--version"]),
        ("Python packages", "python3", &["-c", PACKAGES]),
        (
            "nvcc",
            "sh",
            &[
                "-c",
                "ls /usr/local/cuda*/bin/nvcc $(command -v nvcc) 2>/dev/null | sort -u | tail -n 1",
            ],
        ),
    ] {
        findings.value(what, said(program, arguments).await);
    }
    let namespaces = match bench.pack.command("divvy-contain") {
        Err(error) => error.to_string(),
        Ok(mut command) => {
            let output = command.arg("--check").output().await?;
            if output.status.success() {
                "can be made".to_owned()
            } else {
                String::from_utf8_lossy(&output.stderr).trim().to_owned()
            }
        }
    };
    findings.value("mount namespaces", namespaces);
    let program = bench.without_guard().await?;
    let listed = bench.memory().await?;
    let pid = program.pid();
    let new = listed
        .processes
        .iter()
        .filter(|(of, _)| !memory.has(*of))
        .map(|(of, _)| of.to_string());
    findings.value(
        "NVML's PID of a process",
        if listed.has(pid) {
            "the process's own".to_owned()
        } else {
            format!(
                "not its own ({pid}): NVML lists [{}] in addition",
                new.collect::<Vec<_>>().join(", ")
            )
        },
    );
    findings.value(
        "context of a process",
        context(listed.of(pid), listed.used.saturating_sub(memory.used)),
    );
    program.end().await?;
    bench.settle(memory.used).await
}

fn context(process: Option<u64>, gpu: u64) -> String {
    let process = process.map_or("nothing".to_owned(), |bytes| format!("{} MiB", bytes >> 20));
    format!(
        "NVML reports {process} for the process, and {} MiB more for the GPU",
        gpu >> 20
    )
}

/// Return what a program prints, or that it is not there.
async fn said(program: &str, arguments: &[&str]) -> String {
    match Command::new(program).args(arguments).kill_on_drop(true).output().await {
        Err(error) => format!("{program}: {error}"),
        Ok(output) => match String::from_utf8_lossy(&output.stdout).trim() {
            "" => "none".to_owned(),
            text => text.to_owned(),
        },
    }
}
