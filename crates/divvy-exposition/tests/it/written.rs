//! Families that are written by hand.

use divvy_exposition::{Decimal, Format, Kind, encode, family};
use prometheus_client::registry::Registry;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::formats::any_text;
use crate::reader;

#[test]
fn a_family_is_described_and_its_samples_follow() {
    let mut text = String::new();
    let mut energy = family(
        &mut text,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        Kind::Counter,
        "Energy \"since\" boot \\ in\nmJ.",
    );
    energy.sample([("gpu", "0"), ("UUID", "GPU-\"\\\n\u{fc}")], u64::MAX);
    energy.sample([("gpu", "1"), ("UUID", "")], 0_u32);
    let milliwatts = Decimal {
        digits: 62_005,
        decimals: 3,
    };
    family(&mut text, "DCGM_FI_DEV_POWER_USAGE", Kind::Gauge, "Power.").sample([], milliwatts);
    assert_eq!(
        text,
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
        let mut text = encode(&[&Registry::default()], Format::Text).expect("encoded");
        let mut written = family(&mut text, "x", Kind::Gauge, "X.");
        for (value, number) in &values {
            written.sample([("a", value.as_str()), ("b", value)], *number);
        }
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
        let mut text = String::new();
        family(&mut text, "x", Kind::Gauge, &help).sample([], 1_i64);
        let scrape = reader::text(&text);
        prop_assert_eq!(scrape.samples().len(), 1);
        let found = scrape.families[0].0.2.replace("\\\\", "\u{1}\u{2}").replace("\\n", "\n").replace("\u{1}\u{2}", "\\");
        prop_assume!(!help.contains('\u{1}'));
        prop_assert_eq!(found, help);
    }
}
