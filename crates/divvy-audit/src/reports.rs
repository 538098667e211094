use std::collections::BTreeMap;

use divvy_model::{Held, MemoryUnit, MiB, Pod, names};

use super::finding::{FindingKind, Moment, PodMemory};
use super::gpu::AuditedGpu;
use super::{Audit, who};

/// What a container reported about itself, or what was observed of its process. It does not depend on Divvy's own records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerReport {
    /// The node on which the container ran.
    pub node: String,
    /// The UID of the container's pod.
    pub pod_uid: String,
    /// The container's name in the pod.
    pub container: String,
    /// The container's unique id.
    pub id: String,
    /// Whether the container runs; if false, it has ended.
    pub running: bool,
    /// The minor numbers in the `/dev/nvidia<minor>` that the container has.
    pub gpus: Vec<u32>,
    /// The container's environment variables, as far as they matter.
    pub env: BTreeMap<String, String>,
}

/// A running container.
#[derive(Debug)]
pub(super) struct ContainerRun {
    pod: Pod,
    container: String,
    position: Option<usize>,
    /// Since when the container's pod has been gone or ended.
    alone_since: Option<Moment>,
}

/// A report of a container whose pod is not known yet.
#[derive(Debug)]
pub(super) struct Early {
    at: Moment,
    report: ContainerReport,
    ended: bool,
}

impl Audit {
    pub(super) fn report(&mut self, at: Moment, report: ContainerReport) {
        let unit = self.limits.unit;
        let site = self.sites.entry(report.node.clone());
        site.or_insert_with(|| super::AuditedNode::new(unit)).reports = true;
        let key = (report.node.clone(), report.id.clone());
        if !report.running {
            self.run_ended(at, &key);
            for early in self.early.get_mut(&report.pod_uid).into_iter().flatten() {
                early.ended |= early.report.id == report.id && early.report.node == report.node;
            }
            return;
        }
        let waits = self.early.get(&report.pod_uid);
        if self.runs.contains_key(&key) || waits.is_some_and(|all| all.iter().any(|early| early.report.id == report.id)) {
            return;
        }
        self.summary.containers += 1;
        let known = self.pods.get(report.pod_uid.as_str()).map(|tracked| &tracked.pod);
        let known = known.or_else(|| self.gone.get(&report.pod_uid)).cloned();
        // The pod was bound before its container started. If the pod is not bound here yet, the program that saw the process was
        // only quicker to record it.
        match known.filter(|pod| pod.node.is_some()) {
            Some(pod) => self.run_began(at, pod, report, false),
            None => self.early.entry(report.pod_uid.clone()).or_default().push(Early {
                at,
                report,
                ended: false,
            }),
        }
    }

    /// Process the reports of a pod's containers that arrived before the pod was known.
    pub(super) fn late(&mut self, at: Moment, uid: &str) {
        let Some(pod) = self
            .pods
            .get(uid)
            .map(|tracked| &tracked.pod)
            .filter(|pod| pod.node.is_some())
        else {
            return;
        };
        let ended = pod.ended();
        if self.early.contains_key(uid) {
            let pod = pod.clone();
            for early in self.early.remove(uid).unwrap_or_default() {
                self.run_began(early.at, pod.clone(), early.report, early.ended);
            }
        }
        if ended {
            self.runs_alone(at, uid);
        }
    }

    fn run_began(&mut self, at: Moment, pod: Pod, report: ContainerReport, ended: bool) {
        let (position, memory) = self.check_run(at, &pod, &report);
        if ended {
            return;
        }
        let key = (report.node.clone(), report.id.clone());
        if let Some(position) = position {
            let gpu = self.sites.get_mut(&report.node).and_then(|site| site.gpus.get_mut(position));
            if let Some(gpu) = gpu {
                gpu.used.insert(report.id.clone(), (pod.uid.clone(), memory));
            }
        }
        self.runs_of.entry(pod.uid.clone()).or_default().insert(key.clone());
        let there = self.pods.get(pod.uid.as_str()).is_some_and(|tracked| !tracked.pod.ended());
        let run = ContainerRun {
            pod,
            container: report.container,
            position,
            alone_since: (!there).then_some(at),
        };
        self.runs.insert(key, run);
        if let Some(position) = position {
            self.settle_used(at, &report.node, position);
        }
    }

    fn run_ended(&mut self, at: Moment, key: &(String, String)) {
        let Some(run) = self.runs.remove(key) else {
            return;
        };
        self.outlived(at, &run);
        let mut last = true;
        if let Some(keys) = self.runs_of.get_mut(&run.pod.uid) {
            keys.remove(key);
            last = keys.is_empty();
        }
        if last {
            self.runs_of.remove(&run.pod.uid);
        }
        let Some(site) = self.sites.get_mut(&key.0) else {
            return;
        };
        for gpu in site.gpus.iter_mut().filter(|_| last) {
            // The end of the pod's last container was seen.
            gpu.departed.remove(&run.pod.uid);
        }
        if let Some(position) = run.position {
            if let Some(gpu) = site.gpus.get_mut(position) {
                gpu.used.remove(&key.1);
            }
            self.settle_used(at, &key.0, position);
        }
    }

