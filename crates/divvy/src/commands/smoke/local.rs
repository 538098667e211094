//! The test on this machine: the program itself, or a container engine that starts it. Both replace this process, so that their output and their exit
//! status are those of the command.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use divvy_smoke_report::SmokeOutcome;
use divvy_smoke_run::{PROGRAM, PROGRAM_NAME, VOLUME};

use super::carried::Carried;
use crate::cli::smoke::{SmokeArgs, SmokeOutput};

/// The image of a container, without its tag.
const IMAGE: &str = "divvy.dev/divvy";
/// The CDI device with all GPUs.
const ALL: &str = "nvidia.com/gpu=all";

/// Return the command that runs the test on this machine; `None` if it is for a cluster.
pub(super) fn command(args: &SmokeArgs) -> Option<anyhow::Result<Command>> {
    if args.here {
        return Some(program(args).map(|program| {
            let mut command = Command::new(program);
            command.args(test(args));
            command
        }));
    }
    let engines = [(args.docker, "docker"), (args.nerdctl, "nerdctl"), (args.podman, "podman")];
    let (_, engine) = engines.into_iter().find(|(is_chosen, _)| *is_chosen)?;
    Some(carried(args).map(|carried| {
        let mut command = Command::new(engine);
        command.args(words(args, carried.as_ref()));
        command
    }))
}

/// Replace this process by the command.
pub(super) fn replace(mut command: Command, args: &SmokeArgs) -> anyhow::Result<u8> {
    let name = command.get_program().to_os_string().display().to_string();
    // Returns only if the program could not be started.
    let error = command.exec();
    let fix = if args.here {
        "the release and Divvy's image contain it next to divvy; name its path with --program"
    } else {
        "install the engine, or choose another one"
    };
    Err(error).with_context(|| format!("{name} could not be started; {fix}"))
}

/// Run the program, and return its exit status.
pub(super) fn status(args: &SmokeArgs) -> anyhow::Result<u8> {
    let program = program(args)?;
    let status = Command::new(&program).args(test(args)).status();
    let status = status.with_context(|| format!("{} could not be started", program.display()))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.unwrap_or(SmokeOutcome::Fail.exit_status()))
}

fn program(args: &SmokeArgs) -> anyhow::Result<PathBuf> {
    if let Some(program) = &args.program {
        return Ok(program.clone());
    }
    let own =
        std::env::current_exe().context("this program's own path is unknown; give the path of divvy-smoke with --program")?;
    Ok(own.with_file_name("divvy-smoke"))
}

/// Return the arguments of `divvy-smoke`.
fn test(args: &SmokeArgs) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec![
        "here".into(),
        "--timeout".into(),
        format!("{}ms", args.timeout.as_millis()).into(),
    ];
    words.extend(super::what(args).into_iter().map(OsString::from));
    if let Some(gpu) = &args.gpu {
        words.extend(["--gpu".into(), gpu.into()]);
    }
    if args.output == SmokeOutput::Json {
        words.extend(["-o".into(), "json".into()]);
    }
    words
}

/// Return what is mounted into the container; `None` if the image is Divvy's, which has the program.
fn carried(args: &SmokeArgs) -> anyhow::Result<Option<Carried>> {
    let is_ours = |image: &str| {
        let name = image.rsplit('/').next().unwrap_or(image);
        name.split([':', '@']).next() == Some("divvy")
    };
    match args.image.as_deref() {
        None => Ok(None),
        Some(image) if is_ours(image) => Ok(None),
        Some(_) => Carried::find(Path::new("/"), &program(args)?).map(Some),
    }
}

