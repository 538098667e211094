//! Properties for any valid configuration file: a second run changes nothing, and undo restores the file byte for byte.

use divvy_engines::containerd::Merge;
use divvy_engines::{EngineTarget, RuntimeSettings, undo};
use proptest::prelude::*;

use super::editing::{CRIO_DROP_IN, DROP_IN, apply, containerd_target, crio_target, docker_target, there_and_back};
use crate::{CONTAINERD, CRIO, DOCKER, tree};

fn space() -> impl Strategy<Value = String> {
    prop_oneof![Just(""), Just(" "), Just("\n"), Just("  "), Just("\t"), Just("\r\n")].prop_map(str::to_owned)
}

fn word() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z-]{1,8}",
        Just("é/\u{1F600}".to_owned()),
        Just("a\\\\b \\\"c\\\" \\u0041".to_owned())
    ]
}

fn json() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        Just("1.50".to_owned()),
        Just("-3e2".to_owned()),
        Just("true".to_owned()),
        word().prop_map(|word| format!("\"{word}\"")),
    ];
    leaf.prop_recursive(3, 20, 4, |inner| {
        prop_oneof![
            (prop::collection::vec(inner.clone(), 0..3), space())
                .prop_map(|(values, space)| format!("[{space}{}{space}]", values.join(","))),
            (members(inner), space()).prop_map(|(members, space)| format!("{{{space}{members}}}")),
        ]
    })
}

fn members(value: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    prop::collection::btree_map(word(), (value, space(), space()), 0..4).prop_map(|members| {
        let members = members
            .iter()
            .map(|(key, (value, a, b))| format!("{a}\"{key}\"{b}:{b}{value}{a}"));
        members.collect::<Vec<_>>().join(",")
    })
}

