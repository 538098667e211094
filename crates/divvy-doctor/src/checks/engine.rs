//! Checks of the configuration of containerd and CRI-O.

use divvy_engines::{Configuration, containerd, crio, docker};

use super::objects;
use super::objects::{listed, some};
use crate::check::{Repair, Severity, Stop, Verdict, blind, milder, problem, repaired_by, skip};
use crate::facts::{Asked, Engine, Facts, Kind, for_gpus};

const NOT_CONFIGURED: &str =
    "pods with this runtime are not created: \"no runtime for \\\"nvidia\\\" is configured\", FailedCreatePodSandBox";

fn pods(facts: &Facts<'_>) -> Result<(Engine, Configuration), Stop> {
    let engine = facts.engine()?;
    let configuration = facts.configuration(&engine)?;
    Ok((engine, configuration))
}

/// Report whether this engine has CDI enabled.
///
/// # Errors
/// Returns [`Stop::Blind`] if the configuration does not say so and the version is unknown. By default, CDI is enabled in
/// containerd 2 and disabled in containerd 1.7.
fn does_cdi(facts: &Facts<'_>, engine: &Engine, configuration: &Configuration) -> Result<bool, Stop> {
    match engine.kind {
        Kind::Crio => return Ok(true),
        Kind::Docker => return Ok(false),
        Kind::Containerd => {}
    }
    if let Some(told) = configuration.cdi {
        return Ok(told);
    }
    // No containerd before 2.0 reads files of version 3.
    if configuration.version.is_some_and(|version| version >= 3) {
        return Ok(true);
    }
    match facts.containerd_version(engine) {
        Some((major, _)) => Ok(major >= 2),
        None => blind(format!(
            "{} does not say whether CDI is on in {}: the default is on from containerd 2.0, but the version is unknown here; containerd --version prints it",
            match configuration.files.is_empty() {
                true => format!("there is no {}, so the configuration", engine.file),
                false => engine.file.clone(),
            },
            engine.name
        )),
    }
}

/// Judge check R05.
pub(super) fn which(facts: &Facts<'_>) -> Verdict {
    let Some(kubelet) = facts.kubelet() else {
        return skip("no kubelet here");
    };
    let engine = facts.engine()?;
    let endpoint = kubelet.endpoint.as_deref().unwrap_or("its default socket");
    let found = format!(
        "the kubelet uses {} at {endpoint}, configured by {}",
        engine.name, engine.file
    );
    let others: Vec<String> = facts
        .engines()
        .into_iter()
        .filter(|other| other.file != engine.file && other.kind != Kind::Docker)
        .map(|other| other.file)
        .collect();
    if others.is_empty() {
        return Ok(found);
    }
    problem(
        format!("{found}; {} exists but is not used", others.join(", ")),
        "edits of the unused file have no effect on pods",
        format!("{} edits the file that is used", engine.configure("")),
    )
}

/// Judge check R08.
pub(super) fn version(facts: &Facts<'_>) -> Verdict {
    let engine = facts.engine()?;
    if engine.kind != Kind::Containerd {
        return skip("pods do not run on containerd");
    }
    let read = containerd::read(&facts.root, &engine.file, containerd::Merge::Keys);
    let configuration = match read {
        Ok(configuration) => configuration,
        Err(error) => {
            return problem(
                error.to_string(),
                "with this file, containerd does not start, or starts without its CRI plugin, and the node is NotReady",
                format!(
                    "correct the file at that place, then: containerd config dump > /dev/null && systemctl restart {}",
                    engine.service
                ),
            );
        }
    };
    let mut wrong = Vec::new();
    for file in &configuration.files {
        // Parsing succeeded in `containerd::read`, so a failure here is only a race with an edit.
        let Ok(table) = facts.text(file).unwrap_or_default().parse::<toml::Table>() else {
            continue;
        };
        let written = table.get("version").and_then(toml::Value::as_integer);
        let version = written.unwrap_or(1);
        let Some(plugins) = table.get("plugins").and_then(toml::Value::as_table) else {
            continue;
        };
        let right = containerd::section(version);
        for other in [1, 2, 3].map(containerd::section) {
            let runtimes = plugins.get(other).and_then(|section| section.get("containerd"));
            if other != right && runtimes.is_some() && !plugins.contains_key(right) {
                let says = written.map_or_else(
                    || "has no version, which means version 1".to_owned(),
                    |version| format!("has version {version}"),
                );
                wrong.push(format!(
                    "{file} {says} and the section plugins.{other:?}: in that version the section is plugins.{right:?}"
                ));
            }
        }
    }
    match wrong.is_empty() {
        true if configuration.files.is_empty() => Ok(format!("there is no {}; {} uses its defaults", engine.file, engine.name)),
        true => Ok(format!(
            "version {} in {}",
            configuration.version.unwrap_or(2),
            configuration.files.join(", ")
        )),
        false => problem(
            wrong.join("\n"),
            "containerd silently ignores a section of another version and the runtimes in it: \"no runtime for \\\"nvidia\\\" is configured\"",
            format!(
                "rename the section or correct the version; check the result with containerd config dump; then systemctl restart {}",
                engine.service
            ),
        ),
    }
}

