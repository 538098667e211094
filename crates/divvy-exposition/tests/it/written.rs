//! Metrics under names of others, and any text.

use divvy_exposition::{Decimal, Metric, MetricKind, MetricsFormat, MetricsPage};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::formats::any_text;
use crate::reader;

divvy_exposition::metrics! {
    ENERGY: Counter = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "Energy \"since\" boot \\ in\nmJ.";
    POWER: Gauge = "DCGM_FI_DEV_POWER_USAGE", "Power.";
    X: Gauge = "x", "X.";
}

#[test]
fn a_metric_is_described_and_its_samples_follow() {
    let mut page = MetricsPage::new(MetricsFormat::Text);
    let energy = [
        ([("gpu", "0"), ("UUID", "GPU-\"\\\n\u{fc}")], u64::MAX),
        ([("gpu", "1"), ("UUID", "")], 0),
    ];
    page.write(&ENERGY, energy);
    let milliwatts = Decimal {
        digits: 62_005,
        decimals: 3,
    };
    page.write_one(&POWER, milliwatts);
    assert_eq!(
        page.finish(),
        "# HELP DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION Energy \"since\" boot \\\\ in\\nmJ.\n\
         # TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter\n\
         DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu=\"0\",UUID=\"GPU-\\\"\\\\\\n\u{fc}\"} 18446744073709551615\n\
         DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu=\"1\",UUID=\"\"} 0\n\
         # HELP DCGM_FI_DEV_POWER_USAGE Power.\n\
         # TYPE DCGM_FI_DEV_POWER_USAGE gauge\n\
         DCGM_FI_DEV_POWER_USAGE 62.005\n"
    );
}

#[test]
fn decimals_are_exact() {
    let cases: [(i128, u8, &str); 8] = [
        (0, 0, "0"),
        (0, 3, "0.000"),
        (5, 3, "0.005"),
        (-5, 1, "-0.5"),
        (-12_345, 2, "-123.45"),
        (7, 0, "7"),
        (i128::MIN, 0, "-170141183460469231731687303715884105728"),
        (1, 40, "0.0000000000000000000000000000000000000001"),
    ];
    for (digits, decimals, expected) in cases {
        assert_eq!(Decimal { digits, decimals }.to_string(), expected);
    }
}

proptest! {
    #[test]
    fn any_text_survives_as_a_labels_value(values in vec((any_text(), any::<i64>()), 1..5)) {
        let mut page = MetricsPage::new(MetricsFormat::Text);
        page.write(&X, values.iter().map(|(value, number)| ([("a", value), ("b", value)], number)));
        let text = page.finish();
        let scrape = reader::text(&text);
        let read: Vec<(String, i64)> = scrape
            .samples()
            .into_iter()
            .map(|(_, labels, number)| (labels[1].1.clone(), number.parse().expect("an integer")))
            .collect();
        prop_assert_eq!(&read, &values);
    }

    #[test]
    fn any_help_text_stays_in_its_line(help in any_text()) {
        // A declared help text lives as long as the program.
        let help: &'static str = help.leak();
        let metric = Metric { name: "x", kind: MetricKind::Gauge, help };
        let mut page = MetricsPage::new(MetricsFormat::Text);
        page.write_one(&metric, 1);
        let text = page.finish();
        let scrape = reader::text(&text);
        prop_assert_eq!(scrape.samples().len(), 1);
        let found = scrape.families[0].0.2.replace("\\\\", "\u{1}\u{2}").replace("\\n", "\n").replace("\u{1}\u{2}", "\\");
        prop_assume!(!help.contains('\u{1}'));
        prop_assert_eq!(found, help);
    }
}
