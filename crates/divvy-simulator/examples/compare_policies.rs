//! Compare two placement policies: how many of these pods find room on these nodes?
//!
//! `cargo run -p divvy-simulator --example compare_policies`

#![allow(clippy::print_stdout, reason = "a program for a terminal")]

use divvy_policy::Policy;
use divvy_simulator::{Order, Trace, inflate};

/// Nodes, in the format of the published Alibaba traces (`cluster-trace-gpu-v2023`).
const NODES: &str = "\
sn,cpu_milli,memory_mib,gpu,model
node-1,64000,262144,2,T4
node-2,64000,262144,2,T4
";

/// `gpu_milli` is the share of each GPU in thousandths.
const PODS: &str = "\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time
small-1,4000,8192,1,300,,,
small-2,4000,8192,1,300,,,
small-3,4000,8192,1,400,,,
small-4,4000,8192,1,500,,,
small-5,4000,8192,1,500,,,
large-1,8000,32768,2,1000,,,
";

fn main() -> Result<(), divvy_simulator::Error> {
    let trace = Trace::read(NODES.as_bytes(), PODS.as_bytes())?;
    let in_order = Order {
        arrivals: (0..trace.pods.len()).collect(),
        ranks: Order::ranks_by_name(&trace),
    };
    for policy in [Policy::Spread, Policy::Divvy] {
        let outcome = inflate(&trace, &in_order, policy);
        println!(
            "{policy:<10} placed {} pods, {} found no room",
            outcome.placed, outcome.failed
        );
    }
    Ok(())
}
