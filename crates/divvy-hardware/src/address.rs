//! PCI addresses.

use std::fmt;

/// The address of a function on the PCI bus. Addresses are ordered as on the bus, not as texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PciAddress {
    domain: u32,
    bus: u32,
    device: u32,
    function: u32,
}

impl PciAddress {
    /// Parse the kernel's name of a function, such as `0000:19:00.0`. Some machines have domains of five and more digits.
    pub(crate) fn parse(name: &str) -> Option<PciAddress> {
        let (domain, rest) = name.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let number = |text: &str, digits: std::ops::RangeInclusive<usize>, most: u32| {
            let is_hex = digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            let value = is_hex.then(|| u32::from_str_radix(text, 16).ok()).flatten();
            value.filter(|value| *value <= most)
        };
        Some(PciAddress {
            domain: number(domain, 4..=8, u32::MAX)?,
            bus: number(bus, 2..=2, 0xff)?,
            device: number(device, 2..=2, 0x1f)?,
            function: number(function, 1..=1, 7)?,
        })
    }

    /// Return the address of the first function of a device.
    pub(crate) fn of_card(domain: u32, bus: u32, device: u32) -> PciAddress {
        PciAddress {
            domain,
            bus,
            device,
            function: 0,
        }
    }

    /// Return the address without the function.
    pub(crate) fn card(self) -> PciAddress {
        PciAddress { function: 0, ..self }
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_ordered_as_on_the_bus_and_nonsense_is_none() {
        let names = [
            "0000:09:00.0",
            "0000:19:00.0",
            "0000:19:00.1",
            "0001:02:1f.7",
            "10000:e1:00.0",
        ];
        let read: Vec<PciAddress> = names.iter().map(|name| PciAddress::parse(name).expect(name)).collect();
        assert!(read.is_sorted());
        assert_eq!(read.iter().map(PciAddress::to_string).collect::<Vec<_>>(), names);
        for name in [
            "",
            "bind",
            "module",
            "0000:19:00",
            "000:19:00.0",
            "0000:19:20.0",
            "0000:19:00.8",
            "0000:+1:00.0",
            "0000:19:00.0/x",
        ] {
            assert_eq!(PciAddress::parse(name), None, "{name}");
        }
    }
}
