//! Binds whose earlier try got no answer, while the cluster changes.

use divvy_extender::core::{BindingRequest, ExtenderAction, ExtenderCore, Got, Posted};
use divvy_model::{Gpu, Health, Node, Pod};

use crate::values::*;

fn with(mut node: Node, change: impl Fn(&mut Vec<Gpu>)) -> Node {
    if let Some(Ok(inventory)) = &mut node.inventory {
        change(&mut inventory.gpus);
        node.capacity_units = inventory.gpus.iter().map(|gpu| gpu.units).sum();
        node.capacity_gpus = inventory.gpus.len() as u64;
    }
    node
}

/// All ways in which the GPU of an earlier try (n1's GPU 1, with 8 units) can become unusable.
fn spoiled() -> [(&'static str, Node); 4] {
    let sound = || node("n1", &[16, 8]);
    [
        ("failed", with(sound(), |gpus| gpus[1].health = Health::Failed)),
        ("lost", with(sound(), |gpus| gpus[1].health = Health::Lost)),
        ("shrunk", with(sound(), |gpus| gpus[1].units = 7)),
        ("gone", with(sound(), |gpus| gpus.truncate(1))),
    ]
}

/// A pod of 8 units whose bind to n1's GPU 1 got no answer.
fn in_doubt() -> (ExtenderCore, Pod, Pod, BindingRequest) {
    let (q, r) = (pod("q", 8), pod("r", 8));
    let mut core = synced(&[node("n1", &[16, 8])], &[q.clone(), r.clone()]);
    let (op, first) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    assert_eq!(gpu(&first), "GPU-n1-1");
    let (op, ..) = one_get(core.posted(op, lost(), at(10)));
    one_answer(core.got(op, found(&q), at(20))).expect_err("not bound so far");
    (core, q, r, first)
}

fn gpu(binding: &BindingRequest) -> String {
    match divvy_model::Held::from_annotations(&binding.annotations) {
        divvy_model::Held::Allocation(allocation) => allocation.gpus[0].uuid.clone(),
        other => panic!("{other:?}"),
    }
}

fn fits(core: &ExtenderCore, pod: &Pod) -> bool {
    core.filter(pod, ["n1"]).expect("synced").failed.is_empty()
}

#[test]
fn a_bind_tried_again_is_not_sent_to_a_gpu_that_is_good_no_more() {
    for (what, now) in spoiled() {
        let (mut core, q, r, first) = in_doubt();
        core.index_mut().apply_node(&now);
        assert!(fits(&core, &q), "{what}: GPU 0 has room");
        let (op, asked, pause) = one_get(core.begin_bind(args(&q, "n1"), at(1_000)).1);
        assert_eq!((asked, pause), (key(&q), 0), "{what}: the first may have come through");
        let (op, second) = one_post(core.got(op, found(&q), at(1_010)));
        assert_eq!(gpu(&second), "GPU-n1-0", "{what}");
        // Both stay reserved, even after the GPU is back.
        core.index_mut().apply_node(&node("n1", &[16, 8]));
        assert_eq!(free(&core, "n1"), [8, 0], "{what}: whichever comes through");
        assert_eq!(one_answer(core.posted(op, Posted::Created, at(1_020))), Ok(()));
        assert_eq!(free(&core, "n1"), [8, 8], "{what}: the other will not");
        core.index_mut().apply_pod(bound(&q, &second));
        assert_eq!(free(&core, "n1"), [8, 8]);
        assert!(fits(&core, &r));
        drop(first);
    }
}

#[test]
fn the_first_try_may_succeed_after_the_second() {
    for (what, now) in spoiled() {
        let (mut core, q, r, first) = in_doubt();
        core.index_mut().apply_node(&now);
        let (op, ..) = one_get(core.begin_bind(args(&q, "n1"), at(1_000)).1);
        let (op, _) = one_post(core.got(op, found(&q), at(1_010)));
        core.index_mut().apply_node(&node("n1", &[16, 8]));
        // In the meantime another pod gets the rest, but not the memory that the first try may take.
        assert_eq!(core.begin_bind(args(&r, "n1"), at(1_011)).1, [], "waits for the node");
        let actions = core.posted(op, conflict(), at(1_020));
        let [ExtenderAction::Get { op, .. }, ExtenderAction::Post { binding: other, .. }] = &actions[..] else {
            panic!("{actions:?}");
        };
        assert_eq!(gpu(other), "GPU-n1-0", "{what}");
        let op = *op;
        assert_eq!(
            one_answer(core.got(op, found(&bound(&q, &first)), at(1_030))),
            Ok(()),
            "{what}"
        );
        assert_eq!(free(&core, "n1"), [8, 0], "{what}: r on GPU 0, q on GPU 1");
        core.index_mut().apply_pod(bound(&q, &first));
        assert_eq!(free(&core, "n1"), [8, 0]);
    }
}

#[test]
fn the_first_try_may_succeed_before_the_second() {
    for (what, now) in spoiled() {
        let (mut core, q, _, first) = in_doubt();
        core.index_mut().apply_node(&now);
        let (op, ..) = one_get(core.begin_bind(args(&q, "n1"), at(1_000)).1);
        assert_eq!(
            one_answer(core.got(op, found(&bound(&q, &first)), at(1_010))),
            Ok(()),
            "{what}"
        );
        core.index_mut().apply_node(&node("n1", &[16, 8]));
        assert_eq!(free(&core, "n1"), [16, 0], "{what}");
        // The outcome is unknown: nothing new is sent, and nothing is released.
        let (mut core, q, ..) = in_doubt();
        core.index_mut().apply_node(&now);
        let (op, ..) = one_get(core.begin_bind(args(&q, "n1"), at(1_000)).1);
        let error = one_refusal(core.got(op, Got::Failed("down".to_owned()), at(1_010)));
        assert_eq!(
            error,
            "pod default/q could not be read, and an earlier bind of it may have been carried out: down"
        );
        core.index_mut().apply_node(&node("n1", &[16, 8]));
        assert_eq!(free(&core, "n1"), [16, 0], "{what}");
    }
}

#[test]
fn a_second_try_that_is_refused_leaves_the_first_in_doubt() {
    for refusal in [Posted::Refused("forbidden".to_owned()), conflict()] {
        let (mut core, q, ..) = in_doubt();
        core.index_mut().apply_node(&spoiled()[0].1);
        let (op, ..) = one_get(core.begin_bind(args(&q, "n1"), at(1_000)).1);
        let (op, _) = one_post(core.got(op, found(&q), at(1_010)));
        for action in core.posted(op, refusal, at(1_020)) {
            if let ExtenderAction::Get { op, .. } = action {
                one_answer(core.got(op, found(&q), at(1_030))).expect_err("refused");
            }
        }
        core.index_mut().apply_node(&node("n1", &[16, 8]));
        assert_eq!(free(&core, "n1"), [16, 0]);
        // The GPU is usable again: the same allocation as at first is sent, without reading the pod.
        let (op, third) = one_post(core.begin_bind(args(&q, "n1"), at(2_000)).1);
        assert_eq!(gpu(&third), "GPU-n1-1");
        one_answer(core.posted(op, Posted::Created, at(2_010))).expect("bound");
        assert_eq!(free(&core, "n1"), [16, 0]);
    }
}

/// The tries of a pod never take up more than one booking on each GPU of the node.
#[test]
fn unanswered_tries_count_once_per_gpu() {
    // GPU 1 fails, comes back, and fails again: the allocation moves back and forth, and is never counted twice on one GPU.
    let (mut core, q, ..) = in_doubt();
    for round in 1..6u64 {
        let sick = (round % 2) as usize;
        core.index_mut()
            .apply_node(&with(node("n1", &[16, 8]), |gpus| gpus[sick].health = Health::Failed));
        let mut actions = core.begin_bind(args(&q, "n1"), at(round * 1_000)).1;
        if let [ExtenderAction::Get { op, .. }] = &actions[..] {
            let op = *op;
            actions = core.got(op, found(&q), at(round * 1_000 + 1));
        }
        let (op, binding) = one_post(actions);
        assert_eq!(gpu(&binding), format!("GPU-n1-{}", 1 - sick));
        let (op, ..) = one_get(core.posted(op, lost(), at(round * 1_000 + 10)));
        one_answer(core.got(op, found(&q), at(round * 1_000 + 20))).expect_err("not bound so far");
        assert_eq!(free(&core, "n1"), [8, 0]);
    }
    // The doubt ends when none of the Bindings can be carried out any longer.
    core.checked(&q.uid, "n1", found(&q), at(200_000));
    assert_eq!(free(&core, "n1"), [16, 8]);
}

/// All GPUs of the node have failed since the first bind of the pod.
#[test]
fn a_pod_in_doubt_gets_no_failed_node() {
    let (mut core, q, ..) = in_doubt();
    core.index_mut().apply_node(&with(node("n1", &[16, 8]), |gpus| {
        for gpu in gpus {
            gpu.health = Health::Failed;
        }
    }));
    assert!(!fits(&core, &q));
    let (op, ..) = one_get(core.begin_bind(args(&q, "n1"), at(1_000)).1);
    one_answer(core.got(op, found(&q), at(1_010))).expect_err("no room");
    core.index_mut().apply_node(&node("n1", &[16, 8]));
    assert_eq!(free(&core, "n1"), [16, 0], "it may come yet");
}
