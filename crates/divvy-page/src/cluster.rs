//! The page of the cluster: sums, a filter, and a card for each node.

use std::collections::BTreeSet;

use divvy_view::amounts;
use maud::{Markup, html};

use crate::address::{ConditionFilter, Filter};
use crate::bar::GpuBar;
use crate::select::{SelectedNodes, has_problem, models, namespaces, select};
use crate::text::{counted, memory, shown};
use crate::{ClusterScene, PageAddress, bar, card};

/// The maximum number of namespaces among which a filter lets choose, and in the legend.
const CHOICES: usize = 200;
const IN_LEGEND: usize = 12;

pub(crate) fn page(scene: &ClusterScene, filter: &Filter) -> Markup {
    let selected = select(scene, filter);
    let shown: BTreeSet<&str> = selected.nodes.iter().flat_map(|node| namespaces(node)).collect();
    html! {
        h1.hidden { "GPUs of the cluster" }
        (totals(scene))
        (form(scene, filter))
        section aria-labelledby="nodes" {
            div.above {
                h2 id="nodes" { (heading(scene, &selected, filter)) }
                (bar::legend(shown.into_iter().take(IN_LEGEND)))
            }
            @if selected.nodes.is_empty() { p.empty { (nothing(scene)) } }
            div.cards { @for node in &selected.nodes { (card::card(scene, node)) } }
            (pager(&selected, filter))
        }
    }
}

fn heading(scene: &ClusterScene, selected: &SelectedNodes<'_>, filter: &Filter) -> String {
    let all = scene.view.nodes.len();
    if filter.selects() {
        format!("{} of {}", selected.count, counted(all, "node"))
    } else {
        counted(all, "node")
    }
}

fn nothing(scene: &ClusterScene) -> &'static str {
    if scene.view.nodes.is_empty() {
        "No node has GPUs that Divvy offers. `kubectl divvy doctor` finds the reason."
    } else {
        "No node is as the filter says."
    }
}

/// The sums of the whole cluster, and what is not known about it.
pub(crate) fn totals(scene: &ClusterScene) -> Markup {
    let nodes = || scene.nodes();
    let all = amounts::of_nodes(nodes().map(|node| (node, None)));
    let measured: Vec<_> = nodes().filter_map(|node| Some((node, scene.usage(&node.name)?))).collect();
    let asked = measured.len();
    let used = amounts::of_nodes(measured.into_iter().map(|(node, usage)| (node, Some(usage))));
    let gpus = nodes().map(|node| GpuBar::of(node).len()).sum::<usize>();
    let wrong = nodes().flat_map(GpuBar::of).filter(GpuBar::has_problem).count();
    let troubled = nodes().filter(|node| has_problem(node)).count();
    let on = if asked == nodes().len() {
        String::new()
    } else {
        format!("on {asked} of {}", counted(nodes().len(), "node"))
    };
    html! {
        div id="totals" {
            @for notice in &scene.notices { p.notice { (shown(notice)) } }
            dl.totals {
                div { dt { "Allocated" } dd { (memory(all.allocated)) } dd.of { "of " (memory(all.total)) } }
                div { dt { "Free" } dd { (memory(all.free)) } dd.of { (ratio(all.free, all.total)) @if all.held > 0 { ", " (bar::held_in_words(all.held)) } } }
                div { dt { "Used" } dd { (crate::text::measured(used.used)) } dd.of { (if used.used.is_some() { on.as_str() } else { "not measured" }) } }
                div { dt { "Allocated and idle" } dd { (crate::text::measured(used.waste())) } dd.of { (used.waste().map(|waste| ratio(waste, used.allocated)).unwrap_or_default()) } }
                div { dt { "GPUs" } dd { (gpus) } dd.of { "on " (counted(nodes().len(), "node")) } }
                div.alarmed[wrong > 0 || troubled > 0] {
                    dt { "Problems" }
                    dd { @if wrong > 0 || troubled > 0 { a href="/?health=problem" { "⚠ " (counted(wrong.max(troubled), if wrong > 0 { "GPU" } else { "node" })) } } @else { "none" } }
                    dd.of { @if troubled > 0 { "on " (counted(troubled, "node")) } }
                }
                div { dt { "Waiting" } dd { a href="/waiting" { (counted(scene.waiting.len(), "pod")) } } dd.of {} }
                @for (resource, sum) in &scene.view.whole { div { dt { (shown(resource)) } dd { (sum.allocated) " / " (sum.total) } dd.of { "as a whole" } } }
            }
        }
    }
}

fn ratio(part: u64, all: u64) -> String {
    let percent = (u128::from(part) * 100).checked_div(u128::from(all));
    percent.map(|percent| format!("{percent} %")).unwrap_or_default()
}

fn form(scene: &ClusterScene, filter: &Filter) -> Markup {
    let namespaces: BTreeSet<&str> = scene
        .nodes()
        .flat_map(namespaces)
        .chain(filter.namespace.as_deref())
        .collect();
    let models: BTreeSet<&str> = models(scene).into_iter().chain(filter.model.as_deref()).collect();
    html! {
        form.filter role="search" aria-label="Filter the nodes" action="/" method="get" {
            label { "Namespace" (choice("namespace", &namespaces, filter.namespace.as_deref())) }
            label { "Model" (choice("model", &models, filter.model.as_deref())) }
            label { "Free on one GPU, GiB" input type="number" name="free" min="0" max="4294967295" step="1" inputmode="numeric" placeholder="any" value=[filter.free]; }
            label {
                "Health"
                select name="health" {
                    option value="" { "any" }
                    @for condition in [ConditionFilter::Ok, ConditionFilter::Problem] {
                        option value=(condition.word()) selected[filter.health == Some(condition)] { (condition.word()) }
                    }
                }
            }
            button { "Filter" }
            @if filter.selects() { a href="/" { "Show all" } }
        }
    }
}

fn choice(name: &str, values: &BTreeSet<&str>, chosen: Option<&str>) -> Markup {
    // What is chosen can be chosen again.
    let kept = |(at, value): &(usize, &&str)| *at < CHOICES || Some(**value) == chosen;
    html! {
        select name=(name) {
            option value="" { "any" }
            @for (_, value) in values.iter().enumerate().filter(kept) {
                option value=(value) selected[Some(*value) == chosen] { (shown(value)) }
            }
        }
    }
}

fn pager(selected: &SelectedNodes<'_>, filter: &Filter) -> Markup {
    let to = |page| PageAddress::Cluster(Filter { page, ..filter.clone() }).to_string();
    html! {
        @if selected.pages > 1 {
            nav.pager aria-label="Pages" {
                @if selected.page > 0 { a rel="prev" href=(to(selected.page - 1)) { "← Previous" } }
                span { "Page " (part_of(selected)) }
                @if selected.page + 1 < selected.pages { a rel="next" href=(to(selected.page + 1)) { "Next →" } }
            }
        }
    }
}

fn part_of(selected: &SelectedNodes<'_>) -> String {
    format!("{} of {}", selected.page + 1, selected.pages)
}
