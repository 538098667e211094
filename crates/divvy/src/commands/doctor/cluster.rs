//! What the API server and the extender say.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use divvy_cluster::{client, list};
use divvy_doctor::facts::cluster::{Cluster, DaemonSet, Node, Pod, RuntimeClass, Texts};
use divvy_doctor::facts::programs::{Extender, filter_calls};
use divvy_doctor::{Asked, Facts};
use http::StatusCode;
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Bytes;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::runtime::Handle;

use super::http as question;
use super::programs::too_long;
use crate::cli::ClusterArgs;
use crate::commands::inspect::{choice, say_left_out};
use crate::commands::progress::Arrived;

/// Something of a list has to arrive within the limit, and all of it within so many times the limit.
const PATIENCE: u32 = 20;
/// Of what a refusal says.
const LONGEST_WORDS: usize = 500;
/// Replicas that are asked.
const MOST_REPLICAS: usize = 5;
/// Where an extender listens in the chart.
const PORT: u16 = 32766;

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
    let arrived = Arrived::default();
    let (nodes, pods, sets, classes) = arrived
        .shown(async {
            tokio::join!(
                list(&client, "/api/v1/nodes", limit, Node::slim, || arrived.node()),
                list(&client, "/api/v1/pods", limit, Pod::slim, || arrived.pod()),
                list(&client, "/apis/apps/v1/daemonsets", limit, |set: DaemonSet| set, || ()),
                list(
                    &client,
                    "/apis/node.k8s.io/v1/runtimeclasses",
                    limit,
                    |class: RuntimeClass| class,
                    || ()
                ),
            )
        })
        .await;
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

/// The objects of a list, each made smaller as it arrives, and counted.
async fn list<T: DeserializeOwned + Send + 'static>(
    client: &kube::Client,
    path: &str,
    limit: Duration,
    slim: fn(T) -> T,
    arrived: impl Fn() + Sync,
) -> Result<Vec<T>, String> {
    let mut items = Vec::new();
    let count = AtomicU64::new(0);
    let mut take = |item| {
        count.fetch_add(1, Ordering::Relaxed);
        arrived();
        items.push(item);
    };
    let end = Instant::now() + limit.saturating_mul(PATIENCE);
    let left_out = {
        let mut all = pin!(list::each_at(client, path, slim, &mut take));
        loop {
            let before = count.load(Ordering::Relaxed);
            match tokio::time::timeout(limit, &mut all).await {
                Ok(listed) => break listed.map_err(|error| error.to_string())?,
                Err(_) if count.load(Ordering::Relaxed) == before => {
                    return Err(format!("{path} could not be listed: {}", too_long("the API server", limit)));
                }
                Err(_) if Instant::now() > end => {
                    let seconds = limit.saturating_mul(PATIENCE).as_secs();
                    return Err(format!("{path} could not be listed: it had no end after {seconds} s"));
                }
                Err(_) => {}
            }
        }
    };
    say_left_out(path, &left_out);
    items.shrink_to_fit();
    Ok(items)
}

/// What the API server answers with 200, or the status of a refusal and its own words.
async fn asked(client: &kube::Client, uri: &str, most: usize) -> Result<Bytes, (Option<StatusCode>, String)> {
    let request = http::Request::get(uri)
        .body(kube::client::Body::empty())
        .map_err(|error| (None, error.to_string()))?;
    let response = client.send(request).await;
    let response = response.map_err(|error| (None, divvy_cluster::in_words(&error)))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), most).collect().await;
    let body = body.map_err(|error| (Some(status), error.to_string()))?.to_bytes();
    if status.is_success() {
        return Ok(body);
    }
    let said: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let text = String::from_utf8_lossy(&body);
    let words = said["message"].as_str().or_else(|| text.lines().next()).unwrap_or_default();
    let words: String = words.chars().take(LONGEST_WORDS).collect();
    Err((Some(status), format!("{status}: {words}")))
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
    let pods = match replicas(cluster) {
        Ok(pods) => pods,
        Err(none) => return none,
    };
    let asked = pods.iter().take(MOST_REPLICAS).map(|pod| through(&client, pod, limit));
    together(futures::future::join_all(asked).await)
}

/// The running replicas of the extender of Divvy's chart, or what it means that there is none.
fn replicas(cluster: &Cluster) -> Result<Vec<&Pod>, Asked<Extender>> {
    let is = |labels: &Texts, key: &str, value: &str| labels.get(&format!("app.kubernetes.io/{key}")) == Some(value);
    let all: Vec<&Pod> = cluster
        .pods
        .iter()
        .filter(|pod| is(&pod.metadata.labels, "name", "divvy") && is(&pod.metadata.labels, "component", "extender"))
        .collect();
    let running: Vec<&Pod> = all.iter().filter(|pod| pod.status.phase == "Running").copied().collect();
    if !running.is_empty() {
        return Ok(running);
    }
    if let Some(pod) = all.first() {
        let Pod { metadata, status, .. } = pod;
        return Err(Asked::Failed(format!(
            "no replica of the extender runs: pod {}/{} is {}",
            metadata.namespace, metadata.name, status.phase
        )));
    }
    let agents = cluster
        .daemon_sets
        .iter()
        .find(|set| is(&set.metadata.labels, "name", "divvy") && set.status.desired_number_scheduled > 0);
    Err(match agents {
        Some(set) => Asked::Failed(format!(
            "DaemonSet {}/{} runs, and no pod is Divvy's extender; --extender URL asks one that runs elsewhere",
            set.metadata.namespace, set.metadata.name
        )),
        None => {
            Asked::Absent("no pod of the cluster is an extender of Divvy's chart; --extender URL says where it is".to_owned())
        }
    })
}

