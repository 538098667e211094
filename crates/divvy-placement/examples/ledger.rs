//! Place pods on two nodes until nothing is free, and print why the last pod does not fit.
//!
//! `cargo run -p divvy-placement --example ledger`

#![allow(clippy::print_stdout, reason = "a program for a terminal")]

use divvy_model::{Inventory, MemoryUnit, Node, Pod};
use divvy_placement::{Ask, Ledger};

/// What Divvy's agent writes to the annotation `divvy.dev/inventory` of a node with two GPUs.
const INVENTORY: &str = r#"{"v":1,"agent":"0.1.0","driver":"550.54.15","unitMiB":1024,"gpus":[
    {"index":0,"uuid":"GPU-NODE-0","minor":0,"model":"NVIDIA A10","totalMiB":24576,"units":24,"health":"ok"},
    {"index":1,"uuid":"GPU-NODE-1","minor":1,"model":"NVIDIA A10","totalMiB":24576,"units":24,"health":"ok"}]}"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let unit = MemoryUnit::GIB;
    let mut ledger = Ledger::new(unit);
    for name in ["gpu-1", "gpu-2"] {
        ledger.apply_node(&Node {
            uid: format!("uid-{name}"),
            name: name.to_owned(),
            capacity_units: 48,
            capacity_gpus: 2,
            inventory: Some(Ok(Inventory::parse(&INVENTORY.replace("NODE", name))?)),
            ..Node::default()
        });
    }
    let ask = Ask::new(10, unit);
    for number in 1.. {
        let answers = ["gpu-1", "gpu-2"].map(|node| ledger.choose(node, &ask));
        let Some(choice) = answers.iter().flatten().next() else {
            println!("pod-{number} does not fit:");
            for (node, answer) in ["gpu-1", "gpu-2"].iter().zip(&answers) {
                if let Err(refusal) = answer {
                    println!("  {node}: {}", refusal.filter_text(node));
                }
            }
            break;
        };
        let gpus: Vec<u32> = choice.gpus.iter().map(|gpu| gpu.index).collect();
        println!("pod-{number}: {} on GPU {gpus:?} of {}", choice.memory, choice.node);
        // The extender writes this to the pod; the watch brings it back.
        let request = divvy_model::PodRequest::default();
        ledger.apply_pod(Pod {
            uid: format!("uid-{number}"),
            name: format!("pod-{number}"),
            node: Some(choice.node.clone()),
            held: choice.held(&request, unit),
            ..Pod::default()
        });
    }
    Ok(())
}