/// Judge check R09.
pub(super) fn handler(facts: &Facts<'_>) -> Verdict {
    facts.nvidia()?;
    let (engine, configuration) = pods(facts)?;
    let runtimes = for_gpus(&configuration);
    let mut found = Vec::new();
    for (name, runtime) in &runtimes {
        let Some(path) = &runtime.path else {
            return problem(
                format!("the runtime {name} in {} names no program (BinaryName)", runtime.file),
                "runc starts the containers of that runtime, so they get no GPU",
                format!(
                    "set options.BinaryName = \"/usr/bin/nvidia-container-runtime\" (or divvy-runtime's path) in that runtime, then systemctl restart {}",
                    engine.service
                ),
            );
        };
        let there = match path.starts_with('/') {
            true => facts.is_program(path),
            false => facts.program(&[path]).is_some(),
        };
        if !there {
            return problem(
                format!("the runtime {name} is {path}, but there is no such program"),
                NOT_CONFIGURED,
                format!(
                    "install the program there, or correct the path in {}, then systemctl restart {}; or use divvy-runtime: {}",
                    runtime.file,
                    engine.service,
                    engine.configure("")
                ),
            );
        }
        found.push(format!("{name} is {path}"));
    }
    if found.is_empty() {
        return match facts.has_spec("nvidia.com") && does_cdi(facts, &engine, &configuration)? {
            true => Ok(format!("none, and none is needed: {} uses CDI", engine.name)),
            false => problem(
                format!("{} has no runtime for GPUs and does not use CDI (R15)", engine.name),
                NOT_CONFIGURED,
                format!(
                    "{} and {}",
                    engine.configure("--cdi"),
                    facts.generate("nvidia", "/var/run/cdi/nvidia.yaml")
                ),
            ),
        };
    }
    Ok(found.join(", "))
}

/// Judge check R10.
pub(super) fn reached(facts: &Facts<'_>) -> Verdict {
    facts.nvidia()?;
    let (engine, configuration) = pods(facts)?;
    let runtimes = for_gpus(&configuration);
    let default = configuration.default_runtime.as_deref();
    if let Some((name, _)) = runtimes.iter().find(|(name, _)| Some(name.as_str()) == default) {
        return Ok(format!("{name} is the default runtime"));
    }
    if facts.has_spec("nvidia.com") && does_cdi(facts, &engine, &configuration)? {
        return Ok("by CDI, with any runtime".to_owned());
    }
    let names: Vec<&str> = runtimes.iter().map(|(name, _)| name.as_str()).collect();
    let why = "a pod without runtimeClassName gets no driver: device plugins in such pods find 0 GPUs, although ctr run --gpus 0 works (ctr uses another mechanism)";
    let fix = format!(
        "set runtimeClassName: nvidia in these pods (divvy configure --runtime-class | kubectl apply -f -), or make the runtime the default: {}",
        engine.configure("--set-default")
    );
    let Asked::Answer(cluster) = &facts.cluster else {
        if names.is_empty() {
            return problem(
                format!("{} has no runtime for GPUs and does not use CDI for them", engine.name),
                why,
                fix,
            );
        }
        return milder(
            Severity::Warning,
            format!(
                "{} is not the default runtime; whether pods select it with a RuntimeClass is known to the API server (add --cluster)",
                names.join(", ")
            ),
            why,
            fix,
        );
    };
    cluster.listed(&["runtimeclasses"])?;
    match cluster
        .runtime_classes
        .iter()
        .find(|class| names.contains(&class.handler.as_str()))
    {
        Some(class) => Ok(format!("pods with runtimeClassName {} get {}", class.name(), class.handler)),
        None => problem(
            format!(
                "the default runtime is {}, and no RuntimeClass has the handler {}",
                default.unwrap_or("runc"),
                if names.is_empty() {
                    "of a runtime for GPUs".to_owned()
                } else {
                    names.join(" or ")
                }
            ),
            why,
            fix,
        ),
    }
}

