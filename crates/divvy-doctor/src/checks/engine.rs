//! Checks of the configuration of containerd and CRI-O.

use divvy_engines::{Configuration, containerd, crio, docker};

use super::objects;
use super::objects::{listed, some};
use crate::check::{CheckStop, CheckVerdict, Repair, Severity, blind, milder, problem, repaired_by, skip};
use crate::facts::{Asked, EngineFacts, EngineKind, Facts, NEWEST, for_gpus};

const NOT_CONFIGURED: &str =
    "pods with this runtime are not created: \"no runtime for \\\"nvidia\\\" is configured\", FailedCreatePodSandBox";

fn pods(facts: &Facts<'_>) -> Result<(EngineFacts, Configuration), CheckStop> {
    let engine = facts.engine()?;
    let configuration = facts.configuration(&engine)?;
    Ok((engine, configuration))
}

/// Report whether this engine has CDI enabled.
///
/// # Errors
/// Returns [`CheckStop::Blind`] if the configuration does not say so and the version is unknown. By default, CDI is enabled in
/// containerd 2 and disabled in containerd 1.7.
fn does_cdi(facts: &Facts<'_>, engine: &EngineFacts, configuration: &Configuration) -> Result<bool, CheckStop> {
    match engine.kind {
        EngineKind::Crio => return Ok(true),
        EngineKind::Docker => return Ok(false),
        EngineKind::Containerd => {}
    }
    if let Some(told) = configuration.cdi {
        return Ok(told);
    }
    // No containerd before 2.0 reads files of version 3.
    if configuration.version.is_some_and(|version| version >= 3) {
        return Ok(true);
    }
    match facts.containerd_version(engine) {
        Some((major, ..)) => Ok(major >= 2),
        None => blind(format!(
            "{} does not say whether CDI is on in {}: the default is on from containerd 2.0, but the version is unknown here; containerd --version prints it",
            if configuration.files.is_empty() {
                format!("there is no {}, so the configuration", engine.file)
            } else {
                engine.file.clone()
            },
            engine.name
        )),
    }
}

/// Judge check R05.
pub(super) fn which(facts: &Facts<'_>) -> CheckVerdict {
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
        .filter(|other| other.file != engine.file && other.kind != EngineKind::Docker)
        .map(|other| other.file)
        .collect();
    if others.is_empty() {
        return Ok(found);
    }
    problem(
        format!("{found}; {} exists but is not used for pods", others.join(", ")),
        "edits of the other file have no effect on pods",
        engine.by_hand("make changes"),
    )
}

/// Judge check R08.
pub(super) fn version(facts: &Facts<'_>) -> CheckVerdict {
    let engine = facts.engine()?;
    if engine.kind != EngineKind::Containerd {
        return skip("pods do not run on containerd");
    }
    if let Asked::Failed(reason) = &facts.containerd {
        return blind(format!("containerd did not print its configuration: {reason}"));
    }
    let used = |release| containerd::effective(&facts.root, &engine.file, release);
    let known = facts.containerd_version(&engine);
    let newest = used(known.unwrap_or(NEWEST));
    let configuration = match newest {
        Ok(configuration) if configuration.ignored.is_empty() => configuration,
        Ok(configuration) => return unused(&engine, known.unwrap_or(NEWEST), &configuration),
        Err(error) => return refused(facts, &engine, &error),
    };
    if let Some(found) = template_found(facts, &engine) {
        return problem(
            found,
            format!(
                "at its next start {} generates {} from it, and containerd does not start",
                engine.name, engine.file
            ),
            format!(
                "remove that table from the template, or set its keys where the base template has the table; then {}",
                engine.restart()
            ),
        );
    }
    // No release reads a file of a version that is newer than itself.
    let oldest = match configuration.version {
        Some(4..) => (2, 3, 0),
        Some(3) => (2, 0, 0),
        _ => (1, 7, 0),
    };
    let others = [(1, 7, 0), (2, 0, 0), (2, 3, 0)]
        .into_iter()
        .filter(|release| known.is_none() && *release >= oldest);
    for release in others {
        let verdict = match used(release) {
            Ok(configuration) if configuration.ignored.is_empty() => continue,
            Ok(configuration) => unused(&engine, release, &configuration),
            Err(error) => refused(facts, &engine, &error),
        };
        if let Err(CheckStop::Problem(finding)) = verdict {
            let found = format!(
                "{}; the version of containerd is unknown here, and containerd --version prints it",
                finding.found
            );
            return milder(Severity::Warning, found, finding.why, finding.fix);
        }
    }
    if configuration.files.is_empty() {
        Ok(format!("there is no {}; {} uses its defaults", engine.file, engine.name))
    } else {
        Ok(format!(
            "version {} in {}",
            configuration.version.unwrap_or(2),
            configuration.files.join(", ")
        ))
    }
}

