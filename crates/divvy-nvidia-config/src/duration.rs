//! Durations as Go's `time.ParseDuration` reads them, and its words for what is not one.

const UNITS: [(&str, u128); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];
/// How many digits after the point count. A nanosecond is the ninth digit of a second, and the thirteenth of an hour.
const DIGITS: usize = 18;

/// Why a text is not a duration. It holds the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WrongDuration {
    #[error("time: invalid duration {0:?}")]
    Invalid(String),
    #[error("time: missing unit in duration {0:?}")]
    NoUnit(String),
    #[error("time: unknown unit {unit:?} in duration {text:?}")]
    UnknownUnit { unit: String, text: String },
}

/// Parse a duration such as `1h30m`, `.5s`, or `-5s`. Return nanoseconds. Numbers need a unit, except 0.
pub(crate) fn parse(text: &str) -> Result<i64, WrongDuration> {
    let invalid = || WrongDuration::Invalid(text.to_owned());
    let (is_negative, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Ok(0);
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut sum: u128 = 0;
    while !rest.is_empty() {
        let (whole, after) = digits(rest);
        let (part, after) = match after.strip_prefix('.') {
            Some(after) => digits(after),
            None => ("", after),
        };
        if whole.is_empty() && part.is_empty() {
            return Err(invalid());
        }
        let end = after.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(after.len());
        let (unit, next) = after.split_at(end);
        if unit.is_empty() {
            return Err(WrongDuration::NoUnit(text.to_owned()));
        }
        let Some((_, nanoseconds)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err(WrongDuration::UnknownUnit {
                unit: unit.to_owned(),
                text: text.to_owned(),
            });
        };
        let term = nanoseconds_of(whole, part, *nanoseconds).ok_or_else(invalid)?;
        sum = sum.checked_add(term).ok_or_else(invalid)?;
        rest = next;
    }
    let sum = i64::try_from(sum).map_err(|_| invalid())?;
    Ok(if is_negative { -sum } else { sum })
}

fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

fn nanoseconds_of(whole: &str, part: &str, unit: u128) -> Option<u128> {
    let number = |digits: &str| {
        if digits.is_empty() {
            Some(0)
        } else {
            digits.parse::<u128>().ok()
        }
    };
    let part = part.get(..DIGITS).unwrap_or(part);
    let scale = 10_u128.checked_pow(u32::try_from(part.len()).ok()?)?;
    let part = number(part)?.checked_mul(unit)?.checked_div(scale)?;
    number(whole)?.checked_mul(unit)?.checked_add(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_read_as_go_reads_it() {
        for (text, expected) in [
            ("60s", Ok(60_000_000_000)),
            ("1h30m", Ok(5_400_000_000_000)),
            (".5s", Ok(500_000_000)),
            ("5.s", Ok(5_000_000_000)),
            ("1.5h", Ok(5_400_000_000_000)),
            ("-5s", Ok(-5_000_000_000)),
            ("+1ms", Ok(1_000_000)),
            ("2µs3us", Ok(5_000)),
            ("0", Ok(0)),
            ("-0", Ok(0)),
            ("0.0000000000000000000000009s", Ok(0)),
            ("9223372036854775807ns", Ok(i64::MAX)),
            ("", Err("time: invalid duration \"\"")),
            ("-", Err("time: invalid duration \"-\"")),
            ("x", Err("time: invalid duration \"x\"")),
            (".s", Err("time: invalid duration \".s\"")),
            ("1.2.3s", Err("time: missing unit in duration \"1.2.3s\"")),
            ("5", Err("time: missing unit in duration \"5\"")),
            ("1day", Err("time: unknown unit \"day\" in duration \"1day\"")),
            ("2m 3s", Err("time: unknown unit \"m \" in duration \"2m 3s\"")),
            (
                "9223372036854775808ns",
                Err("time: invalid duration \"9223372036854775808ns\""),
            ),
            (
                "99999999999999999999h",
                Err("time: invalid duration \"99999999999999999999h\""),
            ),
        ] {
            assert_eq!(
                parse(text).map_err(|error| error.to_string()),
                expected.map_err(str::to_owned),
                "{text}"
            );
        }
    }
}
