//! The rows of a screen.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use divvy_model::usage::Usage;
use divvy_view::{GpuView, NodeView, PodView};

use crate::row::{Of, TopRow, time};
use crate::seen::{Screen, SeenCluster, Sort};
use crate::waiting;
use divvy_view::amounts::{self, Amounts};

/// Return the rows of the current screen, filtered and sorted.
pub(crate) fn rows(seen: &SeenCluster) -> Vec<TopRow> {
    let Some(view) = &seen.view else {
        return Vec::new();
    };
    let mut groups: Vec<Vec<TopRow>> = match seen.screen() {
        Screen::Cluster => view.nodes.iter().map(|node| of_node(seen, node)).collect(),
        Screen::Pods => view
            .nodes
            .iter()
            .flat_map(|node| pods(seen, node))
            .map(|row| vec![row])
            .collect(),
        Screen::Node(name) => match view.nodes.iter().find(|node| node.name == *name) {
            Some(node) => gpus(seen, node),
            None => Vec::new(),
        },
        Screen::Pod(uid) => view.nodes.iter().map(|node| containers(seen, node, uid)).collect(),
        Screen::Waiting => waiting::rows(seen).map(|row| vec![row]).collect(),
        Screen::Why(key) => return waiting::explanation(seen, key),
    };
    if !seen.filter.is_empty() {
        groups.retain(|group| group.iter().any(|row| row.name.contains(&seen.filter)));
    }
    let key = |group: &Vec<TopRow>| group.first().and_then(|row| row.amounts).unwrap_or_default();
    match seen.sort {
        // The pod that has waited longest stays first.
        _ if *seen.screen() == Screen::Waiting => {}
        Sort::Name => {}
        Sort::Allocated => groups.sort_by_key(|group| Reverse(key(group).allocated)),
        Sort::Used => groups.sort_by_key(|group| Reverse(key(group).used)),
        Sort::Busy => groups.sort_by_key(|group| Reverse(key(group).busy)),
        Sort::Waste => groups.sort_by_key(|group| Reverse(key(group).waste())),
        Sort::Age => groups.sort_by_key(|group| Reverse(group.first().and_then(|row| row.age))),
    }
    groups.into_iter().flatten().collect()
}

/// Return the row of a node, and in the tree those of what is on it.
fn of_node(seen: &SeenCluster, node: &NodeView) -> Vec<TopRow> {
    let (text, alarm) = node_text(seen, node);
    let mut group = vec![TopRow {
        node: node.name.clone(),
        of: Of::Node,
        indent: 0,
        name: node.name.clone(),
        amounts: Some(amounts::of_node(node, seen.usage(&node.name))),
        text,
        age: oldest(seen, node.gpus.iter().flat_map(|gpu| &gpu.pods).chain(&node.pending)),
        alarm,
    }];
    if seen.tree {
        group.extend(gpus(seen, node).into_iter().flatten().map(|row| TopRow {
            indent: row.indent + 1,
            ..row
        }));
    }
    group
}

fn node_text(seen: &SeenCluster, node: &NodeView) -> (String, bool) {
    let failed = node.gpus.iter().filter(|gpu| gpu.message.is_some()).count();
    let alarm = failed > 0 || node.driver_trouble.is_some();
    let mut parts: Vec<String> = node.driver_trouble.iter().cloned().collect();
    if failed > 0 {
        parts.push(format!("{failed} not ok"));
    }
    match seen.failure(&node.name) {
        Some(error) => parts.push(error.to_string()),
        None => {
            let pods = node.gpus.iter().flat_map(|gpu| &gpu.pods);
            let pods: BTreeSet<&str> = pods.map(|pod| pod.uid.as_str()).collect();
            parts.push(counted(node.gpus.len(), "GPU"));
            parts.push(counted(pods.len(), "pod"));
        }
    }
    parts.extend(seen.usage(&node.name).and_then(Usage::note));
    (parts.join(", "), alarm)
}

fn counted(count: usize, of: &str) -> String {
    format!("{count} {of}{}", if count == 1 { "" } else { "s" })
}

