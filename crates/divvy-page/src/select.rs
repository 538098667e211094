//! Which nodes are on a page.

use std::collections::BTreeSet;

use divvy_view::{GpuView, NodeView, amounts};

use crate::ClusterScene;
use crate::address::{ConditionFilter, Filter};

/// The number of nodes on a page.
pub(crate) const A_PAGE: usize = 100;

/// The nodes of one page.
#[derive(Debug)]
pub(crate) struct SelectedNodes<'s> {
    pub(crate) nodes: Vec<&'s NodeView>,
    /// The number of nodes that the filter selects, on all pages.
    pub(crate) count: usize,
    /// The number of pages, at least 1.
    pub(crate) pages: usize,
    /// This page, starting at 0. The last one if the filter asks for a later one.
    pub(crate) page: usize,
}

pub(crate) fn select<'s>(scene: &'s ClusterScene, filter: &Filter) -> SelectedNodes<'s> {
    let all: Vec<&NodeView> = scene.nodes().filter(|node| has(node, filter)).collect();
    let pages = all.len().div_ceil(A_PAGE).max(1);
    let page = filter.page.min(pages - 1);
    SelectedNodes {
        count: all.len(),
        nodes: all.into_iter().skip(page * A_PAGE).take(A_PAGE).collect(),
        pages,
        page,
    }
}

fn has(node: &NodeView, filter: &Filter) -> bool {
    let condition = |wanted| (wanted == ConditionFilter::Problem) == has_problem(node);
    let namespace = |wanted: &String| namespaces(node).any(|namespace| namespace == wanted);
    let gpu = |gpu: &GpuView| {
        let model = |wanted: &String| gpu.model.as_ref() == Some(wanted);
        let free = |wanted: u64| gpu.offered && amounts::of_gpu(node, gpu, None).free >= wanted.saturating_mul(1 << 30);
        filter.model.as_ref().is_none_or(model) && filter.free.is_none_or(free)
    };
    filter.health.is_none_or(condition)
        && filter.namespace.as_ref().is_none_or(namespace)
        && ((filter.model.is_none() && filter.free.is_none()) || node.gpus.iter().any(gpu))
}

/// Report whether something is wrong with a node.
pub(crate) fn has_problem(node: &NodeView) -> bool {
    node.driver_trouble.is_some() || node.gpus.iter().any(|gpu| gpu.message.is_some())
}

/// Return the namespaces of the pods on a node, with repetitions.
pub(crate) fn namespaces(node: &NodeView) -> impl Iterator<Item = &str> {
    let pods = node.gpus.iter().flat_map(|gpu| &gpu.pods).chain(&node.pending);
    let unnamed = node.unnamed.iter().map(|pod| pod.namespace.as_str());
    pods.map(|pod| pod.namespace.as_str()).chain(unnamed)
}

/// Return the product names of all GPUs.
pub(crate) fn models(scene: &ClusterScene) -> BTreeSet<&str> {
    let gpus = scene.nodes().flat_map(|node| &node.gpus);
    gpus.filter_map(|gpu| gpu.model.as_deref()).collect()
}
