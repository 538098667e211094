//! Users who may not list nodes and pods ask the extender why their pod waits.

use std::sync::Arc;
use std::time::Duration;

use divvy_extender::Surroundings;
use divvy_extender::tls::plan::{Data, keys};
use divvy_testbed::api::{ApiServer, Effect, Match, Right, Rule};
use divvy_testbed::builders::pod;
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;

use crate::tls::{
    NAME, Running, Tls, as_nobody, as_scheduler, ask, cluster, connect, secret_source, start_with, until, until_made, until_ready,
};

/// A cluster with a pod of `ml` that waits, and pods of `ml` and `other` that hold what it waits for.
async fn extender() -> (ApiServer, Running, Data) {
    let api = cluster();
    for namespace in ["ml", "other"] {
        api.create("namespaces", json!({"metadata": {"name": namespace}}))
            .expect("a namespace");
    }
    let holds = |name: &str, namespace: &str, index: u32| {
        let mut pod = pod(name).namespace(namespace).gpu_mem(8).on_node("n1").build();
        pod["metadata"]["annotations"] = json!({
            "ALIYUN_COM_GPU_MEM_IDX": index.to_string(), "ALIYUN_COM_GPU_MEM_POD": "8", "ALIYUN_COM_GPU_MEM_DEV": "16",
            "ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"});
        pod
    };
    for pod in [
        pod("mine").namespace("ml").gpu_mem(8).build(),
        holds("neighbour", "ml", 0),
        holds("stranger", "other", 0),
    ] {
        api.create("pods", pod).expect("a legal pod");
    }
    api.create(
        "configmaps",
        json!({"metadata": {"name": "divvy", "namespace": "kube-public"}, "data": {"service": "a/b:c"}}),
    )
    .expect("a ConfigMap");
    api.rights().limit("nobody");
    for (user, right) in [
        ("getter", Right::new(&["get"], "pods").in_namespace("ml").named("mine")),
        ("member", Right::new(&["get", "list"], "pods").in_namespace("ml")),
        ("viewer", Right::new(&["get", "list"], "pods")),
        ("outsider", Right::new(&["get", "list"], "pods").in_namespace("other")),
    ] {
        api.rights().grant(user, right);
    }
    let surroundings = Surroundings {
        tls: Some(secret_source(3_600)),
        why: Some(("kube-public".to_owned(), "divvy".to_owned())),
        ..Surroundings::default()
    };
    let running = start_with(&api, surroundings).await;
    let data = until_made(&api).await;
    until_ready(&running, &data).await;
    (api, running, data)
}

fn question(path: &str, authorization: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: x\r\n{authorization}\r\n")
}

async fn asked(running: &Running, data: &Data, path: &str, token: &str) -> (String, Value) {
    let authorization = match token {
        "" => String::new(),
        token => format!("authorization: Bearer {token}\r\n"),
    };
    let mut stream = connect(running, as_nobody(data)).await.expect("a connection");
    let (status, body) = ask(&mut stream, &question(path, &authorization)).await.expect("an answer");
    (status, serde_json::from_str(&body).unwrap_or(Value::String(body)))
}

#[tokio::test]
async fn who_may_get_the_pod_is_answered_and_sees_the_names_that_it_may_list() {
    let (api, running, data) = extender().await;
    api.rights().revoke_token("viewer-gone");
    for (token, status, words, hidden) in [
        ("", "401", "a question needs the user's token", &[][..]),
        ("viewer-gone", "401", "the API server does not know the token", &[]),
        ("nobody", "403", "nobody may not get pod ml/mine", &[]),
        ("outsider", "403", "outsider may not get pod ml/mine", &[]),
        (
            "getter",
            "200",
            "other pods are shown without their names",
            &["neighbour", "stranger"],
        ),
        (
            "member",
            "200",
            "pods of other namespaces are shown without their names",
            &["stranger"],
        ),
        ("viewer", "200", "other/stranger", &[]),
    ] {
        let (found, answer) = asked(&running, &data, "/why/ml/mine", token).await;
        let text = answer.to_string();
        assert!(found.contains(status), "{token}: {found} {text}");
        assert!(text.to_lowercase().contains(words) || text.contains(words), "{token}: {text}");
        for name in hidden {
            assert!(!text.contains(name), "{token}: {text}");
        }
        if status == "200" {
            assert_eq!(answer["closest"][0]["node"], "n1", "{text}");
            assert_eq!(
                answer["closest"][0]["gpus"][0]["heldBy"].as_array().map(Vec::len),
                Some(2),
                "{text}"
            );
            assert_eq!(answer["nodes"], Value::Null, "only on request");
        }
    }
    let (_, all) = asked(&running, &data, "/why/ml/mine?allNodes=true", "member").await;
    assert_eq!(all["nodes"].as_array().map(Vec::len), Some(1), "{all}");
    // A certificate is no token.
    let mut stream = connect(&running, as_scheduler(&data)).await.expect("a connection");
    let (status, _) = ask(&mut stream, &question("/why/ml/mine", "")).await.expect("an answer");
    assert!(status.contains("401"), "{status}");
}

