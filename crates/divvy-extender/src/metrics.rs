//! The metrics of `/metrics`. Counters are kept here or in the core; gauges are read from the core at each scrape.

use std::fmt;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::index::Feed;
use divvy_exposition::Format;
use divvy_placement::{Totals, WaitReason};
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::core::{Core, Counts, WAITS_S, Waits};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Verb {
    verb: &'static str,
}

/// Why a client was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The client used plain HTTP on a TLS port.
    PlainHttp,
    /// The client's certificate is from another CA or has expired.
    ForeignCertificate,
    /// The client does not accept the extender's certificate.
    UntrustedByClient,
    /// The TLS handshake failed for another reason.
    Handshake,
    /// The client presented no certificate, but the request needs one.
    NoCertificate,
    /// The client's certificate is from the right CA but has no accepted name.
    OtherName,
    /// All connections for this class of clients were in use.
    TooMany,
    /// The client did not send or read in time.
    TooSlow,
}

impl Refused {
    const ALL: [(Refused, &'static str); 8] = [
        (Refused::PlainHttp, "plain_http"),
        (Refused::ForeignCertificate, "foreign_certificate"),
        (Refused::UntrustedByClient, "untrusted_by_client"),
        (Refused::Handshake, "handshake"),
        (Refused::NoCertificate, "no_certificate"),
        (Refused::OtherName, "other_name"),
        (Refused::TooMany, "too_many"),
        (Refused::TooSlow, "too_slow"),
    ];
}

/// The metrics that request handlers and the TLS listener update. docs/reference/metrics.md is generated from these and from [`Scrape`].
pub struct Metrics {
    refused: [AtomicU64; Refused::ALL.len()],
    durations: Family<Verb, Histogram>,
    registry: Mutex<Registry>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    /// Return metrics that have counted nothing.
    fn default() -> Metrics {
        // From 0.2 ms, a tenth of the time budget of filter, to kube-scheduler's timeout of 5 s.
        let durations = Family::<Verb, Histogram>::new_with_constructor(|| {
            Histogram::new([
                0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
            ])
        });
        let mut registry = Registry::default();
        registry.register(
            "divvy_extender_request_duration_seconds",
            "Time to answer a request, by verb; the count is the number of requests",
            durations.clone(),
        );
        Metrics {
            refused: Default::default(),
            durations,
            registry: Mutex::new(registry),
        }
    }
}

impl Metrics {
    /// Count one answered request.
    pub fn answered(&self, verb: &'static str, took: Duration) {
        self.durations.get_or_create(&Verb { verb }).observe(took.as_secs_f64());
    }

