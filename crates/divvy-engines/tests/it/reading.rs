//! Reading an engine's files and merging them.

use divvy_engines::containerd::{Merge, release};
use divvy_engines::{Configuration, Error, containerd, crio, docker};
use divvy_host::Root;

use crate::{CONTAINERD, CRIO, DOCKER, Tree, V2, tree};
use divvy_testkit::machine::MachineFiles;

fn of_containerd(files: &Tree, merge: Merge) -> Configuration {
    containerd::read(files, CONTAINERD, merge).expect("read")
}

const DROP_IN: &str = "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia.options]\nBinaryName = \"/usr/bin/x\"\n";

/// From containerd 2.1 on, a later file adds to the section.
#[test]
fn before_2_1_a_later_file_replaces_sections() {
    let main = format!("imports = [\"conf.d/*.toml\"]\n{V2}");
    let drop_in = format!("version = 2\n{DROP_IN}");
    let files = tree([(CONTAINERD, &main), ("/etc/containerd/conf.d/a.toml", &drop_in)]);
    let old = of_containerd(&files, Merge::Sections);
    assert_eq!(old.runtimes.keys().collect::<Vec<_>>(), ["nvidia"]);
    assert_eq!(old.default_runtime, None);
    let new = of_containerd(&files, Merge::Keys);
    assert_eq!(new.runtimes.keys().collect::<Vec<_>>(), ["nvidia", "runc"]);
    assert_eq!(new.default_runtime.as_deref(), Some("runc"));
    assert_eq!(new.runtimes["runc"].systemd_cgroup, Some(true));
    assert_eq!(new.runtimes["nvidia"].path.as_deref(), Some("/usr/bin/x"));
    assert_eq!(new.runtimes["nvidia"].file, "/etc/containerd/conf.d/a.toml");
    assert_eq!(new.files, [CONTAINERD, "/etc/containerd/conf.d/a.toml"]);
}

#[test]
fn the_version_says_which_section_counts() {
    let plugin = |version: &str, key: &str| {
        tree([(
            CONTAINERD,
            &format!("{version}\n[plugins.\"{key}\"]\nenable_cdi = true\n[plugins.\"{key}\".containerd.runtimes.r]\n"),
        )])
    };
    let (v1, v2, v3) = ("cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime");
    for (version, key, merge, counts) in [
        ("", v1, Merge::Sections, true),
        ("", v1, Merge::Keys, true),
        // Observed: containerd 1.6.20 ignores this section, and 2.3.7 reads it.
        ("", v2, Merge::Sections, false),
        ("", v2, Merge::Keys, true),
        ("version = 1", v1, Merge::Sections, true),
        ("version = 2", v2, Merge::Sections, true),
        ("version = 2", v1, Merge::Sections, false),
        ("version = 3", v3, Merge::Keys, true),
        ("version = 4", v3, Merge::Keys, true),
    ] {
        let read = of_containerd(&plugin(version, key), merge);
        assert_eq!(read.runtimes.contains_key("r"), counts, "{version} {key} {merge:?}");
        assert_eq!(read.cdi == Some(true), counts, "{version} {key} {merge:?}");
    }
}

/// A relative import counts from the directory of the file that has it.
#[test]
fn imports_are_read_once_in_containerds_order() {
    let files = tree([
        (
            CONTAINERD,
            "version = 2\nimports = [\"b/*.toml\", \"/x.toml\", \"gone.toml\"]\n",
        ),
        (
            "/etc/containerd/b/2.toml",
            "version = 2\nimports = [\"../config.toml\", \"3.toml\"]\n",
        ),
        ("/etc/containerd/b/1.toml", "version = 2\n"),
        ("/etc/containerd/b/1.toml.bak", "no toml at all ="),
        ("/x.toml", "version = 2\ndisabled_plugins = [\"cri\"]\n"),
        ("/etc/containerd/b/3.toml", "version = 2\n"),
    ]);
    let read = of_containerd(&files, Merge::Keys);
    assert_eq!(
        read.files,
        [
            CONTAINERD,
            "/etc/containerd/b/1.toml",
            "/etc/containerd/b/2.toml",
            "/etc/containerd/b/3.toml",
            "/x.toml"
        ]
    );
    assert_eq!(read.disabled_plugins, ["cri"]);
}

#[test]
fn a_file_that_is_not_there_says_nothing() {
    assert_eq!(of_containerd(&Tree::new(), Merge::Keys), Configuration::default());
    assert_eq!(docker::read(&Tree::new(), DOCKER), Ok(Configuration::default()));
    assert_eq!(crio::read(&Tree::new(), CRIO), Ok(Configuration::default()));
}

