//! Queries to container engines and runtimes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use divvy_doctor::Asked;
use divvy_doctor::facts::programs::{Docker, RuntimeOutcome, RuntimeTest, last_line};
use divvy_engines::NoText;
use divvy_oci::runtime::settings;
use serde_json::{Value, json};
use tokio::net::UnixStream;

use super::http;
use super::output::{output, too_long};

const DOCKER: &str = "/var/run/docker.sock";

/// Query Docker for its version and for the runtimes of its current configuration.
pub(super) async fn docker(limit: Duration) -> Asked<Docker> {
    if !Path::new(DOCKER).exists() {
        return Asked::Absent("no Docker runs here".to_owned());
    }
    let get = |path: &'static str| http::get(UnixStream::connect(DOCKER), "docker", path, limit);
    let (version, info) = tokio::join!(get("/version"), get("/info"));
    match version.and_then(|version| Ok(Docker::parse(&version, &info?)?)) {
        Ok(docker) => Asked::Answer(docker),
        Err(reason) => Asked::Failed(format!("{DOCKER}: {reason}")),
    }
}

/// Let `divvy-runtime` prepare a container that requests all GPUs. `/bin/true` replaces runc, so no container is created.
pub(super) async fn runtime_test(
    installed: &Option<String>,
    settings: &Result<Option<String>, NoText>,
    limit: Duration,
) -> Asked<RuntimeTest> {
    let beside = std::env::current_exe().map(|own| own.with_file_name("divvy-runtime"));
    let program = match beside {
        Ok(program) if program.is_file() => program,
        _ => match installed {
            Some(program) => PathBuf::from(program),
            None => return Asked::Absent("divvy-runtime is not installed here".to_owned()),
        },
    };
    let shown = program.display().to_string();
    let settings = match settings {
        Ok(text) => text.as_deref().unwrap_or_default(),
        Err(reason) => {
            return Asked::Failed(format!(
                "{shown} could not be tried: {} cannot be read: {reason}",
                settings::PATH
            ));
        }
    };
    match tokio::time::timeout(limit, prepared(&program, settings)).await {
        Ok(Ok(outcome)) => Asked::Answer(RuntimeTest { program: shown, outcome }),
        Ok(Err(error)) => Asked::Failed(format!("{shown} could not be tried: {error:#}")),
        Err(_) => Asked::Failed(too_long(&shown, limit)),
    }
}

async fn prepared(program: &Path, of_machine: &str) -> anyhow::Result<RuntimeOutcome> {
    let bundle = tempfile::Builder::new().prefix("divvy-doctor-").tempdir()?;
    let configuration = bundle.path().join("config.json");
    let container = json!({
        "ociVersion": "1.0.2",
        "process": {"args": ["true"], "cwd": "/", "env": ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all"]},
        "root": {"path": "rootfs"},
        "linux": {},
    });
    std::fs::write(&configuration, container.to_string())?;
    let settings = bundle.path().join("config.toml");
    std::fs::write(&settings, test_settings(of_machine)?)?;
    let mut command = tokio::process::Command::new(program);
    command
        .args(["create", "--bundle"])
        .arg(bundle.path())
        .arg("divvy-doctor")
        .env("NVIDIA_CTK_CONFIG_FILE_PATH", &settings);
    let output = output(command).await.context("it")?;
    if !output.status.success() {
        return Ok(RuntimeOutcome::Failed(last_line(&output.stderr)));
    }
    let container: Value = serde_json::from_slice(&std::fs::read(&configuration)?)?;
    let devices = container["linux"]["devices"].as_array().into_iter().flatten();
    let devices = devices.filter_map(|device| device["path"].as_str().map(str::to_owned));
    Ok(RuntimeOutcome::Devices(devices.collect()))
}

/// Return the machine's own settings with two changes that the test needs: another OCI runtime, and permission to request GPUs by
/// environment variable.
fn test_settings(of_machine: &str) -> anyhow::Result<String> {
    let nothing = ["/bin/true", "/usr/bin/true"]
        .into_iter()
        .find(|path| Path::new(path).exists())
        .context("there is no /bin/true")?;
    let mut table: toml::Table = of_machine.parse().with_context(|| settings::PATH.to_owned())?;
    table.insert(
        "accept-nvidia-visible-devices-envvar-when-unprivileged".to_owned(),
        true.into(),
    );
    let runtime = table
        .entry("nvidia-container-runtime")
        .or_insert_with(|| toml::Table::new().into());
    if let Some(runtime) = runtime.as_table_mut() {
        // The mode `divvy` reads the pod of the container, and the test container has no pod.
        if runtime.get("mode").and_then(toml::Value::as_str) == Some("divvy") {
            runtime.insert("mode".to_owned(), "auto".into());
        }
        runtime.insert("runtimes".to_owned(), toml::Value::Array(vec![nothing.into()]));
    }
    Ok(table.to_string())
}
