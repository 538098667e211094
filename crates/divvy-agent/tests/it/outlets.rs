//! What the device plugin under NVIDIA's name shows of its GPUs' health, besides the devices: `/metrics`, `/readyz`, and events on the node.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use divvy_agent::nvidia::{OnNode, Pace};
use divvy_testbed::api::{ApiServer, Effect, FaultRule, Match};
use divvy_testbed::simulated_driver::ask;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::exchange::{exchange, serves_both_formats};
use crate::mps::{A100, Bed, LIMIT, Log, PluginBed, USER, stop, until, uuid};

/// Return a node with this number of GPUs, whose plugin serves metrics and posts events.
fn bed(gpus: usize) -> (Bed, SocketAddr) {
    let mut bed = Bed::new(&vec![A100; gpus]);
    bed.configure("version: v1\n");
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("bound");
    bed.surroundings.metrics = Some(address);
    bed.surroundings.events = Some(OnNode {
        kubeconfig: Some(bed.at("kubeconfig")),
        node: "n1".to_owned(),
    });
    bed.surroundings.pace = Pace {
        interval: Duration::from_millis(100),
        recovery: Duration::from_secs(1),
        ..Pace::default()
    };
    (bed, address)
}

async fn get(address: SocketAddr, path: &str) -> Option<(String, String)> {
    let (head, body) = exchange(address, path, "").await?;
    Some((head.split(' ').nth(1)?.to_owned(), body))
}

