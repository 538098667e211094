//! Moving the paths of a spec to another driver root.

use divvy_cdi::Spec;
use divvy_cdi::moved::{MovedSide, move_root};
use serde_json::{Value, json};

fn spec() -> Value {
    json!({
        "cdiVersion": "0.3.0", "kind": "v.com/gpu",
        "devices": [{"name": "a", "containerEdits": {"deviceNodes": [{"path": "/driver/dev/nvidia0"}, {"path": "/dev/x"}]}}],
        "containerEdits": {
            "mounts": [
                {"hostPath": "/driver/lib/a.so", "containerPath": "/driver/lib/a.so"},
                {"hostPath": "/driver-x/lib/a.so", "containerPath": "/lib/b.so"},
            ],
            "hooks": [
                {"hookName": "createContainer", "path": "/driver/bin/hook", "args": ["/driver/bin/hook", "--folder=/driver/lib"]},
                {"hookName": "startContainer", "path": "/driver/bin/inside"},
            ],
        },
    })
}

fn moved(from: &str, to: &str, side: MovedSide) -> (Value, usize) {
    let mut spec = Spec::parse(&spec().to_string()).expect("a spec");
    let changed = move_root(&mut spec, from, to, side);
    assert!(spec.is_valid(), "{:?}", spec.problems());
    (serde_json::to_value(&spec).expect("JSON"), changed)
}

/// The arguments of hooks stay as they are.
#[test]
fn case_32_a_host_paths_move_by_whole_components() {
    let mut expected = spec();
    expected["cdiVersion"] = json!("0.5.0");
    expected["devices"][0]["containerEdits"]["deviceNodes"][0] =
        json!({"path": "/driver/dev/nvidia0", "hostPath": "/dev/nvidia0"});
    expected["containerEdits"]["mounts"][0]["hostPath"] = json!("/lib/a.so");
    expected["containerEdits"]["hooks"][0]["path"] = json!("/bin/hook");
    for from in ["/driver", "/driver/"] {
        assert_eq!(moved(from, "/", MovedSide::Host), (expected.clone(), 3), "{from}");
    }
    assert_eq!(moved("/elsewhere", "/", MovedSide::Host), (spec(), 0));
    assert_eq!(moved("/driver", "/driver", MovedSide::Host), (spec(), 0));
    let (below, _) = moved("/", "/run/nvidia/driver", MovedSide::Host);
    assert_eq!(
        below["containerEdits"]["mounts"][1]["hostPath"],
        "/run/nvidia/driver/driver-x/lib/a.so"
    );
}

#[test]
fn what_is_moved_there_and_back_is_what_it_was() {
    let mut original = spec();
    // A host path needs this version, so moving the spec would raise a lower one.
    original["cdiVersion"] = json!("0.5.0");
    for side in [MovedSide::Host, MovedSide::Container] {
        let mut there = Spec::parse(&original.to_string()).expect("a spec");
        assert!(move_root(&mut there, "/driver", "/run/nvidia/driver", side) > 0);
        let text = serde_json::to_string(&there).expect("JSON");
        assert!(
            text.contains("\"hostPath\":\"/driver/dev/nvidia0\"") || side == MovedSide::Host,
            "{text}"
        );
        let mut back = Spec::parse(&text).expect("a spec");
        move_root(&mut back, "/run/nvidia/driver", "/driver", side);
        assert_eq!(serde_json::to_value(&back).expect("JSON"), original, "{side:?}");
    }
}

/// A redundant `hostPath` in the original spec stays if the path does not move.
#[test]
fn a_redundant_host_path_stays_if_nothing_moves() {
    let mut original = spec();
    original["cdiVersion"] = json!("0.5.0");
    original["devices"][0]["containerEdits"]["deviceNodes"][1] = json!({"path": "/dev/x", "hostPath": "/dev/x"});
    for side in [MovedSide::Host, MovedSide::Container] {
        let mut moved = Spec::parse(&original.to_string()).expect("a spec");
        move_root(&mut moved, "/elsewhere", "/y", side);
        assert_eq!(serde_json::to_value(&moved).expect("JSON"), original, "{side:?}");
    }
}

#[test]
fn case_32_b_the_containers_paths_move_without_the_machines() {
    let mut expected = spec();
    expected["cdiVersion"] = json!("0.5.0");
    expected["devices"][0]["containerEdits"]["deviceNodes"][0] =
        json!({"path": "/dev/nvidia0", "hostPath": "/driver/dev/nvidia0"});
    expected["containerEdits"]["mounts"][0]["containerPath"] = json!("/lib/a.so");
    expected["containerEdits"]["hooks"][0]["args"][1] = json!("--folder=/lib");
    expected["containerEdits"]["hooks"][1]["path"] = json!("/bin/inside");
    assert_eq!(moved("/driver", "/", MovedSide::Container), (expected, 4));
}

/// Otherwise update-ldcache would search directories that no longer exist, and links would be dangling.
#[test]
fn what_hooks_are_told_of_the_container_moves_with_it() {
    let args = json!([
        "/driver/h",
        "--folder",
        "/driver/lib",
        "--link",
        "/driver/a::/driver/b",
        "a.so.1::/driver/a.so",
        "--folder=/driver-x/lib",
        "x=/driver"
    ]);
    let spec = |stage: &str, args: &Value| {
        let hook = json!({"hookName": stage, "path": "/h", "args": args});
        json!({"cdiVersion": "0.5.0", "kind": "v.com/gpu", "devices": [{"name": "a", "containerEdits": {"hooks": [hook]}}]})
    };
    let new = json!([
        "/driver/h",
        "--folder",
        "/x/lib",
        "--link",
        "/x/a::/x/b",
        "a.so.1::/x/a.so",
        "--folder=/driver-x/lib",
        "x=/driver"
    ]);
    for (stage, side, expected) in [
        ("createContainer", MovedSide::Container, &new),
        ("startContainer", MovedSide::Container, &new),
        ("prestart", MovedSide::Container, &args),
        ("createContainer", MovedSide::Host, &args),
    ] {
        let mut moved = Spec::parse(&spec(stage, &args).to_string()).expect("a spec");
        move_root(&mut moved, "/driver", "/x", side);
        assert_eq!(serde_json::to_value(&moved).expect("JSON"), spec(stage, expected), "{stage}");
    }
}
