//! The metrics of `/metrics`. Counters are kept here or in the core; gauges are read from the core at each scrape.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::index::Feed;
use divvy_exposition::{Float, Histogram, MetricsFormat, MetricsPage};
use divvy_placement::{Totals, WaitReason};

use crate::core::{ExtenderCore, ExtenderCounts, WAITS_S, Waits};

divvy_exposition::metrics! {
    REQUEST_DURATION: Histogram = "divvy_extender_request_duration_seconds",
        "Time to answer a request, by verb; the count is the number of requests.";
    BINDS: Counter = "divvy_extender_binds_total",
        "Binds by outcome.";
    EVICTIONS: Counter = "divvy_extender_evictions_total",
        "Evictions of pods that do not keep to their share of a GPU, by the API server's answer.";
    PROMISED_TWICE: Counter = "divvy_extender_promised_twice_total",
        "Pods whose allocated memory is also allocated to another pod; each gets a warning event.";
    DEPARTED: Counter = "divvy_extender_departed_total",
        "Pods that vanished while a container was last seen running; their memory is held for a while.";
    WATCH_INTERRUPTIONS: Counter = "divvy_extender_watch_interruptions_total",
        "Times that a watch broke and was resumed.";
    WATCH_LISTS: Counter = "divvy_extender_watch_lists_total",
        "Complete lists received; each list after the first follows a watch that could not be resumed.";
    NODES: Gauge = "divvy_ledger_nodes",
        "Nodes by the source of their GPU data; unknown: only known from pods.";
    ANOMALIES: Gauge = "divvy_ledger_anomalies",
        "Anomalies in the ledger, by kind.";
    PODS_WAITING: Gauge = "divvy_pods_waiting",
        "Pods that ask for GPUs and are not bound, by what is in their way; every replica counts all of them, so take the maximum and not the sum. \
         no_room: too little is free on the GPUs; node_not_ready: a node, its agent or its inventory; unit: a node counts in another unit; model: the \
         rules of the pod accept none of the GPUs; no_gpu_fits: no GPU is large enough, or not enough of them on one node; other: another part of the \
         scheduler, or not known yet.";
    POD_WAIT: Histogram = "divvy_pod_wait_seconds",
        "Time from the creation of a pod that asks for GPUs to its bind by this replica.";
    FRAGMENTATION: Gauge = "divvy_fragmentation_ratio",
        "Part of the free memory of healthy, shared GPUs that a pod cannot use because too little is free on each single GPU; the mean over all pods \
         that ask for shared memory and have not ended, each with the amount that it asks of one GPU.";
    CERTIFICATE_EXPIRY: Gauge = "divvy_extender_certificate_expiry_timestamp_seconds",
        "When the extender's certificate expires, in Unix time; 0 while there is none.";
    OVERCOMMIT: Gauge = "divvy_ledger_overcommit_bytes",
        "Memory allocated beyond what the GPUs have; must be 0.";
    OVERCOMMIT_MIB: Gauge = "divvy_ledger_overcommit_mebibytes",
        "Deprecated: the same in MiB; the next release has only divvy_ledger_overcommit_bytes.";
    RESERVATIONS: Gauge = "divvy_ledger_reservations",
        "Allocations that the extender has reserved but not yet seen in a pod's annotations.";
    HELD_DEPARTED: Gauge = "divvy_ledger_departed",
        "Vanished pods whose memory is held until their node's agent reports what they still hold, or for a while.";
    KNOWN_PODS: Gauge = "divvy_ledger_pods",
        "Pods that the ledger knows.";
    BINDS_UNDER_WAY: Gauge = "divvy_extender_binds_under_way",
        "Binds that have not been answered yet.";
    LEADS: Gauge = "divvy_extender_leads",
        "1 if this replica is the leader; the sum over all replicas is at most 1.";
    SYNCED: Gauge = "divvy_extender_synced",
        "1 if pods and nodes have been listed.";
    REFUSED_CLIENTS: Counter = "divvy_extender_refused_clients_total",
        "Clients that were refused, by reason.";
}

/// The classes of how long requests take, in seconds: from 0.2 ms, a tenth of the time budget of filter, to kube-scheduler's timeout of 5 s.
const DURATIONS: [f64; 14] = [
    0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
];

/// Why a client was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClientRefusal {
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

impl ClientRefusal {
    const ALL: [(ClientRefusal, &'static str); 8] = [
        (ClientRefusal::PlainHttp, "plain_http"),
        (ClientRefusal::ForeignCertificate, "foreign_certificate"),
        (ClientRefusal::UntrustedByClient, "untrusted_by_client"),
        (ClientRefusal::Handshake, "handshake"),
        (ClientRefusal::NoCertificate, "no_certificate"),
        (ClientRefusal::OtherName, "other_name"),
        (ClientRefusal::TooMany, "too_many"),
        (ClientRefusal::TooSlow, "too_slow"),
    ];
}

/// The metrics that request handlers and the TLS listener update. By default nothing is counted yet.
#[derive(Debug, Default)]
pub struct ExtenderMetrics {
    refused: [AtomicU64; ClientRefusal::ALL.len()],
    durations: Mutex<BTreeMap<&'static str, Histogram>>,
}

impl ExtenderMetrics {
    /// Count one answered request.
    pub fn answered(&self, verb: &'static str, took: Duration) {
        let mut durations = self.durations();
        let of_verb = durations.entry(verb).or_insert_with(|| Histogram::new(&DURATIONS));
        of_verb.observe(took.as_secs_f64());
    }

