//! The manifests in `examples/`, which users copy. The chart's policies admit them, and their pods get GPUs.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::bed::Bed;
use crate::chart::admission::Policy;

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
        Some("Service") => return Vec::new(),
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

#[tokio::test]
async fn each_example_gets_its_gpus() {
    let mut bed = Bed::with_amd(&[&[40, 40], &[40, 40]], 2).await;
    bed.offer_whole().await;
    for (file, object) in examples() {
        let pods = pods(&file, &object);
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
