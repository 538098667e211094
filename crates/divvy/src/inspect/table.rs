//! The tables of gpushare's tool, reproduced exactly, and Divvy's own wide table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use divvy_host::plain;
use divvy_model::{MemoryUnit, MiB};
use divvy_view::{GpuView, NodeView, View};
use divvy_why::amount;

use crate::printer::columns;

/// Return the table of `kubectl inspect gpushare`, with a row per node. Without `headers`, return only the rows.
pub fn summary(view: &View, headers: bool) -> String {
    // gpushare's tables are about units. Whole GPUs have none.
    let nodes = || {
        let units = |node: &&Arc<NodeView>| node.shared().next().is_some() || !node.pending.is_empty();
        view.nodes.iter().filter(units)
    };
    let gpus = nodes().map(|node| node.shared().count()).max().unwrap_or(0);
    let pending = view.nodes.iter().any(|node| !node.pending.is_empty());
    let mut raw = String::from("NAME\tIPADDRESS\t");
    for index in 0..gpus {
        let _ = write!(raw, "GPU{index}(Allocated/Total)\t");
    }
    if pending {
        raw.push_str("PENDING(Allocated)\t");
    }
    let _ = writeln!(raw, "GPU Memory({})", view.unit);
    let mut dashes = 0;
    for node in nodes() {
        let mut row = format!("{}\t{}\t", node.name, node.address);
        for column in 0..gpus {
            match node.shared().nth(column) {
                Some(gpu) => {
                    let _ = write!(row, "{}/{}\t", gpu.allocated, gpu.total);
                }
                None => row.push_str("0/0\t"),
            }
        }
        if pending {
            if !node.pending.is_empty() {
                let _ = write!(row, "{}", node.pending_units());
            }
            row.push('\t');
        }
        let _ = writeln!(row, "{}/{}", node.allocated, node.total);
        if dashes == 0 {
            // gpushare's tool derives the number of dashes from the first row before the columns are aligned.
            dashes = row.len() + 20;
        }
        raw.push_str(&row);
    }
    if !headers {
        return without_headers(&raw);
    }
    let mut text = columns(&raw);
    let _ = writeln!(text, "{}", "-".repeat(dashes));
    let _ = writeln!(text, "Allocated/Total GPU Memory In Cluster:");
    let _ = writeln!(
        text,
        "{}/{} ({}%)  ",
        view.allocated,
        view.total,
        percent(view.allocated, view.total)
    );
    text.push_str(&whole(view));
    plain(&text).into_owned()
}

/// Return a line for each resource that offers whole GPUs, such as `amd.com/gpu 3/8`.
fn whole(view: &View) -> String {
    let sums = view.whole.iter();
    sums.map(|(resource, sum)| format!("{resource} {}/{}\n", sum.allocated, sum.total))
        .collect()
}

/// Return the table of `kubectl inspect gpushare -d`, with a block per node and a row per pod.
pub fn details(view: &View) -> String {
    let mut text = String::new();
    let mut dashes = None;
    for node in view.nodes.iter().filter(|node| node.total > 0) {
        let _ = write!(
            text,
            "\n{}\n",
            columns(&format!("NAME:\t{}\nIPADDRESS:\t{}\n", node.name, node.address))
        );
        let rows = pod_rows(node);
        let dashes = *dashes.get_or_insert(rows.len() + 10);
        let mut raw = String::from("NAME\tNAMESPACE\t");
        for gpu in node.shared() {
            let _ = write!(raw, "GPU{}(Allocated)\t", gpu.index);
        }
        if !node.pending.is_empty() {
            raw.push_str("Pending(Allocated)\t");
        }
        raw.push('\n');
        raw.push_str(&rows);
        let _ = writeln!(
            raw,
            "Allocated :\t{} ({}%)\t",
            node.allocated,
            percent(node.allocated, node.total)
        );
        let _ = writeln!(raw, "Total :\t{}\t", node.total);
        text.push_str(&columns(&raw));
        let _ = writeln!(text, "{}", "-".repeat(dashes));
    }
    let cluster = format!(
        "Allocated/Total GPU Memory In Cluster:\t{}/{} ({}%)\t\n",
        view.allocated,
        view.total,
        percent(view.allocated, view.total)
    );
    let _ = write!(text, "\n\n{}", columns(&cluster));
    text.push_str(&whole(view));
    plain(&text).into_owned()
}

