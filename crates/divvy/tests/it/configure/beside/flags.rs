//! Arguments and environment variables: which are accepted or refused, and what the programs print.

use super::cases::{self, CONTAINERD, CRIO, DOCKER, Input};
use super::{Compared, Expected, Meanings, Run, Tree, meaning, meanings};

/// Arguments after `runtime configure`, for Docker unless they name another engine. Each has the same meaning to both programs.
const WORDS: &str = include_str!("words.txt");

/// Whole command lines that have the same meaning to both programs, although the output may differ.
const COMMANDS: &str = include_str!("commands.txt");

const VARIABLES: &[(&str, &str)] = &[
    ("NVIDIA_CTK_DEBUG", "true"),
    ("NVIDIA_CTK_DEBUG", "1"),
    ("NVIDIA_CTK_DEBUG", "false"),
    ("NVIDIA_CTK_DEBUG", ""),
    ("NVIDIA_CTK_DEBUG", "x"),
    ("NVIDIA_CTK_QUIET", "t"),
    ("NVIDIA_CTK_QUIET", ""),
    ("NVIDIA_CTK_QUIET", "x"),
    ("NVIDIA_CTK_CONFIG", "/nonexistent"),
    ("NVIDIA_CTK_CONFIG_FILE_PATH", "/nonexistent"),
    ("NVIDIA_VISIBLE_DEVICES", "all"),
    ("NVIDIA_RUNTIME_NAME", "x"),
    ("RUNTIME", "containerd"),
];

#[test]
fn words_and_variables_mean_what_they_mean_to_nvidia_s_tool() {
    let Some(mut compared) = Compared::new() else { return };
    let files = Tree::from([
        (DOCKER.to_owned(), "{\"debug\": true}".to_owned()),
        (CONTAINERD.to_owned(), include_str!("v2.toml").to_owned()),
    ]);
    for words in WORDS.lines() {
        let mut run = Run::of(files.clone(), &format!("runtime configure {words}"));
        run.words.iter_mut().for_each(|word| *word = word.replace('~', " "));
        compared.compare(words, &run, None);
    }
    for words in COMMANDS.lines() {
        compared.compare(words, &Run::of(files.clone(), words), None);
        let run = Run::of(files.clone(), words);
        assert_eq!(
            compared.theirs.run(&run).status,
            compared.ours.run(&run).status,
            "{words}: the status"
        );
    }
    for (name, value) in VARIABLES {
        let run = Run {
            env: vec![(name, value)],
            ..Run::of(files.clone(), "runtime configure --runtime=containerd")
        };
        compared.compare(&format!("{name}={value}"), &run, None);
    }
    let run = Run::of(
        files.clone(),
        "runtime configure --runtime=containerd --config=/etc/c/main.toml --drop-in-config=/etc/c/gpu",
    );
    let mut expected = meanings(&compared.theirs.run(&run).files);
    expected.get_mut("/etc/c/main.toml").expect("written")["imports"] = ["/etc/c/gpu"].into();
    let why = "a drop-in is imported by a pattern that matches it";
    compared.compare("a drop-in without an ending", &run, Some((why, Expected::Files(expected))));
    for (words, why) in [
        ("--nvidia-runtime-name=", "a runtime without a name is nobody's"),
        ("--nvidia-runtime-name=a~b", "no RuntimeClass can have that handler"),
        ("--nvidia-runtime-path=", "a runtime without a program starts nothing"),
    ] {
        let mut run = Run::of(files.clone(), &format!("runtime configure {words}"));
        run.words.iter_mut().for_each(|word| *word = word.replace('~', " "));
        compared.compare(words, &run, Some((why, Expected::Refused)));
    }
    compared.end();
}

/// Return the concatenated texts of all files of a tree.
fn printed(files: &Tree, paths: &[&str]) -> String {
    paths
        .iter()
        .filter_map(|path| files.get(*path))
        .map(|text| format!("{text}\n"))
        .collect()
}

#[test]
fn a_dry_run_prints_what_would_be_written_as_nvidia_s_tool_does() {
    let Some(mut compared) = Compared::new() else { return };
    let cases = cases::cases();
    let named = |inputs: &[Input], name: &str| inputs.iter().find(|input| input.name == name).cloned().expect("a case");
    let drop_in = "/etc/containerd/conf.d/99-nvidia.toml";
    for (engine, own, input, paths) in [
        ("docker", DOCKER, named(&cases.docker, "missing"), &[DOCKER][..]),
        ("docker", DOCKER, named(&cases.docker, "a tutorial's"), &[DOCKER]),
        (
            "containerd",
            CONTAINERD,
            named(&cases.containerd, "missing"),
            &[drop_in, CONTAINERD],
        ),
        (
            "containerd",
            CONTAINERD,
            named(&cases.containerd, "version 2"),
            &[drop_in, CONTAINERD],
        ),
        (
            "containerd",
            CONTAINERD,
            named(&cases.containerd, "version 3"),
            &[drop_in, CONTAINERD],
        ),
        (
            "crio",
            CRIO,
            named(&cases.crio, "missing"),
            &["/etc/crio/crio.conf.d/99-nvidia.toml"],
        ),
        (
            "crio",
            CRIO,
            named(&cases.crio, "crun"),
            &["/etc/crio/crio.conf.d/99-nvidia.toml"],
        ),
    ] {
        for words in ["", "--set-as-default --cdi.enabled"] {
            let name = format!("{engine}, {}: {words}", input.name);
            let wet = Run::of(input.tree(own), &format!("runtime configure --runtime={engine} {words}"));
            let dry = Run::of(
                wet.files.clone(),
                &format!("runtime configure --runtime={engine} {words} --dry-run"),
            );
            compared.compare(&name, &dry, None);
            for root in [&mut compared.theirs, &mut compared.ours] {
                let (written, shown) = (root.run(&wet), root.run(&dry));
                assert_eq!(shown.stdout, printed(&written.files, paths), "{name}");
                assert_eq!(shown.files, dry.files, "{name}");
            }
        }
    }
    let hook = Run::of(Tree::new(), "runtime configure --config-mode=oci-hook");
    assert_eq!(compared.theirs.run(&hook).stdout, compared.ours.run(&hook).stdout);
    compared.end();
}

