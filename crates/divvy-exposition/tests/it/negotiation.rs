//! Which client gets which format.

use divvy_exposition::MetricsFormat::{self, OpenMetrics, Text};
use proptest::prelude::*;

const CASES: &[(&[&str], MetricsFormat, &str)] = &[
    (
        &[
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        ],
        OpenMetrics,
        "Prometheus 2",
    ),
    (
        &[
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,\
           text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
        ],
        OpenMetrics,
        "Prometheus 3",
    ),
    (
        &[
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,\
           application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,\
           text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
        ],
        OpenMetrics,
        "Prometheus 3 with native histograms",
    ),
    (
        &["application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"],
        Text,
        "a Prometheus 2 that does not know OpenMetrics 1.0.0",
    ),
    (
        &["application/openmetrics-text; version=0.0.1"],
        OpenMetrics,
        "nothing nearer is there",
    ),
    (&["text/plain;version=0.0.4;q=1,*/*;q=0.1"], Text, "Prometheus 2.0"),
    (
        &[
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7,text/plain;version=0.0.4;q=0.3",
        ],
        Text,
        "Prometheus 1",
    ),
    (
        &["text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.8"],
        Text,
        "the order of `scrape_protocols` is the user's",
    ),
    (&[], Text, "no header"),
    (&["*/*"], Text, "curl"),
    (
        &["text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"],
        Text,
        "a browser",
    ),
    (&["application/openmetrics-text"], OpenMetrics, "without a version"),
    (
        &["application/openmetrics-text; version=\"1.0.0\"; charset=utf-8"],
        OpenMetrics,
        "a quoted version",
    ),
    (&["Application/OpenMetrics-Text; Version=1.0.0"], OpenMetrics, "upper case"),
    (
        &["text/plain", "application/openmetrics-text"],
        OpenMetrics,
        "two headers, the same weight",
    ),
    (
        &["text/plain;q=0.5", "application/openmetrics-text;q=0.51"],
        OpenMetrics,
        "two headers",
    ),
    (&["text/*", "application/openmetrics-text;q=0.5"], Text, "a main type"),
    (&["application/*, text/*;q=0.9"], OpenMetrics, "another main type"),
    (&["application/*, text/*"], Text, "neither is named"),
    (&["*/*, application/openmetrics-text;q=0"], Text, "OpenMetrics is refused"),
    (&["*/*;q=0.5, text/plain;q=0"], OpenMetrics, "the text format is refused"),
    (
        &["*/*;q=0.5, text/plain;q=0.1"],
        OpenMetrics,
        "the precise range counts, not the higher weight",
    ),
    (&["application/openmetrics-text;version=2.0.0"], Text, "another version"),
    (&["application/json"], Text, "neither format"),
    (&["application/openmetrics-text;q=0, text/plain;q=0"], Text, "neither format"),
    (
        &["application/openmetrics-text;q=x, */*;q=0.1"],
        Text,
        "a weight that cannot be read",
    ),
    (
        &[",;=/,q=1,application/openmetrics-text ; q = 1.000 ,"],
        OpenMetrics,
        "broken elements are skipped",
    ),
];

#[test]
fn each_client_gets_the_format_that_it_prefers() {
    for (accept, expected, client) in CASES {
        assert_eq!(
            MetricsFormat::negotiate(accept.iter().copied()),
            *expected,
            "{client}: {accept:?}"
        );
    }
}

#[test]
fn content_types_are_those_that_prometheus_3_knows() {
    let types = MetricsFormat::ALL.map(MetricsFormat::content_type);
    assert_eq!(types[0], "text/plain; version=0.0.4; charset=utf-8");
    assert_eq!(types[1], "application/openmetrics-text; version=1.0.0; charset=utf-8");
}

proptest! {
    /// Elements of the header that name other types change nothing.
    #[test]
    fn any_accept_header_gets_a_format(
        noise in "[ -~]{0,40}",
        weights in (0..=1000u16, 0..=1000u16),
    ) {
        let _any: MetricsFormat = MetricsFormat::negotiate([noise.as_str()]);
        let (text, open_metrics) = weights;
        let quality = |weight: u16| format!("{}.{:03}", weight / 1000, weight % 1000);
        let accept = format!("x/y;a=b, text/plain;q={}, application/openmetrics-text;q={}, image/*", quality(text), quality(open_metrics));
        let expected = if open_metrics > 0 && open_metrics >= text { OpenMetrics } else { Text };
        prop_assert_eq!(MetricsFormat::negotiate([accept.as_str()]), expected);
    }
}
