//! Queries to the API server and the extender.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use divvy_doctor::facts::cluster::{CheckedNode, CheckedPod, ClusterFacts, DaemonSet, RuntimeClass, Texts};
use divvy_doctor::facts::programs::{ExtenderFacts, ExtenderVersion, filter_calls};
use divvy_doctor::{Asked, Facts};
use divvy_kube::{client, list};
use http::StatusCode;
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Bytes;
use serde::de::DeserializeOwned;
use tokio::runtime::Handle;

use super::http as question;
use super::output::too_long;
use crate::cli::AccessArgs;
use crate::cli::doctor::DoctorArgs;
use crate::commands::inspect::{access, warn_left_out};
use crate::commands::progress::Arrived;

/// The time limit for a complete list, as a multiple of `--timeout`. In addition, at least one object must arrive in each
/// `--timeout`.
const PATIENCE: u32 = 20;
/// The number of characters to show of the API server's message when it refuses a request.
const LONGEST_WORDS: usize = 500;
/// The largest number of replicas to query.
const MOST_REPLICAS: usize = 5;
/// The port on which the chart's extender listens.
const PORT: u16 = 32766;

/// The arguments of `kubectl auth can-i` that check the permission to list each kind.
const RIGHTS: [(&str, &str); 4] = [
    ("nodes", "list nodes"),
    ("pods", "list pods --all-namespaces"),
    ("daemonsets", "list daemonsets.apps --all-namespaces"),
    ("runtimeclasses", "list runtimeclasses.node.k8s.io"),
];

/// The reason why a list could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Unlisted {
    reason: String,
    /// The API server refused the list for lack of permission (401 or 403).
    forbidden: bool,
}

/// Return the `kubectl` command with the user's connection flags, for use in advice. The token is not shown.
fn kubectl(args: &AccessArgs) -> String {
    let mut words = vec!["kubectl".to_owned()];
    let mut flag = |name: &str, value: Option<String>| words.extend(value.map(|value| format!("--{name} {value}")));
    flag(
        "kubeconfig",
        args.context.kubeconfig.as_ref().map(|path| path.display().to_string()),
    );
    flag("context", args.context.context.clone());
    flag("user", args.user.clone());
    flag("server", args.server.as_ref().map(ToString::to_string));
    flag("token", args.token.as_ref().map(|_| "TOKEN".to_owned()));
    flag("as", args.impersonate.clone());
    for group in &args.impersonate_groups {
        flag("as-group", Some(group.clone()));
    }
    words.join(" ")
}

/// Read nodes, pods, DaemonSets, and RuntimeClasses, as far as the user's permissions allow.
pub(super) async fn objects(args: &AccessArgs, limit: Duration) -> (Asked<ClusterFacts>, Option<kube::Client>) {
    // A kubeconfig may be a pipe, and its credentials may come from a program. Both can block, so they are read in a separate thread.
    let (choice, runtime) = (access(args), Handle::current());
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
                list(&client, "/api/v1/nodes", limit, CheckedNode::slim, || arrived.node()),
                list(&client, "/api/v1/pods", limit, CheckedPod::slim, || arrived.pod()),
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
    let mut cluster = ClusterFacts::default();
    let mut unlisted = Vec::new();
    take(nodes, "nodes", &mut cluster.nodes, &mut unlisted);
    take(pods, "pods", &mut cluster.pods, &mut unlisted);
    take(sets, "daemonsets", &mut cluster.daemon_sets, &mut unlisted);
    take(classes, "runtimeclasses", &mut cluster.runtime_classes, &mut unlisted);
    let kubectl = kubectl(args);
    match sorted_out(&unlisted, &kubectl) {
        Ok(refused) => {
            cluster.refused = refused;
            (Asked::Answer(cluster), Some(client))
        }
        Err(first) => (Asked::Failed(first.reason.clone()), None),
    }
}

