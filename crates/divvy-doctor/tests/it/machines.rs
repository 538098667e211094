//! What is said of machines of each kind, whole.

use divvy_doctor::{Facts, Report, checks};

use crate::host::{Host, debian, none};
use crate::machine::kinds;

/// A copy of a machine: nobody is asked.
fn copy(host: &Host) -> String {
    let facts = Facts::of(host).expect("a machine");
    Report::of(&facts, checks::ALL).text(false)
}

#[test]
fn a_machine_without_a_gpu_is_told_so_once() {
    insta::assert_snapshot!(copy(&none()));
}

#[test]
fn a_debian_host() {
    insta::assert_snapshot!(copy(&debian()));
}

#[test]
fn a_driver_container_has_its_own_root() {
    let mut host = Host::of(kinds::operator());
    host.pci("0000:06:00.0", "0x10de", "0x030200", "nvidia");
    assert_eq!(Facts::of(&host).expect("a machine").driver_root, "/run/nvidia/driver");
    insta::assert_snapshot!(copy(&host));
}

#[test]
fn red_hat() {
    let mut host = Host::of(kinds::red_hat());
    host.pci("0000:06:00.0", "0x10de", "0x030200", "nvidia");
    insta::assert_snapshot!(copy(&host));
}

#[test]
fn mig() {
    let mut host = Host::of(kinds::mig());
    host.pci("0000:06:00.0", "0x10de", "0x030200", "nvidia")
        .pci("0000:81:00.0", "0x10de", "0x030200", "nvidia");
    insta::assert_snapshot!(copy(&host));
}

#[test]
fn wsl() {
    let host = Host::of(kinds::wsl());
    insta::assert_snapshot!(copy(&host));
}

#[test]
fn two_mi300() {
    insta::assert_snapshot!(copy(&crate::host::amd()));
}

#[test]
fn intel() {
    insta::assert_snapshot!(copy(&crate::host::intel()));
}
