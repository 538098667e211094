//! What the API server and the extender say.

use std::time::{Duration, Instant};

use divvy_cluster::client;
use divvy_doctor::facts::cluster::{Cluster, Page, Pod};
use divvy_doctor::facts::programs::Extender;
use divvy_doctor::{Asked, Facts};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Bytes;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::runtime::Handle;

use super::http as question;
use super::programs::too_long;
use crate::cli::ClusterArgs;
use crate::commands::inspect::choice;

/// Objects of one page: each has to come within the limit, and all of a list within so many times the limit.
const PAGE: usize = 500;
const PAGES: u32 = 20;
/// Of one page: an object has at most 1.5 MiB, and most have some KiB.
const LARGEST_PAGE: usize = 256 * 1024 * 1024;
/// Of what a refusal says.
const LONGEST_WORDS: usize = 500;
/// Where an extender listens in the chart.
const PORT: u16 = 32766;
const CALLS: &str = "divvy_extender_request_duration_seconds_count{verb=\"filter\"}";

/// Nodes and pods; DaemonSets and RuntimeClasses where one may read them.
pub(super) async fn objects(args: &ClusterArgs, limit: Duration) -> (Asked<Cluster>, Option<kube::Client>) {
    // A kubeconfig may be a pipe, and its credentials come of a program: both are waited for where they hold up nobody else.
    let (choice, runtime) = (choice(args), Handle::current());
    let connected = tokio::task::spawn_blocking(move || runtime.block_on(client::connect(&choice)));
    let client = match tokio::time::timeout(limit, connected).await {
        Ok(Ok(Ok(connection))) => connection.client,
        Ok(Ok(Err(error))) => return (Asked::Failed(error.to_string()), None),
        Ok(Err(error)) => return (Asked::Failed(error.to_string()), None),
        Err(_) => return (Asked::Failed(too_long("the kubeconfig", limit)), None),
    };
    let (nodes, pods, sets, classes) = tokio::join!(
        list(&client, "/api/v1/nodes", limit),
        list(&client, "/api/v1/pods", limit),
        list(&client, "/apis/apps/v1/daemonsets", limit),
        list(&client, "/apis/node.k8s.io/v1/runtimeclasses", limit),
    );
    let mut cluster = Cluster::default();
    match (nodes, pods) {
        (Ok(nodes), Ok(pods)) => (cluster.nodes, cluster.pods) = (nodes, pods),
        (Err(reason), _) | (_, Err(reason)) => return (Asked::Failed(reason), None),
    }
    match sets {
        Ok(sets) => cluster.daemon_sets = sets,
        Err(reason) => drop(cluster.refused.insert("daemonsets".to_owned(), reason)),
    }
    match classes {
        Ok(classes) => cluster.runtime_classes = classes,
        Err(reason) => drop(cluster.refused.insert("runtimeclasses".to_owned(), reason)),
    }
    (Asked::Answer(cluster), Some(client))
}

async fn list<T: DeserializeOwned + Default>(client: &kube::Client, path: &str, limit: Duration) -> Result<Vec<T>, String> {
    let wrong = |what: String| format!("{path} could not be listed: {what}");
    let (mut items, mut next) = (Vec::new(), String::new());
    let end = Instant::now() + limit.saturating_mul(PAGES);
    loop {
        if Instant::now() > end {
            return Err(wrong(format!(
                "there was another page after {} s",
                limit.saturating_mul(PAGES).as_secs()
            )));
        }
        let uri = match next.is_empty() {
            true => format!("{path}?limit={PAGE}"),
            // A token is base64.
            false => format!(
                "{path}?limit={PAGE}&continue={}",
                next.replace('+', "%2B").replace('=', "%3D").replace('/', "%2F")
            ),
        };
        let page = match tokio::time::timeout(limit, get(client, &uri, LARGEST_PAGE)).await {
            Ok(page) => page.map_err(wrong)?,
            Err(_) => return Err(wrong(too_long("the API server", limit))),
        };
        let page: Page<T> = serde_json::from_slice(&page).map_err(|error| wrong(error.to_string()))?;
        items.extend(page.items);
        next = page.metadata.next;
        if next.is_empty() {
            return Ok(items);
        }
    }
}

