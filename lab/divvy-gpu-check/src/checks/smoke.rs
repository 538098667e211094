//! `divvy-smoke` on the GPU, in a share of it, without a GPU, without the driver's compiler, and killed.
//!
//! The program looks for the driver's library in usual directories first. In a copy of the program, the first of them is replaced by a directory of the check,
//! which has the driver's library or the guard under the name that the program looks for.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use divvy_shadow_testkit::replace;
use divvy_smoke_report::{SmokeReport, StepId, StepStatus};
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use crate::bench::{GpuCheckBench, KEPT, ReportedMemory};
use crate::findings::GpuCheckFindings;
use crate::rig::SharePod;

/// The first directory in which the program looks for the driver's library.
const USUAL: &str = "/usr/lib/x86_64-linux-gnu";
/// The library that compiles kernels, which the driver's library loads by this name, and a name of the same length that no library has.
const COMPILER: [&str; 2] = ["libnvidia-ptxjitcompiler.so", "libnvidia-ptxjitcompilex.so"];
/// Measures the rate of PyTorch.
const MATMUL: &str = include_str!("../../programs/matmul.py");
/// How functions of the driver are found.
const WAYS: [&str; 2] = ["dlsym", "getprocaddress"];
/// What S05 and S06 are compared with: a part of the model's name, and what PyTorch and copies of CUDA's own programs reach.
const KNOWN: [(&str, &str); 2] = [
    (
        "H200",
        "within the GPU 4300 GB/s (read and written), to and from the GPU 50 GB/s (PCIe 5.0)",
    ),
    (
        "H100",
        "798 TFLOP/s with bf16 (S05 multiplies without tiles, and should reach a tenth); within the GPU 3000 GB/s (read and written), to and from the GPU 50 GB/s (PCIe 5.0)",
    ),
];
/// How long one run may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a program that was killed may keep its memory.
const LIMIT: Duration = Duration::from_secs(1);
const GIB: u64 = 4;
/// The simulated GPU on which all steps run: its kernels are executed on the processor.
const SMALL: (&str, &str) = ("memory_mib = 81559", "memory_mib = 12");
const SMALL_CONTEXT: (&str, &str) = ("context_mib = 500", "context_mib = 4");

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let own = bench.pack.file("divvy-smoke")?;
    if !bench.pack.is_native() {
        findings.skip("divvy-smoke starts itself with the machine's C library, which is too old");
        return Ok(());
    }
    let whole = Smoke::new(bench, &own, None)?;
    whole.link(&bench.driver.cuda)?;
    let mut tensor = None;
    for way in WAYS {
        let report = whole.report(&format!("here -o json --via {way}"), &[]).await?;
        record(findings, way, &report)?;
        findings.expect(has_computed(&report), || format!("--via {way}: {}", report.text()));
        tensor = report.step(StepId::S05).and_then(|step| gigaflops(&step.found)).or(tensor);
    }
    if let Some(tensor) = tensor {
        beside_torch(bench, findings, tensor).await?;
    }
    let all = whole.report("here -o json --steps S03 --all-memory", &[]).await?;
    record(findings, "all memory", &all)?;
    findings.expect(has_status(&all, StepId::S03, &[StepStatus::Pass]), || {
        format!("--all-memory: {}", all.text())
    });
    if let Some((_, text)) = KNOWN.iter().find(|(part, _)| bench.driver.gpu().name.contains(part)) {
        findings.value("S05, S06: what such a GPU is known to reach", text);
    }
    let hidden = whole
        .report("here -o json --steps S02", &[("CUDA_VISIBLE_DEVICES", "")])
        .await?;
    failed_with(
        findings,
        "with an empty CUDA_VISIBLE_DEVICES",
        &hidden,
        StepId::S01,
        "returned 100",
    );
    without_compiler(bench, findings, &own).await?;
    killed(bench, findings, &whole).await?;
    in_share(bench, findings, &own).await
}

/// Compare the rate of S05 with that of PyTorch. S05 multiplies without tiles, so a tenth is enough: less means that it does not use the tensor cores.
async fn beside_torch(bench: &GpuCheckBench, findings: &mut GpuCheckFindings, tensor: f64) -> Result<()> {
    let file = bench.directory.join("check_matmul.py");
    fs::write(&file, MATMUL)?;
    let mut python = Command::new("python3");
    python.arg(&file).stdin(Stdio::null()).kill_on_drop(true);
    python.envs(bench.driver.environment.iter().map(|(name, value)| (name, value)));
    let output = match timeout(PATIENCE, python.output()).await {
        Ok(Ok(output)) if output.status.success() => output,
        Ok(Ok(output)) => {
            let errors = String::from_utf8_lossy(&output.stderr);
            findings.skip(format!(
                "S05 and PyTorch: {}",
                errors.lines().next_back().unwrap_or("it failed")
            ));
            return Ok(());
        }
        Ok(Err(error)) => {
            findings.skip(format!("S05 and PyTorch: python3 cannot be run: {error}"));
            return Ok(());
        }
        Err(_) => {
            findings.skip(format!("S05 and PyTorch: it did not end in {PATIENCE:?}"));
            return Ok(());
        }
    };
    let answer: Value = serde_json::from_slice(&output.stdout).context("what PyTorch printed")?;
    let theirs = answer["gflops"].as_f64().context("PyTorch printed no rate")?;
    findings.value(
        "S05 and PyTorch, bf16 8192 x 8192",
        format!("{tensor:.0} GFlop/s beside {theirs:.0} GFlop/s"),
    );
    findings.expect(tensor * 10.0 >= theirs, || {
        format!("S05 reaches {tensor:.0} GFlop/s, less than a tenth of PyTorch's {theirs:.0} GFlop/s")
    });
    Ok(())
}

