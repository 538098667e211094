//! The page of a node.

use divvy_view::{NodeView, amounts};
use maud::{Markup, html};

use crate::bar::{self, GpuBar};
use crate::select::namespaces;
use crate::text::{counted, measured, memory, part, percent, shown};
use crate::{ClusterScene, PageAddress, card, table};

pub(crate) fn page(scene: &ClusterScene, node: &NodeView) -> Markup {
    html! {
        nav.trail aria-label="Where this page is" { a href=(PageAddress::Cluster(crate::Filter::default()).to_string()) { "Cluster" } " / " span { "Nodes" } }
        (section(scene, node))
    }
}

/// Everything about the node, which an event replaces.
pub(crate) fn section(scene: &ClusterScene, node: &NodeView) -> Markup {
    let usage = scene.usage(&node.name);
    let all = amounts::of_node(node, usage);
    let spaces: std::collections::BTreeSet<&str> = namespaces(node).collect();
    html! {
        div.single id=(card::id(node)) {
            h1 { (shown(&node.name)) }
            p.models { (card::kinds(node)) @if node.address != "unknown" { " · " (shown(&node.address)) } }
            dl.totals {
                div { dt { "Allocated" } dd { (card::sum(node, &all)) } }
                div { dt { "Free" } dd { (memory(all.free)) } @if all.held > 0 { dd.of { (bar::held_in_words(all.held)) } } }
                div { dt { "Used" } dd { (measured(all.used)) } }
                div { dt { "Allocated and idle" } dd { (measured(all.waste())) } }
                div { dt { "Busy" } dd { (percent(all.busy)) } }
            }
            (card::troubles(scene, node))
            (bar::legend(spaces.into_iter().take(12)))
            @for bar in GpuBar::of(node) {
                @let of = bar.amounts(node, usage);
                section.gpu.trouble[bar.has_problem()] {
                    h2 {
                        @if bar.has_problem() { span.alarm { "⚠ " } }
                        "GPU " (bar.name()) " "
                        span.faint { (bar.gpus.first().map(|gpu| shown(card::undivided(gpu))).unwrap_or_default()) }
                    }
                    p.facts {
                        @if of.total > 0 { span { (part(of.allocated, of.total)) " allocated" } }
                        span { (measured(of.used)) " used" }
                        span { (percent(of.busy)) " busy" }
                        @for uuid in bar.uuids() { @for fact in driver(uuid, usage) { span { (fact) } } }
                    }
                    (bar.draw(node, usage, true))
                    details open { summary { (counted(bar.gpus.iter().map(|gpu| gpu.pods.len()).sum(), "pod")) } (table::of_gpus(node, &bar.gpus, usage, &format!("GPU {}", bar.name()))) }
                }
            }
        }
    }
}

/// Return what the driver says of a GPU.
fn driver(uuid: &str, usage: Option<&divvy_model::usage::Usage>) -> Vec<String> {
    let Some(of) = usage.and_then(|usage| usage.gpu(uuid)) else {
        return Vec::new();
    };
    let watts = of.power_milliwatts.map(|power| format!("{} W", power / 1000));
    let celsius = of.temperature_celsius.map(|degrees| format!("{degrees} °C"));
    let clock = of.sm_clock_mhz.map(|clock| format!("{clock} MHz"));
    let error = of.error.as_deref().map(shown);
    [watts, celsius, clock, error].into_iter().flatten().collect()
}
