//! The object store with revisions, in the role of a real API server's etcd and watch cache.
//!
//! One global revision counts commits. Each resource keeps a bounded ring of its changes. A reader that needs changes older than the ring
//! gets [`Expired`](super::ApiError), as after an etcd compaction.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use divvy_testkit::dice::Dice;
use serde_json::Value;
use tokio::sync::watch;

/// The way in which an object changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The object was created.
    Added,
    /// The object changed.
    Modified,
    /// The object was removed; the event carries its last state.
    Deleted,
}

impl EventKind {
    /// Return `ADDED`, `MODIFIED`, or `DELETED`, as in watch events.
    pub fn as_str(self) -> &'static str {
        match self {
            EventKind::Added => "ADDED",
            EventKind::Modified => "MODIFIED",
            EventKind::Deleted => "DELETED",
        }
    }
}

/// A commit. Objects change in no other way.
#[derive(Debug, Clone)]
pub struct StoreEvent {
    /// The store's revision after this commit, which is also the object's `metadata.resourceVersion`.
    pub revision: u64,
    /// The way in which the object changed.
    pub kind: EventKind,
    /// The resource: `pods`, `nodes`, `leases.coordination.k8s.io`, …
    pub resource: Arc<str>,
    /// The object after the commit; for a deletion, its last state.
    pub object: Arc<Value>,
    /// The object before the commit; `None` if it was created.
    pub previous: Option<Arc<Value>>,
}

/// A namespace (empty for cluster-scoped objects) and a name.
pub(crate) type ObjectKey = (String, String);

/// The objects of one resource at one revision.
#[derive(Debug, Clone, Default)]
pub(crate) struct StoreSnapshot {
    pub(crate) revision: u64,
    pub(crate) objects: BTreeMap<ObjectKey, Arc<Value>>,
}

#[derive(Debug)]
struct ObjectTable {
    resource: Arc<str>,
    objects: BTreeMap<ObjectKey, Arc<Value>>,
    ring: VecDeque<StoreEvent>,
    /// The revision up to which changes are forgotten.
    compacted: u64,
}

/// The store's content, locked for one transaction.
#[derive(Debug)]
pub(crate) struct StoreContent {
    revision: u64,
    tables: BTreeMap<String, ObjectTable>,
    ring_length: usize,
    history: Option<Vec<StoreEvent>>,
    dice: Dice,
}

#[derive(Debug)]
pub(crate) struct ApiStore {
    inner: Mutex<StoreContent>,
    revision: watch::Sender<u64>,
}

/// The error for changes since a revision that is already forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Compacted {
    pub(crate) asked: u64,
    pub(crate) oldest: u64,
}

impl ApiStore {
    /// Create a store. `seed` makes uids and generated names repeatable; `ring_length` is the number of changes remembered per resource;
    /// `audit` keeps every commit on pods and nodes for [`ApiStore::history`].
    pub(crate) fn new(seed: u64, ring_length: usize, audit: bool) -> ApiStore {
        ApiStore {
            inner: Mutex::new(StoreContent {
                revision: 1,
                tables: BTreeMap::new(),
                ring_length: ring_length.max(1),
                history: audit.then(Vec::new),
                dice: Dice::new(seed),
            }),
            revision: watch::Sender::new(1),
        }
    }

    /// Lock the content, even after a panic. An interrupted transaction leaves every table consistent: the maps change last, with
    /// one insert or removal per commit.
    fn lock(&self) -> MutexGuard<'_, StoreContent> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Run one transaction. Readers and watchers see all of it or none.
    pub(crate) fn write<T>(&self, transaction: impl FnOnce(&mut StoreContent) -> T) -> T {
        let (result, revision) = {
            let mut inner = self.lock();
            (transaction(&mut inner), inner.revision)
        };
        self.revision.send_if_modified(|seen| {
            let newer = revision > *seen;
            *seen = revision.max(*seen);
            newer
        });
        result
    }

    pub(crate) fn read<T>(&self, look: impl FnOnce(&StoreContent) -> T) -> T {
        look(&self.lock())
    }

    /// Subscribe to the revision, which changes at every commit.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }
}

impl StoreContent {
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    pub(crate) fn get(&self, storage: &str, key: &ObjectKey) -> Option<Arc<Value>> {
        self.tables.get(storage)?.objects.get(key).cloned()
    }

    pub(crate) fn snapshot(&self, storage: &str) -> StoreSnapshot {
        StoreSnapshot {
            revision: self.revision,
            objects: self.tables.get(storage).map(|t| t.objects.clone()).unwrap_or_default(),
        }
    }

    /// Report whether a namespace contains any object.
    pub(crate) fn any_in_namespace(&self, namespace: &str) -> bool {
        self.tables
            .values()
            .any(|table| table.objects.keys().any(|(have, _)| have == namespace))
    }

    pub(crate) fn events_after(&self, storage: &str, revision: u64) -> Result<Vec<StoreEvent>, Compacted> {
        let Some(table) = self.tables.get(storage) else {
            return Ok(Vec::new());
        };
        if revision < table.compacted {
            return Err(Compacted {
                asked: revision,
                oldest: table.compacted,
            });
        }
        let first = table.ring.partition_point(|event| event.revision <= revision);
        Ok(table.ring.iter().skip(first).cloned().collect())
    }

