//! GPUs that are out of service, while a run tests them, and before the agent knows which GPUs these are.

use std::collections::BTreeMap;

use divvy_agent_core::{AgentCore, PreStart, Reason, Tests};
use divvy_model::limits::{TEST_LASTS, TEST_RUN_BYTES};
use divvy_model::out_of_service::{GpusOutOfService, out_of_service_key, under_test_key};
use divvy_model::{Health, PodRequest, names};
use proptest::prelude::*;

use crate::node::{Node, settings, simple};

const GPU: &str = "GPU-0";

fn lasts_ms() -> u64 {
    u64::try_from(TEST_LASTS.as_millis()).expect("short")
}

/// What the annotations say, when the agent reads them.
fn node(under_test: Option<&str>) -> GpusOutOfService {
    let test = under_test.map(|run| (under_test_key(GPU), run.to_owned()));
    let out = (out_of_service_key(GPU), "fan is broken".to_owned());
    GpusOutOfService::read(&[out].into_iter().chain(test).collect())
}

/// Few texts, so that the two annotations are often equal: ids, what is almost an id, and what is none.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => "[ab]",
        2 => "[ ]?[aB][ ]?",
        1 => Just(String::new()),
        1 => Just("true".to_owned()),
        1 => (TEST_RUN_BYTES - 1..=TEST_RUN_BYTES + 1).prop_map(|len| "a".repeat(len)),
        1 => ".{0,4}",
    ]
}

fn is_id(text: &str) -> bool {
    !text.is_empty() && text.len() <= 32 && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
}

proptest! {
    /// A GPU out of service starts a pod if and only if the pod has the id of the GPU's test and the test is current.
    #[test]
    fn a_gpu_out_of_service_starts_only_its_tests_pod(
        of_pod in proptest::option::of(text()),
        looks in proptest::collection::vec((0..lasts_ms(), proptest::option::weighted(0.8, text())), 1..8),
        later in prop_oneof![0..lasts_ms(), Just(lasts_ms() - 1), Just(lasts_ms())],
    ) {
        let mut tests = Tests::default();
        // Since when the annotation says the same; `None` if it was there before the agent.
        let (mut now, mut since) = (0, None);
        let mut before: Option<Option<&str>> = None;
        for (pause, of_node) in &looks {
            now += pause;
            tests.look(now, &node(of_node.as_deref()));
            if before.is_some_and(|before| before != of_node.as_deref()) {
                since = Some(now);
            }
            before = Some(of_node.as_deref());
        }
        now += later;
        let of_node = before.flatten();
        let is_current = of_node.is_some_and(is_id) && since.is_some_and(|since| now - since < lasts_ms());
        let ids_are_equal = of_pod.as_deref().map(str::trim) == of_node;

        let mut bed = Node::new(&[4096]);
        let mut pod = simple("p", 0, 1);
        let annotations = [(names::GPU_UUID, GPU)].into_iter().chain(of_pod.as_deref().map(|text| (names::GPU_TEST, text)));
        let annotations: BTreeMap<String, String> = annotations.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let rules = divvy_model::GpuRules::from_annotations(&annotations).transpose();
        pod.request = PodRequest::new(pod.request.containers, rules);
        bed.see(pod);
        bed.admit("p").expect("admitted");
        let test = tests.of(GPU, now).cloned();
        bed.change_gpu(0, |gpu| (gpu.health, gpu.test) = (if test.is_some() { Health::Testing } else { Health::Failed }, test));
        let answer = bed.pre_start("p", "main");
        prop_assert_eq!(matches!(answer, PreStart::Granted { .. }), is_current && ids_are_equal, "{:?}", answer);
    }
}

/// An agent that has not read its node opens no GPU to a test either.
#[test]
fn a_test_from_before_the_agent_opens_no_gpu() {
    let mut tests = Tests::default();
    tests.look(0, &GpusOutOfService::default());
    tests.look(1, &node(Some("a")));
    assert_eq!(tests.of(GPU, 2), None);
    tests.look(3, &node(Some("b")));
    assert_eq!(
        tests.of(GPU, 4).map(|run| run.as_str()),
        Some("b"),
        "the next run replaces it"
    );
    assert_eq!(tests.of("GPU-1", 4), None);
}

/// The agent must know which GPUs are out of service.
#[test]
fn no_container_starts_before_gpu_service_is_known() {
    let mut node = Node::new(&[4096]);
    node.see(simple("a", 0, 1));
    node.admit("a").expect("admitted");
    // The agent restarts, and the API server does not answer: it knows the GPU from the driver, and pods from its records.
    let ids: Vec<String> = node.ids_of("a", "main").into_iter().collect();
    let mut core = AgentCore::new(settings());
    core.set_hardware(BTreeMap::new(), node.core.gpus().to_vec())
        .expect("few ids");
    core.set_handouts(node.facts().handouts.expect("read"));
    core.apply_pod(simple("a", 0, 1));
    let spec = divvy_agent_core::ResourceSpec::MEMORY;
    for _ in 0..2 {
        let answer = core.pre_start(spec, &ids, &node.facts());
        assert!(matches!(answer, PreStart::Wait(Reason::UnknownNode, _)), "{answer:?}");
    }
    core.knows_service();
    let answer = core.pre_start(spec, &ids, &node.facts());
    assert!(matches!(answer, PreStart::Granted { .. }), "{answer:?}");
}
