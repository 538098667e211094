//! The rights of users, the API server's reviews of users, and the way in which users reach Services.

use divvy_testbed::api::{Listening, Right};
use http::StatusCode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;

const NAMESPACED: &str = "/api/v1/namespaces/ml/pods";

async fn as_user(api: &ApiServer, user: &str, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let bearer = format!("Bearer {user}");
    let headers = [("authorization", bearer.as_str()), ("content-type", "application/json")];
    request(api, method, path, &headers, body).await
}

fn with_a_limited_user() -> ApiServer {
    let api = server();
    api.create("namespaces", json!({"metadata": {"name": "ml"}})).unwrap();
    let mut mine = pod("mine");
    mine["metadata"]["namespace"] = json!("ml");
    api.create("pods", mine).unwrap();
    api.rights()
        .grant("ann", Right::new(&["get", "list"], "pods").in_namespace("ml"));
    api.rights().grant("ann", Right::new(&["get"], "nodes").named("n1"));
    api
}

#[tokio::test]
async fn a_limited_user_may_do_what_it_is_granted_and_is_refused_the_rest_in_upstreams_words() {
    let api = with_a_limited_user();
    for (path, code, words) in [
        (NAMESPACED, 200, ""),
        (&format!("{NAMESPACED}/mine"), 200, ""),
        (
            "/api/v1/pods",
            403,
            r#"pods is forbidden: User "ann" cannot list resource "pods" in API group "" at the cluster scope"#,
        ),
        (
            "/api/v1/namespaces/default/pods/x",
            403,
            r#"pods "x" is forbidden: User "ann" cannot get resource "pods" in API group "" in the namespace "default""#,
        ),
        (
            "/api/v1/namespaces/ml/pods/mine/status",
            403,
            r#"pods "mine" is forbidden: User "ann" cannot get resource "pods/status" in API group "" in the namespace "ml""#,
        ),
        ("/api/v1/nodes/n1", 404, r#"nodes "n1" not found"#),
        (
            "/api/v1/nodes",
            403,
            r#"nodes is forbidden: User "ann" cannot list resource "nodes" in API group "" at the cluster scope"#,
        ),
        (
            "/apis/apps/v1/daemonsets",
            403,
            r#"daemonsets.apps is forbidden: User "ann" cannot list resource "daemonsets" in API group "apps" at the cluster scope"#,
        ),
        ("/version", 200, ""),
    ] {
        let (found, answer) = as_user(&api, "ann", "GET", path, &Value::Null).await;
        assert_eq!(found, code, "{path}: {answer}");
        if code != 200 {
            assert_eq!(answer["message"], words, "{path}");
        }
        assert_ne!(
            as_user(&api, "bob", "GET", path, &Value::Null).await.0,
            403,
            "bob has no limits: {path}"
        );
    }
}

#[tokio::test]
async fn reviews_tell_whose_a_token_is_and_what_a_user_may_do() {
    let api = with_a_limited_user();
    let tokens = "/apis/authentication.k8s.io/v1/tokenreviews";
    let accesses = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    api.rights().revoke_token("old");
    for (token, authenticated) in [("ann", true), ("old", false)] {
        let (code, answer) = as_user(&api, "", "POST", tokens, &json!({"spec": {"token": token}})).await;
        assert_eq!(
            (code, &answer["status"]["authenticated"]),
            (201, &json!(authenticated)),
            "{answer}"
        );
        assert_eq!(answer["status"]["user"]["username"].as_str(), authenticated.then_some("ann"));
    }
    assert_eq!(as_user(&api, "", "POST", tokens, &json!({"spec": {}})).await.0, 422);
    assert_eq!(
        as_user(&api, "old", "GET", NAMESPACED, &Value::Null).await.0,
        401,
        "the token is not valid"
    );
    for (attributes, allowed) in [
        (
            json!({"verb": "get", "resource": "pods", "namespace": "ml", "name": "mine"}),
            true,
        ),
        (
            json!({"verb": "get", "resource": "pods", "namespace": "default", "name": "mine"}),
            false,
        ),
        (json!({"verb": "list", "resource": "pods"}), false),
        (json!({"verb": "get", "resource": "nodes", "name": "n1"}), true),
    ] {
        let spec = json!({"user": "ann", "groups": ["system:authenticated"], "resourceAttributes": attributes});
        let (code, answer) = as_user(&api, "", "POST", accesses, &json!({"spec": spec})).await;
        assert_eq!((code, &answer["status"]["allowed"]), (201, &json!(allowed)), "{answer}");
        let own = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        let (_, answer) = as_user(&api, "ann", "POST", own, &json!({"spec": {"resourceAttributes": attributes}})).await;
        assert_eq!(answer["status"]["allowed"], json!(allowed), "{answer}");
    }
    let whoever = json!({"spec": {"resourceAttributes": {"verb": "get", "resource": "pods"}}});
    assert_eq!(as_user(&api, "", "POST", accesses, &whoever).await.0, 422);
    let (code, answer) = as_user(&api, "ann", "POST", tokens, &json!({"spec": {"token": "bob"}})).await;
    assert_eq!(code, 403, "{answer}");
    let (_, answer) = as_user(
        &api,
        "ann",
        "POST",
        "/apis/authentication.k8s.io/v1/selfsubjectreviews",
        &json!({}),
    )
    .await;
    assert_eq!(answer["status"]["userInfo"]["username"], "ann");
}

/// Return a server on a port, the listener of a Service `ml/web`, and the address of the API server.
async fn with_a_service() -> (ApiServer, TcpListener, Listening) {
    let (api, backend) = (with_a_limited_user(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    api.reach("ml", "web", backend.local_addr().unwrap());
    let right = Right::new(&["get"], "services/proxy").in_namespace("ml");
    api.rights().grant("ann", right.named("http:web:80"));
    let listening = api.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    (api, backend, listening)
}

async fn head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.expect("the head continues"));
    }
    String::from_utf8(head).unwrap()
}

