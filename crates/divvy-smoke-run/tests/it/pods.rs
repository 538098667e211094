//! The pods' manifests, and what their objects say.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_smoke_run::{Mark, TestAsk, TestPodSettings, TestPodState};
use serde_json::{Value, json};

use crate::world::{planned, planned_with};

fn settings() -> TestPodSettings {
    TestPodSettings {
        run: divvy_model::TestRun::of(0x0123_abcd),
        namespace: "divvy-smoke".to_owned(),
        image: "divvy.dev/divvy:0.1.0".to_owned(),
        program_image: None,
        tolerations: json!([{"key": "nvidia.com/gpu", "operator": "Exists"}]),
        priority_class: None,
        timeout: Duration::from_secs(120),
        arguments: vec!["--isolation".to_owned()],
    }
}

#[test]
fn the_manifest_has_what_pod_security_demands() {
    let pod = settings().pod(3, &planned(1)[0].target, TestAsk::Units(2));
    insta::assert_snapshot!(serde_json::to_string_pretty(&pod).expect("JSON"));
    assert_eq!(pod["metadata"]["annotations"], json!({"divvy.dev/gpu-uuid": "GPU-0"}));
    let again = settings().pod(3, &planned_with(1, &[0].into())[0].target, TestAsk::Units(2));
    assert_eq!(
        again["metadata"]["annotations"],
        json!({"divvy.dev/gpu-uuid": "GPU-0", "divvy.dev/gpu-test": "0123abcd"})
    );
    let opened = Mark::Testing.patch("GPU-0", settings().run.as_str());
    assert_eq!(
        opened["metadata"]["annotations"],
        json!({"under-test.divvy.dev/GPU-0": "0123abcd"}),
        "the GPU is open to this pod"
    );
    let with_class = TestPodSettings {
        priority_class: Some("divvy-smoke".to_owned()),
        ..settings()
    };
    let pod = with_class.pod(3, &planned(1)[0].target, TestAsk::Units(2));
    assert_eq!(pod["spec"]["priorityClassName"], "divvy-smoke");
    let kind = divvy_model::WholeKind::of_resource("nvidia.com/mig-1g.10gb").expect("a kind");
    let whole = settings().pod(0, &planned(1)[0].target, TestAsk::Whole(kind));
    assert_eq!(
        whole["spec"]["containers"][0]["resources"]["limits"],
        json!({"nvidia.com/mig-1g.10gb": "1"})
    );
}

#[test]
fn a_foreign_image_gets_the_program_from_divvys_image() {
    let settings = TestPodSettings {
        image: "registry.example/training:7".to_owned(),
        program_image: Some("divvy.dev/divvy:0.1.0".to_owned()),
        ..settings()
    };
    let pod = settings.pod(0, &planned(1)[0].target, TestAsk::Units(1));
    let parts = ["initContainers", "containers", "volumes"].map(|part| (part, &pod["spec"][part]));
    insta::assert_snapshot!(serde_json::to_string_pretty(&BTreeMap::from(parts)).expect("JSON"));
}

#[test]
fn a_pod_belongs_to_the_run_in_its_name() {
    let settings = settings();
    assert_eq!(settings.number(&settings.name(7)), Some(7));
    for other in [
        "divvy-smoke-0123abcd",
        "divvy-smoke-0123abcd-x",
        "divvy-smoke-ffff-7",
        "0123abcd-7",
        "divvy-smoke-0123abcd7",
    ] {
        assert_eq!(settings.number(other), None, "{other}");
    }
}

#[test]
fn an_object_says_how_far_the_test_is() {
    let container = |state: Value| json!([{"name": "smoke", "state": state}]);
    let unscheduled = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}]);
    let waits = |reason: &str| container(json!({"waiting": {"reason": reason, "message": "no such host"}}));
    let over = |exit: i64, reason: &str| container(json!({"terminated": {"exitCode": exit, "reason": reason, "message": "{}"}}));
    let table = [
        (json!({}), Value::Null, TestPodState::Unscheduled(None)),
        (
            json!({}),
            json!({"conditions": unscheduled}),
            TestPodState::Unscheduled(Some("0/2 nodes".to_owned())),
        ),
        (
            json!({"nodeName": "n1"}),
            json!({"phase": "Pending"}),
            TestPodState::Starting(None),
        ),
        (
            json!({"nodeName": "n1"}),
            json!({"containerStatuses": waits("ContainerCreating")}),
            TestPodState::Starting(None),
        ),
        (
            json!({"nodeName": "n1"}),
            json!({"containerStatuses": waits("ErrImagePull")}),
            TestPodState::Starting(Some("ErrImagePull: no such host".to_owned())),
        ),
        (
            json!({"nodeName": "n1"}),
            json!({"containerStatuses": container(json!({"running": {}}))}),
            TestPodState::Running,
        ),
        (
            json!({"nodeName": "n1"}),
            json!({"initContainerStatuses": waits("ErrImagePull"), "containerStatuses": waits("PodInitializing")}),
            TestPodState::Starting(Some("ErrImagePull: no such host".to_owned())),
        ),
        (
            json!({"nodeName": "n1"}),
            json!({"initContainerStatuses": over(0, "Completed"), "containerStatuses": waits("ErrImagePull")}),
            TestPodState::Starting(Some("ErrImagePull: no such host".to_owned())),
        ),
        (
            json!({"nodeName": "n1"}),
            json!({"phase": "Failed", "initContainerStatuses": over(1, "Error"), "containerStatuses": waits("PodInitializing")}),
            TestPodState::Ended {
                status: None,
                reason: Some("the program could not be copied from Divvy's image: Error: {}".to_owned()),
                message: None,
            },
        ),
        (
            json!({"nodeName": "n1"}),
            json!({"phase": "Running", "containerStatuses": over(2, "Error")}),
            TestPodState::Ended {
                status: Some(2),
                reason: None,
                message: Some("{}".to_owned()),
            },
        ),
        (
            json!({"nodeName": "n1"}),
            json!({"phase": "Failed", "containerStatuses": over(137, "OOMKilled")}),
            TestPodState::Ended {
                status: Some(137),
                reason: Some("OOMKilled".to_owned()),
                message: Some("{}".to_owned()),
            },
        ),
        (
            json!({"nodeName": "n1"}),
            json!({"phase": "Failed", "reason": "DeadlineExceeded", "message": "Pod was active too long"}),
            TestPodState::Ended {
                status: None,
                reason: Some("DeadlineExceeded: Pod was active too long".to_owned()),
                message: None,
            },
        ),
    ];
    for (spec, status, expected) in table {
        assert_eq!(TestPodState::of(&json!({"spec": spec, "status": status})), expected);
    }
}