/// Return the rows of a node's GPUs, each with its pods, and of the pods that are on none.
fn gpus(seen: &SeenCluster, node: &NodeView) -> Vec<Vec<TopRow>> {
    let usage = seen.usage(&node.name);
    let mut groups = Vec::new();
    for (at, gpu) in node.gpus.iter().enumerate() {
        let model = gpu.model.as_deref().unwrap_or("GPU");
        let mut group = vec![TopRow {
            node: node.name.clone(),
            of: Of::Gpu(at),
            indent: 0,
            name: format!("{} {model}", gpu.index),
            amounts: Some(amounts::of_gpu(node, gpu, usage)),
            text: gpu_text(gpu, usage),
            age: oldest(seen, &gpu.pods),
            alarm: gpu.message.is_some(),
        }];
        group.extend(
            gpu.pods
                .iter()
                .map(|pod| of_pod(seen, node, at, pod))
                .map(|row| TopRow { indent: 1, ..row }),
        );
        groups.push(group);
    }
    groups.extend(elsewhere(seen, node).map(|row| vec![row]));
    groups
}

fn gpu_text(gpu: &GpuView, usage: Option<&Usage>) -> String {
    if let Some(message) = &gpu.message {
        return message.clone();
    }
    let measured = gpu.uuid.as_deref().and_then(|uuid| usage?.gpu(uuid));
    let Some(measured) = measured else {
        return "ok".to_owned();
    };
    if let Some(error) = &measured.error {
        return error.clone();
    }
    let watts = measured.power_milliwatts.map(|power| format!("{} W", power / 1000));
    let celsius = measured.temperature_celsius.map(|degrees| format!("{degrees} °C"));
    let clock = measured.sm_clock_mhz.map(|clock| format!("{clock} MHz"));
    let parts: Vec<String> = [watts, celsius, clock].into_iter().flatten().collect();
    if parts.is_empty() { "ok".to_owned() } else { parts.join(" ") }
}

/// Return the rows of all pods on a node.
fn pods(seen: &SeenCluster, node: &NodeView) -> Vec<TopRow> {
    let on_gpus = node
        .gpus
        .iter()
        .enumerate()
        .flat_map(|(at, gpu)| gpu.pods.iter().map(move |pod| (at, pod)));
    let on_gpus = on_gpus.map(|(at, pod)| of_pod(seen, node, at, pod));
    on_gpus.chain(elsewhere(seen, node)).collect()
}

fn elsewhere(seen: &SeenCluster, node: &NodeView) -> impl Iterator<Item = TopRow> {
    let pending = node
        .pending
        .iter()
        .map(|pod| (&pod.namespace, &pod.name, "no GPU yet".to_owned(), oldest(seen, [pod])));
    let unnamed = node
        .unnamed
        .iter()
        .map(|pod| (&pod.namespace, &pod.name, format!("{} {}", pod.gpus, pod.resource), None));
    pending.chain(unnamed).map(|(namespace, name, text, age)| TopRow {
        node: node.name.clone(),
        of: Of::Elsewhere(format!("{namespace}/{name}")),
        indent: 0,
        name: format!("{namespace}/{name}"),
        amounts: None,
        text,
        age,
        alarm: false,
    })
}

/// Return for how many seconds the oldest of these pods has existed.
fn oldest<'p>(seen: &SeenCluster, pods: impl IntoIterator<Item = &'p PodView>) -> Option<u64> {
    let created = pods.into_iter().filter_map(|pod| pod.created_s).min()?;
    Some(seen.at.saturating_sub(u64::from(created.get())))
}

