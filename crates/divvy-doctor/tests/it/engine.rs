//! The results for engines whose configuration files leave some settings open.

use divvy_doctor::{Asked, CheckStatus, Facts, ReportLine};

use crate::host::{Host, debian, facts, one};

/// Return a host that has a CDI spec, and whose pods run on a containerd without a configuration file.
fn without_configuration() -> Host {
    let mut host = debian();
    host.files.remove("/etc/containerd/config.toml");
    host
}

fn with_package(mut host: Host, version: &str) -> Host {
    let package = format!("Package: containerd.io\nStatus: install ok installed\nVersion: {version}\n");
    host.files.file("/var/lib/dpkg/status", package);
    host
}

fn said(id: &str, host: &Host, change: impl FnOnce(&mut Facts<'_>)) -> ReportLine {
    let mut facts = facts(host);
    facts.cluster = Asked::Not("it was not asked".to_owned());
    change(&mut facts);
    one(id, &facts)
}

#[test]
fn containerd_2_without_a_configuration_does_cdi() {
    let host = with_package(without_configuration(), "2.1.3-1~debian.12~bookworm");
    for id in ["R09", "R10", "R15"] {
        let line = said(id, &host, |_| {});
        assert_eq!(line.status, CheckStatus::Pass, "{line:?}");
    }
    let line = said("R08", &host, |_| {});
    assert_eq!(line.status, CheckStatus::Pass);
    assert_eq!(
        line.found,
        "there is no /etc/containerd/config.toml; containerd uses its defaults"
    );
}

#[test]
fn containerd_1_without_a_configuration_does_none() {
    let host = with_package(without_configuration(), "1.7.24-1");
    for (id, status) in [
        ("R09", CheckStatus::Fail),
        ("R10", CheckStatus::Fail),
        ("R15", CheckStatus::Note),
    ] {
        let line = said(id, &host, |_| {});
        assert_eq!(line.status, status, "{line:?}");
    }
}

/// Both containerd 1 and containerd 2 read files of version 2. In containerd 2, CDI is enabled even if the file does not set it.
#[test]
fn a_file_silent_on_cdi_means_containerds_default() {
    let mut host = without_configuration();
    host.files.file("/etc/containerd/config.toml", "version = 2\n");
    let newer = with_package(host.clone(), "2.0.5-1");
    assert_eq!(said("R09", &newer, |_| {}).status, CheckStatus::Pass);
    let older = with_package(host, "1.7.24-1");
    assert_eq!(said("R09", &older, |_| {}).status, CheckStatus::Fail);
}

#[test]
fn nobody_claims_that_an_unknown_containerd_lacks_cdi() {
    let host = without_configuration();
    for id in ["R09", "R10", "R15"] {
        let line = said(id, &host, |_| {});
        assert!(
            line.could_not_look() && line.found.contains("containerd --version prints it"),
            "{line:?}"
        );
    }
    // The version of the dumped configuration, and the versions in all Node objects, are two other ways to find out.
    let line = said("R09", &host, |facts| {
        facts.containerd = Asked::Answer("version = 3\n".to_owned())
    });
    assert_eq!(line.status, CheckStatus::Pass, "{line:?}");
    let line = said("R09", &host, |facts| facts.cluster = Asked::Answer(crate::host::cluster()));
    assert_eq!(line.status, CheckStatus::Pass, "{line:?}");
    let line = said("R09", &host, |facts| {
        let mut cluster = crate::host::cluster();
        cluster.nodes[1].status.node_info.container_runtime_version = "containerd://1.7.24".to_owned();
        facts.cluster = Asked::Answer(cluster);
    });
    assert!(line.could_not_look(), "nodes differ: {line:?}");
}

#[test]
fn unlistable_runtime_classes_do_not_count_as_none() {
    let mut host = debian();
    host.containerd("enable_cdi = true", "enable_cdi = false");
    let line = said("R10", &host, |facts| {
        let mut cluster = crate::host::cluster();
        cluster.runtime_classes.clear();
        cluster
            .refused
            .insert("runtimeclasses".to_owned(), "runtimeclasses is forbidden".to_owned());
        facts.cluster = Asked::Answer(cluster);
    });
    assert!(line.could_not_look(), "{line:?}");
}

#[test]
fn what_a_check_of_the_machine_leaves_out_is_named() {
    let mut host = debian();
    host.files.file("/etc/cdi/broken.yaml", "no: spec\n");
    let line = said("C01", &host, |_| {});
    assert_eq!(line.status, CheckStatus::Pass);
    assert_eq!(
        line.found,
        "1 spec checked; not checked: /etc/cdi/broken.yaml (no usable spec, see C02)"
    );
    let host = debian();
    let line = said("D11", &host, |facts| {
        facts.kernel_log = Asked::Failed("/dev/kmsg: Permission denied".to_owned())
    });
    assert_eq!(
        line.found,
        "all 2; the kernel log was not checked: /dev/kmsg: Permission denied"
    );
    let silent = |facts: &mut Facts<'_>| {
        let Asked::Answer(probed) = &mut facts.probe else {
            panic!("it was asked")
        };
        (probed.gpus[1].cc, probed.gpus[1].compute_mode) = (String::new(), None);
    };
    for (id, found) in [
        ("D08", "8.0; not checked: GPU 1 (the driver does not report it)"),
        ("D12", "default on 1; not checked: GPU 1 (the driver does not report it)"),
    ] {
        assert_eq!(said(id, &host, silent).found, found);
    }
}

