use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;

use divvy_model::{Pod, PodKey};

/// Pods by UID and by name. Both indexes share one copy of each pod, because a large cluster has tens of thousands of
/// pods.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pods {
    by_uid: BTreeSet<ByUid>,
    by_name: BTreeSet<ByName>,
}

impl Pods {
    pub(crate) fn get(&self, uid: &str) -> Option<&Pod> {
        self.by_uid.get(uid).map(|found| &*found.0)
    }

    pub(crate) fn shared(&self, uid: &str) -> Option<&Arc<Pod>> {
        self.by_uid.get(uid).map(|found| &found.0)
    }

    /// Return the pod that has this name now.
    pub(crate) fn named(&self, key: &PodKey) -> Option<&Pod> {
        self.by_name.get(key as &dyn HasPodKey).map(|found| &*found.0)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_uid.len()
    }

    pub(crate) fn uids(&self) -> impl Iterator<Item = &str> {
        self.by_uid.iter().map(Borrow::borrow)
    }

    /// Return the pods ordered by UID.
    pub(crate) fn values(&self) -> impl Iterator<Item = &Pod> {
        self.by_uid.iter().map(|found| &*found.0)
    }

    /// Add a pod. It replaces the pod with the same UID, and it becomes the only pod with its name.
    pub(crate) fn insert(&mut self, pod: Arc<Pod>) {
        // A pod keeps its name, but this does not rely on it.
        self.remove(&pod.uid);
        self.by_name.replace(ByName(pod.clone()));
        self.by_uid.replace(ByUid(pod));
    }

    pub(crate) fn remove(&mut self, uid: &str) -> Option<Arc<Pod>> {
        let ByUid(pod) = self.by_uid.take(uid)?;
        let named = ByName(pod);
        if self.by_name.get(&named).is_some_and(|other| other.0.uid == named.0.uid) {
            self.by_name.remove(&named);
        }
        Some(named.0)
    }
}

/// A pod that is found by its UID.
#[derive(Debug, Clone)]
pub(crate) struct ByUid(pub(crate) Arc<Pod>);

impl Deref for ByUid {
    type Target = Pod;

    fn deref(&self) -> &Pod {
        &self.0
    }
}

impl Borrow<str> for ByUid {
    fn borrow(&self) -> &str {
        &self.0.uid
    }
}

impl PartialEq for ByUid {
    fn eq(&self, other: &ByUid) -> bool {
        self.0.uid == other.0.uid
    }
}

impl Eq for ByUid {}

impl PartialOrd for ByUid {
    fn partial_cmp(&self, other: &ByUid) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByUid {
    fn cmp(&self, other: &ByUid) -> Ordering {
        self.0.uid.cmp(&other.0.uid)
    }
}

/// A pod that is found by its namespace and name.
#[derive(Debug, Clone)]
struct ByName(Arc<Pod>);

/// A thing with a namespace and a name, so that a [`ByName`] can be found by a [`PodKey`].
trait HasPodKey {
    fn key(&self) -> (&str, &str);
}

impl HasPodKey for ByName {
    fn key(&self) -> (&str, &str) {
        (&self.0.namespace, &self.0.name)
    }
}

impl HasPodKey for PodKey {
    fn key(&self) -> (&str, &str) {
        (&self.namespace, &self.name)
    }
}

impl<'a> Borrow<dyn HasPodKey + 'a> for ByName {
    fn borrow(&self) -> &(dyn HasPodKey + 'a) {
        self
    }
}

impl PartialEq for dyn HasPodKey + '_ {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for dyn HasPodKey + '_ {}

impl PartialOrd for dyn HasPodKey + '_ {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for dyn HasPodKey + '_ {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

impl PartialEq for ByName {
    fn eq(&self, other: &ByName) -> bool {
        self.key() == other.key()
    }
}

impl Eq for ByName {}

impl PartialOrd for ByName {
    fn partial_cmp(&self, other: &ByName) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByName {
    fn cmp(&self, other: &ByName) -> Ordering {
        self.key().cmp(&other.key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str, name: &str, node: Option<&str>) -> Pod {
        Pod {
            uid: uid.to_owned(),
            namespace: "ns".to_owned(),
            name: name.to_owned(),
            node: node.map(str::to_owned),
            ..Pod::default()
        }
    }

    #[test]
    fn a_pod_is_found_by_its_uid_and_by_the_name_that_it_has_now() {
        let mut pods = Pods::default();
        let key = |name: &str| pod("", name, None).key();
        let named = |pods: &Pods, name: &str| pods.named(&key(name)).map(|pod| pod.uid.clone());
        pods.insert(Arc::new(pod("u1", "a", None)));
        pods.insert(Arc::new(pod("u2", "b", None)));
        assert_eq!((named(&pods, "a").as_deref(), pods.get("u2").is_some()), (Some("u1"), true));
        // This replaces the previous state.
        pods.insert(Arc::new(pod("u1", "a", Some("n"))));
        assert_eq!(pods.get("u1").and_then(|pod| pod.node.as_deref()), Some("n"));
        assert_eq!(pods.named(&key("a")).and_then(|pod| pod.node.as_deref()), Some("n"));
        // Another pod has taken the name, so the end of the first pod must not remove it.
        pods.insert(Arc::new(pod("u3", "a", None)));
        assert_eq!(pods.remove("u1").map(|pod| pod.uid.clone()).as_deref(), Some("u1"));
        assert_eq!(named(&pods, "a").as_deref(), Some("u3"));
        assert_eq!((pods.uids().collect::<Vec<_>>(), pods.len()), (vec!["u2", "u3"], 2));
        assert!(pods.remove("u1").is_none());
    }
}
