//! Tests of changing settings in NVIDIA's `config.toml`.

use divvy_oci::runtime::edit::{SettingEditError, assumed, set};
use divvy_oci::runtime::settings::OciRuntimeSettings;

fn default_text() -> String {
    assumed("@/sbin/ldconfig")
}

fn with(text: &str, options: &[&str]) -> Result<String, SettingEditError> {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    set(text, &options)
}

/// Apply options to the default file. Return the lines that were removed and the lines that were added.
fn changed(options: &[&str]) -> (Vec<String>, Vec<String>) {
    let before = default_text();
    let after = with(&before, options).expect("set");
    let only = |a: &str, b: &str| {
        a.lines()
            .filter(|line| !b.lines().any(|other| other == *line))
            .map(str::to_owned)
            .collect()
    };
    (only(&before, &after), only(&after, &before))
}

#[test]
fn case_16_b_a_value_replaces_its_predecessor_or_comment() {
    for (options, gone, come) in [
        (
            &["nvidia-container-runtime.runtimes=crun:runc"][..],
            &["runtimes = [\"runc\", \"crun\"]"][..],
            &["runtimes = [\"crun\", \"runc\"]"][..],
        ),
        (
            &["nvidia-container-runtime.runtimes=crun,runc"],
            &["runtimes = [\"runc\", \"crun\"]"],
            &["runtimes = [\"crun\", \"runc\"]"],
        ),
        (
            &["nvidia-container-cli.no-cgroups"],
            &["#no-cgroups = false"],
            &["no-cgroups = true"],
        ),
        (
            &["nvidia-container-cli.no-cgroups=false"],
            &["#no-cgroups = false"],
            &["no-cgroups = false"],
        ),
        (
            &["disable-require"],
            &["disable-require = false"],
            &["disable-require = true"],
        ),
        (
            &["features.disable-imex-channel-creation"],
            &[],
            &["[features]", "disable-imex-channel-creation = true"],
        ),
        (
            &["nvidia-container-runtime.debug=/var/log/r.log"],
            &["#debug = \"/var/log/nvidia-container-runtime.log\""],
            &["debug = \"/var/log/r.log\""],
        ),
        (
            &["nvidia-container-runtime.modes.jit-cdi.probe=/p"],
            &[],
            &["[nvidia-container-runtime.modes.jit-cdi]", "probe = \"/p\""],
        ),
        (
            &["accept-nvidia-visible-devices-envvar-when-unprivileged"],
            &["#accept-nvidia-visible-devices-envvar-when-unprivileged = false"],
            &["accept-nvidia-visible-devices-envvar-when-unprivileged = true"],
        ),
        (
            &["nvidia-container-runtime.mode=cdi", "nvidia-container-runtime.mode=legacy"],
            &["mode = \"auto\""],
            &["mode = \"legacy\""],
        ),
        (&[], &[], &[]),
    ] {
        let (lost, won) = changed(options);
        assert_eq!(
            (lost, won),
            (
                gone.iter().map(|line| (*line).to_owned()).collect(),
                come.iter().map(|line| (*line).to_owned()).collect()
            ),
            "{options:?}"
        );
    }
    let read = with(
        &default_text(),
        &["nvidia-container-cli.debug=/a", "nvidia-container-cli.user=root:video"],
    )
    .expect("set");
    let settings = OciRuntimeSettings::parse(&read).expect("read");
    assert_eq!(
        (settings.cli.debug.as_deref(), settings.debug),
        (Some("/a"), None),
        "each in its table"
    );
}

