//! What the chart installed that the pods need: the agent's DaemonSet, and the PriorityClass.

use divvy_kube::{Error, in_words};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::{Api, ListParams};
use serde_json::{Value, json};

/// The labels of the agent's DaemonSet in the chart.
pub(super) const AGENT: &str = "app.kubernetes.io/name=divvy,app.kubernetes.io/component=agent";

/// The PriorityClass of the chart: its pods preempt no others.
const PRIORITY_CLASS: &str = "divvy-smoke";

/// What the pods take from the agent.
pub(super) struct AgentTemplate {
    /// The image, which all nodes with an agent have.
    pub(super) image: String,
    /// The tolerations.
    pub(super) tolerations: Value,
}

/// Read the agent's DaemonSet; `None` if there is none.
pub(super) async fn read(client: &kube::Client) -> Result<Option<AgentTemplate>, Error> {
    let api: Api<DaemonSet> = Api::all(client.clone());
    // Any user who may create DaemonSets can use the same labels. So limit the list.
    let params = ListParams::default().labels(AGENT).limit(20);
    let list = api
        .list(&params)
        .await
        .map_err(|source| Error::api("the DaemonSets could not be listed", source))?;
    Ok(list.items.into_iter().find_map(|set| {
        let spec = set.spec.template.spec?;
        let container = spec.containers.iter().find(|container| container.name == "agent")?;
        Some(AgentTemplate {
            image: container.image.clone()?,
            tolerations: json!(spec.tolerations.unwrap_or_default()),
        })
    }))
}

/// Return the PriorityClass of the chart. `None` if there is none, as before this version of the chart, or if the user may not see it.
pub(super) async fn priority_class(client: &kube::Client) -> Option<String> {
    let api: Api<PriorityClass> = Api::all(client.clone());
    match api.get_opt(PRIORITY_CLASS).await {
        Ok(class) => class.map(|_| PRIORITY_CLASS.to_owned()),
        Err(error) => {
            tracing::debug!("the PriorityClass {PRIORITY_CLASS} could not be read: {}", in_words(&error));
            None
        }
    }
}
