/// Random numbers from a seed, the same on every machine. Integers come from SplitMix64 (Steele, Lea, Flood; OOPSLA 2014), and
/// exponential variates from von Neumann's comparison method, which needs no logarithm.
#[derive(Debug, Clone)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random { state: seed }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = self.state;
        let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// Return a random number below `end`. All have the same chance, up to one in four billion.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }

    /// Return all numbers below `end` in random order (Fisher-Yates shuffle).
    pub(crate) fn permutation(&mut self, end: usize) -> Vec<usize> {
        let mut numbers: Vec<usize> = (0..end).collect();
        for last in (1..end).rev() {
            let other = self.below(last + 1);
            numbers.swap(last, other);
        }
        numbers
    }

    /// Return an exponentially distributed number with mean 1, in units of 2^-32.
    pub(crate) fn exponential(&mut self) -> u64 {
        let mut whole = 0;
        loop {
            let first = self.next();
            let mut last = first;
            let mut fell = 0;
            loop {
                let next = self.next();
                if next >= last {
                    break;
                }
                last = next;
                fell += 1;
            }
            // A falling run of odd length, including the first number, is accepted.
            if fell % 2 == 0 {
                return (whole << 32) | (first >> 32);
            }
            whole += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_variates_have_mean_one_and_the_right_tail() {
        let mut random = Random::new(7);
        let draws: Vec<f64> = (0..200_000).map(|_| random.exponential() as f64 / 4_294_967_296.0).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        assert!((mean - 1.0).abs() < 0.01, "{mean}");
        for beyond in [0.5, 1.0, 2.0, 4.0] {
            let share = draws.iter().filter(|draw| **draw > beyond).count() as f64 / draws.len() as f64;
            assert!((share - (-beyond).exp()).abs() < 0.005, "{beyond}: {share}");
        }
    }
}