/// Describe the sections that this release does not use.
fn unused(engine: &EngineFacts, release: containerd::ContainerdRelease, configuration: &Configuration) -> CheckVerdict {
    let sentences = configuration.ignored.iter().map(|ignored| {
        let says = match ignored.version {
            0 => "has no version, which means version 1,".to_owned(),
            version => format!("has version {version}"),
        };
        format!(
            "{} {says} and the section plugins.{:?}, which containerd {}.{} does not use with these files",
            ignored.path, ignored.section, release.0, release.1
        )
    });
    let right = containerd::section(if release >= (2, 0, 0) { 3 } else { 2 });
    let version = if release >= (2, 0, 0) { 3 } else { 2 };
    let file = configuration.ignored.first().map_or(&engine.file, |ignored| &ignored.path);
    problem(
        sentences.collect::<Vec<_>>().join("\n"),
        "containerd silently ignores that section and the runtimes in it: \"no runtime for \\\"nvidia\\\" is configured\"",
        engine.by_hand_in(
            &format!("set version = {version} in all files, and rename the section to plugins.{right:?},"),
            file,
        ),
    )
}

/// Describe why containerd does not start with its files.
fn refused(facts: &Facts<'_>, engine: &EngineFacts, error: &divvy_engines::Error) -> CheckVerdict {
    let why = "with this file, containerd does not start, or starts without its CRI plugin, and the node is NotReady";
    let (found, file, change) = match error {
        divvy_engines::Error::Version { path, .. } => (
            error.found(),
            path,
            "correct the version and the names of the sections".to_owned(),
        ),
        divvy_engines::Error::Syntax { path, line, .. } if *path == engine.file && engine.edited != engine.file => {
            let text = facts.text(path).unwrap_or_default();
            let wrong = text.lines().nth(line.saturating_sub(1)).unwrap_or_default().trim().to_owned();
            let template = facts.text(&engine.edited).unwrap_or_default();
            let at = template.lines().position(|line| !wrong.is_empty() && line.trim() == wrong);
            let place = at.map_or_else(String::new, |at| {
                format!("; {} has that text in line {}", engine.edited, at + 1)
            });
            let from = format!("{} generates this file from {}{place}", engine.name, engine.edited);
            (format!("{}; {from}", error.found()), path, "correct the text".to_owned())
        }
        divvy_engines::Error::Syntax { path, .. } | divvy_engines::Error::WrongType { path, .. } => {
            (error.found(), path, "correct the file at that place".to_owned())
        }
        other => (other.found(), &engine.file, "correct the file".to_owned()),
    };
    problem(found, why, engine.by_hand_in(&change, file))
}

/// Return the table that a template of k3s or rke2 defines twice. A template with conditions is not judged: only one of two tables may be used.
fn template_found(facts: &Facts<'_>, engine: &EngineFacts) -> Option<String> {
    let template = facts.text(&engine.edited).filter(|_| engine.edited.ends_with(".tmpl"))?;
    let actions = template.lines().filter(|line| line.contains("{{"));
    if actions.clone().any(|line| !line.contains("template \"base\"")) {
        return None;
    }
    // The base has been written with the rest of the template at the last start.
    let rest: String = template.split_inclusive('\n').filter(|line| !line.contains("{{")).collect();
    let error = toml::from_str::<toml::Table>(&rest).err()?;
    Some(format!("{} is not valid TOML: {}", engine.edited, error.message().trim()))
}

