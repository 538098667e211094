//! The last hour of each pod.

use std::collections::BTreeSet;

use divvy_page::{ClusterScene, Point, UsageHistory};
use divvy_view_sim::{ClusterMoment, ViewSimNode, ViewSimShare, equal};
use proptest::prelude::*;

use crate::scenes::{GIB, scene};

const UID: &str = "uid-ml-train";

fn at(minute: u64, used: u64) -> ClusterScene {
    let machine = ViewSimNode::new("gpu-a", "Tesla T4", 16, 1).pod(ViewSimShare::new("ml", "train", 0, 8).uses(used * 1024, 40));
    let mut scene = scene(ClusterMoment::of(&[machine], 0));
    scene.at = minute * 60;
    scene.answers.values_mut().for_each(|answer| answer.at = minute * 60 + 7);
    scene
}

fn minutes(history: &UsageHistory) -> Vec<u64> {
    history.of(UID).map(|point| point.minute).collect()
}

#[test]
fn the_last_60_minutes_are_kept_and_the_last_value_of_each() {
    let mut history = UsageHistory::default();
    for minute in 100..250 {
        history.record(&at(minute, 1));
        history.record(&at(minute, 2));
    }
    assert_eq!(minutes(&history), (190..250).collect::<Vec<_>>());
    let last = history.of(UID).last().copied();
    assert_eq!(
        last,
        Some(Point {
            minute: 249,
            used: Some(2 * GIB),
            busy: Some(40)
        })
    );
}

#[test]
fn a_minute_without_an_answer_has_no_point_and_old_points_leave() {
    let mut history = UsageHistory::default();
    history.record(&at(100, 1));
    let mut silent = at(101, 1);
    silent.answers.clear();
    history.record(&silent);
    history.record(&at(102, 1));
    assert_eq!(minutes(&history), [100, 102]);
    history.record(&at(160, 1));
    assert_eq!(minutes(&history), [102, 160]);
}

#[test]
fn a_pod_that_has_ended_is_forgotten() {
    let mut history = UsageHistory::default();
    history.record(&at(100, 1));
    history.record(&ClusterScene::default());
    history.record(&at(101, 1));
    assert_eq!(minutes(&history), [101]);
}

#[test]
fn a_clock_that_is_set_back_leaves_no_points_of_the_future() {
    let mut history = UsageHistory::default();
    for minute in [100, 101, 102, 90, 91] {
        history.record(&at(minute, 1));
    }
    assert_eq!(minutes(&history), [90, 91]);
}

#[test]
fn the_number_of_pods_is_limited_and_those_that_were_first_stay() {
    let mut history = UsageHistory::default();
    let few = scene(equal(100, 3, 0));
    history.record(&few);
    let many = scene(equal(300, 3, 1));
    history.record(&many);
    let kept = |scene: &ClusterScene| {
        let pods = scene.view.nodes.iter().flat_map(|node| &node.gpus).flat_map(|gpu| &gpu.pods);
        let uids: BTreeSet<&str> = pods.map(|pod| pod.uid.as_str()).collect();
        (
            uids.len(),
            uids.into_iter().filter(|uid| history.of(uid).next().is_some()).count(),
        )
    };
    assert_eq!(kept(&few), (2400, 2400));
    assert_eq!(kept(&many), (7200, 4096));
}

proptest! {
    #[test]
    fn points_are_in_order_and_never_more_than_an_hour(minutes in proptest::collection::vec(0..300_u64, 1..150)) {
        let mut history = UsageHistory::default();
        for minute in &minutes {
            history.record(&at(*minute, 1));
        }
        let kept: Vec<u64> = history.of(UID).map(|point| point.minute).collect();
        prop_assert!(kept.windows(2).all(|pair| pair[0] < pair[1]));
        prop_assert_eq!(kept.last(), minutes.last());
        prop_assert!(kept.last().zip(kept.first()).is_some_and(|(last, first)| last - first < 60));
    }
}
