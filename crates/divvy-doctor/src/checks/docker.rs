//! Checks of Docker.

use divvy_engines::docker;

use crate::check::{CheckVerdict, Severity, blind, milder, problem, skip};
use crate::facts::{Asked, EngineKind, Facts, for_gpus, version_at_least};

/// Judge check R06.
pub(super) fn version(facts: &Facts<'_>) -> CheckVerdict {
    let docker = match &facts.docker {
        Asked::Answer(docker) => docker,
        Asked::Failed(reason) | Asked::Blocked(reason) => return blind(reason.clone()),
        Asked::Absent(reason) | Asked::Not(reason) => return skip(reason.clone()),
    };
    let version = &docker.version;
    let fix = "upgrade Docker, or use containerd";
    if !version_at_least(version, &[1, 12]) {
        return problem(
            format!("Docker {version}"),
            "Docker before 1.12 supports only its own runtime",
            fix,
        );
    }
    if !version_at_least(version, &[19, 3]) {
        return milder(
            Severity::Warning,
            format!("Docker {version}"),
            "\"unknown flag: --gpus\": the flag needs Docker 19.03, and CDI (--device nvidia.com/gpu=all) needs Docker 25",
            fix,
        );
    }
    let cdi = if version_at_least(version, &[25]) {
        "supports CDI"
    } else {
        "no CDI (needs Docker 25)"
    };
    Ok(format!("{version}, {cdi}"))
}

/// Judge check R07.
pub(super) fn runtime(facts: &Facts<'_>) -> CheckVerdict {
    facts.nvidia()?;
    let running = facts.docker.answer();
    if running.is_none() && !facts.exists(docker::CONFIG) && facts.program(&["dockerd"]).is_none() {
        return skip("no Docker here");
    }
    let why = "Docker's containers see no GPU: \"could not select device driver\", \"did you set the docker default runtime to 'nvidia'?\"";
    let configured = match docker::read(&facts.root, docker::CONFIG) {
        Ok(configured) => configured,
        Err(error) => {
            return problem(
                error.found(),
                "dockerd does not start with this file: \"unable to configure the Docker daemon with file /etc/docker/daemon.json\"",
                "correct the file at that place, then: dockerd --validate && systemctl restart docker",
            );
        }
    };
    let runtimes = for_gpus(&configured);
    for (name, runtime) in &runtimes {
        if let Some(path) = runtime
            .path
            .as_ref()
            .filter(|path| path.starts_with('/') && !facts.is_program(path))
        {
            return problem(
                format!(
                    "{} has the runtime {name} at {path}, but that file does not exist",
                    docker::CONFIG
                ),
                why,
                format!(
                    "install the program there, or correct the path in {}; then systemctl restart docker",
                    docker::CONFIG
                ),
            );
        }
    }
    let names: Vec<&str> = runtimes.iter().map(|(name, _)| name.as_str()).collect();
    if let Some(docker) = running {
        let forgotten: Vec<&str> = names
            .iter()
            .copied()
            .filter(|name| !docker.runtimes.iter().any(|running| running == name))
            .collect();
        let default = configured.default_runtime.as_deref();
        if !forgotten.is_empty() || default.is_some_and(|default| default != docker.default_runtime) {
            let what = match default.filter(|default| *default != docker.default_runtime) {
                Some(default) => format!(
                    "the default runtime in the file is {default}, but dockerd uses {}",
                    docker.default_runtime
                ),
                None => format!("the file has the runtime {}, but dockerd does not", forgotten.join(", ")),
            };
            return problem(
                format!("{} was edited, but dockerd was not restarted: {what}", docker::CONFIG),
                why,
                "systemctl restart docker",
            );
        }
    }
    let of_pods = facts.engine().is_ok_and(|engine| engine.kind == EngineKind::Docker);
    let is_default = configured
        .default_runtime
        .as_deref()
        .is_some_and(|name| names.contains(&name));
    let cdi = facts.has_spec("nvidia.com")
        && match running {
            Some(docker) => {
                version_at_least(&docker.version, &[28, 2])
                    || (version_at_least(&docker.version, &[25]) && configured.cdi == Some(true))
            }
            None => configured.cdi == Some(true),
        };
    if of_pods && !is_default {
        return problem(
            format!(
                "the kubelet runs pods on Docker, whose default runtime is {}",
                configured.default_runtime.as_deref().unwrap_or("runc")
            ),
            why,
            "divvy configure docker --set-default --restart",
        );
    }
    match (names.as_slice(), cdi) {
        ([], false) => problem(
            format!("{} has no runtime for GPUs, and Docker is not set up for CDI", docker::CONFIG),
            why,
            format!(
                "divvy configure docker --cdi --restart and {}; then docker run --device nvidia.com/gpu=all (Docker 25 and later) or --runtime nvidia",
                facts.generate("nvidia", "/etc/cdi/nvidia.yaml")
            ),
        ),
        ([], true) => Ok("by CDI".to_owned()),
        (names, _) => Ok(format!(
            "{}{}",
            names.join(", "),
            if is_default { ", which is the default" } else { "" }
        )),
    }
}