/// Read the rate at the end of what a step found, as in `…, 85 TFlop/s`.
fn gigaflops(found: &str) -> Option<f64> {
    let (_, rate) = found.rsplit_once(", ")?;
    let (number, unit) = rate.split_once(' ')?;
    let factor = match unit {
        "GFlop/s" => 1.0,
        "TFlop/s" => 1000.0,
        _ => return None,
    };
    number.parse::<f64>().ok().map(|number| number * factor)
}

/// Run it with a library of the driver that finds no compiler.
async fn without_compiler(bench: &GpuCheckBench, findings: &mut GpuCheckFindings, own: &Path) -> Result<()> {
    const WHAT: &str = "without libnvidia-ptxjitcompiler.so";
    let smoke = Smoke::new(bench, own, None)?;
    let mut variables = Vec::new();
    if bench.driver.simulated {
        smoke.link(&bench.driver.cuda)?;
        variables.push(("DIVVY_CUDA_SIM_FAIL", "cuModuleLoadDataEx:1=221"));
    } else {
        let mut library = fs::read(&bench.driver.cuda)?;
        if replace(&mut library, COMPILER[0], COMPILER[1]) == 0 {
            findings.skip(format!("{WHAT}: the driver's library does not have that name"));
            return Ok(());
        }
        fs::write(smoke.directory.path().join(LIBRARY), library)?;
    }
    let report = smoke.report("here -o json --steps S02", &variables).await?;
    failed_with(findings, WHAT, &report, StepId::S02, "returned 221");
    Ok(())
}

/// Kill it while it holds memory.
async fn killed(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings, smoke: &Smoke) -> Result<()> {
    let before = bench.memory().await?;
    let is_held = |now: &ReportedMemory| {
        let mut processes = now.processes.iter();
        processes.any(|(pid, _)| !before.has(*pid)) || now.used > before.used + KEPT
    };
    // The simulated GPU is fast enough only if a kernel does not end.
    let variables = [("DIVVY_CUDA_SIM_HANG", "fill:1")];
    let mut child = smoke.command("here", &variables).stdout(Stdio::null()).spawn()?;
    let began = Instant::now();
    while !is_held(&bench.memory().await?) {
        if let Some(status) = child.try_wait()? {
            bail!("divvy-smoke ended ({status}) before NVML had listed it");
        }
        ensure!(
            began.elapsed() < PATIENCE,
            "divvy-smoke held no memory {PATIENCE:?} after its start"
        );
        sleep(Duration::from_millis(2)).await;
    }
    let worked = began.elapsed();
    child.kill().await.context("divvy-smoke cannot be killed")?;
    let began = Instant::now();
    while is_held(&bench.memory().await?) {
        ensure!(
            began.elapsed() < PATIENCE,
            "the memory of divvy-smoke is held {PATIENCE:?} after kill -9"
        );
        sleep(Duration::from_millis(2)).await;
    }
    let took = began.elapsed();
    findings.value(
        "kill -9",
        format!(
            "after {} ms; its memory was free {} ms later",
            worked.as_millis(),
            took.as_millis()
        ),
    );
    findings.expect(took <= LIMIT, || {
        format!("its memory was held {} ms after kill -9", took.as_millis())
    });
    Ok(())
}

/// Run it in a pod with a share of the GPU, with the guard.
async fn in_share(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings, own: &Path) -> Result<()> {
    let pod = bench.pod(GIB, 0).await?;
    let smoke = Smoke::new(bench, own, Some(&pod))?;
    smoke.link(&pod.container.cuda())?;
    // The simulated driver executes kernels on the processor, which takes too long for this much memory.
    let steps = if bench.driver.simulated { " --steps S02,S07,S09" } else { "" };
    for way in WAYS {
        let report = smoke
            .report(&format!("here -o json --isolation --via {way}{steps}"), &[])
            .await?;
        record(findings, &format!("in a share of {GIB} GiB, {way}"), &report)?;
        for id in [StepId::S01, StepId::S02, StepId::S07, StepId::S09] {
            findings.expect(has_status(&report, id, &[StepStatus::Pass]), || {
                format!("in a share of {GIB} GiB, --via {way}: {}", report.text())
            });
        }
        let total = report.gpu.as_ref().map(|gpu| gpu.memory);
        findings.expect(total == Some(pod.bytes), || {
            format!("the program sees {total:?} bytes, and the share is {} bytes", pod.bytes)
        });
    }
    drop(smoke);
    bench.rig().await?.delete(pod).await
}

