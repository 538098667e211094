//! Pods and nodes as values.

use std::collections::BTreeMap;

use divvy_extender::core::{
    BindArgs, BindError, BindingRequest, CoreTiming, ExtenderAction, ExtenderCore, Got, Now, OpId, Posted, Ticket,
};
use divvy_model::{Held, MemoryUnit, Node, Phase, Pod, PodKey};
pub(crate) use divvy_testkit::nodes::{divvy_node as node, gpushare_cluster, gpushare_node, gpushare_pod, pending as pod};

pub(crate) const MS: u64 = 1_000_000;

pub(crate) fn at(ms: u64) -> Now {
    Now {
        monotonic_ns: ms * MS,
        unix_ns: 1_692_105_746_106_628_538 + ms * MS,
    }
}

/// Return the pod that the API server makes from a pod and a Binding.
pub(crate) fn bound(pod: &Pod, binding: &BindingRequest) -> Pod {
    Pod {
        node: Some(binding.node.clone()),
        held: Held::from_annotations(&binding.annotations),
        phase: Phase::Running,
        ..pod.clone()
    }
}

pub(crate) fn args(pod: &Pod, node: &str) -> BindArgs {
    BindArgs {
        pod_name: pod.name.clone(),
        pod_namespace: pod.namespace.clone(),
        pod_uid: pod.uid.clone(),
        node: node.to_owned(),
    }
}

pub(crate) fn synced(nodes: &[Node], pods: &[Pod]) -> ExtenderCore {
    let mut core = ExtenderCore::new(MemoryUnit::GIB, CoreTiming::default());
    core.index_mut().reset_nodes(nodes);
    core.index_mut().reset_pods(pods.to_vec());
    core
}

/// Free units of a node's GPUs.
pub(crate) fn free(core: &ExtenderCore, node: &str) -> Vec<u64> {
    let view = core.index().ledger().node(node).expect("known node");
    let gpus = view.state().map_or(0, |state| state.gpus.len());
    (0..gpus).map(|i| MemoryUnit::GIB.units_in(view.free(i))).collect()
}

pub(crate) fn key(pod: &Pod) -> PodKey {
    pod.key()
}

/// Expects exactly one action, a POST.
pub(crate) fn one_post(actions: Vec<ExtenderAction>) -> (OpId, BindingRequest) {
    match <[ExtenderAction; 1]>::try_from(actions) {
        Ok([ExtenderAction::Post { op, binding }]) => (op, binding),
        other => panic!("expected one POST: {other:?}"),
    }
}

/// Expects exactly one action, a GET.
pub(crate) fn one_get(actions: Vec<ExtenderAction>) -> (OpId, PodKey, u64) {
    match <[ExtenderAction; 1]>::try_from(actions) {
        Ok([ExtenderAction::Get { op, pod, after_ns }]) => (op, pod, after_ns),
        other => panic!("expected one GET: {other:?}"),
    }
}

/// Expects nothing but answers.
pub(crate) fn answers(actions: Vec<ExtenderAction>) -> BTreeMap<Ticket, Result<(), BindError>> {
    actions
        .into_iter()
        .map(|action| match action {
            ExtenderAction::Answer { ticket, result } => (ticket, result),
            other => panic!("expected answers only: {other:?}"),
        })
        .collect()
}

/// Expects exactly one answer.
pub(crate) fn one_answer(actions: Vec<ExtenderAction>) -> Result<(), BindError> {
    let answers = answers(actions);
    assert_eq!(answers.len(), 1, "{answers:?}");
    answers.into_values().next().expect("one")
}

/// Expects exactly one answer, which is a refusal, and returns its text.
pub(crate) fn one_refusal(actions: Vec<ExtenderAction>) -> String {
    one_answer(actions).expect_err("a refusal").message()
}

pub(crate) fn found(pod: &Pod) -> Got {
    Got::Found(Box::new(pod.clone()))
}

pub(crate) fn lost() -> Posted {
    Posted::Unknown("connection reset".to_owned())
}

pub(crate) fn conflict() -> Posted {
    Posted::Conflict("Operation cannot be fulfilled".to_owned())
}
