//! The answers of `divvy why` are true. In random clusters, the obstacles that it names are those that kube-scheduler's filters
//! and the extender report, and each suggestion makes the pod schedulable.

mod world;

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_explainer::from_objects;
use divvy_kube::convert;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_model::MemoryUnit;
use divvy_placement::{Ask, Ledger};
use divvy_testbed::api::DeleteOptions;
use divvy_testbed::embedded::{Embedded, EmbeddedSettings};
use divvy_testbed::scheduler::feasible;
use divvy_why::{Answer, Change, ClusterSnapshot, Hold, NamedPods};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

use crate::cli::{beside, stdout};
use crate::cluster::programs;
use world::World;

fn parsed<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).expect("an object")
}

/// Return the answer of `divvy why` about the world's pod.
fn answer(world: &World) -> Answer {
    answer_naming(world, &NamedPods::All)
}

fn answer_naming(world: &World, named: &NamedPods) -> Answer {
    let nodes: Vec<NodeObject> = world.nodes.iter().map(parsed).collect();
    let pods: Vec<PodObject> = world.pods.iter().chain([&world.asking]).map(parsed).collect();
    let mut snapshot = ClusterSnapshot::new(
        ledger(world),
        nodes.iter().map(from_objects::site).collect(),
        pods.iter().cloned().filter_map(from_objects::tenant).collect(),
    );
    let namespaces = world.namespaces.iter().map(parsed);
    let metas = namespaces.map(|namespace: k8s_openapi::api::core::v1::Namespace| namespace.metadata);
    snapshot.namespaces = Some(from_objects::labels(metas));
    let wants = from_objects::wants(&parsed(&world.asking)).expect("readable");
    divvy_why::answer_naming(&snapshot, &wants, true, named)
}

fn ledger(world: &World) -> Ledger {
    let nodes: Vec<_> = world.nodes.iter().map(|node| convert::node(&parsed(node))).collect();
    let pods = world.pods.iter().chain([&world.asking]);
    let mut ledger = Ledger::new(MemoryUnit::GIB);
    ledger.replace_nodes(&nodes);
    ledger.replace_pods(pods.map(|pod| convert::pod(&parsed(pod)).expect("readable")));
    ledger
}

