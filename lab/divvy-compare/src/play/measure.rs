//! Measures how fast a device plugin reacts, and what it needs.

use std::time::Instant;

use super::*;

/// What was measured of a program.
#[derive(Debug, Clone)]
pub(crate) struct ProgramMeasures {
    /// From the start of the program with 8 GPUs until the kubelet has its first device list: the median of several starts.
    pub(crate) registered: Duration,
    /// The resident memory of the program and of the processes that it has started, in KiB.
    pub(crate) resident_kib: u64,
    /// The processor time of these processes, in ms per minute, while nothing happens.
    pub(crate) idle_ms_per_minute: u64,
    /// From an XID in the driver until the kubelet has the device list: the median.
    pub(crate) xid: Duration,
    /// The time of `GetPreferredAllocation` for 3 of 16 GPUs.
    pub(crate) preferred: Duration,
}

/// How often a time is measured.
const TIMES: usize = 5;
/// How long the program has nothing to do before its memory is read, and again for its processor time.
const IDLE: Duration = Duration::from_secs(20);
/// The number of clock ticks per second in `/proc/PID/stat` (`getconf CLK_TCK`).
const TICKS: u64 = 100;

/// Measure a program.
pub(crate) async fn measure(program: &Path, simulator: &Path) -> Result<ProgramMeasures> {
    let eight = crate::scenario::idle(8);
    let mut registered = Vec::new();
    let mut xids = Vec::new();
    for gpu in 0..TIMES {
        let started = Instant::now();
        let mut running = PlayedProgram::start(program, simulator, &eight)?;
        running.wait_for_lists(1).await?;
        registered.push(started.elapsed());
        // NVIDIA's plugin listens for events a moment after it has registered.
        sleep(CHANGE).await;
        let lists = running.kubelet.seen().borrow().lists;
        let sent = Instant::now();
        running.control(&json!({"op": "xid", "gpu": gpu, "xid": 79})).await?;
        running.wait_for_lists(lists + 1).await?;
        xids.push(sent.elapsed());
        running.stop().await?;
    }

    let mut running = PlayedProgram::start(program, simulator, &eight)?;
    running.wait_for_lists(1).await?;
    sleep(IDLE).await;
    let before = running.ticks()?;
    sleep(IDLE).await;
    let ticks = running.ticks()?.saturating_sub(before);
    let resident_kib = running.resident_kib()?;
    running.stop().await?;

    let sixteen = crate::scenario::idle(16);
    let mut running = PlayedProgram::start(program, simulator, &sixteen)?;
    running.wait_for_lists(1).await?;
    let available: Vec<String> = (0..16).map(crate::scenario::gpu).collect();
    let asked = Instant::now();
    running.preferred(&available, &[], 3).await?;
    let preferred = asked.elapsed();
    running.stop().await?;
    Ok(ProgramMeasures {
        registered: median(registered),
        resident_kib,
        idle_ms_per_minute: ticks * 1000 / TICKS * 60 / IDLE.as_secs(),
        xid: median(xids),
        preferred,
    })
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

impl PlayedProgram {
    async fn wait_for_lists(&mut self, lists: usize) -> Result<()> {
        let mut seen = self.kubelet.seen();
        let found = timeout(START, seen.wait_for(|seen| seen.lists >= lists)).await;
        if found.is_err() {
            let log = std::fs::read_to_string(&self.log)?;
            bail!("no device list after {START:?}\n{log}");
        }
        Ok(())
    }

    /// Return the ids of the program and of the processes that it has started: they are in one process group.
    fn processes(&self) -> Result<Vec<u32>> {
        let group = self.child.id().context("the program has ended")?;
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if stat(pid).is_some_and(|fields| fields.get(2).is_some_and(|of| *of == group.to_string())) {
                found.push(pid);
            }
        }
        Ok(found)
    }

    /// Return the processor time so far, in clock ticks.
    fn ticks(&self) -> Result<u64> {
        let processes = self.processes()?.into_iter().filter_map(stat);
        let of = |fields: &[String], at: usize| fields.get(at).and_then(|field| field.parse().ok()).unwrap_or(0_u64);
        Ok(processes.map(|fields| of(&fields, 11) + of(&fields, 12)).sum())
    }

    fn resident_kib(&self) -> Result<u64> {
        let mut sum = 0;
        for pid in self.processes()? {
            let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
            let resident = text.lines().find_map(|line| line.strip_prefix("Rss:"));
            let resident = resident.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
            sum += resident.with_context(|| format!("process {pid} has no Rss"))?;
        }
        Ok(sum)
    }
}

/// Return the fields of `/proc/PID/stat` after the program's name, which are numbered from 0: the state, the parent, the process group, …
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after) = text.rsplit_once(')')?;
    Some(after.split_whitespace().map(str::to_owned).collect())
}
