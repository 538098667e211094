//! Bad input from other programs and from users. Divvy loses nothing, and reports the problem.

use divvy_model::names;
use divvy_testbed::builders::pod;
use divvy_testbed::scenario::{Cluster as _, machines};
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use crate::cluster::{Quiet, cluster, play};

const LAPTOP: &str = "archlinux";

#[tokio::test]
async fn an_agent_over_corrupt_checkpoint_and_records_loses_nothing() {
    let mut cluster = cluster(divvy_testbed::scenario::BUILT_IN).await;
    cluster.join(LAPTOP).await.expect("joined");
    let mut quiet = Quiet::default();
    let mut story = play(&mut cluster, &mut quiet);
    story.all_offered().await.expect("offered");
    story.create(&pod("first").gpu_mem(3), "").await.expect("created");
    let (first, before) = story.started("default", "first").await.expect("started");
    let paths = story.cluster.node(LAPTOP).expect("joined").paths();
    let state = paths.root.join("state/grants");

    story.cluster.kill_agent(LAPTOP).await.expect("killed");
    std::fs::write(paths.checkpoint(), "{\"Data\":{\"PodDeviceEntries\":[{\"PodUID\":7}]").expect("written");
    std::fs::write(state.join("garbage.json"), "\u{0}\u{1}not a record").expect("written");
    story
        .eventually("the kubelet to notice", async |play| {
            let node = divvy_kube::list::node(&play.cluster.client(), LAPTOP).await;
            let units = node.map(|node| node.allocatable_units).unwrap_or(u64::MAX);
            Ok(if units == 0 { Ok(()) } else { Err(format!("{units} units")) })
        })
        .await
        .expect("nothing is allocatable without a plugin");
    story.cluster.start_agent(LAPTOP).await.expect("started");
    story.all_offered().await.expect("offered again");
    story
        .create(&pod("second").gpu_mem(13), "asks for all the rest")
        .await
        .expect("created");
    story
        .started("default", "second")
        .await
        .expect("the kubelet writes its checkpoint again, and the pod starts");
    let uid = first.metadata.uid.expect("a uid");
    let after = story.cluster.report(&uid, "main").await.expect("reported");
    assert_eq!(after.as_ref(), before.first(), "the first pod was left alone");
    story.create(&pod("third").gpu_mem(1), "").await.expect("created");
    story
        .eventually("the first pod's grant to be counted still", async |play| {
            let pod = play.get("default", "third").await?;
            let seen = format!("{:?}", pod.status.map(|status| status.conditions));
            Ok(if seen.contains("Insufficient aliyun.com/gpu-mem") {
                Ok(())
            } else {
                Err(seen)
            })
        })
        .await
        .expect("no room");
    cluster.shutdown().await;
}

#[tokio::test]
async fn a_garbled_or_removed_inventory_is_written_again() {
    let mut cluster = cluster(divvy_testbed::scenario::BUILT_IN).await;
    cluster.join(LAPTOP).await.expect("joined");
    let mut quiet = Quiet::default();
    let story = play(&mut cluster, &mut quiet);
    story.all_offered().await.expect("offered");
    let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(story.cluster.client());
    for value in [json!("garbage"), json!("{\"v\":1,\"gpus\":[]}"), json!(null)] {
        let patch = json!({"metadata": {"annotations": {names::INVENTORY: value}}});
        nodes
            .patch(LAPTOP, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .expect("patched");
        story.all_offered().await.expect("written again");
    }
    cluster.shutdown().await;
}

#[tokio::test]
async fn binding_replaces_a_forged_allocation_on_a_pod() {
    let mut cluster = cluster(divvy_testbed::scenario::BUILT_IN).await;
    cluster.join("mixed").await.expect("joined");
    let uuid = machines().node("mixed").expect("built in").gpu_uuid(2);
    let forged = format!("{{\"v\":1,\"gpus\":[{{\"uuid\":\"{uuid}\",\"memMiB\":15360}}],\"containers\":{{}}}}");
    let mut quiet = Quiet::default();
    let mut story = play(&mut cluster, &mut quiet);
    story.all_offered().await.expect("offered");
    let garbage = [
        "x",
        "{\"v\":9}",
        "{\"v\":1,\"gpus\":[{\"uuid\":\"a\",\"memMiB\":18446744073709551616}],\"containers\":{}}",
        &forged,
    ];
    for (index, text) in garbage.iter().enumerate() {
        let name = format!("forger-{index}");
        let manifest = pod(&name)
            .gpu_mem(10)
            .annotation(names::ALLOCATION, text)
            .annotation(names::ALIYUN_IDX, "99999999999");
        story.create(&manifest, "").await.expect("created");
        let (bound, reports) = story.started("default", &name).await.expect("started");
        let pod = divvy_kube::convert::pod(&bound).expect("readable");
        let divvy_model::Held::Allocation(allocation) = pod.held else {
            panic!("{:?}", pod.held)
        };
        assert_eq!(allocation.gpus.len(), 1);
        assert_eq!(allocation.gpus[0].memory.0, 10240, "what it asked for, not what it claimed");
        assert_eq!(reports[0].env[names::ALIYUN_CONTAINER], "10");
    }
    cluster.shutdown().await;
}

#[tokio::test]
async fn a_pod_with_uncountable_requests_is_refused_in_words() {
    let mut cluster = cluster(divvy_testbed::scenario::BUILT_IN).await;
    cluster.join(LAPTOP).await.expect("joined");
    for limit in ["9223372036854775807", "3 GiB", "-1"] {
        let body = json!({
            "Pod": {"metadata": {"name": "p", "namespace": "default", "uid": "u"}, "spec": {"containers": [
                {"name": "a", "resources": {"limits": {names::GPU_MEM: limit}}},
                {"name": "b", "resources": {"limits": {names::GPU_MEM: "9223372036854775807"}}}]}},
            "NodeNames": [LAPTOP]
        });
        let (status, answer) = cluster
            .ask_extender("POST", "/gpushare-scheduler/filter", &body.to_string())
            .await
            .expect("answered");
        assert_eq!(status, 200);
        let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
        let none = answer["NodeNames"].as_array().is_none_or(Vec::is_empty);
        let said = !answer["Error"].as_str().unwrap_or("").is_empty()
            || !answer["FailedNodes"][LAPTOP].as_str().unwrap_or("").is_empty();
        assert!(none && said, "{limit}: {answer}");
    }
    for body in ["", "{", "[]", "null", "\u{0}", "{\"Pod\": 7}", "{\"PodName\": [1]}"] {
        for verb in ["filter", "bind"] {
            let (status, answer) = cluster
                .ask_extender("POST", &format!("/gpushare-scheduler/{verb}"), body)
                .await
                .expect("answered");
            assert_eq!(status, 200, "{verb} {body:?}");
            let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
            assert!(
                !answer["Error"].as_str().unwrap_or("").is_empty(),
                "{verb} {body:?}: {answer}"
            );
        }
    }
    cluster.shutdown().await;
}
