//! Registries with several files: priorities, conflicts, and the order of edits.

use divvy_cdi::{FoundSpec, Registry, Spec, SpecError, Unresolved, is_spec_file};

/// A file in which the spec and each device set a variable to the file's name.
fn file(path: &str, priority: usize, devices: &[&str]) -> FoundSpec {
    let devices: Vec<String> = devices
        .iter()
        .map(|name| format!(r#"{{"name":"{name}","containerEdits":{{"env":["{name}={path}"]}}}}"#))
        .collect();
    let text = format!(
        r#"{{"cdiVersion":"0.5.0","kind":"v/c","devices":[{}],"containerEdits":{{"env":["SPEC={path}"]}}}}"#,
        devices.join(",")
    );
    FoundSpec {
        path: path.to_owned(),
        priority,
        spec: Ok(Spec::parse(&text).expect("a spec")),
    }
}

fn env(registry: &Registry, devices: &[&str]) -> Result<Vec<String>, Unresolved> {
    let edits = registry.edits(devices)?;
    Ok(edits.into_iter().flat_map(|edits| edits.env.clone()).collect())
}

/// The edits of a spec itself come once, before those of its first device.
#[test]
fn edits_come_in_the_order_of_the_request() {
    let registry = Registry::new(vec![file("/b", 0, &["x"]), file("/a", 0, &["y", "z"])]);
    assert_eq!(
        env(&registry, &["v/c=z", "v/c=x", "v/c=y"]),
        Ok(["SPEC=/a", "z=/a", "SPEC=/b", "x=/b", "y=/a"].map(str::to_owned).to_vec())
    );
}

#[test]
fn what_is_not_there_is_named_and_nothing_is_injected() {
    let registry = Registry::new(vec![file("/a", 0, &["x"])]);
    let error = env(&registry, &["v/c=x", "v/c=7", "w/c=x"]).expect_err("two are not there");
    assert_eq!(error.to_string(), "unresolvable CDI devices v/c=7, w/c=x");
}

#[test]
fn case_29_b_the_directory_of_the_higher_priority_wins() {
    let registry = Registry::new(vec![file("/var/run/cdi/x", 1, &["a"]), file("/etc/cdi/x", 0, &["a", "b"])]);
    assert_eq!(
        env(&registry, &["v/c=a"]),
        Ok(["SPEC=/var/run/cdi/x", "a=/var/run/cdi/x"].map(str::to_owned).to_vec())
    );
    let devices = registry.devices();
    let hidden: Vec<_> = devices
        .iter()
        .map(|device| (device.file.path.as_str(), device.hidden_by))
        .collect();
    assert_eq!(
        hidden,
        [
            ("/etc/cdi/x", Some("/var/run/cdi/x")),
            ("/var/run/cdi/x", None),
            ("/etc/cdi/x", None)
        ]
    );
}

/// The files are in one directory, and both are named.
#[test]
fn case_29_a_a_device_in_two_files_is_nobodys() {
    for higher in [None, Some(file("/var/run/cdi/c.yaml", 1, &["a"]))] {
        let mut files = vec![file("/etc/cdi/a.yaml", 0, &["a"]), file("/etc/cdi/b.yaml", 0, &["a", "b"])];
        files.extend(higher);
        let registry = Registry::new(files);
        assert!(env(&registry, &["v/c=a"]).is_err());
        assert!(env(&registry, &["v/c=b"]).is_ok(), "the rest of the file is usable");
        let devices = registry.devices();
        assert_eq!(devices[0].conflicts_with, ["/etc/cdi/b.yaml"]);
        assert_eq!(devices[1].conflicts_with, ["/etc/cdi/a.yaml"]);
    }
}

#[test]
fn a_file_with_an_error_has_no_devices_and_says_why() {
    let mut broken = file("/etc/cdi/a.yaml", 0, &["a", "b"]);
    broken.spec.as_mut().expect("a spec").cdi_version = "0.9.9".to_owned();
    let unreadable = FoundSpec {
        path: "/etc/cdi/b.yaml".to_owned(),
        priority: 0,
        spec: Err(SpecError::NoText("not text".to_owned())),
    };
    let registry = Registry::new(vec![broken, unreadable, file("/etc/cdi/c.yaml", 0, &["a"])]);
    assert!(env(&registry, &["v/c=a"]).is_ok(), "the broken file makes no conflict");
    let said: Vec<String> = registry.files()[..2]
        .iter()
        .map(|file| file.problems()[0].to_string())
        .collect();
    assert!(said[0].contains("invalid version") && said[1] == "file: not text", "{said:?}");
}

#[test]
fn case_29_c_only_two_endings_are_read() {
    for (name, read) in [
        ("a.json", true),
        ("a.yaml", true),
        ("a.yml", false),
        ("json", false),
        ("a.json.tmp", false),
        (".json", true),
        ("a.JSON", false),
    ] {
        assert_eq!(is_spec_file(name), read, "{name}");
    }
}
