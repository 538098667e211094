//! A complete run of the published setting: 1,213 nodes, and pods that arrive in a published order until they have requested 130
//! % of the GPU capacity.
//!
//! Run it with `DIVVY_OPENB=DIRECTORY cargo bench -p divvy-simulator`. `tests/it/openb.rs` describes the directory. Without it,
//! nothing is measured.

#![allow(missing_docs, clippy::print_stdout)]

use std::fs;
use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use divvy_policy::Policy;
use divvy_simulator::{Order, Trace, inflate};

fn replay(c: &mut Criterion) {
    let Some(directory) = divvy_skip::directory("DIVVY_OPENB", "the openb traces") else {
        return;
    };
    let read = |name: &str| {
        let path = directory.join(name);
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let nodes = read("openb_node_list_gpu_node.csv.gz");
    let mut group = c.benchmark_group("replay");
    group.sample_size(10);
    for list in ["default", "gpushare100"] {
        let trace = Trace::read(&nodes, &read(&format!("openb_pod_list_{list}.csv.gz"))).expect("a trace");
        let order = Order::read(&read(&format!("orders/{list}_42.txt.gz")), &trace).expect("an order");
        for policy in [Policy::Divvy, Policy::Fgd] {
            group.bench_function(format!("{policy}/{list}"), |b| {
                b.iter(|| black_box(inflate(&trace, &order, policy)));
            });
        }
    }
}

criterion_group!(benches, replay);
criterion_main!(benches);