/// Wait until a page has this status and contains this text.
async fn page_is(address: SocketAddr, path: &str, status: &str, part: &str) {
    let start = Instant::now();
    loop {
        let found = get(address, path).await;
        if found
            .as_ref()
            .is_some_and(|(code, body)| code == status && body.contains(part))
        {
            return;
        }
        assert!(start.elapsed() < LIMIT, "{path}: {status} {part} expected: {found:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn xid(bed: &Bed, gpu: u32, xid: u64) {
    ask(&bed.at("control"), &json!({"op": "xid", "gpu": gpu, "xid": xid}))
        .await
        .expect("delivered");
}

/// Wait for an event on the node with this reason, and return it.
async fn event(api: &ApiServer, reason: &str) -> Value {
    let look = |api: &ApiServer| {
        let events = api.list("events.events.k8s.io", "").ok()?;
        events.into_iter().find(|event| event["reason"] == reason)
    };
    let found = api.until(LIMIT, look).await;
    found.unwrap_or_else(|| panic!("no event {reason}"))
}

#[tokio::test]
async fn metrics_and_events_show_a_gpus_failure_and_recovery() {
    let (bed, address) = bed(2);
    let plugin = PluginBed::new(&bed, &[]).await;
    page_is(address, "/readyz", "200", "ok").await;
    assert_eq!(get(address, "/healthz").await, Some(("200".to_owned(), "ok\n".to_owned())));
    let gpu = uuid(0);
    let healthy = |is: u8| format!("divvy_agent_gpu_healthy{{gpu=\"{gpu}\"}} {is}\n");
    let devices = |healthy: &str, count: u8| {
        format!("divvy_agent_device_ids{{resource=\"nvidia.com/gpu\",healthy=\"{healthy}\"}} {count}\n")
    };
    for line in [
        "divvy_agent_registrations{resource=\"nvidia.com/gpu\"} 1\n",
        "divvy_agent_registered{resource=\"nvidia.com/gpu\"} 1\n",
        "divvy_agent_probe_up 1\n",
        "divvy_agent_gpus{health=\"ok\"} 2\n",
        &healthy(1),
        &devices("true", 2),
    ] {
        page_is(address, "/metrics", "200", line).await;
    }
    serves_both_formats(address, "divvy_agent_gpus").await;
    xid(&bed, 0, 79).await;
    xid(&bed, 1, 13).await;
    page_is(address, "/metrics", "200", &healthy(0)).await;
    page_is(address, "/metrics", "200", &devices("false", 1)).await;
    page_is(address, "/metrics", "200", "divvy_agent_faults_total{fault=\"XID 79\"} 1\n").await;
    page_is(address, "/metrics", "200", "divvy_agent_faults_total{fault=\"XID 13\"} 1\n").await;
    let failed = event(&plugin.api, "GpuFailed").await;
    let name = format!("GPU 0 ({A100}, {gpu})");
    let expected = format!(
        "{name} failed: XID 79. Divvy no longer offers this GPU, and nothing starts on it until it recovers; pods that already run there are not touched"
    );
    assert_eq!(
        (failed["note"].as_str(), failed["type"].as_str()),
        (Some(expected.as_str()), Some("Warning"))
    );
    assert_eq!(
        (&failed["regarding"]["kind"], &failed["regarding"]["name"]),
        (&json!("Node"), &json!("n1"))
    );
    let recovered = event(&plugin.api, "GpuRecovered").await;
    assert_eq!(recovered["note"], format!("{name} has recovered and is offered again"));
    page_is(address, "/metrics", "200", &healthy(1)).await;
    stop(plugin.running).await;
    assert!(
        TcpStream::connect(address).await.is_err(),
        "a stopped plugin serves no metrics"
    );
}

/// The plugin is ready after a new configuration, too.
#[tokio::test]
async fn a_plugin_is_ready_when_the_kubelet_watches_its_devices() {
    let (bed, address) = bed(1);
    std::fs::write(bed.at("control.state"), r#"{"initError":9}"#).expect("written");
    let plugin = PluginBed::new(&bed, &["--fail-on-init-error=false"]).await;
    page_is(address, "/readyz", "503", "not ready: gpus").await;
    let start = Instant::now();
    while ask(&bed.at("control"), &json!({"op": "init", "error": 0})).await.is_err() {
        assert!(start.elapsed() < LIMIT, "the simulated driver does not listen");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    page_is(address, "/readyz", "200", "ok").await;
    bed.configure("version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n");
    page_is(address, "/metrics", "200", "healthy=\"true\"} 3\n").await;
    page_is(address, "/readyz", "200", "ok").await;
    stop(plugin.running).await;
}

#[tokio::test]
async fn a_plugin_whose_mps_daemon_does_not_serve_is_not_ready() {
    let (bed, address) = bed(1);
    bed.configure("version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n");
    let plugin = PluginBed::new(&bed, &["--mps-root=/run/nvidia/mps"]).await;
    page_is(address, "/readyz", "503", "not ready: mps").await;
    stop(plugin.running).await;
}

/// After the first refusal, the program attempts no further event.
#[tokio::test]
async fn a_missing_right_to_events_is_logged_once() {
    let log = Log::default();
    let _guard = log.record();
    let (bed, address) = bed(2);
    let plugin = PluginBed::new(&bed, &[]).await;
    page_is(address, "/readyz", "200", "ok").await;
    let refuse = Effect::Refuse(403);
    let events = Match::any().resource("events.events.k8s.io").client(USER);
    let id = plugin.api.faults().add(FaultRule::new(events, refuse));
    let told = || log.text().matches("allow this service account to create events").count();
    xid(&bed, 0, 79).await;
    until("the refusal is logged", || told() == 1).await;
    xid(&bed, 1, 79).await;
    until("the second failure is in the log", || {
        log.text().contains(&format!("GPU 1 ({A100}, {}) failed", uuid(1)))
    })
    .await;
    until("both recover", || {
        log.text().matches("has recovered and is offered again").count() == 2
    })
    .await;
    assert_eq!((plugin.api.faults().fired(id), told()), (1, 1));
    stop(plugin.running).await;
}

#[tokio::test]
async fn an_api_server_that_hangs_does_not_delay_the_devices() {
    let (bed, _) = bed(3);
    let plugin = PluginBed::new(&bed, &[]).await;
    plugin.has("allocatable", Some("3")).await;
    let events = Match::any().resource("events.events.k8s.io").client(USER);
    let id = plugin.api.faults().add(FaultRule::new(events, Effect::Hang));
    let start = Instant::now();
    for (gpu, left) in [(0, "2"), (1, "1"), (2, "0")] {
        ask(&bed.at("control"), &json!({"op": "lost", "gpu": gpu, "lost": true}))
            .await
            .expect("done");
        plugin.has("allocatable", Some(left)).await;
    }
    // One event alone waits for 5 s.
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    until("an event is sent", || plugin.api.faults().fired(id) > 0).await;
    stop(plugin.running).await;
}

#[tokio::test]
async fn events_report_a_silent_driver_and_its_return() {
    let (mut bed, address) = bed(1);
    bed.surroundings.pace.silence = Duration::from_millis(500);
    let plugin = PluginBed::new(&bed, &[]).await;
    page_is(address, "/readyz", "200", "ok").await;
    let hang = async |seconds: u8| {
        ask(&bed.at("control"), &json!({"op": "hang", "seconds": seconds}))
            .await
            .expect("done")
    };
    hang(60).await;
    event(&plugin.api, "DriverSilent").await;
    page_is(address, "/readyz", "503", "gpus").await;
    page_is(address, "/metrics", "200", "divvy_agent_gpus{health=\"failed\"} 1\n").await;
    hang(0).await;
    event(&plugin.api, "DriverAnswers").await;
    page_is(address, "/readyz", "200", "ok").await;
    page_is(address, "/metrics", "200", "divvy_agent_gpus{health=\"ok\"} 1\n").await;
    stop(plugin.running).await;
}

#[tokio::test]
async fn without_the_nodes_name_nothing_is_sent_to_the_api_server() {
    let (mut bed, address) = bed(1);
    bed.surroundings.events = None;
    let plugin = PluginBed::new(&bed, &[]).await;
    page_is(address, "/readyz", "200", "ok").await;
    let all = plugin
        .api
        .faults()
        .add(FaultRule::new(Match::any().client(USER), Effect::Latency(Duration::ZERO)));
    xid(&bed, 0, 79).await;
    page_is(address, "/metrics", "200", "divvy_agent_gpus{health=\"failed\"} 1\n").await;
    page_is(address, "/metrics", "200", "divvy_agent_gpus{health=\"ok\"} 1\n").await;
    assert_eq!(plugin.api.faults().fired(all), 0);
    stop(plugin.running).await;
}
