//! The page of a pod.

use divvy_model::usage::{ContainerUsage, EscapeKind};
use divvy_view::{GpuView, NodeView, PodView, amounts};
use maud::{Markup, html};

use crate::text::{counted, measured, memory, percent, shown, span};
use crate::{ClusterScene, PageAddress, UsageHistory, bar, chart};

/// Where a pod is.
#[derive(Debug)]
pub(crate) struct PodPlace<'s> {
    pub(crate) node: &'s NodeView,
    /// The pod on each of its GPUs. Empty if it has none yet, or if it is not known which ones it has.
    on: Vec<(&'s GpuView, &'s PodView)>,
}

/// Find a pod.
pub(crate) fn find<'s>(scene: &'s ClusterScene, namespace: &str, name: &str) -> Option<PodPlace<'s>> {
    scene.view.nodes.iter().find_map(|node| {
        let on: Vec<_> = node
            .gpus
            .iter()
            .flat_map(|gpu| gpu.pods.iter().map(move |pod| (gpu, pod)))
            .filter(|(_, pod)| pod.namespace == namespace && pod.name == name)
            .collect();
        let pending = node.pending.iter().any(|pod| pod.namespace == namespace && pod.name == name);
        let unnamed = node.unnamed.iter().any(|pod| pod.namespace == namespace && pod.name == name);
        (!on.is_empty() || pending || unnamed).then_some(PodPlace { node, on })
    })
}

pub(crate) fn page(scene: &ClusterScene, history: &UsageHistory, place: &PodPlace<'_>, namespace: &str, name: &str) -> Markup {
    let node = &place.node.name;
    html! {
        nav.trail aria-label="Where this page is" { a href="/" { "Cluster" } " / " a href=(PageAddress::Node(node.clone()).to_string()) { (shown(node)) } " / " span { "Pods" } }
        (section(scene, history, place, namespace, name))
    }
}

/// Everything about the pod, which an event replaces.
pub(crate) fn section(scene: &ClusterScene, history: &UsageHistory, place: &PodPlace<'_>, namespace: &str, name: &str) -> Markup {
    let PodPlace { node, on } = place;
    let uid = on.first().map(|(_, pod)| pod.uid.as_str());
    html! {
        div.single id="pod" {
            h1 { svg.swatch width="14" height="14" aria-hidden="true" focusable="false" { rect class={ "n" (bar::NamespaceColor::of(namespace)) } width="14" height="14" {} } span.faint { (shown(namespace)) "/" } (shown(name)) }
            @if on.is_empty() { p.note { "The pod is on node " (shown(&node.name)) ". It is not known which GPUs it has." } }
            @for (gpu, pod) in on { (on_gpu(scene, node, gpu, pod)) }
            @if let Some(uid) = uid { (last_hour(scene, history, uid, on, node)) }
        }
    }
}

fn on_gpu(scene: &ClusterScene, node: &NodeView, gpu: &GpuView, pod: &PodView) -> Markup {
    let usage = scene.usage(&node.name);
    let of = amounts::of_pod(node, gpu, pod, usage);
    let entries: Vec<&ContainerUsage> = amounts::entries(usage, pod, gpu.uuid.as_deref()).collect();
    let only = bar::GpuBar { gpus: vec![gpu] };
    html! {
        section.gpu.trouble[gpu.message.is_some()] {
            h2 { "GPU " (gpu.index) " of " a href=(PageAddress::Node(node.name.clone()).to_string()) { (shown(&node.name)) } " " span.faint { (gpu.model.as_deref().map(shown).unwrap_or_default()) } }
            @if let Some(message) = &gpu.message { p.alarm { "⚠ " (shown(message)) } }
            @if of.over > 0 { p.alarm { "▲ The pod uses " (memory(of.over)) " more than its share." } }
            dl.totals {
                div { dt { "Limit" } dd { @if pod.whole { "whole GPU" } @else { (memory(of.allocated)) } } }
                div { dt { "Used" } dd { (measured(of.used)) } }
                div { dt { "Allocated and idle" } dd { (measured(of.waste())) } }
                div { dt { "Busy" } dd { (percent(of.busy)) } }
                @if pod.cores > 0 { div { dt { "Share of compute time" } dd { (pod.cores) " %" } } }
                @if let Some(by) = pod.enforcement { div { dt { "Held to its share by" } dd { (by) } } }
            }
            (only.draw(node, usage, true))
            p.faint { "All pods on this GPU: " (bar::in_words(node, gpu, usage, true)) "." }
            @if let Some(asked) = &pod.requested { p.note { "The pod asked for " (asked.units) " units of " (shown(&asked.unit)) " before the node's unit was changed." } }
            @if let Some(Err(error)) = scene.answers.get(&node.name).map(|answer| &answer.usage) { p.note { "Not measured: " (shown(&error.to_string())) } }
            @if !entries.is_empty() { (containers(&entries, scene.at, gpu.index)) }
        }
    }
}

