//! Checks of CDI specs.

use std::collections::{BTreeMap, BTreeSet};

use divvy_cdi::stale::Stale;
use divvy_cdi::{FoundSpec, ProblemSeverity};

use crate::check::{CheckVerdict, Repair, count, problem, repaired_by, skip};
use crate::facts::Facts;

/// The CDI kinds that `divvy cdi generate` writes, each with the value of `--vendor` that selects it.
const OURS: [(&str, &str); 3] = [
    ("nvidia.com/gpu", "nvidia"),
    ("amd.com/gpu", "amd"),
    ("intel.com/gpu", "intel"),
];

/// Judge check C01.
pub(super) fn fresh(facts: &Facts<'_>) -> CheckVerdict {
    let registry = facts.specs();
    let files = registry.files();
    if files.is_empty() {
        return match facts.any_gpu() {
            Ok(()) => skip("no CDI spec in /etc/cdi or /var/run/cdi (R03, R15)"),
            Err(_) => skip("no CDI spec, and no GPU"),
        };
    }
    let (mut wrong, mut repairs, mut fresh) = (Vec::new(), Vec::new(), 0);
    let mut refused = Vec::new();
    let mut unused = Vec::new();
    let devices = registry.devices();
    for file in files {
        let Some(spec) = file.usable() else {
            refused.push(file.path.as_str());
            continue;
        };
        let stale = Stale::check(spec, facts.tree);
        if !stale.is_stale() {
            fresh += 1;
            continue;
        }
        let mut own = devices.iter().filter(|device| device.file.path == file.path).peekable();
        if own.peek().is_some()
            && let Some(winners) = own.map(|device| device.hidden_by).collect::<Option<BTreeSet<&str>>>()
        {
            let winners = Vec::from_iter(winners).join(", ");
            unused.push(format!(
                "; {} is stale, but all its devices come from {winners}: remove it",
                file.path
            ));
            continue;
        }
        wrong.push(format!("{}: {}", file.path, stale.sentences().join("; ")));
        if let Some((_, vendor)) = OURS.iter().find(|(kind, _)| *kind == spec.kind) {
            repairs.push(Repair::Spec {
                path: file.path.clone(),
                vendor: (*vendor).to_owned(),
                driver_root: facts.driver_root.clone(),
            });
        }
    }
    if wrong.is_empty() {
        let left_out = if refused.is_empty() {
            String::new()
        } else {
            format!("; not checked: {} (no usable spec, see C02)", refused.join(", "))
        };
        return Ok(format!("{} checked{left_out}{}", count(fresh, "spec"), unused.concat()));
    }
    let fix: Vec<String> = repairs
        .iter()
        .filter_map(|repair| match repair {
            Repair::Spec { path, vendor, .. } => Some(facts.generate(vendor, path)),
            _ => None,
        })
        .collect();
    let fix = if fix.is_empty() {
        "generate the file again with the tool that wrote it, or remove it".to_owned()
    } else {
        format!("{} (or: divvy doctor --fix --only C01)", fix.join("; "))
    };
    let verdict = problem(
        wrong.join("\n"),
        "containers with these devices do not start (\"no such file or directory … libcuda.so.…\"), or run with libraries that the kernel module rejects; \
         with a wrong device number, nvidia-smi works in them, and cuInit returns 999",
        fix,
    );
    repaired_by(verdict, repairs)
}

/// Judge check C02.
pub(super) fn usable(facts: &Facts<'_>) -> CheckVerdict {
    let registry = facts.specs();
    if registry.files().is_empty() {
        return skip("there is no CDI spec");
    }
    let mut wrong: Vec<String> = Vec::new();
    for file in registry.files() {
        let errors = file
            .problems()
            .into_iter()
            .filter(|problem| problem.severity == ProblemSeverity::Error);
        if let Some(first) = errors.map(|problem| problem.to_string()).next() {
            wrong.push(format!("{} is invalid: {first}", file.path));
        }
    }
    // Report two files that define the same devices in one line for the pair.
    let mut pairs: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    let devices = registry.devices();
    for device in &devices {
        for other in device
            .conflicts_with
            .iter()
            .filter(|other| device.file.path.as_str() < **other)
        {
            pairs.entry((&device.file.path, other)).or_default().push(&device.name);
        }
    }
    for ((one, other), names) in pairs {
        wrong.push(format!("{one} and {other} both define {}", names.join(", ")));
    }
    if wrong.is_empty() {
        let usable = registry.files().iter().filter_map(FoundSpec::usable).count();
        return Ok(format!("{} with {}", count(usable, "spec"), count(devices.len(), "device")));
    }
    problem(
        wrong.join("\n"),
        "engines ignore invalid files, and devices that two files of one directory define: \"unresolvable CDI devices\"",
        "divvy cdi validate /etc/cdi /var/run/cdi shows all errors; correct or remove the file",
    )
}
