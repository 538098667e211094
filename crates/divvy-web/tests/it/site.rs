//! A site with a gate whose answers tests choose.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use divvy_page::{ClusterScene, MeasuredUsage};
use divvy_view_sim::{ClusterMoment, mixed};
use divvy_web::{Gate, Hosts, PageHub, TokenRefusal, router};
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use tower::ServiceExt as _;

pub(crate) const TOKEN: &str = "a-token";
pub(crate) const HOST: &str = "127.0.0.1:8080";

/// A gate that takes [`TOKEN`], and answers what a test sets.
#[derive(Debug)]
pub(crate) struct Door(Mutex<Result<(), TokenRefusal>>);

impl Gate for Door {
    fn check<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<(), TokenRefusal>> {
        let answer = if token == TOKEN {
            self.0.lock().expect("no panic").clone()
        } else {
            Err(TokenRefusal::Unknown)
        };
        Box::pin(std::future::ready(answer))
    }

    fn how(&self) -> &str {
        "Ask <the administrator>."
    }
}

pub(crate) struct Site {
    pub(crate) hub: Arc<PageHub>,
    pub(crate) router: Router,
    door: Arc<Door>,
}

impl Site {
    pub(crate) fn new() -> Site {
        Site::under(Hosts::loopback(8080))
    }

    pub(crate) fn under(hosts: Hosts) -> Site {
        let site = Site::empty(hosts);
        site.hub.show(scene(mixed(0)));
        site
    }

    /// A site whose cluster was not read yet.
    pub(crate) fn unread() -> Site {
        Site::empty(Hosts::loopback(8080))
    }

    fn empty(hosts: Hosts) -> Site {
        let hub = Arc::new(PageHub::new());
        let door = Arc::new(Door(Mutex::new(Ok(()))));
        let router = router(hub.clone(), door.clone(), hosts);
        Site { hub, router, door }
    }

    pub(crate) fn answers(&self, answer: Result<(), TokenRefusal>) {
        *self.door.0.lock().expect("no panic") = answer;
    }

    /// Send a request with these headers to the server. `POST` if there is a body.
    pub(crate) async fn ask(&self, path: &str, headers: &[(&str, &str)], body: Option<String>) -> Response<Body> {
        let mut request = Request::builder()
            .uri(path)
            .method(if body.is_some() { "POST" } else { "GET" });
        if !headers.iter().any(|(name, _)| *name == "host") {
            request = request.header("host", HOST);
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.unwrap_or_default())).expect("a request");
        self.router.clone().oneshot(request).await.expect("an answer")
    }

    /// Send a request with the token.
    pub(crate) async fn get(&self, path: &str) -> Response<Body> {
        self.ask(path, &[("authorization", "Bearer a-token")], None).await
    }
}

pub(crate) fn scene(cluster: ClusterMoment) -> ClusterScene {
    let at = cluster.at;
    ClusterScene {
        at,
        view: cluster.view,
        answers: cluster
            .usage
            .into_iter()
            .map(|(node, usage)| (node, MeasuredUsage { at, usage }))
            .collect(),
        waiting: cluster.waiting,
        ..ClusterScene::default()
    }
}

pub(crate) async fn text(response: Response<Body>) -> String {
    let bytes = response.into_body().collect().await.expect("a body").to_bytes();
    String::from_utf8(bytes.to_vec()).expect("text")
}

pub(crate) fn header<'r>(response: &'r Response<Body>, name: &str) -> &'r str {
    response.headers().get(name).map_or("", |value| value.to_str().expect("text"))
}
