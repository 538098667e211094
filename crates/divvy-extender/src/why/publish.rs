//! Writes the authority's certificate where every user can read it.

use std::time::Duration;

use divvy_cluster::explain::AUTHORITY;
use divvy_cluster::in_words;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::tls::Current;

/// Somebody may have overwritten it.
const AGAIN: Duration = Duration::from_secs(600);
/// After a failure.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
/// The API server's answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Keeps a ConfigMap, `(namespace, name)`, up to date until `stop`. What goes wrong is logged, once each time that it changes, and tried again.
pub(crate) async fn keep(
    (namespace, name): (String, String),
    client: kube::Client,
    mut credentials: Current,
    stop: CancellationToken,
) {
    let api: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let mut said: Option<String> = None;
    loop {
        let authority = credentials.borrow_and_update().as_ref().map(|found| found.authority.clone());
        let pause = match authority {
            None => AGAIN,
            Some(authority) => {
                let written = match authority {
                    Ok(authority) => write(&api, &name, &authority).await,
                    Err(why) => Err(why),
                };
                match written {
                    Ok(()) => {
                        said = None;
                        AGAIN
                    }
                    Err(why) => {
                        if said.as_ref() != Some(&why) {
                            tracing::error!(
                                "the ConfigMap {namespace}/{name} was not given the authority's certificate, without which users of a namespace cannot \
                                 ask `divvy why`: {why}"
                            );
                            said = Some(why);
                        }
                        AFTER_FAILURE
                    }
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            changed = credentials.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(pause) => {}
        }
    }
}

async fn write(api: &Api<ConfigMap>, name: &str, authority: &str) -> Result<(), String> {
    let patch = Patch::Merge(json!({"data": {AUTHORITY: authority}}));
    match tokio::time::timeout(ANSWER, api.patch(name, &PatchParams::default(), &patch)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(in_words(&error)),
        Err(_elapsed) => Err(format!("the API server gave no answer within {ANSWER:?}")),
    }
}