/// Return a row for each pod of a node, in the order of the pods' first GPUs, with pending pods last.
fn pod_rows(node: &NodeView) -> String {
    let pending_column = node.shared().count();
    let mut order: Vec<(&str, &str)> = Vec::new();
    let mut cells: BTreeMap<(&str, &str), BTreeMap<usize, u64>> = BTreeMap::new();
    let on_gpus = node
        .shared()
        .enumerate()
        .flat_map(|(column, gpu)| gpu.pods.iter().map(move |pod| (column, pod)));
    for (column, pod) in on_gpus.chain(node.pending.iter().map(|pod| (pending_column, pod))) {
        let key = (pod.namespace.as_str(), pod.name.as_str());
        if !cells.contains_key(&key) {
            order.push(key);
        }
        let cell = cells.entry(key).or_default().entry(column).or_default();
        *cell = cell.saturating_add(pod.units);
    }
    let width = pending_column + usize::from(!node.pending.is_empty());
    let mut rows = String::new();
    for (namespace, name) in order {
        let _ = write!(rows, "{name}\t{namespace}\t");
        for column in 0..width {
            let units = cells
                .get(&(namespace, name))
                .and_then(|pod| pod.get(&column))
                .copied()
                .unwrap_or(0);
            let _ = write!(rows, "{units}\t");
        }
        rows.push('\n');
    }
    rows
}

/// Return the table of `-o wide`, with a row per GPU and the fields of the inventory.
pub fn wide(view: &View, headers: bool) -> String {
    let unit: MemoryUnit = view.unit.parse().unwrap_or_default();
    let mut raw = String::from("NODE\tIPADDRESS\tGPU\tMODEL\tALLOCATED\tTOTAL\tCOMPUTE\tHEALTH\tENFORCED\tPODS\tUUID\n");
    let dash = |text: &Option<String>| text.clone().filter(|text| !text.is_empty()).unwrap_or_else(|| "-".to_owned());
    for node in &view.nodes {
        for gpu in &node.gpus {
            // The same words as in `divvy why`, which subtracts this memory from the free memory.
            let deleted = (gpu.held_mib > 0).then(|| format!("containers of deleted pods ({})", amount(MiB(gpu.held_mib), unit)));
            let pods = gpu
                .pods
                .iter()
                .map(|pod| match &pod.requested {
                    Some(asked) => format!(
                        "{}/{} (asks for {} {})",
                        pod.namespace,
                        pod.name,
                        asked.units,
                        times(&asked.unit)
                    ),
                    None if pod.whole && gpu.is_shared() => format!("{}/{} (whole)", pod.namespace, pod.name),
                    None if pod.cores > 0 => format!("{}/{} ({}%)", pod.namespace, pod.name, pod.cores),
                    None => format!("{}/{}", pod.namespace, pod.name),
                })
                .chain(deleted)
                .collect::<Vec<_>>()
                .join(",");
            let pods = if pods.is_empty() { "-".to_owned() } else { pods };
            let (allocated, total) = if gpu.is_shared() {
                (gpu.allocated, format!("{} {}", gpu.total, times(&view.unit)))
            } else {
                (u64::from(!gpu.pods.is_empty()), "whole".to_owned())
            };
            let compute = match gpu.cores {
                0 => "-".to_owned(),
                cores => format!("{cores}%"),
            };
            let _ = writeln!(
                raw,
                "{}\t{}\t{}\t{}\t{allocated}\t{total}\t{compute}\t{}\t{}\t{}\t{}",
                node.name,
                node.address,
                gpu.index,
                dash(&gpu.model),
                health(gpu),
                gpu.enforcement.unwrap_or("-"),
                pods,
                dash(&gpu.uuid)
            );
        }
        for pod in &node.pending {
            let _ = writeln!(
                raw,
                "{}\t{}\tpending\t-\t{}\t-\t-\t-\t-\t{}/{}\t-",
                node.name, node.address, pod.units, pod.namespace, pod.name
            );
        }
    }
    for node in &view.nodes {
        for pod in &node.unnamed {
            let _ = writeln!(
                raw,
                "{}\t{}\tany\t-\t{}\twhole\t-\t-\t-\t{}/{}\t-",
                node.name, node.address, pod.gpus, pod.namespace, pod.name
            );
        }
    }
    if !headers {
        return without_headers(&raw);
    }
    let mut text = columns(&raw);
    if !view.whole.is_empty() {
        let _ = write!(text, "\n{}", whole(view));
    }
    // Nodes with the same trouble share one line.
    let mut troubles: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for node in &view.nodes {
        if let Some(trouble) = &node.driver_trouble {
            troubles.entry(trouble).or_default().push(&node.name);
        }
    }
    for (trouble, nodes) in troubles.iter().take(TROUBLES) {
        let more = match nodes.len() {
            0..=3 => String::new(),
            n => format!(" and {} more", n - 3),
        };
        let named: Vec<&str> = nodes.iter().take(3).copied().collect();
        let _ = writeln!(text, "\nOn {}{more}: {trouble}", named.join(", "));
    }
    if troubles.len() > TROUBLES {
        let _ = writeln!(
            text,
            "\nMore nodes lack the driver libraries; list them with divvy doctor --cluster --only K19"
        );
    }
    plain(&text).into_owned()
}