/// The configurations that containerd 1.6 and 2.x dump, shortened.
const DUMP_V2: &str = "disabled_plugins = []\nimports = [\"/etc/containerd/config.toml\", \"/etc/containerd/conf.d/99-nvidia.toml\"]\nversion = 2\n\
    [plugins]\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  enable_selinux = false\n  sandbox_image = \"dumped:1\"\n  \
    [plugins.\"io.containerd.grpc.v1.cri\".containerd]\n    default_runtime_name = \"nvidia\"\n    \
    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes]\n      [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia]\n        \
    runtime_type = \"io.containerd.runc.v2\"\n        sandbox_mode = \"of an earlier run\"\n      \
    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n        runtime_type = \"io.containerd.runc.v2\"\n        \
    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\n          SystemdCgroup = true\n\
    [plugins.\"io.containerd.internal.v1.opt\"]\n  path = \"/opt/containerd\"\n";
const DUMP_V3: &str = "version = 3\nimports = []\n[plugins.'io.containerd.cri.v1.runtime']\n  enable_cdi = true\n  \
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.crun]\n    runtime_type = 'io.containerd.runc.v2'\n    \
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.crun.options]\n      BinaryName = 'crun'\n";
const STATUS: &str = "[crio]\n  root = \"/r\"\n  [crio.runtime]\n    default_runtime = \"crun\"\n    [crio.runtime.runtimes.crun]\n      \
    runtime_path = \"/usr/bin/crun\"\n      monitor_path = \"/said\"\n";

/// Return the script of a program that prints `text` if it gets exactly these arguments.
fn stub(words: &str, text: &str) -> String {
    format!("#!/bin/sh\n[ \"$*\" = '{words}' ] || exit 3\n/usr/bin/cat << 'END'\n{text}END\n")
}

#[test]
fn what_an_engine_says_itself_is_taken_as_by_nvidia_s_tool() {
    let Some(mut compared) = Compared::new() else { return };
    let containerd = |text: &str| vec![("containerd", stub("config dump", text))];
    let engines = [
        ("containerd", CONTAINERD, containerd(DUMP_V2)),
        ("containerd", CONTAINERD, containerd(DUMP_V3)),
        ("containerd", CONTAINERD, containerd("")),
        ("containerd", CONTAINERD, containerd("= =\n")),
        (
            "containerd",
            CONTAINERD,
            vec![("containerd", "#!/bin/sh\nexit 1\n".to_owned())],
        ),
        ("crio", CRIO, vec![("crio", stub("status config", STATUS))]),
        ("crio", CRIO, vec![("crio-status", stub("config", STATUS))]),
        (
            "crio",
            CRIO,
            vec![
                ("crio", "#!/bin/sh\nexit 1\n".to_owned()),
                ("crio-status", stub("config", STATUS)),
            ],
        ),
        ("crio", CRIO, vec![("crio", "#!/bin/sh\necho '= ='\n".to_owned())]),
    ];
    for (engine, own, programs) in engines {
        for text in [
            None,
            Some(""),
            Some("version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n"),
        ] {
            for words in ["", "--set-as-default --cdi.enabled", "--nvidia-runtime-name=gpu"] {
                let files: Tree = text.map(|text| (own.to_owned(), text.to_owned())).into_iter().collect();
                let run = Run {
                    programs: programs.clone(),
                    ..Run::of(
                        files,
                        &format!("runtime configure --runtime={engine} --config-source=command {words}"),
                    )
                };
                compared.compare(&format!("{programs:?} {text:?}: {words}"), &run, None);
            }
        }
    }
    // The flag's program is run, not another one.
    let run = Run {
        programs: vec![("other", stub("config dump", DUMP_V2))],
        ..Run::of(
            Tree::new(),
            "runtime configure --runtime=containerd --config-source=command --executable-path=/stub/other",
        )
    };
    compared.compare("--executable-path", &run, None);
    compared.end();
}

/// What NVIDIA's tool writes is not enough for containerd 1.x, whose CRI plugin does not start without its default runtime.
#[test]
fn an_old_containerds_default_runtime_is_written_too() {
    let Some(mut compared) = Compared::new() else { return };
    for (version, old) in [("1.6.20", true), ("1.7.27", true), ("v2.0.0", false), ("v2.1.3", false)] {
        for config in [None, Some("/etc/mine/config.toml")] {
            let own = config.unwrap_or(CONTAINERD);
            let words = config.map(|config| format!("--config={config}")).unwrap_or_default();
            let run = Run {
                programs: vec![("containerd", format!("#!/bin/sh\necho containerd example.org {version} 0\n"))],
                ..Run::of(
                    Tree::from([(own.to_owned(), "version = 2\n".to_owned())]),
                    &format!("runtime configure --runtime=containerd {words}"),
                )
            };
            let mut expected: Meanings = meanings(&compared.theirs.run(&run).files);
            let drop_in = expected.get_mut("/etc/containerd/conf.d/99-nvidia.toml").expect("written");
            drop_in["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]["runc"] =
                meaning("x.toml", "runtime_type = \"io.containerd.runc.v2\"");
            let better = (old && config.is_none()).then_some(("containerd 1.x keeps its runc", Expected::Files(expected)));
            compared.compare(&format!("{version} {config:?}"), &run, better);
        }
    }
    compared.end();
}
