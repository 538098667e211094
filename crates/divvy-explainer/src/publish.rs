//! Writes the explainer's certificate to a ConfigMap that every user can read.

use std::time::Duration;

use crate::service_proxy::CERTIFICATE;
use divvy_kube::in_words;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Pause between two writes. The write is repeated because the ConfigMap may be deleted and created again.
const AGAIN: Duration = Duration::from_secs(60);
/// Pause after a failure.
const AFTER_FAILURE: Duration = Duration::from_secs(5);
/// Timeout of a request to the API server.
const ANSWER: Duration = Duration::from_secs(10);

/// Start the task that keeps a ConfigMap, `(namespace, name)`, up to date until `stop`. The receiver tells whether the last write succeeded. After a
/// failure, the write is tried again; each new error text is logged.
pub(crate) fn keep(
    (namespace, name): (String, String),
    client: kube::Client,
    certificate: String,
    stop: CancellationToken,
) -> watch::Receiver<bool> {
    let api: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        let mut said: Option<String> = None;
        loop {
            let written = write(&api, &name, &certificate).await;
            sender.send_replace(written.is_ok());
            let pause = if written.is_ok() { AGAIN } else { AFTER_FAILURE };
            let why = written.err().map(|error| error.to_string());
            if let Some(why) = why.as_ref().filter(|_| why != said) {
                tracing::error!(
                    "the explainer's certificate could not be written to the ConfigMap {namespace}/{name}; without it, users who may not list nodes \
                     and pods cannot use `divvy why`: {why}"
                );
            }
            said = why;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    });
    receiver
}

/// Why the ConfigMap could not be written.
#[derive(Debug, thiserror::Error)]
enum NotWritten {
    #[error("{}", in_words(.0))]
    Refused(Box<kube::Error>),
    #[error("the API server gave no answer within {ANSWER:?}")]
    Late,
}

async fn write(api: &Api<ConfigMap>, name: &str, certificate: &str) -> Result<(), NotWritten> {
    let patch = Patch::Merge(json!({"data": {CERTIFICATE: certificate}}));
    let params = PatchParams::default();
    match tokio::time::timeout(ANSWER, api.patch(name, &params, &patch)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(NotWritten::Refused(Box::new(error))),
        Err(_elapsed) => Err(NotWritten::Late),
    }
}