/// Without divvy-probe, the driver's answer is unknown, so the check neither fails nor passes.
#[test]
fn without_the_probe_it_is_not_known_whether_gpus_answer() {
    let host = debian();
    for id in ["D11", "D08", "D12", "D14"] {
        let line = said(id, &host, |facts| {
            facts.probe = Asked::Blocked("there is no divvy-probe".to_owned())
        });
        assert!(line.could_not_look(), "{line:?}");
    }
}

/// Return a host with containerd's main file and one file that it imports, for pods that need the runtime in one of both.
fn with_files(main: &str, imported: &str) -> Host {
    let mut host = without_configuration();
    let main = format!("imports = [\"/etc/containerd/conf.d/*.toml\"]\n{main}");
    host.files
        .file("/etc/containerd/config.toml", main)
        .file("/etc/containerd/conf.d/99-nvidia.toml", imported);
    host
}

const RUNTIME: &str = ".containerd.runtimes.nvidia.options]\nBinaryName = \"/usr/bin/nvidia-container-runtime\"\n";

/// The versions of the files must suit each other, too.
#[test]
fn file_versions_must_suit_the_installed_containerd() {
    let old = format!("version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"{RUNTIME}");
    let new = |version: u32| format!("version = {version}\n[plugins.\"io.containerd.cri.v1.runtime\"{RUNTIME}");
    let unknown = "";
    for (release, main, imported, status, found) in [
        ("1.7.27-1", "version = 2\n", &old, CheckStatus::Pass, ""),
        (
            "1.7.27-1",
            "version = 2\n",
            &new(3),
            CheckStatus::Fail,
            "containerd 1.7 reads versions up to 2",
        ),
        (
            "1.7.27-1",
            "version = 2\n",
            &new(2),
            CheckStatus::Fail,
            "which containerd 1.7 does not use",
        ),
        ("2.2.4-ubuntu24.04u1", "version = 2\n", &new(2), CheckStatus::Pass, ""),
        (
            "2.2.4-1",
            old.as_str(),
            &new(3),
            CheckStatus::Fail,
            "/etc/containerd/config.toml has version 2 and the section",
        ),
        (
            "2.0.5-1",
            "version = 2\n",
            &new(4),
            CheckStatus::Fail,
            "containerd 2.0 to 2.2 reads versions up to 3",
        ),
        (
            "2.3.2-1",
            "version = 2\n",
            &new(4),
            CheckStatus::Fail,
            "no imported file with a higher version",
        ),
        ("2.3.7-1", "version = 2\n", &new(4), CheckStatus::Pass, ""),
        (unknown, "version = 2\n", &old, CheckStatus::Pass, ""),
        (
            unknown,
            "version = 2\n",
            &new(3),
            CheckStatus::Warn,
            "the version of containerd is unknown here",
        ),
        (unknown, "version = 3\n", &new(3), CheckStatus::Pass, ""),
    ] {
        let mut host = with_files(main, imported);
        if release != unknown {
            host = with_package(host, release);
        }
        let line = said("R08", &host, |_| {});
        assert_eq!(line.status, status, "{release} {main} {imported}: {line:?}");
        assert!(line.found.contains(found), "{release}: {line:?}");
    }
}

#[test]
fn each_distributions_package_tells_containerds_version() {
    let new = format!("version = 2\n[plugins.\"io.containerd.cri.v1.runtime\"{RUNTIME}");
    for name in ["containerd.io", "containerd", "moby-containerd", "containerd2"] {
        let mut host = with_files("version = 2\n", &new);
        host.files.file(
            "/var/lib/dpkg/status",
            format!("Package: {name}\nStatus: install ok installed\nVersion: 2:2.1.4-1\n"),
        );
        assert_eq!(said("R08", &host, |_| {}).status, CheckStatus::Pass, "{name}");
        let mut host = with_files("version = 2\n", &new);
        host.files.file(
            "/var/lib/rpm/rpmdb.sqlite",
            format!("\u{1}\0C\0{name}-stress\09.9\01\0\u{2}C\0{name}\01.7.27\03.azl3\0An engine\0"),
        );
        assert_eq!(said("R08", &host, |_| {}).status, CheckStatus::Fail, "{name}");
    }
}

/// Return a host without an engine, with these processes and files.
fn with_processes(kubelet: &str, processes: &[(u32, &str, &str)], files: &[(&str, &str)]) -> Host {
    let mut host = without_configuration();
    host.files.remove("/proc/700/comm");
    host.files.file(
        "/var/lib/kubelet/config.yaml",
        format!("containerRuntimeEndpoint: {kubelet}\n"),
    );
    for (process, status, line) in processes {
        let name = line
            .split([' '])
            .next()
            .and_then(|path| path.rsplit('/').next())
            .expect("a program");
        host.files
            .file(&format!("/proc/{process}/comm"), format!("{name}\n"))
            .file(&format!("/proc/{process}/cmdline"), line.replace(' ', "\0"))
            .file(
                &format!("/proc/{process}/status"),
                format!("Name:\t{name}\nNSpid:\t{status}\n"),
            );
    }
    for (path, text) in files {
        host.files.file(path, *text);
    }
    host
}

const SOCKET: &str = "unix:///run/containerd/containerd.sock";

/// The engine is the process at that endpoint, and its configuration is the file that it was started with.
#[test]
fn the_engine_is_behind_the_kubelets_endpoint() {
    let (cri, host) = ("/etc/cri/containerd.toml", "/etc/containerd/config.toml");
    let file = "version = 3\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n";
    let both = [(cri, file), (host, file)];
    let unit = "/usr/lib/systemd/system/containerd.service";
    let drop_in = "/etc/systemd/system/containerd.service.d/10-config.conf";
    // The file that R12 names, and the name of the engine.
    for (endpoint, processes, files, expected) in [
        (
            SOCKET,
            &[
                (800, "800", "/bin/containerd --address /system/run/containerd/containerd.sock"),
                (
                    900,
                    "900",
                    "/bin/containerd --address /run/containerd/containerd.sock --config /etc/cri/containerd.toml",
                ),
            ][..],
            &both[..],
            "containerd /etc/cri/containerd.toml",
        ),
        (
            "unix:///var/run/containerd/containerd.sock",
            &[
                (800, "800", "/bin/containerd -c /etc/host-containerd/config.toml"),
                (900, "900", "/bin/containerd"),
            ],
            &[
                (host, file),
                (
                    "/etc/host-containerd/config.toml",
                    "version = 3\n[grpc]\naddress = \"/run/host-containerd/h.sock\"\n",
                ),
            ],
            "containerd /etc/containerd/config.toml",
        ),
        // The nodes of kind have a containerd of their own in a PID namespace of their own.
        (
            SOCKET,
            &[
                (800, "800 90", "/usr/local/bin/containerd"),
                (900, "900", "/bin/containerd --config=/etc/cri/containerd.toml"),
            ],
            &both,
            "containerd /etc/cri/containerd.toml",
        ),
        (
            "unix:///run/k0s/containerd.sock",
            &[
                (800, "800", "/usr/bin/containerd"),
                (
                    900,
                    "900",
                    "/var/lib/k0s/bin/containerd --address=/run/k0s/containerd.sock --config=/etc/k0s/containerd.toml",
                ),
            ],
            &[("/etc/k0s/containerd.toml", file), (host, "version = 3\n")],
            "k0s /etc/k0s/containerd.d/zz-divvy.toml",
        ),
        (
            SOCKET,
            &[],
            &[
                (unit, "[Service]\nExecStart=/usr/bin/containerd\n"),
                (
                    drop_in,
                    "[Service]\nExecStart=\nExecStart=/usr/bin/containerd --config /etc/cri/containerd.toml\n",
                ),
                (cri, file),
                (host, "version = 3\n"),
            ],
            "containerd /etc/cri/containerd.toml",
        ),
        (
            SOCKET,
            &[],
            &[
                (
                    unit,
                    "[Service]\nEnvironment=CONFIG=/usr/share/containerd/config.toml\nExecStart=/usr/bin/containerd --config ${CONFIG}\n",
                ),
                (drop_in, "[Service]\nEnvironment=\"CONFIG=/etc/cri/containerd.toml\"\n"),
                (cri, file),
            ],
            "containerd /etc/cri/containerd.toml",
        ),
        (SOCKET, &[], &both, "containerd /etc/containerd/config.toml"),
    ] {
        let line = said("R12", &with_processes(endpoint, processes, files), |_| {});
        let fix = line.fix.unwrap_or_default();
        let (name, path) = expected.split_once(' ').expect("two words");
        assert!(fix.contains(path), "{expected}: {fix} {}", line.found);
        let configured = said("R10", &with_processes(endpoint, processes, files), |_| {})
            .fix
            .unwrap_or_default();
        if !configured.is_empty() {
            assert!(configured.contains(&format!("divvy configure {name}")), "{configured}");
        }
    }
}

/// The file is unknown, or people are not meant to edit it.
#[test]
fn an_unsuitable_file_gets_no_edit_command() {
    let file = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = false\n";
    let usr = "/usr/share/containerd/config.toml";
    for (processes, files, word) in [
        (
            &[(
                900,
                "900",
                "/bin/containerd --address /run/other.sock --config /etc/other.toml",
            )][..],
            &[("/etc/containerd/config.toml", file), ("/etc/other.toml", file)][..],
            "--config",
        ),
        (
            &[],
            &[("/etc/os-release", "ID=talos\n"), ("/etc/containerd/config.toml", file)],
            "Talos",
        ),
        (
            &[(900, "900", "/bin/containerd --config /usr/share/containerd/config.toml")],
            &[(usr, file)],
            "a copy of",
        ),
    ] {
        let host = with_package(with_processes(SOCKET, processes, files), "1.7.27-1");
        for id in ["R09", "R10", "R15"] {
            let fix = said(id, &host, |_| {}).fix.unwrap_or_default();
            assert!(!fix.contains("divvy configure containerd"), "{id}: {fix}");
            assert!(fix.contains(word), "{id}: {fix}");
        }
    }
}

#[test]
fn what_a_distribution_generates_is_corrected_in_its_template() {
    let directory = "/var/lib/rancher/k3s/agent/etc/containerd";
    let (generated, template) = (format!("{directory}/config.toml"), format!("{directory}/config-v3.toml.tmpl"));
    let table = "[plugins.'io.containerd.cri.v1.runtime']\n  enable_unprivileged_ports = false\n";
    let base = format!("version = 3\n{table}");
    for (written, text, found) in [
        (
            format!("{base}{table}"),
            format!("{{{{ template \"base\" . }}}}\n\n{table}"),
            "has that text in line 3",
        ),
        (
            base.clone(),
            format!("{{{{ template \"base\" . }}}}\n{table}{table}"),
            "is not valid TOML: duplicate key",
        ),
    ] {
        let mut host = with_processes("unix:///run/k3s/containerd/containerd.sock", &[], &[]);
        host.files.file(&generated, written).file(&template, text);
        let line = said("R08", &host, |_| {});
        assert_eq!(line.status, CheckStatus::Fail, "{line:?}");
        assert!(line.found.contains(&template) && line.found.contains(found), "{line:?}");
        let fix = line.fix.unwrap_or_default();
        assert!(
            fix.ends_with("systemctl restart k3s") && !line.found.contains("nothing was changed"),
            "{fix}"
        );
    }
}

#[test]
fn a_file_with_the_runtime_that_nothing_reads_is_named() {
    let runtime = format!("version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"{RUNTIME}");
    let rancher = "/var/lib/rancher/k3s/agent/etc/containerd";
    for (endpoint, main, unread) in [
        (
            SOCKET,
            "/etc/containerd/config.toml",
            "/etc/containerd/config.d/99-nvidia.toml".to_owned(),
        ),
        (
            SOCKET,
            "/etc/containerd/config.toml",
            "/etc/containerd/nvidia.toml".to_owned(),
        ),
        (
            SOCKET,
            "/etc/containerd/config.toml",
            "/etc/containerd/conf.d/x.toml".to_owned(),
        ),
        (
            "unix:///run/crio/crio.sock",
            "/etc/crio/crio.conf",
            "/etc/crio/conf.d/99-nvidia.toml".to_owned(),
        ),
        (
            "unix:///run/k3s/containerd/containerd.sock",
            &format!("{rancher}/config.toml"),
            format!("{rancher}/config-v3.toml.tmpl"),
        ),
    ] {
        let text = if main.contains("crio") { "" } else { "version = 2\n" };
        let mut host = with_processes(endpoint, &[], &[(main, text), (unread.as_str(), &runtime)]);
        host.files.remove("/var/run/cdi/nvidia.yaml");
        let line = said("R09", &with_package(host, "1.7.27-1"), |_| {});
        assert_eq!(line.status, CheckStatus::Fail, "{unread}");
        assert!(
            line.found.starts_with(&format!("{unread} has a runtime for GPUs")),
            "{line:?}"
        );
    }
}

/// The disabled plugins are seen before k0s has merged the drop-in.
#[test]
fn an_unmerged_k0s_drop_in_disables_plugins() {
    let files = [
        ("/run/k0s/containerd-cri.toml", "version = 3\n"),
        (
            "/etc/k0s/containerd.d/nvidia.toml",
            "version = 2\ndisabled_plugins = [\n  \"cri\",\n]\n",
        ),
    ];
    let line = said("R12", &with_processes("unix:///run/k0s/containerd.sock", &[], &files), |_| {});
    assert_eq!(line.status, CheckStatus::Fail);
    assert_eq!(
        line.found,
        "/etc/k0s/containerd.d/nvidia.toml has \"cri\" in disabled_plugins"
    );
}

/// All devices of the stale spec come from a spec in another directory.
#[test]
fn an_overridden_stale_spec_is_named_and_harmless() {
    let spec = |name: &str, major: u32| {
        format!(
            "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- {{name: {name:?}, containerEdits: {{deviceNodes: [{{path: /dev/nvidia-uvm, type: c, major: {major}}}]}}}}\n"
        )
    };
    for (older, newer, status, found) in [
        (
            spec("all", 510),
            spec("all", 511),
            CheckStatus::Pass,
            "/etc/cdi/nvidia.yaml is stale, but all its devices come from /var/run/cdi/nvidia.yaml",
        ),
        (
            spec("0", 510),
            spec("all", 511),
            CheckStatus::Fail,
            "/etc/cdi/nvidia.yaml: /dev/nvidia-uvm has major number 510 in the spec",
        ),
        (
            spec("all", 511),
            spec("all", 510),
            CheckStatus::Fail,
            "/var/run/cdi/nvidia.yaml: /dev/nvidia-uvm has major number 510",
        ),
        (spec("all", 511), spec("all", 511), CheckStatus::Pass, "2 specs checked"),
    ] {
        let mut host = debian();
        host.files
            .file("/etc/cdi/nvidia.yaml", older)
            .file("/var/run/cdi/nvidia.yaml", newer);
        let line = said("C01", &host, |_| {});
        assert_eq!(line.status, status, "{line:?}");
        assert!(line.found.contains(found), "{line:?}");
    }
}

#[test]
fn the_containerd_that_only_docker_uses_is_no_engine_of_pods() {
    let mut host = with_processes(
        "",
        &[(900, "900", "/usr/bin/containerd"), (950, "950", "/usr/bin/dockerd")],
        &[],
    );
    host.files.remove("/var/lib/kubelet/config.yaml");
    let line = said("R09", &host, |_| {});
    assert_eq!(
        (line.status, line.found.as_str()),
        (CheckStatus::Skip, "neither containerd nor CRI-O is here")
    );
}