#[test]
fn what_the_engine_would_refuse_is_told_with_its_place() {
    let crio_error = |text: &str| crio::read(&tree([(CRIO, text)]), CRIO).expect_err("refused");
    let containerd_error =
        |text: &str| containerd::read(&tree([(CONTAINERD, text)]), CONTAINERD, Merge::Keys).expect_err("refused");
    let docker_error = |text: &str| docker::read(&tree([(DOCKER, text)]), DOCKER).expect_err("refused");
    let mut said = String::new();
    for error in [
        containerd_error("version = = 2"),
        containerd_error("version = \"2\"\n"),
        containerd_error("version = 2\nimports = \"a.toml\"\n"),
        containerd_error("version = 2\n\n[plugins]\n  [plugins.\"io.containerd.grpc.v1.cri\"]\n    containerd = 7\n"),
        containerd_error("version = 2\nversion = 2\n"),
        crio_error("[crio"),
        crio_error("[crio.runtime]\nruntimes = []\n"),
        docker_error("{not json"),
        docker_error("{\n  // c\n  \"debug\": true\n}\n"),
        docker_error("{\"registry-mirrors\": [\"https://m\"],}"),
        docker_error("{\n  \"runtimes\": {\n    \"a\": \"/bin/a\"\n  }\n}"),
        docker_error("[]"),
    ] {
        said += &format!("{error}\n");
    }
    insta::assert_snapshot!(said);
}

#[test]
fn docker_s_file_is_read_with_both_names_of_arguments() {
    let text = r#"{"default-runtime": "nvidia", "features": {"cdi": true, "buildkit": false}, "exec-opts": ["native.cgroupdriver=systemd"],
        "cdi-spec-dirs": ["/etc/cdi"],
        "runtimes": {"nvidia": {"path": "/usr/bin/x", "runtimeArgs": ["--debug"]}, "old": {"path": "y", "args": ["a"]},
                     "shim": {"runtimeType": "io.containerd.kata.v2"}}}"#;
    let read = docker::read(&tree([(DOCKER, text)]), DOCKER).expect("read");
    assert_eq!(read.default_runtime.as_deref(), Some("nvidia"));
    assert_eq!((read.cdi, read.cgroup_driver.as_deref()), (Some(true), Some("systemd")));
    assert_eq!(read.runtimes["nvidia"].args, ["--debug"]);
    assert_eq!(read.runtimes["old"].args, ["a"]);
    assert_eq!(read.runtimes["shim"].path, None);
    assert_eq!(docker::read(&tree([(DOCKER, "\n")]), DOCKER).expect("read").runtimes.len(), 0);
}

#[test]
fn crio_takes_a_runtime_from_the_last_file_that_has_it() {
    let files = tree([
        (
            CRIO,
            "[crio.runtime]\ndefault_runtime = \"crun\"\ncgroup_manager = \"systemd\"\n",
        ),
        (
            "/etc/crio/crio.conf.d/10-crio.conf",
            "[crio.runtime.runtimes.crun]\nruntime_path = \"/usr/bin/crun\"\nmonitor_path = \"/usr/bin/conmon\"\n",
        ),
        (
            "/etc/crio/crio.conf.d/99-nvidia.toml",
            "[crio.runtime]\ndefault_runtime = \"nvidia\"\n[crio.runtime.runtimes.nvidia]\nruntime_path = \"/usr/bin/n\"\n",
        ),
    ]);
    let read = crio::read(&files, CRIO).expect("read");
    assert_eq!(read.default_runtime.as_deref(), Some("nvidia"));
    assert_eq!(read.runtimes["crun"].path.as_deref(), Some("/usr/bin/crun"));
    assert_eq!(read.runtimes["nvidia"].file, "/etc/crio/crio.conf.d/99-nvidia.toml");
    assert_eq!(read.cgroup_driver.as_deref(), Some("systemd"));
}

/// A file that cannot be read is not taken for a missing file.
#[test]
fn a_machine_s_tree_is_read_through_links() {
    let mut machine = MachineFiles::default();
    machine
        .file("/opt/etc/daemon.json", "{\"default-runtime\": \"nvidia\"}")
        .link("/etc/docker/daemon.json", "/opt/etc/daemon.json")
        .file("/etc/containerd/config.toml/inside", "");
    let root = Root::open(&machine, "/").expect("a root");
    let read = docker::read(&root, DOCKER).expect("read");
    assert_eq!(read.default_runtime.as_deref(), Some("nvidia"));
    let error = containerd::read(&root, CONTAINERD, Merge::Keys).expect_err("a directory");
    assert!(matches!(error, Error::Unreadable { .. }), "{error}");
}

#[test]
fn the_version_of_containerd_says_how_files_are_put_together() {
    for (printed, is, merge) in [
        (
            "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3",
            (1, 6, 20),
            Merge::Sections,
        ),
        (
            "containerd containerd.io 1.7.27 05044ec0a9a75232cad458027ca83437aae3f4da",
            (1, 7, 27),
            Merge::Sections,
        ),
        (
            "containerd github.com/containerd/containerd/v2 v2.0.5 fb4c30d",
            (2, 0, 5),
            Merge::Sections,
        ),
        (
            "containerd github.com/containerd/containerd/v2 v2.3.7 fb4c30d",
            (2, 3, 7),
            Merge::Keys,
        ),
    ] {
        assert_eq!((release(printed), Merge::of(printed)), (Some(is), Some(merge)), "{printed}");
    }
    assert_eq!(Merge::of("containerd: command not found"), None);
}