    /// Count a refusal. Return true for the first of its kind, which deserves a log line.
    pub(crate) fn refused(&self, why: Refused) -> bool {
        self.refused[why as usize].fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Return the text of `/metrics`.
    ///
    /// # Errors
    /// A value cannot be formatted.
    pub fn text(&self, scrape: &Scrape, format: Format) -> Result<String, fmt::Error> {
        let mut now = Registry::default();
        describe(&mut now, scrape);
        counters(
            &mut now,
            ("divvy_extender_refused_clients", "Clients that were refused, by reason"),
            "reason",
            Refused::ALL.map(|(why, name)| (name, self.refused[why as usize].load(Ordering::Relaxed))),
        );
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        divvy_exposition::encode(&[&registry, &now], format)
    }
}

/// A snapshot of the core for one scrape. While the core is locked, no loop goes over the pods and no text is written: with 5,000 nodes,
/// this takes a fraction of a millisecond.
#[derive(Debug)]
pub struct Scrape {
    counts: Counts,
    under_way: u64,
    pods: Feed,
    nodes: Feed,
    synced: bool,
    totals: Totals,
    reservations: u64,
    departed: u64,
    known_pods: u64,
    waiting: [u64; WaitReason::ALL.len()],
    waits: Waits,
    fragmentation_ppm: u32,
    certificate_ends_s: Option<i64>,
    leads: bool,
}

impl Scrape {
    /// Take a snapshot. `certificate_ends_s` is when the extender's certificate expires, in Unix seconds; `None` without TLS.
    pub fn of(core: &Core, certificate_ends_s: Option<i64>, leads: bool) -> Scrape {
        let ledger = core.index().ledger();
        Scrape {
            counts: core.counts(),
            under_way: core.under_way() as u64,
            pods: core.index().pods().clone(),
            nodes: core.index().nodes().clone(),
            synced: core.index().synced(),
            totals: ledger.totals(),
            reservations: ledger.reservations().count() as u64,
            departed: ledger.departed().count() as u64,
            known_pods: ledger.pod_count() as u64,
            waiting: ledger.waiting(),
            waits: core.waits(),
            fragmentation_ppm: ledger.fragmentation_ppm(),
            certificate_ends_s,
            leads,
        }
    }
}

fn describe(registry: &mut Registry, scrape: &Scrape) {
    let counts = scrape.counts;
    counters(
        registry,
        ("divvy_extender_binds", "Binds by outcome"),
        "outcome",
        [
            ("bound", counts.bound),
            ("already_bound", counts.already_bound),
            ("refused", counts.refused),
            ("unknown", counts.unknown),
        ],
    );
    counters(
        registry,
        (
            "divvy_extender_evictions",
            "Evictions of pods that do not keep to their share of a GPU, by the API server's answer",
        ),
        "outcome",
        [
            ("evicted", counts.evicted),
            ("refused", counts.evictions_refused),
            ("unknown", counts.evictions_unknown),
        ],
    );
    registry.register(
        "divvy_extender_promised_twice",
        "Pods whose allocated memory is also allocated to another pod; each gets a warning event",
        ConstCounter::new(counts.promised_twice),
    );
    registry.register(
        "divvy_extender_departed",
        "Pods that vanished while a container was last seen running; their memory is held for a while",
        ConstCounter::new(counts.departed),
    );
    counters(
        registry,
        (
            "divvy_extender_watch_interruptions",
            "Times that a watch broke and was resumed",
        ),
        "resource",
        [("pods", scrape.pods.interruptions), ("nodes", scrape.nodes.interruptions)],
    );
    counters(
        registry,
        (
            "divvy_extender_watch_lists",
            "Complete lists received; each list after the first follows a watch that could not be resumed",
        ),
        "resource",
        [("pods", scrape.pods.lists), ("nodes", scrape.nodes.lists)],
    );
    let totals = scrape.totals;
    let nodes = [
        ("inventory", totals.inventory),
        ("division", totals.division),
        ("unusable", totals.unusable),
        ("unknown", totals.unknown),
    ];
    gauges(
        registry,
        (
            "divvy_ledger_nodes",
            "Nodes by the source of their GPU data; unknown: only known from pods",
        ),
        "source",
        nodes,
    );
    let anomalies = [
        ("overcommitted", totals.overcommitted),
        ("unknown_gpu", totals.unknown_gpu),
        ("unreadable", totals.unreadable),
        ("not_allocated", totals.not_allocated),
    ];
    gauges(
        registry,
        ("divvy_ledger_anomalies", "Anomalies in the ledger, by kind"),
        "kind",
        anomalies,
    );
    let single = [
        (
            "divvy_ledger_overcommit_bytes",
            "Memory allocated beyond what the GPUs have; must be 0",
            totals.overcommit.0.saturating_mul(1 << 20),
        ),
        (
            "divvy_ledger_overcommit_mebibytes",
            "Deprecated: the same in MiB; the next release has only divvy_ledger_overcommit_bytes",
            totals.overcommit.0,
        ),
        (
            "divvy_ledger_reservations",
            "Allocations that the extender has reserved but not yet seen in a pod's annotations",
            scrape.reservations,
        ),
        (
            "divvy_ledger_departed",
            "Vanished pods whose memory is held until their node's agent reports what they still hold, or for a while",
            scrape.departed,
        ),
        ("divvy_ledger_pods", "Pods that the ledger knows", scrape.known_pods),
        (
            "divvy_extender_binds_under_way",
            "Binds that have not been answered yet",
            scrape.under_way,
        ),
        (
            "divvy_extender_leads",
            "1 if this replica is the leader; the sum over all replicas is at most 1",
            u64::from(scrape.leads),
        ),
        (
            "divvy_extender_synced",
            "1 if pods and nodes have been listed",
            u64::from(scrape.synced),
        ),
    ];
    waiting(registry, scrape);
    if let Some(ends_s) = scrape.certificate_ends_s {
        registry.register(
            "divvy_extender_certificate_expiry_timestamp_seconds",
            "When the extender's certificate expires, in Unix time; 0 while there is none",
            ConstGauge::new(ends_s),
        );
    }
    for (name, help, value) in single {
        registry.register(name, help, ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)));
    }
}

