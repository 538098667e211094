//! Fragmentation Gradient Descent (Weng et al., "Beware of Fragmentation", USENIX ATC 2023), with the rounding of the published
//! program (`plugin/fgd_score.go` of github.com/hkust-adsl/kubernetes-scheduler-simulator). The score is a sigmoid of the
//! decrease of the fragmentation, as an integer from 0 to 100. The rounding matters: without it, the published results cannot be
//! reproduced.

use super::fragments::Fragments;
use super::rule::{CostRule, KeptStates, RulePlace};
use super::state::StateView;
use super::{Mix, NodeShape};

#[derive(Debug)]
pub(crate) struct Fgd {
    typical: Mix,
    epoch: u32,
    /// By shape number: the fragments of nodes with that shape.
    fragments: Vec<Fragments>,
}

impl Fgd {
    pub(crate) fn new() -> Fgd {
        Fgd {
            typical: Mix::new(),
            epoch: 0,
            fragments: Vec::new(),
        }
    }

    fn score(&self, place: &RulePlace<'_>, level: Option<u32>) -> i64 {
        let Some(fragments) = self.fragments.get(place.number()) else {
            return EVEN;
        };
        let after = place.state.after(place.demand, place.amount, level);
        let fall = fragments.amount(place.state) - fragments.amount(&after);
        points(fall, i128::from(place.shape.gpu_size) * i128::from(fragments.pods()))
    }
}

impl CostRule for Fgd {
    fn view(&self) -> StateView {
        // On a tie, the first GPU is taken, so the policy must see which GPU has how much left.
        StateView {
            positions: true,
            kinds: false,
        }
    }

    fn set_mix(&mut self, mix: &Mix, shapes: &[NodeShape]) {
        self.typical = mix.typical();
        self.fragments.clear();
        self.epoch += 1;
        shapes.iter().for_each(|shape| self.add_shape(shape));
    }

    fn add_shape(&mut self, shape: &NodeShape) {
        self.fragments.push(Fragments::of(&self.typical, shape));
    }

    fn set_shapes(&mut self, shapes: &[(NodeShape, u64)]) {
        self.fragments.clear();
        self.epoch += 1;
        shapes.iter().for_each(|(shape, _)| self.add_shape(shape));
    }

    fn epoch(&self) -> u32 {
        self.epoch
    }

    fn cost(&mut self, place: &RulePlace<'_>, _kept: &mut KeptStates) -> i64 {
        if !place.takes_part() {
            return -self.score(place, None);
        }
        let scores = place.state.levels(place.amount).map(|level| self.score(place, Some(level)));
        -scores.max().unwrap_or(0)
    }

    fn level(&mut self, place: &RulePlace<'_>) -> Option<u32> {
        let mut best: Option<(i64, u32)> = None;
        for level in place.state.levels(place.amount) {
            let score = self.score(place, Some(level));
            if best.is_none_or(|(most, _)| score > most) {
                best = Some((score, level));
            }
        }
        best.map(|(_, level)| level)
    }
}

/// The score when the fragmentation does not change.
const EVEN: i64 = 50;

/// Return `100 / (1 + exp(-fall / unit))`, rounded down. The result is at least k if and only if `fall / unit` is at least ln(k /
/// (100 - k)).
fn points(fall: i64, unit: i128) -> i64 {
    if unit == 0 {
        return EVEN;
    }
    let fall = i128::from(fall) * 1_000_000_000_000;
    let reached = if fall >= 0 {
        50 + LOGITS.partition_point(|logit| i128::from(*logit) * unit <= fall)
    } else {
        49 - LOGITS.partition_point(|logit| i128::from(*logit) * unit < -fall)
    };
    i64::try_from(reached).unwrap_or(EVEN)
}

/// The values of ln(k / (100 - k)) in units of 1e-12, rounded down, for k from 51 to 99.
const LOGITS: [u64; 49] = [
    40_005_334_613,
    80_042_707_673,
    120_144_311_842,
    160_342_650_075,
    200_670_695_462,
    241_162_056_816,
    281_851_152_140,
    322_773_392_263,
    363_965_377_201,
    405_465_108_108,
    447_312_218_043,
    489_548_225_318,
    532_216_813_747,
    575_364_144_903,
    619_039_208_406,
    663_294_217_410,
    708_185_057_924,
    753_771_802_376,
    800_119_300_112,
    847_297_860_387,
    895_384_047_054,
    944_461_608_840,
    994_622_575_144,
    1_045_968_555_182,
    1_098_612_288_668,
    1_152_679_509_938,
    1_208_311_205_924,
    1_265_666_373_331,
    1_324_925_414_743,
    1_386_294_361_119,
    1_450_010_175_505,
    1_516_347_489_368,
    1_585_627_263_740,
    1_658_228_076_603,
    1_734_601_055_388,
    1_815_289_966_638,
    1_900_958_761_193,
    1_992_430_164_690,
    2_090_741_096_933,
    2_197_224_577_336,
    2_313_634_929_180,
    2_442_347_035_369,
    2_586_689_344_097,
    2_751_535_313_041,
    2_944_438_979_166,
    3_178_053_830_347,
    3_476_098_689_835,
    3_891_820_298_110,
    4_595_119_850_134,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_the_sigmoid_rounded_down() {
        for tenths in -800..=800 {
            // Slightly off every tenth, so that no float is close to an integer.
            let fall = tenths * 100 + 3;
            let exact = 100.0 / (1.0 + (-(fall as f64) / 10_000.0).exp());
            assert_eq!(points(fall, 10_000), exact.floor() as i64, "{fall}");
        }
        assert_eq!(points(0, 10_000), 50, "no change is exactly half");
        assert_eq!(points(-1, 10_000), 49);
    }
}
