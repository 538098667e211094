//! `divvy cdi` on copies of machines. Each copy is a directory.

use std::path::{Path, PathBuf};
use std::process::Output;

use divvy_cdi::generate::{GenerateOptions, Generated, nvidia, proc, wsl};
use divvy_cdi::{Spec, SpecFormat};

use crate::cli::{command, divvy, stderr, stdout};
use crate::cluster::programs;
use divvy_testkit::machine::{MachineFiles, kinds};

struct Tree(tempfile::TempDir);

impl Tree {
    fn of(machine: &MachineFiles) -> Tree {
        let directory = tempfile::tempdir().expect("a directory");
        machine.write_below(directory.path()).expect("laid out");
        Tree(directory)
    }

    fn at(&self, path: &str) -> String {
        self.0.path().join(path.trim_start_matches('/')).display().to_string()
    }

    fn write(&self, path: &str, text: &str) {
        let at = PathBuf::from(self.at(path));
        std::fs::create_dir_all(at.parent().expect("a directory")).expect("made");
        std::fs::write(at, text).expect("written");
    }

    /// Run `divvy cdi …` on the copied machine.
    fn cdi(&self, args: &[&str]) -> Output {
        let root = self.at("");
        divvy(&[&["cdi"], args, &["--sys-root", &root]].concat(), &[])
    }
}

fn spec(vendor: &str, name: &str) -> String {
    format!("cdiVersion: 0.5.0\nkind: {vendor}/gpu\ndevices:\n- name: \"{name}\"\n  containerEdits:\n    env: [A=1]\n")
}

#[test]
fn what_is_printed_of_a_copied_machine_is_what_its_files_say() {
    let options = GenerateOptions::new("nvidia.com");
    let of_nvidia =
        |machine: &MachineFiles, options: &GenerateOptions| nvidia::generate(machine, &proc::gpus(machine), None, options);
    let operator = GenerateOptions {
        driver_root: "/run/nvidia/driver".to_owned(),
        ..options.clone()
    };
    for (machine, args, made) in [
        (kinds::debian(), &[][..], of_nvidia(&kinds::debian(), &options)),
        (
            kinds::red_hat(),
            &["--vendor", "nvidia"],
            of_nvidia(&kinds::red_hat(), &options),
        ),
        (kinds::mig(), &[], of_nvidia(&kinds::mig(), &options)),
        (
            kinds::operator(),
            &["--driver-root", "/run/nvidia/driver"],
            of_nvidia(&kinds::operator(), &operator),
        ),
        (kinds::wsl(), &[], wsl::generate(&kinds::wsl(), None, &options)),
    ] {
        let Generated { spec, notes } = made.expect("a spec");
        let output = Tree::of(&machine).cdi(&[&["generate"], args].concat());
        assert_eq!(stdout(&output), spec.print(SpecFormat::Yaml), "{}", stderr(&output));
        for note in notes {
            assert!(stderr(&output).contains(&note), "{}", stderr(&output));
        }
    }
    for (machine, kind) in [(kinds::mi300(), "amd.com/gpu"), (kinds::intel(), "intel.com/gpu")] {
        let output = Tree::of(&machine).cdi(&["generate", "--format", "json"]);
        let spec = Spec::parse(&stdout(&output)).unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)));
        assert_eq!((spec.kind.as_str(), spec.devices[0].name.as_str()), (kind, "0"));
    }
}

#[test]
fn minimal_hooks_are_one_and_need_the_program() {
    let tree = Tree::of(&kinds::debian());
    let output = tree.cdi(&[
        "generate",
        "--hooks",
        "minimal",
        "--hook-program",
        "/opt/divvy-hook",
        "--format",
        "json",
    ]);
    let spec = Spec::parse(&stdout(&output)).unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)));
    let [hook] = &spec.container_edits.hooks[..] else {
        panic!("{:?}", spec.container_edits.hooks)
    };
    assert_eq!(hook.path, "/opt/divvy-hook");
    for (args, part) in [
        (
            &["--hooks", "minimal", "--hook-program", "divvy-hook"][..],
            "need an absolute path",
        ),
        (&["--hook-program", "/opt/divvy-hook"], "needs --hooks minimal"),
    ] {
        let output = tree.cdi(&[&["generate"], args].concat());
        assert!(
            !output.status.success() && stderr(&output).contains(part),
            "{}",
            stderr(&output)
        );
    }
}

