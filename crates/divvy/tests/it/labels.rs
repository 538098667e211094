//! `divvy labels` with a simulated driver.

use std::process::Output;

use divvy_testbed::api::{ApiServer, ApiServerOptions, Listening, PatchKind, Right};
use serde_json::{Value, json};

use crate::cli::{beside, divvy, stderr, stdout};
use crate::cluster::programs;

const MACHINE: &str = "v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"550.54.15\"\n\
    [[node.gpu]]\nmodel = \"NVIDIA T4\"\nmemory_mib = 15360\nuuid = \"GPU-a\"\n\
    [[node.gpu]]\nmodel = \"NVIDIA T4\"\nmemory_mib = 15360\nuuid = \"GPU-b\"\n";

struct Machine {
    directory: tempfile::TempDir,
    library: String,
}

impl Machine {
    fn new() -> Machine {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("machine.toml"), MACHINE).expect("written");
        let library = programs().nvml_sim.display().to_string();
        Machine { directory, library }
    }

    fn file(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// Run `divvy labels`. The kubeconfig, if there is one, is that of the cluster.
    async fn labels(&self, args: &[&str]) -> Output {
        let args = [&["labels", "--nvml-library", &self.library], args].concat();
        let (machine, kubeconfig) = (self.file("machine.toml"), self.file("kubeconfig"));
        beside(&args, &[("DIVVY_NVML_SIM", &machine), ("KUBECONFIG", &kubeconfig)]).await
    }

    /// Start an API server with the node `n1`, and let its user write the kubeconfig.
    async fn cluster(&self, user: &str) -> (ApiServer, Listening) {
        let api = ApiServer::new(ApiServerOptions::default());
        let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("listening");
        std::fs::write(self.file("kubeconfig"), api.kubeconfig_for(listening.addr(), user)).expect("written");
        let labels = json!({"kubernetes.io/os": "linux", "nvidia.com/gpu.count": "9"});
        api.create("nodes", json!({"metadata": {"name": "n1", "labels": labels}}))
            .expect("created");
        (api, listening)
    }
}

fn on_node(api: &ApiServer) -> Value {
    api.get("nodes", "", "n1").expect("there")["metadata"]["labels"].clone()
}

#[tokio::test]
async fn the_labels_are_lines_or_an_object() {
    let machine = Machine::new();
    let (lines, object) = (machine.labels(&[]).await, machine.labels(&["-o", "json"]).await);
    assert!(lines.status.success(), "{}", stderr(&lines));
    let text = stdout(&lines);
    for line in [
        "nvidia.com/gpu.count=2\n",
        "nvidia.com/gpu.product=NVIDIA-T4\n",
        "nvidia.com/gpu.memory=15360\n",
        "nvidia.com/cuda.driver-version.full=550.54.15\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
    assert!(!text.contains("timestamp"), "two runs print the same: {text}");
    let object: Value = serde_json::from_str(&stdout(&object)).expect("JSON");
    let pairs = object.as_object().expect("an object").iter();
    let same: String = pairs
        .map(|(key, value)| format!("{key}={}\n", value.as_str().expect("text")))
        .collect();
    assert_eq!(same, text);
}

#[tokio::test]
async fn labels_are_written_once_and_those_of_others_stay() {
    let machine = Machine::new();
    let (api, _listening) = machine.cluster("ann").await;
    let output = machine.labels(&["--apply", "--node", "n1"]).await;
    assert!(output.status.success(), "{}", stderr(&output));
    let expected = "warning: \"before-first-apply\" owns labels of node n1 with other values, and they stay as they are: nvidia.com/gpu.count. To have this \
                    program write them, remove them: kubectl label node n1 nvidia.com/gpu.count-\n";
    assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    let labels = on_node(&api);
    assert_eq!(
        (
            &labels["nvidia.com/gpu.count"],
            &labels["nvidia.com/gpu.product"],
            &labels["kubernetes.io/os"]
        ),
        (&json!("9"), &json!("NVIDIA-T4"), &json!("linux"))
    );

    let removed = json!({"metadata": {"labels": {"nvidia.com/gpu.count": null}}});
    api.patch("nodes", "", "n1", PatchKind::Merge, &removed).expect("patched");
    let output = machine.labels(&["--apply", "--node", "n1"]).await;
    assert_eq!(stderr(&output), "note: the labels of node n1 were written\n");
    assert_eq!(on_node(&api)["nvidia.com/gpu.count"], "2");
}

#[tokio::test]
async fn a_wrong_node_and_a_missing_right_are_told_with_what_to_type() {
    let machine = Machine::new();
    let (api, _listening) = machine.cluster("ann").await;
    let output = machine.labels(&["--apply", "--node", "n2"]).await;
    let expected = "node n2 does not exist, so no labels were written; to see the names of the nodes, type kubectl get nodes";
    assert!(
        !output.status.success() && stderr(&output).contains(expected),
        "{}",
        stderr(&output)
    );
    assert!(api.get("nodes", "", "n2").is_err(), "an apply would create it");
    assert_eq!(stdout(&output), "");

    api.rights().limit("ann");
    api.rights().grant("ann", Right::new(&["get"], "nodes"));
    let output = machine.labels(&["--apply", "--node", "n1"]).await;
    let text = stderr(&output);
    for part in ["cannot patch resource", "kubectl auth can-i patch nodes"] {
        assert!(!output.status.success() && text.contains(part), "{text}");
    }
}

#[test]
fn a_machine_without_a_driver_is_told_what_to_do() {
    let output = divvy(&["labels", "--nvml-library", "/nowhere/libnvidia-ml.so.1"], &[]);
    let text = stderr(&output);
    for part in [
        "so there are no labels",
        "check --nvml-library, which names /nowhere/",
        "type divvy doctor",
    ] {
        assert!(output.status.code() == Some(1) && text.contains(part), "{text}");
    }
    let output = divvy(&["labels", "--apply"], &[]);
    assert!(
        output.status.code() == Some(2) && stderr(&output).contains("--node <NAME>"),
        "{}",
        stderr(&output)
    );
}
