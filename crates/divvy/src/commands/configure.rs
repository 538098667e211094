//! `divvy configure`: reads an engine's files, computes the change, and shows or applies it.

mod apply;
mod oci_hook;
mod queries;
mod restart;
mod show;

use std::path::Path;

use anyhow::Context as _;
use divvy_doctor::Facts;
use divvy_doctor::facts::EngineKind;
use divvy_engines::{
    self as engines, Configuration, Edit, EditPlan, Engine, EngineTarget, OriginalTexts, RuntimeSettings, WantedFiles,
    runtime_class,
};
use divvy_host::Files;
use divvy_host::Root;

use super::say;
use crate::cli::configure::{CgroupDriver, ConfigureArgs, ConfigureOutput};
use crate::printer;

/// The path of divvy-runtime that is used if this program's directory does not contain it.
const RUNTIME: &str = "/usr/local/bin/divvy-runtime";

/// The program that dockerd (up to Docker 28) looks for at its start. Without it, dockerd refuses `--gpus`.
const HOOK: &str = "nvidia-container-runtime-hook";
/// The PATH of dockerd when it runs as a service.
const PATH: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Configure one engine, or with `--detect` all engines of the machine.
pub async fn run(args: ConfigureArgs) -> anyhow::Result<()> {
    if args.runtime_class {
        return Ok(printer::print(&runtime_class(&args.runtime_name))?);
    }
    if let Some(program) = &args.oci_hook {
        return oci_hook::write(program, args.oci_hook_file.as_deref(), args.dry_run);
    }
    let here = args.root == Path::new("/");
    anyhow::ensure!(
        here || !args.restart,
        "--restart is for this machine's engines, and --root {} is a copy of another machine's files; omit one of the two",
        args.root.display()
    );
    let files = Files::below(&args.root);
    let root = Root::open(&files, "/").with_context(|| format!("--root {} is not a directory", args.root.display()))?;
    let mut wanted_engines: Vec<Engine> = args.engine.into_iter().collect();
    if args.detect {
        wanted_engines = detect(&root)?;
    }
    let mut shown = Vec::new();
    for engine in wanted_engines {
        shown.push(one(&args, engine, &files, &root, here).await?);
    }
    for trouble in files.troubles() {
        say(&format!("warning: not checked: {trouble}"))?;
    }
    if args.output == ConfigureOutput::Json {
        match &shown[..] {
            [one] if !args.detect => printer::json(one)?,
            all => printer::json(&all)?,
        }
    }
    Ok(())
}

/// Return the engines of the machine, and print the evidence for each.
fn detect(root: &Root<'_>) -> anyhow::Result<Vec<Engine>> {
    let mut found = Vec::new();
    for engine in Engine::ALL {
        if let Some(evidence) = engine.evidence(root) {
            say(&format!("{}: found ({evidence})", engine.as_str()))?;
            found.push(engine);
        }
    }
    // Docker brings its own containerd. Without a kubelet, no one else uses it.
    let kubelet = ["/var/lib/kubelet", "/usr/bin/kubelet"]
        .iter()
        .any(|path| root.resolve(path).is_some());
    if found.contains(&Engine::Docker) && found.contains(&Engine::Containerd) && !kubelet {
        say(
            "containerd: skipped, because Docker runs it and there is no kubelet; `divvy configure containerd` configures it anyway",
        )?;
        found.retain(|engine| *engine != Engine::Containerd);
    }
    anyhow::ensure!(
        !found.is_empty(),
        "no container engine was found: neither a program nor a configuration file; name one, as in `divvy configure docker`"
    );
    Ok(found)
}

