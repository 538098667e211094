//! Reads the capability that a virtual GPU has in its PCI configuration space. Its bytes contain the version and the branch of
//! the host's driver (NVIDIA/k8s-device-plugin, internal/vgpu).

/// The offset of the status register. The bit [`HAS_CAPABILITIES`] in it says whether there are capabilities.
const STATUS: usize = 6;
const HAS_CAPABILITIES: u8 = 0x10;
/// The offset of the byte that holds the offset of the first capability.
const FIRST: usize = 0x34;
/// The id of a vendor-specific capability.
const VENDOR_SPECIFIC: u8 = 0x09;
/// The length of a configuration space with capabilities.
pub(crate) const CONFIG: usize = 256;
/// The length of the fields for the version and the branch.
const TEXT: usize = 10;

/// The driver of the host, as the capability describes it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct HostDriver {
    pub(crate) version: String,
    pub(crate) branch: String,
}

/// Return the host's driver, or `None` if this is not a virtual GPU. The search always ends, whatever the bytes are.
pub(crate) fn host_driver(config: &[u8]) -> Option<HostDriver> {
    let capability = vendor_specific(config)?;
    if capability.get(3..5)? != b"VF" {
        return None;
    }
    Some(record(capability.get(5..)?).unwrap_or_default())
}

/// Return the vendor-specific capability, starting with its id.
fn vendor_specific(config: &[u8]) -> Option<&[u8]> {
    if config.len() < CONFIG || config[STATUS] & HAS_CAPABILITIES == 0 {
        return None;
    }
    let mut at = usize::from(config[FIRST]);
    // A broken list may be a ring. There is no room for more capabilities than this.
    for _ in 0..CONFIG / 4 {
        let [id, next] = *config.get(at..at + 2)? else { return None };
        if at < FIRST {
            return None;
        }
        if id == VENDOR_SPECIFIC {
            let length = usize::from(*config.get(at + 2)?);
            return config.get(at..at + length);
        }
        at = usize::from(next);
    }
    None
}

/// Return the content of the record with the id 0. Each record begins with its id and its length.
fn record(mut records: &[u8]) -> Option<HostDriver> {
    loop {
        let [id, length] = *records.get(..2)? else { return None };
        if id == 0 {
            let text = |at: usize| {
                let bytes = records.get(at..at + TEXT)?;
                let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(TEXT);
                Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
            };
            return Some(HostDriver {
                version: text(2)?,
                branch: text(2 + TEXT)?,
            });
        }
        // A record without a length would be read forever.
        records = records.get(usize::from(length).max(2)..)?;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config(capability: &[u8]) -> Vec<u8> {
        let mut config = vec![0; CONFIG];
        config[STATUS] = HAS_CAPABILITIES;
        config[FIRST] = 0x40;
        config[0x40..0x42].copy_from_slice(&[0x05, 0x60]);
        config[0x60..0x60 + capability.len()].copy_from_slice(capability);
        config
    }

    fn capability(records: &[u8]) -> Vec<u8> {
        let length = u8::try_from(5 + records.len()).expect("short");
        [&[VENDOR_SPECIFIC, 0, length, b'V', b'F'], records].concat()
    }

    #[test]
    fn the_record_with_the_id_0_names_the_hosts_driver() {
        let mut records = vec![2, 4, 9, 9, 0, 22];
        records.extend(b"460.16\0\0\0\0r460_00\0\0\0");
        let found = host_driver(&config(&capability(&records))).expect("a virtual GPU");
        assert_eq!((found.version.as_str(), found.branch.as_str()), ("460.16", "r460_00"));
    }

    #[test]
    fn what_is_no_virtual_gpu_or_broken_is_no_error() {
        let passed_through = [
            VENDOR_SPECIFIC,
            0,
            20,
            b'P',
            b'T',
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        ];
        assert_eq!(host_driver(&config(&passed_through)), None);
        for records in [&[][..], &[1, 0], &[1, 0, 1, 0], &[0, 22, b'4'], &[1, 200]] {
            assert_eq!(
                host_driver(&config(&capability(records))),
                Some(HostDriver::default()),
                "{records:?}"
            );
        }
        let mut ring = config(&[]);
        ring[0x60..0x62].copy_from_slice(&[0x05, 0x40]);
        assert_eq!(host_driver(&ring), None);
        assert_eq!(host_driver(&[]), None);
    }

    proptest! {
        #[test]
        fn any_bytes_have_an_answer(mut bytes in proptest::collection::vec(any::<u8>(), CONFIG)) {
            bytes[STATUS] |= HAS_CAPABILITIES;
            let _ = host_driver(&bytes);
        }
    }
}
