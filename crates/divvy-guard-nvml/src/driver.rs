//! Questions to the real library, in addition to the function that the program called.

use core::ffi::c_char;

use divvy_shadow::{RealFunction, c_name};

use crate::nvml::{NvmlDevice, NvmlReturn, NvmlUint, SUCCESS};

/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`.
const UUID: usize = 96;
/// `NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE`.
const VERSION: usize = 80;

/// The UUID of a GPU. `None` for a part of a GPU (MIG), and if the driver does not tell it.
///
/// It is asked in every call. A handle may mean another GPU after `nvmlShutdown`, so a copy here could be that of a wrong GPU.
pub(crate) fn uuid(device: NvmlDevice) -> Option<[u8; 16]> {
    static FUNCTION: RealFunction = RealFunction::new();
    let found = FUNCTION.get(c_name!(nvmlDeviceGetUUID))?;
    // SAFETY: the driver's function of this name has these arguments, by nvml.h.
    let function: unsafe extern "C" fn(NvmlDevice, *mut c_char, NvmlUint) -> NvmlReturn = unsafe { core::mem::transmute(found) };
    let mut text = [0_u8; UUID];
    // SAFETY: the buffer has this length. The program gave the same device to the driver, which knows it.
    let code = unsafe { function(device, text.as_mut_ptr().cast(), UUID as NvmlUint) };
    if code == SUCCESS { parse(&text) } else { None }
}

/// Read `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, up to its end.
fn parse(text: &[u8]) -> Option<[u8; 16]> {
    let (uuid, rest) = text.strip_prefix(b"GPU-")?.split_at_checked(36)?;
    if rest.first() != Some(&0) {
        return None;
    }
    let mut value: u128 = 0;
    for (index, byte) in (0..36).zip(uuid) {
        match (index, byte) {
            (8 | 13 | 18 | 23, b'-') => {}
            (8 | 13 | 18 | 23, _) => return None,
            (_, digit) => value = value << 4 | u128::from(char::from(*digit).to_digit(16)?),
        }
    }
    Some(value.to_be_bytes())
}

/// Whether `…_v3` of the functions for processes has a larger structure than before and after: drivers from 535.43 to 535.86
/// (<https://github.com/XuehaiPan/nvitop/pull/89>).
pub(crate) fn has_large_processes() -> bool {
    static FUNCTION: RealFunction = RealFunction::new();
    let Some(found) = FUNCTION.get(c_name!(nvmlSystemGetDriverVersion)) else {
        return false;
    };
    // SAFETY: the driver's function of this name has these arguments, by nvml.h.
    let function: unsafe extern "C" fn(*mut c_char, NvmlUint) -> NvmlReturn = unsafe { core::mem::transmute(found) };
    let mut text = [0_u8; VERSION];
    // SAFETY: the buffer has this length.
    let code = unsafe { function(text.as_mut_ptr().cast(), VERSION as NvmlUint) };
    code == SUCCESS && large(&text)
}

/// Whether a version is one of these.
fn large(version: &[u8]) -> bool {
    match version {
        // The second number has two digits: 535.43.02, 535.54.03, 535.86.10. The next one was 535.98.
        [b'5', b'3', b'5', b'.', tens @ b'4'..=b'8', ones @ b'0'..=b'9', end, ..] => {
            matches!(end, b'.' | 0) && (*tens, *ones) >= (b'4', b'3')
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_of_a_whole_gpu_is_read_and_nothing_else() {
        let bytes = [0, 1, 2, 3, 4, 5, 0x46, 7, 0x88, 9, 10, 11, 12, 13, 14, 0xff];
        let cases: [(&str, Option<[u8; 16]>); 9] = [
            ("GPU-00010203-0405-4607-8809-0a0b0c0d0eff\0", Some(bytes)),
            ("GPU-00010203-0405-4607-8809-0A0B0C0D0EFF\0rest", Some(bytes)),
            ("GPU-00010203-0405-4607-8809-0a0b0c0d0eff", None),
            ("GPU-00010203-0405-4607-8809-0a0b0c0d0eff0\0", None),
            ("GPU-00010203-0405-4607-8809-0a0b0c0d0ef\0\0", None),
            ("GPU-0001020300405-4607-8809-0a0b0c0d0eff\0", None),
            ("GPU-../../../405-4607-8809-0a0b0c0d0eff0\0", None),
            ("MIG-00010203-0405-4607-8809-0a0b0c0d0eff\0", None),
            ("\0", None),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text.as_bytes()), expected, "{text:?}");
        }
    }

    #[test]
    fn only_the_first_drivers_of_535_have_large_processes() {
        let cases = [
            ("535.43.02", true),
            ("535.54.03", true),
            ("535.86.10", true),
            ("535.42\0", false),
            ("535.98\0", false),
            ("535.104.05", false),
            ("535.5\0\0", false),
            ("530.41.03", false),
            ("550.54.15", false),
            ("", false),
        ];
        for (version, expected) in cases {
            assert_eq!(large(version.as_bytes()), expected, "{version}");
        }
    }
}
