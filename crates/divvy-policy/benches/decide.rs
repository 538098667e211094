//! The time for one decision, for three sizes of clusters. Warm: one pod ends and another arrives, as in a cluster that has been
//! full for a long time. Cold: the first decision of a process that has just read such a cluster. `benches/latency.rs` prints the
//! percentiles.

#![allow(missing_docs)]

mod cluster;

use std::hint::black_box;

use cluster::Cluster;
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use divvy_policy::Policy;

fn decide(c: &mut Criterion) {
    for policy in [Policy::Divvy, Policy::Fgd] {
        for (nodes, only_large) in [(1213, false), (5000, true), (20_000, true)] {
            let mut cluster = Cluster::new(policy, nodes, only_large);
            cluster.fill();
            c.bench_function(&format!("{policy}/warm/{nodes}"), |b| {
                b.iter(|| {
                    cluster.end();
                    let demand = cluster.pod();
                    black_box(cluster.arrive(&demand))
                });
            });
            let demand = cluster.pod();
            c.bench_function(&format!("{policy}/cold/{nodes}"), |b| {
                b.iter_batched_ref(
                    || cluster.cold(policy),
                    |placer| black_box(placer.decide(&demand, 0)),
                    BatchSize::LargeInput,
                );
            });
        }
    }
}

criterion_group!(benches, decide);
criterion_main!(benches);
