//! The card of a node on the page of the cluster.

use std::collections::BTreeMap;

use divvy_model::usage::Usage;
use divvy_view::amounts::{self, Amounts};
use divvy_view::{GpuView, NodeView};
use maud::{Markup, html};

use crate::bar::{self, GpuBar};
use crate::select::has_problem;
use crate::text::{counted, memory, part, percent, shown};
use crate::{ClusterScene, PageAddress, table};

/// Return the id of the element about a node.
pub(crate) fn id(node: &NodeView) -> String {
    format!("node-{}", shown(&node.name))
}

pub(crate) fn card(scene: &ClusterScene, node: &NodeView) -> Markup {
    let usage = scene.usage(&node.name);
    let all = amounts::of_node(node, usage);
    html! {
        article.card.trouble[has_problem(node)] id=(id(node)) {
            header {
                h3 { a href=(PageAddress::Node(node.name.clone()).to_string()) { (shown(&node.name)) } }
                p.sum { (sum(node, &all)) }
            }
            div.gpus {
                p.models { (kinds(node)) }
                span.head aria-hidden="true" { "busy" }
                ul { @for bar in GpuBar::of(node) { (line(node, &bar, usage)) } }
            }
            (troubles(scene, node))
            details { summary { "Table" } (table::of_node(node, usage)) }
        }
    }
}

/// Return what is allocated of a node.
pub(crate) fn sum(node: &NodeView, all: &Amounts) -> String {
    let taken = node.gpus.iter().filter(|gpu| gpu.pods.iter().any(|pod| pod.whole)).count();
    match all.total {
        0 => format!("{taken} / {}", counted(node.gpus.len(), "GPU")),
        _ => part(all.allocated, all.total),
    }
}

/// Return the kinds of GPUs of a node, and of their parts: `8 × NVIDIA A100-SXM4-40GB`, `2 × NVIDIA H100 80GB HBM3 (7 × 1g.10gb)`.
pub(crate) fn kinds(node: &NodeView) -> String {
    let bars = GpuBar::of(node);
    let mut models = TextCounts::default();
    let mut parts: BTreeMap<&str, TextCounts<'_>> = BTreeMap::new();
    for gpu in bars.iter().filter_map(|bar| bar.gpus.first()) {
        models.add(undivided(gpu));
    }
    for gpu in bars.iter().flat_map(|bar| &bar.gpus) {
        if let Some(part) = &gpu.partition {
            parts.entry(undivided(gpu)).or_default().add(&part.profile);
        }
    }
    let text = |(model, count): &(&str, usize)| {
        let model = if model.is_empty() { "GPU of unknown model" } else { model };
        let parts = parts
            .get(model)
            .map(|parts| format!(" ({})", parts.0.iter().map(times).collect::<Vec<_>>().join(", ")));
        format!("{}{}", times(&(model, *count)), parts.unwrap_or_default())
    };
    models.0.iter().map(text).collect::<Vec<_>>().join(", ")
}

/// How often each text is there, in the order of their first appearance.
#[derive(Default)]
struct TextCounts<'t>(Vec<(&'t str, usize)>);

impl<'t> TextCounts<'t> {
    fn add(&mut self, text: &'t str) {
        match self.0.iter_mut().find(|(known, _)| *known == text) {
            Some((_, count)) => *count += 1,
            None => self.0.push((text, 1)),
        }
    }
}

fn times((of, count): &(&str, usize)) -> String {
    format!("{count} × {}", shown(of))
}

/// Return a GPU's product name, without the profile that NVML's names of MIG devices end in.
pub(crate) fn undivided(gpu: &GpuView) -> &str {
    let model = gpu.model.as_deref().unwrap_or_default();
    let profile = gpu
        .partition
        .as_ref()
        .map(|of| of.profile.as_str())
        .filter(|profile| !profile.is_empty());
    let rest = profile.and_then(|profile| model.strip_suffix(profile)).map(str::trim_end);
    rest.map_or(model, |rest| rest.strip_suffix("MIG").unwrap_or(rest).trim_end())
}

/// Return a line with a bar, and its numbers.
pub(crate) fn line(node: &NodeView, bar: &GpuBar<'_>, usage: Option<&Usage>) -> Markup {
    let amounts = bar.amounts(node, usage);
    html! {
        li {
            span.index { @if bar.has_problem() { span.alarm title="This GPU cannot be used" { "⚠" } " " } (bar.name()) }
            (bar.draw(node, usage, false))
            span.number { (allocated(&bar.gpus, &amounts)) }
            span.number { @if amounts.busy.is_some() { (percent(amounts.busy)) } @else { "–" } }
        }
    }
}

/// Return what is allocated of a GPU, or of the parts of one.
fn allocated(gpus: &[&GpuView], amounts: &Amounts) -> String {
    let taken = gpus.iter().filter(|gpu| !gpu.pods.is_empty()).count();
    match (amounts.total, gpus) {
        (0, [_]) if taken == 0 => "free".to_owned(),
        (0, [_]) => "whole".to_owned(),
        (0, _) => format!("{taken} / {} parts", gpus.len()),
        _ => part(amounts.allocated, amounts.total),
    }
}

/// Return what is wrong with a node, and what is not known.
pub(crate) fn troubles(scene: &ClusterScene, node: &NodeView) -> Markup {
    let messages = node.gpus.iter().filter_map(|gpu| Some((gpu.index, gpu.message.as_ref()?)));
    let held = node.gpus.iter().filter(|gpu| gpu.held_mib > 0);
    let answer = scene.answers.get(&node.name);
    html! {
        @for (index, message) in messages { p.alarm { "⚠ GPU " (index) ": " (shown(message)) } }
        @if let Some(trouble) = &node.driver_trouble { p.alarm { "⚠ " (shown(trouble)) } }
        @for gpu in held { p.note { "GPU " (gpu.index) ": pods that have ended still hold " (memory(bar::held(gpu))) } }
        @for pod in &node.pending { p.note { (table::link(&pod.namespace, &pod.name)) " is on this node and has no GPU yet" } }
        @for pod in &node.unnamed { p.note { (table::link(&pod.namespace, &pod.name)) " has " (pod.gpus) " " (shown(&pod.resource)) "; which ones is not known" } }
        @match answer.map(|answer| &answer.usage) {
            Some(Err(error)) => p.note { "Not measured: " (shown(&error.to_string())) },
            Some(Ok(usage)) => @if let Some(note) = usage.note() { p.note { (note) } },
            None => {}
        }
    }
}