/// Add what each step found, and how long it took.
fn record(findings: &mut GpuCheckFindings, what: &str, report: &SmokeReport) -> Result<()> {
    for step in &report.steps {
        findings.value(
            format!("{what}: {} {}", step.id.word(), step.id.title()),
            format!("{} {}, {} ms", step.status.word(), step.found, step.ms),
        );
    }
    findings.raw.insert(what.to_owned(), serde_json::to_value(report)?);
    Ok(())
}

/// Report whether the results of all kernels were right. Tensor cores may be missing, and a link or an event may be a warning.
fn has_computed(report: &SmokeReport) -> bool {
    let done = [StepStatus::Pass, StepStatus::Warn];
    let with_skip = [StepStatus::Pass, StepStatus::Warn, StepStatus::Skip];
    report.steps.iter().all(|step| step.status != StepStatus::Fail)
        && [StepId::S01, StepId::S02, StepId::S03, StepId::S04, StepId::S06]
            .iter()
            .all(|id| has_status(report, *id, &done))
        && has_status(report, StepId::S05, &with_skip)
}

fn has_status(report: &SmokeReport, id: StepId, allowed: &[StepStatus]) -> bool {
    report.step(id).is_some_and(|step| allowed.contains(&step.status))
}

/// Expect that a step failed, and says this.
fn failed_with(findings: &mut GpuCheckFindings, what: &str, report: &SmokeReport, id: StepId, part: &str) {
    let step = report.step(id);
    let found = step.map_or("", |step| step.found.as_str());
    findings.value(what, found);
    let is_it = step.is_some_and(|step| step.status == StepStatus::Fail && step.found.contains(part));
    findings.expect(is_it, || format!("{what}: {}", report.text()));
}

/// The name of the driver's library.
const LIBRARY: &str = "libcuda.so.1";

/// A copy of the program with a directory in which it finds a library. It is removed when this value is dropped.
#[derive(Debug)]
struct Smoke {
    directory: TempDir,
    variables: Vec<(&'static str, String)>,
}

impl Smoke {
    /// Make the copy. `pod` is the pod whose share it uses.
    fn new(bench: &GpuCheckBench, own: &Path, pod: Option<&SharePod>) -> Result<Smoke> {
        let mut builder = tempfile::Builder::new();
        let random = USUAL.len() - "/tmp/s".len();
        let directory = builder.prefix("s").rand_bytes(random).tempdir_in("/tmp");
        let directory = directory.context("no directory for a copy of divvy-smoke")?;
        let text = |path: &Path| path.to_str().map(str::to_owned).context("a path is not UTF-8");
        let mut program = fs::read(own)?;
        let mut replaced = vec![(USUAL, text(directory.path())?)];
        if let Some(pod) = pod {
            replaced.push((divvy_share::DIRECTORY, text(pod.container.path())?));
        }
        for (from, to) in replaced {
            let times = replace(&mut program, from, &to);
            ensure!(times > 0, "divvy-smoke does not have the path {from}");
        }
        let copy = directory.path().join("divvy-smoke");
        fs::write(&copy, program)?;
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755))?;
        symlink(bench.pack.file("divvy-probe")?, directory.path().join("divvy-probe"))?;
        let mut variables = bench.driver.environment.clone();
        // Its kernels are known to the simulated driver.
        variables.retain(|(name, _)| *name != "DIVVY_CUDA_SIM_CODE");
        if let (None, Some((_, machine))) = (pod, variables.iter_mut().find(|(name, _)| *name == "DIVVY_NVML_SIM")) {
            let described = fs::read_to_string(&*machine)?;
            let small = described.replace(SMALL.0, SMALL.1).replace(SMALL_CONTEXT.0, SMALL_CONTEXT.1);
            let path = directory.path().join("machine.toml");
            fs::write(&path, small)?;
            *machine = text(&path)?;
        }
        // The driver's library loads others.
        if let Some(path) = bench.driver.cuda.parent() {
            variables.push(("LD_LIBRARY_PATH", text(path)?));
        }
        Ok(Smoke { directory, variables })
    }

    /// Let it use this library.
    fn link(&self, library: &Path) -> Result<()> {
        symlink(library, self.directory.path().join(LIBRARY)).context("a library cannot be linked")
    }

    fn command(&self, words: &str, variables: &[(&str, &str)]) -> Command {
        let mut command = Command::new(self.directory.path().join("divvy-smoke"));
        command.args(words.split_whitespace());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.envs(variables.iter().copied());
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Run it, and read its report.
    async fn report(&self, words: &str, variables: &[(&str, &str)]) -> Result<SmokeReport> {
        let output = timeout(PATIENCE, self.command(words, variables).output()).await;
        let output = output.with_context(|| format!("divvy-smoke {words} did not end in {PATIENCE:?}"))??;
        let text = String::from_utf8_lossy(&output.stdout);
        SmokeReport::read(text.trim())
            .with_context(|| format!("divvy-smoke {words}: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}
