//! A registry in both formats.

use divvy_exposition::{Format, encode};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
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

fn registry(texts: &[(String, i64, u32)]) -> Registry {
    type Labels = Vec<(String, String)>;
    let counters = Family::<Labels, Counter>::default();
    let gauges = Family::<Labels, Gauge>::default();
    let times = Family::<Labels, Histogram>::new_with_constructor(|| Histogram::new([0.5, 1e9]));
    let mut registry = Registry::default();
    for (text, value, count) in texts {
        let labels = vec![("a".to_owned(), text.clone()), ("b_c".to_owned(), format!("{text}\"\n"))];
        counters.get_or_create(&labels).inc_by(u64::from(*count));
        gauges.get_or_create(&labels).set(*value);
        times.get_or_create(&labels).observe(f64::from(*count));
    }
    registry.register("things", "Things", counters);
    registry.register_with_unit("size", "Size", Unit::Bytes, gauges);
    registry.register("times", "Times", times);
    let build = texts.iter().take(1).map(|(text, ..)| ("version".to_owned(), text.clone()));
    registry.register("build", "Build", Info::new(build.collect::<Labels>()));
    registry.register("alone", "Alone", ConstCounter::new(7_u64));
    registry
}

proptest! {
    #[test]
    fn both_formats_have_the_same_samples(texts in vec((any_text(), any::<i64>(), any::<u32>()), 1..4)) {
        let (first, second) = (registry(&texts), {
            let mut second = Registry::default();
            second.register("second", "From another registry", Gauge::<i64>::default());
            second
        });
        let [text, open_metrics] = Format::ALL.map(|format| encode(&[&first, &second], format).expect("encoded"));
        let (text, open_metrics) = (reader::text(&text), reader::open_metrics(&open_metrics));
        prop_assert_eq!(text.samples(), open_metrics.samples());
        // The labels are those that the registry was given.
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
        prop_assert_eq!(names, ["things_total", "size_bytes", "times", "build_info", "alone_total", "second"]);
        let helps = |scrape: &reader::Scrape| scrape.families.iter().map(|((_, _, help), _)| help.clone()).collect::<Vec<_>>();
        prop_assert_eq!(helps(&text), helps(&open_metrics));
    }
}
