//! What people look at: Debian's Prometheus scrapes the agents and the extender, and each expression of the dashboards returns data.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use divvy_testbed::builders::pod;
use divvy_testbed::embedded::{Embedded, EmbeddedSettings};
use divvy_testbed::programs::GpuPrograms;
use divvy_testbed::scenario::{Cluster as _, Play, RunsGpuPrograms as _};
use serde_json::{Value, json};

use crate::cluster::{Quiet, programs};
use crate::demo::has_guard;

/// One shared GPU from Hopper on, so that there is everything that NVML measures.
const MACHINES: &str = "v = 1
[[node]]
name = \"n1\"
driver = \"580.159.03\"
[[node.gpu]]
model = \"NVIDIA H100 80GB HBM3\"
cc = \"9.0\"
memory_mib = 81559
";

/// How long Prometheus may take until an expression has data (a rate needs two scrapes, which come once a second), and agents until they have measured all.
const PATIENCE: Duration = Duration::from_secs(60);

/// Prometheus, which ends with this value.
struct Prometheus {
    child: Child,
    address: String,
    _directory: tempfile::TempDir,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    /// Start it with jobs: the name, the path, and the addresses. `None` if it is not installed.
    fn start(jobs: &[(&str, &str, Vec<String>)]) -> Option<Prometheus> {
        let directory = tempfile::tempdir().expect("a directory");
        let jobs: Vec<Value> = jobs
            .iter()
            .map(
                |(name, path, targets)| json!({"job_name": name, "metrics_path": path, "static_configs": [{"targets": targets}]}),
            )
            .collect();
        let config = json!({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs});
        let file = directory.path().join("prometheus.yml");
        // JSON is YAML, too.
        std::fs::write(&file, config.to_string()).expect("written");
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let address = format!("127.0.0.1:{}", port.expect("a port").port());
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", directory.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = match child {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                divvy_skip::skipped("prometheus is not installed");
                return None;
            }
            Err(error) => panic!("prometheus: {error}"),
        };
        Some(Prometheus {
            child,
            address,
            _directory: directory,
        })
    }

    /// Ask an expression. The error is what Prometheus says.
    fn ask(&self, expression: &str) -> anyhow::Result<Vec<Value>> {
        let output = Command::new("curl")
            .args(["-sS", "-G", "--max-time", "10", "--data-urlencode"])
            .arg(format!("query={expression}"))
            .arg(format!("http://{}/api/v1/query", self.address))
            .output()
            .expect("curl");
        let answer: Value = serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))?;
        match answer["status"].as_str() {
            Some("success") => Ok(answer["data"]["result"].as_array().cloned().unwrap_or_default()),
            _ => bail!(answer.to_string()),
        }
    }

    /// Wait until an expression returns data, and return the values.
    async fn data(&self, expression: &str) -> Vec<f64> {
        let began = Instant::now();
        loop {
            let said = self.ask(expression);
            match &said {
                Ok(samples) if !samples.is_empty() => {
                    let value = |sample: &Value| sample["value"][1].as_str().and_then(|text| text.parse().ok());
                    return samples.iter().filter_map(value).collect();
                }
                // It is still starting, or has not scraped often enough.
                Ok(_) | Err(_) if began.elapsed() < PATIENCE => tokio::time::sleep(Duration::from_millis(200)).await,
                other => panic!("{expression}: {other:?}"),
            }
        }
    }
}

/// Return the expressions of a dashboard as Grafana sends them, by the panel's title.
fn expressions(dashboard: &str) -> BTreeMap<String, Vec<String>> {
    let path = format!(
        "{}/../../deploy/helm/divvy/files/dashboards/{dashboard}.json",
        env!("CARGO_MANIFEST_DIR")
    );
    let text = std::fs::read_to_string(Path::new(&path)).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let mut all = BTreeMap::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        let targets = panel["targets"].as_array().expect("targets").iter();
        let filled = targets.map(|target| {
            let mut expression = target["expr"].as_str().expect("an expression").to_owned();
            for (variable, value) in [
                ("$__rate_interval", "10s"),
                ("$instance", ".*"),
                ("$namespace", ".*"),
                ("$pod", ".*"),
                ("$gpu", ".*"),
            ] {
                expression = expression.replace(variable, value);
            }
            assert!(!expression.contains('$'), "{expression}");
            expression
        });
        all.insert(panel["title"].as_str().expect("a title").to_owned(), filled.collect());
    }
    all
}