async fn ask(listening: &Listening, user: &str, id: &str, more: &str) -> TcpStream {
    let mut user_side = TcpStream::connect(listening.addr()).await.unwrap();
    let path = format!("/api/v1/namespaces/ml/services/{id}/proxy/a/b?c=d");
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {user}\r\n{more}\r\n");
    user_side.write_all(request.as_bytes()).await.unwrap();
    user_side
}

#[tokio::test]
async fn a_service_gets_the_request_without_the_users_token() {
    let (_api, backend, listening) = with_a_service().await;
    let mut user = ask(&listening, "ann", "http:web:80", "connection: close\r\nx-mine: 1\r\n").await;
    let (mut service, _) = backend.accept().await.unwrap();
    let asked = head(&mut service).await;
    assert!(
        asked.starts_with("GET /a/b?c=d HTTP/1.1\r\n") && asked.contains("x-mine: 1"),
        "{asked}"
    );
    assert!(!asked.to_lowercase().contains("authorization"), "{asked}");
    service
        .write_all(b"HTTP/1.1 418 I'm a teapot\r\ncontent-length: 2\r\n\r\nhi")
        .await
        .unwrap();
    let mut answer = String::new();
    user.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 418") && answer.ends_with("hi"), "{answer}");
}

#[tokio::test]
async fn an_upgraded_connection_carries_bytes_until_one_side_ends() {
    let (_api, backend, listening) = with_a_service().await;
    let upgrade = "connection: Upgrade\r\nupgrade: echo\r\n";
    let mut user = ask(&listening, "ann", "http:web:80", upgrade).await;
    let (mut service, _) = backend.accept().await.unwrap();
    assert!(head(&mut service).await.to_lowercase().contains("upgrade: echo"));
    service
        .write_all(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n")
        .await
        .unwrap();
    assert!(head(&mut user).await.starts_with("HTTP/1.1 101"));
    for text in [b"ping", b"pong"] {
        let mut found = [0; 4];
        user.write_all(text).await.unwrap();
        service.read_exact(&mut found).await.unwrap();
        assert_eq!(&found, text);
        service.write_all(text).await.unwrap();
        user.read_exact(&mut found).await.unwrap();
        assert_eq!(&found, text);
    }
    drop(service);
    assert_eq!(user.read(&mut [0; 1]).await.unwrap_or(0), 0, "the other side has closed");
}

#[tokio::test]
async fn who_may_not_use_the_proxy_reaches_nothing() {
    let (api, _backend, listening) = with_a_service().await;
    for (user, id, code) in [
        ("ann", "web", StatusCode::FORBIDDEN),
        ("bob", "http:other:80", StatusCode::SERVICE_UNAVAILABLE),
    ] {
        let mut user_side = ask(&listening, user, id, "connection: close\r\n").await;
        let mut answer = String::new();
        user_side.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {}", code.as_u16())), "{answer}");
        let words = match user {
            "ann" => r#"User \"ann\" cannot get resource \"services/proxy\""#,
            _ => "no endpoints available for service",
        };
        assert!(answer.contains(words), "{answer}");
    }
    let (code, answer) = as_user(&api, "ann", "GET", "/api/v1/namespaces/ml/services/web/proxy", &Value::Null).await;
    assert_eq!(code, 403, "{answer}");
}
