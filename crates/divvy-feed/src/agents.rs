//! Asks the agents of nodes what is used, through the API server.
//!
//! A user who may create pods can give one the labels of an agent, and owner references too. So only pods in the namespace of Divvy's installation are
//! asked. Only an administrator can write there, and only an administrator can write what names this namespace: the ConfigMap in `kube-public` by which
//! `divvy why` finds the explainer. Without the explainer, it is the namespace of the agent's DaemonSet. Anybody who may create a DaemonSet can copy its
//! labels, so with several such namespaces no agent is asked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use divvy_explainer::service_proxy::{self, CONFIG_MAP, CONFIG_MAP_NAMESPACE, SERVICE};
use divvy_kube::in_words;
use divvy_model::limits::USAGE_BYTES;
use divvy_model::usage::Usage;
use divvy_view::NoUsage;
use futures::{FutureExt as _, Stream, StreamExt as _, stream};
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::Api;
use kube::api::ListParams;
use kube::client::Body;

/// The labels of the agent's DaemonSet and of its pods.
const LABELS: &str = "app.kubernetes.io/name=divvy,app.kubernetes.io/component=agent";
/// How many agents are asked at the same time.
const AT_ONCE: usize = 8;
/// How long to wait for an agent. It waits 2 s for the driver.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where an agent answers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct AgentAddress {
    namespace: String,
    /// The path of its pod's proxy.
    path: String,
}

/// The last answer of an agent, and its entity tag.
#[derive(Debug, Clone)]
struct LastUsage {
    tag: header::HeaderValue,
    usage: Usage,
}

/// The agents.
pub struct Agents {
    client: kube::Client,
    /// The namespace of Divvy's installation, once it is known.
    namespace: OnceLock<String>,
    addresses: Mutex<BTreeMap<String, AgentAddress>>,
    known: Mutex<BTreeMap<String, LastUsage>>,
}

impl std::fmt::Debug for Agents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agents").field("known", &self.known).finish_non_exhaustive()
    }
}

