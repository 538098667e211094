//! Comparison with an independent simulator that reproduces the published runs exactly, pod by pod.
//!
//! The traces may be used for research and study only, and are not part of this repository. `DIVVY_OPENB` names a directory with
//! `openb_node_list_gpu_node.csv.gz`, `openb_pod_list_LIST.csv.gz`, `orders/LIST_SEED.txt.gz`, and `exact.csv`. Without it, these
//! tests report that they did nothing.

use std::fs;
use std::path::{Path, PathBuf};

use divvy_policy::Policy;
use divvy_simulator::{Completions, NodeChoice, Order, Setting, Trace, inflate, turn_over};

use crate::lists::{RowList, choosy, large};

fn directory() -> Option<PathBuf> {
    divvy_skip::directory("DIVVY_OPENB", "the openb traces")
}

fn read(directory: &Path, name: &str) -> Vec<u8> {
    let path = directory.join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn trace(directory: &Path, list: &str) -> Trace {
    let nodes = read(directory, "openb_node_list_gpu_node.csv.gz");
    Trace::read(&nodes, &read(directory, &format!("openb_pod_list_{list}.csv.gz"))).expect("a trace")
}

fn order(directory: &Path, trace: &Trace, list: &str, seed: &str) -> Order {
    Order::read(&read(directory, &format!("orders/{list}_{seed}.txt.gz")), trace).expect("an order")
}

fn line(list: &str, policy: &str, seed: &str, trace: &Trace, order: &Order) -> String {
    let by = match policy {
        "packing" => Policy::GpuPacking,
        "bestfit" => Policy::BestFit,
        name => name.parse().expect("a policy"),
    };
    let run = inflate(trace, order, by);
    let at = |percent| run.at(percent).map_or("-".to_owned(), |value| format!("{value:.2}"));
    format!(
        "{list},{policy},{seed},{},{},{},{},{},{},{:.2}",
        at(95),
        at(100),
        at(130),
        run.used_milli,
        run.placed,
        run.failed,
        run.first_failure_milli
            .map_or(0.0, |milli| 100.0 * milli as f64 / trace.capacity_milli() as f64),
    )
}

/// The results match down to the last pod.
#[test]
fn fgd_best_fit_and_packing_match_published_ones() {
    let Some(directory) = directory() else { return };
    let exact = String::from_utf8(read(&directory, "exact.csv")).expect("text");
    let mut wrong = Vec::new();
    let mut known: Option<(String, Trace)> = None;
    let mut runs = 0;
    for expected in exact.lines().skip(1) {
        let fields: Vec<&str> = expected.split(',').collect();
        let [list, policy, seed] = [fields[0], fields[1], fields[2]];
        if known.as_ref().is_none_or(|(name, _)| name != list) {
            known = Some((list.to_owned(), trace(&directory, list)));
        }
        let (_, trace) = known.as_ref().expect("just read");
        let order = order(&directory, trace, list, seed);
        let found = line(list, policy, seed, trace, &order);
        runs += 1;
        if found != expected {
            wrong.push(format!("expected {expected}\nfound    {found}"));
        }
    }
    assert!(runs > 0, "exact.csv has no runs");
    assert!(
        wrong.is_empty(),
        "{} of {runs} runs differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// For these policies, only the spread over ten seeds is published. `random` uses another generator.
#[test]
fn the_other_policies_are_where_they_were_published_to_be() {
    let Some(directory) = directory() else { return };
    let published = String::from_utf8(read(&directory, "published.csv")).expect("text");
    let mut checked = 0;
    for row in published.lines().skip(1) {
        let fields: Vec<&str> = row.split(',').collect();
        let (policy, around) = match fields[1] {
            "DotProd" => (Policy::DotProduct, 0.0),
            "GpuClustering" => (Policy::GpuClustering, 0.0),
            "Random" => (Policy::Random, 0.3),
            _ => continue,
        };
        let [least, most] = [4, 5].map(|field| fields[field].parse::<f64>().expect("a number"));
        let trace = trace(&directory, fields[0]);
        for seed in ["42", "43"] {
            let order = order(&directory, &trace, fields[0], seed);
            let at = inflate(&trace, &order, policy).at(130).expect("130 % arrive");
            let slack = around + 0.005;
            assert!(
                (least - slack..=most + slack).contains(&at),
                "{policy} on {} {seed}: {at:.3}, published {least} to {most}",
                fields[0]
            );
            checked += 1;
        }
    }
    assert_eq!(checked, 24, "four lists, three policies, two seeds");
}

/// The expected values are means over ten orders, five of which are used here.
#[test]
fn rf_is_where_research_had_it() {
    let Some(directory) = directory() else { return };
    for (list, at_100) in [
        ("default", 95.56),
        ("cpu100", 95.51),
        ("gpushare40", 94.28),
        ("gpushare100", 86.64),
    ] {
        let [_, found, _] = means(&directory, list, Policy::Rf);
        assert!((found - at_100).abs() < 0.1, "{list}: {found:.2}, expected {at_100}");
    }
}

/// The mean GPU capacity in use over the five seeds, when 95, 100, and 130 % have arrived.
fn means(directory: &Path, list: &str, policy: Policy) -> [f64; 3] {
    let trace = trace(directory, list);
    let mut sums = [0.0; 3];
    let seeds = ["42", "43", "44", "45", "46"];
    for seed in seeds {
        let run = inflate(&trace, &order(directory, &trace, list, seed), policy);
        for (sum, percent) in sums.iter_mut().zip([95, 100, 130]) {
            *sum += run.at(percent).expect("that much arrives");
        }
    }
    sums.map(|sum| sum / seeds.len() as f64)
}

/// The policy also reaches the expected minimum on every list.
#[test]
fn the_default_policy_beats_fgd_on_every_list() {
    let Some(directory) = directory() else { return };
    for (list, at100, at130) in [
        ("default", 96.0, 96.1),
        ("cpu100", 96.1, 96.2),
        ("gpushare40", 94.7, 94.8),
        ("gpushare100", 88.2, 88.5),
    ] {
        let divvy = means(&directory, list, Policy::Divvy);
        let fgd = means(&directory, list, Policy::Fgd);
        let text = format!("{list}: divvy {divvy:.3?}, fgd {fgd:.3?}, at least {at100} and {at130}");
        assert!(divvy[1] >= at100 && divvy[2] >= at130, "{text}");
        assert!(divvy[0] >= fgd[0], "at 95 %: {text}");
        assert!(divvy[1] > fgd[1] && divvy[2] > fgd[2], "{text}");
    }
}

/// The policy uses no less than the others, and at a load of 90 percent it loses no large pod.
#[test]
fn the_default_policy_keeps_up_when_pods_end() {
    let Some(directory) = directory() else { return };
    let trace = trace(&directory, "default");
    let ranks = Order::ranks_by_name(&trace);
    for load in [90, 97, 105] {
        let of = |policy| turn_over(&trace, &ranks, policy, &Completions::at(load, 1)).expect("a load");
        let divvy = of(Policy::Divvy);
        for other in [Policy::BestFit, Policy::Fgd].map(of) {
            assert!(
                divvy.used_percent() >= other.used_percent() - 0.005,
                "load {load}: {:.3} and {:.3}",
                divvy.used_percent(),
                other.used_percent()
            );
        }
        assert!(load > 90 || divvy.lost_milli == 0, "{} lost at load {load}", divvy.lost_milli);
    }
}

/// The mean GPU capacity in use over the seeds, when 95, 100, and 130 % have arrived, with a generated order for each seed.
fn means_of(trace: &Trace, seeds: std::ops::Range<u64>, setting: Setting, ranks: Option<&[u64]>) -> [f64; 3] {
    let mut sums = [0.0; 3];
    let count = seeds.clone().count() as f64;
    for seed in seeds {
        let mut order = Order::shuffled(trace, seed, 130);
        if let Some(ranks) = ranks {
            order.ranks = ranks.to_vec();
        }
        let run = inflate(trace, &order, setting);
        for (sum, percent) in sums.iter_mut().zip([95, 100, 130]) {
            *sum += run.at(percent).expect("that much arrives");
        }
    }
    sums.map(|sum| sum / count)
}

#[test]
fn harder_settings_cost_at_most_0_8_points() {
    let Some(directory) = directory() else { return };
    let trace = trace(&directory, "default");
    let plain = Setting::from(Policy::Divvy);
    let by_hardware = Order::ranks_by_hardware(&trace);
    let at100 = |setting, ranks| means_of(&trace, 82..84, setting, ranks)[1];
    let before = at100(plain, None);
    for (what, setting, ranks) in [
        ("alike nodes stand together", plain, Some(&by_hardware[..])),
        (
            "lots among equals",
            Setting {
                choice: NodeChoice::Lot,
                ..plain
            },
            None,
        ),
        (
            "scores from 0 to 10",
            Setting {
                choice: NodeChoice::Scores,
                ..plain
            },
            None,
        ),
        (
            "200 pods of history",
            Setting {
                learn_from: Some(200),
                ..plain
            },
            None,
        ),
    ] {
        let after = at100(setting, ranks);
        assert!(after >= before - 0.8, "{what}: {before:.3} before, {after:.3} with it");
    }
}

#[test]
fn choosy_and_large_pods_are_placed_better_than_by_fgd() {
    let Some(directory) = directory() else { return };
    let unpacked = |name: &str| {
        divvy_simulator::decompress(name, &read(&directory, name))
            .expect("gzip")
            .into_owned()
    };
    let node_rows = unpacked("openb_node_list_gpu_node.csv.gz");
    let (nodes, pods) = (
        RowList::read(&node_rows),
        RowList::read(&unpacked("openb_pod_list_default.csv.gz")),
    );
    for (what, list) in [
        ("choosy20", choosy(&nodes, &pods, 20)),
        ("choosy33", choosy(&nodes, &pods, 33)),
        ("large50", large(&pods, 50)),
        ("choosy33-large30", choosy(&nodes, &large(&pods, 30), 33)),
    ] {
        let trace = Trace::read(&node_rows, list.text().as_bytes()).expect("a trace");
        let of = |policy: Policy| means_of(&trace, 82..84, policy.into(), None);
        let (divvy, fgd) = (of(Policy::Divvy), of(Policy::Fgd));
        let text = format!("{what}: divvy {divvy:.3?}, fgd {fgd:.3?}");
        assert!(divvy[1] > fgd[1] && divvy[2] > fgd[2], "{text}");
        assert!(divvy[0] >= fgd[0] - 0.02, "at 95 %: {text}");
    }
}
