//! Checks of kube-scheduler and its extender.

use divvy_model::names::GPU_MEM;

use crate::check::{CheckStop, CheckVerdict, Severity, blind, milder, problem, skip};
use crate::facts::programs::ExtenderVersion;
use crate::facts::{Asked, CheckedScheduler, Facts, version_at_least};

fn scheduler(facts: &Facts<'_>) -> Result<CheckedScheduler, CheckStop> {
    facts
        .scheduler()
        .ok_or_else(|| CheckStop::Skip("no static pod, distribution, or process runs kube-scheduler here".to_owned()))
}

/// Versions of the configuration's API, each with the Kubernetes version that removed it.
const GONE: [(&str, [u32; 2]); 4] = [
    ("kubescheduler.config.k8s.io/v1alpha1", [1, 22]),
    ("kubescheduler.config.k8s.io/v1beta1", [1, 25]),
    ("kubescheduler.config.k8s.io/v1beta2", [1, 28]),
    ("kubescheduler.config.k8s.io/v1beta3", [1, 29]),
];

/// Judge check K10.
pub(super) fn version(facts: &Facts<'_>) -> CheckVerdict {
    let scheduler = scheduler(facts)?;
    let version = scheduler.version.clone().unwrap_or_default();
    let shown = if version.is_empty() { "of unknown version" } else { &version };
    let why = "kube-scheduler does not start, and no pod is scheduled: \"no kind \\\"KubeSchedulerConfiguration\\\" is registered for version …\"";
    let fix = "divvy scheduler-config --merge FILE prints the configuration in the current form: apiVersion: kubescheduler.config.k8s.io/v1";
    if scheduler.policy_flag && version_at_least(&version, &[1, 23]) {
        return problem(
            format!("kube-scheduler {shown} is started with --policy-config-file, which Kubernetes 1.23 removed"),
            why,
            format!(
                "use a KubeSchedulerConfiguration with --config instead: divvy scheduler-config --for {} prints the steps",
                scheduler.distribution
            ),
        );
    }
    if scheduler.on_host.is_none() {
        return skip("kube-scheduler has no --config file on this machine");
    }
    let Some(configuration) = facts.scheduler_configuration(&scheduler) else {
        return blind("kube-scheduler's configuration cannot be read as YAML (K11)");
    };
    let api = configuration["apiVersion"].as_str().unwrap_or_default().to_owned();
    let kind = configuration["kind"].as_str().unwrap_or_default();
    if kind != "KubeSchedulerConfiguration" {
        return problem(format!("its kind is {kind:?}, not KubeSchedulerConfiguration"), why, fix);
    }
    let found = facts.scheduler_file.answer().map_or(&[][..], |found| &found.stops);
    // A newer kube-scheduler may have fields that this program does not know.
    let is_newer = version_at_least(&version, &[1, 37]);
    let stops: Vec<&str> = found
        .iter()
        .map(String::as_str)
        .filter(|stop| !(is_newer && stop.starts_with("warning:")))
        .collect();
    if !stops.is_empty() {
        let file = scheduler.on_host.as_deref().unwrap_or_default();
        return problem(
            format!("{file}: {}", stops.join("\n")),
            "kube-scheduler does not start with this file, and no pod is scheduled",
            format!(
                "correct {file} at these places, then {}; divvy scheduler-config --merge {file} shows what remains",
                scheduler.restart()
            ),
        );
    }
    match GONE.iter().find(|(gone, _)| *gone == api) {
        Some((_, since)) if version_at_least(&version, since) || version.is_empty() => problem(
            format!(
                "its apiVersion is {api}, which Kubernetes {}.{} removed; kube-scheduler here is {shown}",
                since[0], since[1]
            ),
            why,
            fix,
        ),
        Some((_, since)) => milder(
            Severity::Warning,
            format!("its apiVersion is {api}, which Kubernetes {}.{} removes", since[0], since[1]),
            why,
            fix,
        ),
        None if api == "kubescheduler.config.k8s.io/v1" && !version.is_empty() && !version_at_least(&version, &[1, 25]) => {
            problem(
                format!("its apiVersion is {api}, which needs Kubernetes 1.25; kube-scheduler here is {shown}"),
                why,
                "set apiVersion: kubescheduler.config.k8s.io/v1beta2 for this older kube-scheduler",
            )
        }
        None if api == "kubescheduler.config.k8s.io/v1" => Ok(format!("{api}, kube-scheduler {shown}")),
        None => problem(format!("its apiVersion is {api:?}"), why, fix),
    }
}

