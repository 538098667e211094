//! Every way in which a program gets memory.

use anyhow::Result;
use serde_json::Value;

use crate::bench::GpuCheckBench;
use crate::findings::GpuCheckFindings;
use crate::program::of;

/// The ways, and whether the guard refuses more than the share. It charges the memory of a graph's launch, but does not refuse it.
const KINDS: [(&str, bool); 7] = [
    ("linear", true),
    ("pitch", true),
    ("managed", true),
    ("vmm", true),
    ("pool", true),
    ("array", true),
    ("graph", false),
];
const MIB: u64 = 256;
/// The least that the free memory must shrink by: rows and pages may be larger than what is in them, not smaller.
const LEAST: u64 = MIB << 20;
const GIB: u64 = 4;

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let pod = bench.pod(GIB, 0).await?;
    let more = GIB * 1024 + 512;
    for (kind, refuses) in KINDS {
        let request = format!("kind {kind} {MIB}");
        let with = bench.once(Some(&pod), &request).await?;
        let without = bench.once(None, &request).await?;
        findings.both(format!("{MIB} MiB, {kind}"), taken(&with)?, taken(&without)?);
        if without["refused"].is_null() {
            let is_charged = with["refused"].is_null() && of(&with, "before")? >= of(&with, "after")? + LEAST;
            findings.expect(is_charged, || format!("{MIB} MiB, {kind}, with the guard: {with}"));
        } else {
            findings.skip(format!("{kind}: the driver itself refuses it ({})", without["refused"]));
            continue;
        }
        let request = format!("kind {kind} {more}");
        let with = bench.once(Some(&pod), &request).await?;
        let without = bench.once(None, &request).await?;
        let said = |answer: &Value| answer["refused"].as_str().unwrap_or("success").to_owned();
        findings.both(
            format!("{more} MiB, {kind}: more than the share"),
            said(&with),
            said(&without),
        );
        findings.expect(!refuses || said(&with).contains("CUDA_ERROR_OUT_OF_MEMORY"), || {
            format!("{more} MiB, {kind}, with a share of {GIB} GiB: {}", said(&with))
        });
    }
    bench.rig().await?.delete(pod).await
}

fn taken(answer: &Value) -> Result<String> {
    if let Some(error) = answer["refused"].as_str() {
        return Ok(error.to_owned());
    }
    let (before, after) = (of(answer, "before")?, of(answer, "after")?);
    Ok(format!(
        "{:.1} MiB less are free",
        before.saturating_sub(after) as f64 / 1048576.0
    ))
}
