//! The labels of the agent's node.

use std::os::unix::fs::MetadataExt as _;
use std::time::Instant;

use divvy_agent::LabelsMode;
use divvy_model::MigParts;
use divvy_testbed::api::PatchKind;

use super::*;

impl Bed {
    async fn with_labels(gpus: &[u64], mode: LabelsMode) -> Bed {
        let mut bed = Bed::new(gpus).await;
        bed.ready_is(200, "ok").await;
        bed.stop_agent().await;
        bed.config.labels = mode;
        bed.start_agent();
        bed
    }

    fn labels(&self) -> Value {
        self.api.get("nodes", "", "n1").expect("there")["metadata"]["labels"].clone()
    }

    /// Wait until a label of the node has this value, or is missing.
    async fn label_is(&self, name: &str, value: Option<&str>) {
        let key = format!("nvidia.com/{name}");
        let look = |api: &ApiServer| {
            let node = api.get("nodes", "", "n1").ok()?;
            (node["metadata"]["labels"][&key].as_str() == value).then_some(())
        };
        let found = self.api.until(LIMIT, look).await;
        assert!(found.is_some(), "{key}={value:?} expected: {}", self.labels());
    }

    fn set_label(&self, name: &str, value: &Value) {
        let patch = json!({"metadata": {"labels": {format!("nvidia.com/{name}"): value}}});
        self.api.patch("nodes", "", "n1", PatchKind::Merge, &patch).expect("patched");
    }
}

#[tokio::test]
async fn labels_follow_the_gpus_and_stay_when_the_agent_ends() {
    let mut bed = Bed::with_labels(&[16384, 15109], LabelsMode::Node).await;
    for (name, value) in [
        ("gpu.count", "2"),
        ("gpu.product", "NVIDIA-T4"),
        ("gpu.memory", "16384"),
        ("cuda.driver-version.full", "550.54.15"),
        ("mig.capable", "false"),
    ] {
        bed.label_is(name, Some(value)).await;
    }
    bed.label_is("gfd.timestamp", None).await;
    bed.ready_is(200, "ok").await;

    bed.stop_agent().await;
    bed.label_is("gpu.count", Some("2")).await;

    bed.machine.send_modify(|machine| machine.gpus = Vec::new());
    bed.start_agent();
    bed.label_is("gpu.count", None).await;
    let left: Vec<String> = bed.labels().as_object().expect("a map").keys().cloned().collect();
    let ours = left.iter().filter(|key| key.starts_with("nvidia.com/"));
    assert_eq!(ours.collect::<Vec<_>>(), ["nvidia.com/vgpu.present"]);

    let device = |uuid: &str| MigDevice {
        uuid: uuid.to_owned(),
        parts: Some(MigParts {
            gi_profile: Some(0),
            gi_slices: 1,
            ci_slices: 1,
            memory: 4864,
            ..MigParts::default()
        }),
        ..MigDevice::default()
    };
    bed.machine.send_modify(|machine| {
        machine.gpus = vec![40960];
        machine.mig = Some(vec![device("MIG-1"), device("MIG-2")]);
    });
    bed.label_is("mig-1g.5gb.count", Some("2")).await;
    bed.label_is("mig.strategy", Some("mixed")).await;
}

#[tokio::test]
async fn a_label_of_another_manager_stays_until_it_is_removed() {
    let mut bed = Bed::with_labels(&[16384], LabelsMode::Node).await;
    bed.label_is("gpu.count", Some("1")).await;
    bed.stop_agent().await;
    bed.set_label("gpu.count", &json!("7"));
    bed.machine.send_modify(|machine| machine.gpus = vec![16384, 16384, 32768]);
    bed.start_agent();
    bed.label_is("gpu.memory", Some("32768")).await;
    bed.label_is("gpu.count", Some("7")).await;
    bed.ready_is(200, "ok").await;
    bed.set_label("gpu.count", &Value::Null);
    bed.label_is("gpu.count", Some("3")).await;
}

#[tokio::test]
async fn labels_are_written_only_when_they_change_or_disappear() {
    let bed = Bed::with_labels(&[16384], LabelsMode::Node).await;
    bed.label_is("gpu.count", Some("1")).await;
    bed.ready_is(200, "ok").await;
    // Before each write of labels the agent reads its node, and at no other time.
    let reads = Match::any().verb("get").resource("nodes").client("agent");
    let id = bed.api.faults().add(FaultRule::new(reads, Effect::Latency(Duration::ZERO)));
    bed.set_label("gpu.count", &Value::Null);
    bed.label_is("gpu.count", Some("1")).await;
    let before = bed.api.faults().fired(id);
    bed.machine.send_modify(|machine| machine.gpus = vec![16384, 16384]);
    bed.label_is("gpu.count", Some("2")).await;
    // No label depends on the health of a GPU. The agent gets many snapshots until the GPU has recovered.
    bed.machine.send_modify(|machine| machine.xids.push((0, 79)));
    bed.inventory(|inventory| inventory.gpus[0].health == divvy_model::Health::Failed)
        .await;
    bed.inventory(|inventory| inventory.gpus[0].health == divvy_model::Health::Ok)
        .await;
    assert_eq!(bed.api.faults().fired(id) - before, 1);
}