/// The probe reports which GPUs the machine has.
#[test]
fn a_changed_driver_makes_the_spec_stale() {
    let programs = programs();
    let tree = Tree::of(&kinds::debian());
    tree.write(
        "machine.toml",
        "v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"550.54.15\"\n\
         [[node.gpu]]\nmodel = \"NVIDIA T4\"\nmemory_mib = 15360\nuuid = \"GPU-a\"\nminor = 1\n\
         [[node.gpu]]\nmodel = \"NVIDIA T4\"\nmemory_mib = 15360\nuuid = \"GPU-b\"\nminor = 0\n",
    );
    let (machine, library, file) = (
        tree.at("machine.toml"),
        programs.nvml_sim.display().to_string(),
        tree.at("etc/cdi/nvidia.json"),
    );
    let root = tree.at("");
    let generate = |to: &str| {
        let args = ["cdi", "generate", "--sys-root", &root, "--nvml-library", &library, "-o", to];
        divvy(&args, &[("DIVVY_NVML_SIM", &machine)])
    };
    let output = generate(&file);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = std::fs::read_to_string(&file).expect("written");
    let spec = Spec::parse(&text).expect("a spec");
    let names: Vec<&str> = spec.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["0", "GPU-a", "1", "GPU-b", "all"]);
    assert!(
        spec.devices[0]
            .container_edits
            .device_nodes
            .iter()
            .any(|node| node.path == "/dev/nvidia1"),
        "a minor is no index"
    );
    let left: Vec<_> = std::fs::read_dir(tree.at("etc/cdi")).expect("there").collect();
    assert_eq!(left.len(), 1, "no temporary file is left: {left:?}");

    let refused = generate(&tree.at("etc/cdi/other.yaml"));
    assert!(
        !refused.status.success() && stderr(&refused).contains("nvidia.json already defines nvidia.com/gpu=0"),
        "{}",
        stderr(&refused)
    );
    assert!(!Path::new(&tree.at("etc/cdi/other.yaml")).exists());
    assert!(generate(&file).status.success(), "over itself it is written");

    let listed = tree.cdi(&["list", "--strict"]);
    assert!(listed.status.success(), "{}{}", stdout(&listed), stderr(&listed));
    tree.write("sys/module/nvidia/version", "560.35.03\n");
    let stale = tree.cdi(&["list", "--strict"]);
    assert!(!stale.status.success());
    let first = stdout(&stale).lines().nth(1).unwrap_or_default().to_owned();
    assert_eq!(
        first.split_whitespace().collect::<Vec<_>>().join(" "),
        "nvidia.com/gpu=0 stale /etc/cdi/nvidia.json it was made for driver 550.54.15, and 560.35.03 is loaded"
    );
    let validated = tree.cdi(&["validate", &file]);
    assert!(
        validated.status.success() && stdout(&validated).contains("warning: file: it is stale: it was made for driver 550.54.15")
    );
    assert!(!tree.cdi(&["validate", &file, "--strict"]).status.success());
}

