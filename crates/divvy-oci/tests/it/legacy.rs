//! Tests of the arguments for `nvidia-container-cli`: recorded calls of NVIDIA's hook 1.20.0, and requests that are rejected.

use divvy_oci::runtime::legacy::{LegacyError, compat_hook, words};
use divvy_oci::runtime::request::{DeviceRequest, RequestingContainer};
use divvy_oci::runtime::settings::{OciRuntimeSettings, RuntimeMode};

fn container(env: &[&str], privileged: bool) -> RequestingContainer {
    RequestingContainer {
        env: env.iter().map(|entry| (*entry).to_owned()).collect(),
        privileged,
        ..RequestingContainer::default()
    }
}

/// Return the arguments in one line, without `--pid` and the root.
fn called(env: &[&str], privileged: bool, config: &str) -> Result<String, LegacyError> {
    let config = format!("accept-nvidia-visible-devices-envvar-when-unprivileged = true\n{config}");
    let settings = OciRuntimeSettings::parse(&config).expect("settings");
    let container = container(env, privileged);
    let request = DeviceRequest::of(&container, &settings);
    let words = words(&container, &request.wanted, &settings, "@/sbin/ldconfig")?;
    Ok(words.join(" | "))
}

const BEFORE: &str = "--load-kmods | configure | --cuda-compat-mode=ldconfig | --ldconfig=@/sbin/ldconfig";
const ALL: &str = "--compat32 | --compute | --display | --graphics | --ngx | --utility | --video";

#[test]
fn case_26_a_the_words_are_those_of_nvidias_hook() {
    let require = "NVIDIA_REQUIRE_CUDA=cuda>=12.4 brand=tesla,driver>=470,driver<471";
    for (env, privileged, expected) in [
        (
            &["NVIDIA_VISIBLE_DEVICES=all"][..],
            false,
            "--device=all | --compute | --utility",
        ),
        (&["NVIDIA_VISIBLE_DEVICES=none", "NVIDIA_DRIVER_CAPABILITIES=all"], false, ALL),
        (
            &["CUDA_VERSION=9.0"],
            false,
            &format!("--device=all | {ALL} | --require=cuda>=9.0"),
        ),
        (
            &["NVIDIA_VISIBLE_DEVICES=0,1", require],
            false,
            "--device=0,1 | --compute | --utility | --require=cuda>=12.4 brand=tesla,driver>=470,driver<471",
        ),
        (
            &["NVIDIA_VISIBLE_DEVICES=0,1", require, "NVIDIA_DISABLE_REQUIRE=1"],
            false,
            "--device=0,1 | --compute | --utility",
        ),
        (
            &["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_IMEX_CHANNELS=0,3"],
            false,
            "--device=0 | --imex-channel=0,3 | --compute | --utility",
        ),
        (
            &["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_MIG_CONFIG_DEVICES=all"],
            true,
            "--device=all | --mig-config=all | --compute | --utility",
        ),
        // Not recorded, but derived from the rules.
        (&["NVIDIA_VISIBLE_DEVICES=0,0"], false, "--device=0 | --compute | --utility"),
        (
            &["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=video, compute"],
            false,
            "--device=0 | --compute | --video",
        ),
        (
            &["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES="],
            false,
            "--device=0 | --compute | --utility",
        ),
        (
            &["CUDA_VERSION=9.2.148", "NVIDIA_VISIBLE_DEVICES=0"],
            false,
            &format!("--device=0 | {ALL} | --require=cuda>=9.2"),
        ),
        (
            &[
                "NVIDIA_VISIBLE_DEVICES=0",
                "NVIDIA_REQUIRE_JETPACK=csv",
                "NVIDIA_REQUIRE_B=b",
                "NVIDIA_REQUIRE_A=a",
            ],
            false,
            "--device=0 | --compute | --utility | --require=a | --require=b",
        ),
    ] {
        assert_eq!(called(env, privileged, ""), Ok(format!("{BEFORE} | {expected}")), "{env:?}");
    }
}

#[test]
fn each_setting_has_its_flag_in_its_place() {
    let config = "disable-require = true\nsupported-driver-capabilities = \"utility,compute,video\"\n\
        [features]\ndisable-imex-channel-creation = true\nignore-imex-channel-requests = true\n\
        [nvidia-container-cli]\nroot = \"/run/nvidia/driver\"\nload-kmods = true\nno-pivot = true\ndebug = \"/d\"\nldcache = \"/c\"\nuser = \"root:video\"\n\
        ldconfig = \"@/sbin/ldconfig.real\"\nno-cgroups = true\n\
        [nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = \"mount\"\n";
    let env = [
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_REQUIRE_CUDA=cuda>=99",
        "NVIDIA_IMEX_CHANNELS=1",
        "NVIDIA_DRIVER_CAPABILITIES=all",
    ];
    assert_eq!(
        called(&env, false, config).expect("called"),
        "--root=/run/nvidia/driver | --load-kmods | --no-create-imex-channels | --no-pivot | --debug=/d | --ldcache=/c | --user=root:video | configure | \
         --cuda-compat-mode=mount | --ldconfig=@/sbin/ldconfig.real | --no-cgroups | --device=all | --compute | --utility | --video"
    );
    let config = "[nvidia-container-cli]\nload-kmods = false\n";
    assert!(
        called(&env, false, config).expect("called").starts_with("configure | "),
        "who says no gets none loaded"
    );
}

