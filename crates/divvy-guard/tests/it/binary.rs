//! What the library is, as a file.

use divvy_shadow_testkit::Elf;

use crate::sandbox::guard;

/// Every function that a driver is known to have, in groups that say what the guard does about it: `replaced`; `elsewhere`, if another function accounts for what it
/// does; `none`, if it takes no memory of a GPU; or `gap`, if what it takes is not charged (docs/pods.md). `cargo xtask driver-names` compares the names with those of
/// NVIDIA's drivers and headers.
const FUNCTIONS: &str = include_str!("functions.txt");

/// The names in the groups whose heads begin like this.
fn in_groups(wanted: &str) -> Vec<&'static str> {
    let mut is_wanted = false;
    let mut names = Vec::new();
    for line in FUNCTIONS.lines() {
        match line.strip_prefix('[') {
            Some(head) => is_wanted = head.starts_with(wanted),
            None if is_wanted => names.extend(line.split_whitespace()),
            None => {}
        }
    }
    names.sort_unstable();
    names
}

/// Each function that is replaced. What is not here belongs to the driver.
pub(crate) fn replaced() -> Vec<&'static str> {
    in_groups("replaced: ")
}

/// Those of them that a program without a limit of compute time has from the driver, if it asks `cuGetProcAddress`.
pub(crate) fn only_launches(name: &str) -> bool {
    name.starts_with("cuLaunch")
}

#[test]
fn it_exports_what_it_replaces_and_nothing_else() {
    assert_eq!(Elf::of(guard()).exports(), replaced());
}

#[test]
fn each_known_function_is_in_one_group() {
    let mut names = in_groups("");
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count);
    let of_each: usize = ["replaced: ", "elsewhere: ", "none: ", "gap: "]
        .iter()
        .map(|group| in_groups(group).len())
        .sum();
    assert_eq!(of_each, count);
}

/// In particular not `divvy_guard_can_panic`, which stands for the code of a panic.
#[test]
fn it_needs_no_function_but_dlsym_and_has_no_code_that_panics() {
    assert_eq!(Elf::of(guard()).imports(), ["dlsym"]);
}

/// The guard's library needs only the real driver library, which it names by its path.
#[test]
fn it_has_the_name_of_the_driver() {
    assert_eq!(Elf::of(guard()).names(), ["libcuda.so.1"]);
    assert_eq!(Elf::of(guard()).needed(), ["/run/divvy/guard/libcuda.so.real"]);
}

#[test]
fn it_asks_for_no_version_and_runs_no_code_at_loading() {
    Elf::of(guard()).assert_loads_anywhere();
}

#[test]
fn it_is_small() {
    // The same code takes more bytes on Arm, where each instruction has four.
    let most = if cfg!(target_arch = "aarch64") { 80 } else { 64 };
    assert!(guard().len() <= most << 10, "{} bytes", guard().len());
}
