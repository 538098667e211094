//! GPU Performance Monitoring of GPUs from Hopper on: the driver compares two samples of its counters.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;

use crate::Gpm;
use crate::gauges::TOO_MANY_BYTES;

/// Over less time than this, a mean says little, and two readers would shorten each other's time.
const SHORTEST: Duration = Duration::from_secs(1);
/// A mean over more time than this says little about now.
const LONGEST: Duration = Duration::from_secs(60);

/// The metrics, in the order in which [`of_values`] takes their values.
pub(super) const METRICS: [sys::nvmlGpmMetricId_t; 10] = [
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_GRAPHICS_UTIL,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_UTIL,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_OCCUPANCY,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_DRAM_BW_UTIL,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_FP64_UTIL,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_FP32_UTIL,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_FP16_UTIL,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_PCIE_RX_PER_SEC,
];

/// The latest sample of each GPU and MIG device, by UUID.
#[derive(Debug)]
pub(in super::super) struct LatestSamples<S>(BTreeMap<String, KeptSample<S>>);

impl<S> Default for LatestSamples<S> {
    fn default() -> LatestSamples<S> {
        LatestSamples(BTreeMap::new())
    }
}

#[derive(Debug)]
struct KeptSample<S> {
    sample: S,
    at: Instant,
    /// What the comparison of this sample with the one before gave.
    result: Option<Gpm>,
}

impl<S> LatestSamples<S> {
    /// Forget all GPUs and MIG devices except those for which `is_there` is true.
    pub(super) fn keep(&mut self, is_there: impl Fn(&str) -> bool) {
        self.0.retain(|uuid, _| is_there(uuid));
    }

    /// Return the means over the time since the question before. The first question has no answer, and a question that comes soon gets the answer of
    /// the one before. `take` returns `None` if the GPU or the driver has no samples.
    pub(super) fn gpm(
        &mut self,
        uuid: &str,
        now: Instant,
        take: impl FnOnce() -> Result<Option<S>, NvmlError>,
        compare: impl FnOnce(&S, &S) -> Result<Option<Gpm>, NvmlError>,
    ) -> Result<Option<Gpm>, NvmlError> {
        let age = |kept: &KeptSample<S>| now.saturating_duration_since(kept.at);
        if let Some(kept) = self.0.get(uuid).filter(|kept| age(kept) < SHORTEST) {
            return Ok(kept.result);
        }
        let before = self.0.remove(uuid).filter(|kept| age(kept) <= LONGEST);
        let Some(sample) = take()? else { return Ok(None) };
        let result = match before {
            Some(before) => compare(&before.sample, &sample)?,
            None => None,
        };
        self.0.insert(uuid.to_owned(), KeptSample { sample, at: now, result });
        Ok(result)
    }
}

/// Convert the values of [`METRICS`]. A value that is missing, or that no GPU can have, is left out.
pub(super) fn of_values(values: [Option<f64>; METRICS.len()]) -> Gpm {
    let [graphics, sm, occupancy, tensor, dram, fp64, fp32, fp16, tx, rx] = values;
    Gpm {
        graphics_active: parts_per_million(graphics),
        sm_active: parts_per_million(sm),
        sm_occupancy: parts_per_million(occupancy),
        tensor_active: parts_per_million(tensor),
        dram_active: parts_per_million(dram),
        fp64_active: parts_per_million(fp64),
        fp32_active: parts_per_million(fp32),
        fp16_active: parts_per_million(fp16),
        pcie_tx_bytes: bytes(tx),
        pcie_rx_bytes: bytes(rx),
    }
}

/// Convert a percentage. Above 100 it is left out, except for the inaccuracy of a division.
fn parts_per_million(percent: Option<f64>) -> Option<u32> {
    let parts = (percent? * 10_000.0).round();
    (0.0..=1_000_000.0).contains(&parts).then_some(parts as u32)
}