/// Judge check R11.
pub(super) fn default(facts: &Facts<'_>) -> Verdict {
    let (engine, configuration) = pods(facts)?;
    let default = configuration.default_runtime.as_deref().unwrap_or(match engine.kind {
        Kind::Crio => "crun",
        Kind::Containerd | Kind::Docker => "runc",
    });
    // The runtimes that an engine has without any configuration. For containerd there are none if its dumped configuration is
    // known, because that lists all runtimes.
    let asked = engine.kind == Kind::Containerd && facts.containerd.answer().is_some();
    let built_in = match engine.kind {
        Kind::Crio => ["crun", "runc"].contains(&default),
        Kind::Containerd | Kind::Docker => default == "runc" && !asked,
    };
    if configuration.runtimes.contains_key(default) || built_in {
        return Ok(default.to_owned());
    }
    let names: Vec<&str> = configuration.runtimes.keys().map(String::as_str).collect();
    problem(
        format!(
            "the default runtime {default:?} is not among the defined runtimes {:?}",
            names.join(", ")
        ),
        "containerd does not load the CRI plugin (\"no corresponding runtime configured\"), the kubelet reports \"unknown service runtime.v1.RuntimeService\", and the node is NotReady",
        format!(
            "add to {} a table runtimes.{default} with runtime_type = \"io.containerd.runc.v2\"; then systemctl restart {}",
            engine.file, engine.service
        ),
    )
}

/// Judge check R12.
pub(super) fn enabled(facts: &Facts<'_>) -> Verdict {
    let (engine, configuration) = pods(facts)?;
    if engine.kind != Kind::Containerd {
        return skip("pods do not run on containerd");
    }
    let cri = |plugin: &&String| plugin.as_str() == "cri" || plugin.ends_with(".cri") || plugin.contains(".cri.v1.");
    match configuration.disabled_plugins.iter().find(cri) {
        None => Ok("cri is not in disabled_plugins".to_owned()),
        Some(plugin) => problem(
            format!(
                "{} has disabled_plugins = [{plugin:?}], which Docker's packages write",
                engine.file
            ),
            "the kubelet cannot use containerd (\"unknown service runtime.v1.RuntimeService\"), and tools that configure runtimes report success without effect",
            format!(
                "sed -i '/^disabled_plugins/d' {} && systemctl restart {}",
                engine.file, engine.service
            ),
        ),
    }
}

