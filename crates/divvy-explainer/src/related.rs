//! What `divvy why` reads in addition to nodes and pods: namespaces, the agent's node selector, volume claims.

use std::collections::BTreeMap;

use divvy_kube::Error;
use divvy_model::names;
use divvy_why::{ClaimState, Reported};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, Namespace, PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use kube::api::ListParams;

/// The maximum number of events of a pod that are shown.
const EVENTS: usize = 3;

/// List the labels of all namespaces, by the namespace's name.
pub async fn namespaces(client: &kube::Client) -> Result<BTreeMap<String, divvy_why::LabelMap>, Error> {
    let api: Api<Namespace> = Api::all(client.clone());
    let list = api
        .list_metadata(&ListParams::default())
        .await
        .map_err(|source| Error::api("the namespaces could not be listed", source))?;
    Ok(crate::from_objects::labels(list.items.into_iter().map(|item| item.metadata)))
}

/// Read the node selector of the agent's DaemonSet; `None` if there is no such DaemonSet, or if several have different selectors.
pub async fn agent_selector(client: &kube::Client) -> Result<Option<divvy_why::LabelMap>, Error> {
    let api: Api<DaemonSet> = Api::all(client.clone());
    // The chart installs one, but any user who may create DaemonSets can use the same labels. So limit the list.
    let params = ListParams::default()
        .labels("app.kubernetes.io/name=divvy,app.kubernetes.io/component=agent")
        .limit(20);
    let list = api
        .list(&params)
        .await
        .map_err(|source| Error::api("the DaemonSets could not be listed", source))?;
    let selector = |set: DaemonSet| set.spec.template.spec.and_then(|spec| spec.node_selector).unwrap_or_default();
    let mut selectors: Vec<divvy_why::LabelMap> = list.items.into_iter().map(selector).collect();
    selectors.dedup();
    Ok(selectors.pop().filter(|_| selectors.is_empty()))
}

/// Read the volume claims of a pod. A claim that cannot be read becomes [`ClaimState::Unseen`] with the reason.
pub async fn read_claims(client: &kube::Client, wants: &mut divvy_why::Wants) {
    for claim in &mut wants.claims {
        claim.state = claim_state(client, &wants.pod.namespace, &claim.name)
            .await
            .unwrap_or_else(|error| ClaimState::Unseen(error.to_string()));
    }
}

async fn claim_state(client: &kube::Client, namespace: &str, name: &str) -> Result<ClaimState, Error> {
    // Users choose these names, and the names become part of URL paths.
    if !names::is_name(name) {
        return Ok(ClaimState::Missing);
    }
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let failed = |what: &str, source| Error::api(format!("{what} could not be read"), source);
    let found = claims.get_opt(name).await.map_err(|source| failed("the claim", source))?;
    let Some(claim) = found else {
        return Ok(ClaimState::Missing);
    };
    let spec = claim.spec.unwrap_or_default();
    if let Some(volume) = spec.volume_name.filter(|volume| names::is_name(volume)) {
        let volumes: Api<PersistentVolume> = Api::all(client.clone());
        let volume = volumes
            .get_opt(&volume)
            .await
            .map_err(|source| failed("its volume", source))?;
        return Ok(with_volume(
            claim.metadata.uid.as_deref(),
            volume.and_then(|volume| volume.spec),
        ));
    }
    let Some(class) = spec.storage_class_name.filter(|class| names::is_name(class)) else {
        return Ok(ClaimState::Unbound);
    };
    let classes: Api<StorageClass> = Api::all(client.clone());
    let class = classes
        .get_opt(&class)
        .await
        .map_err(|source| failed("its storage class", source))?;
    let later = class.is_some_and(|class| class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"));
    Ok(if later { ClaimState::BoundLater } else { ClaimState::Unbound })
}

/// List the last warning events about a pod, at most three, oldest first, each text once.
pub async fn warnings_of(client: &kube::Client, namespace: &str, name: &str) -> Result<Vec<Reported>, Error> {
    let api: Api<Event> = Api::namespaced(client.clone(), namespace);
    let selector = format!("involvedObject.kind=Pod,involvedObject.name={name}");
    let list = api
        .list(&ListParams::default().fields(&selector).limit(500))
        .await
        .map_err(|source| Error::api("the pod's events could not be listed", source))?;
    let mut events = list.items;
    events.retain(|event| event.type_.as_deref() == Some("Warning"));
    let seen = |event: &Event| {
        let series = event
            .series
            .as_ref()
            .and_then(|series| series.last_observed_time.clone())
            .map(|time| time.0);
        let last = event.last_timestamp.clone().map(|time| time.0);
        series.max(last).max(event.event_time.clone().map(|time| time.0))
    };
    events.sort_by_key(seen);
    let mut found: Vec<Reported> = Vec::new();
    for event in events {
        let by = event.reporting_component.filter(|by| !by.is_empty());
        let one = Reported {
            by: by
                .or(event.source.and_then(|source| source.component))
                .unwrap_or_else(|| "an event".to_owned()),
            reason: event.reason.unwrap_or_default(),
            message: event.message.unwrap_or_default(),
        };
        found.retain(|known| known.message != one.message);
        found.push(one);
    }
    Ok(found.split_off(found.len().saturating_sub(EVENTS)))
}

/// Return the state of a claim with this UID that names this volume. A user may write any volume's name into a claim, so the claim is only bound if the volume
/// also refers to the claim.
fn with_volume(claim: Option<&str>, volume: Option<PersistentVolumeSpec>) -> ClaimState {
    let owner = |volume: &PersistentVolumeSpec| volume.claim_ref.as_ref()?.uid.clone();
    match volume.filter(|volume| owner(volume).is_some_and(|owner| Some(owner.as_str()) == claim)) {
        Some(volume) => ClaimState::Bound(volume.node_affinity.and_then(|affinity| affinity.required)),
        None => ClaimState::Unbound,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{NodeSelector, ObjectReference, VolumeNodeAffinity};

    use super::*;

    #[test]
    fn a_claim_tells_nothing_of_a_foreign_volume() {
        let volume = |owner: Option<&str>| PersistentVolumeSpec {
            claim_ref: owner.map(|uid| ObjectReference {
                uid: Some(uid.to_owned()),
                ..ObjectReference::default()
            }),
            node_affinity: Some(VolumeNodeAffinity {
                required: Some(NodeSelector::default()),
            }),
            ..PersistentVolumeSpec::default()
        };
        let is_bound = |claim, owner| match with_volume(claim, Some(volume(owner))) {
            ClaimState::Bound(nodes) => nodes.is_some(),
            _ => false,
        };
        assert!(is_bound(Some("a"), Some("a")));
        for (claim, owner) in [(Some("a"), Some("b")), (Some("a"), None), (None, Some("b")), (None, None)] {
            assert!(!is_bound(claim, owner), "{claim:?} {owner:?}");
        }
        assert!(matches!(with_volume(Some("a"), None), ClaimState::Unbound));
    }
}
