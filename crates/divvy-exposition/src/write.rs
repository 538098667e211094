//! Families that are written by hand in the text format 0.0.4. In OpenMetrics every counter ends in `_total`, so names that others gave to their
//! counters can only be shown in the text format.

use std::fmt;

/// The type of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A value that only increases.
    Counter,
    /// A value that increases and decreases.
    Gauge,
}

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

/// A family to which samples are written.
#[derive(Debug)]
pub struct Family<'t> {
    text: &'t mut String,
    name: &'t str,
}

/// Describe a family at the end of a text in the format 0.0.4. All samples of the family follow at once; the format allows no others in between.
pub fn family<'t>(text: &'t mut String, name: &'t str, kind: Kind, help: &str) -> Family<'t> {
    for part in ["# HELP ", name, " "] {
        text.push_str(part);
    }
    escape(text, help, false);
    let kind = match kind {
        Kind::Counter => " counter\n",
        Kind::Gauge => " gauge\n",
    };
    for part in ["\n# TYPE ", name, kind] {
        text.push_str(part);
    }
    Family { text, name }
}

impl Family<'_> {
    /// Write one sample. The labels' names must be valid; their values may be any text.
    pub fn sample<'l>(&mut self, labels: impl IntoIterator<Item = (&'l str, &'l str)>, value: impl Into<Decimal>) {
        self.text.push_str(self.name);
        let mut separator = '{';
        for (name, value) in labels {
            self.text.push(separator);
            self.text.push_str(name);
            self.text.push_str("=\"");
            escape(self.text, value, true);
            self.text.push('"');
            separator = ',';
        }
        if separator == ',' {
            self.text.push('}');
        }
        self.text.push(' ');
        self.text.push_str(&value.into().to_string());
        self.text.push('\n');
    }
}

fn escape(text: &mut String, value: &str, quotes: bool) {
    for character in value.chars() {
        match character {
            '\\' => text.push_str(r"\\"),
            '\n' => text.push_str(r"\n"),
            '"' if quotes => text.push_str("\\\""),
            _ => text.push(character),
        }
    }
}
