//! Which format a client gets.

/// A format of `/metrics`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsFormat {
    /// Prometheus's text format 0.0.4.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl MetricsFormat {
    /// Both formats.
    pub const ALL: [MetricsFormat; 2] = [MetricsFormat::Text, MetricsFormat::OpenMetrics];

    /// Return the value of the `Content-Type` header. Prometheus 3 rejects an answer whose value it does not know.
    pub const fn content_type(self) -> &'static str {
        match self {
            MetricsFormat::Text => "text/plain; version=0.0.4; charset=utf-8",
            MetricsFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// Choose the format by the values of the `Accept` headers, by the rules of RFC 9110, section 12.5.1. What Prometheus sends is described in
    /// <https://prometheus.io/docs/instrumenting/content_negotiation/>.
    ///
    /// - A client that prefers neither gets the text format, as from `client_golang`: a browser, `curl`, or a client without the header.
    /// - A client that names OpenMetrics and gives both formats the same weight gets OpenMetrics.
    /// - A client that accepts neither gets the text format, because a person may read it.
    /// - OpenMetrics 0.0.1 is not OpenMetrics 1.0.0. A client that accepts nothing but 0.0.1 gets 1.0.0, which is the nearest.
    pub fn negotiate<'a>(accept: impl IntoIterator<Item = &'a str>) -> MetricsFormat {
        let ranges = accept.into_iter().flat_map(|value| value.split(',')).filter_map(Range::parse);
        let [mut text, mut open_metrics, mut older] = [Weight::NONE; 3];
        for range in ranges {
            text = text.max(range.weight("text", "plain", "0.0.4"));
            open_metrics = open_metrics.max(range.weight(APPLICATION, OPEN_METRICS, "1.0.0"));
            older = older.max(range.weight(APPLICATION, OPEN_METRICS, "0.0.1"));
        }
        let is_preferred = match open_metrics.quality {
            0 => text.quality == 0 && older.quality > 0,
            quality if quality == text.quality => open_metrics.precision >= Precision::Type,
            quality => quality > text.quality,
        };
        if is_preferred {
            MetricsFormat::OpenMetrics
        } else {
            MetricsFormat::Text
        }
    }
}

const APPLICATION: &str = "application";
const OPEN_METRICS: &str = "openmetrics-text";

/// How exactly a media range names a format. The most precise range that matches a format decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Precision {
    None,
    Anything,
    MainType,
    Type,
    Version,
}

/// What a header says about one format. The order is that of precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Weight {
    precision: Precision,
    /// In thousandths.
    quality: u16,
}

impl Weight {
    const NONE: Weight = Weight {
        precision: Precision::None,
        quality: 0,
    };
}

/// One element of an `Accept` header.
#[derive(Debug)]
struct Range<'a> {
    main_type: &'a str,
    subtype: &'a str,
    version: Option<&'a str>,
    quality: u16,
}

impl<'a> Range<'a> {
    /// Parse an element. Parameters other than `version` and `q` are ignored: they say nothing about these formats.
    fn parse(element: &'a str) -> Option<Range<'a>> {
        let mut parts = element.split(';').map(str::trim);
        let (main_type, subtype) = parts.next()?.split_once('/')?;
        let mut range = Range {
            main_type,
            subtype,
            version: None,
            quality: 1000,
        };
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            let value = value.trim().trim_matches('"');
            match name.trim() {
                "q" | "Q" => range.quality = thousandths(value)?,
                name if name.eq_ignore_ascii_case("version") => range.version = Some(value),
                _ => {}
            }
        }
        Some(range)
    }

    fn weight(&self, main_type: &str, subtype: &str, version: &str) -> Weight {
        let is_type = self.main_type.eq_ignore_ascii_case(main_type);
        let precision = match (self.main_type, self.subtype, self.version) {
            ("*", "*", _) => Precision::Anything,
            (_, "*", _) if is_type => Precision::MainType,
            (_, found, None) if is_type && found.eq_ignore_ascii_case(subtype) => Precision::Type,
            (_, found, Some(asked)) if is_type && found.eq_ignore_ascii_case(subtype) && asked == version => Precision::Version,
            _ => return Weight::NONE,
        };
        Weight {
            precision,
            quality: self.quality,
        }
    }
}

/// Parse a weight: `0` to `1`, with at most three decimals; more decimals are ignored.
fn thousandths(text: &str) -> Option<u16> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    let mut value = match whole {
        "0" | "" => 0,
        "1" => 1,
        _ => return None,
    };
    let mut digits = decimals.bytes();
    for _ in 0..3 {
        let digit = match digits.next() {
            None => 0,
            Some(digit @ b'0'..=b'9') => u16::from(digit - b'0'),
            Some(_) => return None,
        };
        value = value * 10 + digit;
    }
    Some(value.min(1000))
}
