//! `divvy why` for users who may not list nodes and pods.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use divvy_explainer::service_proxy::SERVER_NAME;
use divvy_explainer::{ExplainerSettings, run_with};
use divvy_model::MemoryUnit;
use divvy_testbed::api::{ApiServer, ApiServerOptions, Effect, FaultRule, Match, PatchKind, Right};
use divvy_testbed::builders::pod;
use http::{Request, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_util::sync::{CancellationToken, DropGuard};

struct Explainer {
    api: ApiServer,
    address: SocketAddr,
    /// The explainer's certificate, in PEM.
    certificate: String,
    _stop: DropGuard,
}

/// A cluster with a waiting pod in namespace `ml`, and pods in `ml` and `other` that hold the memory that the waiting pod needs.
async fn explainer() -> Explainer {
    let api = ApiServer::new(ApiServerOptions::default());
    for namespace in ["ml", "other"] {
        api.create("namespaces", json!({"metadata": {"name": namespace}}))
            .expect("a namespace");
    }
    api.create("nodes", json!({"metadata": {"name": "n1"}})).expect("a node");
    let amounts = json!({"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1", "cpu": "8", "memory": "32Gi", "pods": "110"});
    let status = json!({"status": {"capacity": amounts, "allocatable": amounts}});
    api.patch("nodes/status", "", "n1", PatchKind::Merge, &status)
        .expect("a status");
    let holds = |name: &str, namespace: &str| {
        let mut pod = pod(name).namespace(namespace).gpu_mem(8).on_node("n1").build();
        pod["metadata"]["annotations"] = json!({
            "ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "8", "ALIYUN_COM_GPU_MEM_DEV": "16",
            "ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"});
        pod
    };
    for pod in [
        pod("mine").namespace("ml").gpu_mem(8).build(),
        holds("neighbor", "ml"),
        holds("stranger", "other"),
    ] {
        api.create("pods", pod).expect("a legal pod");
    }
    api.create(
        "configmaps",
        json!({"metadata": {"name": "divvy", "namespace": "kube-public"}, "data": {"service": "a/b:c"}}),
    )
    .expect("a ConfigMap");
    for user in ["limited", "teammate"] {
        api.rights().limit(user);
    }
    for (user, right) in [
        ("getter", Right::new(&["get"], "pods").in_namespace("ml").named("mine")),
        ("group-of-teammate", Right::new(&["get", "list"], "pods").in_namespace("ml")),
        ("member", Right::new(&["get", "list"], "pods").in_namespace("ml")),
        ("viewer", Right::new(&["get", "list"], "pods")),
        ("outsider", Right::new(&["get", "list"], "pods").in_namespace("other")),
    ] {
        api.rights().grant(user, right);
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let settings = ExplainerSettings {
        memory_unit: MemoryUnit::GIB,
        configmap: ("kube-public".to_owned(), "divvy".to_owned()),
    };
    let stop = CancellationToken::new();
    let (client, stopped) = (api.client(), stop.clone());
    tokio::spawn(async move { run_with(listener, client, settings, stopped).await.expect("it serves") });
    let certificate = api
        .until(Duration::from_secs(10), |api| {
            let map = api.get("configmaps", "kube-public", "divvy").ok()?;
            map["data"]["tls.crt"].as_str().map(str::to_owned)
        })
        .await;
    Explainer {
        api,
        address,
        certificate: certificate.expect("it writes its certificate"),
        _stop: stop.drop_guard(),
    }
}

type Asks = SendRequest<Empty<Bytes>>;

/// The head of a response that opens no tunnel.
#[derive(Debug)]
struct NoTunnel(String);

/// Connect as the API server's proxy does, and use TLS inside as `divvy why` does.
async fn tunnel(explainer: &Explainer) -> Result<Asks, NoTunnel> {
    let mut outer = TcpStream::connect(explainer.address).await.expect("connected");
    let upgrade = "GET /why HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: divvy-why\r\n\r\n";
    outer.write_all(upgrade.as_bytes()).await.expect("sent");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(outer.read_u8().await.expect("a head"));
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    if !head.starts_with("HTTP/1.1 101") {
        return Err(NoTunnel(head));
    }
    let mut roots = rustls::RootCertStore::empty();
    let certificate = CertificateDer::from_pem_slice(explainer.certificate.as_bytes()).expect("PEM");
    roots.add(certificate).expect("a certificate");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(SERVER_NAME).expect("a name");
    let inner = TlsConnector::from(Arc::new(config)).connect(name, outer).await;
    let inner = TokioIo::new(inner.expect("TLS"));
    let (sender, connection) = http1::handshake(inner).await.expect("HTTP");
    tokio::spawn(connection);
    Ok(sender)
}

async fn ask_with(asks: &mut Asks, path: &str, authorization: Option<&str>) -> (u16, Value) {
    let mut request = Request::get(path).header(header::HOST, "x");
    if let Some(authorization) = authorization {
        request = request.header(header::AUTHORIZATION, authorization.as_bytes());
    }
    asks.ready().await.expect("open");
    let response = asks
        .send_request(request.body(Empty::new()).expect("legal"))
        .await
        .expect("an answer");
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.expect("whole").to_bytes();
    let text = || Value::String(String::from_utf8_lossy(&body).into_owned());
    (status, serde_json::from_slice(&body).unwrap_or_else(|_| text()))
}

async fn asked(explainer: &Explainer, path: &str, token: &str) -> (u16, Value) {
    let mut asks = tunnel(explainer).await.expect("a tunnel");
    let bearer = format!("Bearer {token}");
    ask_with(&mut asks, path, Some(bearer.as_str()).filter(|_| !token.is_empty())).await
}

/// Only a user who may get the pod is answered.
#[tokio::test]
async fn answers_have_only_names_the_user_may_list() {
    let explainer = explainer().await;
    explainer.api.rights().revoke_token("viewer-gone");
    let own = "Pods of other namespaces are shown without their names";
    for (token, status, words, hidden) in [
        ("", 401, "the request has no token of the user", &[][..]),
        ("viewer-gone", 401, "the API server does not accept the token", &[]),
        ("limited", 403, "limited may not get pod ml/mine", &[]),
        ("outsider", 403, "outsider may not get pod ml/mine", &[]),
        (
            "getter",
            200,
            "Other pods are shown without their names",
            &["neighbor", "stranger"],
        ),
        ("member", 200, own, &["stranger"]),
        // A user whose rights come from a group.
        ("teammate", 200, own, &["stranger"]),
        ("viewer", 200, "other/stranger", &[]),
    ] {
        let (found, answer) = asked(&explainer, "/why/ml/mine", token).await;
        let text = answer.to_string();
        assert_eq!(found, status, "{token}: {text}");
        assert!(text.contains(words), "{token}: {text}");
        for name in hidden {
            assert!(!text.contains(name), "{token}: {text}");
        }
        if status == 200 {
            assert_eq!(answer["closest"][0]["node"], "n1", "{text}");
            let holders = answer["closest"][0]["gpus"][0]["heldBy"].as_array().map(Vec::len);
            assert_eq!(holders, Some(2), "{text}");
            assert_eq!(answer["nodes"], Value::Null, "only on request");
        }
    }
    let (_, all) = asked(&explainer, "/why/ml/mine?allNodes=true", "member").await;
    assert_eq!(all["nodes"].as_array().map(Vec::len), Some(1), "{all}");
}

#[tokio::test]
async fn a_question_that_cannot_be_answered_is_refused_in_words() {
    let explainer = explainer().await;
    let api = &explainer.api;
    let mut heavy = pod("heavy").namespace("ml").gpu_mem(8).build();
    let values: Vec<String> = (0..1_000).map(|number| format!("a-long-value-of-a-label-{number}")).collect();
    heavy["spec"]["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": values}]}]}}});
    let mut claims = pod("claims").namespace("ml").gpu_mem(8).build();
    let volume = |number: u32| json!({"name": format!("v{number}"), "persistentVolumeClaim": {"claimName": "data"}});
    claims["spec"]["volumes"] = (0..33).map(volume).collect();
    for pod in [heavy, claims] {
        api.create("pods", pod).expect("a legal pod");
    }
    for (path, status, words) in [
        ("/why/ml/none", 404, "pods \"none\" not found"),
        ("/why/ml/heavy", 422, "more than 16 KiB of rules for nodes and other pods"),
        ("/why/ml/claims", 422, "more than 32 volume claims"),
        ("/why/ml/..%2f..%2fsecrets", 400, "with lower-case letters, digits"),
        ("/why/m%0al/x", 400, "with lower-case letters, digits"),
        // Nothing else is served inside.
        ("/why", 404, "send questions as GET /why/NAMESPACE/POD"),
        ("/why/ml", 404, "send questions as GET /why/NAMESPACE/POD"),
        ("/metrics", 404, "send questions as GET /why/NAMESPACE/POD"),
    ] {
        let (found, answer) = asked(&explainer, path, "member").await;
        let text = answer["error"].as_str().unwrap_or_default();
        assert!(found == status && text.contains(words), "{path}: {found} {answer}");
    }
    for odd in ["Basic YTpi", "Bearer ", "Béarer x"] {
        let mut asks = tunnel(&explainer).await.expect("a tunnel");
        let (status, body) = ask_with(&mut asks, "/why/ml/mine", Some(odd)).await;
        assert!(
            status == 401 && body.to_string().contains("does not contain a token"),
            "{odd}: {status} {body}"
        );
    }
    // No question is accepted outside of TLS.
    let mut plain = TcpStream::connect(explainer.address).await.expect("a connection");
    let request = "GET /why/ml/mine HTTP/1.1\r\nhost: x\r\nauthorization: Bearer member\r\nconnection: close\r\n\r\n";
    plain.write_all(request.as_bytes()).await.expect("sent");
    let mut text = String::new();
    plain.read_to_string(&mut text).await.expect("read");
    assert!(text.starts_with("HTTP/1.1 404") && !text.contains("neighbor"), "{text}");
}

