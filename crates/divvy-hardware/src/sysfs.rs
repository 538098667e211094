//! Reads the kernel's small text files, within limits.

use std::collections::BTreeMap;

use divvy_host::{FileKind, Root, Tree};
use divvy_model::MiB;
use divvy_model::cgroup::owner_of_process;

/// The maximum size of a file in bytes. The kernel's own attributes have at most a page of 4 KiB.
const FILE_BYTES: usize = 64 << 10;
/// The maximum number of entries of a directory that are read.
const ENTRIES: usize = 4096;
/// The processes of the machine.
pub(crate) const PROCESSES: &str = "/proc";
/// The maximum size in bytes of a text that describes a GPU.
const TEXT_BYTES: usize = 96;

/// A directory. Links are followed, but never out of the machine's root.
#[derive(Debug, Clone)]
pub(crate) struct SysfsDirectory<'t> {
    tree: &'t dyn Tree,
    root: Root<'t>,
}

impl<'t> SysfsDirectory<'t> {
    /// Open the directory at a path of the machine.
    pub(crate) fn open(tree: &'t dyn Tree, path: &str) -> Option<SysfsDirectory<'t>> {
        let machine = Root::open(tree, "/")?;
        let (path, _) = machine.resolve(path)?;
        let root = Root::open(tree, &path)?;
        Some(SysfsDirectory { tree, root })
    }

    /// Open a directory below this one. The path must consist of real directories, not of links.
    pub(crate) fn below(&self, path: &str) -> Option<SysfsDirectory<'t>> {
        let (path, _) = self.root.resolve(path)?;
        let root = Root::open(self.tree, &self.root.host(&path))?;
        Some(SysfsDirectory { tree: self.tree, root })
    }

    /// Return the names in a directory below this one; empty if there is no such directory.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let mut names = self.root.names(path);
        names.truncate(ENTRIES);
        names
    }

    /// Return the first names in the directory, as the file system lists them, without reading all of a large directory.
    pub(crate) fn first_names(&self, most: usize) -> Vec<String> {
        self.root.first_names("/", most)
    }

    /// Return the target of the link `name` in the directory.
    pub(crate) fn link(&self, name: &str) -> Option<String> {
        match self.root.stat_in("/", name)?.kind {
            FileKind::Link(target) => Some(target),
            _ => None,
        }
    }

    /// Return the numbers that follow `prefix` in the names of a directory below this one, in ascending order.
    pub(crate) fn numbered(&self, path: &str, prefix: &str) -> Vec<u32> {
        let names = self.names(path);
        let numbers = names.iter().filter_map(|name| natural(name.strip_prefix(prefix)?));
        let mut numbers: Vec<u32> = numbers.collect();
        numbers.sort_unstable();
        numbers
    }

    /// Return the text of a file. A file that is too long, or not UTF-8, counts as missing.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        let bytes = self.root.read(path, FILE_BYTES + 1)?;
        (bytes.len() <= FILE_BYTES).then(|| String::from_utf8(bytes).ok()).flatten()
    }

    /// Return the number in a file. The kernel ends a number with a line feed, so a number without a line feed was cut off and is
    /// not used.
    pub(crate) fn number<T: std::str::FromStr>(&self, path: &str) -> Option<T> {
        self.text(path)?.strip_suffix('\n')?.trim().parse().ok()
    }
}

/// Return the UID of a process's pod. The directory is [`PROCESSES`].
pub(crate) fn pod_of(processes: &SysfsDirectory<'_>, pid: u32) -> Option<String> {
    let text = processes.text(&format!("/{pid}/cgroup"))?;
    Some(owner_of_process(&text)?.pod)
}

/// Read a number as the kernel writes it in names: decimal digits without leading zeros.
pub(crate) fn natural(text: &str) -> Option<u32> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    is_plain.then(|| text.parse().ok()).flatten()
}

/// Return the first line of a text that the driver or the card's manufacturer wrote, without control characters.
pub(crate) fn printable(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default().trim();
    let kept: String = line.chars().filter(|c| !c.is_control()).collect();
    kept[..kept.floor_char_boundary(TEXT_BYTES)].trim_end().to_owned()
}

/// Return the files of a PCI function's first group of sensors (kernel documentation, `hwmon/sysfs-interface.rst`).
pub(crate) fn sensors<'t>(function: &SysfsDirectory<'t>) -> Option<SysfsDirectory<'t>> {
    let number = *function.numbered("/hwmon", "hwmon").first()?;
    function.below(&format!("/hwmon/hwmon{number}"))
}

/// Convert a sensor's temperature.
pub(crate) fn celsius(thousandths: u64) -> Option<u32> {
    (thousandths / 1000).try_into().ok()
}

/// Convert a size from bytes. Return `None` if no GPU can be that large.
pub(crate) fn bounded(bytes: u64) -> Option<MiB> {
    (bytes < 1 << 60).then(|| MiB::from_bytes(bytes))
}

/// Lines of `key value`, where the value is a decimal number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SysfsProperties<'t>(BTreeMap<&'t str, Option<u64>>);

impl<'t> SysfsProperties<'t> {
    /// Parse the lines. Skip lines of another form, and skip the last line if it has no line feed, because it may have been cut
    /// off.
    pub(crate) fn parse(text: &'t str) -> SysfsProperties<'t> {
        let mut values = BTreeMap::new();
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            let Some((key, value)) = line.trim().split_once([' ', ':']) else {
                continue;
            };
            let value: Option<u64> = value.trim().parse().ok();
            // It is not known which of two different values is right.
            let known = values.entry(key).or_insert(value);
            if *known != value {
                *known = None;
            }
        }
        SysfsProperties(values)
    }

    /// Return the value of a key.
    pub(crate) fn get<T: TryFrom<u64>>(&self, key: &str) -> Option<T> {
        (*self.0.get(key)?)?.try_into().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_with_one_number_count() {
        for (text, expected) in [
            ("unique_id 18446744073709551615\n", Some(u64::MAX)),
            ("simd_count 4\nunique_id 7\n", Some(7)),
            ("unique_id 7\r\n", Some(7)),
            ("unique_id   7 \n", Some(7)),
            ("unique_id 7\nunique_id 7\n", Some(7)),
            ("unique_id 7\nunique_id 8\n", None),
            ("unique_id 7", None),
            ("unique_id -1\n", None),
            ("unique_id 18446744073709551616\n", None),
            ("unique_id\n", None),
            ("unique_idx 7\n", None),
            ("", None),
        ] {
            assert_eq!(SysfsProperties::parse(text).get::<u64>("unique_id"), expected, "{text:?}");
        }
        assert_eq!(SysfsProperties::parse("ue: 3\nce: 9\n").get::<u64>("ue"), Some(3));
        assert_eq!(SysfsProperties::parse("minor 4294967296\n").get::<u32>("minor"), None);
    }

    #[test]
    fn numbers_in_names_are_natural_ones() {
        for (text, expected) in [
            ("0", Some(0)),
            ("128", Some(128)),
            ("", None),
            ("01", None),
            ("-1", None),
            ("+1", None),
            ("1a", None),
            ("4294967296", None),
        ] {
            assert_eq!(natural(text), expected, "{text:?}");
        }
    }
}