fn refused(what: &str, error: &kube::Error) -> NoUsage {
    match error {
        kube::Error::Api(status) if status.code == 403 => NoUsage::Forbidden { right: what.to_owned() },
        error => NoUsage::Other(in_words(error)),
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Agents {
    pub fn new(client: kube::Client) -> Agents {
        Agents {
            client,
            namespace: OnceLock::new(),
            addresses: Mutex::default(),
            known: Mutex::default(),
        }
    }

    /// Ask the agents of these nodes, a few at the same time, and return their answers as they arrive.
    pub fn ask(&self, nodes: Vec<String>) -> impl Stream<Item = (String, Result<Usage, NoUsage>)> {
        // All nodes share one search for the namespace, even if it fails.
        let namespace = self.namespace().shared();
        let one = move |node: String| {
            let namespace = namespace.clone();
            async move {
                let late = |_| Err(NoUsage::Other(format!("no answer in {} s", PATIENCE.as_secs())));
                let asked = async { self.one(&node, &namespace.await?).await };
                let answer = tokio::time::timeout(PATIENCE, asked).await.unwrap_or_else(late);
                (node, answer)
            }
        };
        stream::iter(nodes).map(one).buffer_unordered(AT_ONCE)
    }

    /// Return the namespace of Divvy's installation.
    async fn namespace(&self) -> Result<String, NoUsage> {
        if let Some(known) = self.namespace.get() {
            return Ok(known.clone());
        }
        let namespace = match self.of_explainer().await? {
            Some(namespace) => namespace,
            None => self.of_daemon_set().await?,
        };
        Ok(self.namespace.get_or_init(|| namespace).clone())
    }

    /// Return the namespace of the explainer. `None` if it is switched off.
    async fn of_explainer(&self) -> Result<Option<String>, NoUsage> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), CONFIG_MAP_NAMESPACE);
        let found = match maps.get_opt(CONFIG_MAP).await {
            // The chart installs the ConfigMap together with the right of everybody to read it.
            Err(kube::Error::Api(status)) if status.code == 403 => None,
            Err(error) => return Err(NoUsage::Other(in_words(&error))),
            Ok(found) => found,
        };
        let service = found.and_then(|map| map.data?.remove(SERVICE));
        Ok(service
            .and_then(|service| service_proxy::ServiceAddress::parse(&service))
            .map(|address| address.namespace))
    }

    /// Return the namespace of the agent's DaemonSet if there is only one.
    async fn of_daemon_set(&self) -> Result<String, NoUsage> {
        let sets: Api<DaemonSet> = Api::all(self.client.clone());
        let list = sets.list_metadata(&ListParams::default().labels(LABELS).limit(20)).await;
        let list = list.map_err(|error| refused("list daemonsets.apps in all namespaces", &error))?;
        let mut namespaces: BTreeSet<String> = list.items.into_iter().filter_map(|set| set.metadata.namespace).collect();
        match (namespaces.len(), namespaces.pop_first()) {
            (1, Some(only)) => Ok(only),
            (_, Some(first)) => {
                let others: Vec<String> = namespaces.into_iter().collect();
                let why = format!(
                    "the namespaces {first} and {} have DaemonSets with the labels of Divvy's agent, and it is not known which is Divvy's; delete the \
                     others, or install Divvy with explainer.enabled=true",
                    others.join(", ")
                );
                Err(NoUsage::Unclear { why })
            }
            (_, None) => Err(NoUsage::Unclear {
                why: "the cluster has no DaemonSet of Divvy's agent; type divvy doctor --cluster to find the cause".to_owned(),
            }),
        }
    }

    async fn one(&self, node: &str, namespace: &str) -> Result<Usage, NoUsage> {
        let known = lock(&self.addresses).get(node).cloned();
        let address = match known {
            Some(address) => address,
            None => self.find(node, namespace).await?,
        };
        let answer = self.get(node, &address).await;
        // The agent's pod may be another one by now.
        if answer.is_err() {
            lock(&self.addresses).remove(node);
        }
        answer
    }

    /// Find the agent of a node.
    async fn find(&self, node: &str, namespace: &str) -> Result<AgentAddress, NoUsage> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let params = ListParams::default()
            .labels(LABELS)
            .fields(&format!("spec.nodeName={node}"))
            .limit(10);
        let list = pods.list(&params).await;
        let list = list.map_err(|error| refused(&format!("list pods in the namespace {namespace}"), &error))?;
        let agents = list.items.iter().filter(|pod| is_running(pod) && is_of_daemon_set(pod));
        let address = agents.into_iter().find_map(address);
        let address = address.ok_or_else(|| NoUsage::Other("no agent runs".to_owned()))?;
        lock(&self.addresses).insert(node.to_owned(), address.clone());
        Ok(address)
    }

    async fn get(&self, node: &str, address: &AgentAddress) -> Result<Usage, NoUsage> {
        let known = lock(&self.known).get(node).cloned();
        let mut request = Request::get(&address.path);
        if let Some(LastUsage { tag, .. }) = &known {
            request = request.header(header::IF_NONE_MATCH, tag);
        }
        let request = request
            .body(Body::empty())
            .map_err(|error| NoUsage::Other(error.to_string()))?;
        let response = self.client.send(request).await;
        let response = response.map_err(|error| NoUsage::Other(in_words(&error)))?;
        match (response.status(), known) {
            (StatusCode::NOT_MODIFIED, Some(known)) => return Ok(known.usage),
            (StatusCode::OK, _) => {}
            (StatusCode::FORBIDDEN, _) => {
                let right = format!("get pods/proxy in the namespace {}", address.namespace);
                return Err(NoUsage::Forbidden { right });
            }
            (StatusCode::NOT_FOUND, _) => return Err(NoUsage::Other("the agent is older and says nothing of it".to_owned())),
            (status, _) => return Err(NoUsage::Other(format!("the agent cannot be asked ({status})"))),
        }
        let tag = response.headers().get(header::ETAG).cloned();
        let body = Limited::new(response.into_body(), USAGE_BYTES).collect().await;
        let body = body.map_err(|error| NoUsage::Other(format!("the answer was cut off: {error}")))?;
        let text =
            String::from_utf8(body.to_bytes().into()).map_err(|_| NoUsage::Other("the answer is not UTF-8 text".to_owned()))?;
        let usage = Usage::parse(&text).map_err(|error| NoUsage::Other(error.to_string()))?;
        let mut all = lock(&self.known);
        match tag {
            Some(tag) => {
                let usage = usage.clone();
                all.insert(node.to_owned(), LastUsage { tag, usage });
            }
            None => drop(all.remove(node)),
        }
        Ok(usage)
    }
}

fn is_running(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    phase == Some("Running") && pod.metadata.deletion_timestamp.is_none()
}

