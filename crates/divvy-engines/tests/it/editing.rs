//! Editing engines' files. The numbers in test names are those of `nvidia-ctk`'s behavior cases
//! (`docs/compatibility/toolkit.md`). In each case, Divvy does the same as `nvidia-ctk`, or deliberately better.

use divvy_engines::containerd::{self, Merge};
use divvy_engines::{EditPlan, EngineTarget, Error, OriginalTexts, RuntimeSettings, configure, crio, docker, undo};

use crate::{CONTAINERD, CRIO, DOCKER, Tree, V2, tree};

#[test]
fn a_record_that_divvy_did_not_write_is_refused_and_named() {
    let path = "/etc/docker/daemon.json.divvy-undo";
    for (text, part) in [
        ("", "EOF"),
        ("{}", "files"),
        (r#"{"files":{"/etc/docker/daemon.json":{"original":"{}"}}}"#, "written"),
        (
            r#"{"files":{"etc/passwd":{"original":"x","written":"y"}}}"#,
            "\"etc/passwd\" is not the path",
        ),
        (
            r#"{"files":{"/etc/docker/../passwd":{"original":"x","written":"y"}}}"#,
            "not the path",
        ),
        (
            r#"{"files":{"/etc/\u001b[2J":{"original":"x","written":"y"}}}"#,
            "not the path",
        ),
    ] {
        let said = OriginalTexts::parse(path, text).expect_err(text).to_string();
        assert!(
            said.starts_with(&format!("{path} is not the record that divvy wrote")) && said.contains(part),
            "{said}"
        );
        assert!(
            said.ends_with("nothing was changed") && !said.contains(char::is_control),
            "{said}"
        );
    }
    // The texts in a record are parsed only if the file was edited since.
    let files = tree([(DOCKER, "{\"debug\": true}\n")]);
    for text in [
        r#"{"files":{"/etc/docker/daemon.json":{"original":"{","written":"{}"}}}"#,
        r#"{"files":{"/etc/docker/daemon.json":{"original":null,"written":"[]"}}}"#,
    ] {
        let record = OriginalTexts::parse(path, text).expect("a record");
        let said = undo(&files, &docker_target(), "nvidia", Some(&record))
            .expect_err(text)
            .to_string();
        assert!(
            said.starts_with(&format!("{path} is not the record that divvy wrote")) && said.contains(DOCKER),
            "{said}"
        );
    }
}

pub(crate) fn settings() -> RuntimeSettings {
    RuntimeSettings {
        name: "nvidia".to_owned(),
        path: "/usr/bin/nvidia-container-runtime".to_owned(),
        set_default: None,
        cdi: None,
        systemd_cgroup: None,
        overwrite: false,
        printed: None,
        command: "divvy configure containerd".to_owned(),
    }
}

pub(crate) fn default_and_cdi() -> RuntimeSettings {
    RuntimeSettings {
        set_default: Some(true),
        cdi: Some(true),
        ..settings()
    }
}

pub(crate) fn docker_target() -> EngineTarget {
    EngineTarget::Docker {
        config: DOCKER.to_owned(),
    }
}

pub(crate) const DROP_IN: &str = "/etc/containerd/conf.d/99-nvidia.toml";
pub(crate) const CRIO_DROP_IN: &str = "/etc/crio/crio.conf.d/99-nvidia.toml";

pub(crate) fn containerd_target(drop_in: Option<&str>, merge: Option<Merge>) -> EngineTarget {
    EngineTarget::Containerd {
        config: CONTAINERD.to_owned(),
        drop_in: drop_in.map(str::to_owned),
        merge,
        version: 2,
    }
}

pub(crate) fn crio_target(drop_in: Option<&str>) -> EngineTarget {
    EngineTarget::Crio {
        config: CRIO.to_owned(),
        drop_in: drop_in.map(str::to_owned),
    }
}

pub(crate) fn apply(files: &mut Tree, plan: &EditPlan) {
    for edit in &plan.edits {
        assert_eq!(files.get(&edit.path), edit.before.as_ref());
        match &edit.after {
            Some(text) => files.insert(edit.path.clone(), text.clone()),
            None => files.remove(&edit.path),
        };
    }
}

/// Configure the files, check that a second run changes nothing, and check that undo restores them byte for byte.
pub(crate) fn there_and_back(files: &Tree, target: &EngineTarget, settings: &RuntimeSettings) -> (Tree, OriginalTexts) {
    let mut after = files.clone();
    let plan = configure(&after, target, settings, None).unwrap_or_else(|error| panic!("{error}"));
    apply(&mut after, &plan);
    let record = plan.record.unwrap_or_default();
    let again = configure(&after, target, settings, Some(&record)).expect("again");
    assert_eq!(again.edits, [], "a second run changes something");
    assert_eq!(again.record, Some(record.clone()));
    let mut back = after.clone();
    let out = undo(&back, target, &settings.name, Some(&record)).expect("undone");
    apply(&mut back, &out);
    assert_eq!(back, *files);
    assert_eq!(out.notes, [""; 0]);
    (after, record)
}

fn shown(files: &Tree) -> String {
    files.iter().map(|(path, text)| format!("---- {path}\n{text}")).collect()
}

fn added(before: &str, after: &str) -> Vec<String> {
    let mut lines = before.lines().peekable();
    let mut added = Vec::new();
    for line in after.lines() {
        if lines.peek() == Some(&line) {
            lines.next();
        } else {
            added.push(line.to_owned());
        }
    }
    assert_eq!(lines.next(), None, "a line is gone");
    added
}

#[test]
fn case_01_docker_without_a_file() {
    let (after, _) = there_and_back(&Tree::new(), &docker_target(), &settings());
    insta::assert_snapshot!(shown(&after));
}

#[test]
fn case_02_docker_keeps_every_key_that_was_there() {
    let text = r#"{"log-driver":"json-file","registry-mirrors":["https://m"],"features":{"buildkit":true}}"#;
    let (after, _) = there_and_back(&tree([(DOCKER, text)]), &docker_target(), &default_and_cdi());
    insta::assert_snapshot!(shown(&after));
}

/// The runtime gets another program.
#[test]
fn case_03_docker_s_runtime_keeps_its_arguments() {
    let text = "{\n\t\"runtimes\": {\n\t\t\"nvidia\": {\n\t\t\t\"path\": \"/opt/x\",\n\t\t\t\"runtimeArgs\": [\"--debug\"]\n\t\t}\n\t},\n\t\"zzz\": 1.50,\n\t\"aaa\": null\n}";
    let (after, _) = there_and_back(&tree([(DOCKER, text)]), &docker_target(), &settings());
    assert_eq!(after[DOCKER], text.replace("/opt/x", "/usr/bin/nvidia-container-runtime"));
    // A file that already has the runtime is not changed, not even its formatting.
    let plan = configure(&after, &docker_target(), &settings(), None).expect("planned");
    assert_eq!((plan.edits, plan.record), (vec![], None));
}

#[test]
fn docker_s_runtime_is_a_program_or_a_shim_and_never_both() {
    // dockerd rejects a file with a runtime that has both a path and a runtimeType or options.
    let text = "{\"runtimes\": {\"nvidia\": {\"runtimeType\": \"io.containerd.runc.v2\", \"options\": {\"Root\": \"/run/x\"}}}}";
    let (after, _) = there_and_back(&tree([(DOCKER, text)]), &docker_target(), &settings());
    let after: serde_json::Value = serde_json::from_str(&after[DOCKER]).expect("JSON");
    assert_eq!(
        after,
        serde_json::json!({"runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}}})
    );
}

/// A broken file is refused.
#[test]
fn case_04_docker_s_empty_file_is_an_empty_object() {
    let (after, _) = there_and_back(&tree([(DOCKER, "")]), &docker_target(), &settings());
    assert!(docker::read(&after, DOCKER).expect("read").runtimes.contains_key("nvidia"));
    for text in ["{not json", "{\n  // c\n  \"debug\": true\n}\n", "{\"a\": 1,}", "[]"] {
        let error = configure(&tree([(DOCKER, text)]), &docker_target(), &settings(), None).expect_err("refused");
        assert!(matches!(error, Error::Syntax { .. } | Error::WrongType { .. }), "{error}");
    }
}

#[test]
fn an_endless_edit_for_docker_is_refused() {
    let lines = |count: usize| format!("{{\"a\": [{}0]}}", "1,\n".repeat(count));
    let edited = |text: &str| configure(&tree([(DOCKER, text)]), &docker_target(), &settings(), None);
    let said = edited(&lines(10_000)).expect_err("too many").to_string();
    assert_eq!(
        said,
        format!(
            "{DOCKER} has 20003 lines and values, and divvy edits files with at most 4000: remove empty lines and unused entries, \
             then run the command again; nothing was changed"
        )
    );
    // A file that was written can be edited again.
    let mut refused = 0;
    for count in [500, 1_990, 1_995, 1_997, 1_998] {
        match edited(&lines(count)) {
            Ok(plan) => {
                let after = plan.edits[0].after.clone().expect("it stays");
                edited(&after).expect("it was written");
            }
            Err(_) => refused += 1,
        }
    }
    assert!((1..5).contains(&refused), "{refused}");
}

#[test]
fn case_05_docker_s_unknown_former_default_becomes_runc() {
    let text = r#"{"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}, "debug": true}"#;
    let mut files = tree([(DOCKER, text)]);
    let plan = undo(&files, &docker_target(), "nvidia", None).expect("undone");
    apply(&mut files, &plan);
    let left: serde_json::Value = serde_json::from_str(&files[DOCKER]).expect("JSON");
    assert_eq!(left, serde_json::json!({"default-runtime": "runc", "debug": true}));
    assert_eq!(plan.notes.len(), 1);
}

#[test]
fn case_06_containerd_without_a_file() {
    // The same as NVIDIA's tool. Another test checks that containerd 1.x also gets a table for runc.
    let like_theirs = RuntimeSettings {
        overwrite: true,
        ..settings()
    };
    let (after, _) = there_and_back(&Tree::new(), &containerd_target(Some(DROP_IN), None), &like_theirs);
    insta::assert_snapshot!(shown(&after));
}

#[test]
fn the_default_runtime_is_never_one_that_is_not_there() {
    // Observed: containerd 1.6.20 drops its built-in table of runc once a file has another runtime, and its CRI plugin does not start.
    for merge in [None, Some(Merge::Sections)] {
        for drop_in in [None, Some(DROP_IN)] {
            for text in [
                "",
                "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"x\"\n",
            ] {
                let (after, _) = there_and_back(&tree([(CONTAINERD, text)]), &containerd_target(drop_in, merge), &settings());
                let read = containerd::read(&after, CONTAINERD, Merge::Sections).expect("read");
                assert_eq!(
                    read.runtimes.keys().collect::<Vec<_>>(),
                    ["nvidia", "runc"],
                    "{}",
                    shown(&after)
                );
            }
        }
    }
    let text = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = \"gone\"\n";
    let plan = configure(
        &tree([(CONTAINERD, text)]),
        &containerd_target(Some(DROP_IN), None),
        &settings(),
        None,
    )
    .expect("planned");
    assert!(
        plan.notes.iter().any(|note| note.contains("no such runtime")),
        "{:?}",
        plan.notes
    );
}

#[test]
fn case_07_containerd_s_runtime_inherits_the_cgroup_driver() {
    for merge in [None, Some(Merge::Sections), Some(Merge::Keys)] {
        for drop_in in [None, Some(DROP_IN)] {
            let (after, _) = there_and_back(
                &tree([(CONTAINERD, V2)]),
                &containerd_target(drop_in, merge),
                &default_and_cdi(),
            );
            let read = containerd::read(&after, CONTAINERD, merge.unwrap_or(Merge::Sections)).expect("read");
            let runtime = &read.runtimes["nvidia"];
            assert_eq!(runtime.systemd_cgroup, Some(true));
            assert_eq!(runtime.runtime_type.as_deref(), Some("io.containerd.runc.v2"));
            assert_eq!(runtime.path.as_deref(), Some("/usr/bin/nvidia-container-runtime"));
            assert_eq!(read.default_runtime.as_deref(), Some("nvidia"));
            assert_eq!(read.cdi, Some(true));
            assert!(read.runtimes.contains_key("runc"));
        }
    }
}

/// The drop-in has only the settings that are ours.
#[test]
fn containerd_2_1_gets_a_minimal_drop_in() {
    let (after, _) = there_and_back(
        &tree([(CONTAINERD, V2)]),
        &containerd_target(Some(DROP_IN), Some(Merge::Keys)),
        &default_and_cdi(),
    );
    insta::assert_snapshot!(after[DROP_IN]);
}

/// The drop-in says that it repeats the section.
#[test]
fn an_older_containerds_drop_in_repeats_the_section() {
    let (after, _) = there_and_back(
        &tree([(CONTAINERD, V2)]),
        &containerd_target(Some(DROP_IN), Some(Merge::Sections)),
        &default_and_cdi(),
    );
    insta::assert_snapshot!(after[DROP_IN]);
}

#[test]
fn the_next_run_updates_the_repeated_section() {
    let target = containerd_target(Some(DROP_IN), Some(Merge::Sections));
    let (mut files, record) = there_and_back(&tree([(CONTAINERD, V2)]), &target, &default_and_cdi());
    let edited = files[CONTAINERD].replace("pause:3.9", "pause:3.10");
    files.insert(CONTAINERD.to_owned(), edited);
    let plan = configure(&files, &target, &settings(), Some(&record)).expect("planned");
    apply(&mut files, &plan);
    assert!(
        files[DROP_IN].contains("pause:3.10") && files[DROP_IN].contains("default_runtime_name = \"nvidia\""),
        "{}",
        files[DROP_IN]
    );
}

fn annotations(text: &str, name: &str) -> Option<Vec<String>> {
    let file: toml::Table = toml::from_str(text).expect("TOML");
    let runtimes = &file["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"];
    let list = runtimes.get(name)?.get("container_annotations")?.as_array()?.clone();
    Some(list.iter().filter_map(|text| text.as_str().map(str::to_owned)).collect())
}

/// NVIDIA's tool adds no annotations for its own runtime.
#[test]
fn with_cdi_a_containerd_runtime_gets_its_annotations() {
    let cdi = RuntimeSettings {
        cdi: Some(true),
        ..settings()
    };
    for (list, expected) in [
        ("", &["cdi.k8s.io/*"][..]),
        ("  container_annotations = [\"a/*\"] # mine\n", &["a/*", "cdi.k8s.io/*"]),
        (
            "  container_annotations = [\"cdi.k8s.io/*\", \"a/*\"]\n",
            &["cdi.k8s.io/*", "a/*"],
        ),
    ] {
        // Even if CDI is already enabled, a later run without a CDI option keeps the runtime's annotations.
        for on in ["", "enable_cdi = true\n"] {
            let text = format!(
                "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n{on}\
                 [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n  runtime_type = \"io.containerd.runc.v2\"\n{list}"
            );
            for (drop_in, merge) in [
                (None, Merge::Sections),
                (Some(DROP_IN), Merge::Sections),
                (Some(DROP_IN), Merge::Keys),
            ] {
                let written = drop_in.unwrap_or(CONTAINERD);
                let (files, target) = (tree([(CONTAINERD, &text)]), containerd_target(drop_in, Some(merge)));
                let (after, record) = there_and_back(&files, &target, &cdi);
                assert_eq!(annotations(&after[written], "nvidia").expect("a list"), expected);
                assert_eq!(
                    annotations(&after[CONTAINERD], "runc"),
                    annotations(&text, "runc"),
                    "runc's stay"
                );
                let again = configure(&after, &target, &settings(), Some(&record)).expect("again");
                assert_eq!(again.edits, [], "the settings of an earlier run stay");
                let overwrite = RuntimeSettings {
                    overwrite: true,
                    ..cdi.clone()
                };
                let (after, _) = there_and_back(&files, &target, &overwrite);
                assert_eq!(
                    annotations(&after[written], "nvidia"),
                    annotations(&text, "runc"),
                    "as copied"
                );
            }
        }
    }
}

#[test]
fn case_08_containerd_s_imports_grow_unless_one_matches() {
    let v3 = "version = 3\nimports = [\"/etc/containerd/extra/*.toml\"] # site\n";
    let (after, _) = there_and_back(
        &tree([(CONTAINERD, v3)]),
        &containerd_target(Some(DROP_IN), None),
        &settings(),
    );
    assert_eq!(
        after[CONTAINERD],
        "version = 3\nimports = [\"/etc/containerd/extra/*.toml\", \"/etc/containerd/conf.d/*.toml\"] # site\n"
    );
    assert!(after[DROP_IN].contains("[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.nvidia]"));
    for imports in [
        "/etc/containerd/conf.d/*.toml",
        "conf.d/*.toml",
        DROP_IN,
        "/etc/*/conf.d/??-*.toml",
    ] {
        let text = format!("version = 3\nimports = [\"{imports}\"]\n");
        let (after, _) = there_and_back(
            &tree([(CONTAINERD, &text)]),
            &containerd_target(Some(DROP_IN), None),
            &settings(),
        );
        assert_eq!(after[CONTAINERD], text);
    }
    let lines = "version = 3\nimports = [\n  \"/a.toml\", # mine\n  \"/b.toml\",\n]\n";
    let (after, _) = there_and_back(
        &tree([(CONTAINERD, lines)]),
        &containerd_target(Some(DROP_IN), None),
        &settings(),
    );
    insta::assert_snapshot!(after[CONTAINERD]);
}

#[test]
fn an_import_does_not_bring_other_files_to_life() {
    let files = tree([
        (CONTAINERD, "version = 2\n"),
        ("/etc/containerd/conf.d/old-experiment.toml", "version = 2\n[plugins.x]\n"),
    ]);
    let (after, _) = there_and_back(&files, &containerd_target(Some(DROP_IN), None), &settings());
    assert_eq!(after[CONTAINERD], format!("version = 2\nimports = [\"{DROP_IN}\"]\n"));
}

#[test]
fn an_import_of_a_future_directory_is_enough() {
    let text = "version = 3\nimports = [\"/etc/containerd/*/*.toml\"]\n";
    let (after, _) = there_and_back(
        &tree([(CONTAINERD, text)]),
        &containerd_target(Some(DROP_IN), None),
        &settings(),
    );
    assert_eq!(after[CONTAINERD], text);
}

#[test]
fn as_with_nvidia_s_tool_a_broken_drop_in_is_written_anew() {
    let overwrite = RuntimeSettings {
        overwrite: true,
        ..settings()
    };
    for (file, drop_in, target) in [
        (CONTAINERD, DROP_IN, containerd_target(Some(DROP_IN), None)),
        (CRIO, CRIO_DROP_IN, crio_target(Some(CRIO_DROP_IN))),
    ] {
        let imports = if file == CONTAINERD {
            "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n"
        } else {
            ""
        };
        let files = tree([(file, imports), (drop_in, "= =")]);
        let (after, _) = there_and_back(&files, &target, &overwrite);
        assert!(target.read(&after).expect("read").runtimes.contains_key("nvidia"));
        // Without permission to replace the drop-in, divvy refuses: it cannot know which program wrote the broken file.
        let error = configure(&files, &target, &settings(), None).expect_err("refused");
        assert!(matches!(error, Error::Syntax { .. }), "{error}");
    }
}

#[test]
fn what_the_engine_says_itself_is_copied_in_place_of_its_files() {
    let said = |text: &str| RuntimeSettings {
        overwrite: true,
        printed: Some(text.to_owned()),
        ..settings()
    };
    let section = "[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"said:1\"\n  \
                   [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\n    SystemdCgroup = true\n";
    let dump = format!("version = 2\nimports = [\"/etc/containerd/config.toml\", \"/elsewhere.toml\"]\noom_score = 7\n{section}");
    let target = containerd_target(Some(DROP_IN), None);
    for file in [None, Some("version = 2\noom_score = 1\n")] {
        let files: Tree = file
            .map(|text: &str| (CONTAINERD.to_owned(), text.to_owned()))
            .into_iter()
            .collect();
        let (after, _) = there_and_back(&files, &target, &said(&dump));
        let written: toml::Table = toml::from_str(&after[DROP_IN]).expect("TOML");
        let cri = &written["plugins"]["io.containerd.grpc.v1.cri"];
        assert_eq!(cri["sandbox_image"].as_str(), Some("said:1"));
        let runtimes = &cri["containerd"]["runtimes"];
        assert_eq!(runtimes["nvidia"]["options"]["SystemdCgroup"].as_bool(), Some(true));
        assert!(!written.contains_key("oom_score"));
        assert!(after[CONTAINERD].contains("imports = [\"/etc/containerd/conf.d/*.toml\"]"));
        assert!(!after[CONTAINERD].contains("said"), "{}", after[CONTAINERD]);
    }
    let error = configure(&Tree::new(), &target, &said("= ="), None).expect_err("refused");
    assert!(
        error.to_string().contains("the configuration that containerd printed"),
        "{error}"
    );
    let crio = "[crio.runtime]\ndefault_runtime = \"crun\"\n[crio.runtime.runtimes.crun]\nmonitor_path = \"/said\"\n";
    let (after, _) = there_and_back(&Tree::new(), &crio_target(Some(CRIO_DROP_IN)), &said(crio));
    assert!(
        after[CRIO_DROP_IN].contains("monitor_path = \"/said\""),
        "{}",
        after[CRIO_DROP_IN]
    );
}

#[test]
fn case_09_containerd_s_comments_stay_and_one_line_is_added() {
    let (after, _) = there_and_back(
        &tree([(CONTAINERD, V2)]),
        &containerd_target(Some(DROP_IN), None),
        &settings(),
    );
    assert_eq!(
        added(V2, &after[CONTAINERD]),
        ["imports = [\"/etc/containerd/conf.d/*.toml\"]"]
    );
}

#[test]
fn case_10_containerd_s_version_1_is_written_where_it_is_read() {
    let v1 = "[plugins.cri]\n  sandbox_image = \"k8s.gcr.io/pause:3.1\" # old\n  [plugins.cri.containerd]\n    \
              [plugins.cri.containerd.runtimes.runc]\n      runtime_type = \"io.containerd.runc.v1\"\n";
    for text in [
        v1.to_owned(),
        format!("version = 1\n{v1}"),
        "disabled_plugins = []\n".to_owned(),
    ] {
        for merge in [None, Some(Merge::Keys)] {
            let (after, _) = there_and_back(
                &tree([(CONTAINERD, &text)]),
                &containerd_target(Some(DROP_IN), merge),
                &default_and_cdi(),
            );
            assert_eq!(after.keys().collect::<Vec<_>>(), [CONTAINERD], "no drop-in is written");
            assert_eq!(after[CONTAINERD].matches("version").count(), text.matches("version").count());
            let read = containerd::read(&after, CONTAINERD, Merge::Sections).expect("read");
            assert_eq!(read.version, Some(1));
            assert_eq!(read.default_runtime.as_deref(), Some("nvidia"));
            assert_eq!(read.cdi, Some(true), "enable_cdi is a key of plugins.cri");
        }
    }
    let old = v1.replace("io.containerd.runc.v1", "io.containerd.runtime.v1.linux");
    let (after, _) = there_and_back(&tree([(CONTAINERD, &old)]), &containerd_target(None, None), &settings());
    insta::assert_snapshot!(after[CONTAINERD]);
}

/// The settings are written to the file from which containerd reads version 1.
#[test]
fn version_1_is_written_as_nvidia_writes_it() {
    let v1 = "[plugins.cri.containerd.runtimes.runc]\n  runtime_type = \"io.containerd.runc.v1\"\n";
    let overwrite = RuntimeSettings {
        overwrite: true,
        ..settings()
    };
    for target in [containerd_target(Some(DROP_IN), None), containerd_target(None, None)] {
        let (after, _) = there_and_back(&tree([(CONTAINERD, v1)]), &target, &overwrite);
        let written: toml::Table = toml::from_str(&after[CONTAINERD]).expect("TOML");
        let expected = format!(
            "{v1}[plugins.cri.containerd.runtimes.nvidia]\nruntime_type = \"io.containerd.runc.v1\"\n\
             options = {{ BinaryName = \"{0}\", Runtime = \"{0}\" }}\n",
            settings().path
        );
        assert_eq!(written, toml::from_str(&expected).expect("TOML"));
    }
}

#[test]
fn case_11_without_a_drop_in_containerd_s_file_has_it_all() {
    let text = format!("imports = [\"/etc/mine/*.toml\"]\n{V2}");
    let (after, _) = there_and_back(
        &tree([(CONTAINERD, &text)]),
        &containerd_target(None, None),
        &default_and_cdi(),
    );
    assert_eq!(after.len(), 1);
    insta::assert_snapshot!(after[CONTAINERD]);
}

#[test]
fn case_12_containerd_s_version_is_a_number_and_4_is_as_3() {
    let error = configure(
        &tree([(CONTAINERD, "version = \"2\"\n")]),
        &containerd_target(Some(DROP_IN), None),
        &settings(),
        None,
    )
    .expect_err("refused");
    assert!(error.to_string().contains("`version` is the string \"2\""), "{error}");
    let (after, _) = there_and_back(
        &tree([(CONTAINERD, "version = 4\n")]),
        &containerd_target(Some(DROP_IN), None),
        &settings(),
    );
    assert!(after[DROP_IN].contains("version = 4\n") && after[DROP_IN].contains("io.containerd.cri.v1.runtime"));
}

/// NVIDIA's tool does not keep the settings of the first run.
#[test]
fn case_13_a_second_run_keeps_the_first_ones_settings() {
    for merge in [Merge::Sections, Merge::Keys] {
        let target = containerd_target(Some(DROP_IN), Some(merge));
        let (after, record) = there_and_back(&tree([(CONTAINERD, V2)]), &target, &default_and_cdi());
        assert_eq!(
            configure(&after, &target, &settings(), Some(&record)).expect("planned").edits,
            []
        );
        let theirs = RuntimeSettings {
            overwrite: true,
            set_default: Some(false),
            ..settings()
        };
        let mut without = after.clone();
        apply(
            &mut without,
            &configure(&after, &target, &theirs, Some(&record)).expect("planned"),
        );
        let read = containerd::read(&without, CONTAINERD, merge).expect("read");
        assert_eq!((read.default_runtime.as_deref(), read.cdi), (Some("runc"), None), "{merge:?}");
    }
}

#[test]
fn case_14_crio_without_a_file() {
    let settings = RuntimeSettings {
        set_default: Some(true),
        command: "divvy configure crio".to_owned(),
        ..settings()
    };
    let (after, _) = there_and_back(&Tree::new(), &crio_target(Some(CRIO_DROP_IN)), &settings);
    insta::assert_snapshot!(shown(&after));
}

/// Keys that other programs have written stay.
#[test]
fn case_15_crio_s_runtime_inherits_from_drop_ins_too() {
    let crun = "[crio.runtime]\ndefault_runtime = \"crun\"\n[crio.runtime.runtimes.crun]\nruntime_path = \"/usr/bin/crun\"\n\
                runtime_root = \"/run/crun\"\nallowed_annotations = [\"io.containers.trace-syscall\"]\nmonitor_path = \"/usr/libexec/crio/conmon\"\n";
    for at in [CRIO, "/etc/crio/crio.conf.d/10-crio.conf"] {
        let (after, _) = there_and_back(&tree([(at, crun)]), &crio_target(Some(CRIO_DROP_IN)), &settings());
        assert!(
            after[CRIO_DROP_IN].contains("monitor_path = \"/usr/libexec/crio/conmon\""),
            "{}",
            shown(&after)
        );
    }
    let (after, _) = there_and_back(&tree([(CRIO, crun)]), &crio_target(None), &default_and_cdi());
    assert_eq!(after.len(), 1);
    insta::assert_snapshot!(after[CRIO]);
}

#[test]
fn crio_s_runtime_is_one_of_oci_whatever_it_is_copied_from() {
    let kata = "[crio.runtime]\ndefault_runtime = \"kata\"\n[crio.runtime.runtimes.kata]\nruntime_path = \"/usr/bin/kata\"\nruntime_type = \"vm\"\n";
    let target = crio_target(Some(CRIO_DROP_IN));
    let (after, _) = there_and_back(&tree([(CRIO, kata)]), &target, &settings());
    let read = crio::read(&after, CRIO).expect("read");
    assert_eq!(read.runtimes["nvidia"].runtime_type.as_deref(), Some("oci"));
    let there = "[crio.runtime.runtimes.nvidia]\nruntime_path = \"/opt/x\"\nruntime_type = \"vm\"\n";
    let (after, _) = there_and_back(&tree([(CRIO, there)]), &crio_target(None), &settings());
    assert!(after[CRIO].contains("runtime_type = \"oci\""), "{}", after[CRIO]);
}

/// The note says who reads the drop-in.
#[test]
fn a_crio_drop_in_elsewhere_has_a_note() {
    let target = crio_target(Some("/etc/other.d/gpu.toml"));
    let files = tree([(CRIO, "[crio.runtime]\n")]);
    let (after, _) = there_and_back(&files, &target, &default_and_cdi());
    assert!(after["/etc/other.d/gpu.toml"].contains("default_runtime = \"nvidia\""));
    let plan = configure(&files, &target, &settings(), None).expect("planned");
    assert!(plan.notes[0].contains("/etc/crio/crio.conf.d"), "{:?}", plan.notes);
}

#[test]
fn the_kubelet_s_cgroup_driver_is_that_of_runc_and_of_ours() {
    let of_kubelet = |systemd| RuntimeSettings {
        systemd_cgroup: Some(systemd),
        ..settings()
    };
    for merge in [Merge::Sections, Merge::Keys] {
        for drop_in in [None, Some(DROP_IN)] {
            for text in [
                V2.to_owned(),
                V2.replace("SystemdCgroup = true", "SystemdCgroup = false"),
                String::new(),
            ] {
                for systemd in [true, false] {
                    let target = containerd_target(drop_in, Some(merge));
                    let (after, _) = there_and_back(&tree([(CONTAINERD, &text)]), &target, &of_kubelet(systemd));
                    let read = containerd::read(&after, CONTAINERD, merge).expect("read");
                    for name in ["runc", "nvidia"] {
                        assert_eq!(
                            read.runtimes[name].systemd_cgroup,
                            Some(systemd),
                            "{name} {merge:?} {}",
                            shown(&after)
                        );
                        assert_eq!(read.runtimes[name].runtime_type.as_deref(), Some("io.containerd.runc.v2"));
                    }
                }
            }
        }
    }
    let crio = tree([(CRIO, "[crio.runtime]\ncgroup_manager = \"cgroupfs\"\n")]);
    let plan = configure(&crio, &crio_target(Some(CRIO_DROP_IN)), &of_kubelet(true), None).expect("planned");
    assert!(plan.notes[0].contains("cgroup_manager"), "{:?}", plan.notes);
}

#[test]
fn what_another_file_overrules_is_refused() {
    let files = tree([
        (
            CONTAINERD,
            "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\", \"/etc/site.toml\"]\n",
        ),
        (
            "/etc/site.toml",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"x\"\n",
        ),
    ]);
    let error = configure(
        &files,
        &containerd_target(Some(DROP_IN), Some(Merge::Sections)),
        &settings(),
        None,
    )
    .expect_err("overruled");
    assert!(error.to_string().contains("the engine reads /etc/site.toml later"), "{error}");
    there_and_back(&files, &containerd_target(Some(DROP_IN), Some(Merge::Keys)), &settings());
    let files = tree([(
        "/etc/crio/crio.conf.d/zzz.conf",
        "[crio.runtime]\ndefault_runtime = \"crun\"\n",
    )]);
    let error = configure(&files, &crio_target(Some(CRIO_DROP_IN)), &default_and_cdi(), None).expect_err("overruled");
    assert!(error.to_string().contains("zzz.conf"), "{error}");
}

#[test]
fn dockers_containerd_without_cri_is_told() {
    let plan = configure(
        &tree([(CONTAINERD, "disabled_plugins = [\"cri\"]\n")]),
        &containerd_target(Some(DROP_IN), None),
        &settings(),
        None,
    )
    .expect("planned");
    assert!(plan.notes[0].contains("disabled_plugins"), "{:?}", plan.notes);
}

#[test]
fn an_edited_file_loses_only_what_is_ours() {
    let (mut docker, record) = there_and_back(
        &tree([(DOCKER, "{\n  \"debug\": false,\n  \"features\": {\"cdi\": false}\n}\n")]),
        &docker_target(),
        &default_and_cdi(),
    );
    let edited = docker[DOCKER]
        .replace("false", "true")
        .replacen('{', "{\n  \"mtu\": 1400,", 1);
    docker.insert(DOCKER.to_owned(), edited);
    let plan = undo(&docker, &docker_target(), "nvidia", Some(&record)).expect("undone");
    apply(&mut docker, &plan);
    let left: serde_json::Value = serde_json::from_str(&docker[DOCKER]).expect("JSON");
    assert_eq!(
        left,
        serde_json::json!({"mtu": 1400, "debug": true, "features": {"cdi": false}})
    );
    assert!(plan.notes[0].contains("edited since"), "{:?}", plan.notes);

    let target = containerd_target(Some(DROP_IN), Some(Merge::Keys));
    let (mut files, record) = there_and_back(&tree([(CONTAINERD, V2)]), &target, &default_and_cdi());
    let main = files[CONTAINERD].replace("pause:3.9", "pause:3.10");
    files.insert(CONTAINERD.to_owned(), main);
    let drop_in = files[DROP_IN].clone() + "\n[plugins.mine]\nkey = 1\n";
    files.insert(DROP_IN.to_owned(), drop_in);
    // After another run of configure, undo still keeps the edits that a person made.
    let plan = configure(
        &files,
        &target,
        &RuntimeSettings {
            path: "/opt/x".to_owned(),
            ..settings()
        },
        Some(&record),
    )
    .expect("planned");
    apply(&mut files, &plan);
    let plan = undo(&files, &target, "nvidia", plan.record.as_ref()).expect("undone");
    apply(&mut files, &plan);
    assert_eq!(files[CONTAINERD], V2.replace("pause:3.9", "pause:3.10"));
    let left = &files[DROP_IN];
    assert!(
        left.contains("[plugins.mine]\nkey = 1\n") && !left.contains("nvidia"),
        "{left}"
    );
    let changed = files[CONTAINERD].replace("version = 2", "version = 2 # two");
    files.insert(CONTAINERD.to_owned(), changed);
}

#[test]
fn a_template_of_k3s_gets_a_marked_part() {
    let target = EngineTarget::Template {
        config: "/k3s/config-v3.toml.tmpl".to_owned(),
        generated: "/k3s/config.toml".to_owned(),
        version: 3,
    };
    let of_k3s = RuntimeSettings {
        command: "divvy configure k3s".to_owned(),
        ..settings()
    };
    let (after, _) = there_and_back(&Tree::new(), &target, &of_k3s);
    insta::assert_snapshot!(shown(&after));
    let own = "{{ template \"base\" . }}\n\n[proxy_plugins]\n  {{ if .X }}y = 1{{ end }}";
    let (after, record) = there_and_back(&tree([("/k3s/config-v3.toml.tmpl", own)]), &target, &default_and_cdi());
    let mut edited = after.clone();
    edited.insert(
        "/k3s/config-v3.toml.tmpl".to_owned(),
        after["/k3s/config-v3.toml.tmpl"].clone() + "# mine\n",
    );
    let plan = undo(&edited, &target, "nvidia", Some(&record)).expect("undone");
    apply(&mut edited, &plan);
    assert_eq!(edited["/k3s/config-v3.toml.tmpl"], format!("{own}\n# mine\n"));
    // A second table of the same name would keep containerd from starting.
    let by_itself = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.'nvidia'.options]\nBinaryName = \"/usr/bin/n\"\n";
    for files in [
        tree([("/k3s/config.toml", by_itself)]),
        tree([("/k3s/config-v3.toml.tmpl", by_itself)]),
    ] {
        let error = configure(&files, &target, &settings(), None).expect_err("refused");
        assert!(
            matches!(error, Error::FoundByItself { .. } | Error::InTemplate { .. }),
            "{error}"
        );
    }
}

#[test]
fn a_runtime_is_read_as_it_was_written() {
    let (after, _) = there_and_back(&Tree::new(), &crio_target(Some(CRIO_DROP_IN)), &default_and_cdi());
    let read = crio::read(&after, CRIO).expect("read");
    assert_eq!(read.runtimes["nvidia"].runtime_type.as_deref(), Some("oci"));
}
