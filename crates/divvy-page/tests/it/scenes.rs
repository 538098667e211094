//! Scenes for tests.

use divvy_model::Health;
use divvy_model::usage::EscapeKind;
use divvy_page::{ClusterScene, MeasuredUsage};
use divvy_view_sim::{ClusterMoment, ViewSimNode, ViewSimShare, mixed};

pub(crate) const GIB: u64 = 1 << 30;

/// Return a scene of a made-up cluster.
pub(crate) fn scene(cluster: ClusterMoment) -> ClusterScene {
    let at = cluster.at;
    let answers = cluster.usage.into_iter();
    ClusterScene {
        at,
        view: cluster.view,
        answers: answers.map(|(node, usage)| (node, MeasuredUsage { at, usage })).collect(),
        waiting: cluster.waiting,
        ..ClusterScene::default()
    }
}

/// A scene with something of everything.
pub(crate) fn everything() -> ClusterScene {
    let mut scene = scene(mixed(3));
    scene.notices.push("You may not list pods in all namespaces.".to_owned());
    scene
}

/// A scene that fits into a snapshot: a shared GPU, a broken GPU, MIG devices, and a pod over its share.
pub(crate) fn small() -> ClusterScene {
    scene(ClusterMoment::of(
        &[
            ViewSimNode::new("gpu-a", "Tesla T4", 16, 2)
                .broken(1, Health::Failed, "XID 79")
                .held(0, 1024)
                .pod(ViewSimShare::new("ml", "train", 0, 8).uses(6 * 1024, 70))
                .pod(
                    ViewSimShare::new("vision", "tagger", 0, 4)
                        .uses(5 * 1024, 20)
                        .escapes(EscapeKind::Unguarded, 3),
                ),
            ViewSimNode::new("gpu-b", "NVIDIA H100", 80, 1)
                .divided(0, &[("3g.40gb", 40), ("3g.40gb", 40)])
                .pod(ViewSimShare::new("ml", "part", 1, 10).uses(1024, 5)),
            ViewSimNode::new("gpu-c", "NVIDIA L4", 24, 1)
                .not_asked()
                .pod(ViewSimShare::whole("ml", "all", 0)),
        ],
        0,
    ))
}