    fn outlived(&mut self, at: Moment, run: &ContainerRun) {
        let since = run.alone_since.and_then(|since| since.at_ms);
        if let (Some(now), Some(since)) = (at.at_ms, since)
            && now.saturating_sub(since) > self.limits.leak_ms
        {
            let what = FindingKind::OutlivedPod {
                who: who(&run.pod),
                container: run.container.clone(),
                for_ms: now.saturating_sub(since),
            };
            self.found(at, what);
        }
    }

    /// Note that a pod is gone or has ended, so that its containers should end as well.
    fn runs_alone(&mut self, at: Moment, uid: &str) {
        for key in self.runs_of.get(uid).into_iter().flatten() {
            if let Some(run) = self.runs.get_mut(key) {
                run.alone_since.get_or_insert(at);
            }
        }
    }

    pub(super) fn remember_gone(&mut self, at: Moment, pod: Pod) {
        self.runs_alone(at, &pod.uid);
        if self.limits.remember_ms > 0 && !matches!((&pod.held, &pod.node), (Held::Nothing, None)) {
            if let Some(at_ms) = at.at_ms {
                self.gone_order.push_back((at_ms, pod.uid.clone()));
            }
            self.gone.insert(pod.uid.clone(), pod);
        }
    }

    pub(super) fn forget_gone(&mut self, now_ms: Option<i64>) {
        let Some(now) = now_ms else { return };
        let over = |(at_ms, _): &&(i64, String)| now.saturating_sub(*at_ms) > self.limits.remember_ms;
        while self.gone_order.front().filter(over).is_some() {
            if let Some((_, uid)) = self.gone_order.pop_front() {
                self.gone.remove(&uid);
            }
        }
    }

    /// Check that a container has what was allocated for it. Return the position of the GPU that it uses, and how much memory of
    /// that GPU.
    fn check_run(&mut self, at: Moment, pod: &Pod, report: &ContainerReport) -> (Option<usize>, MiB) {
        let mut found = Vec::new();
        let answer = self.judge_run(pod, report, &mut found);
        for what in found {
            self.found(at, what);
        }
        answer
    }

    fn judge_run(&self, pod: &Pod, report: &ContainerReport, found: &mut Vec<FindingKind>) -> (Option<usize>, MiB) {
        let container = || report.container.clone();
        let Some(site) = self.sites.get(&report.node) else {
            return (None, MiB::ZERO);
        };
        let named = |minor: &u32| {
            let has = |gpu: &AuditedGpu| gpu.nodes.iter().any(|node| *node == format!("nvidia{minor}"));
            site.gpus.iter().position(has)
        };
        let words = |minor: &u32| match named(minor).and_then(|position| site.gpus.get(position)) {
            Some(gpu) => gpu.card.to_string(),
            None => format!("/dev/nvidia{minor} of node {}, which it never listed", report.node),
        };
        let had = |minors: &[u32]| match minors {
            [] => "no GPU".to_owned(),
            minors => minors.iter().map(words).collect::<Vec<_>>().join(" and "),
        };
        let asks = pod.request.containers.iter().find(|one| one.name == report.container);
        let asks = asks.is_some_and(|one| one.units > 0);
        let shares = match &pod.held {
            Held::Allocation(allocation) => allocation.containers.get(&report.container).map_or(&[][..], Vec::as_slice),
            _ => &[],
        };
        // gpushare's own annotations do not say what each container gets.
        if matches!(pod.held, Held::Legacy(_)) {
            return (None, MiB::ZERO);
        }
        // The kubelet chose the GPUs of a pod with whole GPUs that no extender has placed.
        if pod.request.whole.is_some() && pod.held == Held::Nothing {
            return (None, MiB::ZERO);
        }
        if shares.is_empty() {
            let told = report.env.get(names::ALIYUN_IDX).filter(|_| asks);
            let gpus = report.gpus.as_slice();
            if !gpus.is_empty() || told.is_some() {
                let what = match told {
                    Some(index) if gpus.is_empty() => format!("{}={index}", names::ALIYUN_IDX),
                    _ => had(gpus),
                };
                let (who, container) = (who(pod), container());
                found.push(FindingKind::RanWithoutAllocation {
                    who,
                    container,
                    found: what,
                });
            }
            return (None, MiB::ZERO);
        }
        let expected: Vec<Option<usize>> = shares.iter().map(|share| site.position_of(&share.uuid)).collect();
        let card = |position: &Option<usize>| position.and_then(|position| site.gpus.get(position));
        let allocated = || {
            let names = shares.iter().zip(&expected).map(|(share, position)| match card(position) {
                Some(gpu) => gpu.card.to_string(),
                None => format!("GPU {} of node {}", share.uuid, pod.node.as_deref().unwrap_or("?")),
            });
            names.collect::<Vec<_>>().join(" and ")
        };
        let elsewhere = |what: String| FindingKind::RanElsewhere {
            who: who(pod),
            container: container(),
            allocated: allocated(),
            found: what,
        };
        let mut used = expected.first().copied().flatten();
        if pod.node.as_deref() != Some(report.node.as_str()) {
            found.push(elsewhere(format!("node {}", report.node)));
            return (None, MiB::ZERO);
        }
        // Containers report NVIDIA's device nodes. The GPUs that are offered only as a whole have others.
        if expected.iter().filter_map(card).any(|gpu| gpu.whole) {
            return (None, MiB::ZERO);
        }
        let mut has: Vec<Option<usize>> = report.gpus.iter().map(named).collect();
        let mut should = expected.clone();
        has.sort_unstable();
        should.sort_unstable();
        if has != should || has.contains(&None) {
            found.push(elsewhere(had(&report.gpus)));
            used = has.first().copied().flatten();
        }
        if pod.request.whole.is_some() {
            found.extend(not_void(pod, report));
            return (used, shares.first().map_or(MiB::ZERO, |share| share.memory));
        }
        let (Some(share), Some(gpu)) = (shares.first().filter(|_| shares.len() == 1), expected.first().and_then(card)) else {
            return (used, shares.first().map_or(MiB::ZERO, |share| share.memory));
        };
        told(pod, report, names::ALIYUN_IDX, gpu.card.index.to_string(), found);
        let right = |unit: &MemoryUnit| {
            let units = unit.units_in(share.memory).to_string();
            let of = if *unit == site.unit() {
                gpu.units
            } else {
                unit.units_in(gpu.shared)
            };
            [
                (names::ALIYUN_POD, units.clone()),
                (names::ALIYUN_CONTAINER, units),
                (names::ALIYUN_DEV, of.to_string()),
            ]
        };
        let said = |(variable, right): &(&str, String)| report.env.get(*variable) == Some(right);
        // A container keeps the numbers of its pod's unit, whatever the node's unit is now.
        if !site.units.iter().any(|unit| right(unit).iter().all(said)) {
            for (variable, right) in right(&site.unit()) {
                told(pod, report, variable, right, found);
            }
        }
        found.extend(not_void(pod, report));
        (used, share.memory)
    }