fn health(gpu: &GpuView) -> &str {
    match (&gpu.message, gpu.health) {
        (Some(message), _) => message,
        (None, Some(_)) => "ok",
        (None, None) => "-",
    }
}

/// Return a table without its first line.
fn without_headers(raw: &str) -> String {
    let rows = raw.split_once('\n').map_or("", |(_, rows)| rows);
    plain(&columns(rows)).into_owned()
}

/// The largest number of driver problems that `-o wide` shows.
const TROUBLES: usize = 3;

/// Return the text that follows a number of units: `GiB` as in `16 GiB`, and `x 256MiB` as in `64 x 256MiB`.
fn times(unit: &str) -> String {
    if unit.starts_with(|first: char| first.is_ascii_digit()) {
        format!("x {unit}")
    } else {
        unit.to_owned()
    }
}

/// Return a percentage, truncated as in gpushare's tool. If `whole` is 0, the percentage is 0.
fn percent(part: u64, whole: u64) -> u128 {
    (u128::from(part) * 100).checked_div(u128::from(whole)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_model::legacy::LegacyAllocation;
    use divvy_model::{ContainerKind, ContainerRequest, Held, Node, Pod, PodRequest};
    use divvy_view::view;

    fn node(name: &str, address: &str, units: u64, gpus: u64) -> Node {
        Node {
            name: name.to_owned(),
            address: Some(address.to_owned()),
            allocatable_units: units,
            allocatable_gpus: gpus,
            ..Node::default()
        }
    }

    #[test]
    fn driver_trouble_is_said_once_below_the_wide_table() {
        let of = |name: &str| {
            let text = r#"{"v":1,"agent":"","driver":"","unitMiB":1024,"driverTrouble":"no CDI spec; type this","gpus":[{"uuid":"GPU-1","index":0,
                "minor":0,"totalMiB":1024,"units":1,"health":"ok"}]}"#;
            Node {
                inventory: Some(divvy_model::Inventory::parse(text)),
                ..node(name, "10.0.0.1", 1, 1)
            }
        };
        let nodes = ["a", "b", "c", "d", "e"].map(of);
        let text = wide(&view(&nodes, &[]), true);
        assert!(
            text.ends_with("\n\nOn a, b, c and 2 more: no CDI spec; type this\n"),
            "{text}"
        );
    }

    #[test]
    fn whole_gpus_are_listed_and_counted_apart_from_memory() {
        use divvy_testkit::nodes::{add_amd, amd_node, amd_pending, amd_pod, divvy_node, divvy_pod};
        let mut mixed = divvy_node("mixed", &[16]);
        mixed.allocatable_units = 16;
        add_amd(&mut mixed, 2);
        let by_kubelet = Pod {
            node: Some("amd".to_owned()),
            ..amd_pending("any", 2)
        };
        let pods = [divvy_pod("share", "mixed", 0, 4), amd_pod("train", "mixed", &[1]), by_kubelet];
        let shown: Vec<Pod> = pods.into_iter().filter_map(divvy_view::shown).collect();
        let shown = view(&[mixed, amd_node("amd", 4)], &shown);
        assert_eq!((shown.allocated, shown.total), (4, 16));
        let json = serde_json::to_value(&shown).expect("JSON");
        assert_eq!(
            json["whole"],
            serde_json::json!({"amd.com/gpu": {"allocated": 3, "total": 6}})
        );
        let gpu = &json["nodes"][1]["gpus"][2];
        assert_eq!(
            (gpu["vendor"].as_str(), gpu["whole"].as_str()),
            (Some("amd"), Some("amd.com/gpu"))
        );
        assert_eq!(json["nodes"][1]["gpus"][0].get("whole"), None);
        let text = wide(&shown, true);
        for line in [
            "mixed unknown 1 AMD Instinct MI210 1 whole - ok - default/train 0xmixed-1",
            "amd unknown 0 AMD Instinct MI210 0 whole - ok - - 0xamd-0",
            "amd unknown any - 2 whole - - - default/any -",
            "amd.com/gpu 3/6",
        ] {
            let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(text.lines().any(|found| words(found) == line), "{line}:\n{text}");
        }
        let text = summary(&shown, true);
        assert!(
            text.starts_with("NAME   IPADDRESS  GPU0(Allocated/Total)  GPU Memory(GiB)\nmixed"),
            "{text}"
        );
        assert!(
            text.ends_with("4/16 (25%)  \namd.com/gpu 3/6\n") && !text.contains("\namd "),
            "{text}"
        );
        assert!(
            details(&shown).ends_with("4/16 (25%)  \namd.com/gpu 3/6\n"),
            "{}",
            details(&shown)
        );
    }

    fn pod(namespace: &str, name: &str, node: &str, units: u64, gpus: &[(u32, u64)]) -> Pod {
        let held = match gpus {
            [] => Held::Nothing,
            gpus => Held::Legacy(LegacyAllocation {
                gpus: gpus.iter().copied().collect(),
            }),
        };
        let container = ContainerRequest {
            name: "main".to_owned(),
            kind: ContainerKind::App,
            units,
            gpu_count: 0,
        };
        Pod {
            uid: format!("uid-{name}"),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            node: Some(node.to_owned()),
            held,
            request: PodRequest {
                containers: vec![container],
                ..PodRequest::default()
            },
            ..Pod::default()
        }
    }

    fn documented() -> View {
        view(
            &[
                node("node-b", "10.0.0.2", 16, 1),
                node("node-a", "10.0.0.1", 32, 2),
                node("cpu", "10.0.0.3", 0, 0),
            ],
            &[
                pod("ml", "train-0", "node-a", 8, &[(0, 8)]),
                pod("default", "infer-8x2p", "node-a", 3, &[(1, 3)]),
                pod("default", "infer-7c9d", "node-a", 3, &[(1, 3)]),
                pod("default", "lost", "node-b", 5, &[]),
            ],
        )
    }

    #[test]
    fn no_name_in_the_cluster_moves_the_cursor() {
        let shown = view(
            &[node("n1", "10.0.0.1\u{1b}[2J", 16, 1)],
            &[pod("d", "p\u{202e}", "n1", 4, &[(0, 4)])],
        );
        for text in [summary(&shown, true), details(&shown), wide(&shown, true)] {
            assert!(text.contains("10.0.0.1\\u{1b}[2J"), "{text:?}");
            assert_eq!(plain(&text), text);
        }
    }

    #[test]
    fn the_summary_is_the_old_tools_to_the_byte() {
        assert_eq!(
            summary(&documented(), true),
            "NAME    IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  PENDING(Allocated)  GPU Memory(GiB)\n\
             node-a  10.0.0.1   8/16                   6/16                                       14/32\n\
             node-b  10.0.0.2   0/16                   0/0                    5                   5/16\n\
             -----------------------------------------------------\n\
             Allocated/Total GPU Memory In Cluster:\n\
             19/48 (39%)  \n"
        );
    }

    #[test]
    fn gpus_of_a_node_whose_agent_is_away_are_not_called_ok_alone() {
        let gpu = serde_json::json!({"uuid": "GPU-a", "index": 0, "minor": 0, "totalMiB": 16384, "units": 16, "health": "ok"});
        let text = serde_json::json!({"v": 1, "agent": "0", "driver": "1", "unitMiB": 1024, "gpus": [gpu]}).to_string();
        let away = "ok, not offered (is the agent away?)";
        for (capacity, offered, expected, words) in [(16, 16, true, "ok"), (16, 0, false, away), (0, 0, false, away)] {
            let node = Node {
                capacity_units: capacity,
                inventory: Some(divvy_model::Inventory::parse(&text)),
                ..node("n1", "10.0.0.1", offered, 1)
            };
            let view = view(&[node], &[]);
            let gpu = &view.nodes[0].gpus[0];
            assert_eq!((gpu.offered, health(gpu)), (expected, words));
            assert!(wide(&view, true).contains(words));
        }
    }

    #[test]
    fn what_containers_of_deleted_pods_hold_stands_beside_the_pods() {
        let there = [pod("ml", "a", "n1", 3, &[(0, 3)])];
        for (unit, units, pods, expected) in [
            (1024, 16, &there[..], "ml/a,containers of deleted pods (12 GiB)"),
            (1024, 16, &[], "containers of deleted pods (12 GiB)"),
            (256, 64, &[], "containers of deleted pods (12288 MiB)"),
        ] {
            let gpu = serde_json::json!({"uuid": "GPU-a", "index": 0, "minor": 0, "totalMiB": 16384, "units": units, "heldMiB": 12288,
                "health": "ok"});
            let text = serde_json::json!({"v": 1, "agent": "0", "driver": "1", "unitMiB": unit, "gpus": [gpu]}).to_string();
            let node = Node {
                inventory: Some(divvy_model::Inventory::parse(&text)),
                ..node("n1", "10.0.0.1", units, 1)
            };
            let shown = view(&[node], pods);
            assert!(wide(&shown, true).contains(&format!("  ok      -         {expected}  GPU-a\n")));
            assert!(!summary(&shown, true).contains("deleted") && !details(&shown).contains("deleted"));
        }
    }

    #[test]
    fn json_fields_are_words_and_message_has_sentences() {
        let gpu = |uuid: &str, index: u32, health: &str| {
            serde_json::json!({"uuid": uuid, "index": index, "minor": index, "totalMiB": 16384, "units": 16,
                "health": health, "reason": (health != "ok").then_some("XID 79")})
        };
        let gpus = [gpu("GPU-a", 0, "ok"), gpu("GPU-b", 1, "failed")];
        let text = serde_json::json!({"v": 1, "agent": "0", "driver": "1", "unitMiB": 1024, "gpus": gpus}).to_string();
        let shown = |offered| {
            let node = Node {
                capacity_units: 32,
                inventory: Some(divvy_model::Inventory::parse(&text)),
                ..node("n1", "10.0.0.1", offered, 2)
            };
            let json = serde_json::to_value(view(&[node], &[])).expect("JSON");
            let field = |gpu: &serde_json::Value| ["health", "reason", "offered", "message"].map(|field| gpu[field].clone());
            [field(&json["nodes"][0]["gpus"][0]), field(&json["nodes"][0]["gpus"][1])]
        };
        let none = serde_json::Value::Null;
        let failed = |offered: bool| ["failed".into(), "XID 79".into(), offered.into(), "failed (XID 79)".into()];
        assert_eq!(
            shown(16),
            [["ok".into(), none.clone(), true.into(), none.clone()], failed(false)]
        );
        let away = "ok, not offered (is the agent away?)";
        assert_eq!(shown(0), [["ok".into(), none, false.into(), away.into()], failed(false)]);
    }

    #[test]
    fn without_headers_a_table_has_its_rows_alone() {
        assert_eq!(
            summary(&documented(), false),
            "node-a  10.0.0.1  8/16  6/16     14/32\n\
             node-b  10.0.0.2  0/16  0/0   5  5/16\n"
        );
        assert!(!wide(&documented(), false).contains("NODE"));
        assert_eq!(summary(&view(&[], &[]), false), "");
    }

    #[test]
    fn a_pod_that_was_bound_in_another_unit_is_shown_in_both() {
        let gpu = serde_json::json!({"uuid": "GPU-a", "index": 0, "minor": 0, "model": "T4", "totalMiB": 16384, "units": 64, "health": "ok"});
        let text =
            serde_json::json!({"v": 1, "agent": "0", "driver": "1", "unitMiB": 256, "otherUnitsMiB": [1024], "gpus": [gpu]})
                .to_string();
        let node = Node {
            inventory: Some(divvy_model::Inventory::parse(&text)),
            ..node("n1", "10.0.0.1", 64, 1)
        };
        let share = |mib: u64| serde_json::json!([{"uuid": "GPU-a", "memMiB": mib}]);
        let bound = |name: &str, units: u64, mib: u64| {
            let allocation = serde_json::json!({"v": 1, "gpus": share(mib), "containers": {"main": share(mib)}}).to_string();
            Pod {
                held: Held::Allocation(divvy_model::Allocation::parse(&allocation).expect("an allocation")),
                ..pod("d", name, "n1", units, &[])
            }
        };
        let shown = view(&[node], &[bound("new", 3, 768), bound("old", 3, 3072)]);
        assert_eq!(
            wide(&shown, true),
            "NODE  IPADDRESS  GPU  MODEL  ALLOCATED  TOTAL        COMPUTE  HEALTH  ENFORCED  PODS                          UUID\n\
             n1    10.0.0.1   0    T4     15         64 x 256MiB  -        ok      -         d/new,d/old (asks for 3 GiB)  GPU-a\n"
        );
        let json = serde_json::to_value(&shown).expect("JSON");
        let pods = &json["nodes"][0]["gpus"][0]["pods"];
        assert_eq!(
            pods,
            &serde_json::json!([
                {"name": "new", "namespace": "d", "units": 3},
                {"name": "old", "namespace": "d", "units": 12, "requested": {"units": 3, "unit": "GiB"}},
            ])
        );
    }

    #[test]
    fn the_share_of_the_compute_time_and_what_enforces_it_are_shown() {
        let gpu = serde_json::json!({"uuid": "GPU-a", "index": 0, "minor": 0, "model": "T4", "totalMiB": 16384, "units": 16, "health": "ok",
            "enforcement": "guard"});
        let text = serde_json::json!({"v": 1, "agent": "0", "driver": "1", "unitMiB": 1024, "gpus": [gpu]}).to_string();
        let node = Node {
            inventory: Some(divvy_model::Inventory::parse(&text)),
            ..node("n1", "10.0.0.1", 16, 1)
        };
        let bound = |name: &str, cores: u32, enforcement: Option<&str>| {
            let share = serde_json::json!([{"uuid": "GPU-a", "memMiB": 3072, "cores": cores, "enforcement": enforcement}]);
            let allocation = serde_json::json!({"v": 1, "gpus": share, "containers": {}}).to_string();
            Pod {
                held: Held::Allocation(divvy_model::Allocation::parse(&allocation).expect("an allocation")),
                ..pod("d", name, "n1", 3, &[])
            }
        };
        let guard = Some("guard");
        let shown = view(&[node], &[bound("a", 30, guard), bound("b", 0, guard), bound("c", 40, None)]);
        assert_eq!(
            wide(&shown, true),
            "NODE  IPADDRESS  GPU  MODEL  ALLOCATED  TOTAL   COMPUTE  HEALTH  ENFORCED  PODS                     UUID\n\
             n1    10.0.0.1   0    T4     9          16 GiB  70%      ok      guard     d/a (30%),d/b,d/c (40%)  GPU-a\n"
        );
        let json = serde_json::to_value(&shown).expect("JSON");
        let gpu = &json["nodes"][0]["gpus"][0];
        assert_eq!(gpu["cores"], 70);
        assert_eq!(
            gpu["pods"],
            serde_json::json!([
                {"name": "a", "namespace": "d", "units": 3, "cores": 30, "enforcement": "guard"},
                {"name": "b", "namespace": "d", "units": 3, "enforcement": "guard"},
                {"name": "c", "namespace": "d", "units": 3, "cores": 40},
            ])
        );
    }

    #[test]
    fn the_details_are_the_old_tools_to_the_byte() {
        assert_eq!(
            details(&documented()),
            "\nNAME:       node-a\nIPADDRESS:  10.0.0.1\n\nNAME         NAMESPACE  GPU0(Allocated)  GPU1(Allocated)  \n\
             train-0      ml         8                0                \n\
             infer-7c9d   default    0                3                \n\
             infer-8x2p   default    0                3                \n\
             Allocated :  14 (43%)   \n\
             Total :      32         \n\
             --------------------------------------------------------------------------\n\
             \nNAME:       node-b\nIPADDRESS:  10.0.0.2\n\nNAME         NAMESPACE  GPU0(Allocated)  Pending(Allocated)  \n\
             lost         default    0                5                   \n\
             Allocated :  5 (31%)    \n\
             Total :      16         \n\
             --------------------------------------------------------------------------\n\
             \n\nAllocated/Total GPU Memory In Cluster:  19/48 (39%)  \n"
        );
    }

    #[test]
    fn the_tutorials_table_has_54_dashes() {
        let cluster = view(
            &[node("archlinux", "192.168.8.100", 16, 1)],
            &[pod("default", "binpack-0", "archlinux", 3, &[(0, 3)])],
        );
        assert_eq!(
            summary(&cluster, true),
            format!(
                "NAME       IPADDRESS      GPU0(Allocated/Total)  GPU Memory(GiB)\n\
                 archlinux  192.168.8.100  3/16                   3/16\n\
                 {}\n\
                 Allocated/Total GPU Memory In Cluster:\n\
                 3/16 (18%)  \n",
                "-".repeat(54)
            )
        );
    }

    #[test]
    fn a_cluster_without_gpus_has_an_empty_table() {
        assert_eq!(
            summary(&view(&[node("cpu", "10.0.0.3", 0, 0)], &[]), true),
            "NAME  IPADDRESS  GPU Memory()\n\nAllocated/Total GPU Memory In Cluster:\n0/0 (0%)  \n"
        );
    }

    #[test]
    fn a_pod_on_two_gpus_is_one_row() {
        let cluster = view(
            &[node("n", "10.0.0.1", 64, 4)],
            &[pod("default", "p", "n", 6, &[(0, 3), (1, 3)])],
        );
        assert!(
            details(&cluster)
                .contains("p            default    3                3                0                0                \n")
        );
        assert!(summary(&cluster, true).contains("3/16                   3/16                   0/16"));
    }
}