fn take<T>(
    listed: Result<Vec<T>, Unlisted>,
    plural: &'static str,
    to: &mut Vec<T>,
    unlisted: &mut Vec<(&'static str, Unlisted)>,
) {
    match listed {
        Ok(all) => *to = all,
        Err(why) => unlisted.push((plural, why)),
    }
}

/// Return the reason for each kind that could not be listed. Fails with the first one if no kind could be listed and none of the reasons is a
/// missing permission. In that case, the API server cannot be reached.
fn sorted_out<'u>(unlisted: &'u [(&str, Unlisted)], kubectl: &str) -> Result<BTreeMap<String, String>, &'u Unlisted> {
    if let Some((_, first)) = unlisted.first()
        && unlisted.len() == RIGHTS.len()
        && unlisted.iter().all(|(_, why)| !why.forbidden)
    {
        return Err(first);
    }
    let said = unlisted.iter().map(|(plural, why)| {
        let right = RIGHTS.iter().find(|(kind, _)| kind == plural).filter(|_| why.forbidden);
        let reason = match right {
            Some((_, right)) => format!("{}. Check your permission with {kubectl} auth can-i {right}", why.reason),
            None => why.reason.clone(),
        };
        ((*plural).to_owned(), reason)
    });
    Ok(said.collect())
}

/// Read the objects of a list. Each object is reduced with `slim` and counted with `arrived` as it arrives.
async fn list<T: DeserializeOwned + Send + 'static>(
    client: &kube::Client,
    path: &str,
    limit: Duration,
    slim: fn(T) -> T,
    arrived: impl Fn() + Sync,
) -> Result<Vec<T>, Unlisted> {
    let what = format!("the {} could not be listed", path.rsplit('/').next().unwrap_or(path));
    let late = |words: String| Unlisted {
        reason: format!("{what}: {words}"),
        forbidden: false,
    };
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
                Ok(listed) => break listed.map_err(|error| why(&what, error))?,
                Err(_) if count.load(Ordering::Relaxed) == before => return Err(late(too_long("the API server", limit))),
                Err(_) if Instant::now() > end => {
                    let seconds = limit.saturating_mul(PATIENCE).as_secs();
                    return Err(late(format!("the list was not complete after {seconds} s")));
                }
                Err(_) => {}
            }
        }
    };
    warn_left_out(path, &left_out);
    items.shrink_to_fit();
    Ok(items)
}

fn why(what: &str, error: divvy_kube::Error) -> Unlisted {
    let (words, forbidden) = match error {
        divvy_kube::Error::Api { answer, .. } => {
            let forbidden = matches!(&*answer, kube::Error::Api(status) if [401, 403].contains(&status.code));
            (divvy_kube::in_words(&answer), forbidden)
        }
        divvy_kube::Error::List { text, .. } => (text, false),
        other => (other.to_string(), false),
    };
    Unlisted {
        reason: format!("{what}: {words}"),
        forbidden,
    }
}

