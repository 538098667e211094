//! The manifests in `examples/`, which users copy. The chart's policies admit them, and their pods get GPUs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use divvy_agent::MigStrategyArg;
use divvy_agent::labels::plain_labels;
use divvy_labels::{LabeledGpu, LabeledMachine};
use divvy_model::{MiB, MigDevice, MigParts};
use divvy_testbed::api::PatchKind;
use serde_json::{Value, json};

use crate::bed::Bed;
use crate::chart::admission::Policy;
use crate::chart::default_objects;

/// Return the objects of all files in `examples/`, by file name.
fn examples() -> Vec<(String, Value)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("the directory") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if name.ends_with(".yaml") {
            let text = fs::read_to_string(&path).expect("readable");
            for object in serde_saphyr::from_multiple::<Value>(&text).expect("YAML") {
                found.push((name.clone(), object));
            }
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

/// Return the pods that an object creates. They are made from the pod templates, because the only controller of the embedded
/// cluster is the one for Deployments.
fn pods(file: &str, object: &Value) -> Vec<Value> {
    let spec = &object["spec"];
    let (count, template) = match object["kind"].as_str() {
        Some("Pod") => return vec![object.clone()],
        Some("Deployment" | "StatefulSet") => (spec["replicas"].as_u64().unwrap_or(1), &spec["template"]),
        Some("Job") => (spec["parallelism"].as_u64().unwrap_or(1), &spec["template"]),
        // The pod of the CronJob requests no GPU: it runs `divvy smoke`, which creates the pods that do.
        Some("Service" | "CronJob" | "Namespace" | "ServiceAccount" | "Role" | "RoleBinding" | "ClusterRoleBinding") => {
            return Vec::new();
        }
        other => panic!("{file} has an object of the kind {other:?}; say here which pods it stands for"),
    };
    let name = object["metadata"]["name"].as_str().expect("a name");
    (0..count)
        .map(|number| {
            let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]});
            pod["metadata"]["name"] = format!("{name}-{number}").into();
            pod
        })
        .collect()
}

/// The labels of a node for which the examples are written. MIG devices are those of one of its GPUs.
fn labels_of_node() -> BTreeMap<String, String> {
    let gpu = |mig_devices: Vec<MigDevice>| LabeledGpu {
        model: "NVIDIA A100-SXM4-80GB".to_owned(),
        memory: MiB(81920),
        mig: Some(!mig_devices.is_empty()),
        mig_devices,
        ..LabeledGpu::default()
    };
    let parts = MigParts {
        gi_profile: Some(0),
        gi_slices: 1,
        ci_slices: 1,
        memory: 9728,
        ..MigParts::default()
    };
    let device = MigDevice {
        parts: Some(parts),
        ..MigDevice::default()
    };
    let machine = LabeledMachine {
        driver: "550.54.15".to_owned(),
        gpus: vec![gpu(Vec::new()), gpu(vec![device])],
        ..LabeledMachine::default()
    };
    let mut labels = plain_labels(&machine, MigStrategyArg::Mixed).expect("labels").labels;
    labels.insert("accelerator".to_owned(), "nvidia-a100".to_owned());
    labels
}

#[test]
fn the_examples_select_labels_that_divvy_writes() {
    let labels = labels_of_node();
    let mut selected = 0;
    for (file, object) in examples() {
        for pod in pods(&file, &object) {
            for (key, value) in pod["spec"]["nodeSelector"].as_object().into_iter().flatten() {
                assert_eq!(labels.get(key).map(String::as_str), value.as_str(), "{file}: {key}");
                selected += 1;
            }
            let terms =
                &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
            for term in terms.as_array().into_iter().flatten() {
                let key = term["matchExpressions"][0]["key"].as_str().expect("a key");
                assert!(labels.contains_key(key), "{file}: {key}");
                selected += 1;
            }
        }
    }
    assert_eq!(selected, 4);
}

/// Report whether a pod requests MIG devices, which the agents of the embedded cluster do not offer.
fn is_for_mig(pod: &Value) -> bool {
    pod["spec"]["containers"].to_string().contains("nvidia.com/mig-")
}

#[test]
fn the_admission_policies_admit_each_example() {
    let examples = examples();
    assert!(examples.len() >= 8, "{examples:?}");
    let policies = ["divvy-request", "divvy-allocation"].map(Policy::of_chart);
    for (file, object) in &examples {
        for pod in pods(file, object) {
            for policy in &policies {
                let refused = policy.refusals(&pod, &Value::Null, "jane");
                assert!(refused.is_empty(), "{file}: {refused:?}");
            }
        }
    }
}

#[test]
fn pods_that_try_gpus_have_a_class_that_preempts_no_others() {
    let class = default_objects()
        .into_iter()
        .find(|object| object["kind"] == "PriorityClass")
        .expect("the class");
    assert_eq!(
        (&class["preemptionPolicy"], &class["globalDefault"], &class["value"]),
        (&json!("Never"), &json!(false), &json!(-1000))
    );
    let specs: Vec<Value> = examples()
        .into_iter()
        .filter(|(file, _)| file.starts_with("smoke"))
        .filter_map(|(_, object)| match object["kind"].as_str() {
            Some("Job") => Some(object["spec"]["template"]["spec"].clone()),
            Some("CronJob") => Some(object["spec"]["jobTemplate"]["spec"]["template"]["spec"].clone()),
            _ => None,
        })
        .collect();
    assert_eq!(specs.len(), 2);
    for spec in specs {
        assert_eq!(spec["priorityClassName"], class["metadata"]["name"], "{spec}");
    }
}

#[tokio::test]
async fn each_example_gets_its_gpus() {
    let mut bed = Bed::with_others(&[&[40, 40], &[40, 40]], 2, 1).await;
    bed.offer_whole().await;
    bed.configure_nodes(json!({"shares": {"intel-shares": true}})).await;
    // As the chart does.
    let class = json!({"metadata": {"name": "divvy-smoke"}, "value": -1000, "preemptionPolicy": "Never"});
    bed.api().create("priorityclasses.scheduling.k8s.io", class).expect("created");
    for node in bed.api().list("nodes", "").expect("listed") {
        let name = &node["metadata"]["name"];
        let mut labels = labels_of_node();
        labels.insert("nvidia.com/device-plugin.config".to_owned(), "shares".to_owned());
        let labels = json!({"metadata": {"labels": labels}});
        let labelled = bed
            .api()
            .patch("nodes", "", name.as_str().expect("a name"), PatchKind::Merge, &labels);
        labelled.expect("labelled");
    }
    for (file, object) in examples() {
        let mut pods = pods(&file, &object);
        pods.retain(|pod| !is_for_mig(pod));
        let names: Vec<String> = pods
            .iter()
            .map(|pod| pod["metadata"]["name"].as_str().expect("a name").to_owned())
            .collect();
        for pod in pods {
            bed.create_object(pod);
        }
        for name in &names {
            bed.bound(name).await;
            assert!(bed.allocation(name).is_some(), "{file}: {name}");
        }
        for name in &names {
            bed.force_delete(name);
            bed.gone(name).await;
        }
    }
}