fn daemon_json() -> impl Strategy<Value = String> {
    let runtime = prop_oneof![
        Just(r#"{"path":"/opt/x", "runtimeArgs":["--debug"]}"#),
        Just(r#"{"path": "nvidia-container-runtime", "args": []}"#),
        Just("{ }"),
    ];
    let ours = prop_oneof![
        Just(String::new()),
        Just(r#", "features": {"buildkit" : true}, "default-runtime":"runc""#.to_owned()),
        Just(",\n\t\"features\":{},\n\t\"runtimes\": {}".to_owned()),
        Just(r#", "runtimes": null"#.to_owned()),
        runtime.prop_map(|runtime| format!(",\n  \"runtimes\": {{ \"kata\": {{\"path\":\"k\"}},\n \"nvidia\" : {runtime} }}\n")),
    ];
    (members(json()), ours, space()).prop_map(|(members, ours, space)| {
        let ours = if members.is_empty() {
            ours.trim_start_matches(',').to_owned()
        } else {
            ours
        };
        format!("{space}{{{members}{ours}}}{space}")
    })
}

/// Lines of TOML for the top of a file, each at most once.
fn toml_top() -> impl Strategy<Value = String> {
    let lines = vec![
        "# a comment é\n",
        "root = '/var/lib/x' # why\n",
        "\n\n",
        "oom_score = -999\n",
        "  state=\"\\u0041\"\n",
        "required_plugins = [ \"a\" , # one\n  'b',\n]\n",
        "dotted.key.\"x y\" = 1979-05-27T07:32:00Z\n",
    ];
    prop::sample::subsequence(lines, 0..7).prop_map(|lines| lines.concat())
}

fn toml_rest(section: &'static str) -> impl Strategy<Value = String> {
    let blocks = vec![
        "\n[grpc]\n  address = \"/run/x\" \n  # inside\n".to_owned(),
        format!("[{section}]\n  sandbox_image = \"p\" # pinned\n"),
        format!("  [{section}.containerd]\n    snapshotter='overlayfs'\n\n"),
        format!(
            "[{section}.containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\noptions = {{ SystemdCgroup = true }}\n"
        ),
        format!(
            "# kata\n[{section}.containerd.runtimes.kata]\nruntime_type=\"k\"\n[[{section}.list]]\na = 1\n[[{section}.list]]\n"
        ),
        format!("[{section}.containerd.runtimes.nvidia]\n  privileged_without_host_devices = true # mine\n"),
        "[timeouts]\n  'a b' = \"1s\"".to_owned(),
    ];
    prop::sample::subsequence(blocks, 0..7).prop_map(|blocks| blocks.concat())
}

fn config_toml() -> impl Strategy<Value = String> {
    let version = prop_oneof![
        Just(("", "plugins.cri")),
        Just(("version = 1\n", "plugins.cri")),
        Just(("version = 2 # two\n", "plugins.\"io.containerd.grpc.v1.cri\"")),
        Just(("version=3\n", "plugins.'io.containerd.cri.v1.runtime'")),
    ];
    let imports = prop_oneof![
        Just(""),
        Just("imports = []\n"),
        Just("imports = [\"/etc/containerd/conf.d/*.toml\"]\n"),
        Just("imports = [\n  \"/a.toml\", # one\n\n  '/b/*.toml' # two\n]\n"),
    ];
    (toml_top(), version, imports).prop_flat_map(|(top, (version, section), imports)| {
        toml_rest(section).prop_map(move |rest| format!("{top}{version}{imports}{rest}"))
    })
}

fn crio_conf() -> impl Strategy<Value = String> {
    let blocks = vec![
        "# CRI-O\n[crio]\nroot = '/x'\n",
        "[crio.runtime]\n  default_runtime = \"crun\" # c\n  cgroup_manager='systemd'\n",
        "  [crio.runtime.runtimes.crun]\n  runtime_path = '/usr/bin/crun'\n\n  monitor_path = \"m\"\n",
        "[crio.runtime.runtimes.nvidia]\nruntime_path='/old' # old\n",
        "[crio.image]\npause_image = \"p\"",
    ];
    prop::sample::subsequence(blocks, 0..5).prop_map(|blocks| blocks.concat())
}

fn settings() -> impl Strategy<Value = RuntimeSettings> {
    let flag = || prop_oneof![Just(None), Just(Some(true)), Just(Some(false))];
    let name = prop_oneof![Just("nvidia"), Just("divvy"), Just("a.b_c-1")];
    (name, flag(), flag(), flag(), any::<bool>()).prop_map(|(name, set_default, cdi, systemd_cgroup, overwrite)| {
        RuntimeSettings {
            name: name.to_owned(),
            path: "/usr/local/bin/divvy-runtime".to_owned(),
            set_default,
            cdi,
            systemd_cgroup,
            overwrite,
            printed: None,
            command: "divvy configure containerd".to_owned(),
        }
    })
}

fn containerds() -> impl Strategy<Value = EngineTarget> {
    let merge = prop_oneof![Just(None), Just(Some(Merge::Sections)), Just(Some(Merge::Keys))];
    (any::<bool>(), merge).prop_map(|(drop_in, merge)| containerd_target(drop_in.then_some(DROP_IN), merge))
}

proptest! {
    #[test]
    fn docker_there_and_back(text in daemon_json(), settings in settings()) {
        there_and_back(&tree([(DOCKER, &text)]), &docker_target(), &settings);
    }

    #[test]
    fn containerd_there_and_back(text in config_toml(), settings in settings(), target in containerds()) {
        let (after, _) = there_and_back(&tree([(CONTAINERD, &text)]), &target, &settings);
        // All comments are kept, after a value and on their own line.
        for comment in text.lines().filter_map(|line| line.split_once("# ")) {
            prop_assert!(after[CONTAINERD].contains(comment.1), "{} is gone from\n{}", comment.1, after[CONTAINERD]);
        }
    }

    #[test]
    fn crio_there_and_back(text in crio_conf(), settings in settings(), drop_in: bool) {
        there_and_back(&tree([(CRIO, &text)]), &crio_target(drop_in.then_some(CRIO_DROP_IN)), &settings);
    }

    #[test]
    fn undo_leaves_only_later_additions_for_docker(text in daemon_json(), settings in settings()) {
        let target = docker_target();
        let (mut files, record) = there_and_back(&tree([(DOCKER, &text)]), &target, &settings);
        let by_hand = files[DOCKER].replacen('{', "{ \"by-hand\": 1,", 1);
        prop_assume!(!record.files.is_empty());
        files.insert(DOCKER.to_owned(), by_hand);
        let plan = undo(&files, &target, &settings.name, Some(&record)).expect("undone");
        apply(&mut files, &plan);
        let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON");
        let mut left = value(&files[DOCKER]);
        left.as_object_mut().expect("an object").remove("by-hand").expect("it is still there");
        // A `null` that divvy replaced with an object is `null` again; dockerd treats it as absent.
        prop_assert_eq!(left, value(&text));
    }

    #[test]
    fn undo_leaves_only_later_additions_for_containerd(text in config_toml(), settings in settings(), target in containerds()) {
        let (mut files, record) = there_and_back(&tree([(CONTAINERD, &text)]), &target, &settings);
        prop_assume!(record.files.contains_key(CONTAINERD));
        let by_hand = format!("# by hand\nby-hand = 1\n{}", files[CONTAINERD]);
        files.insert(CONTAINERD.to_owned(), by_hand);
        let plan = undo(&files, &target, &settings.name, Some(&record)).expect("undone");
        apply(&mut files, &plan);
        prop_assert!(files[CONTAINERD].contains("# by hand"));
        let value = |text: &str| toml::from_str::<toml::Table>(text).expect("TOML");
        let (mut left, mut was) = (value(&files[CONTAINERD]), value(&text));
        prop_assert_eq!(left.remove("by-hand"), Some(1.into()));
        // The format version stays, because the person's edits may depend on it.
        was.entry("version").or_insert_with(|| left.get("version").cloned().unwrap_or(1.into()));
        left.entry("version").or_insert(1.into());
        prop_assert_eq!(left, was, "{}", files[CONTAINERD]);
        prop_assert_eq!(files.len(), 1);
    }
}