/// The reason why a GET request failed.
#[derive(Debug, thiserror::Error)]
enum NoAnswer {
    #[error("{0}")]
    Request(#[from] http::Error),
    #[error("{}", divvy_kube::in_words(.0))]
    Connection(#[source] Box<kube::Error>),
    #[error("{1}")]
    Body(StatusCode, #[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("{0}: {1}")]
    Refused(StatusCode, String),
    #[error("{}", too_long("it", *.0))]
    Late(Duration),
}

/// Send a GET request to the API server, and return the text of a successful response.
async fn get(client: &kube::Client, uri: &str, limit: Duration) -> Result<String, NoAnswer> {
    let answer = tokio::time::timeout(limit, body(client, uri)).await;
    let body = answer.unwrap_or(Err(NoAnswer::Late(limit)))?;
    Ok(String::from_utf8_lossy(&body).into_owned())
}

async fn body(client: &kube::Client, uri: &str) -> Result<Bytes, NoAnswer> {
    let request = http::Request::get(uri).body(kube::client::Body::empty())?;
    let response = client.send(request).await;
    let response = response.map_err(|error| NoAnswer::Connection(Box::new(error)))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), question::LARGEST).collect().await;
    let body = body.map_err(|error| NoAnswer::Body(status, error))?.to_bytes();
    if status.is_success() {
        return Ok(body);
    }
    let said: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let text = String::from_utf8_lossy(&body);
    let words = said["message"].as_str().or_else(|| text.lines().next()).unwrap_or_default();
    let words: String = words.chars().take(LONGEST_WORDS).collect();
    Err(NoAnswer::Refused(status, words))
}

/// Query the extender for its version: at the address from `--extender`, or else at the address in kube-scheduler's configuration, and each
/// replica through the API server.
pub(super) async fn extender(
    args: &DoctorArgs,
    known: Option<String>,
    facts: &Facts<'_>,
    client: Option<kube::Client>,
) -> Asked<ExtenderFacts> {
    if let Some(url) = &args.extender {
        return Asked::Answer(direct(url, args.timeout).await);
    }
    let called = async {
        match known {
            Some(url) => Some(direct(&url, args.timeout).await),
            None => None,
        }
    };
    let (called, pods) = tokio::join!(called, of_cluster(args, facts, client));
    agreed(called, pods)
}

/// Combine the answer at kube-scheduler's address with the answers of the replicas: both must be good. An extender that runs outside of the
/// cluster has no replicas.
fn agreed(called: Option<ExtenderFacts>, pods: Asked<ExtenderFacts>) -> Asked<ExtenderFacts> {
    match (called, pods) {
        (None, pods) => pods,
        (Some(called), pods) => match (&called.version, pods) {
            (ExtenderVersion::Unknown(_), Asked::Failed(reason)) => Asked::Failed(reason),
            (ExtenderVersion::Known(_), Asked::Answer(pods)) => Asked::Answer(match pods.version {
                ExtenderVersion::Known(_) => ExtenderFacts {
                    url: format!("{}, {}", called.url, pods.url),
                    ..pods
                },
                ExtenderVersion::Unknown(_) => pods,
            }),
            _ => Asked::Answer(called),
        },
    }
}

/// Query the replicas of the chart's extender through the API server.
async fn of_cluster(args: &DoctorArgs, facts: &Facts<'_>, client: Option<kube::Client>) -> Asked<ExtenderFacts> {
    let limit = args.timeout;
    let cluster = match &facts.cluster {
        Asked::Answer(cluster) => cluster,
        Asked::Failed(reason) | Asked::Blocked(reason) => return Asked::Blocked(reason.clone()),
        Asked::Absent(_) | Asked::Not(_) => {
            return Asked::Absent("the extender's address is unknown; add --cluster, or --extender URL".to_owned());
        }
    };
    if let Some(reason) = cluster.refused.get("pods") {
        return Asked::Blocked(reason.clone());
    }
    let Some(client) = client else {
        return Asked::Blocked("the API server could not be reached".to_owned());
    };
    let (pods, mut left_out) = match replicas(cluster) {
        Ok(found) => found,
        Err(none) => return none,
    };
    let kubectl = kubectl(&args.connection);
    let asked = pods
        .iter()
        .take(MOST_REPLICAS)
        .map(|pod| through(&client, pod, limit, &kubectl));
    let asked = futures::future::join_all(asked).await;
    left_out.extend(
        pods.iter()
            .skip(MOST_REPLICAS)
            .map(|pod| format!("{} (enough other replicas were queried)", shown(pod))),
    );
    together(asked, left_out)
}

fn shown(pod: &CheckedPod) -> String {
    format!("pod {}/{}", pod.metadata.namespace, pod.metadata.name)
}

/// Return the running replicas of the chart's extender, and a description of each replica that does not run. If no replica runs,
/// the error says what this means.
fn replicas(cluster: &ClusterFacts) -> Result<(Vec<&CheckedPod>, Vec<String>), Asked<ExtenderFacts>> {
    let is = |labels: &Texts, key: &str, value: &str| labels.get(&format!("app.kubernetes.io/{key}")) == Some(value);
    let all: Vec<&CheckedPod> = cluster
        .pods
        .iter()
        .filter(|pod| is(&pod.metadata.labels, "name", "divvy") && is(&pod.metadata.labels, "component", "extender"))
        .collect();
    let (running, others): (Vec<&CheckedPod>, Vec<&CheckedPod>) = all.iter().partition(|pod| pod.status.phase == "Running");
    if !running.is_empty() {
        // Pods that have ended were replaced by others.
        let others = others
            .iter()
            .filter(|pod| !["Succeeded", "Failed"].contains(&pod.status.phase.as_str()));
        let left_out = others
            .map(|pod| format!("{} (it is {})", shown(pod), pod.status.phase))
            .collect();
        return Ok((running, left_out));
    }
    if let Some(pod) = all.first() {
        return Err(Asked::Failed(format!(
            "no replica of the extender runs: {} is {}",
            shown(pod),
            pod.status.phase
        )));
    }
    let agents = cluster
        .daemon_sets
        .iter()
        .find(|set| is(&set.metadata.labels, "name", "divvy") && set.status.desired_number_scheduled > 0);
    Err(match agents {
        Some(set) => Asked::Failed(format!(
            "DaemonSet {}/{} runs, but no pod is Divvy's extender; if the extender runs outside the cluster, add --extender URL",
            set.metadata.namespace, set.metadata.name
        )),
        None => Asked::Absent(
            "no pod of the cluster is the extender of Divvy's chart; if it runs elsewhere, add --extender URL".to_owned(),
        ),
    })
}

/// Combine the answers of the replicas. Every replica must answer. Their numbers of filter calls are added.
fn together(answers: Vec<Asked<ExtenderFacts>>, left_out: Vec<String>) -> Asked<ExtenderFacts> {
    let mut all: Option<ExtenderFacts> = None;
    for answer in answers {
        let Asked::Answer(one) = answer else { return answer };
        if let ExtenderVersion::Unknown(_) = one.version {
            return Asked::Answer(one);
        }
        all = Some(match all {
            None => one,
            Some(before) => ExtenderFacts {
                url: format!("{}, {}", before.url, one.url),
                filter_calls: before.filter_calls.zip(one.filter_calls).map(|(a, b)| a.saturating_add(b)),
                ..before
            },
        });
    }
    match all {
        Some(all) => Asked::Answer(ExtenderFacts { left_out, ..all }),
        None => Asked::Absent("no pod of the cluster is an extender".to_owned()),
    }
}

fn version(answer: Result<String, NoAnswer>) -> ExtenderVersion {
    match answer {
        Ok(text) => ExtenderVersion::Known(text.trim().to_owned()),
        Err(error) => ExtenderVersion::Unknown(error.to_string()),
    }
}

/// Query an extender at its address.
async fn direct(url: &str, limit: Duration) -> ExtenderFacts {
    let client = match client_of(url) {
        Ok(client) => client,
        Err(reason) => {
            return ExtenderFacts {
                url: url.to_owned(),
                version: ExtenderVersion::Unknown(reason.to_string()),
                filter_calls: None,
                left_out: Vec::new(),
            };
        }
    };
    let (version, metrics) = tokio::join!(get(&client, "/version", limit), get(&client, "/metrics", limit));
    ExtenderFacts {
        url: url.to_owned(),
        version: self::version(version),
        filter_calls: metrics.ok().map(|text| filter_calls(&text)),
        left_out: Vec::new(),
    }
}

/// The reason why an extender cannot be queried at a URL.
#[derive(Debug, thiserror::Error)]
enum NoClient {
    #[error("this is not a URL: {0}")]
    Url(#[source] http::uri::InvalidUri),
    #[error("this is not a URL with a host, such as http://127.0.0.1:32766")]
    Host,
    #[error("this is not a URL: {0}")]
    Base(#[source] http::Error),
    #[error("{}", divvy_kube::in_words(.0))]
    Tls(#[source] Box<kube::Error>),
}

/// Return a client of the extender at a URL. It accepts any certificate, because only kube-scheduler knows the extender's CA, and has none
/// itself: an extender returns its version to every client.
fn client_of(url: &str) -> Result<kube::Client, NoClient> {
    let uri: http::Uri = url.parse().map_err(NoClient::Url)?;
    let parts = (uri.scheme_str(), uri.authority());
    let (Some(scheme @ ("http" | "https")), Some(authority)) = parts else {
        return Err(NoClient::Host);
    };
    let base = http::Uri::builder().scheme(scheme).authority(authority.as_str());
    let base = base.path_and_query("/").build().map_err(NoClient::Base)?;
    let mut config = kube::Config::new(base);
    config.accept_invalid_certs = true;
    kube::Client::try_from(config).map_err(|error| NoClient::Tls(Box::new(error)))
}

/// Query an extender's pod through the API server's proxy, as `kubectl get --raw` does. The API server accepts any certificate of
/// the pod. The answer is blocked if the user may not use the proxy.
async fn through(client: &kube::Client, pod: &CheckedPod, limit: Duration, kubectl: &str) -> Asked<ExtenderFacts> {
    let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
    let ports = pod.spec.containers.iter().flat_map(|container| &container.ports);
    let port = ports.map(|port| port.container_port).next().unwrap_or(PORT);
    let ask = async |scheme: &str, path: &str| {
        let uri = format!("/api/v1/namespaces/{namespace}/pods/{scheme}:{name}:{port}/proxy{path}");
        get(client, &uri, limit).await
    };
    let mut scheme = "https";
    let mut version = ask(scheme, "/version").await;
    // This refusal comes from the API server: an extender returns its version to every client.
    if let Err(error @ (NoAnswer::Refused(status, _) | NoAnswer::Body(status, _))) = &version
        && [StatusCode::FORBIDDEN, StatusCode::UNAUTHORIZED].contains(status)
    {
        return Asked::Blocked(format!(
            "{} could not be queried through the API server: {error}. Check your permission with {kubectl} auth can-i get pods --subresource=proxy -n {namespace}, or \
             query the extender directly with --extender URL",
            shown(pod)
        ));
    }
    if version.is_err()
        && let Ok(plain) = ask("http", "/version").await
    {
        (scheme, version) = ("http", Ok(plain));
    }
    let metrics = ask(scheme, "/metrics").await;
    Asked::Answer(ExtenderFacts {
        url: format!("pod {namespace}/{name}"),
        version: self::version(version),
        filter_calls: metrics.ok().map(|text| filter_calls(&text)),
        left_out: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labelled(component: &str, phase: &str) -> CheckedPod {
        let mut pod = CheckedPod::default();
        (pod.metadata.namespace, pod.metadata.name) = ("d".to_owned(), "x".to_owned());
        for (key, value) in [("name", "divvy"), ("component", component)] {
            pod.metadata.labels.insert(format!("app.kubernetes.io/{key}"), value);
        }
        pod.status.phase = phase.to_owned();
        pod
    }

    /// On a cluster without agents, the extender belongs to other software.
    #[test]
    fn a_missing_extender_fails_only_where_agents_run() {
        let mut cluster = ClusterFacts::default();
        assert!(matches!(replicas(&cluster), Err(Asked::Absent(_))));
        cluster.daemon_sets.push(DaemonSet::default());
        assert!(matches!(replicas(&cluster), Err(Asked::Absent(_))), "a foreign DaemonSet");
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
        let (running, left_out) = replicas(&cluster).expect("one runs");
        assert_eq!(
            (running.len(), left_out.as_slice()),
            (1, &["pod d/x (it is Pending)".to_owned()][..])
        );
    }

    /// The missing right is named with the kind, and the other kinds are read.
    #[test]
    fn a_kind_that_one_may_not_list_is_named() {
        let unlisted = |reason: &str, forbidden| Unlisted {
            reason: reason.to_owned(),
            forbidden,
        };
        let some = [
            ("pods", unlisted("pods is forbidden", true)),
            ("daemonsets", unlisted("it hangs", false)),
        ];
        let said = sorted_out(&some, "kubectl --context c").expect("the rest is there");
        assert_eq!(
            said["pods"],
            "pods is forbidden. Check your permission with kubectl --context c auth can-i list pods --all-namespaces"
        );
        assert_eq!(said["daemonsets"], "it hangs");
        let all = |forbidden| RIGHTS.map(|(kind, _)| (kind, unlisted("no answer", forbidden)));
        let (hangs, forbidden) = (all(false), all(true));
        assert!(matches!(sorted_out(&hangs, "kubectl"), Err(first) if first.reason == "no answer"));
        assert!(matches!(sorted_out(&forbidden, "kubectl"), Ok(said) if said.len() == 4));
    }

    fn known() -> ExtenderVersion {
        ExtenderVersion::Known("1".to_owned())
    }

    fn unknown(reason: &str) -> ExtenderVersion {
        ExtenderVersion::Unknown(reason.to_owned())
    }

    #[test]
    fn kube_schedulers_address_and_the_replicas_must_both_answer() {
        let said = |version: ExtenderVersion, url: &str| ExtenderFacts {
            url: url.to_owned(),
            version,
            filter_calls: Some(2),
            left_out: Vec::new(),
        };
        let (well, away) = (said(known(), "https://x"), said(unknown("refused"), "https://x"));
        let (pod, ill) = (said(known(), "pod"), said(unknown("ill"), "pod"));
        let none = Asked::Failed("no replica runs".to_owned());
        let both = said(known(), "https://x, pod");
        for (called, pods, expected) in [
            (None, Asked::Answer(pod.clone()), Asked::Answer(pod.clone())),
            (Some(well.clone()), Asked::Answer(pod.clone()), Asked::Answer(both)),
            (Some(well.clone()), Asked::Answer(ill.clone()), Asked::Answer(ill)),
            (Some(away.clone()), Asked::Answer(pod), Asked::Answer(away.clone())),
            (Some(away), none.clone(), none.clone()),
            (Some(well.clone()), none, Asked::Answer(well.clone())),
            (
                Some(well.clone()),
                Asked::Blocked("forbidden".to_owned()),
                Asked::Answer(well),
            ),
        ] {
            assert_eq!(agreed(called, pods), expected);
        }
    }

    #[test]
    fn replicas_answer_together_and_one_that_does_not_is_named() {
        let one = |url: &str, version: ExtenderVersion, filter_calls| {
            Asked::Answer(ExtenderFacts {
                url: url.to_owned(),
                version,
                filter_calls,
                left_out: Vec::new(),
            })
        };
        let Asked::Answer(both) = together(
            vec![one("a", known(), Some(0)), one("b", known(), Some(3))],
            vec!["c".to_owned()],
        ) else {
            panic!("both answer")
        };
        assert_eq!((both.url.as_str(), both.filter_calls), ("a, b", Some(3)));
        assert_eq!(both.left_out, ["c"]);
        let Asked::Answer(ill) = together(vec![one("a", known(), Some(4)), one("b", unknown("away"), None)], Vec::new()) else {
            panic!("one answers")
        };
        assert_eq!((ill.url.as_str(), ill.version), ("b", unknown("away")));
        assert!(
            matches!(together(vec![Asked::Blocked("forbidden".to_owned())], Vec::new()), Asked::Blocked(reason) if reason == "forbidden")
        );
    }
}
