//! Programs as people write them: Python packages, and CUDA's runtime library as nvcc links it. Each runs with the guard and without it. Its last line is JSON:
//! `same` must be equal in both runs; `total` is the memory that it sees; `above` is what it gets if it asks for more than the share.

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tokio::process::Command;
use tokio::time::timeout;

use crate::bench::GpuCheckBench;
use crate::findings::GpuCheckFindings;
use crate::rig::SharePod;

/// A script: its name, the module that it needs, its text, and variables.
struct Script {
    name: &'static str,
    module: &'static str,
    text: &'static str,
    variables: &'static [(&'static str, &'static str)],
}

const fn script(name: &'static str, module: &'static str, text: &'static str) -> Script {
    Script {
        name,
        module,
        text,
        variables: &[],
    }
}

const TORCH: &str = include_str!("../../programs/torch.py");
/// The variable by which PyTorch chooses how it allocates.
const ALLOCATOR: &str = "PYTORCH_CUDA_ALLOC_CONF";

const SCRIPTS: [Script; 9] = [
    script(
        "the driver's library through ctypes",
        "ctypes",
        include_str!("../../programs/driver.py"),
    ),
    script("torch", "torch", TORCH),
    Script {
        name: "torch, expandable_segments",
        module: "torch",
        text: TORCH,
        variables: &[(ALLOCATOR, "expandable_segments:True")],
    },
    Script {
        name: "torch, cudaMallocAsync",
        module: "torch",
        text: TORCH,
        variables: &[(ALLOCATOR, "backend:cudaMallocAsync")],
    },
    script("triton", "triton", include_str!("../../programs/triton.py")),
    script("cupy", "cupy", include_str!("../../programs/cupy.py")),
    script("jax", "jax", include_str!("../../programs/jax.py")),
    script("numba", "numba", include_str!("../../programs/numba.py")),
    script("pynvml", "pynvml", include_str!("../../programs/pynvml.py")),
];

const VECTOR_ADD: &str = include_str!("../../programs/vector_add.cu");
/// How long one program may take.
const PATIENCE: Duration = Duration::from_secs(60);
const GIB: u64 = 8;

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let pod = bench.pod(GIB, 0).await?;
    let directory = bench.directory.join("programs");
    std::fs::create_dir_all(&directory)?;
    for script in &SCRIPTS {
        let probe = [
            "-c",
            &format!(
                "import importlib.util as u, sys; sys.exit(u.find_spec('{}') is None)",
                script.module
            ),
        ];
        let has_module = Command::new("python3").args(probe).kill_on_drop(true).output().await;
        match has_module {
            Err(error) => {
                findings.skip(format!("{}: python3 cannot be run: {error}", script.name));
                continue;
            }
            Ok(output) if !output.status.success() => {
                findings.skip(format!("{}: this machine's python3 does not have it", script.name));
                continue;
            }
            Ok(_) => {}
        }
        // Not by the module's own name, which Python would import from the script's directory.
        let file = directory.join(format!("check_{}.py", script.module));
        std::fs::write(&file, script.text)?;
        let command = || {
            let mut command = Command::new("python3");
            command
                .arg(&file)
                .arg(pod.bytes.to_string())
                .envs(script.variables.iter().copied());
            // JAX takes most of the memory at its start otherwise, of the share or of the GPU.
            command.env("XLA_PYTHON_CLIENT_PREALLOCATE", "false");
            command
        };
        compare(bench, findings, &pod, script.name, command).await;
    }
    compiled(bench, findings, &pod, &directory).await?;
    bench.rig().await?.delete(pod).await
}