/// The answer says that the cluster cannot be read.
#[tokio::test]
async fn an_unreadable_cluster_is_not_read_per_question() {
    let explainer = explainer().await;
    let api = &explainer.api;
    let refused = Effect::Refuse(500);
    let rule = api
        .faults()
        .add(FaultRule::new(Match::any().verb("list").resource("nodes"), refused));
    for _ in 0..3 {
        let (status, answer) = asked(&explainer, "/why/ml/mine", "member").await;
        assert!(
            status == 503 && answer.to_string().contains("nodes could not be listed"),
            "{status} {answer}"
        );
    }
    assert_eq!(api.faults().fired(rule), 1);
    api.faults().remove(rule);
    let began = std::time::Instant::now();
    while asked(&explainer, "/why/ml/mine", "member").await.0 != 200 {
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "it is read again some seconds later"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn users_who_ask_at_once_share_one_reading_of_the_cluster() {
    let explainer = explainer().await;
    let api = &explainer.api;
    let slowly = Effect::Latency(Duration::from_millis(200));
    let rule = api.faults().add(FaultRule::new(
        Match::any().verb("list").resource("pods").namespace(""),
        slowly,
    ));
    let questions = (0..8).map(|_| asked(&explainer, "/why/ml/mine", "member"));
    for (status, answer) in futures::future::join_all(questions).await {
        assert_eq!(status, 200, "{answer}");
    }
    assert_eq!(api.faults().fired(rule), 1);
}

/// A question keeps its turn until the answer has been computed, even if the user disconnects.
#[tokio::test]
async fn questions_that_nobody_waits_for_any_more_still_count() {
    let explainer = explainer().await;
    let api = &explainer.api;
    let forever = Effect::Latency(Duration::from_secs(600));
    let rule = api.faults().add(FaultRule::new(
        Match::any().verb("list").resource("pods").namespace(""),
        forever,
    ));
    for _ in 0..8 {
        let mut asks = tunnel(&explainer).await.expect("a tunnel");
        let request = Request::get("/why/ml/mine").header(header::AUTHORIZATION, "Bearer member");
        let request = request.body(Empty::<Bytes>::new()).expect("legal");
        let asking = asks.send_request(request);
        assert!(
            tokio::time::timeout(Duration::from_millis(500), asking).await.is_err(),
            "it takes long"
        );
    }
    assert_eq!(api.faults().fired(rule), 1);
    let (status, answer) = asked(&explainer, "/why/ml/mine", "member").await;
    assert!(
        status == 503 && answer.to_string().contains("8 other questions are being answered"),
        "{status} {answer}"
    );
}

/// The labels of the pod count, too, and the answer says that pods were not kept whole.
#[tokio::test]
async fn a_pod_with_many_rules_is_kept_partly() {
    let explainer = explainer().await;
    let term =
        |number: u32| json!({"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": format!("a-name-{number}")}}});
    let mut heavy = pod("heavy").namespace("other").on_node("n1").build();
    heavy["spec"]["affinity"] = json!({"podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": (0..400).map(term).collect::<Vec<_>>()}});
    explainer.api.create("pods", heavy).expect("a legal pod");
    let (status, answer) = asked(&explainer, "/why/ml/mine", "member").await;
    let note = "1 of the cluster's pods have more than 16 KiB of labels, rules about other pods and host ports";
    assert!(
        status == 200 && answer["notes"].to_string().contains(note),
        "{status} {answer}"
    );
}

