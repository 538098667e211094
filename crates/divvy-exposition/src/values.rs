//! Values of samples, besides integers.

use std::fmt;

/// A number with a fixed number of decimals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decimal {
    /// The number without its decimal point.
    pub digits: i128,
    /// How many of the digits are behind the decimal point.
    pub decimals: u8,
}

impl<N: Into<i128>> From<N> for Decimal {
    fn from(whole: N) -> Decimal {
        Decimal {
            digits: whole.into(),
            decimals: 0,
        }
    }
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decimals = usize::from(self.decimals);
        let digits = format!("{:0width$}", self.digits.unsigned_abs(), width = decimals + 1);
        let (whole, behind) = digits.split_at(digits.len() - decimals);
        let sign = if self.digits < 0 { "-" } else { "" };
        let point = if decimals > 0 { "." } else { "" };
        write!(f, "{sign}{whole}{point}{behind}")
    }
}

/// A floating-point number, which is written with its decimal point also if it is whole.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Float(pub f64);

impl fmt::Display for Float {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(dtoa::Buffer::new().format(self.0))
    }
}

/// Observations, counted by their size.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    /// The upper ends of the buckets in their order, the last of which is infinite, and how many observations are in each. None is in two of them.
    pub buckets: Vec<(f64, u64)>,
    /// The sum of all observations.
    pub sum: f64,
}

impl Histogram {
    /// Return a histogram without observations. An infinite bucket follows these.
    pub fn new(ends: &[f64]) -> Histogram {
        let ends = ends.iter().copied().chain([f64::INFINITY]);
        Histogram {
            buckets: ends.map(|end| (end, 0)).collect(),
            sum: 0.0,
        }
    }

    /// Count an observation.
    pub fn observe(&mut self, value: f64) {
        self.sum += value;
        if let Some((_, count)) = self.buckets.iter_mut().find(|(end, _)| *end >= value) {
            *count += 1;
        }
    }
}
