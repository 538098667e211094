//! What is on a node's GPUs, as a table.

use divvy_model::usage::Usage;
use divvy_view::amounts;
use divvy_view::{GpuView, NodeView, PodView};
use maud::{Markup, html};

use crate::Address;
use crate::text::{measured, memory, percent, shown};

/// Return the table of these GPUs: a row for each pod on each of them. `of` says in the table's name which GPUs they are.
pub(crate) fn of_gpus(node: &NodeView, gpus: &[&GpuView], usage: Option<&Usage>, of: &str) -> Markup {
    let several = gpus.len() != 1;
    html! {
        div.wide tabindex="0" role="region" aria-label={ "Table: " (of) " of " (shown(&node.name)) } {
            table {
                thead { tr { @if several { th scope="col" { "GPU" } } th scope="col" { "Pod" } th.number scope="col" { "Allocated" } th.number scope="col" { "Used" } th.number scope="col" { "Busy" } } }
                tbody {
                    @for gpu in gpus {
                        @for pod in &gpu.pods { (row(node, gpu, pod, usage, several)) }
                        @if gpu.pods.is_empty() {
                            @let of = amounts::of_gpu(node, gpu, usage);
                            tr { @if several { th scope="row" { (gpu.index) } } td.faint { "no pods" } td.number { (memory(of.allocated)) } td.number { (measured(of.used)) } td.number { (percent(of.busy)) } }
                        }
                    }
                }
            }
        }
    }
}

fn row(node: &NodeView, gpu: &GpuView, pod: &PodView, usage: Option<&Usage>, several: bool) -> Markup {
    let of = amounts::of_pod(node, gpu, pod, usage);
    html! {
        tr {
            @if several { th scope="row" { (gpu.index) } }
            td { (link(&pod.namespace, &pod.name)) @if of.over > 0 { " " strong.alarm { "▲ over its share" } } }
            td.number { @if pod.whole { "whole GPU" } @else { (memory(of.allocated)) } }
            td.number { (measured(of.used)) }
            td.number { (percent(of.busy)) }
        }
    }
}

/// Return a link to a pod's page.
pub(crate) fn link(namespace: &str, name: &str) -> Markup {
    let address = Address::Pod {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    html! { a href=(address.to_string()) { (shown(namespace)) "/" (shown(name)) } }
}
