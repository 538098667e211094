//! The objects of the Helm chart, and the requests that its admission policies refuse.
//!
//! `deploy/divvy.yaml` contains the objects with default values, as rendered by Helm (`deploy/helm/render.sh --check` in
//! `.ci/run` checks this). Tests that need other values run Helm through [`with`]. They are skipped if Helm is not installed.

pub(crate) mod admission;
mod events;
mod objects;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::anyhow;
use serde_json::Value;

/// `deploy/divvy.yaml`, which contains the objects with default values.
pub(crate) const DEFAULT: &str = include_str!("../../../../deploy/divvy.yaml");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Parse the output of Helm, and keep its order.
pub(crate) fn parse(text: &str) -> Vec<Value> {
    let documents = text.split("---\n# Source: ").skip(1);
    documents
        .map(|document| serde_saphyr::from_str(&format!("# {document}")).expect("YAML"))
        .collect()
}

/// Return the objects with default values.
pub(crate) fn default_objects() -> Vec<Value> {
    parse(DEFAULT)
}

/// Return the path of Helm: `$HELM`, else `target/helm-v3.19.0/helm`, else `helm` from the PATH. If there is none, record the
/// skip and return `None`.
#[track_caller]
fn helm() -> Option<PathBuf> {
    let chosen = std::env::var_os("HELM").filter(|path| !path.is_empty()).map(PathBuf::from);
    let built = root().join("target/helm-v3.19.0/helm");
    let found = chosen
        .into_iter()
        .chain([built, PathBuf::from("helm")])
        .find(|program| Command::new(program).arg("version").output().is_ok());
    if found.is_none() {
        divvy_skip::skipped(
            "Helm is neither $HELM nor in target/helm-v3.19.0 nor on the PATH; build it: e2e/build.sh helm, or \
             GOBIN=$PWD/target/helm-v3.19.0 go install helm.sh/helm/v3/cmd/helm@v3.19.0",
        );
    }
    found
}

/// Render the chart with these values, and return the text or Helm's error. Later values override earlier ones. If Helm is not
/// installed, record the skip and return `None`.
#[track_caller]
fn render(chosen: &[Value]) -> Option<anyhow::Result<String>> {
    let helm = helm()?;
    let directory = tempfile::tempdir().expect("a directory");
    let mut command = Command::new(&helm);
    command.arg("template").arg("divvy").arg(root().join("deploy/helm/divvy"));
    // Without the pod of `helm test`, as in deploy/divvy.yaml.
    command.args(["--skip-tests", "--namespace", "divvy-system", "--kube-version", "1.36.0"]);
    for (number, values) in chosen.iter().enumerate() {
        // JSON is YAML, too.
        let file = directory.path().join(format!("{number}.yaml"));
        std::fs::write(&file, values.to_string()).expect("written");
        command.arg("--values").arg(file);
    }
    let output = command.output().unwrap_or_else(|error| panic!("{}: {error}", helm.display()));
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Some(if output.status.success() {
        Ok(text(output.stdout))
    } else {
        Err(anyhow!(text(output.stderr)))
    })
}

/// Render the chart with these values, and return the text. If Helm is not installed, record the skip and return `None`.
#[track_caller]
pub(crate) fn with(chosen: &[Value]) -> Option<String> {
    render(chosen).map(|rendered| rendered.unwrap_or_else(|error| panic!("{chosen:?}: {error}")))
}

/// Return the error with which Helm refuses these values. If Helm is not installed, record the skip and return `None`.
#[track_caller]
fn refusal(chosen: &[Value]) -> Option<String> {
    render(chosen).map(|rendered| rendered.map_or_else(|error| error.to_string(), |_| panic!("{chosen:?} are not refused")))
}
