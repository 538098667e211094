//! Tests of the requirements that images have on the driver (`NVIDIA_REQUIRE_*`).

use divvy_cdi::{FoundSpec, Registry, Spec};
use divvy_oci::runtime::plan::DevicePlan;
use divvy_oci::runtime::request::RequestingContainer;
use divvy_oci::runtime::require::{RequirementError, RequirementFacts, check, expressions};
use divvy_oci::runtime::settings::OciRuntimeSettings;
use serde_json::json;

const BOTH: &str = "cuda>=12.4 brand=tesla,driver>=470,driver<471";

fn facts(cuda: &str, brand: Option<&str>, driver: &str) -> RequirementFacts {
    RequirementFacts {
        driver: Some(driver.to_owned()),
        cuda: Some(cuda.to_owned()),
        arch: Some("8.0".to_owned()),
        brand: brand.map(str::to_owned),
    }
}

fn judged(text: &str, facts: &RequirementFacts) -> Result<(), RequirementError> {
    check(&[text.to_owned()], facts)
}

#[test]
fn an_error_is_one_line_whatever_blanks_the_image_writes() {
    let expressions = ["cuda>=99.0\n\tcuda>=98.0\r".to_owned()];
    let error = check(&expressions, &RequirementFacts::of_driver("550.54.15")).expect_err("too old");
    let text = error.to_string();
    assert!(text.contains("unsatisfied condition: cuda>=99.0  cuda>=98.0 ,"), "{text}");
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

#[test]
fn an_odd_file_name_moves_no_cursor() {
    let of_machine = facts("1\u{1b}[2J2.2", Some("\u{202e}alset"), "470.82\n");
    let text = judged("brand=\u{202e}x", &of_machine).expect_err("no such brand").to_string();
    assert!(
        text.contains("brand=\\u{202e}x, please") && text.contains("driver 470.82\\u{a}, CUDA 1\\u{1b}[2J2.2,"),
        "{text}"
    );
    assert_eq!(divvy_host::plain(&text), text);
}

#[test]
fn case_44_a_spaces_part_alternatives_and_commas_conditions() {
    let old = facts("12.2", Some("Tesla"), "470.82");
    let (tesla, geforce) = (Some("Tesla"), Some("GeForce"));
    for (text, facts, holds) in [
        (BOTH, &old, true),
        (BOTH, &facts("12.2", tesla, "471.1"), false),
        (BOTH, &facts("12.2", geforce, "470.82"), false),
        (BOTH, &facts("12.4", geforce, "550.54.15"), true),
        (BOTH, &facts("12.10", geforce, "1"), true),
        ("driver>=470.82.0", &old, true),
        ("driver>470.82", &old, false),
        ("driver!=470.82", &old, false),
        ("driver<=470.82,driver<470.100", &old, true),
        ("cuda=12.2.0", &old, true),
        ("arch>=8", &old, true),
        ("arch>8.0", &old, false),
        ("brand!=geforce", &old, true),
        ("  ", &old, true),
        ("driver<1,, driver>1,", &old, true),
    ] {
        assert_eq!(judged(text, facts).is_ok(), holds, "{text} of {facts:?}");
    }
    let both = ["cuda>=12".to_owned(), "cuda>=13".to_owned()];
    let error = check(&both, &old).expect_err("all of them must hold");
    assert!(
        error
            .to_string()
            .starts_with("requirement error: unsatisfied condition: cuda>=13, please update your driver to a newer version, or use an earlier cuda container; this machine has driver 470.82, CUDA 12.2, "),
        "{error}"
    );
}

#[test]
fn case_44_b_what_is_no_condition_is_refused() {
    for text in [
        "foo>1",
        "cuda>=12 foo>1",
        "cuda>=1,foo>1",
        "cuda",
        "cuda>=",
        "cuda=>12",
        "cuda>=twelve",
        "brand>tesla",
        ">=3",
        "cuda>=12;driver>1",
    ] {
        let error = judged(text, &facts("12.4", None, "550")).expect_err(text);
        assert!(error.to_string().starts_with("invalid expression: "), "{error}");
    }
}

#[test]
fn what_nobody_knows_is_in_nobodys_way() {
    let unknown = facts("12.2", None, "535.129.03");
    assert_eq!(judged("cuda>=12.4 brand=tesla,driver>=535,driver<536", &unknown), Ok(()));
    let error = judged(BOTH, &unknown).expect_err("neither alternative holds, for any brand");
    assert!(matches!(error, RequirementError::Unsatisfied { .. }));
    assert_eq!(judged("cuda>=99,driver>=999,arch>=99", &RequirementFacts::default()), Ok(()));
}

#[test]
fn case_44_c_variables_set_or_disable_requirements() {
    let list = |env: &[&str], settings: &OciRuntimeSettings| {
        let container = RequestingContainer {
            env: env.iter().map(|entry| (*entry).to_owned()).collect(),
            ..RequestingContainer::default()
        };
        expressions(&container, settings)
    };
    let usual = OciRuntimeSettings::default();
    let cuda = format!("NVIDIA_REQUIRE_CUDA={BOTH}");
    assert_eq!(
        list(&[&cuda, "NVIDIA_REQUIRE_A=driver>1"], &usual),
        Ok(vec!["driver>1".to_owned(), BOTH.to_owned()])
    );
    for off in ["1", "t", "T", "TRUE", "true", "True"] {
        assert_eq!(
            list(&[&cuda, &format!("NVIDIA_DISABLE_REQUIRE={off}")], &usual),
            Ok(vec![]),
            "{off}"
        );
    }
    for on in ["", "0", "false", "yes"] {
        assert_eq!(
            list(&[&cuda, &format!("NVIDIA_DISABLE_REQUIRE={on}")], &usual)
                .expect("read")
                .len(),
            1,
            "{on}"
        );
    }
    let never = OciRuntimeSettings {
        disable_require: true,
        ..OciRuntimeSettings::default()
    };
    assert_eq!(list(&[&cuda], &never), Ok(vec![]));
    assert_eq!(list(&["CUDA_VERSION=12.4.1"], &usual), Ok(vec!["cuda>=12.4".to_owned()]));
}

#[test]
fn the_driver_is_the_one_whose_files_the_container_gets() {
    let spec = |path: &str, kind: &str, library: &str| FoundSpec {
        path: path.to_owned(),
        priority: 0,
        spec: Spec::parse(
            &json!({"cdiVersion": "0.5.0", "kind": kind, "devices": [{"name": "0", "containerEdits": {"env": ["A=1"]}}],
                "containerEdits": {"mounts": [{"hostPath": library, "containerPath": "/l"}]}})
            .to_string(),
        ),
    };
    let registry = Registry::new(vec![
        spec("/etc/cdi/a.json", "nvidia.com/gpu", "/usr/lib64/libcuda.so.535.129.03"),
        spec("/etc/cdi/b.json", "example.com/gpu", "/usr/lib64/libcuda.so.580.65.06"),
        spec("/etc/cdi/c.json", "amd.com/gpu", "/usr/lib64/libcuda.so.1.2.3"),
        spec("/etc/cdi/d.json", "example.com/new", "/usr/lib64/libcuda.so.9999.1"),
    ]);
    let of = |devices: &[&str], driver_of: Option<&str>| {
        let plan = DevicePlan::Inject {
            devices: devices.iter().map(|name| (*name).to_owned()).collect(),
            driver_of: driver_of.map(str::to_owned),
        };
        let facts = RequirementFacts::of_specs(&plan, &registry);
        [facts.driver, facts.cuda].map(Option::unwrap_or_default)
    };
    assert_eq!(of(&["nvidia.com/gpu=0"], None), ["535.129.03", "12.2"]);
    assert_eq!(of(&["example.com/gpu=0"], None), ["580.65.06", "13.0"]);
    assert_eq!(of(&["amd.com/gpu=0", "nvidia.com/gpu=0"], None), ["535.129.03", "12.2"]);
    assert_eq!(of(&["amd.com/gpu=0"], None), ["", ""]);
    assert_eq!(
        of(&["example.com/new=0"], None),
        ["9999.1", ""],
        "newer than this program: its CUDA is not known"
    );
    assert_eq!(of(&[], Some("nvidia.com/gpu")), ["535.129.03", "12.2"]);
    assert_eq!(
        RequirementFacts::of_specs(&DevicePlan::LeaveAlone, &registry),
        RequirementFacts::default()
    );
}