/// Judge check R13.
pub(super) fn cgroups(facts: &Facts<'_>) -> Verdict {
    let (engine, configuration) = pods(facts)?;
    let wanted = facts.kubelet().and_then(|kubelet| kubelet.cgroup_driver);
    let word = |systemd: bool| if systemd { "systemd" } else { "cgroupfs" };
    let mut of: Vec<(String, &str)> = match engine.kind {
        Kind::Crio => vec![(
            engine.name.to_owned(),
            configuration.cgroup_driver.as_deref().unwrap_or("systemd"),
        )],
        Kind::Containerd | Kind::Docker => {
            let gpus: Vec<&String> = for_gpus(&configuration).into_iter().map(|(name, _)| name).collect();
            let runtimes = configuration.runtimes.iter();
            runtimes
                .filter(|(name, _)| name.as_str() == "runc" || gpus.contains(name))
                .map(|(name, runtime)| (name.clone(), word(runtime.systemd_cgroup.unwrap_or(false))))
                .collect()
        }
    };
    let Some(first) = of.first().map(|(_, driver)| (*driver).to_owned()) else {
        return skip("the engine's configuration defines no runtime");
    };
    let wanted_of = wanted.as_ref().map_or("", |_| "the kubelet's ");
    let wanted = wanted.unwrap_or(first);
    let all: Vec<String> = of.iter().map(|(name, _)| name.clone()).collect();
    of.retain(|(_, driver)| *driver != wanted);
    if of.is_empty() {
        let others: Vec<&str> = match engine.kind {
            Kind::Crio => Vec::new(),
            Kind::Containerd | Kind::Docker => {
                let names = configuration.runtimes.keys().map(String::as_str);
                names.filter(|name| !all.iter().any(|known| known == name)).collect()
            }
        };
        let left_out = match others.is_empty() {
            true => String::new(),
            false => format!("; not checked: {} (not for GPUs)", others.join(", ")),
        };
        return Ok(format!("{wanted} for {}{left_out}", all.join(", ")));
    }
    let found: Vec<String> = of.iter().map(|(name, driver)| format!("{name} uses {driver}")).collect();
    let names: Vec<&str> = of.iter().map(|(name, _)| name.as_str()).collect();
    problem(
        format!("{}; {wanted_of}cgroup driver is {wanted}", found.join(", ")),
        "pods are killed every few minutes, or do not start: \"expected cgroupsPath to be of format \\\"slice:prefix:name\\\"\"",
        format!(
            "{} sets the cgroup driver of the runtime for GPUs; by hand: SystemdCgroup = {} in the options of {}, then systemctl restart {}",
            engine.configure(&format!("--cgroup-driver {wanted}")),
            wanted == "systemd",
            names.join(" and "),
            engine.service
        ),
    )
}

/// Judge check R14.
pub(super) fn runtime_class(facts: &Facts<'_>) -> Verdict {
    if let Asked::Absent(_) | Asked::Not(_) = &facts.cluster {
        return skip("RuntimeClasses are read from the API server: add --cluster");
    }
    let cluster = listed(facts, &["runtimeclasses", "pods"])?;
    let is_there = |name: &str| cluster.runtime_classes.iter().any(|class| class.name() == name);
    let missing = cluster
        .pods
        .iter()
        .filter_map(|pod| pod.spec.runtime_class_name.as_deref())
        .find(|name| !is_there(name));
    if let Some(name) = missing {
        let pods = cluster
            .pods
            .iter()
            .filter(|pod| pod.spec.runtime_class_name.as_deref() == Some(name));
        let pods: Vec<String> = pods.map(objects::full_name).collect();
        return problem(
            format!(
                "there is no RuntimeClass {name:?}, but it is the runtimeClassName of {}",
                some(&pods)
            ),
            "a controller cannot create these pods again: \"pod rejected: RuntimeClass \\\"nvidia\\\" not found\"",
            format!("divvy configure --runtime-class --runtime-name {name} | kubectl apply -f -"),
        );
    }
    let for_gpu = cluster
        .runtime_classes
        .iter()
        .filter(|class| ["nvidia", "divvy"].iter().any(|word| class.handler.contains(word)));
    let classes: Vec<_> = for_gpu.collect();
    if classes.is_empty() {
        return skip("no RuntimeClass is for GPUs");
    }
    if !facts.node {
        return skip("the handlers of a node are configured on the node: run divvy doctor --node --cluster there");
    }
    let (engine, configuration) = pods(facts)?;
    for class in &classes {
        if !configuration.runtimes.contains_key(&class.handler) {
            let names: Vec<&str> = configuration.runtimes.keys().map(String::as_str).collect();
            return problem(
                format!(
                    "RuntimeClass {} has the handler {:?}, but {} on this node has {}",
                    class.name(),
                    class.handler,
                    engine.name,
                    if names.is_empty() {
                        "none".to_owned()
                    } else {
                        names.join(", ")
                    }
                ),
                NOT_CONFIGURED,
                engine.configure(&format!("--runtime-name {}", class.handler)),
            );
        }
    }
    let found: Vec<String> = classes
        .iter()
        .map(|class| format!("{} → {}", class.name(), class.handler))
        .collect();
    Ok(found.join(", "))
}

