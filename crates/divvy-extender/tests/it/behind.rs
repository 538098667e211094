//! While a watch is broken, the extender's state is out of date.

use divvy_extender::core::ExtenderCore;
use divvy_kube::watch::WatchChange;
use divvy_model::Pod;

use crate::values::*;

/// Report whether kube-scheduler would try a pod again without an event, although there is no room for the pod.
fn tried_again(core: &mut ExtenderCore, large: &Pod, ms: u64) -> bool {
    match core.filter_at(large, ["n1"], at(ms)) {
        Ok(answer) => {
            assert_eq!(answer.passed, [] as [usize; 0]);
            false
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("was interrupted") && text.contains("node n1: "), "{text}");
            true
        }
    }
}

/// Refusals stay provisional until the watch resumes and has caught up, however long that takes.
#[test]
fn no_refusal_is_final_while_watches_are_broken() {
    let (large, small) = (pod("large", 16), pod("small", 2));
    for pods in [true, false] {
        let mut core = synced(&[node("n1", &[8])], &[]);
        assert!(!tried_again(&mut core, &large, 0));
        let cut = || "the connection was refused".to_owned();
        if pods {
            core.pod_change(WatchChange::Interrupted(cut()), at(1_000))
        } else {
            core.node_change(WatchChange::Interrupted(cut()), at(1_000))
        };
        // An outage of the API server, then the last wait of a back-off.
        for ms in [1_000, 46_500, 3_600_000] {
            assert!(tried_again(&mut core, &large, ms), "after {ms} ms");
        }
        let fits = core.filter_at(&small, ["n1"], at(3_600_000)).map(|answer| answer.passed);
        assert_eq!(fits, Ok(vec![0]), "there is room");
        if pods {
            core.pod_change(WatchChange::Resumed, at(3_600_000))
        } else {
            core.node_change(WatchChange::Resumed, at(3_600_000))
        };
        // The missed changes follow.
        assert!(tried_again(&mut core, &large, 3_600_900));
        assert!(!tried_again(&mut core, &large, 3_601_100));
    }
}

#[test]
fn a_list_is_up_to_date_at_once() {
    let large = pod("large", 16);
    let mut core = synced(&[node("n1", &[8])], &[]);
    core.pod_change(WatchChange::Interrupted("too old resource version".to_owned()), at(1_000));
    assert!(tried_again(&mut core, &large, 1_500));
    core.pod_change(WatchChange::Reset(Vec::new()), at(2_000));
    assert!(!tried_again(&mut core, &large, 2_000));
}
