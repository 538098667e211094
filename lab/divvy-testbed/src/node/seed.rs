//! The single source of randomness: a small generator with a seed, so that a run can be repeated.

/// A SplitMix64 generator (Steele, Lea, Flood 2014). It is not for secrets.
#[derive(Debug, Clone)]
pub struct Seed(u64);

impl Seed {
    /// Create a generator. The same seed yields the same numbers.
    pub fn new(seed: u64) -> Seed {
        Seed(seed)
    }

    /// Create one of a run's several generators, chosen by name.
    pub fn named(seed: u64, name: &str) -> Seed {
        // FNV-1a. The seed is mixed first, because adjacent seeds and similar names differ in the same few bits.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Seed(Seed(seed).next_u64() ^ hash)
    }

    /// Create another generator that is independent of this generator's later numbers.
    pub fn fork(&mut self) -> Seed {
        Seed(self.next_u64())
    }

    /// Return the next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Return a number below `bound`, or 0 if `bound` is 0. The tiny bias of the remainder does not matter here.
    pub fn below(&mut self, bound: usize) -> usize {
        if bound == 0 {
            return 0;
        }
        let bound = bound as u64;
        usize::try_from(self.next_u64() % bound).unwrap_or(0)
    }

    /// Shuffle the items (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }

    /// Return `digits` hexadecimal digits.
    pub fn hex(&mut self, digits: usize) -> String {
        let mut text = String::with_capacity(digits + 16);
        while text.len() < digits {
            text.push_str(&format!("{:016x}", self.next_u64()));
        }
        text.truncate(digits);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::Seed;

    #[test]
    fn neighbours_with_neighbouring_seeds_make_different_choices() {
        let names = ["n0", "n1", "n2", "n3", "a-node-with-a-name-of-many-letters.example.com"];
        let seeds = (0..8).flat_map(|seed| names.map(|name| Seed::named(seed, name).hex(64)));
        let different: std::collections::BTreeSet<String> = seeds.collect();
        assert_eq!(different.len(), 8 * names.len());
    }

    #[test]
    fn the_same_seed_gives_the_same_run() {
        let (mut a, mut b) = (Seed::new(7), Seed::new(7));
        let mut first: Vec<u32> = (0..50).collect();
        let mut second = first.clone();
        a.shuffle(&mut first);
        b.shuffle(&mut second);
        assert_eq!(first, second);
        assert_ne!(first, (0..50).collect::<Vec<_>>());
        assert_eq!(a.hex(64).len(), 64);
    }
}