    fn settle_used(&mut self, at: Moment, node: &str, position: usize) {
        let Some(gpu) = self.sites.get_mut(node).and_then(|site| site.gpus.get_mut(position)) else {
            return;
        };
        let (used, capacity, over) = (gpu.sum_used(), gpu.capacity, gpu.over_used);
        if used <= capacity {
            if let Some(number) = gpu.over_used.take()
                && let Some(finding) = self.findings.get_mut(number)
            {
                finding.until = Some(at);
            }
            return;
        }
        let card = gpu.card.clone();
        let mut by: Vec<PodMemory> = Vec::new();
        for (id, (uid, memory)) in &gpu.used {
            let Some(run) = self.runs.get(&(node.to_owned(), id.clone())) else {
                continue;
            };
            match by.iter_mut().find(|share| share.uid == *uid) {
                Some(share) => share.memory = share.memory.saturating_add(*memory),
                None => by.push(PodMemory {
                    pod: run.pod.key(),
                    uid: uid.clone(),
                    memory: *memory,
                }),
            }
        }
        by.sort_by(|a, b| (b.memory, &a.pod, &a.uid).cmp(&(a.memory, &b.pod, &b.uid)));
        let now = FindingKind::OvercommittedByReports {
            card,
            capacity,
            used,
            by,
        };
        let number = match over {
            None => self.found(at, now),
            Some(number) => {
                if let Some(finding) = self.findings.get_mut(number)
                    && matches!(&finding.what, FindingKind::OvercommittedByReports { used: most, .. } if used > *most)
                {
                    finding.what = now;
                }
                Some(number)
            }
        };
        if let Some(gpu) = self.sites.get_mut(node).and_then(|site| site.gpus.get_mut(position)) {
            gpu.over_used = number;
        }
    }

    pub(super) fn finish_reports(&mut self, end: Moment) {
        for (_, run) in std::mem::take(&mut self.runs) {
            self.outlived(end, &run);
        }
        let containers = self.early.values().map(Vec::len).sum::<usize>() as u64;
        if containers > 0 {
            self.found(end, FindingKind::ReportsUnmatched { containers });
        }
    }
}

/// Return a finding if a container with a grant has a variable that lets NVIDIA's runtime add GPUs.
fn not_void(pod: &Pod, report: &ContainerReport) -> Option<FindingKind> {
    let visible = report.env.get(names::VISIBLE_DEVICES);
    (visible.map(String::as_str) != Some(names::VISIBLE_NONE)).then(|| FindingKind::NotVoid {
        who: who(pod),
        container: report.container.clone(),
        found: visible.cloned(),
    })
}

fn told(pod: &Pod, report: &ContainerReport, variable: &'static str, expected: String, found: &mut Vec<FindingKind>) {
    let said = report.env.get(variable);
    if said != Some(&expected) {
        found.push(FindingKind::ToldWrong {
            who: who(pod),
            container: report.container.clone(),
            variable,
            found: said.cloned(),
            expected,
        });
    }
}