#[test]
fn case_16_c_what_is_wrong_is_refused_in_nvidias_words() {
    for (option, says) in [
        (
            "bogus.key=1",
            "invalid --set option bogus.key=1: invalid config option: undefined field: \"bogus\"",
        ),
        (
            "bogus",
            "invalid --set option bogus: invalid config option: undefined field: \"bogus\"",
        ),
        ("", "undefined field: \"\""),
        ("nvidia-container-cli.bogus=1", "undefined field: \"bogus\""),
        ("nvidia-container-runtime.modes.bogus.x=1", "undefined field: \"bogus\""),
        ("disable-require.x=1", "undefined field: \"disable-require\""),
        ("nvidia-container-cli=1", "nvidia-container-cli is a table"),
        (
            "nvidia-container-cli.path",
            "invalid format: expected key=value; got nvidia-container-cli.path",
        ),
        ("disable-require=maybe", "\"maybe\" is neither true nor false"),
        (
            "nvidia-container-runtime.mode=cid",
            "divvy-runtime would refuse the file: nvidia-container-runtime.mode is \"cid\"",
        ),
        ("nvidia-container-cli.ldconfig=/sbin/ldconfig", "would refuse the file"),
    ] {
        let error = with(&default_text(), &[option]).expect_err(option).to_string();
        assert!(error.contains(says), "{option}: {error}");
    }
    assert!(
        with("mode = [", &["disable-require"])
            .expect_err("no TOML")
            .to_string()
            .contains("stays as it is")
    );
    assert!(
        with("features = 3", &["features.ignore-imex-channel-requests"])
            .expect_err("no table")
            .to_string()
            .contains("features is not a table")
    );
}

#[test]
fn a_file_of_a_persons_own_keeps_all_that_is_not_set() {
    let own = "# mine\ndisable-require = false   # why\n\n[nvidia-container-runtime]\nmode = \"cdi\"\n# the last word\n\n[other]\nx = { a = 1 }\n";
    let after = with(
        own,
        &[
            "disable-require=true",
            "nvidia-container-runtime.runtimes=crun",
            "nvidia-container-cli.root=/d",
        ],
    )
    .expect("set");
    for line in [
        "# mine",
        "disable-require = true   # why",
        "mode = \"cdi\"",
        "# the last word",
        "x = { a = 1 }",
        "runtimes = [\"crun\"]",
        "[nvidia-container-cli]",
        "root = \"/d\"",
    ] {
        assert!(after.lines().any(|found| found == line), "{line}: {after}");
    }
    let settings = OciRuntimeSettings::parse(&after).expect("read");
    assert!(settings.disable_require && settings.runtimes == ["crun"] && settings.cli.root.as_deref() == Some("/d"));
    // A line inside a multi-line string that looks like a comment.
    let odd = "swarm-resource = \"\"\"\n#disable-require = false\n\"\"\"\n";
    let after = with(odd, &["disable-require"]).expect("set");
    assert!(
        after.contains("\"\"\"\n#disable-require = false\n\"\"\"")
            && OciRuntimeSettings::parse(&after).expect("read").disable_require,
        "{after}"
    );
    // A file with two errors can be corrected one setting at a time.
    let broken = "[nvidia-container-runtime]\nmode = \"cid\"\n[nvidia-container-cli]\nldconfig = \"/x\"\n";
    let half = with(broken, &["nvidia-container-runtime.mode=cdi"]).expect("set");
    let whole = with(&half, &["nvidia-container-cli.ldconfig=@/sbin/ldconfig"]).expect("set");
    assert!(OciRuntimeSettings::parse(&whole).is_ok());
}

/// This also holds if the last line of the file has no line break.
#[test]
fn a_repeated_edit_changes_nothing() {
    for before in [
        "[nvidia-container-cli]\n#no-cgroups = false\nldconfig = \"x\"",
        "disable-require = false",
        "",
        "\u{feff}# with a byte order mark\n",
        "[nvidia-container-cli]\n#no-cgroups = false\n[nvidia-container-runtime]\n[nvidia-container-runtime .modes]\n",
    ] {
        let once = with(before, &["nvidia-container-cli.no-cgroups=true"]).expect("set");
        assert_eq!(once.starts_with('\u{feff}'), before.starts_with('\u{feff}'), "{once:?}");
        assert!(once.ends_with('\n'), "{once:?}");
        assert_eq!(with(&once, &["nvidia-container-cli.no-cgroups=true"]).expect("set"), once);
    }
}