/// What replicas say together: each has to answer, and any may have been called.
fn together(answers: Vec<Result<Extender, String>>) -> Asked<Extender> {
    let mut all: Option<Extender> = None;
    for answer in answers {
        let one = match answer {
            Ok(one) => one,
            Err(refused) => return Asked::Absent(refused),
        };
        if one.version.is_err() {
            return Asked::Answer(one);
        }
        all = Some(match all {
            None => one,
            Some(before) => Extender {
                url: format!("{}, {}", before.url, one.url),
                filter_calls: before.filter_calls.zip(one.filter_calls).map(|(a, b)| a.saturating_add(b)),
                ..before
            },
        });
    }
    all.map_or_else(
        || Asked::Absent("no pod of the cluster is an extender".to_owned()),
        Asked::Answer,
    )
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
        metrics.ok().map(|text| filter_calls(&text)),
    )
}

/// As kubectl does with `--raw`: the API server speaks with the pod, whatever its certificate. The error: one may not ask so.
async fn through(client: &kube::Client, pod: &Pod, limit: Duration) -> Result<Extender, String> {
    let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
    let ports = pod.spec.containers.iter().flat_map(|container| &container.ports);
    let port = ports.map(|port| port.container_port).next().unwrap_or(PORT);
    let ask = async |scheme: &str, path: &str| -> Result<String, (Option<StatusCode>, String)> {
        let uri = format!("/api/v1/namespaces/{namespace}/pods/{scheme}:{name}:{port}/proxy{path}");
        match tokio::time::timeout(limit, asked(client, &uri, question::LARGEST)).await {
            Ok(answer) => answer.map(|body| String::from_utf8_lossy(&body).into_owned()),
            Err(_) => Err((None, too_long("it", limit))),
        }
    };
    let mut scheme = "https";
    let mut version = ask(scheme, "/version").await;
    // The API server's own refusal: an extender refuses nobody its version.
    if let Err((Some(StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED), words)) = &version {
        return Err(format!(
            "pod {namespace}/{name} cannot be asked ({words}); it takes the right to get pods/proxy in its namespace, or --extender URL"
        ));
    }
    if version.is_err()
        && let Ok(plain) = ask("http", "/version").await
    {
        (scheme, version) = ("http", Ok(plain));
    }
    let metrics = ask(scheme, "/metrics").await;
    Ok(Extender {
        url: format!("pod {namespace}/{name}"),
        version: version.map(|text| text.trim().to_owned()).map_err(|(_, words)| words),
        filter_calls: metrics.ok().map(|text| filter_calls(&text)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labelled(component: &str, phase: &str) -> Pod {
        let mut pod = Pod::default();
        (pod.metadata.namespace, pod.metadata.name) = ("d".to_owned(), "x".to_owned());
        for (key, value) in [("name", "divvy"), ("component", component)] {
            pod.metadata.labels.insert(format!("app.kubernetes.io/{key}"), value);
        }
        pod.status.phase = phase.to_owned();
        pod
    }

    #[test]
    fn an_extender_that_does_not_run_fails_where_agents_do_and_is_somebody_elses_elsewhere() {
        let mut cluster = Cluster::default();
        assert!(matches!(replicas(&cluster), Err(Asked::Absent(_))));
        cluster.daemon_sets.push(DaemonSet::default());
        assert!(matches!(replicas(&cluster), Err(Asked::Absent(_))), "of somebody else");
        let set = &mut cluster.daemon_sets[0];
        set.metadata.labels.insert("app.kubernetes.io/name", "divvy");
        set.status.desired_number_scheduled = 2;
        let Err(Asked::Failed(reason)) = replicas(&cluster) else {
            panic!("agents without an extender")
        };
        assert!(reason.contains("no pod is Divvy's extender"), "{reason}");
        cluster.pods = vec![labelled("agent", "Running"), labelled("extender", "Pending")];
        let Err(Asked::Failed(reason)) = replicas(&cluster) else {
            panic!("it does not run")
        };
        assert!(reason.contains("pod d/x is Pending"), "{reason}");
        cluster.pods.push(labelled("extender", "Running"));
        assert_eq!(replicas(&cluster).map(|pods| pods.len()), Ok(1));
    }

    #[test]
    fn replicas_answer_together_and_one_that_does_not_is_named() {
        let one = |url: &str, version: Result<&str, &str>, filter_calls| {
            let version = version.map(str::to_owned).map_err(str::to_owned);
            let url = url.to_owned();
            Ok(Extender {
                url,
                version,
                filter_calls,
            })
        };
        let Asked::Answer(both) = together(vec![one("a", Ok("1"), Some(0)), one("b", Ok("1"), Some(3))]) else {
            panic!("both answer")
        };
        assert_eq!((both.url.as_str(), both.filter_calls), ("a, b", Some(3)));
        let Asked::Answer(ill) = together(vec![one("a", Ok("1"), Some(4)), one("b", Err("away"), None)]) else {
            panic!("one answers")
        };
        assert_eq!((ill.url.as_str(), ill.version), ("b", Err("away".to_owned())));
        assert!(matches!(together(vec![Err("forbidden".to_owned())]), Asked::Absent(reason) if reason == "forbidden"));
    }
}