async fn one(
    args: &ConfigureArgs,
    engine: Engine,
    files: &Files,
    root: &Root<'_>,
    here: bool,
) -> anyhow::Result<show::ShownEngine> {
    let absolute = |path: &Option<String>| -> anyhow::Result<Option<String>> {
        match path {
            Some(path) if here && !path.is_empty() => Ok(Some(std::path::absolute(path)?.display().to_string())),
            Some(path) if !path.is_empty() && !path.starts_with('/') => anyhow::bail!(
                "{path} is a relative path; with --root {} write the path as on that machine, starting with /",
                args.root.display()
            ),
            path => Ok(path.clone()),
        }
    };
    anyhow::ensure!(
        engine != Engine::Docker || args.drop_in.as_ref().is_none_or(String::is_empty),
        "Docker reads one file and no drop-ins: omit --drop-in, or name that file with --config"
    );
    let mut wanted = WantedFiles {
        config: absolute(&args.config)?,
        drop_in: absolute(&args.drop_in)?,
        containerd: args.engine_version.clone(),
    };
    let of_pods = of_pods(engine, files);
    if let (None, false, Some((file, _))) = (&wanted.config, args.as_nvidia_ctk, &of_pods)
        && file != engines::containerd::CONFIG
    {
        say(&format!("the containerd that runs pods reads {file}"))?;
        wanted.config = Some(file.clone());
    }
    // Other files belong to another containerd, such as that of a Kubernetes distribution.
    let config = wanted.config.as_deref().unwrap_or(engines::containerd::CONFIG);
    let program = match (&args.executable_path, of_pods) {
        _ if !here || engine != Engine::Containerd => None,
        (Some(path), _) => Some(path.clone()),
        (None, Some((file, Some(process)))) if file == config => Some(format!("/proc/{process}/exe")),
        (None, _) => Some("containerd".to_owned()),
    };
    let own = config == engines::containerd::CONFIG || program.as_ref().is_some_and(|program| program.starts_with("/proc/"));
    let mut release = None;
    if let Some(version) = &wanted.containerd {
        let known = engines::containerd::release(version);
        release = Some(known.with_context(|| format!("--engine-version {version}: write it as 1.7 or 2.1"))?);
    } else if let Some(program) = &program {
        wanted.containerd = queries::containerd_version(program).await;
        release = wanted
            .containerd
            .as_deref()
            .and_then(engines::containerd::release)
            .filter(|_| own);
        // NVIDIA's tool writes the same text for all versions. We also write what containerd 1.x needs, but only to the file that this
        // containerd reads.
        if args.as_nvidia_ctk && (release >= Some((2, 0, 0)) || !own) {
            wanted.containerd = None;
        }
    }
    let target = engine.target(root, &wanted)?;
    let place = apply::ConfiguredTree {
        root,
        directory: &args.root,
    };
    let record_path = target.record();
    let record = record(root, &record_path)?;
    let mut requested = None;
    let mut plan = if args.undo {
        engines::undo(root, &target, &args.runtime_name, record.as_ref())?
    } else {
        let mut settings = settings(args, engine, root, here)?;
        if args.ask_engine {
            anyhow::ensure!(
                here,
                "the engine of another machine cannot be queried; omit --config-source=command"
            );
            settings.printed = Some(queries::configuration(engine, args.executable_path.as_deref()).await?);
        }
        let mut plan = engines::configure(root, &target, &settings, record.as_ref())?;
        if let (Some(release), Engine::Containerd) = (release, engine) {
            let read = engines::containerd::effective(&plan.after(root), target.config(), release)?;
            engines::in_effect(&target, &settings, &read)
                .map_err(|error| unused(&read, release).unwrap_or_else(|| error.into()))?;
        }
        plan.notes.extend(notes(root, engine, &settings, &wanted)?);
        requested = Some(settings);
        plan
    };
    let mut shown = show::ShownEngine::of(engine, &target, &plan, args.dry_run);
    if args.dry_run {
        if args.output == ConfigureOutput::Text {
            if args.as_nvidia_ctk {
                show::texts(root, &target, &plan)?
            } else {
                show::diff(&plan)?
            }
        }
    } else {
        apply::apply(&place, &plan, &record_path)?;
        if let (Some(settings), Some(program)) = (
            requested,
            // nvidia-ctk does not ask containerd for the result, and Divvy in its place behaves as it does.
            program.filter(|_| !args.as_nvidia_ctk && (own || args.executable_path.is_some())),
        ) {
            let refused = match queries::dump(&program, target.config()).await {
                queries::ContainerdDump::Reads(read) => engines::in_effect(&target, &settings, &read).err().map(Into::into),
                queries::ContainerdDump::Refuses(error) => Some(error),
                queries::ContainerdDump::Silent(error) => {
                    let note = format!("whether containerd uses the runtime was not checked: {error:#}");
                    plan.notes.push(note);
                    None
                }
            };
            if let Some(error) = refused {
                apply::apply(&place, &reversed(&plan, record), &record_path)?;
                return Err(error);
            }
        }
    }
    if args.output == ConfigureOutput::Text && !args.as_nvidia_ctk {
        show::tell(args, engine, &target, &plan)?;
    } else if !args.quiet {
        for note in &plan.notes {
            say(&format!("note: {note}"))?;
        }
    }
    if args.as_nvidia_ctk && !args.dry_run && !args.quiet {
        for edit in &plan.edits {
            say(&format!("Wrote updated config to {}", edit.path))?;
        }
        say(&format!("It is recommended that {} daemon be restarted.", engine.as_str()))?;
    }
    restarted(args, engine, &target, &plan, &mut shown, here).await?;
    Ok(shown)
}