/// What the API server answers with 200, or its own words.
async fn get(client: &kube::Client, uri: &str, most: usize) -> Result<Bytes, String> {
    let request = http::Request::get(uri)
        .body(kube::client::Body::empty())
        .map_err(|error| error.to_string())?;
    let response = client.send(request).await.map_err(|error| divvy_cluster::in_words(&error))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), most).collect().await;
    let body = body.map_err(|error| error.to_string())?.to_bytes();
    if status.is_success() {
        return Ok(body);
    }
    let said: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let text = String::from_utf8_lossy(&body);
    let words = said["message"].as_str().or_else(|| text.lines().next()).unwrap_or_default();
    Err(format!("{status}: {}", words.chars().take(LONGEST_WORDS).collect::<String>()))
}

/// Asks the extender for its version: at the address that is known, by `--extender` or of kube-scheduler's configuration, else through the API server.
pub(super) async fn extender(
    known: Option<String>,
    facts: &Facts<'_>,
    client: Option<kube::Client>,
    limit: Duration,
) -> Asked<Extender> {
    if let Some(url) = known {
        return Asked::Answer(direct(&url, limit).await);
    }
    let (Some(client), Some(cluster)) = (client, facts.cluster.answer()) else {
        return Asked::Absent("nobody here says where the extender is: --cluster, or --extender URL".to_owned());
    };
    let pod = cluster.pods.iter().find(|pod| {
        let labels = &pod.metadata.labels;
        labels
            .get("app.kubernetes.io/component")
            .is_some_and(|component| component == "extender")
            && pod.status.phase == "Running"
    });
    match pod {
        Some(pod) => Asked::Answer(through(&client, pod, limit).await),
        None => Asked::Absent(
            "no pod of the cluster is a running extender of Divvy's chart; --extender URL says where it is".to_owned(),
        ),
    }
}

async fn direct(url: &str, limit: Duration) -> Extender {
    let answer = |version, filter_calls| Extender {
        url: url.to_owned(),
        version,
        filter_calls,
    };
    let Ok(uri) = url.parse::<http::Uri>() else {
        return answer(Err("that is no URL".to_owned()), None);
    };
    let Some(host) = uri.host().map(str::to_owned) else {
        return answer(
            Err("that is no URL with a host, such as http://127.0.0.1:32766".to_owned()),
            None,
        );
    };
    let secure = uri.scheme_str() == Some("https");
    let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
    let address = format!("{host}:{port}");
    if secure {
        // The authority is kube-scheduler's business; that somebody is there is ours.
        return match tokio::time::timeout(limit, TcpStream::connect(&address)).await {
            Ok(Ok(_)) => answer(Ok("TLS, not asked further".to_owned()), None),
            Ok(Err(error)) => answer(Err(error.to_string()), None),
            Err(_) => answer(Err(too_long("it", limit)), None),
        };
    }
    let get = |path: &'static str| question::get(TcpStream::connect(address.clone()), &host, path, limit);
    let (version, metrics) = tokio::join!(get("/version"), get("/metrics"));
    answer(
        version.map(|text| text.trim().to_owned()),
        metrics.ok().map(|text| calls(&text)),
    )
}

/// As kubectl does with `--raw`: the API server speaks with the pod, whatever its certificate.
async fn through(client: &kube::Client, pod: &Pod, limit: Duration) -> Extender {
    let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
    let ports = pod.spec.containers.iter().flat_map(|container| &container.ports);
    let port = ports.map(|port| port.container_port).next().unwrap_or(PORT);
    let ask = async |scheme: &str, path: &str| -> Result<String, String> {
        let uri = format!("/api/v1/namespaces/{namespace}/pods/{scheme}:{name}:{port}/proxy{path}");
        match tokio::time::timeout(limit, get(client, &uri, question::LARGEST)).await {
            Ok(answer) => answer.map(|body| String::from_utf8_lossy(&body).into_owned()),
            Err(_) => Err(too_long("it", limit)),
        }
    };
    let mut scheme = "https";
    let mut version = ask(scheme, "/version").await;
    if version.is_err()
        && let Ok(plain) = ask("http", "/version").await
    {
        (scheme, version) = ("http", Ok(plain));
    }
    let metrics = ask(scheme, "/metrics").await;
    Extender {
        url: format!("pod {namespace}/{name}"),
        version: version.map(|text| text.trim().to_owned()),
        filter_calls: metrics.ok().map(|text| calls(&text)),
    }
}

/// How often filter was called, by the metrics.
fn calls(metrics: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(CALLS));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_filter_are_counted_and_no_others() {
        let metrics = "divvy_extender_request_duration_seconds_count{verb=\"bind\"} 3\n\
                       divvy_extender_request_duration_seconds_count{verb=\"filter\"} 41\n# EOF\n";
        assert_eq!(calls(metrics), 41);
        assert_eq!(calls("# EOF\n"), 0);
    }
}
