//! The audit of what happens while a scene plays: every change of pods and nodes that the API server reports, and the containers that run.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use divvy_audit::{Audit, AuditLimits, ContainerReport, Fact, FindingLevel, Moment, WatchedKind};
use divvy_kube::convert::{self, ReadPod};
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_kube::watch::{self, WatchMessage};
use futures::StreamExt as _;
use jiff::Timestamp;
use kube::api::ObjectMeta;
use tokio::task::JoinHandle;

use super::{Cluster, Living, Play, PlayStop};

type SharedAudit = Arc<Mutex<Audit>>;

fn lock(audit: &SharedAudit) -> MutexGuard<'_, Audit> {
    audit.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now(revision: Option<u64>) -> Moment {
    Moment {
        revision,
        at_ms: Some(Timestamp::now().as_millisecond()),
    }
}

/// An audit that follows a cluster.
pub(super) struct AuditHistory {
    audit: SharedAudit,
    follows: JoinHandle<()>,
}

impl Drop for AuditHistory {
    fn drop(&mut self) {
        self.follows.abort();
    }
}

impl AuditHistory {
    /// Begin an audit, and return once it knows all nodes and pods.
    pub(super) async fn begin<C: Cluster>(play: &Play<'_, C>) -> Result<AuditHistory, PlayStop> {
        let audit = Arc::new(Mutex::new(Audit::new(AuditLimits::default())));
        let is_listed = Arc::new(AtomicBool::new(false));
        let follows = tokio::spawn(follow(play.cluster.client(), audit.clone(), is_listed.clone()));
        let history = AuditHistory { audit, follows };
        play.eventually("the audit to know all nodes and pods", async |_| {
            Ok(if is_listed.load(Ordering::Relaxed) {
                Ok(())
            } else {
                Err("they are being listed".to_owned())
            })
        })
        .await?;
        Ok(history)
    }

    /// Return what tells this audit about containers.
    pub(super) fn reports(&self) -> ContainerReports {
        ContainerReports {
            audit: self.audit.clone(),
            known: BTreeMap::new(),
        }
    }

    /// End the audit, and check that it found no fault and no gap.
    pub(super) fn end<C: Cluster>(self, play: &mut Play<'_, C>) -> Result<(), PlayStop> {
        self.follows.abort();
        let audit = std::mem::replace(&mut *lock(&self.audit), Audit::new(AuditLimits::default()));
        let outcome = audit.finish(now(None).at_ms);
        let summary = &outcome.summary;
        play.measured(&format!(
            "{} changes of pods and nodes, and {} containers, passed to the audit",
            summary.changes, summary.containers
        ))?;
        let is_sound = !outcome.is_empty() && outcome.worst().is_none_or(|worst| worst == FindingLevel::Note);
        play.check(is_sound, "the audit of the history finds no problem", || {
            let findings = outcome.findings.iter();
            let lines = findings.map(|finding| format!("{} {:?}: {}", finding.what.id(), finding.at, finding.what));
            format!("{:?}\n{}", outcome.summary, lines.collect::<Vec<_>>().join("\n"))
        })?;
        Ok(())
    }
}

/// Tells the audit about containers: once when a container is first seen, and once when it is gone.
pub(super) struct ContainerReports {
    audit: SharedAudit,
    known: BTreeMap<String, ContainerReport>,
}

impl ContainerReports {
    pub(super) fn see(&mut self, living: &[Living]) {
        let mut audit = lock(&self.audit);
        let at = now(None);
        for container in living {
            if self.known.contains_key(&container.id) {
                continue;
            }
            let devices = container.devices.iter();
            let minors = devices.filter_map(|path| path.strip_prefix("/dev/nvidia")?.parse().ok());
            let report = ContainerReport {
                node: container.node.clone(),
                pod_uid: container.pod_uid.clone(),
                container: container.container.clone(),
                id: container.id.clone(),
                running: true,
                gpus: minors.collect(),
                env: container.env.clone(),
            };
            audit.take(at, Fact::Report(report.clone()));
            self.known.insert(container.id.clone(), report);
        }
        self.known.retain(|id, report| {
            let is_there = living.iter().any(|container| container.id == *id);
            if !is_there {
                report.running = false;
                audit.take(at, Fact::Report(report.clone()));
            }
            is_there
        });
    }
}

/// Pass what the watches report to the audit. It needs the nodes to interpret the pods, so the first list of nodes precedes the pods.
async fn follow(client: kube::Client, audit: SharedAudit, is_listed: Arc<AtomicBool>) {
    let mut nodes = pin!(watch::nodes_as_they_come(client.clone()));
    let mut pods = pin!(watch::pods_as_they_come(client));
    let (mut broken_nodes, mut broken_pods) = (None, None);
    let mut has_nodes = false;
    loop {
        tokio::select! {
            Some(seen) = nodes.next() => {
                has_nodes |= matches!(seen, WatchMessage::ListEnds);
                take(&audit, WatchedKind::Nodes, seen, &mut broken_nodes, node);
            }
            Some(seen) = pods.next(), if has_nodes => {
                let is_end = matches!(seen, WatchMessage::ListEnds);
                take(&audit, WatchedKind::Pods, seen, &mut broken_pods, pod);
                is_listed.fetch_or(is_end, Ordering::Relaxed);
            }
            else => return,
        }
    }
}

/// Pass a message of a watch to the audit. `broken` is why the watch broke, until it has resumed.
fn take<T>(
    audit: &SharedAudit,
    kind: WatchedKind,
    seen: WatchMessage<T>,
    broken: &mut Option<String>,
    read: fn(T, bool) -> (Option<u64>, Fact),
) {
    let (revision, fact) = match seen {
        WatchMessage::ListBegins => (
            None,
            Fact::ListBegins {
                kind,
                why: broken.take(),
            },
        ),
        WatchMessage::ListEnds => (None, Fact::ListEnds { kind }),
        WatchMessage::There(object) => read(object, false),
        WatchMessage::Gone(object) => read(object, true),
        WatchMessage::Interrupted(why) => {
            *broken = Some(why);
            return;
        }
        WatchMessage::Resumed => {
            *broken = None;
            return;
        }
    };
    let mut audit = lock(audit);
    audit.take(now(revision), fact);
}

fn node(object: NodeObject, is_gone: bool) -> (Option<u64>, Fact) {
    let node = convert::node(&object);
    let fact = if is_gone {
        Fact::NodeGone(node.name)
    } else {
        Fact::Node(node)
    };
    (revision(&object.metadata), fact)
}

fn pod(object: PodObject, is_gone: bool) -> (Option<u64>, Fact) {
    let revision = revision(&object.metadata);
    let delete_by = object.metadata.deletion_timestamp.as_ref();
    let delete_by_ms = delete_by.map(|time| time.0.as_millisecond());
    // The pod's requests may be unreadable; what it holds still counts.
    let (pod, _) = ReadPod::from(object).into_parts();
    let fact = if is_gone {
        Fact::PodGone(pod)
    } else {
        Fact::Pod { pod, delete_by_ms }
    };
    (revision, fact)
}

fn revision(meta: &ObjectMeta) -> Option<u64> {
    meta.resource_version.as_ref()?.parse().ok()
}