/// Return the file of the containerd that runs pods, and its PID if it runs. `None` if this is another engine's, or not known.
fn of_pods(engine: Engine, files: &Files) -> Option<(String, Option<u32>)> {
    let facts = Facts::of(files).filter(|_| engine == Engine::Containerd)?;
    let found = facts.engine().ok()?;
    let is_it = found.kind == EngineKind::Containerd && found.name == engine.as_str() && found.is_certain;
    is_it.then_some((found.file, found.process))
}

/// Return the error for a section that this release of containerd does not use. `None` if it uses all sections.
fn unused(read: &Configuration, (major, minor, _): engines::containerd::ContainerdRelease) -> Option<anyhow::Error> {
    let ignored = read.ignored.first()?;
    let right = engines::containerd::section(if major >= 2 { 3 } else { 2 });
    Some(anyhow::anyhow!(
        "{} has the section plugins.{:?}, which containerd {major}.{minor} does not use with these files, so the runtime would have no effect. Rename the \
         section to plugins.{right:?}, with the version for that name in all files, then run the command again; nothing was changed",
        ignored.path,
        ignored.section
    ))
}

/// Return the plan that restores the files before `plan`.
fn reversed(plan: &EditPlan, record: Option<OriginalTexts>) -> EditPlan {
    let edits = plan.edits.iter().rev().map(|edit| Edit {
        before: edit.after.clone(),
        after: edit.before.clone(),
        ..edit.clone()
    });
    EditPlan {
        edits: edits.collect(),
        record,
        ..EditPlan::default()
    }
}

async fn restarted(
    args: &ConfigureArgs,
    engine: Engine,
    target: &EngineTarget,
    plan: &EditPlan,
    shown: &mut show::ShownEngine,
    here: bool,
) -> anyhow::Result<()> {
    if plan.edits.is_empty() {
        if args.restart {
            say(&format!(
                "{}: nothing changed, so the engine is not restarted",
                engine.as_str()
            ))?;
        }
        return Ok(());
    }
    let step = restart::RestartStep::of(engine, target, plan, here).await;
    shown.restart = Some(step.words());
    if args.restart {
        say(&format!("{}: {}", engine.as_str(), step.words()))?;
        step.run().await?;
        say(&format!("{}: the engine runs again", engine.as_str()))?;
        shown.restarted = true;
    } else if !args.as_nvidia_ctk && args.output == ConfigureOutput::Text {
        let when = if args.dry_run {
            "would then be needed"
        } else {
            "still needed"
        };
        say(&format!("{when}: sudo {}   ({})", step.words(), step.why()))?;
    }
    Ok(())
}

/// Read the record of the files' previous content. `None` if there is no record.
fn record(root: &Root<'_>, path: &str) -> anyhow::Result<Option<OriginalTexts>> {
    let text = engines::TextFiles::text(root, path).map_err(|why| anyhow::anyhow!("{path} cannot be read: {why}"))?;
    Ok(text.map(|text| OriginalTexts::parse(path, &text)).transpose()?)
}