/// The rest of the ConfigMap stays, and the explainer is ready then.
#[tokio::test]
async fn the_certificate_joins_the_configmap() {
    let explainer = explainer().await;
    let map = explainer.api.get("configmaps", "kube-public", "divvy").expect("there");
    assert_eq!(map["data"]["service"], "a/b:c", "the rest stays");
    let text = "content-type: text/plain; version=0.0.4; charset=utf-8\r\n";
    let open_metrics = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n";
    let accept = "accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1\r\n";
    for (path, header, words) in [
        ("/readyz", "", "ok"),
        ("/healthz", "", "ok"),
        ("/metrics", "", "divvy_explainer_cluster_reads_total 0"),
        ("/metrics", "", text),
        ("/metrics", "", "# TYPE divvy_explainer_cluster_reads_total counter\n"),
        ("/metrics", accept, open_metrics),
        ("/metrics", accept, "# TYPE divvy_explainer_cluster_reads counter\n"),
        ("/metrics", accept, "divvy_explainer_cluster_reads_total 0\n# EOF\n"),
    ] {
        let mut plain = TcpStream::connect(explainer.address).await.expect("a connection");
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{header}\r\n");
        plain.write_all(request.as_bytes()).await.expect("sent");
        let mut text = String::new();
        plain.read_to_string(&mut text).await.expect("read");
        assert!(text.starts_with("HTTP/1.1 200") && text.contains(words), "{text}");
    }
}

