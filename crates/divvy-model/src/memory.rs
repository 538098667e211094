use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// An amount of memory in MiB (2^20 bytes).
///
/// The name of each operation says whether it is checked or saturating. There is no operator `+`, which could overflow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MiB(pub u64);

impl MiB {
    /// 0 MiB.
    pub const ZERO: MiB = MiB(0);

    /// Convert bytes to whole MiB, rounded down. All device plugins round the totals from NVML in this way.
    pub const fn from_bytes(bytes: u64) -> MiB {
        MiB(bytes >> 20)
    }

    /// Return the sum, or `None` on overflow.
    pub const fn checked_add(self, other: MiB) -> Option<MiB> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(MiB(sum)),
            None => None,
        }
    }

    /// Return the sum, or `u64::MAX` on overflow. This is intended for totals in which an overflow means "too much".
    pub const fn saturating_add(self, other: MiB) -> MiB {
        MiB(self.0.saturating_add(other.0))
    }

    /// Return the difference, or zero if `other` is larger.
    pub const fn saturating_sub(self, other: MiB) -> MiB {
        MiB(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for MiB {
    /// Format as `4096 MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0)
    }
}

impl FromStr for MiB {
    type Err = Error;

    /// Parse `512MiB`, `2GiB`, or `0`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error::invalid(
                "amount of memory",
                format!("{text:?} is not an amount of memory; write it as 512MiB or 2GiB"),
            )
        };
        let (digits, factor) = match (text.strip_suffix("MiB"), text.strip_suffix("GiB")) {
            (Some(digits), _) => (digits, 1),
            (_, Some(digits)) => (digits, 1024),
            _ if text == "0" => (text, 1),
            _ => return Err(wrong()),
        };
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(wrong());
        }
        digits
            .parse::<u64>()
            .ok()
            .and_then(|count| count.checked_mul(factor))
            .map(MiB)
            .ok_or_else(wrong)
    }
}

/// The size of one unit of `aliyun.com/gpu-mem`: a whole number of MiB, the same for the whole cluster.
///
/// Its text form is `GiB` (the default), `MiB`, or a multiple such as `256MiB` or `2GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MemoryUnit(NonZeroU64);

impl MemoryUnit {
    /// 1024 MiB, gpushare's default.
    pub const GIB: MemoryUnit = MemoryUnit(NonZeroU64::new(1024).expect("1024 is not zero"));
    /// 1 MiB.
    pub const MIB: MemoryUnit = MemoryUnit(NonZeroU64::MIN);

    /// Make a unit of this many MiB; `None` for zero.
    pub const fn new(mib: u64) -> Option<MemoryUnit> {
        match NonZeroU64::new(mib) {
            Some(mib) => Some(MemoryUnit(mib)),
            None => None,
        }
    }

    /// Return the number of MiB in one unit.
    pub const fn mib(self) -> u64 {
        self.0.get()
    }

    /// Return the number of whole units in an amount of memory, rounded down. With GiB as the unit, 16384 MiB is 16 units and
    /// 15109 MiB is 14.
    pub const fn units_in(self, memory: MiB) -> u64 {
        memory.0 / self.0.get()
    }

    /// Return the memory of this many units, or `None` on overflow.
    pub const fn memory(self, units: u64) -> Option<MiB> {
        match units.checked_mul(self.0.get()) {
            Some(mib) => Some(MiB(mib)),
            None => None,
        }
    }
}

impl Default for MemoryUnit {
    fn default() -> Self {
        MemoryUnit::GIB
    }
}

impl fmt::Display for MemoryUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.get() {
            1 => f.write_str("MiB"),
            1024 => f.write_str("GiB"),
            mib if mib % 1024 == 0 => write!(f, "{}GiB", mib / 1024),
            mib => write!(f, "{mib}MiB"),
        }
    }
}

impl FromStr for MemoryUnit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error::invalid(
                "memory unit",
                format!("{text:?} is not a unit; write GiB, MiB, or a chunk such as 256MiB"),
            )
        };
        let (count, factor) = match text.strip_suffix("GiB") {
            Some(count) => (count, 1024),
            None => (text.strip_suffix("MiB").ok_or_else(wrong)?, 1),
        };
        let count = match count {
            "" => 1,
            digits if digits.bytes().all(|b| b.is_ascii_digit()) => digits.parse::<u64>().map_err(|_| wrong())?,
            _ => return Err(wrong()),
        };
        count.checked_mul(factor).and_then(MemoryUnit::new).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_and_written_the_same_way() {
        for (text, mib) in [("GiB", 1024), ("MiB", 1), ("256MiB", 256), ("2GiB", 2048), ("1500MiB", 1500)] {
            let unit: MemoryUnit = text.parse().expect(text);
            assert_eq!(unit.mib(), mib, "{text}");
            assert_eq!(unit.to_string(), text);
        }
        assert_eq!("1024MiB".parse::<MemoryUnit>().expect("chunk"), MemoryUnit::GIB);
    }

    #[test]
    fn a_wrong_unit_is_refused_with_an_example() {
        for text in [
            "",
            "gib",
            "GB",
            "0MiB",
            "-1MiB",
            "+1MiB",
            " MiB",
            "1.5GiB",
            "99999999999999999999MiB",
            "18446744073709551615GiB",
        ] {
            let error = text.parse::<MemoryUnit>().expect_err(text).to_string();
            assert!(error.contains("256MiB"), "{error}");
        }
    }

    #[test]
    fn an_amount_has_its_unit_written() {
        for (text, mib) in [("0", 0), ("0MiB", 0), ("512MiB", 512), ("2GiB", 2048)] {
            assert_eq!(text.parse::<MiB>().expect(text), MiB(mib));
        }
        for text in ["512", "", "MiB", "-1MiB", "1.5GiB", "18446744073709551615GiB"] {
            assert!(text.parse::<MiB>().is_err(), "{text}");
        }
    }

    #[test]
    fn gib_floors_as_gpushare_does() {
        for (mib, units) in [
            (16384, 16),
            (15109, 14),
            (11019, 10),
            (24564, 23),
            (81559, 79),
            (143_771, 140),
        ] {
            assert_eq!(MemoryUnit::GIB.units_in(MiB(mib)), units);
        }
    }
}
