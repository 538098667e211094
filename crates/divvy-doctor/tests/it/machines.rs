//! Complete reports, one for each kind of machine.

use divvy_doctor::{DoctorReport, Facts, ReportStyle, checks};

use crate::host::{Host, debian, none};
use divvy_testkit::machine::kinds;

/// Return the verbose report of a copied machine, whose programs are not queried.
fn copy(host: &Host) -> String {
    printed(
        host,
        ReportStyle {
            verbose: true,
            ..ReportStyle::default()
        },
    )
}

fn printed(host: &Host, style: ReportStyle) -> String {
    let facts = Facts::of(host).expect("a machine");
    DoctorReport::of(&facts, checks::ALL).print(style)
}

/// With `--verbose`, the report says everything.
#[test]
fn a_machine_without_gpus_gets_a_short_report() {
    let short = printed(&none(), ReportStyle::default());
    assert!(short.lines().count() < 12, "{short}");
    insta::assert_snapshot!("without_a_gpu", short);
    insta::assert_snapshot!("without_a_gpu_verbose", copy(&none()));
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