const OLD: &str = "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.old]\n";
const NEW: &str = "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.new]\n";
const FIRST: &str = "[plugins.cri.containerd.runtimes.first]\n";

/// Return the runtimes that this release has with a main file and a drop-in, and the sections that it ignores; or its reason not to start.
fn used(release: containerd::ContainerdRelease, main: &str, drop_in: &str) -> String {
    let main = format!("imports = [\"conf.d/*.toml\"]\n{main}");
    let files = tree([(CONTAINERD, &main), ("/etc/containerd/conf.d/a.toml", drop_in)]);
    match containerd::effective(&files, CONTAINERD, release) {
        Ok(read) => {
            let names: Vec<&str> = read.runtimes.keys().map(String::as_str).collect();
            let ignored = read
                .ignored
                .iter()
                .map(|ignored| ignored.section.rsplit('.').next().unwrap_or_default());
            format!("{} ({})", names.join(" "), ignored.collect::<Vec<_>>().join(" "))
        }
        Err(Error::Version { path, version, .. }) => format!("refuses {version} of {path}"),
        Err(other) => panic!("{other}"),
    }
}

/// Observed with the programs 1.6.20 and 2.3.7, and with `LoadConfig` of the others.
#[test]
fn each_release_uses_of_its_files_what_its_own_rules_say() {
    const R16: containerd::ContainerdRelease = (1, 6, 20);
    const R17: containerd::ContainerdRelease = (1, 7, 28);
    const R20: containerd::ContainerdRelease = (2, 0, 7);
    const R22: containerd::ContainerdRelease = (2, 2, 0);
    const R232: containerd::ContainerdRelease = (2, 3, 2);
    const R237: containerd::ContainerdRelease = (2, 3, 7);
    let (v2, v3, v4) = ("version = 2\n", "version = 3\n", "version = 4\n");
    for (releases, main, drop_in, is) in [
        (
            &[R16, R17][..],
            [v2, OLD].concat(),
            [v2, FIRST].concat(),
            "refuses 2 of /etc/containerd/conf.d/a.toml",
        ),
        (&[R16, R17], [v2, NEW].concat(), v2.to_owned(), " (runtime)"),
        (&[R20, R22, R232, R237], [v2, NEW].concat(), v2.to_owned(), "new ()"),
        (&[R16], [v2, OLD].concat(), [v3, NEW].concat(), "old (runtime)"),
        (
            &[R17],
            [v2, OLD].concat(),
            [v3, NEW].concat(),
            "refuses 3 of /etc/containerd/conf.d/a.toml",
        ),
        (&[R20, R22], [v2, OLD].concat(), [v3, NEW].concat(), "new (cri)"),
        (
            &[R232],
            [v2, OLD].concat(),
            [v3, NEW].concat(),
            "refuses 3 of /etc/containerd/conf.d/a.toml",
        ),
        (&[R237], [v2, OLD].concat(), [v3, NEW].concat(), "new old ()"),
        (&[R20, R22], [v2, OLD].concat(), [v2, NEW].concat(), "new (cri)"),
        (&[R237], [v2, OLD].concat(), [v2, NEW].concat(), "new old ()"),
        (&[R20, R22, R232, R237], [v2, OLD, NEW].concat(), v2.to_owned(), "new (cri)"),
        (&[R20, R22], [v3, NEW].concat(), [v2, OLD].concat(), "new (cri)"),
        (&[R232, R237], [v3, NEW].concat(), [v2, OLD].concat(), "new old ()"),
        (
            &[R20, R22],
            [v2, OLD].concat(),
            [v4, NEW].concat(),
            "refuses 4 of /etc/containerd/conf.d/a.toml",
        ),
        (&[R237], [v2, OLD].concat(), [v4, NEW].concat(), "new old ()"),
        (&[R232, R237], [v4, NEW].concat(), v3.to_owned(), "new ()"),
        (&[R20, R22], FIRST.to_owned(), String::new(), " (cri)"),
        (&[R16, R17, R237], FIRST.to_owned(), String::new(), "first ()"),
        (&[R237], OLD.to_owned(), String::new(), "old ()"),
        (&[R16, R17], OLD.to_owned(), String::new(), " (cri)"),
        (&[R20, R22, R237], [v2, OLD].concat(), FIRST.to_owned(), "first old ()"),
    ] {
        for release in releases {
            assert_eq!(used(*release, &main, &drop_in), is, "{release:?}\n{main}\n{drop_in}");
        }
    }
}
