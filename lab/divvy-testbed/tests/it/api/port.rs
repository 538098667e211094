//! The server on a real port: connections, tokens, kubeconfig, and what ends with the server.

use divvy_testbed::api::{ApiServerOptions, Effect, FaultRule, Match};
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

async fn client(kubeconfig: &str) -> Client {
    let config = Kubeconfig::from_yaml(kubeconfig).unwrap();
    let mut config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default())
        .await
        .unwrap();
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

#[tokio::test]
async fn users_are_told_apart_by_their_kubeconfig() {
    let api = server_with(ApiServerOptions {
        token: Some("s3cret".into()),
        ..ApiServerOptions::default()
    });
    let listening = api.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let refuse = Effect::Refuse(500);
    api.faults().add(FaultRule::new(Match::any().client("agent-n1"), refuse));
    let list = async |user: &str| {
        let client = client(&api.kubeconfig_for(listening.addr(), user)).await;
        Api::<Pod>::default_namespaced(client).list(&ListParams::default()).await
    };
    assert_eq!(refusal(list("agent-n1").await).0, 500);
    assert!(list("agent-n2").await.is_ok());
}

#[tokio::test]
async fn without_the_token_nothing_is_told() {
    let api = server_with(ApiServerOptions {
        token: Some("s3cret".into()),
        ..ApiServerOptions::default()
    });
    for (authorization, expected) in [
        ("", 401),
        ("Bearer wrong", 401),
        ("Bearer s3cre", 401),
        ("Bearer s3cretandmore", 401),
        ("Basic s3cret", 401),
        ("Bearer s3cret", 200),
        ("Bearer s3cret~someone", 200),
    ] {
        for path in ["/api/v1/pods", "/version", "/api"] {
            let (code, answer) = request(&api, "GET", path, &[("authorization", authorization)], &json!(null)).await;
            assert_eq!(code, expected, "{authorization} {path}");
            assert!(code == 200 || answer["reason"] == "Unauthorized");
        }
    }
    // kubectl sends no token over plain HTTP, so its kubeconfig has the token in the server's path.
    for (path, expected) in [
        ("/t/s3cret/api/v1/pods", 200),
        ("/t/s3cret~someone/version", 200),
        ("/t/wrong/api/v1/pods", 401),
    ] {
        assert_eq!(request(&api, "GET", path, &[], &json!(null)).await.0, expected, "{path}");
    }
    assert_eq!(request(&api, "GET", "/readyz", &[], &json!(null)).await, (200, json!("ok")));
    assert!(
        pods(&api).list(&ListParams::default()).await.is_ok(),
        "its own client has the token"
    );
}

#[tokio::test]
async fn a_server_that_is_down_breaks_every_connection() {
    let api = server();
    let listening = api.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let mut bytes = Vec::new();
    for (down, expected) in [(true, ""), (false, "HTTP/1.1 200 OK")] {
        api.faults().set_down(down);
        let mut stream = tokio::net::TcpStream::connect(listening.addr()).await.unwrap();
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        bytes.clear();
        // A reset is as good as an end.
        let _ = stream.read_to_end(&mut bytes).await;
        assert!(String::from_utf8_lossy(&bytes).starts_with(expected) && bytes.is_empty() == down);
    }
}