#[test]
fn a_relative_root_is_the_directory_that_it_names() {
    // On this machine, a relative root is below the current directory.
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::create_dir_all(directory.path().join("fr/driver-root")).expect("made");
    let of_this = |root: &str| {
        let mut command = command(
            &[
                "cdi",
                "generate",
                "--vendor",
                "nvidia",
                "--gpus-from",
                "proc",
                "--driver-root",
                root,
            ],
            &[],
        );
        let output = command.current_dir(directory.path()).output().expect("it runs");
        (stdout(&output), stderr(&output))
    };
    let real = directory.path().canonicalize().expect("there").display().to_string();
    let whole = of_this(&format!("{real}/fr/driver-root"));
    assert!(!whole.1.contains("there is no directory"), "{}", whole.1);
    for relative in ["fr/driver-root", "./fr/driver-root", "fr/../fr/driver-root"] {
        assert_eq!(of_this(relative), whole, "{relative}");
    }
    let missing = of_this("fr/nowhere").1;
    assert!(
        missing.contains(&format!("there is no directory {real}/fr/nowhere on this machine")),
        "{missing}"
    );

    // On a copy, a relative root is below the copy's root.
    let operator = Tree::of(&kinds::operator());
    let of_copy = |root: &str| {
        let output = operator.cdi(&["generate", "--driver-root", root]);
        assert!(output.status.success(), "{root}: {}", stderr(&output));
        stdout(&output)
    };
    assert_eq!(of_copy("run/nvidia/driver"), of_copy("/run/nvidia/driver"));
}

#[test]
fn case_33_c_obstacles_to_a_spec_are_told_with_advice() {
    let none = Tree::of(&kinds::none());
    let debian = Tree::of(&kinds::debian());
    let probe = ["generate", "--gpus-from", "probe", "--probe", "/nowhere/divvy-probe"];
    for (tree, args, part) in [
        (&none, &["generate"][..], "no GPU driver is loaded on this machine"),
        (
            &none,
            &["generate", "--vendor", "nvidia"],
            "the NVIDIA driver is not installed there",
        ),
        (
            &none,
            &["generate", "--driver-root", "/run/nvidia/driver"],
            "there is no directory /run/nvidia/driver on this machine",
        ),
        (
            &none,
            &["generate", "--vendor", "amd"],
            "the kernel module amdgpu is not loaded",
        ),
        (&none, &["generate", "--vendor", "intel"], "no Intel display controller"),
        (&debian, &probe, "cannot start /nowhere/divvy-probe"),
        (
            &debian,
            &["generate", "-o", "gpus.yml"],
            "engines read only files whose names end in .yaml or .json",
        ),
        (
            &debian,
            &["generate", "-o", "a.json", "--format", "yaml"],
            "contradict each other",
        ),
        (&debian, &["generate", "--cdi-version", "0.4.0"], "allow at least 0.5.0"),
        (
            &debian,
            &["generate", "--cdi-version", "2.0.0"],
            "the versions are 0.3.0, 0.4.0",
        ),
        (&debian, &["generate", "--hooks", "full"], "possible values: none, minimal"),
        (&debian, &["generate", "--class", "a b"], "not the class of a CDI name"),
    ] {
        let output = tree.cdi(args);
        assert!(!output.status.success() && output.stdout.is_empty(), "{args:?}");
        assert!(stderr(&output).contains(part), "{args:?}: {}", stderr(&output));
    }
    let file = none.at("out/nvidia.yaml");
    assert_eq!(none.cdi(&["generate", "-o", &file]).status.code(), Some(1));
    assert!(!std::path::Path::new(&file).exists(), "there is no spec, and none is written");
}

