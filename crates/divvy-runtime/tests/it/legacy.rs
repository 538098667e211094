//! Tests of mode `legacy`: the hook for `nvidia-container-cli` that is added to the container's configuration.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use serde_json::{Value, json};

use super::bed::{Bed, Refusal, asking, built};

fn bed(config: &str) -> Bed {
    built("divvy-hook", "divvy-hook");
    let bed = Bed::new(config);
    let cli = bed.path("nvidia-container-cli");
    fs::write(&cli, "#!/bin/sh\n").expect("written");
    fs::set_permissions(&cli, fs::Permissions::from_mode(0o755)).expect("its mode");
    let more = format!("[nvidia-container-cli]\npath = {cli:?}\nenvironment = [\"A=b\"]\nldconfig = \"@/sbin/ldconfig\"\n");
    bed.settings_and("legacy", &bed.path("low-level"), &more);
    bed
}

/// Our hook calls NVIDIA's program with the arguments of that program.
#[test]
fn case_26_c_our_prestart_hook_calls_nvidias_program() {
    let mut config: Value = serde_json::from_str(&asking("0,1")).expect("JSON");
    config["hooks"] = json!({"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}, {"path": "/bin/other"}]});
    let bed = bed(&config.to_string());
    let found = bed.create().expect("created");
    let hooks = found["hooks"]["prestart"].as_array().expect("hooks");
    assert_eq!(hooks.len(), 2, "NVIDIA's own would inject a second time: {hooks:?}");
    assert_eq!(hooks[0]["path"], "/bin/other");
    assert_eq!(
        hooks[1]["args"],
        json!([
            "divvy-hook",
            "legacy",
            "--env=A=b",
            "--",
            bed.path("nvidia-container-cli"),
            "--load-kmods",
            "configure",
            "--cuda-compat-mode=ldconfig",
            "--ldconfig=@/sbin/ldconfig",
            "--device=0,1",
            "--compute",
            "--utility"
        ])
    );
    assert!(
        hooks[1]["env"].as_array().is_some_and(|env| !env.is_empty()),
        "set explicitly, so that the engine's environment is not used"
    );
    assert!(
        hooks[1]["path"]
            .as_str()
            .is_some_and(|path| path.starts_with('/') && path.ends_with("/divvy-hook"))
    );
    assert_eq!(found["process"], config["process"], "the program itself does the rest");
}

#[test]
fn case_26_b_who_asks_for_nothing_has_no_hook() {
    for device in ["void", ""] {
        let bed = bed(&asking(device));
        bed.create().expect("created");
        assert_eq!(bed.text(), asking(device));
    }
}

#[test]
fn without_nvidias_program_it_says_where_it_was_looked_for() {
    let bed = bed(&asking("0"));
    fs::remove_file(bed.path("nvidia-container-cli")).expect("removed");
    let Refusal(said) = bed.create().expect_err("no program");
    assert!(
        said.contains("is not at ") && said.contains("nvidia-container-cli; install libnvidia-container-tools"),
        "{said}"
    );
}

/// One of our hooks puts the image's libcuda first.
#[test]
fn case_26_f_the_mode_hook_prefers_the_images_libcuda() {
    let bed = bed(&asking("0"));
    let Some(root) = super::live::driver(&bed) else { return };
    let settings = fs::read_to_string(bed.path("config.toml")).expect("there");
    let with = |root: &std::path::Path, feature: &str| {
        let own = format!("[nvidia-container-cli]\nroot = {root:?}\n");
        let text = settings.replace("[nvidia-container-cli]\n", &own);
        let mode = "[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = \"hook\"\n";
        fs::write(bed.path("config.toml"), format!("{text}{mode}{feature}")).expect("written");
        fs::write(bed.config(), asking("0")).expect("written");
        bed.create().expect("created")["hooks"].clone()
    };
    let hooks = with(&root, "");
    let words = hooks["createContainer"][0]["args"].clone();
    assert_eq!(
        words,
        json!(["divvy-hook", "enable-cuda-compat", "--host-driver-version=550.54.15"])
    );
    let called = hooks["prestart"][0]["args"].as_array().expect("words");
    assert!(called.contains(&json!("--cuda-compat-mode=disabled")), "{called:?}");
    let off = with(&root, "[features]\ndisable-cuda-compat-lib-hook = true\n");
    assert_eq!(off["createContainer"], Value::Null);
    let nowhere = with(std::path::Path::new("/nowhere"), "");
    assert_eq!(
        nowhere["createContainer"],
        Value::Null,
        "a missing driver does not prevent the start"
    );
}
