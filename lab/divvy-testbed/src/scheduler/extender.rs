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
pub struct Extender {
    url: String,
    timeout: Duration,
    managed: BTreeSet<String>,
    http: HttpClient<HttpConnector, Full<Bytes>>,
}

/// The response to filter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filtered {
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

fn error_of(value: &Value) -> Result<(), String> {
    match field(value, "Error").and_then(Value::as_str) {
        Some(error) if !error.is_empty() => Err(error.to_owned()),
        _ => Ok(()),
    }
}

/// Parse the response to a filter call for the nodes `asked`.
pub fn read_filtered(url: &str, asked: &[String], answer: &Value) -> Result<Filtered, String> {
    error_of(answer)?;
    let names: Option<Vec<String>> = match (field(answer, "NodeNames"), field(answer, "Nodes")) {
        (Some(names), _) => Some(
            names
                .as_array()
                .ok_or_else(|| format!("json: cannot unmarshal {names} into Go struct field ExtenderFilterResult.NodeNames"))?
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
        return Err(format!(
            "extender {url:?} claims a filtered node {stranger:?} which is not found in the input node list"
        ));
    }
    let mut failed = BTreeMap::new();
    for map in ["FailedNodes", "FailedAndUnresolvableNodes"] {
        for (node, reason) in field(answer, map).and_then(Value::as_object).into_iter().flatten() {
            failed.insert(node.clone(), reason.as_str().unwrap_or_default().to_owned());
        }
    }
    Ok(Filtered { fits, failed })
}

impl Extender {
    /// Create an extender whose verbs are at `<url>/<verb>`.
    pub fn new(url: &str, timeout: Duration, managed: impl IntoIterator<Item = String>) -> Extender {
        Extender {
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
    pub async fn filter(&self, pod: &Pod, nodes: &[String]) -> Result<Filtered, String> {
        let answer = self
            .send("filter", &json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}))
            .await?;
        read_filtered(&self.url, nodes, &answer)
    }

    /// Call prioritize: return scores from 0 to 10.
    pub async fn prioritize(&self, verb: &str, pod: &Pod, nodes: &[String]) -> Result<BTreeMap<String, i64>, String> {
        let answer = self
            .send(verb, &json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}))
            .await?;
        let list = answer
            .as_array()
            .ok_or_else(|| "json: cannot unmarshal object into Go value of type HostPriorityList".to_owned())?;
        let one = |entry: &Value| Some((field(entry, "Host")?.as_str()?.to_owned(), field(entry, "Score")?.as_i64()?));
        Ok(list.iter().filter_map(one).collect())
    }

    /// Call preempt with the victims' UIDs by node. Return the remaining nodes with the victims that the extender wants.
    pub async fn preempt(
        &self,
        verb: &str,
        pod: &Pod,
        victims: &BTreeMap<String, Vec<String>>,
    ) -> Result<BTreeMap<String, Vec<String>>, String> {
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
                return Err(format!("expected at least one victim pod on node {node:?}"));
            }
            Ok((node.clone(), uids))
        };
        left.into_iter().flatten().map(uids).collect()
    }

    /// Call bind.
    pub async fn bind(&self, namespace: &str, name: &str, uid: &str, node: &str) -> Result<(), String> {
        let body = json!({"PodName": name, "PodNamespace": namespace, "PodUID": uid, "Node": node});
        error_of(&self.send("bind", &body).await?)
    }

    async fn send(&self, verb: &str, body: &Value) -> Result<Value, String> {
        let url = format!("{}/{verb}", self.url);
        let failed = |error: &dyn std::fmt::Display| format!("Post {url:?}: {error}");
        let request = http::Request::post(&url)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .map_err(|error| failed(&error))?;
        let call = async {
            let response = self.http.request(request).await.map_err(|error| failed(&deepest(&error)))?;
            let status = response.status();
            if status != http::StatusCode::OK {
                return Err(format!(
                    "failed {verb} with extender at URL {}, code {}",
                    self.url,
                    status.as_u16()
                ));
            }
            let body = response
                .into_body()
                .collect()
                .await
                .map_err(|error| failed(&error))?
                .to_bytes();
            if body.is_empty() {
                return Err("EOF".to_owned());
            }
            serde_json::from_slice(&body).map_err(|error| error.to_string())
        };
        match tokio::time::timeout(self.timeout, call).await {
            Ok(answer) => answer,
            Err(_) => Err(failed(
                &"context deadline exceeded (Client.Timeout exceeded while awaiting headers)",
            )),
        }
    }
}

fn deepest(error: &dyn std::error::Error) -> String {
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
        let read = |answer: Value| read_filtered("http://e", &asked, &answer);
        let both = json!({"nodenames": ["n1"], "FailedNodes": {"n2": "no room"}, "Error": ""});
        let filtered = read(both).expect("answer");
        assert_eq!((filtered.fits, filtered.failed.len()), (vec!["n1".to_owned()], 1));
        let nodes = json!({"Nodes": {"items": [{"metadata": {"name": "n2"}}]}, "NodeNames": null});
        assert_eq!(read(nodes).expect("answer").fits, ["n2"]);
        assert_eq!(read(json!({})).expect("answer"), Filtered::default());
        assert_eq!(read(json!({"Error": "not the leader"})), Err("not the leader".to_owned()));
        let stranger = read(json!({"NodeNames": ["n3"]})).expect_err("stranger");
        assert!(stranger.contains("claims a filtered node \"n3\""), "{stranger}");
    }
}