/// The explainer limits the number of open tunnels.
#[tokio::test]
async fn a_tunnel_answers_several_questions() {
    let explainer = explainer().await;
    let mut tunnels = Vec::new();
    for _ in 0..16 {
        tunnels.push(tunnel(&explainer).await.expect("a tunnel"));
    }
    let NoTunnel(refused) = tunnel(&explainer).await.expect_err("one too many");
    assert!(refused.contains("503"), "{refused}");
    let mut one = tunnels.pop().expect("one");
    for (user, status) in [("member", 200), ("limited", 403), ("member", 200)] {
        let (found, body) = ask_with(&mut one, "/why/ml/mine", Some(&format!("Bearer {user}"))).await;
        assert_eq!(found, status, "{body}");
    }
    // A connection of an unauthenticated client is closed, and so is one without a question.
    assert_eq!(ask_with(&mut one, "/why/ml/mine", None).await.0, 401);
    assert!(one.ready().await.is_err(), "closed");
    for mut idle in tunnels {
        let closed = tokio::time::timeout(Duration::from_secs(20), async {
            while !idle.is_closed() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            idle.ready().await.is_err()
        });
        assert!(closed.await.expect("within its time"));
    }
    assert!(tunnel(&explainer).await.is_ok(), "there is a place again");
}