    pub(crate) fn history(&self) -> Vec<StoreEvent> {
        self.history.clone().unwrap_or_default()
    }

    /// Forget all changes so far. A client that watches from an earlier revision must list again.
    pub(crate) fn compact(&mut self) {
        for table in self.tables.values_mut() {
            table.ring.clear();
            table.compacted = self.revision;
        }
    }

    /// Create or replace an object. Return the stored object with its new resourceVersion.
    pub(crate) fn put(&mut self, storage: &str, mut object: Value) -> Arc<Value> {
        let revision = self.next_revision();
        set_resource_version(&mut object, revision);
        let object = Arc::new(object);
        let table = self.table(storage);
        let previous = table.objects.insert(key_of(&object), object.clone());
        let kind = if previous.is_some() {
            EventKind::Modified
        } else {
            EventKind::Added
        };
        self.record(storage, revision, kind, object.clone(), previous);
        object
    }

    /// Remove an object. Return its last state with the revision of its removal.
    pub(crate) fn remove(&mut self, storage: &str, key: &ObjectKey) -> Option<Arc<Value>> {
        let previous = self.table(storage).objects.remove(key)?;
        let revision = self.next_revision();
        let mut last = (*previous).clone();
        set_resource_version(&mut last, revision);
        let last = Arc::new(last);
        self.record(storage, revision, EventKind::Deleted, last.clone(), Some(previous));
        Some(last)
    }

    fn next_revision(&mut self) -> u64 {
        self.revision += 1;
        self.revision
    }

    fn table(&mut self, storage: &str) -> &mut ObjectTable {
        self.tables.entry(storage.to_owned()).or_insert_with(|| ObjectTable {
            resource: Arc::from(storage),
            objects: BTreeMap::new(),
            ring: VecDeque::new(),
            compacted: 0,
        })
    }

    fn record(&mut self, storage: &str, revision: u64, kind: EventKind, object: Arc<Value>, previous: Option<Arc<Value>>) {
        let ring_length = self.ring_length;
        let table = self.table(storage);
        let event = StoreEvent {
            revision,
            kind,
            resource: table.resource.clone(),
            object,
            previous,
        };
        table.ring.push_back(event.clone());
        while table.ring.len() > ring_length {
            if let Some(forgotten) = table.ring.pop_front() {
                table.compacted = forgotten.revision;
            }
        }
        if let Some(history) = &mut self.history
            && matches!(storage, "pods" | "nodes")
        {
            history.push(event);
        }
    }

    /// Return the next random number. Uids and suffixes must differ, but need not be unguessable.
    pub(crate) fn next_random(&mut self) -> u64 {
        self.dice.number()
    }

    /// Return a uid in the form of a version 4 UUID.
    pub(crate) fn next_uid(&mut self) -> String {
        let (high, low) = (self.next_random(), self.next_random());
        format!(
            "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
            high >> 32,
            (high >> 16) & 0xffff,
            high & 0xfff,
            0x8000 | (low >> 48 & 0x3fff),
            low & 0xffff_ffff_ffff
        )
    }
}

pub(crate) fn key_of(object: &Value) -> ObjectKey {
    let text = |name: &str| object["metadata"][name].as_str().unwrap_or("").to_owned();
    (text("namespace"), text("name"))
}

pub(crate) fn set_resource_version(object: &mut Value, revision: u64) {
    object["metadata"]["resourceVersion"] = Value::String(revision.to_string());
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn named(name: &str, value: u64) -> Value {
        json!({"metadata": {"name": name}, "value": value})
    }

    #[test]
    fn changes_older_than_the_ring_are_refused() {
        let store = ApiStore::new(1, 3, false);
        store.write(|inner| (0..5).for_each(|n| drop(inner.put("nodes", named("a", n)))));
        let oldest = store
            .read(|inner| inner.events_after("nodes", 2))
            .expect_err("forgotten")
            .oldest;
        assert_eq!(
            store.read(|inner| inner.events_after("nodes", oldest)).expect("kept").len(),
            3
        );
        store.write(StoreContent::compact);
        assert!(store.read(|inner| inner.events_after("nodes", oldest)).is_err());
        let now = store.read(StoreContent::revision);
        assert_eq!(store.read(|inner| inner.events_after("nodes", now)).expect("now").len(), 0);
    }

    #[test]
    fn uids_look_like_uuids_and_repeat_with_the_seed() {
        let uids = |seed| ApiStore::new(seed, 1, false).write(|inner| [inner.next_uid(), inner.next_uid()]);
        assert_eq!(uids(7), uids(7));
        assert_ne!(uids(7), uids(8));
        let [first, second] = uids(7);
        assert_ne!(first, second);
        assert_eq!(first.len(), 36);
        assert_eq!(&first[14..15], "4");
        assert!("89ab".contains(&first[19..20]), "{first}");
    }
}
