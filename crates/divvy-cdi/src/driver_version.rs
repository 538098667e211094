//! The version of NVIDIA's driver: the version of the loaded driver, and versions in file names.

use divvy_host::{Root, Tree};

/// The annotation of a spec that holds the version of the driver whose files the spec names.
pub const DRIVER_VERSION: &str = "divvy.dev/driver-version";

/// Return the version in the text of `/sys/module/nvidia/version` or `/proc/driver/nvidia/version`. The first line of the latter is
/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar …` or
/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build …`.
pub fn loaded_version(text: &str) -> Option<&str> {
    text.lines().next()?.split_whitespace().find(|word| is_version(word))
}

/// Report whether a text is a driver version, such as `550.54.15` or `550.144`, and not another number in a file name.
pub fn is_version(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    let digits = |part: &&str| (1..=6).contains(&part.len()) && part.bytes().all(|c| c.is_ascii_digit());
    (2..=4).contains(&parts.len()) && parts.iter().all(digits)
}

/// Return the version of the loaded driver, or `None` if no NVIDIA driver is loaded.
pub fn loaded_driver(tree: &dyn Tree) -> Option<String> {
    let root = Root::open(tree, "/")?;
    ["/sys/module/nvidia/version", "/proc/driver/nvidia/version"]
        .iter()
        .find_map(|path| loaded_version(&root.text(path)?).map(str::to_owned))
}
