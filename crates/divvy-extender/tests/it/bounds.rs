//! Limits on what one pod or node can cost the extender, whatever the content: bytes kept, bytes of answers, and work while the
//! core is locked.

use divvy_extender::core::ExtenderCore;
use divvy_kube::convert;
use divvy_kube::convert::ReadPod;
use divvy_kube::objects::PodObject;
use divvy_kube::watch::WatchChange;
use divvy_model::limits::{DEVICE_TEXT_BYTES, RULE_BYTES, RULE_PATTERNS};
use divvy_model::{MemoryUnit, Node, Pod};
use serde_json::{Value, json};

use crate::values::*;

/// A size in bytes just below what the API server accepts in the annotations of one object.
const HUGE: usize = 250_000;
const NODES: usize = 400;

fn object(name: &str, units: u64, annotations: Value) -> PodObject {
    let limits = if units > 0 {
        json!({"aliyun.com/gpu-mem": units.to_string()})
    } else {
        json!({})
    };
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("u-{name}"), "annotations": annotations},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": "Pending"}
    }))
    .expect("a pod")
}

/// Patterns that are as long, as many, and as hard to match as the limits allow, and match nothing.
fn worst_rule() -> String {
    let each = RULE_BYTES / RULE_PATTERNS - 1;
    let pattern = "n*".repeat(each / 2);
    vec![pattern[..each - 1].to_owned() + "q"; RULE_PATTERNS].join(",")
}

fn cluster(nodes: usize, product: impl Fn(usize, usize) -> String) -> ExtenderCore {
    let mut core = ExtenderCore::new(MemoryUnit::GIB, divvy_extender::core::CoreTiming::default());
    let nodes: Vec<Node> = (0..nodes)
        .map(|number| {
            let mut node = node(&format!("n{number}"), &[40; 8]);
            if let Some(Ok(inventory)) = &mut node.inventory {
                for (gpu, described) in inventory.gpus.iter_mut().enumerate() {
                    described.model = product(number, gpu);
                }
            }
            node
        })
        .collect();
    core.node_change(WatchChange::Reset(nodes), at(0));
    core.pod_change(WatchChange::Reset(Vec::new()), at(0));
    core
}

fn names(nodes: usize) -> Vec<String> {
    (0..nodes).map(|number| format!("n{number}")).collect()
}

/// All ways in which a pod's rules can be long, meaningful or not.
fn hostile_rules() -> Vec<Value> {
    let key = |key: &str, value: String| json!({key: value});
    vec![
        key("divvy.dev/gpu-model", vec!["a"; HUGE / 2].join(",")),
        key("divvy.dev/gpu-model", vec!["!a"; HUGE / 3].join(",")),
        key("divvy.dev/gpu-model", "*".repeat(HUGE)),
        key("divvy.dev/gpu-model", worst_rule()),
        key("divvy.dev/gpu-model", "\u{202e}".repeat(RULE_BYTES / 3)),
        key("divvy.dev/gpu-model", "!".repeat(RULE_BYTES)),
        key("divvy.dev/gpu-uuid", vec!["GPU-1"; HUGE / 6].join(",")),
        key("divvy.dev/gpu-uuid", vec!["g".repeat(63); 16].join(",")),
        key("divvy.dev/gpu-memory", format!(">={}", "9".repeat(HUGE))),
        key("divvy.dev/gpus", "2".repeat(HUGE)),
        key("divvy.dev/gpu-prefer", "\u{1}".repeat(HUGE)),
        key(&format!("divvy.dev/{}", "x".repeat(HUGE)), String::new()),
    ]
}

#[test]
fn no_answer_of_filter_grows_with_nodes_times_the_text_of_a_pod() {
    let core = cluster(NODES, |_, _| "NVIDIA A100-SXM4-40GB".to_owned());
    let names = names(NODES);
    for annotations in hostile_rules() {
        let pod = convert::pod(&object("p", 4, annotations.clone())).expect("readable");
        let answer = core.filter(&pod, names.iter().map(String::as_str)).expect("synced");
        assert!(!answer.failed.is_empty() || !answer.passed.is_empty());
        for (position, refusal) in &answer.failed {
            let text = refusal.filter_text(&names[*position]);
            let shown = serde_json::to_string(&text).expect("JSON");
            assert!(shown.len() <= 330, "{} bytes: {shown}", shown.len());
        }
    }
}