/// Judge check R09.
pub(super) fn handler(facts: &Facts<'_>) -> CheckVerdict {
    facts.nvidia()?;
    let (engine, configuration) = pods(facts)?;
    let runtimes = for_gpus(&configuration);
    let mut found = Vec::new();
    for (name, runtime) in &runtimes {
        let Some(path) = &runtime.path else {
            return problem(
                format!("the runtime {name} in {} names no program (BinaryName)", runtime.file),
                "runc starts the containers of that runtime, so they get no GPU",
                engine.by_hand_in(
                    "set options.BinaryName = \"/usr/bin/nvidia-container-runtime\" (or divvy-runtime's path) of that runtime",
                    &runtime.file,
                ),
            );
        };
        let there = if path.starts_with('/') {
            facts.is_program(path)
        } else {
            facts.program(&[path]).is_some()
        };
        if !there {
            return problem(
                format!("the runtime {name} is {path}, but there is no such program"),
                NOT_CONFIGURED,
                format!(
                    "install the program there, or {}; or use divvy-runtime: {}",
                    engine.by_hand_in("correct the path", &runtime.file),
                    engine.configure("")
                ),
            );
        }
        found.push(format!("{name} is {path}"));
    }
    if found.is_empty() {
        if facts.has_spec("nvidia.com") && does_cdi(facts, &engine, &configuration)? {
            return Ok(format!("none, and none is needed: {} uses CDI", engine.name));
        }
        return match unread(facts, &engine, &configuration) {
            Some((found, fix)) => problem(found, NOT_CONFIGURED, fix),
            None => problem(
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

/// Return the file next to those of the engine that has a runtime for GPUs and that nothing reads, and how it is made to count.
fn unread(facts: &Facts<'_>, engine: &EngineFacts, configuration: &Configuration) -> Option<(String, String)> {
    // What containerd prints does not name the files that it has read.
    let on_disk = containerd::effective(&facts.root, &engine.file, facts.containerd_version(engine).unwrap_or(NEWEST));
    let read = match (engine.kind, on_disk) {
        (EngineKind::Containerd, Ok(on_disk)) => on_disk.files,
        _ => configuration.files.clone(),
    };
    let directory = engine.file.rsplit_once('/').map_or("", |(directory, _)| directory);
    let mut directories = vec![directory.to_owned()];
    directories.extend(
        facts
            .root
            .names(directory)
            .into_iter()
            .map(|name| format!("{directory}/{name}")),
    );
    let programs = ["nvidia-container-runtime", "divvy-runtime"];
    for directory in directories {
        for name in facts.root.names(&directory) {
            let path = format!("{directory}/{name}");
            let is_template = name.ends_with(".tmpl");
            if read.contains(&path) || (is_template && path == engine.edited && !is_of_other_version(&name, configuration)) {
                continue;
            }
            let text = facts
                .text(&path)
                .filter(|_| is_template || name.ends_with(".toml") || name.ends_with(".conf"));
            let lines = text
                .iter()
                .flat_map(|text| text.lines())
                .filter(|line| !line.trim_start().starts_with('#'));
            if !lines
                .clone()
                .any(|line| programs.iter().any(|program| line.contains(program)))
            {
                continue;
            }
            let fix = match (engine.kind, is_template) {
                (_, true) if name.starts_with("config-v3") => {
                    "move its tables to config.toml.tmpl, with the names of version 2".to_owned()
                }
                (_, true) => "move its tables to config-v3.toml.tmpl, with the names of version 3".to_owned(),
                (EngineKind::Containerd, _) => engine.by_hand(&format!("add imports = [\"{directory}/*.toml\"]")),
                _ => format!("move it to {}", crio::drop_ins(&engine.file)),
            };
            return Some((
                format!("{path} has a runtime for GPUs, but {} does not read that file", engine.name),
                fix,
            ));
        }
    }
    None
}

/// Report whether k3s or rke2 uses a template of this name for another version of containerd's configuration.
fn is_of_other_version(name: &str, configuration: &Configuration) -> bool {
    let is_v3 = configuration.version.is_none_or(|version| version >= 3);
    name.starts_with("config-v3") != is_v3
}

/// Judge check R10.
pub(super) fn reached(facts: &Facts<'_>) -> CheckVerdict {
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
pub(super) fn default(facts: &Facts<'_>) -> CheckVerdict {
    let (engine, configuration) = pods(facts)?;
    let default = configuration.default_runtime.as_deref().unwrap_or(match engine.kind {
        EngineKind::Crio => "crun",
        EngineKind::Containerd | EngineKind::Docker => "runc",
    });
    // The runtimes that an engine has without any configuration. For containerd there are none if its dumped configuration is
    // known, because that lists all runtimes.
    let asked = engine.kind == EngineKind::Containerd && facts.containerd.answer().is_some();
    let built_in = match engine.kind {
        EngineKind::Crio => ["crun", "runc"].contains(&default),
        EngineKind::Containerd | EngineKind::Docker => default == "runc" && !asked,
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
        engine.by_hand(&format!(
            "add a table runtimes.{default} with runtime_type = \"io.containerd.runc.v2\""
        )),
    )
}

/// The plugins without which containerd has no CRI service. Observed with containerd 2.3.7: each of the last three disables it.
const CRI: [&str; 4] = [
    "cri",
    "io.containerd.grpc.v1.cri",
    "io.containerd.cri.v1.runtime",
    "io.containerd.cri.v1.images",
];

/// Judge check R12.
pub(super) fn enabled(facts: &Facts<'_>) -> CheckVerdict {
    let (engine, configuration) = pods(facts)?;
    if engine.kind != EngineKind::Containerd {
        return skip("pods do not run on containerd");
    }
    let mut files = configuration.files.clone();
    if files.is_empty() {
        files.push(engine.file.clone());
    }
    // k0s merges these files when it starts.
    let of_k0s = "/etc/k0s/containerd.d";
    if engine.name == "k0s" {
        files.extend(facts.root.names(of_k0s).into_iter().map(|name| format!("{of_k0s}/{name}")));
    }
    let disabled_in = |file: &String| -> Vec<String> {
        let table = facts.text(file).and_then(|text| text.parse::<toml::Table>().ok());
        let list = table.as_ref().and_then(|table| table.get("disabled_plugins")?.as_array());
        let names = list.into_iter().flatten().filter_map(toml::Value::as_str);
        names.filter(|name| CRI.contains(name)).map(str::to_owned).collect()
    };
    let in_files = files.iter().map(|file| (file, disabled_in(file)));
    let dumped = configuration
        .disabled_plugins
        .iter()
        .filter(|name| CRI.contains(&name.as_str()))
        .cloned();
    let dumped = std::iter::once((&engine.file, dumped.collect::<Vec<_>>()));
    let Some((file, names)) = in_files.chain(dumped).find(|(_, names)| !names.is_empty()) else {
        return Ok("cri is not in disabled_plugins".to_owned());
    };
    let names = names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
    problem(
        format!("{file} has {names} in disabled_plugins"),
        "the kubelet cannot use containerd (\"unknown service runtime.v1.RuntimeService\"), and tools that configure runtimes report success without effect",
        engine.by_hand_in(&format!("remove {names} from disabled_plugins"), file),
    )
}

/// Judge check R13.
pub(super) fn cgroups(facts: &Facts<'_>) -> CheckVerdict {
    let (engine, configuration) = pods(facts)?;
    let wanted = facts.kubelet().and_then(|kubelet| kubelet.cgroup_driver);
    let word = |systemd: bool| if systemd { "systemd" } else { "cgroupfs" };
    let mut of: Vec<(String, &str)> = match engine.kind {
        EngineKind::Crio => vec![(
            engine.name.to_owned(),
            configuration.cgroup_driver.as_deref().unwrap_or("systemd"),
        )],
        EngineKind::Containerd | EngineKind::Docker => {
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
            EngineKind::Crio => Vec::new(),
            EngineKind::Containerd | EngineKind::Docker => {
                let names = configuration.runtimes.keys().map(String::as_str);
                names.filter(|name| !all.iter().any(|known| known == name)).collect()
            }
        };
        let left_out = if others.is_empty() {
            String::new()
        } else {
            format!("; not checked: {} (not for GPUs)", others.join(", "))
        };
        return Ok(format!("{wanted} for {}{left_out}", all.join(", ")));
    }
    let found: Vec<String> = of.iter().map(|(name, driver)| format!("{name} uses {driver}")).collect();
    let names: Vec<&str> = of.iter().map(|(name, _)| name.as_str()).collect();
    problem(
        format!("{}; {wanted_of}cgroup driver is {wanted}", found.join(", ")),
        "pods are killed every few minutes, or do not start: \"expected cgroupsPath to be of format \\\"slice:prefix:name\\\"\"",
        format!(
            "{}; or {}",
            engine.configure(&format!("--cgroup-driver {wanted}")),
            engine.by_hand(&format!(
                "set SystemdCgroup = {} in the options of {}",
                wanted == "systemd",
                names.join(" and ")
            ))
        ),
    )
}

/// Judge check R14.
pub(super) fn runtime_class(facts: &Facts<'_>) -> CheckVerdict {
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
pub(super) fn cdi(facts: &Facts<'_>) -> CheckVerdict {
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
            engine.by_hand("set cdi_spec_dirs = [\"/etc/cdi\", \"/var/run/cdi\"]"),
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
pub(super) fn restarted(facts: &Facts<'_>) -> CheckVerdict {
    let mut engines: Vec<EngineFacts> = facts.engine().into_iter().collect();
    engines.extend(facts.engines().into_iter().filter(|engine| engine.kind == EngineKind::Docker));
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
            EngineKind::Containerd => containerd::read(&facts.root, &engine.file, containerd::Merge::Keys),
            EngineKind::Crio => crio::read(&facts.root, &engine.file),
            EngineKind::Docker => docker::read(&facts.root, &engine.file),
        };
        // R07 and R08 report a file that cannot be parsed. Its modification time still counts here.
        let files = read.map_or_else(|_| vec![engine.file.clone()], |all| all.files);
        let newer = |file: &&String| facts.root.modified(file).is_some_and(|written| written > started);
        if let Some(file) = files.iter().find(newer) {
            return problem(
                format!("{file} was written after {} was started", engine.name),
                "the engine does not use the changed configuration until it is restarted: GPUs may work only after the next boot",
                engine.restart(),
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