/// Judge check R15.
pub(super) fn cdi(facts: &Facts<'_>) -> Verdict {
    facts.any_gpu()?;
    let engine = facts.engine()?;
    let configuration = facts.configuration(&engine)?;
    let why = "containers that get CDI devices from Divvy or another device plugin fail to start: \"unresolvable CDI devices\"";
    if !does_cdi(facts, &engine, &configuration)? {
        return problem(
            format!(
                "CDI is switched off in {} (enable_cdi is {})",
                engine.name,
                if configuration.cdi.is_some() { "false" } else { "not set" }
            ),
            why,
            format!(
                "{}, for containerd 1.7 and later; CDI is on by default from 2.0",
                engine.configure("--cdi")
            ),
        );
    }
    let directories = ["/etc/cdi", "/var/run/cdi"];
    let there: Vec<&str> = directories.into_iter().filter(|directory| facts.exists(directory)).collect();
    let looked_at = &configuration.cdi_spec_dirs;
    if !looked_at.is_empty()
        && !looked_at.iter().any(|directory| {
            directories.contains(&directory.replace("/run/", "/var/run/").replace("/var/var/", "/var/").as_str())
        })
    {
        return problem(
            format!("{} reads CDI specs only from {}", engine.name, looked_at.join(", ")),
            why,
            format!(
                "set cdi_spec_dirs = [\"/etc/cdi\", \"/var/run/cdi\"] in {}; then systemctl restart {}",
                engine.file, engine.service
            ),
        );
    }
    if there.is_empty() {
        return repaired_by(
            problem(
                "neither /etc/cdi nor /var/run/cdi exists",
                "the agent's pod mounts these directories, and CDI specs belong in one of them",
                "mkdir -p /var/run/cdi (or: divvy doctor --fix --only R15), then divvy cdi generate -o /var/run/cdi/nvidia.yaml",
            ),
            vec![Repair::Directory {
                path: "/var/run/cdi".to_owned(),
            }],
        );
    }
    if facts.nvidia().is_ok() && !facts.has_spec("nvidia.com") {
        return problem(
            format!(
                "{} uses CDI, but no spec describes the NVIDIA GPUs of this machine",
                engine.name
            ),
            why,
            facts.generate("nvidia", "/var/run/cdi/nvidia.yaml"),
        );
    }
    Ok(format!("{}, {}", engine.name, there.join(", ")))
}

/// Judge check R16.
pub(super) fn restarted(facts: &Facts<'_>) -> Verdict {
    let mut engines: Vec<Engine> = facts.engine().into_iter().collect();
    engines.extend(facts.engines().into_iter().filter(|engine| engine.kind == Kind::Docker));
    engines.dedup();
    let (mut looked, mut unknown) = (Vec::new(), Vec::new());
    for engine in &engines {
        let Some(process) = facts.process_of(engine) else { continue };
        let Some(started) = facts.started(process) else {
            unknown.push(engine.name);
            continue;
        };
        // Read the files on disk: the dumped configuration is that of the running process.
        let read = match engine.kind {
            Kind::Containerd => containerd::read(&facts.root, &engine.file, containerd::Merge::Keys),
            Kind::Crio => crio::read(&facts.root, &engine.file),
            Kind::Docker => docker::read(&facts.root, &engine.file),
        };
        // R07 and R08 report a file that cannot be parsed. Its modification time still counts here.
        let files = read.map_or_else(|_| vec![engine.file.clone()], |all| all.files);
        let newer = |file: &&String| facts.root.modified(file).is_some_and(|written| written > started);
        if let Some(file) = files.iter().find(newer) {
            return problem(
                format!("{file} was written after {} was started", engine.name),
                "the engine does not use the changed configuration until it is restarted: GPUs may work only after the next boot",
                format!("systemctl restart {}", engine.service),
            );
        }
        looked.push(engine.name);
    }
    match (looked.is_empty(), unknown.is_empty()) {
        (true, true) => skip("no container engine is running here"),
        (true, false) => blind(format!("/proc does not show when {} was started", unknown.join(", "))),
        (false, true) => Ok(looked.join(", ")),
        (false, false) => Ok(format!(
            "{}; not checked: {} (/proc does not show when it was started)",
            looked.join(", "),
            unknown.join(", ")
        )),
    }
}
