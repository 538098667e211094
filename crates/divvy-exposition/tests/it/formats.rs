//! A page in both formats.

use std::collections::{BTreeMap, BTreeSet};

use divvy_exposition::{Float, Histogram, MetricsFormat, MetricsPage};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::reader;

/// Text with many of the characters that are escaped, or that end a line for some programs.
pub(crate) fn any_text() -> impl Strategy<Value = String> {
    let character = prop_oneof![
        4 => any::<char>(),
        4 => proptest::sample::select(vec!['\\', '"', '\n', '\r', 'n', '{', '}', ',', '=', ' ', '#', '\u{85}', '\u{2028}', '\u{0}']),
    ];
    vec(character, 0..12).prop_map(String::from_iter)
}

divvy_exposition::metrics! {
    THINGS: Counter = "things_total", "Things.";
    SIZE: Gauge = "size_bytes", "Size \"in bytes\".";
    TIMES: Histogram = "times", "Times.";
    NOTHING: Gauge = "nothing", "Without samples.";
    ALONE: Counter = "alone_total", "Alone.";
    RATIO: Gauge = "ratio", "Ratio.";
}

fn write(mut page: MetricsPage<'_>, texts: &[(String, i64, u32)]) -> String {
    let mut counters: BTreeMap<_, u64> = BTreeMap::new();
    let (mut gauges, mut times) = (BTreeMap::new(), BTreeMap::new());
    for (text, value, count) in texts {
        let labels = [("a", text.clone()), ("b_c", format!("{text}\"\n"))];
        *counters.entry(labels.clone()).or_default() += u64::from(*count);
        gauges.insert(labels.clone(), *value);
        let times = times.entry(labels).or_insert_with(|| Histogram::new(&[0.5, 1e9]));
        times.observe(f64::from(*count));
    }
    page.write(&THINGS, counters);
    page.write(&SIZE, gauges);
    page.write_histograms(&TIMES, times);
    page.write_by(&NOTHING, "a", [("", 0); 0]);
    page.write_one(&ALONE, 7);
    page.write_by(&RATIO, "of", [("a", Float(0.25))]);
    page.finish()
}

#[test]
fn a_page_is_written_as_the_formats_say() {
    let text = |format| {
        let mut page = MetricsPage::new(format);
        page.write_by(&THINGS, "a", [("x\"\\\n", 1), ("\u{e4}\r", 2)]);
        let mut times = Histogram::new(&[0.5, 1e9]);
        for time in [0.5, 0.75] {
            times.observe(time);
        }
        page.write_histograms(&TIMES, [([("a", "x")], &times)]);
        page.write_one(&SIZE, Float(86_400_000_000_000_000_000.0));
        page.finish()
    };
    let samples = [
        "things_total{a=\"x\\\"\\\\\\n\"} 1\nthings_total{a=\"\u{e4}\r\"} 2\n",
        "times_sum{a=\"x\"} 1.25\ntimes_count{a=\"x\"} 2\ntimes_bucket{le=\"0.5\",a=\"x\"} 1\n\
         times_bucket{le=\"1000000000.0\",a=\"x\"} 2\ntimes_bucket{le=\"+Inf\",a=\"x\"} 2\n",
        "size_bytes 86400000000000000000.0\n",
    ];
    let [things, times, size] = samples;
    let rest = format!(
        "# HELP times Times.\n# TYPE times histogram\n{times}# HELP size_bytes Size \"in bytes\".\n# TYPE size_bytes gauge\n{size}"
    );
    let expected = format!("# HELP things_total Things.\n# TYPE things_total counter\n{things}{rest}");
    assert_eq!(text(MetricsFormat::Text), expected);
    let expected = format!("# HELP things Things.\n# TYPE things counter\n{things}{rest}# EOF\n");
    assert_eq!(text(MetricsFormat::OpenMetrics), expected);
}

#[test]
fn a_page_takes_only_the_metrics_that_it_is_for() {
    let texts = [("x".to_owned(), 1, 1)];
    for (names, expected) in [
        (vec!["things_total"], vec!["things_total"]),
        (vec!["alone_total", "times"], vec!["times", "alone_total"]),
        (vec!["things"], vec![]),
    ] {
        let only: BTreeSet<String> = names.into_iter().map(str::to_owned).collect();
        let scrape = reader::text(&write(MetricsPage::only(MetricsFormat::Text, &only), &texts));
        let found: Vec<&str> = scrape.families.iter().map(|((name, ..), _)| name.as_str()).collect();
        assert_eq!(found, expected);
    }
    let all = BTreeSet::new();
    assert_eq!(
        write(MetricsPage::only(MetricsFormat::Text, &all), &texts),
        write(MetricsPage::new(MetricsFormat::Text), &texts)
    );
}

proptest! {
    #[test]
    fn both_formats_have_the_same_samples(texts in vec((any_text(), any::<i64>(), any::<u32>()), 1..4)) {
        let [text, open_metrics] = MetricsFormat::ALL.map(|format| write(MetricsPage::new(format), &texts));
        let (text, open_metrics) = (reader::text(&text), reader::open_metrics(&open_metrics));
        prop_assert_eq!(text.samples(), open_metrics.samples());
        // The labels are those that the page was given.
        let written = |name: &str| -> Vec<String> {
            let samples = text.samples().into_iter().filter(|(sample, ..)| sample == name);
            let mut values: Vec<String> = samples.map(|(_, labels, _)| labels[0].1.clone()).collect();
            values.sort();
            values
        };
        let mut given: Vec<String> = texts.iter().map(|(text, ..)| text.clone()).collect();
        given.sort();
        given.dedup();
        prop_assert_eq!(&written("things_total"), &given);
        prop_assert_eq!(&written("size_bytes"), &given);
        let names: Vec<&str> = text.families.iter().map(|((name, ..), _)| name.as_str()).collect();
        prop_assert_eq!(names, ["things_total", "size_bytes", "times", "alone_total", "ratio"]);
        let helps = |scrape: &reader::Scrape| scrape.families.iter().map(|((_, _, help), _)| help.clone()).collect::<Vec<_>>();
        prop_assert_eq!(helps(&text), helps(&open_metrics));
    }
}
