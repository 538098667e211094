//! What is said about a metric. Its samples, the lists of metrics, and the reference have it from there.

/// The type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A value that only increases.
    Counter,
    /// A value that increases and decreases.
    Gauge,
    /// Observations by their size.
    Histogram,
}

impl MetricKind {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        }
    }
}

/// A metric as it is declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// The name as it is in the text format. That of a counter ends in `_total`, except for names that others gave to their counters; those can only be
    /// shown in the text format.
    pub name: &'static str,
    /// The type.
    pub kind: MetricKind,
    /// The help text.
    pub help: &'static str,
}

/// Declare metrics as constants: `NAME: MetricKind = "name", "Help.";`. With `LIST;` at the beginning, that constant has all of them, for the parent module.
#[macro_export]
macro_rules! metrics {
    ($list:ident; $($metric:ident: $kind:ident = $name:literal, $help:literal;)*) => {
        $crate::metrics! { $($metric: $kind = $name, $help;)* }
        pub(super) const $list: &[$crate::Metric] = &[$($metric),*];
    };
    ($($metric:ident: $kind:ident = $name:literal, $help:literal;)*) => {
        $(
            const $metric: $crate::Metric = $crate::Metric {
                name: $name,
                kind: $crate::MetricKind::$kind,
                help: $help,
            };
        )*
    };
}