/// Judge check K11.
pub(super) fn mounted(facts: &Facts<'_>) -> CheckVerdict {
    let scheduler = scheduler(facts)?;
    let Some(config) = &scheduler.config else {
        return problem(
            "kube-scheduler is started without --config",
            "kube-scheduler calls no extender: it binds pods with GPU memory by the node's total only, or not at all",
            format!("divvy scheduler-config --for {} prints the steps", scheduler.distribution),
        );
    };
    let why = "kube-scheduler does not start, or runs with its defaults and without the extender";
    let Some(on_host) = &scheduler.on_host else {
        if !scheduler.in_container() {
            return blind(format!("--config={config} is relative to a directory that is not known"));
        }
        return problem(
            format!("no volume of the pod contains --config={config}"),
            why,
            format!(
                "add a hostPath volume with that file, and its volumeMount: divvy scheduler-config --for {} prints both",
                scheduler.distribution
            ),
        );
    };
    match facts.text(on_host) {
        None => problem(
            format!("there is no {on_host}"),
            why,
            format!("divvy scheduler-config > {on_host}, then {}", scheduler.restart()),
        ),
        Some(text) if text.trim().is_empty() => problem(
            format!(
                "{on_host} is empty{}",
                match scheduler.volume_type.as_deref() {
                    Some("FileOrCreate") => ": the volume type FileOrCreate created it",
                    _ => "",
                }
            ),
            why,
            format!("divvy scheduler-config > {on_host}, then {}", scheduler.restart()),
        ),
        Some(text) => match serde_saphyr::from_str::<serde_json::Value>(&text) {
            Ok(configuration) => match configuration["clientConnection"]["kubeconfig"].as_str() {
                Some(kubeconfig) if !kubeconfig.is_empty() => named(facts, &scheduler, on_host, kubeconfig),
                _ => Ok(format!("{on_host} as {config}")),
            },
            Err(error) => problem(
                format!("{on_host} is not valid YAML: {error}"),
                why,
                "correct the file at that place; divvy scheduler-config prints a complete one",
            ),
        },
    }
}

/// Judge the kubeconfig that the configuration names: with `--config`, kube-scheduler uses no other.
fn named(facts: &Facts<'_>, scheduler: &CheckedScheduler, on_host: &str, kubeconfig: &str) -> CheckVerdict {
    let config = scheduler.config.as_deref().unwrap_or_default();
    let found = match scheduler.host_path(kubeconfig) {
        Some((path, _)) if facts.exists(&path) => return Ok(format!("{on_host} as {config}")),
        Some((path, _)) => format!("there is no {path}"),
        None => "no volume of the pod contains that file".to_owned(),
    };
    problem(
        format!("{on_host} names the kubeconfig {kubeconfig}, but {found}"),
        "kube-scheduler does not start: with --config, it reads no other kubeconfig",
        format!(
            "set clientConnection.kubeconfig to kube-scheduler's own kubeconfig (divvy scheduler-config --for {} names it), then {}",
            scheduler.distribution,
            scheduler.restart()
        ),
    )
}

