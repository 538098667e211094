//! Measures a page of 100 nodes with 8 GPUs each and 4 pods on each GPU, through the router: rendering, compression, and the compressed size, which must be at most 50 KB.
//! Also what a new scene of 5,000 such nodes costs, and the parts that a stream sends after it.
//!
//! `cargo bench -p divvy-web`

#![allow(clippy::print_stdout, missing_docs)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use criterion::{Criterion, criterion_group, criterion_main};
use divvy_page::{ClusterScene, Filter, MeasuredUsage, PageAddress, UsageHistory, listing, page, part};
use divvy_view_sim::{ClusterMoment, equal};
use divvy_web::{Hosts, LocalToken, PageHub, router};
use http::Request;
use http_body_util::BodyExt as _;
use tower::ServiceExt as _;

/// The number of pods on each GPU.
const PODS: u64 = 4;
/// The limit on the compressed size.
const BYTES: usize = 50_000;

fn scene(cluster: ClusterMoment) -> ClusterScene {
    let at = cluster.at;
    let answers = cluster.usage.into_iter();
    ClusterScene {
        at,
        view: cluster.view,
        answers: answers.map(|(node, usage)| (node, MeasuredUsage { at, usage })).collect(),
        waiting: cluster.waiting,
        ..ClusterScene::default()
    }
}

/// Return the size of the compressed first page.
fn ask(runtime: &tokio::runtime::Runtime, router: &Router, token: &str) -> usize {
    let request = Request::get("/")
        .header("host", "localhost:80")
        .header("accept-encoding", "gzip")
        .header("authorization", format!("Bearer {token}"))
        .body(Body::empty())
        .expect("a request");
    runtime.block_on(async {
        let response = router.clone().oneshot(request).await.expect("an answer");
        assert!(response.status().is_success() && response.headers().contains_key("content-encoding"));
        response.into_body().collect().await.expect("a body").to_bytes().len()
    })
}

fn benches(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    let gate = LocalToken::random().expect("random");
    let token = gate.text().to_owned();
    let hub = Arc::new(PageHub::new());
    let router = router(hub.clone(), Arc::new(gate), Hosts::loopback(80));
    for pods in 1..=4 {
        hub.show(scene(equal(100, pods, 0)));
        println!(
            "a page of 100 nodes, {pods} pods per GPU: {} bytes compressed",
            ask(&runtime, &router, &token)
        );
    }
    let hundred = scene(equal(100, PODS, 0));
    let address = PageAddress::Cluster(Filter::default());
    let html = page(&hundred, &UsageHistory::default(), &address, "v").expect("a page");

    hub.show(hundred.clone());
    let compressed = ask(&runtime, &router, &token);
    println!(
        "a page of 100 nodes: {} bytes, compressed {compressed} bytes (at most {BYTES})",
        html.len()
    );
    assert!(compressed <= BYTES);
    criterion.bench_function("render a page of 100 nodes", |bencher| {
        bencher.iter(|| page(black_box(&hundred), &UsageHistory::default(), &address, "v"));
    });
    criterion.bench_function("answer with a page of 100 nodes, compressed", |bencher| {
        bencher.iter(|| ask(&runtime, &router, &token))
    });
    let keys = listing(&hundred, &address).expect("a page").keys;
    criterion.bench_function("all parts of this page for a stream", |bencher| {
        bencher.iter(|| {
            keys.iter()
                .filter_map(|key| part(&hundred, &UsageHistory::default(), &address, key))
                .map(|part| part.len())
                .sum::<usize>()
        });
    });
    let scenes: Vec<ClusterScene> = (0..2).map(|step| scene(equal(5000, PODS, step))).collect();
    let before = ClusterScene {
        answers: BTreeMap::new(),
        ..scenes[0].clone()
    };
    let mut one_changed = before.clone();
    Arc::make_mut(&mut one_changed.view.nodes[0]).driver_trouble = Some("no driver".to_owned());
    let pair = [before, one_changed];
    let mut step = 0;
    criterion.bench_function("show 5,000 nodes, none of them measured and one of them changed", |bencher| {
        bencher.iter_batched(
            || {
                step += 1;
                pair[step % 2].clone()
            },
            |scene| hub.show(scene),
            criterion::BatchSize::LargeInput,
        );
    });
    let mut step = 0;
    criterion.bench_function("show 5,000 nodes, all of them measured and changed", |bencher| {
        bencher.iter_batched(
            || {
                step += 1;
                scenes[step % 2].clone()
            },
            |scene| hub.show(scene),
            criterion::BatchSize::LargeInput,
        );
    });
}

criterion_group! {
    name = group;
    config = Criterion::default().sample_size(20);
    targets = benches
}
criterion_main!(group);
