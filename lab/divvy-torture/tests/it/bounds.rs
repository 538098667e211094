//! What the agent keeps about a pod of its node is bounded, whatever the pod's annotations contain. The agent's memory limit is 64 MiB, and a
//! pod's annotations may have 256 KiB.

use divvy_kube::convert::ReadPod;
use divvy_kube::objects::PodObject;
use divvy_model::MiB;
use divvy_testkit::nodes::t4;
use divvy_torture::agent::{AgentRun, Disk, Sight};
use serde_json::json;

#[test]
fn pods_with_long_annotations_do_not_make_the_agent_grow() {
    let long = "a,".repeat(125_000);
    for key in [
        "divvy.dev/gpu-model",
        "divvy.dev/gpu-uuid",
        "divvy.dev/allocation",
        "scheduler.framework.gpushare.allocation",
        "ALIYUN_COM_GPU_MEM_IDX",
    ] {
        let sight = Sight {
            gpus: &[t4("GPU-0".to_owned(), 0, 16384)],
            handouts: &[],
            populated: None,
        };
        let mut core = AgentRun::new("n1", 1, MiB::ZERO, false, &Disk::default(), sight).core;
        let before = format!("{core:?}").len();
        for number in 0..12 {
            let object = json!({
                "metadata": {"name": format!("p{number}"), "namespace": "default", "uid": format!("u{number}"), "annotations": {key: long}},
                "spec": {"nodeName": "n1", "containers": [{"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": "1"}},
                    "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": long}]}]}
            });
            let object: PodObject = serde_json::from_value(object).expect("a pod");
            let (pod, trouble) = ReadPod::from(object).into_parts();
            assert_eq!(trouble, None);
            let actions = core.apply_pod(pod);
            assert!(format!("{actions:?}").len() < 1_000);
        }
        let grown = format!("{core:?}").len() - before;
        assert!(grown < 12 * 2_500, "{key}: {grown} bytes");
    }
}