fn settings(args: &ConfigureArgs, engine: Engine, root: &Root<'_>, here: bool) -> anyhow::Result<RuntimeSettings> {
    let path = match &args.runtime_path {
        Some(path) => path.clone(),
        None => own_runtime(here),
    };
    anyhow::ensure!(
        path.starts_with('/') || engine == Engine::Docker,
        "--runtime-path {path:?} is not an absolute path, but {} needs one; write /usr/local/bin/{path}, or the path of the program",
        engine.as_str()
    );
    let systemd_cgroup = match args.cgroup_driver {
        Some(driver) => Some(driver == CgroupDriver::Systemd),
        None if args.as_nvidia_ctk => None,
        None => match engine.kubelet_driver(root)? {
            Some((systemd, file)) => {
                say(&format!(
                    "the kubelet's cgroup driver is {} ({file})",
                    if systemd { "systemd" } else { "cgroupfs" }
                ))?;
                Some(systemd)
            }
            None => None,
        },
    };
    Ok(RuntimeSettings {
        name: args.runtime_name.clone(),
        path,
        set_default: args.set_default,
        cdi: args.cdi,
        systemd_cgroup,
        overwrite: args.as_nvidia_ctk,
        printed: None,
        command: command(args, engine),
    })
}

/// Return the command that configures the same files.
fn command(args: &ConfigureArgs, engine: Engine) -> String {
    let mut command = format!("divvy configure {}", engine.as_str());
    let drop_in = args.drop_in.as_ref().filter(|_| engine == Engine::K0s);
    for (flag, value) in [("--config", &args.config), ("--drop-in", &drop_in.cloned())] {
        if let Some(value) = value {
            command += &format!(" {flag} {value}");
        }
    }
    command
}

/// Return the path of the divvy-runtime in this program's directory, or the default path.
fn own_runtime(here: bool) -> String {
    let beside = || {
        let beside = std::env::current_exe()
            .ok()?
            .canonicalize()
            .ok()?
            .with_file_name("divvy-runtime");
        let path = beside.to_str()?.to_owned();
        (beside.is_file() && !path.contains(['"', '\'', '\\', ' '])).then_some(path)
    };
    if here {
        beside().unwrap_or_else(|| RUNTIME.to_owned())
    } else {
        RUNTIME.to_owned()
    }
}

/// Return notes for the user about what is still missing, such as a program or a newer containerd.
fn notes(root: &Root<'_>, engine: Engine, settings: &RuntimeSettings, wanted: &WantedFiles) -> anyhow::Result<Vec<String>> {
    let mut notes = Vec::new();
    if settings.path.starts_with('/') && root.file(&settings.path).is_none() {
        notes.push(format!(
            "there is no {} on this machine: containers of the runtime {} will not start until it exists",
            settings.path, settings.name
        ));
    } else if let Some(directory) = settings.path.strip_suffix("/divvy-runtime")
        && root.file(&format!("{directory}/divvy-probe")).is_none()
    {
        notes.push(format!(
            "there is no {directory}/divvy-probe: containers of the runtime {} will not start without a CDI spec (divvy cdi generate)",
            settings.name
        ));
    }
    if engine == Engine::Docker
        && settings.path.ends_with("/divvy-runtime")
        && !PATH
            .iter()
            .any(|directory| root.file(&format!("{directory}/{HOOK}")).is_some())
    {
        notes.push(format!(
            "docker run --gpus needs a program {HOOK} in dockerd's PATH; divvy-runtime under that name is such a program: sudo ln -s {} /usr/local/bin/{HOOK}, and sudo \
             systemctl restart docker (a reload is not enough){}",
            settings.path,
            match settings.set_default {
                Some(true) => "",
                _ => "; then run docker with --gpus all --runtime nvidia, or configure it with --set-default and run it with --gpus all",
            }
        ));
    }
    let old = wanted.containerd.as_deref().and_then(engines::containerd::release);
    if settings.cdi == Some(true) && engine == Engine::Containerd && old.is_some_and(|old| old < (1, 7, 0)) {
        notes.push("this containerd is older than 1.7 and does not support CDI: enable_cdi has no effect, and only divvy-runtime provides GPUs, from the container's annotations".to_owned());
    }
    Ok(notes)
}