#[test]
fn what_the_program_cannot_be_called_for_is_refused() {
    let compute = "supported-driver-capabilities = \"compute\"";
    for (env, config, part) in [
        (
            &["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=compute,foo"][..],
            compute,
            "unsupported capabilities found in 'compute,foo' (allowed 'compute')",
        ),
        (
            &["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_MIG_CONFIG_DEVICES=all"],
            "",
            "cannot set MIG_CONFIG_DEVICES in non privileged container",
        ),
        (
            &["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_MIG_MONITOR_DEVICES=all"],
            "",
            "cannot set MIG_MONITOR_DEVICES in non privileged container",
        ),
        (
            &["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_IMEX_CHANNELS=1048576"],
            "",
            "the IMEX channel \"1048576\"",
        ),
        (&["NVIDIA_VISIBLE_DEVICES=0;rm -rf"], "", "a GPU named \"0;rm -rf\""),
        (&["NVIDIA_VISIBLE_DEVICES=--pid=1"], "", "a GPU named \"--pid=1\""),
    ] {
        let error = called(env, false, config).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    for version in ["foo", "9.0.116.50", "9.", "9..0", ".5.10", "-9", "+9"] {
        let error = called(&[&format!("CUDA_VERSION={version}")], false, "").expect_err(version);
        let error = error.to_string();
        assert!(error.contains("which is not a version"), "{version}: {error}");
    }
}

#[test]
fn supported_default_capabilities_are_given_unasked() {
    let found = called(
        &["NVIDIA_VISIBLE_DEVICES=0"],
        false,
        "supported-driver-capabilities = \"utility,video\"",
    );
    assert_eq!(found, Ok(format!("{BEFORE} | --device=0 | --utility")));
}

#[test]
fn case_23_b_a_mount_asks_for_an_imex_channel_and_for_no_device() {
    let settings = |accept: bool| {
        let text = format!(
            "accept-nvidia-visible-devices-as-volume-mounts = {accept}\naccept-nvidia-visible-devices-envvar-when-unprivileged = true\n[nvidia-container-runtime]\nmode = \"legacy\"\n"
        );
        OciRuntimeSettings::parse(&text).expect("settings")
    };
    let mounted = |names: &[&str]| RequestingContainer {
        mounts: names
            .iter()
            .map(|name| ("/dev/null".to_owned(), format!("/var/run/nvidia-container-devices/{name}")))
            .collect(),
        ..container(&["NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_IMEX_CHANNELS=7"], false)
    };
    for (names, accept, expected) in [
        (
            &["0", "imex/3"][..],
            true,
            "--device=0 | --imex-channel=3 | --compute | --utility",
        ),
        (
            &["imex/3", "imex/4"],
            true,
            "--device=1 | --imex-channel=3,4 | --compute | --utility",
        ),
        (&["0"], true, "--device=0 | --imex-channel=7 | --compute | --utility"),
        (
            &["0", "imex/3"],
            false,
            "--device=1 | --imex-channel=7 | --compute | --utility",
        ),
    ] {
        let (container, settings) = (mounted(names), settings(accept));
        let request = DeviceRequest::of(&container, &settings);
        assert!(request.ignored.is_empty(), "{:?}", request.ignored);
        let words = words(&container, &request.wanted, &settings, "@/sbin/ldconfig").expect("called");
        assert_eq!(words.join(" | "), format!("{BEFORE} | {expected}"), "{names:?} {accept}");
    }
    let elsewhere = OciRuntimeSettings {
        accept_mounts: true,
        mode: RuntimeMode::Cdi,
        ..OciRuntimeSettings::default()
    };
    let request = DeviceRequest::of(&mounted(&["0", "imex/3"]), &elsewhere);
    assert!(
        request.ignored[0].contains("in modes \"auto\", \"jit-cdi\" and \"legacy\" only"),
        "{:?}",
        request.ignored
    );
}

/// `nvidia-container-cli` accepts neither of these values, and NVIDIA's hook does not pass them on.
#[test]
fn case_26_d_the_program_never_gets_hook_or_all_channels() {
    let config = "[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = \"hook\"\n";
    let words = called(&["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_IMEX_CHANNELS=all"], false, config).expect("called");
    assert_eq!(
        words,
        "--load-kmods | configure | --cuda-compat-mode=disabled | --ldconfig=@/sbin/ldconfig | --device=0 | --compute | --utility"
    );
    let settings = |more: &str| OciRuntimeSettings::parse(&format!("{config}{more}")).expect("settings");
    assert!(compat_hook(&settings("")));
    assert!(!compat_hook(&settings("[features]\ndisable-cuda-compat-lib-hook = true\n")));
    assert!(!compat_hook(&OciRuntimeSettings::default()));
}
