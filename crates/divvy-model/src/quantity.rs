use crate::Error;
use crate::limits::quoted;

/// Parse a Kubernetes Quantity and return it in thousandths of `1`, rounded up, as `resource.Quantity.MilliValue()` does.
///
/// The grammar (apimachinery `pkg/api/resource/quantity.go`) is a decimal number followed by a binary suffix (`Ki` … `Ei`), a
/// decimal suffix (`n` `u` `m` `k` `M` `G` `T` `P` `E`), or an exponent (`e3`, `E-2`).
///
/// # Errors
/// Fails if the text does not match the grammar, is negative, or exceeds `i64::MAX`. No quantity that Divvy reads can be
/// negative.
pub fn quantity_milli(text: &str) -> Result<u64, Error> {
    scaled(text, 3)
}

/// Parse a Kubernetes Quantity and return its value, rounded up, as `resource.Quantity.Value()` does. The errors are those of
/// [`quantity_milli`].
pub fn quantity_value(text: &str) -> Result<u64, Error> {
    scaled(text, 0)
}

/// Parse a quantity as [`quantity_value`] does, but discard the error. This is for callers that treat an invalid quantity as zero
/// and log their own warning.
pub fn parse_quantity(text: &str) -> Option<u64> {
    quantity_value(text).ok()
}

fn scaled(text: &str, thousandths: u32) -> Result<u64, Error> {
    let wrong = |why: &str| Error::invalid("quantity", format!("{} {why}", quoted(text)));
    let unsigned = text.strip_prefix('+').unwrap_or(text);
    if unsigned.starts_with('-') {
        return Err(wrong("is negative"));
    }
    let number_len = unsigned.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
    let (number, suffix) = unsigned.split_at(number_len);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(wrong("is not a number with an optional suffix such as 500m, 2k or 4Gi"));
    }
    let (binary, decimal): (u32, i32) = match suffix {
        "" => (0, 0),
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        exponent => {
            let digits = exponent
                .strip_prefix(['e', 'E'])
                .ok_or_else(|| wrong("has an unknown suffix"))?;
            // Parsing an i32 accepts a sign; the range keeps the loops below short.
            match digits.parse::<i32>() {
                Ok(value) if (-40..=40).contains(&value) => (0, value),
                _ => return Err(wrong("has an exponent that is not a number between -40 and 40")),
            }
        }
    };
    let overflow = || wrong("is too large");
    // value = digits · 10^(decimal − fraction digits + thousandths) · 2^binary, rounded up.
    let fraction = fraction.trim_end_matches('0');
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    if digits.len() > 30 {
        return Err(overflow());
    }
    let mut value: u128 = if digits.is_empty() {
        0
    } else {
        digits.parse().map_err(|_| overflow())?
    };
    value = value.checked_mul(1u128 << binary).ok_or_else(overflow)?;
    let fraction_len = i32::try_from(fraction.len()).map_err(|_| overflow())?;
    let mut exponent = decimal - fraction_len + i32::try_from(thousandths).unwrap_or(0);
    while exponent > 0 && value > 0 {
        value = value.checked_mul(10).ok_or_else(overflow)?;
        exponent -= 1;
    }
    let mut inexact = false;
    while exponent < 0 && value > 0 {
        inexact |= !value.is_multiple_of(10);
        value /= 10;
        exponent += 1;
    }
    if inexact {
        value += 1;
    }
    u64::try_from(value)
        .ok()
        .filter(|value| *value <= i64::MAX as u64)
        .ok_or_else(overflow)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn values_are_those_of_apimachinery() {
        for (text, value) in [
            ("3", 3),
            ("0", 0),
            ("10G", 10_000_000_000),
            ("4Gi", 4 << 30),
            ("500m", 1),
            ("1500m", 2),
            ("1.5Ki", 1536),
            (".5", 1),
            ("1.", 1),
            ("1e3", 1000),
            ("12E-1", 2),
            ("1E", 1_000_000_000_000_000_000),
            ("+7", 7),
            ("0.000000001", 1),
            ("100n", 1),
        ] {
            assert_eq!(quantity_value(text).expect(text), value, "{text}");
        }
        assert_eq!(quantity_milli("250m").expect("cpu"), 250);
        assert_eq!(quantity_milli("2").expect("cpu"), 2000);
        assert_eq!(quantity_milli("0.0001").expect("cpu"), 1);
    }

    #[test]
    fn wrong_quantities_are_refused() {
        for text in [
            "",
            "-1",
            "x",
            "1 Gi",
            "1gi",
            "1.2.3",
            "e3",
            "1e",
            "1e999",
            "1KiB",
            "9223372036854775808",
            "99999999999999999999999999999999999",
            "10Ei",
        ] {
            assert!(quantity_value(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn whole_numbers_are_themselves(value in 0..=i64::MAX as u64) {
            prop_assert_eq!(quantity_value(&value.to_string()).expect("whole"), value);
        }
    }
}