/// Work is measured in memory allocations, because each comparison with a product makes some.
#[test]
fn rules_are_compared_per_product_not_per_gpu() {
    let pod = convert::pod(&object("p", 4, json!({"divvy.dev/gpu-model": worst_rule()}))).expect("readable");
    let asked = |products: usize, nodes: usize| {
        let mut core = cluster(nodes, |node, gpu| {
            let number = (node * 8 + gpu) % products;
            format!("{}{number:0>5}", "n".repeat(DEVICE_TEXT_BYTES - 5))
        });
        let names = names(nodes);
        let all = || names.iter().map(String::as_str);
        let filter = allocation_counter::measure(|| {
            let answer = core.filter(&pod, all()).expect("synced");
            assert_eq!((answer.passed.len(), answer.failed.len()), (0, nodes));
        });
        let prioritize = allocation_counter::measure(|| {
            core.prioritize(&pod, all()).expect("synced");
        });
        (filter.count_total, prioritize.count_total)
    };
    let (few, many) = (asked(2, NODES), asked(8, NODES));
    // Two texts per product, and the lists of the answer, which are extended now and then.
    assert!(few.0 < 40 && many.0 < few.0 + 6 * 4 + 1, "{few:?} {many:?}");
    assert!(
        few.1 < 3 * NODES as u64 + 60 && many.1 < few.1 + 8 * NODES as u64,
        "{few:?} {many:?}"
    );
    // As many products as GPUs: beyond a limit, all further products count as one.
    let (some, most) = (asked(usize::MAX, 100), asked(usize::MAX, 2 * NODES));
    assert!(most.0 < some.0 + 40, "{some:?} {most:?}");
}

/// The bytes that are still allocated after one call.
fn left_behind(call: impl FnOnce()) -> i64 {
    allocation_counter::measure(call).bytes_current
}

fn kept(core: &mut ExtenderCore, pods: impl Iterator<Item = PodObject>) -> i64 {
    pods.map(|object| {
        let read = ReadPod::from(object);
        left_behind(|| {
            core.pod_change(WatchChange::Apply(read.clone()), at(0));
        })
    })
    .sum()
}

const PODS: i64 = 1_000;

/// A foreign pod requests none of our resources.
#[test]
fn a_foreign_pod_costs_a_few_hundred_bytes() {
    let mut core = cluster(1, |_, _| String::new());
    let mut hostile = hostile_rules();
    hostile.push(json!({"divvy.dev/gpu-model": "A100*", "divvy.dev/gpu-uuid": "GPU-1"}));
    hostile.push(json!({"example.com/note": "x".repeat(HUGE)}));
    let idle = |number: i64| {
        let mut object = object(&format!("idle-{number}"), 0, hostile[number as usize % hostile.len()].clone());
        let one = object.spec.containers[0].clone();
        object.spec.containers = vec![one; 300];
        object
    };
    let bytes = kept(&mut core, (0..PODS).map(idle));
    assert_eq!(core.index().ledger().pod_count() as i64, PODS);
    assert!(bytes / PODS < 800, "{} bytes each", bytes / PODS);
}

#[test]
fn what_a_bound_pod_keeps_does_not_hang_on_its_rules() {
    let mut core = cluster(1, |_, _| String::new());
    let rules = hostile_rules();
    let bound = |number: i64| {
        let mut object = object(&format!("b-{number}"), 1, rules[number as usize % rules.len()].clone());
        object.spec.node_name = Some("n0".to_owned());
        object
    };
    let bytes = kept(&mut core, (0..PODS).map(bound));
    assert!(bytes / PODS < 1_000, "{} bytes each", bytes / PODS);
}

/// Rules are only kept until their pods are bound, and only within the limits.
#[test]
fn what_is_kept_of_a_pod_that_waits_is_bounded_whatever_it_says() {
    let long = || "9".repeat(HUGE);
    let others = [
        json!({"divvy.dev/allocation": long()}),
        json!({"divvy.dev/allocation": format!("{{\"v\":\"{}\"}}", "9".repeat(60_000))}),
        json!({"ALIYUN_COM_GPU_MEM_IDX": long(), "ALIYUN_COM_GPU_MEM_POD": long()}),
        json!({"scheduler.framework.gpushare.allocation": long()}),
    ];
    for (number, annotations) in hostile_rules().into_iter().chain(others).enumerate() {
        let mut core = cluster(1, |_, _| String::new());
        let object = object(&format!("w-{number}"), 1, annotations);
        let shown: String = format!("{:?}", object.metadata.annotations).chars().take(80).collect();
        let bytes = kept(&mut core, std::iter::once(object));
        assert!(bytes < 8_000, "{bytes} bytes of {shown}");
    }
}

/// Bind reports about one node only, but with many GPUs and long names, even this report is long.
#[test]
fn a_refused_bind_is_told_in_a_bounded_text() {
    let mut core = cluster(1, |_, gpu| format!("{gpu}{}", "n".repeat(DEVICE_TEXT_BYTES - 1)));
    let pod: Pod = convert::pod(&object("p", 4, json!({"divvy.dev/gpu-model": worst_rule()}))).expect("readable");
    core.index_mut().apply_pod(pod.clone());
    let (_, actions) = core.begin_bind(args(&pod, "n0"), at(2_000));
    let [divvy_extender::core::ExtenderAction::Answer { result: Err(error), .. }] = actions.as_slice() else {
        panic!("{actions:?}");
    };
    let text = error.message();
    assert!(text.contains("no GPU") && text.len() <= 4_100, "{} bytes: {text}", text.len());
}
