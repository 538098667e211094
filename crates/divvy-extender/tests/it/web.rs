//! The web page of the extender: who sees it.

use std::sync::Arc;

use divvy_extender::{ExtenderSurroundings, WebPage};
use divvy_testbed::api::{ApiServer, Right};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::tls::{NAME, Running, as_nobody, as_scheduler, ask, cluster, connect, secret_source, start_with, until, until_made};

struct Site {
    api: ApiServer,
    page: Running,
    _extender: Running,
    data: divvy_extender::tls::plan::SecretData,
    _stop: DropGuard,
}

/// An extender with a page, and users: `viewer` may list nodes and pods, `half` only nodes, `limited` nothing.
async fn site() -> Site {
    let api = cluster();
    for user in ["viewer", "half", "limited"] {
        api.rights().limit(user);
    }
    for (user, resource) in [("viewer", "nodes"), ("viewer", "pods"), ("half", "nodes")] {
        api.rights().grant(user, Right::new(&["list"], resource));
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let surroundings = ExtenderSurroundings {
        tls: Some(secret_source(3600)),
        page: Some(WebPage {
            listener: Arc::new(listener),
            hosts: vec!["gpus.example.com".to_owned()],
        }),
        ..ExtenderSurroundings::default()
    };
    let extender = start_with(&api, surroundings).await;
    let data = until_made(&api).await;
    let stop = CancellationToken::new();
    Site {
        page: Running::new(address, stop.clone()),
        _extender: extender,
        data,
        api,
        _stop: stop.drop_guard(),
    }
}

impl Site {
    async fn get(&self, config: rustls::ClientConfig, host: &str, token: &str) -> std::io::Result<(String, String)> {
        let authorization = match token {
            "" => String::new(),
            token => format!("authorization: Bearer {token}\r\n"),
        };
        let text = format!("GET / HTTP/1.1\r\nhost: {host}\r\n{authorization}\r\n");
        ask(&mut connect(&self.page, config).await?, &text).await
    }

    async fn status(&self, host: &str, token: &str) -> (u16, String) {
        let (status, body) = self.get(as_nobody(&self.data), host, token).await.expect("an answer");
        (
            status.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status"),
            body,
        )
    }
}

#[tokio::test]
async fn who_may_list_nodes_and_pods_sees_the_page_and_nobody_else() {
    let site = site().await;
    until("the page shows the node", async || {
        let (status, body) = site.get(as_nobody(&site.data), NAME, "viewer").await.ok()?;
        (status.contains("200") && body.contains("n1")).then_some(())
    })
    .await;
    site.api.rights().revoke_token("gone");
    for (token, expected, words) in [
        ("", 401, "kubectl create token"),
        ("gone", 401, "kubectl create token"),
        ("half", 403, "list pods in the whole cluster"),
        ("limited", 403, "list nodes in the whole cluster"),
    ] {
        let (status, body) = site.status(NAME, token).await;
        assert_eq!(status, expected, "{token}: {body}");
        assert!(body.contains(words) && !body.contains("n1"), "{token}: {body}");
    }
    for (host, expected) in [("gpus.example.com", 200), ("localhost:8443", 200), ("evil.example.com", 421)] {
        assert_eq!(site.status(host, "viewer").await.0, expected, "{host}");
    }
    let (status, _) = site.get(as_scheduler(&site.data), NAME, "").await.expect("an answer");
    assert!(
        status.contains("200"),
        "a certificate of the extender's authority opens the page: {status}"
    );
}

#[tokio::test]
async fn a_token_that_cannot_be_checked_does_not_open_the_page() {
    let site = site().await;
    site.api.faults().set_down(true);
    let (status, body) = site.status(NAME, "viewer").await;
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("could not be checked") && !body.contains("n1"), "{body}");
}
