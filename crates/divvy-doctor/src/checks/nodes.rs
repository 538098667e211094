//! Checks of device nodes.

use super::vendors;
use crate::check::{CheckVerdict, count, problem, skip};
use crate::facts::Facts;

/// Judge check D09.
pub(super) fn exists(facts: &Facts<'_>) -> CheckVerdict {
    facts.any_gpu()?;
    if facts.wsl() {
        return Ok("/dev/dxg".to_owned());
    }
    let mut expected = Vec::new();
    let mut fix = Vec::new();
    for nodes in vendors::ALL.iter().filter_map(|vendor| (vendor.nodes)(facts)) {
        expected.extend(nodes.expected);
        fix.push(nodes.create);
    }
    if expected.is_empty() {
        return skip("no NVIDIA or AMD driver is loaded (D02); D17 checks Intel's device nodes");
    }
    let mut wrong = Vec::new();
    let mut compared = 0;
    for node in &expected {
        if !facts.exists(&node.path) {
            wrong.push(format!("there is no {}", node.path));
            continue;
        }
        if let (Some(have), Some(wanted)) = (facts.root.device(&node.path), node.number) {
            compared += 1;
            if have != wanted {
                wrong.push(format!(
                    "{} is {}:{}, but the driver uses {}:{}",
                    node.path, have.0, have.1, wanted.0, wanted.1
                ));
            }
        }
    }
    let found = wrong.join("; ");
    let why = "programs in containers cannot open the GPU: CUDA reports \"no CUDA-capable device is detected\" or error 999";
    if wrong.is_empty() {
        let numbers = match expected.len() - compared {
            0 => String::new(),
            n if n == expected.len() => "; device numbers not compared".to_owned(),
            n => format!("; device numbers of {n} not compared"),
        };
        return Ok(format!("{} checked{numbers}", count(expected.len(), "device node")));
    }
    problem(found, why, fix.join("; "))
}