/// Return for each node the reasons with which kube-scheduler's and the extender's filters refuse the pod. A node that accepts
/// the pod has no reasons.
fn refusals(world: &World) -> BTreeMap<String, Vec<String>> {
    let nodes: Vec<_> = world.nodes.iter().map(parsed).collect();
    let pods: Vec<_> = world.pods.iter().map(parsed).collect();
    let namespaces: Vec<_> = world.namespaces.iter().map(parsed).collect();
    let mut found = feasible(&parsed(&world.asking), &nodes, &pods, &namespaces);
    let ledger = ledger(world);
    let pod = convert::pod(&parsed(&world.asking)).expect("readable");
    let ask = Ask::of_pod(&pod, MemoryUnit::GIB);
    for (node, reasons) in &mut found {
        if let Err(refusal) = ledger.fits(node, &ask, &pod.uid) {
            reasons.push(refusal.filter_message(node));
        }
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// The filters have two independent implementations: one here, and one in the embedded scheduler.
    #[test]
    fn obstacles_are_exactly_the_refusals_of_scheduler_and_extender(world in world::any()) {
        let answer = answer(&world);
        if answer.holds.iter().any(|hold| matches!(hold.what, Hold::Suffix { .. })) {
            // For an invalid request, no nodes are shown.
            return Ok(());
        }
        for (node, reasons) in refusals(&world) {
            let said = answer.nodes.iter().find(|said| said.node == node).expect("each node is shown");
            prop_assert_eq!(said.fits, reasons.is_empty(), "{}: {:?}, and why says {:?}", node, reasons, said.obstacles);
        }
    }

    /// Apply the suggestion to the objects, as a user would.
    #[test]
    fn each_suggestion_alone_makes_the_pod_schedulable(world in world::any()) {
        let answer = answer(&world);
        prop_assert!(answer.suggestions.len() <= 3);
        for suggestion in &answer.suggestions {
            harmless(&suggestion.change)?;
            let mut changed = world.clone();
            changed.carry_out(&suggestion.change);
            prop_assert!(!changed.is_gated(), "a gated pod is looked at by nobody: {:?}", suggestion);
            let found = refusals(&changed);
            prop_assert!(found.get(&suggestion.then).is_some_and(Vec::is_empty), "{:?}: {:?}", suggestion, found);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Check the answer for a user of one namespace. The answer comes from the explainer, which sees the whole cluster.
    #[test]
    fn no_pod_is_named_to_a_user_who_may_not_list_it(mut world in world::any()) {
        let own = world.asking["metadata"]["namespace"].as_str().expect("it has one").to_owned();
        for (number, pod) in world.pods.iter_mut().enumerate() {
            let of = if pod["metadata"]["namespace"] == own.as_str() { "own" } else { "foreign" };
            for field in ["name", "uid"] {
                pod["metadata"][field] = json!(format!("{of}-pod-{number}"));
            }
            if of == "foreign" {
                pod["metadata"]["namespace"] = json!("foreign-pods");
            }
            for owner in pod["metadata"]["ownerReferences"].as_array_mut().into_iter().flatten() {
                owner["name"] = json!(format!("{of}-pod-owner"));
            }
        }
        let all = answer(&world);
        for (named, hidden) in [(NamedPods::Of(own), &["foreign-pod"][..]), (NamedPods::None, &["foreign-pod", "own-pod"])] {
            let found = answer_naming(&world, &named);
            let text = serde_json::to_string(&found).expect("JSON");
            for name in hidden {
                prop_assert!(!text.contains(name), "{:?}: {}", named, text);
            }
            // Everything else is the same.
            prop_assert_eq!(&found.groups, &all.groups);
            let fits = |answer: &Answer| answer.nodes.iter().map(|node| (node.node.clone(), node.fits)).collect::<Vec<_>>();
            prop_assert_eq!(fits(&found), fits(&all));
            prop_assert_eq!(found.suggestions.len(), all.suggestions.len());
        }
    }
}

/// Check that no suggestion changes objects that other users rely on.
fn harmless(change: &Change) -> Result<(), TestCaseError> {
    match change {
        Change::Label { label, .. } => prop_assert!(!label.contains('/'), "{}", label),
        Change::Tolerate { key, .. } => prop_assert!(!key.starts_with("node.kubernetes.io/"), "{}", key),
        Change::PodEnds { pod, .. } => {
            let named = pod.as_ref().is_some_and(|pod| pod.namespace != "kube-system");
            prop_assert!(named, "{:?}", pod);
        }
        _ => {}
    }
    Ok(())
}

/// The number of worlds to play on the embedded cluster.
const PLAYED: usize = 60;

/// The test above with the real program, the real extender, and the embedded scheduler: the printed suggestion is applied, and
/// the pod gets a node.
#[tokio::test]
async fn what_why_prints_lets_the_pod_start_on_a_cluster() {
    let settings = EmbeddedSettings::new(
        "v = 1\n[[node]]\nname = \"unused\"\n[[node.gpu]]\nmodel = \"T4\"\nmemory_mib = 1024\n",
        programs(),
    );
    let mut cluster = Embedded::start(settings).await.expect("the cluster comes up");
    let mut runner = TestRunner::deterministic();
    let mut played = 0;
    while played < PLAYED {
        let world = world::any().new_tree(&mut runner).expect("a world").current();
        let said = answer(&world);
        let kinds: Vec<&Change> = said.suggestions.iter().map(|suggestion| &suggestion.change).collect();
        if kinds.is_empty() {
            continue;
        }
        for (number, change) in kinds.into_iter().enumerate() {
            play(&mut cluster, &world, number, change).await;
        }
        played += 1;
    }
    cluster.shutdown().await;
}

async fn play(cluster: &mut Embedded, world: &World, number: usize, expected: &Change) {
    let api = cluster.api().clone();
    world.create(&api);
    let kubeconfig = cluster.kubeconfig().display().to_string();
    let output = beside(&["why", "pod/default/asking", "-o", "json", "--kubeconfig", &kubeconfig], &[]).await;
    let printed: Answer = serde_json::from_str(&stdout(&output)).expect("JSON");
    let change = &printed.suggestions[number].change;
    assert_eq!(kind(change), kind(expected), "{printed:?}");
    world.carry_out_on(&api, change);
    let began = tokio::time::Instant::now();
    loop {
        let pod = api.get("pods", "default", "asking").expect("it is there");
        if pod["spec"]["nodeName"].is_string() {
            break;
        }
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "{change:?} did not help: {}",
            pod["status"]
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let options = DeleteOptions {
        grace_period_s: Some(0),
        ..DeleteOptions::default()
    };
    for (resource, object) in world.objects(&api) {
        let text = |key: &str| object["metadata"][key].as_str().unwrap_or_default().to_owned();
        api.delete(resource, &text("namespace"), &text("name"), &options)
            .expect("it goes");
    }
}

/// Return the kind of a change without the parts that may differ between equally good choices.
fn kind(change: &Change) -> Value {
    json!(change)["kind"].clone()
}