/// Return the arguments of the container engine.
fn words(args: &SmokeArgs, carried: Option<&Carried>) -> Vec<OsString> {
    let mut words: Vec<OsString> = [
        "run",
        "--rm",
        "--network",
        "none",
        "--read-only",
        "--cap-drop",
        "ALL",
        "--user",
        "65532:65532",
    ]
    .map(Into::into)
    .into();
    match (&args.runtime, &args.gpus) {
        (Some(runtime), _) => {
            // NVIDIA's runtime takes the GPUs and the driver's parts from these variables.
            for word in [
                "--runtime",
                runtime.as_str(),
                "-e",
                "NVIDIA_VISIBLE_DEVICES=all",
                "-e",
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            ] {
                words.push(word.into());
            }
        }
        (None, Some(gpus)) => words.extend(["--gpus".into(), gpus.into()]),
        (None, None) => words.extend(["--device".into(), args.device.as_deref().unwrap_or(ALL).into()]),
    }
    let mut starts: Vec<OsString> = Vec::new();
    let mut entrypoint = OsString::from(PROGRAM);
    if let Some(carried) = carried {
        for (file, name) in carried.files() {
            let mut mount = OsString::from("type=bind,source=");
            mount.push(file);
            mount.push(format!(",target={VOLUME}/{name},readonly"));
            words.extend(["--mount".into(), mount]);
        }
        let loader = carried.loader.file_name().unwrap_or_default();
        entrypoint = Path::new(VOLUME).join(loader).into();
        starts = vec![
            "--library-path".into(),
            VOLUME.into(),
            format!("{VOLUME}/{PROGRAM_NAME}").into(),
        ];
    }
    words.extend(["--entrypoint".into(), entrypoint]);
    words.push(match &args.image {
        Some(image) => image.into(),
        None => format!("{IMAGE}:{}", env!("CARGO_PKG_VERSION")).into(),
    });
    words.extend(starts);
    words.extend(test(args));
    words
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, DivvyCommand as Chosen};

    fn args(line: &str) -> SmokeArgs {
        match Cli::try_parse_from(["divvy", "smoke"].into_iter().chain(line.split(' ')))
            .expect(line)
            .command
        {
            Chosen::Smoke(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_way_starts_the_program_with_its_own_flags() {
        let shown = |line: &str| {
            let command = command(&args(line)).expect("a command").expect(line);
            let words: Vec<String> = [command.get_program()]
                .into_iter()
                .chain(command.get_args())
                .map(|word| word.display().to_string())
                .collect();
            format!("{line}\n  {}", words.join(" "))
        };
        let lines = [
            "--here --program /opt/divvy-smoke",
            "--here --program /opt/divvy-smoke --gpu GPU-8f0a --steps S02,memory --isolation --tensor --timeout 2m -o json",
            "--docker",
            "--docker --device nvidia.com/gpu=0 --image registry.example/divvy:1",
            "--docker --gpus all",
            "--docker --runtime nvidia",
            "--nerdctl --gpus all",
            "--podman --gpu 1 -o json",
        ];
        insta::assert_snapshot!(lines.map(shown).join("\n"));
    }

    #[test]
    fn a_foreign_image_gets_this_machines_program_and_libraries() {
        let carried = Carried {
            program: "/opt/divvy-smoke".into(),
            loader: "/lib64/ld-linux-x86-64.so.2".into(),
            libraries: vec!["/lib/x86_64-linux-gnu/libc.so.6".into()],
        };
        let words = words(&args("--docker --image ubuntu:22.04"), Some(&carried));
        let words: Vec<String> = words.iter().map(|word| word.display().to_string()).collect();
        insta::assert_snapshot!(words.join(" "));
        for image in [
            "divvy",
            "divvy:1",
            "registry.example:5000/a/divvy:1",
            "divvy.dev/divvy@sha256:00",
        ] {
            assert_eq!(
                super::carried(&args(&format!("--docker --image {image}"))).expect(image),
                None
            );
        }
        let missing = super::carried(&args("--docker --image notdivvy --program /nonexistent/divvy-smoke")).expect_err("missing");
        assert!(
            missing.to_string().contains("/nonexistent/divvy-smoke does not exist"),
            "{missing}"
        );
    }

    #[test]
    fn a_cluster_is_not_this_machine() {
        assert!(command(&args("--all-nodes")).is_none());
        assert!(command(&args("--node n1 --node n2")).is_none());
    }
}
