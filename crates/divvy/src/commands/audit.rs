//! `divvy audit`: audit the present state of a cluster.

use crate::audit::{self, AuditVerdict};
use divvy_audit::{Audit, AuditLimits, Fact, Moment, WatchedKind};
use divvy_kube::convert::ReadPod;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_kube::{client, convert, list};
use jiff::Timestamp;
use kube::api::ObjectMeta;

use super::inspect::{choice, warn_left_out};
use super::progress::Arrived;
use crate::cli::{AuditArgs, AuditOutput};
use crate::printer;
use divvy_program::Unclear;

/// Run `divvy audit`. Return whether the audit has no findings.
pub async fn run(args: AuditArgs) -> anyhow::Result<bool> {
    let mut audit = Audit::new(AuditLimits {
        leak_ms: i64::try_from(args.leak_after.as_millis()).unwrap_or(i64::MAX),
        remember_ms: 0,
        reports: false,
        unit: args.memory_unit,
        ..AuditLimits::default()
    });
    let now_ms = audit_once(&args, &mut audit).await?;
    let outcome = audit.finish(Some(now_ms));
    match args.output {
        Some(AuditOutput::Json) => printer::json(&audit::answer(&outcome))?,
        None if printer::coloured() => printer::print(&audit::coloured(&audit::text(&outcome)))?,
        None => printer::print(&audit::text(&outcome))?,
    }
    match audit::unclear(&outcome) {
        Some(why) => Err(Unclear(why).into()),
        None => Ok(audit::verdict(&outcome) == AuditVerdict::Sound),
    }
}

/// Pass the current state of the cluster to the audit. Return the time of that state in Unix milliseconds.
async fn audit_once(args: &AuditArgs, audit: &mut Audit) -> anyhow::Result<i64> {
    let connection = client::connect(&choice(&args.cluster)).await?;
    let client = &connection.client;
    let arrived = Arrived::default();
    let now_ms = || Some(Timestamp::now().as_millisecond());
    let begins = |kind| Fact::ListBegins { kind, why: None };
    let at_ms = now_ms();
    let when = Moment { revision: None, at_ms };
    audit.take(when, begins(WatchedKind::Nodes));
    let node = |object: NodeObject| (revision(&object.metadata), convert::node(&object));
    let all = list::each_node(client, node, |(revision, node)| {
        arrived.node();
        let at_ms = now_ms();
        audit.take(Moment { revision, at_ms }, Fact::Node(node));
    });
    let left_out = arrived.shown(all).await?;
    warn_left_out("node", &left_out);
    let at_ms = now_ms();
    let when = Moment { revision: None, at_ms };
    audit.take(
        when,
        Fact::ListEnds {
            kind: WatchedKind::Nodes,
        },
    );
    audit.take(when, begins(WatchedKind::Pods));
    let pod = |object: PodObject| {
        let delete_by = object.metadata.deletion_timestamp.as_ref();
        let delete_by_ms = delete_by.map(|time| time.0.as_millisecond());
        Ok((revision(&object.metadata), delete_by_ms, ReadPod::from(object).into_parts()))
    };
    let all = list::each_pod(client, None, pod, |(revision, delete_by_ms, (pod, trouble))| {
        arrived.pod();
        if let Some(error) = trouble {
            tracing::warn!("the request of pod {} is left out: {error}", pod.key());
        }
        audit.take(Moment { revision, at_ms }, Fact::Pod { pod, delete_by_ms });
    });
    let left_out = arrived.shown(all).await?;
    warn_left_out("pod", &left_out);
    audit.take(when, Fact::ListEnds { kind: WatchedKind::Pods });
    Ok(Timestamp::now().as_millisecond())
}

fn revision(meta: &ObjectMeta) -> Option<u64> {
    meta.resource_version.as_ref()?.parse().ok()
}