/// What nvcc makes: a program in which CUDA's runtime library is linked statically.
async fn compiled(bench: &GpuCheckBench, findings: &mut GpuCheckFindings, pod: &SharePod, directory: &Path) -> Result<()> {
    let Some(nvcc) = tool("nvcc") else {
        findings.skip("nvcc: this machine does not have it");
        return Ok(());
    };
    let (source, program) = (directory.join("vector_add.cu"), directory.join("vector_add"));
    std::fs::write(&source, VECTOR_ADD)?;
    let output = Command::new(nvcc)
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .kill_on_drop(true)
        .output()
        .await?;
    if !output.status.success() {
        findings.skip(format!(
            "nvcc cannot compile: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ));
        return Ok(());
    }
    let share = pod.bytes.to_string();
    compare(bench, findings, pod, "nvcc, static runtime library", || {
        let mut command = Command::new(&program);
        command.arg(&share);
        command
    })
    .await;
    for (name, arguments) in [
        ("compute-sanitizer", &["--log-file", "/dev/null"][..]),
        ("ncu", &["--log-file", "/dev/null"]),
    ] {
        let Some(tool) = tool(name) else {
            findings.skip(format!("{name}: this machine does not have it"));
            continue;
        };
        compare(bench, findings, pod, name, || {
            let mut command = Command::new(&tool);
            command.args(arguments).arg(&program).arg(&share);
            command
        })
        .await;
    }
    Ok(())
}

/// Find a program of CUDA's toolkit.
fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(["/usr/local/cuda/bin".into()]);
    directories.map(|directory| directory.join(name)).find(|file| file.is_file())
}

/// Run a program with the guard and without it, and compare what it prints.
async fn compare(
    bench: &GpuCheckBench,
    findings: &mut GpuCheckFindings,
    pod: &SharePod,
    name: &str,
    command: impl Fn() -> Command,
) {
    let without = output(bench, command(), None).await;
    let (without, without_took) = match without {
        Ok(done) => done,
        // What does not run without the guard says nothing about it.
        Err(error) => return findings.skip(format!("{name}: it does not run without the guard: {error:#}")),
    };
    let (with, with_took) = match output(bench, command(), Some(pod)).await {
        Ok(done) => done,
        Err(error) => {
            return findings.expect(false, || {
                format!("{name}: it runs without the guard, and not with it: {error:#}")
            });
        }
    };
    let text = |of: &Value, took: Duration| {
        let total = of["total"]
            .as_u64()
            .map_or(String::new(), |total| format!("sees {} MiB; ", total >> 20));
        let above = of["above"]
            .as_str()
            .map_or(String::new(), |above| format!("more than the share: {above}; "));
        format!("{total}{above}{:.1} s", took.as_secs_f64())
    };
    findings.both(name, text(&with, with_took), text(&without, without_took));
    findings.expect(with["same"] == without["same"], || {
        format!("{name}: {} with the guard, and {} without it", with["same"], without["same"])
    });
    if let Some(total) = with["total"].as_u64() {
        findings.expect(total == pod.bytes, || {
            format!("{name}: it sees {total} bytes, and the share is {} bytes", pod.bytes)
        });
    }
    if let Some(above) = with["above"].as_str() {
        findings.expect(above == "out of memory", || format!("{name}: more than the share: {above}"));
    }
}

async fn output(bench: &GpuCheckBench, mut command: Command, pod: Option<&SharePod>) -> Result<(Value, Duration)> {
    let began = Instant::now();
    let mut path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let own = match pod {
        Some(pod) => pod.container.path().to_owned(),
        // So that both find the libraries in the same way.
        None => bench.driver_links()?,
    };
    let mut first = own.into_os_string();
    if !path.is_empty() {
        first.push(":");
    }
    first.push(std::mem::take(&mut path));
    command.env("LD_LIBRARY_PATH", first);
    command.envs(bench.driver.environment.iter().map(|(name, value)| (name, value)));
    command.stdin(std::process::Stdio::null()).kill_on_drop(true);
    let output = timeout(PATIENCE, command.output()).await;
    let output = output.with_context(|| format!("it did not end in {PATIENCE:?}"))??;
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    if !output.status.success() {
        let last: Vec<&str> = stderr.lines().rev().take(3).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        match output.status.signal() {
            Some(signal) => bail!("signal {signal}: {}", last.join(" ")),
            None => bail!("{}: {}", output.status, last.join(" ")),
        }
    }
    let line = stdout
        .lines()
        .rev()
        .find(|line| line.starts_with('{'))
        .context("it printed no result")?;
    Ok((serde_json::from_str(line).with_context(|| line.to_owned())?, began.elapsed()))
}
