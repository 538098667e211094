//! The extender protocol from kube-scheduler's side, with its error texts (`pkg/scheduler/extender.go`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

/// An extender with `nodeCacheCapable: true`.
#[derive(Debug, Clone)]
pub struct ExtenderClient {
    url: String,
    timeout: Duration,
    managed: BTreeSet<String>,
    http: HttpClient<HttpConnector, Full<Bytes>>,
}

/// The response to filter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FilterResponse {
    /// The nodes that fit, in the extender's order.
    pub fits: Vec<String>,
    /// The nodes that do not fit, with the reason.
    pub failed: BTreeMap<String, String>,
}

/// Return a field by its Go name. Like Go's decoder, ignore the case.
fn field<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    let map = value.as_object()?;
    let found = map.get(name).or_else(|| {
        map.iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    });
    found.filter(|value| !value.is_null())
}

/// Why a call has no usable result, in kube-scheduler's words.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The extender answered with an error.
    #[error("{0}")]
    Said(String),
    /// There is no answer.
    #[error("Post {url:?}: {}", deepest(&**source))]
    Post {
        /// The verb's URL.
        url: String,
        /// What went wrong.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There is no answer in time.
    #[error("Post {0:?}: context deadline exceeded (Client.Timeout exceeded while awaiting headers)")]
    TimedOut(String),
    /// The answer's status is not 200.
    #[error("failed {verb} with extender at URL {url}, code {code}")]
    Status {
        /// The verb.
        verb: String,
        /// The extender's URL.
        url: String,
        /// The status.
        code: u16,
    },
    /// The answer is empty.
    #[error("EOF")]
    Empty,
    /// The answer is not JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The answer has another form than the verb's.
    #[error("json: cannot unmarshal {found} into Go {into}")]
    Form {
        /// What was found.
        found: String,
        /// Where it was to be.
        into: &'static str,
    },
    /// A node was not in the request.
    #[error("extender {url:?} claims a filtered node {node:?} which is not found in the input node list")]
    Stranger {
        /// The extender's URL.
        url: String,
        /// The node.
        node: String,
    },
    /// A node to preempt on has no victims.
    #[error("expected at least one victim pod on node {0:?}")]
    NoVictims(String),
}

fn error_of(value: &Value) -> Result<(), CallError> {
    match field(value, "Error").and_then(Value::as_str) {
        Some(error) if !error.is_empty() => Err(CallError::Said(error.to_owned())),
        _ => Ok(()),
    }
}

/// Parse the response to a filter call for the nodes `asked`.
pub fn read_filtered(url: &str, asked: &[String], answer: &Value) -> Result<FilterResponse, CallError> {
    error_of(answer)?;
    let names: Option<Vec<String>> = match (field(answer, "NodeNames"), field(answer, "Nodes")) {
        (Some(names), _) => Some(
            names
                .as_array()
                .ok_or_else(|| CallError::Form {
                    found: names.to_string(),
                    into: "struct field ExtenderFilterResult.NodeNames",
                })?
                .iter()
                .filter_map(|name| name.as_str().map(str::to_owned))
                .collect(),
        ),
        (None, Some(nodes)) => {
            let items = field(nodes, "items").and_then(Value::as_array);
            let name = |node: &Value| node["metadata"]["name"].as_str().map(str::to_owned);
            Some(items.into_iter().flatten().filter_map(name).collect())
        }
        (None, None) => None,
    };
    let fits = names.unwrap_or_default();
    if let Some(stranger) = fits.iter().find(|name| !asked.contains(name)) {
        return Err(CallError::Stranger {
            url: url.to_owned(),
            node: stranger.clone(),
        });
    }
    let mut failed = BTreeMap::new();
    for map in ["FailedNodes", "FailedAndUnresolvableNodes"] {
        for (node, reason) in field(answer, map).and_then(Value::as_object).into_iter().flatten() {
            failed.insert(node.clone(), reason.as_str().unwrap_or_default().to_owned());
        }
    }
    Ok(FilterResponse { fits, failed })
}

impl ExtenderClient {
    /// Create an extender whose verbs are at `<url>/<verb>`.
    pub fn new(url: &str, timeout: Duration, managed: impl IntoIterator<Item = String>) -> ExtenderClient {
        ExtenderClient {
            url: url.trim_end_matches('/').to_owned(),
            timeout,
            managed: managed.into_iter().collect(),
            http: HttpClient::builder(TokioExecutor::new()).build_http(),
        }
    }

    /// Report whether the extender must handle the pod: some container requests a managed resource, even with quantity 0.
    pub fn is_interested(&self, pod: &Pod) -> bool {
        if self.managed.is_empty() {
            return true;
        }
        let Some(spec) = &pod.spec else {
            return false;
        };
        let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        let resources = containers.filter_map(|container| container.resources.as_ref());
        let mut names = resources.flat_map(|resources| {
            [&resources.requests, &resources.limits]
                .into_iter()
                .flatten()
                .flat_map(|map| map.keys())
        });
        names.any(|name| self.managed.contains(name))
    }

