//! Amounts in the form in which people read them.

use divvy_model::{MemoryUnit, MiB};

/// Format an amount of memory: `20 GiB`, `7.5 GiB`, or `1500 MiB` in a cluster whose unit is not a multiple of 1 GiB. All amounts
/// of one answer have the same unit.
pub fn amount(memory: MiB, unit: MemoryUnit) -> String {
    const GIB: u64 = 1024;
    if !unit.mib().is_multiple_of(GIB) {
        return format!("{} MiB", memory.0);
    }
    match (memory.0 / GIB, memory.0 % GIB) {
        (whole, 0) => format!("{whole} GiB"),
        // Rounded down, so that free memory is never overstated.
        (whole, rest) => format!("{whole}.{} GiB", rest * 10 / GIB),
    }
}

/// Format an amount of a resource: 1500 of CPU is `1500m`, memory is in GiB or MiB, and everything else is a count.
pub fn quantity(resource: &str, amount: u64) -> String {
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    match resource {
        "cpu" if amount.is_multiple_of(1000) => (amount / 1000).to_string(),
        "cpu" => format!("{amount}m"),
        _ if in_bytes(resource) && amount.is_multiple_of(GIB) => format!("{} GiB", amount / GIB),
        _ if in_bytes(resource) && amount >= MIB => format!("{} MiB", amount / MIB),
        _ => amount.to_string(),
    }
}

fn in_bytes(resource: &str) -> bool {
    matches!(resource, "memory" | "ephemeral-storage") || resource.starts_with("hugepages-")
}

/// Format a count with separators for thousands: `1,204`.
pub(crate) fn thousands(count: usize) -> String {
    let digits = count.to_string();
    let first = digits.len() % 3;
    let mut text = digits[..first].to_owned();
    for start in (first..digits.len()).step_by(3) {
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(&digits[start..start + 3]);
    }
    text
}

/// Join items to a list: `a`, `a and b`, `a, b and c`.
pub(crate) fn list(items: &[String]) -> String {
    match items {
        [] => String::new(),
        [one] => one.clone(),
        [others @ .., last] => format!("{} and {last}", others.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All amounts of one cluster have the same unit.
    #[test]
    fn amounts_are_never_rounded_up() {
        let mib = |text: &str| text.parse::<MemoryUnit>().expect("a unit");
        for (memory, unit, expected) in [
            (20 * 1024, "GiB", "20 GiB"),
            (7680, "GiB", "7.5 GiB"),
            (1023, "GiB", "0.9 GiB"),
            (0, "GiB", "0 GiB"),
            (20 * 1024, "256MiB", "20480 MiB"),
            (1500, "MiB", "1500 MiB"),
        ] {
            assert_eq!(amount(MiB(memory), mib(unit)), expected);
        }
    }

    #[test]
    fn other_resources_are_read_in_their_own_units() {
        for (resource, value, expected) in [
            ("cpu", 2000, "2"),
            ("cpu", 1500, "1500m"),
            ("memory", 3 << 30, "3 GiB"),
            ("memory", 1500 << 20, "1500 MiB"),
            ("memory", 12, "12"),
            ("hugepages-2Mi", 1 << 30, "1 GiB"),
            ("nvidia.com/gpu", 1, "1"),
        ] {
            assert_eq!(quantity(resource, value), expected);
        }
        assert_eq!(
            (thousands(12), thousands(1204), thousands(1_000_000)),
            ("12".into(), "1,204".into(), "1,000,000".into())
        );
    }
}
