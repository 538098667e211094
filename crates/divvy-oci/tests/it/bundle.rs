use divvy_cdi::{Edits, Spec};
use divvy_oci::runtime::bundle::{Bundle, BundleError, HostDevice, NoDevice};
use proptest::prelude::*;
use serde_json::{Value, json};

fn look(path: &str) -> Result<HostDevice, NoDevice> {
    let (major, minor) = match path {
        "/dev/null" => (1, 3),
        "/dev/nvidia0" => (195, 0),
        "/dev/nvidiactl" => (195, 255),
        _ => return Err(std::io::Error::other("no such file or directory").into()),
    };
    Ok(HostDevice {
        kind: 'c',
        major,
        minor,
        mode: 0o666,
    })
}

fn edits(device: Value) -> Edits {
    let spec = json!({"cdiVersion": "0.6.0", "kind": "a.com/b", "devices": [{"name": "x", "containerEdits": device}]});
    let spec = Spec::parse(&spec.to_string()).expect("a spec");
    spec.edits_of("x").expect("a device")
}

fn after(config: &str, edit: Value) -> String {
    let mut bundle = Bundle::parse(config).expect("a configuration");
    bundle.apply(&edits(edit), look).expect("it fits");
    bundle.text()
}

/// The result equals the recorded container of NVIDIA's runtime, except that the latter has a second `NVIDIA_VISIBLE_DEVICES`.
#[test]
fn case_20_a_gpu_of_a_cdi_spec_comes_into_the_container() {
    let config = r#"{"ociVersion":"1.2.0","process":{"user":{"uid":0,"gid":0},"env":["PATH=/usr/bin","NVIDIA_VISIBLE_DEVICES=0"],"cwd":"/"}}"#;
    let edit = json!({
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": "/dev/null"}],
        "mounts": [{"hostPath": "/etc/hosts", "containerPath": "/usr/lib/x/libcuda.so.1", "options": ["ro", "nosuid", "nodev", "bind"]}],
        "hooks": [{"hookName": "createContainer", "path": "/usr/bin/h", "args": ["h", "update"]}],
    });
    insta::assert_snapshot!(after(config, edit), @r#"{"ociVersion":"1.2.0","process":{"user":{"uid":0,"gid":0},"env":["PATH=/usr/bin","NVIDIA_VISIBLE_DEVICES=void"],"cwd":"/"},"linux":{"devices":[{"path":"/dev/null","type":"c","major":1,"minor":3,"fileMode":438}],"resources":{"devices":[{"allow":true,"type":"c","major":1,"minor":3,"access":"rwm"}]}},"mounts":[{"destination":"/usr/lib/x/libcuda.so.1","source":"/etc/hosts","options":["ro","nosuid","nodev","bind"]}],"hooks":{"createContainer":[{"path":"/usr/bin/h","args":["h","update"]}]}}"#);
}

/// A spec of NVIDIA's tool has the number that the module had when the spec was made.
#[test]
fn the_major_number_of_a_node_is_that_of_the_machine() {
    for (path, major, minor, is) in [
        ("/dev/nvidiactl", 194, 255, (195, 255)),
        ("/dev/nvidia0", 195, 3, (195, 3)),
        ("/dev/gone", 510, 1, (510, 1)),
    ] {
        let edit = json!({"deviceNodes": [{"path": path, "type": "c", "major": major, "minor": minor}]});
        let text: Value = serde_json::from_str(&after("{}", edit)).expect("JSON");
        let device = &text["linux"]["devices"][0];
        assert_eq!((&device["major"], &device["minor"]), (&json!(is.0), &json!(is.1)), "{path}");
    }
}

#[test]
fn case_24_what_is_not_edited_stays_as_it_was_to_the_byte() {
    let config =
        "{ \"newField\" : 1.50e+2 , \"process\":{\"env\":[\"FOO\",\"A=1\"], \"odd\":\"\\u0041\"},\n\"x\":{\"b\":1, \"a\":2} }";
    let text = after(config, json!({"env": ["B=2"]}));
    assert_eq!(
        text,
        "{\"newField\":1.50e+2,\"process\":{\"env\":[\"FOO\",\"A=1\",\"B=2\"],\"odd\":\"\\u0041\"},\"x\":{\"b\":1, \"a\":2}}"
    );
}

#[test]
fn case_31_each_edit_goes_where_the_specification_has_it() {
    let config = r#"{"process":{"user":{"uid":1000,"gid":1001,"additionalGids":[5]},"env":["A=1","B=2","A=3"]},"mounts":[{"destination":"/a/b","source":"x"},{"destination":"/proc","source":"proc"},{"destination":"/a","source":"y"}],"linux":{"devices":[{"path":"/dev/gpu","major":9}],"resources":{"devices":[{"allow":false}],"memory":{"limit":18446744073709551615}}},"hooks":{"createContainer":[{"path":"/one"}]}}"#;
    let edit = json!({
        "env": ["A=4", "C=5"],
        "deviceNodes": [
            {"path": "/dev/gpu", "hostPath": "/dev/nvidia0", "permissions": "none"},
            {"path": "/dev/pipe", "type": "p", "uid": 7},
            {"path": "/dev/given", "type": "c", "major": 240, "minor": 3, "fileMode": 384, "permissions": "rw"},
        ],
        "mounts": [{"hostPath": "/h", "containerPath": "/a/b", "type": "tmpfs"}, {"hostPath": "/h2", "containerPath": "/z"}],
        "hooks": [{"hookName": "createContainer", "path": "/two", "env": ["X=1"], "timeout": 3}, {"hookName": "poststop", "path": "/three"}],
        "additionalGids": [0, 44, 5],
        "intelRdt": {"closID": "c"},
        "netDevices": [{"hostInterfaceName": "eth5", "name": "eth0"}],
    });
    let text = after(config, edit);
    let value: Value = serde_json::from_str(&text).expect("JSON");
    insta::assert_snapshot!(serde_json::to_string_pretty(&value).expect("text"));
}

#[test]
fn case_30_b_a_node_without_permissions_cannot_be_used() {
    let edit = json!({"deviceNodes": [{"path": "/dev/nvidia0", "permissions": "none"}, {"path": "/dev/nvidiactl"}]});
    let text = after(r#"{"process":{"user":{"uid":1000,"gid":5}}}"#, edit);
    let value: Value = serde_json::from_str(&text).expect("JSON");
    let access: Vec<&Value> = value["linux"]["resources"]["devices"]
        .as_array()
        .expect("rules")
        .iter()
        .map(|rule| &rule["access"])
        .collect();
    assert_eq!(access, ["", "rwm"]);
    let owners: Vec<&Value> = value["linux"]["devices"]
        .as_array()
        .expect("nodes")
        .iter()
        .map(|node| &node["uid"])
        .collect();
    assert_eq!(owners, [1000, 1000], "case 31: nodes belong to the process");
}

#[test]
fn a_device_that_is_not_there_is_an_error_that_names_it() {
    for (node, part) in [
        (json!({"path": "/dev/nvidia7"}), "device node /dev/nvidia7: no such file"),
        (
            json!({"path": "/dev/x", "hostPath": "/dev/y"}),
            "device node /dev/y: no such file",
        ),
        (
            json!({"path": "/dev/null", "type": "b"}),
            "has type \"b\", but the node has 'c'",
        ),
    ] {
        let mut bundle = Bundle::parse("{}").expect("a configuration");
        let error = bundle.apply(&edits(json!({"deviceNodes": [node]})), look).expect_err(part);
        assert!(
            matches!(error, BundleError::Device { .. }) && error.to_string().contains(part),
            "{error}"
        );
    }
    for (config, part) in [
        ("[]", "the file"),
        ("{\"process\":{\"env\":3}}", "process"),
        ("{\"mounts\":{}}", "mounts"),
    ] {
        let error = Bundle::parse(config)
            .and_then(|bundle| bundle.container())
            .expect_err(config)
            .to_string();
        assert!(error.starts_with("config.json: ") && error.contains(part), "{error}");
    }
}

#[test]
fn case_25_hooks_of_the_legacy_runtime_go_and_others_stay() {
    let config = r#"{"hooks":{"prestart":[{"path":"/usr/bin/nvidia-container-runtime-hook","args":["x"]},{"path":"/bin/other"},{"path":"/opt/nvidia-container-toolkit"}],"poststop":[]}}"#;
    let mut bundle = Bundle::parse(config).expect("a configuration");
    assert!(bundle.remove_legacy_hooks().expect("read"));
    assert_eq!(
        bundle.text(),
        r#"{"hooks":{"prestart":[{"path":"/bin/other"}],"poststop":[]}}"#
    );
    assert!(!bundle.remove_legacy_hooks().expect("read"), "nothing is left to go");
}

#[test]
fn who_asked_is_seen_by_the_hook_that_docker_puts_there() {
    let hook = |name: &str| json!({"hooks": {"prestart": [{"path": "/bin/other"}, {"path": format!("/usr/bin/{name}")}]}});
    let mut of_a_pod = hook("nvidia-container-runtime-hook");
    of_a_pod["annotations"] = json!({"io.kubernetes.cri-o.Name": "x"});
    let mut of_podman = hook("nvidia-container-toolkit");
    of_podman["annotations"] = json!({"io.container.manager": "libpod"});
    let mut annotated = hook("nvidia-container-toolkit");
    annotated["annotations"] = json!({"com.example": "x"});
    for (config, expected) in [
        (hook("nvidia-container-runtime-hook"), true),
        (annotated, true),
        (hook("divvy-hook"), false),
        (json!({}), false),
        (of_a_pod, false),
        (of_podman, false),
    ] {
        let bundle = Bundle::parse(&config.to_string()).expect("an object");
        assert_eq!(bundle.container().expect("read").by_engine, expected, "{config}");
    }
}

#[test]
fn a_container_is_read_for_what_it_asks() {
    let config = r#"{"process":{"env":["A=1"],"capabilities":{"bounding":["CAP_CHOWN","CAP_SYS_ADMIN"]}},"annotations":{"k":"v"},"mounts":[{"destination":"/d","source":"/s","type":"bind"}]}"#;
    let container = Bundle::parse(config).and_then(|bundle| bundle.container()).expect("read");
    assert_eq!(container.env, ["A=1"]);
    assert_eq!(container.mounts, [("/s".to_owned(), "/d".to_owned())]);
    assert_eq!(container.annotations.get("k").map(String::as_str), Some("v"));
    assert!(container.privileged);
    let empty = Bundle::parse(r#"{"process":null,"mounts":null}"#)
        .and_then(|bundle| bundle.container())
        .expect("read");
    assert!(empty.env.is_empty() && !empty.privileged);
    for (config, expected) in [
        (r#"{"root":{"path":"rootfs","readonly":true}}"#, Some("rootfs")),
        (r#"{"root":{"path":""}}"#, None),
        (r#"{"root":null}"#, None),
        (r#"{"root":{"path":1}}"#, None),
    ] {
        let root = Bundle::parse(config).and_then(|bundle| bundle.root());
        assert_eq!(root.ok().as_deref(), expected, "{config}");
    }
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from)
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-zA-Z]{1,6}", inner, 0..4).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// All other parts of the configuration stay the same, and applying the edits a second time changes nothing.
    #[test]
    fn the_output_differs_only_in_what_may_be_touched(
        others in prop::collection::btree_map("x[a-z]{0,5}", json_value(), 0..5),
        env in prop::collection::vec("[A-C](=[a-z]{0,3})?", 0..5),
        paths in prop::collection::vec("(/[a-c]){1,3}", 0..5),
        hooks in prop::collection::vec(prop_oneof!["[a-c]{1,3}", Just("nvidia-container-runtime-hook".to_owned())], 0..5),
    ) {
        let mut config = json!({
            "process": {"env": env, "args": ["a"], "user": {"uid": 0}},
            "mounts": paths.iter().map(|path| json!({"destination": path, "source": "s"})).collect::<Vec<_>>(),
            "linux": {"namespaces": [{"type": "pid"}], "resources": {"cpu": {"shares": 2}}},
            "hooks": {
                "prestart": hooks.iter().map(|name| json!({"path": format!("/usr/bin/{name}"), "timeout": 1.5e0})).collect::<Vec<_>>(),
                "poststop": [{"path": "/usr/bin/nvidia-container-runtime-hook"}],
            },
        });
        for (key, value) in &others {
            config[key] = value.clone();
            config["process"][key] = value.clone();
            config["linux"][key] = value.clone();
        }
        let edit = json!({
            "env": ["A=new"],
            "deviceNodes": [{"path": "/dev/nvidia0"}],
            "mounts": [{"hostPath": "/h", "containerPath": "/a/b"}],
            // These edits come from specs that are generated at container start, and from mode legacy.
            "additionalGids": [44],
            "hooks": [{"hookName": "prestart", "path": "/divvy-hook"}],
        });
        let mut bundle = Bundle::parse(&config.to_string()).expect("a configuration");
        bundle.remove_legacy_hooks().expect("read");
        bundle.apply(&edits(edit.clone()), look).expect("it fits");
        let once = bundle.text();
        let found: Value = serde_json::from_str(&once).expect("JSON");
        for part in ["process", "linux"] {
            let mut found = found[part].clone();
            let mut before = config[part].clone();
            for value in [&mut found, &mut before] {
                let object = value.as_object_mut().expect("an object");
                object.remove("env");
                object.remove("devices");
                object.remove("user");
                if let Some(resources) = object.get_mut("resources").and_then(Value::as_object_mut) {
                    resources.remove("devices");
                }
            }
            prop_assert_eq!(found, before);
        }
        for (key, value) in &others {
            prop_assert_eq!(&found[key], value);
        }
        prop_assert_eq!(&found["process"]["user"], &json!({"uid": 0, "additionalGids": [44]}));
        let of_others = hooks.iter().filter(|name| !name.starts_with("nvidia")).map(|name| json!({"path": format!("/usr/bin/{name}"), "timeout": 1.5}));
        let expected: Vec<Value> = of_others.chain([json!({"path": "/divvy-hook"})]).collect();
        prop_assert_eq!(&found["hooks"]["prestart"], &json!(expected));
        prop_assert_eq!(&found["hooks"]["poststop"], &config["hooks"]["poststop"]);
        let kept = |value: &Value| {
            let all = value["process"]["env"].as_array().cloned().unwrap_or_default();
            all.into_iter().filter(|entry| entry.as_str().is_some_and(|entry| !entry.starts_with("A="))).collect::<Vec<_>>()
        };
        prop_assert_eq!(kept(&found), kept(&config));
        let ours = found["process"]["env"].as_array().into_iter().flatten().filter(|entry| entry.as_str().is_some_and(|entry| entry.starts_with("A=")));
        prop_assert_eq!(ours.count(), 1);
        let twice: Value = serde_json::from_str(&after(&once, edit)).expect("JSON");
        for part in ["mounts", "process"] {
            prop_assert_eq!(&twice[part], &found[part]);
        }
        prop_assert_eq!(&twice["linux"]["devices"], &found["linux"]["devices"]);
    }
}