/// Report whether a DaemonSet controls a pod, as it does an agent's pod. Other pods of Divvy's namespace, such as a copy for debugging, are not agents.
fn is_of_daemon_set(pod: &Pod) -> bool {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.controller == Some(true) && owner.kind == "DaemonSet")
}

/// Return where the agent in a pod answers: at the port with the name `metrics`.
fn address(pod: &Pod) -> Option<AgentAddress> {
    let containers = &pod.spec.as_ref()?.containers;
    let mut ports = containers.iter().flat_map(|container| container.ports.iter().flatten());
    let port = ports.find(|port| port.name.as_deref() == Some("metrics"))?.container_port;
    let (namespace, name) = (pod.metadata.namespace.clone()?, pod.metadata.name.as_ref()?);
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy/v1/usage");
    Some(AgentAddress { namespace, path })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::Router;
    use axum::response::{IntoResponse as _, Response};
    use futures::future::BoxFuture;
    use serde_json::{Value, json};

    use super::*;

    const TAG: &str = "\"a-1\"";

    type Asked = Request<axum::body::Body>;

    /// Return the agents of a cluster in which every node but `bare` has one. `agent` answers for them.
    fn agents(agent: impl Fn(Asked) -> BoxFuture<'static, Response> + Clone + Send + Sync + 'static) -> Agents {
        installed(Some("divvy-system/divvy-explainer:why"), &["divvy-system"], agent)
    }

    fn pod(node: &str, owner: &str) -> Value {
        json!({
            "metadata": {
                "namespace": "divvy-system", "name": format!("agent-{node}"),
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": owner, "name": "divvy-agent", "uid": "u", "controller": true}],
            },
            "spec": {"containers": [{"name": "agent", "ports": [{"name": "metrics", "containerPort": 9400}]}]},
            "status": {"phase": "Running"},
        })
    }

    /// Return the agents of a cluster whose ConfigMap names this Service, and in which these namespaces have DaemonSets with the agent's labels.
    fn installed(
        service: Option<&'static str>,
        sets: &'static [&'static str],
        agent: impl Fn(Asked) -> BoxFuture<'static, Response> + Clone + Send + Sync + 'static,
    ) -> Agents {
        let list = |kind: &str, items: Vec<Value>| {
            axum::Json(json!({"kind": kind, "apiVersion": "v1", "metadata": {}, "items": items})).into_response()
        };
        let router = Router::new().fallback(move |request: Asked| {
            let agent = agent.clone();
            async move {
                match request.uri().path() {
                    "/api/v1/namespaces/kube-public/configmaps/divvy" => match service {
                        Some(service) => {
                            axum::Json(json!({"metadata": {"name": "divvy"}, "data": {"service": service}})).into_response()
                        }
                        None => (
                            StatusCode::NOT_FOUND,
                            axum::Json(json!({"code": 404, "reason": "NotFound", "message": "none"})),
                        )
                            .into_response(),
                    },
                    "/apis/apps/v1/daemonsets" => {
                        let set = |namespace: &&str| json!({"metadata": {"name": "divvy-agent", "namespace": namespace}});
                        list("PartialObjectMetadataList", sets.iter().map(set).collect())
                    }
                    "/api/v1/namespaces/divvy-system/pods" => {
                        let query = request.uri().query().unwrap_or_default();
                        let node = query.split("spec.nodeName%3D").nth(1).and_then(|rest| rest.split('&').next());
                        let node = node.unwrap_or_else(|| panic!("no node in {query}"));
                        list(
                            "PodList",
                            match node {
                                "bare" => Vec::new(),
                                "copied" => vec![pod(node, "ReplicaSet")],
                                node => vec![pod(node, "DaemonSet")],
                            },
                        )
                    }
                    _ => agent(request).await,
                }
            }
        });
        Agents::new(kube::Client::new(router, "default"))
    }

    #[tokio::test]
    async fn only_agents_in_divvys_namespace_are_asked() {
        let answers = |request: Asked| -> BoxFuture<'static, Response> {
            let path = request.uri().path().to_owned();
            Box::pin(async move {
                assert!(
                    path.starts_with("/api/v1/namespaces/divvy-system/pods/agent-n1:9400/"),
                    "{path}"
                );
                r#"{"v":1,"sample":1}"#.into_response()
            })
        };
        let explainer = Some("divvy-system/divvy-explainer:why");
        for (service, sets) in [
            (explainer, &["divvy-system"][..]),
            // A user of the namespace ml has copied the DaemonSet.
            (explainer, &["divvy-system", "ml"]),
            (explainer, &[]),
            (None, &["divvy-system"]),
            (Some("no address"), &["divvy-system"]),
        ] {
            let found = ask(&installed(service, sets, answers), "n1").await;
            assert!(found.is_ok(), "{service:?} {sets:?} {found:?}");
        }
        for (sets, expected) in [
            (&["divvy-system", "ml"][..], "namespaces divvy-system and ml have DaemonSets"),
            (&[], "no DaemonSet of Divvy's agent"),
        ] {
            let failure = ask(&installed(None, sets, answers), "n1").await.expect_err(expected);
            let notice = failure.notice().expect("a notice");
            assert!(notice.contains(expected), "{notice}");
        }
        // Only the pods of a DaemonSet are agents.
        let text = ask(&agents(answers), "copied").await.expect_err("no agent").to_string();
        assert_eq!(text, "no agent runs");
    }

    async fn ask(agents: &Agents, node: &str) -> Result<Usage, NoUsage> {
        let mut answers = std::pin::pin!(agents.ask(vec![node.to_owned()]));
        answers.next().await.expect("an answer").1
    }

    #[tokio::test]
    async fn an_answer_that_has_not_changed_is_not_sent_again() {
        let agents = agents(|request| {
            Box::pin(async move {
                assert_eq!(
                    request.uri().path(),
                    "/api/v1/namespaces/divvy-system/pods/agent-n1:9400/proxy/v1/usage"
                );
                match request.headers().get(header::IF_NONE_MATCH) {
                    Some(tag) if tag == TAG => StatusCode::NOT_MODIFIED.into_response(),
                    Some(tag) => panic!("{tag:?}"),
                    None => ([(header::ETAG, TAG)], r#"{"v":1,"sample":7}"#).into_response(),
                }
            })
        });
        for _ in 0..3 {
            assert_eq!(ask(&agents, "n1").await.expect("read").sample, 7);
        }
    }

    #[tokio::test]
    async fn an_answer_that_cannot_be_used_is_a_failure_in_few_words() {
        let large = "x".repeat(10 << 20);
        for (status, body, expected) in [
            (StatusCode::OK, large.as_str(), "the answer was cut off"),
            (StatusCode::OK, "<html>", "cannot be read"),
            (StatusCode::OK, r#"{"v":1,"sample":1,"gpus":[{"uuid":""}]}"#, "malformed"),
            (StatusCode::NOT_FOUND, "", "the agent is older"),
            (StatusCode::SERVICE_UNAVAILABLE, "", "503"),
        ] {
            let body = body.to_owned();
            let agents = agents(move |_| {
                let answer = (status, body.clone()).into_response();
                Box::pin(async move { answer })
            });
            let failure = ask(&agents, "n1").await.expect_err(expected);
            let text = failure.to_string();
            assert!(text.contains(expected) && text.len() < 200, "{text}");
            assert_eq!(failure.notice(), None);
        }
        let nobody = agents(|_| Box::pin(async { panic!("no agent runs") }));
        let text = ask(&nobody, "bare").await.expect_err("no agent").to_string();
        assert_eq!(text, "no agent runs");
    }

    #[tokio::test]
    async fn without_the_right_the_notice_names_it() {
        let agents = agents(|_| Box::pin(async { StatusCode::FORBIDDEN.into_response() }));
        let notice = ask(&agents, "n1").await.expect_err("forbidden").notice().expect("a notice");
        assert!(notice.contains("get pods/proxy in the namespace divvy-system"), "{notice}");
    }

    #[tokio::test]
    async fn only_a_few_agents_are_asked_at_the_same_time() {
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let seen = most.clone();
        let agents = agents(move |_| {
            let (now, most) = (now.clone(), most.clone());
            Box::pin(async move {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                // All others that are asked now are asked before this one answers.
                for _ in 0..1000 {
                    tokio::task::yield_now().await;
                }
                now.fetch_sub(1, Ordering::SeqCst);
                r#"{"v":1,"sample":1}"#.into_response()
            })
        });
        let nodes = (0..40).map(|number| format!("n{number}")).collect();
        let answers: Vec<_> = agents.ask(nodes).collect().await;
        assert!(
            answers.len() == 40 && answers.iter().all(|(_, answer)| answer.is_ok()),
            "{answers:?}"
        );
        assert_eq!(seen.load(Ordering::SeqCst), AT_ONCE);
    }
}
