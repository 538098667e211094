//! What is on a node's GPUs, as a table.

use divvy_model::usage::Usage;
use divvy_view::amounts;
use divvy_view::{GpuView, NodeView, PodView};
use maud::{Markup, html};

use crate::Address;
use crate::text::{measured, memory, percent, shown};

/// Return the table of these GPUs: a row for each pod on each of them.
pub(crate) fn of_gpus<'g>(node: &NodeView, gpus: impl Iterator<Item = &'g GpuView>, usage: Option<&Usage>) -> Markup {
    html! {
        div.wide tabindex="0" role="region" aria-label={ "Table: the GPUs of " (shown(&node.name)) } {
            table {
                thead { tr { th scope="col" { "GPU" } th scope="col" { "Pod" } th.number scope="col" { "Allocated" } th.number scope="col" { "Used" } th.number scope="col" { "Busy" } } }
                tbody {
                    @for gpu in gpus {
                        @for pod in &gpu.pods { (row(node, gpu, pod, usage)) }
                        @if gpu.pods.is_empty() {
                            @let of = amounts::of_gpu(node, gpu, usage);
                            tr { th scope="row" { (gpu.index) } td.faint { "no pods" } td.number { (memory(of.allocated)) } td.number { (measured(of.used)) } td.number { (percent(of.busy)) } }
                        }
                    }
                }
            }
        }
    }
}

fn row(node: &NodeView, gpu: &GpuView, pod: &PodView, usage: Option<&Usage>) -> Markup {
    let of = amounts::of_pod(node, gpu, pod, usage);
    html! {
        tr {
            th scope="row" { (gpu.index) }
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
