//! What each pod used in the last hour.

use std::collections::{BTreeMap, VecDeque};

use divvy_view::amounts;

use crate::ClusterScene;

/// The number of minutes that are kept.
const MINUTES: usize = 60;
/// The maximum number of pods of which a history is kept: 4,096 with 60 points each take 10 MiB.
const PODS: usize = 4096;

/// The last hour of each pod, by UID: one point for each minute in which the pod's node was measured. The number of pods is limited; further pods have no
/// history until others end.
#[derive(Debug, Clone, Default)]
pub struct UsageHistory {
    pods: BTreeMap<String, VecDeque<Point>>,
}

/// What a pod used in one minute, on all its GPUs together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    /// The minute: seconds since 1970 divided by 60.
    pub minute: u64,
    /// The memory in use, in bytes. `None` if it was not measured.
    pub used: Option<u64>,
    /// Percent of the time in which the pod kept a GPU busy. `None` if it was not measured.
    pub busy: Option<u32>,
}

impl UsageHistory {
    /// Add what a scene says of its minute. The last scene of a minute counts. Pods that have ended are forgotten.
    pub fn record(&mut self, scene: &ClusterScene) {
        let mut now: BTreeMap<&str, Option<Point>> = BTreeMap::new();
        for node in &scene.view.nodes {
            let answer = scene.answers.get(&node.name);
            let usage = answer.and_then(|answer| answer.usage.as_ref().ok());
            let minute = answer.map_or(scene.at, |answer| answer.at) / 60;
            for (gpu, pod) in node.gpus.iter().flat_map(|gpu| gpu.pods.iter().map(move |pod| (gpu, pod))) {
                let here = amounts::of_pod(node, gpu, pod, usage);
                let point = now.entry(&pod.uid).or_default();
                if here.used.is_none() && here.busy.is_none() {
                    continue;
                }
                let sum = point.get_or_insert(Point {
                    minute,
                    used: None,
                    busy: None,
                });
                sum.used = add(sum.used, here.used, u64::saturating_add);
                sum.busy = add(sum.busy, here.busy, u32::max);
            }
        }
        self.pods.retain(|uid, _| now.contains_key(uid.as_str()));
        for (uid, point) in now.into_iter().filter_map(|(uid, point)| Some((uid, point?))) {
            if let Some(points) = self.pods.get_mut(uid) {
                push(points, point);
            } else if self.pods.len() < PODS {
                self.pods.insert(uid.to_owned(), VecDeque::from([point]));
            }
        }
    }

    /// Return the points of a pod, the oldest first. There may be minutes without one.
    pub fn of(&self, uid: &str) -> impl Iterator<Item = &Point> {
        self.pods.get(uid).into_iter().flatten()
    }
}

fn add<T>(sum: Option<T>, more: Option<T>, join: fn(T, T) -> T) -> Option<T> {
    match (sum, more) {
        (Some(sum), Some(more)) => Some(join(sum, more)),
        (sum, more) => sum.or(more),
    }
}

fn push(points: &mut VecDeque<Point>, point: Point) {
    let newest = points.back().map(|last| last.minute);
    if newest == Some(point.minute) {
        points.pop_back();
    } else if newest.is_some_and(|newest| newest > point.minute) {
        // The clock was set back. What was measured under later times does not belong to this hour.
        points.retain(|earlier| earlier.minute < point.minute);
    }
    points.push_back(point);
    let oldest = point.minute.saturating_sub(MINUTES as u64 - 1);
    points.retain(|point| point.minute >= oldest);
}
