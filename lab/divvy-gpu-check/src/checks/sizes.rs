//! What allocations of each size take: of the driver's memory, and of the share.

use anyhow::Result;
use serde_json::Value;

use crate::bench::GpuCheckBench;
use crate::findings::GpuCheckFindings;
use crate::program::of;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const SIZES: [u64; 18] = [
    1,
    256,
    512,
    513,
    KIB,
    4 * KIB,
    64 * KIB,
    128 * KIB,
    512 * KIB,
    MIB - 1,
    MIB,
    MIB + 1,
    2 * MIB,
    2 * MIB + 1,
    3 * MIB,
    8 * MIB,
    20 * MIB,
    64 * MIB,
];
/// A page of CUDA.
const PAGE: u64 = 2 * MIB;

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let pod = bench.pod(8, 0).await?;
    for size in SIZES {
        let count = (32 * MIB / size).clamp(8, 2048);
        let request = format!("pieces {size} {count}");
        // Each in a new process, because the driver keeps small pages.
        let with = bench.once(Some(&pod), &request).await?;
        let without = bench.once(None, &request).await?;
        let (charged, taken) = (taken(&with)?, taken(&without)?);
        let each = |bytes: u64| format!("{} B each, {:.1} MiB in all", bytes / count, bytes as f64 / MIB as f64);
        findings.both(format!("{count} × {size} B"), each(charged), each(taken));
        findings.expect(charged + PAGE > taken, || {
            format!("{count} allocations of {size} B take {taken} B, and the guard charges {charged} B")
        });
        for (answer, whose) in [(&with, "with the guard"), (&without, "without it")] {
            findings.expect(answer["got"] == count, || {
                format!("{count} allocations of {size} B {whose}: {answer}")
            });
        }
    }
    bench.rig().await?.delete(pod).await
}

/// Return how much less is free than before.
fn taken(answer: &Value) -> Result<u64> {
    Ok(of(answer, "before")?.saturating_sub(of(answer, "after")?))
}
