//! The names of PCI devices.

/// Return the name of one of NVIDIA's devices in the PCI ID database, the file `pci.ids` (<https://pci-ids.ucw.cz>).
pub fn pci_name(database: &str, device: u16) -> Option<&str> {
    let vendor = |line: &&str| !line.starts_with("10de ");
    let below = database.lines().skip_while(vendor).skip(1);
    let devices = below.take_while(|line| line.is_empty() || line.starts_with(['\t', '#']));
    let id = format!("{device:04x}");
    // The lines of a device's subsystems begin with two tabs.
    let mut names = devices.filter_map(|line| line.strip_prefix('\t')?.strip_prefix(&id)?.strip_prefix(' '));
    names.next().map(str::trim).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name is the one that the list has for the device's own vendor.
    #[test]
    fn a_device_name_comes_from_no_subsystem() {
        let database = "# a comment\n10dd  Another vendor\n\t20b0  Another device\n10de  NVIDIA Corporation\n\t0001  First\n\t\t20b0 20b0  A subsystem\n\n\
                        \t20b0  GA100 [A100 SXM4 40GB]\n10df  Emulex\n\t2330  Not NVIDIA's\nC 03  Display controller\n";
        for (device, name) in [
            (0x20b0, Some("GA100 [A100 SXM4 40GB]")),
            (1, Some("First")),
            (0x2330, None),
            (3, None),
        ] {
            assert_eq!(pci_name(database, device), name, "{device:04x}");
        }
        assert_eq!(pci_name("", 1), None);
        assert_eq!(pci_name("10de  NVIDIA\n\t0001  ", 1), None);
    }
}