/// Convert a rate in MiB/s.
fn bytes(mib: Option<f64>) -> Option<u64> {
    let bytes = (mib? * 1_048_576.0).round();
    (0.0..TOO_MANY_BYTES as f64).contains(&bytes).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn active(parts: u32) -> Option<Gpm> {
        Some(Gpm {
            graphics_active: Some(parts),
            sm_active: None,
            sm_occupancy: None,
            tensor_active: None,
            dram_active: None,
            fp64_active: None,
            fp32_active: None,
            fp16_active: None,
            pcie_tx_bytes: None,
            pcie_rx_bytes: None,
        })
    }

    #[test]
    fn an_answer_is_about_one_to_sixty_seconds() {
        let start = Instant::now();
        // When each question comes in ms, and between which samples the answer compares. A sample is named by its time.
        for (questions, expected) in [
            (&[0][..], &[None][..]),
            (&[0, 999, 1000], &[None, None, Some((0, 1000))]),
            (&[0, 60_000, 60_999], &[None, Some((0, 60_000)), Some((0, 60_000))]),
            (&[0, 60_001, 60_002, 61_001], &[None, None, None, Some((60_001, 61_001))]),
            (
                &[0, 1000, 1500, 1999, 2000],
                &[None, Some((0, 1000)), Some((0, 1000)), Some((0, 1000)), Some((1000, 2000))],
            ),
            (&[5000, 6000, 5500], &[None, Some((5000, 6000)), Some((5000, 6000))]),
        ] {
            let mut samples = LatestSamples::default();
            for (at, expected) in questions.iter().zip(expected) {
                let mut compared = None;
                let answer = samples.gpm(
                    "GPU-a",
                    start + Duration::from_millis(*at),
                    || Ok(Some(*at)),
                    |from, to| {
                        compared = Some((*from, *to));
                        Ok(active((to - from) as u32))
                    },
                );
                let expected: &Option<(u64, u64)> = expected;
                let length = expected.map(|(from, to)| (to - from) as u32);
                assert_eq!(answer.expect("an answer"), length.and_then(active), "{questions:?} at {at}");
                assert!(
                    compared.is_none() || compared == *expected,
                    "{questions:?} at {at}: {compared:?}"
                );
            }
        }
    }

    #[test]
    fn each_gpu_has_its_own_sample() {
        let (start, mut samples) = (Instant::now(), LatestSamples::default());
        let mut ask = |uuid: &str, seconds: u64| {
            let now = start + Duration::from_secs(seconds);
            let answer = samples.gpm(uuid, now, || Ok(Some(seconds)), |from, to| Ok(active((to - from) as u32)));
            answer.expect("an answer")
        };
        let answers = [("GPU-a", 0), ("GPU-b", 3), ("GPU-a", 5), ("GPU-b", 5)].map(|(uuid, at)| ask(uuid, at));
        assert_eq!(answers, [None, None, active(5), active(2)]);
    }

    /// A lost GPU is an error.
    #[test]
    fn a_gpu_without_samples_has_no_answer() {
        let (start, mut samples) = (Instant::now(), LatestSamples::<u32>::default());
        let mut ask = |seconds: u64, taken: Result<Option<u32>, NvmlError>| {
            let now = start + Duration::from_secs(seconds);
            samples.gpm("GPU-a", now, || taken, |_, _| Ok(active(1)))
        };
        assert!(matches!(ask(0, Ok(Some(1))), Ok(None)));
        assert!(matches!(ask(2, Ok(None)), Ok(None)));
        assert!(
            matches!(ask(4, Ok(Some(1))), Ok(None)),
            "the sample before is too old to be known"
        );
        assert!(matches!(ask(6, Err(NvmlError::GpuLost)), Err(NvmlError::GpuLost)));
        assert!(matches!(ask(7, Ok(Some(1))), Ok(None)), "nothing is compared across the loss");
        assert_eq!(ask(8, Ok(Some(1))).expect("an answer"), active(1));
    }

    #[test]
    fn values_that_no_gpu_can_have_are_left_out() {
        for (percent, parts) in [
            (0.0, Some(0)),
            (-0.0, Some(0)),
            (12.345_67, Some(123_457)),
            (100.0, Some(1_000_000)),
            (100.000_000_1, Some(1_000_000)),
            (100.001, None),
            (-0.001, None),
            (f64::NAN, None),
            (f64::INFINITY, None),
            (f64::NEG_INFINITY, None),
            (f64::MAX, None),
        ] {
            assert_eq!(parts_per_million(Some(percent)), parts, "{percent}");
        }
        for (mib, expected) in [
            (0.0, Some(0)),
            (1.5, Some(3 << 19)),
            (-1.0, None),
            (f64::NAN, None),
            (f64::INFINITY, None),
            (1e18, None),
        ] {
            assert_eq!(bytes(Some(mib)), expected, "{mib}");
        }
        let mut values = [Some(50.0); METRICS.len()];
        (values[3], values[9]) = (Some(f64::NAN), None);
        let gpm = of_values(values);
        let ratios = [
            gpm.graphics_active,
            gpm.sm_active,
            gpm.sm_occupancy,
            gpm.dram_active,
            gpm.fp64_active,
            gpm.fp32_active,
            gpm.fp16_active,
        ];
        assert_eq!(ratios, [Some(500_000); 7]);
        assert_eq!(
            (gpm.tensor_active, gpm.pcie_tx_bytes, gpm.pcie_rx_bytes),
            (None, Some(50 << 20), None)
        );
    }
}
