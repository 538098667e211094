//! Checks specs against the standard's JSON schema, and the schema's own test documents against Divvy's validation.
//!
//! The schema is not part of this repository. `DIVVY_CDI_SCHEMA` names the directory `schema` of the Go module
//! `tags.cncf.io/container-device-interface` 0.8.1 (`go mod download tags.cncf.io/container-device-interface@v0.8.1`). This is the last release that
//! has it: from 1.0 on the schema is a separate module, which no module proxy has.

use std::path::{Path, PathBuf};

use divvy_cdi::generate::{GenerateOptions, Naming, amd, intel, nvidia, proc, wsl};
use divvy_cdi::{GrantSpec, ProblemSeverity, Spec, SpecFormat, grant_spec};
use serde_json::Value;

use divvy_testkit::machine::kinds;

fn directory() -> Option<PathBuf> {
    divvy_skip::directory("DIVVY_CDI_SCHEMA", "the standard's schema.json")
}

fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Merge both schema files into one document without external references.
fn schema(directory: &Path) -> jsonschema::Validator {
    let mut schema = json(&directory.join("schema.json"));
    schema["definitions"] = json(&directory.join("defs.json"))["definitions"].take();
    let one = schema.to_string().replace("defs.json#/definitions/", "#/definitions/");
    let schema: Value = serde_json::from_str(&one).expect("as it was");
    jsonschema::draft7::new(&schema).expect("a schema")
}

fn documents(directory: &Path, kind: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory.join("testdata").join(kind)).expect("documents");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    assert!(!paths.is_empty());
    paths
}

#[test]
fn what_is_generated_holds_the_standards_schema() {
    let Some(directory) = directory() else { return };
    let schema = schema(&directory);
    let check = |what: &str, spec: &Spec| {
        let value: Value = serde_json::from_str(&spec.print(SpecFormat::Json)).expect("JSON");
        let errors: Vec<String> = schema
            .iter_errors(&value)
            .map(|error| format!("{}: {error}", error.instance_path()))
            .collect();
        assert!(errors.is_empty(), "{what}: {errors:#?}");
        assert_eq!(spec.problems(), [], "{what}");
    };
    for naming in [
        &[Naming::Index][..],
        &[Naming::Uuid],
        &[Naming::TypeIndex],
        &[Naming::Index, Naming::Uuid],
    ] {
        for hook in [None, Some("/usr/bin/divvy-hook".to_owned())] {
            let options = |driver_root: &str| GenerateOptions {
                naming: naming.to_vec(),
                hook: hook.clone(),
                driver_root: driver_root.to_owned(),
                ..GenerateOptions::new("nvidia.com")
            };
            for (what, machine, root) in [
                ("debian", kinds::debian(), "/"),
                ("driver container", kinds::operator(), "/run/nvidia/driver"),
                ("red hat", kinds::red_hat(), "/"),
                ("mig", kinds::mig(), "/"),
            ] {
                let made = nvidia::generate(&machine, &proc::gpus(&machine), None, &options(root)).expect(what);
                check(what, &made.spec);
            }
            check("wsl", &wsl::generate(&kinds::wsl(), None, &options("/")).expect("wsl").spec);
        }
        let options = |vendor| GenerateOptions {
            naming: naming.to_vec(),
            ..GenerateOptions::new(vendor)
        };
        check("amd", &amd::generate(&kinds::mi300(), &options("amd.com")).expect("amd").spec);
        check(
            "intel",
            &intel::generate(&kinds::intel(), &options("intel.com")).expect("intel").spec,
        );
    }
    let base = nvidia::generate(
        &kinds::debian(),
        &proc::gpus(&kinds::debian()),
        None,
        &GenerateOptions::new("nvidia.com"),
    )
    .expect("a spec");
    let gpu = base
        .spec
        .devices
        .iter()
        .find(|device| device.name.starts_with("GPU-"))
        .expect("by UUID");
    let text = grant_spec(&GrantSpec {
        name: "0123456789abcdef0123456789abcdef",
        owner: "{}",
        env: &[("A", "1".to_owned())],
        device_nodes: &["/dev/nvidia0".to_owned()],
        mounts: &[("/run/a".to_owned(), "/b".to_owned())],
        groups: &[44],
        libraries: Some(divvy_cdi::NVIDIA_KIND),
        gpus: &[&gpu.name],
        base: std::slice::from_ref(&base.spec),
        shadow: None,
    });
    check("grant", &Spec::parse(&text).expect("own text"));
}

#[test]
fn only_the_standards_good_documents_are_accepted() {
    let Some(directory) = directory() else { return };
    let schema = schema(&directory);
    let errors = |path: &Path| {
        let text = std::fs::read_to_string(path).expect("a document");
        let valid = serde_json::from_str(&text).is_ok_and(|value: Value| schema.is_valid(&value));
        let ours = match Spec::parse(&text) {
            Err(error) => vec![error.to_string()],
            Ok(spec) => {
                let problems = spec.problems().into_iter();
                let errors = problems.filter(|problem| problem.severity == ProblemSeverity::Error);
                errors.map(|problem| problem.to_string()).collect()
            }
        };
        (valid, ours)
    };
    for path in documents(&directory, "good") {
        let (valid, ours) = errors(&path);
        assert!(valid && ours.is_empty(), "{}: {ours:?}", path.display());
    }
    for path in documents(&directory, "bad") {
        let (valid, ours) = errors(&path);
        assert!(!valid && !ours.is_empty(), "{}", path.display());
    }
}
