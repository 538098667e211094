use super::fragments::Fragments;
use super::state::View;
use super::{Free, Mix, Shape};

/// FGD's measure of a cluster's fragmentation: the idle GPU capacity that the pods of a mix cannot use, weighted by the frequency
/// of these pods. Only reports use it; policies keep their own sums.
#[derive(Debug, Clone)]
pub struct Fragmentation {
    mix: Mix,
    shapes: Vec<(Shape, Fragments)>,
}

impl Fragmentation {
    /// Create the measure for a mix. The published measure uses [`Mix::typical`] of a complete list of pods.
    pub fn of(mix: Mix) -> Fragmentation {
        let shapes = Vec::new();
        Fragmentation { mix, shapes }
    }

    /// Return the fragmentation of all these nodes together, in thousandths of a GPU. It is 0 for a mix without pods.
    pub fn milli<'a>(&mut self, nodes: impl Iterator<Item = (&'a Shape, &'a Free)>) -> u64 {
        if self.mix.total() == 0 {
            return 0;
        }
        // The amounts of one shape are integers over the same divisor. They are rounded down once per shape.
        let mut sums: Vec<i128> = Vec::new();
        for (shape, free) in nodes.filter(|(shape, _)| shape.gpus > 0) {
            let number = self.shapes.iter().position(|(known, _)| known == shape).unwrap_or_else(|| {
                self.shapes.push((*shape, Fragments::of(&self.mix, shape)));
                self.shapes.len() - 1
            });
            sums.resize(self.shapes.len(), 0);
            let state = free.state(u32::try_from(number).unwrap_or(u32::MAX), View::default());
            sums[number] += i128::from(self.shapes[number].1.amount(&state));
        }
        let milli = sums.iter().zip(&self.shapes).map(|(sum, (shape, fragments))| {
            let divisor = i128::from(fragments.pods()) * i128::from(shape.gpu_size.max(1));
            u64::try_from(1000 * sum / divisor.max(1)).unwrap_or(0)
        });
        milli.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Demand, GpuSet, ModelSet, Models, Share};
    use super::*;

    #[test]
    fn what_no_pod_of_the_mix_can_use_is_a_fragment_and_what_all_can_is_none() {
        let model = Models::default().number("T4").expect("the first");
        let shape = Shape {
            model,
            gpus: 2,
            gpu_size: 1000,
            cpu_milli: 8000,
            memory_mib: 1024,
        };
        let half = Demand {
            cpu_milli: 1000,
            memory_mib: 0,
            gpus: 1,
            share: Share::Milli(500),
            models: ModelSet::ANY,
        };
        let whole = Demand {
            share: Share::WHOLE,
            ..half
        };
        let mut free = shape.empty();
        assert!(free.take(
            &shape,
            &Demand {
                share: Share::Milli(700),
                ..half
            },
            GpuSet(1)
        ));
        let milli = |pods: &[Demand]| {
            let mut fragmentation = Fragmentation::of(pods.iter().collect());
            fragmentation.milli([(&shape, &free), (&shape, &free)].into_iter())
        };
        // 300 on each of two nodes is too little for half a GPU. Whole GPUs fit on the other GPU.
        assert_eq!(milli(&[half]), 600);
        assert_eq!(milli(&[whole, half]), 600);
        let large = Demand { gpus: 2, ..whole };
        assert_eq!(milli(&[large]), 2600);
        assert_eq!(milli(&[large, whole]), (2600 + 600) / 2);
        assert_eq!(milli(&[]), 0);
    }
}