    fn durations(&self) -> MutexGuard<'_, BTreeMap<&'static str, Histogram>> {
        self.durations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Count a refusal. Return true for the first of its kind, which deserves a log line.
    pub(crate) fn refused(&self, why: ClientRefusal) -> bool {
        self.refused[why as usize].fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Return the text of `/metrics`.
    pub fn text(&self, scrape: &Scrape, format: MetricsFormat) -> String {
        let mut page = MetricsPage::new(format);
        // A copy: no request waits while the text is written.
        let durations = self.durations().clone();
        page.write_histograms(
            &REQUEST_DURATION,
            durations.iter().map(|(verb, of_verb)| ([("verb", verb)], of_verb)),
        );
        describe(&mut page, scrape);
        let refused = ClientRefusal::ALL.map(|(why, name)| (name, self.refused[why as usize].load(Ordering::Relaxed)));
        page.write_by(&REFUSED_CLIENTS, "reason", refused);
        page.finish()
    }
}

/// A snapshot of the core for one scrape. While the core is locked, no loop goes over the pods and no text is written: with 5,000 nodes,
/// this takes a fraction of a millisecond.
#[derive(Debug)]
pub struct Scrape {
    counts: ExtenderCounts,
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
    pub fn of(core: &ExtenderCore, certificate_ends_s: Option<i64>, leads: bool) -> Scrape {
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

fn describe(page: &mut MetricsPage<'_>, scrape: &Scrape) {
    let (counts, totals, pods, nodes) = (scrape.counts, scrape.totals, &scrape.pods, &scrape.nodes);
    let binds = [
        ("bound", counts.bound),
        ("already_bound", counts.already_bound),
        ("refused", counts.refused),
        ("unknown", counts.unknown),
    ];
    page.write_by(&BINDS, "outcome", binds);
    let evictions = [
        ("evicted", counts.evicted),
        ("refused", counts.evictions_refused),
        ("unknown", counts.evictions_unknown),
    ];
    page.write_by(&EVICTIONS, "outcome", evictions);
    page.write_one(&PROMISED_TWICE, counts.promised_twice);
    page.write_one(&DEPARTED, counts.departed);
    let interruptions = [("pods", pods.interruptions), ("nodes", nodes.interruptions)];
    page.write_by(&WATCH_INTERRUPTIONS, "resource", interruptions);
    page.write_by(&WATCH_LISTS, "resource", [("pods", pods.lists), ("nodes", nodes.lists)]);
    let sources = [
        ("inventory", totals.inventory),
        ("division", totals.division),
        ("unusable", totals.unusable),
        ("unknown", totals.unknown),
    ];
    page.write_by(&NODES, "source", sources);
    let anomalies = [
        ("overcommitted", totals.overcommitted),
        ("unknown_gpu", totals.unknown_gpu),
        ("unreadable", totals.unreadable),
        ("not_allocated", totals.not_allocated),
    ];
    page.write_by(&ANOMALIES, "kind", anomalies);
    let reasons = WaitReason::ALL.into_iter().map(|(_, name)| name);
    page.write_by(&PODS_WAITING, "reason", reasons.zip(scrape.waiting));
    page.write_histograms(&POD_WAIT, [([("", ""); 0], histogram(scrape.waits))]);
    page.write_one(&FRAGMENTATION, Float(f64::from(scrape.fragmentation_ppm) / 1e6));
    if let Some(ends_s) = scrape.certificate_ends_s {
        page.write_one(&CERTIFICATE_EXPIRY, ends_s);
    }
    page.write_one(&OVERCOMMIT, totals.overcommit.0.saturating_mul(1 << 20));
    page.write_one(&OVERCOMMIT_MIB, totals.overcommit.0);
    page.write_one(&RESERVATIONS, scrape.reservations);
    page.write_one(&HELD_DEPARTED, scrape.departed);
    page.write_one(&KNOWN_PODS, scrape.known_pods);
    page.write_one(&BINDS_UNDER_WAY, scrape.under_way);
    page.write_one(&LEADS, u8::from(scrape.leads));
    page.write_one(&SYNCED, u8::from(scrape.synced));
}

fn histogram(waits: Waits) -> Histogram {
    let ends = WAITS_S.iter().map(|end_s| f64::from(*end_s)).chain([f64::INFINITY]);
    Histogram {
        buckets: ends.zip(waits.pods).collect(),
        sum: Duration::from_millis(waits.sum_ms).as_secs_f64(),
    }
}