/// The expressions of the dashboard that NVIDIA publishes for dcgm-exporter (<https://grafana.com/grafana/dashboards/12239>), with all instances and GPUs.
const OF_NVIDIA: [&str; 8] = [
    "DCGM_FI_DEV_GPU_TEMP{instance=~\".*\", gpu=~\".*\"}",
    "avg(DCGM_FI_DEV_GPU_TEMP{instance=~\".*\", gpu=~\".*\"})",
    "DCGM_FI_DEV_POWER_USAGE{instance=~\".*\", gpu=~\".*\"}",
    "sum(DCGM_FI_DEV_POWER_USAGE{instance=~\".*\", gpu=~\".*\"})",
    "DCGM_FI_DEV_SM_CLOCK{instance=~\".*\", gpu=~\".*\"} * 1000000",
    "DCGM_FI_DEV_GPU_UTIL{instance=~\".*\", gpu=~\".*\"}",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{instance=~\".*\", gpu=~\".*\"}",
    "DCGM_FI_DEV_FB_USED{instance=~\".*\", gpu=~\".*\"}",
];

/// What has no data while nothing is wrong.
const OF_TROUBLE: [&str; 2] = ["XIDs", "Programs that do not keep to their share"];

/// The containers' memory adds up to the driver's.
#[tokio::test]
async fn each_expression_of_the_dashboards_has_data() {
    if !has_guard() {
        return;
    }
    let programs = programs();
    let settings = EmbeddedSettings {
        drivers: true,
        gpu_programs: Some(GpuPrograms::beside(&programs.divvy).expect("built")),
        ..EmbeddedSettings::new(MACHINES, programs)
    };
    let mut cluster = Embedded::start(settings).await.expect("the cluster comes up");
    cluster.join("n1").await.expect("joined");
    let mut quiet = Quiet::default();
    let mut play = Play::new(&mut cluster, &mut quiet, Duration::ZERO);
    let mut running = Vec::new();
    for (name, gib) in [("one", 4), ("two", 8)] {
        play.create(&pod(name).gpu_mem(gib), "asks for memory")
            .await
            .expect("created");
        let (object, _) = play.started("default", name).await.expect("it runs");
        let uid = object.metadata.uid.expect("a UID");
        let mut program = play
            .cluster
            .start_cuda_program(&uid, "main", "libcuda.so.1")
            .await
            .expect("it starts");
        program.ask("start").await.expect("a context");
        program.ask("allocate 1000").await.expect("memory");
        running.push(program);
    }
    play.create(&pod("waits").gpu_mem(70), "asks for more than is free")
        .await
        .expect("created");
    let refused = running[0].ask("allocate 10000").await.expect("an answer").refused;
    assert!(refused.is_some(), "{refused:?}");

    let agents: Vec<String> = cluster.metrics().map(|(_, address)| address.to_string()).collect();
    let extender = cluster.extender_url();
    let extender = extender
        .trim_start_matches("http://")
        .split('/')
        .next()
        .expect("an address")
        .to_owned();
    let jobs = [
        ("divvy-agent", "/metrics", agents.clone()),
        ("dcgm", "/metrics/dcgm", agents),
        ("divvy-extender", "/metrics", vec![extender]),
    ];
    let Some(prometheus) = Prometheus::start(&jobs) else { return };
    for dashboard in ["divvy-cluster", "divvy-pod"] {
        for (title, expressions) in expressions(dashboard) {
            for expression in expressions {
                if OF_TROUBLE.contains(&title.as_str()) {
                    drop(prometheus.ask(&expression).expect("understood"))
                } else {
                    drop(prometheus.data(&expression).await)
                }
            }
        }
    }
    for expression in OF_NVIDIA {
        prometheus.data(expression).await;
    }
    // Both programs have 1,000 MiB and a context each, and the driver takes nothing for itself.
    let mib = f64::from(1 << 20);
    let sum = prometheus.data("sum(divvy_container_gpu_memory_used_bytes)").await;
    let used = prometheus.data("sum(divvy_gpu_memory_used_bytes)").await;
    assert!(sum == used && sum[0] > 2000.0 * mib, "{sum:?} {used:?}");
    assert_eq!(
        prometheus.data("sum(divvy_container_gpu_memory_limit_bytes)").await,
        [12.0 * 1024.0 * mib]
    );
    assert_eq!(prometheus.data("sum(DCGM_FI_DEV_FB_USED)").await, [sum[0] / mib]);
    assert_eq!(
        prometheus
            .data("sum(divvy_container_gpu_denied_allocations_total{pod=\"one\"}) > 0")
            .await
            .len(),
        1
    );
    let refused = prometheus
        .data("sum(divvy_container_gpu_denied_bytes_total{pod=\"one\"})")
        .await;
    assert!(refused[0] >= 10000.0 * mib, "{refused:?}");
    // The other pod's programs were refused nothing, and no launch has waited.
    for expression in [
        "sum(divvy_container_gpu_denied_bytes_total{pod=\"two\"})",
        "sum(divvy_container_gpu_throttled_seconds_total)",
    ] {
        assert_eq!(prometheus.data(expression).await, [0.0], "{expression}");
    }
    assert_eq!(prometheus.data("max(sum by (instance) (divvy_pods_waiting))").await, [1.0]);
    assert_eq!(prometheus.data("min(up)").await, [1.0]);
    drop(prometheus);
    for program in running {
        program.end().await.expect("ended");
    }
    cluster.shutdown().await;
}

/// The branches of the driver whose lists of processes, library functions, or both differ from those of the last one.
const DRIVERS: [&str; 5] = ["418.226.00", "450.248.02", "470.256.02", "525.147.05", "550.163.01"];

/// What `nvmlDeviceGetMemoryInfo_v2` says, which drivers have from 510 on.
const SINCE_510: &str = "DCGM_FI_DEV_FB_RESERVED";

/// The UUID of the GPU of a node.
fn uuid(index: usize) -> String {
    format!("GPU-0000000{index}-0000-4000-8000-000000000000")
}

/// Return the series of an agent, with their values where these do not depend on the time. Names that differ between nodes are replaced.
fn series(address: &str, path: &str, names: &[(String, &str)]) -> BTreeMap<String, String> {
    let output = Command::new("curl")
        .args(["-sSf", "--max-time", "10"])
        .arg(format!("http://{address}{path}"))
        .output()
        .expect("curl");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(series, value)| {
            let series = names
                .iter()
                .fold(series.to_owned(), |text, (from, to)| text.replace(from, to));
            let is_memory = ["memory", "_FB_", "escape"].iter().any(|part| series.contains(part));
            let depends_on_time = series.contains("seconds");
            (
                series,
                if is_memory && !depends_on_time {
                    value.to_owned()
                } else {
                    String::new()
                },
            )
        })
        .collect()
}