fn of_pod(seen: &SeenCluster, node: &NodeView, at: usize, pod: &PodView) -> TopRow {
    let gpu = &node.gpus[at];
    let usage = seen.usage(&node.name);
    let amounts = amounts::of_pod(node, gpu, pod, usage);
    let age = oldest(seen, [pod]);
    let mut text = Vec::new();
    let mut escapes = BTreeSet::new();
    let (mut denied, mut last) = (0_u64, None);
    for entry in amounts::entries(usage, pod, gpu.uuid.as_deref()) {
        escapes.extend(entry.escapes.iter().map(|kind| kind.word()));
        denied = denied.saturating_add(entry.denied.unwrap_or(0));
        last = last.max(entry.last_busy);
    }
    text.extend(escapes.iter().map(|word| (*word).to_owned()));
    // A process that Divvy did not place has no share to keep to.
    let has_share = pod.units > 0;
    if !has_share {
        text.push("no share".to_owned());
    } else if amounts.over > 0 && !escapes.contains("over") {
        text.push("over".to_owned());
    }
    if denied > 0 {
        text.push(format!("{denied} refused"));
    }
    text.extend(idle(seen, node, amounts.busy, last));
    if pod.cores > 0 {
        text.push(format!("{} % of the time", pod.cores));
    }
    // What the rows are sorted by comes first.
    if let Some(age) = age.filter(|_| seen.sort == Sort::Age) {
        text.insert(0, time(age));
    }
    TopRow {
        node: node.name.clone(),
        of: Of::Pod(pod.uid.clone(), at),
        indent: 0,
        name: pod.full_name(),
        amounts: Some(amounts),
        alarm: !escapes.is_empty() || (amounts.over > 0 && has_share),
        age,
        text: text.join(", "),
    }
}

/// Return for how long a container has not kept the GPU busy, if it does not now.
fn idle(seen: &SeenCluster, node: &NodeView, busy: Option<u32>, last: Option<u64>) -> Option<String> {
    let passed = seen.measured_at(&node.name)?.saturating_sub(last?);
    (busy.is_none_or(|percent| percent == 0) && passed >= 60).then(|| format!("idle {}", time(passed)))
}

/// Return the rows of a pod on a node: one for each GPU, and below it its containers.
fn containers(seen: &SeenCluster, node: &NodeView, uid: &str) -> Vec<TopRow> {
    let usage = seen.usage(&node.name);
    let mut rows = Vec::new();
    for (at, gpu) in node.gpus.iter().enumerate() {
        for pod in gpu.pods.iter().filter(|pod| pod.uid == uid) {
            let row = of_pod(seen, node, at, pod);
            let text = if row.text.is_empty() {
                node.name.clone()
            } else {
                format!("{}, {}", node.name, row.text)
            };
            rows.push(TopRow {
                name: format!("{} {}", gpu.index, gpu.model.as_deref().unwrap_or("GPU")),
                text,
                ..row
            });
            for entry in amounts::entries(usage, pod, gpu.uuid.as_deref()) {
                let Some(container) = &entry.container else { continue };
                let used = entry.used_bytes.unwrap_or(0);
                // Without a limit of its own, an entry is a part of the row above it.
                let limit = entry.limit_bytes.unwrap_or(used);
                let peak = entry.peak_bytes.map(|bytes| format!("peak {}", amounts::memory(bytes)));
                let idle = idle(seen, node, entry.busy_percent, entry.last_busy);
                rows.push(TopRow {
                    node: node.name.clone(),
                    of: Of::Container(container.clone(), at),
                    indent: 1,
                    name: container.clone(),
                    amounts: Some(Amounts {
                        allocated: entry.limit_bytes.unwrap_or(0),
                        used: entry.used_bytes,
                        within: used.min(limit),
                        over: used.saturating_sub(limit),
                        busy: entry.busy_percent,
                        total: row_total(rows.last()),
                        ..Amounts::default()
                    }),
                    text: [peak, idle].into_iter().flatten().collect::<Vec<_>>().join(", "),
                    age: row_age(rows.last()),
                    alarm: false,
                });
            }
        }
    }
    rows
}

fn row_age(row: Option<&TopRow>) -> Option<u64> {
    row.and_then(|row| row.age)
}

fn row_total(row: Option<&TopRow>) -> u64 {
    row.and_then(|row| row.amounts).map_or(0, |amounts| amounts.total)
}