    /// Call filter: return which of the nodes fit.
    pub async fn filter(&self, pod: &Pod, nodes: &[String]) -> Result<FilterResponse, CallError> {
        let answer = self
            .send("filter", &json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}))
            .await?;
        read_filtered(&self.url, nodes, &answer)
    }

    /// Call prioritize: return scores from 0 to 10.
    pub async fn prioritize(&self, verb: &str, pod: &Pod, nodes: &[String]) -> Result<BTreeMap<String, i64>, CallError> {
        let answer = self
            .send(verb, &json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}))
            .await?;
        let list = answer.as_array().ok_or_else(|| CallError::Form {
            found: "object".to_owned(),
            into: "value of type HostPriorityList",
        })?;
        let one = |entry: &Value| Some((field(entry, "Host")?.as_str()?.to_owned(), field(entry, "Score")?.as_i64()?));
        Ok(list.iter().filter_map(one).collect())
    }

    /// Call preempt with the victims' UIDs by node. Return the remaining nodes with the victims that the extender wants.
    pub async fn preempt(
        &self,
        verb: &str,
        pod: &Pod,
        victims: &BTreeMap<String, Vec<String>>,
    ) -> Result<BTreeMap<String, Vec<String>>, CallError> {
        let meta: serde_json::Map<String, Value> = victims
            .iter()
            .map(|(node, uids)| {
                let pods: Vec<Value> = uids.iter().map(|uid| json!({"UID": uid})).collect();
                (node.clone(), json!({"Pods": pods, "NumPDBViolations": 0}))
            })
            .collect();
        let body = json!({"Pod": pod, "NodeNameToVictims": null, "NodeNameToMetaVictims": meta});
        let answer = self.send(verb, &body).await?;
        let left = field(&answer, "NodeNameToMetaVictims").and_then(Value::as_object);
        let uids = |(node, of): (&String, &Value)| {
            let pods = field(of, "Pods").and_then(Value::as_array).into_iter().flatten();
            let uids: Vec<String> = pods.filter_map(|pod| Some(field(pod, "UID")?.as_str()?.to_owned())).collect();
            if uids.is_empty() {
                return Err(CallError::NoVictims(node.clone()));
            }
            Ok((node.clone(), uids))
        };
        left.into_iter().flatten().map(uids).collect()
    }

    /// Call bind.
    pub async fn bind(&self, namespace: &str, name: &str, uid: &str, node: &str) -> Result<(), CallError> {
        let body = json!({"PodName": name, "PodNamespace": namespace, "PodUID": uid, "Node": node});
        error_of(&self.send("bind", &body).await?)
    }

    async fn send(&self, verb: &str, body: &Value) -> Result<Value, CallError> {
        let url = format!("{}/{verb}", self.url);
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| CallError::Post {
            url: url.clone(),
            source,
        };
        let request = http::Request::post(&url)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .map_err(|error| failed(error.into()))?;
        let call = async {
            let response = self.http.request(request).await.map_err(|error| failed(error.into()))?;
            let status = response.status();
            if status != http::StatusCode::OK {
                return Err(CallError::Status {
                    verb: verb.to_owned(),
                    url: self.url.clone(),
                    code: status.as_u16(),
                });
            }
            let body = response
                .into_body()
                .collect()
                .await
                .map_err(|error| failed(error.into()))?
                .to_bytes();
            if body.is_empty() {
                return Err(CallError::Empty);
            }
            Ok(serde_json::from_slice(&body)?)
        };
        match tokio::time::timeout(self.timeout, call).await {
            Ok(answer) => answer,
            Err(_) => Err(CallError::TimedOut(url)),
        }
    }
}

fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    let mut at = error;
    while let Some(source) = at.source() {
        at = source;
    }
    at.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_go_reads_them() {
        let asked = ["n1".to_owned(), "n2".to_owned()];
        let read = |answer: Value| read_filtered("http://e", &asked, &answer).map_err(|error| error.to_string());
        let both = json!({"nodenames": ["n1"], "FailedNodes": {"n2": "no room"}, "Error": ""});
        let filtered = read(both).expect("answer");
        assert_eq!((filtered.fits, filtered.failed.len()), (vec!["n1".to_owned()], 1));
        let nodes = json!({"Nodes": {"items": [{"metadata": {"name": "n2"}}]}, "NodeNames": null});
        assert_eq!(read(nodes).expect("answer").fits, ["n2"]);
        assert_eq!(read(json!({})).expect("answer"), FilterResponse::default());
        assert_eq!(read(json!({"Error": "not the leader"})), Err("not the leader".to_owned()));
        let stranger = read(json!({"NodeNames": ["n3"]})).expect_err("stranger");
        assert!(stranger.contains("claims a filtered node \"n3\""), "{stranger}");
    }
}