/// Judge check K12.
pub(super) fn extender(facts: &Facts<'_>) -> CheckVerdict {
    let extenders = facts.extenders();
    let ours = extenders
        .iter()
        .find(|extender| extender.resources.iter().any(|name| name == GPU_MEM) || extender.url.contains("gpushare"));
    let why = "pods with GPU memory stay Pending, or are bound without a GPU: \"unknown device id: no-gpu-has-…-to-run\"";
    if let Some(scheduler) = facts.scheduler() {
        if scheduler.config.is_some() && facts.scheduler_configuration(&scheduler).is_none() {
            return blind("kube-scheduler's configuration cannot be read (K11)");
        }
        let Some(ours) = ours else {
            return problem(
                format!("kube-scheduler's configuration here has no extender for {GPU_MEM}"),
                why,
                "divvy scheduler-config --merge FILE prints the configuration with the extender; divvy scheduler-config --check tests it",
            );
        };
        if !ours.resources.is_empty() && !ours.resources.iter().any(|name| name == GPU_MEM) {
            return problem(
                format!(
                    "kube-scheduler calls the extender {} only for {} (managedResources)",
                    ours.url,
                    ours.resources.join(", ")
                ),
                why,
                format!(
                    "set managedResources: [{{name: {GPU_MEM}, ignoredByScheduler: false}}] for that extender, then {}",
                    scheduler.restart()
                ),
            );
        }
        if ours.ignorable {
            return problem(
                format!("the extender {} is ignorable", ours.url),
                "while the extender does not answer, kube-scheduler binds pods without it, and they start on a GPU without enough memory",
                format!("set ignorable: false for that extender, then {}", scheduler.restart()),
            );
        }
    }
    if let (Some(found), Some(scheduler)) = (facts.scheduler_file.answer(), facts.scheduler())
        && !found.misplaces.is_empty()
    {
        let file = scheduler.on_host.as_deref().unwrap_or_default();
        return milder(
            Severity::Warning,
            format!("divvy scheduler-config would change {file}: {}", found.misplaces.join("\n")),
            "pods with GPU memory wait longer than they must, or get a worse GPU",
            format!(
                "divvy scheduler-config --merge {file} prints the file with these changes; then {}",
                scheduler.restart()
            ),
        );
    }
    let asked = match &facts.extender {
        Asked::Answer(asked) => asked,
        Asked::Failed(reason) => {
            return problem(
                reason.clone(),
                why,
                "kubectl get pods -A | grep extender; then kubectl logs of that pod",
            );
        }
        Asked::Blocked(reason) => return blind(reason.clone()),
        Asked::Absent(reason) | Asked::Not(reason) => return skip(reason.clone()),
    };
    let version = match &asked.version {
        ExtenderVersion::Known(version) => version,
        ExtenderVersion::Unknown(reason) => {
            return problem(
                format!("{} does not answer: {reason}", asked.url),
                why,
                "check that the extender runs (kubectl get pods -A | grep extender) and that its address is right: kube-scheduler on the host network cannot \
                 resolve Service names; divvy scheduler-config --from-cluster writes the address and the certificates",
            );
        }
    };
    // A pod with an allocation shows that kube-scheduler has called the extender, perhaps before the extender's last restart.
    let wanting = facts.cluster.answer().map_or(0, |cluster| {
        let pods = cluster.pods.iter();
        pods.filter(|pod| super::pods::is_unplaced(pod)).count()
    });
    if asked.filter_calls == Some(0) && wanting > 0 {
        return milder(
            Severity::Warning,
            format!(
                "{} answers, but kube-scheduler has never called its filter, although {} a GPU and {} no allocation",
                asked.url,
                match wanting {
                    1 => "1 pod requests".to_owned(),
                    n => format!("{n} pods request"),
                },
                if wanting == 1 { "has" } else { "have" },
            ),
            "kube-scheduler's configuration does not name this extender, or kube-scheduler was not restarted after it was added",
            "divvy scheduler-config --check",
        );
    }
    let left_out = match asked.left_out.as_slice() {
        [] => String::new(),
        all => format!("; not checked: {}", all.join("; ")),
    };
    Ok(match asked.filter_calls {
        Some(calls) => format!("{} ({version}), {calls} filter calls{left_out}", asked.url),
        None => format!("{} ({version}); the number of filter calls is unknown{left_out}", asked.url),
    })
}