#[tokio::test]
async fn a_label_always_removed_causes_no_write_loop() {
    let bed = Bed::with_labels(&[16384], LabelsMode::Node).await;
    bed.label_is("gpu.count", Some("1")).await;
    bed.ready_is(200, "ok").await;
    let start = Instant::now();
    for pause in [0, 1, 3] {
        bed.set_label("gpu.count", &Value::Null);
        bed.label_is("gpu.count", Some("1")).await;
        assert!(start.elapsed() >= Duration::from_secs(pause), "{pause} s");
    }
}

#[tokio::test]
async fn a_failed_write_of_labels_is_told_and_tried_again() {
    let mut bed = Bed::with_labels(&[16384], LabelsMode::Off).await;
    bed.ready_is(200, "ok").await;
    bed.stop_agent().await;
    let reads = Match::any().verb("get").resource("nodes").client("agent");
    let refuse = Effect::Refuse(500);
    let id = bed.api.faults().add(FaultRule::new(reads, refuse));
    bed.config.labels = LabelsMode::Node;
    bed.start_agent();
    bed.ready_is(503, "labels").await;
    bed.api.faults().remove(id);
    bed.label_is("gpu.count", Some("1")).await;
    bed.ready_is(200, "ok").await;
}

#[tokio::test]
async fn labels_go_to_a_node_feature_object_instead() {
    let bed = Bed::with_labels(&[16384], LabelsMode::NodeFeature).await;
    let look = |api: &ApiServer| {
        let found = api
            .get("nodefeatures.nfd.k8s-sigs.io", "default", "nvidia-features-for-n1")
            .ok()?;
        (found["spec"]["labels"]["nvidia.com/gpu.count"] == "1").then_some(())
    };
    assert!(bed.api.until(LIMIT, look).await.is_some());
    bed.label_is("gpu.count", None).await;
    bed.ready_is(200, "ok").await;
}

/// Return the feature file of the agent's node.
fn feature_file(bed: &Bed) -> PathBuf {
    bed.config
        .sys_root
        .join("etc/kubernetes/node-feature-discovery/features.d/gfd")
}

/// Wait until the feature file has this line.
async fn file_says(bed: &Bed, line: &str) {
    let has = || {
        let text = std::fs::read_to_string(feature_file(bed)).unwrap_or_default();
        text.lines().any(|found| found == line).then_some(())
    };
    bed.eventually(line, has).await;
}

/// The labels survive a restart of the agent.
#[tokio::test]
async fn feature_file_labels_go_only_with_the_gpu() {
    let mut bed = Bed::with_labels(&[16384], LabelsMode::FeatureFile).await;
    file_says(&bed, "nvidia.com/gpu.count=1").await;
    bed.ready_is(200, "ok").await;
    bed.label_is("gpu.count", None).await;
    let inode = |bed: &Bed| std::fs::metadata(feature_file(bed)).expect("there").ino();
    let before = inode(&bed);
    bed.stop_agent().await;
    file_says(&bed, "nvidia.com/gpu.count=1").await;
    bed.start_agent();
    bed.ready_is(200, "ok").await;
    assert_eq!(inode(&bed), before, "the same labels are not written again");
    bed.machine.send_modify(|machine| machine.gpus.clear());
    let only = || {
        let text = std::fs::read_to_string(feature_file(&bed)).expect("there");
        (text == "nvidia.com/vgpu.present=false\n").then_some(())
    };
    bed.eventually("the GPU's labels go", only).await;
}

#[tokio::test]
async fn a_feature_file_removed_or_changed_is_written_again() {
    let bed = Bed::with_labels(&[16384], LabelsMode::FeatureFile).await;
    file_says(&bed, "nvidia.com/gpu.count=1").await;
    std::fs::remove_file(feature_file(&bed)).expect("removed");
    file_says(&bed, "nvidia.com/gpu.count=1").await;
    std::fs::write(feature_file(&bed), "nvidia.com/gpu.count=7\n").expect("written");
    file_says(&bed, "nvidia.com/gpu.count=1").await;
}

#[tokio::test]
async fn an_unwritable_feature_file_is_told_and_tried_again() {
    let mut bed = Bed::with_labels(&[16384], LabelsMode::Off).await;
    bed.ready_is(200, "ok").await;
    bed.stop_agent().await;
    let in_the_way = bed.config.sys_root.join("etc/kubernetes");
    std::fs::create_dir_all(in_the_way.parent().expect("a directory")).expect("created");
    std::fs::write(&in_the_way, "").expect("written");
    bed.config.labels = LabelsMode::FeatureFile;
    bed.start_agent();
    bed.ready_is(503, "labels").await;
    std::fs::remove_file(&in_the_way).expect("removed");
    file_says(&bed, "nvidia.com/gpu.count=1").await;
    bed.ready_is(200, "ok").await;
}
