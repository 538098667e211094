//! A scripted API server for tests.

use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use futures::StreamExt as _;
use serde_json::Value;

/// Status code, body, and the size of the parts in which the body is sent. If the size is `None`, the connection stays open.
type ScriptedAnswer = (StatusCode, String, Option<usize>);

/// An API server that sends the answers of a script, one after the other, and records the requests' query parameters.
#[derive(Clone, Default)]
pub(crate) struct ScriptedServer {
    answers: Arc<Mutex<Vec<ScriptedAnswer>>>,
    asked: Arc<Mutex<Vec<Value>>>,
}

impl ScriptedServer {
    /// Add an answer that is sent in parts of `part` bytes.
    pub(crate) fn then_in_parts(self, text: impl Into<String>, part: usize) -> ScriptedServer {
        let answer = (StatusCode::OK, text.into(), Some(part));
        self.answers.lock().expect("sound").insert(0, answer);
        self
    }

    pub(crate) fn then(self, text: impl Into<String>) -> ScriptedServer {
        self.then_in_parts(text, usize::MAX)
    }

    pub(crate) fn then_status(self, code: u16, text: impl Into<String>) -> ScriptedServer {
        let code = StatusCode::from_u16(code).expect("a status");
        self.answers
            .lock()
            .expect("sound")
            .insert(0, (code, text.into(), Some(usize::MAX)));
        self
    }

    /// Add a watch that sends this text and then stays open and silent.
    pub(crate) fn then_stays_open(self, text: impl Into<String>) -> ScriptedServer {
        self.answers
            .lock()
            .expect("sound")
            .insert(0, (StatusCode::OK, text.into(), None));
        self
    }

    pub(crate) fn client(&self) -> kube::Client {
        let router = axum::Router::new().fallback(answer).with_state(self.clone());
        kube::Client::new(router, "default")
    }

    pub(crate) fn requests(&self) -> Vec<Value> {
        self.asked.lock().expect("sound").clone()
    }
}

async fn answer(State(script): State<ScriptedServer>, Query(query): Query<Value>) -> Response {
    script.asked.lock().expect("sound").push(query);
    let next = script.answers.lock().expect("sound").pop();
    let (code, text, part) = next.unwrap_or((StatusCode::OK, String::new(), None));
    let size = part.unwrap_or(usize::MAX).min(text.len().max(1));
    let parts: Vec<_> = text
        .into_bytes()
        .chunks(size)
        .map(|part| Ok::<_, std::io::Error>(part.to_vec()))
        .collect();
    let parts = futures::stream::iter(parts);
    let body = match part {
        Some(_) => Body::from_stream(parts),
        None => Body::from_stream(parts.chain(futures::stream::pending())),
    };
    let mut response = Response::new(body);
    *response.status_mut() = code;
    response
}
