//! What is on a node's GPUs, as a table.

use divvy_model::usage::Usage;
use divvy_view::amounts;
use divvy_view::{GpuView, NodeView, PodView};
use maud::{Markup, html};

use crate::Address;
use crate::text::{measured, memory, percent, shown};

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
                            tr { @if several && at == 0 { (head(node, gpu, usage)) } (cells(node, gpu, pod, usage)) }
                        }
                        @if gpu.pods.is_empty() {
                            @let of = amounts::of_gpu(node, gpu, usage);
                            tr { @if several { (head(node, gpu, usage)) } td.faint { "no pods" } td { (memory(of.allocated)) } td { (measured(of.used)) } td { (percent(of.busy)) } }
                        }
                    }
                }
            }
        }
    }
}

/// Return the name of a GPU. That of a part with pods has what is used of the part, which stands nowhere else: the numbers above the table are those of all parts
/// together, and the pods' rows have the pods' own.
fn head(node: &NodeView, gpu: &GpuView, usage: Option<&Usage>) -> Markup {
    let rows = Some(gpu.pods.len()).filter(|rows| *rows > 1);
    let part = gpu.partition.as_ref().map(|part| match gpu.pods.is_empty() {
        true => shown(&part.profile),
        false => {
            let of = amounts::of_gpu(node, gpu, usage);
            format!(
                "{}, {} used, {} busy",
                shown(&part.profile),
                measured(of.used),
                percent(of.busy)
            )
        }
    });
    html! { th scope="row" rowspan=[rows] { (gpu.index) @if let Some(part) = part { " " span.faint { (part) } } } }
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
    let address = Address::Pod {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    html! { a href=(address.to_string()) { (shown(namespace)) "/" (shown(name)) } }
}