/// Describe the pods that wait for GPUs, and what their waiting is about.
fn waiting(registry: &mut Registry, scrape: &Scrape) {
    let mut reasons = WaitReason::ALL.map(|(_, name)| (name, 0));
    for ((_, count), pods) in reasons.iter_mut().zip(scrape.waiting) {
        *count = pods;
    }
    gauges(
        registry,
        (
            "divvy_pods_waiting",
            "Pods that ask for GPUs and are not bound, by what is in their way; every replica counts all of them, so take the maximum and \
             not the sum. no_room: too little is free on the GPUs; node_not_ready: a node, its agent or its inventory; unit: a node counts in \
             another unit; model: the rules of the pod accept none of the GPUs; no_gpu_fits: no GPU is large enough, or not enough of them on \
             one node; other: another part of the scheduler, or not known yet",
        ),
        "reason",
        reasons,
    );
    registry.register(
        "divvy_pod_wait_seconds",
        "Time from the creation of a pod that asks for GPUs to its bind by this replica",
        WaitHistogram(scrape.waits),
    );
    registry.register(
        "divvy_fragmentation_ratio",
        "Part of the free memory of healthy, shared GPUs that a pod cannot use because too little is free on each single GPU; the mean over all \
         pods that ask for shared memory and have not ended, each with the amount that it asks of one GPU",
        ConstGauge::new(f64::from(scrape.fragmentation_ppm) / 1e6),
    );
}

/// [`Waits`] as a histogram.
#[derive(Debug)]
struct WaitHistogram(Waits);

impl EncodeMetric for WaitHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let ends = WAITS_S.iter().map(|end_s| f64::from(*end_s)).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = ends.zip(self.0.pods).collect();
        let count = self.0.pods.iter().sum();
        encoder.encode_histogram::<NoLabelSet>(Duration::from_millis(self.0.sum_ms).as_secs_f64(), count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

fn gauges<const N: usize>(
    registry: &mut Registry,
    (name, help): (&str, &str),
    label: &'static str,
    values: [(&'static str, u64); N],
) {
    let family = Family::<Vec<(&'static str, &'static str)>, prometheus_client::metrics::gauge::Gauge>::default();
    for (key, value) in values {
        family
            .get_or_create(&vec![(label, key)])
            .set(i64::try_from(value).unwrap_or(i64::MAX));
    }
    registry.register(name, help, family);
}

fn counters<const N: usize>(
    registry: &mut Registry,
    (name, help): (&str, &str),
    label: &'static str,
    values: [(&'static str, u64); N],
) {
    let family = Family::<Vec<(&'static str, &'static str)>, prometheus_client::metrics::counter::Counter>::default();
    for (key, value) in values {
        family.get_or_create(&vec![(label, key)]).inc_by(value);
    }
    registry.register(name, help, family);
}