#[test]
fn case_29_d_the_list_says_which_devices_containers_get() {
    let tree = Tree::of(&kinds::none());
    assert!(stderr(&tree.cdi(&["list"])).contains("no CDI devices in /etc/cdi, /var/run/cdi"));
    for (file, vendor, name) in [
        ("etc/cdi/a.yaml", "a.com", "both"),
        ("etc/cdi/b.json", "a.com", "both"),
        ("etc/cdi/c.yaml", "c.com", "twice"),
        ("var/run/cdi/c.yaml", "c.com", "twice"),
        ("etc/cdi/d.yml", "d.com", "unseen"),
    ] {
        tree.write(file, &spec(vendor, name));
    }
    tree.write("etc/cdi/broken.yaml", "kind: x.com/gpu\n");
    let output = tree.cdi(&["list"]);
    assert!(output.status.success(), "without --strict it only tells");
    insta::assert_snapshot!(stdout(&output), @r"
    DEVICE           STATE     FILE                 WHY
    a.com/gpu=both   conflict  /etc/cdi/a.yaml      /etc/cdi/b.json also defines it
    a.com/gpu=both   conflict  /etc/cdi/b.json      /etc/cdi/a.yaml also defines it
    c.com/gpu=twice  hidden    /etc/cdi/c.yaml      /var/run/cdi/c.yaml takes precedence
    c.com/gpu=twice  ok        /var/run/cdi/c.yaml
    ");
    for part in [
        "engines refuse /etc/cdi/broken.yaml: cdiVersion: invalid version \"\"",
        "engines do not read /etc/cdi/d.yml",
        "conflicting device \"a.com/gpu=both\" (specs \"/etc/cdi/a.yaml\", \"/etc/cdi/b.json\")",
    ] {
        assert!(stderr(&output).contains(part), "{part}: {}", stderr(&output));
    }
    assert_eq!(stdout(&tree.cdi(&["list", "-o", "name"])), "c.com/gpu=twice\n");
    let json: serde_json::Value = serde_json::from_str(&stdout(&tree.cdi(&["list", "-o", "json"]))).expect("JSON");
    assert_eq!(
        (&json["devices"][0]["state"], &json["files"][2]["usable"]),
        (&"conflict".into(), &false.into())
    );
    assert_eq!(
        (&json["devices"][0]["conflictsWith"], &json["devices"][2]["hiddenBy"]),
        (&serde_json::json!(["/etc/cdi/b.json"]), &"/var/run/cdi/c.yaml".into())
    );
    assert!(!tree.cdi(&["list", "--strict"]).status.success());
    assert!(tree.cdi(&["list", "--strict", "--spec-dir", "/var/run/cdi"]).status.success());
}

#[test]
fn files_are_checked_against_the_standard_and_each_other() {
    let tree = Tree::of(&kinds::none());
    tree.write("good/a.yaml", &spec("a.com", "0"));
    tree.write("bad/a.yaml", &spec("a.com", "0"));
    tree.write("bad/b.yaml", &spec("a.com", "0"));
    tree.write(
        "bad/c.json",
        r#"{"cdiVersion":"0.3.0","kind":"a.com/b","devices":[{"name":"0","containerEdits":{"env":["=x"]}}]}"#,
    );
    tree.write("bad/d.yaml", "not: [a");
    let good = tree.cdi(&["validate", &tree.at("good")]);
    assert!(good.status.success());
    assert_eq!(
        stdout(&good),
        format!("{}: valid, CDI 0.5.0, 1 devices\n", tree.at("good/a.yaml"))
    );
    let bad = tree.cdi(&["validate", &tree.at("bad")]);
    assert_eq!(bad.status.code(), Some(1));
    for part in [
        format!(
            "{}: error: devices: conflicting device \"a.com/gpu=0\"",
            tree.at("bad/a.yaml")
        ),
        format!(
            "{}: error: cdiVersion: the spec version must be at least v0.5.0",
            tree.at("bad/c.json")
        ),
        format!(
            "{}: error: devices[0].containerEdits.env[0]: \"=x\" is not a variable",
            tree.at("bad/c.json")
        ),
        format!("{}: error: file: this is not a CDI spec", tree.at("bad/d.yaml")),
    ] {
        assert!(stdout(&bad).contains(&part), "{part}\n{}", stdout(&bad));
    }
    let missing = tree.cdi(&["validate", "/nowhere/x.yaml"]);
    assert!(stderr(&missing).contains("/nowhere/x.yaml cannot be read"));
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&tree.cdi(&["validate", &tree.at("bad"), "-o", "json"]))).expect("JSON");
    assert_eq!(json.as_array().map(Vec::len), Some(4));
}
