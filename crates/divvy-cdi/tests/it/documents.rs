//! Parsing and validating specs of other tools: which ones are accepted, which ones are rejected, and the messages.

use divvy_cdi::{CdiVersion, ProblemSeverity, Spec, SpecFormat};

/// A minimal valid spec.
const MINIMAL: &str = r#"{"cdiVersion":"0.3.0","kind":"vendor.com/device","devices":[{"name":"myDevice","containerEdits":{"deviceNodes":[{"path":"/dev/card1"}]}}]}"#;

fn errors(text: &str) -> Vec<String> {
    match Spec::parse(text) {
        Err(error) => vec![error.to_string()],
        Ok(spec) => problems(&spec, ProblemSeverity::Error),
    }
}

fn problems(spec: &Spec, severity: ProblemSeverity) -> Vec<String> {
    let problems = spec.problems().into_iter().filter(|problem| problem.severity == severity);
    problems.map(|problem| problem.to_string()).collect()
}

/// A spec of the newest version whose device has these edits.
fn with_edits(edits: &str) -> String {
    format!(r#"{{"cdiVersion":"1.1.0","kind":"vendor.com/device","devices":[{{"name":"a","containerEdits":{edits}}}]}}"#)
}

fn with(version: &str, kind: &str, devices: &str, more: &str) -> String {
    format!(r#"{{"cdiVersion":"{version}","kind":"{kind}","devices":{devices}{more}}}"#)
}

const DEVICE: &str = r#"[{"name":"a","containerEdits":{"env":["A=1"]}}]"#;

#[test]
fn a_document_with_every_field_is_taken_and_kept() {
    let text = r#"
cdiVersion: 1.1.0
kind: vendor.com/net.class
annotations: {a.b/c: "1"}
devices:
  - name: 0
    annotations: {k: v}
    containerEdits:
      env: [A=1, "B="]
      deviceNodes:
        - {path: /dev/x, hostPath: /dev/y, type: c, major: 10, minor: 229, fileMode: 0666, permissions: rwm, uid: 1, gid: 2}
        - {path: /dev/z, permissions: none}
      netDevices: [{hostInterfaceName: eth1, name: eth0}]
      hooks: [{hookName: prestart, path: /bin/a, args: [a, b], env: [C=d], timeout: 5}]
      mounts: [{hostPath: /a, containerPath: /b, type: tmpfs, options: [ro]}]
      intelRdt: {closID: /, l3CacheSchema: l, memBwSchema: m, schemata: [s], enableMonitoring: true}
      additionalGids: [44]
containerEdits:
"#;
    let spec = Spec::parse(text).expect("a document");
    assert_eq!(spec.problems(), []);
    assert_eq!(spec.devices[0].name, "0", "a number is taken for a name");
    let edits = &spec.devices[0].container_edits;
    assert_eq!(
        edits.device_nodes[0].file_mode,
        Some(0o666),
        "a leading 0 means octal, as for the standard's reader"
    );
    assert_eq!(CdiVersion::least_for(&spec), CdiVersion::V1_1_0);
    for format in [SpecFormat::Json, SpecFormat::Yaml] {
        assert_eq!(Spec::parse(&spec.print(format)).expect("own text"), spec);
    }
}

#[test]
fn good_documents_are_taken() {
    for text in [
        MINIMAL.to_owned(),
        MINIMAL.replace("0.3.0", "v0.3.0"),
        with("0.5.0", "v/c", r#"[{"name":"0:1","containerEdits":{"env":["A=1"]}}]"#, ""),
        with("0.3.0", "V_1-x.y/c_1-x", DEVICE, r#","containerEdits":{}"#),
        with("0.3.0", "v/c", DEVICE, r#","annotations":null,"containerEdits":null"#),
        with(
            "0.3.0",
            "v/c",
            r#"[{"name":"a","containerEdits":{"env":["A=1"],"mounts":null,"hooks":null}}]"#,
            "",
        ),
        with_edits(r#"{"netDevices":[{"hostInterfaceName":"a","name":"b"},{"hostInterfaceName":"b","name":"a"}]}"#),
        with_edits(r#"{"intelRdt":{"closID":"x"}}"#),
        with_edits(r#"{"intelRdt":{}}"#),
        with("0.6.0", "v/c", DEVICE, r#","annotations":{"a":null,"b":1}"#),
        with_edits(r#"{"deviceNodes":[{"path":"/dev/a","hostPath":null,"major":null,"minor":null,"fileMode":null,"uid":null}]}"#),
        with_edits(r#"{"additionalGids":[0]}"#),
        with_edits(r#"{"deviceNodes":[{"path":"/dev/a","permissions":""}]}"#),
    ] {
        assert_eq!(errors(&text), [""; 0], "{text}");
    }
}

#[test]
fn case_30_a_bad_documents_are_refused_with_field_and_rule() {
    let node = |fields: &str| with_edits(&format!(r#"{{"deviceNodes":[{{"path":"/dev/a"{fields}}}]}}"#));
    let hook = |fields: &str| with_edits(&format!(r#"{{"hooks":[{{{fields}}}]}}"#));
    let net = |devices: &str| with_edits(&format!(r#"{{"netDevices":[{devices}]}}"#));
    let cases: Vec<(String, String)> = [
        ("{}".to_owned(), "missing field `kind`"),
        (String::new(), "not a CDI spec"),
        (with("0.3.0", "v/c", "[]", ""), "devices: it is empty"),
        (with("1.2.0", "v/c", DEVICE, ""), r#"cdiVersion: invalid version "1.2.0""#),
        (with("", "v/c", DEVICE, ""), r#"cdiVersion: invalid version """#),
        (with("0.2.0", "v/c", DEVICE, ""), "cdiVersion: the spec version must be at least v0.3.0"),
        (
            with("0.3.0", "v/c", r#"[{"name":"0","containerEdits":{"env":["A=1"]}}]"#, ""),
            "cdiVersion: the spec version must be at least v0.5.0, and it is 0.3.0: devices[0].name has a device name that begins with a digit",
        ),
        (with("0.5.0", "v/c.d", DEVICE, ""), "at least v0.6.0, and it is 0.5.0: kind"),
        (with("0.5.0", "v/c", DEVICE, r#","annotations":{"a":"b"}"#), "at least v0.6.0"),
        (with("0.6.0", "v/c", DEVICE, r#","containerEdits":{"additionalGids":[1]}"#), "at least v0.7.0"),
        (with("1.0.0", "v/c", DEVICE, r#","containerEdits":{"netDevices":[{"hostInterfaceName":"a","name":"b"}]}"#), "at least v1.1.0"),
        (with("0.3.0", "vendor", DEVICE, ""), "kind: \"vendor\" is not a kind"),
        (with("0.3.0", "1v/c", DEVICE, ""), "kind: \"1v\" is not the vendor"),
        (with("0.3.0", "v/c/d", DEVICE, ""), "kind: \"c/d\" is not the class"),
        (with("0.3.0", "v/c-", DEVICE, ""), "kind: \"c-\" is not the class"),
        (with("0.3.0", "v/c", r#"[{"name":"a b","containerEdits":{"env":["A=1"]}}]"#, ""), "devices[0].name: \"a b\" is not the device"),
        (with("0.3.0", "v/c", r#"[{"containerEdits":{"env":["A=1"]}}]"#, ""), "devices[0].name: \"\" is not the device"),
        (with("0.3.0", "v/c", &format!("{},{}", DEVICE.trim_end_matches(']'), DEVICE.trim_start_matches('[')), ""), "devices[1].name: two devices have the name"),
        (with("0.3.0", "v/c", r#"[{"name":"a"}]"#, ""), "devices[0].containerEdits: it is empty"),
        (with("0.3.0", "v/c", DEVICE, r#","surprise":1"#), "surprise: CDI up to 1.1.0"),
        (with_edits(r#"{"env":["A=1"],"surprise":1}"#), "devices[0].containerEdits.surprise: CDI up to 1.1.0"),
        (with_edits(r#"{"env":["A=1","=x"]}"#), "devices[0].containerEdits.env[1]: \"=x\" is not a variable"),
        (with_edits(r#"{"env":["A"]}"#), "env[0]: \"A\" is not a variable"),
        (with_edits(r#"{"deviceNodes":[{}]}"#), "deviceNodes[0].path: it is empty"),
        (node(r#","type":"x""#), "deviceNodes[0].type: \"x\" is not b, c, u or p"),
        (node(r#","permissions":"rwx""#), "deviceNodes[0].permissions: \"rwx\""),
        (node(r#","mode":438"#), "deviceNodes[0].mode: CDI up to 1.1.0"),
        (node(r#","minor":"0""#), "expected a number in the valid range"),
        (node(r#","uid":-1"#), "expected a number in the valid range"),
        (with_edits(r#"{"deviceNodes":[null]}"#), "deviceNodes[0].path: it is empty"),
        (hook(r#""hookName":"createcontainer","path":"/a""#), "hooks[0].hookName: \"createcontainer\" is not one of"),
        (hook(r#""hookName":"poststop""#), "hooks[0].path: it is empty"),
        (hook(r#""hookName":"poststop","path":"/a","env":["x"]"#), "hooks[0].env[0]"),
        (with_edits(r#"{"mounts":[{"hostPath":"/a"}]}"#), "mounts[0].containerPath: it is empty"),
        (with_edits(r#"{"mounts":[{"containerPath":"/a"}]}"#), "mounts[0].hostPath: it is empty"),
        (net(r#"{"name":"a"}"#), "netDevices[0].hostInterfaceName: it is empty"),
        (net(r#"{"hostInterfaceName":"a","name":"b"},{"hostInterfaceName":"a","name":"c"}"#), "netDevices[1].hostInterfaceName: \"a\" appears twice"),
        (net(r#"{"hostInterfaceName":"a","name":"b"},{"hostInterfaceName":"c","name":"b"}"#), "netDevices[1].name: \"b\" appears twice"),
        (with_edits(r#"{"intelRdt":{"closID":".."}}"#), "intelRdt.closID"),
        (with_edits(r#"{"intelRdt":{"enableCMT":true}}"#), "intelRdt.enableCMT: CDI up to 1.1.0"),
    ]
    .into_iter()
    .map(|(text, part)| (text, part.to_owned()))
    .collect();
    for (text, part) in cases {
        let errors = errors(&text);
        assert!(
            errors.iter().any(|error| error.contains(&part)),
            "{text}\nwanted {part}\nfound {errors:?}"
        );
    }
}

#[test]
fn a_tolerated_violation_is_only_a_warning() {
    let long = "c".repeat(64);
    for (text, part) in [
        (with("0.3.0", &format!("v/{long}"), DEVICE, ""), "kind: a vendor has at most"),
        (
            with("0.6.0", "v/c", DEVICE, r#","annotations":{"a b":"c"}"#),
            "annotations[\"a b\"]: a key must follow Kubernetes",
        ),
        (
            with_edits(r#"{"deviceNodes":[{"path":"dev/a"}]}"#),
            "deviceNodes[0].path: \"dev/a\" is not an absolute path",
        ),
        (
            with_edits(r#"{"hooks":[{"hookName":"prestart","path":"/a","timeout":0}]}"#),
            "hooks[0].timeout",
        ),
        (
            with_edits(r#"{"mounts":[{"hostPath":"/a","containerPath":"/x"},{"hostPath":"/b","containerPath":"/x"}]}"#),
            "mounts[1].containerPath: an earlier mount",
        ),
    ] {
        assert_eq!(errors(&text), [""; 0], "{text}");
        let warnings = problems(&Spec::parse(&text).expect("readable"), ProblemSeverity::Warning);
        assert!(warnings.iter().any(|warning| warning.contains(part)), "{text}: {warnings:?}");
    }
}

#[test]
fn unknown_fields_are_kept_wherever_they_are() {
    let text = r#"{"cdiVersion":"0.5.0","kind":"v/c","devices":[{"name":"a","containerEdits":{"deviceNodes":[{"path":"/d","x":1}],"y":[2]},"z":null}],"w":{"v":3}}"#;
    let spec = Spec::parse(text).expect("a document");
    let again: serde_json::Value = serde_json::from_str(&spec.print(SpecFormat::Json)).expect("JSON");
    let before: serde_json::Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(again, before);
}

#[test]
fn case_28_a_each_feature_needs_its_version_and_no_newer_one() {
    for (edits, version) in [
        (r#"{"deviceNodes":[{"path":"/dev/a"}]}"#, "0.3.0"),
        (r#"{"mounts":[{"hostPath":"/a","containerPath":"/b"}]}"#, "0.3.0"),
        (
            r#"{"mounts":[{"hostPath":"/a","containerPath":"/b","type":"bind"}]}"#,
            "0.4.0",
        ),
        (
            r#"{"mounts":[{"hostPath":"/a","containerPath":"/b","type":""}],"env":["A=1"]}"#,
            "0.3.0",
        ),
        (r#"{"deviceNodes":[{"path":"/dev/a","hostPath":"/b"}]}"#, "0.5.0"),
        (r#"{"additionalGids":[44]}"#, "0.7.0"),
        (r#"{"intelRdt":{"closID":"a"}}"#, "0.7.0"),
        (r#"{"intelRdt":{"enableMonitoring":false}}"#, "0.7.0"),
        (r#"{"intelRdt":{"enableMonitoring":true}}"#, "1.1.0"),
        (r#"{"intelRdt":{"schemata":[]}}"#, "1.1.0"),
        (r#"{"netDevices":[{"hostInterfaceName":"a","name":"b"}]}"#, "1.1.0"),
    ] {
        for place in ["device", "spec"] {
            let text = match place {
                "device" => with_edits(edits),
                _ => with("1.1.0", "v/c", DEVICE, &format!(r#","containerEdits":{edits}"#)),
            };
            let mut spec = Spec::parse(&text).expect("a document");
            assert_eq!(CdiVersion::least_for(&spec).as_str(), version, "{edits} of the {place}");
            for other in CdiVersion::ALL {
                spec.cdi_version = other.to_string();
                assert_eq!(
                    spec.is_valid(),
                    other.as_str() >= version,
                    "{edits} of the {place} in {other}"
                );
            }
        }
    }
}

#[test]
fn case_28_b_the_name_of_a_device_decides_about_the_version_too() {
    let device = |name: &str, node: &str| {
        let text = with(
            "1.1.0",
            "nvidia.com/gpu",
            &format!(r#"[{{"name":"{name}","containerEdits":{{"deviceNodes":[{{"path":"/dev/nvidia0"{node}}}]}}}}]"#),
            "",
        );
        CdiVersion::least_for(&Spec::parse(&text).expect("a document")).to_string()
    };
    assert_eq!(device("GPU-edfee158", ""), "0.3.0");
    assert_eq!(device("GPU-edfee158", r#","hostPath":"/driver/dev/nvidia0""#), "0.5.0");
    assert_eq!(device("0", ""), "0.5.0");
}

/// Names in a file may have terminal escapes, and the user who reads the messages is often root.
#[test]
fn what_is_said_of_a_spec_moves_no_cursor() {
    let text = r#"{"cdiVersion":"0.5.0\u001b[2J","kind":"a.com/b","\u001b]0;x\u0007\n":1,"devices":[{"name":"\u202e0","containerEdits":{"env":["\u009bA"]}}]}"#;
    let spec = Spec::parse(text).expect("JSON");
    let problems = spec.problems();
    assert!(problems.len() >= 3, "{problems:?}");
    for problem in problems {
        let said = problem.to_string();
        assert!(!said.chars().any(|c| c.is_control() || c == '\u{202e}'), "{said:?}");
    }
}