fn containers(entries: &[&ContainerUsage], now: u64, index: u32) -> Markup {
    html! {
        details open {
            summary { (counted(entries.len(), "container")) }
            div.wide tabindex="0" role="region" aria-label={ "Table: containers on GPU " (index) } {
                table {
                    thead { tr { th scope="col" { "Container" } th.number scope="col" { "Limit" } th.number scope="col" { "Used" } th.number scope="col" { "Peak" } th.number scope="col" { "Busy" } th.number scope="col" { "Last busy" } th.number scope="col" { "Refused" } th scope="col" { "Signs" } } }
                    tbody {
                        @for of in entries {
                            tr {
                                th scope="row" { (of.container.as_deref().map_or_else(|| "all together".to_owned(), shown)) }
                                td.number { (measured(of.limit_bytes)) }
                                td.number { (measured(of.used_bytes)) }
                                td.number { (measured(of.peak_bytes)) }
                                td.number { (percent(of.busy_percent)) }
                                td.number { @match of.last_busy { Some(at) if now.saturating_sub(at) < 60 => "now", Some(at) => { (span(now.saturating_sub(at))) " ago" }, None => "–" } }
                                td.number { @match of.denied { Some(denied) => (denied), None => "–" } }
                                td { @for kind in &of.escapes { span.alarm { "▲ " (sign(*kind)) } " " } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Return what a sign means.
fn sign(kind: EscapeKind) -> &'static str {
    match kind {
        EscapeKind::Over => "over its share",
        EscapeKind::Unguarded => "avoids the guard",
        EscapeKind::ForeignGpu => "uses a GPU that it was not granted",
        EscapeKind::Tampered => "changed the guard's file",
        EscapeKind::Other => "a sign that this version does not know",
    }
}

fn last_hour(scene: &ClusterScene, history: &UsageHistory, uid: &str, on: &[(&GpuView, &PodView)], node: &NodeView) -> Markup {
    let points: Vec<_> = history.of(uid).collect();
    let now = scene.at / 60;
    let limit = amounts::of_pod_on(node, on.iter().copied());
    let most = points.iter().filter_map(|point| point.used).max().unwrap_or(0).max(limit);
    let of = |value: &dyn Fn(&crate::Point) -> Option<u64>| -> Vec<(u64, u64)> {
        points
            .iter()
            .filter_map(|point| Some((point.minute, value(point)?)))
            .collect()
    };
    let (used, busy) = (of(&|point| point.used), of(&|point| point.busy.map(u64::from)));
    html! {
        section.gpu {
            h2 { "The last hour" }
            @if points.is_empty() { p.faint { "Nothing was measured yet. This program keeps a point for each minute in which someone looks at the pod's node." } }
            @else {
                div.charts {
                    figure { (chart::line(&used, now.saturating_sub(59), now, most, Some(limit), &format!("Memory used in the last hour: {}", chart::in_words(&used, memory)))) figcaption { "Memory used, up to " (memory(most)) "; the dashed line is the limit" } }
                    figure { (chart::line(&busy, now.saturating_sub(59), now, 100, None, &format!("Busy in the last hour: {}", chart::in_words(&busy, |value| format!("{value} %"))))) figcaption { "Busy, 0 to 100 %" } }
                }
                details {
                    summary { "Table" }
                    div.wide tabindex="0" role="region" aria-label="Table: the last hour" {
                        table {
                            thead { tr { th scope="col" { "Time (UTC)" } th.number scope="col" { "Used" } th.number scope="col" { "Busy" } } }
                            tbody { @for point in points.iter().rev() { tr { th scope="row" { (crate::text::clock(point.minute.saturating_mul(60))) } td.number { (measured(point.used)) } td.number { (percent(point.busy)) } } } }
                        }
                    }
                }
            }
        }
    }
}
