//! The results for engines whose configuration files leave some settings open.

use divvy_doctor::{Asked, Facts, Line, Status};

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

fn said(id: &str, host: &Host, change: impl FnOnce(&mut Facts<'_>)) -> Line {
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
        assert_eq!(line.status, Status::Pass, "{line:?}");
    }
    let line = said("R08", &host, |_| {});
    assert_eq!(line.status, Status::Pass);
    assert_eq!(
        line.found,
        "there is no /etc/containerd/config.toml; containerd uses its defaults"
    );
}

#[test]
fn containerd_1_without_a_configuration_does_none() {
    let host = with_package(without_configuration(), "1.7.24-1");
    for (id, status) in [("R09", Status::Fail), ("R10", Status::Fail), ("R15", Status::Note)] {
        let line = said(id, &host, |_| {});
        assert_eq!(line.status, status, "{line:?}");
    }
}

/// Both containerd 1 and containerd 2 read files of version 2. In containerd 2, CDI is enabled even if the file does not set it.
#[test]
fn a_file_that_says_nothing_of_cdi_means_what_the_containerd_that_reads_it_does() {
    let mut host = without_configuration();
    host.files.file("/etc/containerd/config.toml", "version = 2\n");
    let newer = with_package(host.clone(), "2.0.5-1");
    assert_eq!(said("R09", &newer, |_| {}).status, Status::Pass);
    let older = with_package(host, "1.7.24-1");
    assert_eq!(said("R09", &older, |_| {}).status, Status::Fail);
}

#[test]
fn where_the_version_of_containerd_is_not_known_nobody_claims_that_it_does_no_cdi() {
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
    assert_eq!(line.status, Status::Pass, "{line:?}");
    let line = said("R09", &host, |facts| facts.cluster = Asked::Answer(crate::host::cluster()));
    assert_eq!(line.status, Status::Pass, "{line:?}");
    let line = said("R09", &host, |facts| {
        let mut cluster = crate::host::cluster();
        cluster.nodes[1].status.node_info.container_runtime_version = "containerd://1.7.24".to_owned();
        facts.cluster = Asked::Answer(cluster);
    });
    assert!(line.could_not_look(), "nodes differ: {line:?}");
}

#[test]
fn runtime_classes_that_may_not_be_listed_are_not_taken_for_none() {
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
    assert_eq!(line.status, Status::Pass);
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
