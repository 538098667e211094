//! What the guard costs.

use anyhow::Result;

use crate::bench::GpuCheckBench;
use crate::findings::GpuCheckFindings;
use crate::program::of;
use crate::rig::SharePod;

const SIZES: [(u64, &str); 3] = [(4 << 10, "4 KiB"), (2 << 20, "2 MiB"), (64 << 20, "64 MiB")];
const PAIRS: u64 = 1000;
const LAUNCHES: u64 = 20_000;
/// How often a process is started. The middle one counts.
const STARTS: usize = 5;

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let (pod, limited) = (bench.pod(8, 0).await?, bench.pod(8, 90).await?);
    let (with, without) = (starts(bench, Some(&pod)).await?, starts(bench, None).await?);
    findings.both("cuInit and a context", format!("{with} µs"), format!("{without} µs"));
    for (bytes, size) in SIZES {
        let request = format!("pairs {PAIRS} {bytes}");
        let with = of(&bench.once(Some(&pod), &request).await?, "ns")?;
        let without = of(&bench.once(None, &request).await?, "ns")?;
        findings.both(
            format!("cuMemAlloc and cuMemFree of {size}"),
            format!("{with} ns"),
            format!("{without} ns"),
        );
    }
    let request = format!("launches {LAUNCHES}");
    let without = bench.once(None, &request).await?;
    for (what, pod) in [
        ("no limit of compute time", &pod),
        ("a limit of 90 % of the compute time", &limited),
    ] {
        let with = bench.once(Some(pod), &request).await?;
        for (name, unit) in [
            ("launch_ns", "cuLaunchKernel"),
            ("with_synchronization_ns", "the same with the time of the kernel"),
        ] {
            findings.both(
                format!("{unit}, {what}"),
                format!("{} ns", with[name]),
                format!("{} ns", without[name]),
            );
        }
    }
    for pod in [pod, limited] {
        bench.rig().await?.delete(pod).await?;
    }
    Ok(())
}

/// Return how many microseconds `cuInit` and the first context take.
async fn starts(bench: &mut GpuCheckBench, pod: Option<&SharePod>) -> Result<u64> {
    let mut times = Vec::new();
    for _ in 0..STARTS {
        let mut program = match pod {
            Some(pod) => pod.program(&bench.pack, &bench.driver, &pod.container.cuda())?,
            None => bench.driver.program(&bench.pack, &bench.driver.cuda)?,
        };
        times.push(program.number("start", "start_us").await?);
    }
    times.sort_unstable();
    Ok(times[STARTS / 2])
}
