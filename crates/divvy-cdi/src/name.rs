//! Qualified names of CDI devices: `vendor/class=device`.

use std::fmt;
use std::str::FromStr;

use thiserror::Error as ThisError;

/// The error for an invalid device name.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum NameError {
    /// The name does not have the form `vendor/class=device`.
    #[error("{0:?} is not the name of a CDI device; write VENDOR/CLASS=DEVICE, such as nvidia.com/gpu=0")]
    Unqualified(String),
    /// One part of the name is invalid.
    #[error("{name:?} is not the {part} of a CDI name: {rule}")]
    Part {
        /// `vendor`, `class`, or `device`.
        part: &'static str,
        /// The text of that part.
        name: String,
        /// The rule that it violates.
        rule: &'static str,
    },
}

const LETTER_FIRST: &str =
    "it must begin with a letter, end with a letter or digit, and otherwise have only letters, digits, `_`, `-`, and `.`";
const DEVICE: &str =
    "it must begin and end with a letter or digit, and otherwise have only letters, digits, `_`, `-`, `.`, and `:`";

/// The name with which a device is requested.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QualifiedName {
    /// The vendor, such as `nvidia.com`.
    pub vendor: String,
    /// The class, such as `gpu`.
    pub class: String,
    /// The device, such as `0`.
    pub device: String,
}

impl FromStr for QualifiedName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<QualifiedName, NameError> {
        let unqualified = || NameError::Unqualified(text.chars().take(300).collect());
        let (kind, device) = text.split_once('=').ok_or_else(unqualified)?;
        let (vendor, class) = kind.split_once('/').ok_or_else(unqualified)?;
        check_vendor(vendor)?;
        check_class(class)?;
        check_device(device)?;
        Ok(QualifiedName {
            vendor: vendor.to_owned(),
            class: class.to_owned(),
            device: device.to_owned(),
        })
    }
}

impl fmt::Display for QualifiedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}={}", self.vendor, self.class, self.device)
    }
}

/// Check the name of a vendor.
pub(super) fn check_vendor(name: &str) -> Result<(), NameError> {
    check(name, "vendor", LETTER_FIRST, u8::is_ascii_alphabetic, b"_-.")
}

/// Check the name of a class; a dot in it needs CDI 0.6.0.
pub(super) fn check_class(name: &str) -> Result<(), NameError> {
    check(name, "class", LETTER_FIRST, u8::is_ascii_alphabetic, b"_-.")
}

/// Check the name of a device; a digit at the beginning needs CDI 0.5.0.
pub(super) fn check_device(name: &str) -> Result<(), NameError> {
    check(name, "device", DEVICE, u8::is_ascii_alphanumeric, b"_-.:")
}

fn check(name: &str, part: &'static str, rule: &'static str, first: fn(&u8) -> bool, inside: &[u8]) -> Result<(), NameError> {
    let bytes = name.as_bytes();
    let good = bytes.first().is_some_and(first)
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || inside.contains(byte));
    if good {
        Ok(())
    } else {
        Err(NameError::Part {
            part,
            name: name.chars().take(300).collect(),
            rule,
        })
    }
}