#[tokio::test]
async fn an_older_driver_changes_neither_metrics_nor_escapes() {
    if !has_guard() {
        return;
    }
    let programs = programs();
    let nodes = DRIVERS.iter().enumerate().map(|(index, driver)| {
        let gpu = format!(
            "model = \"Tesla T4\"\ncc = \"7.5\"\nmemory_mib = 15360\nuuid = \"{}\"\n",
            uuid(index)
        );
        format!("[[node]]\nname = \"n{index}\"\ndriver = \"{driver}\"\n[[node.gpu]]\n{gpu}")
    });
    let settings = EmbeddedSettings {
        drivers: true,
        gpu_programs: Some(GpuPrograms::beside(&programs.divvy).expect("built")),
        ..EmbeddedSettings::new(format!("v = 1\n{}", nodes.collect::<String>()), programs)
    };
    let mut cluster = Embedded::start(settings).await.expect("the cluster comes up");
    let mut quiet = Quiet::default();
    let mut running = Vec::new();
    for index in 0..DRIVERS.len() {
        let node = format!("n{index}");
        cluster.join(&node).await.expect("joined");
        let mut play = Play::new(&mut cluster, &mut quiet, Duration::ZERO);
        for (name, mib) in [("within", 1000), ("escaped", 3000)] {
            let name = format!("{name}-{index}");
            let share = pod(&name).gpu_mem(2).select(&node);
            play.create(&share, "asks for 2 GiB").await.expect("created");
            let (object, reports) = play.started("default", &name).await.expect("it runs");
            let mut mounts = reports.iter().flat_map(|report| &report.mounts);
            let library = if mib > 2048 {
                mounts
                    .find(|path| path.ends_with("/libcuda.so.real"))
                    .expect("the driver's own library")
            } else {
                "libcuda.so.1"
            };
            let uid = object.metadata.uid.expect("a UID");
            let mut program = play
                .cluster
                .start_cuda_program(&uid, "main", library)
                .await
                .expect("it starts");
            program.ask("start").await.expect("a context");
            let answer = program.ask(&format!("allocate {mib}")).await.expect("an answer");
            assert!(answer.refused.is_none(), "{name}: {answer:?}");
            running.push(program);
        }
    }
    let mut play = Play::new(&mut cluster, &mut quiet, Duration::ZERO);
    for index in 0..DRIVERS.len() {
        for reason in ["GuardAvoided", "GpuMemoryExceeded"] {
            play.event(&format!("escaped-{index}"), reason, "").await.expect("an event");
        }
    }
    let agents: BTreeMap<String, String> = cluster
        .metrics()
        .map(|(node, address)| (node.to_owned(), address.to_string()))
        .collect();
    for path in ["/metrics", "/metrics/dcgm"] {
        let of = |index: usize| {
            let names = [
                (uuid(index), "GPU"),
                (format!("\"n{index}\""), "\"NODE\""),
                (format!("-{index}\""), "-POD\""),
                (DRIVERS[index].to_owned(), "DRIVER"),
            ];
            series(&agents[&format!("n{index}")], path, &names)
        };
        for (index, driver) in DRIVERS.iter().enumerate() {
            // An agent may not have measured everything yet.
            let began = Instant::now();
            loop {
                let (found, mut newest) = (of(index), of(DRIVERS.len() - 1));
                assert!(newest.len() > 10, "{newest:?}");
                if driver.starts_with('4') {
                    newest.retain(|series, _| !series.starts_with(SINCE_510));
                }
                if found == newest {
                    break;
                }
                let only = |a: &BTreeMap<_, _>, b: &BTreeMap<_, _>| -> Vec<String> {
                    let only = a.iter().filter(|(series, value)| b.get(*series) != Some(*value));
                    only.map(|(series, value)| format!("{series} {value}")).collect()
                };
                let differ = (only(&found, &newest), only(&newest, &found));
                assert!(began.elapsed() < PATIENCE, "{driver} {path}: {differ:#?}");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
    for program in running {
        program.end().await.expect("ended");
    }
    cluster.shutdown().await;
}
