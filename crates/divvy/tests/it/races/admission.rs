//! R1 to R4 (docs/compatibility/races.md): the order in which the kubelet admits pods, and how often it calls the plugin.

use std::time::Duration;

use divvy_testbed::builders::pod;
use divvy_testbed::node::AdmissionOrder;

use crate::bed::Bed;

/// Make nodes whose kubelets collect pods during a time window, and then admit them in random order.
async fn shuffled(nodes: &[&[u64]], window: u64) -> Bed {
    let window = Duration::from_millis(window);
    Bed::with(nodes, |spec| spec.admission = AdmissionOrder::Shuffled { window }).await
}

/// Report whether all device ids that the kubelet allocated to a pod belong to the pod's GPU. Correctness does not depend on
/// this, but it shows in which order pods were admitted.
fn steered_right(bed: &Bed, uid: &str, name: &str) -> bool {
    let gpu = bed.allocation(name).expect("an allocation").gpus[0].uuid.clone();
    let ids = bed.ids("n1", uid);
    assert!(!ids.is_empty(), "{name} has no ids");
    ids.values().flatten().all(|id| id.starts_with(&gpu))
}

#[tokio::test]
async fn r01_equal_pods_get_their_gpus_in_any_admission_order() {
    let bed = shuffled(&[&[4, 4]], 150).await;
    let (mut as_bound, mut swapped) = (0, 0);
    for round in 0..20 {
        let names = [format!("a-{round}"), format!("b-{round}")];
        let uids = names.each_ref().map(|name| bed.create(&pod(name).gpu_mem(3)));
        for name in &names {
            bed.running(name).await;
        }
        assert_ne!(bed.gpu_of(&names[0]), bed.gpu_of(&names[1]));
        let right = [0, 1].map(|i| steered_right(&bed, &uids[i], &names[i]));
        match right {
            [true, true] => as_bound += 1,
            [false, false] => swapped += 1,
            _ => panic!("one of two pods has the other's ids, and not the other way round"),
        }
        if as_bound > 0 && swapped > 0 {
            break;
        }
        for name in &names {
            bed.delete(name);
        }
        for name in &names {
            bed.gone(name).await;
        }
    }
    assert!(as_bound > 0 && swapped > 0, "both orders were played: {as_bound}, {swapped}");
    assert!(bed.refused_pods().is_empty() && bed.refused_starts("a-0").is_empty());
    bed.end().await;
}

#[tokio::test]
async fn r02_a_container_as_large_as_another_pod_takes_nothing_of_it() {
    let bed = shuffled(&[&[4, 4]], 150).await;
    for round in 0..3 {
        let [two, all_of_two, one] = ["two", "all-of-two", "one"].map(|name| format!("{name}-{round}"));
        // A pod with containers of 1 and 2 units, a pod of 2 units, and a pod of 1 unit.
        bed.create(&pod(&two).gpu_mem(1).container("second", 2));
        bed.create(&pod(&all_of_two).gpu_mem(2));
        bed.create(&pod(&one).gpu_mem(1));
        let containers = bed.running(&two).await;
        let sizes: Vec<&str> = containers
            .iter()
            .map(|view| view.env[divvy_model::names::ALIYUN_CONTAINER].as_str())
            .collect();
        assert_eq!(sizes, ["1", "2"]);
        assert_eq!(containers[0].devices, containers[1].devices, "one pod, one GPU");
        for name in [&all_of_two, &one] {
            bed.running(name).await;
        }
        assert_ne!(bed.gpu_of(&two), bed.gpu_of(&all_of_two));
        for name in [&two, &all_of_two, &one] {
            bed.delete(name);
        }
        for name in [&two, &all_of_two, &one] {
            bed.gone(name).await;
        }
    }
    assert!(bed.refused_pods().is_empty());
    bed.end().await;
}

/// The ids of the init container come back for the app container.
#[tokio::test]
async fn r03_reused_init_ids_leave_the_app_its_gpu() {
    // The sizes from the exhaustive model's scenarios: init 4 and app 1 with pods of 3 and 1; init 2 and app 2 with a pod of 2.
    for (gpus, init, app, others) in [([4, 4], 4, 1, &[3, 1][..]), ([2, 2], 2, 2, &[2][..])] {
        let bed = shuffled(&[&gpus], 150).await;
        let uid = bed.create(&pod("with-init").init("i", init).gpu_mem(app));
        for (i, units) in others.iter().enumerate() {
            bed.create(&pod(&format!("other-{i}")).gpu_mem(*units));
        }
        let main = bed.running("with-init").await.remove(0);
        let before = bed.container(&uid, "i").expect("the init container ran");
        assert_eq!(before.devices, main.devices);
        let ids = bed.ids("n1", &uid);
        assert!(
            ids["main"].is_subset(&ids["i"]),
            "the kubelet gave the same ids again: {ids:?}"
        );
        for i in 0..others.len() {
            bed.running(&format!("other-{i}")).await;
            assert_ne!(bed.gpu_of("with-init"), bed.gpu_of(&format!("other-{i}")));
        }
        assert!(bed.refused_pods().is_empty());
        bed.end().await;
    }
}

/// The pod is deleted between bind and Allocate.
#[tokio::test]
async fn r04_a_pod_deleted_before_allocate_takes_no_foreign_gpu() {
    let bed = shuffled(&[&[4, 4]], 1500).await;
    let deleted = bed.create(&pod("deleted").gpu_mem(3));
    bed.bound("deleted").await;
    bed.delete("deleted");
    let gpu = bed.gpu_of("deleted");
    let uid = bed.create(&pod("b").gpu_mem(3));
    bed.bound("b").await;
    assert!(bed.ids("n1", &deleted).is_empty(), "the kubelet has not looked yet");
    bed.running("b").await;
    assert_ne!(bed.gpu_of("b"), gpu, "the deleted pod had not ended when b was bound");
    assert!(
        steered_right(&bed, &uid, "b"),
        "the deleted pod is no candidate for ids either"
    );
    bed.gone("deleted").await;
    assert_eq!(bed.ever_ran(&deleted), 0);
    assert!(!bed.has_grant("n1", &deleted));
    bed.end().await;
}

#[tokio::test]
async fn r04_a_pod_deleted_between_allocate_and_start_leaves_nothing() {
    let bed = Bed::with(&[&[4]], |spec| spec.timings.container_start = Duration::from_millis(400)).await;
    let deleted = bed.create(&pod("deleted").gpu_mem(4));
    bed.admitted("n1", &deleted, 1).await;
    bed.delete("deleted");
    bed.create(&pod("b").gpu_mem(4));
    bed.running("b").await;
    assert_eq!(bed.ever_ran(&deleted), 0);
    bed.end().await;
}