#[tokio::test]
async fn a_question_that_cannot_be_answered_is_refused_in_words() {
    let (api, running, data) = extender().await;
    let mut heavy = pod("heavy").namespace("ml").gpu_mem(8).build();
    let values: Vec<String> = (0..1_000).map(|number| format!("a-long-value-of-a-label-{number}")).collect();
    heavy["spec"]["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": values}]}]}}});
    api.create("pods", heavy).expect("a legal pod");
    for (path, status, words) in [
        ("/why/ml/none", "404", "pods \"none\" not found"),
        ("/why/ml/heavy", "422", "more rules for nodes and other pods than 16 KiB"),
        ("/why/ml/..%2f..%2fsecrets", "400", "the request names no pod"),
        ("/why/m%0al/x", "400", "the request names no pod"),
        ("/why", "400", "Upgrade: divvy-why"),
        ("/why/ml", "404", "there is no such path"),
    ] {
        let (found, answer) = asked(&running, &data, path, "member").await;
        assert!(
            found.contains(status) && answer.to_string().replace('\\', "").contains(words),
            "{path}: {found} {answer}"
        );
    }
    for odd in [
        "authorization: Basic YTpi\r\n",
        "authorization: Bearer \r\n",
        "authorization: Béarer x\r\n",
    ] {
        let mut stream = connect(&running, as_nobody(&data)).await.expect("a connection");
        let (status, body) = ask(&mut stream, &question("/why/ml/mine", odd)).await.expect("an answer");
        assert!(
            status.contains("401") && body.contains("holds no token"),
            "{odd}: {status} {body}"
        );
    }
    let refused = Effect::Refuse {
        code: 500,
        retry_after_s: None,
    };
    let rule = api
        .faults()
        .add(Rule::new(Match::any().verb("list").resource("nodes"), refused));
    let (status, answer) = asked(&running, &data, "/why/ml/mine", "member").await;
    assert!(
        status.contains("503") && answer.to_string().contains("nodes could not be listed"),
        "{status} {answer}"
    );
    api.faults().remove(rule);
    assert!(asked(&running, &data, "/why/ml/mine", "member").await.0.contains("200"));
}

#[tokio::test]
async fn those_who_ask_at_once_share_one_look_at_the_cluster() {
    let (api, running, data) = extender().await;
    let slowly = Effect::Latency(Duration::from_millis(200));
    let rule = api
        .faults()
        .add(Rule::new(Match::any().verb("list").resource("pods").namespace(""), slowly));
    let questions = (0..8).map(|_| asked(&running, &data, "/why/ml/mine", "member"));
    for (status, answer) in futures::future::join_all(questions).await {
        assert!(status.contains("200"), "{status} {answer}");
    }
    assert_eq!(api.faults().fired(rule), 1);
}

#[tokio::test]
async fn users_know_the_extender_by_the_certificate_in_the_configmap() {
    let (api, _running, data) = extender().await;
    let written = until("it is written", async || {
        let map = api.get("configmaps", "kube-public", "divvy").expect("there");
        map["data"]["ca.crt"].as_str().map(str::to_owned)
    })
    .await;
    assert_eq!(written.as_bytes(), data[keys::CA]);
    let map = api.get("configmaps", "kube-public", "divvy").expect("there");
    assert_eq!(map["data"]["service"], "a/b:c", "the rest stays");
}

/// Within a connection whose certificate nobody looked at, as the API server makes it.
async fn tunnel(running: &Running, data: &Data) -> Result<tokio_rustls::client::TlsStream<Tls>, String> {
    let mut outer = connect(running, as_nobody(data)).await.map_err(|error| error.to_string())?;
    let upgrade = "GET /why HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: divvy-why\r\n\r\n";
    outer.write_all(upgrade.as_bytes()).await.map_err(|error| error.to_string())?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(outer.read_u8().await.map_err(|error| error.to_string())?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    if !head.starts_with("HTTP/1.1 101") {
        return Err(head);
    }
    let name = ServerName::try_from(NAME).expect("a name");
    let inner = TlsConnector::from(Arc::new(as_nobody(data))).connect(name, outer).await;
    inner.map_err(|error| error.to_string())
}

#[tokio::test]
async fn within_a_tunnel_several_questions_are_answered_and_there_are_few_tunnels() {
    let (_api, running, data) = extender().await;
    let mut tunnels = Vec::new();
    for _ in 0..8 {
        tunnels.push(tunnel(&running, &data).await.expect("a tunnel"));
    }
    let refused = tunnel(&running, &data).await.expect_err("one too many");
    assert!(refused.contains("503"), "{refused}");
    let one = tunnels.last_mut().expect("one");
    for (user, status) in [("member", "200"), ("nobody", "403"), ("member", "200")] {
        let text = question("/why/ml/mine", &format!("authorization: Bearer {user}\r\n"));
        let (found, body) = ask(one, &text).await.expect("an answer");
        assert!(found.contains(status), "{found} {body}");
    }
    // Nothing else is served there.
    for path in ["/why", "/gpushare-scheduler/inspect", "/metrics"] {
        let (found, body) = ask(one, &question(path, "authorization: Bearer viewer\r\n"))
            .await
            .unwrap_or_default();
        assert!(!found.contains("200"), "{path}: {found} {body}");
    }
    tunnels.pop();
    until("there is a place again", async || tunnel(&running, &data).await.ok()).await;
}
