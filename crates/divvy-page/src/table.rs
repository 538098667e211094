//! What is on a node's GPUs, as tables.

use divvy_model::usage::Usage;
use divvy_view::amounts;
use divvy_view::{GpuView, NodeView, PodView};
use maud::{Markup, html};

use crate::PageAddress;
use crate::text::{measured, memory, percent, shown};

/// Return the table of a node, with a row for each GPU. The pods are on the page of the node: with them, the size of the cluster's page would grow with the number of
/// pods.
pub(crate) fn of_node(node: &NodeView, usage: Option<&Usage>) -> Markup {
    html! {
        div.wide tabindex="0" role="region" aria-label={ "Table: the GPUs of " (shown(&node.name)) } {
            table.sums {
                thead { tr { th scope="col" { "GPU" } th scope="col" { "Pods" } th scope="col" { "Allocated" } th scope="col" { "Used" } th scope="col" { "Busy" } } }
                tbody {
                    @for gpu in &node.gpus {
                        @let of = amounts::of_gpu(node, gpu, usage);
                        tr {
                            (head(gpu, None, 1))
                            td { (gpu.pods.len()) }
                            td { (memory(of.allocated)) }
                            td { (measured(of.used)) @if of.over > 0 { " " strong.alarm { "▲ over" } } }
                            td { (percent(of.busy)) }
                        }
                    }
                }
            }
        }
    }
}

/// Return the table of these GPUs: a row for each pod on each of them. `of` says in the table's name which GPUs they are. A page has thousands of cells, so the style
/// sheet knows by their positions which ones are numbers.
pub(crate) fn of_gpus(node: &NodeView, gpus: &[&GpuView], usage: Option<&Usage>, of: &str) -> Markup {
    let several = gpus.len() != 1;
    html! {
        div.wide tabindex="0" role="region" aria-label={ "Table: " (of) " of " (shown(&node.name)) } {
            table.pods {
                thead { tr { @if several { th scope="col" { "GPU" } } th scope="col" { "Pod" } th.number scope="col" { "Allocated" } th.number scope="col" { "Used" } th.number scope="col" { "Busy" } } }
                tbody {
                    @for gpu in gpus {
                        @for (at, pod) in gpu.pods.iter().enumerate() {
                            tr { @if several && at == 0 { (head(gpu, Some(used(node, gpu, usage)), gpu.pods.len())) } (cells(node, gpu, pod, usage)) }
                        }
                        @if gpu.pods.is_empty() {
                            @let of = amounts::of_gpu(node, gpu, usage);
                            tr { @if several { (head(gpu, None, 1)) } td.faint { "no pods" } td { (memory(of.allocated)) } td { (measured(of.used)) } td { (percent(of.busy)) } }
                        }
                    }
                }
            }
        }
    }
}

/// Return the cell with the name of a GPU, and with the profile of a part.
fn head(gpu: &GpuView, used: Option<String>, rows: usize) -> Markup {
    let rows = Some(rows).filter(|rows| *rows > 1);
    html! {
        th scope="row" rowspan=[rows] {
            (gpu.index)
            @if let Some(part) = &gpu.partition { " " span.faint { (shown(&part.profile)) @if let Some(used) = used { ", " (used) } } }
        }
    }
}

/// Return what is used of a part. If the part has pods, no cell says it: the numbers above the table are the sums of all parts, and each pod's row has what that pod
/// uses.
fn used(node: &NodeView, gpu: &GpuView, usage: Option<&Usage>) -> String {
    let of = amounts::of_gpu(node, gpu, usage);
    format!("{} used, {} busy", measured(of.used), percent(of.busy))
}

fn cells(node: &NodeView, gpu: &GpuView, pod: &PodView, usage: Option<&Usage>) -> Markup {
    let of = amounts::of_pod(node, gpu, pod, usage);
    html! {
        td { (link(&pod.namespace, &pod.name)) @if of.over > 0 { " " strong.alarm { "▲ over its share" } } }
        td { @if pod.whole { "whole GPU" } @else { (memory(of.allocated)) } }
        td { (measured(of.used)) }
        td { (percent(of.busy)) }
    }
}

/// Return a link to a pod's page.
pub(crate) fn link(namespace: &str, name: &str) -> Markup {
    let address = PageAddress::Pod {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    html! { a href=(address.to_string()) { (shown(namespace)) "/" (shown(name)) } }
}
